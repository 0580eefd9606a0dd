"""`least_squares`, with the arguments and results of ``scipy.optimize.least_squares``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import integer, number, shown
from mpishard.inverse.functions import Callback, Unknowns
from mpishard.inverse.residuals import Loss, ResidualFunctions, Rows
from mpishard.inverse.result import OptimizeResult
from mpishard.io import log
from mpishard.minimizers.elements import whole_bounds, whole_elements
from mpishard.minimizers.least_squares import Options, State, levenberg_marquardt, reflective

if TYPE_CHECKING:
    from mpishard.comm.mesh import Mesh

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
_METHODS = ("trf", "lm")
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
    diff_step: Any = None,
    max_nfev: int | None = None,
    verbose: int = 0,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    callback: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | None = None,
) -> OptimizeResult:
    """Minimise the sum of the squares of residuals, or of a loss of them that outliers do not rule.

    The arguments and the result are those of ``scipy.optimize.least_squares``.  With a mesh it is collective: the rows
    are divided over its ranks, all ranks have all unknowns and take the same steps, and these have the same bits on any
    number of ranks.  Without one it uses no MPI.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args, **kwargs)`` returns the residuals, an array of one dimension.  On a mesh those of this rank: any
        number, which may differ between ranks, and be 0; as many in each call.  All ranks call it for the same points.
    x0 : array
        The start, seen as flat, in float64.  Ranks start from that of rank 0, with a warning if theirs differ.
    jac : {"2-point", "3-point", "cs"} or callable
        ``jac(x, *args, **kwargs)`` returns the derivatives of the residuals of this rank, of shape (residuals,
        unknowns), as an array or as sparse rows (what has ``toarray``).  A name: by finite differences in the bounds,
        or by complex steps.
    bounds : pair or scipy.optimize.Bounds
        ``(lower, upper)``, each a number or an array as long as `x0`; the start must be between them.  For ``"trf"``.
    method : {"trf", "lm"}
        Trust region reflective, or the Levenberg-Marquardt algorithm of MINPACK, for the linear loss without bounds.
    ftol, xtol, gtol : float or None
        It ends where a step decreases the cost by less than `ftol` of it; where a step is shorter than ``xtol * (xtol +
        |x|)``; where the largest element of the gradient, with bounds scaled by the distance to them, is below `gtol`.
        For ``"lm"`` `xtol` is of the radius of the region, and `gtol` of the cosine between the residuals and columns
        of the Jacobian.  None: never.
    x_scale : float, array, "jac" or None
        Characteristic sizes of the unknowns; ``"jac"``: from the norms of the columns of the Jacobian.  None: 1 for
        ``"trf"``, ``"jac"`` for ``"lm"``.
    loss : {"linear", "soft_l1", "huber", "cauchy", "arctan"} or callable
        Of ``z = (f / f_scale)**2``, or a function of z that returns the loss and two derivatives, (3, residuals).
    f_scale : float
        From where on residuals count as outliers.
    diff_step : float, array or None
        Steps of finite differences, relative to x.
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

    Returns
    -------
    OptimizeResult
        With ``x``; ``cost``, of all ranks; ``fun`` and ``jac``, the residuals and the rows of this rank, the latter
        weighted by the loss as SciPy's; ``grad``, ``optimality``, ``active_mask``, ``nfev``, ``njev``, ``nit``,
        ``status``, ``message`` and ``success``.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, the start is not inside of the bounds, the residuals are not finite there, or `fun`
        or `jac` returns something else; on a mesh on all ranks, also if arguments differ between them.
    Exception
        What `fun`, `jac` or `callback` raises, on a mesh on all ranks.

    Notes
    -----
    An iteration needs the products of the columns of ``[J f]`` with each other.  They are summed without rounding and
    rounded once to twice the digits of float64, and systems with them are solved in these digits; so a step is as
    accurate as one from a QR decomposition, also where the condition number of J is ``1e14``, and its bits do not
    depend on the split.  For n unknowns and m rows on a rank this costs ``9 m n**2`` multiplications and an all-reduce
    of ``40 n**2`` bytes a Jacobian, and about ``10 n**3`` operations a trial on every rank: it is for up to some
    hundreds of unknowns.

    References
    ----------
    M. A. Branch, T. F. Coleman, Y. Li: A subspace, interior, and conjugate gradient method for large-scale
    bound-constrained minimization problems.  SIAM Journal on Scientific Computing 21, 1-23 (1999).  J. J. More: The
    Levenberg-Marquardt algorithm: implementation and theory.  Numerical Analysis, Lecture Notes in Mathematics 630,
    105-116 (1978).  B. Triggs et al.: Bundle adjustment, a modern synthesis.  LNCS 1883, 298-372 (2000).

    Examples
    --------
    >>> import numpy as np
    >>> def rosenbrock(x):
    ...     return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])
    >>> result = least_squares(rosenbrock, [-1.2, 1.0], bounds=([-2, 1.5], 2), jac="3-point")
    >>> [round(float(each), 3) for each in result.x]
    [1.223, 1.5]
    """
    problem: Exception | None = None
    settings: _Settings | None = None
    try:
        settings = _Settings.checked(
            Unknowns(x0), bounds, method, (ftol, xtol, gtol), x_scale, loss, f_scale, diff_step, max_nfev, verbose
        )
        watcher = Callback(callback)
        functions = ResidualFunctions(fun, jac, args, kwargs, settings.steps, settings.lower, settings.upper)
        losses = Loss(loss, settings.f_scale)
    except (TypeError, ValueError) as error:
        problem = error
    world = None
    if mesh is not None:
        from mpishard.inverse.mesh_run import agreed, same_start

        agreed(mesh, problem)
        assert settings is not None
        given: dict[str, Any] = {
            "jac": jac,
            "loss": loss,
            "method": method,
            "f_scale": f_scale,
            "bounds": settings.bounds,
        }
        given |= vars(settings.options)
        same_start(mesh, settings.start, given)
        world = mesh.world
    elif problem is not None:
        raise problem
    assert settings is not None
    rows = Rows(functions, losses, world)
    return _run(settings, rows, watcher, speaks=mesh is None or mesh.rank == 0)


@dataclass(frozen=True)
class _Settings:
    """The arguments, checked."""

    start: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    method: str
    options: Options
    f_scale: float
    steps: np.ndarray | None
    verbose: int

    @classmethod
    def checked(
        cls,
        unknowns: Unknowns,
        bounds: Any,
        method: Any,
        tolerances: tuple[Any, Any, Any],
        x_scale: Any,
        loss: Any,
        f_scale: Any,
        diff_step: Any,
        max_nfev: Any,
        verbose: Any,
    ) -> _Settings:
        if unknowns.parameters is not None:
            raise TypeError("x0 must be an array; a FlatParameters is minimised by mpishard.minimize")
        start, size = np.asarray(unknowns.flat, np.float64), unknowns.size
        if method not in _METHODS:
            raise ValueError(f"method={shown(method)} must be 'trf' or 'lm'; there is no other")
        lower, upper = _bounds(bounds, unknowns)
        _check_start(start, lower, upper)
        if method == "lm":
            if np.isfinite(lower).any() or np.isfinite(upper).any():
                raise ValueError("method='lm' takes no bounds; method='trf' does")
            if not (isinstance(loss, str) and loss == "linear"):
                raise ValueError(f"method='lm' takes loss='linear' only, got {shown(loss)}; method='trf' takes all")
        f_scale = number("f_scale", f_scale, above=0)
        names = "ftol", "xtol", "gtol"
        ends = (
            0.0 if each is None else number(name, each, least=0) for name, each in zip(names, tolerances, strict=True)
        )
        most = 100 * size if max_nfev is None else integer("max_nfev", max_nfev, least=1)
        if integer("verbose", verbose, least=0) > 2:
            raise ValueError(f"verbose={verbose} must be 0, 1 or 2")
        scale = _scale(x_scale, method, unknowns)
        steps = None if diff_step is None else whole_elements("diff_step", diff_step, unknowns.specs, _FLOAT, missing=0)
        return cls(
            start,
            lower,
            upper,
            method,
            Options(next(ends), next(ends), next(ends), most, scale),
            f_scale,
            steps,
            verbose,
        )

    @property
    def bounds(self) -> np.ndarray:
        """Both, as one array."""
        return np.stack([self.lower, self.upper])

    def iterate(self, rows: Rows) -> Iterator[State]:
        """The method at work."""
        if self.method == "lm":
            return levenberg_marquardt(rows, self.start, self.options)
        return reflective(rows, self.start, self.lower, self.upper, self.options)

    def active_mask(self, x: np.ndarray) -> np.ndarray:
        """-1 where the lower bound is active, 1 where the upper one is, else 0."""
        share = self.options.xtol
        mask = np.zeros(len(x), int)
        below, above = x - self.lower, self.upper - x
        low = np.isfinite(self.lower) & (below <= np.minimum(above, share * np.maximum(1, abs(self.lower))))
        high = np.isfinite(self.upper) & (above <= np.minimum(below, share * np.maximum(1, abs(self.upper))))
        mask[low], mask[high] = -1, 1
        return mask


_FLOAT = np.dtype(np.float64)


def _bounds(bounds: Any, unknowns: Unknowns) -> tuple[np.ndarray, np.ndarray]:
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):
        bounds = bounds.lb, bounds.ub
    if isinstance(bounds, str | Mapping) or not hasattr(bounds, "__len__") or len(bounds) != 2:
        raise ValueError(
            f"bounds={shown(bounds)} must be (lower, upper), each a number or an array of {unknowns.size} elements, or "
            "scipy.optimize.Bounds"
        )
    pair = whole_bounds(tuple(bounds), unknowns.specs, _FLOAT)
    lower, upper = (
        np.full(unknowns.size, none) if each is None else np.broadcast_to(each, unknowns.size).copy()
        for each, none in zip(pair, (-np.inf, np.inf), strict=True)
    )
    return lower, upper


def _check_start(start: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> None:
    equal = np.flatnonzero(lower >= upper)
    if len(equal):
        k = int(equal[0])
        raise ValueError(
            f"the bounds of element {k} are {lower[k]:g} and {upper[k]:g}: each lower bound must be below the upper "
            "one; leave elements that keep their value out of x0"
        )
    outside = np.flatnonzero((start < lower) | (start > upper))
    if len(outside):
        k = int(outside[0])
        raise ValueError(
            f"x0 is outside of the bounds: element {k} is {start[k]:g}, its bounds are {lower[k]:g} and {upper[k]:g}; "
            "start inside, as from numpy.clip(x0, lower, upper)"
        )


def _scale(x_scale: Any, method: str, unknowns: Unknowns) -> np.ndarray | None:
    if x_scale is None:
        x_scale = "jac" if method == "lm" else 1.0
    if isinstance(x_scale, str):
        if x_scale != "jac":
            raise ValueError(f"x_scale={shown(x_scale)} must be 'jac', or positive numbers")
        return None
    scale = whole_elements("x_scale", x_scale, unknowns.specs, _FLOAT, missing=1)
    assert scale is not None
    if not ((scale > 0) & np.isfinite(scale)).all():
        k = int(np.flatnonzero(~((scale > 0) & np.isfinite(scale)))[0])
        raise ValueError(f"x_scale must be positive and finite, but element {k} is {scale[k]:g}")
    return scale


def _run(settings: _Settings, rows: Rows, callback: Callback, speaks: bool) -> OptimizeResult:
    """Iterate until the method or the callback ends it.  Collective."""
    shows = settings.verbose == 2 and speaks
    if shows:
        log.inform(_HEAD)
    status = None
    watched = rows.any(callback.is_given)
    for state in settings.iterate(rows):
        if shows:
            log.inform(f"{state.iterations:>9} {state.nfev:>11} {state.cost:>17.10e} {state.optimality:>11.2e}")
        status = state.status
        if status is None and state.iterations and watched and _stops(rows, callback, state):
            status = _CALLBACK
            break
    assert status is not None
    options = settings.options
    message = _MESSAGES[status].format(
        ftol=options.ftol, xtol=options.xtol, gtol=options.gtol, max_nfev=options.max_nfev, optimality=state.optimality
    )
    if settings.verbose and speaks:
        log.inform(message)
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
        status=status,
        success=status > 0,
        message=message,
    )


def _stops(rows: Rows, callback: Callback, state: State) -> bool:
    """Whether the callback of any rank wants to stop.  Collective."""

    def make() -> OptimizeResult:
        return OptimizeResult(x=state.x.copy(), cost=state.cost, nit=state.iterations, nfev=state.nfev)

    problem, stops = None, False
    try:
        stops = callback(make)
    except (Exception, SystemExit) as error:  # of the user's function: all ranks must learn of it
        problem = error
    rows.raise_if_any(problem)
    return rows.any(stops)
