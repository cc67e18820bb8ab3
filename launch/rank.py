"""`fedmpi train` as a rank of torchrun, which tells its caller 1 whatever its ranks end with, and starts them again.

A rank leaves its exit code in the folder FEDMPI_CODES, in a file named by its number. Where one of them says that
starting again is no use (2, the caller's mistake; 75, stopped in good order), ranks leave with that code at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FINAL = ("2", "75")


def final_code() -> int | None:
    """The code that says that starting again is no use, where a rank has left with one."""
    for left in Path(os.environ["FEDMPI_CODES"]).glob("[0-9]*"):
        if left.read_text() in FINAL:
            return int(left.read_text())
    return None


def main() -> int:
    """Train as this rank and return its exit code."""
    folder = Path(os.environ["FEDMPI_CODES"])
    here = folder.is_dir()  # it is on the first node only
    if (known := final_code()) is not None:
        return known

    from fedmpi.cli import main as fedmpi

    code = fedmpi(["train", *sys.argv[1:]])
    if here:
        (folder / os.environ["RANK"]).write_text(str(code))
    return code


if __name__ == "__main__":
    sys.exit(main())
