"""Every knob and its bounds, where a value comes from, and what the table of algorithms makes of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import Field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.algorithms import ALGORITHMS, build, resolve
from fedmpi.config import Config, Local, Server, check, check_bounds
from fedmpi.errors import UserError
from fedmpi.masks import MASKS
from fedmpi.options import parse
from fedmpi.server import RULES as SERVER_RULES


def fields(part: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Every leaf of the tree by its dotted name."""
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if dataclasses.is_dataclass(value):
            yield from fields(value, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f


def with_knob(name: str, value: Any) -> Config:
    """The default configuration with one knob turned."""
    group, dot, leaf = name.rpartition(".")
    part = replace(getattr(Config(), group), **{leaf: value}) if dot else value
    return replace(Config(), **{group or leaf: part})


def number(f: Field[Any]) -> str | None:
    """`int` or `float` for a field of numbers."""
    return next((kind for kind in ("int", "float") if str(f.type).startswith(kind)), None)


def edges(f: Field[Any]) -> tuple[list[float], list[float]]:
    """Values just inside and just outside a field's bounds."""
    low, high, open_low, open_high = (f.metadata[k] for k in ("low", "high", "open_low", "open_high"))

    def beside(bound: float, towards: float) -> float:
        return bound + math.copysign(1, towards) if number(f) == "int" else math.nextafter(bound, towards)

    inside, outside = ([beside(low, math.inf)], [low]) if open_low else ([low], [beside(low, -math.inf)])
    if high < math.inf:
        inside += [beside(high, -math.inf) if open_high else high]
        outside += [high if open_high else beside(high, math.inf)]
    return inside, outside


KNOBS = dict(fields(Config()))
BOUNDED = [(name, f) for name, f in KNOBS.items() if "low" in f.metadata]
INSIDE = [(name, value) for name, f in BOUNDED for value in edges(f)[0]]
OUTSIDE = [(name, value) for name, f in BOUNDED for value in edges(f)[1]]


# Bounds


def test_no_number_is_without_a_lower_bound() -> None:
    unbounded = [name for name, f in KNOBS.items() if number(f) and f.metadata.get("low", -math.inf) == -math.inf]
    assert unbounded == []
    assert len(BOUNDED) > 20


@pytest.mark.parametrize(("name", "value"), INSIDE)
def test_a_value_just_inside_its_bounds_is_taken(name: str, value: float) -> None:
    check_bounds(with_knob(name, value), prefix="")


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_a_value_just_outside_its_bounds_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(UserError) as caught:
        check(with_knob(name, value))
    assert str(caught.value).startswith(f"--{name} is {value}; it must be ")


@pytest.mark.parametrize("name", [name for name, f in BOUNDED if number(f) == "float"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_knob_takes_what_is_no_finite_number(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"^--{name} is {value}; it must be "):
        check(with_knob(name, value))


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("tau", 1.5, "in [0, 1]"),
        ("tau", -0.1, "in [0, 1]"),
        ("local.lr", 0, "above 0"),
        ("local.momentum", 1.0, "in [0, 1)"),
        ("server.lr", -1, "above 0"),
        ("rounds", 0, "at least 1"),
        ("seed", -1, "at least 0"),
        ("eval.every", 0, "at least 1"),
        ("skew.alpha", 0, "above 0"),
    ],
)
def test_the_sentence_says_what_is_valid(name: str, value: float, valid: str) -> None:
    with pytest.raises(UserError) as caught:
        check(with_knob(name, value))
    assert str(caught.value) == f"--{name} is {value}; it must be {valid}"


@pytest.mark.parametrize("name", sorted(KNOBS))
def test_null_is_taken_just_where_it_is_the_default(name: str) -> None:
    cfg = with_knob(name, None)
    if KNOBS[name].default is None:
        check(cfg)
    else:
        with pytest.raises(UserError, match=f"^--{name} is null; it must have a value"):
            check(cfg)


def test_the_defaults_are_sound() -> None:
    check(Config())


def test_a_cohort_is_no_larger_than_the_federation() -> None:
    check(replace(Config(), clients=10, cohort=10))
    with pytest.raises(UserError, match="--cohort is 11 but there are only 10 clients"):
        check(replace(Config(), clients=10, cohort=11))


def test_no_more_clients_are_demanded_than_train() -> None:
    check(replace(Config(), cohort=5, min_clients=5))
    with pytest.raises(UserError, match="--min_clients is 6 but only 5 clients train a round"):
        check(replace(Config(), cohort=5, min_clients=6))


def test_a_configuration_cannot_be_changed_in_place() -> None:
    for part in (Config(), Local(), Server()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, "other")


# Where a value comes from


def test_without_arguments_there_are_the_defaults() -> None:
    assert parse([]) == Config()


def test_an_option_overrides_a_file_and_a_file_the_default(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("tau: 0.1\nlocal:\n  lr: 0.2\n  epochs: 3\n")
    cfg = parse(["--config", str(file), "--local.lr", "0.7"])
    assert cfg == replace(Config(), tau=0.1, local=Local(lr=0.7, epochs=3))
    assert parse([f"--config={file}"]).local == Local(lr=0.2, epochs=3)


def test_a_later_file_overrides_an_earlier_one(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("tau: 0.1\nrounds: 7\n")
    second.write_text("tau: 0.2\n")
    cfg = parse(["--config", str(first), "--config", str(second)])
    assert (cfg.tau, cfg.rounds) == (0.2, 7)


def test_a_file_may_use_dotted_names(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("local.lr: 1e-3\n")
    assert parse(["--config", str(file)]).local.lr == 0.001


def test_every_knob_is_an_option() -> None:
    words = []
    for name, f in KNOBS.items():
        word = {"str": "x", "bool": "false"}.get(str(f.type).partition(" ")[0], "1")
        words += [f"--{name}", word]
    cfg = parse(words)
    for name, f in KNOBS.items():
        value = attrgetter(name)(cfg)
        assert value == {"str": "x", "bool": False}.get(str(f.type).partition(" ")[0], 1), name


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """A sound configuration, anywhere within the bounds."""

    def values(part: Any) -> Any:
        changes: dict[str, Any] = {}
        for f in dataclasses.fields(part):
            default = getattr(part, f.name)
            if dataclasses.is_dataclass(default):
                changes[f.name] = values(default)
            elif number(f):
                low, high = f.metadata["low"], min(f.metadata["high"], 10**6)
                drawn = (
                    st.integers(int(low), int(high))
                    if number(f) == "int"
                    else st.floats(low, high, exclude_min=f.metadata["open_low"], exclude_max=f.metadata["open_high"])
                )
                changes[f.name] = draw(drawn | st.none() if default is None else drawn)
            elif isinstance(default, bool):
                changes[f.name] = draw(st.booleans())
            else:
                words = st.from_regex(r"[a-z/_.~ :#'-]*[a-z]{2}\.[a-z]", fullmatch=True)
                changes[f.name] = draw(words | st.none() if default is None else words)
        return replace(part, **changes)

    cfg: Config = values(Config())
    return cfg


@settings(deadline=None, max_examples=25)
@given(configs())
def test_what_a_run_writes_down_reads_back_the_same(tmp_path_factory: pytest.TempPathFactory, cfg: Config) -> None:
    file = tmp_path_factory.mktemp("written") / "config.yaml"
    file.write_text(yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False), encoding="utf-8")
    assert parse(["--config", str(file)]) == cfg


# Algorithms


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_row_fills_in_what_was_left_out(name: str) -> None:
    row, cfg = ALGORITHMS[name], resolve(replace(Config(), algorithm=name))
    assert (cfg.local.rule, cfg.local.lr) == (row.local, row.local_lr)
    assert (cfg.server.rule, cfg.server.lr, cfg.server.momentum) == (row.server, row.server_lr, row.server_momentum)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_row_never_overrides_what_was_given(name: str) -> None:
    local = Local(rule="sgd", lr=0.123, momentum=0.0, epochs=4)
    server = Server(rule="adagrad", lr=7.0, momentum=0.0, b2=0.0, eps=0.5)
    cfg = resolve(replace(Config(), algorithm=name, local=local, server=server))
    assert cfg.local == local and cfg.server == server


def test_a_given_zero_is_given() -> None:
    cfg = resolve(replace(Config(), algorithm="fedavgm", server=Server(momentum=0.0)))
    assert cfg.server.momentum == 0.0
    assert build(cfg).server.moments == {}
    assert build(resolve(replace(Config(), algorithm="fedavgm"))).server.moments == {"z": 0.0}


def test_resolving_twice_changes_nothing_more() -> None:
    for name in ALGORITHMS:
        once = resolve(replace(Config(), algorithm=name))
        assert resolve(once) == once


def test_the_mask_and_the_rest_are_no_business_of_the_row() -> None:
    cfg = replace(Config(), algorithm="fedyogi", mask="and", tau=0.9, rounds=3)
    assert replace(resolve(cfg), local=cfg.local, server=cfg.server) == cfg


def test_rules_combine_freely() -> None:
    cfg = resolve(parse(["--algorithm", "fedavg", "--local.rule", "sgd", "--server.rule", "yogi"]))
    assert (cfg.local.rule, cfg.server.rule) == ("sgd", "yogi")
    assert build(cfg).server.moments == pytest.approx({"v": 1e-6, "z": 0.0})


@pytest.mark.parametrize("mask", sorted(MASKS))
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_builds_with_every_mask(name: str, mask: str) -> None:
    algorithm = build(resolve(replace(Config(), algorithm=name, mask=mask, tau=0.4)))
    votes = torch.tensor([4, -4, 3, 0], dtype=torch.int8)
    assert algorithm.mask(votes, 10).tolist() == pytest.approx(
        {"mean": [1, 1, 1, 1], "gma": [1, 1, 0.3, 0], "and": [1, 1, 0, 0]}[mask]
    )
    w, d = torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, 1.0])
    moments = {key: torch.full((4,), start) for key, start in algorithm.server.moments.items()}
    algorithm.server.step(w, d, torch.ones(4), moments, 1)
    assert w.sign().tolist() == [1, -1, 1, 1]  # the server adds


def test_every_named_rule_is_in_its_table() -> None:
    assert {row.server for row in ALGORITHMS.values()} <= set(SERVER_RULES)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"algorithm": "fedadm"}, "unknown algorithm 'fedadm'; did you mean 'fedadam'"),
        ({"mask": "gmaa"}, "unknown mask 'gmaa'; did you mean 'gma'"),
        ({"local": Local(rule="sdg")}, "unknown local rule 'sdg'; did you mean 'sgd'"),
        ({"server": Server(rule="yogy")}, "unknown server rule 'yogy'; did you mean 'yogi'"),
        ({"server": Server(variant="redi")}, "unknown server variant 'redi'; did you mean 'reddi'"),
    ],
)
def test_an_unknown_name_is_told_its_neighbour(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build(resolve(replace(Config(), **changes)))
