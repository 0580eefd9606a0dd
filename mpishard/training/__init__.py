"""Training: a problem, the loop that solves it on all ranks, and what came of it."""

from mpishard.data_parallel.problem import OptimizationResult, TrainingState
from mpishard.training.loop import Loop
from mpishard.training.problem import OptimizationProblem
from mpishard.training.scaling import Scaling

__all__ = ["Loop", "OptimizationProblem", "OptimizationResult", "Scaling", "TrainingState"]
