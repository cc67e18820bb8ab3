"""Launcher detection: the rank, size and device of this process.

Launchers pass ranks to their processes in environment variables. `find_place` reads them; it is a pure function of a
mapping, so each case is a row in a test, most of them recorded from the real launcher.

Launchers nest: a Slurm step starts one torchrun agent or one MPI proxy per node, and those start the ranks. So they are
read from the outermost to the innermost, and the innermost one that sets a rank decides:

    srun < submitit < mpi (mpiexec, mpirun) < torchrun < fedmpi (train --ranks)

- An srun task is a process of a numbered step. A batch script and an salloc shell have SLURM_NTASKS too, but no step
  or one with a reserved number: a process started there without a launcher is alone.
- `srun --mpi=pmi2` sets PMI_RANK in addition to SLURM_PROCID. That is one launch, reported as "srun": torch's ranks can
  connect through the node list, and MPI works as well.
- RANK and WORLD_SIZE without torchrun's own TORCHELASTIC_RUN_ID were set by hand, or by submitit's export. They must
  agree with the other launchers' variables; without any, they count as torchrun.

A double launch (two launchers that both number the ranks) would train the same federation several times into one
folder, so it is an error. torchrun inside srun or mpiexec is one world if it has as many agents as there are outer
tasks, or a rendezvous id given by the user; mpiexec inside srun is one world if the step has one task per node, as
MPI's own proxies have.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from fedmpi import __version__
from fedmpi.errors import UserError

Env = Mapping[str, str]

# rank, size, local rank, local size
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPENMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
STORE = "FEDMPI_STORE"  # set for ranks of 'fedmpi train --ranks': the rendezvous file; empty on several nodes
SECRET = "FEDMPI_SECRET"  # seals the rendezvous of ranks on several nodes (comm/sealed.py)
SUBMITIT = ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID", "SUBMITIT_LOCAL_NTASKS")

HOST = r"(?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"  # in a node list: text and brackets of numbers
OWN_ID = r"none|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # TORCHELASTIC_RUN_ID if the user gave none
RESERVED_STEPS = 0xFFFFFFF0  # Slurm numbers its batch, interactive and extern steps from here
RECORDED = ["SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"]
RECORDED += ["SLURM_JOB_PARTITION", "SLURM_JOB_NODELIST", "TORCHELASTIC_RESTART_COUNT"]  # others may hold passwords


@dataclass(frozen=True)
class Place:
    """The rank of this process and its launcher."""

    launcher: str  # fedmpi, torchrun, mpi, srun, submitit or alone
    rank: int
    size: int
    local_rank: int  # among the ranks of this node
    local_size: int
    cores: int | None = None  # of this rank, if the launcher assigned them (srun --cpus-per-task)

    def same_rank(self, other: Place) -> bool:
        """Return whether another place is the same rank of a world of the same size."""
        return (self.rank, self.size) == (other.rank, other.size)


def find_place(environ: Env) -> Place:
    """Return the place of this process by the launchers' variables; raise a UserError if they contradict each other."""
    if STORE in environ and (place := _read(environ, "fedmpi", TORCH)) is not None:
        return place
    place = None
    for read in (_srun, _submitit, _mpi, _torchrun):  # outermost first
        place = read(environ, place)
    return place or Place("alone", 0, 1, 0, 1)


def rendezvous(place: Place, environ: Env) -> tuple[str, int] | None:
    """Return host and port for torch's rendezvous, or None if the launcher provides none (mpi, alone): MASTER_ADDR and
    MASTER_PORT if both are set, else the first node of srun's step and a port that differs between steps and restarts.
    """
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return environ["MASTER_ADDR"], _whole(environ, "MASTER_PORT", 1, 65535)
    if place.launcher == "torchrun" and place.size > 1:
        raise UserError("RANK is set but MASTER_ADDR and MASTER_PORT are not both: set them, or start with torchrun")
    if "SUBMITIT_LOCAL_JOB_ID" in environ and place.launcher == "submitit":
        return "127.0.0.1", 20000 + _whole(environ, "SUBMITIT_LOCAL_JOB_ID") % 10000
    if place.launcher not in ("srun", "submitit"):
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes or "SLURM_JOB_ID" not in environ:
        raise UserError(
            f"{place.launcher} set no SLURM_JOB_ID or no SLURM_STEP_NODELIST, so the ranks cannot find each other: "
            "export MASTER_ADDR and MASTER_PORT"
        )
    job = _whole(environ, "SLURM_JOB_ID")
    step = _whole(environ, "SLURM_STEP_ID", default=0)
    restart = _whole(environ, "SLURM_RESTART_COUNT", default=0)
    port = 20000 + (job + 101 * step + 1009 * restart) % 10000  # below Linux's ephemeral ports
    return expand_hosts(nodes)[0], port


def check_mpi_world(place: Place, rank: int, size: int) -> None:
    """Raise a UserError unless MPI's COMM_WORLD is the world that the launcher started; every rank must call it.
    Without its process manager MPI does not fail: each process becomes a world of one."""
    if (rank, size) == (place.rank, place.size):
        return
    if size == place.size:
        raise UserError(
            f"this is rank {place.rank} of {size} by {place.launcher} but rank {rank} by MPI: launched twice? "
            "start with either mpiexec or srun"
        )
    fixes = {
        "alone": f"start with srun or the mpiexec of MPICH or Open MPI, or export {', '.join(TORCH)} for each rank",
        "srun": "start with 'srun --mpi=pmi2' (MPICH) or 'srun --mpi=pmix' (Open MPI), or with mpiexec inside sbatch",
        "submitit": "pass slurm_srun_args=['--mpi=pmi2'] (MPICH) or ['--mpi=pmix'] (Open MPI), or use --comm torch",
        "torchrun": f"use --comm torch, or start with 'mpiexec -n {place.size} python -m mpi4py -m fedmpi ...'",
        "fedmpi": f"leave out --comm mpi, or start with 'mpiexec -n {place.size} python -m mpi4py -m fedmpi ...'",
        "mpi": "mpi4py loads another MPI library than this mpiexec belongs to; use the mpiexec of the library it loads",
    }
    harm = "each rank would train alone" if size == 1 else "the ranks would not be one federation"
    alone = place.launcher == "alone"
    started = "no known launcher set its variables" if alone else f"{place.launcher} started {place.size} ranks"
    raise UserError(f"{started} but MPI sees a world of {size}, so {harm}: {fixes[place.launcher]}")


def threads_per_rank(place: Place, given: int | None, cores: int) -> int:
    """Return the threads of this rank: as given, else the cores the launcher assigned, else a share of the node."""
    if given is not None:
        return given
    return max(1, cores // place.local_size if place.cores is None else min(place.cores, cores))


def available_cores() -> int:
    """Return the number of cores that this process may use: in a container or a Slurm job not all of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(
    place: Place,
    environ: Env,
    threads: int,
    device: str,
    folder: Path | str = ".",
    accelerator: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the record for environment.json: versions, machine, place, accelerator, job, commit of `folder`."""
    packages = "torchvision numpy mpi4py submitit safetensors transformers peft datasets".split()
    import torch  # here, as few commands that look for a place need it; its own version names the build

    versions = {"fedmpi": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return {
        "versions": versions | {p: _version(p) for p in packages},
        "platform": platform.platform(),
        "processor": _processor(),
        "hostname": socket.gethostname(),
        "cores": os.cpu_count(),
        "available_cores": available_cores(),
        **{name: value for name, value in asdict(place).items() if name != "cores"},
        "threads": threads,
        "device": device,
        **({"accelerator": accelerator} if accelerator else {}),
        "commit": commit(folder),
        "job": {name: environ[name] for name in RECORDED if name in environ},
    }


def commit(folder: Path | str) -> str | None:
    """Return the git commit of a folder, with the suffix "-dirty" if files differ; None if there is none."""
    command = ["git", "-C", str(folder), "--no-optional-locks", "describe", "--always", "--dirty"]
    command += ["--abbrev=40", "--exclude=*"]  # the hash itself, never a tag
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def job_names(environ: Env) -> dict[str, str | None]:
    """Return Slurm's names for the job of this process: `job` and, in a job array, `element`. A job is named by its id,
    but the one element whose id is that of the array by its index, as the array's id means all elements."""
    job, array = environ.get("SLURM_JOB_ID"), environ.get("SLURM_ARRAY_JOB_ID")
    if array is None:
        return {"job": job}
    element = f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return {"job": element if job == array else job, "element": element}


def expand_hosts(nodelist: str) -> list[str]:
    """Return the host names in a Slurm node list: "n[1-3,7],gpu08" gives n1, n2, n3, n7 and gpu08."""
    hosts: list[str] = []
    if re.fullmatch(f"{HOST}(,{HOST})*", nodelist):
        for item in re.findall(r"(?:\[[^]]*\]|[^,\[])+", nodelist):  # a comma inside brackets does not separate hosts
            tokens = re.findall(r"\[([^]]*)\]|([^\[]+)", item)
            choices = [_numbers(ranges) if ranges else [text] for ranges, text in tokens]
            hosts += ["".join(choice) for choice in itertools.product(*choices)]
    if not hosts:
        raise UserError(
            f"node list '{nodelist}' is not of the form n[1-3,7],m4: set MASTER_ADDR and MASTER_PORT instead"
        )
    return hosts


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Return the entry for one node in Slurm's short form: "2(x3),1" means 2, 2, 2, 1."""
    matches = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item) for item in tasks_per_node.split(",")]
    counts = [int(m.group(1)) for m in matches if m for _ in range(int(m.group(2) or 1))]
    if None in matches or node >= len(counts):
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE='{tasks_per_node}' is not of the form 2(x3),1 with an entry for "
            f"SLURM_NODEID={node}: restart with srun"
        )
    return counts[node]


def _srun(environ: Env, outer: Place | None) -> Place | None:
    """Return the place of an srun task; `outer` for anything else, such as a batch script or an salloc shell."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step is None:
        if environ.get("SLURM_PROCID", "0") == "0":  # a batch script is always 0, any other number is a task
            return outer
    elif not step.isdecimal() or int(step) >= RESERVED_STEPS:
        return outer
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    local_size = None
    if "SLURM_STEP_TASKS_PER_NODE" in environ and "SLURM_NODEID" in environ:
        local_size = tasks_on_node(environ["SLURM_STEP_TASKS_PER_NODE"], _whole(environ, "SLURM_NODEID"))
    place = _read(environ, "srun", ("SLURM_PROCID", size_name, "SLURM_LOCALID", ""), local_size)
    if place is None:
        return outer
    tasks = environ.get("SLURM_NTASKS", str(place.size))
    if place.size > 1 and tasks != str(place.size):
        raise UserError(
            f"SLURM_STEP_NUM_TASKS={place.size} but SLURM_NTASKS={tasks}: this job was submitted from another job's "
            "step and inherited its variables; start with srun, or unset SLURM_STEP_ID"
        )
    if "SLURM_CPUS_PER_TASK" in environ:
        place = replace(place, cores=_whole(environ, "SLURM_CPUS_PER_TASK", 1))
    return place


def _submitit(environ: Env, outer: Place | None) -> Place | None:
    """Return the place of a submitit task: srun's under its Slurm executor, its own under the local one."""
    executor = environ.get("SUBMITIT_EXECUTOR")
    if executor == "slurm" and outer is not None:
        return replace(outer, launcher="submitit")
    if executor != "local" or SUBMITIT[0] not in environ:  # submitit's controller has no rank
        return outer
    inner = _read(environ, "submitit", SUBMITIT)
    if outer is None or inner is None or outer.size == 1 or inner.same_rank(outer):
        return inner or outer
    raise _twice(environ, inner, outer, "submit from one process, not from every task")


def _mpi(environ: Env, outer: Place | None) -> Place | None:
    """Return the place of a rank of mpiexec or mpirun; `outer` if srun itself set MPI's variables."""
    inner = _read(environ, "mpi", OPENMPI) or _read(environ, "mpi", PMI)
    if inner is None:
        if "PMIX_RANK" in environ and outer is None:
            raise UserError("PMIX_RANK is set but no variable has the size: start with mpirun or 'srun --mpi=pmix'")
        return outer
    if outer is None or outer.size == 1:
        return inner
    if inner.same_rank(outer):
        by_srun = OPENMPI[0] not in environ and PMI[2] not in environ  # mpiexec sets local ranks, srun does not
        return outer if by_srun else inner
    if outer.local_size == 1:
        return inner
    raise _twice(environ, inner, outer, "start mpiexec in the batch script itself, not through srun")


def _torchrun(environ: Env, outer: Place | None) -> Place | None:
    """Return the place of a rank of torchrun; `outer` if RANK and WORLD_SIZE only repeat it."""
    elastic = "TORCHELASTIC_RUN_ID" in environ
    if outer and not elastic and "RANK" not in environ and environ.get("WORLD_SIZE") == str(outer.size):
        return outer  # many batch scripts export WORLD_SIZE and MASTER_ADDR, and srun sets the rank
    inner = _read(environ, "torchrun", TORCH)
    if inner is None:
        return outer
    if elastic:
        # An elastic job that lost a node has fewer agents than tasks, but a rendezvous id given by the user.
        agents = _whole(environ, "GROUP_WORLD_SIZE", default=inner.size // inner.local_size)
        if outer is None or agents >= outer.size or not re.fullmatch(OWN_ID, environ["TORCHELASTIC_RUN_ID"]):
            return inner
        fix = "use one of the two launchers, or give torchrun --nnodes and one --rdzv-id and --rdzv-endpoint for all"
        tasks = f"{outer.launcher} started {outer.size} tasks, each with its own torchrun"
        raise _twice(environ, inner, outer, f"{tasks}; {fix}")
    if outer is None:
        procid = environ.get("SLURM_PROCID", str(inner.rank))
        if environ.get("SLURM_NTASKS") == str(inner.size) and procid != str(inner.rank):  # of a batch script
            batch = Place("srun", _whole(environ, "SLURM_PROCID"), inner.size, 0, 1)
            raise _twice(environ, inner, batch, "unset one: RANK and WORLD_SIZE, or SLURM_PROCID")
        return inner
    if inner.same_rank(outer):
        return outer
    if outer.size == 1:
        return inner
    raise _twice(environ, inner, outer, f"unset RANK and WORLD_SIZE to use the ranks of {outer.launcher}")


def _read(environ: Env, launcher: str, names: tuple[str, str, str, str], local_size: int | None = None) -> Place | None:
    """Return the place in one launcher's four variables; None if it set neither rank nor size. Without local ranks, all
    ranks are assumed to be on this node: at worst too few threads, never too many."""
    rank_name, size_name, local_rank_name, local_size_name = names
    if rank_name not in environ and size_name not in environ:
        return None
    for name, other in ((rank_name, size_name), (size_name, rank_name)):
        if name not in environ:
            raise UserError(f"{other}={environ[other]} is set but {name} is not: set both, or unset {other}")
    size = _whole(environ, size_name, 1)
    rank = _whole(environ, rank_name, 0, size - 1)
    if local_size is None:
        local_size = _whole(environ, local_size_name, 1, size, default=size)
    local_rank = _whole(environ, local_rank_name, 0, local_size - 1, default=rank % local_size)
    return Place(launcher, rank, size, local_rank, local_size)


def _whole(environ: Env, name: str, low: int = 0, high: int | None = None, default: int | None = None) -> int:
    """Return a variable as an integer within its bounds; the default if the variable is not set."""
    if default is not None and name not in environ:
        return default
    text = environ[name]
    number = int(text) if text.isdecimal() else -1
    if number < low or (high is not None and number > high):
        valid = f"from {low} to {high}" if high is not None else f"from {low} up"
        raise UserError(f"{name}='{text}' but it must be a whole number {valid}: correct it, or unset it")
    return number


def _twice(environ: Env, inner: Place, outer: Place, fix: str) -> UserError:
    """Return the error for two launchers that both number this process."""
    mpi = OPENMPI[0] if OPENMPI[0] in environ else PMI[0]
    names = {"torchrun": "RANK", "mpi": mpi, "srun": "SLURM_PROCID", "submitit": SUBMITIT[0]}
    if "SLURM_PROCID" in environ and outer.launcher == "submitit":
        names["submitit"] = "SLURM_PROCID"
    two = f"{names[inner.launcher]}={inner.rank} ({inner.launcher}) but {names[outer.launcher]}={outer.rank}"
    return UserError(f"{two}: launched twice? {fix}")


def _numbers(ranges: str) -> list[str]:
    """Return the numbers in "1-3,7", each as wide as the first of its range: "08-10" gives 08, 09, 10."""
    numbers: list[str] = []
    for item in ranges.split(","):
        low, _, high = item.partition("-")
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return numbers


def _version(package: str) -> str | None:
    """Return the version of an installed package without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the name of the processor: results are reproducible to the bit on equal processors only."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else platform.processor() or platform.machine()
