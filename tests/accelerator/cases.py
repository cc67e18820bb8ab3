"""Train many small runs in one process: `python -m tests.accelerator.cases OUT COMM DEVICE SUMS [NAME ...] [--NAME=X]`.

On "cpu" the plain path of the CPU is taken, without the hand-written kernels that only a CPU has: its models are what
the accelerator's must equal to the bit. Under a launcher, each process is a rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SMALL = "--data glyphs --clients 150 --cohort 4 --rounds 2 --local.steps 2 --threads 1 --log_to none --eval.every 4"
SMALL += " --eval.samples 50 --local.batch 16 --checkpoint.keep 0"
NAMED = "fedavg fedavgm fedprox fednova fedadam fedyogi fedadagrad uga fedmeta fedmeta-uga fedgma2021"
HERE = "tests.accelerator.cases"
PLAIN = "--step.layout contiguous"  # where a model of the user's own has it on a CPU only

CASES: dict[str, str] = {name: f"--algorithm {name} --mask gma" for name in NAMED.split()}
CASES["fednova"] += " --local.work uniform:0.3,1.0"
CASES |= {
    "scaffold": "--algorithm scaffold --mask gma --rounds 3 --clients 8",
    "fedshare": "--algorithm fedshare --mask gma --meta.size 60",
    "mean": "--mask mean",
    "and": "--mask and",
    "sand": "--mask sand",
    "adamw": "--local.optimizer adamw --local.lr 0.001 --local.accumulate 2",
    "dropout": "--model cnn",
    "logistic": "--model logistic --local.clip 1.0",
    "batchnorm": f"--model {HERE}:batch_norm {PLAIN} --evaluate clients,agreement,gap",
    "recurrent": f"--data {HERE}:sequences --split iid --model gru",
    "recurrent-uga": f"--data {HERE}:sequences --split iid --model gru --algorithm uga --local.lr 0.05",
    "augmented": "--augment crop:2+flip",
    "dataset": f"--data {HERE}:dataset --split iid --model {HERE}:batch_norm {PLAIN}",
    "dataset-workers": f"--data {HERE}:dataset --split iid --model {HERE}:batch_norm {PLAIN} --workers 1",
    "data-on-host": "--data_on host --augment flip",
    "bf16": "--step.precision bf16",
    "together": "--step.together 2",
    "mapped": "--algorithm scaffold --rounds 3 --clients 8 --memory.limit 0.0001 --step.together 2",
}


def batch_norm() -> nn.Module:
    """Return a small model with float and integer buffers."""
    body = (nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(4 * 13 * 13, 10))


def adaptive() -> nn.Module:
    """Return a model with a layer that CUDA cannot repeat to the bit."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(5), nn.Flatten(), nn.Linear(50, 10))


class Hungry(nn.Module):
    """Runs out of memory in training, at its third batch and the following: as often as FITS_AFTER says, or always."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(28 * 28, 10)
        self.batches = self.failed = 0

    def forward(self, x: Tensor) -> Tensor:
        self.batches += self.training
        if self.training and self.batches >= 3 and self.failed < int(os.environ.get("FITS_AFTER", "1000")):
            self.failed += 1
            raise torch.OutOfMemoryError("pretend out of memory. Tried to allocate 2.00 GiB")
        out: Tensor = self.layer(x.flatten(1))
        return out


def hungry() -> nn.Module:
    """Return a model that does not fit."""
    return Hungry()


def sequences(root: object = None) -> object:
    """Return token sequences: the label is the parity of the first token."""
    from fedmpi.data import Arrays

    x = np.random.default_rng(0).integers(0, 12, (400, 8), dtype=np.uint8)
    y = (x[:, 0] % 2).astype(np.int64)
    some, more = torch.from_numpy(x), torch.from_numpy(y)
    return Arrays("parity", 2, some[:320], more[:320], some[320:], more[320:], tokens=12)


class Noisy(Dataset[tuple[Tensor, int]]):
    """Images of a user's own, with a random transform."""

    def __init__(self, count: int, first: int) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.full((1, 28, 28), (self.first + index) % 10 / 10)
        return image + 0.1 * torch.rand(1, 28, 28), (self.first + index) % 10


def dataset(root: object = None) -> object:
    """Return a train and a test Dataset."""
    from fedmpi.data import Datasets

    return Datasets(Noisy(200, 0), Noisy(40, 3), classes=10, labels=[i % 10 for i in range(200)])


def plain() -> None:
    """Switch the hand-written kernels of the CPU off."""
    from fedmpi.clients import task
    from fedmpi.models.kernels import convpool

    task.by_hand = lambda *_: None  # type: ignore[assignment]
    convpool.takes = lambda *_: False  # type: ignore[assignment]


def main(out: str, which: str, device: str, sums: str, *names: str) -> None:
    """Train the cases of these names, or all; names that begin with a dash are options of each."""
    if device == "cpu":
        plain()
    else:
        from tests.accelerator import nccl, pretend

        assert pretend and nccl
    from fedmpi.comm import connect, share_node
    from fedmpi.comm.env import find_place
    from fedmpi.device import sums_device
    from fedmpi.runs.build import prepare
    from fedmpi.runs.options import parse
    from fedmpi.runs.run import run, settle

    place = find_place(os.environ)
    more = [name for name in names if name.startswith("-")]
    common = [*SMALL.split(), "--device", device, "--sums", sums, "--quiet", "true", *more]
    first = prepare(parse([*common, "--out", f"{out}/none"]))
    here = settle(first.cfg, place)
    on = sums_device(here, sums)
    comm = connect(which, place, on, 60.0, os.environ)
    if on.type == "cpu":
        share_node(comm)
    for name in [name for name in names if name not in more] or CASES:
        spec = prepare(parse([*common, *CASES[name].split(), "--out", f"{out}/{name}"]))
        run(spec, comm, place, settle(spec.cfg, place), os.environ)
    if on.type != "cpu" and comm.rank == 0:
        Path(out, "traffic.json").write_text(json.dumps(nccl.traffic))
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
