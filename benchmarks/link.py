"""Measure the collective over emulated links between nodes; by default 4 nodes of one rank, with 1 Gbit/s each.

    sudo python benchmarks/link.py                      # gloo and MPI, 11.2 million parameters
    sudo python benchmarks/link.py --topology 2x1 2x2 2x4 4x1 --mbit 1000 10000 --transport gloo --json
    sudo python benchmarks/link.py --topology 2x4 --cases float32 exact --against ../before
    sudo python benchmarks/link.py --topology 2x2 --mbit 1000 10000 --timeline link.png

A topology is NODESxRANKS: 2x4 are 2 nodes with 4 ranks each. Every node is a network namespace of this machine, joined
by a bridge in one more; `tc` (tbf) holds every port of the bridge to the rate, in both directions, as a switch would.
Ranks of one node share memory, as in a run. The namespaces are made by this command, nothing but its ranks talks in
them, and they are removed when it ends. That needs root, `ip` and `tc`.

The baseline is the transport's own all-reduce of the same vector in float32 (the plain mean, without votes); MPICH's
uses shared memory within a node, gloo's knows no nodes. Compared with it are: the masked collective as a round runs it,
from filled sums to the new model on every rank, with five clients per rank; and the same arithmetic gathered on rank 0,
which masks and sends the model back to all: of each rank's sums, and of each client's delta. "With the last fold"
starts when the rank's last client is trained: the collective folds that delta while the first buckets travel, its
baseline folds it and then calls the all-reduce.

All are run in turn. Printed are medians over the turns: the payload that all ranks provide to others, what of it left
the nodes (where this version of fedmpi counts that), the bytes of the busiest port in its busier direction, as the
interface counted them, with the rate that this makes, the seconds of the slowest rank, and the ratio to the baseline of
the same turn, with quartiles. If no case comes near the rate, processors are the limit, not the link; then the table
says so.

--against measures another version of fedmpi as well, in launches that alternate with those of this one.
--timeline draws one round's collective instead, with the last fold: the traffic of every port over time, the phases of
rank 0, and for how much of the time a port was busier than 80% of the rate.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))  # the ranks are started from anywhere
import timeline
from collective import masked, plain_all_reduce
from kit import columns, median, positive, quartiles

import fedmpi
from fedmpi.aggregate.sums import Sums, Totals
from fedmpi.algorithms import Algorithm
from fedmpi.cohort import Cohort
from fedmpi.comm import Comm, connect, share_node
from fedmpi.comm.env import find_place
from fedmpi.flat import Layout
from fedmpi.local import LocalResult, Update, sgd
from fedmpi.masks import make_mask
from fedmpi.rounds import State, move_model
from fedmpi.server import ServerKnobs, make_server

REPO = Path(__file__).resolve().parents[1]
CLIENTS = 5  # per rank
SUBNET = "10.213.77"
PORT = 29500  # in a namespace of its own: nobody else has it
LIMIT = 600  # seconds for the ranks of one launch
GRACE = 20  # seconds for the other ranks, once one has failed
NEAR = 0.85  # of the rate: below that, the link is not what limits a case
MPI_OVER_TCP = {  # mpiexec tells MPICH which ranks share a node; between nodes it would still find faster ways than TCP
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "eth0",
}


class Topology(NamedTuple):
    """Nodes, and the ranks on each."""

    nodes: int
    per_node: int

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}"

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.per_node


# ------------------------------------------------------------------------------------------------------- the network


def run(*command: str) -> None:
    """Run a command that makes a part of the network."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=20)


@contextmanager
def network(nodes: int, mbit: int) -> Iterator[list[str]]:
    """Make a network namespace per node, joined by a bridge in one more. Yield their names, the bridge's first. End
    what still runs in them and remove them at the end."""
    names = [f"fedmpi-{os.getpid()}-{node}" for node in range(nodes)]
    hub = f"fedmpi-{os.getpid()}-hub"
    # A queue of 8 MB: ports that several ranks send to drop little, as a switch with buffers would.
    shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "limit", "8mb")
    try:
        for name in (hub, *names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "br0", "up")
        for node, name in enumerate(names):
            port = f"port{node}"
            run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "-n", hub, "link", "set", port, "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"{SUBNET}.{node + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape)
            run("tc", "-n", hub, "qdisc", "add", "dev", port, *shape)
        yield [hub, *names]
    finally:
        signals = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # a second Ctrl-C must not leave half of it
        for name in (hub, *names):
            remove(name)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def remove(name: str) -> None:
    """Remove a namespace; only processes of this command are in it, and they are killed."""
    found = subprocess.run(("ip", "netns", "pids", name), capture_output=True, text=True, timeout=20)
    for pid in map(int, found.stdout.split()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    subprocess.run(("ip", "netns", "del", name), stderr=subprocess.DEVNULL, timeout=20)


# --------------------------------------------------------------------------------------------------------- launching


def launch(transport: str, names: list[str], per_node: int, version: Path, words: list[str]) -> list[dict[str, Any]]:
    """Run ranks in every namespace with a version of fedmpi, and return what rank 0 prints. What was started is ended,
    however this ends."""
    command = [sys.executable, __file__, "--rank", *words, str(version)]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # addresses in here have no names
    path = {"PYTHONPATH": os.pathsep.join([str(version), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])}
    common = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"} | MPI_OVER_TCP | quiet | path
    started: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "out").open("w+") as out:
        try:
            for arguments, environ in commands(transport, Path(folder), names, per_node, command):
                started.append(subprocess.Popen(arguments, stdout=out, env=common | environ, start_new_session=True))
            codes = wait(started)
        finally:
            for process in started:
                end(process)
        out.seek(0)
        lines = out.read().splitlines()
    if any(codes):
        raise SystemExit(f"the ranks of {transport} ended with the codes {codes}; their messages are above")
    return [json.loads(line) for line in lines if line.startswith("{")]


def commands(
    transport: str, folder: Path, names: list[str], per_node: int, command: list[str]
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the commands to start, and their environment: one per rank for gloo, one for MPI."""
    if transport == "mpi":
        yield mpi_command(folder, names, per_node, command), {}
        return
    for rank in range(len(names) * per_node):
        node, local = divmod(rank, per_node)
        place = {"RANK": rank, "WORLD_SIZE": len(names) * per_node, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_node}
        meeting = {"MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": PORT}
        environ = {name: str(value) for name, value in (place | meeting).items()}
        yield ["ip", "netns", "exec", names[node], *command], environ


def mpi_command(folder: Path, names: list[str], per_node: int, command: list[str]) -> list[str]:
    """Return MPICH's mpiexec in the first namespace, with a way into the others in place of ssh."""
    here = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(here) if here.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise SystemExit("mpiexec was not found: pip install mpich, or give --transport gloo")
    hosts = [f"{SUBNET}.{node + 1}" for node in range(len(names))]
    cases = "".join(f"{host}) name={name};;\n" for host, name in zip(hosts, names, strict=True))
    enter = folder / "enter"
    enter.write_text(
        "#!/bin/sh\n# in place of ssh: [options] host command...\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        f'case "$1" in\n{cases}esac\nshift\nexec ip netns exec "$name" sh -c "$*"\n'
    )
    enter.chmod(0o700)
    options = ["-launcher", "ssh", "-launcher-exec", str(enter), "-hosts", ",".join(hosts), "-iface", "eth0"]
    ranks = ["-ppn", str(per_node), "-n", str(len(names) * per_node)]
    return ["ip", "netns", "exec", names[0], mpiexec, *options, *ranks, *command]


def wait(started: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for processes and return their exit codes; those that outlive a failed one are not waited for long."""
    deadline, failed = time.monotonic() + LIMIT, False
    while any(process.poll() is None for process in started):
        if not failed and any(process.returncode for process in started):
            deadline, failed = time.monotonic() + GRACE, True
        if time.monotonic() > deadline:
            if failed:
                break
            raise SystemExit(f"the ranks were not done after {LIMIT} s; fewer --turns or a larger --mbit help")
        time.sleep(0.02)
    return [-signal.SIGKILL if process.returncode is None else process.returncode for process in started]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started here, and what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


# ---------------------------------------------------------------------------------------------- what each rank does


@dataclass(frozen=True)
class Step:
    """What is measured, and what comes before it in every turn."""

    work: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def folded(comm: Comm, params: int) -> Step:
    """Return the plain all-reduce of a sum to which this rank's last client is added first."""
    sum_N = torch.zeros(params)
    delta_N, reduce = random_delta(comm, params), plain_all_reduce(comm, sum_N)

    def work() -> None:
        sum_N.add_(delta_N)
        reduce()

    return Step(work, sum_N.zero_)


def masked_with_fold(comm: Comm, params: int) -> Step:
    """Return `collective.masked` in float32, from the end of this rank's last client on: its delta is not in the sums.
    What the clients before it added does not change the time, and is left out."""
    layout = Layout((), params, params, (), 1)
    length, everybody = layout.padded(comm.size), CLIENTS * comm.size
    algorithm = Algorithm(sgd(0.01), make_mask("gma", 0.4), make_server("sgd", ServerKnobs()))
    model_N, no_ints = comm.vector(length // comm.size), torch.zeros(0, dtype=torch.int64)
    sums = Sums(comm, layout, algorithm.local, cohort=everybody, clients=everybody, kind="float32", model_N=model_N)
    cids = tuple(range(everybody))
    cohort = Cohort(cids, (600,) * everybody, tuple(cid % comm.size for cid in cids))
    delta_N = random_delta(comm, length)
    update = Update(comm.rank, delta_N, no_ints, 0.0, LocalResult(delta_N[:params]), last=True)
    state, totals = State(0, model_N, no_ints, {}, unsent={}), Totals(cohort.total, 0.0, cids, (), no_ints)

    def work() -> None:
        sums.add(update)
        move_model(state, algorithm, totals, sums)

    return Step(work, lambda: sums.reset(cohort, 1, no_ints))


def random_delta(comm: Comm, length: int) -> torch.Tensor:
    """Return a delta of this rank's own."""
    return torch.randn(length, generator=torch.Generator().manual_seed(comm.rank)) * 1e-3


def central(comm: Comm, params: int, each_client: bool) -> Step:
    """Rank 0 gets every rank's sums and votes, or every client's delta; it masks, and sends the model to all."""
    mask, delta, model = make_mask("gma", 0.4), random_delta(comm, params), torch.zeros(params)
    votes = torch.sign(delta).to(torch.int8) * CLIENTS
    here = comm.others if comm.rank == 0 else []
    came = {r: torch.zeros(params) for r in here}
    voted = {r: torch.zeros(params, dtype=torch.int8) for r in here}

    def to_rank_0(x: torch.Tensor, rows: dict[int, torch.Tensor]) -> None:
        comm._start({} if comm.rank == 0 else {0: x}, rows)()

    def work() -> None:
        total, count = delta * CLIENTS, votes.clone()
        for _ in range(CLIENTS if each_client else 1):
            to_rank_0(delta, came)
            for row in came.values():
                total += row
                if each_client:
                    count += torch.sign(row).to(torch.int8)
        if not each_client:
            to_rank_0(votes, voted)
            for row in voted.values():
                count += row
        if comm.rank == 0:
            clients = CLIENTS * comm.size
            mean = total.div_(clients)
            model.add_(mean.mul_(mask(count, clients, mean)))
        comm._broadcast(model, 0)

    return Step(work)


@dataclass(frozen=True)
class Case:
    """A row of the table. `sends`: bytes per element and other rank, where the transport does not count them."""

    name: str
    make: Callable[[Comm, int], Step]
    baseline: str = "all-reduce"
    sends: int | None = None


CASES = {
    "all-reduce": Case("plain all-reduce (mean)", lambda c, n: Step(plain_all_reduce(c, torch.zeros(n))), sends=8),
    "float32": Case("GMA float32", lambda c, n: Step(masked(c, n, "float32", CLIENTS, "gma"))),
    "one": Case("GMA float32, one client a rank", lambda c, n: Step(masked(c, n, "float32", 1, "gma"))),
    "exact": Case("GMA exact", lambda c, n: Step(masked(c, n, "exact", CLIENTS, "gma"))),
    "bf16": Case("GMA bf16 on the wire", lambda c, n: Step(masked(c, n, "float32", CLIENTS, "gma", "bf16"))),
    "folded": Case("plain all-reduce with the last fold", folded, "folded", sends=8),
    "fold": Case("GMA float32 with the last fold", masked_with_fold, "folded"),
    "rank0": Case("GMA on rank 0, of sums", lambda c, n: central(c, n, False), sends=4 + 1 + 4),
    "clients": Case("GMA on rank 0, of each delta", lambda c, n: central(c, n, True), sends=4 * CLIENTS + 4),
}


def port_bytes() -> torch.Tensor:
    """Return the bytes that the interface of this rank's node has sent and received."""
    folder = Path("/sys/class/net/eth0/statistics")
    return torch.tensor([int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx")])


def observe(comm: Comm, step: Step) -> dict[str, Any]:
    """Return the seconds of the slowest rank, the bytes that all ranks sent, those that left the nodes (None if the
    transport does not count them), and the bytes of the busiest port in its busier direction."""
    step.prepare()
    before = port_bytes()
    comm.barrier()
    counted = hasattr(comm, "away")
    sent, away, began = comm.sent, getattr(comm, "away", 0), time.perf_counter()
    step.work()
    mine = [time.perf_counter() - began, comm.sent - sent, getattr(comm, "away", 0) - away]
    comm.barrier()  # all that was sent has arrived
    seen = torch.zeros(comm.size, 4, dtype=torch.float64)
    seen[comm.rank] = torch.tensor([*mine, float((port_bytes() - before).max())])
    comm.sum(seen)
    most, total = seen.amax(0).tolist(), seen.sum(0).tolist()
    return {"seconds": most[0], "sent": total[1], "away": total[2] if counted else None, "port": most[3]}


def measure(comm: Comm, params: int, turns: int, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what every case of every turn took."""
    steps = {key: CASES[key].make(comm, params) for key in wanted}
    for turn in range(turns + 1):  # the first one warms up
        for key, step in steps.items():
            seen = observe(comm, step)
            if turn:
                yield {"case": key, **seen}


def work(params: str, turns: str, wanted: str, version: str) -> None:
    """Run one rank; rank 0 prints what it measures. Namespaces are of one machine: their number is the node's."""
    torch.set_num_threads(1)
    imported = Path(fedmpi.__file__).resolve().parents[1]
    if imported != Path(version).resolve():
        raise SystemExit(f"fedmpi was imported from {imported}, not from {version}")
    comm = connect("auto", find_place(os.environ), torch.device("cpu"), 120.0, os.environ)
    share_node(comm, node=os.stat("/proc/self/ns/net").st_ino)
    if wanted == "timeline":
        lines = timeline.trace(comm, masked_with_fold(comm, int(params)), int(turns))
    else:
        lines = measure(comm, int(params), int(turns), wanted.split(","))
    for line in lines:
        if comm.rank == 0:
            print(json.dumps(line), flush=True)
    comm.close()


# --------------------------------------------------------------------------------------------------------- the table


def compare(
    options: argparse.Namespace, transport: str, topology: Topology, mbit: int, names: list[str]
) -> list[dict[str, Any]]:
    """Launch the versions in turn and return a row per case and version."""
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    words = [str(options.parameters), str(options.turns), ",".join(options.cases)]
    for _ in range(options.launches):
        for version, folder in options.versions.items():
            for line in launch(transport, names, topology.per_node, folder, words):
                seen.setdefault((line["case"], version), []).append(line)
    about = {
        "transport": transport,
        "ranks": topology.ranks,
        "nodes": topology.nodes,
        "topology": str(topology),
        "mbit": mbit,
        "parameters": options.parameters,
    }
    rows = []
    for key, version in itertools.product(options.cases, options.versions):
        row = row_of(CASES[key], seen[key, version], seen[CASES[key].baseline, version], about)
        rows.append(about | {"version": version} | row)
    return rows


def row_of(
    case: Case, turns: list[dict[str, Any]], baseline: list[dict[str, Any]], about: dict[str, Any]
) -> dict[str, Any]:
    """Return a row: medians over the turns, each turn against the baseline's."""
    ratios = [mine["seconds"] / theirs["seconds"] for mine, theirs in zip(turns, baseline, strict=True)]
    seconds, port, sent = (statistics.median(turn[what] for turn in turns) for what in ("seconds", "port", "sent"))
    if case.sends is not None:
        sent = case.sends * about["parameters"] * (about["ranks"] - 1)
    away = None if case.sends is not None or turns[0]["away"] is None else statistics.median(t["away"] for t in turns)
    return {
        "case": case.name,
        "baseline": CASES[case.baseline].name,
        "payload_bytes": int(sent),
        "away_bytes": None if away is None else int(away),
        "port_bytes": int(port),
        "seconds": round(seconds, 4),
        "ratio": median(ratios),
        "ratio_quartiles": quartiles(ratios),
        "port_mbit": round(8e-6 * port / seconds),
    }


def table(rows: Sequence[dict[str, Any]], versions: Sequence[str]) -> str:
    """Return the rows of one transport, topology and rate as text, the versions side by side."""
    first = rows[0]
    lines = [["case", *itertools.chain.from_iterable(head(v, len(versions) > 1) for v in versions)]]
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        lines.append([case, *itertools.chain.from_iterable(cells(row) for row in mine)])
    width = max(len(line[0]) for line in lines)
    title = "{transport}, {topology} ({ranks} ranks on {nodes} nodes), {mbit} Mbit/s, {parameters:,} parameters"
    fastest = max(row["port_mbit"] for row in rows)
    limit = f"no case reaches the rate: at most {fastest} Mbit/s; processors are the limit\n"
    body = columns([[line[0].ljust(width), *line[1:]] for line in lines])
    return f"{title.format(**first)}\n{body}\n{limit if fastest < NEAR * first['mbit'] else ''}"


def head(version: str, named: bool) -> list[str]:
    """Return the headings of one version's columns."""
    return [f"{version}: sent MB" if named else "sent MB", "left nodes", "port MB", "Mbit/s", "s", "ratio", "quartiles"]


def cells(row: dict[str, Any]) -> list[str]:
    """Return one version's columns."""
    amounts = [row[f"{what}_bytes"] for what in ("payload", "away", "port")]
    megabytes = ["-" if amount is None else f"{amount / 1e6:.1f}" for amount in amounts]
    low, high = row["ratio_quartiles"]
    times = f"{row['seconds']:.3f}", f"{row['ratio']:.2f}", f"[{low:.2f}, {high:.2f}]"
    return [*megabytes, str(row["port_mbit"]), *times]


# --------------------------------------------------------------------------------------------------- the command line


def topology(word: str) -> Topology:
    """Return the topology of a word such as 2x4."""
    match = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", word)
    found = Topology(*map(int, match.groups())) if match else Topology(0, 0)
    if not (2 <= found.nodes <= 16 and 1 <= found.per_node <= 16):
        raise argparse.ArgumentTypeError(f"'{word}' must be 2 to 16 nodes times 1 to 16 ranks, such as 2x4")
    return found


def parse() -> argparse.Namespace:
    """Read the command line; a wrong one is one message and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--transport", nargs="+", choices=("gloo", "mpi"), help="default: both; gloo for --timeline")
    add("--topology", nargs="+", type=topology, metavar="NODESxRANKS", help="default: 4x1; 2x2 for --timeline")
    add("--ranks", type=positive, metavar="N", help="short for --topology Nx1")
    add("--mbit", nargs="+", type=positive, help="rates of the links; default: 1000; 1000 10000 for --timeline")
    add("--parameters", type=positive, default=11_200_000)
    add("--turns", type=positive, default=5, help="measurements per case and launch, or rounds to draw one of")
    add(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="CASE",
        help=f"default: all of {', '.join(CASES)}",
    )
    add("--against", type=Path, metavar="CHECKOUT", help="a folder with another version of fedmpi, measured as well")
    add("--launches", type=positive, help="of each version; default: 1; 4 with --against")
    add("--timeline", type=Path, metavar="FILE.png", help="draw one round over time instead (needs matplotlib)")
    add("--json", action="store_true", help="print one JSON object per line")
    add("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        if problem := trouble(options):
            parser.error(problem)
        complete(options)
    return options


def trouble(options: argparse.Namespace) -> str:
    """Return what is wrong with the options or this machine; '' if nothing is."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    several = [f"--{name}" for name in ("transport", "topology") if len(getattr(options, name) or ()) > 1]
    checks = {
        "--ranks and --topology exclude each other": options.ranks and options.topology,
        f"--ranks {options.ranks} must be 2 to 16": options.ranks and not 2 <= options.ranks <= 16,
        f"--against {options.against} has no fedmpi/__init__.py": options.against
        and not (options.against / "fedmpi" / "__init__.py").is_file(),
        f"--timeline draws one {' and one '.join(several)}": options.timeline and several,
        f"--timeline {options.timeline} must end in .png": options.timeline and options.timeline.suffix != ".png",
        f"--timeline {options.timeline} is in no folder": options.timeline and not options.timeline.parent.is_dir(),
        "--timeline needs matplotlib": options.timeline and importlib.util.find_spec("matplotlib") is None,
        f"{' and '.join(missing)} not found; install iproute2": missing,
        "network namespaces are made by root only; start it with sudo": os.geteuid() != 0,
    }
    return next((message for message, wrong in checks.items() if wrong), "")


def complete(options: argparse.Namespace) -> None:
    """Fill in what was not given."""
    drawn = options.timeline is not None
    options.transport = options.transport or (["gloo"] if drawn else ["gloo", "mpi"])
    options.mbit = options.mbit or ([1000, 10_000] if drawn else [1000])
    usual = Topology(2, 2) if drawn else Topology(4, 1)
    options.topology = options.topology or [Topology(options.ranks, 1) if options.ranks else usual]
    wanted = {*options.cases, *(CASES[key].baseline for key in options.cases)}
    options.cases = [key for key in CASES if key in wanted]
    options.versions = {"this": REPO}
    if options.against:
        options.versions["against"] = options.against.resolve()
    options.launches = options.launches or (4 if options.against else 1)


def print_tables(options: argparse.Namespace) -> None:
    """Measure every transport over every topology and rate."""
    for shape, mbit in itertools.product(options.topology, options.mbit):
        with network(shape.nodes, mbit) as (_, *names):
            for transport in options.transport:
                rows = compare(options, transport, shape, mbit, names)
                lines = map(json.dumps, rows) if options.json else [table(rows, list(options.versions))]
                print(*lines, sep="\n", flush=True)


def draw_timeline(options: argparse.Namespace) -> None:
    """Record the median of several rounds at every rate with every version; draw them, and print their numbers."""
    panels, shape = [], options.topology[0]
    words = [str(options.parameters), str(options.turns), "timeline"]
    for mbit in options.mbit:
        with network(shape.nodes, mbit) as (hub, *names):
            for version, folder in options.versions.items():
                with timeline.sampled(hub, shape.nodes, mbit) as samples:
                    rounds = launch(options.transport[0], names, shape.per_node, folder, words)
                panel = timeline.panel(rounds, samples, mbit)
                about = {"transport": options.transport[0], "topology": str(shape), "nodes": shape.nodes}
                about |= {"ranks": shape.ranks, "mbit": mbit, "parameters": options.parameters, "version": version}
                print(json.dumps(about | panel.numbers) if options.json else panel.describe(about), flush=True)
                panels.append((about, panel))
    timeline.draw(panels, options.timeline)


def main() -> None:
    options = parse()
    if options.rank:
        work(*options.rank)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the end of `network`
    try:
        (draw_timeline if options.timeline else print_tables)(options)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"the network could not be made: {error}: {str(error.stderr or '').strip()}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
