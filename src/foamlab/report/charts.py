"""Charts as plain data: `plotly_charts` draws them for a page, `matplotlib_charts` as files.

This room knows nothing of runs or folders. Runs are told apart by colour (Okabe and Ito's colour-blind-safe palette),
dash and marker together: the three cycles have lengths 7, 5 and 6, so the first 35 runs all look different.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

# Okabe-Ito without yellow (too pale on white); its black becomes a grey that shows on white and on black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#7F7F7F")
# dash: plotly's name, matplotlib's, and the SVG dash array of the legend
DASHES = (
    ("solid", "-", ""),
    ("dash", "--", "7 3"),
    ("dot", ":", "2 3"),
    ("dashdot", "-.", "7 3 2 3"),
    ("longdash", (0, (9, 4)), "11 4"),
)
MARKERS = (("circle", "o"), ("square", "s"), ("diamond", "D"), ("triangle-up", "^"), ("x", "x"), ("cross", "P"))
PATTERNS = (("", ""), ("/", "//"), ("x", "xx"))
AXES = {"steps": "optimizer steps", "tokens": "tokens seen", "seconds": "seconds of training"}
GREY = "#8A8A8A"
POINTS = 600
WIDTHS = {"points": 2, "plain": 1.5, "faint": 1.2, "grey": 1.2, "lost": 0}


class Style(NamedTuple):
    color: str
    dash: int
    marker: int


def style(index: int) -> Style:
    """Look of the index-th run."""
    return Style(COLORS[index % len(COLORS)], index % len(DASHES), index % len(MARKERS))


@dataclass(frozen=True)
class Line:
    """One curve of run number `run`: y over each axis of AXES, or over its chart's own; NaN is a gap.

    `look`: "points" has a marker at each point, "plain" has none, "faint" is thin and pale beside these, "grey" is
    there to be compared with, "lost" are stars without a line. `low`, `high`: a band around it.
    """

    run: int
    label: str
    x: dict[str, list[float]]
    y: list[float]
    look: Literal["points", "plain", "faint", "grey", "lost"] = "points"
    low: list[float] | None = None
    high: list[float] | None = None

    @property
    def color(self) -> str:
        return GREY if self.look == "grey" else style(self.run).color


@dataclass(frozen=True)
class Curves:
    """Lines over steps, tokens or seconds. `window`: the y range shown at first; None leaves it to the data.

    `log`, `log_x`: a logarithmic y axis, x axis. `x`: the title of an x axis of its own, which is then the key of its
    lines' x, and has its ticks where they have points.
    """

    name: str
    title: str
    y_title: str
    lines: list[Line]
    log: bool = False
    window: tuple[float, float] | None = None
    log_x: bool = False
    x: str = ""

    @property
    def ticks(self) -> list[float]:
        """Where the lines have points: at most three, of an axis of its own."""
        values = sorted({x for line in self.lines for x in line.x[self.x] if math.isfinite(x)})
        return values[:: -(-len(values) // 3)] if values else []


@dataclass(frozen=True)
class Panels:
    """Small charts side by side, each with its own title, all with the same y axis."""

    name: str
    title: str
    charts: list[Curves]


class Point(NamedTuple):
    """A mean y with its interval (NaN: none), of run number `run`, at x. `single`: the values it is the mean of."""

    run: int
    label: str
    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    single: tuple[float, ...] = ()


@dataclass(frozen=True)
class Dots:
    """A row a point, from top to bottom; its y and interval are drawn along the horizontal axis, its x is not used."""

    name: str
    title: str
    x_title: str
    points: list[Point]


@dataclass(frozen=True)
class Frontier:
    """y against x, both the lower the better, x logarithmic; each point is named beside the chart."""

    name: str
    title: str
    x_title: str
    y_title: str
    points: list[Point]

    @property
    def front(self) -> list[Point]:
        """The points that no other point beats in both, rising in x."""
        found: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.x, p.y)):
            if not found or point.y < found[-1].y:
                found.append(point)
        return found

    @property
    def span(self) -> tuple[float, float]:
        """The x axis."""
        return min(p.x for p in self.points) / 1.25, max(p.x for p in self.points) * 1.25

    @property
    def window(self) -> tuple[float, float]:
        """The y axis: all points and their intervals."""
        ends = [y for p in self.points for y in (p.y, p.low, p.high) if math.isfinite(y)]
        pad = 0.05 * (max(ends) - min(ends)) or 0.1
        return min(ends) - pad, max(ends) + pad

    def places(self, gap: float) -> list[float]:
        """Heights for the points' names: near their y, at least `gap` apart, as a share of the y axis."""
        low, high = self.window
        order = sorted(range(len(self.points)), key=lambda i: self.points[i].y)
        spread, gap = [self.points[i].y for i in order], gap * (high - low)
        floor = low
        for i, y in enumerate(spread):  # up from below, then down from the top
            spread[i] = floor = max(y, floor)
            floor += gap
        ceiling = high
        for i in reversed(range(len(spread))):
            spread[i] = ceiling = min(spread[i], ceiling)
            ceiling -= gap
        return [spread[order.index(i)] for i in range(len(order))]


@dataclass(frozen=True)
class Bars:
    """Stacked horizontal bars: parts[name][i] belongs to labels[i]; NaN means not known."""

    name: str
    title: str
    x_title: str
    labels: list[str]
    parts: dict[str, list[float]]


@dataclass(frozen=True)
class Heat:
    """A number z[i][j] for row i at x[j], as colour. `groups`: name -> its rows, which follow each other."""

    name: str
    title: str
    z_title: str
    x: list[float]
    rows: list[str]
    groups: dict[str, list[int]]
    z: list[list[float]]

    @property
    def ticks(self) -> tuple[list[float], list[str]]:
        """Where the groups' names stand: in the middle of their rows."""
        return [(rows[0] + rows[-1]) / 2 for rows in self.groups.values()], list(self.groups)


Chart = Curves | Bars | Heat | Dots | Frontier | Panels


def smooth(y: Sequence[float], width: int) -> list[float]:
    """Centred mean over `width` values, fewer at the ends; what is not finite is left out and stays a gap."""
    values = np.asarray(y, float)
    known = np.isfinite(values)
    if width < 2 or not known.any():
        return np.where(known, values, math.nan).tolist()
    half, index = width // 2, np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (total[high] - total[low]) / (count[high] - count[low])
    return np.where(known, means, math.nan).tolist()


def thin(line: Line, lines: int = 1) -> Line:
    """At most POINTS of the line's points, fewer in a chart of many lines; evenly chosen, first and last kept."""
    points = min(POINTS, max(150, 10 * POINTS // lines))
    if len(line.y) <= points:
        return line
    keep = np.unique(np.linspace(0, len(line.y) - 1, points).round().astype(int)).tolist()
    x = {axis: [values[i] for i in keep] for axis, values in line.x.items()}
    y, low, high = ([of[i] for i in keep] if of else None for of in (line.y, line.low, line.high))
    return Line(line.run, line.label, x, y or [], line.look, low, high)


def average(lines: Sequence[Line]) -> Line:
    """The mean of lines with points at the same places, as far as all go, in a band from the lowest to the highest."""
    size = min(len(line.y) for line in lines)
    x = {axis: [math.fsum(line.x[axis][i] for line in lines) / len(lines) for i in range(size)] for axis in lines[0].x}
    columns = [[line.y[i] for line in lines] for i in range(size)]
    band = ([min(ys) for ys in columns], [max(ys) for ys in columns]) if len(lines) > 1 else (None, None)
    return Line(lines[0].run, lines[0].label, x, [math.fsum(ys) / len(ys) for ys in columns], lines[0].look, *band)


def view(values: Sequence[float]) -> tuple[float, float]:
    """Range of the values, without those that lie far above the rest (1.5 quartile ranges above the upper quartile)."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return math.nan, math.nan
    quarter, three = np.quantile(finite, (0.25, 0.75)).tolist()
    kept = [v for v in finite if v <= three + 1.5 * (three - quarter)]
    pad = 0.05 * (max(kept) - min(kept)) or 0.1
    return min(kept) - pad, max(kept) + pad


def window(lines: Sequence[Line], skip: float = 0.1) -> tuple[float, float] | None:
    """Range of y after the first `skip` of each line's steps, so that the early fall does not flatten the rest."""
    values = []
    for line in lines:
        steps = line.x["steps"]
        start = skip * max((s for s in steps if math.isfinite(s)), default=0)
        values += [y for s, y in zip(steps, line.y) if s >= start and math.isfinite(y)]
    if len(values) < 2 or min(values) == max(values):
        return None
    pad = 0.05 * (max(values) - min(values))
    return min(values) - pad, max(values) + pad


def shorten(text: str, length: int = 24) -> str:
    """The text on one line, its middle left out where it is longer than `length`."""
    text = " ".join(text.split())
    head = (length - 1) // 2
    return text if len(text) <= length else f"{text[:head]}…{text[head + 1 - length :]}"


def empty(chart: Chart) -> bool:
    """Whether there is nothing to draw."""
    if isinstance(chart, Panels):
        return all(map(empty, chart.charts))
    if isinstance(chart, (Dots, Frontier)):
        return not chart.points
    if isinstance(chart, Heat):
        rows = chart.z
    else:
        rows = [line.y for line in chart.lines] if isinstance(chart, Curves) else list(chart.parts.values())
    return not any(math.isfinite(y) for row in rows for y in row)
