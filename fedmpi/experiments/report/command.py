"""`fedmpi report RUNS... --out DIR`: one page about runs, and its pictures and tables as files.

    index.html                     the page, which needs nothing beside it
    figures/NAME.png, NAME.svg     its pictures
    tables/NAME.csv, .md, .tex     its tables
    report.json                    what belongs to the report, so that the next one may take its place

Everything is made before anything is written, and the same runs give the same bytes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ... import __version__
from ...errors import UserError, unknown
from ...plugins.knobs import check_bounds, knob
from ...runs.folder import STARTS, read_json
from ...runs.options import filled, make_parser
from ...runs.schema import Environment, Start, read, records
from ..runs import SWEEP, Group, Run, find_runs, group, pairing, read_sweep_record
from ..sweep.pick import CHOSEN
from ..tables import FORMS
from .arrange import arrange
from .binder import Files, bind, check_place
from .figures.style import NARROW, Picture, render
from .page import Absent, Drawn, Fold, Items, Named, Part, Section, page
from .sections import agreement, beside, comparing, costs, labels, learning, membership, published, reaching, setup
from .sections.material import Material

ABOUT = "One page about runs with pictures and tables, which are also written as files."
KINDS = ("png", "svg", "pdf")
WRITTEN = ("csv", "md", "tex")


@dataclass(frozen=True)
class Options:
    """How a report is made."""

    out: str = "report"
    """folder that the report is written to; an earlier report in it is replaced"""
    title: str | None = None
    """heading of the page; null: what the sweep says of itself, or how many runs there are"""
    smooth: int = knob(1, low=1, high=100_000)
    """scored rounds over which curves are averaged; 1: none"""
    formats: str = "png,svg"
    """how pictures are written beside the page, a comma between them: png, svg, pdf or none"""


@dataclass(frozen=True)
class Asked(Options):
    """What `report` is asked for."""

    runs: list[str] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    """Write one report; returns the exit code."""
    asked = parse(arguments)
    out = Path(asked.out).expanduser()
    check_place(out)
    runs = find_runs([Path(name).expanduser() for name in asked.runs])
    files, warnings = make(runs, asked, shlex.join(["fedmpi", "report", *arguments]))
    bind(out, files)
    count = sum(name.startswith("figures/") for name in files)
    tables = len(files) - count - 1
    print(f"wrote {out / 'index.html'}: {many(len(runs), 'run')}, {count} files of pictures and {tables} of tables")
    for text in warnings:
        print(text)
    return 0


def parse(arguments: list[str]) -> Asked:
    """What the command line asks for, checked."""
    parser = make_parser("fedmpi report", ABOUT, Options)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folder, sweep folder, or folder with runs in it")
    words = "values of the test metric (0.8 for 80 percent) to count the rounds to; none: those of the sweep, or chosen"
    parser.add_argument("--reach", nargs="+", type=float, default=[], metavar="VALUE", help=words)
    asked = filled(parser, Asked, lambda: parser.parse_args(arguments))
    check_bounds(asked, prefix="")
    if not asked.runs:
        raise UserError("report was given no run; name run folders or a sweep's: fedmpi report RUN [RUN ...] --out DIR")
    for value in asked.reach:
        if not reaching.LEAST <= value < reaching.MOST:
            raise UserError(
                f"--reach is {value:g}; it must be in [0.0001, 1000000), such as 0.8 for an accuracy of 80%"
            )
    kinds(asked.formats)
    return asked


def kinds(formats: str) -> list[str]:
    """The formats in a comma-separated list."""
    wanted = [word.strip() for word in formats.split(",") if word.strip() not in ("", "none")]
    for word in wanted:
        if word not in KINDS:
            raise unknown("format (--formats)", word, [*KINDS, "none"])
    return list(dict.fromkeys(wanted))


def make(runs: Sequence[Run], asked: Asked, command: str) -> tuple[Files, list[str]]:
    """Return the files of a report by their names, and what a reader of the terminal must know of them."""
    sweep = common_sweep(runs)
    cells = chosen_cells(runs[0].sweep) if sweep else []
    groups = [one for one in group(list(runs)) if not cells or is_chosen(one, cells)]
    shown = [run for one in groups for run in (*one.runs, *one.repeats)]
    groups = group(shown)  # anew: what tells the chosen apart
    material = Material(shown, arrange(groups), sweep, targets(asked, sweep, shown), asked.smooth)
    sections = gathered([*([setup.choice(cells, runs)] if cells else []), *contents(material)])
    files: Files = {}
    warnings: list[str] = []
    drawn: dict[str, Drawn] = {}
    for part in flat(sections):
        if isinstance(part, Picture):
            wide = render(part, dict.fromkeys(["svg", *kinds(asked.formats)]))
            narrow = render(part, ["svg"], NARROW)
            drawn[part.name] = Drawn(wide["svg"].decode(), narrow["svg"].decode())
            files |= {f"figures/{part.name}.{kind}": wide[kind] for kind in kinds(asked.formats)}
        if isinstance(part, Named):
            files |= {f"tables/{part.name}.{kind}": FORMS[kind](part.table).encode() for kind in WRITTEN}
            warnings += [f"{part.name}: {text}" for text in published.differing(part.table)]
    sections.append(setup.source(material, command, list(files)))
    files["index.html"] = page(
        asked.title or heading(shown, sweep), lead(sweep), facts(shown, groups), sections, drawn
    ).encode()
    return files, warnings


def targets(asked: Asked, sweep: Mapping[str, Any], runs: Sequence[Run]) -> list[float]:
    """The values to count the rounds to: what is asked for, or else what the sweep says; empty where neither does. A
    `UserError` for percents."""
    said = sweep.get("reach") if isinstance(sweep.get("reach"), list) else []
    named, values = ("--reach", asked.reach) if asked.reach else (f"reach in {SWEEP}", numbers(said))
    for value in values:
        if value > 1 and all(run.metric == "accuracy" for run in runs):
            raise UserError(f"{named} is {value:g}; an accuracy is at most 1: write {value / 100:g} for {value:g}%")
    return values


def numbers(said: Any) -> list[float]:
    return [float(value) for value in said if isinstance(value, int | float) and not isinstance(value, bool)]


def contents(material: Material) -> list[Section]:
    """The sections that are made from the runs, in the order of the page."""
    return [
        comparing.summary(material),
        learning.section(material),
        comparing.masks(material),
        published.section(material),
        reaching.section(material),
        agreement.layers(material),
        agreement.share(material),
        beside.clients(material),
        beside.gap(material),
        membership.section(material),
        labels.section(material),
        costs.section(material),
        setup.configuration(material),
    ]


def gathered(sections: Sequence[Section]) -> list[Section]:
    """The sections that have something to show, and behind them one that says what the others lack."""
    empty = [one for one in sections if all(isinstance(part, Absent) for part in one.parts)]
    texts = [f"{one.title}: {part.text}" for one in empty for part in one.parts if isinstance(part, Absent)]
    rest = [one for one in sections if one not in empty]
    return [*rest, Section("missing", "What is not here", [Items(texts)])] if texts else rest


def flat(sections: Sequence[Section]) -> Iterator[Part]:
    """All parts of sections, those that are folded away too."""

    def inside(parts: Sequence[Part]) -> Iterator[Part]:
        for part in parts:
            yield from inside(part.parts) if isinstance(part, Fold) else [part]

    for section in sections:
        yield from inside(section.parts)


# What the runs belong to


def common_sweep(runs: Sequence[Run]) -> dict[str, Any]:
    """The record of the sweep that all runs belong to; empty where there is none."""
    sweeps = {run.sweep for run in runs}
    home = sweeps.pop()
    return read_sweep_record(home) if home is not None and not sweeps else {}


def chosen_cells(home: Path | None) -> list[dict[str, Any]]:
    """What a sweep has chosen, cell by cell; empty where it chooses nothing, or has not come so far."""
    cells = read_json(home / CHOSEN).get("cells") if home is not None else None
    if not isinstance(cells, list):
        return []
    return cells if all(map(is_cell, cells)) else []


def is_cell(cell: Any) -> bool:
    """Whether it is a choice as the sweep writes it, and one that could be made."""
    parts = [cell.get("cell"), cell.get("best")] if isinstance(cell, dict) else [None]
    tried = cell.get("tried") if isinstance(cell, dict) else None
    labels = (
        [one.get("labels") if isinstance(one, dict) else None for one in tried] if isinstance(tried, list) else [None]
    )
    values = [one.get("value") for one in tried] if isinstance(tried, list) and None not in labels else []
    whole = all(isinstance(part, dict) for part in [*parts, *labels])
    return whole and all(value is None or isinstance(value, int | float) for value in values)


def is_chosen(one: Group, cells: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a group has the labels that were chosen in its cell."""
    labels = one.first.labels.items()
    return any(cell["cell"].items() <= labels and cell["best"].items() <= labels for cell in cells)


# The head of the page


def heading(runs: Sequence[Run], sweep: Mapping[str, Any]) -> str:
    """What the page is about."""
    whole = bool(sweep) and len(runs) >= len(sweep["runs"])
    of = f" of the sweep {sweep.get('name')}" if sweep.get("name") else ""
    return f"Report{of}" if whole and of else f"Report of {many(len(runs), 'run')}{of}"


def lead(sweep: Mapping[str, Any]) -> str:
    """What this is, in a sentence."""
    made = f"Federated learning with fedmpi {__version__}: what runs came to, and what that allows to say."
    return f"{str(sweep.get('about') or '').rstrip('.')}. {made}".removeprefix(". ")


def facts(runs: Sequence[Run], groups: Sequence[Group]) -> list[tuple[str, str]]:
    """What was run, when and with what."""
    seeds = sorted({run.seed for run in runs})
    done = sum(run.done for run in runs)
    environments = [read(run.folder / "environment.json", Environment) or {} for run in runs]
    versions = [found["versions"] for found in environments if "versions" in found]
    software = [
        f"{name} {', '.join(used)}"
        for name in ("fedmpi", "python", "torch")
        if (used := sorted({str(one[name]) for one in versions if one.get(name)}))
    ]
    ranks = sorted({found["size"] for found in environments if "size" in found})
    told = [
        ("Runs", f"{many(len(runs), 'run')} in {many(len(groups), 'group')}, {done} done"),
        ("Seeds", ", ".join(map(str, seeds)) if len(seeds) <= 12 else f"{len(seeds)}: {seeds[0]} to {seeds[-1]}"),
        ("Data", listed(runs, "data")),
        ("Model", listed(runs, "model")),
        ("Algorithms", "; ".join(dict.fromkeys(pairing({}, run.config, taus=True) for run in runs))),
        ("Ranks", ", ".join(map(str, ranks))),
        ("Versions", "; ".join(software)),
        ("Dates", dates(runs)),
    ]
    return [(name, value) for name, value in told if value]


def listed(runs: Sequence[Run], name: str) -> str:
    """The values of a knob in the runs."""
    return ", ".join(dict.fromkeys(str(run.config[name]) for run in runs if run.config.get(name) is not None))


def dates(runs: Sequence[Run]) -> str:
    """The days on which runs were started, by universal time."""
    times = [start.get("time") for run in runs for start in records(run.folder / STARTS, Start)]
    days = sorted(
        {
            datetime.fromtimestamp(time, timezone.utc).date().isoformat()
            for time in times
            if isinstance(time, int | float) and 0 < time < 1e11
        }
    )
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else ""


def many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
