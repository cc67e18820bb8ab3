"""Measure the time from the command to the first step of a client, by phase, and compare it with importing torch.

    python benchmarks/startup.py                          # alone, launch/torchrun.sh 2, launch/mpirun.sh 2
    python benchmarks/startup.py --how torchrun --turns 7 --json

In each turn every way is started once, and so are two baselines: `python -c 'import torch'`, and torchrun with two
ranks that do nothing. Each turn gives ratios to these; medians and quartiles are printed. The phases are those of rank
0, which is the one that has the most to do:
  launcher     until this rank's code begins; of ranks that are forked, the imports are in here too
  import       torch and fedmpi
  settings     reading and checking the command line
  connection   meeting the other ranks
  data         loading and splitting the data
  model        making the model and trying it
  folder       comparing the ranks, the run folder, the log, the first state
A clock is put into the run from outside (a `sitecustomize` in a folder on PYTHONPATH), so nothing of it is in fedmpi.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from kit import median, positive, quartiles

REPO = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
JOB = "--split iid --clients 100 --cohort 10 --model lenet --rounds 1 --local.steps 1 --eval.samples 10 --threads 1"

# Phase -> the call that ends it, and whether its start or its end counts.
MARKS = {
    "launcher": ("fedmpi.commands.train", "main", "before"),
    "import": ("fedmpi.runs.options", "parse", "before"),
    "settings": ("fedmpi.runs.run", "settle", "before"),
    "connection": ("fedmpi.runs.run", "run", "before"),
    "data": ("fedmpi.runs.build", "load_data", "after"),
    "model": ("fedmpi.runs.build", "make_task", "after"),
    "folder": ("fedmpi.rounds", "run_round", "before"),
}
CLOCK = f"""
import functools, importlib.abc, importlib.machinery, os, sys, time

MARKS = {MARKS!r}

def timed(phase, call, when):
    def mark():
        if os.environ.get("RANK", os.environ.get("PMI_RANK", "0")) == "0":
            with open(os.environ["FEDMPI_MARKS"], "a") as file:
                file.write(f"{{phase}} {{time.monotonic()}}\\n")

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        if when == "before":
            mark()
        result = call(*args, **kwargs)
        if when == "after":
            mark()
        return result

    return wrapped

class Clock(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        marks = {{phase: mark[1:] for phase, mark in MARKS.items() if mark[0] == name}}
        spec = importlib.machinery.PathFinder.find_spec(name, path) if marks else None
        if spec is None:
            return None
        run_module = spec.loader.exec_module

        def exec_module(module):
            run_module(module)
            for phase, (function, when) in marks.items():
                setattr(module, function, timed(phase, getattr(module, function), when))

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Clock())
"""


def ways(data: str) -> dict[str, list[str]]:
    """The commands to be timed, without their run folder."""
    job = ["--data", data, *JOB.split()]
    return {
        "alone": [sys.executable, "-m", "fedmpi", "train", *job],
        "torchrun": ["bash", str(REPO / "launch" / "torchrun.sh"), "2", *job],
        "mpirun": ["bash", str(REPO / "launch" / "mpirun.sh"), "2", *job],
    }


def first_step(command: list[str], folder: Path) -> dict[str, float]:
    """Seconds by phase from the command to the first client's first step."""
    marks, number = folder / "marks", len(list(folder.iterdir()))
    marks.unlink(missing_ok=True)
    paths = os.pathsep.join([str(folder / "clock"), str(REPO), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"FEDMPI_MARKS": str(marks), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    finish([*command, "--out", str(folder / f"run-{number}")], environ)
    times = dict(line.split() for line in marks.read_text().splitlines())
    ends = [started] + [float(times[phase]) for phase in MARKS]
    return {phase: end - start for phase, (start, end) in zip(MARKS, pairwise(ends), strict=True)}


def finish(command: list[str], environ: dict[str, str] | None = None) -> float:
    """Seconds that a command takes; its own words where it fails."""
    started = time.monotonic()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with code {done.returncode}:\n{done.stderr[-2000:]}")
    return time.monotonic() - started


def baselines(folder: Path) -> dict[str, Callable[[], float]]:
    """What Python, torch and the launcher take without fedmpi."""
    nothing = folder / "nothing.py"
    nothing.write_text("")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(nothing)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    return {
        "import torch": lambda: finish([sys.executable, "-c", "import torch"], environ),
        "bare torchrun": lambda: finish(torchrun, environ),
    }


def measure(how: list[str], data: str, turns: int, folder: Path) -> list[dict[str, object]]:
    """A row a way, all ways and baselines in turn."""
    (folder / "clock").mkdir()
    (folder / "clock" / "sitecustomize.py").write_text(CLOCK)
    commands, plain = ways(data), baselines(folder)
    finish([sys.executable, "-c", "import torch"])  # the files are in the memory of the system from here on
    phases: dict[str, list[dict[str, float]]] = {way: [] for way in how}
    bare: dict[str, list[float]] = {name: [] for name in plain}
    for _ in range(turns):
        for name, run in plain.items():
            bare[name].append(run())
        for way in how:
            phases[way].append(first_step(commands[way], folder))
    rows: list[dict[str, object]] = []
    for way, times in phases.items():
        totals = [sum(one.values()) for one in times]
        row: dict[str, object] = {"way": way, "data": data, "turns": turns, "seconds": median(totals, 2)}
        row["seconds_quartiles"] = quartiles(totals, 2)
        row["least"] = round(min(totals), 2)
        for name, base in bare.items():
            ratios = [mine / theirs for mine, theirs in zip(totals, base, strict=True)]
            row[f"to {name}"], row[f"to {name} quartiles"] = median(ratios, 2), quartiles(ratios, 2)
            row[f"{name} seconds"] = median(base, 2)
        row["phases"] = {phase: median([one[phase] for one in times], 2) for phase in MARKS}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", nargs="+", choices=list(ways("")), default=list(ways("")), help="all unless given")
    parser.add_argument("--data", default="fmnist", help="a data set that is prepared (fmnist)")
    parser.add_argument("--turns", type=positive, default=5, help="starts per command; medians are printed (5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(options.how, options.data, options.turns, Path(folder)):
            print(json.dumps(row) if options.json else words(row), flush=True)


def words(row: dict[str, object]) -> str:
    phases = row["phases"]
    assert isinstance(phases, dict)
    parts = "  ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items())
    show = (
        "{way:9} {seconds:5.2f} s to the first step, quartiles {seconds_quartiles}, least {least}; {to import torch} x "
        "'import torch' ({import torch seconds} s), {to bare torchrun} x a bare torchrun ({bare torchrun seconds} s)"
    )
    return f"{show.format(**row)}\n          {parts}"


if __name__ == "__main__":
    main()
