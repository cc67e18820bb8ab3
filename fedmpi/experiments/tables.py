"""Tables of typed cells as CSV, Markdown and LaTeX.

Cells are rounded, accuracies in percent; CSV has the exact numbers, with deviations and intervals in separate columns.
LaTeX needs the package booktabs. All text is escaped for its format.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """A sign after a cell, and its meaning, which is a note in tables and a separate column in CSV."""

    sign: str
    meaning: str


@dataclass(frozen=True)
class Number:
    """A number, or the mean of several with their standard deviation."""

    value: float
    sd: float | None = None
    digits: int = 4
    """decimals"""
    percent: bool = False
    """show a share in percent"""
    better: bool = False
    """bold: the better of a pair"""
    note: str = ""
    """short text after the number, such as 2 of 3"""
    mark: Mark | None = None


@dataclass(frozen=True)
class Difference(Number):
    """A difference with its confidence interval."""

    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Interval:
    """The confidence interval of the number next to it."""

    low: float
    high: float
    digits: int = 4
    percent: bool = False


@dataclass(frozen=True)
class Probability:
    """The p-value of a test."""

    value: float


@dataclass(frozen=True)
class Missing:
    """A missing value, and the reason."""

    why: str = "-"


Cell = str | Number | Interval | Probability | Missing
SUFFIXES = ("", " sd", " low", " high", " note")
"""of the CSV columns that a column is split into"""


@dataclass(frozen=True)
class Table:
    """A table with its title and notes."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    align: str = ""
    """l or r per column; empty: the first left, the others right"""

    @property
    def sides(self) -> str:
        return self.align or "l" + "r" * (len(self.columns) - 1)


def show(cell: Cell) -> str:
    """Return a cell as plain text."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Missing):
        return cell.why
    if isinstance(cell, Probability):
        return "< 0.001" if cell.value < 0.001 else f"{cell.value:.3f}"

    def text(value: float, sign: str = "") -> str:
        shown = f"{value * (100 if cell.percent else 1):{sign}.{cell.digits}f}"
        return shown if float(shown) else shown.replace("-", "+" if sign else "")  # no -0.00

    if isinstance(cell, Interval):
        return f"{text(cell.low)} to {text(cell.high)}"
    sign = "" if cell.mark is None else f" {cell.mark.sign}"
    if isinstance(cell, Difference):
        ends = [text(end, "+") for end in (cell.low, cell.high) if end is not None]
        return text(cell.value, "+") + (f" ({' to '.join(ends)})" if ends else "") + sign
    sd = "" if cell.sd is None else f" ± {text(cell.sd)}"
    return text(cell.value) + sd + (f" ({cell.note})" if cell.note else "") + sign


def is_better(cell: Cell) -> bool:
    """Return whether a cell is bold."""
    return isinstance(cell, Number) and cell.better


def escaped(table: Table, escape: Callable[[str], str], bold: Callable[[str], str]) -> list[list[str]]:
    """Return the columns and the rows as escaped texts, the better ones in bold."""

    def text(cell: Cell) -> str:
        return bold(escape(show(cell))) if is_better(cell) else escape(show(cell))

    return [[text(cell) for cell in row] for row in (table.columns, *table.rows)]


def to_markdown(table: Table) -> str:
    """Return a heading, a table in GitHub's Markdown, and the notes."""
    head, *rows = escaped(table, markdown, "**{}**".format)
    rule = [":---" if side == "l" else "---:" for side in table.sides]
    grid = ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]
    notes = [text for note in table.notes for text in ("", markdown(note))]
    return "\n".join([f"### {markdown(table.title)}", "", *grid, *notes, ""])


def to_latex(table: Table) -> str:
    """Return a floating table with booktabs."""
    head, *rows = ["    " + " & ".join(row) + r" \\" for row in escaped(table, latex, r"\textbf{{{}}}".format)]
    notes = [rf"  \par\smallskip{{\footnotesize {latex(note)}}}" for note in table.notes]
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{latex(table.title)}}}\smallskip",  # the article class leaves no space below a caption
            rf"  \begin{{tabular}}{{{table.sides}}}",
            r"    \toprule",
            head,
            r"    \midrule",
            *rows,
            r"    \bottomrule",
            r"  \end{tabular}",
            *notes,
            r"\end{table}",
            "",
        ]
    )


def to_csv(table: Table) -> str:
    """Return the exact numbers as CSV; deviation, interval and note have separate columns."""
    rows = [[raw(cell) for cell in row] for row in table.rows]
    kept = [suffixes_of([row[i] for row in rows]) for i in range(len(table.columns))]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([one_line(name + s) for name, suffixes in zip(table.columns, kept, strict=True) for s in suffixes])
    for row in rows:
        writer.writerow([cell.get(s, "") for cell, suffixes in zip(row, kept, strict=True) for s in suffixes])
    return out.getvalue()


def suffixes_of(cells: Sequence[dict[str, str | float]]) -> list[str]:
    """Return the suffixes that a column needs; an interval alone has no column without a suffix."""
    used = [suffix for suffix in SUFFIXES if any(suffix in cell for cell in cells)]
    return used if " low" in used else list(dict.fromkeys(["", *used]))


def raw(cell: Cell) -> dict[str, str | float]:
    """Return the values of a cell by the suffix of their column."""
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
        found |= {" low": cell.low, " high": cell.high}
    return {suffix: value for suffix, value in found.items() if value is not None}


FORMS: dict[str, Callable[[Table], str]] = {"csv": to_csv, "md": to_markdown, "tex": to_latex}
"""by file extension"""

LATEX = {c: f"\\{c}" for c in "{}$&#_%"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"{\char34}",  # works in every font encoding
    "[": "{[}",  # after the end of a row it would start an option
    "]": "{]}",
    "*": "{*}",
    "±": r"$\pm$",
    "†": r"\dag{}",
    "‡": r"\ddag{}",
    "§": r"\S{}",
    "¶": r"\P{}",
}


def latex(text: str) -> str:
    """Return text escaped for LaTeX; a hyphen before a number is a minus."""
    escaped = "".join(LATEX.get(c, c) for c in one_line(text))
    escaped = re.sub(r"(?<![\w}\-])-(?=\d)", "$-$", escaped)
    return re.sub("-(?=-)", "-{}", escaped)  # two hyphens would become a dash


def markdown(text: str) -> str:
    """Return text escaped for Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&])", r"\\\1", one_line(text))


def one_line(text: str) -> str:
    """Return text without line breaks and other unprintable characters."""
    return "".join(c if c.isprintable() else " " for c in text)
