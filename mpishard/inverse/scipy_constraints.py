"""Constraints in the forms that SciPy knows, as `augmented_lagrangian` takes them; SciPy itself is not needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpishard.arguments import shown
from mpishard.backend.sparse_rows import SparseRows
from mpishard.comm.errors import OneRank
from mpishard.inverse.functions import Hessian
from mpishard.inverse.operators import OwnRows, is_operator, summed
from mpishard.inverse.residuals import ResidualFunctions
from mpishard.inverse.unknowns import Unknowns, copy_of_point, has_names
from mpishard.minimizers.elements import whole_bounds

Array = Any
_FORMS = (
    "scipy.optimize.NonlinearConstraint, scipy.optimize.LinearConstraint, a dictionary with 'type', 'fun' and 'jac', "
    "or a list of these"
)
_ENTRIES = {"type", "fun", "jac", "args"}


class ScipyConstraints:
    """The constraints of SciPy's objects and dictionaries, one after the other.  Not collective.

    `bounds` are those of `minimize`, which finite differences of constraints keep, too.

    Raises TypeError or ValueError if one is none, or if a Jacobian is missing.
    """

    def __init__(self, given: Any, unknowns: Unknowns, bounds: Any = None) -> None:
        several = isinstance(given, list | tuple)
        self._constraints = [_constraint(each, unknowns, bounds) for each in (given if several else [given])]
        self._unknowns = unknowns
        self._sizes = [0] * len(self._constraints)  # at the last point
        self._jacobians: tuple[bytes, list[OwnRows]] = b"", []  # at the last point where they were wanted

    def function(self, x: Any, *args: Any) -> np.ndarray:
        """All constraints at a point; `args` are those of the function that is minimised."""
        point = self._point(x)
        found = [each.functions.residuals(point) for each in self._constraints]
        self._sizes = [each.size for each in found]
        return np.concatenate(found)

    def adjoint(self, x: Any, v: np.ndarray, *args: Any) -> Any:
        """The adjoint of their Jacobian at a point times v."""
        total = np.zeros(self._unknowns.given_size)
        for jacobian, part in zip(self._jacobians_at(x), self._parts(v), strict=True):
            total += summed(*jacobian.adjoint_terms(part), OneRank())
        return self._unknowns.like_x0(total)

    def forward(self, x: Any, direction: Any, *args: Any) -> np.ndarray:
        """Their Jacobian at a point times a direction."""
        along = self._unknowns.vector("the direction", direction)
        return np.concatenate([each.times(along).copy() for each in self._jacobians_at(x)])

    def hessian_product(self, x: Any, direction: Any, v: np.ndarray) -> Array:
        """The Hessian of v times the constraints at a point, times a direction, flat."""
        total = np.zeros(self._unknowns.given_size)
        for each, part in zip(self._constraints, self._parts(v), strict=True):
            if each.hess is not None:
                product = each.hess.product(copy_of_point(x), copy_of_point(direction), part.copy())
                total += self._unknowns.vector(f"the product of hess of {each.name}", product)
        return total

    def expect_hessians(self, method: str) -> None:
        """Raise ValueError if there are no products with the Hessian of each constraint."""
        if self._unknowns.is_split:
            raise ValueError(
                f"method={method} with SciPy's constraints needs all elements of x0, which is split over ranks: call "
                "mpishard.augmented_lagrangian with hessp= and forward= of this rank's part"
            )
        for each in self._constraints:
            if each.hess is None and not each.is_linear:
                raise ValueError(
                    f"method={method} needs the Hessian of each constraint, and {each.name} has none: give "
                    "NonlinearConstraint(..., hess=function), where hess(x, v) is that of v times the constraints; "
                    "'L-BFGS-B' does without"
                )

    def _jacobians_at(self, x: Any) -> list[OwnRows]:
        point = self._point(x)
        key = (point.flat if has_names(point) else point).tobytes()
        # Where each rank has its part of the point, all call `jac` together, whichever parts have changed.
        if key != self._jacobians[0] or self._unknowns.is_split:
            found = []
            for each, size in zip(self._constraints, self._sizes, strict=True):
                # Differences need the values, functions their number.
                values = np.empty(size) if callable(each.jac) else each.functions.residuals(point)
                jacobian = each.functions.jacobian(point, values)
                if not is_operator(jacobian):
                    jacobian = jacobian.copy()  # the user may write that of another constraint into the same array
                found.append(OwnRows(jacobian, "the Jacobian"))
            self._jacobians = key, found
        return self._jacobians[1]

    def _parts(self, v: np.ndarray) -> list[np.ndarray]:
        """The part of each constraint."""
        return np.split(v, np.cumsum(self._sizes)[:-1])

    def lower(self) -> np.ndarray:
        """The lower limits, as many as the constraints at the last point."""
        return self._limits("lower")

    def upper(self) -> np.ndarray:
        """The upper limits."""
        return self._limits("upper")

    def _limits(self, name: str) -> np.ndarray:
        limits = [(np.asarray(getattr(each, name), np.float64).reshape(-1), each) for each in self._constraints]
        for (found, each), size in zip(limits, self._sizes, strict=True):
            if found.size not in (1, size):
                raise ValueError(f"{each.name} has {found.size} {name} limits, but {size} constraints; give one each")
        return np.concatenate(
            [np.broadcast_to(found, (size,)) for (found, _), size in zip(limits, self._sizes, strict=True)]
        )

    def _point(self, x: Any) -> Any:
        return x if has_names(x) else self._unknowns.vector("x", x)


class _Constraint:
    """One constraint of SciPy's: its functions and its limits, and its name for messages."""

    def __init__(
        self,
        name: str,
        fun: Any,
        jac: Any,
        args: Any,
        limits: tuple[Any, Any],
        unknowns: Unknowns,
        bounds: Any,
        hess: Any = None,
        is_linear: bool = False,
    ) -> None:
        if not callable(fun):
            raise TypeError(f"{name}: fun={shown(fun)} must be a function that returns the constraints")
        if not callable(jac) and (unknowns.is_split or unknowns.parameters is not None or unknowns.has_fields):
            raise ValueError(
                f"{name}: jac={shown(jac)} takes finite differences of a whole x0 without names; give jac=function, "
                "which returns the Jacobian, or an operator with rmatvec"
            )
        is_complex = unknowns.tree is not None and unknowns.tree.complex_leaf is not None
        if isinstance(jac, str) and jac == "cs" and is_complex:  # whose steps are complex themselves
            raise ValueError(f"{name}: jac='cs' is for real numbers, and x0 is complex: take '2-point' or '3-point'")
        self.name, self.jac, self.is_linear = name, jac, is_linear
        # SciPy's default, a strategy of updates, is for its own methods.
        self.hess = Hessian(hess, ()) if callable(hess) else None
        self.lower, self.upper = limits
        room = _room(unknowns, None if callable(jac) else bounds)
        self.functions = ResidualFunctions(fun, jac, args, None, None, *room, unknowns, of="constraints")


def _room(unknowns: Unknowns, bounds: Any) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest values that finite differences may take; all, where bounds leave one value."""
    room = np.full((2, unknowns.given_size), [[-math.inf], [math.inf]])
    pair = unknowns.options(bounds)["bounds"]
    if pair is None:
        return room[0], room[1]
    for side, limits in zip(room, whole_bounds(pair, unknowns.option_specs, room.dtype), strict=True):
        if limits is not None:
            side[:] = limits
    pinned = room[0] == room[1]
    return np.where(pinned, -math.inf, room[0]), np.where(pinned, math.inf, room[1])


def _constraint(given: Any, unknowns: Unknowns, bounds: Any) -> _Constraint:
    if isinstance(given, Mapping):
        kind, extra = given.get("type"), set(given) - _ENTRIES
        if kind not in ("eq", "ineq") or "fun" not in given or extra:
            wrong = f"the entry {sorted(map(str, extra))[0]!r}" if extra else f"type={shown(kind)}"
            raise ValueError(
                f"constraints: a dictionary has 'type', which is 'eq' or 'ineq', 'fun', 'jac' and 'args'; got {wrong}"
            )
        jac, upper = given.get("jac"), 0.0 if kind == "eq" else math.inf
        jac = "2-point" if jac is None else jac
        return _Constraint(
            f"constraint {kind!r}", given["fun"], jac, given.get("args", ()), (0.0, upper), unknowns, bounds
        )
    if not (hasattr(given, "lb") and hasattr(given, "ub") and (hasattr(given, "A") or hasattr(given, "fun"))):
        raise TypeError(f"constraints={shown(given)} must be {_FORMS}")
    name = type(given).__name__
    if np.any(getattr(given, "keep_feasible", False)):
        raise ValueError(
            f"{name}: keep_feasible=True is not for an augmented Lagrangian, which evaluates outside of the limits; "
            "bounds= are always kept"
        )
    limits = given.lb, given.ub
    if hasattr(given, "fun"):
        return _Constraint(name, given.fun, given.jac, (), limits, unknowns, bounds, getattr(given, "hess", None))
    matrix = given.A if hasattr(given.A, "tocsr") else np.atleast_2d(np.asarray(given.A, np.float64))
    if matrix.shape[1] != unknowns.given_size:
        raise ValueError(
            f"{name}: A has {matrix.shape[1]} columns, but x0 has {unknowns.given_size} elements; give one for each"
        )
    rows = SparseRows.of(matrix)

    def values(x: Any) -> Array:
        flat = x.flat if has_names(x) else unknowns.vector("x", x)
        return rows.times(np.ascontiguousarray(flat, np.float64))

    return _Constraint(name, values, lambda x: matrix, (), limits, unknowns, None, is_linear=True)
