"""A collective or message whose device memory MPI reads and writes itself, and whose calls of MPI begin later.

MPI knows nothing of streams. So its calls begin when the device has done what was queued before the start, and the host
continues meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpishard.backend.kinds import backend_of
from mpishard.backend.streams import record_current
from mpishard.comm.channel import Fields, Request
from mpishard.comm.deferred import DEFERRED
from mpishard.comm.ledger import Ledger

Array = Any


class DeferredRequest(Request):
    """A `Request` whose calls of MPI begin when the current streams have come to its start.

    `start` makes MPI's calls, none of which may block, fills `statuses`, and returns what is under way; `devices` are
    the buffers in device memory.
    """

    def __init__(
        self,
        ledger: Ledger,
        call: Fields,
        sent: int,
        start: Callable[[], Sequence[MPI.Request]],
        finish: Callable[[], Array],
        read: Sequence[Array],
        devices: Sequence[Array],
        statuses: Sequence[MPI.Status] | None = None,
    ) -> None:
        super().__init__(ledger, call, sent, (), finish, read)
        self.ledger = ledger
        self.fields = call
        self._start = start
        self._filled = statuses
        # The readiness gate: the work queued on the streams so far.
        self._ready = [(backend_of(each), record_current(each)) for each in devices]
        self._has_begun = False
        self._error: Exception | None = None
        DEFERRED.add(self)

    def begin(self) -> bool:
        """Begin MPI's calls if the device has come to them, for the queue; return True if they have begun or failed."""
        if not self._has_begun:
            try:
                if not all(backend.is_over(event) for backend, event in self._ready):
                    return False
                self._requests = self._start()
                self._statuses = self._filled or [None] * len(self._requests)
            except Exception as error:
                self._error = error
            self._has_begun = True
        return True

    def advance(self) -> bool:
        """Let MPI move data, for the queue; return True if MPI is done, or has failed."""
        if self._has_begun and self._error is None:
            try:
                return self._is_complete()
            except Exception as error:
                self._error = error
        return self._error is not None

    def test(self) -> bool:
        DEFERRED.progress()
        is_over = self.advance()
        if isinstance(self._error, MPI.Exception):
            raise self._error
        return is_over

    def abandon(self) -> None:
        """Wait until MPI no longer uses the buffers; errors are ignored.

        MPI's calls that have not begun are begun first. On a communicator that was revoked they fail at once.
        """
        DEFERRED.flush()
        super().abandon()
        DEFERRED.forget(self)

    def _complete(self) -> None:
        DEFERRED.until(self.advance)
        while not self.begin():  # only if another thread has started it
            time.sleep(0)
        if self._error is not None:
            raise self._error
        super()._complete()
        DEFERRED.forget(self)
