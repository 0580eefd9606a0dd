"""Terms that regularise a field on a grid: Tikhonov's, of three orders, and total variation, smoothed.

A term is the integral over the grid of a density of each cell, which depends on differences of the cell and its
neighbours.  Every element of its gradient is computed in the same order however the field is cut, and its value is
summed exactly, so that the bits of both do not depend on the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np

from mpishard.arguments import integer, number, shown
from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.errors import OneRank, raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.inverse.functions import TERMS, world_of
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
from mpishard.inverse.unknowns import Unknowns, has_names
from mpishard.layout.tensors import ParameterSpec
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
        Multiplies the density, if it is an array cell by cell; finite and not negative.
    spacing : float or sequence of float
        Between cells, in each dimension.  A density is multiplied by the product, the volume of a cell.
    reference : array, optional
        It is subtracted from the field first; default: 0.
    mask : array of bool, optional
        True for cells that count.  A difference counts if all of its cells do.
    shape : tuple of int, optional
        Of the field, if it is given as a flat array; of this rank's part of it.
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

    def __post_init__(self) -> None:
        if np.ndim(self.weight) == 0:
            object.__setattr__(self, "weight", number("weight", self.weight, least=0))
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
            smallest, largest = _range(self.weight)
            with raised_on_all(self._axis):
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
        ValueError
            If `x` does not have the shape of the term, on a mesh also if a rank has too few rows.
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
        ValueError
            As for `value_and_gradient`.
        """
        cells = _Cells(self, x, self._field(x))
        moved = cells.extended(direction.reshape(cells.shape).astype(np.float64))
        return cells.gradient(self._bends(cells.differences(cells.field), cells.differences(moved)))

    def _field(self, x: Array) -> Array:
        """The field less the reference, in float64 on its grid."""
        field = x.reshape(x.shape if self.shape is None else self.shape).astype(np.float64)
        if len(self.spacing) not in (1, field.ndim):
            raise ValueError(f"spacing has {len(self.spacing)} numbers, but the field has {field.ndim} dimensions")
        if self.reference is not None:
            field -= self.reference.reshape(field.shape)
        return field


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


def _range(values: Array) -> tuple[float, float]:
    """The smallest and the largest value, NaN if one is NaN; zeros for an empty array."""
    values = values if hasattr(values, "min") else np.asarray(values)
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _squares(ones: list[Array], others: list[Array]) -> Array:
    """The sum over dimensions of products, in their order."""
    total = ones[0] * others[0]
    for one, other in zip(ones[1:], others[1:], strict=True):
        total = total + one * other
    return total


# Functions with terms that regularise: each term counts once, whatever samples and ranks there are.


def regularized(
    function: Callable[..., Any],
    terms: RegularizationTerm | Sequence[RegularizationTerm],
    *,
    mesh: Mesh | None = None,
    reduction: str | None = None,
) -> Callable[..., Any]:
    """A function with terms added, of which each counts once, however many samples and ranks there are.

    The function that it returns is collective where a term is.

    Parameters
    ----------
    function : callable
        As `minimize` takes it, ``function(x)`` or ``function(x, samples)``; or as an OptimizationProblem does,
        ``function(parameters, samples, gradients) -> loss``: to the loss and gradient of each sample every term is
        added, so that the mean over samples has it once, along with them in every order.
    terms : RegularizationTerm or sequence of them
        What is added.
    mesh : Mesh, optional
        The mesh of `minimize`: for ``reduction="sum"``, and for fields of a FlatParameters that are cut over its tensor
        axis, unless the term has a mesh, a `partition` or an `exchange`.  Then making the function is collective over
        this axis, if a term has an array of weights.
    reduction : {None, "sum"}
        That of `minimize`: with ``"sum"`` one data rank adds the terms, with `samples` that of the first one.

    Returns
    -------
    callable
        Of the form of `function`.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, or a term has another mesh.  The function raises ValueError where a term does not fit
        the way in which its field is cut.

    Notes
    -----
    `minimize` takes the sum of a function over its N samples, and a term is added to the sum; an OptimizationProblem
    takes the mean, and a term is added to the mean.  The minimum is the same if the weight in `minimize` is N times
    that in the problem.

    Examples
    --------
    >>> import numpy as np
    >>> from mpishard import Tikhonov
    >>> fun = regularized(lambda x: (0.0, np.zeros(3)), Tikhonov(weight=2.0))
    >>> fun(np.array([0.0, 1.0, 3.0]))
    (5.0, array([-2., -2.,  4.]))
    """
    chosen = list(terms) if isinstance(terms, Sequence) else [terms]
    if not callable(function) or not all(isinstance(term, RegularizationTerm) for term in chosen):
        raise TypeError(f"regularized needs a function and terms, got {shown(function)} and {shown(terms)}")
    if reduction not in (None, "sum") or (reduction == "sum" and mesh is None):
        raise ValueError(f'reduction={shown(reduction)} must be None, or "sum" with a mesh')
    world_of(mesh)  # raises TypeError for what is no mesh
    for term in chosen:
        if mesh is not None and term.mesh is not None and term.mesh.tensor.size != mesh.tensor.size:
            raise ValueError(
                f"{type(term).__name__} has the mesh {term.mesh.sizes}, and regularized {mesh.sizes}; "
                "leave mesh= out of the term"
            )
    summed = mesh is not None and reduction == "sum"
    pairs = [(term, _over(term, mesh)) for term in chosen]

    def for_minimize(x: Any, *samples: np.ndarray) -> tuple[float, Any]:
        # The terms come with the first sample, or of parts of a sum with the first data rank.
        if 0 not in samples[0] if samples else mesh is not None and summed and mesh.data.rank:
            value, given = function(x, *samples)
            return value, given
        # A copy, unless x has names: the function may change the point that it is given.  A rank may have no values.
        unknowns = Unknowns(x, may_be_empty=True)
        value, given = function(x, *samples)
        gradient = unknowns.vector("the gradient", given).copy()
        for pair in pairs:
            term = _fitting(x, *pair)
            field, start = _array_and_start(unknowns, x, term)
            added, slope = term.value_and_gradient(field)
            # Every tensor rank has the value of the whole field, unless there is an exchange.
            if not (summed and term.exchange is None and _tensor_rank(x, term)):
                value = value + added
            if not (summed and _is_partial(x, term) and _tensor_rank(x, term)):
                gradient[start : start + slope.size] += slope.reshape(-1)
        return value, unknowns.like_x0(gradient)

    def for_problem(x: Any, samples: np.ndarray, gradients: Any) -> float:
        if summed:
            raise ValueError(
                'reduction="sum" is for minimize; each data rank adds the terms to its samples of an '
                "OptimizationProblem, so leave it out of regularized"
            )
        loss = function(x, samples, gradients)
        for pair in pairs:
            term = _fitting(x, *pair)
            if not (len(samples) or term.mesh is not None):
                continue
            added, slope = term.value_and_gradient(_tensor(x, term))
            if len(samples) and has_names(x):
                if not (_is_partial(x, term) and _tensor_rank(x, term)):
                    gradients[_name(x, term)] += len(samples) * slope
            elif len(samples):
                gradients += len(samples) * slope
            loss = loss + len(samples) * added
        return loss

    def with_terms(x: Any, *rest: Any) -> Any:
        return for_minimize(x, *rest) if len(rest) < 2 else for_problem(x, *rest)

    setattr(with_terms, TERMS, reduction)
    return with_terms


def _over(term: RegularizationTerm, mesh: Mesh | None) -> RegularizationTerm:
    """The term for a field that is cut over the tensor axis of the mesh, unless it says itself how it is cut."""
    known = mesh is None or any(each is not None for each in (term.mesh, term.partition, term.exchange))
    return term if known else replace(term, mesh=mesh)


def _fitting(x: Any, term: RegularizationTerm, on_mesh: RegularizationTerm) -> RegularizationTerm:
    """The term for a whole field, or `on_mesh` for one that is cut over tensor ranks; ValueError if it does not fit."""
    if not has_names(x):
        shared = on_mesh.mesh is not None and on_mesh.mesh.tensor.size > 1 and term.exchange is None
        if shared and term.halo:
            raise ValueError(
                f"{type(term).__name__} takes differences, and those across the cuts of a Partition would be missing; "
                "give it partition="
            )
        return on_mesh if shared else term
    if x.place.tensor_size == 1:
        return term
    spec, place, kind = _spec(x, term), x.place, type(term).__name__
    mesh = on_mesh.mesh
    if mesh is not None and (mesh.tensor.size, mesh.tensor.rank) != (place.tensor_size, place.tensor_rank):
        raise ValueError(f"{kind} has the mesh {mesh.sizes}, but x0 is cut over {place.tensor_size} tensor ranks")
    if spec.tensor_dim is None:
        if term.mesh is not None:
            raise ValueError(
                f"{kind} has a mesh, but {spec.name!r} is whole on all tensor ranks; leave mesh= out of it"
            )
        return term
    if mesh is None and term.exchange is None:
        raise ValueError(
            f"{spec.name!r} is cut over {place.tensor_size} tensor ranks, and {kind} has no mesh, so it would miss the "
            "differences across the cuts; give mesh= to regularized, or to the term"
        )
    if spec.tensor_dim and term.halo:
        raise ValueError(
            f"{spec.name!r} is cut along dimension {spec.tensor_dim}, but {kind} takes slabs along dimension 0; give "
            "its ParameterSpec tensor_dim=0"
        )
    return on_mesh


def _tensor_rank(x: Any, term: RegularizationTerm) -> int:
    """The tensor rank that has this field; 0 if that is not known."""
    if has_names(x):
        return int(x.place.tensor_rank)
    return term._axis.rank


def _is_partial(x: Any, term: RegularizationTerm) -> bool:
    """Return True if the gradient of this field is summed over tensor ranks."""
    return has_names(x) and _spec(x, term).partial


def _spec(x: Any, term: RegularizationTerm) -> ParameterSpec:
    """What all ranks know of the field of a term in parameters with names."""
    name, specs = _name(x, term), {spec.name: spec for spec in x.local}
    if name not in specs:
        raise ValueError(f"{type(term).__name__}: x0 has no array {name!r}; there are {', '.join(specs)}")
    found: ParameterSpec = specs[name]
    return found


def _array_and_start(unknowns: Unknowns, x: Any, term: RegularizationTerm) -> tuple[Array, int]:
    """The array of a term, and its place in a flat gradient."""
    tree = unknowns.tree
    if tree is None:
        values = x if has_names(x) else unknowns.flat.reshape(np.shape(x))
        return _tensor(values, term), x.layout.piece_of[_name(x, term)].start if has_names(x) else 0
    leaves = {leaf.name: leaf for leaf in tree.leaves}
    name = _name(leaves, term)
    if name not in leaves:
        raise ValueError(f"{type(term).__name__}: x0 has no array {name!r}; there are {', '.join(leaves)}")
    leaf = leaves[name]
    if leaf.is_complex:
        raise TypeError(f"{type(term).__name__} is for real numbers, and x0 is complex; give its parts as two arrays")
    return unknowns.flat[leaf.start : leaf.start + leaf.size].reshape(leaf.shape), leaf.start


def _tensor(x: Any, term: RegularizationTerm) -> Array:
    return x[_name(x, term)] if has_names(x) else x


def _name(x: Any, term: RegularizationTerm) -> str:
    if term.name is None and len(x) != 1:
        raise ValueError(f"there are {len(x)} tensors; give {type(term).__name__} the name of one of them, name=...")
    return term.name if term.name is not None else next(iter(x))
