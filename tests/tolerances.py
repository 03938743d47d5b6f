"""Four words for "equal", each with its reason. Every numeric test uses one of them.

exact     torch.equal. Save and load, resume, determinism: the same arithmetic in the same order.
rounding  error against the float64 rule at most 4x the eager float32 rule's own. Another order of float32 operations.
narrow    bfloat16 storage: 99.9 % of values equal after rounding, the rest one unit in the last place.
codec     8-bit codes: half a gap between codes (a whole one where rounding is stochastic), below their range the
          smallest code. A code has four mantissa bits, and 32 of a row share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor


def exact(a: Tensor, b: Tensor, what: str = "") -> None:
    assert a.dtype == b.dtype and a.shape == b.shape, f"{what}: {a.dtype} {a.shape} against {b.dtype} {b.shape}"
    assert torch.equal(a, b), f"{what}: differ by up to {(a.double() - b.double()).abs().max()}"


def rounding(x: Tensor, eager: Tensor, truth: Tensor, what: str = "", factor: float = 4.0) -> None:
    """`x` is as close to the float64 `truth` as `factor` times the eager float32 result is (a few ulps at least)."""
    floor = 2.0**-23 * truth.abs().max().item() if truth.numel() else 0.0
    allowed = factor * max((eager.double() - truth).abs().max().item() if truth.numel() else 0.0, floor)
    error = (x.double() - truth).abs().max().item() if truth.numel() else 0.0
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e}"


def narrow(x: Tensor, y: Tensor, what: str = "") -> None:
    """bfloat16 tensors: 99.9 % equal (or all but one of a small tensor), the rest one ulp apart."""
    assert x.dtype == y.dtype == torch.bfloat16
    ulps = (x.contiguous().view(torch.int16).int() - y.contiguous().view(torch.int16).int()).abs()
    assert ulps.numel() == 0 or ulps.max() <= 1, f"{what}: {ulps.max()} ulps apart"
    assert (ulps != 0).sum() <= max(1, ulps.numel() // 1000), f"{what}: {(ulps != 0).sum()} of {ulps.numel()} differ"


def codec(x: Tensor, truth: Tensor, signed: bool, stochastic: bool, what: str = "") -> None:
    """Decoded codes x [..., W] against what was encoded: off by at most 2^-5 of it (2^-4 where rounding is stochastic).

    Below 2^-6 of its group's largest value (2^-14 for a second moment, `signed` False) a value may be off by that much.
    """
    groups = torch.nn.functional.pad(truth.abs(), (0, -truth.shape[-1] % 32)).unflatten(-1, (-1, 32))
    largest = groups.amax(-1).repeat_interleave(32, -1)[..., : truth.shape[-1]]
    gap = truth.abs() * (2.0**-4 if stochastic else 2.0**-5)
    allowed = torch.maximum(gap, largest * 2.0 ** (-6 if signed else -14)) * (1 + 1e-5)  # truth was rounded to float32
    error = (x.double() - truth).abs()
    assert (error <= allowed).all(), f"{what}: error {error.max():.3e}, {(error / allowed).max():.2f} of the allowed"
    assert ((x == 0) == (truth == 0)).all() or signed, f"{what}: a second moment that vanished"
