"""Inverse problems: a function and its gradient minimised with SciPy's conventions, on one process or on a mesh."""

from mpishard.inverse.minimization import minimize
from mpishard.inverse.result import OptimizeResult
from mpishard.inverse.reverse_communication import EvaluationRequest, ReverseCommunication

__all__ = ["EvaluationRequest", "OptimizeResult", "ReverseCommunication", "minimize"]
