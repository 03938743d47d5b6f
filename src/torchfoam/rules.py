"""The heart: the update rules in plain torch, as the paper writes them. In float64 they are the truth.

Every rule changes p and its moments in place and returns nothing. All tensors of one call share one floating dtype
(float64 or float32) and one device: opening narrower storage is the backend's work (`kernels/eager.py`), which
holds for every other backend too. Nothing here knows of optimizers, groups or storage.

Letters: see `fold.py`. Source: Wen et al., ICML 2026, arXiv 2512.07112; the choices are argued in docs/algorithm.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .fold import Level, fold, unfold

SECOND_MOMENTS = ("mean_square", "square_mean")


@dataclass(frozen=True)
class Hyper:
    """The scalars of one step, the same for every parameter of a group."""

    lr: float | Tensor
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    level: Level = 2
    scale: float = 1.0  # alpha: multiplies lr
    residual: float = 1.0  # rho: how much of the residual each weight gets back
    second_moment: str = "mean_square"
    maximize: bool = False
    stochastic: bool = True  # rounding of bfloat16 storage; see quant.py
    seed: int = 0


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: float | Tensor, h: Hyper) -> None:
    """One step of FOAM; at level 0 and scale 1 it is torch.optim.AdamW.

        m <- beta1 m + (1 - beta1) fold(g)
        v <- beta2 v + (1 - beta2) fold(g^2)              second_moment="mean_square"; fold(g)^2 for "square_mean"
        M  = unfold(m) + rho r,   V = unfold(v) + rho^2 r^2,   r = g - unfold(fold(g))
        p <- p - lr weight_decay p
        p <- p - lr alpha (M / (1 - beta1^t)) / (sqrt(V / (1 - beta2^t)) + eps)

    Shapes: p, g [*lead, C]; m, v [*lead, W]. `t` is 1 at the first step. At most three full-size temporaries.
    """
    C = p.shape[-1] if p.ndim else 1
    if h.maximize:
        g = -g
    f = fold(g, h.level)
    # m <- beta1 m + (1 - beta1) fold(g)
    m.lerp_(f, 1 - h.beta1)
    # v <- beta2 v + (1 - beta2) s(g)
    s = fold(g.square(), h.level) if h.second_moment == "mean_square" else f.square()
    v.mul_(h.beta2).add_(s, alpha=1 - h.beta2)
    M, V = unfold(m, h.level, C), unfold(v, h.level, C)
    if h.level != 0 and h.residual:
        # M = unfold(m) + rho r,  V = unfold(v) + rho^2 r^2
        r = unfold(f, h.level, C).sub_(g).neg_().mul_(h.residual)
        M.add_(r)
        V.addcmul_(r, r)
    # p <- p - lr weight_decay p
    if h.weight_decay:
        p.mul_(1 - h.lr * h.weight_decay)
    # p <- p - lr alpha (M / (1 - beta1^t)) / (sqrt(V / (1 - beta2^t)) + eps)
    V.div_(1 - h.beta2**t).sqrt_().add_(h.eps)
    p.sub_(M.div_(V).mul_(h.lr * h.scale / (1 - h.beta1**t)))


RULES: dict[str, Callable[..., Any]] = {"adam": adam}
# the moments each rule keeps besides the step count
MOMENTS: dict[str, tuple[str, ...]] = {"adam": ("m", "v")}
