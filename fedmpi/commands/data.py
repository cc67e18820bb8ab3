"""The command `fedmpi data`: which data sets are here, preparing them ahead of a run, and a picture of a split."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..clients.feed import Seeded
from ..data import DATASETS, Arrays, Data, Ints, Partition, find_data
from ..data.sets import shakespeare
from ..data.store import Source, data_root, digest, prepared_files, read_prepared
from ..data.styles import seen
from ..errors import UserError, one_line, unknown
from ..experiments.report.figures.split import Row, View, draw, save
from ..plugins.knobs import check_bounds, knob
from ..runs import build
from ..runs.config import Config, Skew
from ..runs.log import set_up
from ..runs.options import filled, make_parser

if TYPE_CHECKING:
    pass

T = TypeVar("T")

USAGE = """usage: fedmpi data COMMAND ...

Data sets: what is here, and what a split does to it.

commands:
  list      every data set, and whether it is here; --verify reads what was prepared
  prepare   'fedmpi data prepare NAME [NAME ...]': read or download data sets now, for all later runs
  show      'fedmpi data show NAME [--split ...]': a picture of who has what

'fedmpi data COMMAND --help' lists the options of each.
"""


@dataclass(frozen=True)
class Root:
    """Where data sets are looked for."""

    data_root: str | None = None
    """folder of the data sets; null: $FEDMPI_DATA, else the user's cache"""

    @property
    def folder(self) -> Path | None:
        """The folder that was named, if one was."""
        return Path(self.data_root).expanduser() if self.data_root else None


@dataclass(frozen=True)
class Listing(Root):
    """What `list` is asked for."""

    verify: bool = False


@dataclass(frozen=True)
class Preparing(Root):
    """What `prepare` is asked for."""

    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Show(Root):
    """What a picture is to show: the options that `train` has, too, by the same names, and those of the picture."""

    split: str = "classes"
    """how the data are dealt to the clients: iid, classes, dirichlet, quantity, natural (by writer or role), or, for
    coloured and rotated data, feature (as iid) and mixed (as classes)"""
    clients: int = knob(100, low=1)
    """clients in the federation"""
    seed: int = knob(0, low=0)
    """seed of the split"""
    skew: Skew = field(default_factory=Skew)
    samples: int | None = knob(None, low=1, high=24)
    """samples of each client to show; null: 8 images, or 3 texts"""
    out: str | None = None
    """picture to write, a .png; null: NAME-SPLIT.png in the current folder"""


@dataclass(frozen=True)
class Showing(Show):
    """What `show` is asked for."""

    names: list[str] = field(default_factory=list)


def main(arguments: list[str]) -> int:
    """Run one of the commands; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    command, *rest = arguments
    if command not in COMMANDS:
        raise unknown("data command", command, COMMANDS)
    set_up(rank=0, size=1)
    return COMMANDS[command](rest)


def parse(command: str, about: str, options: type, kind: type[T], arguments: list[str], *words: str, **how: Any) -> T:
    """What a command is asked for: the fields of `options`, and one argument that is no such field."""
    parser = make_parser(f"fedmpi data {command}", about, options)
    parser.add_argument(*words, **how)
    asked = filled(parser, kind, lambda: parser.parse_args(arguments))
    check_bounds(asked, prefix="")
    return asked


# What is here


class State(NamedTuple):
    """How it stands with a data set."""

    words: str
    wanted: str = ""
    """what is to be put where, unless it is all there"""
    troubles: Sequence[str] = ()
    """what is wrong with what was prepared"""


def list_all(arguments: list[str]) -> int:
    """`fedmpi data list`: a table of all data sets, and what to do about those that are not here."""
    about = "Every data set, whether it is here, and where its files belong."
    check = "read what was prepared and compare it with its SHA-256; exit code 1 where something is damaged"
    asked = parse("list", about, Root, Listing, arguments, "--verify", action="store_true", help=check)
    base = data_root(asked.folder)
    sources = {name: row.source(asked.folder) for name, row in DATASETS.items()}
    states: dict[str, State] = {}  # by source: several sets may be made of one
    for source in sources.values():
        if source.name not in states:
            states[source.name] = state_of(source, base, asked.verify)
    print(f"data root: {base}{'' if base.is_dir() else ' (not there yet)'}\n")
    rows = [(name, row.about, states[sources[name].name].words) for name, row in DATASETS.items()]
    print("\n".join(aligned([("name", "what it is", "state"), *rows])))
    notes = []
    for key, state in states.items():
        names = ", ".join(name for name, source in sources.items() if source.name == key)
        notes += [f"{names}: {trouble}" for trouble in state.troubles]
        notes += [f"{names}: {state.wanted}"] if state.wanted else []
    if notes:
        print("\n" + "\n".join(notes))
    return 1 if any(state.troubles for state in states.values()) else 0


def state_of(source: Source, base: Path, verify: bool) -> State:
    """How it stands with the data set of a source; reads what was prepared only to `verify` it."""
    try:
        files = [path for path in prepared_files(source, base) if path.is_file()]
        here = source.generated or bool(source.find(base))
        size = megabytes(files[0].stat().st_size) if files else ""
    except OSError as error:
        raise UserError(f"data root {base} cannot be read ({error}); make it readable, or name another") from error
    wanted = "" if here else source.wanted.format(root=base)
    if files:
        reasons = {path: trouble_with(path) for path in files} if verify else {}
        advice = "its next use makes it again from its source" if here else "remove it"
        troubles = [f"{path} is damaged ({reason}); {advice}" for path, reason in reasons.items() if reason]
        if troubles:
            return State("damaged", wanted, troubles)
        return State(f"prepared, verified ({size})" if verify else f"prepared ({size})")
    if here:
        return State("generated at first use" if source.generated else "source here")
    fetched = source.fetch is not None and not os.environ.get("FEDMPI_OFFLINE")
    return State("can be downloaded" if fetched else "missing", wanted)


def trouble_with(path: Path) -> str:
    """What is wrong with a prepared file; nothing where it is sound."""
    try:
        sound = digest(safetensors.torch.load_file(path)) == written_digest(path)
    except (OSError, safetensors.SafetensorError) as error:
        return one_line(error)
    return "" if sound else "its content does not match its SHA-256"


def written_digest(path: Path) -> str:
    """The SHA-256 of its content that a prepared file has written in it."""
    with safetensors.safe_open(path, "pt") as file:
        about: dict[str, str] = file.metadata() or {}
    return about.get("sha256", "")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with a rule below its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.{0 if size >= 1e7 else 1}f} MB"


# Preparing


def prepare(arguments: list[str]) -> int:
    """`fedmpi data prepare`: load data sets, so that they are prepared, and tell what they are."""
    about = "Read or download data sets now, so that later runs find them prepared."
    names = {"nargs": "*", "metavar": "NAME", "help": "data set; 'fedmpi data list' tells what there is"}
    asked = parse("prepare", about, Root, Preparing, arguments, "names", **names)
    if not asked.names:
        raise UserError("prepare was given no data set; name one or more: " + ", ".join(DATASETS))
    for name in asked.names:
        if ":" in name:
            raise UserError(f"data set '{name}' is your own and is read by every run: there is nothing to prepare")
        if name not in DATASETS:
            raise unknown("data set", name, DATASETS)
    for name in asked.names:
        print(prepared(name, asked.folder), flush=True)
    return 0


def prepared(name: str, folder: Path | None) -> str:
    """What a data set is, once it has been prepared, and the file that it then lies in."""
    row, base = find_data(name), data_root(folder)
    source = row.source(folder)
    files = prepared_files(source, base)
    before = [mark(path) for path in files]
    started = perf_counter()
    data = row.load(folder)
    seconds = perf_counter() - started
    shape = " x ".join(map(str, data.shape))
    owners = "no owners" if data.owner is None else f"{int(data.owner.max()) + 1:,} owners"
    about = f"{data.samples:,} train and {data.tests:,} test samples, {shape}, {data.classes} classes, {owners}"
    lines = [f"{name}: {about}"] + ([f"  {data.note}"] if data.note else [])
    path = next((path for path in files if read_prepared(path, source, base, quiet=True) is not None), None)
    if path is None:
        return "\n".join([*lines, f"  read in {seconds:.1f} s and not kept: no folder can be written to keep it in"])
    done = "prepared already, verified" if mark(path) in before else "prepared"
    lines.append(f"  {done} in {seconds:.1f} s: {path}, {megabytes(path.stat().st_size)}")
    return "\n".join([*lines, f"  SHA-256 of its content: {written_digest(path)}"])


def mark(path: Path) -> tuple[int, int] | None:
    """What a file has that no other has: it was replaced if this has changed. None where there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


# A split, as numbers and samples

SAMPLED = 8  # clients whose samples are shown
LISTED = 400  # clients whose labels are shown
ARROW, BLANK, NEW_LINE = "\u2192", "\u2423", "\u21b5"
DECODE: dict[str, Callable[[Ints], str]] = {"shakespeare": shakespeare.decode}


def show(arguments: list[str]) -> int:
    """`fedmpi data show`: a picture of the split that `train` would use with the same options."""
    about = "A picture of a split: who has how much of which class, and samples as the model sees them."
    names = {"nargs": "*", "metavar": "NAME", "help": "data set, or your own as package.module:name"}
    asked = parse("show", about, Show, Showing, arguments, "names", **names)
    if len(asked.names) != 1:
        raise UserError(f"show was given {len(asked.names)} data sets; name one: {', '.join(DATASETS)}, or your own")
    name = asked.names[0]
    wish = Config(
        data=name,
        data_root=asked.data_root,
        split=asked.split,
        clients=asked.clients,
        seed=asked.seed,
        skew=asked.skew,
        cohort=1,
    )
    cfg = build.prepare(wish).cfg
    out = picture_file(asked.out, f"{name}-{cfg.split}")
    data, partition, _ = build.load_data(cfg)
    labels = data.class_labels(needed=True)
    view = View(
        f"{name}, split {described(cfg)}, seed {cfg.seed}",
        counted(partition, labels, data.kinds if labels is not None else 1),
        partition.clients,
        labels is not None,
        sampled(data, partition, asked.samples, cfg.seed),
    )
    save(draw(view), out)
    print(summary(cfg, data, partition, labels))
    print(f"wrote {out}")
    return 0


def picture_file(given: str | None, name: str) -> Path:
    """The file that a picture goes to, refused where that cannot be."""
    out = Path(re.sub(r"[^\w.-]+", "-", name) + ".png") if given is None else Path(given).expanduser()
    if out.suffix != ".png":
        raise UserError(f"--out is '{out}'; it must end in .png")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name a file in it, such as {out / 'split.png'}")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; make it, or name one that is there")
    return out


def described(cfg: Config) -> str:
    """A split with the numbers that it goes by."""
    skew = cfg.skew
    noise = f", {skew.noise:.0%} from others" if skew.noise else ""
    dealt = f" ({skew.classes or 2} a client{noise})"
    merged = " (owners merged)" if skew.owners == "merge" else ""
    numbers = {
        "classes": dealt,
        "mixed": dealt,
        "dirichlet": f" (alpha {skew.alpha:g})",
        "quantity": f" (beta {skew.beta:g})",
        "natural": merged,
    }
    return cfg.split + numbers.get(cfg.split, "")


def counted(partition: Partition, labels: Ints | None, kinds: int) -> Ints:
    """How many samples of each class the first clients have, [clients, classes]."""
    some = min(partition.clients, LISTED)
    first = Partition(partition.offsets[: some + 1], partition.order[: partition.offsets[some]])
    return np.diff(first.offsets)[:, None] if labels is None else first.histogram(labels, kinds)


def summary(cfg: Config, data: Data, partition: Partition, labels: Ints | None) -> str:
    """A split in a few lines."""
    sizes, clients = partition.sizes, partition.clients
    kinds = f"{data.kinds} classes" if labels is not None else "no classes"
    head = (
        f"{cfg.data}, split {described(cfg)}: {clients:,} clients have {len(partition.order):,} of {data.samples:,} "
        f"train samples; {data.tests:,} test samples, {kinds}"
    )
    each = f"samples a client: min {sizes.min():,}, median {np.median(sizes):,.0f}, max {sizes.max():,}"
    if labels is not None:
        owner = np.repeat(np.arange(clients), np.diff(partition.offsets))
        held = len(np.unique(owner * data.kinds + labels[partition.order]))
        each += f"; classes a client: mean {held / clients:.1f}"
    return "\n".join([head, each] + ([data.note] if data.note else []))


def sampled(data: Data, partition: Partition, count: int | None, seed: int) -> list[Row]:
    """Samples of the first clients and of the test set; none where they can be shown neither as images nor as text."""
    decode = DECODE.get(data.name) if data.kind == "sequences" else None
    if decode is None and not shows_images(data):
        return []
    count = count or (8 if decode is None else 3)
    rng = np.random.default_rng(seed)
    rows = []
    for cid in (*range(min(SAMPLED, partition.clients)), None):
        pool = np.arange(data.tests) if cid is None else partition.of(cid)
        picked = np.sort(rng.choice(pool, min(count, len(pool)), replace=False))
        some = texts(data, picked, cid is None, decode) if decode else images(data, picked, cid is None)
        rows.append(Row("test set" if cid is None else f"client {cid}", some))
    return rows


def shows_images(data: Data) -> bool:
    """Whether samples are bytes of grey or coloured images."""
    raw = data.x if isinstance(data, Arrays) else data.sample[0]
    return raw.dtype == torch.uint8 and len(data.shape) == 3 and data.shape[0] in (1, 3)


def images(data: Data, picked: Ints, test: bool) -> Tensor:
    """Images as the model sees them before normalisation, uint8 [k, channels, height, width]."""
    if isinstance(data, Arrays):
        y = (data.test_y if test else data.y)[picked]
        by_class = torch.argsort(y, stable=True) if y.ndim == 1 else torch.arange(len(y))
        return seen(data, torch.from_numpy(picked)[by_class], test)
    part = "test" if test else "train"
    items = Seeded(data.test if test else data.train)
    try:
        return torch.stack([torch.as_tensor(items[i, 0][0]) for i in picked.tolist()])
    except Exception as error:
        raise UserError(
            f"data set '{data.name}': reading its {part} items {picked.tolist()} raised {type(error).__name__}: "
            f"{one_line(error)}; every item must be an image of the same size"
        ) from error


def texts(data: Data, picked: Ints, test: bool, decode: Callable[[Ints], str]) -> list[str]:
    """Texts in a line each, and behind an arrow the letter that follows."""
    assert isinstance(data, Arrays), "only built-in data sets have an alphabet"
    x, y = (data.test_x, data.test_y) if test else (data.x, data.y)
    pairs = [(decode(x[i].numpy()), decode(y[i : i + 1].numpy())) for i in picked.tolist()]
    return [f"{before} {ARROW} {after.replace(' ', BLANK)}".replace("\n", NEW_LINE) for before, after in pairs]


COMMANDS = {"list": list_all, "prepare": prepare, "show": show}
