"""What a finished run of a transformers model has besides model.safetensors: its adapter as peft reads it, the whole
model as transformers reads it (`--export merged`), and the continuation of a text (`--generate`).

    adapter_model.safetensors, adapter_config.json     for PeftModel.from_pretrained(base, run folder)
    merged/                                            for from_pretrained; adapters are added to the weights
    generated.txt                                      the text and what follows, always the most likely token
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ..clients.still import twin
from ..models.hf import has_adapter, positions
from ..plugins import hub
from .folder import ADAPTER, ADAPTER_CONFIG, GENERATED, MERGED, remove, sync, write

log = logging.getLogger("fedmpi")

TOKENS = 64  # that are generated


def write_adapter(out: Path, model: nn.Module) -> None:
    """Write the active adapter of a model into a run folder, if it has one."""
    if not has_adapter(model):
        return
    tensors, config = adapter_of(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    active = f".{model.active_adapter}"
    saved = {name: name.replace(".modules_to_save", "").replace(active, "") for name in trained}
    if others := [name for name, key in saved.items() if key not in tensors]:
        log.warning("'%s' is trained but is no part of the adapter: only model.safetensors has it", others[0])
    write(out / ADAPTER, safetensors.torch.save(tensors, metadata={"format": "pt"}))
    write(out / ADAPTER_CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def adapter_of(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the configuration of the active adapter of a `PeftModel`, as peft saves them."""
    name = model.active_adapter
    with hub.offline(), tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, selected_adapters=[name], save_embedding_layers=False)
        place = Path(folder) / ("" if name == "default" else name)
        config: dict[str, Any] = json.loads((place / ADAPTER_CONFIG).read_text())
        return safetensors.torch.load_file(place / ADAPTER), config


def write_merged(out: Path, model: nn.Module, tokenizer: Any) -> None:
    """Write the whole model into the folder `merged` of a run folder, in float32 where it has an adapter: rounding a
    sum to bf16 would lose small updates."""
    whole: Any = twin(model).cpu()
    whole.eval()
    temporary = Path(tempfile.mkdtemp(prefix=f".{MERGED}-", dir=out))  # private to the user
    try:
        with hub.offline():
            if has_adapter(whole):
                whole = copy.deepcopy(whole).float().merge_and_unload()
            whole.save_pretrained(temporary)
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)
        for file in temporary.iterdir():
            sync(file)
        remove(out / MERGED)
        os.replace(temporary, out / MERGED)
        sync(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def generate(model: Any, tokenizer: Any, text: str, device: torch.device) -> str:
    """Return a text and its continuation by the most likely token each time."""
    model.eval()
    ids = tokenizer(text, return_tensors="pt")["input_ids"].to(device)
    most = positions(model)
    count = TOKENS if most is None else min(TOKENS, most - ids.shape[1])
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.inference_mode(), hub.offline():
        mask = torch.ones_like(ids)
        made = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=count, do_sample=False, num_beams=1, pad_token_id=pad
        )
    return str(tokenizer.decode(made[0], skip_special_tokens=True))


def write_generated(out: Path, text: str) -> None:
    """Write the generated text into a run folder."""
    write(out / GENERATED, text + "\n")
