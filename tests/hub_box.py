"""Tiny models, a tokenizer and texts of Hugging Face for tests, made and saved here: no hub is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fedmpi.plugins.hub import offline, package

LETTERS = " abcdefghijklmnopqrstuvwxyz.:"
END, POSITIONS, WIDTH = "<end>", 32, 16
TOKENS = len(LETTERS) + 1
ROLES = {"ada": "the cat sat on the mat. ", "bob": "a dog ran to the log. ", "eve": "we see the sea. "}


def save_tokenizer(folder: Path, pad: str | None = None) -> None:
    """A token per letter, and one that ends a text."""
    transformers = package("transformers")
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate([END, *LETTERS])}, END))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=END, pad_token=pad, model_max_length=POSITIONS
    )
    whole.save_pretrained(folder)


def made(kind: str, **more: Any) -> Any:
    """A model with drawn weights: gpt2, llama or bert."""
    transformers = package("transformers")
    torch.manual_seed(1)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        shape = {"n_positions": POSITIONS, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
        config = transformers.GPT2Config(vocab_size=TOKENS, **shape, **ends, **more)
    else:
        shape = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        shape |= {"max_position_embeddings": POSITIONS, "vocab_size": TOKENS}
        if kind == "bert":
            return transformers.BertForSequenceClassification(transformers.BertConfig(**shape, **more))
        config = transformers.LlamaConfig(**shape, **ends, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def save_model(folder: Path, kind: str = "gpt2", pad: str | None = None, **more: Any) -> str:
    """A folder with a model and its tokenizer; return it as --model takes it."""
    with offline():
        made(kind, **more).save_pretrained(folder)
        save_tokenizer(folder, pad)
    return f"hf:{folder}"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """A file of json lines; return it as --data takes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"hf:{path}"


def spoken(lines: int = 20) -> list[dict[str, Any]]:
    """Lines of three roles, of different lengths."""
    return [
        {"text": said[i % 5 :] + said[: i % 3], "role": role, "long": int(len(said) > 20)}
        for i in range(lines)
        for role, said in ROLES.items()
    ]
