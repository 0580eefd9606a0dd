"""The stop tests that all methods share, after an iteration and after an evaluation."""

from __future__ import annotations

from mpishard.minimizers.method import Method
from mpishard.minimizers.minimizer import Progress

LARGEST_PRODUCT = 2.0**1000  # of which sums are known

# Reasons for which a method cannot continue, in words.
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
    """The test by which the iteration that has just ended converged: "gradient", "decrease" or "step"; empty if none.

    `value_before` is NaN at the start, where the gradient alone decides; `step_top` and `point_top` are the largest
    absolute elements of the step and the point.
    """
    if progress.projected_norm <= method.gtol:
        return "gradient"
    if value_before - progress.value <= method.ftol * max(abs(value_before), abs(progress.value), 1.0):
        return "decrease"
    if value_before == value_before and step_top <= method.xtol * max(point_top, 1.0):
        return "step"
    return ""


def exhausted(method: Method, progress: Progress) -> str:
    """The limit that a minimisation has reached, "iterations" or "evaluations"; empty if it may continue."""
    if progress.iterations >= method.maxiter:
        return "iterations"
    return "evaluations" if progress.evaluations >= method.maxfun else ""


def lifted(method: Method, progress: Progress, reason: str) -> bool:
    """Return True if the limit at which a minimisation ended is now farther away: options may change between two runs.

    Only limits on iterations and evaluations, and `gtol`, count.
    """
    if reason == "gradient":
        return progress.projected_norm > method.gtol
    if reason in ("iterations", "evaluations"):
        return not exhausted(method, progress)
    return False


def out_of_range(progress: Progress) -> str:
    """The reason to end where the square of the gradient is out of the range of floats: "range" at the start.

    After iterations "decrease", if nothing is left to gain, or "unbounded".
    """
    if progress.iterations and progress.gradient_norm < 1:
        return "decrease"
    return "unbounded" if progress.iterations and progress.value < 0 else "range"
