"""Which layout of images a model of the user's own gets."""

from __future__ import annotations

import pytest
import torch
from shell import CPU
from torch import Tensor, nn

import fedmpi
from fedmpi.runs.build import gains_channels_last

SAMPLES = torch.zeros(2, 1, 6, 6), torch.zeros(2)


class Viewed(nn.Module):
    """A model that takes its images for contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).view(len(x), -1))


class Flattened(Viewed):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).flatten(1))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize(
    ("model", "gains"),
    [(Flattened(), True), (Viewed(), False), (grouped(), False), (nn.Flatten(), False)],
    ids=["flatten", "view", "groups", "no convolution"],
)
def test_convolutions_gain_where_they_run(model: nn.Module, gains: bool) -> None:
    before = [(p.stride(), p.clone()) for p in model.parameters()]
    assert gains_channels_last(model, SAMPLES, CPU) is gains
    assert all(p.stride() == s and torch.equal(p, q) for p, (s, q) in zip(model.parameters(), before, strict=True))
    assert not gains_channels_last(model, SAMPLES, torch.device("meta")), "a rule for CPUs"


def test_the_run_records_it_and_the_option_overrides_it() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 1, 6, 6, generator=rng), torch.randint(0, 3, (30,), generator=rng)
    clients, quick = [(x[:20], y[:20]), (x[20:], y[20:])], {"rounds": 1, "quiet": True, "threads": 1}
    found = fedmpi.train(Flattened(), clients, (x, y), **quick)
    assert found.config.step.layout == "channels_last"
    usual = fedmpi.train(Flattened(), clients, (x, y), step={"layout": "contiguous"}, **quick)
    assert usual.config.step.layout == "contiguous"
    assert fedmpi.train(Viewed(), clients, (x, y), **quick).config.step.layout == "contiguous"
