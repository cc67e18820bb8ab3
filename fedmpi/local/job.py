"""A client's work as a rule sees it.

P: the trainable parameters, one flat vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Job(Protocol):
    """One client's training in one round."""

    start_P: Tensor
    """the global parameters, to be read only"""
    x_P: Tensor
    """the client's own copy of them, to be trained in place"""
    delta_P: Tensor
    """memory for the result"""

    def batches(self) -> Iterable[Any]:
        """This client's batches of this round, in an order that depends on (seed, round, client) alone."""

    def grad(self, x_P: Tensor, batch: Any) -> Tensor:
        """The gradient of the batch's mean loss at x_P; the caller's to overwrite, and valid until the next call."""


@dataclass(frozen=True)
class LocalResult:
    """What a client delivers: delta = where it ended - where it started."""

    delta_P: Tensor


LocalRule = Callable[[Job], LocalResult]


@dataclass(frozen=True)
class LocalKnobs:
    """What a local rule is made of."""

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
