"""`fedmpi submit`: training runs as jobs, of Slurm or on this machine.

Everything is checked before a job is queued, while somebody reads the error message. A job may be started several
times: its batch script ends with `fedmpi requeue` (requeue.py), which requeues a run that is stopped before its time
limit or fails; it resumes from its newest checkpoint. `--executor local` does the same without Slurm (supervisor.py).
Several runs are one job array (arrays.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ..errors import RunError, UserError, exit_code
from ..plugins.knobs import knob, plain_knobs
from ..runs import folder
from ..runs.config import Config
from ..runs.options import read_options
from ..runs.schema import Damaged
from .arrays import to_slurm
from .status import CANCELLED, FILES, JOB, Job, alive, jobs_of, newest_checkpoint

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

SLURM_ONLY = ("partition", "time", "cpus_per_rank", "mem", "account", "qos", "constraint", "mpi", "signal_seconds")
MINUTES, SIGNAL_SECONDS = 60, 120
SUBMITTED = "submitted.yaml"  # the configuration as it was checked

ABOUT = "Submit a training run as a job, to Slurm or to this machine."


@dataclass(frozen=True)
class SubmitOptions:
    """The options of `fedmpi submit`."""

    nodes: int = knob(1, low=1)
    """Nodes of the job."""
    ranks_per_node: int = knob(1, low=1)
    """Ranks per node."""
    partition: str | None = None
    """Slurm partition. Default: Slurm's default."""
    time: int | None = knob(None, low=1)
    """Time limit of the job in minutes. Default: 60. A longer run saves, is requeued and resumes."""
    cpus_per_rank: int | None = knob(None, low=1)
    """Cores per rank. Default: Slurm's default. Ranks use as many threads unless --threads is given."""
    gpus_per_node: int | None = knob(None, low=1)
    """GPUs per node, shared by its ranks."""
    mem: float | None = knob(None, low=0, open_low=True)
    """Memory per node in GB. Default: Slurm's default."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Required node features."""
    name: str | None = None
    """Job name. Default: that of the run folder."""
    executor: str = knob("slurm", choices=("slurm", "local"))
    """slurm, or local: processes on this machine that keep running when the terminal is closed."""
    mpi: str = knob("none", choices=("none", "pmi2", "pmix"))
    """How srun starts MPI ranks: none, pmi2 (MPICH) or pmix (Open MPI). Required for --comm mpi."""
    signal_seconds: int | None = knob(None, low=1)
    """Seconds before the time limit at which the run is signalled to save. Default: 120, or a quarter of the time limit
    if that is less."""
    retries: int = knob(3, low=0, high=1000)
    """Give up after this many consecutive restarts without a new checkpoint."""
    setup: str | None = None
    """Shell commands to execute before the run, such as 'module load mpich'."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def minutes(self) -> int:
        return self.time or MINUTES

    @property
    def warning_seconds(self) -> int:
        """Seconds before the time limit at which the run is signalled to save."""
        return self.signal_seconds or min(SIGNAL_SECONDS, 15 * self.minutes)


class Train:
    """The task of every rank of a job: `fedmpi train`. submitit pickles it; only the job reads it."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments

    def __call__(self) -> None:
        from ..runs.rank import begin, train

        if code := exit_code(lambda: train(self.arguments, *begin())):
            raise SystemExit(code)

    def checkpoint(self) -> DelayedSubmission:
        """Return an unchanged task: submitit calls this on signals that arrive before the run handles them itself."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


# Submitting


def submit(arguments: list[str]) -> int:
    """Run `fedmpi submit`: check a run, make its folder, and submit it to Slurm or to a supervisor on this machine."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[at + 1 :]
    usage = "[options] -- train [options of train]"
    options = read_options(SubmitOptions, arguments[:at], "submit", ABOUT, usage)
    if command[:1] != ["train"]:
        given = f"'{command[0]}'" if command else "nothing"
        raise UserError(f"submit was given {given} to run; write it after the options: fedmpi submit ... -- train ...")
    check(options)
    cfg, out = checked_run(command[1:])
    [job] = submit_runs(options, [(cfg, out)], home=out, command=command)
    print(summary(options, job, out), flush=True)
    return 0


def submit_runs(
    options: SubmitOptions,
    runs: list[tuple[Config, Path]],
    home: Path,
    at_once: int | None = None,
    command: list[str] | None = None,
) -> list[Job]:
    """Make the folders of runs, given by their checked configurations, and queue them, several as one job array of
    which `at_once` may run at a time (None: all); return their jobs. Nothing is queued unless all folders can be used.
    `home` is the folder that contains the runs, or the folder of a single one; `command` is what job.json records."""
    if not runs:
        return []
    if any(cfg.comm == "mpi" for cfg, _ in runs) and options.mpi == "none":
        kind, fix = "Slurm", "add --mpi pmi2 (MPICH) or --mpi pmix (Open MPI), or use --comm torch"
        if options.executor == "local":
            kind, fix = "local", "use --comm torch, or start it with mpiexec"
        raise UserError(f"--comm is mpi but {kind} jobs start no MPI ranks by themselves; {fix}")
    outs = [out for _, out in runs]
    for path in (home, *outs):
        if not str(path).isprintable() or set("%\\") & set(str(path)):
            raise UserError(f"--out {path} has a character with a special meaning for Slurm (% or \\); choose another")
    for (cfg, out), (job, facts) in zip(runs, jobs_of(outs), strict=True):
        if facts is None and options.executor == "slurm":
            raise RunError(f"Slurm does not answer about {job} of {out}, which may be queued; try again later")
        check_folder(out, cfg, alive(out, job, facts or {}))
    submitted, files = time.time(), home / FILES
    with removed_on_error(home, files, *outs):
        folder.make(files)
        tasks = [prepare_folder(options, cfg, out) for cfg, out in runs]
        if options.executor == "local":
            from .supervisor import start

            jobs = [start(options, out, task.arguments) for task, out in zip(tasks, outs, strict=True)]
        else:
            jobs = to_slurm(options, tasks, outs, home, at_once)
    for job, task, out in zip(jobs, tasks, outs, strict=True):
        record_job(options, job, out, command or ["train", *task.arguments], submitted, files)
    return jobs


@contextlib.contextmanager
def removed_on_error(*paths: Path) -> Iterator[None]:
    """Remove those of the folders that did not exist before if nothing could be queued."""
    new = [path for path in paths if not path.exists()]
    try:
        yield
    except (UserError, RunError):
        for path in new:
            shutil.rmtree(path, ignore_errors=True)
        raise


def record_job(options: SubmitOptions, job: Job, out: Path, command: list[str], submitted: float, logs: Path) -> None:
    """Write the job of a run, and the folder of its logs, to the run folder."""
    record = {
        "job": job.id,
        "executor": job.executor,
        "host": job.host,
        "nodes": options.nodes,
        "ranks": options.ranks,
        "command": command,
        "time": submitted,
        "folder": str(out),
        "logs": os.path.relpath(logs, out),
        "retries": options.retries,
    }
    try:
        folder.write(out / JOB, json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"{job} is queued and will run, but {out / JOB} cannot be written ({error.strerror})") from None


def prepare_folder(options: SubmitOptions, cfg: Config, out: Path) -> Train:
    """Make the run folder and return the task. Its configuration is a copy with absolute paths, so that later changes
    to files do not affect the job. The run stops when the next round would exceed the job's time: a round may take
    longer than the warning."""
    root, memory, minutes = cfg.data_root, cfg.memory, cfg.max_minutes
    if root is not None:
        root = str(Path(root).expanduser().absolute())
    if memory.folder is not None:
        memory = dataclasses.replace(memory, folder=str(Path(memory.folder).expanduser().absolute()))
    if minutes is None and options.executor == "slurm":
        minutes = options.minutes - options.warning_seconds / 60
    frozen = dataclasses.replace(cfg, out=str(out), data_root=root, memory=memory, max_minutes=minutes)
    folder.make(out)
    try:
        (out / FILES).mkdir(mode=0o700, exist_ok=True)
        (out / CANCELLED).unlink(missing_ok=True)
        if not (out / folder.CONFIG).exists():
            folder.write(out / folder.CONFIG, yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False))
        folder.write(out / FILES / SUBMITTED, yaml.safe_dump(dataclasses.asdict(frozen), sort_keys=False))
    except OSError as error:
        raise folder.unwritable(out, error) from None
    return Train(["--config", str(out / FILES / SUBMITTED)])


# Checks


def check(options: SubmitOptions) -> None:
    """Refuse options that contradict each other, or that Slurm cannot take."""
    for name in ("partition", "account", "qos", "constraint", "name"):
        value = getattr(options, name)
        if value is not None and (not value or not value.isprintable()):
            raise UserError(f"--{name} is {value!r}; it must be printable text on one line")
    if options.executor == "local":
        if options.nodes > 1:
            raise UserError(f"--nodes is {options.nodes} but --executor local is this machine only; use --nodes 1")
        refuse_with_local(options, SLURM_ONLY)
        return
    if options.signal_seconds is not None and options.signal_seconds > 30 * options.minutes:
        raise UserError(
            f"--signal_seconds is {options.signal_seconds} but the time limit is {60 * options.minutes} seconds; it "
            "must be at most half of that, to leave time to train"
        )
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise UserError("sbatch and srun were not found; submit on a login node of the cluster, or --executor local")


def refuse_with_local(options: SubmitOptions, names: tuple[str, ...]) -> None:
    """Refuse those of the named options that are set, as --executor local does not use them."""
    given = [f"--{name}" for name in names if getattr(options, name) != getattr(type(options), name)]
    if given:
        raise UserError(f"{' and '.join(given)} cannot be used with --executor local; leave it out, or use slurm")


def checked_run(arguments: list[str]) -> tuple[Config, Path]:
    """Return the configuration of a run, with all names looked up, and its folder from the arguments of `train`."""
    from ..runs.build import prepare
    from ..runs.log import set_up
    from ..runs.options import parse, split_launch

    set_up(rank=0, size=1)
    launch, rest = split_launch(arguments)
    if launch.ranks > 1:
        raise UserError(f"--ranks is {launch.ranks} but a job starts its own ranks; use 'submit --ranks_per_node'")
    spec = prepare(parse(rest))
    assert spec.out is not None, "a command line always has a folder"
    return spec.cfg, spec.out.absolute()


def check_folder(out: Path, cfg: Config, busy: str) -> None:
    """Refuse a folder that contains something else, or a run that is finished, queued, running or was started with
    other settings, as far as they are known here. `busy` describes its job if that is queued or running."""
    from ..runs.checkpoint.format import MANIFEST, Fingerprint, read_sealed
    from ..runs.checkpoint.load import compare
    from ..runs.run import check_finished

    folder.check(out)
    check_finished(out, cfg, {})
    if busy:
        raise UserError(f"--out {out} belongs to {busy}; wait for it, end it with 'fedmpi cancel', or choose another")
    if folder.holder(out) is not None:
        raise UserError(f"--out {out} is in use by {folder.owner_in_words(out)}; wait for it, or choose another folder")
    saved = newest_checkpoint(out)
    if saved is None or cfg.resume != "auto":
        return
    with contextlib.suppress(Damaged):  # the run itself will look for another
        about = read_sealed(out / folder.CHECKPOINTS / f"round-{saved}" / MANIFEST)
        known = {name: value for name, value in plain_knobs(cfg).items() if value is not None and name != "device"}
        compare(out, about, Fingerprint(known, {}), force=False)


# Output


def summary(options: SubmitOptions, job: Job, run: Path) -> str:
    """Return what was submitted, how to follow it and how to end it."""
    ranks = f"{options.ranks_per_node} rank{'' if options.ranks_per_node == 1 else 's'}"
    where = f" on each of {options.nodes} nodes" if options.nodes > 1 else ""
    here = Path.cwd()
    name = shlex.quote(str(run.relative_to(here) if run.is_relative_to(here) else run))
    return (
        f"submitted {job}: {ranks}{where}\nrun folder  {name}\n"
        f"follow it   fedmpi status {name}\n            fedmpi logs -f {name}\nend it      fedmpi cancel {name}"
    )
