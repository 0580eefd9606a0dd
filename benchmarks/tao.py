"""A bounded problem of ten million unknowns: L-BFGS-B of mpishard against PETSc's TAO, and against SciPy with a gather.

    python benchmarks/tao.py [time] [memory] [--percent 30|50] [--unknowns N] [--repeats N] [--ranks N ...]
                             [--kinds KIND ...] [--petsc COMMAND]

The problem is Rosenbrock's function of pairs of unknowns, of which each rank has its own ones, in bounds; 30
iterations with a history of 10 from one start.  --percent 50, the default: half of the unknowns are at a bound from
the tenth iteration on, up to 91 % before; 30: at least 12 % in the first iterations, and 30 % from the eleventh
on.  time: seconds an iteration on 2 ranks, beside the evaluations of the function, of which methods take different
numbers, and the processor time of the first rank, which on one rank says something on a busy machine, too; runs take
turns, figures are medians.  memory: by how much the memory of a rank grows until the history is full, on 1, 2, 4 and 8
ranks, in bytes an unknown.

All run with small pages, as PETSc's are: on a virtual machine the first touch of each huge page may take milliseconds,
in which its host finds memory.  And the C library keeps the memory of freed arrays of up to 32 MB, so that the
temporary arrays of the function cost all of them the same.

mpishard has the unknowns in one of three forms: in its own slabs (kind mpishard), as a Partition of the same slabs
(runs), or as one of pairs that are dealt out at random and numbered by ids (ids).

TAO's BLMVM and BQNLS, and SciPy's L-BFGS-B on the first rank with the point scattered and the gradient gathered for
each evaluation, run in an environment of their own, since PETSc wants the MPI that it was built with.  COMMAND begins
them, with {ranks} for their number; by default that of Debian's python3-petsc4py, python3-mpi4py and python3-scipy:
"/usr/bin/mpirun --oversubscribe -n {ranks} /usr/bin/python3".  Where variables of another MPI are set, begin it with
"env -i PATH=/usr/bin:/bin HOME=/tmp" and those of MEMORY below; without the package petsc-dev it needs PETSC_DIR, the
folder of petsc4py's "lib" below /usr/lib/petscdir; as root OMPI_ALLOW_RUN_AS_ROOT=1 and
OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.  PETSc of pip's dolfinx-solver-real runs under pip's mpich, with the folder lib of its
environment in LD_LIBRARY_PATH.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import children
from tao_problem import HISTORY, ITERATIONS

FOLDER = Path(__file__).resolve().parent
PETSC = "/usr/bin/mpirun --oversubscribe -n {ranks} /usr/bin/python3"
OURS = {"mpishard": "mpishard", "runs": "mpishard, Partition", "ids": "mpishard, Partition by ids"}
KINDS = {**OURS, "blmvm": "TAO, BLMVM", "bqnls": "TAO, BQNLS", "scipy": "SciPy with a gather"}
RANKS = (1, 2, 4, 8)
TIME_LIMIT = 1800
MEMORY = {"NUMPY_MADVISE_HUGEPAGE": "0", "MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "1000000000"}


def by_mpishard(kind: str, unknowns: int, iterations: int, percent: int) -> None:
    """One run of a kind; on every rank."""
    import numpy as np
    from tao_problem import LOWER, Rosenbrock, report, rows_of, scattered, start, upper_bounds

    import mpishard

    def run(pairs: int, iterations: int) -> tuple[Rosenbrock, Any, float, float]:
        rank, size = mesh.tensor.rank, mesh.tensor.size
        number = scattered(rank, size, 2 * pairs) if kind == "ids" else np.arange(*rows_of(rank, size, 2 * pairs))
        own, x = start(number, percent), None
        if kind == "mpishard":
            spec = mpishard.ParameterSpec("x", (pairs, 2), tensor_dim=0)
            x = mpishard.FlatParameters([spec], np.float64, place=mesh.place)
            x["x"][...] = own
            own, bounds = x["x"], (LOWER, upper_bounds(np.arange(pairs), percent))
        else:
            ids = np.stack([2 * number, 2 * number + 1], axis=1) if kind == "ids" else None
            x, bounds = mpishard.Partition(own, mesh, ids=ids), (LOWER, upper_bounds(number, percent))
            del ids
        slope, function = np.empty_like(own), Rosenbrock()
        del number, own
        mesh.world.barrier()
        began, processor = time.perf_counter(), time.process_time()
        found = mpishard.minimize(
            lambda x: (function(x["x"] if kind == "mpishard" else x, slope), slope),
            x,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxiter": iterations, "maxcor": HISTORY, "ftol": 0, "gtol": 0},
            mesh=mesh,
            reduction="sum",
        )
        return function, found, time.perf_counter() - began, time.process_time() - processor

    with mpishard.Mesh(data=1, tensor=-1) as mesh:
        run(1000, 5)  # compiles
        before = children.peak_bytes()
        function, found, seconds, processor = run(unknowns // 2, iterations)
        most = mesh.world.all_reduce(np.array([children.peak_bytes() - before]), op="max")
        if mesh.rank == 0:
            report(function, seconds, processor, found.nit, found.fun, int(most[0]))


def measured(kind: str, ranks: int, options: argparse.Namespace, iterations: int) -> dict[str, Any]:
    """One run of a kind, in processes of its own."""
    size, percent = str(options.unknowns), str(options.percent)
    if kind in OURS:
        given = ["--rank", str(iterations), "--unknowns", size, "--percent", percent, "--kinds", kind]
        command = children.mpirun(ranks, [sys.executable, __file__, *given])
    else:
        peer = shlex.split(options.petsc.format(ranks=ranks))
        command = [*peer, str(FOLDER / "tao_petsc.py"), kind, size, str(iterations), percent]
    what = f"{KINDS[kind]} on {ranks} ranks"
    return children.result(what, children.run(what, [(command, MEMORY)], TIME_LIMIT))


def times(options: argparse.Namespace) -> None:
    ranks = options.ranks[0] if options.ranks else 2
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in options.kinds}
    for _ in range(options.repeats):
        for kind, found in runs.items():
            found.append(measured(kind, ranks, options, ITERATIONS))
    print(
        f"{f'ranks: {ranks}':26} {'beside the function':>20} {'processor':>20} {'function':>9} {'iterations':>11} "
        f"{'calls':>6} {'value':>13}"
    )
    for kind, found in runs.items():
        spreads = []
        for total in ([run["seconds"] - run["function"] for run in found], [run["processor"] for run in found]):
            each = [1e3 * seconds / run["iterations"] for seconds, run in zip(total, found, strict=True)]
            spreads.append(f"{statistics.median(each):.0f} ms ({min(each):.0f} to {max(each):.0f})")
        calls = statistics.median(1e3 * run["function"] / run["calls"] for run in found)
        last = found[-1]
        print(
            f"{KINDS[kind]:26} {spreads[0]:>20} {spreads[1]:>20} {calls:6.0f} ms {last['iterations']:11d} "
            f"{last['calls']:6d} {last['value']:13.6g}"
        )


def memory(options: argparse.Namespace) -> None:
    many = options.ranks or RANKS
    print(f"{'bytes an unknown, a rank':26}" + "".join(f"{ranks:>7} ranks" for ranks in many))
    for kind in options.kinds:
        print(f"{KINDS[kind]:26}", end="", flush=True)
        for ranks in many:  # each takes a while
            found = measured(kind, ranks, options, HISTORY + 2)
            print(f"{found['bytes'] / options.unknowns:13.1f}", end="", flush=True)
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="time|memory", help="default: both")
    parser.add_argument("--percent", type=int, choices=[30, 50], default=50, help="of the unknowns that end at a bound")
    parser.add_argument("--unknowns", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 2 for time, 1 2 4 8 for memory")
    parser.add_argument("--petsc", default=PETSC, help="what runs a script in the environment of PETSc")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rank", type=int, metavar="ITERATIONS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        by_mpishard(options.kinds[0], options.unknowns, options.rank, options.percent)
        return
    parts = {"time": times, "memory": memory}
    if unknown := [part for part in options.parts if part not in parts]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(parts)}")
    for part in options.parts or parts:
        parts[part](options)


if __name__ == "__main__":
    main()
