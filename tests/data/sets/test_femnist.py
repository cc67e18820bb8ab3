"""FEMNIST: LEAF's json, or MNIST's digits by QMNIST's writers in its place."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import shutil
import struct
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPO, need
from test_leaf import document, put

from fedmpi.data import leaf
from fedmpi.data.arrays import Arrays
from fedmpi.data.sets import femnist as module
from fedmpi.data.sets import vision
from fedmpi.data.sets.femnist import LABELS, femnist, femnist_source
from fedmpi.errors import UserError

DATA = Path(os.environ.get("FEDMPI_TEST_DATA", REPO.parent / "shared" / "data"))
TRAIN, TEST = LABELS


@pytest.fixture(scope="module")
def shared() -> Path:
    """The folder with the real digits and their writers."""
    folder = DATA / "mnist"
    need("data", (folder / "QMNIST-writers").is_dir(), f"there is no MNIST with QMNIST's writers in {folder}")
    return folder


@pytest.fixture(scope="module")
def digits_root(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with the real MNIST and QMNIST's labels, in torchvision's layout."""
    root = tmp_path_factory.mktemp("digits")
    (root / "QMNIST").mkdir()
    (root / "MNIST").symlink_to(shared / "MNIST")
    (root / "QMNIST" / "raw").symlink_to(shared / "QMNIST-writers")
    return root


@pytest.fixture(scope="module")
def digits(digits_root: Path) -> Arrays:
    return femnist(digits_root)


@pytest.fixture(scope="module")
def by_leaf(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    """The real per-writer digits in LEAF's layout."""
    root = tmp_path_factory.mktemp("leaf")
    (root / "femnist").symlink_to(shared / "writers-leaf")
    return femnist(root)


def table(shared: Path, name: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The numbers in a label file of QMNIST, read in another way."""
    content = gzip.decompress((shared / "QMNIST-writers" / f"{name}.gz").read_bytes())
    return np.array(struct.unpack(f">{len(content) // 4}i", content)[3:], dtype=np.int32).reshape(-1, 8)


# --- the real digits by their writers


def test_the_stand_in_is_mnist_by_539_writers(digits: Arrays, shared: Path) -> None:
    assert (tuple(digits.x.shape), tuple(digits.test_x.shape)) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert digits.y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert digits.test_y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert (digits.classes, digits.shape, digits.goal.name) == (10, (1, 28, 28), "classification")
    assert (digits.mean[0], digits.std[0]) == (pytest.approx(0.1307, abs=1e-4), pytest.approx(0.3081, abs=1e-4))
    assert digits.owner is not None
    sizes = digits.owner.bincount()
    assert (len(sizes), int(sizes.min()), int(sizes.median()), int(sizes.max())) == (539, 19, 116, 131)
    raw = gzip.decompress((shared / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").read_bytes())
    assert digits.x.numpy().tobytes() == raw[16:]


def test_an_owner_is_a_writer(digits: Arrays, shared: Path) -> None:
    assert digits.owner is not None
    train, test = table(shared, TRAIN), table(shared, TEST)[:10_000]
    of_owner = dict(zip(digits.owner.tolist(), train[:, 2].tolist(), strict=True))
    assert [of_owner[k] for k in digits.owner.tolist()] == train[:, 2].tolist()
    assert len(set(of_owner.values())) == len(of_owner) == 539
    assert not set(test[:, 2].tolist()) & set(of_owner.values()), "test writers are others"
    series = {writer: form for _, form, writer in train[:, :3].tolist()}
    assert sorted(series.values()).count(0) == 289


def test_the_note_says_so_also_when_only_the_prepared_file_is_left(digits: Arrays, digits_root: Path) -> None:
    assert digits.note == "MNIST's digits by QMNIST's 539 writers, in place of LEAF's FEMNIST"
    moved = [(digits_root / name, digits_root / f"{name}-away") for name in ("MNIST", "QMNIST")]
    for here, away in moved:
        here.rename(away)
    try:
        assert femnist_source(digits_root).find(digits_root) == []
        again = femnist(digits_root)
    finally:
        for here, away in moved:
            away.rename(here)
    assert again.note == digits.note
    assert torch.equal(again.x, digits.x)


# --- the real digits in LEAF's layout


def test_leafs_layout_is_read_whole_and_split_by_writer(by_leaf: Arrays) -> None:
    assert len(by_leaf.x) + len(by_leaf.test_x) == 4146 + 480
    assert by_leaf.owner is not None
    sizes = by_leaf.owner.bincount().tolist()
    assert len(sizes) == 36, "a tenth of 40 writers is held back"
    counts: Counter[str] = Counter()
    for path in sorted((DATA / "mnist" / "writers-leaf").glob("*/*.json.xz")):
        content = json.loads(lzma.decompress(path.read_bytes()))
        for name, count in zip(content["users"], content["num_samples"], strict=True):
            counts[name] += count
    drawn = leaf.draw(sorted(counts))
    assert sizes == [count for name, count in sorted(counts.items()) if name not in drawn]
    assert len(by_leaf.test_y) == sum(counts[name] for name in drawn)
    assert (by_leaf.classes, by_leaf.note, tuple(by_leaf.x.shape[1:])) == (10, "", (1, 28, 28))
    share = by_leaf.y.bincount() / len(by_leaf.y)
    assert 0.08 < float(share.min()) <= float(share.max()) < 0.13


def test_leafs_background_is_bright_and_its_digits_are_those_of_the_same_writer(
    by_leaf: Arrays, digits: Arrays
) -> None:
    assert int(by_leaf.x[:, 0, 0, 0].min()) == 255
    assert by_leaf.mean[0] == pytest.approx(float(by_leaf.x.float().mean()) / 255, abs=1e-6)
    assert digits.owner is not None and by_leaf.owner is not None
    of_image = {}
    for image, writer, label in zip(digits.x.numpy(), digits.owner.tolist(), digits.y.tolist(), strict=True):
        of_image[image.tobytes()] = (writer, label)
    found = [of_image[(255 - image).tobytes()] for image in by_leaf.x.numpy()]
    assert [label for _, label in found] == by_leaf.y.tolist()
    pairs = set(zip((writer for writer, _ in found), by_leaf.owner.tolist(), strict=True))
    assert len(pairs) == len({w for w, _ in pairs}) == len({o for _, o in pairs}) == 36, "one owner a writer"
    others = {of_image[(255 - image).tobytes()][0] for image in by_leaf.test_x.numpy()}
    assert len(others) == 4 and not others & {writer for writer, _ in found}, "test writers are others"


# --- small ones


def image(value: float, **pixels: float) -> list[float]:
    """An image of one brightness, but for some pixels."""
    flat = [value] * 784
    for name, other in pixels.items():
        flat[int(name.removeprefix("p"))] = other
    return flat


def test_leafs_numbers_become_the_nearest_bytes(tmp_path: Path) -> None:
    put(
        tmp_path / "femnist/train/a.json",
        document({"w": [(image(1.0, p0=0.0, p29=0.5, p783=0.0021), 3), (image(0), 9)]}),
    )
    put(tmp_path / "femnist/test/a.json", document({"v": [(image(1), 0)]}))
    d = femnist(tmp_path)
    assert (d.x[0, 0, 0, 0], d.x[0, 0, 1, 1], d.x[0, 0, 27, 27], d.x[0, 0, 5, 5]) == (0, 128, 1, 255)
    assert (int(d.x[1].max()), int(d.test_x.min())) == (0, 255)
    assert (d.y.tolist(), d.test_y.tolist(), d.classes) == ([3, 9], [0], 10)


@pytest.mark.parametrize(("train", "test", "classes"), [(9, 9, 10), (10, 0, 62), (0, 61, 62)])
def test_letters_make_it_62_classes(tmp_path: Path, train: int, test: int, classes: int) -> None:
    put(tmp_path / "femnist/data/train/a.json.gz", document({"w": [(image(1, p3=0), train)]}))
    put(tmp_path / "femnist/data/test/a.json.gz", document({"v": [(image(1), test)]}))
    assert femnist(tmp_path).classes == classes


@pytest.mark.parametrize(
    ("sample", "label", "words"),
    [
        (image(1)[1:], 0, "samples that are not lists of 784 numbers"),
        ("text", 0, "samples that are not lists of 784 numbers"),
        (image(1, p7=1.5), 0, "numbers from 1 to 1.5, not from 0 to 1"),
        (image(1, p7=-0.1), 0, "numbers from -0.1 to 1, not"),
        (image(1, p7=float("nan")), 0, "numbers from nan to nan, not"),
        ([*image(1)[1:], "1"], 0, "samples that are not lists of 784 numbers"),
        ([*image(1)[1:], None], 0, "samples that are not lists of 784 numbers"),
        ([*image(1)[1:], [1]], 0, "samples of different lengths, or lists among numbers or labels"),
        ([[v] for v in image(1)], 0, "samples that are not lists of 784 numbers"),
        (image(1), 62, "labels that are not whole numbers from 0 to 61"),
        (image(1), -1, "labels that are not whole numbers"),
        (image(1), 1.0, "labels that are not whole numbers"),
        (image(1), "1", "labels that are not whole numbers"),
        (image(1), [1], "labels that are not whole numbers"),
    ],
)
def test_unsound_samples_are_refused_by_file_and_user(tmp_path: Path, sample: Any, label: Any, words: str) -> None:
    path = put(tmp_path / "femnist/train/a.json", document({"w": [(image(1), 1)], "bad": [(sample, label)]}))
    put(tmp_path / "femnist/test/a.json", document({"v": [(image(1), 0)]}))
    with pytest.raises(UserError, match=f"user 'bad' has {words}") as caught:
        femnist(tmp_path)
    assert str(path) in str(caught.value)


def idx(array: np.ndarray[Any, Any]) -> bytes:
    """An idx file of bytes."""
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def labels_file(rows: list[list[int]], kind: int = 0x0C02) -> bytes:
    """A label file of QMNIST."""
    return struct.pack(">3I", kind, len(rows), len(rows[0])) + np.array(rows, dtype=">i4").tobytes()


def small(root: Path, packed: bool = False) -> Path:
    """A tiny MNIST with writers 7 and 5 of train and 6 of test, under root; returns the folder of the label files."""
    contents = {
        "MNIST": [
            idx(np.arange(3 * 784).reshape(3, 28, 28) % 256),
            idx(np.arange(3)),
            idx(np.zeros((2, 28, 28))),
            idx(np.arange(2)),
        ]
    }
    rows = [[[0, 4, 7, 9], [1, 4, 5, 9], [2, 4, 7, 9]], [[0, 4, 6, 9], [1, 4, 6, 9], [8, 4, 5, 9]]]
    contents["QMNIST"] = [labels_file(part) for part in rows]
    for folder, names in (("MNIST", vision.FILES), ("QMNIST", tuple(LABELS))):
        raw = root / folder / "raw"
        raw.mkdir(parents=True)
        for name, content in zip(names, contents[folder], strict=True):
            file = raw / (f"{name}.gz" if packed else name)
            file.write_bytes(gzip.compress(content) if packed else content)
    return root / "QMNIST" / "raw"


@pytest.mark.parametrize("packed", [False, True])
def test_writers_are_numbered_and_rows_beyond_mnist_are_left_alone(tmp_path: Path, packed: bool) -> None:
    small(tmp_path, packed)
    d = femnist(tmp_path)
    assert d.owner is not None
    assert (d.owner.tolist(), d.y.tolist(), d.test_y.tolist()) == ([1, 0, 1], [0, 1, 2], [0, 1])
    assert d.note == "MNIST's digits by QMNIST's 2 writers, in place of LEAF's FEMNIST"


def test_leafs_own_comes_first_and_a_half_of_it_is_not_passed_over(tmp_path: Path) -> None:
    small(tmp_path)
    assert "in place of" in femnist(tmp_path).note
    put(tmp_path / "femnist/train/a.json", document({"w": [(image(1, p3=0), 40)]}))
    with pytest.raises(UserError, match="femnist/test has no json file"):
        femnist(tmp_path)
    put(tmp_path / "femnist/test/a.json", document({"v": [(image(1), 0)]}))
    d = femnist(tmp_path)
    assert (d.note, d.classes, len(d.x)) == ("", 62, 1)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (TRAIN, b"", "not a label file of QMNIST, or is cut short"),
        (TRAIN, labels_file([[0, 4, 7], [1, 4, 5], [2, 4, 7]])[:-4], "not a label file of QMNIST, or is cut short"),
        (TRAIN, labels_file([[0, 4, 7], [1, 4, 5], [2, 4, 7]], kind=0x0802), "not a label file"),
        (TRAIN, labels_file([[0, 4], [1, 4], [2, 4]]), "not a label file"),
        (TRAIN, labels_file([[0, 4, 7], [1, 4, 5], [3, 4, 7]]), "does not belong to the digits of MNIST"),
        (TRAIN, labels_file([[0, 4, 7], [1, 4, 5]]), "does not belong to the digits of MNIST"),
        (TEST, labels_file([[1, 4, 6], [1, 4, 6]]), "does not belong to the digits of MNIST"),
        (TEST, labels_file([[0, 4, 6], [1, 4, 7]]), "has writer 7, who is also in qmnist-train"),
        (TEST, labels_file([[0, 4, 6, 9, 9, 9, 9, 9]] * 60_000), "is damaged: its SHA-256"),
    ],
)
def test_unsound_label_files_are_refused_by_name(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = small(tmp_path) / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        femnist(tmp_path)
    assert str(path) in str(caught.value)


def test_a_damaged_packing_is_refused_by_name(tmp_path: Path) -> None:
    path = small(tmp_path, packed=True) / f"{TEST}.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=f"{path.name} is damaged or cut short"):
        femnist(tmp_path)


def test_the_real_label_file_with_a_bit_turned_is_refused(digits_root: Path, shared: Path, tmp_path: Path) -> None:
    (tmp_path / "MNIST").symlink_to(shared / "MNIST")
    (tmp_path / "QMNIST" / "raw").mkdir(parents=True)
    for name in LABELS:
        content = bytearray(gzip.decompress((shared / "QMNIST-writers" / f"{name}.gz").read_bytes()))
        content[12 + 32 * 59_999 + 11] ^= name == TEST  # another writer in a row that is not used
        (tmp_path / "QMNIST" / "raw" / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{TEST} is damaged: its SHA-256 is not that of the published file"):
        femnist(tmp_path)


# --- the download


def test_without_a_network_both_ways_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMPI_OFFLINE", "1")
    with pytest.raises(UserError, match="data set 'femnist' is not under") as caught:
        femnist(tmp_path)
    for words in ("TalwalkarLab/leaf", "preprocess.sh -s niid --sf 1.0 -t user", f"{tmp_path}/femnist/train"):
        assert words in str(caught.value)
    for words in (f"{tmp_path}/MNIST/raw", f"{TRAIN}[.gz] and {TEST}[.gz] into {tmp_path}/QMNIST/raw"):
        assert words in str(caught.value)


def test_what_is_missing_is_fetched_as_torchvision_would(
    tmp_path: Path, shared: Path, digits: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch_file(urls: list[str], target: Path, md5: str) -> None:
        (url,) = urls
        content = (shared / "QMNIST-writers" / url.rpartition("/")[2]).read_bytes()
        assert hashlib.md5(content).hexdigest() == md5, "this file belongs to this address"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        fetched.append(str(target.relative_to(tmp_path)))

    def fetch_mnist(family: vision.Family, base: Path) -> None:
        shutil.copytree(shared / family.folder, base / family.folder)
        fetched.append(family.folder)

    monkeypatch.delenv("FEDMPI_OFFLINE", raising=False)
    monkeypatch.setattr(module, "fetch_file", fetch_file)
    monkeypatch.setattr(module, "vision", SimpleNamespace(**{**vars(vision), "fetch": fetch_mnist}))
    assert torch.equal(femnist(tmp_path).x, digits.x)
    assert fetched == ["MNIST", f"QMNIST/raw/{TRAIN}.gz", f"QMNIST/raw/{TEST}.gz"]
    (tmp_path / "QMNIST" / "raw" / f"{TEST}.gz").unlink()
    fetched.clear()
    module.fetch(tmp_path)
    assert fetched == [f"QMNIST/raw/{TEST}.gz"]
