"""A small set that is held out before the split: the server's meta set (FedMeta), or a set of which every client gets a
copy (FedShare).

It has its own seed, and follows the class proportions of the data or given class weights: the composition of the meta
set steers the model (Yao et al., 2019, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedmpi.errors import UserError
from fedmpi.seeds import data_generator

Ints = npt.NDArray[np.int64]


def hold_out(y: Ints, classes: int, size: int, seed: int, weights: Sequence[float] | None = None) -> Ints:
    """Return the indices of `size` random samples, ascending; with weights, in those class proportions."""
    if size >= len(y):
        raise UserError(f"--meta.size is {size} but there are only {len(y)} samples; leave some for the clients")
    rng = data_generator(seed, "holdout")
    if weights is None:
        return np.sort(rng.choice(len(y), size, replace=False))
    check_weights(weights, classes)
    wanted = apportion(size, np.asarray(weights, dtype=np.float64))
    chosen = []
    for label, count in enumerate(wanted):
        able = np.flatnonzero(y == label)
        if count > len(able):
            given = f"ask for {count} samples of class {label}, which has {len(able)}"
            raise UserError(f"--meta.weights {given}; lower its weight or --meta.size")
        chosen.append(rng.choice(able, count, replace=False))
    return np.sort(np.concatenate(chosen))


def check_weights(weights: Sequence[float], classes: int | None = None) -> None:
    """Check that weights are proportions, one per class."""
    if not all(math.isfinite(w) and w >= 0 for w in weights) or not 0 < sum(weights) < math.inf:
        raise UserError(f"--meta.weights are {list(weights)}; they must be numbers >= 0, and not all zero")
    if classes is not None and len(weights) != classes:
        given = f"{len(weights)} numbers, but the data have {classes} classes"
        raise UserError(f"--meta.weights are {given}: give one each")


def apportion(total: int, weights: npt.NDArray[np.float64]) -> Ints:
    """Return integers in those proportions that add up to the total: the largest remainders are rounded up."""
    exact = weights / weights.sum() * total
    parts: Ints = np.floor(exact).astype(np.int64)
    short = total - int(parts.sum())
    parts[np.argsort(parts - exact, kind="stable")[:short]] += 1
    return parts
