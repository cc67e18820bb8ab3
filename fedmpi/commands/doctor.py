"""`fedmpi doctor`: check this machine and the connection between ranks, and say how to fix what is wrong.

Start it like a training run, with the same launcher on the same nodes. Every rank checks itself, the first rank of
each node also its node. Then the ranks connect as a run would, try every collective on known numbers, and send their
findings to rank 0. Rank 0 prints its own findings at once, so that they are seen even if connecting hangs; a timer in C
ends the process then, because MPI's start has no timeout and blocks every thread of Python.
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
from dataclasses import astuple, dataclass
from importlib import metadata
from pathlib import Path
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
from ..plugins.knobs import knob
from ..plugins.torchvision import torchvision_build, torchvision_trouble
from ..runs.log import set_up
from ..runs.options import flag, read_options
from ..runs.text import amount, plural
from .data import state_of

ABOUT = """Check this machine (torch, devices, threads, MPI, Slurm, data, disk, shared memory) and the connection
between ranks. Start it as you would start 'fedmpi train': alone, or with torchrun, mpiexec, srun or submitit."""
NOTES = """One line per check: ok, warn, FAIL, or -- for what is missing but not needed, followed by a fix. Lines
without a rank are from rank 0. Exit code: 0 if nothing FAILs, else 1."""

OK, ABSENT, WARN, FAIL = "ok", "--", "warn", "FAIL"
GRACE = 10.0  # seconds that connecting may take beyond --timeout
CHECKING = 60.0  # further seconds for the local checks, which start processes
LATER = 3.0  # seconds that other ranks wait for rank 0 to print, before they print their own failures
LEAST_DISK, LEAST_SHARED = 1e9, 256e6  # bytes below which there is a warning
LEAST_FILES = 1024
SUMMED = 1 << 20  # float32 elements of the timed sum: 4 MB
SLURM = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
UNWELL = r"down|drain|fail|unk|error|no_respond|\*$|maint|inval"  # in the state of a node
UNREACHED = "check that every rank was started and that the nodes reach each other by name, without a firewall"


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `fedmpi doctor`: those of `train` that matter here, by the same names."""

    comm: str = "auto"
    """Transport: torch (gloo, nccl), mpi, or auto (by the launcher)."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    threads: int | None = knob(None, low=1, high=256)
    """Threads per rank. Default: the node's cores divided by its ranks."""
    timeout: float = knob(60.0, low=0, open_low=True, high=1e6)
    """Seconds to wait for a rank that does not answer."""
    data_root: str | None = None
    """Folder of the data sets. Default: $FEDMPI_DATA, else the user's cache."""
    out: str = "runs"
    """Run folder, or the folder of run folders, whose disk is checked."""
    json: bool = flag()
    """Print one JSON object per line."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str
    check: str
    text: str
    fix: str = ""


def main(arguments: list[str]) -> int:
    """`fedmpi doctor`: check every rank of whatever launched this process; return the exit code."""
    try:
        place = find_place(os.environ)
    except UserError as error:  # the rank is unknown, so every process prints it
        show([failure("launcher", error)], read(arguments).json)
        return 1
    set_up(place.rank, place.size)
    try:
        options = read(arguments)
    except UserError as error:
        if not place.rank:
            raise
        time.sleep(5)  # nearly always the same error on every rank: rank 0 prints it and ends the others
        raise UserError(f"rank {place.rank}: {error}") from None
    try:
        return examine(place, options)
    finally:
        faulthandler.cancel_dump_traceback_later()


def read(arguments: list[str]) -> DoctorOptions:
    """Return the options, checked."""
    options = read_options(DoctorOptions, arguments, "doctor", ABOUT, notes=NOTES)
    anywhere = Place("alone", 0, 1, 0, 1)
    pick(options.comm, anywhere)
    choose_device(anywhere, options.device, cuda_devices=sys.maxsize)
    return options


def examine(place: Place, options: DoctorOptions) -> int:
    """Run the local checks, connect the ranks and try the collectives; print on rank 0; return the exit code."""
    findings: list[Finding] = []

    def add(found: list[Finding]) -> None:
        findings.extend(found)
        if place.rank == 0:
            show(found, options.json)

    end_after(options.timeout + GRACE + CHECKING)
    for check in CHECKS:
        add(run_check(check, place, options))
    comm = None
    everyone: list[list[Finding]] = []
    if not any(finding.level == FAIL and finding.check in NEEDED for finding in findings):
        limit = options.timeout + GRACE
        if place.size > 1:
            add([Finding(OK, "connect", f"connecting {place.size} ranks, for at most {limit:g} s")])
        try:
            end_after(limit)
            device = torch.device(choose_device(place, options.device, torch.cuda.device_count()))
            started = time.monotonic()
            comm = connect(options.comm, place, device, options.timeout, os.environ)
            end_after(limit)
            add(try_collectives(comm, place, device, time.monotonic() - started))
            add(network(place, os.environ, met=True))
            texts = tell_all(comm, json.dumps([astuple(finding) for finding in findings]))
            everyone = [[Finding(*row) for row in json.loads(text)] for text in texts]
            comm.barrier()
        except (UserError, RunError) as error:
            add([failure("ranks", error)])
    if not everyone:
        add(network(place, os.environ, met=False))
        if place.rank:
            time.sleep(LATER)
            failed = [(finding, [place.rank]) for finding in findings if finding.level == FAIL]
            sys.stderr.write(rendered(failed, as_json=False))
            sys.stderr.flush()
        if comm is not None and place.size > 1:
            comm.abort(1)
        return 1
    if place.rank == 0:
        sys.stdout.write(rendered(of_others(everyone), options.json))
        sys.stdout.flush()
    if comm is not None:
        comm.close()
    return 1 if any(finding.level == FAIL for found in everyone for finding in found) else 0


def end_after(seconds: float) -> None:
    """End this process with exit code 1 after a time, even if it hangs in C; stderr then shows where."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def failure(check: str, error: UserError | RunError) -> Finding:
    """Return the finding for an error, with its advice as the fix."""
    text, mark, fix = str(error).rpartition("; ")
    if not mark:
        text, mark, fix = str(error).rpartition(": ")
    if mark and isinstance(error, UserError):
        return Finding(FAIL, check, text, fix)
    return Finding(FAIL, check, str(error), UNREACHED)


# Checks of a process and its node


def run_check(
    check: Callable[[Place, DoctorOptions], Iterator[Finding]], place: Place, options: DoctorOptions
) -> list[Finding]:
    """Return the findings of a check; a failure if it cannot be made."""
    name = check.__name__.strip("_").replace("_", " ")
    try:
        return list(check(place, options))
    except UserError as error:
        return [failure(name, error)]
    except OSError as error:
        return [Finding(FAIL, name, f"{error.filename}: {error.strerror}", "make it accessible")]


def python(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check the versions of Python and fedmpi."""
    if place.local_rank == 0:
        yield Finding(OK, "python", f"{platform.python_version()}, fedmpi {__version__}, {platform.platform()}")


def torch_(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check torch and what it was built for."""
    if place.local_rank:
        return
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    found = backends()
    yield Finding(OK, "torch", f"{torch.__version__}, {built}, backends {', '.join(found) or 'none'}")
    if "gloo" not in found:
        needed = pick(options.comm, place) == "torch"
        yield Finding(FAIL if needed else WARN, "torch", "this torch cannot connect ranks", "install one with gloo")


def torchvision(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check that torchvision fits torch: a mismatch fails only when it is imported."""
    if place.local_rank:
        return
    trouble = torchvision_trouble(outside())
    if trouble is None:
        yield Finding(OK, "torchvision", f"{torchvision_build()}, fits torch {torch.__version__}")
    else:
        yield Finding(WARN, "torchvision", *trouble)


def devices(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check the device of this rank."""
    seen = torch.cuda.device_count()
    chosen = choose_device(place, options.device, seen)
    found = f"{plural(seen, 'CUDA device')}, {torch.cuda.get_device_name(0)}" if seen else "no CUDA device"
    if place.local_size > seen > 1 and chosen != "cpu":
        fix = "start as many ranks per node as it has devices: NCCL refuses two ranks on one"
        yield Finding(WARN, "devices", f"{place.local_size} ranks of this node share {found}", fix)
    elif chosen == "cpu" and not seen and Path("/dev/nvidiactl").exists():
        fix = "check nvidia-smi and CUDA_VISIBLE_DEVICES" if torch.version.cuda else "install a torch for CUDA"
        yield Finding(WARN, "devices", f"cpu ({found})", fix)
    else:
        yield Finding(OK, "devices", f"{chosen} ({found})")


def threads(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check the cores and the threads per rank."""
    cores = available_cores()
    each = threads_per_rank(place, options.threads, cores)
    torch.set_num_threads(each)
    text = f"{plural(cores, 'core')} for {plural(place.local_size, 'rank')} of this node, {plural(each, 'thread')} each"
    omp = os.environ.get("OMP_NUM_THREADS")
    by_torchrun = omp == "1" and "TORCHELASTIC_RUN_ID" in os.environ  # torchrun's own default
    if place.cores is None and each * place.local_size > cores:
        fix = f"start at most {cores} ranks per node, or request more cores"
        yield Finding(WARN, "threads", f"{text}: more threads than cores", fix)
    elif omp is not None and omp != str(each) and not by_torchrun:
        fix = f"use 'fedmpi train --threads {omp}', or unset OMP_NUM_THREADS"
        yield Finding(WARN, "threads", f"{text}, but OMP_NUM_THREADS={omp}, which a run ignores", fix)
    else:
        yield Finding(OK, "threads", text)


def mpi(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check the MPI library of mpi4py, in a process of its own because starting MPI may abort."""
    needed = pick(options.comm, place) == "mpi" or (place.launcher == "mpi" and place.size > 1)
    if place.local_rank and not needed:
        return
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = ask([sys.executable, "-c", code], 30)
    first = next(iter(done.stdout.split("\n")), "").strip("\0 ")
    if done.returncode or not first:
        why = last_line(done.stderr) or f"exit code {done.returncode}"
        fix = "pip install mpi4py mpich, or load your cluster's MPI module; or use --comm torch"
        yield Finding(FAIL if needed else ABSENT, "mpi", f"not usable: {why}", fix)
        return
    text = f"{' '.join(first.replace('Version:', '').split())}, mpi4py {metadata.version('mpi4py')}"
    managed = any(name in os.environ for name in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"))
    if place.size > 1 and not managed and not needed:
        fix = "for --comm mpi start with mpiexec, or 'srun --mpi=pmi2' (MPICH) or 'srun --mpi=pmix' (Open MPI)"
        yield Finding(ABSENT, "mpi", f"{text}; not in this launch: {place.launcher} gives MPI no process manager", fix)
    else:
        yield Finding(OK, "mpi", text)


def slurm(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check Slurm's commands, its controller and its partitions."""
    if place.local_rank:
        return
    absent = [name for name in SLURM if shutil.which(name) is None]
    if "sinfo" in absent:
        yield Finding(ABSENT, "slurm", "Slurm's commands were not found", "only needed for 'fedmpi submit'")
        return
    if absent:
        yield Finding(WARN, "slurm", f"{', '.join(absent)} not found", "add Slurm's commands to PATH")
    done = ask(["sinfo", "--noheader", "--format=%P|%a|%D|%T"], min(20.0, options.timeout))
    if done.returncode:
        why = last_line(done.stderr) or "no answer"
        fix = "check SLURM_CONF, 'scontrol ping' and munged; 'fedmpi submit' needs them"
        yield Finding(WARN, "slurm", f"the controller does not answer ({why})", fix)
        return
    version = " ".join(ask(["sinfo", "--version"], 10).stdout.split())
    rows = [line.split("|") for line in done.stdout.split()]
    states = ", ".join(f"{name} {up}: {nodes} {state}" for name, up, nodes, state in rows) or "no partitions"
    unwell = not rows or any(row[1] != "up" or re.search(UNWELL, row[3].lower()) for row in rows)
    fix = "see 'sinfo -R' and 'scontrol show node NAME'" if unwell else ""
    yield Finding(WARN if unwell else OK, "slurm", f"{version}; {states}", fix)


def data(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check which data sets are here, without reading them."""
    if place.local_rank:
        return
    folder = Path(options.data_root).expanduser() if options.data_root else None
    base = data_root(folder)
    states = {name: state_of(row.source(folder), base, verify=False).words for name, row in DATASETS.items()}
    found = [name for name, words in states.items() if words not in ("missing", "can be downloaded")]
    text = f"{len(found)} of {len(states)} data sets ({', '.join(found)}) in {base}; 'fedmpi data list' lists all"
    yield Finding(OK, "data", text)


def disk(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check that there is space to write, and permission."""
    if place.local_rank:
        return
    for name, wanted, fix in (
        ("run folder", Path(options.out).expanduser(), "give another with --out"),
        ("cache", cache_folder(), "set FEDMPI_CACHE to another folder"),
    ):
        folder = next(p for p in (wanted.absolute(), *wanted.absolute().parents) if p.exists())
        free = shutil.disk_usage(folder).free
        text = f"{name} {wanted}: {amount(free)} free"
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            yield Finding(FAIL if name == "run folder" else WARN, "disk", f"{text}, not writable", fix)
        elif free < LEAST_DISK:
            yield Finding(WARN, "disk", text, "free some space: a run fails on a full disk")
        else:
            yield Finding(OK, "disk", text)


def shared_memory(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check the file system that ranks of a node share memory through."""
    if place.local_rank:
        return
    shm = Path("/dev/shm")
    used = place.local_size > 1
    fix = "enlarge it (in a container: --shm-size=2g); until then ranks of a node use the slower transport"
    if not os.access(shm, os.W_OK):
        yield Finding(WARN if used else ABSENT, "shared memory", f"{shm} is not writable", fix)
        return
    free = shutil.disk_usage(shm).free
    small = used and free < LEAST_SHARED
    yield Finding(WARN if small else OK, "shared memory", f"{shm}: {amount(free)} free", fix if small else "")
    if left := leftovers():
        names = ", ".join(path.name for path in left)
        yield Finding(OK, "shared memory", f"left by killed runs: {names}; the next run on several ranks removes them")


def files(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check the limit of open files: every other rank takes a connection or two."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LEAST_FILES + 4 * place.size
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        yield Finding(OK, "files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft} open files")
    else:
        yield Finding(WARN, "files", f"at most {soft} open files", f"run 'ulimit -n {wanted}' before the start")


def launcher(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check who launched this process, and the transport that follows."""
    transport = pick(options.comm, place)
    ranks = f"rank {place.rank} of {place.size}, {place.local_size} on this node" if place.size > 1 else "one rank"
    yield Finding(OK, "launcher", f"{place.launcher}: {ranks}; transport {transport}")


def meeting(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check that the address where torch's ranks meet resolves: a run would retry until its timeout."""
    where = rendezvous(place, os.environ) if pick(options.comm, place) == "torch" else None
    if where is None:
        return
    if resolve(where[0]):
        yield Finding(OK, "meeting", f"{where[0]}:{where[1]}")
    else:
        fix = "set MASTER_ADDR to a name or address of the first node that every node can resolve"
        yield Finding(FAIL, "meeting", f"the ranks meet at {where[0]}, which does not resolve", fix)


def rendezvous_store(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check whether torchrun's agent, which unpickles what others write to it, listens to other machines."""
    if place.launcher != "torchrun" or place.local_rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    where = rendezvous(place, os.environ)
    if where is not None and open_to_others(where[1]):
        text = f"torchrun's agent listens on all interfaces (port {where[1]}) and, unless --rdzv-backend is static, "
        text += "unpickles what it finds there: whoever reaches that port can run commands as you"
        fix = "start with 'fedmpi train --ranks N' instead, at least on a machine with other users"
        yield Finding(WARN, "torchrun", text, fix)


def open_to_others(port: int) -> bool:
    """Return whether a process of this machine listens on a port for other machines."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                address, number = local.split(":")
                inside = address in ("0100007F", "00000000000000000000000001000000")
                if state == "0A" and int(number, 16) == port and not inside:
                    return True
    return False


CHECKS: tuple[Callable[[Place, DoctorOptions], Iterator[Finding]], ...] = (
    *(python, torch_, torchvision, devices, threads, mpi, slurm, data, disk, shared_memory, files),
    *(launcher, meeting, rendezvous_store),
)
NEEDED = ("devices", "mpi", "torch", "meeting", "launcher")  # if one fails, connecting is not tried


def network(place: Place, environ: Env, met: bool) -> list[Finding]:
    """Check this host's name and interfaces; stricter if the ranks have not `met`."""
    if place.local_rank:
        return []
    name, wanted, interfaces = socket.gethostname(), environ.get("GLOO_SOCKET_IFNAME", ""), Path("/sys/class/net")
    addresses = resolve(name)
    cut_off = place.local_size < place.size and not met
    if interfaces.is_dir() and any(word and not (interfaces / word).exists() for word in wanted.split(",")):
        fix = f"use one of {', '.join(sorted(os.listdir(interfaces)))}, or unset it"
        return [Finding(WARN if met else FAIL, "network", f"GLOO_SOCKET_IFNAME={wanted}: no such interface", fix)]
    if not addresses:
        fix = "add it to /etc/hosts or the name service; or set GLOO_SOCKET_IFNAME, and MASTER_ADDR to an address"
        return [Finding(WARN, "network", f"host name {name} does not resolve", fix)]
    local = all(address.startswith("127.") or address == "::1" for address in addresses)
    if cut_off and (wanted in ("lo", "lo0") or (local and not wanted)):
        text = f"GLOO_SOCKET_IFNAME={wanted}" if wanted else f"host name {name} is {addresses[0]}, which"
        fix = "set GLOO_SOCKET_IFNAME to an interface that the other nodes reach ('ip addr' lists them)"
        return [Finding(FAIL if wanted else WARN, "network", f"{text} does not reach other nodes", fix)]
    return [Finding(OK, "network", f"{name} is {addresses[0]}")]


def resolve(host: str) -> list[str]:
    """Return the addresses of a host name; [] if it has none."""
    try:
        return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError):
        return []


def outside() -> dict[str, str]:
    """Return the environment without the variables that make a process a rank."""
    launch = ("PMI", "MPI_", "OMPI_", "SLURM_STEP", "SLURM_PROCID")
    return {name: value for name, value in os.environ.items() if not name.startswith(launch)}


def ask(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command outside of this launch; exit code 124 if it takes too long."""
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


# The connection between ranks


def try_collectives(comm: Comm, place: Place, device: torch.device, seconds: float) -> list[Finding]:
    """Try every collective on known numbers, over the transport and through shared memory. Collective."""
    if comm.size == 1:
        return [Finding(OK, "ranks", "one rank: nothing to connect")]
    garbled = "this transport corrupts numbers: use another (--comm) and report it to its maintainers"
    wrong = wrong_verbs(comm)
    took = statistics.median(timed_sum(comm) for _ in range(5))
    text = f"{comm.size} ranks met over {comm.name} in {seconds:.1f} s; a sum of 4 MB takes {1000 * took:.1f} ms"
    found = [Finding(OK, "ranks", text)]
    if wrong:
        found = [Finding(FAIL, "ranks", f"wrong results: {', '.join(wrong)}", garbled)]
    found += differences(comm, place, device)
    if device.type != "cpu":
        return found
    share_node(comm)
    wrong = wrong_verbs(comm)
    if wrong:
        found.append(Finding(FAIL, "ranks", f"wrong results through shared memory: {', '.join(wrong)}", garbled))
    elif comm.node is not None and comm.node.refused:
        fix = "check the size and permissions of /dev/shm, and that the ranks of a node share a container"
        found.append(Finding(WARN, "ranks", "ranks of a node cannot share memory and use the slower transport", fix))
    elif comm.node is not None and len(comm.node.ranks) > 1:
        found.append(Finding(OK, "ranks", "the ranks of a node share memory"))
    return found


def wrong_verbs(comm: Comm) -> list[str]:
    """Return the collectives that gave a wrong result on this rank. Collective."""
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
    """Return the seconds of one sum of 4 MB. Collective."""
    x = torch.ones(SUMMED)
    comm.barrier()
    started = time.perf_counter()
    comm.sum(x)
    return time.perf_counter() - started


def differences(comm: Comm, place: Place, device: torch.device) -> list[Finding]:
    """Return what differs on this rank from rank 0: versions, processor, threads. Collective."""
    about: dict[str, Any] = describe(place, os.environ, torch.get_num_threads(), str(device))
    mine = {"processor": about["processor"], "threads": about["threads"]} | about["versions"]
    first = json.loads(tell_all(comm, json.dumps(mine))[0])
    other = [f"{name} {mine[name]}, but rank 0 has {first[name]}" for name in mine if mine[name] != first[name]]
    if not other:
        return []
    fix = "start every rank in the same environment; equal bits also need equal processors and threads"
    return [Finding(FAIL if mine["fedmpi"] != first["fedmpi"] else WARN, "ranks", "; ".join(other), fix)]


# The report


def of_others(everyone: list[list[Finding]]) -> list[tuple[Finding, list[int]]]:
    """Return the problems that rank 0 does not have, each with the ranks that have it."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            if finding.level in (WARN, FAIL) and finding not in everyone[0]:
                ranks.setdefault(finding, []).append(rank)
    return list(ranks.items())


def rendered(lines: list[tuple[Finding, list[int]]], as_json: bool) -> str:
    """Return findings as text, each with the ranks that it is about; none: rank 0."""
    out = []
    for finding, ranks in lines:
        if as_json:
            record: dict[str, Any] = {"level": finding.level, "check": finding.check, "finding": finding.text}
            out.append(json.dumps(record | {"fix": finding.fix or None, "ranks": ranks or None}) + "\n")
            continue
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: " if ranks else ""
        out.append(f"{finding.level:<4}  {finding.check:<13}  {who}{one_line(finding.text)}\n")
        if finding.fix:
            out.append(f"{'':21}fix: {one_line(finding.fix)}\n")
    return "".join(out)


def show(findings: list[Finding], as_json: bool) -> None:
    """Print findings of this rank."""
    sys.stdout.write(rendered([(finding, []) for finding in findings], as_json))
    sys.stdout.flush()
