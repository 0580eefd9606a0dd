"""python benchmarks/laplace.py [--cells N] [--observations M] [--ranks R ...] [--power P ...] [--slepc COMMAND]

`mpishard.laplace` in one process: seconds of processor time of the Hessian products, and of all around them.  The
unknown is the source of a diffusion on a square of N * N cells, of which M cells are observed; the prior is a
`BiLaplacianPrior`.  A product is two solves by a sparse factorisation.  Each rank is tried with each number of power
iterations.

--slepc: beside SLEPc's Krylov-Schur method with a factorisation of the prior's precision, by COMMAND, a Python with
slepc4py and SciPy, such as "env/bin/python3": by how much each eigenvalue of the double pass is off, relatively.  It
ends with 1 if an eigenvalue is off by more than 1e-8 where the rank is that of the Hessian, or is above SLEPc's by more
than that: the double pass projects, so that what it lacks makes eigenvalues smaller.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import splu
from threadpoolctl import threadpool_limits

Array = np.ndarray
SHOWN = (1, 2, 5, 10, 25, 50, 75, 100, 150, 200)
DIFFUSION = 30.0  # over how many cells, squared


class Products:
    """The Hessian of the misfit times vectors; counted, with their seconds."""

    def __init__(self, forward: Any, places: Array, noise: float) -> None:
        self._solve = splu(forward, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True}).solve
        self._places, self._weight = places, noise**-2
        self.count, self.seconds = 0, 0.0

    def __call__(self, x: Any, direction: Array) -> Array:
        begin = time.process_time()
        seen = np.zeros_like(direction)
        seen[self._places] = self._weight * self._solve(direction)[self._places]
        found = self._solve(seen)
        self.seconds += time.process_time() - begin
        self.count += 1
        return found


class Found(NamedTuple):
    """What a method has found, and took."""

    eigenvalues: Array
    products: int
    product_seconds: float
    seconds: float


def laplacian(cells: int) -> Any:
    """Minus the second differences of a square, with a slope of 0 at the edges."""
    differences = sparse.diags([-1.0, 1.0], [0, 1], (cells - 1, cells))
    along, one = differences.T @ differences, sparse.identity(cells)
    return (sparse.kron(along, one) + sparse.kron(one, along)).tocsc()


def measured(products: Products, method: Callable[[], Array]) -> Found:
    products.count, products.seconds = 0, 0.0
    begin = time.process_time()
    eigenvalues = method()
    return Found(eigenvalues, products.count, products.seconds, time.process_time() - begin)


def by_slepc(folder: Path, wanted: int) -> None:
    """In a process of its own, of the problem in a folder; prints what it has found."""
    import slepc4py

    slepc4py.init([sys.argv[0]])
    from petsc4py import PETSc
    from slepc4py import SLEPc

    forward, precision = (sparse.load_npz(folder / f"{name}.npz") for name in ("forward", "precision"))
    places, noise = np.load(folder / "places.npy"), float(np.load(folder / "noise.npy"))
    products, size = Products(forward, places, noise), forward.shape[0]

    class Hessian:
        def mult(self, matrix: Any, vector: Any, out: Any) -> None:
            out.array[:] = products(None, vector.getArray(readonly=True))

    hessian = PETSc.Mat().createPython((size, size), Hessian())
    rows = precision.tocsr()
    indices = rows.indptr.astype(PETSc.IntType), rows.indices.astype(PETSc.IntType)
    inner = PETSc.Mat().createAIJ((size, size), csr=(*indices, rows.data))
    solver = SLEPc.EPS().create()
    solver.setOperators(hessian, inner)
    solver.setProblemType(SLEPc.EPS.ProblemType.GHEP)
    solver.setWhichEigenpairs(SLEPc.EPS.Which.LARGEST_REAL)
    solver.setDimensions(wanted)
    solver.setTolerances(1e-12, 1000)
    factorised = solver.getST().getKSP()
    factorised.setType("preonly")
    factorised.getPC().setType("cholesky")
    factorised.getPC().setFactorSolverType("mumps")
    solver.setFromOptions()

    def solve() -> Array:
        solver.solve()
        return np.array([solver.getEigenvalue(each).real for each in range(min(wanted, solver.getConverged()))])

    found = measured(products, solve)
    print(json.dumps(found._replace(eigenvalues=found.eigenvalues.tolist())))


def of_slepc(forward: Any, precision: Any, places: Array, noise: float, wanted: int, command: str) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        for name, matrix in (("forward", forward), ("precision", precision)):
            sparse.save_npz(Path(folder) / f"{name}.npz", matrix, compressed=False)
        for name, array in (("places", places), ("noise", noise)):
            np.save(Path(folder) / f"{name}.npy", array)
        given = [*shlex.split(command), __file__, "--of", folder, "--ranks", str(wanted)]
        ran = subprocess.run(given, capture_output=True, text=True, timeout=3000)
    if ran.returncode:
        sys.exit(f"{command} ended with {ran.returncode}:\n{ran.stderr}")
    eigenvalues, *taken = json.loads(ran.stdout.splitlines()[-1])
    return Found(np.array(eigenvalues), *taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=64, help="in each dimension")
    parser.add_argument("--observations", type=int, default=40)
    parser.add_argument("--length", type=float, default=16.0, help="of the prior's correlation, in cells")
    parser.add_argument("--noise", type=float, default=0.1, help="beside the prior's standard deviation, 1")
    parser.add_argument("--ranks", type=int, nargs="+", default=[10, 20, 40])
    parser.add_argument("--power", type=int, nargs="+", default=[0], help="iterations")
    parser.add_argument("--oversampling", type=int, default=10)
    parser.add_argument("--slepc", default="", metavar="COMMAND")
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)  # the folder for `by_slepc`
    given = parser.parse_args()
    if given.of:
        by_slepc(given.of, *given.ranks)
        return 0

    import mpishard

    shape = given.cells, given.cells
    size, differences = given.cells**2, laplacian(given.cells)
    forward = (sparse.identity(size) + DIFFUSION * differences).tocsc()
    places = np.sort(np.random.default_rng(0).choice(size, given.observations, replace=False))
    prior = mpishard.BiLaplacianPrior(shape, correlation_length=given.length)
    # R as in the notes of the prior; A of ones is ones, so that the factor S A^-1 of ones is S.
    elliptic = sparse.identity(size) + given.length**2 / 8 * differences
    scale = sparse.diags(1 / prior.factor(np.ones(size)))
    precision = (scale @ elliptic @ elliptic @ scale).tocsr()
    test = np.random.default_rng(1).standard_normal(size)
    apart = np.linalg.norm(prior.precision(test) - precision @ test) / np.linalg.norm(precision @ test)
    assert apart < 1e-12, apart

    products = Products(forward, places, given.noise)
    columns: dict[str, Found] = {}
    for rank, power in itertools.product(given.ranks, given.power):

        def double_pass(rank: int = rank, power: int = power) -> Array:
            options = {"rank": rank, "oversampling": given.oversampling, "power_iterations": power}
            return mpishard.laplace(np.zeros(size), products, prior, **options).eigenvalues

        if not columns:
            double_pass(1)  # compiles
        columns[f"rank {rank}{f', {power}' * bool(power)}"] = measured(products, double_pass)
    exact = None
    if given.slepc:
        exact = of_slepc(forward, precision, places, given.noise, max(given.ranks), given.slepc)
        columns = {"SLEPc": exact, **columns}
    return report(columns, exact, given)


def report(columns: dict[str, Found], exact: Found | None, given: argparse.Namespace) -> int:
    """Print a table; return 1 if eigenvalues are wrong."""

    def row(label: object, cells: Iterable[str]) -> None:
        print(f"{label:>22}" + "".join(f"{cell:>12}" for cell in cells))

    def cell(found: Found, place: int) -> str:
        if place > len(found.eigenvalues):
            return ""
        value = found.eigenvalues[place - 1]
        if exact is None or found is exact:
            return f"{value:.5g}"
        return f"{value / exact.eigenvalues[place - 1] - 1:.1e}"

    more = "; by how much eigenvalues are off SLEPc's, relatively" if exact else ""
    print(f"{given.cells**2:,} unknowns, {given.observations} observations, oversampling {given.oversampling}{more}")
    row("eigenvalue", columns)
    for place in (place for place in SHOWN if place <= max(given.ranks)):
        row(place, (cell(found, place) for found in columns.values()))
    row("products", (f"{found.products}" for found in columns.values()))
    row("seconds of a product", (f"{found.product_seconds / found.products:.3f}" for found in columns.values()))
    row("seconds of the rest", (f"{found.seconds - found.product_seconds:.2f}" for found in columns.values()))
    good = True
    for found in columns.values() if exact is not None else ():
        assert exact is not None
        both = min(len(found.eigenvalues), len(exact.eigenvalues))
        off = found.eigenvalues[:both] / exact.eigenvalues[:both] - 1
        is_complete = len(found.eigenvalues) == given.observations
        good = good and off.max() < 1e-8 and (not is_complete or off.min() > -1e-8)
    return 0 if good else 1


if __name__ == "__main__":
    with threadpool_limits(1):
        sys.exit(main())
