"""The plain definition of what a round aggregates, in one process: documentation, and the oracle of the tests.

Clients n with whole weights w_n (their samples) send deltas d_n. The cohort was planned with total weight W; those that
delivered weigh V <= W. Elementwise:

    mean   = 1/V * sum_n w_n d_n            votes = sum_n sign(d_n)            square = 1/V * sum_n w_n d_n^2

The real collective (`exchange`) gives the same bits on any number of ranks, and no process holds two deltas.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sums import FRACTION_BITS, SQUARE_FRACTION_BITS


def mean(vectors: Sequence[Tensor], weights: Sequence[int], planned: int, bits: int = FRACTION_BITS) -> Tensor:
    """Return the weighted mean in fixed point: shares of the planned weight, rounded to 2**-bits and added exactly."""
    total = torch.zeros(vectors[0].shape, dtype=torch.int64)
    for x, weight in zip(vectors, weights, strict=True):
        total += (x.double() * (weight / planned * 2.0**bits)).round().to(torch.int64)
    delivered = sum(weights)
    if delivered == planned:
        return total.float() * 2.0**-bits
    return (total.double() * (planned / delivered * 2.0**-bits)).float()


def votes(deltas: Sequence[Tensor]) -> Tensor:
    """Return the sum of the signs: one vote per client, whatever its weight."""
    return torch.stack([delta.sign() for delta in deltas]).sum(0).to(torch.int64)


def mean_square(deltas: Sequence[Tensor], weights: Sequence[int], planned: int) -> Tensor:
    """Return the weighted mean of the squares."""
    return mean([delta.square() for delta in deltas], weights, planned, SQUARE_FRACTION_BITS)
