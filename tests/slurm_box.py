"""A real Slurm on this machine for tests: slurm/local/up and slurm/local/down in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOCAL = Path(__file__).parent.parent / "slurm" / "local"
DAEMONS = ("munged", "slurmctld", "slurmd", "srun")


def missing() -> list[str]:
    """The programs of Slurm that are not installed."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    return [name for name in DAEMONS if shutil.which(name, path=path) is None]


@contextlib.contextmanager
def slurm(nodes: int = 2) -> Iterator[dict[str, str]]:
    """The variables under which Slurm's commands talk to a cluster of that many nodes, ended on the way out.

    MPICH is to use OFI, whose addresses are short: those of UCX are long, and Slurm 22.05 sometimes cuts them in two
    when the ranks exchange them by pmi2. MPI then fails to start, or hangs.
    """
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        box = Path(folder) / "box"
        try:
            control("up", "--quiet", "--nodes", str(nodes), "--dir", str(box))
            yield {"SLURM_CONF": str(box / "slurm.conf"), "MPIR_CVAR_CH4_NETMOD": "ofi"}
        finally:
            control("down", "--quiet", "--dir", str(box))


def control(script: str, *arguments: str) -> str:
    """What slurm/local/up or down prints; an error where it fails."""
    done = subprocess.run([str(LOCAL / script), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"slurm/local/{script} ended with {done.returncode}: {done.stderr}"
    return done.stdout
