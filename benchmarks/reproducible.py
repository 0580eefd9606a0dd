"""The cost of sums in a fixed order: the exchange in isolation, and as a part of a training step.

    python benchmarks/reproducible.py [--ranks 2 4] [--repeats N] [--steps N]

In isolation: a gradient of 13 MB, one partial sum a rank, `OrderedSums` and the gather against `Axis.all_reduce`; one
bucket, all ranks start together, the time of the slowest.  In a step: DDP of a GPT (4 layers, width 256, 8 heads,
sequence 256, vocabulary 256, 16 sequences a step, float32, AdamW) with `reproducible` against without, one micro-batch
a rank in both.  Kinds take turns; figures are medians, and the ones that count are medians over pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import children

ELEMENTS = 13_000_000 // 4
VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 256, 256, 256, 4, 8
SEQUENCES = 16
WARM_UP = 3
TIME_LIMIT = 300
Pairs = list[tuple[float, float]]


def slowest(comm: Any, call: Callable[[], object]) -> float:
    """Milliseconds of a call, of the slowest rank."""
    from mpi4py import MPI

    comm.Barrier()
    began = time.perf_counter()
    call()
    return 1e3 * float(comm.allreduce(time.perf_counter() - began, MPI.MAX))


def pairs(comm: Any, ordered: Callable[[], object], plain: Callable[[], object], count: int) -> Pairs:
    """Times of both, each first in half of the pairs."""
    found = []
    for index in range(-WARM_UP, count):
        calls = (ordered, plain) if index % 2 else (plain, ordered)
        times = {call: slowest(comm, call) for call in calls}
        if index >= 0:
            found.append((times[ordered], times[plain]))
    return found


def run(repeats: int, steps: int) -> dict[str, Any]:
    """What one rank does; all return the same."""
    import numpy as np

    import mpishard
    from mpishard.reduction.ordered import OrderedSums

    found: dict[str, Any] = {}
    with mpishard.Mesh() as mesh:
        axis = mesh.data
        gradient = np.zeros(ELEMENTS, np.float32)
        sums = OrderedSums(axis, gradient)

        def ordered() -> None:
            sums.all_reduce(gradient)

        def plain() -> None:
            axis.all_reduce(gradient)

        found["exchange"] = pairs(axis.comm, ordered, plain, repeats)
        random = np.random.default_rng(mesh.rank)
        tokens = random.integers(0, VOCABULARY, (SEQUENCES // axis.size, CONTEXT + 1))
        trained = []
        for reproducible in (True, False):
            model = mpishard.nn.GPT(
                vocabulary_size=VOCABULARY, context_length=CONTEXT, width=WIDTH, layers=LAYERS, heads=HEADS
            )
            config = mpishard.ShardingConfiguration.create_for_high_bandwidth(mesh, reproducible=reproducible)
            optimizer = mpishard.DDPOptimizer(mpishard.AdamW(lr=1e-3), config)

            def step(model: Any = model, optimizer: Any = optimizer) -> None:
                model.loss_and_gradient(tokens[:, :-1], tokens[:, 1:])
                optimizer.step(model.parameters, count=SEQUENCES * CONTEXT)

            trained.append(step)
        found["step"] = pairs(axis.comm, trained[0], trained[1], steps)
    return found


def report(ranks: int, found: dict[str, list[list[float]]]) -> None:
    for what, times in found.items():
        ordered, plain = (statistics.median(column) for column in zip(*times, strict=True))
        difference = statistics.median(one - two for one, two in times)
        ratio = statistics.median(one / two for one, two in times)
        print(
            f"{ranks} ranks, {what}: in order {ordered:.2f} ms, not {plain:.2f} ms; "
            f"medians of {len(times)} pairs: difference {difference:+.2f} ms, ratio {ratio:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=41, help="pairs of exchanges (default 41)")
    parser.add_argument("--steps", type=int, default=15, help="pairs of training steps (default 15)")
    parser.add_argument("--as-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_child:
        from mpi4py import MPI

        found = run(options.repeats, options.steps)
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(found))
        return
    own = [sys.executable, __file__, "--as-child", f"--repeats={options.repeats}", f"--steps={options.steps}"]
    for ranks in options.ranks:
        report(ranks, children.run_on_ranks(f"{ranks} ranks", own, ranks, TIME_LIMIT))


if __name__ == "__main__":
    main()
