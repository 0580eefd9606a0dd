"""Fields that the application has distributed: what this rank holds, as the start of a minimisation."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from mpishard.adapters.adapter import Adapter, adapter_of
from mpishard.arguments import entries, integer, kind_of, shown
from mpishard.backend import array as arrays
from mpishard.comm.agreement import agree_on_settings, in_words, opening, text_of
from mpishard.comm.axis import ranks_in
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.comm.rearrangement import Rearrangement
from mpishard.layout.boxes import Box, box_shape
from mpishard.layout.tensors import ParameterSpec

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
    field : object or None
        The one that `of` was given.

    Raises
    ------
    TypeError, ValueError
        On all ranks: if any gives no array of real numbers, a box that `local` does not fit, or another shape or
        precision than others; if boxes leave an element out or have one twice; if a number is twice in `ids`, or
        out of range; or if groups of the mesh hold the field in different ways.
    """

    def __init__(
        self, local: Any, mesh: Mesh, *, ids: Any = None, shape: Sequence[int] | None = None, box: Any = None
    ) -> None:
        with opening(checked_mesh(mesh).world, "Partition") as same:
            if mesh.pipeline.size > 1:
                raise ValueError(f"a field is shared by the tensor ranks of a mesh, but this one has {mesh.sizes}")
            self.local: Array = _real_copy(local)
            extents = None if shape is None else entries("shape", shape, "whole numbers")
            whole = None if extents is None else tuple(integer("shape", extent, least=0) for extent in extents)
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
        self.field: Any = None
        self.spec("field")  # all ranks check that the boxes fit together

    @classmethod
    def of(cls, field: Any, mesh: Mesh, *, ids: Any = None) -> Partition:
        """Make the partition of a field that another package has distributed.  Collective over the mesh.

        It has the values that this rank owns, without ghosts and halos.

        Parameters
        ----------
        field : object
            A ``DistributedArray`` of pylops-mpi, a ``Function`` of Devito or DOLFINx, or a ``Vec`` of petsc4py.  The
            ranks that share it are those of ``mesh.tensor``, in any order.
        mesh : Mesh
            As for `Partition`.
        ids : array of int, optional
            As for `Partition`, where the numbers of `field` itself depend on the partition.

        Returns
        -------
        Partition
            Its `get` and `put` read and write such fields.

        Raises
        ------
        TypeError, ValueError
            On all ranks: if any gives no such field, or one that is shared by other ranks than a field of the mesh.
        """
        with opening(checked_mesh(mesh).world, "Partition.of") as same:
            adapter = adapter_of(field)
            same |= {"kind of field": f"{adapter.what} of {adapter.package}", "ids are given": ids is not None}
            _check_ranks(adapter, field, mesh)
        with raised_on_all(mesh.world):
            numbering = adapter.numbering(field) if ids is None else {"ids": ids}
            values = adapter.values(field)
            if "box" in numbering:
                values = values.reshape(box_shape(numbering["box"]))
        found = cls(values, mesh, **numbering)
        found.field = field
        return found

    def __repr__(self) -> str:
        return f"Partition({self.local.size} of {prod(self.shape)} values, rank {self.place.tensor_rank})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.local, dtype=dtype, copy=copy)

    def get(self, field: Any) -> Array:
        """This rank's values of a field like the one of `of`, such as a gradient.

        Parameters
        ----------
        field : object
            Of a package that `of` takes, cut as that field.

        Returns
        -------
        array
            A copy, of the shape of `local`.

        Raises
        ------
        TypeError, ValueError
            If it is no such field, or has another number of values on this rank.
        """
        values = adapter_of(field).values(field)
        if values.size != self.local.size:
            raise ValueError(
                f"the field {kind_of(field)} has {values.size} values on this rank, and the partition {self.local.size}"
            )
        return values.reshape(self.local.shape).copy()

    def put(self, values: Any, field: Any = None) -> Any:
        """Write values of this rank to a field, and to their copies on other ranks.  Collective over `ranks`.

        Parameters
        ----------
        values : array
            Like `local`, such as a point or the ``x`` of a result.
        field : object, optional
            Cut as the field of `of`; default: that field.

        Returns
        -------
        object
            The field.

        Raises
        ------
        TypeError, ValueError
            If there is no such field, or another number of values on any rank; on all ranks that share the field.
        """
        with raised_on_all(self.ranks):  # or the others would wait for this rank
            into = self.field if field is None else field
            adapter = adapter_of(into)
            found = arrays.as_array(values)
            own = adapter.values(into)
            if not found.size == own.size == self.local.size:
                raise ValueError(
                    f"put got {found.size} values for {own.size} of {kind_of(into)} on this rank, where the partition "
                    f"has {self.local.size}"
                )
        adapter.put(found.reshape(own.shape), into)
        return into

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


def _check_ranks(adapter: Adapter, field: Any, mesh: Mesh) -> None:
    """Raise ValueError unless a field of another package is shared by the ranks that share one of the mesh."""
    comm = adapter.communicator(field)
    own = sorted(mesh.tensor.members)
    theirs = [mesh.world.rank] if comm is None else ranks_in(comm, mesh.world)
    if theirs != own:
        others = theirs.count(-1)
        more = f" and {others} processes outside of the mesh" * (others > 0)
        raise ValueError(
            f"the {adapter.what} of this rank is shared by {in_words('rank', theirs[others:])}{more}, and a field of "
            f"the mesh ({mesh.sizes}) by {in_words('rank', own)}: make it with {adapter.remedy}, or the mesh with its "
            "communicator, Mesh(space=comm)"
        )


def _real_copy(local: Any) -> Array:
    values = arrays.as_array(local)
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
    if box is None:
        raise ValueError(f"shape={shape} is of a grid: give the box of this rank, too")
    pairs = [entries("box", pair, "(start, stop)") for pair in entries("box", box, "pairs (start, stop)")]
    if len(pairs) != len(shape) or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"box={shown(box)} must have a pair (start, stop) for each dimension of the shape {shape}")
    found = tuple((integer("box", start, least=0), integer("box", stop, least=0)) for start, stop in pairs)
    if any(start > stop for start, stop in found) or box_shape(found) != tuple(local.shape):
        raise ValueError(f"box={shown(box)} must have the shape of local, {tuple(local.shape)}")
    return found
