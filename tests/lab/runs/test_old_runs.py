"""A run that foamlab 0.2.0 wrote (tests/data/run_0_2_0) is read, reported and gone on with as before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import small

from foamlab.cli import main
from foamlab.cli.arguments import parse
from foamlab.cli.commands import commands
from foamlab.training.run import train

STORED = Path(__file__).parents[2] / "data" / "run_0_2_0"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the one it was made in."""
    shutil.copytree(STORED, tmp_path / "run")
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    small.prepare(Path("home"))
    return tmp_path


def test_it_goes_on_with_its_settings_and_ends_as_it_would_have(here: Path) -> None:
    (config,), _ = parse(commands()["train"], ["--resume", "run"])
    said: list[dict[str, object]] = []
    assert train(config, resume=Path("run"), on_event=said.append).status == "done"
    assert not [event for event in said if event["kind"] == "note"]
    last = small.metrics(Path("run"))[-1]
    assert last["step"] == 6 and last["loss"] == pytest.approx(5.493921120961507, rel=1e-6)  # as 0.2.0 ended


def test_it_is_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "run"]) == 0
    assert "5.5036" in capsys.readouterr().out
    page = Path("report.html").read_text()
    assert "interrupted" in page and "text:home/text" in page
