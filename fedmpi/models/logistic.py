"""One linear layer: multinomial logistic regression, the papers' convex objective; least squares where labels are
numbers."""

from __future__ import annotations

import math

from torch import nn


def logistic(shape: tuple[int, ...], classes: int = 0, outputs: int = 0) -> nn.Module:
    """A linear layer on all numbers of a sample, with an output a class or a number to predict."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes or outputs))
