"""How much a client trains, and how much of that it does: counts by hand, draws, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.cohort import Work, full, make_share, round_half_up
from fedmpi.errors import UserError

DRAWS = 4000
UNEVEN = ["uniform:0.1,1", "uniform:0.01,0.02", "stragglers:0.5,0.1,0.3", "stragglers:1,0.2,0.2"]


def shares(text: str, draws: int = DRAWS) -> np.ndarray:
    """Shares by many clients' generators."""
    share = make_share(text)
    return np.array([share(np.random.default_rng(i)) for i in range(draws)])


# Counts


@pytest.mark.parametrize(
    "work, samples, steps",
    [
        (Work(), 32, 1),
        (Work(), 33, 2),
        (Work(), 1, 1),
        (Work(epochs=3, batch=10), 25, 9),  # 10, 10, 5 an epoch
        (Work(epochs=3, batch=10), 30, 9),
        (Work(epochs=99, steps=7, batch=10), 25, 7),  # steps are instead of epochs
    ],
)
def test_full_work_by_hand(work: Work, samples: int, steps: int) -> None:
    assert work.count(0, 1, 0, samples) == steps


@pytest.mark.parametrize("leave, steps", [(0, 9), (1, 6), (2, 3), (3, 0), (4, 0)])
def test_epochs_that_are_left_out_are_not_counted(leave: int, steps: int) -> None:
    assert Work(epochs=3, batch=10).count(0, 1, 0, 25, leave) == steps
    half = Work(epochs=3, batch=10, share=lambda rng: 0.5)
    assert half.count(0, 1, 0, 25, leave) == (steps + 1) // 2  # 4.5, 3 and 1.5, half a step rounded up


def test_steps_are_those_before_what_is_left_out() -> None:
    assert Work(epochs=1, steps=7).count(0, 1, 0, 100, leave=1) == 7


@pytest.mark.parametrize(
    "share, steps", [(1.0, 10), (0.96, 10), (0.95, 10), (0.94, 9), (0.5, 5), (0.04, 1), (0.001, 1)]
)
def test_a_share_is_rounded_to_the_nearest_step_and_one_is_taken_at_least(share: float, steps: int) -> None:
    assert Work(steps=10, share=lambda rng: share).count(0, 1, 0, 50) == steps


def test_half_a_step_is_rounded_up() -> None:
    assert [round_half_up(x) for x in (0.49, 0.5, 1.5, 2.5, 2.51)] == [0, 1, 2, 3, 3]


@given(st.sampled_from(UNEVEN), st.integers(1, 9), st.integers(1, 500), st.integers(1, 70), st.integers(1, 99))
def test_uneven_work_is_at_least_one_step_and_at_most_all(
    text: str, epochs: int, samples: int, batch: int, round: int
) -> None:
    asked = Work(epochs, batch=batch).count(0, round, 0, samples)
    assert 1 <= Work(epochs, batch=batch, share=make_share(text)).count(0, round, 0, samples) <= asked


# Draws


def test_what_a_client_does_depends_on_seed_round_and_client_only() -> None:
    work = Work(steps=10_000, share=make_share("uniform:0.1,1"))
    first = [work.count(5, round, cid, 20) for round in (1, 2) for cid in range(50)]
    np.random.default_rng().random()
    again = [[work.count(5, round, cid, 999) for cid in reversed(range(50))] for round in (2, 1)]
    assert [*reversed(again[1]), *reversed(again[0])] == first
    others = [work.count(6, round, cid, 20) for round in (1, 2) for cid in range(50)]
    assert len(set(first)) > 90 and sum(a == b for a, b in zip(first, others, strict=True)) < 5


def test_a_client_does_the_same_share_of_whatever_it_is_asked() -> None:
    share = make_share("uniform:0.1,1")
    small, large = (Work(steps=steps, share=share) for steps in (1000, 100_000))
    for cid in range(20):
        assert small.count(0, 1, cid, 10) == pytest.approx(large.count(0, 1, cid, 10) / 100, abs=1)


def test_full_work_draws_nothing() -> None:
    assert make_share("full") is full

    class NoGenerator:
        def __getattr__(self, name: str) -> None:
            raise AssertionError("full work needs no draw")

    assert full(NoGenerator()) == 1.0


def test_uniform_shares_fill_their_range_evenly() -> None:
    drawn = shares("uniform:0.2,0.6")
    assert 0.2 <= drawn.min() < 0.21 and 0.59 < drawn.max() <= 0.6
    counts = np.histogram(drawn, bins=8, range=(0.2, 0.6))[0]
    assert abs(counts - DRAWS / 8).max() < 5 * np.sqrt(DRAWS / 8)


def test_stragglers_are_the_part_that_was_asked_and_the_others_do_everything() -> None:
    drawn = shares("stragglers:0.3,0.1,0.5")
    late = drawn[drawn < 1]
    assert abs(len(late) - 0.3 * DRAWS) < 5 * np.sqrt(0.3 * 0.7 * DRAWS)
    assert 0.1 <= late.min() < 0.12 and 0.48 < late.max() <= 0.5
    assert abs(late.mean() - 0.3) < 5 * 0.4 / np.sqrt(12 * len(late))  # deviation of a uniform: width / sqrt(12)


@pytest.mark.parametrize(
    "text, share", [("stragglers:0,0.1,0.5", 1.0), ("stragglers:1,0.25,0.25", 0.25), ("uniform:1,1", 1.0)]
)
def test_shares_at_the_edges(text: str, share: float) -> None:
    assert set(shares(text, 50)) == {share}


# Refusals


@pytest.mark.parametrize(
    "text",
    [
        "uniform:0,1",
        "uniform:-0.1,1",
        "uniform:0.5,0.4",
        "uniform:0.5,1.1",
        "stragglers:1.1,0.1,0.5",
        "stragglers:-0.1,0.1,0.5",
        "stragglers:0.5,0,1",
        "stragglers:0.5,0.9,0.1",
    ],
)
def test_shares_that_are_none_are_told_the_range(text: str) -> None:
    with pytest.raises(UserError) as caught:
        make_share(text)
    assert str(caught.value) == f"--local.work is '{text}'; it needs 0 < low <= high <= 1, and a part in [0, 1]"


def test_an_unknown_distribution_is_told_all_there_are() -> None:
    known = "known: full, uniform:low,high, stragglers:part,low,high"
    for text, hint in (("unifrom:0.1,1", "did you mean 'uniform:low,high'? "), ("normal:1,2", "")):
        with pytest.raises(UserError) as caught:
            make_share(text)
        assert str(caught.value) == f"unknown --local.work '{text}'; {hint}{known}"


def test_a_distribution_without_its_numbers_is_told_the_form() -> None:
    with pytest.raises(UserError) as caught:
        make_share("stragglers:0.5")
    assert str(caught.value) == "--local.work is 'stragglers:0.5'; write it as stragglers:part,low,high, with numbers"
