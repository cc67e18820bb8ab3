"""Data sets as arrays, and how their samples are split among clients.

A data set is a row of `DATASETS`: a function from a folder (or None for the usual one) to `Arrays`. For `glyphs` the
folder is where the drawn images are kept, for the others where their files lie.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedmpi.data import glyphs, vision
from fedmpi.data.arrays import Arrays
from fedmpi.data.holdout import check_weights, hold_out
from fedmpi.data.splits import SPLITS, Ints, Partition, split
from fedmpi.errors import unknown

__all__ = ["DATASETS", "SPLITS", "Arrays", "Ints", "Partition", "check_weights", "hold_out", "load", "split"]

DATASETS: dict[str, Callable[[Path | None], Arrays]] = {
    "glyphs": glyphs.glyphs,
    "mnist": vision.mnist,
    "fmnist": vision.fmnist,
}


def load(name: str, root: str | None = None) -> Arrays:
    """The data set of that name, from the folder `root` or from its usual place."""
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    return DATASETS[name](Path(root).expanduser() if root else None)
