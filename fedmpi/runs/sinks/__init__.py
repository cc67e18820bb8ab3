"""Other tools as sinks of a run's metrics: TensorBoard, Weights & Biases, MLflow.

They get the numbers of metrics.jsonl, under the same names, with the round as their step; the two that know what a run
is get its configuration too. None is imported before it is asked for. None connects to anything unless the user's own
environment says so (WANDB_MODE, MLFLOW_TRACKING_URI): what they have is kept in the run folder, and the usage reports
that both send by default, W&B even offline, are switched off.

A run that resumes is the same run there. Rounds that are trained again after a checkpoint are there already, with the
same numbers, and are not written twice; rounds that a tool has missed are filled in from metrics.jsonl.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...errors import UserError, one_line, reason
from .base import About, Sink, Tool, missing
from .mlflow import Mlflow
from .tensorboard import TensorBoard
from .wandb import Wandb

__all__ = ["SINKS", "About", "Guarded", "Sink", "need"]

log = logging.getLogger("fedmpi")

SINKS: dict[str, Callable[[About], Tool]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}
NEEDS = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""the packages that only these need; each sink is an extra of the same name in setup.py"""


def need(name: str) -> None:
    """Refuse a sink whose packages are not installed; look for them without importing them."""
    for package in NEEDS.get(name, ()):
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError) as error:
            raise missing(name, package, reason(error)) from error
        if spec is None or spec.origin is None:  # nowhere, or no more than a folder of that name
            raise missing(name, package, f"No module named '{package}'")


class Guarded:
    """A sink that gets every round once. If it fails, the run continues without it and logs a warning."""

    def __init__(self, name: str, about: About) -> None:
        self.name = name
        self.sink: Tool | None = None
        try:
            self.sink = SINKS[name](about)
        except UserError:
            raise
        except Exception as error:
            if not about.done:  # somebody is there to fix it
                why = in_words(error)
                raise UserError(f"--log_to {name} cannot begin ({why}); fix that, or leave it out") from error
            self.lose(error)
        for record in about.records:
            self.write(record)

    def write(self, record: dict[str, Any]) -> None:
        if self.sink is None or record["round"] <= self.sink.logged.last:
            return
        before = self.sink.logged.last
        try:
            self.sink.logged.mark(record["round"])  # first: a run that is killed in between must not log it twice
            self.sink.write(record)
        except Exception as error:
            with suppress(OSError):
                self.sink.logged.mark(before)
            self.lose(error)

    def end(self, record: dict[str, Any], more: dict[str, Any]) -> None:
        self.attempt(lambda sink: sink.end(record, more))

    def close(self, how: str) -> None:
        self.attempt(lambda sink: sink.close(how))

    def attempt(self, work: Callable[[Tool], None]) -> None:
        """Let the sink do something, if it has not failed."""
        try:
            if self.sink is not None:
                work(self.sink)
        except Exception as error:
            self.lose(error)

    def lose(self, error: Exception) -> None:
        """Continue without it."""
        self.sink = None
        log.warning("--log_to %s fails (%s); going on without it", self.name, in_words(error))


def in_words(error: BaseException) -> str:
    """Return what went wrong in somebody else's code: the first cause and its kind."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    what = reason(error) if isinstance(error, OSError) else one_line(error)
    return f"{type(error).__name__}: {what[:200]}"
