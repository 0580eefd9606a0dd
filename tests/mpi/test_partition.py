"""Fields that the application has distributed: the partition is no part of the result."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import fsum
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import OptimizeResult

import mpishard
from mpishard import Partition, minimize
from mpishard.checkpoint import Checkpoints
from mpishard.inverse.residuals import Loss
from mpishard.reduction.tree_sum import tree_sum

GRID = (4, 3, 5)
SIZE = 60
NUMBERS = np.arange(SIZE)
WANTED = np.sin(NUMBERS)
STIFFNESS = np.linspace(1, 40, SIZE)
EVERY = np.arange(6)  # samples


def numbers_of(kind: str, rank: int, ranks: int, seed: int = 0) -> tuple[np.ndarray, dict]:
    """The numbers of a rank's values in a partition, and the arguments that say so."""
    random = np.random.default_rng(seed)
    if kind == "boxes":
        ways = [1, 1, 1]
        first, other = random.permutation(3)[:2]
        ways[other] = 2 if ranks % 2 == 0 else 1
        ways[first] = ranks // ways[other]
        place = np.unravel_index(rank, ways)
        edges = [[0, *np.sort(random.integers(0, n + 1, k - 1)).tolist(), n] for n, k in zip(GRID, ways, strict=True)]
        box = tuple((edge[at], edge[at + 1]) for edge, at in zip(edges, place, strict=True))
        return NUMBERS.reshape(GRID)[tuple(slice(*pair) for pair in box)], {"shape": GRID, "box": box}
    cuts = [0, *np.sort(random.integers(0, SIZE + 1, ranks - 1)).tolist(), SIZE]
    if kind == "all on one rank":
        cuts = [0] * ranks + [SIZE]
    run = slice(cuts[rank], cuts[rank + 1])
    if kind == "runs":
        return NUMBERS[run], {}
    numbers = random.permutation(SIZE)[run]
    return numbers, {"ids": numbers}


class Misfit:
    """Half the sum of ``w (x - wanted)^4``, whose bits do not depend on who adds it up."""

    def __init__(self, numbers: np.ndarray, mesh: mpishard.Mesh | None = None) -> None:
        self.shape = numbers.shape
        self.w, self.wanted = STIFFNESS[numbers], WANTED[numbers]
        self.shots = range(6) if mesh is None else range(6)[mesh.data.rank :: mesh.data.size]
        self.evaluations = 0

    def __call__(self, x):
        assert x.shape == self.shape
        self.evaluations += 1
        r = x - self.wanted
        # Multiples of a power of 2 that are far below 2**53: their sums are exact.
        value = sum(np.rint(2.0**30 * (1 + shot % 2) * self.w * r**4).sum() for shot in self.shots) * 2.0**-31
        factor = sum(2.0 * (1 + shot % 2) for shot in self.shots)
        return float(value), factor * np.rint(2.0**30 * self.w * r**3) * 2.0**-30


def whole(comm, values, numbers):
    return whole_of(comm, values, numbers, SIZE)


def whole_of(comm, values, numbers, size):
    """The values of all ranks by number; the same on all of them."""
    found = np.full(size, np.nan)
    for theirs, places in comm.allgather((values.ravel(), numbers.ravel())):
        found[places] = theirs
    return found


def options(numbers):
    return {"bounds": (np.full(numbers.shape, -0.5), 0.75), "inner_product": STIFFNESS[numbers]}


@pytest.fixture(scope="module")
def alone():
    return minimize(Misfit(NUMBERS), np.zeros(SIZE), **options(NUMBERS), options={"maxiter": 30})


TWELVE = [*itertools.product(["runs", "boxes"], range(3)), *(("ids", seed) for seed in range(4))]
TWELVE += [("all on one rank", seed) for seed in range(2)]


@pytest.mark.quick
@pytest.mark.parametrize("kind, seed", TWELVE)
def test_the_partition_is_no_part_of_the_result(comm, alone, kind, seed):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, how = numbers_of(kind, mesh.tensor.rank, comm.size, seed)
        start = Partition(np.zeros(numbers.shape), mesh, **how)
        found = minimize(
            Misfit(numbers), start, mesh=mesh, reduction="sum", **options(numbers), options={"maxiter": 30}
        )
        assert found.x.shape == found.jac.shape == numbers.shape
        assert np.array_equal(whole(comm, found.x, numbers), alone.x)
        assert (found.nit, found.nfev, found.fun, found.status) == (alone.nit, alone.nfev, alone.fun, alone.status)


def test_groups_share_the_shots(comm, alone):
    tensor = 2 if comm.size % 2 == 0 else 1
    with mpishard.Mesh(comm, tensor=tensor) as mesh:
        numbers, how = numbers_of("ids", mesh.tensor.rank, tensor)
        start = Partition(np.zeros(numbers.shape), mesh, **how)
        misfit = Misfit(numbers, mesh)
        found = minimize(misfit, start, mesh=mesh, reduction="sum", **options(numbers), options={"maxiter": 30})
        assert np.array_equal(whole(comm, found.x, numbers), alone.x) and found.nfev == alone.nfev


def pairs_or_all(comm):
    """The ranks of a group: two if all ranks are in such pairs."""
    return 2 if comm.size % 2 == 0 else comm.size


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("ids", {"samples": 6, "reduction": "sum"}),
        ("boxes", {"samples": 6}),
        pytest.param("ids", {}, marks=pytest.mark.full),
    ],
    ids=["parts of sums", "sums", "whole"],
)
def test_elastic_runs_have_the_bits_of_one_process(comm, alone, kind, way):
    """The samples are the groups'; only one group works, and at its end the others have the result."""
    with mpishard.Mesh(comm, tensor=pairs_or_all(comm)) as mesh:
        numbers, how = numbers_of(kind, mesh.tensor.rank, mesh.tensor.size)
        misfit, rebuilt = Misfit(numbers), []

        def part(x, samples):
            misfit.shots = samples.tolist()
            return misfit(x)

        def of_group(x, samples=EVERY):
            value, gradient = part(x, samples)
            return mesh.tensor.comm.allreduce(value), gradient

        elastic = {"max_workers": 1, "rebuild": rebuilt.append}
        start, points = Partition(np.zeros(numbers.shape), mesh, **how), []
        given = {"mesh": mesh, "elastic": elastic, **options(numbers), "options": {"maxiter": 30}, **way}
        found = minimize(part if "reduction" in way else of_group, start, callback=points.append, **given)
        assert found.x.shape == found.jac.shape == numbers.shape
        assert np.array_equal(whole(comm, found.x, numbers), alone.x)
        assert np.array_equal(whole(comm, found.jac, numbers), alone.jac)
        assert (found.nit, found.nfev, found.fun, found.status) == (alone.nit, alone.nfev, alone.fun, alone.status)
        assert not points or np.array_equal(points[-1], found.x)
        assert rebuilt == [mesh] * len(rebuilt) and bool(rebuilt) == (mesh.data.size > 1)


def test_terms_of_elastic_runs_come_with_the_first_sample(comm):
    given = {"bounds": (-0.5, 0.75), "options": {"maxiter": 10}}
    term = mpishard.Tikhonov(weight=2.0, order=0)
    expected = minimize(mpishard.regularized(Misfit(NUMBERS), term), np.zeros(SIZE), **given)
    with mpishard.Mesh(comm, tensor=pairs_or_all(comm)) as mesh:
        numbers, how = numbers_of("ids", mesh.tensor.rank, mesh.tensor.size)
        misfit = Misfit(numbers)

        def part(x, samples):
            misfit.shots = samples.tolist()
            return misfit(x)

        start = Partition(np.zeros(numbers.shape), mesh, **how)
        term = mpishard.Tikhonov(weight=2.0, order=0, partition=start)
        fun = mpishard.regularized(part, term, mesh=mesh, reduction="sum")
        found = minimize(fun, start, mesh=mesh, samples=6, reduction="sum", elastic=True, **given)
        assert np.allclose(whole(comm, found.x, numbers), expected.x, rtol=1e-12, atol=1e-13)
        assert found.nfev == expected.nfev and found.fun == pytest.approx(expected.fun, rel=1e-13)


@pytest.mark.parametrize("given", [{}, {"samples": 1, "elastic": True}], ids=["fixed", "elastic"])
def test_where_fun_has_failed_on_one_rank_none_calls_jac(comm, given):
    """There it could wait for that rank."""
    calls = []

    def fun(x, *samples):
        calls.append("fun")
        if calls.count("fun") == 3 and comm.rank == comm.size - 1:
            raise mpishard.EvaluationFailed("diverged")
        return float((x**4).sum())

    def jac(x, *samples):
        calls.append("jac")
        return 4 * x**3

    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        start = Partition(np.full(2, 3.0), mesh)
        found = minimize(fun, start, jac=jac, mesh=mesh, reduction="sum", **given)
        assert found.success and len(set(comm.allgather(tuple(calls)))) == 1
        where = f" on rank {comm.size - 1}" if comm.size > 1 else ""
        assert f"an evaluation failed{where}: diverged" in found.message


def test_where_the_function_has_failed_on_one_rank_none_calls_a_term(comm):
    calls = []

    class Counted(mpishard.Tikhonov):
        def value_and_gradient(self, x):
            calls.append("term")
            return 0.0, np.zeros(x.shape)

    def fun(x):
        calls.append("fun")
        if calls.count("fun") == 3 and comm.rank == comm.size - 1:
            raise mpishard.EvaluationFailed("diverged")
        return float((x**4).sum()), 4 * x**3

    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        start = Partition(np.full(2, 3.0), mesh)
        given = {"mesh": mesh, "reduction": "sum"}
        found = minimize(mpishard.regularized(fun, Counted(order=0, partition=start), **given), start, **given)
        assert found.success and len(set(comm.allgather(tuple(calls)))) == 1


def test_elastic_evaluations_of_one_rank_fail_and_are_tried_again(comm):
    """What one rank of a group raises counts for all of it: as an infinite value, or as a call to try again."""
    with mpishard.Mesh(comm, tensor=pairs_or_all(comm)) as mesh:
        numbers, is_last = NUMBERS[mesh.tensor.rank :: mesh.tensor.size], comm.rank == comm.size - 1
        misfit = Misfit(numbers)

        def run(at_third_point, retries=0):
            points, calls = {}, []

            def fun(x, samples):
                calls.append(points.setdefault(x.tobytes(), len(points)))
                misfit.shots = samples.tolist()
                if is_last and (len(calls) % 2 if retries else calls[-1] == 2):
                    return at_third_point(x)
                return misfit(x)

            start = Partition(np.zeros(numbers.shape), mesh, ids=numbers)
            given = {"mesh": mesh, "samples": 6, "reduction": "sum", "elastic": True}
            return minimize(fun, start, **given, options={"maxiter": 5, "retries": retries})

        def fails(x):
            raise mpishard.EvaluationFailed("no convergence")

        found, expected = run(fails), run(lambda x: (np.inf, np.zeros(x.shape)))
        assert np.array_equal(found.x, expected.x) and found.nfev == expected.nfev > 5
        assert "no convergence" in found.message and "no convergence" not in expected.message
        again, free = run(fails, retries=1), run(misfit)
        assert np.array_equal(again.x, free.x) and again.nfev == free.nfev < found.nfev


@pytest.mark.parametrize("method", ["L-BFGS", "CG", "Newton-CG"])
def test_named_fields_and_what_methods_ask_for(comm, method):
    """Directions, preconditioners and callbacks have the arrays of this rank, too."""

    def run(fields, mesh):
        misfits = {name: Misfit(numbers) for name, (numbers, _) in fields.items()}

        def fun(x):
            found = {name: misfits[name](each) for name, each in x.items()}
            return sum(value for value, _ in found.values()), {name: slope for name, (_, slope) in found.items()}

        def product(x, p):
            assert {name: each.shape for name, each in p.items()} == {name: m.shape for name, m in misfits.items()}
            return {name: 27.0 * m.w * (x[name] - m.wanted) ** 2 * p[name] for name, m in misfits.items()}

        def precondition(vector):
            return {name: vector[name] / misfits[name].w for name in vector}

        seen = []
        given = {} if method != "Newton-CG" else {"hessp": product}
        x0 = {name: np.zeros(numbers.shape) for name, (numbers, _) in fields.items()}
        if mesh is not None:
            x0 = {name: Partition(x0[name], mesh, **how) for name, (_, how) in fields.items()}
        return minimize(
            fun, x0, method=method, mesh=mesh, reduction=None if mesh is None else "sum", **given,
            preconditioner=precondition, callback=lambda x: seen.append({name: each.shape for name, each in x.items()}),
            options={"maxiter": 8, "gtol": 1e-3}, fixed={"a": np.zeros(fields["a"][0].shape, bool)},
        ), seen, {name: m.shape for name, m in misfits.items()}  # fmt: skip

    expected, *_ = run({"a": (NUMBERS, {}), "b": (NUMBERS.reshape(GRID), {})}, None)
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        fields = {"a": numbers_of("ids", comm.rank, comm.size), "b": numbers_of("boxes", comm.rank, comm.size, 1)}
        found, seen, shapes = run(fields, mesh)
        assert seen and all(each == shapes for each in seen)
        for name, (numbers, _) in fields.items():
            assert np.array_equal(whole(comm, found.x[name], numbers), expected.x[name].ravel()), name


def test_named_fields_have_the_precision_of_their_values(comm):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:

        def run(dtype):
            numbers, how = numbers_of("ids", comm.rank, comm.size)
            fields = {"a": Partition(np.zeros(numbers.shape, np.float32), mesh, **how)}
            fields["b"] = Partition(np.zeros(2, dtype), mesh)

            def fun(x):
                return sum(((x[k] - 1) ** 2).sum() for k in x), {k: 2 * (x[k] - 1) for k in x}

            return minimize(fun, fields, mesh=mesh, reduction="sum", options={"gtol": 1e-3}).x

        found = run(np.float32)
        assert all(values.dtype == np.float32 and np.allclose(values, 1, atol=1e-3) for values in found.values())
        with pytest.raises(TypeError, match="one precision"):
            run(np.float64)


class Stopped(Exception):
    """The job ends here."""


@pytest.mark.parametrize("kinds", [["ids", "ids", "runs", "ids", "runs", "ids"], ["boxes"] * 6], ids=["ids", "boxes"])
def test_a_run_goes_on_in_five_other_partitions(comm, alone, folder, kinds):
    """It is killed in all of them but the last, and each has another number of ranks, if there are several."""

    def run(ranks, kind, seed, most):
        with mpishard.Mesh(ranks, tensor=ranks.size) as mesh, Checkpoints(folder, mesh, every=2) as checkpoints:
            numbers, how = numbers_of(kind, ranks.rank, ranks.size, seed)
            misfit = Misfit(numbers)

            def fun(x):
                if misfit.evaluations == most:
                    raise Stopped(f"after {most} evaluations")
                return misfit(x)

            found = minimize(
                fun, Partition(np.zeros(numbers.shape), mesh, **how), mesh=mesh, reduction="sum", **options(numbers),
                options={"maxiter": 30}, checkpoints=checkpoints, resume=True,
            )  # fmt: skip
            return found, numbers, misfit.evaluations

    for stage, kind in enumerate(kinds):
        size = comm.size - stage % comm.size
        ranks = comm.Split(int(comm.rank >= size), comm.rank)
        if comm.rank < size and stage < len(kinds) - 1:
            with pytest.raises(Stopped):
                run(ranks, kind, stage, 3)
        elif comm.rank < size:
            found, numbers, evaluations = run(ranks, kind, stage, -1)
            assert np.array_equal(whole(ranks, found.x, numbers), alone.x) and found.nfev == alone.nfev
            assert evaluations <= alone.nfev - 2 * (len(kinds) - 1)
        comm.Barrier()
        ranks.Free()


def test_other_bounds_of_one_element_are_another_run(comm, tmp_path_factory):
    folder = comm.bcast(str(tmp_path_factory.mktemp("run")) if comm.rank == 0 else None)
    with mpishard.Mesh(comm, tensor=comm.size) as mesh, Checkpoints(folder, mesh) as checkpoints:
        numbers, how = numbers_of("ids", comm.rank, comm.size)
        for lower in (-0.5, -0.25):
            start = Partition(np.zeros(numbers.shape), mesh, **how)
            lowest = np.where(numbers == 17, lower, -0.5)
            arguments = {"mesh": mesh, "reduction": "sum", "checkpoints": checkpoints, "options": {"maxfun": 4}}
            if lower == -0.5:
                minimize(Misfit(numbers), start, bounds=(lowest, 1), **arguments)
                continue
            with pytest.raises(ValueError, match="other bounds"):
                minimize(Misfit(numbers), start, bounds=(lowest, 1), resume=True, **arguments)


def test_the_gradient_is_checked(comm):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, how = numbers_of("ids", comm.rank, comm.size)
        w, wanted = STIFFNESS[numbers], WANTED[numbers]

        def fun(x, factor=1.0):
            r = x - wanted
            return float(0.25 * (w * r**4).sum()), factor * w * r**3

        start = Partition(np.ones(numbers.shape), mesh, **how)
        checked = {"mesh": mesh, "reduction": "sum", "disp": False}
        assert mpishard.check_gradient(fun, start, hessp=lambda x, p: 3 * w * (x - wanted) ** 2 * p, **checked)
        assert not mpishard.check_gradient(lambda x: fun(x, np.where(numbers == 11, 1.5, 1.0)), start, **checked)
        along = mpishard.check_gradient(fun, start, direction=(numbers == 5) * 1.0, **checked)
        assert along.derivative == pytest.approx(STIFFNESS[5] * (1 - WANTED[5]) ** 3)


# Least squares, constraints and adjoints: the functions bring the values of a group together by themselves.

NEAR = np.exp(-abs(np.subtract.outer(NUMBERS, NUMBERS)) / 2.0)
SHOTS = (1.0, 0.5, 2.0)
OF_RANKS = ("cost", "optimality", "nfev", "nhev", "nit", "status", "message")


class Blurred:
    """Residuals ``shot (tanh(K x) - data)``, and their Jacobian as an operator, for the shots of this group.

    The bits of a product with the adjoint do not depend on how shots are dealt out.
    """

    def __init__(self, numbers, mesh=None, near=NEAR, shots=SHOTS):
        self.numbers, self.near, self.data = numbers, near, np.tanh(near @ WANTED)
        self.comm = None if mesh is None else mesh.tensor.comm
        self.shots = shots if mesh is None or shots is not SHOTS else SHOTS[mesh.data.rank :: mesh.data.size]
        self.size = numbers.size * len(self.shots)

    def everywhere(self, values):
        return values if self.comm is None else whole(self.comm, values, self.numbers)

    def of_shots(self, values):
        return np.outer(self.shots, values[self.numbers]).ravel()

    def residuals(self, x):
        assert x.shape == self.numbers.shape
        return self.of_shots(np.tanh((self.near * self.everywhere(x)).sum(1)) - self.data)

    def jacobian(self, x):
        slope = np.cosh((self.near * self.everywhere(x)).sum(1)) ** -2

        def matvec(v):
            assert v.shape == (self.numbers.size,)
            return self.of_shots(slope * (self.near * self.everywhere(v)).sum(1))

        def rmatvec(u):
            found = np.zeros(self.numbers.shape)
            for shot, part in zip(self.shots, u.reshape(len(self.shots), self.numbers.size), strict=True):
                back = (self.near.T * (slope * self.everywhere(shot * part))).sum(1)[self.numbers]
                found += np.rint(2.0**40 * back) * 2.0**-40
            return found

        return SimpleNamespace(shape=(self.size, self.numbers.size), matvec=matvec, rmatvec=rmatvec)


def fitted(problem, x0, mesh=None, **more):
    numbers = problem.numbers
    given = {"bounds": (-0.9, np.where(numbers % 3, 0.95, 0.5)), "x_scale": 1 + 0.5 * (numbers % 2)}
    given |= {"loss": "soft_l1", "f_scale": 2.0, "tr_options": {"maxcg": 8}, "max_nfev": 7, "mesh": mesh, **more}
    return mpishard.least_squares(problem.residuals, x0, problem.jacobian, **given)


@pytest.fixture(scope="module")
def fitted_alone():
    found = fitted(Blurred(NUMBERS), np.zeros(SIZE))
    assert found.nfev == 7 and found.active_mask.any()
    return found


def is_that_of_one_process(comm, found, numbers, expected):
    assert found.x.shape == found.grad.shape == found.active_mask.shape == numbers.shape
    assert all(np.array_equal(whole(comm, found[name], numbers), expected[name]) for name in ("x", "grad"))
    assert np.array_equal(found.active_mask, expected.active_mask[numbers])
    return all(found[name] == expected[name] for name in OF_RANKS)


@pytest.mark.quick
@pytest.mark.parametrize("kind, seed", [("runs", 0), ("ids", 0), ("ids", 3), ("boxes", 1), ("all on one rank", 0)])
def test_least_squares_have_the_bits_of_one_process(comm, fitted_alone, kind, seed):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, how = numbers_of(kind, comm.rank, comm.size, seed)
        problem = Blurred(numbers, mesh)
        found = fitted(problem, Partition(np.zeros(numbers.shape), mesh, **how), mesh)
        assert is_that_of_one_process(comm, found, numbers, fitted_alone)
        assert found.fun.shape == (problem.size,) and found.jac.shape == (problem.size, numbers.size)


@pytest.mark.full
def test_elastic_least_squares_have_the_bits_of_one_process(comm, fitted_alone):
    with mpishard.Mesh(comm, tensor=pairs_or_all(comm)) as mesh:
        numbers, how = numbers_of("ids", mesh.tensor.rank, mesh.tensor.size)
        of_shots = [Blurred(numbers, mesh, shots=(shot,)) for shot in SHOTS]

        def rebuild(mesh):
            for each in of_shots:
                each.comm = mesh.tensor.comm

        dealt_out = SimpleNamespace(
            numbers=numbers,
            residuals=lambda x, samples: of_shots[samples[0]].residuals(x),
            jacobian=lambda x, samples: of_shots[samples[0]].jacobian(x),
        )
        start = Partition(np.zeros(numbers.shape), mesh, **how)
        elastic = {"max_workers": 1, "rebuild": rebuild}
        found = fitted(dealt_out, start, mesh, samples=len(SHOTS), elastic=elastic)
        costs = [fsum(Loss("soft_l1", 2.0).values(each)) / 2 for each in fitted_alone.fun.reshape(len(SHOTS), -1)]
        expected = OptimizeResult({**fitted_alone, "cost": tree_sum(costs)})  # rounded for each sample and sum
        assert is_that_of_one_process(comm, found, numbers, expected)


def test_elastic_ranks_of_a_group_call_the_residuals_together(comm):
    """Also one without values, or whose values stay: the others may need it in the collectives of the functions."""
    part, calls = np.ones(2 * (comm.rank > 0 or comm.size == 1)), []

    def residuals(x, samples):
        calls.append(x.copy())
        return x * x - 2.0

    def jacobian(x, samples):
        return SimpleNamespace(shape=(x.size, x.size), matvec=lambda v: 2 * x * v, rmatvec=lambda u: 2 * x * u)

    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        start = Partition(part, mesh)
        found = mpishard.least_squares(residuals, start, jacobian, mesh=mesh, samples=1, elastic=True)
        assert np.allclose(found.x, 2**0.5) and len(calls) == found.nfev > 2
        assert len(set(comm.allgather(len(calls)))) == 1


def test_groups_share_the_residuals(comm, fitted_alone):
    tensor = 2 if comm.size % 2 == 0 else 1
    with mpishard.Mesh(comm, tensor=tensor) as mesh:
        if mesh.data.size > len(SHOTS):
            pytest.skip("there are fewer shots than groups")
        numbers, how = numbers_of("ids", mesh.tensor.rank, tensor)
        found = fitted(Blurred(numbers, mesh), Partition(np.zeros(numbers.shape), mesh, **how), mesh)
        assert is_that_of_one_process(mesh.tensor.comm, found, numbers, fitted_alone)


def test_residuals_are_new_where_only_values_of_other_ranks_have_moved(comm):
    near = np.where(NUMBERS < 15, 0.0, NEAR)  # nothing depends on the first 15, and they stay; their residuals change
    expected = fitted(Blurred(NUMBERS, near=near), np.zeros(SIZE))
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        cuts = [0, *np.linspace(15, SIZE, comm.size).astype(int)] if comm.size > 1 else [0, SIZE]
        numbers = NUMBERS[cuts[comm.rank] : cuts[comm.rank + 1]]
        found = fitted(Blurred(numbers, mesh, near), Partition(np.zeros(numbers.shape), mesh), mesh)
        assert is_that_of_one_process(comm, found, numbers, expected)
        assert np.array_equal(whole(comm, found.fun[: numbers.size], numbers), expected.fun[:SIZE])


def test_least_squares_of_named_fields(comm):
    """Residuals, callbacks and preconditioners get arrays by name; vectors of an operator have them end to end."""

    def run(fields, mesh=None):
        problems = {name: Blurred(numbers, mesh) for name, (numbers, _) in fields.items()}
        weights = {name: 2.0 + numbers % 3 for name, (numbers, _) in fields.items()}
        shapes, seen = {name: each.shape for name, each in weights.items()}, []
        x0 = {name: np.zeros(shape) for name, shape in shapes.items()}
        preconditioner = lambda v: v / np.append(weights["a"], weights["b"])  # noqa: E731
        if mesh is not None:
            x0 = {name: Partition(x0[name], mesh, **how) for name, (_, how) in fields.items()}
            preconditioner = lambda v: {name: each / weights[name] for name, each in v.items()}  # noqa: E731

        def fun(x):
            return np.concatenate([each.residuals(x[name]) for name, each in problems.items()])

        def jac(x):
            a, b = (each.jacobian(x[name]) for name, each in problems.items())
            rows, columns = a.shape
            return SimpleNamespace(
                shape=(rows + b.shape[0], columns + b.shape[1]),
                matvec=lambda v: np.append(a.matvec(v[:columns]), b.matvec(v[columns:])),
                rmatvec=lambda u: np.append(a.rmatvec(u[:rows]), b.rmatvec(u[rows:])),
            )

        found = mpishard.least_squares(
            fun, x0, jac, bounds={"b": (-0.5, 2)}, preconditioner=preconditioner, tr_options={"maxcg": 6}, max_nfev=5,
            callback=lambda x: seen.append({name: each.shape for name, each in x.items()}), mesh=mesh,
        )  # fmt: skip
        assert seen and all(each == shapes for each in seen)
        return found

    expected = run({"a": (NUMBERS, {}), "b": (NUMBERS, {})})
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        fields = {"a": numbers_of("ids", comm.rank, comm.size), "b": numbers_of("boxes", comm.rank, comm.size, 1)}
        found = run(fields, mesh)
        for name, (numbers, _) in fields.items():
            assert np.array_equal(whole(comm, found.x[name], numbers), expected.x[name]), name
            assert np.array_equal(whole(comm, found.grad[name], numbers), expected.grad[name]), name
            assert np.array_equal(found.active_mask[name], expected.active_mask[name][numbers]), name
        assert all(found[name] == expected[name] for name in OF_RANKS)


def test_least_squares_go_on_in_another_partition(comm, fitted_alone, folder):
    def run(kind, seed, most):
        with mpishard.Mesh(comm, tensor=comm.size) as mesh, Checkpoints(folder, mesh, every=2) as checkpoints:
            numbers, how = numbers_of(kind, comm.rank, comm.size, seed)
            problem, points = Blurred(numbers, mesh), []

            def residuals(x):
                points.append(x)
                if len(points) == most:
                    raise Stopped(f"at the evaluation {most}")
                return problem.residuals(x)

            given = SimpleNamespace(numbers=numbers, residuals=residuals, jacobian=problem.jacobian)
            start = Partition(np.zeros(numbers.shape), mesh, **how)
            return fitted(given, start, mesh, checkpoints=checkpoints, resume=True), numbers, len(points)

    with pytest.raises(Stopped):
        run("ids", 3, 5)
    found, numbers, evaluations = run("runs", 4, -1)
    assert is_that_of_one_process(comm, found, numbers, fitted_alone) and evaluations < 7


MATRIX = 2 * np.eye(SIZE) - 0.9 * np.eye(SIZE, k=1) - 0.8 * np.eye(SIZE, k=-1)


class Equation:
    """A state near what is wanted, from a small source: one constraint for each number, all of them in the last group.

    The first group has the function, whose bits do not depend on who adds it up.
    """

    def __init__(self, numbers, mesh=None):
        self.numbers, self.comm = numbers, None if mesh is None else mesh.tensor.comm
        self.has_function, self.has_constraints = (
            mesh is None or mesh.data.rank == group for group in (0, -1 if mesh is None else mesh.data.size - 1)
        )

    def times(self, matrix, values):
        values = values if self.comm is None else whole(self.comm, values, self.numbers)
        return (matrix * values).sum(1)[self.numbers]

    def fun(self, x):
        residual, source = x["state"] - WANTED[self.numbers], x["source"]
        assert residual.shape == source.shape == self.numbers.shape
        value = np.rint(2.0**30 * (0.5 * residual**2 + 0.005 * source**2)).sum() * 2.0**-30
        part = float(self.has_function)
        return part * float(value), {"state": part * residual, "source": part * 0.01 * source}

    def constraints(self, x):
        found = self.times(MATRIX, x["state"]) - x["source"]
        return found if self.has_constraints else []

    def adjoint(self, x, v):
        assert v.shape == (self.numbers.size * self.has_constraints,)
        v = v.reshape(self.numbers.shape) if self.has_constraints else np.zeros(self.numbers.shape)
        return {"state": self.times(MATRIX.T, v), "source": -v}


def constrained(problem, mesh=None, how=None, **more):
    numbers = problem.numbers
    x0 = {"state": np.zeros(numbers.shape), "source": np.zeros(numbers.shape)}
    if mesh is not None:
        x0 = {name: Partition(each, mesh, **how) for name, each in x0.items()}
        more |= {"mesh": mesh, "reduction": "sum"}
    given = {"bounds": {"state": (-0.75, np.where(numbers % 2, 0.9, 0.7))}, "maxiter": 3, "options": {"maxiter": 9}}
    return mpishard.augmented_lagrangian(problem.fun, x0, problem.constraints, problem.adjoint, **{**given, **more})


@pytest.fixture(scope="module")
def constrained_alone():
    found = constrained(Equation(NUMBERS))
    assert found.nit == 3 and found.multipliers.shape == (SIZE,)
    return found


def meets_the_constraints_as_alone(comm, found, numbers, expected):
    for name in ("x", "lagrangian_grad"):
        for field in ("state", "source"):
            assert found[name][field].shape == numbers.shape
            assert np.array_equal(whole(comm, found[name][field], numbers), expected[name][field]), (name, field)
    names = ("fun", "constr_violation", "complementarity", "optimality", "penalty", "nit", "nfev", "status", "message")
    return all(found[name] == expected[name] for name in names)


@pytest.mark.quick
@pytest.mark.parametrize("kind, seed", [("runs", 0), ("ids", 0), ("ids", 3), ("boxes", 1), ("all on one rank", 0)])
def test_constraints_have_the_bits_of_one_process(comm, constrained_alone, kind, seed):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, how = numbers_of(kind, comm.rank, comm.size, seed)
        found = constrained(Equation(numbers, mesh), mesh, how)
        assert meets_the_constraints_as_alone(comm, found, numbers, constrained_alone)
        for name in ("constr", "multipliers"):
            assert np.array_equal(found[name], constrained_alone[name][numbers.ravel()])


def test_the_constraints_of_a_group_count_once(comm, constrained_alone):
    tensor = 2 if comm.size % 2 == 0 else 1
    with mpishard.Mesh(comm, tensor=tensor) as mesh:
        numbers, how = numbers_of("ids", mesh.tensor.rank, tensor)
        found = constrained(Equation(numbers, mesh), mesh, how)
        assert meets_the_constraints_as_alone(mesh.tensor.comm, found, numbers, constrained_alone)


def test_constraints_go_on_in_another_partition(comm, constrained_alone, folder):
    """Where ranks have them in the same order, those of the first rank first."""

    def run(kind, seed, most):
        with mpishard.Mesh(comm, tensor=comm.size) as mesh, Checkpoints(folder, mesh, every=2) as checkpoints:
            numbers, how = numbers_of(kind, comm.rank, comm.size, seed)
            problem, points = Equation(numbers, mesh), []

            def fun(x):
                points.append(x)
                if len(points) == most:
                    raise Stopped(f"at the evaluation {most}")
                return Equation.fun(problem, x)

            problem.fun = fun
            return constrained(problem, mesh, how, checkpoints=checkpoints, resume=True), numbers

    with pytest.raises(Stopped):
        run("runs", 0, 15)
    found, numbers = run("runs", 4, -1)
    assert meets_the_constraints_as_alone(comm, found, numbers, constrained_alone)
    if comm.size > 1:
        with pytest.raises(ValueError, match="another function"):
            run("ids", 3, -1)


# What fails at a trial, on the ranks that have the values that are too large.


def test_residuals_may_fail_on_any_rank(comm):
    def run(numbers, mesh=None, how=None):
        problem, failures = Blurred(numbers, mesh), []

        def residuals(x):
            found = problem.residuals(x)
            if abs(x).max(initial=0.0) > 0.85:
                failures.append(x)
                raise mpishard.EvaluationFailed("no convergence")
            return found

        given = SimpleNamespace(numbers=numbers, residuals=residuals, jacobian=problem.jacobian)
        x0 = np.zeros(numbers.shape)
        return fitted(given, x0 if mesh is None else Partition(x0, mesh, **how), mesh), failures

    expected, failures = run(NUMBERS)
    assert failures and expected.nit
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, how = numbers_of("ids", comm.rank, comm.size)
        found, _ = run(numbers, mesh, how)
        assert is_that_of_one_process(comm, found, numbers, expected)


def test_a_function_with_constraints_may_fail_on_any_rank(comm):
    def run(numbers, mesh=None, how=None):
        problem, failures = Equation(numbers, mesh), []

        def fun(x):
            if abs(x["state"]).max(initial=0.0) > 0.72:
                failures.append(x)
                raise mpishard.EvaluationFailed("no convergence")
            return Equation.fun(problem, x)

        problem.fun = fun
        return constrained(problem, mesh, how), failures

    expected, failures = run(NUMBERS)
    assert failures and expected.nit
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, how = numbers_of("ids", comm.rank, comm.size)
        found, _ = run(numbers, mesh, how)
        assert np.array_equal(whole(comm, found.x["state"], numbers), expected.x["state"])
        assert found.nfev == expected.nfev


class Fragile:
    """A misfit by a solver that starts from its last solution, and diverges where that is too far from the new one."""

    def __init__(self, numbers, reach):
        self.wanted, self.last, self.reach, self.failures = WANTED[numbers], np.zeros(numbers.shape), reach, 0

    def __call__(self, x):
        if abs(x - self.last).max(initial=0.0) > self.reach:
            self.failures += 1
            raise mpishard.EvaluationFailed("no convergence in 50 iterations")
        self.last = x.copy()
        residual = np.exp(x) - np.exp(self.wanted)
        return 0.5 * float((residual**2).sum()), np.exp(x) * residual


@pytest.mark.parametrize("method", ["L-BFGS-B", "CG"])
def test_a_solver_that_diverges_after_large_steps_ends_at_the_same_minimum(comm, method):
    """Some ranks fail at such a trial, and others do not."""
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, how = numbers_of("ids", comm.rank, comm.size)
        start = Partition(np.zeros(numbers.shape), mesh, **how)
        given = {"method": method, "mesh": mesh, "reduction": "sum", "options": {"gtol": 1e-6, "ftol": 0}}
        steady, fragile = Fragile(numbers, np.inf), Fragile(numbers, 0.3)
        expected, found = minimize(steady, start, **given), minimize(fragile, start, **given)
        assert comm.allreduce(fragile.failures) > 0
        assert expected.success and found.success
        assert np.allclose(found.x, steady.wanted, atol=1e-5) and np.allclose(expected.x, steady.wanted, atol=1e-5)


def test_the_message_names_the_rank_whose_solver_always_fails(comm):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, start, is_last = last_even(comm, mesh)
        solver = Fragile(numbers, 0.0 if is_last else np.inf)
        found = minimize(solver, start, mesh=mesh, reduction="sum")
        assert (found.status, found.success, found.nit) == (2, False, 0) and not found.x.any()
        assert "50 iterations" in found.message and "was 0" in found.message
        assert comm.size == 1 or f"rank {comm.size - 1}" in found.message
        assert solver.failures < 30


def test_all_groups_try_a_function_with_constraints_again(comm, constrained_alone):
    tensor = 2 if comm.size % 2 == 0 else 1
    with mpishard.Mesh(comm, tensor=tensor) as mesh:
        numbers, how = numbers_of("ids", mesh.tensor.rank, tensor)
        problem, calls = Equation(numbers, mesh), []

        def fun(x):
            calls.append(x)
            if comm.rank == comm.size - 1 and len(calls) in (1, 4):
                raise mpishard.EvaluationFailed("by chance")
            return Equation.fun(problem, x)

        problem.fun = fun
        found = constrained(problem, mesh, how, options={"maxiter": 9, "retries": 1})
        assert meets_the_constraints_as_alone(mesh.tensor.comm, found, numbers, constrained_alone)
        assert len(calls) == found.nfev + 2


# One rank gives something else, or its functions do: an error on all of them.


def last_even(comm, mesh):
    """Numbers that are dealt out evenly, their partition, and whether this is the last rank."""
    numbers = NUMBERS[comm.rank :: comm.size]
    return numbers, Partition(np.zeros(numbers.shape), mesh, ids=numbers), comm.rank == comm.size - 1


WRONG_FITS = {
    "bounds of another length": ({"bounds": (np.zeros(3), 1)}, r"lower bounds.*\(3,\)"),
    "a start outside of the bounds": ({"bounds": (0.5, 1)}, "x0 is outside .* 0.5 and 1"),
    "a negative scale": ({"x_scale": -1.0}, "x_scale.* -1"),
    "two scales": ({"preconditioner": 2.0}, "x_scale and preconditioner"),
    "no bounds": ({"bounds": (-np.inf, np.inf)}, "bounds"),
    "no scale": ({"x_scale": None}, "preconditioner"),
}


@pytest.mark.parametrize("wrong", WRONG_FITS)
def test_what_one_rank_gives_least_squares_wrong_is_an_error_on_all(comm, wrong):
    if comm.size == 1 and wrong.startswith("no "):
        pytest.skip("there is no other rank")
    change, message = WRONG_FITS[wrong]
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, start, is_last = last_even(comm, mesh)
        with pytest.raises(ValueError, match=message):
            fitted(Blurred(numbers, mesh), start, mesh, **(change if is_last else {}))


@pytest.mark.parametrize(
    "where, error, message",
    [
        ("residuals", RuntimeError, "no such point"),
        ("jacobian", ValueError, "jac returned the shape .*59, 60"),
        ("matvec", ValueError, "matvec of the Jacobian returned 2 elements"),
        ("rmatvec", ValueError, "rmatvec of the Jacobian returned 2 elements"),
    ],
)
def test_what_residuals_of_one_rank_do_wrong_is_an_error_on_all(comm, where, error, message):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, start, is_last = last_even(comm, mesh)
        problem = Blurred(numbers, mesh)

        def residuals(x):
            found = problem.residuals(x)
            if is_last and where == "residuals":
                raise RuntimeError("no such point")
            return found

        def jacobian(x):
            found = problem.jacobian(x)
            if is_last and where == "jacobian":
                found.shape = (59, 60)
            elif is_last and where != "residuals":
                right = getattr(found, where)
                setattr(found, where, lambda vector: right(vector).ravel()[:2])
            return found

        with pytest.raises(error, match=message):
            fitted(SimpleNamespace(numbers=numbers, residuals=residuals, jacobian=jacobian), start, mesh)


WRONG_CONSTRAINTS = {
    "a number too many later": ("constraints", lambda found: np.append(found, 1.0), "constraints returned .*at x0"),
    "a product of one field": ("adjoint", lambda found: {"state": found["state"]}, "product of adjoint.*'source'"),
    "a product of another shape": ("adjoint", lambda found: {**found, "source": np.zeros(2)}, r"'source'.*\(2,\)"),
    "a gradient of another shape": ("fun", lambda found: (0.0, {**found[1], "state": np.zeros(2)}), r"\(2,\)"),
}


@pytest.mark.parametrize("wrong", WRONG_CONSTRAINTS)
def test_what_constraints_of_one_rank_do_wrong_is_an_error_on_all(comm, wrong):
    name, change, message = WRONG_CONSTRAINTS[wrong]
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, _, is_last = last_even(comm, mesh)
        problem, calls = Equation(numbers, mesh), []
        right = getattr(problem, name)

        def odd(*given):
            calls.append(given)
            found = right(*given)
            return change(found) if is_last and (len(calls) > 1 or name != "constraints") else found

        setattr(problem, name, odd)
        with pytest.raises(ValueError, match=message):
            constrained(problem, mesh, {"ids": numbers})


def test_multipliers_of_another_length_are_an_error_on_all(comm):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, _, is_last = last_even(comm, mesh)
        multipliers = np.zeros(numbers.size + is_last)
        with pytest.raises(
            ValueError, match=f"{numbers.size + 1} multipliers|{len(NUMBERS[-1 :: -comm.size]) + 1} mult"
        ):
            constrained(Equation(numbers, mesh), mesh, {"ids": numbers}, multipliers=multipliers)


def test_what_takes_no_partition_says_so(comm):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, start, _ = last_even(comm, mesh)
        problem = Blurred(numbers, mesh)
        given = problem.residuals, start
        for more, message in (
            ({"tr_solver": "exact"}, "Partition.*exact"),
            ({"method": "lm"}, "Partition.*'lm'"),
            ({"x_scale": "jac"}, "x_scale='jac'.*Partition"),
            ({"elastic": True}, "Partition.*samples=N"),
            ({"mesh": None}, "mesh=mesh"),
        ):
            with pytest.raises(ValueError, match=message):
                mpishard.least_squares(*given, **{"jac": problem.jacobian, "mesh": mesh, **more})
        with pytest.raises(ValueError, match="jac='2-point'.*Partition"):
            mpishard.least_squares(*given, mesh=mesh)
        with pytest.raises(ValueError, match="reduction='sum'.*samples=N.*Partition"):
            minimize(Misfit(numbers), start, mesh=mesh, elastic=True, reduction="sum")
        with pytest.raises(ValueError, match="mesh=mesh"):
            mpishard.augmented_lagrangian(lambda x: None, start, lambda x: None, lambda x, v: None)


def test_an_adjoint_is_checked(comm):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, how = numbers_of("ids", comm.rank, comm.size)
        problem = Blurred(numbers, mesh)
        operator = problem.jacobian(np.full(numbers.shape, 0.5))

        def check(dtype, odd=1.0):
            def forward(x):
                assert (x.shape, x.dtype) == (numbers.shape, dtype)
                return operator.matvec(x)

            x, y = Partition(np.zeros(numbers.shape, dtype), mesh, **how), np.zeros(problem.size)
            limit = None if dtype == np.float32 else 1e-9
            adjoint = lambda u: odd * operator.rmatvec(u)  # noqa: E731
            return mpishard.check_adjoint(forward, adjoint, x, y, mesh=mesh, tolerance=limit, disp=False)

        assert check(np.float32) and check(np.float64)
        assert not check(np.float64, np.where(numbers == 11, 1.5, 1.0))


def half(numbers):
    """Half the squared distance from what is wanted; the bits of its value do not depend on who adds it up."""

    def fun(x):
        residual = x - WANTED[numbers].reshape(x.shape)
        return float(np.rint(2.0**30 * residual**2).sum()) * 2.0**-31, residual

    return fun


TERMS = {
    "0": lambda **how: mpishard.Tikhonov(weight=1.5, order=0, **how),
    "1": lambda **how: mpishard.Tikhonov(weight=0.5, spacing=(1.0, 0.5, 2.0), **how),
    "2": lambda **how: mpishard.Tikhonov(weight=0.5, order=2, **how),
    "total variation": lambda **how: mpishard.SmoothedTotalVariation(weight=0.5, epsilon=0.1, **how),
}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_terms_on_boxes_have_the_bits_of_the_whole_field(comm, term, seed):
    expected, weight = {}, 1 + 0.5 * np.cos(NUMBERS)
    mask = NUMBERS % 7 > 0
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, how = numbers_of("boxes", mesh.tensor.rank, comm.size, seed)
        start = Partition(np.zeros(numbers.shape), mesh, **how)
        field = np.sin(NUMBERS * 1.0).reshape(GRID)
        whole_term = replace(TERMS[term](), weight=weight.reshape(GRID), mask=mask.reshape(GRID))
        expected = whole_term.value_and_gradient(field)
        part = replace(TERMS[term](partition=start), weight=weight[numbers], mask=mask[numbers])
        value, gradient = part.value_and_gradient(field.ravel()[numbers])
        assert value == expected[0]
        assert np.array_equal(gradient, expected[1].ravel()[numbers])
        assert np.array_equal(
            part.product(field.ravel()[numbers], weight[numbers]),
            whole_term.product(field, weight.reshape(GRID)).ravel()[numbers],
        )


def test_a_regularised_field_is_that_of_one_process(comm):
    term = TERMS["1"](shape=GRID)
    alone = minimize(mpishard.regularized(half(NUMBERS), term), np.zeros(SIZE), options={"maxiter": 9})
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, how = numbers_of("boxes", mesh.tensor.rank, comm.size, 2)
        start = Partition(np.zeros(numbers.shape), mesh, **how)
        summed = {"mesh": mesh, "reduction": "sum"}
        fun = mpishard.regularized(half(numbers), TERMS["1"](partition=start), **summed)
        found = minimize(fun, start, **summed, options={"maxiter": 9})
        assert np.array_equal(whole(comm, found.x, numbers), alone.x) and found.fun == alone.fun


def test_a_term_that_would_miss_the_cuts_is_refused(comm):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, how = numbers_of("ids", comm.rank, comm.size)
        start = Partition(np.zeros(numbers.shape), mesh, **how)
        summed = {"mesh": mesh, "reduction": "sum"}
        found = minimize(mpishard.regularized(half(numbers), mpishard.Tikhonov(order=0), **summed), start, **summed)
        assert np.allclose(whole(comm, found.x, numbers), WANTED / 2, atol=1e-5)
        with pytest.raises(ValueError, match="Tikhonov.*shape=.*order=0"):
            mpishard.Tikhonov(partition=start)
        if comm.size > 1:
            with pytest.raises(ValueError, match="Tikhonov.*partition="):
                minimize(mpishard.regularized(half(numbers), mpishard.Tikhonov(), **summed), start, **summed)


# One rank gives something else: an error on all of them.

WRONG = {
    "a number twice": (lambda n: {"ids": np.zeros(4, int)}, "0 is there twice"),
    "a number that is missing": (lambda n: {"ids": np.array([1, 2, 3, 4 * n])}, "is there twice|is not one of"),
    "a number that is too large": (lambda n: {"ids": np.array([0, 1, 2, 999])}, "999 is not one of 0 to"),
    "fewer numbers": (lambda n: {"ids": np.arange(3)}, r"ids have the shape \(3,\)"),
    "a box that overlaps": (lambda n: {"shape": (4 * n,), "box": ((0, 4),)}, "twice"),
    "another shape": (lambda n: {"shape": (5 * n,), "box": ((0, 4),)}, "shape"),
    "a number as shape": (lambda n: {"shape": 4 * n, "box": ((0, 4),)}, "shape=.* must be a list of whole numbers"),
    "a box of another size": (lambda n: {"shape": (4 * n,), "box": ((0, 5),)}, "box.*4"),
    "no box": (lambda n: {"shape": (4 * n,), "box": None}, "shape=.* give the box"),
    "no numbers": (lambda n: {"local": ["a", "b"]}, "real numbers"),
    "another precision": (lambda n: {"local": np.zeros(4, np.float32)}, "float32"),
}


ALONE_RIGHT = ("a box that overlaps", "another shape", "another precision")  # on one rank there are no others


@pytest.mark.parametrize("wrong", WRONG)
def test_what_one_rank_gives_wrong_is_an_error_on_all(comm, wrong):
    if comm.size == 1 and wrong in ALONE_RIGHT:
        pytest.skip("there is no other rank")
    change, message = WRONG[wrong]
    odd = change(comm.size)
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        given = {"local": np.zeros(4), "mesh": mesh}
        if "ids" in odd:
            given["ids"] = np.arange(4) + 4 * comm.rank
        if "shape" in odd:
            given |= {"shape": (4 * comm.size,), "box": ((4 * comm.rank, 4 * comm.rank + 4),)}
        if comm.rank == comm.size - 1:
            given |= odd
        with pytest.raises((TypeError, ValueError), match=message):
            Partition(**given)


def test_a_partition_needs_its_mesh(mesh):
    start = Partition(np.zeros(3), mesh) if mesh.tensor.size == mesh.size else None
    if start is not None:
        with pytest.raises(ValueError, match="mesh=mesh"):
            minimize(lambda x: (0.0, x), start)


# An inner product that is no diagonal: a mass matrix of finite elements on a line, which may be graded.


def line_problem(count, power=3):
    """Half the integral of ``(u - wanted)^2 + 1e-3 u^2`` and that of ``u^4``, by a mass matrix, and its Riesz map."""
    nodes = np.linspace(0, 1, count) ** power
    h = np.diff(nodes)
    matrix = np.diag((np.append(h, 0) + np.append(0, h)) / 3) + np.diag(h / 6, 1) + np.diag(h / 6, -1)
    wanted = np.sin(5 * nodes)

    def fun(u):
        moved = matrix @ (u - wanted)
        again = matrix @ u
        return 0.5 * float((u - wanted) @ moved) + 5e-4 * float(u @ again) + float((u**4) @ matrix.sum(0)), (
            moved + 1e-3 * again + 4 * matrix.sum(0) * u**3
        )

    return fun, mpishard.RieszMap(lambda x: matrix @ x, lambda g: np.linalg.solve(matrix, g))


@pytest.mark.parametrize("method", ["L-BFGS", "CG"])
def test_iterations_do_not_depend_on_the_mesh_with_its_mass_matrix(method):
    """Not on its refinement, and not on how it is graded."""
    meshes = [*itertools.product((20, 40, 80), (1, 3))]
    counts = {}
    for nodes, power in meshes:
        fun, riesz = line_problem(nodes, power)
        courses = {}
        for name, product in (("riesz", riesz), ("none", None)):
            values = courses[name] = [fun(np.ones(nodes))[0]]
            minimize(
                fun, np.ones(nodes), method=method, inner_product=product,
                options={"gtol": 0, "ftol": 0, "maxiter": 140},
                callback=lambda intermediate_result: values.append(intermediate_result.fun),  # noqa: B023
            )  # fmt: skip
        least = min(map(min, courses.values()))
        near = least + 1e-6 * (values[0] - least)
        for name, course in courses.items():
            counts[name, nodes, power] = next((at for at, value in enumerate(course) if value <= near), 140)
    with_riesz = [counts[("riesz", *each)] for each in meshes]
    assert max(with_riesz) <= 1.3 * min(with_riesz), counts
    assert counts["none", 80, 3] > 5 * counts["none", 80, 1] and counts["none", 80, 3] > 1.3 * counts["none", 20, 3]


def test_a_riesz_map_on_a_partition_has_the_bits_of_one_process(comm):
    fun, riesz = line_problem(24)
    alone = minimize(fun, np.ones(24), method="L-BFGS", inner_product=riesz, options={"maxiter": 6})
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers = np.random.default_rng(1).permutation(24)[comm.rank :: comm.size]

        def everywhere(values):
            return whole_of(mesh.tensor.comm, values, numbers, 24)

        def local(function):
            return lambda values: function(everywhere(values))[numbers]

        def part(u):
            value, gradient = fun(everywhere(u))
            return value if comm.rank == 0 else 0.0, gradient[numbers]

        found = minimize(
            part, Partition(np.ones(len(numbers)), mesh, ids=numbers), method="L-BFGS", mesh=mesh, reduction="sum",
            inner_product=mpishard.RieszMap(local(riesz.apply), local(riesz.solve)), options={"maxiter": 6},
        )  # fmt: skip
        assert np.array_equal(whole_of(comm, found.x, numbers, 24), alone.x) and found.nfev == alone.nfev


def test_a_riesz_map_that_is_none_is_refused(mesh):
    fun, riesz = line_problem(20)
    swapped = mpishard.RieszMap(riesz.apply, riesz.apply)
    with pytest.raises(ValueError, match="solve.apply.x"):
        minimize(fun, np.ones(20), method="L-BFGS", inner_product=swapped, mesh=mesh)
    with pytest.raises(ValueError, match="bounds.*RieszMap"):
        minimize(fun, np.ones(20), bounds=(0, None), inner_product=riesz, mesh=mesh)
    with pytest.raises(TypeError, match="apply=3"):
        mpishard.RieszMap(3, riesz.solve)


# Gradients by finite differences.


class Values:
    """Half the sum of ``w (x - wanted)^2``, whose bits do not depend on who adds it up."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.w, self.wanted, self.calls = STIFFNESS[numbers], WANTED[numbers], 0

    def __call__(self, x):
        self.calls += 1
        return float(np.rint(2.0**40 * self.w * (x - self.wanted) ** 2).sum()) * 2.0**-41


@pytest.fixture(scope="module")
def by_differences():
    """By scheme the result on one process."""
    given = options(NUMBERS) | {"options": {"maxiter": 3}}
    return {scheme: minimize(Values(NUMBERS), np.zeros(SIZE), jac=scheme, **given) for scheme in ("2-point", "3-point")}


@pytest.mark.parametrize("kind, scheme", [("runs", "2-point"), ("ids", "3-point"), ("boxes", "2-point")])
def test_finite_differences_of_a_partition(comm, by_differences, kind, scheme):
    """Each rank has its part of the value, or the group that of all its ranks: then groups share the columns."""
    expected = by_differences[scheme]
    for tensor in {comm.size, comm.size // 2 if comm.size % 2 == 0 else 1}:
        with mpishard.Mesh(comm, tensor=tensor) as mesh:
            numbers, how = numbers_of(kind, mesh.tensor.rank, tensor)
            values = Values(numbers)

            def of_group(x):
                return mesh.tensor.comm.allreduce(values(x))  # noqa: B023

            def part(x):
                return values(x) if mesh.data.rank == 0 else 0.0  # noqa: B023

            for fun, reduction in ((of_group, None), (part, "sum")):
                values.calls = 0
                start = Partition(np.zeros(numbers.shape), mesh, **how)
                given = options(numbers) | {"options": {"maxiter": 3}}
                found = minimize(fun, start, jac=scheme, mesh=mesh, reduction=reduction, **given)
                assert found.x.shape == found.jac.shape == numbers.shape
                assert np.array_equal(whole(mesh.tensor.comm, found.x, numbers), expected.x)
                assert (found.nit, found.nfev, found.message) == (expected.nit, expected.nfev, expected.message)
                if reduction is None:
                    points = {"2-point": 1, "3-point": 2}[scheme]
                    columns = len(range(mesh.data.rank, SIZE, mesh.data.size))
                    assert values.calls == found.nfev * (1 + points * columns)


def test_a_column_that_fails_on_one_rank_of_a_group_is_tried_again_by_all(comm):
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        numbers, how = numbers_of("ids", mesh.tensor.rank, comm.size)
        values, failed = Values(numbers), []

        def fun(x):
            value = mesh.tensor.comm.allreduce(values(x))  # all of them must come here
            if mesh.rank == comm.size - 1 and values.calls % 7 == 0:
                failed.append(1)
                raise mpishard.EvaluationFailed("by chance")
            return value

        start = Partition(np.zeros(numbers.shape), mesh, **how)
        given = {"jac": "2-point", "mesh": mesh, "options": {"maxiter": 2, "retries": 1}}
        found = minimize(fun, start, **given)
        tried = mesh.tensor.comm.allreduce(len(failed))
        assert tried > 0 and values.calls == found.nfev * (1 + SIZE) + tried
        expected = minimize(Values(NUMBERS), np.zeros(SIZE), jac="2-point", options={"maxiter": 2})
        assert np.array_equal(whole(mesh.tensor.comm, found.x, numbers), expected.x)


# Functions that fail by chance.


def test_the_group_of_a_rank_that_fails_tries_again_together(comm):
    """The function is collective over its group; other groups do not call it again."""
    tensor = comm.size // 2 if comm.size % 2 == 0 else comm.size
    with mpishard.Mesh(comm, tensor=tensor) as mesh:
        numbers, how = numbers_of("ids", mesh.tensor.rank, tensor)
        misfit, failed = Misfit(numbers, mesh), []
        last = mesh.data.rank == mesh.data.size - 1

        def fun(x):
            found = misfit(x)
            mesh.tensor.comm.Barrier()
            if last and mesh.tensor.rank == 0 and misfit.evaluations % 3 == 1:
                failed.append(1)
                raise mpishard.EvaluationFailed("by chance")
            return found

        start = Partition(np.zeros(numbers.shape), mesh, **how)
        given = {"mesh": mesh, "reduction": "sum", "options": {"maxiter": 5, "retries": 1}}
        found = minimize(fun, start, **options(numbers), **given)
        tried = mesh.tensor.comm.allreduce(len(failed))
        assert misfit.evaluations == found.nfev + tried and (tried > 0) == last
        expected = minimize(Misfit(NUMBERS), np.zeros(SIZE), **options(NUMBERS), options={"maxiter": 5})
        assert np.array_equal(whole(mesh.tensor.comm, found.x, numbers), expected.x)
        assert found.message == expected.message


def test_two_values_of_a_rank_have_arrays_of_bounds_as_any_number_of_them(comm):
    """And not a pair for each, as two unknowns of SciPy."""
    with mpishard.Mesh(tensor=comm.size) as mesh:
        sides = np.array([0.0, 1.0]), np.array([2.0, 4.0])
        start = Partition(np.zeros(2), mesh)
        found = minimize(lambda x: (0.5 * ((x - 3) ** 2).sum(), x - 3), start, mesh=mesh, reduction="sum", bounds=sides)
        assert np.allclose(found.x, [2, 3], atol=1e-5)


def test_the_values_of_a_start_may_be_others_later(comm):
    with mpishard.Mesh(tensor=comm.size) as mesh:
        numbers, how = numbers_of("ids", mesh.rank, mesh.size)
        start = Partition(np.zeros(numbers.shape), mesh, **how)
        start.local[...] = WANTED[numbers]
        found = minimize(Misfit(numbers, mesh), start, mesh=mesh, reduction="sum")
        assert found.nit == 0 and np.array_equal(found.x, WANTED[numbers])


@pytest.mark.parametrize("given", [{"bounds": {"field": (0, 1)}}, {}], ids=["bounds", "L1"])
def test_options_of_tensors_that_the_application_has_cut_go_by_name(comm, given):
    with mpishard.Mesh(tensor=comm.size) as mesh:
        spec = mpishard.ParameterSpec("field", (comm.size, 3), parts=[((k, k + 1), (0, 3)) for k in range(comm.size)])
        named = mpishard.FlatParameters([spec], np.float64, place=mesh.place)

        def fun(x):
            return 0.5 * ((x["field"] - 2) ** 2).sum(), {"field": x["field"] - 2}

        how = {"mesh": mesh, "reduction": "sum"}
        minimize(fun if given else mpishard.regularized(fun, mpishard.L1({"field": 1.0}), **how), named, **how, **given)
        assert np.allclose(named.flat, 1, atol=1e-5)
