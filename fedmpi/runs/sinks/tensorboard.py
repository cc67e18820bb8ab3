"""TensorBoard: event files in `tensorboard/` of the run folder."""

from __future__ import annotations

import os
import socket
import time
from functools import cached_property
from pathlib import Path
from typing import Any

from .base import About, Logged, imported, scalars


class TensorBoard:
    """A sink that writes every number as a scalar. Each start writes all previous rounds again, which hides what
    earlier starts have written, because rounds there may be incomplete.

    Events are not written by torch's SummaryWriter: its thread prints a traceback if the folder is gone, and every
    round is flushed anyway."""

    def __init__(self, about: About) -> None:
        self.folder, self.logged = about.folder / "tensorboard", Logged()

    @cached_property
    def events(self) -> Events:
        """Return the writer. It is made at the first round, because its import takes time."""
        return Events(self.folder)

    def write(self, record: dict[str, Any]) -> None:
        self.add(record, record["round"])

    def end(self, record: dict[str, Any], more: dict[str, Any]) -> None:
        self.add(more, record["round"])

    def add(self, numbers: dict[str, Any], step: int) -> None:
        """Log numbers at a step."""
        try:
            self.events.add(dict(scalars(numbers)), step)
        except OSError:
            self.close("failed")
            raise

    def close(self, how: str) -> None:
        if "events" in vars(self):
            self.events.file.close()


class Events:
    """An event file. Its first event invalidates all rounds in older files."""

    def __init__(self, folder: Path) -> None:
        self.proto = imported("tensorboard", "tensorboard.compat.proto.event_pb2")
        self.summary = imported("tensorboard", "tensorboard.compat.proto.summary_pb2")
        writer = imported("tensorboard", "tensorboard.summary.writer.record_writer")
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self.path = folder / name
        self.file = open(self.path, "xb", buffering=0)
        self.records = writer.RecordWriter(self.file)
        start = self.proto.SessionLog(status=self.proto.SessionLog.START)
        self.put(file_version="brain.Event:2")
        self.put(step=1, session_log=start)

    def add(self, numbers: dict[str, float], step: int) -> None:
        """Write a round's numbers."""
        os.stat(self.path)  # raises if the folder was removed, which writing would not notice
        values = [self.summary.Summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()]
        self.put(step=step, summary=self.summary.Summary(value=values))

    def put(self, **content: Any) -> None:
        """Write one event."""
        self.records.write(self.proto.Event(wall_time=time.time(), **content).SerializeToString())
