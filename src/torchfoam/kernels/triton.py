"""The Triton backend: the adam rule fused for GPUs, many tensors a launch.

This room decides what is launched; `triton_adam.py` is what runs. Tensors of equal dtypes, block length and alignment
share one launch, so the number of launches does not grow with the number of parameters. The kernels read addresses
and sizes from a table on the device, which is written again only when an address changes (a gradient that moved).

Bytes moved for one weight: p read and written, g read, m and v read and written once per block. Blocks of more than
`LONGEST` entries do not fit in registers: g is then read twice, the second time from cache while the blocks in flight
fit there. One block is one program's work: a few enormous blocks leave most of a GPU idle.

CUDA graphs: with `capturable=True` the step count, and a tensor `lr`, are read on the device and nothing waits for it.
As for every captured optimizer, perform one step before capture: kernels are compiled and loaded then.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from ctypes import c_float
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..fold import Level, block, row_length
from ..options import Options
from ..quant import mix
from ..state import moment_dtype
from .backend import Slot
from .sharded import Run, runs

TILE = 2048  # entries a program holds, where a block is not longer
LONGEST = 16384  # the longest block held in registers
STRIDE = 8192  # entries of a longer block that are worked on at once
FIELDS = 14  # of the table; see triton_adam.py
FAR = 2**62  # "first program" of the table's unused columns
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Launch:
    """One kernel call: which kernel, over how many programs, with what fixed arguments."""

    long: bool
    programs: int
    table: Tensor
    options: dict[str, Any]


@dataclass
class Plan:
    """The launches of one batch of slots, and what they hold of it by address."""

    signature: tuple[Any, ...]
    launches: list[Launch]
    host: Tensor  # what the device's tables were copied from; a captured copy reads it at every replay
    spare: Tensor | None = None  # pinned, for the next capture: pinning memory is not allowed inside one


@dataclass
class Plans:
    """What is kept for the parameter that leads a batch."""

    latest: Plan | None = None
    captured: list[Plan] = field(default_factory=list)  # CUDA graphs hold their addresses


# leading parameter -> its plans; entries leave with the parameter
_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()


def interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def unavailable() -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton (Linux)"
    if not (interpreted() or torch.cuda.is_available()):
        return "torch finds no CUDA device"
    return None


def refuses(p: Tensor, group: Mapping[str, Any]) -> str | None:
    if group["rule"] != "adam":
        return f"it has no rule {group['rule']!r}, only 'adam'"
    if p.dtype not in DTYPES:
        return f"it takes float32, bfloat16 and float16 parameters, not {p.dtype}"
    if moment_dtype(p, group["state"]) not in DTYPES:
        return f"it keeps float32, bfloat16 and float16 moments, not state={group['state']!r}"
    if not (p.is_cuda or (interpreted() and p.device.type == "cpu")):
        return f"it runs on CUDA devices, the parameter is on {p.device}"
    if not p.is_contiguous():
        return f"the parameter of shape {tuple(p.shape)} is not contiguous in memory"
    return None


def update(slots: Sequence[Slot], h: Options) -> None:
    """One step of the adam rule for every slot, in place: a launch per kind of tensor, device and step count."""
    batches: dict[Any, list[Slot]] = {}
    for slot in slots:
        step = slot.state["step"]
        if not slot.g.is_contiguous():
            slot = slot._replace(g=slot.g.contiguous())
        batches.setdefault((slot.p.device, None if on_device(step) else int(step)), []).append(slot)
    for (device, t), batch in batches.items():
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            launch(plan(batch, h.level), t, h)


def on_device(step: Tensor) -> bool:
    """Whether kernels must read this scalar themselves, because the host would have to wait for it."""
    return step.is_cuda


def launch(todo: Plan, t: int | None, h: Options) -> None:
    """Start the kernels of a plan; `t` None means that each tensor's step count is read on the device."""
    from .triton_adam import adam_long, adam_tile

    lr_tensor = isinstance(h.lr, Tensor) and on_device(h.lr)
    scalars = [
        h.lr if lr_tensor else float(h.lr),
        t or 0,
        c_int32(mix(h.seed)),
        *(1.0 if t is None else 1 - beta**t for beta in (h.beta1, h.beta2)),
        *log_pair(h.beta1),
        *log_pair(h.beta2),
        *(float(x) for x in (h.beta1, 1 - h.beta1, h.beta2, 1 - h.beta2)),
        *(float(x) for x in (h.eps, h.weight_decay, h.scale, h.residual, h.residual_in_v)),
    ]
    flags = {
        "MAXIMIZE": h.maximize,
        "SQUARE_MEAN": h.second_moment == "square_mean",
        "WHOLE": h.bias_correction == "whole",
        "STOCHASTIC": h.stochastic,
        "STEP_TENSOR": t is None,
        "LR_TENSOR": lr_tensor,
    }
    for x in todo.launches:
        kernel = adam_long if x.long else adam_tile
        kernel[(x.programs,)](x.table, *scalars, **x.options, **flags, enable_fp_fusion=True)


def plan(slots: Sequence[Slot], level: Level) -> Plan:
    """The launches of these slots: the latest ones again if no address has changed, else new ones."""
    plans = _plans.setdefault(slots[0].p, Plans())
    signature = (level, *(_signature(s) for s in slots))
    capturing = slots[0].p.is_cuda and torch.cuda.is_current_stream_capturing()
    found = plans.latest if plans.latest is not None and plans.latest.signature == signature else None
    if found is None:
        spare = plans.latest.spare if capturing and plans.latest is not None else None
        found = build(slots, level, signature, spare)
        if capturing:  # its table is written when the graph is replayed, so it serves no other step
            if plans.latest is not None:
                plans.latest.spare = None
        else:
            plans.latest = found
    if capturing and not any(found is kept for kept in plans.captured):
        plans.captured.append(found)
    return found


def _signature(s: Slot) -> tuple[Any, ...]:
    m, v, step = s.state["m"], s.state["v"], s.state["step"]
    places = (s.p.data_ptr(), s.g.data_ptr(), m.data_ptr(), v.data_ptr(), step.data_ptr(), s.number)
    return (*places, s.p.shape, s.p.dtype, s.g.dtype, m.dtype, s.part)


def build(slots: Sequence[Slot], level: Level, signature: tuple[Any, ...], spare: Tensor | None) -> Plan:
    """Sort slots into launches and put their tables on the device, in one copy."""
    kinds: dict[tuple[Any, ...], list[list[int]]] = {}
    programs: dict[tuple[Any, ...], int] = {}
    for piece, run in chain.from_iterable(pieces(slot, level) for slot in slots):
        kind, more, columns = describe(piece, level, run)
        first = programs.get(kind, 0)
        kinds.setdefault(kind, []).append([first, *columns])
        programs[kind] = first + more
    tables, made = [], []
    for kind, rows in kinds.items():
        long, K, BP, flat, aligned, *dtypes = kind
        size = 1 << (len(rows) - 1).bit_length()
        rows += [[FAR] + [0] * (FIELDS - 1)] * (size - len(rows))
        tables.append([x for column in zip(*rows) for x in column])
        options = {"SLOTS": size, "K": K, "BP": BP, "FLAT": flat, "ALIGNED": aligned, "num_warps": warps(K * BP)}
        options |= {name: _triton_dtype(dtype) for name, dtype in zip("PGS", dtypes)}
        made.append((long, programs[kind], options))
    device = slots[0].p.device
    values = torch.tensor([x for table in tables for x in table], dtype=torch.int64)
    if device.type == "cuda":
        fits = spare is not None and spare.numel() == values.numel()
        host = spare if fits and spare is not None else torch.empty_like(values, pin_memory=True)
        host.copy_(values)
        where = host.to(device, non_blocking=True)
        spare = torch.empty_like(values, pin_memory=True) if on_device(slots[0].state["step"]) and not fits else None
    else:
        host = where = values
    parts = where.split([len(table) for table in tables])
    return Plan(signature, [Launch(long, n, part, o) for (long, n, o), part in zip(made, parts)], host, spare)


def pieces(slot: Slot, level: Level) -> Iterator[tuple[Slot, Run]]:
    """A slot as tensors whose rows follow each other in the whole parameter."""
    several = runs(slot, level)
    if len(several) == 1:
        yield slot, several[0]
        return
    p, g, *moments = (x.flatten(0, -2) for x in (slot.p, slot.g, slot.state["m"], slot.state["v"]))
    for run in several:
        here = slice(run.row, run.row + run.rows)
        state = {**slot.state, "m": moments[0][here], "v": moments[1][here]}
        yield slot._replace(p=p[here], g=g[here], state=state), run


def describe(slot: Slot, level: Level, run: Run) -> tuple[tuple[Any, ...], int, list[int]]:
    """The kind of launch that fits a tensor (long, K, BP, flat, aligned, dtypes), its programs, its table fields."""
    p, g, m, v = slot.p, slot.g, slot.state["m"], slot.state["v"]
    C = row_length(p)
    B = block(level, C)
    BP = 1 << (B - 1).bit_length()
    long = BP > LONGEST
    flat = BP == B and C % B == 0 and run.columns == C
    R, C = (1, p.numel()) if flat else (p.numel() // C, C)
    W = -(-C // B)
    K = 1 if long else min(max(TILE // BP, 1), 1 << (W - 1).bit_length())
    if not (m.numel() == v.numel() == R * W and m.dtype == v.dtype and g.numel() == p.numel()) or not all(
        x.device == p.device and x.is_contiguous() and x.dtype in DTYPES for x in (p, g, m, v)
    ):
        raise ValueError(
            f"cannot step {tuple(p.shape)} on {p.device} at level {level!r} with a gradient of {tuple(g.shape)} on "
            f"{g.device} and moments of {tuple(m.shape)} {m.dtype} and {tuple(v.shape)} {v.dtype} on {m.device}"
        )
    places = [p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr()]
    aligned = (C | B * long) % 16 == 0 and not any(x % 16 for x in places)
    kind = (long, K, STRIDE if long else BP, flat, aligned, p.dtype, g.dtype, m.dtype)
    step = slot.state["step"]
    address = step.data_ptr() if on_device(step) else 0
    numbers = [run.first, run.columns, run.first_moment, run.width]
    return kind, R * -(-W // K), [*places, address, slot.number, C, W, B, *numbers]


def warps(entries: int) -> int:
    """Warps of a program: 16 entries a thread, as far as that goes."""
    return min(max(entries // 512, 4), 32)


def _triton_dtype(dtype: torch.dtype) -> Any:
    from triton import language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def c_int32(x: int) -> int:
    """The same 32 bits as a signed number."""
    return x - 2**32 if x >= 2**31 else x


def log_pair(beta: float) -> tuple[float, float]:
    """log(beta) as two float32 numbers, exact to 48 bits; -800 stands for log 0."""
    x = math.log(beta) if beta else -800.0
    return c_float(x).value, x - c_float(x).value
