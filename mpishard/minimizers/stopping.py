"""When a minimisation ends: the tests that all methods share, after an iteration and after an evaluation."""

from __future__ import annotations

from mpishard.minimizers.method import Method
from mpishard.minimizers.minimizer import Progress

LARGEST_PRODUCT = 2.0**1000  # of which sums are known

# Reasons for which a method cannot go on, in words.
FAILURES = {
    "line search": "the line search found no lower value along a descent direction, so that the gradient does not fit "
    "the function to rounding; mpishard.check_gradient compares them",
    "unbounded": "the value fell, and falls on as if it had no lower limit",
    "range": "the square of the gradient is too small or too large for a float64; scale the function",
    "not finite": "the value, the gradient or a Hessian product is NaN or infinite, also after shorter steps",
}


def converged(
    method: Method, progress: Progress, value_before: float, step_top: float = 1.0, point_top: float = 0.0
) -> str:
    """Why a minimisation has converged with the iteration that has just ended; empty if it has not.

    Parameters
    ----------
    method : Method
        With the tolerances.
    progress : Progress
        After the iteration.
    value_before : float
        Before the iteration; NaN at the start, where the gradient alone decides.
    step_top, point_top : float
        Largest absolute element of the iteration's step, and of the point.

    Returns
    -------
    str
        ``"gradient"``, ``"decrease"``, ``"step"`` or nothing.
    """
    if progress.projected_norm <= method.gtol:
        return "gradient"
    if value_before - progress.value <= method.ftol * max(abs(value_before), abs(progress.value), 1.0):
        return "decrease"
    if value_before == value_before and step_top <= method.xtol * max(point_top, 1.0):
        return "step"
    return ""


def exhausted(method: Method, progress: Progress) -> str:
    """Why a minimisation may go on no longer: ``"iterations"``, ``"evaluations"`` or nothing.

    Parameters
    ----------
    method : Method
        With the limits.
    progress : Progress
        After an evaluation.

    Returns
    -------
    str
        Empty if it may.
    """
    if progress.iterations >= method.maxiter:
        return "iterations"
    return "evaluations" if progress.evaluations >= method.maxfun else ""


def lifted(method: Method, progress: Progress, reason: str) -> bool:
    """Whether the limit at which a minimisation has ended is now farther away: options may change between two runs.

    Parameters
    ----------
    method : Method
        With the limits of now.
    progress : Progress
        At the end.
    reason : str
        Why it has ended; empty if it has not.

    Returns
    -------
    bool
        True only for limits on iterations and evaluations, and for `gtol`.
    """
    if reason == "gradient":
        return progress.projected_norm > method.gtol
    if reason in ("iterations", "evaluations"):
        return not exhausted(method, progress)
    return False


def out_of_range(progress: Progress) -> str:
    """Why a minimisation ends whose gradient is so small or so large that its square is no number.

    Parameters
    ----------
    progress : Progress
        At the end.

    Returns
    -------
    str
        ``"range"`` at the start; after iterations ``"decrease"``, if there is nothing more to gain, or ``"unbounded"``.
    """
    if progress.iterations and progress.gradient_norm < 1:
        return "decrease"
    return "unbounded" if progress.iterations and progress.value < 0 else "range"
