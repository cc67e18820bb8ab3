"""A character model: it reads a line and predicts the next character.

The embedding of 8 and the 256 units are those of the character models of McMahan et al. (AISTATS 2017) and of LEAF
(Caldas et al., 2018), which are two-layer LSTMs; this is one GRU layer, as in the UGA paper (Yao et al., 2019).
"""

from __future__ import annotations

from torch import Tensor, nn


class GRU(nn.Module):
    """A GRU that returns the logits of the token after a sequence [n, length]."""

    def __init__(self, tokens: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, 8)
        self.gru = nn.GRU(8, 256, batch_first=True)
        self.head = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.embed(x))
        logits: Tensor = self.head(states[:, -1])
        return logits
