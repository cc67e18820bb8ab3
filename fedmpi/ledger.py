"""The books of a rank: a tally of the clients' deltas, one of each further vector that their rule sends, and one of the
meta gradient. What cannot be averaged is refused before any of them is touched."""

from __future__ import annotations

import torch
from torch import Tensor

from .algorithms import Algorithm
from .cohort import Cohort
from .comm import Comm
from .flat import Layout
from .local import LocalResult, LocalRule
from .tally import Tally, Unusable
from .task import Trained
from .wire import Wire

MOST = 2.0**20  # of a loss, and of steps


def check_declared(result: LocalResult, rule: LocalRule, params: int) -> None:
    """Raise `Unusable` for other vectors, or vectors of another length, than the client's rule declares."""
    for what, given, declared in (
        ("sends", result.sends, [channel.name for channel in rule.sends]),
        ("keeps", result.keeps, rule.keeps),
    ):
        if set(given) != set(declared):
            raise Unusable(f"it {what} {sorted(given)}, but its rule declares {sorted(declared)}")
        for name, vector_P in given.items():
            if vector_P.shape != (params,):
                raise Unusable(f"it {what} a '{name}' of shape {tuple(vector_P.shape)}, not ({params},)")


class Ledger:
    """The tallies of a rank: of the deltas, of every channel, and of the meta gradient. Collective to make.

    With `--wire bf16` it needs the model as well, which then travels in the same way as the sums of the deltas.
    """

    def __init__(
        self,
        comm: Comm,
        algorithm: Algorithm,
        layout: Layout,
        cohort: int,
        how: str,
        clients: int,
        device: torch.device | None = None,
        wire: str = "float32",
        model_N: Tensor | None = None,
    ) -> None:
        length = layout.padded(comm.size) // comm.size
        squares = layout.params if algorithm.mask.second_moment else 0
        self.rule, self.clients, self.params = algorithm.local, clients, layout.params
        self.deltas = Tally(comm, length, cohort, how, device, squares=squares, wire=wire)
        self.channels = {c.name: Tally(comm, length, cohort, "exact", device, votes=False) for c in self.rule.sends}
        self.meta = Tally(comm, length, 1, "exact", device, votes=False) if algorithm.meta else None
        self.wire = None if wire == "float32" or model_N is None else Wire(comm, self.deltas, model_N)

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
        check_declared(result, self.rule, self.params)
        for what, given in (("sends", result.sends), ("keeps", result.keeps)):
            for name, vector_P in given.items():
                if not bool(vector_P.isfinite().all()):
                    raise Unusable(f"it {what} a '{name}' that holds NaN or infinity")
        self.deltas.check(trained.delta_N)
        for name, tally in self.channels.items():
            tally.check(result.sends[name])

    def add(self, trained: Trained, weight: int, last: bool = False) -> None:
        """Fold in what has passed `check`. An error in here spoils the sums: it ends the run.

        Where rows travel, what the last client of the rank has trained is left for `finish`: so one bucket is on its
        way while the next is folded.
        """
        later = last and self.deltas.travels
        self.deltas.add(trained.delta_N, weight, later)
        for channel in self.rule.sends:
            share = weight if channel.to == "model" else 1
            self.channels[channel.name].add(trained.result.sends[channel.name], share, later)

    def finish(self, bucket: slice) -> None:
        """Fold in a bucket of what the last client has trained."""
        for tally in (self.deltas, *self.channels.values()):
            tally.finish(bucket)
