"""`augmented_lagrangian`: equality constraints by the method of multipliers, around the loop of `minimize`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import integer, number, reject_unknown, shown
from mpishard.backend import array as arrays
from mpishard.comm.errors import OneRank, raised_on_all
from mpishard.inverse.functions import Callback, Functions, Watch, opening, sum_of_values, world_of
from mpishard.inverse.minimization import files_given, run_loop
from mpishard.inverse.result import MinimizationOutcome, OptimizeResult, make_method
from mpishard.inverse.reverse_communication import ReverseCommunication, begin_again
from mpishard.inverse.unknowns import Unknowns
from mpishard.minimizers.method import Method

if TYPE_CHECKING:
    from mpishard.comm.axis import Axis
    from mpishard.comm.mesh import Mesh
    from mpishard.record import RunRecord

Array = Any
# Bertsekas, section 2.2.5: the penalty grows where a correction has not made the constraints so much smaller.
_GROW, _SMALLER = 10.0, 0.25
_LARGEST_PENALTY = 1e14
_FIRST_TOLERANCE, _TIGHTER = 0.01, 0.1  # of the minimisations
_STALLED = 3  # minimisations that change nothing
_STATUS = {"callback": 99, "signal": 99, "seconds": 1}
_FATAL = ("not finite", "range", "unbounded")
_NO_SOLUTION = (
    "the constraints may have no common solution, or adjoint is not that of their Jacobian, which "
    "mpishard.check_adjoint tests"
)
_OF_MINIMIZE = ("checkpoints", "resume", "elastic", "samples")


def augmented_lagrangian(
    fun: Callable[..., Any],
    x0: Any,
    constraints: Callable[..., Any],
    adjoint: Callable[..., Any],
    *,
    args: Any = (),
    method: str | Method = "L-BFGS-B",
    jac: bool | Callable[..., Any] = True,
    bounds: Any = None,
    multipliers: Any = None,
    penalty: float = 10.0,
    gtol: float = 1e-5,
    ctol: float = 1e-6,
    maxiter: int = 100,
    callback: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    reduction: str | None = None,
    record: RunRecord | None = None,
    **elements: Any,
) -> OptimizeResult:
    """Minimise a function under equality constraints ``c(x) = 0``, and bounds.

    The method of multipliers minimises ``f - y'c + penalty / 2 |c|^2`` by `minimize`, then corrects the multipliers y
    by ``y - penalty c``, until both the constraints and the gradient of the Lagrangian ``f - y'c`` are small enough.
    The penalty grows tenfold where the largest constraint is more than a quarter of the one before, and a minimisation
    ends at a tenth of the tolerance of the one before.  What a minimisation has learned of the curvature serves the
    next one, unless the penalty has grown.  It needs products with the adjoint of the Jacobian of c, not
    the Jacobian.  With a mesh it is collective.

    Parameters
    ----------
    fun, x0 : as for `minimize`
        The function and the start, which need not meet the constraints.  With a `Partition` all arrays of points and
        gradients are of this rank's part, also those of `adjoint` and of the result.
    constraints : callable
        ``constraints(x, *args)`` returns c, an array of as many numbers in each call.
    adjoint : callable
        ``adjoint(x, v, *args)`` returns ``J(x)' v``, like a gradient: J is the Jacobian of c, v an array like c.
    args : tuple
        Further arguments of all functions.
    method : str or Method
        ``"L-BFGS-B"``, ``"L-BFGS"`` or ``"CG"``, or such a method.
    jac : True or callable
        As for `minimize`.
    bounds : optional
        As for `minimize`, for ``"L-BFGS-B"``.
    multipliers : array, optional
        y, like c, to begin with: those of an earlier result go on from there.  Default: 0.
    penalty : float
        To begin with.
    gtol : float
        It has converged where the largest element of the projected gradient of the Lagrangian is at most this,
    ctol : float
        and that of c at most this.
    maxiter : int
        The most minimisations.
    callback : callable, optional
        Called after each minimisation, as that of `minimize`; an intermediate result has ``x``, ``constr_violation``,
        ``multipliers``, ``penalty``, ``nit`` and ``nfev``.
    options : dict, optional
        Of each minimisation, as for `minimize`, but for ``gtol``.  ``ftol`` is 0 if it is not given.
    mesh : Mesh, optional
        The ranks that minimise together.
    reduction : {None, "sum"}
        None: `fun`, `constraints` and `adjoint` return the same on all ranks.  ``"sum"``: `fun` its part of value and
        gradient, as for `minimize`; `constraints` some of the constraints, on each rank others, any number, also none;
        and `adjoint` the product with their v, which is summed over the ranks.  With an `x0` that is split over the
        tensor axis, or a `Partition`, `adjoint` returns this rank's part, as the gradient: what the constraints of all
        ranks of its group contribute.
    record : RunRecord, optional
        As for `minimize`.
    **elements
        ``fixed``, ``inner_product``, ``preconditioner``: as for `minimize`.

    Returns
    -------
    OptimizeResult
        ``x``; ``fun``, the value of the function alone; ``constr``, the constraints, and ``multipliers``, on a mesh
        with ``"sum"`` those of this rank; ``constr_violation``, the largest of all constraints; ``lagrangian_grad``
        and ``optimality``, the largest element of it, projected; ``penalty``; ``nit``, the number of minimisations;
        ``nfev``, evaluations; ``status`` and ``success`` as those of `minimize`; ``message``.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, or a function returns something else; on a mesh on all ranks.
    Exception
        What a function raises, on a mesh on all ranks.

    Notes
    -----
    Inequalities ``c(x) >= 0`` become equalities ``c(x) - s = 0`` by further unknowns s, with the bounds ``s >= 0``.

    References
    ----------
    D. P. Bertsekas: Constrained Optimization and Lagrange Multiplier Methods (1982), section 2.2.5.  R. Andreani, E. G.
    Birgin, J. M. Martinez and M. L. Schuverdt: On augmented Lagrangian methods with general lower-level constraints.
    SIAM Journal on Optimization 18, 1286-1309 (2007), algorithm 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> def plane(x):
    ...     return x.sum(), np.ones(2)
    >>> result = augmented_lagrangian(plane, [1.0, 0.0], lambda x: [x @ x - 2], lambda x, v: 2 * x * v)
    >>> [round(float(each), 4) for each in (*result.x, *result.multipliers)]
    [-1.0, -1.0, -0.5]
    """
    world = world_of(mesh)
    with opening(mesh, "augmented_lagrangian") as same:
        known = {name: elements.pop(name, None) for name in ("fixed", "inner_product", "preconditioner")}
        for name in elements:
            if name in _OF_MINIMIZE:
                raise TypeError(
                    f"augmented_lagrangian takes no {name}=, as minimize does: save x, multipliers and penalty in "
                    "callback=, and call it with these to continue"
                )
        reject_unknown("augmented_lagrangian", elements)
        if mesh is None and (reduction is not None or record is not None):
            raise ValueError("reduction and record are for a mesh; give mesh=mpishard.Mesh()")
        for name, function in (("constraints", constraints), ("adjoint", adjoint)):
            if not callable(function):
                raise TypeError(f"{name}={shown(function)} must be a function")
        unknowns = Unknowns(x0)
        if mesh is None:
            unknowns.check_not_split()
        given = {} if options is None else options
        if isinstance(given, Mapping) and "gtol" in given:
            raise ValueError("options={'gtol': ...} is chosen for each minimisation; gtol= is that of the last one")
        if isinstance(method, str) and isinstance(given, Mapping):
            given = {"ftol": 0.0, **given}
        chosen, loop = make_method(method, given, None, unknowns.total, **unknowns.options(bounds, **known))
        loop.expect_no_more_results("augmented_lagrangian")
        if chosen.needs_products:
            raise ValueError(f"method={shown(method)} needs products with the Hessian; 'L-BFGS-B' and 'CG' do not")
        functions = Functions(fun, jac, None, args)
        functions.check_terms(reduction)
        if functions.l1:
            raise ValueError("augmented_lagrangian takes no L1 term, which minimize does; take a smooth term")
        run = _Multipliers(functions, constraints, adjoint, args, unknowns, world, reduction)
        run.penalty = number("penalty", penalty, above=0)
        gtol, ctol = number("gtol", gtol, least=0), number("ctol", ctol, least=0)
        maxiter = integer("maxiter", maxiter, least=1)
        watcher = Callback(callback)
        same |= {"method": type(chosen), "reduction": reduction, "penalty": penalty, "gtol": gtol, "ctol": ctol}
        same |= {"maxiter": maxiter, "multipliers": multipliers is not None, **files_given(mesh, None, False, record)}
        same["retries"] = loop.retries
    run.begin(multipliers)

    here, quiet = Functions(run.value_and_gradient, True, None, ()), Callback(None)
    first = replace(chosen, gtol=max(_FIRST_TOLERANCE, gtol))
    optimizer = ReverseCommunication(first, run.unknowns, mesh=mesh, reduction=reduction)

    def minimized(tolerance: float, keep_history: bool) -> MinimizationOutcome:
        if optimizer.has_ended:
            begin_again(optimizer, tolerance, keep_history)
        return run_loop(optimizer, here, run.unknowns, quiet, loop, record=record)

    return _outer_loop(run, minimized, watcher, gtol, ctol, maxiter)


def _outer_loop(
    run: _Multipliers,
    minimized: Callable[[float, bool], MinimizationOutcome],
    callback: Callback,
    gtol: float,
    ctol: float,
    maxiter: int,
) -> OptimizeResult:
    """Minimise and correct in turns. Collective over the mesh."""
    tolerance, before, lowest = _FIRST_TOLERANCE, math.inf, math.inf
    iterations = evaluations = stalled = 0
    same_penalty = True
    watch = Watch(run.world, callback)
    status, text = 1, f"stopped: the number of minimisations reached maxiter={maxiter}"
    while iterations < maxiter:
        # Multipliers change the Hessian of the augmented function little; another penalty is another function.
        ended = minimized(max(tolerance, gtol), same_penalty)
        iterations, evaluations = iterations + 1, evaluations + ended.result.nfev
        run.measure()
        optimality, reason = ended.progress.projected_norm, ended.reason
        if reason in _STATUS or reason in _FATAL:
            status, text = _STATUS.get(reason, 2), ended.result.message
            break
        run.correct()
        if run.violation <= ctol and optimality <= gtol:
            status, text = 0, f"converged: the constraints are met to ctol={ctol:g}, the gradient to gtol={gtol:g}"
            break
        stalled = 0 if run.violation < 0.5 * lowest or reason == "gradient" else stalled + 1
        lowest = min(lowest, run.violation)
        if stalled >= _STALLED:
            hint = "mpishard.check_adjoint tests adjoint" if run.violation <= ctol else _NO_SOLUTION
            text = f"failed: nothing gets smaller any more; the last minimisation {ended.result.message}; {hint}"
            status = 2
            break
        same_penalty = run.violation <= max(_SMALLER * before, ctol)
        if not same_penalty:
            if run.penalty * _GROW > _LARGEST_PENALTY:
                status, text = 2, f"failed: the penalty has reached {run.penalty:g}; {_NO_SOLUTION}"
                break
            run.penalty *= _GROW
        before, tolerance = run.violation, tolerance * _TIGHTER
        if watch.reason_to_stop(partial(run.intermediate, iterations, evaluations)):
            status, text = 99, "stopped: the callback raised StopIteration or returned True"
            break
    return OptimizeResult(
        x=run.unknowns.shown_to_user(),
        fun=run.value(),
        constr=run.constr,
        constr_violation=run.violation,
        multipliers=run.multipliers,
        lagrangian_grad=ended.result["jac"],
        optimality=optimality,
        penalty=run.penalty,
        nit=iterations,
        nfev=evaluations + 1,
        status=status,
        success=status == 0,
        message=f"{text} (largest constraint {run.violation:.3g}, largest element of the gradient {optimality:.3g})",
    )


class _Multipliers:
    """The augmented function with the multipliers of this rank. Methods are collective, unless they say otherwise."""

    def __init__(
        self,
        functions: Functions,
        constraints: Callable[..., Any],
        adjoint: Callable[..., Any],
        args: Any,
        unknowns: Unknowns,
        world: Axis | OneRank,
        reduction: str | None,
    ) -> None:
        self._functions = functions
        self._constraints, self._adjoint = constraints, adjoint
        self._args = args if isinstance(args, tuple) else (args,)
        self.unknowns = unknowns
        self.world = world
        self._sums = reduction == "sum"
        # The terms of all constraints are rounded once: the partition is no part of the result.
        self._sums_here = self._sums and unknowns.is_cut_by_application
        # Of ranks that share the unknowns, whose functions may wait for each other: after each one all must agree.
        self._meeting = world if unknowns.is_split or self._sums_here else None
        self.penalty = 1.0
        self.multipliers: np.ndarray = np.empty(0)
        self.constr: np.ndarray = np.empty(0)  # at the unknowns
        self.violation = math.nan  # over all ranks

    def begin(self, multipliers: Any) -> None:
        """Find the number of constraints at the start, and take the multipliers."""
        with raised_on_all(self.world):
            found = self._constraints(self.unknowns.shown_to_user(), *self._args)
            self.constr = _reals("constraints must return", found)
            self.multipliers = np.zeros(self.constr.size)
            if multipliers is not None:
                self.multipliers = _reals("multipliers must be", multipliers).copy()
            if self.multipliers.size != self.constr.size:
                raise ValueError(
                    f"there are {self.multipliers.size} multipliers, but {self.constr.size} constraints; give one each"
                )
            if not np.isfinite(self.multipliers).all():
                raise ValueError("multipliers must be finite")

    def _of_point(self) -> np.ndarray:
        found = self._constraints(self.unknowns.shown_to_user(), *self._args)
        constr = _reals("constraints must return", found)
        if constr.size != self.multipliers.size:
            raise ValueError(
                f"constraints returned {constr.size} numbers, but {self.multipliers.size} at x0; return as many"
            )
        return constr

    def value_and_gradient(self, x: Any) -> tuple[float, Any]:
        """The augmented Lagrangian, on a mesh with "sum" this rank's part of it.

        Collective if the unknowns are split or cut by the application, and only then.
        """
        unknowns = self.unknowns  # whose values are those of x
        with raised_on_all(self._meeting):
            value, gradient = self._functions.value_and_gradient(x)
            flat = unknowns.vector("the gradient", gradient)
        with raised_on_all(self._meeting):
            constr = self._of_point()
        multipliers = self.multipliers - self.penalty * constr
        with raised_on_all(self._meeting):
            product = self._adjoint(unknowns.shown_to_user(), multipliers, *self._args)
            flat = flat - unknowns.vector("the product of adjoint", product)
        terms = constr * (0.5 * self.penalty * constr - self.multipliers)
        total = self._total(value, terms) if self._sums_here else math.nan
        if math.isfinite(total):
            return total if self.world.rank == 0 else 0.0, unknowns.like_x0(flat)
        return value + sum_of_values(terms), unknowns.like_x0(flat)

    def _total(self, value: float, terms: np.ndarray) -> float:
        """The values of all ranks, and the terms of all, as one process adds them up."""
        values, parts = zip(*self.world.allgather_object((value, _exact_parts(terms))), strict=True)
        return sum_of_values(values) + sum_of_values([part for each in parts for part in each])

    def measure(self) -> None:
        """Evaluate the constraints at the unknowns."""
        with raised_on_all(self.world):
            self.constr = self._of_point()
        largest = float(np.max(np.abs(self.constr), initial=0.0))
        tops = np.array(self.world.allgather_object(math.nan if math.isnan(largest) else largest))
        if len(tops) > 1 and not self._sums:
            from mpishard.inverse.mesh_run import check_identical

            check_identical("values of the constraints", tops)
        self.violation = float(np.max(tops))

    def correct(self) -> None:
        """Take the multipliers by which the gradient of the Lagrangian is that of the last minimisation."""
        self.multipliers = self.multipliers - self.penalty * self.constr

    def value(self) -> float:
        """The user's function at the unknowns, of all ranks."""
        with raised_on_all(self.world):
            value, _ = self._functions.value_and_gradient(self.unknowns.shown_to_user())
        values = self.world.allgather_object(value)
        return sum_of_values(values) if self._sums else float(values[0])

    def intermediate(self, iterations: int, evaluations: int) -> OptimizeResult:
        """The result after a minimisation, for the callback. Not collective."""
        return OptimizeResult(
            x=self.unknowns.copy_of(self.unknowns.shown),
            constr_violation=self.violation,
            multipliers=self.multipliers.copy(),
            penalty=self.penalty,
            nit=iterations,
            nfev=evaluations,
        )


def _exact_parts(numbers: np.ndarray) -> list[float]:
    """A few numbers whose sum is exactly that of many; the last one is not finite if one of many is not."""
    parts: list[float] = []
    rest = sum_of_values(numbers)
    while rest:
        parts.append(rest)
        rest = sum_of_values(np.append(numbers, np.negative(parts))) if math.isfinite(rest) else 0.0
    return parts


def _reals(what: str, given: Any) -> np.ndarray:
    """A flat float64 array of real numbers, on the host."""
    try:
        found = np.atleast_1d(arrays.to_host(given) if arrays.is_array(given) else np.asarray(given))
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{what} an array of numbers, got {shown(given)}") from None
    if found.dtype.kind not in "biuf":
        raise TypeError(f"{what} real numbers, got {shown(given)}")
    return found.reshape(-1).astype(np.float64)
