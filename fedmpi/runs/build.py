"""From a configuration to what a run is made of: the algorithm, the data and their split, the model on a device.

Everything that needs neither data nor other ranks is checked by `prepare`; what depends on the data, by `load_data` and
`make_task`. Every mistake is a `UserError`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..aggregate.sums import check_wire
from ..algorithms import ALGORITHMS, Algorithm, MetaStep, Row, combine, find_row
from ..clients.augment import make_augment
from ..clients.execution import Mode, try_mode
from ..clients.feed import Pair, make_feed
from ..clients.still import twin
from ..clients.task import Task
from ..clients.together import Together
from ..cohort import Work, make_share
from ..data import (
    DATASETS,
    SPLITS,
    Arrays,
    Data,
    Ints,
    Partition,
    TextOptions,
    assign_styles,
    check_weights,
    find_data,
    hold_out,
    load,
    split,
)
from ..data.objective import check_outputs, try_objective
from ..data.splits import SplitSpec
from ..data.trees import call, mapped, shapes
from ..device import free_bytes, records_graphs, sums_device
from ..errors import RunError, UserError, one_line, raised, unknown
from ..flat import matching, parts_of
from ..local import PRIVATE, LocalKnobs, LocalRule, make_local
from ..local.memory import Memory
from ..masks import MASKS, MaskKnobs, make_mask
from ..masks import try_out as try_mask
from ..models import MODELS, ModelRow, find_model, make_model
from ..models.hf import Lora, add_lora, is_transformer, positions, read_lora
from ..plugins import hub
from ..plugins.knobs import fallbacks, handed_over, knobs, with_values
from ..rounds import Plan
from ..schedules import make_rate
from ..seeds import torch_seed
from ..server import VARIANTS, ServerKnobs, make_server
from ..server import try_out as try_server
from .aliases import real_value
from .config import Config, Meta, check
from .extend import NO_OPTIONS, declared, extend
from .log import sink_names
from .measures import make_measure, measure_names

log = logging.getLogger("fedmpi")

USUAL = {"images": "lenet", "sequences": "gru", "numbers": "logistic"}
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
LABELLED = ("classes", "dirichlet", "mixed")  # the splits that deal by label


@dataclasses.dataclass(frozen=True)
class Overrides:
    """What a caller in Python passes as an object instead of by name."""

    data: Data | None = None
    model: nn.Module | None = None
    algorithm: Row | Algorithm | None = None

    @property
    def row(self) -> Row | None:
        """Return the row to fill knobs in from if an algorithm was passed; of an `Algorithm` none is read."""
        return OWN if isinstance(self.algorithm, Algorithm) else self.algorithm


OWN = Row("sgd", "sgd", {"tau": 0.0})
NOTHING = Overrides()


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """A configuration that has been checked and whose names have been looked up."""

    cfg: Config
    algorithm: Algorithm
    model: ModelRow | None
    """None: handed over, or that which fits the data"""
    work: Work
    out: Path | None
    """None: nothing is written"""
    given: Overrides = NOTHING


def prepare(cfg: Config, given: Overrides = NOTHING) -> RunSpec:
    """Check everything that needs neither data nor other ranks; a `UserError` names the first mistake."""
    check(cfg)
    cfg = by_real_names(cfg, given)
    row = given.row or find_row(cfg.algorithm)
    check_threshold(cfg, row)
    check_momentum(cfg)
    cfg = resolve(extend(cfg, row), row)
    try:
        check(cfg)  # once more, for what a row of the user's own has filled in
    except UserError as error:
        raise UserError(f"algorithm '{cfg.algorithm}': {error}") from None
    if cfg.split not in SPLITS:
        raise unknown("split", cfg.split, SPLITS)
    check_wire(cfg.sum, cfg.wire)
    if given.data is None and ":" not in cfg.data:
        usual = find_data(cfg.data)
        skew = replace(cfg.skew, classes=cfg.skew.classes or usual.classes)
        cfg = replace(cfg, model=cfg.model or usual.model, skew=skew)
    check_texts(cfg, given)
    if cfg.augment is not None:
        make_augment(cfg.augment)
    if cfg.meta.weights is not None:
        check_weights(cfg.meta.weights)
    assert cfg.local.epochs is not None, "resolved above"
    work = Work(cfg.local.epochs, cfg.local.steps, cfg.local.batch, make_share(cfg.local.work))
    if cfg.out == "":
        raise UserError("--out is ''; name a folder, or leave it out")
    out = Path(default_folder(cfg, row) if cfg.out is None else cfg.out).expanduser()
    if isinstance(given.algorithm, Algorithm):
        algorithm = given.algorithm
        try_mask("of your own", algorithm.mask)
        try_server("of your own", algorithm.server)
    else:
        algorithm = build(cfg)
    model = None if cfg.model is None or given.model is not None else find_model(cfg.model)
    for name in measure_names(cfg.evaluate):
        make_measure(name)
    sink_names(cfg.log_to)
    return RunSpec(cfg, algorithm, model, work, out, given)


def check_texts(cfg: Config, given: Overrides) -> None:
    """Check the options of models and data sets of Hugging Face; nothing is imported or opened."""
    if cfg.lora is not None:
        read_lora(cfg.lora)
        if given.model is None and not hub.on_hub(cfg.model):
            raise UserError(f"--lora is for models of transformers, and --model is {cfg.model}; give --model hf:...")
    for option, name in (("--model", cfg.model), ("--data", cfg.data), ("--text.tokenizer", cfg.text.tokenizer)):
        if hub.on_hub(name):
            hub.check_installed(f"{option} {name}")
    if given.data is not None or not hub.on_hub(cfg.data):
        read = {"pad": hub.on_hub(cfg.model), "tokenizer": cfg.generate is not None}
        asked = {f"--text.{name}": one for name, one in vars(cfg.text).items() if not read.get(name)}
        asked["--skew.owner"] = cfg.skew.owner
        if unread := [name for name, one in asked.items() if one]:
            raise UserError(f"{unread[0]} is for --data hf:..., and --data is {cfg.data}; leave it out")
    elif cfg.split == "natural" and cfg.skew.owner is None:
        raise UserError("split 'natural' of --data hf:... needs --skew.owner, the column whose values name the clients")
    if cfg.generate is not None and tokenizer_name(cfg, given) is None:
        raise UserError("--generate needs a tokenizer; give --text.tokenizer hf:FOLDER, or --model hf:FOLDER")


def tokenizer_name(cfg: Config, given: Overrides) -> str | None:
    """Return the name of the tokenizer: what --text.tokenizer says, or the model's."""
    if cfg.text.tokenizer is not None:
        return cfg.text.tokenizer
    if given.model is None:
        return cfg.model if hub.on_hub(cfg.model) else None
    home = str(getattr(given.model, "name_or_path", ""))
    return f"{hub.HUB}{home}" if home and (Path(home) / "tokenizer_config.json").exists() else None


def text_options(cfg: Config, given: Overrides) -> TextOptions:
    """Return the options of a data set of Hugging Face."""
    return TextOptions(**{**vars(cfg.text), "tokenizer": tokenizer_name(cfg, given)}, owner=cfg.skew.owner)


def by_real_names(cfg: Config, given: Overrides) -> Config:
    """Return the configuration with the real names of rows of our tables: FedAvg is fedavg, Fashion-MNIST fmnist."""
    tables: dict[str, Iterable[str]] = {"algorithm": ALGORITHMS, "mask": MASKS, "split": SPLITS, "model": MODELS}
    tables |= {} if given.data is not None else {"data": DATASETS}
    words: dict[str, Any] = {name: getattr(cfg, name) for name in tables}
    real: dict[str, Any] = {n: word and real_value(n, word, tables[n]) for n, word in words.items()}
    return replace(cfg, **real)


def check_threshold(cfg: Config, row: Row) -> None:
    """Refuse a threshold that nothing reads: no mask was named, and the algorithm averages plainly."""
    masked = cfg.mask is not None or row.defaults.get("mask", "mean") != "mean"
    if cfg.tau and not masked and "agreement" not in measure_names(cfg.evaluate):
        raise UserError(
            f"--tau is {cfg.tau:g}, but {cfg.algorithm} averages plainly unless a mask is named; add --mask gma (or "
            "and, sand), or leave --tau out"
        )


def check_momentum(cfg: Config) -> None:
    """Refuse a momentum that nothing reads."""
    name = "adamw" if cfg.local.rule == "adamw" else cfg.local.optimizer
    if cfg.local.momentum and name != "sgd":
        raise UserError(f"--local.momentum is {cfg.local.momentum:g}, but it is of sgd, not of {name}; leave it out")


def default_folder(cfg: Config, row: Row) -> str:
    """Return runs/ and what the run is: algorithm, the rules that are not its own, mask, data, seed."""
    others = [rule for rule, own in ((cfg.local.rule, row.local), (cfg.server.rule, row.server)) if rule != own]
    name = "-".join(map(str, [cfg.algorithm, *others, cfg.mask, cfg.data, cfg.seed]))
    return "runs/" + re.sub(r"[^\w.-]+", "-", name)


def plan_of(spec: RunSpec) -> Plan:
    """Return how the rounds of a run are run."""
    cfg = spec.cfg
    return Plan(cfg.seed, cfg.rounds, cfg.cohort, spec.work, cfg.sum, cfg.min_clients, cfg.wire)


def resolve(cfg: Config, row: Row | None = None) -> Config:
    """Return the configuration with every option that was left to the algorithm filled in: from its row, with the rules
    that were asked for, then from what the options fall back on."""
    row = row or find_row(cfg.algorithm)
    for name in ("local", "server"):
        if not isinstance(getattr(row, name), str):
            raise UserError(f"algorithm '{cfg.algorithm}' has {name} = {getattr(row, name)!r}; it must be a name")
    usual = fallbacks(cfg)
    check_defaults(cfg.algorithm, row.defaults, usual)
    row = combine(row, cfg.local.rule or row.local, cfg.server.rule or row.server)
    filled = {**usual, **row.defaults, "local.rule": row.local, "server.rule": row.server}
    if cfg.server.variant in VARIANTS:
        filled |= {"server.b2": VARIANTS[cfg.server.variant].b2, "server.eps": VARIANTS[cfg.server.variant].eps}
    given = knobs(cfg)
    resolved: Config = with_values(cfg, {name: value for name, value in filled.items() if given[name] is None})
    return resolved


def check_defaults(algorithm: str, defaults: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Refuse a row's default for what is no option, or not left to algorithms, and one of the wrong type."""
    for name, value in defaults.items():
        if name not in usual:
            raise unknown(f"default in the row of algorithm '{algorithm}'", name, usual)
        kind = (int, float) if isinstance(usual[name], float) else type(usual[name])
        if not isinstance(value, kind) or isinstance(value, bool) != isinstance(usual[name], bool):
            raise UserError(f"algorithm '{algorithm}' has {name} = {value!r}; it must be like {usual[name]!r}")


def build(cfg: Config) -> Algorithm:
    """Return the algorithm of a resolved configuration; an unknown name is a `UserError` with the nearest match."""
    local, server, mask = cfg.local, cfg.server, cfg.mask
    assert mask is not None and local.rule is not None and server.rule is not None, "resolve the configuration first"
    assert local.lr is not None and server.lr is not None
    client_rate = make_rate("--local.schedule", local.schedule, local.lr, cfg.rounds)
    client = handed_over(declared("local.rule", local.rule, LocalKnobs), local, lr=client_rate)
    masking = handed_over(declared("mask", mask, MaskKnobs), cfg, getattr(cfg, "mask_options", NO_OPTIONS))
    server_rate = make_rate("--server.schedule", server.schedule, server.lr, cfg.rounds)
    serving = handed_over(declared("server.rule", server.rule, ServerKnobs), server, lr=server_rate)
    return Algorithm(
        make_local(local.rule, client),
        make_mask(mask, knobs=masking),
        make_server(server.rule, serving),
        build_meta(cfg.meta),
    )


def build_meta(meta: Meta) -> MetaStep | None:
    """Return the meta step, or None if its learning rate is zero."""
    assert meta.size is not None and meta.lr is not None and meta.share is not None, "resolve it first"
    if (meta.lr or meta.share) and not meta.size:
        why = f"--meta.lr is {meta.lr:g}" if meta.lr else "--meta.share is true"
        raise UserError(f"{why} but --meta.size is 0; give the number of samples to hold out")
    if meta.weights is not None and not meta.size:
        raise UserError("--meta.weights are given but --meta.size is 0; give the number of samples to hold out")
    return MetaStep(meta.lr, meta.batch) if meta.lr else None


def load_data(cfg: Config, given: Overrides = NOTHING) -> tuple[Data, Partition, Ints]:
    """Return the data set, who has which part of it, and the meta set: what no client has, or every client too."""
    data = load(cfg.data, cfg.data_root, text_options(cfg, given)) if given.data is None else given.data
    needed = cfg.split in LABELLED or bool(cfg.meta.size and cfg.meta.weights)
    y = data.class_labels(needed)
    if y is None:
        if needed:
            what = f"split '{cfg.split}' goes" if cfg.split in LABELLED else "--meta.weights go"
            kind = "tokens" if data.goal.whole else "numbers"
            raise UserError(
                f"{what} by class, and '{data.name}' has {kind} for labels; use another split, such as iid or natural, "
                "and no weights"
            )
        y = np.zeros(data.samples, dtype=np.int64)
    meta, rest = np.zeros(0, dtype=np.int64), None
    if cfg.meta.size:
        meta = hold_out(y, data.kinds if needed else 1, cfg.meta.size, cfg.meta.seed, cfg.meta.weights)
        rest = np.setdiff1d(np.arange(len(y)), meta, assume_unique=True)

    def left(values: Ints) -> Ints:
        return values if rest is None else values[rest]

    strata = data.split_labels(needed)
    partition = split(
        SplitSpec(
            cfg.split,
            left(y if strata is None else strata),
            cfg.clients,
            cfg.seed,
            classes_per_client=cfg.skew.classes or 2,
            alpha=cfg.skew.alpha,
            beta=cfg.skew.beta,
            noise=cfg.skew.noise,
            owner=None if data.owners is None else left(data.owners),
            owners=cfg.skew.owners,
            skewed=data.styles is not None,
        )
    )
    shared = meta if cfg.meta.share else meta[:0]
    order = partition.order if rest is None else rest[partition.order]
    partition = Partition(partition.offsets, order, shared)
    if isinstance(data, Arrays):
        data = assign_styles(data, partition, cfg.seed)
        data = data if cfg.augment is None else replace(data, augment=cfg.augment)
    if cfg.augment not in (None, "none") and data.kind != "images":
        raise UserError(f"--augment is '{cfg.augment}', but '{data.name}' has {data.kind}, not images; use none")
    return data, partition, meta


def make_task(
    spec: RunSpec,
    data: Data,
    partition: Partition,
    meta: Ints,
    ranks: int,
    device: torch.device,
) -> tuple[RunSpec, Task]:
    """Return the model for these data on this rank's device, with weights drawn from the seed unless it was given; and
    the spec, with the model's name if that was left to the data."""
    cfg, given = spec.cfg, spec.given.model
    name = type(given).__name__ if given is not None else cfg.model or usual_model(data)
    samples = few_samples(data)
    row = ModelRow(nn.Module) if given is not None else spec.model or find_model(name)
    model = first_model(cfg, name, row, data, given)
    check_export(spec, name, model)
    try_model(model, name, data, samples, device)
    layouts = ("contiguous", "channels_last")
    layout = cfg.step.layout
    if layout == "auto":
        users = given is not None or (":" in name and not name.startswith("torchvision:"))
        layout = layouts[gains_channels_last(model, samples, device) if users else row.channels_last]
    cfg = replace(cfg, model=name, step=replace(cfg.step, layout=layout))
    own = private_names(model, cfg.local.private, spec.algorithm.local)
    if own:
        rule = spec.algorithm.local
        algorithm = replace(spec.algorithm, local=replace(rule, keeps=(*rule.keeps, PRIVATE)))
        spec = replace(spec, algorithm=algorithm)
    at_once = min(cfg.step.together, cfg.cohort)
    make = partial(Together, clients=at_once) if at_once > 1 else Task
    if cfg.step.graphs and not records_graphs(device):
        raise UserError(f"--step.graphs is true, but {device.type} records no graphs; leave it out")
    task = make(
        model,
        data,
        partition,
        cfg.seed,
        device,
        ranks,
        layout == "channels_last",
        meta,
        workers=cfg.workers,
        tests=cfg.eval.samples,
        mode=Mode(cfg.step.precision, cfg.step.compile),
        sums_device=sums_device(device, cfg.sums),
        data_on_host=cfg.data_on == "host" or (cfg.data_on == "auto" and not fits(data, device)),
        drop_out_of_memory=cfg.step.out_of_memory == "drop",
        graphs=cfg.step.graphs,
        kernels=cfg.step.kernels == "auto",
        private=own,
    )
    try_mode(task, name, samples, min(cfg.local.batch, int(partition.sizes.max())))
    if isinstance(task, Together):
        task.check(name, samples)
    return replace(spec, cfg=cfg), task


def first_model(cfg: Config, name: str, row: ModelRow, data: Data, given: nn.Module | None) -> nn.Module:
    """Return the model before the first round: made for the data with weights drawn from the seed, or as it was given;
    with its adapter, and partly frozen."""
    offers, lora = data.offers, None if cfg.lora is None else read_lora(cfg.lora)  # reading data may draw
    if given is None and hub.on_hub(name):
        goal = data.goal
        offers |= {"whole": goal.whole, "by_class": goal.by_class, "label": data.sample[1]}
        offers |= {"base": lora.base if lora else Lora.base, "pad": cfg.text.pad}
    torch.manual_seed(torch_seed(cfg.seed, "model"))
    model = make_model(name, row, offers, data.name) if given is None else given
    if lora is not None:
        model = add_lora(model, lora, name)
    freeze(model, cfg.local.freeze)
    return model


def check_export(spec: RunSpec, name: str, model: nn.Module) -> None:
    """Refuse an export or a text that this model cannot give."""
    cfg, out = spec.cfg, spec.out
    if cfg.export == "merged":
        if not is_transformer(model):
            raise UserError(f"--export is merged, which is for models of transformers; '{name}' is none: leave it out")
        if out is None:
            raise UserError("--export is merged, which is a folder in the run folder; give out")
    if cfg.generate is not None:
        if not (is_transformer(model) and model.can_generate()):  # type: ignore[operator]
            raise UserError(f"--generate needs a language model of transformers, and '{name}' is none; leave it out")
        tokens = len(hub.load_tokenizer(str(tokenizer_name(cfg, spec.given)))(cfg.generate)["input_ids"])
        most = positions(model)
        if not tokens or (most is not None and tokens >= most):
            valid = "one or more" if most is None else f"1 to {most - 1}"
            raise UserError(f"--generate has {tokens} tokens, and '{name}' can continue {valid}; give another text")


def usual_model(data: Data) -> str:
    """Return the name of the model that these data get by default."""
    if data.kind not in USUAL:
        raise UserError(f"'{data.name}' has several tensors per sample, for which there is no model; give --model")
    return USUAL[data.kind]


@torch.no_grad()
def gains_channels_last(model: nn.Module, samples: Pair, device: torch.device) -> bool:
    """Return whether a model of the user's own runs with channels innermost, and is faster so on a CPU by rule: it has
    convolutions, and no normalisation by groups, which has no such kernel (benchmarks/step.py)."""
    kinds = {type(module) for module in model.modules()}
    if device.type != "cpu" or not kinds & {nn.Conv2d} or kinds & {nn.GroupNorm, nn.InstanceNorm2d}:
        return False
    inner: Any = twin(model).eval()
    try:
        call(inner.to(memory_format=torch.channels_last), mapped(lambda t: t.to(device), samples[0]))
    except (Exception, SystemExit):  # a view of what is contiguous no longer
        return False
    return True


def freeze(model: nn.Module, patterns: str | None) -> None:
    """Freeze the parameters that patterns match."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in [] if patterns is None else matching(names, patterns, "--local.freeze"):
        model.get_parameter(name).requires_grad_(False)


def private_names(model: nn.Module, patterns: str | None, rule: LocalRule) -> list[str]:
    """Return the names of the parameters and float buffers that clients keep to themselves."""
    if patterns is None:
        return []
    if not rule.trains:
        raise UserError("--local.private is given, but this client rule sends gradients and trains no model of its own")
    parts = parts_of(model)
    norms = [name for name, module in model.named_modules() if isinstance(module, NORMS)]
    words = [",".join(norms) if word.strip() == "bn" and norms else word for word in patterns.split(",")]
    first = {id(p): name for name, p in model.named_parameters()}
    tied = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != n}
    found = matching([*parts.trained, *parts.floats, *parts.still, *tied], ",".join(words), "--local.private")
    if halves := [f"'{a}' and '{b}'" for a, b in tied.items() if (a in found) != (b in found)]:
        raise UserError(
            f"--local.private: {halves[0]} are one tensor, which cannot be private and shared at once; name both, or "
            "none"
        )
    found = [name for name in found if name not in tied]
    if frozen := [name for name in found if name in parts.still]:
        raise UserError(f"--local.private: '{frozen[0]}' is frozen; a private parameter is trained: leave it out")
    return found


def fits(data: Data, device: torch.device) -> bool:
    """Return whether a data set takes at most half of a device's free memory."""
    return not isinstance(data, Arrays) or data.nbytes <= free_bytes(device) / 2


def few_samples(data: Data) -> Pair:
    """Return two test samples and their labels, or one if there is only one."""
    feed = make_feed(data, torch.device("cpu"))
    try:
        return next(feed.test([torch.arange(min(2, feed.tests))]))
    except RunError as error:
        raise UserError(str(error)) from error


@torch.no_grad()
def try_model(model: nn.Module, name: str, data: Data, samples: Pair, device: torch.device) -> None:
    """Refuse a model that does not take these data or does not answer in the shape of their labels, and an objective
    that cannot judge the answer, before anything has started; also make the parameters of lazy layers."""
    x, y = (mapped(lambda t: t.to(device), tree) for tree in samples)
    model.to(device).eval()
    try:
        outputs = call(model, x)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"model '{name}' raised {type(error).__name__} for samples {shapes(x)} of '{data.name}': "
            f"{one_line(error)}; use a model that takes them"
        ) from error
    goal = data.goal
    try:
        outputs, y = goal.align(outputs, y)
    except (Exception, SystemExit) as error:
        raise UserError(f"objective '{goal.name}': its align raised {raised(error)}") from error
    check_outputs(outputs, y, data.kinds if goal.whole else 0, goal, name)
    try_objective(goal, outputs, y)


def check_memory_folder(spec: RunSpec) -> None:
    """Refuse a folder for clients' memories that this rank cannot write to."""
    folder = spec.cfg.memory.folder
    if folder is None:
        return
    try:
        with tempfile.TemporaryFile(dir=Path(folder).expanduser()):
            pass
    except OSError as error:
        raise UserError(
            f"--memory.folder {folder} cannot be written ({error.strerror}); make it, or name another"
        ) from None


def make_memory(spec: RunSpec, task: Task) -> Memory:
    """Return the memory for what this rank's clients keep."""
    cfg, names = spec.cfg.memory, spec.algorithm.local.keeps
    folder = Path(cfg.folder).expanduser() if cfg.folder else spec.out or Path(tempfile.gettempdir())
    if not folder.is_dir():  # a node may not see the run folder
        folder = Path(tempfile.gettempdir())
        if names:
            log.warning("the run folder is not seen here: clients' memories beyond the limit go to %s", folder)
    first = {PRIVATE: task.first_private.cpu()}
    return Memory(names, task.layout.params, int(cfg.limit * 2**30), folder, first, spec.work)
