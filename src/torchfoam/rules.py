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

import torch
from torch import Tensor

from .fold import Level, fold, unfold, width

SECOND_MOMENTS = ("mean_square", "square_mean")
BIAS_CORRECTIONS = ("moments", "whole")
LR_ADJUSTMENTS = ("original", "match_rms_adamw")

# A mean of squares counts as this at most: infinity, from finite gradients, would hold its block still for good
LARGEST = 2.0**127


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
    bias_correction: str = "moments"  # what it covers: the averages, or M and V whole
    residual_in_v: float = 0.1  # kappa: how much of the residual's square V gets
    maximize: bool = False
    stochastic: bool = True  # rounding of bfloat16 and 8-bit storage; see quant.py
    seed: int = 0
    momentum: float = 0.95  # muon only, as are the next two
    nesterov: bool = True
    adjust_lr: str = "original"


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: float | Tensor, h: Hyper) -> None:
    """One step of FOAM; at level 0 and scale 1 it is torch.optim.AdamW.

        m <- beta1 m + (1 - beta1) fold(g)
        v <- beta2 v + (1 - beta2) s(g)                   s(g) = fold(g^2), or fold(g)^2 for "square_mean"
        M  = unfold(m) / (1 - beta1^t) + rho r            r = g - unfold(fold(g))
        V  = unfold(v) / (1 - beta2^t) + kappa rho^2 r^2
        p <- p - lr weight_decay p
        p <- p - lr alpha M / (sqrt(V) + eps)

    bias_correction="whole", as in the paper, divides M and V whole: (unfold(m) + rho r) / (1 - beta1^t), and V alike.
    Shapes: p, g [*lead, C]; m, v [*lead, W]. `t` is 1 at the first step. At most three full-size temporaries.
    """
    C = p.shape[-1] if p.ndim else 1
    sign = -1 if h.maximize else 1
    f = fold(g, h.level).mul_(sign)
    # m <- beta1 m + (1 - beta1) fold(g)
    m.lerp_(f, 1 - h.beta1)
    # v <- beta2 v + (1 - beta2) s(g)
    mean_square = h.second_moment == "mean_square"
    s = (fold(g.square(), h.level) if mean_square else f.square()).clamp_(max=LARGEST)
    v.mul_(h.beta2).add_(s, alpha=1 - h.beta2)
    del s
    # M = unfold(m) / (1 - beta1^t) + rho r,   V = unfold(v) / (1 - beta2^t) + kappa rho^2 r^2
    first, second = 1 - h.beta1**t, 1 - h.beta2**t
    M, V = unfold(m, h.level, C), unfold(v, h.level, C)
    if h.bias_correction == "moments":
        M, V = M.div_(first), V.div_(second)
    if h.level != 0 and h.residual:
        r = unfold(f, h.level, C).sub_(g, alpha=sign).mul_(-h.residual)
        M.add_(r)
        V.addcmul_(r, r, value=h.residual_in_v)
    if h.bias_correction == "whole":
        M, V = M.div_(first), V.div_(second)
    # p <- p - lr weight_decay p
    if h.weight_decay:
        p.mul_(1 - h.lr * h.weight_decay)
    # p <- p - lr alpha M / (sqrt(V) + eps)
    p.sub_(M.div_(V.sqrt_().add_(h.eps)).mul_(h.lr * h.scale))


def mini(p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: float | Tensor, h: Hyper) -> None:
    """FOAM with Adam-mini's second moment: one value a row (an output neuron), with no residual in it.

        m <- beta1 m + (1 - beta1) fold(g)
        v <- beta2 v + (1 - beta2) mean(g^2 over the row)
        M  = unfold(m) / (1 - beta1^t) + rho r            or (unfold(m) + rho r) / (1 - beta1^t), as in `adam`
        p <- p - lr weight_decay p
        p <- p - lr alpha M / (sqrt(v / (1 - beta2^t)) + eps)

    Shapes: p, g [*lead, C]; m [*lead, W]; v [*lead, 1]. Source: Zhang et al., Adam-mini, arXiv 2406.16793.
    """
    if h.maximize:
        g = -g
    f = fold(g, h.level)
    # m <- beta1 m + (1 - beta1) fold(g)
    m.lerp_(f, 1 - h.beta1)
    # v <- beta2 v + (1 - beta2) mean(g^2)
    v.mul_(h.beta2).add_(fold(g.square(), "row").clamp_(max=LARGEST), alpha=1 - h.beta2)
    first = 1 - h.beta1**t
    M = _restored(m, f, g, h).div_(first) if h.bias_correction == "whole" else _restored(m / first, f, g, h)
    if h.weight_decay:
        p.mul_(1 - h.lr * h.weight_decay)
    # p <- p - lr alpha M / (sqrt(v / (1 - beta2^t)) + eps)
    V = v.div(1 - h.beta2**t).sqrt_().add_(h.eps)
    p.sub_(M.div_(V).mul_(h.lr * h.scale))


def muon(p: Tensor, g: Tensor, m: Tensor, t: float | Tensor, h: Hyper) -> None:
    """FOAM with Muon: the momentum is folded, the residual re-added, the whole orthogonalised.

        m <- mu m + (1 - mu) fold(g)
        M  = unfold(m) + rho r;   u = (1 - mu) g + mu M  (nesterov)  or  M
        p <- p - lr weight_decay p
        p <- p - lr alpha adjust(R, C) orthogonal(u)

    adjust is sqrt(max(1, R / C)) ("original") or 0.2 sqrt(max(R, C)) ("match_rms_adamw"). At level 0 this is
    torch.optim.Muon. A 3-D parameter is a stack of matrices (experts); one of more dimensions (a convolution) is seen
    as [first, product of the others]. Shapes: p, g [*lead, C]; m [*lead, W]. Source: torch.optim.Muon (2.13).
    """
    if h.maximize:
        g = -g
    f = fold(g, h.level)
    # m <- mu m + (1 - mu) fold(g)
    m.lerp_(f, 1 - h.momentum)
    M = _restored(m, f, g, h)
    u = g.lerp(M, h.momentum) if h.nesterov else M
    if u.ndim > 3:
        u = u.flatten(1)
    R, C = u.shape[-2:]
    adjust = max(1.0, R / C) ** 0.5 if h.adjust_lr == "original" else 0.2 * max(R, C) ** 0.5
    if h.weight_decay:
        p.mul_(1 - h.lr * h.weight_decay)
    u, rate = orthogonal(u, h.eps).view_as(p), h.lr * h.scale * adjust
    if isinstance(rate, Tensor):
        p.sub_(u.to(p.dtype).mul_(rate))
    else:
        p.add_(u, alpha=-rate)  # as torch.optim.Muon adds it, to the bit


def _restored(m: Tensor, f: Tensor, g: Tensor, h: Hyper) -> Tensor:
    """M = unfold(m) + rho r, full size; f = fold(g)."""
    C = g.shape[-1] if g.ndim else 1
    M = unfold(m, h.level, C)
    if h.level != 0 and h.residual:
        M.add_(unfold(f, h.level, C).sub_(g), alpha=-h.residual)
    return M


def orthogonal(u: Tensor, eps: float) -> Tensor:
    """U V^T of u = U S V^T, roughly (singular values end in 0.7 to 1.2): [..., R, C] -> bfloat16 [..., R, C].

    Five quintic Newton-Schulz steps X <- a X + (b A + c A^2) X, A = X X^T, in bfloat16. Source: K. Jordan, Muon (2024);
    same coefficients as torch.optim.Muon.
    """
    a, b, c = 3.4445, -4.775, 2.0315
    tall = u.shape[-2] > u.shape[-1]
    gemm = torch.addmm if u.ndim == 2 else torch.baddbmm
    X = u.bfloat16()
    X = X.mT if tall else X
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(5):
        A = X @ X.mT
        X = gemm(X, gemm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


RULES: dict[str, Callable[..., Any]] = {"adam": adam, "mini": mini, "muon": muon}
# the moments each rule keeps besides the step count; m is signed, v is not
MOMENTS: dict[str, tuple[str, ...]] = {"adam": ("m", "v"), "mini": ("m", "v"), "muon": ("m",)}


def moment_width(rule: str, name: str, level: Level, columns: int) -> int:
    """Columns of a rule's moment: W = ceil(C / B), but one for the v of "mini"."""
    return 1 if (rule, name) == ("mini", "v") else width(level, columns)
