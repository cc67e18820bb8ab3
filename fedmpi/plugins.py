"""A user's own rules and masks: `package.module:name` wherever the name of a rule, a mask or an algorithm stands.

What is named is a function of the knobs that returns the rule, as the rows of our own tables are. The folder in which
the command was started is looked into last, so a file `mine.py` there is `mine`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from .errors import UserError, nearest, unknown


def find(kind: str, name: str, table: Mapping[str, Any], knobs: Any) -> Any:
    """What the row of that name, or the function at that import path, makes of the knobs."""
    if ":" not in name:
        if name not in table:
            raise unknown(kind, name, table, own=True)
        return table[name](knobs)
    make = import_path(kind, name)
    if not callable(make):
        raise UserError(f"{kind} '{name}' is {type(make).__name__}; it must be a function of the knobs")
    try:
        made = make(knobs)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{kind} '{name}' raised {type(error).__name__} when it was given its knobs: {one_line(error)}; "
            f"it must take one argument, a {type(knobs).__name__}, and return what docs/own-algorithm.md describes"
        ) from error
    return made


def refuse(kind: str, name: str, made: Any, valid: str) -> UserError:
    """The error for a function of the knobs that returns something else than it should."""
    return UserError(
        f"{kind} '{name}' returned {type(made).__name__}; it must return {valid}: see docs/own-algorithm.md"
    )


def import_path(kind: str, path: str) -> Any:
    """What `package.module:name` names; a `UserError` tells which part of it is not there."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute or "/" in path or module_name.endswith(".py"):
        raise UserError(f"{kind} '{path}' is no import path; write package.module:name, with dots and without .py")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UserError(
                f"{kind} '{path}': there is no module '{error.name}'; start in the folder that holds it, install it, "
                "or add its folder to PYTHONPATH"
            ) from None
        raise UserError(f"{kind} '{path}': its module needs '{error.name}', which is not installed") from error
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{kind} '{path}': importing its module raised {type(error).__name__}: {one_line(error)}"
        ) from error
    if not hasattr(module, attribute):
        near = nearest(attribute, vars(module))
        hint = f"; did you mean '{near}'?" if near else ""
        raise UserError(f"{kind} '{path}': module '{module_name}' has no '{attribute}'{hint}")
    return getattr(module, attribute)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
