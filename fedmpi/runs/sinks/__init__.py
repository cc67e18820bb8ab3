"""Other people's tools as sinks of a run's metrics: TensorBoard, Weights & Biases, MLflow.

They get the numbers of metrics.jsonl, under the same names, at the round as their step; the two that know what a run is
get its configuration too. None is imported before it is asked for. None speaks to anybody unless the user's own
environment says so (WANDB_MODE, MLFLOW_TRACKING_URI): what they have is kept in the run folder, and their reports to
their makers, which both send by default and W&B even offline, are switched off.

A run that goes on is the same run there. Rounds that are trained again after a checkpoint are there already, with the
same numbers, and are not written twice; rounds that a tool has missed are filled in from metrics.jsonl.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
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
    """Refuse a sink whose packages are not installed; looks for them without importing them."""
    for package in NEEDS.get(name, ()):
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError) as error:
            raise missing(name, package, reason(error)) from error
        if spec is None or spec.origin is None:  # nowhere, or no more than a folder of that name
            raise missing(name, package, f"No module named '{package}'")


class Guarded:
    """A sink that gets every round once, and whose failure costs the run nothing but the sink: a warning says why."""

    def __init__(self, name: str, about: About) -> None:
        self.name = name
        self.sink: Tool | None = None
        try:
            self.sink = SINKS[name](about)
        except UserError:
            raise
        except Exception as error:
            if not about.done:  # somebody is there to put it right
                why = in_words(error)
                raise UserError(f"--log_to {name} cannot begin ({why}); put that right, or leave it out") from error
            self.lose(error)
        for record in about.records:
            self.write(record)

    def write(self, record: dict[str, Any]) -> None:
        if self.sink is None or record["round"] <= self.sink.last:
            return
        try:
            self.sink.write(record)
            self.sink.last = record["round"]
        except Exception as error:
            self.lose(error)

    def close(self, how: str) -> None:
        if self.sink is None:
            return
        try:
            self.sink.close(how)
        except Exception as error:
            self.lose(error)

    def lose(self, error: Exception) -> None:
        """Go on without it."""
        self.sink = None
        log.warning("--log_to %s fails (%s); going on without it", self.name, in_words(error))


def in_words(error: BaseException) -> str:
    """What went wrong in somebody else's code: the first cause, whatever has been wrapped around it, and its kind."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    what = reason(error) if isinstance(error, OSError) else one_line(error)
    return f"{type(error).__name__}: {what[:200]}"
