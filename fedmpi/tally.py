"""What a rank keeps of its clients: a weighted sum of their deltas, a sum of the signs (votes) and, where a mask reads
them, a weighted sum of the squares. A delta is folded in and forgotten.

N: the full padded vector.  Weights are whole numbers (a client's samples); `total` is the weight of the whole cohort
as planned.

Two ways to sum:

exact    int64 fixed point. A client contributes round(delta * weight / total * 2**44): integers are added, and they do
         not care for order, so the sum is the same bits on any number of ranks, in any placement, over any transport.
         Resolution: 2**-44 (6e-14) of the mean, or 2**-53 of a delta where that is more. Range: |delta| < 2**17
         (131072). As the weights of a cohort add up to at most `total`, the sum stays below 2**61: it never wraps. A
         delta outside the range makes its client unusable.
float32  the sum of weight * delta in float32: half the bytes, and rounding that depends on the order. Weights are
         whole numbers >= 1, so the product of a tiny delta never vanishes and its sign can be read off the product.
         Range: |delta| * total < 1.7e38.

Votes are counted from the delta itself, never from its rounded product, in int8 up to 127 clients in the cohort and
int32 beyond (NCCL has no int16). Squares are summed like the deltas, in fixed point with a finer unit, 2**-53, as
they are small numbers: a delta of 1e-7 is still seen. Where they are asked for, a parameter's delta must stay below
2**4. Elementwise work goes through the vector in chunks that fit the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .comm import Comm, Rows
from .errors import UserError, unknown

CHUNK = 1 << 16
FRACTION_BITS = 44
RANGE_BITS = 17
SQUARE_FRACTION_BITS = 53
SQUARE_RANGE_BITS = 4
SUMS = ("exact", "float32")
WIRES = ("float32", "bf16")


def check_wire(how: str, wire: str) -> None:
    """Refuse what cannot travel."""
    if wire not in WIRES:
        raise unknown("--wire", wire, WIRES)
    if wire == "bf16" and how != "float32":
        raise UserError(
            f"--wire bf16 rounds what travels, but --sum is {how}, whose sums are whole numbers; add --sum float32, or "
            "leave --wire at float32"
        )


class Unusable(Exception):
    """A client's result that cannot be averaged; the text says why."""


def chunks(length: int, size: int = CHUNK) -> Iterator[slice]:
    """Consecutive slices that cover 0..length."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def within(bucket: slice) -> Iterator[slice]:
    """Consecutive slices of the cache's size that cover a bucket."""
    for part in chunks(bucket.stop - bucket.start):
        yield slice(bucket.start + part.start, bucket.start + part.stop)


def even_chunks(length: int, most: int) -> Iterator[slice]:
    """As few consecutive slices of at most that size as cover 0..length, equal up to one."""
    count = -(-length // most)
    for k in range(count):
        yield slice(length * k // count, length * (k + 1) // count)


class Tally:
    """Running sums of one rank over one round, a row for each rank. The rows are made once and cleared for every round.

    Collective to make: the transport provides the memory, so that the rank that owns a slice can read its rows.
    `squares` is how many elements, from the first, will be asked for their squares; `wire` what sums travel as.
    """

    def __init__(
        self,
        comm: Comm,
        slice_length: int,
        cohort: int,
        how: str,
        device: torch.device | None = None,
        votes: bool = True,
        squares: int = 0,
        wire: str = "float32",
    ) -> None:
        if how not in SUMS:
            raise unknown("sum", how, SUMS)
        check_wire(how, wire)
        self.exact, self.slice, self.squared = how == "exact", slice_length, squares
        number = torch.int64 if self.exact else torch.float32
        self.sums = comm.rows(slice_length, number, device, torch.bfloat16 if wire == "bf16" else None)
        self.votes = comm.rows(slice_length, torch.int8 if cohort <= 127 else torch.int32, device) if votes else None
        self.squares = comm.rows(slice_length, number, device) if squares else None
        self.travels = len(self.sums.shared or ()) < comm.size - 1
        """whether any row is sent, and not shared"""
        self.clear(total=1)

    @property
    def kinds(self) -> list[Rows]:
        """The rows there are: sums, votes, squares."""
        return [rows for rows in (self.sums, self.votes, self.squares) if rows is not None]

    def clear(self, total: int) -> None:
        """Forget everything, for a cohort whose weights add up to `total`."""
        if total < 1:
            raise UserError(f"a cohort's weight is {total}; it must be at least 1: give every client a sample")
        for rows in self.kinds:
            for row in rows.mine:
                row.zero_()
        self.total, self.weight, self.clients = total, 0, 0
        self.later: tuple[Tensor, int] | None = None

    @property
    def limit(self) -> float:
        """The size that an element of a delta must stay below."""
        if self.exact:
            return float(2**RANGE_BITS)
        return torch.finfo(torch.float32).max / 2 / self.total

    def check(self, x: Tensor) -> None:
        """Raise `Unusable` for a vector that cannot be averaged."""
        check_range(x, self.limit, "")
        if self.squares is not None:
            most = float(2**SQUARE_RANGE_BITS) if self.exact else math.sqrt(self.limit)
            check_range(x[: self.squared], most, " of a mask that reads the variance")

    def add(self, x: Tensor, weight: int, later: bool = False) -> None:
        """Fold in one client's vector, which has passed `check`; one that is shorter than the rows counts as zero
        behind its end. With `later` it is counted, and left for `finish`: x must stay as it is until then. An error in
        here spoils the sums: it ends the run."""
        if weight < 1 or self.weight + weight > self.total:
            raise ValueError(f"weight {weight} on top of {self.weight} does not fit a cohort of {self.total}")
        self.weight += weight
        self.clients += 1
        self.later = x, weight
        if not later:
            self.finish(slice(0, self.slice))
            self.later = None

    def finish(self, bucket: slice) -> None:
        """Fold a bucket of what was left for later into every row."""
        if self.later is None:
            return
        x, weight = self.later
        for rank, x_S in enumerate(torch.split(x, self.slice)):
            for part in within(slice(bucket.start, min(bucket.stop, x_S.numel()))):
                self._fold(rank, part, x_S[part], weight)

    def _fold(self, rank: int, part: slice, x: Tensor, weight: int) -> None:
        self._add_product(self.sums.mine[rank][part], x, weight, FRACTION_BITS)
        if self.votes is not None:
            votes = self.votes.mine[rank][part]
            votes.add_(torch.sign(x).to(votes.dtype))
        if self.squares is not None:
            square = x.square().clamp_(max=float(4**SQUARE_RANGE_BITS)) if self.exact else x.square()
            self._add_product(self.squares.mine[rank][part], square, weight, SQUARE_FRACTION_BITS)

    def _add_product(self, sums: Tensor, x: Tensor, weight: int, fraction_bits: int) -> None:
        if self.exact:
            sums.add_(x.double().mul_(weight / self.total * 2.0**fraction_bits).round_().to(torch.int64))
        else:
            sums.add_(x, alpha=float(weight))


def check_range(x: Tensor, limit: float, why: str) -> None:
    """Raise `Unusable` unless every element is a number smaller than the limit."""
    low, high = (float(v) for v in x.aminmax())
    if math.isnan(low) or math.isinf(low) or math.isinf(high):
        raise Unusable("its update holds NaN or infinity")
    if not -limit < low <= high < limit:
        raise Unusable(f"its update reaches {max(-low, high):.3g}, beyond the range of {limit:.3g}{why}")
