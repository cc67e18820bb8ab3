"""Models of transformers (`--model hf:NAME_OR_FOLDER`), and LoRA adapters for them (`--lora`), through peft.

LoRA (Hu et al., ICLR 2022) freezes the weights W and trains B A, of rank r, next to some of them: y = W x + alpha / r
B A x. The mean of the clients' B times the mean of their A is not the mean of their B A. With the A frozen (`ffa`; Sun
et al., ICLR 2024) it is: B A is then linear in what is trained. A is drawn from the seed, B starts at zero.

The data decide the head: labels that are tokens get a causal language model, one class or number per sample a
classifier, whose head is drawn from the seed if the folder has none.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError, one_line, unknown
from ..plugins import hub

log = logging.getLogger("fedmpi")

TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
USE = "write for example --lora r=8,alpha=16,dropout=0.05,targets=q_proj+v_proj"


@dataclass(frozen=True)
class Lora:
    """The adapter that --lora describes."""

    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    targets: tuple[str, ...] = ()  # (): peft's own for the architecture
    base: str = "float32"  # the type of the frozen weights
    ffa: bool = False


def read_lora(text: str) -> Lora:
    """Return the adapter that a text describes: key=value, separated by commas, and the word ffa."""
    readers: dict[str, Callable[[str], Any]] = {
        "r": lambda word: checked(int(word), low=1),
        "alpha": lambda word: checked(int(word), low=1),
        "dropout": lambda word: checked(float(word), low=0, below=1),
        "targets": lambda word: tuple(checked(part) for part in word.split("+")),
        "base": lambda word: checked(word, among=TYPES),
    }
    valid = {
        "r": "a whole number from 1",
        "alpha": "a whole number from 1",
        "dropout": "a number in [0, 1)",
        "targets": "names of modules joined by +, or all-linear",
        "base": " or ".join(TYPES),
    }
    found: dict[str, Any] = {}
    for word in (part.strip() for part in text.split(",")):
        key, equals, value = word.partition("=")
        if key in found:
            raise UserError(f"--lora has {key} twice; give it once")
        if word == "ffa":
            found["ffa"] = True
            continue
        if key == "ffa":
            raise UserError("--lora: ffa takes no value; write ffa, or leave it out")
        if key not in readers:
            raise unknown("key of --lora", key, [*readers, "ffa"])
        try:
            found[key] = readers[key](value)
        except ValueError:
            given = f"{key} is '{value}'" if equals else f"{key} has no value"
            raise UserError(f"--lora: {given}; it must be {valid[key]}: {USE}") from None
    return Lora(**found)


def checked(value: Any, low: float | None = None, below: float | None = None, among: Any = None) -> Any:
    """Return a value; raise a ValueError if it is empty, out of its bounds or not among the choices."""
    inside = (low is None or value >= low) and (below is None or value < below) and (among is None or value in among)
    if value == "" or not inside:
        raise ValueError
    return value


def make_hub_model(
    name: str,
    *,
    whole: bool,
    by_class: bool,
    label: Any,
    shape: Any,
    classes: int = 0,
    outputs: int = 0,
    tokens: int = 0,
    base: str = "float32",
    pad: str | None = None,
) -> nn.Module:
    """Load the model of that name with the head that the data need."""
    place = hub.find("model", name)
    if (Path(place) / "adapter_config.json").exists() and not (Path(place) / "config.json").exists():
        raise UserError(f"model '{name}' is an adapter; give the folder of the model that it belongs to")
    causal = whole and not by_class
    if not causal and isinstance(label, Tensor) and label.dim() and whole:
        raise UserError(
            f"model '{name}': the data have a class per position, and --model hf: makes language models and "
            "classifiers of samples; pass a model with such a head to fedmpi.train"
        )
    transformers = hub.package("transformers")
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSequenceClassification
    more = {} if causal else {"num_labels": classes or outputs}
    how = {**hub.SAFE, **more, "use_safetensors": True, "dtype": TYPES[base], "output_loading_info": True}
    model, info = hub.read(f"model '{name}'", lambda: auto.from_pretrained(place, **how))
    if made := sorted(info["missing_keys"]):
        usual = not any(key.startswith(f"{model.base_model_prefix}.") for key in made)  # a new head
        words = ", ".join([*made[:3], *["..."] * (len(made) > 3)])
        log.log(logging.INFO if usual else logging.WARNING, "model '%s' has no %s: drawn from the seed", name, words)
    tree = shape.get("input_ids", ()) if isinstance(shape, Mapping) else shape
    check_fits(name, model, tree[0] if len(tree) == 1 else 0, tokens)
    if not causal and model.config.get_text_config().pad_token_id is None:
        index = hub.padding(hub.load_tokenizer(name), name, pad, "a classifier of texts")
        model.config.get_text_config().pad_token_id = index
    return model  # type: ignore[no-any-return]


def check_fits(name: str, model: Any, length: int, tokens: int) -> None:
    """Refuse samples that are longer than the model's positions, and tokens that it does not have."""
    embeddings, most = model.get_input_embeddings().num_embeddings, positions(model)
    if most is not None and length > most:
        raise UserError(f"model '{name}' takes {most} tokens, and a sample has {length}; lower --text.length")
    if tokens > embeddings:
        raise UserError(
            f"model '{name}' has {embeddings} different tokens, and the data have {tokens}; use the model's own "
            "tokenizer"
        )


def positions(model: Any) -> int | None:
    """Return how many tokens a model of transformers takes; None if any number."""
    most: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return most


def is_transformer(model: nn.Module) -> bool:
    """Return whether this is a model of transformers, or one with an adapter of peft. Imports nothing: such an object
    has done that."""
    return any(base.__module__.startswith(("transformers.", "peft.")) for base in type(model).__mro__)


def has_adapter(model: nn.Module) -> bool:
    """Return whether this is a `PeftModel`."""
    return any(base.__module__.startswith("peft.") and base.__name__ == "PeftModel" for base in type(model).__mro__)


def add_lora(model: Any, lora: Lora, name: str) -> nn.Module:
    """Return a model of transformers with an adapter, whose weights are the only ones that are trained."""
    if not is_transformer(model):
        raise UserError(f"--lora is for models of transformers, and '{name}' is none; use --model hf:..., or no --lora")
    if has_adapter(model):
        raise UserError(f"--lora is given, and '{name}' has an adapter already; leave it out")
    peft = hub.package("peft")
    kind = "CAUSAL_LM" if model.can_generate() else "SEQ_CLS" if hasattr(model, "num_labels") else None
    if lora.base != "float32" and kind != "CAUSAL_LM":
        raise UserError(
            f"--lora: base is {lora.base}, which is for language models: the head of a classifier is trained, so it "
            "must be float32; leave base out"
        )
    check_targets(model, lora, name)
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear" if lora.targets == ("all-linear",) else list(lora.targets) or None,
        task_type=kind,
    )
    with hub.offline():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # peft sets it as the layer needs
        try:
            adapted: nn.Module = peft.get_peft_model(model.to(TYPES[lora.base]), config)
        except ValueError as error:
            raise UserError(
                f"--lora: peft cannot adapt '{name}' ({one_line(error)[:200]}); give targets=, joined by +, of: "
                f"{', '.join(layers(model))}"
            ) from error
    if lora.ffa:
        for path, parameter in adapted.named_parameters():
            if ".lora_A." in path or ".lora_embedding_A." in path:
                parameter.requires_grad_(False)
    return adapted


def check_targets(model: nn.Module, lora: Lora, name: str) -> None:
    """Refuse a target that is the name of no layer."""
    paths = [path for path, _ in model.named_modules()]
    for target in lora.targets:
        if target != "all-linear" and not any(path == target or path.endswith(f".{target}") for path in paths):
            raise UserError(f"--lora: target '{target}' matches nothing in '{name}'; it has {', '.join(layers(model))}")


def layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that an adapter can be added to, without their place in the model."""
    found = [path for path, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
    return list(dict.fromkeys(path.rpartition(".")[2] for path in found))
