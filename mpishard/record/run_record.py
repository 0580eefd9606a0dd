"""Writes the record of a run while it goes on."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mpishard.arguments import flag, integer, number, shown
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.ledger import Span
from mpishard.comm.mesh import Mesh
from mpishard.io import log
from mpishard.io.files import warn_of_writers
from mpishard.record.events import Events, require_tensorboard
from mpishard.record.json_lines import JsonLinesWriter, read_end, read_lines
from mpishard.record.reading import ENDS, LOGGED, METRICS, OWN, PROCESSES, STARTS, TRACE, own_metrics
from mpishard.record.stack_reporter import StackReporter
from mpishard.record.starts import plain, surroundings

# Largest number of files of processes: a hundred thousand in a folder would burden a file system.
_MOST_PROCESSES = 1024
# After this time plus twice `every` the first rank has written a line, even if its disk is busy.
_WRITTEN_S = 5.0


class RunRecord:
    """Records a run in a folder that can be read during the run, after a crash, and a year later.

    ``starts.jsonl`` has a line for each start, with the configuration, versions, layout and environment;
    ``metrics.jsonl`` a line for each step, by the first rank; ``logged.jsonl`` the values given to `log`;
    ``processes/HOST-PID.jsonl`` lines of a process: times of its steps and their phases, and bytes sent by axis;
    ``ends.jsonl`` a line for each start that ended in order, with the last step and the reason.  Files are appended to,
    so a run that is continued in the same folder has one record.  Of a step repeated from a checkpoint the last line
    counts; ``start`` in it is the number of that start.  ``mpishard plot FOLDER`` draws it.

    Give it to ``optimizer.optimize(problem, record=...)``; in a loop of your own call `begin` once, `step` after every
    step, and `end`, or leave its ``with`` block.  Of all these only `begin` is collective.

    Parameters
    ----------
    folder : path
        Made if it does not exist.  All ranks must see it, and only one run at a time may write there.
    mesh : Mesh
    tensorboard : bool
        Write the metrics for TensorBoard, too, into ``tensorboard/`` (``pip install 'mpishard[tensorboard]'``).
    trace : pair of int, optional
        First and last step to trace for ``mpishard trace``: ``processes/HOST-PID.trace.jsonl`` gets all intervals of a
        process, tens to hundreds of lines per step, so a few steps are enough.  ``mpishard trace FOLDER --next 3`` asks
        a running job for more.
    every : float
        Seconds after which a thread writes new lines.  A killed process loses the lines since, except for the metrics
        of a run that heals.  0: written at the end of each step.  Values given to `log` are written at once.

    Notes
    -----
    If the record cannot be written (a full disk), a message says so once, and the run goes on without it.
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
        if trace is not None and not (len(trace) == 2 and 1 <= trace[0] <= trace[1]):
            raise ValueError(f"trace={trace!r} must be the first and the last step to trace, such as (100, 104)")
        every = number("every", every, least=0)
        if flag("tensorboard", tensorboard):
            require_tensorboard()
        self.folder: Path = Path(folder)
        self.mesh = mesh
        self.trace = trace
        self.every = every
        self._name = f"{os.uname().nodename}-{os.getpid()}"
        self._stack_reporter: StackReporter | None = None
        self._metrics = JsonLinesWriter(self.folder / METRICS)
        self._logged = JsonLinesWriter(self.folder / LOGGED)
        self._process = JsonLinesWriter(self.folder / PROCESSES / f"{self._name}.jsonl")
        self._spans = JsonLinesWriter(self.folder / PROCESSES / f"{self._name}{TRACE}")
        self._events = Events(self.folder / "tensorboard") if tensorboard else None
        self._broken = False
        # The number of this start, 0 until it is needed; whether the run has begun and not ended; whether this process
        # was the first rank at its last step.
        self._start = 0
        self._goes_on = False
        self._leads = False
        # Step, time and metrics of the last steps, in case the first rank dies before it has written them.
        self._keeps = heals_in_place()
        self._kept: deque[tuple[int, float, Mapping[str, float]]] = deque()
        self._lock = threading.RLock()  # the thread that writes, and the one that trains
        self._phases: dict[str, float] = {}  # of the steps that have ended
        self._step_phases: dict[str, float] = {}  # of the step under way
        self._durations: list[float] = []
        self._busy: list[float] = []
        self._first_step = self._last_step = 0
        self._ended = time.perf_counter()
        self._waited = mesh.ledger.seconds
        # The totals at the last flush, and at the end of the last step.
        self._axes = self._axes_now = self._over_axes()

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._goes_on:
            self.end(self._last_step, "closed")
        self.close()

    def begin(self, facts: Mapping[str, Any] | None = None) -> None:
        """Begin a run: make the folder, and note `facts` about the run and its environment.  Collective.

        Raises
        ------
        TypeError
            On every rank, if `facts` of any of them are no mapping.
        OSError
            On every rank, if the folder cannot be made or written; not for a full disk.
        """
        wrong = facts is not None and not isinstance(facts, Mapping)
        self.mesh.world.raise_if_any(
            TypeError(f"facts={shown(facts)} must be a mapping, such as a dict") if wrong else None
        )
        failed = None
        try:
            (self.folder / PROCESSES).mkdir(parents=True, exist_ok=True)
            if self.mesh.rank == 0:
                warn_of_writers(self.folder)
                starts = JsonLinesWriter(self.folder / STARTS)
                starts.add({**surroundings(self.mesh), "every": self.every, **plain(facts or {})})
                starts.close()
        except OSError as error:
            failed = (error.errno, error.strerror or str(error), str(error.filename or self.folder))
        failures = self.mesh.world.allgather_object(failed)
        rank = next((rank for rank, each in enumerate(failures) if each is not None), None)
        if rank is not None:
            number, text, path = failures[rank]
            what = f"the record of the run cannot be written: rank {rank} failed at {path}: {text}"
            if number not in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(
                    number, f"{what}; give RunRecord a folder that all ranks may write into, or leave the record out"
                )
            self._broken = True
            if self.mesh.rank == 0:
                log.warn(f"{what}; training goes on without")
        self._start = self._last_step = 0
        self._leads, self._goes_on = False, True
        self._kept.clear()
        self._begin_step()
        self._greet()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block, except in collectives, as a phase of the step."""
        began, waited = time.perf_counter(), self.mesh.ledger.seconds
        try:
            yield
        finally:
            self.mesh.ledger.note(name, "phase", began)
            seconds = time.perf_counter() - began - (self.mesh.ledger.seconds - waited)
            self._step_phases[name] = self._step_phases.get(name, 0.0) + seconds

    def step(self, step: int, **metrics: float) -> None:
        """Note that step `step` has ended; the first rank writes its `metrics`.

        The time since the last step is split into the phases, the time in collectives, and computation, which is the
        rest.

        Raises
        ------
        ValueError, TypeError
            If `log` would not accept the step or a value.
        """
        self._last_step = step = integer("step", step, least=0)
        for name, value in metrics.items():
            if type(value) is not float:
                _number(name, value)
        self._greet()
        with self._lock:
            self._trace(step)
            now, waited = time.perf_counter(), self.mesh.ledger.seconds
            seconds = now - self._ended
            if not self._durations:
                self._first_step = step
            self._durations.append(seconds)
            self._busy.append(seconds - (waited - self._waited))
            self._ended, self._waited, self._axes_now = now, waited, self._over_axes()
            for name, phase in self._step_phases.items():
                self._phases[name] = self._phases.get(name, 0.0) + phase
            self._step_phases.clear()
            leads = self.mesh.rank == 0
            if (leads or self._keeps) and not self._broken:
                own = {"seconds": round(seconds, 6), "workers": self.mesh.data.size, **metrics}
                clock = round(time.time(), 3)
                if not leads:
                    self._keep(step, clock, own)
                else:
                    if not self._leads:
                        self._take_over()
                    self._add_metrics(step, clock, own)
            self._leads = leads
        if not self.every:
            self.flush()

    def log(self, step: int, **values: float) -> None:
        """Write values of further series, e.g. ``record.log(state.step, accuracy=0.9)`` in a callback.

        It may be called for any step, any number of times.  The first rank's values are written at once; of several
        values of a series in one step the last counts.  ``mpishard plot`` draws the series, beside the loss if the name
        ends in "loss", and ``mpishard top`` shows the newest values.

        Raises
        ------
        ValueError
            If the step is negative, no series is given, or the run itself has a series of that name.
        TypeError
            If the step is no whole number, or a value is no number.
        """
        step = integer("step", step, least=0)
        if not values:
            raise ValueError(f"log was given no series for step {step}; name one, as in log({step}, accuracy=0.9)")
        if own := sorted(OWN & values.keys()):
            raise ValueError(f"{own[0]} is a series that the run itself writes; log it under another name")
        numbers = {name: _number(name, value) for name, value in values.items()}
        if self.mesh.rank or self._broken:
            return
        with self._lock:
            clock = round(time.time(), 3)
            self._logged.add({"step": step, "start": self._number_of_start(), "time": clock, **numbers})
            if self._events is not None:
                self._events.add(step, clock, numbers)
            if self._stack_reporter is not None:  # the folder exists
                self._write(self._logged)

    def end(self, step: int, reason: str, way_on: str = "") -> None:
        """End the run after this step: the first rank notes the reason, and all lines that wait are written.

        Parameters
        ----------
        step : int
        reason : str
            A value of `OptimizationResult.stop_reason`, or a text of your own, such as ``"stopped by its queue"``.
        way_on : str
            A text that says how to continue the run.
        """
        self.close()
        if self.mesh.rank == 0 and not self._broken:
            ends = JsonLinesWriter(self.folder / ENDS)
            clock = round(time.time(), 3)
            line = {"step": integer("step", step, least=0), "start": self._number_of_start(), "time": clock}
            ends.add(line | {"reason": reason, "way_on": way_on})
            self._write(ends)
            ends.close()
        self._goes_on = False

    def flush(self) -> None:
        """Write all lines that wait."""
        with self._lock:
            self._add_process()
            self._write(*self._files())

    def close(self) -> None:
        """Write all lines that wait, and close the files."""
        if self._stack_reporter is not None:
            self._stack_reporter.end()
            self._stack_reporter = None
            atexit.unregister(self.flush)
        if self._kept and self.mesh.rank == 0:
            self._take_over()
        self.flush()
        self.mesh.ledger.spans = None
        for written in self._files():
            with contextlib.suppress(OSError):
                written.close()

    def _files(self) -> list[JsonLinesWriter | Events]:
        written: list[JsonLinesWriter | Events] = [self._process, self._metrics, self._logged, self._spans]
        return written if self._events is None else [*written, self._events]

    def _write(self, *files: JsonLinesWriter | Events) -> None:
        if self._broken:
            return
        try:
            for written in files:
                written.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        log.warn(f"the record of the run ends here, training goes on: {error}")

    def _add_metrics(self, step: int, clock: float, metrics: Mapping[str, float]) -> None:
        self._metrics.add({"step": step, "start": self._number_of_start(), "time": clock, **metrics})
        if self._events is not None:
            self._events.add(step, clock, metrics)

    def _number_of_start(self) -> int:
        """The number of this start, from 1; read from the folder, so that a process that joined later has it too."""
        if not self._start:
            try:
                self._start = len(read_lines(self.folder / STARTS)[0])
            except OSError as error:
                self._give_up(error)
        return self._start

    def _keep(self, step: int, clock: float, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step, and earlier ones that the first rank may not have written yet."""
        kept = self._kept
        kept.append((step, clock, metrics))
        while kept[0][1] < clock - 2 * self.every - _WRITTEN_S:
            kept.popleft()

    def _take_over(self) -> None:
        """Become the first rank: write the metrics that the last first rank has not written."""
        kept = list(self._kept)
        self._kept.clear()
        try:
            there = own_metrics(read_end(self.folder / METRICS)) if kept else []
        except OSError as error:
            self._give_up(error)
            return
        last = max((line["step"] for line in there if line.get("start") == self._number_of_start()), default=0)
        for step, clock, metrics in kept:
            if step > last:
                self._add_metrics(step, clock, metrics)

    def _greet(self) -> None:
        """Write a first line, and start the thread that answers requests."""
        if self._stack_reporter is not None or self._broken or not self._writes:
            return
        self._process.add({**self._place(), "seconds": [], "busy": [], "phases": {}, "axes": {}})
        self.flush()
        # A thread answers also while the run is stuck.
        self._stack_reporter = StackReporter(
            self.folder, self._name, self.mesh, self.flush, self._trace_later, self.every or 1.0
        )
        self._stack_reporter.watch()
        atexit.register(self.flush)

    def _trace_later(self, steps: tuple[int, int]) -> None:
        """Trace these steps, as was requested; the spans are noted from the next step on."""
        self.trace = steps

    def _trace(self, step: int) -> None:
        """Write the spans of this step if it is traced, and note those of the next step if that is traced."""
        ledger, trace = self.mesh.ledger, self.trace
        spans, ledger.spans = ledger.spans, None
        if trace is None or self._broken or not self._writes:
            return
        if step < trace[1]:
            ledger.spans = []
        if spans is None or step < trace[0]:
            return
        spans.append(Span(f"step {step}", "step", self._ended, time.perf_counter()))
        offset = time.time() - time.perf_counter()
        noted = [[s.name, s.kind, round(s.began + offset, 6), round(s.ended - s.began, 6)] for s in spans]
        self._spans.add({"rank": self.mesh.rank, **self.mesh.coordinates, "step": step, "spans": noted})

    def _begin_step(self) -> None:
        self._ended, self._waited = time.perf_counter(), self.mesh.ledger.seconds
        self._axes = self._axes_now = self._over_axes()
        self._step_phases.clear()
        self.mesh.ledger.spans = None if self.trace is None else []

    def _add_process(self) -> None:
        """Add a line for the steps of this process since the last line."""
        durations, busy, phases = self._durations, self._busy, self._phases
        self._durations, self._busy, self._phases = [], [], {}
        axes, self._axes = self._axes, self._axes_now
        if not durations or not self._writes:
            return
        known = sum(phases.values())
        over = {}
        for name, (sent, seconds) in self._axes.items():
            before, spent = axes.get(name, (0, 0.0))
            over[name] = {"bytes": sent - before, "seconds": round(seconds - spent, 6)}
        self._process.add(
            {
                **self._place(),
                "seconds": [round(seconds, 6) for seconds in durations],
                "busy": [round(seconds, 6) for seconds in busy],
                "phases": {"computation": round(sum(busy) - known, 6)}
                | {name: round(seconds, 6) for name, seconds in phases.items()},
                "axes": {name: total for name, total in over.items() if total["bytes"] or total["seconds"]},
            }
        )

    @property
    def _writes(self) -> bool:
        """Whether this process has a file."""
        return self.mesh.rank % -(-self.mesh.size // _MOST_PROCESSES) == 0

    def _place(self) -> dict[str, Any]:
        mesh = self.mesh
        own = {"time": round(time.time(), 3), "rank": mesh.rank, "ranks": mesh.size, **mesh.coordinates}
        return own | {"step": self._first_step}

    def _over_axes(self) -> dict[str, tuple[int, float]]:
        """Bytes sent and seconds spent so far, by axis."""
        found: dict[str, tuple[int, float]] = {}
        for (axis, _, _), total in self.mesh.ledger.totals.items():
            sent, seconds = found.get(axis, (0, 0.0))
            found[axis] = sent + total.sent, seconds + total.seconds
        return found


def _number(name: str, value: Any) -> float:
    """A value of a series as a float; also for numbers of NumPy and CuPy, and NaN."""
    if not isinstance(value, bool | np.bool | str | bytes):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    raise TypeError(f"{name}={shown(value)} must be a number")
