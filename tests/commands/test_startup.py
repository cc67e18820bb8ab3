"""What is imported, and when: importing is most of the time to the first round."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO, rank_environment

HEAVY = ("torch", "numpy", "jsonargparse", "yaml", "tqdm")
NEVER = ("torchvision", "tensorboard", "submitit", "mpi4py", "matplotlib", "scipy", "pandas", "torch._dynamo", "PIL")
NEVER += ("transformers", "peft", "datasets", "huggingface_hub")
TINY = "--data glyphs --split iid --clients 8 --cohort 2 --rounds 1 --local.steps 1 --eval.samples 10 --threads 1"
TELL = """
import json, sys
def tell(what):
    print("modules", json.dumps([what, sorted(sys.modules)]))
"""


def imported(code: str) -> dict[str, set[str]]:
    """What is imported in a new process at each point that the code prints."""
    done = subprocess.run(
        [sys.executable, "-c", TELL + code], env=rank_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("modules ") for line in done.stdout.splitlines() if line.startswith("modules ")]
    return {what: set(modules) for what, modules in map(json.loads, lines)}


def test_the_package_and_its_help_import_next_to_nothing() -> None:
    code = """
import fedmpi
tell("package")
from fedmpi.commands import main
assert main(["--help"]) == 0 and main(["--version"]) == 0
tell("help")
"""
    shown = imported(code)
    for what in ("package", "help"):
        assert shown[what].isdisjoint((*HEAVY, *NEVER)), what
    assert {name for name in shown["package"] if name.startswith("fedmpi")} == {"fedmpi"}


def test_a_run_imports_at_its_first_step_what_it_needs(tmp_path: Path) -> None:
    code = f"""
import gc
from fedmpi.commands import main
import fedmpi.rounds

def run_round(*args, before=fedmpi.rounds.run_round):
    tell("first step")
    return before(*args)

fedmpi.rounds.run_round = run_round
assert main(["train", *"{TINY} --model lenet".split(), "--out", {str(tmp_path / "run")!r}]) == 0
tell("end")
assert gc.isenabled()
"""
    shown = imported(code)
    assert "torch" in shown["first step"]
    assert sorted(shown["first step"] & set(NEVER)) == []
    assert "tensorboard" in shown["end"], "a run's own sink, once there is something to write"
    assert list((tmp_path / "run" / "tensorboard").iterdir())


@pytest.mark.launchers
@pytest.mark.timeout(120)
def test_ranks_begin_with_what_their_launcher_has_imported(tmp_path: Path) -> None:
    """A rank would import torch again, at every start, if it were not forked from the launcher that has."""
    (tmp_path / "sitecustomize.py").write_text(
        f"open({str(tmp_path / 'interpreters')!r}, 'a').write(f'{{__import__(\"sys\").orig_argv}}\\n')\n"
    )
    environ = rank_environment()
    environ["PYTHONPATH"] = f"{tmp_path}:{environ['PYTHONPATH']}"
    command = ["bash", str(REPO / "launch" / "torchrun.sh"), "2", *TINY.split(), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "2 ranks (torch)" in done.stdout, done.stderr
    begun = (tmp_path / "interpreters").read_text().splitlines()
    if not torch.backends.cuda.is_built():
        assert len([line for line in begun if "fedmpi" in line]) == 1, begun
