"""FedGMA as first published (Tenison et al., ICLR 2021 workshop, algorithm 1): parameters are averaged as in FedAvg,
and next to them travels a gradient, whose masked mean is one more step of the server's:

    w = sum p_n w_n - eta_s * mask * sum p_n g_n

Here the gradient takes the place of the delta (delta_n = -g_n: voted on, masked, moved by the server's rule), and w_n
goes through a channel of its own, averaged and never masked. The paper's mask is `and` with p = 0.8, read as its
formula p * clients <= |votes|. Algorithm 1 and the text differ on which gradient it is: that of the last step,
or that of the client's loss at the initial parameters. The weights in its lines 7 and 8 are garbled; they are p_n here.
"""

from __future__ import annotations

import torch

from ..errors import unknown
from ..knobs import GRADIENTS
from .descent import Descent, whole_gradient
from .job import Channel, Job, LocalResult, LocalRule


def fedgma2021(descent: Descent, gradient: str = "last") -> LocalRule:
    """Return SGD that sends its shift through a channel, and a gradient as a step uses it as its delta."""
    if gradient not in GRADIENTS:
        raise unknown("--local.gradient", gradient, GRADIENTS)

    def run(job: Job) -> LocalResult:
        first_P = descent.shape(whole_gradient(job, job.start_P), job.start_P) if gradient == "initial" else None
        last_P = descent.run(job, last=True).last_P
        g_P = last_P if first_P is None else first_P
        shift_P = job.x_P - job.start_P
        delta_P = job.delta_P.zero_() if g_P is None else torch.neg(g_P, out=job.delta_P)
        return LocalResult(delta_P, sends={"shift": shift_P})

    return LocalRule(run, sends=(Channel("shift", to="model"),))
