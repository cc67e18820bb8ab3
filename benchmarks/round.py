"""Measure seconds per round of a common job: fedmpi, a plain PyTorch loop and, if installed, pfl-research.

    python benchmarks/round.py                            # LeNet on Fashion-MNIST, 100 clients, 10 a round
    python benchmarks/round.py --job resnet18             # ResNet-18 with GroupNorm, 2 steps a client
    python benchmarks/round.py --peer /venv/bin/python    # and pfl-research, installed for that Python
    python benchmarks/round.py --profile                  # where a round's time goes, in percent
    python benchmarks/round.py --device cuda              # ranks on the GPUs, in turn; their sums on the host

The jobs: `lenet` is 100 clients with 600 images of Fashion-MNIST each, 10 of them a round, one epoch in batches of 32.
`resnet18` has 11.2 million parameters, takes 2 steps a client on batches of 32 made-up images of 3x32x32, 10 clients a
round. Both: SGD with momentum 0.9, two ranks over gloo, one thread each, no evaluation.

The plain loop (peers/plain_round.py) is what one writes by hand: NCHW, torch.optim.SGD, copies of the state dict, one
all-reduce of the flattened deltas. All programs are started once and wait; then they run blocks of rounds in turn, one
program at a time. Each turn gives ratios, and their median and quartiles are printed: how many times as fast as the
plain loop. Core time (what the ranks computed, waiting left out) says the same where other work disturbs the machine.
Where Fashion-MNIST is not prepared, glyphs, of the same shape, take its place, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kit import device, median, positive, quartiles

HERE = Path(__file__).resolve().parent
RANKS = 2
VARIANTS = {f"fedmpi {how} {mask}": (how, mask) for how in ("exact", "float32") for mask in ("gma", "mean")}


@dataclass
class Program:
    """A program on its ranks, which run rounds on request."""

    name: str
    ranks: list[subprocess.Popen[str]]
    log: Path
    times: list[float] = field(default_factory=list)
    """seconds a round, of each block"""
    cpu: list[float] = field(default_factory=list)
    """seconds of a core a round and rank, of each block"""
    spent: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    """further numbers of rank 0, of the last block"""

    def block(self, rounds: int) -> None:
        """Run so many rounds and keep their time."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{rounds}\n")
            rank.stdin.flush()
        answers = [json.loads(self.wait_for("took", rank)) for rank in self.ranks]
        self.extra = answers[0]
        seconds: float = max(answer["seconds"] for answer in answers)
        self.spent += seconds
        self.times.append(seconds / rounds)
        self.cpu.append(statistics.fmean(answer["cpu"] for answer in answers) / rounds)

    def wait_for(self, word: str, rank: subprocess.Popen[str]) -> str:
        """The rest of the next line that begins with a word."""
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        sys.exit(f"{self.name} has ended:\n{self.log.read_text()[-2000:]}")

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def start(name: str, python: str, script: str, arguments: tuple[str, ...], job: Path, **extra: str) -> Program:
    """Start a program on its ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = job / f"{name.replace(' ', '-')}.log"
    paths = os.pathsep.join([str(HERE / "peers"), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"OMP_NUM_THREADS": "1", "FEDMPI_JOB": str(job), "PYTHONPATH": paths, **extra}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    environ |= {"GLOO_SOCKET_IFNAME": "lo"} if "GLOO_SOCKET_IFNAME" not in os.environ else {}
    ranks = []
    for rank in range(RANKS):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS)}
        with open(log, "a") as file:
            ranks.append(
                subprocess.Popen(
                    [python, str(HERE / "peers" / script), *arguments],
                    env=environ | place,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                )
            )
    return Program(name, ranks, log)


def write_job(name: str, folder: Path, device: str) -> str:
    """Write the job's settings and samples; returns what the data are."""
    from fedmpi.data import Arrays, load
    from fedmpi.errors import UserError

    settings: dict[str, object] = {"model": name, "clients": 100, "cohort": 10, "batch": 32, "momentum": 0.9}
    settings["device"] = device
    if name == "resnet18":
        rng = np.random.default_rng(0)
        x, y = rng.integers(0, 256, (6400, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, 6400)
        settings |= {"steps": 2, "lr": 0.01, "mean": [0.5] * 3, "std": [0.25] * 3}
        said = "random images, 3x32x32"
    elif name == "transformer":
        rng = np.random.default_rng(0)
        x, y = rng.integers(0, 128, (12800, 64), dtype=np.uint8), rng.integers(0, 10, 12800)
        settings |= {"steps": None, "lr": 0.01, "mean": [], "std": []}
        said = "random tokens"
    else:
        try:
            data, said = load("fmnist"), "Fashion-MNIST"
        except UserError:
            data, said = load("glyphs"), "glyphs (Fashion-MNIST is not prepared)"
        assert isinstance(data, Arrays)
        x, y = data.x.numpy(), data.y.numpy()
        x = x.reshape(-1, 1, 28, 28)
        settings |= {"steps": None, "lr": 0.01, "mean": list(data.mean), "std": list(data.std), "data": data.name}
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y.astype(np.int64))
    (folder / "job.json").write_text(json.dumps(settings))
    return said


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Run all programs in turn and print their rows."""
    said = write_job(options.job, folder, options.device)
    extra = {"FEDMPI_PROFILE": "1"} if options.profile else {}
    with ExitStack() as stack:
        programs = [start("plain loop", sys.executable, "plain_round.py", (), folder)]
        for name in [next(iter(VARIANTS))] if options.profile else options.variants:
            words = (*VARIANTS[name], *options.fedmpi)
            programs.append(start(name, sys.executable, "fedmpi_round.py", words, folder, **extra))
        if options.peer:
            programs.append(start("pfl", options.peer, "pfl_round.py", (), folder, TORCHELASTIC_RUN_ID="round"))
        for program in programs:
            stack.callback(program.end)
        for program in programs:
            for rank in program.ranks:
                program.wait_for("ready", rank)
        for program in programs:
            program.block(1)  # to warm up
            program.times.clear()
            program.cpu.clear()
        for turn in range(options.turns):
            for program in programs[:: 1 if turn % 2 else -1]:
                program.block(options.rounds)
        for program in programs:
            row = row_of(program, programs, options, said)
            print(json.dumps(row) if options.json else words_of(row), flush=True)


def row_of(program: Program, programs: list[Program], options: argparse.Namespace, said: str) -> dict[str, object]:
    """Return a program's time, and its speed relative to the programs other than fedmpi."""
    row: dict[str, object] = {"job": options.job, "program": program.name, "data": said, "ranks": RANKS}
    row["device"] = options.device
    row |= {"turns": options.turns, "rounds": options.rounds, "seconds_a_round": median(program.times)}
    row["cpu_seconds_a_round"] = median(program.cpu)
    for other in programs:
        if other is not program and not other.name.startswith("fedmpi"):
            ratios = [theirs / mine for mine, theirs in zip(program.times, other.times, strict=True)]
            row[f"times as fast as {other.name}"] = median(ratios)
            row[f"times as fast as {other.name}, quartiles"] = quartiles(ratios)
            cpu = [theirs / mine for mine, theirs in zip(program.cpu, other.cpu, strict=True)]
            row[f"times as little of a core as {other.name}"] = median(cpu)
    if phases := program.extra.get("phases"):
        shares = {name: seconds / program.spent for name, seconds in phases.items()}
        row["percent"] = percent({**shares, "the rest": 1 - sum(shares.values())})
    if seen := program.extra.get("seen"):
        row["percent, rank 0 looked at"] = percent({name: count / sum(seen.values()) for name, count in seen.items()})
    return row


def percent(shares: dict[str, float]) -> dict[str, float]:
    return {name: round(100 * share, 1) for name, share in sorted(shares.items(), key=lambda one: -one[1]) if share}


def words_of(row: dict[str, object]) -> str:
    text = f"{row['job']}  {row['program']:20} {row['seconds_a_round']:6.3f} s a round"
    for name, value in row.items():
        if name.startswith("times as fast as") and not name.endswith("quartiles"):
            other = name.removeprefix("times as fast as ")
            text += f"   {value:.2f} x as fast as {'the ' * (other != 'pfl')}{other} {row[f'{name}, quartiles']}"
            text += f", in core time {row[f'times as little of a core as {other}']:.2f} x"
    for name in ("percent", "percent, rank 0 looked at"):
        shares = row.get(name)
        if isinstance(shares, dict):
            text += f"\n    {name}: " + ", ".join(f"{what} {share}" for what, share in shares.items())
    return text


def python(word: str) -> str:
    """A Python that has pfl."""
    if shutil.which(word) is None:
        raise argparse.ArgumentTypeError(f"'{word}' is no program; give the Python of an environment that has pfl")
    if subprocess.run([word, "-c", "import pfl, torch"], capture_output=True).returncode:
        raise argparse.ArgumentTypeError(f"'{word}' cannot import pfl and torch; pip install pfl==0.6.0 torch for it")
    return word


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=("lenet", "own-lenet", "resnet18", "transformer"), default="lenet")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--peer", type=python, metavar="PYTHON", help="a Python that has pfl, to run the job too")
    parser.add_argument("--turns", type=positive, help="blocks a program (9; resnet18: 5)")
    parser.add_argument("--rounds", type=positive, help="rounds a block (2; resnet18: 1)")
    parser.add_argument(
        "--device", type=device, default="cpu", help="as of 'fedmpi train'; of pfl-research its own choice"
    )
    parser.add_argument("--profile", action="store_true", help="where the time goes, of the first variant")
    parser.add_argument("--fedmpi", nargs=argparse.REMAINDER, default=[], help="last: more options of 'fedmpi train'")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parser.parse_args()
    options.turns = options.turns or (5 if options.job == "resnet18" else 9)
    options.rounds = options.rounds or (1 if options.job == "resnet18" else 2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the ranks would be left alone
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
