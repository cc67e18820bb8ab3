"""Language models with adapters, through whole runs: bits, bytes, what is left in the folder, and what is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import REPO, rank_environment
from hub_box import END, POSITIONS, TOKENS, made, save_model, spoken, write_rows
from safetensors.torch import load_file
from shell import ALONE, CPU, metrics, sandbox
from torch import Tensor, nn

import fedmpi
from fedmpi import api
from fedmpi.comm import Comm, SoloComm
from fedmpi.comm.env import Place
from fedmpi.comm.node import share_node
from fedmpi.comm.threads import run_threads
from fedmpi.commands import main
from fedmpi.errors import UserError
from fedmpi.models.hf import Lora, add_lora
from fedmpi.plugins import hub
from fedmpi.runs.build import prepare
from fedmpi.runs.options import parse
from fedmpi.runs.run import run

STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # ranks that are threads share torch's generator
ADAPTER = "adapter_model.safetensors"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    import datasets

    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))  # of further processes
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    with sandbox():
        monkeypatch.setattr(api, "find_place", lambda environ: ALONE)
        monkeypatch.setattr(api, "_connected", [])
        yield


@pytest.fixture
def play(tmp_path: Path) -> str:
    return write_rows(tmp_path / "play.jsonl", spoken())


def words(model: str, data: str, out: Path, *more: str) -> list[str]:
    """The options of a small run on the roles' lines."""
    usual = f"--model {model} --data {data} --split natural --skew.owner role --text.label none --text.pad eos "
    usual += f"--clients 3 --cohort 2 --rounds 3 --local.lr 0.5 --local.batch 8 --log_to none --threads 1 --out {out}"
    return [*usual.split(), *more]


def train_on(comm: Comm, options: list[str]) -> None:
    share_node(comm)
    with sandbox():
        train_in(comm, options)


def train_in(comm: Comm, options: list[str]) -> None:
    run(prepare(parse(options)), comm, Place("alone", comm.rank, comm.size, 0, 1), CPU, {})


def sha256(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def result(out: Path) -> str:
    return sha256(out / "model.safetensors", out / ADAPTER, out / "adapter_config.json")


# The same bits

ADAMW = "--local.optimizer adamw --local.lr 0.02 --local.weight_decay 0.01 --local.accumulate 2".split()
ADAMW += "--local.step_schedule warmup:1 --local.clip 1".split()


@pytest.mark.parametrize("mask", ["mean", "gma"])
def test_an_adapter_on_a_bf16_base_has_the_same_bits_on_any_number_of_ranks(
    mask: str, tmp_path: Path, play: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model", **STILL)
    options = {
        ranks: words(model, play, tmp_path / f"on-{ranks}", "--lora", "r=4,base=bf16", "--mask", mask, *ADAMW)
        for ranks in (1, 2, 3)
    }
    train_on(SoloComm(), options[1])
    for ranks in (2, 3):
        run_threads(ranks, lambda comm: train_in(comm, options[comm.size]))
    outs = [tmp_path / f"on-{ranks}" for ranks in (1, 2, 3)]
    assert len({result(out) for out in outs}) == 1
    assert {t.dtype for t in load_file(outs[0] / "model.safetensors").values()} == {torch.float32}
    for ranks, out in ((2, outs[1]), (3, outs[2])):  # nearly as the plan says
        capsys.readouterr()
        assert main(["plan", "--ranks", str(ranks), "--json", *options[ranks]]) == 0
        sent = json.loads(capsys.readouterr().out)["sent"]["total"]
        rounds = [record["bytes_sent"] for record in metrics(out)]
        assert 0.8 * sent < sum(rounds) / len(rounds) < 1.4 * sent  # exact sums take 4 to 8 bytes, and 5 are planned


@pytest.mark.processes
def test_dropout_and_a_resume_on_another_number_of_ranks(gloo: Callable[..., None], tmp_path: Path, play: str) -> None:
    model = save_model(tmp_path / "model")
    lora = ("--lora", "r=4,base=bf16,dropout=0.2", "--mask", "gma", "--resume", "force", *ADAMW)
    train_on(SoloComm(), words(model, play, tmp_path / "1", *lora))
    gloo(2, train_on, words(model, play, tmp_path / "2-then-1", *lora, "--rounds", "1"))
    train_on(SoloComm(), words(model, play, tmp_path / "2-then-1", *lora))
    assert result(tmp_path / "1") == result(tmp_path / "2-then-1")


@pytest.mark.launchers
def test_two_mpi_ranks_have_the_bits_of_one(tmp_path: Path, play: str, mpiexec: list[str]) -> None:
    model = save_model(tmp_path / "model")
    options = ["--lora", "ffa,r=4,base=bf16,dropout=0.2", "--mask", "gma", *ADAMW]
    assert main(["train", *words(model, play, tmp_path / "1", *options)]) == 0
    command = [*mpiexec, "-n", "2", sys.executable, "-m", "mpi4py", "-m", "fedmpi", "train", "--comm", "mpi"]
    done = subprocess.run(
        [*command, *words(model, play, tmp_path / "2", *options)],
        env=rank_environment() | {"PYTHONPATH": str(REPO)},  # transformers looks for a package `kernels`: not ours
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "1") == result(tmp_path / "2") and "2 ranks (mpi)" in done.stdout


def test_traffic_follows_what_is_trained(tmp_path: Path, play: str) -> None:
    model = save_model(tmp_path / "model", **STILL)
    up = {}
    for name, lora in {"r=4": "r=4", "r=8": "r=8", "ffa": "ffa,r=8", "all": None}.items():
        given = [] if lora is None else ["--lora", lora]
        train_on(SoloComm(), words(model, play, tmp_path / name, "--rounds", "1", *given))
        up[name] = metrics(tmp_path / name)[0]["client_bytes_up"] // 2
    layers, width = 2, 16
    assert up["r=4"] == 4 * layers * 4 * (width + 3 * width) and up["r=8"] == 2 * up["r=4"]
    assert up["ffa"] == 4 * layers * 8 * 3 * width
    assert up["all"] == 4 * sum(p.numel() for p in made("gpt2").parameters())


# What a run leaves


def loaded(base: str, out: Path, kind: str = "AutoModelForCausalLM", **how: Any) -> nn.Module:
    """The model that peft makes of a base and the folder of a run."""
    with hub.offline():
        model = getattr(hub.package("transformers"), kind).from_pretrained(base.removeprefix("hf:"), **how)
        adapted: nn.Module = hub.package("peft").PeftModel.from_pretrained(model, out)
    return adapted.eval()


def some_ids(count: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(1, TOKENS, (count, 12), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_a_finished_run_is_a_folder_for_peft_with_the_same_logits(tmp_path: Path, play: str) -> None:
    model = save_model(tmp_path / "model")
    options = words(model, play, tmp_path / "run", "--lora", "r=4,base=bf16,alpha=8", "--export", "merged")
    with sandbox():
        outcome = run(prepare(parse(options)), SoloComm(), ALONE, CPU, {})
    outcome.task.load(outcome.state.model_N, outcome.state.ints)
    trained = outcome.task.model.eval()
    again = loaded(model, tmp_path / "run", dtype=torch.bfloat16)
    x = some_ids()
    assert torch.equal(trained(**x).logits, again(**x).logits)
    base = loaded(model, tmp_path / "run", dtype=torch.bfloat16).get_base_model()  # type: ignore[operator]
    assert not torch.equal(base(**x).logits, made("gpt2").bfloat16().eval()(**x).logits), "it has learned"
    with hub.offline():
        merged = hub.package("transformers").AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged").eval()
    assert {p.dtype for p in merged.parameters()} == {torch.float32} and merged.config.use_cache
    assert torch.allclose(merged(**x).logits, again.float()(**x).logits, atol=1e-6)
    assert len(hub.load_tokenizer(f"hf:{tmp_path / 'run' / 'merged'}")) == TOKENS
    assert (tmp_path / "run" / "merged").stat().st_mode & 0o777 == 0o700
    kinds = {path.suffix for path in (tmp_path / "run").rglob("*") if path.is_file() and path.suffix}
    assert kinds <= {".json", ".jsonl", ".safetensors", ".yaml"}, "no pickle, and nothing written aside is left"
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, model[3:])
    before = sha256(tmp_path / "run" / ADAPTER)
    train_on(SoloComm(), [*options, "--rounds", "4", "--resume", "force", "--export", "adapter"])
    assert not (tmp_path / "run" / "merged").exists(), "it was that of an earlier round"
    assert sha256(tmp_path / "run" / ADAPTER) != before


@pytest.mark.parametrize("private", [False, True])
def test_a_classifier_is_trained_and_exported_with_its_head(private: bool, tmp_path: Path) -> None:
    base = save_model(tmp_path / "model", "bert", pad=END, num_labels=3)
    data = write_rows(tmp_path / "play.jsonl", spoken())
    options = f"--model {base} --data {data} --text.label role --split iid --clients 4 --cohort 4 --rounds 4 "
    options += f"--lora r=4 --local.lr 0.3 --log_to none --threads 1 --out {tmp_path / 'run'}"
    own = ["--local.private", "*modules_to_save*"] if private else []
    with sandbox():
        outcome = run(prepare(parse([*options.split(), *own])), SoloComm(), ALONE, CPU, {})
    outcome.task.load(outcome.state.model_N, outcome.state.ints)
    again = loaded(base, tmp_path / "run", "AutoModelForSequenceClassification", num_labels=3)
    assert torch.equal(outcome.task.model.eval()(**some_ids()).logits, again(**some_ids()).logits)
    assert any("classifier" in name for name in load_file(tmp_path / "run" / ADAPTER))
    shared = load_file(tmp_path / "run" / "model.safetensors")
    assert any("classifier" in name for name in shared) != private and any("lora_B" in name for name in shared)
    assert private or outcome.history[-1].test_loss < outcome.history[0].test_loss


def lines(count: int, seed: int) -> dict[str, Tensor]:
    ids = torch.randint(1, TOKENS, (count, 10), generator=torch.Generator().manual_seed(seed))
    ids[:, 1::2] = ids[:, :1]
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_adapted_model_from_python_is_trained_exported_and_unchanged(kind: str, tmp_path: Path) -> None:
    with hub.offline():
        made(kind).save_pretrained(tmp_path / "base")
    model = add_lora(made(kind), Lora(r=4), "it")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    result = fedmpi.train(
        model,
        [lines(8, i) for i in range(3)],
        lines(8, 9),
        rounds=3,
        threads=1,
        quiet=True,
        evaluate="perplexity",
        export="merged",
        out=tmp_path / "run",
        local={"lr": 0.3},
    )
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    again = loaded(str(tmp_path / "base"), tmp_path / "run", dtype=torch.float32)
    x = some_ids()
    assert torch.equal(result.model(**x).logits, again(**x).logits)
    assert (tmp_path / "run" / "merged" / "model.safetensors").exists()
    losses = [report["test_loss"] for report in result.reports]
    assert losses[-1] < losses[0]
    assert [report["test_perplexity"] for report in result.reports] == [math.exp(loss) for loss in losses]
    with torch.inference_mode():
        test = lines(8, 9)
        exact = F.cross_entropy(again(test["input_ids"]).logits[:, :-1].flatten(0, 1), test["labels"][:, 1:].flatten())
    assert losses[-1] == pytest.approx(float(exact), rel=1e-5)


def test_what_is_trained_beside_the_adapter_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = add_lora(made("gpt2"), Lora(r=4), "it")
    model.get_submodule("base_model.model.transformer.ln_f").requires_grad_(True)
    fedmpi.train(model, [lines(8, 0)], lines(8, 9), rounds=1, threads=1, quiet=True, out=tmp_path / "run")
    assert "ln_f.weight' is trained but is no part of the adapter: only model.safetensors has it" in caplog.text
    assert any("ln_f" in name for name in load_file(tmp_path / "run" / "model.safetensors"))


def test_tied_weights_are_trained_once_and_saved_under_both_names(tmp_path: Path) -> None:
    model = made("gpt2", **STILL)
    result = fedmpi.train(
        model, [lines(8, i) for i in range(3)], lines(8, 9), rounds=2, threads=1, quiet=True, out=tmp_path / "run"
    )
    assert result.model.lm_head.weight is result.model.transformer.wte.weight
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(saved["lm_head.weight"], saved["transformer.wte.weight"])
    assert result.reports[0]["client_bytes_up"] == 3 * 4 * sum(p.numel() for p in model.parameters())
    fresh = made("gpt2", **STILL).eval()
    fresh.load_state_dict(saved)
    assert torch.equal(fresh(**some_ids()).logits, result.model(**some_ids()).logits)
    assert not (tmp_path / "run" / ADAPTER).exists()


def test_the_generated_text_is_the_most_likely_one(
    tmp_path: Path, play: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model", **STILL)
    for name in ("a", "b"):
        options = words(model, play, tmp_path / name, "--lora", "r=4", "--local.lr", "2", "--generate", "the ")
        assert main(["train", *options]) == 0
    text = (tmp_path / "a" / "generated.txt").read_text()
    assert text == (tmp_path / "b" / "generated.txt").read_text() and text.strip("\n") in capsys.readouterr().out
    trained, tokenizer = loaded(model, tmp_path / "a", dtype=torch.float32), hub.load_tokenizer(model)
    ids = tokenizer("the ")["input_ids"]
    with torch.inference_mode():
        while len(ids) < POSITIONS and ids[-1] != 0:
            ids.append(int(trained(torch.tensor([ids])).logits[0, -1].argmax()))
    assert text == tokenizer.decode(ids, skip_special_tokens=True) + "\n"


# Federated averaging of adapters, computed without fedmpi


@pytest.mark.parametrize("ffa", [False, True])
def test_an_independent_loop_makes_the_same_adapter(ffa: bool) -> None:
    model = add_lora(made("gpt2", **STILL), Lora(r=4, ffa=ffa), "it")
    clients, rounds, lr = [lines(5 + 3 * i, i) for i in range(3)], 3, 0.2
    result = fedmpi.train(
        model,
        clients,
        lines(8, 9),
        rounds=rounds,
        threads=1,
        quiet=True,
        local={"lr": lr, "momentum": 0.0, "epochs": 2, "batch": 100},
    )
    mine = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert mine.keys() == {name for name, p in result.model.named_parameters() if p.requires_grad}
    for _ in range(rounds):
        total, samples = {name: torch.zeros_like(p) for name, p in mine.items()}, 0
        for client in clients:
            own: Any = copy.deepcopy(model)
            own.load_state_dict(mine, strict=False)
            trained = [p for p in own.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=lr)
            for _ in range(2):
                optimizer.zero_grad()
                own(input_ids=client["input_ids"], labels=client["labels"]).loss.backward()
                optimizer.step()
            count = len(client["labels"])
            for name, p in own.named_parameters():
                if name in total:
                    total[name] += count * p.detach()
            samples += count
        mine = {name: p / samples for name, p in total.items()}
    for name, p in mine.items():
        found = result.model.get_parameter(name)
        assert torch.allclose(found, p, atol=2e-6), name
        assert ("lora_A" not in name) or not ffa


# What is refused, with exit code 2 and before training


def test_a_base_that_changes_in_training_is_refused(tmp_path: Path) -> None:
    model = add_lora(made("gpt2"), Lora(r=4), "it")
    inner = model.get_submodule("base_model.model.transformer")
    inner.register_buffer("seen", torch.zeros(1, dtype=torch.bfloat16))

    def count(module: Any, given: object) -> None:
        if module.training:
            module.seen += 1

    inner.register_forward_pre_hook(count)
    with pytest.raises(UserError, match="training changed 'base_model.model.transformer.seen', which is frozen"):
        fedmpi.train(model, [lines(4, 0)], lines(4, 1), rounds=1, threads=1, quiet=True)


def test_an_adapter_that_is_not_to_be_trained_is_refused() -> None:
    model = add_lora(made("gpt2"), Lora(r=4), "it").requires_grad_(False)
    with pytest.raises(UserError, match="the model has no trainable parameter"):
        fedmpi.train(model, [lines(4, 0)], lines(4, 1), rounds=1, threads=1, quiet=True)


def test_mistakes_are_one_message_and_exit_code_2(
    tmp_path: Path, play: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = save_model(tmp_path / "model"), tmp_path / "run"
    usual = words(model, play, out)
    cases: list[tuple[list[str], str]] = [
        ([*usual, "--lora", "rank=4"], "unknown key of --lora 'rank'"),
        ([*usual, "--lora", "targets=q_proj"], "target 'q_proj' matches nothing"),
        ([*usual, "--lora", "r=4", "--local.freeze", "nothing*"], "--local.freeze: 'nothing*' matches nothing in the"),
        ([*usual, "--lora", "r=4", "--local.freeze", "*"], "the model has no trainable parameter"),
        ([*usual, "--local.private", "lm_head"], "are one tensor, which cannot be private and shared at once"),
        ([*usual, "--text.pack", "true", "--text.length", "40"], "takes 32 tokens, and a sample has 40"),
        ([*usual, "--skew.owner", "speaker"], "--skew.owner is 'speaker'"),
        ([*usual, "--text.column", "body"], "--text.column is 'body'"),
        ([*usual, "--model", f"hf:{tmp_path}/none"], f"there is no folder '{tmp_path}/none'"),
        ([*usual, "--model", "hf:nobody/has-this", "--text.tokenizer", model], "nor in the cache"),
        ([*usual, "--data", "hf:nobody/has-this"], "nor in the cache"),
        (["--lora", "r=4", "--out", str(out)], "--lora is for models of transformers, and --model is lenet"),
        (["--export", "merged", "--out", str(out)], "--export is merged, which is for models of transformers"),
        (["--generate", "a", "--out", str(out)], "--generate needs a tokenizer"),
        (["--generate", "a", "--text.tokenizer", model, "--out", str(out)], "--generate needs a language model"),
        ([*usual, "--generate", "a" * 32], "--generate has 32 tokens, and '"),
        ([*usual, "--text.label", "long", "--generate", "a"], "--generate needs a language model"),
        (["--skew.owner", "role", "--out", str(out)], "--skew.owner is for --data hf:"),
        (["--text.pack", "true", "--out", str(out)], "--text.pack is for --data hf:"),
        ([word for word in usual if word not in ("--text.pad", "eos")], "has no padding token"),
        ([word for word in usual if word not in ("--skew.owner", "role")], "needs --skew.owner, the column"),
    ]
    for options, message in cases:
        assert main(["train", *options]) == 2, message
        said = capsys.readouterr().err
        assert message in said.splitlines()[-1] and said.count("fedmpi: ") == 1 and not out.exists(), said
    with pytest.raises(UserError, match="--generate has 0 tokens, and .* can continue 1 to 31; give another text"):
        text = {"label": "none", "pad": "eos"}
        fedmpi.train(model, play, split="iid", clients=2, cohort=2, text=text, generate="", quiet=True)
    find = hub.importlib.util.find_spec
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    assert main(["train", *usual]) == 2
    assert capsys.readouterr().err.endswith("needs peft, which is not installed; pip install 'fedmpi[llm]'\n")


def test_an_attack_rebuilds_a_run_with_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_model(tmp_path / "model", "bert", pad=END, num_labels=3)
    data = write_rows(tmp_path / "play.jsonl", spoken())
    options = f"--model {base} --data {data} --text.label role --split iid --clients 4 --cohort 4 --rounds 2 --lora "
    options += f"ffa,r=4 --local.lr 0.3 --log_to none --threads 1 --out {tmp_path / 'run'}"
    assert main(["train", *options.split()]) == 0
    assert main(["attack", str(tmp_path / "run")]) == 0, capsys.readouterr().err
