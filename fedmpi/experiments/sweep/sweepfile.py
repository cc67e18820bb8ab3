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
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from ...errors import UserError, nearest, unknown
from ...plugins.knobs import knobs
from ...runs.config import Config, flat, renamed
from ...runs.extend import KINDS, config_class, config_for
from ...runs.options import check_keys, is_sweep, read_config, read_yaml, recipes, unknown_option
from ..measures import measure
from .grid import GROUPS, KNOWN, Choose, Knobs, Point, Stop, Sweep, Where, label_of, points

Axes = dict[str, dict[str, Knobs]]
OURS = ("seed", "out", "resume", "max_minutes")  # set by the sweep itself
KEYS = ("about", "base", "variants", "grid", "where", "seeds", "choose", "stop", "reach", "published")
RULES = ("train_loss", "test")
MUST_BE = {
    dict: "a mapping of names to values",
    list: "a list, in brackets or with one '-' per line",
    float: "a number",
    int: "a whole number of at least 1",
}


def read_sweep(name: str) -> Sweep:
    """Return the sweep in a file, or the bundled one of that name; raise a `UserError` for the first mistake."""
    path = find_sweep(name)
    tree = read_yaml(path, str(path))
    if not is_sweep(tree):
        hint = f"'fedmpi train --config {name}' runs it" if isinstance(tree, dict) and set(tree) <= set(KNOWN) else ""
        raise UserError(f"{path} is no sweep: it has none of 'grid', 'variants' and 'seeds'; {hint or 'add one'}")
    try:
        return read_tree(tree, path.stem)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def find_sweep(name: str) -> Path:
    """Return the file of that name, or else the bundled recipe."""
    path = Path(name).expanduser()
    if name in recipes() and not path.is_file():
        return recipes()[name]
    if os.path.exists(path):
        return path
    near = nearest(name, recipes())
    hint = f"did you mean '{near}'?" if near else "'fedmpi recipes' lists the bundled ones"
    raise UserError(f"'{name}' is neither a file nor a recipe; {hint}")


def read_tree(tree: dict[str, Any], name: str) -> Sweep:
    """Return the sweep of this name with the content of its file."""
    check_known("part", tree, KEYS)
    known = known_knobs(tree)
    axes = read_axes(tree, known)
    base, fixed = read_base(tree.get("base") or {}, known)
    about, published = tree.get("about", ""), tree.get("published") or []
    if not isinstance(about, str) or "\n" in about.strip():
        raise UserError(f"about is {about!r}; it must be one line")
    choose = read_choose(tree["choose"], axes) if tree.get("choose") is not None else None
    return Sweep(
        name=name,
        about=about.strip(),
        base=base,
        fixed=fixed,
        axes=axes,
        where=tuple(read_where(one, axes, known) for one in want(tree.get("where"), list, "where")),
        seeds=read_seeds(tree.get("seeds", 1)),
        choose=choose,
        stop=read_stop(tree["stop"], choose) if tree.get("stop") is not None else None,
        reach=tuple(float(want(one, float, "reach")) for one in want(tree.get("reach"), list, "reach")),
        published=tuple(read_table(one, axes) for one in (published if isinstance(published, list) else [published])),
    )


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


def read_base(tree: Any, known: Mapping[str, Any]) -> tuple[Knobs, Knobs]:
    """Return the settings of all runs: those of the `config` file, then its own. Also return the algorithm of that file
    and the rules that it sets for it, as the config.yaml of a run does."""
    if not isinstance(tree, dict) or "config" not in tree:
        return read_knobs(tree, "base", known), {}
    file, content = read_config(str(tree["config"]))
    check_keys(f"--config {file}", content, knobs(config_class(flat(content))()))
    start = {name: value for name, value in flat(content).items() if name not in OURS}
    rest = {name: value for name, value in tree.items() if name != "config"}
    own = read_knobs(rest, "base", {**known, **known_knobs(start)})
    fixed = {rule: start[rule] for rule in ("local.rule", "server.rule") if start.get(rule) and rule not in own}
    return start | own, {"algorithm": start.get("algorithm", Config.algorithm)} | fixed if fixed else {}


def read_knobs(tree: Any, where: str, known: Mapping[str, Any]) -> Knobs:
    """Return settings by dotted names; refuse unknown ones and those that the sweep sets itself."""
    tree = {} if tree is None else renamed(tree)
    check_keys(where, tree, dict(known))
    for name in OURS:
        if name in tree:
            instead = "write 'seeds' instead" if name == "seed" else "the sweep sets it for each run"
            raise UserError(f"'{name}' in {where} cannot be set in a sweep file; {instead}")
    return flat(tree)


def read_axes(tree: Mapping[str, Any], known: Mapping[str, Any]) -> Axes:
    """Return all axes in order."""
    axes: Axes = {}
    for axis, variants in want(tree.get("variants"), dict, "variants").items():
        labels = {label_of(label): settings for label, settings in want(variants, dict, f"variants.{axis}").items()}
        axes[str(axis)] = {k: read_knobs(settings, f"variants.{axis}.{k}", known) for k, settings in labels.items()}
    for name, values in want(tree.get("grid"), dict, "grid").items():
        if name not in known or name in GROUPS:
            raise UserError(unknown_option(str(name), set(known) - GROUPS, where=" in grid"))
        if name in axes:
            raise UserError(f"'{name}' is an axis of both variants and grid; give one of them another name")
        read_knobs({name: None}, "grid", known)
        numbers = [as_number(value) for value in want(values, list, f"grid.{name}")]
        axes[name] = {label_of(value): {name: value} for value in numbers}
        if len(axes[name]) < len(numbers):
            raise UserError(f"grid.{name} has a value twice: {values}")
    for axis, found in axes.items():
        if axis == "seed" or not found:
            raise UserError(f"axis '{axis}' " + ("has a reserved name; use 'seeds'" if found else "has no label"))
    return axes


def as_number(value: Any) -> Any:
    """Return numbers that YAML reads as text, such as 1e-3 without a dot, as numbers."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+e[-+]?\d+", value, re.I) else value


def read_where(tree: Any, axes: Axes, known: Mapping[str, Any]) -> Where:
    """Return one exception: its labels and its settings."""
    if not isinstance(tree, dict) or set(tree) != {"if", "set"}:
        raise UserError(f"where has {tree!r}; each entry must be {{if: {{axis: label}}, set: {{knob: value}}}}")
    labels = {}
    for axis, wanted in want(tree["if"], dict, "where.if").items():
        check_known("axis in 'where'", [axis], axes)
        labels[axis] = frozenset(map(label_of, wanted if isinstance(wanted, list) else [wanted]))
        check_known(f"label of '{axis}' in 'where'", labels[axis], axes[axis])
    given = read_knobs(tree["set"], "where", known)
    for name in given:
        if any(set(knobs) == {name} for knobs in axes.get(name, {}).values()):
            raise UserError(f"where sets '{name}', an axis of grid: its labels would be wrong")
    return Where(labels, given)


def read_seeds(given: Any) -> tuple[int, ...]:
    """Return the seeds: this many from 0 on, or those of a list."""
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return tuple(range(given))
    whole = isinstance(given, list) and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in given)
    if not whole or not given or len(set(given)) < len(given):
        raise UserError(f"seeds is {given!r}; it must be a number of seeds or a list of different whole numbers")
    return tuple(given)


def read_choose(tree: Any, axes: Axes) -> Choose:
    """Return the rule by which the best labels are chosen."""
    given = want(tree, dict, "choose")
    check_known("part of choose", given, [f.name for f in fields(Choose)])
    over, share = (tuple(map(label_of, want(given.get(key), list, f"choose.{key}"))) for key in ("over", "share"))
    if not over:
        raise UserError("choose lacks 'over': the axes to choose from")
    check_known("axis in 'choose'", (*over, *share), axes)
    if set(over) & set(share):
        raise UserError(f"choose is over {list(over)} and shares {list(share)}; no axis may be in both")
    rule = Choose(**given | {"over": over, "share": share})
    check_known("rule (choose.by)", [rule.by], RULES)
    want(rule.last, int, "choose.last")
    return rule


def read_stop(tree: Any, choose: Choose | None) -> Stop:
    """Return the rule by which runs are given up."""
    given = want(tree, dict, "stop")
    check_known("part of stop", given, [f.name for f in fields(Stop)])
    if choose is None:
        raise UserError("stop needs choose: runs are given up by its comparison")
    stop = Stop(**given)
    want(stop.after, int, "stop.after")
    want(stop.every, int, "stop.every")
    if not 0 < want(stop.quantile, float, "stop.quantile") < 1:
        raise UserError(f"stop.quantile is {stop.quantile}; it must be in (0, 1)")
    return stop


def read_table(tree: Any, axes: Axes) -> dict[str, Any]:
    """Return a table of a paper; refuse labels that do not exist."""
    given = want(tree, dict, "published")
    check_known("part of published", given, ("source", "measure", "columns", "rows"))
    table: dict[str, Any] = {"source": str(given.get("source", "")), "measure": str(given.get("measure", "best"))}
    if table["measure"] != "curve":
        measure(table["measure"])
    rows, columns = want(given.get("rows"), list, "published.rows"), str(given.get("columns"))
    if not rows:
        return table
    check_known("axis (published.columns)", [columns], axes)
    return table | {"columns": columns, "rows": [read_row(row, axes, columns) for row in rows]}


def read_row(tree: Any, axes: Axes, columns: str) -> dict[str, Any]:
    """Return a row of such a table: labels of axes, and numbers or words under labels of the columns."""
    row: dict[str, Any] = {}
    for key, value in want(tree, dict, "published.rows").items():
        if key in axes:
            check_known(f"label of '{key}' (published.rows)", [label_of(value)], axes[key])
            row[key] = label_of(value)
            continue
        if label_of(key) not in axes[columns]:
            raise unknown("axis or label (published.rows)", str(key), [*axes, *axes[columns]])
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise UserError(f"published.rows has {value!r} under '{key}'; it must be a number or a word")
        row[label_of(key)] = value
    return row


def want(value: Any, kind: Any, what: str) -> Any:
    """Return a value of the file if it is of a kind of `MUST_BE`; null stands for an empty mapping or list."""
    if value is None and kind in (dict, list):
        return kind()
    accepted = (int, float) if kind is float else kind
    if isinstance(value, bool) or not isinstance(value, accepted) or (kind is int and value < 1):
        raise UserError(f"{what} is {value!r}; it must be {MUST_BE[kind]}")
    return value


def check_known(what: str, given: Iterable[Any], known: Collection[str]) -> None:
    """Refuse a name that is not among the known ones."""
    for name in given:
        if name not in known:
            raise unknown(what, str(name), known)


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
        check_known(f"label of '{axis}' (--only)", wanted, known)
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
