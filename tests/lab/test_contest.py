"""Contests: fairness of the runs, the rule, resuming, and what is refused."""

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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small
import yaml

from foamlab.cli import main
from foamlab.cli.contest_commands import grids
from foamlab.config import RunConfig
from foamlab.contest import design, runner, trial
from foamlab.contest import folder as ledger
from foamlab.contest.folder import why_stop
from foamlab.contest.model import Contest, Rule
from foamlab.contest.page import report
from foamlab.contest.results import standings
from foamlab.errors import UserError
from foamlab.files import lock
from foamlab.runs.summary import summarize
from foamlab.training.run import train

# ---------------------------------------------------------------------------------------------- settings


def test_grids() -> None:
    assert grids("1e-3,3e-3", "lr") == {"": [1e-3, 3e-3]}
    assert grids("adamw=1e-3, 3e-3; sgd=0.1", "lr") == {"adamw": [1e-3, 3e-3], "sgd": [0.1]}
    with pytest.raises(UserError, match=r"--lr takes numbers.*'fast'"):
        grids("fast", "lr")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.prepare(tmp_path_factory.mktemp("sweep"))


@pytest.fixture
def config(home: Path, tmp_path: Path) -> RunConfig:
    return small.config(home, tmp_path / "unused", steps=6, eval_every=2, checkpoint_every=0, memory="ignore")


def test_every_optimizer_has_its_own_grid_unless_one_is_given(config: RunConfig) -> None:
    c = design.comparison(config, ["foam-paper", "adamw", "sgd"], [0], lr={"adamw": [2e-3, 1e-3, 2e-3]})
    grid = {arm.label: arm.tune["lr"] for arm in c.arms}
    assert (
        grid["adamw"] == [1e-3, 2e-3]
        and grid["foam-paper"] == [3e-3, 1e-2, 3e-2]
        and grid["sgd"] == [0.03, 0.1, 0.3, 1]
    )
    assert all(arm.note for arm in c.arms) and c.arms[0].options["level"] == 2
    assert {tuple(a.tune["lr"]) for a in design.comparison(config, ["adamw", "sgd"], [0], lr={"": [1.0]}).arms} == {
        (1.0,)
    }
    assert design.Contest.from_dict(json.loads(json.dumps(c.as_dict()))) == replace(
        c, config=trial.settings.from_dict(c.as_dict()["settings"])
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"names": ["adamw"]}, "at least two names"),
        ({"names": ["adamw", "adamw"]}, "each once"),
        ({"names": ["adamw", "adamx"]}, "did you mean adamw"),
        ({"lr": {"sgd": [1.0]}}, "optimizer in --lr 'sgd'"),
        ({"lr": {"": [0.0]}}, "above 0"),
        ({"seeds": []}, "--seeds"),
        ({"seeds": [1, 1]}, "each once"),
        ({"stop_factor": 0.5}, "at least 1"),
        ({"stop_at": 1.0}, "between 0 and 1"),
        ({"steps": 0}, "train.steps"),
    ],
)
def test_what_makes_no_sense_is_refused(config: RunConfig, change: dict[str, Any], message: str) -> None:
    if "steps" in change:
        config.train.steps = change.pop("steps")
    with pytest.raises(UserError, match=message):
        design.comparison(**{"config": config, "names": ["adamw", "foam"], "seeds": [0], **change})


@pytest.mark.parametrize(
    "steps, every, at, factor, step",
    [
        (100, 10, 0.3, 1.2, 30),
        (100, 20, 0.3, 1.2, 40),
        (100, 0, 0.3, 1.2, 0),
        (100, 10, 0.3, 0, 0),
        (10, 10, 0.3, 2, 0),
        (9, 2, 0.01, 2, 2),
    ],
)
def test_the_rule_looks_at_an_evaluation_before_the_end(
    config: RunConfig, steps: int, every: int, at: float, factor: float, step: int
) -> None:
    config.train.steps, config.train.eval_every = steps, every
    c = design.comparison(config, ["adamw", "foam"], [0], stop_factor=factor, stop_at=at)
    assert c.rule.step == step
    assert ("stopped at step" in str(c.rule)) == bool(step)


def test_studies_share_the_papers_setting_and_whatever_else_is_the_same(config: RunConfig) -> None:
    config.optimizer.lr, config.optimizer.scale = 0.02, 0.5
    c = design.ablation(config, ["residual", "rho", "level", "alpha", "direction"], [0, 1])
    assert len({json.dumps([a.optimizer, a.options, a.start]) for a in c.arms}) == len(c.arms)
    rho = {case["value"]: case["arm"] for case in c.studies["rho"]["cases"]}
    assert rho["1.0"] == "foam" and rho["0.0"] == "residual-0.0"
    assert all(arm.tune == {"lr": [0.02]} for arm in c.arms)
    assert {arm.start["scale"] for arm in c.arms if not arm.label.startswith("alpha")} == {0.5}
    # what stands beside a value is run at that value, whatever the scale of the others
    for scale, values in (0.5, 5), (0.12, 6), (None, 5):
        config.optimizer.scale = scale
        c = design.ablation(config, ["alpha"], [0])
        at = {arm.label: arm.start["scale"] for arm in c.arms}
        cases = c.studies["alpha"]["cases"]
        assert len(cases) == len({case["arm"] for case in cases}) == values and "foam" in at
        assert all(float(case["value"]) == at[case["arm"]] for case in cases)
    with pytest.raises(UserError, match=r"unknown study 'levl'.*did you mean level"):
        design.ablation(config, ["levl"], [0])


# ---------------------------------------------------------------------------------------------- whole contests


class Done:
    """A trial that ran in this process, as if it were one of its own."""

    def __init__(self, returncode: int) -> None:
        self.returncode = returncode

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> None:
        pass


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trials run in this process, one after the other; the list of their names."""
    ran = []

    def spawn(self: object, orders: dict[str, Any], slot: int, log: Path) -> Any:
        ran.append("/".join(Path(orders["config"]["out"]).parts[-2:]))
        log.write_text("")
        try:
            return Done(130 if trial.run(json.loads(json.dumps(orders))) == "interrupted" else 0)
        except UserError as e:
            log.write_text(str(e))
            return Done(2)

    monkeypatch.setattr(runner.Runner, "spawn", spawn)
    monkeypatch.setattr(runner, "POLL", 0)
    return ran


def small_contest(config: RunConfig, names: Sequence[str] = ("foam-paper", "adamw"), **changes: Any) -> Contest:
    rates = {"lr": {"": [1e-3, 1e-2]}, "scale": {"foam-paper": [0.5]}}
    return design.comparison(config, names, [0, 1], **{**rates, **changes})


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


def test_the_command(
    config: RunConfig,
    tmp_path: Path,
    here: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = runner.to_dict(config)
    settings.pop("out")
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(settings))
    words = ["compare", "my.yaml", "--optimizers", "foam,adamw", "--lr", "1e-3", "--seeds", "0,1", "--out", "c"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "95% interval" in said and "What can be said" in said and "n = 2" in said and "wrote c/contest.json" in said
    assert main(words) == 2
    assert "--resume c" in capsys.readouterr().err
    assert main(["compare", "--resume", "c", "--train.steps", "7"]) == 2
    assert "was begun with train.steps 6, not 7" in capsys.readouterr().err
    assert main(["compare", "--resume", "c", "--margin", "0.1"]) == 2
    assert "begun with another --margin" in capsys.readouterr().err
    same = ["compare", "--resume", "c", "--optimizers", "foam,adamw", "--lr", "1e-3", "--seeds", "0,1"]
    assert main([*same, "--hopeless", "2"]) == 2  # as 0.2 called it
    assert "begun with another --stop_factor or --stop_at" in capsys.readouterr().err
    assert main(["compare", "--resume", "c"]) == 0
    assert main(same) == 0
    assert main(["ablate", "my.yaml", "--studies", "residual,direction", "--seeds", "0", "--out", "a"]) == 0
    said = capsys.readouterr().out
    assert "direction-columns" in said and "n = 1" in said
    kept = ledger.read(Path("a"))
    assert set(kept["studies"]) == {"residual", "direction"} and len(kept["results"]) == 3
    assert main(["report", *map(str, Path("c").glob("*/*")), "--out", "r.html"]) == 0


@pytest.mark.parametrize("seeds", ["inf", "nan", "-1", "0.5", "1e30"])
def test_seeds_that_are_none(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--optimizers", "foam,adamw", "--seeds", seeds]) == 2
    assert "--seeds takes whole numbers" in capsys.readouterr().err
    assert main(["compare", "--optimizers", "foam, adamw", "--finalists=-1"]) == 2
    assert "--finalists is a number" in capsys.readouterr().err
    assert main(["ablate", "--jobs=-1"]) == 2
    assert "--jobs is a number" in capsys.readouterr().err


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


# ---------------------------------------------------------------------------------------------- words


def test_the_rule_compares_runs_of_one_arm(tmp_path: Path) -> None:
    for arm, name, loss in (("a", "x", 2.0), ("a", "y", 2.5), ("b", "z", 1.0)):
        (tmp_path / arm / name).mkdir(parents=True)
        line = json.dumps({"kind": "eval", "step": 4, "loss": loss})
        (tmp_path / arm / name / "metrics.jsonl").write_text(line + "\n")
    assert why_stop(tmp_path / "a" / "y", Rule(4, 1.2)) == "loss 2.5 at step 4 is above 1.2 times the 2 of x"
    assert not why_stop(tmp_path / "a" / "y", Rule(4, 1.3))
    assert not why_stop(tmp_path / "a" / "x", Rule(4, 1.0))
    assert not why_stop(tmp_path / "b" / "z", Rule(4, 1.0))
    assert not why_stop(tmp_path / "a" / "y", Rule(5, 1.0))


def test_a_lost_seed_and_other_betas_are_told(config: RunConfig, tmp_path: Path, here: list[str]) -> None:
    folder = tmp_path / "c"
    end = runner.start(small_contest(config, names=["foam-paper", "muon"], lr={"": [1e-3]}, stop_factor=0), folder)
    assert any("(0.9, 0.999)" in x.replace("[", "(").replace("]", ")") and "betas" in x for x in end["cautions"])
    gone = folder / "muon" / next(r for r in end["results"] if r["arm"] == "muon")["folders"][1].split("/")[1]
    info = json.loads((gone / "run.json").read_text())
    (gone / "run.json").write_text(json.dumps({**info, "status": "failed", "error": "stopped: 10 steps"}))
    told = standings(folder, end)
    assert any(x.startswith("muon did not finish with seed 1") for x in told["cautions"])


def test_standings_of_a_contest_that_has_not_begun(config: RunConfig, tmp_path: Path) -> None:
    told = standings(tmp_path, small_contest(config).as_dict())
    assert [row["status"] for row in told["results"]] == ["tuning"] * 2 and not told["verdicts"] and not told["runs"]


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "no contest in"),
        ("{", "cannot read"),
        ('{"format": 9}', "format 9"),
        ("[]", "list"),
        ('{"format": 1}', "lacks kind"),
        ('{"format": ' + "[" * 100_000, "cannot read .*contest.json"),
        ('{"format": 1, "studies": ' + "[" * 900 + "]" * 900 + "}", "levels deep"),
    ],
)
def test_a_folder_that_is_no_contest(tmp_path: Path, text: str | None, message: str) -> None:
    if text:
        (tmp_path / "contest.json").write_text(text)
    with pytest.raises(UserError, match=message) as e:
        ledger.read(tmp_path)
    assert "\n" not in str(e.value) and len(str(e.value)) < 400


def kept(config: RunConfig, change: Callable[[dict[str, Any]], Any] = lambda c: None) -> dict[str, Any]:
    c = {**small_contest(config).as_dict(), "status": "running", "command": "foamlab compare", "started": "now"}
    c = json.loads(json.dumps(c))
    change(c)
    return c


PATHS = ["../../evil", "/evil", "..", ".", "a/b", "a\\b", "", ".evil", "a\nb", "\x1b[2J", "x" * 300, 5, None, ["a"]]
HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"label {x!r:.20}": lambda c, x=x: c["contestants"][0].update(label=x) for x in PATHS},  # type: ignore[misc]
    **{f"optimizer {x!r:.20}": lambda c, x=x: c["contestants"][0].update(optimizer=x) for x in PATHS},  # type: ignore[misc]
    "key": lambda c: c["contestants"][0]["tune"].update({"../../evil": [1.0, 2.0]}),
    "value": lambda c: c["contestants"][0]["tune"].update(level=["../../evil", "row"]),
    "values of two kinds": lambda c: c["contestants"][0]["tune"].update(level=[2, "row"]),
    "no values": lambda c: c["contestants"][0]["tune"].update(lr=[0.0, 1.0]),
    "start": lambda c: c["contestants"][0]["start"].update(lr="../../evil"),
    "another start": lambda c: c["contestants"][0]["start"].update({"../../evil": 1.0}),
    "seed": lambda c: c.update(seeds=["../../evil"]),
    "seeds": lambda c: c.update(seeds=[1, 1]),
    "no seeds": lambda c: c.update(seeds=[]),
    "study": lambda c: c.update(studies={"../../evil": {"about": "", "base": "foam", "cases": []}}),
    "cases": lambda c: c.update(studies={"rho": {"about": "", "base": "foam", "cases": [5]}}),
    "rule": lambda c: c.update(rule={"step": "../../evil", "factor": 1.2}),
    "margin": lambda c: c.update(margin="wide"),
    "negative margin": lambda c: c.update(margin=-1),
    "contestants": lambda c: c.update(contestants=[5]),
    "twins": lambda c: c.update(contestants=c["contestants"][:1] * 2),
    "settings": lambda c: c["settings"].pop("optimizer"),
    "kind": lambda c: c.update(kind="../../evil"),
    "finalists": lambda c: c.update(finalists=-1),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_contest_is_refused_before_anything_is_made(config: RunConfig, tmp_path: Path, case: str) -> None:
    """Whatever of contest.json becomes a folder, a file or a figure: one line, and nothing in or out of the folder."""
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    (tmp_path / "a" / "evil").mkdir()
    (folder / "contest.json").write_text(json.dumps(kept(config)))
    ledger.read(folder)
    (folder / "contest.json").write_text(json.dumps(kept(config, HOSTILE[case])))
    before = small.tree(tmp_path)
    for use in (runner.resume, lambda folder: report([folder], tmp_path / "r", static=["svg"])):
        with pytest.raises(UserError, match=r"contest.json was not written by foamlab, or is damaged") as e:
            use(folder)
        assert "\n" not in str(e.value) and len(str(e.value)) < 400
    assert small.tree(tmp_path) == before and not [p for p in tmp_path.rglob("*evil*") if p.name != "evil"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c["contestants"][0].update(optimizer="evil"), "unknown optimizer 'evil'"),
        (lambda c: c["contestants"][0]["options"].update(evil=1), "unknown option of foam-paper 'evil'"),
        (lambda c: c["settings"]["train"].update(evil=1), "contest.json: unknown setting train.evil"),
        (lambda c: c["settings"].pop("model"), "contest.json: these are no settings of a run: they lack model"),
    ],
)
def test_a_contest_over_what_there_is_not_is_refused_before_anything_is_made(
    config: RunConfig, tmp_path: Path, change: Callable[..., Any], message: str
) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "contest.json").write_text(json.dumps(kept(config, change)))
    before = small.tree(tmp_path)
    with pytest.raises(UserError, match=message):
        runner.resume(tmp_path / "c")
    assert small.tree(tmp_path) == before


def test_a_contest_keeps_its_margin_and_an_old_one_has_the_default(
    config: RunConfig, tmp_path: Path, here: list[str]
) -> None:
    folder = tmp_path / "c"
    wide = runner.start(small_contest(config, lr={"": [1e-3]}, stop_factor=0, margin=50.0), folder)
    assert wide["margin"] == 50 and "50 nat (mean" in wide["verdicts"][0] and "is within 50 nat" in wide["cautions"][1]
    old = {key: value for key, value in wide.items() if key != "margin"}
    (folder / "contest.json").write_text(json.dumps(old))
    assert "is within 0.01 nat" in runner.resume(folder)["cautions"][1]
    none = standings(folder, {**old, "margin": 0})
    assert "nat" not in none["verdicts"][0] and "the margin is 0" in none["cautions"][1]
    with pytest.raises(UserError, match="another --margin: beside --resume give its flags all as they were, or none"):
        runner.go_on(config, folder, asked=small_contest(config, lr={"": [1e-3]}, stop_factor=0, margin=0.02))


@pytest.mark.parametrize("margin", [-1.0, math.nan, math.inf])
def test_what_is_no_margin(config: RunConfig, margin: float) -> None:
    with pytest.raises(UserError, match="--margin is a difference of losses in nat, or 0"):
        small_contest(config, margin=margin)
    with pytest.raises(UserError, match="--margin is"):
        design.ablation(config, ["residual"], [0], margin=margin)


def test_a_contest_does_not_go_on_with_another_version_s_defaults(config: RunConfig, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    made = small_contest(config)
    (folder / "foam-paper" / "lr0.001-scale0.5-seed0").mkdir(parents=True)
    info = {"status": "interrupted", "versions": {"torchfoam": "0.0.1"}}
    (folder / "foam-paper" / "lr0.001-scale0.5-seed0" / "run.json").write_text(json.dumps(info))
    ledger.write(folder, {**made.as_dict(), "status": "interrupted", "command": "", "started": ""})
    with pytest.raises(UserError, match=r"made by torchfoam 0\.0\.1, this is .*start a new contest"):
        runner.resume(folder)
