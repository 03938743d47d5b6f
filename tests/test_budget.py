"""Levels by budget: the state fits, little is left over, and bytes go where the residual is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchfoam import FOAM, param_groups
from torchfoam.budget import parse_bytes


def model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(20, 64), nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 20))


def levels(groups: list[dict[str, object]]) -> dict[str, object]:
    return {n: g["level"] for g in groups for n, _ in g["params"]}  # type: ignore[attr-defined]


@pytest.mark.parametrize("state", ["float32", "int8"])
@pytest.mark.parametrize("share", [0.4, 0.6, 0.9])
def test_fits_and_uses_the_budget(state: str, share: float) -> None:
    net = model()
    most = FOAM(param_groups(net, level=0, state=state)).state_bytes()
    budget = int(most * share)
    opt = FOAM(param_groups(net, state=state, state_budget=budget))
    assert opt.state_bytes() <= budget
    # another halving of any block would not fit: no matrix is more than one level above another
    assert opt.state_bytes() > budget - max(opt.state_bytes() // 2, 1)


def test_evenly_without_a_measurement() -> None:
    found = levels(param_groups(model(), state_budget="32KB"))
    folded = {n: level for n, level in found.items() if n in ("1.weight", "2.weight")}
    assert all(isinstance(level, int) for level in folded.values())
    assert max(folded.values()) - min(folded.values()) <= 1  # type: ignore[type-var,operator]


def test_spends_where_the_residual_is() -> None:
    ratios = {"1.weight": 0.2, "2.weight": 0.8}
    found = levels(param_groups(model(), state_budget="50KB", level=2, residual_ratios=ratios))
    assert found["2.weight"] < found["1.weight"]  # type: ignore[operator]


def test_measured_ratios_go_in_as_they_come_out() -> None:
    net = model()
    opt = FOAM(param_groups(net))
    net(torch.arange(20)).square().mean().backward()
    ratios = opt.residual_ratio()
    assert set(ratios) == {"1.weight", "2.weight"} and all(0 < r < 1 for r in ratios.values())
    param_groups(net, state_budget="1MB", residual_ratios=ratios)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("1KB", "what does not fold needs"),
        ("22.4KB", "at level 'row' the matrices need"),
        ("12 parsecs", "must look like"),
    ],
)
def test_what_cannot_be(budget: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        param_groups(model(), state_budget=budget)


def test_an_override_keeps_its_level() -> None:
    found = levels(param_groups(model(), state_budget="1MB", overrides={"1.weight": {"level": 3}}))
    assert found["1.weight"] == 3 and found["2.weight"] == 0


@pytest.mark.parametrize(
    ("size", "number"),
    [("1TB", 10**12), ("2 TiB", 2**41), ("0.57GB", 570_000_000), ("1.5kB", 1500), (2**62 + 1, 2**62 + 1), (0, 0)],
)
def test_sizes(size: int | str, number: int) -> None:
    assert parse_bytes(size) == number


ABSURD = [
    "9" * 400,
    "9" * 5000 + "GB",
    "1e400",
    "inf",
    "nan",
    "-1GB",
    "8EB",
    "9000000000TiB",
    10**400,
    10**5000,
    -1,
    2.5e30,
]


@pytest.mark.parametrize("size", [*ABSURD, float("inf"), float("nan"), None, ""], ids=lambda x: type(x).__name__)
def test_absurd_sizes_are_one_line(size: object) -> None:
    with pytest.raises(ValueError, match="size must look like") as e:
        parse_bytes(size)  # type: ignore[arg-type]
    assert len(str(e.value)) < 200
