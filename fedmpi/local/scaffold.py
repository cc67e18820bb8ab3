"""SCAFFOLD (Karimireddy et al., ICML 2020; with GMA: Tenison's thesis, algorithm 3): control variates against the
drift of clients.

c_n estimates client n's gradient, c the mean of all of them; a step follows g - c_n + c. Afterwards, K steps from w to
w_n with learning rate eta:

    option I    c_n+ = the gradient of the client's whole loss at w (one more pass over its samples)
    option II   c_n+ = c_n - c + (w - w_n) / (K eta)

and the server adds the sum of c_n+ - c_n over the cohort, divided by the number of all clients, to c. That channel is
summed exactly and never masked, so c stays the mean of the c_n. With momentum a gradient moves x more than once: K is
then the momentum-weighted number of steps (`Descent.weight`), which makes c_n+ a weighted mean of the client's
gradients again. Under either option c_n is made of gradients as a step uses them, clipped and with the weight decay,
so that it cancels what it is there to cancel. Another optimizer than SGD gets the corrected gradient, and needs option
I. The thesis's client line puts c_n and c outside the learning rate; here they are inside, as in the original.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import unknown
from ..knobs import OPTIONS
from .descent import Descent, whole_gradient
from .job import Channel, Job, LocalResult, LocalRule


def scaffold(descent: Descent, option: str = "II") -> LocalRule:
    """Return SGD corrected by control variates."""
    if option not in OPTIONS:
        raise unknown("--local.option", option, OPTIONS)
    if option == "II":
        descent.needs_sgd("SCAFFOLD reads the mean gradient off the steps of SGD unless --local.option is I")

    def run(job: Job) -> LocalResult:
        c_P, own_P = job.shared["control"], job.memory["control"]
        correction_P = c_P - own_P
        new_P = descent.shape(whole_gradient(job, job.start_P), job.start_P) if option == "I" else None

        def pull(g_P: Tensor, x_P: Tensor) -> None:
            g_P.add_(correction_P)

        effective = descent.weight(descent.run(job, pull).factors) * descent.rate(job)
        delta_P = torch.sub(job.x_P, job.start_P, out=job.delta_P)
        if new_P is None:  # a client that did not move, as the rate was 0, has learnt nothing about its gradient
            new_P = (delta_P / -effective).sub_(correction_P) if effective else own_P.clone()
        return LocalResult(delta_P, sends={"control": new_P - own_P}, keeps={"control": new_P})

    return LocalRule(run, sends=(Channel("control"),), keeps=("control",))
