"""A user's own data: what becomes Arrays or Datasets, what is refused and how, and `--data module:make` end to end."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shell import ALONE, CPU, metrics, sandbox
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from fedmpi.clients.feed import Batch, make_feed
from fedmpi.comm import SoloComm
from fedmpi.commands import main
from fedmpi.data import Arrays, Datasets, as_data, load
from fedmpi.data.objective import CLASSIFY, NEXT, REGRESS
from fedmpi.data.own import labels_of
from fedmpi.data.store import moments
from fedmpi.errors import CommonError, RunError, UserError
from fedmpi.runs.build import Overrides, load_data, make_task, prepare
from fedmpi.runs.config import Config, Eval, Local
from fedmpi.runs.run import run

X, Y = torch.arange(24.0).view(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


class Plain(Dataset[Any]):
    """A Dataset that has nothing but its items; counts how often one is read."""

    def __init__(self, *items: Any) -> None:
        self.items, self.reads = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.items[index]


def plain(count: int = 6) -> Plain:
    return Plain(*((X[i % 6], int(Y[i % 6])) for i in range(count)))


class Labelled(Plain):
    """The same with its labels at hand, as torchvision's data sets have them."""

    def __init__(self, count: int = 6, **labels: Any) -> None:
        super().__init__(*plain(count).items)
        vars(self).update(labels)


# --- pairs of arrays


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("pair", [tuple, list])
def test_a_pair_of_arrays_becomes_arrays(kind: Any, pair: Any) -> None:
    data = as_data(pair([kind(X), kind(Y)]), pair([kind(X[:2]), kind(Y[:2])]), "mine")
    assert isinstance(data, Arrays) and (data.name, data.classes, data.owner, data.kind) == ("mine", 3, None, "numbers")
    assert torch.equal(data.x, X) and torch.equal(data.y, Y) and torch.equal(data.test_x, X[:2])
    assert data.goal is CLASSIFY


def test_the_number_of_classes_counts_the_test_labels_too() -> None:
    assert as_data((X, Y), (X, Y + 4)).kinds == 7


def test_doubles_and_small_whole_numbers_become_what_arrays_take() -> None:
    data = as_data((X.double(), Y.to(torch.int32)), (X.double(), Y.to(torch.int32)))
    assert (data.x.dtype, data.y.dtype) == (torch.float32, torch.int64)
    bytes_ = as_data((X.half(), Y.to(torch.uint8)), (X.half(), Y.to(torch.uint8)))
    assert (bytes_.x.dtype, bytes_.y.dtype) == (torch.float32, torch.int64)


def test_numbers_to_predict_become_a_regression() -> None:
    data = as_data((X, Y.double() / 2), (X, Y.double() / 2))
    assert isinstance(data, Arrays) and data.goal is REGRESS and data.classes == 0 and data.y.dtype == torch.float32
    assert data.offers == {"shape": (4,), "outputs": 1}


@pytest.mark.parametrize("shape", [(6, 5, 7), (6, 1, 5, 7), (6, 3, 5, 7)])
def test_images_are_normalised_by_their_own_numbers(shape: tuple[int, ...]) -> None:
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    data = as_data((x, Y), (x[:3], Y[:3]))
    assert isinstance(data, Arrays) and data.kind == "images"
    assert data.x.shape == (6, shape[1] if len(shape) == 4 else 1, 5, 7), "grey images get a channel"
    assert (data.mean, data.std) == moments(data.x)


def test_a_channel_that_is_the_same_everywhere_is_not_divided_by_nothing() -> None:
    x = torch.zeros(6, 2, 3, 3, dtype=torch.uint8)
    x[:, 1] = torch.randint(0, 256, (6, 3, 3), generator=torch.Generator().manual_seed(2))
    data = as_data((x, Y), (x, Y))
    assert data.std[0] == 1.0 and 0 < data.std[1] < 1
    (images, _) = next(make_feed(data, CPU).test([torch.arange(6)]))
    assert bool(images.isfinite().all()) and not images[:, 0].any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.int32])
def test_whole_numbers_in_rows_are_sequences(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 2], [3, 4, 1]] * 3).to(dtype)
    data = as_data((x, Y), (x + 1, Y))
    assert isinstance(data, Arrays) and (data.kind, data.tokens) == ("sequences", 6), "a token of the test part counts"


# --- one part for each client


def pairs() -> list[tuple[Tensor, Tensor]]:
    return [(X[:1], Y[:1]), (X[1:4], Y[1:4]), (X[4:], Y[4:])]


@pytest.mark.parametrize("clients", [pairs(), tuple(pairs()), OrderedDict(zip("cab", pairs(), strict=True))])
def test_a_pair_for_each_client_becomes_arrays_with_owners(clients: Any) -> None:
    data = as_data(clients, (X, Y))
    assert isinstance(data, Arrays) and data.owner is not None
    assert data.owner.tolist() == [0, 1, 1, 1, 2, 2], "clients in the order given"
    assert torch.equal(data.x, X) and torch.equal(data.y, Y)


def test_a_list_of_two_clients_is_not_a_pair_of_arrays() -> None:
    data = as_data([(X[:2], Y[:2]), (X[2:], Y[2:])], (X, Y))
    assert data.owners is not None and data.owners.tolist() == [0, 0, 1, 1, 1, 1]


def test_datasets_of_clients_become_one_with_owners() -> None:
    clients = {"north": plain(2), "south": plain(3)}
    data = as_data(clients, plain(), "mine")
    assert isinstance(data, Datasets) and data.samples == 5 and data.name == "mine"
    assert data.owners is not None and data.owners.tolist() == [0, 0, 1, 1, 1] and data.owners.dtype == np.int64
    assert [data.train[i][1] for i in range(5)] == [0, 1, 0, 1, 2]


def test_pairs_mixed_with_datasets_become_datasets() -> None:
    data = as_data([(X[:2], Y[:2]), plain(3)], (X, Y))
    assert isinstance(data, Datasets) and data.samples == 5 and data.tests == 6
    assert torch.equal(data.test[4][0], X[4]) and int(data.test[4][1]) == 1
    assert isinstance(as_data((X, Y), plain()), Datasets)


def test_one_dataset_has_no_owners() -> None:
    data = as_data(plain(), plain(2))
    assert isinstance(data, Datasets) and data.owners is None and data.tests == 2


@pytest.mark.parametrize("empty", [Plain(), (X[:0], Y[:0])])
def test_a_client_without_samples_is_named(empty: Any) -> None:
    with pytest.raises(UserError, match="^mine: client 1 has no samples; leave it out$"):
        as_data([(X, Y), empty, (X, Y)], (X, Y), "mine")


# --- what is refused


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(X[0], 0)])


def test_a_part_that_is_no_data_set_is_refused() -> None:
    with pytest.raises(UserError, match=r"^mine has a train part of list; it must be a Dataset, a pair .* of arrays"):
        as_data([], (X, Y), "mine")


@pytest.mark.parametrize(
    ("train", "test", "given"),
    [
        (None, (X, Y), "mine has a train part of NoneType"),
        (X, (X, Y), "mine has a train part of Tensor"),
        ("mnist", (X, Y), "mine has a train part of str"),
        ({}, (X, Y), "mine has a train part of list"),
        ((X, Y, Y), (X, Y), "mine has a train part of tuple"),
        ([(X, Y), None], (X, Y), "mine has a train part of list"),
        ((X.tolist(), Y.tolist()), (X, Y), "mine has a train part of tuple"),
        (Stream(), (X, Y), "mine has a train part of Stream"),
        ((X, Y), None, "mine has a test part of NoneType"),
        ((X, Y), [(X, Y), (X, Y)], "mine has a test part of list"),
        ((X, Y), {"a": (X, Y)}, "mine has a test part of dict"),
        ((X, Y), Stream(), "mine has a test part of Stream"),
        ((X, Y), (X[:, :3], Y), "mine has samples of different kinds: torch.float32 [3], torch.float32 [4]"),
        ([(X, Y), (X.long(), Y)], (X, Y), "mine has samples of different kinds: torch.float32 [4], torch.int64 [4]"),
        ((X, Y), (X, Y / 2), "mine has labels of different kinds: torch.float32 [], torch.int64 []"),
        ((X, Y[:5]), (X, Y), "data set 'mine' has 6 train samples and 5 train labels"),
        ((X[:0], Y[:0]), (X, Y), "data set 'mine' has 0 train samples and 0 train labels"),
        ((X, Y), (X[:0], Y[:0]), "mine has no test sample; it needs at least one"),
        ((X, Y - 1), (X, Y), "data set 'mine' has train labels from -1 to 1"),
        ((X > 3, Y), (X > 3, Y), "data set 'mine' has train samples of torch.bool"),
        ((X[:, 0], Y), (X[:, 0], Y), "data set 'mine' has train samples of torch.float32 [6]"),
        ((X.long() - 5, Y), (X.long(), Y), "data set 'mine' has train tokens from -5 to 18"),
        (Plain(), plain(), "data set 'mine' has no train sample; it needs at least one"),
        (plain(), Plain(), "data set 'mine' has no test sample; it needs at least one"),
        (Plain(X[0]), plain(), "data set 'mine' has train items of Tensor"),
        (Plain((X[0], 0, 0)), plain(), "data set 'mine' has train items of ['Tensor', 'int', 'int']"),
        (plain(), Plain(("a picture", 0)), "data set 'mine' has test items of ['str', 'int']"),
        (Plain({"x": X, "y": 0}), plain(), "data set 'mine' has train items of dict"),
    ],
)
def test_invalid_data_are_refused_with_what_was_given(train: Any, test: Any, given: str) -> None:
    with pytest.raises(UserError) as caught:
        as_data(train, test, "mine")
    assert str(caught.value).startswith(given) and "\n" not in str(caught.value)


def test_the_error_for_an_item_that_is_a_picture_recommends_a_transform() -> None:
    with pytest.raises(UserError, match=r"add a transform such as torchvision's ToTensor\(\)"):
        as_data(Plain((object(), 0)), plain())


def test_the_error_for_an_item_that_cannot_be_read_names_its_exception() -> None:
    class Gone(Plain):
        def __getitem__(self, index: int) -> Any:
            raise FileNotFoundError("picture\n0.png")

    with pytest.raises(UserError, match="^data set 'm' .* first test item raised FileNotFoundError: picture 0"):
        as_data(plain(), Gone(1), "m")


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"train": Stream()}, "has a train part of Stream; it needs a map-style Dataset"),
        ({"test": object()}, "has a test part of object; it needs a map-style Dataset"),
        ({"owner": [0, 1]}, r"has owners int64 \[2\] for 6 samples"),
    ],
)
def test_datasets_refuses_invalid_fields(fields: dict[str, Any], given: str) -> None:
    with pytest.raises(UserError, match=f"data set 'mine' {given}"):
        Datasets(**({"train": plain(), "test": plain(), "name": "mine"} | fields))


@pytest.mark.parametrize("owner", [list("aabbcc"), [0, 0, 0, 1, 1, -1]])
def test_owners_must_be_numbers_from_0(owner: Any) -> None:
    with pytest.raises(UserError, match="owner"):
        load_data(natural(), Overrides(Datasets(plain(), plain(), name="mine", owner=owner)))


def natural() -> Config:
    return Config(split="natural", clients=2, cohort=2)


@pytest.mark.parametrize(
    ("labels", "given"),
    [
        ([0, 1], r"int64 \[2\]"),
        ([0.0] * 6, r"float64 \[6\]"),
        ([0, 1, 2, 0, 1, -1], r"int64 \[6\]"),
        (np.zeros((6, 2), dtype=int), r"int64 \[6, 2\]"),
        (list("abcabc"), r"<U1 \[6\]"),
    ],
)
def test_labels_must_be_one_class_per_sample(labels: Any, given: str) -> None:
    data = Datasets(plain(), plain(), name="mine", labels=labels)
    with pytest.raises(UserError, match=f"data set 'mine' has labels {given}; it needs"):
        data.class_labels(needed=True)


def test_labels_beyond_the_classes_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the labels were not read before the run, the clients that have them are left out."""
    with pytest.raises(CommonError, match="0 of 2 clients delivered"):
        train_on(Datasets(plain(40), plain(2), classes=2, name="mine"), tmp_path)
    assert "data set 'mine' has labels like 2; it needs 0 to 1" in caplog.text
    with pytest.raises(UserError, match="data set 'mine' has labels like 2; it needs 0 to 1"):
        Datasets(plain(40), plain(2), classes=2, name="mine").class_labels(needed=True)
    with pytest.raises(UserError, match="data set 'mine' has labels like 2; it needs 0 to 1"):
        Datasets(plain(2), TensorDataset(X, Y), classes=2, name="mine")


def test_labels_per_position_need_the_number_of_classes() -> None:
    rows = Plain(*((row, row) for row in X.long()))
    with pytest.raises(UserError, match="data set 'mine' has one label per position; it needs classes"):
        Datasets(rows, rows, tokens=24, name="mine", objective=NEXT).class_labels(needed=True)


# --- where labels come from


def test_labels_at_hand_need_no_reading() -> None:
    pair = TensorDataset(X, Y)
    assert labels_of(pair).tolist() == Y.tolist()
    assert labels_of(Subset(pair, [5, 0, 4])).tolist() == [2, 0, 1]
    assert labels_of(Subset(Subset(pair, [5, 0, 4]), torch.tensor([2, 0]).tolist())).tolist() == [1, 2]
    assert labels_of(ConcatDataset([pair, Subset(pair, [5])])).tolist() == [*Y.tolist(), 2]


@pytest.mark.parametrize("labels", [Y, Y.tolist(), Y.numpy(), tuple(Y.tolist())])
@pytest.mark.parametrize("name", ["targets", "labels"])
def test_labels_are_found_by_their_usual_names(name: str, labels: Any) -> None:
    dataset = Labelled(**{name: labels})
    data = Datasets(dataset, plain())
    assert data.goal is CLASSIFY
    before = dataset.reads
    assert data.class_labels(needed=False).tolist() == Y.tolist() and dataset.reads == before
    assert labels_of(ConcatDataset([dataset, Subset(dataset, [1])])).tolist() == [*Y.tolist(), 1]


def test_given_labels_come_before_targets_and_targets_before_labels() -> None:
    dataset = Labelled(targets=Y, labels=Y + 1)
    assert Datasets(dataset, plain()).class_labels(needed=True).tolist() == Y.tolist()
    given = Datasets(dataset, plain(), labels=(Y + 2).tolist())
    assert given.class_labels(needed=True).tolist() == (Y + 2).tolist() and given.kinds == 5


def test_labels_that_are_not_at_hand_are_read_once_and_only_where_needed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fedmpi")
    dataset = plain()
    assert labels_of(dataset) is None and labels_of(Subset(dataset, [0])) is None
    assert labels_of(ConcatDataset([TensorDataset(X, Y), dataset])) is None, "all parts, or none"
    data = Datasets(dataset, plain(), classes=3, name="mine")
    assert data.goal is CLASSIFY
    before = dataset.reads
    assert data.class_labels(needed=False) is None and dataset.reads == before
    assert data.class_labels(needed=True).tolist() == Y.tolist() and dataset.reads == before + 6
    data.class_labels(needed=True), data.kinds
    assert dataset.reads == before + 6
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("reading the labels of all 6 samples of 'mine'")


def test_the_number_of_classes_may_be_given_or_is_counted() -> None:
    assert Datasets(plain(), plain()).kinds == 3 and Datasets(plain(), plain(), classes=9).kinds == 9
    assert Datasets(plain(), plain(), classes=9).offers == {"shape": (4,), "classes": 9}


def test_what_datasets_offer_a_model() -> None:
    image = Plain((torch.zeros(3, 5, 7, dtype=torch.uint8), 1), (torch.zeros(3, 5, 7, dtype=torch.uint8), 0))
    offered = Datasets(image, image).offers
    assert offered == {"shape": (3, 5, 7), "channels": 3, "height": 5, "width": 7, "classes": 2}
    price = Plain((torch.zeros(4), 1.5), (torch.zeros(4), 2.5))
    data = Datasets(price, price)
    assert data.goal is REGRESS and data.offers == {"shape": (4,), "outputs": 1} and data.class_labels(True) is None
    two = Plain((torch.zeros(4), torch.zeros(2)))
    assert Datasets(two, two).offers["outputs"] == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_rows_of_whole_numbers_in_a_dataset_are_sequences(dtype: torch.dtype) -> None:
    text = Plain((torch.tensor([1, 2, 3], dtype=dtype), 1), (torch.tensor([0, 2, 3], dtype=dtype), 0))
    data = Datasets(text, text, tokens=4)
    assert data.kind == "sequences" and data.offers == {"shape": (3,), "tokens": 4, "length": 3, "classes": 2}
    (x, _) = make_feed(data, CPU).train(Batch(torch.arange(2), seed=0))
    assert x.dtype == torch.int64 and x.tolist() == [[1, 2, 3], [0, 2, 3]]


def test_sequences_need_their_number_of_tokens(tmp_path: Path) -> None:
    text = Plain(*((torch.tensor([i % 3, 2, 3]), i % 2) for i in range(30)))
    with pytest.raises(UserError, match="tokens"):
        train_on(Datasets(text, text, name="mine"), tmp_path)


# --- whole runs


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with sandbox() as patch:
        yield patch


SETTINGS = Config(
    data="given", split="iid", clients=4, cohort=2, rounds=2, log_to="none", local=Local(batch=5), eval=Eval(batch=4)
)


def train_on(data: Any, out: Path, **changes: Any) -> Any:
    cfg = replace(SETTINGS, out=str(out / "run"), **changes)
    return run(prepare(cfg, Overrides(data)), SoloComm(), ALONE, CPU, {})


def test_a_test_label_that_training_never_had_is_refused(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With Datasets nobody has read all test labels beforehand."""
    with pytest.raises((UserError, RunError), match="label"):
        train_on(Datasets(plain(40), Plain(*plain(5).items, (X[0], 3)), name="mine"), tmp_path)


def test_clients_data_are_split_by_client(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clients = [plain(n) for n in (5, 6, 7, 8)]
    train_on(as_data(clients, plain()), tmp_path, split="natural")
    written = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert sorted(map(sum, written["histogram"])) == [5, 6, 7, 8]


def test_a_dataset_whose_labels_nobody_needs_is_not_read_for_them(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dataset = plain(40)
    train_on(Datasets(dataset, plain(), classes=3), tmp_path, local=Local(steps=1, batch=5), rounds=1)
    assert dataset.reads < 20, "two clients' first batches, and a look at the first item"
    written = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert sum(map(sum, written["histogram"])) == 40


MODULE = """
import torch
from torch.utils.data import TensorDataset
from fedmpi import Arrays, Datasets

torch.manual_seed(0)
X, Y = torch.randn(60, 4), torch.arange(60) % 3
X[torch.arange(60), Y] += 3
ASKED = []

def pair(): return (X[:40], Y[:40]), (X[40:], Y[40:])
def arrays(): return Arrays("mine", 3, X[:40], Y[:40], X[40:], Y[40:])
def datasets(): return Datasets(TensorDataset(X[:40], Y[:40]), TensorDataset(X[40:], Y[40:]))
def listed(): return [TensorDataset(X[:40], Y[:40]), TensorDataset(X[40:], Y[40:])]
def clients(): return [(X[i : i + 10], Y[i : i + 10]) for i in (0, 10, 20, 30)], (X[40:], Y[40:])
def rooted(root):
    ASKED.append(root)
    return pair()
def spare(root=None, extra=7): return rooted((root, extra))
def anything(**more): return pair()
class Made:
    def __new__(cls): return arrays()

def raises(): raise KeyError("column")
def leaves(): raise SystemExit(3)
def complains():
    from fedmpi.errors import CommonError, UserError
    raise UserError("my own message; do this")
def nothing(): return None
def number(): return 7
def three(): return 1, 2, 3
def text(): return "ab"
def halves(): return X, Y
def asks(root, folder): return pair()
def noted():
    from dataclasses import replace
    return replace(arrays(), note="measured in March")
THING = 7
"""

OPTIONS = "--split iid --clients 4 --cohort 2 --rounds 3 --local.batch 5 --lr 0.1 --log_to none --threads 1".split()


@pytest.fixture
def folder(patch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder, with the module `own_sets` in it."""
    (tmp_path / "own_sets.py").write_text(MODULE)
    patch.chdir(tmp_path)
    patch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def trained(name: str, *more: str) -> int:
    return main(["train", "--data", f"own_sets:{name}", *OPTIONS, "--out", f"runs/{name}", *more])


@pytest.mark.parametrize("name", ["pair", "arrays", "datasets", "listed", "anything", "Made"])
def test_own_data_are_trained_on_by_their_import_path(folder: Path, name: str) -> None:
    assert trained(name) == 0
    rounds = metrics(folder / "runs" / name)
    assert len(rounds) == 3 and rounds[-1]["test_accuracy"] > 0.8
    assert "data: own_sets:" + name in (folder / "runs" / name / "config.yaml").read_text()


def test_all_ways_to_the_same_data_give_the_same_model(folder: Path) -> None:
    models = []
    for name in ("pair", "arrays", "datasets", "listed"):
        assert trained(name) == 0
        models.append((folder / "runs" / name / "model.safetensors").read_bytes())
    assert len(set(models)) == 1


def test_clients_of_own_data_are_owners(folder: Path) -> None:
    assert trained("clients", "--split", "natural") == 0
    written = json.loads((folder / "runs" / "clients" / "partition.json").read_text())
    assert [sum(row) for row in written["histogram"]] == [10] * 4


def test_the_function_may_ask_for_the_data_root(folder: Path) -> None:
    (folder / "there").mkdir()
    assert trained("rooted", "--data_root", "there") == 0
    assert trained("spare", "--out", "runs/second") == 0
    import own_sets  # type: ignore[import-not-found]

    assert own_sets.ASKED == [Path("there"), (None, 7)]
    load("own_sets:rooted", "~/data")
    assert own_sets.ASKED[-1] == Path("~/data").expanduser()


def test_a_note_about_the_data_is_said_and_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained("noted") == 0
    assert "data: measured in March" in capsys.readouterr().out.splitlines()
    assert json.loads((folder / "runs" / "noted" / "partition.json").read_text())["note"] == "measured in March"


NO_DATA = "; it must return Arrays, Datasets, or a pair of the train and the test part: see docs/own-data.md"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "data set 'own_sets:raises' raised KeyError (own_sets.py, line 24): 'column'"),
        ("leaves", "data set 'own_sets:leaves' raised SystemExit (own_sets.py, line 25): 3"),
        ("complains", "my own message; do this"),
        ("nothing", f"data set 'own_sets:nothing' returned NoneType{NO_DATA}"),
        ("number", f"data set 'own_sets:number' returned int{NO_DATA}"),
        ("three", f"data set 'own_sets:three' returned tuple{NO_DATA}"),
        ("text", "own_sets:text has a train part of str; it must be a Dataset, a pair (samples, labels) of arrays"),
        (
            "halves",
            "own_sets:halves has a train part of Tensor; it must be a Dataset, a pair (samples, labels)",
        ),
        (
            "asks",
            "data set 'own_sets:asks' asks for folder; there is root to ask for by these names, and other parameters "
            "need a default",
        ),
        ("THING", "data set 'own_sets:THING' is int; it must be a function or a class"),
        ("pear", "data set 'own_sets:pear': module 'own_sets' has no 'pear'"),
    ],
)
def test_invalid_own_data_end_with_one_line_of_error_message(
    folder: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(name) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fedmpi: {message}") and said.count("\n") == 1 and "Traceback" not in said
    assert not (folder / "runs").exists()


def test_a_missing_module_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", "other_sets:make", *OPTIONS, "--out", "run"]) == 2
    assert "data set 'other_sets:make': there is no module 'other_sets'" in capsys.readouterr().err


def test_the_model_that_fits_own_data_is_taken_unless_named(folder: Path) -> None:
    assert trained("pair") == 0
    assert "model: logistic" in (folder / "runs" / "pair" / "config.yaml").read_text()
    assert trained("arrays", "--model", "gru") == 2


def test_a_run_with_own_data_is_repeated_by_its_config(folder: Path) -> None:
    assert trained("datasets", "--workers", "0") == 0
    assert main(["train", "--config", "runs/datasets/config.yaml", "--out", "runs/again"]) == 0
    assert len({(folder / "runs" / n / "model.safetensors").read_bytes() for n in ("datasets", "again")}) == 1


class Drawing(Plain):
    """Items that draw: reading one moves the random numbers on."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.0 * torch.rand(4), y


def first_weights(data: Any, out: Path, model: Any, seed: int) -> Tensor:
    """The weights that a model by name starts with, by the run that it makes."""
    cfg = Config(data="mine", split="iid", clients=4, cohort=2, rounds=1, seed=seed, log_to="none", out=str(out))
    spec = prepare(cfg, Overrides(data, model))
    loaded, partition, meta = load_data(spec.cfg, Overrides(data))
    _, task = make_task(spec, loaded, partition, meta, 1, CPU)
    return task.start()[0]


def test_first_weights_follow_the_seed_and_not_how_data_are_read(tmp_path: Path) -> None:
    items = [(X[i % 6], int(Y[i % 6])) for i in range(40)]
    kinds = [
        as_data((X.repeat(7, 1), Y.repeat(7)), (X, Y)),
        Datasets(Drawing(*items), Drawing(*items), classes=3),
        Datasets(Drawing(*items), Drawing(*items)),
    ]
    for lazy in (False, True):
        made = {}
        for number, data in enumerate(kinds):
            for seed in (0, 1):
                model = torch.nn.LazyLinear(3) if lazy else None
                made[number, seed] = first_weights(data, tmp_path, model, seed)
        assert all(torch.equal(made[n, seed], made[0, seed]) for n in (1, 2) for seed in (0, 1)), lazy
        assert not torch.equal(made[0, 0], made[0, 1])


def test_mapped_arrays_are_not_copied(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(24, dtype=np.float32).reshape(6, 4))
    x = np.load(tmp_path / "x.npy", mmap_mode="c")
    data = as_data((x, Y), (X, Y))
    assert isinstance(data, Arrays) and data.x.data_ptr() == x.ctypes.data and data.y.data_ptr() == Y.data_ptr()


class Torn(Plain):
    """The fifth item cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def test_a_test_item_that_cannot_be_read_is_an_error_of_the_user_or_the_run(tmp_path: Path) -> None:
    """It is found before the run if it is one of the first, else when the test set is scored."""
    said = "test samples of 'mine' cannot be read and collated: OSError: the disk is gone"
    with pytest.raises(RunError, match=said):
        train_on(Datasets(plain(40), Torn(*plain(6).items), name="mine"), tmp_path / "a")
    torn = Torn(*plain(6).items)
    with pytest.raises(UserError, match=said):
        train_on(Datasets(plain(40), Subset(torn, [0, 4]), name="mine"), tmp_path / "b")
    assert not (tmp_path / "b").exists()
