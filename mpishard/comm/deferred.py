"""The calls of a thread that wait for a device before MPI can begin them.

A started collective of device memory begins in MPI when its copy to the host, or the kernels before it, are over. Until
then it waits here: MPI's calls begin in the order of the program, on all ranks. No rank waits for ever: it enters a
blocking call only after all that it has started has begun, and begins the others while it waits for a request.

One queue serves all axes and meshes of a thread, since a rank that blocks in one keeps the others waiting, too. It
knows no calls made without mpishard: `Communicator.comm` begins what waits before it is handed out, and for other
communicators of the same ranks `flush` does that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from mpishard.comm.ledger import Ledger


class Deferrable(Protocol):
    """A call that begins later."""

    ledger: Ledger
    fields: tuple[Any, ...]

    def begin(self) -> bool:
        """Begin in MPI what can begin now; whether all has begun.  It raises nothing, but keeps errors for `wait`."""

    def advance(self) -> bool:
        """Let MPI move data and queue copies of what has arrived; whether all is over.  It raises nothing."""


class DeferredCalls(threading.local):
    """The queue, one for each thread. Nothing here is collective, or raises errors of a call that it begins."""

    def __init__(self) -> None:
        self.waiting: deque[Deferrable] = deque()  # what has not all begun in MPI, the oldest first
        # Kept here until they are over: nobody else may hold them, and their memory is in use.
        self._begun: list[Deferrable] = []

    def add(self, call: Deferrable) -> None:
        """Queue a call, and begin it if that is possible now."""
        self.waiting.append(call)
        self.progress()

    def progress(self) -> None:
        """Begin what can begin now, and let MPI move data."""
        while self.waiting and self.waiting[0].begin():
            self._begun.append(self.waiting.popleft())
        self._begun = [call for call in self._begun if not call.advance()]

    def forget(self, call: Deferrable) -> None:
        """Keep a call that is over no longer."""
        if call in self._begun:
            self._begun.remove(call)

    def flush(self) -> None:
        """Wait until all calls have begun.  Other ranks are not waited for."""
        self.progress()
        while self.waiting:
            self._wait_for_first()

    def until(self, is_over: Callable[[], bool]) -> None:
        """Continue to begin calls until all have begun, or something is over."""
        while self.waiting and not is_over():
            self.progress()
            time.sleep(0)

    def _wait_for_first(self) -> None:
        """Wait for the device until the oldest call has begun; the ledger shows that call meanwhile."""
        call = self.waiting[0]
        ledger, began = call.ledger, time.perf_counter()
        before, ledger.active = ledger.active, (began, *call.fields[1:])
        try:
            while self.waiting and self.waiting[0] is call:
                self.progress()
                time.sleep(0)
        finally:
            ledger.active = before
        ledger.spend(call.fields, began)


DEFERRED = DeferredCalls()


def flush() -> None:
    """Begin in MPI all calls that this thread has started, before a call that mpishard does not make.

    It waits for the device, and for no other rank.
    """
    DEFERRED.flush()
