"""The library's only door to torch.distributed: which part of a parameter this rank holds, and what it asks of others.

A sharded parameter is a DTensor (FSDP2's `fully_shard`, tensor parallelism): a mesh of ranks, and for each dimension of
the mesh how it cuts the parameter. The arithmetic is done on this rank's own tensors; what others must give is asked
for here:

    whole rows    where a cut runs through a block of a row, every rank gathers the gradient's rows and keeps the
                  moments of all of them: the same numbers in the same order as in one process
    the matrix    rule muon gathers its update, in bfloat16, as it is orthogonalised

Cuts between rows, and between blocks, ask for nothing. Rounding noise is numbered by the element's place in the whole
parameter, so sharding changes no bit of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed
from torch import Tensor
from torch.optim import Optimizer


def is_sharded(x: Tensor) -> bool:
    """Whether x is a DTensor. Their module is slow to import, and not there before it is used."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def sharded(p: Tensor) -> str | None:
    """Why p, of which this rank holds a part, cannot be stepped; None if it can."""
    if getattr(p, "_fsdp_flattened", False):
        return "FSDP1 hands over flat pieces of weights, in which no rows are left to fold; use FSDP2's fully_shard"
    if is_sharded(p) and any(x.is_partial() for x in cast(Any, p).placements):
        return "it is a DTensor that is still to be summed over ranks (Partial); redistribute it first"
    return None


def local(x: Tensor) -> Tensor:
    """This rank's part of x: x itself if it is whole."""
    if not is_sharded(x):
        return x
    with torch.no_grad():
        mine = cast(Any, x).to_local()
    return mine.wait() if hasattr(mine, "wait") else mine  # what a collective has not brought yet


def locals_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts of a parameter's state."""
    return {name: local(x) for name, x in state.items()}


def whole_tensor(x: Tensor) -> Tensor:
    """All of x, on every rank: a collective call if it is sharded."""
    return cast(Tensor, cast(Any, x).full_tensor()) if is_sharded(x) else x


# ---------------------------------------------------------------------- parts


@dataclass(frozen=True, eq=False)
class Part:
    """What this rank holds of one parameter of `shape`, seen as rows.

    rows, columns: places in the whole of those that are here. whole_rows: the moments are of whole rows, on every rank
    that holds a piece of them. matrix: which dimensions of the mesh cut a matrix that the rule needs whole.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    rows: Tensor
    columns: Tensor
    whole_rows: bool
    matrix: tuple[int, ...]

    @property
    def joins(self) -> bool:
        """Whether a step of the parameter is a collective call, which all ranks must make in the same order."""
        return self.whole_rows or bool(self.matrix)

    @property
    def row_length(self) -> int:
        return self.shape[-1] if self.shape else 1

    def cuts(self, x: Any) -> bool:
        """Whether the DTensor x is cut as moments are."""
        return x.device_mesh == self.mesh and tuple(x.placements) == self.of_rows

    @property
    def of_rows(self) -> tuple[Any, ...]:
        """How the moments are cut: as the parameter, but for rows that are kept whole."""
        return _only(self.placements, lambda d: not (self.whole_rows and d == len(self.shape) - 1))

    def zeros(self, width: int, dtype: torch.dtype, device: Any) -> Tensor:
        """A moment of `width` columns: a DTensor [*lead, width]."""
        shape = torch.Size((*self.shape[:-1], width) if self.shape else ())
        here = [len(_places(self.mesh, self.of_rows, d, n)) for d, n in enumerate(shape)]
        return _declared(torch.zeros(here, dtype=dtype, device=device), self.mesh, self.of_rows, shape)

    def _columns(self, width: int) -> Tensor:
        return _places(self.mesh, self.of_rows, len(self.shape) - 1, width)

    def first(self, width: int) -> Tensor:
        """The number, in the whole of a tensor of `width` columns that is cut as moments are, of each row's first
        element here; int64, on the CPU."""
        columns = self._columns(width) if self.shape else self.columns
        return self.rows * width + (columns[0] if len(columns) else 0)

    def with_rows(self, x: Tensor) -> Tensor:
        """Gather the columns of x, cut as the parameter is: a collective call of the ranks that share its rows."""
        if not self.whole_rows:
            return x
        whole = _declared(x, self.mesh, self.placements, self.shape)
        return local(cast(Any, whole).redistribute(placements=self.of_rows))

    def own_columns(self, x: Tensor) -> Tensor:
        """Of whole rows, the columns that are here."""
        return _take(x, x.ndim - 1, self.columns) if self.whole_rows else x

    def gather(self, u: Tensor) -> Tensor:
        """The whole matrices of which u, cut as moments are, is this rank's part; in bfloat16."""
        there = [_replicate() if i in self.matrix else x for i, x in enumerate(self.of_rows)]
        whole = _declared(u.bfloat16().contiguous(), self.mesh, self.of_rows, self.shape)
        return local(cast(Any, whole).redistribute(placements=there))

    def own(self, x: Tensor) -> Tensor:
        """Of whole matrices, what is here of whole rows."""
        for d, n in enumerate(self.shape):
            if x.shape[d] == n:
                x = _take(x, d, _places(self.mesh, self.of_rows, d, n))
        return x


def part(p: Tensor, unit: int, matrix: bool = False) -> Part | None:
    """What this rank holds of p, whose rows must not be cut but between `unit` columns; None if p is no DTensor.

    `matrix`: the rule needs whole matrices, which are the last two dimensions of a 3-D p and all of another."""
    if not is_sharded(p):
        return None
    q = cast(Any, p)
    return _part(q.device_mesh, tuple(q.device_mesh.get_coordinate() or ()), q.placements, p.shape, unit, matrix)


@lru_cache(maxsize=1024)
def _part(
    mesh: Any, coordinate: tuple[int, ...], placements: tuple[Any, ...], shape: torch.Size, unit: int, matrix: bool
) -> Part:
    last = len(shape) - 1
    rows = torch.zeros(1, dtype=torch.int64)
    for d, n in enumerate(shape[:-1]):
        rows = (rows[:, None] * n + _places(mesh, placements, d, n)).flatten()
    columns = _places(mesh, placements, last, shape[-1]) if shape else rows
    cut = bool(shape) and _cuts_blocks(mesh, placements, last, shape[-1], unit)
    dims = [] if not matrix else [1, 2] if len(shape) == 3 else list(range(len(shape)))
    dims = [d for d in dims if not (cut and d == last)]
    meshed = tuple(i for i, x in enumerate(placements) if _dim(x) in dims and mesh.size(i) > 1)
    return Part(mesh, placements, shape, rows, columns, cut, meshed)


def _dim(placement: Any) -> int | None:
    """The dimension that a placement cuts, or None. Strided cuts are made by FSDP2 over tensor parallelism."""
    return getattr(placement, "dim", None)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def _only(placements: Sequence[Any], keeps: Any) -> tuple[Any, ...]:
    """The placements that cut a dimension which `keeps` names, the others replicated."""
    return tuple(x if (d := _dim(x)) is not None and keeps(d) else _replicate() for x in placements)


def _declared(mine: Tensor, mesh: Any, placements: Sequence[Any], shape: torch.Size) -> Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(mine, mesh, placements, run_check=False, shape=shape, stride=stride)


def _places(mesh: Any, placements: Sequence[Any], dim: int, n: int) -> Tensor:
    """Which of the n places along a dimension are on this rank: int64, in the order in which they lie here."""
    return _places_at(mesh, tuple(mesh.get_coordinate() or ()), _only(placements, lambda d: d == dim), dim, n)


@lru_cache(maxsize=1024)
def _places_at(mesh: Any, coordinate: tuple[int, ...], placements: tuple[Any, ...], dim: int, n: int) -> Tensor:
    # torch cuts the numbers themselves: no rank asks another for them
    from torch.distributed.tensor import DTensor

    shape = [1] * dim + [n]
    numbers = DTensor.from_local(torch.arange(n).view(shape), mesh, [_replicate()] * mesh.ndim, run_check=False)
    with torch.no_grad():
        return local(numbers.redistribute(placements=placements)).flatten().cpu()


def _cuts_blocks(mesh: Any, placements: Sequence[Any], dim: int, n: int, unit: int) -> bool:
    """Whether any rank's columns begin or end within `unit` columns, or are not a run of columns."""
    sizes = {n}
    for i, placement in enumerate(placements):
        ranks = mesh.size(i)
        if _dim(placement) != dim or ranks == 1:
            continue
        if hasattr(placement, "split_factor"):  # strided: not one run of columns
            return True
        for size in tuple(sizes):
            piece = -(-size // ranks)
            if piece < size and piece % unit:
                return True
            sizes |= {piece, size % piece if piece else 0}
    return False


def _take(x: Tensor, dim: int, places: Tensor) -> Tensor:
    """These places of x along a dimension: a view where they follow each other."""
    n = len(places)
    if n == x.shape[dim]:
        return x
    if n and int(places[-1]) - int(places[0]) != n - 1:
        return x.index_select(dim, places.to(x.device))
    return x.narrow(dim, int(places[0]) if n else 0, n)


# ---------------------------------------------------------------------- values that come from elsewhere


def gradient(p: Tensor, g: Tensor) -> Tensor:
    """This rank's part of the gradient of p, summed over ranks where that is still to be done."""
    if not is_sharded(p) or not is_sharded(g):
        return g  # a mixture is refused by its types
    if cast(Any, g).placements != cast(Any, p).placements:
        g = cast(Any, g).redistribute(placements=cast(Any, p).placements)
    return local(g)


def same_ranks(x: Tensor, p: Tensor) -> bool:
    """Whether two DTensors lie on the same mesh of ranks."""
    return is_sharded(x) and is_sharded(p) and cast(Any, x).device_mesh == cast(Any, p).device_mesh


def cut_as(like: Tensor, x: Tensor) -> Tensor:
    """This rank's part of x, cut as `like`: of a whole x without asking anyone, of one that is cut otherwise by a
    collective call."""
    if not is_sharded(like):
        return x
    q = cast(Any, like)
    if not is_sharded(x):
        x = _declared(x.to(local(like).device), q.device_mesh, [_replicate()] * q.device_mesh.ndim, x.shape)
    y = cast(Any, x)
    return local(x if y.placements == q.placements else y.redistribute(placements=q.placements))


def in_process_group() -> bool:
    """Whether this process is one of a group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def replicated(opt: Optimizer) -> bool:
    """Whether several ranks hold whole copies of any parameter, so that gradients are averaged between them."""
    if not in_process_group() or torch.distributed.get_world_size() == 1:
        return False
    return not all(is_sharded(p) for group in opt.param_groups for p in group["params"] if p.requires_grad)
