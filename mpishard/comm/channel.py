"""A communicator whose ranks make their calls in one order, noted in the ledger, and the requests of pending calls.

The communicators of a mesh that was dropped without `free` are freed by all of their ranks together (`Family`).
"""

from __future__ import annotations

import contextlib
import gc
import secrets
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.comm.call_matching import CallMatching, CollectiveMismatchError, Late
from mpishard.comm.capabilities import heals_in_place, probe
from mpishard.comm.deferred import DEFERRED
from mpishard.comm.ledger import Call, Ledger
from mpishard.layout.boxes import run_lengths, split

Array = Any


# The communicators of a mesh that was dropped without `free`, and how its ranks free them together.
#
# A communicator is freed by all of its ranks, but Python collects a mesh at another time on each of them. So each rank
# notes which meshes it has collected. When the next mesh is made, its ranks exchange that, and free those that all of
# their ranks have collected, in one order.

# After this many more communicators garbage is collected before a mesh is made.  MPICH has 2,048, and a mesh takes 11.
_MANY = 500
# What MPICH says when there are no more, and when those that each rank has left are others than those of the others.
_EXHAUSTED = ("Too many communicators", "Cannot allocate context ID because of fragmentation")


class CommunicatorsExhaustedError(RuntimeError):
    """MPI has no communicator left."""


class Family:
    """The communicators of one mesh and what it keeps running, until they are freed. Creation is not collective.

    It is an orphan once Python has collected the object of each communicator: whoever holds an axis, a collective that
    is under way, or a communicator itself keeps all of them. A collective that nobody has waited for keeps them, and
    its buffers, for ever, since MPI may still use them. Communicators of a mesh that changes its ranks leave the
    family: nobody knows which ranks are left to free them. Where ranks survive the death of others (ULFM) a family
    takes nothing in: a rank that hears that all have dropped a mesh could wait for one that has heard of a death
    instead.

    `own_name` is unique, and that of rank 0 becomes the `name` of the family, the same on all ranks; while it is empty
    the family is never freed here.
    """

    _open: ClassVar[set[Family]] = set()
    _orphans: ClassVar[dict[str, Family]] = {}
    _next_collection: ClassVar[int] = _MANY

    def __init__(self, size: int) -> None:
        self.own_name, self.name = secrets.token_hex(8), ""
        self.ends: list[Callable[[], None]] = []  # what else to end collectively, before the communicators are freed
        self._size = size
        self._dependents = 0
        # By handle: another object for the communicator, and what is called when its first one is collected.
        self._members: dict[int, tuple[MPI.Comm, weakref.finalize]] = {}
        self._alive: set[int] = set()
        self._started: set[Request] = set()
        if not heals_in_place():
            self._open.add(self)

    def add(self, comm: MPI.Intracomm) -> None:
        """Take in a communicator, once."""
        if self not in self._open or comm == MPI.COMM_NULL or comm.handle in self._members:
            return
        finalize = weakref.finalize(comm, self._note_collected, comm.handle)
        finalize.atexit = False
        self._members[comm.handle] = MPI.Intracomm(comm), finalize
        self._alive.add(comm.handle)

    def dependent(self, comm: MPI.Intracomm) -> Family:
        """The family of what is made on the mesh and may be dropped before it. Orphans are freed first.

        Collective over `comm`, the world of the mesh.
        """
        if not heals_in_place():
            self.free_orphans(comm.allgather(self.orphans()))
        family = Family(self._size)
        self._dependents += 1
        family.name = f"{self.name}/{self._dependents}"
        if self not in self._open:
            family.close()
        return family

    def hold(self, request: Request) -> Callable[[], None]:
        """Keep a started collective, with its communicators and buffers, until what is returned is called."""
        if self in self._open:
            self._started.add(request)
        return partial(self._started.discard, request)

    def remove(self, comm: MPI.Comm) -> None:
        """Let a communicator go, since its owner is about to free it."""
        if comm.handle in self._members:
            self._members.pop(comm.handle)[1].detach()
            self._alive.discard(comm.handle)

    def close(self) -> None:
        """Let all communicators go, and take in no other."""
        for _, finalize in self._members.values():
            finalize.detach()
        self._members, self._started, self.ends = {}, set(), []
        self._open.discard(self)
        self._orphans.pop(self.name, None)

    def free(self) -> None:
        """End and free everything.  Collective over the mesh."""
        for end in self.ends:
            end()
        members = [comm for comm, _ in self._members.values()]
        self.close()
        for comm in reversed(members):
            comm.Free()

    def _note_collected(self, handle: int) -> None:
        """A communicator's object is no more.  Any thread may collect it, so this makes no call of MPI."""
        self._alive.discard(handle)
        if not self._alive and self.name and self in self._open:
            self._open.discard(self)
            self._orphans[self.name] = self

    @classmethod
    def orphans(cls) -> list[tuple[str, int]]:
        """Name and size of each orphan of this rank, for `free_orphans`."""
        # Not of `items`: it makes tuples, and garbage that Python collects then may add to them.
        return [(name, cls._orphans[name]._size) for name in list(cls._orphans)]

    @classmethod
    def free_orphans(cls, by_rank: Sequence[Sequence[tuple[str, int]]]) -> bool:
        """Free those that are orphans on all of their ranks; return True on every rank if there were any.

        Collective over the ranks whose `orphans` are given.
        """
        counts = Counter(each for orphans in by_rank for each in orphans)
        shared = sorted(name for (name, size), count in counts.items() if count == size)
        for name in shared:
            family = cls._orphans.pop(name, None)
            if family is not None:
                family.free()
        return bool(shared)

    @classmethod
    def collect_garbage(cls) -> None:
        """Let Python collect what nobody holds, if many more communicators are open."""
        if cls._count() >= cls._next_collection:
            gc.collect()
            cls._next_collection = cls._count() + _MANY

    @classmethod
    def _count(cls) -> int:
        """The number of communicators held on this rank."""
        return sum(len(family._alive) for family in list(cls._open))

    @classmethod
    @contextlib.contextmanager
    def creating(cls) -> Iterator[None]:
        """Make communicators in this context; if MPI has none left, the error says what to free.

        That is CommunicatorsExhaustedError, on all ranks that make them.
        """
        meshes = sum(bool(family.name) and "/" not in family.name for family in list(cls._open))
        try:
            yield
        except MPI.Exception as error:
            if not any(text in str(error) for text in _EXHAUSTED):
                raise
            raise CommunicatorsExhaustedError(
                f"MPI has no communicator left: {meshes} meshes are open on this rank, with {cls._count()} "
                "communicators; free those that are done, on all ranks: `with mpishard.Mesh() as mesh`, or mesh.free()"
            ) from error


# -- calls and requests ------------------------------------------------------------------------------------------------

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
        Of a collective that was started: each keeps the other until this is over.
    release : callable or None
        Called when MPI no longer uses the communicator.
    """

    channel: Channel | None = None
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
            with contextlib.suppress(MPI.Exception):
                request.Wait()
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
        """Note that MPI no longer uses the communicator and the buffers; not after an error: nobody knows that."""
        if self.channel is not None:
            self.channel.under_way.discard(self)
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
        self.is_freed = False
        self.is_self = comm == MPI.COMM_SELF
        self.rank, self.size = (0, 1) if self.is_self else (comm.rank, comm.size)
        # The most elements that one MPI call takes here; None: no limit.
        self.largest_count: int | None = _MOST if self.is_self or not probe().large_counts else None
        # No device memory is handed to MPI, although `probe` may have found here that it could.
        self.withholds_device_buffers = False
        # Collectives that were started. Nobody else may hold them, and MPI writes into their buffers.
        self.under_way: set[Request] = set()
        self.matching = matching if self.size > 1 else None
        self._unique_name = "" if self.matching is None else self.matching.name(comm)
        self._family = None if self.is_self else family
        if self._family is not None:
            self._family.add(comm)

    def note_started(self, request: Request) -> None:
        """Note a collective that was started, and keep it, its buffers and the communicator until its end."""
        self.under_way.add(request)
        request.channel = self
        if self._family is not None:
            request.release = self._family.hold(request)

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
        """Free the communicator, if this rank is in it.  Collective."""
        self.is_freed = True
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

        Raises TypeError or ValueError on this rank for no array of numbers, a strided one, an operation that is not in
        `OPS` or not for such numbers, and a rank that is not there; RuntimeError if the communicator was freed.  Raises
        CollectiveMismatchError on all ranks in debug mode.
        """
        if type(buffer) is not np.ndarray and not arrays.is_array(buffer):
            remedy = "; pass its numpy()" if hasattr(buffer, "numpy") else ""  # as a tensor of PyTorch
            raise TypeError(f"{op} needs a NumPy or CuPy array, got {type(buffer).__name__}{remedy}")
        if not buffer.flags.c_contiguous:
            raise ValueError(f"{op} needs a contiguous buffer, got a strided one of shape {buffer.shape}")
        kind = buffer.dtype.kind
        if kind not in "biufc" and buffer.dtype.name != "bfloat16":
            raise TypeError(f"{op} needs an array of numbers, got one of {buffer.dtype}")
        if op in ("all_reduce", "reduce_scatter"):
            if detail not in OPS:
                raise ValueError(f"{op} knows the operations {', '.join(OPS)}, got {detail!r}")
            if kind == "b" or (kind == "c" and detail in ("max", "min")):
                remedy = "; pass buffer.view(numpy.uint8): its max is any, its min is all" if kind == "b" else ""
                raise TypeError(f"{op} has no operation {detail!r} for {buffer.dtype}{remedy}")
        if self.is_freed:
            raise RuntimeError(f"{op} on axis {self.name!r}, which was freed with its mesh; make a new Mesh")
        if peer is not None and peer >= self.size:
            raise ValueError(f"{op} names rank {peer} of axis {self.name!r}, which has {self.size} ranks")
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
            self._compare(self.matching, call, detail, counts, form)
        return call

    def fits(self, count: int) -> bool:
        """Return True if one MPI call takes `count` elements."""
        return self.largest_count is None or count <= self.largest_count

    def parts(self, flat: Array) -> list[Array]:
        """A flat array, cut into parts that this MPI takes in one call."""
        limit = self.largest_count
        if limit is None or flat.size <= limit:
            return [flat]
        return [flat[start : start + limit] for start in range(0, flat.size, limit)]

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
            said = matching.match(self._unique_name, call.axis, self.members, what, call.site)
        finally:
            self.ledger.active = None
        if any(what != said[0][0] for what, _ in said):
            lines = [f"  rank {rank}: {what} called at {site}" for rank, (what, site) in enumerate(said)]
            raise CollectiveMismatchError(
                f"call #{call.sequence} on axis {call.axis!r} differs between its ranks:\n" + "\n".join(lines)
            )

    def note_message(self, op: str, peer: int, tag: int) -> None:
        """Debug: note that this rank has come to its end of a message with rank `peer`."""
        if self.matching is not None and _is_named(peer, tag):
            self.matching.enter(self._end(op, self.members[self.rank], self.members[peer], tag))

    def wait_for_message(self, fields: Fields, peer: int, tag: int, is_over: Callable[[], bool]) -> None:
        """Debug: wait until the last message that this rank noted is over; raise if it can never be."""
        if self.matching is None or not _is_named(peer, tag):
            return
        rank, peer = self.members[self.rank], self.members[peer]
        call = Call(*fields).placed(sys._getframe())
        other = "recv" if call.op == "send" else "send"
        number = self.matching.entered(self._end(call.op, rank, peer, tag))
        way = "to" if call.op == "send" else "from"
        what = f"{call.op}({call.elements} x {call.dtype}, {way} rank {peer}, tag {tag})"
        late = Late(self._end(other, peer, rank, tag), number, call.axis, what, call.site, [peer], {})
        self.ledger.active = fields
        try:
            self.matching.wait(is_over, late)
        finally:
            self.ledger.active = None

    def _end(self, op: str, rank: int, peer: int, tag: int) -> str:
        """A name for one end of all messages with a tag between two ranks."""
        return f"{self._unique_name} {op} {rank} {peer} {tag}"


def _is_named(peer: int, tag: int) -> bool:
    """Return True for a message with one rank and one tag: not with MPI.PROC_NULL, ANY_SOURCE or ANY_TAG."""
    return peer >= 0 and tag >= 0
