"""Errors, their exit codes, and helpers for error messages.

A `UserError` is the caller's mistake: one line that says what was given, what is valid and what to do. The command line
prints it without a traceback and exits with code 2. A `RunError` is a failure of the run itself (such as a lost rank):
also one line, exit code 1. If all ranks raise it with the same message, it is a `CommonError`.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import TextIO

AGAIN = 75  # exit code of a run that stopped in good order and can be restarted (EX_TEMPFAIL)


class OneLine(Exception):
    """An error whose message is always one printable line. Notebooks show it without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints."""
        return [f"{type(self).__name__}: {self}"]

    def __str__(self) -> str:
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in super().__str__())


class UserError(OneLine, ValueError):
    """A mistake of the caller: exit code 2."""


class RunError(OneLine, RuntimeError):
    """A failure of the run: exit code 1."""


class CommonError(RunError):
    """A failure that every rank raises with the same message at the same point, so that all exit in good order."""


class FileError(RunError):
    """A failure to read a file of a run, or a damaged one."""


class AgreedError(UserError):
    """A mistake of the caller that every rank raises, so that rank 0 prints it for all."""


MISTAKEN = {errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM}
MISTAKEN |= {errno.EROFS, errno.EINVAL}  # errors that another path fixes


def of_path(error: OSError) -> UserError | FileError:
    """Return the error for a path that the system refuses: a `UserError` if another path helps, else a `FileError`."""
    path = "" if error.filename is None else f"'{short_path(str(error.filename))}' "
    if error.errno in MISTAKEN:
        return UserError(f"{path}cannot be used ({reason(error)}); give another path")
    return FileError(f"{path or 'a file '}cannot be used ({reason(error)}); fix that and try again")


def short_path(path: str) -> str:
    """Return a path, shortened in the middle if it is too long for a message."""
    return path if len(path) <= 200 else f"{path[:100]}...{path[-60:]}"


def reason(error: BaseException) -> str:
    """Return why something could not be read or written, as a short text."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error).split("\n")[0]


def complain(message: str) -> None:
    """Print a message to standard error in one write, as several ranks may print."""
    sys.stderr.write(f"fedmpi: {message}\n")
    sys.stderr.flush()


def silence(stream: TextIO) -> None:
    """Redirect a stream with a closed pipe to /dev/null, or Python prints an error at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def unknown(kind: str, given: str, known: Iterable[str], own: bool = False, near: str | None = None) -> UserError:
    """Return the error for a name that is not in a table, with a suggestion: `near`, or the closest match.
    `own`: an import path is valid, too."""
    names = sorted(known)
    near = near or nearest(given, names)
    hint = f"did you mean '{near}'? " if near else ""
    yours = ", or your own as package.module:name" if own else ""
    return UserError(f"unknown {kind} '{given}'; {hint}known: {', '.join(names)}{yours}")


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, None if none is close: 'resnet' does not mean 'lenet'."""
    names, given = {name.lower(): name for name in known}, given.lower()
    shuffled = (low for low in names if sorted(low) == sorted(given))
    low = next(shuffled, None) or next(iter(difflib.get_close_matches(given, names, n=1, cutoff=0.75)), None)
    return None if low is None else names[low]


def raised(error: BaseException) -> str:
    """Return what a user's code raised and where, on one line: 'ValueError (rules.py, line 12): no such layer'."""
    installed = ("site-packages", os.path.dirname(__file__), os.path.dirname(os.__file__))
    files = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [at for at in files if not at[0].startswith("<") and not any(place in at[0] for place in installed)]
    where = f" ({os.path.basename(own[-1][0])}, line {own[-1][1]})" if own else ""
    said = one_line(error)
    return f"{type(error).__name__}{where}" + (f": {said}" if said else "")


def one_line(text: object) -> str:
    """Return a text on one line, with single spaces."""
    return " ".join(str(text).split())


def squeezed(name: str) -> str:
    """Return a name in lower case without '-', '_' and spaces, for comparisons."""
    return re.sub(r"[-_\s]", "", name.lower())


def exit_code(work: Callable[[], int]) -> int:
    """Run a command and return its exit code; if it fails, print the error message."""
    failed: UserError | RunError
    try:
        return work()
    except (UserError, RunError) as error:
        failed = error
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except BrokenPipeError:  # the pipe is closed, as by '| head'
        silence(sys.stdout)
        return 0
    except OSError as error:  # of a given path, such as a name that is too long
        if error.filename is None:  # a bug: show the traceback
            raise
        failed = of_path(error)
    complain(str(failed))
    return 2 if isinstance(failed, UserError) else 1
