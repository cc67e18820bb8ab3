"""Measure what a checkpoint costs: the time that training waits for it, and the time that writing it takes.

    python benchmarks/checkpoint.py --out /scratch/try              # 11.2 million parameters with two moments
    python benchmarks/checkpoint.py --parameters 1000000 --json

A round here is arithmetic on one core. Rounds without checkpoints take turns with rounds of which each hands a
checkpoint over, in one run: `ratio` is the median of the latter by the median of the former. `handed` is what the
training itself spends (a copy of the rank's slices and a small sum over the ranks), `written` is the time of the
thread: files, SHA-256, sync and rename.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from fedmpi.comm import SoloComm
from fedmpi.rounds import State
from fedmpi.runs.checkpoint.format import Fingerprint, Progress
from fedmpi.runs.checkpoint.save import Saver
from fedmpi.runs.config import Checkpoint

FINGERPRINT = Fingerprint({"threads": 1}, {})


def work(x: torch.Tensor, seconds: float) -> float:
    """Multiply matrices for about this long and return the seconds it took."""
    started = time.perf_counter()
    for _ in range(max(int(seconds / 0.02), 1)):
        x = x @ x * 1e-3
    return time.perf_counter() - started


def measure(out: Path, parameters: int, rounds: int, seconds: float) -> dict[str, float]:
    """Return the medians over this many rounds of each kind, in seconds."""
    model = torch.randn(parameters)
    state = State(0, model, torch.zeros(0, dtype=torch.int64), {"m": model.clone(), "v": model.clone()})
    x = torch.randn(700, 700)
    work(x, seconds)
    plain: list[float] = []
    saving: list[float] = []
    handed: list[float] = []
    written: list[float] = []
    with Saver(out, Checkpoint(every=1, minutes=0), FINGERPRINT, SoloComm(), None) as saver:
        for number in range(1, rounds + 1):
            plain.append(work(x, seconds))
            state = State(number, state.model_N, state.ints, state.moments)
            started = time.perf_counter()
            saver.round_done(state, Progress(), [0], last=False)
            handed.append(time.perf_counter() - started)
            assert saver.mine is not None, "a checkpoint is on its way"
            done: list[float] = []
            saver.mine.add_done_callback(lambda _, done=done: done.append(time.perf_counter()))
            saving.append(work(x, seconds) + handed[-1])
            while not done:
                time.sleep(0.001)
            written.append(done[0] - started)
        saver.round_done(state, Progress(), [0], last=True)
    return {
        "round": median(plain),
        "saving": median(saving),
        "ratio": median(saving) / median(plain),
        "handed": median(handed),
        "written": median(written),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=11_200_000)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each kind")
    parser.add_argument("--seconds", type=float, default=2.0, help="about what a round takes")
    parser.add_argument("--out", type=Path, help="folder on the disk to try; default: a temporary one")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=asked.out) as out:
        found = measure(Path(out), asked.parameters, asked.rounds, asked.seconds)
    row = {"parameters": asked.parameters, "bytes": 12 * asked.parameters, **found}
    if asked.json:
        print(json.dumps(row))
        return
    print(f"{asked.parameters:,} parameters with two moments: {row['bytes'] / 1e6:.0f} MB per checkpoint")
    print(f"a round {found['round']:.2f} s, with a checkpoint {found['saving']:.2f} s: ratio {found['ratio']:.2f}")
    print(f"handed over in {found['handed'] * 1e3:.0f} ms; written in {found['written'] * 1e3:.0f} ms meanwhile")


if __name__ == "__main__":
    main()
