"""An optimizer for those of the paper's ablations that torchfoam does not offer.

It is plain, slow torch over torchfoam's public fold and unfold. It is for one study only: the direction of
folding is no option of the library.
"""

from __future__ import annotations

from collections.abc import Callable
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
