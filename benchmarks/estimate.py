"""Predicted against measured time of a training step, by layout, on 2, 4 and 8 ranks.

    python benchmarks/estimate.py [--ranks N ...] [--steps N] [--repeats N] [--small]

A GPT of 4 layers, width 256, 8 heads, vocabulary 256, sequences of 256 tokens, 16 of them a step, float32, AdamW; with
--small that of examples/train_gpt.py (2 layers, width 128, 4 heads, sequences of 64 tokens, 64 of them), where what
Python needs for each call is no longer small.  Each run measures the machine first, as `mpishard bench` does, and then
the steps of each layout, so that both see the same load from others.  Ratios are predicted to measured, medians over
the repeats with their range; a time is the median over the steps, each that of its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import children
from slow_link import blas

VOCABULARY = 256
# Layers, width, heads, tokens of a sequence, sequences a step.
LARGE, SMALL = (4, 256, 8, 256, 16), (2, 128, 4, 64, 64)
WARM_UP = 3
TIME_LIMIT = 540
BUCKET = 2**16
# Sizes of the axes data, tensor and pipeline, and the ZeRO stage.
LAYOUTS = {
    1: [(1, 1, 1, 0)],
    2: [(2, 1, 1, 0), (2, 1, 1, 1), (2, 1, 1, 3), (1, 2, 1, 0), (1, 1, 2, 0)],
    4: [(4, 1, 1, 0), (4, 1, 1, 3), (2, 2, 1, 0), (1, 4, 1, 0), (2, 1, 2, 0), (1, 2, 2, 0)],
    8: [(8, 1, 1, 0), (8, 1, 1, 3), (4, 2, 1, 0), (4, 1, 2, 0), (2, 2, 2, 0), (2, 2, 2, 1)],
}


def measured(steps: int, small: bool) -> None:
    """One rank of all layouts; the first one prints the result as a line of JSON."""
    import numpy as np
    from mpi4py import MPI

    import mpishard
    from mpishard.estimate import estimate, measure

    layers, width, heads, length, sequences = SMALL if small else LARGE
    ranks = MPI.COMM_WORLD.size
    with mpishard.Mesh() as mesh:
        profile = measure(mesh)
    found = []
    for data, tensor, pipeline, zero_stage in LAYOUTS[ranks]:
        # A pipeline of few layers: two micro-batches a stage leave products of a sensible size.
        options: dict[str, Any] = {"microbatches": 2 * pipeline} if pipeline > 1 else {}
        with mpishard.Mesh(tensor=tensor, pipeline=pipeline) as mesh:
            model = mpishard.nn.GPT(
                vocabulary_size=VOCABULARY,
                context_length=length,
                width=width,
                layers=layers,
                heads=heads,
                mesh=mesh,
                **options,
            )
            config = mpishard.ShardingConfiguration(mesh, minimum_parameter_group_size=BUCKET)
            optimizer = mpishard.HybridShardedOptimizer(mpishard.AdamW(lr=1e-3), config, zero_stage=zero_stage)
            tokens = np.random.default_rng(mesh.data.rank).integers(0, VOCABULARY, (sequences // data, length))
            times = []
            for _ in range(WARM_UP + steps):
                mesh.world.barrier()
                began = time.perf_counter()
                model.loss_and_gradient(tokens, tokens)
                optimizer.step(model.parameters, count=sequences * length)
                took = np.array([time.perf_counter() - began])
                times.append(float(mesh.world.all_reduce(took, op="max", label="control")[0]))
        predicted = estimate(
            model.architecture,
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            zero_stage=zero_stage,
            batch=sequences // data,
            minimum_parameter_group_size=BUCKET,
            profile=profile,
            **options,
        )
        parts = predicted.compute, predicted.communication, predicted.update
        found.append({"seconds": statistics.median(times[WARM_UP:]), "predicted": predicted.step_time, "parts": parts})
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"layouts": found, "blas": blas()}), flush=True)


def launch(ranks: int, steps: int, small: bool) -> dict[str, Any]:
    """Measure and predict all layouts of so many ranks once."""
    own = [sys.executable, __file__, "--child", "--steps", str(steps), *(["--small"] if small else [])]
    return children.run_on_ranks(f"{ranks} ranks", own, ranks, TIME_LIMIT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a layout (default 10)")
    parser.add_argument("--repeats", type=int, default=3, help="default 3")
    parser.add_argument("--small", action="store_true", help="the model of examples/train_gpt.py")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.repeats < 1:
        parser.error("--steps and --repeats must be at least 1")
    if arguments.child:
        measured(arguments.steps, arguments.small)
        return
    errors: dict[int, list[float]] = {}
    for ranks in arguments.ranks:
        runs = [launch(ranks, arguments.steps, arguments.small) for _ in range(arguments.repeats)]
        if ranks == arguments.ranks[0]:
            print(runs[0]["blas"])
            print("ranks  data x tensor x pipeline  ZeRO   predicted    measured   ratio")
        for (data, tensor, pipeline, zero_stage), *each in zip(
            LAYOUTS[ranks], *(run["layouts"] for run in runs), strict=True
        ):
            ratios = [one["predicted"] / one["seconds"] for one in each]
            predicted, seconds = (statistics.median(one[what] for one in each) for what in ("predicted", "seconds"))
            parts = [statistics.median(one["parts"][part] for one in each) for part in range(3)]
            errors.setdefault(ranks, []).append(statistics.median(ratios) - 1)
            print(
                f"{ranks:5}{data:6} x {tensor} x {pipeline}{zero_stage:18}{predicted * 1e3:9.1f} ms"
                f"{seconds * 1e3:9.1f} ms{statistics.median(ratios):8.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                + "  "
                + " + ".join(f"{part * 1e3:.1f}" for part in parts),
                flush=True,
            )
    for ranks, own in errors.items():
        sizes = sorted(map(abs, own))
        print(f"{ranks} ranks: error {statistics.median(sizes):.0%} at the median, {sizes[-1]:.0%} at most")


if __name__ == "__main__":
    main()
