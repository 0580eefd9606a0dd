"""The loop of a minimisation: evaluations until it ends, its callback, its table, and its files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpishard.comm.errors import on_any
from mpishard.inverse.finite_differences import FiniteDifferences
from mpishard.inverse.functions import Attempts, Callback, Functions, Watch
from mpishard.inverse.one_process import OneProcess
from mpishard.inverse.result import LoopOptions, MinimizationOutcome, OptimizeResult, Table
from mpishard.inverse.reverse_communication import EvaluationRequest, ReverseCommunication
from mpishard.inverse.run_arguments import RunArguments
from mpishard.inverse.unknowns import Unknowns, copy_of_point

if TYPE_CHECKING:
    from mpishard.inverse.corrections import Corrections
    from mpishard.inverse.inverse_hessian import InverseHessian
    from mpishard.inverse.mesh_run import MeshRanks
    from mpishard.inverse.run_files import RunFiles

Array = Any


def files_of(optimizer: ReverseCommunication, run: RunArguments, outer: Corrections | None = None) -> RunFiles | None:
    """The files of a minimisation on a mesh, from which it has resumed; None without a mesh. Collective."""
    if isinstance(optimizer.ranks, OneProcess):
        return None
    from mpishard.inverse.run_files import RunFiles

    return RunFiles(optimizer.ranks, run, outer)


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
    ranks = optimizer.ranks
    table = Table(shows=on_any(ranks.world, loop.disp) and ranks.world.rank == 0)
    watch = Watch(ranks.world, callback, loop.maxtime)
    iterates: list[Any] = []
    attempts = Attempts(ranks.together, loop.retries)

    def outcome(request: EvaluationRequest) -> tuple[float, Any, BaseException | None]:
        if differences is not None and request.direction is None:
            return differences(request.x)
        return _outcome(functions, attempts, request)

    def intermediate() -> OptimizeResult:
        progress, x = optimizer.progress, unknowns.point()  # the point is still that of the last request
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
                    iterates.append(unknowns.copy_of(unknowns.given))
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
    return MinimizationOutcome(result, optimizer.progress, optimizer.stop_reason, ranks)


def _inverse_hessian(
    ranks: OneProcess | MeshRanks, functions: Functions, attempts: Attempts, unknowns: Unknowns
) -> InverseHessian:
    """The inverse Hessian at the best iterate, which the unknowns are.  Collective."""
    from mpishard.inverse.inverse_hessian import InverseHessian
    from mpishard.minimizers.inverses import inverse_at_end

    mesh = None if isinstance(ranks, OneProcess) else ranks.mesh
    minimizer, gather, combined = ranks.minimizer, ranks.gather, ranks.combined_product
    x = unknowns.copy_of(unknowns.given) if minimizer.method.needs_products else None

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
