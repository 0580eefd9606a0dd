"""Training: a problem, the loop that solves it on all ranks, and the result.

Input: a problem, a bound optimizer, and options such as checkpoints and a record.
Output: a result on all ranks; parameters change in place.

Read ``problem`` and ``objective`` first, then ``run``, the loop, and ``step_runner``, the batch of a step;
``metrics``, ``checkpoints`` and ``saving`` last.
"""

from mpishard.data_parallel.results import OptimizationResult, TrainingState
from mpishard.training.objective import Scaling
from mpishard.training.problem import OptimizationProblem
from mpishard.training.run import Loop

__all__ = ["Loop", "OptimizationProblem", "OptimizationResult", "Scaling", "TrainingState"]
