"""Statistics over seeds: means, deviations, bands over rounds, and tests of a difference.

Two groups (AVG and GMA) with the same seeds share data, first model and cohorts, so they are compared seed by seed: by
Student's t test of the differences, and by the exact test that flips their signs, which assumes only that the groups
could be swapped. Groups with other seeds are compared by Welch's t test. All tests are two-sided. Few seeds prove
little, and `verdict` says so: with n pairs the sign-flip test cannot go below p = 2 / 2**n, and a smaller p of the t
test relies on normal differences.

The distribution of t is a regularised incomplete beta function, computed as a continued fraction (DLMF 8.17.22).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import numpy as np

NORMAL = NormalDist().inv_cdf(0.975)  # 1.96: two sides, 95 %
ALPHA = 0.05  # largest p of a significant difference
LEAST = 3  # fewest pairs, or values per group, for a test
MOST_FLIPS = 20  # most pairs of the sign-flip test: a million sums
SAME = 1e-12  # relative deviation below which values are equal up to rounding


@dataclass(frozen=True)
class Summary:
    """Mean and deviation over seeds."""

    mean: float
    sd: float | None
    """sample standard deviation, by n - 1; None for one value"""
    count: int


@dataclass(frozen=True)
class Comparison:
    """The difference of two groups and its tests."""

    difference: float
    """mean of the second group - mean of the first"""
    low: float | None
    """confidence interval; None for too few values, or equal ones"""
    high: float | None
    p: float | None
    """two-sided p of Student's (paired) or Welch's t test"""
    flips: float | None
    """p of the exact sign-flip test; None without pairs, or with too few or too many"""
    count: int
    """pairs; without pairs, the values of the smaller group"""
    paired: bool
    least: float
    """smallest p of an exact test of so many values"""


def summarise(values: Iterable[float | None]) -> Summary | None:
    """Return mean and deviation of the values that are not None; None if all are."""
    there = [float(value) for value in values if value is not None]
    if not there:
        return None
    mean = min(max(fmean(there), min(there)), max(there))  # rounding may push a mean of equal values outside
    return Summary(mean, stdev(there) if len(there) > 1 else None, len(there))


def band(curves: Sequence[Mapping[int, float]]) -> dict[int, Summary]:
    """Return mean and spread of curves (round -> value) on their common rounds, in order."""
    common = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return {t: found for t in common if (found := summarise(curve[t] for curve in curves)) is not None}


def compare(first: Mapping[int, float | None], second: Mapping[int, float | None]) -> Comparison | None:
    """Compare two groups (seed -> value): by pairs of one seed if these suffice for a test or nothing else does, else
    by Welch's test. Return None if a group has no value."""
    a, b = ({seed: value for seed, value in side.items() if value is not None} for side in (first, second))
    common = sorted(a.keys() & b.keys())
    if common and (len(common) >= LEAST or min(len(a), len(b)) < LEAST):
        return compare_paired([b[seed] - a[seed] for seed in common])
    return compare_unpaired(list(a.values()), list(b.values())) if a and b else None


def compare_paired(differences: Sequence[float]) -> Comparison:
    """Run Student's paired t test and the sign-flip test."""
    count, mean = len(differences), fmean(differences)
    flips = flip_test(differences) if LEAST <= count <= MOST_FLIPS else None
    return Comparison(mean, *t_test(mean, differences), flips, count, True, 2.0 ** (1 - count))


def compare_unpaired(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Run Welch's test of groups that may differ in variance and size."""
    mean = fmean(second) - fmean(first)
    ways = math.comb(len(first) + len(second), len(first))  # to assign the values to the groups
    least = (2 if len(first) == len(second) else 1) / ways  # groups of one size can be swapped
    return Comparison(mean, *t_test(mean, first, second), None, min(len(first), len(second)), False, least)


def t_test(mean: float, *groups: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return the 95% interval around a mean with the variance of these groups, and the p of a true mean of zero, by
    Welch's test, which is Student's for one group. Too small groups have neither, and equal values none either, except
    that a difference of zero has p = 1."""
    if min(map(len, groups)) < LEAST:
        return None, None, None
    parts = [stdev(group) ** 2 / len(group) for group in groups]
    error, scale = math.sqrt(sum(parts)), max(abs(value) for group in groups for value in group)
    if error <= SAME * scale:
        return None, None, 1.0 if abs(mean) <= SAME * scale else None
    spread = sum(part**2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True))
    freedom = sum(parts) ** 2 / spread
    reach = t_quantile(0.95, freedom) * error
    return mean - reach, mean + reach, t_tail(mean / error, freedom)


def flip_test(differences: Sequence[float]) -> float:
    """Return the share of all choices of signs whose sum is at least as far from zero."""
    sums = np.zeros(1)
    for one in differences:
        sums = np.concatenate([sums + one, sums - one])
    edge = abs(math.fsum(differences)) - SAME * sum(map(abs, differences))  # rounding depends on the order of a sum
    return float(np.mean(np.abs(sums) >= edge))


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Return p values corrected for the number of tests (Holm 1979)."""
    order = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    out: list[float | None] = [None] * len(ps)
    worst = 0.0
    for rank, (p, i) in enumerate(order):
        worst = max(worst, min(1.0, p * (len(order) - rank)))
        out[i] = worst
    return out


def significant(found: Comparison) -> bool:
    """Return whether all tests are significant, with enough values for an exact test to be."""
    passed = [p <= ALPHA for p in (found.p, found.flips) if p is not None]
    return found.p is not None and found.least <= ALPHA and all(passed)


def verdict(found: Comparison) -> str:
    """Return the conclusion of a comparison in words."""
    pairs = "1 pair" if found.count == 1 else f"{found.count} pairs"
    what = pairs if found.paired else f"{found.count} runs per group"
    if found.count < LEAST:
        return f"{what}: too few for a test, which needs {LEAST}"
    if found.p is None:
        return f"{what}: all differences are equal, so there is no variance to test against"
    if found.least > ALPHA:
        return f"{what}: too few to conclude, as an exact test cannot go below p = {found.least:g}"
    if significant(found):
        return f"{what}: significant at {ALPHA:g}"
    disagree = found.flips is not None and (found.p <= ALPHA) != (found.flips <= ALPHA)
    return f"{what}: the tests disagree at {ALPHA:g}" if disagree else f"{what}: not significant at {ALPHA:g}"


def t_tail(t: float, freedom: float) -> float:
    """Return P(|T| >= |t|) of Student's distribution."""
    square = t * t
    if square < 1:  # freedom / (freedom + square) would lose digits of t
        return 1 - beta_share(square / (freedom + square), 0.5, freedom / 2)
    return beta_share(freedom / (freedom + square), freedom / 2, 0.5)


def t_quantile(level: float, freedom: float) -> float:
    """Return the t with P(|T| <= t) = level, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > 1 - level:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if t_tail(middle, freedom) > 1 - level else (low, middle)
    return high


def beta_share(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the mirrored fraction converges faster
        return 1 - beta_share(1 - x, b, a)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    value = 1.0  # of the fraction 1 + d1 / (1 + d2 / (1 + ...)), from its end, which is far enough for full precision
    for m in reversed(range(int(20 + 4 * max(a, b) ** 0.5))):
        even = (m + 1) * (b - m - 1) * x / ((a + 2 * m + 1) * (a + 2 * m + 2))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        value = 1 + odd / (1 + even / value)
    return front / value


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a share of so many trials (Wilson 1927)."""
    z2 = NORMAL**2 / trials
    middle = share + z2 / 2
    width = (z2 * (share * (1 - share) + z2 / 4)) ** 0.5
    return max(0.0, (middle - width) / (1 + z2)), min(1.0, (middle + width) / (1 + z2))
