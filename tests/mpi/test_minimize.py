"""`minimize` on a mesh: the steps of one process on any ranks, and one outcome on all of them."""

from __future__ import annotations

import math
import os
import warnings
from functools import partial

import numpy as np
import pytest
from descent import curvature, rosenbrock

import mpishard
from mpishard import FlatParameters, ParameterSpec, ReverseCommunication, minimize
from mpishard.backend import array as arrays
from mpishard.record import Run
from mpishard.record.reading import began_after

pytestmark = pytest.mark.pairs(1)

SIZE = 13
START = np.where(np.arange(SIZE) % 2, 1.0, -1.2)
METHODS = [("L-BFGS-B", {"bounds": (-1.5, 0.9)}), ("trust-ncg", {"hessp": curvature})]
START.flags.writeable = False


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("L-BFGS-B", {}),
        ("trust-ncg", {"hessp": lambda x, d, rows, targets: rows.T @ (rows @ d)}),
        ("Newton-CG", {"hess": lambda x, rows, targets: rows.T @ rows}),
    ],
)
@pytest.mark.quick
def test_sums_of_parts(mesh, same_on_all, method, given):
    """Small whole numbers as data: the sums have no rounding, so that the steps are those of one process."""
    rows = np.random.default_rng(0).integers(-2, 3, (4 * SIZE, SIZE)).astype(float)
    targets = rows @ np.arange(SIZE)
    own = slice(mesh.rank, None, mesh.size)

    def part(x, rows, targets):
        residual = rows @ x - targets
        return 0.5 * residual @ residual, rows.T @ residual

    sums = {"mesh": mesh, "reduction": "sum", "tol": 1e-9, **given}
    result = minimize(part, np.zeros(SIZE), (rows[own], targets[own]), method, **sums)
    assert np.allclose(result.x, np.arange(SIZE), atol=1e-6) and same_on_all(result.x) and same_on_all(result.fun)
    assert result.fun < 1e-9


def test_a_start_that_is_a_tree(mesh, same_on_all, folder):
    """Its steps are those of the flat array, also where it is complex, from a checkpoint, and in an elastic run."""

    def tree_of(x):
        return {"a": [x[:4].reshape(2, 2), x[4:5]], "z": x[5:13].view(complex)}

    def flat(tree):
        return np.concatenate([tree["a"][0].reshape(-1), tree["a"][1], tree["z"].view(float)])

    def fun(tree, *samples):
        value, gradient = of_samples(flat(tree), *samples or [np.arange(70)])
        return value, tree_of(gradient)

    expected = minimize(lambda x: of_samples(x, np.arange(70)), START, options={"maxiter": 6})
    options = {"options": {"maxiter": 6}, "mesh": mesh}
    result = minimize(fun, tree_of(START), **options)
    with mpishard.Checkpoints(folder, mesh, every=2) as checkpoints:
        files = {"checkpoints": checkpoints, "resume": True}
        assert minimize(fun, tree_of(START), callback=lambda x: x["a"][1].shape == (1,), **files, **options).nit == 1
        resumed = minimize(fun, tree_of(START), **files, **options)
    for found in (result, resumed, minimize(fun, tree_of(START), elastic=True, **options)):
        assert np.array_equal(flat(found.x), expected.x) and np.array_equal(flat(found.jac), expected.jac)
        assert same_on_all(flat(found.x)) and found.nfev == expected.nfev
    points = []
    dealt = minimize(fun, tree_of(START), samples=70, elastic=True, callback=points.append, **options)
    plain = minimize(of_samples, START, samples=70, elastic=True, **options)
    assert np.array_equal(flat(dealt.x), plain.x) and np.array_equal(flat(points[-1]), plain.x)
    odd = mesh.rank == mesh.size - 1
    with pytest.raises(ValueError, match="gradient .*structure of x0"):
        minimize(lambda x: (fun(x)[0], [] if odd else fun(x)[1]), tree_of(START), mesh=mesh)
    if mesh.size > 1:
        with pytest.raises(ValueError, match="x0"):
            minimize(fun, tree_of(START) if odd else flat(tree_of(START)), mesh=mesh)


@pytest.mark.quick
def test_equality_constraints(mesh, same_on_all):
    """The nearest point on planes: whole on all ranks, and in parts that are whole numbers."""
    normals, ends = np.zeros((4, SIZE)), np.array([4.0, -2.0, 1.0, 3.0])
    normals[np.arange(4), np.arange(4) * 3] = 1.0
    normals[:, 1] = 1.0
    own = slice(mesh.rank, None, mesh.size)

    def run(rows, function=lambda x: (0.5 * x @ x, x), **options):
        constraints, adjoint = (lambda x: normals[rows] @ x - ends[rows]), (lambda x, v: normals[rows].T @ v)
        return mpishard.augmented_lagrangian(function, np.ones(SIZE), constraints, adjoint, **options)

    points = []
    alone = run(slice(None), callback=points.append)
    whole = run(slice(None), mesh=mesh, callback=points.append)
    assert np.allclose(alone.x, normals.T @ np.linalg.solve(normals @ normals.T, ends), atol=1e-6) and alone.success
    for name in ("x", "multipliers", "constr", "lagrangian_grad", "fun", "nfev", "nit", "message"):
        assert np.array_equal(whole[name], alone[name])
    assert np.array_equal(points[: len(points) // 2], points[len(points) // 2 :]) and len(points) == 2 * alone.nit - 2
    half = mesh.rank == mesh.size - 1  # of the function, which one rank has
    parts = run(own, lambda x: (half * 0.5 * x @ x, half * x), mesh=mesh, reduction="sum")
    assert np.allclose(parts.x, alone.x, atol=1e-6) and same_on_all(parts.x) and same_on_all(parts.fun)
    assert parts.constr.size == len(range(4)[own]) and np.allclose(parts.multipliers, alone.multipliers[own], atol=1e-5)
    assert parts.fun == pytest.approx(alone.fun) and same_on_all(parts.constr_violation)
    odd = mesh.rank == mesh.size - 1
    assert run(slice(None), mesh=mesh, callback=lambda x: odd).status == 99
    with pytest.raises(ValueError, match="3 multipliers, but 4"):
        run(slice(None), mesh=mesh, multipliers=np.zeros(3 if odd else 4))
    if mesh.size > 1:
        with pytest.raises(ValueError, match="different values"):
            run(slice(None), lambda x: (0.5 * x @ x + odd, x), mesh=mesh)


def test_slabs_of_a_field(comm, same_on_all, capsys):
    """Each tensor rank has rows of a field, and the value and gradient of its rows."""
    with mpishard.Mesh(comm, tensor=comm.size) as mesh:
        target = np.arange(5 * 4.0).reshape(5, 4)
        start = FlatParameters([ParameterSpec("field", (5, 4), tensor_dim=0)], np.float64, place=mesh.place)
        (first, last), _ = start.box("field")

        def part(p):
            residual = p["field"] - target[first:last]
            return 0.5 * (residual**2).sum(), {"field": residual}

        result = minimize(part, start, mesh=mesh, reduction="sum", method="L-BFGS")
        assert result.x is start and np.allclose(start["field"], target[first:last], atol=1e-6)
        assert result.jac.shape == (start.size,) and same_on_all(result.fun) and result.success

        def shifted(p):
            residual = p["field"] + p["shift"] - target[first:last]
            both = {"field": residual, "shift": residual.sum() * np.ones(1)}
            return 0.5 * (residual**2).sum(), both

        specs = [ParameterSpec("field", (5, 4), tensor_dim=0), ParameterSpec("shift", (1,))]
        copied = FlatParameters(specs, np.float64, place=mesh.place)
        minimize(lambda p: (1.0, np.zeros(p.size)), copied, mesh=mesh, bounds={"shift": (1, 2)})
        said = "1 elements of the start lie outside of their bounds" * (mesh.rank == 0)
        assert said in (found := capsys.readouterr().err) and bool(found) == bool(said)
        for reduction, words in (("sum", "'shift' on rank 0 and on rank 1.*partial=True"), (None, "values")):
            start = FlatParameters(specs, np.float64, place=mesh.place)
            fun = shifted if reduction else lambda p: (1.0, shifted(p)[1])
            if mesh.size == 1:
                assert minimize(fun, start, mesh=mesh, reduction=reduction, method="L-BFGS").nfev
                continue
            with pytest.raises(ValueError, match=words):
                minimize(fun, start, mesh=mesh, reduction=reduction, method="L-BFGS")
        specs[1] = ParameterSpec("shift", (1,), partial=True)
        start = FlatParameters(specs, np.float64, place=mesh.place)
        result = minimize(shifted, start, mesh=mesh, reduction="sum", method="L-BFGS")
        assert result.success and same_on_all(start["shift"])


def test_the_rank_whose_part_is_not_finite_is_named(mesh):
    last = mesh.size - 1

    def part(x):
        return math.nan if mesh.rank == 0 else 1.0, np.full(SIZE, math.inf if mesh.rank == last else 1.0)

    message = minimize(part, START, mesh=mesh, reduction="sum").message
    found = f"NaN or infinite loss at step 1: nan on rank 0; also the gradient of 'x' on rank {last}"
    assert message.startswith("failed: the value, the gradient or a Hessian product is NaN or infinite at the start")
    assert message.endswith(found)

    calls = []

    def falling(x):  # between the second evaluation and the last one nothing is finite
        calls.append(x)
        return math.nan if 2 < len(calls) < 14 else -x.sum(), -np.ones(SIZE)

    result = minimize(falling, START, mesh=mesh, reduction="sum")
    assert result.status == 2 and "NaN or infinite" in result.message and "rank" not in result.message

    points = []

    def whole(x):
        points.append(x)
        value, gradient = rosenbrock(x)
        return value, gradient * (math.inf if mesh.rank == last and len(points) > 1 else 1)

    message = minimize(whole, START, mesh=mesh).message
    found = f"NaN or infinite gradient at step {len(points)}: 'x' on rank {last}"
    assert message.endswith(found) if mesh.size > 1 else message.endswith("also after shorter steps")

    def product(x, d):
        return d * (math.inf if mesh.rank == last else 1)

    given = {"mesh": mesh, "reduction": "sum", "hessp": product, "method": "trust-ncg"}
    message = minimize(lambda x: (x @ x, 2 * x), START, **given).message
    assert message.endswith(f"NaN or infinite Hessian product at step 2: 'x' on rank {last}")


class Lazy:
    """An array that is read when it is converted."""

    def __array__(self, *args, **more):
        raise KeyError("chunk 3")


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("value", ValueError, "1.0 on ranks .*2.0 on rank 1.*reduction='sum'"),
        ("gradient", ValueError, "values of the gradient .*on rank 1"),
        ("raises", ZeroDivisionError, "by"),
        ("shape", ValueError, "gradient has 12 elements"),
        ("lazy", KeyError, "chunk 3"),
        ("callback", KeyError, "mine"),
        ("start", ValueError, "x0 must be finite"),
        ("option", ValueError, "has no option 'eps'"),
        ("size", ValueError, "settings differ|x0"),
    ],
)
@pytest.mark.quick
def test_what_one_rank_does_wrong_is_raised_on_all(mesh, kind, error, words):
    odd = mesh.size > 1 and mesh.rank == 1

    def fun(x):
        if odd and kind == "raises":
            raise ZeroDivisionError("by")
        gradient = 2 * x + (odd and kind == "gradient")
        if odd and kind == "lazy":
            return 1.0, Lazy()
        return 1.0 + (odd and kind == "value"), gradient[1:] if odd and kind == "shape" else gradient

    def callback(x):
        if odd and kind == "callback":
            raise KeyError("mine")

    start = np.full(SIZE + (odd and kind == "size"), 0.5)
    if odd and kind == "start":
        start[0] = math.nan
    options = {"eps": 1} if odd and kind == "option" else {"maxiter": 3}
    if kind == "callback":
        fun = rosenbrock
    if mesh.size == 1:
        minimize(fun, start, method="L-BFGS", mesh=mesh, callback=callback, options=options)
        pytest.skip("the rest needs two ranks")
    expected = error if odd or error in (ValueError, TypeError) else RuntimeError
    with pytest.raises(expected, match=words):
        minimize(fun, start, method="L-BFGS", mesh=mesh, callback=callback, options=options)


def test_a_preconditioner_gets_vectors_on_the_device_of_the_start(mesh, device):
    def precondition(vector):
        assert isinstance(vector, device.array_type)
        return device.put(0.5 * arrays.to_host(vector))

    def fun(x):
        value, gradient = rosenbrock(arrays.to_host(x))
        return value, device.put(gradient)

    given = {"method": "L-BFGS", "options": {"maxiter": 4}}
    result = minimize(fun, device.put(START), mesh=mesh, preconditioner=precondition, **given)
    expected = minimize(rosenbrock, START, preconditioner=lambda vector: 0.5 * vector, **given)
    assert np.array_equal(arrays.to_host(result.x), expected.x)


def test_a_whole_start_on_a_mesh_that_cuts_it(mesh):
    if mesh.size == 1:
        pytest.skip("for several ranks")
    with pytest.raises(ValueError, match=f"x0 is whole.*tensor={mesh.size}.*place=mesh.place"):
        minimize(rosenbrock, START, mesh=mesh.reshaped(tensor=mesh.size))


def test_the_result_of_ones_own_loop(mesh, same_on_all):
    optimizer = ReverseCommunication("L-BFGS-B", START, mesh=mesh, options={"maxiter": 3})
    while (request := optimizer.ask()) is not None:
        optimizer.tell(*rosenbrock(request.x))
        found = optimizer.gather_result()
    if mesh.rank == mesh.size - 1:  # not collective
        assert np.array_equal(optimizer.result.x, found.x) and optimizer.result.nit == 3
    assert same_on_all(optimizer.result.x) and optimizer.result.fun == rosenbrock(found.x)[0]
    running = ReverseCommunication("L-BFGS-B", START, mesh=mesh)
    if mesh.size > 1 and mesh.rank == 0:
        with pytest.raises(RuntimeError, match="gather_result"):
            running.result  # noqa: B018
    assert running.gather_result().status == -1


def test_a_checkpoint_after_the_end_leaves_the_result(mesh, folder):
    start = FlatParameters((ParameterSpec("x", (SIZE,)),))
    start.flat[...] = START
    optimizer = ReverseCommunication("L-BFGS-B", start, mesh=mesh)
    for _ in range(4):
        optimizer.tell(*rosenbrock(optimizer.ask().x.flat))
    optimizer.stop()
    assert optimizer.result.x is start
    best = start.flat.copy()
    optimizer.save(folder)
    assert np.array_equal(start.flat, best) and optimizer.result.fun == rosenbrock(best)[0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("without_debug")
@pytest.mark.parametrize("reduction", [None, "sum"])
def test_what_an_evaluation_sends(mesh, reduction):
    """As `docs/explanation/what-it-costs.md` says: more iterations make so many more calls."""

    def part(x):
        value, gradient = rosenbrock(x)
        return (value, gradient) if reduction is None else (value / mesh.size, gradient / mesh.size)

    def run(maxiter):
        mesh.ledger.clear()
        given = {"bounds": (-1.5, 0.9), "options": {"maxiter": maxiter, "ftol": 0, "gtol": 0}}
        evaluations = minimize(part, START, mesh=mesh, reduction=reduction, **given).nfev
        return evaluations, {name: each["calls"] for name, each in mesh.ledger.summary().items()}

    (few, before), (many, after) = run(3), run(9)
    calls = {name: (count - before[name]) / (many - few) for name, count in after.items() if count > before[name]}
    assert 5 <= calls.pop("world.all_reduce dots") <= 12
    assert calls.pop("data.reduce_scatter gradients", 0) == (reduction == "sum")
    assert calls == {"data.all_gather parameters": 1, "world.all_gather control": 1}


def test_one_rank_stops_all(mesh, same_on_all):
    last = mesh.rank == mesh.size - 1
    seen, given = [], {"method": "L-BFGS", "mesh": mesh}
    result = minimize(rosenbrock, START, callback=lambda x: seen.append(x) or (last and len(seen) == 3), **given)
    assert (result.nit, result.status) == (3, 99) and np.array_equal(result.x, seen[2]) and same_on_all(result.fun)
    result = minimize(rosenbrock, START, options={"maxtime": 0.0 if last else None}, **given)
    assert (result.nit, result.status) == (1, 1)


def test_the_start_of_rank_0_is_that_of_all(mesh, same_on_all):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = minimize(rosenbrock, START + mesh.rank, method="L-BFGS", mesh=mesh)
    assert same_on_all(result.x) and result.nfev == minimize(rosenbrock, START, method="L-BFGS").nfev
    assert any("initial parameters differ" in str(each.message) for each in found) == (mesh.rank == 0 < mesh.size - 1)


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_a_checkpoint_goes_on_with_the_same_request(mesh, folder, method, options):
    def steps(optimizer, most):
        points = []
        while len(points) < most and (request := optimizer.ask()) is not None:
            points.append(request.x.copy())
            if request.direction is None:
                optimizer.tell(*rosenbrock(request.x))
            else:
                optimizer.tell_product(curvature(request.x, request.direction))
        return points

    given = {"bounds": options.get("bounds")}
    expected = steps(ReverseCommunication(method, START, **given), 16)
    first = ReverseCommunication(method, START, mesh=mesh, **given)
    assert np.array_equal(steps(first, 7), expected[:7]) and first.ranks.optimizer.clock == 7
    first.ask()
    first.save(folder)
    second = ReverseCommunication(method, np.zeros(SIZE), mesh=mesh, **given)
    second.load(folder)
    assert np.array_equal(steps(second, 9), expected[7:])
    with pytest.raises(ValueError, match="on a mesh save"):
        first.serialize()
    third = ReverseCommunication(method, START, mesh=mesh, **given)
    answer = rosenbrock(third.ask().x)
    third.tell(*answer)
    if third.ask().direction is None:
        third.tell(*answer)
        with pytest.raises(RuntimeError, match="not asked for since the last answer"):
            third.tell(*answer)


def test_a_run_that_fails_resumes_with_the_evaluation_that_failed(mesh, same_on_all, folder):
    seen, expected, options = [], [], {"bounds": (-1.5, 0.9), "options": {"maxiter": 7}}
    whole = minimize(lambda x: (expected.append(x), rosenbrock(x))[1], START, **options)

    def fun(x):
        if len(seen) == 6 and mesh.rank == mesh.size - 1:
            raise RuntimeError("a node is gone")
        seen.append(x)
        return rosenbrock(x)

    with mpishard.Checkpoints(folder / "checkpoints", mesh, every=3) as checkpoints:
        files = {"mesh": mesh, "checkpoints": checkpoints, "resume": True}
        with pytest.raises(RuntimeError, match="a node is gone"):
            minimize(fun, START, **files, **options)
        fun = lambda x: (seen.append(x), rosenbrock(x))[1]  # noqa: E731
        del seen[6:]  # on ranks that did not fail, the seventh
        with mpishard.RunRecord(folder / "record", mesh) as record:
            result = minimize(fun, START, record=record, **files, **options)
        assert np.array_equal(seen, expected) and same_on_all(result.x)
        assert all(np.array_equal(result[name], whole[name]) for name in whole)
        again = minimize(fun, START, **files, **options)  # it had ended: the function is compared at the end
        assert np.array_equal(seen[len(expected) :], [result.x])
        assert again.message == result.message and np.array_equal(again.x, result.x)
        more = minimize(fun, START, **files, **{**options, "options": {"maxiter": 8}})
        assert more.nit == 8 and more.fun < result.fun
        assert np.array_equal(seen[len(expected) + 1 : len(expected) + 3], [result.x, result.x])
    if mesh.rank == 0:
        steps = Run.read(folder / "record").metrics["step"]
        assert steps[0] == 7 and steps[-1] == result.nfev


def test_a_checkpoint_of_another_function_is_refused(mesh, folder):
    """As where the stages of an inversion share one folder."""
    other = lambda x: (1.0 + rosenbrock(x)[0], rosenbrock(x)[1])  # noqa: E731
    words = "is of another function"
    with mpishard.Checkpoints(folder, mesh, every=2) as checkpoints:
        files = {"mesh": mesh, "checkpoints": checkpoints, "resume": True, "method": "L-BFGS"}
        first = minimize(rosenbrock, START, callback=lambda x: True, **files)
        assert first.nit == 1
        with pytest.raises(ValueError, match=words):  # it had not ended, but began elsewhere
            minimize(other, np.zeros(SIZE), **files)
        went_on = minimize(rosenbrock, np.zeros(SIZE), options={"maxiter": 5}, **files)
        assert went_on.nit == 5
        with pytest.raises(ValueError, match=words):  # it had ended
            minimize(other, START, options={"maxiter": 5}, **files)


@pytest.mark.parametrize("samples", [None, 70])
def test_an_elastic_run_refuses_a_checkpoint_that_another_function_has_ended(mesh, folder, samples):
    def fun(x, these=None, scale=1.0):
        return of_samples(x, np.arange(70) if these is None else these, scale)

    with mpishard.Checkpoints(folder, mesh, every=2) as checkpoints:
        files = {"mesh": mesh, "checkpoints": checkpoints, "resume": True, "elastic": True, "samples": samples}
        found = minimize(fun, START, **files)
        assert np.array_equal(minimize(fun, START, **files).x, found.x)
        with pytest.raises(ValueError, match="is of another function"):
            minimize(partial(fun, scale=2.0), START, **files)


ROWS = np.random.default_rng(1).standard_normal((70, SIZE))


def of_samples(x, samples, scale=1.0):
    residual = ROWS[samples] @ (scale * x) - ROWS[samples].sum(1)
    bend = np.tanh(residual)
    return 0.5 * residual @ residual + bend.sum(), scale * ROWS[samples].T @ (residual + 1 - bend * bend)


def product_of_samples(x, d, samples, scale=1.0):
    """The Gauss-Newton matrix of `of_samples` times a direction."""
    return scale**2 * ROWS[samples].T @ (ROWS[samples] @ d)


def matrix_of_samples(x, samples, scale=1.0):
    return scale**2 * ROWS[samples].T @ ROWS[samples]


@pytest.mark.parametrize(
    ("method", "options"),
    [METHODS[0], ("trust-ncg", {"hessp": product_of_samples}), ("Newton-CG", {"hess": matrix_of_samples})],
)
@pytest.mark.quick
def test_runs_elastic_or_not_have_the_bits_of_one_process(comm, mesh, same_on_all, method, options):
    def run(mesh, fun, elastic=True, **more):
        points = []
        given = {"method": method, "options": {"maxiter": 6}, "args": (2.0,), **options, **more}
        result = minimize(fun, START, callback=points.append, mesh=mesh, elastic=elastic, **given)
        assert len(points) == result.nit == 6 and np.array_equal(points[-1], result.x)
        return points, result

    def whole(x, scale):
        return of_samples(x, np.arange(70), scale)

    every = np.arange(70)
    hessp = lambda x, d, scale: product_of_samples(x, d, every, scale)  # noqa: E731
    hess = lambda x, scale: matrix_of_samples(x, every, scale)  # noqa: E731
    own = {name: call for name, call in (("hessp", hessp), ("hess", hess)) if name in options}
    with mpishard.Mesh(comm.Split(comm.rank)) as alone:
        for fun, more in ((of_samples, {"samples": 70}), (whole, own)):
            points, result = run(mesh, fun, **more)
            expected, found = run(alone, fun, **more)
            assert np.array_equal(points, expected) and same_on_all(result.x)
            assert all(np.array_equal(result[name], found[name]) for name in found)
    for place in (mesh, None):
        seen, plain = run(place, whole, elastic=False, **own)
        assert np.array_equal(seen, points) and same_on_all(plain.jac)
        assert all(np.array_equal(result[name], plain[name]) for name in plain)


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_all_ranks_end_with_the_code_of_one(mesh, elastic):
    if elastic and os.environ.get("OMPI_MCA_mpi_ft_enable") == "1":
        pytest.skip("counts as a death")

    def fun(x):
        if mesh.rank == mesh.size - 1 and (x != START).any():
            raise SystemExit(3)
        return float(x @ x), 2 * x

    with pytest.raises(SystemExit) as raised:
        minimize(fun, START, mesh=mesh, elastic=elastic)
    assert raised.value.code == 3


def test_elastic_runs_of_a_start_with_names(mesh, same_on_all):
    seen, target = [], {"a": np.arange(4.0).reshape(2, 2), "b": np.array([1.0, 2.0, 4.0])}

    def fun(p, samples):
        residual = {name: len(samples) * (p[name] - target[name]) for name in target}
        value = sum((residual[name] * (p[name] - target[name])).sum() for name in target) / 2
        return value, residual

    def callback(intermediate_result):
        seen.append({name: intermediate_result.x[name].copy() for name in target})
        return mesh.rank == mesh.size - 1

    start = FlatParameters.of({"a": np.zeros((2, 2)), "b": np.zeros(3)})
    smooth = mpishard.Tikhonov(weight=0.5, name="b")
    given = {"method": "CG", "tol": 0, "mesh": mesh, "samples": 2, "elastic": True}  # fewer samples than ranks
    result = minimize(mpishard.regularized(fun, smooth), start, callback=callback, **given)
    assert result.x is start and (result.nit, result.status) == (1, 99)
    assert all(np.array_equal(seen[0][name], start[name]) for name in target) and same_on_all(start["b"])
    assert result.fun == pytest.approx(2 * fun(start, [0])[0] + smooth.value_and_gradient(start["b"])[0])


def test_elastic_runs_are_saved_and_go_on(mesh, folder, same_on_all):
    options = {"mesh": mesh, "samples": 70, "elastic": {"max_workers": max(1, mesh.size - 1)}, "bounds": (-1.5, 0.9)}
    whole = minimize(of_samples, START, options={"maxiter": 8}, **options)
    with mpishard.Checkpoints(folder, mesh, every=3) as checkpoints, mpishard.RunRecord(folder / "r", mesh) as record:
        files = {"checkpoints": checkpoints, "resume": True, "record": record}
        first = minimize(of_samples, START, callback=lambda x: True, **files, **options)
        assert (first.nit, first.status) == (1, 99)
        result = minimize(of_samples, np.zeros(SIZE), options={"maxiter": 8}, **files, **options)
    assert all(np.array_equal(result[name], whole[name]) for name in whole) and same_on_all(result.x)
    late = minimize(of_samples, START, options={"maxtime": 0.0}, **options)
    assert (late.nfev, late.status) == (1, 1) and "maxtime" in late.message


def test_elastic_runs_of_ranks_that_differ(mesh):
    if mesh.size == 1 or os.environ.get("OMPI_MCA_mpi_ft_enable") == "1":
        pytest.skip("one rank, or an error ends its process")
    odd = mesh.rank == 1
    for fun, words in (
        (lambda x: (1.0 + odd, 2 * x), "different values .*samples=N"),
        (lambda x: (1.0, 2 * x + odd), "values of the gradient"),
    ):
        with pytest.raises(ValueError, match=words):
            minimize(fun, START, method="L-BFGS", mesh=mesh, elastic=True)


def test_the_stages_of_a_script_have_one_record(mesh, folder):
    """Each call of minimize counts on; one that resumes a checkpoint of the last goes on where that was."""
    evaluations = []
    for most, resume in ((3, False), (4, False), (6, True)):
        with mpishard.Checkpoints(f"{folder}/{resume or most}", mesh) as checkpoints:
            given = {"mesh": mesh, "checkpoints": checkpoints, "record": mpishard.RunRecord(f"{folder}/record", mesh)}
            evaluations.append(minimize(rosenbrock, START, options={"maxiter": most}, resume=resume, **given).nfev)
    with mpishard.Checkpoints(f"{folder}/True", mesh) as checkpoints:
        record = mpishard.RunRecord(f"{folder}/record", mesh)
        given = {"mesh": mesh, "checkpoints": checkpoints, "resume": True, "record": record}
        evaluations.append(minimize(rosenbrock, START, options={"maxiter": 8}, **given).nfev - evaluations[-1])
    mesh.world.barrier()
    run = Run.read(f"{folder}/record")
    assert run.metrics["step"].tolist() == list(range(1, sum(evaluations) + 1))
    assert [began_after(start) for start in run.starts] == [0, *np.cumsum(evaluations)[:3].tolist()]
    assert run.metrics["start"].tolist() == np.repeat([1, 2, 3, 4], evaluations).tolist()


def test_files_that_make_no_sense(mesh, folder):
    for options, words in (
        ({"resume": True}, "resume=True"),
        ({"checkpoints": 3}, "checkpoints=3"),
        ({"record": 3}, "record=3"),
        ({"checkpoints": 3, "mesh": None}, "are for a mesh"),
        ({"mesh": 3}, "mesh=3"),
        ({"reduction": "mean"}, "reduction=.mean."),
        ({"elastic": {"scaling": "linear"}}, "elastic= has no option .scaling."),
        ({"elastic": True, "reduction": "sum"}, "give samples=N"),
        ({"elastic": True, "samples": 0}, "samples=0"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            minimize(rosenbrock, START, method="L-BFGS", **{"mesh": mesh, **options})
    with mpishard.Mesh() as another:  # whose ledger is not that of the run
        record = mpishard.RunRecord(folder, another)
        for options in ({}, {"elastic": True}):
            with pytest.raises(ValueError, match="the record is (not )?of (another|the optimizer's) mesh"):
                minimize(rosenbrock, START, mesh=mesh, record=record, **options)


# A function that fails at a trial point.


def test_a_failed_evaluation_shortens_the_step_on_all_ranks(mesh):
    """The minimum is that of a function that is infinite there; the result says where the last one failed, and why."""

    def part(x):
        share = 1.0 if mesh.rank == 0 else 0.0
        return share * float(((x - 2.9) ** 4).sum()), share * 4 * (x - 2.9) ** 3

    def function(at_trial):
        calls = []

        def fun(x):
            calls.append(x)
            return at_trial(x) if len(calls) in (2, 3) else part(x)

        return fun

    def fails(x):
        if mesh.rank == mesh.size - 1:
            raise mpishard.EvaluationFailed("no convergence in 7 iterations")
        return part(x)

    start = np.array([0.0, 0.5, 1.0])
    for method in ("L-BFGS-B", "CG"):
        found, expected = (
            minimize(function(trial), start, method=method, mesh=mesh, reduction="sum", options={"maxiter": 40})
            for trial in (fails, lambda x: (math.inf, x))
        )
        assert np.array_equal(found.x, expected.x) and found.nfev == expected.nfev
        assert "7 iterations" in found.message and "7 iterations" not in expected.message
        assert mesh.size == 1 or f"rank {mesh.size - 1}" in found.message


def test_a_failure_at_the_start_is_an_error_on_all_ranks(mesh):
    def fun(x):
        if mesh.rank == mesh.size - 1:
            raise mpishard.EvaluationFailed("mesh too coarse")
        return float(x @ x), 2 * x

    with pytest.raises((mpishard.EvaluationFailed, RuntimeError), match="mesh too coarse"):
        minimize(fun, np.ones(3), mesh=mesh, reduction="sum")


def test_what_fails_everywhere_but_at_the_start_says_so(mesh):
    calls = []

    def fun(x):
        calls.append(x)
        if len(calls) > 1:
            raise mpishard.EvaluationFailed("always")
        return float(x @ x), 2 * x

    found = minimize(fun, np.ones(3), mesh=mesh)
    assert (found.status, found.success) == (2, False) and "always" in found.message
    assert "until then was 0" in found.message
    assert np.array_equal(found.x, np.ones(3)) and len(calls) < 30


def test_the_message_says_at_which_step_length_the_last_success_was(mesh):
    """Of a line search whose first trial had a value, though none that is accepted, and all others failed."""
    calls = []

    def fun(x):
        calls.append(x.copy())
        if len(calls) > 2:
            raise mpishard.EvaluationFailed("always")
        return float(x @ x) + 1e3 * (len(calls) == 2), 2 * x

    start = np.ones(4)
    found = minimize(fun, start, mesh=mesh)
    step = (start - calls[1])[0] / 2  # along the gradient, which is 2
    assert found.status == 2 and step > 0 and len(calls) < 30
    assert f"{step:.3g}" in found.message and "always" in found.message


def unsteady(fun, often):
    """A function that fails so many times at each new point before it succeeds, and the points of its calls."""
    points = []

    def called(x, *more):
        flat = x.tobytes()
        points.append(flat)
        if points.count(flat) <= often:
            x[...] = np.nan  # a call that fails may leave anything in what it was given
            raise mpishard.EvaluationFailed("by chance")
        return fun(x, *more)

    return called, points


@pytest.mark.quick
@pytest.mark.parametrize("reduction", [None, "sum"])
def test_a_shot_that_fails_by_chance_is_tried_again(mesh, reduction):
    """With a sum on its rank alone, else on all ranks: the function may be collective."""

    def part(x):
        value, slope = rosenbrock(x)
        return (value, slope) if reduction is None or mesh.rank == 0 else (0.0, 0 * slope)

    last = mesh.rank == mesh.size - 1
    fails, points = unsteady(part, 2) if last else (part, [])
    calls = []

    def fun(x):
        calls.append(1)
        return fails(x)

    options = {"maxiter": 4}
    plain = minimize(part, START, mesh=mesh, reduction=reduction, options=options)
    found = minimize(fun, START, mesh=mesh, reduction=reduction, options=options | {"retries": 2})
    assert np.array_equal(found.x, plain.x) and (found.nfev, found.message) == (plain.nfev, plain.message)
    assert len(calls) == (3 * found.nfev if last or reduction is None else found.nfev)
    fails, points = unsteady(part, 2) if last else (part, [])
    with pytest.raises((mpishard.EvaluationFailed, RuntimeError), match="by chance"):
        minimize(fun, START, mesh=mesh, reduction=reduction, options={"retries": 1})
    assert len(points) == (2 if last else 0)


def test_other_errors_are_not_tried_again(mesh):
    calls = []

    def fun(x):
        calls.append(1)
        if mesh.rank == mesh.size - 1:
            raise OSError("disk full")
        raise mpishard.EvaluationFailed("by chance")

    with pytest.raises((OSError, mpishard.EvaluationFailed), match="disk full|by chance"):
        minimize(fun, START, mesh=mesh, options={"retries": 5})
    assert len(calls) == 1
    for wrong in (-1, 1.5, "often"):
        with pytest.raises((ValueError, TypeError), match="retries"):
            minimize(rosenbrock, START, mesh=mesh, options={"retries": wrong})


@pytest.mark.parametrize("elastic", [False, True])
def test_hessian_products_are_tried_again(mesh, elastic):
    """Along the same direction, whatever the call that failed has left there."""
    fails, points = unsteady(lambda p, x: 2 * p, 1)
    options = {"mesh": mesh, "elastic": elastic, "options": {"retries": 1}}
    found = minimize(
        lambda x: (float(x @ x), 2 * x), START, method="Newton-CG", hessp=lambda x, p: fails(p, x), **options
    )
    assert found.success and found.nhev > 0 and len(points) > found.nhev


@pytest.mark.parametrize("samples", [None, 5])
def test_evaluations_of_an_elastic_run_fail_and_are_tried_again(mesh, samples):
    """A failed trial counts as an infinite value, here in a line search; one that fails by chance as none."""

    def of_samples(x, these=(0, 1, 2, 3, 4)):
        factor = float(len(these))
        return factor * float(((x - 2.9) ** 4).sum()), factor * 4 * (x - 2.9) ** 3

    def beyond(at_trial):
        def fun(x, *these):
            return at_trial(x) if x.max() > 1.1 and x.min() < 0.9 else of_samples(x, *these)

        return fun

    def fails(x):
        raise mpishard.EvaluationFailed("no convergence")

    start = np.array([0.0, 0.5, 1.0])
    options = {"mesh": mesh, "elastic": True, "samples": samples}
    found, expected = (
        minimize(beyond(trial), start, options={"maxiter": 5}, **options)
        for trial in (fails, lambda x: (math.inf, np.zeros(3)))
    )
    assert np.array_equal(found.x, expected.x) and found.nfev == expected.nfev > 2
    assert "no convergence" in found.message and "no convergence" not in expected.message
    calls = []

    def by_chance(x, *these):
        calls.append(1)
        if len(calls) % 2:
            raise mpishard.EvaluationFailed("by chance")
        return of_samples(x, *these)

    found = minimize(by_chance, start, options={"maxiter": 5, "retries": 1}, **options)
    expected = minimize(of_samples, start, options={"maxiter": 5}, **options)
    assert np.array_equal(found.x, expected.x) and found.message == expected.message


# Gradients by finite differences.


@pytest.fixture(scope="module")
def alone():
    """By scheme the result of finite differences on one process."""
    given = {"bounds": (-1.5, 0.9), "options": {"maxiter": 6}}
    return {
        scheme: minimize(lambda x: rosenbrock(x)[0], START, jac=scheme, **given) for scheme in ("2-point", "3-point")
    }


@pytest.mark.quick
@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_ranks_share_the_columns_of_finite_differences(mesh, alone, scheme):
    calls = []

    def fun(x):
        calls.append(1)
        return rosenbrock(x)[0]

    found = minimize(fun, START, jac=scheme, bounds=(-1.5, 0.9), options={"maxiter": 6}, mesh=mesh)
    expected = alone[scheme]
    assert np.array_equal(found.x, expected.x) and np.array_equal(found.jac, expected.jac)
    assert (found.nit, found.nfev, found.message) == (expected.nit, expected.nfev, expected.message)
    columns = len(range(mesh.rank, START.size, mesh.size))
    assert len(calls) == found.nfev * (1 + {"2-point": 1, "3-point": 2}[scheme] * columns)


def test_finite_differences_of_a_sum_over_ranks(mesh):
    """Values are added up at each point: with parts whose sum is exact, the bits are those of one process."""
    whole = np.round(np.sin(np.arange(5.0)), 2)

    def values(x, shots):
        return float(sum(np.rint(2.0**40 * (1 + shot) * (x - whole) ** 2).sum() for shot in shots)) * 2.0**-40

    shots = range(6)[mesh.rank :: mesh.size]
    given = {"jac": "3-point", "options": {"maxiter": 5}}
    found = minimize(values, np.zeros(5), (shots,), mesh=mesh, reduction="sum", **given)
    expected = minimize(values, np.zeros(5), (range(6),), **given)
    assert np.array_equal(found.x, expected.x) and np.array_equal(found.jac, expected.jac)
    assert np.allclose(found.x, whole, atol=1e-3)


def test_groups_share_the_columns_of_a_whole_start(comm, alone):
    """The function may communicate within its group: all of its ranks come for the same points."""
    tensor = comm.size // 2 if comm.size % 2 == 0 else comm.size
    with mpishard.Mesh(comm, tensor=tensor) as mesh:

        def fun(x):
            assert len(set(mesh.tensor.comm.allgather(x.tobytes()))) == 1
            return rosenbrock(x)[0]

        found = minimize(fun, START, jac="2-point", bounds=(-1.5, 0.9), options={"maxiter": 6}, mesh=mesh)
        assert np.array_equal(found.x, alone["2-point"].x) and found.nfev == alone["2-point"].nfev
        named = FlatParameters([ParameterSpec("x", START.shape)], np.float64, place=mesh.place)
        named.flat[...] = START
        found = minimize(
            lambda x: fun(x["x"]), named, jac="2-point", bounds=(-1.5, 0.9), options={"maxiter": 6}, mesh=mesh
        )
        assert np.array_equal(named["x"], alone["2-point"].x)


def test_finite_differences_resume_where_they_were(mesh, folder, alone):
    """From the middle, and from the end of a run, where the function is evaluated again to see that it is the same."""
    given = {"jac": "2-point", "bounds": (-1.5, 0.9), "mesh": mesh}
    for most in (2, 4, 6):
        with mpishard.Checkpoints(folder, mesh, every=1) as checkpoints:
            found = minimize(
                lambda x: rosenbrock(x)[0],
                START,
                options={"maxiter": most},
                checkpoints=checkpoints,
                resume=True,
                **given,
            )
    assert np.array_equal(found.x, alone["2-point"].x) and found.nit == alone["2-point"].nit
    with mpishard.Checkpoints(folder, mesh) as checkpoints:
        with pytest.raises(ValueError, match="of another function"):
            minimize(lambda x: 2 * rosenbrock(x)[0], START, checkpoints=checkpoints, resume=True, **given)


def test_a_column_that_fails_on_one_rank_fails_on_all(mesh):
    last = mesh.rank == mesh.size - 1
    calls = []

    def beyond(x):
        calls.append(1)
        # Where all elements are as large, as at the points of the method, it does not fail.
        if last and x.max() > 0.4 and x.max() - x.min() > 1e-6:
            raise mpishard.EvaluationFailed("too far")
        return float(((x - 2) ** 4).sum())

    found = minimize(beyond, np.zeros(8), jac="3-point", options={"maxiter": 2}, mesh=mesh)
    assert found.nit > 0 and 0 < found.x.max() <= 0.4 and "too far" in found.message
    steady, points = unsteady(beyond, 1)
    tried = minimize(steady, np.zeros(8), jac="2-point", options={"maxiter": 1, "retries": 1}, mesh=mesh)
    assert tried.nit == 1 and len(points) > tried.nfev

    def fails(x):
        if last and x[-1] > 0:
            raise OSError("disk full")
        return float(x @ x)

    with pytest.raises((OSError, RuntimeError), match="disk full"):
        # The column of the last rank, whatever the number of ranks.
        minimize(fails, np.zeros(mesh.size), jac="2-point", mesh=mesh)


def test_finite_differences_that_cannot_be(mesh):
    def value(x):
        return float(x @ x)

    term = mpishard.regularized(lambda x: (value(x), 2 * x), mpishard.Tikhonov(weight=1.0))
    for fun, given, words in (
        (value, {"elastic": True}, "2-point.*elastic="),
        (lambda x, these: value(x), {"elastic": True, "samples": 3}, "2-point.*samples="),
        (term, {}, "2-point.*regularized"),
    ):
        with pytest.raises(ValueError, match=words):
            minimize(fun, np.ones(3), jac="2-point", mesh=mesh, **given)
    with mpishard.Mesh(mesh.world.comm, tensor=mesh.size) as split:
        part = FlatParameters([ParameterSpec("x", (8,), tensor_dim=0)], np.float64, place=split.place)
        if mesh.size > 1:
            with pytest.raises(ValueError, match=f"tensor={mesh.size}"):
                minimize(value, part, jac="2-point", mesh=split)
    if mesh.size > 1:
        with mpishard.Mesh(mesh.world.comm, pipeline=mesh.size, data=1) as stages:
            with pytest.raises(ValueError, match=f"pipeline={mesh.size}"):
                minimize(value, np.ones(3), jac="2-point", mesh=stages)
        with pytest.raises(ValueError, match="jac is (2-point|3-point) on"):
            minimize(value, np.ones(3), jac="3-point" if mesh.rank else "2-point", mesh=mesh)
