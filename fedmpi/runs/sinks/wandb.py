"""Weights & Biases: offline files in `wandb/` of the run folder, for `wandb sync`; or as WANDB_MODE says.

Every start of a run writes a file of its own, all under one id, and `wandb sync` uploads them one after another. W&B
writes its file once per second: a killed run may lack its last rounds there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from ...errors import AGAIN
from .base import About, LoggedRun, imported, scalars

CODES = {"finished": 0, "stopped": AGAIN, "failed": 1}


class Wandb:
    """A run of W&B."""

    def __init__(self, about: About) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it reports its errors and its use even offline
        self.wandb = imported("wandb", "wandb")
        self.logged = LoggedRun(about.folder / "wandb", about)
        self.run = self.wandb.init(
            dir=about.folder,
            project=os.environ.get("WANDB_PROJECT") or "fedmpi",
            name=about.name,
            id=self.logged.id,
            resume="allow",
            reinit="create_new",  # a run of the caller's own is left alone
            config=dict(about.config),
            allow_val_change=True,
            tags=[f"{name}:{value}"[:64] for name, value in about.tags.items()],
            settings=settings(self.wandb, os.environ.get("WANDB_MODE") or "offline"),
        )

    def write(self, record: dict[str, Any]) -> None:
        try:
            self.run.log(dict(scalars(record)), step=record["round"], commit=True)
        except ConnectionError:  # its process is gone: forget it, or there are complaints when Python exits
            with suppress(ConnectionError):
                self.wandb.teardown()
            raise

    def end(self, record: dict[str, Any], more: dict[str, Any]) -> None:
        self.run.summary.update(dict(scalars(more)))  # a step cannot be logged twice

    def close(self, how: str) -> None:
        if how == "stopped":
            self.run.mark_preempting()  # it will resume
        self.run.finish(exit_code=CODES[how])


def settings(wandb: Any, mode: str) -> Any:
    """Return W&B's settings: keep what is logged, and look neither at the screen nor at the machine. Those with an x in
    front come and go between versions: give the ones that this version has."""
    wanted = {"mode": mode, "silent": mode == "offline", "console": "off", "disable_git": True}
    wanted |= dict.fromkeys(("x_disable_stats", "x_disable_meta", "x_disable_machine_info"), True)
    wanted |= {"x_save_requirements": False, "x_transaction_log_flush_interval": 1.0}
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known or name[:2] != "x_"})
