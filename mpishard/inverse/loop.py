"""The loop of a minimisation: evaluations until it ends, its callback, its table, and its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mpishard.arguments import integer, shown
from mpishard.inverse.finite_differences import FiniteDifferences
from mpishard.inverse.functions import Attempts, Callback, Functions, Watch, on_any
from mpishard.inverse.result import LoopOptions, MinimizationOutcome, OptimizeResult, Table
from mpishard.inverse.reverse_communication import EvaluationRequest, OneProcess, ReverseCommunication
from mpishard.inverse.unknowns import Unknowns, copy_of_point

if TYPE_CHECKING:
    from mpishard.checkpoint import Checkpoints
    from mpishard.inverse.inverse_hessian import InverseHessian
    from mpishard.inverse.mesh_run import MeshRanks, OuterState, RunFiles
    from mpishard.record import RunRecord

Array = Any
_ELASTIC_OPTIONS = "min_workers max_workers folder discover failure_timeout respawn rebuild audit".split()


class ElasticArguments(NamedTuple):
    """The further arguments of an elastic run; `options` are those of `ElasticOptimizer`."""

    options: dict[str, Any]
    samples: int | None


def elastic_options(
    elastic: Any, samples: Any, reduction: Any, mesh: Any, unknowns: Unknowns
) -> ElasticArguments | None:
    """Check the arguments of `minimize` that make a run elastic; None for a run that is not.

    Raises TypeError or ValueError if arguments are invalid or do not fit together.
    """
    if not isinstance(elastic, bool | Mapping):
        raise TypeError(f"elastic={shown(elastic)} must be True, or a dictionary of options of ElasticOptimizer")
    if elastic is False:
        if samples is not None:
            raise ValueError(
                "samples= deals the samples out to ranks that come and go, and needs elastic=True; on ranks that stay, "
                "let fun return the part of its rank, to minimize with reduction='sum'"
            )
        return None
    options = {} if elastic is True else dict(elastic)
    unknown = [name for name in options if name not in _ELASTIC_OPTIONS]
    if unknown:
        raise ValueError(f"elastic= has no option {unknown[0]!r}; its options are {', '.join(_ELASTIC_OPTIONS)}")
    if mesh is None:
        raise ValueError("elastic= is for ranks that come and go; give mesh=mpishard.Mesh()")
    if reduction is not None and not (unknowns.has_fields and reduction == "sum" and samples is not None):
        more = ", or with a Partition as x0 both" * (reduction == "sum")
        raise ValueError(
            f"reduction={shown(reduction)} is for ranks that stay, each with its own part; with elastic= give "
            f"samples=N and fun(x, samples){more}, and the samples of a rank that dies go to the others"
        )
    return ElasticArguments(options, None if samples is None else integer("samples", samples, least=1))


def files_given(mesh: Any, checkpoints: Any, resume: Any, record: Any) -> dict[str, Any]:
    """The files of a run that a rank gives, for `opening`; TypeError or ValueError if they are unfit."""
    if mesh is not None:
        from mpishard.inverse.mesh_run import check_files

        check_files(checkpoints, resume, record, mesh)
    elif checkpoints is not None or resume or record is not None:
        raise ValueError("checkpoints, resume and record are for a mesh; give mesh=mpishard.Mesh()")
    return {"checkpoints": checkpoints is not None, "resume": resume, "record": record is not None}


def files_of(
    optimizer: ReverseCommunication,
    checkpoints: Checkpoints | None,
    resume: bool,
    record: RunRecord | None,
    outer: OuterState | None = None,
) -> RunFiles | None:
    """The files of a minimisation on a mesh, from which it has resumed; None without a mesh. Collective."""
    if isinstance(optimizer.run, OneProcess):
        return None
    from mpishard.inverse.mesh_run import RunFiles

    return RunFiles(optimizer.run, checkpoints, resume, record, outer)


def run_loop(
    optimizer: ReverseCommunication,
    functions: Functions,
    unknowns: Unknowns,
    callback: Callback,
    loop: LoopOptions,
    checkpoints: Checkpoints | None = None,
    resume: bool = False,
    record: RunRecord | None = None,
    differences: FiniteDifferences | None = None,
) -> MinimizationOutcome:
    """`evaluate_until_end` with files of its own, which end with it."""
    files = files_of(optimizer, checkpoints, resume, record)
    ended = evaluate_until_end(optimizer, functions, unknowns, callback, loop, files, differences)
    if files is not None:
        files.end(ended.reason)
        optimizer.gather_result()  # the last checkpoint has the next point
    return ended


def evaluate_until_end(
    optimizer: ReverseCommunication,
    functions: Functions,
    unknowns: Unknowns,
    callback: Callback,
    loop: LoopOptions,
    files: RunFiles | None,
    differences: FiniteDifferences | None = None,
) -> MinimizationOutcome:
    """Minimise by an optimizer that has begun, until it, the callback, the time or a signal ends the loop.

    Collective over its mesh. `differences` give gradients in place of the functions.  The caller ends the files.
    """
    ranks = optimizer.run
    table = Table(shown=on_any(ranks.world, loop.disp) and ranks.world.rank == 0)
    watch = Watch(ranks.world, callback, loop.maxtime)
    iterates: list[Any] = []
    attempts = Attempts(ranks.together, loop.retries)

    def outcome(request: EvaluationRequest) -> tuple[float, Any, BaseException | None]:
        if differences is not None and request.direction is None:
            return differences(request.x)
        return _outcome(functions, attempts, request)

    def intermediate() -> OptimizeResult:
        progress, x = optimizer.progress, unknowns.shown_to_user()  # the point is still that of the last request
        return OptimizeResult(x=x, fun=progress.value, nit=progress.iterations, nfev=progress.evaluations)

    with ranks.watching():
        if files is not None and files.needs_check:
            best = EvaluationRequest(optimizer.gather_result().x)
            files.check_function(*outcome(best))
        while (request := optimizer.ask()) is not None:
            optimizer.tell_outcome(*outcome(request))
            progress = optimizer.progress
            if progress.accepted or (request.direction is None and progress.evaluations == 1):
                table.row(progress)
                if loop.return_all:  # the unknowns still are the point of the last request
                    iterates.append(unknowns.copy_of(unknowns.shown))
            reason = watch.reason_to_stop(intermediate) if progress.accepted else ""
            reason = reason or ("signal" if ranks.interrupted else "")
            if reason and not optimizer.has_ended:
                optimizer.stop(reason)
            if files is not None:
                files.evaluated(ended=optimizer.has_ended)
            del request  # the next point may have the memory of this one
    result = optimizer.gather_result()
    if loop.return_all:
        result["allvecs"] = iterates
    if loop.hess_inv:
        result["hess_inv"] = _inverse_hessian(ranks, functions, attempts, unknowns)
    table.end(result.message)
    return MinimizationOutcome(result, optimizer.progress, optimizer.stop_reason)


def _inverse_hessian(
    ranks: OneProcess | MeshRanks, functions: Functions, attempts: Attempts, unknowns: Unknowns
) -> InverseHessian:
    """The inverse Hessian at the best iterate, which the unknowns are.  Collective."""
    from mpishard.inverse.inverse_hessian import InverseHessian
    from mpishard.minimizers.inverses import inverse_at_end

    mesh = None if isinstance(ranks, OneProcess) else ranks.mesh
    minimizer, gather, combined = ranks.minimizer, ranks.gather, ranks.combined_product
    x = unknowns.copy_of(unknowns.shown) if minimizer.method.needs_products else None

    def product(direction: Array) -> Array:
        along = unknowns.like_x0(gather(direction).copy())
        _, found, problem = _outcome(functions, attempts, EvaluationRequest(copy_of_point(x), along))
        return combined(found, problem)

    return InverseHessian(inverse_at_end(minimizer, product), unknowns, ranks.own, gather, mesh)


def _outcome(
    functions: Functions, attempts: Attempts, request: EvaluationRequest
) -> tuple[float, Any, BaseException | None]:
    """The value and the vector that are wanted, or the error of the user's function, of which all ranks learn."""

    def call() -> tuple[float, Any]:
        # A call that fails may have changed what it was given.
        given: Callable[[Any], Any] = copy_of_point if attempts.retries else lambda each: each
        if request.direction is None:
            return functions.value_and_gradient(given(request.x))
        return 0.0, functions.product(given(request.x), given(request.direction))

    value, vector = 0.0, None
    attempt = attempts(call)
    if attempt.problem is None:
        value, vector = attempt.found
    return value, vector, attempt.problem
