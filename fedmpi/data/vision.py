"""MNIST and Fashion-MNIST: read where they are, downloaded through torchvision where they are not.

The four files of either set lie in torchvision's layout under a root folder, `MNIST/raw/` or `FashionMNIST/raw/`,
packed (.gz) or unpacked, and are read here without torchvision and without writing, so a read-only root will do.
Unpacked files are mapped into memory and shared by the ranks of a node. Fashion-MNIST is also found where Debian's
package puts it. The root is the argument, else $FEDMPI_DATA, else `data` in the cache folder (~/.cache/fedmpi/data).

The idx format (LeCun): two zero bytes, a type (8 = unsigned byte), the number of axes, each axis as a big-endian
uint32, the bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import importlib.machinery
import importlib.util
import io
import os
import socket
import struct
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmpi.data.arrays import Arrays, cache_folder, locked
from fedmpi.errors import UserError

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
PROBE_SECONDS = 8.0  # a cluster node often drops packets to the outside without an answer
STALL_SECONDS = 30.0


class Source(NamedTuple):
    """Where a data set may lie (torchvision's class and folder name, a folder of the system) and its normalisation."""

    name: str
    folder: str
    system: Path | None
    hint: str
    mean: float
    std: float


MNIST = Source("mnist", "MNIST", None, "", 0.1307, 0.3081)
FMNIST = Source(
    "fmnist",
    "FashionMNIST",
    Path("/usr/share/datasets/fashion-mnist"),
    "install the Debian package dataset-fashion-mnist, or ",
    0.2860,
    0.3530,
)


def mnist(root: Path | None = None) -> Arrays:
    """MNIST's 60,000 and 10,000 digits."""
    return _load(MNIST, root)


def fmnist(root: Path | None = None) -> Arrays:
    """Fashion-MNIST's 60,000 and 10,000 pictures of clothes."""
    return _load(FMNIST, root)


def data_root(root: Path | None) -> Path:
    """The folder to look for data sets in: the argument, else $FEDMPI_DATA, else `data` in the cache folder."""
    given = root or os.environ.get("FEDMPI_DATA")
    return Path(given).expanduser() if given else cache_folder() / "data"


def _load(source: Source, root: Path | None) -> Arrays:
    """The data set, from the first folder that has its files."""
    base = data_root(root)
    folders = [base / source.folder / "raw"]
    if root is None and source.system is not None:  # who names a folder means that folder and no other
        folders.append(source.system)
    files = _find(folders) or _download(source, base)
    train_x, train_y = _read_pair(*files[:2])
    test_x, test_y = _read_pair(*files[2:])
    return Arrays(
        source.name,
        classes=10,
        x=_images(train_x),
        y=torch.from_numpy(train_y.astype(np.int64)),
        test_x=_images(test_x),
        test_y=torch.from_numpy(test_y.astype(np.int64)),
        mean=(source.mean,),
        std=(source.std,),
    )


def _read_pair(image_file: Path, label_file: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Images [n, 28, 28] and their n labels, refused by file name where they do not fit."""
    x, y = read_idx(image_file), read_idx(label_file)
    if x.shape[1:] != (28, 28):
        raise UserError(f"{image_file} holds {list(x.shape)}, not images [n, 28, 28]; replace it by the original file")
    if y.ndim != 1 or len(y) != len(x) or len(y) == 0 or int(y.max()) > 9:
        raise UserError(
            f"{label_file} does not hold one label of 0 to 9 for each of the {len(x)} images of {image_file.name}; "
            "replace both by the original files"
        )
    return x, y


def _images(x: npt.NDArray[np.uint8]) -> Tensor:
    """Images [n, 28, 28] as a tensor [n, 1, 28, 28] on the same memory."""
    return torch.from_numpy(x).unsqueeze(1)


def _find(folders: list[Path]) -> list[Path] | None:
    """The four files, unpacked before packed, of the first folder that has all; None where no folder has."""
    for folder in folders:
        found = [next((f for f in (folder / name, folder / f"{name}.gz") if f.is_file()), None) for name in FILES]
        complete = [f for f in found if f is not None]
        if len(complete) == len(FILES):
            return complete
    return None


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array of bytes in an idx file, packed or not; a file that is not sound is refused by its name."""
    try:
        if path.suffix == ".gz":
            data: npt.NDArray[np.uint8] = np.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=np.uint8)
        else:
            # copy-on-write: torch wants writable memory, and pages nobody writes to stay shared
            data = np.memmap(path, dtype=np.uint8, mode="c")
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise UserError(f"{path} is damaged or cut short ({error}); replace it by the original file") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); make it readable or replace it") from error
    head = data[:4].tobytes()
    axes = head[3] if len(head) == 4 else 0
    start = 4 + 4 * axes
    if head[:3] != b"\0\0\x08" or not 1 <= axes <= 3 or len(data) < start:
        raise UserError(f"{path} is not an idx file of bytes (it begins with {head.hex() or 'nothing'}); replace it")
    shape = struct.unpack(f">{axes}I", data[4:start].tobytes())
    size = int(np.prod(shape, dtype=np.int64))
    if len(data) - start != size:
        raise UserError(
            f"{path} announces {size} bytes of data and holds {len(data) - start}; replace it by the original file"
        )
    return np.asarray(data[start:]).reshape(shape)


def _download(source: Source, base: Path) -> list[Path]:
    """The four files, fetched by torchvision into the root by one process while the others wait for it."""
    if os.environ.get("FEDMPI_OFFLINE"):
        raise _missing(source, base, "FEDMPI_OFFLINE forbids a download")
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _missing(source, base, f"and that folder cannot be made ({error.strerror})") from error
    lock = base / f".{source.name}.lock"
    with locked(lock) as another_failed:
        if files := _find([base / source.folder / "raw"]):
            return files
        if another_failed:  # fifty ranks without a network wait for one attempt, not for fifty in turn
            raise _missing(source, base, "and a download failed in another process")
        try:
            _fetch(source, base)
        except Exception as error:
            with contextlib.suppress(OSError), lock.open("a") as note:
                note.write("failed\n")
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise _missing(source, base, f"and the download failed ({reason.rstrip(':')})") from error
    files = _find([base / source.folder / "raw"])
    assert files is not None, "the files were renamed into place above"
    return files


def _fetch(source: Source, base: Path) -> None:
    """Download and unpack aside, then rename the four files into place, so that no reader meets half a file."""
    kind: Any = getattr(import_torchvision().datasets, source.folder)
    _probe([str(mirror) for mirror in kind.mirrors])
    with tempfile.TemporaryDirectory(dir=base, prefix=f".{source.name}-") as aside:
        with _socket_timeout(STALL_SECONDS), _quiet_unless_terminal():
            kind(aside, download=True)
        target = base / source.folder / "raw"
        target.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            file = Path(aside) / source.folder / "raw" / name
            read_idx(file)
            os.replace(file, target / name)


def _missing(source: Source, base: Path, why: str) -> UserError:
    """The error for a data set that is nowhere, with the ways to get it."""
    names = ", ".join(f"{name}[.gz]" for name in FILES)
    return UserError(
        f"data set '{source.name}' is not under {base}, {why}; {source.hint}put the four files {names} into "
        f"{base / source.folder / 'raw'}, or name the folder that has {source.folder}/raw by --data_root or "
        "FEDMPI_DATA, or run once where there is a network"
    )


def _probe(urls: list[str], seconds: float = PROBE_SECONDS) -> None:
    """Raise ConnectionError unless one of the servers answers anything within the time, name lookup included."""
    answered, done = threading.Event(), threading.Event()
    reasons: list[str] = []

    def ask() -> None:
        for url in urls:
            try:
                urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
                answered.set()
            except urllib.error.HTTPError as error:
                error.close()
                answered.set()
            except (OSError, ValueError) as error:
                reasons.append(str(getattr(error, "reason", error)))
            if answered.is_set():
                break
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    done.wait(seconds)
    if not answered.is_set():
        raise ConnectionError(reasons[0] if reasons else f"no answer from its servers within {seconds:.0f} s")


@contextlib.contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Give sockets made meanwhile a timeout: torchvision sets none, and a stalled download would hang for ever."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _quiet_unless_terminal() -> Iterator[None]:
    """Keep torchvision's progress bar out of log files."""
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield


_declared: list[torch.library.Library] = []  # a declaration lasts as long as its Library object


def import_torchvision() -> ModuleType:
    """The module torchvision, also where its compiled part cannot load.

    A torchvision built for CUDA finds no CUDA library beside a CPU-only torch; its operators are then missing, and
    its own import dies when it describes `nms`, although nothing here uses an operator. So load the compiled part as
    torchvision would, and only where `nms` is still missing declare it. Declaring first would clash with a healthy
    torchvision, and trying the plain import first would leave half of its modules behind.
    """
    if "torchvision" not in sys.modules and not _declared:
        _load_operators()
        if not hasattr(torch.ops.torchvision, "nms"):
            library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _declared.append(library)
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"torchvision cannot be imported ({error}); install the one that belongs to torch {torch.__version__}"
        ) from error


def _load_operators() -> None:
    """Load torchvision's compiled operators where they can be loaded."""
    package = importlib.util.find_spec("torchvision")
    for folder in (package.submodule_search_locations if package else None) or []:
        loader = (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES)
        compiled = importlib.machinery.FileFinder(folder, loader).find_spec("_C")
        if compiled is not None and compiled.origin is not None:
            with contextlib.suppress(OSError, RuntimeError):
                torch.ops.load_library(compiled.origin)  # type: ignore[no-untyped-call]
