"""MLflow: a SQLite file in `mlflow/` of the run folder, or the store that MLFLOW_TRACKING_URI names.

MLflow does not allow a param to change: if a knob changes when a run resumes, its first value stays.
"""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from ...errors import UserError
from .base import About, SinkWithRuns, imported, scalars

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_LOGGING_LEVEL": "CRITICAL"}
QUIET |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # a round waits for each
"""environment variables, unless already set; MLflow raises the errors that it would log"""
PARAMS, METRICS, LONGEST = 100, 1000, 6000  # MLflow's limits: params and metrics per request, characters per param


class Mlflow(SinkWithRuns):
    """A run of MLflow."""

    def __init__(self, about: About) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        mlflow, home = imported("mlflow", "mlflow"), about.folder / "mlflow"
        self.kinds = imported("mlflow", "mlflow.entities")
        super().__init__(home, about)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = mlflow.MlflowClient(tracking_uri=uri or address(home / "mlflow.db"))
        experiment = self.experiment(None if uri else (home.resolve() / "artifacts").as_uri())
        run = None if self.new else self.find(experiment)
        if run is None:
            self.mark(0)
            tags = about.tags | {"fedmpi.id": self.id}
            run = self.client.create_run(experiment, run_name=about.name, tags=tags)
        self.run: str = run.info.run_id
        self.client.update_run(self.run, status="RUNNING")
        knobs = {name: in_words(value)[:LONGEST] for name, value in about.config.items()}
        new = [self.kinds.Param(name, value) for name, value in knobs.items() if name not in run.data.params]
        for start in range(0, len(new), PARAMS):
            self.client.log_batch(self.run, params=new[start : start + PARAMS])

    def experiment(self, artifacts: str | None) -> str:
        """Return the id of the run's experiment; create it if there is none."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedmpi"
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                self.client.create_experiment(name, artifact_location=artifacts)
            except Exception:
                if self.client.get_experiment_by_name(name) is None:  # else another run has just created it
                    raise
            found = self.client.get_experiment_by_name(name)
        id: str = found.experiment_id
        return id

    def find(self, experiment: str) -> Any:
        """Return the run with our id; None if there is none."""
        wanted = f"tags.`fedmpi.id` = '{self.id}'"
        found = self.client.search_runs([experiment], wanted, max_results=1)
        return found[0] if found else None

    def add(self, numbers: dict[str, Any], step: int) -> None:
        now, named = int(1000 * time.time()), scalars(numbers).items()
        metrics = [self.kinds.Metric(allowed(name), float(value), now, step) for name, value in named]
        for start in range(0, len(metrics), METRICS):
            self.client.log_batch(self.run, metrics=metrics[start : start + METRICS])

    def close(self, how: str) -> None:
        self.client.set_terminated(self.run, STATUS[how])


def address(path: Path) -> str:
    """Return the URI of a SQLite file."""
    if "?" in str(path.resolve()):
        raise UserError(f"--log_to mlflow: its store cannot be in {path.parent}: '?' ends a URI's path; change --out")
    return f"sqlite:///{path.resolve()}"


def allowed(name: str) -> str:
    """Return a metric's name without characters that MLflow does not allow: layers can have any name."""
    return re.sub(r"[^\w .:/-]", "_", name)[:250]


def in_words(value: Any) -> str:
    """Return a knob's value as a param: strings as they are, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
