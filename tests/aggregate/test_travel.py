"""Between nodes: formats that lose nothing, two steps on nodes of any shape, bytes that do not grow with the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from federation import algorithm, federate, norm_model, plan, run_rounds, tasks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedmpi.aggregate.exchange import LARGEST, LEAST, buckets, reduce
from fedmpi.aggregate.sums import Accumulator
from fedmpi.aggregate.travel import WIDTHS, Format, Integers, Plain, Votes, ahead, bytes_for
from fedmpi.algorithms import Algorithm
from fedmpi.comm import Comm, share_node
from fedmpi.comm.threads import run_threads
from fedmpi.masks import Layer, Mask
from fedmpi.rounds import Report, State, begin
from fedmpi.runs.build import build, resolve
from fedmpi.runs.config import Config

# Formats


def there_and_back(format: Format, x: Tensor) -> tuple[Tensor, int]:
    """Return a tile as it is after the journey, and the bytes that it took."""
    out = torch.full((format.room(len(x)),), 0x5A, dtype=torch.uint8)
    size = format.pack(x, out, slice(0, len(x)))
    assert size <= len(out)
    return format.unpack(out[:size].clone(), len(x)), size


EDGES = [sign * (1 << bits) + off for bits in (31, 39, 47, 61) for sign in (1, -1) for off in (-1, 0, 1)]
WHOLE = st.one_of(st.integers(-(2**62), 2**62), st.integers(-(2**40), 2**40), st.sampled_from([0, -1, *EDGES]))


@given(st.lists(WHOLE, min_size=1, max_size=70))
def test_integers_arrive_as_they_were(numbers: list[int]) -> None:
    x = torch.tensor(numbers)
    came, size = there_and_back(Integers(), x)
    assert came.dtype == torch.int64 and came.tolist() == numbers
    assert size == bytes_for(x) * len(x)


@pytest.mark.parametrize("number", EDGES)
def test_integers_take_the_fewest_bytes_that_hold_them(number: int) -> None:
    """By the definition of two's complement."""
    width = bytes_for(torch.tensor([0, number]))
    assert -(2 ** (8 * width - 1)) <= number < 2 ** (8 * width - 1)
    narrower = [w for w in WIDTHS if w < width]
    assert not narrower or not -(2 ** (8 * narrower[-1] - 1)) <= number < 2 ** (8 * narrower[-1] - 1)


@given(st.integers(0, 1000), st.integers(1, 70), st.randoms(use_true_random=False))
def test_votes_arrive_as_they_were(most: int, length: int, random) -> None:
    x = torch.tensor([random.choice([-most, most, random.randint(-most, most)]) for _ in range(length)])
    x = x.to(torch.int8 if most <= 127 else torch.int32)
    format = Votes(x.dtype)
    format.bound(most)
    came, size = there_and_back(format, x)
    assert came.dtype == x.dtype and torch.equal(came, x)
    bits = next(b for b in (2, 4, 8, 16) if most <= 2 ** (b - 1) - 1)
    assert size == -(-length * bits // 8)


def test_floats_travel_as_they_are() -> None:
    x = torch.tensor([0.1, -0.0, float("inf"), 1e-45])
    came, size = there_and_back(Plain(torch.float32), x)
    assert torch.equal(came.view(torch.int32), x.view(torch.int32)) and size == 16


def test_a_few_things_are_made_ahead() -> None:
    made: list[int] = []
    things = ahead((made.append(i) or i for i in range(5)), 3)
    seen = [(thing, len(made)) for thing in things]
    assert seen == [(0, 3), (1, 4), (2, 5), (3, 5), (4, 5)]


# Topologies: the node of each rank

NODES = {
    "1x1": [0],
    "1x4": [0, 0, 0, 0],
    "2x2": [0, 0, 1, 1],
    "2x2, in turn": [0, 1, 0, 1],
    "4x1": [0, 1, 2, 3],
    "3+1": [0, 0, 0, 1],
    "1+3": [0, 1, 1, 1],
    "2+2+1": [0, 0, 1, 1, 2],
}


def on_nodes(nodes: list[int], work: Callable[[Comm], object]) -> list:
    """Run thread ranks on pretend nodes that share memory."""

    def share_and_work(comm: Comm) -> object:
        share_node(comm, nodes[comm.rank])
        return work(comm)

    return run_threads(len(nodes), share_and_work)


def trained(
    nodes: list[int], algo: Algorithm, meta: np.ndarray | None = None, **changes
) -> list[tuple[State, list[Report]]]:
    """Return every rank's last state and reports."""
    ours, how = tasks(len(nodes), norm_model, meta), plan(**changes)

    def work(comm: Comm) -> tuple[State, list[Report]]:
        task = ours[comm.rank]
        return run_rounds(begin(task, algo, comm, wire=how.wire), how, algo, task, comm)

    return on_nodes(nodes, work)


def above_mean(votes_S: Tensor, clients: int, layer: Layer) -> Tensor:
    """Keep what agrees at least as much as the layer does on average, which no slice shows."""
    sizes = torch.arange(len(layer.counts))
    return (votes_S.abs() * int(layer.counts.sum()) >= int((layer.counts * sizes).sum())).float()


def algorithms() -> dict[str, tuple[Algorithm, np.ndarray | None]]:
    named = ["fedavg", "scaffold", "fednova", "fedgma2021", "fedmeta", "fedyogi"]
    made = {name: build(resolve(Config(algorithm=name, mask="gma", rounds=4))) for name in named}
    found = {name: (algo, np.arange(9) if algo.meta is not None else None) for name, algo in made.items()}
    found["sand"] = algorithm("sand"), None
    return found


@pytest.mark.parametrize("name", list(algorithms()))
def test_exact_sums_give_the_same_bits_on_any_nodes(name: str) -> None:
    """Sums, votes, squares, channels, the meta gradient, shared vectors: all through the same two steps."""
    algo, meta = algorithms()[name]
    (whole, reports), *_ = trained(NODES["1x1"], algo, meta)
    length = tasks(1)[0].layout.length
    for topology, nodes in NODES.items():
        for state, seen in trained(nodes, algo, meta):
            assert torch.equal(state.model_N[:length], whole.model_N[:length]), topology
            assert all(torch.equal(state.shared[n][:length], whole.shared[n][:length]) for n in whole.shared), topology
            assert [r.kept for r in seen] == [r.kept for r in reports], topology


def test_small_buckets_and_tiles_change_no_bit_on_any_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    algo, _ = algorithms()["scaffold"]
    whole = trained(NODES["1x1"], algo)[0][0].model_N
    monkeypatch.setattr("fedmpi.aggregate.exchange.LEAST", 16)
    monkeypatch.setattr("fedmpi.aggregate.travel.TILE", 7)
    for nodes in NODES.values():
        for state, _ in trained(nodes, algo):
            assert torch.equal(state.model_N[: len(whole)], whole)


@pytest.mark.parametrize("topology", list(NODES))
def test_float32_sums_are_added_on_the_node_first_and_then_in_the_order_of_the_nodes(topology: str) -> None:
    nodes, length = NODES[topology], 60
    deltas = torch.randn(len(nodes), length, generator=torch.Generator().manual_seed(1))

    def work(comm: Comm) -> Tensor:
        sums = Accumulator(comm, length // comm.size, 3 * comm.size, "float32")
        sums.reset(total=comm.size)
        sums.add(deltas[comm.rank], 1)
        tiles = [tile for _, (of, *_) in reduce(comm, [(sums, comm.size)], length, comm.size) for tile in of]
        comm.barrier()
        return torch.cat([tile.mean for tile in tiles])

    found = torch.cat(on_nodes(nodes, work))
    by_node = [sum(deltas[r] for r in range(len(nodes)) if nodes[r] == node) for node in dict.fromkeys(nodes)]
    assert torch.equal(found, sum(by_node) * (1 / len(nodes)))


@pytest.mark.parametrize("topology", list(NODES))
def test_bf16_gives_every_rank_the_same_model_and_loses_nothing(topology: str) -> None:
    nodes, length = NODES[topology], tasks(1)[0].layout.length
    ends = [state for state, _ in trained(nodes, algorithm(), sum="float32", wire="bf16")]
    assert all(torch.equal(state.model_N, ends[0].model_N) for state in ends)
    whole = federate(1, algorithm(), plan(sum="float32"))[0][0].model_N
    later = torch.cat([state.unsent["model"] for state in ends]) + sum(state.unsent["sums"] for state in ends)
    assert torch.allclose(ends[0].model_N[:length], whole[:length], rtol=0, atol=3e-3)
    assert bool(later.any()) == (len(set(nodes)) > 1), "rows in shared memory are not rounded"


def test_a_mask_by_layers_sees_all_votes_on_any_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmpi.aggregate.exchange.LEAST", 16)
    algo = replace(algorithm(), mask=Mask(above_mean, layers=True))
    whole = trained(NODES["1x1"], algo)[0][0].model_N
    for nodes in NODES.values():
        for state, _ in trained(nodes, algo):
            assert torch.equal(state.model_N[: len(whole)], whole)


def test_votes_are_read_off_float32_sums_only_where_no_node_has_two_clients() -> None:
    """On 2 nodes of 2 ranks a node has two clients although no rank has."""
    algo = algorithm()
    for nodes, cohort in ((NODES["2x2"], 4), (NODES["2x2"], 2), (NODES["4x1"], 4)):
        (state, reports), *_ = trained(nodes, algo, cohort=cohort, sum="float32")
        (right, wanted), *_ = trained(NODES["1x1"], algo, cohort=cohort, sum="float32")
        assert [r.kept for r in reports] == [r.kept for r in wanted]
        assert torch.allclose(state.model_N[: len(right.model_N)], right.model_N, atol=1e-6)


@given(st.integers(1, 1 << 24), st.booleans())
def test_buckets_cover_a_slice(length: int, travels: bool) -> None:
    found = buckets(length, travels)
    assert found[0].start == 0 and found[-1].stop == length
    assert all(one.stop == two.start for one, two in pairwise(found)) and all(b.start < b.stop for b in found)
    assert len(found) == 1 or max(b.stop - b.start for b in found) <= LARGEST
    assert (len(found) == 1) == (length < LEAST or not travels)


# Bytes


def bytes_away(nodes: list[int], how: str, length: int = 4800, clients: int = 8) -> tuple[int, int]:
    """Return the bytes that leave the nodes in the exchange and the gather of a model, and those that ranks provide."""

    def work(comm: Comm) -> tuple[int, int]:
        sums, model_N = Accumulator(comm, length // comm.size, clients, how), comm.vector(length // comm.size)
        sums.reset(total=clients)
        for cid in range(clients):
            if cid * len(set(nodes)) // clients == nodes[comm.rank] and cid % nodes.count(nodes[comm.rank]) == 0:
                sums.add(torch.full((length,), 1e-3 * (cid + 1)), 1)
        sent, away = comm.sent, comm.away
        for _, (tiles,) in reduce(comm, [(sums, clients)], length, clients // len(set(nodes))):
            list(tiles)
        comm.gather(model_N)
        comm.barrier()
        return comm.away - away, comm.sent - sent

    found = on_nodes(nodes, work)
    return sum(away for away, _ in found), sum(sent for _, sent in found)


@pytest.mark.parametrize(("how", "each"), [("float32", 4), ("exact", 5)])
def test_the_bytes_between_nodes_do_not_grow_with_the_ranks_of_a_node(how: str, each: int) -> None:
    """K (K - 1) / K vectors of sums, of votes in half a byte, and of the model."""
    for topology in ([0, 1], [0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]):
        away, sent = bytes_away(topology, how)
        headers = 8 * len(topology) * (how == "exact")  # a parcel of one tile per slice
        assert away == 4800 * (each + 0.5 + 4) + headers
        assert sent >= away and (sent == away) == (len(topology) == 2), "what stays on a node is counted, too"


def test_nothing_leaves_the_only_node() -> None:
    assert bytes_away([0, 0, 0, 0], "exact")[0] == 0


def test_no_rank_reads_more_of_another_than_its_share_of_the_slices() -> None:
    """Of another rank of its node: its own slice, and its share of the slices of other nodes."""

    def work(comm: Comm) -> tuple[list[int], int]:
        rows = comm.rows(4, torch.int64)
        comm.barrier()
        return list(rows.near), len(rows.links.mates)

    for nodes in NODES.values():
        for near, mates in on_nodes(nodes, work):
            assert len(near) <= 1 + -(-(len(nodes) - mates) // mates) and (mates == 1 or len(near) < len(nodes))


def test_a_round_reports_what_left_the_nodes() -> None:
    """The same on every rank, and the same bytes for every mask."""
    reports = [trained(NODES["2x2"], algorithm(mask)) for mask in ("mean", "gma")]
    first = [(r.bytes_sent, r.bytes_between_nodes) for r in reports[0][0][1]]
    assert all(0 < away < sent for sent, away in first)
    for of_mask in reports:
        assert all([(r.bytes_sent, r.bytes_between_nodes) for r in seen][0] == first[0] for _, seen in of_mask)
    assert {r.bytes_between_nodes for _, seen in trained(NODES["1x4"], algorithm()) for r in seen} == {0}
