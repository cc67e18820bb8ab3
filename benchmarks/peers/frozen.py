"""The model of `memory.py --base`: linear layers of width 4096, frozen in bf16, each with a trained adapter of rank 8.
FEDMPI_BASE is the number of millions of frozen parameters; if it is negative, the adapters are there without them."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, RANK = 4096, 8


class Layer(nn.Module):
    """A frozen linear layer, if any, plus its adapter."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        shape = (WIDTH, WIDTH) if frozen else (0, WIDTH)
        weight = torch.randn(shape, dtype=torch.bfloat16).mul_(WIDTH**-0.5)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.a = nn.Parameter(torch.randn(RANK, WIDTH) * WIDTH**-0.5)
        self.b = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x: Tensor) -> Tensor:
        adapted = F.linear(F.linear(x, self.a), self.b)
        return x + adapted + (F.linear(x.bfloat16(), self.weight).float() if len(self.weight) else 0)


class Adapted(nn.Module):
    """Pixels, frozen layers with adapters, classes."""

    def __init__(self, pixels: int, classes: int) -> None:
        super().__init__()
        millions = int(os.environ["FEDMPI_BASE"])
        count = round(abs(millions) * 1e6 / WIDTH**2)
        self.first, self.last = (nn.Linear(n, m).requires_grad_(False) for n, m in ((pixels, WIDTH), (WIDTH, classes)))
        self.layers = nn.Sequential(*(Layer(millions > 0) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(F.layer_norm(self.layers(self.first(x.flatten(1))), (WIDTH,)))
        return logits


def make(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Make the model."""
    return Adapted(channels * height * width, classes)
