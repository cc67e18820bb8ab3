"""What is measured next to the test score (`--evaluate`): a row per measurement, or your own as package.module:name.

A row names a class (a `Measure`) or a function of (outputs, labels), imported when it is asked for. To add a
measurement, write a file and add a row; nothing else knows their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from time import perf_counter

from torch import Tensor

from ...aggregate.exchange import Tile
from ...comm import from_first
from ...errors import CommonError, UserError
from ...plugins import import_path, users_code
from ...rounds import Report, State
from ...schedules import read_names
from ..log import record
from .base import Measure, Numbers, Ranks, Run, checked
from .metric import Metric
from .score import Score, evaluate

__all__ = ["MEASURES", "Measure", "Measures", "Numbers", "Ranks", "Run", "Score", "make_measure", "measure_names"]

KIND = "measurement (--evaluate)"
MEASURES = {
    "agreement": "fedmpi.runs.measures.agreement:Agreement",
    "clients": "fedmpi.runs.measures.clients:ClientScores",
    "gap": "fedmpi.runs.measures.gap:Gap",
    "membership": "fedmpi.experiments.attack.membership:Membership",
    "perplexity": "fedmpi.runs.measures.perplexity:Perplexity",
    "top5": "fedmpi.runs.measures.metric:top5",
}


def measure_names(text: str) -> list[str]:
    """Return the measurements in a comma-separated list, each once; `none` is the empty list."""
    return read_names(KIND, text, MEASURES, own=True)


def make_measure(name: str) -> Measure:
    """Return a new measurement by its name or import path."""
    found = resolve_name(MEASURES[name]) if name in MEASURES else import_path(KIND, name)
    if isinstance(found, type) and issubclass(found, Measure):
        with users_code(f"{KIND} '{name}'", " when it was made; its class must take no argument"):
            measure: Measure = found()
    elif callable(found) and not isinstance(found, type):
        measure = Metric(name.rpartition(":")[2], found)
    else:
        what = f"the class {found.__name__}" if isinstance(found, type) else type(found).__name__
        raise UserError(
            f"{KIND} '{name}' is {what}; it must be a subclass of fedmpi.runs.measures.Measure, or a function of "
            "(outputs, labels)"
        )
    measure.name = name
    return measure


class Measures:
    """The measurements of a run on one rank, as its loop calls them: all ranks raise the same error, or none."""

    def __init__(self, run: Run) -> None:
        """Make and prepare them. Collective."""
        self.run = run
        self.all = [run.comm.run(name, partial(make_measure, name)) for name in measure_names(run.cfg.evaluate)]
        for measure in self.all:
            run.comm.run(measure.name, partial(measure.prepare, run))
        run.comm.error = CommonError

    def on_tile(self, tile: Tile, mask: Tensor, clients: int) -> None:
        """Show a tile to all measurements."""
        for measure in self.all:
            self.run.comm.keep(measure.name, partial(measure.on_tile, tile, mask, clients), None)

    def after_round(self, state: State, report: Report, scored: bool) -> tuple[Report, str]:
        """Return the report with the score on the test set (if `scored`) and the numbers of all measurements, and what
        went wrong: the same message on all ranks, '' if nothing did. Collective."""
        run, started = self.run, perf_counter()
        run.current, run.score = state, None
        if scored:
            run.score = evaluate(run.task, state, run.comm.comm, run.cfg.eval.batch, run.classes, run.metrics)
            report = replace(report, test_metric=run.score.metric, test_loss=run.score.loss)
        report, problem = self.ask(report, lambda measure, report: measure.after_round(run, report))
        if scored:
            report = replace(report, seconds=report.seconds | {"eval": perf_counter() - started})
        return report, problem

    def at_end(self, state: State, report: Report) -> tuple[Report, str]:
        """Return the last report with the numbers of the finished run, and what went wrong, as `after_round`.
        Collective."""
        self.run.current = state
        # Not with what an earlier end of the same run has left.
        ended, problem = self.ask(replace(report, measures={}), lambda measure, report: measure.at_end(self.run))
        return replace(report, measures=report.measures | ended.measures), problem

    def ask(self, report: Report, moment: Callable[[Measure, Report], Numbers | None]) -> tuple[Report, str]:
        """Return the report with the numbers that the measurements return on rank 0, and what went wrong on any rank.
        Collective."""
        comm = self.run.comm
        for measure in self.all:
            work = partial(checked, measure.name, partial(moment, measure, report), record(report))
            try:
                found = comm.run(measure.name, work)
            except CommonError as error:
                if error is not comm.last:
                    raise
                return report, str(error)
            report = replace(report, measures=report.measures | from_first(comm.comm, found))
        return report, ""
