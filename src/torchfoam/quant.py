"""How numbers are kept narrower than they are computed: stochastic rounding of float32 to bfloat16.

Rounding to nearest freezes a bfloat16 average whose step is under half an ulp (beta2 = 0.999 moves by 0.1 %, an ulp
is 0.4 to 0.8 %). Stochastic rounding moves it by a whole ulp with the right probability, so the mean keeps moving.

The noise is a pure function of (seed, step, tensor, stream, element), so a resumed run repeats it exactly, every
data-parallel replica rounds alike, no generator state is saved, and every backend can be held to the same bits:

    key  = mix(mix(mix(seed) ^ step) ^ (4 * tensor + stream))        stream 0: p, 1: m, 2: v
    bits = mix(key ^ element)                                        low 16 bits are added below the bfloat16 mantissa

`mix` is the 32-bit finaliser "lowbias32" found by C. Wellons' hash-prospector (public domain); `element` is the index
in the contiguous tensor, modulo 2^32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def mix(x: int) -> int:
    """Scramble a 32-bit integer: lowbias32.

    >>> mix(0), mix(1)
    (0, 1753845952)
    """
    x &= _MASK
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def noise_key(seed: int, step: int, tensor: int, stream: int) -> int:
    """The 32-bit key of one tensor's rounding noise in one step."""
    return mix(mix(mix(seed) ^ (step & _MASK)) ^ (4 * tensor + stream) & _MASK)


def noise(key: int, shape: torch.Size, device: torch.device) -> Tensor:
    """Sixteen random bits an element, int32 in [0, 65535], shaped like the tensor to be rounded."""
    n = shape.numel()
    x = torch.arange(n, dtype=torch.int64, device=device).bitwise_and_(_MASK).bitwise_xor_(key)
    x.bitwise_xor_(x >> 16).mul_(0x7FEB352D).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 15).mul_(0x846CA68B).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 16).bitwise_and_(0xFFFF)
    return x.to(torch.int32).view(shape)


def round_stochastic(x: Tensor, key: int) -> Tensor:
    """Round float32 to bfloat16, up with probability proportional to the distance: E[result] = x.

    Values that bfloat16 holds exactly, infinities and NaN come through unchanged.
    """
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + noise(key, x.shape, x.device)).bitwise_and_(-65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
