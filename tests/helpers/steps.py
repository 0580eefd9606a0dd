"""Gradients that are small whole numbers, and steps along them, for tests of optimizers."""

from __future__ import annotations

import numpy as np

from mpishard import DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer
from mpishard.layout.tensors import ParameterSpec

STRATEGIES = [DDPOptimizer, ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer]
SPECS = [ParameterSpec("a", (3, 5)), ParameterSpec("b", (0,)), ParameterSpec("c", (1,)), ParameterSpec("d", (2, 3, 4))]


def gradients(step, ranks, size, dtype=np.float32):
    """Small whole numbers for every rank: their sum over ranks is exact in any order."""
    return np.random.default_rng([step, ranks, size]).integers(-8, 9, (ranks, size)).astype(dtype)


def start(size, dtype=np.float32):
    return np.linspace(-1, 1, size).astype(dtype)


def train(optimizer, parameters, steps=3):
    axis = optimizer.axis
    for step in range(steps):
        optimizer.step(parameters, gradients(step, axis.size, len(parameters), parameters.dtype)[axis.rank].copy())
    return parameters


def write_gradients(parameters, flat):
    """What a backward pass does: last tensor first, announced one by one."""
    stop = parameters.size
    for piece in reversed(parameters.pieces):
        view, add = parameters.gradient(piece.name)
        value = flat[stop - piece.size : stop].reshape(piece.shape)
        view[...] = view + value if add else value
        parameters.mark_ready(piece.name)
        stop -= piece.size


def one_step(optimizer, parameters, value, **options):
    write_gradients(parameters, np.full(40, value, np.float32))
    optimizer.step(parameters, **options)
