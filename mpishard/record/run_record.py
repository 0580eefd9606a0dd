"""Writes the record of a run during the run, and measures how a process spends its time.

Seconds, phases and axes of each step, and traces of some steps.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, ContextDecorator
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arguments import entries, flag, integer, number, path, shown
from mpishard.comm.abort import note_deaths
from mpishard.comm.agreement import opening
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.errors import raised_on_all
from mpishard.comm.ledger import Ledger, Span
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.io.files import warn_of_writers
from mpishard.record.reading import DEATHS, METRICS, OWN, PROCESSES, own_metrics, read_end
from mpishard.record.record_files import RecordFiles, plain, require_tensorboard
from mpishard.record.stacks import StackReporter
from mpishard.watch.sampler import LOOK_S


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
    """A block of a step; at its end its time is added to that of its name in `phases`.

    The time in collectives and in blocks within it does not count.
    """

    def __init__(self, ledger: Ledger, phases: dict[str, float], name: str) -> None:
        self._ledger = ledger
        self._phases = phases
        self._name = name

    def __enter__(self) -> None:
        self._began, self._waited = time.perf_counter(), self._ledger.seconds
        self._noted = sum(self._phases.values())

    def __exit__(self, *error: object) -> None:
        ledger, name, began = self._ledger, self._name, self._began
        ledger.note(name, "phase", began)
        within = max(0.0, sum(self._phases.values()) - self._noted)
        seconds = time.perf_counter() - began - (ledger.seconds - self._waited) - within
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
        if spans is None or not steps[0] <= step <= steps[1]:
            return
        spans.append(Span(f"step {step}", "step", began, time.perf_counter()))
        offset = time.time() - time.perf_counter()
        noted = [[s.name, s.kind, round(s.began + offset, 6), round(s.ended - s.began, 6)] for s in spans]
        self._files.spans.add({"rank": self._mesh.rank, **self._mesh.coordinates, "step": step, "spans": noted})

    def close(self) -> None:
        """Note no spans any more."""
        self._mesh.ledger.spans = None


# After this time plus twice `every` the first rank has written a line, even if its disk is busy.
_WRITTEN_S = 5.0


class StepMetrics:
    """The metrics of the steps, which the first rank writes, each `every` seconds.

    Where a run heals, the other ranks keep those of the last steps: one of them is the next first rank if that one
    dies.
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
        """Write or keep the metrics of a step that has just ended and took `seconds` seconds."""
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
        self._files.lead(succeeds=True)
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


class RunRecord:
    """Records a run in a folder that can be read during the run, after a crash, and a year later.

    ``starts.jsonl`` has a line for each start, with the configuration, versions, layout and environment;
    ``metrics.jsonl`` a line for each step, by the first rank; ``logged.jsonl`` the values given to `log`;
    ``processes/HOST-PID.jsonl`` lines of a process: times of its steps and their phases, and bytes sent by axis;
    ``ends.jsonl`` a line for each start that ended in order, with the last step and the reason; ``audits.jsonl`` what
    audits have found, and ``deaths.jsonl`` the ranks that have died.  Files are appended to, so a run that is continued
    in the same folder has one record, and so have several calls of `minimize` in one script.
    Of a step repeated from a checkpoint the last line counts; ``start`` in it is the number of that start.
    ``mpishard plot FOLDER`` draws it.

    Give it to ``optimizer.optimize(problem, record=...)``; in a loop of your own call `begin` once, `step` after every
    step, and `end`, or leave its ``with`` block.  Of all these only `begin` is collective.

    Parameters
    ----------
    folder : path
        Made if it does not exist.  All ranks must see it.  Only one run at a time may write there: `begin` refuses the
        folder of another run that lives, and names its host and job.
    mesh : Mesh
        Its ranks are recorded.
    tensorboard : bool
        Write the metrics for TensorBoard, too, into ``tensorboard/`` (``pip install 'mpishard[tensorboard]'``).
    trace : pair of int, optional
        First and last step to trace for ``mpishard trace``: ``processes/HOST-PID.trace.jsonl`` gets all intervals of a
        process, tens to hundreds of lines per step, so a few steps are enough.  ``mpishard trace FOLDER --next 3`` asks
        a running job for more.
    every : float
        Seconds after which a thread writes new lines.  A killed process loses the lines since, except for the metrics
        of a run that heals.  0: written at the end of each step.  Values given to `log` are written at once.

    Raises
    ------
    ValueError, TypeError
        On this rank, if `mesh`, `trace`, `every` or `tensorboard` make no sense.
    ModuleNotFoundError
        On this rank, if TensorBoard is asked for and not installed.

    Notes
    -----
    If the record cannot be written (a full disk), a message says so once, and the run continues without it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        mesh: Mesh,
        *,
        tensorboard: bool = False,
        trace: tuple[int, int] | None = None,
        every: float = 1.0,
    ) -> None:
        checked_mesh(mesh)
        steps = [integer("trace", step) for step in entries("trace", () if trace is None else trace, "two steps")]
        if trace is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            raise ValueError(f"trace={trace!r} must be the first and the last step to trace, such as (100, 104)")
        every = number("every", every, least=0)
        self._given = path("folder", folder)
        self.folder: Path = self._given.absolute()  # a script may change its directory
        if flag("tensorboard", tensorboard):
            require_tensorboard(self.folder)
        self.mesh = mesh
        self.every = every
        self._files = RecordFiles(self.folder, mesh, tensorboard)
        self._metrics = StepMetrics(self._files, mesh, every)
        self._times = StepTimes(mesh)
        self._trace = StepTrace(self._files, mesh, trace)
        self._stack_reporter: StackReporter | None = None
        self._lock = threading.RLock()  # the thread that writes, and the one that trains
        self._goes_on = False  # whether the run has begun and not ended
        self._last_step = 0
        self._before = 0  # steps of earlier stages

    @property
    def trace(self) -> tuple[int, int] | None:
        """The first and the last step to trace, also by a request of the running job; None: none."""
        return self._trace.steps

    @trace.setter
    def trace(self, steps: tuple[int, int] | None) -> None:
        self._trace.steps = steps

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and self._goes_on:
            self.end(self._last_step, "closed")
        self.close()

    def begin(self, facts: Mapping[str, Any] | None = None, *, stage: bool = False) -> None:
        """Begin a run: make the folder, and note the environment of the run.  Collective.

        Parameters
        ----------
        facts : mapping, optional
            Further settings to note, by name.
        stage : bool
            Count its steps after those of the starts of this process that have ended in this folder: it is the next
            stage of one run.  `minimize` says so.

        Raises
        ------
        TypeError, ValueError
            On every rank, if `facts` of any of them are no mapping, or one is named ``time``, ``every`` or ``process``;
            or if another run that lives uses the folder.
        OSError
            On every rank, if the folder cannot be made or written; not for a full disk.
        """
        with opening(self.mesh.world, "RunRecord.begin") as same:
            if not (facts is None or isinstance(facts, Mapping)):
                raise TypeError(f"facts={shown(facts)} must be a mapping, such as a dict")
            if taken := sorted({"time", "every", "process"} & (facts or {}).keys()):
                raise ValueError(f"the fact {taken[0]!r} is one that the record itself writes; give yours another name")
            noted = plain(facts or {})  # here all ranks raise what the repr of an object raises
            same |= {"stage": flag("stage", stage), "folder": str(self._given)}
        with raised_on_all(self.mesh.world):
            if self.mesh.rank == 0:
                self._files.lead()
        if self._stack_reporter is not None:
            self.flush()  # what a run has left that an error has ended
        self._before = self._files.open(noted, self.every, stage=stage)
        with raised_on_all(self.mesh.world):  # Python may make errors of warnings
            if self.mesh.rank == 0:
                warn_of_writers(self.folder)
        note_deaths(self.folder / DEATHS)
        self._last_step = 0
        self._goes_on = True
        self._metrics.begin()
        self._times.begin()
        self._trace.begin()
        self._begin_to_write()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count the time inside a block as a phase of the step, except in collectives and in phases within it.

        Not collective.

        Parameters
        ----------
        name : str
            Of the phase; its blocks in one step are added up.

        Returns
        -------
        context manager
            ``with record.phase("data"): ...``
        """
        return self._times.phase(name)

    def step(self, step: int, **metrics: float) -> None:
        """Note that a step has ended; the first rank writes its metrics.  Not collective.

        The time since the last step is split into the phases, the time in collectives, and computation, which is the
        rest.

        Parameters
        ----------
        step : int
            Its number, from 1.
        **metrics : float
            Series of values of the steps, such as ``loss=0.5``.

        Raises
        ------
        ValueError, TypeError
            If `log` would not accept the step or a value, or a series is named ``time`` or ``start``.
        """
        self._last_step = integer("step", step, least=0)
        step = self._before + self._last_step
        if own := sorted({"start", "time"} & metrics.keys()):
            raise ValueError(f"{own[0]} is a field that the record itself writes; give it another name")
        for name, value in metrics.items():
            if type(value) is not float:
                _number(name, value)
        if self._stack_reporter is None:
            if not (self._goes_on or self._files.broken or (self.folder / PROCESSES).is_dir()):
                why = "there is no such folder; RunRecord.begin makes it: call it on all ranks before step"
                self._files.give_up(FileNotFoundError(errno.ENOENT, why, str(self.folder / PROCESSES)))
            self._begin_to_write()
        with self._lock:
            self._trace.end_step(step, self._times.step_began)
            seconds = self._times.end_step(step)
            self._metrics.add(step, seconds, metrics)
        if not self.every or self._stack_reporter is None:  # without its thread nobody else takes the times
            self.flush()

    def log(self, step: int, **values: float) -> None:
        """Write values of further series, e.g. ``record.log(state.step, accuracy=0.9)`` in a callback.  Not collective.

        It may be called for any step, any number of times.  The first rank's values are written at once; of several
        values of a series in one step the last counts.  ``mpishard plot`` draws the series, next to the loss if the
        name ends in "loss", and ``mpishard top`` shows the newest values.

        Parameters
        ----------
        step : int
            At least 0.
        **values : float
            By name of the series; numbers of NumPy and CuPy, and NaN, too.

        Raises
        ------
        ValueError
            If the step is negative, no series is given, or the run itself has a series of that name.
        TypeError
            If the step is no whole number, or a value is no number.
        """
        step = self._before + integer("step", step, least=0)
        if not values:
            raise ValueError(f"log was given no series for step {step}; name one, as in log({step}, accuracy=0.9)")
        if own := sorted(OWN & values.keys()):
            raise ValueError(f"{own[0]} is a series that the run itself writes; log it under another name")
        numbers = {name: _number(name, value) for name, value in values.items()}
        files = self._files
        if self.mesh.rank or files.broken:
            return
        with self._lock:
            clock = round(time.time(), 3)
            files.logged.add({"step": step, "start": files.number_of_start(), "time": clock, **numbers})
            if files.events is not None:
                files.events.add(step, clock, numbers)
            if self._stack_reporter is not None:  # the folder exists
                files.write(files.logged)

    def end(self, step: int, reason: str, way_on: str = "") -> None:
        """End the run after this step: the first rank notes the reason, and all lines that wait are written.

        Not collective.

        Parameters
        ----------
        step : int
            The last one.
        reason : str
            A value of `OptimizationResult.stop_reason`, or a text of your own, such as ``"stopped by its queue"``.
        way_on : str
            A text that says how to continue the run.

        Raises
        ------
        ValueError, TypeError
            If `step` is no whole number of at least 0; on the first rank.
        """
        self.close()
        files = self._files
        if self.mesh.rank == 0 and not files.broken:
            clock = round(time.time(), 3)
            number = self._before + integer("step", step, least=0)
            line = {"step": number, "start": files.number_of_start(), "time": clock}
            files.end(line | {"reason": reason, "way_on": way_on})
        self._goes_on = False

    def audit_found(self, step: int, last_right: int = 0, **facts: Any) -> None:
        """Note what an audit has found: the first rank writes a line.  Not collective.

        Parameters
        ----------
        step : int
            The step whose micro-batch was found, or after which copies were compared.
        last_right : int
            The last step after which the processes were known to be right; 0 if there is none.
        **facts
            The other fields of ``audits.jsonl``: ``micro_batch`` or ``kind``, ``wrong``, ``differ`` and ``outcome``.
        """
        files = self._files
        if self.mesh.rank == 0 and not files.broken:
            line = {"step": self._before + step, "start": files.number_of_start(), "time": round(time.time(), 3)}
            files.audit_found(line | facts | {"last_right": last_right and self._before + last_right})

    def flush(self) -> None:
        """Write all lines that wait.  Not collective."""
        with self._lock:
            line = self._times.take_line()
            if line is not None and self._files.has_process and not self._files.broken:
                self._files.process.add(line)
            self._files.flush()

    def close(self) -> None:
        """Write all lines that wait, and close the files.  Not collective."""
        if self._stack_reporter is not None:
            self._stack_reporter.end()
            self._stack_reporter = None
            atexit.unregister(self.flush)
        self._metrics.close()
        self.flush()
        self._trace.close()
        self._files.close()

    def _begin_to_write(self) -> None:
        """Write a first line, and start the thread that writes and answers requests, unless it runs."""
        files = self._files
        if self._stack_reporter is not None or files.broken or not files.has_process:
            return
        files.process.add(self._times.empty_line())
        self.flush()
        # A thread answers also while the run is stuck.
        self._stack_reporter = StackReporter(
            self.folder, self.mesh, self.flush, self._trace.request, self.every or LOOK_S
        )
        self._stack_reporter.watch()
        atexit.register(self.flush)


def _number(name: str, value: Any) -> float:
    """A value of a series as a float; also for numbers of NumPy and CuPy, and NaN."""
    if not isinstance(value, bool | np.bool | str | bytes):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    raise TypeError(f"{name}={shown(value)} must be a number")
