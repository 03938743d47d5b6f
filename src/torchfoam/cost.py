"""What a step will cost, before it is taken: which backend would perform it, and the bytes it needs for a while."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .groups import check_kind
from .kernels import Slot, eager, planned
from .options import DEFAULTS, check, check_names, hyper
from .shard import local
from .state import new_state


class StepCost(NamedTuple):
    """Who would perform the step of a parameter, and the most bytes alive for a while beside p, g, m and v."""

    backend: str
    bytes: int


def step_bytes(
    p: Tensor,
    group: Mapping[str, Any] | None = None,
    device: str | torch.device | None = None,
    backend: str | None = None,
) -> StepCost:
    """What FOAM's step of `p` alone takes; parameters step one after the other, so a step of all takes the largest.

    A kernel needs nothing of its own. Plain torch opens storage, a slab of rows at a time: its step is taken on the
    meta device, and every storage that comes and goes is counted.

    Args:
        p: a parameter, perhaps on the meta device; its gradient is taken to be like it.
        group: one of `opt.param_groups`, or options; what it does not state is FOAM's default.
        device: where the step would be, if not where p is. Of a GPU that is not in this machine, Triton is taken to
            work there.
        backend: as of FOAM.

    Raises:
        ValueError: options that make no sense, a parameter that FOAM refuses, or a backend that cannot perform this
            step, with the reason.

    >>> step_bytes(torch.empty(64, 64, device="meta"), {"rule": "adam"}, "cuda")
    StepCost(backend='triton', bytes=0)
    """
    group = {**DEFAULTS, **(group or {})}
    check_names((name for name in group if name not in ("params", "name", "param_names", "format")), misspelt_only=True)
    check(group, read=False)
    check_kind(p, group["rule"])
    p = local(p)
    where = torch.device(p.device if device is None else device)
    by = planned(backend, p, group, where).name
    if by == "eager":
        return StepCost(by, _eager_bytes(p, group, where))
    return StepCost(by, 0 if p.is_contiguous() else 2 * p.numel() * p.element_size())  # copies of p and g


def _eager_bytes(p: Tensor, group: Mapping[str, Any], device: torch.device) -> int:
    """The peak of one slab's step."""
    shape = eager.slab(p, group["rule"], device)
    q, g = (torch.empty(shape, dtype=p.dtype, device="meta") for _ in range(2))
    state = new_state(q, group)
    with torch.no_grad(), _Peak(q, g, *state.values()) as peak:
        eager.update([Slot(q, g, state, 0)], hyper({**group, "lr": 1.0}))
    return peak.most


class _Peak(TorchDispatchMode):
    """Counts the bytes of all storages that come alive in the block, but for those of `given`."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.live = self.most = 0
        self.known: dict[int, Any] = {x.untyped_storage()._cdata: None for x in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in _tensors(out):
            self._count(x.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def died(_: Any) -> None:
            del self.known[key]
            self.live -= size

        self.known[key] = weakref.ref(storage, died)
        self.live += size
        self.most = max(self.most, self.live)


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for item in x:
            yield from _tensors(item)
