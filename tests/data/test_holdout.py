"""The held-out set: how many of each class, which samples, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.data.holdout import apportion, check_weights, hold_out
from fedmpi.errors import UserError

Y = np.repeat(np.arange(4), [50, 30, 15, 5])


# Whole numbers in proportions


@pytest.mark.parametrize(
    ("total", "weights", "want"),
    [
        (10, [1, 1], [5, 5]),
        (10, [1, 1, 1], [4, 3, 3]),  # 3.33 each: the first of equal remainders
        (10, [2, 1, 0], [7, 3, 0]),  # 6.67, 3.33
        (3, [0, 5, 0], [0, 3, 0]),
        (1, [0.2, 0.3, 0.5], [0, 0, 1]),
        (7, [0.1, 0.2, 0.7], [1, 1, 5]),  # 0.7, 1.4, 4.9: two are missing from 0 + 1 + 4
        (0, [1, 2], [0, 0]),
        (10, [1e-300, 1e-300], [5, 5]),
    ],
)
def test_numbers_by_hand(total: int, weights: list[float], want: list[int]) -> None:
    assert apportion(total, np.array(weights, dtype=np.float64)).tolist() == want


@given(st.integers(0, 10**6), st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=200))
def test_the_parts_add_up_to_the_total_and_are_within_one_of_their_proportion(total: int, weights: list[float]) -> None:
    if not sum(weights) > 0:
        return
    parts = apportion(total, np.array(weights))
    exact = np.array(weights) / np.sum(weights) * total
    assert parts.sum() == total and (parts >= 0).all()
    assert (abs(parts - exact) < 1 + 1e-6).all()
    assert (parts[np.array(weights) == 0] == 0).all()


# Which samples


@given(st.integers(1, 99), st.integers(0, 1000))
def test_samples_are_drawn_once_each_in_ascending_order_from_the_seed_alone(size: int, seed: int) -> None:
    chosen = hold_out(Y, 4, size, seed)
    assert len(chosen) == size and (np.diff(chosen) > 0).all() and chosen[0] >= 0 and chosen[-1] < len(Y)
    assert np.array_equal(chosen, hold_out(Y, 4, size, seed))


def test_without_weights_the_set_is_made_up_as_the_data_are() -> None:
    y = np.repeat(np.arange(4), [50_000, 30_000, 15_000, 5_000])
    counts = np.bincount(y[hold_out(y, 4, 10_000, seed=0)], minlength=4)
    assert counts.tolist() == pytest.approx([5000, 3000, 1500, 500], abs=150)  # three deviations of 50 at most


def test_another_seed_gives_another_set() -> None:
    for weights in (None, [1.0, 1, 1, 1]):
        assert not np.array_equal(hold_out(Y, 4, 16, 0, weights), hold_out(Y, 4, 16, 1, weights))


@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.integers(0, 100), st.integers(1, 5))
def test_with_weights_there_are_so_many_of_each_class(weights: list[int], seed: int, size: int) -> None:
    if not any(weights):
        return
    chosen = hold_out(Y, 4, size, seed, [float(w) for w in weights])
    assert np.bincount(Y[chosen], minlength=4).tolist() == apportion(size, np.array(weights, float)).tolist()
    assert len(np.unique(chosen)) == size and (np.diff(chosen) > 0).all()


def test_a_whole_class_may_be_held_out() -> None:
    assert hold_out(Y, 4, 5, 0, [0, 0, 0, 1]).tolist() == list(range(95, 100))


# What is refused


@pytest.mark.parametrize(
    ("size", "weights", "message"),
    [
        (100, None, "--meta.size is 100 but there are only 100 samples; leave some for the clients"),
        (101, [1, 1, 1, 1], "--meta.size is 101 but there are only 100 samples; leave some for the clients"),
        (
            6,
            [0, 0, 0, 2],
            "--meta.weights ask for 6 samples of class 3, which has 5; lower its weight or --meta.size",
        ),
        (6, [1, 1, 1], "--meta.weights are 3 numbers, but the data have 4 classes: give one each"),
        (6, [], "--meta.weights are []; they must be numbers >= 0, and not all zero"),
    ],
)
def test_a_set_that_cannot_be_held_out_is_a_one_line_error(size: int, weights: list | None, message: str) -> None:
    with pytest.raises(UserError) as caught:
        hold_out(Y, 4, size, 0, weights)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "weights", [[0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0], [1e308, 1e308, 1e308], []]
)
def test_weights_that_are_no_proportions_are_refused(weights: list[float]) -> None:
    """Also numbers whose sum is infinite: proportions of it would all be 0."""
    with pytest.raises(UserError, match=r"^--meta.weights are \[.*\]; they must be numbers >= 0, and not all zero"):
        check_weights(weights)


def test_weights_are_counted_only_where_the_classes_are_known() -> None:
    check_weights([1.0, 0.0])
    check_weights([1.0, 0.0], 2)
    with pytest.raises(UserError, match="2 numbers, but the data have 3 classes"):
        check_weights([1.0, 0.0], 3)
