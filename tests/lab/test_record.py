"""Records: atomic, append-only, readable after a kill, and cut back on resume."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from foamlab.errors import UserError
from foamlab.runs import record
from foamlab.runs.record import Recorder, read_run


def line(step: int, kind: str = "train", **more: object) -> dict:
    return {"kind": kind, "step": step, "loss": 3.0 / step, **more}


def written(folder: Path, *lines: dict, **options: object) -> Path:
    folder.mkdir(exist_ok=True)
    recorder = Recorder(folder, **options)
    recorder.describe(status="running", model={"name": "m"})
    for x in lines:
        recorder.write(x)
    recorder.sync()
    recorder.close("done", result={"loss": 1.0})
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    run = read_run(written(tmp_path / "run", line(1), line(1, "eval"), line(2), line(3, "skip", why="no")))
    assert run.status == "done" and run.info["model"] == {"name": "m"} and run.info["result"] == {"loss": 1.0}
    assert [x["step"] for x in run.lines("train")] == [1, 2] and run.lines("skip")[0]["why"] == "no"
    assert run.metrics[0] == line(1)


def test_each_line_is_on_its_way_before_the_next(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.describe(status="running")
    recorder.write(line(1))
    assert read_run(tmp_path).metrics == [line(1)] and read_run(tmp_path).status == "running"
    recorder.close("done")


@pytest.mark.parametrize("torn", ['{"kind": "tr', '{"kind": "train", "step": 3}', "\x00\x00"])
def test_a_torn_last_line_is_left_out_and_removed_on_resume(tmp_path: Path, torn: str) -> None:
    written(tmp_path, line(1), line(2))
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write(torn)
    assert [x["step"] for x in read_run(tmp_path).metrics] == [1, 2]
    written(tmp_path, line(3), resume=2)
    assert [x["step"] for x in read_run(tmp_path).metrics] == [1, 2, 3]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_resume_drops_later_lines(tmp_path: Path) -> None:
    written(tmp_path, line(1), line(2), line(2, "eval"), line(3), line(4, "skip"))
    written(tmp_path, line(3), resume=2)
    assert [(x["kind"], x["step"]) for x in read_run(tmp_path).metrics] == [
        ("train", 1), ("train", 2), ("eval", 2), ("train", 3),
    ]  # fmt: skip


def test_a_broken_line_inside_is_an_error_that_names_it(tmp_path: Path) -> None:
    written(tmp_path, line(1))
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text + "{broken\n" + text)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        read_run(tmp_path)


@pytest.mark.parametrize("content, words", [(None, "no run in"), ("{", "cannot read"), ("[]", "expected an object")])
def test_no_run(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match=words):
        read_run(tmp_path)
    with pytest.raises(UserError, match=words):
        Recorder(tmp_path, resume=1)


def test_json_has_no_nan(tmp_path: Path) -> None:
    written(tmp_path, line(1, more=math.inf, loss=math.nan))
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert read_run(tmp_path).metrics == [{"kind": "train", "step": 1, "loss": None, "more": None}]


def test_run_json_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(tmp_path)
    recorder.describe(status="running", a=1)

    def fail(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(record.os, "replace", fail)
        with pytest.raises(UserError, match="No space left on device; make room"):
            recorder.describe(a=2)
    assert json.loads((tmp_path / "run.json").read_text())["a"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "run.json"]
    recorder.close("done")


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    first = Recorder(tmp_path)
    with pytest.raises(UserError, match="another process is writing"):
        Recorder(tmp_path)
    first.close("done")
    Recorder(tmp_path).close("done")


def test_tensorboard_is_rebuilt_on_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written(tmp_path, line(1), line(2, "eval", perplexity=4.0), line(2), line(3), tensorboard=True)
    written(tmp_path, line(3), line(4), resume=2, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    steps = {tag: [e.step for e in events.Tensors(tag)] for tag in events.Tags()["tensors"]}
    assert steps == {"train/loss": [1, 2, 3, 4], "eval/loss": [2], "eval/perplexity": [2]}


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(UserError, match=r"pip install 'torchfoam\[tensorboard\]'"):
        Recorder(tmp_path, tensorboard=True)


def test_circumstances_keep_the_beginning_of_a_resumed_run() -> None:
    begun = record.circumstances({}, 0, {"gpu": "g"})
    assert begun["versions"]["torch"] and begun["hardware"]["cores"] >= 1 and begun["hardware"]["gpu"] == "g"
    again = record.circumstances({**begun}, 5, {})
    assert "started" not in again and [x["step"] for x in again["resumed"]] == [5]


def test_reading_needs_no_torch() -> None:
    code = "import sys, foamlab.runs.record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
