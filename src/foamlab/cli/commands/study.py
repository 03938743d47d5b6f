"""`foamlab study`: the theory (docs/theory.md) measured."""

from __future__ import annotations

import sys
from pathlib import Path

from ...errors import known_name
from ...files import make_folder
from ...text import table
from ..command import Command


def study(
    what: str = "convergence",
    /,
    *,
    levels: str = "0,2,4,row",
    longest: int = 13,
    seeds: int = 8,
    rate: float = 0.1,
    seed: int = 0,
    out: Path = Path("study"),
) -> None:
    """Measure the theory: the mean squared gradient norm against the length T of a run (docs/theory.md).

    Args:
        what: convergence.
        levels: fold levels, separated by commas.
        longest: T runs over 64, 128, ..., 2^longest; at least 7.
        seeds: number of problems, each with its own noise; the intervals are over these.
        rate: the learning rate of a run is rate / sqrt(T).
        seed: seed of everything random.
        out: folder for study.html, study.json, study.csv and the pictures.
    """
    import time

    from ...machine import threads
    from ...studies import convergence as lab
    from ..run_display import display

    known_name(what, ("convergence",), "study")
    chosen, lengths = lab.levels_of(levels), [2**k for k in range(6, longest + 1)]
    make_folder(out)  # before the work, which takes minutes
    began = time.monotonic()
    with display(sys.stderr) as show, threads(1):

        def progress(share: float) -> None:
            if time.monotonic() - began > 2:
                show({"kind": "prepare", "stage": "study", "share": share})

        found = lab.convergence(chosen, lengths, seeds, rate, seed, progress)
    head, *rows = lab.table(found)
    print(table(head, rows))
    for path in lab.write(found, out):
        print(f"wrote {path}", file=sys.stderr)


COMMAND = Command(
    study,
    group="measure",
    help="measure what the theory says",
    examples=(
        "foamlab study convergence",
        "foamlab study convergence --levels 3,row --longest 11 --seeds 4 --out runs/study",
    ),
)
