"""What a contest comes to, beside its verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from contests import small_contest

from foamlab.config import RunConfig
from foamlab.contest import runner
from foamlab.contest.results import standings
from foamlab.errors import UserError


def test_a_lost_seed_and_other_betas_are_told(config: RunConfig, tmp_path: Path, here: list[str]) -> None:
    folder = tmp_path / "c"
    end = runner.start(small_contest(config, names=["foam-paper", "muon"], lr={"": [1e-3]}, stop_factor=0), folder)
    assert any("(0.9, 0.999)" in x.replace("[", "(").replace("]", ")") and "betas" in x for x in end["cautions"])
    gone = folder / "muon" / next(r for r in end["results"] if r["arm"] == "muon")["folders"][1].split("/")[1]
    info = json.loads((gone / "run.json").read_text())
    (gone / "run.json").write_text(json.dumps({**info, "status": "failed", "error": "stopped: 10 steps"}))
    told = standings(folder, end)
    assert any(x.startswith("muon did not finish with seed 1") for x in told["cautions"])


def test_standings_of_a_contest_that_has_not_begun(config: RunConfig, tmp_path: Path) -> None:
    told = standings(tmp_path, small_contest(config).as_dict())
    assert [row["status"] for row in told["results"]] == ["tuning"] * 2 and not told["verdicts"] and not told["runs"]


def test_a_contest_keeps_its_margin_and_an_old_one_has_the_default(
    config: RunConfig, tmp_path: Path, here: list[str]
) -> None:
    folder = tmp_path / "c"
    wide = runner.start(small_contest(config, lr={"": [1e-3]}, stop_factor=0, margin=50.0), folder)
    assert wide["margin"] == 50 and "50 nat (mean" in wide["verdicts"][0] and "is within 50 nat" in wide["cautions"][1]
    old = {key: value for key, value in wide.items() if key != "margin"}
    (folder / "contest.json").write_text(json.dumps(old))
    assert "is within 0.01 nat" in runner.resume(folder)["cautions"][1]
    none = standings(folder, {**old, "margin": 0})
    assert "nat" not in none["verdicts"][0] and "the margin is 0" in none["cautions"][1]
    with pytest.raises(UserError, match="another --margin: beside --resume give its flags all as they were, or none"):
        runner.go_on(config, folder, asked=small_contest(config, lr={"": [1e-3]}, stop_factor=0, margin=0.02))
