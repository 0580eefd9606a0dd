"""Finite differences: the steps of SciPy, columns that move together, and gradients whose columns ranks share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from importlib import import_module
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.comm.errors import OneRank, on_any
from mpishard.inverse.functions import Attempts, Functions, sum_of_values
from mpishard.inverse.unknowns import Unknowns

if TYPE_CHECKING:
    from mpishard.comm.mesh import Mesh
    from mpishard.inverse.mesh_run import MeshRanks
    from mpishard.inverse.one_process import OneProcess

Array = Any
DIFFERENCES = {"2-point": 1 / 2, "3-point": 1 / 3, "cs": 1 / 2}  # powers of the rounding error for the step
_GATHERED = 2**18  # the most numbers that are gathered from all ranks at a time


def steps_of(x: Array, epsilon: float, scheme: str) -> Array:
    """The steps of all unknowns, away from 0, for functions with the relative rounding error `epsilon`."""
    return epsilon ** DIFFERENCES[scheme] * np.where(x < 0, -1.0, 1.0) * np.maximum(1.0, abs(x))


def moves_of(scheme: str, step: float, below: float, above: float) -> tuple[float, ...]:
    """By how much an unknown moves: once for two points, twice for three.  The bounds are so far below and above it."""
    # As SciPy; but where bounds are less than three steps apart, it may take a shorter step to both sides.
    away = 1.0 if above >= below else -1.0  # from the nearer bound
    if scheme == "2-point":
        if not -below <= step <= above:
            step = -step if abs(step) <= max(below, above) else away * max(below, above)
        return (step,)
    step = abs(step)
    if step <= min(below, above):
        return step, -step
    step = away * min(step, 0.5 * max(below, above))
    return step, 2 * step


def slope_of(f: Any, moved: Sequence[Any], distances: Sequence[float]) -> Any:
    """The derivative, from values `f` at the point, and those where an unknown has moved by these distances."""
    if len(moved) == 1:
        return (moved[0] - f) / distances[0]
    (near, far), (one, two) = moved, distances
    if one * two <= 0:  # on both sides; or one of the moves is lost in rounding
        return (near - far) / (one - two)
    # The slope at 0 of the parabola through three points.
    return (near - f) / one * (two / (two - one)) - (far - f) / two * (one / (two - one))


class Sparsity:
    """Where the rows of a Jacobian on this rank may have elements: column by column, in the order of the rows.

    `given` is such a matrix, an array or sparse. Raises ValueError unless it has as many `columns` as there are
    unknowns, ModuleNotFoundError without SciPy.
    """

    def __init__(self, given: Any, columns: int) -> None:
        try:
            self._kind = import_module("scipy.sparse").csc_array
        except ModuleNotFoundError as error:
            text = "jac_sparsity needs SciPy, whose sparse rows the Jacobian has: pip install scipy"
            raise ModuleNotFoundError(text, name=error.name) from None
        found = self._kind(given if hasattr(given, "tocsc") else np.atleast_2d(np.asarray(given)) != 0, copy=True)
        self.shape = found.shape
        if self.shape[1] != columns:
            raise ValueError(
                f"jac_sparsity has the shape {self.shape}, but there are {columns} unknowns; give (residuals, unknowns)"
            )
        found.sum_duplicates()
        self.rows, self._starts = found.indices.astype(np.int64), found.indptr.astype(np.int64)
        self.groups: list[np.ndarray] = []  # of columns that move together

    def group_columns(self, world: Any) -> None:
        """Group the columns so that no row of any rank has two elements in a group.  Collective.

        Each column goes into the first group that has room for it (A. R. Curtis, M. J. D. Powell, J. K. Reid: On the
        estimation of sparse Jacobian matrices, IMA Journal of Applied Mathematics 13, 117-119, 1974).
        """
        columns = np.repeat(np.arange(self.shape[1]), np.diff(self._starts))
        places = self.rows * self.shape[1] + columns
        count = self.shape[0]
        if world.size > 1:
            rows, sizes = zip(*world.allgather_object((count, places.size)), strict=True)
            places += sum(rows[: world.rank]) * self.shape[1]
            everywhere = np.empty(sum(sizes), np.int64)
            places, count = world.all_gather(everywhere, places, sizes, label="differences"), sum(rows)
        rows_of: list[list[int]] = [[] for _ in range(self.shape[1])]
        for row, column in zip(*(each.tolist() for each in np.divmod(places, self.shape[1])), strict=True):
            rows_of[column].append(row)
        taken = [0] * count  # for each row the groups with an element in it, a bit each
        groups: dict[int, list[int]] = {}
        for column, own in enumerate(rows_of):
            full = reduce(or_, (taken[row] for row in own), 0)
            group = ~full & (full + 1)
            for row in own:
                taken[row] |= group
            groups.setdefault(group, []).append(column)
        self.groups = [np.array(columns) for columns in groups.values()]

    def elements(self, column: int) -> slice:
        """The elements of a column, among those of `rows` and of `matrix`."""
        return slice(self._starts[column], self._starts[column + 1])

    def matrix(self, data: np.ndarray) -> Any:
        """The sparse rows with these elements."""
        return self._kind((data, self.rows, self._starts), shape=self.shape).tocsr()


class FiniteDifferences:
    """Value and gradient of a user's function by finite differences.  Collective over the mesh, its creation too.

    A column is the derivative by one unknown.  The ranks of a group, those of the tensor axis, call the function for
    the same points.  Where it returns the whole value (`sums` is False), groups share the columns; else each group has
    its part of the value, so that all of them compute all columns.  Elements that cannot move have the derivative 0.

    `ranks` have begun the minimisation.  The unknowns are whole on each rank, or fields of a Partition.
    """

    def __init__(
        self,
        functions: Functions,
        unknowns: Unknowns,
        ranks: OneProcess | MeshRanks,
        mesh: Mesh | None,
        sums: bool,
        retries: int,
    ) -> None:
        assert functions.differences is not None
        self._functions, self._unknowns, self._scheme = functions, unknowns, functions.differences
        self._points = 1 if self._scheme == "2-point" else 2
        self._mesh, self._sums, self._world = mesh, sums, ranks.world
        group: Any = OneRank() if mesh is None else mesh.tensor
        self._attempts = Attempts(group, retries, agrees=group.size > 1)
        self._lower, self._upper, may_move = _limits(ranks)
        self._free = np.flatnonzero(may_move & (self._lower < self._upper))
        # Columns of this rank's elements begin at `_first`, of `_count` in the group.
        counts = [len(self._free)]
        self._first = 0
        if unknowns.has_fields:
            counts = group.allgather_object(len(self._free))
            self._first = sum(counts[: group.rank])
        self._count = sum(counts)
        self._groups, self._number = (1, 0) if mesh is None or sums else (mesh.data.size, mesh.data.rank)

    def __call__(self, x: Any) -> tuple[float, Any, BaseException | None]:
        """This rank's value and gradient at a point, as its function could have returned them, or its error."""
        unknowns = self._unknowns
        flat = unknowns.flat if unknowns.parameters is not None else unknowns.vector("x", x)
        gradient = np.zeros(unknowns.given_size)
        attempt = self._attempts(partial(self._value, flat))
        value, problem = attempt.found if attempt.problem is None else math.nan, attempt.problem
        if not on_any(self._world, attempt.has_failed or not math.isfinite(value)):
            host = np.asarray(arrays.to_host(flat), np.float64)[self._free]
            targets = self._targets(host, flat.dtype)
            values, problem = self._measured(flat, targets)
            total, moved = self._combined(value, values)
            if not self._sums or self._mesh is None or self._mesh.data.rank == 0:  # a sum counts once
                for place, found, distances in zip(self._free, moved, targets - host[:, None], strict=True):
                    gradient[place] = slope_of(total, found.tolist(), distances.tolist()) + 0.0  # no -0.0
        return value, unknowns.like_x0(np.asarray(gradient, flat.dtype, like=flat)), problem

    def _targets(self, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Where each element that may move does, a row each, rounded as the unknowns are."""
        steps = steps_of(x, float(np.finfo(dtype).eps), self._scheme)
        lower, upper = self._lower[self._free], self._upper[self._free]
        given = zip(steps.tolist(), (x - lower).tolist(), (upper - x).tolist(), strict=True)
        moves = np.array([moves_of(self._scheme, *each) for each in given]).reshape(-1, self._points)
        targets = np.clip(x[:, None] + moves, lower[:, None], upper[:, None])
        return targets.astype(dtype).astype(np.float64)

    def _measured(self, flat: Array, targets: np.ndarray) -> tuple[np.ndarray, BaseException | None]:
        """Values at the points of this group's columns, a row each; or NaN from the first one that fails, and why."""
        columns = range(self._number, self._count, self._groups)
        values = np.full((len(columns), self._points), math.nan)
        for row, column in enumerate(columns):
            own = column - self._first
            for point in range(self._points):
                where: tuple[Any, ...] = ()  # another rank of the group has the element
                if 0 <= own < len(self._free):
                    where = self._free[own], targets[own, point]
                attempt = self._attempts(partial(self._value, flat, *where))
                if attempt.has_failed:
                    return values, attempt.problem
                values[row, point] = attempt.found
        return values, None

    def _value(self, flat: Array, place: int | None = None, target: float = 0.0) -> float:
        """The user's function at a point, or where one of its elements has moved."""
        unknowns = self._unknowns
        if unknowns.parameters is None:
            point = flat.copy()
            if place is not None:
                point[place] = target
            return self._functions.value(unknowns.like_x0(point))
        if place is None:
            return self._functions.value(unknowns.parameters)
        before = flat[place : place + 1].copy()
        flat[place] = target
        try:
            return self._functions.value(unknowns.parameters)
        finally:
            flat[place : place + 1] = before

    def _combined(self, value: float, values: np.ndarray) -> tuple[float, np.ndarray]:
        """The value of all ranks at the point, and where this rank's elements have moved, a row each."""
        world: Any = self._world
        found = values
        if self._sums and world.size > 1:
            own = np.array([value, *values.reshape(-1)])
            most = max(1, _GATHERED // world.size)
            for start in range(0, own.size, most):
                part = own[start : start + most]
                by_rank = np.empty(part.size * world.size)
                world.all_gather(by_rank, part.copy(), [part.size] * world.size, label="differences")
                part[...] = [sum_of_values(each) for each in by_rank.reshape(world.size, -1).T.tolist()]
            value, found = float(own[0]), own[1:].reshape(values.shape)
        elif self._groups > 1:
            assert self._mesh is not None
            shares = [range(number, self._count, self._groups) for number in range(self._groups)]
            counts = [len(share) * self._points for share in shares]
            gathered = np.empty(self._count * self._points)
            self._mesh.data.all_gather(gathered, values.reshape(-1), counts, label="differences")
            found = np.empty((self._count, self._points))
            for number, part in enumerate(np.split(gathered, np.cumsum(counts)[:-1])):
                found[number :: self._groups] = part.reshape(-1, self._points)
        return value, found[self._first : self._first + len(self._free)]


def _limits(ranks: OneProcess | MeshRanks) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper bounds, and which elements may move, in the order that the user sees.  Collective."""
    minimizer = ranks.minimizer
    limits, point = minimizer.limits, minimizer.point
    zeros = arrays.zeros(point.size, point.dtype, like=point)
    given = (limits.lower, -math.inf), (limits.upper, math.inf)
    lower, upper = (zeros + point.dtype.type(none) if bound is None else bound for bound, none in given)
    moves = zeros if limits.fixed is None else zeros + limits.fixed.astype(point.dtype)
    lower, upper, fixed = (np.array(arrays.to_host(ranks.gather(each)), np.float64) for each in (lower, upper, moves))
    return lower, upper, fixed == 0
