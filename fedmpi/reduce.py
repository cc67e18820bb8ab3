"""THE collective: every rank's tally in, this rank's slice of (mean, votes) out.

What else a rule or a mask asks for travels in the same exchange: further vectors of the clients, each with a tally of
its own, and the sums of squares.

Each rank has a row of sums and votes for every rank: the slice that the other one owns. One exchange brings the rows
for a rank within its reach, and it adds them up in the order of the ranks. From each of the others it sees one slice:
no rank ever holds another client's full tensor. What comes out is handed on in pieces that still lie in the cache, so
that mask and server step find them there.

Where rows travel they do so in a few buckets: while one is added up the next is on its way, and so is what became of
the one before. Four of them, measured on 4 ranks behind links of 1 Gbit/s (11.2 million parameters, gloo): 1.11 times
the plain all-reduce, with one bucket 1.28, with eight 1.17; through the loopback interface the number hardly matters.

Bytes a rank sends, N elements on W ranks: 4N (float32) or 8N (exact) for the sums and 1N or 4N for the votes, times
(W-1)/W; squares as much as the sums, a further vector 8N. Where sums are float32 and no rank hosts more than one
client, the votes are the signs of what travels anyway and are not sent; `Tally` sees to it that they are the same
votes. (On one node, where nothing is sent, they are read.)

With `--wire bf16` the sums that travel do so in half the bytes, and the votes always travel (wire.py).

N: the full padded vector.  S: the slice this rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .comm import Comm
from .tally import FRACTION_BITS, SQUARE_FRACTION_BITS, Tally, chunks, even_chunks

PIECE = 1 << 17
BUCKETS, SMALLEST = 4, 1 << 18  # how many, and of how many elements at least


@dataclass(frozen=True)
class Part:
    """A piece of this rank's slice: elements start..stop of the full vector, `own` in the slice; votes and the mean
    square where the tally has them. The last piece of a bucket says which bucket of the slice it completes.

    Its tensors are the caller's to overwrite.
    """

    start: int
    stop: int
    own: slice
    mean: Tensor
    votes: Tensor | None = None
    square: Tensor | None = None
    completes: slice | None = None


def reduce(
    comm: Comm,
    tally: Tally,
    params: int,
    weight: int,
    one_each: bool = False,
    also: Sequence[Tally] = (),
    prepare: Callable[[slice], None] = lambda bucket: None,
    look: Callable[[Iterator[tuple[int, Tensor]]], None] | None = None,
) -> Iterator[Part]:
    """This rank's slice of the mean and of the votes, piece by piece. Collective: every rank must take every piece.

    `weight` is the weight of the clients that delivered, over all ranks; `one_each` says that no rank hosts more than
    one client. A piece never straddles the end of the parameters. The tallies in `also` travel in the same exchange:
    when the pieces have been taken, `parts` reads them. `prepare` is called for each bucket before it is sent. `look`
    is given all votes of the slice, piece by piece, before the first piece is yielded, for what depends on all of them.
    """
    send_votes = not tally.travels or tally.exact or bool(tally.sums.out) or not one_each
    kinds = [rows for rows in tally.kinds if send_votes or rows is not tally.votes]
    kinds += [rows for other in also for rows in other.kinds]
    arrived: Iterable[slice] = comm.stream(kinds, buckets(tally.slice, tally.travels), prepare)
    if look is not None:
        arrived = list(arrived)
        first = comm.rank * tally.slice
        owned = (own for own in pieces(first, tally.slice, params) if first + own.start < params)
        look((first + own.start, votes_at(tally, own, send_votes)) for own in owned)
    for bucket in arrived:
        for part in parts(comm, tally, params, weight, send_votes, bucket):
            yield part if part.own.stop < bucket.stop else replace(part, completes=bucket)


def buckets(length: int, travels: bool) -> list[slice]:
    """The buckets of a slice: a few where it travels and is worth it, else one."""
    most = max(-(-length // BUCKETS), SMALLEST) if travels else length
    return list(even_chunks(length, most))


def parts(
    comm: Comm, tally: Tally, params: int, weight: int, votes_came: bool = True, bucket: slice | None = None
) -> Iterator[Part]:
    """This rank's slice of a tally that has been exchanged, or a bucket of it, piece by piece. Where its votes did not
    come they are read off the sums."""
    first = comm.rank * tally.slice
    for own in pieces(first, tally.slice, params, bucket):
        sums = [widened(row[own]) for row in tally.sums.theirs]
        votes = square = None
        if tally.votes is not None:
            votes = votes_at(tally, own, votes_came)
        if tally.squares is not None and first + own.start < params:
            square = mean_of(add_up([row[own] for row in tally.squares.theirs]), tally, weight, SQUARE_FRACTION_BITS)
        mean = mean_of(add_up(sums), tally, weight, FRACTION_BITS)
        yield Part(first + own.start, first + own.stop, own, mean, votes, square)


def votes_at(tally: Tally, own: slice, came: bool) -> Tensor:
    """The votes of a piece of this rank's slice; where they did not come they are read off the sums."""
    assert tally.votes is not None, "deltas are voted on"
    if came:
        return add_up([row[own] for row in tally.votes.theirs])
    return add_up([torch.sign(row[own]).to(tally.votes.mine[0].dtype) for row in tally.sums.theirs])


def pieces(first: int, length: int, params: int, bucket: slice | None = None) -> Iterator[slice]:
    """The pieces of a slice that begins at element `first`, or of a bucket of it: of a cache's size, cut where the
    parameters end."""
    start, stop = (bucket.start, bucket.stop) if bucket else (0, length)
    cut = min(max(params - first, start), stop)
    for low, high in ((start, cut), (cut, stop)):
        for piece in chunks(high - low, PIECE):
            yield slice(low + piece.start, low + piece.stop)


def widened(row: Tensor) -> Tensor:
    """A row as it is added up: what came as bf16 as float32."""
    return row.float() if row.dtype == torch.bfloat16 else row


def add_up(rows: list[Tensor]) -> Tensor:
    """The sum of rows in their order, in memory of its own."""
    if len(rows) == 1:
        return rows[0].clone()
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total.add_(row)
    return total


def mean_of(total: Tensor, tally: Tally, weight: int, fraction_bits: int) -> Tensor:
    """The weighted mean in float32, from the sum over all ranks and the weight that was delivered."""
    if not tally.exact:
        return total.mul_(1 / weight)  # a division takes twice as long, and the sum is rounded anyway
    if weight == tally.total:
        return total.float().mul_(2.0**-fraction_bits)  # scaled by a power of two: rounded once
    return total.double().mul_(tally.total / weight * 2.0**-fraction_bits).float()
