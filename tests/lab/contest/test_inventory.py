"""`foamlab report` reads whatever lies in runs/, nested or not, contests too; tables fit the terminal."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from contests import make_contest
from pages import make_run

from foamlab.cli import main
from foamlab.contest import inventory
from foamlab.errors import UserError
from foamlab.text import fitted, table, widest


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As after `make demo`, a run, a contest and some litter."""
    for name, optimizer, seed in (
        ("runs/demo-1/foam", "foam", 0),
        ("runs/demo-1/adamw", "adamw", 0),
        ("runs/x", "sgd", 1),
    ):
        make_run(tmp_path / name, optimizer, 1.5 + seed, steps=40)
    make_contest(tmp_path / "runs" / "contest", ["adamw", "muon"], (0,), limit=2)
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(found: inventory.Inventory) -> list[str]:
    return [str(path) for path in found.runs]


def test_runs_are_found_at_any_depth_and_once(desk: Path) -> None:
    every = ["runs/demo-1/adamw", "runs/demo-1/foam", "runs/x"]
    assert names(inventory.take(["runs"])) == every == names(inventory.take(["."]))
    assert names(inventory.take(["runs/x", "runs", "runs/x/", desk / "runs" / "x"])) == ["runs/x", *every[:2]]
    found = inventory.take(sorted(Path("runs").glob("*")))  # the shell's runs/*
    assert names(found) == every and [*found.contests] == [Path("runs/contest")]
    assert found.skipped == {
        Path("runs/empty"): "no run in it, nor 4 folders down",
        Path("runs/notes.txt"): "a file, not a run folder",
    }
    trials = [path.parent for path in Path("runs/contest").glob("*/*/run.json")]
    arms = inventory.take([*Path("runs/contest").glob("*/")])  # its runs, when they are asked for
    assert {*names(arms)} == {*map(str, trials)} == {*names(inventory.take(trials))} and not arms.contests
    assert inventory.take(["runs/contest"]).contest == Path("runs/contest")
    (desk / "loop").symlink_to(desk)
    assert names(inventory.take(["."])) == every


def test_what_cannot_be_read_is_skipped_with_the_reason(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (desk / "runs/x/run.json").write_text("[" * 100_000)
    (desk / "runs/contest/contest.json").write_text("{}")
    assert main(["report", "runs"]) == 0
    told = capsys.readouterr()
    assert re.search(r"skipped runs/x: cannot read .*run\.json: nested", told.err)
    assert re.search(r"skipped runs/contest: .*contest\.json has format None", told.err)
    with pytest.raises(UserError, match=r"^no run to report \(runs/x: cannot read .*; runs/no: does not exist\)"):
        inventory.take(["runs/x", "runs/no"])
    with pytest.raises(UserError, match="give at least one"):
        inventory.take([])


def test_contests_among_runs_get_a_line_on_the_terminal_and_the_page(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = desk / "runs/contest/contest.json"
    kept = json.loads(file.read_text())
    best = {**kept["results"][0], "arm": "muon", "loss": 5.31, "n": 3}
    file.write_text(json.dumps({**kept, "status": "done", "results": [best]}))
    assert main(["report", *map(str, sorted(Path("runs").glob("*"))), "--out", "all.html"]) == 0
    told = capsys.readouterr()
    line = next(x for x in told.out.splitlines() if x.startswith("runs/contest: compare"))
    assert line.endswith("done; lowest mean loss 5.3100, of muon (n = 3). Its page: foamlab report runs/contest")
    text = (desk / "all.html").read_text(encoding="utf-8")
    assert "Contests beside these runs" in text and "Its page: foamlab report runs/contest" in text
    assert "skipped runs/notes.txt: a file" in told.err and "skipped runs/empty:" in told.err
    assert main(["report", "runs/contest", "--out", "contest.html"]) == 0
    make_contest(desk / "runs" / "other", ["adamw"], (0,), limit=1)
    assert main(["report", "runs/contest", "runs/other"]) == 2
    assert "2 contests and no other run: report each alone" in capsys.readouterr().err


@pytest.mark.parametrize("out", [".", "..", "", "runs", "runs/", "/"])
def test_a_folder_is_no_page(desk: Path, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(desk.rglob("*"))
    assert main(["report", "runs/x", "--out", out]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"foamlab: error: --out .* is a folder: name the page, such as .*report\.html\n", error)
    assert sorted(desk.rglob("*")) == before


def test_a_folder_that_cannot_be_written_is_a_line(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = ["runs/notes.txt/r.html"]
    if Path("/proc/self").exists():
        places.append("/proc/self/r.html")
    if os.geteuid():
        (desk / "locked").mkdir(mode=0o500)
        places.append("locked/r.html")
    for place in places:
        assert main(["report", "runs/x", "--out", place]) == 2
        assert re.search(r"error: cannot write .*r\.html: [A-Z].*; choose another --out\n$", capsys.readouterr().err)


def test_strings_that_are_no_unicode_reach_the_page(desk: Path) -> None:
    strange = make_run(desk / "odd" / os.fsdecode(b"r\xff"), steps=40)
    info = json.loads((strange / "run.json").read_text())
    (strange / "run.json").write_text(json.dumps(info | {"command": "half a \ud800 pair"}))
    assert main(["report", "odd", "--out", "r.html", "--tables"]) == 0
    assert r"half a \ud800 pair" in (desk / "r.html").read_text(encoding="utf-8")
    assert r"r\udcff" in (desk / "r-summary.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_without_utf8_gets_what_it_can_show(
    desk: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io
    import sys

    (desk / "runs/x/metrics.jsonl").write_text("")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    assert main(["report", "runs"]) == 0
    sys.stdout.flush()
    assert b"validation loss" in raw.getvalue() and b"\n" in raw.getvalue()


ROWS = [["run", "status", "validation loss", "peak"]] + [[f"run-{i}", "done", f"{i}.1234 *", "700"] for i in range(7)]


@pytest.mark.parametrize("width", [20, 30, 80, 200])
def test_tables_of_figures_fit(width: int) -> None:
    text = fitted(ROWS, width)
    assert widest(text) <= max(width, len("validation loss  0.1234 *"))
    assert all(cell in text for row in ROWS for cell in row)
    assert (text.splitlines()[0].split()[:2] == ["run", "status"]) == (width >= 80)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_tables_of_words_break_their_last_column(width: int) -> None:
    words = "the quick brown fox jumps over the lazy dog and comes back again for more of the same, twice"
    text = table(("model", "parameters", ""), [("llama-1m", "1.8 M", words), ("b", "2", "short")], width)
    assert widest(text) <= width and " ".join(text.split()).count("lazy dog") == 1
    assert " ".join(words.split()) in " ".join(text.replace("1.8 M", "").split())
    assert table(("a", ""), [("x", words)]).count("\n") == 1  # no terminal: a row is a line
