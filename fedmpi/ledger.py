"""The books of a rank: a tally of the clients' deltas, one of each further vector that their rule sends, and one of the
meta gradient. What cannot be averaged is refused before any of them is touched."""

from __future__ import annotations

import torch

from .algorithms import Algorithm
from .cohort import Cohort
from .comm import Comm
from .flat import Layout
from .tally import Tally, Unusable
from .task import Trained

MOST = 2.0**20  # of a loss, and of steps


class Ledger:
    """The tallies of a rank: of the deltas, of every channel, and of the meta gradient. Collective to make."""

    def __init__(
        self,
        comm: Comm,
        algorithm: Algorithm,
        layout: Layout,
        cohort: int,
        how: str,
        clients: int,
        device: torch.device | None = None,
    ) -> None:
        length = layout.padded(comm.size) // comm.size
        squares = layout.params if algorithm.mask.second_moment else 0
        self.rule, self.clients, self.params = algorithm.local, clients, layout.params
        self.deltas = Tally(comm, length, cohort, how, device, squares=squares)
        self.channels = {c.name: Tally(comm, length, cohort, "exact", device, votes=False) for c in self.rule.sends}
        self.meta = Tally(comm, length, 1, "exact", device, votes=False) if algorithm.meta else None

    def clear(self, cohort: Cohort) -> None:
        """Make ready for a round."""
        self.deltas.clear(cohort.total)
        for channel in self.rule.sends:
            self.channels[channel.name].clear(cohort.total if channel.to == "model" else self.clients)

    def check(self, trained: Trained) -> None:
        """Raise `Unusable` for what cannot be averaged."""
        result, steps = trained.result, trained.result.steps
        if not abs(trained.loss) < MOST:
            raise Unusable(f"its training loss is {trained.loss:g}")
        if self.rule.normalised and not (isinstance(steps, int | float) and 0 < steps < MOST):
            raise Unusable(f"its steps are {steps}, which must be a number between 0 and {MOST:.0f}")
        for what, given, declared in (
            ("sends", result.sends, self.channels),
            ("keeps", result.keeps, self.rule.keeps),
        ):
            if set(given) != set(declared):
                raise Unusable(f"it {what} {sorted(given)}, but its rule declares {sorted(declared)}")
            for name, vector_P in given.items():
                if vector_P.shape != (self.params,):
                    raise Unusable(f"it {what} a '{name}' of shape {tuple(vector_P.shape)}, not ({self.params},)")
                if not bool(vector_P.isfinite().all()):
                    raise Unusable(f"it {what} a '{name}' that holds NaN or infinity")
        self.deltas.check(trained.delta_N)
        for name, tally in self.channels.items():
            tally.check(result.sends[name])

    def add(self, trained: Trained, weight: int) -> None:
        """Fold in what has passed `check`. An error in here spoils the sums: it ends the run."""
        self.deltas.add(trained.delta_N, weight)
        for channel in self.rule.sends:
            self.channels[channel.name].add(trained.result.sends[channel.name], weight if channel.to == "model" else 1)
