"""`Axis.reduce_scatter` and `all_gather` against the fastest way of bare mpi4py, and their bytes on the wire.

    python benchmarks/reduce_scatter.py [--ranks 2 4] [--kilobytes 64 1000 8000 64000] [--repeats R] [--wire]

Bare mpi4py is the fastest of the forms of a call, blocking or started, for equal pieces or any, on the same
buffer and communicator, all in turn; times are of the slowest rank, figures are medians.  --wire: over TCP on the
loopback device in place of shared memory; then the bytes that the device sent are beside those of the ledger.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children

TIME_LIMIT = 400
# For Open MPI, and for MPICH with UCX.
TCP = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "MPIR_CVAR_NOLOCAL": "1",
    "UCX_TLS": "tcp,self",
}
SENT = Path("/sys/class/net/lo/statistics/tx_bytes")
WIRE_CALLS = 10


def work(kilobytes: list[int], repeats: int) -> None:
    """Of each rank: measure all ways in turn; rank 0 prints a line of JSON."""
    import numpy as np
    from mpi4py import MPI

    import mpishard

    found: dict[str, Any] = {}
    with mpishard.Mesh() as mesh:
        axis, comm = mesh.data, mesh.data.comm
        for size in kilobytes:
            whole = np.ones(size * 250, np.float32)
            counts = [len(part) for part in np.array_split(whole, comm.size)]
            starts = [sum(counts[:rank]) for rank in range(comm.size)]
            pieces = [whole, (counts, starts)]
            ways: dict[str, dict[str, Callable[[], Any]]] = {
                "reduce_scatter": {
                    "ours": lambda w=whole: axis.reduce_scatter(w),
                    "blocking": lambda w=whole, c=counts: comm.Reduce_scatter(MPI.IN_PLACE, w, c),
                    "started": lambda w=whole, c=counts: comm.Ireduce_scatter(MPI.IN_PLACE, w, c).Wait(),
                    "equal": lambda w=whole: comm.Reduce_scatter_block(MPI.IN_PLACE, w),
                    "started equal": lambda w=whole: comm.Ireduce_scatter_block(MPI.IN_PLACE, w).Wait(),
                },
                "all_gather": {
                    "ours": lambda w=whole: axis.all_gather(w),
                    "blocking": lambda p=pieces: comm.Allgatherv(MPI.IN_PLACE, p),
                    "started": lambda p=pieces: comm.Iallgatherv(MPI.IN_PLACE, p).Wait(),
                    "equal": lambda w=whole: comm.Allgather(MPI.IN_PLACE, w),
                    "started equal": lambda w=whole: comm.Iallgather(MPI.IN_PLACE, w).Wait(),
                },
            }
            for name, calls in ways.items():
                if min(counts) < max(counts):
                    calls = {way: call for way, call in calls.items() if "equal" not in way}
                times: dict[str, list[float]] = {way: [] for way in calls}
                for _ in range(repeats + 1):
                    for way, call in calls.items():
                        whole.fill(1)
                        comm.Barrier()
                        began = time.perf_counter()
                        call()
                        times[way].append(comm.allreduce(time.perf_counter() - began, MPI.MAX))
                comm.Barrier()
                noted, wire = axis.ledger.sent(op=name), int(SENT.read_text())
                for _ in range(WIRE_CALLS):
                    ways[name]["ours"]()
                comm.Barrier()
                wire = int(SENT.read_text()) - wire
                noted = comm.allreduce(axis.ledger.sent(op=name) - noted)
                found[f"{name} {size}"] = {
                    "times": {way: statistics.median(all_[1:]) for way, all_ in times.items()},
                    "wire": wire / noted,
                }
        library = MPI.Get_library_version().split(",")[0].splitlines()[0]
        if mesh.rank == 0:
            print(json.dumps({"library": library, "found": found}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kilobytes", type=int, nargs="+", default=[64, 1000, 8000, 64000])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--wire", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.kilobytes, options.repeats)
        return
    same = ["--kilobytes", *map(str, options.kilobytes), "--repeats", str(options.repeats)]
    for ranks in options.ranks:
        job = children.mpirun(ranks, [sys.executable, __file__, "--worker", *same]), TCP if options.wire else {}
        result = children.result(f"{ranks} ranks", children.run(f"{ranks} ranks", [job], TIME_LIMIT))
        print(f"{ranks} ranks, {result['library']}{', TCP' if options.wire else ''}")
        for what, each in result["found"].items():
            name, size = what.split()
            ours, *bare = each["times"].values()
            best = min(bare)
            wire = f"; {each['wire']:.3f} bytes on the wire to one of the ledger" if options.wire else ""
            print(
                f"  {name:14} {int(size):6} kB: {1e3 * ours:8.3f} ms, bare {1e3 * best:8.3f} ms: "
                f"{best / ours:.2f} times as fast{wire}"
            )


if __name__ == "__main__":
    main()
