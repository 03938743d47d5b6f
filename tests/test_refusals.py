"""Options, parameters and groups that cannot be are refused before anything moves."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from problems import everything, numbers, same
from torchfoam import FOAM, GradientRelease
from torchfoam.options import OPTIONS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be a number finite and >= 0, got -1.0"),
        ({"lr": float("nan")}, "lr must be a number finite and >= 0, got nan"),
        ({"lr": "1e-3"}, "lr must be a number finite and >= 0, got '1e-3'"),
        ({"lr": torch.ones(2)}, r"lr must be a float or a tensor of one element, got shape \(2,\)"),
        ({"lr": torch.tensor(-1.0)}, "lr must be"),
        ({"betas": (1.0, 0.9)}, r"beta1 must be a number in \[0, 1\), got 1.0"),
        ({"betas": (0.9, -0.1)}, r"beta2 must be a number in \[0, 1\), got -0.1"),
        ({"betas": (0.9,)}, r"betas must be two numbers, got \(0.9,\)"),
        ({"betas": 0.9}, "betas must be two numbers, got 0.9"),
        ({"eps": -1e-8}, "eps must be"),
        ({"eps": None}, "eps must be a number finite and >= 0, got None"),
        ({"weight_decay": float("inf")}, "weight_decay must be"),
        ({"scale": -0.25}, "scale must be"),
        ({"residual": True}, "residual must be a number"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"seed": 0.5}, "seed must be an integer, got 0.5"),
        ({"level": -1}, "level must be an integer from 0 to 30 or 'row', got -1"),
        ({"level": "2"}, "level must be an integer from 0 to 30 or 'row', got '2'"),
        ({"level": True}, "level must be"),
        ({"lr": 10**400}, "lr must be"),
        ({"lr": True}, "lr must be"),
        ({"betas": ("0.9", 0.99)}, "beta1 must be"),
        ({"betas": (torch.tensor(0.9), 0.99)}, "beta1 must be"),
        ({"scale": "1"}, "scale must be"),
        ({"momentum": None}, "momentum must be"),
        ({"seed": True}, "seed must be an integer, got True"),
        ({"rule": None}, "unknown rule None"),
        ({"rule": ["adam"]}, r"unknown rule \['adam'\]"),
        ({"adjust_lr": 1}, "unknown adjust_lr 1"),
        *(
            ({name: value}, f"{name} must be True or False, got {value!r}")
            for name in ("maximize", "nesterov", "stochastic", "capturable")
            for value in ("no", 0, None, 1.0)
        ),
        ({"rule": "adamw"}, "unknown rule 'adamw'; did you mean 'adam'\\? known: adam"),
        ({"second_moment": "mean"}, "unknown second_moment 'mean'; .*known: mean_square, square_mean"),
        (
            {"state": "float16"},
            "unknown state 'float16'; did you mean 'bfloat16'\\? known: float32, bfloat16, int8, param",
        ),
        ({"backend": "gpu"}, "unknown backend 'gpu'; known: eager"),
    ],
    ids=str,
)
def test_nonsense_is_refused_at_construction_and_in_groups(options: dict[str, Any], message: str) -> None:
    p = nn.Parameter(torch.zeros(2, 8))
    with pytest.raises(ValueError, match=message):
        FOAM([p], **options)
    if "backend" not in options:
        with pytest.raises(ValueError, match=message):
            FOAM([{"params": [p], **options}])


@pytest.mark.parametrize("wrap", [list, iter, tuple], ids=["list", "iterator", "tuple"])
def test_parameters_that_cannot_be(wrap: Callable[..., Any]) -> None:
    for p in (nn.Parameter(torch.zeros(2, 8, dtype=torch.complex64)), torch.zeros(2, 8, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"real, floating-point parameters, got torch\.(complex64|int64)"):
            FOAM(wrap([p]))
        with pytest.raises(ValueError, match="real, floating-point"):
            FOAM([{"params": wrap([p]), "level": 2}])
    with pytest.raises(ValueError, match="dense, real"):
        FOAM(wrap([nn.Parameter(torch.eye(4).to_sparse())]))
    with pytest.raises(ValueError, match="non-leaf"):
        FOAM(wrap([torch.zeros(2, 8, requires_grad=True) * 1]))


def test_what_are_no_parameters() -> None:
    w = nn.Parameter(torch.zeros(2, 8))
    for wrong in (w, {w}, {"params": [w]}, [{"params": {w}}], ["w"], [{"params": [1]}]):
        with pytest.raises(TypeError):
            FOAM(wrong)
    with pytest.raises(ValueError, match="empty"):
        FOAM([])


def test_a_misspelt_option_is_refused_and_a_trainers_own_key_is_kept() -> None:
    p = nn.Parameter(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="unknown option 'levle'; did you mean 'level'"):
        FOAM([{"params": [p], "levle": 3}])
    assert FOAM([{"params": [p], "lr_scale": 0.5, "initial_lr": 1.0}]).param_groups[0]["lr_scale"] == 0.5


@pytest.mark.parametrize(
    "before, after",
    [
        ({}, {"level": 3}),
        ({}, {"level": "row"}),
        ({"level": "row"}, {"level": 2}),
        ({}, {"rule": "mini"}),
        ({}, {"rule": "muon"}),
        ({"rule": "muon"}, {"rule": "adam"}),
        ({}, {"rule": "adamm"}),
        ({}, {"second_moment": "mean"}),
        ({}, {"state": "int8"}),
        ({"state": "int8"}, {"state": "float32"}),
        ({}, {"state": "bfloat16"}),
        ({"state": "bfloat16"}, {"state": "float32"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", [None, "eager"])
def test_what_a_group_cannot_change_in_mid_run(before: dict[str, Any], after: dict[str, Any], backend: Any) -> None:
    vector, matrix = nn.Parameter(torch.ones(3)), nn.Parameter(numbers(3, 16).float())
    if before.get("rule") == "muon":
        backend = None  # whatever takes it
    opt = FOAM([{"params": [vector], "level": 0}, {"params": [matrix], "level": 2, **before}], backend=backend)
    options = {key: opt.param_groups[1][key] for key in after}
    for now in ({}, after, {}):
        vector.grad, matrix.grad = torch.ones(3), numbers(3, 16).float()
        kept = everything(opt)
        opt.param_groups[1].update(now)
        if now:
            with pytest.raises(ValueError, match=r"changed after construction|unknown (rule|second_moment)"):
                opt.step()
        else:
            opt.step()
        opt.param_groups[1].update(options)
        assert same(kept, everything(opt)) == bool(now)  # the other group has not stepped either


NONSENSE: dict[str, Any] = {
    "lr": "fast", "betas": 0.9, "eps": -1.0, "weight_decay": None, "level": "2", "rule": 3, "scale": float("nan"),
    "residual": True, "residual_in_v": "0.1", "second_moment": "mean", "bias_correction": True, "state": "float16",
    "stochastic": "no", "seed": 0.5, "momentum": 1.0, "nesterov": 1, "adjust_lr": None, "maximize": "no",
    "capturable": 0,
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("how", ["changed", "deleted"])
@pytest.mark.parametrize("release", [False, True])
def test_a_group_spoilt_between_steps_is_refused_before_anything_moves(option: str, how: str, release: bool) -> None:
    vector, matrix = nn.Parameter(torch.ones(3)), nn.Parameter(numbers(3, 16).float())
    opt = FOAM([{"params": [vector], "level": 0}, {"params": [matrix], "level": 2}])
    before = everything(opt)
    group, sound = opt.param_groups[1], opt.param_groups[1][option]
    if how == "changed":
        group[option] = NONSENSE[option]
    else:
        del group[option]
    with pytest.raises(ValueError, match=f"^the group has no '{option}'" if how == "deleted" else option[:4]):
        if release:
            with GradientRelease(opt):
                matrix.sum().backward()
        else:
            vector.grad, matrix.grad = torch.ones(3), numbers(3, 16).float()
            opt.step()
    group[option] = sound
    assert same(before, everything(opt))


@pytest.mark.filterwarnings("error", "ignore:momentum=.* has no effect")
def test_numbers_of_any_kind_are_numbers() -> None:
    ends = []
    kinds: list[Any] = [float, Fraction, np.float32, np.float64]
    for kind in kinds:
        for backend in ("cpu", "eager"):
            w = nn.Parameter(numbers(3, 16).float())
            options = {name: kind(0.5) for name in ("lr", "eps", "weight_decay", "scale", "residual", "momentum")}
            opt = FOAM([w], betas=(kind(0.5), kind(0.75)), backend=backend, **options)
            for t in range(3):
                w.grad = numbers(3, 16, seed=t).float()
                opt.step()
            ends.append(w.detach())
    assert all(same(a, b) for a, b in zip(ends[2:], ends))
