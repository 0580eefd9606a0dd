"""What `optimizer.step` costs beside bare mpi4py and NumPy: small steps, and where large ones end up.

    python benchmarks/step_latency.py [--ranks 1 2 4] [--sizes 10 1000 100000 4000000] [--repeats R] [--calls]

The peer is what a user writes by hand: an `Allreduce` of the gradient in place, a division, and Adam in seven
statements of NumPy.  Its checks are none.  All kinds run in turn in one job; a time is that of the slowest rank, a
figure the median over the repeats.  --calls counts the Python functions that a step of n = 10 calls.
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

SIZES = (10, 1_000, 100_000, 4_000_000)
STRATEGIES = {"DDP": "DDPOptimizer", "ZeRO-1": "ZeRO1Optimizer", "ZeRO-2": "ZeRO2Optimizer"}
BARE = "bare"
TIME_LIMIT = 300
SECONDS = 0.04  # of a batch of steps


def bare(comm: Any, parameters: Any, gradients: Any) -> Callable[[], None]:
    """A step by hand."""
    import numpy as np
    from mpi4py import MPI

    first, second = np.zeros_like(parameters), np.zeros_like(parameters)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        gradients.fill(1.0)
        comm.Allreduce(MPI.IN_PLACE, gradients)
        mean = gradients / comm.size
        first[:] = 0.9 * first + 0.1 * mean
        second[:] = 0.999 * second + 0.001 * mean**2
        rate = 1e-3 / (1 - 0.9**steps)
        parameters[:] -= rate * first / (np.sqrt(second / (1 - 0.999**steps)) + 1e-8)

    return step


def sharded(optimizer: Any, parameters: Any, gradients: Any) -> Callable[[], None]:
    """A step of ours; as by hand, the gradient is written before, since its sum stands in its place afterwards."""

    def step() -> None:
        gradients.fill(1.0)
        optimizer.step(parameters, gradients)

    return step


def work(sizes: list[int], repeats: int, count_calls: bool) -> None:
    """Of each rank: measure all kinds in turn; rank 0 prints a line of JSON."""
    import numpy as np
    from mpi4py import MPI

    import mpishard

    found: dict[str, Any] = {}
    with mpishard.Mesh() as mesh:
        comm = mesh.world.comm
        for size in sizes:
            steps: dict[str, Callable[[], None]] = {}
            for kind in (BARE, *STRATEGIES):
                parameters, gradients = np.zeros(size, np.float32), np.zeros(size, np.float32)
                if kind == BARE:
                    steps[kind] = bare(comm, parameters, gradients)
                else:
                    optimizer = getattr(mpishard, STRATEGIES[kind])(mpishard.Adam(lr=1e-3), mesh)
                    steps[kind] = sharded(optimizer, parameters, gradients)
            for step in steps.values():
                for _ in range(5):
                    step()
            times: dict[str, list[float]] = {kind: [] for kind in steps}
            began = time.perf_counter()
            for _ in range(5):
                steps[BARE]()
            one = comm.bcast((time.perf_counter() - began) / 5)
            count = max(3, min(400, int(SECONDS / one)))
            for _ in range(repeats):
                for kind, step in steps.items():
                    comm.Barrier()
                    began = time.perf_counter()
                    for _ in range(count):
                        step()
                    times[kind].append(comm.allreduce((time.perf_counter() - began) / count, MPI.MAX))
            found[str(size)] = times
            if count_calls and size == sizes[0]:
                found["calls"] = {kind: calls_of(step) for kind, step in steps.items() if kind != BARE}
        library = MPI.Get_library_version().split(",")[0].splitlines()[0]
        if mesh.rank == 0:
            print(json.dumps({"library": library, "times": found}))


def calls_of(step: Callable[[], None]) -> int:
    """Python functions that one step calls, those of C extensions not counted."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--calls", action="store_true", help="count the Python calls of a step")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.sizes, options.repeats, options.calls)
        return
    same = ["--sizes", *map(str, options.sizes), "--repeats", str(options.repeats)]
    same += ["--calls"] if options.calls else []
    print("microseconds a step, and more than by hand (median of the differences)")
    for ranks in options.ranks:
        command = [sys.executable, __file__, "--worker", *same]
        found = children.run_on_ranks(f"{ranks} ranks", command, ranks, TIME_LIMIT)
        calls = found["times"].pop("calls", None)
        print(f"\n{ranks} ranks, {found['library']}")
        for size, times in found["times"].items():
            cells = [f"by hand {1e6 * statistics.median(times[BARE]):9.0f}"]
            for kind in STRATEGIES:
                more = statistics.median(a - b for a, b in zip(times[kind], times[BARE], strict=True))
                cells.append(f"{kind} {1e6 * statistics.median(times[kind]):9.0f} ({1e6 * more:+.0f})")
            print(f"n = {int(size):>9,}: " + "   ".join(cells))
        if calls:
            print(f"Python calls of a step of n = {options.sizes[0]}: {calls}")


if __name__ == "__main__":
    main()
