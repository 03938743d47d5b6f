"""`foamlab compare`: a fair contest between optimizers."""

from __future__ import annotations

from typing import Any

from ...config import RunConfig
from ..command import Command
from ..contest_commands import given, grids, run, seed_list, words


def compare(
    config: RunConfig,
    optimizers: str = "foam-split,adamw,adamw-split",
    lr: str = "",
    scale: str = "",
    seeds: str = "0,1,2",
    finalists: int = 0,
    stop_factor: float = 1.2,
    stop_at: float = 0.3,
    margin: float = 0.01,
    jobs: int = 0,
    resume: str = "",
) -> int:
    """Compare optimizers fairly: same model, tokens and batches, a grid of learning rates for each, then several seeds.

    Of the settings of `optimizer` only betas, eps and weight_decay count, for all; the rest is each optimizer's own.

    Args:
        optimizers: names from `foamlab optimizers`, separated by commas.
        lr: learning rates to try, separated by commas, for all or by name: adamw=1e-3,3e-3;sgd=0.1; empty means each
            one's own (`foamlab optimizers NAME`). If the best value is at an end, the next one beyond it is tried too;
            a single value is not searched.
        scale: values to try for the learning rate of matrices relative to lr, written as for lr; empty means each
            one's own values, for those that have two rates. It is searched at each one's default lr. Where both are
            searched, lr changes while the learning rate of the matrices is held fixed.
        seeds: seeds, separated by commas: the first is used for tuning, all for the results.
        finalists: repeat only this many of the best over the seeds; 0 means all.
        stop_factor: stop a run early if its validation loss exceeds this multiple of the lowest that a run of the same
            optimizer had at that step; 0 disables it.
        stop_at: share of the steps after which that is checked, once.
        margin: call two optimizers equal only if their losses are shown to differ by less than this (nat), by two
            one-sided tests; 0 disables this. Choose it before you see the losses.
        jobs: runs at a time; 0 means one per GPU, or cores / threads. Not saved: give it again with --resume.
        resume: folder of a contest to resume; it keeps all its other settings.
    """
    changed = given(compare, locals())

    def begin() -> Any:
        from ...contest.design import comparison

        rates, scales = grids(lr, "lr"), grids(scale, "scale")
        return comparison(
            config, words(optimizers), seed_list(seeds), rates, scales, stop_factor, stop_at, finalists, margin
        )

    return run("compare", config, begin, changed, jobs, resume)


COMMAND = Command(
    compare,
    group="measure",
    help="compare optimizers fairly, each with rates of its own",
    examples=(
        "foamlab compare demo --optimizers foam-split,adamw,adamw-split,muon --out runs/contest",
        "foamlab compare demo --optimizers foam,adamw --lr 1e-3,3e-3 --seeds 0,1,2,3,4",
        "foamlab compare --resume runs/contest",
    ),
    renamed={"hopeless": "stop_factor", "hopeless_at": "stop_at"},
)
