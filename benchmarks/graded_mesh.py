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


def values_of(model: Model, mesh: mpishard.Mesh, riesz: mpishard.RieszMap | None) -> list[float]:
    """The value at the start and after each iteration."""
    start = np.zeros(model.owned)
    value, _ = model.misfit(start)
    values = [mesh.world.comm.allreduce(value)]
    mpishard.minimize(
        model.misfit, mpishard.Partition(start, mesh), method="L-BFGS", mesh=mesh, reduction="sum", inner_product=riesz,
        callback=lambda intermediate_result: values.append(intermediate_result.fun),
        options={"gtol": 0, "ftol": 0, "maxiter": 300},
    )  # fmt: skip
    return values


def first_below(limit: float, values: list[float]) -> str:
    """The number of the first value that is at most this, in words."""
    return next((str(number) for number, value in enumerate(values) if value <= limit), f"> {len(values) - 1}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", default=[16, 32, 64], help="along a side")
    options = parser.parse_args()
    with mpishard.Mesh(space=MPI.COMM_WORLD) as mesh:
        if mesh.rank == 0:
            print(f"{'cells':>9} {'mesh':>8} {'Riesz map':>10} {'without':>8}")
        for cells in options.cells:
            for name, power in POWERS.items():
                model = Model(cells, power)
                courses = [values_of(model, mesh, riesz) for riesz in (model.riesz(), None)]
                least = min(map(min, courses))
                near = least + NEAR * (courses[0][0] - least)
                if mesh.rank == 0:
                    words = [first_below(near, course) for course in courses]
                    print(f"{cells:>7}^2 {name:>8} {words[0]:>10} {words[1]:>8}", flush=True)


if __name__ == "__main__":
    main()
