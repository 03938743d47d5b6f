"""A step of what this rank holds: backends see plain tensors, and rows that others hold in part are gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..fold import Level, row_length, width
from ..options import Options
from ..shard import gradient, is_sharded, local, locals_of
from ..state import part_of
from .backend import Backend, Slot


def here(slot: Slot, group: Mapping[str, Any]) -> Slot:
    """This rank's part of a sharded parameter. Gradients that are still to be summed over ranks are.

    Raises:
        ValueError: a gradient or a moment that is not sharded, or a moment that is cut in another way.
    """
    part = part_of(slot.p, group)
    if part is None:
        return slot
    moments = {name: x for name, x in slot.state.items() if name != "step"}
    if not is_sharded(slot.g) or not all(is_sharded(x) and part.cuts(x) for x in moments.values()):
        raise ValueError(
            f"FOAM cannot step a sharded parameter of shape {tuple(slot.p.shape)} whose gradient or state is whole, or "
            "cut in another way: build a new FOAM after the model is sharded (nothing has been stepped)"
        )
    return Slot(local(slot.p), gradient(slot.p, slot.g), locals_of(slot.state), slot.number, part)


def perform(backend: Backend, slots: Sequence[Slot], h: Options) -> None:
    """One step for every slot, in place. One whose step is a collective call comes alone."""
    torch._foreach_add_([slot.state["step"] for slot in slots], 1)
    part = slots[0].part
    if part and part.whole_rows:
        _step_whole_rows(backend, slots[0], h)
        return
    # a rank that has nothing of a parameter steps it only where others wait for it
    if busy := [slot for slot in slots if not slot.part or slot.part.matrix or slot.p.numel()]:
        backend.update(busy, h)


def _step_whole_rows(backend: Backend, slot: Slot, h: Options) -> None:
    """A cut runs through blocks: gather the gradient's rows, step them, and keep of the weights what is here."""
    p, part = slot.p, slot.part
    assert part is not None
    g = part.with_rows(slot.g)
    rows = p.new_zeros(g.shape)  # what becomes of the other ranks' weights is not read
    rows.index_copy_(-1, part.columns.to(p.device), p)
    if rows.numel() or part.matrix:
        backend.update([slot._replace(p=rows, g=g)], h)
        p.copy_(part.own_columns(rows))


class Run(NamedTuple):
    """Rows of a slot that follow each other in the whole parameter."""

    row: int  # the first one, of those here
    rows: int
    first: int  # number of its first weight in the whole
    columns: int  # of the whole, from one row's first weight to the next one's
    first_moment: int
    width: int


def runs(slot: Slot, level: Level) -> list[Run]:
    """How the elements of a slot are numbered, for backends that count them: rounding noise is by number."""
    C = row_length(slot.p)
    if slot.part is None:
        return [Run(0, slot.p.numel() // max(C, 1), 0, C, 0, width(level, C))]
    C = slot.part.row_length
    W = width(level, C)
    weights, moments = slot.part.first(C), slot.part.first(W)
    starts = [0, *(i + 1 for i in (weights.diff() != C).nonzero().flatten().tolist())]
    ends = [*starts[1:], len(weights)]
    return [Run(i, j - i, int(weights[i]), C, int(moments[i]), W) for i, j in zip(starts, ends) if j > i]
