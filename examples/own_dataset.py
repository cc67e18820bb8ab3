"""Data of your own that do not fit into memory: map-style torch Datasets in a `fedmpi.Datasets`.

A folder of small pictures, one file each, of three kinds: a disc, a frame, a cross. An item is read from its file when
it is needed, and turned over and shaded at random. What `__getitem__` draws from torch, numpy or random is seeded for
each item and round, so the result is the same to the bit on any number of ranks and workers. From the root of the
checkout:

    fedmpi train --data examples.own_dataset:make --model lenet --split iid --clients 10 --cohort 5 --rounds 15 \
        --local.batch 10 --local.lr 0.1 --out runs/dataset

    fedmpi train --data examples.own_dataset:make --model lenet --split iid --clients 10 --cohort 5 --rounds 15 \
        --local.batch 10 --local.lr 0.1 --workers 2 --out runs/dataset-workers

When to choose this: when the data are larger than the memory, or when every item needs a transform of its own. Else
return `Arrays` (examples/own_arrays.py): a batch is then one indexing operation and not 32 calls of Python. `--workers`
lets that many more processes a rank read ahead. They are started anew for every client, which takes longer than to read
these tiny files; they pay off where an item takes milliseconds.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from fedmpi import Datasets
from fedmpi.data.store import cache_folder

SIDE, CLASSES = 16, 3


class Pictures(Dataset):
    """The pictures of a folder of files NUMBER-CLASS.npy."""

    def __init__(self, folder: Path, varied: bool) -> None:
        self.files = sorted(folder.glob("*.npy"))  # sorted: all ranks must number the samples alike
        self.varied = varied
        self.targets = [int(path.stem.split("-")[1]) for path in self.files]  # known without reading a picture

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = torch.from_numpy(np.load(self.files[index])).float().div(255).sub(0.5)  # [1, SIDE, SIDE]
        if self.varied:
            over = [axis for axis in (1, 2) if torch.rand(()) < 0.5]
            picture = picture.flip(over) * (0.5 + torch.rand(()))
        return picture, self.targets[index]


def make(root: Path | None) -> Datasets:
    """Train and test pictures. `root` is what --data_root says, a folder or None; then they are kept in the cache."""
    folder = (root or cache_folder()) / "example-shapes"
    if not folder.exists():
        draw(folder)
    return Datasets(Pictures(folder / "train", varied=True), Pictures(folder / "test", varied=False), name="shapes")


def draw(folder: Path) -> None:
    """Write the pictures under a private name, then rename: several ranks may come at once, nobody sees half of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".shapes-", dir=folder.parent))
    rng = np.random.default_rng(0)
    for part, count in (("train", 300), ("test", 90)):
        (aside / part).mkdir()
        for i in range(count):
            kind = i % CLASSES
            grey = 255 * shape(kind, rng) + rng.normal(0, 30, size=(1, SIDE, SIDE))
            np.save(aside / part / f"{i:03}-{kind}.npy", grey.clip(0, 255).astype(np.uint8))
    try:
        os.rename(aside, folder)
    except OSError:  # another rank was faster
        shutil.rmtree(aside)
        if not folder.exists():
            raise


def shape(kind: int, rng: np.random.Generator) -> np.ndarray:
    """A disc, a frame or a cross somewhere near the middle: 1 inside, 0 outside."""
    middle, size = rng.uniform(6, 10, size=2), rng.uniform(3, 6)
    down, across = np.abs(np.mgrid[:SIDE, :SIDE] - middle[:, None, None])
    disc = np.hypot(down, across) < size
    frame = np.abs(np.maximum(down, across) - size) < 1
    cross = (np.minimum(down, across) < 1) & (np.maximum(down, across) < size)
    return (disc, frame, cross)[kind]
