"""The collective against the plain definition: any number of ranks, any placement, good clients and bad."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from federation import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmpi.aggregate.exchange import reduce
from fedmpi.aggregate.mean import mean, mean_square, votes
from fedmpi.aggregate.sums import FRACTION_BITS, SUMS, Accumulator, Unusable
from fedmpi.aggregate.travel import cut
from fedmpi.comm import Comm
from fedmpi.comm.threads import run_threads

LIMIT = 2.0**17  # of a delta in an exact sum; with squares 2**4


@dataclass(frozen=True)
class Case:
    """Clients with their deltas and weights, and the rank that hosts each."""

    deltas: np.ndarray  # float32 [clients, length]
    weights: list[int]
    ranks: list[int]
    size: int
    limit: float = LIMIT

    @property
    def usable(self) -> list[int]:
        """Those within the range of exact; the float range is wider, and no case lies in between."""
        return [i for i, d in enumerate(self.deltas) if np.isfinite(d).all() and (abs(d) < self.limit).all()]


@dataclass(frozen=True)
class Outcome:
    mean: Tensor
    votes: Tensor
    sent: list[int]
    square: Tensor | None = None


def collective(case: Case, how: str, one_each: bool = False, squares: bool = False) -> Outcome | None:
    """The collective over threads, put together from every rank's slice; None where no client was usable."""
    clients, length = case.deltas.shape
    padded = -(-length // case.size) * case.size

    def work(comm: Comm) -> tuple[list[Tensor], list[Tensor], int, list[Tensor]] | None:
        sums = Accumulator(comm, padded // comm.size, clients, how, squares=length if squares else 0)
        sums.reset(sum(case.weights))
        for i in range(clients):
            if case.ranks[i] == comm.rank:
                delta = torch.zeros(padded)
                delta[:length] = torch.from_numpy(case.deltas[i])
                try:
                    sums.check(delta)
                except Unusable:
                    continue
                sums.add(delta, case.weights[i])
        weight = torch.tensor([sums.weight])
        comm.sum(weight)
        if not weight.item():
            return None
        before = comm.sent
        most = 1 if one_each else max(2, *map(case.ranks.count, case.ranks))  # with 1, votes would be read off
        made = each(reduce(comm, [(sums, int(weight))], length, most))
        stops = [p.stop for p in made]
        assert [p.start for p in made] == [comm.rank * padded // comm.size, *stops[:-1]], "tiles follow each other"
        of_squares = [p.square for p in made if p.square is not None]
        assert len(of_squares) == (sum(p.start < length for p in made) if squares else 0), "of every parameter"
        return [p.mean for p in made], [p.votes for p in made], comm.sent - before, of_squares

    results = run_threads(case.size, work)
    if results[0] is None:
        assert all(r is None for r in results)
        return None
    mean, votes = (torch.cat([t for r in results for t in r[k]])[:length] for k in (0, 1))
    square = torch.cat([t for r in results for t in r[3]]) if squares else None
    return Outcome(mean, votes, [r[2] for r in results], square)


def plain(case: Case) -> Outcome:
    """Return the plain definition of mean, votes and mean square of the usable clients."""
    deltas, weights = [torch.from_numpy(case.deltas[i]) for i in case.usable], [case.weights[i] for i in case.usable]
    planned = sum(case.weights)
    square = mean_square(deltas, weights, planned) if case.limit < LIMIT else None
    return Outcome(mean(deltas, weights, planned), votes(deltas), [], square)


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Return whether two float32 tensors are equal to the bit; a zero has no sign here."""
    return torch.equal((one + 0.0).view(torch.int32), (two + 0.0).view(torch.int32))


ELEMENTS = st.one_of(
    st.just(0.0),
    st.floats(-1, 1, width=32),
    st.floats(-(2.0**-66), 2.0**-66, width=32),
    st.floats(-1e5, 1e5, width=32),
)
BAD = st.sampled_from([np.nan, np.inf, -np.inf, 1e38, 200_000.0])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 8))
    clients = draw(st.one_of(st.integers(1, 12), st.sampled_from([127, 128])))
    length = draw(st.integers(1, 40))
    few = draw(st.lists(st.lists(ELEMENTS, min_size=length, max_size=length), min_size=1, max_size=4))
    deltas = np.array([few[i % len(few)] for i in range(clients)], dtype=np.float32)
    deltas *= np.where(np.arange(clients) % 3 == 1, -1, 1)[:, None].astype(np.float32)
    for i in draw(st.lists(st.integers(0, clients - 1), max_size=3)):
        deltas[i, draw(st.integers(0, length - 1))] = draw(BAD)
    weights = [1 + (7 * i) % draw(st.sampled_from([1, 5, 900])) for i in range(clients)]
    busy = draw(st.integers(1, size))  # ranks beyond this host nobody
    return Case(deltas, weights, [(5 * i) % busy for i in range(clients)], size)


def check(case: Case, how: str) -> None:
    outcome = collective(case, how)
    if not case.usable:
        assert outcome is None
        return
    assert outcome is not None
    want = plain(case)
    assert outcome.votes.tolist() == want.votes.tolist()
    if how == "exact":
        assert same_bits(outcome.mean, want.mean)
        return
    size = abs(case.deltas[case.usable]).max(0)  # rounding is relative to the terms, not to what is left of them
    weight = sum(case.weights) / sum(case.weights[i] for i in case.usable)
    tolerance = (len(case.weights) + 1) * (size * 2.0**-24 + 2.0**-FRACTION_BITS) * weight
    tolerance += abs(want.mean.numpy()) * 2.0**-22 + 1e-44
    assert (abs(outcome.mean.numpy() - want.mean.numpy()) <= tolerance).all()


def usable_in_float_too(case: Case) -> Case:
    """A value that only the exact sum refuses is made one that both refuse."""
    deltas = case.deltas.copy()
    deltas[np.isfinite(deltas) & (abs(deltas) >= 2.0**17)] = np.nan
    return Case(deltas, case.weights, case.ranks, case.size)


@given(cases())
@settings(max_examples=100)
def test_the_plain_definition_is_the_weighted_mean(case: Case) -> None:
    """In double precision, up to the rounding of fixed point and of the float32 that it ends in."""
    if not case.usable:
        return
    deltas, found = case.deltas[case.usable].astype(np.float64), plain(case)
    weights = np.array([case.weights[i] for i in case.usable], dtype=np.float64)
    want = (weights[:, None] * deltas).sum(0) / weights.sum()
    per_term = np.maximum(2.0**-FRACTION_BITS, abs(deltas).max(0) * 2.0**-52)
    tolerance = (len(case.weights) + 1) * per_term * sum(case.weights) / weights.sum() + abs(want) * 2.0**-23 + 1e-44
    assert (abs(found.mean.numpy() - want) <= tolerance).all()
    assert found.votes.tolist() == np.sign(deltas).sum(0).tolist()


@given(cases())
@settings(max_examples=150)
def test_exact_is_the_plain_definition_bit_for_bit(case: Case) -> None:
    check(case, "exact")


@given(cases())
@settings(max_examples=100)
def test_float32_is_the_plain_definition_to_rounding(case: Case) -> None:
    check(usable_in_float_too(case), "float32")


@given(cases(), st.integers(1, 8), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_exact_is_the_same_bits_on_any_ranks_in_any_placement(case: Case, size: int, random: Random) -> None:
    elsewhere = Case(case.deltas, case.weights, [random.randrange(size) for _ in case.ranks], size)
    one, two = collective(case, "exact"), collective(elsewhere, "exact")
    if one is None or two is None:
        assert one is two
        return
    assert torch.equal(one.mean.view(torch.int32), two.mean.view(torch.int32))
    assert torch.equal(one.votes, two.votes)


@given(cases())
@settings(max_examples=60)
def test_votes_read_off_the_sums_are_the_votes_that_would_have_travelled(case: Case) -> None:
    size = min(case.size, len(case.weights))
    case = usable_in_float_too(Case(case.deltas[:size], case.weights[:size], list(range(size)), case.size))
    sent, read = collective(case, "float32"), collective(case, "float32", one_each=True)
    if sent is None or read is None:
        assert sent is read
        return
    assert torch.equal(sent.votes, read.votes) and torch.equal(sent.mean, read.mean)
    assert sum(read.sent) < sum(sent.sent) or case.size == 1


@pytest.mark.parametrize("clients", [127, 128, 1000])
@pytest.mark.parametrize("how", SUMS)
def test_many_clients_that_all_agree(clients: int, how: str) -> None:
    deltas = np.tile(np.array([[0.25, -0.5, 0.0]], np.float32), (clients, 1))
    outcome = collective(Case(deltas, [3] * clients, [i % 4 for i in range(clients)], 4), how)
    assert outcome is not None
    assert outcome.votes.tolist() == [clients, -clients, 0]
    assert outcome.mean.tolist() == pytest.approx([0.25, -0.5, 0.0])


def test_one_bad_client_is_renormalised_away() -> None:
    deltas = np.array([[1.0], [np.nan], [4.0]], np.float32)
    outcome = collective(Case(deltas, [1, 100, 2], [0, 1, 2], 3), "exact")
    assert outcome is not None
    assert outcome.mean.item() == 3.0 and outcome.votes.item() == 2  # (1*1 + 2*4) / 3


HEADER = 8  # of a parcel of one tile, if the size of its numbers varies


@pytest.mark.parametrize(("how", "sum_bytes"), [("exact", 6), ("float32", 4)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_travels_is_one_slice_to_each_other_rank(how: str, sum_bytes: int, size: int) -> None:
    """No rank holds another client's full tensor: N/W elements come from each of the others, never N from any. Numbers
    up to 2^46 take six bytes, votes from -2 to 2 four bits."""
    length = 16 * size
    deltas = np.random.default_rng(0).normal(size=(size, length)).astype(np.float32)
    outcome = collective(Case(deltas, [1] * size, list(range(size)), size), how)
    assert outcome is not None
    each = 16 * sum_bytes + 16 // 2 + HEADER * (how == "exact")
    assert outcome.sent == [(size - 1) * each] * size


@pytest.mark.parametrize("how", SUMS)
def test_small_tiles_give_what_one_gives(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = np.random.default_rng(1).normal(size=(6, 101)).astype(np.float32)
    case = Case(deltas, [1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 2, 2], 3)
    one = collective(case, how)
    monkeypatch.setattr("fedmpi.aggregate.travel.TILE", 4)
    many = collective(case, how)
    assert one is not None and many is not None
    assert torch.equal(one.mean, many.mean) and torch.equal(one.votes, many.votes)


@given(st.integers(0, 50), st.integers(1, 60), st.integers(0, 100))
def test_tiles_cover_a_slice_and_never_straddle_the_end_of_the_parameters(first: int, length: int, params: int) -> None:
    made = list(cut(first, slice(0, length), params, torch.device("cpu")))
    assert [i for p in made for i in range(p.start, p.stop)] == list(range(length))
    assert not any(first + p.start < params < first + p.stop for p in made)


# The second moment, and further vectors in the same exchange

SMALL = st.one_of(st.just(0.0), st.floats(-1, 1, width=32), st.floats(-15.5, 15.5, width=32))


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """Clients whose deltas are small enough to be squared, and some whose are not."""
    size, clients, length = draw(st.integers(1, 8)), draw(st.integers(1, 9)), draw(st.integers(1, 20))
    rows = st.lists(SMALL, min_size=length, max_size=length)
    deltas = np.array(draw(st.lists(rows, min_size=clients, max_size=clients)), dtype=np.float32)
    for i in draw(st.lists(st.integers(0, clients - 1), max_size=2)):
        deltas[i, draw(st.integers(0, length - 1))] = draw(st.sampled_from([np.nan, np.inf, 16.0, -16.0, 1e38]))
    weights = draw(st.lists(st.integers(1, 900), min_size=clients, max_size=clients))
    ranks = draw(st.lists(st.integers(0, size - 1), min_size=clients, max_size=clients))
    return Case(deltas, weights, ranks, size, limit=16.0)


@given(small_cases(), st.sampled_from(SUMS))
@settings(max_examples=120)
def test_the_mean_square_is_the_plain_definition(case: Case, how: str) -> None:
    if how == "float32":  # its range is wider: what exact refuses is made what both refuse
        deltas = np.where(abs(case.deltas) >= 16, np.float32(np.nan), case.deltas)
        case = Case(deltas, case.weights, case.ranks, case.size, case.limit)
    outcome = collective(case, how, squares=True)
    if not case.usable:
        assert outcome is None
        return
    assert outcome is not None and outcome.square is not None
    want = plain(case)
    assert outcome.votes.tolist() == want.votes.tolist() and want.square is not None
    if how == "exact":
        assert same_bits(outcome.square, want.square)
        return
    renormalised = sum(case.weights) / sum(case.weights[i] for i in case.usable)
    square, terms = want.square.numpy(), len(case.weights) + 4
    tolerance = square * terms * 2.0**-24 + terms * (2.0**-53 * renormalised + 1e-44)
    assert (abs(outcome.square.numpy() - square) <= tolerance).all()


@given(small_cases(), st.integers(1, 8), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_the_exact_mean_square_is_the_same_bits_on_any_ranks(case: Case, size: int, random: Random) -> None:
    placed = [random.randrange(size) for _ in case.ranks]
    one = collective(case, "exact", squares=True)
    two = collective(Case(case.deltas, case.weights, placed, size, case.limit), "exact", squares=True)
    if one is None or two is None:
        assert one is two
        return
    assert one.square is not None and two.square is not None
    assert torch.equal(one.square.view(torch.int32), two.square.view(torch.int32))


@pytest.mark.parametrize(
    ("how", "one_each", "sums", "squares"),
    [
        ("exact", False, 12 * 6 + 6 + HEADER, 12 * 8 + HEADER),
        ("exact", True, 12 * 6 + 3 + HEADER, 12 * 8 + HEADER),
        ("float32", False, 12 * 4 + 6, 12 * 4),
        ("float32", True, 12 * 4, 12 * 4),
    ],
)
def test_squares_travel_only_where_they_are_asked_for(how: str, one_each: bool, sums: int, squares: int) -> None:
    size, slice_length = 3, 12
    deltas = np.random.default_rng(0).normal(size=(size, size * slice_length)).astype(np.float32)
    case = Case(deltas, [1] * size, list(range(size)), size)
    with_squares, without = (collective(case, how, one_each, asked) for asked in (True, False))
    assert with_squares is not None and without is not None
    assert with_squares.sent == [(size - 1) * (sums + squares)] * size
    assert without.sent == [(size - 1) * sums] * size
    assert torch.equal(with_squares.mean, without.mean) and torch.equal(with_squares.votes, without.votes)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_buffers_have_a_mean_and_no_mean_square(size: int) -> None:
    def work(comm: Comm) -> list[tuple[bool, bool]]:
        sums = Accumulator(comm, 30 // size, 5, "exact", squares=4)
        sums.reset(total=size)
        sums.add(torch.full((30,), 0.5), 1)
        return [(p.start < 4, p.square is not None) for p in each(reduce(comm, [(sums, size)], 4, 1))]

    for of_params, squared in sum(run_threads(size, work), []):
        assert of_params == squared


@pytest.mark.parametrize("how", SUMS)
def test_further_vectors_travel_in_the_same_exchange(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exchanges would wait for the slowest rank twice."""
    calls: list[int] = []
    offer = Comm.offer
    monkeypatch.setattr(Comm, "offer", lambda self, *args: (calls.append(self.rank), offer(self, *args))[1])

    def work(comm: Comm) -> tuple[list[float], list[float], list[bool]]:
        deltas, other = Accumulator(comm, 4, 3, how), Accumulator(comm, 4, 3, "exact", votes=False)
        deltas.reset(total=6)
        other.reset(total=3)
        deltas.add(torch.full((12,), comm.rank + 1.0), comm.rank + 1)
        other.add(torch.arange(12.0) * comm.rank, 1)
        buckets = [[list(tiles) for tiles in parts] for _, parts in reduce(comm, [(deltas, 6), (other, 3)], 10, 1)]
        ((first, second),) = buckets
        means = [[x for p in some for x in p.mean.tolist()] for some in (first, second)]
        return means[0], means[1], [p.votes is None and p.square is None for p in second]

    results = run_threads(3, work)
    assert sorted(calls) == [0, 1, 2]
    assert sum((r[0] for r in results), []) == pytest.approx([14 / 6] * 12)  # (1 + 4 + 9) / (1 + 2 + 3)
    assert sum((r[1] for r in results), []) == pytest.approx([float(i) for i in range(12)])  # (0 + 1 + 2) i / 3
    assert all(bare for r in results for bare in r[2])
