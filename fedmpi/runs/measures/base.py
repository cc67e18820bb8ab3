"""What a measurement is: an object with four moments, each of which may be left out.

    prepare       once, before the first round: refuse what cannot be measured
    on_tile       inside the round: look at a tile of votes, mean and mask before the server's step
    after_round   numbers of the round
    at_end        numbers of the finished run

Nothing in a measurement may change what is trained. Sum whole numbers over the ranks (`run.comm.sum`) and divide
afterwards: then the result is the same on any number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ...aggregate.exchange import Tile
from ...clients.task import Task, Total
from ...comm import Comm, common_trouble
from ...data import Data
from ...errors import CommonError, RunError, UserError, raised
from ...rounds import Plan, Report, State
from ..config import Config
from ..metrics import trouble
from .score import Score

if TYPE_CHECKING:
    from ..build import Overrides

log = logging.getLogger("fedmpi")

T = TypeVar("T")

DONE, FAILED = 0, -1


class Ranks:
    """The ranks of a run as a measurement may use them: what fails on one rank is the same error on all of them."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.error: type[UserError | CommonError] = UserError
        """what is raised: the caller's mistake before the first round, a fault of the run afterwards"""
        self.last: Exception | None = None
        self.kept: dict[str, str] = {}
        """what a measurement has raised inside the round, until its next moment"""

    def sum(self, x: Tensor) -> None:
        """Sum a tensor over the ranks, in place. Collective."""
        self.meet(x.numel())
        self.comm.sum(x)

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Return what a measurement's moment returns; raise on all ranks if it fails on one. Collective."""
        problem = ""
        try:
            if name in self.kept:
                raise RunError(self.kept.pop(name))
            found = work()
        except (Exception, SystemExit) as error:
            if error is self.last:  # every rank has raised it
                raise
            problem = in_words(name, error)
        self.meet(DONE, problem)
        return found

    def keep(self, name: str, work: Callable[[], T], otherwise: T) -> T:
        """Return what a measurement returns inside the round. What it raises there is kept until all ranks can raise it
        together; from then on return `otherwise`. Not collective."""
        try:
            return otherwise if name in self.kept else work()
        except (Exception, SystemExit) as error:
            self.kept[name] = in_words(name, error)
            return otherwise

    def meet(self, numbers: int, problem: str = "") -> None:
        """Raise the same error on every rank if one of them has a problem, or if they are about to sum different
        numbers of numbers (`DONE`: none any more). Collective."""
        steps = torch.zeros(self.size, dtype=torch.int64)
        steps[self.rank] = FAILED if problem else numbers
        self.comm.sum(steps)
        if FAILED in steps:
            problem = common_trouble(self.comm, problem)
        elif int(steps.min()) != int(steps.max()):
            problem = f"ranks disagree on what a measurement sums next ({steps.tolist()} numbers); let all sum the same"
        if problem:
            self.last = self.error(problem)
            raise self.last


def in_words(name: str, error: BaseException) -> str:
    """Return what went wrong in a measurement; log the traceback of what is not an error message of ours."""
    if isinstance(error, UserError | RunError):
        return str(error)
    log.error("measurement '%s' raised %r", name, error, exc_info=error)
    return f"measurement '{name}' raised {raised(error)}"


@dataclass
class Run:
    """What a measurement sees of a run, on every rank."""

    cfg: Config
    task: Task
    """the model bound to flat vectors, its data, and who has which samples (`task.partition`)"""
    data: Data
    plan: Plan
    comm: Ranks
    given: Overrides
    """data and model that were handed over in Python"""
    out: Path | None
    """the run folder, where there is one"""
    classes: int = 0
    """set in `prepare`: score this many classes by themselves (`score.classes`)"""
    metrics: dict[str, Total] = field(default_factory=dict)
    """set in `prepare`: further metrics of the test set (`score.more`)"""
    current: State | None = None
    score: Score | None = None
    """of the new model on the test set; None in rounds that are not scored (--eval.every)"""
    print: Callable[[str], None] = lambda text: None
    """prints a line on rank 0"""

    @property
    def state(self) -> State:
        """Return the state after the last round; there is none yet in `prepare`. Read it, do not write to it."""
        assert self.current is not None, "there is no state before the first round"
        return self.current

    @property
    def model(self) -> nn.Module:
        """Return the model after the last round, in evaluation mode."""
        self.task.load(self.state.model_N, self.state.ints)
        return self.task.model.eval()


Numbers = Mapping[str, Any]
"""numbers by name; a value may be such a mapping itself, or None where there is no number"""


class Measure:
    """A measurement. Every rank has its own object and calls it at the same points; rank 0's numbers are recorded."""

    name = ""
    """as in --evaluate"""

    def prepare(self, run: Run) -> None:
        """Get ready, before the first round. Raise a `UserError` if the run does not have what is needed."""

    def on_tile(self, tile: Tile, mask: Tensor, clients: int) -> None:
        """Look at a tile of this rank's slice before the server's step; `tile.votes` are absolute. Not collective."""

    def after_round(self, run: Run, report: Report) -> Numbers | None:
        """Return the numbers of a round."""

    def at_end(self, run: Run) -> Numbers | None:
        """Return the numbers of the finished run; its folder is complete."""


def checked(name: str, work: Callable[[], Any], taken: Collection[str]) -> dict[str, Any]:
    """Return what a measurement returns as plain numbers; raise a `RunError` if it is something else, or has a name
    that is taken."""
    found = work()
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise RunError(f"measurement '{name}' returned {type(found).__name__}; it must return numbers by name, or None")
    numbers: dict[str, Any] = plain(name, "", found)
    if clash := sorted(numbers.keys() & taken):
        raise RunError(f"measurement '{name}' returned '{clash[0]}', which is recorded already; give it another name")
    if wrong := trouble({"round": 1} | numbers):
        raise RunError(f"measurement '{name}' returned what cannot be recorded: it {wrong}")
    return numbers


def plain(name: str, key: str, value: Any) -> Any:
    """Return a number, None or a mapping of them as JSON has it."""
    if isinstance(value, Mapping) and all(isinstance(inner, str) for inner in value):
        return {inner: plain(name, f"{key}/{inner}".lstrip("/"), one) for inner, one in value.items()}
    if isinstance(value, Tensor | np.ndarray | np.generic) and np.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, int | float | None):
        return int(value) if isinstance(value, bool) else value
    raise RunError(f"measurement '{name}' returned {type(value).__name__} for '{key}'; it must be a number or None")
