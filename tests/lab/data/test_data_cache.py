"""The token cache is whole or absent: killed builders, full disks, cut files, two builders at once, any threads."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foamlab.config import DataConfig
from foamlab.data import cache, documents
from foamlab.data.corpus import prepare
from foamlab.errors import UserError

BUILD = """
import os, sys
from foamlab.config import DataConfig
from foamlab.data import prepare
def progress(fact):
    if fact["stage"] == sys.argv[3]: os._exit(9)
corpus = prepare(DataConfig("text:" + sys.argv[1], "bpe:300", 8, validation=0.2, cache=sys.argv[2]), 0, progress)
"""


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "texts").mkdir()
    for i in range(60):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"text number {i} " * (1 + i % 7))
    return DataConfig(f"text:{tmp_path / 'texts'}", "bpe:300", 8, validation=0.2, cache=str(tmp_path / "cache"))


def build(config: DataConfig, die_at: str = "") -> subprocess.Popen[bytes]:
    path = config.name.partition(":")[2]
    return subprocess.Popen([sys.executable, "-c", BUILD, path, config.cache, die_at])


def content(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def shown(config: DataConfig) -> list[str]:
    return sorted(entry.name for entry in Path(config.cache).iterdir() if entry.name[0] != ".")


@pytest.mark.parametrize("stage", ["tokenizer", "tokens"])
def test_killed_builder_leaves_no_cache_and_no_lock(config: DataConfig, stage: str) -> None:
    assert build(config, die_at=stage).wait(60) == 9
    assert not shown(config) and list(Path(config.cache).glob(".building-*")), "the kill came too early or too late"
    corpus = prepare(config, 0)
    assert shown(config) == [corpus.folder.name] and not list(Path(config.cache).glob(".building-*"))
    fresh = prepare(DataConfig(**{**vars(config), "cache": config.cache + "-2"}), 0)
    assert content(corpus.folder) == content(fresh.folder)


def test_two_builders_at_once_build_once(config: DataConfig) -> None:
    both = [build(config), build(config)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(shown(config)) == 1
    prepare(config, 0, lambda fact: pytest.fail("built again") if fact["stage"] == "tokens" else None)


FILES = ["train.bin", "train.offsets", "validation.bin", "validation.offsets", "tokenizer.json", "corpus.json"]
DAMAGE = {
    "cut": lambda data: data[:-2],
    "zeros": lambda data: data[: len(data) // 4] + bytes(len(data) - len(data) // 4),
    "one bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "gone": None,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_cache_is_told_and_built_again(config: DataConfig, name: str, how: str) -> None:
    folder = prepare(config, 0).folder
    before, damage = content(folder), DAMAGE[how]
    if damage:
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
    else:
        (folder / name).unlink()
    events: list[dict] = []
    corpus = prepare(config, 0, events.append)
    assert content(corpus.folder) == before
    told = [event["message"] for event in events if event["stage"] == "warning"]
    assert told == [f"the token cache {folder} is damaged ({name} has changed or is missing): it is rebuilt"]
    prepare(config, 0, lambda fact: pytest.fail(str(fact)) if fact["stage"] != "hash" else None)


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"files": 3, "sha256": []}', "[" * 100_000])
def test_a_foreign_corpus_json_is_built_again(config: DataConfig, text: str) -> None:
    folder = prepare(config, 0).folder
    before = content(folder)
    (folder / "corpus.json").write_text(text)
    assert content(prepare(config, 0).folder) == before


def test_a_cache_of_old_is_kept_only_where_it_cannot_be_made_anew(config: DataConfig) -> None:
    folder = prepare(config, 0).folder
    before, about = content(folder), json.loads((folder / "corpus.json").read_text())
    del about["sha256"], about["seal"]
    (folder / "corpus.json").write_text(json.dumps(about))
    assert cache.read_about(folder, lambda event: pytest.fail(str(event)), old=True) == about
    assert content(prepare(config, 0).folder) == before


def test_a_slow_check_is_told(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare(config, 0).folder
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(cache.time, "monotonic", lambda: next(clock))
    events: list[dict] = []
    cache.hashes(folder, ["train.bin", "train.offsets"], events.append)
    assert [event["stage"] for event in events] == ["check", "check"] and events[-1]["share"] == 1


def test_full_disk_leaves_nothing_and_says_so(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, ids: np.ndarray, ends: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache._Writer, "add", full)
        with pytest.raises(UserError, match=r"disk full .* set data.cache"):
            prepare(config, 0)
    assert not shown(config) and not list(Path(config.cache).glob(".building-*"))
    prepare(config, 0)


def test_interruption_leaves_nothing(config: DataConfig) -> None:
    def interrupt(fact: dict) -> None:
        if fact["stage"] == "tokens":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config, 0, interrupt)
    assert not shown(config) and not list(Path(config.cache).glob(".building-*"))


def test_unwritable_cache_is_told(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config.cache = str(tmp_path / "file" / "cache")
    with pytest.raises(UserError, match=r"cannot write the token cache .* set data.cache"):
        prepare(config, 0)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_still_serves(config: DataConfig) -> None:
    folder = prepare(config, 0).folder
    folder.parent.chmod(0o555)
    try:
        assert prepare(config, 0).folder == folder
    finally:
        folder.parent.chmod(0o755)


def test_what_matters_changes_the_cache_and_nothing_else_does(config: DataConfig, tmp_path: Path) -> None:
    folder = prepare(config, 0).folder
    same: list[dict[str, Any]] = [{"sequence": 4}, {"mode": "paper"}, {"workers": 1}]
    shutil.copytree(tmp_path / "texts", tmp_path / "moved")
    same.append({"name": f"text:{tmp_path / 'moved'}"})
    other: list[dict[str, Any]] = [{"tokenizer": "bpe:301"}, {"tokenizer": "bytes"}, {"validation": 0.3}, {"limit": 50}]
    for change in same:
        assert prepare(DataConfig(**{**vars(config), **change}), 1).folder == folder
    folders = {prepare(DataConfig(**{**vars(config), **change}), 0).folder for change in other}
    assert len(folders) == 4 and folder not in folders
    (tmp_path / "texts" / "3.txt").write_text("changed")
    assert prepare(config, 0).folder not in {folder, *folders}


def test_long_documents_in_pieces_and_threads_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {i}: " + "word " * (i % 11) + "\n" for i in range(3000)) + "x" * 9000  # no line end to cut at
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "long.txt").write_text(text)
    (tmp_path / "texts" / "short.txt").write_text("short")
    found = []
    for workers in (1, 3):
        monkeypatch.setattr(documents, "PIECE", 4000)
        before = os.environ.get("TOKENIZERS_PARALLELISM")
        config = DataConfig(f"text:{tmp_path / 'texts'}", "bpe:300", 8, "packed", 0.0, workers=workers)
        config.cache = str(tmp_path / f"cache{workers}")
        corpus = prepare(config, 0)
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before
        assert len(corpus.offsets("train")) == 3
        assert corpus.tokenizer.decode(corpus.tokens("train")) == text + "short"
        found.append(content(corpus.folder))
    assert found[0] == found[1]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_building_reads_little_ahead_of_what_it_writes(
    config: DataConfig, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE", 100)
    monkeypatch.setattr(cache, "SAMPLE", 500)
    events: list[dict] = []
    prepare(DataConfig(**{**vars(config), "tokenizer": tokenizer, "workers": 1}), 0, events.append)
    progress = [fact for fact in events if fact["stage"] == "tokens"]
    assert progress[0]["documents"] < 20 and progress[-1]["documents"] == 60
    shares = [fact["share"] for fact in progress]
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_the_tokenizer_never_sees_validation_text(config: DataConfig) -> None:
    corpus = prepare(config, 0)
    seen: list[str] = []
    train = corpus.tokenizer.decode(corpus.tokens("train"))
    real = cache.make

    def spy(spec: str, texts: Iterator[str], *rest: Any) -> Any:
        seen.extend(texts)
        return real(spec, iter(seen), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "make", spy)
        prepare(DataConfig(**{**vars(config), "cache": config.cache + "-2"}), 0)
    assert "".join(seen) == train and len(seen) < 60
