"""Data sets: what Arrays refuses, the generated digits and their cache, and finding, reading and fetching idx files."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import logging
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import need

from fedmpi.data import DATASETS, glyphs, load, vision
from fedmpi.data.arrays import Arrays, cache_folder, locked
from fedmpi.errors import UserError

REPO = Path(__file__).resolve().parents[1]
GOLDEN = ["5c01ab5c84ed951b", "94426ace4dd1031e", "60b0c92614bc667d", "69461ad596bb922a", "5d63357afba0da59"]


@pytest.fixture
def shared_mnist() -> Path:
    """The folder with MNIST/raw."""
    folder = Path(os.environ.get("FEDMPI_TEST_DATA", REPO.parent / "shared" / "data")) / "mnist"
    reason = f"no MNIST/raw is in {folder}; set FEDMPI_TEST_DATA to the folder that has mnist/MNIST/raw"
    need("data", (folder / "MNIST" / "raw").is_dir(), reason)
    return folder


@pytest.fixture(autouse=True)
def no_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the user's folders and settings out of every test."""
    for name in ("FEDMPI_DATA", "FEDMPI_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FEDMPI_CACHE", str(tmp_path / "cache"))


def small(**changes: Any) -> Arrays:
    """A sound data set of three samples, with changes."""
    x, y = torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1])
    return replace(Arrays("small", 2, x, y, x, y, (0.5,), (0.5,), torch.tensor([1, 0, 1])), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": 0}, "0 classes"),
        ({"x": torch.zeros(3, 1, 2, 2)}, "train images of torch.float32"),
        ({"test_x": torch.zeros(3, 2, 2, dtype=torch.uint8)}, r"test images of torch.uint8 \[3, 2, 2\]"),
        ({"y": torch.tensor([0, 1])}, "3 train images and 2 train labels"),
        ({"test_y": torch.tensor([0.0, 1, 1])}, "test labels of torch.float32"),
        ({"y": torch.tensor([0, 1, 2])}, "train labels from 0 to 2; it needs 0 to 1"),
        ({"test_y": torch.tensor([0, -1, 1])}, "test labels from -1 to 1"),
        ({"test_x": torch.zeros(3, 1, 2, 3, dtype=torch.uint8)}, "same image shape"),
        ({"mean": (0.1, 0.2)}, "each of 1 channels"),
        ({"std": (0.0,)}, "positive std"),
        ({"owner": torch.tensor([0, 1])}, "one a train sample"),
        ({"owner": torch.tensor([0, 2, 2])}, "with gaps"),
    ],
)
def test_arrays_refuses_what_does_not_fit(changes: dict[str, Any], words: str) -> None:
    assert small().classes == 2
    with pytest.raises(UserError, match=f"data set 'small' has .*{words}"):
        small(**changes)


def test_load_knows_its_names() -> None:
    with pytest.raises(UserError, match="unknown data set 'fmnst'; did you mean 'fmnist'"):
        load("fmnst", None)
    assert {"glyphs", "mnist", "fmnist"} <= set(DATASETS)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("FEDMPI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "fedmpi"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "fedmpi"
    assert vision.data_root(None) == tmp_path / ".cache" / "fedmpi" / "data"
    monkeypatch.setenv("FEDMPI_DATA", str(tmp_path / "data"))
    assert vision.data_root(None) == tmp_path / "data"
    assert vision.data_root(tmp_path) == tmp_path


# --- glyphs


@pytest.fixture(scope="module")
def default_glyphs(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    return glyphs.glyphs(tmp_path_factory.mktemp("glyphs"))


def few(cache: Path, **kw: Any) -> Arrays:
    return glyphs.glyphs(cache, **({"train": 300, "test": 50, "writers": 20} | kw))


def sha(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def test_glyphs_are_the_same_bytes_everywhere(default_glyphs: Arrays) -> None:
    d = default_glyphs
    assert d.owner is not None
    assert [sha(t)[:16] for t in (d.x, d.y, d.owner, d.test_x, d.test_y)] == GOLDEN


def test_glyphs_have_the_promised_shape(default_glyphs: Arrays) -> None:
    d = default_glyphs
    assert d.owner is not None
    assert (tuple(d.x.shape), tuple(d.test_x.shape)) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert d.y.bincount().tolist() == [6000] * 10
    assert d.test_y.bincount().tolist() == [1000] * 10
    sizes = d.owner.bincount()
    assert len(sizes) == 500
    assert sizes.max() > 2 * sizes.min()
    pixels = d.x.float() / 255
    assert (pixels.mean().item(), pixels.std().item()) == (
        pytest.approx(d.mean[0], abs=1e-4),
        pytest.approx(d.std[0], abs=1e-4),
    )


def test_a_writer_is_recognisable(default_glyphs: Arrays) -> None:
    d = default_glyphs
    assert d.owner is not None
    ink = d.x.float().mean(dim=(1, 2, 3))
    by_writer = torch.zeros(500).scatter_add_(0, d.owner, ink) / d.owner.bincount()
    within = (ink - by_writer[d.owner]).std()
    assert by_writer.std() > 0.5 * within, "writers differ about as much as samples do"


def test_glyphs_can_be_learned_but_not_by_a_mean_picture(default_glyphs: Arrays) -> None:
    d = default_glyphs
    x, test = d.x.float().flatten(1), d.test_x.float().flatten(1)
    mean = torch.stack([x[d.y == digit].mean(0) for digit in range(10)])
    accuracy = (torch.cdist(test, mean).argmin(1) == d.test_y).float().mean().item()
    assert 0.5 < accuracy < 0.85


def test_seed_and_sizes_matter_and_the_cache_does_not(tmp_path: Path) -> None:
    first, cached = few(tmp_path), few(tmp_path)
    assert first.owner is not None and cached.owner is not None
    content = [sha(d.x, d.y, d.test_x, d.test_y) for d in (first, cached, few(tmp_path, seed=1), few(tmp_path / "b"))]
    assert content[0] == content[1] == content[3] != content[2]
    assert torch.equal(first.owner, cached.owner)
    assert len(few(tmp_path, train=301).x) == 301
    assert len(first.owner.bincount()) == 20
    names = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(names) == 3 and all(f"-v{glyphs.VERSION}-" in name for name in names)


def test_cached_glyphs_are_mapped_private(tmp_path: Path) -> None:
    few(tmp_path)
    cached = few(tmp_path)
    before = cached.x.clone()
    cached.x.fill_(7)  # must not reach the file
    assert torch.equal(few(tmp_path).x, before)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert "glyphs-v" in maps.read_text()


def test_the_cache_file_can_be_shared_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        few(tmp_path)
    finally:
        os.umask(before)
    (path,) = tmp_path.glob("*.safetensors")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def damage_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        damage_middle,
        lambda path: path.write_bytes(path.read_bytes()[:-1000]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("not a safetensors file at all"),
    ],
    ids=["a bit", "cut", "empty", "text"],
)
def test_a_damaged_cache_is_drawn_again(tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    good = sha(few(tmp_path).x)
    (path,) = tmp_path.glob("*.safetensors")
    damage(path)
    assert sha(few(tmp_path).x) == good
    assert "again" in caplog.text
    caplog.clear()
    assert sha(few(tmp_path).x) == good
    assert not caplog.records, "the file was repaired"


def test_an_unwritable_cache_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")  # a folder below a file cannot be made, not even by root
    caplog.set_level(logging.WARNING)
    assert len(few(tmp_path / "file" / "cache").x) == 300
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "cannot keep the glyphs" in caplog.text


def test_ranks_that_start_together_draw_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    real = glyphs._draw

    def draw(*args: int) -> dict[str, torch.Tensor]:
        drawn.append(1)
        time.sleep(0.1)
        return real(*args)

    monkeypatch.setattr(glyphs, "_draw", draw)
    with ThreadPoolExecutor(4) as pool:
        found = {sha(d.x) for d in pool.map(lambda _: few(tmp_path), range(4))}
    assert len(found) == 1
    assert len(drawn) == 1
    assert not list(tmp_path.glob(".glyphs*")), "no temporary file is left"


@pytest.mark.parametrize(
    ("kw", "words"),
    [({"train": 0}, "train = 0"), ({"seed": -1}, "seed = -1"), ({"writers": 301}, "301 writers for 300")],
)
def test_glyphs_refuses_impossible_sizes(tmp_path: Path, kw: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        few(tmp_path, **kw)


def test_the_lock_tells_whether_another_wrote(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def wait() -> bool:
        with locked(path) as written:
            return written

    with ThreadPoolExecutor(1) as pool:
        with locked(path) as written:
            assert not written
            waiting = pool.submit(wait)
            time.sleep(0.1)
            assert not waiting.done()
            path.write_text("note")
        assert waiting.result(timeout=5)
    assert not wait()
    with locked(tmp_path / "no folder" / "lock") as written:
        assert not written


# --- idx files


def idx(array: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def contents(n: int = 6, m: int = 3) -> list[bytes]:
    """The four files of a tiny MNIST."""
    rng = np.random.default_rng(0)
    parts = []
    for count in (n, m):
        parts += [
            idx(rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)),
            idx(np.arange(count, dtype=np.uint8) % 10),
        ]
    return parts


def put(root: Path, packed: bool, folder: str = "MNIST") -> Path:
    """A tiny data set under root in torchvision's layout."""
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    for name, content in zip(vision.FILES, contents(), strict=True):
        (raw / f"{name}.gz").write_bytes(gzip.compress(content)) if packed else (raw / name).write_bytes(content)
    return raw


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_read_packed_or_not(tmp_path: Path, packed: bool) -> None:
    put(tmp_path, packed)
    d = load("mnist", str(tmp_path))
    assert (tuple(d.x.shape), d.y.tolist(), d.test_y.tolist()) == ((6, 1, 28, 28), [0, 1, 2, 3, 4, 5], [0, 1, 2])
    assert d.x.numpy().tobytes() == contents()[0][16:]
    assert d.test_x.numpy().tobytes() == contents()[2][16:]
    d.x.fill_(0)  # private memory: the file stays
    assert load("mnist", str(tmp_path)).x.numpy().tobytes() == contents()[0][16:]


def test_reading_needs_no_writing(tmp_path: Path) -> None:
    raw = put(tmp_path, packed=True)
    before = sorted(tmp_path.rglob("*"))
    for path in (raw, raw.parent, tmp_path):
        path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    load("mnist", str(tmp_path))
    for path in (tmp_path, raw.parent, raw):
        path.chmod(stat.S_IRWXU)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_root_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, packed=False)
    monkeypatch.setenv("FEDMPI_DATA", str(tmp_path))
    assert len(load("mnist", None).x) == 6


def test_fmnist_is_found_in_the_system_and_root_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = put(tmp_path / "system", packed=True)
    monkeypatch.setattr(vision, "FMNIST", vision.FMNIST._replace(system=raw))
    monkeypatch.setenv("FEDMPI_DATA", str(tmp_path / "root"))
    assert len(load("fmnist").x) == 6
    assert not (tmp_path / "root").exists()
    monkeypatch.setenv("FEDMPI_OFFLINE", "1")
    with pytest.raises(UserError, match="data set 'fmnist' is not under"):
        load("fmnist", str(tmp_path / "root"))  # who names a folder means that folder
    mine = put(tmp_path / "root", packed=False, folder="FashionMNIST")
    (mine / vision.FILES[0]).write_bytes(contents(n=2)[0])
    (mine / vision.FILES[1]).write_bytes(contents(n=2)[1])
    assert len(load("fmnist").x) == len(load("fmnist", str(tmp_path / "root")).x) == 2


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (0, lambda b: b[:-1], "announces 4704 bytes of data and holds 4703"),
        (0, lambda b: b + b"x", "holds 4705"),
        (1, lambda b: b"\1" + b[1:], "not an idx file of bytes .it begins with 01000801"),
        (2, lambda b: b[:10], "not an idx file"),
        (2, lambda b: b"", "t10k-images.*damaged or cut short|not an idx file"),
        (0, lambda b: idx(np.zeros((6, 27, 28), dtype=np.uint8)), r"\[6, 27, 28\], not images"),
        (3, lambda b: idx(np.zeros(4, dtype=np.uint8)), "one label of 0 to 9 for each of the 3 images"),
        (3, lambda b: idx(np.array([0, 1, 10], dtype=np.uint8)), "one label of 0 to 9"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_unsound_files_are_refused_by_name(tmp_path: Path, packed: bool, file: int, change: Any, words: str) -> None:
    path = put(tmp_path, packed) / (vision.FILES[file] + (".gz" if packed else ""))
    content = change(contents()[file])
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(UserError, match=words) as caught:
        load("mnist", str(tmp_path))
    assert path.name in str(caught.value)


@pytest.mark.parametrize("change", [lambda b: b[:-20], lambda b: b"no gzip", lambda b: b[:30] + b"\xff" * 20 + b[50:]])
def test_unsound_packing_is_refused_by_name(tmp_path: Path, change: Any) -> None:
    path = put(tmp_path, packed=True) / f"{vision.FILES[0]}.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match="train-images-idx3-ubyte.gz is damaged or cut short"):
        load("mnist", str(tmp_path))


# --- downloads


class FakeMNIST:
    """Stands for torchvision's class: writes the files slowly into the root it is given."""

    mirrors = ["http://127.0.0.1:9/"]
    calls: list[str] = []
    fails = False

    def __init__(self, root: str, download: bool) -> None:
        assert download
        self.calls.append(root)
        time.sleep(0.2)
        if self.fails:
            raise RuntimeError("Error downloading train-images:\nTried a mirror, got: nothing")
        put(Path(root), packed=False)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeMNIST]:
    """torchvision with a fake MNIST and servers that answer."""
    kind = type("FakeMNIST", (FakeMNIST,), {"calls": [], "fails": False})
    monkeypatch.setattr(vision, "import_torchvision", lambda: SimpleNamespace(datasets=SimpleNamespace(MNIST=kind)))
    monkeypatch.setattr(vision, "_probe", lambda urls: None)
    return kind


def test_ranks_that_start_together_download_once(tmp_path: Path, fake: type[FakeMNIST]) -> None:
    with ThreadPoolExecutor(4) as pool:
        sizes = [len(d.x) for d in pool.map(lambda _: load("mnist", str(tmp_path / "new")), range(4))]
    assert sizes == [6] * 4
    assert len(fake.calls) == 1
    assert fake.calls[0] != str(tmp_path / "new"), "fetched aside, then renamed"
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [".mnist.lock", "MNIST"]
    assert socket.getdefaulttimeout() is None


def test_ranks_that_start_together_fail_once(tmp_path: Path, fake: type[FakeMNIST]) -> None:
    fake.fails = True

    def attempt(_: int) -> str:
        with pytest.raises(UserError) as caught:
            load("mnist", str(tmp_path))
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        messages = list(pool.map(attempt, range(4)))
    assert len(fake.calls) == 1
    assert sum("Error downloading train-images)" in m for m in messages) == 1
    assert sum("failed in another process" in m for m in messages) == 3
    assert "\n" not in "".join(messages)
    attempt(0)
    assert len(fake.calls) == 2, "a later run tries again"


def test_offline_names_the_ways_out(tmp_path: Path, fake: type[FakeMNIST], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMPI_OFFLINE", "1")
    monkeypatch.setattr(vision, "FMNIST", vision.FMNIST._replace(system=None))
    with pytest.raises(
        UserError, match="data set 'fmnist' is not under .*OFFLINE.*dataset-fashion-mnist.*FashionMNIST/raw"
    ):
        load("fmnist", str(tmp_path))
    with pytest.raises(UserError, match="train-images-idx3-ubyte.*MNIST/raw"):
        load("mnist", str(tmp_path))
    assert not fake.calls
    assert not list(tmp_path.iterdir())


def test_a_root_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path, fake: type[FakeMNIST]) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be made"):
        load("mnist", str(tmp_path / "file" / "root"))
    assert not fake.calls


def test_a_silent_network_is_given_up_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        start = time.monotonic()
        with pytest.raises(ConnectionError, match="no answer|timed out"):
            vision._probe([f"http://127.0.0.1:{silent.getsockname()[1]}/"] * 9, seconds=0.3)
        assert time.monotonic() - start < 2


def test_a_closed_network_is_told_by_its_reason() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionError, match="refused"):
            vision._probe([f"http://127.0.0.1:{unused.getsockname()[1]}/"], seconds=5)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def mirror(shared_mnist: Path) -> Iterator[str]:
    """A server of this machine that has the four packed files of MNIST."""
    handler = functools.partial(Quiet, directory=str(shared_mnist / "MNIST" / "raw"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_torchvision_downloads_into_a_new_root(tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision.import_torchvision().datasets.MNIST, "mirrors", [mirror])
    assert load("mnist", str(tmp_path)).x.shape == (60_000, 1, 28, 28)
    assert sorted(p.name for p in (tmp_path / "MNIST" / "raw").iterdir()) == sorted(vision.FILES)
    monkeypatch.setenv("FEDMPI_OFFLINE", "1")
    assert len(load("mnist", str(tmp_path)).test_x) == 10_000


# --- the real data


def test_mnist_is_mnist(shared_mnist: Path) -> None:
    d = load("mnist", str(shared_mnist))
    assert d.y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert d.test_y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    pixels = d.x.float() / 255
    assert (pixels.mean().item(), pixels.std().item()) == (
        pytest.approx(0.1307, abs=1e-4),
        pytest.approx(0.3081, abs=1e-4),
    )
    assert (d.mean, d.std) == ((0.1307,), (0.3081,))


def test_fmnist_of_debian_is_found() -> None:
    assert vision.FMNIST.system is not None
    need("data", vision.FMNIST.system.is_dir(), "the Debian package dataset-fashion-mnist is not installed")
    d = load("fmnist")
    assert d.y.bincount().tolist() == [6000] * 10
    pixels = d.x.float() / 255
    assert (pixels.mean().item(), pixels.std().item()) == (
        pytest.approx(d.mean[0], abs=1e-4),
        pytest.approx(d.std[0], abs=1e-4),
    )


# --- torchvision on both kinds of machine


def python(code: str) -> str:
    """What a fresh interpreter prints for the code."""
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torchvision_imports_in_a_fresh_process() -> None:
    code = """
from fedmpi.data.vision import import_torchvision
tv = import_torchvision()
assert import_torchvision() is tv
print(tv.datasets.MNIST.__name__)
"""
    assert python(code) == "MNIST"


def test_torchvision_imports_after_a_plain_import_that_worked_or_failed() -> None:
    code = """
try:
    import torchvision as plain
except RuntimeError:
    plain = None
from fedmpi.data.vision import import_torchvision
tv = import_torchvision()
assert plain is None or plain is tv
print(tv.datasets.FashionMNIST.__name__)
"""
    assert python(code) == "FashionMNIST"


def test_operators_that_are_there_are_not_declared_again() -> None:
    code = """
import torch
from fedmpi.data import vision
healthy = torch.library.Library("torchvision", "FRAGMENT")
def load_operators():
    for name in ("nms", "qnms"):
        healthy.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
vision._load_operators = load_operators
vision.import_torchvision()
print(len(vision._declared))
"""
    assert python(code) == "0"
