"""The command `fedmpi doctor`: what is here, whether the ranks reach each other, and what to do about what is not well.

Started like a training run, by the same launcher, on the same nodes. Every rank looks at itself, the first rank of each
node also at the node; then the ranks connect as a run would, try every verb on numbers that are known beforehand, and
tell rank 0 what they have found. Only rank 0 prints, unless it is the one that is missing.

It must not hang where a run would. Verbs have a timeout, but MPI's start has none and lets no other thread of Python
run. So a small process of its own holds what is known so far and prints it when the time of a step is up, and a timer
in C ends this one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .. import __version__
from ..comm import Comm, connect, pick, share_node, tell_all
from ..comm.env import Env, Place, available_cores, choose_device, describe, find_place, rendezvous, threads_per_rank
from ..comm.leftovers import leftovers
from ..comm.torch import backends
from ..data import DATASETS
from ..data.store import cache_folder, data_root
from ..errors import RunError, UserError, one_line
from ..plugins.knobs import check_bounds, knob
from ..plugins.torchvision import torchvision_build, torchvision_trouble
from ..runs.log import set_up
from ..runs.options import filled, make_parser
from ..runs.text import amount
from .data import state_of

ABOUT = """What is here (torch, torchvision, devices, MPI, Slurm, submitit, data, disk, memory, threads), and whether
the ranks reach each other. Start it as you would start 'fedmpi train': alone, or by torchrun, mpiexec, srun or
submitit. A line for each check: ok, warn, FAIL, or -- for what is not here and not needed, and beneath it a cure. Exit
code: 0 where nothing FAILs, 1 where something does."""

OK, ABSENT, WARN, FAIL = "ok", "--", "warn", "FAIL"
MB, GB = 1e6, 1e9
GRACE = 10.0  # seconds a step may take beyond --timeout: the survivors' roll call
LOOKING = 60.0  # seconds more for looking around, which starts processes of its own and waits for no other rank
LATER = 3.0  # seconds that other ranks leave to rank 0 and to the launcher, before they speak for themselves
LEAST_DISK, LEAST_MEMORY, LEAST_SHARED = 1 * GB, 1 * GB, 256 * MB  # below which there is a warning
LEAST_FILES = 1024
SUMMED = 1 << 20  # elements of float32 in the sum that is timed: 4 MB
SLURM = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
UNWELL = r"down|drain|fail|unk|error|no_respond|\*$|maint|inval"  # in the state of a node


@dataclass(frozen=True)
class Wish:
    """What the doctor is asked for: options of `train` by the same names, as far as they matter here."""

    comm: str = "auto"
    """transport: torch (gloo, nccl), mpi, or auto by the launcher"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    threads: int | None = knob(None, low=1, high=256)
    """threads a rank; null: the node's cores shared by its ranks"""
    timeout: float = knob(60.0, low=0, open_low=True, high=1e6)
    """seconds after which a rank that does not answer is told as missing"""
    data_root: str | None = None
    """folder of the data sets; null: $FEDMPI_DATA, else the user's cache"""
    out: str = "runs"
    """run folder, or the folder of run folders, whose disk is looked at"""


@dataclass(frozen=True)
class Asked(Wish):
    """The same, and how to print."""

    json: bool = False


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str
    check: str
    text: str
    cure: str = ""


def main(arguments: list[str]) -> int:
    """`fedmpi doctor`: on every rank of whatever launched it; returns the exit code."""
    try:
        place = find_place(os.environ)
    except UserError as error:  # nobody's rank is known, so every process says it
        show([(failure("launcher", error), [])], parse(arguments).json)
        return 1
    set_up(place.rank, place.size)
    try:
        asked = parse(arguments)
    except UserError as error:
        if not place.rank:
            raise
        time.sleep(5)  # nearly always the same on every rank: rank 0's word is enough, and ends the others
        raise UserError(f"rank {place.rank}: {error}") from None
    with Watch(place, asked) as watch:
        return examine(place, asked, watch)


def parse(arguments: list[str]) -> Asked:
    """What the doctor is asked for."""
    parser = make_parser("fedmpi doctor", ABOUT, Wish)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    asked = filled(parser, Asked, lambda: parser.parse_args(arguments))
    check_bounds(asked, prefix="")
    anywhere = Place("alone", 0, 1, 0, 1)
    pick(asked.comm, anywhere)
    choose_device(anywhere, asked.device, cuda_devices=sys.maxsize)
    return asked


def examine(place: Place, asked: Asked, watch: Watch) -> int:
    """Look, connect, try; print on rank 0; the exit code."""
    watch.step("looking", [], more=LOOKING)
    findings = [finding for check in CHECKS for finding in looked(check, place, asked)]
    hopeless = any(finding.level == FAIL and finding.check in NEEDED for finding in findings)
    comm, told = None, [findings]
    try:
        if not hopeless:
            watch.step("ranks", findings)
            device = torch.device(choose_device(place, asked.device, torch.cuda.device_count()))
            started = time.monotonic()
            comm = connect(asked.comm, place, device, asked.timeout, os.environ)
            watch.step("ranks", findings)
            findings += tried(comm, place, device, time.monotonic() - started)
            findings += network(place, os.environ, met=True)
            told = [read(text) for text in tell_all(comm, written(findings))]
            comm.barrier()
    except (UserError, RunError) as error:
        findings.append(failure("ranks", error))
    alone = len(told) < place.size  # with what it knows
    if alone:
        findings += network(place, os.environ, met=False)
    lines = merged(told, place.rank if alone else 0)
    watch.step("leaving", [])
    if place.rank == 0:
        show(lines, asked.json)
    elif alone:
        time.sleep(LATER)
        sys.stderr.write(rendered([(f, [place.rank]) for f in findings if f.level == FAIL], as_json=False))
        sys.stderr.flush()
    if comm is not None:
        if alone:
            comm.abort(1)
        comm.close()
    return 1 if any(finding.level == FAIL for finding, _ in lines) else 0


def failure(check: str, error: UserError | RunError) -> Finding:
    """The finding that an error tells, its advice as the cure."""
    text, mark, cure = str(error).rpartition("; ")
    if not mark:
        text, mark, cure = str(error).rpartition(": ")
    if mark and isinstance(error, UserError):
        return Finding(FAIL, check, text, cure)
    cure = "see that every rank was started, that the nodes reach each other by name and no firewall is between them"
    return Finding(FAIL, check, str(error), cure)


# What a process and its node have


def looked(check: Callable[[Place, Asked], Iterator[Finding]], place: Place, asked: Asked) -> list[Finding]:
    """What a check finds; where it cannot even look, why."""
    name = check.__name__.strip("_").replace("_", " ")
    try:
        return list(check(place, asked))
    except UserError as error:
        return [failure(name, error)]
    except OSError as error:
        return [Finding(FAIL, name, f"{error.filename}: {error.strerror}", "see to that")]


def launcher(place: Place, asked: Asked) -> Iterator[Finding]:
    """Who started this, and the transport that follows."""
    how = pick(asked.comm, place)
    ranks = f"rank {place.rank} of {place.size}, {place.local_size} on this node" if place.size > 1 else "one rank"
    yield Finding(OK, "launcher", f"{place.launcher}: {ranks}; transport {how}")


def python(place: Place, asked: Asked) -> Iterator[Finding]:
    """Versions."""
    if place.local_rank == 0:
        yield Finding(OK, "python", f"{platform.python_version()}, fedmpi {__version__}, {platform.platform()}")


def torch_(place: Place, asked: Asked) -> Iterator[Finding]:
    """torch, and what it was built for."""
    if place.local_rank:
        return
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    there = backends()
    yield Finding(OK, "torch", f"{torch.__version__}, {built}, backends {', '.join(there) or 'none'}")
    if "gloo" not in there:
        needed = pick(asked.comm, place) == "torch"
        yield Finding(FAIL if needed else WARN, "torch", "this torch cannot connect ranks", "install one with gloo")


def torchvision(place: Place, asked: Asked) -> Iterator[Finding]:
    """Whether torchvision fits torch: a mismatch shows when it is imported, first of all in a user's own script."""
    if place.local_rank:
        return
    trouble = torchvision_trouble(outside())
    if trouble is None:
        yield Finding(OK, "torchvision", f"{torchvision_build()}, fits torch {torch.__version__}")
    else:
        yield Finding(WARN, "torchvision", *trouble)


def devices(place: Place, asked: Asked) -> Iterator[Finding]:
    """The device of this rank."""
    seen = torch.cuda.device_count()
    chosen = choose_device(place, asked.device, seen)
    names = ", ".join(dict.fromkeys(torch.cuda.get_device_name(k) for k in range(seen)))
    here = f"{count(seen, 'CUDA device')}, {names}" if seen else "no CUDA device"
    if chosen == "cpu":
        cure = "install a torch for CUDA" if not torch.version.cuda else "see nvidia-smi and CUDA_VISIBLE_DEVICES"
        idle = not seen and Path("/dev/nvidiactl").exists()
        yield Finding(WARN if idle else OK, "devices", f"cpu ({here})", cure if idle else "")
    elif place.local_size > seen > 1:
        cure = "start as many ranks a node as it has devices: NCCL refuses two ranks on one"
        yield Finding(WARN, "devices", f"{place.local_size} ranks of this node share {here}", cure)
    else:
        yield Finding(OK, "devices", f"{chosen} of {here}")


def threads(place: Place, asked: Asked) -> Iterator[Finding]:
    """Cores, and threads a rank."""
    cores = available_cores()
    each = threads_per_rank(place, asked.threads, cores)
    torch.set_num_threads(each)
    text = f"{count(cores, 'core')} for {count(place.local_size, 'rank')} of this node, {count(each, 'thread')} each"
    omp = os.environ.get("OMP_NUM_THREADS")
    by_torchrun = omp == "1" and "TORCHELASTIC_RUN_ID" in os.environ  # its own default, that nobody meant
    if place.cores is None and each * place.local_size > cores:
        cure = f"start at most {cores} ranks a node, or ask for more cores"
        yield Finding(WARN, "threads", f"{text}: they get in each other's way", cure)
    elif omp is not None and omp != str(each) and not by_torchrun:
        cure = f"give 'fedmpi train --threads {omp}', or unset OMP_NUM_THREADS" if omp.isdecimal() else "unset it"
        yield Finding(WARN, "threads", f"{text}, but OMP_NUM_THREADS={omp}, which a run does not go by", cure)
    else:
        yield Finding(OK, "threads", text)


def mpi(place: Place, asked: Asked) -> Iterator[Finding]:
    """The MPI library that mpi4py loads: asked in a process of its own, as starting MPI may abort."""
    needed = pick(asked.comm, place) == "mpi" or (place.launcher == "mpi" and place.size > 1)
    if place.local_rank and not needed:
        return
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = ask([sys.executable, "-c", code], 30)
    first = next(iter(done.stdout.split("\n")), "").strip("\0 ")
    if done.returncode or not first:
        why = last_line(done.stderr) or f"exit code {done.returncode}"
        cure = "pip install mpi4py mpich, or load your cluster's MPI module; or use --comm torch"
        yield Finding(FAIL if needed else ABSENT, "mpi", f"not usable: {why}", cure)
        return
    text = f"{' '.join(first.replace('Version:', '').split())}, mpi4py {metadata.version('mpi4py')}"
    managed = any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"))
    if place.size > 1 and not managed and not needed:
        text += f"; not for this launch, where {place.launcher} gives MPI no process manager"
        cures = {"srun": "for --comm mpi start with 'srun --mpi=pmi2' (MPICH) or 'srun --mpi=pmix' (Open MPI)"}
        cures["submitit"] = "for --comm mpi pass slurm_srun_args=['--mpi=pmi2'] (MPICH) or ['--mpi=pmix'] (Open MPI)"
        yield Finding(ABSENT, "mpi", text, cures.get(place.launcher, "for --comm mpi start with mpiexec"))
    else:
        yield Finding(OK, "mpi", text)


def slurm(place: Place, asked: Asked) -> Iterator[Finding]:
    """Slurm's commands, and the states that its controller tells."""
    if place.local_rank:
        return
    absent = [name for name in SLURM if shutil.which(name) is None]
    if len(absent) == len(SLURM):
        yield Finding(ABSENT, "slurm", "no commands of Slurm here", "none is needed, unless you use 'fedmpi submit'")
        return
    if absent:
        yield Finding(WARN, "slurm", f"{', '.join(absent)} not found", "add Slurm's folder of commands to PATH")
    if "sinfo" in absent:
        return
    done = ask(["sinfo", "--noheader", "--format=%P|%a|%D|%T"], min(20.0, asked.timeout))
    if done.returncode:
        why = last_line(done.stderr) or "no answer"
        cure = "see SLURM_CONF, 'scontrol ping', and that munged runs; without them 'fedmpi submit' cannot work"
        yield Finding(WARN, "slurm", f"commands found, but the controller does not answer ({why})", cure)
        return
    version = " ".join(ask(["sinfo", "--version"], 10).stdout.split())
    rows = [line.split("|") for line in done.stdout.split()]
    states = ", ".join(f"{name} {up}: {count} {state}" for name, up, count, state in rows) or "no partitions"
    bad = [row for row in rows if row[1] != "up" or re.search(UNWELL, row[3].lower())]
    cure = "'sinfo -R' and 'scontrol show node NAME' tell why" if bad or not rows else ""
    yield Finding(WARN if cure else OK, "slurm", f"{version}; {states}", cure)


def submitit(place: Place, asked: Asked) -> Iterator[Finding]:
    """Whether `fedmpi submit` has what it needs."""
    if place.local_rank:
        return
    try:
        yield Finding(OK, "submitit", metadata.version("submitit"))
    except metadata.PackageNotFoundError:
        yield Finding(WARN, "submitit", "not installed", "pip install submitit, for 'fedmpi submit'")


def data(place: Place, asked: Asked) -> Iterator[Finding]:
    """Which data sets are here; nothing is read."""
    if place.local_rank:
        return
    folder = Path(asked.data_root).expanduser() if asked.data_root else None
    base = data_root(folder)
    states = {name: state_of(row.source(folder), base, verify=False).words for name, row in DATASETS.items()}
    here = [name for name, words in states.items() if words not in ("missing", "can be downloaded")]
    named = asked.data_root or os.environ.get("FEDMPI_DATA")
    if named and not base.is_dir():
        yield Finding(WARN, "data", f"{base} is not there", "make it; 'fedmpi data list' tells what belongs into it")
    else:
        others = "; 'fedmpi data list' tells of the others" if len(here) < len(states) else ""
        yield Finding(OK, "data", f"{len(here)} of {len(states)} here ({', '.join(here)}) in {base}{others}")


def disk(place: Place, asked: Asked) -> Iterator[Finding]:
    """Room, and leave to write, where a run writes."""
    if place.local_rank:
        return
    places = {"run folder": Path(asked.out).expanduser(), "cache": cache_folder()}
    for name, wanted in places.items():
        folder = next(p for p in (wanted.absolute(), *wanted.absolute().parents) if p.exists())
        free = shutil.disk_usage(folder).free
        text = f"{name} {wanted}: {amount(free)} free"
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            cure = "name another with --out" if name == "run folder" else "set FEDMPI_CACHE to another"
            yield Finding(FAIL if name == "run folder" else WARN, "disk", f"{text}, and not writable", cure)
        elif free < LEAST_DISK:
            yield Finding(WARN, "disk", text, "make room: a run that meets a full disk ends")
        else:
            yield Finding(OK, "disk", text)


def shared_memory(place: Place, asked: Asked) -> Iterator[Finding]:
    """The memory file system that ranks of a node share."""
    if place.local_rank:
        return
    shm = Path("/dev/shm")
    used = place.local_size > 1
    cure = "enlarge it (a container: --shm-size=2g); until then the ranks of a node send to each other, which is slower"
    if not os.access(shm, os.W_OK):
        yield Finding(WARN if used else ABSENT, "shared memory", f"{shm} cannot be written", cure)
        return
    free = shutil.disk_usage(shm).free
    small = used and free < LEAST_SHARED
    yield Finding(WARN if small else OK, "shared memory", f"{shm}: {amount(free)} free", cure if small else "")
    if left := leftovers():
        names = ", ".join(path.name for path in left)
        yield Finding(OK, "shared memory", f"left by killed runs: {names}; the next run on several ranks removes them")


def rendezvous_store(place: Place, asked: Asked) -> Iterator[Finding]:
    """Where torchrun's agent listens: what others write there it unpickles."""
    if place.launcher != "torchrun" or place.local_rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    meeting = rendezvous(place, os.environ)
    if meeting is not None and open_to_others(meeting[1]):
        text = f"torchrun's agent listens on all interfaces (port {meeting[1]}) and, unless --rdzv-backend is static, "
        text += "unpickles what it finds there: whoever reaches that port can run commands as you"
        cure = "start with 'fedmpi train --ranks N' instead, at least on a machine that others use too"
        yield Finding(WARN, "torchrun", text, cure)


def open_to_others(port: int) -> bool:
    """Return whether a process of this machine listens at a port for others than this machine."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                address, number = local.split(":")
                inside = address in ("0100007F", "00000000000000000000000001000000")
                if state == "0A" and int(number, 16) == port and not inside:
                    return True
    return False


def memory(place: Place, asked: Asked) -> Iterator[Finding]:
    """Memory that is left for the ranks of this node."""
    if place.local_rank:
        return
    free = free_memory()
    if free is None:
        return
    each = free / place.local_size
    text = f"{amount(free)} free" + (f", {amount(each)} a rank" if place.local_size > 1 else "")
    low = each < LEAST_MEMORY
    yield Finding(WARN if low else OK, "memory", text, "ask for more, or start fewer ranks a node" if low else "")


def files(place: Place, asked: Asked) -> Iterator[Finding]:
    """How many files a process may have open: every other rank is a connection or two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LEAST_FILES + 4 * place.size
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = "" if hard == resource.RLIM_INFINITY else f" (at most {hard})"
        yield Finding(WARN, "files", f"at most {soft} open files", f"'ulimit -n {wanted}' before the start{most}")
    else:
        yield Finding(OK, "files", f"at most {soft} open files" if soft != resource.RLIM_INFINITY else "no limit")


def meeting(place: Place, asked: Asked) -> Iterator[Finding]:
    """Where torch's ranks are to meet: a name that does not resolve would be tried until the time is up."""
    if pick(asked.comm, place) != "torch":
        return
    where = rendezvous(place, os.environ)
    if where is None:
        return
    if resolve(where[0]):
        yield Finding(OK, "meeting", f"{where[0]}:{where[1]}")
    else:
        cure = "set MASTER_ADDR to a name or address of the first node that every node can look up"
        yield Finding(FAIL, "meeting", f"the ranks are to meet at {where[0]}, which does not resolve", cure)


CHECKS: tuple[Callable[[Place, Asked], Iterator[Finding]], ...] = (
    *(python, torch_, torchvision, devices, threads, mpi, slurm, submitit, data, disk, shared_memory, memory, files),
    *(launcher, meeting, rendezvous_store),
)
NEEDED = ("devices", "mpi", "torch", "meeting", "launcher")  # without which there is no use in trying to connect


def network(place: Place, environ: Env, met: bool) -> list[Finding]:
    """What is odd about this host's name and interfaces; where the ranks have `met` all the same, less of it counts."""
    if place.local_rank:
        return []
    name, wanted, interfaces = socket.gethostname(), environ.get("GLOO_SOCKET_IFNAME", ""), Path("/sys/class/net")
    addresses, cut_off = resolve(name), place.local_size < place.size and not met
    names = "'ip addr' lists them"
    if interfaces.is_dir() and any(word and not (interfaces / word).exists() for word in wanted.split(",")):
        cure = f"name one of {', '.join(sorted(os.listdir(interfaces)))}, or unset it"
        return [Finding(WARN if met else FAIL, "network", f"GLOO_SOCKET_IFNAME={wanted}: no such interface", cure)]
    if cut_off and wanted in ("lo", "lo0"):
        cure = f"unset it, or name an interface that the other nodes reach ({names})"
        return [Finding(FAIL, "network", f"GLOO_SOCKET_IFNAME={wanted} does not reach other nodes", cure)]
    if not addresses:
        cure = "add it to /etc/hosts or the name service; or set GLOO_SOCKET_IFNAME, and MASTER_ADDR to an address"
        return [Finding(WARN, "network", f"host name {name} does not resolve", cure)]
    if cut_off and not wanted and all(address.startswith("127.") or address == "::1" for address in addresses):
        cure = f"set GLOO_SOCKET_IFNAME to an interface that the other nodes reach ({names})"
        return [Finding(WARN, "network", f"host name {name} is {addresses[0]}, which only this node reaches", cure)]
    return [Finding(OK, "network", f"{name} is {addresses[0]}")]


def resolve(host: str) -> list[str]:
    """The addresses of a host name; none where it has none."""
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError):
        return []


def free_memory() -> float | None:
    """Bytes that processes of this node, or of this job, may still take; None where the system does not tell."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match is None:
        return None
    free = float(match.group(1)) * 1024
    for used, limit in cgroup_numbers():
        free = min(free, limit - used)
    return max(free, 0.0)


def cgroup_numbers() -> Iterator[tuple[float, float]]:
    """Memory in use and allowed, of the control group of this process and of those around it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            base, names = Path("/sys/fs/cgroup"), ("memory.current", "memory.max")
        elif kinds == "memory":
            base, names = Path("/sys/fs/cgroup/memory"), ("memory.usage_in_bytes", "memory.limit_in_bytes")
        else:
            continue
        group = Path(path.lstrip("/"))
        for part in (group, *group.parents):
            try:
                used, limit = ((base / part / name).read_text().strip() for name in names)
            except OSError:
                continue
            if limit.isdecimal():
                yield float(used), float(limit)


def outside() -> dict[str, str]:
    """The environment without the variables that would make a process a rank."""
    launch = ("PMI", "MPI_", "OMPI_", "SLURM_STEP", "SLURM_PROCID")
    return {name: value for name, value in os.environ.items() if not name.startswith(launch)}


def ask(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """What a command says, without the variables that would make it a rank; exit code 124 where it takes too long."""
    try:
        done = subprocess.run(command, env=outside(), stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {seconds:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error.strerror))
    words = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(command, done.returncode, *words)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


# Whether the ranks reach each other


def tried(comm: Comm, place: Place, device: torch.device, seconds: float) -> list[Finding]:
    """Every verb with numbers that are known beforehand: sent, then through the memory of a node. Collective."""
    if comm.size == 1:
        return [Finding(OK, "ranks", "one rank alone: no other to reach")]
    cure = "this transport garbles numbers: use another (--comm), and tell those who maintain it"
    wrong = wrong_verbs(comm)
    took = statistics.median(timed_sum(comm) for _ in range(5))
    text = f"{comm.size} ranks met over {comm.name} in {seconds:.1f} s; a sum of 4 MB takes {1000 * took:.1f} ms"
    found = [
        Finding(FAIL, "ranks", f"wrong results: {', '.join(wrong)}", cure) if wrong else Finding(OK, "ranks", text)
    ]
    found += alike(comm, place, device)
    if device.type != "cpu":
        return found
    share_node(comm)
    wrong = wrong_verbs(comm)
    if wrong:
        found.append(Finding(FAIL, "ranks", f"wrong results through shared memory: {', '.join(wrong)}", cure))
    elif comm.node is not None and comm.node.refused:
        cure = "see /dev/shm (its size, its rights), and that the ranks of a node are in one container"
        found.append(Finding(WARN, "ranks", "a node's ranks cannot share memory: they send, which is slower", cure))
    elif comm.node is not None and len(comm.node.ranks) > 1:
        found.append(Finding(OK, "ranks", "the ranks of a node share memory"))
    return found


def wrong_verbs(comm: Comm) -> list[str]:
    """The verbs that gave another result than they must, on this rank. Collective."""
    me, size, length = comm.rank, comm.size, 1000
    right: dict[str, bool] = {}
    counts = torch.arange(length) * 2**40 + me
    comm.sum(counts)
    right["sum"] = torch.equal(counts, torch.arange(length) * 2**40 * size + size * (size - 1) // 2)
    rows = comm.rows(length, torch.int64)
    for rank in range(size):
        rows.mine[rank].fill_(2**40 * me + rank)
    comm.exchange(rows)
    right["exchange"] = all(bool((rows.theirs[rank] == 2**40 * rank + me).all()) for rank in range(size))
    comm.barrier()
    whole = comm.vector(length)
    whole.view(size, -1)[me].fill_(me + 1)
    comm.gather(whole)
    right["gather"] = torch.equal(whole, torch.arange(1.0, size + 1).repeat_interleave(length))
    comm.barrier()
    word = torch.full((length,), float(me))
    comm.broadcast(word, root=size - 1)
    right["broadcast"] = bool((word == size - 1).all())
    return [verb for verb, good in right.items() if not good]


def timed_sum(comm: Comm) -> float:
    """Seconds for one sum of 4 MB. Collective."""
    x = torch.ones(SUMMED)
    comm.barrier()
    started = time.perf_counter()
    comm.sum(x)
    return time.perf_counter() - started


def alike(comm: Comm, place: Place, device: torch.device) -> list[Finding]:
    """What this rank has in another version than rank 0: its bits may differ. Collective."""
    about: dict[str, Any] = describe(place, os.environ, torch.get_num_threads(), str(device))
    mine = {"processor": about["processor"], "threads": about["threads"]} | about["versions"]
    first = json.loads(tell_all(comm, json.dumps(mine))[0])
    other = [f"{name} {mine[name]} where rank 0 has {first[name]}" for name in mine if mine[name] != first[name]]
    if not other:
        return []
    cure = "start every rank in the same environment, and where equal bits matter on equal processors and threads"
    return [Finding(FAIL if mine["fedmpi"] != first["fedmpi"] else WARN, "ranks", "; ".join(other), cure)]


# The report


def written(findings: list[Finding]) -> str:
    return json.dumps([[f.level, f.check, f.text, f.cure] for f in findings])


def read(text: str) -> list[Finding]:
    return [Finding(*row) for row in json.loads(text)]


def merged(told: list[list[Finding]], first: int = 0) -> list[tuple[Finding, list[int]]]:
    """The lines of the report, with the ranks that each is about where it is not all that looked. Of what is well, the
    first rank's word stands for all. `first` is the number of the first rank in `told`."""
    ranks: dict[Finding, list[int]] = {}
    looked: dict[str, set[int]] = {}
    for rank, findings in enumerate(told, first):
        for finding in findings:
            looked.setdefault(finding.check, set()).add(rank)
            if rank == first or finding.level in (WARN, FAIL):
                ranks.setdefault(finding, []).append(rank)
    order = list(looked)
    lines = sorted(ranks.items(), key=lambda line: order.index(line[0].check))
    return [(f, who if f.level in (WARN, FAIL) and len(who) < len(looked[f.check]) else []) for f, who in lines]


def rendered(lines: list[tuple[Finding, list[int]]], as_json: bool) -> str:
    """The report as text."""
    out = []
    for finding, who in lines:
        if as_json:
            record: dict[str, Any] = {"level": finding.level, "check": finding.check, "finding": finding.text}
            out.append(json.dumps(record | {"cure": finding.cure or None, "ranks": who or None}))
            continue
        about = f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: " if who else ""
        out.append(f"{finding.level:<4}  {finding.check:<13}  {about}{one_line(finding.text)}")
        if finding.cure:
            out.append(f"{'':21}cure: {one_line(finding.cure)}")
    return "\n".join(out) + "\n"


def show(lines: list[tuple[Finding, list[int]]], as_json: bool) -> None:
    sys.stdout.write(rendered(lines, as_json))
    sys.stdout.flush()


WATCHER = """
import json, os, select
limit, text, rest = None, "", b""
while True:
    ready, _, _ = select.select([0], [], [], limit)
    if not ready:
        os.write(1, text.encode())
        break
    more = os.read(0, 1 << 16)
    if not more:
        break
    *lines, rest = (rest + more).split(b"\\n")
    for line in lines:
        limit, text = json.loads(line)
"""


class Watch:
    """Ends this process by exit code 1 when a step takes longer than it may, with what was found until then.

    What it prints is handed beforehand to a process that only waits: MPI's start stops every thread of this one. That
    process leaves when this one does, however it does.
    """

    def __init__(self, place: Place, asked: Asked) -> None:
        self.place, self.asked, self.limit = place, asked, asked.timeout + GRACE
        out = None if place.rank == 0 else 2
        self.watcher = subprocess.Popen([sys.executable, "-I", "-S", "-c", WATCHER], stdin=subprocess.PIPE, stdout=out)
        self.nowhere = open(os.devnull, "w")

    def step(self, what: str, findings: list[Finding], more: float = 0.0) -> None:
        """Begin a step, with what is known until here; it may take `more` seconds than others."""
        rank, size, limit = self.place.rank, self.place.size, self.limit + more
        cure = "see that every rank was started, and that the nodes and their file systems answer"
        late = Finding(FAIL, what, f"rank {rank} of {size} has waited for {limit:g} s in vain", cure)
        text = rendered([(f, []) for f in [*findings * (rank == 0), late]], self.asked.json and rank == 0)
        assert self.watcher.stdin is not None
        self.watcher.stdin.write(json.dumps([limit, text]).encode() + b"\n")
        self.watcher.stdin.flush()
        faulthandler.dump_traceback_later(limit + 1, exit=True, file=self.nowhere)

    def over(self) -> None:
        """Nothing that may hang is left."""
        faulthandler.cancel_dump_traceback_later()
        if self.watcher.stdin is not None and not self.watcher.stdin.closed:
            self.watcher.stdin.close()
        self.watcher.wait()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over()
        self.nowhere.close()
