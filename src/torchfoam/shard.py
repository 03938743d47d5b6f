"""The library's only door to torch.distributed."""

from __future__ import annotations

import sys

import torch.distributed
from torch import Tensor
from torch.optim import Optimizer

INSTEAD = "use DistributedDataParallel, or wait for a torchfoam that shards"


def replicated(opt: Optimizer) -> bool:
    """Whether several ranks hold whole copies of the parameters, so that gradients are averaged between them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return torch.distributed.get_world_size() > 1


def sharded(p: Tensor) -> str | None:
    """Why p, of which this rank holds a part, cannot be stepped; None for a whole parameter."""
    if getattr(p, "_fsdp_flattened", False):
        return f"FSDP1 hands over flat pieces of weights, in which no rows are left to fold; {INSTEAD}"
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and not there before it is used
    if module is not None and isinstance(p, module.DTensor):
        return f"it cannot step sharded weights yet (DTensor: FSDP2's fully_shard, tensor parallelism); {INSTEAD}"
    return None
