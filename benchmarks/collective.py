"""Measure the masked collective as a ratio to the transport's own plain float32 all-reduce of the same vector.

    python benchmarks/collective.py                       # gloo and MPI, 2 and 4 ranks, 11.2 million parameters
    python benchmarks/collective.py --ranks 2 --transport gloo --json
    python benchmarks/collective.py --device cuda         # over NCCL, with sums on the devices: a GPU for each rank

Measured is what a round does between local training and the next model, by the code that does it: from every rank's
sums to the new model on every rank (exchange of sums and votes, mask, statistics, server step, gather).
The all-reduce leaves its result on every rank too. Both are run in turn; each turn gives a ratio of the slowest
ranks' times, and the median over the turns is printed.

Cases: float32 and exact with five clients a rank, and float32 with one client a rank, where no votes need to travel.
On one node the ranks share memory; --send makes them send, as they do between nodes (benchmarks/link.py has a link
between them), and adds a case with bf16 on the wire.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from kit import device as a_device
from kit import median, positive, quartiles

from fedmpi.aggregate.compress import nothing_unsent
from fedmpi.aggregate.sums import Sums, Totals
from fedmpi.algorithms import Algorithm
from fedmpi.clients.task import ALIGNED
from fedmpi.cohort import Cohort
from fedmpi.comm import Comm, connect, share_node
from fedmpi.comm.env import find_place
from fedmpi.device import CPU, device_of, set_up, synchronise
from fedmpi.flat import Layout
from fedmpi.local import sgd
from fedmpi.masks import MASKS, make_mask
from fedmpi.rounds import State, move_model
from fedmpi.server import ServerKnobs, make_server

CASES = {
    "float32": ("float32", 5, "float32"),
    "float32, one client a rank": ("float32", 1, "float32"),
    "exact": ("exact", 5, "float32"),
    "bf16 on the wire": ("float32", 5, "bf16"),
}


def plain_all_reduce(comm: Comm, x: torch.Tensor) -> Callable[[], object]:
    """The transport's own all-reduce of x, in place."""
    if comm.name == "mpi":
        from mpi4py import MPI

        return lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x.numpy())
    import torch.distributed as dist

    return lambda: dist.all_reduce(x)


def slowest(comm: Comm, work: Callable[[], object], device: torch.device = CPU) -> float:
    """Seconds that the slowest rank took."""
    synchronise(device)
    comm.barrier()
    started = time.perf_counter()
    work()
    synchronise(device)
    times = torch.zeros(comm.size, dtype=torch.float64)
    times[comm.rank] = time.perf_counter() - started
    comm.sum(times)
    return float(times.max())


def masked(
    comm: Comm, params: int, how: str, clients: int, mask: str, wire: str = "float32", device: torch.device = CPU
) -> Callable[[], object]:
    """Return one masked aggregation over sums that are already filled."""
    layout = Layout((), params, params, (), 1 if device == CPU else ALIGNED)
    length = layout.padded(comm.size)
    algorithm = Algorithm(sgd(0.01), make_mask(mask, 0.4), make_server("sgd", ServerKnobs()))
    model_N = comm.vector(length // comm.size, device)
    everybody = clients * comm.size
    rule = algorithm.local
    sums = Sums(
        comm,
        layout,
        rule,
        cohort=everybody,
        clients=everybody,
        kind=how,
        wire=wire,
        device=device,
        model_N=model_N,
    )
    cids, ranks = tuple(range(everybody)), tuple(cid % comm.size for cid in range(everybody))
    cohort, no_ints = Cohort(cids, (600,) * everybody, ranks), torch.zeros(0, dtype=torch.int64)
    sums.reset(cohort, 1, no_ints)
    rng = torch.Generator().manual_seed(comm.rank)
    for _ in range(clients):
        sums.deltas.add((torch.randn(length, generator=rng) * 1e-3).to(device), 600)
    unsent = nothing_unsent(model_N, length // comm.size) if wire == "bf16" else {}
    state = State(0, model_N, no_ints, {}, unsent=unsent)
    totals = Totals(cohort.total, 0.0, cids, (), no_ints)
    return lambda: move_model(state, algorithm, totals, sums)


def measure(comm: Comm, params: int, turns: int, mask: str, device: torch.device) -> list[dict[str, object]]:
    """The rows of one transport on one number of ranks."""
    plain = plain_all_reduce(comm, torch.zeros(params, device=device))
    torchs = torch.distributed.get_default_backend_for_device(device)
    rows = []
    for case, (how, clients, wire) in CASES.items():
        if wire == "bf16" and comm.node is not None:
            continue  # what is shared is not rounded
        work = masked(comm, params, how, clients, mask, wire, device)
        for warm_up in (plain, work):
            slowest(comm, warm_up, device)
        pairs = [(slowest(comm, plain, device), slowest(comm, work, device)) for _ in range(turns)]
        ratios = sorted(mine / theirs for theirs, mine in pairs)
        rows.append(
            {
                "transport": "mpi" if comm.name == "mpi" else torchs,
                "ranks": comm.size,
                "sum": how,
                "case": case,
                "mask": mask,
                "shared_memory": comm.node is not None,
                "parameters": params,
                "ratio": median(ratios),
                "ratio_quartiles": quartiles(ratios),
                "all_reduce_ms": round(1e3 * statistics.median(t for t, _ in pairs), 1),
                "masked_ms": round(1e3 * statistics.median(m for _, m in pairs), 1),
            }
        )
    return rows


def work(params: str, turns: str, send: str, mask: str, wanted: str) -> None:
    """What each rank does; rank 0 prints its rows."""
    torch.set_num_threads(1)
    place = find_place(os.environ)
    device = device_of(place.local_rank, wanted)
    set_up(device, deterministic=True)
    comm = connect("auto", place, device, 300.0, os.environ)
    if device == CPU and not int(send):
        share_node(comm)
    rows = measure(comm, int(params), int(turns), mask, device)
    if comm.rank == 0:
        for row in rows:
            print(json.dumps(row), flush=True)
    comm.close()


def launch(
    transport: str, ranks: int, params: int, turns: int, send: bool, mask: str, device: str = "cpu"
) -> list[dict[str, object]]:
    """Run the ranks under their own launcher and collect rank 0's rows."""
    bin_folder = Path(sys.executable).parent
    torchrun = [str(bin_folder / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]
    mpiexec = [
        str(bin_folder / "mpiexec") if (bin_folder / "mpiexec").exists() else "mpiexec",
        "-n",
        str(ranks),
        sys.executable,
    ]
    given = map(str, [params, turns, int(send), mask, device])
    command = [*(mpiexec if transport == "mpi" else torchrun), __file__, "--rank", *given]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=900, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", nargs="+", choices=("gloo", "mpi"), help="gloo and MPI, if the device is cpu")
    parser.add_argument("--ranks", nargs="+", type=positive, default=[2, 4])
    parser.add_argument("--parameters", type=positive, default=11_200_000)
    parser.add_argument("--turns", type=positive, default=31, help="measurements per case; the median is printed")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--send", action="store_true", help="send between the ranks, although they are on one node")
    parser.add_argument("--mask", choices=MASKS, default="gma", help="sand sends the squares of the deltas too")
    parser.add_argument("--device", type=a_device, default="cpu", help="as of 'fedmpi train'")
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        work(*options.rank)
        return
    if options.transport and options.device != "cpu":
        parser.error(f"--transport is for the cpu; with --device {options.device} it is the device's own")
    given = (options.parameters, options.turns, options.send, options.mask, options.device)
    for transport in options.transport or (["gloo", "mpi"] if options.device == "cpu" else ["torch"]):
        for ranks in options.ranks:
            for row in launch(transport, ranks, *given):
                show = (
                    "{transport:5} {ranks} ranks  {case:27} ratio {ratio:5.2f}  quartiles {ratio_quartiles}"
                    "  {masked_ms} ms to {all_reduce_ms} ms"
                )
                print(json.dumps(row) if options.json else show.format(**row), flush=True)


if __name__ == "__main__":
    main()
