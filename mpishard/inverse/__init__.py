"""Inverse problems: functions and sums of squares minimised with SciPy's conventions, on one process or on a mesh.

Input: the user's function, residuals or operator, a start, bounds, and perhaps a mesh.
Output: a result with the fields of SciPy, the same on any number of ranks.

Read ``minimization`` first, and ``loop``, then ``reverse_communication``, the minimisation in it, ``mesh_run``, the
ranks of a mesh, and ``functions``, with ``trees``, what users give; ``result`` is what they get, and the options by
SciPy's names; ``finite_differences`` are for functions without a gradient.  Beside it: ``sum_of_squares`` and
``residuals``, least squares, and ``fit_covariance``, the errors of a fit; ``elastic_minimization``; ``multipliers``,
``augmented_function`` and ``scipy_constraints``, constraints; ``ensemble`` and ``parameter_choice``, many runs;
``regularization`` and ``time_steps``, parts of users' functions, ``gradient_check``, with ``taylor``, and
``adjoint_check``, which test these, and ``pictures``.

A name's module is imported when it is first asked for: `minimize` and `least_squares` without a mesh do without MPI.
"""

from typing import TYPE_CHECKING

from mpishard.lazy import names_when_used

if TYPE_CHECKING:
    from mpishard.inverse.adjoint_check import AdjointCheck, check_adjoint
    from mpishard.inverse.ensemble import map_runs
    from mpishard.inverse.fit_covariance import Covariance, covariance
    from mpishard.inverse.functions import EvaluationFailed
    from mpishard.inverse.gradient_check import GradientCheck, check_gradient
    from mpishard.inverse.minimization import minimize
    from mpishard.inverse.multipliers import augmented_lagrangian
    from mpishard.inverse.parameter_choice import LCurve, l_curve
    from mpishard.inverse.regularization import SmoothedTotalVariation, Tikhonov, regularized
    from mpishard.inverse.result import OptimizeResult
    from mpishard.inverse.reverse_communication import EvaluationRequest, ReverseCommunication
    from mpishard.inverse.sum_of_squares import least_squares
    from mpishard.inverse.time_steps import backward_in_time

__all__ = [
    "AdjointCheck",
    "Covariance",
    "EvaluationFailed",
    "EvaluationRequest",
    "GradientCheck",
    "LCurve",
    "OptimizeResult",
    "ReverseCommunication",
    "SmoothedTotalVariation",
    "Tikhonov",
    "augmented_lagrangian",
    "backward_in_time",
    "check_adjoint",
    "check_gradient",
    "covariance",
    "l_curve",
    "least_squares",
    "map_runs",
    "minimize",
    "regularized",
]

if not TYPE_CHECKING:  # a type checker has the names from above
    __getattr__ = names_when_used(
        __name__,
        {
            "multipliers": "augmented_lagrangian",
            "fit_covariance": "Covariance covariance",
            "ensemble": "map_runs",
            "functions": "EvaluationFailed",
            "adjoint_check": "AdjointCheck check_adjoint",
            "gradient_check": "GradientCheck check_gradient",
            "sum_of_squares": "least_squares",
            "minimization": "minimize",
            "parameter_choice": "LCurve l_curve",
            "regularization": "SmoothedTotalVariation Tikhonov regularized",
            "result": "OptimizeResult",
            "reverse_communication": "EvaluationRequest ReverseCommunication",
            "time_steps": "backward_in_time",
        },
    )


def __dir__() -> list[str]:
    return list(__all__)
