"""The tables of a report: results, rounds to a target, published and measured, costs, agreement, configuration.

Numbers are means over seeds with the sample standard deviation; accuracies are in percent. Unfinished runs do not
count, unless no run of the group is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..measures import Measure, bytes_per_client, client_bytes, in_order, mean_of, measure, total_bytes, total_seconds
from ..records import DEFAULTS
from ..runs import Group, Run, counted, differences, pairing, word
from ..stats import summarise
from ..sweep.grid import label_of
from ..tables import Cell, Difference, Mark, Missing, Number, Table
from .departures import Departures

WAYS = ("up", "down")
Reading = Callable[[Run], float | None]


def values(group: Group, what: Measure) -> dict[int, float | None]:
    """Return seed -> value of a measure."""
    used = {run.seed for run in counted(group)}
    return {run.seed: what.of(run) if run.seed in used else None for run in group.runs}


def form(group: Group, what: Measure, single: bool = False) -> dict[str, Any]:
    """Return how a measure of a group is formatted."""
    if what.kind == "rounds":
        return {"digits": 0 if single else 1}
    share = what.kind == "metric" and group.metric == "accuracy"
    return {"digits": 2 if share else 4, "percent": share}


def cell(group: Group, what: Measure, better: bool = False, some: Mapping[int, float] | None = None) -> Cell:
    """Return the mean of a measure over the seeds, or over `some` (seed -> value), noting how many if not all."""
    found = summarise((values(group, what) if some is None else some).values())
    if found is None:
        done = all(run.done for run in group.runs)
        return Missing(("never" if done else "not yet") if what.kind == "rounds" else "-")
    shape = form(group, what, found.count == 1)
    return Number(found.mean, found.sd, better=better, note=count_note(group, what, found.count), **shape)


def count_note(group: Group, what: Measure, count: int) -> str:
    """Return of how many runs a mean of `count` is; '' if of all. An unfinished run may still reach a value."""
    if what.kind != "rounds":
        return f"{count} of {len(group.runs)}" if count < len(group.runs) else ""
    used, unfinished = len(counted(group)), sum(not run.done for run in group.runs)
    parts = [f"{count} of {used}"] if count < used else []
    return ", ".join([*parts, f"{unfinished} not done"] if unfinished else parts)


def column_title(what: Measure, groups: Sequence[Group]) -> str:
    """Return the name of a measure's column."""
    metrics = {group.metric for group in groups}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    head, number = what.name.rstrip("0123456789.:"), what.name.lstrip("abcdefghijklmnopqrstuvwxyz_:")
    target = f"{100 * float(number):g}%" if head == "rounds" and metric == "accuracy" else number
    texts = {
        "best": f"best {metric}",
        "final": f"final {metric}",
        "last": f"{metric}, last {number} rounds",
        "rounds": f"rounds to {target}",
        "test_loss": "final test loss",
        "train_loss": f"training loss, last {number} rounds",
        "participating": f"{metric} on participating clients",
        "others": f"{metric} on other clients",
    }
    return texts[head]


def summary_table(
    groups: Sequence[Group], names: Sequence[str] = ("best", "last10", "test_loss"), reach: Sequence[float] = ()
) -> Table:
    """Return the results per group: seeds, rounds, the named measures, and the rounds to reach values."""
    measures = [measure(name) for name in [*names, *(f"rounds:{value:g}" for value in reach)]]
    rows = [[group.label, count(group), progress(group), *(cell(group, m) for m in measures)] for group in groups]
    columns = ["runs", "seeds", "rounds", *(column_title(m, groups) for m in measures)]
    return Table("Results by group", columns, rows, remarks(groups, measures))


def runs_table(groups: Sequence[Group], names: Sequence[str] = ("best", "last10", "final", "test_loss")) -> Table:
    """Return the results per run, with the SHA-256 of its model."""
    measures = [measure(name) for name in names]
    axes = list(dict.fromkeys(axis for group in groups for axis in group.key if axis not in ("algorithm", "mask")))
    rows: list[list[Cell]] = []
    for group, run in [(one, run) for one in groups for run in one.runs]:
        results = [Missing() if (v := m.of(run)) is None else Number(v, **form(group, m)) for m in measures]
        mask = pairing(group.key, run.config, group.taus, algorithm=False)
        key = [group.key.get("algorithm", run.config["algorithm"]), mask, *(group.key.get(axis, "-") for axis in axes)]
        numbers = [Number(run.seed, digits=0), Number(len(run.records), digits=0)]
        rows.append([*key, *numbers, *results, str(run.finished.get("model_sha256") or "")[:16] or Missing()])
    columns = ["algorithm", "mask", *axes, "seed", "rounds", *(column_title(m, groups) for m in measures), "model"]
    notes = ["Model: the first 16 digits of its SHA-256."]
    return Table("All runs", columns, rows, notes, "l" * (len(axes) + 2) + "r" * (len(measures) + 2) + "l")


def count(group: Group) -> Cell:
    return Number(len(group.runs), digits=0)


def progress(group: Group) -> Cell:
    """Return the rounds that all runs of a group have, and of how many if unfinished."""
    if all(run.done for run in group.runs):
        return Number(group.config["rounds"], digits=0)
    return Number(min(len(run.records) for run in group.runs), digits=0, note=f"of {group.config['rounds']}")


def remarks(groups: Sequence[Group], measures: Sequence[Measure]) -> list[str]:
    """Return notes on how to read the numbers."""
    notes = ["Mean and sample standard deviation over seeds."] if any(len(g.runs) > 1 for g in groups) else []
    if any(m.kind == "metric" for m in measures) and any(g.metric == "accuracy" for g in groups):
        notes.append("Accuracies in percent.")
    notes += [f"Less {metric} is better." for metric in sorted({group.metric for group in groups if not group.rises})]
    if any(m.kind == "rounds" for m in measures):
        notes.append("Rounds to a value: mean of the runs that reached it; their number follows if it is not all.")
    notes += unfinished_note(groups)
    repeats = sum(len(group.repeats) for group in groups)
    return [*notes, f"Left out as repeats of a seed: {runs_text(repeats)}."] if repeats else notes


def unfinished_note(groups: Sequence[Group]) -> list[str]:
    number = sum(not run.done for group in groups for run in group.runs)
    text = f"Not done: {runs_text(number)}, left out of the means unless no run of the group is done."
    return [text] if number else []


def runs_text(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


def reach_table(groups: Sequence[Group], targets: Sequence[float]) -> Table:
    """Return the rounds per group to reach values of the test metric."""
    measures = [measure(f"rounds:{target:g}") for target in targets]
    rows = [[group.label, count(group), *(cell(group, what) for what in measures)] for group in groups]
    columns = ["runs", "seeds", *(column_title(what, groups) for what in measures)]
    return Table("Rounds to reach a test metric", columns, rows, remarks(groups, measures))


def published_table(
    groups: Sequence[Group], published: Mapping[str, Any], known: Collection[str], departures: Departures | None = None
) -> Table | None:
    """Return published and measured numbers for the rows of a sweep.json with the axes `known`; None if there are no
    rows, as for a figure. `departures` marks runs that differ from the recipe."""
    rows, name = published.get("rows") or [], published.get("measure", "best")
    if not rows or name == "curve":
        return None
    what, axis = measure(name), published.get("columns", "")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    axes, labels = [key for key in keys if key in known], [key for key in keys if key not in known]
    show_mask = "mask" not in (*axes, axis)
    body: list[list[Cell]] = []
    for row in rows:
        line: list[Cell] = []
        masks: dict[str, None] = {}
        for label in labels:
            wanted = {**{key: label_of(row[key]) for key in axes if key in row}, axis: label}
            alike = [g for g in groups if wanted.items() <= g.first.labels.items()]
            masks |= {pairing({}, g.config, g.taus, algorithm=False): None for g in alike}
            comparable = len(alike) == 1 and label in row
            mark = departures.mark(alike[0], wanted) if departures is not None and comparable else None
            shape = form((alike or groups)[0], what) if groups else {}
            line += published_cells(row.get(label), alike, what, shape, mark)
        head = [label_of(row[key]) if key in row else Missing() for key in axes]
        body.append([*head, *([", ".join(masks) or Missing()] if show_mask else []), *line])
    axes += ["mask"] if show_mask else []
    heads = [f"{label} {kind}" for label in labels for kind in ("published", "measured", "difference")]
    notes = [f"Published: {published['source']}."] if published.get("source") else []
    notes += ["Difference: measured - published.", *remarks(groups, [what])]
    notes += departures.notes if departures is not None else []
    align = "l" * len(axes) + "r" * len(heads)
    return Table(f"Published and measured: {column_title(what, groups)}", [*axes, *heads], body, notes, align)


def published_cells(
    value: Any, alike: Sequence[Group], what: Measure, shape: Mapping[str, Any], mark: Mark | None
) -> list[Cell]:
    """Return a published number (accuracies in percent), the measured one of a single matching group, and their gap."""
    measured = cell(alike[0], what) if len(alike) == 1 else Missing("several" if alike else "-")
    measured = replace(measured, mark=mark) if isinstance(measured, Number) else measured
    if not isinstance(value, int | float) or isinstance(value, bool):
        return [Missing() if value is None else word(value), measured, Missing()]
    value = round(value / 100, 12) if shape.get("percent") else float(value)
    gap = Difference(measured.value - value, **shape, mark=mark) if isinstance(measured, Number) else Missing()
    return [Number(value, **shape), measured, gap]


def means_table(
    title: str, groups: Sequence[Group], columns: Mapping[str, tuple[Reading, int]], notes: Sequence[str]
) -> Table:
    """Return means per group of functions of a run; columns: name -> (function, digits)."""
    rows: list[list[Cell]] = []
    for group in groups:
        used, present = counted(group), len(group.runs)
        seeds = Number(len(used), digits=0, note=f"of {present}" if len(used) < present else "")
        means = [mean_cell([of(run) for run in used], digits) for of, digits in columns.values()]
        rows.append([group.label, seeds, *means])
    return Table(title, ["runs", "seeds", *columns], rows, [*notes, *unfinished_note(groups)])


def mean_cell(found: Sequence[float | None], digits: int, percent: bool = False) -> Cell:
    """Return the mean with its deviation as a cell."""
    summary = summarise(found)
    return Missing() if summary is None else Number(summary.mean, summary.sd, digits, percent)


def cost_table(groups: Sequence[Group]) -> Table:
    """Return seconds by phase and bytes sent per run."""

    def phase_seconds(run: Run, phase: str) -> float | None:
        return total_seconds(run).get(phase)

    def whole(run: Run) -> float:
        return sum(total_seconds(run).values())

    phases = in_order(phase for group in groups for run in counted(group) for phase in total_seconds(run))
    columns: dict[str, tuple[Reading, int]] = {f"{name} s": (partial(phase_seconds, phase=name), 1) for name in phases}
    columns["all s"] = (whole, 1)
    columns["s per round"] = (lambda run: whole(run) / len(run.records) if run.records else None, 3)
    columns["MB sent"] = (lambda run: total_bytes(run) / 1e6, 1)
    notes = ["Seconds of a whole run, mean over seeds; MB: sent by all ranks in all rounds."]
    return means_table("Time and bytes", groups, columns, notes)


def bytes_table(groups: Sequence[Group]) -> Table:
    """Return the bytes that clients upload and download, and those that the ranks sent to each other."""

    def megabytes(run: Run, of: Callable[..., float | None], way: str) -> float | None:
        found = of(run, way)
        return None if found is None else found / 1e6

    columns: dict[str, tuple[Reading, int]] = {}
    for name, of, digits in (("client", bytes_per_client, 4), ("all", client_bytes, 2)):
        columns |= {f"{name} {way}": (partial(megabytes, of=of, way=way), digits) for way in WAYS}
    columns["ranks sent"] = (lambda run: total_bytes(run) / 1e6, 2)
    notes = [
        "Client up and down: uploaded and downloaded per client and round; all: by all clients in all rounds.",
        "These do not depend on the number of ranks, unlike what the ranks sent to each other.",
        "A dash: the run's version did not count it.",
    ]
    return means_table("Bytes of the clients, in MB", groups, columns, notes)


def agreement_table(groups: Sequence[Group]) -> Table:
    """Return the agreement of the clients and what the masks kept, over all rounds."""
    columns: dict[str, tuple[Reading, int]] = {
        "agreement": (lambda run: mean_of(run, "agreement"), 3),
        "below tau": (lambda run: mean_of(run, "below_tau"), 3),
        "kept": (lambda run: mean_of(run, "kept"), 3),
    }
    notes = ["Means over all rounds. Below tau: the share of parameters whose agreement is below the threshold."]
    return means_table("Agreement of the clients", groups, columns, notes)


def config_tables(groups: Sequence[Group]) -> tuple[Table, Table]:
    """Return the knobs in which groups differ, one column each, and the knobs that all runs share."""
    different = [name for name in differences([group.first for group in groups]) if name != "seed"]
    rows = [[group.label, *(word(group.config.get(name)) for name in different)] for group in groups]
    differing = Table("Knobs that differ", ["runs", *different], rows, align="l" * (len(different) + 1))
    configs = [run.config for group in groups for run in group.runs]
    shared = {k: v for k, v in (configs[0] if configs else {}).items() if all(c.get(k) == v for c in configs)}
    common = [[name, word(value), word(DEFAULTS.get(name))] for name, value in shared.items()]
    return differing, Table("Knobs that all runs share", ["knob", "value", "default"], common, align="lll")
