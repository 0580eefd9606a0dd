"""Optimizers: an update rule, and a strategy that spreads its work over the data axis."""

from mpishard.optim.configuration import ShardingConfiguration
from mpishard.optim.optimizer import ShardedOptimizer
from mpishard.optim.rules import LAMB, SGD, Adagrad, Adam, AdamW, Lion, RMSprop, Rule
from mpishard.optim.strategies import DataParallel, ShardedGradients, ShardedState


class DDPOptimizer(ShardedOptimizer):
    """Distributed data parallel: every rank holds parameters, gradients and state; gradients are all-reduced."""

    strategy = DataParallel


class ZeRO1Optimizer(ShardedOptimizer):
    """ZeRO stage 1: each rank holds 1/N of the optimizer state and updates that part of the parameters.

    Sends what `DDPOptimizer` sends: a reduce-scatter of gradients and an all-gather of parameters.
    """

    strategy = ShardedState


class ZeRO2Optimizer(ShardedOptimizer):
    """ZeRO stage 2: gradients are sharded as well; besides its part a rank holds the bucket in the making.

    With several micro-batches a step, each of them is reduced: gradients travel once a micro-batch, not once a step.
    """

    strategy = ShardedGradients


__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "DDPOptimizer",
    "Lion",
    "RMSprop",
    "Rule",
    "ShardedOptimizer",
    "ShardingConfiguration",
    "ZeRO1Optimizer",
    "ZeRO2Optimizer",
]
