"""The eager backend: opens each parameter's storage, lets `rules.py` do the arithmetic, and closes it again.

Runs wherever torch runs. Arithmetic is float32, or float64 for float64 parameters, whatever the storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..quant import noise_key
from ..rules import MOMENTS, RULES, Hyper
from ..state import close, open_moment

if TYPE_CHECKING:
    from . import Slot


def unavailable() -> str | None:
    return None


def refuses(p: Tensor, group: dict[str, object]) -> str | None:
    return None


def update(slots: Sequence[Slot], h: Hyper, rule: str) -> None:
    """One step of `rule` for every slot, in place."""
    for slot in slots:
        dtype = torch.float64 if slot.p.dtype == torch.float64 else torch.float32
        p = slot.p.to(dtype)
        moments = [open_moment(slot.state, name, dtype) for name in MOMENTS[rule]]
        step = slot.state["step"]
        t: float | Tensor = step  # left on its device: the host must not wait for it, nor can a CUDA graph
        if step.device.type == "cpu":
            t = step.item()
        elif step.is_cuda:
            t = step.double()  # 1 - 0.999 in float32 is off by 1e-5
        count = t.to(torch.int64) if isinstance(t, Tensor) else int(t)
        RULES[rule](p, slot.g.to(dtype), *moments, t, h)
        keyed = {"p": slot.p, **slot.state}
        for stream, (name, x) in enumerate(zip(("p", *MOMENTS[rule]), (p, *moments))):
            narrow = h.stochastic and keyed[name].dtype in (torch.bfloat16, torch.uint8)
            close(keyed, name, x, noise_key(h.seed, count, slot.number, stream) if narrow else None)
