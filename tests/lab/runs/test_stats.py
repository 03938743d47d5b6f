"""Statistics against printed tables, closed forms and hand arithmetic."""

from __future__ import annotations

import math
import random
import re
from itertools import pairwise

import pytest

from foamlab.runs.stats import equivalence, mean, paired, reach, t_cdf, t_quantile, verdict


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
    for a, b in (([1, 2], [2, 3]), ([0.1, 0.2], [0.4, 0.5]), ([1, 2], [1, 2]), ([1], [2])):
        assert math.isnan(paired(a, b).p)  # no spread, but for rounding
    assert paired([1, 2], [1, 2]).p_sign == 1.0
    nan = paired([1, math.nan], [2, 2])
    assert math.isnan(nan.p) and math.isnan(nan.p_sign)
    with pytest.raises(ValueError, match="as many"):
        paired([1], [1, 2])


def spaced(centre: float, t: float) -> list[float]:
    """Three differences around a centre, of standard error 1 / t."""
    return [centre - math.sqrt(3) / t, centre, centre + math.sqrt(3) / t]


@pytest.mark.parametrize("centre", [-0.25, 0.25, 0.0])
@pytest.mark.parametrize(
    ("p", "t"),  # one-sided, df = 2, of the printed table
    [(0.1, 1.886), (0.05, 2.920), (0.025, 4.303), (0.01, 6.965), (0.005, 9.925)],
)
def test_equivalence_against_the_table(centre: float, p: float, t: float) -> None:
    """(|mean| - margin) / error = -t, whichever side of 0 the mean is: p is the table's one-sided level."""
    margin = abs(centre) + 1
    e = equivalence(spaced(centre, t), margin, alpha=0.05)
    assert e.p == pytest.approx(p, rel=2e-3) and e.holds == (e.p < 0.05) and e.n == 3
    # at level p the interval just touches the margin, on the side of the mean; 1 - 2 p is its confidence
    touching = equivalence(spaced(centre, t), margin, alpha=p)
    assert touching.interval.confidence == 1 - 2 * p
    assert max(-touching.interval.low, touching.interval.high) == pytest.approx(margin, rel=1e-3)


def test_equivalence_closed_forms() -> None:
    # df 1: P(T <= t) = 1/2 + atan(t) / pi; d = 0.1, 0.3: mean 0.2, error 0.1, t = (0.2 - 0.5) / 0.1 = -3
    assert equivalence([0.1, 0.3], 0.5).p == pytest.approx(0.5 - math.atan(3) / math.pi, abs=1e-12)
    # df 2: t = (2 - 6) / (1 / sqrt(3)) = -4 sqrt(3), P = (1 - t / sqrt(2 + t^2)) / 2 = (1 - sqrt(48 / 50)) / 2
    assert equivalence([1.0, 2.0, 3.0], 6).p == pytest.approx((1 - math.sqrt(0.96)) / 2, abs=1e-12)
    # a mean at the margin: even chances; beyond it: more
    assert equivalence([1.0, 2.0, 3.0], 2).p == pytest.approx(0.5) and equivalence([1.0, 2.0, 3.0], 1).p > 0.5


def test_equivalence_is_the_interval_within_the_margin() -> None:
    draw = random.Random(3)
    seen = set()
    for _ in range(300):
        d = [draw.gauss(draw.choice([0, 0.5]), 1) for _ in range(draw.randint(2, 9))]
        alpha = draw.choice([0.05, 0.05 / 28, 0.2])
        e = equivalence(d, 1.0, alpha)
        inside = max(-e.interval.low, e.interval.high) < 1
        assert e.holds == inside == (("not shown" not in str(e)) and "equivalent" in str(e))
        assert e.p == pytest.approx(equivalence([-x for x in d], 1.0).p)
        # the larger of the two one-sided tests
        s = math.sqrt(sum((x - e.interval.mean) ** 2 for x in d) / (e.n - 1) / e.n)
        below, above = (1 - t_cdf((e.interval.mean + 1) / s, e.n - 1), t_cdf((e.interval.mean - 1) / s, e.n - 1))
        assert e.p == pytest.approx(max(below, above), abs=1e-12)
        seen.add(e.holds)
    assert seen == {True, False}
    wider = [equivalence([0.1, 0.4, -0.2], margin).p for margin in (0.1, 0.5, 1, 5)]
    assert all(a > b for a, b in pairwise(wider))


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ([0.001], "one value shows no spread (n = 1)"),
        ([0.001, math.nan, 0.0], "a difference is not finite (n = 3)"),
        ([math.inf, 0.0], "a difference is not finite (n = 2)"),
        ([0.0, 0.0], "all differences are 0, they show no spread (n = 2)"),
        ([0.003] * 3, "all differences are 0.003, they show no spread (n = 3)"),
        ([0.1 + 0.2 - 0.3, 0.0, 0.0], "they show no spread (n = 3)"),
    ],
)
def test_equivalence_without_a_test_never_holds(differences: list[float], words: str) -> None:
    e = equivalence(differences, 0.01)
    assert not e.holds and math.isnan(e.p) and str(e).startswith("equivalence cannot be tested") and words in str(e)


def test_equivalence_is_told_with_its_interval_and_level() -> None:
    said = str(equivalence([0.001, -0.002, 0.004, 0.001], 0.01, alpha=0.05 / 28))
    assert said.startswith("not shown to be equivalent within 0.01 (mean difference 0.001, 99.64% interval -0.00")
    assert "p = 0.0026, where p < 0.0018 is asked, n = 4" in said


@pytest.mark.parametrize(
    ("margin", "alpha"), [(0, 0.05), (-1, 0.05), (math.nan, 0.05), (math.inf, 0.05), (1, 0), (1, 0.5), (1, math.nan)]
)
def test_equivalence_refuses_what_is_no_margin_or_level(margin: float, alpha: float) -> None:
    with pytest.raises(ValueError, match=r"got (0|-1|nan|inf|0\.5)$"):
        equivalence([1.0, 2.0], margin, alpha)
    with pytest.raises(ValueError, match="no values"):
        equivalence([], 1.0)


def test_verdict_claims_no_more_than_n_allows() -> None:
    # the early evidence of three seeds: FOAM level 2 against AdamW with split learning rates
    foam, adamw = [1.490, 1.528, 1.486], [1.553, 1.543, 1.565]
    words = verdict("FOAM", "AdamW", paired(foam, adamw))
    assert words.startswith("FOAM and AdamW cannot be distinguished (") and "n = 3" in words
    assert verdict("AdamW", "FOAM", paired(adamw, foam)) == words and "FOAM lower in 3 of 3 seeds" in words
    assert verdict("a", "b", paired([1, 2, 3], [2, 3.1, 4])).startswith("a beats b")
    assert "cannot be compared" in verdict("a", "b", paired([math.nan], [1]))
    assert verdict("a", "b", paired([1, 2], [2, 1])).startswith("a and b cannot be distinguished")
    shifted = verdict("a", "b", paired([0.1, 0.2], [0.4, 0.5]), margin=0.5)
    assert shifted == "a is lower than b by 0.3 with every seed (n = 2): there is no spread to test"
    assert "with the same loss, seed by seed (n = 2)" in verdict("a", "b", paired([1, 2], [1, 2]), margin=0.01)
    assert "one seed (n = 1)" in verdict("a", "b", paired([1.0], [1.001]), margin=0.01)


LEVEL = ([0.1 + 0.001 * (-1) ** k * (1 + k / 4) for k in range(4)], [0.1] * 4)  # p of the equivalence: 0.0006


@pytest.mark.parametrize(
    ("a", "b", "alpha", "margin", "untrusted", "head", "confidences"),
    [
        (*LEVEL, 0.05, 0.01, "", "a is level with b within 0.01 nat (", [0.9]),
        (*LEVEL, 0.01, 0.01, "", "a is level with b within 0.01 nat (", [0.98]),
        (*LEVEL, 1e-4, 0.01, "", "a and b cannot be distinguished, nor shown to be level within 0.01 nat (", [0.9999]),
        (*LEVEL, 0.05, 0.0, "", "a and b cannot be distinguished (", [0.95]),
        (*LEVEL, 0.05, 0.001, "", "a and b cannot be distinguished, nor shown to be level within 0.001 nat (", [0.95]),
        ([1, 2, 3], [2, 3.1, 4], 0.05, 0.01, "", "a beats b (", [0.95]),
        ([1, 2, 3], [2, 3.1, 4], 0.01, 0.01, "", "a beats b (", [0.99]),
        ([1, 2, 3], [1.004, 2.0041, 3.004], 0.05, 0.01, "", "a beats b, by less than 0.01 nat (", [0.95, 0.9]),
        ([1, 2, 3], [1.004, 2.0041, 3.004], 0.05, 0.01, "b", "a beats b (", [0.95]),
        ([1, 2, 3], [1.004, 2.0041, 3.004], 0.05, 0.01, "a", "nothing is claimed of a and b, as a did not", [0.95]),
        (*LEVEL, 0.05, 0.01, "b", "nothing is claimed of a and b, as b did not finish with every seed", [0.95]),
    ],
)
def test_a_verdict_tells_the_interval_of_the_test_that_decides(
    a: list[float], b: list[float], alpha: float, margin: float, untrusted: str, head: str, confidences: list[float]
) -> None:
    b = [x + 1e-9 for x in b]  # so that a is the lower one
    result = paired(a, b)
    words = verdict("a", "b", result, alpha, margin, untrusted)
    assert words.startswith(head) and f"n = {len(a)})" in words, words
    assert re.findall(r"[\d.]+% interval [^ ]+ to [^ ,;]+", words) == [
        mean(result.differences, confidence).between for confidence in confidences
    ]
    assert ("two one-sided tests p" in words) == (margin > 0)
    assert (f"where p < {alpha:.2g} is asked" in words) == (alpha < 0.05)
    assert words == verdict("b", "a", paired(b, a), alpha, margin, untrusted)


def test_a_verdict_says_what_its_interval_shows() -> None:
    """Beats: off 0. Level: within the margin. Neither: holds 0, and reaches beyond the margin."""
    draw = random.Random(5)
    heads = set()
    for _ in range(500):
        n, shift, alpha = draw.randint(2, 7), draw.choice([0, 0.005, 0.03]), draw.choice([0.05, 0.05 / 6])
        b = [draw.gauss(5, 0.1) for _ in range(n)]
        a = [x + draw.gauss(shift, draw.choice([0.003, 0.02])) for x in b]
        words = verdict("a", "b", paired(a, b), alpha, 0.01)
        told = [tuple(map(float, pair)) for pair in re.findall(r"interval ([^ ]+) to ([^ ,;]+)", words)]
        beats, level = "beats" in words, "is level with" in words or "by less than 0.01 nat" in words
        heads.add((beats, level))
        assert not level or max(map(abs, told[-1])) <= 0.01
        assert not beats or told[0][1] < 0
        assert beats or level or (told[0][0] <= 0 <= told[0][1] and max(map(abs, told[0])) >= 0.01)
    assert heads == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize("shift", [0.0, 0.005, 0.01, -0.01, 0.02])
def test_false_sentences_are_as_rare_as_promised(shift: float) -> None:
    """Chance around a true difference, margin 0.01: any false claim in at most 5 % of 4,000, but for two deviations.

    False is "level" where the difference is the margin or more, "beats" where there is none or it is the other way.
    """
    draw, runs, n = random.Random(11), 4000, 5
    false = level = beats = 0
    for _ in range(runs):
        b = [draw.gauss(5, 0.1) for _ in range(n)]
        words = verdict("a", "b", paired([x + draw.gauss(shift, 0.004) for x in b], b), 0.05, 0.01)
        says_level, says_beats = "is level with" in words or "by less than" in words, "beats" in words
        level, beats = level + says_level, beats + says_beats
        wrong_way = says_beats and not words.startswith("b beats" if shift > 0 else "a beats" if shift < 0 else "none")
        false += wrong_way or (says_level and abs(shift) >= 0.01)
    deviation = 2 * math.sqrt(0.05 * 0.95 * runs)
    assert false <= 0.05 * runs + deviation
    if shift in (0.0, 0.01, -0.01):  # where a test is at its edge it uses its 5 %
        assert (beats if shift == 0 else level) == pytest.approx(0.05 * runs, abs=deviation)
    if abs(shift) < 0.01:
        assert level > 0.6 * runs, "it is deaf"


def test_reach_interpolates_between_evaluations() -> None:
    assert reach([0, 100, 200], [5, 3, 2], 4) == 50
    assert reach([0, 100, 200], [5, 3, 2], 2.25) == 175
    assert reach([10, 20], [2, 1], 3) == 10
    assert reach([0, 100], [5, 3], 1) is None and reach([], [], 1) is None
    assert reach([0, 50, 100], [5, math.nan, 3], 4) == 50
    assert reach([0, 1, 2], [3, 2, 3], 2) == 1
