"""Every page's markup escapes what it is given, and asks the network for nothing."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest

from foamlab.report import html
from foamlab.report.charts import Bars, Curves, Line, Panels

EVIL = "</script><img src=x onerror=alert(1)>\"'&"
LINE = Line(0, EVIL, {"steps": [1.0, 2.0]}, [1.0, 2.0])
CHARTS: list[Any] = [
    Bars("bars", EVIL, EVIL, [EVIL], {EVIL: [1.0]}),
    Curves("lines", EVIL, EVIL, [LINE]),
    Panels("panels", EVIL, [Curves("panel", EVIL, EVIL, [LINE])]),
]
SMALL: dict[str, dict[str, Any]] = {
    "plan.html": {"text": EVIL},
    "study.html": {"head": ["", EVIL], "rows": [[EVIL, EVIL, EVIL]], "facts": EVIL},
}


@pytest.mark.parametrize("template", SMALL)
def test_what_a_page_is_given_is_text_in_it(template: str) -> None:
    page = html.render(template, [EVIL, EVIL], CHARTS, title=EVIL, made=EVIL, **SMALL[template])
    assert "<img" not in page.split("<script>")[0]
    # <, " and ' of the title, the heading and the sentence below it
    assert page.count("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;&#34;&#39;&amp;") >= 8
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in page


def test_only_markup_of_our_own_is_called_safe() -> None:
    found = {}
    for path in (files("foamlab.report") / "templates").iterdir():
        text = path.read_text(encoding="utf-8")
        assert "autoescape" not in text
        if count := len(re.findall(r"\|\s*safe\b", text)):
            found[path.name] = count
    assert found == {"parts.html": 2}  # the marks of runs, and where a name may break


def test_a_template_that_is_given_too_little_is_an_error_not_a_gap() -> None:
    jinja2 = pytest.importorskip("jinja2")
    with pytest.raises(jinja2.UndefinedError, match="text"):
        html.render("plan.html", ["plan"], [], title="", made="")
