"""Reading sweep files, and the changes of a command line: from text to a `Sweep`, with one error message per mistake.

about: one line
base: {data: fmnist, rounds: 100, local: {momentum: 0.9}}     settings of all runs; `config: FILE` adds to a file
variants: {setting: {small: {clients: 10}, large: {clients: 100}}}     axes whose labels stand for several settings
grid: {mask: [mean, gma], local.lr: [0.01, 0.1]}                       axes of one knob, whose values are the labels
where: [{if: {setting: small}, set: {rounds: 50}}]                     exceptions for some labels
seeds: 3                                                               or a list of seeds
choose, stop, reach, published                                         see `Choose`, `Stop` and docs/experiments.md
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from ...errors import UserError, nearest, unknown
from ...plugins.knobs import knobs
from ...runs.config import Config, renamed
from ...runs.extend import KINDS, config_class, config_for
from ...runs.extend import flat as dotted
from ...runs.options import check_keys, is_sweep, read_config, read_yaml, recipes, unknown_option
from ..measures import measure
from .grid import GROUPS, KNOWN, Choose, Knobs, Point, Stop, Sweep, Where, flat, label_of, points

OURS = ("seed", "out", "resume", "max_minutes")  # set by the sweep itself
KEYS = ("about", "base", "variants", "grid", "where", "seeds", "choose", "stop", "reach", "published")
RULES = ("train_loss", "test")


def read_sweep(name: str) -> Sweep:
    """Return the sweep in a file, or the bundled one of that name; raise a `UserError` for the first mistake."""
    path = find_sweep(name)
    where = str(path)
    tree = read_yaml(path, where)
    if not is_sweep(tree):
        hint = f"'fedmpi train --config {name}' runs it" if isinstance(tree, dict) and set(tree) <= set(KNOWN) else ""
        raise UserError(f"{where} is no sweep: it has none of 'grid', 'variants' and 'seeds'; {hint or 'add one'}")
    for key in tree:
        if key not in KEYS:
            near = nearest(str(key), KEYS)
            hint = f"did you mean '{near}'?" if near else f"known: {', '.join(KEYS)}"
            raise UserError(f"unknown part '{key}' in {where}; {hint}")
    known = known_knobs(tree)
    axes = read_axes(tree, where, known)
    base, fixed = read_base(tree.get("base") or {}, where, known)
    sweep = Sweep(
        name=path.stem,
        about=read_line(tree.get("about", ""), f"about in {where}"),
        base=base,
        fixed=fixed,
        axes=axes,
        where=tuple(read_where(one, axes, where, known) for one in as_list(tree.get("where"), "where", where)),
        seeds=read_seeds(tree.get("seeds", 1), where),
        choose=read_record(Choose, tree.get("choose"), "choose", where),
        stop=read_record(Stop, tree.get("stop"), "stop", where),
        reach=tuple(read_number(one, f"reach in {where}") for one in as_list(tree.get("reach"), "reach", where)),
        published=read_published(tree.get("published"), axes, where),
    )
    check_choice(sweep, where)
    return sweep


def find_sweep(name: str) -> Path:
    """Return the file of that name, or else the bundled recipe."""
    path = Path(name).expanduser()
    if os.path.exists(path) and not (path.is_dir() and name in recipes()):
        return path
    if name in recipes():
        return recipes()[name]
    near = nearest(name, recipes())
    hint = f"did you mean '{near}'?" if near else "'fedmpi recipes' lists the bundled ones"
    raise UserError(f"'{name}' is neither a file nor a recipe; {hint}")


def known_knobs(tree: Any) -> dict[str, Any]:
    """Return the knobs that a sweep may set: the built-in ones, and those of the plug-ins that it names anywhere."""
    known = dict(KNOWN)
    for option, name in plugins_in(tree):
        known |= knobs(config_for({option: name})())
    return known


def plugins_in(tree: Any, option: str = "") -> Iterator[tuple[str, str]]:
    """Yield the options in a sweep file that name a plug-in, with its import path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from plugins_in(value, f"{option}.{key}" if option in ("local", "server") else str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from plugins_in(value, option)
    elif option in ("algorithm", *KINDS) and ":" in str(tree):
        yield option, str(tree)


def read_base(tree: Any, where: str, known: Mapping[str, Any]) -> tuple[Knobs, Knobs]:
    """Return the settings of all runs: those of the `config` file, then its own. Also return the algorithm of that file
    and the rules that it sets for it, as the config.yaml of a run does."""
    if not isinstance(tree, dict):
        raise UserError(
            f"base in {where} holds {tree!r}; it must have options with their values, as a configuration file does"
        )
    rest = {key: value for key, value in tree.items() if key != "config"}
    start: Knobs = {}
    if "config" in tree:
        file, tree = read_config(str(tree["config"]))
        check_keys(f"--config {file}", tree, knobs(config_class(dotted(tree))()))
        start = {k: v for k, v in flat(tree).items() if k not in OURS}
        known = {**known, **known_knobs(start)}
    own = read_knobs(rest, f"base in {where}", known)
    fixed = {rule: start[rule] for rule in ("local.rule", "server.rule") if start.get(rule) and rule not in own}
    return start | own, {"algorithm": start.get("algorithm", Config.algorithm)} | fixed if fixed else {}


def read_knobs(tree: Any, where: str, known: Mapping[str, Any]) -> Knobs:
    """Return settings by dotted names; refuse unknown ones and those that the sweep sets itself."""
    tree = {} if tree is None else renamed(tree)
    check_keys(where, tree, dict(known))
    found = flat(tree)
    ours = next((name for name in found if name in OURS), None)
    if ours is not None:
        instead = "write 'seeds' instead" if ours == "seed" else "the sweep sets it for each run"
        raise UserError(f"'{ours}' in {where} cannot be set in a sweep file; {instead}")
    return found


def read_axes(tree: Mapping[str, Any], where: str, known: Mapping[str, Any]) -> dict[str, dict[str, Knobs]]:
    """Return all axes in order: axis -> label -> settings."""
    axes: dict[str, dict[str, Knobs]] = {}
    for axis, variants in as_dict(tree.get("variants"), "variants", where).items():
        labels = as_dict(variants, f"variants.{axis}", where)
        axes[str(axis)] = {
            label_of(label): read_knobs(settings, f"variants.{axis}.{label_of(label)} in {where}", known)
            for label, settings in labels.items()
        }
    for name, values in as_dict(tree.get("grid"), "grid", where).items():
        if name not in known or name in GROUPS:
            raise UserError(unknown_option(str(name), set(known) - GROUPS, where=f" in grid in {where}"))
        if name in axes:
            raise UserError(f"'{name}' is an axis of both variants and grid in {where}; give one of them another name")
        read_knobs({name: None}, f"grid in {where}", known)
        numbers = [as_number(value) for value in as_list(values, f"grid.{name}", where)]
        axes[name] = {label_of(value): {name: value} for value in numbers}
        if len(axes[name]) < len(numbers):
            raise UserError(f"grid.{name} in {where} has a value twice: {values}")
    for axis, found in axes.items():
        if axis == "seed" or not found:
            raise UserError(
                f"axis '{axis}' in {where} " + ("has no label" if found == {} else "has a reserved name; use 'seeds'")
            )
    return axes


def read_where(tree: Any, axes: dict[str, dict[str, Knobs]], where: str, known: Mapping[str, Any]) -> Where:
    """Return one exception: its labels and its settings."""
    if not isinstance(tree, dict) or set(tree) != {"if", "set"}:
        valid = "{if: {axis: label}, set: {knob: value}}"
        raise UserError(f"where in {where} holds {tree!r}; each entry must be {valid}")
    labels = {}
    for axis, wanted in as_dict(tree["if"], "where.if", where).items():
        if axis not in axes:
            raise unknown(f"axis in 'where' of {where}", str(axis), axes)
        labels[axis] = frozenset(map(label_of, wanted if isinstance(wanted, list) else [wanted]))
        for label in labels[axis] - axes[axis].keys():
            raise unknown(f"label of '{axis}' in 'where' of {where}", label, axes[axis])
    given = read_knobs(tree["set"], f"where in {where}", known)
    for name in given:
        if any(set(knobs) == {name} for knobs in axes.get(name, {}).values()):
            raise UserError(f"where in {where} sets '{name}', an axis of grid: its labels would be wrong")
    return Where(labels, given)


def read_seeds(given: Any, where: str) -> tuple[int, ...]:
    """Return the seeds: this many from 0 on, or those of a list."""
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return tuple(range(given))
    whole = isinstance(given, list) and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in given)
    if not whole or not given or len(set(given)) < len(given):
        raise UserError(
            f"seeds in {where} is {given!r}; it must be a number of seeds or a list of different whole numbers"
        )
    return tuple(given)


def read_record(kind: Any, tree: Any, what: str, where: str) -> Any:
    """Return a `Choose` or `Stop` from a mapping; None if there is none."""
    if tree is None:
        return None
    known = {f.name: f for f in fields(kind)}
    values = {}
    for key, value in as_dict(tree, what, where).items():
        if key not in known:
            raise unknown(f"part of {what} in {where}", str(key), known)
        axes = key in ("over", "share")
        values[key] = tuple(map(label_of, as_list(value, f"{what}.{key}", where))) if axes else value
    if kind is Choose and not values.get("over"):
        raise UserError(f"{what} in {where} lacks 'over': the axes to choose from")
    return kind(**values)


def check_choice(sweep: Sweep, where: str) -> None:
    """Refuse a `choose` or `stop` that cannot work."""
    choose, stop = sweep.choose, sweep.stop
    if choose is not None:
        for axis in (*choose.over, *choose.share):
            if axis not in sweep.axes:
                raise unknown(f"axis in 'choose' of {where}", axis, sweep.axes)
        if not choose.over or set(choose.over) & set(choose.share):
            both = f"over {list(choose.over)} and shares {list(choose.share)}"
            raise UserError(f"choose in {where} is {both}; it must be over an axis, and no axis may be in both")
        if choose.by not in RULES:
            raise unknown(f"rule (choose.by in {where})", str(choose.by), RULES)
        check_whole(choose.last, f"choose.last in {where}")
    if stop is not None:
        if choose is None:
            raise UserError(f"stop in {where} needs choose: runs are given up by its comparison")
        check_whole(stop.after, f"stop.after in {where}")
        check_whole(stop.every, f"stop.every in {where}")
        if not 0 < read_number(stop.quantile, f"stop.quantile in {where}") < 1:
            raise UserError(f"stop.quantile in {where} is {stop.quantile}; it must be in (0, 1)")


def read_published(tree: Any, axes: dict[str, dict[str, Knobs]], where: str) -> tuple[dict[str, Any], ...]:
    """Return the tables of a paper: one, or a list of them."""
    tables = tree if isinstance(tree, list) else [tree] if tree else []
    return tuple(read_table(table, axes, where) for table in tables)


def read_table(tree: Any, axes: dict[str, dict[str, Knobs]], where: str) -> dict[str, Any]:
    """Return a table of a paper; refuse labels that do not exist."""
    known = ("source", "measure", "columns", "rows")
    found = as_dict(tree, "published", where)
    for key in found:
        if key not in known:
            raise unknown(f"part of published in {where}", str(key), known)
    name = str(found.get("measure", "best"))
    try:
        if name != "curve":
            measure(name)
    except UserError as error:
        raise UserError(f"published in {where}: {error}") from None
    columns = str(found.get("columns"))
    if found.get("rows") and columns not in axes:
        raise unknown(f"axis (published.columns in {where})", columns, axes)
    rows = [read_row(row, axes, columns, where) for row in as_list(found.get("rows"), "published.rows", where)]
    table: dict[str, Any] = {"source": str(found.get("source", "")), "measure": name}
    return table | {"columns": columns, "rows": rows} if rows else table


def read_row(tree: Any, axes: dict[str, dict[str, Knobs]], columns: str, where: str) -> dict[str, Any]:
    """Return a row of such a table: labels of axes, and numbers or words under labels of the columns."""
    row: dict[str, Any] = {}
    for key, value in as_dict(tree, "published.rows", where).items():
        if key in axes:
            if label_of(value) not in axes[key]:
                raise unknown(f"label of '{key}' (published.rows in {where})", label_of(value), axes[key])
            row[key] = label_of(value)
            continue
        if label_of(key) not in axes[columns]:
            raise unknown(f"axis or label (published.rows in {where})", str(key), [*axes, *axes[columns]])
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise UserError(f"published.rows in {where} has {value!r} under '{key}'; it must be a number or a word")
        row[label_of(key)] = value
    return row


# Small readers


def as_dict(tree: Any, what: str, where: str) -> dict[Any, Any]:
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{what} in {where} holds {tree!r}; it must be a mapping of names to values")
    return tree


def as_list(tree: Any, what: str, where: str) -> list[Any]:
    if tree is None:
        return []
    if not isinstance(tree, list):
        raise UserError(f"{what} in {where} holds {tree!r}; it must be a list, in brackets or with one '-' per line")
    return tree


def as_number(value: Any) -> Any:
    """Return numbers that YAML reads as text, such as 1e-3 without a dot, as numbers."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+e[-+]?\d+", value, re.I) else value


def read_line(text: Any, what: str) -> str:
    if not isinstance(text, str) or "\n" in text.strip():
        raise UserError(f"{what} is {text!r}; it must be one line")
    return text.strip()


def read_number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{what} is {value!r}; it must be a number")
    return float(value)


def check_whole(value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{what} is {value!r}; it must be a whole number of at least 1")


# The command line


def narrowed(sweep: Sweep, only: Iterable[str]) -> list[Point]:
    """Return the points with the labels of --only, each given as axis=label,label."""
    found = points(sweep)
    for text in only:
        axis, equals, labels = text.partition("=")
        known = [str(seed) for seed in sweep.seeds] if axis == "seed" else list(sweep.axes.get(axis, ()))
        if not equals or not known:
            raise UserError(f"--only is '{text}'; write axis=label, with an axis of {', '.join([*sweep.axes, 'seed'])}")
        wanted = labels.split(",")
        for label in wanted:
            if label not in known:
                raise unknown(f"label of '{axis}' (--only)", label, known)
        found = [p for p in found if (str(p.seed) if axis == "seed" else p.labels[axis]) in wanted]
    return found


def changed(sweep: Sweep, settings: Iterable[str]) -> Sweep:
    """Return the sweep with the settings of --set for all its runs, each given as knob=value; they override the
    file."""
    given: Knobs = {}
    known = known_knobs([sweep.base, sweep.axes])
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set is '{text}'; write knob=value, such as rounds=20")
        if name in sweep.axes:
            raise UserError(f"--set {name}: it is an axis of the sweep; select labels with --only {name}=...")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            parsed = value
        except (ValueError, RecursionError):  # a number of thousands of digits, brackets in brackets
            raise UserError(f"--set {name} cannot be read; give a plain value") from None
        given |= read_knobs({name: parsed}, "--set", known)
    return replace(sweep, where=(*sweep.where, Where({}, given))) if given else sweep
