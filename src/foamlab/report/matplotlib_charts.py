"""The charts of `charts` as files, drawn with matplotlib: PNG, SVG, PDF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .charts import (
    AXES,
    COLORS,
    DASHES,
    GREY,
    MARKERS,
    PATTERNS,
    WIDTHS,
    Bars,
    Chart,
    Curves,
    Dots,
    Frontier,
    Heat,
    Panels,
    Point,
    style,
    thin,
)


def save(chart: Chart, path: Path, axis: str = "steps") -> None:
    """Draw the chart to `path`; its suffix (.png, .svg, .pdf) chooses the format."""
    from matplotlib.figure import Figure  # takes a second to import, and the page does not need it

    if isinstance(chart, Panels):
        across = min(4, len(chart.charts))
        down = -(-len(chart.charts) // across)
        figure = Figure(figsize=(2.6 * across, 0.5 + 2 * down), layout="constrained")
        figure.suptitle(chart.title, x=0.01, ha="left")
        grid = list(figure.subplots(down, across, squeeze=False).flat)
        for axes, part in zip(grid, chart.charts):
            axes.set_title(_plain(part.title), loc="left", fontsize="small")
            _draw(axes, part, axis, small=True)
        for axes in grid[len(chart.charts) :]:
            axes.set_axis_off()
    else:
        figure = Figure(figsize=(8, _height(chart)), layout="constrained")
        axes = figure.subplots()
        axes.set_title(chart.title, loc="left")
        _draw(axes, chart, axis)
    figure.savefig(path, dpi=150)


def _height(chart: Chart) -> float:
    if isinstance(chart, Bars):
        return max(2.2, 1.2 + 0.35 * len(chart.labels))
    if isinstance(chart, Dots):
        return max(2.2, 1.2 + 0.25 * len(chart.points))
    if isinstance(chart, Heat):
        return max(2.2, min(1.5 + 0.08 * len(chart.rows), 9))
    return max(4.2, 1 + 0.2 * len(chart.points)) if isinstance(chart, Frontier) else 4.2


def _draw(axes: Any, chart: Chart, axis: str, small: bool = False) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if isinstance(chart, Curves):
        _draw_curves(axes, chart, chart.x or axis, small)
    elif isinstance(chart, Bars):
        _draw_bars(axes, chart)
    elif isinstance(chart, Dots):
        _draw_dots(axes, chart)
    elif isinstance(chart, Frontier):
        _draw_frontier(axes, chart)
    elif isinstance(chart, Heat):
        _draw_heat(axes, chart)


def _draw_curves(axes: Any, chart: Curves, axis: str, small: bool) -> None:
    named: set[int] = set()  # runs that have their legend entry; lines with markers come first
    for line in map(thin, sorted(chart.lines, key=lambda line: line.look == "faint")):
        look = style(line.run)
        kind: dict[str, Any] = {}
        if line.look in ("points", "lost"):
            kind = {"marker": (8, 2, 0) if line.look == "lost" else MARKERS[look.marker][1]}
            kind["markersize"] = 8 if line.look == "lost" else 4
        dash = {"grey": ":", "lost": ""}.get(line.look, DASHES[look.dash][1])
        axes.plot(
            line.x[axis],
            line.y,
            color=line.color,
            linestyle=dash,
            linewidth=0.8 * WIDTHS[line.look],
            alpha=0.65 if line.look == "faint" else 1,
            label=_plain(line.label) if line.run not in named else None,
            **kind,
        )
        if line.low and line.high:
            axes.fill_between(line.x[axis], line.low, line.high, color=line.color, alpha=0.2, linewidth=0)
        named.add(line.run)
    if chart.log_x:
        axes.set_xscale("log", base=2)
    if chart.x:
        axes.set_xticks(chart.ticks, [f"{x:.3g}" for x in chart.ticks])
        axes.minorticks_off()
    if chart.log:
        axes.set_yscale("log")
    elif chart.window:
        axes.set_ylim(*chart.window)
    if small:
        axes.tick_params(labelsize="x-small")
        return
    axes.set_xlabel(chart.x or AXES[axis])
    axes.set_ylabel(chart.y_title)
    if named:
        columns = 1 + (len(named) - 1) // 16
        axes.legend(fontsize="x-small", frameon=False, loc="upper left", bbox_to_anchor=(1, 1), ncols=columns)


def _reach(point: Point) -> list[list[float]]:
    return [[point.y - point.low], [point.high - point.y]]


def _draw_dots(axes: Any, chart: Dots) -> None:
    for i, p in enumerate(chart.points):
        look = style(p.run)
        axes.errorbar([p.y], [i], xerr=_reach(p), color=look.color, marker=MARKERS[look.marker][1], capsize=3)
        if len(p.single) > 1:
            axes.plot(p.single, [i + 0.25] * len(p.single), "|", color=GREY, markersize=4)
    axes.set_yticks(range(len(chart.points)), [_plain(p.label) for p in chart.points])
    axes.set_ylim(len(chart.points) - 0.5, -0.5)
    axes.set_xlabel(chart.x_title)


def _draw_frontier(axes: Any, chart: Frontier) -> None:
    (left, right), gap = chart.span, 0.2 / _height(chart)
    front = [*chart.front, chart.front[-1]._replace(x=right)]
    axes.step([p.x for p in front], [p.y for p in front], color=GREY, where="post", linestyle="--", linewidth=2)
    for p, y in zip(chart.points, chart.places(gap)):
        look = style(p.run)
        axes.errorbar([p.x], [p.y], yerr=_reach(p), color=look.color, marker=MARKERS[look.marker][1], capsize=3)
        axes.annotate(
            _plain(p.label), (p.x, p.y), (1.01, y), textcoords=("axes fraction", "data"), fontsize="small", va="center",
            arrowprops={"arrowstyle": "-", "color": look.color, "linewidth": 0.6, "alpha": 0.6, "shrinkB": 5},
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.3g}")
    axes.set_xlim(left, right)
    axes.set_ylim(*chart.window)
    axes.set_xlabel(chart.x_title)
    axes.set_ylabel(chart.y_title)


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
