"""Runs as jobs: `fedmpi submit`, what `fedmpi cancel` does to them, and `requeue`, which belongs into batch scripts.

A job has several lives. `submit` checks everything here, where somebody reads what is wrong, and hands the run to
Slurm through submitit. In its batch script, behind srun, stands `fedmpi requeue`: a run that stopped in good order, as
it does before the time limit, and one that a fault has ended are put into the queue again, and go on from their newest
checkpoint. `--executor local` does the same without Slurm (keeper.py), several runs at once go to Slurm as a job array
(array.py). What is known of a run from outside is in jobs.py.

submitit is imported when something is submitted, not before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..comm.env import job_names
from ..errors import RunError, UserError, complain, exit_code, unknown
from ..plugins.knobs import check_bounds, knob, knobs
from ..runs import folder
from ..runs.config import Config
from ..runs.options import filled, make_parser
from ..runs.schema import Damaged
from .slurm import ask_slurm, slurm_job
from .status import (
    CANCELLED,
    FILES,
    JOB,
    LIVES,
    Job,
    alive,
    job_of,
    jobs_of,
    look,
    newest_checkpoint,
    stopped_well,
    verdict,
)

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

EXECUTORS = ("slurm", "local")
MANAGERS = ("none", "pmi2", "pmix")
SLURM_ONLY = ("partition", "time", "cpus_per_rank", "mem", "account", "qos", "constraint", "signal_seconds")
MINUTES, SIGNAL_SECONDS = 60, 120
SUBMITTED = "submitted.yaml"  # the configuration as it was checked
UNSENT = re.compile(r"[0-9a-f]{32}\.pkl|\.submission_file_[0-9a-f]{32}\.sh")  # submitit's files, before there is a job
PATIENCE = 60.0  # seconds that `cancel` waits for the end

# In a batch script, before the run: a secret that only the job's processes have, another one for each start; and srun
# in the background, because a signal to the script itself (scancel --batch) would end bash at once, or, with a trap, be
# noticed only when the run is done.
SEAL = """FEDMPI_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n')  # seals the ranks' rendezvous
export FEDMPI_SECRET"""
BATCH_SRUN = """srun() {  # in the background, so that a signal to this script is passed on to the ranks, which save
    local code=0 signalled=0 step
    command srun "$@" </dev/null &
    step=$!
    trap 'signalled=1; kill -USR2 "$step" 2>/dev/null || true' TERM USR2
    while :; do
        wait "$step" && code=0 || code=$?
        ((signalled)) || break
        signalled=0
    done
    trap '' TERM USR2  # nothing keeps the job from being requeued
    return "$code"
}"""

SUBMIT_ABOUT = "Submit a training run as a job: 'fedmpi submit [options] -- train [options of train]'."
REQUEUE_ABOUT = "In a batch script, behind the run: put the job into the queue again where that makes sense."


@dataclass(frozen=True)
class Submission:
    """What `submit` is asked for."""

    nodes: int = knob(1, low=1)
    """nodes of the job"""
    ranks_per_node: int = knob(1, low=1)
    """ranks on each node"""
    partition: str | None = None
    """Slurm's partition; null: its default"""
    time: int | None = knob(None, low=1)
    """minutes a life of the job may take; null: 60. A longer run saves, is queued again and goes on"""
    cpus_per_rank: int | None = knob(None, low=1)
    """cores for each rank; null: Slurm's default. Ranks use as many threads unless --threads says otherwise"""
    gpus_per_node: int | None = knob(None, low=1)
    """GPUs on each node, which its ranks share"""
    mem: float | None = knob(None, low=0, open_low=True)
    """GB of memory on each node; null: Slurm's default"""
    account: str | None = None
    """account that pays for it"""
    qos: str | None = None
    """quality of service"""
    constraint: str | None = None
    """features that the nodes must have"""
    name: str | None = None
    """name in the queue; null: that of the run folder"""
    executor: str = "slurm"
    """slurm, or local: processes on this machine that outlive the terminal"""
    mpi: str = "none"
    """how srun starts MPI ranks: none, pmi2 (MPICH) or pmix (Open MPI); needed for --comm mpi"""
    signal_seconds: int | None = knob(None, low=1)
    """seconds before the time limit at which the run is told to save; null: 120, or a quarter of the time if less"""
    retries: int = knob(3, low=0, high=1000)
    """lives in vain, with no round added to what is saved, after which a job is not started again"""
    setup: str | None = None
    """shell commands before the run, such as 'module load mpich'"""

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def minutes(self) -> int:
        return self.time or MINUTES

    @property
    def warning_seconds(self) -> int:
        """How long before its time limit the run is told."""
        return self.signal_seconds or min(SIGNAL_SECONDS, 15 * self.minutes)


class Train:
    """What every task of a job does: `fedmpi train`. It is pickled by submitit, and read by the job alone."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments

    def __call__(self) -> None:
        from ..runs.rank import Rank

        if code := exit_code(lambda: Rank.begin().train(self.arguments)):
            raise SystemExit(code)

    def checkpoint(self) -> DelayedSubmission:
        """For submitit, whose handler takes signals until the run has its own: begin again with nothing changed."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


# Submitting


def submit(arguments: list[str]) -> int:
    """`fedmpi submit`: check a run, make its folder, and hand it to Slurm or to a keeper on this machine."""
    options, command = divided(arguments)
    parser = make_parser("fedmpi submit", SUBMIT_ABOUT, Submission)
    asked = filled(parser, Submission, lambda: parser.parse_args(options))
    if command[:1] != ["train"]:
        given = f"'{command[0]}'" if command else "nothing"
        raise UserError(f"submit was given {given} to run; write it behind its options: fedmpi submit ... -- train ...")
    check(asked)
    cfg, out = checked_run(asked, command[1:])
    check_folder(out, cfg, alive(out, job_of(out)))
    submitit_or_error()
    submitted = time.time()
    with undone_unless_queued(out):
        make_folder(out, cfg)
        job = hand_over(asked, Train(frozen(asked, cfg, out)), out)
    print(handed_over(asked, job, shown(out)), flush=True)
    note_job(asked, job, out, command, submitted, out / FILES)
    return 0


@contextlib.contextmanager
def undone_unless_queued(*made: Path) -> Iterator[None]:
    """Folders that are made for a submission, and go again where nothing is queued."""
    new = [path for path in made if not path.exists()]
    try:
        yield
    except (UserError, RunError):
        for path in new:
            shutil.rmtree(path, ignore_errors=True)
        raise


def note_job(asked: Submission, job: Job, out: Path, command: list[str], submitted: float, logs: Path) -> None:
    """Note in a run folder which job it is and where that writes its logs."""
    record = {
        "job": job.id,
        "executor": job.executor,
        "host": job.host,
        "nodes": asked.nodes,
        "ranks": asked.ranks,
        "command": command,
        "time": submitted,
        "folder": str(out),
        "logs": os.path.relpath(logs, out),
        "retries": asked.retries,
    }
    try:
        folder.write(out / JOB, json.dumps(record, indent=2) + "\n")
    except OSError as error:
        sentence = f"{job} is queued, but {out / JOB} cannot be written ({error.strerror}): it runs all the same"
        raise RunError(sentence) from None


def frozen(asked: Submission, cfg: Config, out: Path) -> list[str]:
    """The arguments of a run that is as it was checked, whatever happens to files and folders until the job begins. It
    stops when the next round would not fit into the job's time any more: a round may take longer than the warning."""
    root, memory, minutes = cfg.data_root, cfg.memory, cfg.max_minutes
    if root is not None:
        root = str(Path(root).expanduser().absolute())
    if memory.folder is not None:
        memory = dataclasses.replace(memory, folder=str(Path(memory.folder).expanduser().absolute()))
    if minutes is None and asked.executor == "slurm":
        minutes = asked.minutes - asked.warning_seconds / 60
    kept = dataclasses.replace(cfg, out=str(out), data_root=root, memory=memory, max_minutes=minutes)
    file = out / FILES / SUBMITTED
    try:
        folder.write(file, yaml.safe_dump(dataclasses.asdict(kept), sort_keys=False))
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); choose an --out that can") from None
    return ["--config", str(file)]


def divided(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The options in front of '--', and the command behind it."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def check(asked: Submission) -> None:
    """Refuse options that are out of bounds or at odds with each other."""
    check_bounds(asked, prefix="")
    for kind, given, known in (("executor", asked.executor, EXECUTORS), ("--mpi", asked.mpi, MANAGERS)):
        if given not in known:
            raise unknown(kind, given, known)
    for name in ("partition", "account", "qos", "constraint", "name"):
        value = getattr(asked, name)
        if value is not None and (not value or not value.isprintable()):
            raise UserError(f"--{name} is {value!r}; it must be a word in one line")
    if asked.executor == "local":
        if asked.nodes > 1:
            raise UserError(f"--nodes is {asked.nodes} but --executor local has this machine only; use --nodes 1")
        useless = [f"--{name}" for name in SLURM_ONLY if getattr(asked, name) is not None]
        if useless:
            raise UserError(f"{' and '.join(useless)} cannot be used with --executor local; leave it out, or use slurm")
        return
    if asked.signal_seconds is not None and asked.signal_seconds > 30 * asked.minutes:
        raise UserError(
            f"--signal_seconds is {asked.signal_seconds} but a life of the job takes {60 * asked.minutes} seconds; it "
            "must be at most half of that, so that there is time to train"
        )
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise UserError("sbatch and srun were not found; submit on a login node of the cluster, or --executor local")


def checked_run(asked: Submission, arguments: list[str]) -> tuple[Config, Path]:
    """The configuration of a run and its folder, checked as `train` does it."""
    from ..runs.log import set_up
    from ..runs.options import parse, split_launch

    set_up(rank=0, size=1)
    launch, rest = split_launch(arguments)
    if launch.ranks > 1:
        raise UserError(f"--ranks is {launch.ranks} but a job has ranks of its own; use 'submit --ranks_per_node'")
    return checked_config(asked, parse(rest))


def checked_config(asked: Submission, cfg: Config) -> tuple[Config, Path]:
    """The same for a configuration that has been read already."""
    from ..runs.build import prepare

    prepared = prepare(cfg)
    if prepared.cfg.comm == "mpi" and asked.mpi == "none":
        kind, cure = "Slurm", "add --mpi pmi2 (MPICH) or --mpi pmix (Open MPI), or use --comm torch"
        if asked.executor == "local":
            kind, cure = "local", "use --comm torch, or start it with mpiexec"
        raise UserError(f"--comm is mpi but {kind} jobs start no MPI ranks by themselves; {cure}")
    if asked.mpi != "none" and asked.executor == "local":
        raise UserError(f"--mpi {asked.mpi} is srun's, but --executor is local; leave it out")
    assert prepared.out is not None, "a command line always has a folder"
    out = prepared.out.absolute()
    check_name(out)
    return prepared.cfg, out


def check_name(out: Path) -> None:
    """Refuse a path that cannot stand in a batch script."""
    if not str(out).isprintable() or set("%\\") & set(str(out)):
        raise UserError(f"--out {out} has a character that Slurm takes for more than itself (% or \\); choose another")


def check_folder(out: Path, cfg: Config, busy: str) -> None:
    """Refuse a folder that holds something else, or a run that is done, queued, running, or begun with other settings,
    as far as they are known here. `busy`: its job in words, where that is `alive`."""
    from ..runs.checkpoint import MANIFEST, Fingerprint, compare, read_sealed
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
        known = {name: value for name, value in knobs(cfg).items() if value is not None and name != "device"}
        known = {name: value for name, value in known.items() if not dataclasses.is_dataclass(value)}
        compare(out, about, Fingerprint(known, {}), force=False)


def submitit_or_error() -> None:
    """Refuse where submitit cannot be imported."""
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"submit needs submitit, which cannot be imported ({error}); pip install submitit, or use a script of "
            "slurm/ with sbatch"
        ) from None


def make_folder(out: Path, cfg: Config) -> None:
    """Make the run folder as a run would, so that the run takes it for its own."""
    folder.make(out)
    try:
        (out / FILES).mkdir(mode=0o700, exist_ok=True)
        (out / CANCELLED).unlink(missing_ok=True)
        if not (out / folder.CONFIG).exists():
            folder.write(out / folder.CONFIG, yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False))
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); choose a folder that can") from None


def hand_over(asked: Submission, train: Train, out: Path) -> Job:
    """Submit; returns the job."""
    if asked.executor == "local":
        from .supervisor import start

        pid = start(train, out, asked.ranks, asked.retries, asked.gpus_per_node, asked.setup)
        return Job(str(pid), "local", socket.gethostname())
    [job] = to_slurm(asked, [train], out / FILES, slurm_parameters(asked, out))
    return job


def to_slurm(asked: Submission, tasks: list[Train], files: Path, parameters: dict[str, Any]) -> list[Job]:
    """Submit through submitit, several tasks as the elements of one array; returns a job for each."""
    import submitit

    executor = submitit.SlurmExecutor(folder=files, max_num_timeout=asked.retries)
    executor.update_parameters(**parameters)
    before, said = set(files.iterdir()), io.StringIO()
    try:
        with contextlib.redirect_stderr(said), outside_of_arrays():  # submitit prints what it raises
            jobs = executor.submit_array(tasks)
    except submitit.core.utils.FailedJobError as error:
        for path in set(files.iterdir()) - before:
            if UNSENT.fullmatch(path.name):
                path.unlink()
        raise refusal(str(error)) from None
    return [Job(job.job_id, "slurm", socket.gethostname()) for job in jobs]


def refusal(said: str) -> UserError | RunError:
    """What sbatch said when it took no job, as an error."""
    lines = [line.removeprefix("sbatch: error: ") for line in said.splitlines()]
    sentence = f"sbatch refused the job: {'; '.join(lines) or 'it did not say why'}"
    if "contact slurm controller" in said.lower():
        return RunError(f"{sentence}; see whether 'sinfo' answers")
    if "job array specification" in said.lower():
        return UserError(f"{sentence}; an array has at most MaxArraySize runs, which 'scontrol show config' tells")
    return UserError(f"{sentence}; 'sinfo' lists the partitions and their limits")


@contextlib.contextmanager
def outside_of_arrays() -> Iterator[None]:
    """No variables of a job array: a job inherits them, and would take itself for the element that submitted it."""
    inherited = {name: value for name, value in os.environ.items() if name.startswith("SLURM_ARRAY_")}
    for name in inherited:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(inherited)


def slurm_parameters(asked: Submission, out: Path) -> dict[str, Any]:
    """The job for submitit: sbatch's options, and the lines of its script."""
    srun = ["--kill-on-bad-exit=1", "--open-mode=append", f"--mpi={asked.mpi}"]
    if asked.cpus_per_rank is not None:
        srun.append(f"--cpus-per-task={asked.cpus_per_rank}")  # since Slurm 22.05 srun does not take it from sbatch
    given = {
        "job_name": asked.name or f"fedmpi-{out.name}",
        "nodes": asked.nodes,
        "ntasks_per_node": asked.ranks_per_node,
        "time": asked.minutes,
        "signal_delay_s": asked.warning_seconds,
        "partition": asked.partition,
        "cpus_per_task": asked.cpus_per_rank,
        "gpus_per_node": asked.gpus_per_node,
        "mem": None if asked.mem is None else f"{max(1, round(asked.mem * 1024))}M",
        "account": asked.account,
        "qos": asked.qos,
        "constraint": asked.constraint,
        "srun_args": srun,
        "setup": [SEAL, BATCH_SRUN] + ([] if asked.setup is None else [asked.setup]),
        "teardown": [f"{requeue_command(asked)} --run {shlex.quote(str(out))} $?", "exit $?"],
        "additional_parameters": {"requeue": True},  # also where the cluster does not do so by default
    }
    return {name: value for name, value in given.items() if value is not None} | {"wckey": None}  # not submitit's own


def requeue_command(asked: Submission) -> str:
    """How a batch script begins to ask whether it is to be queued again."""
    return shlex.join([sys.executable, "-m", "fedmpi", "requeue", "--retries", str(asked.retries)])


def handed_over(asked: Submission, job: Job, run: Path) -> str:
    """What was submitted, how to follow it and how to end it."""
    ranks = f"{asked.ranks_per_node} rank{'s' * (asked.ranks_per_node > 1)}"
    where = f" on each of {asked.nodes} nodes" if asked.nodes > 1 else ""
    named = shlex.quote(str(run))
    return (
        f"submitted {job}: {ranks}{where}\nrun folder  {run}\n"
        f"follow it   fedmpi status {named}\n            fedmpi logs -f {named}\nend it      fedmpi cancel {named}"
    )


def shown(path: Path) -> Path:
    """A path as one would type it here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


# In the batch script


@dataclass(frozen=True)
class Again:
    """What `requeue` is asked for."""

    retries: int = knob(3, low=0, high=1000)
    """lives in vain after which a job is not started again"""
    run: str | None = None
    """run folder, which tells how far the lives came; null: SLURM_RESTART_COUNT counts"""


@dataclass(frozen=True)
class Requeue(Again):
    code: int = 0


def requeue(arguments: list[str]) -> int:
    """`fedmpi requeue CODE`: queue the job of this batch script again, or not; returns the code that it was given."""
    parser = make_parser("fedmpi requeue", REQUEUE_ABOUT, Again)
    parser.add_argument("code", type=int, metavar="CODE", help="exit code of the run: $? right behind it")
    asked = filled(parser, Requeue, lambda: parser.parse_args(arguments))
    check_bounds(asked, prefix="")
    if not 0 <= asked.code <= 255:
        raise UserError(f"the exit code is {asked.code}; it must be from 0 to 255, such as $?")
    if asked.code == 0:
        return 0
    names = job_names(os.environ)
    job = names["job"]
    if job is None:
        raise UserError("requeue belongs into a batch script, behind the run, but SLURM_JOB_ID is not set")
    run = None if asked.run is None else Path(asked.run).expanduser()
    restarts = folder.restarts(os.environ)
    again, why = verdict(asked.code, run, asked.retries, job, restarts)
    add_life(run, asked.code, names, restarts, again, why)  # first: a life that is not counted may come for ever
    if again:
        again, why = put_back(job)
        if not again:
            add_life(run, asked.code, names, restarts, again, why)
    how = "stopped in good order" if stopped_well(asked.code, run) else f"ended with exit code {asked.code}"
    complain(f"job {job} {how}; " + ("queued again" if again else f"not queued again: {why}"))
    return asked.code


def put_back(job: str) -> tuple[bool, str]:
    """Put a job that runs into the queue again; whether that was done, and why not."""
    facts = slurm_job(job)
    if facts is None:
        return False, "Slurm does not answer"
    state = facts.get("JobState", "gone")
    if state != "RUNNING":  # cancelled, or requeued by somebody else
        return False, f"it is {state} already"
    said = ask_slurm("scontrol", "requeue", job)
    if said is None or said.returncode:
        return False, "scontrol requeue failed: " + " ".join((said.stderr if said else "no answer").split())
    return True, ""


def add_life(run: Path | None, code: int, names: dict[str, str | None], restarts: int, again: bool, why: str) -> None:
    """Note in the folder how a life of a job, by its names, ended; not in one that is no run's."""
    if run is None or not (run / folder.CONFIG).exists():
        return
    record = {"time": time.time(), **names, "restart": restarts, "code": code}
    record |= {"round": newest_checkpoint(run) or 0, "again": again, "why": why}
    try:
        folder.append(run / LIVES, json.dumps(record))
    except OSError as error:
        raise RunError(
            f"{run / LIVES} cannot be written ({error.strerror}), so job {names['job']} is not started again"
        ) from None


# Looking and ending


@dataclass(frozen=True)
class Nothing:
    """No options."""


def cancel_jobs(jobs: dict[Path, Job]) -> list[str]:
    """End the jobs of run folders and wait for their end; returns a line about each."""
    for run, job in jobs.items():
        try:
            folder.write(run / CANCELLED, json.dumps({"time": time.time(), "job": job.id}) + "\n")
        except OSError as error:
            raise RunError(f"{run} cannot be written ({error.strerror}); end it with 'scancel {job.id}'") from None
        try:
            end(job)
        except RunError:
            (run / CANCELLED).unlink()  # it goes on
            raise
    wait_until(lambda: not still_alive(jobs))
    left = still_alive(jobs)
    return [
        f"{run}: {job} {'told to end, and still ending' if run in left else 'cancelled'}; {kept(run)}: submit it again "
        "to resume"
        for run, job in jobs.items()
    ]


def kept(run: Path) -> str:
    """What is kept of a run that was ended, in words."""
    saved = newest_checkpoint(run)
    return "no checkpoint was written" if saved is None else f"the checkpoint of round {saved} is kept"


def still_alive(jobs: dict[Path, Job]) -> list[Path]:
    """The runs whose jobs wait or run still, or of which Slurm does not answer."""
    facts = [facts for _, facts in jobs_of(list(jobs))]
    known = zip(jobs.items(), facts, strict=True)
    return [run for (run, job), found in known if found is None or alive(run, job, found)]


def running_job(run: Path) -> Job:
    """The job of a run that is queued or running; a `UserError` where there is none to end."""
    seen, job = look(run), job_of(run)
    owner = folder.holder(run)
    if job is not None and alive(run, job):
        if job.executor == "local" and job.host != socket.gethostname():
            raise UserError(f"'{run}' runs on {job.host}; cancel it there")
        return job
    if job is not None and job.executor == "slurm" and slurm_job(job.id) is None:
        raise RunError(f"Slurm does not answer, so its job {job.id} cannot be cancelled; see whether 'sinfo' answers")
    if owner is not None:
        raise UserError(f"'{run}' is run by {folder.owner_in_words(run)}, not as a job: end it where it was started")
    raise UserError(f"'{run}' is not running: it is {seen['state']}" + (f" ({seen['why']})" if seen["why"] else ""))


def end(job: Job) -> None:
    """Tell a job to end."""
    if job.executor == "local":
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(job.id), signal.SIGTERM)
        return
    said = ask_slurm("scancel", job.id)
    if said is None or said.returncode:
        why = " ".join((said.stderr if said else "it does not answer").split())
        raise RunError(f"scancel {job.id} failed: {why}")


def wait_until(true: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether something comes true in that time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.3)
    return True
