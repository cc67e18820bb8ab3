"""Feature skew: what an image looks like depends on its class or on the client that has it.

Images stay grey in memory. A look is a row of a small table (a pair of colours, an angle), each sample has the number
of one, and a batch is painted on the device when it is used. So a coloured MNIST costs no more memory than MNIST, and a
look may depend on who has the sample, which is known only after the split.

Painting treats every pixel by itself, without a matrix product, so a sample gets the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedmpi.errors import UserError
from fedmpi.seeds import data_generator

if TYPE_CHECKING:
    from fedmpi.data.arrays import Arrays
    from fedmpi.data.splits import Partition

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Looks:
    """The looks that there are, how one is painted, and who gets which."""

    channels: int
    """of a painted image"""
    table: Tensor
    """float32 [looks, ...], a row a look"""
    paint: Callable[[Tensor, Tensor], Tensor]
    """(floats [b, 1, height, width] of 0 to 255, rows of the table [b, ...]) -> floats [b, channels, height, width]"""
    train: Callable[[Ints, Ints, int, np.random.Generator, np.random.Generator], Ints]
    """(labels, client of each sample, clients, drawn from the run's seed, drawn alike in every run) -> a look each; a
    sample that no client has (held out) has the client number `clients`"""
    test: Callable[[Ints, np.random.Generator], Ints]
    """(labels, drawn alike in every run) -> a look each"""


def dress(arrays: Arrays, partition: Partition, seed: int) -> Arrays:
    """The data with a look for each sample, for data that have looks."""
    looks = arrays.looks
    if looks is None:
        return arrays
    client = np.full(len(arrays.y), partition.clients)
    client[partition.order] = np.repeat(np.arange(partition.clients), np.diff(partition.offsets))
    runs, always, tests = (data_generator(number, "looks", k) for k, number in enumerate((seed, 0, 0)))
    train = looks.train(arrays.y.numpy(), client, partition.clients, runs, always)
    test = looks.test(arrays.test_y.numpy(), tests)
    return replace(arrays, look=torch.from_numpy(train), test_look=torch.from_numpy(test))


def seen(arrays: Arrays, samples: Tensor, test: bool = False) -> Tensor:
    """The images of these samples, uint8 [k, channels, height, width], as a model sees them before normalisation."""
    if arrays.kind != "images":
        raise UserError(
            f"data set '{arrays.name}' has {arrays.kind}; only images can be shown, so use another data set"
        )
    x, look = (arrays.test_x, arrays.test_look) if test else (arrays.x, arrays.look)
    if arrays.looks is None:
        return x[samples]
    if look is None:
        raise UserError(f"data set '{arrays.name}' has no look for its samples yet; split it and call dress first")
    painted = arrays.looks.paint(x[samples].float(), arrays.looks.table[look[samples]])
    return painted.round().clamp(0, 255).to(torch.uint8)


def tint(grey: Tensor, pairs: Tensor) -> Tensor:
    """Grey images in colours: pairs [b, 2, 3] are the colours, 0 to 255, of full ink (foreground) and of none."""
    foreground, background = pairs.to(grey.dtype)[..., None, None].unbind(1)
    return background + (foreground - background) * (grey / 255)


def turn(images: Tensor, cosines: Tensor) -> Tensor:
    """Images turned about their centre, counter-clockwise as one sees them for a positive angle.

    cosines [b, 2] are cosine and sine of each angle. Between pixels it is bilinear; what comes in from outside is 0.
    """
    height, width = images.shape[-2:]
    down, right = (  # of the pixels' centres from the image's centre, in pixels
        torch.arange(n, dtype=images.dtype, device=images.device) - (n - 1) / 2 for n in (height, width)
    )
    down, right = down[:, None], right[None, :]
    cos, sin = cosines.to(images.dtype)[..., None, None].unbind(1)
    x, y = cos * right - sin * down, sin * right + cos * down  # where each pixel comes from: turned back
    grid = torch.stack([x * (2 / width), y * (2 / height)], dim=-1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
