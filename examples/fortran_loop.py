"""mpirun -n 4 python examples/fortran_loop.py

A Fortran code owns the loop and its part of MPI, and asks mpishard which point it wants next.

``fortran_loop.f90`` knows the heat at the end, and looks for the heat at the beginning, which is nowhere negative. Its
ranks divide the cells and exchange their edges by themselves. This file compiles it, and lends it ``ask`` and ``tell``
of an L-BFGS-B over all ranks as C functions. It needs gfortran and mpicc.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpishard

SOURCES = [Path(__file__).with_name(name) for name in ("fortran_loop.f90", "fortran_loop_mpi.c")]
WRONG = {1: "fewer cells than ranks", 2: "an MPI call failed", 3: "the misfit of this rank's cells is not finite"}

DOUBLES = ctypes.POINTER(ctypes.c_double)
ASK = ctypes.CFUNCTYPE(ctypes.c_int, DOUBLES)
TELL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_double, DOUBLES, ctypes.c_int)


def compile_sources(folder: str) -> None:
    """Make the library; by gfortran, with the flags that mpicc adds."""
    places = os.pathsep.join([f"{sys.prefix}/bin", os.environ.get("PATH", "")])  # an MPI of the wheels comes first
    for tool, package in {"gfortran": "apt-get install gfortran", "mpicc": "pip install mpich"}.items():
        if shutil.which(tool, path=places) is None:
            raise RuntimeError(f"{tool} is not on PATH; {package}, or the like")
    command = [str(shutil.which("mpicc", path=places)), "-shared", "-fPIC", "-O2", "-J", folder]
    command += [*map(str, SOURCES), "-o", f"{folder}/loop.so"]
    compiler = {"MPICH_CC": "gfortran", "OMPI_CC": "gfortran"}
    done = subprocess.run(command, env={**os.environ, **compiler}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")


def load(mesh: mpishard.Mesh, comm: MPI.Intracomm) -> ctypes.CDLL:
    """Compile on rank 0, load on all, which must see its temporary folder."""
    with tempfile.TemporaryDirectory() as own:
        folder, problem = comm.bcast(own), None
        try:
            if comm.rank == 0:
                compile_sources(folder)
        except RuntimeError as error:
            problem = error
        mesh.world.raise_if_any(problem)
        library = ctypes.CDLL(f"{folder}/loop.so")
        comm.Barrier()  # loaded by all, before it is removed
    library.invert.argtypes = [ctypes.c_int, ctypes.c_int, DOUBLES, ASK, TELL]
    return library


def invert(
    library: ctypes.CDLL, comm: MPI.Intracomm, readings: np.ndarray, optimizer: mpishard.ReverseCommunication
) -> mpishard.OptimizeResult:
    """Run the Fortran loop.  Collective over comm; an error of any rank is raised on all."""
    cells = readings.size
    errors: list[BaseException] = []  # C and Fortran know no exceptions: they wait here until Fortran has returned

    @ASK
    def ask(x: Any) -> int:
        try:
            request = optimizer.ask()
            if request is not None:
                np.ctypeslib.as_array(x, (cells,))[:] = request.x
            return int(request is not None)
        except BaseException as error:
            errors.append(error)
            return -1

    @TELL
    def tell(value: float, gradient: Any, status: int) -> int:
        try:
            problem = RuntimeError(f"invert: {WRONG[status]} (status {status})") if status else None
            optimizer.tell_outcome(value, np.ctypeslib.as_array(gradient, (cells,)), problem)
            return 0
        except BaseException as error:
            errors.append(error)
            return 1

    status = library.invert(comm.py2f(), cells, readings.ctypes.data_as(DOUBLES), ask, tell)
    if errors:
        raise errors[0]
    if status:
        raise RuntimeError(f"invert: {WRONG[status]} (status {status})")
    return optimizer.result


def diffuse(heat: np.ndarray) -> np.ndarray:
    """What the Fortran code computes, on the whole ring."""
    for _ in range(3):
        heat = heat + 0.1 * (np.roll(heat, 1) - 2 * heat + np.roll(heat, -1))
    return heat


def readings_and_minimizer(cells: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Readings, and the beginning that fits them best.

    The first half of the ring is hot. Thermometers in the middle of the other half read too little: d = A x - dip.
    The gradient at x is A (A x - d) = A dip. It is positive where the dip diffuses to; there x is 0, its bound. It is
    0 elsewhere. So x is the minimiser.
    """
    x, dip = np.zeros(cells), np.zeros(cells)
    x[: cells // 2] = np.random.default_rng(seed).uniform(1.0, 2.0, cells // 2)
    dip[3 * cells // 4 - 2 : 3 * cells // 4 + 2] = 1.0
    return diffuse(x) - dip, x


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=400, help="cells of the ring (default 400)")
    parser.add_argument("--broken", type=int, metavar="CELL", help="this cell has no reading: see the error")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    comm = MPI.COMM_WORLD  # of the Fortran code; the mesh has its own communicators
    readings, minimizer = readings_and_minimizer(options.cells, options.seed)
    if options.broken is not None:
        readings[options.broken] = np.nan
    with mpishard.Mesh(comm) as mesh:
        method = mpishard.LBFGSB(bounds=(0.0, None), gtol=1e-8, ftol=0)
        optimizer = mpishard.ReverseCommunication(method, np.ones(options.cells), mesh=mesh, reduction="sum")
        result = invert(load(mesh, comm), comm, readings, optimizer)
        error = np.abs(result.x - minimizer).max()
        passed = bool(result.success and error < 1e-6)
        if mesh.rank == 0:
            print(f"{result.message}: {result.nit} iterations, {result.nfev} evaluations on {mesh.size} ranks")
            print(f"{'PASS' if passed else 'FAIL'}: {error:.1e} from the minimiser; wanted: below 1e-6")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
