"""The processes of an elastic run: the workers, who train, and the spares, who wait without burning a core.

One communicator holds them all, workers first.  It changes only when a process dies (ULFM: revoke and shrink); the
mesh is split from its workers again and again.  Bland et al., "Post-failure recovery of MPI communication capability"
(2013), for the calls.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import ClassVar, NamedTuple

import numpy as np
from mpi4py import MPI

from mpishard.collectives import Axis
from mpishard.elastic.watch import Fellow, this_process
from mpishard.ledger import Ledger
from mpishard.mesh import NEWCOMER

_ORDER = 1
# How long a spare sleeps between two looks.
_NAP_S = 0.002
_FINALIZE_S = 3.0


def heals_in_place() -> bool:
    """Whether this MPI tells survivors of a death and lets them go on: Open MPI under ``mpirun --with-ft ulfm``."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"


def is_newcomer() -> bool:
    """Whether this process was spawned by a run that wanted more workers."""
    return NEWCOMER in sys._xoptions


def agree(comm: MPI.Intracomm, sound: bool) -> None:
    """Return on all ranks if all are sound, and raise MPI.Exception on all otherwise, or if one has died.

    Collective, over a revoked communicator too.  A rank that waits here is woken by nothing but the others coming here,
    so that who fails on the way to an agreement must still take part in it.
    """
    if heals_in_place() and not comm.Agree(int(sound)):
        raise MPI.Exception(MPI.ERR_PROC_FAILED)


class Order(NamedTuple):
    """How many workers there will be, and how many processes are to be spawned for it."""

    workers: int
    recruits: int = 0


class Crew:
    """All processes of a run.  Creation is collective over them; a newcomer meets those who wait in `recruit`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All of them, of which it is a duplicate; a newcomer has nobody with it yet.
    workers : int
        How many of them train, the first ones.

    Attributes
    ----------
    axis : Axis
        All of them; collectives over it need the spares too.
    identity : int
        Of this process, the same for the whole run; its rank changes when others die.
    identities : list of int
        Of all, by rank.
    left : list of bool
        By rank: who has been asked to leave, and waits for the end of the run.  These are the last of the crew.
    fellows : list of Fellow
        Processes of the crew.
    wanted : int
        How many workers there will be, as newcomers hear it.
    """

    lost: ClassVar[bool] = False

    def __init__(self, comm: MPI.Intracomm, workers: int) -> None:
        self.workers = workers
        self.fellows: list[Fellow] = []
        self._spawned: list[MPI.Intercomm] = []
        self._leaves = False
        self._has_lost = False
        atexit.register(self._part)
        if is_newcomer():
            parent = MPI.Comm.Get_parent()
            self._spawned.append(parent)
            self.axis = Axis("crew", parent.Merge(high=True), Ledger())
            self._name(None, 0)
        else:
            self.axis = Axis("crew", comm.Dup(), Ledger())
            self.identity = self.axis.rank
            self._line_up()
            self.wanted = workers

    def _name(self, identity: int | None, workers: int) -> None:
        """Give newcomers numbers that nobody has had, and tell them how many workers there will be.  Collective."""
        told = self.axis.exchange((identity, workers))
        known = [who for who, _ in told if who is not None]
        free = max(known) + 1
        self.identities = [*known, *range(free, free + len(told) - len(known))]
        self.identity = self.identities[self.axis.rank]
        self.wanted = told[0][1]
        self._ranks = list(range(len(told)))
        self.left = [False] * len(told)

    def _line_up(self, ends: bool = False) -> bool:
        """Learn who is there, and who leaves; whether the run ends, as any of them says.  Collective."""
        told = self.axis.exchange((self.identity, self._leaves, tuple(this_process()), ends))
        self._ranks = sorted(range(len(told)), key=lambda rank: told[rank][1])
        self.identities = [told[rank][0] for rank in self._ranks]
        self.left = [told[rank][1] for rank in self._ranks]
        self.fellows = [Fellow(*told[rank][2]) for rank in self._ranks]
        return any(each[3] for each in told)

    def let_go(self, leaves: list[bool]) -> None:
        """All workers: these of them leave with the next `split`.  Not collective."""
        for rank, leaving in enumerate(leaves):
            self.left[rank] |= leaving
        self._leaves |= leaves[self.rank]

    @property
    def rank(self) -> int:
        """Place in the crew: those who leave are behind the others, whatever their rank on the axis is."""
        return self._ranks.index(self.axis.rank)

    @property
    def size(self) -> int:
        return self.axis.size

    @property
    def able(self) -> int:
        """How many of them may be workers."""
        return self.size - sum(self.left)

    @property
    def is_settled(self) -> bool:
        """Whether no worker is about to leave."""
        return not any(self.left[: self.workers])

    @property
    def works(self) -> bool:
        """Whether this process is a worker."""
        return self.rank < self.workers

    def order(self, order: Order) -> None:
        """Rank 0: tell the spares what to do.  Not collective."""
        told = np.array(order, np.int64)
        for spare in range(self.workers, self.size):
            self.axis.send(told, self._ranks[spare], _ORDER, label="control")

    def wait_for_order(self) -> Order:
        """A spare: sleep until rank 0 says what to do.  Raises MPI.Exception if somebody dies."""
        comm = self.axis.comm
        while not comm.Iprobe(self._ranks[0], _ORDER):
            time.sleep(_NAP_S)
        told = np.empty(2, np.int64)
        self.axis.recv(told, self._ranks[0], _ORDER, label="control")
        return Order(*told.tolist())

    def recruit(self, order: Order) -> None:
        """Spawn processes that run the same script, and wait until they are here: the last of the crew.  Collective.

        Raises
        ------
        MPI.Exception
            If MPI cannot start them; the crew is as it was.
        """
        command = ["-X", NEWCOMER, *sys.orig_argv[1:]]
        spawned = self.axis.comm.Spawn(sys.executable, command, order.recruits, root=0)
        self._spawned.append(spawned)
        before = self.axis
        self.axis = Axis("crew", spawned.Merge(high=False), Ledger())
        before.free()
        self._name(self.identity, order.workers)

    def split(self, workers: int, leaves: bool, ends: bool) -> MPI.Intracomm | None:
        """The communicator of the first `workers` of them, None on the others.  Collective.

        Those who leave are not among them unless the run ends, as some process knows; `leaves`: this process does,
        though it was no worker.
        """
        self._leaves |= leaves
        if not self._line_up(ends):
            workers = min(workers, self.able)
        part = self.axis.comm.Split(0 if self.rank < workers else MPI.UNDEFINED, self.rank)
        self.workers = workers
        if part == MPI.COMM_NULL:
            return None
        assert isinstance(part, MPI.Intracomm)
        return part

    def agree(self, sound: bool = True) -> None:
        """See `agree`, over all of the crew."""
        agree(self.axis.comm, sound)

    def revoke(self) -> None:
        """Wake all who wait in an operation of the crew.  Not collective."""
        self.axis.revoke()

    def bury(self) -> None:
        """Go on without the dead.  Collective over the survivors; their order stays."""
        survivors = self.axis.comm.Shrink()
        assert isinstance(survivors, MPI.Intracomm)
        self._has_lost = Crew.lost = True
        self.axis.move(survivors)
        self._line_up()

    def free(self) -> None:
        """Collective."""
        self.axis.free()

    def _part(self) -> None:
        """At the end of the script: parents and children let go of each other, the last spawned first."""
        for inter in reversed(self._spawned):
            if self._has_lost:
                inter.Free()  # Disconnect would wait for the dead
            else:
                inter.Disconnect()


def _finalize_in_time() -> None:
    """After a death MPI_Finalize of Open MPI 5 may wait for ever: the process then ends without it.

    The launcher has the code of the dead to report in any case.
    """
    if Crew.lost and not MPI.Is_finalized():
        last_resort = threading.Timer(_FINALIZE_S, os._exit, (1,))
        last_resort.daemon = True
        sys.stdout.flush()
        last_resort.start()
        MPI.Finalize()
        last_resort.cancel()


# Registered when mpishard is imported, it runs after whatever is registered later.
atexit.register(_finalize_in_time)
