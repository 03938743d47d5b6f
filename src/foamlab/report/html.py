"""Pages: one HTML file each, which asks the network for nothing. Templates are in `templates`, escaped by themselves.

All extend `base.html`, which says to the browser that nothing may be fetched, and draws the charts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from . import charts, plotly_charts

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def environment() -> Environment:
    """Where templates are found, with what all may use. Whatever they are given is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("foamlab.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    found.globals.update(style=charts.style, AXES=charts.AXES, DASHES=charts.DASHES, MARKERS=charts.MARKERS)
    return found


def render(template: str, headline: Sequence[str], drawn: Iterable[charts.Chart], **values: Any) -> str:
    """The page of a template.

    Args:
        template: its name.
        headline: sentences; the first is the heading.
        drawn: the charts for which the template has figures; it gets them as `drawn`.
        values: `title`, `made` (by what, of what, when), and what else the template names.
    """
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs  # half a second, which the terminal's table need not wait for

    figures: dict[str, Any] = {}
    for chart in (drawn := list(drawn)):
        if isinstance(chart, charts.Panels):
            figures |= {c.name: plotly_charts.plotly(c, small=True) for c in chart.charts}
        else:
            figures[chart.name] = plotly_charts.plotly(chart)
    first, *others = headline
    return environment().get_template(template).render(
        headline=first,
        others=others,
        drawn=drawn,
        figures=Markup(script_json({"figures": figures, "axes": charts.AXES})),
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")),
        **values,
    )  # fmt: skip


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element whatever strings it holds."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
