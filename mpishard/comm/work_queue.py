"""Work that groups of ranks take as they get free: who is next, and the wait for the last one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.comm.axis import Axis

_ASK, _ANSWER = 1, 2  # tags
_POLL = 0.001  # seconds between two looks


def is_of_mpi(error: BaseException) -> bool:
    """Return True for an error of MPI itself, such as the death of a rank (ULFM): nothing can be sent after it."""
    return isinstance(error, MPI.Exception)


class WorkQueue:
    """Hands out the numbers of tasks in order, each to the group whose leader asks first.

    Creation and `gather` are collective over `axis`.  A thread of rank 0 answers, while that rank computes too.  Under
    an MPI that only one thread may call, group ``g`` of ``G`` has the tasks ``g, g + G, ...`` instead.

    Rank 0 calls `ended`, in either thread but never in both at once, for each task that has ended: when the leader that
    had it asks for the next one.  Under such an MPI it learns of the tasks of other groups in `gather`.
    """

    def __init__(
        self, axis: Axis, group: int, groups: int, count: int, ended: Callable[[], None] | None = None
    ) -> None:
        self._comm: MPI.Intracomm = axis.comm.Dup()  # messages of the caller cannot match
        self._next, self._count = 0, count
        self._own = range(group, count, groups)
        self._shared = groups > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._lock = threading.Lock()
        self._ended = ended if axis.rank == 0 else None
        self._working: set[int] = set()  # ranks of leaders that have a task
        self._left = count  # tasks of which this rank does not know that they have ended
        if self._shared and axis.rank == 0:
            name, others = "mpishard-work-queue", groups - 1
            threading.Thread(target=self._serve, args=(others,), name=name, daemon=True).start()

    def take(self) -> int:
        """The next task, or -1 if none is left.  Called by the leaders of groups, rank 0 of `axis` is one of them."""
        if not self._shared:
            number, self._own = (self._own[0] if self._own else -1), self._own[1:]
            self._note(self._comm.rank, number)
            return number
        if self._comm.rank == 0:
            return self._hand_out(0)
        answer = np.empty(1, np.int64)
        request = self._comm.Irecv(answer, 0, _ANSWER)
        self._comm.Send(np.empty(0, np.int8), 0, _ASK)
        while not request.Test():
            time.sleep(_POLL)
        return int(answer[0])

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank, once all have come, however long that takes; frees the queue."""
        # Groups end at times of their own: the time limit of a collective would end the job, and a blocked one spins.
        barrier = self._comm.Ibarrier()
        while not barrier.Test():
            time.sleep(_POLL)
        while self._left:
            self._note_ended()
        values = self._comm.allgather(value)
        self._comm.Free()
        return values

    def _hand_out(self, leader: int) -> int:
        with self._lock:
            number = self._next if self._next < self._count else -1
            self._next += 1
            self._note(leader, number)
        return number

    def _note(self, leader: int, number: int) -> None:
        """Note that a leader takes a task, or -1 for none: the one that it had has ended."""
        if leader in self._working:
            self._note_ended()
        if number >= 0:
            self._working.add(leader)
        else:
            self._working.discard(leader)

    def _note_ended(self) -> None:
        self._left -= 1
        if self._ended is not None:
            self._ended()

    def _serve(self, others: int) -> None:
        """Answer until every other leader knows that nothing is left."""
        status = MPI.Status()
        while others:
            if not self._comm.Iprobe(MPI.ANY_SOURCE, _ASK, status):
                time.sleep(_POLL)
                continue
            self._comm.Recv(np.empty(0, np.int8), status.source, _ASK)
            number = self._hand_out(status.source)
            self._comm.Send(np.array([number], np.int64), status.source, _ANSWER)
            others -= number < 0
