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

from .fold import Level, check_level, fold, row_length, unfold, width
from .shard import Part
from .values import PAIR, RATE, SWITCH, Kind, choice, number, option

SECOND_MOMENTS = ("mean_square", "square_mean")
BIAS_CORRECTIONS = ("moments", "whole")
LR_ADJUSTMENTS = ("original", "match_rms_adamw")

# A mean of squares counts as this at most: infinity, from finite gradients, would hold its block still for good
LARGEST = 2.0**127


@dataclass(frozen=True)
class Hyper:
    """What the equations read of a group's options, the same for every parameter of it."""

    lr: float | Tensor = option(1e-3, RATE)
    betas: tuple[float, float] = option((0.9, 0.999), PAIR, rules=("adam", "mini"))
    eps: float = option(1e-8, number())
    weight_decay: float = option(1e-2, number())
    level: Level = option(2, Kind(lambda name, value: check_level(value)), kept=True, plain=0)
    scale: float = option(1.0, number(), plain=1.0)  # alpha: multiplies lr
    residual: float = option(1.0, number())  # rho: how much of the residual each weight gets back
    second_moment: str = option("mean_square", choice(SECOND_MOMENTS), rules=("adam",), kept=True)
    bias_correction: str = option("moments", choice(BIAS_CORRECTIONS), rules=("adam", "mini"))
    residual_in_v: float = option(0.1, number(), rules=("adam",))  # kappa: how much of the residual's square V gets
    momentum: float = option(0.95, number(below=1), rules=("muon",))
    nesterov: bool = option(True, SWITCH, rules=("muon",))
    adjust_lr: str = option("original", choice(LR_ADJUSTMENTS), rules=("muon",))
    maximize: bool = option(False, SWITCH)

    @property
    def beta1(self) -> float:
        return self.betas[0]

    @property
    def beta2(self) -> float:
        return self.betas[1]


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
    f = _fold(g, h)
    # m <- beta1 m + (1 - beta1) fold(g)
    m.lerp_(f, 1 - h.beta1)
    # v <- beta2 v + (1 - beta2) s(g)
    v.mul_(h.beta2).add_(_square(g, f, h), alpha=1 - h.beta2)
    # M = unfold(m) / (1 - beta1^t) + rho r,   V = unfold(v) / (1 - beta2^t) + kappa rho^2 r^2
    first, second = 1 - h.beta1**t, 1 - h.beta2**t
    M, V = unfold(m, h.level, row_length(p)), unfold(v, h.level, row_length(p))
    if h.bias_correction == "moments":
        M, V = M.div_(first), V.div_(second)
    if _restores(h):
        r = _minus_r(f, g, h).mul_(-h.residual)
        M.add_(r)
        V.addcmul_(r, r, value=h.residual_in_v)
    if h.bias_correction == "whole":
        M, V = M.div_(first), V.div_(second)
    # p <- p - lr weight_decay p
    _decay(p, h)
    # p <- p - lr alpha M / (sqrt(V) + eps)
    p.sub_(M.div_(V.sqrt_().add_(h.eps)).mul_(h.lr * h.scale))


def mini(p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: float | Tensor, h: Hyper) -> None:
    """FOAM with Adam-mini's second moment: one value a row (an output neuron), with no residual in it.

        m <- beta1 m + (1 - beta1) fold(g)
        v <- beta2 v + (1 - beta2) mean(g^2 over the row)
        M  = unfold(m) / (1 - beta1^t) + rho r            r = g - unfold(fold(g))
        V  = v / (1 - beta2^t)
        p <- p - lr weight_decay p
        p <- p - lr alpha M / (sqrt(V) + eps)

    bias_correction="whole" divides M whole, as in `adam`. Shapes: p, g [*lead, C]; m [*lead, W]; v [*lead, 1].
    Source: Zhang et al., Adam-mini, arXiv 2406.16793.
    """
    f = _fold(g, h)
    # m <- beta1 m + (1 - beta1) fold(g)
    m.lerp_(f, 1 - h.beta1)
    # v <- beta2 v + (1 - beta2) mean(g^2)
    v.mul_(h.beta2).add_(fold(g.square(), "row").clamp_(max=LARGEST), alpha=1 - h.beta2)
    # M = unfold(m) / (1 - beta1^t) + rho r,   V = v / (1 - beta2^t)
    first, second = 1 - h.beta1**t, 1 - h.beta2**t
    M, V = unfold(m, h.level, row_length(p)), v.div(second)
    if h.bias_correction == "moments":
        M = M.div_(first)
    if _restores(h):
        M.add_(_minus_r(f, g, h), alpha=-h.residual)
    if h.bias_correction == "whole":
        M = M.div_(first)
    # p <- p - lr weight_decay p
    _decay(p, h)
    # p <- p - lr alpha M / (sqrt(V) + eps)
    p.sub_(M.div_(V.sqrt_().add_(h.eps)).mul_(h.lr * h.scale))


def muon(p: Tensor, g: Tensor, m: Tensor, t: float | Tensor, h: Hyper, part: Part | None = None) -> None:
    """FOAM with Muon: the momentum is folded, the residual re-added, the whole orthogonalised.

        m <- mu m + (1 - mu) fold(g)
        M  = unfold(m) + rho r                            r = g - unfold(fold(g))
        u  = (1 - mu) g + mu M                            or M without nesterov
        p <- p - lr weight_decay p
        p <- p - lr alpha adjust orthogonal(u)            adjust = sqrt(max(1, R / C)) for "original",
                                                          0.2 sqrt(max(R, C)) for "match_rms_adamw"

    At level 0 this is torch.optim.Muon. A 3-D parameter is a stack of matrices (experts); one of more dimensions (a
    convolution) is seen as [first, product of the others]. Of a sharded parameter all are this rank's `part`; u is
    gathered. Shapes: p, g [*lead, C]; m [*lead, W]. Source: torch.optim.Muon (2.13).
    """
    f = _fold(g, h)
    # m <- mu m + (1 - mu) fold(g)
    m.lerp_(f, 1 - h.momentum)
    # M = unfold(m) + rho r
    M = unfold(m, h.level, row_length(p))
    if _restores(h):
        M.add_(_minus_r(f, g, h), alpha=-h.residual)
    # u = (1 - mu) g + mu M  (nesterov)  or  M
    u = (-g if h.maximize else g).lerp(M, h.momentum) if h.nesterov else M
    u = part.gather(u) if part else u
    matrix = u.flatten(1) if u.ndim > 3 else u
    # adjust = sqrt(max(1, R / C))  or  0.2 sqrt(max(R, C))
    R, C = matrix.shape[-2:]
    adjust = max(1.0, R / C) ** 0.5 if h.adjust_lr == "original" else 0.2 * max(R, C) ** 0.5
    # p <- p - lr weight_decay p
    _decay(p, h)
    # p <- p - lr alpha adjust orthogonal(u)
    u, rate = orthogonal(matrix, h.eps).view_as(u), h.lr * h.scale * adjust
    u = part.own(u) if part else u
    if isinstance(rate, Tensor):
        p.sub_(u.to(p.dtype).mul_(rate))
    else:
        p.add_(u, alpha=-rate)  # as torch.optim.Muon adds it, to the bit


def _fold(g: Tensor, h: Hyper) -> Tensor:
    """f = fold(g), [*lead, W]."""
    return fold(g, h.level).mul_(_sign(h))


def _square(g: Tensor, f: Tensor, h: Hyper) -> Tensor:
    """s(g) = fold(g^2) or fold(g)^2, [*lead, W]; f = fold(g)."""
    return (fold(g.square(), h.level) if h.second_moment == "mean_square" else f.square()).clamp_(max=LARGEST)


def _restores(h: Hyper) -> bool:
    """Whether any residual returns: folding leaves something out, and rho is not 0."""
    return h.level != 0 and h.residual != 0


def _minus_r(f: Tensor, g: Tensor, h: Hyper) -> Tensor:
    """-r = unfold(f) - g, full size; f = fold(g)."""
    return unfold(f, h.level, row_length(g)).sub_(g, alpha=_sign(h))


def _sign(h: Hyper) -> int:
    """What g counts for: under `maximize` each g of the equations is -g. A sign saves its full-size copy."""
    return -1 if h.maximize else 1


def _decay(p: Tensor, h: Hyper) -> None:
    """p <- p - lr weight_decay p"""
    if h.weight_decay:
        p.mul_(1 - h.lr * h.weight_decay)


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
