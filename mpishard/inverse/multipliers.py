"""`augmented_lagrangian`: constraints by the method of multipliers, around the loop of `minimize`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import integer, number, reject_unknown, shown
from mpishard.inverse.augmented_function import AugmentedFunction, Constraints
from mpishard.inverse.functions import Callback, Functions, Watch, opening, world_of
from mpishard.inverse.loop import evaluate_until_end, files_given, files_of
from mpishard.inverse.result import LoopOptions, MinimizationOutcome, OptimizeResult, make_method
from mpishard.inverse.reverse_communication import ReverseCommunication, begin_again, set_tolerance
from mpishard.inverse.unknowns import Unknowns
from mpishard.layout.run_state import brief
from mpishard.minimizers.method import Method

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.comm.mesh import Mesh
    from mpishard.inverse.mesh_run import RunFiles
    from mpishard.record import RunRecord

Array = Any
# Bertsekas, section 2.2.5: the penalty grows where a correction has not made the constraints so much smaller.
_GROW, _SMALLER = 10.0, 0.25
_LARGEST_PENALTY = 1e14
_FIRST_TOLERANCE, _TIGHTER = 0.01, 0.1  # of the minimisations
_STALLED = 3  # minimisations that change nothing
_STATUS = {"gradient": 0, "iterations": 1, "seconds": 1, "callback": 99, "signal": 99}
_STOPPED = "callback", "signal", "seconds"
_FATAL = ("not finite", "range", "unbounded")
_NO_SOLUTION = (
    "the constraints may have no common solution, or adjoint is not that of their Jacobian, which "
    "mpishard.check_adjoint tests"
)
_OF_MINIMIZE = ("elastic", "samples")
# Facts of a checkpoint: the course of the loop, and the multipliers of all ranks.
MULTIPLIERS, _NUMBERS = "augmented_lagrangian.json", "multipliers"


def augmented_lagrangian(
    fun: Callable[..., Any],
    x0: Any,
    constraints: Callable[..., Any],
    adjoint: Callable[..., Any],
    *,
    lower: Any = 0.0,
    upper: Any = 0.0,
    args: Any = (),
    method: str | Method = "L-BFGS-B",
    jac: bool | Callable[..., Any] = True,
    hessp: Callable[..., Any] | None = None,
    forward: Callable[..., Any] | None = None,
    bounds: Any = None,
    multipliers: Any = None,
    penalty: float | None = None,
    gtol: float = 1e-5,
    ctol: float = 1e-6,
    maxiter: int = 100,
    callback: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    reduction: str | None = None,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    record: RunRecord | None = None,
    **elements: Any,
) -> OptimizeResult:
    """Minimise a function under constraints ``lower <= c(x) <= upper``, which are equations by default, and bounds.

    The method of multipliers minimises the augmented Lagrangian ``f - y'r + penalty / 2 |r|^2`` by `minimize`, then
    corrects the multipliers y by ``y - penalty r``, until the constraints are met and the gradient of the Lagrangian
    ``f - y'c`` is small enough.  Of an equation r is ``c - lower``; of others it is c less the point between the limits
    that is nearest to ``c - y / penalty`` (Powell, Hestenes and Rockafellar), so that no slack variables are needed.
    The penalty grows tenfold where the largest r is more than a quarter of the one before.  A minimisation ends at a
    tenth of the tolerance of the one before, and goes on with what that has learned of the curvature.  It needs
    products with the adjoint of the Jacobian of c, not the Jacobian.  With a mesh it is collective.

    Parameters
    ----------
    fun, x0 : as for `minimize`
        The function and the start, which need not meet the constraints.  With a `Partition` all arrays of points and
        gradients are of this rank's part, also those of `adjoint` and of the result.
    constraints : callable
        ``constraints(x, *args)`` returns c, an array of as many numbers in each call.
    adjoint : callable
        ``adjoint(x, v, *args)`` returns ``J(x)' v``, like a gradient: J is the Jacobian of c, v an array like c.
    lower, upper : float or array
        The limits of the constraints, one number or an array like c; infinite where there is no limit.
    args : tuple
        Further arguments of all functions.
    method : str or Method
        As for `minimize`; the Newton methods need `hessp` and `forward`.
    jac : True or callable
        As for `minimize`.
    hessp : callable, optional
        ``hessp(x, direction, y, *args)``: the Hessian of the Lagrangian ``f - y'c`` by x times a direction.
    forward : callable, optional
        ``forward(x, direction, *args)``: ``J(x)`` times a direction, an array like c.
    bounds : optional
        As for `minimize`, for ``"L-BFGS-B"`` and the Newton methods.
    multipliers : array, optional
        y, like c, to begin with: those of an earlier result go on from there.  Default: 0.
    penalty : float, optional
        To begin with.  Default: 10, or less, and at least 1, where the constraints at the start weigh more than the
        function: ``10 max(1, |f|) / max(1, |r|^2 / 2)``.
    gtol : float
        It has converged where the largest element of the projected gradient of the Lagrangian is at most this,
    ctol : float
        and no constraint is beyond a limit by more than this, nor both its multiplier and its distance from the limit
        larger than this.
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
        gradient, as for `minimize`; `constraints` some of the constraints, on each rank others, any number, also none,
        with `lower` and `upper` of these; and `adjoint` the product with their v, which is summed over the ranks.  With
        an `x0` that is split over the tensor axis, or a `Partition`, `adjoint` returns this rank's part, as the
        gradient: what the constraints of all ranks of its group contribute.  So it is for `hessp` and `forward`.
    checkpoints, resume : optional
        As for `minimize`: it continues in the middle of the minimisation that was under way, with the same bits.  With
        ``"sum"`` other numbers of ranks can continue it if their constraints, those of the first rank first, have the
        same order.
    record : RunRecord, optional
        As for `minimize`.
    **elements
        ``fixed``, ``inner_product``, ``preconditioner``: as for `minimize`.

    Returns
    -------
    OptimizeResult
        ``x``; ``fun``, the value of the function alone; ``constr``, the constraints, and ``multipliers``, on a mesh
        with ``"sum"`` those of this rank; ``constr_violation``, the largest distance from limits of all constraints;
        ``complementarity``, the largest of the smaller ones of a multiplier and the distance from its limit;
        ``lagrangian_grad`` and ``optimality``, the largest element of it, projected; ``penalty``; ``nit``, the number
        of minimisations; ``nfev``, evaluations; ``nhev``, Hessian products; ``status`` and ``success`` as those of
        `minimize`; ``message``.  A multiplier is positive at a lower limit, negative at an upper one, and 0 between
        them.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, or a function returns something else; on a mesh on all ranks.
    Exception
        What a function raises, on a mesh on all ranks.

    References
    ----------
    D. P. Bertsekas: Constrained Optimization and Lagrange Multiplier Methods (1982), section 2.2.5.  E. G. Birgin and
    J. M. Martinez: Practical Augmented Lagrangian Methods for Constrained Optimization (2014), algorithm 4.1.

    Examples
    --------
    >>> import numpy as np
    >>> def plane(x):
    ...     return x.sum(), np.ones(2)
    >>> result = augmented_lagrangian(plane, [1.0, 0.0], lambda x: [x @ x], lambda x, v: 2 * x * v, upper=2)
    >>> [round(float(each), 4) for each in (*result.x, *result.multipliers)]
    [-1.0, -1.0, -0.5]
    """
    world = world_of(mesh)
    with opening(mesh, "augmented_lagrangian") as same:
        known = {name: elements.pop(name, None) for name in ("fixed", "inner_product", "preconditioner")}
        for name in elements:
            if name in _OF_MINIMIZE:
                raise TypeError(
                    f"augmented_lagrangian takes no {name}=, as minimize does: give checkpoints= and resume=True, and "
                    "the job continues when it is started again"
                )
        reject_unknown("augmented_lagrangian", elements)
        if mesh is None and reduction is not None:
            raise ValueError("reduction is for a mesh; give mesh=mpishard.Mesh()")
        needed = {"constraints": constraints, "adjoint": adjoint}
        for name, function in {**needed, "forward": forward, "hessp": hessp}.items():
            if not (callable(function) or (function is None and name not in needed)):
                raise TypeError(f"{name}={shown(function)} must be a function")
        unknowns = Unknowns.of(x0)
        if mesh is None:
            unknowns.check_not_split()
        given = {} if options is None else options
        if isinstance(given, Mapping) and "gtol" in given:
            raise ValueError("options={'gtol': ...} is chosen for each minimisation; gtol= is that of the last one")
        if isinstance(method, str) and isinstance(given, Mapping):
            given = {"ftol": 0.0, **given}
        chosen, loop = make_method(method, given, None, unknowns.total, **unknowns.options(bounds, **known))
        loop.expect_no_more_results("augmented_lagrangian")
        if chosen.needs_products and (hessp is None or forward is None):
            raise ValueError(
                f"method={shown(method)} needs products with the Hessian: give hessp= of the Lagrangian and forward= "
                "of the constraints; 'L-BFGS-B' and 'CG' do without"
            )
        functions = Functions(fun, jac, None, args)
        functions.check_terms(reduction)
        if functions.nonsmooth:
            kind = type(functions.nonsmooth[0]).__name__
            raise ValueError(f"augmented_lagrangian takes no {kind} term, which minimize does; take a smooth term")
        of_user = Constraints(constraints, adjoint, lower, upper, forward, hessp)
        run = AugmentedFunction(functions, of_user, args, unknowns, world, reduction)
        first_penalty = None if penalty is None else number("penalty", penalty, above=0)
        gtol, ctol = number("gtol", gtol, least=0), number("ctol", ctol, least=0)
        maxiter = integer("maxiter", maxiter, least=1)
        watcher = Callback(callback)
        same |= {"method": type(chosen), "reduction": reduction, "penalty": penalty, "gtol": gtol, "ctol": ctol}
        same |= {"maxiter": maxiter, "multipliers": multipliers is not None, "retries": loop.retries}
        same |= files_given(mesh, checkpoints, resume, record)
    first = replace(chosen, gtol=max(_FIRST_TOLERANCE, gtol))
    optimizer = ReverseCommunication(first, unknowns, mesh=mesh, reduction=reduction)
    outer = _OuterLoop(run, optimizer, loop, gtol, ctol, maxiter)
    outer.begin(files_of(optimizer, checkpoints, resume, record, outer), multipliers, first_penalty)
    return outer.run(watcher)


@dataclass(frozen=True)
class _Course:
    """Where the outer loop is when a minimisation begins."""

    minimizations: int = 0
    evaluations: int = 0  # of all minimisations so far
    products: int = 0
    penalty: float = math.nan
    tolerance: float = _FIRST_TOLERANCE
    before: float = math.inf  # the largest residual of the last minimisation, and the lowest of all
    lowest: float = math.inf
    stalled: int = 0


class _OuterLoop:
    """Minimises and corrects in turns. Methods are collective over the mesh, unless they say otherwise."""

    def __init__(
        self,
        function: AugmentedFunction,
        optimizer: ReverseCommunication,
        loop: LoopOptions,
        gtol: float,
        ctol: float,
        maxiter: int,
    ) -> None:
        self._function, self._optimizer, self._loop = function, optimizer, loop
        self._gtol, self._ctol, self._maxiter = gtol, ctol, maxiter
        self._inner = Functions(function.value_and_gradient, True, function.product, ())
        self._course = _Course()
        self._saved: Mapping[str, Any] | None = None  # the facts of the checkpoint
        self._files: RunFiles | None = None

    def begin(self, files: RunFiles | None, multipliers: Any, penalty: float | None) -> None:
        """Begin at the start, or where the checkpoint of the files was saved."""
        function, self._files = self._function, files
        function.begin(self._optimizer, multipliers, penalty, self._loop.retries)
        self._course = replace(self._course, penalty=function.penalty)
        if self._saved is not None:
            self._course = _Course(**self._saved[MULTIPLIERS])
            function.penalty = self._course.penalty
            function.take_shifts(self._saved[_NUMBERS])
            set_tolerance(self._optimizer, max(self._course.tolerance, self._gtol))

    def run(self, callback: Callback) -> OptimizeResult:
        """Minimise until the method has converged, or something else ends it."""
        function, optimizer = self._function, self._optimizer
        watch, quiet = Watch(function.world, callback), Callback(None)
        while True:
            ended = evaluate_until_end(optimizer, self._inner, function.unknowns, quiet, self._loop, self._files)
            function.measure()
            course, reason, text = self._judged(ended)
            if not reason and course.minimizations >= self._maxiter:
                reason, text = "iterations", f"stopped: the number of minimisations reached maxiter={self._maxiter}"
            if not reason and watch.reason_to_stop(partial(self._intermediate, course)):
                reason, text = "callback", "stopped: the callback raised StopIteration or returned True"
            if reason:
                break
            self._course = course
            begin_again(optimizer, max(course.tolerance, self._gtol))
            function.begin_again(course.penalty)
        if self._files is not None:
            self._files.end(reason)
            optimizer.gather_result()  # the last checkpoint has the next point
        distances, optimality = function.distances, ended.progress.projected_norm
        found = f"largest constraint {distances.violation:.3g}, largest element of the gradient {optimality:.3g}"
        return OptimizeResult(
            x=function.unknowns.shown_to_user(),
            fun=function.value(),
            constr=function.constr,
            constr_violation=distances.violation,
            multipliers=function.multipliers,
            complementarity=distances.complementarity,
            lagrangian_grad=ended.result["jac"],
            optimality=optimality,
            penalty=course.penalty,
            nit=course.minimizations,
            nfev=course.evaluations,
            njev=course.evaluations,
            nhev=course.products,
            status=_STATUS.get(reason, 2),
            success=reason == "gradient",
            message=f"{text} ({found})",
        )

    def _judged(self, ended: MinimizationOutcome) -> tuple[_Course, str, str]:
        """The course after a minimisation, and why that was the last one, in a word and in a sentence, or nothing.

        Not collective.
        """
        course, distances, reason, progress = self._course, self._function.distances, ended.reason, ended.progress
        # The first evaluation of each minimisation but the first is known.
        new = progress.evaluations - (course.minimizations > 0)
        course = replace(
            course,
            minimizations=course.minimizations + 1,
            evaluations=course.evaluations + new,
            products=course.products + progress.products,
        )
        if reason in (*_STOPPED, *_FATAL):
            return course, reason, ended.result.message
        met = max(distances.violation, distances.complementarity) <= self._ctol
        if met and progress.projected_norm <= self._gtol:
            text = f"converged: the constraints are met to ctol={self._ctol:g}, the gradient to gtol={self._gtol:g}"
            return course, "gradient", text
        moves = distances.residual < 0.5 * course.lowest or reason == "gradient"
        course = replace(
            course,
            stalled=0 if moves else course.stalled + 1,
            lowest=min(course.lowest, distances.residual),
            before=distances.residual,
            tolerance=course.tolerance * _TIGHTER,
        )
        if course.stalled >= _STALLED:
            hint = "mpishard.check_adjoint tests adjoint" if met else _NO_SOLUTION
            last = f"the last minimisation {ended.result.message}"
            return course, "line search", f"failed: nothing gets smaller any more; {last}; {hint}"
        if distances.residual > max(_SMALLER * self._course.before, self._ctol):
            if course.penalty * _GROW > _LARGEST_PENALTY:
                return course, "range", f"failed: the penalty has reached {course.penalty:g}; {_NO_SOLUTION}"
            course = replace(course, penalty=course.penalty * _GROW)
        return course, "", ""

    def _intermediate(self, course: _Course) -> OptimizeResult:
        """The result after a minimisation, for the callback. Not collective."""
        function = self._function
        return OptimizeResult(
            x=function.unknowns.copy_of(function.unknowns.shown),
            constr_violation=function.distances.violation,
            multipliers=function.multipliers.copy(),
            penalty=course.penalty,
            nit=course.minimizations,
            nfev=course.evaluations,
        )

    # -- in checkpoints -----------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        return {MULTIPLIERS: asdict(self._course), _NUMBERS: self._function.shifts_of_all()}

    def check(self, facts: Mapping[str, Any]) -> None:
        found, numbers = facts.get(MULTIPLIERS), facts.get(_NUMBERS)
        if not (isinstance(found, Mapping) and isinstance(numbers, np.ndarray)):
            raise ValueError(
                "the checkpoint is of a minimisation without constraints; give augmented_lagrangian its own folder, or "
                "resume=False"
            )
        names = {field.name for field in fields(_Course)}
        if set(found) != names or not all(type(each) in (int, float) for each in found.values()):
            raise ValueError(f"the checkpoint has damaged numbers of augmented_lagrangian: {brief(dict(found))}")

    def restore(self, facts: Mapping[str, Any]) -> None:
        self._saved = facts
