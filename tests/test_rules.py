"""The equations: a hand-worked step, AdamW at level 0, the rule against an entry-by-entry twin, and its invariants."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from problems import numbers
from torchfoam import FOAM
from torchfoam.kernels.eager import open_moment
from torchfoam.rules import Hyper, adam

# One row, one block of four, rho = 1, beta1 = beta2 = 0.5, eps = 0, lr = 0.1, alpha = 1, no decay.
#
# step 1: g = (1, 2, 3, 6);       fold(g) = 12 / 4 = 3,   fold(g^2) = (1 + 4 + 9 + 36) / 4 = 12.5
#         r = (-2, -1, 0, 3)      m = 0.5 * 3 = 1.5,      v = 0.5 * 12.5 = 6.25
# step 2: g = (0, 0, 4, 4);       fold(g) = 2,            fold(g^2) = 32 / 4 = 8
#         r = (-2, -2, 2, 2)      m = 0.75 + 1 = 1.75,    v = 3.125 + 4 = 7.125
HAND: dict[str, tuple[dict[str, Any], list[tuple[float, float]], list[tuple[float, float]]]] = {
    # kappa = 0.25; m / 0.5 = 3 and v / 0.5 = 12.5, so M = 3 + r = g and V = 12.5 + r^2 / 4;
    # then m / 0.75 = 7/3 and v / 0.75 = 9.5, so M = 7/3 + r and V = 9.5 + 1
    "moments": (
        {"residual_in_v": 0.25},
        [(1.0, 13.5), (2.0, 12.75), (3.0, 12.5), (6.0, 14.75)],
        [(1 / 3, 10.5), (1 / 3, 10.5), (13 / 3, 10.5), (13 / 3, 10.5)],
    ),
    # kappa = 1; M = (1.5 + r) / 0.5 and V = (6.25 + r^2) / 0.5; then (1.75 + r) / 0.75 and (7.125 + 4) / 0.75
    "whole": (
        {"bias_correction": "whole", "residual_in_v": 1.0},
        [(-1.0, 20.5), (1.0, 14.5), (3.0, 12.5), (9.0, 30.5)],
        [(-1 / 3, 11.125 / 0.75), (-1 / 3, 11.125 / 0.75), (5.0, 11.125 / 0.75), (5.0, 11.125 / 0.75)],
    ),
}


@pytest.mark.parametrize("rule", HAND)
def test_four_numbers_by_hand(rule: str) -> None:
    options, one, two = HAND[rule]
    p = nn.Parameter(torch.zeros(1, 4, dtype=torch.float64))
    opt = FOAM([{"params": [p], "level": 2}], lr=0.1, betas=(0.5, 0.5), eps=0.0, weight_decay=0.0, **options)
    p.grad = torch.tensor([[1.0, 2.0, 3.0, 6.0]], dtype=torch.float64)
    opt.step()
    assert (opt.state[p]["m"].item(), opt.state[p]["v"].item()) == (1.5, 6.25)
    first = [-0.1 * M / math.sqrt(V) for M, V in one]
    torch.testing.assert_close(p.detach()[0], torch.tensor(first, dtype=p.dtype), rtol=0, atol=1e-15)

    p.grad = torch.tensor([[0.0, 0.0, 4.0, 4.0]], dtype=torch.float64)
    opt.step()
    assert (opt.state[p]["m"].item(), opt.state[p]["v"].item()) == (1.75, 7.125)
    second = [a - 0.1 * M / math.sqrt(V) for a, (M, V) in zip(first, two)]
    torch.testing.assert_close(p.detach()[0], torch.tensor(second, dtype=p.dtype), rtol=0, atol=1e-15)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_level_0_is_adamw_for_a_hundred_steps(maximize: bool, tensor_lr: bool, weight_decay: float) -> None:
    def run(make: Any, **options: Any) -> tuple[list[Tensor], Any]:
        params = [nn.Parameter(numbers(*shape, seed=k)) for k, shape in enumerate([(5, 9), (7,), (), (2, 3, 4)])]
        lr = torch.tensor(0.01, dtype=torch.float64) if tensor_lr else 0.01
        opt = make(params, lr=lr, weight_decay=weight_decay, maximize=maximize, **options)
        plan = OneCycleLR(opt, max_lr=0.02, total_steps=101)  # turns lr and beta1
        for t in range(100):
            for k, p in enumerate(params):
                # gradients of many sizes; the last parameter has none every other step
                p.grad = None if k == 3 and t % 2 else numbers(*p.shape, seed=100 * t + k) * 10.0 ** (k - 2)
            opt.step()
            plan.step()
        return [p.detach() for p in params], opt

    theirs, adamw = run(torch.optim.AdamW)
    ours, foam = run(FOAM, level=0)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    for s, z in zip(foam.state.values(), adamw.state.values()):
        torch.testing.assert_close(s["m"], z["exp_avg"], rtol=1e-12, atol=0)
        torch.testing.assert_close(s["v"], z["exp_avg_sq"], rtol=1e-12, atol=0)
        assert s["step"] == z["step"]


def twin(p: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, h: Hyper) -> None:
    """The update, entry by entry, on [R, C]."""
    R, C = p.shape
    B = C if h.level == "row" else 2 ** int(h.level)
    for i in range(R):
        for k in range(m.shape[1]):
            columns = range(k * B, min((k + 1) * B, C))
            block = [-float(g[i, j]) if h.maximize else float(g[i, j]) for j in columns]
            mean = sum(block) / len(block)
            square = sum(x * x for x in block) / len(block) if h.second_moment == "mean_square" else mean**2
            m[i, k] = h.beta1 * m[i, k] + (1 - h.beta1) * mean
            v[i, k] = h.beta2 * v[i, k] + (1 - h.beta2) * square
            for j, x in zip(columns, block):
                r = h.residual * (x - mean)
                first, second = 1 - h.beta1**t, 1 - h.beta2**t
                if h.bias_correction == "whole":
                    M = (float(m[i, k]) + r) / first
                    V = (float(v[i, k]) + h.residual_in_v * r * r) / second
                else:
                    M = float(m[i, k]) / first + r
                    V = float(v[i, k]) / second + h.residual_in_v * r * r
                p[i, j] = p[i, j] * (1 - h.lr * h.weight_decay) - h.lr * h.scale * M / (math.sqrt(V) + h.eps)


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 21)),
    st.one_of(st.integers(0, 5), st.just("row")),
    st.sampled_from(["mean_square", "square_mean"]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([("moments", 0.0), ("moments", 0.1), ("whole", 1.0), ("whole", 0.3)]),
    st.booleans(),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=50)
def test_as_written_entry_by_entry(
    shape: tuple[int, int],
    level: Any,
    second_moment: str,
    residual: float,
    rule: tuple[str, float],
    maximize: bool,
    seed: int,
) -> None:
    h = Hyper(0.1, (0.9, 0.99), 1e-8, 0.01, level, 0.5, residual, second_moment, *rule, maximize=maximize)
    width = 1 if level == "row" else -(-shape[1] // 2**level)
    ours = [numbers(*shape, seed=seed), torch.zeros(shape[0], width).double(), torch.zeros(shape[0], width).double()]
    theirs = [x.clone() for x in ours]
    for t in (1, 2, 3):
        g = numbers(*shape, seed=seed + t)
        adam(ours[0], g, ours[1], ours[2], t, h)
        twin(theirs[0], g, theirs[1], theirs[2], t, h)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def run_adam(g: Tensor, level: Any, steps: int = 3) -> Tensor:
    p = nn.Parameter(torch.zeros_like(g))
    opt = FOAM([{"params": [p], "level": level}], lr=0.1, weight_decay=0.0)
    for t in range(steps):
        p.grad = g * (t + 1)
        opt.step()
    return p.detach()


def test_a_ragged_row_is_the_dense_one_where_nothing_is_missing() -> None:
    dense = numbers(3, 12)
    ragged = torch.cat([dense, numbers(3, 3, seed=1)], 1)
    assert torch.equal(run_adam(ragged, 2)[:, :12], run_adam(dense, 2))


def test_stacked_experts_step_as_each_would_alone() -> None:
    g = numbers(3, 5, 10)
    assert torch.equal(run_adam(g, 2), torch.stack([run_adam(x, 2) for x in g]))


def test_gradients_equal_within_blocks_make_it_adam() -> None:
    # then there is no residual: M and V are Adam's own
    g = numbers(4, 3).repeat_interleave(4, -1)
    torch.testing.assert_close(run_adam(g, 2), run_adam(g, 0), rtol=0, atol=1e-14)


def test_the_first_update_is_bounded() -> None:
    # M = g and V = s + kappa r^2 with s the block's mean square, so |u| < sqrt(B) even of a lone entry, as r^2 <= B s:
    # |u| <= sqrt(4 / (1 + 0.1 * 2.25)) there. Adam's bound is 1, and so is the mean square of a step.
    lone = torch.zeros(1, 4, dtype=torch.float64)
    lone[0, 1] = 7.0
    step = run_adam(lone, 2, steps=1).abs() / 0.1
    assert step.max() == pytest.approx(2 / math.sqrt(1 + 0.1 * 4 * (3 / 4) ** 2), rel=1e-6)
    usual = run_adam(numbers(64, 64), 2, steps=1) / 0.1
    assert 0.9 < usual.square().mean().sqrt() <= 1


@pytest.mark.parametrize("kappa", [0.1, 1.0])
def test_a_rare_gradient_moves_a_weight_by_the_stated_bound(kappa: float) -> None:
    # zeros for a while, then one entry: v has forgotten what such a gradient is like. Adam's bound holds for its m;
    # the residual's part is r / sqrt(v + kappa r^2) < 1 / sqrt(kappa), and sqrt(B / (1 - beta2)) with kappa = 0
    def last(kappa: float) -> float:
        p = nn.Parameter(torch.zeros(1, 64, dtype=torch.float64))
        opt = FOAM([{"params": [p], "level": "row"}], lr=1.0, weight_decay=0.0, residual_in_v=kappa)
        for t in range(2000):
            p.grad = torch.full_like(p, 1e-6)
            p.grad[0, 0] = 1.0 if t == 1999 else 1e-6
            before = p.detach().clone()
            opt.step()
        return float((p.detach() - before)[0, 0].abs())

    assert 0.95 / math.sqrt(kappa) < last(kappa) < 1.1 / math.sqrt(kappa)
    assert last(0.0) > 100


def test_one_huge_gradient_does_not_hold_its_row_still_for_good() -> None:
    # the mean of 4,096 squares of 1e18 overflows float32, though each square is finite: AdamW's are
    for backend in ("eager", None):
        p = nn.Parameter(torch.zeros(2, 4096))
        opt = FOAM([{"params": [p], "level": "row"}], lr=0.1, betas=(0.9, 0.9), weight_decay=0.0, backend=backend)
        for t in range(1200):
            p.grad = torch.full_like(p, 1e18 if t == 0 else 1.0)
            opt.step()
        assert opt.state[p]["v"].isfinite().all()
        before = p.detach().clone()
        opt.step()
        torch.testing.assert_close(before - p.detach(), torch.full_like(p, 0.1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("rule", ["adam", "mini", "muon"])
@pytest.mark.parametrize("level", [0, 2, "row"])
@pytest.mark.parametrize("state", ["float32", "bfloat16", "int8"])
def test_a_step_of_zero_gradient_and_zero_rate_changes_nothing(rule: str, level: Any, state: str) -> None:
    # torch's distributed checkpoints materialise missing state by such a step
    p = nn.Parameter(numbers(5, 11, dtype=torch.bfloat16))
    before = p.detach().clone()
    opt = FOAM([{"params": [p], "level": level, "rule": rule, "state": state}], lr=0.0, weight_decay=0.1)
    p.grad = torch.zeros_like(p)
    opt.step()
    assert torch.equal(p, before)
    for name in ("m", "v") if rule != "muon" else ("m",):
        assert not open_moment(opt.state[p], name, torch.float32).any()
