"""Contests: one process alone begins and writes a contest in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small

from foamlab.contest import design, runner
from foamlab.errors import UserError
from foamlab.files import lock


def test_a_contest_that_begins_at_the_same_time_leaves_the_other_alone(tmp_path: Path) -> None:
    config = small.config(small.prepare(tmp_path), tmp_path / "unused", steps=1, memory="ignore")
    contest = design.comparison(config, ["foam-paper", "adamw"], [0])
    folder = tmp_path / "contest"
    folder.mkdir()
    held = lock(folder)  # the other has looked at the empty folder, as this one has, and writes now
    try:
        with pytest.raises(UserError, match="another process is writing"):
            runner.start(contest, folder)
    finally:
        held.release()
    assert {path.name for path in folder.iterdir()} <= {".lock"}  # else the other's settings would be this one's

    def stop(event: dict[str, Any]) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):  # what is left keeps no contest out
        runner.start(contest, folder, on_event=stop)
    assert (folder / "contest.json").is_file()
    with pytest.raises(UserError, match="exists already"):
        runner.start(contest, folder)
