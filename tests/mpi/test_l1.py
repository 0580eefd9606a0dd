"""L1 terms on ranks: the bits of one process for whole starts, slabs and partitions, also where a run was resumed."""

from __future__ import annotations

import numpy as np
import pytest
from descent import rosenbrock

import mpishard
from mpishard import L1, FlatParameters, ParameterSpec, Partition, Tikhonov, minimize, regularized
from mpishard.record import Run

SIZE = 24
SHAPE = (8, 3)
START = np.where(np.arange(SIZE) % 2, 1.0, -1.2)
WEIGHTS = np.where(np.arange(SIZE) % 5 == 4, 0, np.linspace(0.5, 20, SIZE))
REFERENCE = np.arange(SIZE) % 3 / 4
FORM, GOAL = np.linspace(1, 30, SIZE), 3 * np.sin(np.arange(SIZE))
OPTIONS = {"options": {"maxiter": 12, "ftol": 0.0}}
NAMES = ("fun", "nit", "nfev", "status", "message", "at_reference")


def term(numbers: np.ndarray) -> L1:
    """That of the elements with these numbers, of a field of their shape."""
    return L1(WEIGHTS[numbers], reference=REFERENCE[numbers])


def misfit(numbers: np.ndarray):
    """Of these elements: a sum of multiples of a power of 2, which has the same bits in any parts."""

    def function(x):
        residual = (x["k"] if isinstance(x, FlatParameters) else x) - GOAL[numbers]
        value = np.rint(2.0**28 * FORM[numbers] * residual**4).sum() * 2.0**-30
        return float(value), np.rint(2.0**30 * FORM[numbers] * residual**3) * 2.0**-30

    return function


@pytest.fixture(scope="module")
def alone():
    every = np.arange(SIZE)
    return minimize(regularized(misfit(every), term(every)), np.zeros(SIZE), bounds=(-1.0, 2.5), **OPTIONS)


def whole(comm, values, numbers):
    found = np.full(SIZE, np.nan)
    for theirs, places in comm.allgather((np.ravel(values), np.ravel(numbers))):
        found[places] = theirs
    return found


def check(comm, found, alone, numbers, gradient):
    assert all(found[name] == alone[name] for name in NAMES) and found.at_reference > 3
    assert np.array_equal(whole(comm, gradient, numbers), alone.jac)


@pytest.mark.quick
def test_a_whole_start_and_its_elastic_runs(mesh, same_on_all):
    """Of a function that all ranks compute, of one in parts, and of samples: the terms count once."""
    fun = regularized(rosenbrock, term(np.arange(SIZE)))
    expected = minimize(fun, START, bounds=(-1.5, 0.9), **OPTIONS)
    assert expected.nit == 12 and 0 < expected.at_reference < SIZE
    for elastic in (False, True):
        found = minimize(fun, START, bounds=(-1.5, 0.9), mesh=mesh, elastic=elastic, **OPTIONS)
        assert all(np.array_equal(found[name], expected[name]) for name in expected) and same_on_all(found.x)
    half = [np.arange(SIZE) % 2 == parity for parity in (0, 1)]

    def of_samples(x, samples):
        value, gradient = 0.0, np.zeros(SIZE)
        for sample in samples:
            part = misfit(np.flatnonzero(half[sample]))(x[half[sample]])
            value, gradient[half[sample]] = value + part[0], part[1]
        return value, gradient

    def of_rank(x):
        return of_samples(x, np.arange(2)[mesh.rank :: mesh.size])

    every = np.arange(SIZE)
    expected = minimize(regularized(misfit(every), term(every)), np.zeros(SIZE), **OPTIONS)
    of_sum = regularized(of_rank, term(every), mesh=mesh, reduction="sum")
    for found in (
        minimize(of_sum, np.zeros(SIZE), mesh=mesh, reduction="sum", **OPTIONS),
        minimize(regularized(of_samples, term(every)), np.zeros(SIZE), mesh=mesh, samples=2, elastic=True, **OPTIONS),
    ):
        assert all(np.array_equal(found[name], expected[name]) for name in expected) and same_on_all(found.x)


def numbers_of(kind, ranks):
    """The numbers of a rank's elements, of the last rank none if there are several, and what says so."""
    order = np.random.default_rng(3).permutation(SIZE) if kind == "ids" else np.arange(SIZE)
    parts = [*np.array_split(order, max(1, ranks.size - 1)), order[:0]]
    return parts[ranks.rank], ({"ids": parts[ranks.rank]} if kind == "ids" else {})


@pytest.mark.parametrize("kind", ["runs", "ids"])
def test_partitions(comm, alone, kind):
    numbers, how = numbers_of(kind, comm)
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        summed = {"mesh": mesh, "reduction": "sum"}
        start = Partition(np.zeros(numbers.size), mesh, **how)
        found = minimize(
            regularized(misfit(numbers), term(numbers), **summed), start, bounds=(-1.0, 2.5), **summed, **OPTIONS
        )
        check(comm, found, alone, numbers, found.jac)
        assert np.array_equal(whole(comm, found.x, numbers), alone.x)

        def of_two(p):
            value, gradient = misfit(numbers)(p["a"])
            return value, {"a": gradient, "b": p["b"] - 0.5}

        of_fields = L1({"a": WEIGHTS[numbers], "b": 1.0}, reference={"a": REFERENCE[numbers]})
        fields = {"a": start, "b": Partition(np.zeros(numbers.size), mesh, **how)}
        both = minimize(regularized(of_two, of_fields, **summed), fields, **summed, **OPTIONS)
        assert not both.x["b"].any() and both.at_reference > SIZE


def test_slabs_have_arrays_of_their_rows_and_bounds_of_all(comm, alone):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        start = FlatParameters([ParameterSpec("k", SHAPE, tensor_dim=0)], np.float64, place=mesh.place)
        numbers = np.arange(SIZE).reshape(SHAPE)[slice(*start.box("k")[0])]
        own = L1({"k": WEIGHTS[numbers]}, reference={"k": REFERENCE[numbers]})
        fun = regularized(misfit(numbers), own, mesh=mesh, reduction="sum")
        found = minimize(fun, start, bounds={"k": (np.full(SHAPE, -1.0), 2.5)}, mesh=mesh, reduction="sum", **OPTIONS)
        check(comm, found, alone, numbers, found.jac)
        assert np.array_equal(whole(comm, start["k"], numbers), alone.x)


class Stopped(Exception):
    """The job ends here."""


def stopped_after(most, function):
    calls = []

    def stopping(x):
        calls.append(x)
        if len(calls) > most:
            raise Stopped(f"after {most} evaluations")
        return function(x)

    return stopping


def test_a_run_goes_on_in_another_partition_of_fewer_ranks(comm, alone, folder):
    def run(ranks, kind, most):
        numbers, how = numbers_of(kind, ranks)
        with mpishard.Mesh(ranks, tensor=ranks.size) as mesh, mpishard.Checkpoints(folder, mesh, every=2) as saved:
            summed = {"mesh": mesh, "reduction": "sum"}
            fun = regularized(stopped_after(most, misfit(numbers)), term(numbers), **summed)
            start = Partition(np.zeros(numbers.size), mesh, **how)
            files = {"checkpoints": saved, "resume": True, "bounds": (-1.0, 2.5)}
            found = minimize(fun, start, **files, **summed, **OPTIONS)
            check(ranks, found, alone, numbers, found.jac)

    with pytest.raises(Stopped):
        run(comm, "runs", 7)
    fewer = comm.Split(int(comm.rank == comm.size - 1 > 0), comm.rank)
    if comm.rank < max(1, comm.size - 1):
        run(fewer, "ids", alone.nfev - 5)
    comm.Barrier()
    fewer.Free()


def test_a_run_is_recorded_and_resumes_with_its_terms_alone(mesh, alone, folder):
    every, zeros = np.arange(SIZE), np.zeros(SIZE)
    with mpishard.Checkpoints(folder / "saved", mesh, every=2) as checkpoints:
        files = {"mesh": mesh, "checkpoints": checkpoints, "resume": True, "bounds": (-1.0, 2.5), **OPTIONS}
        with pytest.raises(Stopped), mpishard.RunRecord(folder / "record", mesh) as record:
            minimize(regularized(stopped_after(7, misfit(every)), term(every)), zeros, record=record, **files)
        with pytest.raises(ValueError, match="other bounds, L1 terms"):
            minimize(regularized(misfit(every), L1(WEIGHTS)), zeros, **files)
        with mpishard.RunRecord(folder / "record", mesh) as record:
            found = minimize(regularized(misfit(every), term(every)), zeros, record=record, **files)
        assert all(np.array_equal(found[name], alone[name]) for name in alone)
        again = minimize(regularized(misfit(every), term(every)), zeros, **files)  # compares the function
        assert again.message == found.message
        other = regularized(lambda x: (1.0 + misfit(every)(x)[0], misfit(every)(x)[1]), term(every))
        with pytest.raises(ValueError, match="is of another function"):
            minimize(other, zeros, **files)
    if mesh.rank == 0:
        metrics = Run.read(folder / "record").metrics
        assert metrics["accepted_loss"][-1] == min(metrics["loss"]) == alone.fun


@pytest.mark.quick
def test_what_one_rank_gives_wrong_is_an_error_on_all(comm, mesh):
    odd = mesh.rank == mesh.size - 1
    for given, words in (
        (L1(np.ones(3 if odd else SIZE)), rf"L1: the weights .*\(3,\).*\({SIZE},\)"),
        (L1(1.0, reference=np.full(SIZE, np.nan if odd else 0)), "L1: the references contain NaN"),
        (L1(np.full(SIZE, -1.0 if odd else 1.0)), "L1: the weight of .* is -1"),
    ):
        with pytest.raises(ValueError, match=words):
            minimize(regularized(rosenbrock, given), START, mesh=mesh)
    if mesh.size > 1:
        for given in (L1(2.0 if odd else 1.0), L1(1.0, reference=1.0 if odd else None)):
            with pytest.raises(ValueError, match="l1|L1"):
                minimize(regularized(rosenbrock, given), START, mesh=mesh)
    with mpishard.Mesh(comm, data=1, tensor=-1) as slabs:
        field = np.zeros((3, 4))
        for name in ("reference", "mask", "weight"):
            wrong = Tikhonov(**{name: np.ones((3, 3 if odd else 4)), "mesh": slabs})
            with pytest.raises(
                ValueError, match=rf"{name} has the shape \(3, 3\), but the field on this rank \(3, 4\)"
            ):
                wrong.value_and_gradient(field)
