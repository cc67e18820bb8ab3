"""What every transport promises, as one function that each rank runs; as a script, it is run by ranks of MPI."""

from __future__ import annotations

import pytest
import torch

from fedmpi.comm import Comm, agreed
from fedmpi.errors import UserError

TRAVELLING = (torch.float32, torch.int64, torch.int32, torch.int8)


def check_contract(comm: Comm) -> None:
    assert 0 <= comm.rank < comm.size
    check_sum(comm)
    for dtype in TRAVELLING:
        check_exchange(comm, dtype, length=5)
    check_exchange(comm, torch.float32, length=400_000)
    check_two_under_way(comm)
    check_gather(comm)
    check_broadcast(comm)
    check_agreed(comm)
    for _ in range(3):
        comm.barrier()


def check_sum(comm: Comm) -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64):
        x = torch.arange(4, dtype=dtype) + comm.rank
        before = comm.sent
        comm.sum(x)
        ranks = sum(range(comm.size))
        assert x.tolist() == [comm.size * i + ranks for i in range(4)]
        assert comm.sent - before == 2 * x.nbytes * (comm.size - 1) // comm.size


def rows_of(comm: Comm, sender: int, dtype: torch.dtype, length: int) -> torch.Tensor:
    """What `sender` sends: every row tells from whom, to whom and which element it is."""
    to = torch.arange(comm.size).view(-1, 1)
    return ((sender * 31 + to * 7 + torch.arange(length)) % 100).to(dtype)


def check_exchange(comm: Comm, dtype: torch.dtype, length: int) -> None:
    send = rows_of(comm, comm.rank, dtype, length)
    recv = torch.full_like(send, 111)
    sent, received = comm.sent, comm.received
    comm.exchange(send.unbind(0), recv.unbind(0)).wait()
    for source in range(comm.size):
        if source == comm.rank:
            assert (recv[source] == 111).all(), "a rank's own row stays as it was"
        else:
            assert torch.equal(recv[source], rows_of(comm, source, dtype, length)[comm.rank])
    assert comm.sent - sent == comm.received - received == (comm.size - 1) * length * send.element_size()


def check_two_under_way(comm: Comm) -> None:
    """Two exchanges of different types, started before either is waited for, do not mix."""
    kinds = [(torch.float32, 1000), (torch.int8, 30), (torch.float32, 7)]
    recvs = [torch.zeros(comm.size, length, dtype=dtype) for dtype, length in kinds]
    sends = [rows_of(comm, comm.rank, dtype, length) for dtype, length in kinds]
    pending = [comm.exchange(s.unbind(0), r.unbind(0)) for s, r in zip(sends, recvs, strict=True)]
    for p in pending:
        p.wait()
    for (dtype, length), recv in zip(kinds, recvs, strict=True):
        for source in comm.others:
            assert torch.equal(recv[source], rows_of(comm, source, dtype, length)[comm.rank])


def check_gather(comm: Comm) -> None:
    want = torch.arange(3 * comm.size, dtype=torch.float32)
    mine = slice(3 * comm.rank, 3 * comm.rank + 3)
    out = torch.zeros(3 * comm.size)
    comm.gather(want[mine].clone(), out)
    assert torch.equal(out, want)
    out = torch.zeros(3 * comm.size)
    out[mine] = want[mine]
    comm.gather(out[mine], out)  # the slice lies in the vector already
    assert torch.equal(out, want)


def check_broadcast(comm: Comm) -> None:
    for root in range(comm.size):
        x = torch.full((5,), float(comm.rank))
        comm.broadcast(x, root)
        assert (x == root).all()


def check_agreed(comm: Comm) -> None:
    with agreed(comm):
        pass
    last = comm.size - 1
    for error, text in (
        (UserError("no such data; get some"), "no such data; get some"),
        (OSError("disk"), "OSError: disk"),
    ):
        with pytest.raises(UserError) as told, agreed(comm):
            if comm.rank == last:
                raise error
        assert str(told.value) == (f"rank {last}: " if comm.size > 1 else "") + text
    if comm.size > 1:
        with pytest.raises(UserError, match="^rank 0: rank zero's$"), agreed(comm):
            raise UserError("rank zero's" if comm.rank == 0 else "another")


def main() -> None:
    from mpi4py import MPI

    from fedmpi.comm.mpi import MpiComm

    comm = MpiComm(MPI.COMM_WORLD, timeout=60.0)
    check_contract(comm)
    with pytest.raises(UserError, match="bfloat16"):
        comm.sum(torch.zeros(2, dtype=torch.bfloat16))
    strided = torch.zeros(2, 2, dtype=torch.float64).t()[:, 0] + comm.rank  # numpy views it, MPI needs it contiguous
    comm.sum(strided)
    print(f"rank {comm.rank} of {comm.size} kept the contract", flush=True)
    comm.close()


if __name__ == "__main__":
    main()
