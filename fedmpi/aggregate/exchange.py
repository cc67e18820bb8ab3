"""The collective: every rank's sums in, this rank's slice of mean and votes out, the new model on every rank.

Each rank has a row of sums and votes per rank, for the slice that this rank owns. One exchange makes all rows for a
rank readable by it, and it adds them up in the order of the ranks. It sees one slice of every other rank's sums: no
rank ever holds another client's full tensor. The result is yielded in tiles that are still in the cache when the mask
and the server's step read them.

Rows that are sent travel in a few buckets: while one is added up, the next one is in transit, and so is the new model
of the one before. Four buckets take 1.11 times as long as the plain all-reduce, one takes 1.28 and eight take 1.17 (4
ranks, links of 1 Gbit/s, 11.2 million parameters, gloo); through the loopback interface the number hardly matters.

Bytes that a rank sends, N elements on W ranks: 4N (float32) or 8N (exact) for the sums and 1N or 4N for the votes,
times (W-1)/W; squares as much as the sums, a channel 8N. If sums are float32 and no rank hosts more than one client,
the votes are the signs of the sums and are not sent. (On one node, where nothing is sent, they are read.) With
`--wire bf16` the sums take half the bytes, and the votes always travel (compress.py).

N: the full padded vector.  S: the slice this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..comm import Comm, Wait
from ..flat import even_slices, tile_size, tiles
from ..masks import LayerVotes, trained_spans
from .sums import FRACTION_BITS, SQUARE_FRACTION_BITS, Accumulator, Sums, Totals

TILE = 1 << 17
BUCKETS, SMALLEST = 4, 1 << 18  # how many, and their smallest size in elements


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
    gathers: list[Wait] = []
    final = not any(channel.to == "model" for channel in rule.sends)  # else a bucket is sent after the channels
    if sums.compressor is not None:
        sums.compressor.remember(state.model_N)

    def prepare(bucket: slice) -> None:
        sums.fold(bucket)
        if sums.compressor is not None:
            sums.compressor.round_sums(state.unsent["sums"], totals.weight, bucket)

    def count_layers(votes: Iterator[tuple[int, Tensor]]) -> None:
        layer_votes.add(votes)
        comm.sum(layer_votes.counts)

    one_each = sums.cohort.most_on_a_rank == 1
    others, look = list(sums.channels.values()), count_layers if layers else None
    for bucket, tiles_of_bucket in reduce(comm, sums.deltas, params, totals.weight, one_each, others, prepare, look):
        for found in tiles_of_bucket:
            clock.switch("server")
            x = state.model_N[found.start : found.stop]
            if found.start >= params:
                x.add_(found.mean)
            else:
                assert found.votes is not None, "deltas are voted on"
                moments = {name: moment[found.own] for name, moment in state.moments.items()}
                yield Tile(found.start, x, found.mean, found.votes, found.square, moments, layer_votes)
            clock.switch("reduce")
        if final:
            with clock("gather"):
                gathers.append(start_gather(sums, state, bucket))
        clock.switch("reduce")
    with clock("server"):
        for channel in rule.sends:
            target_N = state.model_N if channel.to == "model" else state.shared[channel.name]
            accumulator = sums.channels[channel.name]
            weight = totals.weight if channel.to == "model" else accumulator.total
            for found in averaged(comm, accumulator, params, weight):
                if found.start < params:
                    target_N[found.start : found.stop].add_(found.mean)
    with clock("gather"):
        if not final:
            gathers.append(start_gather(sums, state, slice(0, sums.deltas.slice)))
        comm.gather(state.model_N, gathers)
        for vector_N in state.shared.values():
            comm.gather(vector_N)
    if sums.compressor is not None:
        sums.compressor.flushed = True


def start_gather(sums: Sums, state: Model, bucket: slice) -> Wait:
    """Start to send a bucket of this rank's slice of the model and to receive those of the others."""
    if sums.compressor is None:
        return sums.comm.start_gather(state.model_N, bucket)
    return sums.compressor.start_gather(state.model_N, state.unsent["model"], bucket)


def reduce(
    comm: Comm,
    deltas: Accumulator,
    params: int,
    weight: int,
    one_each: bool = False,
    others: Sequence[Accumulator] = (),
    prepare: Callable[[slice], None] = lambda bucket: None,
    look: Callable[[Iterator[tuple[int, Tensor]]], None] | None = None,
) -> Iterator[tuple[slice, Iterator[Averages]]]:
    """Yield the buckets of this rank's slice as they arrive, each with its averages tile by tile. Collective: every
    rank must take all of them.

    `weight` is the weight that was delivered, over all ranks; `one_each`: no rank hosts more than one client. The
    accumulators in `others` travel in the same exchange; `averaged` reads them afterwards. `prepare` is called for each
    bucket before it is sent. `look` gets all votes of the slice before the first bucket is yielded.
    """
    send_votes = not deltas.travels or deltas.exact or bool(deltas.sums.out) or not one_each
    rows = [rows for rows in deltas.rows if send_votes or rows is not deltas.votes]
    rows += [rows for other in others for rows in other.rows]
    arrived: Iterable[slice] = comm.stream(rows, buckets(deltas.slice, deltas.travels), prepare)
    if look is not None:
        arrived = list(arrived)
        first = comm.rank * deltas.slice
        owned = (own for own in cut(first, slice(0, deltas.slice), params, deltas.device) if first + own.start < params)
        look((first + own.start, votes_at(deltas, own, send_votes)) for own in owned)
    for bucket in arrived:
        yield bucket, averaged(comm, deltas, params, weight, send_votes, bucket)


def buckets(length: int, travels: bool) -> list[slice]:
    """Return the buckets of a slice: a few if it travels and is long enough, else one."""
    return list(even_slices(length, max(-(-length // BUCKETS), SMALLEST) if travels else length))


def averaged(
    comm: Comm, sums: Accumulator, params: int, weight: int, votes_came: bool = True, bucket: slice | None = None
) -> Iterator[Averages]:
    """Yield this rank's slice of exchanged sums, or a bucket of it, tile by tile."""
    first = comm.rank * sums.slice
    for own in cut(first, bucket or slice(0, sums.slice), params, sums.device):
        square = None
        votes = None if sums.votes is None else votes_at(sums, own, votes_came)
        if sums.squares is not None and first + own.start < params:
            square = mean_of(add_up([row[own] for row in sums.squares.theirs]), sums, weight, SQUARE_FRACTION_BITS)
        mean = mean_of(add_up([widened(row[own]) for row in sums.sums.theirs]), sums, weight, FRACTION_BITS)
        yield Averages(first + own.start, first + own.stop, own, mean, votes, square)


def votes_at(sums: Accumulator, own: slice, came: bool) -> Tensor:
    """Return the votes of a tile of this rank's slice; those that were not sent are read off the sums."""
    assert sums.votes is not None, "deltas are voted on"
    if came:
        return add_up([row[own] for row in sums.votes.theirs])
    return add_up([torch.sign(row[own]).to(sums.votes.mine[0].dtype) for row in sums.sums.theirs])


def cut(first: int, bucket: slice, params: int, device: torch.device) -> Iterator[slice]:
    """Yield the tiles of a bucket of the slice that begins at element `first`; none straddles the end of the
    parameters."""
    end, size = min(max(params - first, bucket.start), bucket.stop), tile_size(device, TILE)
    yield from tiles(bucket.start, end, size)
    yield from tiles(end, bucket.stop, size)


def widened(row: Tensor) -> Tensor:
    """Return a row in the type that it is summed in: bf16 as float32."""
    return row.float() if row.dtype == torch.bfloat16 else row


def add_up(rows: list[Tensor]) -> Tensor:
    """Return the sum of rows, added in their order, in fresh memory."""
    if len(rows) == 1:
        return rows[0].clone()
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total.add_(row)
    return total


def mean_of(total: Tensor, sums: Accumulator, weight: int, fraction_bits: int) -> Tensor:
    """Return the weighted mean in float32, from the sum over all ranks and the weight that was delivered."""
    if not sums.exact:
        return total.mul_(1 / weight)  # a division takes twice as long, and the sum is rounded anyway
    if weight == sums.total:
        return total.float().mul_(2.0**-fraction_bits)  # scaled by a power of two: rounded once
    return total.double().mul_(sums.total / weight * 2.0**-fraction_bits).float()
