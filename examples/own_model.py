"""A model of your own: a function (or a class) that asks for what it needs by the names of its parameters.

`channels`, `height`, `width` and `classes` are there for pictures, `tokens` and `length` for sequences, `outputs` where
labels are numbers to predict, and always `shape`, that of a sample. A parameter with another name needs a default.
From the root of the checkout:

    fedmpi train --data examples.own_dataset:make --model examples.own_model:tiny_cnn --split iid --clients 10 \
        --cohort 5 --rounds 10 --local.batch 10 --local.lr 0.1 --out runs/tiny-cnn

    fedmpi train --data examples.own_arrays:make --model examples.own_model:small_mlp --split natural --clients 12 \
        --cohort 6 --rounds 20 --out runs/small-mlp

The weights are drawn from --seed: a function need not seed anything.
"""

from __future__ import annotations

import math

from torch import nn


def tiny_cnn(channels: int, classes: int, filters: int = 16) -> nn.Module:
    """Two convolutions and a linear layer, for pictures of any size; the layers normalise by groups, not by batches."""
    return nn.Sequential(
        nn.Conv2d(channels, filters, 3, padding=1),
        nn.GroupNorm(4, filters),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(filters, filters, 3, padding=1),
        nn.GroupNorm(4, filters),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * filters, classes),
    )


def small_mlp(shape: tuple[int, ...], outputs: int, hidden: int = 32) -> nn.Module:
    """One hidden layer, for numbers in and numbers out."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.Tanh(), nn.Linear(hidden, outputs))
