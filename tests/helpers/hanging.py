"""Wrong programs of mpi4py that know nothing of mpishard: ``mpiexec -n 4 python hanging.py NAME``.

After the classes of the MPI Bugs Initiative (Laurent, Saillard and Quinson, 2021), and the hangs of public issues; each
with what `mpishard why` shall say of it.  `tests/helpers/why_score.py` scores all of them.
"""

from __future__ import annotations

import array as numbers
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LARGE = 300_000  # elements that no MPI sends before the receiver has come
EVERYBODY = (0, 1, 2, 3)


@dataclass(frozen=True)
class Wrong:
    """A program, its class, and the kinds of findings that are right for it, with the ranks to blame (any: None)."""

    run: Callable[[Any, int], object]
    group: str
    kinds: tuple[str, ...]
    ranks: tuple[int, ...] | None


PROGRAMS: dict[str, Wrong] = {}


def wrong(group: str, *kinds: str, ranks: tuple[int, ...] | None) -> Callable[[Any], Any]:
    def add(function: Callable[[Any, int], object]) -> Callable[[Any, int], object]:
        PROGRAMS[function.__name__] = Wrong(function, group, kinds, ranks)
        return function

    return add


def array(count: int = 4) -> Any:
    return numbers.array("d", bytes(8 * count))


# -- mismatched collectives --------------------------------------------------------------------------------------------


@wrong("other collective", "mismatch", ranks=(1,))
def bcast_for_allreduce(comm, rank):
    if rank == 1:
        comm.Bcast(array(), root=1)
        comm.Bcast(array(), root=0)
    else:
        comm.Allreduce(array(), array())


@wrong("other collective", "mismatch", ranks=(2,))
def other_order(comm, rank):
    if rank == 2:
        comm.Barrier()
        comm.Allreduce(array(), array())
    else:
        comm.Allreduce(array(), array())
        comm.Barrier()


@wrong("other collective", "mismatch", ranks=(3,))
def object_for_buffer(comm, rank):
    if rank == 3:
        comm.allreduce(rank)
    else:
        comm.Barrier()


@wrong("other collective", "mismatch", ranks=(0,))
def only_root_saves(comm, rank):
    """A helper three frames down has a collective, and one rank comes to another one first."""

    def norm():
        return comm.allreduce(1.0)

    def save():
        return norm()

    comm.allreduce(0)
    if rank == 0:
        save()
    comm.Barrier()


# -- missing calls -----------------------------------------------------------------------------------------------------


@wrong("missing call", "ended", ranks=(3,))
def no_barrier(comm, rank):
    if rank != 3:
        comm.Barrier()


@wrong("missing call", "ended", ranks=(1, 2, 3))
def barrier_of_root(comm, rank):
    if rank == 0:
        comm.Barrier()


@wrong("missing call", "ended", ranks=(0, 1, 3))
def one_step_more(comm, rank):
    for _ in range(4 if rank == 2 else 3):
        comm.Allreduce(array(), array())


@wrong("missing call", "ended", ranks=(2,))
def no_object(comm, rank):
    """The first collective of objects duplicates the communicator, and keeps Python's lock meanwhile."""
    if rank != 2:
        comm.allreduce(rank)


@wrong("missing call", "ended", ranks=(0,))
def exits_early(comm, rank):
    if rank == 0:
        sys.exit(3)
    comm.Gather(array(), array(16) if rank == 1 else None, root=1)


@wrong("missing call", "ended", ranks=(1,))
def error_is_swallowed(comm, rank):
    try:
        if rank == 1:
            raise ValueError("a bad packing")
        comm.Barrier()
    except ValueError:
        pass


@wrong("missing call", "ended", ranks=(2,))
def no_split(comm, rank):
    if rank != 2:
        comm.Split(rank % 2)


@wrong("missing call", "ended", ranks=(1,))
def no_fence(comm, rank):
    from mpi4py import MPI

    window = MPI.Win.Create(array(), comm=comm)
    window.Fence()
    if rank != 1:
        window.Fence()


@wrong("missing call", "ended", ranks=(0,))
def no_open(comm, rank):
    from mpi4py import MPI

    if rank:
        MPI.File.Open(comm, f"/tmp/mpishard-hanging-{os.getuid()}", MPI.MODE_CREATE | MPI.MODE_WRONLY)


# -- wrong arguments ---------------------------------------------------------------------------------------------------


@wrong("wrong root", "root", "mismatch", ranks=(1,))
def root_of_bcast(comm, rank):
    comm.Bcast(array(LARGE), root=1 if rank == 1 else 0)
    comm.Barrier()


@wrong("wrong root", "root", "mismatch", ranks=None)
def every_rank_is_root(comm, rank):
    comm.Bcast(array(LARGE), root=rank)


@wrong("wrong root", "root", "mismatch", ranks=(2,))
def root_of_gather(comm, rank):
    comm.gather(array(LARGE), root=2 if rank == 2 else 0)
    comm.barrier()


@wrong("wrong communicator", "communicator", ranks=None)
def duplicate(comm, rank):
    other = comm.Dup()
    (other if rank == 3 else comm).Barrier()


@wrong("wrong communicator", "communicator", ranks=None)
def world_for_row(comm, rank):
    row = comm.Split(rank // 2)
    if rank == 0:
        comm.Allreduce(array(), array())
    else:
        row.Allreduce(array(), array())


@wrong("wrong communicator", "communicator", ranks=(0, 1))
def message_on_duplicate(comm, rank):
    other = comm.Dup()
    if rank == 0:
        comm.Ssend(array(), dest=1)
    elif rank == 1:
        other.Recv(array(), source=0)


@wrong("wrong argument", "failed", ranks=(1,))
def root_that_is_none(comm, rank):
    comm.Bcast(array(), root=7 if rank == 1 else 0)


# -- deadlocks of messages ---------------------------------------------------------------------------------------------


@wrong("deadlock of messages", "cycle", ranks=EVERYBODY)
def all_receive_first(comm, rank):
    comm.recv(source=(rank - 1) % comm.size)
    comm.send(rank, dest=(rank + 1) % comm.size)


@wrong("deadlock of messages", "cycle", ranks=(0, 1))
def both_send_first(comm, rank):
    if rank < 2:
        comm.Send(array(LARGE), dest=1 - rank)
        comm.Recv(array(LARGE), source=1 - rank)


@wrong("deadlock of messages", "send", ranks=(1,))
def send_without_receive(comm, rank):
    """Not of COMM_WORLD: MPICH's MPI_Finalize answers what has come on that, and fails, so that the send returns."""
    other = comm.Dup()
    if rank == 0:
        other.Ssend(array(), dest=1)


@wrong("deadlock of messages", "receive", ranks=(0,))
def no_stop_for_one(comm, rank):
    """The master sends its workers a last message, and forgets the last worker."""
    if rank == 0:
        for worker in range(1, comm.size - 1):
            comm.send("stop", dest=worker)
    else:
        while comm.recv(source=0) != "stop":
            pass


@wrong("deadlock of messages", "receive", ranks=None)
def one_result_more(comm, rank):
    from mpi4py import MPI

    if rank:
        comm.send(rank, dest=0, tag=5)
    else:
        for _ in range(comm.size):
            comm.recv(source=MPI.ANY_SOURCE, tag=5)


@wrong("deadlock of messages", "tag", ranks=(0, 1))
def other_tags(comm, rank):
    if rank == 0:
        comm.Ssend(array(), dest=1, tag=1)
    elif rank == 1:
        comm.Recv(array(), source=0, tag=2)


@wrong("deadlock of messages", "tag", ranks=EVERYBODY)
def results_of_other_tag(comm, rank):
    """The workers' messages are so small that they have sent them, and wait for answers."""
    from mpi4py import MPI

    if rank:
        comm.send(rank, dest=0, tag=3)
        comm.recv(source=0)
    else:
        comm.recv(source=MPI.ANY_SOURCE, tag=5)


@wrong("deadlock of messages", "receive", "cycle", ranks=(1,))
def receive_in_collective(comm, rank):
    if rank == 1:
        comm.Recv(array(), source=0)
    comm.Barrier()


@wrong("deadlock of messages", "receive", "cycle", ranks=None)
def no_ring(comm, rank):
    """Each rank receives from the rank to which it sends."""
    other = (rank + 1) % comm.size
    comm.Sendrecv(array(LARGE), dest=other, recvbuf=array(LARGE), source=other)


@wrong("deadlock of messages", "cycle", "receive", ranks=(2,))
def from_itself(comm, rank):
    if rank == 2:
        comm.Recv(array(), source=rank)
    comm.Barrier()


@wrong("requests", "request", ranks=(1,))
def request_without_send(comm, rank):
    if rank == 1:
        comm.Irecv(array(), source=0).Wait()


@wrong("requests", "request", ranks=(0,))
def request_of_other_tag(comm, rank):
    if rank == 0:
        request = comm.Isend(array(LARGE), dest=1, tag=3)
        request.Wait()
    elif rank == 1:
        comm.Irecv(array(LARGE), source=0, tag=4)


# -- ranks that do not come --------------------------------------------------------------------------------------------


@wrong("a rank computes", "computes", ranks=(2,))
def endless_loop(comm, rank):
    while rank == 2:
        sum(range(1000))
    comm.Barrier()


@wrong("a rank computes", "computes", ranks=(0,))
def long_call(comm, rank):
    if rank == 0:
        time.sleep(600)
    comm.bcast("text", root=0)


@wrong("a rank is gone", "absent", ranks=(1,))
def stopped(comm, rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    comm.Barrier()


@wrong("a rank is gone", "failed", ranks=(3,))
def raises(comm, rank):
    if rank == 3:
        raise ValueError("a bad packing")
    comm.Barrier()


@wrong("file system", "file", ranks=(1,))
def pipe_without_writer(comm, rank):
    path = f"/tmp/mpishard-hanging-pipe-{os.getpid()}"
    if rank == 1:
        os.mkfifo(path)
        with open(path) as file:
            file.read()
    comm.Barrier()


# -- no hang: what nobody who looks at stacks can see ------------------------------------------------------------------

UNSEEN = "no hang"


@wrong(UNSEEN, "leak", ranks=None)
def communicators_are_not_freed(comm, rank):
    for _ in range(50):
        comm.Dup().Barrier()


@wrong(UNSEEN, "leak", ranks=None)
def request_is_not_completed(comm, rank):
    comm.Irecv(array(), source=rank)
    comm.Barrier()


@wrong(UNSEEN, "type", ranks=None)
def other_types(comm, rank):
    from mpi4py import MPI

    comm.Bcast([array(), 4, MPI.DOUBLE] if rank else [array(), 32, MPI.BYTE])


@wrong(UNSEEN, "race", ranks=None)
def any_source(comm, rank):
    """What rank 0 computes depends on whose message comes first."""
    if rank:
        comm.send(rank, dest=0)
    else:
        print(10 * comm.recv() - comm.recv() * comm.recv())


if __name__ == "__main__":
    from mpi4py import MPI

    PROGRAMS[sys.argv[1]].run(MPI.COMM_WORLD, MPI.COMM_WORLD.rank)
