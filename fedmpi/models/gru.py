"""A character model: it reads a line and tells the next character.

An embedding of 8 and 256 units are those of the character models of McMahan et al. (AISTATS 2017) and of LEAF (Caldas
et al., 2018), which are LSTMs of two layers; here one layer of a GRU, as in the paper of UGA (Yao et al., 2019).
"""

from __future__ import annotations

from torch import Tensor, nn


class GRU(nn.Module):
    """Logits for what follows the last position of a sequence of tokens [n, length]."""

    def __init__(self, tokens: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, 8)
        self.gru = nn.GRU(8, 256, batch_first=True)
        self.head = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.embed(x))
        logits: Tensor = self.head(states[:, -1])
        return logits


def gru(tokens: int, classes: int) -> nn.Module:
    """A character model for an alphabet of that many tokens."""
    return GRU(tokens, classes)
