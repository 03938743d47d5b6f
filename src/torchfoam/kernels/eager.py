"""The eager backend: opens each parameter's storage, lets `rules.py` do the arithmetic, and closes it again.

Runs wherever torch runs. Arithmetic is float32, or float64 for float64 parameters, whatever the storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..memory import imagined
from ..options import Options, hyper
from ..quant import First, noise_key
from ..rules import MOMENTS, RULES, moment_width
from ..state import close, new_state, open_moment
from .backend import Slot

# Entries of a parameter that are opened at once: codes and their noise take some 45 bytes an entry meanwhile. On a GPU
# slabs must be large, or launching them takes longer than the work.
SLAB = {"cpu": 1 << 18, "gpu": 1 << 22}


def unavailable() -> str | None:
    return None


def refuses(p: Tensor, group: Mapping[str, Any]) -> str | None:
    return None


def wrapper(p: Tensor, group: Mapping[str, Any]) -> str | None:
    if imagined(p):
        return None
    kind = (type(p), p.dtype, p.ndim, group["rule"], group["level"], group["state"])
    if kind not in _tried:
        _tried[kind] = _trial(p, group)
    return _tried[kind]


# kind of wrapper and group -> why it cannot be stepped, or None
_tried: dict[tuple[Any, ...], str | None] = {}


def _trial(p: Tensor, group: Mapping[str, Any]) -> str | None:
    """What goes wrong when a copy of p, a wrapper with arithmetic of its own, takes a step; None if it moves."""
    with torch.no_grad():
        try:
            q = p.detach().clone()
            state = new_state(p, group)
            state["step"] += 1
            h = replace(hyper(group), lr=1.0, scale=1.0)
            _step(Slot(q, torch.ones(q.shape, dtype=q.dtype, device=q.device), state, 0), 0, h)
            return None if bool((q.to(torch.float32) != p.to(torch.float32)).any()) else "its weights do not move"
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"torch does not know the arithmetic ({lines[0]:.200})"


def update(slots: Sequence[Slot], h: Options) -> None:
    """One step for every slot, in place."""
    for slot in slots:
        for part, row in parts(slot, h.rule):
            _step(part, row, h)


def parts(slot: Slot, rule: str) -> Iterator[tuple[Slot, int]]:
    """The slot in slabs of rows, each with its first row: what is opened at once stays small, and no bit changes.

    Muon needs the whole matrix; tensors with gaps are not cut.
    """
    p = slot.p
    kept = {name: x for name, x in slot.state.items() if name != "step"}
    plain = type(p) in (Tensor, torch.nn.Parameter) and all(x.is_contiguous() for x in (p, slot.g, *kept.values()))
    rows = slab_rows(p, rule, p.device) if plain else 0
    if not rows:
        yield slot, 0
        return
    flat = [x.flatten(0, -2).split(rows) for x in (p, slot.g, *kept.values())]
    for k, (q, g, *moments) in enumerate(zip(*flat, strict=True)):
        yield slot._replace(p=q, g=g, state={"step": slot.state["step"], **dict(zip(kept, moments))}), k * rows


def slab_rows(p: Tensor, rule: str, device: torch.device) -> int:
    """How many rows of p are opened at once on that device; 0 where it is not cut."""
    most = SLAB["cpu" if device.type == "cpu" else "gpu"]
    return 0 if p.ndim < 2 or p.numel() <= most or rule == "muon" else max(most // p.shape[-1], 1)


def slab(p: Tensor, rule: str, device: torch.device) -> tuple[int, ...]:
    """The shape that is opened at once of p and of a gradient like it."""
    rows = slab_rows(p, rule, device) if p.is_contiguous() else 0
    return (rows, p.shape[-1]) if rows else tuple(p.shape)


def _step(slot: Slot, row: int, h: Options) -> None:
    dtype = torch.float64 if slot.p.dtype == torch.float64 else torch.float32
    p = slot.p.to(dtype)
    moments = [open_moment(slot.state, name, dtype) for name in MOMENTS[h.rule]]
    step = slot.state["step"]
    t: float | Tensor = step  # left on its device: the host must not wait for it, nor can a CUDA graph
    if step.device.type == "cpu":
        t = step.item()
    elif step.is_cuda:
        t = step.double()  # 1 - 0.999 in float32 is off by 1e-5
    count = step.to(torch.int64) if isinstance(t, Tensor) else int(t)
    gathers = [slot.part] if slot.part and slot.part.matrix else []
    RULES[h.rule](p, slot.g.to(dtype), *moments, t, h, *gathers)
    keyed = {"p": slot.p, **slot.state}
    for stream, (name, x) in enumerate(zip(("p", *MOMENTS[h.rule]), (p, *moments))):
        narrow = h.stochastic and keyed[name].dtype in (torch.bfloat16, torch.uint8)
        key = noise_key(h.seed, count, slot.number, stream) if narrow else None
        close(keyed, name, x, key, first=_first(slot, name, row, h) if narrow else 0)


def _first(slot: Slot, name: str, row: int, h: Options) -> First:
    """The numbers of the elements of p or a moment in the whole parameter, from `row` of what is here on."""
    x = slot.p if name == "p" else slot.state[name]
    if slot.part is None:
        return row * x.shape[-1] if row else 0
    C = slot.part.row_length
    rows = x.numel() // max(x.shape[-1], 1) if x.ndim else 1
    return slot.part.first(C if name == "p" else moment_width(h.rule, name, h.level, C))[row : row + rows]
