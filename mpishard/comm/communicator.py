"""Collectives and messages on flat buffers, for NumPy and device arrays, over one group of ranks.

The first argument is always the whole buffer: `all_reduce` sums it, `reduce_scatter` leaves each rank a piece of it,
`all_gather` fills it from the pieces of all ranks.  Without a second buffer they work in place.  The adjoint of each is
here too: all_reduce is its own adjoint, reduce_scatter is that of all_gather and the other way round, all_to_all is its
own with the counts swapped, and the adjoint of broadcast is a reduce to the root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpishard.comm.call_matching import CallMatching
from mpishard.comm.channel import NOTHING, OPS, Channel, Family, Request
from mpishard.comm.collectives import Collectives, PointToPoint
from mpishard.comm.deferred import DEFERRED
from mpishard.comm.ledger import Ledger, all_reduce_elements, ring_elements

Array = Any
Counts = Sequence[int] | None


class Communicator:
    """A group of ranks, with MPI's collectives and messages on buffers.

    Buffers are C-contiguous arrays, NumPy or device, of any shape and of any dtype that MPI knows, or float16 and
    bfloat16 (reduced in float32).  They are seen as flat: `counts` are elements by rank, and without them a buffer is
    cut as `mpishard.layout.boxes.split` does.

    ================== ======================== =======================================
    blocking           started, a `Request`     MPI
    ================== ======================== =======================================
    `all_reduce`       `start_all_reduce`       ``Allreduce``, ``Iallreduce``
    `reduce_scatter`   `start_reduce_scatter`   ``Reduce_scatter``, ``Ireduce_scatter``
    `all_gather`       `start_all_gather`       ``Iallgather``, ``Iallgatherv``
    `all_to_all`       `start_all_to_all`       ``Ialltoallv``
    `broadcast`        `start_broadcast`        ``Ibcast``
    `barrier`                                   ``Ibarrier``
    `send`, `recv`     `start_send` ...         ``Isend``, ``Irecv``; not collective
    ================== ======================== =======================================

    All but messages are collective: all ranks must call them in one order.  The started collectives have a
    separate communicator, so that a blocking call may come before them on one rank and after them on another; but not
    `start_all_to_all` where MPI has no large counts (Open MPI 5): its ranks first agree, blocking, whether all buffers
    fit one call.  What a rank can check alone raises on it alone: TypeError if a buffer is no array or has the wrong
    dtype, ValueError if it is strided or its size does not fit.  In debug mode (`Mesh`) all ranks raise
    CollectiveMismatchError if their calls do not match.

    Device arrays travel in pieces through the host, unless MPI takes them itself.  Their results are in stream order,
    and a started call does not wait for the device.  `mpishard.comm.staged_collectives` says which ranks may then have
    a NumPy array, and `mpishard.comm.collectives` where MPI takes them.  The two buffers of a call may overlap: what
    MPI reads is then copied first.

    How a collective or a message is done is in `mpishard.comm.collectives`.

    Parameters
    ----------
    name, comm, ledger, members, later, matching, family : as for `Axis`
        What it is made of.

    Attributes
    ----------
    name : str
    comm : mpi4py.MPI.Intracomm
    rank, size : int
    members : list of int
        Ranks of the whole mesh that are in it.
    ledger : Ledger
    times_bound : int
        How often it has got communicators: more than once if its ranks have changed.
    """

    def __init__(
        self,
        name: str,
        comm: MPI.Intracomm,
        ledger: Ledger,
        *,
        members: Sequence[int] | None = None,
        later: MPI.Intracomm | None = None,
        matching: CallMatching | None = None,
        family: Family | None = None,
    ) -> None:
        self.name = name
        self.ledger = ledger
        self.times_bound = 0
        self._family = family
        self._bind(comm, members, later, matching)

    def _bind(
        self,
        comm: MPI.Intracomm,
        members: Sequence[int] | None,
        later: MPI.Intracomm | None,
        matching: CallMatching | None,
    ) -> None:
        """Use these communicators from now on; see `Axis.rebind`."""
        DEFERRED.flush()
        later = comm.Dup() if later is None else later  # first: if a rank dies in it, all stays as it was
        self._comm = comm
        self.times_bound += 1
        self._matching = matching
        self.members: list[int] = list(range(comm.size) if members is None else members)
        self._channel = Channel(comm, self.name, self.ledger, self.members, matching, family=self._family)
        self._channel_of_started = Channel(
            later, self.name, self.ledger, self.members, matching, started=True, family=self._family
        )
        self.rank: int = self._channel.rank
        self.size: int = self._channel.size
        self._blocking = Collectives(self._channel, started=False)
        self._started = Collectives(self._channel_of_started, started=True)
        self._point_to_point = PointToPoint(self._channel)

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator, for calls of MPI that mpishard has no method for.

        What was started and waits for a copy from a device begins first, since such a call may block.
        """
        if DEFERRED.waiting:
            DEFERRED.flush()
        return self._comm

    def all_reduce(self, buffer: Array, out: Array | None = None, op: str = "sum", *, label: str = "") -> Array:
        """Combine `buffer` over all ranks; every rank gets the result.  Collective.

        Parameters
        ----------
        buffer : array
            The same shape and dtype on all ranks.
        out : array, optional
            For the result, of the same shape and dtype too; default: in place.
        op : {"sum", "max", "min", "prod"}
        label : str
            The purpose, for the ledger.

        Returns
        -------
        array
            `out`, or else `buffer`.
        """
        if out is not None or not self._blocking.is_plain(buffer, op):
            return self._blocking.all_reduce(buffer, out, op, label).wait()
        sent = all_reduce_elements(buffer.size, self.size, self.rank)
        # Without a mesh there may be no MPI: nobody has to start it for what is left as it is.
        function = (lambda *_: None) if self._channel.is_self else self._comm.Allreduce
        self._call("all_reduce", buffer, sent, label, function, MPI.IN_PLACE, buffer, OPS[op])
        return buffer

    def reduce_scatter(
        self, buffer: Array, out: Array | None = None, counts: Counts = None, op: str = "sum", *, label: str = ""
    ) -> Array:
        """Combine `buffer` over all ranks; each rank keeps piece number `rank` of the result.  Collective.

        Parameters
        ----------
        buffer : array
            The same size and dtype on all ranks.
        out : array, optional
            For the piece: ``counts[rank]`` elements of the dtype of `buffer`.  Default: the front of `buffer`, whose
            rest is then undefined.
        counts : sequence of int, optional
            Elements of the piece of each rank.
        op : {"sum", "max", "min", "prod"}
        label : str
            The purpose, for the ledger.

        Returns
        -------
        array
            The piece: `out`, or else a flat view into `buffer`.
        """
        if out is not None or not self._blocking.is_plain_reduce_scatter(buffer, op, counts):
            return self._blocking.reduce_scatter(buffer, out, counts, op, label).wait()
        counts = self._blocking.counts(buffer, counts)
        sent = ring_elements("reduce_scatter", counts, self.rank)
        arguments = (MPI.IN_PLACE, buffer, counts, OPS[op])
        self._call("reduce_scatter", buffer, sent, label, self._comm.Reduce_scatter, *arguments)
        return buffer.reshape(-1)[: counts[self.rank]]

    def all_gather(self, buffer: Array, piece: Array | None = None, counts: Counts = None, *, label: str = "") -> Array:
        """Fill `buffer` with the pieces of all ranks, by rank.  Collective.

        Parameters
        ----------
        buffer : array
            The same size and dtype on all ranks.
        piece : array, optional
            This rank's: ``counts[rank]`` elements of the dtype of `buffer`.  Default: it is in `buffer` already.
        counts : sequence of int, optional
            Elements of the piece of each rank.
        label : str
            The purpose, for the ledger.

        Returns
        -------
        array
            `buffer`.
        """
        if piece is not None or not self._blocking.is_plain(buffer, counts=counts):
            return self._blocking.all_gather(buffer, piece, counts, label).wait()
        counts = self._blocking.counts(buffer, counts)
        sent = ring_elements("all_gather", counts, self.rank)
        self._call("all_gather", buffer, sent, label, self._gather_pieces, buffer, counts)
        return buffer

    def all_to_all(
        self,
        buffer: Array,
        out: Array,
        counts: Counts = None,
        out_counts: Counts = None,
        *,
        keep_own: bool = False,
        label: str = "",
    ) -> Array:
        """Send run ``s`` of `buffer` to rank ``s``, and receive its run into run ``s`` of `out`.  Collective.

        Parameters
        ----------
        buffer, out : array
            Of one dtype; their sizes may differ, also between ranks.
        counts, out_counts : sequence of int, optional
            Elements of each run of `buffer`, and of `out`.
        keep_own : bool
            Leave a rank's run for itself in `buffer`; `out_counts` has 0 for it.
        label : str
            The purpose, for the ledger.

        Returns
        -------
        array
            `out`.
        """
        return self._blocking.all_to_all(buffer, out, counts, out_counts, keep_own, label).wait()

    def broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> Array:
        """Copy `buffer` of one rank to all ranks.  Collective.

        Parameters
        ----------
        buffer : array
            The same size and dtype on all ranks; overwritten on all but `root`.
        root : int
            The rank that has the values; ValueError on every rank if there is no such rank.
        label : str
            The purpose, for the ledger.

        Returns
        -------
        array
            `buffer`.
        """
        return self._blocking.broadcast(buffer, root, label).wait()

    def barrier(self) -> None:
        """Wait until all ranks have called this.  Collective."""
        call = self._channel.begin("barrier", NOTHING, "")
        Request(self.ledger, call, 0, [self._comm.Ibarrier()], lambda: None).wait()

    # The fast path of blocking collectives: a large buffer has evicted the interpreter from the caches, so that every
    # function call costs microseconds.  A rank takes it if its own arguments are plain (`Collectives.is_plain`); the
    # other path makes the same MPI call.

    def _call(
        self, op: str, buffer: Array, sent: int, label: str, function: Callable[..., None], *arguments: Any
    ) -> None:
        """Make a call of MPI by which this rank sends `sent` elements, and note it."""
        channel, ledger = self._channel, self.ledger
        if DEFERRED.waiting:
            DEFERRED.flush()
        channel.calls += 1
        ledger.active = call = ledger.begin(
            self.name, channel.calls, op, buffer.dtype, buffer.size, label, self.members
        )
        try:
            function(*arguments)
        finally:
            ledger.active = None
        ledger.enter(call, sent * buffer.itemsize, ledger.spend(call, call[0]))

    def _gather_pieces(self, buffer: Array, counts: list[int]) -> None:
        self._blocking.gather(MPI.IN_PLACE, buffer, counts).Wait()

    # -- the same, started: the buffers belong to the `Request` until its `wait` returns ------------------------------

    def start_all_reduce(self, buffer: Array, out: Array | None = None, op: str = "sum", *, label: str = "") -> Request:
        """Start an `all_reduce`.  Collective.

        Parameters
        ----------
        buffer, out, op, label : as for `all_reduce`
            The buffers belong to the request until its `wait` returns.

        Returns
        -------
        Request
            Its `wait` returns what `all_reduce` returns.
        """
        return self._started.all_reduce(buffer, out, op, label)

    def start_reduce_scatter(
        self, buffer: Array, out: Array | None = None, counts: Counts = None, op: str = "sum", *, label: str = ""
    ) -> Request:
        """Start a `reduce_scatter`.  Collective.

        Parameters
        ----------
        buffer, out, counts, op, label : as for `reduce_scatter`
            The buffers belong to the request until its `wait` returns.

        Returns
        -------
        Request
            Its `wait` returns what `reduce_scatter` returns.
        """
        return self._started.reduce_scatter(buffer, out, counts, op, label)

    def start_all_gather(
        self, buffer: Array, piece: Array | None = None, counts: Counts = None, *, label: str = ""
    ) -> Request:
        """Start an `all_gather`.  Collective.

        Parameters
        ----------
        buffer, piece, counts, label : as for `all_gather`
            The buffers belong to the request until its `wait` returns.

        Returns
        -------
        Request
            Its `wait` returns what `all_gather` returns.
        """
        return self._started.all_gather(buffer, piece, counts, label)

    def start_all_to_all(
        self,
        buffer: Array,
        out: Array,
        counts: Counts = None,
        out_counts: Counts = None,
        *,
        keep_own: bool = False,
        label: str = "",
    ) -> Request:
        """Start an `all_to_all`.  Collective.

        Parameters
        ----------
        buffer, out, counts, out_counts, keep_own, label : as for `all_to_all`
            The buffers belong to the request until its `wait` returns.

        Returns
        -------
        Request
            Its `wait` returns what `all_to_all` returns.
        """
        return self._started.all_to_all(buffer, out, counts, out_counts, keep_own, label)

    def start_broadcast(self, buffer: Array, root: int = 0, *, label: str = "") -> Request:
        """Start a `broadcast`.  Collective.

        Parameters
        ----------
        buffer, root, label : as for `broadcast`
            The buffer belongs to the request until its `wait` returns.

        Returns
        -------
        Request
            Its `wait` returns what `broadcast` returns.
        """
        return self._started.broadcast(buffer, root, label)

    # -- messages: one rank sends, another receives -------------------------------------------------------------------

    def send(self, buffer: Array, to: int, tag: int = 0, *, label: str = "") -> None:
        """Send `buffer` to rank `to`; returns when it may be written again.  Not collective.

        Parameters
        ----------
        buffer : array
            What is sent.
        to : int
            The rank that calls `recv`.
        tag : int
            The same in both calls.
        label : str
            The purpose, for the ledger.
        """
        self._point_to_point.wait(self._point_to_point.send(buffer, to, tag, label), to, tag)

    def recv(self, buffer: Array, source: int, tag: int = 0, *, label: str = "") -> Array:
        """Receive into `buffer` from rank `source`.  Not collective.

        Parameters
        ----------
        buffer : array
            As long as what was sent; ValueError on this rank if fewer elements were sent.
        source : int
            The rank that calls `send`.
        tag : int
            The same in both calls.
        label : str
            The purpose, for the ledger.

        Returns
        -------
        array
            `buffer`.
        """
        return self._point_to_point.wait(self._point_to_point.recv(buffer, source, tag, label), source, tag)

    def start_send(self, buffer: Array, to: int, tag: int = 0, *, label: str = "") -> Request:
        """Start a `send`.  Not collective.

        Parameters
        ----------
        buffer, to, tag, label : as for `send`
            The buffer belongs to the request until its `wait` returns.

        Returns
        -------
        Request
            Its `wait` returns when the buffer may be written again.
        """
        return self._point_to_point.send(buffer, to, tag, label)

    def start_recv(self, buffer: Array, source: int, tag: int = 0, *, label: str = "") -> Request:
        """Start a `recv`.  Not collective.

        Parameters
        ----------
        buffer, source, tag, label : as for `recv`
            The buffer belongs to the request until its `wait` returns.

        Returns
        -------
        Request
            Its `wait` returns what `recv` returns.
        """
        return self._point_to_point.recv(buffer, source, tag, label)
