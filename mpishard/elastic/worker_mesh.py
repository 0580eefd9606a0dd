"""The communicators of the workers: those of their mesh, and those of its checkpoints."""

from __future__ import annotations

from mpi4py import MPI

from mpishard.comm.mesh import Mesh
from mpishard.training.run_checkpoints import RunCheckpoints


class WorkerMesh:
    """Frees the communicators, makes them again for other workers, and revokes them after a death.

    Parameters
    ----------
    mesh : Mesh
    checkpoints : RunCheckpoints
    """

    def __init__(self, mesh: Mesh, checkpoints: RunCheckpoints) -> None:
        self.mesh = mesh
        self._checkpoints = checkpoints
        self._whole = True  # all of them are there, and this process can free them together with the others

    def release(self) -> None:
        """Free the communicators, if they are whole.  Collective over the workers."""
        if self._whole:
            self._checkpoints.release()
            self.mesh.release()
        self._whole = False

    def rebind(self, comm: MPI.Intracomm) -> None:
        """Make them of the ranks of `comm`.  Collective over these; they are whole after `note_whole`."""
        self.mesh.rebind(comm)
        self._checkpoints.rebind()

    def note_whole(self) -> None:
        """Note that all workers have made theirs."""
        self._whole = True

    def revoke(self) -> None:
        """Wake all processes that wait in an operation of the workers.  Not collective."""
        self.mesh.revoke()
        self._checkpoints.revoke()
        self._whole = False
