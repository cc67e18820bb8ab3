"""What every program of benchmarks/round.py shares: the job, its models in plain PyTorch, and the gate between blocks
of rounds. It needs torch and numpy alone, so that a peer in an environment of its own can import it.

A job is a folder: job.json, and the samples and labels as x.npy (uint8) and y.npy, named by FEDMPI_JOB.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def job() -> SimpleNamespace:
    """model, clients, cohort, batch, steps, epochs, lr, momentum, mean, std, device; and the folder."""
    folder = Path(os.environ["FEDMPI_JOB"])
    return SimpleNamespace(folder=folder, **json.loads((folder / "job.json").read_text()))


def samples(of: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """All samples, normalised, and their labels."""
    x = torch.from_numpy(np.load(of.folder / "x.npy"))
    if not of.mean:  # tokens
        return x.long(), torch.from_numpy(np.load(of.folder / "y.npy"))
    x = x.float().div_(255)
    shape = (1, -1, 1, 1)
    x.sub_(torch.tensor(of.mean).view(shape)).div_(torch.tensor(of.std).view(shape))
    return x, torch.from_numpy(np.load(of.folder / "y.npy"))


def clients(of: SimpleNamespace, count: int) -> list[Tensor]:
    """The numbers of each client's samples: an iid split."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    return list(order.chunk(of.clients))


def pictures() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The job's samples for 'fedmpi train --data common:pictures'; a few of them to test on."""
    folder = job().folder
    x, y = torch.from_numpy(np.load(folder / "x.npy")), torch.from_numpy(np.load(folder / "y.npy"))
    return (x, y), (x[:64], y[:64])


def gate() -> Iterator[Callable[..., None]]:
    """Run blocks of rounds on request: yield before every round, print the seconds after the last one.

    The yielded function takes further numbers to print with the block.
    """
    on_device = job().device != "cpu" and torch.accelerator.is_available()
    wait: Callable[[], None] = torch.accelerator.synchronize if on_device else lambda: None
    print("ready", flush=True)
    for line in sys.stdin:
        more: dict[str, object] = {}
        wait()
        started, busy = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            yield more.update
        wait()
        times = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - busy}
        print("took", json.dumps(times | more), flush=True)


class LeNet(nn.Module):
    """LeNet-5 for 28x28 images, as everybody writes it: 61,706 parameters."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        return self.fc3(x)


class Block(nn.Module):
    """Two 3x3 convolutions and a way round them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, width), nn.GroupNorm(2, width)
        other = (nn.Conv2d(before, width, 1, stride, bias=False), nn.GroupNorm(2, width))
        self.way = nn.Identity() if before == width and stride == 1 else nn.Sequential(*other)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.way(x))


def resnet18(channels: int, classes: int) -> nn.Module:
    """ResNet-18 with GroupNorm and the stem of ImageNet: 11.2 million parameters for 10 classes."""
    stem = [nn.Conv2d(channels, 64, 7, 2, padding=3, bias=False), nn.GroupNorm(2, 64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    widths = (64, 64, 128, 256, 512)
    blocks = [
        Block(before if first else width, width, 2 if first and before != width else 1)
        for before, width in zip(widths, widths[1:], strict=False)
        for first in (True, False)
    ]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class Transformer(nn.Module):
    """Two layers of an encoder of width 128 over 64 tokens, and the class of their mean: 0.4 million parameters."""

    def __init__(self, classes: int, tokens: int = 128) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, 128), nn.Parameter(torch.randn(64, 128) * 0.02)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x) + self.place).mean(1))


def model(of: SimpleNamespace) -> nn.Module:
    """The job's model, the same on every rank."""
    torch.manual_seed(0)
    if of.model == "transformer":
        return Transformer(10)
    make = {"lenet": LeNet, "own-lenet": LeNet, "resnet18": resnet18}[of.model]
    return make(len(of.mean), 10)
