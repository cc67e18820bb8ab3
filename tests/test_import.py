"""The package imports where mpi4py finds no MPI library and where submitit is absent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO, rank_environment

from fedmpi.comm.env import Place
from fedmpi.commands import doctor
from fedmpi.plugins import torchvision as imports

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
    everything = "from fedmpi import api, commands, data, rounds, server; from fedmpi.runs import log, measures, run"
    done = run(f"{WITHOUT}{everything}; print('imported')")
    assert done.stdout == "imported\n", done.stderr


def test_asking_for_mpi_where_there_is_none_is_the_users_mistake() -> None:
    ask = "from fedmpi.commands import main; sys.exit(main(['train', '--comm', 'mpi', '--out', '/nowhere/x']))"
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


def made_up(folder: Path, body: str) -> dict[str, str]:
    """An environment in which torchvision is a package with this body."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "version.py").write_text("__version__ = '0.99.1+cu130'\n")
    (package / "__init__.py").write_text(body)
    return rank_environment() | {"PYTHONPATH": str(folder)}


def test_a_torchvision_that_does_not_fit_is_found_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = made_up(tmp_path, "raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(doctor, "outside", lambda: environ)
    *_, found = doctor.versions(Place("alone", 0, 1, 0, 1), doctor.DoctorOptions())
    assert found.level == doctor.WARN and found.text == (
        f"torchvision 0.99.1+cu130 does not fit torch {torch.__version__}: its import fails (RuntimeError: operator "
        "torchvision::nms does not exist)"
    )
    plain = torch.__version__.partition("+")[0]
    assert f"pip install --force-reinstall torch=={plain} torchvision==0.99.1 --index-url " in found.fix
    command = [sys.executable, "-m", "fedmpi.plugins.torchvision"]  # as launch/setup.sh asks
    done = subprocess.run(command, env=environ, cwd=REPO, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stderr == f"{found.text}; {found.fix}\n"


def test_a_torchvision_that_fits_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = made_up(tmp_path, "")
    assert imports.torchvision_trouble(environ) is None
    monkeypatch.setattr(doctor, "outside", lambda: environ)
    *_, found = doctor.versions(Place("alone", 0, 1, 0, 1), doctor.DoctorOptions())
    assert found.check == "torchvision" and found.level == doctor.OK
