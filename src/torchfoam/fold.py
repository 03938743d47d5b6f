"""Folding: block means along a row, their inverse spread, and what they leave out.

This room holds the geometry (how long a block is, how many a row has, the short last one) and the three maps
every rule is written with. It knows nothing of optimizers, dtypes of storage or devices.

Letters used throughout the package:

    p g        a parameter and its gradient, seen as [R, C]: C the last dimension, R the product of the others
    m v        first and second moment, folded to [R, W]
    u          the update, before the learning rate
    r          the residual g - unfold(fold(g)); each block of it sums to zero
    B          block length, 2**level entries of one row; W = ceil(C / B) is the folded width
    t          step count, 1 at the first step

Source: Wen et al., "FOAM: Blocked State Folding for Memory-Efficient LLM Training", ICML 2026, arXiv 2512.07112.
"""

from __future__ import annotations

from math import isfinite, nan
from typing import Literal

import torch
from torch import Tensor

Level = int | Literal["row"]
HIGHEST = 30  # no row is longer than 2^30 entries: a higher level is a typing error


def check_level(level: object) -> Level:
    """Return `level` if it is an integer from 0 to 30 or "row"; raise ValueError otherwise.

    >>> check_level(2), check_level("row")
    (2, 'row')
    >>> check_level("2")
    Traceback (most recent call last):
    ValueError: level must be an integer from 0 to 30 or 'row', got '2'
    """
    if level == "row":
        return "row"
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= HIGHEST:
        raise ValueError(f"level must be an integer from 0 to {HIGHEST} or 'row', got {level!r:.80}")
    return level


def row_length(x: Tensor) -> int:
    """C, the length of a row; a 0-dim tensor is a row of one.

    >>> row_length(torch.ones(2, 3, 5)), row_length(torch.ones(()))
    (5, 1)
    """
    return x.shape[-1] if x.ndim else 1


def block(level: Level, columns: int) -> int:
    """Block length B: 2**level, but never more than the row; "row" is the whole row.

    >>> block(2, 10), block(8, 10), block("row", 10)
    (4, 10, 10)
    """
    whole = max(columns, 1)
    return whole if check_level(level) == "row" else min(1 << int(level), whole)


def width(level: Level, columns: int) -> int:
    """Folded width W = ceil(C / B).

    >>> width(2, 10), width(0, 10), width("row", 10)
    (3, 10, 1)
    """
    return -(-columns // block(level, columns))


def fold(x: Tensor, level: Level) -> Tensor:
    """Mean of each block of the last dimension: [*lead, C] -> [*lead, W], same dtype.

    A short last block is divided by its true length. A 0-dim tensor is its own mean.

    >>> fold(torch.tensor([1., 3., 5., 7., 9.]), 1)
    tensor([2., 6., 9.])
    """
    if x.ndim == 0 or x.shape[-1] == 0 or (B := block(level, x.shape[-1])) == 1:
        return x.clone()
    n = x.shape[-1] // B
    means = x[..., : n * B].unflatten(-1, (n, B)).mean(-1)
    if n * B == x.shape[-1]:
        return means
    return torch.cat([means, x[..., n * B :].mean(-1, keepdim=True)], -1)


def unfold(x: Tensor, level: Level, columns: int) -> Tensor:
    """Repeat each entry over its block: [*lead, W] -> [*lead, C].

    >>> unfold(torch.tensor([2., 6., 9.]), 1, 5)
    tensor([2., 2., 6., 6., 9.])
    >>> fold(unfold(torch.tensor([2., 6., 9.]), 1, 5), 1)  # nothing is lost this way round
    tensor([2., 6., 9.])
    """
    if x.ndim == 0 or columns == 0 or (B := block(level, columns)) == 1:
        return x.clone()
    if x.shape[-1] * B == columns:
        return x.unsqueeze(-1).expand(*x.shape, B).flatten(-2).contiguous()
    return x.index_select(-1, torch.arange(columns, device=x.device) // B)


def residual(x: Tensor, level: Level) -> Tensor:
    """What folding leaves out: x - unfold(fold(x)), [*lead, C]; each block sums to zero.

    >>> residual(torch.tensor([1., 3., 5., 7., 9.]), 1)
    tensor([-1.,  1., -1.,  1.,  0.])
    >>> fold(residual(torch.tensor([1., 3., 5., 7., 9.]), 1), 1)
    tensor([0., 0., 0.])
    """
    return x - unfold(fold(x, level), level, row_length(x))


def residual_ratio(x: Tensor, level: Level) -> float:
    """delta = |x - unfold(fold(x))| / |x| over the whole tensor, in [0, 1]; 0 for zeros, NaN for what is not finite.

    From |x|^2 = |unfold(fold(x))|^2 + |residual|^2, without a full-size temporary in float32 unless the largest entry
    is so large or small that squares would overflow or vanish.

    >>> residual_ratio(torch.tensor([1., 1., 3., 3.]), 1), residual_ratio(torch.tensor([1., -1.]), 1)
    (0.0, 1.0)
    """
    if x.numel() == 0:
        return 0.0
    x = x if x.dtype == torch.float64 else x.float()
    top = float(torch.linalg.vector_norm(x, float("inf")))
    if top == 0 or not isfinite(top):
        return 0.0 if top == 0 else nan
    if not 2.0**-30 < top < 2.0**30:
        x = x / top
    f = fold(x, level).square()
    C = row_length(x)
    if last := C % block(level, C):
        f[..., -1] *= last / block(level, C)
    whole = torch.linalg.vector_norm(x, dtype=f.dtype).square()
    kept = f.sum() * block(level, C)
    return float((1 - kept / whole).clamp(0, 1).sqrt())
