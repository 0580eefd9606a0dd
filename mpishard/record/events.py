"""Writes metrics for TensorBoard, with TensorBoard's own writer."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def require_tensorboard() -> None:
    """Raise ModuleNotFoundError with the command that installs TensorBoard, if it is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(
            "tensorboard=True needs the package tensorboard: pip install 'mpishard[tensorboard]', or leave it out; "
            "mpishard plot draws the record without it"
        )


class Events:
    """Scalars by step in a folder of event files.  The writer, with a thread of its own, is made at the first one.

    They are plain numbers, which `EventAccumulator.Scalars` and tools built on it see; TensorBoard's own writer of
    summaries writes tensors, which these do not see.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def add(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step, at a time in seconds since 1970; values that are not finite are left out."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self.folder))
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in finite.items()]
        self._writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=values)))

    def flush(self) -> None:
        """Write all buffered metrics; OSError if that fails."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Flush and close the file; a later `add` begins another one."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()
