"""Fields that the application has distributed: what this rank holds, as the start of a minimisation."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import entries, integer, shown
from mpishard.backend import array as arrays
from mpishard.comm.agreement import agree_on_settings, opening, text_of
from mpishard.comm.rearrangement import Rearrangement
from mpishard.layout.boxes import Box, box_shape
from mpishard.layout.tensors import ParameterSpec

if TYPE_CHECKING:
    from mpishard.comm.mesh import Mesh

Array = Any


class Partition:
    """The part of a field that this rank holds, as the application has cut it.

    It is a start of `minimize` and of what takes its starts, alone or in a dictionary, list or tuple of such fields.
    The function gets and returns arrays like `local`; so are bounds and the other options about elements, and the
    arrays of the result.  The ranks of one group of the mesh hold the field together, and each group in the same way.
    Creation is collective over the mesh.

    Parameters
    ----------
    local : array
        The values of this rank, of any shape, also none; they are copied.  Numbers other than float32 become float64.
    mesh : Mesh
        ``Mesh(tensor=4)``: four ranks share the field; or ``Mesh(space=comm)``: those of a communicator do.
    ids : array of int, optional
        The number of each value of `local` in the whole field, from 0, each once, where the order of the values depends
        on the partition.  Default: the values of rank 0 come first, then those of rank 1.
    shape : tuple of int, optional
        The shape of the whole grid, of which each rank holds a box.
    box : tuple of pairs of int, optional
        First and last index (exclusive) of this rank's box in each dimension; `local` has its shape.

    Attributes
    ----------
    local : array
    shape : tuple of int
        Of the whole field: the grid's, or the number of its values.
    is_grid : bool
        Whether each rank has a box of a grid.
    parts : tuple of tuples of pairs
        The box of each rank; empty with `ids`.
    ranks : Axis
        Those that share the field.
    place : ModelParallelRank
    rearrangement : Rearrangement or None
        Brings values from the order of `local` to that of `ids`.
    owned : 1-D array
        The values of this rank in the order of checkpoints: all of `local`, or with `ids` an even run of the numbers.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if any gives no array of real numbers, a box that `local` does not fit, or another shape or
        precision than others; if boxes leave an element out or have one twice; if a number is missing in `ids`, or
        there twice; or if groups of the mesh hold the field in different ways.
    """

    def __init__(
        self, local: Any, mesh: Mesh, *, ids: Any = None, shape: Sequence[int] | None = None, box: Any = None
    ) -> None:
        with opening(mesh.world, "Partition") as same:
            if mesh.pipeline.size > 1:
                raise ValueError(f"a field is shared by the tensor ranks of a mesh, but this one has {mesh.sizes}")
            self.local: Array = _real_copy(local)
            whole = None if shape is None else tuple(integer("shape", extent, least=0) for extent in shape)
            mine = _checked_box(whole, box, self.local)
            numbers = None if ids is None else _checked_ids(ids, self.local, whole)
            same |= {"shape": whole, "dtype of local": self.local.dtype.name, "ids are given": ids is not None}
        sizes = mesh.tensor.allgather_object(int(self.local.size))
        boxes = mesh.tensor.allgather_object(mine)
        held = {"values of each rank": text_of(sizes), "boxes": text_of(boxes)}
        if numbers is not None:
            held["ids"] = text_of(mesh.tensor.allgather_object(text_of(numbers)))
        agree_on_settings(mesh.world, held, what="partition in each group of the mesh", remedy="cut them alike")
        self.ranks, self.place = mesh.tensor, mesh.place
        self.shape: tuple[int, ...] = (sum(sizes),) if whole is None else whole
        self.rearrangement: Rearrangement | None = None
        self.is_grid = whole is not None
        self.parts: tuple[Box, ...] = ()
        if numbers is not None:
            self.rearrangement = Rearrangement(mesh.tensor, mesh.world, numbers, prod(self.shape))
        elif whole is not None:
            self.parts = tuple(boxes)
        else:
            stops = np.cumsum(sizes).tolist()
            self.parts = tuple(((stop - size, stop),) for stop, size in zip(stops, sizes, strict=True))
        self.owned: Array = self.local.reshape(-1)
        if self.rearrangement is not None:
            self.owned = self.rearrangement.by_number(self.owned)
        self.spec("field")  # all ranks check that the boxes fit together

    def __repr__(self) -> str:
        return f"Partition({self.local.size} of {prod(self.shape)} values, rank {self.place.tensor_rank})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.local, dtype=dtype, copy=copy)

    def spec(self, name: str) -> ParameterSpec:
        """The global tensor of this field, in the order of checkpoints.

        Parameters
        ----------
        name : str
            As checkpoints name it.

        Returns
        -------
        ParameterSpec
            With the box of each rank in `parts`; cut evenly if there are `ids`.
        """
        if self.rearrangement is not None:
            return ParameterSpec(name, self.shape, tensor_dim=0)
        return ParameterSpec(name, self.shape, parts=self.parts)


def _real_copy(local: Any) -> Array:
    values = local if arrays.is_device(local) else np.asarray(local)
    if values.dtype.kind not in "biuf":
        raise TypeError(f"local must be an array of real numbers, got {shown(local)}")
    return values.astype(values.dtype if values.dtype in arrays.FLOATS else np.float64)


def _checked_ids(ids: Any, local: Array, shape: tuple[int, ...] | None) -> np.ndarray:
    found = np.asarray(ids)
    if shape is not None:
        raise ValueError(f"ids are given, and the shape {shape} of a grid: give one of them")
    if found.dtype.kind not in "iu" and found.size:
        raise TypeError(f"ids must be whole numbers, got {shown(ids)}")
    if found.shape != tuple(local.shape):
        raise ValueError(
            f"ids have the shape {found.shape}, and local {tuple(local.shape)}: give a number for each value"
        )
    return found.reshape(-1).astype(np.int64)


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
