"""What `mpishard.watch` costs: ``mpiexec -n 2 python benchmarks/watch_cost.py [PAIRS]``.

Small sums over ranks with a loop of Python between them, in blocks of two seconds with and without the sampler in turn.
Prints the median of the ratios of pairs, and the share of a core that the sampler's thread takes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpishard.launch.detection import Launch
from mpishard.watch.sampler import PROCESSES, Watcher

SECONDS = 2.0


def steps(comm: MPI.Intracomm, count: int) -> float:
    """Seconds that a number of steps take."""
    values = np.ones(1000)
    comm.Barrier()
    began = time.perf_counter()
    for _ in range(count):
        comm.Allreduce(MPI.IN_PLACE, values)
        values /= comm.size
        sum(range(500))
    return time.perf_counter() - began


def main() -> None:
    comm = MPI.COMM_WORLD
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    count = comm.bcast(max(1, int(1000 * SECONDS / steps(comm, 1000))))
    ratios, shares = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / PROCESSES).mkdir()
        for pair in range(2 * pairs):
            watched = pair % 2 == (pair // 2) % 2  # without, with, with, without
            if watched:
                sampler = Watcher(folder, Launch("", "", comm.rank, comm.size), None, None)
                sampler.watch()
                clock = time.pthread_getcpuclockid(sampler.ident or 0)
            seconds = steps(comm, count)
            if watched:
                shares.append(time.clock_gettime(clock) / seconds)
                sampler.end_with(0)
            ratios.append(seconds)
    with_it = [ratios[pair] for pair in range(2 * pairs) if pair % 2 == (pair // 2) % 2]
    without = [ratios[pair] for pair in range(2 * pairs) if pair % 2 != (pair // 2) % 2]
    each = [one / other - 1 for one, other in zip(with_it, without, strict=True)]
    if comm.rank == 0:
        print(f"{comm.size} ranks, {pairs} pairs of {count} steps: {100 * statistics.median(each):+.3f} % of the time")
        print(f"the sampler takes {100 * statistics.median(shares):.3f} % of a core")


if __name__ == "__main__":
    main()
