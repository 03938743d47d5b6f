"""Reports of runs that went well, badly, or hardly at all; the page is also opened in Chromium where there is one."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from pages import CHROMIUM, FRAMES, PROBE, Text, browse, make_run

from foamlab.errors import UserError
from foamlab.report import charts as plots
from foamlab.report import plotly_charts
from foamlab.report.runs_page import charts, compare_table, page, report
from foamlab.runs.summary import arms, cautions, headline, perplexity, summarize

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&${{title}}"


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / "foam-1", lr=0.001), make_run(tmp_path / "adamw-1", "adamw", 1.6, lr=5e-4, state=8e6)]


def test_page_says_what_the_runs_show(pair: list[Path], tmp_path: Path) -> None:
    (out,) = report(pair, tmp_path / "sub" / "report")
    assert out == tmp_path / "sub" / "report.html"
    seen = Text(out.read_text(encoding="utf-8"))
    # 1.5 + 6.5 exp(-6) = 1.5161, 1.6 + 6.4 exp(-6) = 1.6159
    first = "foam-1 ends with the lowest validation loss: 1.516, 0.100 below adamw-1 (1.616)."
    assert headline(summarize(pair))[0] == first and first in seen.text
    for words in (
        "Optimizer state: from 2.50 MB (foam-1) to 8.00 MB (adamw-1).",
        "with one seed only",
        "models of at most 1,000,000 parameters, at most 819,200 tokens",
        "the same batches in the same order",
        "One learning rate only for foam, adamw",
        "optimizer. name",  # a place to break the line stands after the dot
        "foamlab train preset",
        "2.13.0",
    ):
        assert words in seen.text, words
    assert out.stat().st_size < 6e6
    # nothing is fetched: no element names a source
    assert not [t for t, a in seen.tags if t in ("link", "img", "iframe") or (a.get("src") or "").startswith("http")]
    assert "default-src 'none'" in str(seen.tags)


def marked(folders: list[Path]) -> dict[str, list[str]]:
    """metric -> the runs in which it is marked."""
    head, *rows = compare_table(folders)
    return {name: who for k, name in enumerate(head) if (who := [row[0] for row in rows if row[k].endswith(" *")])}


def rewrite(folder: Path, **bytes_: Any) -> None:
    """Change what run.json says of bytes."""
    info = json.loads((folder / "run.json").read_text())
    info["bytes"] |= bytes_
    (folder / "run.json").write_text(json.dumps(info))


def test_the_lowest_is_marked_where_it_can_be_told(pair: list[Path]) -> None:
    rewrite(pair[0], peak=4e8, before=2.5e8, peak_of="process, resident")
    head, foam, adamw = compare_table(pair)
    assert len(head) == len(foam) == len(adamw)
    told = dict(zip(head, foam))
    assert told["validation loss"] == "1.5161 *" and told["optimizer state (MB)"] == "2.50 *"
    assert told["perplexity"] == f"{math.exp(1.5 + 6.5 * math.exp(-6)):.2f} *"
    assert told["peak memory (MB)"] == "400" and told["of it before training (MB)"] == "250"
    assert marked(pair) == {name: ["foam-1"] for name in ("validation loss", "perplexity", "optimizer state (MB)")}
    text = page(summarize(pair))
    assert text.count('class="best"') == 3 and "Marked: lowest of the finished runs" in text


def test_speed_and_a_process_memory_are_never_marked_nor_told(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", "adamw")
    lines = (a / "metrics.jsonl").read_text().splitlines()
    quick = [json.dumps({**line, "seconds": line["seconds"] * 0.9}) for line in map(json.loads, lines)]
    (a / "metrics.jsonl").write_text("\n".join(quick) + "\n")
    rewrite(b, peak=9.2e8)
    assert marked([a, b]) == {}  # one loss, one state; speed 11 % apart, peak 50 %
    assert not any("peed" in said for said in headline(summarize([a, b])))
    assert "`foamlab bench step`" in " ".join(cautions(summarize([a, b])))
    assert headline(summarize([b]))[-1] == "Speed: 20,480 tokens/s."


def test_unequal_models_are_not_ranked(tmp_path: Path) -> None:
    a = make_run(tmp_path / "small", state=1e6)
    b = make_run(tmp_path / "large", "adamw", 1.2, settings={"model.name": "llama-10m"})
    assert marked([a, b]) == {} and not any("state" in said for said in headline(summarize([a, b])))


def test_what_the_cuda_allocator_counted_is_ranked_on_equal_cards(tmp_path: Path) -> None:
    pair = [make_run(tmp_path / "a"), make_run(tmp_path / "b", "adamw")]
    for folder, peak in zip(pair, (5e9, 6e9)):
        rewrite(folder, peak=peak, peak_of="CUDA allocator")
    assert marked(pair) == {"peak memory (MB)": ["a"]}
    rewrite(pair[1], peak=5.0001e9)
    assert marked(pair) == {}  # the same in the digits shown
    rewrite(pair[1], peak=6e9, peak_of="process, resident")
    assert marked(pair) == {}


def test_unfinished_runs_are_shown_but_not_ranked(tmp_path: Path, pair: list[Path]) -> None:
    stopped = make_run(tmp_path / "stopped", "muon", 0.5, done=200, status="interrupted", state=1)
    failed = make_run(tmp_path / "failed", "sgd", done=0, status="failed")
    killed = make_run(tmp_path / "killed", done=50, status="running", evals=False)
    folders = [*pair, stopped, failed, killed]
    runs = summarize(folders)
    assert headline(runs)[0].startswith("foam-1 ends with the lowest")
    said = " ".join(cautions(runs))
    assert "stopped was interrupted at step 200 of 400: it is shown, but not ranked." in said
    assert "failed failed before its first record:" in said and "killed still running, or was killed," in said
    rows = {row[0]: row for row in compare_table(folders)}
    assert not any("*" in cell for name in ("stopped", "failed", "killed") for cell in rows[name])
    assert rows["failed"][2] == "–"
    assert "No finished run" in headline(summarize([failed, killed]))[0]
    page(summarize([failed]))


def test_divergence_is_told(tmp_path: Path) -> None:
    good, bad = make_run(tmp_path / "good", nan_at=7), make_run(tmp_path / "bad", "sgd")
    with open(bad / "metrics.jsonl", "a", encoding="utf-8") as f:
        f.write('{"kind": "eval", "step": 401, "tokens": 1, "seconds": 1, "loss": NaN}\n')
    runs = summarize([good, bad])
    assert headline(runs)[0] == "Only good ends with a finite validation loss: 1.516."
    said = " ".join(cautions(runs))
    assert "good skipped 1 step (loss is nan)" in said and "bad: the loss was not finite" in said
    assert compare_table([good, bad])[2][2] == "–"
    assert perplexity(math.inf) == math.inf and math.isnan(perplexity(math.nan))
    page(runs)


def test_losses_on_other_data_are_not_ranked(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a")
    b = make_run(tmp_path / "b", settings={"data.tokenizer": "bytes"})
    runs = summarize([a, b])
    assert "cannot be ranked" in headline(runs)[0]
    assert "their losses measure different things" in " ".join(cautions(runs))
    assert all("*" not in row[2] for row in compare_table([a, b]))


def test_seeds_become_arms_with_a_paired_test(tmp_path: Path) -> None:
    losses = {"foam": (1.490, 1.528, 1.486), "adamw": (1.553, 1.543, 1.565)}
    folders = [
        make_run(tmp_path / f"{name}-{seed}", name, final, seed=seed)
        for name, finals in losses.items()
        for seed, final in enumerate(finals)
    ]
    runs = summarize(folders)
    best, other = arms(runs)
    assert (best.label, len(best.runs), other.label) == ("foam", 3, "adamw")
    said = headline(runs)
    assert said[0].startswith("foam ends with the lowest mean validation loss: 1.517, 0.052 below adamw")
    assert "cannot be distinguished" in said[1] and "n = 3" in said[1]
    assert "Few seeds (3 a setting)" in " ".join(cautions(runs))
    lrs = summarize([*folders, make_run(tmp_path / "x", "foam", lr=0.02), make_run(tmp_path / "y", lr=0.02, seed=1)])
    assert {arm.label for arm in arms(lrs)} == {"foam, lr 0.01", "foam, lr 0.02", "adamw"}


def test_runs_are_level_only_within_the_margin_and_nothing_is_claimed_of_one_that_lost_a_seed(tmp_path: Path) -> None:
    """As a contest has it, of n = 8."""
    folders = [
        make_run(tmp_path / f"{name}-{seed}", name, 1.5 + off + 0.001 * ((seed + turn) % 2), steps=40, seed=seed)
        for name, off, turn in (("foam", 0.0, 0), ("adamw", 0.0002, 1))
        for seed in range(8)
    ]
    assert "level with adamw within 0.01 nat" in headline(summarize(folders))[1]
    lost = make_run(tmp_path / "lost", "foam", steps=40, done=12, seed=8, status="failed")
    info = json.loads((lost / "run.json").read_text())
    (lost / "run.json").write_text(json.dumps({**info, "reason": "diverged"}))
    runs = summarize([*folders, lost])
    assert "as foam did not finish with every seed" in headline(runs)[1]
    assert "lost diverged at step 12 of 40" in " ".join(cautions(runs))


def test_the_level_is_divided_by_the_pairs_that_could_have_been_told(tmp_path: Path) -> None:
    """p = 0.03 is a claim between two settings, and none among three."""
    offs = {"foam": [0.0, 0.0, 0.0, 0.0], "adamw": [0.1, 0.2, 0.3, 0.5], "sgd": [2.0, 2.1, 2.2, 2.3]}
    folders = {
        name: [
            make_run(tmp_path / f"{name}-{seed}", name, 1.5 + off, steps=40, seed=seed) for seed, off in enumerate(x)
        ]
        for name, x in offs.items()
    }
    assert headline(summarize([*folders["foam"], *folders["adamw"]]))[1].startswith("foam beats adamw")
    assert "cannot be distinguished" in headline(summarize([f for x in folders.values() for f in x]))[1]


def test_runs_of_0_1_are_no_seeds_of_todays(tmp_path: Path) -> None:
    """They folded by the paper's rule without naming it, over text read in another way."""
    old = make_run(tmp_path / "old", "foam")
    now = {"data.version": 2}
    new = [make_run(tmp_path / f"new-{seed}", "foam", seed=seed, settings=now) for seed in (1, 2)]
    paper = {"data.version": 1, "optimizer.options": {"bias_correction": "whole", "residual_in_v": 1.0}}
    same = make_run(tmp_path / "same", "foam", seed=3, settings=paper)
    found = {tuple(sorted(run.label for run in arm.runs)) for arm in arms(summarize([old, *new, same]))}
    assert found == {("old", "same"), ("new-1", "new-2")}


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    a = make_run(tmp_path / "<b>&$x_1$\n<i>", settings={"model.name": HOSTILE})
    b = make_run(tmp_path / "_hidden", HOSTILE, 2.0)
    seen = Text(report([a, b], tmp_path / "r.html", static=["svg"])[0].read_text(encoding="utf-8"))
    assert HOSTILE in seen.text
    assert [t for t, _ in seen.tags].count("script") == 3 and not any("onerror" in a for _, a in seen.tags)
    assert "b" not in [t for t, a in seen.tags if t == "i"]


def test_pictures_and_tables(pair: list[Path], tmp_path: Path) -> None:
    written = report(pair, tmp_path / "r.html", static=["png", "svg"], tables=True)
    assert [p.name for p in written] == [
        "r.html",
        "r-summary.csv",
        "r-curves.csv",
        *(f"r-{chart}.{form}" for chart in ("loss", "memory", "lr", "grad-norm") for form in ("png", "svg")),
    ]
    assert all(p.read_bytes().startswith((b"\x89PNG", b"<?xml")) for p in written[3:])
    with open(written[1], encoding="utf-8") as f:
        rows = list(csv.DictReader(f))
    assert [row["run"] for row in rows] == ["foam-1", "adamw-1"]
    assert float(rows[0]["loss"]) == 1.5 + 6.5 * math.exp(-6) and rows[0]["state_bytes"] == "2500000"
    with open(written[2], encoding="utf-8") as f:
        assert len(list(csv.DictReader(f))) == 2 * 404


def test_charts_are_what_plotly_accepts(pair: list[Path]) -> None:
    graph = pytest.importorskip("plotly.graph_objects")
    for chart in charts(summarize(pair)):
        drawn = plotly_charts.plotly(chart)
        json.dumps(drawn, allow_nan=False)
        graph.Figure(drawn)  # unknown attributes raise
        assert not plots.empty(chart)


def test_thirty_runs(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"run-{i:02}", f"opt{i}", 1 + i / 30, steps=40) for i in range(30)]
    runs = summarize(folders)
    assert len({plots.style(i) for i in range(30)}) == 30
    seen = Text(page(runs))
    assert [a.get("class") for _, a in seen.tags].count("chip") == 30
    assert headline(runs)[0].startswith("run-00 ends with the lowest validation loss")


def test_what_is_no_run_or_cannot_be_written(tmp_path: Path, pair: list[Path]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for folders, words in (
        ([], "no run to report"),
        ([tmp_path / "empty"], "run.json is missing"),
        ([tmp_path / "nowhere"], "no run in"),
        ([pair[0], pair[0]], "given twice"),
    ):
        with pytest.raises(UserError, match=words):
            report(folders, tmp_path / "r.html")
    with pytest.raises(UserError, match=r"unknown picture format 'gif'; known: png, svg, pdf$"):
        report(pair, tmp_path / "r.html", static=["gif"])
    with pytest.raises(UserError, match="cannot write"):
        report(pair, tmp_path / "file" / "r.html")
    (pair[0] / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"cannot read .*config.yaml"):
        report(pair, tmp_path / "r.html")


def test_missing_settings_and_keys(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a" / "x"), make_run(tmp_path / "b" / "x", "adamw")
    (a / "config.yaml").unlink()
    (b / "run.json").write_text("{}")
    (b / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "eval", "step": 1, "loss": "high"}\n')
    runs = summarize([a, b])
    assert [run.label for run in runs] == ["a/x", "b/x"]
    assert math.isnan(runs[1].loss) and math.isnan(runs[1].bytes("state"))
    page(runs)


def test_smooth_thin_and_window() -> None:
    assert plots.smooth([1, 2, 3, 4, 5], 3) == [1.5, 2, 3, 4, 4.5]
    gap = plots.smooth([1, math.nan, 3], 3)
    assert gap[0] == 1 and math.isnan(gap[1]) and gap[2] == 3
    line = plots.Line(
        0, "", {axis: list(range(5000)) for axis in plots.AXES}, [10.0] * 400 + [1.0] * 2300 + [2.0] * 2300
    )
    short = plots.thin(line)
    assert len(short.y) == plots.POINTS and short.x["steps"][0] == 0 and short.x["steps"][-1] == 4999
    assert plots.window([line]) == pytest.approx((0.95, 2.05))
    assert plots.shorten("abcdefghijklmnopqrstuvwxyz", 11) == "abcde…vwxyz"


@pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed: the page is not opened in a browser")
def test_page_in_a_browser(tmp_path: Path, pair: list[Path]) -> None:
    """No error, nothing blocked, every chart drawn and filled, nothing wider than the window."""
    long = make_run(
        tmp_path / ("a-very-long-name-" * 5), "muon", 1.8, lr=1e-3, done=300, status="interrupted", nan_at=9
    )
    text = page(summarize([*pair, long])).replace("</body>", PROBE)
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    (tmp_path / "frames.html").write_text(FRAMES, encoding="utf-8")
    seen = browse(tmp_path / "frames.html", tmp_path / "profile")
    assert {frame["wide"] for frame in seen} == {1280, 390}
    for frame in seen:
        assert frame["problems"] == [] and frame["outside"] == [], frame
        assert frame["scroll"] <= frame["wide"]
        assert [chart["name"] for chart in frame["charts"]] == ["loss", "lr", "grad-norm", "memory"]
        for chart in frame["charts"]:
            assert chart["traces"] >= 2 and chart["height"] > 150 and chart["svg"] == pytest.approx(1, abs=0.02), chart
            assert chart["crossed"] == 0 and chart["overlaps"] == [], chart
            assert chart["title"] == ("MB" if chart["name"] == "memory" else "tokens seen")
