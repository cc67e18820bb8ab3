"""One linear layer: multinomial logistic regression, the papers' convex objective; least squares where labels are
numbers."""

from __future__ import annotations

import math

from torch import nn

from .kernels.byhand import Layered, Network


class Logistic(Layered, nn.Sequential):
    """A linear layer on all numbers of a sample."""

    def __init__(self, numbers: int, outputs: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(numbers, outputs))

    @property
    def network(self) -> Network:
        """What it consists of, so that its gradient can be written out (byhand.py)."""
        linear = self[1]
        assert isinstance(linear, nn.Linear)
        return Network((), (linear,))


def logistic(shape: tuple[int, ...], classes: int = 0, outputs: int = 0) -> nn.Module:
    """With an output a class, or a number to predict."""
    return Logistic(math.prod(shape), classes or outputs)
