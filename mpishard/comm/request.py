"""A collective or message under way: what `start_*` returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpishard.comm.ledger import Ledger

Array = Any
Fields = tuple[Any, ...]  # of a `Call`


class Request:
    """A collective under way.  Its buffers belong to it until `wait` returns.

    `wait` gives what the blocking form would have returned.
    """

    def __init__(
        self,
        ledger: Ledger,
        call: Fields,
        sent: int,
        requests: Sequence[MPI.Request],
        finish: Callable[[], Array],
        read: Sequence[Array] = (),
        statuses: Sequence[MPI.Status] | None = None,
    ) -> None:
        self._ledger = ledger
        self._call: Fields | None = call
        self._sent = sent
        self._requests = requests
        self._statuses: Sequence[MPI.Status | None] = statuses or [None] * len(requests)
        self._finish = finish
        # mpi4py 4.1 lets go of what Iallreduce, Ireduce_scatter and Iallgatherv read while they run.
        self._read = read
        self._result: Array = None
        self._started_s = ledger.spend(call, call[0])

    @property
    def call(self) -> Fields:
        """The fields of its `Call`, until it is over."""
        assert self._call is not None
        return self._call

    def test(self) -> bool:
        """Whether `wait` would return at once; MPI.Exception if somebody has died or revoked the axis (ULFM)."""
        # Not Get_status, which in Open MPI 5 sees neither where a message is concerned, ever.
        tested = zip(self._requests, self._statuses, strict=True)
        return all(not request or request.Test(status) for request, status in tested)

    def abandon(self) -> None:
        """Wait until MPI has let go of the buffers, whatever came of it."""
        for request in self._requests:
            try:
                request.Wait()
            except MPI.Exception:
                pass
        self._call = None

    def wait(self) -> Array:
        """Finish the collective and return its result; calling it again returns the same."""
        if self._call is not None:
            began = time.perf_counter()
            call, self._call = self._call, None
            self._ledger.active = (began, *call[1:])
            try:
                for request, status in zip(self._requests, self._statuses, strict=True):
                    if request:  # else `test` has seen its end
                        request.Wait(status)
                self._result = self._finish()
                self._read = ()
            finally:
                self._ledger.active = None
            self._ledger.enter(call, self._sent, self._started_s + self._ledger.spend(call, began))
        return self._result


class ChainedRequest:
    """One bucket on its way to the owners of its parts, or from them; `wait` does the rest of the work."""

    def __init__(self, pending: Request | ChainedRequest, finish: Callable[[], Array]) -> None:
        self._pending = pending
        self._finish = finish

    def test(self) -> bool:
        """Whether all has arrived."""
        return self._pending.test()

    def abandon(self) -> None:
        """As `Request.abandon`."""
        self._pending.abandon()

    def wait(self) -> Array:
        """Finish; returns the array that was to be filled.  Once only."""
        return self._finish()
