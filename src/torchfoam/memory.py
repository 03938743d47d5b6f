"""Whether a tensor's numbers lie in memory that a kernel may be pointed to.

A kernel given the address of a tensor that has none ends the process. Every tensor of a step is asked here first,
before a weight moves: `data_ptr()` is called nowhere else on one that was not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def whole(x: Tensor) -> bool:
    """Whether x has memory of its own. A wrapper of other tensors (DTensor, quantised weights, FakeTensor) has none:
    its data pointer is null. All of them, and no others, dispatch for themselves."""
    return type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def imagined(x: Tensor) -> bool:
    """Whether x has a shape and no values, as planning needs: on the meta device, or a FakeTensor."""
    return x.is_meta or isinstance(x, FakeTensor)


def held(x: Tensor) -> bool:
    """Whether x lies in its storage. Not so of what was freed (engines that shard do that to weights they have
    gathered), of zeros that autograd only states, and inside torch.func's transforms."""
    try:
        address, size = x.data_ptr(), x.untyped_storage().nbytes()
    except RuntimeError:  # no storage at all
        return False
    length = x.numel() if x.is_contiguous() else 1 + sum((n - 1) * gap for n, gap in zip(x.shape, x.stride()))
    if not x.numel():
        return True
    return address != 0 and (x.storage_offset() + length) * x.itemsize <= size


def check_held(p: Tensor, g: Tensor, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a step of p, which has elements, would read or write memory that is not there."""
    if torch.compiler.is_compiling() or not whole(p) or p.is_meta:  # no address is taken then
        return
    if held(p) and held(g) and all(map(held, state.values())):
        return
    name = next(name for name, x in {"weight": p, "gradient": g, **state}.items() if not held(x))
    raise ValueError(
        f"FOAM cannot step a parameter of shape {tuple(p.shape)}: its {name} has no memory (freed, or never there: "
        "zeros that autograd only states, tensors of torch.func); bring it back before the step"
    )
