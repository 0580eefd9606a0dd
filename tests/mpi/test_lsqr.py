"""`lsqr` and `cgls` on ranks: the bits of one process, of arrays and of fields, and one outcome on all of them."""

from __future__ import annotations

import signal
from fractions import Fraction

import numpy as np
import pytest

import mpishard
from mpishard import Partition
from mpishard.comm.errors import OneRank
from mpishard.inverse.operators import MatrixOnRanks, OwnRows, RankSpace
from mpishard.minimizers.space import LocalSpace
from mpishard.record import Run

pytestmark = pytest.mark.pairs(2)

RANDOM = np.random.default_rng(3)
ROWS, COLUMNS = 90, 24
MATRIX = RANDOM.standard_normal((ROWS, COLUMNS)) * (RANDOM.random((ROWS, COLUMNS)) < 0.3)
B = RANDOM.standard_normal(ROWS)
SOLVERS = {"lsqr": mpishard.lsqr, "cgls": mpishard.cgls}
GIVEN = [{}, {"damp": 0.5, "calc_var": True, "x0": np.linspace(-1, 1, COLUMNS)}]


@pytest.fixture(params=SOLVERS)
def solver(request):
    return SOLVERS[request.param]


def own_rows(mesh):
    """Uneven parts, of which the second of three is empty."""
    cuts = {1: [0, ROWS], 2: [0, 20, ROWS], 3: [0, 60, 60, ROWS]}.get(mesh.size)
    cuts = cuts or np.linspace(0, ROWS, mesh.size + 1).astype(int).tolist()
    return slice(cuts[mesh.rank], cuts[mesh.rank + 1])


def are_equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def sums(matrix, vector):
    """A product whose sums do not depend on the number of rows."""
    return (np.ascontiguousarray(matrix) * vector).sum(axis=1)


class OnRanks:
    """A matrix whose rows and columns are on ranks: products need the vectors of all."""

    def __init__(self, comm, rows, columns):
        self.comm, self.rows, self.columns = comm, rows, columns
        self.shape = len(rows), len(columns)
        orders = [np.argsort(np.concatenate(comm.allgather(each))) for each in (rows, columns)]
        self.row_order, self.column_order = orders

    def matvec(self, v):
        assert v.shape == self.columns.shape
        return sums(MATRIX[self.rows], np.concatenate(self.comm.allgather(v))[self.column_order])

    def rmatvec(self, u):
        return sums(MATRIX.T[self.columns], np.concatenate(self.comm.allgather(u))[self.row_order])


@pytest.mark.quick
@pytest.mark.parametrize("given", GIVEN, ids=["plain", "damped"])
def test_the_bits_of_one_process(mesh, same_on_all, solver, given):
    alone = solver(MATRIX, B, **given)
    own = own_rows(mesh)
    result = solver(MATRIX[own], B[own], mesh=mesh, **given)
    assert are_equal(result, alone) and same_on_all(result.x) and alone.itn > 5 and alone.istop == 2


def test_operators_of_own_rows(mesh, same_on_all, solver):
    """What an operator adds up itself has other roundings: the same solution, the same on all ranks."""
    own = own_rows(mesh)
    products = (lambda v: MATRIX[own] @ v), (lambda u: MATRIX[own].T @ u)
    result = solver(products, B[own], x0=np.zeros(COLUMNS), mesh=mesh)
    alone = solver(MATRIX, B)
    assert np.allclose(result.x, alone.x, rtol=1e-7) and result.itn == alone.itn and same_on_all(result.x)


def numbers_of(kind, size, mesh):
    numbers = np.random.default_rng(5).permutation(size) if kind == "ids" else np.arange(size)
    cuts = np.linspace(0, 1, mesh.tensor.size + 1) ** 2 * size
    return numbers[slice(*cuts.astype(int)[mesh.tensor.rank : mesh.tensor.rank + 2])]


def partition_of(kind, values, mesh):
    columns = numbers_of(kind, COLUMNS, mesh)
    return columns, Partition(values[columns], mesh, **({"ids": columns} if kind == "ids" else {}))


@pytest.mark.parametrize("kind", ["runs", "ids"])
def test_fields_that_the_application_has_cut(comm, solver, kind):
    """No rank has a vector of all unknowns or of all rows, and the bits are those of one process."""
    start = np.linspace(-1, 1, COLUMNS)
    given = {"damp": 0.5, "calc_var": True}
    everything = (lambda v: sums(MATRIX, v)), (lambda u: sums(MATRIX.T, u))
    alone = solver(everything, B, x0=start, **given)
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        rows = numbers_of(kind, ROWS, mesh)
        columns, field = partition_of(kind, start, mesh)
        result = solver(OnRanks(comm, rows, columns), B[rows], x0=field, mesh=mesh, **given)
    assert np.array_equal(result.x, alone.x[columns]) and np.array_equal(result.var, alone.var[columns])
    assert result[1:9] == alone[1:9]


def test_groups_that_share_a_field_have_different_rows(mesh, same_on_all, solver):
    own = own_rows(mesh)  # each rank is a group that has the whole field
    products = (lambda v: MATRIX[own] @ v), (lambda u: MATRIX[own].T @ u)
    result = solver(products, B[own], x0=[Partition(np.zeros((4, 6)), mesh)], mesh=mesh)
    assert result.x[0].shape == (4, 6) and same_on_all(result.x[0])
    assert np.allclose(result.x[0].reshape(-1), solver(MATRIX, B).x, rtol=1e-7)


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["array", "operator", "fields"])
def test_the_adjoint_of_rows_on_ranks(comm, kind):
    """<A x, u> = <x, A'u>, exactly: whole numbers."""
    whole = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) % 7 - 3.0
    x, u = np.arange(COLUMNS) % 5 - 2.0, np.arange(ROWS) % 4 - 1.0
    with mpishard.Mesh(comm, tensor=comm.size if kind == "fields" else 1) as mesh:
        own, sharers, space = own_rows(mesh), mesh.world, LocalSpace(COLUMNS, np.empty(0))
        rows = whole[own]
        if kind == "operator":
            rows = type("Rows", (), {"shape": rows.shape, "matvec": lambda _, v, a=rows: a @ v})()
            rows.rmatvec = lambda u: whole[own].T @ u
        if kind == "fields":
            mine = numbers_of("runs", COLUMNS, mesh)
            rows = type("Rows", (), {"shape": (rows.shape[0], len(mine))})()
            rows.matvec = lambda v: whole[own] @ np.concatenate(comm.allgather(v))
            rows.rmatvec = lambda u: whole.T[mine] @ np.concatenate(comm.allgather(u))
            x, sharers, space = x[mine], mesh.data, RankSpace(len(mine), COLUMNS, mesh.tensor)
        matrix = MatrixOnRanks(OwnRows(rows, "A"), len(u[own]), space, mesh.world, sharers)
        forward, back = matrix.times(x), matrix.adjoint(u[own], 2.0)
        (left,) = matrix.rows.dots([(forward, u[own])], [4.0 * max(matrix.rows.largest(forward))])
        (right,) = matrix.unknowns.dots([(x, back)], [4.0 * max(matrix.unknowns.largest(back))])
        assert left == right == (whole @ (np.arange(COLUMNS) % 5 - 2.0)) @ u != 0


@pytest.mark.parametrize("form", ["array", "sparse"])
def test_the_adjoint_has_the_bits_of_one_process(mesh, form):
    """Whichever rank has which rows; columns have very different sizes, one is of zeros, and some rows are, too."""
    random = np.random.default_rng(8)
    whole = MATRIX * 2.0 ** random.integers(-300, 300, COLUMNS)
    whole[:9], whole[:, 5], u = 0, 0, random.standard_normal(ROWS) * 10.0 ** random.integers(-9, 10, ROWS)
    whole[:, 6] *= 5e-324 / abs(whole[:, 6]).max()  # one element is left

    def adjoint(own, world):
        rows = whole[own] if form == "array" else pytest.importorskip("scipy.sparse").csr_array(whole[own])
        space = LocalSpace(COLUMNS, np.empty(0))
        return MatrixOnRanks(OwnRows(rows, "A"), len(u[own]), space, world, world).adjoint(u[own], abs(u).max())

    alone = adjoint(slice(None), OneRank())
    dealt = random.permutation(ROWS)[own_rows(mesh)]
    assert np.array_equal(adjoint(dealt, mesh.world), alone)
    exact = np.array([sum(map(Fraction, column)) for column in (whole * u[:, None]).T], float)
    tops = abs(whole).max(axis=0) * abs(u).max()
    assert (abs(alone - exact) <= 2.0**-53 * abs(exact) + ROWS * (2.0**-61 * tops + 2.0**-1022)).all()


class Dying:
    """An operator whose last rank fails at a product."""

    def __init__(self, mesh, own, at):
        self.rows, self.shape, self.at, self.mesh = MATRIX[own], MATRIX[own].shape, at, mesh

    def matvec(self, v):
        self.at -= 1
        if self.at == 0 and self.mesh.rank == self.mesh.size - 1:
            raise RuntimeError("a node is gone")
        return sums(self.rows, v)

    def rmatvec(self, u):
        # Rounded to multiples of 2**-40: sums of these are exact.
        return np.rint((self.rows * u[:, None]) * 2.0**40).sum(axis=0) * 2.0**-40


@pytest.mark.parametrize("given", GIVEN, ids=["plain", "damped"])
def test_it_is_saved_and_continues_on_any_ranks(comm, mesh, folder, same_on_all, solver, given):
    own = own_rows(mesh)
    whole = solver(Dying(mesh, own, -1), B[own], mesh=mesh, **given)
    with mpishard.Checkpoints(folder / "c", mesh, every=3) as checkpoints:
        files = {"checkpoints": checkpoints, "resume": True, **given}
        with pytest.raises(RuntimeError, match="a node is gone"):
            solver(Dying(mesh, own, 8), B[own], mesh=mesh, **files)
        with mpishard.RunRecord(folder / "r", mesh) as record:
            calls = Dying(mesh, own, 0)
            result = solver(calls, B[own], mesh=mesh, record=record, **files)
        assert are_equal(result, whole) and -calls.at < whole.itn
        other = mpishard.cgls if solver is mpishard.lsqr else mpishard.lsqr
        with pytest.raises(ValueError, match=f"is of {solver.__name__} with .* and this is {other.__name__} with"):
            other(Dying(mesh, own, 0), B[own], mesh=mesh, **files)
        turned = MATRIX[::-1][own], B[::-1][own]
        with pytest.raises(ValueError, match="does not fit A: its rows had another order"):
            solver(*turned, mesh=mesh, **files)
        with pytest.raises(ValueError, match="of another problem"):
            solver(Dying(mesh, own, 0), 2 * B[own], mesh=mesh, **files)
        for more, words in (({"damp": 9.0}, "with damp=9.0"), ({"calc_var": not given}, "and calc_var=True")):
            with pytest.raises(ValueError, match=words):
                solver(Dying(mesh, own, 0), B[own], mesh=mesh, **files | more)
        with pytest.raises(ValueError, match="is of .* with .* and this is minimize; give each its own folder"):
            mpishard.minimize(lambda x: (x @ x, 2 * x), B, mesh=mesh, checkpoints=checkpoints, resume=True)
        further = solver(Dying(mesh, own, 0), B[own], mesh=mesh, atol=1e-10, **files)
        assert further.itn > whole.itn
    if mesh.rank == 0:
        metrics = Run.read(folder / "r").metrics
        first = 4 if given else 7  # a start other than 0 takes a product
        assert metrics["step"].tolist() == list(range(first, whole.itn + 1)) and metrics["gradient_norm"][-1] > 0
    with mpishard.Mesh(comm.Split(comm.rank)) as alone:
        for rank in range(comm.size):
            if rank == comm.rank:
                with mpishard.Checkpoints(folder / "c", alone) as checkpoints:
                    files = {"checkpoints": checkpoints, "resume": True, **given}
                    found = solver(Dying(alone, slice(None), 0), B, mesh=alone, atol=1e-10, **files)
                assert are_equal(found, further)
            comm.Barrier()


@pytest.mark.parametrize("kind", ["runs", "ids"])
def test_fields_are_saved(comm, folder, solver, kind):
    start = np.linspace(-1, 1, COLUMNS)
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        rows = numbers_of(kind, ROWS, mesh)
        columns, field = partition_of(kind, start, mesh)
        arguments = OnRanks(comm, rows, columns), B[rows]
        whole = solver(*arguments, x0=field, mesh=mesh)
        with mpishard.Checkpoints(folder, mesh) as checkpoints:
            solver(*arguments, x0=field, mesh=mesh, checkpoints=checkpoints, iter_lim=4)
            result = solver(*arguments, x0=field, mesh=mesh, checkpoints=checkpoints, resume=True)
        assert are_equal(result, whole) and whole.itn > 5


def test_ctrl_c_on_one_rank_ends_it_on_all(mesh, folder, solver, ctrl_c):
    own, calls = own_rows(mesh), []

    def matvec(v):
        calls.append(v)
        if len(calls) == 4 and mesh.rank == mesh.size - 1:  # the first product is that of the order of the rows
            ctrl_c()
        return sums(MATRIX[own], v)

    with mpishard.Checkpoints(folder, mesh) as checkpoints:
        files = {"mesh": mesh, "checkpoints": checkpoints}
        found = solver((matvec, MATRIX[own].T.dot), B[own], x0=np.zeros(COLUMNS), **files)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert found.istop == 8 and found.itn == 3


def test_a_partition_wants_its_mesh(comm, solver):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh, mpishard.Mesh(comm) as other:
        given = (np.copy, np.copy), np.ones(4)
        field = Partition(np.zeros(4), mesh)
        with pytest.raises(ValueError, match="no mesh is given: give this one, mesh=mesh"):
            solver(*given, x0=field)
        if comm.size > 1:
            with pytest.raises(ValueError, match=f"mesh with tensor={comm.size}, and .* tensor=1; give"):
                solver(*given, x0=field, mesh=other)


def test_errors_of_one_rank_are_raised_on_all(mesh, solver):
    own, is_last = own_rows(mesh), mesh.rank == mesh.size - 1
    rows, b, start = MATRIX[own], B[own], {"x0": np.zeros(COLUMNS)}

    def failing(v):
        raise RuntimeError("no product")

    wrong = [
        ((rows, b[:-1] if is_last else b), {}, ValueError, "A has the shape"),
        ((np.where(is_last, np.nan, rows), b), {}, ValueError, "column 0 of A"),
        ((rows, np.where(is_last, np.inf, b)), {}, ValueError, "^b has"),
        (((failing if is_last else rows.dot, rows.T.dot), b), start, RuntimeError, "no product"),
        (((rows.dot, (lambda u: u[:1]) if is_last else rows.T.dot), b), start, ValueError, "rmatvec of A .*1 elements"),
        (((lambda v: rows @ v * np.where(is_last, np.nan, 1), rows.T.dot), b), start, ValueError, "A in iteration 1"),
        (((rows.dot, lambda u: rows.T @ u * np.where(is_last, np.nan, 1)), b), start, ValueError, "A'.*NaN"),
    ]
    for given, more, error, words in wrong:
        with pytest.raises(error, match=words):
            solver(*given, mesh=mesh, **more)
