"""One contract for every transport, and the errors when a rank is gone."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from conftest import _gloo_rank, rank_environment
from contract import check_contract
from torch.distributed import FileStore, PrefixStore, TCPStore

from fedmpi.comm import Comm, SoloComm, node, pick
from fedmpi.comm.env import Place
from fedmpi.comm.mpi import bits, numbers
from fedmpi.comm.node import create, share_node
from fedmpi.comm.sealed import SealedStore, serve
from fedmpi.comm.threads import run_threads
from fedmpi.comm.torch import connect_torch, first_line
from fedmpi.errors import RunError, UserError

HERE = Path(__file__).parents[1]


def test_contract_alone() -> None:
    check_contract(SoloComm())


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_contract_over_threads(size: int) -> None:
    run_threads(size, check_contract)


def contract_sent_and_shared(comm: Comm) -> None:
    """Check the contract without shared memory, on one node, and on two nodes of unequal size."""
    check_contract(comm)
    share_node(comm)
    assert comm.node is not None and comm.node.ranks == list(range(comm.size))
    check_contract(comm)
    rows = comm.rows(4, torch.int64)
    assert rows.block is None and len(rows.near[comm.rank]) == comm.size
    comm.barrier()  # the first rank of the node unlinks the files when all have mapped them
    check_reach(comm)
    share_node(comm, node=min(comm.rank, 1))
    assert comm.node.ranks == ([0] if comm.rank == 0 else list(range(1, comm.size)))
    check_contract(comm)
    check_sharing_refused(comm)


def check_reach(comm: Comm) -> None:
    """Check that a rank maps no row between two others: it never sees another client's full tensor."""
    maps = Path("/proc/self/maps").read_text()
    pairs = {(int(a), int(b)) for a, b in re.findall(r"/fedmpi-\w+-\d+-\d+/(\d+)-(\d+) \(deleted\)", maps)}
    assert pairs == {(comm.rank, r) for r in comm.others} | {(r, comm.rank) for r in comm.others}


def check_sharing_refused(comm: Comm) -> None:
    """Check the fallback: if one rank cannot share memory, none does, and no file is left behind."""
    share_node(comm)
    assert comm.node is not None
    if comm.rank == comm.size - 1:
        comm.node.folder = Path("/nowhere/at/all")
    warnings: list[str] = []
    logger = logging.getLogger("fedmpi")
    logger.addFilter(lambda record: warnings.append(record.getMessage()) or False)
    rows = comm.rows(10, torch.float32)
    assert rows.block is not None and comm.vector(2) is not None
    assert [w for w in warnings if "cannot share that much memory" in w] or comm.rank != comm.size - 1
    check_contract(comm)
    if comm.rank != comm.size - 1:
        assert not list(comm.node.folder.parent.glob(comm.node.folder.name + "*"))


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, 3])
def test_contract_over_gloo(size: int, gloo: Callable[..., None]) -> None:
    gloo(size, contract_sent_and_shared)


def test_a_file_system_without_room_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        create(tmp_path / "huge", 2**58, torch.float32)
    row = create(tmp_path / "row", 5, torch.int64)
    assert row.tolist() == [0] * 5 and (tmp_path / "row").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        create(tmp_path / "row", 5, torch.int64)


@pytest.mark.launchers
@pytest.mark.parametrize("size", [1, 2, 3])
def test_contract_over_mpi(size: int, mpiexec: list[str]) -> None:
    command = [*mpiexec, "-n", str(size), sys.executable, "-m", "mpi4py", str(HERE / "contract.py")]
    done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kept the contract") == size


def hang(comm: Comm, culprit: int) -> None:
    rows = comm.rows(1000, torch.float32)
    if comm.rank == culprit:
        time.sleep(8)  # alive, but takes no part
        return
    with pytest.raises(RunError, match=rf"rank {culprit} of {comm.size} did not answer: hung .* the timeout of 2 s"):
        comm.start({r: rows.mine[r] for r in comm.others}, {r: torch.zeros(1000) for r in comm.others})()


def die(comm: Comm, culprit: int) -> None:
    comm.barrier()
    if comm.rank == culprit:
        time.sleep(0.5)  # the others have left the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RunError, match=rf"rank {culprit} of {comm.size} did not answer: dead"):
        comm.sum(torch.zeros(3_000_000))  # noticed by the closed connection: the timeout is longer than the test


def vanish(comm: Comm) -> None:
    """End the last rank while memory is being shared; the others raise an error and clean up."""
    share_node(comm)
    assert comm.node is not None
    if comm.rank == comm.size - 1:
        node.attach = lambda *_: os._exit(7)
    with pytest.raises(RunError, match="did not answer"):
        comm.rows(10, torch.float32)
    if comm.node.leads:
        assert not list(Path("/dev/shm").glob(comm.node.folder.name + "*"))


@pytest.mark.processes
def test_a_dead_rank_leaves_no_shared_memory(tmp_path: Path) -> None:
    assert run_ranks(3, vanish, tmp_path) == [0, 0, 7]


def run_ranks(size: int, work: Callable[..., None], folder: Path, *args: object) -> list[int | None]:
    """Return the exit codes of ranks. Unlike `spawn`, this does not end the others when one of them ends."""
    context = torch.multiprocessing.get_context("spawn")
    meeting = str(folder / "meeting")
    ranks = [context.Process(target=_gloo_rank, args=(r, size, meeting, 600.0, work, args)) for r in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90)
    return [process.exitcode for process in ranks]


@pytest.mark.processes
def test_gloo_names_the_rank_that_hangs(gloo: Callable[..., None]) -> None:
    gloo(3, hang, 1, timeout=2.0)


@pytest.mark.processes
def test_gloo_names_the_rank_that_died(tmp_path: Path) -> None:
    assert run_ranks(3, die, tmp_path, 2) == [0, 0, -signal.SIGKILL]


HANG_MPI = """
import sys, time, torch
from mpi4py import MPI
from fedmpi.comm.mpi import MpiComm
comm = MpiComm(MPI.COMM_WORLD, timeout=2.0)
comm.barrier()
if comm.rank == 1:
    time.sleep(30)
try:
    comm.sum(torch.zeros(10))
except Exception as error:
    print(f"rank {comm.rank}: {error}", flush=True)
    comm.abort(1)
"""


@pytest.mark.launchers
def test_mpi_names_the_rank_that_hangs_and_ends_the_job(mpiexec: list[str]) -> None:
    command = [*mpiexec, "-n", "3", sys.executable, "-c", HANG_MPI]
    done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    for rank in (0, 2):
        assert f"rank {rank}: rank 1 of 3 did not answer: hung for longer than the timeout of 2 s" in done.stdout


def test_threads_name_the_missing_rank() -> None:
    def work(comm: Comm) -> None:
        if comm.rank != 1:
            comm.start({0: torch.zeros(2)}, {1: torch.zeros(2)})()

    with pytest.raises(RunError, match=r"no answer from ranks \[1\]"):
        run_threads(3, work, timeout=0.2)


def test_an_abort_reaches_the_other_threads() -> None:
    def work(comm: Comm) -> None:
        if comm.rank == 1:
            comm.abort(3)
        comm.barrier()

    with pytest.raises(RunError, match="not all ranks reached a barrier"):
        run_threads(2, work, timeout=5)


def test_mpi_sends_a_tensor_from_where_it_lies() -> None:
    x = torch.arange(6.0)
    assert numbers(x).ctypes.data == x.data_ptr()
    assert bits(half := x.bfloat16()).ctypes.data == half.data_ptr()
    with pytest.raises(UserError, match="bfloat16 cannot be summed over MPI"):
        numbers(half)


@pytest.mark.parametrize(
    ("which", "launcher", "size", "chosen"),
    [
        ("auto", "alone", 1, "solo"),
        ("auto", "torchrun", 4, "torch"),
        ("auto", "mpi", 4, "mpi"),
        ("torch", "mpi", 4, "torch"),
        ("auto", "srun", 2, "torch"),
        ("mpi", "srun", 2, "mpi"),
        ("mpi", "alone", 1, "mpi"),
        ("torch", "alone", 1, "solo"),
    ],
)
def test_the_transport_follows_the_launcher(which: str, launcher: str, size: int, chosen: str) -> None:
    assert pick(which, Place(launcher, 0, size, 0, size)) == chosen


def test_an_unknown_transport_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(UserError, match="did you mean 'torch'"):
        pick("torhc", Place("alone", 0, 1, 0, 1))


LEFT = """
import gc, os, sys, time, weakref
import torch.distributed as dist
import torch
from fedmpi.comm.torch import TorchComm

def threads():
    return {open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")}

comm = TorchComm(dist.FileStore(sys.argv[1], 1), 0, 1, torch.device("cpu"), 30.0)
group = weakref.ref(dist.group.WORLD)
deadline = time.monotonic() + 10
while not any("gloo" in name for name in threads()):  # they name themselves
    assert group() is not None and time.monotonic() < deadline
import torch.distributed.nn.functional
comm.close()
gc.collect()
assert group() is None, gc.get_referrers(group())
assert not any("gloo" in name for name in threads()), threads()
"""


@pytest.mark.processes
def test_nothing_holds_a_process_group_that_is_closed(tmp_path: Path) -> None:
    """Static destructors would find its threads alive, and abort the process."""
    environ = rank_environment() | {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", LEFT, str(tmp_path / "store")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_value_without_the_right_seal_is_refused(tmp_path: Path) -> None:
    inner = FileStore(str(tmp_path / "store"), 1)
    ours, theirs = SealedStore(inner, "secret"), SealedStore(inner, "another")
    ours.set("key", b"value")
    assert ours.get("key") == b"value" and PrefixStore("k", ours) is not None
    for forge in (
        lambda: inner.set("key", "value"),
        lambda: inner.set("key", ""),
        lambda: theirs.set("key", b"value"),
        lambda: inner.set("key", inner.get("other")),
    ):
        ours.set("other", b"value")
        forge()
        with pytest.raises(RunError, match="holds 'key' without the seal of this run"):
            ours.get("key")
    assert ours.add("count", 2) == 2 and ours.check(["other"]) and not ours.check(["nothing"])


def over_tcp(rank: int, port: int, forged: bool) -> None:
    """Run one of two ranks at a port of 127.0.0.3; rank 1 may be an attacker without the secret."""
    place = Place("srun", rank, 2, rank, 2)
    world = {"MASTER_ADDR": "127.0.0.3", "MASTER_PORT": str(port), "FEDMPI_SECRET": "known to the ranks"}
    if rank == 1 and forged:
        store = TCPStore("127.0.0.3", port, 2, False, timedelta(seconds=30), wait_for_workers=False)
        for key in ("fedmpi/device/1", "fedmpi/0//cpu//0/1"):
            store.set(key, "\0" * 200)
        return
    if forged:
        with pytest.raises(RunError, match="without the seal of this run"):
            connect_torch(place, torch.device("cpu"), 30.0, world)
        return
    comm = connect_torch(place, torch.device("cpu"), 30.0, world)
    x = torch.ones(3)
    comm.sum(x)
    assert x.tolist() == [2, 2, 2]
    if rank == 0:
        listening = Path("/proc/net/tcp").read_text()
        assert f"0300007F:{port:04X} 00000000:0000 0A" in listening, "at the address that was given"
        assert f" 00000000:{port:04X} " not in listening, "and at no other"
        assert f" {'0' * 32}:{port:04X} " not in Path("/proc/net/tcp6").read_text()
    comm.barrier()
    comm.close()


@pytest.mark.processes
@pytest.mark.timeout(100)
@pytest.mark.parametrize("forged", [False, True])
def test_ranks_meet_at_one_address_through_sealed_values(forged: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.3", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(over_tcp, (port, forged), nprocs=2)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RunError, match="is in use"):
        serve("127.0.0.1", taken.getsockname()[1], 2, True, timedelta(seconds=5))


def test_the_last_error_of_nccl_is_what_is_shown() -> None:
    text = (
        "NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.29.7\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"
    )
    assert first_line(RuntimeError(text)) == "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"
    assert first_line(RuntimeError("[x.cc:12] Connection closed by peer. Maybe dead.")) == "Connection closed by peer"
