"""The arrows between the rooms of fedmpi: which may import which, and the chart of them in docs/design.md.

    python -m tests.arrows     writes the chart anew
"""

from __future__ import annotations

import ast
from pathlib import Path

REPO = Path(__file__).parents[1]
PACKAGE = REPO / "fedmpi"
DESIGN = REPO / "docs" / "design.md"
BEGIN, END = "<!-- arrows: python -m tests.arrows -->\n```\n", "```\n<!-- end of arrows -->\n"

BASE = {"errors", "seeds", "schedules", "plugins"}
FEDERATION = BASE | {"flat", "layers", "comm", "local", "masks", "server", "cohort", "algorithms", "aggregate"}
BELOW_RUNS = FEDERATION | {"meta", "rounds", "data", "models", "clients"}
RUN = BELOW_RUNS | {"runs"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "seeds": set(),
    "schedules": {"errors"},
    "plugins": {"errors", "schedules"},
    "flat": {"errors"},
    "layers": {"flat"},
    "comm": {"errors"},
    "local": BASE,
    "masks": BASE | {"flat", "layers"},
    "server": BASE,
    "cohort": BASE,
    "algorithms": BASE | {"local", "masks", "server"},
    "aggregate": BASE | {"cohort", "comm", "flat", "layers", "local"},
    "meta": BASE | {"aggregate", "algorithms", "comm"},
    "rounds": FEDERATION | {"meta"},
    "data": BASE,
    "models": BASE,
    "clients": BASE | {"cohort", "data", "flat", "local", "models"},
    "runs": BELOW_RUNS,
    "cluster": RUN,
    "experiments": RUN | {"cluster"},
    "commands": RUN | {"cluster", "experiments"},
    "api": RUN,
}
"""room -> the rooms it may import, lowest first; a room is a module or a package at the top level of fedmpi"""


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
    """Return a page with the chart between its marks made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + chart() + END + rest.partition(END)[2]


if __name__ == "__main__":
    DESIGN.write_text(with_chart(DESIGN.read_text(encoding="utf-8")), encoding="utf-8")
