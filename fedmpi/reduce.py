"""THE collective: every rank's tally in, this rank's slice of (mean, votes) out.

Each rank sends to every other rank the part of its sums and votes that the other one owns, receives the parts that it
owns itself, and adds them up in the order of the ranks. From each of the others it gets one slice: no rank ever holds
another client's full tensor. What comes out is handed on in pieces that still lie in the cache, so that mask and
server step find them there.

Bytes a rank sends, N elements on W ranks: 4N (float32) or 8N (exact) for the sums and 1N or 4N for the votes, times
(W-1)/W. Where sums are float32 and no rank hosts more than one client, the votes are the signs of what travels anyway
and are not sent; `Tally` sees to it that they are the same votes.

N: the full padded vector.  S: the slice this rank owns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .comm import Comm, Pending
from .tally import FRACTION_BITS, Tally, chunks

# Elements in a receive buffer, of all ranks together. A longer vector goes in several buckets, the next one under way
# while this one is added up, to bound the memory. One bucket is faster where it fits (gloo, 11.2 million elements on 2
# ranks: 37 ms, in 11 buckets 73 ms).
BUCKET_ELEMENTS = 1 << 25
PIECE = 1 << 17


@dataclass(frozen=True)
class Part:
    """A piece of this rank's slice: elements start..stop of the full vector, `own` in the slice.

    Its tensors are the caller's to overwrite.
    """

    start: int
    stop: int
    own: slice
    mean: Tensor
    votes: Tensor


class Reducer:
    """The buffers of the collective for vectors of one length, made once."""

    def __init__(self, comm: Comm, tally: Tally, params: int) -> None:
        self.comm, self.params = comm, params
        self.slice = tally.sums_N.numel() // comm.size
        if self.slice * comm.size != tally.sums_N.numel():
            raise ValueError(f"{tally.sums_N.numel()} elements do not divide over {comm.size} ranks: pad the vector")
        self.bucket = min(self.slice, max(1, BUCKET_ELEMENTS // comm.size))
        sides = 1 if self.bucket == self.slice else 2
        self.sums, self.votes = (
            torch.empty(sides, comm.size - 1, self.bucket, dtype=t.dtype, device=t.device)
            for t in (tally.sums_N, tally.votes_N)
        )

    def own(self, x_N: Tensor) -> Tensor:
        """This rank's slice of a full vector."""
        return x_N[self.comm.rank * self.slice : (self.comm.rank + 1) * self.slice]

    def reduce(self, tally: Tally, weight: int, send_votes: bool = True) -> Iterator[Part]:
        """This rank's slice of the mean and of the votes, piece by piece. Collective: every rank must take every piece.

        `weight` is the weight of the clients that delivered, over all ranks; a piece never straddles the end of the
        parameters.
        """
        buckets = list(chunks(self.slice, self.bucket))
        coming = self._start(tally, buckets[0], 0, send_votes)
        for number, bucket in enumerate(buckets):
            for pending in coming:
                pending.wait()
            if number + 1 < len(buckets):
                coming = self._start(tally, buckets[number + 1], (number + 1) % 2, send_votes)
            yield from self._parts(tally, bucket, number % 2, weight, send_votes)

    def _start(self, tally: Tally, bucket: slice, side: int, send_votes: bool) -> list[Pending]:
        length = bucket.stop - bucket.start
        channels = [(tally.sums_N, self.sums[side])] + ([(tally.votes_N, self.votes[side])] if send_votes else [])
        return [
            self.comm.exchange(
                [row[bucket] for row in source.view(self.comm.size, -1)],
                self._rows(source.view(self.comm.size, -1)[self.comm.rank][bucket], received[:, :length]),
            )
            for source, received in channels
        ]

    def _rows(self, own: Tensor, received: Tensor) -> list[Tensor]:
        """One row a rank, in the order of the ranks, this rank's own among them."""
        rows = list(received.unbind(0))
        return rows[: self.comm.rank] + [own] + rows[self.comm.rank :]

    def _parts(self, tally: Tally, bucket: slice, side: int, weight: int, send_votes: bool) -> Iterator[Part]:
        rank, length = self.comm.rank, bucket.stop - bucket.start
        first = rank * self.slice + bucket.start
        sums = self._rows(tally.sums_N[first : first + length], self.sums[side][:, :length])
        votes = self._rows(tally.votes_N[first : first + length], self.votes[side][:, :length])
        for piece in pieces(first, length, self.params):
            here = [row[piece] for row in sums]
            if send_votes:
                total_votes = add_up([row[piece] for row in votes])
            else:
                total_votes = add_up([torch.sign(row).to(tally.votes_N.dtype) for row in here])
            own = slice(bucket.start + piece.start, bucket.start + piece.stop)
            mean = mean_of(add_up(here), tally, weight)
            yield Part(first + piece.start, first + piece.stop, own, mean, total_votes)


def pieces(first: int, length: int, params: int) -> Iterator[slice]:
    """Slices of a bucket that begins at element `first`: of a size that fits the cache, cut where the parameters
    end."""
    cut = min(max(params - first, 0), length)
    yield from chunks(cut, PIECE)
    for piece in chunks(length - cut, PIECE):
        yield slice(cut + piece.start, cut + piece.stop)


def add_up(rows: list[Tensor]) -> Tensor:
    """The sum of rows in their order, in memory of its own."""
    if len(rows) == 1:
        return rows[0].clone()
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total.add_(row)
    return total


def mean_of(total: Tensor, tally: Tally, weight: int) -> Tensor:
    """The weighted mean in float32, from the sum over all ranks and the weight that was delivered."""
    if not tally.exact:
        return total.div_(weight)
    return total.double().mul_(tally.total / weight * 2.0**-FRACTION_BITS).float()
