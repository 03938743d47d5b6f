"""What a device would do, on the meta device: fused attention, casts where precision is mixed, experts' products.

Attention takes the footprint of a fused kernel (query, key, value, output, one float32 a row), and "mixed" casts the
inputs of matrix products and convolutions, as autocast does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
# what autocast casts to bfloat16
_NAMED = ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm")
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
PRODUCTS = {
    *(getattr(where, name) for where in (torch, Tensor) for name in _NAMED),
    *(F.linear, torch.einsum, Tensor.__matmul__, Tensor.__rmatmul__, *_CONVOLUTIONS),
}


class Grouped(torch.autograd.Function):
    """torch's product of each expert's rows with its matrix, whose kernel for meta takes bfloat16 alone, others not.

    Shapes: x [rows, width], w [experts, width, out] -> [rows, out].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x.new_empty(x.shape[0], w.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(w)


class Stand(TorchFunctionMode):
    """On the meta device, what the target device would do: fused attention, and casts where precision is mixed."""

    def __init__(self, device: str, mixed: bool) -> None:
        super().__init__()
        self.device, self.mixed = device, mixed
        # autocast casts a trainable weight once, and keeps it until the forward pass ends
        self.casts: dict[int, Tensor] = {}
        self.caching = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        attention = func is F.scaled_dot_product_attention
        if func is torch._grouped_mm and args[0].dtype != torch.bfloat16:
            return Grouped.apply(*args[:2])
        if self.mixed and (attention or func in PRODUCTS):
            args = tuple(self.cast(x) for x in args)
            kwargs = {k: self.cast(x) for k, x in kwargs.items()}
        return self.attend(*args, **kwargs) if attention else func(*args, **kwargs)

    def cast(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            return x
        if not (self.caching and isinstance(x, nn.Parameter) and x.requires_grad):
            return x.to(torch.bfloat16)
        if id(x) not in self.casts:
            self.casts[id(x)] = x.to(torch.bfloat16)
        return self.casts[id(x)]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        cpu = self.device == "cpu"
        learned = attn_mask is not None and attn_mask.requires_grad
        if q.shape[-1] == v.shape[-1] and not learned and not (cpu and dropout_p > 0):
            return aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
        if cpu or q.shape[1] != k.shape[1]:  # what no fused kernel takes
            return aten._scaled_dot_product_attention_math(
                q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
