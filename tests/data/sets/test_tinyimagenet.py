"""Tiny-ImageNet: its folder and its archive, the order of pictures and classes, what is refused, the real pictures."""

from __future__ import annotations

import io
import re
import shutil
import stat
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from realdata import tiny_archive, tiny_layout, tiny_root

from fedmpi.data.arrays import Arrays
from fedmpi.data.sets import tinyimagenet as tiny
from fedmpi.errors import UserError

TOP = "tiny-imagenet-200"
Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def no_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the user's folders and settings out of every test."""
    for name in ("FEDMPI_DATA", "FEDMPI_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FEDMPI_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def jpeg(colour: tuple[int, ...], size: tuple[int, int] = (64, 64), kind: str = "JPEG") -> bytes:
    """A picture of one colour, grey where that is one number."""
    file = io.BytesIO()
    Image.new("RGB" if len(colour) == 3 else "L", size, colour if len(colour) == 3 else colour[0]).save(file, kind)
    return file.getvalue()


def layout() -> Files:
    """Three classes in no order of the alphabet, 12 train pictures each and 11 to test; red encodes a picture's number
    (20 times it), green its class (60 times it), blue whether it is for testing."""
    files: Files = {"wnids.txt": b"n03\nn01\nn02\n", "words.txt": b"n01\tcat\n"}
    lines = []
    for c, wnid in enumerate(("n03", "n01", "n02")):
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b"n03_0.JPEG\t0\t0\t63\t63\n"
        for i in range(12):
            files[f"train/{wnid}/images/{wnid}_{i}.JPEG"] = jpeg((20 * i, 60 * c, 0))
    for i in (3, 10, 2, 0, 1, 4, 5, 9, 6, 7, 8):
        files[f"val/images/val_{i}.JPEG"] = jpeg((20 * i, 60 * (i % 3), 200))
        lines.append(f"val_{i}.JPEG\t{('n03', 'n01', 'n02')[i % 3]}\t0\t0\t62\t62\n")
    files["val/val_annotations.txt"] = "".join(lines).encode()
    return files


def put(root: Path, files: Files, packed: bool, archive: str = f"{TOP}.zip") -> Path:
    """Write files as a folder or as an archive; returns what errors call their place."""
    if packed:
        with zipfile.ZipFile(root / archive, "w") as box:
            for name, content in files.items():
                box.writestr(f"{TOP}/{name}", content)
        return root / archive / TOP
    for name, content in files.items():
        (root / TOP / name).parent.mkdir(parents=True, exist_ok=True)
        (root / TOP / name).write_bytes(content)
    return root / TOP


def tree(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def colours(x: torch.Tensor) -> list[tuple[int, int, int]]:
    """What `layout` says of each picture: number, class, whether it is for testing."""
    assert x.shape[1:] == (3, 64, 64) and x.dtype == torch.uint8
    means = x.float().mean((2, 3))
    return [(round(r / 20), round(g / 60), round(b / 200)) for r, g, b in means.tolist()]


both = pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])


# --- where it is found, and in which order


@both
def test_classes_are_numbered_as_listed_and_pictures_by_their_numbers(root: Path, packed: bool) -> None:
    put(root, layout(), packed)
    before = tree(root)
    d = tiny.tinyimagenet(root)
    assert (d.name, d.classes, d.augment, d.owner) == ("tinyimagenet", 3, "crop:8+flip", None)
    assert colours(d.x) == [(i, c, 0) for c in range(3) for i in range(12)]
    assert d.y.tolist() == [c for c in range(3) for _ in range(12)]
    assert colours(d.test_x) == [(i, i % 3, 1) for i in range(11)]
    assert d.test_y.tolist() == [i % 3 for i in range(11)] and d.y.dtype == d.test_y.dtype == torch.int64
    pixels = d.x.double().transpose(0, 1).flatten(1) / 255
    assert d.mean == pytest.approx(pixels.mean(1).tolist()) and d.std == pytest.approx(pixels.std(1).tolist(), abs=1e-5)
    new = {Path(path).relative_to(root).as_posix() for path in tree(root) - before}
    assert new == {"prepared", "prepared/tinyimagenet-v1.safetensors", "prepared/.tinyimagenet.lock"}


@both
def test_rows_stay_rows(root: Path, packed: bool) -> None:
    """A picture whose upper half is red and whose left half is green."""
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:32, :, 0] = pixels[:, :32, 1] = 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=100, subsampling=0)
    put(root, layout() | {"val/images/val_0.JPEG": file.getvalue()}, packed)
    picture = tiny.tinyimagenet(root).test_x[0].numpy() > 128
    assert picture[0, :32].all() and not picture[0, 32:].any()
    assert picture[1, :, :32].all() and not picture[1, :, 32:].any() and not picture[2].any()


def test_the_folder_comes_first_then_the_archive_by_its_own_name(root: Path) -> None:
    names = [f"{TOP}.zip", f"{TOP}-a.zip", f"{TOP}_b.zip"]
    put(root, layout(), packed=True, archive="tiny-imagenet.zip")
    assert tiny.find_files(root) == []
    for name in reversed(names):
        put(root, layout(), packed=True, archive=name)
        assert tiny.find_files(root) == [root / name]
    put(root, layout(), packed=False)
    lists = [root / TOP / "wnids.txt", root / TOP / "val" / "val_annotations.txt"]
    folders = [root / TOP / "val" / "images", *sorted((root / TOP).glob("train/*/images"))]
    assert tiny.find_files(root) == lists + folders and len(folders) > 1
    lists[1].unlink()
    assert tiny.find_files(root) == [root / names[0]]


def test_finding_it_lists_no_pictures(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, layout(), packed=False)
    assert not [file for file in tiny.find_files(root) if file.suffix == ".JPEG"]


def test_a_picture_that_has_come_or_gone_is_noticed(root: Path) -> None:
    place = put(root, layout(), packed=False)
    before = len(tiny.tinyimagenet(root).y)
    added = place / "train" / "n01" / "images" / "n01_99.JPEG"
    added.write_bytes(next((place / "train" / "n01" / "images").glob("*.JPEG")).read_bytes())
    assert len(tiny.tinyimagenet(root).y) == before + 1
    added.unlink()
    assert len(tiny.tinyimagenet(root).y) == before


def test_where_it_is_not_the_error_says_where_to_get_it(root: Path) -> None:
    with pytest.raises(UserError) as caught:
        tiny.tinyimagenet(root)
    assert str(caught.value) == (
        f"data set 'tinyimagenet' is not under {root}, and there is no place to download it from; get {TOP}.zip from "
        f"the site of Stanford's course CS231n (cs231n.stanford.edu) and put it, or the folder {TOP} unpacked from it, "
        f"into {root}, or name the folder that has them by --data_root or FEDMPI_DATA"
    )
    assert tiny.tinyimagenet_source().published == (100_000, 10_000) and tiny.tinyimagenet_source().fetch is None


@pytest.mark.parametrize("published", [(36, 11), (37, 11), (36, 12)])
def test_a_subset_is_noted_and_the_full_set_is_not(
    root: Path, published: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "PUBLISHED", published)
    put(root, layout(), packed=True)
    note = tiny.tinyimagenet(root).note
    if published == (36, 11):
        assert note == ""
    else:
        assert note.startswith(f"a subset, 36 of {published[0]} train and 11 of {published[1]} test samples: ")


@both
def test_a_subset_may_lack_pictures_and_classes(root: Path, packed: bool) -> None:
    """Annotations of pictures that are not there are no matter."""
    files = layout() | {"wnids.txt": b"\r\n n03 \r\nn02\r\n\r\n"}
    kept = {
        n: c for n, c in files.items() if "n01" not in n and n not in ("val/images/val_1.JPEG", "val/images/val_4.JPEG")
    }
    for gone in ("val/images/val_7.JPEG", "val/images/val_10.JPEG", "train/n03/images/n03_0.JPEG"):
        del kept[gone]
    put(root, kept, packed)
    d = tiny.tinyimagenet(root)
    assert d.classes == 2 and d.y.bincount().tolist() == [11, 12]
    assert [c for _, c, _ in colours(d.x)] == [0] * 11 + [2] * 12
    assert d.test_y.tolist() == [0, 1, 0, 1, 0, 1, 0] and [i for i, _, _ in colours(d.test_x)] == [0, 2, 3, 5, 6, 8, 9]


@both
def test_files_that_are_no_pictures_of_it_are_passed_over(root: Path, packed: bool) -> None:
    other = {
        "train/n01/images/._n01_0.JPEG": b"of a Mac",
        "train/n01/images/Thumbs.db": b"of Windows",
        "train/n01/n01_99.JPEG": b"one folder too high",
        "test/images/test_0.JPEG": b"without a label",
        "val/images/deep/val_0.JPEG": b"one folder too deep",
    }
    put(root, layout() | other, packed)
    assert len(tiny.tinyimagenet(root).x) == 36


# --- what is refused


@both
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train/n01/images/n01_5.JPEG": b""}, "train/n01/images/n01_5.JPEG is not a JPEG that can be read"),
        ({"train/n01/images/n01_5.JPEG": jpeg((0, 0, 0))[:300]}, "n01_5.JPEG is not a JPEG that can be read"),
        ({"val/images/val_5.JPEG": b"text" * 99}, "val/images/val_5.JPEG is not a JPEG that can be read"),
        ({"val/images/val_5.JPEG": jpeg((0, 0, 0), kind="PNG")}, "val_5.JPEG is not a JPEG that can be read"),
        ({"val/images/val_5.JPEG": jpeg((0, 0, 0), (64, 63))}, "val/images/val_5.JPEG is 64 x 63, not 64 x 64"),
        ({"train/n01/images/n01_5.JPEG": jpeg((0, 0, 0), (128, 128))}, "n01_5.JPEG is 128 x 128, not 64 x 64"),
        ({"train/n09/images/n09_0.JPEG": jpeg((0, 0, 0))}, "train/n09/images/n09_0.JPEG: class 'n09' is not in wnids"),
        ({"val/images/val_11.JPEG": jpeg((0, 0, 0))}, "val/images/val_11.JPEG is not in val/val_annotations.txt"),
        ({"val/val_annotations.txt": b"val_0.JPEG\tn09\t0\n"}, "val/val_annotations.txt, val_0.JPEG: class 'n09' is"),
        ({"val/val_annotations.txt": b"val_0.JPEG n03\n"}, "is not in val/val_annotations.txt"),
        ({"val/val_annotations.txt": b""}, "is not in val/val_annotations.txt"),
        ({"val/val_annotations.txt": b"\xff\xfe"}, "val/val_annotations.txt is not text"),
        ({"wnids.txt": b"n03\nn01\nn02\nn01\n"}, "wnids.txt lists 4 classes, 3 of them different"),
        ({"wnids.txt": b"\n"}, "wnids.txt lists 0 classes"),
        ({"wnids.txt": b"\xff\xfe"}, "wnids.txt is not text"),
        ({"wnids.txt": b"n03\nn01\nn02\nn04\nn05\n"}, "has no train/n04/images/*.JPEG, and so for 2 of the 5 classes"),
    ],
)  # fmt: skip
def test_what_is_unsound_is_refused_by_name(root: Path, packed: bool, changes: Files, words: str) -> None:
    files = layout() | changes
    if changes == {"val/val_annotations.txt": b"val_0.JPEG\tn09\t0\n"}:
        files = {n: c for n, c in files.items() if not re.search("val_([1-9]|10).JPEG", n)}
    place = put(root, files, packed)
    with pytest.raises(UserError) as caught:
        tiny.tinyimagenet(root)
    assert str(caught.value).startswith(str(place)) and words in str(caught.value)
    assert not list(root.glob("prepared/*.safetensors"))


@both
def test_a_part_without_pictures_is_refused_by_name(root: Path, packed: bool) -> None:
    for part, words in (
        ("train", "has no train/n03/images/*.JPEG, and so for 3 of the 3"),
        ("val", "has no val/images"),
    ):
        files = {n: c for n, c in layout().items() if not n.startswith(f"{part}/") or n.endswith(".txt")}
        shutil.rmtree(root)
        root.mkdir()
        place = put(root, files, packed)
        with pytest.raises(UserError, match=re.escape(f"{place} {words}")):
            tiny.tinyimagenet(root)


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c[:-30], "is damaged or cut short"),
        (lambda c: c[: len(c) // 2], "is damaged or cut short"),
        (lambda c: b"", "is damaged or cut short"),
        (lambda c: b"text" * 999, "is damaged or cut short"),
        (lambda c: flip(c, c.index(b"\xff\xd8\xff") + 100), "is damaged at tiny-imagenet-200/train/n03/images/n03_0."),
        (lambda c: c.replace(b"/wnids.txt", b"/wnidz.txt"), "has no tiny-imagenet-200/wnids.txt"),
        (lambda c: c.replace(b"imagenet-200/", b"imagenet-201/"), "has no tiny-imagenet-200/wnids.txt"),
        (lambda c: c.replace(b"/val_annotations.txt", b"/val_annotationz.txt"), "has no tiny-imagenet-200/val/val_ann"),
    ],
)  # fmt: skip
def test_damaged_archives_are_refused_by_name(root: Path, change: Callable[[bytes], bytes], words: str) -> None:
    put(root, layout(), packed=True)
    archive = root / f"{TOP}.zip"
    archive.write_bytes(change(archive.read_bytes()))
    with pytest.raises(UserError, match=re.escape(f"{archive} {words}")):
        tiny.tinyimagenet(root)


def test_an_encrypted_archive_is_refused_by_name(root: Path) -> None:
    put(root, layout(), packed=True)
    archive = root / f"{TOP}.zip"
    content = bytearray(archive.read_bytes())
    content[6] |= 1  # the flag of the first file, here and in the directory at the end
    content[content.index(b"PK\1\2") + 8] |= 1
    archive.write_bytes(content)
    with pytest.raises(UserError, match=f"{archive} is damaged at {TOP}/wnids.txt .*encrypted"):
        tiny.tinyimagenet(root)


def test_files_that_cannot_be_read_are_refused_by_name(root: Path) -> None:
    place = put(root, layout(), packed=False)
    lists = tiny.find_files(root)
    (place / "train" / "n01" / "images" / "n01_3.JPEG").unlink()
    (place / "train" / "n01" / "images" / "n01_3.JPEG").mkdir()
    with pytest.raises(UserError, match="n01_3.JPEG cannot be read .Is a directory.; make it readable"):
        tiny.read_files(lists)
    with pytest.raises(UserError, match="gone.zip cannot be read .No such file"):
        tiny.read_files([root / "gone.zip"])


def test_nothing_of_an_archive_is_written_anywhere(root: Path, tmp_path: Path) -> None:
    put(root, layout(), packed=True)
    link = zipfile.ZipInfo(f"{TOP}/train/n01")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(root / f"{TOP}.zip", "a") as archive:
        archive.writestr("../evil", b"evil")
        archive.writestr(str(tmp_path / "absolute"), b"evil")
        archive.writestr(f"{TOP}/train/../../evil/images/x.JPEG", b"evil")
        archive.writestr(link, str(tmp_path))
    before = tree(tmp_path)
    assert len(tiny.tinyimagenet(root).x) == 36
    assert all(path.startswith(str(root / "prepared")) for path in tree(tmp_path) - before)


def test_a_link_in_an_archive_is_not_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.JPEG").write_bytes(jpeg((0, 0, 0)))
    files = layout()
    del files["val/images/val_3.JPEG"]
    place = put(root, files, packed=True)
    link = zipfile.ZipInfo(f"{TOP}/val/images/val_3.JPEG")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(root / f"{TOP}.zip", "a") as archive:
        archive.writestr(link, str(tmp_path / "outside.JPEG"))
    with pytest.raises(UserError, match=f"{place}/val/images/val_3.JPEG is not a JPEG"):
        tiny.tinyimagenet(root)


def test_a_name_twice_in_an_archive_is_one_picture(root: Path) -> None:
    put(root, layout(), packed=True)
    with zipfile.ZipFile(root / f"{TOP}.zip", "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(f"{TOP}/val/images/val_3.JPEG", jpeg((80, 120, 200)))
    d = tiny.tinyimagenet(root)
    assert len(d.test_x) == 11 and colours(d.test_x)[3] == (4, 2, 1)


def test_names_sort_by_their_numbers() -> None:
    names = ["a_9", "a_10", "a_09", "b_1", "a_100", "a_" + "9" * 9999]
    assert sorted(names, key=tiny.natural) == ["a_09", "a_9", "a_10", "a_100", "a_" + "9" * 9999, "b_1"]


# --- prepared once


def test_what_was_prepared_is_mapped_and_not_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, layout(), packed=True)
    first = tiny.tinyimagenet(root)
    monkeypatch.setattr(tiny, "read_files", lambda files: pytest.fail("it was read again"))
    again = tiny.tinyimagenet(root)
    assert torch.equal(first.x, again.x) and again.classes == 3 and again.mean == first.mean
    assert str(root / "prepared" / "tinyimagenet-v1.safetensors") in Path("/proc/self/maps").read_text()


def test_ranks_that_start_together_prepare_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, layout(), packed=False)
    real, reads = tiny.read_files, []

    def read_files(files: list[Path]) -> Any:
        reads.append(1)
        time.sleep(0.2)
        return real(files)

    monkeypatch.setattr(tiny, "read_files", read_files)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: tiny.tinyimagenet(root), range(4)))
    assert len(reads) == 1 and all(torch.equal(arrays.x, found[0].x) for arrays in found)


# --- the real pictures


@pytest.fixture(scope="module")
def real() -> Arrays:
    return tiny.tinyimagenet(tiny_root())


def original(name: str) -> Image.Image:
    with zipfile.ZipFile(tiny_archive()) as archive:
        return Image.open(io.BytesIO(archive.read(f"{TOP}/{name}")))


def test_every_class_has_its_pictures(real: Arrays) -> None:
    assert (tuple(real.x.shape), tuple(real.test_x.shape)) == ((8000, 3, 64, 64), (2000, 3, 64, 64))
    assert real.classes == 200
    assert real.y.bincount().tolist() == [40] * 200 and real.test_y.bincount().tolist() == [10] * 200
    assert "8,000 of 100,000 train" in real.note and "2,000 of 10,000 test" in real.note
    assert real.mean == pytest.approx((0.4802, 0.4481, 0.3975), abs=5e-3)  # of the full set, as others measured
    assert real.std == pytest.approx((0.2770, 0.2691, 0.2821), abs=5e-3)


def test_classes_are_in_the_order_of_the_list(real: Arrays) -> None:
    with zipfile.ZipFile(tiny_archive()) as archive:
        wnids = archive.read(f"{TOP}/wnids.txt").decode().split()
        notes = archive.read(f"{TOP}/val/val_annotations.txt").decode().splitlines()
    assert wnids != sorted(wnids) and len(wnids) == 200
    for c in (0, 1, 57, 199):
        for i in (0, 2, 10, 39):
            picture = original(f"train/{wnids[c]}/images/{wnids[c]}_{i}.JPEG").convert("RGB")
            assert np.array_equal(real.x[40 * c + i].permute(1, 2, 0), np.asarray(picture))
    wnid_of = {int(name.strip("val_.JPEG")): wnid for name, wnid, *_ in (line.split("\t") for line in notes)}
    assert [wnids[c] for c in real.test_y] == [wnid_of[i] for i in sorted(wnid_of)]
    for at, i in list(enumerate(sorted(wnid_of)))[::400]:
        assert np.array_equal(
            real.test_x[at].permute(1, 2, 0), np.asarray(original(f"val/images/val_{i}.JPEG").convert("RGB"))
        )


def test_grey_pictures_become_colour_ones(real: Arrays) -> None:
    """174 of the files are grey; a few others look it."""
    both = torch.cat([real.x, real.test_x])
    grey = int(((both[:, 0] == both[:, 1]) & (both[:, 1] == both[:, 2])).flatten(1).all(1).sum())
    assert 174 <= grey < 250


def test_the_folder_and_the_archive_are_alike(root: Path, real: Arrays) -> None:
    """On the first classes of the real data."""
    tiny_layout(root, unpacked=True)
    lists = root / TOP / "wnids.txt"
    kept = lists.read_text().split()[:5]
    lists.write_text("\n".join(kept))
    for folder in (root / TOP / "train").iterdir():
        if folder.name not in kept:
            shutil.rmtree(folder)
    for line in (root / TOP / "val" / "val_annotations.txt").read_text().splitlines():
        name, wnid, *_ = line.split("\t")
        if wnid not in kept:
            (root / TOP / "val" / "images" / name).unlink()
    d = tiny.tinyimagenet(root)
    assert torch.equal(d.x, real.x[:200]) and torch.equal(d.y, real.y[:200]) and d.classes == 5
    few = real.test_y < 5
    assert torch.equal(d.test_x, real.test_x[few]) and torch.equal(d.test_y, real.test_y[few])
