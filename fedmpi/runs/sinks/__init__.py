"""Other tools as sinks of a run's metrics: TensorBoard, Weights & Biases, MLflow.

Sinks get the numbers of metrics.jsonl, under the same names, with the round as the step. W&B and MLflow also get the
configuration. A tool is imported only on request. None connects to a server unless the user's environment says so
(WANDB_MODE, MLFLOW_TRACKING_URI): by default they write to the run folder, and the usage reports that both send by
default, W&B even offline, are disabled.

A resumed run stays the same run in the tool. Rounds that are trained again after a checkpoint have the same numbers and
are not written twice; rounds that a tool has missed are added from metrics.jsonl.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...errors import UserError, one_line, reason
from .base import About, Sink, missing
from .mlflow import Mlflow
from .tensorboard import TensorBoard
from .wandb import Wandb

__all__ = ["SINKS", "About", "Guarded", "Sink", "need"]

log = logging.getLogger("fedmpi")

SINKS: dict[str, Callable[[About], Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}
NEEDS = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""packages that only these sinks need; each sink is an extra of the same name in setup.py"""


def need(name: str) -> None:
    """Check that the packages of a sink are installed, without importing them."""
    for package in NEEDS.get(name, ()):
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError) as error:
            raise missing(name, package, reason(error)) from error
        if spec is None or spec.origin is None:  # not found, or just a folder of that name
            raise missing(name, package, f"No module named '{package}'")


class Guarded(Sink):
    """A sink that gets every round once. If it fails, the run continues without it and logs a warning."""

    def __init__(self, name: str, about: About) -> None:
        self.name = name
        self.sink: Sink | None = None
        try:
            self.sink = SINKS[name](about)
        except UserError:
            raise
        except Exception as error:
            if not about.done:  # at the first start the user can still fix it
                why = in_words(error)
                raise UserError(f"--log_to {name} cannot start ({why}); fix that, or leave it out") from error
            self.lose(error)
        for record in about.records:
            self.add(record, record["round"])

    def add(self, numbers: dict[str, Any], step: int) -> None:
        if self.sink is None or step <= self.sink.last:
            return
        before = self.sink.last
        try:
            self.sink.mark(step)  # first: a run that is killed in between must not log it twice
            self.sink.add(numbers, step)
        except Exception as error:
            with suppress(OSError):
                self.sink.mark(before)
            self.lose(error)

    def end(self, record: dict[str, Any], more: dict[str, Any]) -> None:
        self.attempt(lambda sink: sink.end(record, more))

    def close(self, how: str) -> None:
        self.attempt(lambda sink: sink.close(how))

    def attempt(self, work: Callable[[Sink], None]) -> None:
        """Call the sink, unless it has failed before."""
        try:
            if self.sink is not None:
                work(self.sink)
        except Exception as error:
            self.lose(error)

    def lose(self, error: Exception) -> None:
        """Log a warning and continue without the sink."""
        self.sink = None
        log.warning("--log_to %s failed (%s); continuing without it", self.name, in_words(error))


def in_words(error: BaseException) -> str:
    """Return the root cause of an error in a tool's code: type and message."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    what = reason(error) if isinstance(error, OSError) else one_line(error)
    return f"{type(error).__name__}: {what[:200]}"
