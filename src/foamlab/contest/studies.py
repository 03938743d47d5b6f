"""The paper's ablations: which settings each compares. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One setting of a study: `value` on its axis, and how that is had."""

    value: str
    optimizer: str = "foam-paper"
    scale: float | None = None
    options: dict[str, Any] = field(default_factory=dict)


def _options(key: str, *values: Any, optimizer: str = "foam-paper") -> list[Case]:
    return [Case(str(value), optimizer, options={key: value}) for value in values]


# study -> (what is varied, its settings; one that names nothing is FOAM as in the paper at the scale of all)
STUDIES: dict[str, tuple[str, list[Case]]] = {
    "residual": ("residual given back to each weight", [Case("on"), *_options("residual", 0.0)]),
    "second-moment": (
        "what the second moment folds",
        [Case("mean_square"), *_options("second_moment", "square_mean")],
    ),
    "level": (
        "fold level: blocks of 2^level",
        [*_options("level", 0, 1), Case("2"), *_options("level", 3, 4, 5, 6, 7, 8, "row")],
    ),
    "alpha": (
        "rate of matrices, relative to lr",
        [Case(f"{x:g}", scale=x) for x in (0.0625, 0.125, 0.25, 0.5, 1.0)],
    ),
    "rho": (
        "share of the residual",
        [*_options("residual", 0.0, 0.25, 0.5, 0.75), Case("1.0"), *_options("residual", 1.5)],
    ),
    "bias-correction": (
        "what the bias correction covers",
        [Case("whole"), *_options("bias_correction", "moments")],
    ),
    "direction": (
        "direction of folding",
        [Case("rows"), *_options("direction", "columns", optimizer="foam-ablation")],
    ),
    "residual-in-v": (
        "share of the residual's square in the second moment",
        [*_options("residual_in_v", 0.0, 0.1, 0.3), Case("1.0")],
    ),
}


def with_own(cases: Sequence[Case], scale: float) -> list[Case]:
    """The cases of a study; in one that varies the scale, that of all others has its place among them."""
    if any(case.scale is None for case in cases) or scale in [case.scale for case in cases]:
        return list(cases)
    return sorted([*cases, Case(f"{scale:g}", scale=scale)], key=lambda case: case.scale or 0)
