"""Models of transformers with adapters of peft: what is made, what is trained, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hub_box import POSITIONS, TOKENS, made, save_model, save_tokenizer
from torch import Tensor, nn

from fedmpi.clients.execution import PLAIN
from fedmpi.data.objective import CAUSAL, CLASSIFY
from fedmpi.data.trees import call
from fedmpi.errors import UserError
from fedmpi.flat import parts_of
from fedmpi.local import sgd
from fedmpi.models import find_model, make_model
from fedmpi.models.hf import Lora, add_lora, read_lora
from fedmpi.plugins import hub
from fedmpi.runs.build import freeze, private_names

CPU = torch.device("cpu")
TEXT = {"whole": True, "by_class": False, "label": torch.zeros(8, dtype=torch.int64)}
CLASS = {"whole": True, "by_class": True, "label": torch.tensor(1), "classes": 3}


def load(name: str, **offers: Any) -> nn.Module:
    shape = {"input_ids": (8,)}
    return make_model(name, find_model(name), {"shape": shape, "tokens": TOKENS, **TEXT, **offers}, "these")


def batch(length: int = 8) -> dict[str, Tensor]:
    """Three samples of different lengths, padded."""
    ids = torch.randint(1, TOKENS, (3, length), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(length) < torch.tensor([[length], [5], [2]])).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


# What --lora says


def test_an_adapter_is_read_from_text() -> None:
    assert read_lora("r=4") == Lora(r=4)
    asked = read_lora("ffa,r=16, alpha=32,dropout=0.05,targets=q_proj+v_proj,base=bf16")
    assert asked == Lora(16, 32, 0.05, ("q_proj", "v_proj"), "bf16", True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=8", "unknown key of --lora 'rank'"),
        ("", "unknown key of --lora ''"),
        ("dropuot=0.1", "did you mean 'dropout'"),
        ("r=0", "r is '0'; it must be a whole number from 1"),
        ("r", "r has no value; it must be a whole number"),
        ("r=8,r=4", "--lora has r twice"),
        ("ffa,ffa", "--lora has ffa twice"),
        ("ffa=1", "ffa takes no value"),
        ("dropout=1", r"dropout is '1'; it must be a number in \[0, 1\)"),
        ("dropout=nan", "dropout is 'nan'"),
        ("targets=q_proj++v_proj", r"targets is 'q_proj\+\+v_proj'"),
        ("base=int4", "base is 'int4'; it must be float32 or bf16"),
    ],
)
def test_a_wrong_adapter_is_refused_with_what_is_valid(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_lora(text)


# What is made


def test_the_head_follows_from_the_labels(tmp_path: Path) -> None:
    name = save_model(tmp_path, pad="<end>")
    language, classifier = load(name), load(name, **CLASS)
    assert type(language).__name__ == "GPT2LMHeadModel" and type(classifier).__name__ == "GPT2ForSequenceClassification"
    assert language(**batch()).logits.shape == (3, 8, TOKENS) and classifier(**batch()).logits.shape == (3, 3)
    assert {p.dtype for model in (language, classifier) for p in model.parameters()} == {torch.float32}
    torch.manual_seed(5)
    first = load(name, **CLASS).get_parameter("score.weight")
    torch.manual_seed(5)
    assert torch.equal(load(name, **CLASS).get_parameter("score.weight"), first)


def test_weights_that_the_folder_lacks_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file, save_file

    name = save_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("transformer.h.1.ln_1.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    load(name)
    assert "WARNING  fedmpi:hf.py" in caplog.text and "has no transformer.h.1.ln_1.weight: drawn" in caplog.text
    caplog.clear()
    load(save_model(tmp_path / "whole", pad="<end>"), **CLASS)
    assert "WARNING" not in caplog.text


def test_a_model_that_does_not_fit_the_data_is_refused(tmp_path: Path) -> None:
    name = save_model(tmp_path)
    for offers, message in (
        ({"shape": {"input_ids": (POSITIONS + 1,)}}, "takes 32 tokens, and a sample has 33; lower --text.length"),
        ({"tokens": TOKENS + 1}, "has 30 different tokens, and the data have 31"),
        ({"by_class": True, "classes": 3}, "a class per position"),
        (CLASS, "no padding token, and a classifier of texts needs one; give --text.pad eos"),
        ({**CLASS, "pad": "<none>"}, "--text.pad is '<none>', which is no token"),
    ):
        with pytest.raises(UserError, match=message):
            load(name, **offers)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of Hugging Face."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_model_that_is_not_there_is_refused_at_once(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(UserError, match=f"there is no folder '{tmp_path}/none'"):
        load(f"hf:{tmp_path}/none")
    with pytest.raises(UserError, match="'hf:gpt2' is neither a folder here nor in the cache .*run 'hf download gpt2'"):
        load("hf:gpt2")
    with pytest.raises(UserError, match="cannot be loaded"):
        load(f"hf:{tmp_path}")
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(UserError, match="is an adapter; give the folder of the model"):
        load(f"hf:{tmp_path}")


def test_a_name_is_found_in_the_cache(cache: Path) -> None:
    kept = cache / "models--me--tiny"
    save_model(kept / "snapshots" / "abc")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    (weight,) = (model.get_parameter("lm_head.weight") for model in [load("hf:me/tiny")])
    assert torch.equal(weight, made("gpt2").get_parameter("lm_head.weight"))
    assert len(hub.load_tokenizer("hf:me/tiny")) == TOKENS


def test_only_safetensors_are_read_and_no_code_is_run(tmp_path: Path) -> None:
    name = save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(made("gpt2").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be loaded: OSError: .*model.safetensors"):
        load(name)
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (tmp_path / "own.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(UserError, match="cannot be loaded: ValueError"):
        load(name)


def test_a_missing_package_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    find = hub.importlib.util.find_spec
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(UserError, match=r"needs peft, which is not installed; pip install 'fedmpi\[llm\]'"):
        hub.check_installed("--model hf:gpt2")


# Adapters


@pytest.mark.parametrize(("kind", "targets"), [("gpt2", "c_attn"), ("llama", "q_proj v_proj")])
@pytest.mark.parametrize("ffa", [False, True])
def test_only_the_adapter_is_trained_in_float32_and_the_base_is_as_asked(kind: str, targets: str, ffa: bool) -> None:
    parts = parts_of(add_lora(made(kind), Lora(r=4, base="bf16", ffa=ffa), "this"))
    assert {p.dtype for p in parts.trained.values()} == {torch.float32} and not parts.floats
    words = [name.split(".") for name in parts.trained]
    assert {word[-3] for word in words} == ({"lora_B"} if ffa else {"lora_A", "lora_B"})
    assert {word[-4] for word in words} == set(targets.split())
    rotary = [name for name in parts.still if "inv_freq" in name]
    assert bool(rotary) == (kind == "llama"), "constants that are not saved are not averaged"
    base = {t.dtype for name, t in parts.still.items() if name not in rotary and "lora" not in name}
    assert base == {torch.bfloat16}


def test_a_classifier_trains_its_head_too() -> None:
    trained = list(parts_of(add_lora(made("bert", num_labels=3), Lora(r=4), "this")).trained)
    assert any("lora_B" in name for name in trained) and any("classifier.modules_to_save" in name for name in trained)


def test_an_adapter_that_cannot_be_added_is_refused() -> None:
    for model, lora, message in (
        (nn.Linear(2, 2), Lora(), "--lora is for models of transformers, and 'this' is none"),
        (add_lora(made("gpt2"), Lora(), "it"), Lora(), "has an adapter already"),
        (made("gpt2"), Lora(targets=("c_attn", "q_proj")), "target 'q_proj' matches nothing in 'this'; it has c_attn"),
        (made("bert", num_labels=2), Lora(base="bf16"), "base is bf16, which is for language models"),
    ):
        with pytest.raises(UserError, match=message):
            add_lora(model, lora, "this")


def test_half_of_a_tied_tensor_is_not_private() -> None:
    model, rule = made("gpt2"), sgd(0.1)
    with pytest.raises(UserError, match="'lm_head.weight' and 'transformer.wte.weight' are one tensor, .*and shared"):
        private_names(model, "lm_head", rule)
    assert private_names(model, "lm_head,transformer.wte", rule) == ["transformer.wte.weight"]
    freeze(model, "lm_head")
    assert not model.transformer.wte.weight.requires_grad


# Logits, loss and gradient are those of transformers and peft


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_logits_loss_and_gradient_are_those_of_peft(kind: str) -> None:
    model, x = add_lora(made(kind), Lora(r=4), "this").eval(), batch()
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in trained:
            p.normal_(std=0.1)
    labels = x["input_ids"].masked_fill(x["attention_mask"] == 0, -100)
    outputs = call(PLAIN.forward(model, CPU), x)
    theirs = model(**x, labels=labels)
    assert outputs.past_key_values is None and theirs.past_key_values is not None, "nobody generates while training"
    assert torch.equal(outputs.logits, theirs.logits)
    loss = CAUSAL.loss(*CAUSAL.align(outputs, labels), "mean")
    assert torch.allclose(loss, theirs.loss, rtol=1e-6)
    for mine, its in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(theirs.loss, trained), strict=True):
        assert torch.allclose(mine, its, rtol=1e-4, atol=1e-7) and mine.any()


def test_a_classifiers_loss_is_that_of_transformers() -> None:
    model, x, labels = made("bert", num_labels=3).eval(), batch(), torch.tensor([0, 2, 1])
    outputs, y = CLASSIFY.align(call(PLAIN.forward(model, CPU), x), labels)
    assert torch.allclose(CLASSIFY.loss(outputs, y, "mean"), model(**x, labels=labels).loss, rtol=1e-6)


def test_checkpointed_activations_give_the_same_gradient() -> None:
    def gradient(checkpointed: bool) -> tuple[Tensor, ...]:
        model: Any = add_lora(made("gpt2"), Lora(r=4, dropout=0.2), "this").train()
        assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        if checkpointed:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        outputs = call(PLAIN.forward(model, CPU), batch())
        loss = CAUSAL.loss(*CAUSAL.align(outputs, batch()["input_ids"]), "mean")
        return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])

    with hub.offline():
        assert all(torch.equal(mine, its) for mine, its in zip(gradient(False), gradient(True), strict=True))


def test_a_tokenizer_pads_with_what_it_has_or_what_is_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "without")
    save_tokenizer(tmp_path / "with", pad=" ")
    without, with_pad = (hub.load_tokenizer(f"hf:{tmp_path}/{name}") for name in ("without", "with"))
    assert hub.padding(with_pad, "it", None, "this") == 1
    assert hub.padding(without, "it", "eos", "this") == 0 and hub.padding(without, "it", "b", "this") == 3
    with pytest.raises(UserError, match="has no padding token, and this needs one; give --text.pad eos"):
        hub.padding(without, "it", None, "this")
