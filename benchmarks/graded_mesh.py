"""Iterations of L-BFGS with and without the Riesz map of the mass matrix, on uniform and graded meshes of DOLFINx.

    mpirun -n 2 python benchmarks/graded_mesh.py [--cells 16 32 64]

The unknowns are the logarithm m of the coefficient of an elliptic equation on the unit square, in linear elements:
minimise half the integral of ``(u - data)^2 + 1e-4 m^2``, where ``-div(exp(m) grad u) = 10``, u = 0 on the boundary.
A graded mesh has the nodes of the uniform one at the third powers of their coordinates.  Iterations are those after
which the value is nearer to the minimum than a millionth of the start's.  Needs DOLFINx with petsc4py (pip's
dolfinx-solver-real), and mpishard beside it.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ufl
from dolfinx import fem
from dolfinx import mesh as meshes
from dolfinx.fem import petsc
from mpi4py import MPI
from petsc4py import PETSc

import mpishard

POWERS = {"uniform": 1, "graded": 3}
NEAR = 1e-6
TO_MINIMUM, MOST = 120, 400  # iterations
DIRECT = {"ksp_type": "preonly", "pc_type": "lu", "pc_factor_mat_solver_type": "mumps"}


class Model:
    """The misfit and its gradient by the values that this rank owns, and the mass matrix of these."""

    def __init__(self, cells: int, power: int) -> None:
        domain = meshes.create_unit_square(MPI.COMM_WORLD, cells, cells)
        domain.geometry.x[:, :2] **= power
        space = fem.functionspace(domain, ("Lagrange", 1))
        self.owned = space.dofmap.index_map.size_local
        self.m, self.u, adjoint, data = (fem.Function(space) for _ in range(4))
        trial, test = ufl.TrialFunction(space), ufl.TestFunction(space)
        x = ufl.SpatialCoordinate(domain)
        edge = fem.locate_dofs_geometrical(
            space, lambda x: np.isclose(x[:2], 0).any(axis=0) | np.isclose(x[:2], 1).any(axis=0)
        )
        bcs = [fem.dirichletbc(0.0, edge, space)]
        equation = ufl.exp(self.m) * ufl.inner(ufl.grad(trial), ufl.grad(test)) * ufl.dx
        misfit = 0.5 * (self.u - data) ** 2 * ufl.dx + 0.5e-4 * self.m**2 * ufl.dx

        def solver(right: Any, found: Any) -> petsc.LinearProblem:
            return petsc.LinearProblem(
                equation, right, bcs=bcs, u=found, petsc_options=DIRECT, petsc_options_prefix=f"graded_{id(self)}_"
            )

        self.forward = solver(10.0 * test * ufl.dx, self.u)
        self.backward = solver(-(self.u - data) * test * ufl.dx, adjoint)
        self.value = fem.form(misfit)
        self.gradient = fem.form(
            ufl.exp(self.m) * ufl.inner(ufl.grad(self.u), ufl.grad(adjoint)) * test * ufl.dx
            + 1e-4 * self.m * test * ufl.dx
        )
        self.m.interpolate(fem.Expression(ufl.sin(3 * x[0]) * ufl.cos(4 * x[1]), space.element.interpolation_points))
        self.forward.solve()
        data.x.array[:] = self.u.x.array
        self.mass = petsc.assemble_matrix(fem.form(trial * test * ufl.dx))
        self.mass.assemble()
        self.inverse = PETSc.KSP().create(domain.comm)
        self.inverse.setOperators(self.mass)
        self.inverse.setType("cg")
        self.inverse.getPC().setType("jacobi")
        self.inverse.setTolerances(rtol=1e-12)

    def misfit(self, values: np.ndarray) -> tuple[float, np.ndarray]:
        self.m.x.array[: self.owned] = values
        self.m.x.scatter_forward()
        self.forward.solve()
        self.backward.solve()
        found = petsc.assemble_vector(self.gradient)
        found.ghostUpdate(addv=PETSc.InsertMode.ADD, mode=PETSc.ScatterMode.REVERSE)
        return fem.assemble_scalar(self.value), found.array[: self.owned].copy()

    def riesz(self) -> mpishard.RieszMap:
        given, found = self.mass.createVecs()

        def by(function: Any) -> Any:
            def called(values: np.ndarray) -> np.ndarray:
                given.array[:] = values
                function(given, found)
                return found.array.copy()

            return called

        return mpishard.RieszMap(by(self.mass.mult), by(self.inverse.solve))


def values_of(
    model: Model, mesh: mpishard.Mesh, riesz: mpishard.RieszMap | None, near: float, most: int
) -> list[float]:
    """The value at the start and after each iteration, to the first one that is at most `near`."""
    start = np.zeros(model.owned)
    values = [mesh.world.comm.allreduce(model.misfit(start)[0])]

    def add(intermediate_result: mpishard.OptimizeResult) -> bool:
        values.append(intermediate_result.fun)
        return values[-1] <= near

    mpishard.minimize(
        model.misfit, mpishard.Partition(start, mesh), method="L-BFGS", mesh=mesh, reduction="sum", inner_product=riesz,
        callback=add, options={"gtol": 0, "ftol": 0, "maxiter": most},
    )  # fmt: skip
    return values


def counts(model: Model, mesh: mpishard.Mesh) -> tuple[str, str]:
    """The iterations to near the minimum, with the Riesz map and without."""
    values = values_of(model, mesh, model.riesz(), -np.inf, TO_MINIMUM)
    near = values[-1] + NEAR * (values[0] - values[-1])
    without = values_of(model, mesh, None, near, MOST)
    return str(next(number for number, value in enumerate(values) if value <= near)), (
        str(len(without) - 1) if without[-1] <= near else f"> {MOST}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[16, 32, 64], help="along a side")
    options = parser.parse_args()
    with mpishard.Mesh(space=MPI.COMM_WORLD) as mesh:
        if mesh.rank == 0:
            print(f"{'cells':>9} {'mesh':>8} {'Riesz map':>10} {'without':>8}")
        for cells in options.cells:
            for name, power in POWERS.items():
                words = counts(Model(cells, power), mesh)
                if mesh.rank == 0:
                    print(f"{cells:>7}^2 {name:>8} {words[0]:>10} {words[1]:>8}", flush=True)


if __name__ == "__main__":
    main()
