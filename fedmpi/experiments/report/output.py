"""The output folder of a report: which files may be replaced, and how new ones are written.

report.json lists the files of the report. It is written first, with what is there already: so an interrupted report is
recognised as one, and other files are never touched.
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
"""content by path in the folder"""


def check_output(out: Path) -> None:
    """Refuse a folder with files that do not belong to a report."""
    try:
        present = files_in(out) if out.exists() else set()
    except OSError as error:
        raise UserError(f"--out {out} cannot be read ({reason(error)}); choose another folder") from None
    check_writable(out)
    foreign = sorted(present - listed(out) - {LIST, f".{LIST}"})
    if foreign:
        raise UserError(f"--out {out} holds '{foreign[0]}', which is no part of a report; choose another folder")


def files_in(out: Path) -> set[str]:
    """Return the paths in a folder and in its figures/ and tables/; anything else by its own name."""
    found = set()
    for one in out.iterdir():
        if one.name in FOLDERS and one.is_dir() and not one.is_symlink():
            found |= {f"{one.name}/{inner.name}" for inner in one.iterdir()}
        else:
            found.add(one.name)
    return found


def listed(out: Path) -> set[str]:
    """Return the files of the report in a folder, and their temporary names."""
    names = read_json(out / LIST).get("files")
    whole = {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
    return whole | {aside_of(Path(name)).as_posix() for name in whole}


def write_report(out: Path, files: Files) -> None:
    """Write a report in place of an earlier one, the page last."""
    make(out)
    before = files_in(out) & listed(out)
    try:
        for folder in FOLDERS:
            (out / folder).mkdir(mode=0o700, exist_ok=True)
        write_list(out, before | files.keys())
        for name in sorted(files, key=lambda name: name == PAGE):
            write(out / name, files[name])
        for name in before - files.keys():
            (out / name).unlink(missing_ok=True)
        write_list(out, set(files))
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({reason(error)}); choose another folder") from None


def write_list(out: Path, names: set[str]) -> None:
    """Write report.json."""
    write(out / LIST, json.dumps({"fedmpi": __version__, "files": sorted(names)}, indent=2) + "\n")
