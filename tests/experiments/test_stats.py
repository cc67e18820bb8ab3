"""Means, bands and tests of a difference: by hand, against closed forms, tables and numerical integration."""

from __future__ import annotations

import itertools
import math
import operator
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedmpi.experiments.stats import (
    Comparison,
    band,
    beta_share,
    compare,
    compare_paired,
    compare_unpaired,
    flip_test,
    holm,
    significant,
    summarise,
    t_quantile,
    t_tail,
    verdict,
)

VALUES = st.floats(-1e6, 1e6)
# Critical values of Student's t, two-sided, as printed in tables of the distribution.
TABLE = {
    (0.95, 1): 12.706,
    (0.95, 2): 4.303,
    (0.95, 3): 3.182,
    (0.95, 5): 2.571,
    (0.95, 10): 2.228,
    (0.95, 30): 2.042,
    (0.95, 120): 1.980,
    (0.99, 1): 63.657,
    (0.99, 4): 4.604,
    (0.99, 20): 2.845,
    (0.9, 2): 2.920,
    (0.9, 60): 1.671,
    (0.5, 7): 0.711,
}


# The distribution of t


@given(st.floats(0, 200))
def test_small_degrees_of_freedom_have_closed_forms(t: float) -> None:
    root = math.sqrt(2 + t * t)
    angle = math.atan(t / math.sqrt(3))
    four = t / math.sqrt(4 + t * t) * (1 + 2 / (4 + t * t))
    assert t_tail(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), abs=1e-13)
    assert t_tail(t, 2) == pytest.approx(1 - t / root, abs=1e-13)
    assert t_tail(t, 3) == pytest.approx(1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle)), abs=1e-13)
    assert t_tail(t, 4) == pytest.approx(1 - four, abs=1e-13)
    assert t_tail(-t, 3) == t_tail(t, 3)


@pytest.mark.parametrize("freedom", [1.0, 1.37, 2.0, 2.9, 4.5, 7.0, 12.25, 33.3, 150.0])
@pytest.mark.parametrize("t", [0.0, 0.03, 0.7, 1.96, 3.5, 12.0])
def test_the_tail_is_the_integral_of_the_density(t: float, freedom: float) -> None:
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    nodes, weights = np.polynomial.legendre.leggauss(200)
    points = t / 2 * (nodes + 1)
    inside = t / 2 * float(np.sum(weights * scale * (1 + points**2 / freedom) ** (-(freedom + 1) / 2)))
    assert t_tail(t, freedom) == pytest.approx(1 - 2 * inside, abs=1e-10)


@pytest.mark.parametrize(("level", "freedom"), TABLE)
def test_quantiles_are_those_of_printed_tables(level: float, freedom: int) -> None:
    assert t_quantile(level, freedom) == pytest.approx(TABLE[level, freedom], abs=5.1e-4)


@given(st.floats(0.01, 0.999), st.floats(0.5, 500))
def test_a_quantile_undoes_the_tail(level: float, freedom: float) -> None:
    assert t_tail(t_quantile(level, freedom), freedom) == pytest.approx(1 - level, rel=1e-9, abs=1e-12)


def test_a_far_tail_keeps_its_digits() -> None:
    assert t_tail(1e6, 2) == pytest.approx(1e-12, rel=1e-6)  # 1 - t / sqrt(2 + t^2) is about 1 / t^2
    assert t_tail(1e60, 3) > 0


@given(st.floats(0.001, 0.999), st.floats(0.1, 50), st.floats(0.1, 50))
def test_the_beta_function_has_its_symmetry_and_its_recurrence(x: float, a: float, b: float) -> None:
    assert beta_share(x, a, b) + beta_share(1 - x, b, a) == pytest.approx(1, abs=1e-12)
    step = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a + 1) - math.lgamma(b))
    assert beta_share(x, a, b) - beta_share(x, a + 1, b) == pytest.approx(step, abs=1e-11)


def test_the_ends_of_the_beta_function() -> None:
    assert (beta_share(0, 2, 3), beta_share(1, 2, 3)) == (0, 1)
    assert beta_share(0.3, 1, 1) == pytest.approx(0.3) and beta_share(0.3, 2, 1) == pytest.approx(0.09)


# Means and bands


def test_a_summary_by_hand() -> None:
    found = summarise([2.0, None, 4.0, 9.0])
    assert found is not None
    assert (found.mean, found.count) == (5.0, 3)
    assert found.sd == pytest.approx(math.sqrt((9 + 1 + 16) / 2)), "by n - 1"
    one = summarise([3])
    assert one is not None and (one.mean, one.sd, one.count) == (3.0, None, 1)
    assert summarise([]) is None and summarise([None, None]) is None


@given(st.lists(VALUES, min_size=1, max_size=8))
def test_a_mean_lies_among_its_values_in_any_order(values: list[float]) -> None:
    found, back = summarise(values), summarise(values[::-1])
    assert found is not None and back is not None
    assert min(values) <= found.mean <= max(values) and found.mean == back.mean


def test_a_band_is_on_the_rounds_that_all_curves_have() -> None:
    found = band([{2: 1.0, 4: 2.0, 6: 0.0}, {4: 4.0, 2: 3.0}, {2: 5.0, 3: 9.0, 4: 0.0}])
    assert {t: (one.mean, one.sd, one.count) for t, one in found.items()} == {2: (3.0, 2.0, 3), 4: (2.0, 2.0, 3)}
    assert list(found) == [2, 4]


def test_a_single_curve_has_a_band_without_width() -> None:
    found = band([{1: 0.5, 2: 0.7}])
    assert {t: (one.mean, one.sd) for t, one in found.items()} == {1: (0.5, None), 2: (0.7, None)}
    assert band([]) == band([{1: 0.5}, {2: 0.5}]) == {}


@given(st.lists(st.dictionaries(st.integers(1, 6), VALUES), min_size=1, max_size=5), st.randoms())
def test_the_mean_lies_in_the_band_whatever_the_order_of_the_seeds(
    curves: list[dict[int, float]], chance: random.Random
) -> None:
    found = band(curves)
    shuffled = curves[:]
    chance.shuffle(shuffled)
    assert band(shuffled) == found
    for t, one in found.items():
        values = [curve[t] for curve in curves]
        assert min(values) <= one.mean <= max(values) and (one.sd or 0.0) >= 0


# Differences


def test_a_paired_comparison_by_hand() -> None:
    # differences 1, 2, 3: mean 2, sd 1, error 1 / sqrt(3), t = 3.4641 with 2 degrees: p = 1 - t / sqrt(2 + t^2)
    found = compare({0: 10.0, 1: 20.0, 2: 30.0}, {2: 33.0, 1: 22.0, 0: 11.0})
    assert found is not None and found.paired and found.count == 3
    t, reach = math.sqrt(12), 4.302652729911275 / math.sqrt(3)
    assert found.difference == pytest.approx(2)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t), abs=1e-12) == pytest.approx(0.0741799, abs=1e-7)
    assert (found.low, found.high) == (pytest.approx(2 - reach), pytest.approx(2 + reach))
    assert found.flips == 0.25 == found.least


def test_welchs_test_by_hand() -> None:
    # variances 1 and 4 of 3 and 4 values: error^2 = 1/3 + 1, degrees (4/3)^2 / ((1/3)^2 / 2 + 1 / 3)
    first, second = [1.0, 2.0, 3.0], [1.0, 3.0, 5.0, 3.0 + math.sqrt(4.0)]
    parts = (np.var(first, ddof=1) / 3, np.var(second, ddof=1) / 4)
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2 / 3)
    found = compare(dict(enumerate(first)), dict(enumerate(second, 100)))
    assert found is not None and not found.paired and found.count == 3 and found.flips is None
    mean = float(np.mean(second) - np.mean(first))
    assert found.difference == pytest.approx(mean)
    assert found.p == pytest.approx(t_tail(mean / math.sqrt(sum(parts)), float(freedom)))
    assert found.low == pytest.approx(mean - t_quantile(0.95, float(freedom)) * math.sqrt(sum(parts)))
    assert found.least == 1 / 35, "ways to deal seven values into three and four"
    assert compare_unpaired(first, first[::-1]).least == 2 / 20, "groups of one size can be swapped"


def test_which_comparison_is_made() -> None:
    def of(first: list[int], second: list[int]) -> tuple[bool, int] | None:
        found = compare({seed: float(seed % 3) for seed in first}, {seed: seed % 5 + 0.5 for seed in second})
        return None if found is None else (found.paired, found.count)

    assert of([0, 1, 2, 3], [1, 2, 3, 9]) == (True, 3), "enough in common"
    assert of([0, 1, 2], [2, 3, 4, 5]) == (False, 3), "too little in common, but enough in all"
    assert of([0, 1], [0, 1]) == (True, 2) and of([0], [0, 1, 2, 3]) == (True, 1)
    assert of([0], [1]) == (False, 1) and of([], [1]) is None


def test_missing_values_are_missing_pairs() -> None:
    found = compare({0: 1.0, 1: None, 2: 3.0, 3: 4.0}, {0: 2.0, 1: 9.0, 2: 3.5, 3: 6.0})
    assert found is not None and found.count == 3 and found.difference == pytest.approx(3.5 / 3)


@pytest.mark.parametrize("differences", [[0.1], [0.1, 0.3]])
def test_fewer_than_three_pairs_have_no_test(differences: list[float]) -> None:
    found = compare_paired(differences)
    assert found.difference == pytest.approx(sum(differences) / len(differences))
    assert (found.low, found.high, found.p, found.flips) == (None, None, None, None)
    assert "too few for a test, which needs 3" in verdict(found)


def test_equal_differences_have_no_spread_to_test_against() -> None:
    for step in (0.25, 0.1 + 0.2 - 0.3 + 0.1):
        found = compare_paired([0.9 + step - 0.9, 0.5 + step - 0.5, 0.7 + step - 0.7] * 2)
        assert (found.low, found.high, found.p, found.flips) == (None, None, None, 2 / 64), step
        assert "no variance to test against" in verdict(found) and not significant(found)
    same = compare_paired([0.0] * 6)
    assert (same.difference, same.p, same.flips) == (0.0, 1.0, 1.0) and "not significant" in verdict(same)
    assert compare_unpaired([1.0] * 3, [1.0] * 3).p == 1.0 and compare_unpaired([1.0] * 3, [2.0] * 3).p is None


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=7))
def test_the_flip_test_counts_every_choice_of_signs(differences: list[int]) -> None:
    choices = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(map(operator.mul, signs, differences))) for signs in choices]
    expected = sum(one >= abs(sum(differences)) for one in sums) / len(sums)
    assert flip_test([float(one) for one in differences]) == expected
    assert flip_test([one / 10 for one in differences]) == expected, "tenths are not exact, and end a sum otherwise"


@pytest.mark.parametrize("count", [3, 4, 5, 6, 10])
def test_differences_of_one_sign_come_to_the_smallest_p(count: int) -> None:
    found = compare_paired([1 + 0.01 * i for i in range(count)])
    assert found.flips == found.least == 2 / 2**count


def test_very_many_pairs_are_not_flipped() -> None:
    assert compare_paired([float(i % 7) for i in range(20)]).flips is not None
    assert compare_paired([float(i % 7) for i in range(21)]).flips is None


@given(st.lists(st.tuples(VALUES, VALUES), min_size=3, max_size=7), st.randoms())
def test_neither_the_order_of_the_seeds_nor_that_of_the_groups_changes_a_test(
    values: list[tuple[float, float]],
    chance: random.Random,
) -> None:
    first, second = ({seed: pair[arm] for seed, pair in enumerate(values)} for arm in (0, 1))
    order = list(first)
    chance.shuffle(order)
    found = compare(first, second)
    assert compare({seed: first[seed] for seed in order}, second) == found
    back = compare(second, first)
    assert found is not None and back is not None
    assert (back.difference, back.p, back.flips) == (-found.difference, found.p, found.flips)
    assume(found.low is not None and back.high is not None)
    assert found.low == -back.high and found.low <= found.difference <= found.high


@given(st.lists(st.floats(0.01, 100), min_size=4, max_size=8), st.sampled_from([0.5, 2.0, 100.0]))
def test_percent_or_share_changes_no_p(differences: list[float], factor: float) -> None:
    one, other = compare_paired(differences), compare_paired([factor * each for each in differences])
    assume(one.p is not None and other.p is not None)
    assert other.p == pytest.approx(one.p, rel=1e-6) and other.flips == one.flips


def test_an_interval_leaves_zero_out_exactly_where_p_is_below_its_level() -> None:
    for shift in np.linspace(0, 2, 41):
        found = compare_paired([shift - 1.0, shift + 0.5, shift + 0.7, shift - 0.2])
        assert found.low is not None and found.p is not None
        assert (found.low > 0) == (found.p < 0.05)


# Several tests, and what may be said


def test_holms_correction_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, None, 0.5]) == [1.0, None, 1.0] and holm([]) == [] and holm([0.2]) == [0.2]


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=8))
def test_a_corrected_p_is_larger_in_the_same_order_and_at_most_bonferronis(ps: list[float | None]) -> None:
    pairs = [(p, q) for p, q in zip(ps, holm(ps), strict=True) if p is not None and q is not None]
    assert len(pairs) == sum(p is not None for p in ps)
    for (p, q), (r, s) in itertools.product(pairs, repeat=2):
        assert p <= q <= min(1.0, p * len(pairs)) and (q <= s or p > r)


def test_what_a_comparison_allows_to_say() -> None:
    base = Comparison(0.1, 0.05, 0.15, 0.01, 0.03, 8, True, 2 / 2**8)
    assert verdict(base) == "8 pairs: significant at 0.05" and significant(base)
    assert verdict(replace(base, p=0.2, flips=0.3)) == "8 pairs: not significant at 0.05"
    for other in (replace(base, flips=0.06), replace(base, p=0.06)):
        assert verdict(other) == "8 pairs: the tests disagree at 0.05" and not significant(other)
    three = compare_paired([0.10, 0.11, 0.12])
    assert three.p is not None and three.p < 0.01 and not significant(three)
    assert verdict(three) == "3 pairs: too few to conclude, as an exact test cannot go below p = 0.25"
    apart = Comparison(0.1, 0.05, 0.15, 0.01, None, 5, False, 2 / 252)
    assert verdict(apart) == "5 runs per group: significant at 0.05"
    few = compare_unpaired([0.10, 0.11, 0.12], [0.50, 0.51, 0.52])
    assert few.p is not None and few.p < 0.001 and not significant(few) and "cannot go below p = 0.1" in verdict(few)
    assert verdict(compare_paired([1.0])) == "1 pair: too few for a test, which needs 3"
