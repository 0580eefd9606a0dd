"""The problem of tao.py by PETSc's TAO, or by SciPy on the first rank with gathers and scatters around it.

    mpirun -n 2 python3 benchmarks/tao_petsc.py blmvm|bqnls UNKNOWNS ITERATIONS PERCENT [PETSc options]
    mpirun -n 2 python3 benchmarks/tao_petsc.py scipy UNKNOWNS ITERATIONS PERCENT

Needs petsc4py (Debian: python3-petsc4py; or pip's dolfinx-solver-real), mpi4py and SciPy, and not mpishard.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import children
import numpy as np
from mpi4py import MPI
from tao_problem import HISTORY, LOWER, Rosenbrock, report, rows_of, start, upper_bounds


def by_tao(method: str, unknowns: int, iterations: int, percent: int) -> None:
    import petsc4py

    prefix = "tao_blmvm_" if method == "blmvm" else "tao_bqnk_"
    # The history is called the one or the other, by the version of PETSc.
    history = [word for name in ("num_vecs", "hist_size") for word in (f"-{prefix}mat_lmvm_{name}", str(HISTORY))]
    petsc4py.init([sys.argv[0], *history, *sys.argv[5:]])
    from petsc4py import PETSc

    comm = PETSc.COMM_WORLD
    mpi = comm.tompi4py()
    first, end = rows_of(comm.rank, comm.size, unknowns)
    PETSc.Vec().createMPI((2, None), comm=comm).norm()  # with all that PETSc needs for itself
    before = children.peak_bytes()
    x = PETSc.Vec().createMPI((2 * (end - first), unknowns), comm=comm)
    number = np.arange(first, end)
    x.array[:] = start(number, percent).reshape(-1)
    lower, upper = x.duplicate(), x.duplicate()
    lower.set(LOWER)
    upper.array[:] = upper_bounds(number, percent).reshape(-1)
    del number
    function = Rosenbrock()

    def evaluate(tao: Any, point: Any, gradient: Any) -> float:
        own = function(point.getArray(readonly=True).reshape(-1, 2), gradient.getArray().reshape(-1, 2))
        return mpi.allreduce(own)

    tao = PETSc.TAO().create(comm)
    tao.setType(method)
    tao.setObjectiveGradient(evaluate, x.duplicate())
    tao.setVariableBounds(lower, upper)
    tao.setMaximumIterations(iterations)
    tao.setTolerances(gatol=0, grtol=0, gttol=0)
    tao.setFromOptions()
    mpi.Barrier()
    began, processor = time.perf_counter(), time.process_time()
    tao.solve(x)
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    most = mpi.allreduce(children.peak_bytes() - before, op=MPI.MAX)
    if comm.rank == 0:
        report(function, seconds, processor, tao.getIterationNumber(), tao.getObjectiveValue(), most)


def by_scipy(unknowns: int, iterations: int, percent: int) -> None:
    from scipy.optimize import Bounds, minimize

    mpi = MPI.COMM_WORLD
    first, end = rows_of(mpi.rank, mpi.size, unknowns)
    counts = [2 * (stop - begin) for begin, stop in (rows_of(rank, mpi.size, unknowns) for rank in range(mpi.size))]
    before = children.peak_bytes()
    own, slope, function = start(np.arange(first, end), percent), np.empty((end - first, 2)), Rosenbrock()

    def part() -> float:
        """Collective: the value of all, of the parts of the point on all ranks."""
        value = function(own, slope)
        return float(mpi.allreduce(value))

    seconds, processor, taken, value = 0.0, 0.0, 0, 0.0
    if mpi.rank == 0:
        whole = np.empty(unknowns)
        gradient = np.empty(unknowns)
        mpi.Gatherv(own, [whole, counts], 0)

        def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
            mpi.bcast(True)
            mpi.Scatterv([x, counts], own, 0)
            value = part()
            mpi.Gatherv(slope, [gradient, counts], 0)
            return value, gradient

        options = {"maxiter": iterations, "maxcor": HISTORY, "ftol": 0.0, "gtol": 0.0}
        box = Bounds(LOWER, upper_bounds(np.arange(unknowns // 2), percent).reshape(-1))
        began, processor = time.perf_counter(), time.process_time()
        result = minimize(evaluate, whole, jac=True, method="L-BFGS-B", bounds=box, options=options)
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        taken, value = result.nit, result.fun
        mpi.bcast(False)
    else:
        mpi.Gatherv(own, None, 0)
        while mpi.bcast(None):
            mpi.Scatterv(None, own, 0)
            part()
            mpi.Gatherv(slope, None, 0)
    most = mpi.allreduce(children.peak_bytes() - before, op=MPI.MAX)
    if mpi.rank == 0:
        report(function, seconds, processor, taken, value, most)


if __name__ == "__main__":
    if sys.argv[1] == "scipy":
        by_scipy(*map(int, sys.argv[2:5]))
    else:
        by_tao(sys.argv[1], *map(int, sys.argv[2:5]))
