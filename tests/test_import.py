"""The package imports where mpi4py finds no MPI library and where submitit is absent."""

from __future__ import annotations

import subprocess
import sys

from conftest import rank_environment

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mpi4py", "submitit"):
            raise ImportError(f"no {name} here")

sys.meta_path.insert(0, Absent())
import fedmpi
assert "torch" not in sys.modules, "import fedmpi is quick"
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=rank_environment(), capture_output=True, text=True, timeout=60
    )


def test_the_package_needs_neither_mpi_nor_submitit() -> None:
    everything = "from fedmpi import api, cli, compare, data, evaluate, feed, log, options, reduce, rounds, run, server"
    done = run(f"{WITHOUT}{everything}; print('imported')")
    assert done.stdout == "imported\n", done.stderr


def test_asking_for_mpi_where_there_is_none_is_the_users_mistake() -> None:
    ask = "from fedmpi.cli import main; sys.exit(main(['train', '--comm', 'mpi', '--out', '/nowhere/x']))"
    done = run(WITHOUT + ask)
    assert done.returncode == 2
    assert (
        done.stderr.startswith("fedmpi: --comm mpi needs mpi4py and an MPI library") and "Traceback" not in done.stderr
    )


def test_a_users_module_may_import_torchvision() -> None:
    code = """
import pathlib, sys, tempfile
folder = tempfile.mkdtemp()
pathlib.Path(folder, "mine.py").write_text("import torchvision\\nnet = torchvision.models.resnet18\\n")
sys.path.insert(0, folder)
from fedmpi.plugins import import_path
assert import_path("model", "mine:net").__name__ == "resnet18"
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
