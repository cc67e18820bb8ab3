"""Every knob, its meaning and its bounds: one tree of frozen dataclasses, read from the command line and YAML by
jsonargparse.

A field's bounds stand next to its default and are checked in one place, so an error always reads the same: what was
given, what is valid. The knobs of rules and masks are declared in `plugins/builtin.py` and joined with those of the run
here; plug-ins add theirs (`extend.py`). Fields that default to null are filled in by the algorithm's row
(`build.resolve`) or by the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..plugins.builtin import LocalKnobs, MaskKnobs, ServerKnobs
from ..plugins.knobs import check_bounds, knob, options

FREE: tuple[str, ...] = ("out", "comm", "timeout", "workers", "log_to", "resume", "max_minutes", "data_root")
FREE += ("evaluate", "memory.", "checkpoint.", "quiet", "verbose")
FREE += ("step.layout",)  # its outcome is in the fingerprint of the model; what was asked for may be 'auto'
"""knobs, and the beginnings of groups of them, that do not touch what is trained, or are compared otherwise"""

RENAMED = {"log": "log_to"}
"""knobs by the names that they had in earlier versions, and those of today; old names are read for ever"""


def renamed(tree: Any) -> Any:
    """Return a configuration as read from a file, or a part of it, by today's names of the knobs."""
    return {RENAMED.get(name, name): value for name, value in tree.items()} if isinstance(tree, dict) else tree


@dataclass(frozen=True)
class LocalRun:
    """What a client does in a round."""

    rule: str | None = None
    """sgd, prox, scaffold, nova, uga or fedgma2021, or your own as package.module:name; null: the algorithm's own"""
    schedule: str = "constant"
    """learning rate over the rounds: constant, step:ROUNDS,FACTOR, cosine or cosine:LAST, also as warmup:ROUNDS+..."""
    epochs: int | None = knob(None, low=1, otherwise=1)
    """passes over the client's samples; null: the algorithm's own"""
    steps: int | None = knob(None, low=1, high=2**31 - 1)
    """batches per round, instead of epochs"""
    batch: int = knob(32, low=1, high=2**31 - 1)
    """samples per batch"""
    work: str = "full"
    """the share of its steps that a client does: full, uniform:LOW,HIGH, or stragglers:PART,LOW,HIGH"""


@dataclass(frozen=True)
class ServerRun:
    """What the masked mean does to the model."""

    rule: str | None = None
    """sgd, adam, yogi or adagrad, or your own as package.module:name; null: the algorithm's own"""
    schedule: str = "constant"
    """learning rate over the rounds, as --local.schedule"""


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
    """How a client's step is computed. The defaults are those that were measured to win (benchmarks/step.py)."""

    layout: str = knob("auto", choices=("auto", "contiguous", "channels_last"))
    """how images and convolutions lie in memory: contiguous, channels_last, or auto (what the model's row says)"""
    precision: str = knob("float32", choices=("float32", "bf16"))
    """float32, or bf16: forward and backward under autocast; the parameters stay float32"""
    compile: str = knob("none", choices=("none", "default", "reduce-overhead", "max-autotune"))
    """none, or a mode of torch.compile: default, reduce-overhead (CUDA graphs on a GPU) or max-autotune"""
    together: int = knob(1, low=1, high=1024)
    """clients of a rank that are trained at once, as one stacked model; 1: one after another. With more the last bits
    depend on which clients share a rank"""


@dataclass(frozen=True)
class Skew:
    """How the clients' data differ, for the split that reads it."""

    classes: int | None = knob(None, low=1)
    """classes per client (splits classes and mixed); null: 10 for cifar100, 20 for tinyimagenet, 2 for others"""
    noise: float = knob(0.0, low=0, high=1, open_high=True)
    """share of a client's samples from other classes (splits classes and mixed)"""
    alpha: float = knob(0.1, low=0, open_low=True)
    """concentration of the labels (split dirichlet): small is heterogeneous"""
    beta: float = knob(0.5, low=0, open_low=True)
    """concentration of the sizes (split quantity)"""
    owners: str = "choose"
    """fewer clients than writers or roles (split natural): choose some of them, or merge them into clients"""


@dataclass(frozen=True)
class Meta:
    """A small set held out of training: for a meta step after the server's (FedMeta), or a copy of it for every client
    (FedShare)."""

    size: int | None = knob(None, low=0, otherwise=0)
    """samples held out; null: the algorithm's own"""
    lr: float | None = knob(None, low=0, otherwise=0.0)
    """learning rate of the meta step, 0 for none; null: the algorithm's own"""
    share: bool | None = knob(None, otherwise=False)
    """whether every client has a copy of the set; null: the algorithm's own"""
    seed: int = knob(0, low=0)
    """seed that draws the set"""
    weights: list[float] | None = None
    """a weight for each class, [2, 1, ...]: the set is made up in these proportions. null: as the data are"""
    batch: int = knob(64, low=1, high=2**31 - 1)
    """samples of the set whose gradient is taken at once"""


@dataclass(frozen=True)
class Memory:
    """Where clients' memories are kept between rounds (SCAFFOLD's control variates)."""

    limit: float = knob(4.0, low=0)
    """GiB per rank in memory; the rest is mapped from a file"""
    folder: str | None = None
    """folder of that file, which vanishes with the run; null: the run folder"""


@dataclass(frozen=True)
class Eval:
    """When and how the test set is scored."""

    every: int = knob(1, low=1)
    """rounds between evaluations; the last round is always scored"""
    batch: int = knob(500, low=1, high=2**31 - 1)
    """samples scored at once"""
    samples: int | None = knob(None, low=1)
    """test samples that are scored, always the same random ones; null: all"""


@dataclass(frozen=True)
class Checkpoint:
    """When the state is saved, so that a run can resume from there."""

    every: int | None = knob(None, low=1)
    """rounds between checkpoints; null: by time alone"""
    minutes: float = knob(2.0, low=0)
    """minutes between checkpoints; 0: by rounds alone. The last round is always saved"""
    keep: int = knob(2, low=0, high=1000)
    """the newest checkpoints that are kept; 0: none are written"""


@dataclass(frozen=True)
class Chosen:
    """The named algorithm and the mask."""

    algorithm: str = "fedavg"
    """fedavg, fedavgm, fedprox, scaffold, fednova, fedadam, fedyogi, fedadagrad, uga, fedmeta, fedmeta-uga, fedshare or
    fedgma2021, or your own as package.module:name"""
    mask: str | None = knob(None, otherwise="mean")
    """mean (plain averaging), gma (disagreement scales the step down), and (disagreement drops it), sand (looks at the
    size of the disagreement too), or your own as package.module:name; null: mean (fedgma2021: and)"""


@dataclass(frozen=True)
class Config(MaskOptions, Chosen):
    """One run."""

    data: str = "glyphs"
    """glyphs (generated), mnist, fmnist, cifar10, cifar100, tinyimagenet, femnist, shakespeare, cmnist2, fedcmnist,
    fedrotmnist or fedrotmnist-clients ('fedmpi data list' shows what is here), or your own as package.module:name"""
    data_root: str | None = None
    """folder of the data sets; null: $FEDMPI_DATA, else the user's cache"""
    augment: str | None = None
    """what training does to images: crop:PIXELS, flip, crop:PIXELS+flip or none; null: the data set's own"""
    workers: int = knob(0, low=0, high=256)
    """processes per rank that read a Dataset of your own ahead"""
    split: str = "classes"
    """how the data are dealt to the clients: iid, classes, dirichlet, quantity, natural (by writer or role), or, for
    coloured and rotated data, feature (as iid) and mixed (as classes)"""
    model: str | None = None
    """lenet, cnn, resnet18-gn, resnet18-bn, logistic or gru, torchvision:NAME, or your own as package.module:name;
    null: that of the papers (resnet18-gn for cifar10, cifar100 and tinyimagenet, gru for shakespeare, else lenet)"""
    clients: int = knob(100, low=1)
    """clients in the federation"""
    cohort: int = knob(10, low=1)
    """clients that train per round"""
    min_clients: int = knob(1, low=1)
    """usable updates below which a round fails"""
    rounds: int = knob(50, low=1)
    """rounds to train"""
    seed: int = knob(0, low=0)
    """seed of everything that is drawn"""
    out: str | None = None
    """run folder; null: runs/<algorithm>-<mask>-<data>-<seed>, with the rules that are not the algorithm's own"""
    resume: str = knob("auto", choices=("auto", "never", "force"))
    """auto (resume from the newest sound checkpoint in the run folder, if there is one), never (start over) or force
    (resume with changed knobs, or a finished run with more rounds)"""
    max_minutes: float | None = knob(None, low=0, open_low=True)
    """minutes after which the run saves and stops, with exit code 75; null: no limit"""
    comm: str = "auto"
    """transport: torch (gloo, nccl), mpi, or auto by the launcher"""
    sum: str = "exact"
    """exact (the same bits on any number of ranks) or float32 (half the bytes of the sums)"""
    wire: str = "float32"
    """what sums and model travel as between nodes: float32, or bf16 (half the bytes, what is rounded off goes along the
    next time; needs --sum float32)"""
    timeout: float = knob(600.0, low=0, open_low=True, high=1e7)
    """seconds after which a rank that does not answer ends the run"""
    threads: int | None = knob(None, low=1, high=256)
    """threads per rank; null: the node's cores shared by its ranks. Equal bits need equal threads"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    deterministic: bool = True
    """repeatable kernels on a GPU (a CPU is repeatable anyway)"""
    evaluate: str = "none"
    """what else is measured, a comma between them: clients (test accuracy of those who took part in a round and of the
    others), agreement (by layer), gap (accuracy on training samples), membership (an attack when the run is done)"""
    log_to: str = "tensorboard"
    """tools that follow the run, next to metrics.jsonl, a comma between them: tensorboard, wandb, mlflow or none"""
    verbose: bool = False
    """print a second line per round: the seconds of its phases"""
    quiet: bool = False
    """print nothing but warnings and errors"""
    local: Local = field(default_factory=Local)
    step: Step = field(default_factory=Step)
    server: Server = field(default_factory=Server)
    skew: Skew = field(default_factory=Skew)
    meta: Meta = field(default_factory=Meta)
    memory: Memory = field(default_factory=Memory)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


@dataclass(frozen=True)
class Launch:
    """Ranks that `fedmpi train` starts by itself: no part of what is trained, so never in config.yaml."""

    ranks: int = knob(1, low=1, high=4096)
    """ranks that this command starts on this machine; in a Slurm step with one task per node, on each node"""
    max_restarts: int | None = knob(None, low=0, high=1000)
    """restarts of all --ranks from the newest checkpoint when one dies; null: 3, or 0 on several nodes, whose job is
    requeued instead"""


def check(cfg: Config) -> None:
    """Raise a `UserError` for the first knob that is out of its bounds or at odds with another."""
    check_bounds(cfg, prefix="")
    if cfg.cohort > cfg.clients:
        raise UserError(
            f"--cohort is {cfg.cohort} but there are only {cfg.clients} clients; lower --cohort or raise --clients"
        )
    if cfg.min_clients > cfg.cohort:
        raise UserError(f"--min_clients is {cfg.min_clients} but only {cfg.cohort} clients train a round; lower it")
    if cfg.quiet and cfg.verbose:
        raise UserError("--quiet and --verbose are both given; choose one")
    if cfg.step.together > 1 and cfg.step.compile != "none":
        raise UserError(
            f"--step.together is {cfg.step.together} and --step.compile is {cfg.step.compile}; a stacked model is not "
            "compiled: leave one of them out"
        )
