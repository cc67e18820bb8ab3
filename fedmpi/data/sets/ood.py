"""Coloured and rotated MNIST: feature skew in training, and a test set that styles like no client's data.

The pixels are MNIST's, and the digit is the target. In training a colour or an angle correlates with the class or
belongs to the client; in the test set it is uninformative, or misleading (out of distribution).

cmnist2              two classes, digits below 5 and the others, red and green on black (Tenison et al., ICLR workshop
                     2021, section 4, after Arjovsky et al. 2019). Colours are swapped with a probability per client,
                     0.1 to 0.2; in the test set with 0.9. Labels have no noise, as in the paper. Label skew goes by
                     digit, as in the paper: two digits per client.
fedcmnist            ten classes, each with its own two foregrounds and two backgrounds; a sample has one of the four
                     pairs. In the test set both are drawn from ten colours that no train sample has (same section,
                     after Arpit et al. 2019; a later appendix says four colours each, this is the first paper's two).
fedrotmnist          class 0 rotated by 10 degrees, class 1 by -10, class 2 by 20, and so on to -50; the test set
                     upright (Tenison's thesis 2022, section 4.2).
fedrotmnist-clients  each client has one integer angle from -90 to 90, but not 45; the test set is rotated by 45 (the
                     older protocol: NeurIPS workshop 2021, appendix A.4.2, after Francis et al. 2021).

Positive angles are counter-clockwise, which no paper specifies. Nor does one name its colours: these were chosen far
apart (in OKLab), with a luminance contrast of at least 3:1 between foregrounds and backgrounds of a class.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedmpi.data.arrays import Arrays
from fedmpi.data.sets import vision
from fedmpi.data.styles import Assignment, Ints, Styles, tint, turn

# Red, green and blue as one hexadecimal digit each, as in CSS: f63 is 255, 102, 51.
RED, GREEN, BLACK = "f00", "0f0", "000"
TRAIN_COLOURS = (  # per class: two foregrounds, two backgrounds
    (("306", "336"), ("f63", "090")),
    (("c6c", "c9f"), ("039", "00c")),
    (("0c9", "cc0"), ("060", "630")),
    (("f90", "0c0"), ("609", "900")),
    (("909", "936"), ("f99", "3f9")),
    (("ccc", "003"), ("c00", "963")),
    (("96f", "969"), ("300", "030")),
    (("999", "69f"), ("303", "006")),
    (("333", "603"), ("f0c", "c0f")),
    (("c09", "06f"), ("0ff", "ff3")),
)
TEST_COLOURS = ("990", "066", "f03", "ffc", "6cf", "000", "3f3", "606", "f6f", "90f")
FLIPPED, REVERSED = (0.1, 0.2), 0.9
CLASS_ANGLES = (10, -10, 20, -20, 30, -30, 40, -40, 50, -50)
CLIENT_ANGLES = tuple(angle for angle in range(-90, 91) if angle != 45)


def cmnist2(root: Path | None = None) -> Arrays:
    """Load digits below 5 (class 0, mostly red) and the others (class 1, mostly green)."""
    digits = vision.mnist(root)
    styles = Styles(
        3,
        colour_table([(RED, BLACK), (GREEN, BLACK)]),
        tint,
        train=flip,
        test=lambda labels, rng: labels ^ (rng.random(len(labels)) < REVERSED),
    )
    y, test_y = ((labels >= 5).long() for labels in (digits.y, digits.test_y))
    return replace(coloured(digits, "cmnist2", styles), classes=2, y=y, test_y=test_y, strata=digits.y)


def fedcmnist(root: Path | None = None) -> Arrays:
    """Load digits in the colours of their class, in the test set in other colours."""
    train = [pair for colours in TRAIN_COLOURS for pair in itertools.product(*colours)]
    test = list(itertools.permutations(TEST_COLOURS, 2))
    pairs = len(train) // len(TRAIN_COLOURS)
    styles = Styles(
        3,
        colour_table(train + test),
        tint,
        train=lambda labels, client, clients, runs, always: labels * pairs + always.integers(pairs, size=len(labels)),
        test=lambda labels, rng: len(train) + rng.integers(len(test), size=len(labels)),
    )
    return coloured(vision.mnist(root), "fedcmnist", styles)


def fedrotmnist(root: Path | None = None) -> Arrays:
    """Load digits rotated by the angle of their class, in the test set upright."""
    return rotated(root, "fedrotmnist", CLASS_ANGLES, 0, lambda labels, *_: labels.copy())


def fedrotmnist_clients(root: Path | None = None) -> Arrays:
    """Load digits rotated by the angle of their client, in the test set by 45 degrees."""
    return rotated(root, "fedrotmnist-clients", CLIENT_ANGLES, 45, deal_angles)


def rotated(root: Path | None, name: str, angles: Sequence[int], test_angle: int, train: Assignment) -> Arrays:
    """Return the digits rotated by the angles that `train` assigns, in the test set by another one."""
    table = angle_table([*angles, test_angle])
    styles = Styles(1, table, turn, train, test=lambda labels, rng: np.full(len(labels), len(angles)))
    return replace(vision.mnist(root), name=name, styles=styles)


def coloured(digits: Arrays, name: str, styles: Styles) -> Arrays:
    """Return the digits in colours, under another name."""
    return replace(digits, name=name, styles=styles, mean=(0.5,) * 3, std=(0.5,) * 3)


def colour(name: str) -> tuple[int, ...]:
    """Return red, green and blue of a colour, 0 to 255."""
    return tuple(17 * int(digit, 16) for digit in name)


def colour_table(pairs: Iterable[tuple[str, str]]) -> Tensor:
    """Return foreground and background per style, [styles, 2, 3]."""
    return torch.tensor([[colour(name) for name in pair] for pair in pairs], dtype=torch.float32)


def angle_table(degrees: Iterable[int]) -> Tensor:
    """Return cosine and sine of the angle per style, [styles, 2]."""
    return torch.tensor([(math.cos(angle), math.sin(angle)) for angle in map(math.radians, degrees)])


def flip(labels: Ints, client: Ints, clients: int, runs: np.random.Generator, always: np.random.Generator) -> Ints:
    """Return the style of the class, or of the other class with the client's probability."""
    chance = runs.uniform(*FLIPPED, clients + 1)  # the last one is for held-out samples
    return labels ^ (runs.random(len(labels)) < chance[client])


def deal_angles(
    labels: Ints, client: Ints, clients: int, runs: np.random.Generator, always: np.random.Generator
) -> Ints:
    """Return a style per client, all different while there are enough angles, then round robin."""
    return runs.permutation(len(CLIENT_ANGLES))[client % len(CLIENT_ANGLES)]
