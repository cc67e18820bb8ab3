"""How much a client trains in a round, and how much of that it really does.

Uneven work: stragglers run fewer steps than asked (FedProx's partial work, FedNova's premise). A client's share is
drawn from (seed, round, client), so it does not depend on where the client is hosted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .errors import UserError
from .seeds import generator
from .specs import read_spec

Share = Callable[[np.random.Generator], float]
"""draws which part of its steps a client does, in (0, 1]"""

SHARES = {"full": (), "uniform": ("low", "high"), "stragglers": ("part", "low", "high")}


def full(rng: np.random.Generator) -> float:
    """Every client does all of its steps."""
    return 1.0


def make_share(text: str) -> Share:
    """The distribution of that name: `full`, `uniform:low,high`, or `stragglers:part,low,high` (that part of the
    clients draws from low to high, the others do everything)."""
    name, numbers = read_spec("--local.work", text, SHARES)
    if name == "full":
        return full
    low, high, part = numbers["low"], numbers["high"], numbers.get("part", 1.0)
    if not (0 < low <= high <= 1 and 0 <= part <= 1):
        raise UserError(f"--local.work is '{text}'; it needs 0 < low <= high <= 1, and a part in [0, 1]")

    def draw(rng: np.random.Generator) -> float:
        late = rng.random() < part
        return float(rng.uniform(low, high)) if late else 1.0

    return draw


@dataclass(frozen=True)
class Work:
    """`epochs` over the client's samples, or `steps` batches where given; of which a client does its share."""

    epochs: int = 1
    steps: int | None = None
    batch: int = 32
    share: Share = full

    def count(self, seed: int, round: int, cid: int, samples: int, leave: int = 0) -> int:
        """The steps that a client takes, at least one where one was asked; `leave` epochs are left out."""
        an_epoch = -(-samples // self.batch)
        asked = self.steps if self.steps is not None else max(self.epochs - leave, 0) * an_epoch
        if self.share is full or not asked:
            return asked
        return max(1, round_half_up(self.share(generator(seed, "work", round, cid)) * asked))


def round_half_up(x: float) -> int:
    return int(x + 0.5)
