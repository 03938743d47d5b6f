"""Fold levels that fit a budget: bytes of state are spent where folding loses most.

Every matrix starts at "row", the smallest state there is. Then, again and again, the matrix with the largest residual
ratio moves one level down (its state doubles), as long as it fits. The ratio of a matrix at level l is taken to be

    delta(l) = kappa sqrt(1 - 1 / B),  B = 2^l or the row

which holds exactly for gradients that are independent within a block (kappa = 1); kappa is measured, or 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from math import sqrt

from torch import Tensor

from .fold import Level, block

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_MOST = 2**63  # no machine counts more


def parse_bytes(size: int | str) -> int:
    """Bytes of 300_000_000, "300MB", "0.3 GB" (decimal) or "286MiB" (binary); ValueError for anything else.

    >>> parse_bytes("1.5MB"), parse_bytes("1MiB")
    (1500000, 1048576)
    """
    absurd = isinstance(size, int) and abs(size) >= _MOST  # Python writes no number of more than 4300 digits
    match = None if absurd else re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper()) if match else None
    if not match or not unit or not float(match[1]) * unit < _MOST:
        got = "more than 2^63 bytes" if absurd else f"{str(size)[:40]!r}"
        raise ValueError(f"size must look like 300MB, 0.3GB, 286MiB or a number of bytes, below 2^63, got {got}")
    return int(Fraction(match[1]) * unit)


def fit_levels(
    matrices: Mapping[str, Tensor],
    budget: int,
    cost: Callable[[Tensor, Level], int],
    ratios: Mapping[str, float],
    measured_at: Level,
) -> dict[str, Level]:
    """A level for every matrix so that their state, `cost(p, level)` bytes each, comes to at most `budget` bytes.

    `ratios` are residual ratios measured at `measured_at`; a matrix without one counts as unstructured.

    Raises:
        ValueError: not even level "row" fits.
    """
    levels: dict[str, Level] = dict.fromkeys(matrices, "row")
    spent = sum(cost(p, "row") for p in matrices.values())
    if spent > budget:
        raise ValueError(f"the state cannot fit: at level 'row' the matrices need {spent:,} bytes, {budget:,} are left")

    def delta(name: str, level: Level) -> float:
        C = matrices[name].shape[-1]
        kappa = 1.0
        if name in ratios and (measured := _unstructured(measured_at, C)):
            kappa = ratios[name] / measured
        return kappa * _unstructured(level, C)

    open_ = set(matrices)
    while open_:
        # ties go to the matrix named first in the model
        name = max((n for n in matrices if n in open_), key=lambda n: delta(n, levels[n]))
        lower = _one_down(levels[name], matrices[name].shape[-1])
        extra = 0 if lower is None else cost(matrices[name], lower) - cost(matrices[name], levels[name])
        if lower is None or spent + extra > budget:
            open_.remove(name)
            continue
        levels[name], spent = lower, spent + extra
    return levels


def _unstructured(level: Level, columns: int) -> float:
    return sqrt(1 - 1 / block(level, columns))


def _one_down(level: Level, columns: int) -> Level | None:
    """The next finer level; below "row" comes the coarsest that makes two blocks."""
    if level == "row":
        return max((columns - 1).bit_length() - 1, 0) if columns > 1 else None
    return level - 1 if level > 0 else None
