"""A communicator whose ranks make their calls in one order, each noted in the ledger, and the requests of calls under
way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.comm.call_matching import CallMatching, CollectiveMismatchError, Late
from mpishard.comm.capabilities import probe
from mpishard.comm.deferred import DEFERRED
from mpishard.comm.family import Family
from mpishard.comm.ledger import Call, Ledger
from mpishard.layout.boxes import counts as run_lengths
from mpishard.layout.boxes import split

Array = Any


# A collective or message under way: what `start_*` returns.

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
        """True if it was waited for, or abandoned."""
        return self._call is None

    @property
    def call(self) -> Fields:
        """The fields of its `Call`, until it is over."""
        assert self._call is not None
        return self._call

    def test(self) -> bool:
        """Return True if `wait` would return at once.

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
            The result of the blocking form; calling it again returns the same.
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
    """A request with work to do after it: `wait` finishes both. For a bucket on its way to or from the owners.

    `finish` waits for `pending`, does the rest, and returns the result.
    """

    def __init__(self, pending: Request | ChainedRequest, finish: Callable[[], Array]) -> None:
        self._pending = pending
        self._finish = finish

    def test(self) -> bool:
        """Return True if all data has arrived, so that `wait` can do its work at once."""
        return self._pending.test()

    def abandon(self) -> None:
        self._pending.abandon()

    def wait(self) -> Array:
        """Finish and return the filled array, what `finish` returns. Call it once only."""
        return self._finish()


# A communicator whose ranks make their calls in one order, each of them noted in the ledger.

OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
NOTHING = np.empty(0, np.uint8)  # the buffer of a call without one
_MOST = 2**31 - 1


class Channel:
    """A communicator, the calls that this rank has made on it, and how they are noted.

    Creation is collective in debug mode only; `free` is collective. The channel owns the communicator, unless that is
    MPI.COMM_SELF: then creation makes no MPI call, and `free` and `revoke` do nothing. `members` has the ranks of the
    whole mesh by rank of `comm`; in debug mode `matching` compares the calls of the ranks; `started`: its calls are
    those that are started.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        name: str,
        ledger: Ledger,
        members: Sequence[int],
        matching: CallMatching | None = None,
        *,
        started: bool = False,
        family: Family | None = None,
    ) -> None:
        self.comm = comm
        self.name = name
        self.ledger = ledger
        self.members = members
        self.started = started
        self.calls = 0  # collectives that this rank has begun
        self.messages = 0  # messages that this rank has begun
        self.is_self = comm == MPI.COMM_SELF
        self.rank, self.size = (0, 1) if self.is_self else (comm.rank, comm.size)
        # The most elements that one MPI call takes here; None: no limit.
        self.largest_count: int | None = _MOST if self.is_self or not probe().large_counts else None
        # Debug mode compares the kind of memory, too: where that decides which way a call goes.
        self.compares_memory = False
        # No device memory is handed to MPI, although `probe` may have found here that it could.
        self.withholds_device_buffers = False
        # Collectives that were started; those that are over may be among them.
        self.under_way: WeakSet[Request] = WeakSet()
        self.matching = matching if self.size > 1 else None
        self._unique_name = "" if self.matching is None else self.matching.name(comm)
        self._family = None if self.is_self else family
        if self._family is not None:
            self._family.add(comm)

    def note_started(self, request: Request) -> None:
        """Note a collective that was started, and keep the communicator until its end."""
        self.under_way.add(request)
        request.channel = self
        if self._family is not None:
            request.release = self._family.hold()

    def finish(self) -> None:
        """Wait until MPI is done with the collectives that were started and not waited for; errors are ignored.

        Collective, if there are any. Open MPI 5 frees a communicator at once, and crashes when it continues with them.
        """
        for request in list(self.under_way):
            if not request.is_over:
                self.ledger.active = (time.perf_counter(), *request.call[1:])
                try:
                    request.abandon()
                finally:
                    self.ledger.active = None

    def free(self) -> None:
        """Free the communicator, if this rank has one: a spare of an elastic run has none.  Collective."""
        if not self.is_self and self.comm != MPI.COMM_NULL:
            DEFERRED.flush()
            if self._family is not None:
                self._family.remove(self.comm)
            self.comm.Free()

    def revoke(self) -> None:
        """Make every operation on the communicator fail, on all ranks (ULFM)."""
        if not self.is_self and self.comm != MPI.COMM_NULL and not self.comm.Is_revoked():
            self.comm.Revoke()

    def begin(
        self,
        op: str,
        buffer: Array,
        label: str,
        detail: str = "",
        counts: Sequence[int] | None = None,
        peer: int | None = None,
        *,
        deferred: bool = False,
        form: str = "",
    ) -> Fields:
        """Check what this rank can check alone, and describe the call; in debug mode compare it with the other ranks'.

        `detail` and `form`, the operation or root and how it is done where the kind of memory decides that, must be the
        same on all ranks; `peer` is the other end of a message, or one of MPI's special numbers below zero. Calls that
        are not `deferred` begin after all in the queue of `mpishard.comm.deferred`. Returns the fields of a `Call`.

        Raises TypeError or ValueError on this rank for no array, a strided one, or an operation that is not in `OPS`;
        in debug mode CollectiveMismatchError on all ranks.
        """
        if type(buffer) is not np.ndarray and not arrays.is_array(buffer):
            raise TypeError(f"{op} needs a NumPy or CuPy array, got {type(buffer).__name__}")
        if not buffer.flags.c_contiguous:
            raise ValueError(f"{op} needs a contiguous buffer, got a strided one of shape {buffer.shape}")
        if op in ("all_reduce", "reduce_scatter") and detail not in OPS:
            raise ValueError(f"{op} knows the operations {', '.join(OPS)}, got {detail!r}")
        if DEFERRED.waiting and (not deferred or self.matching is not None):
            DEFERRED.flush()
        if peer is None:
            self.calls += 1
        else:
            self.messages += 1
        members = self.members if peer is None or peer < 0 else (self.members[self.rank], self.members[peer])
        number = self.calls if peer is None else self.messages
        call = self.ledger.begin(self.name, number, op, buffer.dtype, buffer.size, label, members, self.started)
        if peer is None and self.matching is not None:
            if self.compares_memory and arrays.is_device(buffer):
                detail += " on the device"
            self._compare(self.matching, call, detail, counts, form)
        return call

    def fits(self, count: int) -> bool:
        """Return True if one MPI call takes `count` elements."""
        return self.largest_count is None or count <= self.largest_count

    def parts(self, staged: Array) -> list[Array]:
        """The flat array `staged`, cut into parts that this MPI takes in one call."""
        limit = self.largest_count
        if limit is None or staged.size <= limit:
            return [staged]
        return [staged[start : start + limit] for start in range(0, staged.size, limit)]

    def _compare(
        self, matching: CallMatching, fields: Fields, detail: str, counts: Sequence[int] | None, form: str
    ) -> None:
        """Compare the calls that the members are about to make; all raise where they differ.  Collective."""
        call = Call(*fields).placed(sys._getframe())
        # The sizes of the buffers of an all_to_all may differ between ranks.
        size = "" if call.op == "all_to_all" else f"{call.elements} x "
        usual = counts is None or list(counts) == run_lengths(split(call.elements, self.size))
        cut = "" if usual else f" cut as {list(counts or ())}"
        what = f"{call.op}({size}{call.dtype}{f', {detail}' if detail else ''}{cut}){f' {form}' if form else ''}"
        self.ledger.active = fields
        try:
            said = matching.meet(self._unique_name, call.axis, self.members, what, call.site)
        finally:
            self.ledger.active = None
        if any(what != said[0][0] for what, _ in said):
            lines = [f"  rank {rank}: {what} called at {site}" for rank, (what, site) in enumerate(said)]
            raise CollectiveMismatchError(
                f"call #{call.sequence} on axis {call.axis!r} differs between its ranks:\n" + "\n".join(lines)
            )

    def note_message(self, op: str, peer: int, tag: int) -> None:
        """Debug: note that this rank has come to its end of a message with rank `peer`."""
        if self.matching is not None and peer >= 0 <= tag:  # not MPI.PROC_NULL, ANY_SOURCE or ANY_TAG
            self.matching.enter(self._end(op, self.members[self.rank], self.members[peer], tag))

    def wait_for_message(self, fields: Fields, peer: int, tag: int, is_over: Callable[[], bool]) -> None:
        """Debug: wait until the last message that this rank noted is over; raise if it can never be."""
        if self.matching is None or not peer >= 0 <= tag:
            return
        rank, peer = self.members[self.rank], self.members[peer]
        call = Call(*fields).placed(sys._getframe())
        other = "recv" if call.op == "send" else "send"
        number = self.matching.entered(self._end(call.op, rank, peer, tag))
        what = f"{call.op}({call.elements} x {call.dtype}, {'to' if call.op == 'send' else 'from'} rank {peer})"
        late = Late(self._end(other, peer, rank, tag), number, call.axis, what, call.site, [peer], {})
        self.ledger.active = fields
        try:
            self.matching.wait(is_over, late)
        finally:
            self.ledger.active = None

    def _end(self, op: str, rank: int, peer: int, tag: int) -> str:
        """A name for one end of all messages with a tag between two ranks."""
        return f"{self._unique_name} {op} {rank} {peer} {tag}"
