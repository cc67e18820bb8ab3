"""The job of benchmarks/round.py for fedmpi: the command itself, with a gate before every round.

What is timed is all that the command does from one round to the next, metrics.jsonl and the ranks' word on whether to
stop included. FEDMPI_PROFILE=1 samples the stack of rank 0 every millisecond and prints the shares.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

from common import gate, job

from fedmpi.commands import main as command
from fedmpi.runs import run

# Where a sample belongs: the innermost frame that has a row here, by file and, where one is named, function.
WAITING = "waiting for the coordinator"
PLACES = (
    ("peers/common.py", "gate", WAITING),
    ("torch/autograd/", "", "forward and backward"),
    ("torch/nn/", "", "forward and backward"),
    ("fedmpi/models/", "", "forward and backward"),
    ("peers/common.py", "", "forward and backward"),
    ("fedmpi/data/objective.py", "", "forward and backward"),
    ("fedmpi/clients/together.py", "", "forward and backward"),
    ("fedmpi/clients/task.py", "gradient", "forward and backward"),
    ("fedmpi/clients/feed.py", "", "feed"),
    ("fedmpi/clients/augment.py", "", "feed"),
    ("fedmpi/clients/task.py", "draw_batches", "feed"),
    ("fedmpi/local/", "", "update"),
    ("fedmpi/aggregate/sums.py", "agree", "wait"),
    ("fedmpi/aggregate/sums.py", "", "fold"),
    ("fedmpi/clients/task.py", "", "begin and end of a client"),
    ("fedmpi/server.py", "", "server"),
    ("fedmpi/masks.py", "", "server"),
    ("fedmpi/rounds.py", "summarise", "report"),
    ("fedmpi/comm/base.py", "gather", "gather"),
    ("fedmpi/aggregate/exchange.py", "", "reduce"),
)


class Looker(threading.Thread):
    """Counts where the main thread is."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: Counter[str] = Counter()
        self.looking = False
        self.main = threading.main_thread().ident

    def run(self) -> None:
        while True:
            time.sleep(0.001)
            frame = sys._current_frames().get(self.main or 0)
            place = place_of(frame) if self.looking else WAITING
            if place != WAITING:
                self.seen[place] += 1


def place_of(frame: FrameType | None) -> str:
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        for part, name, place in PLACES:
            if part in file and name in ("", function):
                return place
        frame = frame.f_back
    return "the rest"


def gated(*args: Any, inner: Any = run.rounds, **kwargs: Any) -> Iterator[Any]:
    """Run `rounds` in blocks; report the seconds of each phase and the sampled shares per block."""
    looker = Looker() if os.environ.get("FEDMPI_PROFILE") and os.environ["RANK"] == "0" else None
    if looker is not None:
        looker.start()
    training, phases = inner(*args, **kwargs), Counter[str]()
    for report_block in gate():
        if looker is not None:
            looker.looking = True
        state, report = next(training)
        phases.update(report.seconds)
        report_block(phases=dict(phases), seen={} if looker is None else dict(looker.seen))
        yield state, report
    os._exit(0)


def main() -> int:
    of = job()
    run.rounds = gated
    how, mask = sys.argv[1:3]
    own = {"own-lenet": "common:LeNet", "resnet18": "common:resnet18", "transformer": "common:Transformer"}
    data, name = ("common:pictures", own[of.model]) if of.model in own else (of.data, of.model)
    words = ["train", "--data", data, "--split", "iid", "--model", name, "--sum", how, "--mask", mask]
    words += ["--clients", of.clients, "--cohort", of.cohort, "--local.batch", of.batch, "--local.lr", of.lr]
    words += ["--local.momentum", of.momentum, *(["--local.steps", of.steps] if of.steps else ["--local.epochs", 1])]
    words += ["--rounds", 10**6, "--eval.every", 10**6, "--checkpoint.keep", 0, "--threads", 1, "--log_to", "none"]
    words += ["--device", of.device, "--out", of.folder / f"{how}-{mask}"]
    return command([*map(str, words), *sys.argv[3:]])


if __name__ == "__main__":
    sys.exit(main())
