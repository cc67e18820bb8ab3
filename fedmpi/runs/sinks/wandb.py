"""Weights & Biases: offline files in `wandb/` of the run folder, for `wandb sync`, or as WANDB_MODE says.

Each start of a run writes its own file, all under one id, and `wandb sync` uploads them one by one. W&B writes its file
once per second, so a killed run may lack its last rounds there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from ...errors import AGAIN
from .base import About, SinkWithRuns, imported, scalars

CODES = {"finished": 0, "stopped": AGAIN, "failed": 1}


class Wandb(SinkWithRuns):
    """A run of W&B."""

    def __init__(self, about: About) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # W&B reports errors and usage even offline
        self.wandb = imported("wandb", "wandb")
        super().__init__(about.folder / "wandb", about)
        self.run = self.wandb.init(
            dir=about.folder,
            project=os.environ.get("WANDB_PROJECT") or "fedmpi",
            name=about.name,
            id=self.id,
            resume="allow",
            reinit="create_new",  # do not touch a run of the caller
            config=dict(about.config),
            allow_val_change=True,
            tags=[f"{name}:{value}"[:64] for name, value in about.tags.items()],
            settings=settings(self.wandb, os.environ.get("WANDB_MODE") or "offline"),
        )

    def add(self, numbers: dict[str, Any], step: int) -> None:
        try:
            self.run.log(scalars(numbers), step=step, commit=True)
        except ConnectionError:  # W&B's process is gone: detach, or it prints errors at exit
            with suppress(ConnectionError):
                self.wandb.teardown()
            raise

    def end(self, record: dict[str, Any], more: dict[str, Any]) -> None:
        self.run.summary.update(scalars(more))  # a step cannot be logged twice

    def close(self, how: str) -> None:
        if how == "stopped":
            self.run.mark_preempting()  # the run will resume
        self.run.finish(exit_code=CODES[how])


def settings(wandb: Any, mode: str) -> Any:
    """Return W&B's settings: record only what is logged, not the console or the machine. Settings that begin with x_
    differ between versions: only those of the installed version are set."""
    wanted = {"mode": mode, "silent": mode == "offline", "console": "off", "disable_git": True}
    wanted |= dict.fromkeys(("x_disable_stats", "x_disable_meta", "x_disable_machine_info"), True)
    wanted |= {"x_save_requirements": False, "x_transaction_log_flush_interval": 1.0}
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known or name[:2] != "x_"})
