"""FedNova (Wang et al., NeurIPS 2020): every client's delta is divided by how many gradients went into it, so that
clients that take more steps do not pull the model towards their own optimum.

With |a_n| the momentum-weighted number of steps of client n, the server moves by

    (sum p_n |a_n|) * sum p_n (delta_n / |a_n|)

The paper's tau_eff is sum p_n |a_n|, as in its section on momentum and in the authors' code. The mask's votes are
those of the deltas: dividing by a positive number changes no sign.
"""

from __future__ import annotations

import torch

from .descent import Descent
from .job import Job, LocalResult, LocalRule


def nova(descent: Descent) -> LocalRule:
    """Return SGD whose delta is divided by its momentum-weighted number of steps."""

    descent.needs_sgd("FedNova's normalisation counts gradients, which only SGD adds up")

    def run(job: Job) -> LocalResult:
        weight = descent.weight(descent.run(job).factors)
        delta_P = torch.sub(job.x_P, job.start_P, out=job.delta_P)
        return LocalResult(delta_P.div_(weight) if weight else delta_P, steps=weight or 1.0)

    return LocalRule(run, normalised=True)
