"""Rebuild a finished run's model and data from its folder.

The configuration names the data, the split and the model; the weights are read by name. The result is checked against
what the run has recorded: the SHA-256 of the model file, the partition, and the loss on the test set.
"""

from __future__ import annotations

import copy
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
from ...flat import parts_of
from ...models import MODELS, ModelRow, find_model
from ...runs.build import USUAL, Overrides, few_samples, first_model, load_data, try_model
from ...runs.checkpoint.format import digest
from ...runs.config import Config
from ...runs.folder import FINISHED, MODEL
from ...runs.options import from_values
from ...runs.schema import Damaged, Dealt, opened, read
from ..runs import MOST_PARTITION, PARTITION, Run

AGAIN = "; train it again, or restore the original"


@dataclass(frozen=True)
class Rebuilt:
    """The trained model of a run, and its data."""

    run: Run
    cfg: Config
    model: nn.Module
    """on its device, in evaluation mode"""
    data: Data
    """as the clients see them"""
    partition: Partition
    meta: Ints
    device: torch.device

    @property
    def scored(self) -> Ints:
        """Return the test samples that the run scored its model on."""
        return choose_tests(self.data.tests, self.cfg.eval.samples).numpy()

    def samples(self, numbers: Ints, test: bool) -> Iterator[Pair]:
        """Yield batches of train or test samples by index, preprocessed for the model but not augmented."""
        feed = make_feed(self.data, self.device)
        blocks = list(torch.split(torch.from_numpy(numbers), self.cfg.eval.batch)) if len(numbers) else []
        return feed.test(blocks) if test else feed.plain(blocks)


def finished(run: Run) -> Run:
    """Return the run; raise a `UserError` if it is not finished."""
    if not run.finished:
        raise UserError(
            f"the run in '{run.folder}' is not finished: there is no {FINISHED}; wait for it, or start it again"
        )
    return run


def config_of(run: Run, data_root: str | None) -> Config:
    """Return the configuration of a run, with another data root if one is given."""
    try:
        cfg = from_values(run.config)
    except UserError as error:
        raise UserError(f"the configuration of '{run.folder}' cannot be used: {error}") from None
    return cfg if data_root is None else replace(cfg, data_root=data_root)


def rebuild(run: Run, cfg: Config, device: torch.device, given: Overrides) -> Rebuilt:
    """Return the trained model of a run, and its data; `given`: the objects that it was passed in Python."""
    check_names(run, cfg, given)
    weights = read_weights(run)
    data, partition, meta = load_data(cfg, given)
    check_partition(run, data, partition)
    model = model_of(run, cfg, data, device, weights, given.model)
    return Rebuilt(run, cfg, model, data, partition, meta, device)


def check_names(run: Run, cfg: Config, given: Overrides) -> None:
    """Refuse a run whose data or model were Python objects: the folder has only their names."""
    handed = []
    if given.data is None and ":" not in cfg.data and cfg.data not in DATASETS:
        handed.append(f"data ('{cfg.data}')")
    if given.model is None and cfg.model and ":" not in cfg.model and cfg.model not in MODELS:
        handed.append(f"model ('{cfg.model}')")
    if handed:
        raise UserError(
            f"the run in '{run.folder}' got its {' and its '.join(handed)} as Python objects, so it cannot be rebuilt "
            "from its folder; train with names or import paths, or pass them again: attack_run(folder, given=...)"
        )


def read_weights(run: Run) -> dict[str, Tensor]:
    """Return the tensors of a run's model by name; raise a `FileError` if the file is not the one the run wrote."""
    path = run.folder / MODEL
    try:
        with opened(path), safetensors.safe_open(path, "pt"):  # check the header before the whole file is read
            pass
        if digest(path) != run.finished.get("model_sha256"):
            raise FileError(f"'{path}' is not the file that the run has written: its SHA-256 differs{AGAIN}")
        return safetensors.torch.load_file(path)
    except (OSError, SafetensorError, Damaged) as error:
        raise FileError(f"'{path}' cannot be read ({reason(error)}){AGAIN}") from None


def check_partition(run: Run, data: Data, partition: Partition) -> None:
    """Refuse data whose partition differs from that of the run."""
    labels = data.class_labels(needed=False)
    y, kinds = (np.zeros(data.samples, dtype=np.int64), 1) if labels is None else (labels, data.kinds)
    recorded = dict(read(run.folder / PARTITION, Dealt, MOST_PARTITION) or {})
    found = partition.manifest(y, kinds)
    if not recorded:
        raise Damaged(run.folder / PARTITION, "does not describe the partition of the data")
    differing = [name for name in found if name in recorded and recorded[name] != found[name]]
    if differing:
        raise UserError(
            f"the data '{data.name}' are not those of the run in '{run.folder}': its {PARTITION} differs in "
            f"{', '.join(differing)}{AGAIN}"
        )


def model_of(
    run: Run,
    cfg: Config,
    data: Data,
    device: torch.device,
    weights: dict[str, Tensor] | None = None,
    given: nn.Module | None = None,
) -> nn.Module:
    """Return the model of a run with these weights, without them as it was before the first round."""
    name, samples = cfg.model or USUAL[data.kind], few_samples(data)
    row = ModelRow(nn.Module) if given is not None else find_model(name)
    model = first_model(cfg, name, row, data, copy.deepcopy(given))
    try:
        if weights is not None:
            still = {id(t) for t in parts_of(model).still.values()}  # not in the file
            kept = {key: t for key, t in model.state_dict(keep_vars=True).items() if id(t) in still}
            model.load_state_dict(kept | weights, strict=True)
    except RuntimeError as error:
        raise UserError(
            f"the model '{name}' is not that of the run in '{run.folder}': {one_line(error)[:300]}{AGAIN}"
        ) from None
    try_model(model, name, data, samples, device)
    return model


def untrained(rebuilt: Rebuilt) -> Rebuilt:
    """Return the same run with the model as it was before the first round."""
    cfg = rebuilt.cfg
    if cfg.model and ":" not in cfg.model and cfg.model not in MODELS:
        raise UserError(
            f"the run in '{rebuilt.run.folder}' got its model ('{cfg.model}') as a Python object, whose initial "
            "weights are not known; leave --control out"
        )
    return replace(rebuilt, model=model_of(rebuilt.run, cfg, rebuilt.data, rebuilt.device))
