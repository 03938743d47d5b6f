"""What ends a run early, or a step: Ctrl-C, signals, losses that are not finite."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from trained import child, poison, same, stop_at

from foamlab import optimizers
from foamlab.config import OptimizerConfig
from foamlab.errors import Diverged, UserError
from foamlab.training import checkpoint
from foamlab.training.run import train
from tolerances import exact

# ---------------------------------------------------------------------------------------------- signals


def test_second_ctrl_c_aborts(home: Path, tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(small.config(home, tmp_path / "run"), on_event=stop_at(2, signal.SIGINT, signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is handler
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "interrupted"
    assert checkpoint.found(tmp_path / "run") == []


def test_ctrl_c_before_the_first_step_saves_too(home: Path, tmp_path: Path) -> None:
    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "start":
            os.kill(os.getpid(), signal.SIGINT)

    assert train(small.config(home, tmp_path / "run"), on_event=on_event).status == "interrupted"
    assert checkpoint.load(checkpoint.found(tmp_path / "run")[-1])["step"] == 1


def test_sigterm_saves_and_does_not_abort_after_ctrl_c(home: Path, tmp_path: Path) -> None:
    """torchrun sends both for one Ctrl-C."""
    both = stop_at(2, signal.SIGTERM, signal.SIGINT, signal.SIGTERM)
    assert train(small.config(home, tmp_path / "run"), on_event=both).status == "interrupted"
    assert checkpoint.load(checkpoint.found(tmp_path / "run")[-1])["step"] == 3


def test_ctrl_c_from_outside_saves_and_ends(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = child(home, out, "r = train(small.config(home, out, steps=10**6))\nsys.exit(r.status != 'interrupted')")
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_bytes()) < 500:
        assert process.poll() is None and time.monotonic() < deadline, process.stderr and process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0, process.stderr and process.stderr.read()
    steps = [line["step"] for line in small.metrics(out) if line["kind"] == "train"]
    assert checkpoint.load(checkpoint.found(out)[-1])["step"] == steps[-1] == len(steps)


def test_killed_in_the_middle_of_a_save(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    body = """
whole = torch.save
def half(obj, path):
    whole(obj, path)
    if "step-00000004" in str(path) or "-00000004-" in str(path):
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = half
train(small.config(home, out, checkpoint_every=2))
"""
    process = child(home, out, body)
    assert process.wait(60) == -signal.SIGKILL, process.stderr and process.stderr.read()
    names = sorted(os.listdir(out / "checkpoints"))
    assert names[0].startswith(".part-00000004") and names[1:] == ["step-00000002"]
    train(small.config(home, out, checkpoint_every=2), resume=out)
    train(small.config(home, tmp_path / "whole", checkpoint_every=2))
    same(tmp_path / "whole", out)
    assert not [name for name in os.listdir(out / "checkpoints") if name.startswith(".")]


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["foam", "adamw"])
def test_a_step_that_is_not_finite_changes_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, optimizer: str
) -> None:
    poison(monkeypatch, where, {2})
    built: list[torch.optim.Optimizer] = []
    real = optimizers.build

    def build(config: OptimizerConfig, model: Any) -> Any:
        built.append(real(config, model))
        return built[-1]

    monkeypatch.setattr(optimizers, "build", build)
    before: list[torch.Tensor] = []

    def tensors() -> list[torch.Tensor]:
        params = [p for g in built[-1].param_groups for p in g["params"]]
        return [x.detach().clone() for p in params for x in (p, *built[-1].state[p].values())]

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "train" and event["step"] == 2:
            before.extend(tensors())
        if event["kind"] == "skip":
            for a, b in zip(before, tensors(), strict=True):
                exact(a, b)

    result = train(small.config(home, tmp_path / "run", optimizer, checkpoint_every=0), on_event=on_event)
    assert before and result.skipped == 1 and result.step == 6
    skips = [line for line in small.metrics(tmp_path / "run") if line["kind"] == "skip"]
    assert skips == [{"kind": "skip", "step": 3, "why": skips[0]["why"]}] and where in skips[0]["why"]
    assert checkpoint.load(checkpoint.found(tmp_path / "run")[-1])["skipped"] == 1


def test_patience_ends_with_the_last_good_state(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"checkpoint_every": 0, "patience": 3}
    with monkeypatch.context() as patch:
        poison(patch, "loss", set(range(2, 99)))
        with pytest.raises(Diverged, match=r"3 steps in a row after step 2 .*optimizer.lr.*resume from step 2"):
            train(small.config(home, tmp_path / "run", **settings))
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["status"] == "failed" and info["reason"] == "diverged" and "in a row" in info["error"]
    assert [p.name for p in checkpoint.found(tmp_path / "run")] == ["step-00000002"]
    train(small.config(home, tmp_path / "run", **settings), resume=tmp_path / "run")  # the cause has been mended
    assert not {"error", "reason"} & json.loads((tmp_path / "run" / "run.json").read_text()).keys()
    train(small.config(home, tmp_path / "whole", **settings))
    same(tmp_path / "whole", tmp_path / "run")


def test_a_run_that_cannot_resume_offers_no_command(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an optimizer whose state is objects, such as galore."""
    monkeypatch.setattr(checkpoint, "storable", lambda state: False)
    ends: list[dict[str, Any]] = []

    def stop(event: dict[str, Any]) -> None:
        stop_at(3)(event)
        ends.extend([event] * (event["kind"] == "end"))

    train(small.config(home, tmp_path / "run"), on_event=stop)
    assert [(end["status"], end["resume"]) for end in ends] == [("interrupted", "")]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["resume"] == ""
    poison(monkeypatch, "loss", set(range(4, 99)))
    with pytest.raises(Diverged) as e:
        train(small.config(home, tmp_path / "lost", patience=2))
    assert checkpoint.found(tmp_path / "lost") and "--resume" not in str(e.value)


def test_state_that_cannot_be_stored_is_told_and_not_resumed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p]["odd"] = Path()

    monkeypatch.setattr(optimizers, "build", lambda c, m: Odd(m.parameters(), lr=0.1))
    events: list[dict[str, Any]] = []
    train(small.config(home, tmp_path / "run", "sgd", steps=1), on_event=events.append)
    assert any("will not resume" in e.get("message", "") for e in events)
    with pytest.raises(UserError, match="cannot be resumed"):
        train(small.config(home, tmp_path / "run", "sgd", steps=2), resume=tmp_path / "run")
