"""mpirun -n 4 python examples/train_elastic.py [--seed 0]

Train a small GPT while its workers come and go: the run shrinks, grows, spawns a worker that was not there, and, where
MPI reports a death to the survivors (Open MPI's mpirun --with-ft ulfm), one is shot and a spare takes its place. Then
train it once more on one rank alone: both runs have the same bits. Writes a plot of the loss and of the workers.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from itertools import groupby
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpishard
from mpishard import nn
from mpishard.comm.capabilities import heals_in_place
from mpishard.data.text import Windows, standard_library_text, windows

CONTEXT = 32
# Numbers of workers, one after the other, and for how many steps each stays once it is reached; after the last one a
# worker is shot.
PLAN, STAY = (4, 2, 4, 5, 3), 20
MOST_SECONDS = 90.0


def task(model: nn.GPT, text: Windows, seed: int, steps: int | None = None) -> mpishard.OptimizationProblem:
    return mpishard.OptimizationProblem.for_model(
        model,
        text.batch,
        samples=len(text),
        batch_size=32,
        micro_batch_size=4,
        steps=steps,
        seconds=MOST_SECONDS if steps is None else None,
        tokens_per_sample=CONTEXT,
        seed=seed,
    )


def make(mesh: mpishard.Mesh, seed: int) -> tuple[nn.GPT, mpishard.ZeRO1Optimizer]:
    model = nn.GPT(vocabulary_size=256, context_length=CONTEXT, width=32, layers=1, heads=2, mesh=mesh, seed=seed)
    config = mpishard.ShardingConfiguration(mesh, reproducible=True, max_gradient_norm=1.0)
    return model, mpishard.ZeRO1Optimizer(mpishard.AdamW(lr=1e-2), config)


def plot(path: Path, losses: np.ndarray, workers: list[int], shot: int | None) -> None:
    from matplotlib.figure import Figure

    steps = np.arange(1, len(losses) + 1)
    figure = Figure(figsize=(7, 3), layout="constrained")
    left = figure.subplots()
    left.plot(steps, losses, color="C0")
    left.set(xlabel="step", ylim=(0, None))
    left.set_ylabel("loss (nats per byte)", color="C0")
    right = left.twinx()
    right.step(steps, workers, color="C1", where="mid")
    right.set(ylim=(0, max(workers) + 1))
    right.set_ylabel("workers", color="C1")
    if shot is not None:
        left.axvline(shot, color="C3", linestyle=":")
        left.annotate("rank 0 is shot", (shot, 0.3), xytext=(-4, 0), textcoords="offset points", ha="right", color="C3")
    figure.savefig(path, dpi=90)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of initial values and sample order (default 0)")
    parser.add_argument("--output", type=Path, default=Path("train-elastic-output"), help="folder for the plot")
    options = parser.parse_args()
    text, _ = windows(standard_library_text(), CONTEXT).split(0.05)
    with mpishard.Mesh() as mesh:
        model, optimizer = make(mesh, options.seed)
        elastic = mpishard.ElasticOptimizer(optimizer, max_workers=5)
        # All run the same lines; rank 0 gives the orders.  It and rank 1, its successor, take part in every step.
        plan = [*PLAN, PLAN[-1]] if heals_in_place() else [*PLAN]
        stage, stayed, asked, shot = 0, 0, elastic.current_workers, None
        workers: list[int] = []

        def look(state: mpishard.TrainingState) -> bool:
            nonlocal stage, stayed, asked, shot
            now = elastic.current_workers
            workers.append(now)
            stayed += now == plan[stage]
            if stayed == STAY:
                stage, stayed = stage + 1, 0
                if stage == len(plan):
                    return mesh.rank == 0
                if stage == len(PLAN):
                    shot = state.step
                    if mesh.rank == 0:
                        print(f"step {shot}: {now} workers, this process, rank 0, is shot", flush=True)
                        os.kill(os.getpid(), signal.SIGKILL)
            if asked != plan[stage]:
                asked = plan[stage]
                if mesh.rank == 0:
                    print(f"step {state.step}: {now} workers, {asked} wanted", flush=True)
                    elastic.resize(asked)
            return False

        result = elastic.optimize(task(model, text, options.seed), callback=look)
        passed = False
        if mesh.rank == 0:
            with mpishard.Mesh(MPI.COMM_SELF) as alone:
                other, single = make(alone, options.seed)
                expected = single.optimize(task(other, text, options.seed, result.steps), progress=False)
            same = np.array_equal(result.loss_history, expected.loss_history)
            same = same and np.array_equal(model.parameters.flat, other.parameters.flat)
            fell = result.loss_history[-1] < 0.8 * result.loss_history[0]
            passed = same and fell
            options.output.mkdir(parents=True, exist_ok=True)
            plot(options.output / "elastic.png", result.loss_history, workers, shot)
            runs = [f"{count} for {len(list(steps))} steps" for count, steps in groupby(workers)]
            print(f"workers: {', '.join(runs)}")
            print(f"loss: {result.loss_history[0]:.2f} -> {result.loss_history[-1]:.2f} nats per byte")
            verdict = "PASS" if passed else "FAIL"
            print(f"{verdict}: the same bits as on one rank: {same}; the loss fell: {fell}", flush=True)
        passed = mesh.world.allgather_object(passed)[0]
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
