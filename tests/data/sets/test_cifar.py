"""CIFAR-10 and CIFAR-100: the versions and archives they are found in, what is refused, and the real pictures."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from realdata import Bytes, cifar10_root, cifar100_root, records, shared_data, tiles

from fedmpi.data.arrays import Arrays
from fedmpi.data.files import unpacked
from fedmpi.data.sets import cifar
from fedmpi.data.sets.cifar import CIFAR10, CIFAR100, Family
from fedmpi.errors import UserError
from fedmpi.plugins.torchvision import import_torchvision

FAMILIES = pytest.mark.parametrize("family", [CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
SMALL = 4  # records a file


@pytest.fixture(autouse=True)
def no_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the user's folders and settings, and the network, out of every test."""
    for name in ("FEDMPI_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FEDMPI_OFFLINE", "1")
    monkeypatch.setenv("FEDMPI_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def sample(family: Family, name: str, seed: int = 0) -> tuple[Bytes, list[Bytes]]:
    """Noise and labels that stand for the content of a file, the same whenever asked."""
    rng = np.random.default_rng([seed, *name.encode()])
    images = rng.integers(0, 256, (SMALL, 32, 32, 3), np.uint8)
    return images, [rng.integers(0, kinds, SMALL).astype(np.uint8) for _, kinds in family.labels]


def in_records(family: Family, name: str, seed: int = 0) -> bytes:
    images, labels = sample(family, name, seed)
    return records(images, *labels)


def in_pickle(family: Family, name: str, seed: int = 0, protocol: int = 2) -> bytes:
    images, labels = sample(family, name, seed)
    lists = {key: values.tolist() for (key, _), values in zip(family.labels, labels, strict=True)}
    return pickle.dumps({"data": images.transpose(0, 3, 1, 2).reshape(SMALL, -1)} | lists, protocol)


def in_old_pickle(family: Family, name: str, seed: int = 0) -> bytes:
    """The same as Python 2 and numpy 1 wrote it, which is how CIFAR is published."""

    def short(text: str) -> bytes:
        return b"U" + bytes([len(text)]) + text.encode()

    images, labels = sample(family, name, seed)
    lists = [
        short(key) + b"](" + b"".join(b"K" + bytes([v]) for v in values.tolist()) + b"e"
        for (key, _), values in zip(family.labels, labels, strict=True)
    ]
    data = images.transpose(0, 3, 1, 2).tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short("b") + b"\x87R"
    kind = b"cnumpy\ndtype\n" + short("u1") + b"K\x00K\x01\x87R(K\x03" + short("|") + b"NNN" + b"J\xff\xff\xff\xff" * 2
    state = b"(K\x01" + struct.pack("<cHcH", b"M", SMALL, b"M", 3072) + b"\x86" + kind + b"K\x00tb\x89"
    array += state + b"T" + struct.pack("<i", len(data)) + data + b"tb"
    return b"\x80\x02}(" + b"".join(lists) + short("data") + array + b"u."


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def write_archive(path: Path, members: list[tuple[tarfile.TarInfo | str, bytes]]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for member, content in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def binary(family: Family, seed: int = 0) -> dict[str, bytes]:
    return {f"{name}.bin": in_records(family, name, seed) for name in (*family.train, family.test)}


def pickles(family: Family, seed: int = 0, write: Callable[..., bytes] = in_old_pickle) -> dict[str, bytes]:
    return {name: write(family, name, seed) for name in (*family.train, family.test)}


def put(root: Path, family: Family, place: str, seed: int = 0) -> Path:
    """One of the four places where a set may lie, filled: "py", "py.tar", "bin" or "bin.tar"."""
    version = family.versions[place.startswith("bin")]
    contents = binary(family, seed) if version.suffix else pickles(family, seed)
    if not place.endswith(".tar"):
        write_files(root / version.folder, contents)
        return root / version.folder
    write_archive(root / version.archive, [(f"{version.folder}/{name}", c) for name, c in contents.items()])
    return root / version.archive


def trust(monkeypatch: pytest.MonkeyPatch, root: Path, family: Family) -> None:
    """Let the pickles and the archive that are there be the published ones."""
    kind = family.published
    version = family.versions[0]

    def md5(path: Path) -> str:
        return hashlib.md5(path.read_bytes() if path.is_file() else b"").hexdigest()

    def md5s(names: tuple[str, ...]) -> list[list[str]]:
        return [[n, md5(root / version.folder / n)] for n in names]

    if (root / version.folder).is_dir():
        monkeypatch.setattr(kind, "train_list", md5s(family.train))
        monkeypatch.setattr(kind, "test_list", md5s((family.test,)))
    elif (root / version.archive).is_file():
        contents = pickles(family)
        listed = [[name, hashlib.md5(content).hexdigest()] for name, content in contents.items()]
        monkeypatch.setattr(kind, "train_list", listed[:-1])
        monkeypatch.setattr(kind, "test_list", listed[-1:])
    monkeypatch.setattr(kind, "tgz_md5", md5(root / version.archive))


def load(family: Family, root: Path) -> Arrays:
    return {"cifar10": cifar.cifar10, "cifar100": cifar.cifar100}[family.name](root)


def is_sample(arrays: Arrays, family: Family, train: tuple[str, ...], seed: int = 0) -> bool:
    """Whether arrays hold the content of those train files and of the test file, in that order."""
    for x, y, names in ((arrays.x, arrays.y, train), (arrays.test_x, arrays.test_y, (family.test,))):
        images = np.concatenate([sample(family, name, seed)[0] for name in names])
        labels = np.concatenate([sample(family, name, seed)[1][-1] for name in names])
        if not np.array_equal(x.permute(0, 2, 3, 1).numpy(), images) or y.tolist() != labels.tolist():
            return False
    return x.dtype == torch.uint8 and y.dtype == torch.int64


def tree(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


# --- where it is found


@FAMILIES
@pytest.mark.parametrize("place", ["py", "py.tar", "bin", "bin.tar"])
def test_every_version_gives_the_same_arrays(
    root: Path, family: Family, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root, family, place)
    trust(monkeypatch, root, family)
    before = tree(root)
    arrays = load(family, root)
    assert is_sample(arrays, family, family.train)
    assert (arrays.classes, arrays.mean, arrays.std) == (family.labels[-1][1], family.mean, family.std)
    assert (arrays.augment, arrays.owner, arrays.name) == ("crop:4+flip", None, family.name)
    new = {Path(path).relative_to(root).as_posix() for path in tree(root) - before}
    assert new == {"prepared", f"prepared/{family.name}-v1.safetensors", f"prepared/.{family.name}.lock"}


def test_the_normalisation_is_the_published_one() -> None:
    assert (CIFAR10.mean, CIFAR10.std) == ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    assert (CIFAR100.mean, CIFAR100.std) == ((0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762))
    assert cifar.cifar10_source().published == cifar.cifar100_source(Path("x")).published == (50_000, 10_000)


@FAMILIES
def test_the_python_version_comes_first_and_a_folder_before_its_archive(
    root: Path, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, place in reversed(list(enumerate(["py", "py.tar", "bin", "bin.tar"]))):
        put(root, family, place, seed=seed if place != "py.tar" else 0)  # `trust` knows the archive of seed 0
        trust(monkeypatch, root, family)
        arrays = load(family, root)
        assert is_sample(arrays, family, family.train, seed if place != "py.tar" else 0), place


@FAMILIES
def test_torchvision_reads_the_same_pickles_alike(root: Path, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = family.published
    meta = pickle.dumps({kind.meta["key"]: [str(i) for i in range(family.labels[-1][1])]})
    contents = pickles(family, write=in_pickle)
    write_files(root / family.versions[0].folder, contents | {kind.meta["filename"]: meta})
    trust(monkeypatch, root, family)
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": hashlib.md5(meta).hexdigest()})
    ours = load(family, root)
    for train, x, y in ((True, ours.x, ours.y), (False, ours.test_x, ours.test_y)):
        theirs = kind(root, train=train, download=False)
        assert np.array_equal(theirs.data, x.permute(0, 2, 3, 1)) and theirs.targets == y.tolist()


def test_arrays_in_pickles_may_be_stored_by_columns() -> None:
    x = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072, order="F") ** 3
    for array in (x, np.ascontiguousarray(x)):
        content = pickle.dumps({"data": array, "labels": [7, 1]}, 2)
        found, labels = cifar.parse_pickle(CIFAR10, Path("data_batch_1"), content)
        assert np.array_equal(found, x) and labels.tolist() == [7, 1] and found.dtype == np.uint8


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_pickles_of_any_age_are_read(root: Path, protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = pickles(CIFAR10, write=lambda *args: in_pickle(*args, protocol=protocol))
    write_files(root / "cifar-10-batches-py", contents)
    trust(monkeypatch, root, CIFAR10)
    assert is_sample(load(CIFAR10, root), CIFAR10, CIFAR10.train)


@FAMILIES
@pytest.mark.parametrize("place", ["py", "bin"])
def test_a_folder_without_its_test_file_is_not_found(root: Path, family: Family, place: str) -> None:
    folder = put(root, family, place)
    (file,) = folder.glob(f"{family.test}*")
    file.unlink()
    assert cifar.find_files(family, root) == []
    with pytest.raises(UserError) as caught:
        load(family, root)
    python, other = family.versions
    assert str(caught.value) == (
        f"data set '{family.name}' is not under {root}, FEDMPI_OFFLINE forbids a download; put {python.archive} or all "
        f"of its folder {python.folder}, or the binary version ({other.archive} or {other.folder}), into {root}, or "
        "name the folder that has them by --data_root or FEDMPI_DATA, or run once where there is a network"
    )


def test_a_folder_of_pickles_that_is_not_complete_gives_way_to_its_archive(root: Path) -> None:
    (put(root, CIFAR10, "py") / "data_batch_4").unlink()
    assert cifar.find_files(CIFAR10, root) == []
    archive = put(root, CIFAR10, "py.tar")
    assert cifar.find_files(CIFAR10, root) == [archive]


def test_the_name_of_the_root_does_not_matter(tmp_path: Path) -> None:
    root = tmp_path / "cifar-10-batches-py"
    root.mkdir()
    put(root, CIFAR10, "bin.tar")
    assert is_sample(load(CIFAR10, root), CIFAR10, CIFAR10.train)


@FAMILIES
def test_the_archive_is_fetched_where_nothing_is(root: Path, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDMPI_OFFLINE")
    asked: list[Any] = []

    def fetch_file(urls: list[str], target: Path, md5: str) -> None:
        asked.append((urls, target, md5))
        put(root, family, "py.tar")
        trust(monkeypatch, root, family)

    monkeypatch.setattr(cifar, "fetch_file", fetch_file)
    kind = family.published
    wanted = ([kind.url], root / family.versions[0].archive, kind.tgz_md5)
    assert is_sample(load(family, root), family, family.train)
    assert asked == [wanted]


# --- subsets


@pytest.mark.parametrize("packed", [False, True])
def test_a_subset_of_the_binary_version_is_noted(root: Path, packed: bool) -> None:
    contents = binary(CIFAR10)
    few = {name: contents[name] for name in ("data_batch_5.bin", "data_batch_2.bin", "test_batch.bin")}
    if packed:
        members: list[Any] = [(f"cifar-10-batches-bin/{name}", content) for name, content in few.items()]
        write_archive(root / "cifar-10-binary.tar.gz", members)
    else:
        write_files(root / "cifar-10-batches-bin", few)
    for _ in range(2):  # read, and as it was prepared
        arrays = load(CIFAR10, root)
        assert is_sample(arrays, CIFAR10, ("data_batch_2", "data_batch_5"))
        assert arrays.note.startswith("a subset, 8 of 50,000 train and 4 of 10,000 test samples: ")


@pytest.mark.parametrize("published", [(20, 4), (20, 5), (25, 4)])
def test_the_full_set_is_no_subset(root: Path, published: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "PUBLISHED", published)
    put(root, CIFAR10, "bin")
    assert (load(CIFAR10, root).note == "") == (published == (20, 4))


# --- what is refused: the binary version


def cut(content: bytes) -> bytes:
    return content[:-1]


def mislabelled(column: int, label: int) -> Callable[[bytes], bytes]:
    """The second record has that label."""

    def change(content: bytes) -> bytes:
        record = len(content) // SMALL
        return content[: record + column] + bytes([label]) + content[record + column + 1 :]

    return change


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("family", "name", "change", "words"),
    [
        (CIFAR10, "data_batch_3", cut, "holds 12,291 bytes, not 1 to 10,000 records of 3,073 bytes"),
        (CIFAR10, "test_batch", lambda c: b"", "holds 0 bytes"),
        (CIFAR10, "test_batch", lambda c: c * 2501, "not 1 to 10,000 records"),
        (CIFAR10, "data_batch_1", mislabelled(0, 10), "has labels 10 at record 1, not one of 0 to 9"),
        (CIFAR100, "train", cut, "not 1 to 50,000 records of 3,074 bytes"),
        (CIFAR100, "train", mislabelled(1, 100), "has fine_labels 100 at record 1, not one of 0 to 99"),
        (CIFAR100, "test", mislabelled(0, 20), "has coarse_labels 20 at record 1, not one of 0 to 19"),
    ],
)
def test_unsound_records_are_refused_by_name(
    root: Path, packed: bool, family: Family, name: str, change: Callable[[bytes], bytes], words: str
) -> None:
    version = family.versions[1]
    contents = binary(family)
    contents[f"{name}.bin"] = change(contents[f"{name}.bin"])
    place = root / version.folder / f"{name}.bin"
    if packed:
        write_archive(root / version.archive, [(f"{version.folder}/{n}", c) for n, c in contents.items()])
        place = root / version.archive / version.folder / f"{name}.bin"
    else:
        write_files(root / version.folder, contents)
    with pytest.raises(UserError) as caught:
        load(family, root)
    assert str(caught.value).startswith(f"{place} ") and words in str(caught.value)
    assert not list(root.glob("prepared/*.safetensors"))


def test_a_file_that_cannot_be_read_is_refused_by_name(root: Path) -> None:
    folder = put(root, CIFAR10, "bin")
    for path in (folder, root / "gone.tar.gz"):
        with pytest.raises(UserError, match=f"{path} cannot be read"):
            unpacked(path) if path is folder else list(cifar.read_archive(path, [], ""))


# --- what is refused: archives


def flip(where: float) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        at = int(where * len(content)) if where < 1 else len(content) - 6  # in the checksum at the end
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c[: len(c) // 3],
        lambda c: c[:-100],
        lambda c: c[:-1],
        lambda c: c[:5],
        lambda c: b"",
        lambda c: b"no archive at all" * 99,
        lambda c: gzip.compress(b"no archive at all" * 99),
        lambda c: gzip.compress(gzip.decompress(c)[:9000]),
        flip(0.5),
        flip(1.0),
    ],
    ids=["third", "almost", "a byte", "head", "empty", "text", "packed text", "tar cut", "a bit", "checksum"],
)
def test_damaged_archives_are_refused_by_name(root: Path, change: Callable[[bytes], bytes]) -> None:
    archive = put(root, CIFAR10, "bin.tar")
    archive.write_bytes(change(archive.read_bytes()))
    with pytest.raises(UserError, match=f"{archive} is damaged or cut short"):
        load(CIFAR10, root)


def link(kind: bytes, name: str, to: str) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, to
    return info, b""


def test_nothing_of_an_archive_is_written_anywhere(root: Path, tmp_path: Path) -> None:
    evil = b"evil" * 100
    members: list[Any] = [(f"cifar-10-batches-bin/{name}", content) for name, content in binary(CIFAR10).items()]
    members += [
        ("../evil", evil),
        (str(tmp_path / "absolute"), evil),
        ("cifar-10-batches-bin/../../evil", evil),
        ("cifar-10-batches-bin/readme.html", evil),
        ("elsewhere/test_batch.bin", evil),
        ("test_batch.bin", evil),
        ("./cifar-10-batches-bin/test_batch.bin", evil),
        link(tarfile.SYMTYPE, "out", str(tmp_path)),
        ("out/evil", evil),
        link(tarfile.SYMTYPE, "cifar-10-batches-bin/test_batch.bin", "/etc/passwd"),
        link(tarfile.LNKTYPE, "cifar-10-batches-bin/test_batch.bin", "../evil"),
        link(tarfile.DIRTYPE, "cifar-10-batches-bin/test_batch.bin", ""),
    ]
    write_archive(root / "cifar-10-binary.tar.gz", members)
    before = tree(tmp_path)
    assert is_sample(load(CIFAR10, root), CIFAR10, CIFAR10.train)
    assert all(path.startswith(str(root / "prepared")) for path in tree(tmp_path) - before)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_link_is_not_a_member(root: Path, tmp_path: Path, kind: bytes) -> None:
    """Neither one to a sound file outside nor one to another member."""
    sound = binary(CIFAR10)
    (tmp_path / "outside").write_bytes(sound["test_batch.bin"])
    for target in (str(tmp_path / "outside"), "cifar-10-batches-bin/data_batch_1.bin"):
        members: list[Any] = [(f"cifar-10-batches-bin/{n}", c) for n, c in sound.items() if n != "test_batch.bin"]
        members.append(link(kind, "cifar-10-batches-bin/test_batch.bin", target))
        write_archive(root / "cifar-10-binary.tar.gz", members)
        with pytest.raises(UserError, match="cifar-10-binary.tar.gz does not have all of the files .*test_batch.bin"):
            load(CIFAR10, root)


# --- what is refused: pickles


@FAMILIES
def test_a_wrong_md5_is_refused_before_the_file_is_parsed(
    root: Path, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(root, family, "py")
    monkeypatch.setattr(cifar.ArrayUnpickler, "load", lambda self: pytest.fail("it was parsed"))
    with pytest.raises(UserError, match=f"{folder / family.train[0]} is not the published file: its md5 is"):
        load(family, root)


@FAMILIES
def test_an_archive_with_a_wrong_md5_is_refused_before_it_is_parsed(
    root: Path, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = put(root, family, "py.tar")
    monkeypatch.setattr(tarfile, "open", lambda *args, **kw: pytest.fail("it was parsed"))
    with pytest.raises(UserError, match=f"{archive} is not the published file: its md5 is"):
        load(family, root)


def test_a_member_with_a_wrong_md5_is_refused_whatever_the_archive_has(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = put(root, CIFAR10, "py.tar", seed=1)
    trust(monkeypatch, root, CIFAR10)  # the archive, and members of seed 0
    with pytest.raises(UserError, match=f"{archive}/cifar-10-batches-py/data_batch_1 is not the published file"):
        load(CIFAR10, root)


def test_an_archive_of_pickles_lacks_none(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = pickles(CIFAR10)
    for gone in ("data_batch_3", "test_batch"):
        members: list[Any] = [(f"cifar-10-batches-py/{n}", c) for n, c in contents.items() if n != gone]
        write_archive(root / "cifar-10-python.tar.gz", members)
        trust(monkeypatch, root, CIFAR10)
        with pytest.raises(UserError, match=f"cifar-10-python.tar.gz does not have all of the files .*/{gone}"):
            load(CIFAR10, root)


class Call:
    """Pickled as the call of a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("md5", ["wrong", "right"])
def test_a_pickle_that_would_make_a_file_does_not(
    root: Path, packed: bool, protocol: int, md5: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, folder = root / "mark", "cifar-10-batches-py"
    evil = pickle.dumps({"labels": [], "data": Call(os.mkdir, str(mark))}, protocol)
    pickle.loads(evil)
    mark.rmdir()  # it would have been made
    contents = pickles(CIFAR10) | {"data_batch_1": evil}
    write_files(root / folder, contents)
    if md5 == "right":
        trust(monkeypatch, root, CIFAR10)
    if packed:
        write_archive(root / "cifar-10-python.tar.gz", [(f"{folder}/{name}", c) for name, c in contents.items()])
        if md5 == "right":
            tgz = hashlib.md5((root / "cifar-10-python.tar.gz").read_bytes()).hexdigest()
            monkeypatch.setattr(import_torchvision().datasets.CIFAR10, "tgz_md5", tgz)
        (root / folder).rename(root / "aside")
    words = "asks for posix.mkdir, which no numpy array needs" if md5 == "right" else "is not the published file"
    with pytest.raises(UserError, match=words) as caught:
        load(CIFAR10, root)
    assert str(caught.value).startswith(f"{root}{'/cifar-10-python.tar.gz' if packed else '/' + folder}")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"cbuiltins\neval\n(S'1'\ntR.", "asks for builtins.eval"),
        (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", "asks for numpy.ndarray.tofile"),
        (b"cnumpy\nload\n(S'x'\ntR.", "asks for numpy.load"),
        (b"c_codecs\nencode\n(Vx\nVrot13\ntR.", "asks for the codec rot13"),
        (b"c_codecs\ndecode\n(Vx\nVhex\ntR.", "asks for _codecs.decode"),
        (b"Pelsewhere\n.", "persistent"),
        (b"", "Ran out of input"),
        (b"not a pickle", "is not a pickle of arrays"),
        (b"cnumpy\ndtype\n(Vno kind\ntR.", "no array 'data'"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.int8), "labels": [1]}, 2), "no array 'data'"),
        (pickle.dumps({"data": np.zeros(3072, np.uint8), "labels": [1]}, 2), "no array 'data'"),
        (pickle.dumps({"data": b"0" * 3072, "labels": [1]}), "no array 'data'"),
        (in_old_pickle(CIFAR10, "test_batch").replace(b"M\x04\x00M", b"M\x05\x00M"), "no array 'data'"),
        (in_old_pickle(CIFAR10, "test_batch").replace(b"M\x00\x0c\x86", b"M\x00\x0c\x85"), "no array 'data'"),
        (pickle.dumps([1, 2]), "no array 'data'"),
        (pickle.dumps({"labels": [1]}), "no array 'data'"),
        (pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}, 2), "no array 'data'"),
        (pickle.dumps({"data": np.zeros((1, 3071), np.uint8), "labels": [1]}, 2), "no array 'data'"),
        (pickle.dumps({"data": np.zeros((0, 3072), np.uint8), "labels": []}, 3), "no array 'data'"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, 2), "no list 'labels' of 2 numbers"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "fine_labels": [1]}, 2), "no list 'labels' of 1"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, 2), "has labels 10 at record 0"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [-1]}, 2), "has labels -1 at record 0"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": ["1"]}, 2), "has labels '1' at record 0"),
    ],
)
def test_pickles_of_anything_else_are_refused_by_name(content: bytes, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        cifar.parse_pickle(CIFAR10, Path("folder/data_batch_1"), content)
    assert str(caught.value).startswith("folder/data_batch_1 ")


def test_a_genuine_pickle_is_read() -> None:
    """The class names, as published: a pickle of Python 2."""
    with (shared_data() / "cifar10" / "batches.meta").open("rb") as file:
        meta = cifar.ArrayUnpickler(file, encoding="latin1").load()
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    assert meta["label_names"] == names


# --- prepared once


def test_what_was_prepared_is_mapped_and_not_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, CIFAR10, "bin")
    first = load(CIFAR10, root)
    monkeypatch.setattr(cifar, "read_files", lambda *args: pytest.fail("it was read again"))
    again = load(CIFAR10, root)
    assert torch.equal(first.x, again.x) and again.note == first.note != ""
    assert str(root / "prepared" / "cifar10-v1.safetensors") in Path("/proc/self/maps").read_text()


def test_ranks_that_start_together_prepare_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, CIFAR100, "bin.tar")
    real, reads = cifar.read_files, []

    def read_files(*args: Any) -> Any:
        reads.append(1)
        time.sleep(0.2)
        return real(*args)

    monkeypatch.setattr(cifar, "read_files", read_files)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: load(CIFAR100, root), range(4)))
    assert len(reads) == 1
    assert all(is_sample(arrays, CIFAR100, CIFAR100.train) for arrays in found)


# --- the real pictures


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def test_cifar10_is_cifar10() -> None:
    d = cifar.cifar10(cifar10_root())
    assert (tuple(d.x.shape), tuple(d.test_x.shape)) == ((20_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert d.y[:10_000].bincount().tolist() == [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    assert d.y[10_000:].bincount().tolist() == [984, 1007, 1010, 995, 1010, 988, 1008, 1026, 987, 985]
    assert d.test_y.bincount().tolist() == [1000] * 10
    assert sha(d.x) == "1a1dabfe5f9e9e17edcf717d9e76be90a44be902bd324c60b4d32667ea2e6a0e"
    assert sha(d.test_x) == "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56"
    for channel in range(3):
        pixels = d.x[:, channel].float() / 255
        assert pixels.mean().item() == pytest.approx(d.mean[channel], abs=3e-3)
        assert pixels.std().item() == pytest.approx(d.std[channel], abs=2e-3)


def test_cifar100_is_cifar100() -> None:
    d = cifar.cifar100(cifar100_root())
    assert (tuple(d.x.shape), tuple(d.test_x.shape)) == ((1117, 3, 32, 32), (916, 3, 32, 32))
    counts, test_counts = d.y.bincount(), d.test_y.bincount()
    assert len(counts) == len(test_counts) == d.classes == 100
    assert [int(n) for n in (counts.min(), counts.max(), test_counts.min(), test_counts.max())] == [5, 22, 4, 15]
    assert np.array_equal(d.x.permute(0, 2, 3, 1), tiles(shared_data() / "cifar100" / "train.webp", 1117))
    assert sha(d.x) == "59d336cbf53122a5fd573f56ad3193ba52cd1918b643d2a781bae42dc66891b4"
    assert sha(d.test_x) == "f74ce5a94321ec2f65de2033ffebb1ae6888801ad260afb648d8f16fa46483db"
    for channel in range(3):
        assert (d.x[:, channel].float() / 255).mean().item() == pytest.approx(d.mean[channel], abs=0.02)
