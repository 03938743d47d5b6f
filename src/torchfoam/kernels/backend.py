"""What a backend is, and which one performs a step: the table, the choice, the refusal.

A backend changes parameters and states in place, for a whole group at once, and returns nothing. All share one
signature, `update(slots, h)`; the eager one is the plain-torch twin that the others are held against.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..memory import imagined, whole
from ..options import Options
from ..shard import Part, local, sharded
from ..values import known_value


class Slot(NamedTuple):
    """What a step needs of one parameter."""

    p: Tensor
    g: Tensor
    state: dict[str, Tensor]  # "step" (already counting this step) and the moments
    number: int  # the parameter's place among all of the optimizer's: seeds its rounding noise
    part: Part | None = None  # what p, g and state are of a sharded parameter; None of a whole one


def no_memory(p: Tensor, group: Mapping[str, Any]) -> str | None:
    return f"it reads memory, of which a {type(p).__name__} has none of its own"


class Planned(NamedTuple):
    """All that a backend may ask of a parameter: one as it would be on another device."""

    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    contiguous: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def is_contiguous(self) -> bool:
        return self.contiguous


@dataclass(frozen=True)
class Backend:
    """One way to perform a step."""

    name: str
    unavailable: Callable[[], str | None]  # why it cannot run on this machine, or None
    refuses: Callable[[Any, Mapping[str, Any]], str | None]  # why it cannot take (parameter, group), or None
    update: Callable[[Sequence[Slot], Options], None]
    # why it cannot step a wrapper of other tensors, which has no memory to point to, or None
    wrapper: Callable[[Any, Mapping[str, Any]], str | None] = no_memory

    def objection(self, p: Tensor | Planned, group: Mapping[str, Any]) -> str | None:
        """Why it cannot take p of this group, were it available; or None."""
        return (self.refuses if isinstance(p, Planned) or whole(p) else self.wrapper)(p, group)


# slowest first; filled by the package, whose modules need what stands above
BACKENDS: dict[str, Backend] = {}


def backends() -> dict[str, str]:
    """What can perform a step on this machine: name -> "ok", or the reason why not.

    >>> backends()["eager"]
    'ok'
    """
    return {name: b.unavailable() or "ok" for name, b in BACKENDS.items()}


def choose(name: str | None, p: Tensor, group: Mapping[str, Any], others: Iterable[Tensor] = ()) -> Backend:
    """The backend for one parameter: the named one, or a ValueError with the reason; None takes the fastest.

    `others` are its gradient and state. A warning, once a process, says what a faster one that would take the parameter
    lacks.
    """
    if not whole(p) and (reason := sharded(p)):
        raise ValueError(f"FOAM cannot be used on a parameter of shape {tuple(p.shape)}: {reason}")
    for x in others:
        if not whole(x) and not (imagined(x) and imagined(p)):
            raise ValueError(
                f"FOAM cannot step a {type(p).__name__} of shape {tuple(p.shape)} whose gradient or state is a "
                f"{type(x).__name__}: gradients must be plain, and an optimizer made anew when weights change"
            )
    if name is not None:
        return named(name, p, group)
    for backend in reversed(BACKENDS.values()):
        if (objection := backend.objection(p, group)) is None:
            if (reason := backend.unavailable()) is None:
                return backend
            _warn_once(backend.name, reason)
    raise ValueError(f"FOAM cannot be used on a {type(p).__name__} of shape {tuple(p.shape)}: {objection}")


def planned(name: str | None, p: Tensor, group: Mapping[str, Any], device: torch.device) -> Backend:
    """What `choose` would choose for p if it were on that device. Of a GPU that this machine lacks, all that the
    backends ask of a machine is taken to be there."""
    p = local(p)
    if not whole(p) and not imagined(p):
        return choose(name, p, group)
    here = device.type != "cuda" or torch.cuda.is_available()
    there = Planned(device, p.dtype, p.shape, p.is_contiguous())
    if name is not None:
        return named(name, there, group, here)
    able = [b for b in BACKENDS.values() if b.objection(there, group) is None and not (here and b.unavailable())]
    return able[-1]  # the eager one takes all


def named(name: str, p: Tensor | Planned, group: Mapping[str, Any], here: bool = True) -> Backend:
    """The backend of that name, or a ValueError with the reason why it cannot take p; `here`, on this machine."""
    backend = BACKENDS[known_value("backend", name, BACKENDS)]
    if reason := (here and backend.unavailable()) or backend.objection(p, group):
        raise ValueError(f"backend {name!r} cannot be used: {reason}")
    return backend


@functools.cache
def _warn_once(name: str, reason: str) -> None:
    warnings.warn(f"torchfoam steps without its {name!r} backend, several times slower: {reason}", stacklevel=2)
