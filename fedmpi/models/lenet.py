"""LeNet-5 as the papers use it: two 5x5 convolutions with max pooling, then three linear layers, ReLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError


class LeNet(nn.Module):
    """28x28 images are padded to LeCun's 32x32. ReLU follows the pooling: the same function on a quarter of the
    elements."""

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__()
        padding = 2 if min(height, width) < 32 else 0
        rows, columns = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width))
        if min(rows, columns) < 1:
            raise UserError(f"lenet needs images of at least 12x12; these are {height}x{width}: use --model logistic")
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * rows * columns, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc3(F.relu(self.fc2(x)))
        return logits


def lenet(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """A LeNet for images of that shape."""
    return LeNet(channels, height, width, classes)
