"""What an audit finds, how soon, and what it costs.

    mpiexec -n 5 python benchmarks/audit.py detect [--runs N]
    mpiexec -n 3 python benchmarks/audit.py clean [--runs N]
    mpiexec -n 2 python benchmarks/audit.py cost [--runs N]

detect: runs in which a rank is wrong, which is drawn for each with the step: in one micro-batch, in all from there on,
only where an element of the gradient is above a size, by a bit of its parameters, or in its part of a sum.  How many
are seen in 60 steps; after how many steps, beside the formula for a rank that is always wrong; and how many have the
bits of the right run.  clean: runs without a fault, and the alarms in them.  cost: steps of the GPT of heal.py with an
audit, in ratio to those without, in turns.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import heal
import numpy as np

import mpishard
from mpishard.backend.random import key
from mpishard.reduction import ordered
from mpishard.training.audit import REPLICAS, expected_steps

ROWS = np.random.default_rng(0).standard_normal((256, 40))
TARGETS = ROWS @ np.arange(40.0)
PARTS, STEPS = 16, 60
KINDS = ("once", "always", "above a size", "parameters", "sum")
AUDITS = (0.01, 0.05, 0.2, 1.0, REPLICAS)
COSTS = (None, 0.01, 0.05, REPLICAS)
BIT = np.uint64(1 << 20)


class Alarms(logging.Handler):
    """Counts what audits have found."""

    found = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.found += "the audit found" in record.getMessage()


def run(mesh: Any, audit: Any, kind: str | None = None, wrong: int = 0, first: int = 0) -> tuple[int, bytes]:
    """The step in which rank `wrong`, from step `first` on, is seen, 0 for never; and the bits of the result."""
    ranks = mesh.size
    mine, alarms, seen, struck = mesh.rank == wrong and kind is not None, Alarms(), 0, False
    optimizer = mpishard.ElasticOptimizer(mpishard.AdamW(lr=0.05), mesh, audit=audit)
    sums = ordered.add_by_tree

    def flipped(array: np.ndarray) -> None:
        array.view(np.uint64)[...] ^= BIT

    def strikes() -> bool:
        return mine and optimizer.optimizer.clock + 1 >= first

    def function(parameters: np.ndarray, samples: np.ndarray, gradients: np.ndarray) -> float:
        nonlocal struck
        if strikes() and kind == "parameters" and not struck:
            flipped(parameters[3:4])
            struck = True
        residual = ROWS[samples] @ parameters - TARGETS[samples]
        gradients += ROWS[samples].T @ residual
        if strikes() and (
            kind == "always" or (kind == "once" and not struck) or (kind == "above a size" and gradients[3] > 500)
        ):
            flipped(gradients[3:4])
            struck = True
        return 0.5 * float(residual @ residual)

    def summed(*arguments: Any) -> None:
        sums(*arguments)
        if strikes() and arguments[-1].size:
            flipped(arguments[-1][:1])

    def note(state: Any) -> None:
        nonlocal seen
        if alarms.found or optimizer.current_workers < ranks:
            seen = seen or state.step

    problem = mpishard.OptimizationProblem(function, np.zeros(40), samples=256, batch_size=64, steps=STEPS)
    world = mesh.world.comm.Dup()
    log = logging.getLogger("mpishard")
    log.addHandler(alarms)
    ordered.add_by_tree = summed if kind == "sum" else sums
    try:
        result = optimizer.optimize(problem, callback=note, progress=False)
    finally:
        ordered.add_by_tree = sums
        log.removeHandler(alarms)
    seen = max(world.allgather(seen))
    world.Free()
    return seen, result.parameters.tobytes()


def detect(mesh: Any, runs: int) -> None:
    ranks = mesh.size
    _, right = run(mesh, None)
    say(mesh, f"{runs} runs on {ranks} ranks: seen, mean and largest number of steps until then, the right bits")
    for audit in AUDITS:
        mean, most = (0.0, 0) if audit == REPLICAS else expected_steps(audit, PARTS, ranks)
        say(mesh, f"audit={audit}: by the formula {mean:.1f} steps, at most {most}")
        for kind in KINDS:
            waits, same = [], 0
            for number in range(runs):
                first = 1 + key(number, "step", kind) % (STEPS // 2)
                seen, bits = run(mesh, audit, kind, key(number, "rank", kind) % ranks, first)
                waits += [seen - first + 1] if seen else []
                same += bits == right
            steps = f"{statistics.fmean(waits):5.1f} {max(waits):4d}" if waits else "    -    -"
            say(mesh, f"  {kind:12} {len(waits):4d} {steps} {same:4d}")


def clean(mesh: Any, runs: int) -> None:
    _, right = run(mesh, None)
    for audit in (0.2, 1.0, REPLICAS):
        found = [run(mesh, audit) for _ in range(runs)]
        alarms, same = sum(seen > 0 for seen, _ in found), sum(bits == right for _, bits in found)
        say(
            mesh,
            f"audit={audit}: {runs} runs on {mesh.size} ranks, {alarms} alarms, {same} with the right bits",
        )


def cost(mesh: Any, runs: int) -> None:
    times: dict[Any, list[float]] = {audit: [] for audit in COSTS}
    for _ in range(runs + 1):
        for audit in COSTS:
            stamps: list[float] = []
            optimizer = mpishard.ElasticOptimizer(mpishard.AdamW(lr=1e-3), mesh, audit=audit)
            problem = heal.problem_on(mesh, **{**heal.LARGE, "micro_batch_size": 1}, steps=21)
            callback: Callable[[Any], None] = lambda _, stamps=stamps: stamps.append(time.perf_counter())  # noqa: E731
            optimizer.optimize(problem, callback=callback, progress=False)
            times[audit].append((stamps[-1] - stamps[0]) / 20)
    for audit in COSTS[1:]:
        pairs = sorted(own / plain for own, plain in zip(times[audit][1:], times[None][1:], strict=True))
        say(mesh, f"audit={audit}: {statistics.median(pairs):.3f} ({pairs[0]:.3f} to {pairs[-1]:.3f}) of {runs} pairs")


def say(mesh: Any, text: str) -> None:
    if mesh.rank == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("detect", "clean", "cost"))
    parser.add_argument("--runs", type=int, default=10)
    given = parser.parse_args()
    logging.getLogger("mpishard").addHandler(logging.NullHandler())
    with mpishard.Mesh() as mesh:
        {"detect": detect, "clean": clean, "cost": cost}[given.part](mesh, given.runs)


if __name__ == "__main__":
    main()
