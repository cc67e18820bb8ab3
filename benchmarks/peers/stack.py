"""The model of `large.py`: a stack of linear layers of equal width, with about FEDMPI_PARAMETERS parameters."""

from __future__ import annotations

import math
import os

from torch import nn

DEPTH = 8  # layers of equal width, between that of the pixels and that of the classes


def make(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Return the model: with tanh, every parameter has a gradient."""
    pixels, wanted = channels * height * width, int(os.environ["FEDMPI_PARAMETERS"])
    rest = pixels + classes + DEPTH + 1  # parameters: DEPTH w^2 + rest w + classes
    wide = max(round((math.sqrt(rest**2 + 4 * DEPTH * wanted) - rest) / (2 * DEPTH)), 1)
    sizes = [pixels, *[wide] * (DEPTH + 1)]
    layers = [layer for pair in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(wide, classes))
