"""LeNet-5 as in the papers: two 5x5 convolutions with max pooling, then three linear layers, ReLU; and the same with
dropout, the CNN of gradient masked averaging (Tenison et al., NeurIPS workshop 2021, appendix A.4.1)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UserError
from .kernels.byhand import Layered, Network
from .kernels.convpool import conv_pool_relu


class LeNet(Layered):
    """A LeNet. 28x28 images are padded to LeCun's 32x32. `widths` are the channels of the two convolutions; dropout
    follows the first two linear layers."""

    def __init__(
        self,
        channels: int,
        height: int,
        width: int,
        classes: int,
        widths: tuple[int, int] = (6, 16),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        padding = 2 if min(height, width) < 32 else 0
        rows, columns = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in (height, width))
        if min(rows, columns) < 1:
            given = f"these are {height}x{width}"
            raise UserError(f"lenet and cnn need images of at least 12x12; {given}: use --model logistic")
        self.conv1 = nn.Conv2d(channels, widths[0], 5, padding=padding)
        self.conv2 = nn.Conv2d(widths[0], widths[1], 5)
        self.fc1 = nn.Linear(widths[1] * rows * columns, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)
        self.drop = nn.Dropout(dropout)  # with 0 it draws no random numbers

    @property
    def network(self) -> Network:
        """Return the layers, so that the gradient can be computed without autograd (byhand.py)."""
        return Network((self.conv1, self.conv2), (self.fc1, self.fc2, self.fc3), self.drop.p)

    def forward(self, x: Tensor) -> Tensor:
        x = conv_pool_relu(x, self.conv1, self.conv2)
        x = self.drop(F.relu(self.fc1(x.flatten(1))))
        x = self.drop(F.relu(self.fc2(x)))
        logits: Tensor = self.fc3(x)
        return logits


def cnn(channels: int, height: int, width: int, classes: int) -> nn.Module:
    """Make a LeNet with dropout, and with a wider first convolution for colour images."""
    return LeNet(channels, height, width, classes, widths=(6, 16) if channels == 1 else (32, 16), dropout=0.5)
