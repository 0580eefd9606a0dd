"""`least_squares`, with the arguments and results of ``scipy.optimize.least_squares``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import mapping, shown
from mpishard.comm.errors import OneRank
from mpishard.inverse.finite_differences import Sparsity
from mpishard.inverse.functions import Callback, Functions, Watch, opening, world_of
from mpishard.inverse.least_squares_settings import LeastSquaresSettings
from mpishard.inverse.minimization import solve
from mpishard.inverse.residuals import GaussNewtonFunctions, Loss, ResidualFunctions, Rows
from mpishard.inverse.result import LoopOptions, OptimizeResult
from mpishard.inverse.run_arguments import RunArguments
from mpishard.inverse.unknowns import Unknowns
from mpishard.io import terminal
from mpishard.minimizers.least_squares import Options, State, require_finite
from mpishard.minimizers.newton import GaussNewton

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.comm.mesh import Mesh
    from mpishard.inverse.iteration_files import IterationFiles
    from mpishard.record import RunRecord

Array = Any
_CALLBACK = -2
_MESSAGES = {
    _CALLBACK: "stopped: the callback raised StopIteration or returned True",
    0: "stopped: the number of evaluations reached max_nfev={max_nfev}",
    1: "converged: the optimality {optimality:.3g} is below gtol={gtol:g}",
    2: "converged: the last step decreased the cost by less than ftol={ftol:g}, relatively",
    3: "converged: the last step was shorter than xtol={xtol:g}, relatively",
    4: "converged: the last step was below both ftol={ftol:g} and xtol={xtol:g}",
}
_TR_OPTIONS = ("forcing", "forcing_power", "maxcg", "initial_radius", "max_radius")
# What takes the place of options of `minimize`.
_INSTEAD = {
    **dict.fromkeys(("maxiter", "maxfun", "max_iter"), ": max_nfev limits the evaluations"),
    "options": ": its options are arguments, such as max_nfev=, ftol= and verbose=",
    "tol": ": give ftol=, xtol= and gtol=",
    "disp": ": verbose=2 shows a line an iteration",
    "hess_inv": ": mpishard.covariance(fit) has the errors of a fit",
    **dict.fromkeys(("reduction", "hessp"), ": each rank returns residuals of its own, and jac may be an operator"),
}
# By reason of the end of the loop of `minimize`; the others are failures.
_STATUS = {"gradient": 1, "decrease": 2, "step": 3, "evaluations": 0, "callback": _CALLBACK, "signal": _CALLBACK}
# The numbers of a `State` in a checkpoint.
_NUMBERS = ("cost", "optimality", "radius", "multiplier", "iterations", "nfev", "njev", "status")
_HEAD = f"{'iteration':>9} {'evaluations':>11} {'cost':>17} {'optimality':>11}"


def least_squares(
    fun: Callable[..., Any],
    x0: Any,
    jac: str | Callable[..., Any] = "2-point",
    bounds: Any = (-np.inf, np.inf),
    method: str = "trf",
    ftol: float | None = 1e-8,
    xtol: float | None = 1e-8,
    gtol: float | None = 1e-8,
    x_scale: Any = None,
    loss: str | Callable[[Array], Any] = "linear",
    f_scale: float = 1.0,
    *,
    diff_step: Any = None,
    tr_solver: str | None = None,
    tr_options: Mapping[str, Any] | None = None,
    jac_sparsity: Any = None,
    max_nfev: int | None = None,
    verbose: int = 0,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    callback: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    preconditioner: Any = None,
    samples: int | None = None,
    elastic: bool | Mapping[str, Any] = False,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    record: RunRecord | None = None,
    **others: Any,
) -> OptimizeResult:
    """Minimise the sum of the squares of residuals, or of a loss of them that outliers do not rule.

    The arguments and the result are those of ``scipy.optimize.least_squares``, without the method ``"dogbox"`` and
    `workers`.  With a mesh it is collective: the rows are divided over its ranks, and all take the same steps.  Without
    one it uses no MPI.

    There are two ways to find a step.  ``tr_solver="exact"`` is for few unknowns, which all ranks have, and Jacobians
    whose elements are known.  ``tr_solver="cg"`` is for many: a Gauss-Newton method whose steps come from conjugate
    gradients, by products of the Jacobian and its adjoint.  It runs in the loop of `minimize`, which divides its
    vectors over the ranks, saves, resumes and outlives ranks.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args, **kwargs)`` returns the residuals, an array of one dimension.  On a mesh those of this rank: any
        number, which may differ between ranks, and be 0; as many in each call.  All ranks call it for the same points.
        Where it raises `mpishard.EvaluationFailed` at a trial, on any rank, the step is shortened.
    x0 : array, FlatParameters, Partition, or dict, list or tuple of arrays
        The start.  An array is copied and seen as flat, in float64; ranks start from that of rank 0, with a warning if
        theirs differ.  A dictionary, list or tuple of arrays, also nested, is taken as by `minimize`; `jac` then
        returns such a structure of blocks ``(residuals, *shape)``, or a matrix whose columns are in the order of the
        arrays.  A FlatParameters is for ``"cg"``, is changed in place, and may be split over the tensor axis: then
        products of the Jacobian take and give this rank's slices.  A `Partition`, alone or several in a structure, is
        for ``"cg"``, too: `fun` and `jac` get arrays of this rank's part, and bounds, `x_scale`, `preconditioner` and
        arrays of the result are of it.  ``matvec(v)`` takes this part as a flat vector, the arrays end to end, and
        ``rmatvec(u)`` gives it, with what the residuals of other ranks of the group contribute.  All ranks call both.
    jac : {"2-point", "3-point", "cs"} or callable
        ``jac(x, *args, **kwargs)`` returns the derivatives of the residuals of this rank, of shape (residuals,
        unknowns): an array; sparse rows, as SciPy's; or an operator with ``shape``, ``matvec(v)`` and ``rmatvec(u)``,
        as ``scipy.sparse.linalg.LinearOperator``, for ``"cg"``.  Those of the last two points are kept and used.  A
        name: by finite differences inside of the bounds, or by complex steps; a `fun` that computes in float32 must
        return float32, so that the steps are as long as its rounding errors want them.
    bounds : pair or scipy.optimize.Bounds
        ``(lower, upper)``, each a number or an array as long as `x0`; the start must be between them.  For ``"trf"``.
        Of a FlatParameters or a structure of arrays as for `minimize`.
    method : {"trf", "lm"}
        A trust region: reflective (``"exact"``) or with projected steps (``"cg"``).  Or the Levenberg-Marquardt
        algorithm of MINPACK, ``"exact"``, for the linear loss without bounds.
    ftol, xtol, gtol : float or None
        It ends where a step decreases the cost by less than `ftol` times the cost; where a step is shorter than
        ``xtol * (xtol + |x|)``; where the largest element of the gradient, with bounds scaled by the distance to them,
        is below `gtol`.
        For ``"lm"`` `xtol` is of the radius of the region, and `gtol` of the cosine between the residuals and columns
        of the Jacobian; for ``"cg"`` `xtol` is of the largest elements, and `gtol` of the projected gradient.  None:
        never.
    x_scale : float, array, "jac" or None
        Characteristic sizes of the unknowns; ``"jac"``: from the norms of the columns of the Jacobian, for ``"cg"`` of
        that at the start.  None: 1 for ``"trf"``, ``"jac"`` for ``"lm"``.
    loss : {"linear", "soft_l1", "huber", "cauchy", "arctan"} or callable
        Of ``z = (f / f_scale)**2``, or a function of z that returns the loss and two derivatives, (3, residuals).
    f_scale : float
        From where on residuals count as outliers.
    diff_step : float, array or None
        Steps of finite differences, relative to x.
    tr_solver : {None, "exact", "cg", "lsmr"}
        ``"lsmr"``, the name of SciPy's, means ``"cg"``; as there, it does not go with ``"lm"``.  None: ``"cg"`` where
        `jac` returns sparse rows or an operator, or one of the arguments for it is given.
    tr_options : mapping, optional
        For ``"cg"``: ``forcing``, ``forcing_power``, ``maxcg``, ``initial_radius`` and ``max_radius`` of
        `TruncatedNewton`; ``forcing`` is 0.01 here.
    jac_sparsity : array or sparse matrix, optional
        For ``"cg"`` and finite differences: of the shape of this rank's rows of the Jacobian, not 0 where these may be.
        Unknowns move together if no residual on any rank depends on two of them.  So `fun` is called for each group of
        them, and ``jac`` of the result has sparse rows.  On a mesh ranks gather the places of these elements once.  Not
        with `samples`; a function as `jac` has no use for it.
    max_nfev : int or None
        The most evaluations, not counting those for differences; None for 100 times the unknowns.
    verbose : {0, 1, 2}
        1: show why it ended, 2: also a line an iteration, on rank 0.
    args, kwargs : tuple, mapping
        Further arguments of `fun` and `jac`.
    callback : callable, optional
        Called after each iteration: ``callback(xk)`` or ``callback(intermediate_result=result)``; it stops by raising
        StopIteration or returning True, on any rank.
    mesh : Mesh, optional
        The ranks that minimise together, over all of its axes.
    preconditioner : float, array, mapping or callable, optional
        For ``"cg"``: an approximation of the inverse of ``J'J``, a positive diagonal or a function of a vector, as in
        `mpishard.minimizers.Method`.
    samples, elastic : optional
        For ``"cg"``, as for `minimize`: a run that outlives its ranks.  With `samples` it is ``fun(x, samples, *args,
        **kwargs)`` and ``jac(x, samples, ...)`` that return the residuals and the rows of these samples; without,
        each rank computes all rows.
    checkpoints, resume, record : optional
        As for `minimize`; a step of ``"exact"`` is an iteration, and `record` is for ``"cg"``.  ``"exact"``, and so
        ``"lm"``, outlives a death by them alone: the job starts again, and continues from the last iteration saved.
    **others
        Refused: the error says what takes the place of an option of `minimize`.

    Returns
    -------
    OptimizeResult
        With ``x``; ``cost``, of all ranks; ``fun`` and ``jac``, the residuals and the Jacobian of this rank (for
        ``"exact"`` weighted by the loss, as SciPy's; not with `samples`); ``grad``, ``optimality``, ``active_mask`` (of
        an array), ``nfev``, ``njev``, ``nit``, ``status``, ``message``, ``success``; for ``"cg"`` ``nhev``, the number
        of products; ``loss`` and ``f_scale`` as given.  ``njev`` is ``nfev`` for ``"cg"``, which also needs the
        gradient of a trial.  `covariance` says how sure x is.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, the start is not inside of the bounds, the residuals are not finite there, or `fun`
        or `jac` returns something else; on a mesh on all ranks, also if arguments differ between them.
    Exception
        What `fun`, `jac` or `callback` raises, on a mesh on all ranks.

    Notes
    -----
    The steps have the same bits on any number of ranks, however the rows are split, as long as those of each row do.
    But an operator adds up the rows of its rank itself, and these sums are rounded: then the bits depend on the split,
    unless `samples` say which rows are added together, or the unknowns are split and the rows with them.

    An ``"exact"`` iteration needs the products of the columns of ``[J f]`` with each other.  They are summed without
    rounding and rounded once to twice the digits of float64, and systems with them are solved in these digits; so a
    step is as accurate as one from a QR decomposition, also where the condition number of J is ``1e14``.  For n
    unknowns and m rows on a rank this costs ``9 m n**2`` multiplications and an all-reduce of ``40 n**2`` bytes a
    Jacobian, and about ``10 n**3`` operations a trial on every rank: it is for up to some hundreds of unknowns.

    References
    ----------
    M. A. Branch, T. F. Coleman, Y. Li: A subspace, interior, and conjugate gradient method for large-scale
    bound-constrained minimization problems.  SIAM Journal on Scientific Computing 21, 1-23 (1999).  J. J. More: The
    Levenberg-Marquardt algorithm: implementation and theory.  Numerical Analysis, Lecture Notes in Mathematics 630,
    105-116 (1978).  T. Steihaug: The conjugate gradient method and trust regions in large scale optimization.  SIAM
    Journal on Numerical Analysis 20, 626-637 (1983).  B. Triggs et al.: Bundle adjustment, a modern synthesis.  LNCS
    1883, 298-372 (2000).

    Examples
    --------
    >>> import numpy as np
    >>> def rosenbrock(x):
    ...     return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])
    >>> result = least_squares(rosenbrock, [2.0, 2.0], bounds=([-2, 1.5], np.inf), jac="3-point")
    >>> [round(float(each), 3) for each in result.x]
    [1.224, 1.5]
    """
    for_cg = {"preconditioner": preconditioner, "samples": samples, "elastic": elastic, "checkpoints": checkpoints}
    for_cg |= {"resume": resume, "record": record}
    with opening(mesh, "least_squares") as same:
        for name in others:
            raise TypeError(
                f"least_squares got an unexpected keyword argument {name!r}{_INSTEAD.get(name, '')}"
                + "; give it in tr_options" * (name in _TR_OPTIONS)
            )
        unknowns = Unknowns(x0)
        if mesh is None:
            unknowns.check_not_split()
        settings = LeastSquaresSettings.checked(
            unknowns, bounds, method, (ftol, xtol, gtol), x_scale, loss, f_scale, diff_step, max_nfev, verbose
        )
        watcher = Callback(callback)
        sparsity = None if jac_sparsity is None or callable(jac) else Sparsity(jac_sparsity, unknowns.given_size)
        if sparsity is not None and samples is not None:
            raise ValueError("jac_sparsity is of all rows in one order, which samples= divide: leave one of them out")
        limits = settings.lower, settings.upper
        functions = ResidualFunctions(fun, jac, args, kwargs, settings.steps, *limits, unknowns, sparsity=sparsity)
        losses = Loss(loss, settings.f_scale)
        of_cg = for_cg | {"tr_options": tr_options, "jac_sparsity": sparsity}
        chosen = _solver(tr_solver, method, jac, settings.cg_start, of_cg)
        by_products = _ConjugateGradients.checked(settings, tr_options, mesh, **for_cg)
        same |= {"x0": f"{unknowns.total} elements", "method": method, "jac": jac, "loss": loss}
        same |= {"f_scale": f_scale, "tr_solver": tr_solver, "samples": samples, "elastic": elastic}
        same |= {"jac_sparsity": sparsity is not None, "tr_options": tr_options}
        same["preconditioner is given"] = preconditioner is not None
        if not settings.cg_start:
            same |= {"bounds": (settings.lower, settings.upper), **vars(settings.options)}
        same |= by_products.run.files_given()
    if mesh is not None and not (elastic or settings.cg_start):  # those start together by themselves
        from mpishard.inverse.mesh_run import broadcast_start

        broadcast_start(mesh, settings.start)
    if sparsity is not None:
        sparsity.group_columns(OneRank() if elastic else world_of(mesh))  # elastic: each rank has all rows
    rows = Rows(functions, losses, world_of(mesh))
    if chosen is None:
        chosen = "exact" if rows.are_dense_at(settings.start) else "cg"
    elif chosen == "cg" and not (elastic or callable(jac)):
        rows.are_dense_at(settings.start)
    if chosen == "cg":
        return settings.with_trees(by_products.minimize(functions, losses, watcher))
    files: IterationFiles | None = None
    if mesh is not None and checkpoints is not None:
        from mpishard.inverse.iteration_files import IterationFiles, Vectors

        name = f"least_squares by {method}, {'with' if settings.options.scale is None else 'without'} x_scale='jac'"
        vectors = Vectors.whole(mesh, {"x": len(settings.start), "inverse scale": len(settings.start)})
        files = IterationFiles(by_products.run, "least_squares", name, vectors)
    return settings.with_trees(_run(settings, rows, watcher, files))


def _solver(given: Any, method: str, jac: Any, start: str, for_cg: Mapping[str, Any]) -> str | None:
    """The way in which steps are found: "exact" or "cg"; None: it depends on the result of `jac`.

    `start` is what the start is if that is for "cg" alone, else empty.
    """
    if isinstance(given, str) and given == "lsmr":
        given = None if method == "lm" else "cg"
    if given not in (None, "exact", "cg"):
        raise ValueError(
            f"tr_solver={shown(given)} must be None, 'exact' or 'cg', conjugate gradients with products of the Jacobian"
        )
    common = ("checkpoints", "resume")
    reasons = [name for name, value in for_cg.items() if not (value is None or value is False or name in common)]
    reasons += [start] if start else []
    if not (reasons or given == "cg"):
        return "exact" if method == "lm" or not callable(jac) else given
    what = reasons[0] if reasons else "tr_solver='cg'"
    if method == "lm" or given == "exact":
        exact, other = ("method='lm'", "method='trf'") if method == "lm" else ("tr_solver='exact'", "tr_solver='cg'")
        hint = f"; {exact} continues after a death by checkpoints= and resume=True" * (what in ("samples", "elastic"))
        raise ValueError(f"{what} is not for {exact}; {other} takes it{hint}")
    if not callable(jac) and start:
        raise ValueError(f"jac={shown(jac)} is for arrays; {start} needs a function that returns the Jacobian")
    return "cg"


@dataclass(frozen=True)
class _ConjugateGradients:
    """A minimisation of many unknowns by conjugate gradients, in the loop of `minimize`."""

    settings: LeastSquaresSettings
    method: GaussNewton
    scales_by_columns: bool
    run: RunArguments

    @classmethod
    def checked(
        cls,
        settings: LeastSquaresSettings,
        tr_options: Any,
        mesh: Mesh | None,
        preconditioner: Any,
        samples: Any,
        elastic: Any,
        checkpoints: Any,
        resume: Any,
        record: Any,
    ) -> _ConjugateGradients:
        given = {} if tr_options is None else dict(mapping("tr_options", tr_options, "names to values"))
        for name in given:
            if name not in _TR_OPTIONS:
                raise ValueError(f"tr_options has no option {name!r}; its options are {', '.join(_TR_OPTIONS)}")
        options, unknowns = settings.options, settings.unknowns
        by_columns = preconditioner is None and options.scale is None and settings.method != "lm"
        if preconditioner is not None and not (options.scale is not None and (options.scale == 1).all()):
            raise ValueError("x_scale and preconditioner are both the scale of the unknowns; give one of them")
        if by_columns and (samples is not None or settings.cg_start):
            what = "samples=" if samples is not None else settings.cg_start
            raise ValueError(f"x_scale='jac' is not for {what}; give x_scale as numbers, or preconditioner=")
        elements: dict[str, Any] = {"preconditioner": preconditioner, "bounds": None}
        if settings.cg_start:
            of_names = settings.bounds if unknowns.parameters is not None else None
            elements = unknowns.options(of_names, preconditioner=preconditioner)
        if preconditioner is None and settings.scales:
            assert options.scale is not None
            elements["preconditioner"] = unknowns.for_method(options.scale**2)
        if settings.limits:
            elements["bounds"] = unknowns.for_method((settings.lower, settings.upper))
        method = GaussNewton(
            gtol=options.gtol,
            ftol=options.ftol,
            xtol=options.xtol,
            maxiter=sys.maxsize,
            maxfun=options.max_nfev,
            **elements,
            **given,
        )
        run = RunArguments.checked(unknowns, mesh, None, samples, elastic, checkpoints, resume, record)
        if run.elastic is not None and unknowns.has_fields and samples is None:
            raise ValueError(
                "elastic= with a Partition as x0 needs samples=N, fun(x, samples) and jac(x, samples), whose samples "
                "the groups share"
            )
        return cls(settings, method, by_columns, run)

    def minimize(self, functions: ResidualFunctions, loss: Loss, callback: Callback) -> OptimizeResult:
        """Minimise in the loop of `minimize`. Collective over the mesh."""
        mesh, elastic = self.run.mesh, self.run.elastic
        settings, unknowns = self.settings, self.settings.unknowns
        world: Any = OneRank()
        if mesh is not None and (elastic is None or unknowns.has_fields):
            world = mesh.world if elastic is None else mesh.tensor  # whose ranks get the same samples
        if not settings.cg_start:
            unknowns = Unknowns(settings.start)
        elif unknowns.has_fields:
            unknowns.take(settings.start)
        squares = GaussNewtonFunctions(functions, loss, world, unknowns)
        method = self.method
        if self.scales_by_columns:
            method = replace(method, preconditioner=squares.column_scale(settings.start))

        def with_cost(intermediate_result: OptimizeResult) -> bool:
            found = intermediate_result
            made = OptimizeResult(x=found.x, cost=found.fun, nit=found.nit, nfev=found.nfev)
            return callback(lambda: settings.with_trees(made))

        ended = solve(
            Functions(squares.value_and_gradient, True, squares.product, ()),
            method,
            unknowns,
            Callback(with_cost if callback.is_given else None),
            LoopOptions(disp=settings.verbose == 2),
            replace(self.run, reduction="sum" if unknowns.is_split else None),
        )
        found, progress = ended.result, ended.progress
        if ended.reason == "not finite" and not progress.iterations:
            require_finite(math.inf)
        status = _STATUS.get(ended.reason, -1)
        result = OptimizeResult(x=found.x, cost=found.fun)
        if elastic is None or elastic.samples is None:
            here = squares.linearized(found.x)
            result |= {"fun": here.f, "jac": here.jacobian}
        if unknowns.parameters is None:
            result["active_mask"] = unknowns.like_x0(settings.active_mask(unknowns.vector("x", found.x)))
        message = _message(status, settings.options, progress.projected_norm) if status >= 0 else found.message
        if settings.verbose == 1 and (mesh is None or mesh.rank == 0):
            terminal.show(message)
        result |= {"grad": found.jac, "optimality": progress.projected_norm, "nit": progress.iterations}
        result |= {"nfev": progress.evaluations, "njev": progress.evaluations, "nhev": progress.products}
        result |= {"loss": settings.loss, "f_scale": settings.f_scale}
        return OptimizeResult(**result, status=status, success=status > 0, message=message)


def _message(status: int, options: Options, optimality: float) -> str:
    return _MESSAGES[status].format(
        ftol=options.ftol, xtol=options.xtol, gtol=options.gtol, max_nfev=options.max_nfev, optimality=optimality
    )


def _saved(state: State, options: Options) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The numbers and the vectors from which a method for few unknowns continues."""
    numbers = {name: getattr(state, name) for name in _NUMBERS}
    return numbers | {"tolerances": [options.ftol, options.xtol, options.gtol]}, [state.x, state.units]


def _resumed(files: IterationFiles, options: Options) -> State | None:
    """The state of the newest checkpoint, if the run is to resume and there is one."""
    nothing = np.zeros(0)
    state = State(nothing, math.nan, nothing, nothing)

    def take(numbers: Mapping[str, Any]) -> None:
        found = {name: numbers[name] for name in _NUMBERS}
        if not all(isinstance(each, int | float | None) for each in found.values()):
            raise TypeError("they must be numbers")
        if numbers["tolerances"] != [options.ftol, options.xtol, options.gtol]:
            found["status"] = None  # with others the run has not ended
        vars(state).update(found)

    flat = files.load(take)
    if flat is None:
        return None
    state.x, state.units = np.split(flat, 2)
    state.gradient = np.zeros(len(state.x))
    return state


def _run(
    settings: LeastSquaresSettings, rows: Rows, callback: Callback, files: IterationFiles | None
) -> OptimizeResult:
    """Iterate until the method or the callback ends it.  Collective."""
    is_first, watch = rows.world.rank == 0, Watch(rows.world, callback)
    shows = settings.verbose == 2 and is_first
    if shows:
        terminal.show(_HEAD)
    status = None
    saved = None if files is None else _resumed(files, settings.options)
    called = 0 if saved is None else saved.iterations  # the last iteration that the callback has seen
    for state in settings.iterate(rows, saved):
        if shows:
            terminal.show(f"{state.iterations:>9} {state.nfev:>11} {state.cost:>17.10e} {state.optimality:>11.2e}")
        status = state.status
        if state.iterations > called:
            called = state.iterations
            if watch.reason_to_stop(partial(_intermediate, settings, state)) and status is None:
                status = _CALLBACK
                break
        if files is not None and status is None and state.iterations:
            files.iterated(state.iterations, partial(_saved, state, settings.options))
    assert status is not None
    if files is not None:
        files.end(state.iterations, partial(_saved, state, settings.options))
    message = _message(status, settings.options, state.optimality)
    if settings.verbose and is_first:
        terminal.show(message)
    return OptimizeResult(
        x=state.x,
        cost=state.cost,
        fun=rows.accepted,
        jac=rows.jacobian,
        grad=state.gradient,
        optimality=state.optimality,
        active_mask=settings.active_mask(state.x),
        nit=state.iterations,
        nfev=state.nfev,
        njev=state.njev,
        loss=settings.loss,
        f_scale=settings.f_scale,
        status=status,
        success=status > 0,
        message=message,
    )


def _intermediate(settings: LeastSquaresSettings, state: State) -> OptimizeResult:
    return settings.with_trees(OptimizeResult(x=state.x.copy(), cost=state.cost, nit=state.iterations, nfev=state.nfev))
