"""The unknowns of a minimisation: one flat array, and the form in which functions of the user get and return it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from mpishard.adapters.adapter import expect_no_field
from mpishard.arguments import shown
from mpishard.backend import array as arrays
from mpishard.backend.kinds import backend_of
from mpishard.comm.errors import raised_on_all
from mpishard.inverse.result import pair_of_bounds
from mpishard.inverse.trees import CONVENTION, Tree, array_of_numbers, tree_of
from mpishard.layout.boxes import Box, box_shape, whole_box
from mpishard.layout.tensors import WHOLE, ModelParallelRank, ParameterSpec
from mpishard.minimizers.elements import OfThisRank, OperatorOfThisRank, element_name
from mpishard.minimizers.method import RieszMap

Array = Any
_GET = "this rank's values, as start.get(field) of its Partition returns them"
# What is given in place of a matrix.
_FOR_MATRIX = {
    "inner_product": "mpishard.RieszMap(apply, solve), its product with a vector and the solve with it",
    "preconditioner": "the function of its product with a vector",
}
_LARGE = 1 << 20  # bytes of an array whose memory is kept for the next copy


# This file does without MPI, and cannot ask for the classes.


def has_names(x0: Any) -> bool:
    """Return True for a FlatParameters."""
    return hasattr(x0, "pieces") and hasattr(x0, "layout")


def is_part(x0: Any) -> bool:
    """Return True for a Partition."""
    return hasattr(x0, "rearrangement") and hasattr(x0, "local")


def copy_of_point(x: Any) -> Any:
    """A copy of a point; parameters with names stay what they are."""
    if has_names(x):
        return x
    tree = tree_of(x)
    return x.copy() if tree is None else tree.of(tree.flat)


class _Copies:
    """Copies of arrays of one size, each in the memory of an earlier one, if that is gone with all that was made of it.

    The first touch of new memory may take longer than the copy itself.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    def of(self, values: Array) -> Array:
        if values.nbytes < _LARGE or backend_of(values).pools_memory:
            return values.copy()
        memory = self._free.pop() if self._free else np.empty_like(values)
        copy = np.asarray(memory.data)  # views of it hold this array, and not the one that has the memory
        weakref.finalize(copy, self._free.append, memory).atexit = False
        copy[...] = values
        return copy


class Unknowns:
    """The unknowns on this rank.

    An array is copied: float32 and float64 stay, other real numbers become float64. So are the arrays of a tree, see
    `Tree`, and what a Partition has on this rank. A FlatParameters is changed in place. Raises TypeError unless `x0`
    has arrays of numbers, ValueError if it is empty, unless it may be, or has NaN or infinite elements.
    """

    def __init__(self, x0: Any, may_be_empty: bool = False) -> None:
        self.parameters: Any = x0 if has_names(x0) else None
        self.tree: Tree | None = None
        self.specs: tuple[ParameterSpec, ...]  # of the whole tensors; an array is one tensor "x"
        self.place = WHOLE  # which part of them this rank has
        # The values of this rank, in the order of the specs.  The user sees them in that of the application, which is
        # another one where fields have ids.
        self.flat: Array
        self._fields: list[Any] = []
        if self.parameters is not None:
            self.specs, self.flat, self.place = x0.specs, x0.flat, x0.place
        elif is_part(x0):
            self.specs, self.place, self._fields = (x0.spec("x"),), x0.place, [x0]
            self.flat = arrays.aligned_copy(x0.local.reshape(-1))
        elif (tree := tree_of(x0)) is not None:
            self.tree = tree
            self.specs, self.flat = tree.specs, tree.flat
            if any(map(is_part, tree.values)):
                self.specs, self._fields = self._specs_of_fields(tree), tree.values
                self.place = self._fields[0].place
        else:
            values = _real_array(x0)
            self.specs = (ParameterSpec("x", values.shape),)
            self.flat = arrays.aligned_copy(values.reshape(-1))
        self._shape: tuple[int, ...] = x0.local.shape if is_part(x0) else (self.size,)
        self.given: Array = self.flat  # in the order of the application
        self._copies = _Copies()
        self.given_size = self.size  # the number of elements that the user sees on this rank
        if any(field.rearrangement is not None for field in self._fields):
            self.flat = arrays.joined([field.owned for field in self._fields])
        if not (self.total or may_be_empty):
            raise ValueError("x0 is empty: there is nothing to minimize; give it at least one element")
        host = arrays.to_host(self.flat)
        if not np.isfinite(host).all():
            wrong = int(np.flatnonzero(~np.isfinite(host))[0])
            where = f"element {wrong}" if self.tree is None else element_name(wrong, self.tree.specs)
            raise ValueError(f"x0 must be finite, but {where} is {host[wrong]}")

    @staticmethod
    def _specs_of_fields(tree: Tree) -> tuple[ParameterSpec, ...]:
        """The whole tensors of a tree of fields that the application has cut."""
        specs = []
        for leaf, field in zip(tree.leaves, tree.values, strict=True):
            if not is_part(field) or field.place != tree.values[0].place:
                raise ValueError(
                    f"the first array of x0 is a Partition, and that of {leaf.name!r} "
                    f"{'is of other ranks' if is_part(field) else 'is not'}: give a Partition for each, of one comm"
                )
            specs.append(field.spec(leaf.name))
        return tuple(specs)

    @classmethod
    def of(cls, x0: Any) -> Unknowns:
        """The unknowns of a start, which may be unknowns already."""
        return x0 if isinstance(x0, Unknowns) else cls(x0)

    def arranged(self, given: Array) -> Array:
        """A flat vector of the user's in the order of the specs.  Collective over ranks that share fields with ids."""
        if not any(field.rearrangement is not None for field in self._fields):
            return given
        parts, start = [], 0
        for field in self._fields:
            part = given[start : start + field.local.size]
            parts.append(part if field.rearrangement is None else field.rearrangement.by_number(part))
            start += field.local.size
        return arrays.joined(parts)

    def as_given(self, vector: Array) -> Array:
        """The reverse of `arranged`, also collective."""
        if not any(field.rearrangement is not None for field in self._fields):
            return vector
        parts, start = [], 0
        for field in self._fields:
            size = field.local.size if field.rearrangement is None else field.rearrangement.size
            part = vector[start : start + size]
            parts.append(part if field.rearrangement is None else field.rearrangement.as_given(part))
            start += size
        return arrays.joined(parts)

    def show(self) -> None:
        """Let the user see the values of `flat` from now on.  Collective as `arranged`."""
        self.given = self.as_given(self.flat)

    def take(self, given: Array) -> None:
        """Take these values, a flat vector in the order that the user sees.  Collective as `arranged`."""
        self.flat[...] = self.arranged(given)
        self.show()

    @property
    def size(self) -> int:
        """The number of elements on this rank."""
        return int(self.flat.size)

    @property
    def total(self) -> int:
        """The number of elements over all ranks."""
        return sum(spec.size for spec in self.specs)

    @property
    def is_split(self) -> bool:
        """Return True if these are one rank's part of parameters that are split over ranks."""
        return self.place.tensor_size * self.place.pipeline_size > 1

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """The shape of an array of several dimensions, of which functions get flat points; () of all else."""
        is_array = self.parameters is None and self.tree is None and not self._fields
        return self.specs[0].shape if is_array and len(self.specs[0].shape) > 1 else ()

    @property
    def has_fields(self) -> bool:
        """Return True if these are of Partitions."""
        return bool(self._fields)

    def field(self, place: int) -> Any:
        """The Partition of the array at this place, in the order of the specs; None if it is none."""
        return self._fields[place] if self._fields else None

    def start_of(self, place: int) -> int:
        """Where the array at this place begins in `flat`, of unknowns that are no FlatParameters."""
        sizes = [field.owned.size for field in self._fields] or [spec.size for spec in self.specs]
        return int(sum(sizes[:place]))

    def check_differences(self) -> None:
        """Raise ValueError if these are split over ranks so that finite differences cannot move each element once."""
        if self.is_split and not self._fields and any(spec.is_split or spec.partial for spec in self.specs):
            raise ValueError(
                f"finite differences take a whole x0, or a Partition, but tensors of this one are split over "
                f"tensor={self.place.tensor_size} ranks, or partial: give one of these, or jac=True"
            )

    def held_whole_by(self, place: ModelParallelRank) -> None:
        """Let these whole unknowns be those of a rank at this place, where all ranks of a group have them."""
        if self.parameters is None and not self._fields:
            self.place = place

    @property
    def is_cut_by_application(self) -> bool:
        """Return True if options about elements are for those of this rank, as the parts are the application's."""
        return self.has_fields or any(spec.parts for spec in self.specs)

    @property
    def option_specs(self) -> tuple[ParameterSpec, ...]:
        """The tensors for whose elements options are given: the whole ones, or this rank's parts."""
        if not self.is_cut_by_application:
            return self.specs
        if self.parameters is not None:
            return tuple(ParameterSpec(piece.name, piece.shape) for piece in self.parameters.pieces)
        return (ParameterSpec("x", self._shape),) if self.tree is None else self.tree.specs

    def options(self, bounds: Any, **elements: Any) -> dict[str, Any]:
        """The options of elements as methods take them, with bounds as the pair of `pair_of_bounds`.

        Raises TypeError or ValueError for other forms.
        """
        tree = self.tree
        found: dict[str, Any] = {}
        for name, option in elements.items():
            expect_no_field(name, option, _GET)
            self._expect_no_matrix(name, option)
            if isinstance(option, RieszMap):
                found[name] = RieszMap(self._operator(name, option.apply), self._operator(name, option.solve))
            elif callable(option):
                found[name] = self._operator(name, option)
            else:
                found[name] = self.for_method(option if tree is None else tree.by_name(name, option))
        for bound in bounds if isinstance(bounds, tuple | list) and len(bounds) == 2 else ():
            expect_no_field("a bound", bound, _GET)
        if tree is not None and bounds is not None:
            bounds = tree.bounds(bounds)
        is_part = self.is_cut_by_application
        pair = pair_of_bounds(bounds, self.given_size if is_part else self.total, is_part)
        return {**found, "bounds": self.for_method(pair)}

    def _expect_no_matrix(self, name: str, option: Any) -> None:
        """Raise ValueError if an option is a matrix or an operator in place of a diagonal."""
        shape = tuple(getattr(option, "shape", ()))
        size = self.given_size if self.is_cut_by_application else self.total
        is_square = shape == (size, size) and size > 1 and shape not in [spec.shape for spec in self.option_specs]
        if name in _FOR_MATRIX and (is_square or hasattr(option, "tocsr") or hasattr(option, "matvec")):
            raise ValueError(f"{name} is a matrix of shape {shape}: give {_FOR_MATRIX[name]}, or a diagonal")

    def for_method(self, option: Any) -> Any:
        """An option about the elements of `option_specs` as methods take it."""
        if option is None or not self.is_cut_by_application:
            return option
        return OfThisRank(option, self.option_specs, self.arranged)

    def _operator(self, name: str, function: Callable[[Any], Any]) -> Callable[[Array], Array]:
        """A user's operator as one of flat vectors in the order of the specs: whole ones, or this rank's elements."""
        tree = self.tree
        if self.is_cut_by_application:
            return self.operator_of_this_rank(name, function)
        if tree is None:
            return function
        return lambda vector: tree.flattened(f"the result of {name}", function(tree.of(vector)))

    def operator_of_this_rank(self, name: str, function: Callable[[Any], Any]) -> OperatorOfThisRank:
        """A user's operator of what this rank has of a vector as one of its elements in the order of the specs."""

        def of_this_rank(vector: Array) -> Array:
            given, found = self.as_given(vector), vector
            with raised_on_all(self._fields[0].ranks if self._fields else None):
                found = self.vector(f"the result of {name}", function(self.like_x0(given)))
            return self.arranged(found)

        return OperatorOfThisRank(of_this_rank)

    def gradient_hint(self, reason: str) -> str:
        """What may be wrong with the gradient of complex unknowns where a run ended for this reason; or nothing."""
        wrong = reason == "line search" and self.tree is not None and self.tree.complex_leaf is not None
        return f"x0 is complex, and {CONVENTION}" if wrong else ""

    def check_not_split(self) -> None:
        """Raise ValueError if these are one rank's part of parameters that are split over ranks."""
        if self.has_fields:
            raise ValueError("x0 is a Partition of a mesh: give this mesh, mesh=mesh, and perhaps reduction='sum'")
        if self.is_split:
            place = self.place
            raise ValueError(
                f"x0 is split over tensor={place.tensor_size} and pipeline={place.pipeline_size} ranks, which would "
                "minimise their parts one by one: give the mesh of its place, mesh=mesh and reduction='sum', or an x0 "
                "that is whole"
            )

    def point(self) -> Any:
        """The point as functions of the user get it: a copy of the array or the tree, or the parameters by name."""
        return self.like_x0(self._copies.of(self.given)) if self.parameters is None else self.parameters

    def nonfinite_name(self, vector: Array) -> str:
        """The first of the user's arrays in which a vector has NaN or infinite elements on this rank; empty if none."""
        finite, start = np.isfinite(arrays.to_host(vector)), 0
        for spec in self.option_specs:
            if not finite[start : start + spec.size].all():
                return spec.name
            start += spec.size
        return ""

    def like_x0(self, vector: Array) -> Any:
        """A vector as functions of the user get a direction: a tree of its views, or the array itself."""
        return vector.reshape(self._shape) if self.tree is None else self.tree.of(vector)

    def copy_of(self, flat: Array) -> Any:
        """A copy of a point as functions of the user get it, apart from the unknowns."""
        named = self.parameters
        if named is None:
            return self.like_x0(flat.copy())
        copy = type(named)(named.specs, named.dtype, module=arrays.module_of(named.like), place=named.place)
        copy.flat[...] = flat
        return copy

    def vector(self, what: str, given: Any) -> Array:
        """A vector of the user's as a flat array of the dtype and on the device of the unknowns; maybe not a copy.

        It is in the order that the user sees. `given` has as many elements as the unknowns on this rank, of any shape;
        or by tensor name arrays of the shapes of this rank's slices, all of them; of a tree it has its structure.
        Raises TypeError or ValueError, with `what`, if it is something else.
        """
        expect_no_field(what, given, _GET)
        if self.tree is not None:
            return self.tree.flattened(what, given)
        if isinstance(given, Mapping):
            return self._joined(what, given)
        return self._converted(what, given, self.given_size)

    def _joined(self, what: str, given: Any) -> Array:
        if self.parameters is None:
            raise TypeError(f"{what} must be an array like x0, which has no names; got {type(given).__name__}")
        flat = arrays.empty(self.size, self.flat.dtype, like=self.flat)
        for piece in self.parameters.pieces:
            if piece.name not in given:
                raise ValueError(f"{what} by name must have all tensors; {piece.name!r} is missing")
            values = self._converted(f"{what} of {piece.name!r}", given[piece.name], piece.size)
            flat[piece.start : piece.start + piece.size] = values
        return flat

    def _converted(self, what: str, given: Any, size: int) -> Array:
        found = array_of_numbers(what, given, like=self.flat)
        if found.dtype.kind == "c":
            raise TypeError(f"{what} must be an array of real numbers, got {shown(given)}")
        if found.size != size:
            more = " on this rank: give the values that it owns, without ghosts or a halo" * self.has_fields
            raise ValueError(f"{what} has {found.size} elements of shape {found.shape}, but x0 has {size}{more}")
        return arrays.contiguous(found.reshape(-1), self.flat.dtype)  # a column of a matrix is flat, and has gaps


class FieldOfTerm:
    """The array of the unknowns that a term is of: its place in `Unknowns.flat`, and this rank's part of it.

    Of several arrays `name` says which one. `kind` is the class of the term, for messages; with `needs_grid` an array
    that is cut must be a grid, and `shape` is that of a flat one. `mesh` is that of slabs. Raises TypeError or
    ValueError if there is no such array, or it has another form.
    """

    def __init__(
        self,
        kind: str,
        name: str | None,
        unknowns: Unknowns,
        mesh: Any,
        *,
        needs_grid: bool = False,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        named, tree = unknowns.parameters, unknowns.tree
        specs = unknowns.specs if named is None else named.local
        names = [spec.name for spec in specs]
        if name is None and len(names) != 1:
            raise ValueError(f"there are {len(names)} arrays; give {kind} the name of one of them, name=...")
        if name is not None and name not in names:
            raise ValueError(f"{kind}: x0 has no array {shown(name)}; there are {', '.join(names)}")
        place = 0 if name is None else names.index(name)
        if tree is not None:
            tree.leaves[place].expect_real(kind)
        spec, part = specs[place], unknowns.field(place)
        self._kind, self._named, self._part, self._mesh = kind, named, part, mesh
        self.name: str = spec.name
        self.is_cut = part is not None or (spec.is_split and unknowns.is_split)
        self.start: int = unknowns.start_of(place) if named is None else named.layout.piece_of[spec.name].start
        self.shape: tuple[int, ...] = spec.shape  # of the whole array
        self.box: Box = whole_box(spec.shape)  # of this rank
        if part is not None and part.parts:
            self.box = part.parts[part.ranks.rank]
        elif self.is_cut and named is not None:
            if mesh is None:
                raise ValueError(f"{spec.name!r} is cut over tensor ranks: give their mesh=")
            self.box = named.box(spec.name)
        if part is not None and not part.is_grid and (needs_grid or part.rearrangement is not None):
            raise ValueError(
                f"{kind} of a Partition needs {'a grid' if needs_grid else 'its order'}: make it with shape= and box="
                f"{'' if needs_grid else ', or without ids'}"
            )
        if shape is not None:
            is_flat = not self.is_cut and sum(extent != 1 for extent in self.shape) < 2
            if prod(shape) != prod(self.shape) or (shape != self.shape and not is_flat):
                way = "give one of as many elements" if is_flat else "leave shape= out"
                raise ValueError(f"{kind}: shape={shape}, but the array has the shape {self.shape}: {way}")
            self.shape, self.box = shape, self.box if self.is_cut else whole_box(shape)
        self.local_shape = box_shape(self.box)
        self.size = prod(self.local_shape)

    def partition(self) -> Any:
        """The Partition of the array, if it is cut.  Collective over the mesh."""
        if not self.is_cut or self._part is not None:
            return self._part
        from mpishard.parameters.partition import Partition  # with MPI

        return Partition(self._named[self.name], self._mesh, shape=self.shape, box=self.box)

    def values(self, what: str, given: Any, least: float = -np.inf, most: float = np.inf) -> np.ndarray:
        """A number or array of the user's, checked, for each element of this rank, flat in float64."""
        try:
            found = np.asarray(arrays.to_host(given))
            if found.dtype.kind not in "biuf":
                raise TypeError
            found = found.astype(np.float64)
        except (TypeError, ValueError):
            raise TypeError(f"{self._kind}: {what}={shown(given)} must be a number or an array of real ones") from None
        if found.ndim and found.shape not in (self.local_shape, (self.size,)):
            raise ValueError(
                f"{self._kind}: {what} has the shape {found.shape}, but the array {self.local_shape}; give an array of "
                "this shape, or a flat one as long"
            )
        wrong = ~((found >= least) & (found <= most) & np.isfinite(found))
        if wrong.any():
            sides = f", and from {least:g} to {most:g}" if least > -np.inf else ""
            raise ValueError(f"{self._kind}: {what} has the value {found[wrong].flat[0]:g}; it must be finite{sides}")
        return np.broadcast_to(found.reshape(-1), self.size)


def _real_array(x0: Any) -> Array:
    """The start as an array of float32 or float64, with at least one dimension."""
    expect_no_field("x0", x0, "Partition.of(x0, mesh)")
    values = array_of_numbers("x0", x0)
    if values.dtype.kind == "c":
        raise TypeError(f"x0 must be an array of real numbers, got {values.dtype} in {type(x0).__name__}")
    values = values if values.ndim else values.reshape(1)
    return values if values.dtype in arrays.FLOATS else values.astype(np.float64)
