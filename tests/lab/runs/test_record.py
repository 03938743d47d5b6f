"""Records: atomic, append-only, readable after a kill, and cut back on resume."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foamlab import files
from foamlab.errors import UserError
from foamlab.runs.provenance import circumstances
from foamlab.runs.record import Recorder, Run, read_run
from foamlab.runs.tensorboard import listening


def line(step: int, kind: str = "train", **more: object) -> dict[str, Any]:
    return {"kind": kind, "step": step, "loss": 3.0 / step, **more}


def written(folder: Path, *lines: dict[str, Any], **options: Any) -> Path:
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
        patch.setattr(files.os, "replace", fail)
        with pytest.raises(UserError, match="No space left on device; make room"):
            recorder.describe(a=2)
    assert json.loads((tmp_path / "run.json").read_text())["a"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "metrics.jsonl", "run.json"]
    recorder.close("done")


def test_a_run_that_goes_on_has_not_ended_yet(tmp_path: Path) -> None:
    written(tmp_path, line(1), line(2))
    recorder = Recorder(tmp_path, resume=1)
    recorder.close("failed", error="no room", reason="error", resume="")
    with_reason = read_run(tmp_path).info
    recorder = Recorder(tmp_path, resume=1)
    recorder.close("done")
    assert with_reason["error"] == "no room" and not {"error", "reason", "resume"} & read_run(tmp_path).info.keys()


@pytest.mark.parametrize(
    "info, diverged",
    [
        ({"status": "failed", "reason": "diverged", "error": "in any words"}, True),
        ({"status": "failed", "reason": "error", "error": "stopped: the disk is full"}, False),
        ({"status": "failed", "error": "stopped: 10 steps in a row after step 3 could not be taken (nan)"}, True),
        ({"status": "failed", "error": "the disk is full"}, False),
        ({"status": "failed"}, False),
        ({"status": "done", "error": "stopped: once"}, False),
    ],
)  # fmt: skip
def test_what_diverged_says_so_in_a_field_and_in_old_folders_by_its_sentence(
    info: dict[str, str], diverged: bool
) -> None:
    assert Run(Path(), info, []).diverged is diverged


def test_a_killed_writer_leaves_no_lock_behind(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from foamlab.files import lock; held = lock(Path({str(tmp_path)!r}))"
    code += "; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout and writer.stdout.readline()
        with pytest.raises(UserError, match="another process is writing"):
            Recorder(tmp_path)
        writer.kill()
    Recorder(tmp_path).close("done")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def none(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", none)
    first, second = files.lock(tmp_path), files.lock(tmp_path)
    first.release()
    second.release()
    Recorder(tmp_path).close("done")
    assert read_run(tmp_path).status == "done"


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write in .*file: .*choose another --out"):
        files.lock(tmp_path / "file")


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    first = Recorder(tmp_path)
    with pytest.raises(UserError, match="another process is writing"):
        Recorder(tmp_path)
    first.close("done")
    Recorder(tmp_path).close("done")


def test_tensorboard_is_rebuilt_on_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = [line(1), line(2, "eval", perplexity=4.0), line(2), line(3)]
    for lines, resume in ((first, None), ([line(3), line(4)], 2)):
        heard: list[dict] = []
        with listening(heard.append) as emit:
            recorder = Recorder(tmp_path, resume=resume)
            recorder.describe(status="running")
            emit({"kind": "start", "folder": str(tmp_path)})
            for x in lines:
                recorder.write(x)
                emit(x)
            recorder.close("done")
        assert heard[1:] == lines
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    steps = {tag: [e.step for e in events.Tensors(tag)] for tag in events.Tags()["tensors"]}
    assert steps == {"train/loss": [1, 2, 3, 4], "eval/loss": [2], "eval/perplexity": [2]}


def test_without_tensorboard_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(UserError, match=r"pip install 'torchfoam\[tensorboard\]'"):
        listening(print).__enter__()


def test_circumstances_keep_the_beginning_of_a_resumed_run() -> None:
    begun = circumstances({}, 0, {"gpu": "g"})
    assert begun["versions"]["torch"] and begun["hardware"]["cores"] >= 1 and begun["hardware"]["gpu"] == "g"
    again = circumstances({**begun}, 5, {})
    assert "started" not in again and [x["step"] for x in again["resumed"]] == [5]


def test_reading_needs_no_torch() -> None:
    code = "import sys, foamlab.runs.record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
