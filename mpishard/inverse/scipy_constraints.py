"""Constraints in the forms that SciPy knows, as `augmented_lagrangian` takes them; SciPy itself is not needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpishard.arguments import shown
from mpishard.backend.sparse_rows import SparseRows
from mpishard.inverse.residuals import ResidualFunctions, adjoint_product
from mpishard.inverse.unknowns import Unknowns, has_names
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

    def function(self, x: Any, *args: Any) -> np.ndarray:
        """All constraints at a point; `args` are those of the function that is minimised."""
        point = self._point(x)
        found = [each.functions.residuals(point) for each in self._constraints]
        self._sizes = [each.size for each in found]
        return np.concatenate(found)

    def adjoint(self, x: Any, v: np.ndarray, *args: Any) -> Any:
        """The adjoint of their Jacobian at a point times v."""
        point, total = self._point(x), np.zeros(self._unknowns.given_size)
        parts = np.split(v, np.cumsum(self._sizes)[:-1])
        for each, part in zip(self._constraints, parts, strict=True):
            needs_values = not callable(each.jac)  # for differences
            values = each.functions.residuals(point) if needs_values else part
            total += adjoint_product(each.functions.jacobian(point, values), part)
        return self._unknowns.like_x0(total)

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
        self, name: str, fun: Any, jac: Any, args: Any, limits: tuple[Any, Any], unknowns: Unknowns, bounds: Any
    ) -> None:
        if not callable(fun):
            raise TypeError(f"{name}: fun={shown(fun)} must be a function that returns the constraints")
        if not callable(jac) and (unknowns.is_split or unknowns.parameters is not None or unknowns.has_fields):
            raise ValueError(
                f"{name}: jac={shown(jac)} takes finite differences of a whole x0 without names; give jac=function, "
                "which returns the Jacobian, or an operator with rmatvec"
            )
        self.name, self.jac = name, jac
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
        return _Constraint(name, given.fun, given.jac, (), limits, unknowns, bounds)
    matrix = given.A if hasattr(given.A, "tocsr") else np.atleast_2d(np.asarray(given.A, np.float64))
    if matrix.shape[1] != unknowns.given_size:
        raise ValueError(
            f"{name}: A has {matrix.shape[1]} columns, but x0 has {unknowns.given_size} elements; give one for each"
        )
    rows = SparseRows.of(matrix)

    def values(x: Any) -> Array:
        flat = x.flat if has_names(x) else unknowns.vector("x", x)
        return rows.times(np.ascontiguousarray(flat, np.float64))

    return _Constraint(name, values, lambda x: matrix, (), limits, unknowns, None)
