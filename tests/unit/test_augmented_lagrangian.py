"""`augmented_lagrangian` on one process: problems of Hock and Schittkowski, its course, and bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hock_schittkowski import PROBLEMS, derivatives

import mpishard
from mpishard import augmented_lagrangian

# By number the evaluations that a problem takes.
EVALUATIONS = {
    7: 20,
    9: 15,
    10: 34,
    11: 27,
    12: 70,
    14: 28,
    21: 4,
    22: 23,
    23: 59,
    24: 28,
    26: 85,
    29: 56,
    30: 4,
    31: 16,
    34: 40,
    35: 18,
    36: 10,
    37: 36,
    39: 53,
    40: 28,
    41: 24,
    43: 46,
    52: 35,
    63: 29,
    64: 65,
    65: 66,
    66: 26,
    71: 42,
    76: 23,
    77: 47,
    80: 29,
    100: 130,
}


def solved(problem, **given):
    """`given` are further arguments."""
    known = {"x0": problem.x0, "bounds": problem.pairs, "upper": problem.upper}
    return augmented_lagrangian(
        problem.value_and_gradient, **{**known, **given}, constraints=problem.constraints, adjoint=problem.adjoint
    )


@pytest.mark.pairs(8)
@pytest.mark.parametrize("number", EVALUATIONS)
def test_the_known_minima_in_so_many_evaluations(number):
    problem = PROBLEMS[number]
    result = solved(problem)
    assert result.success and result.optimality <= 1e-5
    assert result.fun == pytest.approx(problem.minimum, abs=1e-5, rel=1e-6)
    assert result.nfev <= 1.5 * EVALUATIONS[number]
    constr, upper, y = problem.constraints(result.x), problem.upper, result.multipliers
    assert np.array_equal(result.constr, constr)
    violation = max(0.0, -constr.min(), (constr - upper).max())
    assert result.constr_violation == pytest.approx(violation, abs=1e-15) and violation <= 1e-6
    # A multiplier pushes away from the limit at which its constraint is.
    assert (y[upper == math.inf] >= 0).all()
    inequalities = upper > 0
    left = np.where(y > 0, abs(constr), abs(upper - constr))
    products = np.minimum(left, abs(y))[inequalities]
    assert np.max(products, initial=0.0) <= 1e-6 and result.complementarity <= 1e-6
    found = derivatives(problem.fun, result.x) - derivatives(problem.constraints, result.x) @ y
    assert np.allclose(found, result.lagrangian_grad, atol=1e-8)
    again = solved(problem, x0=result.x, multipliers=y, penalty=result.penalty)
    assert again.success and again.nfev <= max(2, result.nfev / 2)


def test_what_is_known_is_not_evaluated_again():
    """The start of a minimisation is the last iterate of the one before."""
    problem, calls = PROBLEMS[71], []

    def count(name, function):
        def counted(*given):
            calls.append(name)
            return function(*given)

        return counted

    result = augmented_lagrangian(
        count("fun", problem.value_and_gradient),
        problem.x0,
        count("constraints", problem.constraints),
        count("adjoint", problem.adjoint),
        upper=problem.upper,
        bounds=problem.pairs,
    )
    assert calls.count("fun") == calls.count("constraints") == result.nfev == result.njev
    assert calls.count("adjoint") == result.nfev + result.nit - 1


def test_limits_on_both_sides():
    """The nearest point of a box, whose sides are constraints, in one call and with equal limits among them."""
    wanted, lower, upper = np.array([3.0, 0.25, -3.0, 7.0]), [-1.0, 0.0, -math.inf, 2.0], [1.0, 0.5, math.inf, 2.0]
    result = augmented_lagrangian(
        lambda x: (0.5 * (x - wanted) @ (x - wanted), x - wanted),
        np.zeros(4),
        lambda x: x,
        lambda x, v: v,
        lower=lower,
        upper=upper,
    )
    assert result.success and np.allclose(result.x, [1.0, 0.25, -3.0, 2.0], atol=1e-5)
    assert np.allclose(result.multipliers, [-2.0, 0.0, 0.0, -5.0], atol=1e-5)
    assert result.multipliers[1] == result.multipliers[2] == 0
    moved = augmented_lagrangian(
        lambda x: (x @ x, 2 * x), np.zeros(2), lambda x: x.sum(), lambda x, v: np.full(2, v[0]), lower=3, upper=3
    )
    assert moved.success and np.allclose(moved.x, 1.5) and moved.multipliers[0] == pytest.approx(3.0)


@pytest.mark.parametrize("number", [12, 65])
def test_newton_steps_need_fewer_evaluations(number):
    problem = PROBLEMS[number]

    def lagrangian(x, y):
        return derivatives(problem.fun, x) - derivatives(problem.constraints, x) @ y

    def hessp(x, direction, y):
        step = 1e-6
        return (lagrangian(x + step * direction, y) - lagrangian(x - step * direction, y)) / (2 * step)

    products = {"hessp": hessp, "forward": lambda x, direction: problem.jacobian(x) @ direction}
    result = solved(problem, method="trust-ncg", **products)
    assert result.success and result.fun == pytest.approx(problem.minimum, abs=1e-5)
    assert result.nfev < 0.8 * EVALUATIONS[number] and result.nhev > result.nfev


def test_functions_may_change_what_they_are_given_and_share_an_array():
    shared = np.empty(2)

    def hessp(x, direction, y):
        shared[:] = 2 * direction
        direction[:] = y[:] = math.nan
        return shared

    def adjoint(x, v):
        shared[:] = v[0]
        return shared

    products = {"hessp": hessp, "forward": lambda x, direction: direction.sum(), "method": "trust-ncg"}
    found = augmented_lagrangian(
        lambda x: (x @ x, 2 * x), np.zeros(2), lambda x: x.sum(), adjoint, lower=3, upper=3, **products
    )
    assert found.success and np.allclose(found.x, 1.5)


def test_a_minimum_without_multipliers_is_met_as_far_as_the_tolerance_says():
    """The square of the distance is 1 at the minimum; where (1 - x)^3 is -1e-6, x is 0.01 too far."""
    result = solved(PROBLEMS[13])
    assert result.success and result.constr_violation <= 1e-6 and abs(result.multipliers[0]) > 1000
    assert result.fun == pytest.approx(1.0, abs=0.021)
    assert "the multipliers still grow, the largest from 3.79e+03 to 9.55e+03" in result.message
    assert "grow" not in solved(PROBLEMS[14]).message and "grow" not in solved(PROBLEMS[39], penalty=1e8).message


def test_the_answers_are_those_of_slsqp():
    optimize = pytest.importorskip("scipy.optimize")
    problem = PROBLEMS[39]
    result = solved(problem)
    constraints = {"type": "eq", "fun": problem.constraints, "jac": problem.jacobian}
    theirs = optimize.minimize(
        problem.fun, problem.start, method="SLSQP", options={"ftol": 1e-12}, constraints=constraints
    )
    assert np.allclose(result.x, theirs.x, atol=1e-5) and result.fun == pytest.approx(theirs.fun, abs=1e-5)


def test_constraints_that_saturate():
    """Their Jacobian almost vanishes: a penalty of 1e7, which that calls for, leaves no digits of the gradient."""
    random = np.random.default_rng(2)
    rows = random.standard_normal((10, 20))
    ends = np.tanh(rows @ (0.3 * random.standard_normal(20)))
    result = augmented_lagrangian(
        lambda x: (0.5 * x @ x, x),
        np.ones(20),
        lambda x: np.tanh(rows @ x) - ends,
        lambda x, v: rows.T @ ((1 - np.tanh(rows @ x) ** 2) * v),
    )
    assert result.success and result.constr_violation <= 1e-6 and result.optimality <= 1e-5
    assert result.penalty <= 1e6 and result.nfev <= 700
    assert result.fun == pytest.approx(0.38701, rel=1e-4)


@pytest.mark.parametrize(
    ("constraints", "adjoint", "bounds"),
    [
        (lambda x: [x @ x + 1], lambda x, v: 2 * x * v, None),
        (lambda x: [x.sum() - 1, x.sum() - 2], lambda x, v: np.full(2, v.sum()), None),
        (lambda x: [x.sum() - 3], lambda x, v: np.full(2, v.sum()), [(0, 1)] * 2),
        (lambda x: np.tanh(x) - 1.5, lambda x, v: (1 - np.tanh(x) ** 2) * v, None),
    ],
)
def test_constraints_without_a_solution_end_and_say_so(constraints, adjoint, bounds):
    result = augmented_lagrangian(lambda x: (x @ x, 2 * x), [0.9, 0.1], constraints, adjoint, bounds=bounds)
    assert result.status == 2 and not result.success and result.constr_violation >= 0.4
    assert "may have no common solution" in result.message and result.nfev <= 1000


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
    assert np.allclose(above.x["x"], 0.5, atol=1e-6) and above.x["slack"] == 0
    assert above.lagrangian_grad["x"].shape == (2,)
    named = mpishard.FlatParameters.of({"x": np.array([1.0, 0.0])})
    result = augmented_lagrangian(
        lambda p: (p["x"].sum(), {"x": np.ones(2)}),
        named,
        lambda p: circle(p["x"]),
        lambda p, v: {"x": circle_adjoint(p["x"], v)},
        method="CG",
    )
    assert result.x is named and np.allclose(named["x"], -1, atol=1e-5)


def test_constraints_may_be_of_a_subclass_of_arrays():
    def matrix(x):
        return np.asmatrix(circle(x))

    found = augmented_lagrangian(plane, [1.0, 0.0], matrix, circle_adjoint)
    assert np.array_equal(found.x, augmented_lagrangian(plane, [1.0, 0.0], circle, circle_adjoint).x)


def test_the_end_is_said():
    limited = augmented_lagrangian(plane, [1.0, 0.0], circle, circle_adjoint, maxiter=1)
    assert (limited.status, limited.nit) == (1, 1) and "reached maxiter=1" in limited.message
    wrong = augmented_lagrangian(plane, [1.0, 0.0], circle, lambda x, v: -circle_adjoint(x, v))
    assert wrong.status == 2 and "check_adjoint" in wrong.message
    seen = []

    def callback(intermediate_result):
        seen.append(intermediate_result)
        return len(seen) == 2

    stopped = augmented_lagrangian(plane, [1.0, 0.0], circle, circle_adjoint, callback=callback)
    assert (stopped.status, stopped.nit) == (99, 2) and seen[0].x.shape == (2,) and seen[1].nit == 2


def test_l1_terms_and_constraints():
    """The minimum is a soft threshold, moved by the multiplier that makes the sum of the unknowns what it shall be."""
    wanted, weight = np.linspace(-2, 3, 21), 0.75

    def threshold(y):
        return np.sign(wanted + y) * np.maximum(abs(wanted + y) - weight, 0)

    low, high = -10.0, 10.0
    while high - low > 1e-13:
        low, high = ((low + high) / 2, high) if threshold((low + high) / 2).sum() < 12 else (low, (low + high) / 2)
    x = threshold(low)
    smooth = lambda x: (0.5 * ((x - wanted) ** 2).sum(), x - wanted)  # noqa: E731
    given = {"x0": np.zeros(21), "constraints": lambda x: x.sum(), "adjoint": lambda x, v: np.full(21, v[0])}
    given |= {"lower": 12, "upper": math.inf, "gtol": 1e-8, "ctol": 1e-8}
    term = augmented_lagrangian(mpishard.regularized(smooth, mpishard.L1(weight)), **given)
    option = augmented_lagrangian(smooth, method=mpishard.LBFGSB(l1=(weight, None), ftol=0), **given)
    for found in (term, option):
        assert found.success and np.allclose(found.x, x, atol=1e-7) and np.array_equal(found.x == 0, x == 0)
        assert found.multipliers[0] == pytest.approx(low, abs=1e-6) and found.at_reference == (x == 0).sum() > 3
        assert found.fun == pytest.approx(smooth(x)[0] + weight * abs(x).sum(), rel=1e-9)
    assert np.array_equal(term.x, option.x)


@pytest.mark.parametrize(("start", "words"), [(-1.0, "failed: constraint 1 is nan ("), (0.5, "1 is nan, also after")])
def test_a_constraint_that_is_no_number_is_named(start, words):
    """A root, which no shorter step finds where the second evaluation is the first with a NaN for all that follow."""
    calls = []

    def constraints(x):
        calls.append(x)
        root = math.nan if x[0] < 0 or len(calls) > 1 else math.sqrt(x[0])
        return [x[0] - 3, root]

    found = augmented_lagrangian(
        lambda x: (x @ x, 2 * x), [start], constraints, lambda x, v: np.array([v[0] + v[1]]), upper=math.inf
    )
    assert found.status == 2 and words in found.message and "gradient" not in found.message.split("(")[0]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"constraints": 3}, TypeError, "constraints=3"),
        ({"adjoint": None}, TypeError, "adjoint=None"),
        ({"constraints": lambda x: "a"}, TypeError, "constraints .*got 'a'"),
        ({"constraints": lambda x: np.zeros(1 + bool(x[1]))}, ValueError, "2 numbers, but 1"),
        ({"adjoint": lambda x, v: v}, ValueError, "adjoint has 1 elements .*x0 has 2"),
        ({"multipliers": [1, 2]}, ValueError, "2 multipliers, but 1"),
        ({"multipliers": [math.nan]}, ValueError, "multipliers .*finite"),
        ({"penalty": 0}, ValueError, "penalty=0"),
        ({"maxiter": 0}, ValueError, "maxiter=0"),
        ({"lower": 1}, ValueError, "lower=1 and upper=0"),
        ({"upper": math.nan}, ValueError, "upper=nan"),
        ({"lower": math.inf, "upper": math.inf}, ValueError, "lower=inf"),
        ({"lower": [-1, 0]}, ValueError, "lower has 2 limits.* 1 constraints"),
        ({"upper": "a"}, TypeError, "upper .*got 'a'"),
        ({"method": "trust-ncg"}, ValueError, "hessp= .*forward="),
        ({"hessp": 3}, TypeError, "hessp=3"),
        ({"options": {"gtol": 1}}, ValueError, "gtol="),
        ({"reduction": "sum"}, ValueError, "for a mesh; give mesh="),
        ({"elastic": True}, ValueError, "elastic= .*give mesh="),
        ({"samples": 3}, TypeError, "takes no samples="),
        ({"resume": True}, ValueError, "checkpoints, resume and record .*mesh="),
        ({"tol": 1}, TypeError, "augmented_lagrangian .*'tol'"),
    ],
)
def test_arguments_that_are_refused(change, error, words):
    given = {"fun": plane, "x0": [1.0, 0.0], "constraints": circle, "adjoint": circle_adjoint}
    with pytest.raises(error, match=words):
        augmented_lagrangian(**{**given, **change})
