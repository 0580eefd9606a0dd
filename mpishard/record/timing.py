"""How a process spends its time: seconds, phases and axes of each step, and traces of some steps."""

from __future__ import annotations

import time
from contextlib import ContextDecorator
from typing import Any

from mpishard.comm.ledger import Ledger, Span
from mpishard.comm.mesh import Mesh
from mpishard.record.record_files import RecordFiles


class StepTimes:
    """The times of the steps of this process since its last line in the record.

    A step is split into its phases, the time in collectives, and computation, which is the rest.  `step_began` is the
    start of the step under way, in seconds of `time.perf_counter`.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._phases: dict[str, float] = {}  # of the steps that have ended
        self._step_phases: dict[str, float] = {}  # of the step under way
        self._durations: list[float] = []
        self._busy: list[float] = []
        self._first_step = 0
        self.step_began: float = time.perf_counter()
        self._waited = mesh.ledger.seconds
        # The totals at the last line, and at the end of the last step.
        self._axes = self._axes_now = self._over_axes()

    def begin(self) -> None:
        """Begin the first step of a run now."""
        self.step_began, self._waited = time.perf_counter(), self._mesh.ledger.seconds
        self._axes = self._axes_now = self._over_axes()
        self._step_phases.clear()

    def phase(self, name: str) -> TimedPhase:
        """A block whose time counts as a phase of the step under way, except its time in collectives."""
        return TimedPhase(self._mesh.ledger, self._step_phases, name)

    def end_step(self, step: int) -> float:
        """End the step under way; returns its seconds."""
        now, waited = time.perf_counter(), self._mesh.ledger.seconds
        seconds = now - self.step_began
        if not self._durations:
            self._first_step = step
        self._durations.append(seconds)
        self._busy.append(seconds - (waited - self._waited))
        self.step_began, self._waited, self._axes_now = now, waited, self._over_axes()
        for name, phase in self._step_phases.items():
            self._phases[name] = self._phases.get(name, 0.0) + phase
        self._step_phases.clear()
        return seconds

    def empty_line(self) -> dict[str, Any]:
        """The line that a process begins with: where it is."""
        return {**self._place(), "seconds": [], "busy": [], "phases": {}, "axes": {}}

    def take_line(self) -> dict[str, Any] | None:
        """The line for the steps since the last one; None if none has ended."""
        durations, busy, phases = self._durations, self._busy, self._phases
        self._durations, self._busy, self._phases = [], [], {}
        axes, self._axes = self._axes, self._axes_now
        if not durations:
            return None
        known = sum(phases.values())
        over = {}
        for name, (sent, seconds) in self._axes.items():
            before, spent = axes.get(name, (0, 0.0))
            over[name] = {"bytes": sent - before, "seconds": round(seconds - spent, 6)}
        return {
            **self._place(),
            "seconds": [round(seconds, 6) for seconds in durations],
            "busy": [round(seconds, 6) for seconds in busy],
            "phases": {"computation": round(sum(busy) - known, 6)}
            | {name: round(seconds, 6) for name, seconds in phases.items()},
            "axes": {name: total for name, total in over.items() if total["bytes"] or total["seconds"]},
        }

    def _place(self) -> dict[str, Any]:
        mesh = self._mesh
        own = {"time": round(time.time(), 3), "rank": mesh.rank, "ranks": mesh.size, **mesh.coordinates}
        return own | {"step": self._first_step}

    def _over_axes(self) -> dict[str, tuple[int, float]]:
        """Bytes sent and seconds spent so far, by axis."""
        found: dict[str, tuple[int, float]] = {}
        for (axis, _, _), total in self._mesh.ledger.totals.items():
            sent, seconds = found.get(axis, (0, 0.0))
            found[axis] = sent + total.sent, seconds + total.seconds
        return found


class TimedPhase(ContextDecorator):
    """A block of a step; at its end its time, except in collectives, is added to that of its name in `phases`."""

    def __init__(self, ledger: Ledger, phases: dict[str, float], name: str) -> None:
        self._ledger = ledger
        self._phases = phases
        self._name = name

    def __enter__(self) -> None:
        self._began, self._waited = time.perf_counter(), self._ledger.seconds

    def __exit__(self, *error: object) -> None:
        ledger, name, began = self._ledger, self._name, self._began
        ledger.note(name, "phase", began)
        seconds = time.perf_counter() - began - (ledger.seconds - self._waited)
        self._phases[name] = self._phases.get(name, 0.0) + seconds


class StepTrace:
    """Has the ledger note spans in the steps from the first to the last of `steps`, for ``mpishard trace``."""

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
