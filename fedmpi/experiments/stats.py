"""What several seeds say together: means and deviations, bands over rounds, and whether a difference may be chance.

Two arms (AVG and GMA) that were run with the same seeds share their data, their first model and their cohorts, so they
are compared seed by seed: Student's t test of the differences, and beside it the exact test that flips the sign of each
difference, which trusts in nothing but that the arms could be swapped. Arms with other seeds are compared by Welch's t
test. All tests are two-sided. Few seeds prove little, and `verdict` says so: with n pairs the sign flips cannot come to
a p below 2 / 2**n, and what the t test says beyond that leans on differences that are normal.

The distribution of t is a regularised incomplete beta function, a continued fraction (DLMF 8.17.22): these few lines
instead of scipy, of which nothing else would be used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import numpy as np

NORMAL = NormalDist().inv_cdf(0.975)  # 1.96: two sides, 95 %
ALPHA = 0.05  # the p from which down a difference is called significant
LEAST = 3  # values of an arm, or pairs, from which on there is a test
MOST_FLIPS = 20  # pairs whose signs are flipped in every way: a million sums
SAME = 1e-12  # the deviation, beside the size of the values, below which they are equal but for rounding


@dataclass(frozen=True)
class Summary:
    """Values of several seeds."""

    mean: float
    sd: float | None
    """sample standard deviation, by n - 1; None for one value"""
    count: int
    low: float
    high: float
    missing: int = 0
    """seeds without a value"""


@dataclass(frozen=True)
class Band:
    """Curves of several seeds, on the rounds that all of them have."""

    rounds: list[int]
    mean: list[float]
    lower: list[float]
    """mean - sd; the mean itself for one curve"""
    upper: list[float]
    least: list[float]
    most: list[float]
    count: int


@dataclass(frozen=True)
class Comparison:
    """How much more one arm has than the other."""

    difference: float
    """mean of the second arm - mean of the first"""
    low: float | None
    """the interval that holds the true difference at the given level; None: too few values, or all equal"""
    high: float | None
    p: float | None
    """two-sided p of Student's (paired) or Welch's t test"""
    flips: float | None
    """p of the exact test that flips signs; None where nothing is paired, or too few or too many are"""
    count: int
    """pairs; where nothing is paired, the values of the smaller arm"""
    paired: bool
    least: float
    """the smallest p that an exact test of so few values can come to"""


def summarise(values: Iterable[float | None]) -> Summary | None:
    """Mean, deviation and range of the values that are there; None where none is."""
    every = list(values)
    there = [float(value) for value in every if value is not None]
    if not there:
        return None
    mean = min(max(fmean(there), min(there)), max(there))  # a mean of equal values may leave them by its last bit
    sd = stdev(there) if len(there) > 1 else None
    return Summary(mean, sd, len(there), min(there), max(there), len(every) - len(there))


def band(curves: Sequence[Mapping[int, float]]) -> Band:
    """The mean of curves (round -> value) and how far they spread, on the rounds that all of them have."""
    common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    found = [summarise(curve[number] for curve in curves) for number in common]
    points = [point for point in found if point is not None]
    return Band(
        rounds=common,
        mean=[point.mean for point in points],
        lower=[point.mean - (point.sd or 0.0) for point in points],
        upper=[point.mean + (point.sd or 0.0) for point in points],
        least=[point.low for point in points],
        most=[point.high for point in points],
        count=len(curves),
    )


def compare(
    first: Mapping[int, float | None], second: Mapping[int, float | None], level: float = 0.95
) -> Comparison | None:
    """The difference of two arms, seed -> value: by the pairs of one seed, where there are enough for a test or where
    that is all there is; else by Welch's test. None where an arm has no value."""
    a, b = ({seed: value for seed, value in arm.items() if value is not None} for arm in (first, second))
    common = sorted(a.keys() & b.keys())
    if common and (len(common) >= LEAST or min(len(a), len(b)) < LEAST):
        return compare_pairs([b[seed] - a[seed] for seed in common], level)
    return compare_apart(list(a.values()), list(b.values()), level) if a and b else None


def compare_pairs(differences: Sequence[float], level: float = 0.95) -> Comparison:
    """Student's paired test, and the one that flips signs."""
    count, mean = len(differences), fmean(differences)
    least = 2.0 ** (1 - count)
    if count < LEAST:
        return Comparison(mean, None, None, None, None, count, True, least)
    error = stdev(differences) / math.sqrt(count)
    low, high, p = t_test(mean, error, count - 1, level, max(map(abs, differences)))
    flips = flip_test(differences) if count <= MOST_FLIPS else None
    return Comparison(mean, low, high, p, flips, count, True, least)


def compare_apart(first: Sequence[float], second: Sequence[float], level: float = 0.95) -> Comparison:
    """Welch's test, of arms that may differ in their spread and their number."""
    sizes, mean = (len(first), len(second)), fmean(second) - fmean(first)
    count, ways = min(sizes), math.comb(sum(sizes), sizes[0])  # to deal the values to the arms
    least = (2 if sizes[0] == sizes[1] else 1) / ways  # arms of one size can be swapped
    if count < LEAST:
        return Comparison(mean, None, None, None, None, count, False, least)
    parts = [stdev(arm) ** 2 / len(arm) for arm in (first, second)]
    spread = sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
    freedom = sum(parts) ** 2 / spread if spread else 1.0
    low, high, p = t_test(mean, math.sqrt(sum(parts)), freedom, level, max(map(abs, [*first, *second])))
    return Comparison(mean, low, high, p, None, count, False, least)


def t_test(
    mean: float, error: float, freedom: float, level: float, scale: float
) -> tuple[float | None, float | None, float | None]:
    """The interval around a mean with this standard error, and the p of a true mean of zero. Where all values are equal
    there is neither, but for a difference of zero, which is p = 1."""
    if error <= SAME * scale:
        return None, None, 1.0 if abs(mean) <= SAME * scale else None
    reach = t_quantile(level, freedom) * error
    return mean - reach, mean + reach, t_tail(mean / error, freedom)


def flip_test(differences: Sequence[float]) -> float:
    """The share of the ways to choose the differences' signs that bring their sum as far from zero as it is."""
    sums = np.zeros(1)
    for one in differences:
        sums = np.concatenate([sums + one, sums - one])
    edge = abs(math.fsum(differences)) - SAME * sum(map(abs, differences))  # sums in another order end otherwise
    return float(np.mean(np.abs(sums) >= edge))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """The p values of several tests, raised so that all of them together err no more often than one (Holm 1979)."""
    order = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    out: list[float | None] = [None] * len(ps)
    worst = 0.0
    for rank, (p, i) in enumerate(order):
        worst = max(worst, min(1.0, p * (len(order) - rank)))
        out[i] = worst
    return out


def significant(found: Comparison) -> bool:
    """Whether the difference is hardly chance: by every test, and with values enough for an exact one to say so."""
    passed = [p <= ALPHA for p in (found.p, found.flips) if p is not None]
    return found.p is not None and found.least <= ALPHA and all(passed)


def verdict(found: Comparison) -> str:
    """What a comparison allows to say, in one sentence."""
    what = f"{found.count} pair{'s' * (found.count != 1)}" if found.paired else f"{found.count} runs an arm"
    if found.count < LEAST:
        return f"{what}: too few for a test, which needs {LEAST}"
    if found.p is None:
        return f"{what}: all differ by the same, so there is no spread to test against"
    if found.least > ALPHA:
        return f"{what}: too few to conclude, as an exact test cannot go below p = {found.least:g}"
    if significant(found):
        return f"{what}: significant at {ALPHA:g}"
    disagree = found.flips is not None and (found.p <= ALPHA) != (found.flips <= ALPHA)
    return f"{what}: the tests disagree at {ALPHA:g}" if disagree else f"{what}: not significant at {ALPHA:g}"


def t_tail(t: float, freedom: float) -> float:
    """P(|T| >= |t|) of Student's distribution."""
    square = t * t
    if square < 1:  # where freedom / (freedom + square) would have lost the digits of t
        return 1 - beta_share(square / (freedom + square), 0.5, freedom / 2)
    return beta_share(freedom / (freedom + square), freedom / 2, 0.5)


def t_quantile(level: float, freedom: float) -> float:
    """The t with P(|T| <= t) = level, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > 1 - level:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_tail(middle, freedom) > 1 - level else (low, middle)
    return high


def beta_share(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction is slow, and its mirror image quick
        return 1 - beta_share(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    # Lentz's method: the fraction 1 / (1 + d1 / (1 + d2 / ...)) as a product of ratios, until one of them is 1.
    tiny, value, above, below = 1e-300, 1.0, 1.0, 0.0
    for step in range(2000):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        below = 1 / ((1 + term * below) or tiny)
        above = (1 + term / above) or tiny
        value *= above * below
        if abs(above * below - 1) < 1e-15:
            break
    return front * (value - 1)


def wilson(share: float, trials: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share that was right in so many trials (Wilson, 1927)."""
    z2 = NORMAL**2 / trials
    middle = share + z2 / 2
    width = (z2 * (share * (1 - share) + z2 / 4)) ** 0.5
    return max(0.0, (middle - width) / (1 + z2)), min(1.0, (middle + width) / (1 + z2))
