"""Who takes part in a contest, and at which rates."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from contests import small_contest

from foamlab.config import RunConfig
from foamlab.contest import design, trial
from foamlab.errors import UserError


def test_every_optimizer_has_its_own_grid_unless_one_is_given(config: RunConfig) -> None:
    c = design.comparison(config, ["foam-paper", "adamw", "sgd"], [0], lr={"adamw": [2e-3, 1e-3, 2e-3]})
    grid = {arm.label: arm.tune["lr"] for arm in c.arms}
    assert (
        grid["adamw"] == [1e-3, 2e-3]
        and grid["foam-paper"] == [3e-3, 1e-2, 3e-2]
        and grid["sgd"] == [0.03, 0.1, 0.3, 1]
    )
    assert all(arm.note for arm in c.arms) and c.arms[0].options["level"] == 2
    assert {tuple(a.tune["lr"]) for a in design.comparison(config, ["adamw", "sgd"], [0], lr={"": [1.0]}).arms} == {
        (1.0,)
    }
    assert design.Contest.from_dict(json.loads(json.dumps(c.as_dict()))) == replace(
        c, config=trial.settings.from_dict(c.as_dict()["settings"])
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"names": ["adamw"]}, "at least two names"),
        ({"names": ["adamw", "adamw"]}, "each once"),
        ({"names": ["adamw", "adamx"]}, "did you mean adamw"),
        ({"lr": {"sgd": [1.0]}}, "optimizer in --lr 'sgd'"),
        ({"lr": {"": [0.0]}}, "above 0"),
        ({"seeds": []}, "--seeds"),
        ({"seeds": [1, 1]}, "each once"),
        ({"stop_factor": 0.5}, "at least 1"),
        ({"stop_at": 1.0}, "between 0 and 1"),
        ({"steps": 0}, "train.steps"),
    ],
)
def test_what_makes_no_sense_is_refused(config: RunConfig, change: dict[str, Any], message: str) -> None:
    if "steps" in change:
        config.train.steps = change.pop("steps")
    with pytest.raises(UserError, match=message):
        design.comparison(**{"config": config, "names": ["adamw", "foam"], "seeds": [0], **change})


@pytest.mark.parametrize(
    "steps, every, at, factor, step",
    [
        (100, 10, 0.3, 1.2, 30),
        (100, 20, 0.3, 1.2, 40),
        (100, 0, 0.3, 1.2, 0),
        (100, 10, 0.3, 0, 0),
        (10, 10, 0.3, 2, 0),
        (9, 2, 0.01, 2, 2),
    ],
)
def test_the_rule_looks_at_an_evaluation_before_the_end(
    config: RunConfig, steps: int, every: int, at: float, factor: float, step: int
) -> None:
    config.train.steps, config.train.eval_every = steps, every
    c = design.comparison(config, ["adamw", "foam"], [0], stop_factor=factor, stop_at=at)
    assert c.rule.step == step
    assert ("stopped at step" in str(c.rule)) == bool(step)


def test_studies_share_the_papers_setting_and_whatever_else_is_the_same(config: RunConfig) -> None:
    config.optimizer.lr, config.optimizer.scale = 0.02, 0.5
    c = design.ablation(config, ["residual", "rho", "level", "alpha", "direction"], [0, 1])
    assert len({json.dumps([a.optimizer, a.options, a.start]) for a in c.arms}) == len(c.arms)
    rho = {case["value"]: case["arm"] for case in c.studies["rho"]["cases"]}
    assert rho["1.0"] == "foam" and rho["0.0"] == "residual-0.0"
    assert all(arm.tune == {"lr": [0.02]} for arm in c.arms)
    assert {arm.start["scale"] for arm in c.arms if not arm.label.startswith("alpha")} == {0.5}
    # what stands beside a value is run at that value, whatever the scale of the others
    for scale, values in (0.5, 5), (0.12, 6), (None, 5):
        config.optimizer.scale = scale
        c = design.ablation(config, ["alpha"], [0])
        at = {arm.label: arm.start["scale"] for arm in c.arms}
        cases = c.studies["alpha"]["cases"]
        assert len(cases) == len({case["arm"] for case in cases}) == values and "foam" in at
        assert all(float(case["value"]) == at[case["arm"]] for case in cases)
    with pytest.raises(UserError, match=r"unknown study 'levl'.*did you mean level"):
        design.ablation(config, ["levl"], [0])


@pytest.mark.parametrize("margin", [-1.0, math.nan, math.inf])
def test_what_is_no_margin(config: RunConfig, margin: float) -> None:
    with pytest.raises(UserError, match="--margin is a difference of losses in nat, or 0"):
        small_contest(config, margin=margin)
    with pytest.raises(UserError, match="--margin is"):
        design.ablation(config, ["residual"], [0], margin=margin)
