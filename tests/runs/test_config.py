"""Every knob and its bounds, where a value comes from, and what the table of algorithms makes of it."""

from __future__ import annotations

import contextlib
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

from fedmpi.aggregate.sums import SUMS, WIRES
from fedmpi.algorithms import ALGORITHMS
from fedmpi.data.splits import OWNERS
from fedmpi.errors import UserError
from fedmpi.local import RULES as LOCAL_RULES
from fedmpi.local import Piece
from fedmpi.masks import MASKS
from fedmpi.plugins.knobs import Bounds, check_bounds, knobs
from fedmpi.runs.build import build, resolve
from fedmpi.runs.config import Config, Local, Meta, Server, check
from fedmpi.runs.options import parse
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
    low, high, open_low, open_high = dataclasses.astuple(f.metadata["bounds"])

    def beside(bound: float, towards: float) -> float:
        return bound + math.copysign(1, towards) if number(f) == "int" else math.nextafter(bound, towards)

    inside, outside = ([beside(low, math.inf)], [low]) if open_low else ([low], [beside(low, -math.inf)])
    if high < math.inf:
        inside += [beside(high, -math.inf) if open_high else high]
        outside += [high if open_high else beside(high, math.inf)]
    return inside, outside


KNOBS = dict(fields(Config()))
BOUNDED = [(name, f) for name, f in KNOBS.items() if "bounds" in f.metadata and number(f)]
INSIDE = [(name, value) for name, f in BOUNDED for value in edges(f)[0]]
OUTSIDE = [(name, value) for name, f in BOUNDED for value in edges(f)[1]]


# Bounds


def test_no_number_is_without_a_lower_bound() -> None:
    numbers = {name: f.metadata.get("bounds", Bounds()) for name, f in KNOBS.items() if number(f)}
    assert [name for name, bounds in numbers.items() if bounds.low == -math.inf] == []
    assert len(BOUNDED) > 20


@pytest.mark.parametrize(("name", "table"), [("sum", SUMS), ("wire", WIRES), ("skew.owners", OWNERS)])
def test_the_choices_of_an_option_are_those_of_the_code_that_reads_it(name: str, table: tuple[str, ...]) -> None:
    assert KNOBS[name].metadata["choices"] == table and KNOBS[name].default in table


@pytest.mark.parametrize(("name", "value"), INSIDE)
def test_a_value_just_inside_its_bounds_is_taken(name: str, value: float) -> None:
    check_bounds(with_knob(name, value))


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
def test_the_error_says_what_is_valid(name: str, value: float, valid: str) -> None:
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
    with pytest.raises(UserError, match="--min_clients is 6 but only 5 clients train per round"):
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
    examples: dict[str, tuple[str, Any]] = {
        "str": ("x", "x"),
        "bool": ("false", False),
        "list[float]": ("[2, 1]", [2, 1]),
    }

    def example(f: Field[Any]) -> tuple[str, Any]:
        return examples.get(str(f.type).partition(" ")[0], ("1", 1))

    cfg = parse([word for name, f in KNOBS.items() for word in (f"--{name}", example(f)[0])])
    for name, f in KNOBS.items():
        assert attrgetter(name)(cfg) == example(f)[1], name


SPECS = {
    "schedule": ["constant", "step:30,0.1", "cosine", "cosine:0.01", "warmup:5+cosine", "warmup:3"],
    "work": ["full", "uniform:0.25,1.0", "stragglers:0.5,0.1,0.5"],
    "option": ["I", "II"],
    "gradient": ["last", "initial"],
}


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
                bounds = f.metadata["bounds"]
                low, high = bounds.low, min(bounds.high, 10**6)
                drawn = (
                    st.integers(int(low), int(high))
                    if number(f) == "int"
                    else st.floats(low, high, exclude_min=bounds.open_low, exclude_max=bounds.open_high)
                )
                changes[f.name] = draw(drawn | st.none() if default is None else drawn)
            elif str(f.type).startswith("bool"):
                changes[f.name] = draw(st.booleans() | st.none() if default is None else st.booleans())
            elif str(f.type).startswith("list"):
                changes[f.name] = draw(st.none() | st.lists(st.floats(0, 1e6), min_size=1, max_size=5))
            elif f.name in SPECS:
                changes[f.name] = draw(st.sampled_from(SPECS[f.name]))
            else:
                words = st.from_regex(r"([a-z/_.~:'-][a-z/_.~ :#'-]*)?[a-z]{2}\.[a-z]", fullmatch=True)
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


@pytest.mark.parametrize("words", [["--out", "#1"], ["--out=#1"], ["--local.rule", " # mine"]])
def test_a_value_that_would_be_taken_for_a_comment_is_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a value cannot begin with #"):
        parse(words)
    (tmp_path / "f.yaml").write_text("data_root: '#1'\n")
    with pytest.raises(UserError, match="--data_root is '#1'; a value cannot begin with #"):
        parse(["--config", str(tmp_path / "f.yaml")])


# Algorithms


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_row_fills_in_what_was_left_out(name: str) -> None:
    row, cfg = ALGORITHMS[name], resolve(replace(Config(), algorithm=name))
    assert (cfg.local.rule, cfg.server.rule) == (row.local, row.server)
    usual = {"mask": "mean", "tau": 0.4, "meta.size": 0, "meta.lr": 0.0, "meta.share": False}
    usual |= {"local.lr": 0.01, "local.momentum": 0.9, "local.clip": 0.0, "local.clip_update": 0.0, "local.epochs": 1}
    usual |= {"server.lr": 1.0, "server.momentum": 0.0}
    filled = knobs(cfg)
    assert {option: filled[option] for option in usual} == usual | row.defaults


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_row_never_overrides_what_was_given(name: str) -> None:
    local = Local(rule="sgd", lr=0.123, momentum=0.0, epochs=4, clip=0.0, clip_update=0.0)
    server = Server(rule="adagrad", lr=7.0, momentum=0.0, b2=0.0, eps=0.5)
    meta = Meta(size=7, lr=0.5, share=False)
    asked = replace(Config(), algorithm=name, mask="sand", tau=0.0, local=local, server=server, meta=meta)
    assert resolve(asked) == asked


def test_a_given_zero_is_given() -> None:
    cfg = resolve(replace(Config(), algorithm="fedavgm", server=Server(momentum=0.0)))
    assert cfg.server.momentum == 0.0
    assert build(cfg).server.moments == {}
    given_zeros = replace(Config(), algorithm="fedmeta", tau=0.0, local=Local(momentum=0.0), meta=Meta(0, 0.0, False))
    cfg = resolve(given_zeros)
    assert (cfg.tau, cfg.local.momentum, cfg.meta) == (0.0, 0.0, given_zeros.meta)
    assert build(cfg).meta is None
    assert build(resolve(replace(Config(), algorithm="fedavgm"))).server.moments == {"z": 0.0}


def test_resolving_twice_changes_nothing_more() -> None:
    for name in ALGORITHMS:
        once = resolve(replace(Config(), algorithm=name))
        assert resolve(once) == once


def test_the_rest_is_no_business_of_the_row() -> None:
    cfg = replace(Config(), algorithm="fedyogi", mask="and", tau=0.9, rounds=3)
    assert replace(resolve(cfg), local=cfg.local, server=cfg.server, meta=cfg.meta) == cfg


def test_only_fedgma2021_comes_with_a_mask_of_its_own() -> None:
    resolved = {name: resolve(Config(algorithm=name)) for name in ALGORITHMS}
    masks = {name: (cfg.mask, cfg.tau) for name, cfg in resolved.items()}
    assert masks.pop("fedgma2021") == ("and", 0.8)
    assert set(masks.values()) == {("mean", 0.4)}, "a name from a paper is that paper"


def test_a_free_combination_starts_from_the_values_of_the_rows_that_have_its_rules() -> None:
    """UGA sends gradients and needs a row of its own for its rates, whichever algorithm it is put into."""

    def values(algorithm: str, local: str | None, server: str | None) -> tuple[Any, ...]:
        asked = replace(Config(), algorithm=algorithm, local=Local(rule=local), server=Server(rule=server))
        cfg = resolve(asked)
        of_client = (cfg.local.rule, cfg.local.lr, cfg.local.momentum, cfg.local.epochs, cfg.local.clip_update)
        return (*of_client, cfg.server.rule, cfg.server.lr, cfg.server.momentum)

    assert values("fedavg", "uga", None) == values("uga", None, None)
    assert values("fedavg", None, "yogi") == values("fedyogi", None, None)
    assert values("uga", "sgd", None) == values("fedavg", None, None)
    assert values("fedavgm", "prox", None)[-1] == 0.9, "the server's rule is the row's own, and so is its momentum"
    assert values("fedavgm", None, "yogi") == values("fedyogi", None, None)
    assert values("fedavg", "mine:rule", None) == ("mine:rule", *values("fedavg", None, None)[1:])
    for name, row in ALGORITHMS.items():
        assert values(name, row.local, row.server) == values(name, None, None)


def test_rules_combine_freely() -> None:
    cfg = resolve(parse(["--algorithm", "fedavg", "--local.rule", "sgd", "--server.rule", "yogi"]))
    assert (cfg.local.rule, cfg.server.rule) == ("sgd", "yogi")
    assert build(cfg).server.moments == pytest.approx({"v": 1e-6, "z": 0.0})


@pytest.mark.parametrize("mask", sorted(MASKS))
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_builds_with_every_mask(name: str, mask: str) -> None:
    algorithm = build(resolve(replace(Config(), algorithm=name, mask=mask, tau=0.4)))
    votes = torch.tensor([4, -4, 3, 0], dtype=torch.int8)
    mean, square = torch.full((4,), 0.5), torch.full((4,), 0.5)  # half of the mean square is variance
    assert algorithm.mask(votes, 10, mean, square).tolist() == pytest.approx(
        {"mean": [1, 1, 1, 1], "gma": [1, 1, 0.3, 0], "and": [1, 1, 0, 0], "sand": [0, 0, 0, 0]}[mask], abs=1e-6
    )
    w, d = torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, 1.0])
    moments = {key: torch.full((4,), start) for key, start in algorithm.server.moments.items()}
    algorithm.server.step(w, d, torch.ones(4), moments, 1)
    assert w.sign().tolist() == [1, -1, 1, 1]  # the server adds


def test_every_named_rule_is_in_its_table() -> None:
    assert {row.server for row in ALGORITHMS.values()} <= set(SERVER_RULES)
    assert {row.local for row in ALGORITHMS.values()} == set(LOCAL_RULES) - {"adamw"}
    assert {row.defaults.get("mask", "mean") for row in ALGORITHMS.values()} <= set(MASKS)


def test_there_are_the_thirteen_algorithms_of_the_specification() -> None:
    assert sorted(ALGORITHMS) == sorted(
        "fedavg fedavgm fedprox scaffold fednova fedadam fedyogi fedadagrad uga fedmeta fedmeta-uga fedshare "
        "fedgma2021".split()
    )


class Slope:
    """A job of two steps on the loss x^2 / 2 from x = 1."""

    def __init__(self, round: int) -> None:
        self.round, self.cid = round, 0
        self.start_P, self.x_P, self.delta_P = torch.ones(1), torch.ones(1), torch.zeros(1)
        self.shared, self.memory = {"control": torch.zeros(1)}, {"control": torch.zeros(1)}
        self.private = 0

    def batches(self, leave: int = 0) -> list[int]:
        return [0, 1]

    def everything(self) -> list[tuple[int, float]]:
        return [(0, 1.0)]

    def grad(self, x_P: torch.Tensor, batch: int) -> torch.Tensor:
        return x_P.clone()

    def pieces(self, batch: int) -> list[Piece]:
        return [Piece(slice(0, 1), self.grad(self.x_P, batch))]

    def without_side_effects(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_the_knobs_of_a_rule_reach_it() -> None:
    """Each knob that a rule reads, turned, changes what the rule does to a job."""

    def moved(algorithm: str, lr_factor: float = 1.0, **local: Any) -> list[float]:
        local = {"lr": 0.5 * lr_factor, "momentum": 0.0} | local
        cfg = resolve(replace(Config(), algorithm=algorithm, rounds=4, local=Local(**local)))
        result = build(cfg).local(Slope(round=3))
        return [*result.delta_P.tolist(), *(x for v in result.keeps.values() for x in v.tolist())]

    assert moved("fedprox") != moved("fedprox", mu=0.5)
    assert moved("fedavg") != moved("fedavg", clip=0.25)
    assert moved("fedavg") != moved("fedavg", weight_decay=0.5)
    assert moved("scaffold") != moved("scaffold", option="I")
    assert moved("fedgma2021") != moved("fedgma2021", gradient="initial")
    half_rate = moved("fedavg", schedule="step:2,0.5")  # round 3 of 4, after one step of the schedule
    assert half_rate == moved("fedavg", lr_factor=0.5) != moved("fedavg")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "fedadm"}, "unknown algorithm 'fedadm'; did you mean 'fedadam'"),
        ({"mask": "gmaa"}, "unknown mask 'gmaa'; did you mean 'gma'"),
        ({"local": Local(rule="sdg")}, "unknown local rule 'sdg'; did you mean 'sgd'"),
        ({"server": Server(rule="yogy")}, "unknown server rule 'yogy'; did you mean 'yogi'"),
        ({"server": Server(variant="redi")}, "unknown server variant 'redi'; did you mean 'reddi'"),
        ({"local": Local(rule="prux")}, "unknown local rule 'prux'; did you mean 'prox'"),
        ({"mask": "sant"}, "unknown mask 'sant'; did you mean 'sand'"),
        ({"local": Local(schedule="cosin")}, r"unknown --local.schedule 'cosin'; did you mean 'cosine\[:last\]'"),
        ({"server": Server(schedule="stepp:1,1")}, "unknown --server.schedule 'stepp:1,1'; did you mean 'step:rou"),
        ({"algorithm": "scaffold", "local": Local(option="IV")}, "unknown --local.option 'IV'; .*known: I, II$"),
        (
            {"algorithm": "fedgma2021", "local": Local(gradient="lst")},
            "unknown --local.gradient 'lst'; did you mean 'last",
        ),
    ],
)
def test_an_unknown_name_gets_the_closest_match(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(resolve(replace(Config(), **changes)))


def test_another_algorithm_for_a_file_that_fixes_the_rules_is_refused(tmp_path: Path) -> None:
    """The config.yaml of a run names its rules: with a new name alone it would be the old algorithm."""
    file = tmp_path / "config.yaml"
    file.write_text("algorithm: fedavg\nlocal:\n  rule: sgd\nserver:\n  rule: sgd\n")
    for words in (["--algorithm", "fedyogi"], ["--algorithm=fedyogi"]):
        with pytest.raises(UserError, match=r"sets local.rule sgd and server.rule sgd for algorithm fedavg"):
            parse(["--config", str(file), *words])
    assert parse(["--config", str(file), "--algorithm", "fedavg"]).server.rule == "sgd"
    rules = ["--local.rule", "sgd", "--server.rule", "yogi"]
    assert parse([f"--config={file}", "--algorithm", "fedyogi", *rules]).server.rule == "yogi"
    file.write_text("algorithm: fedavg\ntau: 0.3\n")
    assert parse(["--config", str(file), "--algorithm", "fedyogi"]).algorithm == "fedyogi"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mask: mean\nmask: and\n", "cannot be read as YAML (duplicate key 'mask'); correct it"),
        ("local:\n  lr: 1\nlocal:\n  steps: 3\n", "cannot be read as YAML (duplicate key 'local')"),
        ("local.steps: 1\nlocal:\n  epochs: 3\n", "is given next to its group 'local'; move it there"),
    ],
)
def test_a_file_of_which_a_line_would_be_lost_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        parse(["--config", str(file)])
    assert message in str(caught.value)


def test_a_dotted_key_alone_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("local.steps: 7\n")
    assert parse(["--config", str(file)]).local.steps == 7
