"""Fields that other packages have distributed: as starts, and back; each package is skipped where it is missing."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mpishard
import mpishard.pyadjoint
from mpishard import Partition, minimize

PAGES = Path(__file__).parents[2] / "docs/how-to"
TIGHT = {"gtol": 1e-9, "ftol": 0, "maxiter": 2000}


@pytest.fixture
def tensor_mesh(comm):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        yield mesh


@pytest.fixture
def devito():
    """The package, which cuts its grids."""
    devito = pytest.importorskip("devito")
    before = devito.configuration["mpi"], devito.configuration["log-level"]
    devito.configuration["mpi"], devito.configuration["log-level"] = True, "ERROR"
    yield devito
    devito.configuration["mpi"], devito.configuration["log-level"] = before


SHOWN = {
    "pylops_mpi": ("partition-clients", "pylops-mpi"),
    "devito": ("partition-clients", "Devito"),
    "dolfinx": ("partition-clients", "DOLFINx"),
    "petsc4py": ("partition-clients", "PETSc"),
    "dolfinx_adjoint": ("pyadjoint", "My controls are fields on many ranks"),
}


@pytest.mark.parametrize("package", SHOWN)
def test_what_the_page_shows_runs(package, request, folder, monkeypatch):
    importlib.import_module("h5py")  # before DOLFINx, behind whose HDF5 it does not load
    request.getfixturevalue(package) if package == "devito" else pytest.importorskip(package)
    page, title = SHOWN[package]
    text = (PAGES / f"{page}.md").read_text("utf-8")
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    program = "\n".join(re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
    monkeypatch.chdir(folder)
    exec(compile(program, title, "exec"), {"__name__": "__main__"})


# Objects that have the attributes of those of the packages; the package is known by the module of their class.


class Distributed:
    """An array as those of pylops-mpi."""

    def __init__(self, local, comm, whole, axis=0, partition="SCATTER"):
        self.local_array, self.base_comm, self.global_shape, self.axis = local, comm, whole, axis
        self.local_shape, self.rank = local.shape, comm.rank
        self.partition = SimpleNamespace(name=partition)

    @property
    def local_shapes(self):
        return self.base_comm.allgather(self.local_shape)


Distributed.__module__ = "pylops_mpi.standin"


class GridFunction:
    """A function as those of Devito: the domain within a halo of one element."""

    def __init__(self, own, comm, whole, first):
        self._all = np.full([extent + 2 for extent in own.shape], -1.0)
        self.shape, self.shape_global = own.shape, whole
        self.local_indices = [
            slice(start, start + n) if n else slice(0, -1) for start, n in zip(first, own.shape, strict=True)
        ]
        self.grid = SimpleNamespace(distributor=SimpleNamespace(comm=comm))
        self.data[...] = own

    @property
    def data(self):
        return self._all[1:-1, 1:-1]

    @property
    def data_ro_domain(self):
        return self.data


GridFunction.__module__ = "devito.standin"


class Vector:
    """A vector as those of petsc4py, without ghosts and grid."""

    def __init__(self, own, comm):
        self._own, self.comm = own.copy(), SimpleNamespace(tompi4py=lambda: comm)

    def getArray(self, readonly=False):
        return self._own

    def setArray(self, values):
        self._own[...] = values

    def getDM(self):
        return None

    def localForm(self):
        return contextlib.nullcontext()

    def getSize(self):
        return self.comm.tompi4py().allreduce(self._own.size)

    def getOwnershipRange(self):
        stop = self.comm.tompi4py().scan(self._own.size)
        return stop - self._own.size, stop


Vector.__module__ = "petsc4py.standin"


def columns(comm, width=3):
    """Columns of an array, more on later ranks; the first rank has none if there are others."""
    counts = [width + rank if rank or comm.size == 1 else 0 for rank in range(comm.size)]
    whole = np.arange(4.0 * sum(counts)).reshape(4, -1)
    first = sum(counts[: comm.rank])
    return whole[:, first : first + counts[comm.rank]], whole


def test_a_function_on_a_grid_keeps_its_halo(comm, tensor_mesh):
    own, whole = columns(comm)
    first = comm.exscan(own.shape[1]) or 0
    field = GridFunction(own, comm, whole.shape, (0, first))
    start = Partition.of(field, tensor_mesh)
    assert start.shape == whole.shape and np.array_equal(start.local, own)
    assert start.put(own + 1) is field and np.array_equal(start.get(field), own + 1)
    assert field._all[0].max(initial=-1) == field._all[:, 0].max() == -1


def test_a_grid_that_was_not_cut_is_an_error(comm, tensor_mesh):
    from mpi4py import MPI

    field = GridFunction(np.zeros((4, 3)), MPI.COMM_NULL, (4, 3), (0, 0))
    if comm.size == 1:
        assert Partition.of(field, tensor_mesh).shape == (4, 3)
    else:
        with pytest.raises(ValueError, match=rf"tensor={comm.size}.*DEVITO_MPI=1"):
            Partition.of(field, tensor_mesh)


def test_a_state_in_time_is_no_unknown(comm, tensor_mesh):
    field = GridFunction(np.zeros((4, 3)), comm, (4, 3), (0, 0))
    field.is_TimeFunction = True
    with pytest.raises(TypeError, match="GridFunction .*each time step: invert for a Function"):
        Partition.of(field, tensor_mesh)


def test_a_vector_may_be_numbered_by_the_application(comm, tensor_mesh):
    own = np.arange(2.0 + comm.rank)
    field = Vector(own, comm)
    start = Partition.of(field, tensor_mesh)
    assert start.parts[comm.rank] == (field.getOwnershipRange(),) and np.array_equal(start.local, own)
    total, first = field.getSize(), field.getOwnershipRange()[0]
    numbers = total - 1 - np.arange(first, first + own.size)
    turned = Partition.of(field, tensor_mesh, ids=numbers)
    whole = np.concatenate(comm.allgather(own))
    assert np.array_equal(np.concatenate(comm.allgather(turned.owned)), whole[::-1])
    turned.put(own + 1)
    assert np.array_equal(start.get(field), own + 1)


@pytest.mark.parametrize("order", [1, -1])
def test_a_field_is_a_partition_in_any_order_of_the_ranks(comm, tensor_mesh, order):
    theirs = comm.Split(0, order * comm.rank)
    own, whole = columns(theirs)
    field = Distributed(own.copy(), theirs, whole.shape, axis=1)
    start = Partition.of(field, tensor_mesh)
    assert start.shape == whole.shape and start.field is field
    found = minimize(
        lambda x: (0.5 * ((x - own - 1) ** 2).sum(), x - own - 1), start, mesh=tensor_mesh, reduction="sum"
    )
    assert start.put(found.x) is field and np.allclose(field.local_array, own + 1)
    other = Distributed(np.zeros_like(own), theirs, whole.shape, axis=1)
    assert start.put(own, other) is other and np.array_equal(start.get(other), own)
    assert np.allclose(field.local_array, own + 1)
    start.get(other)[...] = 9
    assert np.array_equal(other.local_array, own)
    theirs.Free()


def test_other_ranks_are_an_error_on_all(comm, tensor_mesh):
    if comm.size == 1:
        pytest.skip("there is no other rank")
    half = comm.Split(comm.rank * 2 // comm.size)
    own, whole = columns(half)
    field = Distributed(own, half, whole.shape, axis=1)
    with pytest.raises(ValueError, match=rf"tensor={comm.size}.*base_comm.*space=comm"):
        Partition.of(field, tensor_mesh)
    if comm.size % 2 == 0:
        with mpishard.Mesh(comm, space=half) as mesh:
            assert Partition.of(field, mesh).shape == whole.shape
    half.Free()


def no_field(comm):
    return np.zeros(3)


def copied(comm):
    return Distributed(np.zeros(3), comm, (3,), partition="BROADCAST")


def stacked(comm):
    class Stacked:
        distarrays = [1, 2]

    Stacked.__module__ = "pylops_mpi.standin"
    return Stacked()


WRONG = {no_field: "ndarray.*local, mesh", copied: "BROADCAST.*local_array", stacked: "Stacked.*distarrays"}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda make: make.__name__)
def test_what_one_rank_gives_wrong_is_an_error_on_all(comm, tensor_mesh, wrong):
    own, whole = columns(comm)
    last = comm.rank == comm.size - 1
    field = wrong(comm) if last else Distributed(own, comm, whole.shape, axis=1)
    with pytest.raises((TypeError, ValueError), match=WRONG[wrong]):
        Partition.of(field, tensor_mesh)


def test_other_numbers_of_values_are_refused(comm, tensor_mesh):
    own, whole = columns(comm, width=3)
    start = Partition.of(Distributed(own, comm, whole.shape, axis=1), tensor_mesh)
    wide = Distributed(np.zeros((4, own.shape[1] + 1)), comm, (4, 99), axis=1)
    with pytest.raises(ValueError, match=rf"{wide.local_array.size} values.*{own.size}"):
        start.get(wide)
    with pytest.raises(ValueError, match=rf"{own.size + 1} values.*{own.size}"):
        start.put(np.zeros(own.size + 1))
    with pytest.raises(TypeError, match="NoneType"):
        Partition(own, tensor_mesh).put(own)


# pylops-mpi.


def deblurring(pylops, nz, nx):
    """A blur along the second dimension of rows, as an operator of pylops."""
    return pylops.signalprocessing.Convolve1D((nz, nx), h=np.exp(-(np.linspace(-2, 2, 5) ** 2)), offset=2, axis=1)


def assert_same_steps(found, expected, most=8):
    """The first points are equal but for rounding, which grows with each step."""
    assert min(len(found), len(expected)) > 3
    for own, other in zip(found[:most], expected[:most], strict=True):
        assert np.allclose(own, other, rtol=1e-8, atol=1e-10)


def test_pylops_mpi_deblurs_as_scipy_does(comm, tensor_mesh):
    pylops = pytest.importorskip("pylops")
    pylops_mpi = pytest.importorskip("pylops_mpi")
    optimize = pytest.importorskip("scipy.optimize")
    nz, nx, damping = 12, 9, 1e-3
    truth = (np.arange(nz)[:, None] + np.cos(np.arange(nx))).ravel() / nz
    blur, slope = deblurring(pylops, nz, nx), pylops.FirstDerivative((nz, nx), axis=0)

    def of_whole(x):
        residual, rough = blur @ (x - truth), slope @ x
        value = 0.5 * (residual @ residual + damping * rough @ rough)
        return value, blur.H @ residual + damping * (slope.H @ rough)

    bounds, steps = [(0, 0.9)] * truth.size, ([], [])
    expected = optimize.minimize(
        of_whole, np.zeros(truth.size), jac=True, bounds=bounds, options=TIGHT, callback=lambda x: steps[1].append(+x)
    )

    rows = pylops_mpi.DistributedArray((nz, nx), base_comm=comm).local_shape[0]
    shapes = [(count * nx,) for count in comm.allgather(rows)]
    blur_mpi = pylops_mpi.MPIBlockDiag([deblurring(pylops, rows, nx)], base_comm=comm)
    slope_mpi = pylops_mpi.MPIFirstDerivative((nz, nx), base_comm=comm)
    data = blur_mpi @ pylops_mpi.DistributedArray.to_dist(truth, base_comm=comm, local_shapes=shapes)
    model = pylops_mpi.DistributedArray(truth.size, base_comm=comm, local_shapes=shapes)
    model[:] = 0.0
    start = Partition.of(model, tensor_mesh)

    def misfit(x):
        start.put(x)
        residual, rough = blur_mpi @ model - data, slope_mpi @ model
        gradient = blur_mpi.H @ residual + (slope_mpi.H @ rough) * damping
        r, s = residual.local_array, rough.local_array
        return 0.5 * (r @ r + damping * s @ s), start.get(gradient)

    found = minimize(
        misfit, start, mesh=tensor_mesh, reduction="sum", bounds=(0, 0.9), options=TIGHT,
        callback=lambda x: steps[0].append(start.put(x).asarray()),
    )  # fmt: skip
    assert_same_steps(*steps)
    assert found.success and start.put(found.x) is model
    assert abs(found.fun - expected.fun) < 1e-12 * max(1, expected.fun)
    assert np.allclose(model.asarray(), expected.x, atol=1e-6)


# Devito.


def test_devito_inverts_as_scipy_does(comm, tensor_mesh, devito):
    optimize = pytest.importorskip("scipy.optimize")
    shape = 11, 8
    i, j = np.meshgrid(*map(np.arange, shape), indexing="ij")
    truth = np.exp(-((i - 5.0) ** 2 + (j - 3.0) ** 2) / 8)

    def blurred(x):
        """A tenth of the Laplacian by differences added, with zeros outside."""
        wide = np.pad(x, 1)
        near = wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]
        return x + 0.1 * (near - 4 * x)

    def of_whole(x):
        residual = blurred(x.reshape(shape) - truth)
        return 0.5 * (residual**2).sum(), blurred(residual).ravel()

    bounds, steps = [(0, 0.7)] * truth.size, ([], [])
    expected = optimize.minimize(
        of_whole, np.zeros(truth.size), jac=True, bounds=bounds, options=TIGHT, callback=lambda x: steps[1].append(+x)
    )

    grid = devito.Grid(shape, extent=(10.0, 7.0), comm=comm, dtype=np.float64)
    model, out = (devito.Function(name=name, grid=grid, space_order=2) for name in ("m", "out"))
    blur = devito.Operator(devito.Eq(out, model + 0.1 * model.laplace))
    start = Partition.of(model, tensor_mesh)
    own = tuple(slice(*pair) for pair in start.parts[comm.rank])
    assert start.shape == shape and start.local.shape == model.shape

    def of_box(x):
        start.put(x - truth[own])
        blur.apply()
        residual = start.get(out)
        start.put(residual)
        blur.apply()
        return 0.5 * (residual**2).sum(), start.get(out)

    found = minimize(
        of_box, start, mesh=tensor_mesh, reduction="sum", bounds=(0, 0.7), options=TIGHT, callback=steps[0].append
    )
    assert_same_steps(steps[0], [x.reshape(shape)[own] for x in steps[1]])
    assert found.success and abs(found.fun - expected.fun) < 1e-12
    assert np.allclose(found.x, expected.x.reshape(shape)[own], atol=1e-6)
    assert start.put(found.x) is model and np.array_equal(np.asarray(model.data), found.x)


def acoustic(devito, comm, shots):
    """A squared slowness, and the function of the misfit of some shots there, that adds its gradient up in a field."""
    steps, spacing = 40, {"dt": 0.5}
    grid = devito.Grid((16, 12), extent=(15.0, 11.0), comm=comm, dtype=np.float64)
    model, gradient = (devito.Function(name=name, grid=grid, space_order=2) for name in ("m", "gradient"))
    u = devito.TimeFunction(name="u", grid=grid, time_order=2, space_order=2, save=steps)
    v = devito.TimeFunction(name="v", grid=grid, time_order=2, space_order=2)
    source, traces = (
        devito.SparseTimeFunction(name=name, grid=grid, npoint=count, nt=steps)
        for name, count in (("source", 1), ("traces", 6))
    )
    traces.coordinates.data[:] = np.array([[2.1 + 2 * k, 9.3] for k in range(6)])
    ricker = (np.pi * 0.1 * (0.5 * np.arange(steps) - 7)) ** 2
    source.data[:] = ((1 - 2 * ricker) * np.exp(-ricker))[:, None]
    squared = grid.stepping_dim.spacing**2
    forward = devito.Operator([
        devito.Eq(u.forward, devito.solve(model * u.dt2 - u.laplace, u.forward)),
        source.inject(u.forward, expr=source * squared / model),
        traces.interpolate(u),
    ])  # fmt: skip
    backward = devito.Operator([
        devito.Eq(v.backward, devito.solve(model * v.dt2 - v.laplace, v.backward)),
        traces.inject(v.backward, expr=traces * squared / model),
        devito.Inc(gradient, -u.dt2 * v),
    ])  # fmt: skip

    def recorded(shot):
        source.coordinates.data[:] = np.array([[4.3 + 7 * shot, 2.2]])
        forward.apply(**spacing)
        return np.array(traces.data)

    model.data[:] = 1.0
    model.data[6:10, 4:8] = 1.2  # of the whole grid
    observed = {shot: recorded(shot) for shot in shots}
    model.data[:] = 1.0

    def misfit():
        value = 0.0
        gradient.data[:] = 0
        for shot in shots:
            residual = recorded(shot) - observed[shot]
            value += 0.5 * (residual**2).sum()
            np.asarray(traces.data)[...] = residual
            v.data[:] = 0
            backward.apply(**spacing)
        return value

    return model, gradient, misfit


def test_shots_in_devito_on_groups_of_ranks_take_scipys_steps(comm, devito):
    """Two shots: on four ranks each is spread over a group of two."""
    from mpi4py import MPI

    optimize = pytest.importorskip("scipy.optimize")
    options = {"maxiter": 6}
    model, gradient, misfit = acoustic(devito, MPI.COMM_SELF, range(2))

    def of_whole(x):
        model.data[:] = x.reshape(model.shape)
        return misfit(), np.array(gradient.data).ravel()

    expected, ours = [], []
    optimize.minimize(
        of_whole, np.ones(model.data.size), jac=True, method="L-BFGS-B", bounds=[(0.9, 1.05)] * model.data.size,
        callback=lambda x: expected.append(x.reshape(model.shape).copy()), options=options,
    )  # fmt: skip
    with mpishard.Mesh(comm, tensor=2 if comm.size % 2 == 0 else comm.size) as mesh:
        shots = range(mesh.data.rank, 2, mesh.data.size)
        model_of_box, gradient_of_box, misfit_of_box = acoustic(devito, mesh.tensor.comm, shots)
        start = Partition.of(model_of_box, mesh)

        def of_box(x):
            start.put(x)
            return misfit_of_box(), start.get(gradient_of_box)

        summed = {"mesh": mesh, "reduction": "sum"}
        assert mpishard.check_gradient(of_box, start, **summed, disp=False)
        minimize(of_box, start, bounds=(0.9, 1.05), callback=ours.append, options=options, **summed)
        box = tuple(slice(*pair) for pair in start.parts[mesh.tensor.rank])
    assert_same_steps(ours, [whole[box] for whole in expected])
    assert expected[-1].max() == 1.05


# DOLFINx and PETSc.

ELEMENTS = {
    "nodes": ("Lagrange", 1),
    "vectors": ("Lagrange", 1, (2,)),
    "edges": ("Lagrange", 2),
    "cells": ("DG", 0),
    "in cells": ("DG", 1),
}


@pytest.fixture
def dolfinx():
    pytest.importorskip("dolfinx.fem", reason="DOLFINx is not installed")
    return pytest.importorskip("dolfinx")


def square(dolfinx, comm, cells=(5, 4)):
    return dolfinx.mesh.create_unit_square(comm, *cells)


@pytest.mark.parametrize("element", ELEMENTS)
def test_numbers_of_dolfinx_do_not_depend_on_the_partition(comm, tensor_mesh, dolfinx, element):
    from mpi4py import MPI

    def function(comm):
        space = dolfinx.fem.functionspace(square(dolfinx, comm), ELEMENTS[element])
        found = dolfinx.fem.Function(space)
        components = slice(2) if space.dofmap.bs == 2 else 0
        found.interpolate(lambda x: np.stack([np.sin(3 * x[0]) + x[1], x[0] - x[1]])[components])
        return found

    with mpishard.Mesh(MPI.COMM_SELF) as alone:
        expected = Partition.of(function(MPI.COMM_SELF), alone).owned
    field = function(comm)
    start = Partition.of(field, tensor_mesh)
    assert np.allclose(np.concatenate(comm.allgather(start.owned)), expected, atol=1e-14)
    before = field.x.array.copy()
    field.x.array[:] = 0
    assert start.put(start.local) is field
    assert np.allclose(field.x.array, before, atol=1e-14)  # with ghosts, which were interpolated in other cells


def test_elements_that_turn_need_numbers(comm, tensor_mesh, dolfinx):
    domain = square(dolfinx, comm)
    field = dolfinx.fem.Function(dolfinx.fem.functionspace(domain, ("Lagrange", 3)))
    with pytest.raises(ValueError, match="P, triangle, 3.*ids="):
        Partition.of(field, tensor_mesh)
    own = field.x.index_map.local_range
    assert Partition.of(field, tensor_mesh, ids=np.arange(*own)).local.size == own[1] - own[0]


def elliptic(dolfinx, comm):
    """A coefficient of an elliptic equation, and the function that gives this rank's value, and the gradient, at it."""
    import ufl
    from dolfinx.fem.petsc import LinearProblem

    fem, domain = dolfinx.fem, square(dolfinx, comm)
    space = fem.functionspace(domain, ("Lagrange", 1))
    kappa, state, adjoint, data = (fem.Function(space) for _ in range(4))
    u, v, dx, grad = ufl.TrialFunction(space), ufl.TestFunction(space), ufl.dx, ufl.grad
    domain.topology.create_connectivity(1, 2)
    edge = fem.locate_dofs_topological(space, 1, dolfinx.mesh.exterior_facet_indices(domain.topology))
    known = {"bcs": [fem.dirichletbc(0.0, edge, space)]}
    known["petsc_options"] = {"ksp_type": "cg", "pc_type": "jacobi", "ksp_rtol": 1e-13}
    a = kappa * ufl.inner(grad(u), grad(v)) * dx
    forward = LinearProblem(a, 10 * v * dx, u=state, petsc_options_prefix="forward_", **known)
    backward = LinearProblem(a, (state - data) * v * dx, u=adjoint, petsc_options_prefix="backward_", **known)
    value = fem.form(((state - data) ** 2 + 1e-3 * ufl.inner(grad(kappa), grad(kappa))) / 2 * dx)
    slope = fem.form(-ufl.inner(grad(state), grad(adjoint)) * v * dx + 1e-3 * ufl.inner(grad(kappa), grad(v)) * dx)
    kappa.interpolate(lambda x: 1 + (abs(x[0] - 0.5) < 0.25))
    forward.solve()
    data.x.array[:] = state.x.array
    kappa.x.array[:] = 1.0

    def value_and_gradient():
        forward.solve()
        backward.solve()
        gradient = fem.assemble_vector(slope)
        gradient.scatter_reverse(dolfinx.la.InsertMode.add)
        return fem.assemble_scalar(value), gradient

    return kappa, value_and_gradient


def minimum_of_tao(comm, kappa, value_and_gradient, lower, upper):
    """The least value that TAO's BLMVM finds, with the gradient of the mesh's own order."""
    from petsc4py import PETSc

    own = kappa.x.index_map.size_local
    x, g, low, high = (PETSc.Vec().createMPI((own, None), comm=comm) for _ in range(4))
    x.set(1.0), low.set(lower), high.set(upper)

    def evaluate(tao, x, g):
        kappa.x.array[:own] = x.getArray(readonly=True)
        kappa.x.scatter_forward()
        value, gradient = value_and_gradient()
        g.setArray(gradient.array[:own])
        return comm.allreduce(value)

    tao = PETSc.TAO().create(comm)
    tao.setType("blmvm")
    tao.setObjectiveGradient(evaluate, g)
    tao.setVariableBounds((low, high))
    tao.setTolerances(gatol=1e-10, grtol=0, gttol=0)
    tao.setMaximumIterations(500)
    tao.solve(x)
    return tao.getObjectiveValue(), x.getArray().copy()


def test_a_coefficient_in_dolfinx_is_that_of_tao(comm, tensor_mesh, dolfinx):
    pytest.importorskip("petsc4py")
    kappa, value_and_gradient = elliptic(dolfinx, comm)
    start = Partition.of(kappa, tensor_mesh)

    def misfit(x):
        start.put(x)
        value, gradient = value_and_gradient()
        return value, start.get(gradient)

    summed = {"mesh": tensor_mesh, "reduction": "sum"}
    assert mpishard.check_gradient(misfit, start, **summed, disp=False)
    found = minimize(misfit, start, bounds=(0.9, 1.3), options={**TIGHT, "gtol": 1e-10}, **summed)
    value, expected = minimum_of_tao(comm, kappa, value_and_gradient, 0.9, 1.3)
    free = comm.allreduce(int((found.x < 1.3).sum()))
    assert 0 < free < start.shape[0]
    assert found.success and abs(found.fun - value) < 1e-12
    assert np.allclose(found.x, expected, atol=1e-6)


# pyadjoint.


@pytest.fixture
def pyadjoint():
    found = pytest.importorskip("pyadjoint", reason="pyadjoint is not installed")
    found.set_working_tape(found.Tape())
    found.continue_annotation()
    yield found
    found.pause_annotation()


def rosenbrock(pyadjoint):
    x, y = pyadjoint.AdjFloat(-1.2), pyadjoint.AdjFloat(1.0)
    value = 100.0 * (y - x**2) ** 2 + (1.0 - x) ** 2
    return pyadjoint.ReducedFunctional(value, [pyadjoint.Control(x), pyadjoint.Control(y)])


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("method, bounds, expected", [
    ("L-BFGS-B", (-2, 0.9), [0.9, 0.81]),
    ("L-BFGS-B", ([None, 0], [0.9, None]), [0.9, 0.81]),
    ("Newton-CG", None, [1, 1]),
])  # fmt: skip
def test_numbers_of_pyadjoint(mesh, pyadjoint, method, bounds, expected, on_mesh):
    seen = []
    found = mpishard.pyadjoint.minimize(
        rosenbrock(pyadjoint), method, bounds, callback=seen.append, options={"gtol": 1e-8},
        mesh=mesh if on_mesh else None,
    )  # fmt: skip
    assert all(isinstance(each, pyadjoint.AdjFloat) for each in [*found.x, *seen[-1]])
    assert np.allclose(found.x, expected, atol=1e-4) and seen[-1] == found.x


WRONG_ARGUMENTS = {
    "bounds=int": {"bounds": 3},
    "3 .* 2 controls": {"bounds": ([1, 2, 3], 4)},
    "mesh=mesh": {"checkpoints": 3},
}


@pytest.mark.parametrize("message", WRONG_ARGUMENTS)
def test_wrong_arguments_of_pyadjoint(pyadjoint, message):
    with pytest.raises(ValueError, match=message):
        mpishard.pyadjoint.minimize(rosenbrock(pyadjoint), **WRONG_ARGUMENTS[message])
    with pytest.raises(TypeError, match="reduced=.*ReducedFunctional"):
        mpishard.pyadjoint.minimize(len)


def test_what_one_rank_gives_pyadjoint_wrong_is_an_error_on_all(mesh, pyadjoint):
    odd = mesh.rank == mesh.size - 1
    with pytest.raises(ValueError, match="bounds=int"):
        mpishard.pyadjoint.minimize(rosenbrock(pyadjoint), bounds=3 if odd else (-2, 2), mesh=mesh)
    with pytest.raises(TypeError, match="reduced=.*ReducedFunctional"):
        mpishard.pyadjoint.minimize(len if odd else rosenbrock(pyadjoint), mesh=mesh)


def test_numbers_beside_fields_are_refused(comm, tensor_mesh, pyadjoint):
    controls = [SimpleNamespace(control=each) for each in (ByVector(np.ones(1), comm), pyadjoint.AdjFloat(1.0))]
    functional = SimpleNamespace(controls=controls, derivative=None)
    with pytest.raises(ValueError, match=r"1 of 2 controls \(1\) are numbers"):
        mpishard.pyadjoint.minimize(functional, mesh=tensor_mesh)


class ByVector:
    """A control that becomes a vector of PETSc, as those of Firedrake."""

    def __init__(self, own, comm):
        self.own, self.comm = own, comm

    def _ad_to_petsc(self):
        return Vector(self.own, self.comm)

    def _ad_from_petsc(self, vector):
        self.own = vector.getArray().copy()


ByVector.__module__ = "pyadjoint.standin"


def test_a_control_may_become_a_vector(comm, tensor_mesh):
    own = np.arange(2.0 + comm.rank)
    control = ByVector(own, comm)
    start = Partition.of(control, tensor_mesh)
    assert start.put(own + 1) is control and np.array_equal(control.own, own + 1)
    with pytest.raises(TypeError, match="AdjFloat.*PETSc"):
        Partition.of(type("AdjFloat", (), {"__module__": "pyadjoint.standin"})(), tensor_mesh)


def recorded(comm, dolfinx, pyadjoint):
    """A functional of the coefficient of an elliptic equation, which dolfinx-adjoint has recorded."""
    import dolfinx_adjoint as adjoint
    import ufl

    pyadjoint.set_working_tape(pyadjoint.Tape())
    fem, domain = dolfinx.fem, square(dolfinx, comm)
    space = fem.functionspace(domain, ("Lagrange", 1))
    kappa, state, zero = (adjoint.Function(space) for _ in range(3))
    data = fem.Function(space)
    data.interpolate(lambda x: 8 * x[0] * (1 - x[0]) * x[1] * (1 - x[1]) * (1 + x[0]))
    u, v, dx, grad = ufl.TrialFunction(space), ufl.TestFunction(space), ufl.dx, ufl.grad
    domain.topology.create_connectivity(1, 2)
    edge = fem.locate_dofs_topological(space, 1, dolfinx.mesh.exterior_facet_indices(domain.topology))
    solvers = dict.fromkeys(
        ["petsc_options", "adjoint_petsc_options", "tlm_petsc_options"],
        {"ksp_type": "cg", "pc_type": "jacobi", "ksp_rtol": 1e-13},
    )
    kappa.x.array[:] = 1.0
    a = kappa * ufl.inner(grad(u), grad(v)) * dx
    problem = adjoint.LinearProblem(a, 10 * v * dx, u=state, bcs=[adjoint.dirichletbc(zero, edge)], **solvers)
    problem.solve()
    value = adjoint.assemble_scalar(((state - data) ** 2 + 1e-3 * ufl.inner(grad(kappa), grad(kappa))) / 2 * dx)
    options = {"riesz_representation": "L2", "petsc_options": solvers["petsc_options"]}
    functional = pyadjoint.ReducedFunctional(value, pyadjoint.Control(kappa, riesz_map=options))
    functional.problem = problem  # which is made anew in each evaluation if nobody has it
    return functional


def test_a_functional_of_dolfinx_adjoint_has_scipys_minimum(comm, tensor_mesh, pyadjoint):
    pytest.importorskip("h5py")  # before DOLFINx
    dolfinx = pytest.importorskip("dolfinx")
    pytest.importorskip("dolfinx_adjoint")
    optimize = pytest.importorskip("scipy.optimize")
    from mpi4py import MPI

    reduced = recorded(comm, dolfinx, pyadjoint)
    first, lower = reduced.controls[0].copy_data(), reduced.controls[0].copy_data()
    lower.x.array[:] = 0.9
    points, steps = [], []
    found = mpishard.pyadjoint.minimize(reduced, bounds=(lower, 1.1), options=TIGHT, callback=points.append)

    # After the others, since ranks that compile one form at a time wait ten seconds at most.
    alone = recorded(MPI.COMM_SELF, dolfinx, pyadjoint)
    point = alone.controls[0].copy_data()
    single = mpishard.Mesh(MPI.COMM_SELF)

    def by_number(x):
        point.x.array[:] = x
        return Partition.of(point, single).owned

    def of_whole(x):
        point.x.array[:] = x
        value = float(alone(point))
        return value, alone.derivative(apply_riesz=False).x.array.copy()

    bounds = [(0.9, 1.1)] * point.x.array.size
    expected = optimize.minimize(
        of_whole, np.ones(len(bounds)), jac=True, bounds=bounds, options=TIGHT,
        callback=lambda x: steps.append(by_number(x)),
    )  # fmt: skip
    assert abs(found.fun - expected.fun) < 1e-10 and type(found.x) is type(lower)

    def whole(x):
        return np.concatenate(comm.allgather(Partition.of(x, tensor_mesh).owned))

    *points, last = map(whole, [*points, found.x])
    assert_same_steps(points, steps)
    assert np.allclose(last, by_number(expected.x), atol=1e-5)
    single.free()

    free = {"method": "L-BFGS", "options": {"gtol": 1e-7, "ftol": 0}}
    reduced(first)
    plain = mpishard.pyadjoint.minimize(reduced, inner_product=Partition.of(lower, tensor_mesh).local, **free)
    reduced(first)
    same = mpishard.pyadjoint.minimize(reduced, inner_product=lower, **free)
    assert plain.fun == same.fun and plain.nit == same.nit
    reduced(first)
    slope, points = whole(reduced.derivative(apply_riesz=True)), []
    riesz = mpishard.pyadjoint.minimize(reduced, riesz=True, mesh=tensor_mesh, callback=points.append, **free)
    step = whole(points[0]) - whole(first)
    assert np.allclose(step / abs(step).max(), -slope / abs(slope).max(), atol=1e-9)
    assert abs(riesz.fun - plain.fun) < 1e-6
