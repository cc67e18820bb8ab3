"""Agreement masks: how much of each element of the mean delta to keep (Tenison et al., TMLR 2023, eq. 3).

S: elements of the slice this rank owns.  votes_S = sum over clients of sign(delta), so |votes_S| <= clients; a client
whose element did not move abstains.  Agreement A = |votes| / clients, unweighted: every client has one vote whatever
its size.

A mask is a function (votes_S, clients) -> mask_S. To add one, write it and give it a row in `MASKS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from .errors import unknown

Mask = Callable[[Tensor, int], Tensor]


def quorum(tau: float, clients: int) -> int:
    """The smallest |votes| that counts as agreement: ceil(tau * clients), with tau read as the fraction it stands for.

    In floating point 0.1 * 30 is a little over 3 and would ask for 4 votes; as a fraction it is 3.
    """
    return math.ceil(Fraction(tau).limit_denominator(1_000_000) * clients)


def mean(tau: float) -> Mask:
    """1 everywhere: plain weighted averaging, whatever tau says."""

    def mask(votes_S: Tensor, clients: int) -> Tensor:
        return torch.ones(votes_S.shape, device=votes_S.device)

    return mask


def reached(size_S: Tensor, least: int) -> Tensor:
    """1 where a whole number is at least `least`, else 0, in the type of the votes.

    Arithmetic on the small integers that votes are: a comparison or a selection costs several times as much.
    """
    return (size_S - least).clamp_(-1, 0).add_(1)


def gma(tau: float) -> Mask:
    """1 where A >= tau, A elsewhere: disagreement scales a step down, it never stops it."""

    def mask(votes_S: Tensor, clients: int) -> Tensor:
        size_S = votes_S.abs()
        full_S = reached(size_S, quorum(tau, clients)).mul_(clients)
        return torch.maximum(size_S, full_S).float().div_(clients)

    return mask


def hard(tau: float) -> Mask:
    """1 where A >= tau, 0 elsewhere: the AND-mask that the paper compares with."""

    def mask(votes_S: Tensor, clients: int) -> Tensor:
        return reached(votes_S.abs(), quorum(tau, clients)).float()

    return mask


MASKS: dict[str, Callable[[float], Mask]] = {"mean": mean, "gma": gma, "and": hard}


def make_mask(name: str, tau: float) -> Mask:
    """The mask of that name with threshold tau."""
    if name not in MASKS:
        raise unknown("mask", name, MASKS)
    return MASKS[name](tau)
