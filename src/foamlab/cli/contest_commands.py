"""What the commands `compare` and `ablate` share: what their flags mean, and a contest from its start to its page."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..errors import UserError
from .command import INTERRUPTED


def words(text: str) -> list[str]:
    """Names separated by commas.

    >>> words("foam, adamw")
    ['foam', 'adamw']
    """
    return [name for name in text.replace(" ", "").split(",") if name]


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


def seed_list(text: str) -> list[int]:
    """The seeds of a contest. Raises UserError for one that is no whole number from 0."""
    values = numbers(text, "seeds")
    if not all(0 <= x < 2**53 and x == int(x) for x in values):  # what a float holds exactly
        raise UserError(f"--seeds takes whole numbers from 0, got {', '.join(f'{x:g}' for x in values)}")
    return [int(x) for x in values]


def given(command: Callable[..., int], values: Mapping[str, Any]) -> bool:
    """Whether a flag that makes a contest differs from its default."""
    flags = {name: p.default for name, p in inspect.signature(command).parameters.items()}
    return any(values[name] != flags[name] for name in flags.keys() - {"config", "jobs", "resume"})


def to_resume(command: str, folder: Path, jobs: int) -> str:
    """The command line that resumes a contest, as a shell takes it.

    >>> to_resume("compare", Path("my runs"), 2)
    "foamlab compare --resume 'my runs' --jobs 2"
    """
    return shlex.join(["foamlab", command, "--resume", str(folder), *(["--jobs", str(jobs)] if jobs else [])])


def run(command: str, config: RunConfig, begin: Callable[[], Any], changed: bool, jobs: int, resume: str) -> int:
    """Run a contest, new or resumed, show its results and write its page; the exit code.

    Args:
        command: compare or ablate.
        config: the settings that all runs share.
        begin: makes the contest from the flags.
        changed: whether flags were given that make a contest; to resume, they must agree with its own.
        jobs: runs at a time; 0 means one per GPU, or cores / threads.
        resume: folder of a contest to resume.
    """
    from ..contest import runner
    from ..contest.folder import FILE
    from ..contest.page import report
    from .contest_display import board, tell

    if jobs < 0:
        raise UserError(f"--jobs is a number of runs at a time, or 0; got {jobs}")
    folder = Path(resume or config.out or f"runs/{command}")
    with board() as on_event:
        if resume:
            end = runner.go_on(config, folder, jobs, on_event, begin() if changed else None)
        else:
            end = runner.start(begin(), folder, jobs, on_event)
    interrupted = end["status"] == "interrupted"
    written = [folder / FILE, *report([folder], folder / "report.html")]
    tell(end, written, to_resume(command, folder, jobs) if interrupted else "")
    return INTERRUPTED if interrupted else 0
