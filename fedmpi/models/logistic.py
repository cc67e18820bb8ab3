"""Multinomial logistic regression: the papers' convex objective."""

from __future__ import annotations

from torch import nn


def logistic(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """One linear layer on the pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, classes))
