"""mpirun -n 2 python tests/helpers/scaled.py FOLDER

Least squares with a batch that goes with the number of workers, elastic, and by a plain loop on one rank.  The command
grows a run by one worker that is spawned; under Open MPI's ``--with-ft ulfm`` one of the first two is then shot.  It
saves half of the time.  It writes into the folder whether the run had the bits of the plain loop, and its workers by
step.  The tests of scaling use the rest.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpishard
from mpishard import AdamW, ElasticOptimizer, OptimizationProblem, ShardingConfiguration
from mpishard.comm.capabilities import heals_in_place
from mpishard.data.sampling import Sampler, micro_batches
from mpishard.elastic.membership import is_joining
from mpishard.reduction.tree_sum import tree_sum

SAMPLES, BATCH, MICRO, STEPS, SEED = 45, 16, 2, 12, 3
DATA = np.random.default_rng(0).standard_normal((SAMPLES, 300)).astype(np.float32)
TARGETS = DATA.sum(1)
SCHEDULE = mpishard.cosine(0.05, steps=STEPS, warmup=3)
POWERS = {"linear": 1.0, "square_root": 0.5}
LIMIT_S = 200.0


def loss(parameters, samples, gradients):
    residual = DATA[samples] @ parameters - TARGETS[samples]
    gradients += DATA[samples].T @ residual
    return 0.5 * float(residual @ residual)


def problem(function=loss, steps=STEPS):
    start = np.zeros(300, np.float32)
    return OptimizationProblem(function, start, SAMPLES, BATCH, micro_batch_size=MICRO, steps=steps, seed=SEED)


def configuration(mesh):
    return ShardingConfiguration(mesh, max_gradient_norm=0.5, minimum_parameter_group_size=50, reproducible=True)


def batches(sizes):
    """Samples in the order of the epochs, in batches of these sizes, cut short where an epoch ends."""
    epochs = Sampler(SAMPLES, SAMPLES, SEED)
    found, left, epoch = [], [], 0
    for size in sizes:
        if not left:
            epoch += 1
            left = epochs.batch(epoch).tolist()
        found.append(np.array(left[:size]))
        left = left[size:]
    return found


def expected(scaling, workers, first):
    """Batches and learning rates by step of a run; `workers`: how many there are in each step."""
    sizes = [BATCH * each // first for each in workers]
    growth = [min(size, SAMPLES) / BATCH for size in sizes]
    return batches(sizes), [SCHEDULE(step) * each ** POWERS[scaling] for step, each in enumerate(growth, 1)]


def plain(taken, rates):
    """Parameters and losses of a loop on one rank that takes these batches with these learning rates."""
    parameters, losses = np.zeros(300, np.float32), []
    with mpishard.Mesh(MPI.COMM_SELF) as mesh:
        optimizer = mpishard.DDPOptimizer(AdamW(lr=lambda step: rates[step - 1]), configuration(mesh))
        for batch in taken:
            gradients, terms = [], []
            for micro in micro_batches(batch, MICRO):
                gradients.append(np.zeros(300, np.float32))
                terms.append(loss(parameters, micro, gradients[-1]))
            losses.append(tree_sum(terms) / len(batch))
            optimizer.step(parameters, tree_sum(gradients), count=len(batch))
    return parameters.tobytes(), losses


def bits(result):
    return result.parameters.tobytes(), result.loss_history.tolist()


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    began, workers, grown = time.monotonic(), [], []
    victim = heals_in_place() and not is_joining() and MPI.COMM_WORLD.rank == 1

    def callback(state):
        workers.append(elastic.current_workers)
        if len(workers) == 2:
            elastic.resize(3)
        if grown or workers[-1] == 3:
            grown.append(state.step)
        if victim and len(grown) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.005)
        return mesh.rank == 0 and (len(grown) == 8 or time.monotonic() - began > LIMIT_S)

    with mpishard.Mesh() as mesh:
        elastic = ElasticOptimizer(
            mpishard.ZeRO1Optimizer(AdamW(lr=SCHEDULE), configuration(mesh)), max_workers=3, scaling="linear"
        )
        with mpishard.Checkpoints(folder / "checkpoints", mesh, every=0.5, asynchronous=True) as checkpoints:
            result = elastic.optimize(problem(steps=None), callback=callback, progress=False, checkpoints=checkpoints)
        if mesh.rank == 0:
            same = bits(result) == plain(*expected("linear", workers, first=2))
            (folder / "telling").write_text(f"{same} {' '.join(map(str, workers))}")
            (folder / "telling").rename(folder / "report")


if __name__ == "__main__":
    main()
