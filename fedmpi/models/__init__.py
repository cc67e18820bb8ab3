"""Models by name: a row is a function (channels, height, width, classes) -> module, and how its weights lie in memory
best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ..errors import unknown
from .lenet import lenet
from .logistic import logistic


@dataclass(frozen=True)
class ModelRow:
    """How to make a model; `channels_last` where its convolutions run faster on a CPU with channels innermost."""

    make: Callable[[int, int, int, int], nn.Module]
    channels_last: bool = False


MODELS = {
    "lenet": ModelRow(lenet, channels_last=True),  # a training step takes a quarter less time
    "logistic": ModelRow(logistic),
}


def find_model(name: str) -> ModelRow:
    """The row of that name."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]
