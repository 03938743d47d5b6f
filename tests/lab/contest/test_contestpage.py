"""The page of a contest, over folders made by the search of `contest`: what it says, and how it looks in a browser."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from contests import FIELD, make_contest
from pages import CHROMIUM, FRAMES, PROBE, Text, browse

from foamlab.contest.charts import charts, open_book
from foamlab.contest.page import compare_table, page, report
from foamlab.errors import UserError
from foamlab.report import charts as plots
from foamlab.report import plotly_charts


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A contest of 14, over three seeds, one arm of which recorded residual ratios."""
    folder = make_contest(tmp_path_factory.mktemp("contest") / "c", list(FIELD))
    values = {f"layers.{i}.{part}.weight": 0.5 for i in range(3) for part in ("q", "up")}
    for path in folder.glob("foam-row/*/metrics.jsonl"):
        with path.open("a") as f:
            f.writelines(json.dumps({"kind": "residual", "step": k, "values": values}) + "\n" for k in (1, 20, 40))
    return folder


def test_the_page_says_what_the_contest_shows(field: Path, tmp_path: Path) -> None:
    (out,) = report([field], tmp_path / "page")
    seen = Text(out.read_text(encoding="utf-8"))
    told = json.loads((field / "contest.json").read_text())
    best = told["results"][0]
    first = f"muon ends with the lowest mean validation loss, {best['loss']:.3f} (n = 3)"
    assert best["arm"] == "muon" and first in seen.text
    for words in (*told["verdicts"], *told["cautions"], told["rule_in_words"]):
        assert words in seen.text, words
    for words in ("5.0847 to", "(0, 1, 2)", "edge", "the mean final loss of adamw", "2 of 3 runs"):
        assert words in seen.text, words
    stopped = [run for run in told["runs"] if run["status"] == "stopped"]
    assert len(stopped) > 9 and f"{len(stopped)} stopped" in seen.text
    for words in ("foamlab compare demo", "lr 0.0025, 0.005, 0.01, then 0.02", "rates: a paper", "2.13.0", "ten steps"):
        assert words in seen.text, words
    assert "out of view: sgd (7.4" in seen.text
    assert not [t for t, a in seen.tags if t in ("link", "img", "iframe") or (a.get("src") or "").startswith("http")]


def test_charts_hold_what_the_runs_say(field: Path) -> None:
    graph = pytest.importorskip("plotly.graph_objects")
    book = open_book(field)
    drawn = {chart.name: chart for chart in charts(book)}
    names = ["losses", "curves", "curves-each", "frontier", "sensitivity-lr", "sensitivity-scale", "residual"]
    assert list(drawn) == names
    for chart in drawn.values():
        for one in chart.charts if isinstance(chart, plots.Panels) else [chart]:
            figure = plotly_charts.plotly(one)
            json.dumps(figure, allow_nan=False)
            graph.Figure(figure)  # unknown attributes raise
    curves = drawn["curves"]
    assert isinstance(curves, plots.Curves)
    muon = curves.lines[0]
    ends = [run.loss for run in book.rows[0].runs]
    assert muon.label == "muon" and muon.y[-1] == pytest.approx(sum(ends) / 3)
    assert muon.low and muon.high and (muon.low[-1], muon.high[-1]) == (min(ends), max(ends))
    frontier = drawn["frontier"]
    assert isinstance(frontier, plots.Frontier)
    assert [point.label for point in frontier.front] == ["adamw8bit", "foam-int8", "foam-muon", "muon"]
    assert {point.label: point.x for point in frontier.points}["adamw"] == 8  # bytes a parameter
    lr = drawn["sensitivity-lr"]
    assert isinstance(lr, plots.Panels)
    sgd = next(chart for chart in lr.charts if chart.title.startswith("sgd"))
    assert sgd.title == "sgd (own scale)" and [line.label for line in sgd.lines] == ["sgd", "stopped", "diverged"]
    assert sgd.lines[0].x["lr"] == [0.25, 0.5, 1, 2] and [math.isnan(y) for y in sgd.lines[0].y] == [
        True,
        False,
        False,
        True,
    ]


def test_names_beside_the_frontier_keep_apart() -> None:
    points = [plots.Point(i, str(i), 1 + i, y) for i, y in enumerate((1.0, 1.0, 1.001, 1.5, 1.5, 2.0))]
    chart = plots.Frontier("f", "", "", "", points)
    places = chart.places(0.1)
    low, high = chart.window
    order = sorted(places)
    assert all(b - a >= 0.0999 * (high - low) for a, b in pairwise(order))
    assert low <= order[0] and order[-1] <= high and places[3] < places[5]
    assert [p.label for p in chart.front] == ["0"]


def test_pictures_and_tables(tmp_path: Path) -> None:
    folder = make_contest(tmp_path / "c", ["foam-paper", "adamw", "muon", "adam-mini", "adamw8bit"], (0,))
    written = [path.name for path in report([folder], tmp_path / "r.html", static=["svg"], tables=True)]
    pictures = ("losses", "curves", "curves-each", "frontier", "sensitivity-lr", "sensitivity-scale")
    assert written == [
        "r.html",
        *(f"r-{x}.csv" for x in ("results", "runs", "curves")),
        *(f"r-{x}.svg" for x in pictures),
    ]
    results = list(csv.DictReader((tmp_path / "r-results.csv").open()))
    assert [row["arm"] for row in results] == [row[0] for row in compare_table([folder])[1:]]
    assert results[0]["lr"] == "0.01" and results[0]["low"] == ""  # one seed has no interval
    runs = list(csv.DictReader((tmp_path / "r-runs.csv").open()))
    assert len(runs) == len(list(folder.glob("*/*/run.json"))) and {row["seed"] for row in runs} == {"0"}
    assert {row["status"] for row in runs} == {"done", "stopped"} and all(row["lr"] and row["loss"] for row in runs)


@pytest.mark.parametrize("limit", [0, 1, 6, 12])
def test_a_contest_that_still_runs(tmp_path: Path, limit: int) -> None:
    folder = make_contest(tmp_path / "c", ["foam-paper", "adamw"], limit=limit)
    seen = Text(page(open_book(folder)))
    assert "So far: " in seen.text and "compare, running" in seen.text
    assert len(compare_table([folder])) == 3


def test_an_ablation_has_a_chart_a_study(tmp_path: Path) -> None:
    cases = [
        {"value": "1.0", "arm": "foam-paper"},
        {"value": "0.0", "arm": "foam-row"},
        {"value": "0.5", "arm": "none"},
    ]
    studies = {"rho": {"about": "how much residual", "base": "foam-paper", "cases": cases}}
    folder = make_contest(tmp_path / "c", ["foam-paper", "foam-row"], (0, 1), kind="ablate", studies=studies)
    study = next(chart for chart in charts(open_book(folder)) if chart.name == "study-rho")
    assert isinstance(study, plots.Dots) and [point.label for point in study.points] == ["1.0 *", "0.0"]
    assert "rho: how much residual" in Text(page(open_book(folder))).text


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a tree of dicts and lists."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield (*at, key)
        yield from places(tree[key], (*at, key))


def test_whatever_is_wrong_in_contest_json_is_a_line_or_a_page(tmp_path: Path) -> None:
    """Each value once gone or something else: no traceback, and never a file elsewhere."""
    folder = make_contest(tmp_path / "a" / "c", ["sgd", "adamw"], (0,), limit=2)
    told = (folder / "contest.json").read_text()
    draw, refused, shown = random.Random(0), 0, 0
    junk: list[Any] = [None, -1, 1e308, 10**30, "../../evil", [], {}, [5], {"a": 5}, True, [[]]]
    for place in [p for p in places(json.loads(told)) if p[0] not in ("runs", "results", "search") and 1 not in p[:2]]:
        contest = json.loads(told)
        inside = contest
        for key in place[:-1]:
            inside = inside[key]
        change = draw.choice(["gone", *junk])
        if change == "gone":
            del inside[place[-1]]
        else:
            inside[place[-1]] = change
        (folder / "contest.json").write_text(json.dumps(contest))
        try:
            page(open_book(folder))
            shown += 1
        except UserError as e:
            assert "\n" not in str(e)
            refused += 1
    assert refused > 15 and shown > 5 and not list(tmp_path.rglob("*evil*"))


@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: the page is not opened in a browser")
def test_in_a_browser(field: Path, tmp_path: Path) -> None:
    """No error, every chart filled, nothing wider than the window, no two texts on each other."""
    (tmp_path / "page.html").write_text(page(open_book(field)).replace("</body>", PROBE), encoding="utf-8")
    (tmp_path / "frames.html").write_text(FRAMES, encoding="utf-8")
    seen = browse(tmp_path / "frames.html", tmp_path / "profile")
    assert {frame["wide"] for frame in seen} == {1280, 390}
    for frame in seen:
        assert frame["problems"] == [] and frame["outside"] == [] and frame["scroll"] <= frame["wide"], frame
        names = [chart["name"] for chart in frame["charts"]]
        assert len(names) == 4 + 13 + 14 + 10 and {"losses", "frontier", "curves", "residual", "lr-13"} <= set(names)
        for chart in frame["charts"]:
            assert chart["marks"] > 0 and chart["height"] > 100 and chart["svg"] == pytest.approx(1, abs=0.02), chart
            assert chart["crossed"] == 0 and chart["overlaps"] == [], chart
