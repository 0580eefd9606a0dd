"""The ranks that together hold one copy of a model, as one axis."""

from __future__ import annotations

from typing import Any

from mpishard.comm.mesh import Mesh

Array = Any


class ModelParallelGroup:
    """The ranks of one data coordinate, with the methods of `Axis` that agreements and norms need.

    It needs no communicator of its own: each method runs over the tensor axis, then over the pipeline axis.  All
    methods and the constructor are collective over these ranks.

    Parameters
    ----------
    mesh : Mesh
        Of which the group is this rank's.

    Attributes
    ----------
    members : list of int
        World ranks of the group.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._axes = [axis for axis in (mesh.tensor, mesh.pipeline) if axis.size > 1]
        self.members: list[int] = self.allgather_object(mesh.rank)

    def all_reduce(self, buffer: Array, op: str = "sum", *, label: str = "") -> Array:
        """As `Axis.all_reduce`, in place.

        Parameters
        ----------
        buffer : array
            Overwritten by the result.
        op : str
            As there.
        label : str
            For the ledger.

        Returns
        -------
        array
            `buffer`.
        """
        for axis in self._axes:
            axis.all_reduce(buffer, op=op, label=label)
        return buffer

    def allgather_object(self, value: Any) -> list[Any]:
        """As `Axis.allgather_object`.

        Parameters
        ----------
        value : object
            Numbers, strings, and tuples of them.

        Returns
        -------
        list
            The values of all ranks, in the order of `members`.
        """
        values = [value]
        for axis in self._axes:
            values = [each for theirs in axis.allgather_object(tuple(values)) for each in theirs]
        return values

    def raise_together(self, problem: Exception | None) -> None:
        """As `Axis.raise_together`.

        Parameters
        ----------
        problem : Exception or None
            What this rank has found.

        Raises
        ------
        Exception
            As there.
        """
        for axis in self._axes:
            try:
                axis.raise_if_any(problem)
            except Exception as error:  # of this rank or of another; ranks of the next axis must learn of it too
                problem = error
        assert problem is not None
        raise problem
