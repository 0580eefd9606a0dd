"""What grows with the number of ranks: start-up by parts, memory, threads and collectives of a rank, on one machine.

    python benchmarks/many_ranks.py [--ranks 2 4 8 16 32 64]

A small GPT takes a few steps on every number of ranks.  Seconds are of the slowest rank since its process began;
with more ranks than cores they share these, so that a time divided by the ranks of a core is what one rank needs.
CPU is the processor time of a rank until its first step is over, in seconds, the mean of all ranks.  Memory is the
proportional share (PSS) of the rank with most.  Collectives are those of one step of rank 0, with the
bytes that it sends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import children

TIME_LIMIT = 500
STEPS = 4
PARTS = ("import", "mesh", "model", "first step")


def since_start() -> float:
    """Seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def field(path: str, name: str) -> int:
    """A number of a file of ``name: number`` in /proc."""
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def work() -> None:
    """Of each rank; rank 0 prints a line of JSON."""
    times = {}
    import mpishard

    times["import"] = since_start()
    mesh = mpishard.Mesh()
    times["mesh"] = since_start()
    import numpy as np

    model = mpishard.nn.GPT(vocabulary_size=64, context_length=16, width=32, layers=2, heads=2, mesh=mesh)
    optimizer = mpishard.ZeRO1Optimizer(mpishard.AdamW(lr=1e-3), mesh)
    tokens = np.random.default_rng(mesh.rank).integers(0, 64, (2, 17))

    def step() -> None:
        model.loss_and_gradient(tokens[:, :-1], tokens[:, 1:])
        optimizer.step(model.parameters, count=32 * mesh.size)

    times["model"] = since_start()
    step()
    times["first step"] = since_start()
    processor = time.process_time()
    mesh.ledger.clear()
    for _ in range(STEPS):
        step()
    totals = mesh.ledger.totals.values()
    own = {
        "times": times,
        "processor": processor,
        "memory": field("/proc/self/smaps_rollup", "Pss") / 1024,
        "threads": field("/proc/self/status", "Threads"),
    }
    everyone = mesh.world.comm.gather(own)
    if mesh.rank == 0:
        found = {
            "times": {part: max(each["times"][part] for each in everyone) for part in PARTS},
            "processor": sum(each["processor"] for each in everyone) / mesh.size,
            "memory": max(each["memory"] for each in everyone),
            "threads": max(each["threads"] for each in everyone),
            "collectives": sum(total.calls for total in totals) / STEPS,
            "bytes": sum(total.sent for total in totals) / STEPS,
        }
        print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    if (options := parser.parse_args()).worker:
        work()
        return
    command = [sys.executable, __file__, "--worker"]
    children.run("2 ranks", [(children.mpirun(2, command), {})], TIME_LIMIT)  # fills the cache of compiled kernels
    print(f"{os.cpu_count()} cores; seconds until a part is over, of the slowest rank")
    print(
        f"{'ranks':>5} "
        + " ".join(f"{part:>10}" for part in PARTS)
        + "  CPU a rank  MB a rank  threads  collectives, bytes a step"
    )
    for ranks in options.ranks:
        # MPICH's ranks that wait let go of their core: there are more than cores.
        job = (children.mpirun(ranks, command), {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"})
        found = children.result(f"{ranks} ranks", children.run(f"{ranks} ranks", [job], TIME_LIMIT))
        parts = " ".join(f"{found['times'][part]:10.2f}" for part in PARTS)
        print(
            f"{ranks:5} {parts} {found['processor']:11.2f} {found['memory']:10.0f} {found['threads']:8} "
            f"{found['collectives']:12.1f} {found['bytes']:9,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
