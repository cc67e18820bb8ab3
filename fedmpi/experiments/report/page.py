"""The parts of a report's page, and the page as HTML.

The template page.html escapes whatever it is given, and the page forbids the browser to load anything: styles are
inline, pictures are SVG in data URIs, and there is no script.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import __version__
from ..tables import Table, is_better, show
from .figures.style import Picture


class Absent(str):
    """A remark on what the runs have not measured."""


class Code(str):
    """A command."""


@dataclass(frozen=True)
class Fold:
    """Parts that are folded away."""

    summary: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Named:
    """A table with the name of its files."""

    name: str
    table: Table
    marked: frozenset[tuple[int, int]] = frozenset()
    """(row, column) of highlighted cells"""


Part = str | Absent | Code | list[str] | Fold | Picture | Named
"""a list is shown as a list of sentences"""


@dataclass(frozen=True)
class Section:
    """A part of the report with a heading."""

    key: str
    title: str
    parts: Sequence[Part]


def make_page(title: str, sections: Sequence[Section], drawn: Mapping[str, str], **head: Any) -> str:
    """Return the page as HTML; `drawn` has the SVG of each picture by name, `head` the `about` and the `facts`.

    The template escapes everything: labels and paths of run folders cannot inject HTML.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fedmpi.experiments.report", "")
    env = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters |= {"show": show, "kind": lambda part: type(part).__name__}
    env.tests["better"] = is_better
    pictures = {name: image(svg) for name, svg in drawn.items()}
    page = env.get_template("page.html")
    return page.render(title=title, sections=sections, pictures=pictures, version=__version__, **head)


def image(svg: str) -> tuple[int, int, str]:
    """Return width and height of an SVG in points, and it as a data URI, its paths rounded to a hundredth of a point,
    which halves it."""
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None, "matplotlib always writes a view box"
    text = re.sub(' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    uri = "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode()
    return round(float(found[1])), round(float(found[2])), uri
