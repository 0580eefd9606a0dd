"""A function to minimise by samples, and optimizers with a method for it."""

from __future__ import annotations

import numpy as np

import mpishard
from mpishard import OptimizationProblem, ShardingConfiguration
from mpishard.minimizers.lbfgs import LBFGS

SAMPLES, SIZE = 24, 37
INPUTS = np.random.default_rng(0).standard_normal((SAMPLES, SIZE))
TARGETS = INPUTS @ np.random.default_rng(1).standard_normal(SIZE)
METHOD = LBFGS(gtol=1e-9, ftol=0.0, history=5)
EVALUATIONS = 22


def problem(steps=EVALUATIONS, function=None, **options):
    """A sum of squares and of a function that bends, so that line searches take several evaluations."""

    def whole(parameters, samples, gradients):
        residual = INPUTS[samples] @ parameters - TARGETS[samples]
        bent = np.tanh(residual)
        gradients += INPUTS[samples].T @ (residual + 0.5 * (1 - bent * bent))
        return 0.5 * residual @ residual + 0.5 * bent.sum()

    options = {"batch_size": SAMPLES, "micro_batch_size": 4, "steps": steps} | options
    return OptimizationProblem(function or whole, np.full(SIZE, 2.0), SAMPLES, **options)


def optimizer_on(mesh, method=METHOD, **options):
    return mpishard.as_distributed(method, ShardingConfiguration(mesh, reproducible=True, **options))
