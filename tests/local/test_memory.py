"""What clients keep between rounds: rows in memory up to a limit, beyond it in mapped files without a name."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import need
from federation import SIZES, algorithm, federate, plain_model, plan, tasks
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.cohort import draw
from fedmpi.comm import SoloComm
from fedmpi.comm.blocks import NodeBlocks
from fedmpi.errors import RunError
from fedmpi.local import Descent, Job, LocalResult, LocalRule, scaffold
from fedmpi.local.memory import Memory
from fedmpi.rounds import State

PARAMS = tasks(1, plain_model)[0].layout.params
LENGTH = 1024  # a row of one name is a page of 4096 bytes


def keep(memory: Memory, cid: int, values: dict[str, torch.Tensor]) -> None:
    """What a round does with what one client keeps."""
    memory.reserve([cid])
    memory.stage(cid, values)
    memory.commit([cid])


def alone(*given: Any, **more: Any) -> Memory:
    """The memory of a run on one rank."""
    return Memory(*given, **more).connect(np.ones(100, dtype=np.int64), NodeBlocks(SoloComm()))


def vector(value: float, length: int = LENGTH) -> torch.Tensor:
    return torch.arange(float(length)) + value


def mapped(folder: Path) -> int:
    """Bytes of deleted files in a folder that this process has mapped and shares with the file."""
    need("proc", os.path.exists("/proc/self/maps"), "there is no /proc/self/maps to read")
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"(\w+)-(\w+) rw-s .* (/.*) \(deleted\)$", line)
        if found and Path(found[3]).parent == folder:
            total += int(found[2], 16) - int(found[1], 16)
    return total


# Rows


def test_a_client_that_kept_nothing_reads_zeros_and_costs_nothing() -> None:
    memory = Memory(("a", "b"), 3)
    assert {k: v.tolist() for k, v in memory.read(7).items()} == {"a": [0, 0, 0], "b": [0, 0, 0]}
    assert len(memory) == 0 and list(memory) == [] and (memory.in_memory, memory.on_disk) == (0, 0)


def test_only_clients_that_kept_something_have_a_row() -> None:
    memory = alone(("a",), LENGTH)
    for cid in (9, 2, 9, 5):
        keep(memory, cid, {"a": vector(cid)})
    assert len(memory) == 3 and list(memory) == [2, 5, 9]
    assert memory.in_memory == 3 * 4 * LENGTH


def test_each_name_has_a_vector_of_its_own() -> None:
    memory = alone(("a", "b"), 2)
    keep(memory, 1, {"b": torch.tensor([3.0, 4.0]), "a": torch.tensor([1.0, 2.0])})
    keep(memory, 2, {"a": torch.tensor([5.0, 6.0]), "b": torch.tensor([7.0, 8.0])})
    assert {k: v.tolist() for k, v in memory.read(1).items()} == {"a": [1, 2], "b": [3, 4]}
    assert {k: v.tolist() for k, v in memory.read(2).items()} == {"a": [5, 6], "b": [7, 8]}


def test_what_is_kept_is_a_copy() -> None:
    memory, given_ = alone(("a",), 2), torch.tensor([1.0, 2.0])
    keep(memory, 1, {"a": given_})
    given_.zero_()
    assert memory.read(1)["a"].tolist() == [1, 2]


@pytest.mark.parametrize("names", [("last", "older"), ("older", "last")])
def test_a_client_may_keep_under_one_name_what_it_found_under_another(names: tuple[str, ...]) -> None:
    """A rule that remembers its last two deltas hands back one of the vectors that it was given to read."""
    memory = alone(names, 1)
    keep(memory, 1, {"last": torch.tensor([1.0]), "older": torch.tensor([0.0])})
    keep(memory, 1, {"last": torch.tensor([2.0]), "older": memory.read(1)["last"]})
    assert {k: v.item() for k, v in memory.read(1).items()} == {"last": 2.0, "older": 1.0}


def test_other_names_than_the_declared_ones_are_refused() -> None:
    memory = alone(("a", "b"), 1)
    for values in ({}, {"a": torch.zeros(1)}, {k: torch.zeros(1) for k in "abc"}):
        with pytest.raises(ValueError, match=r"client 4 keeps \[.*\], but its rule declares \['a', 'b'\]"):
            keep(memory, 4, values)
    assert len(memory) == 0


def test_a_rule_without_a_memory_keeps_nothing() -> None:
    memory = alone()
    keep(memory, 3, {})
    assert len(memory) == 0 and memory.read(3) == {}
    with pytest.raises(ValueError, match="declares \\[\\]"):
        keep(memory, 3, {"a": torch.zeros(1)})


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-1e6, 1e6, width=32)), max_size=30), st.integers(0, 6))
def test_values_survive_wherever_they_lie(tmp_path_factory: pytest.TempPathFactory, writes: list, rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedmpi.local.memory.BLOCK_BYTES", 3 * 8 * 5)  # three rows a file
        memory = alone(("a", "b"), 5, rows * 8 * 5, tmp_path_factory.getbasetemp())
        want: dict[int, float] = {}
        for cid, value in writes:
            keep(memory, cid, {"a": torch.full((5,), value), "b": torch.full((5,), -value)})
            want[cid] = value
    assert list(memory) == sorted(want)
    for cid, value in want.items():
        assert memory.read(cid)["a"].tolist() == [value] * 5 and memory.read(cid)["b"].tolist() == [-value] * 5
    made = len(want) + (len(writes) > len(want))  # and a spare one, where a client kept something twice
    assert memory.in_memory <= min(rows, made) * 40 and memory.on_disk <= -(-max(made - rows, 0) // 3) * 120
    assert memory.in_memory + memory.on_disk >= len(want) * 40


def test_what_is_staged_takes_its_place_together_and_what_it_replaces_is_used_again() -> None:
    memory = alone(("a",), 2)
    keep(memory, 1, {"a": torch.tensor([1.0, 1.0])})
    memory.reserve([1, 2])
    memory.stage(1, {"a": torch.tensor([2.0, 2.0])})
    memory.stage(2, {"a": torch.tensor([3.0, 3.0])})
    assert list(memory) == [1] and memory.read(1)["a"].tolist() == [1, 1], "before the round is done"
    memory.commit([1, 2])
    assert [memory.read(cid)["a"].tolist() for cid in memory] == [[2, 2], [3, 3]]
    made = memory.in_memory
    keep(memory, 1, {"a": torch.tensor([4.0, 4.0])})
    assert memory.in_memory == made == 3 * 8 and memory.read(1)["a"].tolist() == [4, 4]


def test_a_round_that_fails_leaves_what_clients_kept_as_it_was() -> None:
    memory, lost = alone(("control",), PARAMS), draw(11, 1, tasks(1)[0].partition.sizes, 5, 1).cids[0]
    good = scaffold(Descent(0.05))

    def run(job: Job) -> LocalResult:
        if job.cid == lost:
            raise MemoryError("as a test")
        return good(job)

    algo = algorithm(local=LocalRule(run, good.sends, good.keeps))
    with pytest.raises(RunError, match="4 of 5 clients delivered"):
        federate(1, algo, plan(min_clients=5), plain_model, memory=lambda: memory)
    assert len(memory) == 0 and len(memory.table.staged) == 5
    memory.reserve([])
    memory.commit([])
    assert len(memory) == 0 and len(memory.table.spare) == 5


def test_files_hold_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a large model has a file of its own: a thousand clients would use up what a process may open."""
    monkeypatch.setattr("fedmpi.local.memory.BLOCK_BYTES", 4 * LENGTH)
    memory, before = alone(("a",), LENGTH, limit_bytes=0, folder=tmp_path), len(os.listdir("/proc/self/fd"))
    for cid in range(20):
        keep(memory, cid, {"a": vector(cid)})
    assert mapped(tmp_path) == 20 * 4096 and len(os.listdir("/proc/self/fd")) == before


# The limit, and what lies beyond it


def test_rows_beyond_the_limit_lie_in_mapped_files_that_have_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedmpi.local.memory.BLOCK_BYTES", 2 * 4 * LENGTH)  # two rows a file
    claimed: list[int] = []
    claim = os.posix_fallocate

    def watched(fd: int, offset: int, size: int) -> None:
        claim(fd, offset, size)
        claimed.append(os.fstat(fd).st_blocks * 512)

    monkeypatch.setattr("os.posix_fallocate", watched)
    memory = alone(("a",), LENGTH, limit_bytes=3 * 4 * LENGTH, folder=tmp_path)
    for cid in range(3):
        keep(memory, cid, {"a": vector(cid)})
    assert (memory.in_memory, memory.on_disk, claimed, mapped(tmp_path)) == (3 * 4096, 0, [], 0)
    for cid in range(3, 8):
        keep(memory, cid, {"a": vector(cid)})
    assert (memory.in_memory, memory.on_disk) == (3 * 4096, 6 * 4096)  # five rows, two a file
    assert os.listdir(tmp_path) == []
    assert mapped(tmp_path) == 3 * 2 * 4096  # five rows, two a file
    assert len(claimed) == 3 and all(size >= 2 * 4096 for size in claimed), "the space is not claimed at once"
    assert all(torch.equal(memory.read(cid)["a"], vector(cid)) for cid in range(8))


def test_files_go_with_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmpi.local.memory.BLOCK_BYTES", 4 * LENGTH)
    memory = alone(("a",), LENGTH, limit_bytes=0, folder=tmp_path)
    keep(memory, 0, {"a": vector(0)})
    assert mapped(tmp_path) == 4096
    del memory
    assert mapped(tmp_path) == 0


def test_a_row_larger_than_a_block_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmpi.local.memory.BLOCK_BYTES", 4096)
    memory = alone(("a", "b"), LENGTH, limit_bytes=0, folder=tmp_path)
    for cid in range(2):
        keep(memory, cid, {"a": vector(cid), "b": vector(-cid)})
    assert mapped(tmp_path) == 2 * 2 * 4096
    assert torch.equal(memory.read(1)["b"], vector(-1)) and torch.equal(memory.read(0)["a"], vector(0))


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    memory = alone(("a",), 1 << 20, limit_bytes=0, folder=tmp_path)
    with pytest.raises(RunError) as caught:
        keep(memory, 0, {"a": torch.zeros(1 << 20)})
    assert str(caught.value) == (
        f"clients' memories need 67.1 MB more in {tmp_path}, which failed (No space left on device); "
        "name another --memory.folder, or raise --memory.limit"
    )
    assert os.listdir(tmp_path) == [] and mapped(tmp_path) == 0
    assert len(memory) == 0, "a row that could not be had"


def test_a_missing_folder_is_refused_too(tmp_path: Path) -> None:
    memory = alone(("a",), LENGTH, limit_bytes=0, folder=tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"nowhere, which failed \(No such file or directory\)"):
        keep(memory, 0, {"a": vector(0)})


# In a federation: SCAFFOLD's control variates


def controls(states: list[State]) -> dict[int, torch.Tensor]:
    """Every client's c_n, from all ranks."""
    return {cid: s.memory.read(cid)["control"].clone() for s in states for cid in s.memory}


def run_scaffold(
    size: int, rounds: int, spoil: dict[int, int] | None = None, how: str = "exact", **more
) -> list[State]:
    """SCAFFOLD with a client that fails in some rounds."""
    rule = scaffold(Descent(0.05, 0.5))

    def run(job: Job) -> LocalResult:
        result = rule(job)
        if (spoil or {}).get(job.round) == job.cid:
            result.delta_P[3] = float("nan")
        return result

    failing = LocalRule(run, rule.sends, rule.keeps)
    return federate(size, algorithm("and", tau=1.0, local=failing), plan(rounds=rounds, sum=how), plain_model, **more)[
        0
    ]


def cohort(round: int) -> tuple[int, ...]:
    how = plan()
    return draw(how.seed, round, tasks(1)[0].partition.sizes, how.cohort, 1).cids


@pytest.mark.parametrize("size", [1, 2, 3])
def test_memories_on_disk_are_the_same_bits_as_in_memory(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedmpi.local.memory.BLOCK_BYTES", 1 << 12)
    here = run_scaffold(size, 4)
    there = run_scaffold(size, 4, memory=lambda: Memory(("control",), PARAMS, 0, tmp_path))
    assert sum(s.memory.on_disk for s in there) >= 4 * PARAMS * len(controls(here)), "nothing lies on disk"
    assert torch.equal(here[0].model_N, there[0].model_N)
    assert torch.equal(here[0].shared["control"], there[0].shared["control"])
    one, two = controls(here), controls(there)
    assert one.keys() == two.keys() and all(torch.equal(one[cid], two[cid]) for cid in one)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", [1, 2, 3])
def test_only_clients_that_took_part_have_a_row_each_on_one_rank(size: int) -> None:
    for rounds in (1, 2):
        states = run_scaffold(size, rounds)
        took_part = {cid for round in range(1, rounds + 1) for cid in cohort(round)}
        assert sorted(cid for state in states for cid in state.memory) == sorted(took_part)
        for rank, state in enumerate(states):  # that share nothing here
            homes = state.memory.homes
            assert homes is not None and all(homes.nodes[homes.node(cid)] == [rank] for cid in state.memory)
    assert set(cohort(1)) != set(range(len(SIZES)))


def test_a_client_that_is_left_out_keeps_its_old_memory_and_its_control_does_not_enter_c() -> None:
    victim = next(cid for cid in cohort(2) if cid in cohort(1))
    before, after = run_scaffold(2, 1, {2: victim}), run_scaffold(2, 2, {2: victim})
    old, new = controls(before), controls(after)
    assert torch.equal(old[victim], new[victim]) and old[victim].abs().max() > 0
    used = [cid for cid in cohort(2) if cid != victim]
    assert all(not torch.equal(old.get(cid, torch.zeros(PARAMS)), new[cid]) for cid in used)
    moved = sum((new[cid] - old.get(cid, torch.zeros(PARAMS))).double() for cid in used) / len(SIZES)
    want = before[0].shared["control"][:PARAMS].double() + moved
    assert torch.allclose(after[0].shared["control"][:PARAMS].double(), want, atol=1e-6)


def test_a_client_that_never_delivered_has_no_row() -> None:
    victim = cohort(1)[0]
    assert victim not in controls(run_scaffold(2, 1, {1: victim}))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("how", ["exact", "float32"])
def test_c_stays_the_mean_of_all_controls(size: int, how: str) -> None:
    """Also of the clients that never took part, whose control is zero, and whoever fails on the way."""
    spoil = {round: cohort(round)[round % 5] for round in (2, 3, 5)}
    for rounds in range(1, 7):
        states = run_scaffold(size, rounds, spoil, how)
        mean = sum(c.double() for c in controls(states).values()) / len(SIZES)
        for state in states:
            assert torch.allclose(state.shared["control"][:PARAMS].double(), mean, atol=1e-6)
        assert mean.abs().max() > 0.01
