"""Total variation itself, which has no gradient where neighbours are equal: a proximal method minimises it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np

from mpishard.arguments import integer, number
from mpishard.backend.dual_sweeps import DualField, dual_sweeps
from mpishard.inverse.nonsmooth import PenaltyOfArrays, ProximalTerm, TermOfArray
from mpishard.inverse.stencils import Halo, forward, forward_adjoint, grown, sum_of_cells
from mpishard.inverse.unknowns import FieldOfTerm, Unknowns
from mpishard.layout.boxes import box_shape

Array = Any
_HALO = 8  # cells of the neighbours of a box: so many sweeps go without a further exchange
_CHECKED = 16  # sweeps between two looks at the gap, more of them where many sweeps were needed before
_GAP = 0.1  # part of what a proximal step gains that its gap may be
_MOST = 2048  # sweeps of a proximal step


@dataclass(frozen=True)
class TotalVariation(ProximalTerm):
    """The length of the gradient of a field, exactly: `weight` times the integral of ``|grad (x - reference)|``.

    The gradient is that of differences to the next cells (isotropic; Rudin, Osher and Fatemi, 1992).  At the minimum
    the field is constant in pieces, with edges between them.  It has no gradient where neighbours are equal, so that it
    is a term for `minimize` by L-BFGS-B, which then takes proximal steps: see `LBFGSB`.  `SmoothedTotalVariation` is
    for other methods.

    Parameters
    ----------
    weight : float or array
        Finite and not negative; an array has a weight for each cell, and the shape of the field, or is flat.
    reference : float or array, optional
        It is subtracted from the field first; finite; default: 0.
    spacing : float or sequence of float
        Between cells, in each dimension.  A cell has their product as its volume.
    mask : array of bool, optional
        True for cells that count.  A difference counts if both of its cells do.
    shape : tuple of int, optional
        Of the field, if `x0` has it as a flat array.
    name : str, optional
        Of the field, where `x0` has several arrays.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid; arrays are checked by `minimize`, which has `x0`, on all ranks.

    Notes
    -----
    A field has one to three dimensions.  `minimize` finds by itself how it is cut: in slabs of a FlatParameters, or
    boxes of a Partition; arrays are of this rank's part then.

    References
    ----------
    L. I. Rudin, S. Osher, E. Fatemi: Nonlinear total variation based noise removal algorithms.  Physica D 60, 259-268
    (1992).  A. Beck, M. Teboulle: Fast gradient-based algorithms for constrained total variation image denoising and
    deblurring problems.  IEEE Transactions on Image Processing 18, 2419-2434 (2009): the proximal steps.

    Examples
    --------
    >>> import numpy as np
    >>> import mpishard
    >>> noisy = np.array([0.1, -0.1, 0.0, 2.1, 1.9, 2.0])
    >>> def misfit(x):
    ...     return 0.5 * ((x - noisy) ** 2).sum(), x - noisy
    >>> result = mpishard.minimize(mpishard.regularized(misfit, mpishard.TotalVariation(0.3)), np.zeros(6))
    >>> result.x.round(3)
    array([0.1, 0.1, 0.1, 1.9, 1.9, 1.9])
    """

    _: KW_ONLY
    spacing: Any = 1.0
    mask: Any = None
    shape: tuple[int, ...] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = self.spacing if isinstance(self.spacing, Sequence | np.ndarray) else [self.spacing]
        spacing = tuple(number("TotalVariation: spacing", step, above=0) for step in steps)
        object.__setattr__(self, "spacing", spacing)
        if self.shape is not None:
            extents = self.shape if isinstance(self.shape, Sequence | np.ndarray) else (self.shape,)
            shape = tuple(integer("TotalVariation: shape", extent, least=1) for extent in extents)
            object.__setattr__(self, "shape", shape)

    @staticmethod
    def _penalty(terms: Sequence[Any], unknowns: Unknowns, mesh: Any) -> PenaltyOfArrays:
        return TotalVariations(terms, unknowns, mesh)


class TotalVariations(PenaltyOfArrays):
    """Total variation of one or several fields of the unknowns. `mesh` is that of slabs."""

    kinds = "TotalVariation"

    def __init__(self, terms: Sequence[TotalVariation], unknowns: Unknowns, mesh: Any) -> None:
        self._fields = [_Field(term, unknowns, mesh) for term in terms]
        super().__init__(self._fields, unknowns)
        self.duals = max(len(field.shape) for field in self._fields)

    @property
    def text(self) -> str:
        return "; ".join(f"TotalVariation of {field.shape} with spacing {field.spacing}" for field in self._fields)

    def proximal_point(
        self,
        x: np.ndarray,
        center: np.ndarray,
        alpha: float,
        dual: np.ndarray,
        sides: tuple[np.ndarray, np.ndarray],
        floor: float,
    ) -> None:
        before = np.minimum(np.maximum(x, sides[0]), sides[1])
        x[:] = np.minimum(np.maximum(center, sides[0]), sides[1])
        for field in self._fields:
            field.proximal_point(before, x, center, alpha, dual, sides, floor)

    def subgradient(
        self, x: np.ndarray, gradient: np.ndarray, dual: np.ndarray, sides: tuple[np.ndarray, np.ndarray]
    ) -> np.ndarray:
        found = gradient.copy()
        for field in self._fields:
            field.add_adjoint(dual, found)
        return found

    def gap(self, x: np.ndarray, dual: np.ndarray) -> float:
        return math.fsum(field.gap(x, dual) for field in self._fields)


class _Field(TermOfArray):
    """A field that has total variation: where it is in the unknowns, and this rank's part of its grid.

    Arrays of its grid are float64 in three dimensions, of which the first ones may have one cell.
    """

    def __init__(self, term: TotalVariation, unknowns: Unknowns, mesh: Any) -> None:
        field = FieldOfTerm("TotalVariation", term.name, unknowns, mesh, needs_grid=True, shape=term.shape)
        super().__init__(field)
        self._box, self.shape = field.box, field.shape
        if len(self.shape) > 3 or not self.shape:
            raise ValueError(f"TotalVariation is of one to three dimensions, and the field has the shape {self.shape}")
        if len(term.spacing) not in (1, len(self.shape)):
            raise ValueError(
                f"TotalVariation: spacing has {len(term.spacing)} numbers, but the field {len(self.shape)} dimensions; "
                "give one for each, or one for all"
            )
        self.spacing = term.spacing * (len(self.shape) // len(term.spacing))
        own = box_shape(self._box)
        self._weight = field.values("weight", term.weight, 0.0).reshape(own)
        self._mask = None if term.mask is None else field.values("mask", term.mask, 0.0, 1.0).reshape(own)
        if self._mask is not None and (self._mask % 1).any():
            odd = self._mask[self._mask % 1 > 0][0]
            raise ValueError(
                f"TotalVariation: mask has the value {odd:g}; it must be of True and False, and weight takes the "
                "factors of cells"
            )
        self._reference = field.values("reference", 0.0 if term.reference is None else term.reference).reshape(own)
        self._flat3 = (1,) * (3 - len(self.shape))  # in front of a shape
        self._halo: Halo | None = None
        self._place: tuple[slice | EllipsisType, ...] = (...,)
        self._scale = self._bound = np.zeros(0)

    @property
    def elements(self) -> np.ndarray:
        mask = np.ones(self.field.size) if self._mask is None else self._mask.reshape(-1)
        return np.array([self._weight.reshape(-1), self._reference.reshape(-1), mask])

    def begin(self) -> None:
        box = self._box
        partition = self.field.partition()
        if partition is not None and partition.ranks.size > 1:
            self._ranks, self._halo = partition.ranks, Halo(partition, _HALO)
            self._place = (*(slice(None),) * len(self._flat3), *self._halo.place)
            box = grown(self._box, _HALO, self.shape)
        weight, *mask = self._extended(*(each for each in (self._weight, self._mask) if each is not None))
        self._bound = np.ascontiguousarray(weight * prod(self.spacing))
        self._scale = np.zeros((len(self.shape), *weight.shape))
        for scale, dim, step, (start, stop), extent in zip(
            self._scale, self._dims, self.spacing, box, self.shape, strict=True
        ):
            inside = np.arange(start, stop) + 1 < extent
            scale += np.moveaxis((inside / step).reshape(-1, 1, 1), 0, dim)
            if mask:
                scale *= mask[0] * (mask[0] + forward(mask[0], dim, 1.0))

    @property
    def _dims(self) -> range:
        """The dimensions of the grid among the three of arrays."""
        return range(3 - len(self.shape), 3)

    def _own(self, flat: np.ndarray) -> np.ndarray:
        """This rank's cells of what it has of the unknowns, as a view."""
        return flat[..., self.part].reshape(*flat.shape[:-1], *self._flat3, *box_shape(self._box))

    def _extended(self, *own: np.ndarray) -> list[np.ndarray]:
        """Arrays with cells of the neighbours.  Collective over the ranks that share the field."""
        boxes = [np.ascontiguousarray(each).reshape(box_shape(self._box)) for each in own]
        if self._halo is not None:
            boxes = self._halo.exchange(*boxes)
        return [box.reshape(*self._flat3, *box.shape) for box in boxes]

    def _sum(self, *cells: np.ndarray) -> list[float]:
        """The sums over the whole grid of arrays with cells of the neighbours.  Collective."""
        return [sum_of_cells(self._ranks, np.ascontiguousarray(each[self._place])) for each in cells]

    def _adjoint(self, dual: np.ndarray) -> np.ndarray:
        pairs = zip(dual * self._scale, self._dims, strict=True)
        first, *others = (forward_adjoint(each, dim, 1.0) for each, dim in pairs)
        for other in others:
            first += other
        return first

    def _densities(self, field: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The total variation of each cell, and its differences."""
        differences = np.array([forward(field, dim, 1.0) for dim in self._dims]) * self._scale
        return self._bound * np.sqrt((differences * differences).sum(0)), differences

    def value(self, x: np.ndarray) -> float:
        (field,) = self._extended(self._own(x) - self._reference)
        return self._sum(self._densities(field)[0])[0]

    def gap(self, x: np.ndarray, dual: np.ndarray) -> float:
        field, *components = self._extended(self._own(x) - self._reference, *self._components(dual))
        densities, differences = self._densities(field)
        return max(self._sum(densities - (np.array(components) * differences).sum(0))[0], 0.0)

    def add_adjoint(self, dual: np.ndarray, to: np.ndarray) -> None:
        found = self._adjoint(np.array(self._extended(*self._components(dual))))
        self._own(to)[...] += found[self._place]

    def _components(self, dual: np.ndarray) -> np.ndarray:
        return self._own(dual)[: len(self.shape)]

    def proximal_point(
        self,
        before: np.ndarray,
        x: np.ndarray,
        center: np.ndarray,
        alpha: float,
        dual: np.ndarray,
        sides: tuple[np.ndarray, np.ndarray],
        floor: float,
    ) -> None:
        """Write the proximal point to the cells of `x`, and its dual field to `dual`, from those at hand."""
        given = [self._own(each) - self._reference for each in (before, center, *sides)]
        start, middle, lower, upper = self._extended(*given)
        inverse, step = 1 / alpha, alpha / sum(4 / step**2 for step in self.spacing)
        components = self._components(dual)
        last, ahead, work = np.array(components), np.array(components), np.empty(middle.shape)
        (value,) = self._sum(self._densities(start)[0])
        t, sweeps, least = 1.0, 0, math.inf
        while True:
            (last,) = self._exchanged(last)
            field = np.minimum(np.maximum(middle - inverse * self._adjoint(last), lower), upper)
            densities, differences = self._densities(field)
            nearer = 0.5 * alpha * ((start - field) * (start + field - 2 * middle))
            gap, gain = self._sum(densities - (last * differences).sum(0), nearer - densities)
            if gap <= max(_GAP * (gain + value), floor) or sweeps >= _MOST or not gap < math.inf:
                break
            last = last[(slice(None), *self._place)]
            if gap > least:  # the momentum leads away
                t, ahead = 1.0, last
            least = gap
            count = max(_CHECKED, sweeps // 4 // _CHECKED * _CHECKED)
            block = count if self._halo is None else _HALO
            for _ in range(0, count, block):
                last, ahead = self._exchanged(last, ahead)
                dual_field = DualField(last, ahead, self._scale, self._bound)
                t = dual_sweeps(dual_field, work, middle, (lower, upper), inverse, step, t, block)
                last, ahead = (each[(slice(None), *self._place)] for each in (last, ahead))
            sweeps += count
        found = field[self._place] + self._reference
        self._own(x)[...] = np.minimum(np.maximum(found, self._own(sides[0])), self._own(sides[1]))
        components[...] = last[(slice(None), *self._place)]

    def _exchanged(self, *duals: np.ndarray) -> list[np.ndarray]:
        """Copies of dual fields with cells of the neighbours, contiguous.  Collective."""
        found = iter(self._extended(*(component for dual in duals for component in dual)))
        return [np.array([next(found) for _ in dual]) for dual in duals]
