"""Traces some steps of a run: all intervals of a process in them, for ``mpishard trace``."""

from __future__ import annotations

import time

from mpishard.comm.ledger import Span
from mpishard.comm.mesh import Mesh
from mpishard.record.record_files import RecordFiles


class StepTrace:
    """The steps of which the ledger notes spans.

    Parameters
    ----------
    files : RecordFiles
    mesh : Mesh
    steps : pair of int, optional
        The first and the last of them.

    Attributes
    ----------
    steps : pair of int or None
    """

    def __init__(self, files: RecordFiles, mesh: Mesh, steps: tuple[int, int] | None) -> None:
        self.steps = steps
        self._files = files
        self._mesh = mesh

    def begin(self) -> None:
        """Begin a run: note the spans of its first step, if any step is traced."""
        self._mesh.ledger.spans = None if self.steps is None else []

    def request(self, steps: tuple[int, int]) -> None:
        """Trace these steps; the spans are noted from the next step on."""
        self.steps = steps

    def end_step(self, step: int, began: float) -> None:
        """Write the spans of this step if it is traced, and note those of the next step if that is traced."""
        ledger, steps = self._mesh.ledger, self.steps
        spans, ledger.spans = ledger.spans, None
        if steps is None or self._files.broken or not self._files.has_process:
            return
        if step < steps[1]:
            ledger.spans = []
        if spans is None or step < steps[0]:
            return
        spans.append(Span(f"step {step}", "step", began, time.perf_counter()))
        offset = time.time() - time.perf_counter()
        noted = [[s.name, s.kind, round(s.began + offset, 6), round(s.ended - s.began, 6)] for s in spans]
        self._files.spans.add({"rank": self._mesh.rank, **self._mesh.coordinates, "step": step, "spans": noted})

    def close(self) -> None:
        """Note no spans any more."""
        self._mesh.ledger.spans = None
