"""The 8-bit codes against a brute-force oracle, their stated bounds, and the hard cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tolerances import exact
from torchfoam.quant import GROUP, decode, encode, mix


def table(exponent: int, signed: bool) -> Tensor:
    """Every value a code can stand for in a group with this exponent byte, by code."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    return decode(codes, torch.full((256, 1), exponent, dtype=torch.uint8), signed)[:, 0].double()


def magnitudes(shape: tuple[int, ...], octaves: float, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * 2 ** (torch.rand(shape, generator=g) * octaves - octaves / 2)


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("octaves", [0, 6, 40])
@pytest.mark.parametrize("signed", [True, False])
def test_nearest_is_brute_force_nearest(columns: int, octaves: float, signed: bool) -> None:
    x = magnitudes((7, columns), octaves, columns)
    x = x if signed else x.square()
    codes, exponents = encode(x, signed, key=None)
    y = decode(codes, exponents, signed).double()
    for row in range(7):
        for column in range(columns):
            values = table(int(exponents[row, column // GROUP]), signed)
            values = values if signed else values[1:]  # a positive second moment never becomes 0
            best = (values - x[row, column].double()).abs().min()
            assert (y[row, column] - x[row, column].double()).abs() == best


@pytest.mark.parametrize(("key", "bound"), [(None, 2.0**-5), (12345, 2.0**-4)])
@pytest.mark.parametrize("signed", [True, False])
def test_error_bound(key: int | None, bound: float, signed: bool) -> None:
    x = magnitudes((50, 96), 3, 1)
    x = x if signed else x.square()
    y = decode(*encode(x, signed, key), signed)
    largest = x.abs().unflatten(-1, (-1, GROUP)).amax(-1).repeat_interleave(GROUP, -1)
    within = x.abs() > largest * 2.0 ** (-7 if signed else -15)
    assert ((y - x).abs() <= bound * x.abs())[within].all()
    assert within.float().mean() > 0.9
    if signed:  # what lies below is off by less than the smallest code
        assert ((y - x).abs() <= largest * 2.0**-6)[~within].all()


@pytest.mark.parametrize("signed", [True, False])
def test_stochastic_rounding_keeps_the_mean(signed: bool) -> None:
    x = magnitudes((1, 64), 3, 2)
    x = x if signed else x.square()
    n = 4000
    mean = sum(decode(*encode(x, signed, mix(k)), signed).double() for k in range(n)) / n
    largest = x.abs().unflatten(-1, (-1, GROUP)).amax(-1).repeat_interleave(GROUP, -1)
    within = x.abs() > largest * 2.0**-14
    # one draw is off by at most an ulp of 2^-4 x (or the smallest code): five standard errors of n draws
    unit = torch.maximum(x.abs() * 2.0**-4, largest * 2.0**-7) if signed else x * 2.0**-4
    assert ((mean - x).abs() <= 2.5 * unit / n**0.5)[within].all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("key", [None, 7])
def test_values_on_the_grid_stay(signed: bool, key: int | None) -> None:
    """A moment that has not moved is not rounded again: encode(decode(encode(x))) changes nothing."""
    x = magnitudes((9, 70), 10, 3)
    x = x if signed else x.square()
    codes, exponents = encode(x, signed, 99)
    again = encode(decode(codes, exponents, signed), signed, key)
    exact(decode(*again, signed), decode(codes, exponents, signed))


@pytest.mark.parametrize("signed", [True, False])
def test_zeros_stay_zero(signed: bool) -> None:
    codes, exponents = encode(torch.zeros(2, 40), signed, 5)
    exact(codes, torch.zeros(2, 40, dtype=torch.uint8))
    exact(decode(codes, exponents, signed), torch.zeros(2, 40))


def test_second_moment_never_vanishes_beside_an_outlier() -> None:
    v = torch.full((1, 32), 1e-12)
    v[0, 3] = 1e12
    y = decode(*encode(v, False, None), False)
    assert (y > 0).all() and y[0, 3] == pytest.approx(1e12, rel=2**-5)


def test_denormals_and_the_largest_float() -> None:
    x = torch.tensor([[1e-40, -3e-39, 0.0]])
    assert (decode(*encode(x, True, None), True) - x).abs().max() <= 2.0**-131  # a unit of four bits at 2^-126
    top = torch.finfo(torch.float32).max
    assert decode(*encode(torch.tensor([[top, 1.0]]), True, None), True).isfinite().all()


def test_infinity_and_nan_are_kept() -> None:
    x = torch.tensor([[float("inf"), -float("inf"), float("nan"), 1.0]])
    y = decode(*encode(x, True, 3), True)
    assert y[0, 0] == float("inf") and y[0, 1] == -float("inf") and y[0, 2].isnan()
    assert decode(*encode(x[:, :1], False, 3), False)[0, 0] == float("inf")


def test_groups_do_not_see_each_other() -> None:
    x = torch.ones(1, 64)
    x[0, 0] = 1e20
    y = decode(*encode(x, True, None), True)
    exact(y[0, GROUP:], x[0, GROUP:])
