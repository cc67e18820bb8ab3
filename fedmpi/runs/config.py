"""Every option of a run, its help text and its bounds: a tree of frozen dataclasses, read from the command line and
YAML by jsonargparse.

A field's bounds stand next to its default and are checked in one place, so an error always reads the same: what was
given, what is valid. The knobs of rules and masks are declared in `knobs.py` and joined with those of the run
here; plug-ins add theirs (`extend.py`). Fields that default to null are filled in by the algorithm's row
(`build.resolve`) or by the machine; their help texts say so after "Default:".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..knobs import LocalKnobs, MaskKnobs, ServerKnobs
from ..plugins.knobs import check_bounds, knob, options

FREE: tuple[str, ...] = ("out", "comm", "timeout", "workers", "log_to", "resume", "max_minutes", "data_root")
FREE += ("sums", "data_on", "step.out_of_memory", "evaluate", "memory.", "checkpoint.", "quiet", "verbose")
FREE += ("export", "generate")
FREE += ("step.layout",)  # its outcome is in the fingerprint of the model; what was asked for may be 'auto'
"""knobs, and the beginnings of groups of them, that do not touch what is trained, or are compared otherwise"""

RENAMED = {"log": "log_to"}
"""knobs by the names that they had in earlier versions, and those of today; old names are read for ever"""


def renamed(tree: Any) -> Any:
    """Return a configuration as read from a file, or a part of it, by today's names of the knobs."""
    return {RENAMED.get(name, name): value for name, value in tree.items()} if isinstance(tree, dict) else tree


def flat(tree: Any, separator: str = ".") -> dict[str, Any]:
    """Return the values of nested dicts by their names, joined by dots; {} for anything else than a dict."""
    found: dict[str, Any] = {}
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping):
            found |= {f"{name}{separator}{inner}": one for inner, one in flat(value, separator).items()}
        else:
            found[str(name)] = value
    return found


@dataclass(frozen=True)
class LocalRun:
    """The client's part of a round."""

    rule: str | None = None
    """Client rule: sgd, adamw, prox, scaffold, nova, uga, fedgma2021, or your own as package.module:name. Default: the
    algorithm's."""
    schedule: str = "constant"
    """Client learning rate over the rounds: constant, step:ROUNDS,FACTOR, cosine or cosine:LAST; prefix
    warmup:ROUNDS+ to warm up."""
    epochs: int | None = knob(None, low=1, otherwise=1)
    """Epochs per round over the client's samples. Default: the algorithm's."""
    steps: int | None = knob(None, low=1, high=2**31 - 1)
    """Batches per round, instead of epochs. Default: --local.epochs counts."""
    batch: int = knob(32, low=1, high=2**31 - 1)
    """Samples per batch."""
    freeze: str | None = None
    """Parameters to leave as they are: shell patterns such as 'features.*' or names of modules, separated by commas.
    They are neither sent nor saved. Default: those that the model has frozen."""
    private: str | None = None
    """Parameters and float buffers that every client keeps to itself: patterns or modules as for --local.freeze, or bn
    for all BatchNorm layers. Default: none."""
    work: str = "full"
    """Share of its steps that a client does: full, uniform:LOW,HIGH, or stragglers:PART,LOW,HIGH."""


@dataclass(frozen=True)
class ServerRun:
    """How the server applies the masked mean to the model."""

    rule: str | None = None
    """Server rule: sgd, adam, yogi, adagrad, or your own as package.module:name. Default: the algorithm's."""
    schedule: str = "constant"
    """Server learning rate over the rounds; see --local.schedule."""


if TYPE_CHECKING:  # the same fields, written out by tests/typed.py
    from .typed import Local as Local
    from .typed import MaskOptions as MaskOptions
    from .typed import Server as Server
else:
    Local = options("Local", LocalKnobs, LocalRun)
    Server = options("Server", ServerKnobs, ServerRun)
    MaskOptions = options("MaskOptions", MaskKnobs)


@dataclass(frozen=True)
class Step:
    """How a client's step is computed. The defaults are the fastest that were measured (benchmarks/step.py)."""

    layout: str = knob("auto", choices=("auto", "contiguous", "channels_last"))
    """Memory layout of images and convolutions: contiguous, channels_last, or auto (the model's own)."""
    precision: str = knob("float32", choices=("float32", "tf32", "bf16"))
    """float32; tf32: matrix products and convolutions in TF32 on an NVIDIA GPU; or bf16: forward and backward under
    autocast. Parameters stay float32."""
    compile: str = knob("none", choices=("none", "default", "reduce-overhead", "max-autotune"))
    """none, or a mode of torch.compile: default, reduce-overhead (CUDA graphs on a GPU), max-autotune."""
    kernels: str = knob("auto", choices=("auto", "torch"))
    """Gradients on a CPU: auto (written by hand for networks of small convolutions with pooling, and of linear layers)
    or torch (autograd's, but for the built-in models)."""
    graphs: bool = False
    """Record each step as a CUDA graph and replay it: one launch instead of one per kernel. Needs a model without
    control flow by values. Has not been run on a GPU yet."""
    out_of_memory: str = knob("stop", choices=("stop", "drop"))
    """When a client does not fit the memory of its GPU, even after freeing what is cached: stop the run, or drop the
    client's update."""
    together: int = knob(1, low=1, high=1024)
    """Clients that a rank trains at once as one stacked model. Above 1 the last bits depend on which clients share
    a rank."""


@dataclass(frozen=True)
class Skew:
    """How the clients' data differ; each split reads its own."""

    classes: int | None = knob(None, low=1)
    """Classes per client (splits classes and mixed). Default: 10 for cifar100, 20 for tinyimagenet, 2 for
    others."""
    noise: float = knob(0.0, low=0, high=1, open_high=True)
    """Share of a client's samples from other classes (splits classes and mixed)."""
    alpha: float = knob(0.1, low=0, open_low=True)
    """Dirichlet concentration of the labels: smaller is more heterogeneous (split dirichlet)."""
    beta: float = knob(0.5, low=0, open_low=True)
    """Dirichlet concentration of the client sizes (split quantity)."""
    owners: str = knob("choose", choices=("choose", "merge"))
    """If there are fewer clients than writers or roles: choose some of them, or merge them (split natural)."""
    owner: str | None = None
    """Column of --data hf:... whose values name the clients (split natural). Default: none."""


@dataclass(frozen=True)
class Text:
    """How the texts of --data hf:... become tokens."""

    column: str | None = None
    """Column of the texts. Default: text, or the only column of texts."""
    label: str | None = None
    """Column of the classes or numbers to predict, or none to predict the next token. Default: labels or label, else
    none."""
    test: str | None = None
    """Split to test on. Default: test, validation, valid, dev or eval, else every tenth row of each client."""
    length: int | None = knob(None, low=2)
    """Largest number of tokens per sample; longer texts are cut. Default: 128, or less if the tokenizer takes less."""
    pack: bool = False
    """Join the texts of each client and cut them into blocks of --text.length tokens; the rest of a client's last block
    is dropped."""
    pad: str | None = None
    """Token to pad with, if the tokenizer has none: eos, or a token of its vocabulary. Default: none."""
    tokenizer: str | None = None
    """Folder or name of the tokenizer, as hf:NAME_OR_FOLDER. Default: that of --model."""


@dataclass(frozen=True)
class Meta:
    """A small set held out of training: for a meta step after the server's (FedMeta), or copied to every client
    (FedShare)."""

    size: int | None = knob(None, low=0, otherwise=0)
    """Samples to hold out of training. Default: the algorithm's."""
    lr: float | None = knob(None, low=0, otherwise=0.0)
    """Learning rate of the meta step; 0: no meta step. Default: the algorithm's."""
    share: bool | None = knob(None, otherwise=False)
    """Give every client a copy of the held-out set. Default: the algorithm's."""
    seed: int = knob(0, low=0)
    """Seed that draws the held-out set."""
    weights: list[float] | None = None
    """Class proportions of the held-out set, such as [2, 1, 1]. Default: those of the data."""
    batch: int = knob(64, low=1, high=2**31 - 1)
    """Samples per batch of the meta gradient."""


@dataclass(frozen=True)
class Memory:
    """Where client states are kept between rounds (SCAFFOLD's control variates)."""

    limit: float = knob(4.0, low=0)
    """GiB per rank to keep in memory, which the ranks of a node share (/dev/shm); the rest is mapped from files."""
    folder: str | None = None
    """Folder of those files, which disappear with the run: on a cluster a disk of the node. Default: the run folder."""


@dataclass(frozen=True)
class Eval:
    """When and how the model is evaluated on the test set."""

    every: int = knob(1, low=1)
    """Rounds between evaluations; the last round is always evaluated."""
    batch: int = knob(500, low=1, high=2**31 - 1)
    """Samples per evaluation batch."""
    samples: int | None = knob(None, low=1)
    """Test samples to evaluate, the same random ones every time. Default: all."""


@dataclass(frozen=True)
class Checkpoint:
    """When checkpoints are written."""

    every: int | None = knob(None, low=1)
    """Rounds between checkpoints. Default: by time only."""
    minutes: float = knob(2.0, low=0)
    """Minutes between checkpoints; 0: by rounds only. The last round is always saved."""
    keep: int = knob(2, low=0, high=1000)
    """Newest checkpoints to keep; 0: write none."""


@dataclass(frozen=True)
class Chosen:
    """The named algorithm and the mask."""

    algorithm: str = "fedavg"
    """fedavg, fedavgm, fedprox, scaffold, fednova, fedadam, fedyogi, fedadagrad, uga, fedmeta, fedmeta-uga,
    fedshare, fedgma2021, or your own as package.module:name."""
    mask: str | None = knob(None, otherwise="mean")
    """mean (plain averaging), gma (scale elements down where clients disagree), and (drop them), sand (also weigh
    the size of the disagreement), or your own as package.module:name. Default: mean (fedgma2021: and)."""


@dataclass(frozen=True)
class Config(MaskOptions, Chosen):
    """One run."""

    data: str = "glyphs"
    """glyphs (generated), mnist, fmnist, cifar10, cifar100, tinyimagenet, femnist, shakespeare, cmnist2, fedcmnist,
    fedrotmnist, fedrotmnist-clients, hf:NAME_OR_FOLDER (texts of Hugging Face), or your own as package.module:name.
    'fedmpi data list' shows what is here."""
    data_root: str | None = None
    """Folder of the data sets. Default: $FEDMPI_DATA, else the user's cache."""
    augment: str | None = None
    """Augmentation of training images: crop:PIXELS, flip, crop:PIXELS+flip or none. Default: the data set's."""
    workers: int = knob(0, low=0, high=256)
    """Processes per rank that prefetch from your own Dataset."""
    split: str = "classes"
    """How to split the data over the clients: iid, classes, dirichlet, quantity, natural (by writer or role); for
    coloured and rotated data also feature (like iid) and mixed (like classes)."""
    model: str | None = None
    """lenet, cnn, resnet18-gn, resnet18-bn, logistic, gru, torchvision:NAME, hf:NAME_OR_FOLDER (transformers), or your
    own as package.module:name. Default: resnet18-gn for cifar10, cifar100 and tinyimagenet, gru for shakespeare, else
    lenet."""
    lora: str | None = None
    """Adapter to train instead of the weights of a transformers model: r=8,alpha=16,dropout=0.05,targets=q_proj+v_proj,
    all with defaults; base=bf16 keeps the frozen weights in bf16, and ffa freezes the A matrices. Default: none."""
    clients: int = knob(100, low=1)
    """Clients in the federation."""
    cohort: int = knob(10, low=1)
    """Clients that train per round."""
    min_clients: int = knob(1, low=1)
    """Fail a round with fewer usable updates."""
    rounds: int = knob(50, low=1)
    """Rounds to train."""
    seed: int = knob(0, low=0)
    """Seed of all random numbers."""
    out: str | None = None
    """Run folder. Default: runs/<algorithm>-<mask>-<data>-<seed>, plus the rules that are not the algorithm's
    own."""
    resume: str = knob("auto", choices=("auto", "never", "force"))
    """auto (resume from the newest intact checkpoint in the run folder, if any), never (start over) or force
    (resume with changed options, or a finished run with more rounds)."""
    max_minutes: float | None = knob(None, low=0, open_low=True)
    """Save and stop after this many minutes, with exit code 75. Default: no limit."""
    comm: str = "auto"
    """Transport: torch (gloo, nccl), mpi, or auto (by the launcher)."""
    sum: str = knob("exact", choices=("exact", "float32"))
    """exact (the same bits on any number of ranks) or float32 (half the bytes of the sums)."""
    wire: str = knob("float32", choices=("float32", "bf16"))
    """Format of sums and model between nodes: float32, or bf16 (half the bytes, with error feedback; needs --sum
    float32)."""
    timeout: float = knob(600.0, low=0, open_low=True, high=1e7)
    """Seconds to wait for a rank that does not answer."""
    threads: int | None = knob(None, low=1, high=256)
    """Threads per rank; the same bits need the same number. Default: the node's cores divided by its ranks."""
    device: str = "auto"
    """Where clients train: cpu, cuda, cuda:N (or another type of accelerator), or auto: an accelerator if there is
    one, which the ranks of a node take in turn."""
    data_on: str = knob("auto", choices=("auto", "device", "host"))
    """Where the data set is while clients train on a GPU: in the GPU's memory (device), in the host's, from where each
    batch is copied, or auto: the GPU's if half of its free memory is enough."""
    sums: str = knob("auto", choices=("auto", "host", "device"))
    """Where the model and the sums of a round are: host (any number of ranks may share a GPU), device (NCCL, one rank
    per GPU), or auto: the host."""
    deterministic: bool = True
    """Use deterministic kernels on a GPU (a CPU is deterministic anyway)."""
    evaluate: str = "none"
    """Further measurements, separated by commas: clients (test accuracy of clients that took part and of the
    others), agreement (per layer), gap (accuracy on training samples), membership (an attack at the end of the
    run), perplexity, top5 (accuracy), or your own as package.module:name."""
    export: str = knob("adapter", choices=("adapter", "merged"))
    """What a finished run of a transformers model has besides model.safetensors: its adapter, if it has one; or merged,
    also the whole model, in a folder that from_pretrained loads."""
    generate: str | None = None
    """Text to continue when training is done, always by the most likely token. Default: none."""
    log_to: str = "tensorboard"
    """Log sinks besides metrics.jsonl, separated by commas: tensorboard, wandb, mlflow or none."""
    verbose: bool = False
    """Print a second line per round: the seconds of its phases."""
    quiet: bool = False
    """Print only warnings and errors."""
    local: Local = field(default_factory=Local)
    step: Step = field(default_factory=Step)
    server: Server = field(default_factory=Server)
    skew: Skew = field(default_factory=Skew)
    text: Text = field(default_factory=Text)
    meta: Meta = field(default_factory=Meta)
    memory: Memory = field(default_factory=Memory)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


@dataclass(frozen=True)
class Launch:
    """Ranks that `fedmpi train` starts by itself: not part of the configuration, so never in config.yaml."""

    ranks: int = knob(1, low=1, high=4096)
    """Ranks to start on this machine; in a Slurm step with one task per node, on each node. auto: a rank for each
    GPU."""
    max_restarts: int | None = knob(None, low=0, high=1000)
    """Restarts of all --ranks from the newest checkpoint when one dies. Default: 3, or 0 on several nodes, where
    the job is requeued instead."""
    ranks_per_gpu: int | None = knob(None, low=1, high=256)
    """Ranks to start for each GPU, which share it; implies --ranks auto."""


def check(cfg: Config) -> None:
    """Raise a `UserError` for the first option that is out of its bounds or conflicts with another."""
    check_bounds(cfg)
    if cfg.cohort > cfg.clients:
        raise UserError(
            f"--cohort is {cfg.cohort} but there are only {cfg.clients} clients; lower --cohort or raise --clients"
        )
    if cfg.min_clients > cfg.cohort:
        raise UserError(f"--min_clients is {cfg.min_clients} but only {cfg.cohort} clients train per round; lower it")
    if cfg.quiet and cfg.verbose:
        raise UserError("--quiet and --verbose are both given; choose one")
    if cfg.step.graphs and (cfg.step.together > 1 or cfg.step.compile != "none"):
        raise UserError("--step.graphs is true; it records a plain step: leave out --step.together and --step.compile")
    if cfg.step.together > 1 and cfg.step.compile != "none":
        raise UserError(
            f"--step.together is {cfg.step.together} and --step.compile is {cfg.step.compile}; a stacked model is not "
            "compiled: leave one of them out"
        )
