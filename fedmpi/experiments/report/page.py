"""One page of HTML that holds a whole report: style, pictures and tables inside, no script, no address of a network.

Whatever comes from files is escaped, and the page itself forbids the browser to load anything. Pictures are SVG in data
URIs, each twice: for a desk, and for a phone. Their colours change with the scheme of the reader's screen.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from ..tables import Cell, Table, is_better, show
from .figures.style import DARK, Picture
from .sheet import CSS, NARROW_PIXELS

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
LONG = 42  # letters of a cell from which on it may take several lines


@dataclass(frozen=True)
class Absent:
    """A sentence about what the runs have not measured."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Something to type, or names of files."""

    text: str


@dataclass(frozen=True)
class Fold:
    """Parts that are shown when asked for."""

    summary: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Named:
    """A table with the name of its files."""

    name: str
    table: Table
    marked: frozenset[tuple[int, int]] = frozenset()
    """(row, column) of the cells that are highlighted on the page"""


class Drawn(NamedTuple):
    """A picture as SVG, for a desk and for a phone."""

    wide: str
    narrow: str


Part = str | Absent | Items | Code | Fold | Picture | Named


@dataclass(frozen=True)
class Section:
    """A part of the report with a heading."""

    key: str
    title: str
    parts: Sequence[Part] = field(default_factory=list)


def page(
    title: str,
    lead: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    drawn: Mapping[str, Drawn],
) -> str:
    """The whole page; `drawn` has its pictures by their names."""
    contents = "".join(f'<li><a href="#{s.key}">{escape(s.title)}</a></li>' for s in sections)
    known = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        f'<header>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n<dl class="facts">{known}</dl>\n'
        f'<nav aria-label="Contents"><ol>{contents}</ol></nav>\n</header>\n<main>\n'
        + "".join(section(one, drawn) for one in sections)
        + "</main>\n</body>\n</html>\n"
    )


def section(part: Section, drawn: Mapping[str, Drawn]) -> str:
    """A section with its heading."""
    inside = "".join(html(one, drawn) for one in part.parts)
    head = f'<section id="{part.key}" aria-labelledby="{part.key}-title">\n<h2 id="{part.key}-title">'
    return f"{head}{escape(part.title)}</h2>\n{inside}</section>\n"


def html(part: Part, drawn: Mapping[str, Drawn]) -> str:
    """One part of a section."""
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>\n"
    if isinstance(part, Absent):
        return f'<p class="absent">{escape(part.text)}</p>\n'
    if isinstance(part, Items):
        return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in part.texts) + "</ul>\n"
    if isinstance(part, Code):
        return f'<pre tabindex="0"><code>{escape(part.text)}</code></pre>\n'
    if isinstance(part, Fold):
        inside = "".join(html(one, drawn) for one in part.parts)
        return f"<details><summary>{escape(part.summary)}</summary>\n{inside}</details>\n"
    return picture(part, drawn[part.name]) if isinstance(part, Picture) else table(part)


def picture(part: Picture, drawn: Drawn) -> str:
    """A picture with its caption, in a form for a desk and in one for a phone."""
    across, down = size(drawn.wide)
    wide, narrow = uri(drawn.wide, part.adapts), uri(drawn.narrow, part.adapts)
    return (
        f'<figure id="figure-{part.name}"{"" if part.adapts else " class=plain"}><picture>'
        f'<source media="(max-width: {NARROW_PIXELS}px)" srcset="{narrow}">'
        f'<img src="{wide}" alt="{escape(part.alt)}" width="{across}" height="{down}"></picture>'
        f"<figcaption>{escape(part.caption)}</figcaption></figure>\n"
    )


def size(svg: str) -> tuple[int, int]:
    """Width and height of a picture in the points that it was drawn with."""
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None, "matplotlib always writes a view box"
    return round(float(found[1])), round(float(found[2]))


def uri(svg: str, adapts: bool) -> str:
    """A picture as an address that needs no network."""
    text = shortened(recoloured(svg) if adapts else svg)
    return "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode()


def shortened(svg: str) -> str:
    """The picture with its lines to a hundredth of a point, which halves it."""
    return re.sub(' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)


def recoloured(svg: str) -> str:
    """The picture with colours that follow the scheme of the screen: an SVG file cannot, as not all programs know
    variables."""
    names = {light: f"--c{light[1:]}" for light in DARK}
    light = ";".join(f"{name}:{colour}" for colour, name in names.items())
    dark = ";".join(f"{name}:{DARK[colour]}" for colour, name in names.items())
    rules = f"<style>:root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    body = re.sub("|".join(DARK), lambda found: f"var({names[found[0]]})", svg)
    head, start, rest = body.partition("<defs>")
    return f"{head}{rules}{start}{rest}"


def table(part: Named) -> str:
    """A table in a box of its own, which scrolls where it is wider than the page."""
    content, sides = part.table, part.table.sides
    head = "".join(
        f'<th scope="col"{classes(side, "")}>{escape(name)}</th>'
        for name, side in zip(content.columns, sides, strict=True)
    )
    rows = []
    for at, row in enumerate(content.rows):
        cells = [
            cell(one, side, first=i == 0, marked=(at, i) in part.marked)
            for i, (one, side) in enumerate(zip(row, sides, strict=True))
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>\n")
    name, notes = f"table-{part.name}", " ".join(content.notes)
    return (
        f'<figure class="table"><figcaption id="{name}">{escape(content.title)}</figcaption>'
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{name}"><table aria-labelledby="{name}">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{''.join(rows)}</tbody></table></div>\n"
        + (f'<p class="note">{escape(notes)}</p>' if notes else "")
        + "</figure>\n"
    )


def cell(one: Cell, side: str, first: bool, marked: bool) -> str:
    """A cell; the first of a row is its heading."""
    text = escape(show(one))
    text = f"<strong>{text}</strong>" if is_better(one) else text
    text = f"<mark>{text}</mark>" if marked else text
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    return f"<{tag}{scope}{classes(side, show(one))}>{text}</{tag}>"


def classes(side: str, text: str) -> str:
    """How a cell stands: numbers to the right, long texts in several lines."""
    kinds = ["n"] * (side == "r") + ["long"] * (len(text) > LONG)
    return f' class="{" ".join(kinds)}"' if kinds else ""
