"""Charts as plain data, and two ways to draw them: plotly (a dict for the page) and matplotlib (PNG, SVG, PDF).

This room knows nothing of runs or folders. Runs are told apart by colour (Okabe and Ito's colour-blind-safe palette),
dash and marker together: the three cycles have lengths 7, 5 and 6, so the first 35 runs all look different.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
POINTS = 600
WIDTHS = {"points": 2, "plain": 1.5, "faint": 1.2}


class Style(NamedTuple):
    color: str
    dash: int
    marker: int


def style(index: int) -> Style:
    """Look of the index-th run."""
    return Style(COLORS[index % len(COLORS)], index % len(DASHES), index % len(MARKERS))


@dataclass(frozen=True)
class Line:
    """One curve of run number `run`: y over each axis of AXES; NaN is a gap.

    `look`: "points" has a marker at each point, "plain" has none, "faint" is thin and pale beside the other two.
    """

    run: int
    label: str
    x: dict[str, list[float]]
    y: list[float]
    look: Literal["points", "plain", "faint"] = "points"


@dataclass(frozen=True)
class Curves:
    """Lines over steps, tokens or seconds. `window`: the y range shown at first; None leaves it to the data.

    `log`, `log_x`: a logarithmic y axis, x axis.
    """

    name: str
    title: str
    y_title: str
    lines: list[Line]
    log: bool = False
    window: tuple[float, float] | None = None
    log_x: bool = False


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


Chart = Curves | Bars | Heat


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
    return Line(line.run, line.label, x, [line.y[i] for i in keep], line.look)


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
    if isinstance(chart, Heat):
        rows = chart.z
    else:
        rows = [line.y for line in chart.lines] if isinstance(chart, Curves) else list(chart.parts.values())
    return not any(math.isfinite(y) for row in rows for y in row)


def plotly(chart: Chart) -> dict[str, Any]:
    """The chart as a plotly figure {"data", "layout"} of JSON values; colours of page and text are left to the page."""
    # plotly reads some HTML tags in texts, so labels are escaped
    layout: dict[str, Any] = {
        "margin": {"l": 56, "r": 12, "t": 28, "b": 44},
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": "zoom",
    }
    if isinstance(chart, Bars):
        return _plotly_bars(chart, layout)
    if isinstance(chart, Heat):
        return _plotly_heat(chart, layout)
    layout["xaxis"] = {"title": {"text": AXES["steps"]}, "rangemode": "tozero"}
    layout["yaxis"] = {"title": {"text": chart.y_title}, "type": "log" if chart.log else "linear", "automargin": True}
    if chart.log_x:
        layout["xaxis"] |= {"type": "log", "rangemode": "normal", "dtick": math.log10(2)}
    if chart.log:
        layout["yaxis"] |= {"exponentformat": "power", "minor": {"ticks": "outside"}, "nticks": 6}
    if chart.window and not chart.log:
        layout["yaxis"]["range"] = list(chart.window)
    data = []
    for line in (thin(line, len(chart.lines)) for line in chart.lines):
        look = style(line.run)
        trace: dict[str, Any] = {
            "type": "scatter",
            "name": html.escape(line.label, quote=False),
            "x": _json(line.x["steps"]),
            "y": _json(line.y),
            "meta": {"run": line.run, "x": {axis: _json(values) for axis, values in line.x.items()}},
            "mode": "lines+markers" if line.look == "points" else "lines",
            "line": {
                "color": look.color,
                "width": WIDTHS[line.look],
                "dash": DASHES[look.dash][0],
            },
            "opacity": 0.65 if line.look == "faint" else 1,
            "hovertemplate": "%{fullData.name}<br>%{y:.4~g} at %{x:,.6~g}<extra></extra>",
        }
        if line.look == "points":
            trace["marker"] = {"symbol": MARKERS[look.marker][0], "size": 7}
        data.append(trace)
    return {"data": data, "layout": layout}


def _plotly_bars(chart: Bars, layout: dict[str, Any]) -> dict[str, Any]:
    labels = [html.escape(label, quote=False) for label in chart.labels]
    at = list(range(len(labels)))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "x": _json(values),
            "y": at,
            "customdata": labels,
            "marker": {"color": COLORS[i % 7], "pattern": _pattern(i)},
            "hovertemplate": "%{customdata}<br>%{fullData.name}: %{x:,.4~g}<extra></extra>",
        }
        for i, (part, values) in enumerate(chart.parts.items())
    ]
    layout |= {
        "barmode": "stack",
        "bargap": 0.35,
        "height": 110 + 30 * len(at),
        "showlegend": True,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        "xaxis": {"title": {"text": chart.x_title}, "rangemode": "tozero", "nticks": 6},
        "yaxis": {"tickvals": at, "ticktext": labels, "autorange": "reversed", "automargin": True},
    }
    layout["margin"] = {"l": 8, "r": 12, "t": 30, "b": 44}
    return {"data": data, "layout": layout}


def _plotly_heat(chart: Heat, layout: dict[str, Any]) -> dict[str, Any]:
    at, names = chart.ticks
    edges = [rows[0] - 0.5 for rows in chart.groups.values()][1:]
    trace = {
        "type": "heatmap",
        "x": _json(chart.x),
        "y": list(range(len(chart.rows))),
        "z": [_json(row) for row in chart.z],
        "customdata": [[html.escape(row, quote=False)] * len(chart.x) for row in chart.rows],
        "colorscale": "Cividis",
        "colorbar": {"title": {"text": chart.z_title, "side": "right"}, "thickness": 12},
        "hovertemplate": "%{customdata}<br>%{z:.3f} at step %{x:,}<extra></extra>",
    }
    layout |= {
        "height": min(max(110 + 8 * len(chart.rows), 240), 900),
        "xaxis": {"title": {"text": AXES["steps"]}, "showgrid": False},
        "yaxis": {"tickvals": at, "ticktext": names, "autorange": "reversed", "automargin": True, "showgrid": False},
        "shapes": [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": {"color": "#fff", "width": 1}}
            for y in edges
        ],
    }
    return {"data": [trace], "layout": layout}


def _pattern(index: int) -> dict[str, Any]:
    return {"shape": PATTERNS[index % 3][0], "fillmode": "overlay", "fgcolor": "#fff", "fgopacity": 0.6, "size": 7}


def _json(values: Sequence[float]) -> list[float | int | None]:
    """Six significant digits; what is not finite becomes null, which JSON and plotly know as a gap."""
    return [None if not math.isfinite(v) else int(v) if v == int(v) else float(f"{v:.6g}") for v in values]


def save(chart: Chart, path: Path, axis: str = "steps") -> None:
    """Draw the chart to `path`; its suffix (.png, .svg, .pdf) chooses the format."""
    from matplotlib.figure import Figure  # takes a second to import, and the page does not need it

    tall = 1.2 + 0.35 * len(chart.labels) if isinstance(chart, Bars) else 4.2
    if isinstance(chart, Heat):
        tall = min(1.5 + 0.08 * len(chart.rows), 9)
    figure = Figure(figsize=(8, max(2.2, tall)), layout="constrained")
    axes = figure.subplots()
    axes.set_title(chart.title, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if isinstance(chart, Bars):
        _draw_bars(axes, chart)
    elif isinstance(chart, Heat):
        _draw_heat(axes, chart)
    else:
        _draw_curves(axes, chart, axis)
    figure.savefig(path, dpi=150)


def _draw_curves(axes: Any, chart: Curves, axis: str) -> None:
    named: set[int] = set()  # runs that have their legend entry; lines with markers come first
    for line in map(thin, sorted(chart.lines, key=lambda line: line.look == "faint")):
        look = style(line.run)
        kind = {"marker": MARKERS[look.marker][1], "markersize": 4} if line.look == "points" else {}
        axes.plot(
            line.x[axis],
            line.y,
            color=look.color,
            linestyle=DASHES[look.dash][1],
            linewidth=0.8 * WIDTHS[line.look],
            alpha=0.65 if line.look == "faint" else 1,
            label=_plain(line.label) if line.run not in named else None,
            **kind,
        )
        named.add(line.run)
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel(chart.y_title)
    if chart.log_x:
        axes.set_xscale("log", base=2)
    if chart.log:
        axes.set_yscale("log")
    elif chart.window:
        axes.set_ylim(*chart.window)
    if named:
        columns = 1 + (len(named) - 1) // 16
        axes.legend(fontsize="x-small", frameon=False, loc="upper left", bbox_to_anchor=(1, 1), ncols=columns)


def _draw_bars(axes: Any, chart: Bars) -> None:
    at, left = np.arange(len(chart.labels)), np.zeros(len(chart.labels))

    def hatch(i: int) -> dict[str, Any]:
        return {"hatch": PATTERNS[i % 3][1], "edgecolor": "white", "linewidth": 0}

    for i, (part, values) in enumerate(chart.parts.items()):
        width = np.nan_to_num(np.asarray(values, float), posinf=0, neginf=0)
        axes.barh(at, width, left=left, height=0.65, color=COLORS[i % 7], label=part, **hatch(i))
        left += width
    axes.set_yticks(at, [_plain(label) for label in chart.labels])
    axes.invert_yaxis()
    axes.set_xlabel(chart.x_title)
    axes.legend(fontsize="x-small", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _draw_heat(axes: Any, chart: Heat) -> None:
    mesh = axes.pcolormesh(
        chart.x, range(len(chart.rows)), np.asarray(chart.z, float), cmap="cividis", shading="nearest"
    )
    for rows in list(chart.groups.values())[1:]:
        axes.axhline(rows[0] - 0.5, color="white", linewidth=0.8)
    at, names = chart.ticks
    axes.set_yticks(at, [_plain(name) for name in names])
    axes.invert_yaxis()
    axes.grid(False)
    axes.set_xlabel(AXES["steps"])
    axes.figure.colorbar(mesh, ax=axes, label=chart.z_title)


def _plain(label: str) -> str:
    """matplotlib reads $...$ as mathematics and hides labels that start with an underscore."""
    return (" " if label.startswith("_") else "") + label.replace("$", r"\$")
