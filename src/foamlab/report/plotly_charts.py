"""The charts of `charts` as plotly figures: dicts of JSON values, for a page. Needs no plotly itself."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

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
    Line,
    Panels,
    Point,
    style,
    thin,
)


def plotly(chart: Chart, small: bool = False) -> dict[str, Any]:
    """The chart as a plotly figure {"data", "layout"} of JSON values; colours of page and text are left to the page.

    `small`: as one of many panels, without titles at its axes. Panels are drawn one by one.
    """
    # plotly reads some HTML tags in texts, so labels are escaped
    layout: dict[str, Any] = {
        "margin": {"l": 56, "r": 12, "t": 28, "b": 44},
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": "zoom",
    }
    if isinstance(chart, Panels):
        raise ValueError(f"{chart.name} is drawn panel by panel: give each of .charts")
    if isinstance(chart, Curves):
        figure = _plotly_curves(chart, layout)
        if small:
            figure["layout"] |= {"margin": {"l": 40, "r": 8, "t": 6, "b": 30}, "font": {"size": 10}}
            for axis in ("xaxis", "yaxis"):
                figure["layout"][axis] |= {"title": {"text": ""}, "nticks": 4}
        return figure
    draw = {Bars: _plotly_bars, Heat: _plotly_heat, Dots: _plotly_dots, Frontier: _plotly_frontier}[type(chart)]
    return draw(chart, layout)  # type: ignore[operator]


def _plotly_curves(chart: Curves, layout: dict[str, Any]) -> dict[str, Any]:
    layout["xaxis"] = {"title": {"text": chart.x or AXES["steps"]}, "rangemode": "normal" if chart.x else "tozero"}
    layout["yaxis"] = {"title": {"text": chart.y_title}, "type": "log" if chart.log else "linear", "automargin": True}
    if chart.log_x:
        layout["xaxis"] |= {"type": "log", "rangemode": "normal", "dtick": math.log10(2)}
    if chart.x:
        layout["xaxis"] |= {"tickvals": chart.ticks, "ticktext": [f"{x:.3g}" for x in chart.ticks]}
        layout["xaxis"]["tickangle"] = 0
    if chart.log:
        layout["yaxis"] |= {"exponentformat": "power", "minor": {"ticks": "outside"}, "nticks": 6}
    if chart.window and not chart.log:
        layout["yaxis"]["range"] = list(chart.window)
    lines = [thin(line, len(chart.lines)) for line in chart.lines]
    data = [_band(line, chart.x or "steps") for line in lines if line.low]
    for line in lines:
        look = style(line.run)
        trace: dict[str, Any] = {
            "type": "scatter",
            "name": html.escape(line.label, quote=False),
            "x": _json(line.x[chart.x or "steps"]),
            "y": _json(line.y),
            "meta": {"run": line.run, "x": {axis: _json(values) for axis, values in line.x.items()}},
            "mode": {"points": "lines+markers", "lost": "markers"}.get(line.look, "lines"),
            "line": {
                "color": line.color,
                "width": WIDTHS[line.look],
                "dash": "dot" if line.look == "grey" else DASHES[look.dash][0],
            },
            "opacity": 0.65 if line.look == "faint" else 1,
            "hovertemplate": "%{fullData.name}<br>%{y:.4~g} at %{x:,.6~g}<extra></extra>",
        }
        if line.look == "points":
            trace["marker"] = {"symbol": MARKERS[look.marker][0], "size": 7}
        if line.look == "lost":
            trace["marker"] = {"symbol": "asterisk-open", "size": 9, "color": line.color, "line": {"width": 2}}
            trace["hovertemplate"] = "%{fullData.name}<br>at %{x:,.6~g}<extra></extra>"
        data.append(trace)
    return {"data": data, "layout": layout}


def _band(line: Line, axis: str) -> dict[str, Any]:
    """The area between `low` and `high`: forth along one, back along the other."""
    assert line.low and line.high
    around = {name: _json([*values, *reversed(values)]) for name, values in line.x.items()}
    return {
        "type": "scatter",
        "mode": "none",
        "x": around[axis],
        "y": _json([*line.high, *reversed(line.low)]),
        "meta": {"run": line.run, "x": around},
        "fill": "toself",
        "fillcolor": _pale(line.color, 0.2),
        "hoverinfo": "skip",
    }


def _pale(color: str, opacity: float) -> str:
    return "rgba({}, {}, {}, {})".format(*(int(color[i : i + 2], 16) for i in (1, 3, 5)), opacity)


def _marked(point: Point) -> dict[str, Any]:
    return {"color": style(point.run).color, "symbol": MARKERS[style(point.run).marker][0], "size": 10}


def _plotly_dots(chart: Dots, layout: dict[str, Any]) -> dict[str, Any]:
    labels = [html.escape(p.label, quote=False) for p in chart.points]
    at = list(range(len(labels)))
    single = [(y, i) for i, p in enumerate(chart.points) for y in p.single if len(p.single) > 1]
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": _json([y for y, _ in single]),
            "y": [i + 0.22 for _, i in single],
            "marker": {"color": GREY, "size": 5, "symbol": "line-ns-open"},
            "hovertemplate": "one seed: %{x:.4f}<extra></extra>",
        }
    ]
    for i, p in enumerate(chart.points):
        reach = {"array": _json([p.high - p.y]), "arrayminus": _json([p.y - p.low]), "symmetric": False}
        trace = {"type": "scatter", "mode": "markers", "x": _json([p.y]), "y": [i], "marker": _marked(p)}
        said = labels[i] + "<br>%{x:.4f}<extra></extra>"
        data.append({**trace, "error_x": {**reach, "color": style(p.run).color}, "hovertemplate": said})
    layout |= {
        "height": 90 + 24 * len(at),
        "xaxis": {"title": {"text": chart.x_title}, "nticks": 6},
        "yaxis": {"tickvals": at, "ticktext": labels, "range": [len(at) - 0.5, -0.5], "automargin": True},
        "margin": {"l": 8, "r": 12, "t": 8, "b": 44},
    }
    return {"data": data, "layout": layout}


def _plotly_frontier(chart: Frontier, layout: dict[str, Any]) -> dict[str, Any]:
    (left, right), (low, high) = chart.span, chart.window
    tall = max(416, 120 + 18 * len(chart.points))
    front = [*chart.front, chart.front[-1]._replace(x=right)]
    line = {"color": GREY, "width": 2.5, "shape": "hv", "dash": "dash"}
    data: list[dict[str, Any]] = [{"type": "scatter", "mode": "lines", "line": line, "hoverinfo": "skip"}]
    data[0] |= {"x": _json([p.x for p in front]), "y": _json([p.y for p in front])}
    names = []
    for p, y in zip(chart.points, chart.places(17 / (tall - 72))):
        label, color = html.escape(p.label, quote=False), style(p.run).color
        reach = {"array": _json([p.high - p.y]), "arrayminus": _json([p.y - p.low]), "symmetric": False}
        trace = {"type": "scatter", "mode": "markers", "x": _json([p.x]), "y": _json([p.y]), "marker": _marked(p)}
        said = label + "<br>%{y:.4f} at %{x:.3~g}<extra></extra>"
        data.append({**trace, "error_y": {**reach, "color": color, "thickness": 1.2}, "hovertemplate": said})
        name = {"text": label, "x": math.log10(p.x), "y": p.y, "ax": math.log10(right), "ay": y, "font": {"size": 12}}
        name |= {"axref": "x", "ayref": "y", "xanchor": "left", "align": "left", "standoff": 7, "borderpad": 0}
        names.append(name | {"showarrow": True, "arrowhead": 0, "arrowwidth": 0.8, "arrowcolor": _pale(color, 0.6)})
    wide = 14 + 7 * max(len(p.label) for p in chart.points)
    layout |= {
        "height": tall,
        "margin": {"l": 56, "r": wide, "t": 28, "b": 44},
        "annotations": names,
        "yaxis": {"title": {"text": chart.y_title}, "range": [low, high], "automargin": True},
    }
    layout["xaxis"] = {"title": {"text": chart.x_title}, "type": "log", "range": [math.log10(left), math.log10(right)]}
    layout["xaxis"] |= {"dtick": math.log10(2), "tickformat": ".3~g"}
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
