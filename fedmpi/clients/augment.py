"""Augmentation of training images, on the device, per batch; the random draws depend on the batch's seed only.

crop:PIXELS   pad every side with that many black pixels, then crop to the old size at a random position
flip          mirror half of the images left to right
crop:4+flip   both, in this order
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError
from ..schedules import read_spec
from ..seeds import augmentation_seed

Augment = Callable[[Tensor, int], Tensor]  # (images [n, channels, height, width], seed) -> images of the same shape

STEPS = {"crop": ("pixels",), "flip": (), "none": ()}
MOST_PIXELS = 1024


def make_augment(text: str, option: str = "--augment") -> Augment | None:
    """Return the augmentation that a text describes; None for "none"."""
    steps: list[Callable[[Tensor, torch.Generator], Tensor]] = []
    for word in text.split("+"):
        name, numbers = read_spec(option, word, STEPS)
        if name == "crop":
            pixels = numbers["pixels"]
            if not 1 <= pixels <= MOST_PIXELS or pixels != int(pixels):
                raise UserError(
                    f"{option} is '{text}'; crop needs a whole number of pixels, at least 1, at most {MOST_PIXELS}"
                )
            steps.append(partial(crop, pixels=int(pixels)))
        elif name == "flip":
            steps.append(flip)
    if not steps:
        return None

    def augment(images: Tensor, seed: int) -> Tensor:
        rng = torch.Generator().manual_seed(augmentation_seed(seed))  # on the CPU: the same draws on any device
        for step in steps:
            images = step(images, rng)
        return images

    return augment


def crop(images: Tensor, rng: torch.Generator, pixels: int) -> Tensor:
    """Shift each image by up to that many pixels in each direction, and fill up with black."""
    n, channels, height, width = images.shape
    top, left = torch.randint(2 * pixels + 1, (2, n), generator=rng).to(images.device)
    padded = F.pad(images, (pixels,) * 4)
    down, right = (torch.arange(side, device=images.device) for side in (height, width))
    which = torch.arange(n, device=images.device).view(n, 1, 1, 1)
    layer = torch.arange(channels, device=images.device).view(1, channels, 1, 1)
    rows, columns = (top[:, None] + down).view(n, 1, height, 1), (left[:, None] + right).view(n, 1, 1, width)
    return padded[which, layer, rows, columns]


def flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Mirror a random half of the images."""
    mirrored = torch.randint(2, (len(images), 1, 1, 1), generator=rng).bool().to(images.device)
    return torch.where(mirrored, images.flip(-1), images)
