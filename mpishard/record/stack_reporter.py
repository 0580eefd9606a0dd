"""Reports on request where this process is: its stack, and the collective in which it waits."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from mpishard.comm.ledger import Call
from mpishard.comm.mesh import Mesh
from mpishard.io.atomic_json import read_note, write_note
from mpishard.io.files import create
from mpishard.launch.tracebacks import innermost, main_frame

REQUEST, WHERE, TRACE_REQUEST = "why", ".where.json", "trace-next"
_POLL_S = 1.0
# After a wait of this many seconds, and after each further one, this process asks all others where they are.
LONG_S = 15.0
_RECENT, _DEEP = 5, 20
# Removed from the front of file names, which leaves mpishard/nn/linear.py and numpy/....
_LIBRARIES = f"{Path(__file__).parents[2]}{os.sep}"


class StackReporter(threading.Thread):
    """A thread that writes ``processes/NAME.where.json`` on request, so that a blocked process answers too.

    A request is a new file ``why`` in the folder of the record, or SIGQUIT (the stack is then of that moment).  After a
    long wait in a call it requests an answer of all processes, so that the late rank is known even after the job has
    ended.  The thread also calls `flush` periodically, and `trace` with the first and last step from a new note
    ``trace-next`` in that folder.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        mesh: Mesh,
        flush: Callable[[], None],
        trace: Callable[[tuple[int, int]], None],
        every: float,
    ) -> None:
        super().__init__(name="mpishard-where", daemon=True)
        self._request = folder / REQUEST
        self._path = folder / "processes" / f"{name}{WHERE}"
        self._stack_path = folder / "processes" / f"{name}.stack"
        self._mesh = mesh
        self._flush, self._trace, self._every = flush, trace, every
        self._over = threading.Event()
        self._stack: IO[bytes] | None = None
        self._asked = self._time_asked()
        self._trace_request = folder / TRACE_REQUEST
        self._traced = _time_of(self._trace_request)
        self._dumped = 0

    def watch(self) -> None:
        with contextlib.suppress(OSError, AttributeError, ValueError):  # no disk, no SIGQUIT, not the main thread
            self._stack_path.unlink(missing_ok=True)
            self._stack = os.fdopen(create(self._stack_path), "wb")
            faulthandler.register(signal.SIGQUIT, self._stack, all_threads=False)
        self.start()

    def end(self) -> None:
        self._over.set()
        self.join()
        if self._stack is not None:
            faulthandler.unregister(signal.SIGQUIT)
            self._stack.close()
            if not self._dumped:
                self._stack_path.unlink(missing_ok=True)

    def run(self) -> None:
        looked = flushed = time.monotonic()
        while not self._over.wait(min(_POLL_S, self._every)):
            now = time.monotonic()
            if now - flushed >= self._every:
                flushed = now
                self._flush()
            if now - looked < _POLL_S:
                continue
            looked = now
            self._look_for_trace()
            call = self._mesh.ledger.waiting
            waited = 0.0 if call is None else time.perf_counter() - call.began
            asked = self._time_asked()
            if waited > LONG_S and time.time() - asked > LONG_S:
                with contextlib.suppress(OSError):
                    write_note(self._request, None)
                asked = self._time_asked()
            dumped = self._size_of_stack()
            if asked > self._asked or dumped > self._dumped:
                self._asked, self._dumped = asked, dumped
                with contextlib.suppress(OSError):
                    write_note(self._path, self.answer())

    def answer(self) -> dict[str, Any]:
        """The state of this process, as plain values."""
        ledger, mesh = self._mesh.ledger, self._mesh
        call = ledger.waiting_with_site
        with main_frame() as frame:
            stack = innermost(frame, _DEEP)
        return {
            "time": round(time.time(), 3),
            "rank": mesh.rank,
            "ranks": mesh.size,
            "host": os.uname().nodename,
            "process": os.getpid(),
            "step": ledger.step,
            "call": None
            if call is None
            else {**call_fields(call), "seconds": round(time.perf_counter() - call.began, 3)},
            "recent": [call_fields(entry.call) for entry in ledger.recent[-_RECENT:]],
            "stack": [f"{f.filename.removeprefix(_LIBRARIES)}:{f.lineno} ({f.name})" for f in stack],
        }

    def _look_for_trace(self) -> None:
        asked = _time_of(self._trace_request)
        if asked > self._traced:
            self._traced = asked
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                note = read_note(self._trace_request)
                self._trace((int(note["first"]), int(note["last"])))

    def _time_asked(self) -> float:
        return _time_of(self._request)

    def _size_of_stack(self) -> int:
        try:
            return self._stack_path.stat().st_size if self._stack is not None else 0
        except OSError:
            return 0


def _time_of(path: Path) -> float:
    """The time at which a file was written; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def call_fields(call: Call) -> dict[str, Any]:
    """The fields of a call, as plain values."""
    return {
        "axis": call.axis,
        "sequence": call.sequence,
        "op": call.op,
        "dtype": str(call.dtype),
        "elements": call.elements,
        "label": call.label,
        "site": call.site,
        "members": list(call.members),
    }
