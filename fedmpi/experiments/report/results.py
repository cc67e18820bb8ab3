"""The tables of a report, from groups of runs: how well they did, rounds to a target, published beside measured, costs,
agreement and the configuration. AVG beside GMA is in arms.py.

Numbers are means over seeds with the sample standard deviation behind them; accuracies are shown in percent. Runs that
are not done have no part in a mean, unless none of the group is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..measures import Measure, bytes_per_client, client_bytes, in_order, mean_of, measure, total_bytes, total_seconds
from ..records import DEFAULTS
from ..runs import Group, counted, differences, pairing, word
from ..stats import summarise
from ..sweep.grid import label_of
from ..tables import Cell, Difference, Mark, Missing, Number, Table
from .departures import Departures

WAYS = ("up", "down")


def values(group: Group, what: Measure) -> dict[int, float | None]:
    """seed -> what a run came to."""
    there = {run.seed for run in counted(group)}
    return {run.seed: what.of(run) if run.seed in there else None for run in group.runs}


def form(group: Group, what: Measure, alone: bool = False) -> dict[str, Any]:
    """How a measure of a group is shown."""
    if what.kind == "rounds":
        return {"digits": 0 if alone else 1}
    share = what.kind == "metric" and group.metric == "accuracy"
    return {"digits": 2 if share else 4, "percent": share}


def cell(group: Group, what: Measure, better: bool = False, some: Mapping[int, float] | None = None) -> Cell:
    """The mean of a measure over the seeds, or over `some`, seed -> value; how many these are, where it is not all."""
    found = summarise((values(group, what) if some is None else some).values())
    if found is None:
        done = all(run.done for run in group.runs)
        return Missing(("never" if done else "not yet") if what.kind == "rounds" else "-")
    shape = form(group, what, found.count == 1)
    return Number(found.mean, found.sd, better=better, note=part_of(group, what, found.count), **shape)


def part_of(group: Group, what: Measure, count: int) -> str:
    """Of how many runs a mean of `count` is, where it is not all. Who is not done may reach a value yet, and is told
    apart from who has missed it."""
    if what.kind != "rounds":
        return f"{count} of {len(group.runs)}" if count < len(group.runs) else ""
    there, open_yet = len(counted(group)), sum(not run.done for run in group.runs)
    parts = [f"{count} of {there}"] * (count < there) + [f"{open_yet} not done"] * (open_yet > 0)
    return ", ".join(parts)


def title(what: Measure, groups: Sequence[Group]) -> str:
    """A measure as the name of a column."""
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
        "participating": f"{metric} on clients that took part",
        "others": f"{metric} on other clients",
    }
    return texts[head]


def summary_table(
    groups: Sequence[Group], names: Sequence[str] = ("best", "last10", "test_loss"), reach: Sequence[float] = ()
) -> Table:
    """How well the groups did: seeds, rounds, the measures by their names, and the rounds to reach values."""
    measures = [measure(name) for name in [*names, *(f"rounds:{value:g}" for value in reach)]]
    rows = [[group.label, count(group), progress(group), *(cell(group, m) for m in measures)] for group in groups]
    columns = ["runs", "seeds", "rounds", *(title(m, groups) for m in measures)]
    return Table("How well the runs did", columns, rows, remarks(groups, measures))


def runs_table(groups: Sequence[Group], names: Sequence[str] = ("best", "last10", "final", "test_loss")) -> Table:
    """Every run by itself: what it was, what it came to, and the SHA-256 by which its model can be told again."""
    measures = [measure(name) for name in names]
    axes = list(dict.fromkeys(axis for group in groups for axis in group.key if axis not in ("algorithm", "mask")))
    rows: list[list[Cell]] = []
    for group in groups:
        for run in group.runs:
            told = [Missing() if (v := m.of(run)) is None else Number(v, **form(group, m)) for m in measures]
            mask = pairing(group.key, run.config, group.taus, algorithm=False)
            key: list[Cell] = [group.key.get("algorithm", run.config["algorithm"]), mask]
            key += [group.key.get(axis) or Missing() for axis in axes]
            sha = str(run.finished.get("model_sha256") or "")[:16]
            done = Number(len(run.records), digits=0)
            rows.append([*key, Number(run.seed, digits=0), done, *told, sha or Missing()])
    columns = ["algorithm", "mask", *axes, "seed", "rounds", *(title(m, groups) for m in measures), "model"]
    notes = ["Model: the first 16 digits of its SHA-256."]
    return Table("Every run", columns, rows, notes, "l" * (len(axes) + 2) + "r" * (len(measures) + 2) + "l")


def count(group: Group) -> Cell:
    return Number(len(group.runs), digits=0)


def count_used(group: Group) -> Cell:
    """The seeds in a mean over the runs that count, and of how many where it is not all."""
    used, there = len(counted(group)), len(group.runs)
    return Number(used, digits=0, note=f"of {there}" if used < there else "")


def progress(group: Group) -> Cell:
    """The rounds that all runs of a group have, and of how many where they are not done."""
    if all(run.done for run in group.runs):
        return Number(group.config["rounds"], digits=0)
    return Number(min(len(run.records) for run in group.runs), digits=0, note=f"of {group.config['rounds']}")


def remarks(groups: Sequence[Group], measures: Sequence[Measure]) -> list[str]:
    """What a reader must know of the numbers."""
    runs = [run for group in groups for run in group.runs]
    notes = ["Mean and sample standard deviation over seeds."] if any(len(g.runs) > 1 for g in groups) else []
    if any(m.kind == "metric" for m in measures) and any(g.metric == "accuracy" for g in groups):
        notes.append("Accuracies in percent.")
    notes += [f"Less {metric} is better." for metric in sorted({run.metric for run in runs if not run.rises})]
    if any(m.kind == "rounds" for m in measures):
        notes.append("Rounds to a value: of the runs that reached it, whose number stands behind where it is not all.")
    notes += undone(groups)
    doubles = sum(len(group.repeats) for group in groups)
    if doubles:
        notes.append(f"{several(doubles)} left out, as there is another with the same seed.")
    return notes


def undone(groups: Sequence[Group]) -> list[str]:
    """What is said where runs are not done."""
    number = sum(not run.done for group in groups for run in group.runs)
    said = f"{several(number)} not done: left out of the means, unless no run of the group is done."
    return [said] if number else []


def several(runs: int) -> str:
    return "1 run is" if runs == 1 else f"{runs} runs are"


def reach_table(groups: Sequence[Group], targets: Sequence[float]) -> Table:
    """The rounds that the groups took to reach values of the test metric."""
    measures = [measure(f"rounds:{target:g}") for target in targets]
    rows = [[group.label, count(group), *(cell(group, what) for what in measures)] for group in groups]
    columns = ["runs", "seeds", *(title(what, groups) for what in measures)]
    return Table("Rounds to reach a test metric", columns, rows, remarks(groups, measures))


def published_table(
    groups: Sequence[Group], published: Mapping[str, Any], known: Collection[str], departures: Departures | None = None
) -> Table | None:
    """What a paper says beside what was measured, for the rows and columns of a table that a sweep.json names, with its
    axes; None where it has no rows, as for a figure without numbers. `departures` marks runs that differ from the
    recipe."""
    rows, name = published.get("rows") or [], published.get("measure", "best")
    if not rows or name == "curve":
        return None
    what, axis = measure(name), published.get("columns", "")
    keys = list(dict.fromkeys(key for row in rows for key in row))
    axes, labels = ([key for key in keys if (key in known) == wanted] for wanted in (True, False))
    masked = "mask" not in (*axes, axis)  # then a column says what the rows have in common, or not
    body: list[list[Cell]] = []
    for row in rows:
        line: list[Cell] = [label_of(row[key]) if key in row else Missing() for key in axes]
        masks: dict[str, None] = {}
        for label in labels:
            wanted = {**{key: label_of(row[key]) for key in axes if key in row}, axis: label}
            alike = [g for g in groups if wanted.items() <= g.first.labels.items()]
            masks |= {pairing({}, g.config, g.taus, algorithm=False): None for g in alike}
            compared = len(alike) == 1 and label in row
            mark = departures.mark(alike[0], wanted) if departures is not None and compared else None
            line += beside(row.get(label), alike, what, form((alike or groups)[0], what) if groups else {}, mark)
        if masked:
            line.insert(len(axes), ", ".join(masks) or Missing())
        body.append(line)
    axes += ["mask"] if masked else []
    heads = [f"{label} {kind}" for label in labels for kind in ("published", "measured", "difference")]
    notes = [f"Published: {published['source']}."] if published.get("source") else []
    notes += ["Difference: measured - published.", *remarks(groups, [what])]
    notes += departures.notes if departures is not None else []
    align = "l" * len(axes) + "r" * len(heads)
    return Table(f"Published and measured: {title(what, groups)}", [*axes, *heads], body, notes, align)


def beside(
    said: Any, alike: Sequence[Group], what: Measure, shape: Mapping[str, Any], mark: Mark | None = None
) -> list[Cell]:
    """A published number, the measured one, where there is one group for it, and their difference; `shape` is the form
    of numbers, `mark` is for the last two. Accuracies are published in percent."""
    measured = cell(alike[0], what) if len(alike) == 1 else Missing("several" if alike else "-")
    measured = replace(measured, mark=mark) if isinstance(measured, Number) else measured
    if not isinstance(said, int | float) or isinstance(said, bool):
        return [Missing() if said is None else word(said), measured, Missing()]
    value = round(said / 100, 12) if shape.get("percent") else float(said)
    gap = Difference(measured.value - value, **shape, mark=mark) if isinstance(measured, Number) else Missing()
    return [Number(value, **shape), measured, gap]


def cost_table(groups: Sequence[Group]) -> Table:
    """Where the time went and what was sent, for a whole run."""
    spent = [[total_seconds(run) for run in counted(group)] for group in groups]
    phases = in_order(phase for runs in spent for seconds in runs for phase in seconds)
    rows: list[list[Cell]] = []
    for group, runs in zip(groups, spent, strict=True):
        parts = [mean([seconds.get(phase) for seconds in runs], 1) for phase in phases]
        totals = [sum(seconds.values()) for seconds in runs]
        each = [total / len(run.records) for total, run in zip(totals, counted(group), strict=True) if run.records]
        sent = [total_bytes(run) / 1e6 for run in counted(group)]
        rows.append([group.label, count_used(group), *parts, mean(totals, 1), mean(each, 3), mean(sent, 1)])
    columns = ["runs", "seeds", *(f"{phase} s" for phase in phases), "all s", "s a round", "MB sent"]
    notes = ["Seconds of a whole run, mean over the seeds; MB: what all ranks sent in all rounds.", *undone(groups)]
    return Table("Time and bytes", columns, rows, notes)


def bytes_table(groups: Sequence[Group]) -> Table:
    """What clients upload and download, beside what the ranks that stand for them sent to each other."""
    rows: list[list[Cell]] = []
    for group in groups:
        runs = counted(group)
        each = [mean(megabytes(bytes_per_client(run, way) for run in runs), 4) for way in WAYS]
        whole = [mean(megabytes(client_bytes(run, way) for run in runs), 2) for way in WAYS]
        sent = mean(megabytes(total_bytes(run) for run in runs), 2)
        rows.append([group.label, count_used(group), *each, *whole, sent])
    columns = ["runs", "seeds", *(f"client {way}" for way in WAYS), *(f"all {way}" for way in WAYS), "ranks sent"]
    notes = ["Client up and down: what a client uploads and downloads in a round; all: all clients in all rounds."]
    notes += ["These are the same on any number of ranks, unlike what the ranks sent to each other."]
    notes += ["A dash: a version that did not count it.", *undone(groups)]
    return Table("Bytes of the clients, in MB", columns, rows, notes)


def megabytes(found: Iterable[float | None]) -> list[float | None]:
    return [None if count is None else count / 1e6 for count in found]


def mean(found: Sequence[float | None], digits: int) -> Cell:
    """A mean with its deviation as a cell."""
    summary = summarise(found)
    return Missing() if summary is None else Number(summary.mean, summary.sd, digits)


def agreement_table(groups: Sequence[Group]) -> Table:
    """How far the clients agreed and what the masks kept, over all rounds."""
    keys = {"agreement": "agreement", "below_tau": "below tau", "kept": "kept"}
    rows = [
        [g.label, count_used(g), *(mean([mean_of(run, key) for run in counted(g)], 3) for key in keys)] for g in groups
    ]
    notes = ["Means over all rounds. Below tau: the share of parameters whose agreement is below the threshold."]
    notes += undone(groups)
    return Table("Agreement of the clients", ["runs", "seeds", *keys.values()], rows, notes)


def config_tables(groups: Sequence[Group]) -> tuple[Table, Table]:
    """The configuration: the knobs in which the groups differ, a column each, and those that all runs share."""
    firsts = [group.first for group in groups]
    apart = [name for name in differences(firsts) if name != "seed"]
    rows = [[group.label, *(word(group.config.get(name)) for name in apart)] for group in groups]
    differing = Table("Knobs that differ", ["runs", *apart], rows, align="l" * (len(apart) + 1))
    configs = [run.config for group in groups for run in group.runs]
    shared = {k: v for k, v in (configs[0] if configs else {}).items() if all(c.get(k) == v for c in configs)}
    common = [[name, word(value), word(DEFAULTS.get(name))] for name, value in shared.items()]
    return differing, Table("Knobs that all runs share", ["knob", "value", "default"], common, align="lll")
