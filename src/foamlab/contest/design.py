"""Who takes part in a contest, over what, and how it is judged: `comparison` and `ablation` make a `Contest`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .. import data, optimizers
from ..config import OptimizerConfig, RunConfig
from ..errors import UserError, known_name
from ..runs.provenance import cores
from ..runs.stats import MARGIN
from ..settled import check, language_only
from .model import Arm, Contest, Rule
from .studies import STUDIES, with_own

Grids = dict[str, list[float]]  # arm -> values; "" is all arms


def comparison(
    config: RunConfig,
    names: Sequence[str],
    seeds: Sequence[int],
    lr: Grids | None = None,
    scale: Grids | None = None,
    stop_factor: float = 1.2,
    stop_at: float = 0.3,
    finalists: int = 0,
    margin: float = MARGIN,
) -> Contest:
    """A contest between optimizers, each with its own grid of rates unless one is given.

    Raises:
        UserError: an unknown or doubled name, a package that is missing, settings that make no sense.
    """
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"--optimizers takes at least two names, each once; got {','.join(names) or 'none'}")
    grids = {"lr": lr or {}, "scale": scale or {}}
    for key, given in grids.items():
        for name in given:
            if name:
                known_name(name, names, f"optimizer in --{key}")
    arms = []
    for name in names:
        full = optimizers.resolve(OptimizerConfig(name))
        entry = optimizers.OPTIMIZERS[name]
        start = {"lr": full.lr, "scale": full.scale}
        tune = {key: list(values) for key, values in entry.tune.items()}
        for key, given in grids.items():
            if values := given.get(name, given.get("")):
                tune[key] = sorted(set(values))
        note = "; ".join(filter(None, (f"rates: {entry.source}", entry.limits)))
        arms.append(Arm(name, name, dict(full.options), start, tune, note, entry.ours))
    return _checked("compare", config, arms, seeds, finalists, stop_factor, stop_at, {}, margin)


def ablation(
    config: RunConfig, names: Sequence[str], seeds: Sequence[int], lr: Sequence[float] = (), **more: float
) -> Contest:
    """The paper's ablations: every setting of the named studies, at the same rates unless a grid is given.

    Raises:
        UserError: an unknown study, or settings that make no sense.
    """
    base = optimizers.resolve(replace(config.optimizer, name="foam-paper", options={}))
    rates = sorted(set(lr)) or [float(base.lr or 0)]
    arms: dict[str, Arm] = {}
    studies: dict[str, Any] = {}
    for name in names:
        about, cases = STUDIES[known_name(name, STUDIES, "study")]
        told = []
        for case in with_own(cases, float(base.scale or 0)):
            plainly = case.optimizer == "foam-paper" and not case.options and case.scale in (None, base.scale)
            start = {"lr": base.lr, "scale": base.scale if case.scale is None else case.scale}
            full = optimizers.resolve(OptimizerConfig(case.optimizer, options=case.options))
            label, ours = "foam" if plainly else f"{name}-{case.value}", optimizers.ours(case.optimizer)
            arm = Arm(label, case.optimizer, dict(full.options), start, ours=ours)
            same = next((a for a in arms.values() if replace(a, label=arm.label, tune={}) == arm), arm)
            arms.setdefault(same.label, replace(same, tune={"lr": rates}))
            told.append({"value": case.value, "arm": same.label})
        studies[name] = {"about": about, "base": "foam", "cases": told}
    return _checked("ablate", config, list(arms.values()), seeds, 0, **more, studies=studies)


def _checked(
    kind: str,
    config: RunConfig,
    arms: list[Arm],
    seeds: Sequence[int],
    finalists: int,
    stop_factor: float = 1.2,
    stop_at: float = 0.3,
    studies: dict[str, Any] | None = None,
    margin: float = MARGIN,
) -> Contest:
    config = check(config)
    language_only(config, "a contest")
    t = config.train
    if t.epochs:
        raise UserError("a contest counts steps: set train.steps, and train.epochs to 0")
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds takes whole numbers, each once; got {','.join(map(str, seeds)) or 'none'}")
    if any(not x > 0 for arm in arms for key in ("lr", "scale") for x in arm.tune.get(key, ())):
        raise UserError("rates to be tried must be above 0")
    if not t.eval_tokens or not t.steps:
        raise UserError("a contest is decided by validation loss: train.steps and train.eval_tokens must be above 0")
    if finalists < 0:
        raise UserError(f"--finalists is a number of optimizers, or 0 for all; got {finalists}")
    if stop_factor and stop_factor < 1:
        raise UserError(f"--stop_factor is a factor of at least 1, or 0 for never; got {stop_factor}")
    if not 0 < stop_at < 1:
        raise UserError(f"--stop_at is a share of the steps, between 0 and 1; got {stop_at}")
    if not 0 <= margin < math.inf:
        raise UserError(f'--margin is a difference of losses in nat, or 0 for no claim of "level"; got {margin}')
    every = t.eval_every if stop_factor else 0
    step = max(-(-int(stop_at * t.steps) // every), 1) * every if every else 0
    rule = Rule(step if step < t.steps else 0, stop_factor)
    # a trial writes no sample; what threads it has is the same for all
    quiet = replace(t, sample="", keep=1, threads=t.threads or min(4, cores()), seed=seeds[0])
    config = replace(data.settle(config)[0], train=quiet, out="")
    return Contest(kind, config, arms, list(seeds), finalists, rule, studies or {}, margin)
