"""The nouns of a contest: arm, trial, outcome, rule, and the contest itself. Knows no files, needs no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .. import settings
from ..config import OptimizerConfig, RunConfig, to_dict
from ..runs.stats import MARGIN

FILE, FORMAT = "contest.json", 1
Point = dict[str, Any]  # what is tuned: {"lr": 0.01, "scale": 0.25, ...}


@dataclass(frozen=True)
class Arm:
    """One contestant: an optimizer with fixed settings, and what is tuned.

    Args:
        label: its name in tables and in the names of run folders.
        optimizer: an entry of OPTIMIZERS.
        options: fixed options.
        start: the values that tuning starts from: lr, scale.
        tune: lr, scale or an option -> values, rising; tried in turns, each with the best of the others so far.
        note: what this implementation cannot do, and where its values come from.
        ours: whether it is torchfoam's own optimizer.
    """

    label: str
    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)
    start: Point = field(default_factory=dict)
    tune: dict[str, list[Any]] = field(default_factory=dict)
    note: str = ""
    ours: bool = False

    def at(self, point: Point, shared: OptimizerConfig) -> OptimizerConfig:
        """The optimizer's settings at a point; betas, eps and weight decay are shared by all arms."""
        values = dict(point)
        rates = {key: values.pop(key) for key in ("lr", "scale")}
        return replace(shared, name=self.optimizer, **rates, options={**self.options, **values})


@dataclass(frozen=True)
class Trial:
    """One run of a contest: an arm at one point, with one seed. `stage` is "lr", "scale", ... or "seeds"."""

    arm: Arm
    point: Point
    seed: int
    stage: str

    @property
    def name(self) -> str:
        """Its folder in that of the contest: ARM/lr0.01-scale0.25-seed0."""
        values = "-".join(f"{key}{_short(value)}" for key, value in self.point.items())
        return f"{self.arm.label}/{values}-seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    `status`: none, running, interrupted, failed (all to be run or resumed); done; stopped (by the contest's rule);
    diverged (too many steps that were not finite). `loss`: the last evaluation's, or the one it was stopped for.
    """

    status: str
    loss: float = math.inf
    why: str = ""

    @property
    def over(self) -> bool:
        return self.status in ("done", "stopped", "diverged")

    @property
    def rank(self) -> tuple[int, float]:
        """Lower is better; a stopped run is behind all that finished, a diverged one behind all."""
        return ("done", "stopped").index(self.status) if self.status in ("done", "stopped") else 2, self.loss


@dataclass(frozen=True)
class Rule:
    """When a trial is given up: at `step`, with a loss above `factor` times the lowest of its arm at that step.

    Only its own arm counts: else the runs of a weak arm that come early would end, the better ones later not.
    """

    step: int
    factor: float

    def __str__(self) -> str:
        if not self.step:
            return "No run was stopped early."
        return (
            f"While rates are tuned, a run is stopped at step {self.step} if its validation loss there is above "
            f"{self.factor:g} times the lowest that a run of the same optimizer has had at that step by then."
        )


@dataclass(frozen=True)
class Contest:
    """What a contest is, as `contest.json` keeps it.

    Args:
        kind: compare or ablate.
        config: settings of all runs; of `optimizer` only betas (if set), eps and weight decay count.
        arms: the contestants.
        seeds: the first tunes, all count.
        finalists: how many arms are repeated over the seeds; 0 is all.
        rule: when a run is given up.
        studies: of an ablation: name -> {"about", "base": arm, "cases": [{"value", "arm"}]}.
        margin: how far apart, in nat, two arms may be that are called level; 0 is never.
    """

    kind: str
    config: RunConfig
    arms: list[Arm]
    seeds: list[int]
    finalists: int
    rule: Rule
    studies: dict[str, Any]
    margin: float = MARGIN

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": self.kind,
            "settings": to_dict(self.config),
            "contestants": [asdict(arm) for arm in self.arms],
            "seeds": self.seeds,
            "finalists": self.finalists,
            "rule": asdict(self.rule),
            "rule_in_words": str(self.rule),
            "studies": self.studies,
            "margin": self.margin,
        }

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Contest:
        return cls(
            kind=d["kind"],
            config=settings.from_dict(d["settings"], f"{FILE}: "),
            arms=[Arm(**arm) for arm in d["contestants"]],
            seeds=d["seeds"],
            finalists=d["finalists"],
            rule=Rule(**d["rule"]),
            studies=d["studies"],
            margin=d.get("margin", MARGIN),  # contests of old have none
        )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
