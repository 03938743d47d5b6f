"""Block means, their spread and what they leave out: worked numbers, and properties over random shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from problems import numbers
from torchfoam import fold, residual, unfold
from torchfoam.fold import Level, block, residual_ratio, width

LEVELS = st.one_of(st.integers(0, 6), st.just("row"))
SHAPES = st.lists(st.integers(0, 5), max_size=2).flatmap(
    lambda lead: st.integers(1, 70).map(lambda columns: (*lead, columns))
)
MATRICES = st.tuples(SHAPES, LEVELS, st.integers(0, 1000))


def brute(x: torch.Tensor, level: Level) -> torch.Tensor:
    """fold, entry by entry."""
    B = x.shape[-1] if level == "row" else 2 ** int(level)
    rows = [[sum(row[i : i + B]) / len(row[i : i + B]) for i in range(0, len(row), B)] for row in x.tolist()]
    return torch.tensor(rows, dtype=x.dtype)


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 7, 8, 9, 31, 33, 64])
@pytest.mark.parametrize("level", [0, 1, 2, 3, 8, "row"])
def test_fold_is_the_mean_of_each_block_over_its_true_length(columns: int, level: Level) -> None:
    x = numbers(3, columns)
    torch.testing.assert_close(fold(x, level), brute(x, level), rtol=0, atol=1e-14)


@given(MATRICES)
@settings(deadline=None)
def test_projection(case: tuple) -> None:
    shape, level, seed = case
    x, y = numbers(*shape, seed=seed), numbers(*shape, seed=seed + 1)
    C = shape[-1]
    down, r = fold(x, level), residual(x, level)
    up = unfold(down, level, C)
    assert down.shape == (*shape[:-1], width(level, C)) and up.shape == x.shape
    # idempotent: what is already folded folds to itself, and its residual is zero
    torch.testing.assert_close(fold(up, level), down, rtol=0, atol=1e-12)
    torch.testing.assert_close(residual(up, level), torch.zeros_like(x), rtol=0, atol=1e-12)
    # self-adjoint, hence orthogonal: <P x, y> = <x, P y> and <P x, x - P x> = 0
    other = unfold(fold(y, level), level, C)
    torch.testing.assert_close((up * y).sum(), (x * other).sum(), rtol=0, atol=1e-10)
    torch.testing.assert_close((up * r).sum(), torch.zeros((), dtype=x.dtype), rtol=0, atol=1e-10)
    # each block of the residual sums to zero
    torch.testing.assert_close(fold(r, level), torch.zeros_like(down), rtol=0, atol=1e-12)
    # |x|^2 = |P x|^2 + |r|^2, so delta = |r| / |x| lies in [0, 1]
    torch.testing.assert_close(x.square().sum(), up.square().sum() + r.square().sum(), rtol=0, atol=1e-9)
    assert r.norm() <= x.norm() * (1 + 1e-12)


@given(MATRICES)
@settings(deadline=None)
def test_linear(case: tuple) -> None:
    shape, level, seed = case
    x, y = numbers(*shape, seed=seed), numbers(*shape, seed=seed + 1)
    torch.testing.assert_close(fold(2 * x - y, level), 2 * fold(x, level) - fold(y, level), rtol=0, atol=1e-12)


@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 1000))
@settings(deadline=None)
def test_ragged_equals_dense_where_nothing_is_missing(level: int, blocks: int, seed: int) -> None:
    # the whole blocks of a ragged row fold as they do in a row without a tail, whatever the tail holds
    B = 2**level
    dense = numbers(3, blocks * B, seed=seed)
    for tail in range(1, B):
        ragged = torch.cat([dense, numbers(3, tail, seed=seed + 1)], -1)
        assert torch.equal(fold(ragged, level)[:, :blocks], fold(dense, level))
        torch.testing.assert_close(fold(ragged, level)[:, -1], ragged[:, -tail:].mean(-1), rtol=0, atol=1e-14)


def test_a_row_folds_by_itself() -> None:
    # blocks never cross rows: changing one row leaves the others' means alone, also when rows are ragged
    x = numbers(4, 10)
    y = x.clone()
    y[1] = 100
    changed = (fold(x, 2) != fold(y, 2)).any(-1)
    assert changed.tolist() == [False, True, False, False]


@pytest.mark.parametrize("level", [0, 2, "row"])
def test_scalars_vectors_and_nothing(level: Level) -> None:
    assert fold(torch.tensor(3.0), level) == 3 and unfold(torch.tensor(3.0), level, 1) == 3
    assert residual(torch.tensor(3.0), level) == 0
    for shape in [(0,), (3, 0), (0, 5)]:
        x = torch.zeros(shape)
        assert unfold(fold(x, level), level, shape[-1]).shape == shape


def test_results_are_new_tensors() -> None:
    for level in (0, 1, "row"):
        for x in (torch.ones(2, 4), torch.ones(1, 1), torch.ones(2, 1)):
            for y in (fold(x, level), unfold(fold(x, level), level, x.shape[-1]), residual(x, level)):
                y.add_(1)
            assert torch.equal(x, torch.ones_like(x))


def test_non_contiguous_input() -> None:
    x = numbers(9, 6)
    assert torch.equal(fold(x.T, 2), fold(x.T.contiguous(), 2))
    assert torch.equal(fold(x[:1].expand(9, 6), 2), fold(x[:1].repeat(9, 1), 2))


@pytest.mark.parametrize("level", [-1, 31, 10**400, 1.0, True, "rows", None])
def test_nonsense_levels(level: Any) -> None:
    with pytest.raises(ValueError, match="level must be an integer from 0 to 30 or 'row', got"):
        fold(torch.ones(2, 4), level)


def test_a_block_longer_than_the_row_is_the_row() -> None:
    assert block(8, 10) == block("row", 10) == block(30, 10) == 10
    x = numbers(3, 10)
    assert torch.equal(fold(x, 8), fold(x, "row"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_ratio_of_what_is_not_finite_is_nan(value: float) -> None:
    x = torch.ones(2, 8)
    x[0, 0] = value
    assert math.isnan(residual_ratio(x, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [3e38, 1e30, 1e20, 1.0, 1e-20, 1e-30, 1e-38])
@pytest.mark.parametrize(("level", "columns"), [(2, 12), (2, 13), ("row", 12), (0, 12)])
def test_the_ratio_does_not_depend_on_the_size_of_the_numbers(
    dtype: torch.dtype, size: float, level: Level, columns: int
) -> None:
    x = numbers(5, columns).clamp(-1, 1).mul(size).to(dtype)
    wide = x.double() / size
    expected = float(residual(wide, level).norm() / wide.norm())
    assert residual_ratio(x, level) == pytest.approx(expected, abs=2e-3 if level == 0 else 1e-4)
