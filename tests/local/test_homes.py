"""What clients keep is shared by the ranks of a node: the same bits on every topology, one row never two clients', the
same error on all ranks, and checkpoints that are read by any other number of ranks."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import SIZES, algorithm, plain_model, plan, tasks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmpi.cohort import draw
from fedmpi.comm import Comm
from fedmpi.comm.blocks import NodeBlocks
from fedmpi.comm.node import share_node
from fedmpi.comm.threads import run_threads
from fedmpi.errors import CommonError, RunError
from fedmpi.local import Descent, Job, LocalResult, LocalRule, scaffold
from fedmpi.local.memory import Memory, Table
from fedmpi.rounds import State, begin, rounds
from fedmpi.runs.checkpoint import save
from fedmpi.runs.checkpoint.format import Fingerprint, Progress, rounds_in
from fedmpi.runs.checkpoint.load import find, restore
from fedmpi.runs.checkpoint.save import Saver
from fedmpi.runs.config import Checkpoint

PARAMS = tasks(1, plain_model)[0].layout.params
ROW = 4 * PARAMS
TOPOLOGIES: dict[str, list[int] | None] = {  # the node of each rank; None: nothing is shared
    "one": [0],
    "four": [0, 0, 0, 0],
    "two and two": [0, 0, 1, 1],
    "in turn": [0, 1, 0, 1],
    "three and one": [0, 0, 0, 1],
    "each alone": [0, 1, 2, 3],
    "none shared": None,
}
FINGERPRINT = Fingerprint({"threads": 1}, {})
SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None


def on_nodes(nodes: Sequence[int] | None, work: Callable[[Comm], Any]) -> list[Any]:
    """Run on thread ranks of these pretend nodes; three ranks that share nothing for None."""

    def start(comm: Comm) -> Any:
        if nodes is not None:
            share_node(comm, node=nodes[comm.rank])
        return work(comm)

    return run_threads(3 if nodes is None else len(nodes), start, timeout=30)


def failing_rule(spoil: dict[int, int]) -> LocalRule:
    """SCAFFOLD with a client that fails in some rounds."""
    rule = scaffold(Descent(0.05, 0.5))

    def run(job: Job) -> LocalResult:
        result = rule(job)
        if spoil.get(job.round) == job.cid:
            result.delta_P[3] = float("nan")
        return result

    return LocalRule(run, rule.sends, rule.keeps)


def kept(states: list[State]) -> dict[int, Tensor]:
    """Every client's memory, from the rank that owns it."""
    found = [(cid, state.memory.read(cid)["control"].clone()) for state in states for cid in state.memory]
    assert len(dict(found)) == len(found), "a client is owned by one rank"
    return dict(found)


def federation(
    nodes: Sequence[int] | None, last: int = 5, limit_rows: int | None = None, folder: Path | None = None
) -> tuple[list[State], list[list[tuple[int, int]]]]:
    """States after the last round, and for each rank which client it trained in which round."""
    how, algo = plan(rounds=last), algorithm("and", tau=1.0, local=failing_rule({2: lost(2), 4: lost(4)}))
    ours = tasks(3 if nodes is None else len(nodes), plain_model)

    def work(comm: Comm) -> tuple[State, list[tuple[int, int]]]:
        limit = 1 << 40 if limit_rows is None else limit_rows * ROW
        state = start = begin(ours[comm.rank], algo, comm, Memory(("control",), PARAMS, limit, folder))
        trained, sizes = [], ours[0].sizes
        for state, report in rounds(start, how, algo, ours[comm.rank], comm):
            cohort = draw(how.seed, report.round, sizes, how.cohort, comm.size, how.work, state.memory.homes)
            trained += [(report.round, cid) for cid in cohort.on(comm.rank)]
        return state, trained

    results = on_nodes(nodes, work)
    return [state for state, _ in results], [trained for _, trained in results]


def lost(round: int) -> int:
    return draw(11, round, np.array(SIZES), 5, 1).cids[1]


@pytest.fixture(scope="module")
def alone() -> tuple[Tensor, dict[int, Tensor]]:
    states, _ = federation([0])
    return states[0].model_N[:PARAMS].clone(), kept(states)


@pytest.mark.parametrize("limit_rows", [None, 2, 0])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_model_and_memories_are_the_same_bits_on_any_nodes(
    name: str, limit_rows: int | None, alone: tuple[Tensor, dict[int, Tensor]], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("fedmpi.local.memory.BLOCK_BYTES", 2 * ROW)
    folder, shared = tmp_path / "disk", tmp_path / "shm"
    folder.mkdir()
    shared.mkdir()
    monkeypatch.setattr("fedmpi.comm.node.MEMORY", shared)
    states, trained = federation(TOPOLOGIES[name], limit_rows=limit_rows, folder=folder)
    model, memories = alone
    for state in states:
        assert torch.equal(state.model_N[:PARAMS], model)
    found = kept(states)
    assert found.keys() == memories.keys() and all(torch.equal(found[cid], memories[cid]) for cid in memories)
    assert os.listdir(folder) == os.listdir(shared) == []
    assert any(state.memory.on_disk for state in states) == (limit_rows is not None)
    for state, theirs in zip(states, trained, strict=True):
        homes, rows = state.memory.homes, state.memory.in_memory // ROW
        assert homes is not None and all(state.memory.blocks.rank in homes.nodes[homes.node(c)] for _, c in theirs)
        mates = next(ranks for ranks in homes.nodes if state.memory.blocks.rank in ranks)
        assert limit_rows is None or rows <= limit_rows * len(mates)


def test_a_client_reads_what_another_rank_of_its_node_wrote() -> None:
    _, trained = federation(TOPOLOGIES["four"], last=6)
    where: dict[int, set[int]] = {}
    for rank, theirs in enumerate(trained):
        for _, cid in theirs:
            where.setdefault(cid, set()).add(rank)
    assert max(map(len, where.values())) > 1, "the bits above do not prove it unless clients move"


def test_tables_are_the_same_on_all_ranks_and_rows_are_mapped_once_per_node() -> None:
    states, _ = federation(TOPOLOGIES["two and two"])
    tables = [[vars(table) for table in state.memory.tables] for state in states]
    assert all(one == tables[0] for one in tables)
    cid = next(iter(states[0].memory))
    states[0].memory.read(cid)["control"].fill_(7.0)
    assert bool((states[1].memory.read(cid)["control"] == 7.0).all())
    assert cid not in states[2].memory.table.rows


# Failures


def test_a_failed_round_changes_no_memory() -> None:
    algo = algorithm("and", tau=1.0, local=failing_rule({2: lost(2)}))
    ours = tasks(4, plain_model)

    def work(comm: Comm) -> tuple[State, dict[int, Tensor]]:
        training = rounds(begin(ours[comm.rank], algo, comm), plan(min_clients=5), algo, ours[comm.rank], comm)
        state, _ = next(training)
        before = {cid: state.memory.read(cid)["control"].clone() for cid in state.memory}
        with pytest.raises(CommonError, match="4 of 5 clients delivered"):
            next(training)
        state.memory.reserve([])
        return state, before

    for state, before in on_nodes([0, 0, 1, 1], work):
        assert list(state.memory) == list(before)
        assert all(torch.equal(state.memory.read(cid)["control"], vector) for cid, vector in before.items())
        table = state.memory.table
        assert sorted([*table.rows.values(), *table.spare]) == list(range(table.size))


def full(most: int) -> Callable[[int, int, int], None]:
    """A disk on which larger files do not fit."""
    claim = os.posix_fallocate

    def allocate(fd: int, offset: int, size: int) -> None:
        if size > most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        claim(fd, offset, size)

    return allocate


@pytest.mark.parametrize("name", ["four", "two and two", "three and one", "none shared"])
def test_a_full_disk_is_the_same_error_on_every_rank(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    nodes = TOPOLOGIES[name]

    def work(comm: Comm) -> str:
        memory = Memory(("c",), 1000, 0, tmp_path).connect(np.ones(9, dtype=np.int64), NodeBlocks(comm))
        monkeypatch.setattr("os.posix_fallocate", full(4096))
        with pytest.raises(CommonError) as caught:
            memory.reserve(range(9))
        return str(caught.value)

    said = on_nodes(nodes, work)
    assert len(set(said)) == 1 and said[0].startswith("rank 0: clients' memories need ")
    assert said[0].endswith("(No space left on device); name another --memory.folder, or raise --memory.limit")
    assert os.listdir(tmp_path) == []


def test_one_full_disk_among_nodes_is_known_to_all(tmp_path: Path) -> None:
    def work(comm: Comm) -> str:
        folder = tmp_path / ("missing" if comm.rank >= 2 else ".")
        memory = Memory(("c",), 10, 0, folder).connect(np.ones(9, dtype=np.int64), NodeBlocks(comm))
        with pytest.raises(RunError) as caught:
            memory.reserve(range(9))
        return str(caught.value)

    said = on_nodes([0, 0, 1, 1], work)
    assert len(set(said)) == 1 and said[0].startswith("rank 2: ") and "No such file or directory" in said[0]
    assert os.listdir(tmp_path) == []


def test_mates_that_see_another_folder_are_an_error_and_no_second_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    def work(comm: Comm) -> str:
        memory = Memory(("c",), 10, 0, tmp_path / "ab"[comm.rank]).connect(np.ones(9), NodeBlocks(comm))
        with pytest.raises(RunError) as caught:
            memory.reserve(range(9))
        return str(caught.value)

    said = on_nodes([0, 0], work)
    assert said[0] == said[1] and said[0].startswith("rank 1: ")
    assert [os.listdir(tmp_path / name) for name in "ab"] == [[], []]


def test_full_shared_memory_sends_what_is_kept_to_files(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    def work(comm: Comm) -> tuple[int, int, list[float]]:
        memory = Memory(("c",), 1024, folder=tmp_path).connect(np.ones(9), NodeBlocks(comm))
        memory.reserve([1, 2])
        memory.commit([1, 2])
        comm.barrier()
        monkeypatch.setattr("fedmpi.comm.node.create", no_room)
        comm.barrier()
        for cids in ([3, 4], [5]):
            memory.reserve(cids)
            if memory.owns(cids[0]):
                for cid in cids:
                    memory.stage(cid, {"c": torch.full((1024,), float(cid))})
            memory.commit(cids)
            comm.barrier()
        return memory.in_memory, memory.on_disk, [float(memory.read(cid)["c"][5]) for cid in (3, 4, 5)]

    def no_room(*_: Any) -> Tensor:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fedmpi.local.memory.BLOCK_BYTES", 2 * 4096)
    for in_memory, on_disk, values in on_nodes([0, 0], work):
        assert (in_memory, on_disk) == (2 * 4096, 4 * 4096) and values == [3.0, 4.0, 5.0]
    assert caplog.text.count("shared memory is full: what more clients keep goes to files in") == 1


def test_ranks_that_cannot_share_memory_are_nodes_of_their_own(monkeypatch: Any) -> None:
    def refuse(*_: Any) -> Tensor:
        raise OSError(errno.ENOSPC, "none")

    monkeypatch.setattr("fedmpi.comm.node.create", refuse)

    def work(comm: Comm) -> Any:
        memory = Memory(("c",), 10).connect(np.ones(9), NodeBlocks(comm))
        memory.reserve(range(9))
        assert memory.homes is not None
        return memory.homes.nodes

    assert on_nodes([0, 0, 0], work) == [[[0], [1], [2]]] * 3


@pytest.mark.parametrize("limit", [1 << 40, 0])
def test_a_write_to_a_row_is_noticed_and_one_to_another_row_is_not(limit: int, tmp_path: Path) -> None:
    """By torch's version counters, which tell a rule that writes to `job.memory`."""

    def work(comm: Comm) -> None:
        memory = Memory(("c",), 100, limit, tmp_path).connect(np.ones(9, dtype=np.int64), NodeBlocks(comm))
        memory.reserve(range(4))
        memory.commit(range(4))
        read = memory.read(comm.rank)["c"]
        before = read._version
        memory.reserve([2, 3])
        memory.stage(2 + comm.rank, {"c": torch.ones(100)})
        comm.barrier()
        assert read._version == before
        read.add_(1)
        assert memory.read(comm.rank)["c"]._version > before

    on_nodes([0, 0], work)


# The bookkeeping


@given(
    st.lists(
        st.tuples(
            st.sets(st.integers(0, 7), max_size=5),
            st.sets(st.integers(0, 7)),
            st.sampled_from(["", "pin", "unpin"]),
            st.booleans(),
        ),
        max_size=40,
    )
)
@settings(max_examples=300)
def test_a_row_is_one_clients_and_a_pinned_row_is_not_used_again(steps: list[tuple[set, set, str, bool]]) -> None:
    table, pinned = Table(), dict[int, int]()  # row -> what it held when it was pinned
    content, right, stamp = dict[int, int](), dict[int, int](), 0
    for cids, used, then, fails in steps:
        table.commit(frozenset())
        missing = max(len(cids) - len(table.spare), 0)
        if missing:
            table.grow(missing, 0)
        table.stage(sorted(cids))
        for cid in cids:
            stamp += 1
            assert table.staged[cid] not in pinned, "a row that a thread reads"
            content[table.staged[cid]] = stamp
            right |= {cid: stamp} if cid in used and not fails else {}
        if not fails:
            table.commit(used)
        rows = [*table.rows.values(), *table.staged.values(), *table.spare, *table.waiting]
        assert sorted(rows) == list(range(table.size)), "no row twice, none lost"
        assert {cid: content[row] for cid, row in table.rows.items()} == right
        assert all(content[row] == held for row, held in pinned.items())
        if then == "pin" and not table.pinned:
            table.pin()
            pinned = {row: content[row] for row in table.rows.values()}
            assert not table.changed
        elif then == "unpin" and table.pinned:
            table.unpin()
            pinned = {}


@given(st.lists(st.sets(st.integers(0, 19), max_size=8), min_size=1, max_size=12))
@settings(max_examples=100)
def test_spare_rows_are_used_before_new_ones(cohorts: list[set[int]]) -> None:
    table = Table()
    for cids in cohorts:
        table.grow(max(len(cids) - len(table.spare), 0), 0)
        table.stage(sorted(cids))
        table.commit(cids)
    everyone = set().union(*cohorts)
    assert table.size <= len(everyone) + max(map(len, cohorts))


# Checkpoints


def train_and_save(nodes: Sequence[int] | None, out: Path, upto: int, last: int, every: int = 1) -> list[State]:
    """Resume from what there is, or start, and train up to a round; of so many in all."""
    how, algo = plan(rounds=last), algorithm("and", tau=1.0, local=failing_rule({2: lost(2), 4: lost(4)}))
    ours = tasks(3 if nodes is None else len(nodes), plain_model)

    def work(comm: Comm) -> State:
        task = ours[comm.rank]
        found, state = find(out, FINGERPRINT, comm, force=False), begin(task, algo, comm)
        state = start = state if found is None else restore(found, state, task.layout.length, comm)
        with Saver(out, Checkpoint(every=every, minutes=0), FINGERPRINT, comm, found) as saver:
            for state, _ in rounds(start, how, algo, task, comm):
                saver.round_done(state, Progress(), [0], last=state.round == upto)
                if state.round == upto:
                    break
        return state

    return on_nodes(nodes, work)


@pytest.mark.parametrize(
    "starts",
    [
        [[0, 0], [0], [0, 0, 0]],
        [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1]],
        [None, [0, 0, 0, 0], None],
        [[0, 1, 0, 1], [0, 0], [0, 0, 1, 1]],
    ],
)
def test_a_run_resumes_on_other_ranks_and_nodes(starts: list[Any], alone: Any) -> None:
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        for upto, nodes in zip((2, 4, 5), starts, strict=True):
            states = train_and_save(nodes, Path(name), upto, 5)
    model, memories = alone
    assert all(torch.equal(state.model_N[:PARAMS], model) for state in states)
    found = kept(states)
    assert found.keys() == memories.keys() and all(torch.equal(found[cid], memories[cid]) for cid in memories)


def test_a_checkpoint_has_each_clients_newest_row_once_and_old_files_lose_it() -> None:
    """Also where another rank has trained the client since: a memory is always saved by the rank that owns it."""
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        out = Path(name)
        states = train_and_save([0, 0, 0, 0], out, 5, 5)
        found = run_threads(1, lambda comm: find(out, FINGERPRINT, comm, force=False))[0]
        assert found is not None
        writers: dict[str, set[str]] = {}
        for path in found.memories:
            with save.safetensors.safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a dict
                    writers.setdefault(key, set()).add(path.name.split("-")[2])
        assert all(len(ranks) == 1 for ranks in writers.values())
        assert sorted(map(int, writers)) == sorted(kept(states))


@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [0, 1, 1], None])
def test_checkpoints_of_ranks_that_were_homes_are_read(nodes: Any, alone: Any, monkeypatch: Any) -> None:
    """As before clients were at home on nodes: client n was saved by rank n mod W."""
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        out = Path(name)
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "owns", lambda self, cid: cid % 2 == self.blocks.rank)
            train_and_save([0, 0], out, 3, 5)
        states = train_and_save(nodes, out, 5, 5)
    assert all(torch.equal(state.model_N[:PARAMS], alone[0]) for state in states)
    found = kept(states)
    assert found.keys() == alone[1].keys() and all(torch.equal(found[cid], alone[1][cid]) for cid in found)


def test_rows_that_a_thread_writes_are_left_alone_while_mates_train_on(monkeypatch: Any, alone: Any) -> None:
    """Rank 1 writes its memories of round 2 after round 4 only; by then every client has a new row."""
    through, real = threading.Event(), save.write_tensors

    def slow(tensors: dict[str, Tensor], path: Path) -> Any:
        if "round-2-1" in path.name:
            assert through.wait(60)
        return real(tensors, path)

    real_commit = Memory.commit

    def commit(self: Memory, used: Any) -> None:
        real_commit(self, used)
        self.committed = getattr(self, "committed", 0) + 1
        if self.committed == 5:
            through.set()

    monkeypatch.setattr(save, "write_tensors", slow)
    monkeypatch.setattr(Memory, "commit", commit)
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        out = Path(name)
        states = train_and_save([0, 0, 0], out, 5, 5, every=2)
        assert torch.equal(states[0].model_N[:PARAMS], alone[0])
        memories = kept(states)
        monkeypatch.undo()
        assert rounds_in(out / "checkpoints") == [5, 2]
        os.rename(out / "checkpoints" / "round-5", out / "aside")
        again = train_and_save([0, 0], out, 5, 5)
        assert torch.equal(again[0].model_N[:PARAMS], alone[0])
        found = kept(again)
        assert all(torch.equal(found[cid], memories[cid]) for cid in memories)
