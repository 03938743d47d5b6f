"""Learning rates that are tensors: each group has one of its own, and who writes to the one given is told.

A tensor given as `lr` reaches every group. Schedulers write the groups' rates one after the other, and in place, so a
tensor that two groups share would be multiplied twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Rates:
    """The tensors that were given as the rate of several groups, which read copies instead."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, int]] = []  # and their versions then

    def part(self, groups: Iterable[dict[str, Any]]) -> None:
        """Let no two groups share a tensor for their rate."""
        groups = list(groups)
        rates = [group["lr"] for group in groups]
        given = [lr for lr, _ in self.given]
        for group in groups:
            lr = group["lr"]
            if isinstance(lr, Tensor) and sum(x is lr for x in rates + given) > 1:
                group["lr"] = lr.detach().clone()
                if not any(x is lr for x in given):
                    self.given.append((lr, 0 if lr.is_inference() else lr._version))
                    given.append(lr)

    def check(self) -> None:
        """Warn once if a tensor that was given has been written to since."""
        if not self.given or torch.compiler.is_compiling():
            return
        if any(not lr.is_inference() and lr._version != version for lr, version in self.given):
            self.given.clear()
            warnings.warn(
                "the tensor given as lr has changed, but no group reads it: it was given for several groups, and each "
                'has a copy of its own; change group["lr"] of every group instead',
                stacklevel=5,
            )
