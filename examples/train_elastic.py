"""mpirun -n 4 python examples/train_elastic.py [--seed 0]

Train a small GPT while its workers come and go: the run shrinks, grows, spawns workers that were not there, and, where
MPI tells survivors of a death (Open MPI's mpirun --with-ft ulfm), one is shot. Then train it once more on one rank
alone: both runs have the same bits. Writes a plot of the loss and of the number of workers.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpishard
from mpishard import nn
from mpishard.data.text import Windows, standard_library_text, windows
from mpishard.elastic.crew import heals_in_place, is_newcomer

STEPS, CONTEXT = 120, 32
# Workers wanted after a step.
PLAN = {20: 2, 40: 4, 60: 5, 80: 3}
SHOT_AFTER = 100


def task(model: nn.GPT, text: Windows, seed: int) -> mpishard.OptimizationProblem:
    return mpishard.OptimizationProblem.for_model(
        model,
        text.batch,
        samples=len(text),
        batch_size=32,
        micro_batch_size=4,
        steps=STEPS,
        tokens_per_sample=CONTEXT,
        seed=seed,
    )


def make(mesh: mpishard.Mesh, seed: int) -> tuple[nn.GPT, mpishard.ZeRO1Optimizer]:
    model = nn.GPT(256, CONTEXT, width=32, layers=1, heads=2, mesh=mesh, seed=seed)
    config = mpishard.ShardingConfiguration(mesh, reproducible=True, max_gradient_norm=1.0)
    return model, mpishard.ZeRO1Optimizer(mpishard.AdamW(lr=1e-2), config)


def plot(path: Path, losses: np.ndarray, workers: list[int]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    axis.plot(np.arange(1, len(losses) + 1), losses)
    axis.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    right = axis.twinx()
    right.step(np.arange(len(losses) - len(workers) + 1, len(losses) + 1), workers, color="C1", where="mid")
    right.set(ylabel="workers", ylim=(0, max(workers) + 1))
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of initial values and sample order (default 0)")
    parser.add_argument("--output", type=Path, default=Path("train-elastic-output"), help="folder for the plot")
    options = parser.parse_args()
    text, _ = windows(standard_library_text(), CONTEXT).split(0.05)
    with mpishard.Mesh() as mesh:
        model, optimizer = make(mesh, options.seed)
        elastic = mpishard.ElasticOptimizer(optimizer, max_workers=5)
        # A newcomer runs the same lines; it was not there for the steps before it came, and gives no orders.
        first, workers = mesh.rank == 0 and not is_newcomer(), []

        def look(state: mpishard.TrainingState) -> None:
            workers.append(elastic.current_workers)
            if first and state.step in PLAN:
                print(f"step {state.step}: {elastic.current_workers} workers, {PLAN[state.step]} wanted", flush=True)
                elastic.resize(PLAN[state.step])
            if first and state.step == SHOT_AFTER and heals_in_place():
                print(f"step {state.step}: this process, rank 0, is shot", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        result = elastic.optimize(task(model, text, options.seed), callback=look)
        passed = False
        if mesh.rank == 0:
            with mpishard.Mesh(MPI.COMM_SELF) as alone:
                other, single = make(alone, options.seed)
                expected = single.optimize(task(other, text, options.seed), progress=False)
            same = np.array_equal(result.loss_history, expected.loss_history)
            same = same and np.array_equal(model.parameters.flat, other.parameters.flat)
            fell = result.loss_history[-1] < 0.8 * result.loss_history[0]
            passed = same and fell
            options.output.mkdir(parents=True, exist_ok=True)
            plot(options.output / "elastic.png", result.loss_history, workers)
            print(f"workers: {' '.join(map(str, workers))}")
            print(f"loss: {result.loss_history[0]:.2f} -> {result.loss_history[-1]:.2f} nats per byte")
            verdict = "PASS" if passed else "FAIL"
            print(f"{verdict}: the same bits as on one rank: {same}; the loss fell: {fell}", flush=True)
        passed = mesh.world.exchange(passed)[0]
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
