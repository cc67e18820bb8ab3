"""Tiny-ImageNet: 200 classes of colour pictures of 64 x 64, from Stanford's folder or archive.

  tiny-imagenet-200/wnids.txt                        the classes, one per line; their order numbers them
  tiny-imagenet-200/train/<wnid>/images/*.JPEG       500 per class
  tiny-imagenet-200/val/images/*.JPEG                50 per class: the test set here, as the real one has no labels
  tiny-imagenet-200/val/val_annotations.txt          picture, class and a bounding box, one per line

A wnid is WordNet's name of a class. The archive is read in place and never unpacked to disk. Either may be a subset, as
long as each class of wnids.txt has a train picture; for fewer classes, shorten that list.
"""

from __future__ import annotations

import io
import logging
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedmpi.data.arrays import Arrays
from fedmpi.data.files import damaged, unpacked, unreadable, wrong
from fedmpi.data.store import Source, Tensors, load
from fedmpi.errors import UserError

log = logging.getLogger("fedmpi")

FOLDER = "tiny-imagenet-200"
PUBLISHED = (100_000, 10_000)
SIDE = 64
WNIDS, ANNOTATIONS = "wnids.txt", "val/val_annotations.txt"
TRAIN = re.compile(r"train/([^/]+)/images/[^/.][^/]*\.JPEG")  # no leading dot: some systems add hidden files
VAL = re.compile(r"val/images/[^/.][^/]*\.JPEG")


class Box(NamedTuple):
    """A folder or an archive in Tiny-ImageNet's layout."""

    path: Path  # for error messages
    names: set[str]  # of its pictures and possibly other files, relative to the top folder
    get: Callable[[str], bytes | bytearray]  # reads a file by name

    def lines(self, name: str) -> list[str]:
        """Return the non-empty lines of one of the lists."""
        try:
            return [line for line in self.get(name).decode().splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise wrong(self.path / name, f"is not text ({error})") from error


def tinyimagenet(root: Path | None = None) -> Arrays:
    """Load Tiny-ImageNet's 100,000 train pictures, and its 10,000 validation pictures as the test set."""
    stored = load(tinyimagenet_source(root), root)
    classes = int(stored.tensors["y"].max()) + 1  # each class has a train picture: see `train_pictures`
    return stored.arrays("tinyimagenet", classes, augment="crop:8+flip")


def tinyimagenet_source(root: Path | None = None) -> Source:
    """Return the source of Tiny-ImageNet."""
    return Source(
        "tinyimagenet",
        version=1,
        read=read_files,
        find=find_files,
        wanted=f"get {FOLDER}.zip from the site of Stanford's course CS231n (cs231n.stanford.edu) and put it, or the "
        f"folder {FOLDER} unpacked from it, into {{root}}",
        published=PUBLISHED,
    )


def find_files(base: Path) -> list[Path]:
    """Return the two lists and the picture folders, else the archive (its exact name before longer ones); [] if there
    is neither. Pictures are not listed: 100,000 files take seconds, and a folder's time changes with its files."""
    folder = base / FOLDER
    lists = [folder / WNIDS, folder / ANNOTATIONS]
    if all(file.is_file() for file in lists):
        return [*lists, *sorted(folder.glob("val/images")), *sorted(folder.glob("train/*/images"))]
    archives = [base / f"{FOLDER}.zip", *sorted(base.glob(f"{FOLDER}*.zip"))]
    return next(([file] for file in archives if file.is_file()), [])


def read_files(files: list[Path]) -> Tensors:
    """Return the tensors of the folder that has the two lists, or of the archive."""
    if files[0].name == WNIDS:
        folder = files[0].parent
        found = [*folder.glob("train/*/images/*.JPEG"), *folder.glob("val/images/*.JPEG")]
        names = {file.relative_to(folder).as_posix() for file in found}
        return read_box(Box(folder, names, lambda name: unpacked(folder / name)))
    try:
        archive = zipfile.ZipFile(files[0])
    except OSError as error:
        raise unreadable(files[0], error) from error
    except Exception as error:  # a broken directory may raise nearly anything
        raise damaged(files[0], error) from error
    with archive:
        return read_box(open_archive(files[0], archive))


def open_archive(path: Path, archive: zipfile.ZipFile) -> Box:
    """Open an archive."""

    def get(name: str) -> bytes:
        try:
            return archive.read(f"{FOLDER}/{name}")
        except KeyError as error:
            raise wrong(path, f"has no {FOLDER}/{name}") from error
        except Exception as error:  # damaged, encrypted, unknown compression: each raises another exception
            raise wrong(path, f"is damaged at {FOLDER}/{name} ({error})") from error

    names = {name.removeprefix(f"{FOLDER}/") for name in archive.namelist() if name.startswith(f"{FOLDER}/")}
    return Box(path / FOLDER, names, get)


def read_box(box: Box) -> Tensors:
    """Return the tensors of all pictures: train pictures ordered by class and name, test pictures by name."""
    wnids = [line.strip() for line in box.lines(WNIDS)]
    number = {wnid: i for i, wnid in enumerate(wnids)}
    if len(number) < max(len(wnids), 1):
        given = f"lists {len(wnids)} classes, {len(number)} of them different"
        raise UserError(f"{box.path / WNIDS} {given}; it must list at least one, and each once")
    train = {name: found[1] for name in box.names if (found := TRAIN.fullmatch(name))}
    test = annotated(box)
    places = [*train, *(f"{ANNOTATIONS}, {Path(name).name}" for name in test)]
    for place, wnid in zip(places, (*train.values(), *test.values()), strict=True):
        if wnid not in number:
            fix = "add it there, or remove the picture"
            raise UserError(f"{box.path / place}: class '{wnid}' is not in {WNIDS}; {fix}")
    if absent := [wnid for wnid in wnids if wnid in number.keys() - set(train.values())]:
        raise UserError(
            f"{box.path} has no train/{absent[0]}/images/*.JPEG, and so for {len(absent)} of the {len(wnids)} classes "
            f"of {WNIDS}; add the pictures, or leave these classes out of the list"
        )
    log.info("tinyimagenet: decoding %s pictures of %s", f"{len(train) + len(test):,}", box.path)
    classes = train | test
    by_class = sorted(train, key=lambda name: (number[train[name]], natural(name)))
    tensors: Tensors = {}
    for prefix, names in (("", by_class), ("test_", sorted(test, key=natural))):
        x = np.empty((len(names), 3, SIDE, SIDE), np.uint8)
        for i, name in enumerate(names):
            x[i] = decode(box.path / name, box.get(name)).transpose(2, 0, 1)
        y = torch.tensor([number[classes[name]] for name in names])
        tensors |= {f"{prefix}x": torch.from_numpy(x), f"{prefix}y": y}
    return tensors


def annotated(box: Box) -> dict[str, str]:
    """Return the class of each test picture."""
    wnids = {}
    for line in box.lines(ANNOTATIONS):
        name, wnid, *_ = [*line.split("\t"), ""]
        wnids[f"val/images/{name}"] = wnid.strip()
    pictures = [name for name in box.names if VAL.fullmatch(name)]
    if not pictures:
        raise UserError(f"{box.path} has no val/images/*.JPEG; add the pictures")
    if lost := [name for name in pictures if name not in wnids]:
        raise UserError(f"{box.path / lost[0]} is not in {ANNOTATIONS}; add its line, or remove the picture")
    return {name: wnids[name] for name in pictures}


def natural(name: str) -> tuple[str, str]:
    """Return a key that sorts 2 before 10."""
    return re.sub("[0-9]+", lambda digits: digits[0].zfill(20), name), name


def decode(path: Path, content: bytes | bytearray) -> npt.NDArray[np.uint8]:
    """Return the pixels of a JPEG, [64, 64, 3]; grey ones are converted to colour."""
    from PIL import Image  # imported here: no other data set needs it

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            width, height = image.size
            if (width, height) == (SIDE, SIDE):
                return np.asarray(image.convert("RGB"))
    except Exception as error:  # a broken picture may raise nearly anything
        raise wrong(path, f"is not a JPEG that can be read ({error})") from error
    raise wrong(path, f"is {width} x {height}, not {SIDE} x {SIDE}")
