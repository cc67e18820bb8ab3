"""Checkpoints: what is saved is read back to the last bit on any number of ranks, and damage is seen and survived."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import need, rank_environment
from federation import federate, norm_model, plan, tasks
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from shell import CPU, metrics, sandbox, settings_of, without_seconds
from torch import Tensor

from fedmpi.algorithms import ALGORITHMS, Algorithm
from fedmpi.cohort import Work
from fedmpi.comm import Comm, SoloComm
from fedmpi.comm.blocks import NodeBlocks
from fedmpi.comm.env import Place
from fedmpi.comm.threads import run_threads
from fedmpi.errors import CommonError, RunError, UserError
from fedmpi.local.memory import Memory
from fedmpi.rounds import State, begin, rounds
from fedmpi.runs import folder
from fedmpi.runs.build import build, prepare, resolve
from fedmpi.runs.checkpoint import save
from fedmpi.runs.checkpoint.format import FORMAT, Fingerprint, Progress, rounds_in, sealed
from fedmpi.runs.checkpoint.load import find, restore
from fedmpi.runs.checkpoint.save import Saver
from fedmpi.runs.config import Checkpoint, Config, Eval, Local, Meta
from fedmpi.runs.log import Log
from fedmpi.runs.run import Outcome, run
from fedmpi.runs.schema import FileRecord
from fedmpi.runs.stop import Stopped

FINGERPRINT = Fingerprint({"threads": 1}, {})
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where syncing costs nothing
EACH = Checkpoint(every=1)


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with sandbox() as patch:
        yield patch


def each(every: int | None = 1, minutes: float = 0.0, keep: int = 2) -> Checkpoint:
    return Checkpoint(every, minutes, keep)


# ------------------------------------------------------------------- The state: every algorithm, ranks to other ranks


def made(name: str) -> Algorithm:
    """A row of the table, with the moments that its knobs can switch on."""
    return build(resolve(Config(algorithm=name, mask="gma", rounds=4)))


def kept(memory: Memory, cid: int) -> Tensor:
    """What a client keeps, all its vectors one after another."""
    return torch.cat(list(memory.read(cid).values()))


def connect(memory: Memory, comm: Comm) -> Memory:
    """A memory for up to 50 clients of the same size."""
    return memory.connect(np.ones(50, dtype=np.int64), NodeBlocks(comm))


def keep(memory: Memory, values: dict[int, dict[str, Tensor]]) -> None:
    """A round in which these clients keep something; a rank stages for those that it owns."""
    memory.reserve(sorted(values))
    for cid, vectors in values.items():
        if memory.names and memory.owns(cid):
            memory.stage(cid, vectors)
    memory.commit(values)


def whole(states: list[State]) -> dict[str, Any]:
    """All that a state has, over its ranks, down to the padding."""
    parts = [whole_of(state, rank) for rank, state in enumerate(states)]
    return {name: value for part in reversed(parts) for name, value in part.items()}


def whole_of(state: State, rank: int) -> dict[str, Any]:
    """A copy of what a rank has of it."""
    found: dict[str, Any] = {"round": state.round, "ints": state.ints, "model": state.model_N}
    found |= {f"moment {name} of {rank}": moment for name, moment in state.moments.items()}
    found |= {f"shared {name} on {rank}": vector for name, vector in state.shared.items()}
    found |= {f"client {cid} on {rank}": kept(state.memory, cid) for cid in state.memory}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in found.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in one.items()
    )


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_state_resumes_on_another_number_of_ranks_bit_for_bit(name: str, tmp_path: Path) -> None:
    """From 1 to 4 ranks to 1 to 4 others: after reading and after one more round, all is as if nothing had been."""
    meta = np.arange(9) if ALGORITHMS[name].defaults.get("meta.size") else None
    how, algo = plan(rounds=3, cohort=4, work=Work(batch=8)), made(name)
    halfway: dict[int, dict[str, Any]] = {}
    end: dict[int, dict[str, Any]] = {}
    for size in (1, 2, 3, 4):
        ours = tasks(size, norm_model, meta)

        def first(comm: Comm, ours=ours, out=tmp_path / str(size)) -> State:
            state = start = begin(ours[comm.rank], algo, comm)
            with Saver(out, each(2), FINGERPRINT, comm, None) as saver:
                for state, _ in rounds(start, replace(how, rounds=2), algo, ours[comm.rank], comm):
                    saver.round_done(state, Progress(0.5, {"round": state.round}), [0], last=state.round == 2)
            return state

        halfway[size] = whole(run_threads(size, first))
        end[size] = whole(federate(size, algo, how, norm_model, meta)[0])
    for before in (1, 2, 3, 4):
        for after in (1, 2, 3, 4):
            ours = tasks(after, norm_model, meta)

            def second(comm: Comm, ours=ours, wrote=before) -> tuple[dict[str, Any], State]:
                found = find(tmp_path / str(wrote), FINGERPRINT, comm, force=False)
                assert found is not None and (found.round, found.ranks) == (2, wrote)
                assert (found.about["best"], found.about["last"]) == (0.5, {"round": 2})
                start = begin(ours[comm.rank], algo, comm)
                state = restore(found, start, ours[comm.rank].layout.length, comm)
                read = whole_of(state, comm.rank)
                return read, list(rounds(state, how, algo, ours[comm.rank], comm))[-1][0]

            results = run_threads(after, second)
            as_read = {name: value for read, _ in reversed(results) for name, value in read.items()}
            assert same(as_read, halfway[after]), f"{before} -> {after} ranks, as read"
            assert same(whole([state for _, state in results]), end[after]), f"{before} -> {after} ranks, at the end"
    if name == "scaffold":
        assert any(key.startswith("client") for key in halfway[1]) and len(halfway[1]) < len(end[1]) + 1


@st.composite
def made_up(draw: st.DrawFn) -> dict[str, Any]:
    """A state of any shape: fewer elements than ranks too, and clients that never took part."""
    return {
        "length": draw(st.integers(1, 23)),
        "ranks": (draw(st.integers(1, 5)), draw(st.integers(1, 5))),
        "moments": draw(st.integers(0, 2)),
        "shared": draw(st.integers(0, 1)),
        "keeps": draw(st.integers(0, 2)),
        "clients": draw(st.sets(st.integers(0, 40), max_size=9)),
        "rounds": draw(st.integers(1, 3)),
        "ints": draw(st.lists(st.integers(0, 2**62), max_size=3)),
    }


def value_of(what: str, round: int, length: int) -> Tensor:
    """A vector that nothing else has."""
    seed = int(hashlib.sha256(f"{what} {round}".encode()).hexdigest()[:12], 16)
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def spread(case: dict[str, Any], comm: Comm, round: int) -> State:
    """This rank's part of the made-up state after a round; of round 0, the beginning."""
    length, size = case["length"], comm.size
    slice_length = -(-length // size)
    own = slice(comm.rank * slice_length, (comm.rank + 1) * slice_length)

    def vector(what: str) -> Tensor:
        padded_N = torch.zeros(slice_length * size)
        padded_N[:length] = value_of(what, round, length) if round else 0
        return padded_N

    memory = connect(Memory(("a", "b")[: case["keeps"]], length), comm)
    return State(
        round,
        vector("model"),
        torch.tensor(case["ints"] if round else [0] * len(case["ints"]), dtype=torch.int64),
        {f"m{i}": vector(f"m{i}")[own].clone() for i in range(case["moments"])},
        {f"s{i}": vector(f"s{i}") for i in range(case["shared"])},
        memory,
    )


@given(case=made_up())
@settings(max_examples=40)
def test_any_state_is_read_back_on_any_number_of_ranks(case: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        out, last = Path(name), case["rounds"]

        def write(comm: Comm) -> None:
            memory = spread(case, comm, 1).memory
            with Saver(out, each(), FINGERPRINT, comm, None) as saver:
                for round in range(1, last + 1):
                    state = replace(spread(case, comm, round), memory=memory)
                    changed = [cid for cid in case["clients"] if cid % last < round]
                    length = case["length"]
                    keep(memory, {c: {n: value_of(f"{c}{n}", round, length) for n in memory.names} for c in changed})
                    saver.round_done(state, Progress(), [0], last=round == last)

        def read(comm: Comm) -> State:
            found = find(out, FINGERPRINT, comm, force=False)
            assert found is not None
            return restore(found, spread(case, comm, 0), case["length"], comm)

        run_threads(case["ranks"][0], write)
        states = run_threads(case["ranks"][1], read)
        wanted = run_threads(case["ranks"][1], lambda comm: spread(case, comm, last))
        for state, right in zip(states, wanted, strict=True):
            assert state.round == last and torch.equal(state.model_N, right.model_N)
            assert torch.equal(state.ints, right.ints)
            assert state.moments.keys() == right.moments.keys() and state.shared.keys() == right.shared.keys()
            assert all(torch.equal(state.moments[n], right.moments[n]) for n in right.moments)
            assert all(torch.equal(state.shared[n], right.shared[n]) for n in right.shared)
        assert sorted(c for s in states for c in s.memory) == (sorted(case["clients"]) if case["keeps"] else [])
        for state in states:
            for cid in state.memory:
                found = state.memory.read(cid)
                assert all(torch.equal(found[n], value_of(f"{cid}{n}", last, case["length"])) for n in found)


# ------------------------------------------------------------------------------------------------- Client memories


def keep_rows(saver: Saver, state: State, round: int, cids: list[int], last: bool = False) -> State:
    """A round in which these clients keep something."""
    keep(state.memory, {cid: {"c": torch.full((state.memory.length,), 100.0 * round + cid)} for cid in cids})
    state = replace(state, round=round)
    saver.round_done(state, Progress(), [0], last=last)
    saver.round_done(state, Progress(), [0], last=True)  # lets the writing end
    return state


def rows_in(path: Path) -> set[int]:
    with safe_open(path, "pt") as file:
        return {int(key) for key in file.keys()}  # noqa: SIM118 - not a dict


def of_memories(comm: Comm | None = None) -> State:
    memory = connect(Memory(("c",), 64), comm or SoloComm())
    return State(0, torch.zeros(8), torch.zeros(0, dtype=torch.int64), {}, {}, memory)


def test_only_memories_that_have_changed_are_written(tmp_path: Path) -> None:
    state, clients = of_memories(), tmp_path / "checkpoints" / "clients"
    with Saver(tmp_path, each(keep=5), FINGERPRINT, SoloComm(), None) as saver:
        for round, cids in ((1, [0, 1, 2, 3, 4]), (2, [1]), (3, []), (4, [5, 0])):
            before = set(clients.iterdir())
            state = keep_rows(saver, state, round, cids)
            new = set(clients.iterdir()) - before
            assert [rows_in(path) for path in new] == ([set(cids)] if cids else [])


def test_files_of_which_less_than_half_is_valid_are_written_anew_and_go(tmp_path: Path) -> None:
    state, clients = of_memories(), tmp_path / "checkpoints" / "clients"
    with Saver(tmp_path, each(keep=1), FINGERPRINT, SoloComm(), None) as saver:
        state = keep_rows(saver, state, 1, [0, 1, 2, 3])
        state = keep_rows(saver, state, 2, [0, 1])
        assert sorted(map(rows_in, clients.iterdir()), key=len) == [{0, 1}, {0, 1, 2, 3}], "half is enough"
        state = keep_rows(saver, state, 3, [2])
        assert len(list(clients.iterdir())) == 3
        state = keep_rows(saver, state, 4, [1])
        newest = max(clients.iterdir(), key=lambda path: int(path.name.split("-")[1]))
        assert rows_in(newest) == {1, 3}, "client 3 was alone in the first file"
    assert restored(tmp_path) == {0: 200.0, 1: 401.0, 2: 302.0, 3: 103.0}


def test_files_another_rank_writes_are_kept_until_the_next_start(tmp_path: Path) -> None:
    """safetensors writes into a file of its own naming first; to remove that would make the other rank's save fail."""
    state, underway = of_memories(), tmp_path / "checkpoints" / "clients" / ".tmpA1b2C3"
    with Saver(tmp_path, each(keep=1), FINGERPRINT, SoloComm(), None) as saver:
        state = keep_rows(saver, state, 1, [0, 1])
        underway.touch()
        state = keep_rows(saver, state, 2, [0, 1])
        assert underway.exists()
    with Saver(tmp_path, each(keep=1), FINGERPRINT, SoloComm(), None):
        assert not underway.exists()


def restored(out: Path, ranks: int = 1) -> dict[int, float]:
    """The first number that each client kept, as read on so many ranks."""

    def read(comm: Comm) -> dict[int, float]:
        found = find(out, FINGERPRINT, comm, force=False)
        assert found is not None
        state = restore(found, replace(of_memories(comm), model_N=torch.zeros(-(-8 // comm.size) * comm.size)), 8, comm)
        return {cid: float(state.memory.read(cid)["c"][0]) for cid in state.memory}

    parts = run_threads(ranks, read, timeout=10)
    return {cid: value for part in parts for cid, value in part.items()}


@given(
    cohorts=st.lists(st.lists(st.integers(0, 19), unique=True, max_size=8), min_size=1, max_size=12),
    keep=st.integers(1, 3),
    ranks=st.integers(1, 4),
)
@settings(max_examples=20)
def test_the_disk_holds_about_twice_what_the_clients_keep(cohorts: list[list[int]], keep: int, ranks: int) -> None:
    """Beside what the kept checkpoints differ by: and every one of them can be read, with the right numbers."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        out, state, right = Path(name), of_memories(), dict[int, float]()
        history: list[dict[int, float]] = []
        clients = out / "checkpoints" / "clients"
        with Saver(out, each(keep=keep), FINGERPRINT, SoloComm(), None) as saver:
            for round, cids in enumerate(cohorts, 1):
                state = keep_rows(saver, state, round, cids)
                right |= {cid: 100.0 * round + cid for cid in cids}
                history.append(dict(right))
                rows = sum(len(rows_in(path)) for path in clients.iterdir())
                recent = sum(map(len, cohorts[max(0, round - keep) : round]))
                assert rows <= 2 * len(right) + 2 * recent
        used = {f["name"] for path in (out / "checkpoints").glob("round-*/part-*.json") for f in parts_files(path)}
        assert {path.name for path in clients.iterdir()} == used, "nothing that no checkpoint refers to"
        kept = sorted(rounds_in(out / "checkpoints"))
        assert kept == list(range(1, len(cohorts) + 1))[-keep:]
        for round in reversed(kept):
            assert restored(out, ranks) == history[round - 1]
            shutil.rmtree(out / "checkpoints" / f"round-{round}")


def parts_files(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["clients"]
    return found


def test_clearing_up_leaves_the_memories_of_a_checkpoint_that_is_on_its_way(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    """Rank 0 removes old files after one checkpoint when rank 1 has written its memories for the next already."""
    clients, prune = tmp_path / "checkpoints" / "clients", Saver._prune

    def late(self: Saver, newest: int) -> None:
        deadline = time.monotonic() + 30
        while newest < 3 and not list(clients.glob(f"round-{newest + 1}-1-*")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        prune(self, newest)

    patch.setattr(Saver, "_prune", late)
    patch.setattr(Saver, "_busy", lambda self: self.mine is not None and self.mine.exception() is not None)  # waits

    def write(comm: Comm) -> None:
        state = of_memories(comm)
        with Saver(tmp_path, each(keep=1), FINGERPRINT, comm, None) as saver:
            for round in (1, 2, 3):
                keep(state.memory, {cid: {"c": torch.full((64,), 100.0 * round + cid)} for cid in (0, 1)})
                state = replace(state, round=round)
                saver.round_done(state, Progress(), [0], last=round == 3)

    run_threads(2, write)
    assert rounds_kept(tmp_path) == [3] and restored(tmp_path) == {0: 300.0, 1: 301.0}


# ------------------------------------------------------------------------------------------------------ Whole runs


class Crash(Exception):
    """A run that falls over."""


def launch(
    cfg: Config, ranks: int = 1, stop: int = 0, crash: int = 0, environ: dict[str, str] | None = None
) -> Outcome:
    """Run on threads: to the end, or until the run is stopped after a round, or crashes in it."""
    real = Saver.round_done

    def watched(self: Saver, state: State, progress: Progress, flags: list[int], last: bool) -> list[int]:
        if state.round == crash:
            raise Crash
        return real(self, state, progress, [int(state.round == stop), *flags[1:]], last)

    def work(comm: Comm) -> Outcome:
        place = Place("test", comm.rank, comm.size, comm.rank, comm.size)
        return run(prepare(cfg), comm, place, CPU, environ or {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "round_done", watched)
        return work(SoloComm()) if ranks == 1 else run_threads(ranks, work, timeout=20)[0]


def launch_and_stop(cfg: Config, ranks: int = 1, **when: int) -> None:
    with pytest.raises((Crash, Stopped)):
        launch(cfg, ranks, **when)


def sha256(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def ending(out: Path) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Everything that must be as if nothing had happened."""
    logged = [{k: v for k, v in one.items() if not k.startswith("bytes_")} for one in without_seconds(metrics(out))]
    return sha256(out), logged, json.loads((out / "finished.json").read_text())


def starts(out: Path) -> list[int]:
    return [json.loads(line)["round"] for line in (out / "starts.jsonl").read_text().splitlines()]


def rounds_kept(out: Path) -> list[int]:
    return sorted(rounds_in(out / "checkpoints"))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_run_restarted_several_times_ends_as_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    """Stopped after round 1 on 4 ranks, fallen over in round 4 on 2, finished on 3."""
    meta = Meta(size=30) if ALGORITHMS[name].defaults.get("meta.size") else Meta()
    cfg = settings_of(tmp_path / "restarted", algorithm=name, rounds=6, checkpoint=EACH, meta=meta, eval=Eval(every=2))
    launch_and_stop(cfg, 4, stop=1)
    launch_and_stop(cfg, 2, crash=4)
    launch(cfg, 3)
    launch(replace(cfg, out=str(tmp_path / "whole")))
    assert ending(tmp_path / "restarted") == ending(tmp_path / "whole")
    first, second, third = starts(tmp_path / "restarted")
    assert (first, second) == (0, 1) and 1 <= third < 4
    assert not (tmp_path / "restarted" / "stopped.json").exists()


def test_the_best_metric_before_a_restart_counts(tmp_path: Path) -> None:
    """The rate is so high that later rounds are worse than the first."""
    rough = settings_of(tmp_path / "a", rounds=4, checkpoint=EACH, local=Local(lr=3.0, batch=10), seed=3)
    launch_and_stop(rough, stop=2)
    launch(rough)
    done = json.loads((tmp_path / "a" / "finished.json").read_text())
    assert done["best_test_accuracy"] == max(r["test_accuracy"] for r in metrics(tmp_path / "a"))


def test_the_last_round_is_always_saved_and_a_run_killed_after_it_only_finishes(tmp_path: Path) -> None:
    cfg = settings_of(tmp_path / "a", checkpoint=Checkpoint())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedmpi.runs.run.finish", lambda *_: (_ for _ in ()).throw(Crash))
        launch_and_stop(cfg)
    assert rounds_kept(tmp_path / "a") == [3] and not (tmp_path / "a" / "finished.json").exists()
    outcome = launch(cfg, 2)
    assert [report.round for report in outcome.history] == [1, 2, 3]
    launch(replace(cfg, out=str(tmp_path / "b")))
    assert ending(tmp_path / "a") == ending(tmp_path / "b") and starts(tmp_path / "a") == [0, 3]


def test_which_rounds_are_saved_and_how_many_are_kept(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Saver, "_busy", lambda self: self.mine is not None and self.mine.exception() is not None)  # waits
    for number, (knobs, kept) in enumerate(
        [
            (each(1, keep=2), [6, 7]),
            (each(1, keep=1), [7]),
            (each(3, keep=9), [3, 6, 7]),
            (each(None, minutes=1e-9, keep=3), [5, 6, 7]),
            (each(None, minutes=60), [7]),
            (each(100), [7]),
        ]
    ):
        launch(settings_of(tmp_path / str(number), rounds=7, checkpoint=knobs), 1 + number % 2)
        assert rounds_kept(tmp_path / str(number)) == kept


def test_without_checkpoints_a_run_starts_over(tmp_path: Path) -> None:
    cfg = settings_of(tmp_path / "a", checkpoint=each(keep=0))
    launch_and_stop(cfg, crash=2)
    assert not (tmp_path / "a" / "checkpoints").exists()
    launch(cfg)
    launch(replace(cfg, out=str(tmp_path / "b")))
    assert ending(tmp_path / "a") == ending(tmp_path / "b") and not (tmp_path / "a" / "checkpoints").exists()


def test_threads_are_those_of_the_checkpoint_unless_given(tmp_path: Path) -> None:
    cfg = settings_of(tmp_path, checkpoint=EACH)
    torch.set_num_threads(2)
    launch_and_stop(replace(cfg, threads=2), stop=1)
    torch.set_num_threads(1)
    launch_and_stop(cfg, stop=2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    with pytest.raises(UserError, match="other settings: --threads is 1 and was 2"):
        launch(replace(cfg, threads=1))


# metrics.jsonl and TensorBoard


def test_repeated_rounds_are_logged_once(tmp_path: Path) -> None:
    cfg = settings_of(tmp_path / "a", rounds=6, checkpoint=each(2), log_to="tensorboard")
    launch_and_stop(cfg, stop=3)
    launch_and_stop(cfg, crash=5)
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.write('{"round": 6, "test_acc')  # killed in the middle of a line
    launch(cfg, 2)
    launch(replace(cfg, out=str(tmp_path / "b")))
    assert ending(tmp_path / "a") == ending(tmp_path / "b")
    assert told_to_tensorboard(tmp_path / "a") == told_to_tensorboard(tmp_path / "b")


def told_to_tensorboard(out: Path) -> dict[str, list[tuple[int, float]]]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the reader's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(out / "tensorboard")).Reload()
        names = [name for name in read.Tags()["scalars"] if not name.startswith(("seconds", "bytes_"))]
        assert names
        return {name: [(event.step, event.value) for event in read.Scalars(name)] for name in names}


# ---------------------------------------------------------------------------------------------------------- Damage


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run on 2 ranks that stopped with two checkpoints, one of another seed, and how the first should end."""
    base = tmp_path_factory.mktemp("runs")
    with sandbox():
        for name, seed in (("torn", 0), ("foreign", 1)):
            cfg = damaged_run(base / name, seed)
            launch_and_stop(cfg, 2, stop=2)
            launch_and_stop(cfg, 2, stop=4)
            assert rounds_kept(base / name) == [2, 4]
        launch(damaged_run(base / "whole"))
    return {name: base / name for name in ("torn", "foreign", "whole")}


def damaged_run(out: Path, seed: int = 0) -> Config:
    cfg = settings_of(out, algorithm="scaffold", rounds=6, seed=seed, checkpoint=each(100), eval=Eval(every=3))
    return replace(cfg, threads=1)


def flipped(at: float) -> Callable[[Path, Path], None]:
    def damage(path: Path, other: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 8
        path.write_bytes(content)

    return damage


def cut(length: Callable[[int], int]) -> Callable[[Path, Path], None]:
    return lambda path, other: path.write_bytes(path.read_bytes()[: length(path.stat().st_size)])


def folder_instead(path: Path, other: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "something").write_text("else")


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "empty": cut(lambda size: 0),
    "half of it": cut(lambda size: size // 2),
    "a byte short": cut(lambda size: size - 1),
    "a byte more": lambda path, other: path.write_bytes(path.read_bytes() + b"\n") and None,
    **{f"a bit flipped at {at:.0%}": flipped(at) for at in (0, 0.01, 0.2, 0.5, 0.9, 1)},
    "missing": lambda path, other: path.unlink(),
    "another run's": lambda path, other: shutil.copyfile(other, path) and None,
    "a folder": folder_instead,
    "a link to nowhere": lambda path, other: (path.unlink(), path.symlink_to("nowhere")) and None,
}


def files_of(out: Path, round: int) -> dict[str, Path]:
    """The files that a checkpoint has to itself."""
    base = out / "checkpoints"
    names = ("manifest.json", "part-0.json", "part-1.json", "slice-0-of-2.safetensors", "slice-1-of-2.safetensors")
    found = {name: base / f"round-{round}" / name for name in names}
    return found | {f"memories of rank {r}": next(base.glob(f"clients/round-{round}-{r}-*")) for r in (0, 1)}


@contextmanager
def logged_lines() -> Iterator[list[str]]:
    """Collect what the package logs meanwhile."""
    logger, logged = logging.getLogger("fedmpi"), list[str]()

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    handler = Collect()
    logger.addHandler(handler)
    try:
        yield logged
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(kind: str, runs: dict[str, Path], tmp_path: Path) -> None:
    for number, which in enumerate(files_of(runs["torn"], 4)):
        out = tmp_path / str(number)
        shutil.copytree(runs["torn"], out)
        DAMAGES[kind](files_of(out, 4)[which], files_of(runs["foreign"], 4)[which])
        with logged_lines() as logged:
            launch(damaged_run(out), 1 + number % 3)
        if kind in ("a byte short", "a byte more") and which == "manifest.json":  # a line's end is no damage
            assert starts(out)[-1] == 4
        else:
            assert [line for line in logged if "damaged" in line][0].startswith(
                "the checkpoint of round 4 is damaged: "
            )
            assert starts(out)[-1] in (0, 2)  # 0: where the older one needs the damaged file, too
            assert (starts(out)[-1] == 0) == any("is sound: starting over" in line for line in logged), logged
            assert starts(out)[-1] == 2 or "memories" in which
        assert ending(out) == ending(runs["whole"]), (kind, which)


def test_where_no_checkpoint_is_sound_a_run_starts_over(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "torn"
    shutil.copytree(runs["torn"], out)
    for round in (2, 4):
        flipped(0.5)(files_of(out, round)["slice-1-of-2.safetensors"], out)
    with logged_lines() as logged:
        launch(damaged_run(out))
    assert starts(out)[-1] == 0
    assert f"no checkpoint in {out / 'checkpoints'} is sound: starting over; they are kept next to it" in logged
    assert ending(out) == ending(runs["whole"]) and 2 not in rounds_kept(out)


def test_what_is_no_checkpoint_is_looked_past(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "torn"
    shutil.copytree(runs["torn"], out)
    base = out / "checkpoints"
    (base / "round-5").write_text("a file")
    (base / "round-0x7").mkdir()
    (base / "round-007").mkdir()
    (base / ".round-5-abc").mkdir()
    launch(damaged_run(out), 2)
    assert starts(out)[-1] == 4 and ending(out) == ending(runs["whole"])
    assert not list(base.glob(".round*"))


def test_a_damaged_checkpoint_takes_no_sound_ones_place(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "torn"
    shutil.copytree(runs["torn"], out)
    files_of(out, 4)["part-0.json"].unlink()
    launch_and_stop(damaged_run(out), stop=5)
    assert rounds_kept(out) == [2, 5], "and not 4 and 5"


def rewrite(there: Path, **changes: Any) -> None:
    """Change a manifest and seal it, as only somebody who means it can."""
    about = json.loads((there / "manifest.json").read_text())
    del about["sha256"]
    (there / "manifest.json").write_text(sealed(about | changes))


@pytest.mark.parametrize("name", ["../../../secret", "/etc/passwd", "..", ".hidden", "a/b", ""])
def test_a_name_that_leads_elsewhere_is_not_followed(name: str, runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "torn"
    shutil.copytree(runs["torn"], out)
    there = out / "checkpoints" / "round-4"
    part = json.loads((there / "part-0.json").read_text())
    part["slice"]["name"] = name
    (there / "part-0.json").write_text(json.dumps(part))
    shas = [hashlib.sha256((there / f"part-{r}.json").read_bytes()).hexdigest() for r in (0, 1)]
    rewrite(there, parts=shas)
    with logged_lines() as logged:
        launch(damaged_run(out))
    assert any(f"round 4 is damaged: part-0.json has {name} for 'name'" in line for line in logged)
    assert starts(out)[-1] == 2 and ending(out) == ending(runs["whole"])


def test_too_new_a_format_is_one_message_and_nothing_is_touched(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "torn"
    shutil.copytree(runs["torn"], out)
    rewrite(out / "checkpoints" / "round-4", format=FORMAT + 1, fedmpi="99.0")
    with pytest.raises(UserError) as caught:
        launch(damaged_run(out), 2)
    assert f"has format {FORMAT + 1}, written by fedmpi 99.0; this is fedmpi" in str(caught.value)
    assert "use the newer one, or --resume never to start over" in str(caught.value)
    assert rounds_kept(out) == [2, 4] and len(metrics(out)) == 4


def test_a_rank_that_does_not_see_the_folder_ends_all_and_nothing_is_removed(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """As on a node whose mount is gone: its rank would take every checkpoint for a damaged one."""
    out = tmp_path / "torn"
    shutil.copytree(runs["torn"], out)

    def look(comm: Comm) -> str:
        where = out if comm.rank == 0 else tmp_path / "not mounted"
        with pytest.raises(UserError) as caught:
            find(where, FINGERPRINT, comm, force=False)
        return str(caught.value)

    said = run_threads(2, look)
    assert said[0] == said[1] and said[0].startswith("rank 1: ") and "is not seen here" in said[0]
    assert rounds_kept(out) == [2, 4]


# -------------------------------------------------------------------------------------------- Another configuration


def test_a_changed_configuration_is_refused_with_what_has_changed(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "torn"
    shutil.copytree(runs["torn"], out)
    cfg = damaged_run(out)
    local = replace(cfg.local, lr=0.07)
    for changed, message in (
        (replace(cfg, local=local), "other settings: --local.lr is 0.07 and was 0.05; give the same, choose another"),
        (replace(cfg, cohort=5, mask="and"), "--mask is and and was gma, --cohort is 5 and was 4; give the same"),
        (replace(cfg, rounds=9), "--rounds is 9 and was 6"),
        (replace(cfg, threads=2), "--threads is 2 and was 1"),
        (replace(cfg, algorithm="fedavg"), "--algorithm is fedavg and was scaffold"),
        (replace(cfg, rounds=3), "--rounds is 3 and was 6"),
        (replace(cfg, seed=5), "--seed is 5 and was 0"),
    ):
        with pytest.raises(UserError) as caught:
            launch(changed, 2)
        assert message in str(caught.value) and "\n" not in str(caught.value)
        assert "--resume force" in str(caught.value)
    assert rounds_kept(out) == [2, 4] and starts(out) == [0, 2]


def test_force_lets_knobs_change_but_not_what_the_state_is_made_of(runs: dict[str, Path], tmp_path: Path) -> None:
    def forced(name: str, **changes: Any) -> tuple[Path, Config]:
        shutil.copytree(runs["torn"], tmp_path / name)
        return tmp_path / name, replace(damaged_run(tmp_path / name), resume="force", **changes)

    for number, changes in enumerate(
        [
            {"rounds": 8},
            {"local": Local(lr=0.01, batch=5)},
            {"mask": "and", "tau": 0.7},
            {"cohort": 6},
            {"sum": "float32"},
            {"sum": "float32", "wire": "bf16"},
        ]
    ):
        out, cfg = forced(f"may-{number}", **changes)
        with logged_lines() as logged:
            launch(cfg, 2)
        assert starts(out)[-1] == 4 and any(line.startswith("resuming with changed settings: --") for line in logged)
        assert sha256(out) != sha256(runs["whole"])
    for number, (changes, what) in enumerate(
        [
            ({"model": "lenet"}, "another model (--model is lenet and was logistic"),
            ({"algorithm": "fedadam"}, "another algorithm (--algorithm is fedadam and was scaffold"),
            ({"clients": 9}, "another data set or split of it (--clients is 9 and was 8)"),
            ({"split": "classes"}, "another data set or split of it (--split is classes and was iid"),
        ]
    ):
        out, cfg = forced(f"may-not-{number}", **changes)
        with pytest.raises(UserError) as caught:
            launch(cfg, 2)
        assert what in str(caught.value) and "choose another --out, or start over with --resume never" in str(
            caught.value
        )
        assert rounds_kept(out) == [2, 4]
    out, cfg = forced("fewer", rounds=3)
    with pytest.raises(UserError, match="has a checkpoint of round 4, and --rounds is 3; give more"):
        launch(cfg)


def test_never_starts_over(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "torn"
    shutil.copytree(runs["torn"], out)
    launch(replace(damaged_run(out), resume="never"), 2)
    assert starts(out)[-1] == 0 and ending(out) == ending(runs["whole"])


def test_what_does_not_touch_training_may_change(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["torn"], tmp_path / "moved")
    cfg = replace(
        damaged_run(tmp_path / "moved"),
        comm="torch",
        timeout=33.0,
        log_to="tensorboard",
        workers=1,
        max_minutes=50.0,
        data_root=str(tmp_path),
        memory=replace(damaged_run(tmp_path).memory, limit=1.0, folder=str(tmp_path)),
        checkpoint=Checkpoint(every=2, minutes=1, keep=5),
    )
    with logged_lines() as logged:
        launch(cfg, 3)
    assert starts(tmp_path / "moved")[-1] == 4 and ending(tmp_path / "moved") == ending(runs["whole"])
    assert not [line for line in logged if "changed" in line]


def test_a_finished_run_resumes_with_more_rounds(tmp_path: Path) -> None:
    cfg = settings_of(tmp_path / "a", algorithm="scaffold", rounds=3, threads=1)
    launch(cfg, 2)
    with pytest.raises(UserError, match="already holds a finished run; choose another folder .* or resume it"):
        launch(replace(cfg, rounds=5))
    with pytest.raises(UserError, match="holds a finished run of 3 rounds; give more --rounds to resume it"):
        launch(replace(cfg, resume="force"))
    launch(replace(cfg, rounds=5, resume="force"))
    launch(replace(cfg, rounds=5, out=str(tmp_path / "b")))
    assert ending(tmp_path / "a") == ending(tmp_path / "b")


def test_sums_in_float32_are_the_same_on_the_same_ranks(tmp_path: Path) -> None:
    cfg = settings_of(tmp_path / "a", algorithm="fedyogi", rounds=4, sum="float32", checkpoint=EACH)
    launch_and_stop(cfg, 3, stop=2)
    launch(cfg, 3)
    launch(replace(cfg, out=str(tmp_path / "b")), 3)
    assert ending(tmp_path / "a") == ending(tmp_path / "b")


def test_a_list_among_the_knobs_is_the_same_list_when_it_is_read(tmp_path: Path) -> None:
    cfg = settings_of(tmp_path, algorithm="fedmeta", meta=Meta(size=30, weights=[1.0, 2.0, 1.0]), checkpoint=EACH)
    launch_and_stop(cfg, stop=1)
    launch(cfg)
    assert starts(tmp_path) == [0, 1]


# ------------------------------------------------------------------------------------------- Slow disks, full disks


def test_a_slow_disk_holds_up_no_round_and_saves_are_postponed_not_lost(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    """Rank 1's part of round 3 is written in round 7 only. What was due in 6 is saved right then."""
    through, saved, real = threading.Event(), list[str](), save.write_tensors

    def slow(tensors: dict[str, Tensor], path: Path) -> FileRecord:
        if "slice-1" in path.name:
            assert through.wait(60)
            saved.append(path.parent.name.split("-")[1])
        return real(tensors, path)

    patch.setattr(save, "write_tensors", slow)
    log_round = Log.round

    def watched(self: Log, report: Any) -> None:
        log_round(self, report)
        if report.round == 7:
            through.set()
            while self.sinks and not list((tmp_path / "a" / "checkpoints").glob(".round-3-*/part-1.json")):
                time.sleep(0.01)

    patch.setattr(Log, "round", watched)
    launch(settings_of(tmp_path / "a", algorithm="scaffold", rounds=10, checkpoint=each(3, keep=9)), 2)
    patch.undo()
    with sandbox():
        launch(settings_of(tmp_path / "b", algorithm="scaffold", rounds=10, checkpoint=each(keep=0)))
    kept = rounds_kept(tmp_path / "a")
    assert sha256(tmp_path / "a") == sha256(tmp_path / "b")
    assert [int(round) for round in saved] == kept, "in order, none of them lost"
    assert kept[0] == 3 and kept[1] in (7, 8) and kept[-1] == 10


def test_what_is_written_slowly_is_the_round_it_was_taken_in(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    """The model and the clients' memories change while the thread still reads them."""
    through, real = threading.Event(), save.write_tensors

    def slow(tensors: dict[str, Tensor], path: Path) -> FileRecord:
        through.wait(60)
        return real(tensors, path)

    cfg = settings_of(tmp_path / "a", algorithm="scaffold", clients=4, rounds=6, checkpoint=each(2, keep=9))
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(save, "write_tensors", slow)
        log_round = Log.round
        inner.setattr(Log, "round", lambda self, r: (through.set() if r.round == 5 else None, log_round(self, r)))
        launch(cfg)
    for round in (6, 5):
        shutil.rmtree(tmp_path / "a" / "checkpoints" / f"round-{round}", ignore_errors=True)
    assert rounds_kept(tmp_path / "a") == [2]
    (tmp_path / "a" / "finished.json").unlink()
    launch(cfg)
    launch(replace(cfg, out=str(tmp_path / "b")))
    assert starts(tmp_path / "a") == [0, 2] and ending(tmp_path / "a") == ending(tmp_path / "b")


@pytest.mark.parametrize("where", ["slice-1", "clients", "seal"])
def test_a_disk_that_fails_one_rank_ends_all_alike_and_keeps_the_last_checkpoint(
    where: str, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    write_tensors, write = save.write_tensors, folder.write

    def full(path: Path) -> bool:
        name = str(path.relative_to(tmp_path))
        return (where in name) if where != "seal" else path.name == "manifest.json"

    def failing(real: Callable[..., Any], at: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            path = next(one for one in args if isinstance(one, Path))
            if full(path) and f"round-{at}-" in str(path):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        return call

    cfg = settings_of(tmp_path / "a", algorithm="scaffold", rounds=6, checkpoint=each(2))

    def work(comm: Comm) -> str:
        with pytest.raises(CommonError) as caught:
            run(prepare(cfg), comm, Place("test", comm.rank, 2, comm.rank, 2), CPU, {})
        return str(caught.value)

    launch_and_stop(cfg, 2, stop=2)
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(save, "write_tensors", failing(write_tensors, 4))
        inner.setattr(folder, "write", failing(write, 4))
        said = run_threads(2, work)
    rank = 0 if where in ("clients", "seal") else 1
    assert (
        said[0]
        == said[1]
        == (
            f"{tmp_path / 'a'} cannot be written (rank {rank}: No space left on device); the checkpoint of round 2 is "
            "kept: put that right and start the same command again"
        )
    )
    assert rounds_kept(tmp_path / "a") == [2]
    launch(cfg, 2)
    launch(replace(cfg, out=str(tmp_path / "b")))
    assert starts(tmp_path / "a") == [0, 2, 2] and ending(tmp_path / "a") == ending(tmp_path / "b")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], capture_output=True, timeout=20
    )
    need("mount", mounted.returncode == 0, "a file system can be mounted by root only")
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=20)


def test_a_full_disk_is_one_message_and_what_was_saved_is_kept(small_disk: Path, tmp_path: Path) -> None:
    out = small_disk / "run"
    cfg = settings_of(out, algorithm="scaffold", rounds=6, checkpoint=each(2))
    launch_and_stop(cfg, stop=2)
    filler, log_round = small_disk / "filler", Log.round

    def fill(self: Log, report: Any) -> None:
        log_round(self, report)
        if report.round == 4:
            with open(filler, "wb", buffering=0) as file, pytest.raises(OSError):
                while True:
                    file.write(bytes(512))

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(Log, "round", fill)
        with pytest.raises(RunError) as caught:
            launch(cfg)
    assert str(caught.value).startswith(f"{out} cannot be written (") and "No space left on device" in str(caught.value)
    assert str(caught.value).endswith("of round 2 is kept: put that right and start the same command again")
    assert rounds_kept(out) == [2]
    filler.unlink()
    launch(cfg)
    launch(replace(cfg, out=str(tmp_path / "b")))
    assert starts(out)[-1] == 2 and ending(out) == ending(tmp_path / "b")


@pytest.mark.processes
def test_a_full_disk_is_exit_code_1_and_one_line(small_disk: Path) -> None:
    out = small_disk / "run"
    run_it = "-m fedmpi train --model logistic --algorithm scaffold --clients 24 --cohort 6 --local.steps 1 --rounds 12"
    run_it += f" --eval.every 20 --threads 1 --log_to none --checkpoint.every 1 --out {out}"
    command = [sys.executable, *run_it.split()]
    full = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=60)
    assert full.returncode == 1
    kept = rounds_kept(out)[-1]
    assert re.fullmatch(
        rf"fedmpi: {out} cannot be written \(.*No space left on device.*\); the checkpoint of round {kept} is kept: "
        "put that right and start the same command again\n",
        full.stderr,
    ), full.stderr
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True, timeout=20)
    done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"resuming after round {kept}" in done.stdout, done.stderr
    assert [one["round"] for one in metrics(out)] == list(range(1, 13))


def test_a_run_folder_that_is_removed_is_one_message_and_the_run_can_begin_again(tmp_path: Path) -> None:
    out = tmp_path / "a"
    cfg = settings_of(out, algorithm="scaffold", rounds=6, checkpoint=each(2))
    log_round = Log.round

    def remove(self: Log, report: Any) -> None:
        while report.round == 4 and out.exists():  # a checkpoint may be written meanwhile
            shutil.rmtree(out, ignore_errors=True)
        log_round(self, report)

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(Log, "round", remove)
        with pytest.raises(RunError, match="a cannot be written .No such file or directory.; "):
            launch(cfg)
    launch(cfg)
    launch(replace(cfg, out=str(tmp_path / "b")))
    assert starts(out) == [0] and ending(out) == ending(tmp_path / "b")
