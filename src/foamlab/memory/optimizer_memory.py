"""What an optimizer costs in memory: what it keeps, to the byte, and what its step needs for a while."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from torchfoam import FOAM, step_bytes

from .. import optimizers
from ..config import OptimizerConfig
from ..errors import UserError
from . import simulate


class Footprint:
    """What an optimizer keeps, exactly, and what a step needs for a while.

    The real optimizer is built over the model, without the blocks that are like the others, and takes its steps on the
    meta device. Parameters of one group, shape and dtype have the same state, so one of each stands for all.

    Args:
        config: which optimizer.
        model: on the meta device.
        device: "cpu" or "cuda", whose kernels are meant.

    Raises:
        UserError: an optimizer that cannot be built, or cannot step on the meta device.
    """

    def __init__(self, config: OptimizerConfig, model: nn.Module, device: str) -> None:
        self.config, self.device = config, device
        # kernels cannot step without bytes
        options = {k: x for k, x in config.options.items() if k != "backend"}
        with simulate.fewer_blocks(model, by_name=bool(options.get("overrides"))) as (middle, extra):
            self.optimizer = optimizers.build(replace(config, options=options), model)
        often = {id(p) for p in middle}
        alike: dict[Any, list[nn.Parameter]] = {}
        for k, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                alike.setdefault((k, p.shape, p.dtype), []).append(p)
        self.alike = list(alike.values())
        self.stand_ins = [same[0] for same in self.alike]
        if not isinstance(self.optimizer, FOAM):  # whose state is there from the beginning
            self.step(self.stand_ins)
        counts = [sum(1 + extra * (id(p) in often) for p in same) for same in self.alike]
        # what several parameters share (bitsandbytes' code tables) counts once
        whole = self._bytes(self.stand_ins)
        own = [whole - self._bytes([q for q in self.stand_ins if q is not p]) for p in self.stand_ins]
        self.state = whole + sum((n - 1) * size for n, size in zip(counts, own))

    def _bytes(self, params: list[nn.Parameter]) -> int:
        return optimizers.state_bytes(self.optimizer, {"params": params})

    def step(self, params: list[nn.Parameter]) -> int:
        """One step of these stand-ins; returns the most bytes that were alive for a while."""
        gradients = [torch.empty_like(p) for p in self.stand_ins]
        for p, g in zip(self.stand_ins, gradients):
            p.grad = g if any(p is q for q in params) else None
        tracker = simulate.Tracker(hypothetical=True)
        try:
            with tracker:
                get_total_norm(gradients)
                self.optimizer.step()
        except (RuntimeError, NotImplementedError) as e:
            raise UserError(f"cannot plan optimizer {self.config.name}: {' '.join(str(e).split())[:200]}") from e
        finally:
            for p in self.stand_ins:
                p.grad = None
        tracker.mark("end")
        return sum(tracker.segments[-1].top.values())

    @cached_property
    def fused(self) -> set[int]:
        """Ids of the parameters whose step needs nothing of its own."""
        groups = fused_groups(self.optimizer, self.config.options)
        return {id(p) for k in groups for p in self.optimizer.param_groups[k]["params"]}

    @cached_property
    def scratch(self) -> int:
        """Bytes that a step needs besides weights, gradients and state."""
        if isinstance(self.optimizer, FOAM):  # which steps one parameter after another
            return max(self.each.values(), default=0)
        return self.step([p for p in self.stand_ins if id(p) not in self.fused])

    @cached_property
    def each(self) -> dict[int, int]:
        """Of FOAM: id of a parameter -> bytes that its step alone needs besides its weights, gradient and state."""
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        backend = self.config.options.get("backend")
        try:
            sizes = [step_bytes(same[0], groups[id(same[0])], self.device, backend).bytes for same in self.alike]
        except ValueError as e:
            raise UserError(f"optimizer {self.config.name}: {e}") from e
        return {id(p): size for same, size in zip(self.alike, sizes) for p in same}


def fused_groups(optimizer: Optimizer, options: Mapping[str, Any]) -> list[int]:
    """Indices of the groups of torch's own optimizers whose step needs no tensors of its own."""
    out, k = [], 0
    for part in getattr(optimizer, "parts", [optimizer]):
        plain = type(part) in (torch.optim.Adam, torch.optim.AdamW)
        if plain and options.get("fused", True) and not options.get("foreach"):
            out += list(range(k, k + len(part.param_groups)))
        k += len(part.param_groups)
    return out
