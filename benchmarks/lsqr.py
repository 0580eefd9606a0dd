"""mpirun -n 2 python benchmarks/lsqr.py [--rows M] [--columns N] [--elements K]

Iterations and time of `mpishard.lsqr` and `mpishard.cgls` beside SciPy's LSQR, which runs on rank 0 while the other
ranks sleep: sparse rows of K random elements, whose columns have sizes from 1 to `--spread`, and a random right-hand
side.  The problem is the same on any number of ranks.  The default takes seconds; ``--rows 1e7 --columns 1e6 --elements
4`` takes about 4 GB.

It ends with 1 if the solution of LSQR is not SciPy's, or its iterations differ by more than one, or 2 %: with so many
rows SciPy's own count depends on their order.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

import mpishard
from mpishard.layout.boxes import split

_BLOCK = 10_000  # rows of one seed


def rows_of(first: int, stop: int, columns: int, elements: int, sizes: Any) -> tuple[Any, Any]:
    """Rows of the matrix, and of the right-hand side; blocks of rows are random by their number."""
    from scipy.sparse import csr_matrix

    data, where, right = [], [], []
    for block in range(first // _BLOCK, -(-stop // _BLOCK)):
        random = np.random.default_rng([1, block])
        begin, end = max(first, block * _BLOCK) - block * _BLOCK, min(stop - block * _BLOCK, _BLOCK)
        places = random.integers(0, columns, (_BLOCK, elements), dtype=np.int32)[begin:end]
        data.append(random.standard_normal((_BLOCK, elements))[begin:end] * sizes[places])
        where.append(places)
        right.append(random.standard_normal(_BLOCK)[begin:end])
    starts = np.arange(stop - first + 1, dtype=np.int64) * elements
    values, places = (np.concatenate(each).reshape(-1) for each in (data, where))
    return csr_matrix((values, places, starts), shape=(stop - first, columns)), np.concatenate(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=20_000)
    parser.add_argument("--columns", type=float, default=2_000)
    parser.add_argument("--elements", type=int, default=5, help="of a row")
    parser.add_argument("--spread", type=float, default=10.0, help="the largest size of a column")
    parser.add_argument("--tolerance", type=float, default=1e-8, help="atol and btol")
    given = parser.parse_args()
    rows, columns = int(given.rows), int(given.columns)
    ends = {"atol": given.tolerance, "btol": given.tolerance}
    sizes = np.random.default_rng(0).uniform(0, np.log(given.spread), columns)
    np.exp(sizes, out=sizes)

    mesh = mpishard.Mesh()
    offsets = split(rows, mesh.size)
    matrix, right = rows_of(*offsets[mesh.rank : mesh.rank + 2], columns, given.elements, sizes)
    found = {}
    for solver in (mpishard.lsqr, mpishard.cgls):
        solver(matrix, right, iter_lim=1, mesh=mesh)  # compiles
        mesh.world.barrier()
        began = time.perf_counter()
        result = solver(matrix, right, mesh=mesh, **ends)
        found[f"mpishard {solver.__name__}, {mesh.size} ranks"] = result, (time.perf_counter() - began) / result.itn
    del matrix, right
    good = True
    if mesh.rank == 0:
        from scipy.sparse.linalg import lsqr

        matrix, right = rows_of(0, rows, columns, given.elements, sizes)
        began = time.perf_counter()
        x, istop, itn, r1norm, *_ = lsqr(matrix, right, **ends)
        seconds = (time.perf_counter() - began) / itn
        print(f"{rows:,} rows, {columns:,} columns, {given.elements} elements a row, to {given.tolerance:g}")
        print(f"{'':26}{'istop':>6}{'iterations':>11}{'|b - A x|':>20}{'x apart':>13}{'s/iteration':>12}{'ratio':>6}")
        print(f"{'SciPy, 1 rank':26}{istop:>6}{itn:>11}{r1norm:>20.12e}{'':13}{seconds:>12.4g}")
        for name, (own, taken) in found.items():
            apart = np.linalg.norm(own.x - x) / np.linalg.norm(x)
            print(
                f"{name:26}{own.istop:>6}{own.itn:>11}{own.r1norm:>20.12e}{apart:>13.1e}{taken:>12.4g}"
                f"{taken / seconds:>6.2f}",
                flush=True,
            )
            near = abs(own.itn - itn) <= max(1, itn // 50)
            good = good and own.istop == istop and near and apart < 1e3 * given.tolerance
    done = mesh.world.comm.Ibarrier()
    while not done.Test():
        time.sleep(0.01)
    sys.exit(0 if mesh.world.allgather_object(good)[0] else 1)


if __name__ == "__main__":
    main()
