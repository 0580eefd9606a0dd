"""Training: a problem, the loop that solves it on all ranks, and the result."""

from mpishard.data_parallel.results import OptimizationResult, TrainingState
from mpishard.training.objective import Scaling
from mpishard.training.problem import OptimizationProblem
from mpishard.training.run import Loop

__all__ = ["Loop", "OptimizationProblem", "OptimizationResult", "Scaling", "TrainingState"]
