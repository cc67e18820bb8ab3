"""Data sets: what Arrays takes and refuses, the generated digits, and finding, reading and fetching idx files."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import need
from realdata import shared_data

from fedmpi.data import DATASETS, files, find_data, load
from fedmpi.data.arrays import Arrays
from fedmpi.data.objective import CLASSIFY, NEXT, REGRESS
from fedmpi.data.sets import glyphs, vision
from fedmpi.data.store import data_root
from fedmpi.errors import UserError
from fedmpi.plugins.torchvision import import_torchvision

REPO = Path(__file__).resolve().parents[2]
GOLDEN = ["5c01ab5c84ed951b", "94426ace4dd1031e", "60b0c92614bc667d", "69461ad596bb922a", "5d63357afba0da59"]


@pytest.fixture
def shared_mnist() -> Path:
    """The folder with MNIST/raw."""
    folder = shared_data() / "mnist"
    need("data", (folder / "MNIST" / "raw").is_dir(), f"no MNIST/raw is in {folder}")
    return folder


@pytest.fixture
def mnist_root(shared_mnist: Path, tmp_path: Path) -> Path:
    """A root with MNIST that may be written."""
    raw = tmp_path / "root" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in vision.FILES:
        (raw / f"{name}.gz").symlink_to(shared_mnist / "MNIST" / "raw" / f"{name}.gz")
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def no_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the user's folders and settings out of every test."""
    for name in ("FEDMPI_DATA", "FEDMPI_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FEDMPI_CACHE", str(tmp_path / "cache"))


# --- arrays


def small(**changes: Any) -> Arrays:
    """A sound data set of three images, with changes."""
    x, y = torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1])
    return replace(Arrays("small", 2, x, y, x, y, (0.5,), (0.5,), torch.tensor([1, 0, 1])), **changes)


def lines(**changes: Any) -> Arrays:
    """A sound data set of three sequences, with changes."""
    x, y = torch.tensor([[0, 1], [2, 3], [3, 0]], dtype=torch.uint8), torch.tensor([0, 1, 1])
    return replace(Arrays("lines", 2, x, y, x, y, tokens=4), **changes)


def numbers(**changes: Any) -> Arrays:
    """A sound data set of three samples with numbers to predict, with changes."""
    x, y = torch.arange(6.0).view(3, 2), torch.tensor([0.5, 1.0, -1.0])
    return replace(Arrays("numbers", 0, x, y, x, y), **changes)


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (small, {"classes": 0}, "0 classes; it needs at least one"),
        (
            small,
            {"x": torch.zeros(3, 1, 2, 2)},
            r"train images torch.float32 \[3, 1, 2, 2\] and test images torch.uint8 .*same shape and kind",
        ),
        (small, {"test_x": torch.zeros(3, 2, 2, dtype=torch.uint8)}, r"test images of torch.uint8 \[3, 2, 2\]"),
        (small, {"x": torch.zeros(3, 1, 2, 2, dtype=torch.float64)}, "train images of torch.float64"),
        (small, {"x": torch.zeros(3, 1, 2, 2, dtype=torch.int64)}, "train images of torch.int64"),
        (small, {"x": torch.zeros(3, dtype=torch.uint8)}, r"train samples of torch.uint8 \[3\]"),
        (small, {"y": torch.tensor([0, 1])}, "3 train images and 2 train labels"),
        (
            small,
            {"x": torch.zeros(0, 1, 2, 2, dtype=torch.uint8), "y": torch.zeros(0, dtype=torch.int64)},
            "0 train images and 0 train labels; it needs one label each, and at least one",
        ),
        (small, {"test_y": torch.tensor([0.0, 1, 1])}, "test labels of torch.float32"),
        (small, {"y": torch.tensor([0, 1, 1], dtype=torch.int32)}, r"train labels of torch.int32 .*torch.int64 \[n\]"),
        (small, {"y": torch.zeros(3, 1, 1, dtype=torch.int64)}, r"train labels of torch.int64 \[3, 1, 1\]"),
        (small, {"y": torch.tensor([0, 1, 2])}, "train labels from 0 to 2; it needs 0 to 1"),
        (small, {"test_y": torch.tensor([0, -1, 1])}, "test labels from -1 to 1"),
        (small, {"test_x": torch.zeros(3, 1, 2, 3, dtype=torch.uint8)}, "the same shape and kind"),
        (small, {"mean": (0.1, 0.2)}, "each of 1 channels"),
        (small, {"mean": ()}, "each of 1 channels"),
        (small, {"std": (0.0,)}, "positive std"),
        (small, {"owner": torch.tensor([0, 1])}, "one per train sample"),
        (small, {"owner": torch.tensor([0.0, 1, 1])}, "one per train sample"),
        (small, {"owner": torch.tensor([0, 2, 2])}, "owners .* each with a sample"),
        (small, {"owner": torch.tensor([0, -1, 1])}, "owners .* 0 to k - 1"),
        (lines, {"tokens": 3}, "train tokens from 0 to 3; it needs 0 to tokens - 1 = 2"),
        (lines, {"test_x": torch.tensor([[0, -1]] * 3)}, "test tokens from -1 to 0"),
        (lines, {"test_x": torch.tensor([[0, 1]] * 3)}, "test samples torch.int64 .*same shape and kind"),
        (lines, {"x": torch.zeros(3, 2, dtype=torch.bool)}, "train samples of torch.bool"),
        (
            lines,
            {"tokens": 0, "x": torch.zeros(3, 2, dtype=torch.uint8), "test_x": torch.zeros(3, 2, dtype=torch.uint8)},
            "sequences and tokens = 0",
        ),
        (numbers, {"x": torch.zeros(3, 2, dtype=torch.float64)}, "train samples of torch.float64"),
        (numbers, {"x": torch.zeros(3)}, r"train samples of torch.float32 \[3\]"),
        (numbers, {"y": torch.zeros(3, dtype=torch.float64)}, "train labels of torch.float64 .* for regression"),
        (numbers, {"test_y": torch.zeros(3, dtype=torch.int64)}, "test labels of torch.int64 .* for regression"),
        (numbers, {"y": torch.tensor([0, 1, 1])}, "0 classes"),
    ],
)
def test_arrays_refuses_what_does_not_fit(make: Callable[..., Arrays], changes: dict[str, Any], words: str) -> None:
    name = make().name
    with pytest.raises(UserError, match=f"data set '{name}' has .*{words}"):
        make(**changes)


def test_arrays_describe_their_kind_goal_and_model_arguments() -> None:
    assert (small().kind, lines().kind, numbers().kind) == ("images", "sequences", "numbers")
    assert lines(x=lines().x.long(), test_x=lines().x.long()).kind == "sequences"
    assert small(x=torch.zeros(3, 1, 2, 2), test_x=torch.zeros(3, 1, 2, 2)).kind == "numbers"
    assert (small().goal, numbers().goal, lines(objective=NEXT).goal) == (CLASSIFY, REGRESS, NEXT)
    assert small().offers == {"shape": (1, 2, 2), "channels": 1, "height": 2, "width": 2, "classes": 2}
    assert lines().offers == {"shape": (2,), "tokens": 4, "length": 2, "classes": 2}
    assert numbers().offers == {"shape": (2,), "outputs": 1}
    assert numbers(y=torch.zeros(3, 4, 2), test_y=torch.zeros(3, 4, 2)).offers["outputs"] == 8
    assert (small().samples, small().tests, small().kinds) == (3, 3, 2)


def test_arrays_give_their_classes_and_owners_in_numpy() -> None:
    assert small().class_labels(needed=False).tolist() == [0, 1, 1]
    by_position = torch.tensor([[0, 1], [1, 0], [1, 1]])
    assert lines(y=by_position, test_y=by_position).class_labels(needed=True).tolist() == [1, 0, 1], "the last position"
    assert numbers().class_labels(needed=True) is None
    assert small().owners.tolist() == [1, 0, 1] and lines().owners is None


def test_load_knows_its_names() -> None:
    with pytest.raises(UserError, match="unknown data set 'fmnst'; did you mean 'fmnist'.*own as package.module:name"):
        load("fmnst", None)
    assert {"glyphs", "mnist", "fmnist"} <= set(DATASETS)


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_every_row_of_the_table_describes_its_data_and_origin(name: str, tmp_path: Path) -> None:
    row = find_data(name)
    source = row.source(tmp_path)
    assert row.about and row.model and row.classes >= 1
    assert source.generated or (source.find(tmp_path) == [] and "{root}" in source.wanted)
    assert str(tmp_path / "x") in source.wanted.format(root=tmp_path / "x") or source.generated


# --- glyphs


@pytest.fixture(scope="module")
def default_glyphs(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    return glyphs.glyphs(tmp_path_factory.mktemp("glyphs"))


def few(root: Path, **kw: Any) -> Arrays:
    return glyphs.glyphs(root, **({"train": 300, "test": 50, "writers": 20} | kw))


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


def test_seed_and_sizes_matter_and_where_it_is_kept_does_not(tmp_path: Path) -> None:
    first, again = few(tmp_path), few(tmp_path)
    assert first.owner is not None and again.owner is not None
    content = [sha(d.x, d.y, d.test_x, d.test_y) for d in (first, again, few(tmp_path, seed=1), few(tmp_path / "b"))]
    assert content[0] == content[1] == content[3] != content[2]
    assert torch.equal(first.owner, again.owner)
    assert len(few(tmp_path, train=301).x) == 301
    assert len(first.owner.bincount()) == 20
    names = sorted(p.name for p in (tmp_path / "prepared").glob("*.safetensors"))
    assert len(names) == 3 and all(name.endswith(f"-v{glyphs.VERSION}.safetensors") for name in names)


def test_prepared_glyphs_are_not_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few(tmp_path)
    monkeypatch.setattr(glyphs, "draw", lambda *args: pytest.fail("drawn again"))
    assert len(few(tmp_path).x) == 300


@pytest.mark.parametrize(
    ("kw", "words"),
    [({"train": 0}, "0 train"), ({"test": 0}, "0 test"), ({"seed": -1}, "seed -1"), ({"writers": 301}, "301 writers")],
)
def test_glyphs_refuses_impossible_sizes(tmp_path: Path, kw: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        few(tmp_path, **kw)


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
    root = tmp_path / "root"
    raw = put(root, packed=True)
    before = sorted(root.rglob("*"))
    for path in (raw, raw.parent, root):
        path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    load("mnist", str(root))
    for path in (root, raw.parent, raw):
        path.chmod(stat.S_IRWXU)
    assert sorted(root.rglob("*")) == before


def test_the_root_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, packed=False)
    monkeypatch.setenv("FEDMPI_DATA", str(tmp_path))
    assert len(load("mnist", None).x) == 6


def test_fmnist_is_found_in_the_system_and_root_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = put(tmp_path / "system", packed=True)
    family = vision.FMNIST._replace(system=raw)
    monkeypatch.setitem(DATASETS, "fmnist", replace(DATASETS["fmnist"], load=functools.partial(vision.read, family)))
    monkeypatch.setenv("FEDMPI_DATA", str(tmp_path / "root"))
    assert len(load("fmnist").x) == 6
    assert not (tmp_path / "root" / "FashionMNIST").exists()
    monkeypatch.setenv("FEDMPI_OFFLINE", "1")
    with pytest.raises(UserError, match="data set 'fmnist' is not under"):
        load("fmnist", str(tmp_path / "other"))  # only an explicit folder is searched
    mine = put(tmp_path / "root", packed=False, folder="FashionMNIST")
    (mine / vision.FILES[0]).write_bytes(contents(n=2)[0])
    (mine / vision.FILES[1]).write_bytes(contents(n=2)[1])
    assert len(load("fmnist").x) == len(load("fmnist", str(tmp_path / "root")).x) == 2


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (0, lambda b: b[:-1], "declares 4704 bytes of data and holds 4703"),
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


class Server:
    """Stands for torchvision's servers and its list of files: hands the tiny MNIST out, slowly."""

    mirrors = ["http://127.0.0.1:9/", "http://127.0.0.1:10/"]
    resources = [(f"{name}.gz", "an md5") for name in vision.FILES]

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails = ""

    def fetch_file(self, urls: list[str], target: Path, md5: str) -> None:
        assert urls == [f"{mirror}{target.name}" for mirror in self.mirrors] and md5 == "an md5"
        self.asked.append(target.name)
        time.sleep(0.1)
        if self.fails:
            raise ConnectionError(self.fails)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.compress(contents()[vision.FILES.index(target.name.removesuffix(".gz"))]))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server in place of torchvision's."""
    server = Server()
    sets = SimpleNamespace(MNIST=server, FashionMNIST=server)
    monkeypatch.setattr(vision, "import_torchvision", lambda: SimpleNamespace(datasets=sets))
    monkeypatch.setattr(vision, "fetch_file", server.fetch_file)
    return server


def test_ranks_that_start_together_download_once(tmp_path: Path, server: Server) -> None:
    root = tmp_path / "new"
    with ThreadPoolExecutor(4) as pool:
        sizes = [len(d.x) for d in pool.map(lambda _: load("mnist", str(root)), range(4))]
    assert sizes == [6] * 4
    assert sorted(server.asked) == sorted(f"{name}.gz" for name in vision.FILES)
    assert sorted(path.name for path in root.iterdir()) == ["MNIST", "prepared"]


def test_ranks_that_start_together_fail_once(tmp_path: Path, server: Server) -> None:
    server.fails = "Error downloading train-images:\nTried a mirror, got: nothing"

    def attempt(_: int) -> str:
        with pytest.raises(UserError) as caught:
            load("mnist", str(tmp_path))
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        (said,) = set(pool.map(attempt, range(4)))
    assert len(server.asked) == 1
    assert "and the download failed (Error downloading train-images)" in said and "\n" not in said
    assert "put the four files" in said and f"{tmp_path}/MNIST/raw" in said
    attempt(0)
    assert len(server.asked) == 2, "a later run tries again"


def test_offline_names_the_ways_out(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMPI_OFFLINE", "1")
    monkeypatch.setattr(vision, "FMNIST", vision.FMNIST._replace(system=None))
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(
        UserError, match="data set 'fmnist' is not under .*OFFLINE.*dataset-fashion-mnist.*FashionMNIST/raw"
    ):
        load("fmnist", str(root))
    with pytest.raises(UserError, match="train-images-idx3-ubyte.*MNIST/raw"):
        load("mnist", str(root))
    assert not server.asked
    assert not list(root.rglob("*.gz"))


def test_a_root_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path, server: Server) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="file/root: there is no such folder"):
        load("mnist", str(tmp_path / "file" / "root"))
    with pytest.raises(UserError, match="--data_root .*file|cannot be made"):
        load("mnist", str(tmp_path / "file"))
    assert not server.asked


def test_a_silent_network_is_given_up_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        with pytest.raises(ConnectionError, match="no answer|timed out"):  # or the test's time is over
            files.probe([f"http://127.0.0.1:{silent.getsockname()[1]}/"] * 2000, seconds=0.3)


def test_the_error_of_a_blocked_network_gives_the_reason() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionError, match="refused"):
            files.probe([f"http://127.0.0.1:{unused.getsockname()[1]}/"], seconds=5)


def test_an_invalid_address_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="unknown url type"):
        files.fetch_file(["nonsense"], tmp_path / "file", "")
    assert not list(tmp_path.iterdir())


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(folder: Path) -> Iterator[str]:
    """A server of this machine that has the files of a folder, as long as it is needed."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def mirror(shared_mnist: Path) -> Iterator[str]:
    """A server that has the four packed files of MNIST."""
    yield from serve(shared_mnist / "MNIST" / "raw")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A server that has one small file."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "file").write_bytes(b"content")
    yield from serve(tmp_path / "site")


CONTENT_MD5 = hashlib.md5(b"content").hexdigest()


def test_a_file_is_fetched_from_the_first_address_that_has_it(
    tmp_path: Path, site: str, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / "folder" / "file"
    files.fetch_file([f"{site}nothing/here", f"{site}file"], target, CONTENT_MD5)
    assert target.read_bytes() == b"content" and [path.name for path in target.parent.iterdir()] == ["file"]
    assert capfd.readouterr().err == "", "no progress bar in a log file"
    assert socket.getdefaulttimeout() is None


def test_a_file_with_another_md5_is_not_kept(tmp_path: Path, site: str) -> None:
    target = tmp_path / "folder" / "file"
    with pytest.raises(ConnectionError, match=f"{site}file: .*(corrupt|not found)"):
        files.fetch_file([f"{site}file"], target, "0" * 32)
    assert not list(target.parent.iterdir())


def test_the_error_lists_each_address_that_failed(tmp_path: Path, site: str) -> None:
    with pytest.raises(ConnectionError, match="one: HTTP Error 404.*; .*two: HTTP Error 404"):
        files.fetch_file([f"{site}one", f"{site}two"], tmp_path / "folder" / "file", CONTENT_MD5)
    assert not list((tmp_path / "folder").iterdir())


def test_torchvision_downloads_into_a_new_root(tmp_path: Path, mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_torchvision().datasets.MNIST, "mirrors", [mirror])
    root = tmp_path / "root"
    assert load("mnist", str(root)).x.shape == (60_000, 1, 28, 28)
    raw = root / "MNIST" / "raw"
    assert sorted(p.name for p in raw.iterdir()) == sorted(f"{name}.gz" for name in vision.FILES)
    monkeypatch.setenv("FEDMPI_OFFLINE", "1")
    assert len(load("mnist", str(root)).test_x) == 10_000


# --- the real data


def test_mnist_is_mnist(mnist_root: Path) -> None:
    d = load("mnist", str(mnist_root))
    assert d.y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert d.test_y.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    pixels = d.x.float() / 255
    assert (pixels.mean().item(), pixels.std().item()) == (
        pytest.approx(0.1307, abs=1e-4),
        pytest.approx(0.3081, abs=1e-4),
    )
    assert (d.mean, d.std) == ((0.1307,), (0.3081,))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("file", [2, 3])
def test_a_file_of_the_published_size_must_be_the_published_one(mnist_root: Path, file: int, packed: bool) -> None:
    raw = mnist_root / "MNIST" / "raw"
    good = raw / f"{vision.FILES[file]}.gz"
    content = bytearray(gzip.decompress(good.read_bytes()))
    assert len(content) == vision.SIZES[file]
    content[-1] ^= 1  # of the last pixel, or the last label: 6 becomes 7, still a digit
    good.unlink()
    bad = good if packed else raw / vision.FILES[file]
    bad.write_bytes(gzip.compress(content, 1) if packed else content)
    with pytest.raises(UserError, match="is damaged: its SHA-256 is not that of the published file") as caught:
        load("mnist", str(mnist_root))
    assert str(caught.value).startswith(f"{bad} ")


def test_fmnist_of_debian_is_found(tmp_path: Path) -> None:
    assert vision.FMNIST.system is not None
    need("data", vision.FMNIST.system.is_dir(), "the Debian package dataset-fashion-mnist is not installed")
    d = load("fmnist")
    assert d.y.bincount().tolist() == [6000] * 10 and d.test_y.bincount().tolist() == [1000] * 10
    pixels = d.x.float() / 255
    assert (pixels.mean().item(), pixels.std().item()) == (
        pytest.approx(d.mean[0], abs=1e-4),
        pytest.approx(d.std[0], abs=1e-4),
    )
    assert list((tmp_path / "cache" / "data" / "prepared").glob("fmnist*.safetensors")), "prepared in the user's cache"
    assert data_root(None) == tmp_path / "cache" / "data"


# --- torchvision on both kinds of machine


def python(code: str) -> str:
    """What a fresh interpreter prints for the code."""
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torchvision_imports_in_a_fresh_process() -> None:
    code = """
from fedmpi.plugins.torchvision import import_torchvision
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
from fedmpi.plugins.torchvision import import_torchvision
tv = import_torchvision()
assert plain is None or plain is tv
print(tv.datasets.FashionMNIST.__name__)
"""
    assert python(code) == "FashionMNIST"


def test_operators_that_are_there_are_not_declared_again() -> None:
    code = """
import torch
from fedmpi.plugins import torchvision as imports
healthy = torch.library.Library("torchvision", "FRAGMENT")
def load_operators():
    for name in ("nms", "qnms"):
        healthy.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
imports._load_operators = load_operators
imports.ready_torchvision()
print(len(imports._declared))
"""
    assert python(code) == "0"


@pytest.mark.parametrize("name", ["_C.so", "_C_stable.so"])
def test_operators_are_loaded_from_the_library_of_any_version(name: str, tmp_path: Path) -> None:
    """Declaring them next to a library that has them ends the process: torchvision's import defines them again."""
    (tmp_path / "torchvision").mkdir()
    for file in ("__init__.py", "_config.py", "image.so", name):
        (tmp_path / "torchvision" / file).touch()
    code = f"""
import sys, torch
sys.path.insert(0, {str(tmp_path)!r})
from fedmpi.plugins import torchvision as imports
torch.ops.load_library = print
imports._load_operators()
"""
    assert python(code) == str(tmp_path / "torchvision" / name)
