"""Tables of typed cells, as aligned text, Markdown, LaTeX and CSV.

Cells are shown rounded, accuracies in percent; CSV has the raw numbers to their last bit, deviations and intervals in
columns of their own. LaTeX needs the package booktabs. Whatever is text is escaped for the form that it is written in.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..runs.text import align


@dataclass(frozen=True)
class Mark:
    """A sign behind a cell, and what it means: tables have that in a note, CSV in a column of its own."""

    sign: str
    meaning: str


@dataclass(frozen=True)
class Number:
    """A number, or the mean of several with their standard deviation."""

    value: float
    sd: float | None = None
    digits: int = 4
    """decimals that are shown"""
    percent: bool = False
    """whether it is a share that is shown in percent"""
    better: bool = False
    """whether it is the better of a pair, which is shown in bold"""
    note: str = ""
    """a few words behind it: 2 of 3"""
    mark: Mark | None = None


@dataclass(frozen=True)
class Difference:
    """A difference with the interval that holds the true one."""

    value: float
    low: float | None = None
    high: float | None = None
    digits: int = 4
    percent: bool = False
    mark: Mark | None = None


@dataclass(frozen=True)
class Interval:
    """What holds the true value of the number beside it."""

    low: float
    high: float
    digits: int = 4
    percent: bool = False


@dataclass(frozen=True)
class Probability:
    """The p of a test."""

    value: float


@dataclass(frozen=True)
class Missing:
    """Nothing, and why."""

    why: str = "-"


Cell = str | Number | Difference | Interval | Probability | Missing
SUFFIXES = ("", " sd", " low", " high", " note")
"""of the columns of CSV that one column may come to"""


@dataclass(frozen=True)
class Table:
    """A table, ready to be written."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    align: str = ""
    """l or r for each column; empty: the first to the left, the others to the right"""

    @property
    def sides(self) -> str:
        return self.align or "l" + "r" * (len(self.columns) - 1)


def show(cell: Cell) -> str:
    """A cell as plain text."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Missing):
        return cell.why
    if isinstance(cell, Probability):
        return "< 0.001" if cell.value < 0.001 else f"{cell.value:.3f}"

    def text(value: float, sign: str = "") -> str:
        shown = f"{value * (100 if cell.percent else 1):{sign}.{cell.digits}f}"
        return shown.replace("-", "+" * bool(sign)) if not float(shown) else shown  # no minus nothing

    if isinstance(cell, Interval):
        return f"{text(cell.low)} to {text(cell.high)}"
    sign = "" if cell.mark is None else f" {cell.mark.sign}"
    if isinstance(cell, Difference):
        ends = [text(end, "+") for end in (cell.low, cell.high) if end is not None]
        return text(cell.value, "+") + (f" ({' to '.join(ends)})" if ends else "") + sign
    sd = "" if cell.sd is None else f" ± {text(cell.sd)}"
    return text(cell.value) + sd + (f" ({cell.note})" if cell.note else "") + sign


def is_better(cell: Cell) -> bool:
    """Whether a cell is to stand out."""
    return isinstance(cell, Number) and cell.better


def to_text(table: Table) -> str:
    """Aligned columns under the title, notes below."""
    notes = [one_line(note) for note in table.notes]
    return "\n".join([one_line(table.title), "", *lines(table), *([""] * bool(notes)), *notes]) + "\n"


def lines(table: Table) -> list[str]:
    """The aligned columns alone: a head, a rule and the rows."""
    cells = [[one_line(show(cell)) for cell in row] for row in (table.columns, *table.rows)]
    return align(cells, table.sides, rule=True)


def to_markdown(table: Table) -> str:
    """A heading, a table as GitHub reads it, and the notes."""

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def cell(one: Cell) -> str:
        return f"**{markdown(show(one))}**" if is_better(one) else markdown(show(one))

    rules = row([":---" if side == "l" else "---:" for side in table.sides])
    body = [row([cell(one) for one in cells]) for cells in table.rows]
    notes = [text for note in table.notes for text in ("", markdown(note))]
    return "\n".join(
        [f"### {markdown(table.title)}", "", row([*map(markdown, table.columns)]), rules, *body, *notes, ""]
    )


def to_latex(table: Table) -> str:
    """A floating table with booktabs."""

    def row(cells: Sequence[str]) -> str:
        return "    " + " & ".join(cells) + r" \\"

    def cell(one: Cell) -> str:
        return rf"\textbf{{{latex(show(one))}}}" if is_better(one) else latex(show(one))

    notes = [rf"  \par\smallskip{{\footnotesize {latex(note)}}}" for note in table.notes]
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{latex(table.title)}}}\smallskip",  # article leaves no room below a caption
            rf"  \begin{{tabular}}{{{table.sides}}}",
            r"    \toprule",
            row([latex(name) for name in table.columns]),
            r"    \midrule",
            *(row([cell(one) for one in cells]) for cells in table.rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            *notes,
            r"\end{table}",
            "",
        ]
    )


def to_csv(table: Table) -> str:
    """The raw numbers: a column may come to several, for the deviation, the ends of an interval and a note."""
    rows = [[raw(cell) for cell in row] for row in table.rows]
    kept = [suffixes_of([row[i] for row in rows]) for i in range(len(table.columns))]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([one_line(name + s) for name, suffixes in zip(table.columns, kept, strict=True) for s in suffixes])
    for row in rows:
        writer.writerow([cell.get(s, "") for cell, suffixes in zip(row, kept, strict=True) for s in suffixes])
    return out.getvalue()


def suffixes_of(cells: Sequence[dict[str, str | float]]) -> list[str]:
    """What a column comes to; the ends of intervals have none without a suffix."""
    used = [suffix for suffix in SUFFIXES if any(suffix in cell for cell in cells)]
    return used if " low" in used else list(dict.fromkeys(["", *used]))


def raw(cell: Cell) -> dict[str, str | float]:
    """The values of a cell by the suffix of their column."""
    if isinstance(cell, str):
        return {"": one_line(cell)}
    if isinstance(cell, Missing):
        return {} if cell.why == "-" else {" note": one_line(cell.why)}
    if isinstance(cell, Interval):
        return {" low": cell.low, " high": cell.high}
    found: dict[str, str | float | None] = {"": cell.value}
    if isinstance(cell, Number):
        notes = [cell.note, cell.mark.meaning if cell.mark else ""]
        found |= {" sd": cell.sd, " note": one_line("; ".join(filter(None, notes))) or None}
    if isinstance(cell, Difference):
        found |= {" low": cell.low, " high": cell.high, " note": one_line(cell.mark.meaning) if cell.mark else None}
    return {suffix: value for suffix, value in found.items() if value is not None}


FORMS: dict[str, Callable[[Table], str]] = {"txt": to_text, "md": to_markdown, "tex": to_latex, "csv": to_csv}
"""by the ending of the file"""

LATEX = {c: f"\\{c}" for c in "{}$&#_%"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"{\char34}",  # in every encoding of fonts
    "[": "{[}",  # behind the end of a row it would begin an option
    "]": "{]}",
    "*": "{*}",
    "±": r"$\pm$",
    "†": r"\dag{}",
    "‡": r"\ddag{}",
    "§": r"\S{}",
    "¶": r"\P{}",
}


def latex(text: str) -> str:
    """Text without anything that LaTeX would take for its own; a hyphen in front of a number is a minus."""
    escaped = "".join(LATEX.get(c, c) for c in one_line(text))
    escaped = re.sub(r"(?<![\w}\-])-(?=\d)", "$-$", escaped)
    return re.sub("-(?=-)", "-{}", escaped)  # two of them would become a dash


def markdown(text: str) -> str:
    """Text without anything that Markdown would take for its own, a column's end in particular."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&])", r"\\\1", one_line(text))


def one_line(text: str) -> str:
    """Text without line breaks and other characters that cannot be seen."""
    return "".join(c if c.isprintable() else " " for c in text)
