"""Whole contests: fairness of the runs, the rule, stopping, failing, resuming."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small
import yaml
from contests import Done, small_contest

from foamlab.config import RunConfig
from foamlab.contest import folder as ledger
from foamlab.contest import runner, trial
from foamlab.contest.model import Rule
from foamlab.errors import UserError
from foamlab.files import lock
from foamlab.runs.summary import summarize
from foamlab.training.run import train


def test_a_contest_from_beginning_to_end(config: RunConfig, tmp_path: Path, here: list[str]) -> None:
    folder = tmp_path / "contest"
    events: list[dict[str, Any]] = []
    end = runner.start(small_contest(config, stop_factor=1.001), folder, 1, events.append)
    kept = json.loads((folder / "contest.json").read_text())
    assert kept == json.loads(json.dumps(end)) and kept["status"] == "done"
    assert len(here) == len(set(here))
    # all that differs between runs is the optimizer and the seed
    runs = [yaml.safe_load(path.read_text()) for path in folder.glob("*/*/config.yaml")]
    assert len(runs) == len(here) == len(kept["runs"])
    for run in runs:
        run["train"].pop("seed"), run.pop("optimizer"), run.pop("out")
        assert run == runs[0]
    # the rows are what the runs say
    for row in kept["results"]:
        summaries = summarize([folder / name for name in row["folders"]])
        assert row["n"] == 2 and row["seeds"] == [0, 1]
        assert row["loss"] == pytest.approx(sum(s.loss for s in summaries) / 2)
        assert row["low"] < row["loss"] < row["high"] and row["state"] > 0 and row["peak"] > 0
        assert {s.lr for s in summaries} == {row["point"]["lr"]} == {kept["search"][row["arm"]]["best"]["lr"]}
    assert kept["results"][0]["loss"] <= kept["results"][1]["loss"]
    assert len(kept["verdicts"]) == 1 and "n = 2" in kept["verdicts"][0]
    # the rule: no arm lost the run that was its best at the step
    stopped = [r for r in kept["runs"] if r["status"] == "stopped"]
    assert stopped and kept["rule"]["step"] == 2 and kept["cautions"][0] == str(Rule(2, 1.001))
    for arm in ("foam-paper", "adamw"):
        at = {f"{arm}/{p.name}": ledger.loss_at(p, 2) or math.inf for p in (folder / arm).glob("*seed0")}
        assert min(at, key=lambda name: at[name]) not in [r["folder"] for r in stopped]
    assert all(r["why"] and summarize([folder / r["folder"]])[0].steps == 3 for r in stopped)
    # another text is another contest
    (folder / "contest.json").write_text(json.dumps({**kept, "data": "another"}))
    with pytest.raises(UserError, match=r"has other text than when .* was begun"):
        runner.resume(folder)
    (folder / "contest.json").write_text(json.dumps(kept))
    # nothing is left behind, and nothing is run again
    assert not list(folder.glob("*/*/checkpoints")) and not list(folder.glob("*/*.err"))
    assert {e["kind"] for e in events} == {"prepare", "launch", "ended", "state"}
    before = small.tree(folder)
    del here[:]
    assert runner.resume(folder)["results"] == kept["results"] and not here
    changed = {name for name, content in small.tree(folder).items() if before.get(name) != content}
    assert changed <= {"contest.json"}


def test_an_interrupted_contest_ends_as_one_that_was_not(
    config: RunConfig, tmp_path: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = runner.start(small_contest(config), tmp_path / "whole", 1)
    spawn = runner.Runner.spawn
    interrupted: list[Path] = []

    def stop_the_third(self: runner.Runner, orders: dict[str, Any], slot: int, log: Path) -> Any:
        if len(here) % 10 != 2 or interrupted:
            return spawn(self, orders, slot, log)
        interrupted.append(Path(orders["config"]["out"]))
        log.write_text("")

        def stop(event: dict[str, Any]) -> None:
            if event["kind"] == "train" and event["step"] == 3:
                signal.raise_signal(signal.SIGTERM)

        train(trial.settings.from_dict(orders["config"]), on_event=stop)
        return Done(130)

    monkeypatch.setattr(runner.Runner, "spawn", stop_the_third)
    del here[:]
    part = runner.start(small_contest(config), tmp_path / "part", 1)
    assert part["status"] == "interrupted" and list(interrupted[0].glob("checkpoints/*"))
    assert len(list((tmp_path / "part").glob("*/*/run.json"))) == 3
    del here[:]
    end = runner.resume(tmp_path / "part")
    assert end["status"] == "done" and len(here) == len(whole["runs"]) - 2
    assert json.loads((interrupted[0] / "run.json").read_text())["resumed"][0]["step"] == 4
    for a, b in zip(whole["results"], end["results"]):
        assert {k: a[k] for k in ("arm", "loss", "point", "folders")} == {
            k: b[k] for k in ("arm", "loss", "point", "folders")
        }


def test_ctrl_c_lets_the_runs_save(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = []

    class Endless:
        returncode = None

        def poll(self) -> int | None:
            return self.returncode

        def terminate(self) -> None:
            log.append("terminated")
            self.returncode = 130

        def wait(self, timeout: float | None = None) -> None:
            assert timeout is None and self.returncode == 130

    monkeypatch.setattr(runner.Runner, "spawn", lambda *a: Endless())
    events = []

    def press(event: dict[str, Any]) -> None:
        events.append(event)
        if event["kind"] == "state":
            signal.raise_signal(signal.SIGINT)

    end = runner.start(small_contest(config), tmp_path / "c", 2, press)
    assert end["status"] == "interrupted" and log == ["terminated"] * 2
    assert len([e for e in events if e["kind"] == "launch"]) == 2


def test_a_run_that_cannot_be_resumed_begins_anew(config: RunConfig, tmp_path: Path, here: list[str]) -> None:
    folder = tmp_path / "c"
    c = small_contest(config, stop_factor=0)
    object.__setattr__(c, "arms", [replace(a, optimizer="galore", options={}) for a in c.arms[:1]])
    pytest.importorskip("pytorch_optimizer")
    runner.start(c, folder)
    info = json.loads((folder / here[0] / "run.json").read_text())
    (folder / here[0] / "run.json").write_text(json.dumps({**info, "status": "running"}))
    (folder / here[0] / "checkpoints" / "step-00000006").mkdir(parents=True)
    first = here[0]
    del here[:]
    assert runner.resume(folder)["status"] == "done" and here == [first]
    assert "resumed" not in json.loads((folder / first / "run.json").read_text())


def test_a_contest_killed_at_its_beginning_can_begin_again(
    config: RunConfig, tmp_path: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, folder = runner.write, tmp_path / "c"
    monkeypatch.setattr(runner, "write", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        runner.start(small_contest(config), folder)
    monkeypatch.setattr(runner, "write", write)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        runner.start(small_contest(config), folder)
    assert (folder / "notes.txt").read_text() == "mine"
    (folder / "notes.txt").unlink()
    assert runner.start(small_contest(config), folder)["status"] == "done"


def test_a_contest_over_a_text_that_is_not_there_does_not_say_that_it_runs(
    config: RunConfig, tmp_path: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(runner.data, "prepare", lambda *_: (_ for _ in ()).throw(UserError("no text")))
        with pytest.raises(UserError, match="no text"):
            runner.start(small_contest(config), tmp_path / "c")
    assert ledger.read(tmp_path / "c")["status"] == "interrupted" and not here


def test_a_failure_is_told_and_the_contest_can_go_on(
    config: RunConfig, tmp_path: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn = runner.Runner.spawn

    def full(self: object, orders: dict[str, Any], slot: int, log: Path) -> Done:
        log.write_text("some warning\nno room on the disk")
        return Done(2)

    monkeypatch.setattr(runner.Runner, "spawn", full)
    with pytest.raises(UserError, match=r"adamw/.* failed: no room on the disk;.*--resume"):
        runner.start(small_contest(config), tmp_path / "c")
    assert ledger.read(tmp_path / "c")["status"] == "interrupted"
    monkeypatch.setattr(runner.Runner, "spawn", spawn)
    assert runner.resume(tmp_path / "c")["status"] == "done"


def test_a_diverged_run_is_a_result(config: RunConfig, tmp_path: Path, here: list[str]) -> None:
    config.train.patience, config.train.clip = 1, 0.0
    end = runner.start(
        small_contest(config, lr={"foam-paper": [1e-2], "adamw": [1e-2, 1e30]}, stop_factor=0), tmp_path / "c"
    )
    lost = [r for r in end["runs"] if r["status"] == "diverged"]
    assert {r["folder"].split("-scale")[0] for r in lost} == {"adamw/lr1e+30"} and "could not be taken" in lost[0][
        "why"
    ]
    assert end["search"]["adamw"]["best"]["lr"] < 1e30 and end["status"] == "done"


def test_a_damaged_run_is_run_again_or_told(config: RunConfig, tmp_path: Path, here: list[str]) -> None:
    folder = tmp_path / "c"
    end = runner.start(small_contest(config, lr={"": [1e-3]}, stop_factor=0), folder)
    torn, broken = (folder / name for name in end["results"][0]["folders"])
    lines = (torn / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert '"eval"' in lines[-1]
    (torn / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert ledger.outcome(torn).status == "failed"
    (broken / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"is damaged .*remove it, and --resume runs it again"):
        runner.resume(folder)
    shutil.rmtree(broken)
    del here[:]
    assert runner.resume(folder)["results"][0]["loss"] == end["results"][0]["loss"]
    assert sorted(here) == sorted(f"{p.parent.name}/{p.name}" for p in (torn, broken))


def test_a_text_that_changes_under_a_contest_is_found_by_the_next_run(
    home: Path, config: RunConfig, tmp_path: Path, here: list[str]
) -> None:
    shutil.copytree(home / "text", tmp_path / "text")
    config.data.name = f"text:{tmp_path / 'text'}"

    def change(event: dict[str, Any]) -> None:
        if event["kind"] == "ended":
            (tmp_path / "text" / "new.txt").write_text("more foam")

    with pytest.raises(UserError, match="has changed since the contest was begun"):
        runner.start(small_contest(config, lr={"": [1e-3]}), tmp_path / "c", 1, change)
    assert len(here) == 2


def test_a_run_that_a_killed_contest_left_writing_is_waited_for(
    config: RunConfig, tmp_path: Path, here: list[str]
) -> None:
    folder = tmp_path / "c"
    end = runner.start(small_contest(config, lr={"": [1e-3]}), folder)
    late = folder / end["results"][0]["folders"][0]
    info = (late / "run.json").read_text()
    (late / "run.json").write_text(json.dumps({**json.loads(info), "status": "running"}))
    held = lock(late)

    def finish() -> None:
        (late / "run.json").write_text(info)
        held.release()

    del here[:]
    threading.Timer(0.5, finish).start()
    assert runner.resume(folder)["status"] == "done" and not here


def test_a_second_ctrl_c_leaves_no_process_behind(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for a run to save is cut short: it is waited for all the same, and killed if need be."""
    left = []

    class Slow:
        returncode, waits = None, 0

        def poll(self) -> int | None:
            return self.returncode

        def terminate(self) -> None:
            self.waits += 1

        def kill(self) -> None:
            self.returncode = -9

        def wait(self, timeout: float | None = None) -> None:
            if timeout is None and self.returncode is None:
                raise KeyboardInterrupt
            if timeout is not None and self.returncode is None:
                raise subprocess.TimeoutExpired("trial", timeout)

    def spawn(*a: Any) -> Any:
        left.append(Slow())
        return left[-1]

    monkeypatch.setattr(runner.Runner, "spawn", spawn)
    press = lambda event: signal.raise_signal(signal.SIGINT) if event["kind"] == "state" else None  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        runner.start(small_contest(config), tmp_path / "c", 2, press)
    assert len(left) == 2 and all(process.returncode == -9 for process in left)


@pytest.mark.heavy
def test_a_killed_contest_goes_on(config: RunConfig, home: Path, tmp_path: Path) -> None:
    """In real processes: kill -9 in the middle; what had finished is not repeated, all else is done."""
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({k: v for k, v in runner.to_dict(config).items() if k != "out"}))
    words = [sys.executable, "-m", "foamlab", "compare"]
    flags = ["--optimizers", "foam,adamw", "--lr", "1e-2,1e-3", "--seeds", "0", "--jobs", "2", "--out", "c"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen([*words, "c.yaml", *flags], cwd=tmp_path, env=env, stdout=subprocess.PIPE)
    finished: list[Path] = []
    while not finished:
        time.sleep(0.1)
        assert first.poll() is None
        finished = [p for p in tmp_path.glob("c/*/*") if ledger.outcome(p).status == "done"]
    first.kill()
    first.wait()
    before = {p: small.metrics(p) for p in finished}
    second = subprocess.run([*words, "--resume", "c"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert ledger.read(tmp_path / "c")["status"] == "done"
    for p, lines in before.items():
        assert small.metrics(p) == lines and "resumed" not in json.loads((p / "run.json").read_text())
    assert not list(tmp_path.glob("c/*/*/checkpoints")) and not list(tmp_path.glob("c/*/*.err"))


def test_a_contest_does_not_go_on_with_another_version_s_defaults(config: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    made = small_contest(config)
    (folder / "foam-paper" / "lr0.001-scale0.5-seed0").mkdir(parents=True)
    info = {"status": "interrupted", "versions": {"torchfoam": "0.0.1"}}
    (folder / "foam-paper" / "lr0.001-scale0.5-seed0" / "run.json").write_text(json.dumps(info))
    ledger.write(folder, {**made.as_dict(), "status": "interrupted", "command": "", "started": ""})
    with pytest.raises(UserError, match=r"made by torchfoam 0\.0\.1, this is .*start a new contest"):
        runner.resume(folder)
