"""A matrix whose rows are on all ranks: its product with a vector, and that of its adjoint, a sum over the ranks.

The Jacobians of `least_squares` are such matrices, and so is the matrix of `lsqr` and `cgls`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import shown
from mpishard.backend import sparse_rows
from mpishard.backend.sparse_rows import SparseRows
from mpishard.comm.errors import OneRank, raised_on_all
from mpishard.minimizers.space import Space

if TYPE_CHECKING:
    from mpishard.comm.axis import Axis

Array = Any


def is_operator(given: Any) -> bool:
    """Return True for an object with products, whose elements are not asked for."""
    return hasattr(given, "rmatvec") and hasattr(given, "matvec")


def check_shape(operator: Any) -> None:
    """TypeError unless an operator has a shape of whole numbers."""
    shape = getattr(operator, "shape", None)
    try:
        found = [isinstance(each, int | np.integer) for each in shape]  # type: ignore[union-attr]
    except TypeError:
        found = [False]
    if not all(found):
        raise TypeError(f"A is an operator whose shape is {shown(shape)}; give it (rows, columns), two whole numbers")


class OwnRows:
    """The rows of a matrix that this rank has: a float64 array, sparse rows, or an operator.

    `what` names the matrix in messages. Raises TypeError or ValueError if a product is no vector of real numbers of the
    right size.
    """

    def __init__(self, matrix: Any, what: str) -> None:
        self.sparse: SparseRows | None = None if is_operator(matrix) else SparseRows.of(matrix)
        self.is_dense = isinstance(matrix, np.ndarray)
        self._matrix, self._what = matrix, what
        self._rows, self._columns = matrix.shape

    def times(self, vector: Array) -> Array:
        if self.sparse is not None:
            return self.sparse.times(np.ascontiguousarray(vector, np.float64))
        return self._checked("matvec", self._matrix.matvec(vector.copy()), self._rows)  # which may change it

    def adjoint_terms(self, factors: Array) -> tuple[SparseRows, Array]:
        """Rows and their factors whose sum is the adjoint times `factors`; of an operator one row, its own sum."""
        if self.sparse is not None:
            return self.sparse, np.ascontiguousarray(factors)
        found = self._checked("rmatvec", self._matrix.rmatvec(factors.copy()), self._columns)
        return SparseRows.of(found.reshape(1, -1)), np.ones(1)

    def _checked(self, name: str, found: Any, size: int) -> Array:
        """A product of an operator as a float64 array."""
        found = np.asarray(found)
        if found.dtype.kind not in "biuf":
            raise TypeError(f"{name} of {self._what} must return real numbers, got {found.dtype}")
        if found.size != size:
            raise ValueError(
                f"{name} of {self._what} returned {found.size} elements of shape {found.shape}, not {size}"
            )
        return np.ascontiguousarray(found.reshape(-1), np.float64)


def summed(rows: SparseRows, factors: Array, world: Axis | OneRank) -> Array:
    """The sum of rows times factors over all ranks, the same bits for any split.  Collective."""
    tops = world.all_reduce(rows.tops(factors), op="max", label="dots")
    return _total(rows, factors, sparse_rows.units(tops), world)


def _total(rows: SparseRows, factors: Array, units: Array, world: Axis | OneRank) -> Array:
    words = rows.words(factors, units)
    world.all_reduce(words.reshape(-1), label="dots")
    return sparse_rows.values(words, units)


class RankSpace(Space):
    """Vectors of which each rank of `world` has a part; `first` is the number of its first element, if it has one."""

    def __init__(self, size: int, total: int, world: Axis | OneRank, first: int | None = None) -> None:
        super().__init__(size, total, np.empty(0), [(0, size)])
        self._world, self._first = world, first

    def add(self, numbers: np.ndarray) -> None:
        self._world.all_reduce(numbers.reshape(-1), label="dots")

    def maximize(self, numbers: np.ndarray) -> None:
        self._world.all_reduce(numbers, op="max", label="dots")

    def whole(self, vector: Array) -> Array:
        raise NotImplementedError("no rank has a whole vector")

    def own(self, whole: Array) -> Array:
        raise NotImplementedError("no rank has a whole vector")

    def numbers(self) -> np.ndarray:
        if self._first is None:
            raise NotImplementedError("the elements of a rank have no numbers among those of all")
        return self._first + np.arange(self.size)


class MatrixOnRanks:
    """The matrix of a linear least-squares problem: `Matrix` of its methods.  Collective, its creation too.

    All ranks of `world` have rows, `rows` on this one. The `unknowns` are whole on all of them, or in parts; `sharers`
    have the same ones as this rank, and add up their terms of the adjoint. Raises ValueError on all ranks if the matrix
    has an element that is not finite.
    """

    def __init__(
        self, own: OwnRows, rows: int, unknowns: Space, world: Axis | OneRank, sharers: Axis | OneRank
    ) -> None:
        self._own, self._world, self._sharers = own, world, sharers
        counts = world.allgather_object(rows)
        self.rows: Space = RankSpace(rows, sum(counts), world, sum(counts[: world.rank]))
        self.unknowns = unknowns
        self._rows: SparseRows | None = own.sparse
        self._sizes = self._factors = np.ones(1)
        if own.sparse is not None:
            tops = sharers.all_reduce(own.sparse.tops(np.ones(rows)), op="max", label="dots")
            wrong = np.flatnonzero(~np.isfinite(tops))
            if len(wrong):
                raise ValueError(f"column {wrong[0]} of A has an element that is NaN or infinite")
            # Elements are below twice the power of their column.  By random access to the powers, sparse rows would
            # take longer than as a copy that is divided by them, with the same bits.
            powers = np.ldexp(1.0, np.where(tops > 0, np.frexp(tops)[1] - 1, 0))
            if own.is_dense:
                self._sizes = powers
            else:
                self._rows, self._factors = own.sparse.divided(powers), powers

    def times(self, x: Array) -> Array:
        if self._rows is not None:
            return self._rows.times(x * self._factors)
        with raised_on_all(self._world):
            found = self._own.times(x)
        return found

    def adjoint(self, u: Array, top: float) -> Array:
        if self._rows is not None:
            units = sparse_rows.units(2 * top * self._sizes)
            return self._factors * _total(self._rows, u, units, self._sharers)
        with raised_on_all(self._world):
            rows, factors = self._own.adjoint_terms(u)
        return rows.data if self._sharers.size == 1 else summed(rows, factors, self._sharers)
