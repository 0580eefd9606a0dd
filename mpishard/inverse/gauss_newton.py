"""A least-squares problem as a function with its gradient and Gauss-Newton products, for the loop of `minimize`."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.backend import exact_gram
from mpishard.backend.exact_gram import SparseRows
from mpishard.inverse.residuals import Loss, ResidualFunctions, size_on_rank, sum_of_losses

if TYPE_CHECKING:
    from mpishard.comm.axis import Axis

Array = Any
_NO_ROWS = SparseRows.of(np.empty((0, 0)))
_POINTS = 2  # whose Jacobians are kept: the last iterate and a trial


class _Linearized:
    """Residuals and their Jacobian at a point."""

    def __init__(self, f: Array, jacobian: Any, loss: Loss) -> None:
        self.f = f
        self.jacobian = jacobian
        self.rows = None if hasattr(jacobian, "rmatvec") else SparseRows.of(jacobian)
        self.of_gradient, self.of_hessian = loss.weights(f)

    def times(self, vector: Array) -> Array:
        """J times a vector."""
        if self.rows is not None:
            return self.rows.times(np.ascontiguousarray(vector, np.float64))
        return _checked("matvec", self.jacobian.matvec(vector), len(self.f))

    def weighted(self, factors: Array, size: int) -> tuple[SparseRows, Array]:
        """Rows and their factors whose sum is the adjoint of J times the factors: of an operator one row, its sum."""
        if self.rows is not None:
            return self.rows, np.ascontiguousarray(factors)
        found = _checked("rmatvec", self.jacobian.rmatvec(factors), size)
        return SparseRows.of(found.reshape(1, -1)), np.ones(1)


def summed(rows: SparseRows, factors: Array, world: Axis | None) -> Array:
    """The sum of rows times factors over all ranks, the same bits for any split.  Collective."""
    tops = rows.tops(factors)
    if world is not None:
        world.all_reduce(tops, op="max", label="dots")
    words = rows.words(factors, tops)
    if world is not None:
        world.all_reduce(words.reshape(-1), label="dots")
    return exact_gram.values(words, tops)


class GaussNewtonFunctions:
    """The cost with its gradient, and products with the Gauss-Newton matrix. Collective over the ranks of `world`.

    `world`: the ranks whose rows are summed here; None: results are of this rank's rows. With `parts` gradients stay
    parts, and only the cost is summed: it is returned on the first rank alone.
    """

    def __init__(self, functions: ResidualFunctions, loss: Loss, world: Axis | None, parts: bool = False) -> None:
        self._functions, self._loss, self._world, self._parts = functions, loss, world, parts
        self._kept: OrderedDict[bytes, dict[bytes, _Linearized]] = OrderedDict()

    def value_and_gradient(self, x: Any, *samples: Array) -> tuple[float, Array]:
        problem: BaseException | None = None
        values, rows, factors = np.empty(0), _NO_ROWS, np.empty(0)
        try:
            here = self.linearized(x, *samples)
            with np.errstate(all="ignore"):
                values = self._loss.values(here.f)
            rows, factors = here.weighted(here.of_gradient * here.f, size_on_rank(x))
        except (Exception, SystemExit) as error:  # of the user's function: all ranks must learn of it
            problem = error
        self._raise_if_any(problem)
        value = 0.5 * sum_of_losses(self._loss, values, self._world)
        if self._parts and self._world is not None and self._world.rank:
            value = 0.0
        return value, self._sum(rows, factors)

    def product(self, x: Any, direction: Array, *samples: Array) -> Array:
        """The Gauss-Newton matrix at a point times a direction."""
        problem: BaseException | None = None
        rows, factors = _NO_ROWS, np.empty(0)
        try:
            here = self.linearized(x, *samples)
            rows, factors = here.weighted(here.of_hessian * here.times(direction), size_on_rank(x))
        except (Exception, SystemExit) as error:
            problem = error
        self._raise_if_any(problem)
        return self._sum(rows, factors)

    def _sum(self, rows: SparseRows, factors: Array) -> Array:
        return summed(rows, factors, None if self._parts else self._world)

    def _raise_if_any(self, problem: BaseException | None) -> None:
        if self._world is not None:
            self._world.raise_if_any(problem)
        elif problem is not None:
            raise problem

    def linearized(self, x: Any, *samples: Array) -> _Linearized:
        """This rank's residuals and Jacobian at a point; those of the last two points are kept."""
        flat = np.ascontiguousarray(x.flat if hasattr(x, "pieces") else x)
        key, which = flat.tobytes(), b"".join(each.tobytes() for each in samples)
        here = self._kept.setdefault(key, {})
        self._kept.move_to_end(key)
        while len(self._kept) > _POINTS:
            self._kept.popitem(last=False)
        if which not in here:
            f = self._functions.residuals(x, *samples)
            here[which] = _Linearized(f, self._functions.jacobian(x, f, *samples), self._loss)
        return here[which]

    def column_scale(self, x: Array) -> Array:
        """The inverse squares of the norms of the columns of J, as the diagonal of a preconditioner."""
        problem: BaseException | None = None
        rows, factors = _NO_ROWS, np.empty(0)
        try:
            here = self.linearized(x)
            if here.rows is None:
                raise ValueError(
                    "x_scale='jac' needs the columns of the Jacobian, and jac returned an operator; give x_scale as "
                    "numbers, or preconditioner="
                )
            # Not weighted by the loss, whose weights are near 0 far from the minimum.
            rows, factors = here.rows._replace(data=here.rows.data * here.rows.data), np.ones(len(here.f))
        except (Exception, SystemExit) as error:
            problem = error
        self._raise_if_any(problem)
        squares = self._sum(rows, factors)
        return 1 / np.where(squares > 0, squares, 1.0)


def _checked(what: str, found: Any, size: int) -> Array:
    """A product of an operator as a float64 array."""
    found = np.asarray(found)
    if found.dtype.kind not in "biuf":
        raise TypeError(f"{what} of the Jacobian must return real numbers, got {found.dtype}")
    if found.size != size:
        raise ValueError(f"{what} of the Jacobian returned {found.size} elements of shape {found.shape}, not {size}")
    return found.reshape(-1).astype(np.float64, copy=False)
