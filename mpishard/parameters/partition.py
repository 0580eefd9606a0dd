"""Fields that the application has distributed: what this rank holds, as the start of a minimisation."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.arguments import entries, integer, shown
from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis, allgather_values
from mpishard.comm.errors import ErrorForOthers
from mpishard.layout.boxes import Box, box_shape
from mpishard.layout.tensors import ModelParallelRank, ParameterSpec

Array = Any


class Partition:
    """The part of a field that this rank holds, as the application has cut it.

    It is a start of `minimize` and of what takes its starts, alone or in a dictionary, list or tuple of such fields.
    The function gets and returns arrays like `local`; so do bounds and the other options about elements, and the result
    has them.  The global order, by which checkpoints go, is that of the ranks, or of the grid.  Creation is collective
    over `comm`.

    Parameters
    ----------
    local : array
        The values of this rank, of any shape, also none; they are copied.  Numbers other than float32 become float64.
    comm : Axis or mpi4py.MPI.Intracomm
        The ranks that share the field, in the order of the mesh: ``mesh.tensor``, or the application's communicator.
    shape : tuple of int, optional
        The shape of the whole grid, of which each rank holds a box.
    box : tuple of pairs of int, optional
        First and last index (exclusive) of this rank's box in each dimension; `local` has its shape.

    Attributes
    ----------
    local : array
    shape : tuple of int
        Of the whole field: the grid's, or the number of its values.
    parts : tuple of tuples of pairs
        The box of each rank.
    place : ModelParallelRank
        The number of this rank among those that share the field, and how many they are.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if any gives no array of real numbers, a box without a shape or that `local` does not fit, another
        shape or precision than others; or if boxes leave an element out or have one twice.
    """

    def __init__(
        self, local: Any, *, comm: Axis | MPI.Intracomm, shape: Sequence[int] | None = None, box: Any = None
    ) -> None:
        if not isinstance(comm, Axis | MPI.Intracomm):
            raise TypeError(f"comm={shown(comm)} must be mesh.tensor, or a communicator of mpi4py")
        facts: tuple[Any, ...] = ()
        problem: Exception | None = None
        try:
            self.local: Array = _real_copy(local)
            whole = None if shape is None else tuple(integer("shape", extent, least=0) for extent in shape)
            facts = self.local.dtype.name, int(self.local.size), whole, _checked_box(whole, box, self.local)
        except (TypeError, ValueError) as error:
            problem = error
        by_rank = _exchanged(comm, problem, facts)
        dtypes, sizes, shapes, boxes = zip(*by_rank, strict=True)
        for what, values in (("precision", dtypes), ("shape", shapes)):
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise ValueError(
                    f"a field has one {what}, but {values[0]} on rank 0 and {values[other]} on rank {other}: give the "
                    "same on all ranks"
                )
        self.shape: tuple[int, ...] = (sum(sizes),) if shapes[0] is None else shapes[0]
        stops = np.cumsum(sizes).tolist()
        runs = [((stop - size, stop),) for stop, size in zip(stops, sizes, strict=True)]
        self.parts: tuple[Box, ...] = tuple(runs if shapes[0] is None else boxes)
        self.place = ModelParallelRank(comm.rank, comm.size)
        self.spec("field")  # which checks that the boxes fit together

    def __repr__(self) -> str:
        return f"Partition({self.local.size} of {prod(self.shape)} values, rank {self.place.tensor_rank})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.local, dtype=dtype, copy=copy)

    def spec(self, name: str) -> ParameterSpec:
        """The global tensor of this field.

        Parameters
        ----------
        name : str
            As checkpoints name it.

        Returns
        -------
        ParameterSpec
            With the box of each rank in `parts`.
        """
        return ParameterSpec(name, self.shape, parts=self.parts)


def _real_copy(local: Any) -> Array:
    values = local if arrays.is_device(local) else np.asarray(local)
    if values.dtype.kind not in "biuf":
        raise TypeError(f"local must be an array of real numbers, got {shown(local)}")
    return values.astype(values.dtype if values.dtype in arrays.FLOATS else np.float64)


def _checked_box(shape: tuple[int, ...] | None, box: Any, local: Array) -> Box | None:
    """This rank's box; None for a field without a grid."""
    if shape is None:
        if box is not None:
            raise ValueError(f"box={shown(box)} is of a grid: give its shape, too")
        return None
    pairs = [entries("box", pair, "(start, stop)") for pair in entries("box", box, "pairs (start, stop)")]
    if len(pairs) != len(shape) or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"box={shown(box)} must have a pair (start, stop) for each dimension of the shape {shape}")
    found = tuple((integer("box", start, least=0), integer("box", stop, least=0)) for start, stop in pairs)
    if any(start > stop for start, stop in found) or box_shape(found) != tuple(local.shape):
        raise ValueError(f"box={shown(box)} must have the shape of local, {tuple(local.shape)}")
    return found


def _exchanged(comm: Axis | MPI.Intracomm, problem: Exception | None, value: Any) -> list[Any]:
    """The value of each rank.  Collective; raises on all ranks if any has a problem."""
    own = None if problem is None else tuple(ErrorForOthers.of(problem, comm.rank)), value
    by_rank = comm.allgather_object(own) if isinstance(comm, Axis) else allgather_values(comm, own)
    for rank, (error, _) in enumerate(by_rank):
        if error is not None:
            raise ErrorForOthers(*error).made(f"rank {rank}") if problem is None else problem
    return [value for _, value in by_rank]
