"""The knobs of `fedmpi.train` for type checkers and editors. From config.py, by python -m tests.typed"""
# ruff: noqa: UP013  (tables of names and types, several on a line)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from .config import Checkpoint, Eval, Memory, Meta, Skew, Step, Text

if TYPE_CHECKING:  # what config.py makes of the knobs that rules declare

    @dataclass(frozen=True)
    class Local:
        rule: str | None = None
        lr: float | None = None
        schedule: str = "constant"
        epochs: int | None = None
        steps: int | None = None
        batch: int = 32
        freeze: str | None = None
        private: str | None = None
        work: str = "full"
        momentum: float | None = None
        weight_decay: float = 0.0
        optimizer: str = "sgd"
        b1: float = 0.9
        b2: float = 0.999
        eps: float = 1e-08
        accumulate: int = 1
        step_schedule: str = "constant"
        clip: float | None = None
        clip_update: float | None = None
        mu: float = 0.01
        option: str = "II"
        gradient: str = "last"


    @dataclass(frozen=True)
    class MaskOptions:
        tau: float | None = None
        sharpness: float = 4.0


    @dataclass(frozen=True)
    class Server:
        rule: str | None = None
        lr: float | None = None
        schedule: str = "constant"
        momentum: float | None = None
        b1: float = 0.9
        b2: float | None = None
        eps: float | None = None
        variant: str = "reddi"
        mask_moments: bool = False

else:
    from .config import Local, Server

LocalDict = TypedDict("LocalDict", {
    "rule": str | None, "lr": float | None, "schedule": str, "epochs": int | None, "steps": int | None, "batch": int,
    "freeze": str | None, "private": str | None, "work": str, "momentum": float | None, "weight_decay": float,
    "optimizer": str, "b1": float, "b2": float, "eps": float, "accumulate": int, "step_schedule": str,
    "clip": float | None, "clip_update": float | None, "mu": float, "option": str, "gradient": str,
}, total=False)

StepDict = TypedDict("StepDict", {
    "layout": str, "precision": str, "compile": str, "kernels": str, "graphs": bool, "out_of_memory": str,
    "together": int,
}, total=False)

ServerDict = TypedDict("ServerDict", {
    "rule": str | None, "lr": float | None, "schedule": str, "momentum": float | None, "b1": float, "b2": float | None,
    "eps": float | None, "variant": str, "mask_moments": bool,
}, total=False)

SkewDict = TypedDict("SkewDict", {
    "classes": int | None, "noise": float, "alpha": float, "beta": float, "owners": str, "owner": str | None,
}, total=False)

TextDict = TypedDict("TextDict", {
    "column": str | None, "label": str | None, "test": str | None, "length": int | None, "pack": bool,
    "pad": str | None, "tokenizer": str | None,
}, total=False)

MetaDict = TypedDict("MetaDict", {
    "size": int | None, "lr": float | None, "share": bool | None, "seed": int, "weights": list[float] | None,
    "batch": int,
}, total=False)

MemoryDict = TypedDict("MemoryDict", {
    "limit": float, "folder": str | None,
}, total=False)

EvalDict = TypedDict("EvalDict", {
    "every": int, "batch": int, "samples": int | None,
}, total=False)

CheckpointDict = TypedDict("CheckpointDict", {
    "every": int | None, "minutes": float, "keep": int,
}, total=False)

Knobs = TypedDict("Knobs", {
    "mask": str | None, "tau": float | None, "sharpness": float, "data_root": str | None, "augment": str | None,
    "workers": int, "split": str, "lora": str | None, "clients": int, "cohort": int, "min_clients": int, "rounds": int,
    "seed": int, "resume": str, "max_minutes": float | None, "comm": str, "sum": str, "wire": str, "timeout": float,
    "threads": int | None, "device": str, "data_on": str, "sums": str, "deterministic": bool, "evaluate": str,
    "export": str, "generate": str | None, "log_to": str, "verbose": bool, "quiet": bool, "local": Local | LocalDict,
    "step": Step | StepDict, "server": Server | ServerDict, "skew": Skew | SkewDict, "text": Text | TextDict,
    "meta": Meta | MetaDict, "memory": Memory | MemoryDict, "eval": Eval | EvalDict,
    "checkpoint": Checkpoint | CheckpointDict, "lr": float | None, "epochs": int | None, "num_steps": int | None,
    "batch_size": int, "mu": float, "weight_decay": float, "clip_grad": float | None, "client_optimizer": str,
    "adam_beta1": float, "adam_beta2": float, "adam_epsilon": float, "gradient_accumulation_steps": int,
    "server_lr": float | None, "server_optimizer": str | None, "beta1": float, "beta2": float | None,
    "eps": float | None, "alpha": float, "classes_per_client": int | None, "test_every": int, "test_batch_size": int,
    "save_every": int | None,
}, total=False)
