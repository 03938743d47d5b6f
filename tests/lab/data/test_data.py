"""Batches: the right rows, the same for any number of ranks, each row once an epoch, train and validation apart."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foamlab.config import DataConfig
from foamlab.data import Split, documents
from foamlab.data.corpus import Corpus, permuted, prepare
from foamlab.errors import UserError

WORDS = ["fold", "mean", "block", "residual", "moment", "été", "数", "x = 1", "\n\n", "    return"]


def document(i: int) -> str:
    """A text that names its number and differs in length from its neighbours."""
    draw = np.random.default_rng(i)
    return f"document {i}: " + " ".join(draw.choice(WORDS, size=5 + i % 37))


def write(folder: Path, documents: int = 200) -> str:
    folder.mkdir(exist_ok=True)
    for i in range(documents):
        (folder / f"{i:04}.txt").write_text(document(i), "utf-8")
    return f"text:{folder}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write(root / "texts")
    return root


def corpus(place: Path, seed: int = 0, **changes: Any) -> Corpus:
    settings: dict[str, Any] = {"tokenizer": "bytes", "sequence": 32, "validation": 0.2, "cache": str(place / "cache")}
    return prepare(DataConfig(name=f"text:{place / 'texts'}", **{**settings, **changes}), seed)


def documents_of(corpus: Corpus, split: Split) -> list[str]:
    tokens, offsets = corpus.tokens(split), corpus.offsets(split)
    assert offsets[0] == 0 and offsets[-1] == len(tokens)
    assert (tokens[offsets[1:] - 1] == corpus.tokenizer.eos_id).all()
    return [corpus.tokenizer.decode(tokens[a:b]) for a, b in pairwise(offsets)]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_every_document_is_in_exactly_one_split_and_whole(place: Path, tokenizer: str) -> None:
    data = corpus(place, tokenizer=tokenizer)
    train, validation = documents_of(data, "train"), documents_of(data, "validation")
    assert sorted(train + validation) == sorted(document(i) for i in range(200))
    assert 20 <= len(validation) <= 60  # 40 expected; 4 standard deviations are 23
    assert not data.warnings


def test_split_of_a_document_stays_when_others_come(place: Path, tmp_path: Path) -> None:
    write(tmp_path / "more", 260)
    more = prepare(DataConfig(f"text:{tmp_path / 'more'}", "bytes", 32, validation=0.2, cache=str(tmp_path)), 0)
    assert set(documents_of(corpus(place), "validation")) <= set(documents_of(more, "validation"))
    assert set(documents_of(corpus(place), "train")) <= set(documents_of(more, "train"))


def test_packed_rows_cover_every_token_once_as_label(place: Path) -> None:
    data = corpus(place)
    n, tokens = data.rows("train"), data.tokens("train")
    inputs, labels = data.batch("train", 0, n)
    assert inputs.dtype == labels.dtype == np.int64 and inputs.shape == labels.shape == (n, 32)
    rows = {tuple(a): tuple(b) for a, b in zip(inputs.tolist(), labels.tolist())}
    for i in range(n):
        assert rows[tuple(tokens[32 * i : 32 * i + 32].tolist())] == tuple(tokens[32 * i + 1 : 32 * i + 33].tolist())


def test_paper_rows_are_documents_truncated_and_padded(place: Path) -> None:
    data = corpus(place, mode="paper", sequence=90)
    tokens, offsets, pad = data.tokens("train"), data.offsets("train"), data.tokenizer.pad_id
    n = data.rows("train")
    inputs, labels = data.batch("train", 0, n)
    expected, lengths = set(), []
    for a, b in pairwise(offsets):
        row = tokens[a : min(b, a + 91)].tolist()
        lengths.append(b - a)
        ids = (row + [pad] * 90)[:90]
        expected.add((*ids, *(row[1:] + [-100] * 90)[:90]))
    assert {(*a, *b) for a, b in zip(inputs.tolist(), labels.tolist())} == expected
    assert min(lengths) < 90 < max(lengths), "the test needs short and long documents"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world=st.integers(1, 8),
    per_rank=st.integers(1, 6),
    step=st.integers(0, 10**6),
    seed=st.integers(-5, 2**64),
    split=st.sampled_from(["train", "validation"]),
    mode=st.sampled_from(["packed", "paper"]),
)
def test_ranks_together_are_the_single_batch(
    place: Path, world: int, per_rank: int, step: int, seed: int, split: Split, mode: str
) -> None:
    data = corpus(place, seed, mode=mode)
    whole = data.batch(split, step, world * per_rank)
    parts = [data.batch(split, step, world * per_rank, rank, world) for rank in range(world)]
    for i in (0, 1):
        assert np.array_equal(whole[i], np.concatenate([part[i] for part in parts]))
    again = corpus(place, seed, mode=mode).batch(split, step, world * per_rank)
    assert np.array_equal(whole[0], again[0]) and np.array_equal(whole[1], again[1])


def test_an_epoch_reads_each_row_once_and_the_next_in_another_order(place: Path) -> None:
    data = corpus(place)
    n, rows = data.rows("train"), 7
    assert n % rows, "the test needs epochs that end inside a step"
    stream = np.concatenate([data.batch("train", step, rows)[0] for step in range(3 * n // rows + 1)])
    epochs = [[tuple(row) for row in stream[e * n : (e + 1) * n].tolist()] for e in range(3)]
    assert len(set(epochs[0])) == n == len(set(epochs[1]))
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_seed_changes_training_order_but_not_validation(place: Path) -> None:
    one, two = corpus(place, 1), corpus(place, 2)
    assert not np.array_equal(one.batch("train", 0, 16)[0], two.batch("train", 0, 16)[0])
    assert np.array_equal(one.batch("validation", 0, 16)[0], two.batch("validation", 0, 16)[0])
    assert np.array_equal(one.tokens("train"), two.tokens("train"))


@given(n=st.integers(1, 3000), key=st.text(max_size=5))
@settings(max_examples=60, deadline=None)
def test_permuted_is_a_permutation(n: int, key: str) -> None:
    assert np.array_equal(np.sort(permuted(np.arange(n), n, key)), np.arange(n))


def test_permuted_looks_random_and_reaches_far() -> None:
    n, draws = 10, 4000
    counts = np.zeros((n, n))
    for draw in range(draws):
        counts[np.arange(n), permuted(np.arange(n), n, str(draw))] += 1
    chi_squared = ((counts - draws / n) ** 2 / (draws / n)).sum()
    assert chi_squared < 81 + 5 * np.sqrt(2 * 81)  # (n - 1)^2 degrees of freedom
    order = permuted(np.arange(100_000), 100_000, "order")
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.016  # 5 standard deviations
    far = permuted(np.array([0, 10**15 - 1]), 10**15, "far")
    assert len(set(far.tolist())) == 2 and far.min() >= 0 and far.max() < 10**15


def limited(place: Path, limit: int, **changes: Any) -> list[str]:
    data = corpus(place, limit=limit, **changes)
    read = documents_of(data, "train") + documents_of(data, "validation")
    assert len(read) == min(limit, 200)
    return read


def test_a_limit_takes_some_of_all_files_and_a_lower_one_some_of_those(place: Path) -> None:
    fifty, hundred = limited(place, 50), limited(place, 100)
    assert set(fifty) < set(hundred) < {document(i) for i in range(200)}
    assert fifty == limited(place, 50, cache=str(place / "again"))  # the same each time
    halves = [sum(document(i) in set(fifty) for i in half) for half in (range(100), range(100, 200))]
    assert min(halves) >= 13  # 25 expected; 4 standard deviations are 12
    assert sorted(limited(place, 300)) == sorted(document(i) for i in range(200))


def test_a_limited_corpus_sorted_by_verdict_has_both(tmp_path: Path) -> None:
    lines = [f"{i},{'bad' if i < 500 else 'good'} film number {i}" for i in range(1000)]
    (tmp_path / "reviews.csv").write_text("id,text\n" + "\n".join([*lines, *lines]), "utf-8")
    config = DataConfig(f"text:{tmp_path / 'reviews.csv'}", "bytes", 8, validation=0.2, limit=100, cache=str(tmp_path))
    data = prepare(config, 0)
    read = documents_of(data, "train") + documents_of(data, "validation")
    assert len(read) == 100 and 30 <= sum(text.startswith("good") for text in read) <= 70
    for split in ("train", "validation"):  # those taken keep their order
        numbers = [int(text.split()[-1]) for text in documents_of(data, split)]
        assert numbers == sorted(numbers)


# of a corpus without a limit, by the first version of the cache: records of runs name these
FOLDERS = {
    "bytes": "c7634c545d36afae160f3664ff9eadbec38a83608f75a6994db89ca89cebccf0",
    "bpe:400": "03f386dfb9fe9b70af4cdb18021223e2cfdf4cd8fbb67a24f94b483e9968bf9d",
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tokenizer", FOLDERS)
def test_tokens_of_a_whole_corpus_are_what_they_were(place: Path, tokenizer: str, version: int) -> None:
    folder = corpus(place, tokenizer=tokenizer, version=version).folder
    files = [folder / f"{split}.{kind}" for split in ("train", "validation") for kind in ("bin", "offsets")]
    assert hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() == FOLDERS[tokenizer]
    if (tokenizer, version) == ("bytes", 1):
        assert corpus(place, version=1).describe()["hash"].startswith("a6d895d1965b04b8")


def test_describe_counts(place: Path) -> None:
    facts = corpus(place).describe()
    assert sum(facts["documents"].values()) == 200
    assert sum(facts["tokens"].values()) == facts["bytes"] + 200  # bytes as tokens, and an eos each
    assert facts["bytes"] == sum(len(document(i).encode()) for i in range(200))
    assert len(facts["hash"]) == 64 and facts["hash"] == corpus(place, 9, sequence=16).describe()["hash"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sequence": 10**6}, "lower data.sequence"),
        ({"sequence": 0}, "at least 1"),
        ({"validation": 1.0}, "below 1"),
        ({"validation": -0.1}, "below 1"),
        ({"limit": -1}, "negative"),
        ({"mode": "papers"}, "packed or paper"),
        ({"tokenizer": "bpe"}, "bpe:SIZE"),
        ({"tokenizer": "bpe:100"}, "from 258"),
        ({"tokenizer": "bpe:1000000000"}, "2\\^20"),
        ({"tokenizer": "byte"}, "did you mean bytes"),
    ],
)
def test_bad_settings_are_told(place: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        corpus(place, **changes)
    assert "\n" not in str(error.value)


def test_batch_refuses_more_rows_than_there_are_and_uneven_ranks(place: Path) -> None:
    data = corpus(place)
    with pytest.raises(UserError, match=r"lower train\.batch"):
        data.batch("train", 0, data.rows("train") + 1)
    with pytest.raises(ValueError, match="do not divide"):
        data.batch("train", 0, 10, 0, 3)
    with pytest.raises(UserError, match="validation"):
        corpus(place, validation=0.0).batch("validation", 0, 1)


def test_one_document_gives_its_tail_to_validation(tmp_path: Path) -> None:
    text = "\n".join(document(i) for i in range(100))
    (tmp_path / "book.txt").write_text(text, "utf-8")
    events: list[dict] = []
    config = DataConfig(f"text:{tmp_path / 'book.txt'}", "bytes", 32, validation=0.1, cache=str(tmp_path / "cache"))
    data = prepare(config, 0, events.append)
    whole = np.concatenate([data.tokens("train"), data.tokens("validation")])
    assert data.tokenizer.decode(whole) == text
    assert len(data.tokens("validation")) == round(0.1 * len(whole))
    assert data.offsets("train").tolist() == [0, len(data.tokens("train"))]
    assert data.offsets("validation").tolist() == [0, len(data.tokens("validation"))]
    assert "too few documents (1)" in data.warnings[0]
    assert {"stage": "warning", "message": data.warnings[0]} in events
    assert prepare(config, 0).warnings == data.warnings  # also from the cache


def test_long_documents_are_held_out_by_passages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PASSAGE", 400)
    texts = ["\n".join(f"file {i}, line {j}: {document(j % 50)}" for j in range(40 * i)) for i in (1, 3, 5)]
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i}.txt").write_text(text, "utf-8")
    config = DataConfig(f"text:{tmp_path / 'texts'}", "bytes", 8, validation=0.2, cache=str(tmp_path / "cache"))
    data = prepare(config, 0)
    train, held = documents_of(data, "train"), documents_of(data, "validation")
    for text in texts:  # each character in one split, in parts that begin where another ended
        parts = sorted((part for part in train + held if part in text), key=text.index)
        assert "".join(parts) == text
        assert all(part.endswith("\n") for part in parts[:-1])
    share = sum(map(len, held)) / sum(map(len, texts))
    assert 0.1 < share < 0.3 and all(any(part in text for part in held) for text in texts)
    assert not data.warnings
    old = prepare(replace(config, version=1), 0)  # whole documents: here by chance none, and so the tail of the last
    assert old.tokenizer.decode(old.tokens("train")) + old.tokenizer.decode(old.tokens("validation")) == "".join(texts)
    assert "too few documents (3)" in old.warnings[0] and old.key != data.key


def test_a_passage_keeps_its_split_when_its_document_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PASSAGE", 400)
    lines = [document(i) + "\n" for i in range(300)]
    (tmp_path / "a.txt").write_text("".join(lines[:200]), "utf-8")
    (tmp_path / "b.txt").write_text("".join(lines), "utf-8")
    both = [
        prepare(DataConfig(f"text:{tmp_path / name}", "bytes", 8, validation=0.2, cache=str(tmp_path / "c")), 0)
        for name in ("a.txt", "b.txt")
    ]
    few, more = ("".join(documents_of(data, "validation")) for data in both)
    assert more.startswith(few[: len(few) // 2]) and len(more) > len(few)
