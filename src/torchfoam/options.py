"""The per-group options of FOAM: their names, which values make sense, and how they travel to a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from math import inf
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .fold import check_level
from .rules import BIAS_CORRECTIONS, LR_ADJUSTMENTS, RULES, SECOND_MOMENTS, Hyper
from .state import STATES

OPTIONS = (
    "lr", "betas", "eps", "weight_decay", "level", "rule", "scale", "residual", "second_moment", "bias_correction",
    "residual_in_v", "state", "stochastic", "seed", "momentum", "nesterov", "adjust_lr", "maximize", "capturable",
)  # fmt: skip

CHOICES = {
    "rule": tuple(RULES), "second_moment": SECOND_MOMENTS, "bias_correction": BIAS_CORRECTIONS, "state": STATES,
    "adjust_lr": LR_ADJUSTMENTS,
}  # fmt: skip

# what a step takes from a group under the same name
_SCALARS = tuple(f.name for f in fields(Hyper) if f.name not in ("lr", "beta1", "beta2"))
SWITCHES = ("stochastic", "nesterov", "maximize", "capturable")
# each is >= 0 and below this
NUMBERS = {"eps": inf, "weight_decay": inf, "scale": inf, "residual": inf, "residual_in_v": inf, "momentum": 1}


def known_value(what: str, value: Any, known: Iterable[str]) -> Any:
    """The value if it is known; else a ValueError that offers the nearest and lists the rest."""
    known = tuple(known)
    if value in known:
        return value
    near = get_close_matches(str(value), known, n=1, cutoff=0.7)
    raise ValueError(
        f"unknown {what} {value!r}; " + (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(known)}"
    )


def check_options(given: Iterable[str], misspelt_only: bool = False) -> None:
    """Raise ValueError for the first name that is not an option of FOAM, offering the nearest.

    `misspelt_only` lets through what resembles none: schedulers and trainers keep keys of their own in groups.
    """
    for name in given:
        near = get_close_matches(name, OPTIONS, n=1, cutoff=0.8 if misspelt_only else 0.5)
        if name not in OPTIONS and (near or not misspelt_only):
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(OPTIONS)}"
            raise ValueError(f"unknown option {name!r}; {hint}")


def check(group: Mapping[str, Any], read: bool = True) -> None:
    """Raise ValueError for an option that is missing, of a wrong type or makes no sense, naming the value.

    `read` a learning rate that is a tensor too, unless it is on a GPU: the host would have to wait for it.
    """
    for name in OPTIONS:
        if name not in group:
            raise ValueError(f"the group has no {name!r}; options of FOAM: {', '.join(OPTIONS)}")
    lr, betas = group["lr"], group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {betas!r}")
    _check_number("lr", _rate(lr, read) if isinstance(lr, Tensor) else lr, inf)
    _check_number("beta1", betas[0], 1)
    _check_number("beta2", betas[1], 1)
    for name, limit in NUMBERS.items():
        _check_number(name, group[name], limit)
    for name in SWITCHES:
        if not isinstance(group[name], bool):
            raise ValueError(f"{name} must be True or False, got {group[name]!r}")
    if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
        raise ValueError(f"seed must be an integer, got {group['seed']!r}")
    check_level(group["level"])
    for name, known in CHOICES.items():
        known_value(name, group[name], known)
    if group["rule"] == "mini" and group["second_moment"] != "mean_square":
        raise ValueError("cannot use second_moment='square_mean' with rule 'mini': it keeps the row's mean square")


def _check_number(name: str, value: Any, limit: float) -> None:
    if type(value) is float and 0 <= value < limit:  # as it nearly always is, at every step
        return
    try:
        sound = isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < limit
    except OverflowError:  # an integer beyond all floats
        sound = False
    if not sound:
        wanted = "in [0, 1)" if limit == 1 else "finite and >= 0"
        raise ValueError(f"{name} must be a number {wanted}, got {value!r:.80}")


def _rate(lr: Tensor, read: bool) -> float:
    """The value of a learning rate kept in a tensor; 0 where it is not to be read."""
    if lr.numel() != 1:
        raise ValueError(f"lr must be a float or a tensor of one element, got shape {tuple(lr.shape)}")
    if not lr.is_floating_point() or lr.layout != torch.strided:
        raise ValueError(f"lr must be a float or a dense tensor of floating point, got {lr.dtype} ({lr.layout})")
    return float(lr.detach()) if read and lr.device.type == "cpu" else 0.0


def hyper(group: Mapping[str, Any]) -> Hyper:
    """The group's scalars, frozen for one step; numbers of any kind (numpy's, fractions) as floats."""
    beta1, beta2 = map(float, group["betas"])
    lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else float(group["lr"])
    scalars: dict[str, Any] = {name: float(group[name]) if name in NUMBERS else group[name] for name in _SCALARS}
    return Hyper(lr, beta1, beta2, **scalars)
