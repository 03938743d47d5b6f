"""The eager backend: opens each parameter's storage, lets `rules.py` do the arithmetic, and closes it again.

Runs wherever torch runs. Arithmetic is float32, or float64 for float64 parameters, whatever the storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..quant import noise_key, round_stochastic
from ..rules import MOMENTS, RULES, Hyper

if TYPE_CHECKING:
    from . import Slot


def unavailable() -> str | None:
    return None


def refuses(p: Tensor, group: dict[str, object]) -> str | None:
    return None


def close(kept: Tensor, x: Tensor, slot: Slot, stream: int, h: Hyper) -> None:
    """Write the computed x back to where it is kept; bfloat16 is rounded stochastically if the group says so."""
    if x is kept:
        return
    if h.stochastic and kept.dtype == torch.bfloat16:
        x = round_stochastic(x, noise_key(h.seed, int(slot.state["step"]), slot.number, stream))
    kept.copy_(x)


def update(slots: Sequence[Slot], h: Hyper, rule: str) -> None:
    """One step of `rule` for every slot, in place."""
    for slot in slots:
        dtype = torch.float64 if slot.p.dtype == torch.float64 else torch.float32
        p = slot.p.to(dtype)
        moments = [slot.state[name].to(dtype) for name in MOMENTS[rule]]
        step = slot.state["step"]
        t = step.item() if step.device.type == "cpu" else step
        RULES[rule](p, slot.g.to(dtype), *moments, t, h)
        close(slot.p, p, slot, 0, h)
        for stream, (name, x) in enumerate(zip(MOMENTS[rule], moments), 1):
            close(slot.state[name], x, slot, stream, h)
