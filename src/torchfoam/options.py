"""The per-group options of FOAM: their names, which values make sense, and how they travel to a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from math import inf
from numbers import Real
from typing import Any

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


def known_value(what: str, value: Any, known: Iterable[str]) -> Any:
    """The value if it is known; else a ValueError that offers the nearest and lists the rest."""
    known = list(known)
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


def check(group: Mapping[str, Any]) -> None:
    """Raise ValueError for hyperparameters that make no sense, naming the value."""
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr must be a float or a tensor of one element, got shape {tuple(lr.shape)}")
        lr = lr.item() if lr.device.type == "cpu" else 0.0  # reading it from a GPU would wait for it
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, got {betas!r}")
    below = {"lr": (lr, inf), "beta1": (betas[0], 1), "beta2": (betas[1], 1), "momentum": (group["momentum"], 1)}
    below.update({name: (group[name], inf) for name in ("eps", "weight_decay", "scale", "residual", "residual_in_v")})
    for name, (value, limit) in below.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < limit:
            wanted = "in [0, 1)" if limit == 1 else "finite and >= 0"
            raise ValueError(f"{name} must be a number {wanted}, got {value!r}")
    if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
        raise ValueError(f"seed must be an integer, got {group['seed']!r}")
    check_level(group["level"])
    check_choices(group)


def check_choices(group: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that no option has, or a pair that cannot be."""
    for name, known in CHOICES.items():
        if group[name] not in known:
            known_value(name, group[name], known)
    if group["rule"] == "mini" and group["second_moment"] != "mean_square":
        raise ValueError("cannot use second_moment='square_mean' with rule 'mini': it keeps the row's mean square")


def hyper(group: Mapping[str, Any]) -> Hyper:
    """The group's scalars, frozen for one step."""
    beta1, beta2 = group["betas"]
    lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
    return Hyper(lr, beta1, beta2, **{name: group[name] for name in _SCALARS})
