"""The commands `compare` and `ablate`: what their flags mean. `sweep` runs the contest, `board` shows it.

Imported by `cli` for its signatures, so heavy imports stay inside the functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..errors import UserError
from .command import INTERRUPTED


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
    """A fair contest: same model, tokens and batches for all, a grid of rates for each, several seeds for the best.

    Of the settings of `optimizer` only betas, eps and weight_decay count, for all; the rest is each optimizer's own.

    Args:
        optimizers: names from `foamlab optimizers`, separated by commas.
        lr: rates to try, separated by commas, for all, or by name: adamw=1e-3,3e-3;sgd=0.1; empty means each one's own
            (`foamlab optimizers NAME`). A best value at an end is followed one further; a single value is not searched.
        scale: the same for the rate of matrices relative to lr, at each one's default lr. Where both are tried, lr
            moves with the rate of matrices held. Empty means each one's own values, too, for those that have a split.
        seeds: the first tunes, all count.
        finalists: repeat only so many of the best over the seeds; 0 means all.
        stop_factor: stop a run early if its validation loss exceeds this multiple of the lowest that a run of the same
            optimizer had at that step; 0 disables it.
        stop_at: share of the steps after which that is checked, once.
        margin: say that two are level only where it is shown that their losses differ by less than this (nat), by two
            one-sided tests; 0 means never. Choose it before you see the losses.
        jobs: runs at a time; 0 means one a GPU, or cores / threads. Not kept: give it again with --resume.
        resume: folder of a contest to go on with; all else it keeps as it was begun.
    """
    given = _given(compare, locals())

    def begin() -> Any:
        from ..contest.design import comparison

        tries, lr_grid, scale_grid = _integers(numbers(seeds, "seeds")), grids(lr, "lr"), grids(scale, "scale")
        names = [name for name in optimizers.replace(" ", "").split(",") if name]
        return comparison(config, names, tries, lr_grid, scale_grid, stop_factor, stop_at, finalists, margin)

    return _run("compare", config, begin, given, jobs, resume)


def ablate(
    config: RunConfig,
    studies: str = "residual,second-moment,level,alpha,rho,bias-correction,direction,residual-in-v",
    lr: str = "",
    seeds: str = "0,1,2",
    margin: float = 0.01,
    jobs: int = 0,
    resume: str = "",
) -> int:
    """The paper's ablations of FOAM: what each part of it is worth, over the same model, tokens and batches.

    Rates are those of `optimizer.lr` and `optimizer.scale`, or the paper's where these are empty.

    Args:
        studies: which, separated by commas.
        lr: rates to try for every setting, separated by commas; empty means one rate for all, as in the paper.
        seeds: the first tunes, all count.
        margin: say that a setting is level with the paper's only where it is shown that their losses differ by less
            than this (nat), by two one-sided tests; 0 means never. Choose it before you see the losses.
        jobs: runs at a time; 0 means one a GPU, or cores / threads.
        resume: folder of an ablation to go on with; all else it keeps as it was begun.
    """
    given = _given(ablate, locals())

    def begin() -> Any:
        from ..contest.design import ablation

        names = [name for name in studies.replace(" ", "").split(",") if name]
        return ablation(config, names, _integers(numbers(seeds, "seeds")), numbers(lr, "lr"), margin=margin)

    return _run("ablate", config, begin, given, jobs, resume)


def grids(text: str, flag: str) -> dict[str, list[float]]:
    """Values for all arms, or for some by name.

    >>> grids("1e-3,3e-3", "lr"), grids("adamw=1e-3,3e-3;sgd=0.1", "lr")
    ({'': [0.001, 0.003]}, {'adamw': [0.001, 0.003], 'sgd': [0.1]})
    """
    found = {}
    for part in filter(None, text.replace(" ", "").split(";")):
        name, sign, values = part.rpartition("=")
        found[name if sign else ""] = numbers(values, flag)
    return found


def numbers(text: str, flag: str) -> list[float]:
    """ "1,2" -> [1.0, 2.0]."""
    try:
        return [float(x) for x in text.split(",") if x]
    except ValueError:
        raise UserError(f"--{flag} takes numbers separated by commas, or NAME=NUMBERS;NAME=...; got {text!r}") from None


def _integers(values: Iterable[float]) -> list[int]:
    if not all(0 <= x < 2**53 and x == int(x) for x in values):  # what a float holds exactly
        raise UserError(f"--seeds takes whole numbers from 0, got {', '.join(f'{x:g}' for x in values)}")
    return [int(x) for x in values]


def _given(command: Callable[..., int], values: Mapping[str, Any]) -> bool:
    """Whether any flag that makes a contest differs from its default."""
    flags = {name: p.default for name, p in inspect.signature(command).parameters.items()}
    return any(values[name] != flags[name] for name in flags.keys() - {"config", "jobs", "resume"})


def _run(command: str, config: RunConfig, begin: Callable[[], Any], given: bool, jobs: int, resume: str) -> int:
    """Run a contest, new or resumed, and tell what came of it."""
    from ..contest import runner
    from ..contest.folder import FILE
    from ..contest.page import report
    from .contest_display import board, tell

    if jobs < 0:
        raise UserError(f"--jobs is a number of runs at a time, or 0; got {jobs}")
    folder = Path(resume or config.out or f"runs/{command}")
    with board() as on_event:
        if resume:
            end = runner.go_on(config, folder, jobs, on_event, begin() if given else None)
        else:
            end = runner.start(begin(), folder, jobs, on_event)
    interrupted = end["status"] == "interrupted"
    written = [folder / FILE, *report([folder], folder / "report.html")]
    again = f"foamlab {command} --resume {folder}" + (f" --jobs {jobs}" if jobs else "")
    tell(end, written, again if interrupted else "")
    return INTERRUPTED if interrupted else 0
