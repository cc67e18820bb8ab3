"""The collective: every rank's sums in, this rank's slice of mean and votes out, the new model on every rank.

Each rank has a row of sums and votes per slice. The rows for a slice are added up in two steps: by one rank of each
node, in shared memory, and then by the rank that owns the slice, which gets one sum from every other node (travel.py).
So no rank ever holds another client's full tensor, and the bytes between nodes do not depend on the ranks per node.
float32 sums are added in the order of the ranks on a node, then in the order of the nodes (that of their first ranks);
exact ones have the same bits in any order. The result is yielded in tiles that are still in the cache when the mask and
the server's step read them.

What is sent travels in a few buckets: while one is added up, the next ones are in transit, and so is the new model of
the one before. A few are under way at a time: enough to keep the link busy, without memory for all of them.

Bytes that leave a node, N elements on K nodes: 4N (float32) or about 5N (exact) for the sums, N/4 to 2N for the votes
of up to 32,767 clients on a node, and 4N for the model, times (K-1)/K; squares 4N, or up to 8N, a channel about 5N. If
sums are float32 and no node hosts more than one client, the votes are the signs of the sums and are not sent. (On one
node, where nothing is sent, they are read.) With `--wire bf16` sums and model take half the bytes, and the votes always
travel (compress.py).

N: the full padded vector.  S: the slice this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..comm import Comm, Wait
from ..flat import even_slices
from ..masks import LayerVotes, trained_spans
from .sums import FRACTION_BITS, SQUARE_FRACTION_BITS, Accumulator, Sums, Totals
from .travel import Load, add_up, ahead, cut

UNDER_WAY = 3  # buckets of sums at a time
LEAST, LARGEST = 1 << 19, 1 << 21  # elements of a slice that is cut into buckets, and of a bucket
Part = tuple[Accumulator, int]  # what is summed, and the weight to divide by
Loads = dict[str, Load]  # of an accumulator: sums, votes, squares


class Model(Protocol):
    """What an exchange moves: see `rounds.State`."""

    @property
    def model_N(self) -> Tensor: ...
    @property
    def moments(self) -> Mapping[str, Tensor]: ...
    @property
    def shared(self) -> Mapping[str, Tensor]: ...
    @property
    def unsent(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Averages:
    """Mean, votes and mean square of elements start..stop of the full vector. The caller may overwrite the tensors."""

    start: int
    stop: int
    own: slice  # where they lie in this rank's slice
    mean: Tensor
    votes: Tensor | None = None
    square: Tensor | None = None


@dataclass(frozen=True)
class Tile:
    """A tile of this rank's slice of the parameters, from element `start`; the caller moves it in place."""

    start: int
    params: Tensor
    mean: Tensor
    votes: Tensor
    square: Tensor | None  # the weighted mean of the squared deltas, if the mask reads it
    moments: Mapping[str, Tensor]  # the server's
    layers: LayerVotes  # votes of whole layers, if the mask reads them


def exchange(sums: Sums, totals: Totals, state: Model, layers: bool = False) -> Iterator[Tile]:
    """Yield this rank's slice of the parameters tile by tile, with mean and votes, for the caller to move. A finished
    bucket is sent to all ranks while the next one is yielded. Collective: every rank must take every tile; then `state`
    holds the whole new model. Buffers are averaged here. `layers` asks for the votes of whole layers.
    """
    comm, clock, rule, params = sums.comm, sums.clock, sums.rule, sums.layout.params
    clock.switch("reduce")
    layer_votes = LayerVotes(trained_spans(sums.layout) if layers else (), totals.clients, state.model_N.device)
    gathers: list[tuple[Tensor, list[Wait]]] = [(x_N, []) for x_N in (state.model_N, *state.shared.values())]
    if sums.compressor is not None:
        sums.compressor.remember(state.model_N)

    def prepare(bucket: slice) -> None:
        sums.fold(bucket)
        if sums.compressor is not None:
            sums.compressor.round_sums(state.unsent["sums"], totals.weight, bucket)

    def count_layers(votes: Iterator[tuple[int, Tensor]]) -> None:
        layer_votes.add(votes)
        comm.sum(layer_votes.counts)

    targets = [state.model_N if channel.to == "model" else state.shared[channel.name] for channel in rule.sends]
    parts = [(sums.deltas, totals.weight)]
    for channel in rule.sends:
        part = sums.channels[channel.name]
        parts.append((part, totals.weight if channel.to == "model" else part.total))
    look = count_layers if layers else None
    most = sums.cohort.most_on_a_node(sums.deltas.links.node_of)
    for bucket, (of_deltas, *of_channels) in reduce(comm, parts, params, most, prepare, look):
        for found in of_deltas:
            clock.switch("server")
            x = state.model_N[found.start : found.stop]
            if found.start >= params:
                x.add_(found.mean)
            else:
                assert found.votes is not None, "deltas are voted on"
                moments = {name: moment[found.own] for name, moment in state.moments.items()}
                yield Tile(found.start, x, found.mean, found.votes, found.square, moments, layer_votes)
            clock.switch("reduce")
        with clock("server"):
            for averages, target_N in zip(of_channels, targets, strict=True):
                for found in averages:
                    if found.start < params:
                        target_N[found.start : found.stop].add_(found.mean)
        with clock("gather"):
            for x_N, under_way in gathers:
                under_way.append(start_gather(x_N, sums, state, bucket))
        clock.switch("reduce")
    with clock("gather"):
        for x_N, under_way in gathers:
            comm.gather(x_N, under_way)
    if sums.compressor is not None:
        sums.compressor.flushed = True


def start_gather(x_N: Tensor, sums: Sums, state: Model, bucket: slice) -> Wait:
    """Start to send a bucket of this rank's slice of a vector and to receive those of the others."""
    if sums.compressor is None or x_N is not state.model_N:
        return sums.comm.start_gather(x_N, bucket)
    return sums.compressor.start_gather(x_N, state.unsent["model"], bucket)


def reduce(
    comm: Comm,
    parts: Sequence[Part],
    params: int,
    most: int,
    prepare: Callable[[slice], None] = lambda bucket: None,
    look: Callable[[Iterator[tuple[int, Tensor]]], None] | None = None,
) -> Iterator[tuple[slice, list[Iterator[Averages]]]]:
    """Yield the buckets of this rank's slice as they arrive, each with the averages of every part, tile by tile.
    Collective: every rank must take all of them.

    The first part is that of the deltas. `most` is the largest number of clients on a node. `prepare` is called for a
    bucket before it is offered. `look` gets all votes of the slice before the first bucket is yielded.
    """
    deltas, device, first = parts[0][0], parts[0][0].device, comm.rank * parts[0][0].slice
    deltas.ballots.bound(most)
    read_off = deltas.travels and not deltas.exact and deltas.rounded is None and most <= 1
    silent = {"votes"} if read_off and not comm.reduces(device) else set()
    lanes = [{name: lane for name, lane in part.lanes.items() if name not in silent} for part, _ in parts]
    rows = [part.rows[name] for (part, _), own in zip(parts, lanes, strict=True) for name in own]
    on_host = device.type == "cpu" or (device.type == "meta" and not comm.reduces(device))  # meta: a forecast
    pieces = buckets(deltas.slice, deltas.travels and on_host)
    under_way = len(pieces) if look else UNDER_WAY

    def start(number: int, bucket: slice) -> list[Loads]:
        prepare(bucket)
        comm.offer(rows, bucket)
        return [{name: lane.start(bucket, number % under_way, params) for name, lane in own.items()} for own in lanes]

    arrived = finished(ahead(((bucket, start(number, bucket)) for number, bucket in enumerate(pieces)), under_way))
    if look is not None:
        every = list(arrived)
        arrived = iter(every)
        look(
            (first + tile.start, votes_at(deltas, loads[0], number))
            for bucket, loads in every
            for number, tile in enumerate(cut(first, bucket, params, device))
            if first + tile.start < params
        )
    for bucket, loads in arrived:
        yield bucket, [averaged(comm, part, params, load, bucket) for part, load in zip(parts, loads, strict=True)]


def finished(flights: Iterator[tuple[slice, list[Loads]]]) -> Iterator[tuple[slice, list[Loads]]]:
    """Yield each bucket when it has arrived."""
    for bucket, loads in flights:
        for load in (load for of_part in loads for load in of_part.values()):
            load.finish()
        yield bucket, loads


def buckets(length: int, travels: bool) -> list[slice]:
    """Return the buckets of a slice: one, unless it travels and is long. Else a short one at either end, so that the
    link has work soon and little is left to do after the last arrival, and at least four between."""
    if not travels or length < LEAST:
        return [slice(0, length)]
    end = min(length // 16, LARGEST // 8)
    between = length - 2 * end
    middle = even_slices(between, min(-(-between // 4), LARGEST))
    return [slice(0, end), *(slice(end + b.start, end + b.stop) for b in middle), slice(length - end, length)]


def averaged(comm: Comm, part: Part, params: int, loads: Loads, bucket: slice) -> Iterator[Averages]:
    """Yield the averages of a bucket of this rank's slice, tile by tile."""
    (sums, weight), first = part, comm.rank * part[0].slice
    for number, own in enumerate(cut(first, bucket, params, sums.device)):
        square = None
        votes = None if sums.votes is None else votes_at(sums, loads, number)
        if "squares" in loads and first + own.start < params:
            square = mean_of(loads["squares"].total(number), sums, weight, SQUARE_FRACTION_BITS)
        mean = mean_of(loads["sums"].total(number), sums, weight, FRACTION_BITS)
        yield Averages(first + own.start, first + own.stop, own, mean, votes, square)


def votes_at(sums: Accumulator, loads: Loads, number: int) -> Tensor:
    """Return the votes of a tile of this rank's slice; those that were not sent are read off the sums."""
    if "votes" in loads:
        return loads["votes"].total(number)
    return add_up([torch.sign(x).to(sums.ballots.dtype) for x in loads["sums"].by_node(number)])


def mean_of(total: Tensor, sums: Accumulator, weight: int, fraction_bits: int) -> Tensor:
    """Return the weighted mean in float32, from the sum over all ranks and the weight that was delivered."""
    if not sums.exact:
        return total.mul_(1 / weight)  # a division takes twice as long, and the sum is rounded anyway
    if weight == sums.total:
        return total.float().mul_(2.0**-fraction_bits)  # scaled by a power of two: rounded once
    return total.double().mul_(sums.total / weight * 2.0**-fraction_bits).float()
