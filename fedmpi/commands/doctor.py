"""`fedmpi doctor`: check this machine and the connection between ranks, and say how to fix what is wrong.

Start it like a training run, with the same launcher on the same nodes. Every rank checks itself, the first rank of
each node also its node. Then the ranks connect as a run would, try every collective on known numbers, and send their
findings to rank 0. Rank 0 prints its own findings at once, so that they are seen even if connecting hangs; a timer in C
ends the process then, because MPI's start has no timeout and blocks every thread of Python.
"""

from __future__ import annotations

import faulthandler
import importlib.util
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
from torch import Tensor

from .. import __version__
from ..comm import Comm, connect, pick, share_node, tell_all
from ..comm.env import Place, available_cores, describe, find_place, rendezvous, threads_per_rank
from ..comm.leftovers import MEMORY, leftovers
from ..comm.torch import backends
from ..data.store import cache_folder
from ..device import CPU, accelerator, choose, count, device_of, identity, kind_of, sums_device, takes_turns
from ..device import set_up as set_up_device
from ..errors import RunError, UserError, one_line
from ..plugins.hub import PACKAGES
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
    sums: str = knob("auto", choices=("auto", "host", "device"))
    """Where the sums of a round are: host, device (NCCL, one rank per GPU), or auto: the host."""
    threads: int | None = knob(None, low=1, high=256)
    """Threads per rank. Default: the node's cores divided by its ranks."""
    timeout: float = knob(60.0, low=0, open_low=True, high=1e6)
    """Seconds to wait for a rank that does not answer."""
    out: str = "runs"
    """Run folder, or the folder of run folders, whose disk is checked."""
    json: bool = flag()
    """Print one JSON object per line."""
    gpu: bool = flag()
    """Also check each rank's GPU: its sums and training to the bit, its speed, and what happens out of memory. Takes
    minutes."""
    gpu_out: str = "gpu.json"
    """File that --gpu writes all of its measurements to."""


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
    choose(0, options.device, accelerator() or "cuda", devices=sys.maxsize)
    if options.gpu:
        check_wish(options)
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


def check_wish(options: DoctorOptions) -> None:
    """Refuse --gpu if there is no accelerator to check, or no place for its measurements."""
    if options.device == "cpu" or not accelerator():
        why = "--device is cpu" if options.device == "cpu" else "torch sees none on this machine"
        fix = "start it where there is one, with a torch that is built for it ('fedmpi doctor' shows that), or leave "
        raise UserError(f"--gpu checks accelerators, but {why}; {fix}--gpu out")
    folder = Path(options.gpu_out).expanduser().absolute().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--gpu_out is {options.gpu_out}, whose folder cannot be written to; give another path")


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
            device = device_of(place.local_rank, options.device)
            sums_on = sums_device(device, options.sums)
            comm = connect(options.comm, place, sums_on, options.timeout, os.environ)
            end_after(limit)
            add(try_collectives(comm, place, device, sums_on))
            if options.gpu:
                from .gpu import check as check_gpu

                add(check_gpu(comm, place, device, options))
                end_after(limit)
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
        print_block([findings], place, options)
        if comm is not None and place.size > 1:
            comm.abort(1)
        return 1
    if place.rank == 0:
        for finding, ranks in of_others(everyone).items():
            print(rendered(finding, options.json, ranks), flush=True)
    print_block(everyone, place, options)
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


def hub(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check the packages of the extra fedmpi[llm], without importing them."""
    found = {name: metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}
    if len(found) == len(PACKAGES):
        yield Finding(OK, "llm", ", ".join(f"{name} {version}" for name, version in found.items()))
    else:
        lacking = ", ".join(name for name in PACKAGES if name not in found)
        fix = "pip install 'fedmpi[llm]'; only needed for --model hf:, --lora and --data hf:"
        yield Finding(ABSENT, "llm", f"{lacking} not installed", fix)


def mpi(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check the MPI library of mpi4py, in a process of its own because starting MPI may abort."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = ask([sys.executable, "-c", code])
    library = done.stdout.partition("\n")[0].replace("Version:", "").strip("\0 ")
    if done.returncode == 0:
        yield Finding(OK, "mpi", f"{one_line(library)}, mpi4py {metadata.version('mpi4py')}")
    else:
        needed = transport(place, options) == "mpi"
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
    yield Finding(OK, "launcher", f"{place.launcher}: {ranks}; transport {transport(place, options)}")
    if place.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        text = "torchrun's agent listens on all interfaces and, unless --rdzv-backend is static, unpickles what it "
        text += "finds there: whoever reaches its port can run commands as you"
        fix = "start with 'fedmpi train --ranks N' instead, at least on a machine with other users"
        yield Finding(WARN, "torchrun", text, fix)


def devices(place: Place, options: DoctorOptions) -> Iterator[Finding]:
    """Check the device and the threads of this rank. Which ranks share a device is known once they are connected."""
    devices, cores = count(), available_cores()
    device = device_of(place.local_rank, options.device)
    sums_device(device, options.sums)
    try:
        set_up_device(device, deterministic=True)
        torch.ones(1, device=device)
    except RuntimeError as error:
        fix = "check what its driver tells (nvidia-smi): memory in use, compute mode; or use --device cpu"
        yield Finding(FAIL, "devices", f"{device} cannot be used: {one_line(error)}", fix)
        return
    each = threads_per_rank(place, options.threads, cores)
    torch.set_num_threads(each)
    text = f"{device} (of {plural(devices, 'accelerator')}); {plural(cores, 'core')} for "
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
    over_torch = transport(place, options) == "torch"
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


def transport(place: Place, options: DoctorOptions) -> str:
    """Return the transport of a run; that of a CPU if there is no such device, which `devices` reports."""
    try:
        kind = sums_device(device_of(place.local_rank, options.device), options.sums).type
    except UserError:
        kind = "cpu"
    return pick(options.comm, place, kind)


NODE_CHECKS: tuple[Check, ...] = (versions, hub, mpi, slurm, disk)
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


def try_collectives(comm: Comm, place: Place, device: torch.device, sums_on: torch.device) -> Iterator[Finding]:
    """Try every collective on known numbers where the sums of a run are, over the transport and through shared memory.
    Collective."""
    if comm.size == 1:
        yield Finding(OK, "ranks", "one rank: nothing to connect")
        return
    wrong = wrong_verbs(comm, sums_on)
    x = torch.ones(1 << 20)
    comm.barrier()
    started = time.perf_counter()
    comm.sum(x)
    took = 1000 * (time.perf_counter() - started)
    tried = "on the host" if sums_on == CPU else f"on {sums_on}"
    text = f"{comm.size} ranks met over {comm.name}, and tried collectives {tried}; a sum of 4 MB takes {took:.1f} ms"
    yield Finding(OK, "ranks", text)
    if sums_on == CPU:
        share_node(comm)
        wrong += [f"{verb} through shared memory" for verb in wrong_verbs(comm)]
        if comm.node is not None and comm.node.refused:
            fix = "check the size and permissions of /dev/shm, and that the ranks of a node share a container"
            yield Finding(WARN, "ranks", "ranks of a node cannot share memory and use the slower transport", fix)
        elif comm.node is not None and len(comm.node.ranks) > 1:
            yield Finding(OK, "ranks", "the ranks of a node share memory")
    if wrong:
        fix = "this transport corrupts numbers: use another (--comm, --sums) and report it to its maintainers"
        yield Finding(FAIL, "ranks", f"wrong results: {', '.join(wrong)}", fix)
    yield from shared_devices(comm, device)
    about: dict[str, Any] = describe(place, os.environ, torch.get_num_threads(), str(device))
    mine = {"processor": about["processor"], "threads": about["threads"], "device": kind_of(device)} | about["versions"]
    first = json.loads(tell_all(comm, json.dumps(mine))[0])
    other = [f"{name} {mine[name]}, but rank 0 has {first[name]}" for name in mine if mine[name] != first[name]]
    if other:
        fix = "start every rank in the same environment; equal bits also need equal processors, devices and threads"
        yield Finding(FAIL if mine["fedmpi"] != first["fedmpi"] else WARN, "ranks", "; ".join(other), fix)


def shared_devices(comm: Comm, device: torch.device) -> Iterator[Finding]:
    """Check which ranks share an accelerator; with --sums device, connecting has refused that. Collective."""
    ranks: dict[str, list[int]] = {}
    for rank, uuid in enumerate(tell_all(comm, identity(device))):
        if uuid:
            ranks.setdefault(uuid, []).append(rank)
    shared = [f"ranks {', '.join(map(str, some))} share one" for some in ranks.values() if len(some) > 1]
    text = f"{plural(sum(map(len, ranks.values())), 'rank')} on {plural(len(ranks), 'accelerator')}"
    if shared and takes_turns(device):
        fix = "start NVIDIA's MPS, which lets their kernels overlap: nvidia-cuda-mps-control -d; or a rank per GPU"
        yield Finding(WARN, "devices", f"{text}: {'; '.join(shared)}, and take turns on it", fix)
    elif ranks:
        yield Finding(OK, "devices", ": ".join([text, *(["; ".join(shared)] if shared else [])]))


TYPES = (torch.int8, torch.int32, torch.int64, torch.float32, torch.bfloat16)  # that rows of sums have
BUCKETS = {"": [slice(0, 1024)], ", unaligned": [slice(0, 333), slice(333, 1001)]}


def wrong_verbs(comm: Comm, device: torch.device = CPU) -> list[str]:
    """Return the collectives that gave a wrong result on this rank, on a device: in every type that they move, in one
    aligned bucket and in buckets that begin anywhere. Collective."""
    right: dict[str, bool] = {}
    for on in dict.fromkeys((CPU, device)):  # small records are on the host in any case
        right |= {f"{verb}{where(on)}": good for verb, good in try_small(comm, on).items()}
    for how, buckets in BUCKETS.items():
        for dtype in TYPES:
            name = str(dtype).removeprefix("torch.")
            right[f"exchange of {name}{how}{where(device)}"] = try_exchange(comm, dtype, buckets, device)
            if comm.reduces(device) and dtype != torch.bfloat16:
                right[f"sum of rows of {name}{where(device)}"] = try_reduce(comm, dtype, device)
        right |= {f"{verb}{how}{where(device)}": good for verb, good in try_gather(comm, buckets, device).items()}
    return [verb for verb, good in right.items() if not good]


def where(device: torch.device) -> str:
    """Return where a collective was tried, to be added to its name."""
    return "" if device == CPU else f" on {device.type}"


def try_small(comm: Comm, device: torch.device) -> dict[str, bool]:
    """Return whether a sum of counts and a broadcast are right. Collective."""
    me, size, length = comm.rank, comm.size, 1001
    counts = (torch.arange(length) * 2**40 + me).to(device)
    comm.sum(counts)
    word = torch.full((length,), float(me), device=device)
    comm.broadcast(word, root=size - 1)
    return {
        "sum": torch.equal(counts.to(CPU), torch.arange(length) * 2**40 * size + size * (size - 1) // 2),
        "broadcast": bool((word == size - 1).all()),
    }


def try_exchange(comm: Comm, dtype: torch.dtype, buckets: Sequence[slice], device: torch.device) -> bool:
    """Return whether rows are readable where they are added up and arrive where they are sent. Collective."""
    me, size, length = comm.rank, comm.size, buckets[-1].stop
    rows = comm.rows(length, dtype, device)
    for s, row in enumerate(rows.mine):
        row.copy_(random_bits(dtype, length, me * size + s))
    came = {r: torch.zeros_like(rows.mine[0]) for r in rows.links.partners}
    waits = []
    for bucket in buckets:
        comm.offer([rows], bucket)
        send = {s: rows.mine[s][bucket] for s in rows.links.carried}
        waits.append(comm.start(send, {r: row[bucket] for r, row in came.items()}))
    for wait in waits:
        wait()
    found = [(r, me, row) for r, row in came.items()]
    found += [(r, s, row) for s, near in rows.near.items() for r, row in zip(rows.links.mates, near, strict=True)]
    right = [same_bits(row, random_bits(dtype, length, r * size + s)) for r, s, row in found]
    comm.barrier()
    return all(right)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors, of which one may be on a device, are equal bit by bit."""
    return torch.equal(found.to(CPU).view(torch.int8), expected.view(torch.int8))


def try_reduce(comm: Comm, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the transport adds up rows on a device. Collective."""
    size, length = comm.size, 1024
    block, total = (torch.zeros(*shape, dtype=dtype, device=device) for shape in ((size, length), (length,)))
    block.copy_((torch.arange(size * length).view(size, length) % 40 - comm.rank).to(dtype))
    comm.start_reduce(block, total)()
    expected = size * ((torch.arange(length) + length * comm.rank) % 40) - size * (size - 1) // 2
    return torch.equal(total.to(CPU), expected.to(dtype))


def try_gather(comm: Comm, buckets: Sequence[slice], device: torch.device) -> dict[str, bool]:
    """Return whether every rank's slice arrives, and updates of it in bf16. Collective."""
    me, length = comm.rank, buckets[-1].stop
    whole = comm.vector(length, device)
    expected = torch.arange(1.0, comm.size + 1).repeat_interleave(length)
    comm.own(whole).fill_(me + 1)
    comm.gather(whole, [comm.start_gather(whole, bucket) for bucket in buckets])
    right = {"gather": torch.equal(whole.to(CPU), expected)}
    comm.barrier()
    update = comm.update(whole, torch.bfloat16)
    if update is not None:
        update.mine_S.fill_(0.5)
        comm.own(whole).add_(0.5)
        comm.gather(whole, [comm.start_gather(whole, bucket, update) for bucket in buckets])
        right["gather of bf16"] = torch.equal(whole.to(CPU), expected + 0.5)
        comm.barrier()
    return right


def random_bits(dtype: torch.dtype, length: int, seed: int) -> Tensor:
    """Return elements of random bits, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (length * dtype.itemsize,), dtype=torch.int8, generator=generator).view(dtype)


# The report


def of_others(everyone: list[list[Finding]]) -> dict[Finding, list[int]]:
    """Return the problems that rank 0 does not have, each with the ranks that have it."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            if finding.level in (WARN, FAIL) and finding not in everyone[0]:
                ranks.setdefault(finding, []).append(rank)
    return ranks


def print_block(everyone: list[list[Finding]], place: Place, options: DoctorOptions) -> None:
    """Print what --gpu has found, to be pasted into an issue, on rank 0."""
    if options.gpu and not options.json and place.rank == 0:
        from .gpu import block

        print(block(everyone, place.size), flush=True)


def rendered(finding: Finding, as_json: bool, ranks: Sequence[int] = ()) -> str:
    """Return a finding as text, with the ranks that it is about; none: rank 0."""
    if as_json:
        record: dict[str, Any] = {"level": finding.level, "check": finding.check, "finding": finding.text}
        return json.dumps(record | {"fix": finding.fix or None, "ranks": ranks or None})
    who = f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}: " if ranks else ""
    fix = f"\n{'':21}fix: {one_line(finding.fix)}" if finding.fix else ""
    return f"{finding.level:<4}  {finding.check:<13}  {who}{one_line(finding.text)}{fix}"
