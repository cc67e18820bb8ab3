"""Samples of several tensors: their form, padding to one length, and labels that are ignored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmpi.data import Arrays, Datasets, Pad, as_data
from fedmpi.data.objective import CAUSAL, CLASSIFY, NEXT, REGRESS, count_labels, usual
from fedmpi.data.trees import IGNORE, as_pair, as_tree, call, collate, leaves, mapped, shapes, trimmed, versions, zipped
from fedmpi.errors import UserError


class Listed(torch.utils.data.Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def equal(one: Any, other: Any) -> bool:
    return bool(mapped(lambda t: t.tolist(), one) == mapped(lambda t: t.tolist(), other))


# Form


def test_trees_are_walked_and_rebuilt_in_their_own_form() -> None:
    tree = {"a": torch.ones(2), "b": (torch.zeros(1), {"c": torch.full((3,), 2.0)})}
    assert [len(t) for t in leaves(tree)] == [2, 1, 3]
    doubled = mapped(lambda t: 2 * t, tree)
    assert equal(zipped(lambda x, y: y - x, tree, doubled), tree)
    assert shapes(tree) == "{a [2], b ([1], {c [3]})}"
    before = versions(tree)
    tree["b"][1]["c"].add_(1)
    assert versions(tree) == before + 1


def test_a_model_is_called_with_what_the_inputs_are() -> None:
    def model(*given: Any, **named: Any) -> Any:
        return len(given), sorted(named)

    x = torch.ones(1)
    assert call(model, x) == (1, []) and call(model, (x, x)) == (2, [])
    assert call(model, {"b": x, "a": x}) == (0, ["a", "b"])


def test_a_dict_with_labels_is_a_pair() -> None:
    assert as_pair({"x": 1, "labels": 2}) == ({"x": 1}, 2) == as_pair({"x": 1, "label": 2}) == as_pair(({"x": 1}, 2))
    assert as_pair({"label": 1, "labels": 2}) == ({"label": 1}, 2)


def test_numbers_and_lists_become_tensors_and_words_are_refused_by_their_place() -> None:
    tree = as_tree({"a": [1, 2], "b": (np.ones(2), 0.5)})
    assert tree["a"].dtype == torch.int64
    assert equal(tree, {"a": torch.tensor([1, 2]), "b": (torch.ones(2), torch.tensor(0.5))})
    wrong = [({"a": {"text": "hello"}}, "'a' is 'text' is str"), ((1, ["x"]), "element 1 is list")]
    wrong.append(([[1], [2, 3]], "list"))  # type: ignore[arg-type]
    for value, place in wrong:
        with pytest.raises(TypeError, match=place):
            as_tree(value)


# Padding

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def item(length: int, seed: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (length,), generator=rng)
    return {"input_ids": ids, "labels": ids.clone(), "scores": torch.rand(length, 2, generator=rng), "kind": seed}


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, multiple=st.integers(1, 4))
def test_padding_keeps_every_item_and_marks_the_rest(lengths: list[int], multiple: int) -> None:
    items = [item(n, seed) for seed, n in enumerate(lengths)]
    batch = Pad(token=9, multiple_of=multiple)(items)
    longest = -(-max(lengths) // multiple) * multiple
    assert shapes(batch["input_ids"]) == f"[{len(items)}, {longest}]" and batch["kind"].tolist() == [*range(len(items))]
    for row, one in enumerate(items):
        n = len(one["input_ids"])
        for name, fill in (("input_ids", 9), ("labels", IGNORE), ("scores", 0)):
            assert torch.equal(batch[name][row, :n], one[name]) and bool((batch[name][row, n:] == fill).all())
        assert batch["attention_mask"][row].tolist() == [1] * n + [0] * (longest - n)
    inputs, labels = trimmed(*as_pair(batch))
    assert inputs["input_ids"].shape == labels.shape == (len(items), max(lengths))
    assert equal({**inputs, "labels": labels}, Pad(token=9)(items))


def test_pairs_are_padded_too_and_masks_of_the_users_own_are_kept() -> None:
    pairs = [(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 0])), (torch.tensor([4]), torch.tensor([1]))]
    x, y = Pad(token=7)(pairs)
    assert x.tolist() == [[1, 2, 3], [4, 7, 7]] and y.tolist() == [[0, 1, 0], [1, IGNORE, IGNORE]]
    some = [{"input_ids": [1, 2], "attention_mask": [0, 1], "token_type_ids": [1, 1], "label": 0} for _ in range(2)]
    batch = Pad(token=7, multiple_of=3)(some)
    assert batch["attention_mask"].tolist() == [[0, 1, 0]] * 2 and batch["token_type_ids"].tolist() == [[1, 1, 0]] * 2
    assert batch["label"].tolist() == [0, 0]


def test_items_of_different_shapes_name_the_function_that_pads_them() -> None:
    with pytest.raises(ValueError, match=r"different shapes; pad them: .*collate=fedmpi.data.Pad\(\)"):
        collate([(torch.ones(2), 0), (torch.ones(3), 0)])


def test_a_batch_without_a_mask_or_a_shorter_one_is_not_trimmed() -> None:
    x, y = {"input_ids": torch.ones(2, 3)}, torch.ones(2)
    assert trimmed(x, y) == (x, y) and trimmed(torch.ones(2), y)[0].shape == (2,)
    masked = {"input_ids": torch.ones(2, 3), "attention_mask": torch.zeros(2, 3)}
    assert trimmed(masked, y)[0]["input_ids"].shape == (2, 3)


# Labels that are ignored


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1))
def test_ignored_labels_count_nowhere(seed: int, share: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 4, 5, generator=rng, dtype=torch.float64)
    labels = torch.randint(5, (3, 4), generator=rng).masked_fill(torch.rand(3, 4, generator=rng) < share, IGNORE)
    counted = labels != IGNORE
    assert count_labels(labels) == int(counted.sum())
    total = F.cross_entropy(logits[counted], labels[counted], reduction="sum")
    assert torch.allclose(CLASSIFY.loss(logits, labels, "sum"), total)
    assert torch.allclose(CLASSIFY.loss(logits, labels, "mean"), total / max(int(counted.sum()), 1))
    assert int(CLASSIFY.total(logits, labels)) == int((logits[counted].argmax(-1) == labels[counted]).sum())


def test_the_mean_has_the_bits_of_torchs_own() -> None:
    for seed in range(50):
        rng = torch.Generator().manual_seed(seed)
        count, kinds = (int(torch.randint(2, 60, (), generator=rng)) for _ in range(2))
        logits = torch.randn(2, count, kinds, generator=rng).requires_grad_()
        labels = torch.randint(kinds, (2, count), generator=rng)
        ours, own = CLASSIFY.loss(logits, labels, "mean"), F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        assert torch.equal(ours, own)
        assert torch.equal(*(torch.autograd.grad(loss, logits)[0] for loss in (ours, own)))


def test_a_language_model_is_asked_for_the_next_token() -> None:
    ids = torch.tensor([5, 6, 7, 8])
    labels = torch.tensor([IGNORE, 6, 7, IGNORE])
    assert usual({"input_ids": ids}, labels) is CAUSAL
    assert usual({"input_ids": ids}, labels + 1) is usual({"input_ids": ids}, torch.tensor(3)) is CLASSIFY
    assert usual({"input_ids": ids}, torch.full((4,), IGNORE)) is usual(ids, ids) is CLASSIFY
    assert usual(ids, torch.rand(1)) is REGRESS
    logits = torch.randn(2, 4, 9)
    aligned, wanted = CAUSAL.align({"logits": logits}, torch.stack([ids, labels]))
    assert aligned is logits and wanted.tolist() == [[6, 7, 8, IGNORE], [6, 7, IGNORE, IGNORE]]
    shifted = F.cross_entropy(logits[:, :-1].flatten(0, 1), torch.stack([ids, labels])[:, 1:].flatten())
    assert torch.allclose(CAUSAL.loss(aligned, wanted, "mean"), shifted)


def test_logits_are_found_in_what_models_return() -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    x, y = torch.randn(2, 3), torch.tensor([0, 1])
    for outputs in (x, (x, None), [x], {"logits": x}, Output(x), Output(x.to(torch.bfloat16))):
        found, labels = NEXT.align(outputs, y)
        assert found.dtype == torch.float32 and torch.allclose(found, x, atol=0.02) and labels is y


# Data sets


def texts(count: int, length: int = 4, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 9, (count, length), generator=rng)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.sum(1) % 3}


def test_dicts_of_arrays_become_arrays_and_clients_of_other_lengths_are_padded() -> None:
    data = as_data({"Ann": texts(3), "Bob": texts(2, 6, 1)}, texts(2, 5, 2), "mine")
    assert isinstance(data, Arrays) and data.kind == "trees" and data.samples == 5 and data.tests == 2
    assert data.classes == 3 and data.tokens == 9
    assert data.owners is not None and data.owners.tolist() == [0, 0, 0, 1, 1]
    assert shapes(data.x) == "{input_ids [5, 6], attention_mask [5, 6]}"
    assert data.x["attention_mask"].sum(1).tolist() == [4, 4, 4, 6, 6]
    assert data.shape == {"input_ids": (6,), "attention_mask": (6,)}
    assert data.offers == {"shape": data.shape, "tokens": 9, "classes": 3}


def test_a_list_of_two_clients_is_no_tuple_of_inputs() -> None:
    pair = (torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))
    assert as_data([pair, pair], pair).samples == 8
    data = as_data(((pair[0], pair[0].double()), pair[1]), ((pair[0], pair[0]), pair[1]))
    assert data.kind == "trees" and data.samples == 4 and data.sample[0][1].dtype == torch.float32


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (texts(3), {"input_ids": torch.ones(2, 4)}, "mine has a test part of dict; it must be"),
        (texts(3), {**texts(2), "more": torch.ones(2)}, "mine has samples of different kinds: "),
        (texts(3), {**texts(2), "labels": torch.ones(3).long()}, "data set 'mine' has 2 test samples and 3 test "),
        (Listed([{"text": "a", "labels": 0}]), Listed([(torch.ones(1), 0)]), "data set 'mine' has train items of "),
        (Listed([{"ids": [1]}]), Listed([(torch.ones(1), 0)]), "data set 'mine' has train items of dicts of ['ids']"),
        ([texts(3), Listed([(torch.ones(1), 0)])], texts(2), "some clients have arrays in dicts or tuples"),
    ],
)
def test_what_has_not_the_form_of_samples_is_refused(train: Any, test: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        as_data(train, test, "mine")
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_collate_function_takes_items_of_any_form() -> None:
    words = Listed([{"text": word, "label": len(word) % 2} for word in ("a", "bcd", "ef", "g")])

    def letters(items: Any) -> Any:
        return Pad()([{"input_ids": [ord(c) for c in i["text"]], "labels": i["label"]} for i in items])

    data = Datasets(words, words, name="words", collate=letters, tokens=200)
    assert data.kind == "trees" and data.kinds == 2 and data.shape == {"input_ids": (1,), "attention_mask": (1,)}
    assert data.class_labels(True).tolist() == [1, 1, 0, 1]  # type: ignore[union-attr]
    for wrong, message in (
        (lambda items: items, "a collate function that returns list"),
        (lambda items: {"x": torch.ones(1)}, r"a collate function that returns a dict of \['x'\]"),
        (lambda items: 1 / 0, "its collate function raised ZeroDivisionError"),
        (3, "collate of int"),
    ):
        with pytest.raises(UserError, match=message):
            Datasets(words, words, collate=wrong)  # type: ignore[arg-type]


def test_labels_of_several_tensors_need_an_objective() -> None:
    items = Listed([(torch.ones(2), {"kind": torch.tensor(1), "size": torch.tensor(0.5)})])
    with pytest.raises(UserError, match="labels of several tensors; it needs an objective"):
        Datasets(items, items)


def test_labels_of_ignored_positions_make_no_classes_to_split_by() -> None:
    ids = torch.randint(1, 9, (4, 3))
    labels = torch.tensor([[0, 1, IGNORE]] * 4)
    data = as_data({"input_ids": ids, "labels": labels}, {"input_ids": ids, "labels": labels})
    assert data.kinds == 2 and data.class_labels(True) is None
    with pytest.raises(UserError, match="train labels from -3 to 1"):
        as_data({"x": ids, "labels": labels.clamp_min(-3)}, {"x": ids, "labels": labels})
