"""`fedmpi data`: list data sets, prepare them ahead of a run, and draw a split."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor

from ..clients.feed import Seeded
from ..data import DATASETS, Arrays, Data, Datasets, Ints, Partition, find_data
from ..data.sets import shakespeare
from ..data.store import Source, data_root, find_files, prepared_files, read_prepared, read_verified
from ..data.styles import seen
from ..errors import UserError, one_line, unknown
from ..experiments.report.figures.split import Row, View, draw, save
from ..plugins.knobs import knob
from ..runs import build
from ..runs.config import Config, Skew
from ..runs.log import set_up
from ..runs.options import flag, positional, read_options
from ..runs.text import align, amount

USAGE = """usage: fedmpi data COMMAND [options]

List, prepare and show data sets.

commands:
  list        List the data sets and whether they are here; --verify checks the files.
  prepare     Read or download data sets now: 'fedmpi data prepare NAME [NAME ...]'.
  show        Draw which client has what: 'fedmpi data show NAME [--split ...]'.

'fedmpi data COMMAND --help' lists the options of a command.
"""
LIST = "List the data sets, whether they are here, and where their files belong."
PREPARE = "Read or download data sets now, so that later runs find them prepared."
SHOW = "Draw a split: how many samples of which class each client has, and samples as the model sees them."


@dataclass(frozen=True)
class DataOptions:
    """Options of all commands on data sets."""

    data_root: str | None = None
    """Folder of the data sets. Default: $FEDMPI_DATA, else the user's cache."""

    @property
    def folder(self) -> Path | None:
        """Return the given folder; None if there is none."""
        return Path(self.data_root).expanduser() if self.data_root else None


@dataclass(frozen=True)
class ListOptions(DataOptions):
    """Options of `fedmpi data list`."""

    verify: bool = flag()
    """Read prepared files and compare them with their SHA-256; exit code 1 if one is damaged."""


@dataclass(frozen=True)
class PrepareOptions(DataOptions):
    """Options of `fedmpi data prepare`."""

    names: list[str] = positional("NAME", many=True)
    """Data set; 'fedmpi data list' lists them."""


@dataclass(frozen=True)
class ShowOptions(DataOptions):
    """Options of `fedmpi data show`: those of `train` that define a split, and those of the picture."""

    names: list[str] = positional("NAME", many=True)
    """Data set, or your own as package.module:name."""
    split: str = "classes"
    clients: int = knob(100, low=1)
    seed: int = knob(0, low=0)
    skew: Skew = field(default_factory=Skew)
    samples: int | None = knob(None, low=1, high=24)
    """Samples of each client to show. Default: 8 images, or 3 texts."""
    out: str | None = None
    """Picture to write, a .png. Default: NAME-SPLIT.png in the current folder."""

    documented = (Config,)  # has the help texts of the others


def main(arguments: list[str]) -> int:
    """Run one of the commands; return the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    command, *rest = arguments
    if command not in COMMANDS:
        raise unknown("data command", command, COMMANDS)
    set_up(rank=0, size=1)
    return COMMANDS[command](rest)


# List


def list_all(arguments: list[str]) -> int:
    """`fedmpi data list`: print a table of all data sets, and how to get those that are missing."""
    options = read_options(ListOptions, arguments, "data list", LIST)
    base = data_root(options.folder)
    sources = {name: row.source(options.folder) for name, row in DATASETS.items()}
    states: dict[str, tuple[str, list[str]]] = {}  # by source: several data sets may share one
    for source in sources.values():
        if source.name not in states:
            states[source.name] = state_of(source, base, options.verify)
    print(f"data root: {base}{'' if base.is_dir() else ' (does not exist yet)'}\n")
    rows = [(name, row.about, states[sources[name].name][0]) for name, row in DATASETS.items()]
    print("\n".join(align([("name", "what it is", "state"), *rows], rule=True)))
    notes = []
    for key, (_, found) in states.items():
        names = ", ".join(name for name, source in sources.items() if source.name == key)
        notes += [f"{names}: {note}" for note in found]
    if notes:
        print("\n" + "\n".join(notes))
    return 1 if "damaged" in [state for state, _ in states.values()] else 0


def state_of(source: Source, base: Path, verify: bool) -> tuple[str, list[str]]:
    """Return the state of a source's data set, with the problems of prepared files, which are read only to `verify`
    them, and the instructions for missing files."""
    files = [path for path in prepared_files(source, base) if path.is_file()]
    here = source.generated or bool(find_files(source, base))
    wanted = [] if here else [source.wanted.format(root=base)]
    if files:
        size = amount(files[0].stat().st_size)
        advice = "its next use prepares it again" if here else "remove it"
        troubles = []
        for path in files if verify else []:
            try:
                read_verified(path)
            except (OSError, safetensors.SafetensorError) as error:
                troubles.append(f"{path} is damaged ({one_line(error)}); {advice}")
        if troubles:
            return "damaged", [*troubles, *wanted]
        return f"prepared, verified ({size})" if verify else f"prepared ({size})", []
    if here:
        return "generated at first use" if source.generated else "source here", []
    fetched = source.fetch is not None and not os.environ.get("FEDMPI_OFFLINE")
    return "can be downloaded" if fetched else "missing", wanted


# Prepare


def prepare(arguments: list[str]) -> int:
    """`fedmpi data prepare`: prepare data sets and print what they are."""
    options = read_options(PrepareOptions, arguments, "data prepare", PREPARE, usage="NAME [NAME ...] [options]")
    if not options.names:
        raise UserError("data prepare needs the name of a data set: " + ", ".join(DATASETS))
    for name in options.names:
        if ":" in name:
            raise UserError(f"data set '{name}' is your own and is read by every run: there is nothing to prepare")
        if name not in DATASETS:
            raise unknown("data set", name, DATASETS)
    for name in options.names:
        print(prepared(name, options.folder), flush=True)
    return 0


def prepared(name: str, folder: Path | None) -> str:
    """Prepare a data set; return a description of it and of its file."""
    row, base = find_data(name), data_root(folder)
    source = row.source(folder)
    files = prepared_files(source, base)
    before = {path: path.stat().st_ino for path in files if path.is_file()}
    started = perf_counter()
    data = row.load(folder)
    seconds = perf_counter() - started
    shape = " x ".join(map(str, data.shape))
    owners = "no owners" if data.owner is None else f"{int(data.owner.max()) + 1:,} owners"
    about = f"{data.samples:,} train and {data.tests:,} test samples, {shape}, {data.classes} classes, {owners}"
    lines = [f"{name}: {about}"] + ([f"  {data.note}"] if data.note else [])
    path = next((path for path in files if read_prepared(path, source, base, quiet=True) is not None), None)
    if path is None:
        return "\n".join([*lines, f"  read in {seconds:.1f} s and not kept: data root and cache are not writable"])
    stat = path.stat()
    done = "prepared already, verified" if before.get(path) == stat.st_ino else "prepared"
    lines.append(f"  {done} in {seconds:.1f} s: {path}, {amount(stat.st_size)}")
    return "\n".join([*lines, f"  SHA-256 of its content: {data.sha256}"])


# Show

SAMPLED = 8  # clients whose samples are drawn
LISTED = 400  # clients whose labels are drawn
ARROW, BLANK, NEW_LINE = "\u2192", "\u2423", "\u21b5"


def show(arguments: list[str]) -> int:
    """`fedmpi data show`: draw the split that `train` would use with the same options."""
    options = read_options(ShowOptions, arguments, "data show", SHOW, usage="NAME [options]")
    if len(options.names) != 1:
        raise UserError(f"data show needs one data set, not {len(options.names)}: {', '.join(DATASETS)}, or your own")
    name = options.names[0]
    same: dict[str, Any] = {n: getattr(options, n) for n in ("data_root", "split", "clients", "seed", "skew")}
    cfg = build.prepare(Config(data=name, cohort=1, **same)).cfg
    out = picture_file(options.out, f"{name}-{cfg.split}")
    data, partition, _ = build.load_data(cfg)
    labels = data.class_labels(needed=True)
    view = View(
        f"{name}, split {described(cfg)}, seed {cfg.seed}",
        counted(partition, labels, data.kinds if labels is not None else 1),
        partition.clients,
        labels is not None,
        sampled(data, partition, options.samples, cfg.seed),
    )
    save(draw(view), out)
    print(summary(cfg, data, partition, labels))
    print(f"wrote {out}")
    return 0


def picture_file(given: str | None, name: str) -> Path:
    """Return the file to write a picture to; raise a `UserError` if it cannot be."""
    out = Path(re.sub(r"[^\w.-]+", "-", name) + ".png") if given is None else Path(given).expanduser()
    if out.suffix != ".png":
        raise UserError(f"--out is '{out}'; it must end in .png")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; give a file in it, such as {out / 'split.png'}")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; create it, or give another")
    return out


def described(cfg: Config) -> str:
    """Return a split with its parameters."""
    skew = cfg.skew
    noise = f", {skew.noise:.0%} from others" if skew.noise else ""
    dealt = f" ({skew.classes or 2} per client{noise})"
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
    """Return how many samples of each class the first clients have, [clients, classes]."""
    some = min(partition.clients, LISTED)
    first = Partition(partition.offsets[: some + 1], partition.order[: partition.offsets[some]])
    return np.diff(first.offsets)[:, None] if labels is None else first.histogram(labels, kinds)


def summary(cfg: Config, data: Data, partition: Partition, labels: Ints | None) -> str:
    """Return a summary of a split."""
    sizes = partition.sizes
    kinds = f"{data.kinds} classes" if labels is not None else "no classes"
    head = (
        f"{cfg.data}, split {described(cfg)}: {partition.clients:,} clients have {len(partition.order):,} of "
        f"{data.samples:,} train samples; {data.tests:,} test samples, {kinds}"
    )
    each = f"samples per client: min {sizes.min():,}, median {np.median(sizes):,.0f}, max {sizes.max():,}"
    if labels is not None:
        each += f"; classes per client: mean {partition.summary(labels, data.kinds)['classes_per_client']:.1f}"
    return "\n".join([head, each] + ([data.note] if data.note else []))


def sampled(data: Data, partition: Partition, count: int | None, seed: int) -> list[Row]:
    """Return samples of the first clients and of the test set; [] if they are neither images nor text."""
    text = data.name == "shakespeare" and data.kind == "sequences"
    x = data.sample[0]
    pictures = isinstance(x, Tensor) and x.dtype == torch.uint8 and x.ndim == 3 and data.shape[0] in (1, 3)
    if not text and not pictures:
        return []
    count = count or (3 if text else 8)
    rng = np.random.default_rng(seed)
    rows = []
    for cid in (*range(min(SAMPLED, partition.clients)), None):
        pool = np.arange(data.tests) if cid is None else partition.of(cid)
        picked = np.sort(rng.choice(pool, min(count, len(pool)), replace=False))
        some = texts(data, picked, cid is None) if text else images(data, picked, cid is None)
        rows.append(Row("test set" if cid is None else f"client {cid}", some))
    return rows


def images(data: Data, picked: Ints, test: bool) -> Tensor:
    """Return images as the model sees them before normalisation, uint8 [k, channels, height, width]."""
    if isinstance(data, Arrays):
        y = (data.test_y if test else data.y)[picked]
        by_class = torch.argsort(y, stable=True) if y.ndim == 1 else torch.arange(len(y))
        return seen(data, torch.from_numpy(picked)[by_class], test)
    assert isinstance(data, Datasets)
    part = "test" if test else "train"
    items = Seeded(data.test if test else data.train)
    try:
        return torch.stack([torch.as_tensor(items[i, 0][0]) for i in picked.tolist()])
    except Exception as error:
        raise UserError(
            f"data set '{data.name}': reading its {part} items {picked.tolist()} raised {type(error).__name__}: "
            f"{one_line(error)}; every item must be an image of the same size"
        ) from error


def texts(data: Data, picked: Ints, test: bool) -> list[str]:
    """Return texts, one line each, with the letter that follows after an arrow."""
    assert isinstance(data, Arrays), "only built-in data sets have an alphabet"
    x, y = (data.test_x, data.test_y) if test else (data.x, data.y)
    decode = shakespeare.decode
    pairs = [(decode(x[i].numpy()), decode(y[i : i + 1].numpy())) for i in picked.tolist()]
    return [f"{before} {ARROW} {after.replace(' ', BLANK)}".replace("\n", NEW_LINE) for before, after in pairs]


COMMANDS = {"list": list_all, "prepare": prepare, "show": show}
