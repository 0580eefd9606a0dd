"""Terms that regularise a field on a grid: Tikhonov's, of three orders, and total variation, smoothed.

A term is the integral over the grid of a density of each cell, which depends on differences of the cell and its
neighbours.  Every element of its gradient is computed in the same order however the field is cut, and its value is
summed exactly, so that the bits of both do not depend on the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Any, ClassVar

import numpy as np

from mpishard.arguments import integer, number, shown, without_dimensions
from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.errors import OneRank, raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.inverse.stencils import (
    difference_mask,
    exchange_halo,
    exchange_rows,
    forward,
    forward_adjoint,
    second,
    second_adjoint,
    sum_of_cells,
)
from mpishard.parameters.partition import Partition

Array = Any


# The terms.

Exchange = Callable[[Array], tuple[Array | None, Array | None]]


@dataclass(frozen=True, kw_only=True)
class RegularizationTerm(ABC):
    """A term that regularises a field on a grid.

    Parameters
    ----------
    weight : float or array
        Multiplies the density, if it is an array cell by cell; finite and not negative.  Arrays have the shape of the
        field, or are flat.
    spacing : float or sequence of float
        Between cells, in each dimension.  A density is multiplied by the product, the volume of a cell.
    reference : float or array, optional
        It is subtracted from the field first; finite; default: 0.
    mask : array of bool, optional
        True for cells that count.  A difference counts if all of its cells do.
    shape : tuple of int, optional
        Of the field, if it is given as a flat array; of this rank's part of it.  Default: that of the array, in
        `minimize` that of `x0`.
    name : str, optional
        Of the field, in functions of a FlatParameters; default: its only tensor.
    mesh : Mesh, optional
        The field is cut along its first dimension over the tensor axis, a slab a rank.  Methods are collective over
        this axis then, as is making a term with an array of weights; arrays are parts of this rank, and the value is
        that of the whole field, on every rank.  Default: that of `regularized`, if the field is cut.
    partition : Partition, optional
        The start of a field that the application has cut in boxes of a grid; or in any way, for a term without
        differences.  Methods and arrays are then as with a `mesh`.
    exchange : callable, optional
        For a field that is cut in another way along its first dimension: ``exchange(slab) -> (before, after)`` returns
        the neighbours' `halo` rows next to this slab, or None at an end.  The value is that of the slab.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    """

    weight: Any = 1.0
    spacing: Any = 1.0
    reference: Any = None
    mask: Any = None
    shape: tuple[int, ...] | None = None
    name: str | None = None
    mesh: Mesh | None = None
    partition: Partition | None = None
    exchange: Exchange | None = None
    _checked: ClassVar[tuple[int, ...] | None]  # of each term: the shape of the field for which arrays were checked

    def __post_init__(self) -> None:
        object.__setattr__(self, "_checked", None)
        for name in ("reference", "mask"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, arrays.as_array(getattr(self, name)))
        if self.shape is not None:
            extents = self.shape if isinstance(self.shape, Sequence | np.ndarray) else (self.shape,)
            kind = type(self).__name__
            shape = tuple(integer(f"{kind}: shape", extent, least=0) for extent in extents)
            object.__setattr__(self, "shape", shape)
        if np.ndim(self.weight) == 0:
            object.__setattr__(self, "weight", number("weight", without_dimensions(self.weight), least=0))
        steps = self.spacing if isinstance(self.spacing, Sequence | np.ndarray) else [self.spacing]
        object.__setattr__(self, "spacing", tuple(number("spacing", step, above=0) for step in steps))
        if self.mesh is not None and (self.exchange is not None or not isinstance(self.mesh, Mesh)):
            raise TypeError(f"mesh={shown(self.mesh)} must be a Mesh, and be given without exchange")
        if self.partition is not None:
            if not isinstance(self.partition, Partition) or self.mesh is not None or self.exchange is not None:
                given = shown(self.partition)
                raise TypeError(f"partition={given} must be a Partition, and be given without mesh and exchange")
            if self.halo and not self.partition.is_grid:
                raise ValueError(
                    f"{type(self).__name__} takes differences on a grid, and the partition has none: make it with "
                    "shape= and box=, or take order=0"
                )
        if np.ndim(self.weight):
            object.__setattr__(self, "weight", arrays.as_array(self.weight))
            with raised_on_all(self._axis):
                self._check_numbers("weight")
                smallest, largest = _range(self.weight)
                if not 0 <= smallest <= largest < np.inf:
                    raise ValueError(f"weight is from {smallest:g} to {largest:g}, and must be finite and not negative")

    @property
    def _axis(self) -> Axis | OneRank:
        """The ranks that share the field."""
        if self.partition is not None:
            return self.partition.ranks
        return OneRank() if self.mesh is None else self.mesh.tensor

    @property
    @abstractmethod
    def halo(self) -> int:
        """Rows of the neighbours that a slab needs on each side; cells, that a box needs."""

    @abstractmethod
    def _density(self, differences: list[Array]) -> Array:
        """The density of each cell."""

    @abstractmethod
    def _slopes(self, differences: list[Array]) -> list[Array]:
        """The derivative of the density by each difference."""

    @abstractmethod
    def _bends(self, differences: list[Array], moved: list[Array]) -> list[Array]:
        """The derivative of `_slopes` in the direction of other differences."""

    @property
    @abstractmethod
    def _order(self) -> int:
        """The order of the differences."""

    def value_and_gradient(self, x: Array) -> tuple[float, Array]:
        """Value and gradient at a field.

        Parameters
        ----------
        x : array
            The field, or this rank's part of it.

        Returns
        -------
        (float, array)
            The gradient is new, of the shape and dtype of `x`.

        Raises
        ------
        ValueError, TypeError
            If `x` does not have the shape of the term, or is complex; on a mesh also if a rank has too few rows.
        """
        cells = _Cells(self, x, self._field(x))
        differences = cells.differences(cells.field)
        gradient = cells.gradient(self._slopes(differences))
        densities = cells.own(cells.weight * self._density(differences))
        return sum_of_cells(self._axis, densities) * cells.volume, gradient

    def product(self, x: Array, direction: Array) -> Array:
        """The Hessian at a field, times a direction.

        Parameters
        ----------
        x, direction : array
            Of one shape.

        Returns
        -------
        array
            New, of the shape and dtype of `x`.

        Raises
        ------
        ValueError, TypeError
            As for `value_and_gradient`.
        """
        cells = _Cells(self, x, self._field(x))
        moved = cells.extended(direction.reshape(cells.shape).astype(np.float64))
        return cells.gradient(self._bends(cells.differences(cells.field), cells.differences(moved)))

    def _field(self, x: Array) -> Array:
        """The field less the reference, in float64 on its grid.  Collective."""
        # In each call: a rank that has joined a run must not agree alone.
        with raised_on_all(self._axis):
            if np.iscomplexobj(x):
                name = type(self).__name__
                raise TypeError(f"{name} is for real numbers, and the field is complex; give its parts as two arrays")
            if self._checked != x.shape:
                self._check_fits(x)
                object.__setattr__(self, "_checked", x.shape)
        field = x.reshape(x.shape if self.shape is None else self.shape).astype(np.float64)
        if self.reference is not None:
            field -= self.reference.reshape(field.shape if self.reference.ndim else ())
        return field

    def _check_numbers(self, name: str) -> None:
        """Raise TypeError if an array is not of real numbers."""
        given = getattr(self, name)
        if given.dtype.kind not in "biuf":
            raise TypeError(f"{type(self).__name__}: {name}={shown(given)} must be a number or an array of real ones")

    def _check_fits(self, x: Array) -> None:
        """Raise ValueError or TypeError if shape, spacing or an array do not fit a field."""
        kind, shape = type(self).__name__, tuple(x.shape if self.shape is None else self.shape)
        if prod(shape) != x.size:
            raise ValueError(f"{kind}: shape={shape} has {prod(shape)} cells, but the field {x.size}; give its own")
        check_shape(kind, shape, tuple(x.shape))
        if len(self.spacing) not in (1, len(shape)):
            raise ValueError(
                f"{kind}: spacing has {len(self.spacing)} numbers, but the field {len(shape)} dimensions; give one for "
                "each, or one for all"
            )
        for name in ("weight", "reference", "mask"):
            array = getattr(self, name)
            if array is None or isinstance(array, float):
                continue
            self._check_numbers(name)
            if tuple(array.shape) not in (shape, (x.size,)) and not (name == "reference" and array.ndim == 0):
                part = "" if isinstance(self._axis, OneRank) else " on this rank"
                raise ValueError(
                    f"{kind}: {name} has the shape {tuple(array.shape)}, but the field{part} {shape}; give an array of "
                    "this shape, or a flat one as long"
                )
            smallest, largest = _range(array)
            if name == "reference" and not -np.inf < smallest <= largest < np.inf:
                raise ValueError(f"{kind}: reference is from {smallest:g} to {largest:g}, and must be finite")
            if name == "mask" and not ((array == 0) | (array == 1)).all():
                raise ValueError(
                    f"{kind}: mask is from {smallest:g} to {largest:g}, and must be of True and False; weight takes "
                    "the factors of cells"
                )


class _Cells:
    """The field with the rows of its neighbours, and the weights of the differences."""

    def __init__(self, term: RegularizationTerm, x: Array, field: Array) -> None:
        self._term = term
        self._x = x
        self._own: tuple[slice | EllipsisType, ...] = (...,)  # where this rank's cells lie in the extended field
        self.shape: tuple[int, ...] = field.shape
        self.spacing: list[float] = list(term.spacing) * (field.ndim // len(term.spacing))
        self.volume: float = prod(self.spacing)
        self.field = self.extended(field)
        self.weight: Any = term.weight
        if np.ndim(term.weight):
            self.weight = self.extended(term.weight.reshape(field.shape).astype(np.float64))
        self._mask = None
        if term.mask is not None:
            self._mask = self.extended(term.mask.reshape(field.shape).astype(np.float64))

    def extended(self, field: Array) -> Array:
        """A field with the rows of the neighbours."""
        term = self._term
        if term.partition is not None and term.halo:
            field, self._own = exchange_halo(term.partition, field, term.halo)
            return field
        if term.mesh is not None:
            before, after = exchange_rows(term.mesh.tensor, field, term.halo)
        elif term.exchange is not None and term.halo:
            before, after = term.exchange(field)
        else:
            return field
        first = 0 if before is None else len(before)
        self._own = (slice(first, first + self.shape[0]),)
        rows = [part for part in (before, field, after) if part is not None]
        return arrays.module_of(field).concatenate(rows)

    def own(self, field: Array) -> Array:
        """A field without the rows of the neighbours."""
        return field[self._own]

    def differences(self, field: Array) -> list[Array]:
        """Differences of the term's order in each dimension; 0 where they do not count."""
        order = self._term._order
        if order == 0:
            found = [field]
        else:
            take = forward if order == 1 else second
            found = [take(field, dim, spacing) for dim, spacing in enumerate(self.spacing)]
        return [self._counted(each, dim) for dim, each in enumerate(found)]

    def gradient(self, slopes: list[Array]) -> Array:
        """The gradient by the field, from the derivatives by the differences."""
        order = self._term._order
        flows = [self._counted(self.weight * slope, dim) for dim, slope in enumerate(slopes)]
        if order:
            give = forward_adjoint if order == 1 else second_adjoint
            pairs = zip(flows, self.spacing, strict=True)
            flows = [give(flow, dim, spacing) for dim, (flow, spacing) in enumerate(pairs)]
        total = flows[0]
        for flow in flows[1:]:
            total = total + flow
        return (self.own(total) * self.volume).astype(self._x.dtype).reshape(self._x.shape)

    def _counted(self, differences: Array, dim: int) -> Array:
        if self._mask is None:
            return differences
        return differences * difference_mask(self._mask, dim, self._term._order)


@dataclass(frozen=True, kw_only=True)
class Tikhonov(RegularizationTerm):
    """Half of the squared differences of a field: ``weight / 2`` times the integral of ``|D (x - reference)|^2``.

    D is the identity (order 0), the gradient by differences of neighbours (order 1), or the second differences along
    each dimension (order 2).  (Tikhonov, 1963)

    Parameters
    ----------
    weight, spacing, reference, mask, shape, name, mesh, partition, exchange : as for `RegularizationTerm`
        Of any term.
    order : {1, 0, 2}
        The order of the differences.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    """

    order: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "order", integer("order", self.order, least=0))
        if self.order > 2:
            raise ValueError(f"order={self.order} must be 0, 1 or 2")

    @property
    def halo(self) -> int:
        """Rows of the neighbours that a slab needs on each side: as many as the order."""
        return self.order

    @property
    def _order(self) -> int:
        return self.order

    def _density(self, differences: list[Array]) -> Array:
        return 0.5 * _squares(differences, differences)

    def _slopes(self, differences: list[Array]) -> list[Array]:
        return differences

    def _bends(self, differences: list[Array], moved: list[Array]) -> list[Array]:
        return moved


@dataclass(frozen=True, kw_only=True)
class SmoothedTotalVariation(RegularizationTerm):
    """The smoothed length of the gradient of a field: `weight` times the integral of ``sqrt(|grad x|^2 + e^2) - e``.

    The gradient is that of differences to the next cells.  It lets edges be.  (Rudin, Osher and Fatemi, 1992; smoothed:
    Acar and Vogel, 1994)

    Parameters
    ----------
    weight, spacing, reference, mask, shape, name, mesh, partition, exchange : as for `RegularizationTerm`
        Of any term.
    epsilon : float
        Gradients that are much smaller are smoothed as by `Tikhonov`; above 0.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.
    """

    epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "epsilon", number("epsilon", self.epsilon, above=0))

    @property
    def halo(self) -> int:
        """Rows of the neighbours that a slab needs on each side: 1."""
        return 1

    @property
    def _order(self) -> int:
        return 1

    def _length(self, differences: list[Array]) -> Array:
        return np.sqrt(_squares(differences, differences) + self.epsilon * self.epsilon)

    def _density(self, differences: list[Array]) -> Array:
        # The root less epsilon, without cancellation where the differences are small.
        return _squares(differences, differences) / (self._length(differences) + self.epsilon)

    def _slopes(self, differences: list[Array]) -> list[Array]:
        length = self._length(differences)
        return [each / length for each in differences]

    def _bends(self, differences: list[Array], moved: list[Array]) -> list[Array]:
        length = self._length(differences)
        share = _squares(differences, moved) / (length * length)
        return [(other - each * share) / length for each, other in zip(differences, moved, strict=True)]


def check_shape(kind: str, shape: tuple[int, ...], own: tuple[int, ...]) -> None:
    """Raise ValueError if a term has the shape of another grid than an array of several dimensions."""
    if shape != own and sum(extent != 1 for extent in own) > 1:
        raise ValueError(f"{kind}: shape={shape}, but the array has the shape {own}: leave shape= out")


def _range(values: Array) -> tuple[float, float]:
    """The smallest and the largest value, NaN if one is NaN; zeros for an empty array."""
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _squares(ones: list[Array], others: list[Array]) -> Array:
    """The sum over dimensions of products, in their order."""
    total = ones[0] * others[0]
    for one, other in zip(ones[1:], others[1:], strict=True):
        total = total + one * other
    return total
