"""The frame of a page, and what stands in it: tables, lists, charts. One HTML file that asks the network for nothing.

The frame is `report.html` beside this file; it says to the browser that nothing may be fetched, and draws the charts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from . import charts as plots
from . import plotly_charts


def frame(title: str, made: str, headline: str, others: Iterable[str], main: str, charts: Iterable[plots.Chart]) -> str:
    """The page: texts in words, `main` in HTML, and the charts for whose places `main` has figures."""
    from plotly.offline import get_plotlyjs  # half a second, which the terminal's table need not wait for

    drawn: dict[str, Any] = {}
    for chart in charts:
        if isinstance(chart, plots.Panels):
            drawn |= {c.name: plotly_charts.plotly(c, small=True) for c in chart.charts}
        else:
            drawn[chart.name] = plotly_charts.plotly(chart)
    slots = {
        "title": escape(title),
        "made": escape(made),
        "headline": escape(headline),
        "others": "".join(f"<p>{escape(text)}</p>" for text in others),
        "main": main,
        "figures": script_json({"figures": drawn, "axes": plots.AXES}),
        "plotly": get_plotlyjs().replace("</script", "<\\/script"),
    }
    text = files("foamlab.report").joinpath("report.html").read_text(encoding="utf-8")
    pieces = text.split("{{")
    return pieces[0] + "".join(slots[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces[1:]))


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element whatever strings it holds."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def bullets(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>" if texts else ""


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def mark(index: int) -> str:
    """The run's line as a small picture: colour, dash and marker."""
    look = plots.style(index)
    shape = {
        "circle": '<circle cx="16" cy="6" r="4"/>',
        "square": '<path d="M12 2h8v8h-8z"/>',
        "diamond": '<path d="M16 1l5 5-5 5-5-5z"/>',
        "triangle-up": '<path d="M16 1l5 9h-10z"/>',
        "x": '<path d="M12 2l8 8M20 2l-8 8" stroke-width="2.5"/>',
        "cross": '<path d="M16 1v10M11 6h10" stroke-width="3"/>',
    }[plots.MARKERS[look.marker][0]]
    dash = plots.DASHES[look.dash][2]
    return (
        f'<svg class="mark" width="32" height="12" aria-hidden="true" fill="{look.color}" stroke="{look.color}">'
        f'<path d="M0 6h32" stroke-width="2" fill="none"{f" stroke-dasharray={dash!r}" if dash else ""}/>{shape}</svg>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], tight: bool = False) -> str:
    """Cells are HTML already: <td> and <th> with what they hold. `tight`: as narrow as their words."""
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    top = f"<thead><tr>{''.join(head)}</tr></thead>" if head else ""
    return f'<div class="scroll{" tight" * tight}" tabindex="0"><table>{top}<tbody>{body}</tbody></table></div>'


def heads(names: Iterable[str]) -> list[str]:
    return [f'<th scope="col">{escape(name)}</th>' for name in names]


def texts(values: Iterable[Any]) -> list[str]:
    """Cells of words."""
    return [f'<td class="text">{escape(str(value))}</td>' for value in values]


def row_head(name: str) -> str:
    """The heading of a setting's row, which may break after its dots."""
    return f'<th scope="row">{escape(name).replace(".", ".<wbr>")}</th>'


def plain(tree: Mapping[str, Any]) -> str:
    """A row a key; empty without any."""
    return table([], ([row_head(name), *texts([value])] for name, value in tree.items())) if tree else ""


def bars(labels: Sequence[str], known: Iterable[str], what: str = "run") -> str:
    """Buttons above curves: over which axis (`known`: those that have values), and which runs."""
    known = set(known)
    axes = "".join(
        f'<button data-axis="{axis}" aria-pressed="{str(axis == "steps").lower()}"'
        f"{'' if axis in known else ' disabled'}>{axis}</button>"
        for axis in plots.AXES
    )
    chips = "".join(
        f'<button class="chip" aria-pressed="true" data-run="{i}">{mark(i)} {escape(label)}</button>'
        for i, label in enumerate(labels)
    )
    return (
        "<noscript><p>The charts need JavaScript; tables and text do not.</p></noscript>"
        f'<div class="bar" id="axes">over {axes}</div>'
        f'<div class="bar chips" id="chips" title="show or hide a {what}">{chips}</div>'
    )


def figure(chart: plots.Chart, said: str = "", log: bool = False, legend: bool = False) -> str:
    """A place for the chart, with its title and what the eye should know.

    `log`: a button for a logarithmic y. `legend`: the names of its lines, for a page without `bars`.
    """
    if isinstance(chart, plots.Panels):
        panels = "".join(map(figure, chart.charts))
        return f'<section><h3>{escape(chart.title)}</h3>{note(said)}<div class="panels">{panels}</div></section>'
    button = '<button class="log" aria-pressed="false">log</button>' if log else ""
    title, names = escape(chart.title), ""
    if legend and isinstance(chart, plots.Curves):
        names = "".join(f"<span>{mark(line.run)} {escape(line.label)}</span>" for line in chart.lines)
        names = f'<p class="legend">{names}</p>'
    return (
        f'<figure data-chart="{chart.name}" class="{type(chart).__name__.lower()}"><figcaption><h3>{title}</h3>{button}'
        f'{note(said)}{names}</figcaption><div class="chart" role="img" aria-label="{title}"></div></figure>'
    )
