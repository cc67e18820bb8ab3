"""Run folders of jobs, as tests of cluster/ make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COUNTERS = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "FEDMPI_RESTART_COUNT")
"""variables of launchers that tests of restarts must not inherit"""


def make_run(folder: Path, **job: Any) -> Path:
    """Make a run folder of 10 rounds in which nothing has happened yet; `job`: what its job.json says."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("rounds: 10\n")
    if job:
        (folder / "job.json").write_text(json.dumps({"executor": "slurm", "host": "n1"} | job))
    return folder


def add(path: Path, *records: dict[str, Any]) -> None:
    """Append lines to a file of records."""
    with open(path, "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def save(run: Path, number: int) -> None:
    """Make a checkpoint as far as a look from outside can see."""
    (run / "checkpoints" / f"round-{number}").mkdir(parents=True)
    (run / "checkpoints" / f"round-{number}" / "manifest.json").write_text("{}")
