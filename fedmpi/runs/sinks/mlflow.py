"""MLflow: a SQLite file in `mlflow/` of the run folder; or the store that MLFLOW_TRACKING_URI names.

MLflow allows one value for a param, ever, and any number of values for a metric at a step. So a knob that a later life
has changed becomes a tag; and `round` is the last metric of a round that is written, which tells what is there.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ...errors import UserError
from .base import About, imported, known_id, scalars, settle_id

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "CRITICAL"}
QUIET |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # a round waits for it
"""what MLflow is told, unless the user has told it otherwise; what it would log as an error is raised as well"""
PARAMS, METRICS, LONGEST = 100, 1000, 6000  # at once, at once, characters: its limits

T = TypeVar("T")


class Mlflow:
    """A run of MLflow."""

    def __init__(self, about: About) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        mlflow, home = imported("mlflow", "mlflow"), about.folder / "mlflow"
        self.kinds = imported("mlflow", "mlflow.entities")
        home.mkdir(mode=0o700, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = mlflow.MlflowClient(tracking_uri=uri or address(home / "mlflow.db"))
        experiment = self.experiment(None if uri else (home.resolve() / "artifacts").as_uri())
        id = known_id(home)
        run = self.find(experiment, id)
        self.last = int(run.data.metrics.get("round", 0)) if run else 0
        new = settle_id(home, about, self.last)
        if run is None or new != id:
            self.last = 0
            run = self.client.create_run(experiment, run_name=about.name, tags=about.tags | {"fedmpi.id": new})
        self.run: str = run.info.run_id
        self.client.update_run(self.run, status="RUNNING")
        self.tell(about.config, run.data)

    def experiment(self, artifacts: str | None) -> str:
        """The experiment to which the run belongs, made where it is not there."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedmpi"
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                self.client.create_experiment(name, artifact_location=artifacts)
            except Exception:
                if self.client.get_experiment_by_name(name) is None:  # else another run was quicker
                    raise
            found = self.client.get_experiment_by_name(name)
        id: str = found.experiment_id
        return id

    def find(self, experiment: str, id: str | None) -> Any:
        """The run that was begun under an id of ours, or None."""
        found = self.client.search_runs([experiment], f"tags.`fedmpi.id` = '{id}'", max_results=1) if id else []
        return found[0] if found else None

    def tell(self, config: Mapping[str, Any], there: Any) -> None:
        """Write the knobs as params; those that are there with another value as tags."""
        ours = {name: in_words(value)[:LONGEST] for name, value in config.items()}
        new = [self.kinds.Param(name, value) for name, value in ours.items() if name not in there.params]
        for some in slices(new, PARAMS):
            self.client.log_batch(self.run, params=some)
        for name in there.params.keys() & ours.keys():
            if there.tags.get(f"changed.{name}", there.params[name]) != ours[name]:
                self.client.set_tag(self.run, f"changed.{name}", ours[name])

    def write(self, record: dict[str, Any]) -> None:
        now, step = int(1000 * time.time()), record["round"]
        numbers = sorted(scalars(record), key=lambda pair: pair[0] == "round")
        metrics = [self.kinds.Metric(allowed(name), float(value), now, step) for name, value in numbers]
        for some in slices(metrics, METRICS):
            self.client.log_batch(self.run, metrics=some)

    def close(self, how: str) -> None:
        self.client.set_terminated(self.run, STATUS[how])


def address(path: Path) -> str:
    """A SQLite file's address."""
    if "?" in str(path.resolve()):
        raise UserError(f"--log_to mlflow: its store cannot lie in {path.parent}, '?' ends a path there; change --out")
    return f"sqlite:///{path.resolve()}"


def allowed(name: str) -> str:
    """A metric's name with what MLflow does not allow in one taken out: layers may be called anything."""
    return re.sub(r"[^\w .:/-]", "_", name)[:250]


def in_words(value: Any) -> str:
    """A knob as a param: a string as it is, anything else as in JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def slices(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """The items, so many at a time."""
    for start in range(0, len(items), most):
        yield items[start : start + most]
