"""A user's own rules and masks: `package.module:name` wherever the name of a rule, a mask or an algorithm stands.

What is named is a function of the knobs that returns the rule, as the rows of our own tables are. Its first parameter's
annotation may be a class of knobs of its own. The folder in which the command was started is searched last, so a file
`mine.py` there is `mine`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_type_hints

from ..errors import UserError, nearest, raised, unknown

T = TypeVar("T")


def find(kind: str, name: str, table: Mapping[str, Any], knobs: Any) -> Any:
    """Return what the row of that name, or the function at that import path, makes of the knobs."""
    if ":" not in name:
        if name not in table:
            raise unknown(kind, name, table, own=True)
        return table[name](knobs)
    make, wanted = find_outside(kind, name, type(knobs))
    takes = f"one argument, a {type(knobs).__name__}, and return what docs/own-algorithm.md describes"
    with users_code(f"{kind} '{name}'", f" when it was given its knobs; it must take {takes}"):
        return make(knobs if isinstance(knobs, wanted) else wanted(**vars(knobs)))


@contextmanager
def users_code(what: str, then: str = "") -> Iterator[None]:
    """Turn what a user's code raises into a `UserError`, which names `what` was called and continues with `then`."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what} raised {raised(error)}{then}") from error


def find_outside(kind: str, path: str, base: type[T]) -> tuple[Callable[..., Any], type[T]]:
    """Return the function at an import path and the class of knobs that it takes: that of its first parameter's
    annotation where this extends `base`, else `base` itself."""
    make = import_path(kind, path)
    if not callable(make):
        raise UserError(f"{kind} '{path}' is {type(make).__name__}; it must be a function of the knobs")
    try:
        first = next(iter(inspect.signature(make).parameters), "")
        takes = inspect.getattr_static(make, "__init__") if isinstance(make, type) else make
        wanted: object = get_type_hints(takes).get(first)
    except (TypeError, ValueError, NameError, AttributeError):  # annotations that cannot be read are none
        return make, base
    if not isinstance(wanted, type) or not is_dataclass(wanted) or issubclass(base, wanted):
        return make, base
    if not issubclass(wanted, base):
        raise UserError(
            f"{kind} '{path}' takes a {wanted.__name__}, which does not extend {base.__name__}; see "
            "docs/own-algorithm.md for knobs of its own"
        )
    return make, wanted


def refuse(kind: str, name: str, made: Any, valid: str) -> UserError:
    """Return the error for a function of the knobs that returns something else than it should."""
    return UserError(
        f"{kind} '{name}' returned {type(made).__name__}; it must return {valid}: see docs/own-algorithm.md"
    )


def import_path(kind: str, path: str) -> Any:
    """Return what `package.module:name` names; a `UserError` says which part of it does not exist."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute or "/" in path or module_name.endswith(".py"):
        raise UserError(f"{kind} '{path}' is no import path; write package.module:name, with dots and without .py")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    from .torchvision import ready_torchvision  # not earlier: it imports torch

    ready_torchvision()  # which a user's module may import
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
        raise UserError(f"{kind} '{path}': importing its module raised {raised(error)}") from error
    if not hasattr(module, attribute):
        near = nearest(attribute, vars(module))
        hint = f"; did you mean '{near}'?" if near else ""
        raise UserError(f"{kind} '{path}': module '{module_name}' has no '{attribute}'{hint}")
    return getattr(module, attribute)


def call_with(kind: str, name: str, make: Callable[..., Any], offers: Mapping[str, Any]) -> Any:
    """Call a function with those of the offers that its parameters name. Parameters with a default may be called
    anything; others must be among the offers."""
    if not callable(make):
        raise UserError(f"{kind} '{name}' is {type(make).__name__}; it must be a function or a class")
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:  # some built-in functions have none
        parameters = {}.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    strange = [p.name for p in named if p.name not in offers and p.default is p.empty]
    if strange:
        raise UserError(
            f"{kind} '{name}' asks for {', '.join(strange)}; there is {', '.join(offers) or 'nothing'} to ask for by "
            "these names, and other parameters need a default"
        )
    with users_code(f"{kind} '{name}'"):
        return make(**{p.name: offers[p.name] for p in named if p.name in offers})
