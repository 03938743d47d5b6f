"""Statistics against printed tables, closed forms and hand arithmetic."""

from __future__ import annotations

import math

import pytest

from foamlab.stats import mean, paired, reach, t_cdf, t_quantile, verdict


@pytest.mark.parametrize(
    ("df", "p", "t"),
    [  # the usual printed table of Student's t
        (1, 0.975, 12.706),
        (2, 0.975, 4.303),
        (3, 0.975, 3.182),
        (4, 0.975, 2.776),
        (9, 0.95, 1.833),
        (10, 0.975, 2.228),
        (30, 0.995, 2.750),
        (120, 0.975, 1.980),
    ],
)
def test_t_table(df: int, p: float, t: float) -> None:
    assert t_quantile(p, df) == pytest.approx(t, abs=6e-4)
    assert t_quantile(1 - p, df) == pytest.approx(-t, abs=6e-4)
    assert t_cdf(t_quantile(p, df), df) == pytest.approx(p, abs=1e-12)


@pytest.mark.parametrize("t", [-3.0, -0.2, 0.0, 1.0, 7.5])
def test_t_closed_forms(t: float) -> None:
    assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-14)
    assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-14)


@pytest.mark.parametrize("df", [3, 4, 7, 8])
def test_t_cdf_is_the_integral_of_the_density(df: int) -> None:
    c = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
    n, end = 2000, 1.7
    density = [c * (1 + (end * i / n) ** 2 / df) ** (-(df + 1) / 2) for i in range(n + 1)]
    simpson = end / n / 3 * (density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2]))
    assert t_cdf(end, df) == pytest.approx(0.5 + simpson, abs=1e-12)


def test_mean_by_hand() -> None:
    # 1, 2, 3: mean 2, s = 1, half width 4.30265 / sqrt(3)
    m = mean([1.0, 2.0, 3.0])
    assert (m.mean, m.n) == (2.0, 3)
    assert m.high - m.mean == pytest.approx(4.302653 / math.sqrt(3), abs=1e-5)
    assert m.mean - m.low == pytest.approx(m.high - m.mean)
    assert str(m) == "2 (95% interval -0.4841 to 4.484, n = 3)"


def test_mean_keeps_divergence_and_single_values_honest() -> None:
    one = mean([1.5])
    assert one.mean == 1.5 and math.isnan(one.low) and math.isnan(one.high) and "n = 1" in str(one)
    assert math.isnan(mean([1.0, math.nan]).mean) and math.isnan(mean([1.0, math.inf]).mean)
    for bad in (lambda: mean([]), lambda: mean([1.0], confidence=1.0)):
        with pytest.raises(ValueError):
            bad()


def test_paired_by_hand() -> None:
    # d = -1, -2, -3: t = -2 / (1 / sqrt(3)) = -3.4641, df 2: p = 1 - t / sqrt(2 + t^2) = 1 - sqrt(12 / 14)
    r = paired([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    assert r.difference.mean == -2 and (r.below, r.above, r.n) == (3, 0, 3)
    assert r.p == pytest.approx(1 - math.sqrt(12 / 14), abs=1e-10)
    assert r.p_sign == 0.25  # 2 / 2^3
    # five of six one way, one tie: 2 * (1 + 6) / 64
    r = paired([0, 0, 0, 0, 0, 2, 5], [1, 2, 1, 2, 1, 1, 5])
    assert r.p_sign == pytest.approx(14 / 64) and (r.below, r.above) == (5, 1)


def test_paired_edges() -> None:
    assert paired([1, 2], [2, 3]).p == 0.0  # no spread at all, a real shift
    assert paired([1, 2], [1, 2]).p == 1.0 and paired([1, 2], [1, 2]).p_sign == 1.0
    assert math.isnan(paired([1], [2]).p)
    nan = paired([1, math.nan], [2, 2])
    assert math.isnan(nan.p) and math.isnan(nan.p_sign)
    with pytest.raises(ValueError, match="as many"):
        paired([1], [1, 2])


def test_verdict_claims_no_more_than_n_allows() -> None:
    # the early evidence of three seeds: FOAM level 2 against AdamW with split learning rates
    foam, adamw = [1.490, 1.528, 1.486], [1.553, 1.543, 1.565]
    words = verdict("FOAM", "AdamW", paired(foam, adamw))
    assert words.startswith("FOAM is lower than AdamW on average, but not beyond chance") and "n = 3" in words
    assert verdict("AdamW", "FOAM", paired(adamw, foam)) == words
    assert verdict("a", "b", paired([1, 2, 3], [2, 3.1, 4])).startswith("a beats b")
    assert "cannot be compared" in verdict("a", "b", paired([math.nan], [1]))
    assert "equal" in verdict("a", "b", paired([1, 2], [2, 1]))


def test_reach_interpolates_between_evaluations() -> None:
    assert reach([0, 100, 200], [5, 3, 2], 4) == 50
    assert reach([0, 100, 200], [5, 3, 2], 2.25) == 175
    assert reach([10, 20], [2, 1], 3) == 10
    assert reach([0, 100], [5, 3], 1) is None and reach([], [], 1) is None
    assert reach([0, 50, 100], [5, math.nan, 3], 4) == 50
    assert reach([0, 1, 2], [3, 2, 3], 2) == 1
