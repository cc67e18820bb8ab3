"""Data sets, and the split of their samples among clients.

A data set is a row of `DATASETS`: a function from a data root (or None for the default) to `Arrays`, its source, and
the model and skew that the papers use with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedmpi.data.arrays import Arrays, Data
from fedmpi.data.hf import TextOptions, load_hub
from fedmpi.data.holdout import check_weights, hold_out
from fedmpi.data.own import Datasets, as_data, load_own
from fedmpi.data.sets import cifar, femnist, glyphs, ood, shakespeare, tinyimagenet, vision
from fedmpi.data.splits import SPLITS, Ints, Partition, split
from fedmpi.data.store import Source
from fedmpi.data.styles import assign_styles
from fedmpi.data.trees import Pad
from fedmpi.errors import UserError, unknown
from fedmpi.plugins.hub import on_hub

__all__ = [
    "DATASETS",
    "SPLITS",
    "Arrays",
    "Data",
    "DataRow",
    "Datasets",
    "Ints",
    "Pad",
    "Partition",
    "TextOptions",
    "as_data",
    "check_weights",
    "assign_styles",
    "find_data",
    "hold_out",
    "load",
    "split",
]


@dataclass(frozen=True)
class DataRow:
    """A built-in data set."""

    load: Callable[[Path | None], Arrays]  # loads it from a data root
    source: Callable[[Path | None], Source]  # the files that `load` prepares it from
    about: str
    model: str = "lenet"  # that of the papers
    classes: int = 2  # the papers' number of classes per client under label skew


RESNET = "resnet18-gn"

DATASETS: dict[str, DataRow] = {
    "glyphs": DataRow(glyphs.glyphs, glyphs.source, "digits drawn here by 500 writers; no download"),
    "mnist": DataRow(vision.mnist, vision.mnist_source, "handwritten digits"),
    "fmnist": DataRow(vision.fmnist, vision.fmnist_source, "Fashion-MNIST: pictures of clothes"),
    "cifar10": DataRow(cifar.cifar10, cifar.cifar10_source, "small photographs, 10 classes", RESNET),
    "cifar100": DataRow(cifar.cifar100, cifar.cifar100_source, "small photographs, 100 classes", RESNET, 10),
    "tinyimagenet": DataRow(
        tinyimagenet.tinyimagenet, tinyimagenet.tinyimagenet_source, "64x64 photographs, 200 classes", RESNET, 20
    ),
    "femnist": DataRow(femnist.femnist, femnist.femnist_source, "digits or letters by their writers"),
    "shakespeare": DataRow(
        shakespeare.shakespeare, shakespeare.shakespeare_source, "the next character of a role's lines", "gru"
    ),
    "cmnist2": DataRow(ood.cmnist2, vision.mnist_source, "MNIST in red and green, colours reversed in the test set"),
    "fedcmnist": DataRow(ood.fedcmnist, vision.mnist_source, "MNIST in colours of the class, others in the test set"),
    "fedrotmnist": DataRow(ood.fedrotmnist, vision.mnist_source, "MNIST turned by class, upright in the test set"),
    "fedrotmnist-clients": DataRow(
        ood.fedrotmnist_clients, vision.mnist_source, "MNIST turned by client, by another angle in the test set"
    ),
}


def find_data(name: str) -> DataRow:
    """Return the row of that name."""
    if name.endswith(".py"):
        raise UserError(f"data set '{name}' is a file; write module:function, such as {Path(name).stem}:make")
    if name not in DATASETS:
        raise unknown("data set", name, [*DATASETS, "hf:NAME_OR_FOLDER"], own=True)
    return DATASETS[name]


def load(name: str, root: str | None = None, texts: TextOptions | None = None) -> Data:
    """Load a data set by name or import path, from the folder `root` or the default data root. `texts`: the options
    of a data set of Hugging Face."""
    if on_hub(name):
        return load_hub(name, texts or TextOptions())
    folder = Path(root).expanduser() if root else None
    return load_own(name, folder) if ":" in name else find_data(name).load(folder)
