"""`fedmpi sweep FILE`: the runs of a sweep file, here or as a job array; given again, it goes on.

What is finished, or was given up, is not run again; what failed or was stopped goes on from its checkpoint. Everything
is checked before the first run starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...cluster.submit import Submission
from ...cluster.submit import check as check_submission
from ...errors import AGAIN, UserError, complain
from ...plugins.knobs import check_bounds, knob
from ...runs.config import Config
from ...runs.options import filled, make_parser
from ..runs import pairing
from .grid import Point
from .orders import LOGS, Todo, describe, keep, make_todo, so_far
from .overview import Screen, rows_of, table
from .pick import CHOSEN, in_words, pick, record
from .sweepfile import changed, narrowed, read_sweep

ABOUT = (
    "Run every point of a sweep file, or of a bundled one ('fedmpi recipes' lists them). Given again, it goes on: "
    "finished runs are not run again, broken ones are."
)
ARRAY_ONLY = ("name", "gpus_per_node", "mpi", "retries", "setup", "watch")
"""options that only Slurm's jobs have, beside those of `cluster.SLURM_ONLY`"""
FLAGS = {
    "dry_run": "check everything, list the runs, and stop",
    "status": "show how it stands with every run, and stop",
    "watch": "on Slurm: stay until nothing runs any more, and give up runs without hope meanwhile",
}


@dataclass(frozen=True)
class Options(Submission):
    """How a sweep is run."""

    executor: str = "local"
    """local: on this machine; slurm: one job array"""
    jobs: int | None = knob(None, low=1, high=10_000)
    """runs at a time; null: one on this machine, all of them on Slurm"""
    out: str | None = None
    """folder of the sweep; null: runs/<name of the file>"""


@dataclass(frozen=True)
class Asked(Options):
    """What `sweep` is asked for."""

    file: str = ""
    only: list[str] = field(default_factory=list)
    set: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    dry_run: bool = False
    status: bool = False
    watch: bool = False


def main(arguments: list[str]) -> int:
    """Run one sweep, or look at it; returns the exit code."""
    asked = parse(arguments)
    todo = check(asked)
    screen = Screen()
    if asked.dry_run:
        for point in todo.points:
            screen.say(f"{point.name}  {in_short(point, todo.configs[point.name])}")
        threads = f", {many_threads(todo)}" if todo.threads else ""
        screen.say(f"{len(todo.points)} runs in {todo.home}{threads}; nothing was started")
        return 0
    if asked.status:
        screen.say(table(rows_of(todo.names, todo.home), asked.jobs or 1))
        return 0
    describe(todo)
    if asked.executor == "slurm":
        from .there import submit, watch

        submit(todo, asked, asked.jobs, screen)
        if todo.left and not asked.watch:
            return 0
        told = watch(todo, asked.jobs or len(todo.points), screen) if todo.left else False
        if told:
            complain(f"left, with {len(todo.left)} of {len(todo.points)} runs to do; their jobs go on")
            return AGAIN
    else:
        from .here import Here

        told = Here(todo, asked.jobs or 1, asked.ranks, screen).run()
        if told:
            complain(f"sweep stopped with {len(todo.left)} of {len(todo.points)} runs to do; the same command goes on")
            return AGAIN
    return conclude(todo, screen)


def parse(arguments: list[str]) -> Asked:
    """What the command line asks for."""
    parser = make_parser("fedmpi sweep", ABOUT, Options)
    parser.add_argument("file", nargs="?", default="", metavar="FILE", help="sweep file, or the name of a bundled one")
    for flag, help in FLAGS.items():
        parser.add_argument(f"--{flag}", action="store_true", help=help)
    more: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    parser.add_argument("--only", **more, metavar="AXIS=LABEL", help="only runs with these labels")
    parser.add_argument("--set", **more, metavar="KNOB=VALUE", help="knobs for all runs")
    parser.add_argument("--seeds", **more, type=int, help="these seeds instead of the file's")
    asked = filled(parser, Asked, lambda: parser.parse_args(arguments))
    if not asked.file:
        raise UserError("sweep was given no file; name one, or a bundled sweep: 'fedmpi recipes' lists them")
    return asked


def check(asked: Asked) -> Todo:
    """What there is to do; whatever is wrong with it is found here."""
    check_bounds(asked, prefix="")
    if not (asked.dry_run or asked.status):
        check_submission(asked)
    useless = [f"--{name}" for name in ARRAY_ONLY if getattr(asked, name) != getattr(Asked, name)]
    if asked.executor == "local" and useless:
        raise UserError(f"{' and '.join(useless)} cannot be used with --executor local; leave it out, or use slurm")
    if any(seed < 0 for seed in asked.seeds) or len(set(asked.seeds)) < len(asked.seeds):
        raise UserError(f"--seeds is {asked.seeds}; they must be different, and at least 0")
    recipe = read_sweep(asked.file)
    sweep = changed(replace(recipe, seeds=tuple(asked.seeds)) if asked.seeds else recipe, asked.set)
    chosen = narrowed(sweep, asked.only)
    if not chosen:
        raise UserError(f"--only {' '.join(asked.only)} leaves no run of sweep '{sweep.name}'")
    home = Path(f"runs/{sweep.name}" if asked.out is None else asked.out).expanduser().absolute()
    todo = make_todo(sweep, chosen, home, local=asked.executor == "local", recipe=recipe)
    if asked.executor == "local" and not (asked.dry_run or asked.status):
        fetch_data(todo)
    return todo


def fetch_data(todo: Todo) -> None:
    """See that the data sets of the runs to come are there: what is missing is missing for all of them."""
    from ...data import DATASETS, load

    wanted = {(cfg.data, cfg.data_root): point.name for point in todo.left for cfg in [todo.configs[point.name]]}
    for (data, root), name in wanted.items():
        try:
            if data in DATASETS:  # one's own is left to the runs
                load(data, root)
        except UserError as error:
            raise UserError(f"run '{name}': {error}") from None


def in_short(point: Point, cfg: Config) -> str:
    """The labels of a point, its algorithm and mask among them."""
    config = {"algorithm": cfg.algorithm, "mask": cfg.mask, "tau": cfg.tau}
    rest = [f"{axis} {label}" for axis, label in point.labels.items() if axis not in ("algorithm", "mask")]
    return ", ".join([pairing(point.labels, config, taus=True), *rest, f"seed {point.seed}"])


def many_threads(todo: Todo) -> str:
    return f"{todo.threads} thread{'s' * (todo.threads != 1)} per rank"


def conclude(todo: Todo, screen: Screen) -> int:
    """Choose what is to be chosen, and say what is left to do; returns the exit code."""
    choices = pick(todo.sweep, so_far(todo), todo.home)
    if (rule := todo.sweep.choose) is not None:
        keep(todo.home / CHOSEN, json.dumps(record(choices, rule), indent=2) + "\n")
        masks = {name: str(cfg.mask) for name, cfg in todo.configs.items()}
        screen.say(in_words(choices, rule, masks))
    left = [point.name for point in todo.left]
    if left:
        some = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        log = todo.home / LOGS / f"{left[0]}.log"
        where = log if log.exists() else f"'fedmpi status {todo.home / left[0]}'"
        count = f"{len(left)} of {len(todo.points)} runs are not done"
        complain(f"{count}: {some}; {where} tells why, and the same command goes on")
        return 1
    if any(choice.best is None for choice in choices):
        complain(f"all runs are at their end, and there is nothing to choose in some cells: see {todo.home / CHOSEN}")
        return 1
    screen.say(f"done: {todo.home}; 'fedmpi report {todo.home} --out report' shows it")
    return 0
