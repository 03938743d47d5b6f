"""What is kept of a parameter between steps: which tensors, of which shape and dtype, and how they open and close.

Every state but `step` has the parameter's own dim 0, so a state is sharded as its parameter is: a DTensor of a DTensor,
which opens and closes on this rank's part (`locals_of`). The arithmetic is
`rules.py`'s, the codes are `quant.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .fold import block, row_length, width
from .quant import GROUP, First, Key, decode, encode, round_stochastic
from .rules import MOMENTS, moment_width
from .shard import Part, is_sharded, local, locals_of, part, sharded

STATES = ("float32", "bfloat16", "int8", "param")


def new_state(p: Tensor, group: Mapping[str, Any], device: str | None = None) -> dict[str, Tensor]:
    """Zero state of one parameter: `step` [] int32; the rule's moments [*lead, W]; for 8-bit codes (uint8) also their
    exponents, uint8 [*lead, ceil(W / 32)]. Dim 0 of all but `step` is the parameter's own."""
    where = device or p.device
    step_device = where if group["capturable"] else device or "cpu"
    state = {"step": torch.zeros((), dtype=torch.int32, device=step_device)}
    dtype = moment_dtype(p, group["state"])
    C, mine = row_length(p), part_of(p, group) if device is None else None

    def zeros(W: int) -> Tensor:
        if mine:
            return mine.zeros(W, dtype, where)
        return torch.zeros((*p.shape[:-1], W) if p.ndim else (), dtype=dtype, device=where)

    for name in MOMENTS[group["rule"]]:
        W = moment_width(group["rule"], name, group["level"], C)
        state[name] = zeros(W)
        if dtype == torch.uint8:
            state[f"{name}_exponent"] = zeros(-(-W // GROUP))
    return state


def part_of(p: Tensor, group: Mapping[str, Any]) -> Part | None:
    """What this rank holds of p and of its moments; None of a whole p.

    A row can be cut between blocks, between groups of 32 blocks where these share an exponent, and not at all where a
    moment is the whole row's."""
    if not is_sharded(p):
        return None
    rule, level, C = group["rule"], group["level"], row_length(p)
    unit = block(level, C) * (GROUP if moment_dtype(p, group["state"]) == torch.uint8 else 1)
    if any(moment_width(rule, name, level, C) != width(level, C) for name in MOMENTS[rule]):
        unit = C
    return part(p, unit, matrix=rule == "muon")


def follow(p: Tensor, kept: dict[str, Tensor], group: Mapping[str, Any]) -> dict[str, Tensor]:
    """`kept` as it must be now that p may have been moved or recast: itself where nothing of it changes.

    Moments of float64 weights are float64 and those of `state="param"` are as the weights, so they are recast with
    them, to nearest. What was on the meta device holds nothing: {}.
    """
    m, step, dtype = kept["m"], kept["step"], moment_dtype(p, group["state"])
    home = p.device if group["capturable"] else step.device
    if m.device == p.device and m.dtype == dtype and step.device == home:
        return kept
    if local(m).is_meta and not local(p).is_meta:
        return {}
    moved = {name: x.to(p.device) for name, x in kept.items()} | {"step": step.to(home)}
    if m.dtype == dtype or not (group["state"] == "param" or torch.float64 in (m.dtype, dtype)):
        return moved
    new = {**new_state(p, group), "step": moved["step"]}
    for name in MOMENTS[group["rule"]]:
        if name not in kept or kept[name].shape != new[name].shape:
            return moved  # that the group's options have changed is `check_kept`'s to say
        wide = open_moment(locals_of(moved), name, torch.promote_types(p.dtype, torch.float32))
        close(locals_of(new), name, wide, key=None)
    return new


def fits(p: Tensor, kept: Mapping[str, Tensor], group: Mapping[str, Any], wanted: dict[tuple[Any, ...], Any]) -> bool:
    """Whether `kept` is what p and its group now ask for. `wanted` is the caller's, empty at first: what each moment's
    width and dtype should be, worked out once a group for all p alike."""
    C = row_length(p)
    if (want := wanted.get((C, p.dtype, p.ndim > 1))) is None:
        rule, level = group["rule"], group["level"]
        widths = {name: moment_width(rule, name, level, C) for name in MOMENTS[rule]}
        want = wanted[C, p.dtype, p.ndim > 1] = widths, moment_dtype(p, group["state"])
    widths, dtype = want
    if kept["step"].dtype != torch.int32 or ("v" in kept) != ("v" in widths) or kept["m"].dtype != dtype:
        return False
    return all(kept[name].shape == ((*p.shape[:-1], W) if p.ndim else ()) for name, W in widths.items())


def check_kept(p: Tensor, kept: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
    """Raise ValueError if `kept` was made for another rule, level, kind of state or shape than p and its group have.

    A step would mix the two: a row's one moment, say, broadcasts over blocks without a word.
    """
    if fits(p, kept, group, {}):
        return
    if reason := sharded(p):
        raise ValueError(
            f"the parameter, now of shape {tuple(p.shape)}, was sharded after the optimizer was made: {reason}"
        )
    have = {name: (tuple(x.shape), str(x.dtype)) for name, x in kept.items() if name != "step"}
    raise ValueError(
        f"the state kept for a parameter of shape {tuple(p.shape)} ({have}) is not that of rule={group['rule']!r}, "
        f"level={group['level']!r}, state={group['state']!r}: one of them was changed after construction; build a new "
        "FOAM with these options instead (nothing has been stepped)"
    )


def state_bytes(p: Tensor, group: Mapping[str, Any]) -> int:
    """Bytes of `new_state(p, group)`."""
    return sum(x.numel() * x.element_size() for x in new_state(p, group, device="meta").values())


def moment_dtype(p: Tensor, kind: str) -> torch.dtype:
    """How a moment of p is kept: float64 for float64 parameters; 8-bit codes are for matrices, vectors keep float32."""
    if p.dtype == torch.float64:
        return torch.float64
    if kind == "int8":
        return torch.uint8 if p.ndim >= 2 else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "param": p.dtype}[kind]


def open_moment(state: dict[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """The moment in the dtype of the arithmetic: the kept tensor itself where it has that dtype."""
    kept = state[name]
    if kept.dtype == torch.uint8:
        return decode(kept, state[f"{name}_exponent"], signed=name == "m").to(dtype)
    return kept.to(dtype)


def close(state: dict[str, Tensor], name: str, x: Tensor, key: Key | None, first: First = 0) -> None:
    """Write the computed x back to where it is kept; `key` seeds stochastic rounding, None rounds to nearest. Of a
    part of a tensor, `first` is the place in the whole of its first element, or of its rows' first elements."""
    kept = state[name]
    if kept.dtype == torch.uint8:
        codes, exponents = encode(x.float(), name == "m", key, first)
        kept.copy_(codes)
        state[f"{name}_exponent"].copy_(exponents)
    elif x is not kept:
        kept.copy_(round_stochastic(x, key, first) if key is not None and kept.dtype == torch.bfloat16 else x)
