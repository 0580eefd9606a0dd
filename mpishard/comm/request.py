"""A collective or message under way: what `start_*` returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpishard.comm.deferred import DEFERRED
from mpishard.comm.ledger import Ledger

Array = Any
Fields = tuple[Any, ...]  # of a `Call`


class Request:
    """A collective or message under way.  Its buffers belong to it until `wait` returns.  Not collective.

    `wait` returns what the blocking form returns.  The package makes all of them.

    Parameters
    ----------
    ledger : Ledger
        Where the call is noted when it is over.
    call : tuple
        The fields of its `Call`.
    sent : int
        Bytes that this rank sends.
    requests : sequence of mpi4py.MPI.Request
        What MPI has to finish; none for a call that is done.
    finish : callable
        Called without arguments after that, once; it returns the result.
    read : sequence of array
        Arrays that MPI reads, kept alive until then.
    statuses : sequence of mpi4py.MPI.Status, optional
        One for each of `requests`, filled when it ends.

    Attributes
    ----------
    channel : Channel or None
        Of a collective: it must live until this is over.
    release : callable or None
        Called when MPI no longer uses the communicator.
    """

    channel: object = None
    release: Callable[[], None] | None = None

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
        # Kept alive here: mpi4py 4.1 drops send buffers of Iallreduce, Ireduce_scatter and Iallgather while they run.
        self._read = read
        self._result: Array = None
        self._started_s = ledger.spend(call, call[0])

    @property
    def is_over(self) -> bool:
        """Whether it was waited for, or abandoned."""
        return self._call is None

    @property
    def call(self) -> Fields:
        """The fields of its `Call`, until it is over."""
        assert self._call is not None
        return self._call

    def test(self) -> bool:
        """Whether `wait` would return at once.

        Returns
        -------
        bool
            True once the data has arrived and the buffers are free.

        Raises
        ------
        MPI.Exception
            If somebody has died or revoked the axis (ULFM).
        """
        if DEFERRED.waiting:
            DEFERRED.progress()
        return self._is_complete()

    def _is_complete(self) -> bool:
        # Not Get_status: in Open MPI 5 it never reports the end or the failure of a message.
        tested = zip(self._requests, self._statuses, strict=True)
        return all(not request or request.Test(status) for request, status in tested)

    def abandon(self) -> None:
        """Wait until MPI no longer uses the buffers; errors are ignored."""
        for request in self._requests:
            try:
                request.Wait()
            except MPI.Exception:
                pass
        self._call = None
        self._let_go()

    def wait(self) -> Array:
        """Finish the call, which takes as long as other ranks take to come to it.

        Returns
        -------
        array
            What the blocking form returns; calling it again returns the same.
        """
        if self._call is not None:
            began = time.perf_counter()
            call, self._call = self._call, None
            self._ledger.active = (began, *call[1:])
            try:
                self._complete()
                self._let_go()
                self._result = self._finish()
                self._read = ()
            finally:
                self._ledger.active = None
            self._ledger.enter(call, self._sent, self._started_s + self._ledger.spend(call, began))
        return self._result

    def _let_go(self) -> None:
        """Note that MPI no longer uses the communicator; not after an error, when nobody knows that."""
        if self.release is not None:
            self.release()
            self.release = None

    def _complete(self) -> None:
        """Wait for MPI."""
        if DEFERRED.waiting:  # other ranks may wait for these before they come to this call
            DEFERRED.until(self.test)
        for request, status in zip(self._requests, self._statuses, strict=True):
            if request:  # else `test` has completed it
                request.Wait(status)


class ChainedRequest:
    """A request with work to do after it: `wait` finishes both.  For a bucket on its way to or from the owners.

    Not collective.

    Parameters
    ----------
    pending : Request or ChainedRequest
        What is under way.
    finish : callable
        Waits for it, does the rest, and returns the result.
    """

    def __init__(self, pending: Request | ChainedRequest, finish: Callable[[], Array]) -> None:
        self._pending = pending
        self._finish = finish

    def test(self) -> bool:
        """Whether all data has arrived.

        Returns
        -------
        bool
            Whether `wait` can do its work at once.
        """
        return self._pending.test()

    def abandon(self) -> None:
        """As `Request.abandon`."""
        self._pending.abandon()

    def wait(self) -> Array:
        """Finish and return the filled array.  Call it once only.

        Returns
        -------
        array
            What `finish` returns.
        """
        return self._finish()
