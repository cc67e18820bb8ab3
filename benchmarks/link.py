"""Measure the collective over a network link, on 4 ranks with a link of 1 Gbit/s each.

    sudo python benchmarks/link.py                     # gloo and MPI, 11.2 million parameters
    sudo python benchmarks/link.py --transport gloo --mbit 10000 --json

The ranks run on this machine, each in a network namespace of its own, joined by a bridge in one more; `tc` (tbf) holds
every port of the bridge to the rate, in both directions, as a switch would. The namespaces are made by this command,
nothing but its ranks talks in them, and they are removed when it ends. That needs root, `ip` and `tc`.

Compared with the transport's own all-reduce of the same vector in float32 (the plain mean, without votes) are: the
masked collective as a round runs it, from filled sums to the new model on every rank, with five clients a rank; and
the same arithmetic gathered on rank 0, which masks and sends the model back to all: of each rank's sums, and of each
client's delta. All are run in turn; printed are medians over the turns: seconds of the slowest rank, the ratio to the
all-reduce of the same turn, the payload over all ranks, and the bytes of the busiest port in its busier direction, as
the interface counted them, with the rate that it had.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # the ranks are started from anywhere
from collective import masked, plain_all_reduce, slowest
from kit import median, positive, quartiles

from fedmpi.comm import Comm, connect
from fedmpi.comm.env import find_place
from fedmpi.masks import make_mask

CLIENTS = 5  # a rank
SUBNET = "10.213.77"
PORT = 29500  # in a namespace of its own: nobody else has it
LIMIT = 600  # seconds for the ranks of one transport
COUNTERS = Path("/sys/class/net/eth0/statistics")
MPI_OVER_TCP = {  # MPICH would notice that the ranks are on one machine, and use its memory
    "MPIR_CVAR_NOLOCAL": "1",
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "eth0",
}


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=20)


@contextmanager
def network(ranks: int, mbit: int) -> Iterator[list[str]]:
    """Network namespaces, one a rank, joined by a bridge in one more; gives their names, removes them at the end."""
    names = [f"fedmpi-{os.getpid()}-{r}" for r in range(ranks)]
    hub = f"fedmpi-{os.getpid()}-hub"
    # A queue of 8 MB: ports that several ranks send to drop little, as a switch with buffers would.
    shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "limit", "8mb")
    try:
        for name in (hub, *names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "br0", "up")
        for r, name in enumerate(names):
            run("ip", "-n", hub, "link", "add", f"port{r}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "-n", hub, "link", "set", f"port{r}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"{SUBNET}.{r + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape)
            run("tc", "-n", hub, "qdisc", "add", "dev", f"port{r}", *shape)
        yield names
    finally:
        for name in (hub, *names):
            subprocess.run(("ip", "netns", "del", name), stderr=subprocess.DEVNULL, timeout=20)


def launch(transport: str, names: list[str], words: list[str]) -> list[dict[str, object]]:
    """Start a rank in each namespace and collect rank 0's rows; what was started is ended, however this ends."""
    command = [sys.executable, __file__, "--rank", *words]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # addresses in here have no names
    common = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"} | MPI_OVER_TCP | quiet
    with tempfile.TemporaryDirectory() as folder:
        if transport == "mpi":
            started = [start_mpi(Path(folder), names, command, common)]
        else:
            started = []
            for r, name in enumerate(names):
                place = {"RANK": str(r), "WORLD_SIZE": str(len(names)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
                meeting = {"MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": str(PORT)}
                started.append(start(["ip", "netns", "exec", name, *command], common | place | meeting))
        try:
            out = started[0].communicate(timeout=LIMIT)[0]
            codes = [process.wait(timeout=30) for process in started]
        finally:
            for process in started:
                end(process)
    if any(codes):
        raise SystemExit(f"the ranks of {transport} ended with the codes {codes}; what they said is above")
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def start(command: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True)


def start_mpi(folder: Path, names: list[str], command: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    """MPICH's mpiexec in the first namespace, with a way into the others in place of ssh."""
    here = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(here) if here.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise SystemExit("mpiexec was not found: pip install mpich, or give --transport gloo")
    hosts = [f"{SUBNET}.{r + 1}" for r in range(len(names))]
    cases = "".join(f"{host}) name={name};;\n" for host, name in zip(hosts, names, strict=True))
    enter = folder / "enter"
    enter.write_text(
        "#!/bin/sh\n# in place of ssh: [options] host command...\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        f'case "$1" in\n{cases}esac\nshift\nexec ip netns exec "$name" sh -c "$*"\n'
    )
    enter.chmod(0o700)
    options = ["-launcher", "ssh", "-launcher-exec", str(enter), "-hosts", ",".join(hosts), "-iface", "eth0"]
    return start(
        ["ip", "netns", "exec", names[0], mpiexec, *options, "-ppn", "1", "-n", str(len(names)), *command],
        environ,
    )


def end(process: subprocess.Popen[str]) -> None:
    """End a process that was started here, and what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)


# ---------------------------------------------------------------------------------------------- what each rank does


def central(comm: Comm, params: int, each_client: bool) -> Callable[[], object]:
    """Rank 0 gets every rank's sums and votes, or every client's delta; it masks, and sends the model to all."""
    mask, generator = make_mask("gma", 0.4), torch.Generator().manual_seed(comm.rank)
    delta, model = torch.randn(params, generator=generator) * 1e-3, torch.zeros(params)
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

    return work


def works(comm: Comm, params: int) -> Iterator[tuple[str, Callable[[], object], int]]:
    """What is compared: its name, what it does, and the payload over all ranks, 0 where the transport counts it."""
    others = comm.size - 1
    yield "plain all-reduce (mean)", plain_all_reduce(comm, torch.zeros(params)), 8 * params * others
    yield "GMA float32", masked(comm, params, "float32", CLIENTS, "gma"), 0
    yield "GMA float32, one client a rank", masked(comm, params, "float32", 1, "gma"), 0
    yield "GMA exact", masked(comm, params, "exact", CLIENTS, "gma"), 0
    yield "GMA bf16 on the wire", masked(comm, params, "float32", CLIENTS, "gma", "bf16"), 0
    yield "GMA on rank 0, of sums", central(comm, params, False), (4 + 1 + 4) * params * others
    yield "GMA on rank 0, of each delta", central(comm, params, True), (4 * CLIENTS + 4) * params * others


def counters() -> torch.Tensor:
    """Bytes that this rank's interface has sent and received."""
    return torch.tensor([int((COUNTERS / f"{way}_bytes").read_text()) for way in ("tx", "rx")])


def observe(comm: Comm, work: Callable[[], object]) -> tuple[float, int, int]:
    """Seconds of the slowest rank, payload over all ranks, bytes of the busiest port in its busier direction."""
    before, payload = counters(), comm.sent
    seconds = slowest(comm, work)
    seen = torch.zeros(comm.size, 3, dtype=torch.int64)
    seen[comm.rank, 0] = comm.sent - payload - 2 * 8 * comm.size * (comm.size - 1) // comm.size  # less the times
    seen[comm.rank, 1:] = counters() - before
    comm.sum(seen)
    return seconds, int(seen[:, 0].sum()), int(seen[:, 1:].max())


def measure(comm: Comm, params: int, turns: int, mbit: int) -> list[dict[str, object]]:
    """The table of one transport."""
    cases = list(works(comm, params))
    seen: dict[str, list[tuple[float, int, int]]] = {name: [] for name, _, _ in cases}
    for turn in range(turns + 1):  # the first one warms up
        for name, work, _ in cases:
            result = observe(comm, work)
            if turn:
                seen[name].append(result)
    plain = [seconds for seconds, _, _ in seen[cases[0][0]]]
    rows: list[dict[str, object]] = []
    for name, _, known in cases:
        ratios = sorted(mine / theirs for (mine, _, _), theirs in zip(seen[name], plain, strict=True))
        seconds, payload, port = (statistics.median(column) for column in zip(*seen[name], strict=True))
        rows.append(
            {
                "transport": "mpi" if comm.name == "mpi" else "gloo",
                "ranks": comm.size,
                "mbit": mbit,
                "parameters": params,
                "case": name,
                "payload_bytes": int(known or payload),
                "port_bytes": int(port),
                "seconds": round(seconds, 4),
                "ratio": median(ratios),
                "ratio_quartiles": quartiles(ratios),
                "port_mbit": round(8e-6 * port / seconds),
            }
        )
    return rows


def work(params: str, turns: str, mbit: str) -> None:
    """What each rank does; rank 0 prints its rows."""
    torch.set_num_threads(1)
    comm = connect("auto", find_place(os.environ), torch.device("cpu"), 120.0, os.environ)
    rows = measure(comm, int(params), int(turns), int(mbit))
    if comm.rank == 0:
        for row in rows:
            print(json.dumps(row), flush=True)
    comm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", nargs="+", choices=("gloo", "mpi"), default=["gloo", "mpi"])
    parser.add_argument("--ranks", type=positive, default=4, help="2 to 16")
    parser.add_argument("--mbit", type=positive, default=1000, help="rate of every link, in both directions")
    parser.add_argument("--parameters", type=positive, default=11_200_000)
    parser.add_argument("--turns", type=positive, default=5, help="measurements per case; the median is printed")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        work(*options.rank)
        return
    if not 2 <= options.ranks <= 16:
        parser.error(f"--ranks {options.ranks} must be 2 to 16")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        parser.error(f"{' and '.join(missing)} not found; install iproute2")
    if os.geteuid() != 0:
        parser.error("network namespaces are made by root only; start it with sudo")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the end of `network`
    show = (
        "{transport:5} {case:31} {payload_bytes:>13,} bytes  {port_bytes:>12,} at a port  {seconds:7.3f} s  "
        "ratio {ratio:5.2f}  quartiles {ratio_quartiles}  {port_mbit} Mbit/s"
    )
    try:
        with network(options.ranks, options.mbit) as names:
            for transport in options.transport:
                for row in launch(transport, names, [str(options.parameters), str(options.turns), str(options.mbit)]):
                    print(json.dumps(row) if options.json else show.format(**row), flush=True)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or f"exit code {error.returncode}"
        parser.error(f"the network could not be made: '{' '.join(error.cmd)}' said: {said}")
    except subprocess.TimeoutExpired:
        raise SystemExit(f"the ranks were not done after {LIMIT} s; fewer --turns or a larger --mbit help") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
