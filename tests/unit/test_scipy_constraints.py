"""`minimize(constraints=...)` with SciPy's objects and dictionaries, and what is refused of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hock_schittkowski import PROBLEMS

import mpishard
from mpishard import minimize

PROBLEM = PROBLEMS[71]  # an equation, an inequality and bounds


def linear(matrix, lower, upper):
    """As scipy.optimize.LinearConstraint."""
    return SimpleNamespace(A=matrix, lb=lower, ub=upper, keep_feasible=False)


def nonlinear(fun, lower, upper, jac="2-point", **more):
    """As scipy.optimize.NonlinearConstraint."""
    return SimpleNamespace(fun=fun, lb=lower, ub=upper, jac=jac, keep_feasible=False, **more)


def sparse(matrix):
    csr = pytest.importorskip("scipy.sparse", reason="SciPy is not installed (extra: test)").csr_matrix
    return csr(matrix)


def operator(matrix):
    return SimpleNamespace(shape=matrix.shape, matvec=lambda x: matrix @ x, rmatvec=lambda v: matrix.T @ v)


@pytest.mark.parametrize(
    ("jac", "method"),
    [
        (PROBLEM.jacobian, "L-BFGS-B"),
        (lambda x: sparse(PROBLEM.jacobian(x)), None),
        (lambda x: operator(PROBLEM.jacobian(x)), None),
        ("2-point", "l-bfgs-b"),
        ("cs", None),
    ],
    ids=["array", "sparse", "operator", "2-point", "cs"],
)
def test_jacobians_in_all_forms(jac, method):
    result = minimize(
        PROBLEM.value_and_gradient,
        PROBLEM.x0,
        method=method,
        bounds=PROBLEM.pairs,
        constraints=nonlinear(PROBLEM.constraints, 0.0, PROBLEM.upper, jac),
        tol=1e-6,
        options={"maxiter": 50.0, "maxcor": 5},
    )
    assert result.success and result.fun == pytest.approx(PROBLEM.minimum, abs=1e-5)
    assert result.constr_violation <= 1e-6 and result.optimality <= 1e-6


def curvature(gradient, x):
    """A Hessian, by central differences of a gradient."""
    moves = 1e-5 * np.eye(x.size)
    return np.stack([(gradient(x + move) - gradient(x - move)) / 2e-5 for move in moves])


def test_jacobians_that_share_an_array():
    shared = np.empty((1, 4))

    def row(k):
        def jac(x):
            shared[0] = PROBLEM.jacobian(x)[k]
            return shared

        return nonlinear(lambda x: PROBLEM.constraints(x)[k], 0.0, PROBLEM.upper[k], jac)

    result = minimize(PROBLEM.value_and_gradient, PROBLEM.x0, bounds=PROBLEM.pairs, constraints=[row(0), row(1)])
    assert result.success and result.fun == pytest.approx(PROBLEM.minimum, abs=1e-4)


@pytest.mark.parametrize("form", [np.asarray, sparse, operator])
def test_newton_methods_take_the_hessians_of_constraints(form):
    def fun_hess(x):
        return form(curvature(lambda x: PROBLEM.value_and_gradient(x)[1], x))

    def hess(x, v):
        return form(curvature(lambda x: PROBLEM.adjoint(x, v), x))

    calls = []

    def jac(x):
        calls.append(x.tobytes())
        return form(PROBLEM.jacobian(x))

    # The first two unknowns are at most 6 together, which holds anyway.
    constraints = [nonlinear(PROBLEM.constraints, 0.0, PROBLEM.upper, jac, hess=hess), linear([[1, 1, 0, 0]], -9, 6)]
    given = {"bounds": PROBLEM.pairs, "constraints": constraints, "tol": 1e-6}
    found = minimize(PROBLEM.value_and_gradient, PROBLEM.x0, method="trust-ncg", hess=fun_hess, **given)
    assert found.success and found.fun == pytest.approx(PROBLEM.minimum, abs=1e-5) and found.nhev > found.nfev
    assert len(calls) <= 2 * found.nfev  # and not once a product
    other = minimize(PROBLEM.value_and_gradient, PROBLEM.x0, **given)
    assert found.nfev < other.nfev and np.allclose(found.multipliers, other.multipliers, atol=1e-4)


def test_second_derivatives_may_change_what_they_are_given():
    def hess(x, v):
        found = 2 * v[0] * np.eye(2) + 0 * x
        x[:] = v[:] = np.nan
        return found

    def hessp(x, direction):
        product = 2 * direction + 0 * x
        x[:] = direction[:] = np.nan
        return product

    sphere = nonlinear(lambda x: [x @ x], -np.inf, 4.0, lambda x: 2 * x[None], hess=hess)
    larger = nonlinear(lambda x: [x @ x], -np.inf, 9.0, lambda x: 2 * x[None], hess=hess)
    fun = lambda x: (((x - 3) ** 2).sum(), 2 * (x - 3))  # noqa: E731
    result = minimize(fun, np.ones(2), method="trust-ncg", hessp=hessp, constraints=[sphere, larger])
    assert result.success and np.allclose(result.x, np.sqrt(2), atol=1e-4)


def test_dictionaries_and_what_scipy_makes_of_them():
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra: test)")
    start = [0.5, 0.0, 1.0]

    def value(x, weight):
        return (x[0] - 1) ** 2 + weight * (x[1] - 2) ** 2 + x[2] ** 2

    def gradient(x, weight):
        return np.array([2 * (x[0] - 1), 2 * weight * (x[1] - 2), 2 * x[2]])

    given = [
        {"type": "eq", "fun": lambda x: x.sum() - 1},
        {"type": "ineq", "fun": lambda x, most: most - x[1], "jac": lambda x, most: [0, -1, 0], "args": (1.5,)},
        optimize.LinearConstraint([[1, -1, 0], [0, 1, 1]], [-1.0, -np.inf], [np.inf, 1.25]),
        optimize.NonlinearConstraint(lambda x: x[0] * x[2], -0.25, np.inf, jac=lambda x: [x[2], 0, x[0]]),
    ]
    found = minimize(value, start, (3.0,), jac=gradient, constraints=given)
    theirs = optimize.minimize(
        value, start, (3.0,), jac=gradient, constraints=given, method="SLSQP", options={"ftol": 1e-12}
    )
    assert found.success and theirs.success and np.allclose(found.x, theirs.x, atol=1e-5)
    assert found.constr.shape == found.multipliers.shape == (5,)


def test_points_have_the_form_of_the_start():
    def jac(tree):
        assert tree["a"].shape == (2,)
        return {"a": [[2 * tree["a"][0], 2 * tree["a"][1]]], "b": [0.0]}

    def fun(tree):
        return tree["a"].sum() + tree["b"] ** 2, {"a": np.ones(2), "b": 2 * tree["b"]}

    start = {"a": np.array([1.0, 0.0]), "b": np.array(0.5)}
    constraints = [nonlinear(lambda tree: tree["a"] @ tree["a"], 2, 2, jac), linear(np.eye(3)[2], 0.25, 1)]
    found = minimize(fun, start, constraints=constraints)
    assert np.allclose(found.x["a"], -1, atol=1e-5) and found.x["b"] == pytest.approx(0.25, abs=1e-5)
    named = mpishard.FlatParameters.of({"a": np.array([1.0, 0.0])})
    found = minimize(
        lambda p: (p["a"].sum(), {"a": np.ones(2)}),
        named,
        constraints=nonlinear(lambda p: p["a"] @ p["a"], 2, 2, lambda p: 2 * p["a"][None]),
    )
    assert found.x is named and np.allclose(named["a"], -1, atol=1e-5)


@pytest.mark.parametrize("jac", ["2-point", "3-point"])
@pytest.mark.parametrize("tree", [False, True])
def test_finite_differences_stay_inside_of_the_bounds(jac, tree):
    """The constraint has a root that ends at the upper bound, where the start is; another element cannot move."""
    seen = []

    def root(x):
        x = x["a"] if tree else x
        seen.append(x.copy())
        return [np.sqrt(1 - x[0]) + x[1] * x[2] - 1]

    def fun(x):
        x = x["a"] if tree else x
        gradient = np.array([-2.0, 2 * x[1], 0])
        return -2 * x[0] + x[1] ** 2, {"a": gradient} if tree else gradient

    lower, upper, start = [-np.inf, 0, 1], [1, 2, 1], np.array([1.0, 0, 1])
    pair = np.array(lower), np.array(upper)
    bounds, x0 = ({"a": pair}, {"a": start}) if tree else (pair, start)
    found = minimize(fun, x0, bounds=bounds, constraints=nonlinear(root, 0, np.inf, jac))
    x = found.x["a"] if tree else found.x
    assert found.success and np.allclose(x, [8 / 9, 2 / 3, 1], atol=1e-4)
    assert np.max(seen, axis=0)[0] <= 1 and np.min(seen, axis=0)[1] >= 0


ROUND = nonlinear(lambda x: x @ x, 1, 2, lambda x: 2 * x)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"constraints": 3}, TypeError, "constraints=3 .*NonlinearConstraint"),
        (
            {"constraints": nonlinear(abs, 0, 1, "cs"), "x0": np.ones(2, complex)},
            ValueError,
            "jac='cs' .*x0 is complex",
        ),
        ({"constraints": [ROUND, lambda x: x]}, TypeError, "constraints=.*LinearConstraint"),
        ({"constraints": {"type": "le", "fun": sum}}, ValueError, "'eq' or 'ineq'.*'le'"),
        ({"constraints": {"type": "eq"}}, ValueError, "'fun'"),
        ({"constraints": {"type": "eq", "fun": sum, "hess": 1}}, ValueError, "'hess'"),
        ({"constraints": {"type": "eq", "fun": 1}}, TypeError, "'eq': fun=1"),
        ({"constraints": nonlinear(sum, 0, 1, "4-point")}, ValueError, "jac='4-point'"),
        ({"constraints": nonlinear(sum, 0, 1, None)}, ValueError, "jac=None"),
        (
            {"constraints": nonlinear(lambda x: x @ x, 0, 1, lambda x: x[:1])},
            ValueError,
            r"\(1,\).* 1 constraints of 2",
        ),
        ({"constraints": nonlinear(lambda x: x @ x, [0, 1], 2)}, ValueError, "2 lower limits, but 1"),
        ({"constraints": nonlinear(lambda x: x @ x, 3, 2)}, ValueError, "lower=3 and upper=2"),
        ({"constraints": linear(np.eye(3), 0, 1)}, ValueError, "3 columns, but x0 has 2"),
        (
            {"constraints": SimpleNamespace(A=np.eye(2), lb=0, ub=1, keep_feasible=[True, False])},
            ValueError,
            "keep_feasible=True",
        ),
        ({"method": "SLSQP"}, ValueError, "'SLSQP': .*leave method= out"),
        ({"method": "trust-constr"}, ValueError, "'trust-constr'"),
        ({"method": "trust-ncg"}, ValueError, "Hessian of fun: give hessp= or hess="),
        ({"method": mpishard.TruncatedNewton()}, ValueError, "Hessian of fun"),
        ({"method": "Newton-CG", "hess": np.eye}, ValueError, "SimpleNamespace has none: give .*hess="),
        ({"jac": "2-point"}, ValueError, "jac='2-point' is for a function without constraints"),
        ({"options": 3}, TypeError, "options=3"),
        ({"options": {"eps": 1}}, ValueError, "no option 'eps'"),
        ({"samples": 3}, ValueError, "samples="),
        ({"scale": 3}, TypeError, "'scale'"),
    ],
)
def test_arguments_that_are_refused(change, error, words):
    given = {"fun": lambda x: (x.sum(), np.ones(2)), "x0": [1.0, 0.0], "constraints": ROUND}
    with pytest.raises(error, match=words):
        minimize(**{**given, **change})
