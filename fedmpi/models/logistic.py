"""One linear layer: multinomial logistic regression, the papers' convex objective; least squares for regression."""

from __future__ import annotations

import math

from torch import nn

from .kernels.byhand import Layered, Network


class Logistic(Layered, nn.Sequential):
    """A linear layer on the flattened sample, with one output per class, or per number to predict."""

    def __init__(self, shape: tuple[int, ...], classes: int = 0, outputs: int = 0) -> None:
        super().__init__(nn.Flatten(), nn.Linear(math.prod(shape), classes or outputs))

    @property
    def network(self) -> Network:
        """Return the layers, so that the gradient can be computed without autograd (byhand.py)."""
        linear = self[1]
        assert isinstance(linear, nn.Linear)
        return Network((), (linear,))
