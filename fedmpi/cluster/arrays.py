"""Several runs as one job array: one `sbatch`, a queue that lets so many of them run at once, and for each run a job of
its own.

Every run is checked, and its folder made, as `fedmpi submit` does it; nothing is queued unless all of them are sound.
An element of the array is a run with its own id ("1234_7"), its own lives and its own fate: it is queued again alone
and goes on from its own checkpoint, and `fedmpi status`, `cancel` and `submit` take its folder like any other.
submitit has one folder for the pickles and logs of an array: slurm/ in the folder that the runs have in common.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from pathlib import Path
from typing import Any

from ..errors import RunError, UserError
from ..runs.config import Config
from ..runs.folder import make
from .status import FILES, Job, alive, jobs_of
from .submit import (
    SUBMITTED,
    Submission,
    Train,
    check,
    check_folder,
    check_name,
    checked_config,
    frozen,
    make_folder,
    note_job,
    requeue_command,
    slurm_parameters,
    submitit_or_error,
    to_slurm,
    undone_unless_queued,
)


def submit_runs(
    asked: Submission, runs: list[tuple[Config, Path]], home: Path, at_once: int | None = None
) -> list[Job]:
    """Hand runs with their folders to Slurm as one array, of which `at_once` elements may run at a time (None: all);
    returns their jobs. `home` is the folder that they have in common. A single run is a plain job."""
    check(asked)
    if at_once is not None and at_once < 1:
        raise UserError(f"{at_once} runs are to run at once; it must be at least 1")
    if not runs:
        return []
    home = home.absolute()
    check_name(home)
    sound = [checked(asked, cfg, out) for cfg, out in runs]
    outs = [out for _, out in sound]
    if twice := [out for out in outs if outs.count(out) > 1]:
        raise UserError(f"several runs have the folder {twice[0]}; give each its own")
    for (cfg, out), (job, facts) in zip(sound, jobs_of(outs), strict=True):
        if facts is None:
            raise RunError(f"Slurm does not answer about {job} of {out}, which may be in the queue; try again later")
        check_folder(out, cfg, alive(out, job, facts))
    submitit_or_error()
    submitted, files = time.time(), home / FILES
    with undone_unless_queued(home, files, *outs):
        make(files)
        tasks = []
        for cfg, out in sound:
            make_folder(out, cfg)
            tasks.append(Train(frozen(asked, cfg, out)))
        jobs = to_slurm(asked, tasks, files, array_parameters(asked, outs, home, at_once))
    for job, out in zip(jobs, outs, strict=True):
        note_job(asked, job, out, ["train", "--config", str(out / FILES / SUBMITTED)], submitted, files)
    return jobs


def checked(asked: Submission, cfg: Config, out: Path) -> tuple[Config, Path]:
    """A run as `checked_config` gives it; what is wrong is told with its name."""
    try:
        return checked_config(asked, dataclasses.replace(cfg, out=str(out)))
    except UserError as error:
        raise UserError(f"run '{out.name}': {error}") from None


def array_parameters(asked: Submission, outs: list[Path], home: Path, at_once: int | None) -> dict[str, Any]:
    """The array for submitit: as `slurm_parameters`, named after the folder that all have in common."""
    return slurm_parameters(asked, home) | {
        "array_parallelism": at_once or len(outs),
        "teardown": [
            "code=$?",
            f"runs=({shlex.join(map(str, outs))})",
            f'{requeue_command(asked)} --run "${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}" $code',
            "exit $?",
        ],
    }
