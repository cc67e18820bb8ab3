"""What a rank keeps of its clients: sums, votes, ranges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.comm import Comm, SoloComm
from fedmpi.comm.threads import run_threads
from fedmpi.errors import UserError
from fedmpi.tally import CHUNK, FRACTION_BITS, SQUARE_FRACTION_BITS, SUMS, Tally, Unusable, chunks


def tally_of(deltas: list[list[float]], weights: list[int], how: str, cohort: int = 10) -> Tally:
    tally = Tally(SoloComm(), len(deltas[0]), cohort, how)
    tally.clear(sum(weights))
    for delta, weight in zip(deltas, weights, strict=True):
        tally.check(torch.tensor(delta))
        tally.add(torch.tensor(delta), weight)
    return tally


def test_exact_sums_are_the_weighted_mean_in_fixed_point() -> None:
    tally = tally_of([[0.5, -1.0], [0.25, 3.0]], [1, 3], "exact")
    unit = 2**FRACTION_BITS
    assert tally.sums.mine[0].tolist() == [round((0.5 * 1 + 0.25 * 3) / 4 * unit), round((-1.0 + 9.0) / 4 * unit)]
    assert (tally.weight, tally.clients) == (4, 2)


def test_float_sums_are_weighted_by_whole_numbers() -> None:
    assert tally_of([[0.5, -1.0], [0.25, 3.0]], [1, 3], "float32").sums.mine[0].tolist() == [1.25, 8.0]


@pytest.mark.parametrize("how", SUMS)
def test_every_client_has_one_vote_whatever_its_weight(how: str) -> None:
    tally = tally_of([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [-1.0, 0.0, 0.0]], [1, 1, 1000], how)
    assert tally.votes.mine[0].tolist() == [1, 0, 0]  # weighted, the third client would outvote the others


@pytest.mark.parametrize("how", SUMS)
def test_a_tiny_delta_votes_even_where_its_sum_rounds_to_nothing(how: str) -> None:
    tally = tally_of([[1e-30, -1e-38, 1e-45]], [1], how)
    assert tally.votes.mine[0].tolist() == [1, -1, 1]
    if how == "exact":
        assert tally.sums.mine[0].tolist() == [0, 0, 0]
    else:
        assert tally.sums.mine[0].sign().tolist() == [1, -1, 1]


def test_float_products_keep_the_sign_of_the_smallest_delta() -> None:
    tally = Tally(SoloComm(), 1, 10, "float32")
    tally.clear(total=10**9)
    tally.add(torch.tensor([1e-45]), 1)
    assert tally.sums.mine[0].sign().item() == 1


@pytest.mark.parametrize("how", SUMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_unusable(how: str, bad: float) -> None:
    tally = Tally(SoloComm(), 2, 10, how)
    with pytest.raises(Unusable, match="NaN or infinity"):
        tally.check(torch.tensor([1.0, bad]))


@pytest.mark.parametrize(("how", "limit"), [("exact", 2.0**17), ("float32", 3.4028234e38 / 2 / 6)])
def test_the_range_ends_where_it_says(how: str, limit: float) -> None:
    tally = Tally(SoloComm(), 1, 10, how)
    tally.clear(total=6)
    for sign in (1, -1):
        with pytest.raises(Unusable, match=r"its update reaches .* beyond the range"):
            tally.check(torch.tensor([sign * limit * 1.0001]))
    tally.check(torch.tensor([limit * 0.999]))
    tally.add(torch.tensor([limit * 0.999]), 6)
    assert tally.sums.mine[0].isfinite().all()


def test_the_largest_exact_sum_does_not_wrap() -> None:
    most = 2.0**17 - 0.01
    tally = tally_of([[most, -most]] * 1000, [7] * 1000, "exact", cohort=1000)
    mean = tally.sums.mine[0].double() / 2**FRACTION_BITS
    assert mean.tolist() == pytest.approx([most, -most], rel=1e-7)


@pytest.mark.parametrize(("cohort", "dtype"), [(127, torch.int8), (128, torch.int32)])
def test_votes_are_as_narrow_as_the_cohort_allows(cohort: int, dtype: torch.dtype) -> None:
    tally = tally_of([[1.0, -1.0]] * cohort, [1] * cohort, "exact", cohort)
    assert tally.votes.mine[0].dtype == dtype
    assert tally.votes.mine[0].tolist() == [cohort, -cohort]


def test_weights_that_do_not_fit_the_cohort_are_refused() -> None:
    tally = Tally(SoloComm(), 1, 2, "exact")
    tally.clear(total=3)
    tally.add(torch.zeros(1), 2)
    for weight in (2, 0, -1):
        with pytest.raises(ValueError, match="does not fit a cohort of 3"):
            tally.add(torch.zeros(1), weight)
    with pytest.raises(UserError, match="at least 1"):
        tally.clear(total=0)


@given(st.integers(0, 3 * CHUNK + 5), st.integers(1, CHUNK))
def test_chunks_cover_a_vector_once(length: int, size: int) -> None:
    size = max(size, length // 50 + 1)
    parts = list(chunks(length, size))
    assert [i for p in parts for i in (p.start, p.stop)] == sorted(i for p in parts for i in (p.start, p.stop))
    assert sum(p.stop - p.start for p in parts) == length and all(0 < p.stop - p.start <= size for p in parts)


def test_an_unknown_way_to_sum_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'exact'"):
        Tally(SoloComm(), 1, 1, "exactt")


# What a rank keeps only where it is asked for


@pytest.mark.parametrize("how", SUMS)
def test_votes_and_squares_are_kept_only_where_they_are_asked_for(how: str) -> None:
    bare = Tally(SoloComm(), 2, 10, how, votes=False)
    assert bare.votes is None and bare.squares is None and bare.kinds == [bare.sums]
    usual = Tally(SoloComm(), 2, 10, how)
    assert usual.squares is None and usual.kinds == [usual.sums, usual.votes]
    full = Tally(SoloComm(), 2, 10, how, squares=2)
    assert full.kinds == [full.sums, full.votes, full.squares]
    bare.add(torch.tensor([1.0, -1.0]), 1)
    assert bare.sums.mine[0].double().div(2.0**FRACTION_BITS if how == "exact" else 1).tolist() == [1.0, -1.0]


def test_squares_are_the_weighted_mean_square_in_fixed_point() -> None:
    tally = Tally(SoloComm(), 2, 10, "exact", squares=2)
    tally.clear(total=4)
    tally.add(torch.tensor([0.5, -1.0]), 1)
    tally.add(torch.tensor([0.25, 3.0]), 3)
    # (1 * 0.25 + 3 * 0.0625) / 4 = 0.109375, (1 * 1 + 3 * 9) / 4 = 7
    assert tally.squares.mine[0].tolist() == [round(0.109375 * 2**53), 7 * 2**53]
    assert SQUARE_FRACTION_BITS == 53
    tally.clear(total=4)
    assert tally.squares.mine[0].tolist() == [0, 0]


def test_float_squares_are_weighted_by_whole_numbers() -> None:
    tally = Tally(SoloComm(), 2, 10, "float32", squares=2)
    tally.clear(total=4)
    tally.add(torch.tensor([0.5, -1.0]), 1)
    tally.add(torch.tensor([0.25, 3.0]), 3)
    assert tally.squares.mine[0].tolist() == [0.4375, 28.0]  # 0.25 + 3 * 0.0625, 1 + 3 * 9


def test_a_small_delta_is_still_seen_in_the_squares() -> None:
    tally = Tally(SoloComm(), 1, 10, "exact", squares=1)
    tally.add(torch.tensor([1e-7]), 1)
    assert tally.squares.mine[0].item() / 2**53 == pytest.approx(1e-14, rel=0.01)


def test_where_squares_are_summed_a_parameter_stays_below_16_and_a_buffer_need_not() -> None:
    tally = Tally(SoloComm(), 3, 10, "exact", squares=2)
    for bad in ([16.0, 0.0, 0.0], [0.0, -16.0, 0.0], [0.0, 1e5, 0.0]):
        with pytest.raises(Unusable, match="beyond the range of 16 of a mask that reads the variance"):
            tally.check(torch.tensor(bad))
    with pytest.raises(Unusable, match="beyond the range of 1.31e\\+05$"):
        tally.check(torch.tensor([0.0, 0.0, 2e5]))
    for good in ([15.999, -15.999, 0.0], [0.0, 0.0, 1e5], [0.0, 0.0, -1e5]):
        tally.check(torch.tensor(good))
    Tally(SoloComm(), 3, 10, "exact").check(torch.tensor([16.0, -1e5, 0.0]))


def test_the_largest_squares_do_not_wrap_and_a_buffer_spoils_none() -> None:
    tally = Tally(SoloComm(), 3, 1000, "exact", squares=2)
    tally.clear(total=6993)
    for _ in range(999):  # an odd number: wrapped numbers would not cancel out
        tally.add(torch.tensor([15.999, -15.999, 131071.0]), 7)
    squares = (tally.squares.mine[0].double() / 2**53).tolist()
    assert squares[:2] == pytest.approx([15.999**2] * 2, rel=1e-6)
    assert squares[2] == pytest.approx(256), "the square of a buffer, which nobody reads, has wrapped"


@pytest.mark.parametrize("size", [1e20, 1e30])
def test_a_square_that_float32_cannot_hold_makes_its_client_unusable(size: float) -> None:
    """An infinite square would make the mask NaN, and the model with it."""
    tally = Tally(SoloComm(), 1, 10, "float32", squares=1)
    with pytest.raises(Unusable, match="beyond the range"):
        tally.check(torch.tensor([size]))
    Tally(SoloComm(), 1, 10, "float32").check(torch.tensor([size]))


@pytest.mark.parametrize("how", SUMS)
def test_a_vector_shorter_than_the_rows_counts_as_zero_behind_its_end(how: str) -> None:
    tally = Tally(SoloComm(), 4, 10, how, squares=2)
    tally.clear(total=2)
    tally.add(torch.tensor([1.0, -1.0, 1.0, 1.0]), 1)
    tally.add(torch.tensor([1.0, 1.0]), 1)
    assert tally.votes.mine[0].tolist() == [2, 0, 1, 1]
    scale = 2.0**FRACTION_BITS if how == "exact" else 2.0
    assert (tally.sums.mine[0].double() / scale).tolist() == [1.0, 0.0, 0.5, 0.5]


@pytest.mark.parametrize("length", [1, 4, 5, 9, 10, 12])
def test_a_shorter_vector_is_cut_over_the_ranks_like_a_whole_one(length: int) -> None:
    x = torch.arange(1.0, length + 1)

    def work(comm: Comm) -> list[list[int]]:
        tally = Tally(comm, 4, 10, "exact")
        tally.add(x, 1)
        return [row.tolist() for row in tally.votes.mine]

    for rows in run_threads(3, work):
        assert sum(rows, []) == [1] * length + [0] * (12 - length)
