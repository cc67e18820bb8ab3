"""TensorBoard: event files in `tensorboard/` of the run folder."""

from __future__ import annotations

import os
import socket
import time
from typing import Any, BinaryIO

from .base import About, Sink, imported, scalars


class TensorBoard(Sink):
    """Writes every number as a scalar. Each start writes all previous rounds again, which hides what earlier starts
    have written, because rounds there may be incomplete.

    Events are not written by torch's SummaryWriter: its thread prints a traceback if the folder is gone, and every
    round is flushed anyway."""

    def __init__(self, about: About) -> None:
        self.folder = about.folder / "tensorboard"
        self.file: BinaryIO | None = None

    def open(self) -> None:
        """Make the event file, at the first round, because the imports take time. Its first event invalidates all
        rounds in older files."""
        self.proto = imported("tensorboard", "tensorboard.compat.proto.event_pb2")
        self.summary = imported("tensorboard", "tensorboard.compat.proto.summary_pb2")
        writer = imported("tensorboard", "tensorboard.summary.writer.record_writer")
        self.folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self.path = self.folder / name
        self.file = open(self.path, "xb", buffering=0)
        self.records = writer.RecordWriter(self.file)
        self.put(file_version="brain.Event:2")
        self.put(step=1, session_log=self.proto.SessionLog(status=self.proto.SessionLog.START))

    def add(self, numbers: dict[str, Any], step: int) -> None:
        try:
            if self.file is None:
                self.open()
            os.stat(self.path)  # raises if the folder was removed, which writing would not notice
            values = [self.summary.Summary.Value(tag=tag, simple_value=n) for tag, n in scalars(numbers).items()]
            self.put(step=step, summary=self.summary.Summary(value=values))
        except OSError:
            self.close("failed")
            raise

    def put(self, **content: Any) -> None:
        """Write one event."""
        self.records.write(self.proto.Event(wall_time=time.time(), **content).SerializeToString())

    def close(self, how: str) -> None:
        if self.file is not None:
            self.file.close()
