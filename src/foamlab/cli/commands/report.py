"""`foamlab report`: runs or a contest as a table and a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ...text import fitted
from ..command import Command


def report(
    *runs: Path, out: Path = Path("report.html"), static: str = "", tables: bool = False, target: float = 0
) -> None:
    """Compare runs, or show a contest: a table here, and one self-contained HTML page with charts and settings.

    Args:
        runs: run folders, folders that contain some, or the folder of one contest or ablation. Contests among runs get
            a line each.
        out: the HTML page; it opens without a network.
        static: also write the charts as pictures: png, svg, pdf, separated by commas.
        tables: also write the numbers as CSV.
        target: compare the cost of reaching this loss; 0 means the highest final loss of the runs, in a contest that of
            adamw.
    """
    from ...contest import inventory, page
    from ...report import runs_page

    found = inventory.take(runs)
    for path, why in found.skipped.items():
        print(f"skipped {path}: {why}", file=sys.stderr)
    more: dict[str, Any] = {
        "static": [kind for kind in static.split(",") if kind],
        "tables": tables,
        "target": target or None,
    }
    if found.contest:
        print(fitted(page.compare_table([found.contest])))
        written = page.report([found.contest], out, **more)
    else:
        rows = runs_page.compare_table(found.runs)
        print(fitted(rows), *runs_page.legend(rows), sep="\n")
        print(*found.contests.values(), sep="\n", end="\n" * bool(found.contests))
        written = runs_page.report(found.runs, out, contests=[*found.contests.values()], **more)
    for path in written:
        print(f"wrote {path}")


COMMAND = Command(
    report,
    group="run",
    help="write an HTML page about runs or a contest",
    examples=(
        "foamlab report runs/* --out report.html",
        "foamlab report runs/contest --static png --tables",
    ),
)
