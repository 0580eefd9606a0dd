"""`laplace` on a mesh: the bits of one process on any ranks and any cut, from a checkpoint, and in elastic runs."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard
from mpishard import DiagonalPrior, OperatorPrior, Partition, laplace
from mpishard.record import Run

GRID = (5, 4, 3)
SIZE = 60
NUMBERS = np.arange(SIZE)
SHOTS = 7
ROWS = np.random.default_rng(2).standard_normal((SHOTS, 3, SIZE))
POINT = np.sin(NUMBERS)
VARIANCE = np.linspace(0.5, 2, SIZE)
OPTIONS = {"rank": 8, "oversampling": 4, "power_iterations": 1}
PRODUCTS = 36
# A prior whose operators add up over the whole field, each element in the order of the columns.
ROOT = np.tril(np.random.default_rng(3).standard_normal((SIZE, SIZE))) / 16 + np.eye(SIZE)
INVERSE = np.linalg.inv(ROOT)
TABLES = {"precision": INVERSE.T @ INVERSE, "solve": ROOT @ ROOT.T, "factor": ROOT}


def product(x, v, shots):
    """Multiples of a power of 2 that are far below 2**53: their sums over the shots are exact."""
    found = np.zeros(SIZE)
    for shot in shots:
        found += np.rint(2.0**36 * (ROWS[shot].T @ (ROWS[shot] @ v))) * 2.0**-36
    return found


def whole(x, v):
    return product(x, v, range(SHOTS))


def times(table, vector):
    found = np.zeros(len(table))
    for column, number in zip(table.T, vector, strict=True):
        found += column * number
    return found


def facts(posterior):
    """What is the same on all ranks."""
    return (
        posterior.eigenvalues.tobytes(),
        posterior.left_out.tobytes(),
        posterior.information_gain,
        posterior.log_determinant,
        posterior.products,
    )


def vectors(posterior, like):
    """What ranks have parts of."""
    return [
        posterior.variance(),
        posterior.standard_deviation(),
        *posterior.samples(2, seed=4),
        posterior.covariance @ like,
    ]


@pytest.fixture(scope="module")
def alone():
    posterior = laplace(POINT, whole, DiagonalPrior(VARIANCE, mean=0.5), **OPTIONS)
    return facts(posterior), vectors(posterior, VARIANCE)


def same(posterior, alone):
    return facts(posterior) == alone[0] and np.array_equal(vectors(posterior, VARIANCE), alone[1])


@pytest.mark.quick
@pytest.mark.parametrize("reduction", [None, "sum"])
def test_any_number_of_ranks_has_the_same_bits(mesh, alone, reduction):
    own = range(SHOTS) if reduction is None else range(mesh.rank, SHOTS, mesh.size)
    hessp = lambda x, v: product(x, v, own)  # noqa: E731
    posterior = laplace(POINT, hessp, DiagonalPrior(VARIANCE, mean=0.5), mesh=mesh, reduction=reduction, **OPTIONS)
    assert same(posterior, alone)
    assert posterior._rows.size <= -(-SIZE // mesh.size) * OPTIONS["rank"]  # each rank has its part alone


def numbers_of(kind, mesh):
    """The numbers of a rank's values in a field, and a start with the values there."""
    ranks = mesh.tensor.size
    cuts = [round(SIZE * (part / ranks) ** 2) for part in range(ranks + 1)]
    own = slice(cuts[mesh.tensor.rank], cuts[mesh.tensor.rank + 1])
    if kind == "runs":
        return NUMBERS[own], Partition(POINT[own], mesh)
    if kind == "ids":
        numbers = np.random.default_rng(1).permutation(SIZE)[own]
        return numbers, Partition(POINT[numbers], mesh, ids=numbers)
    if kind == "boxes":
        last = [GRID[0] * part // ranks for part in range(ranks + 1)]
        box = ((last[mesh.tensor.rank], last[mesh.tensor.rank + 1]), (0, GRID[1]), (0, GRID[2]))
        numbers = NUMBERS.reshape(GRID)[slice(*box[0])]
        return numbers, Partition(POINT[numbers], mesh, shape=GRID, box=box)
    spec = mpishard.ParameterSpec("field", (SIZE,), tensor_dim=0)
    field = mpishard.FlatParameters([spec], np.float64, place=mesh.place)
    numbers = NUMBERS[slice(*field.box("field")[0])]
    field["field"][...] = POINT[numbers]
    return numbers, field


class Parts:
    """Vectors of a field that ranks have parts of; collective."""

    def __init__(self, mesh, numbers):
        self.mesh, self.numbers = mesh, numbers

    def whole(self, part):
        found = np.full(SIZE, np.nan)
        for theirs, places in self.mesh.tensor.allgather_object((part.ravel(), self.numbers.ravel())):
            found[places] = theirs
        return found

    def own(self, function):
        return lambda part: function(self.whole(part))[self.numbers].reshape(part.shape)

    def prior(self):
        tables = {name: self.own(lambda v, table=table: times(table, v)) for name, table in TABLES.items()}
        variance = TABLES["solve"].diagonal()[self.numbers].copy()
        return OperatorPrior(**tables, variance=variance, mean=VARIANCE[self.numbers], log_determinant=1.0)


@pytest.fixture(scope="module")
def with_operators():
    tables = {name: lambda v, table=table: times(table, v) for name, table in TABLES.items()}
    prior = OperatorPrior(**tables, variance=TABLES["solve"].diagonal(), mean=VARIANCE, log_determinant=1.0)
    posterior = laplace(POINT, whole, prior, **OPTIONS)
    return facts(posterior), vectors(posterior, VARIANCE)


@pytest.mark.parametrize(
    "kind", ["ids", "slabs", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("runs", "boxes"))]
)
def test_a_field_of_many_ranks(comm, alone, with_operators, kind):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, start = numbers_of(kind, mesh)
        parts = Parts(mesh, numbers)

        def hessp(x, v):
            return parts.own(lambda every: whole(None, every))(v)

        diagonal = DiagonalPrior(VARIANCE[numbers], mean=0.5)
        for prior, expected in ((diagonal, alone), (parts.prior(), with_operators)):
            posterior = laplace(start, hessp, prior, mesh=mesh, reduction="sum", **OPTIONS)
            assert facts(posterior) == expected[0]
            like = VARIANCE[numbers].reshape(-1) if kind == "slabs" else VARIANCE[numbers]
            for part, every in zip(vectors(posterior, like), expected[1], strict=True):
                assert np.array_equal(parts.whole(part), every)
            assert posterior._rows.shape == (8, numbers.size if kind != "ids" else posterior._rows.shape[1])


def test_it_goes_on_from_a_checkpoint_with_the_same_bits(mesh, folder, alone):
    prior = DiagonalPrior(VARIANCE, mean=0.5)
    for fails in (5, 17, 31):  # in each pass
        calls = []

        def hessp(x, v, fails=fails, calls=calls):
            calls.append(v)
            if len(calls) == fails:
                raise RuntimeError("a node is gone")
            return whole(x, v)

        with mpishard.Checkpoints(folder / f"{fails}", mesh, every=3) as checkpoints:
            files = {"mesh": mesh, "checkpoints": checkpoints, "resume": True}
            with pytest.raises(RuntimeError, match="a node is gone"):
                laplace(POINT, hessp, prior, **files, **OPTIONS)
            calls[:] = [None] * fails
            with mpishard.RunRecord(folder / f"record {fails}", mesh) as record:
                posterior = laplace(POINT, hessp, prior, record=record, **files, **OPTIONS)
            saved = (fails - 1) // 3 * 3
            assert same(posterior, alone) and len(calls) == fails + PRODUCTS - saved
            assert (
                same(laplace(POINT, hessp, prior, **files, **OPTIONS), alone) and len(calls) == fails + PRODUCTS - saved
            )
            for x, other, what in ((POINT + 1, prior, "x"), (POINT, DiagonalPrior(3.0), "prior")):
                with pytest.raises(ValueError, match=f"of another {what}:"):
                    laplace(x, hessp, other, **files, **OPTIONS)
            with pytest.raises(ValueError, match="is of rank=8, and this is 9"):
                laplace(POINT, hessp, prior, **files, **{**OPTIONS, "rank": 9})
            with pytest.raises(ValueError, match="is of laplace, and this is LBFGSB"):
                mpishard.minimize(lambda x: (x @ x, 2 * x), POINT, **files)
            with pytest.raises(ValueError, match="is of laplace, and this is lsqr"):
                mpishard.lsqr(np.eye(3), np.ones(3), **files)
        if mesh.rank == 0:
            assert Run.read(folder / f"record {fails}").metrics["step"].tolist() == [*range(saved + 1, PRODUCTS + 1)]


@pytest.mark.parametrize(
    "given", [pytest.param({"samples": SHOTS}, id="samples"), pytest.param({}, id="whole", marks=pytest.mark.full)]
)
def test_elastic_runs_have_the_bits_of_one_process(mesh, folder, alone, given):
    prior = DiagonalPrior(VARIANCE, mean=0.5)
    hessp = product if given else whole
    options = {"mesh": mesh, "elastic": {"max_workers": max(1, mesh.size - 1)}, **given, **OPTIONS}
    assert same(laplace(POINT, hessp, prior, **options), alone)
    with mpishard.Checkpoints(folder, mesh, every=10) as checkpoints:
        for _ in range(2):
            posterior = laplace(POINT, hessp, prior, checkpoints=checkpoints, resume=True, **options)
            assert same(posterior, alone)


def test_elastic_groups_share_a_partition(comm, alone):
    with mpishard.Mesh(comm, tensor=2 if comm.size % 2 == 0 else comm.size) as mesh:
        numbers, start = numbers_of("ids", mesh)
        parts = Parts(mesh, numbers)

        def hessp(x, v, shots):
            return parts.own(lambda every: product(None, every, shots))(v)

        posterior = laplace(
            start, hessp, DiagonalPrior(VARIANCE[numbers], mean=0.5), mesh=mesh, samples=SHOTS, elastic=True, **OPTIONS
        )
        assert facts(posterior) == alone[0]
        assert np.array_equal(parts.whole(posterior.variance()), alone[1][0])


def test_errors_of_one_rank_are_raised_on_all(mesh):
    last = mesh.rank == mesh.size - 1

    def hessp(x, v):
        if last:
            raise RuntimeError("no adjoint")
        return v

    class Wrong(OperatorPrior):
        def on(self, x, mesh=None):
            if last:
                raise RuntimeError("no grid")
            return self

    prior = DiagonalPrior(1.0)
    with pytest.raises(RuntimeError, match="no adjoint"):
        laplace(POINT, hessp, prior, mesh=mesh, **OPTIONS)
    with pytest.raises(RuntimeError, match="no grid"):
        laplace(POINT, whole, Wrong(np.positive, np.positive), mesh=mesh, **OPTIONS)
    with pytest.raises(ValueError, match="prior.precision has 59"):
        laplace(POINT, whole, OperatorPrior(lambda v: v[last:], np.positive), mesh=mesh, **OPTIONS)
    posterior = laplace(POINT, whole, prior, mesh=mesh, **OPTIONS)
    with pytest.raises(ValueError, match="59 elements"):
        posterior.covariance @ POINT[last:]
