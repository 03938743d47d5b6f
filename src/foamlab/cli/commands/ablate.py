"""`foamlab ablate`: the paper's ablations of FOAM."""

from __future__ import annotations

from typing import Any

from ...config import RunConfig
from ..command import Command
from ..contest_commands import given, numbers, run, seed_list, words


def ablate(
    config: RunConfig,
    studies: str = "residual,second-moment,level,alpha,rho,bias-correction,direction,residual-in-v",
    lr: str = "",
    seeds: str = "0,1,2",
    margin: float = 0.01,
    jobs: int = 0,
    resume: str = "",
) -> int:
    """Repeat the paper's ablations of FOAM: what each part of it is worth, on the same model, tokens and batches.

    Learning rates are those of `optimizer.lr` and `optimizer.scale`, or the paper's where these are empty.

    Args:
        studies: ablations to run, separated by commas.
        lr: learning rates to try for every setting, separated by commas; empty means one rate for all, as in the paper.
        seeds: seeds, separated by commas: the first is used for tuning, all for the results.
        margin: call a setting equal to the paper's only if their losses are shown to differ by less than this (nat),
            by two one-sided tests; 0 disables this. Choose it before you see the losses.
        jobs: runs at a time; 0 means one per GPU, or cores / threads. Not saved: give it again with --resume.
        resume: folder of an ablation to resume; it keeps all its other settings.
    """
    changed = given(ablate, locals())

    def begin() -> Any:
        from ...contest.design import ablation

        return ablation(config, words(studies), seed_list(seeds), numbers(lr, "lr"), margin=margin)

    return run("ablate", config, begin, changed, jobs, resume)


COMMAND = Command(
    ablate,
    group="measure",
    help="repeat the paper's ablations of FOAM",
    examples=(
        "foamlab ablate demo --studies residual,level --out runs/ablation",
        "foamlab ablate --resume runs/ablation",
    ),
)
