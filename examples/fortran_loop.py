"""mpirun -n 4 python examples/fortran_loop.py

A Fortran code owns the loop, and asks a bounded quasi-Newton method for the next point: reverse communication.  Each
rank computes its part of the value and gradient in examples/fortran_loop.f90, which gfortran compiles first.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpishard

SOURCE = Path(__file__).with_suffix(".f90")
DOUBLES = ctypes.POINTER(ctypes.c_double)
Ask = ctypes.CFUNCTYPE(ctypes.c_int, DOUBLES)
Tell = ctypes.CFUNCTYPE(None, ctypes.c_double, DOUBLES)


def compiled(folder: str) -> Any:
    """The Fortran code as a shared library."""
    library = Path(folder) / "libfit.so"
    command = ["gfortran", "-O2", "-shared", "-fPIC", "-J", folder, "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def callbacks(optimizer: mpishard.ReverseCommunication, size: int) -> tuple[Any, Any, list[Exception]]:
    """The functions that Fortran calls, and the errors in them, after which `ask` ends the loop."""
    errors: list[Exception] = []

    def guarded(action: Callable[[], int]) -> int:
        try:
            return 0 if errors else action()
        except Exception as error:  # a function that C calls cannot raise
            errors.append(error)
            return 0

    def ask(x: Any) -> int:
        def action() -> int:
            request = optimizer.ask()
            if request is not None:
                np.ctypeslib.as_array(x, (size,))[:] = request.x
            return int(request is not None)

        return guarded(action)

    def tell(value: float, gradient: Any) -> None:
        def action() -> int:
            optimizer.tell(value, np.ctypeslib.as_array(gradient, (size,)))
            return 0

        guarded(action)

    return Ask(ask), Tell(tell), errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=50, help="number of unknowns (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the field")
    options = parser.parse_args()
    if shutil.which("gfortran") is None:
        sys.exit("this example compiles a Fortran code: apt install gfortran")

    truth = np.abs(np.random.default_rng(options.seed).standard_normal(options.size))
    with mpishard.Mesh() as mesh, tempfile.TemporaryDirectory() as folder:
        optimizer = mpishard.ReverseCommunication(
            "L-BFGS-B", np.zeros(options.size), bounds=(0, None), options={"ftol": 0.0}, mesh=mesh, reduction="sum"
        )
        ask, tell, errors = callbacks(optimizer, options.size)
        evaluations = ctypes.c_int()
        compiled(folder).fit(
            options.size, mesh.rank, mesh.size, truth.ctypes.data_as(DOUBLES), ask, tell, ctypes.byref(evaluations)
        )
        if errors:
            raise errors[0]
        result = optimizer.result
        error = float(abs(result.x - truth).max())
        passed = result.success and error < 1e-2 and evaluations.value == result.nfev
        if mesh.rank == 0:
            print(f"{result.message}; {evaluations.value} evaluations")
            print(f"{'PASS' if passed else 'FAIL'}: largest error {error:.2g}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
