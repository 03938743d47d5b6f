"""The library's only door to torch.distributed."""

from __future__ import annotations

import torch.distributed
from torch.optim import Optimizer


def replicated(opt: Optimizer) -> bool:
    """Whether several ranks hold whole copies of the parameters, so that gradients are averaged between them."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and only sharded runs need it

    params = [p for group in opt.param_groups for p in group["params"]]
    return torch.distributed.get_world_size() > 1 and not all(isinstance(p, DTensor) for p in params)
