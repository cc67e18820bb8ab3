"""What a rank keeps of its clients: a weighted sum of their deltas and a sum of the signs. A delta is folded in and
forgotten.

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
int32 beyond (NCCL has no int16). Elementwise work goes through the vector in chunks that fit the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .comm import Comm
from .errors import UserError, unknown

CHUNK = 1 << 16
FRACTION_BITS = 44
RANGE_BITS = 17
SUMS = ("exact", "float32")


class Unusable(Exception):
    """A client's result that cannot be averaged; the text says why."""


def chunks(length: int, size: int = CHUNK) -> Iterator[slice]:
    """Consecutive slices that cover 0..length."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


class Tally:
    """Running sums of one rank over one round, a row for each rank. The rows are made once and cleared for every round.

    Collective to make: the transport provides the memory, so that the rank that owns a slice can read its rows.
    """

    def __init__(
        self, comm: Comm, slice_length: int, cohort: int, how: str, device: torch.device | None = None
    ) -> None:
        if how not in SUMS:
            raise unknown("sum", how, SUMS)
        self.exact, self.slice = how == "exact", slice_length
        self.sums = comm.rows(slice_length, torch.int64 if self.exact else torch.float32, device)
        self.votes = comm.rows(slice_length, torch.int8 if cohort <= 127 else torch.int32, device)
        self.clear(total=1)

    def clear(self, total: int) -> None:
        """Forget everything, for a cohort whose weights add up to `total`."""
        if total < 1:
            raise UserError(f"a cohort's weight is {total}; it must be at least 1: give every client a sample")
        for row in (*self.sums.mine, *self.votes.mine):
            row.zero_()
        self.total, self.weight, self.clients = total, 0, 0

    @property
    def limit(self) -> float:
        """The size that an element of a delta must stay below."""
        if self.exact:
            return float(2**RANGE_BITS)
        return torch.finfo(torch.float32).max / 2 / self.total

    def check(self, delta_N: Tensor) -> None:
        """Raise `Unusable` for a delta that cannot be averaged."""
        low, high = (float(v) for v in delta_N.aminmax())
        if math.isnan(low) or math.isinf(low) or math.isinf(high):
            raise Unusable("its update holds NaN or infinity")
        if not -self.limit < low <= high < self.limit:
            raise Unusable(f"its update reaches {max(-low, high):.3g}, beyond the range of {self.limit:.3g}")

    def add(self, delta_N: Tensor, weight: int) -> None:
        """Fold in one client's delta, which has passed `check`. An error in here spoils the sums: it ends the run."""
        if weight < 1 or self.weight + weight > self.total:
            raise ValueError(f"weight {weight} on top of {self.weight} does not fit a cohort of {self.total}")
        fold = self._fold_exact if self.exact else self._fold_float
        for sums, votes, delta in zip(self.sums.mine, self.votes.mine, torch.split(delta_N, self.slice), strict=True):
            for part in chunks(self.slice):
                fold(sums[part], delta[part], weight)
                votes[part].add_(torch.sign(delta[part]).to(votes.dtype))
        self.weight += weight
        self.clients += 1

    def _fold_exact(self, sums: Tensor, delta: Tensor, weight: int) -> None:
        fixed = delta.double().mul_(weight / self.total * 2.0**FRACTION_BITS).round_()
        sums.add_(fixed.to(torch.int64))

    def _fold_float(self, sums: Tensor, delta: Tensor, weight: int) -> None:
        sums.add_(delta, alpha=float(weight))
