"""The contract of a transport, as a function that each rank runs; as a script, for the ranks of MPI."""

from __future__ import annotations

import pytest
import torch

from fedmpi.comm import Comm, agreed
from fedmpi.comm.node import share_node
from fedmpi.errors import CommonError, FileError, UserError

TRAVELLING = (torch.float32, torch.int64, torch.int32, torch.int8, torch.bfloat16)


def check_contract(comm: Comm) -> None:
    assert 0 <= comm.rank < comm.size
    check_own(comm)
    check_sum(comm)
    for dtype in TRAVELLING:
        check_exchange(comm, dtype, length=5)
    check_exchange(comm, torch.float32, length=400_000)
    check_rows_again_and_again(comm)
    check_stream(comm)
    check_gather(comm)
    check_gather_in_buckets(comm)
    check_update(comm)
    check_broadcast(comm)
    check_agreed(comm)
    for _ in range(3):
        comm.barrier()


def check_own(comm: Comm) -> None:
    """Slices have equal length, are in rank order, and are views; a length not divisible by the size is an error."""
    x_N = torch.arange(4 * comm.size)
    assert comm.own(x_N).tolist() == [4 * comm.rank + i for i in range(4)]
    comm.own(x_N).zero_()
    assert x_N.tolist() == [0 if i // 4 == comm.rank else i for i in range(4 * comm.size)]
    if comm.size > 1:
        with pytest.raises(RuntimeError):
            comm.own(torch.zeros(4 * comm.size + 1))


def check_sum(comm: Comm) -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64):
        x = torch.arange(4, dtype=dtype) + comm.rank
        before = comm.sent
        comm.sum(x)
        ranks = sum(range(comm.size))
        assert x.tolist() == [comm.size * i + ranks for i in range(4)]
        assert comm.sent - before == 2 * x.nbytes * (comm.size - 1) // comm.size


def row(sender: int, to: int, dtype: torch.dtype, length: int, turn: int = 0) -> torch.Tensor:
    """Return the row that `sender` has for `to`: every element encodes sender, receiver and index."""
    return ((sender * 31 + to * 7 + turn * 3 + torch.arange(length)) % 100).to(dtype)


def check_exchange(comm: Comm, dtype: torch.dtype, length: int) -> None:
    rows = comm.rows(length, dtype)
    assert not any(r.any() for r in rows.mine), "made of zeros (another rank may be writing into theirs already)"
    assert rows.mine[comm.rank] is rows.theirs[comm.rank]
    for to in range(comm.size):
        rows.mine[to].copy_(row(comm.rank, to, dtype, length))
    before = comm.sent
    comm.exchange(rows)
    for source in range(comm.size):
        assert torch.equal(rows.theirs[source], row(source, comm.rank, dtype, length))
        assert torch.equal(rows.mine[source], row(comm.rank, source, dtype, length)), "what is offered stays as it was"
    assert comm.sent - before == (comm.size - 1) * length * rows.mine[0].element_size()
    comm.barrier()


def check_rows_again_and_again(comm: Comm) -> None:
    """Exchange two sets of rows of different types repeatedly, with a barrier between reading and writing."""
    large, small = comm.rows(1000, torch.float32), comm.rows(30, torch.int8)
    for turn in range(5):
        for rows in (large, small):
            for to, mine in enumerate(rows.mine):
                mine.copy_(row(comm.rank, to, mine.dtype, len(mine), turn))
        comm.exchange(large, small)
        for rows in (large, small):
            for source, theirs in enumerate(rows.theirs):
                assert torch.equal(theirs, row(source, comm.rank, theirs.dtype, len(theirs), turn))
        comm.barrier()


def check_stream(comm: Comm) -> None:
    """Buckets arrive in order, each prepared before it is sent; with `wire`, `out` is sent instead of `mine`."""
    large, narrow = comm.rows(90_000, torch.int32), comm.rows(90_000, torch.float32, wire=torch.bfloat16)
    away = [r for r in comm.others if r not in (narrow.shared or ())]
    assert sorted(narrow.out) == sorted(away)
    assert [x.dtype == torch.bfloat16 for x in narrow.theirs] == [r in away for r in range(comm.size)]
    buckets = [slice(0, 50_000), slice(50_000, 89_999), slice(89_999, 90_000)]
    prepared: list[slice] = []

    def prepare(bucket: slice) -> None:
        prepared.append(bucket)
        for rows in (large, narrow):
            for to, mine in enumerate(rows.mine):
                mine[bucket] = row(comm.rank, to, mine.dtype, len(mine))[bucket]
        for to, out in narrow.out.items():
            out[bucket] = 0.5 * narrow.mine[to][bucket]

    before = comm.sent
    for number, bucket in enumerate(comm.stream([large, narrow], buckets, prepare)):
        assert bucket == buckets[number] and prepared == buckets
        for source in range(comm.size):
            want = row(source, comm.rank, torch.int32, 90_000)[bucket]
            assert torch.equal(large.theirs[source][bucket], want)
            assert torch.equal(narrow.theirs[source][bucket].float(), want * (0.5 if source in away else 1.0))
    assert comm.sent - before == 90_000 * (8 * (comm.size - 1) - 2 * len(away))
    comm.barrier()


def check_gather_in_buckets(comm: Comm) -> None:
    """Several buckets are in flight at once, and a sum in between is not mixed up with them."""
    x_N = comm.vector(60_000)
    own_S = comm.own(x_N)
    buckets = [slice(0, 31_000), slice(31_000, 60_000)]
    before = comm.sent
    waits = []
    for bucket in buckets:
        own_S[bucket] = torch.arange(60_000.0)[bucket] + comm.rank
        waits.append(comm.start_gather(x_N, bucket))
    sent = comm.sent - before
    one = torch.ones(1)
    comm.sum(one)
    assert one.item() == comm.size
    comm.gather(x_N, waits)
    for rank, x_S in enumerate(x_N.view(comm.size, -1)):
        assert torch.equal(x_S, torch.arange(60_000.0) + rank)
    before = comm.sent
    comm.gather(x_N)
    assert comm.sent - before == sent
    comm.barrier()


def check_update(comm: Comm) -> None:
    """An update is added to the slice where it arrives, with the same result on all ranks."""
    x_N = comm.vector(40)
    own_S = comm.own(x_N)
    own_S.fill_(1.0)
    comm.gather(x_N)
    update = comm.update(x_N, torch.bfloat16)
    comm.barrier()
    node = comm.node if comm.node is not None and comm.node.holds(x_N) else None
    assert (update is None) == (comm.size == 1 or (node is not None and len(node.ranks) == comm.size))
    before = comm.sent
    if update is not None:
        update.mine_S.fill_(comm.rank + 0.5)
        own_S += update.mine_S
        comm.gather(x_N, [comm.start_gather(x_N, slice(0, 40), update)])
        neighbours, receivers = (len(node.ranks) - 1, len(node.other_leaders)) if node else (0, comm.size - 1)
        assert comm.sent - before == 40 * (4 * neighbours + 2 * receivers)
        assert x_N.view(comm.size, -1).tolist() == [[r + 1.5] * 40 for r in range(comm.size)]
    comm.barrier()


def check_gather(comm: Comm) -> None:
    x_N = comm.vector(3)
    mine = slice(3 * comm.rank, 3 * comm.rank + 3)
    assert x_N[mine].tolist() == [0.0] * 3
    for turn in range(3):
        want = torch.arange(3.0 * comm.size) + turn
        x_N[mine] = want[mine]
        comm.gather(x_N)
        assert torch.equal(x_N, want)
        comm.barrier()


def check_broadcast(comm: Comm) -> None:
    for root in range(comm.size):
        x = torch.full((5,), float(comm.rank))
        comm.broadcast(x, root)
        assert (x == root).all()


def check_agreed(comm: Comm) -> None:
    with agreed(comm):
        pass
    last = comm.size - 1
    for error, kind, text in (
        (UserError("no such data; get some"), UserError, "no such data; get some"),
        (FileError("it is damaged"), CommonError, "it is damaged"),
        (OSError(5, "Broken", "f"), CommonError, "'f' cannot be used (Broken); fix that and try again"),
        (OSError(36, "Too long", "f"), UserError, "'f' cannot be used (Too long); give another path"),
    ):
        with pytest.raises(kind) as raised, agreed(comm):
            if comm.rank == last:
                raise error
        assert str(raised.value) == (f"rank {last}: " if comm.size > 1 else "") + text
    if comm.size > 1:
        with pytest.raises(UserError, match="^rank 0: rank zero's$"), agreed(comm):
            raise UserError("rank zero's" if comm.rank == 0 else "another")


def main() -> None:
    from mpi4py import MPI

    from fedmpi.comm.mpi import MpiComm

    comm = MpiComm(MPI.COMM_WORLD, timeout=60.0)
    check_contract(comm)
    share_node(comm)
    check_contract(comm)
    with pytest.raises(UserError, match="bfloat16"):
        comm.sum(torch.zeros(2, dtype=torch.bfloat16))
    strided = torch.zeros(2, 2, dtype=torch.float64).t()[:, 0] + comm.rank  # numpy views it, MPI needs it contiguous
    comm.sum(strided)
    print(f"rank {comm.rank} of {comm.size} kept the contract", flush=True)
    comm.close()


if __name__ == "__main__":
    main()
