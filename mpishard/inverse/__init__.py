"""Inverse problems: a function and its gradient minimised with SciPy's conventions, on one process or on a mesh."""

from mpishard.inverse.adjoint_check import AdjointCheck, check_adjoint
from mpishard.inverse.gradient_check import GradientCheck, check_gradient
from mpishard.inverse.minimization import minimize
from mpishard.inverse.result import OptimizeResult
from mpishard.inverse.reverse_communication import EvaluationRequest, ReverseCommunication

__all__ = [
    "AdjointCheck",
    "EvaluationRequest",
    "GradientCheck",
    "OptimizeResult",
    "ReverseCommunication",
    "check_adjoint",
    "check_gradient",
    "minimize",
]
