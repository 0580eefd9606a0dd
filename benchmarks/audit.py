"""What an audit finds, how soon, and what it costs.

    mpiexec -n 3 python benchmarks/audit.py detect [--runs N] [--steps N] [--audits SHARE ...] [--kinds KIND ...]
    mpiexec -n 3 python benchmarks/audit.py clean [--runs N]
    mpiexec -n 2 python benchmarks/audit.py cost [--runs N]

detect: runs in which a rank is wrong, which is drawn for each with the step, of the first half: in one of its
micro-batches, in all from there on, only where an element of the gradient is above a size, by a bit of its parameters,
or in its part of a sum.  How many are seen; after how many steps, beside the formula for a rank that is always wrong;
and how many have the bits of the right run.  clean: runs without a fault, and the alarms in them.  Each run of both has
another order of the samples.  cost: steps of the GPT of heal.py with an audit, in ratio to those without, in turns.
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
from mpishard.training.audit import REPLICAS, AuditedRunner, expected_steps

ROWS = np.random.default_rng(0).standard_normal((256, 40))
TARGETS = ROWS @ np.arange(40.0)
PARTS = 16
KINDS = ("once", "always", "above a size", "parameters", "sum")
AUDITS = (0.01, 0.05, 0.2, 1.0, REPLICAS)
COSTS = (None, 0.01, 0.05, REPLICAS)
BIT = np.uint64(1 << 20)


class Alarms(logging.Handler):
    """Counts what audits have found."""

    found = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.found += "the audit found" in record.getMessage()


def run(
    mesh: Any, audit: Any, seed: int, steps: int, kind: str | None = None, wrong: int = 0, first: int = 0
) -> tuple[int, bytes]:
    """The step in which rank `wrong`, from step `first` on, is seen, 0 for never; and the bits of the result.

    `seed`: of the order of the samples.
    """
    ranks = mesh.size
    mine, alarms, seen, struck = mesh.rank == wrong and kind is not None, Alarms(), 0, False
    checks, own, place = False, 0, key(seed, "place") % (PARTS // ranks)  # of a fault in one of its own micro-batches
    optimizer = mpishard.ElasticOptimizer(mpishard.AdamW(lr=0.05), mesh, audit=audit)
    sums, alone = ordered.add_by_tree, AuditedRunner._compute_alone

    def flipped(array: np.ndarray) -> None:
        array.view(np.uint64)[...] ^= BIT

    def strikes() -> bool:
        return mine and optimizer.optimizer.clock + 1 >= first

    def noted(runner: AuditedRunner, part: int) -> int:
        nonlocal checks
        checks = True
        try:
            return alone(runner, part)
        finally:
            checks = False

    def function(parameters: np.ndarray, samples: np.ndarray, gradients: np.ndarray) -> float:
        nonlocal struck, own
        if strikes() and kind == "parameters" and not struck:
            flipped(parameters[3:4])
            struck = True
        residual = ROWS[samples] @ parameters - TARGETS[samples]
        gradients += ROWS[samples].T @ residual
        own += strikes() and not checks
        once = kind == "once" and not checks and own == place + 1 and not struck
        if strikes() and (kind == "always" or once or (kind == "above a size" and gradients[3] > 500)):
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

    problem = mpishard.OptimizationProblem(function, np.zeros(40), samples=256, batch_size=64, steps=steps, seed=seed)
    world = mesh.world.comm.Dup()
    log = logging.getLogger("mpishard")
    log.addHandler(alarms)
    ordered.add_by_tree = summed if kind == "sum" else sums
    AuditedRunner._compute_alone = noted  # type: ignore[method-assign]
    try:
        result = optimizer.optimize(problem, callback=note, progress=False)
    finally:
        ordered.add_by_tree = sums
        AuditedRunner._compute_alone = alone  # type: ignore[method-assign]
        log.removeHandler(alarms)
    seen = max(world.allgather(seen))
    world.Free()
    return seen, result.parameters.tobytes()


def detect(mesh: Any, given: argparse.Namespace) -> None:
    ranks, runs = mesh.size, given.runs
    right = [run(mesh, None, seed, given.steps)[1] for seed in range(runs)]
    say(mesh, f"{runs} runs on {ranks} ranks: seen, mean and largest number of steps until then, the right bits")
    for audit in given.audits:
        mean, most = (0.0, 0) if audit == REPLICAS else expected_steps(audit, PARTS, ranks)
        say(mesh, f"audit={audit}: by the formula {mean:.1f} steps, at most {most}")
        for kind in given.kinds:
            waits, same = [], 0
            for number in range(runs):
                first = 1 + key(number, "step", kind) % (given.steps // 2)
                seen, bits = run(mesh, audit, number, given.steps, kind, key(number, "rank", kind) % ranks, first)
                waits += [seen - first + 1] if seen else []
                same += bits == right[number]
            steps = f"{statistics.fmean(waits):5.1f} {max(waits):4d}" if waits else "    -    -"
            say(mesh, f"  {kind:12} {len(waits):4d} {steps} {same:4d}")


def clean(mesh: Any, given: argparse.Namespace) -> None:
    runs = given.runs
    right = [run(mesh, None, seed, given.steps)[1] for seed in range(runs)]
    for audit in given.audits:
        found = [run(mesh, audit, seed, given.steps) for seed in range(runs)]
        alarms = sum(seen > 0 for seen, _ in found)
        same = sum(bits == expected for (_, bits), expected in zip(found, right, strict=True))
        say(
            mesh,
            f"audit={audit}: {runs} runs on {mesh.size} ranks, {alarms} alarms, {same} with the right bits",
        )


def cost(mesh: Any, given: argparse.Namespace) -> None:
    runs = given.runs
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


def share(text: str) -> float | str:
    return text if text == REPLICAS else float(text)


def say(mesh: Any, text: str) -> None:
    if mesh.rank == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("detect", "clean", "cost"))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--audits", nargs="+", type=share, default=AUDITS, metavar="SHARE")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    given = parser.parse_args()
    logging.getLogger("mpishard").addHandler(logging.NullHandler())
    with mpishard.Mesh() as mesh:
        {"detect": detect, "clean": clean, "cost": cost}[given.part](mesh, given)


if __name__ == "__main__":
    main()
