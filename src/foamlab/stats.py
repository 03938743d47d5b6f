"""What may be said from a handful of seeds: means with intervals, paired tests, equivalence, the cost of a loss.

Every result carries its n. This room knows numbers only: no run folders, no drawing, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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

    def __str__(self) -> str:
        if self.n < 2:
            return f"{self.mean:.4g} (n = {self.n})"
        return f"{self.mean:.4g} ({percent(self.confidence)} interval {self.low:.4g} to {self.high:.4g}, n = {self.n})"


@dataclass(frozen=True)
class Paired:
    """Differences a - b over pairs (the same seed, say).

    `p` is the two-sided p-value of the paired t test, `p_sign` that of the sign test; NaN where n does not allow one.
    """

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
            f"{d.mean:.3g}, {percent(d.confidence)} interval {d.low:.3g} to {d.high:.3g}; two one-sided tests "
            f"p {small(self.p)}{_asked(self.alpha)}, n = {d.n})"
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
    centre = math.fsum(values) / n if all(map(math.isfinite, values)) else math.nan
    if n < 2 or math.isnan(centre):
        return Mean(centre, math.nan, math.nan, n, confidence)
    s = math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (n - 1))
    half = t_quantile((1 + confidence) / 2, n - 1) * s / math.sqrt(n)
    return Mean(centre, centre - half, centre + half, n, confidence)


def paired(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Paired:
    """Compare a with b where a[i] and b[i] share a seed. d = a - b, t = mean(d) / (s_d / sqrt(n)), df = n - 1.

    The sign test leaves ties out. Raises ValueError for unequal lengths or no pair.
    """
    if len(a) != len(b):
        raise ValueError(f"a paired test needs as many a as b, got {len(a)} and {len(b)}")
    d = [x - y for x, y in zip(a, b)]
    difference = mean(d, confidence)
    below, above = sum(x < 0 for x in d), sum(x > 0 for x in d)
    p = math.nan
    if difference.n >= 2 and not math.isnan(difference.mean):
        if (error := difference.error) > 0:
            p = 2 * t_cdf(-abs(difference.mean) / error, difference.n - 1)
        else:
            p = 1.0 if difference.mean == 0 else 0.0
    finite = all(map(math.isfinite, d))
    return Paired(difference, below, above, p, _sign_test(below, above) if finite else math.nan)


def equivalence(differences: Sequence[float], margin: float, alpha: float = 0.05) -> Equivalence:
    """Whether paired differences d are shown to lie within +-margin on average: two one-sided t tests (TOST).

    The nulls are E[d] <= -margin and E[d] >= margin; both must be rejected at alpha. With e = s_d / sqrt(n), n - 1 df,

        p = max(P(T >= (mean(d) + margin) / e), P(T <= (mean(d) - margin) / e)) = P(T <= (|mean(d)| - margin) / e),

    and p < alpha is the same as: the (1 - 2 alpha) interval of the mean lies within the margin. The chance of a false
    claim is at most alpha, and near alpha where E[d] is at the margin and e is small beside it. (D. J. Schuirmann, A
    comparison of the two one-sided tests procedure and the power approach for assessing the equivalence of average
    bioavailability, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987, 657-680.)

    Where no test is possible p is NaN and nothing holds: with n < 2, with a difference that is not finite, and with
    differences that are all the same but for rounding, which are no sample of what chance does.

    >>> str(equivalence([0.001, -0.002, 0.004, 0.001], 0.01))[:57]
    'equivalent within 0.01 (mean difference 0.001, 90% interv'

    Raises ValueError when there is no difference, margin is not a finite number above 0, or alpha not in (0, 0.5).
    """
    if not 0 < margin < math.inf:
        raise ValueError(f"margin must be a finite number above 0, got {margin}")
    if not 0 < alpha < 0.5:
        raise ValueError(f"alpha must lie between 0 and 0.5, got {alpha}")
    interval = mean(differences, 1 - 2 * alpha)
    p = math.nan
    if interval.error > 0 and max(differences) - min(differences) > 1e-12 * max(margin, *map(abs, differences)):
        p = t_cdf((abs(interval.mean) - margin) / interval.error, interval.n - 1)
    return Equivalence(interval, margin, alpha, p)


def _sign_test(below: int, above: int) -> float:
    """Two-sided: the chance that fair coins split at least as unevenly."""
    n = below + above
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(min(below, above) + 1)) / 2**n
    return min(1.0, 2 * tail)


def verdict(a: str, b: str, result: Paired, alpha: float = 0.05) -> str:
    """`result` of paired(losses of a, losses of b) in words. "Beats" needs p < alpha; n is always told.

    The interval is that of this one comparison; where many are made alpha is below 0.05, and the sentence says so.

    >>> verdict("foam", "adamw", paired([1.0], [2.0]))
    'foam is lower than adamw by 1 with one seed (n = 1): chance cannot be told from effect'
    """
    d = result.difference
    if math.isnan(d.mean):
        return f"{a} and {b} cannot be compared: a loss is not finite (n = {d.n})"
    if d.mean == 0:
        return f"{a} and {b} are equal on average (n = {d.n})"
    if d.n < 2:
        which = "lower" if d.mean < 0 else "higher"
        return f"{a} is {which} than {b} by {abs(d.mean):.3g} with one seed (n = 1): chance cannot be told from effect"
    if d.mean > 0:
        return verdict(b, a, _swap(result), alpha)
    facts = (
        f"mean difference {d.mean:.3g}, {percent(d.confidence)} interval {d.low:.3g} to {d.high:.3g}; "
        f"lower in {result.below} of {d.n} seeds; paired t test p {small(result.p)}{_asked(alpha)}, "
        f"sign test p = {result.p_sign:.2g}, n = {d.n}"
    )
    if result.p < alpha:
        return f"{a} beats {b} ({facts})"
    return f"{a} is lower than {b} on average, but not beyond chance ({facts})"


def _swap(result: Paired) -> Paired:
    d = result.difference
    turned = Mean(-d.mean, -d.high, -d.low, d.n, d.confidence)
    return Paired(turned, result.above, result.below, result.p, result.p_sign)


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
