"""The folder of a report: whose files may be replaced, and how new ones get there.

A list of what belongs to the report is written before anything else, with what is there already: so a report that was
cut short is still known as one, and nothing of anybody else is ever touched.
"""

from __future__ import annotations

import json
from pathlib import Path

from ... import __version__
from ...errors import UserError, reason
from ...runs.folder import aside_of, check_writable, make, read_json, write

LIST, PAGE = "report.json", "index.html"
FOLDERS = ("figures", "tables")
Files = dict[str, bytes]
"""content by the path in the folder"""


def check_place(out: Path) -> None:
    """Refuse a folder that holds files which are no report."""
    try:
        if out.exists() and not out.is_dir():
            raise UserError(f"--out {out} is a file; name a folder for the report")
        there = files_in(out) if out.exists() else set()
    except OSError as error:
        raise UserError(f"--out {out} cannot be read ({reason(error)}); choose another folder") from None
    check_writable(out)
    foreign = sorted(there - listed(out) - {LIST, f".{LIST}"})
    if foreign:
        raise UserError(f"--out {out} holds '{foreign[0]}', which is no part of a report; choose another folder")


def files_in(out: Path) -> set[str]:
    """What lies in a folder, and in those of a report inside it; anything else in there by its own name."""
    found = set()
    for one in out.iterdir():
        if one.name in FOLDERS and one.is_dir() and not one.is_symlink():
            found |= {f"{one.name}/{inner.name}" for inner in one.iterdir()}
        else:
            found.add(one.name)
    return found


def listed(out: Path) -> set[str]:
    """The files that belong to the report in a folder, also as they are called while they are written."""
    names = read_json(out / LIST).get("files")
    whole = {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
    return whole | {aside_of(Path(name)).as_posix() for name in whole}


def bind(out: Path, files: Files) -> None:
    """Write a report in place of an earlier one; the page comes last."""
    make(out)
    before = files_in(out) & listed(out)
    try:
        for folder in FOLDERS:
            (out / folder).mkdir(mode=0o700, exist_ok=True)
        put_list(out, before | files.keys())
        for name in sorted(files, key=lambda name: name == PAGE):
            write(out / name, files[name])
        for name in before - files.keys():
            (out / name).unlink(missing_ok=True)
        put_list(out, set(files))
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({reason(error)}); choose another folder") from None


def put_list(out: Path, names: set[str]) -> None:
    """Write down what belongs to the report."""
    write(out / LIST, json.dumps({"fedmpi": __version__, "files": sorted(names)}, indent=2) + "\n")
