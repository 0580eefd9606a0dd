"""The residuals of a least-squares problem, as users give them and on ranks: by rows, with Jacobian and loss.

`Rows` gives the methods for few unknowns exact products of columns, `GaussNewtonFunctions` those for many unknowns
gradients and products with vectors.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from mpishard.arguments import shown
from mpishard.backend import exact, exact_gram
from mpishard.backend.exact_gram import ExactGram
from mpishard.backend.exact_norms import largest
from mpishard.backend.sparse_rows import SparseRows
from mpishard.comm.errors import OneRank, on_any, raised_on_all
from mpishard.inverse.finite_differences import DIFFERENCES, Sparsity, moves_of, slope_of, steps_of
from mpishard.inverse.functions import TERMS, EvaluationFailed
from mpishard.inverse.operators import OwnRows, is_operator, summed
from mpishard.inverse.trees import is_tree
from mpishard.inverse.unknowns import Unknowns, has_names

if TYPE_CHECKING:
    from mpishard.comm.axis import Axis

Array = Any
_EPSILON = float(np.finfo(np.float64).eps)
_POINTS = 2  # whose Jacobians are kept: the last iterate and a trial


# Losses: of z, the square of a residual over its scale, the value and its first two derivatives.


def _soft_l1(z: Array) -> tuple[Array, Array, Array]:
    root = np.sqrt(1 + z)
    return 2 * z / (root + 1), 1 / root, -0.5 / (root * (1 + z))  # root - 1 would be 0 for residuals near 0


def _huber(z: Array) -> tuple[Array, Array, Array]:
    root = np.sqrt(np.maximum(z, 1))
    inside = z <= 1
    return np.where(inside, z, 2 * root - 1), 1 / root, np.where(inside, 0.0, -0.5 / (root * np.maximum(z, 1)))


def _cauchy(z: Array) -> tuple[Array, Array, Array]:
    slope = 1 / (1 + z)
    return np.log1p(z), slope, -slope * slope


def _arctan(z: Array) -> tuple[Array, Array, Array]:
    square = 1 + z * z
    return np.arctan(z), 1 / square, -2 * z / (square * square)


LOSSES: dict[str, Callable[[Array], tuple[Array, Array, Array]]] = {
    "soft_l1": _soft_l1,
    "huber": _huber,
    "cauchy": _cauchy,
    "arctan": _arctan,
}


class Loss:
    """A loss of SciPy's, by name or as a function, with the scale of the residuals."""

    def __init__(self, loss: str | Callable[[Array], Any], scale: float) -> None:
        if not callable(loss) and loss not in ("linear", *LOSSES):
            names = ", ".join(map(repr, ("linear", *LOSSES)))
            raise ValueError(f"loss={shown(loss)} must be one of {names}, or a function of z that returns 3 rows")
        self._function = LOSSES.get(loss) if isinstance(loss, str) else loss
        self._scale = scale
        self.is_linear = loss == "linear"

    def _rows(self, f: Array) -> tuple[Array, Array, Array]:
        assert self._function is not None
        z = (f / self._scale) ** 2
        found = self._function(z)
        if not isinstance(found, tuple):
            found = np.asarray(found)
            if found.shape != (3, len(f)):
                raise ValueError(
                    f"loss returned the shape {found.shape} for {len(f)} residuals; return (3, {len(f)}): the loss of "
                    "z and its first two derivatives"
                )
        return found[0], found[1], found[2]

    def values(self, f: Array) -> Array:
        """The terms of twice the cost, one a residual; for the linear loss the residuals, to be squared."""
        return f if self.is_linear else np.ascontiguousarray(self._scale**2 * self._rows(f)[0], np.float64)

    def weights(self, f: Array) -> tuple[Array, Array]:
        """The factors of the residuals in the gradient, and those of rows of the Jacobian in the Hessian.

        Source: B. Triggs, P. F. McLauchlan, R. I. Hartley, A. W. Fitzgibbon: Bundle adjustment, a modern synthesis,
        Vision Algorithms: Theory and Practice, LNCS 1883, 298-372 (2000), section 4.3.
        """
        if self.is_linear:
            return np.ones(len(f)), np.ones(len(f))
        _, first, second = self._rows(f)
        return first, np.maximum(first + 2 * second * (f / self._scale) ** 2, _EPSILON)


# The functions of the user.


class ResidualFunctions:
    """The residuals and their Jacobian on this rank, from functions as for `least_squares`.

    `jac` may be the name of a finite difference, with relative `steps` inside of the bounds `lower` and `upper`; with a
    `sparsity` whose columns are grouped it gives sparse rows. They get points in the form of `unknowns`; here these are
    flat, but for a FlatParameters. `of` says in messages what they are, if no residuals.
    """

    def __init__(
        self,
        fun: Any,
        jac: Any,
        args: Any,
        kwargs: Any,
        steps: Array | None,
        lower: Array,
        upper: Array,
        unknowns: Unknowns,
        of: str = "residuals",
        sparsity: Sparsity | None = None,
    ) -> None:
        if not callable(fun):
            raise TypeError(f"fun={shown(fun)} must be a function that returns the {of}")
        if hasattr(fun, TERMS):
            raise ValueError(
                "fun is of regularized, whose terms are no squares of residuals: give minimize a function that returns "
                "half of their sum and its gradient, with these terms"
            )
        if not (callable(jac) or (isinstance(jac, str) and jac in DIFFERENCES)):
            names = ", ".join(map(repr, DIFFERENCES))
            raise ValueError(f"jac={shown(jac)} must be a function that returns the Jacobian, or one of {names}")
        if not (kwargs is None or isinstance(kwargs, Mapping)):
            raise TypeError(f"kwargs={shown(kwargs)} must be a dictionary of names and values")
        self._fun, self._jac = fun, jac
        self._args, self._kwargs = args if isinstance(args, tuple) else (args,), dict(kwargs or {})
        self._steps, self._lower, self._upper = steps, lower, upper
        self._unknowns = unknowns
        self._of = of  # in messages
        self._sparsity = sparsity
        self._count = -1  # of residuals, in the first call
        self.epsilon = _EPSILON  # the relative rounding error of the residuals
        self._at_start: tuple[bytes, Array, Any] | None = None  # point, residuals and Jacobian, until used

    def is_dense_at(self, x: Array) -> bool:
        """Return True if the Jacobian at the start is an array; the evaluation is kept for the first step."""
        f = self.residuals(x)
        jacobian = self.jacobian(x, f) if callable(self._jac) else None
        self._at_start = x.tobytes(), f, jacobian
        return jacobian is None or isinstance(jacobian, np.ndarray)

    def residuals(self, x: Any, *samples: Array) -> Array:
        """The residuals as a float64 array of one dimension, as many in each call unless there are samples."""
        if self._at_start is not None and self._at_start[0] == _flat(x).tobytes():
            return self._at_start[1]
        found = _numbers("fun", self._fun(self._like_x0(x), *samples, *self._args, **self._kwargs))
        if found.ndim > 1:
            raise ValueError(f"fun must return the {self._of} in one dimension, but their shape is {found.shape}")
        if found.dtype.kind == "f":
            self.epsilon = max(self.epsilon, float(np.finfo(found.dtype).eps))
        found = np.array(found.reshape(-1), np.float64)
        if not samples:
            if self._count < 0:
                self._count = len(found)
            if len(found) != self._count:
                raise ValueError(f"fun returned {len(found)} {self._of}, but {self._count} at x0; return as many")
        return found

    def jacobian(self, x: Any, f: Array, *samples: Array) -> Any:
        """A float64 array (residuals, unknowns), or another result of `jac`: sparse rows, or an operator."""
        if self._at_start is not None:
            key, _, found = self._at_start
            self._at_start = None
            if found is not None and key == _flat(x).tobytes():
                return found
        if not callable(self._jac):
            return self._differences(x, f, *samples)
        found = self._jac(self._like_x0(x), *samples, *self._args, **self._kwargs)
        if self._unknowns.tree is not None and is_tree(found):
            found = self._unknowns.tree.columns("jac", found, len(f))
        size = int(_flat(x).size)
        if hasattr(found, "tocsr") or is_operator(found):
            shape = tuple(found.shape)
        else:
            found = _numbers("jac", found).astype(np.float64, copy=False)
            if found.size == len(f) * size and found.ndim < 2:
                found = found.reshape(len(f), size)
            shape = found.shape
        if shape != (len(f), size):
            raise ValueError(
                f"jac returned the shape {shape}, but there are {len(f)} {self._of} of {size} unknowns; return "
                f"({len(f)}, {size})"
            )
        return found

    def _like_x0(self, x: Any) -> Any:
        """A copy of a point as the user's functions get it; parameters with names stay what they are."""
        return x if has_names(x) else self._unknowns.like_x0(x.copy())

    def _differences(self, x: Array, f: Array, *samples: Array) -> Any:
        """The Jacobian by finite differences inside of the bounds."""
        steps = steps_of(x, self.epsilon, self._jac)
        if self._steps is not None:
            given = self._steps * np.where(x < 0, -1.0, 1.0) * abs(x)
            steps = np.where((x + given) - x == 0, steps, given)
        sparsity = self._sparsity
        if sparsity is None:
            jacobian = np.empty((len(f), x.size))
            for k in range(x.size):
                start, moved, distances = self._moved(x, f, np.array([k]), steps, *samples)
                jacobian[:, k] = slope_of(start, moved, distances[0])
            return jacobian
        if sparsity.shape[0] != len(f):
            raise ValueError(f"jac_sparsity has {sparsity.shape[0]} rows, but there are {len(f)} {self._of}")
        data = np.empty(len(sparsity.rows))
        for columns in sparsity.groups:
            start, moved, distances = self._moved(x, f, columns, steps)
            for k, apart in zip(columns, distances, strict=True):
                which = sparsity.elements(k)
                rows = sparsity.rows[which]
                data[which] = slope_of(start[rows], [each[rows] for each in moved], apart)
        return sparsity.matrix(data)

    def _moved(
        self, x: Array, f: Array, columns: Array, steps: Array, *samples: Array
    ) -> tuple[Array, list[Array], list[list[float]]]:
        """What `slope_of` takes: the residuals, those where some unknowns have moved, and how far each of these has."""
        if self._jac == "cs":
            point = x.astype(np.complex128)
            point[columns] += abs(steps[columns]) * 1j
            values = np.asarray(self._fun(self._like_x0(point), *samples, *self._args, **self._kwargs))
            return np.zeros_like(f), [values.reshape(-1).imag], [[step] for step in abs(steps[columns]).tolist()]
        here = x[columns]
        room = steps[columns], here - self._lower[columns], self._upper[columns] - here
        moves_of_each = [moves_of(self._jac, *each) for each in zip(*(part.tolist() for part in room), strict=True)]
        moved, distances = [], []
        for moves in zip(*moves_of_each, strict=True):
            point = x.copy()
            point[columns] += moves
            moved.append(self.residuals(point, *samples))
            distances.append((point[columns] - here).tolist())
        return f, moved, [list(each) for each in zip(*distances, strict=True)]


def _flat(x: Any) -> Array:
    return x.flat if has_names(x) else x


def _numbers(what: str, found: Any) -> np.ndarray:
    try:
        array = np.asarray(found)
    except (TypeError, ValueError):
        raise TypeError(f"{what} must return an array of numbers, got {shown(found)}") from None
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{what} must return real numbers in host memory, got {array.dtype} in {type(found).__name__}")
    return array


# Rows on ranks.


def sum_of_losses(loss: Loss, values: Array, functions: ResidualFunctions, world: Axis | OneRank) -> float:
    """The sum of `Loss.values` over all ranks, rounded once; infinite where one is not finite.  Collective.

    It also gives the functions of all ranks the largest `epsilon`.
    """
    tops = np.array([largest(values), functions.epsilon])
    tops[~np.isfinite(tops)] = np.inf
    world.all_reduce(tops, op="max", label="dots")
    top, functions.epsilon = tops.tolist()
    if not math.isfinite(top):
        return math.inf
    other, bound = (values, top * top) if loss.is_linear else (np.ones(len(values)), top)
    words = exact.dot_words(values, other, bound, [(0, len(values))])
    world.all_reduce(words, label="dots")
    return exact.values(words.reshape(1, 2), [bound])[0]


def exact_products(columns: Array, unknowns: int, world: Axis | OneRank) -> ExactGram:
    """The products of columns with each other over the rows of all ranks, which have the same bits for any split.

    Collective. The first `unknowns` columns are of a Jacobian. Raises ValueError on all ranks if one is not finite.
    """
    tops = abs(columns).max(axis=0, initial=0.0)
    tops = world.all_reduce(np.where(np.isfinite(tops), tops, np.inf), op="max", label="dots")
    wrong = np.flatnonzero(tops >= exact_gram.LARGEST)
    if len(wrong):
        column = int(wrong[0])
        what = f"column {column} of the Jacobian" if column < unknowns else "the residuals"
        raise ValueError(
            f"{what} at an iterate has elements that are not finite, or larger than {exact_gram.LARGEST:.1g}; "
            "scale them, or check jac with jac='3-point'"
        )
    exponents = exact_gram.exponents(tops)
    words = exact_gram.gram_words(columns, exponents)
    world.all_reduce(words.reshape(-1), label="dots")
    return exact_gram.gram(words, exponents)


class Rows:
    """The residuals of all ranks, each of which has its own rows, for a method for few unknowns."""

    def __init__(self, functions: ResidualFunctions, loss: Loss, world: Axis | OneRank) -> None:
        self._functions, self._loss, self.world = functions, loss, world
        self.f: Array = np.empty(0)  # this rank's residuals at the point of the last cost
        self.accepted: Array = self.f  # and at the point of the last products
        self.jacobian: Array = np.empty((0, 0))  # this rank's rows there, weighted by the loss
        self._has_begun = False  # the residuals at the start are known
        exact.expect_dots(self.f)

    def cost(self, x: Array) -> float:
        """Infinite or NaN where the residuals of a rank are not finite, or have failed at a trial.  Collective."""
        try:
            with raised_on_all(self.world):
                self.f = self._functions.residuals(x)
                with np.errstate(all="ignore"):
                    values = self._loss.values(self.f)
        except EvaluationFailed:
            if not self._has_begun:
                raise
            return math.inf
        self._has_begun = True
        return 0.5 * sum_of_losses(self._loss, values, self._functions, self.world)

    def gram(self, x: Array) -> ExactGram:
        """The products of the columns of ``[J f]`` at the last cost's point.  Collective."""
        with raised_on_all(self.world):
            jacobian = self._functions.jacobian(x, self.f)
            if hasattr(jacobian, "rmatvec"):
                raise ValueError(
                    "this method needs the elements of the Jacobian, and jac returned an operator; method='trf' with "
                    "tr_solver='cg' takes one"
                )
            if hasattr(jacobian, "toarray"):
                jacobian = _numbers("jac", jacobian.toarray()).astype(np.float64, copy=False)
            of_gradient, of_hessian = self._loss.weights(self.f)
            roots = np.sqrt(of_hessian)
            columns = np.empty((len(self.f), x.size + 1))
            np.multiply(jacobian, roots[:, None], out=columns[:, :-1])
            columns[:, -1] = self.f * (of_gradient / roots)
        products = exact_products(columns, x.size, self.world)
        self.accepted, self.jacobian = self.f, columns[:, :-1]
        return products

    def are_dense_at(self, x: Array) -> bool:
        """Return True if the Jacobian at the start is an array on all ranks.  Collective.

        Then all ranks have one `epsilon`, and so one step of finite differences: they call `fun` for the same points.
        """
        functions = self._functions
        with raised_on_all(self.world):
            is_dense = functions.is_dense_at(x)
        found = self.world.all_reduce(np.array([not is_dense, functions.epsilon]), op="max", label="control")
        functions.epsilon = float(found[1])
        return not found[0]


# A least-squares problem as a function with its gradient and Gauss-Newton products, for the loop of `minimize`.


class _Linearized:
    """Residuals and their Jacobian at a point."""

    def __init__(self, f: Array, jacobian: Any, loss: Loss) -> None:
        self.f = f
        # A copy: the user may write the next one into the same array.
        self.jacobian = jacobian if is_operator(jacobian) else jacobian.copy()
        self.rows = OwnRows(self.jacobian, "the Jacobian")
        self.of_gradient, self.of_hessian = loss.weights(f)


class GaussNewtonFunctions:
    """The cost with its gradient, and products with the Gauss-Newton matrix. Collective over the ranks of `world`.

    `world`: the ranks whose rows are summed here. Where `unknowns` are a rank's part, gradients stay parts, and only
    the cost is summed: it is returned on the first rank alone. Points, directions, gradients and products have the form
    that `unknowns` give them.
    """

    def __init__(self, functions: ResidualFunctions, loss: Loss, world: Axis | OneRank, unknowns: Unknowns) -> None:
        self._functions, self._loss, self._world, self._unknowns = functions, loss, world, unknowns
        self._parts = unknowns.is_split
        # Of ranks that share the unknowns, whose functions may wait for each other: after each one all must agree.
        self._meeting = world if self._parts else None
        self._kept: OrderedDict[bytes, dict[bytes, _Linearized]] = OrderedDict()

    def value_and_gradient(self, x: Any, *samples: Array) -> tuple[float, Any]:
        x, key = self._point(x)
        with raised_on_all(self._world):
            here = self._linearized(x, key, *samples)
            with np.errstate(all="ignore"):
                values = self._loss.values(here.f)
            rows, factors = here.rows.adjoint_terms(here.of_gradient * here.f)
        value = 0.5 * sum_of_losses(self._loss, values, self._functions, self._world)
        if self._parts and self._world.rank:
            value = 0.0
        return value, self._unknowns.like_x0(self._rounded(self._sum(rows, factors)))

    def product(self, x: Any, direction: Any, *samples: Array) -> Any:
        """The Gauss-Newton matrix at a point times a direction."""
        x, key = self._point(x)
        direction = self._unknowns.vector("the direction", direction)
        with raised_on_all(self._world):
            here = self._linearized(x, key, *samples)
            with raised_on_all(self._meeting):
                along = here.rows.times(direction)
            rows, factors = here.rows.adjoint_terms(here.of_hessian * along)
        return self._unknowns.like_x0(self._sum(rows, factors))

    def _rounded(self, gradient: Array) -> Array:
        """The gradient as float32, if the residuals are no better: from its dtype the method knows their precision."""
        if self._functions.epsilon <= _EPSILON:
            return gradient
        with np.errstate(over="ignore"):
            rounded = gradient.astype(np.float32)
        in_range = np.isfinite(rounded).all() and ((rounded != 0) == (gradient != 0)).all()
        return rounded if in_range else gradient

    def _sum(self, rows: SparseRows, factors: Array) -> Array:
        return summed(rows, factors, OneRank() if self._parts else self._world)

    def linearized(self, x: Any, *samples: Array) -> _Linearized:
        """This rank's residuals and Jacobian at a point; those of the last two points are kept."""
        return self._linearized(*self._point(x), *samples)

    def _point(self, x: Any) -> tuple[Any, bytes]:
        """A point as `ResidualFunctions` take it, and what tells it from others.

        Of parts that is of all ranks: one whose part has not moved must call the functions where others call them.
        """
        x = x if has_names(x) else self._unknowns.vector("x", x)
        own = np.ascontiguousarray(_flat(x)).tobytes()
        if not self._parts:
            return x, own
        total = np.array([xxhash.xxh3_64_intdigest(own, seed=self._world.rank)], np.uint64).view(np.int64)
        return x, self._world.all_reduce(total, label="control").tobytes()

    def _linearized(self, x: Any, key: bytes, *samples: Array) -> _Linearized:
        which = b"".join(each.tobytes() for each in samples)
        here = self._kept.setdefault(key, {})
        self._kept.move_to_end(key)
        while len(self._kept) > _POINTS:
            self._kept.popitem(last=False)
        is_missing = which not in here
        if self._parts:  # a rank that has joined the run has kept nothing, or what other samples gave
            is_missing = on_any(self._world, is_missing)
        if is_missing:
            with raised_on_all(self._meeting):
                f = self._functions.residuals(x, *samples)
            with raised_on_all(self._meeting):
                found = _Linearized(f, self._functions.jacobian(x, f, *samples), self._loss)
            here[which] = found
        return here[which]

    def column_scale(self, x: Array) -> Array:
        """The inverse squares of the norms of the columns of J, as the diagonal of a preconditioner."""
        x, key = self._point(x)
        with raised_on_all(self._world):
            here = self._linearized(x, key)
            rows = here.rows.sparse
            if rows is None:
                raise ValueError(
                    "x_scale='jac' needs the columns of the Jacobian, and jac returned an operator; give x_scale as "
                    "numbers, or preconditioner="
                )
            # Not weighted by the loss, whose weights are near 0 far from the minimum.
            rows, factors = rows._replace(data=rows.data * rows.data), np.ones(len(here.f))
        squares = self._sum(rows, factors)
        return 1 / np.where(squares > 0, squares, 1.0)
