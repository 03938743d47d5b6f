"""A contest that torchfoam 0.2.0 ran: read, reported and gone on with as one of today."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import small

from foamlab.contest import folder as contest_folder
from foamlab.contest import runner
from foamlab.contest.folder import outcome, read
from foamlab.contest.page import compare_table, report
from foamlab.contest.results import standings
from foamlab.files import finite

STORED = Path(__file__).parents[2] / "data" / "contest_v1.zip"


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The contest beside the text and the model that it is over."""
    small.prepare(tmp_path)
    with zipfile.ZipFile(STORED) as stored:
        stored.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(contest_folder, "installed", lambda name: "0.2.0")
    return Path("contest")


def kept(folder: Path) -> dict[str, Any]:
    """`contest.json` as it was written."""
    return json.loads((folder / "contest.json").read_text())


def test_what_became_of_its_runs_is_read_as_it_was(old: Path) -> None:
    was = kept(old)
    fates = {run["folder"]: run["status"] for run in was["runs"]}
    assert set(fates.values()) == {"done", "stopped", "diverged"}
    assert {name: outcome(old / name).status for name in fates} == fates
    now = finite(standings(old, read(old)))
    assert now["runs"] == was["runs"] and now["search"] == was["search"] and now["verdicts"] == was["verdicts"]
    assert [{key: x for key, x in row.items() if key != "ours"} for row in now["results"]] == was["results"]


def test_its_arms_are_known_as_ours_or_not(old: Path) -> None:
    assert {arm["label"]: arm["ours"] for arm in read(old)["contestants"]} == {
        "foam": True, "adamw": False, "sgd": False,
    }  # fmt: skip


def test_its_page_is_made(old: Path, tmp_path: Path) -> None:
    rows = kept(old)["results"]
    page = report([old], tmp_path / "page.html")[0].read_text()
    assert f"{rows[0]['loss']:.4f}" in page and "could not be taken" in page
    assert [row[0] for row in compare_table([old])[1:]] == [row["arm"] for row in rows]


def test_it_goes_on(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run is lost: it alone is run again, and the end is the same."""
    was = kept(old)
    lost = was["results"][0]["folders"][0]
    (old / lost).rename("aside")
    asked = []

    class Done:
        returncode = 0

        def poll(self) -> int:
            return 0

    def spawn(self: runner.Runner, orders: dict[str, Any], slot: int, log: Path) -> Done:
        asked.append(Path(orders["config"]["out"]))
        assert orders["config"]["optimizer"]["name"] == "foam" and orders["data"] == was["data"]
        shutil.copytree("aside", asked[-1])
        log.write_bytes(b"")
        return Done()

    monkeypatch.setattr(runner.Runner, "spawn", spawn)
    monkeypatch.setattr(runner, "POLL", 0)
    end = runner.resume(old)
    assert asked == [old / lost] and end["status"] == "done"
    assert [row["loss"] for row in end["results"]] == [row["loss"] for row in was["results"]]
