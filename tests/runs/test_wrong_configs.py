"""Thousands of wrong configurations: exit code 2 and one line, never a traceback, never a hang, never a run folder.

They are drawn from the knobs' own types and bounds, so that a new knob is covered by itself. A knob of words is taken
to have a table of them; one that takes any word belongs into `FREE`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import rank_environment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shell import sandbox
from test_config import KNOBS, edges, number

from fedmpi import commands as cli
from fedmpi.comm import SoloComm
from fedmpi.plugins.knobs import MOST
from fedmpi.runs import options, run
from fedmpi.runs.aliases import real_name
from fedmpi.runs.config import Config

pytestmark = pytest.mark.timeout(300)

FREE = {"data_root", "out", "memory.folder"}
GROUPS = sorted({name.partition(".")[0] for name in KNOBS if "." in name})
IMPORTED = ("algorithm", "mask", "local.rule", "local.optimizer", "server.rule", "model")  # also package.module:name
SOUND = {"rounds": 3, "tau": 0.3, "local.lr": 0.1, "algorithm": "scaffold", "server.momentum": 0.5, "eval.batch": 7}
FOREIGN = "verify names json nodes partition time ranks_per_node executor samples kills help_me config.x".split()
QUICK = "--data tiny --split iid --model logistic --clients 8 --cohort 4 --rounds 1 --threads 1 --log_to none".split()

Mistake = dict[str, Any]
"""knobs, or what is none, with values: wrong, all of it together"""


def take(*_: object, **__: object) -> None:
    raise AssertionError("taken for a sound configuration, or ended by a fault")


@pytest.fixture(scope="module", autouse=True)
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """A folder to work in, and one parser for all: making it takes longer than all the rest."""
    with sandbox() as patch:
        patch.chdir(tmp_path_factory.mktemp("wrong"))
        patch.setenv("FEDMPI_OFFLINE", "1")
        patch.setattr(options, "make_parser", functools.cache(options.make_parser))
        patch.setattr(SoloComm, "abort", take)  # or a fault would end the tests
        Path("file").touch()
        yield patch


def many(examples: int) -> Callable[..., Any]:
    return settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def refused(*arguments: str, by_data: bool = False, out_too: bool = True) -> str:
    """Return the error message with which the command refuses these arguments, before it runs or `by_data`; fail if it
    does anything else."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", newline="\n") for _ in "oe")
    words = ["train", *arguments] if "--out" in arguments or not out_too else ["train", "--out", "run", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        if not by_data:
            patch.setattr(run, "run", take)
        code = cli.main(words)
    out.flush(), err.flush()
    printed, said = (stream.buffer.getvalue().decode() for stream in (out, err))
    assert (code, printed) == (2, ""), said
    assert said.startswith("fedmpi: ") and said.endswith("\n") and said[:-1].isprintable(), repr(said)  # so one line
    assert "Traceback" not in said and len(said) > len("fedmpi: \n")
    assert not Path("run").exists() and not Path("runs").exists()
    return said


# Mistakes


def is_word(text: str) -> bool:
    """Whether a text is neither a number nor anything else that YAML has a name for."""
    with contextlib.suppress(ValueError):
        float(text)
        return False
    try:
        return isinstance(yaml.safe_load(text), str)
    except (yaml.YAMLError, ValueError):
        return True


texts = st.text(min_size=1, max_size=12)
odd = st.sampled_from(
    ["a\nb", "\x1b[31m", "\u2028", "\udcff", "\u0661\u0662", "a: b", "'", '"', "%", "[", "{", "&a", "\t"]
)
words = st.one_of(texts, odd).filter(is_word)
things = st.one_of(
    st.lists(st.integers(0, 9) | texts, max_size=3),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 9), min_size=1, max_size=2),
    st.just(date(2020, 2, 2)),
)
huge = st.sampled_from([10**39, 4 * MOST, 1e300])


def outside(f: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    """Numbers that a field's bounds leave out."""
    bounds = f.metadata["bounds"]
    low, high = bounds.low, min(bounds.high, MOST)
    kind = int if number(f) == "int" else float
    below = st.integers(max_value=math.ceil(low) - 1) if kind is int else st.floats(max_value=low, exclude_max=True)
    above = st.integers(min_value=int(high) + 1) if kind is int else st.floats(min_value=high, exclude_min=True)
    edge = st.sampled_from([kind(value) for value in edges(f)[1]])
    return st.one_of(below, above, edge, huge, st.sampled_from([math.nan, math.inf, -math.inf]))


def wrong_values(name: str) -> st.SearchStrategy[Any]:
    """Values that a knob does not take, in a file; as an option, too, but for those in `FREE`."""
    f = KNOBS[name]
    kind = str(f.type).partition(" ")[0]
    if name in FREE:
        return st.sampled_from(["a\0b", "~nobody-of-that-name/x"])
    if kind in ("int", "float"):
        some = st.one_of(words, things, st.booleans(), outside(f))
        some = some | st.floats(0.1, 0.9) if kind == "int" else some
    elif kind == "bool":
        some = st.one_of(words, things, st.integers(2), st.floats(0.1, 0.9))
    elif kind == "str":
        default = f.default or "gma"
        near = st.integers(0, len(default) - 1).map(lambda k: default[: k + 1] + default[k:] + "?")
        paths = st.sampled_from(["nowhere:x", "os:nothing", ":", "a:", "..:x", "a/b.py:x", "os.py:path", "\udcff:a"])
        some = st.one_of((texts | odd | things.map(repr)).map(lambda t: t.replace(":", "") + "?"), near)
        some = some | paths if name in IMPORTED else some
    else:
        assert kind == "list[float]", f"no mistakes are known for --{name}, which is {kind}"
        some = st.one_of(words, st.lists(words, min_size=1, max_size=2), st.just([math.nan]), st.just({"a": 1}))
    return some if "None" in str(f.type) else some | st.none()


@st.composite
def misnamed(draw: st.DrawFn) -> Mistake:
    """What is no knob: misspelt, cut short, of another command or of another group, or anything."""
    name = draw(st.sampled_from(sorted(KNOBS)))
    k = draw(st.integers(0, len(name) - 1))
    spelt = [name[:k] + name[k + 1 :], name[: k + 1] + name[k:], name[:k] + "q" + name[k:], f"{name}.x", name.upper()]
    other = st.one_of(st.sampled_from([*spelt, *FOREIGN, f"local.{name}"]), st.text("abc.-_ \u00e9\n", max_size=6))
    unknown = other.filter(lambda n: real_name(n) is None and n not in GROUPS and n != "h")
    return {draw(unknown): draw(st.integers(0, 9))}


PATTERNS = {"local.freeze", "local.private"}  # any text may match something: only the model refuses one
misvalued = st.sampled_from(sorted(KNOBS.keys() - PATTERNS)).flatmap(
    lambda name: wrong_values(name).map(lambda value: {name: value})
)
ungrouped = st.sampled_from(GROUPS).flatmap(
    lambda group: st.sampled_from([3, True, "x", [1], {"nope": 1}, {"": 1}, {"lr": {"x": 1}}, {"x": None}]).map(
        lambda value: {group: value}
    )
)


@st.composite
def at_odds(draw: st.DrawFn) -> Mistake:
    """Knobs that are sound one by one and not together."""
    some = draw(st.integers(1, 10**6))
    more = some + draw(st.integers(1, 10**6))
    pairs: list[Mistake] = [
        {"clients": some, "cohort": more},
        {"clients": more, "cohort": some, "min_clients": more},
        {"mask": "sand", "tau": 1},
        {"meta.lr": 0.1, "meta.size": 0},
        {"meta.share": True, "meta.size": 0},
        {"meta.weights": [1, 2], "meta.size": 0},
        {"meta.weights": [0, 0], "meta.size": some},
        {"algorithm": "fedmeta", "meta.size": 0},
    ]
    return draw(st.sampled_from(pairs))


mistakes = st.one_of(misvalued, misvalued, misvalued, misnamed(), ungrouped, at_odds())


@st.composite
def several(draw: st.DrawFn) -> Mistake:
    """One to three mistakes among what is sound: no name twice, as the last one would count."""
    found: Mistake = {}
    for mistake in draw(st.lists(mistakes, min_size=1, max_size=3)):
        if not found.keys() & mistake.keys():
            found |= mistake
    right = {k: v for k, v in SOUND.items() if not any(k == n or k.startswith(f"{n}.") for n in found)}
    right = {
        k: v for k, v in right.items() if not found.keys() & {"meta.size", "mask"}
    }  # which are at odds with another
    return found | {k: right[k] for k in draw(st.lists(st.sampled_from(sorted(right)), max_size=2))} if right else found


def as_text(value: Any) -> str:
    """A value as a word of a command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | dict | bool) or value is None:
        return json.dumps(value)
    return str(value)


def as_options(mistake: Mistake, joined: bool) -> list[str]:
    pairs = [(f"--{name}", as_text(value)) for name, value in mistake.items()]
    return [word for name, text in pairs for word in ([f"{name}={text}"] if joined else [name, text])]


def as_file(mistake: Mistake, nested: bool) -> bytes:
    """A YAML file, with groups or with dotted names."""
    tree: dict[str, Any] = {}
    for name, value in mistake.items():
        group, dot, leaf = name.partition(".")
        if nested and dot and isinstance(tree.get(group, {}), dict):
            tree.setdefault(group, {})[leaf] = value
        else:
            tree[name] = value
    return yaml.safe_dump(tree, sort_keys=False).encode("utf-8", "surrogatepass")


@many(900)
@given(mistake=several(), joined=st.booleans())
def test_wrong_options(mistake: Mistake, joined: bool) -> None:
    refused(*as_options(mistake, joined))


@many(700)
@given(mistake=several(), nested=st.booleans(), options=st.booleans())
def test_wrong_files(mistake: Mistake, nested: bool, options: bool) -> None:
    """All in a file, or the last of it as an option next to the file."""
    rest = dict([mistake.popitem()]) if options and len(mistake) > 1 else {}
    Path("f.yaml").write_bytes(as_file(mistake, nested))
    refused("--config", "f.yaml", *as_options(rest, joined=True), out_too="out" not in mistake)


# Files that are no configuration at all


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    """A sound file, damaged."""
    sound = json.dumps(dataclasses.asdict(Config())).encode()
    cut = sound[: draw(st.integers(0, len(sound) - 1))]
    name, value = draw(st.sampled_from(sorted(KNOBS))), draw(st.integers(1, 9))
    group, _, leaf = name.rpartition(".")
    line = f"{leaf}: {value}\n"
    whole = "\n".join([f"{group}:", f"  {line}  {line}"]) if group else line + line
    tab = f"{group}:\n\t{line}" if group else f"\t{line}"
    encoding = draw(st.sampled_from(["utf-16", "utf-32", "utf-16-le"]))
    others = [cut, whole, tab, f"- {line}", f"{line}---\n{line}", f"{line}]", f"%FOO\n{line}", f"? [a]\n: 1\n{line}"]
    others += [f"{leaf}: !!python/object/apply:os.mkdir [x]", f"null: 1\n{line}", f"{line}: {value}", sound + b"x: 1"]
    others += [line.encode(encoding), b"\x00" + line.encode(), f"{leaf}: !!binary ====\n", f"{leaf}: !!set {{a, b}}\n"]
    other = draw(st.sampled_from(others))
    return other if isinstance(other, bytes) else other.encode()


@many(500)
@given(content=st.one_of(broken(), st.binary(max_size=40), texts.map(lambda t: t.encode("utf-8", "replace"))))
def test_files_that_are_no_configuration(content: bytes) -> None:
    Path("f.yaml").write_bytes(content)
    refused("--config", "f.yaml")


def test_aliases_and_duplicate_keys_are_refused() -> None:
    """A few lines of aliases may stand for more than a memory holds."""
    Path("f.yaml").write_text("local: &a {lr: 0.1}\nserver:\n  <<: *a\n")
    assert "alias *a is not supported" in refused("--config", "f.yaml")
    Path("f.yaml").write_text("tau: 0.1\nrounds: 3\ntau: 0.2\n")
    assert "duplicate key 'tau'" in refused("--config", "f.yaml")


@pytest.mark.parametrize("given", ["", ".", "file", "nowhere.yaml", "x" * 5000, "a\0b", "a\nb", "/dev/zero"])
def test_no_file_for_a_configuration(given: str) -> None:
    assert "--config" in refused("--config", given)


# Mistakes that only the data, or the folders, bring to light


@st.composite
def misfits(draw: st.DrawFn) -> list[str]:
    """Options that do not fit the 200 samples of three classes and twenty owners, or the file system."""
    number = draw(st.sampled_from([201, 10**6, 10**18, 10**30]))
    split = draw(st.sampled_from(["iid", "classes", "dirichlet", "quantity", "natural"]))
    path = draw(st.sampled_from(["file", "file/x", "x" * 5000, "a\0b", "~nobody-of-that-name/x", "/proc/x"]))
    return draw(
        st.sampled_from(
            [
                ["--clients", str(number), "--split", split],
                ["--clients", str(number), "--cohort", str(number)],
                ["--meta.size", str(number - 1)],
                ["--split", "classes", "--skew.classes", str(number)],
                ["--split", "natural", "--clients", "21"],
                ["--split", draw(st.sampled_from(["feature", "mixed"]))],
                [
                    "--meta.size",
                    "9",
                    "--meta.weights",
                    draw(st.sampled_from(["[1]", "[1,1,1,1]", "[1e308,1e308,1e308]"])),
                ],
                ["--model", draw(st.sampled_from(["gru", "os:path", "math:pi", "math:sqrt", "torch.nn:Identity"]))],
                ["--data", draw(st.sampled_from(["nowhere:x", ":", "os:path", "math:pi", "math:sqrt"]))],
                ["--data", "mnist", "--data_root", path],
                ["--memory.folder", path],
                ["--out", path.replace("/proc/x", "/dev/null")],
                ["--augment", f"crop:{10 * number}"],
            ]
        )
    )


@many(130)
@given(words=misfits())
def test_what_does_not_fit_the_data_or_the_folders(words: list[str]) -> None:
    refused(*QUICK, *words, by_data=True)


# The real command


def test_the_command_itself_refuses_and_ends(tmp_path: Path) -> None:
    """Without anything of this file's: what is awkward to pass on."""
    cases: list[list[str | bytes]] = [["--mask", b"\xff\xfe\x1b[2J\n"], ["--tau", "[" * 9000]]
    command = [sys.executable, "-m", "fedmpi", "train", "--out", str(tmp_path / "run")]
    pipe = subprocess.PIPE
    jobs = [subprocess.Popen([*command, *case], env=rank_environment(), stdout=pipe, stderr=pipe) for case in cases]
    try:
        said = [job.communicate(timeout=100) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for job, (out, err) in zip(jobs, said, strict=True):
        assert (job.returncode, out) == (2, b""), err
        assert err.startswith(b"fedmpi: ") and err.count(b"\n") == 1 and b"\x1b" not in err
    assert not (tmp_path / "run").exists()
