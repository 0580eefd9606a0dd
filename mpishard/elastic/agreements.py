"""The agreements of an elastic run, and in which of them other processes may be waiting for this one."""

from __future__ import annotations

import contextlib

from mpi4py import MPI

from mpishard.comm.mesh import Mesh
from mpishard.elastic.membership import Membership, agree

_WORKERS, _MEMBERSHIP = "workers", "crew"


class Agreements:
    """Agreements of the workers, and of all processes of the run.

    The agreement of ULFM is uniform: if it returns on one survivor, it returns on all.  A process that fails elsewhere
    must therefore still take part, with a no, in each agreement in which others may be waiting: see `refuse_all`.
    """

    def __init__(self, mesh: Mesh, membership: Membership) -> None:
        self._mesh = mesh
        self._membership = membership
        self._pending = {_WORKERS, _MEMBERSHIP}  # in these others may be waiting

    @property
    def workers_may_wait(self) -> bool:
        """True while this process is in a step, when other workers may be waiting in an agreement of the workers."""
        return _WORKERS in self._pending

    def agree_as_workers(self) -> None:
        """Return when all workers have come here.  Collective over the workers."""
        self._pending.remove(_WORKERS)
        agree(self._mesh.world.comm, sound=True)
        self._pending.add(_WORKERS)

    def agree_as_crew(self) -> None:
        """Return when all processes have come here.  Collective over all processes of the run."""
        self._pending.remove(_MEMBERSHIP)
        self._membership.agree()
        self._pending.add(_MEMBERSHIP)

    def refuse_all(self) -> None:
        """Take part with a no in all agreements in which others may be waiting, so that they fail there."""
        for scope, comm in ((_WORKERS, self._mesh.world.comm), (_MEMBERSHIP, self._membership.axis.comm)):
            if scope in self._pending:
                with contextlib.suppress(MPI.Exception):
                    agree(comm, sound=False)
        self.end_steps()

    def end_steps(self) -> None:
        """Note that no worker waits in an agreement of the workers any more."""
        self._pending = {_MEMBERSHIP}

    def begin_steps(self) -> None:
        """Note that workers may wait in an agreement of the workers from now on."""
        self._pending.add(_WORKERS)
