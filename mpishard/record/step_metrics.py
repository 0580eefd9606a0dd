"""The line of each step in a record: the first rank writes it, and the next first rank if that one dies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.mesh import Mesh
from mpishard.record.json_lines import read_end
from mpishard.record.reading import METRICS, own_metrics
from mpishard.record.record_files import RecordFiles

# After this time plus twice `every` the first rank has written a line, even if its disk is busy.
_WRITTEN_S = 5.0


class StepMetrics:
    """The metrics of the steps.  Where a run heals, the other ranks keep those of the last steps.

    Parameters
    ----------
    files : RecordFiles
    mesh : Mesh
    every : float
        Seconds after which the first rank writes its lines.
    """

    def __init__(self, files: RecordFiles, mesh: Mesh, every: float) -> None:
        self._files = files
        self._mesh = mesh
        self._kept_s = 2 * every + _WRITTEN_S
        self._leads = False  # whether this process was the first rank at its last step
        # Step, time and metrics of the last steps, in case the first rank dies before it has written them.
        self._keeps = heals_in_place()
        self._kept: deque[tuple[int, float, Mapping[str, float]]] = deque()

    def begin(self) -> None:
        """Begin a run: forget what an earlier one has left."""
        self._leads = False
        self._kept.clear()

    def add(self, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Write or keep the metrics of a step that has just ended and took so many seconds."""
        leads = self._mesh.rank == 0
        if (leads or self._keeps) and not self._files.broken:
            own = {"seconds": round(seconds, 6), "workers": self._mesh.data.size, **metrics}
            clock = round(time.time(), 3)
            if leads:
                if not self._leads:
                    self._take_over()
                self._write(step, clock, own)
            else:
                self._kept.append((step, clock, own))
                while self._kept[0][1] < clock - self._kept_s:
                    self._kept.popleft()
        self._leads = leads

    def close(self) -> None:
        """Write what is kept if this process has become the first rank since its last step."""
        if self._kept and self._mesh.rank == 0:
            self._take_over()

    def _write(self, step: int, clock: float, metrics: Mapping[str, float]) -> None:
        files = self._files
        files.metrics.add({"step": step, "start": files.number_of_start(), "time": clock, **metrics})
        if files.events is not None:
            files.events.add(step, clock, metrics)

    def _take_over(self) -> None:
        """Become the first rank: write the metrics that the last first rank has not written."""
        kept = list(self._kept)
        self._kept.clear()
        try:
            there = own_metrics(read_end(self._files.folder / METRICS)) if kept else []
        except OSError as error:
            self._files.give_up(error)
            return
        start = self._files.number_of_start() if there else 0
        last = max((line["step"] for line in there if line.get("start") == start), default=0)
        for step, clock, metrics in kept:
            if step > last:
                self._write(step, clock, metrics)
