"""A prior of fields on grids: Matern's covariance, by an elliptic operator whose inverse is taken twice."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np

from mpishard.arguments import entries, integer, kind_of, number, shown
from mpishard.backend import array as arrays
from mpishard.backend.grid_sweeps import chebyshev_sweep
from mpishard.comm.agreement import opening
from mpishard.comm.axis import Axis
from mpishard.comm.errors import OneRank, raised_on_all
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.inverse.priors import Prior
from mpishard.inverse.stencils import Halo, forward, forward_adjoint, sum_of_cells
from mpishard.inverse.trees import is_tree
from mpishard.inverse.unknowns import has_names
from mpishard.layout.boxes import Box, box_shape, whole_box
from mpishard.layout.tensors import ParameterSpec
from mpishard.parameters.partition import Partition

Array = Any
# Limits of numbers of the user's.
_ABOVE = {"standard_deviation": 0, "mean": None}
# Cells of the neighbours on each side of a box: so many sweeps of a solve go without a further exchange.
_HALO = 8
# A solve ends where the error, relative to that at its start, is at most 2 to one more than this power.
_ERROR = -54
# The distance of the points of the trapezoidal rule in `_Elliptic.variance`.
_STEP = 0.2
# Further from both ends of an axis than so many e-foldings of the covariance an end is not felt.
_REACH = 22
# Cells of the longest correlation length: a solve takes up to 32 sweeps, and a number in memory, for each.
_LONGEST = 1 << 18


@dataclass(frozen=True, eq=False)
class BiLaplacianPrior(Prior):
    """A Gaussian prior of a field on a grid of one to three dimensions, with a correlation length.

    Its covariance is that of Matern, with the same standard deviation in all cells, or one for each.  It works on whole
    fields, and on the boxes and slabs that ranks share, with the same bits; then nothing of the size of the whole field
    is on a rank.  `laplace` finds by itself how the field is cut; for work of your own `on` does.  Products are then
    collective over the ranks that share the field.

    Parameters
    ----------
    shape : tuple of int
        The cells of the whole grid in each dimension, at most three.
    correlation_length : float or sequence of float
        The distance at which the correlation has fallen to about 0.14, in units of `spacing`; one number, or one for
        each dimension.
    spacing : float or sequence of float
        Between the cells, in each dimension.
    standard_deviation : float or array
        Of each cell; an array is like the unknowns, on boxes and slabs this rank's part.
    mean : float or array, optional
        Of each cell, likewise; default: 0.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.

    Notes
    -----
    The precision is ``R = S^-1 A A S^-1``, where ``A = 1 - div(K grad)`` has natural boundary conditions.  K is
    diagonal with ``l**2 / (8 nu)`` for the correlation length l and ``nu = 2 - d / 2`` in d dimensions; dimensions of
    one cell do not count.  For hIPPYlib's coefficients this means ``delta / gamma = 8 nu / l**2``.  S is diagonal, and
    gives each cell its standard deviation, exactly.  Without S the variance would be twice as large at an edge of the
    grid, and four times at a corner.  The slope across an edge is 0, so that cells near it are correlated somewhat
    more.  In three dimensions the correlation is exponential, in one and two it is smoother.

    A solve is Chebyshev's iteration, without dot products.  The number of its sweeps is known before: about 11, 19 or
    32 times the number of cells in a correlation length, in one, two or three dimensions.

    References
    ----------
    F. Lindgren, H. Rue, J. Lindström: An explicit link between Gaussian fields and Gaussian Markov random fields,
    Journal of the Royal Statistical Society B 73, 423-498, 2011.  Y. Daon, G. Stadler: Mitigating the influence of the
    boundary on PDE-based covariance operators, Inverse Problems and Imaging 12, 1083-1102, 2018.  G. H. Golub, R. S.
    Varga: Chebyshev semi-iterative methods, Numerische Mathematik 3, 147-168, 1961.

    Examples
    --------
    >>> import numpy as np
    >>> from mpishard import BiLaplacianPrior
    >>> prior = BiLaplacianPrior((40, 30), correlation_length=8.0, standard_deviation=0.5)
    >>> sample = prior.factor(np.random.default_rng(0).standard_normal((40, 30)))
    >>> np.allclose(prior.covariance(prior.precision(sample)), sample)
    True
    """

    shape: tuple[int, ...]
    _: KW_ONLY
    correlation_length: Any
    spacing: Any = 1.0
    standard_deviation: Any = 1.0
    mean: Any = None
    _partition: Partition | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        shape = tuple(integer("shape", extent, least=1) for extent in entries("shape", self.shape, "extents"))
        if not 1 <= len(shape) <= 3:
            raise ValueError(f"shape={shown(shape)} must have one, two or three dimensions")
        object.__setattr__(self, "shape", shape)
        for name in ("correlation_length", "spacing"):
            given = getattr(self, name)
            each = entries(name, given, "numbers") if np.ndim(given) else (given,) * len(shape)
            if len(each) != len(shape):
                raise ValueError(f"{name} has {len(each)} numbers, but the grid has {len(shape)} dimensions")
            object.__setattr__(self, name, tuple(number(name, length, above=0) for length in each))
        for length, step, extent in zip(self.correlation_length, self.spacing, shape, strict=True):
            if extent > 1 and length / step > _LONGEST:
                raise ValueError(
                    f"correlation_length={length:g} is {length / step:.3g} cells of spacing={step:g}, and may be at "
                    f"most {_LONGEST}; give both in the same units"
                )
        for name in ("standard_deviation", "mean"):
            given = getattr(self, name)
            if np.ndim(given) == 0 and not (name == "mean" and given is None):
                number(name, given, above=_ABOVE[name], otherwise="an array like the unknowns")
            object.__setattr__(self, name, copy.deepcopy(given))  # the user may go on with this array

    def on(self, x: Any, mesh: Mesh | None = None) -> BiLaplacianPrior:
        """This prior for unknowns like these, cut as they are.  Collective over the mesh.

        Parameters
        ----------
        x : array, FlatParameters or Partition
            One field, whole or this rank's part.
        mesh : Mesh, optional
            Its tensor ranks share the slabs of a FlatParameters.

        Returns
        -------
        BiLaplacianPrior
            Its `mean` is None, or an array of the shape of this rank's part of the grid.

        Raises
        ------
        TypeError, ValueError
            On all ranks that share the field: if there are several fields, or if the field, the mean or the standard
            deviation has another shape than the prior.
        """
        ranks = checked_mesh(mesh).world if mesh is not None else x.ranks if isinstance(x, Partition) else None
        with opening(ranks, "BiLaplacianPrior.on") as same:
            same |= {name: getattr(self, name) for name in ("shape", "correlation_length", "spacing")}
            if is_tree(x) or (has_names(x) and len(x) != 1):
                raise ValueError(f"x={kind_of(x)} of {len(x)}: BiLaplacianPrior is for one field, such as an array")
            spec = ParameterSpec("x", np.shape(x))
            if isinstance(x, Partition) or has_names(x):
                spec = x.spec("x") if isinstance(x, Partition) else x.local[0]
            is_flat = spec.shape == (prod(self.shape),) and not spec.is_split
            if spec.shape != self.shape and not is_flat:
                raise ValueError(f"x has the shape {spec.shape}, and the grid of the prior {self.shape}")
            if isinstance(x, Partition) and x.rearrangement is not None:
                raise ValueError("x has ids, and the prior needs the boxes of a grid: make it with shape= and box=")
            if has_names(x) and spec.is_split and mesh is None:
                raise ValueError(f"{spec.name!r} is cut over tensor ranks: give their mesh=")
            if x.ranks.size == 1 if isinstance(x, Partition) else not spec.is_split:
                same |= {name: getattr(self, name) for name in ("standard_deviation", "mean")}
        partition = x if isinstance(x, Partition) else None
        if has_names(x) and spec.is_split:
            assert mesh is not None
            partition = Partition(x[spec.name], mesh, shape=spec.shape, box=x.box(spec.name))
        found = replace(self)
        object.__setattr__(found, "_partition", partition)
        with raised_on_all(ranks):
            found._of_cells("standard_deviation")
            if self.mean is not None:
                object.__setattr__(found, "mean", found._of_cells("mean"))
        return found

    def precision(self, vector: Array) -> Array:
        """The product of R with a vector.

        Parameters
        ----------
        vector : array
            Of the shape of the field or flat, whole or this rank's part; only read.

        Returns
        -------
        array
            Like `vector`.

        Raises
        ------
        ValueError
            On all ranks that share the field, if any has another number of elements.
        """
        operator = self._operator
        return self._applied(lambda field: operator.times(operator.times(field / self._scale)) / self._scale, vector)

    def covariance(self, vector: Array) -> Array:
        """The product of the inverse of R with a vector, by two solves.

        Parameters
        ----------
        vector : array
            As for `precision`.

        Returns
        -------
        array
            Like `vector`.

        Raises
        ------
        ValueError
            As for `precision`.
        """
        solve = self._operator.solve
        return self._applied(lambda field: self._scale * solve(solve(self._scale * field)), vector)

    def factor(self, white: Array) -> Array:
        """The product of ``L = S A^-1`` with a vector, by one solve: of white noise it makes a sample less the mean.

        Parameters
        ----------
        white : array
            As `vector` of `precision`.

        Returns
        -------
        array
            Like `white`.

        Raises
        ------
        ValueError
            As for `precision`.
        """
        return self._applied(lambda field: self._scale * self._operator.solve(field), white)

    def variance(self) -> Any:
        """The squares of the standard deviation.

        Returns
        -------
        float or array
            A number if it is the same in all cells, else an array of the shape of this rank's part of the grid.
        """
        deviation = self.standard_deviation
        return float(deviation) ** 2 if np.ndim(deviation) == 0 else self._of_cells("standard_deviation") ** 2

    @property
    def log_determinant(self) -> float:
        """The logarithm of the determinant of R.  Collective over the ranks that share the field."""
        operator = self._operator
        return sum_of_cells(operator.ranks, 2 * (np.log(operator.eigenvalues()) - np.log(self._scale)))

    @cached_property
    def _operator(self) -> _Elliptic:
        """A on this rank's part of the grid, whose unit of length is the square root of K."""
        dimensions = max(1, sum(extent > 1 for extent in self.shape))
        factor = math.sqrt(8 * (2 - dimensions / 2))
        pairs = zip(self.spacing, self.correlation_length, strict=True)
        return _Elliptic(self.shape, [factor * step / length for step, length in pairs], self._partition)

    @cached_property
    def _scale(self) -> np.ndarray:
        """The diagonal of S."""
        return self._of_cells("standard_deviation") / np.sqrt(self._operator.variance())

    def _of_cells(self, name: str) -> np.ndarray:
        """A number or array of the user's, checked, for each cell of this rank."""
        values = np.asarray(arrays.to_host(getattr(self, name)))
        if values.dtype.kind not in "biuf":
            raise TypeError(f"{name}={shown(getattr(self, name))} must be an array of real numbers")
        values = values.astype(np.float64)
        box = box_shape(self._operator.box)
        if values.ndim == 0:
            return np.broadcast_to(values, box)
        if values.size != prod(box):
            raise ValueError(f"{name} has {values.size} values, and the grid of the prior is {box}")
        if values.shape not in (box, (prod(box),)):
            raise ValueError(
                f"{name} has the shape {values.shape}, and the grid of the prior {box}: give that, or it flat"
            )
        for extreme in (values.min(), values.max()) if values.size else ():
            number(name, float(extreme), above=_ABOVE[name])
        return values.reshape(box)

    def _applied(self, operation: Callable[[np.ndarray], np.ndarray], vector: Array) -> Array:
        """A linear operation on this rank's part of a field in float64, as one on vectors of the user."""
        box = box_shape(self._operator.box)
        with raised_on_all(self._operator.ranks):
            if np.iscomplexobj(vector):
                raise TypeError("BiLaplacianPrior is for real numbers, and the vector is complex; take OperatorPrior")
            if vector.size != prod(box):
                raise ValueError(
                    f"the vector has {vector.size} elements, and the grid of the prior is {box}; where ranks share the "
                    "field take prior.on(x, mesh)"
                )
            if vector.shape not in (box, (prod(box),)):
                raise ValueError(
                    f"the vector has the shape {vector.shape}, and the grid of the prior {box}: give that, or it flat"
                )
        # Contiguous and to be written to, as the compiled sweep wants it.
        found = operation(np.array(arrays.to_host(vector), np.float64, order="C").reshape(box))
        found = found.astype(np.result_type(vector.dtype, np.float32)).reshape(vector.shape)
        return np.asarray(found, like=vector)


class _Elliptic:
    """``A = 1 - div grad`` on this rank's part of a grid, for fields in float64.  Products are collective."""

    def __init__(self, shape: tuple[int, ...], steps: list[float], partition: Partition | None) -> None:
        self.ranks: Axis | OneRank = OneRank() if partition is None else partition.ranks
        self.box: Box = whole_box(shape) if partition is None else partition.parts[partition.ranks.rank]
        self._shape, self._steps = shape, steps
        # Of the second differences; where there is one cell there are none.
        self._weights = [(extent > 1) / step**2 for step, extent in zip(steps, shape, strict=True)]
        # The spectrum of A is from 1 to 1 + 2 * width: its middle, more or less `radius` times that.
        # A sweep multiplies the error by `rate`.
        width = 2 * sum(self._weights)
        radius, rate = width / (1 + width), width / (1 + width + math.sqrt(1 + 2 * width))
        sweeps = math.ceil(_ERROR * math.log(2) / math.log(rate)) if rate else 1
        self._omegas = [1.0, 1 / (1 - radius**2 / 2)][:sweeps]
        while len(self._omegas) < sweeps:
            self._omegas.append(1 / (1 - radius**2 * self._omegas[-1] / 4))
        self._halo = self._wide_halo = None
        if partition is not None and self.ranks.size > 1:
            self._halo, self._wide_halo = (Halo(partition, cells) for cells in (1, _HALO))

    def times(self, field: np.ndarray) -> np.ndarray:
        """A times a field."""
        (field,), own = _extended(self._halo, field)
        found = field.copy()
        for dim, step in enumerate(self._steps):
            found += forward_adjoint(forward(field, dim, step), dim, step)
        return found[own]

    def solve(self, right: np.ndarray) -> np.ndarray:
        """The inverse of A times a field, by sweeps."""
        (right,), own = _extended(self._wide_halo, right)
        values, before = np.zeros(right.shape), np.zeros(right.shape)
        # Dimensions of one cell are left out; the last one, along which memory runs, is of many cells then.
        long = [dim for dim, extent in enumerate(self._shape) if extent > 1]
        shape = (*[1] * (3 - len(long)), *(right.shape[dim] for dim in long))
        weights = (*[0.0] * (3 - len(long)), *(self._weights[dim] for dim in long))
        most = len(self._omegas) if self._wide_halo is None else _HALO
        for first in range(0, len(self._omegas), most):
            if first:
                (values, before), own = _extended(self._wide_halo, values[own], before[own])
            for omega in self._omegas[first : first + most] if right.size else ():
                # Cells beside a cut lack neighbours.  What is wrong in them comes nearer by one cell a sweep.
                chebyshev_sweep(before.reshape(shape), values.reshape(shape), right.reshape(shape), weights, omega)
                values, before = before, values
        return values[own]

    def eigenvalues(self) -> np.ndarray:
        """The eigenvalues of A, those of this rank's waves, which are numbered as the cells are."""
        found: Any = 1.0
        for dim, (run, weight) in enumerate(zip(self.box, self._weights, strict=True)):
            waves = 4 * weight * np.sin(np.arange(*run) * (math.pi / (2 * self._shape[dim]))) ** 2
            found = found + _along(dim, waves, len(self._shape))
        return found

    def variance(self) -> np.ndarray:
        """The diagonal of the inverse of A A, to rounding.

        It is the integral over t of ``t exp(-t)`` times the diagonal of ``exp(t div grad)``, which is a product over
        the dimensions. The trapezoidal rule in the logarithm of t converges exponentially (L. N. Trefethen, J. A. C.
        Weideman: The exponentially convergent trapezoidal rule, SIAM Review 56, 385-458, 2014).
        """
        axes = [_Diagonal(*each) for each in zip(self.box, self._shape, self._steps, strict=True)]
        first, last = math.log(4e-9 / (1 + 4 * sum(self._weights))), math.log(50)  # the rest is below rounding
        total = np.zeros([len(axis.places) for axis in axes])
        for point in range(math.floor(first / _STEP), math.ceil(last / _STEP)):
            time = math.exp(_STEP * point)
            product: Any = _STEP * time**2 * math.exp(-time)
            for dim, axis in enumerate(axes):
                product = product * _along(dim, axis.at(time), len(axes))
            total += product
        return total[np.ix_(*(axis.back for axis in axes))]


def _extended(halo: Halo | None, *fields: np.ndarray) -> tuple[list[np.ndarray], tuple[slice | EllipsisType, ...]]:
    """This rank's boxes with cells of its neighbours, and where the box lies in them."""
    return (list(fields), (...,)) if halo is None else (halo.exchange(*fields), halo.place)


class _Diagonal:
    """The diagonal of ``exp(t D)``, of the second differences D along a dimension, in a run of its cells.

    By cosines it is a function of the distance to the ends. Far from both it is a constant; so the run is taken from an
    axis that is no longer than needed.
    """

    def __init__(self, run: tuple[int, int], extent: int, step: float) -> None:
        far = math.ceil(_REACH / (2 * math.asinh(step / 2)))  # the inverse of A falls by e in 1 / (2 asinh(step / 2))
        cells = np.arange(*run)
        self.places, self.back = np.unique(np.minimum(np.minimum(cells, extent - 1 - cells), far), return_inverse=True)
        self._period = 2 * min(extent, 2 * far + 2)
        self._rates = (2 / step * np.sin(np.arange(self._period // 2 + 1) * (math.pi / self._period))) ** 2

    def at(self, time: float) -> np.ndarray:
        """The diagonal in each of the `places`, distances to the nearer end."""
        kernel = np.fft.irfft(np.exp(-time * self._rates), self._period)
        return kernel[0] + kernel[2 * self.places + 1]


def _along(dim: int, values: np.ndarray, dimensions: int) -> np.ndarray:
    """Values along a dimension, to be broadcast over the others."""
    return values.reshape([-1 if each == dim else 1 for each in range(dimensions)])
