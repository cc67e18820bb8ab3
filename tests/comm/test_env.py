"""Launcher detection: every launcher's variables, alone and nested; most were recorded from the real launcher.

`env` reads a mapping from one string, so that a case fits a line. The recordings are from torch 2.13, MPICH 5.0, Slurm
22.05 and submitit 1.5, on two nodes named 127.0.0.1 and 127.0.0.2, cut down to the variables that number a process.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
import setuptools
from conftest import rank_environment
from hypothesis import assume, given
from hypothesis import strategies as st

import fedmpi
from fedmpi.comm.env import (
    OPENMPI,
    PMI,
    TORCH,
    Place,
    available_cores,
    check_mpi_world,
    commit,
    describe,
    expand_hosts,
    find_place,
    rendezvous,
    tasks_on_node,
    threads_per_rank,
)
from fedmpi.errors import UserError

ROOT = Path(fedmpi.__file__).resolve().parents[1]
UUID = "2206a31d-7ba6-4437-950c-61079ed93e98"
ALONE = Place("alone", 0, 1, 0, 1)


def env(text: str) -> MappingProxyType[str, str]:
    """A read-only environment from "NAME=value NAME=value"."""
    return MappingProxyType(dict(word.split("=", 1) for word in text.split()))


def torchrun(rank: int, size: int, local: int, local_size: int, agents: int = 1, run: str = UUID) -> str:
    """Return the variables that torchrun sets for a worker."""
    return (
        f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local} LOCAL_WORLD_SIZE={local_size} GROUP_WORLD_SIZE={agents} "
        f"MASTER_ADDR=localhost MASTER_PORT=42849 TORCHELASTIC_RUN_ID={run} "
    )


def step(rank: int, size: int, local: int, node: int, per_node: str, nodes: str = "127.0.0.[1-2]") -> str:
    """What srun passes to a task of step 0 of job 7."""
    return (
        f"SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID={rank} SLURM_NTASKS={size} SLURM_STEP_NUM_TASKS={size} "
        f"SLURM_LOCALID={local} SLURM_NODEID={node} SLURM_STEP_TASKS_PER_NODE={per_node} SLURM_STEP_NODELIST={nodes} "
        "SLURM_JOB_NODELIST=127.0.0.[1-2] "
    )


BATCH = (
    "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=2(x2) "
    "SLURM_JOB_NODELIST=127.0.0.[1-2] "
)
FEDMPI = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 FEDMPI_STORE=/dev/shm/fedmpi-launch-x/attempt-0 "
HYDRA = "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 "
OMPI = " ".join(f"{name}={value}" for name, value in zip(OPENMPI, (3, 4, 1, 2), strict=True)) + " "
SUBMITIT_LOCAL = (
    "SUBMITIT_EXECUTOR=local SUBMITIT_LOCAL_NTASKS=2 SUBMITIT_LOCAL_JOB_NUM_NODES=1 SUBMITIT_LOCAL_NODEID=0 "
    "SUBMITIT_LOCAL_JOB_ID=4825 "
)
EXPORTED = "MASTER_ADDR=127.0.0.1 MASTER_PORT=45548 RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 "

PLACES = {
    "nothing set": ("", ALONE),
    "torchrun": (torchrun(1, 2, 1, 2), Place("torchrun", 1, 2, 1, 2)),
    "by hand": ("RANK=1 WORLD_SIZE=2", Place("torchrun", 1, 2, 1, 2)),
    "by hand, two nodes": ("RANK=3 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2", Place("torchrun", 3, 4, 1, 2)),
    "fedmpi train --ranks": (FEDMPI, Place("fedmpi", 3, 4, 1, 2)),
    "fedmpi train --ranks per node of a step": (step(1, 2, 0, 1, "1(x2)") + FEDMPI, Place("fedmpi", 3, 4, 1, 2)),
    "fedmpi train --ranks as the one rank of torchrun": (torchrun(0, 1, 0, 1) + FEDMPI, Place("fedmpi", 3, 4, 1, 2)),
    "mpiexec of MPICH": (HYDRA, Place("mpi", 3, 4, 1, 2)),
    "mpirun of Open MPI": (OMPI + "PMIX_RANK=3", Place("mpi", 3, 4, 1, 2)),
    "srun": (step(2, 4, 0, 1, "2(x2)"), Place("srun", 2, 4, 0, 2)),
    "srun, uneven": (step(2, 3, 0, 1, "2,1"), Place("srun", 2, 3, 0, 1)),
    "srun -c 3": (step(2, 4, 0, 1, "2(x2)") + "SLURM_CPUS_PER_TASK=3", Place("srun", 2, 4, 0, 2, cores=3)),
    "srun, few variables": ("SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_LOCALID=1", Place("srun", 1, 4, 1, 4)),
    "srun --mpi=pmi2": (step(2, 4, 0, 1, "2(x2)") + "PMI_RANK=2 PMI_SIZE=4", Place("srun", 2, 4, 0, 2)),
    "srun --mpi=pmix": (step(2, 4, 0, 1, "2(x2)") + "PMIX_RANK=2", Place("srun", 2, 4, 0, 2)),
    "batch script": (BATCH, ALONE),
    "batch script in a reserved step": (BATCH + "SLURM_STEP_ID=4294967291 SLURM_STEP_NUM_TASKS=1", ALONE),
    "interactive step of salloc": (BATCH + "SLURM_STEP_ID=4294967290", ALONE),
    "named step": (BATCH + "SLURM_STEP_ID=batch", ALONE),
    "salloc": ("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_JOB_NODELIST=127.0.0.[1-2]", ALONE),
    "torchrun in a batch script": (BATCH + torchrun(1, 2, 1, 2), Place("torchrun", 1, 2, 1, 2)),
    "torchrun -n 4 in a batch script of 4": (BATCH + torchrun(3, 4, 3, 4), Place("torchrun", 3, 4, 3, 4)),
    "mpiexec in a batch script": (step(1, 2, 0, 1, "1(x2)") + HYDRA, Place("mpi", 3, 4, 1, 2)),
    "mpiexec in a batch script, one a node": (
        step(1, 2, 0, 1, "1(x2)") + "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1",
        Place("mpi", 1, 2, 0, 1),
    ),
    "mpirun's first node in a batch script": (BATCH + OMPI, Place("mpi", 3, 4, 1, 2)),
    "srun of torchrun agents": (
        step(1, 2, 0, 1, "1(x2)") + torchrun(2, 4, 0, 2, agents=2, run="7"),
        Place("torchrun", 2, 4, 0, 2),
    ),
    "srun of agents with a worker each, ranked as they joined": (
        step(0, 2, 0, 0, "1(x2)") + torchrun(1, 2, 0, 1, agents=2, run="none"),
        Place("torchrun", 1, 2, 0, 1),
    ),
    "srun of elastic agents, one node lost": (
        step(1, 2, 0, 1, "1(x2)") + torchrun(0, 2, 0, 2, agents=1, run="job7"),
        Place("torchrun", 0, 2, 0, 2),
    ),
    "mpiexec of torchrun agents": (
        "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 " + torchrun(2, 4, 0, 2, agents=2, run="x"),
        Place("torchrun", 2, 4, 0, 2),
    ),
    "torchrun in a shell of srun --pty": (step(0, 1, 0, 0, "1") + torchrun(1, 2, 1, 2), Place("torchrun", 1, 2, 1, 2)),
    "mpiexec in a shell of srun --pty": (step(0, 1, 0, 0, "1") + HYDRA, Place("mpi", 3, 4, 1, 2)),
    "by hand in a shell of srun --pty": (step(0, 1, 0, 0, "1") + "RANK=1 WORLD_SIZE=2", Place("torchrun", 1, 2, 1, 2)),
    "srun, RANK exported from SLURM_PROCID": (step(2, 4, 0, 1, "2(x2)") + EXPORTED, Place("srun", 2, 4, 0, 2)),
    "srun, WORLD_SIZE exported": (step(2, 4, 0, 1, "2(x2)") + "WORLD_SIZE=4", Place("srun", 2, 4, 0, 2)),
    "submitit on Slurm": (step(2, 4, 0, 1, "2(x2)") + "SUBMITIT_EXECUTOR=slurm", Place("submitit", 2, 4, 0, 2)),
    "submitit on Slurm, exported": (
        step(2, 4, 0, 1, "2(x2)") + "SUBMITIT_EXECUTOR=slurm " + EXPORTED,
        Place("submitit", 2, 4, 0, 2),
    ),
    "submitit's batch script": (BATCH + "SUBMITIT_EXECUTOR=slurm", ALONE),
    "submitit, local": (
        SUBMITIT_LOCAL + "SUBMITIT_LOCAL_GLOBALID=1 SUBMITIT_LOCAL_LOCALID=1",
        Place("submitit", 1, 2, 1, 2),
    ),
    "submitit, local, exported": (
        SUBMITIT_LOCAL + "SUBMITIT_LOCAL_GLOBALID=1 SUBMITIT_LOCAL_LOCALID=1 RANK=1 WORLD_SIZE=2 LOCAL_RANK=1",
        Place("submitit", 1, 2, 1, 2),
    ),
    "submitit's local controller": (SUBMITIT_LOCAL, ALONE),
    "submitted from a shell of srun --pty": (
        BATCH + "SLURM_STEP_ID=11 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1",
        Place("srun", 0, 1, 0, 1),
    ),
}

REFUSED = {
    "by hand in srun": (step(0, 4, 0, 0, "2(x2)") + "RANK=3 WORLD_SIZE=4", r"RANK=3 \(torchrun\) but SLURM_PROCID=0"),
    "by hand in a batch script": (BATCH + "RANK=3 WORLD_SIZE=4", r"RANK=3 \(torchrun\) but SLURM_PROCID=0.*unset one"),
    "by hand in mpiexec": (HYDRA + "RANK=0 WORLD_SIZE=4", r"RANK=0 \(torchrun\) but PMI_RANK=3"),
    "by hand in mpirun": (OMPI + "RANK=3 WORLD_SIZE=8", r"RANK=3 \(torchrun\) but OMPI_COMM_WORLD_RANK=3"),
    "by hand in submitit": (
        SUBMITIT_LOCAL + "SUBMITIT_LOCAL_GLOBALID=1 SUBMITIT_LOCAL_LOCALID=1 RANK=0 WORLD_SIZE=2",
        r"RANK=0 \(torchrun\) but SUBMITIT_LOCAL_GLOBALID=1",
    ),
    "by hand in submitit on Slurm": (
        step(1, 4, 1, 0, "2(x2)") + "SUBMITIT_EXECUTOR=slurm RANK=0 WORLD_SIZE=4",
        r"RANK=0 \(torchrun\) but SLURM_PROCID=1",
    ),
    "srun of standalone torchruns": (step(0, 2, 0, 0, "2") + torchrun(1, 2, 1, 2), "launched twice.*--rdzv-id"),
    "srun of torchruns without rendezvous": (step(1, 2, 0, 1, "1(x2)") + torchrun(1, 2, 1, 2, run="none"), "twice"),
    "mpiexec of torchruns": (HYDRA + torchrun(1, 2, 1, 2), "mpi started 4 tasks"),
    "srun of mpiexecs": (step(0, 4, 0, 0, "2(x2)") + HYDRA, r"PMI_RANK=3 \(mpi\) but SLURM_PROCID=0.*batch script"),
    "srun of submitits": (
        step(2, 4, 0, 1, "2(x2)") + SUBMITIT_LOCAL + "SUBMITIT_LOCAL_GLOBALID=1 SUBMITIT_LOCAL_LOCALID=1",
        r"SUBMITIT_LOCAL_GLOBALID=1 \(submitit\) but SLURM_PROCID=2",
    ),
    "a step's variables kept by a later job": (
        BATCH + "SLURM_STEP_ID=11 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2",
        "SLURM_STEP_NUM_TASKS=2 but SLURM_NTASKS=4",
    ),
    "no size": ("RANK=1", "RANK=1 is set but WORLD_SIZE is not"),
    "no rank": ("WORLD_SIZE=2", "WORLD_SIZE=2 is set but RANK is not"),
    "no MPI size": ("PMI_RANK=1", "PMI_SIZE is not"),
    "PMIx alone": ("PMIX_RANK=1", "PMIX_RANK"),
    "another WORLD_SIZE than srun's": (step(2, 4, 0, 1, "2(x2)") + "WORLD_SIZE=8", "RANK is not"),
    "rank too high": ("RANK=2 WORLD_SIZE=2", "RANK='2'.*from 0 to 1"),
    "size zero": ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE='0'.*from 1 up"),
    "negative": ("RANK=-1 WORLD_SIZE=2", "RANK='-1'"),
    "not a number": ("PMI_RANK=one PMI_SIZE=2", "PMI_RANK='one'"),
    "local rank too high": ("RANK=1 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_RANK='2'"),
    "more here than anywhere": ("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE='4'"),
    "unreadable tasks per node": (step(2, 4, 0, 1, "2*2"), "SLURM_STEP_TASKS_PER_NODE='2\\*2'"),
    "a node too many": (step(2, 4, 0, 2, "2(x2)"), "SLURM_NODEID=2"),
}


@pytest.mark.parametrize(("variables", "place"), PLACES.values(), ids=PLACES)
def test_place(variables: str, place: Place) -> None:
    assert find_place(env(variables)) == place


@pytest.mark.parametrize(("variables", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(variables: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_place(env(variables))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Rank, size, local rank and local size of some process of some world."""
    local_size, nodes = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    node, local_rank = draw(st.integers(0, nodes - 1)), draw(st.integers(0, local_size - 1))
    return node * local_size + local_rank, nodes * local_size, local_rank, local_size


@given(worlds(), st.sampled_from([("torchrun", TORCH), ("mpi", OPENMPI), ("mpi", PMI)]))
def test_any_world_is_read_back(world: tuple[int, int, int, int], launcher: tuple[str, tuple[str, ...]]) -> None:
    name, variables = launcher
    assert find_place(dict(zip(variables, map(str, world), strict=True))) == Place(name, *world)


@given(
    worlds(), st.sampled_from([TORCH, OPENMPI, PMI]), st.integers(0, 3), st.sampled_from(["", "x", "1.0", "-1", " 1"])
)
def test_a_malformed_variable_is_named(world: tuple[int, ...], names: tuple[str, ...], which: int, bad: str) -> None:
    variables = dict(zip(names, map(str, world), strict=True)) | {names[which]: bad}
    with pytest.raises(UserError, match=f"{names[which]}='{bad}'"):
        find_place(variables)


@pytest.mark.parametrize(
    ("variables", "meeting"),
    [
        (torchrun(1, 2, 1, 2), ("localhost", 42849)),
        (step(2, 4, 0, 1, "2(x2)"), ("127.0.0.1", 20007)),
        (step(0, 2, 0, 0, "2", nodes="127.0.0.2"), ("127.0.0.2", 20007)),  # the step is not on the job's first node
        (step(2, 4, 0, 1, "2(x2)") + "MASTER_ADDR=head MASTER_PORT=4000", ("head", 4000)),
        (step(2, 4, 0, 1, "2(x2)") + "SUBMITIT_EXECUTOR=slurm " + EXPORTED, ("127.0.0.1", 45548)),
        (step(2, 4, 0, 1, "2(x2)") + "SUBMITIT_EXECUTOR=slurm", ("127.0.0.1", 20007)),
        (SUBMITIT_LOCAL + "SUBMITIT_LOCAL_GLOBALID=1 SUBMITIT_LOCAL_LOCALID=1", ("127.0.0.1", 24825)),
        (HYDRA, None),
        (BATCH, None),
        ("RANK=0 WORLD_SIZE=1", None),
        ("", None),
    ],
)
def test_rendezvous(variables: str, meeting: tuple[str, int] | None) -> None:
    assert rendezvous(find_place(env(variables)), env(variables)) == meeting


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("RANK=0 WORLD_SIZE=2", "MASTER_ADDR and MASTER_PORT"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a", "MASTER_ADDR and MASTER_PORT"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=http", "MASTER_PORT='http'"),
        ("SLURM_PROCID=1 SLURM_NTASKS=4", "SLURM_JOB_ID"),
    ],
)
def test_no_rendezvous(variables: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rendezvous(find_place(env(variables)), env(variables))


@given(st.integers(1, 2**31), st.integers(0, 50), st.integers(0, 8), st.integers(0, 8))
def test_a_restart_meets_elsewhere(job: int, number: int, restart: int, other: int) -> None:
    assume(restart != other)
    task = dict(env(step(0, 2, 0, 0, "1(x2)"))) | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(number)}
    meetings = [rendezvous(find_place(task), task | {"SLURM_RESTART_COUNT": str(r)}) for r in (restart, other)]
    assert meetings[0] != meetings[1]
    assert all(m is not None and 20000 <= m[1] < 30000 for m in meetings)


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[1-3,7]", "n1 n2 n3 n7"),
        ("127.0.0.[1-2]", "127.0.0.1 127.0.0.2"),
        ("tux[0-1][2-3]", "tux02 tux03 tux12 tux13"),
        ("gpu[08-11]-ib,login,n[9-10]", "gpu08-ib gpu09-ib gpu10-ib gpu11-ib login n9 n10"),
    ],
)
def test_node_list(nodelist: str, hosts: str) -> None:
    assert expand_hosts(nodelist) == hosts.split()


@pytest.mark.parametrize("nodelist", ["", "n[", "n[1-", "n[]", "n[3-1]", "n[a-b]", "n1,,n2", "n 1", "(null)"])
def test_unreadable_node_list(nodelist: str) -> None:
    with pytest.raises(UserError, match="MASTER_ADDR"):
        expand_hosts(nodelist)


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 5)), min_size=1, max_size=5), st.integers(1, 4))
def test_node_list_of_any_ranges(ranges: list[tuple[int, int]], width: int) -> None:
    packed = ",".join(f"{low:0{width}}-{low + more:0{width}}" for low, more in ranges)
    plain = [f"c{number:0{width}}" for low, more in ranges for number in range(low, low + more + 1)]
    assert expand_hosts(f"c[{packed}]") == plain


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1, max_size=5))
def test_tasks_on_node(runs: list[tuple[int, int]]) -> None:
    packed = ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in runs)
    plain = [tasks for tasks, nodes in runs for _ in range(nodes)]
    assert [tasks_on_node(packed, node) for node in range(len(plain))] == plain


@given(worlds(), st.sampled_from(["torchrun", "mpi", "srun", "submitit"]), st.integers(1, 300), st.integers(0, 299))
def test_mpi_world_must_be_the_promised_one(
    world: tuple[int, int, int, int], launcher: str, size: int, rank: int
) -> None:
    place = Place(launcher, *world)
    if (rank, size) == (place.rank, place.size):
        check_mpi_world(place, rank, size)
    else:
        with pytest.raises(UserError, match=launcher):
            check_mpi_world(place, rank, size)
    check_mpi_world(place, place.rank, place.size)


@pytest.mark.parametrize(
    ("launcher", "fix"),
    [
        ("srun", "--mpi=pmi2"),
        ("submitit", "slurm_srun_args"),
        ("torchrun", "--comm torch"),
        ("mpi", "the mpiexec of"),
        ("fedmpi", "mpiexec -n 4"),
    ],
)
def test_singletons_are_refused_with_a_fix(launcher: str, fix: str) -> None:
    with pytest.raises(UserError, match=f"{launcher} started 4 ranks but MPI sees a world of 1.*{fix}"):
        check_mpi_world(Place(launcher, 0, 4, 0, 2), 0, 1)


def test_a_world_of_an_unknown_launcher_is_refused() -> None:
    check_mpi_world(ALONE, 0, 1)
    with pytest.raises(UserError, match="no known launcher .* world of 4"):
        check_mpi_world(ALONE, 0, 4)


def test_threads() -> None:
    four_here = Place("torchrun", 1, 8, 1, 4)
    assert threads_per_rank(four_here, None, 10) == 2
    assert threads_per_rank(four_here, None, 3) == 1
    assert threads_per_rank(four_here, 7, 4) == 7
    bound = Place("srun", 1, 8, 1, 4, cores=5)  # Slurm shows this task only its own cores: they are not shared again
    assert threads_per_rank(bound, None, 5) == 5
    assert threads_per_rank(bound, None, 64) == 5
    assert threads_per_rank(bound, None, 1) == 1


@given(worlds(), st.integers(1, 256))
def test_threads_fill_a_node_and_no_more(world: tuple[int, int, int, int], cores: int) -> None:
    place = Place("torchrun", *world)
    total = threads_per_rank(place, None, cores) * place.local_size
    assert total == place.local_size or cores - place.local_size < total <= cores


def test_available_cores_are_those_of_the_process() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


def test_record_can_be_written_and_keeps_secrets() -> None:
    variables = env("SLURM_JOB_ID=7 SLURM_RESTART_COUNT=1 AWS_SECRET_ACCESS_KEY=hunter2 WANDB_API_KEY=hunter2")
    record = describe(Place("srun", 1, 2, 0, 1), variables, threads=3, device="cpu", folder=ROOT)
    text = json.dumps(record)
    assert "hunter2" not in text
    assert json.loads(text) == record
    assert record["job"] == {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    assert (record["launcher"], record["rank"], record["size"], record["threads"]) == ("srun", 1, 2, 3)
    versions = record["versions"]
    assert isinstance(versions, dict)
    assert versions["fedmpi"] == fedmpi.__version__
    assert versions["torch"]


def test_commit(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert commit(tmp_path) is None
    git("init", "-q")
    assert commit(tmp_path) is None
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    git("tag", "-a", "v1", "-m", "a tag is not a commit")
    assert commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("2")
    assert commit(tmp_path) == git("rev-parse", "HEAD") + "-dirty"


def test_commit_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(ROOT) is None


PROBE = """
import json, os, pathlib, sys
from fedmpi.comm.env import check_mpi_world, find_place, rendezvous
from fedmpi.errors import UserError
place = find_place(os.environ)
record = {"place": [place.launcher, place.rank, place.size, place.local_rank, place.local_size]}
record["meets"] = rendezvous(place, os.environ) is not None
from mpi4py import MPI
try:
    check_mpi_world(place, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    record["mpi"] = "agrees"
except UserError as error:
    record["mpi"] = str(error)
pathlib.Path(sys.argv[1], f"{place.rank}.json").write_text(json.dumps(record))
"""


def launch(folder: Path, *launcher: str) -> list[dict[str, object]]:
    """Return what two real ranks detect about themselves."""
    probe = folder / "probe.py"
    probe.write_text(PROBE)
    command = [*launcher, str(probe), str(folder)]
    done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.launchers
def test_real_torchrun(tmp_path: Path, mpiexec: list[str]) -> None:
    ranks = launch(tmp_path, sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert [rank["place"] for rank in ranks] == [["torchrun", k, 2, k, 2] for k in range(2)]
    assert all(rank["meets"] for rank in ranks)
    assert all("MPI sees a world of 1" in str(rank["mpi"]) for rank in ranks)


@pytest.mark.launchers
def test_real_mpiexec(tmp_path: Path, mpiexec: list[str]) -> None:
    ranks = launch(tmp_path, *mpiexec, "-n", "2", sys.executable)
    assert [rank["place"] for rank in ranks] == [["mpi", k, 2, k, 2] for k in range(2)]
    assert all(rank["mpi"] == "agrees" and not rank["meets"] for rank in ranks)


def test_every_dependency_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    setup: dict[str, object] = {}
    monkeypatch.setattr(setuptools, "setup", setup.update)
    runpy.run_path(str(ROOT / "setup.py"))
    assert setup["version"] == fedmpi.__version__
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    required, extras = setup["install_requires"], setup["extras_require"]
    assert isinstance(required, list) and isinstance(extras, dict)
    names = {need.split(">")[0].split("[")[0] for need in [*required, *extras["test"], *extras["dev"]]}
    assert pinned == names
