"""The communicators of the workers: those of their mesh, and those of its checkpoints."""

from __future__ import annotations

from mpi4py import MPI

from mpishard.comm.mesh import Mesh
from mpishard.elastic.mesh_choice import MeshSizes
from mpishard.training.run_checkpoints import RunCheckpoints


class WorkerMesh:
    """Frees the communicators, makes them again for other workers, and revokes them after a death.

    `offered`, where a run chooses its mesh: the number of processes for which it has chosen, and the mesh that was
    asked for.
    """

    def __init__(self, mesh: Mesh, checkpoints: RunCheckpoints) -> None:
        self.mesh = mesh
        self.offered: tuple[int, MeshSizes | None] = (mesh.size, None)
        self._checkpoints = checkpoints
        self._whole = True  # all of them exist, and this process can free them together with the others

    def release(self) -> None:
        """Free the communicators, if they are whole.  Collective over the workers."""
        if self._whole:
            self._checkpoints.release()
            self.mesh.release()
        self._whole = False

    @property
    def sizes(self) -> MeshSizes:
        return MeshSizes(**self.mesh.shape)

    def rebind(self, comm: MPI.Intracomm, sizes: MeshSizes | None) -> None:
        """Make them of the ranks of `comm`, in a mesh of these sizes; None: only the data size changes.

        Collective over the ranks; the communicators are whole after `note_whole`.
        """
        if sizes is None:
            self.mesh.rebind(comm)
        else:
            self.mesh.rebind(comm, tensor=sizes.tensor, pipeline=sizes.pipeline)
        self._checkpoints.rebind()

    def note_whole(self) -> None:
        """Note that all workers have made theirs."""
        self._whole = True

    def revoke(self) -> None:
        """Wake all processes that wait in an operation of the workers."""
        self.mesh.revoke()
        self._checkpoints.revoke()
        self._whole = False
