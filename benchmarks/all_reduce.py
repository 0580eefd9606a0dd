"""`Axis.all_reduce` against bare mpi4py: the cost of the ledger and of the checks.

    mpirun -n 2 python benchmarks/all_reduce.py

Both run in turn on the same buffer and communicator, batch by batch and each first in half of the pairs; times are of
the slowest rank, figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import mpishard


def batch_s(comm: MPI.Intracomm, call: Callable[[], object], calls: int) -> float:
    """Seconds a call, of the slowest rank."""
    comm.Barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return float(comm.allreduce((time.perf_counter() - began) / calls, MPI.MAX))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=41, help="batches of each kind (default 41)")
    options = parser.parse_args()
    with mpishard.Mesh() as mesh:
        axis, comm = mesh.data, mesh.data.comm
        if mesh.rank == 0:
            print(f"{MPI.Get_library_version().splitlines()[0].split(',')[0]}, {mesh.size} ranks")
        for nbytes, calls in ((4, 2000), (16_000_000, 4)):
            buffer = np.zeros(nbytes // 4, np.float32)

            def bare(buffer: np.ndarray = buffer) -> None:
                comm.Allreduce(MPI.IN_PLACE, buffer)

            def ours(buffer: np.ndarray = buffer) -> None:
                axis.all_reduce(buffer)

            pairs = []
            for repeat in range(options.repeats):
                order = (bare, ours) if repeat % 2 else (ours, bare)  # neither always runs on the other's warm cache
                seconds = {call: batch_s(comm, call, calls) for call in order}
                pairs.append((seconds[bare], seconds[ours]))
            if mesh.rank == 0:
                medians = [1e6 * statistics.median(column) for column in zip(*pairs, strict=True)]
                difference = 1e6 * statistics.median(b - a for a, b in pairs)
                ratio = statistics.median(b / a for a, b in pairs)
                print(
                    f"{nbytes} bytes: mpi4py {medians[0]:.2f} us, Axis.all_reduce {medians[1]:.2f} us; "
                    f"medians of pairs: difference {difference:+.2f} us, ratio {ratio:.3f}"
                )


if __name__ == "__main__":
    main()
