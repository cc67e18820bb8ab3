"""LEAF's json files (Caldas et al., 2018): samples by client, split so that test clients are unseen in training.

LEAF's preprocess.sh writes files into the folders `train` and `test`, each file with the keys
  users         names
  num_samples   how many samples each has
  user_data     for each name, x and y: lists of samples and of labels
They may be packed (.gz, .xz). Of the json only one file is in memory at a time: each client's samples become small
arrays, and the arrays one tensor.

Where LEAF split by client (`-t user`) its split is kept. Where it split each client's samples (`-t sample`) both parts
are pooled, and a tenth of the clients, always the same, becomes the test side.
"""

from __future__ import annotations

import json
import logging
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedmpi.data.sets.vision import unpacked
from fedmpi.data.store import Tensors
from fedmpi.errors import UserError
from fedmpi.seeds import raw_bits

log = logging.getLogger("fedmpi")

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Piece = tuple[Bytes, Ints]
"""samples [n, ...] and their labels [n], all of one client"""
Clients = dict[str, list[Piece]]
"""what each client has, by name"""
Convert = Callable[[list[Any], list[Any]], Piece]
"""(x, y) of a client as they are in the json -> a piece; raises ValueError with what they are instead"""

PACKINGS = ("", ".gz", ".xz")
SEED = 0x1EAF  # of the draw of test clients


def find(base: Path, name: str) -> list[Path]:
    """LEAF's files of a data set under a root, those of train first; none where there are none of either."""
    for folder in (base / name, base / name / "data"):
        if files := [file for part in ("train", "test") for file in pick(folder / part, ".json")]:
            return files
    return []


def pick(folder: Path, ending: str) -> list[Path]:
    """A folder's files with that ending, by name; of one that is there packed and unpacked only the latter."""
    found: dict[str, Path] = {}
    for packing in PACKINGS:
        for file in folder.glob(f"*{ending}{packing}"):
            if file.is_file() and not file.name.startswith("."):
                found.setdefault(file.name.removesuffix(packing), file)
    return [found[name] for name in sorted(found)]


def read(files: list[Path], convert: Convert) -> Tensors:
    """The tensors of LEAF's files, split by client."""
    train: Clients = {}
    test: Clients = {}
    for file in files:
        clients = train if file.parent.name == "train" else test
        for user, piece in users_of(file, convert):
            clients.setdefault(user, []).append(piece)
    where = files[0].parent.parent
    for part, clients in (("train", train), ("test", test)):
        if not clients:
            raise UserError(
                f"{where / part} has no json file with a user who has samples; put both of LEAF's folders, train and "
                f"test, into {where}"
            )
    if not train.keys() & test.keys():
        return tensors_of(train, test)
    for user in list(test):
        train.setdefault(user, []).extend(test.pop(user))
    return by_client(train, where)


def users_of(path: Path, convert: Convert) -> Iterator[tuple[str, Piece]]:
    """Each user of a file with what it has, one after the other; users without samples are left out."""
    users, counts, data = document(path)
    for user, count in zip(users, counts, strict=True):
        x, y = samples_of(path, user, count, data.pop(user, None))
        if not y:
            continue
        try:
            piece = convert(x, y)
        except ValueError as error:
            raise unsound(path, f"user {user!r} has {error}") from error
        yield user, piece
    for user, rest in data.items():  # LEAF leaves dropped users behind, but emptied
        if rest != {"x": [], "y": []}:
            raise unsound(path, f"user_data has {user!r}, who is not in users")


def document(path: Path) -> tuple[list[str], list[int], dict[str, Any]]:
    """The users of a file, how many samples each has, and the samples by user."""
    content = content_of(path)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise unsound(path, f"it is not JSON, or cut short ({error})") from error
    for key, kind in (("users", list), ("num_samples", list), ("user_data", dict)):
        if not isinstance(found, dict) or not isinstance(found.get(key), kind):
            raise unsound(path, f"it has no {'object' if kind is dict else 'list'} '{key}'")
    users, counts, data = (found[key] for key in ("users", "num_samples", "user_data"))
    if not all(isinstance(user, str) for user in users):
        raise unsound(path, "users are not all names")
    if len(users) != len(counts):
        raise unsound(path, f"it has {len(users)} users and {len(counts)} num_samples")
    return users, counts, data


def samples_of(path: Path, user: str, count: int, entry: object) -> tuple[list[Any], list[Any]]:
    """x and y of a user's entry in user_data, which must be as many as were announced."""
    if entry is None:
        raise unsound(path, f"user {user!r} is in users, but has no user_data of its own")
    x, y = (entry.get(key) for key in ("x", "y")) if isinstance(entry, dict) else (None, None)
    if not isinstance(x, list) or not isinstance(y, list):
        raise unsound(path, f"user {user!r} has no lists 'x' and 'y'")
    if len(x) != len(y):
        raise unsound(path, f"user {user!r} has {len(x)} x and {len(y)} y")
    if count != len(y):
        raise unsound(path, f"user {user!r} has {len(y)} samples and num_samples {count}")
    return x, y


def content_of(path: Path) -> bytes | bytearray:
    """The bytes of a file, unpacked; one that cannot be read is refused by its name."""
    if path.suffix != ".xz":
        return unpacked(path)
    try:
        return lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise UserError(f"{path} is damaged or cut short ({error}); replace it by the original file") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); make it readable or replace it") from error


def unsound(path: Path, what: str) -> UserError:
    """The error for a file that is not as LEAF writes it."""
    return UserError(f"{path} is not a sound file of LEAF: {what}; make it again by LEAF's preprocess.sh")


def by_client(clients: Clients, where: Path) -> Tensors:
    """The tensors of clients (which this empties), some of whom become the test side."""
    if len(clients) < 2:
        raise UserError(
            f"{where} has too few clients with samples ({len(clients)}); it needs two, as test clients are others than "
            "those that train: add files with more"
        )
    drawn = draw(sorted(clients))
    log.info(
        "%s has no test clients of its own: %d of its %d clients, always the same, are test clients and do not train",
        where,
        len(drawn),
        len(clients),
    )
    test = {name: clients.pop(name) for name in drawn}
    return tensors_of(clients, test)


def draw(names: list[str]) -> list[str]:
    """A tenth of the names, at least one, at random but the same ones each time."""
    bits = raw_bits(SEED).random_raw(len(names))
    return [names[i] for i in np.argsort(bits, kind="stable")[: max(1, len(names) // 10)]]


def tensors_of(train: Clients, test: Clients) -> Tensors:
    """The tensors of a data set, of clients that this empties; owners count the train clients in the order of names."""
    x, y, owner = join(train)
    test_x, test_y, _ = join(test)
    arrays = {"x": x, "y": y, "test_x": test_x, "test_y": test_y, "owner": owner}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def join(clients: Clients) -> tuple[Bytes, Ints, Ints]:
    """All samples, labels and client numbers in the order of names; takes each client's pieces away once copied, so
    that nothing is in memory twice."""
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
