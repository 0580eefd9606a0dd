"""`augmented_lagrangian`: constraints by the method of multipliers, around the loop of `minimize`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mpishard.arguments import integer, number, reject_unknown, shown
from mpishard.comm.errors import OneRank
from mpishard.inverse.augmented_function import AugmentedFunction, Constraints
from mpishard.inverse.corrections import MULTIPLIERS, NUMBERS, Corrections, Course, Verdict
from mpishard.inverse.functions import Callback, Functions, Watch, opening, world_of
from mpishard.inverse.loop import evaluate_until_end, files_of
from mpishard.inverse.result import LoopOptions, OptimizeResult, make_method
from mpishard.inverse.reverse_communication import ReverseCommunication, begin_again, set_tolerance
from mpishard.inverse.run_arguments import RunArguments
from mpishard.inverse.unknowns import Unknowns
from mpishard.minimizers.method import Method

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.comm.mesh import Mesh
    from mpishard.inverse.run_files import RunFiles
    from mpishard.record import RunRecord

Array = Any


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
    elastic: bool | Mapping[str, Any] = False,
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
        The function, also with `L1` terms, and the start, which need not meet the constraints.  With a `Partition` all
        arrays of points and gradients are of this rank's part, also those of `adjoint` and of the result.
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
        Tolerance of the gradient: it has converged where the largest element of the projected gradient of the
        Lagrangian is at most this, and the constraints are met to `ctol`.
    ctol : float
        Tolerance of the constraints: none is beyond a limit by more than this, and of no constraint both the multiplier
        and the distance from the limit are larger than this.
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
        None: `fun`, `constraints` and `adjoint` return the same on all ranks.  ``"sum"``: each rank returns a part.
        `fun` returns its part of value and gradient, as for `minimize`.  `constraints` returns some of the constraints,
        on each rank others, any number, also none; `lower` and `upper` are of these.  `adjoint` returns the product
        with their v, which is summed over the ranks.  With an `x0` that is split over the tensor axis, or a
        `Partition`, `adjoint` returns this rank's part, as the gradient: what the constraints of all ranks of its group
        contribute.  The same holds for `hessp` and `forward`.
    elastic : bool or mapping
        As for `minimize`: a run that outlives its ranks, with the bits of an undisturbed one.  Each rank computes the
        whole functions, for an `x0` that is whole on all; an error of `callback` is the end of its rank alone.
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
        ``x``; ``fun``, the value of the function with its terms; ``constr``, the constraints, and ``multipliers``, on a
        mesh with ``"sum"`` those of this rank; ``constr_violation``, the largest distance from limits of all
        constraints; ``complementarity``, the largest of the smaller ones of a multiplier and the distance from its
        limit; ``lagrangian_grad`` and ``optimality``, the largest element of it, projected; ``penalty``; ``nit``, the
        number of minimisations; ``nfev``, evaluations; ``nhev``, Hessian products; ``status`` and ``success`` as those
        of `minimize`; ``message``.  A multiplier is positive at a lower limit, negative at an upper one, and 0 between
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
        if "samples" in elements:
            raise TypeError("augmented_lagrangian takes no samples=, as minimize does: fun is of all samples")
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
        run = RunArguments.checked(unknowns, mesh, reduction, None, elastic, checkpoints, resume, record)
        if run.elastic is not None and unknowns.is_split:
            raise ValueError("elastic= of augmented_lagrangian is for an x0 that is whole on all ranks, as an array")
        given = {} if options is None else options
        if isinstance(given, Mapping) and "gtol" in given:
            raise ValueError("options={'gtol': ...} is chosen for each minimisation; gtol= is that of the last one")
        if isinstance(method, str) and isinstance(given, Mapping):
            given = {"ftol": 0.0, **given}
        functions = Functions(fun, jac, None, args)
        functions.check_terms(reduction)
        about, same["terms"] = unknowns.options(bounds, **known), ""
        if functions.nonsmooth:
            from mpishard.inverse.nonsmooth import options_of_terms  # with MPI, as the terms

            found, same["terms"] = options_of_terms(functions.nonsmooth, unknowns, mesh)
            if "l1" not in found:
                kind = type(functions.nonsmooth[0]).__name__
                raise ValueError(f"{kind} terms do not go with constraints: take a smooth term, or bounds= alone")
            about |= found
        chosen, loop = make_method(method, given, None, unknowns.total, **about)
        loop.expect_no_more_results("augmented_lagrangian")
        if chosen.needs_products and (hessp is None or forward is None):
            raise ValueError(
                f"method={shown(method)} needs products with the Hessian: give hessp= of the Lagrangian and forward= "
                "of the constraints; 'L-BFGS-B' and 'CG' do without"
            )
        of_user = Constraints(constraints, adjoint, lower, upper, forward, hessp)
        # Workers of an elastic run, all of which compute everything, ask each other nothing.
        among = world if run.elastic is None else OneRank()
        augmented = AugmentedFunction(functions, of_user, args, unknowns, among, reduction)
        gtol, ctol = number("gtol", gtol, least=0), number("ctol", ctol, least=0)
        maxiter = integer("maxiter", maxiter, least=1)
        corrections = Corrections(augmented, gtol, ctol, maxiter)
        first_penalty = None if penalty is None else number("penalty", penalty, above=0)
        watcher = Callback(callback)
        same |= {"method": type(chosen), "reduction": reduction, "penalty": penalty, "gtol": gtol, "ctol": ctol}
        same |= {"maxiter": maxiter, "multipliers": multipliers is not None, "retries": loop.retries}
        same["elastic"] = elastic
        same |= run.files_given()
    functions.take_shape(unknowns)
    first = replace(chosen, gtol=corrections.tolerance)
    if run.elastic is not None:
        from mpishard.inverse.elastic_minimization import ElasticOuterLoop

        return ElasticOuterLoop(corrections, first, watcher, loop, run).run(multipliers, first_penalty)
    optimizer = ReverseCommunication(first, unknowns, mesh=mesh, reduction=reduction)
    outer = _OuterLoop(corrections, optimizer, loop)
    outer.begin(files_of(optimizer, run, corrections), multipliers, first_penalty)
    return outer.run(watcher)


class _OuterLoop:
    """Minimises and corrects in turns, on ranks that stay. Collective, its creation and its methods."""

    def __init__(self, corrections: Corrections, optimizer: ReverseCommunication, loop: LoopOptions) -> None:
        self._corrections, self._optimizer, self._loop = corrections, optimizer, loop
        self._files: RunFiles | None = None

    def begin(self, files: RunFiles | None, multipliers: Any, penalty: float | None) -> None:
        """Begin at the start, or where the checkpoint of the files was saved."""
        corrections, optimizer, self._files = self._corrections, self._optimizer, files
        function = corrections.function
        optimizer.gather_result()  # which shows it
        together = optimizer.ranks.together
        function.begin(lambda: optimizer.progress, together, multipliers, penalty, self._loop.retries)
        corrections.course = replace(corrections.course, penalty=function.penalty)
        if files is not None and files.resumed:
            corrections.course = Course(**files.resumed[MULTIPLIERS])
            function.penalty = corrections.course.penalty
            function.take_shifts(files.resumed[NUMBERS])
            set_tolerance(optimizer, corrections.tolerance)

    def run(self, callback: Callback) -> OptimizeResult:
        """Minimise until the method has converged, or something else ends it."""
        corrections, optimizer = self._corrections, self._optimizer
        function = corrections.function
        inner = Functions(function.value_and_gradient, True, function.product, ())
        watch, quiet = Watch(function.world, callback), Callback(None)
        while True:
            ended = evaluate_until_end(optimizer, inner, function.unknowns, quiet, self._loop, self._files)
            verdict = corrections.verdict(ended.progress, ended.reason, ended.result.message)
            if not verdict.reason and watch.reason_to_stop(partial(corrections.intermediate, verdict.course)):
                text = "stopped: the callback raised StopIteration or returned True"
                verdict = Verdict(verdict.course, "callback", text)
            if verdict.reason:
                break
            corrections.go_on(verdict.course)
            begin_again(optimizer, corrections.tolerance)
        if self._files is not None:
            self._files.end(verdict.reason)
            optimizer.gather_result()  # the last checkpoint has the next point
        minimizer = optimizer.ranks.minimizer
        added, gradient = minimizer.added_at(minimizer.best), ended.result["jac"]
        return corrections.result(verdict, ended.progress.projected_norm, added, gradient, ended.result)
