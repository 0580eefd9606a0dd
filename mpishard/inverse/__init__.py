"""Inverse problems: functions and sums of squares minimised with SciPy's conventions, on one process or on a mesh.

Input: the user's function, residuals or operator, a start, bounds, and perhaps a mesh.
Output: a result with the fields of SciPy, the same on any number of ranks.

Read ``minimization`` first, and ``loop``, then ``reverse_communication``, the minimisation in it, ``one_process`` and
``mesh_run``, its ranks, ``run_files``, their checkpoints, and ``functions``, with ``trees``, what users give;
``result`` is what they get, and the options by SciPy's names; ``run_arguments`` are the ranks and files of a call;
``inverse_hessian`` is a part of the result; ``finite_differences`` are for functions without a gradient.  Beside it:
``sum_of_squares``, with ``least_squares_settings``, and ``residuals``, least squares, ``linear_problems``, linear ones,
``operators``, the matrices of both, whose rows are on ranks, ``iteration_files``, their checkpoints, and
``fit_covariance``, the errors of a fit; ``laplace_approximation``, with ``priors``, ``grid_prior`` and ``posterior``;
``elastic_minimization``; ``multipliers``, ``augmented_function`` and ``scipy_constraints``, constraints; ``ensemble``
and ``parameter_choice``, many runs; ``regularization``, terms, and ``l1``, ``total_variation`` and ``group_norms``,
those without a gradient, ``nonsmooth``, what these share, ``added_terms``, functions with terms, and ``time_steps``, a
part of such functions; ``gradient_check``, with ``taylor``, and ``adjoint_check``, tests of them; and ``pictures``.

A name's module is imported when it is first asked for: without a mesh `minimize`, `least_squares` and `lsqr` do without
MPI.
"""

from typing import TYPE_CHECKING

from mpishard.lazy import names_when_used

if TYPE_CHECKING:
    from mpishard.inverse.added_terms import regularized
    from mpishard.inverse.adjoint_check import AdjointCheck, check_adjoint
    from mpishard.inverse.ensemble import map_runs
    from mpishard.inverse.fit_covariance import Covariance, covariance
    from mpishard.inverse.functions import EvaluationFailed
    from mpishard.inverse.gradient_check import GradientCheck, check_gradient
    from mpishard.inverse.grid_prior import BiLaplacianPrior
    from mpishard.inverse.group_norms import GroupL1
    from mpishard.inverse.inverse_hessian import InverseHessian
    from mpishard.inverse.l1 import L1
    from mpishard.inverse.laplace_approximation import laplace
    from mpishard.inverse.linear_problems import LinearResult, cgls, lsqr
    from mpishard.inverse.minimization import minimize
    from mpishard.inverse.multipliers import augmented_lagrangian
    from mpishard.inverse.parameter_choice import LCurve, l_curve
    from mpishard.inverse.posterior import LaplacePosterior
    from mpishard.inverse.priors import DiagonalPrior, OperatorPrior, Prior
    from mpishard.inverse.regularization import SmoothedTotalVariation, Tikhonov
    from mpishard.inverse.result import OptimizeResult
    from mpishard.inverse.reverse_communication import EvaluationRequest, ReverseCommunication
    from mpishard.inverse.sum_of_squares import least_squares
    from mpishard.inverse.time_steps import backward_in_time
    from mpishard.inverse.total_variation import TotalVariation

__all__ = [
    "L1",
    "AdjointCheck",
    "BiLaplacianPrior",
    "Covariance",
    "DiagonalPrior",
    "EvaluationFailed",
    "EvaluationRequest",
    "GradientCheck",
    "GroupL1",
    "InverseHessian",
    "LCurve",
    "LaplacePosterior",
    "LinearResult",
    "OperatorPrior",
    "OptimizeResult",
    "Prior",
    "ReverseCommunication",
    "SmoothedTotalVariation",
    "Tikhonov",
    "TotalVariation",
    "augmented_lagrangian",
    "backward_in_time",
    "cgls",
    "check_adjoint",
    "check_gradient",
    "covariance",
    "l_curve",
    "laplace",
    "least_squares",
    "lsqr",
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
            "grid_prior": "BiLaplacianPrior",
            "group_norms": "GroupL1",
            "adjoint_check": "AdjointCheck check_adjoint",
            "gradient_check": "GradientCheck check_gradient",
            "sum_of_squares": "least_squares",
            "inverse_hessian": "InverseHessian",
            "l1": "L1",
            "linear_problems": "LinearResult cgls lsqr",
            "minimization": "minimize",
            "laplace_approximation": "laplace",
            "posterior": "LaplacePosterior",
            "priors": "DiagonalPrior OperatorPrior Prior",
            "parameter_choice": "LCurve l_curve",
            "added_terms": "regularized",
            "regularization": "SmoothedTotalVariation Tikhonov",
            "result": "OptimizeResult",
            "reverse_communication": "EvaluationRequest ReverseCommunication",
            "time_steps": "backward_in_time",
            "total_variation": "TotalVariation",
        },
    )


def __dir__() -> list[str]:
    return list(__all__)
