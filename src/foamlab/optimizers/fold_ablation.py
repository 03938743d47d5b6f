"""The paper's ablations: which settings each compares, and an optimizer for those that torchfoam does not offer.

`FoldAblation` is plain, slow torch over torchfoam's public fold and unfold. It is for one study only: the direction of
folding is no option of the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchfoam import fold, unfold

DIRECTIONS = ("rows", "columns")


class FoldAblation(Optimizer):
    """The paper's adam rule, folded along either dimension.

        M = (unfold(m) + rho r) / (1 - beta1^t)        V = (unfold(v) + rho^2 r^2) / (1 - beta2^t)

    Args:
        params: groups; one with `level` 0 is AdamW.
        level, scale, residual: as in torchfoam.FOAM.
        direction: "rows" folds along the last dimension, as FOAM; "columns" folds matrices along the first.

    Raises:
        ValueError: an unknown direction.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        level: Any = 2,
        scale: float = 1.0,
        residual: float = 1.0,
        direction: str = "rows",
    ) -> None:
        if direction not in DIRECTIONS:
            raise ValueError(f"unknown direction {direction!r}; known: {', '.join(DIRECTIONS)}")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "level": level, "scale": scale,
            "residual": residual, "direction": direction,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad.float(), group)
        return loss

    def _update(self, p: Tensor, g: Tensor, h: dict[str, Any]) -> None:
        turned = h["direction"] == "columns" and p.ndim > 1
        g = g.mT if turned else g
        level, C = h["level"], g.shape[-1] if g.ndim else 1
        f = fold(g, level)
        state = self.state[p]
        if not state:
            state.update(step=0, m=torch.zeros_like(f), v=torch.zeros_like(f))
        state["step"] += 1
        t, m, v = state["step"], state["m"], state["v"]
        beta1, beta2 = h["betas"]
        first, second = 1 - beta1**t, 1 - beta2**t
        m.lerp_(f, 1 - beta1)
        v.mul_(beta2).add_(fold(g.square(), level), alpha=1 - beta2)
        r = (g - unfold(f, level, C)) * (h["residual"] if level != 0 else 0.0)
        M, V = (unfold(m, level, C) + r) / first, (unfold(v, level, C) + r.square()) / second
        u = M / (V.sqrt() + h["eps"])
        p.mul_(1 - h["lr"] * h["weight_decay"])
        p.sub_((u.mT if turned else u) * (h["lr"] * h["scale"]))


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
