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
    must therefore still take part in each agreement in which others may be waiting, with a no: see `refuse_all`.

    Parameters
    ----------
    mesh : Mesh
        Of the workers.
    membership : Membership
    """

    def __init__(self, mesh: Mesh, membership: Membership) -> None:
        self._mesh = mesh
        self._membership = membership
        self._pending = {_WORKERS, _MEMBERSHIP}  # in these others may be waiting

    @property
    def workers_may_wait(self) -> bool:
        """Whether other workers may be waiting in an agreement of theirs: this process is in a step."""
        return _WORKERS in self._pending

    def agree_as_workers(self) -> None:
        """Return when all workers have come here."""
        self._pending.remove(_WORKERS)
        agree(self._mesh.world.comm, sound=True)
        self._pending.add(_WORKERS)

    def agree_as_crew(self) -> None:
        """Return when all processes have come here."""
        self._pending.remove(_MEMBERSHIP)
        self._membership.agree()
        self._pending.add(_MEMBERSHIP)

    def refuse_all(self) -> None:
        """Take part in all agreements that others may be waiting in with a no, so that they fail there."""
        for scope, comm in ((_WORKERS, self._mesh.world.comm), (_MEMBERSHIP, self._membership.axis.comm)):
            if scope in self._pending:
                with contextlib.suppress(MPI.Exception):
                    agree(comm, sound=False)
        self.end_steps()

    def end_steps(self) -> None:
        """From now on no worker waits in an agreement of the workers."""
        self._pending = {_MEMBERSHIP}

    def begin_steps(self) -> None:
        """From now on workers may wait in an agreement of theirs."""
        self._pending.add(_WORKERS)
