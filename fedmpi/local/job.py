"""A client's work as a rule sees it, what it delivers, and what a rule declares.

N: the full padded vector.  P: its trainable parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..errors import UserError, unknown

PRIVATE = "private parameters"  # the name by which a client keeps the part of the model that it does not share


class Piece(NamedTuple):
    """A part of a gradient: where it lies in the vector, and its elements."""

    at: slice
    g: Tensor


class Job(Protocol):
    """One client's training in one round. Its gradients are functions of a point and a batch: asked twice, they give
    the same. `start_P`, `shared` and `memory` are read-only. If parameters are private (--local.private), they are the
    first elements of every vector of the job: a rule trains them like the others, and what it sends of them is cut off.
    """

    round: int  # 1, 2, ...
    cid: int  # the number of the client
    private: int  # how many of the first elements are private
    start_P: Tensor  # the global parameters
    x_P: Tensor  # the client's own copy of them, to be trained in place
    delta_P: Tensor  # memory for the result, until then free to use
    shared: Mapping[str, Tensor]  # the vectors that the rule's channels move, the same for every client
    memory: Mapping[str, Tensor]  # what this client kept of its last round; zeros before its first

    def batches(self, leave: int = 0) -> Iterable[Any]:
        """Return this client's batches of this round, in an order that depends on (seed, round, client) alone; `leave`
        epochs at the end are left out."""

    def steps(self, leave: int = 0) -> int:
        """Return how many batches `batches` yields."""

    def tensors(self, x_P: Tensor) -> list[Tensor]:
        """Return views of a vector, one for each parameter of the model, in its shape."""

    def everything(self) -> Iterable[tuple[Any, float]]:
        """Return batches that hold every sample of the client once, each with its share of them."""

    def grad(self, x_P: Tensor, batch: Any) -> Tensor:
        """Return the gradient of the batch's mean loss at x_P; may be overwritten, valid until the next call."""

    def pieces(self, batch: Any) -> list[Piece]:
        """Return the gradient of the batch's mean loss at `self.x_P` in pieces that cover it, of a size that a CPU's
        cache holds; they are read-only and valid until the next call."""

    def linearise(self, batch: Any) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the gradient at `self.x_P` as it is now, and the function v -> H v with the second derivative H of the
        batch's loss there, which is valid until x_P moves. The caller may overwrite what they return."""

    def without_side_effects(self) -> AbstractContextManager[None]:
        """Restore the model's buffers and the reported loss after a `with` block: for auxiliary gradients."""


@dataclass(frozen=True)
class LocalResult:
    """What a rule delivers for a client: delta = where it ended - where it started. It may lie in the job's `delta_P`,
    in memory of its own or, if nothing is private, in place of `x_P`."""

    delta_P: Tensor
    steps: float = 1.0  # of a rule that is `normalised`: what delta was divided by
    sends: Mapping[str, Tensor] = field(default_factory=dict)  # a vector for each channel of the rule
    keeps: Mapping[str, Tensor] = field(default_factory=dict)  # what the client finds in its `memory` the next time


class Update(NamedTuple):
    """One client's contribution to a round. `delta_N` lies in the trainer's memory: valid until the next client."""

    cid: int
    delta_N: Tensor  # the change of parameters and float buffers
    ints: Tensor  # the model's integer buffers after training
    loss: float  # the mean training loss
    result: LocalResult
    last: bool = False  # whether this rank has no further client in this round


@dataclass(frozen=True)
class Channel:
    """A further vector that every client sends next to its delta: summed exactly, never masked.

    to = model   its mean, weighted by samples, is added to the model.
    to = shared  its sum over the cohort, divided by the number of all clients, is added to a vector of that name
                 which starts at zero and which every client finds in `job.shared`.
    """

    name: str
    to: str = "shared"

    def __post_init__(self) -> None:
        if self.to not in ("model", "shared"):
            raise unknown(f"destination of channel '{self.name}'", self.to, ("model", "shared"))


@dataclass(frozen=True)
class LocalRule:
    """What a client does, and what that needs of the federation."""

    run: Callable[[Job], LocalResult]
    sends: tuple[Channel, ...] = ()  # the channels next to the delta
    keeps: tuple[str, ...] = ()  # the vectors a client keeps from one of its rounds to the next
    normalised: bool = False  # deltas come divided by `steps`; the server multiplies by the weighted mean of them
    trains: bool = True  # `job.x_P` ends as what the client has learned, so that it may keep a private part of it

    def __post_init__(self) -> None:
        declared = ((self.sends, Channel), (self.keeps, str))
        sound = (isinstance(given, tuple) and all(isinstance(v, kind) for v in given) for given, kind in declared)
        if not callable(self.run) or not all(sound):
            raise UserError(
                "a LocalRule is made of a function of a job, a tuple of Channels that it sends and a tuple of names "
                "that it keeps; a tuple of one is written with a comma: (Channel('c'),)"
            )
        names = [channel.name for channel in self.sends]
        if len(set(names)) < len(names) or len(set(self.keeps)) < len(self.keeps):
            raise UserError(f"a local rule sends {names} and keeps {list(self.keeps)}; no name may stand there twice")

    def __call__(self, job: Job) -> LocalResult:
        return self.run(job)
