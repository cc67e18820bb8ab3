"""TensorBoard: event files in `tensorboard/` of the run folder."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from .base import About, scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Every number as a scalar. What an earlier life has written beyond `done` stays in its file, hidden."""

    def __init__(self, about: About) -> None:
        self.folder, self.first, self.last = about.folder / "tensorboard", about.done + 1, about.done

    @cached_property
    def writer(self) -> SummaryWriter:
        """What writes, made when it is first used: importing it takes time, and nothing needs it before a round."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder), purge_step=self.first)

    def write(self, record: dict[str, Any]) -> None:
        for tag, number in scalars(record):
            self.writer.add_scalar(tag, number, record["round"])

    def close(self, how: str) -> None:
        if "writer" in vars(self):
            self.writer.close()
