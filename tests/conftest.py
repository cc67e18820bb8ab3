"""What the tests share: components that may be absent, and gloo ranks as processes."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from run_folders import COUNTERS, make_run

REPO = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

hypothesis.settings.register_profile("fedmpi", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fedmpi")
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the launcher tests of a file on one worker, since it may start a Slurm; run the expensive tests first."""
    expensive = ("launchers", "slow", "processes")
    for item in items:
        if item.get_closest_marker("launchers"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if hasattr(config, "workerinput"):  # else all workers but one wait at the end for the last expensive test
        items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in expensive))


@pytest.fixture(autouse=True)
def traces_removed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Puts back what a command leaves that ran in this process: the package's logger, and of a user's module the folder
    on the path and the module itself."""
    path = sys.path[:]
    yield
    logger = logging.getLogger("fedmpi")
    logger.handlers[:], logger.level, logger.propagate = [], logging.NOTSET, True
    sys.path[:] = path
    base = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(base):
            del sys.modules[name]


def need(component: str, present: bool, reason: str) -> None:
    """Skip where a component is absent; fail where FEDMPI_REQUIRE says that it must be there."""
    if present:
        return
    if component in os.environ.get("FEDMPI_REQUIRE", "").split(","):
        pytest.fail(f"FEDMPI_REQUIRE asks for {component}, but {reason}")
    pytest.skip(reason)


@pytest.fixture
def mpiexec() -> list[str]:
    """The command that starts MPI ranks with this Python: mpiexec of the environment, else of the system."""
    path = BIN / "mpiexec" if (BIN / "mpiexec").exists() else shutil.which("mpiexec")
    need("mpi", path is not None, "mpiexec was not found: pip install mpich")
    return [str(path)]


def rank_environment() -> dict[str, str]:
    """The environment for ranks that a test launches: without this process's own launch variables, with one thread."""
    foreign = ("SLURM_", "PMI", "MPI_", "OMPI_", "SUBMITIT_", "TORCHELASTIC_")
    ours = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    ours.pop("FEDMPI_STORE", None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        ours.pop(name, None)
    folders = [REPO, REPO / "tests", *sorted({path.parent for path in REPO.glob("tests/**/test_*.py")})]
    return ours | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, folders))}


def _gloo_rank(rank: int, size: int, rendezvous: str, timeout: float, work: Callable[..., None], args: tuple) -> None:
    from torch.distributed import FileStore

    from fedmpi.comm.torch import TorchComm

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    comm = TorchComm(FileStore(rendezvous, size), rank, size, torch.device("cpu"), timeout)
    work(comm, *args)
    comm.close()


@pytest.fixture
def gloo(tmp_path: Path) -> Callable[..., None]:
    """`gloo(size, work, *args)` runs work(comm, *args) in that many processes; a failing rank's traceback is raised."""

    def run(size: int, work: Callable[..., None], *args: object, timeout: float = 60.0) -> None:
        meeting = str(tmp_path / f"meeting-{size}")
        torch.multiprocessing.spawn(_gloo_rank, (size, meeting, timeout, work, args), nprocs=size)

    return run


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the launcher's counters of restarts from a test, and what `sandbox` hides."""
    from shell import sandbox  # not earlier: it imports the whole package into every spawned rank

    for name in COUNTERS:
        monkeypatch.delenv(name, raising=False)
    with sandbox():
        yield


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a job's run in which nothing has happened yet."""
    return make_run(tmp_path / "run")
