"""How numbers are kept narrower than they are computed: stochastic rounding to bfloat16, and 8-bit codes.

Rounding to nearest freezes a bfloat16 average whose step is under half an ulp (beta2 = 0.999 moves by 0.1 %, an ulp
is 0.4 to 0.8 %). Stochastic rounding moves it by a whole ulp with the right probability, so the mean keeps moving.

The noise is a pure function of (seed, step, tensor, stream, element), so a resumed run repeats it exactly, every
data-parallel replica rounds alike, no generator state is saved, and every backend can be held to the same bits:

    key  = mix(mix(mix(seed) ^ step) ^ (4 * tensor + stream))        stream 0: p, 1: m, 2: v
    word = mix(key ^ element // 2)                     an even element has its low bits, an odd one its high bits

16 of them are added below the bfloat16 mantissa, 19 below that of an 8-bit code. `mix` is the 32-bit finaliser
"lowbias32" found by C. Wellons' hash-prospector (public domain); `element` is the index in the contiguous tensor, half
of it taken modulo 2^32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# an integer, or a 0-dim int64 tensor: on a device whose step count the host must not wait for
Key = int | Tensor
First = int | Tensor  # the number of an element, or of the first of each row: int64
_MASK = 0xFFFFFFFF


def mix(x: Any) -> Any:
    """Scramble a 32-bit integer, or an int64 tensor that holds one: lowbias32.

    >>> mix(0), mix(1)
    (0, 1753845952)
    """
    x = x & _MASK
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & _MASK
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def noise_key(seed: int, step: Key, tensor: int, stream: int) -> Any:
    """The 32-bit key of one tensor's rounding noise in one step; `step` may be an int64 tensor, and so the key."""
    return mix(mix(mix(seed) ^ (step & _MASK)) ^ (4 * tensor + stream) & _MASK)


def noise(key: Key, shape: torch.Size, device: torch.device, bits: int = 16, first: First = 0) -> Tensor:
    """Each element's random bits, int32 in [0, 2**bits), shaped like the tensor to be rounded, or like the part of it
    that begins with element `first`: of all, or [R], of each of its rows."""
    mask, high = (1 << bits) - 1, 32 - bits
    if isinstance(first, Tensor):
        along = torch.arange(shape[-1] if shape else 1, dtype=torch.int64, device=device)
        x = (first.to(device)[:, None] + along).flatten()
        return (_words(x >> 1, key) >> high * (x & 1)).bitwise_and_(mask).to(torch.int32).view(shape)
    n, odd = shape.numel(), first % 2
    x = _words(torch.arange(first // 2, (first + n + 1) // 2, dtype=torch.int64, device=device), key)
    halves = torch.empty((len(x), 2), dtype=torch.int32, device=device)
    halves[:, 0], halves[:, 1] = x & mask, x >> high
    return halves.flatten()[odd : odd + n].view(shape)


def _words(x: Tensor, key: Key) -> Tensor:
    """mix(key ^ x) of an int64 tensor, in place."""
    x.bitwise_and_(_MASK).bitwise_xor_(key)
    x.bitwise_xor_(x >> 16).mul_(0x7FEB352D).bitwise_and_(_MASK)
    x.bitwise_xor_(x >> 15).mul_(0x846CA68B).bitwise_and_(_MASK)
    return x.bitwise_xor_(x >> 16)


def round_stochastic(x: Tensor, key: Key, first: First = 0) -> Tensor:
    """Round float32 to bfloat16, up with probability proportional to the distance: E[result] = x.

    Values that bfloat16 holds exactly, infinities and NaN come through unchanged.
    """
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + noise(key, x.shape, x.device, first=first)).bitwise_and_(-65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


# ---------------------------------------------------------------------- 8-bit codes
#
# A code is a small float; GROUP codes of a row share one power of two, kept as an exponent byte. Rounding a float32 to
# four mantissa bits is an integer shift, which does not depend on the others of its group, and a shared power of two
# never moves the grid: a value that has not changed is not rounded again, so stochastic rounding adds noise only where
# a moment really moves. (A scale equal to the largest value moves every step and would re-round everything.)
#
#     index(x) = (bits of |x| + noise) >> 19               exponent and four mantissa bits of |x|, 12 bits
#     E        = max over the group of index >> 4          the shared exponent, one byte
#     second moment:  code = index - 16 E + 240            1..255: sixteen octaves below the largest; smaller ones are
#                                                          raised to code 1, since v stands under a division (of index
#                                                          0, 2^-130 or less, they are zero)
#     first moment:   code = index - 16 E + 112            1..127 and a sign bit: eight octaves; smaller ones become
#                                                          zero or code 1, with the odds that keep the mean

GROUP = 32  # codes that share an exponent byte
_SHIFT = 19  # float32 has 23 mantissa bits, a code four


def encode(x: Tensor, signed: bool, key: Key | None, first: First = 0) -> tuple[Tensor, Tensor]:
    """Codes and exponents of x along its last dimension: [*lead, W] float32 -> uint8 [*lead, W], [*lead, ceil(W / 32)].

    `key` seeds stochastic rounding (see `noise_key`); None rounds to nearest. Within range the relative error is at
    most 2^-5 (nearest) or 2^-4 (stochastic). An infinity or NaN makes its group useless until it has passed.
    """
    bits = x.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    if key is None:
        index = (magnitude + (1 << (_SHIFT - 1))) >> _SHIFT
        uniform = torch.full_like(index, 1 << (_SHIFT - 1))
    else:
        uniform = noise(key, x.shape, x.device, _SHIFT, first)
        index = (magnitude + uniform) >> _SHIFT
    index = index.clamp_(max=4079).masked_fill_(x.isinf(), 4080).masked_fill_(x.isnan(), 4095)
    exponent = (_grouped(index) >> 4).amax(-1)
    base = exponent.repeat_interleave(GROUP, -1)[..., : x.shape[-1]] << 4
    if signed:
        code = index - base + 112
        # below code 1: code 1 with probability |x| / (value of code 1), else 0
        smallest = ((base - 111).clamp_(min=0) << _SHIFT).view(torch.float32)
        rises = x.abs() > smallest * (uniform.float() / (1 << _SHIFT))
        code = torch.where(code >= 1, code, rises.to(torch.int32)).masked_fill_(magnitude == 0, 0)
        code |= (bits >> 24) & 0x80
    else:
        code = (index - base + 240).clamp_(1, 255).masked_fill_(index == 0, 0)
    return code.to(torch.uint8), exponent.to(torch.uint8)


def decode(codes: Tensor, exponents: Tensor, signed: bool) -> Tensor:
    """The float32 values of `encode`'s codes, [*lead, W]: a shift and an add."""
    base = exponents.to(torch.int32).repeat_interleave(GROUP, -1)[..., : codes.shape[-1]] << 4
    code = codes.to(torch.int32)
    small = code & 0x7F if signed else code
    bits = (small + base - (112 if signed else 240)).clamp_(min=0) << _SHIFT
    bits = torch.where(small == 0, 0, bits)
    if signed:
        bits |= (code & 0x80) << 24
    return bits.view(torch.float32)


def _grouped(x: Tensor) -> Tensor:
    """[*lead, W] -> [*lead, ceil(W / 32), 32], the last group filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
