"""Who trains, where, and how much: laws of the draw and of the placement; counts by hand; what is refused."""

from __future__ import annotations

import time
import tracemalloc
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.cohort import A_STEP_A_SAMPLE, Cohort, Work, draw, find_homes, full, load, make_share, place
from fedmpi.data import Partition
from fedmpi.errors import UserError

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
    assert sorted(rank for rank in range(5) if cohort.on(rank)) == [0, 1]


def test_the_clients_of_all_ranks_make_up_the_cohort() -> None:
    cohort = Cohort(cids=(2, 5, 9, 11), weights=(1, 1, 1, 1), ranks=(1, 0, 1, 1))
    assert [cohort.on(rank) for rank in range(3)] == [[5], [2, 9, 11], []]
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
        steps = [work.count(0, round, cid, 10) for cid in range(8)]  # all clients take part
        busiest = max(sum(steps[cid] for cid in cohort.on(rank)) for rank in range(2))
        in_turn = max(sum(steps[0::2]), sum(steps[1::2]))
        assert busiest <= in_turn
        better += busiest < in_turn
    assert better > 5


# Homes


NODES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def nodes_of(counts: list[int]) -> list[list[int]]:
    """Nodes with so many ranks each."""
    ends = np.cumsum([0, *counts]).tolist()
    return [list(range(first, last)) for first, last in pairwise(ends)]


@settings(deadline=None)
@given(SIZES, SEEDS, st.integers(1, 1000), NODES, st.data())
def test_a_client_with_a_memory_trains_on_a_rank_of_its_home_and_there_longest_first(
    sizes: list[int], seed: int, round: int, counts: list[int], data: st.DataObject
) -> None:
    nodes, count = nodes_of(counts), data.draw(st.integers(1, len(sizes)))
    work = Work(epochs=2, batch=8)
    homes = find_homes(np.array(sizes), work, nodes)
    cohort = draw(seed, round, np.array(sizes), count, sum(counts), work, homes)
    elsewhere = draw(seed, round, np.array(sizes), count, sum(counts), work)
    assert (cohort.cids, cohort.weights) == (elsewhere.cids, elsewhere.weights)
    assert len(counts) > 1 or cohort == elsewhere, "on one node nothing is lost"
    for node, ranks in enumerate(nodes):
        there = [i for i, cid in enumerate(cohort.cids) if homes.node(cid) == node]
        placed = place([load(work, seed, round, cohort.cids[i], cohort.weights[i]) for i in there], len(ranks))
        assert [cohort.ranks[i] for i in there] == [ranks[rank] for rank in placed]


@settings(deadline=None)
@given(SIZES, NODES)
def test_homes_are_as_even_as_longest_first_makes_them(sizes: list[int], counts: list[int]) -> None:
    nodes, work = nodes_of(counts), Work(batch=8)
    homes = find_homes(np.array(sizes), work, nodes)
    each = [load(work, 0, 1, cid, size) for cid, size in enumerate(sizes)]
    for node, ranks in enumerate(nodes):
        there = sum(cost for cid, cost in enumerate(each) if homes.node(cid) == node)
        assert there <= len(ranks) * (sum(each) / sum(counts) + max(each))


@pytest.mark.parametrize("counts", [[2, 2], [3, 1], [1] * 5])
def test_homes_of_many_clients_are_even_in_load_and_in_every_class_of_size(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedmpi.cohort.HEAVIEST", 100)
    rng = np.random.default_rng(3)
    sizes = np.maximum(rng.pareto(1.2, 20_000) * 20, 1).astype(np.int64)
    homes = find_homes(sizes, Work(), nodes_of(counts))
    assert homes.of is not None
    each = np.array([load(Work(), 0, 1, 0, int(size)) for size in sizes])
    share = np.array(counts) / sum(counts)
    there = np.bincount(homes.of, weights=each) / each.sum()
    assert abs(there / share - 1).max() < 0.01
    small = np.bincount(homes.of[sizes < np.median(sizes)], minlength=len(counts)) / (sizes < np.median(sizes)).sum()
    assert abs(small / share - 1).max() < 0.05


def test_a_client_that_has_half_of_all_work_leaves_the_others_to_the_other_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedmpi.cohort.HEAVIEST", 10)
    sizes = np.array([100_000] + [100] * 1000)
    homes = find_homes(sizes, A_STEP_A_SAMPLE, [[0], [1]])
    assert homes.of is not None
    assert homes.of[0] == 0 and np.mean(homes.of[1:] == 1) > 0.97


def test_uneven_shares_of_the_work_do_not_move_homes_and_neither_does_chance() -> None:
    sizes, nodes = np.arange(1, 200), [[0, 1], [2]]
    one = find_homes(sizes, Work(), nodes)
    two = find_homes(sizes, Work(share=make_share("uniform:0.1,1")), nodes)
    assert one.of is not None and two.of is not None and (one.of == two.of).all()


def test_homes_of_a_million_clients_take_a_moment() -> None:
    sizes = np.random.default_rng(1).integers(1, 3000, 1_000_000)
    began = time.process_time()
    homes = find_homes(sizes, Work(), [list(range(8 * n, 8 * n + 8)) for n in range(16)])
    assert time.process_time() - began < 5
    assert homes.of is not None and homes.of.nbytes == 4_000_000 and set(homes.of.tolist()) == set(range(16))


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


DRAWS = 4000
UNEVEN = ["uniform:0.1,1", "uniform:0.01,0.02", "stragglers:0.5,0.1,0.3", "stragglers:1,0.2,0.2"]


def shares(text: str, draws: int = DRAWS) -> np.ndarray:
    """Return the shares of many clients."""
    share = make_share(text)
    return np.array([share(np.random.default_rng(i)) for i in range(draws)])


# How much a client trains


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
    "share, steps", [(1.0, 10), (0.96, 10), (0.95, 10), (0.94, 9), (0.5, 5), (0.25, 3), (0.04, 1), (0.001, 1)]
)
def test_a_share_is_rounded_to_the_nearest_step_and_one_is_taken_at_least(share: float, steps: int) -> None:
    assert Work(steps=10, share=lambda rng: share).count(0, 1, 0, 50) == steps


@given(st.sampled_from(UNEVEN), st.integers(1, 9), st.integers(1, 500), st.integers(1, 70), st.integers(1, 99))
def test_uneven_work_is_at_least_one_step_and_at_most_all(
    text: str, epochs: int, samples: int, batch: int, round: int
) -> None:
    asked = Work(epochs, batch=batch).count(0, round, 0, samples)
    assert 1 <= Work(epochs, batch=batch, share=make_share(text)).count(0, round, 0, samples) <= asked


# Which share of it


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
def test_invalid_shares_are_refused_with_the_range(text: str) -> None:
    with pytest.raises(UserError) as caught:
        make_share(text)
    assert str(caught.value) == f"--local.work is '{text}'; it needs 0 < low <= high <= 1, and a part in [0, 1]"


def test_the_error_of_an_unknown_distribution_lists_all() -> None:
    known = "known: full, uniform:low,high, stragglers:part,low,high"
    for text, hint in (("unifrom:0.1,1", "did you mean 'uniform:low,high'? "), ("normal:1,2", "")):
        with pytest.raises(UserError) as caught:
            make_share(text)
        assert str(caught.value) == f"unknown --local.work '{text}'; {hint}{known}"


def test_a_distribution_without_parameters_is_refused_with_its_form() -> None:
    with pytest.raises(UserError) as caught:
        make_share("stragglers:0.5")
    assert str(caught.value) == "--local.work is 'stragglers:0.5'; write it as stragglers:part,low,high, with numbers"
