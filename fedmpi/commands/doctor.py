"""`fedmpi doctor`: check this machine and the connection between ranks, and say how to fix what is wrong.

Start it like a training run, with the same launcher on the same nodes. Every rank checks itself, the first rank of
each node also its node. Then the ranks connect as a run would, try every collective on known numbers, and send their
findings to rank 0. Rank 0 prints its own findings at once, so that they are seen even if connecting hangs; a timer in C
ends the process then, because MPI's start has no timeout and blocks every thread of Python.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..comm import Comm, connect, pick, share_node, tell_all
from ..comm.env import Place, available_cores, choose_device, describe, find_place, rendezvous, threads_per_rank
from ..comm.leftovers import MEMORY, leftovers
from ..comm.torch import backends
from ..data.store import cache_folder
from ..errors import RunError, UserError, one_line
from ..plugins.knobs import knob
from ..plugins.torchvision import torchvision_build, torchvision_trouble
from ..runs.log import set_up
from ..runs.options import flag, read_options
from ..runs.text import amount, plural

ABOUT = """Check this machine (torch, devices, MPI, Slurm, disk, shared memory) and the connection between ranks. Start
it as you would start 'fedmpi train': alone, or with torchrun, mpiexec, srun or submitit."""
NOTES = """One line per check: ok, warn, FAIL, or -- for what is missing but not needed, followed by a fix. Lines
without a rank are from rank 0. Exit code: 0 if nothing FAILs, else 1."""

OK, ABSENT, WARN, FAIL = "ok", "--", "warn", "FAIL"
GRACE = 10.0  # seconds that connecting may take beyond --timeout
CHECKING = 60.0  # further seconds for the local checks, which start processes
LATER = 3.0  # seconds that other ranks wait for rank 0 to print, before they print their own failures
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
    options = read_options(DoctorOptions, arguments, "doctor", ABOUT, notes=NOTES)
    anywhere = Place("alone", 0, 1, 0, 1)
    pick(options.comm, anywhere)
    choose_device(anywhere, options.device, cuda_devices=sys.maxsize)
    try:
        place = find_place(os.environ)
    except UserError as error:  # the rank is unknown, so every process prints it
        print(rendered(failure("launcher", error), options.json), flush=True)
        return 1
    set_up(place.rank, place.size)
    try:
        return examine(place, options)
    finally:
        faulthandler.cancel_dump_traceback_later()


def examine(place: Place, options: DoctorOptions) -> int:
    """Run the local checks, connect the ranks and try the collectives; print on rank 0; return the exit code."""
    findings: list[Finding] = []

    def add(found: Iterable[Finding]) -> None:
        for finding in found:
            findings.append(finding)
            if place.rank == 0:
                print(rendered(finding, options.json), flush=True)

    limit = options.timeout + GRACE
    end_after(limit + CHECKING)
    for check in (*(NODE_CHECKS if place.local_rank == 0 else ()), *RANK_CHECKS):
        add(run_check(check, place, options))
    comm = None
    everyone: list[list[Finding]] = []
    if not any(finding.level == FAIL and finding.check in NEEDED for finding in findings):
        try:
            end_after(limit)
            if place.size > 1:
                add([Finding(OK, "connect", f"connecting {place.size} ranks, for at most {limit:g} s")])
            device = torch.device(choose_device(place, options.device, torch.cuda.device_count()))
            comm = connect(options.comm, place, device, options.timeout, os.environ)
            end_after(limit)
            add(try_collectives(comm, place, device))
            texts = tell_all(comm, json.dumps([astuple(finding) for finding in findings]))
            everyone = [[Finding(*row) for row in json.loads(text)] for text in texts]
            comm.barrier()
        except (UserError, RunError) as error:
            add([failure("ranks", error)])
    if comm is None or not everyone:
        time.sleep(LATER if place.rank else 0)
        for finding in findings:
            if place.rank and finding.level == FAIL:
                print(rendered(finding, False, [place.rank]), flush=True, file=sys.stderr)
        if comm is not None and place.size > 1:
            comm.abort(1)
        return 1
    if place.rank == 0:
        for finding, ranks in of_others(everyone).items():
            print(rendered(finding, options.json, ranks), flush=True)
    comm.close()
    return 1 if any(finding.level == FAIL for found in everyone for finding in found) else 0


def end_after(seconds: float) -> None:
    """End this process with exit code 1 after a time, even if it hangs in C; stderr then shows where."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def failure(check: str, error: UserError | RunError) -> Finding:
    """Return the finding for an error; the advice at the end of a `UserError` is the fix."""
    message = str(error)
    text, mark, fix = message.rpartition("; " if "; " in message else ": ")
    if mark and isinstance(error, UserError):
        return Finding(FAIL, check, text, fix)
    return Finding(FAIL, check, message, UNREACHED)


# Checks of a node and of a rank

Check = Callable[[Place, DoctorOptions], Iterator[Finding]]


def run_check(check: Check, place: Place, options: DoctorOptions) -> list[Finding]:
    """Return the findings of a check; a failure if it cannot be made."""
    name = check.__name__.replace("_", " ")
    try:
        return list(check(place, options))
    except UserError as error:
        return [failure(name, error)]
    except OSError as error:
        return [Finding(FAIL, name, f"{error.filename}: {error.strerror}", "make it accessible")]


def versions(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check Python, torch, and that torchvision fits torch: a mismatch fails only when it is imported."""
    yield Finding(OK, "python", f"{platform.python_version()}, fedmpi {__version__}, {platform.platform()}")
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Finding(OK, "torch", f"{torch.__version__}, {built}, backends {', '.join(backends()) or 'none'}")
    trouble = torchvision_trouble(outside())
    if trouble is None:
        yield Finding(OK, "torchvision", f"{torchvision_build()}, fits torch {torch.__version__}")
    else:
        yield Finding(WARN, "torchvision", *trouble)


def mpi(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check the MPI library of mpi4py, in a process of its own because starting MPI may abort."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = ask([sys.executable, "-c", code])
    library = done.stdout.partition("\n")[0].replace("Version:", "").strip("\0 ")
    if done.returncode == 0:
        yield Finding(OK, "mpi", f"{one_line(library)}, mpi4py {metadata.version('mpi4py')}")
    else:
        needed = pick(options.comm, place) == "mpi"
        fix = "pip install mpi4py mpich, or load your cluster's MPI module; or use --comm torch"
        yield Finding(FAIL if needed else ABSENT, "mpi", f"not usable: {last_line(done)}", fix)


def slurm(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check Slurm's commands, its controller and its partitions."""
    if shutil.which("sinfo") is None:
        yield Finding(ABSENT, "slurm", "Slurm's commands were not found", "only needed for 'fedmpi submit'")
        return
    done = ask(["sinfo", "--noheader", "--format=%P %a: %D %T"])
    if done.returncode:
        fix = "check SLURM_CONF, 'scontrol ping' and munged; 'fedmpi submit' needs them"
        yield Finding(WARN, "slurm", f"the controller does not answer ({last_line(done)})", fix)
    else:
        partitions = ", ".join(map(one_line, done.stdout.splitlines())) or "no partitions"
        yield Finding(OK, "slurm", f"{one_line(ask(['sinfo', '--version']).stdout)}; {partitions}")


def disk(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check that there is space to write, and permission; in /dev/shm, too, which the ranks of a node share."""
    enlarge = "enlarge it (in a container: --shm-size=2g); until then ranks of a node use the slower transport"
    for name, wanted, least, level, fix in (
        ("run folder", Path(options.out).expanduser(), 1e9, FAIL, "give another with --out, or free some space"),
        ("cache", cache_folder(), 1e9, WARN, "set FEDMPI_CACHE to another folder, or free some space"),
        ("shared memory", MEMORY, 256e6 if place.local_size > 1 else 0, WARN, enlarge),
    ):
        folder = next(path for path in (wanted.absolute(), *wanted.absolute().parents) if path.exists())
        free = shutil.disk_usage(folder).free
        text = f"{name} {wanted}: {amount(free)} free"
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            yield Finding(level, "disk", f"{text}, not writable", fix)
        else:
            yield Finding(WARN if free < least else OK, "disk", text, fix if free < least else "")
    if left := leftovers():
        names = ", ".join(path.name for path in left)
        yield Finding(OK, "disk", f"left by killed runs: {names}; the next run on several ranks removes them")


def launcher(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check who launched this process, and the transport that follows."""
    ranks = f"rank {place.rank} of {place.size}, {place.local_size} on this node" if place.size > 1 else "one rank"
    yield Finding(OK, "launcher", f"{place.launcher}: {ranks}; transport {pick(options.comm, place)}")
    if place.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        text = "torchrun's agent listens on all interfaces and, unless --rdzv-backend is static, unpickles what it "
        text += "finds there: whoever reaches its port can run commands as you"
        fix = "start with 'fedmpi train --ranks N' instead, at least on a machine with other users"
        yield Finding(WARN, "torchrun", text, fix)


def devices(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check the device and the threads of this rank."""
    cuda, cores = torch.cuda.device_count(), available_cores()
    device = choose_device(place, options.device, cuda)
    each = threads_per_rank(place, options.threads, cores)
    torch.set_num_threads(each)
    text = f"{device} (of {plural(cuda, 'CUDA device')}); {plural(cores, 'core')} for "
    text += f"{plural(place.local_size, 'rank')} of this node, {plural(each, 'thread')} each"
    if place.cores is None and each * place.local_size > cores:
        fix = f"start at most {cores} ranks per node with --threads 1, or request more cores"
        yield Finding(WARN, "devices", f"{text}: more threads than cores", fix)
    else:
        yield Finding(OK, "devices", text)


def network(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check the names that torch's ranks connect by: a run would retry until its timeout."""
    name = socket.gethostname()
    addresses = resolve(name)
    over_torch = pick(options.comm, place) == "torch"
    meeting = rendezvous(place, os.environ) if over_torch else None
    if meeting is not None and not resolve(meeting[0]):
        fix = "set MASTER_ADDR to a name or address of the first node that every node can resolve"
        yield Finding(FAIL, "network", f"the ranks meet at {meeting[0]}, which does not resolve", fix)
    elif not addresses:
        fix = "add it to /etc/hosts or the name service; or set GLOO_SOCKET_IFNAME, and MASTER_ADDR to an address"
        yield Finding(WARN, "network", f"host name {name} does not resolve", fix)
    elif over_torch and place.local_size < place.size and addresses[0].startswith(("127.", "::1")):
        fix = "set GLOO_SOCKET_IFNAME to an interface that the other nodes reach ('ip addr' lists them)"
        yield Finding(WARN, "network", f"host name {name} is {addresses[0]}, which other nodes do not reach", fix)
    else:
        yield Finding(OK, "network", f"{name} is {addresses[0]}")


NODE_CHECKS: tuple[Check, ...] = (versions, mpi, slurm, disk)
RANK_CHECKS: tuple[Check, ...] = (launcher, devices, network)
NEEDED = ("mpi", "launcher", "devices", "network")  # if one fails, connecting is not tried


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


def ask(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command outside of this launch; exit code 124 if it takes longer than 20 s."""
    try:
        return subprocess.run(command, env=outside(), capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", "no answer within 20 s")


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a command's errors."""
    return done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"


# The connection between ranks


def try_collectives(comm: Comm, place: Place, device: torch.device) -> Iterator[Finding]:
    """Try every collective on known numbers, over the transport and through shared memory. Collective."""
    if comm.size == 1:
        yield Finding(OK, "ranks", "one rank: nothing to connect")
        return
    wrong = wrong_verbs(comm)
    x = torch.ones(1 << 20)
    comm.barrier()
    started = time.perf_counter()
    comm.sum(x)
    took = 1000 * (time.perf_counter() - started)
    yield Finding(OK, "ranks", f"{comm.size} ranks met over {comm.name}; a sum of 4 MB takes {took:.1f} ms")
    if device.type == "cpu":
        share_node(comm)
        wrong += [f"{verb} through shared memory" for verb in wrong_verbs(comm)]
        if comm.node is not None and comm.node.refused:
            fix = "check the size and permissions of /dev/shm, and that the ranks of a node share a container"
            yield Finding(WARN, "ranks", "ranks of a node cannot share memory and use the slower transport", fix)
        elif comm.node is not None and len(comm.node.ranks) > 1:
            yield Finding(OK, "ranks", "the ranks of a node share memory")
    if wrong:
        fix = "this transport corrupts numbers: use another (--comm) and report it to its maintainers"
        yield Finding(FAIL, "ranks", f"wrong results: {', '.join(wrong)}", fix)
    about: dict[str, Any] = describe(place, os.environ, torch.get_num_threads(), str(device))
    mine = {"processor": about["processor"], "threads": about["threads"]} | about["versions"]
    first = json.loads(tell_all(comm, json.dumps(mine))[0])
    other = [f"{name} {mine[name]}, but rank 0 has {first[name]}" for name in mine if mine[name] != first[name]]
    if other:
        fix = "start every rank in the same environment; equal bits also need equal processors and threads"
        yield Finding(FAIL if mine["fedmpi"] != first["fedmpi"] else WARN, "ranks", "; ".join(other), fix)


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


# The report


def of_others(everyone: list[list[Finding]]) -> dict[Finding, list[int]]:
    """Return the problems that rank 0 does not have, each with the ranks that have it."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            if finding.level in (WARN, FAIL) and finding not in everyone[0]:
                ranks.setdefault(finding, []).append(rank)
    return ranks


def rendered(finding: Finding, as_json: bool, ranks: Sequence[int] = ()) -> str:
    """Return a finding as text, with the ranks that it is about; none: rank 0."""
    if as_json:
        record: dict[str, Any] = {"level": finding.level, "check": finding.check, "finding": finding.text}
        return json.dumps(record | {"fix": finding.fix or None, "ranks": ranks or None})
    who = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}: " if ranks else ""
    fix = f"\n{'':21}fix: {one_line(finding.fix)}" if finding.fix else ""
    return f"{finding.level:<4}  {finding.check:<13}  {who}{one_line(finding.text)}{fix}"
