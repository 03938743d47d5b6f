"""A run to hold contests over, and trials in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small
from contests import Done

from foamlab.config import RunConfig
from foamlab.contest import runner, trial
from foamlab.errors import UserError


@pytest.fixture
def config(home: Path, tmp_path: Path) -> RunConfig:
    return small.config(home, tmp_path / "unused", steps=6, eval_every=2, checkpoint_every=0, memory="ignore")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trials run in this process, one after the other; the list of their names."""
    ran = []

    def spawn(self: object, orders: dict[str, Any], slot: int, log: Path) -> Any:
        ran.append("/".join(Path(orders["config"]["out"]).parts[-2:]))
        log.write_text("")
        try:
            return Done(130 if trial.run(json.loads(json.dumps(orders))) == "interrupted" else 0)
        except UserError as e:
            log.write_text(str(e))
            return Done(2)

    monkeypatch.setattr(runner.Runner, "spawn", spawn)
    monkeypatch.setattr(runner, "POLL", 0)
    return ran
