"""`fedmpi report RUNS... --out DIR`: one page about runs, and its figures and tables as files.

    index.html                     the page, which loads no other file
    figures/NAME.png, NAME.svg     its figures
    tables/NAME.csv, .md, .tex     its tables
    report.json                    the list of these files, so that the next report can replace them

Everything is made before anything is written, and the same runs give the same bytes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypedDict

from ...errors import UserError
from ...plugins.knobs import knob
from ...runs.folder import STARTS, read_json
from ...runs.options import positional, read_options, several
from ...runs.schema import WHOLE, Environment, Start, fault, read, records
from ...runs.text import plural
from ...schedules import read_names
from ..runs import SWEEP, Group, Run, find_runs, group, pairing, read_sweep_record
from ..sweep.pick import CHOSEN
from ..tables import FORMS
from .figures.style import Picture, render
from .layout import place
from .output import Files, check_output, write_report
from .page import Absent, Fold, Named, Part, Section, make_page
from .sections.clients import agreement, labels
from .sections.costs import costs
from .sections.learning import clients, further, gap, learning
from .sections.masks import masks
from .sections.material import Material
from .sections.membership import membership
from .sections.published import departure_notes, published
from .sections.results import LEAST, MOST, reach, results
from .sections.setup import choice, configuration, source

ABOUT = "Write one page about runs, with figures and tables that are also written as files."
KINDS = ("png", "svg", "pdf")
SOFTWARE = ("fedmpi", "python", "torch")


SECTIONS: tuple[tuple[str, Callable[[Material], list[Part]], str], ...] = (
    ("Results", results, "No run has scored a round yet."),
    ("Learning curves", learning, "No run has finished a round yet."),
    ("Plain and masked averaging", masks, "No two groups of scored runs differ in the mask alone."),
    ("Published and measured", published, "The runs are of no sweep that names published numbers."),
    ("Rounds to reach a value", reach, "No run has scored a round yet."),
    ("Agreement of the clients", agreement, ""),
    ("Participating and other clients", clients, "Not measured; train with --evaluate clients."),
    ("Training and test data", gap, "Not measured; train with --evaluate gap."),
    ("Membership inference", membership, "No run was attacked; use 'fedmpi attack RUN' or --evaluate membership."),
    ("Further measurements", further, "No run measured anything else; your own measurement adds its numbers here."),
    ("Labels of the clients", labels, "No run has a partition.json."),
    ("Time and bytes", costs, "No run has finished a round yet."),
    ("Configuration", configuration, ""),
)
"""title, the function that makes it, whose name is its key, and what the page says if that returns nothing"""


@dataclass(frozen=True)
class ReportOptions:
    """Options and arguments of a report."""

    runs: list[str] = positional("RUN", many=True)
    """Run folder, sweep folder, or folder with runs in it."""
    out: str = "report"
    """Output folder; an earlier report in it is replaced."""
    title: str | None = None
    """Heading of the page. Default: the name of the sweep, or the number of runs."""
    smooth: int = knob(1, low=1, high=100_000)
    """Evaluated rounds to average curves over; 1: none."""
    formats: str = "png,svg"
    """File formats of the figures, separated by commas: png, svg, pdf or none."""
    reach: list[float] = several("VALUE", float)
    """Values of the test metric (0.8 for 80 percent) to count the rounds to. Default: the sweep's, or chosen."""


class Tried(TypedDict):
    """A choice that a sweep tried."""

    labels: dict[str, Any]
    value: float | None


class Chosen(TypedDict):
    """What a sweep chose for one combination of its other axes, as in chosen.json."""

    cell: dict[str, Any]
    best: dict[str, Any]
    tried: list[Tried]


def main(arguments: list[str]) -> int:
    """Write a report and return the exit code."""
    options = parse(arguments)
    out = Path(options.out).expanduser()
    check_output(out)
    runs = find_runs([Path(name).expanduser() for name in options.runs])
    files, warnings = make(runs, options, shlex.join(["fedmpi", "report", *arguments]))
    write_report(out, files)
    figures = sum(name.startswith("figures/") for name in files)
    tables = len(files) - figures - 1
    print(f"wrote {out / 'index.html'}: {plural(len(runs), 'run')}, {figures} files of figures and {tables} of tables")
    for text in warnings:
        print(text)
    return 0


def parse(arguments: list[str]) -> ReportOptions:
    """Parse and check the command line."""
    options = read_options(ReportOptions, arguments, "report", ABOUT, usage="RUN [RUN ...] --out DIR [options]")
    if not options.runs:
        raise UserError("report was given no run; name run folders or a sweep's: fedmpi report RUN [RUN ...] --out DIR")
    for value in options.reach:
        if not LEAST <= value < MOST:
            raise UserError(f"--reach is {value:g}; it must be in [0.0001, 1000000), such as 0.8 for 80% accuracy")
    kinds(options.formats)
    return options


def kinds(formats: str) -> list[str]:
    """Return the formats in a comma-separated list."""
    return read_names("format (--formats)", formats, KINDS)


def make(runs: Sequence[Run], options: ReportOptions, command: str) -> tuple[Files, list[str]]:
    """Return the files of a report by name, and warnings to print."""
    sweep = common_sweep(runs)
    cells = chosen_cells(runs[0].sweep) if sweep else []
    groups = [one for one in group(list(runs)) if not cells or is_chosen(one, cells)]
    shown = [run for one in groups for run in (*one.runs, *one.repeats)]
    groups = group(shown)  # again: chosen runs may be separated by fewer knobs
    material = Material(shown, place(groups), sweep, targets(options, sweep, shown), options.smooth)
    sections = gather([*([choice(cells, runs)] if cells else []), *contents(material)])
    files: Files = {}
    warnings: list[str] = []
    drawn: dict[str, str] = {}
    formats = kinds(options.formats)
    whole = [one for section in sections for one in section.parts]
    for part in [inner for one in whole for inner in (one.parts if isinstance(one, Fold) else [one])]:
        if isinstance(part, Picture):
            made = render(part, dict.fromkeys(["svg", *formats]))
            drawn[part.name] = made["svg"].decode()
            files |= {f"figures/{part.name}.{kind}": made[kind] for kind in formats}
        if isinstance(part, Named):
            files |= {f"tables/{part.name}.{kind}": form(part.table).encode() for kind, form in FORMS.items()}
            warnings += [f"{part.name}: {text}" for text in departure_notes(part.table)]
    sections.append(source(material, command, list(files)))
    of = f" of the sweep {sweep['name']}" if sweep.get("name") else ""
    some = "" if of and len(shown) >= len(sweep["runs"]) else f" of {plural(len(shown), 'run')}"
    title = options.title or f"Report{some}{of}"
    about = str(sweep.get("about") or "").rstrip(".")
    files["index.html"] = make_page(title, sections, drawn, about=about, facts=facts(shown, groups)).encode()
    return files, warnings


def targets(options: ReportOptions, sweep: Mapping[str, Any], runs: Sequence[Run]) -> list[float]:
    """Return the values to count the rounds to: of --reach, or else of the sweep. Raise a `UserError` for percents."""
    listed = sweep.get("reach") if isinstance(sweep.get("reach"), list) else []
    numbers = [float(one) for one in listed or [] if isinstance(one, int | float) and not isinstance(one, bool)]
    name, values = ("--reach", options.reach) if options.reach else (f"reach in {SWEEP}", numbers)
    for value in values:
        if value > 1 and all(run.metric == "accuracy" for run in runs):
            raise UserError(f"{name} is {value:g}; an accuracy is at most 1: write {value / 100:g} for {value:g}%")
    return values


def contents(material: Material) -> list[Section]:
    """Return the sections made from the runs, in the order of the page."""
    return [Section(of.__name__, title, of(material) or [Absent(absent)]) for title, of, absent in SECTIONS]


def gather(sections: Sequence[Section]) -> list[Section]:
    """Return the sections with content, and one that lists what the others lack."""
    empty = [one for one in sections if all(isinstance(part, Absent) for part in one.parts)]
    texts = [f"{one.title}: {part}" for one in empty for part in one.parts if isinstance(part, Absent)]
    rest = [one for one in sections if one not in empty]
    return [*rest, Section("missing", "Not measured", [texts])] if texts else rest


# The sweep of the runs


def common_sweep(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the record of the sweep that all runs belong to; empty if there is none."""
    sweeps = {run.sweep for run in runs}
    home = sweeps.pop()
    return read_sweep_record(home) if home is not None and not sweeps else {}


def chosen_cells(home: Path | None) -> list[dict[str, Any]]:
    """Return what a sweep has chosen; empty if it chooses nothing, or not yet."""
    cells = read_json(home / CHOSEN).get("cells") if home is not None else None
    return cells if isinstance(cells, list) and not fault(cells, list[Chosen], WHOLE) else []


def is_chosen(one: Group, cells: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a group has the labels that were chosen in its cell."""
    labels = one.first.labels.items()
    return any(cell["cell"].items() <= labels and cell["best"].items() <= labels for cell in cells)


def facts(runs: Sequence[Run], groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Return what was run, when (days in UTC) and with which versions; '' where that is unknown."""

    def listed(found: Iterable[Any]) -> str:
        return ", ".join(dict.fromkeys(str(one) for one in found if one is not None))

    seeds = sorted({run.seed for run in runs})
    environments = [read(run.folder / "environment.json", Environment) or {} for run in runs]
    versions = [found.get("versions", {}) for found in environments]
    software = {name: sorted({str(one[name]) for one in versions if one.get(name)}) for name in SOFTWARE}
    times = [start.get("time", 0) for run in runs for start in records(run.folder / STARTS, Start)]
    days = sorted(datetime.fromtimestamp(time, timezone.utc).date().isoformat() for time in times if 0 < time < 1e11)
    done = sum(run.done for run in runs)
    return [
        ("Runs", f"{plural(len(runs), 'run')} in {plural(len(groups), 'group')}, {done} done"),
        ("Seeds", listed(seeds) if len(seeds) <= 12 else f"{len(seeds)}: {seeds[0]} to {seeds[-1]}"),
        ("Data", listed(run.config.get("data") for run in runs)),
        ("Model", listed(run.config.get("model") for run in runs)),
        ("Algorithms", "; ".join(dict.fromkeys(pairing({}, run.config, taus=True) for run in runs))),
        ("Ranks", listed(sorted({found["size"] for found in environments if "size" in found}))),
        ("Versions", "; ".join(f"{name} {listed(used)}" for name, used in software.items() if used)),
        ("Dates", " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))),
    ]
