"""Total variation and norms of groups on ranks: the bits of one process for whole starts, slabs and partitions."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard
from mpishard import FlatParameters, GroupL1, ParameterSpec, Partition, TotalVariation, minimize, regularized

SHAPE = (11, 4)
SIZE = 44
EVERY = np.arange(SIZE).reshape(SHAPE)
GOAL = (np.indices(SHAPE)[0] > 4) * 1.0 + 0.3 * np.sin(7 * EVERY)
FORM = np.linspace(1, 4, SIZE).reshape(SHAPE)
WEIGHT = np.where(EVERY % 7 == 3, 0.0, np.linspace(0.1, 0.3, SIZE).reshape(SHAPE))
MASK = EVERY % 9 != 4
GROUPS = EVERY % 5 - (EVERY % 11 == 0)  # every rank has elements of each
OPTIONS = {"options": {"maxiter": 6, "ftol": 0.0, "gtol": 1e-10}, "bounds": (-0.1, 1.2)}
KINDS = ("total variation", "groups", "rows")


def term(kind, numbers=EVERY):
    """That of the elements with these numbers."""
    if kind == "total variation":
        return TotalVariation(WEIGHT.reshape(-1)[numbers], spacing=(1.0, 0.5), mask=MASK.reshape(-1)[numbers])
    if kind == "groups":
        return GroupL1(np.linspace(0.5, 4, 5), groups=GROUPS.reshape(-1)[numbers], reference=0.25)
    return GroupL1(0.4, axis=1)


def misfit(numbers):
    """Of these elements: a sum of multiples of a power of 2, which has the same bits in any parts."""
    goal, form = GOAL.reshape(-1)[numbers], FORM.reshape(-1)[numbers]

    def function(x):
        field = x["k"] if isinstance(x, FlatParameters) else x
        residual = field.reshape(numbers.shape) - goal
        value = np.rint(2.0**28 * form * residual**4).sum() * 2.0**-30 + np.rint(2.0**30 * residual**2).sum() * 2.0**-31
        return float(value), np.rint(2.0**30 * (form * residual**3 + residual)) * 2.0**-30

    return function


@pytest.fixture(scope="module")
def alone():
    return {kind: minimize(regularized(misfit(EVERY), term(kind)), np.zeros(SHAPE), **OPTIONS) for kind in KINDS}


def whole(comm, values, numbers):
    found = np.full(SIZE, np.nan)
    for theirs, places in comm.allgather((np.ravel(values), np.ravel(numbers))):
        found[places] = theirs
    return found


def check(comm, found, expected, numbers, x):
    names = ("fun", "nit", "nfev", "status", "message")
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}
    assert np.array_equal(whole(comm, found.jac, numbers), expected.jac)
    assert np.array_equal(whole(comm, x, numbers), expected.x)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_start_and_its_elastic_runs(mesh, same_on_all, alone, kind):
    assert alone[kind].nit > 2
    for elastic in (False, True):
        found = minimize(regularized(misfit(EVERY), term(kind)), np.zeros(SHAPE), mesh=mesh, elastic=elastic, **OPTIONS)
        assert all(np.array_equal(found[name], alone[kind][name]) for name in alone[kind]) and same_on_all(found.x)


def box_of(ranks):
    """A rank's box: the grid is cut along both dimensions, into boxes that may be narrower than the halo."""
    columns = 2 if ranks.size > 3 else 1
    rows = -(-ranks.size // columns)
    cuts = [np.linspace(0, extent, parts + 1).astype(int) for extent, parts in zip(SHAPE, (rows, columns), strict=True)]
    place = divmod(ranks.rank, columns)
    return tuple((int(cut[each]), int(cut[each + 1])) for cut, each in zip(cuts, place, strict=True))


def run_boxes(ranks, kind, function=misfit, **files):
    box = box_of(ranks)
    numbers = EVERY[tuple(slice(*run) for run in box)]
    mesh = files.pop("mesh")
    start = Partition(np.zeros(numbers.shape), mesh, shape=SHAPE, box=box)
    summed = {"mesh": mesh, "reduction": "sum"}
    return numbers, minimize(
        regularized(function(numbers), term(kind, numbers), **summed), start, **summed, **files, **OPTIONS
    )


@pytest.mark.parametrize("kind", KINDS)
def test_partitions_in_boxes(comm, alone, kind):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, found = run_boxes(comm, kind, mesh=mesh)
        check(comm, found, alone[kind], numbers, found.x)


@pytest.mark.parametrize("kind", KINDS)
def test_slabs(comm, alone, kind):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        start = FlatParameters([ParameterSpec("k", SHAPE, tensor_dim=0)], np.float64, place=mesh.place)
        numbers = EVERY[slice(*start.box("k")[0])]
        fun = regularized(misfit(numbers), term(kind, numbers), mesh=mesh, reduction="sum")
        given = {**OPTIONS, "bounds": {"k": OPTIONS["bounds"]}}
        found = minimize(fun, start, mesh=mesh, reduction="sum", **given)
        check(comm, found, alone[kind], numbers, start["k"])


class Stopped(Exception):
    """The job ends here."""


def stopped_after(most):
    calls = []

    def make(numbers):
        function = misfit(numbers)

        def stopping(x):
            calls.append(x)
            if len(calls) > most:
                raise Stopped(f"after {most} evaluations")
            return function(x)

        return stopping

    return make


def test_a_run_goes_on_in_other_boxes_and_whole(comm, alone, folder):
    """The dual field is dealt out as the unknowns are."""
    kind = "total variation"
    with mpishard.Mesh(comm, tensor=comm.size) as mesh, mpishard.Checkpoints(folder, mesh, every=2) as saved:
        files = {"mesh": mesh, "checkpoints": saved, "resume": True}
        with pytest.raises(Stopped):
            run_boxes(comm, kind, stopped_after(4), **files)
    fewer = comm.Split(int(comm.rank == comm.size - 1 > 0), comm.rank)
    if comm.rank < max(1, comm.size - 1):
        with mpishard.Mesh(fewer, tensor=fewer.size) as mesh, mpishard.Checkpoints(folder, mesh, every=2) as saved:
            files = {"mesh": mesh, "checkpoints": saved, "resume": True}
            numbers, found = run_boxes(fewer, kind, stopped_after(alone[kind].nfev - 3), **files)
            check(fewer, found, alone[kind], numbers, found.x)
    comm.Barrier()
    fewer.Free()


def test_a_run_is_recorded_and_resumes_with_its_terms_alone(mesh, alone, folder):
    kind = "groups"
    with mpishard.Checkpoints(folder / "saved", mesh, every=2) as checkpoints:
        files = {"mesh": mesh, "checkpoints": checkpoints, "resume": True, **OPTIONS}
        with pytest.raises(Stopped), mpishard.RunRecord(folder / "record", mesh) as record:
            minimize(regularized(stopped_after(4)(EVERY), term(kind)), np.zeros(SHAPE), record=record, **files)
        for other in (GroupL1(1.0, groups=GROUPS, reference=0.25), TotalVariation(1.0)):
            with pytest.raises(ValueError, match="L1 terms|vectors|slots"):
                minimize(regularized(misfit(EVERY), other), np.zeros(SHAPE), **files)
        found = minimize(regularized(misfit(EVERY), term(kind)), np.zeros(SHAPE), **files)
        assert all(np.array_equal(found[name], alone[kind][name]) for name in alone[kind])


@pytest.mark.quick
def test_what_one_rank_gives_wrong_is_an_error_on_all(comm, mesh):
    odd = mesh.rank == mesh.size - 1
    for given, words in (
        (TotalVariation(np.ones((3, 3) if odd else SHAPE)), r"weight has the shape \(3, 3\)"),
        (GroupL1(1.0, groups=np.full(SHAPE, -5 if odd else 0)), "the number -5"),
    ):
        with pytest.raises(ValueError, match=words):
            minimize(regularized(misfit(EVERY), given), np.zeros(SHAPE), mesh=mesh)
    if mesh.size > 1:
        with pytest.raises(ValueError, match="terms"):
            given = GroupL1(1.0, axis=0) if odd else TotalVariation(1.0)
            minimize(regularized(misfit(EVERY), given), np.zeros(SHAPE), mesh=mesh)
    with mpishard.Mesh(comm, tensor=comm.size) as cut:
        start = Partition(np.zeros(3), cut)
        with pytest.raises(ValueError, match="needs a grid"):
            summed = {"mesh": cut, "reduction": "sum"}
            minimize(regularized(lambda x: (0.0, x), TotalVariation(1.0), **summed), start, **summed)
