"""The arrows between the rooms of fedmpi and what one must read for a round, as docs/design.md shows them.

python -m tests.arrows     rewrites the chart and the table
"""

from __future__ import annotations

import ast
from pathlib import Path

REPO = Path(__file__).parents[1]
PACKAGE = REPO / "fedmpi"
DESIGN = REPO / "docs" / "design.md"
BEGIN, END = "<!-- arrows: python -m tests.arrows -->\n```\n", "```\n<!-- end of arrows -->\n"

BASE = {"errors", "seeds", "schedules", "plugins", "knobs"}
FEDERATION = BASE | {"device", "flat", "comm", "local", "masks", "server", "cohort", "algorithms", "aggregate"}
BELOW_RUNS = FEDERATION | {"meta", "rounds", "data", "models", "clients"}
RUN = BELOW_RUNS | {"runs"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "seeds": set(),
    "schedules": {"errors"},
    "plugins": {"errors"},
    "knobs": {"errors", "plugins", "schedules"},
    "device": {"errors"},
    "flat": {"errors"},
    "comm": {"device", "errors"},
    "cohort": BASE,
    "local": BASE | {"cohort"},
    "masks": BASE | {"flat"},
    "server": BASE,
    "algorithms": BASE | {"local", "masks", "server"},
    "aggregate": BASE | {"cohort", "comm", "device", "flat", "local", "masks"},
    "meta": BASE | {"aggregate", "algorithms", "comm", "flat"},
    "rounds": FEDERATION | {"meta"},
    "data": BASE,
    "models": BASE,
    "clients": BASE | {"cohort", "data", "device", "flat", "local", "models"},
    "runs": BELOW_RUNS,
    "cluster": RUN,
    "experiments": RUN | {"cluster"},
    "commands": RUN | {"cluster", "experiments"},
    "api": RUN,
}
"""room -> the rooms it may import, lowest first; a room is a module or a package at the top level of fedmpi"""


READING: dict[str, tuple[str, ...]] = {
    "rounds.py": (),
    "cohort.py": ("Work", "Cohort", "draw", "load", "place"),
    "local/sgd.py": (),
    "local/descent.py": ("Descent", "Stepped", "clipping"),
    "local/job.py": ("Job", "LocalResult", "Update", "LocalRule"),
    "masks.py": ("Mask", "quorum", "at_least", "gma"),
    "server.py": ("ServerRule", "sgd"),
    "algorithms.py": ("Algorithm", "Row"),
    "flat.py": ("Span", "Private", "Layout", "layout_of", "Parts", "parts_of", "tiles", "even_slices", "bind"),
    "aggregate/mean.py": (),
    "aggregate/sums.py": (),
    "aggregate/exchange.py": (),
    "aggregate/travel.py": ("Parcels", "Delivery", "cut", "add_up", "ahead"),
    "comm/base.py": ("Rows", "Comm"),
}
"""what one must read for a round of FedAvg with GMA: file -> its header and these definitions; () is all of it"""
MOST_LINES = 1800
BEGIN_READING, END_READING = "<!-- reading: python -m tests.arrows -->\n", "<!-- end of reading -->\n"


def lines_to_read(file: str) -> int:
    """Return the number of lines of a file's row in the table."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    if not READING[file]:
        return len(text.splitlines())
    header, *body = ast.parse(text).body
    found = {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert set(READING[file]) <= set(found), f"{file} has no {set(READING[file]) - set(found)}"
    return sum((node.end_lineno or 0) - node.lineno + 1 for node in [header, *(found[name] for name in READING[file])])


def table() -> str:
    """Return the table of what one must read for a round."""
    rows = ["| file | what | lines |", "| --- | --- | --- |"]
    for file, names in READING.items():
        what = ", ".join(f"`{name}`" for name in names) or "all of it"
        rows.append(f"| `{file}` | {what} | {lines_to_read(file)} |")
    rows.append(f"| together | | {sum(map(lines_to_read, READING)):,} |")
    return "\n".join(rows) + "\n"


def rooms() -> set[str]:
    """Return the modules and packages at the top level."""
    found = [path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    return {path.stem for path in found} - {"__init__", "__main__"}


def imports(room: str) -> dict[str, set[str]]:
    """Return the rooms that one imports, at the top of a file or inside a function, with the files that do."""
    path = PACKAGE / room
    found: dict[str, set[str]] = {}
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
        depth = len(file.relative_to(PACKAGE).parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name[7:] for alias in node.names if alias.name.startswith("fedmpi.")]
            elif isinstance(node, ast.ImportFrom) and (node.level == depth or not node.level):
                module = node.module or ""
                if node.level or module.split(".")[0] == "fedmpi":
                    inner = module if node.level else module[7:]
                    names = [inner] if inner else [alias.name for alias in node.names]
            for name in names:
                found.setdefault(name.split(".")[0], set()).add(str(file.relative_to(PACKAGE)))
    return {name: files for name, files in found.items() if name in rooms() - {room}}


def chart() -> str:
    """Return the rooms, lowest first, each with what it imports, but for `errors` and `plugins`: most import them."""
    lines = []
    for room in ALLOWED:
        sources = sorted(set(imports(room)) - {"errors", "plugins"}, key=list(ALLOWED).index)
        lines.append(f"{room:<12} <- {', '.join(sources)}" if sources else room)
    return "\n".join(lines) + "\n"


def with_chart(page: str) -> str:
    """Return a page with a new chart between its marks."""
    return between(page, BEGIN, chart(), END)


def with_table(page: str) -> str:
    """Return a page with a new table between its marks."""
    return between(page, BEGIN_READING, table(), END_READING)


def between(page: str, begin: str, text: str, end: str) -> str:
    """Return a page with another text between two marks."""
    before, _, rest = page.partition(begin)
    return before + begin + text + end + rest.partition(end)[2]


if __name__ == "__main__":
    DESIGN.write_text(with_table(with_chart(DESIGN.read_text(encoding="utf-8"))), encoding="utf-8")
