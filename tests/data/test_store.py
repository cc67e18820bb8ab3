"""Prepared data sets: written once and by a rename, checked when read, made again when damaged or outdated, and mapped
by all processes of a machine."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from fedmpi.data import store
from fedmpi.data.store import Source, Stored, Tensors, cache_folder, data_root, digest, load, locked, moments
from fedmpi.errors import UserError

SAMPLES = 40


@pytest.fixture(autouse=True)
def no_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the user's folders and settings out of every test."""
    for name in ("FEDMPI_DATA", "FEDMPI_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FEDMPI_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data root with the toy's one file: a byte that all its pixels have."""
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "toy.bin").write_bytes(b"\x05")
    return folder


def toy_tensors(value: int) -> Tensors:
    """Images of one value, but for the first, which marks where an image begins."""
    x = torch.full((SAMPLES, 1, 2, 2), value, dtype=torch.uint8)
    x[:, 0, 0, 0] = torch.arange(SAMPLES, dtype=torch.uint8)
    y = torch.arange(SAMPLES) % 3
    return {"x": x, "y": y, "test_x": x[:7].clone(), "test_y": y[:7].clone()}


def read_toy(files: list[Path]) -> Tensors:
    """The toy from its file; a line in `reads`, next to it, records every reading."""
    with (files[0].parent / "reads").open("a") as reads:
        reads.write("once\n")
    return toy_tensors(files[0].read_bytes()[0])


def find_toy(base: Path) -> list[Path]:
    return [base / "toy.bin"] if (base / "toy.bin").is_file() else []


TOY = Source("toy", 1, read_toy, find_toy, wanted="put toy.bin into {root}")


def slow_toy(files: list[Path]) -> Tensors:
    time.sleep(0.7)
    return read_toy(files)


def failing_toy(files: list[Path]) -> Tensors:
    time.sleep(0.7)
    with (files[0].parent / "reads").open("a") as reads:
        reads.write("once\n")
    raise UserError(f"{files[0]} is spoilt, says process {os.getpid()}")


def reads(root: Path) -> int:
    """How often the toy was read from its file."""
    return len((root / "reads").read_text().splitlines()) if (root / "reads").exists() else 0


def prepared(root: Path) -> Path:
    return root / "prepared" / "toy-v1.safetensors"


def value_of(stored: Stored) -> int:
    return int(stored.tensors["x"][0, 0, 1, 1])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# --- once, and then from the file


def test_a_source_is_read_once_and_then_mapped_from_its_file(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, again = load(TOY, root), load(TOY, root)
    assert reads(root) == 1 and first.path == again.path == prepared(root)
    for stored in (first, again):
        assert stored.tensors.keys() == {"x", "y", "test_x", "test_y"}
        assert all(torch.equal(stored.tensors[name], tensor) for name, tensor in toy_tensors(5).items())
        assert stored.sources == ["toy.bin"]
    assert (first.mean, first.std) == (again.mean, again.std) == moments(toy_tensors(5)["x"])
    assert sorted(path.name for path in (root / "prepared").iterdir()) == [".toy.lock", "toy-v1.safetensors"]
    assert not warnings(caplog)


def test_what_is_prepared_needs_its_source_no_more(root: Path) -> None:
    load(TOY, root)
    (root / "toy.bin").unlink()
    stored = load(TOY, root)
    assert value_of(stored) == 5 and stored.sources == ["toy.bin"] and reads(root) == 1


def test_another_version_or_name_is_another_file(root: Path) -> None:
    load(TOY, root), load(replace(TOY, version=2), root), load(replace(TOY, name="ball"), root)
    names = {path.name for path in (root / "prepared").glob("*.safetensors")}
    assert names == {"toy-v1.safetensors", "toy-v2.safetensors", "ball-v1.safetensors"} and reads(root) == 3


def test_stored_tensors_become_arrays_with_what_is_said_about_them(root: Path) -> None:
    stored = load(TOY, root)
    measured, shown = stored.arrays("toy", 3), stored.arrays("toy", 4, mean=(0.5,), std=(0.25,), augment="flip")
    assert (measured.mean, measured.std, measured.classes) == (stored.mean, stored.std, 3)
    assert (shown.mean, shown.std, shown.classes, shown.augment) == ((0.5,), (0.25,), 4, "flip")
    assert torch.equal(measured.test_x, toy_tensors(5)["test_x"])


def test_the_mapping_is_private(root: Path) -> None:
    stored = load(TOY, root)
    before = prepared(root).read_bytes()
    stored.tensors["x"].fill_(7)
    assert prepared(root).read_bytes() == before and value_of(load(TOY, root)) == 5
    maps = Path("/proc/self/maps")
    if maps.exists():
        (line, *_) = [text for text in maps.read_text().splitlines() if text.endswith(str(prepared(root)))]
        assert line.split()[1].endswith("p"), "p: private; s would be shared"


@pytest.mark.parametrize(("umask", "mode"), [(0o027, 0o640), (0o002, 0o664), (0o077, 0o600)])
def test_the_prepared_file_can_be_shared_as_the_umask_says(root: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        load(TOY, root)
    finally:
        os.umask(before)
    assert stat.S_IMODE(prepared(root).stat().st_mode) == mode


def test_nobody_sees_half_of_a_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a slow writer writes, the file is not there; once it is there, it is whole."""

    def slow(tensors: Tensors, path: Path, about: dict[str, str]) -> None:
        content = safetensors.torch.save(tensors, about)
        with open(path, "wb", buffering=0) as file:
            for start in range(0, len(content), len(content) // 20):
                file.write(content[start : start + len(content) // 20])
                time.sleep(0.01)

    seen: list[bool] = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            if prepared(root).exists():
                seen.append(store.read_prepared(prepared(root), TOY, root) is not None)
            else:
                asides = (root / "prepared").glob(".toy-v1*") if (root / "prepared").exists() else []
                with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                    watched.extend(path.stat().st_ino for path in asides)
            time.sleep(0.001)

    watched: list[int] = []
    monkeypatch.setattr(safetensors.torch, "save_file", slow)
    reader = threading.Thread(target=poll)
    reader.start()
    load(TOY, root)
    time.sleep(0.05)
    stop.set()
    reader.join(10)
    assert seen and all(seen), "whatever was seen was whole"
    assert len(watched) > 5, "the reader looked while the file was being written"
    assert set(watched) == {prepared(root).stat().st_ino}, "and what was written is what was renamed"
    assert not list((root / "prepared").glob(".toy-v1*")), "what was written aside is gone"


def test_a_failed_write_is_reported_and_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Tensors, path: Path, about: dict[str, str]) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", full)
        with pytest.raises(UserError, match=r"toy-v1.safetensors cannot be written \(.*No space left.*; make room"):
            load(TOY, root)
    assert [path.name for path in (root / "prepared").iterdir()] == [".toy.lock"]
    assert value_of(load(TOY, root)) == 5, "and it works when there is room"


def test_a_disk_that_returns_other_bytes_is_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = safetensors.torch.save_file

    def rotten(tensors: Tensors, path: Path, about: dict[str, str]) -> None:
        save(tensors, path, about)
        flip_a_bit(Path(path))

    monkeypatch.setattr(safetensors.torch, "save_file", rotten)
    with pytest.raises(UserError, match="toy-v1.safetensors cannot be read back; is the disk sound"):
        load(TOY, root)


# --- damaged and outdated files


def flip_a_bit(path: Path) -> None:
    """Of the last byte: that is of a tensor, not of the header."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def foreign(path: Path) -> None:
    """Somebody else's sound file: the same tensors, without our metadata."""
    safetensors.torch.save_file(toy_tensors(9), path)


def renamed_tensor(path: Path) -> None:
    """The metadata of the sound file around tensors that have changed their names."""
    with safetensors.safe_open(path, "pt") as file:
        about = file.metadata()
    tensors = safetensors.torch.load_file(path)
    tensors["x"], tensors["test_x"] = tensors["test_x"].clone(), tensors["x"].clone()
    safetensors.torch.save_file(tensors, path, about)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a bit": flip_a_bit,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a safetensors file at all, but long enough to have a header"),
    "a huge header": lambda path: path.write_bytes(b"\xff" * 200),
    "foreign": foreign,
    "renamed tensors": renamed_tensor,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_reported_and_rebuilt(
    root: Path, damage: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    good = load(TOY, root).tensors
    good = {name: tensor.clone() for name, tensor in good.items()}
    damage(prepared(root))
    stored = load(TOY, root)
    assert digest(stored.tensors) == digest(good) and reads(root) == 2
    (said,) = warnings(caplog)
    assert str(prepared(root)) in said and said.endswith("preparing it again")
    caplog.clear()
    assert digest(load(TOY, root).tensors) == digest(good) and reads(root) == 2
    assert not caplog.records, "the file was repaired"


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_without_its_source_is_refused_by_name(root: Path, damage: Callable[[Path], Any]) -> None:
    load(TOY, root)
    damage(prepared(root))
    (root / "toy.bin").unlink()
    left = prepared(root).read_bytes()
    with pytest.raises(UserError) as caught:
        load(TOY, root)
    said = str(caught.value)
    assert said.startswith(f"data set 'toy' is not under {root}") and f"{prepared(root)}, is damaged" in said
    assert f"put toy.bin into {root}" in said and "\n" not in said
    assert prepared(root).read_bytes() == left, "whoever wants to rescue it can"


def new_content(path: Path) -> None:
    stamp = path.stat()
    path.write_bytes(b"\x06 and more")  # another size at the same time
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def new_time(path: Path) -> None:
    path.write_bytes(b"\x06")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("change", [new_content, new_time])
def test_a_source_that_has_changed_is_prepared_again(
    root: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert value_of(load(TOY, root)) == 5
    change(root / "toy.bin")
    assert value_of(load(TOY, root)) == 6 and reads(root) == 2
    assert "was prepared from other files than are there now; preparing it again" in caplog.text
    caplog.clear()
    assert value_of(load(TOY, root)) == 6 and reads(root) == 2 and not caplog.records


def test_other_files_of_the_same_data_set_are_another_source(root: Path) -> None:
    def find(base: Path) -> list[Path]:
        return sorted(base.glob("toy*.bin"))

    load(replace(TOY, find=find), root)
    os.link(root / "toy.bin", root / "toy2.bin")
    assert load(replace(TOY, find=find), root).sources == ["toy.bin", "toy2.bin"] and reads(root) == 2


def test_the_digest_depends_on_names_kinds_shapes_and_content() -> None:
    x = torch.arange(8, dtype=torch.uint8)
    others: list[Tensors] = [
        {"x": x, "y": x + 1},
        {"x": x + 1, "y": x},
        {"x": x.view(2, 4), "y": x + 1},
        {"x": x.view(torch.int8), "y": x + 1},
        {"x": x},
        {"z": x, "y": x + 1},
    ]
    assert len({digest(tensors) for tensors in others}) == len(others)
    assert digest({"x": x, "y": x + 1}) == digest({"y": x + 1, "x": x})
    turned = torch.arange(6).view(2, 3).t()
    assert digest({"x": turned}) == digest({"x": turned.contiguous()})


# --- where it is kept


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("FEDMPI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "fedmpi"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "fedmpi"
    assert data_root(None) == tmp_path / ".cache" / "fedmpi" / "data"
    monkeypatch.setenv("FEDMPI_DATA", str(tmp_path / "data"))
    assert data_root(None) == tmp_path / "data"
    assert data_root(tmp_path) == tmp_path
    monkeypatch.setenv("FEDMPI_DATA", "~/data")
    assert data_root(None) == tmp_path / "data"


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """With a folder that nobody may write to: root could, all the same."""
    folder.chmod(0o555)
    yield
    folder.chmod(0o755)


def test_a_root_that_may_not_be_written_is_left_alone_also_by_root(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = sorted(root.iterdir())
    source = replace(TOY, read=lambda files: toy_tensors(files[0].read_bytes()[0]))
    with read_only(root):
        first, again = load(source, root), load(source, root)
    assert sorted(root.iterdir()) == before
    assert first.path == again.path and first.path is not None and first.path.is_relative_to(tmp_path / "cache")
    assert value_of(again) == 5 and not warnings(caplog)


def test_two_roots_that_may_not_be_written_have_a_file_each(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "toy.bin").write_bytes(b"\x08")
    source = replace(TOY, read=lambda files: toy_tensors(files[0].read_bytes()[0]))
    with read_only(root), read_only(other):
        found = [load(source, folder) for folder in (root, other, root, other)]
    assert [value_of(stored) for stored in found] == [5, 8, 5, 8] and not warnings(caplog)
    assert found[0].path == found[2].path != found[1].path == found[3].path


def test_where_nothing_can_be_written_every_process_reads_for_itself(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")  # a folder below a file cannot be made, not even by root
    monkeypatch.setenv("FEDMPI_CACHE", str(tmp_path / "file" / "cache"))
    source = replace(TOY, read=lambda files: toy_tensors(files[0].read_bytes()[0]))
    with read_only(root):
        stored = load(source, root)
    assert (value_of(stored), stored.path, stored.sources) == (5, None, ["toy.bin"])
    assert (stored.mean, stored.std) == moments(stored.tensors["x"])
    (said,) = warnings(caplog)
    assert said.startswith("no writable folder for the prepared 'toy'")
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_root_that_is_not_there_is_made_when_something_is_written(tmp_path: Path) -> None:
    drawn = Source("toy", 1, lambda _: toy_tensors(3), generated=True)
    stored = load(drawn, tmp_path / "new")
    assert stored.path == prepared(tmp_path / "new") and stored.sources == [] and value_of(stored) == 3


def test_a_root_that_is_not_there_is_not_made_for_nothing(tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="data set 'toy' is not under .*new, and there is no place to download it from"):
        load(TOY, tmp_path / "new")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("source", [TOY, Source("toy", 1, lambda _: toy_tensors(3), generated=True)])
def test_a_root_in_a_folder_that_is_not_there_is_a_slip(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"--data_root .*/no/such: there is no such folder; give one that is there"):
        load(source, tmp_path / "no" / "such")
    monkeypatch.setenv("FEDMPI_DATA", str(tmp_path / "no" / "such"))
    with pytest.raises(UserError, match=r"FEDMPI_DATA .*/no/such: there is no such folder"):
        load(source)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="--data_root .*file"):
        load(Source("toy", 1, lambda _: toy_tensors(3), generated=True), tmp_path / "file")


def test_an_unreadable_root_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = Path.stat

    def forbidden(self: Path, **how: Any) -> os.stat_result:
        if self.is_relative_to(tmp_path / "secret"):
            raise PermissionError(13, "Permission denied", str(self))
        return look(self, **how)

    monkeypatch.setattr(Path, "stat", forbidden)
    with pytest.raises(UserError, match="--data_root .*secret/data"):
        load(TOY, tmp_path / "secret" / "data")


def test_a_missing_source_that_can_be_fetched_is_fetched_and_then_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Path] = []

    def fetch(base: Path) -> None:
        fetched.append(base)
        (base / "toy.bin").write_bytes(b"\x0b")

    source = replace(TOY, fetch=fetch)
    monkeypatch.setenv("FEDMPI_OFFLINE", "1")
    with pytest.raises(
        UserError, match="FEDMPI_OFFLINE forbids a download; put toy.bin into .*run once where there is"
    ):
        load(source, tmp_path / "new")
    monkeypatch.delenv("FEDMPI_OFFLINE")
    assert [value_of(load(source, tmp_path / "new")) for _ in range(2)] == [11, 11]
    assert fetched == [tmp_path / "new"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionError("no answer:\nsecond line"), r"and the download failed \(no answer\)"),
        (RuntimeError(""), r"and the download failed \(RuntimeError\)"),
        (UserError("torchvision is not there"), "^torchvision is not there$"),
    ],
)
def test_a_failed_download_is_a_one_line_error(root: Path, error: Exception, words: str) -> None:
    def fetch(base: Path) -> None:
        raise error

    (root / "toy.bin").unlink()
    with pytest.raises(UserError, match=words) as caught:
        load(replace(TOY, fetch=fetch), root)
    assert "\n" not in str(caught.value)


# --- several at once


def test_threads_that_start_together_prepare_once(root: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: load(replace(TOY, read=slow_toy), root), range(4)))
    assert reads(root) == 1 and {stored.path for stored in found} == {prepared(root)}


def meet(together: Any) -> None:
    """Keep what the processes of a pool meet at."""
    global MEETING
    MEETING = together


def load_together(source: Source, root: Path) -> tuple[str, bool, str]:
    """What a process gets that loads together with others: the content, whether the file is mapped, the complaint."""
    MEETING.wait(60)
    try:
        stored = load(source, root)
    except UserError as error:
        return "", False, str(error)
    mapped = any(line.endswith(str(prepared(root))) for line in Path("/proc/self/maps").read_text().splitlines())
    return digest(stored.tensors), mapped, ""


def in_processes(count: int, source: Source, root: Path) -> list[tuple[str, bool, str]]:
    """What `load_together` returns in so many processes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(count, meet, (context.Barrier(count),)) as pool:
        return pool.starmap_async(load_together, [(source, root)] * count, chunksize=1).get(timeout=90)


@pytest.mark.processes
def test_processes_that_start_together_prepare_once_and_map_the_same_file(root: Path) -> None:
    found = in_processes(3, replace(TOY, read=slow_toy), root)
    assert found == [(digest(toy_tensors(5)), True, "")] * 3
    assert reads(root) == 1, "the others waited for it"


@pytest.mark.processes
def test_what_stopped_one_process_stops_those_that_waited_in_the_same_words(root: Path) -> None:
    found = in_processes(3, replace(TOY, read=failing_toy), root)
    assert reads(root) == 1
    (said,) = {complaint for _, _, complaint in found}
    assert said.startswith(f"{root / 'toy.bin'} is spoilt, says process ") and "\n" not in said
    assert value_of(load(TOY, root)) == 5, "who comes later tries for himself"


def test_who_comes_after_a_failure_tries_again(root: Path) -> None:
    for times in (1, 2):
        with pytest.raises(UserError, match="is spoilt"):
            load(replace(TOY, read=failing_toy), root)
        assert reads(root) == times


def test_a_waiter_for_two_failures_gets_a_one_line_error(root: Path) -> None:
    """The lock is not fair: one that came later may have had it first, and have failed as well."""
    lock = root / "prepared" / ".toy.lock"
    lock.parent.mkdir()

    def wait() -> str:
        with pytest.raises(UserError) as caught:
            load(TOY, root)
        return str(caught.value)

    with ThreadPoolExecutor(1) as pool:
        with locked(lock):
            waiting = pool.submit(wait)
            until(lambda: held_by(lock) > 1)
            lock.write_text("the file is spoilt\nthe file is spoilt\n")
        assert waiting.result(timeout=30) == "the file is spoilt"


def held_by(path: Path) -> int:
    """How many handles of this process are open on a file."""
    links = (entry for entry in Path("/proc/self/fd").iterdir())
    count = 0
    for link in links:
        with contextlib.suppress(OSError):
            count += os.path.samefile(os.readlink(link), path)
    return count


def until(true: Callable[[], bool]) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
    time.sleep(0.05)


def test_the_lock_returns_what_another_wrote(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def wait() -> str:
        with locked(path) as written:
            return written

    with ThreadPoolExecutor(1) as pool:
        with locked(path) as written:
            assert written == ""
            waiting = pool.submit(wait)
            until(lambda: held_by(path) > 1)
            assert not waiting.done()
            path.write_text("note")
        assert waiting.result(timeout=30) == "note"
    assert wait() == "", "what was written before is old"
    with locked(tmp_path / "no folder" / "lock") as written:
        assert written == ""


# --- mean and deviation


@pytest.mark.parametrize(("count", "channels"), [(1, 1), (7, 3), (2500, 2)])
def test_moments_are_those_of_double_arithmetic(count: int, channels: int) -> None:
    x = torch.randint(0, 256, (count, channels, 5, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    x[:, 0] //= 3  # the channels differ
    scaled = x.numpy().astype(np.float64) / 255
    mean, std = moments(x)
    assert mean == pytest.approx(scaled.mean((0, 2, 3)), rel=1e-12)
    assert std == pytest.approx(scaled.std((0, 2, 3)), rel=1e-12)
    assert len(mean) == len(std) == channels and all(isinstance(v, float) for v in (*mean, *std))


def test_moments_of_one_value_and_of_two() -> None:
    assert moments(torch.full((3, 1, 2, 2), 255, dtype=torch.uint8)) == ((1.0,), (0.0,))
    half = torch.tensor([0, 255], dtype=torch.uint8).repeat(50).view(25, 1, 2, 2)
    assert moments(half) == ((0.5,), (0.5,))


@pytest.mark.parametrize("x", [torch.zeros(3, 8, dtype=torch.uint8), torch.zeros(3, 1, 2, 2)])
def test_what_are_no_images_have_no_moments(x: torch.Tensor) -> None:
    assert moments(x) == ((), ())


def test_what_a_killed_process_left_is_cleared_away(root: Path) -> None:
    folder = root / "prepared"
    folder.mkdir()
    old, young = (folder / f".toy-v1.safetensors.{word}" for word in ("old", "young"))
    for left in (old, young):
        left.write_bytes(b"half")
    os.utime(old, (0, 0))
    load(TOY, root)
    assert not old.exists() and young.exists(), "another may be writing it"


def test_copies_of_a_root_on_several_nodes_do_not_replace_each_others_file(root: Path) -> None:
    root.chmod(0o555)
    first = load(TOY, root).path
    os.utime(root / "toy.bin", ns=(1, 1))  # the same bytes at another time, as on another node
    second = load(TOY, root).path
    assert first != second and first is not None and first.exists() and second is not None
    root.chmod(0o755)


def test_the_error_without_a_home_names_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEDMPI_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(UserError, match="no home folder; set FEDMPI_CACHE"):
        cache_folder()
