"""Who trains and where: laws of the draw and of the placement."""

from __future__ import annotations

import tracemalloc
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.cohort import Cohort, Work, draw, home, load, make_share, place
from fedmpi.data import Partition

SIZES = st.lists(st.integers(1, 500), min_size=1, max_size=40)
SEEDS = st.integers(0, 2**40)


def loads(weights: list[int], ranks: int) -> list[int]:
    """What each rank has to do."""
    placed = place(weights, ranks)
    return [sum(w for w, r in zip(weights, placed, strict=True) if r == rank) for rank in range(ranks)]


def best_possible(weights: list[int], ranks: int) -> int:
    """The smallest largest load, by trying every placement."""
    return min(
        max(sum(w for w, r in zip(weights, placed, strict=True) if r == rank) for rank in range(ranks))
        for placed in product(range(ranks), repeat=len(weights))
    )


@settings(deadline=None)
@given(SIZES, SEEDS, st.integers(1, 1000), st.integers(1, 8), st.data())
def test_a_cohort_is_distinct_sorted_clients_with_their_own_sizes(
    sizes: list[int], seed: int, round: int, ranks: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    cohort = draw(seed, round, np.array(sizes), count, ranks)
    assert len(cohort.cids) == count
    assert list(cohort.cids) == sorted(set(cohort.cids))
    assert 0 <= cohort.cids[0] and cohort.cids[-1] < len(sizes)
    assert cohort.weights == tuple(sizes[cid] for cid in cohort.cids)
    assert cohort.total == sum(cohort.weights)
    assert all(0 <= rank < ranks for rank in cohort.ranks) and len(cohort.ranks) == count


@settings(deadline=None)
@given(SIZES, SEEDS, st.integers(1, 1000), st.data())
def test_who_trains_depends_on_seed_and_round_only(
    sizes: list[int], seed: int, round: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    of_one = draw(seed, round, np.array(sizes), count, ranks=1)
    of_three = draw(seed, round, np.ones(len(sizes), dtype=np.int64), count, ranks=3)
    assert of_one.cids == of_three.cids


def test_seeds_and_rounds_draw_differently() -> None:
    sizes = np.ones(1000, dtype=np.int64)
    drawn = {draw(seed, round, sizes, 10, 1).cids for seed in range(10) for round in range(1, 11)}
    assert len(drawn) == 100


def test_every_client_is_drawn_about_equally_often() -> None:
    sizes = np.arange(1, 21)  # a draw by size would favour the last
    counts = np.bincount([cid for round in range(2000) for cid in draw(0, round, sizes, 5, 1).cids], minlength=20)
    assert counts.sum() == 10_000
    assert abs(counts - 500).max() < 5 * np.sqrt(500)


def test_the_whole_federation_can_be_drawn() -> None:
    assert draw(3, 1, np.ones(7, dtype=np.int64), 7, 2).cids == tuple(range(7))


def test_the_cohort_of_seed_0_stays_what_it_was() -> None:
    assert draw(0, 1, np.ones(100, dtype=np.int64), 5, 1).cids == (29, 30, 43, 45, 93)


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 9))
def test_no_rank_has_more_than_the_mean_and_one_client(weights: list[int], ranks: int) -> None:
    heaviest = max(weights, default=0)
    assert max(loads(weights, ranks)) * ranks <= sum(weights) + (ranks - 1) * heaviest


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_longest_first_is_within_a_third_of_the_best(weights: list[int], ranks: int) -> None:
    assert 3 * ranks * max(loads(weights, ranks)) <= (4 * ranks - 1) * best_possible(weights, ranks)  # Graham 1969


def test_longest_first_by_hand() -> None:
    assert place([1, 5, 3, 4], 2) == (0, 0, 1, 1)  # 5 and 4 open the ranks, 3 joins the 4, 1 joins the 5


def test_equal_clients_go_round_the_ranks_in_order() -> None:
    assert place([2, 2, 2, 2, 2], 3) == (0, 1, 2, 0, 1)


def test_more_ranks_than_clients_leaves_ranks_empty() -> None:
    cohort = draw(0, 1, np.array([4, 9]), 2, 5)
    assert cohort.most_on_a_rank == 1
    assert sorted(rank for rank in range(5) if cohort.at(rank)) == [0, 1]


def test_positions_on_the_ranks_make_up_the_cohort() -> None:
    cohort = Cohort(cids=(2, 5, 9, 11), weights=(1, 1, 1, 1), ranks=(1, 0, 1, 1))
    assert [cohort.at(rank) for rank in range(3)] == [[1], [0, 2, 3], []]
    assert cohort.most_on_a_rank == 3


# Placement by work


def test_clients_are_placed_by_their_samples_where_no_work_is_given() -> None:
    sizes = np.array([64, 1, 1, 1])
    assert draw(0, 1, sizes, 4, 2).ranks == (0, 1, 1, 1)


@pytest.mark.parametrize(
    ("work", "samples", "quarters"),
    [
        (Work(batch=32), 64, 32 * (4 + 2) + 4 * 64),
        (Work(batch=32), 33, 32 * (4 + 2) + 4 * 33),  # a step of one sample: more than none, less than a full one
        (Work(batch=32), 32, 32 * (4 + 1) + 4 * 32),
        (Work(batch=32, epochs=3), 40, 32 * (4 + 6) + 4 * 120),
        (Work(batch=32, steps=3), 40, 32 * (4 + 3) + 4 * (40 + 32)),  # an epoch is a full batch and a short one
        (Work(batch=32, steps=4), 40, 32 * (4 + 4) + 4 * (40 + 40)),
        (Work(batch=32, steps=5), 1, 32 * (4 + 5) + 4 * 5),
    ],
)
def test_a_load_is_a_client_its_steps_and_its_samples(work: Work, samples: int, quarters: int) -> None:
    assert load(work, 0, 1, 0, samples) == quarters


def test_clients_are_placed_by_their_loads_and_weighed_by_their_samples() -> None:
    # the large one has 448 to do and the small ones 164 each
    sizes = np.array([64, 1, 1, 1])
    cohort = draw(0, 1, sizes, 4, 2, Work(batch=32))
    assert cohort.ranks == (0, 1, 1, 1) and cohort.weights == (64, 1, 1, 1)
    # equal loads go round the ranks
    assert draw(0, 1, np.full(4, 9), 4, 2, Work(steps=5)).ranks == (0, 1, 0, 1)


def test_a_short_last_batch_makes_room() -> None:
    # all have two steps; by steps the two large ones would share a rank
    assert draw(0, 1, np.array([64, 33, 64, 33]), 4, 2, Work(batch=32)).ranks == (0, 0, 1, 1)


@settings(deadline=None)
@given(SIZES, SEEDS, st.integers(1, 1000), st.integers(1, 5), st.data())
def test_uneven_work_is_placed_by_what_each_client_will_really_do(
    sizes: list[int], seed: int, round: int, ranks: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    work = Work(epochs=3, batch=8, share=make_share("stragglers:0.5,0.1,0.4"))
    cohort = draw(seed, round, np.array(sizes), count, ranks, work)
    assert cohort.ranks == place([load(work, seed, round, cid, sizes[cid]) for cid in cohort.cids], ranks)
    without = draw(seed, round, np.array(sizes), count, ranks)
    assert (cohort.cids, cohort.weights) == (without.cids, without.weights)


def test_a_straggler_leaves_room_on_its_rank() -> None:
    # equal clients would go round the ranks; where some do a tenth, the busiest rank has less than by that placement
    work, sizes = Work(epochs=10, batch=1, share=make_share("stragglers:0.5,0.1,0.1")), np.full(8, 10)
    better = 0
    for round in range(1, 21):
        cohort = draw(0, round, sizes, 8, 2, work)
        steps = [work.count(0, round, cid, 10) for cid in cohort.cids]
        busiest = max(sum(steps[i] for i in cohort.at(rank)) for rank in range(2))
        in_turn = max(sum(steps[0::2]), sum(steps[1::2]))
        assert busiest <= in_turn
        better += busiest < in_turn
    assert better > 5


# Homes


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_homes_go_round_the_ranks(ranks: int) -> None:
    assert [home(cid, ranks) for cid in range(2 * ranks)] == [*range(ranks), *range(ranks)]


@settings(deadline=None)
@given(SIZES, SEEDS, st.integers(1, 1000), st.integers(1, 8), st.data())
def test_a_client_with_a_memory_trains_at_home_in_every_round(
    sizes: list[int], seed: int, round: int, ranks: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    cohort = draw(seed, round, np.array(sizes), count, ranks, Work(), at_home=True)
    assert cohort.ranks == tuple(cid % ranks for cid in cohort.cids)
    elsewhere = draw(seed, round, np.array(sizes), count, ranks, Work())
    assert (cohort.cids, cohort.weights) == (elsewhere.cids, elsewhere.weights)


def test_homes_can_leave_a_rank_without_clients_and_another_with_all() -> None:
    cohort = draw(0, 1, np.ones(100, dtype=np.int64), 5, 2, at_home=True)
    assert cohort.cids == (29, 30, 43, 45, 93) and cohort.ranks == (1, 0, 1, 1, 1)
    assert cohort.most_on_a_rank == 4


# Many clients


@pytest.mark.parametrize("count", [10, 1000])
def test_a_draw_does_not_take_memory_by_the_number_of_clients(count: int) -> None:
    partition = Partition(np.arange(1_000_001), np.arange(1_000_000))
    assert partition.sizes is partition.sizes and not partition.sizes.flags.writeable  # made once, not every round
    draw(0, 1, partition.sizes, count, 2)
    tracemalloc.start()
    cohort = draw(0, 2, partition.sizes, count, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(cohort.cids) == count and peak < 1_000_000
