"""The contract of a transport, as a function that each rank runs; as a script, for the ranks of MPI."""

from __future__ import annotations

import pytest
import torch

from fedmpi.comm import Comm, Rows, agreed
from fedmpi.comm.links import Links
from fedmpi.comm.node import share_node
from fedmpi.errors import CommonError, FileError, UserError

TRAVELLING = (torch.float32, torch.int64, torch.int32, torch.int8, torch.bfloat16)


def check_contract(comm: Comm) -> None:
    assert 0 <= comm.rank < comm.size
    check_own(comm)
    check_sum(comm)
    for dtype in TRAVELLING:
        check_offer(comm, dtype, length=5)
    check_offer(comm, torch.float32, length=400_000)
    check_rows_again_and_again(comm)
    check_start(comm)
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


def fill(rows: Rows, rank: int, turn: int = 0, bucket: slice = slice(None)) -> None:
    """Write this rank's rows, or a bucket of them."""
    for s, mine in enumerate(rows.mine):
        mine[bucket] = row(rank, s, mine.dtype, len(mine), turn)[bucket]


def check_near(rows: Rows, turn: int = 0, bucket: slice = slice(None)) -> None:
    """The rows for its own slice and those it carries are readable by a rank, of every rank of its node."""
    for s, near in rows.near.items():
        for rank, found in zip(rows.links.mates, near, strict=True):
            assert torch.equal(found[bucket], row(rank, s, found.dtype, len(found), turn)[bucket])


def check_offer(comm: Comm, dtype: torch.dtype, length: int) -> None:
    rows = comm.rows(length, dtype)
    assert not any(r.any() for r in rows.mine), "made of zeros (another rank may be writing into its rows already)"
    assert list(rows.near) == [comm.rank, *rows.links.carried_by(comm.rank)] or len(rows.links.mates) == 1
    fill(rows, comm.rank)
    before = comm.sent
    comm.offer([rows])
    check_near(rows)
    for s, mine in enumerate(rows.mine):
        assert torch.equal(mine, row(comm.rank, s, dtype, length)), "what is offered stays as it was"
    assert comm.sent - before == (comm.size - len(rows.near)) * length * rows.mine[0].element_size()
    comm.barrier()


def check_rows_again_and_again(comm: Comm) -> None:
    """Offer two sets of rows of different types repeatedly, with a barrier between reading and writing."""
    large, small = comm.rows(1000, torch.float32), comm.rows(30, torch.int8)
    for turn in range(5):
        fill(large, comm.rank, turn)
        fill(small, comm.rank, turn)
        comm.offer([large, small])
        check_near(large, turn)
        check_near(small, turn)
        comm.barrier()


def check_start(comm: Comm) -> None:
    """Buckets of rows go to the owners of the slices; several are under way at once, each written when its turn comes.
    What arrives may be shorter than the memory for it."""
    rows = comm.rows(90_000, torch.int32)
    came = {r: torch.full((90_000,), -1, dtype=torch.int32) for r in rows.links.partners}
    buckets, waits = [slice(0, 50_000), slice(50_000, 89_999), slice(89_999, 90_000)], []
    before, away = comm.sent, comm.away
    for bucket in buckets:
        fill(rows, comm.rank, bucket=bucket)
        comm.offer([rows], bucket)
        check_near(rows, bucket=bucket)
        send = {s: rows.mine[s][bucket][: 1 + comm.rank] for s in rows.links.carried}
        waits.append(comm.start(send, {r: x[bucket] for r, x in came.items()}))
    for wait in waits:
        wait()
    for bucket in buckets:
        for r, found in came.items():
            want = row(r, comm.rank, torch.int32, 90_000)[bucket]
            want[1 + r :] = -1
            assert torch.equal(found[bucket], want)
    sent = len(rows.links.carried) * 4 * sum(min(1 + comm.rank, b.stop - b.start) for b in buckets)
    offered = (comm.size - len(rows.near)) * 90_000 * 4
    assert comm.sent - before == sent + offered
    others = [s for s in rows.links.carried if s not in comm.links.mates]
    assert comm.away - away == (sent if others else 0)
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
    before, links = comm.sent, comm.links if node else Links.apart(comm.rank, comm.size)
    if update is not None:
        update.mine_S.fill_(comm.rank + 0.5)
        own_S += update.mine_S
        comm.gather(x_N, [comm.start_gather(x_N, slice(0, 40), update)])
        assert comm.sent - before == 40 * (4 * (len(links.mates) - 1) + 2 * (len(links.nodes) - 1))
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
