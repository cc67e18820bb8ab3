"""TensorBoard: event files in `tensorboard/` of the run folder."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from .base import About, scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Every number as a scalar. What earlier lives have written stays in their files, hidden: a life begins with all
    rounds before it, as nobody knows which of them were written, whole, and with the knobs that counted in the end."""

    def __init__(self, about: About) -> None:
        self.folder, self.last = about.folder / "tensorboard", 0

    @cached_property
    def writer(self) -> SummaryWriter:
        """What writes, made when it is first used: importing it takes time, and nothing needs it before a round."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder), purge_step=1)

    def write(self, record: dict[str, Any]) -> None:
        for tag, number in scalars(record):
            self.writer.add_scalar(tag, number, record["round"])
        self.writer.flush()  # by itself every two minutes, which a kill may come before

    def close(self, how: str) -> None:
        if "writer" in vars(self):
            self.writer.close()
