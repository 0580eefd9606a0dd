"""`augmented_lagrangian`: problems of Hock and Schittkowski, and bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mpishard
from mpishard import augmented_lagrangian


def others(x):
    """The product of the other elements, for each."""
    return np.array([np.prod(np.delete(x, k)) for k in range(len(x))])


# By number: function, gradient, start, constraints, their Jacobian.
HOCK_SCHITTKOWSKI = {
    6: (
        lambda x: (1 - x[0]) ** 2,
        lambda x: [-2 * (1 - x[0]), 0],
        [-1.2, 1],
        lambda x: [10 * (x[1] - x[0] ** 2)],
        lambda x: [[-20 * x[0], 10]],
    ),
    7: (
        lambda x: math.log(1 + x[0] ** 2) - x[1],
        lambda x: [2 * x[0] / (1 + x[0] ** 2), -1],
        [2, 2],
        lambda x: [(1 + x[0] ** 2) ** 2 + x[1] ** 2 - 4],
        lambda x: [[4 * x[0] * (1 + x[0] ** 2), 2 * x[1]]],
    ),
    39: (
        lambda x: -x[0],
        lambda x: np.array([-1.0, 0, 0, 0]),
        [2, 2, 2, 2],
        lambda x: [x[1] - x[0] ** 3 - x[2] ** 2, x[0] ** 2 - x[1] - x[3] ** 2],
        lambda x: [[-3 * x[0] ** 2, 1, -2 * x[2], 0], [2 * x[0], -1, 0, -2 * x[3]]],
    ),
    40: (
        lambda x: -np.prod(x),
        lambda x: -others(x),
        [0.8] * 4,
        lambda x: [x[0] ** 3 + x[1] ** 2 - 1, x[0] ** 2 * x[3] - x[2], x[3] ** 2 - x[1]],
        lambda x: [[3 * x[0] ** 2, 2 * x[1], 0, 0], [2 * x[0] * x[3], 0, -1, x[0] ** 2], [0, -1, 0, 2 * x[3]]],
    ),
    78: (
        np.prod,
        others,
        [-2, 1.5, 2, -1, -1],
        lambda x: [x @ x - 10, x[1] * x[2] - 5 * x[3] * x[4], x[0] ** 3 + x[1] ** 3 + 1],
        lambda x: [2 * x, [0, x[2], x[1], -5 * x[4], -5 * x[3]], [3 * x[0] ** 2, 3 * x[1] ** 2, 0, 0, 0]],
    ),
}


@pytest.mark.parametrize("number", HOCK_SCHITTKOWSKI)
def test_the_answers_are_those_of_slsqp(number):
    optimize = pytest.importorskip("scipy.optimize")
    value, gradient, start, constraints, jacobian = HOCK_SCHITTKOWSKI[number]

    def adjoint(x, v):
        return np.array(jacobian(x), float).T @ v

    result = augmented_lagrangian(value, start, constraints, adjoint, jac=gradient)
    equal = {"type": "eq", "fun": constraints, "jac": jacobian}
    theirs = optimize.minimize(
        value, start, jac=gradient, method="SLSQP", constraints=equal, options={"ftol": 1e-12, "maxiter": 1000}
    )
    assert result.success and result.constr_violation <= 1e-6 and result.optimality <= 1e-5
    assert np.allclose(result.x, theirs.x, atol=1e-5) and result.fun == pytest.approx(theirs.fun, abs=1e-5)
    found = np.asarray(gradient(result.x), float) - adjoint(result.x, result.multipliers)
    assert np.allclose(found, result.lagrangian_grad, atol=1e-8) and np.allclose(found, 0, atol=1e-4)
    again = augmented_lagrangian(
        value, result.x, constraints, adjoint, jac=gradient, multipliers=result.multipliers, penalty=result.penalty
    )
    assert again.success and again.nfev < result.nfev / 2


def circle(x):
    return [x @ x - 2]


def circle_adjoint(x, v):
    return 2 * x * v


def plane(x):
    return x.sum(), np.ones(2)


def test_bounds_names_and_structures():
    lower = augmented_lagrangian(plane, [-1.0, 0.5], circle, circle_adjoint, bounds=[(None, None), (-0.5, None)])
    assert np.allclose(lower.x, [-math.sqrt(1.75), -0.5], atol=1e-5) and lower.success
    # x[0] + x[1] >= 1 by a further unknown that is not negative
    start = {"x": np.zeros(2), "slack": 0.0}
    above = augmented_lagrangian(
        lambda p: (p["x"] @ p["x"], {"x": 2 * p["x"], "slack": 0.0}),
        start,
        lambda p: p["x"].sum() - 1 - p["slack"],
        lambda p, v: {"slack": -v[0], "x": np.full(2, v[0])},
        bounds={"slack": (0, None)},
    )
    assert (
        np.allclose(above.x["x"], 0.5, atol=1e-6) and above.x["slack"] == 0 and above.lagrangian_grad["x"].shape == (2,)
    )
    named = mpishard.FlatParameters.of({"x": np.array([1.0, 0.0])})
    result = augmented_lagrangian(
        lambda p: (p["x"].sum(), {"x": np.ones(2)}),
        named,
        lambda p: circle(p["x"]),
        lambda p, v: {"x": circle_adjoint(p["x"], v)},
        method="CG",
    )
    assert result.x is named and np.allclose(named["x"], -1, atol=1e-5)


def test_the_end_is_said():
    limited = augmented_lagrangian(plane, [1.0, 0.0], circle, circle_adjoint, maxiter=1)
    assert (limited.status, limited.nit) == (1, 1) and "reached maxiter=1" in limited.message
    nothing = augmented_lagrangian(plane, [1.0, 0.0], lambda x: [x @ x + 1], circle_adjoint)
    assert nothing.status == 2 and "may have no common solution" in nothing.message and nothing.constr_violation > 0.9
    wrong = augmented_lagrangian(plane, [1.0, 0.0], circle, lambda x, v: -circle_adjoint(x, v))
    assert wrong.status == 2 and "check_adjoint" in wrong.message
    seen = []

    def callback(intermediate_result):
        seen.append(intermediate_result)
        return len(seen) == 2

    stopped = augmented_lagrangian(plane, [1.0, 0.0], circle, circle_adjoint, callback=callback)
    assert (stopped.status, stopped.nit) == (99, 2) and seen[0].x.shape == (2,) and seen[1].nit == 2


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"constraints": 3}, TypeError, "constraints=3 must be a function"),
        ({"adjoint": None}, TypeError, "adjoint=None must be a function"),
        ({"constraints": lambda x: "a"}, TypeError, "constraints must return real numbers, got 'a'"),
        (
            {"constraints": lambda x: np.zeros(1 + bool(x[1]))},
            ValueError,
            "constraints returned 2 numbers, but 1 at x0",
        ),
        ({"adjoint": lambda x, v: v}, ValueError, "the product of adjoint has 1 elements of shape .*, but x0 has 2"),
        ({"multipliers": [1, 2]}, ValueError, "there are 2 multipliers, but 1 constraints"),
        ({"multipliers": [math.nan]}, ValueError, "multipliers must be finite"),
        ({"penalty": 0}, ValueError, "penalty=0 must be"),
        ({"maxiter": 0}, ValueError, "maxiter=0 must be"),
        ({"method": "trust-ncg"}, ValueError, "needs products with the Hessian; 'L-BFGS-B' and 'CG' do not"),
        ({"options": {"gtol": 1}}, ValueError, "gtol= is that of the last one"),
        ({"reduction": "sum"}, ValueError, "for a mesh; give mesh="),
        ({"elastic": True}, TypeError, "augmented_lagrangian got an unexpected keyword argument 'elastic'"),
    ],
)
def test_arguments_that_are_refused(change, error, words):
    given = {"fun": plane, "x0": [1.0, 0.0], "constraints": circle, "adjoint": circle_adjoint}
    with pytest.raises(error, match=words):
        augmented_lagrangian(**{**given, **change})
