"""Weights & Biases: offline files in `wandb/` of the run folder, for `wandb sync`; or as WANDB_MODE says.

Every life of a run writes a file of its own, all under one id, and `wandb sync` puts them one behind the other. So a
life has to write what the files before it lack, and nothing else: it looks into them. They are logs as LevelDB has
them, of blocks with pieces of messages. A killed one lacks its last second, and may end anywhere.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import AGAIN
from .base import About, imported, known_id, scalars, settle_id

CODES = {"finished": 0, "stopped": AGAIN, "failed": 1}
HEADER, BLOCK, START = struct.Struct("<4xHB"), 2**15, 7  # checksum, size, kind; bytes of a block; where records start
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class Wandb:
    """A run of W&B."""

    def __init__(self, about: About) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it reports its errors and its use even offline
        self.wandb, home = imported("wandb", "wandb"), about.folder / "wandb"
        home.mkdir(mode=0o700, exist_ok=True)
        id = known_id(home)
        last = 0 if id is None else take_stock(home, id)
        new = settle_id(home, about, last)
        self.run = self.wandb.init(
            dir=about.folder,
            project=os.environ.get("WANDB_PROJECT") or "fedmpi",
            name=about.name,
            id=new,
            resume="allow",
            reinit="create_new",  # a run of the caller's own is left alone
            config=dict(about.config),
            allow_val_change=True,
            tags=[f"{name}:{value}"[:64] for name, value in about.tags.items()],
            settings=settings(self.wandb, os.environ.get("WANDB_MODE") or "offline"),
        )
        self.last: int = (last if new == id else 0) if self.run.offline else self.run.starting_step - 1

    def write(self, record: dict[str, Any]) -> None:
        try:
            self.run.log(dict(scalars(record)), step=record["round"], commit=True)
        except ConnectionError:  # its process is gone: forget it, or there are complaints when Python exits
            with suppress(ConnectionError):
                self.wandb.teardown()
            raise

    def close(self, how: str) -> None:
        if how == "stopped":
            self.run.mark_preempting()  # it will go on
        self.run.finish(exit_code=CODES[how])


def settings(wandb: Any, mode: str) -> Any:
    """W&B's settings: it keeps what it is given and looks neither at the screen nor at the machine. Those with an x in
    front come and go: of them, the ones that this version has."""
    wanted = {"mode": mode, "silent": mode == "offline", "console": "off", "disable_git": True}
    wanted |= dict.fromkeys(("x_disable_stats", "x_disable_meta", "x_disable_machine_info"), True)
    wanted |= {"x_save_requirements": False, "x_transaction_log_flush_interval": 1.0}
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known or name[:2] != "x_"})


def take_stock(home: Path, id: str) -> int:
    """The last round in the files of earlier lives, 0 where there is none. Makes them whole: `wandb sync` never gets
    past a file that ends in the middle of a message, or that has nothing in it yet."""
    kinds, last = imported("wandb", "wandb.proto.wandb_internal_pb2"), 0
    for path in home.glob(f"*run-*-{id}/run-{id}.wandb"):
        found = [(kinds.Record.FromString(message), end) for message, end in messages(path.read_bytes())]
        steps = [record.history.step.num for record, _ in found if record.HasField("history")]
        if not steps:
            path.unlink()
        elif found[-1][1] < path.stat().st_size:
            os.truncate(path, found[-1][1])
        last = max([last, *steps])
    return last


def messages(raw: bytes) -> Iterator[tuple[bytes, int]]:
    """The whole messages in a file, each with where it ends, up to where the file was cut short."""
    at, pieces = START, b""
    while at + HEADER.size <= len(raw):
        room = -at % BLOCK
        if 0 < room < HEADER.size:  # too little for a header: padding
            at += room
            continue
        size, kind = HEADER.unpack_from(raw, at)
        at += HEADER.size + size
        if kind not in (FULL, FIRST, MIDDLE, LAST) or at > len(raw):
            return
        pieces += raw[at - size : at]
        if kind in (FULL, LAST):
            yield pieces, at
            pieces = b""
