"""Small runs that are trained: their weights, equality to the bit, stops, losses that are not finite, processes."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from safetensors.torch import load_file

from foamlab.models.language import loss_fn
from foamlab.tasks import objective
from foamlab.training import checkpoint
from tolerances import exact


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint of a run."""
    return load_file(checkpoint.found(folder)[-1] / "model.safetensors")


def same(a: Path, b: Path) -> None:
    """The last checkpoints and the records of two runs are equal, bit for bit."""
    for name, x in weights(a).items():
        exact(x, weights(b)[name], name)
    one, two = (checkpoint.load(checkpoint.found(run)[-1]) for run in (a, b))
    assert one["step"] == two["step"]
    for number, state in one["optimizer"]["state"].items():
        for name, x in state.items():
            exact(x, two["optimizer"]["state"][number][name], f"{number} {name}")
    assert small.metrics(a) == small.metrics(b)


def stop_at(step: int, *signals: int) -> Callable[[dict[str, Any]], None]:
    """An `on_event` that sends this process signals (Ctrl-C, if none is given) after a step."""

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "train" and event["step"] == step:
            for number in signals or (signal.SIGINT,):
                os.kill(os.getpid(), number)

    return on_event


def child(home: Path, out: Path, body: str, *before: str, **environment: str) -> subprocess.Popen[str]:
    """A process of its own that runs `body` with `config`, `train` and the modules at hand."""
    script = (
        "import os, signal, sys, torch\nfrom pathlib import Path\nimport small\n"
        "from foamlab.tasks import objective\nfrom foamlab.training import checkpoint\n"
        "from foamlab.training.run import train\n"
        f"home, out = Path({str(home)!r}), Path({str(out)!r})\n" + body
    )
    file = out.with_suffix(".py")
    file.write_text(script)
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen([sys.executable, *before, str(file)], env=environ, stderr=subprocess.PIPE, text=True)


def poison(monkeypatch: pytest.MonkeyPatch, where: str, calls: set[int]) -> None:
    """Make the loss, or the gradient alone, of some calls in training not finite."""
    count = 0

    def bad(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor, chunk: int = 0) -> torch.Tensor:
        nonlocal count
        loss = loss_fn(model, ids, labels, chunk)
        if not model.training or ids.is_meta:  # which is the planner's
            return loss
        count += 1
        if count - 1 in calls and where == "loss":
            return loss * math.nan
        if count - 1 in calls:
            loss.register_hook(lambda g: g * math.inf)
        return loss

    monkeypatch.setattr(objective, "loss_fn", bad)
