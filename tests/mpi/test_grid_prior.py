"""The prior of fields on grids: how the field is cut is no part of what it computes."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard import BiLaplacianPrior, FlatParameters, Mesh, ParameterSpec, Partition, minimize, regularized

GRID = (30, 4, 7)
FIELD = np.sin(np.arange(840.0) ** 2).reshape(GRID)


def bars(grid, dims, rank, ranks):
    """A box of this rank: the grid is cut at random along one dimension, with an even number of ranks along another."""
    random = np.random.default_rng(ranks)
    ways = [1] * len(grid)
    ways[dims[-1]] = 2 if ranks % 2 == 0 else 1
    ways[dims[0]] = ranks // ways[dims[-1]] if dims[0] != dims[-1] else ranks
    edges = [[0, *np.sort(random.integers(0, n + 1, k - 1)), n] for n, k in zip(grid, ways, strict=True)]
    places = np.unravel_index(rank, ways)
    return tuple((int(edge[at]), int(edge[at + 1])) for edge, at in zip(edges, places, strict=True))


def assert_part_of(whole, part, index, field):
    """Bits of a prior on this rank's part are those of the whole one, in one process."""
    own = field[index]
    assert np.array_equal(part.precision(own), whole.precision(field)[index])
    assert np.array_equal(part.covariance(own), whole.covariance(field)[index])
    assert np.array_equal(part.factor(own), whole.factor(field)[index])
    assert np.array_equal(part.variance(), whole.variance()[index])
    assert np.array_equal(part.mean, whole.mean[index])
    assert part.log_determinant == whole.log_determinant


@pytest.mark.quick
@pytest.mark.parametrize("dims", [(0, 1), (1, 2), (2, 0)], ids=str)
def test_boxes_have_the_bits_of_the_whole_field(comm, dims):
    lengths = {"correlation_length": (4.0, 2.0, 3.0), "spacing": (1.0, 0.5, 2.0)}
    with Mesh(comm, tensor=comm.size) as mesh:
        box = bars(GRID, dims, mesh.tensor.rank, comm.size)
        index = tuple(slice(*run) for run in box)
        deviation = 1 + np.cos(FIELD) ** 2
        whole = BiLaplacianPrior(GRID, **lengths, standard_deviation=deviation, mean=FIELD)
        part = BiLaplacianPrior(GRID, **lengths, standard_deviation=deviation[index], mean=FIELD[index])
        x = Partition(FIELD[index], mesh, shape=GRID, box=box)
        assert_part_of(whole, part.on(x, mesh), index, FIELD)
        assert_part_of(whole, part.on(x), index, FIELD)


@pytest.mark.parametrize("shape", [(40,), (30, 1), (1, 3, 25)], ids=str)
def test_slabs_have_the_bits_of_the_whole_field(comm, shape):
    """Of one cell too, which is less than a halo."""
    tensor_dim = int(np.argmax(shape))
    field = np.sin(np.arange(np.prod(shape))).reshape(shape)
    with Mesh(comm, tensor=comm.size) as mesh:
        x = FlatParameters([ParameterSpec("k", shape, tensor_dim=tensor_dim)], np.float64, place=mesh.place)
        index = tuple(slice(*run) for run in x.box("k"))
        whole = BiLaplacianPrior(shape, correlation_length=5.0, standard_deviation=1 + field**2, mean=field)
        part = BiLaplacianPrior(
            shape, correlation_length=5.0, standard_deviation=1 + field[index] ** 2, mean=field[index]
        )
        assert_part_of(whole, part.on(x, mesh), index, field)


def test_runs_of_values_are_a_row_of_cells(comm):
    with Mesh(comm, tensor=comm.size) as mesh:
        index = slice(3 * comm.rank, 3 * comm.rank + 3)
        prior = BiLaplacianPrior((3 * comm.size,), correlation_length=2.0)
        field = np.sin(np.arange(3.0 * comm.size))
        found = prior.on(Partition(field[index], mesh)).covariance(field[index])
        assert np.array_equal(found, prior.covariance(field)[index])
        with pytest.raises(ValueError, match="ids"):
            prior.on(Partition(field[index], mesh, ids=np.arange(3 * comm.size)[index]))


def test_groups_each_have_the_field(comm):
    """A whole one on each rank, and one that the ranks of each group share."""
    tensor = 2 if comm.size % 2 == 0 else 1
    with Mesh(comm, tensor=tensor) as mesh:
        box = bars(GRID, (1, 2), mesh.tensor.rank, tensor)
        index = tuple(slice(*run) for run in box)
        prior = BiLaplacianPrior(GRID, correlation_length=3.0)
        expected = prior.factor(FIELD)
        found = prior.on(Partition(FIELD[index], mesh, shape=GRID, box=box), mesh).factor(FIELD[index])
        assert np.array_equal(found, expected[index])
        assert np.array_equal(prior.on(FIELD.ravel(), mesh).factor(FIELD.ravel()), expected.ravel())


def test_what_one_rank_alone_gives_is_an_error_on_all(comm):
    last = comm.rank == comm.size - 1
    with Mesh(comm, tensor=comm.size) as mesh:
        x = Partition(np.zeros((1, 4)), mesh, shape=(comm.size, 4), box=((comm.rank, comm.rank + 1), (0, 4)))
        prior = BiLaplacianPrior((comm.size, 4), correlation_length=2.0)
        with pytest.raises(ValueError, match="the vector has 5"):
            prior.on(x).factor(np.zeros(5 if last else 4))
        with pytest.raises(ValueError, match="mean has 3"):
            BiLaplacianPrior((comm.size, 4), correlation_length=2.0, mean=np.zeros(3 if last else 4)).on(x, mesh)


TARGET = np.cos(FIELD)


def half(index=..., shots=1):
    """Half of the squares of this rank's part of a field less another, in equal parts."""

    def function(x, samples=range(shots)):
        away = x.reshape(TARGET[index].shape) - TARGET[index]
        share = len(samples) / shots
        return share * 0.5 * float((away**2).sum()), share * away

    return function


def test_a_prior_is_a_term_of_fields_that_ranks_share(comm):
    """It counts once over data and tensor ranks, in boxes and in slabs, with the bits of one rank."""
    prior = BiLaplacianPrior(GRID, correlation_length=3.0, mean=0.5)
    nothing = lambda x: (0.0, np.zeros(x.size))  # noqa: E731
    value, gradient = regularized(nothing, prior)(FIELD)
    options = {"maxiter": 9}
    alone = minimize(regularized(half(), prior), np.zeros(FIELD.size), options=options)
    with Mesh(comm, tensor=2 if comm.size % 2 == 0 else comm.size) as mesh:
        ranks = mesh.tensor
        box = bars(GRID, (1, 2), ranks.rank, ranks.size)
        index = tuple(slice(*run) for run in box)
        start = Partition(np.zeros(FIELD[index].shape), mesh, shape=GRID, box=box)
        part = prior.on(start, mesh)
        found = regularized(nothing, part, mesh=mesh)(FIELD[index])
        assert found[0] == value and np.array_equal(found[1], gradient.reshape(GRID)[index].ravel())
        shots = 4
        summed = {"mesh": mesh, "reduction": "sum"}
        result = minimize(
            regularized(half(index, shots), part, **summed),
            start,
            samples=shots,
            elastic=True,
            options=options,
            **summed,
        )
        assert result.fun == pytest.approx(alone.fun, rel=1e-12) and result.nfev == alone.nfev
        assert np.allclose(result.x, alone.x.reshape(GRID)[index], rtol=0, atol=1e-10)
        names = FlatParameters([ParameterSpec("k", GRID, tensor_dim=0)], np.float64, place=mesh.place)
        rows = slice(*names.box("k")[0])
        names["k"][...] = FIELD[rows]
        added, slope = regularized(lambda p: (0.0, p.flat * 0), prior.on(names, mesh), **summed)(names)
        counts = mesh.data.rank == ranks.rank == 0
        assert added == (value if counts else 0)
        assert mesh.data.rank or np.array_equal(slope, gradient.reshape(GRID)[rows].ravel())
        if ranks.size > 1:
            with pytest.raises(ValueError, match=f"{ranks.size} tensor ranks.*mesh="):
                regularized(lambda p: (0.0, p.flat * 0), prior.on(names, mesh))(names)
