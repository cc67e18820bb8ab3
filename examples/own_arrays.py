"""Data of your own that fit into memory: a function that returns `fedmpi.Arrays`.

Fifteen machines report load, speed, outside temperature and vibration; the temperature of a bearing is to be predicted.
Every machine works in a range of its own, so no two clients have alike data. Twelve machines train, one client each;
the test readings come from the three others. The labels are floats, so this is regression: the log shows the mean
absolute error, here in degrees. From the root of the checkout:

    fedmpi train --data examples.own_arrays:make --split natural --clients 12 --cohort 6 --rounds 20 --out runs/arrays

Replace `readings` by what reads your files. docs/own-data.md lists what else `Arrays` can hold.
"""

from __future__ import annotations

import numpy as np
import torch

from fedmpi import Arrays

MACHINES, TESTED, READINGS = 15, 3, 120


def make() -> Arrays:
    """The readings of all machines: the last few machines are for the test, the others are clients.

    A function for --data may also have a parameter `root`: it gets what --data_root says, a Path or None.
    """
    rng = np.random.default_rng(0)  # the same data on every rank and in every run
    of_machine = [readings(rng) for _ in range(MACHINES)]
    x, y = (torch.cat(parts) for parts in zip(*of_machine[:-TESTED], strict=True))
    test_x, test_y = (torch.cat(parts) for parts in zip(*of_machine[-TESTED:], strict=True))
    guess = float((test_y - y.mean()).abs().mean())
    return Arrays(
        name="machines",
        classes=0,  # labels are numbers
        x=x,
        y=y,
        test_x=test_x,
        test_y=test_y,
        owner=torch.arange(MACHINES - TESTED).repeat_interleave(READINGS),  # whose each train sample is
        note=f"made up; to guess the mean would be off by {guess:.1f} degrees",
    )


def readings(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """One machine's sensors, float32 [READINGS, 4] and about 1 in size, and its bearing in degrees above 40."""
    usual = rng.uniform(-1, 1, size=4)  # where this machine works
    x = usual + rng.normal(0, 0.4, size=(READINGS, 4))
    load, speed, outside, vibration = x.T
    degrees = 5 * load + 3 * speed + 2 * load * speed + 4 * outside + 1.5 * vibration
    degrees += rng.normal(0, 0.5, size=READINGS)
    return torch.from_numpy(x).float(), torch.from_numpy(degrees).float()
