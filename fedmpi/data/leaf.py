"""LEAF's json files (Caldas et al., 2018): samples by client, split so that test clients do not train.

LEAF's preprocess.sh writes files into the folders `train` and `test`, each file with the keys
  users         names
  num_samples   number of samples per user
  user_data     x and y per user: lists of samples and of labels
They may be compressed (.gz, .xz). Only one json file is in memory at a time: each client's samples become small arrays,
and the arrays one tensor.

If LEAF split by client (`-t user`), its split is kept. If it split each client's samples (`-t sample`), both parts are
pooled, and a fixed tenth of the clients becomes the test set.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmpi.data.files import unpacked
from fedmpi.data.store import Tensors, as_tensors
from fedmpi.errors import UserError
from fedmpi.seeds import raw_bits

log = logging.getLogger("fedmpi")

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Samples = tuple[Bytes, Ints]  # samples [n, ...] and their labels [n], all of one client
Clients = dict[str, list[Samples]]  # the samples of each client, by name
Convert = Callable[[list[Any], list[Any]], Samples]  # x and y of a client in the json; raises ValueError

PACKINGS = ("", ".gz", ".xz")
SEED = 0x1EAF  # of the draw of test clients


def find(base: Path, name: str) -> list[Path]:
    """Return LEAF's files of a data set under a root, train files first; [] if there are none."""
    for folder in (base / name, base / name / "data"):
        if files := [file for part in ("train", "test") for file in pick(folder / part, ".json")]:
            return files
    return []


def pick(folder: Path, ending: str) -> list[Path]:
    """Return a folder's files with that ending, sorted by name; an uncompressed file takes precedence."""
    found: dict[str, Path] = {}
    for packing in PACKINGS:
        for file in folder.glob(f"*{ending}{packing}"):
            if file.is_file() and not file.name.startswith("."):
                found.setdefault(file.name.removesuffix(packing), file)
    return [found[name] for name in sorted(found)]


def read(files: list[Path], convert: Convert) -> Tensors:
    """Return the tensors of LEAF's files, split by client."""
    parts: dict[str, Clients] = {"train": {}, "test": {}}
    for file in files:
        try:
            for user, samples in users_of(file, convert):
                parts[file.parent.name].setdefault(user, []).append(samples)
        except UserError:
            raise
        except ValueError as error:
            fix = "create it again with LEAF's preprocess.sh"
            raise UserError(f"{file} is not a valid LEAF file: {error}; {fix}") from error
    where = files[0].parent.parent
    for part, clients in parts.items():
        if not clients:
            fix = f"put both of LEAF's folders, train and test, into {where}"
            raise UserError(f"{where / part} has no json file with a user who has samples; {fix}")
    train, test = parts.values()
    if not train.keys() & test.keys():
        return tensors_of(train, test)
    for user in list(test):
        train.setdefault(user, []).extend(test.pop(user))
    return by_client(train, where)


def users_of(path: Path, convert: Convert) -> Iterator[tuple[str, Samples]]:
    """Yield each user with samples, and these; raise a ValueError if LEAF did not write the file."""
    content = unpacked(path)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON, or cut short ({error})") from error
    del content  # it may fill the memory
    for key, kind in (("users", list), ("num_samples", list), ("user_data", dict)):
        if not isinstance(found, dict) or not isinstance(found.get(key), kind):
            raise ValueError(f"it has no {'object' if kind is dict else 'list'} '{key}'")
    users, counts, data = (found[key] for key in ("users", "num_samples", "user_data"))
    if not all(isinstance(user, str) for user in users):
        raise ValueError("users are not all names")
    if len(users) != len(counts):
        raise ValueError(f"it has {len(users)} users and {len(counts)} num_samples")
    for user, count in zip(users, counts, strict=True):
        if (entry := data.pop(user, None)) is None:
            raise ValueError(f"user {user!r} is in users, but has no user_data")
        x, y = (entry.get(key) for key in ("x", "y")) if isinstance(entry, dict) else (None, None)
        if not isinstance(x, list) or not isinstance(y, list):
            raise ValueError(f"user {user!r} has no lists 'x' and 'y'")
        if not len(x) == len(y) == count:
            raise ValueError(f"user {user!r} has {len(x)} x, {len(y)} y and num_samples {count}")
        if y:
            try:
                samples = convert(x, y)
            except ValueError as error:
                raise ValueError(f"user {user!r} has {error}") from error
            yield user, samples
    for user, rest in data.items():  # LEAF keeps dropped users, without samples
        if rest != {"x": [], "y": []}:
            raise ValueError(f"user_data has {user!r}, who is not in users")


def by_client(clients: Clients, where: Path) -> Tensors:
    """Return the tensors of clients (this empties the dict); some clients become the test set."""
    if len(clients) < 2:
        fix = "it needs two, as test clients do not train: add files with more clients"
        raise UserError(f"{where} has too few clients with samples ({len(clients)}); {fix}")
    drawn = draw(sorted(clients))
    log.info("%s: %d of %d clients (a fixed choice) are test clients and do not train", where, len(drawn), len(clients))
    test = {name: clients.pop(name) for name in drawn}
    return tensors_of(clients, test)


def draw(names: list[str]) -> list[str]:
    """Return a random tenth of the names, at least one, always the same."""
    bits = raw_bits(SEED).random_raw(len(names))
    return [names[i] for i in np.argsort(bits, kind="stable")[: max(1, len(names) // 10)]]


def tensors_of(train: Clients, test: Clients) -> Tensors:
    """Return the tensors of a data set (this empties the dicts); owners number the train clients in name order."""
    (x, y, owner), (test_x, test_y, _) = map(join, (train, test))
    return as_tensors(x=x, y=y, test_x=test_x, test_y=test_y, owner=owner)


def join(clients: Clients) -> tuple[Bytes, Ints, Ints]:
    """Return all samples, labels and client numbers in name order; empties the dict, as it may fill the memory."""
    names = sorted(clients)
    sizes = [sum(len(y) for _, y in clients[name]) for name in names]
    x: Bytes = np.empty((sum(sizes), *clients[names[0]][0][0].shape[1:]), dtype=np.uint8)
    y: Ints = np.empty(sum(sizes), dtype=np.int64)
    start = 0
    for name in names:
        for samples, labels in clients.pop(name):
            stop = start + len(labels)
            x[start:stop], y[start:stop] = samples, labels
            start = stop
    return x, y, np.repeat(np.arange(len(names)), sizes)
