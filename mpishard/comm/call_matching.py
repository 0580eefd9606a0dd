"""Debug mode: ranks compare their calls before these start, and find out if they wait for each other."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from mpishard.comm.messages import messages

# Tags of messages: a rank has come to a call; a rank has waited in a call for a while.
_HERE, _LATE = 1, 2
# How often a rank that waits in a call looks whether the call can still begin.  The first time it sends its call to all
# ranks; later it compares the calls of all that wait.
_CHECK_EVERY_S = 0.25
# Within this time every rank that waits in a call has sent its call and has received those of the others.
_EXCHANGE_S = 2.0
# For the first `_SOON_S` of a wait a rank only yields, afterwards it sleeps `_NAP_S` at a time.
_SOON_S, _NAP_S = 0.002, 0.0005


class CollectiveMismatchError(RuntimeError):
    """Ranks are not in the same collective, or wait for each other in different calls."""


def is_truncation(error: Exception) -> bool:
    """Return True for the error of MPI where a message is longer than its buffer: ranks are in other collectives."""
    return isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE


class Late(NamedTuple):
    """The call in which a rank waits until `members` have come to call `number` of `channel`.

    `entered` counts the calls that the rank itself has come to, by channel.
    """

    channel: str
    number: int
    axis: str
    what: str
    site: str
    members: list[int]
    entered: dict[str, int]


class CallMatching:
    """Matches the calls of the ranks of a mesh, by messages, in debug mode.  Creation is collective, and so is `free`.

    A rank that comes to a call sends its description to the other members, and waits for theirs.  If that takes long,
    it sends its waiting call to all ranks of the mesh, so that each rank can see whether ranks wait for each other.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()
        self._names = 0
        self._entered: dict[str, int] = defaultdict(int)
        # The descriptions received, by channel and number of the call; and the last waiting call of each rank.
        self._said: dict[tuple[str, int], dict[int, tuple[str, str]]] = defaultdict(dict)
        self._late: dict[int, Late] = {}
        self._sends: list[tuple[MPI.Request, bytes]] = []  # with their buffers, until they are sent
        self._first_stuck = 0.0  # when this rank first found that it can never continue; 0 until then
        self._failed = ""  # the error of then, which all later calls raise

    def name(self, comm: MPI.Intracomm) -> str:
        """A unique name for a communicator.  Collective over it."""
        self._names += 1
        name: str = comm.bcast(f"{self._comm.rank}.{self._names}")
        return name

    def match(self, channel: str, axis: str, members: Sequence[int], what: str, site: str) -> list[tuple[str, str]]:
        """Wait until all members have come to this call; return the call and the call site of each.

        Raises CollectiveMismatchError if they never can, since some wait in other calls for ranks that in turn wait for
        them.
        """
        if self._failed:  # the ranks no longer number their calls equally
            raise CollectiveMismatchError(self._failed)
        number = self.enter(channel)
        said = self._said[channel, number]
        said[self._comm.rank] = what, site
        for rank in members:
            if rank != self._comm.rank:
                self._send(rank, _HERE, (channel, number, what, site))
        self.wait(lambda: len(said) == len(members), Late(channel, number, axis, what, site, list(members), {}))
        del self._said[channel, number]
        return [said[rank] for rank in members]

    def enter(self, channel: str) -> int:
        """Note that this rank comes to the next call of a channel; returns the number of the call."""
        self._entered[channel] += 1
        return self._entered[channel]

    def entered(self, channel: str) -> int:
        """The number of calls of a channel that this rank has come to."""
        return self._entered[channel]

    def wait(self, is_over: Callable[[], bool], late: Late) -> None:
        """Wait until a call is over, or can begin; `late` describes it.  Raises as `match` does."""
        began = time.monotonic()
        next_check = began + _CHECK_EVERY_S
        self._receive()
        while not is_over():
            now = time.monotonic()
            time.sleep(0 if now - began < _SOON_S else _NAP_S)
            self._receive()
            if now < next_check:
                continue
            next_check = now + _CHECK_EVERY_S
            own = self._late.get(self._comm.rank)
            if own is None or (own.channel, own.number) != (late.channel, late.number):
                self._send_to_all(late._replace(entered=dict(self._entered)))
            else:
                self._check()

    def free(self) -> None:
        if self._comm == MPI.COMM_NULL:
            return
        # Receive what nobody has waited for, or a message could stay unreceived.
        barrier = None
        while barrier is None or not barrier.Test():
            self._receive()
            if barrier is None and not self._unsent():
                barrier = self._comm.Ibarrier()
        self._receive()
        self._comm.Free()

    def revoke(self) -> None:
        """Make every operation on its communicator fail, on all ranks (ULFM)."""
        if self._comm != MPI.COMM_NULL and not self._comm.Is_revoked():
            self._comm.Revoke()

    def _check(self) -> None:
        stuck = waiting_in_circles(self._late)
        if self._comm.rank not in stuck:
            return
        now = time.monotonic()
        self._first_stuck = self._first_stuck or now
        if len(stuck) < self._comm.size and now < self._first_stuck + _EXCHANGE_S:
            return  # others may be about to report the same: all ranks are to name the same ranks
        lines = [
            f"  rank {rank}: {late.what} on axis {late.axis!r} called at {late.site}"
            for rank, late in ((rank, self._late[rank]) for rank in stuck)
        ]
        self._failed = (
            "ranks wait for each other in different calls, of which none can begin; all ranks of an axis must make its "
            "collectives, and in one order, and what is received must have been sent:\n" + "\n".join(lines)
        )
        ends = time.monotonic() + _EXCHANGE_S
        while self._unsent() and time.monotonic() < ends:
            self._receive()
        raise CollectiveMismatchError(self._failed)

    def _send_to_all(self, late: Late) -> None:
        self._late[self._comm.rank] = late
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._send(rank, _LATE, late)

    def _send(self, rank: int, tag: int, message: tuple[Any, ...]) -> None:
        data = json.dumps(message).encode()
        self._unsent()
        self._sends.append((self._comm.Isend([data, MPI.BYTE], rank, tag), data))

    def _unsent(self) -> bool:
        """Return True if some messages of this rank are not sent yet."""
        self._sends = [each for each in self._sends if not each[0].Test()]
        return bool(self._sends)

    def _receive(self) -> None:
        for rank, tag, text in messages(self._comm):
            message = json.loads(text)
            if tag == _LATE:
                self._late[rank] = Late(*message)
            else:
                channel, number, what, site = message
                self._said[channel, number][rank] = what, site


def waiting_in_circles(late: Mapping[int, Late]) -> list[int]:
    """The ranks that can never continue, since each waits for another of them to come to its call.

    The result is certain although the messages were sent at different times: a rank comes to its next call only after
    the call in which it waits has begun, and no call of a circle can be the first to begin.
    """
    stuck = set(late)

    def waits(rank: int) -> bool:
        channel, number = late[rank].channel, late[rank].number
        return any(other in stuck and late[other].entered.get(channel, 0) < number for other in late[rank].members)

    while free := {rank for rank in stuck if not waits(rank)}:
        stuck -= free
    return sorted(stuck)
