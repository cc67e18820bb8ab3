"""`fedmpi sweep FILE`: the runs of a sweep file, on this machine or as a job array. The same command resumes it.

Runs that are finished or given up are not run again; those that failed or were stopped resume from their checkpoints.
Everything is checked before the first run starts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...cluster.submit import SubmitOptions, refuse_with_local
from ...cluster.submit import check as check_options
from ...errors import AGAIN, UserError, complain
from ...plugins.knobs import knob
from ...runs.options import flag, positional, read_options, several
from ..runs import pairing
from .overview import Screen, rows_of, table
from .pick import CHOSEN, in_words, pick
from .plan import LOGS, SweepPlan, all_points, describe, make_plan, write_file
from .sweepfile import changed, narrowed, read_sweep

ABOUT = (
    "Run every point of a sweep file, or of a bundled one ('fedmpi recipes' lists them). The same command resumes a "
    "sweep: finished runs are not repeated, failed ones are retried."
)
ARRAY_ONLY = ("name", "gpus_per_node", "retries", "setup", "watch")  # in addition to `SLURM_ONLY` of cluster/submit.py


@dataclass(frozen=True)
class SweepOptions(SubmitOptions):
    """The options of `fedmpi sweep`."""

    executor: str = knob("local", choices=("local", "slurm"))
    """local: on this machine; slurm: as one job array."""
    jobs: int | None = knob(None, low=1, high=10_000)
    """Runs at a time. Default: one on this machine, all of them on Slurm."""
    out: str | None = None
    """Folder of the sweep. Default: runs/<name of the file>."""
    file: str = positional("FILE")
    """Sweep file, or the name of a bundled one."""
    only: list[str] = several("AXIS=LABEL")
    """Only runs with these labels."""
    set: list[str] = several("KNOB=VALUE")
    """Settings for all runs."""
    seeds: list[int] = several("SEED", int)
    """Seeds to use instead of the file's."""
    dry_run: bool = flag()
    """Check everything, list the runs, and stop."""
    status: bool = flag()
    """Show the status of every run, and stop."""
    watch: bool = flag()
    """On Slurm: stay until all runs have ended, and give up runs that fall behind."""


def main(arguments: list[str]) -> int:
    """Run a sweep or show it; return the exit code."""
    options = parse(arguments)
    plan = check(options)
    screen = Screen()
    if options.dry_run:
        for point in plan.points:
            rest = [f"{axis} {label}" for axis, label in point.labels.items() if axis not in ("algorithm", "mask")]
            rules = pairing(point.labels, vars(plan.configs[point.name]), taus=True)
            screen.say(f"{point.name}  {', '.join([rules, *rest, f'seed {point.seed}'])}")
        screen.say(f"{len(plan.points)} runs in {plan.home}{plan.threads_text}; nothing was started")
        return 0
    if options.status:
        screen.say(table(rows_of(plan.runs), options.jobs or 1))
        return 0
    describe(plan)
    if options.executor == "slurm":
        from .slurm import submit, watch

        submit(plan, options, options.jobs, screen)
        if plan.left and not options.watch:
            return 0
        if plan.left and watch(plan, options.jobs or len(plan.points), screen):
            complain(f"no longer watching; {len(plan.left)} of {len(plan.points)} runs are left, their jobs continue")
            return AGAIN
    else:
        from .local import LocalSweep

        if LocalSweep(plan, options.jobs or 1, options.ranks, screen).run():
            complain(
                f"sweep stopped with {len(plan.left)} of {len(plan.points)} runs left; the same command resumes it"
            )
            return AGAIN
    return conclude(plan, screen)


def parse(arguments: list[str]) -> SweepOptions:
    """Parse the command line."""
    options = read_options(SweepOptions, arguments, "sweep", ABOUT, usage="FILE [options]")
    if not options.file:
        raise UserError("sweep was given no file; name one, or a bundled sweep: 'fedmpi recipes' lists them")
    return options


def check(options: SweepOptions) -> SweepPlan:
    """Return the plan of the sweep; raise a `UserError` for the first mistake."""
    starts = not (options.dry_run or options.status)
    if starts:
        check_options(options)
    if options.executor == "local":
        refuse_with_local(options, ARRAY_ONLY)
    if any(seed < 0 for seed in options.seeds) or len(set(options.seeds)) < len(options.seeds):
        raise UserError(f"--seeds is {options.seeds}; they must be different, and at least 0")
    recipe = read_sweep(options.file)
    sweep = changed(replace(recipe, seeds=tuple(options.seeds)) if options.seeds else recipe, options.set)
    chosen = narrowed(sweep, options.only)
    if not chosen:
        raise UserError(f"--only {' '.join(options.only)} leaves no run of sweep '{sweep.name}'")
    home = Path(f"runs/{sweep.name}" if options.out is None else options.out).expanduser().absolute()
    plan = make_plan(sweep, chosen, home, local=options.executor == "local", recipe=recipe)
    if options.executor == "local" and starts:
        fetch_data(plan)
    return plan


def fetch_data(plan: SweepPlan) -> None:
    """Load the data sets of the runs to come: a missing one would fail all of them."""
    from ...data import DATASETS, load

    wanted = {(cfg.data, cfg.data_root): point.name for point in plan.left for cfg in [plan.configs[point.name]]}
    for (data, root), name in wanted.items():
        try:
            if data in DATASETS:  # a user's own is left to the runs
                load(data, root)
        except UserError as error:
            raise UserError(f"run '{name}': {error}") from None


def conclude(plan: SweepPlan, screen: Screen) -> int:
    """Choose the best labels if the file has `choose`, and report what is left; return the exit code."""
    choices = pick(plan.sweep, all_points(plan), plan.home)
    if (rule := plan.sweep.choose) is not None:
        cells = [asdict(choice) for choice in choices]
        record = {"by": rule.by, "last": rule.last, "over": list(rule.over), "cells": cells}
        write_file(plan.home / CHOSEN, json.dumps(record, indent=2) + "\n")
        masks = {name: str(cfg.mask) for name, cfg in plan.configs.items()}
        screen.say(in_words(choices, rule, masks))
    left = [point.name for point in plan.left]
    if left:
        some = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        log = plan.home / LOGS / f"{left[0]}.log"
        where = log if log.exists() else f"'fedmpi status {plan.home / left[0]}'"
        count = f"{len(left)} of {len(plan.points)} runs are not done"
        complain(f"{count}: {some}; see {where}; the same command resumes the sweep")
        return 1
    if any(choice.best is None for choice in choices):
        complain(f"all runs have ended, but some cells have nothing to choose: see {plan.home / CHOSEN}")
        return 1
    screen.say(f"done: {plan.home}; 'fedmpi report {plan.home} --out report' shows it")
    return 0
