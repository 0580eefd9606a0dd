"""`minimize`, with the arguments, options and results of ``scipy.optimize.minimize``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mpishard.arguments import shown
from mpishard.inverse.finite_differences import FiniteDifferences
from mpishard.inverse.functions import Callback, Functions, opening
from mpishard.inverse.loop import evaluate_until_end, files_of
from mpishard.inverse.multipliers import augmented_lagrangian
from mpishard.inverse.result import (
    LoopOptions,
    MinimizationOutcome,
    OptimizeResult,
    count_of,
    make_method,
    reject_keywords,
)
from mpishard.inverse.reverse_communication import ReverseCommunication
from mpishard.inverse.run_arguments import RunArguments
from mpishard.inverse.scipy_constraints import ScipyConstraints
from mpishard.inverse.unknowns import Unknowns, copy_of_point
from mpishard.minimizers.method import Method

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.comm.mesh import Mesh
    from mpishard.record import RunRecord

Array = Any
_OTHER_METHODS = "slsqp", "trust-constr", "cobyla", "cobyqa"  # of SciPy, which take constraints
_NEWTON = "newton-cg", "trust-ncg"


def minimize(
    fun: Callable[..., Any],
    x0: Any,
    args: Any = (),
    method: str | Method | None = "L-BFGS-B",
    jac: bool | str | Callable[..., Any] = True,
    hess: Callable[..., Any] | None = None,
    hessp: Callable[..., Any] | None = None,
    bounds: Any = None,
    constraints: Any = (),
    tol: float | None = None,
    callback: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh | None = None,
    reduction: str | None = None,
    samples: int | None = None,
    elastic: bool | Mapping[str, Any] = False,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    record: RunRecord | None = None,
    **elements: Any,
) -> OptimizeResult:
    """Minimise a function of many unknowns, from its values and gradients.

    The arguments and the result are those of ``scipy.optimize.minimize``.  With a mesh it is collective: all ranks call
    it, each keeps its part of the vectors of the method, and all take the same steps.  Without one it uses no MPI.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)`` returns the value and the gradient, or with another `jac` the value.  On a mesh all ranks call
        it for the same point; see `reduction`.
    x0 : array, FlatParameters, Partition, or dict, list or tuple of arrays or of Partitions
        The start.  An array is copied and seen as flat; `fun` gets a flat copy of each point.  A FlatParameters is
        changed in place; `fun` gets it, to read its tensors by name, and may return the gradient by name, too.  Ranks
        start from the values of rank 0, with a warning if theirs differ.  A dictionary, list or tuple of arrays, also
        nested, is copied; `fun`, `jac`, `hessp`, `callback` and a callable `preconditioner` get copies of this
        structure and return it, the result has it, and options of elements are given in it or as one number, bounds as
        one pair.  Its arrays have the paths to them as names, such as ``layers.0.weight``.  Complex arrays count as
        pairs of real numbers: the gradient by ``z = a + ib`` is ``df/da + i df/db``, as that of PyTorch; that of JAX is
        its conjugate.  With a `Partition` all arrays, those of options and of the result, too, are of this rank's part.
    args : tuple
        Further arguments of `fun`, `jac`, `hess` and `hessp`.
    method : str or Method
        ``"L-BFGS-B"``, ``"L-BFGS"``, ``"CG"``, ``"Newton-CG"`` or ``"trust-ncg"``, in upper or lower case; or a method
        such as ``mpishard.LBFGSB(history=20)``.  ``"Newton-CG"`` is another name of ``"trust-ncg"``: both are
        `TruncatedNewton`, with a trust region and bounds; with the first `tol` sets ``xtol`` too.  None: the default.
    jac : True, callable, "2-point" or "3-point"
        True: `fun` returns ``(value, gradient)``.  A function: ``jac(x, *args)`` is the gradient.  A name: the gradient
        is by finite differences, with the steps of SciPy's ``jac`` of this name and inside of the bounds; `fun` returns
        the value, and is called once or twice more for each element that may move.  On a mesh groups of ranks share the
        elements: those that have one place on the data axis; of ``Mesh()`` each rank is one.  All ranks of a group call
        `fun` for the same points, so it may communicate over ``mesh.tensor``, and not beyond.  `x0` is whole on all
        ranks, or a Partition.  The gradient has the same bits on any number of groups.  With ``reduction="sum"`` every
        group has its part of the value, and so calls `fun` for all elements.  ``nfev`` and ``maxfun`` count points of
        the method, not the calls for the gradient there, which SciPy counts.  Not with `elastic`.
    hess : callable, optional
        ``hess(x, *args)``: the Hessian, or a Gauss-Newton approximation of it, for the Newton methods: an array, a
        sparse matrix as SciPy's, or an operator with ``shape`` and ``matvec(v)``, such as
        ``scipy.sparse.linalg.LinearOperator``.  Rows and columns are in the order of the elements of `x0`.  It is kept
        for one point, and counts where `hessp` is given, too.  On a mesh it is as the gradient: the whole one on each
        rank, with ``reduction="sum"`` or `samples` a term of it; not for an `x0` that is split over the tensor axis.
    hessp : callable, optional
        ``hessp(x, direction, *args)``: such a matrix times a direction.
    bounds : optional
        A pair ``(lower, upper)`` for each element, with None for no bound; ``scipy.optimize.Bounds``; one such pair of
        numbers or arrays for all elements; or by tensor name.  Two pairs for two elements are one for each, as for
        SciPy, also where they are arrays: those of all lower and all upper bounds go into ``Bounds`` there.  With a
        `Partition` two arrays are always those.  A start outside of its bounds is moved to the nearest bound, and a
        message says so.
    constraints : optional
        ``scipy.optimize.NonlinearConstraint`` or ``LinearConstraint``, a dictionary as SciPy's with ``type``, ``fun``,
        ``jac`` and ``args``, or a list of these: with them `augmented_lagrangian` minimises, and the result is its own.
        `tol` sets ``gtol`` and ``ctol``, the tolerance of the constraints, which are options then, and ``maxiter``
        counts minimisations.  ``jac`` of a constraint returns an array, a sparse matrix or an operator with ``shape``,
        ``matvec`` and ``rmatvec``; ``"2-point"``, ``"3-point"`` and ``"cs"`` call ``fun`` for each unknown, on each
        rank, inside of the bounds.  The Newton methods need ``hess(x, v)`` of a NonlinearConstraint, the Hessian of v
        times its functions, in a form of `hess`, and `hess` or `hessp` of `fun`.  ``keep_feasible`` must be False.
        With ``reduction="sum"`` each rank gives constraints of its own, at least one.
    tol : float, optional
        Sets the tolerances of the method that SciPy sets by it.
    callback : callable, optional
        Called after each iteration: ``callback(xk)``, or ``callback(intermediate_result=result)`` if its only parameter
        has that name.  Raising StopIteration or returning True stops, on a mesh on any rank.
    options : dict, optional
        By SciPy's names and with its defaults: ``maxiter``, ``maxfun``, ``gtol``, ``ftol``, ``maxcor``, ``maxls`` and
        so on, as far as the method has them; ``c1`` and ``c2`` of the conditions of Wolfe where the method has a line
        search.  The Newton methods have the defaults of `TruncatedNewton` for ``gtol`` and the radii of the region.
        ``return_all=True``: the result has ``allvecs``, copies of the start and of each iterate (a resumed run those
        since; not with `elastic`).  ``hess_inv=True``: it has ``hess_inv``, an `InverseHessian` (``"CG"`` has none).
        ``disp=True`` shows a table with a line an iteration, ``maxtime=seconds`` ends the loop after the iteration in
        which this time is over.  ``retries=n``: where `fun`, `jac` or a Hessian product raises `EvaluationFailed`, it
        is called again for the same point, up to n times, on the same ranks: with ``reduction="sum"`` on those that
        share the field, without `mesh` or with `samples` on this one, else on all.  The number n is the same on all
        ranks; ``nfev`` counts points, not calls.
    mesh : Mesh, optional
        The ranks that minimise together.
    reduction : {None, "sum"}
        None: `fun` returns the whole value and gradient on each rank, the same on all.  ``"sum"``: each rank returns
        its part of both, and their sums over all ranks count.  If `x0` is split over the tensor axis
        (``FlatParameters(specs, place=mesh.place)``), the gradient is that of the rank's slices, summed over the data
        axis; the value is summed or compared over all ranks.  Tensors that all ranks of the tensor axis hold whole need
        the same gradient on them, or ``partial=True`` in their spec, which sums it over that axis too.
    samples : int, optional
        With `elastic`: the number of samples, such as shots, in the sum that the function is (of an
        `OptimizationProblem` it is the mean).  ``fun(x, samples, *args)`` returns value and gradient summed over the
        samples whose numbers are in this int64 array; so do ``jac``, ``hess(x, samples, *args)`` and ``hessp(x,
        direction, samples, *args)``.  They are dealt out to the ranks by what they have cost, and again when ranks come
        or go.  A call gets one of them, or with more than 64 a 64th part.  With fewer samples than ranks some ranks
        have none to compute.  With a `Partition` they are dealt out evenly to the groups of ranks that share it.  `fun`
        then returns the value that its group has, the same on all ranks of the group, or with ``reduction="sum"`` this
        rank's part of it.
    elastic : bool or mapping
        With a mesh: True, or a dictionary of the options ``min_workers``, ``max_workers``, ``folder``, ``discover``,
        ``failure_timeout``, ``respawn``, ``rebuild`` and ``audit`` of `ElasticOptimizer`, makes a run that outlives its
        ranks, with the bits of an undisturbed one.  Without `samples` each rank, or each group that shares a
        `Partition`, computes the whole function.  `callback` is called on all ranks; an error in it, or in `fun` with
        samples, is the end of its rank alone.  ``maxtime`` ends the loop after an evaluation.
    checkpoints : Checkpoints, optional
        With a mesh: save the minimisation there after every N evaluations and Hessian products, also in the
        middle of a line search, and at the end.
    resume : bool
        Continue from the newest checkpoint there, with the next evaluation, on any number of ranks; start anew if there
        is none.  Limits on iterations and evaluations count those before it.
    record : RunRecord, optional
        With a mesh: write the course of the minimisation there, a step for each evaluation and each Hessian product,
        for ``mpishard plot``.  Several calls in one script may share its folder: each counts on.  (Not elastic ones.)
    **elements
        ``fixed``: a mask of elements that keep their value.  ``inner_product``: positive weights, such as the diagonal
        of a mass matrix.  ``preconditioner``: a positive diagonal, or a function of a vector, instead of the inverse of
        the weights as initial inverse Hessian.  Each as in `mpishard.minimizers.Method`.

    Returns
    -------
    OptimizeResult
        With SciPy's fields and status numbers.  The same on all ranks, except for parts of what is split; of an elastic
        run on all ranks that live at its end.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, or `fun` returns something else; on a mesh on all ranks, also if the values of ranks
        differ without ``reduction="sum"``.
    Exception
        What `fun`, `jac`, `hess`, `hessp` or `callback` raises, on a mesh on all ranks.

    Examples
    --------
    >>> import numpy as np
    >>> def sphere(x):
    ...     return x @ x, 2 * x
    >>> minimize(sphere, np.ones(3), bounds=[(0.5, None), (None, None), (-1, 1)]).x
    array([0.5, 0. , 0. ])
    """
    if not (constraints is None or (isinstance(constraints, tuple | list | dict) and not constraints)):
        second = {"hess": hess, "hessp": hessp}
        files = {"checkpoints": checkpoints, "resume": resume, "record": record}
        further = {"jac": jac, "bounds": bounds, "callback": callback, "mesh": mesh, "reduction": reduction, **files}
        further |= {"elastic": elastic, **elements}
        return _constrained(fun, x0, args, method, constraints, tol, options, second, samples, further)
    with opening(mesh, "minimize") as same:
        same["constraints"] = False
        extra = dict(elements)
        known = {name: extra.pop(name, None) for name in ("fixed", "inner_product", "preconditioner")}
        reject_keywords("minimize", extra)
        watcher = Callback(callback)
        functions = Functions(fun, jac, hessp, args, hess, may_differ=True)
        functions.check_terms(reduction)
        unknowns = Unknowns(x0)
        run = RunArguments.checked(unknowns, mesh, reduction, samples, elastic, checkpoints, resume, record)
        if functions.differences is not None:
            _check_differences(functions, unknowns, mesh)
        if hess is not None and unknowns.is_split:
            raise ValueError(
                "hess= needs all elements of x0, which is split over ranks; give hessp= of this rank's part"
            )
        method = "L-BFGS-B" if method is None else method
        about, same["terms"] = unknowns.options(bounds, **known), ""
        if functions.nonsmooth:
            from mpishard.inverse.nonsmooth import options_of_terms  # with MPI, as the terms

            found, same["terms"] = options_of_terms(functions.nonsmooth, unknowns, mesh)
            about |= found
        chosen, loop = make_method(method, options, tol, unknowns.total, **about)
        same |= {"method": type(chosen), "reduction": reduction, "samples": samples, "elastic": elastic}
        same |= {"retries": loop.retries, "jac": functions.differences}
        same |= {"hess_inv": loop.hess_inv, "return_all": loop.return_all}
        if run.elastic is not None:
            _check_elastic(functions, loop, about.get("penalty"))
        if loop.hess_inv:
            from mpishard.minimizers.inverses import expect_inverse  # with the methods: only for those who ask

            expect_inverse(chosen)
        if functions.differences is not None and mesh is not None:
            unknowns.held_whole_by(mesh.place)
        same |= run.files_given()
    return solve(functions, chosen, unknowns, watcher, loop, run).result


def _constrained(
    fun: Any,
    x0: Any,
    args: Any,
    method: Any,
    constraints: Any,
    tol: float | None,
    options: Any,
    second: Mapping[str, Any],
    samples: int | None,
    further: Mapping[str, Any],
) -> OptimizeResult:
    """Minimise under SciPy's constraints by `augmented_lagrangian`, to which `further` arguments go.  Collective.

    `second` are the second derivatives of `fun`.
    """
    with opening(further["mesh"], "minimize") as same:
        same["constraints"] = True
        name = "L-BFGS-B" if method is None else method
        if isinstance(name, str) and name.lower() in _OTHER_METHODS:
            raise ValueError(
                f"there is no method {name!r}: with constraints leave method= out, and an augmented Lagrangian with "
                "'L-BFGS-B' meets them"
            )
        if isinstance(further["jac"], str):
            raise ValueError(
                f"jac={further['jac']!r} is for a function without constraints: with them give jac=True if fun returns "
                "(value, gradient), or jac=function; the jac of a constraint may be '2-point' or '3-point'"
            )
        if samples is not None:
            raise ValueError("constraints= are for a fun of all samples: leave samples= out")
        if not (options is None or isinstance(options, Mapping)):
            raise TypeError(f"options={shown(options)} must be a dictionary of names and values")
        given = dict(options or {})
        own = {} if tol is None else {"gtol": tol, "ctol": tol}
        own |= {each: given.pop(each) for each in ("gtol", "ctol", "maxiter") if each in given}
        if "maxiter" in own:
            own["maxiter"] = count_of(own["maxiter"])
        unknowns = Unknowns(x0)
        found = ScipyConstraints(constraints, unknowns, further["bounds"])
        is_newton = name.lower() in _NEWTON if isinstance(name, str) else getattr(name, "needs_products", False)
        products = (
            _products_of_lagrangian(fun, args, shown(name), second, further, found, unknowns) if is_newton else {}
        )
    limits = {"lower": found.lower, "upper": found.upper}
    arguments = {"args": args, "method": name, "options": given, **limits, **own, **products, **further}
    return augmented_lagrangian(fun, unknowns, found.function, found.adjoint, **arguments)


def _products_of_lagrangian(
    fun: Any,
    args: Any,
    method: str,
    second: Mapping[str, Any],
    further: Mapping[str, Any],
    constraints: ScipyConstraints,
    unknowns: Unknowns,
) -> dict[str, Callable[..., Any]]:
    """`hessp` and `forward` of `augmented_lagrangian`; ValueError without second derivatives."""
    if second["hess"] is None and second["hessp"] is None:
        raise ValueError(f"method={method} needs products with the Hessian of fun: give hessp= or hess=")
    constraints.expect_hessians(method)
    functions = Functions(fun, further["jac"], second["hessp"], args, second["hess"])

    def hessp(x: Any, direction: Any, y: Any, *args: Any) -> Any:
        product = unknowns.vector("the Hessian product", functions.product(copy_of_point(x), copy_of_point(direction)))
        return unknowns.like_x0(product - constraints.hessian_product(x, direction, y))

    return {"hessp": hessp, "forward": constraints.forward}


def _check_differences(functions: Functions, unknowns: Unknowns, mesh: Mesh | None) -> None:
    """Raise ValueError if a gradient cannot be by finite differences."""
    name = functions.differences
    if functions.has_terms:
        raise ValueError(
            f"jac={name!r} needs a fun that returns the value, and regularized returns (value, gradient): give jac=True"
        )
    if mesh is not None and mesh.pipeline.size > 1:
        raise ValueError(f"jac={name!r} needs a mesh without a pipeline axis, got {mesh.sizes}")
    unknowns.check_differences()


def _check_elastic(functions: Functions, loop: LoopOptions, penalty: Any) -> None:
    """Raise ValueError if a part of a call is for ranks that stay."""
    alone = "is for ranks that stay: leave elastic= and samples= out"
    if functions.differences is not None:
        raise ValueError(f"jac={functions.differences!r} {alone}, or let fun return gradients")
    if penalty is not None and penalty.is_cut:
        raise ValueError(f"{penalty.kinds} of a Partition {alone}")
    if loop.return_all:
        raise ValueError("return_all=True is for ranks that stay, with elastic= keep the iterates in callback=")


def solve(
    functions: Functions,
    method: Method,
    unknowns: Unknowns,
    callback: Callback,
    loop: LoopOptions,
    run: RunArguments,
) -> MinimizationOutcome:
    """Minimise by a method, with arguments that are checked.  Collective over the mesh."""
    functions.take_shape(unknowns)
    if run.elastic is not None:
        from mpishard.inverse.elastic_minimization import ElasticMinimization

        return ElasticMinimization(functions, unknowns, method, callback, loop, run).minimize()
    optimizer = ReverseCommunication(method, unknowns, mesh=run.mesh, reduction=run.reduction)
    functions.meeting = optimizer.ranks.together if unknowns.is_split else None
    differences = None
    if functions.differences is not None:
        sums = run.reduction == "sum"
        differences = FiniteDifferences(functions, unknowns, optimizer.ranks, run.mesh, sums, loop.retries)
    files = files_of(optimizer, run)
    ended = evaluate_until_end(optimizer, functions, unknowns, callback, loop, files, differences)
    if files is not None:
        files.end(ended.reason)
        optimizer.gather_result()  # the last checkpoint has the next point
    return ended
