"""Read runs of any version from their folders, and group runs that differ only in the seed.

A run may be unfinished or killed: what is there is read. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ..errors import UserError
from ..knobs import VARIANTS
from ..plugins.knobs import knobs
from ..runs.config import FREE, Config, renamed
from ..runs.folder import CONFIG, FINISHED, METRICS, read_json
from ..runs.metrics import SIDES, read_lines
from ..runs.schema import Damaged, Dealt, Finished, Goal, fault, read, read_yaml

SWEEP, PARTITION = "sweep.json", "partition.json"
MOST_PARTITION = 1 << 26  # bytes of a partition.json, which has one number per client (10,000) and class

IDLE = (*FREE, "threads", "device", "deterministic", "min_clients", "eval.batch")
"""knobs, and prefixes of groups, that change results at most in the last bits"""
PLAIN = ("algorithm", "mask", "data", "split", "model")  # knobs whose value needs no name in a label
TASK = ("data", "model", "split", "clients", "rounds")  # knobs that comparable runs share
DEFAULTS = {name: value for name, value in knobs(Config()).items() if not dataclasses.is_dataclass(value)}
BEFORE: dict[str, Any] = {"local.clip": 0.0, "local.clip_update": 0.0}
BEFORE |= {"meta.size": 0, "meta.lr": 0.0, "meta.share": False}
"""the behaviour of versions without these knobs; null, today's default, means 'the algorithm's own'"""
NEEDED: dict[str, Any] = {"algorithm": str, "mask": str, "tau": int | float}
NEEDED |= {"data": str, "rounds": int, "seed": int}
"""knobs that every version wrote, with their types"""
READ: dict[str, Any] = {"split": str, "skew.alpha": int | float, "server.variant": str}
"""further knobs whose type matters here, if they are present"""


@dataclass(frozen=True)
class Run:
    """The content of one run folder."""

    folder: Path
    config: dict[str, Any]
    """dotted knob -> value"""
    records: list[dict[str, Any]]
    """the valid lines of metrics.jsonl, by round"""
    metric: str
    """records have test_<metric>, None in rounds without evaluation"""
    rises: bool
    """whether a higher metric is better"""
    finished: dict[str, Any]
    """finished.json; {} if the run is unfinished"""
    labels: dict[str, str]
    """axis -> label if the run belongs to a sweep, without the seed"""

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def mask(self) -> str:
        return str(self.config["mask"])

    @property
    def done(self) -> bool:
        """Return whether all rounds are completed."""
        return bool(self.finished) or len(self.records) >= self.config["rounds"]

    @property
    def score(self) -> str:
        """Return the key of the metric in a record."""
        return f"test_{self.metric}"

    @property
    def sides(self) -> str:
        """Return the key in a record of the metric on participating clients and on the others."""
        return f"{SIDES}{self.metric}"

    @property
    def sweep(self) -> Path | None:
        """Return the folder of its sweep; None if it belongs to no sweep with axes."""
        return self.folder.resolve().parent if self.labels else None

    def series(self, *path: str) -> dict[int, float]:
        """Return round -> value under these nested keys of the records, for rounds that have one."""
        found = {record["round"]: look_up(record, path) for record in self.records}
        return {number: value for number, value in found.items() if value is not None}


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed and in knobs that do not affect the model."""

    key: dict[str, str]
    """axis -> label, or knob -> value, of what distinguishes the groups"""
    label: str
    """the key as text"""
    runs: list[Run]
    """one per seed, in the order of the seeds"""
    repeats: list[Run] = dataclasses.field(default_factory=list)
    """further runs of the same seeds, which add nothing to the statistics"""
    taus: bool = False
    """whether masked groups differ in tau, so that labels name it"""

    @property
    def first(self) -> Run:
        """Return the first run, to read what all runs share."""
        return self.runs[0]

    @property
    def config(self) -> dict[str, Any]:
        return self.first.config

    @property
    def metric(self) -> str:
        return self.first.metric


def look_up(record: dict[str, Any], path: Iterable[str]) -> Any:
    """Return the value under these nested keys of a record; None if there is none."""
    found: Any = record
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def read_run(folder: Path, whole: bool = False) -> Run:
    """Return the run in a folder; raise a `UserError` if there is none, `Damaged` if its files are not those of a run
    or, with `whole`, have lines that are no rounds."""
    for name in (CONFIG, METRICS):
        if not os.path.lexists(folder / name):
            raise no_run(folder, f"No such file or directory: '{folder / name}'")
    config = read_config(folder)
    lines = list(read_lines(folder))
    most = max(config["rounds"], len(lines))  # a larger number is damage; a plot up to it could exhaust memory
    valid = [line.record for line in lines if line.record is not None and line.record["round"] <= most]
    records = {record["round"]: record for record in valid}  # the last record of a round wins
    damaged = [line for line in lines if line.record is None or line.record["round"] > most]
    torn = bool(lines) and lines[-1].torn  # killed while writing its last round: still a run
    if damaged and (whole or not (records or torn)):
        raise Damaged(folder / METRICS, f"is damaged: line {damaged[0].number} {damaged[0].wrong or 'is no round'}")
    dealt, finished = read(folder / PARTITION, Dealt, MOST_PARTITION) or {}, read(folder / FINISHED, Finished)
    metric, rises = read_goal(dealt.get("objective"), list(records.values()))
    by_round = [records[number] for number in sorted(records)]
    return Run(folder, config, by_round, metric, rises, dict(finished or {}), labels_of(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of the run in a folder, by dotted knobs."""
    try:
        return flat(read_yaml(folder / CONFIG))
    except ValueError as error:
        raise Damaged(folder / CONFIG, f"is no configuration of a run ({error})") from None


def flat(tree: Any) -> dict[str, Any]:
    """Return a configuration by dotted knobs, with those that its version did not have; raise a ValueError if it is
    none."""
    if not isinstance(tree, dict):
        raise ValueError(f"{CONFIG} has no knobs")
    found: dict[str, Any] = {}
    for name, value in renamed(tree).items():
        found |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    given = {name: DEFAULTS[name] for name in READ} | found
    for name, kind in (NEEDED | READ).items():
        if not isinstance(given.get(name), kind):
            raise ValueError(f"{CONFIG} has no valid '{name}'")
    for name, value in found.items():  # anything else is damage, and may be too large for memory
        every = value if isinstance(value, list) else [value]
        if not all(one is None or isinstance(one, str | int | float) for one in every):
            raise ValueError(f"'{name}' in {CONFIG} is not a knob's value")
    whole = {str(name): value for name, value in (DEFAULTS | BEFORE | found).items()}
    variant = VARIANTS.get(whole["server.variant"])  # what null stood for in the first versions
    filled = {"server.b2": variant.b2, "server.eps": variant.eps} if variant else {}
    return whole | {name: value for name, value in filled.items() if whole[name] is None}


def read_goal(objective: Goal | None, records: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return the metric of a run and whether more is better, from its rounds and the objective in its partition.json.
    The first versions wrote none: they only had accuracy."""
    goal = objective or {}
    names = (key.removeprefix("test_") for record in records for key in record if key.startswith("test_"))
    metric = next((name for name in names if name != "loss"), None) or str(goal.get("metric", "accuracy"))
    return metric, bool(goal.get("rises", metric == "accuracy"))


def no_run(folder: Path, why: str) -> UserError:
    """Return the error for a folder without a run."""
    return UserError(f"'{folder}' is no run folder that can be read ({why}); give the --out of a training run")


def labels_of(folder: Path) -> dict[str, str]:
    """Return the labels of a run in its sweep; {} if it belongs to none."""
    here = folder.resolve()
    runs = read_json(here.parent / SWEEP).get("runs")
    labels = runs.get(here.name) if isinstance(runs, dict) else None
    return {str(k): str(v) for k, v in labels.items() if k != "seed"} if isinstance(labels, dict) else {}


def find_runs(paths: list[Path]) -> list[Run]:
    """Return the runs in these folders, each a run, a sweep or a tree of runs, in a stable order without repetition;
    raise a `UserError` for a folder without runs."""
    found: dict[Path, Path] = {}
    for path in paths:
        folders = folders_in(path)
        if not folders and not os.path.lexists(path / CONFIG):
            raise no_run(path, "and there is none below it")
        for folder in folders or [path]:  # [path]: so that `read_run` raises its error
            found.setdefault(folder.resolve(), folder)
    return [read_run(folder) for folder in found.values()]


def folders_in(path: Path) -> list[Path]:
    """Return the run folders at or below a path: those of a sweep in its order, others by name."""
    if is_run(path):
        return [path]
    if (path / SWEEP).exists():
        return [folder for folder in (path / name for name in sweep_runs(path)) if is_run(folder)]
    try:
        shown = [one for one in path.iterdir() if one.is_dir() and not one.name.startswith(".")]
    except OSError as error:
        raise no_run(path, str(error)) from None
    inside = [one for one in shown if not one.is_symlink() or is_run(one)]  # a link to a parent folder would never end
    return [folder for one in sorted(inside, key=natural) for folder in folders_in(one)]


def is_run(folder: Path) -> bool:
    """Return whether a folder has the files that every run has from its start."""
    return (folder / CONFIG).is_file() and (folder / METRICS).is_file()


def natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key with numbers in numerical order: seed2 before seed10."""
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", path.name)]


class Published(TypedDict, total=False):
    """A table of published numbers in a sweep.json."""

    columns: str
    measure: str
    rows: list[dict[str, Any]]


def read_sweep_record(folder: Path) -> dict[str, Any]:
    """Return the sweep.json of a sweep folder; raise a `UserError` if it cannot be read."""
    record = read_json(folder / SWEEP)
    tables = record.get("published", [])
    record["published"] = [tables] if isinstance(tables, dict) else tables  # the first version had one table
    kinds = {"runs": dict[str, dict[str, Any]], "axes": dict[str, list[str]], "published": list[Published]}
    if any(fault(record.get(part), kind, part) for part, kind in kinds.items()):
        raise UserError(f"'{folder / SWEEP}' is no record of a sweep; start the sweep again, which rewrites it")
    return record


def sweep_runs(folder: Path) -> list[str]:
    """Return the names of a sweep's run folders."""
    names = list(read_sweep_record(folder)["runs"])
    wrong = [name for name in names if name in ("", ".", "..") or os.path.basename(name) != name]
    if wrong:
        raise UserError(f"'{folder / SWEEP}' names '{wrong[0]}', which is no folder next to it; start the sweep again")
    return names


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Return the knobs in which runs differ, without those of `IDLE`, with their values in the order of the runs."""
    names = dict.fromkeys([*DEFAULTS, *(name for run in runs for name in run.config)])
    values = {name: [run.config.get(name) for run in runs] for name in names if not name.startswith(IDLE)}
    return {name: column for name, column in values.items() if any(value != column[0] for value in column)}


def essence(run: Run) -> dict[str, Any]:
    """Return the knobs that affect the model, without the seed. Plain averaging has no threshold; only sand has a
    sharpness."""
    unread = {"mean": ("tau", "sharpness"), "sand": ()}.get(run.mask, ("sharpness",))
    left_out = ("seed", *unread)
    return {k: v for k, v in run.config.items() if k not in left_out and not k.startswith(IDLE)}


def group(runs: list[Run]) -> list[Group]:
    """Return groups of runs that differ only in the seed, in the order of their first runs: by the labels if all belong
    to one sweep, else by the knobs, of which those of the task are always named if they differ."""
    sweeps = {run.sweep for run in runs}
    swept = len(sweeps) == 1 and None not in sweeps
    found: list[tuple[dict[str, Any], list[Run]]] = []
    for run in runs:
        key = dict(run.labels) if swept else essence(run)
        alike = next((members for other, members in found if other == key), None)
        if alike is None:
            found.append((key, [run]))
        else:
            alike.append(run)
    apart = distinguishing([key for key, _ in found], () if swept else TASK)
    taus = len({run.config["tau"] for run in runs if run.mask != "mean"}) > 1
    return [make_group({name: word(key[name]) for name in apart if name in key}, some, taus) for key, some in found]


def distinguishing(keys: list[dict[str, Any]], always: Iterable[str] = ()) -> list[str]:
    """Return the names that distinguish keys, without redundant ones, such as a learning rate that depends on the
    algorithm, unless they are in `always`."""
    kept: list[str] = []
    classes = 1
    for name in dict.fromkeys(name for key in keys for name in key):
        finer = len({tuple(word(key.get(one)) for one in [*kept, name]) for key in keys})
        differs = len({word(key.get(name)) for key in keys}) > 1
        if finer > classes or (differs and name in always):
            kept, classes = [*kept, name], finer
    return kept


def make_group(key: dict[str, str], runs: list[Run], taus: bool = False) -> Group:
    """Return the group of runs with a key; of several with the same seed, the one with most rounds counts."""
    ahead = sorted(runs, key=lambda run: -len(run.records))
    best = {run.seed: run for run in reversed(ahead)}
    chosen = [best[seed] for seed in sorted(best)]
    repeats = [run for run in runs if all(run is not one for one in chosen)]
    return Group(key, describe(key, runs[0].config, taus), chosen, repeats, taus)


def counted(group: Group) -> list[Run]:
    """Return the runs of a group that count: those that are done, or all if none is."""
    return [run for run in group.runs if run.done] or group.runs


def describe(key: Mapping[str, str], config: Mapping[str, Any], taus: bool = False, algorithm: bool = True) -> str:
    """Return the label of a run: its key and always its mask, with its algorithm if `algorithm`. `taus`: with the
    threshold of the mask."""
    return ", ".join([*words(key, config, taus), pairing(key, config, taus, algorithm)])


def words(key: Mapping[str, str], config: Mapping[str, Any], taus: bool = False) -> list[str]:
    """Return the parts of a key other than algorithm and mask, with their names unless the values are clear without."""
    elsewhere = ["algorithm", "mask"]
    if taus and config["mask"] != "mean" and key.get("tau") == word(config["tau"]):
        elsewhere.append("tau")
    rest = {name: value for name, value in key.items() if name not in elsewhere}
    return [value if speaks(name, value) else f"{name} {value}" for name, value in rest.items()]


def pairing(key: Mapping[str, str], config: Mapping[str, Any], taus: bool = False, algorithm: bool = True) -> str:
    """Return the algorithm and the mask of a run, "fedavg + gma", by their labels if the key has them; a label other
    than the mask's name is followed by that."""
    mask, own = key.get("mask", config["mask"]), config["mask"]
    mask = mask if mask in (own, own.rpartition(":")[2]) else f"{mask} ({own})"
    mask += f" {config['tau']:g}" if taus and own != "mean" else ""
    return f"{key.get('algorithm', config['algorithm'])} + {mask}" if algorithm else mask


def speaks(name: str, value: str) -> bool:
    """Return whether a value is clear without its name: a word of a `PLAIN` knob or of a sweep's own axis."""
    number = re.fullmatch(r"[-+\d.e]+|true|false|null|inf", value) is not None
    return not number and (name in PLAIN or name not in DEFAULTS)


def word(value: Any) -> str:
    """Return a knob's value as text."""
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
