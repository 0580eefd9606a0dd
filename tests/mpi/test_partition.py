"""Fields that the application has distributed: the partition is no part of the result."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import mpishard
from mpishard import Partition, minimize
from mpishard.checkpoint import Checkpoints

GRID = (4, 3, 5)
SIZE = 60
NUMBERS = np.arange(SIZE)
WANTED = np.sin(NUMBERS)
STIFFNESS = np.linspace(1, 40, SIZE)


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


@pytest.mark.quick
@pytest.mark.parametrize("kind, seed", [*itertools.product(["runs", "ids", "boxes"], [0, 1])])
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


class Stopped(Exception):
    """The job ends here."""


@pytest.mark.parametrize("first, then", [("ids", "ids"), ("boxes", "boxes"), ("ids", "runs"), ("runs", "ids")])
def test_a_run_goes_on_in_another_partition(comm, alone, tmp_path_factory, first, then):
    folder = comm.bcast(str(tmp_path_factory.mktemp("run")) if comm.rank == 0 else None)

    def run(kind, seed, most):
        with mpishard.Mesh(comm, tensor=comm.size) as mesh, Checkpoints(folder, mesh, every=2) as checkpoints:
            numbers, how = numbers_of(kind, comm.rank, comm.size, seed)
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

    with pytest.raises(Stopped):
        run(first, 3, 7)
    found, numbers, evaluations = run(then, 4, -1)
    assert np.array_equal(whole(comm, found.x, numbers), alone.x) and found.nfev == alone.nfev
    assert evaluations < alone.nfev


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
    "a number twice": (lambda n: {"ids": np.zeros(4, int)}, "is missing|is there twice"),
    "a number that is missing": (lambda n: {"ids": np.array([1, 2, 3, 4 * n])}, "0 is missing|is not one of"),
    "a number that is too large": (lambda n: {"ids": np.array([0, 1, 2, 999])}, "999 is not one of 0 to"),
    "fewer numbers": (lambda n: {"ids": np.arange(3)}, r"ids have the shape \(3,\)"),
    "a box that overlaps": (lambda n: {"shape": (4 * n,), "box": ((0, 4),)}, "twice"),
    "another shape": (lambda n: {"shape": (5 * n,), "box": ((0, 4),)}, "shape"),
    "a box of another size": (lambda n: {"shape": (4 * n,), "box": ((0, 5),)}, "box.*4"),
    "no box": (lambda n: {"shape": (4 * n,), "box": None}, "box=None"),
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


# An inner product that is no diagonal: a mass matrix of finite elements on a graded line.


def line_elements(count):
    """Nodes of a graded line, and the mass matrix of its linear elements as two diagonals."""
    nodes = np.linspace(0, 1, count) ** 3
    h = np.diff(nodes)
    middle = (np.append(h, 0) + np.append(0, h)) / 3
    return nodes, middle, h / 6


def mass_matrix(count):
    _, middle, side = line_elements(count)
    return np.diag(middle) + np.diag(side, 1) + np.diag(side, -1)


def line_problem(count):
    """Half the integral of ``(u - wanted)^2 + 1e-3 u^2``, by its mass matrix, and its Riesz map."""
    nodes, _, _ = line_elements(count)
    matrix = mass_matrix(count)
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
    counts = {}
    for nodes in (20, 80):
        fun, riesz = line_problem(nodes)
        for name, product in (("riesz", riesz), ("none", None)):
            options = {"gtol": 1e-6, "ftol": 0, "maxiter": 1000}
            found = minimize(fun, np.ones(nodes), method=method, inner_product=product, options=options)
            counts[name, nodes] = found.nit
            assert name == "none" or found.success
    assert counts["riesz", 80] < 1.3 * counts["riesz", 20]
    assert counts["none", 80] > 1.5 * counts["none", 20]


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
