"""Strong and weak scaling of the main job from one rank to several, one thread each, and what limits it.

    python benchmarks/scaling.py [--model train_gpt | gpt_step] [--ranks N] [--steps N] [--repeats N]

The models are that of examples/train_gpt.py with its settings (width 128, 2 layers, context 64, 64 windows a step,
ZeRO-1), and that of gpt_step.py (width 256, 4 layers, context 256, 8 windows).  Strong scaling keeps the windows of a
step over all ranks, weak scaling those of each rank.  Each rank has a core of its own.

All kinds of runs take turns.  Beside one rank and several there are independent jobs of one rank each, as many at once
as there are cores in use: what they lose against one alone is what the cores share, mostly memory.  The step of several
ranks is then split in parts that are measured: the ideal; what one rank alone loses with fewer windows, and what beside
other jobs; waiting for the rank that comes last to a call; the calls themselves, which take that rank's time too; and
what is left, which is below 0 where ranks share the work of the optimizer.  Products and the rest are split as
`mpishard trace` does it.  Figures are medians over steps, then over repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import children

WARM_UP = 5  # steps, of which the first compile
TIME_LIMIT = 300


@dataclass(frozen=True)
class Job:
    """The sizes of a model, and the windows of a step."""

    width: int
    layers: int
    heads: int
    context: int
    windows: int


JOBS = {"train_gpt": Job(128, 2, 4, 64, 64), "gpt_step": Job(256, 4, 8, 256, 8)}


def train(name: str, windows: int, steps: int, job_number: int) -> None:
    """One rank; rank 0 prints a line of JSON: medians over the steps, in milliseconds."""
    import numpy as np
    from slow_link import blas

    import mpishard
    from mpishard.comm.ledger import PRODUCT

    job = JOBS[name]
    with mpishard.Mesh() as mesh:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(job_number + mesh.rank) % len(cores)]})
        model = mpishard.nn.GPT(
            vocabulary_size=256,
            context_length=job.context,
            width=job.width,
            layers=job.layers,
            heads=job.heads,
            mesh=mesh,
        )
        config = mpishard.ShardingConfiguration.create_for_high_bandwidth(mesh, max_gradient_norm=1.0)
        optimizer = mpishard.ZeRO1Optimizer(mpishard.AdamW(lr=1e-3), config)
        own = len(range(windows)[mesh.rank :: mesh.size])
        text = np.random.default_rng(mesh.rank).integers(0, 256, (own, job.context + 1))
        times = np.empty((steps, 3))
        for step in range(-WARM_UP, steps):
            mesh.ledger.spans, waited = [], mesh.ledger.seconds
            began = time.perf_counter()
            model.loss_and_gradient(text[:, :-1], text[:, 1:])
            optimizer.step(model.parameters, count=windows * job.context)
            seconds = time.perf_counter() - began
            products = sum(span.ended - span.began for span in mesh.ledger.spans if span.kind == PRODUCT)
            if step >= 0:
                times[step] = seconds, products, mesh.ledger.seconds - waited
        gathered = mesh.world.comm.gather(times * 1e3)
        if gathered is not None:
            step_ms, products, calls = np.moveaxis(gathered, 2, 0)
            parts = {
                "step": step_ms.mean(axis=0),
                "products": products.mean(axis=0),
                "communication": calls.mean(axis=0),
                # The rank that comes last to the calls of a step waits for nobody.
                "calls": calls.min(axis=0),
            }
            print(json.dumps({part: float(np.median(of_steps)) for part, of_steps in parts.items()} | {"blas": blas()}))


def run(name: str, options: argparse.Namespace, *, windows: int, ranks: int = 1, jobs: int = 1) -> dict[str, Any]:
    """The means over so many jobs side by side, each of so many ranks."""
    own = [[sys.executable, __file__, "--child", options.model, str(windows), str(options.steps)] for _ in range(jobs)]
    numbered = [[*command, str(number)] for number, command in enumerate(own)]
    commands = [(children.mpirun(ranks, command) if ranks > 1 else command, {}) for command in numbered]
    found = [children.result(name, [text]) for text in children.run(name, commands, TIME_LIMIT)]
    figures = ("step", "products", "communication", "calls")
    return {figure: statistics.mean(each[figure] for each in found) for figure in figures} | {"blas": found[0]["blas"]}


def limits(ideal: float, found: dict[str, Any], alone: dict[str, Any], beside: dict[str, Any]) -> dict[str, float]:
    """What a step of several ranks takes more than the ideal, in milliseconds; the parts add up to that."""
    parts = {
        "fewer windows a rank": alone["step"] - ideal,
        "other jobs on the machine": beside["step"] - alone["step"],
        "waiting for the last rank": found["communication"] - found["calls"],
        "the calls themselves": found["calls"] - alone["calls"],
    }
    return parts | {"left": found["step"] - ideal - sum(parts.values())}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        train(sys.argv[2], *map(int, sys.argv[3:]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=JOBS, default="train_gpt", help="default train_gpt")
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--steps", type=int, default=100, help="default 100")
    parser.add_argument("--repeats", type=int, default=5, help="default 5")
    options = parser.parse_args()
    cores, windows, ranks = len(os.sched_getaffinity(0)), JOBS[options.model].windows, options.ranks
    if not 2 <= ranks <= min(cores, windows):
        parser.error(
            f"--ranks must be 2 to {min(cores, windows)}: each has a window, and one of {cores} cores, its own"
        )
    kinds: dict[str, dict[str, int]] = {
        "1 rank": {"windows": windows},
        f"1 rank, 1/{ranks} of the windows": {"windows": windows // ranks},
        f"{ranks} jobs of 1 rank": {"windows": windows, "jobs": ranks},
        f"{ranks} jobs, 1/{ranks} of the windows": {"windows": windows // ranks, "jobs": ranks},
        f"{ranks} ranks, strong": {"windows": windows, "ranks": ranks},
        f"{ranks} ranks, weak": {"windows": windows * ranks, "ranks": ranks},
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    run("compiling", options, windows=windows, ranks=ranks)
    for _ in range(options.repeats):
        for name, kind in kinds.items():
            runs[name].append(run(name, options, **kind))
    one, share, jobs, jobs_share, strong, weak = runs.values()
    print(f"{children.processor()}; {one[0]['blas']}")
    print(f"{options.model}, {windows} windows a step; milliseconds a step, means over the ranks or jobs")
    print(f"{'':30}{'step':>10}{'products':>10}{'communication':>15}{'rest':>8}")
    for name, of_kind in runs.items():
        step, products, waited = (middle(of_kind, part) for part in ("step", "products", "communication"))
        print(f"{name:30}{step:10.1f}{products:10.1f}{waited:15.2f}{step - products - waited:8.1f}")
    print(f"beside {ranks - 1} other job(s), times as long: products {slowdown(one, jobs, products_of)}, ", end="")
    print(f"rest {slowdown(one, jobs, rest_of)}")
    for name, found, alone, beside, gain in (
        ("strong", strong, share, jobs_share, ranks),
        ("weak", weak, one, jobs, 1),
    ):
        ratios = [first["step"] / each["step"] / gain for first, each in zip(one, found, strict=True)]
        low, high = min(ratios), max(ratios)
        print(f"{name} scaling, efficiency on {ranks} ranks: {statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})")
        parts = [limits(first["step"] / gain, *each) for first, *each in zip(one, found, alone, beside, strict=True)]
        lost = {part: statistics.median(each[part] for each in parts) for part in parts[0]}
        print(f"  ideal {middle(one, 'step') / gain:.1f} ms, and more:")
        for part, more in lost.items():
            print(f"  {part:30}{more:8.1f} ms")
        print(f"  limited most by: {max(lost, key=lambda part: lost[part])}")


def middle(runs: list[dict[str, Any]], part: str) -> float:
    return statistics.median(each[part] for each in runs)


def products_of(run: dict[str, Any]) -> float:
    return float(run["products"])


def rest_of(run: dict[str, Any]) -> float:
    return float(run["step"] - run["products"] - run["communication"])


def slowdown(alone: list[dict[str, Any]], beside: list[dict[str, Any]], part: Any) -> str:
    ratios = [part(two) / part(one) for one, two in zip(alone, beside, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
