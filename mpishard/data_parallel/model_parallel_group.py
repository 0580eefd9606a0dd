"""The ranks that hold one copy of a model between them, as one axis."""

from __future__ import annotations

from typing import Any

from mpishard.comm.mesh import Mesh

Array = Any


class ModelParallelGroup:
    """The ranks of one data coordinate: has of `Axis` what agreements and norms need, without a communicator more.

    All methods, and creation, are collective over these ranks: first over the tensor axis, then the pipeline's.

    Attributes
    ----------
    members : list of int
        Ranks of the whole mesh that are in it.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._axes = [axis for axis in (mesh.tensor, mesh.pipeline) if axis.size > 1]
        self.members: list[int] = self.allgather_object(mesh.rank)

    def all_reduce(self, buffer: Array, op: str = "sum", *, label: str = "") -> Array:
        """As `Axis.all_reduce`, in place."""
        for axis in self._axes:
            axis.all_reduce(buffer, op=op, label=label)
        return buffer

    def allgather_object(self, value: Any) -> list[Any]:
        """As `Axis.allgather_object`, in the order of `members`."""
        told = [value]
        for axis in self._axes:
            told = [each for theirs in axis.allgather_object(tuple(told)) for each in theirs]
        return told

    def raise_together(self, problem: Exception | None) -> None:
        """As `Axis.raise_together`."""
        for axis in self._axes:
            try:
                axis.raise_if_any(problem)
            except Exception as error:  # of this rank or of another: those on the next axis hear of it too
                problem = error
        assert problem is not None
        raise problem
