"""What may be said from a handful of seeds: means with intervals, paired tests, equivalence, the cost of a loss.

Every result carries its n. This room knows numbers only: no run folders, no drawing, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

MARGIN = 0.01  # nat: what "level with" asks for unless a contest says otherwise


@dataclass(frozen=True)
class Mean:
    """A mean with its interval; `low` and `high` are NaN when n < 2, since one value shows no spread."""

    mean: float
    low: float
    high: float
    n: int
    confidence: float = 0.95

    @property
    def error(self) -> float:
        """The standard error s / sqrt(n), NaN when n < 2."""
        if math.isnan(self.high):
            return math.nan
        return (self.high - self.low) / 2 / t_quantile((1 + self.confidence) / 2, self.n - 1)

    @property
    def between(self) -> str:
        """The interval in words, with its confidence, and with digits enough that its ends differ by two."""
        size, width = max(abs(self.low), abs(self.high)), self.high - self.low
        digits = max(3, 2 + math.ceil(math.log10(size / width))) if 0 < width < math.inf else 3
        return f"{percent(self.confidence)} interval {self.low:.{digits}g} to {self.high:.{digits}g}"

    def __str__(self) -> str:
        if self.n < 2:
            return f"{self.mean:.4g} (n = {self.n})"
        return f"{self.mean:.4g} ({percent(self.confidence)} interval {self.low:.4g} to {self.high:.4g}, n = {self.n})"


@dataclass(frozen=True)
class Paired:
    """Differences a - b over pairs (the same seed, say).

    `p` is the two-sided p-value of the paired t test, NaN with n < 2, without spread, or with a loss that is not
    finite; `p_sign` that of the sign test.
    """

    differences: tuple[float, ...]
    difference: Mean
    below: int
    above: int
    p: float
    p_sign: float

    @property
    def n(self) -> int:
        return self.difference.n


@dataclass(frozen=True)
class Equivalence:
    """What two one-sided tests say of a mean difference and the margin -`margin` to `margin`: see `equivalence`.

    `interval` is the mean with its (1 - 2 alpha) interval; `p` is NaN where the differences allow no test.
    """

    interval: Mean
    margin: float
    alpha: float
    p: float

    @property
    def n(self) -> int:
        return self.interval.n

    @property
    def holds(self) -> bool:
        """Whether the difference is shown to lie within the margin; never because a test is missing."""
        return self.p < self.alpha

    def __str__(self) -> str:
        d = self.interval
        if math.isnan(d.mean):
            return f"equivalence cannot be tested: a difference is not finite (n = {d.n})"
        if math.isnan(self.p):
            why = "one value shows" if d.n < 2 else f"all differences are {d.mean:.3g}, they show"
            return f"equivalence cannot be tested: {why} no spread (n = {d.n})"
        return (
            f"{'equivalent' if self.holds else 'not shown to be equivalent'} within {self.margin:g} (mean difference "
            f"{d.mean:.3g}, {d.between}; two one-sided tests p {small(self.p)}{_asked(self.alpha)}, n = {d.n})"
        )


def percent(share: float) -> str:
    """A confidence in per cent, its distance from 100 with two digits.

    >>> percent(0.95), percent(1 - 0.05 / 28), percent(1 - 0.05 / 3)
    ('95%', '99.82%', '98.3%')
    """
    return f"{100 - float(f'{100 * (1 - share):.2g}'):.10g}%"


def small(p: float) -> str:
    """A p-value with its sign; t_cdf is exact to about 1e-15, so that less is not told from 0.

    >>> small(0.0123), small(0.0)
    ('= 0.012', '< 1e-12')
    """
    return "< 1e-12" if p < 1e-12 else f"= {p:.2g}"


def _asked(alpha: float) -> str:
    return f", where p < {alpha:.2g} is asked" if alpha < 0.05 else ""


def t_cdf(t: float, df: int) -> float:
    """P(T <= t) of Student's t with whole `df` >= 1, by its finite series in sin and cos of atan(t / sqrt(df)).

    >>> round(t_cdf(2.776445, 4), 6)
    0.975
    """
    if df < 1 or df != int(df):
        raise ValueError(f"df must be a whole number >= 1, got {df}")
    if math.isnan(t):
        return math.nan
    theta = math.atan(t / math.sqrt(df))
    sin, cos2 = math.sin(theta), math.cos(theta) ** 2
    odd = df % 2
    # A(t) = P(|T| <= t), signed: even df: sin (1 + 1/2 cos^2 + 1*3/(2*4) cos^4 + ...);
    # odd df: 2/pi (theta + sin cos (1 + 2/3 cos^2 + 2*4/(3*5) cos^4 + ...)).
    term, total = 1.0, 0.0
    for k in range(df // 2):
        total += term
        term *= cos2 * (2 * k + 1 + odd) / (2 * k + 2 + odd)
    inside = 2 / math.pi * (theta + sin * math.cos(theta) * total) if odd else sin * total
    return min(max(0.5 + inside / 2, 0.0), 1.0)  # far out the sum is rounded beyond its limit


@lru_cache(256)
def t_quantile(p: float, df: int) -> float:
    """The t with t_cdf(t, df) = p, for 0 < p < 1, by bisection to double precision."""
    if not 0 < p < 1:
        raise ValueError(f"p must lie between 0 and 1, got {p}")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def mean(values: Sequence[float], confidence: float = 0.95) -> Mean:
    """Mean and t-interval, mean +- t((1 + confidence) / 2, n - 1) * s / sqrt(n), s the sample deviation.

    A NaN among the values (a diverged run) makes mean and interval NaN: it is not silently left out.
    Raises ValueError when there is no value or the confidence is not between 0 and 1.
    """
    if not values:
        raise ValueError("mean of no values; give at least one run")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    n = len(values)
    centre = math.fsum(x / n for x in values) if all(map(math.isfinite, values)) else math.nan
    if n < 2 or math.isnan(centre):
        return Mean(centre, math.nan, math.nan, n, confidence)
    s = math.hypot(*(x - centre for x in values)) / math.sqrt(n - 1)  # no square: 1e200 is a loss, if a bad one
    half = t_quantile((1 + confidence) / 2, n - 1) * s / math.sqrt(n)
    return Mean(centre, centre - half, centre + half, n, confidence)


def paired(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Paired:
    """Compare a with b where a[i] and b[i] share a seed. d = a - b, t = mean(d) / (s_d / sqrt(n)), df = n - 1.

    The sign test leaves ties out. Raises ValueError for unequal lengths or no pair.
    """
    if len(a) != len(b):
        raise ValueError(f"a paired test needs as many a as b, got {len(a)} and {len(b)}")
    return _paired([x - y for x, y in zip(a, b)], confidence)


def _paired(d: Sequence[float], confidence: float) -> Paired:
    difference = mean(d, confidence)
    below, above = sum(x < 0 for x in d), sum(x > 0 for x in d)
    p = math.nan if _still(d) else 2 * t_cdf(-abs(difference.mean) / difference.error, difference.n - 1)
    finite = all(map(math.isfinite, d))
    return Paired(tuple(d), difference, below, above, p, _sign_test(below, above) if finite else math.nan)


def equivalence(differences: Sequence[float], margin: float, alpha: float = 0.05) -> Equivalence:
    """Whether paired differences d are shown to lie within +-margin on average: two one-sided t tests (TOST).

    The nulls are E[d] <= -margin, E[d] >= margin; both must be rejected at alpha. With e = s_d / sqrt(n), df = n - 1:

        p = max(P(T >= (mean(d) + margin) / e), P(T <= (mean(d) - margin) / e)) = P(T <= (|mean(d)| - margin) / e),

    and p < alpha is the same as: the (1 - 2 alpha) interval of the mean lies within the margin. The chance of a false
    claim is at most alpha, and near alpha where E[d] is at the margin and e is small beside it. (D. J. Schuirmann, A
    comparison of the two one-sided tests procedure and the power approach for assessing the equivalence of average
    bioavailability, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987, 657-680.)

    Where no test is possible p is NaN and nothing holds: with n < 2, with a difference that is not finite, and with
    differences that are all the same but for rounding, which are no sample of what chance does.

    >>> told = equivalence([0.001, -0.002, 0.004, 0.001], margin=0.01)
    >>> told.holds, round(told.p, 4), round(told.interval.low, 5), round(told.interval.high, 5)
    (True, 0.0026, -0.00188, 0.00388)

    Raises ValueError when there is no difference, margin is not a finite number above 0, or alpha not in (0, 0.5).
    """
    if not 0 < margin < math.inf:
        raise ValueError(f"margin must be a finite number above 0, got {margin}")
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must lie between 0 and 0.5, got {alpha}")
    interval = mean(differences, 1 - 2 * alpha)
    still = _still(differences, margin)
    p = math.nan if still else t_cdf((abs(interval.mean) - margin) / interval.error, interval.n - 1)
    return Equivalence(interval, margin, alpha, p)


def _still(d: Sequence[float], scale: float = 0.0) -> bool:
    """Whether differences are the same but for rounding, at their own size or that of `scale`: no sample of chance."""
    return not max(d) - min(d) > 1e-12 * max(scale, 1e-280, *map(abs, d))  # NaN is no spread either


def _sign_test(below: int, above: int) -> float:
    """Two-sided: the chance that fair coins split at least as unevenly."""
    n = below + above
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(below, above) + 1)) / 2**n
    return min(1.0, 2 * tail)


def verdict(
    a: str, b: str, result: Paired, alpha: float = 0.05, margin: float = 0.0, untrusted: Collection[str] = ()
) -> str:
    """`result` of paired(losses of a, losses of b) in words: one beats the other, is level with it, or neither.

    "Beats" needs p < alpha in the t test; "level with" p < alpha in the two one-sided tests against `margin` (in nat; 0
    asks for none); both may hold of a difference that is real and small. Neither is ever said because the other fails.
    The interval is that of the test which decides: of 1 - alpha, off 0 where one beats, else holding 0 and reaching
    beyond the margin; of 1 - 2 alpha, within the margin, where they are level.

    The chance that a sentence is false is at most alpha for both claims together. At no difference only "beats" can be
    false. With a difference within the margin only "beats" the wrong way round can. With one of at least the margin,
    "level" and the wrong "beats" both need a mean that lies at least t(1 - alpha) standard errors inside that end of
    the margin, which happens with probability alpha at most. (J. J. Goeman, A. Solari and T. Stijnen, Three-sided
    hypothesis testing, Statistics in Medicine 29, 2010, 2117-2125.) So where k pairs could be told, alpha = 0.05 / k
    for each of the two keeps the chance of any false sentence at 0.05 (Bonferroni): no part of it is set apart for
    "level". That two tests must pass for "level" asks for no correction, since both must.

    Args:
        untrusted: those that lost runs. What is left of them is no sample: nothing is claimed in their favour.

    >>> verdict("foam", "adamw", paired([1.0], [2.0]))
    'foam is lower than adamw by 1 with one seed (n = 1): effect and chance cannot be separated'
    """
    d = result.difference
    if math.isnan(d.mean):
        return f"{a} and {b} cannot be compared: a loss is not finite (n = {d.n})"
    if not any(result.differences):
        return f"{a} and {b} end with the same loss, seed by seed (n = {d.n}): there is no spread to test"
    if d.mean > 0:
        return verdict(b, a, _paired([-x for x in result.differences], d.confidence), alpha, margin, untrusted)
    if d.n < 2:
        return f"{a} is lower than {b} by {-d.mean:.3g} with one seed (n = 1): effect and chance cannot be separated"
    if _still(result.differences, margin):
        return f"{a} is lower than {b} by {-d.mean:.3g} with every seed (n = {d.n}): there is no spread to test"
    within = equivalence(result.differences, margin, alpha) if margin else None
    doubtful = [name for name in (a, b) if name in untrusted]
    beats = result.p < alpha and a not in untrusted
    level = within is not None and within.holds and not doubtful
    if beats:
        head = f"{a} beats {b}" + f", by less than {margin:g} nat" * level
    elif level:
        head = f"{a} is level with {b} within {margin:g} nat"
    elif doubtful:
        head = f"nothing is claimed of {a} and {b}, as {' and '.join(doubtful)} did not finish with every seed"
    else:
        head = f"{a} and {b} cannot be distinguished" + f", nor shown to be level within {margin:g} nat" * bool(margin)
    intervals = [mean(result.differences, 1 - alpha).between] * (beats or not level)
    tests = f"paired t test p {small(result.p)}"
    if within is not None:
        intervals += [within.interval.between] * level
        tests += f", two one-sided tests p {small(within.p)}"
    return (
        f"{head} (mean difference {d.mean:.3g}, {', '.join(intervals)}; {a} lower in {result.below} of {d.n} seeds; "
        f"{tests}{_asked(alpha)}; sign test p {small(result.p_sign)}, n = {d.n})"
    )


def reach(x: Sequence[float], loss: Sequence[float], target: float) -> float | None:
    """The first x (steps, tokens, seconds) at which the loss is <= target, linear between evaluation points.

    Points whose x or loss is not finite are left out. None when the target is never reached.
    """
    if len(x) != len(loss):
        raise ValueError(f"reach needs as many x as losses, got {len(x)} and {len(loss)}")
    before: tuple[float, float] | None = None
    for at, value in zip(x, loss):
        if not (math.isfinite(at) and math.isfinite(value)):
            continue
        if value <= target:
            if before is None:
                return float(at)
            x0, y0 = before
            return x0 + (at - x0) * (y0 - target) / (y0 - value)
        before = (float(at), float(value))
    return None
