"""Narrow storage: stochastic rounding keeps the mean and repeats itself; codes are the nearest ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from problems import numbers
from torchfoam import FOAM
from torchfoam.quant import GROUP, decode, encode, mix, noise, noise_key, round_stochastic


def test_mix_is_a_permutation_and_the_tensor_form_agrees() -> None:
    assert len({mix(x) for x in range(1 << 16)}) == 1 << 16
    key = noise_key(seed=-3, step=7, tensor=2, stream=1)
    bits = noise(key, torch.Size([5, 7]), torch.device("cpu"))
    want = [mix(key ^ i // 2) >> i % 2 * 16 & 0xFFFF for i in range(35)]
    assert bits.flatten().tolist() == want
    for first in range(1, 35):  # the part of a tensor that begins anywhere
        assert noise(key, torch.Size([35 - first]), torch.device("cpu"), first=first).tolist() == want[first:]
    # rows numbered for themselves
    rows = noise(key, torch.Size([3, 4]), torch.device("cpu"), first=torch.tensor([5, 12, 30]))
    assert rows.tolist() == [want[5:9], want[12:16], want[30:34]]
    wide = noise(key, torch.Size([35]), torch.device("cpu"), bits=19)
    assert wide.tolist() == [mix(key ^ i // 2) >> i % 2 * 13 & 0x7FFFF for i in range(35)]


def test_noise_differs_by_seed_step_tensor_and_stream() -> None:
    keys = {noise_key(a, b, c, d) for a in range(4) for b in range(4) for c in range(4) for d in range(3)}
    assert len(keys) == 4 * 4 * 4 * 3


def test_rounding_keeps_the_mean_and_goes_to_a_neighbour() -> None:
    # 1 + 2^-9 lies a quarter of the way from 1 to the next bfloat16, 1 + 2^-7
    x = torch.full((200_000,), 1 + 2.0**-9)
    y = round_stochastic(x, key=12345).double()
    assert set(y.unique().tolist()) == {1.0, 1 + 2.0**-7}
    up = float((y > 1).double().mean())
    assert abs(up - 0.25) < 5 * (0.25 * 0.75 / 200_000) ** 0.5  # five standard deviations
    assert round_stochastic(-x, key=12345).double().equal(-y)


def test_what_bfloat16_holds_comes_through() -> None:
    x = torch.tensor([0.0, -0.0, 1.5, -(2.0**-133), 3.3895313892515355e38, torch.inf, -torch.inf])
    assert torch.equal(round_stochastic(x, key=99).view(torch.int16), x.bfloat16().view(torch.int16))
    assert round_stochastic(torch.tensor([torch.nan]), key=1).isnan().all()


@pytest.mark.parametrize("state", ["bfloat16", "float32"])
def test_a_bfloat16_weight_moves_where_rounding_to_nearest_stalls(state: str) -> None:
    def moved(stochastic: bool) -> float:
        w = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        opt = FOAM([w], lr=1e-4, weight_decay=0.0, stochastic=stochastic, state=state)
        for _ in range(50):
            w.grad = torch.ones_like(w)
            opt.step()
        return 1 - float(w.detach().double().mean())

    assert moved(stochastic=False) == 0
    assert abs(moved(stochastic=True) - 50e-4) < 5e-4


@pytest.mark.parametrize("stochastic", [True, False])
def test_a_slow_average_in_bfloat16_follows_the_gradient(stochastic: bool) -> None:
    # v climbs as 1 - 0.999^t; rounded to nearest it stops at 0.25, where its step is under half an ulp
    w = nn.Parameter(torch.zeros(8, 512))
    opt = FOAM([w], lr=0.0, state="bfloat16", stochastic=stochastic)
    for _ in range(700):
        w.grad = torch.ones_like(w)
        opt.step()
    v = float(opt.state[w]["v"].double().mean())
    assert abs(v / (1 - 0.999**700) - 1) < 0.02 if stochastic else v == 0.25


def test_noise_follows_the_step_not_the_history() -> None:
    def run(cut: int | None) -> torch.Tensor:
        w = nn.Parameter(numbers(9, 10, dtype=torch.bfloat16))
        opt = FOAM([w], lr=1e-2, state="bfloat16", seed=4)
        for t in range(6):
            if t == cut:
                saved, old = opt.state_dict(), w
                w = nn.Parameter(old.detach().clone())
                opt = FOAM([w], lr=1e-2, state="bfloat16", seed=4)
                opt.load_state_dict(saved)
            w.grad = numbers(9, 10, seed=t, dtype=torch.bfloat16)
            opt.step()
        return w.detach()

    assert torch.equal(run(None), run(3))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
def test_nearest_codes(signed: bool, columns: int) -> None:
    # within the octaves that codes span, the nearest code is at most 2^-5 away: half a gap of four mantissa bits
    x = numbers(4, columns, dtype=torch.float32).mul(1e-3)
    x = x if signed else x.square()
    codes, exponents = encode(x, signed, key=None)
    assert codes.dtype == exponents.dtype == torch.uint8
    assert codes.shape == x.shape and exponents.shape == (4, -(-columns // GROUP))
    largest = torch.stack([c.abs().amax(-1) for c in x.split(GROUP, -1)], -1).repeat_interleave(GROUP, -1)[:, :columns]
    inside = x.abs() > largest * 2.0 ** (-6 if signed else -14)
    y = decode(codes, exponents, signed)
    assert inside.any()
    assert ((y - x).abs() <= x.abs() * 2.0**-5)[inside].all()
    # what is decoded encodes to itself: a moment that has not moved is not rounded again
    again = encode(y, signed, key=7)
    assert torch.equal(decode(*again, signed), y)


@pytest.mark.parametrize("signed", [True, False])
def test_stochastic_codes_keep_the_mean(signed: bool) -> None:
    x = torch.full((20_000, 4), 1.01)
    x[:, 1:] = torch.tensor([0.5, 0.013, 2.0**-5])
    y = torch.cat([decode(*encode(x, signed, key), signed) for key in range(10)]).double()
    error = (y.mean(0) / x[0].double() - 1).abs()
    assert (error < 2e-3).all(), error


def test_zero_stays_zero_and_small_second_moments_stay_above_it() -> None:
    zeros = torch.zeros(3, 40)
    for signed in (True, False):
        assert not decode(*encode(zeros, signed, key=5), signed).any()
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 1.0, 1e-12  # v stands under a division: raised to the smallest code, not to zero
    assert decode(*encode(x, False, key=5), False)[0, 1] > 0


def test_a_step_count_on_a_device_gives_the_same_noise() -> None:
    x = numbers(5, 7, dtype=torch.float32)
    step = torch.tensor(12)
    on_device = noise_key(-3, step, 5, 1)
    assert on_device.item() == noise_key(-3, 12, 5, 1) and step.item() == 12
    assert torch.equal(round_stochastic(x, on_device), round_stochastic(x, noise_key(-3, 12, 5, 1)))
