"""Augmentation of training images, on the device, per batch; the random draws depend on the batch's seed only.

crop:PIXELS   pad every side with that many black pixels, then crop to the old size at a random position
flip          mirror half of the images left to right
crop:4+flip   both, in this order

Draws are made on the host: they are the same on any device. Those of all batches of a client are copied at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..device import upload
from ..errors import UserError
from ..schedules import read_spec
from ..seeds import augmentation_seed

STEPS = {"crop": ("pixels",), "flip": (), "none": ()}
MOST_PIXELS = 1024


class Augment:
    """An augmentation: `draw` random numbers for a batch on the host, `apply` them to its images on their device."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    def __call__(self, images: Tensor, seed: int) -> Tensor:
        """Return augmented images."""
        return self.apply(images, upload(self.draw(len(images), seed), images.device))

    def draw(self, samples: int, seed: int) -> Tensor:
        """Return the random numbers for a batch of that many images, [numbers per image, images]."""
        rng = torch.Generator().manual_seed(augmentation_seed(seed))
        return torch.cat([step.draw(samples, rng) for step in self.steps])

    def apply(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Return augmented images [n, channels, height, width]."""
        at = 0
        for step in self.steps:
            images = step.apply(images, drawn[at : at + step.numbers])
            at += step.numbers
        return images


def make_augment(text: str, option: str = "--augment") -> Augment | None:
    """Return the augmentation that a text describes; None for "none"."""
    steps: list[Step] = []
    for word in text.split("+"):
        name, numbers = read_spec(option, word, STEPS)
        if name == "crop":
            pixels = numbers["pixels"]
            if not 1 <= pixels <= MOST_PIXELS or pixels != int(pixels):
                raise UserError(
                    f"{option} is '{text}'; crop needs a whole number of pixels, at least 1, at most {MOST_PIXELS}"
                )
            steps.append(Crop(int(pixels)))
        elif name == "flip":
            steps.append(Flip())
    return Augment(steps) if steps else None


class Step(Protocol):
    """One step of an augmentation."""

    @property
    def numbers(self) -> int:
        """How many random numbers an image needs."""

    def draw(self, samples: int, rng: torch.Generator) -> Tensor: ...
    def apply(self, images: Tensor, drawn: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Crop:
    """Shifts each image by up to that many pixels in each direction, and fills up with black."""

    pixels: int
    numbers = 2

    def draw(self, samples: int, rng: torch.Generator) -> Tensor:
        return torch.randint(2 * self.pixels + 1, (2, samples), generator=rng)

    def apply(self, images: Tensor, drawn: Tensor) -> Tensor:
        n, channels, height, width = images.shape
        top, left = drawn
        padded = F.pad(images, (self.pixels,) * 4)
        down, right = (torch.arange(side, device=images.device) for side in (height, width))
        which = torch.arange(n, device=images.device).view(n, 1, 1, 1)
        layer = torch.arange(channels, device=images.device).view(1, channels, 1, 1)
        rows, columns = (top[:, None] + down).view(n, 1, height, 1), (left[:, None] + right).view(n, 1, 1, width)
        return padded[which, layer, rows, columns]


@dataclass(frozen=True)
class Flip:
    """Mirrors a random half of the images."""

    numbers = 1

    def draw(self, samples: int, rng: torch.Generator) -> Tensor:
        return torch.randint(2, (1, samples), generator=rng)

    def apply(self, images: Tensor, drawn: Tensor) -> Tensor:
        return torch.where(drawn.view(-1, 1, 1, 1).bool(), images.flip(-1), images)
