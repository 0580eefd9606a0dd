"""Problems for the training loop: least squares, and the training of small GPTs."""

from __future__ import annotations

import numpy as np

from mpishard import OptimizationProblem, nn

DATA = np.random.default_rng(0).standard_normal((45, 6))
TARGETS = DATA @ np.arange(6.0)
TOKENS = np.random.default_rng(1).integers(0, 11, (45, 9))


def least_squares(parameters, samples, gradients):
    residual = DATA[samples] @ parameters - TARGETS[samples]
    gradients += DATA[samples].T @ residual
    return 0.5 * float(residual @ residual)


def problem(**options):
    given = {"function": least_squares, "start": np.zeros(6), "samples": 45, "batch_size": 10, "steps": 12}
    return OptimizationProblem(**(given | options))


def gpt():
    return nn.GPT(vocabulary_size=11, context_length=8, width=16, layers=2, heads=2, dtype=np.float64, seed=3)


def gpt_problem(**options):
    model = gpt()
    return OptimizationProblem.for_model(
        model,
        lambda samples: (TOKENS[samples, :-1], TOKENS[samples, 1:]),
        **({"samples": 45, "batch_size": 13, "steps": 50, "tokens_per_sample": 8} | options),
    )


def large_gpt_problem(mesh=None, micro_batch_size=None, **options):
    """Of a model that can be cut into four stages and over two, three or four tensor ranks."""
    model = nn.GPT(
        vocabulary_size=11,
        context_length=8,
        width=24,
        layers=4,
        heads=12,
        dtype=np.float64,
        seed=3,
        mesh=mesh,
        tied=True,
        **options,
    )
    return OptimizationProblem.for_model(
        model,
        lambda samples: (TOKENS[samples, :-1], TOKENS[samples, 1:]),
        samples=45,
        batch_size=13,
        micro_batch_size=micro_batch_size,
        steps=5,
        tokens_per_sample=8,
    )
