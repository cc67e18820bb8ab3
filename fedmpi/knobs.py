"""The knobs of the built-in client rules, masks and server rules, declared here alone.

The options of `fedmpi train`, the keys of config.yaml, defaults, bounds and help texts follow from these fields. They
have a module of their own because the rules import torch, which commands that only read a configuration (status,
compare, report) must not wait for.

To add a knob, add a field. A plug-in adds its own by extending `LocalKnobs`, `MaskKnobs` or
`ServerKnobs` (docs/own-algorithm.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from .plugins.knobs import knob
from .schedules import Rate, as_rate

OPTIONS = ("I", "II")  # of scaffold
GRADIENTS = ("last", "initial")  # of fedgma2021
OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True)
class LocalKnobs:
    """The knobs of the client rules."""

    lr: float | Rate = knob(0.01, low=0, open_low=True, by_row=True)
    """Client learning rate. Default: the algorithm's."""
    momentum: float = knob(0.9, low=0, high=1, open_high=True, by_row=True)
    """Momentum of the client's SGD, reset every round. Default: the algorithm's."""
    weight_decay: float = knob(0.0, low=0)
    """Weight decay of the client's optimizer: added to the gradient by sgd, decoupled from it by adamw."""
    optimizer: str = "sgd"
    """How clients step, under any rule: sgd, adamw, or a torch.optim.Optimizer as package.module:name, such as
    torch.optim:RMSprop. Its state is new in every round."""
    b1: float = knob(0.9, low=0, high=1, open_high=True)
    """Decay of the first moment of adamw."""
    b2: float = knob(0.999, low=0, high=1, open_high=True)
    """Decay of the second moment of adamw."""
    eps: float = knob(1e-8, low=0, open_low=True)
    """Constant added to the root of the second moment of adamw."""
    accumulate: int = knob(1, low=1, high=2**31 - 1)
    """Batches per step: their mean gradient is used."""
    step_schedule: str = "constant"
    """Learning rate over the steps of a round: constant, step:STEPS,FACTOR, cosine or cosine:LAST; prefix
    warmup:STEPS+ to warm up."""
    clip: float | None = knob(None, low=0, by_row=True, none=0.0)
    """Clip gradients to this norm; 0: no limit. Default: the algorithm's."""
    clip_update: float | None = knob(None, low=0, by_row=True, none=0.0)
    """Clip what a client sends to this norm; 0: no limit. Default: the algorithm's."""
    mu: float = knob(0.01, low=0)
    """Strength of the pull towards the global model (rule prox)."""
    option: str = knob("II", choices=OPTIONS)
    """Update of control variates: I (gradient at the global model) or II (from the steps) (rule scaffold)."""
    gradient: str = knob("last", choices=GRADIENTS)
    """Gradient to send: last (of the last step) or initial (at the global model) (rule fedgma2021)."""

    def rate(self, round: int) -> float:
        """Return the learning rate of a round."""
        return as_rate(self.lr)(round)


@dataclass(frozen=True)
class MaskKnobs:
    """The knobs of the masks."""

    tau: float = knob(0.4, low=0, high=1, by_row=True)
    """Agreement threshold of the mask: elements at or above it take the full step. Default: 0.4 (fedgma2021: 0.8)."""
    sharpness: float = knob(4.0, low=0, open_low=True)
    """How steeply the mask sand rises above tau."""


@dataclass(frozen=True)
class Variant:
    """How an adaptive rule starts and whether it corrects for that start."""

    b2: float
    eps: float
    corrected: bool


VARIANTS = {
    "reddi": Variant(b2=0.99, eps=1e-3, corrected=False),  # v starts at eps^2; the papers' choice
    "torch": Variant(b2=0.999, eps=1e-8, corrected=True),  # v starts at 0; what torch.optim and many systems run
}


@dataclass(frozen=True)
class ServerKnobs:
    """The knobs of the server rules."""

    lr: float | Rate = knob(1.0, low=0, open_low=True, by_row=True)
    """Server learning rate. Default: the algorithm's."""
    momentum: float = knob(0.0, low=0, high=1, open_high=True, by_row=True)
    """Momentum of the server rule sgd. Default: the algorithm's."""
    b1: float = knob(0.9, low=0, high=1, open_high=True)
    """Decay of the first moment."""
    b2: float | None = knob(None, low=0, high=1, open_high=True)
    """Decay of the second moment. Default: the variant's."""
    eps: float | None = knob(None, low=0, open_low=True, high=1e18)
    """Constant added to the root of the second moment. Default: the variant's."""
    variant: str = knob("reddi", choices=tuple(VARIANTS))
    """reddi (no bias correction, v starts at eps^2, b2 0.99, eps 1e-3) or torch (bias correction, v starts at 0, b2
    0.999, eps 1e-8)."""
    mask_moments: bool = False
    """Apply the mask to the mean before the moments, instead of to the step."""

    def rate(self, t: int) -> float:
        """Return the learning rate of round t."""
        return as_rate(self.lr)(t)
