"""The inverse Hessian in the result of `minimize`: its numbers beside matrices, its forms, and what it keeps."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from descent import bowl, curvature, rosenbrock

import mpishard
from mpishard import L1, FlatParameters, ReverseCommunication, minimize, regularized
from mpishard.inverse.inverse_hessian import InverseHessian
from mpishard.minimizers.inverses import InverseOfPairs

SIZE = 7
START = np.where(np.arange(SIZE) % 2, 1.0, -1.2)
BOUNDS = [(None, None), (None, None), (0.5, 0.7), (None, 0.4), (1.0, 1.0), (None, None), (1.5, None)]
FIXED = np.arange(SIZE) == 1
POSITIVE = np.linspace(0.5, 3, SIZE)
MASS = np.diag(POSITIVE) + 0.1
MASK = {"fixed": FIXED}


def hessian(x):
    return np.array([curvature(x, unit) for unit in np.eye(SIZE)])


def restricted(matrix, free):
    """The inverse of the part of a matrix for free elements, and 0 for the others."""
    found = np.zeros_like(matrix)
    found[np.ix_(free, free)] = np.linalg.inv(matrix[np.ix_(free, free)])
    return found


def asked(method="L-BFGS-B", start=START, fun=rosenbrock, **more):
    options = {"hess_inv": True, **more.pop("options", {})}
    return minimize(fun, start, method=method, options=options, **more)


# Of the pairs of L-BFGS and L-BFGS-B.


@pytest.mark.parametrize("iterations", [3, 8, 15])
def test_pairs_are_those_of_scipy(iterations):
    """SciPy's iterates, and after one iteration more its pairs; it begins with 1 in place of s'y / y'y."""
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra: test)")
    options = {"maxcor": 20, "gtol": 0, "ftol": 0}
    peer = optimize.minimize(
        rosenbrock, START, jac=True, method="L-BFGS-B", options={**options, "maxiter": iterations + 1}
    )
    expected, pairs = np.eye(SIZE), peer.hess_inv
    expected *= 1 / pairs.rho[-1] / (pairs.yk[-1] @ pairs.yk[-1])
    for s, y, rho in zip(pairs.sk, pairs.yk, pairs.rho, strict=True):
        turn = np.eye(SIZE) - rho * np.outer(y, s)
        expected = turn.T @ expected @ turn + rho * np.outer(s, s)
    found = asked(options={**options, "maxiter": iterations}).hess_inv
    assert f"{iterations} pairs" in repr(found) and found.shape == (SIZE, SIZE) and found.dtype == np.float64
    assert np.allclose(found.todense(), expected, rtol=0, atol=1e-7 * abs(expected).max())


@pytest.mark.parametrize(
    "given",
    [
        {},
        MASK,
        {"inner_product": POSITIVE, "fixed": FIXED},
        {"bounds": BOUNDS},
        {"bounds": BOUNDS, "preconditioner": POSITIVE, "fixed": FIXED},
        {"options": {"initial_scaling": 0.3, "damping": "powell"}, "bounds": BOUNDS},
    ],
    ids=["plain", "fixed", "weights", "bounds", "all", "scaled"],
)
@pytest.mark.parametrize("maxiter", [6, 40])
def test_it_is_the_inverse_of_the_matrix_of_the_pairs(given, maxiter):
    """The BFGS updates of a matrix, whose part for the free elements is inverted."""
    given = {**given, "options": {"maxiter": maxiter, **given.get("options", {})}}
    optimizer = ReverseCommunication("L-BFGS-B", START, **given)
    while (request := optimizer.ask()) is not None:
        optimizer.tell(*rosenbrock(request.x))
    minimizer = optimizer.ranks.minimizer
    history, root = minimizer.history, np.sqrt(minimizer.limits.scaling if minimizer.limits.scaling is not None else 1)
    pairs = [*history.order, *history.opened_rows[:1]]
    steps, changes = history.rows[pairs], history.rows[[history.most + pair for pair in pairs]]
    newest = steps[-1] @ changes[-1] / (changes[-1] @ changes[-1])
    matrix = np.eye(SIZE) / given["options"].get("initial_scaling", newest)
    for s, y in zip(steps, changes, strict=True):
        through = matrix @ s
        matrix += np.outer(y, y) / (s @ y) - np.outer(through, through) / (s @ through)
    matrix /= np.outer(root * np.ones(SIZE), root * np.ones(SIZE))
    x, g = optimizer.result.x, optimizer.result.jac
    low, high = (
        np.array([none if pair[at] is None else pair[at] for pair in BOUNDS]) for at, none in ((0, -9), (1, 9))
    )
    held = (
        ((x <= low) & (g > 0)) | ((x >= high) & (g < 0)) | (low == high) if "bounds" in given else np.zeros(SIZE, bool)
    )
    free = ~(held | FIXED) if "fixed" in given else ~held
    assert len(pairs) > 4 and (held.sum() > 1 or "bounds" not in given)
    expected = restricted(matrix, free)
    found = asked(**given).hess_inv
    assert np.allclose(found.todense(), expected, rtol=0, atol=1e-8 * abs(expected).max())
    assert np.allclose(found.diagonal(), expected.diagonal(), rtol=0, atol=1e-8 * abs(expected).max())
    assert not found.diagonal()[~free].any() and (found.diagonal()[free] > 0).all()


@pytest.mark.parametrize(
    "given",
    [
        {"preconditioner": POSITIVE},
        {"preconditioner": lambda v: np.linalg.solve(MASS, v), "fixed": FIXED},
        {"inner_product": mpishard.RieszMap(lambda v: MASS @ v, lambda v: np.linalg.solve(MASS, v))},
    ],
    ids=["diagonal", "function", "Riesz map"],
)
@pytest.mark.parametrize("maxiter", [0, 1, 9])
def test_the_next_direction_is_made_of_it(given, maxiter):
    """Of the gradient it is along the step of the next iteration, before the first one, too."""
    result = asked("L-BFGS", **given, options={"maxiter": maxiter})
    step = minimize(rosenbrock, START, method="L-BFGS", **given, options={"maxiter": maxiter + 1}).x - result.x
    direction = -(result.hess_inv @ result.jac)
    assert abs(direction @ step) == pytest.approx(np.linalg.norm(direction) * np.linalg.norm(step), rel=1e-10)
    diagonal, matrix = result.hess_inv.diagonal(), result.hess_inv.todense()
    assert np.allclose(diagonal, matrix.diagonal()) and np.allclose(matrix @ result.jac, -direction)


def test_it_is_near_the_inverse_of_the_hessian_only_along_the_pairs():
    """With as many pairs as there are unknowns it is; with few, an error by it is far from that by the Hessian."""
    found = asked(options={"maxcor": 30, "gtol": 1e-9, "ftol": 0})
    true = np.linalg.inv(hessian(found.x))
    assert np.allclose(np.sqrt(found.hess_inv.diagonal() / true.diagonal()), 1, atol=0.05)
    few = asked(options={"maxcor": 2, "gtol": 1e-9, "ftol": 0}).hess_inv
    assert abs(few.diagonal() / true.diagonal() - 1).max() > 0.3


def test_pairs_without_curvature_are_no_part_of_it():
    """At the start there are none; a newest pair without curvature is left out, and an oldest that is not finite."""
    start = asked(fun=lambda x: (0.5 * x @ x, x), start=np.zeros(SIZE)).hess_inv
    assert "0 pairs" in repr(start) and np.array_equal(start.todense(), np.eye(SIZE))
    optimizer = ReverseCommunication("L-BFGS-B", START, options={"maxiter": 6})
    while (request := optimizer.ask()) is not None:
        optimizer.tell(*rosenbrock(request.x))
    history = optimizer.ranks.minimizer.history
    newest, older = history.opened_rows[0], history.order[0]
    history.rows[history.most + newest] *= -1
    assert InverseOfPairs(optimizer.ranks.minimizer).origin == "5 pairs"
    history.rows[[older, history.most + older]] = np.nan
    with np.errstate(invalid="ignore"):
        assert InverseOfPairs(optimizer.ranks.minimizer).origin == "4 pairs"


# Of Newton methods.


@pytest.mark.parametrize(
    "given",
    [
        {"hessp": curvature},
        {"hess": hessian, "bounds": BOUNDS},
        {"hessp": curvature, "preconditioner": POSITIVE, "fixed": FIXED},
        {"hessp": curvature, "preconditioner": lambda v: np.linalg.solve(MASS, v)},
    ],
    ids=["plain", "bounds", "scaled", "function"],
)
def test_newton_methods_solve_with_the_hessian(given):
    result = asked("trust-ncg", **given, tol=1e-10)
    held = abs(result.jac) > 1e-6 if "bounds" in given else FIXED if "fixed" in given else np.zeros(SIZE, bool)
    expected = restricted(hessian(result.x), ~held)
    found = result.hess_inv
    assert np.allclose(found.todense(), expected, rtol=0, atol=1e-7 * abs(expected).max())
    assert np.allclose(found.diagonal(), expected.diagonal(), rtol=1e-6, atol=0) and "solves" in repr(found)
    assert not found.matvec(np.zeros(SIZE)).any()


def test_a_solve_without_a_solution_says_why():
    """No minimum; a matrix that ten products for each element do not solve; numbers that are none."""
    given = {"fun": lambda x: (-np.cos(x).sum(), np.sin(x)), "start": np.full(SIZE, 2.0), "options": {"maxiter": 0}}
    saddle = asked("trust-ncg", hessp=lambda x, d: np.cos(x) * d, **given).hess_inv
    with pytest.raises(ValueError, match="not positive definite"):
        saddle @ np.ones(SIZE)
    wrong = asked("trust-ncg", hessp=lambda x, d: 0.7 * np.roll(d, 1) + d, **given)
    with pytest.raises(ValueError, match="70 Hessian products"):
        wrong.hess_inv @ np.arange(7.0)
    with pytest.raises(ValueError, match="NaN"):
        asked("trust-ncg", hessp=lambda x, d: d * np.nan, **given).hess_inv @ np.ones(SIZE)
    with pytest.raises(ZeroDivisionError):
        asked("trust-ncg", hessp=lambda x, d: 1 / 0, **given).hess_inv @ np.ones(SIZE)


# Its forms, what it keeps, and what is refused.


def test_it_has_the_structure_of_x():
    def tree(x):
        return {"a": x[:4].reshape(2, 2), "z": [x[4:6].view(complex), x[6:]]}

    def flat(x):
        return np.concatenate([x["a"].reshape(-1), x["z"][0].view(float), x["z"][1]])

    def of_tree(x):
        value, gradient = rosenbrock(flat(x))
        return value, tree(gradient)

    vector = np.cos(np.arange(SIZE))
    plain = asked().hess_inv
    found = asked(fun=of_tree, start=tree(START)).hess_inv
    assert np.array_equal(flat(found @ tree(vector)), plain @ vector) and np.array_equal(
        found.todense(), plain.todense()
    )
    assert np.array_equal(flat(found.diagonal()), plain.diagonal())
    newton = asked("trust-ncg", hessp=curvature).hess_inv
    of_trees = {"fun": of_tree, "hessp": lambda x, d: tree(curvature(flat(x), flat(d))), "start": tree(START)}
    assert np.array_equal(flat(asked("trust-ncg", **of_trees).hess_inv @ tree(vector)), newton @ vector)
    parameters = FlatParameters.of({"a": START[:3], "b": START[3:]})
    named = asked(
        "trust-ncg", parameters, lambda p: rosenbrock(p.flat), hessp=lambda p, d: curvature(p.flat, d)
    ).hess_inv
    parameters.flat[:] = 7  # it is that of the result
    by_name = {"a": vector[:3], "b": vector[3:]}
    assert np.array_equal(named @ vector, newton @ vector) and np.array_equal(named @ by_name, newton @ vector)
    strided = np.repeat(vector, 2)[::2]
    strided.flags.writeable = False
    assert np.array_equal(plain @ strided, plain @ vector) and np.array_equal(plain(vector[:, None]), plain @ vector)
    with pytest.raises(ValueError, match="v has 3 elements"):
        plain @ np.ones(3)
    with pytest.raises(ValueError, match="structure of x0"):
        found @ {"a": 1}


def test_it_is_an_operator_for_scipy():
    linalg = pytest.importorskip("scipy.sparse.linalg", reason="SciPy is not installed (extra: test)")
    found = asked(start=START.astype("f4"), fun=lambda x: rosenbrock(x.astype(float))).hess_inv
    vector = np.linspace(0, 1, SIZE, dtype="f4")
    assert found.dtype == np.float32 == (found @ vector).dtype and found.todense().dtype == np.float32
    assert np.array_equal(linalg.aslinearoperator(found) @ vector, found @ vector)


def test_it_keeps_the_vectors_of_the_method():
    """``2 maxcor + 4`` as long as x, beside x and its gradient; without it none is left."""
    size, maxcor = 1 << 14, 3

    def kept(**options):
        gc.collect()
        tracemalloc.start()
        result = minimize(bowl_of_all, np.zeros(size), options={"maxcor": maxcor, "maxiter": 2, **options})
        gc.collect()
        vectors = tracemalloc.get_traced_memory()[0] / (8 * size)
        tracemalloc.stop()
        return round(vectors * (result.nit == 2))

    def bowl_of_all(x):
        return float(((x - 1) ** 4).sum()), 4 * (x - 1) ** 3

    kept()  # what is imported and compiled
    assert (kept(), kept(hess_inv=True)) == (2, 2 + 2 * maxcor + 4)


def test_what_is_refused():
    for name, option in (("hess_inv", "hess_inv"), ("allvecs", "return_all")):
        with pytest.raises(AttributeError, match=f"no '{name}', which options=.'{option}': True"):
            getattr(minimize(bowl, np.zeros(3)), name)
    with pytest.raises(ValueError, match="hess_inv.*L1"):
        minimize(regularized(bowl, L1(0.1)), np.zeros(3), options={"hess_inv": True})
    with pytest.raises(ValueError, match="hess_inv: NonlinearCG"):
        asked("CG")
    with pytest.raises(TypeError, match="hess_inv=3"):
        asked(options={"hess_inv": 3})
    for call in (
        lambda options: ReverseCommunication("L-BFGS-B", START, options=options),
        lambda options: mpishard.augmented_lagrangian(
            bowl, np.zeros(3), lambda x: x[:1], lambda x, v: v, options=options
        ),
    ):
        for name in ("hess_inv", "return_all"):
            with pytest.raises(ValueError, match=name):
                call({name: True})
    large = minimize(lambda x: (0.5 * x @ x, x), np.ones(5001), options={"hess_inv": True}).hess_inv
    with pytest.raises(ValueError, match=r"5001, .*0.186 GiB"):
        large.todense()
    assert np.allclose(large.diagonal(), 1)
    assert isinstance(large, InverseHessian) and large.shape == (5001, 5001)
