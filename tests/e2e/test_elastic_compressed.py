"""Deaths where ranks have parts of the state to themselves: what they had is lost, and the others are alike."""

from __future__ import annotations

import sys

import faults
import pytest

LAUNCH = faults.launcher()
pytestmark = [
    pytest.mark.skipif(LAUNCH is None, reason="deaths are healed in place under Open MPI only"),
]

SCRIPT = """
import os, signal, sys
import numpy as np
from mpishard import *
from mpishard.compression import Int8Compressor

make, step_of_death, victim, nodes, delay = sys.argv[1], *map(int, sys.argv[2:])
TARGETS = np.random.default_rng(0).standard_normal((32, 400))

def function(parameters, samples, gradients):
    gradients += len(samples) * parameters - TARGETS[samples].sum(0)
    return 0.5 * float(((parameters - TARGETS[samples]) ** 2).sum())

with Mesh() as mesh:
    config = ShardingConfiguration(mesh, gradient_compressor=Int8Compressor(16), hierarchical=nodes or False)
    outer = SGD(lr=0.7, momentum=0.9, nesterov=True)
    if make == "LocalSGDOptimizer":
        optimizer = LocalSGDOptimizer(SGD(lr=0.05), config, 4, outer, delay=delay)
    else:
        optimizer = globals()[make](SGD(lr=0.05), config)
    elastic, own = ElasticOptimizer(optimizer, respawn=False), mesh.rank

    def callback(state):
        if (state.step, own) == (step_of_death, victim):
            os.kill(os.getpid(), signal.SIGKILL)

    problem = OptimizationProblem(function, np.zeros(400), samples=32, batch_size=16, steps=80)
    result = elastic.optimize(problem, callback=callback, progress=False)
    copies = mesh.world.comm.allgather(result.parameters.tobytes())
    if mesh.rank == 0:
        left = np.abs(result.parameters - TARGETS.mean(0)).max() / np.abs(TARGETS.mean(0)).max()
        print(len(copies), "ranks", len(set(copies)), "copies", result.steps, "steps", "near" if left < 0.5 else left)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("LocalSGDOptimizer", 6, 2, 0, 0),
        ("LocalSGDOptimizer", 7, 0, 2, 0),
        ("LocalSGDOptimizer", 10, 1, 0, 2),
        ("LocalSGDOptimizer", 80, 0, 0, 0),
        ("DDPOptimizer", 5, 2, 0, 0),
        ("ZeRO2Optimizer", 80, 1, 2, 0),
    ],
    ids=str,
)
def test_a_rank_dies(arguments):
    words = [*LAUNCH, "-n", "4", sys.executable, "-c", SCRIPT, *map(str, arguments)]
    output, how = faults.execute(words, 60)
    assert how == "in order" and "3 ranks 1 copies 80 steps near" in output, output
