"""What `shards` and `reproducible=True` cost: training steps of a small GPT, tokens a second against plain ones.

    python benchmarks/shards.py [--ranks 1 2 4] [--shards 1 2 4 8] [--wide] [--steps N] [--repeats R]

4 layers, width 256, 8 heads, sequence 256, vocabulary 256, float32, AdamW; 16 sequences a step in micro-batches of 4;
ranks of one thread each.  2 ranks are tensor=2, 4 ranks data=2 x tensor=2.  --wide: 2 layers of width 1024 with 16
heads, 4 sequences a step, on 2 ranks.

All kinds run in turns, so that a machine that slows down slows all; a figure is the median over the repeats of the
ratio to shards=1 without reproducible=True on as many ranks in the same turn.  OpenBLAS chooses its kernels by itself:
OPENBLAS_CORETYPE is taken out of the environment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any, NamedTuple

import children

TENSOR = {1: 1, 2: 2, 4: 2}  # by number of ranks; the others are data ranks
WARM_UP = 3
TIME_LIMIT = 600


class Sizes(NamedTuple):
    """Of a model, and of its steps."""

    layers: int
    width: int
    heads: int
    sequences: int
    micro_batch: int
    vocabulary: int = 256
    context: int = 256


MODEL, WIDE = Sizes(4, 256, 8, 16, 4), Sizes(2, 1024, 16, 4, 2)


class Kind(NamedTuple):
    """One thing to measure."""

    ranks: int
    shards: int
    reproducible: bool
    wide: bool

    def __str__(self) -> str:
        ordered = ", reproducible" if self.reproducible else ""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, shards={self.shards}{ordered}"

    @property
    def plain(self) -> Kind:
        """What it is compared with."""
        return self._replace(shards=1, reproducible=False)


def child(kind: Kind, steps: int) -> dict[str, Any]:
    """What one rank does: times of the steps after a warm-up, and what computes."""
    import numpy as np

    import mpishard
    from mpishard.backend.process import arithmetic

    sizes = WIDE if kind.wide else MODEL
    with mpishard.Mesh(tensor=TENSOR[kind.ranks]) as mesh:
        model = mpishard.nn.GPT(
            vocabulary_size=sizes.vocabulary,
            context_length=sizes.context,
            width=sizes.width,
            layers=sizes.layers,
            heads=sizes.heads,
            mesh=mesh,
            shards=kind.shards,
        )
        words = np.random.default_rng(0).integers(0, sizes.vocabulary, (sizes.sequences, sizes.context + 1))
        config = mpishard.ShardingConfiguration.create_for_high_bandwidth(mesh, reproducible=kind.reproducible)
        optimizer = mpishard.DDPOptimizer(mpishard.AdamW(lr=1e-3), config)
        ends: list[float] = []
        problem = mpishard.OptimizationProblem.for_model(
            model,
            lambda samples: (words[samples, :-1], words[samples, 1:]),
            samples=sizes.sequences,
            batch_size=sizes.sequences,
            micro_batch_size=sizes.micro_batch,
            steps=WARM_UP + steps,
            tokens_per_sample=sizes.context,
        )
        result = optimizer.optimize(problem, progress=False, callback=lambda _: ends.append(time.perf_counter()))
        return {
            "rate": sizes.sequences * sizes.context * steps / (ends[-1] - ends[WARM_UP - 1]),
            "loss": float(result.loss_history[-1]),
            "arithmetic": arithmetic(),
        }


def launch(kind: Kind, steps: int) -> dict[str, Any]:
    """Run all ranks of a kind; returns what rank 0 printed."""
    own = [sys.executable, __file__, f"--as-child={json.dumps(kind)}", f"--steps={steps}"]
    return children.run_on_ranks(str(kind), own, kind.ranks, TIME_LIMIT)


def compare(kinds: list[Kind], steps: int, repeats: int) -> None:
    """Run kinds in turns, and print the medians."""
    results: dict[Kind, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    launch(kinds[0], 1)  # fills the cache of compiled kernels
    for repeat in range(repeats):
        for kind in kinds[::-1] if repeat % 2 else kinds:
            results[kind].append(launch(kind, steps))
    facts = results[kinds[0]][0]["arithmetic"]
    print(f"{facts['BLAS']}, {facts['BLAS kernels']} kernels, {facts['processor of compiled kernels']}")
    print(f"{'':40s}{'tokens/s':>12s}   ratio to shards=1: median (least to most) of {repeats}")
    for kind in kinds:
        rates, plain = ([each["rate"] for each in results[one]] for one in (kind, kind.plain))
        ratios = [one / other for one, other in zip(rates, plain, strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{kind!s:40s}{statistics.median(rates):12,.0f}   {spread}   loss {results[kind][0]['loss']:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(TENSOR), choices=list(TENSOR))
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4, 8], help="those to compare with 1")
    parser.add_argument("--wide", action="store_true", help="width 1024, shards 1 and 4 on 2 ranks")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a run (default 10)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each kind (default 5)")
    parser.add_argument("--as-child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_child:
        found = child(Kind(*json.loads(options.as_child)), options.steps)
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(found), flush=True)
        return
    if options.steps < 1 or options.repeats < 1:
        parser.error("--steps and --repeats must be at least 1")
    print(f"{children.processor()}, one thread a rank")
    for ranks in [2] if options.wide else options.ranks:
        counts = sorted({1, *([4] if options.wide else options.shards)})
        usable = [count for count in counts if count == 1 or count % TENSOR[ranks] == 0]
        kinds = [Kind(ranks, count, ordered, options.wide) for count in usable for ordered in (False, True)]
        compare(kinds, options.steps, options.repeats)


if __name__ == "__main__":
    main()
