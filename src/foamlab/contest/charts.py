"""A contest as charts: losses, curves, loss against memory and against each rate, the studies of an ablation.

Rows are those of `standings`, made anew from the run folders, so one that still runs can be looked at. Draws nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..report.charts import Chart, Curves, Dots, Frontier, Line, Panels, Point, average, empty, view, window
from ..report.residuals import heat
from ..report.runs_page import line
from ..runs.summary import Summary, summarize
from .folder import read
from .model import Arm, Trial
from .results import standings
from .search import moved

PANELS = 4  # with more arms than this each also has a panel of its own


@dataclass(frozen=True)
class Row:
    """An arm at its place: its line of `results`, and its finished runs at its best point, one a seed."""

    place: int
    result: dict[str, Any]
    runs: list[Summary]

    @property
    def arm(self) -> str:
        return str(self.result["arm"])

    @property
    def loss(self) -> float:
        return math.nan if self.result["loss"] is None else float(self.result["loss"])

    def point(self, x: float = math.nan, label: str = "") -> Point:
        """Its mean loss with interval and seeds."""
        low, high = (math.nan if (y := self.result[end]) is None else y for end in ("low", "high"))
        return Point(self.place, label or self.arm, x, self.loss, low, high, tuple(run.loss for run in self.runs))


@dataclass(frozen=True)
class Book:
    """What a contest folder holds, as it is now: `contest.json` with fresh standings, and the rows, best first."""

    folder: Path
    contest: dict[str, Any]
    rows: list[Row]

    @property
    def ranked(self) -> list[Row]:
        return [row for row in self.rows if math.isfinite(row.loss)]

    @property
    def near(self) -> list[Row]:
        """The ranked rows without those so far behind that a chart would show little else."""
        top = view([row.loss for row in self.ranked])[1]
        return [row for row in self.ranked if row.loss <= top]

    @property
    def unseen(self) -> str:
        """Words for the rows that `near` leaves out."""
        far = [f"{row.arm} ({row.loss:.3f})" for row in self.ranked if row not in self.near]
        return f" Far above, and out of view: {', '.join(far)}." if far else ""


def open_book(folder: Path) -> Book:
    """Read a contest.

    Raises:
        UserError: as `folder.read`.
    """
    kept = read(folder)
    contest = {**kept, **standings(folder, kept)}
    names = [name for result in contest["results"] for name in result["folders"]]
    runs = dict(zip(names, summarize([folder / name for name in names]) if names else []))
    return Book(
        folder,
        contest,
        [
            Row(place, result, [replace(runs[name], label=name) for name in result["folders"]])
            for place, result in enumerate(contest["results"])
        ],
    )


def charts(book: Book) -> list[Chart]:
    """Losses, curves, frontier, sensitivities, studies, residual ratios; what is empty is left out."""
    near = [row.point() for row in book.near]
    lines = [curve(row) for row in book.ranked if any(run.evals["loss"] for run in row.runs)]
    shown = {row.place for row in book.near}
    common = window([c for c in lines if c.run in shown])
    title = "Validation loss of the best rates"
    found: list[Chart] = [
        Dots("losses", "Final validation loss", "validation loss", near),
        Curves("curves", title, "validation loss", lines, window=common),
    ]
    if len(lines) > PANELS:
        best = replace(lines[0], look="grey", low=None, high=None)
        each = [
            Curves(f"curve-{c.run}", c.label, "validation loss", [c] if c is lines[0] else [best, c], False, common)
            for c in lines
            if c.run in shown
        ]
        found.append(Panels("curves-each", f"One by one, beside {lines[0].label} (dotted)", each))
    found.append(frontier(book))
    keys = dict.fromkeys(key for arm in book.contest["contestants"] for key in arm["tune"])
    found += [panels for key in keys if (panels := sensitivity(book, key))]
    rows = {row.arm: row for row in book.ranked}
    for name, study in book.contest["studies"].items():
        cases = [(rows[case["arm"]], case) for case in study["cases"] if case["arm"] in rows]
        said = [row.point(label=f"{c['value']}{' *' * (c['arm'] == study['base'])}") for row, c in cases]
        found.append(Dots(f"study-{name}", f"{name}: {study['about']}", "validation loss", said))
    residuals = ((row, run.run.lines("residual")) for row in book.ranked for run in row.runs)
    if recorded := next(((row, lines) for row, lines in residuals if lines), None):
        found += filter(None, [heat(recorded[1], "residual", f"Residual ratio: {recorded[0].arm}")])
    return [chart for chart in found if not empty(chart)]


def curve(row: Row) -> Line:
    """Its validation loss, the mean over seeds in a band from lowest to highest."""
    return replace(average([line(row.place, run, "evals", "loss") for run in row.runs]), label=row.arm)


def frontier(book: Book) -> Frontier:
    """Loss against the bytes of state that a parameter of the model costs."""
    points = []
    for row in book.near:
        parameters = statistics.fmean(run.parameters for run in row.runs)
        if row.result["state"] and parameters > 0:
            points.append(row.point(row.result["state"] / parameters))
    return Frontier(
        "frontier", "Loss against memory", "optimizer state, bytes per model parameter", "validation loss", points
    )


def tried(book: Book, row: Row) -> Iterator[tuple[str, list[tuple[float, Mapping[str, Any]]]]]:
    """For each key that was tuned: (value, what `runs` tells of it), the other rates at their best."""
    fates = {run["folder"]: run for run in book.contest["runs"]}
    arm = next(Arm(**a) for a in book.contest["contestants"] if a["label"] == row.arm)
    for key, values in arm.tune.items():
        added = book.contest["search"][row.arm]["extended"].get(key)
        points = [moved(arm, row.result["point"], key, value) for value in (*values, *([added] if added else []))]
        names = {point[key]: Trial(arm, point, book.contest["seeds"][0], key).name for point in points}
        yield key, [(value, fates[name]) for value, name in sorted(names.items()) if name in fates]


def sensitivity(book: Book, key: str) -> Panels | None:
    """Final loss of the tuning runs against `key`, a panel an arm; None where no arm has tried two values."""
    found = [(row, runs) for row in book.rows for name, runs in tried(book, row) if name == key and len(runs) > 1]
    found = [(row, runs) for row, runs in found if all(isinstance(x, (int, float)) for x, _ in runs)]
    done = [run["loss"] for _, runs in found for _, run in runs if run["status"] == "done"]
    common = low, high = view(done)
    if not found or math.isnan(low):
        return None
    parts = []
    for row, runs in found:
        own = [run["loss"] for _, run in runs if run["status"] == "done"]
        alone = bool(own) and min(own) > common[1]  # out of sight on the common scale
        low, high = view(own) if alone else common
        ends = [run["loss"] if run["status"] == "done" and run["loss"] <= high else math.nan for _, run in runs]
        lines = [Line(row.place, row.arm, {key: [x for x, _ in runs]}, ends)]
        for (x, run), end in zip(runs, ends):
            if math.isnan(end) and run["status"] in ("done", "stopped", "diverged"):
                said = f"{run['loss']:.3f}" if run["status"] == "done" else run["status"]
                lines.append(Line(row.place, said, {key: [x]}, [high - 0.06 * (high - low)], "lost"))
        name, logarithmic = f"{key}-{row.place}", all(x > 0 for x, _ in runs)
        title = f"{row.arm} (own scale)" if alone else row.arm
        parts.append(Curves(name, title, "validation loss", lines, False, (low, high), logarithmic, key))
    return Panels(f"sensitivity-{key}", f"Loss against {key}", parts)
