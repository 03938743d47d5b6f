"""APOLLO and APOLLO-Mini (Zhu et al., MLSys 2025, arXiv 2412.05270).

Held against published accounts of the paper's Algorithm 1 (projection, scaling by column or tensor, limiter 1.01, whole
gradient scaled) and the settings in use with the authors' package (a new projection every 200 steps; scale 1 by
channel; rank 1 and scale 128, of which the root is taken, by tensor), not against numbers from their code.

Our own because nothing else serves: the authors' package may not be used commercially, and pytorch_optimizer 4.1
scales the *projected* gradient and projects it back, so that its updates have rank r, where the paper scales the whole
gradient. Here the projection is drawn anew from a seed in each step, as the paper counts it, not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

SCALINGS = ("channel", "tensor")


class Apollo(Optimizer):
    """Adam's step sizes by channel or tensor, learned on a random projection of the gradient.

        G [n, k], n <= k (turned where it is tall);  P [r, n] with entries N(0, 1/r), new every `gap` steps;  Q = P G
        m, v, q = Adam's moments and update of Q, each [r, k]
        s = |q_j| / |Q_j| for each column j ("channel"), or |q| / |Q| ("tensor")
        U = scale * G s, shrunk to at most `growth` times the norm of the last U
        p <- p - lr (U + weight_decay p)

    Args:
        params: matrices only.
        rank: r; never more than n.
        scale: alpha, the paper's gradient scale factor: 1 for APOLLO, sqrt(128) for rank 1.
        scaling: "channel" (APOLLO) or "tensor" (APOLLO-Mini).
        gap: steps between projections.
        growth: gamma, the norm-growth limiter.
        seed: of the projections.

    Raises:
        ValueError: a parameter that is no matrix, or an option that makes no sense.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rank: int = 128,
        scale: float = 1.0,
        scaling: str = "channel",
        gap: int = 200,
        growth: float = 1.01,
        seed: int = 0,
    ) -> None:
        if rank < 1 or gap < 1 or growth <= 0 or scale < 0 or lr < 0:
            raise ValueError(
                f"rank and gap must be at least 1, growth above 0, scale and lr not below; "
                f"got rank {rank}, gap {gap}, growth {growth}, scale {scale}, lr {lr}"
            )
        if scaling not in SCALINGS:
            raise ValueError(f"unknown scaling {scaling!r}; known: {', '.join(SCALINGS)}")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": rank, "scale": scale,
            "scaling": scaling, "gap": gap, "growth": growth, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults)
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"APOLLO projects matrices only, got a parameter of shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, (p, group) in enumerate((p, g) for g in self.param_groups for p in g["params"]):
            if p.grad is not None:
                self._update(p, p.grad.float(), number, group)
        return loss

    def _update(self, p: Tensor, g: Tensor, number: int, h: dict[str, Any]) -> None:
        G = g.mT if g.shape[0] > g.shape[1] else g
        n, k = G.shape
        r = min(h["rank"], n)
        state = self.state[p]
        if not state:
            state.update(step=0, m=G.new_zeros(r, k), v=G.new_zeros(r, k), norm=G.new_zeros(()))
        state["step"] += 1
        t, m, v, last = state["step"], state["m"], state["v"], state["norm"]
        beta1, beta2 = h["betas"]
        Q = projection(r, n, G, (h["seed"] * 1_000_003 + number) * 1_000_003 + t // h["gap"]) @ G
        m.lerp_(Q, 1 - beta1)
        v.mul_(beta2).addcmul_(Q, Q, value=1 - beta2)
        q = (m / (1 - beta1**t)).div_((v / (1 - beta2**t)).sqrt_().add_(h["eps"]))
        dim = 0 if h["scaling"] == "channel" else (0, 1)
        s = torch.linalg.vector_norm(q, dim=dim) / (torch.linalg.vector_norm(Q, dim=dim) + 1e-8)
        U = G * (s * h["scale"])
        norm = torch.linalg.vector_norm(U)
        # |U| <= growth |last U|, except in the first step
        limit = torch.where(last > 0, (h["growth"] * last / norm.clamp(min=1e-30)).clamp(max=1), 1.0)
        last.copy_(norm * limit)
        p.mul_(1 - h["lr"] * h["weight_decay"])
        p.sub_((U.mT if G is not g else U).mul(limit * h["lr"]))


def projection(r: int, n: int, like: Tensor, seed: int) -> Tensor:
    """P [r, n], entries N(0, 1/r), a pure function of shape and seed on each kind of device."""
    draw = None if like.is_meta else torch.Generator(like.device).manual_seed(seed % 2**63)
    return torch.randn(r, n, generator=draw, device=like.device, dtype=like.dtype).div_(r**0.5)
