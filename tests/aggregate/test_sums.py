"""What a rank keeps of its clients: sums, votes, ranges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.aggregate.sums import FRACTION_BITS, SQUARE_FRACTION_BITS, SUMS, Accumulator, Unusable
from fedmpi.comm import Comm, SoloComm
from fedmpi.comm.threads import run_threads
from fedmpi.errors import UserError
from fedmpi.flat import TILE, tiles


def accumulated(deltas: list[list[float]], weights: list[int], how: str, cohort: int = 10) -> Accumulator:
    sums = Accumulator(SoloComm(), len(deltas[0]), cohort, how)
    sums.reset(sum(weights))
    for delta, weight in zip(deltas, weights, strict=True):
        sums.check(torch.tensor(delta))
        sums.add(torch.tensor(delta), weight)
    return sums


def test_exact_sums_are_the_weighted_mean_in_fixed_point() -> None:
    sums = accumulated([[0.5, -1.0], [0.25, 3.0]], [1, 3], "exact")
    unit = 2**FRACTION_BITS
    assert sums.sums.mine[0].tolist() == [round((0.5 * 1 + 0.25 * 3) / 4 * unit), round((-1.0 + 9.0) / 4 * unit)]
    assert (sums.weight, sums.clients) == (4, 2)


def test_float_sums_are_weighted_by_whole_numbers() -> None:
    assert accumulated([[0.5, -1.0], [0.25, 3.0]], [1, 3], "float32").sums.mine[0].tolist() == [1.25, 8.0]


@pytest.mark.parametrize("how", SUMS)
def test_every_client_has_one_vote_whatever_its_weight(how: str) -> None:
    sums = accumulated([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [-1.0, 0.0, 0.0]], [1, 1, 1000], how)
    assert sums.votes.mine[0].tolist() == [1, 0, 0]  # weighted, the third client would outvote the others


@pytest.mark.parametrize("how", SUMS)
def test_a_tiny_delta_votes_even_where_its_sum_rounds_to_nothing(how: str) -> None:
    sums = accumulated([[1e-30, -1e-38, 1e-45]], [1], how)
    assert sums.votes.mine[0].tolist() == [1, -1, 1]
    if how == "exact":
        assert sums.sums.mine[0].tolist() == [0, 0, 0]
    else:
        assert sums.sums.mine[0].sign().tolist() == [1, -1, 1]


def test_float_products_keep_the_sign_of_the_smallest_delta() -> None:
    sums = Accumulator(SoloComm(), 1, 10, "float32")
    sums.reset(total=10**9)
    sums.add(torch.tensor([1e-45]), 1)
    assert sums.sums.mine[0].sign().item() == 1


@pytest.mark.parametrize("how", SUMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_unusable(how: str, bad: float) -> None:
    sums = Accumulator(SoloComm(), 2, 10, how)
    with pytest.raises(Unusable, match="NaN or infinity"):
        sums.check(torch.tensor([1.0, bad]))


@pytest.mark.parametrize(("how", "limit"), [("exact", 2.0**17), ("float32", 3.4028234e38 / 2 / 6)])
def test_the_range_ends_where_it_says(how: str, limit: float) -> None:
    sums = Accumulator(SoloComm(), 1, 10, how)
    sums.reset(total=6)
    for sign in (1, -1):
        with pytest.raises(Unusable, match=r"its update reaches .* beyond the range"):
            sums.check(torch.tensor([sign * limit * 1.0001]))
    sums.check(torch.tensor([limit * 0.999]))
    sums.add(torch.tensor([limit * 0.999]), 6)
    assert sums.sums.mine[0].isfinite().all()


def test_the_largest_exact_sum_does_not_wrap() -> None:
    most = 2.0**17 - 0.01
    sums = accumulated([[most, -most]] * 1000, [7] * 1000, "exact", cohort=1000)
    mean = sums.sums.mine[0].double() / 2**FRACTION_BITS
    assert mean.tolist() == pytest.approx([most, -most], rel=1e-7)


@pytest.mark.parametrize(("cohort", "dtype"), [(127, torch.int8), (128, torch.int32)])
def test_votes_are_as_narrow_as_the_cohort_allows(cohort: int, dtype: torch.dtype) -> None:
    sums = accumulated([[1.0, -1.0]] * cohort, [1] * cohort, "exact", cohort)
    assert sums.votes.mine[0].dtype == dtype
    assert sums.votes.mine[0].tolist() == [cohort, -cohort]


def test_weights_that_do_not_fit_the_cohort_are_refused() -> None:
    sums = Accumulator(SoloComm(), 1, 2, "exact")
    sums.reset(total=3)
    sums.add(torch.zeros(1), 2)
    for weight in (2, 0, -1):
        with pytest.raises(ValueError, match="does not fit a cohort of 3"):
            sums.add(torch.zeros(1), weight)
    with pytest.raises(UserError, match="at least 1"):
        sums.reset(total=0)


@given(st.integers(0, 3 * TILE + 5), st.integers(1, TILE))
def test_tiles_cover_a_vector_once(length: int, size: int) -> None:
    size = max(size, length // 50 + 1)
    parts = list(tiles(0, length, size))
    assert [i for p in parts for i in (p.start, p.stop)] == sorted(i for p in parts for i in (p.start, p.stop))
    assert sum(p.stop - p.start for p in parts) == length and all(0 < p.stop - p.start <= size for p in parts)


def test_an_unknown_way_to_sum_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'exact'"):
        Accumulator(SoloComm(), 1, 1, "exactt")


# What a rank keeps only where it is asked for


@pytest.mark.parametrize("how", SUMS)
def test_votes_and_squares_are_kept_only_where_they_are_asked_for(how: str) -> None:
    bare = Accumulator(SoloComm(), 2, 10, how, votes=False)
    assert bare.votes is None and bare.squares is None and list(bare.rows) == ["sums"]
    usual = Accumulator(SoloComm(), 2, 10, how)
    assert usual.squares is None and list(usual.rows) == ["sums", "votes"]
    full = Accumulator(SoloComm(), 2, 10, how, squares=2)
    assert list(full.rows) == ["sums", "votes", "squares"]
    bare.add(torch.tensor([1.0, -1.0]), 1)
    assert bare.sums.mine[0].double().div(2.0**FRACTION_BITS if how == "exact" else 1).tolist() == [1.0, -1.0]


def test_squares_are_the_weighted_mean_square_in_fixed_point() -> None:
    sums = Accumulator(SoloComm(), 2, 10, "exact", squares=2)
    sums.reset(total=4)
    sums.add(torch.tensor([0.5, -1.0]), 1)
    sums.add(torch.tensor([0.25, 3.0]), 3)
    # (1 * 0.25 + 3 * 0.0625) / 4 = 0.109375, (1 * 1 + 3 * 9) / 4 = 7
    assert sums.squares.mine[0].tolist() == [round(0.109375 * 2**53), 7 * 2**53]
    assert SQUARE_FRACTION_BITS == 53
    sums.reset(total=4)
    assert sums.squares.mine[0].tolist() == [0, 0]


def test_float_squares_are_weighted_by_whole_numbers() -> None:
    sums = Accumulator(SoloComm(), 2, 10, "float32", squares=2)
    sums.reset(total=4)
    sums.add(torch.tensor([0.5, -1.0]), 1)
    sums.add(torch.tensor([0.25, 3.0]), 3)
    assert sums.squares.mine[0].tolist() == [0.4375, 28.0]  # 0.25 + 3 * 0.0625, 1 + 3 * 9


def test_a_small_delta_still_counts_in_the_squares() -> None:
    sums = Accumulator(SoloComm(), 1, 10, "exact", squares=1)
    sums.add(torch.tensor([1e-7]), 1)
    assert sums.squares.mine[0].item() / 2**53 == pytest.approx(1e-14, rel=0.01)


def test_where_squares_are_summed_a_parameter_stays_below_16_and_a_buffer_need_not() -> None:
    sums = Accumulator(SoloComm(), 3, 10, "exact", squares=2)
    for bad in ([16.0, 0.0, 0.0], [0.0, -16.0, 0.0], [0.0, 1e5, 0.0]):
        with pytest.raises(Unusable, match="beyond the range of 16 of a mask that reads the variance"):
            sums.check(torch.tensor(bad))
    with pytest.raises(Unusable, match="beyond the range of 1.31e\\+05$"):
        sums.check(torch.tensor([0.0, 0.0, 2e5]))
    for good in ([15.999, -15.999, 0.0], [0.0, 0.0, 1e5], [0.0, 0.0, -1e5]):
        sums.check(torch.tensor(good))
    Accumulator(SoloComm(), 3, 10, "exact").check(torch.tensor([16.0, -1e5, 0.0]))


def test_the_largest_squares_do_not_wrap_and_a_buffer_spoils_none() -> None:
    sums = Accumulator(SoloComm(), 3, 1000, "exact", squares=2)
    sums.reset(total=6993)
    for _ in range(999):  # an odd number: wrapped numbers would not cancel out
        sums.add(torch.tensor([15.999, -15.999, 131071.0]), 7)
    squares = (sums.squares.mine[0].double() / 2**53).tolist()
    assert squares[:2] == pytest.approx([15.999**2] * 2, rel=1e-6)
    assert squares[2] == pytest.approx(256), "the square of a buffer, which nobody reads, has wrapped"


@pytest.mark.parametrize("size", [1e20, 1e30])
def test_a_square_that_float32_cannot_hold_makes_its_client_unusable(size: float) -> None:
    """An infinite square would make the mask NaN, and the model with it."""
    sums = Accumulator(SoloComm(), 1, 10, "float32", squares=1)
    with pytest.raises(Unusable, match="beyond the range"):
        sums.check(torch.tensor([size]))
    Accumulator(SoloComm(), 1, 10, "float32").check(torch.tensor([size]))


@pytest.mark.parametrize("how", SUMS)
def test_a_vector_shorter_than_the_rows_counts_as_zero_after_its_end(how: str) -> None:
    sums = Accumulator(SoloComm(), 4, 10, how, squares=2)
    sums.reset(total=2)
    sums.add(torch.tensor([1.0, -1.0, 1.0, 1.0]), 1)
    sums.add(torch.tensor([1.0, 1.0]), 1)
    assert sums.votes.mine[0].tolist() == [2, 0, 1, 1]
    scale = 2.0**FRACTION_BITS if how == "exact" else 2.0
    assert (sums.sums.mine[0].double() / scale).tolist() == [1.0, 0.0, 0.5, 0.5]


@pytest.mark.parametrize("length", [1, 4, 5, 9, 10, 12])
def test_a_shorter_vector_is_cut_over_the_ranks_like_a_whole_one(length: int) -> None:
    x = torch.arange(1.0, length + 1)

    def work(comm: Comm) -> list[list[int]]:
        sums = Accumulator(comm, 4, 10, "exact")
        sums.add(x, 1)
        return [row.tolist() for row in sums.votes.mine]

    for rows in run_threads(3, work):
        assert sum(rows, []) == [1] * length + [0] * (12 - length)
