"""A finished run's model and data once more, from nothing but its folder.

The configuration tells the data, the split and the model; the weights are read by their names. Whether what comes out
is what was trained is seen from what the run wrote down: the SHA-256 of the model's file, the partition, and the loss
on the test set.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ...clients.feed import Pair, make_feed
from ...clients.task import choose_tests
from ...data import DATASETS, Data, Ints, Partition
from ...errors import FileError, UserError, one_line, reason
from ...models import MODELS, find_model, make_model
from ...runs.build import USUAL, Given, few_samples, load_data, try_model
from ...runs.checkpoint import digest
from ...runs.config import Config
from ...runs.folder import FINISHED, MODEL
from ...runs.options import from_values
from ...runs.schema import Damaged, Dealt, opened, read
from ...seeds import torch_seed
from ..runs import MOST_PARTITION, PARTITION, Run

NEAR = 1e-3  # relative: another machine rounds otherwise
AGAIN = "; train it again, or put back what it had"


@dataclass(frozen=True)
class Rebuilt:
    """What a run has trained, and on what."""

    run: Run
    cfg: Config
    model: nn.Module
    """on its device, for answers and not for training"""
    data: Data
    """as the clients have them"""
    partition: Partition
    meta: Ints
    device: torch.device

    @property
    def scored(self) -> Ints:
        """Return the test samples that the run scored its model on."""
        return choose_tests(self.data.tests, self.cfg.eval.samples).numpy()

    def samples(self, numbers: Ints, test: bool) -> Iterator[Pair]:
        """Yield train or test samples by their numbers, as the model takes them but not augmented, some at a time."""
        feed = make_feed(self.data, self.device)
        blocks = list(torch.split(torch.from_numpy(numbers), self.cfg.eval.batch)) if len(numbers) else []
        return feed.test(blocks) if test else feed.plain(blocks)


def finished(run: Run) -> Run:
    """Return the run; raise a `UserError` if it is not done."""
    if not run.finished:
        raise UserError(
            f"the run in '{run.folder}' is not finished: there is no {FINISHED}; wait for it, or start it again"
        )
    return run


def config_of(run: Run, data_root: str | None) -> Config:
    """Return the configuration of a run, with another data root where one is given."""
    try:
        cfg = from_values(run.config)
    except UserError as error:
        raise UserError(f"the configuration of '{run.folder}' cannot be used: {error}") from None
    return cfg if data_root is None else replace(cfg, data_root=data_root)


def rebuild(run: Run, cfg: Config, device: torch.device, given: Given) -> Rebuilt:
    """Return the model that a run has trained, and its data; `given`: what was handed over to it in Python."""
    check_names(run, cfg, given)
    weights = read_weights(run)
    data, partition, meta = load_data(cfg, given.data)
    check_partition(run, data, partition)
    model = trained_model(run, cfg, data, weights, device, given.model)
    return Rebuilt(run, cfg, model, data, partition, meta, device)


def check_names(run: Run, cfg: Config, given: Given) -> None:
    """Refuse a run whose data or model were objects of a Python program: the folder has no more than their names."""
    handed = []
    if given.data is None and ":" not in cfg.data and cfg.data not in DATASETS:
        handed.append(f"data ('{cfg.data}')")
    if given.model is None and cfg.model and ":" not in cfg.model and cfg.model not in MODELS:
        handed.append(f"model ('{cfg.model}')")
    if handed:
        raise UserError(
            f"the run in '{run.folder}' was handed its {' and its '.join(handed)} in Python, so it cannot be rebuilt "
            "from its folder; train with names or import paths, or hand them over again: attack_run(folder, given=...)"
        )


def read_weights(run: Run) -> dict[str, Tensor]:
    """Return the tensors of a run's model by name; raise a `FileError` if they are not those that the run wrote."""
    path = run.folder / MODEL
    try:
        with opened(path), safetensors.safe_open(path, "pt"):  # what is no model is not read in full
            pass
        if digest(path) != run.finished.get("model_sha256"):
            raise FileError(f"'{path}' is not the file that the run has written: its SHA-256 is another{AGAIN}")
        return safetensors.torch.load_file(path)
    except (OSError, SafetensorError, Damaged) as error:
        raise FileError(f"'{path}' cannot be read ({reason(error)}){AGAIN}") from None


def check_partition(run: Run, data: Data, partition: Partition) -> None:
    """Refuse data that deal otherwise to the clients than they did in the run."""
    labels = data.class_labels(needed=False)
    y, kinds = (np.zeros(data.samples, dtype=np.int64), 1) if labels is None else (labels, data.kinds)
    recorded = dict(read(run.folder / PARTITION, Dealt, MOST_PARTITION) or {})
    found = partition.manifest(y, kinds)
    if not recorded:
        raise Damaged(run.folder / PARTITION, "does not say how the data were dealt out")
    other = [name for name in found if name in recorded and recorded[name] != found[name]]
    if other:
        raise UserError(
            f"the data '{data.name}' are not those of the run in '{run.folder}': its {PARTITION} has another "
            f"{', '.join(other)}{AGAIN}"
        )


def trained_model(
    run: Run, cfg: Config, data: Data, weights: dict[str, Tensor], device: torch.device, given: nn.Module | None
) -> nn.Module:
    """Return the model of a run with its trained weights."""
    name, samples = name_of(cfg, data), few_samples(data)
    model = new_model(cfg, data) if given is None else copy.deepcopy(given)
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise UserError(
            f"the model '{name}' is not that of the run in '{run.folder}': {one_line(error)[:300]}{AGAIN}"
        ) from None
    try_model(model, name, data, samples, device)
    return model


def new_model(cfg: Config, data: Data) -> nn.Module:
    """Return the model with which the run began: torch draws as it did there."""
    name, offers = name_of(cfg, data), data.offers
    torch.manual_seed(torch_seed(cfg.seed, "model"))
    return make_model(name, find_model(name), offers, data.name)


def name_of(cfg: Config, data: Data) -> str:
    return cfg.model or USUAL[data.kind]


def untrained(rebuilt: Rebuilt) -> Rebuilt:
    """Return the same with the model as it was before the first round."""
    cfg, data = rebuilt.cfg, rebuilt.data
    name, samples = name_of(cfg, data), few_samples(data)
    if ":" not in name and name not in MODELS:
        raise UserError(
            f"the run in '{rebuilt.run.folder}' was handed its model ('{name}') in Python, and how that began is not "
            "known; leave --control out"
        )
    model = new_model(cfg, data)
    try_model(model, name, data, samples, rebuilt.device)
    return replace(rebuilt, model=model)


def check_score(rebuilt: Rebuilt, loss: float) -> None:
    """Refuse a model whose mean loss on the scored test samples is not what the run has found: data or code are not
    what they were."""
    recorded = rebuilt.run.finished.get("test_loss")
    if isinstance(recorded, int | float) and not math.isclose(loss, recorded, rel_tol=NEAR, abs_tol=NEAR / 10):
        raise UserError(
            f"the model of '{rebuilt.run.folder}' has a test loss of {loss:.6g} on '{rebuilt.data.name}', and had "
            f"{recorded:.6g} when it was trained: the data or the model's code have changed{AGAIN}"
        )
