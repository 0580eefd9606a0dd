"""A matrix whose rows are on all ranks: its product with a vector, and that of its adjoint, a sum over the ranks.

The Jacobians of `least_squares` are such matrices, and so is the matrix of `lsqr` and `cgls`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import shown
from mpishard.backend import exact_gram
from mpishard.backend.exact_gram import SparseRows
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
        self._matrix, self._what = matrix, what
        self._rows, self._columns = matrix.shape

    def times(self, vector: Array) -> Array:
        if self.sparse is not None:
            return self.sparse.times(np.ascontiguousarray(vector, np.float64))
        return self._checked("matvec", self._matrix.matvec(vector), self._rows)

    def adjoint_terms(self, factors: Array) -> tuple[SparseRows, Array]:
        """Rows and their factors whose sum is the adjoint times `factors`; of an operator one row, its own sum."""
        if self.sparse is not None:
            return self.sparse, np.ascontiguousarray(factors)
        found = self._checked("rmatvec", self._matrix.rmatvec(factors), self._columns)
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


def summed(rows: SparseRows, factors: Array, world: Axis | OneRank, tops: Array | None = None) -> Array:
    """The sum of rows times factors over all ranks, the same bits for any split.  Collective.

    `tops`: for each column a bound on the products of its elements with the factors, if all ranks know one.
    """
    if tops is None:
        tops = rows.tops(factors)
        world.all_reduce(tops, op="max", label="dots")
    words = rows.words(factors, tops)
    world.all_reduce(words.reshape(-1), label="dots")
    return exact_gram.values(words, tops)


class RankSpace(Space):
    """Vectors of which each rank of `world` has a part."""

    def __init__(self, size: int, total: int, world: Axis | OneRank) -> None:
        super().__init__(size, total, np.empty(0), [(0, size)])
        self._world = world

    def add(self, numbers: np.ndarray) -> None:
        self._world.all_reduce(numbers.reshape(-1), label="dots")

    def maximize(self, numbers: np.ndarray) -> None:
        self._world.all_reduce(numbers, op="max", label="dots")

    def whole(self, vector: Array) -> Array:
        raise NotImplementedError("no rank has a whole vector")

    def own(self, whole: Array) -> Array:
        raise NotImplementedError("no rank has a whole vector")

    def numbers(self) -> np.ndarray:
        raise NotImplementedError("the rows of a rank have no numbers among those of all")


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
        count = world.all_reduce(np.array([rows], np.int64), label="control")
        self.rows: Space = RankSpace(rows, int(count[0]), world)
        self.unknowns = unknowns
        self._tops: Array | None = None  # the largest element of each column
        if own.sparse is not None:
            self._tops = sharers.all_reduce(own.sparse.tops(np.ones(rows)), op="max", label="dots")
            wrong = np.flatnonzero(~np.isfinite(self._tops))
            if len(wrong):
                raise ValueError(f"column {wrong[0]} of A has an element that is NaN or infinite")

    def times(self, x: Array) -> Array:
        if self._own.sparse is not None:
            return self._own.times(x)
        with raised_on_all(self._world):
            found = self._own.times(x)
        return found

    def adjoint(self, u: Array, top: float) -> Array:
        if self._tops is not None:
            assert self._own.sparse is not None
            return summed(self._own.sparse, u, self._sharers, self._tops * top)
        with raised_on_all(self._world):
            rows, factors = self._own.adjoint_terms(u)
        return rows.data if self._sharers.size == 1 else summed(rows, factors, self._sharers)
