"""`lsqr` and `cgls`: linear least squares, with the arguments and results of ``scipy.sparse.linalg.lsqr``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishard.arguments import flag, integer, number, shown
from mpishard.comm.errors import OneRank, on_any
from mpishard.inverse.functions import Callback, Watch, opening, world_of
from mpishard.inverse.operators import MatrixOnRanks, OwnRows, RankSpace, check_shape, is_operator
from mpishard.inverse.result import OptimizeResult, count_of
from mpishard.inverse.run_arguments import RunArguments
from mpishard.inverse.unknowns import Unknowns
from mpishard.io import log, terminal
from mpishard.launch.signals import Interrupts
from mpishard.minimizers.linear_least_squares import CGLS, LSQR, LinearMethod, Tolerances, reason_to_stop
from mpishard.minimizers.space import LocalSpace, Space

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.comm.axis import Axis
    from mpishard.comm.mesh import Mesh
    from mpishard.inverse.iteration_files import IterationFiles, Saved, Vectors
    from mpishard.record import RunRecord

Array = Any
_STOPPED = 8  # istop
_MESSAGES = (
    "x0 is the solution: the gradient A'(b - A x0) is 0",
    "converged: A x = b, to atol and btol",
    "converged: the least-squares solution, to atol",
    "stopped: the condition number of A exceeds conlim",
    "converged: A x = b, to rounding",
    "converged: the least-squares solution, to rounding",
    "stopped: the condition number of A is too large for float64",
    "stopped: the number of iterations reached iter_lim",
    "stopped by the callback, by Ctrl-C or by the end of the job",
)
_WRONG_ADJOINT = (
    "rmatvec of A is not the adjoint of its matvec: u'(A v) and (A'u)'v differ for the first residual u and gradient "
    "v, and the iterations may lead nowhere; mpishard.check_adjoint tests A"
)
_HEAD = f"{'iteration':>9} {'r1norm':>16} {'r2norm':>16} {'arnorm':>10} {'anorm':>10} {'acond':>10}"


class LinearResult(NamedTuple):
    """The result of `lsqr` and `cgls`: the fields of SciPy's, in its order.  Printed it is a table.

    Where there is an ``x0``, ``x - x0`` takes the place of x in norms.

    Parameters
    ----------
    x : array, or dict, list or tuple of arrays
        The last iterate, in the structure of ``x0``; of a `Partition` this rank's part.
    istop : int
        Why it ended.  0: ``x0`` is the solution.  1: ``A x = b``, to `btol` and `atol`.  2: the least-squares solution,
        to `atol`.  3: `acond` exceeds `conlim`.  4, 5, 6: as 1, 2 and 3, to rounding.  7: `itn` has reached
        `iter_lim`.  8: the callback, Ctrl-C or the end of the job has stopped it.
    itn : int
        Iterations.
    r1norm, r2norm : float
        ``|b - A x|``, and the root of what is minimised, ``|b - A x|**2 + damp**2 |x|**2``.  Of `lsqr` the first is
        estimated from the second, and negative where rounding has left no digit of it.
    anorm, acond : float
        Estimates of the Frobenius norm and of the condition number of ``[A; damp I]``.
    arnorm : float
        The norm of the gradient, ``A'(b - A x) - damp**2 x``.
    xnorm : float
        ``|x|``.
    var : array, or dict, list or tuple of arrays, or None
        With ``calc_var=True`` estimates of the diagonal of the inverse of ``A'A + damp**2 I``, from below.
    """

    x: Any
    istop: int
    itn: int
    r1norm: float
    r2norm: float
    anorm: float
    acond: float
    arnorm: float
    xnorm: float
    var: Any

    @property
    def message(self) -> str:
        """`istop` in words."""
        return _MESSAGES[self.istop]

    @property
    def success(self) -> bool:
        """Whether it has converged: `istop` is 0, 1, 2, 4 or 5."""
        return self.istop in (0, 1, 2, 4, 5)

    def __repr__(self) -> str:
        return repr(OptimizeResult(message=self.message, success=self.success, **self._asdict()))


def lsqr(
    A: Any,
    b: Any,
    damp: float = 0.0,
    atol: float = 1e-6,
    btol: float = 1e-6,
    conlim: float = 1e8,
    iter_lim: int | None = None,
    show: bool = False,
    calc_var: bool = False,
    x0: Any = None,
    *,
    callback: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    record: RunRecord | None = None,
) -> LinearResult:
    """Minimise ``|b - A x|**2 + damp**2 |x - x0|**2`` by LSQR: a linear system, or linear least squares.

    The arguments and the result are those of ``scipy.sparse.linalg.lsqr``.  With a mesh it is collective: the rows of A
    are divided over its ranks, and all take the same steps.  Without one it uses no MPI.

    Parameters
    ----------
    A : array, sparse matrix, operator, or pair of functions
        On a mesh the rows of this rank: any number, which may be 0, of all columns.  An array; sparse rows, as SciPy's;
        an operator with ``shape``, ``matvec(v)`` and ``rmatvec(u)``, as ``scipy.sparse.linalg.LinearOperator``; or
        ``(matvec, rmatvec)`` with an `x0`.  ``rmatvec(u)`` takes one number a row of this rank; what the ranks return
        is added up.  With a `Partition` as `x0` it is an operator or a pair: ``matvec(v)`` takes this rank's part of
        the unknowns as a flat vector, several arrays end to end, and gives the rows of this rank; ``rmatvec(u)`` gives
        this part, with what the rows of the other ranks of the group contribute.  All ranks call both.
    b : array
        The right-hand side, on a mesh of this rank's rows; copied.
    damp : float
        At least 0.
    atol, btol : float
        It ends where ``|r| <= btol |b| + atol |A| |x|``, or where the gradient is at most ``atol |A| |r|``, with r the
        residual and estimates of the norms.
    conlim : float
        It ends where the estimated condition number exceeds this one; 0: no limit.
    iter_lim : int or None
        The most iterations; None for twice the number of columns.
    show : bool
        Whether the first rank prints a table with a line an iteration.
    calc_var : bool
        Whether to estimate ``var``.
    x0 : array, Partition, or dict, list or tuple of these, optional
        The start, float64; default: 0.  On a mesh an array is whole on all ranks, which begin from that of rank 0.  Of
        a `Partition` each rank has its part, and so of all vectors: no rank has one of the size of the whole field.
    callback : callable, optional
        Called after each iteration: ``callback(xk)``, or ``callback(intermediate_result=result)``, with ``x``, ``itn``
        and the norms; it stops by raising StopIteration or returning True, on any rank.
    mesh : Mesh, optional
        The ranks that have rows, all of its axes.
    checkpoints : Checkpoints, optional
        With a mesh: save the run there after every N iterations, and at the end.
    resume : bool
        Continue from the newest checkpoint there, on any number of ranks that have the rows in the same order, rank
        after rank.  Tolerances and `iter_lim` may be others; `iter_lim` counts the iterations before.
    record : RunRecord, optional
        With a mesh: write the course there, for ``mpishard plot``.

    Returns
    -------
    LinearResult
        The same on all ranks, but for parts of a `Partition`.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, sizes do not fit, or a number is NaN or infinite; on a mesh on all ranks, also if
        arguments differ between them.
    Exception
        What the functions of A or `callback` raise, on a mesh on all ranks.

    See Also
    --------
    cgls : By conjugate gradients.
    least_squares : Of functions that are not linear, and with bounds.
    check_adjoint : Whether ``rmatvec`` fits ``matvec``.

    Notes
    -----
    With arrays and sparse rows the bits are the same on any number of ranks, however the rows are split: products with
    ``A'`` are summed without rounding on the way.  An operator adds up the rows of its rank itself, and then the bits
    depend on the split, unless the unknowns are split and the rows with them.  After the first iteration a warning says
    if ``rmatvec`` is not the adjoint of ``matvec``, as far as one product of both shows it.

    A rank keeps its rows of A, one vector of rows, and four of unknowns, five with `calc_var`.  Of sparse rows it has a
    scaled copy of the elements, 8 bytes each, and of those of an array their columns, 4 bytes each.  An iteration makes
    a product with A and one with ``A'``, and four all-reduces: one of 16 bytes a column, the others of a few numbers.
    With checkpoints there is one more product at the start, by which a run that resumes finds rows in another order.

    References
    ----------
    C. C. Paige, M. A. Saunders: LSQR: an algorithm for sparse linear equations and sparse least squares.  ACM
    Transactions on Mathematical Software 8, 43-71 (1982).

    Examples
    --------
    >>> import numpy as np
    >>> A = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    >>> x, istop, itn, *norms = lsqr(A, [1.0, 2.0, 3.0])
    >>> [round(float(each), 6) for each in x], istop, itn
    ([1.0, 1.0], 1, 2)
    """
    run = RunArguments(mesh, checkpoints=checkpoints, resume=resume, record=record)
    return _solved(LSQR, A, b, damp, (atol, btol, conlim, iter_lim), show, calc_var, x0, callback, run)


def cgls(
    A: Any,
    b: Any,
    damp: float = 0.0,
    atol: float = 1e-6,
    btol: float = 1e-6,
    conlim: float = 1e8,
    iter_lim: int | None = None,
    show: bool = False,
    calc_var: bool = False,
    x0: Any = None,
    *,
    callback: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    record: RunRecord | None = None,
) -> LinearResult:
    """Minimise ``|b - A x|**2 + damp**2 |x - x0|**2`` by CGLS, conjugate gradients for the normal equations.

    Arguments, result, tests and rules are those of `lsqr`, and without rounding so are the iterates.  The residual is
    computed and not estimated, so that ``r1norm`` holds to rounding also with `damp`; where the condition of A is bad
    `lsqr` loses fewer digits.  The steps of `least_squares` by ``tr_solver="cg"`` come from the same code.  Collective
    with a mesh.

    Parameters
    ----------
    A : array, sparse matrix, operator, or pair of functions
        On a mesh the rows of this rank.
    b : array
        The right-hand side, of these rows; copied.
    damp : float
        At least 0.
    atol, btol : float
        When it ends.
    conlim : float
        When it ends, too; 0: no limit.
    iter_lim : int or None
        The most iterations; None for twice the number of columns.
    show : bool
        Whether the first rank prints a table.
    calc_var : bool
        Whether to estimate ``var``.
    x0 : array, Partition, or dict, list or tuple of these, optional
        The start; default: 0.
    callback : callable, optional
        Called after each iteration.
    mesh : Mesh, optional
        The ranks that have rows.
    checkpoints : Checkpoints, optional
        Where it is saved.
    resume : bool
        Continue from the newest checkpoint there.
    record : RunRecord, optional
        Where its course is written.

    Returns
    -------
    LinearResult
        As of `lsqr`.

    Raises
    ------
    ValueError, TypeError
        As `lsqr`.
    Exception
        What the functions of A or `callback` raise, on a mesh on all ranks.

    See Also
    --------
    lsqr : What the arguments are.

    References
    ----------
    M. R. Hestenes, E. Stiefel: Methods of conjugate gradients for solving linear systems.  Journal of Research of the
    National Bureau of Standards 49, 409-436 (1952), section 10.  A. Bjorck, T. Elfving, Z. Strakos: Stability of
    conjugate gradient and Lanczos methods for linear least squares problems.  SIAM Journal on Matrix Analysis and
    Applications 19, 720-736 (1998).

    Examples
    --------
    >>> import numpy as np
    >>> A = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    >>> [round(float(each), 6) for each in cgls(A, [1.0, 2.0, 3.0]).x]
    [1.0, 1.0]
    """
    run = RunArguments(mesh, checkpoints=checkpoints, resume=resume, record=record)
    return _solved(CGLS, A, b, damp, (atol, btol, conlim, iter_lim), show, calc_var, x0, callback, run)


def _solved(
    kind: type[LinearMethod],
    A: Any,
    b: Any,
    damp: Any,
    tolerances: tuple[Any, Any, Any, Any],
    show: Any,
    calc_var: Any,
    x0: Any,
    callback: Any,
    run: RunArguments,
) -> LinearResult:
    call, mesh = kind.__name__.lower(), run.mesh
    with opening(mesh, call) as same:
        right = _right_side(b)
        unknowns = None if x0 is None else _start(x0, mesh)
        matrix = _matrix(A, len(right), unknowns)
        if unknowns is None:
            unknowns = Unknowns(np.zeros(matrix.shape[1]))
        damp = number("damp", damp, least=0)
        atol, btol, conlim, iter_lim = tolerances
        most = 2 * unknowns.total if iter_lim is None else integer("iter_lim", count_of(iter_lim), least=0)
        atol, btol = number("atol", atol, least=0), number("btol", btol, least=0)
        limits = Tolerances(atol, btol, number("conlim", conlim, least=0, finite=False), most)
        calc_var, show = flag("calc_var", calc_var), flag("show", show)
        watcher = Callback(callback)
        same |= {"columns of A": unknowns.total, "A is an operator": is_operator(matrix), "damp": damp}
        same |= {**vars(limits), "calc_var": calc_var, "x0 is given": x0 is not None}
        same |= run.files_given()
    world = world_of(mesh)
    start = None if x0 is None else np.array(unknowns.given, np.float64)
    if start is not None and mesh is not None and not unknowns.has_fields:
        from mpishard.inverse.mesh_run import broadcast_start

        broadcast_start(mesh, start)
    if start is not None and not on_any(world, bool(start.any())):
        start = None
    space: Space = LocalSpace(unknowns.given_size, np.empty(0))
    sharers = world
    if mesh is not None and unknowns.has_fields:
        space, sharers = RankSpace(unknowns.given_size, unknowns.total, mesh.tensor), mesh.data
    method = kind(MatrixOnRanks(OwnRows(matrix, "A"), len(right), space, world, sharers), damp, calc_var)
    files: IterationFiles | None = None
    if mesh is not None:
        from mpishard.inverse.iteration_files import IterationFiles

        vectors = _vectors_of(method, unknowns, len(right), mesh)
        variances = " and calc_var=True" if calc_var else ""
        name = f"{call} with damp={damp}{variances}, {method.matrix.rows.total} rows and {unknowns.total} columns"
        files = IterationFiles(run, call, name, vectors)
    method.begin(right, start)
    if files is not None:
        if run.checkpoints is not None:
            method.note_order()
        flat = files.load(method.restore)
        if flat is not None:
            _fill(method, unknowns, flat)
        files.begin_record(method.progress.itn, {"damp": damp, **vars(limits)})
    istop = _run(method, limits, unknowns, world, watcher, files, show)
    var = None if method.variances is None else unknowns.like_x0(method.variances)
    return LinearResult(x=unknowns.like_x0(method.iterate()), istop=istop, var=var, **_norms(method))


# The arguments.


def _right_side(b: Any) -> Array:
    try:
        found = np.asarray(b)
    except (TypeError, ValueError):
        raise TypeError(f"b must be an array of numbers, got {shown(b)}") from None
    if found.dtype.kind not in "biuf":
        raise TypeError(f"b must be an array of real numbers in host memory, got {shown(b)}")
    if max(found.shape, default=1) != found.size:
        raise ValueError(f"b must have one dimension, but its shape is {found.shape}")
    return np.array(found.reshape(-1), np.float64)


def _start(x0: Any, mesh: Mesh | None) -> Unknowns:
    found = Unknowns(x0)
    if found.parameters is not None:
        raise TypeError("x0 must be an array or a Partition, or a structure of these, and not a FlatParameters")
    if found.tree is not None and found.tree.complex_leaf is not None:
        raise TypeError("x0 is complex, and the unknowns are real numbers; give real and imaginary parts apart")
    if mesh is None and found.has_fields:
        raise ValueError("x0 is a Partition of a mesh, and no mesh is given: give this one, mesh=mesh")
    if mesh is not None and found.has_fields and found.place != mesh.place:
        raise ValueError(
            f"x0 is a Partition of a mesh with tensor={found.place.tensor_size}, and the one given has {mesh.sizes}; "
            "give the mesh of the Partition"
        )
    return found


def _matrix(A: Any, rows: int, unknowns: Unknowns | None) -> Any:
    """The matrix as `OwnRows` takes it."""
    if isinstance(A, tuple | list) and len(A) == 2 and all(map(callable, A)):
        if unknowns is None:
            raise ValueError(
                "A is a pair of functions, which do not tell the number of columns: give x0, such as numpy.zeros(n)"
            )
        return SimpleNamespace(matvec=A[0], rmatvec=A[1], shape=(rows, unknowns.given_size))
    if not (is_operator(A) or hasattr(A, "tocsr")):
        try:
            A = np.asarray(A)
        except (TypeError, ValueError):
            A = np.asarray(None)
        if A.dtype.kind not in "biufc":
            raise TypeError(
                "A must be an array, a sparse matrix, an operator with shape, matvec and rmatvec, or (matvec, rmatvec)"
            )
    if is_operator(A):
        check_shape(A)
    if getattr(getattr(A, "dtype", None), "kind", "f") == "c":
        raise TypeError("A is complex, and the unknowns are real numbers; give real and imaginary parts apart")
    shape = tuple(A.shape)
    if len(shape) != 2 or shape[0] != rows:
        raise ValueError(f"A has the shape {shape}, and b {rows} elements: give (rows, columns) with a row for each")
    if shape[1] == 0 and unknowns is None:
        raise ValueError(f"A has the shape {shape}, and no columns: give one for each unknown, at least one")
    if unknowns is not None:
        if unknowns.has_fields and not is_operator(A):
            raise TypeError(
                "x0 is a Partition, whose elements are on several ranks: A must be an operator, or (matvec, rmatvec)"
            )
        if shape[1] != unknowns.given_size:
            raise ValueError(f"A has {shape[1]} columns, but x0 has {unknowns.given_size} elements")
    return np.ascontiguousarray(A, np.float64) if isinstance(A, np.ndarray) else A


# The loop.


def _run(
    method: LinearMethod,
    limits: Tolerances,
    unknowns: Unknowns,
    world: Axis | OneRank,
    callback: Callback,
    files: IterationFiles | None,
    show: bool,
) -> int:
    """Iterate until a test of the method, the callback or a signal ends it; returns the reason.  Collective."""
    shows = show and world.rank == 0
    watch = Watch(world, callback)
    if shows:
        terminal.show(_HEAD)
    istop, stopped = reason_to_stop(method.progress, method.bnorm, limits), False
    with Interrupts(speaks=world.rank == 0) as interrupts:
        while istop is None:
            method.step()
            found = method.progress
            if found.itn == 1 and not method.fits and world.rank == 0:
                log.warn(_WRONG_ADJOINT)
            istop = reason_to_stop(found, method.bnorm, limits)
            if shows:
                terminal.show(
                    f"{found.itn:>9} {found.r1norm:>16.9e} {found.r2norm:>16.9e} {found.arnorm:>10.2e} "
                    f"{found.anorm:>10.2e} {found.acond:>10.2e}"
                )
            if files is not None:
                cost = 0.5 * found.r2norm * found.r2norm
                files.recorded(
                    found.itn,
                    loss=cost,
                    learning_rate=found.step_length,
                    gradient_norm=found.arnorm,
                    iteration=found.itn,
                    accepted_loss=cost,
                )
            stopped = on_any(world, interrupts.came)
            if (watch.reason_to_stop(partial(_intermediate, method, unknowns)) or stopped) and istop is None:
                istop = _STOPPED
            if files is not None and istop is None:
                files.iterated(found.itn, partial(_saved, method, unknowns))
    if files is not None:
        files.end(method.progress.itn, partial(_saved, method, unknowns), _MESSAGES[istop], stopped)
    if shows:
        terminal.show(_MESSAGES[istop])
    return istop


def _intermediate(method: LinearMethod, unknowns: Unknowns) -> OptimizeResult:
    return OptimizeResult(x=unknowns.like_x0(method.iterate().copy()), **_norms(method))


def _norms(method: LinearMethod) -> dict[str, Any]:
    """`itn` and the norms, as in the result."""
    return {name: value for name, value in vars(method.progress).items() if name in LinearResult._fields}


# What is saved: the vectors of the unknowns in the order of their specs, and that of the rows, rank after rank.


def _vectors_of(method: LinearMethod, unknowns: Unknowns, rows: int, mesh: Mesh) -> Vectors:
    """The vectors of a method in checkpoints.  Collective over the mesh."""
    from mpishard.inverse.iteration_files import Vectors
    from mpishard.layout.tensors import ParameterSpec, Piece

    *names, of_rows = method.vectors()
    specs = tuple(
        spec if name == "x" else replace(spec, name=f"{name} of {spec.name}")
        for name in names
        for spec in unknowns.specs
    )
    holding = unknowns.place.holding(specs)
    sharers = mesh.data if unknowns.has_fields else mesh.world
    counted = holding if sharers.rank == 0 else ()
    counts = mesh.world.allgather_object(rows)
    first = sum(counts[: mesh.rank])
    own = (Piece(of_rows, ((first, first + rows),), len(names) * unknowns.size),) if rows else ()
    return Vectors((*specs, ParameterSpec(of_rows, (sum(counts),))), (*holding, *own), (*counted, *own))


def _saved(method: LinearMethod, unknowns: Unknowns) -> Saved:
    *of_unknowns, of_rows = method.vectors().values()
    return method.numbers(), [*map(unknowns.arranged, of_unknowns), of_rows]


def _fill(method: LinearMethod, unknowns: Unknowns, flat: Array) -> None:
    """Fill the vectors of a method from what was saved."""
    *of_unknowns, of_rows = method.vectors().values()
    size = unknowns.size
    for number_of, vector in enumerate(of_unknowns):
        vector[...] = unknowns.as_given(flat[number_of * size : (number_of + 1) * size])
    of_rows[...] = flat[len(of_unknowns) * size :]
