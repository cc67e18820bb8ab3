"""Feature skew: the style of an image (its colours, its angle) depends on its class or on its client.

Images stay grey in memory. A style is a row of a small table (colours or an angle). Each sample stores the index
of its style, which is applied on the device, batch by batch. So a coloured MNIST takes no more memory than MNIST, and a
style may depend on the client, which is known only after the split.

Styles treat every pixel by itself, without a matrix product, so a sample gets the same bits in any batch.
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

from fedmpi.seeds import data_generator

if TYPE_CHECKING:
    from fedmpi.data.arrays import Arrays
    from fedmpi.data.splits import Partition

Ints = npt.NDArray[np.int64]
Assignment = Callable[[Ints, Ints, int, np.random.Generator, np.random.Generator], Ints]


@dataclass(frozen=True)
class Styles:
    """The table of styles, how one is applied, and which sample gets which."""

    channels: int  # of an image with its style applied
    table: Tensor  # float32 [styles, ...], one row per style
    apply_style: Callable[[Tensor, Tensor], Tensor]
    """(floats [b, 1, height, width] of 0 to 255, rows of the table [b, ...]) -> floats [b, channels, height, width]"""
    train: Assignment
    """(labels, client of each sample, clients, generator of the run's seed, generator shared by all runs) -> style per
    sample; held-out samples have the client number `clients`"""
    test: Callable[[Ints, np.random.Generator], Ints]
    """(labels, generator shared by all runs) -> style of each test sample"""


def assign_styles(arrays: Arrays, partition: Partition, seed: int) -> Arrays:
    """Return the data with a style for each sample; unchanged for data without styles."""
    styles = arrays.styles
    if styles is None:
        return arrays
    client = np.full(len(arrays.y), partition.clients)
    client[partition.order] = np.repeat(np.arange(partition.clients), np.diff(partition.offsets))
    runs, always, tests = (data_generator(number, "styles", k) for k, number in enumerate((seed, 0, 0)))
    train = styles.train(arrays.y.numpy(), client, partition.clients, runs, always)
    test = styles.test(arrays.test_y.numpy(), tests)
    return replace(arrays, style=torch.from_numpy(train), test_style=torch.from_numpy(test))


def seen(arrays: Arrays, samples: Tensor, test: bool = False) -> Tensor:
    """Return images as a model sees them before normalisation, uint8 [k, channels, height, width]."""
    x: Tensor = arrays.test_x if test else arrays.x
    style = arrays.test_style if test else arrays.style
    if arrays.styles is None:
        return x[samples]
    assert style is not None, "call assign_styles first"
    rendered = arrays.styles.apply_style(x[samples].float(), arrays.styles.table[style[samples]])
    return rendered.round().clamp(0, 255).to(torch.uint8)


def tint(grey: Tensor, pairs: Tensor) -> Tensor:
    """Return grey images in colours: pairs [b, 2, 3] are the colours, 0 to 255, of full ink and of none."""
    foreground, background = pairs.to(grey.dtype)[..., None, None].unbind(1)
    return background + (foreground - background) * (grey / 255)


def turn(images: Tensor, cosines: Tensor) -> Tensor:
    """Return images rotated about their centre, counter-clockwise on screen for a positive angle.

    cosines [b, 2] are cosine and sine of each angle. Interpolation is bilinear, with zeros outside the image.
    """
    height, width = images.shape[-2:]
    down, right = (  # of the pixels' centres from the image's centre, in pixels
        torch.arange(n, dtype=images.dtype, device=images.device) - (n - 1) / 2 for n in (height, width)
    )
    down, right = down[:, None], right[None, :]
    cos, sin = cosines.to(images.dtype)[..., None, None].unbind(1)
    x, y = cos * right - sin * down, sin * right + cos * down  # where each pixel comes from: the inverse rotation
    grid = torch.stack([x * (2 / width), y * (2 / height)], dim=-1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
