"""Contests over runs that are made up (`make_contest`), and small ones that are run (`small_contest`)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pages import make_run

from foamlab.config import RunConfig
from foamlab.contest import design
from foamlab.contest.folder import STOPPED, Outcomes, write
from foamlab.contest.model import Arm, Contest, Rule
from foamlab.contest.results import standings
from foamlab.contest.search import wanted

# name -> (best lr, loss there, bytes of state, scale is tuned)
FIELD = {
    "foam-paper": (1e-2, 5.21, 4.1e6, True),
    "foam-l3": (1e-2, 5.215, 3.4e6, True),
    "foam-row": (1e-2, 5.23, 2.9e6, True),
    "foam-int8": (1e-2, 5.22, 2.4e6, True),
    "foam-muon": (1e-2, 5.12, 3.1e6, True),
    "adamw": (3e-3, 5.31, 8e6, False),
    "adamw-split": (1e-2, 5.22, 8e6, True),
    "muon": (1e-2, 5.1, 5.6e6, True),
    "adamw8bit": (3e-3, 5.32, 2.3e6, False),
    "adam-mini": (3e-3, 5.33, 4.1e6, False),
    "galore": (1e-2, 5.4, 4.4e6, True),
    "apollo": (1e-2, 5.35, 4.4e6, True),
    "apollo-mini": (1e-2, 5.41, 2.9e6, True),
    "sgd": (1.0, 7.4, 4e6, False),
}
STEPS = 40


def make_contest(
    folder: Path, names: list[str], seeds: tuple[int, ...] = (0, 1, 2), limit: int = 9999, **more: Any
) -> Path:
    """A contest folder after at most `limit` runs: the search's own trials, each a run as `make_run` makes it."""
    folder.mkdir(parents=True)
    arms = []
    for name in names:
        lr, _, _, split = FIELD[name]
        tune = {"lr": [lr / 4, lr / 2, lr]} | ({"scale": [0.125, 0.25, 0.5]} if split else {})
        start = {"lr": lr, "scale": 0.25 if split else 1.0}
        arms.append(
            Arm(name, name, {"level": 2} if "foam" in name else {}, start, tune, "rates: a paper", "foam" in name)
        )
    rule, outcomes, over = Rule(STEPS // 4, 1.1), Outcomes(folder), 0
    while (todo := wanted(arms, seeds, 0, outcomes)[0]) and over < limit:
        trial = todo[0]
        best, loss, state, _ = FIELD[trial.arm.label]
        off = abs(math.log(trial.point["lr"] / best))
        final = loss + 0.1 * off**2 + 0.02 * math.sin(7 * trial.seed + len(trial.arm.label)) + trial.point["scale"] / 50
        fate = "diverged" if trial.point["lr"] > 1.5 else "stopped" if off > 1.3 else "done"
        make_run(
            folder / trial.name, trial.arm.optimizer, final, steps=STEPS, done=12 if fate != "done" else None,
            seed=trial.seed, lr=trial.point["lr"], state=state, settings={"optimizer.scale": trial.point["scale"]},
            status={"done": "done", "stopped": "interrupted", "diverged": "failed"}[fate],
        )  # fmt: skip
        if fate == "stopped":
            told = {"step": rule.step, "loss": final, "why": "too high"}
            (folder / trial.name / STOPPED).write_text(json.dumps(told))
        if fate == "diverged":
            info = json.loads((folder / trial.name / "run.json").read_text())
            (folder / trial.name / "run.json").write_text(json.dumps({**info, "error": "stopped: ten steps lost"}))
        outcomes.forget(trial.name)
        over += 1
    train = {"steps": STEPS, "batch": 16, "seed": 0}
    optimizer = {"betas": None, "eps": 1e-8, "weight_decay": 0.0, "name": "foam", "lr": None}
    contest: dict[str, Any] = {
        "format": 1, "kind": "compare", "status": "running" if todo else "done", "command": "foamlab compare demo",
        "started": "2025-01-01T00:00:00", "data": "abc", "settings": {"train": train, "optimizer": optimizer},
        "contestants": [asdict(arm) for arm in arms], "seeds": list(seeds), "finalists": 0, "rule": asdict(rule),
        "rule_in_words": str(rule), "studies": {}, **more,
    }  # fmt: skip
    write(folder, contest | standings(folder, contest))
    return folder


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


def small_contest(config: RunConfig, names: Sequence[str] = ("foam-paper", "adamw"), **changes: Any) -> Contest:
    rates = {"lr": {"": [1e-3, 1e-2]}, "scale": {"foam-paper": [0.5]}}
    return design.comparison(config, names, [0, 1], **{**rates, **changes})
