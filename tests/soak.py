"""Kill real runs at random and check how they end: `python -m tests.soak --kills 200`.

Runs under real launchers are killed with SIGKILL at random moments: a rank, two of them, or the launcher itself; while
they start, while they train and, most often, while they write a checkpoint. torchrun and fedmpi restart their ranks;
everything else is restarted here, now and then on another number of ranks and by another launcher.
Each run must end with the bits of an undisturbed one, every round in its metrics once, no process and no shared memory
left.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmpi.comm.leftovers import locked

REPO = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
SHARED = Path("/dev/shm")
MARK = "FEDMPI_SOAK"  # in the environment of every process of a run, which is how they are found
RANK_NAMES = (b"LOCAL_RANK=", b"PMI_RANK=")
LAUNCHERS, ALGORITHMS = ("fedmpi", "torchrun", "mpiexec"), ("scaffold", "fedyogi")
FOREIGN = ("SLURM_", "PMI", "MPI_", "OMPI_", "SUBMITIT_", "TORCHELASTIC_", "FEDMPI_")
OPTIONS = "--data glyphs --model logistic --clients 24 --cohort 6 --local.steps 3 --eval.samples 100 --eval.every 3"
OPTIONS += " --mask gma"
KILLS_A_RUN = 8
HUNG_SECONDS = 90.0  # without a new process or a new round: nothing here takes that long
QUIET_SECONDS = 5.0  # after the end, for processes on their way out
ORPHAN_SECONDS = 20.0  # the same for ranks whose launcher is gone


@dataclass
class Tally:
    """What has been seen so far, by all jobs."""

    kills: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Soak:
    """One soak: what was asked for, what the right ends are, and what has been seen."""

    wanted: int
    rounds: int
    launchers: Sequence[str]
    folder: Path
    reference: dict[str, tuple[str, list[dict[str, Any]]]]
    say: Callable[[str], None]
    tally: Tally = field(default_factory=Tally)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enough(self) -> bool:
        return self.tally.kills >= self.wanted or bool(self.tally.wrong)

    def count(self, *what: str) -> None:
        with self.lock:
            self.tally.counts.update(what)

    def killed(self, *what: str) -> None:
        with self.lock:
            self.tally.kills += 1
        self.count(*what)


class Wrong(Exception):
    """A violated promise, with an error message."""


# ------------------------------------------------------------------------------------------------ one start of a run


def train_command(algorithm: str, rounds: int, out: Path) -> list[str]:
    knobs = ["--algorithm", algorithm, "--rounds", str(rounds), "--threads", "1", "--log_to", "none"]
    return ["-m", "fedmpi", "train", *OPTIONS.split(), *knobs, "--timeout", "60", "--out", str(out)]


def launched(launcher: str, ranks: int, train: list[str]) -> list[str]:
    """The command that starts the ranks."""
    if launcher == "fedmpi":
        return [sys.executable, *train, "--ranks", str(ranks), "--max_restarts", "1000"]
    if launcher == "torchrun":
        agent = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1000"]
        return [*agent, "--monitor-interval=0.1", *train]
    mpiexec = BIN / "mpiexec" if (BIN / "mpiexec").exists() else shutil.which("mpiexec")
    return [str(mpiexec), "-n", str(ranks), sys.executable, "-m", "mpi4py", *train]


def environment(mark: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return ours | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "PYTHONFAULTHANDLER": "1", MARK: mark}


def processes(mark: str) -> dict[int, bool]:
    """The processes of a run, whoever their parent is now, and whether each is a rank."""
    found, forked = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                names = (entry / "environ").read_bytes().split(b"\0")
                if f"{MARK}={mark}".encode() in names:
                    found[int(entry.name)] = any(name.startswith(RANK_NAMES) for name in names)
                    if b"--ranks" in (entry / "cmdline").read_bytes():
                        forked[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found | {pid: parent in forked for pid, parent in forked.items()}  # a fork has its launcher's environment


def ranks_of(mark: str) -> list[int]:
    return [pid for pid, is_rank in processes(mark).items() if is_rank]


def kill(pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to those that are still there; returns how many."""
    hit = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            hit += 1
    return hit


@dataclass
class Run:
    """One run, through all of its starts."""

    soak: Soak
    name: str
    algorithm: str
    rng: random.Random
    job: subprocess.Popen[bytes] | None = None
    kills: int = 0
    story: list[str] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.out, self.log = self.soak.folder / self.name, self.soak.folder / f"{self.name}.log"
        self.sign, self.signed = "", time.monotonic()

    @property
    def finished(self) -> bool:
        return (self.out / "finished.json").exists()

    def alive(self) -> bool:
        return self.job is not None and self.job.poll() is None

    def rounds_done(self) -> int:
        with contextlib.suppress(OSError):
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def half_written(self) -> set[str]:
        """The checkpoints that are being written, or were when their writer died."""
        with contextlib.suppress(OSError):
            return {name for name in os.listdir(self.out / "checkpoints") if name.startswith(".round-")}
        return set()

    def launch(self) -> None:
        launcher, ranks = self.rng.choice(self.soak.launchers), self.rng.choice((2, 2, 3))
        train = train_command(self.algorithm, self.soak.rounds, self.out)
        train += ["--checkpoint.every", str(self.rng.choice((1, 1, 1, 2)))]
        self.story.append(f"{launcher} {ranks}:")
        self.soak.count("launches", launcher)
        with open(self.log, "ab") as log:
            self.job = subprocess.Popen(
                launched(launcher, ranks, train),
                env=environment(self.mark),
                cwd=self.soak.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def check_progress(self) -> None:
        """Nothing new for a long time: let the ranks write where they stand, and call it wrong."""
        sign = f"{sorted(processes(self.mark))} {self.rounds_done()} {sorted(self.half_written())}"
        if sign != self.sign:
            self.sign, self.signed = sign, time.monotonic()
        elif time.monotonic() - self.signed > HUNG_SECONDS:
            kill(ranks_of(self.mark), signal.SIGABRT)
            time.sleep(1)
            raise Wrong(f"hung for {HUNG_SECONDS:g} s; the ranks' stacks are in {self.log}")

    def wait_for(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Whether something came about before the launcher ended and the time was up."""
        deadline, look = time.monotonic() + seconds, time.monotonic()
        while self.alive() and time.monotonic() < deadline:
            if ready():
                return True
            if time.monotonic() > look:  # the whole of /proc is read, so not each time
                self.check_progress()
                look = time.monotonic() + 1
            time.sleep(0.0005)
        return False

    def wait_for_moment(self) -> str:
        """Wait until it is time to kill; returns what time that is, empty where the run ended first."""
        if not self.wait_for(lambda: bool(ranks_of(self.mark)), 30):
            return ""
        when = self.rng.choice(["start-up", "any time", *3 * ["writing"]])
        if when == "any time":
            self.wait_for(lambda: False, self.rng.uniform(0, 7))
        elif when == "start-up":
            self.wait_for(lambda: False, self.rng.uniform(0, 5))
        else:
            before, old = self.rounds_done(), self.half_written()
            rounds = self.rng.randrange(4)
            self.wait_for(lambda: self.rounds_done() > before + rounds, 60)
            self.wait_for(lambda: bool(self.half_written() - old), 20)
            time.sleep(self.rng.choice((0, 0, 0.001, 0.003, 0.01)))
        return when if self.alive() else ""

    def strike(self, old: set[str]) -> bool:
        """Kill a rank, two, or the launcher; whether anybody was there to be killed."""
        assert self.job is not None
        ranks = ranks_of(self.mark)
        writing = bool(self.half_written() - old)
        whom = self.rng.choice(["a rank", "a rank", "a rank", "two ranks", "the launcher"])
        if whom == "the launcher":
            victims = [self.job.pid]
        else:
            victims = self.rng.sample(ranks, min(len(ranks), 2 if whom == "two ranks" else 1))
        if not kill(victims):
            return False
        self.kills += 1
        self.story.append(f"{whom}@{self.rounds_done()}{'w' if writing else ''}")
        self.soak.killed(whom, *["while writing"] * writing)
        return True

    def live(self) -> None:
        """Run one launch until it ends."""
        self.launch()
        assert self.job is not None
        while self.alive() and self.kills < KILLS_A_RUN and not self.soak.enough():
            old = self.half_written()
            if self.wait_for_moment() and self.strike(old):
                victims_gone = time.monotonic() + 0.5
                self.wait_for(lambda: time.monotonic() > victims_gone, 1)  # noqa: B023 - used at once
        while self.alive():
            self.check_progress()
            time.sleep(0.1)
        code = self.job.wait()
        if code not in (0, -signal.SIGKILL) and not self.story[-1].startswith(("a rank", "two ranks")):
            self.refused(code)
        if not self.finished and self.rng.random() < 0.7:  # else the next one starts next to what is left of this one
            self.end_all()

    def refused(self, code: int) -> None:
        """Check a launch that failed by itself: right only if another start was running or had finished."""
        said = self.log.read_text(errors="replace")[-4000:]
        if not self.finished and " is in use by " not in said:
            raise Wrong(f"the launcher left with code {code}; see {self.log}")
        self.soak.count("refused during another start")

    def end_all(self) -> None:
        """Kill what a killed launcher has left."""
        deadline = time.monotonic() + QUIET_SECONDS
        while (left := processes(self.mark)) and time.monotonic() < deadline:
            kill(list(left))
            time.sleep(0.05)

    def go(self) -> None:
        """Start the run until it is finished; raise `Wrong` if a promise is violated."""
        while not self.finished:
            self.live()
            if not self.finished and not self.alive():
                self.wait_for_orphans()
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (left := processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            raise Wrong(f"processes {sorted(left)} are left")
        self.compare()

    def wait_for_orphans(self) -> None:
        """Wait for ranks whose launcher is gone, in half of the cases."""
        if self.rng.random() < 0.5:
            while processes(self.mark) and not self.finished:
                self.check_progress()
                time.sleep(0.1)

    def compare(self) -> None:
        """The run's end must be the reference's."""
        found, wanted = ending(self.out), self.soak.reference[self.algorithm]
        if found[0] != wanted[0]:
            raise Wrong("the model has other bits than that of the undisturbed run")
        if found[1] != wanted[1]:
            rounds = [record["round"] for record in found[1]]
            raise Wrong(f"metrics.jsonl differs from that of the undisturbed run; its rounds are {rounds}")
        starts = (self.out / "starts.jsonl").read_text().count("\n")
        said = self.log.read_text(errors="replace")
        self.soak.count("runs", *["starts"] * starts, *["fell back"] * said.count("is damaged"))
        self.soak.count(*["started over"] * said.count("is sound: starting over"))


def ending(out: Path) -> tuple[str, list[dict[str, Any]]]:
    """The digest of a run's model, and its rounds without what depends on the clock and the number of ranks."""
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    rounds = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return digest, [{k: v for k, v in one.items() if not k.startswith(("seconds", "bytes_"))} for one in rounds]


# ---------------------------------------------------------------------------------------------------------- the soak


def shared_folders() -> set[str]:
    """What ranks of whatever run share in memory now; a name is there for milliseconds only. Where they met stays until
    the next start removes it, unless it is in use."""
    there = SHARED.glob("fedmpi-*") if SHARED.is_dir() else []
    return {path.name for path in there if not path.name.startswith("fedmpi-launch-") or locked(path)}


def reference(algorithm: str, rounds: int, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """How an undisturbed run ends."""
    out = folder / f"reference-{algorithm}"
    command = [sys.executable, *train_command(algorithm, rounds, out)]
    subprocess.run(command, env=environment("reference"), check=True, stdout=subprocess.DEVNULL, timeout=300)
    return ending(out)


def one_run(soak: Soak, number: int, algorithm: str, seed: int) -> None:
    """One run with its line; what is wrong goes into the tally."""
    run = Run(soak, f"run-{number}", algorithm, random.Random(f"{seed} {number}"))
    started, end = time.monotonic(), "right"
    try:
        run.go()
    except Wrong as error:
        end = f"WRONG: {error}"
        soak.tally.wrong.append(f"{run.name}: {error}")
    finally:
        if run.alive() and run.job is not None:
            kill([run.job.pid])
            run.job.wait()
        run.end_all()
    soak.say(
        f"{run.name} {algorithm}  {run.kills} kills  {time.monotonic() - started:.0f} s  {end}  {' '.join(run.story)}"
    )
    if end == "right":
        shutil.rmtree(run.out)


def soak_for(
    kills: int,
    seed: int,
    launchers: Sequence[str],
    algorithms: Sequence[str],
    jobs: int,
    rounds: int,
    folder: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Kill that often; returns the figures."""
    before, started = shared_folders(), time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        references = pool.map(lambda algorithm: reference(algorithm, rounds, folder), algorithms)
        soak = Soak(kills, rounds, launchers, folder, dict(zip(algorithms, references, strict=True)), say)
    numbers: Iterator[int] = iter(range(10**9))

    def work(_: int) -> None:
        while not soak.enough():
            with soak.lock:
                number = next(numbers)
            one_run(soak, number, algorithms[number % len(algorithms)], seed)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, range(jobs)))
    left = shared_folders() - before
    time.sleep(2 if left else 0)  # those of other runs are gone by then
    left &= shared_folders()
    if left:
        soak.tally.wrong.append(f"left in {SHARED}: {', '.join(sorted(left))}")
    counts = soak.tally.counts
    return {
        "seed": seed,
        "kills": soak.tally.kills,
        **{f"kills of {whom}": counts[whom] for whom in ("a rank", "two ranks", "the launcher")},
        "kills while writing a checkpoint": counts["while writing"],
        "runs": counts["runs"],
        "launches": counts["launches"],
        **{f"launches by {launcher}": counts[launcher] for launcher in launchers},
        "starts that reached the run folder": counts["starts"],
        "refused during another start": counts["refused during another start"],
        "fallbacks to an older checkpoint": counts["fell back"],
        "minutes": round((time.monotonic() - started) / 60, 1),
        "wrong": soak.tally.wrong,
    }


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
        return found

    return read


def main(argv: Sequence[str] | None = None) -> int:
    from fedmpi.algorithms import ALGORITHMS as KNOWN

    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launchers", type=names(LAUNCHERS), default=list(LAUNCHERS))
    parser.add_argument("--algorithms", type=names(sorted(KNOWN)), default=list(ALGORITHMS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="folder of the runs; kept if something is wrong")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    chosen = parser.parse_args(argv)
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="fedmpi-soak-"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(text, file=sys.stderr if chosen.json else sys.stdout, flush=True)

    figures = soak_for(
        chosen.kills, chosen.seed, chosen.launchers, chosen.algorithms, chosen.jobs, chosen.rounds, folder, say
    )
    print(json.dumps(figures) if chosen.json else "\n".join(f"{k}: {v}" for k, v in figures.items()))
    if figures["wrong"]:
        say(f"the runs are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
