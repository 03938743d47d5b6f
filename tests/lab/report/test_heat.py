"""The heat map of residual ratios: its rows and order, what plotly accepts, and the page that holds it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from pages import CHROMIUM, FRAMES, PROBE, browse, make_run

from foamlab.report import charts as plots
from foamlab.report import plotly_charts
from foamlab.report.residuals import COLUMNS, heat, kind
from foamlab.report.runs_page import charts, page, report
from foamlab.runs.summary import summarize

NAMES = [f"model.layers.{i}.{part}.weight" for i in range(12) for part in ("attn.q", "mlp.up")] + ["router.weight"]


def lines(count: int) -> list[dict]:
    return [{"kind": "residual", "step": 2 * k, "values": dict.fromkeys(NAMES, 0.5)} for k in range(1, count + 1)]


def test_rows_of_a_kind_stand_together_first_layer_on_top() -> None:
    map_ = heat(lines(3), "residual-0", "t")
    assert map_ and list(map_.groups) == ["attn.q", "mlp.up", "router"]
    assert [kind(row)[1] for row in map_.rows] == [*range(12), *range(12), 0]
    assert map_.x == [2, 4, 6] and map_.ticks[0] == [5.5, 17.5, 24]


def test_gaps_many_records_and_none() -> None:
    some = lines(2)
    del some[1]["values"][NAMES[0]]
    map_ = heat(some, "n", "t")
    assert map_ and math.isnan(map_.z[0][1]) and not plots.empty(map_)
    long = heat(lines(1000), "n", "t")
    assert long and len(long.x) == COLUMNS and long.x[0] == 2 and long.x[-1] == 2000
    assert heat([], "n", "t") is None


def run_with_ratios(folder: Path) -> Path:
    make_run(folder)
    with (folder / "metrics.jsonl").open("a") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines(5))
    return folder


def test_the_page_and_the_picture_show_it(tmp_path: Path) -> None:
    graph = pytest.importorskip("plotly.graph_objects")
    run = run_with_ratios(tmp_path / "run")
    drawn = [chart for chart in charts(summarize([run])) if isinstance(chart, plots.Heat)]
    graph.Figure(plotly_charts.plotly(drawn[0]))  # unknown attributes raise
    assert 'data-chart="residual-0"' in page(summarize([run]))
    written = report([run], tmp_path / "page.html", static=["png"])
    assert tmp_path / "page-residual-0.png" in written


@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: the page is not opened in a browser")
def test_in_a_browser(tmp_path: Path) -> None:
    runs = summarize([run_with_ratios(tmp_path / "one"), make_run(tmp_path / "two", "adamw")])
    (tmp_path / "page.html").write_text(page(runs).replace("</body>", PROBE), encoding="utf-8")
    (tmp_path / "frames.html").write_text(FRAMES, encoding="utf-8")
    for frame in browse(tmp_path / "frames.html", tmp_path / "profile"):
        assert frame["problems"] == [] and frame["outside"] == [] and frame["scroll"] <= frame["wide"], frame
        assert [chart["name"] for chart in frame["charts"]] == ["loss", "lr", "grad-norm", "residual-0", "memory"]
