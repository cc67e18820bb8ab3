"""Samples, batches and outputs of any shape: a tensor, or a tuple or dict of such trees.

A model is called with the tensor, with the elements of the tuple as arguments, or with the entries of the dict as
keyword arguments. A pair is (inputs, labels). A dict with an entry `labels` (or `label`) is a pair, too: its inputs
are the other entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

Tree = Any
"""a tensor, or a tuple or dict of trees"""

LABELS = ("labels", "label")
IGNORE = -100  # a label that counts neither in the loss nor in a metric


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Yield the tensors of a tree."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | tuple | list):
        for inner in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(inner)


def mapped(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Return the tree with a function of each of its tensors in their place."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {name: mapped(function, inner) for name, inner in tree.items()}
    return tuple(mapped(function, inner) for inner in tree)


def zipped(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Return a tree of a function of the tensors at the same place of trees of one structure."""
    first = trees[0]
    if isinstance(first, Tensor):
        return function(*trees)
    if isinstance(first, Mapping):
        return {name: zipped(function, *(tree[name] for tree in trees)) for name in first}
    return tuple(zipped(function, *inner) for inner in zip(*trees, strict=True))


def structure(tree: Tree) -> Tree:
    """Return the shapes and types of a tree, to be compared."""
    return mapped(lambda t: (tuple(t.shape), t.dtype), tree)


def shapes(tree: Tree) -> str:
    """Return the shapes of a tree for an error message."""
    if isinstance(tree, Tensor):
        return str(list(tree.shape))
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{name} {shapes(inner)}" for name, inner in tree.items()) + "}"
    return "(" + ", ".join(map(shapes, tree)) + ")"


def versions(tree: Tree) -> int:
    """Return the sum of torch's version counters of a tree: a write to any of its tensors raises it."""
    return sum(t._version for t in leaves(tree))


def call(model: Callable[..., Any], inputs: Tree) -> Any:
    """Return what a model makes of inputs."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def as_tree(value: Any) -> Tree:
    """Return a value as a tree of tensors: numbers, arrays and lists of numbers become tensors. Raise a TypeError for
    anything else, with its place."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        return {str(name): _placed(inner, f"'{name}'") for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(_placed(inner, f"element {i}") for i, inner in enumerate(value))
    if isinstance(value, int | float | np.number | np.ndarray | list):
        try:
            made = torch.as_tensor(np.asarray(value) if isinstance(value, list) else value)
        except (TypeError, ValueError):
            made = None  # strings, or lists of different lengths
        if made is not None:
            return made
    raise TypeError(f"{type(value).__name__}, which is no tensor, number or list of numbers")


def _placed(value: Any, where: str) -> Tree:
    try:
        return as_tree(value)
    except TypeError as error:
        raise TypeError(f"{where} is {error}") from None


def label_of(names: Mapping[str, Any]) -> str | None:
    """Return the name of the labels in a dict; None if it has none."""
    return next((name for name in LABELS if name in names), None)


def is_pair_of_trees(item: Any) -> bool:
    """Return whether this has the form of a pair: two elements, or a dict with labels."""
    if isinstance(item, Mapping):
        return label_of(item) is not None and len(item) > 1
    return isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2


def as_pair(item: Any) -> tuple[Any, Any]:
    """Return inputs and labels of an item or a batch."""
    if isinstance(item, Mapping):
        name = label_of(item)
        assert name is not None, "check is_pair_of_trees first"
        return {key: value for key, value in item.items() if key != name}, item[name]
    inputs, labels = item
    return inputs, labels


def collate(items: Sequence[Any]) -> Any:
    """Return items as a batch: tensors of equal shape are stacked."""
    if isinstance(items[0], Mapping) or not all(isinstance(v, Tensor | int | float | np.number) for v in items[0]):
        items = [as_tree(item if isinstance(item, Mapping) else tuple(item)) for item in items]
    try:
        return default_collate(list(items))
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        raise ValueError(
            "items of one batch have different shapes; pad them: fedmpi.Datasets(..., collate=fedmpi.data.Pad())"
        ) from error


@dataclass(frozen=True)
class Pad:
    """A collate function: pads tensors along their first dimension to the longest of the batch.

    Labels of padded positions are ignored (-100), masks are 0 there, and other integers are `token`. Inputs named
    `input_ids` without an `attention_mask` get one.
    """

    token: int = 0
    multiple_of: int = 1  # the padded length: fewer different shapes of batches

    def __call__(self, items: Sequence[Any]) -> Any:
        """Return items as a batch."""
        trees = [self.with_mask(as_tree(item if isinstance(item, Mapping) else tuple(item))) for item in items]
        if isinstance(trees[0], Mapping):
            return {name: self.stack(name, [tree[name] for tree in trees]) for name in trees[0]}
        inputs = [tree[0] for tree in trees]
        return self.stack("inputs", inputs), self.stack("labels", [tree[1] for tree in trees])

    def with_mask(self, tree: Tree) -> Tree:
        """Return a tree with an attention mask, if it has token indices and no mask."""
        if isinstance(tree, tuple):
            return tuple(self.with_mask(inner) for inner in tree)
        if isinstance(tree, Mapping) and "input_ids" in tree and "attention_mask" not in tree:
            return {**tree, "attention_mask": torch.ones_like(tree["input_ids"])}
        return tree

    def stack(self, name: str, trees: Sequence[Tree]) -> Tree:
        """Return trees of one structure stacked; `name` says how they are padded."""
        if isinstance(trees[0], Mapping):
            return {inner: self.stack(inner, [tree[inner] for tree in trees]) for inner in trees[0]}
        if isinstance(trees[0], tuple):
            return tuple(self.stack(name, inner) for inner in zip(*trees, strict=True))
        if not trees[0].dim():
            return torch.stack(list(trees))
        longest = -(-max(len(t) for t in trees) // self.multiple_of) * self.multiple_of
        return torch.stack([self.longer(name, t, 0, longest) for t in trees])

    def longer(self, name: str, t: Tensor, dim: int, length: int) -> Tensor:
        """Return a tensor padded along a dimension to that length."""
        whole = not t.is_floating_point()
        fill = IGNORE if name in LABELS and whole else 0 if "mask" in name or not whole else self.token
        beyond = (0, 0) * (t.dim() - 1 - dim) + (0, length - t.shape[dim])
        return F.pad(t, beyond, value=0 if name == "token_type_ids" else fill)

    def widen(self, inputs: Mapping[str, Tensor], labels: Tensor, length: int) -> tuple[Tree, Tree]:
        """Return a batch with `input_ids`, and all that is as long, padded to that length."""
        own = inputs["input_ids"].shape[1]

        def wide(name: str, t: Tensor) -> Tensor:
            return self.longer(name, t, 1, length) if t.dim() > 1 and t.shape[1] == own else t

        return {name: wide(name, t) for name, t in self.with_mask(inputs).items()}, wide("labels", labels)


PAD = Pad()


def trimmed(inputs: Tree, labels: Tensor) -> tuple[Tree, Tree]:
    """Return a padded batch on the host without the positions at its end that no sample's attention mask has."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if mask is None or mask.dim() != 2:
        return inputs, labels
    length = mask.shape[1]
    used = int(mask.any(0).nonzero().max()) + 1 if bool(mask.any()) else length

    def cut(t: Tensor) -> Tensor:
        return t[:, :used] if t.dim() > 1 and t.shape[1] == length else t

    return (inputs, labels) if used == length else (mapped(cut, inputs), mapped(cut, labels))
