"""How minimisations end, by every method: at the best point that was seen, and for a reason that says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mgh import PROBLEMS
from minimizer_runs import ANY, Problem, Vector, exponentials, minimized, of_the_set, rosenbrock

from mpishard.inverse.result import OptimizeResult, result_of
from mpishard.minimizers import LBFGS, LBFGSB, NonlinearCG, TruncatedNewton
from mpishard.minimizers.line_search import Armijo, MoreThuente
from mpishard.minimizers.method import Limits, Minimizer

Start = Callable[..., Any]
METHODS: dict[str, Start] = {
    "lbfgs": LBFGS,
    "hager-zhang": lambda **options: LBFGS(line_search="hager-zhang", **options),
    "armijo": lambda **options: LBFGS(line_search="armijo", **options),
    "lbfgsb": LBFGSB,
    "cg": NonlinearCG,
    "cg-hager-zhang": lambda **options: NonlinearCG(line_search="hager-zhang", **options),
    "newton": TruncatedNewton,
}
every = pytest.mark.parametrize("start", METHODS.values(), ids=METHODS)


def result(minimizer: Minimizer, method: Any) -> OptimizeResult:
    """What a user of `minimize` gets of it."""
    return result_of(minimizer.point, np.zeros_like(minimizer.point), minimizer.stop_reason, method, minimizer.progress)


def ended(method: Any, problem: Problem, wide: float = math.inf) -> tuple[Minimizer, float]:
    """A minimisation at its end, and the lowest value with a finite gradient that it was told."""
    told = [math.inf]

    def gradient(x: Vector) -> tuple[float, Vector]:
        with np.errstate(all="ignore"):
            value, g = problem.gradient(x)
        if math.isfinite(value) and np.isfinite(g).all():
            told.append(value)
        return value, g

    sides = np.full(problem.start.size, wide)
    limits = Limits(-sides, sides) if isinstance(method, LBFGSB) else ANY
    return minimized(method, problem._replace(gradient=gradient), limits), min(told)


@every
def test_a_region_without_values_is_left_again(start: Start) -> None:
    # x - log(x) has its minimum at 1 and no values below 0.
    problem = Problem(
        lambda x: (float(np.sum(x - np.log(x))), 1 - 1 / x), lambda x, v: v / x**2, np.array([30.0, 5.0, 0.1])
    )
    minimizer, _ = ended(start(gtol=1e-7, ftol=0), problem)
    np.testing.assert_allclose(minimizer.point, 1, atol=1e-6)


@every
@pytest.mark.parametrize("part", [-1.0, -1e-3])
def test_a_wrong_gradient_is_named_at_the_best_point(start: Start, part: float) -> None:
    good = rosenbrock(4)
    problem = good._replace(gradient=lambda x: (good.gradient(x)[0], part * good.gradient(x)[1]))
    minimizer, _ = ended(start(), problem)
    assert minimizer.stop_reason == "line search"
    np.testing.assert_array_equal(minimizer.point, good.start)
    said = result(minimizer, start())
    assert not said["success"] and "check_gradient" in said["message"]


@every
def test_a_gradient_with_one_wrong_element_is_no_success(start: Start) -> None:
    good = exponentials(4, 10.0)

    def gradient(x: Vector) -> tuple[float, Vector]:
        value, g = good.gradient(x)
        g[2] *= -1
        return value + 1, g

    minimizer, best = ended(start(gtol=1e-8, ftol=0), good._replace(gradient=gradient))
    assert minimizer.stop_reason == "line search"
    assert minimizer.progress.value == gradient(minimizer.point)[0] == best


@every
def test_what_is_never_finite_again_ends_at_the_best_point(start: Start) -> None:
    good, told = rosenbrock(4), []

    def gradient(x: Vector) -> tuple[float, Vector]:
        told.append(good.gradient(x)[0])
        return (told[-1] if len(told) < 12 else math.nan), good.gradient(x)[1]

    minimizer, best = ended(start(), good._replace(gradient=gradient))
    assert minimizer.stop_reason == "not finite"
    assert minimizer.progress.value == good.gradient(minimizer.point)[0] == best < told[0]


FALLING = {
    "line": Problem(lambda x: (float(x.sum()), np.ones(2)), lambda x, v: 0 * v, np.zeros(2)),
    "parabola": Problem(lambda x: (float(-x @ x), -2 * x), lambda x, v: -2 * v, np.array([0.1, 0.2])),
    "exponential": Problem(
        lambda x: (float(-np.exp(x).sum()), -np.exp(x)), lambda x, v: -np.exp(x) * v, np.array([0.1, 0.2])
    ),
}


@every
@pytest.mark.parametrize("problem", FALLING.values(), ids=FALLING)
def test_a_value_that_falls_without_limit(start: Start, problem: Problem) -> None:
    minimizer, best = ended(start(maxiter=1000), problem)
    assert minimizer.progress.value == problem.gradient(minimizer.point)[0] < problem.gradient(problem.start)[0]
    if start is METHODS["armijo"] and problem is not FALLING["exponential"]:  # its steps get no longer
        assert minimizer.stop_reason == "iterations" and minimizer.progress.value == best
    else:
        assert minimizer.stop_reason == "unbounded"
        assert "lower limit" in result(minimizer, start())["message"]


def test_bounds_limit_what_falls() -> None:
    for problem in FALLING.values():
        minimizer, best = ended(LBFGSB(), problem, wide=3.0)
        assert minimizer.stop_reason == "gradient" and minimizer.progress.value == best
        np.testing.assert_array_equal(np.abs(minimizer.point), 3)


@every
def test_the_last_evaluation_loses_nothing(start: Start) -> None:
    for problem in (rosenbrock(4), exponentials(5, 100.0), FALLING["line"]):
        for most in range(1, 14):
            minimizer, best = ended(start(maxfun=most, gtol=0, ftol=0), problem)
            assert minimizer.progress.value == problem.gradient(minimizer.point)[0] == best
            assert (
                minimizer.stop_reason in ("evaluations", "decrease", "gradient")
                and minimizer.progress.evaluations <= most
            )


@pytest.mark.parametrize("search", [MoreThuente(maxls=2, gtol=0.01), Armijo(maxls=1)], ids=["more-thuente", "armijo"])
def test_a_search_that_ends_too_early_goes_on_from_its_best_point(search: Any) -> None:
    minimizer, best = ended(LBFGS(line_search=search, ftol=0), exponentials(5, 3.0))
    assert minimizer.stop_reason in ("gradient", "line search") and minimizer.progress.value == best


@every
@pytest.mark.parametrize("power", [-300, -158, -100, 100, 200, 300])
def test_functions_near_the_ends_of_float64(start: Start, power: int) -> None:
    good, scale = rosenbrock(4), 10.0**power
    problem = Problem(
        lambda x: (scale * good.gradient(x)[0], scale * good.gradient(x)[1]),
        lambda x, v: scale * good.product(x, v),
        good.start,
    )
    minimizer, best = ended(start(gtol=0, ftol=0, maxiter=50), problem, wide=9.0)
    assert minimizer.stop_reason != "line search" and minimizer.progress.value == best
    if abs(power) >= 200 and start is not LBFGSB:
        assert minimizer.stop_reason == "range"
        assert "scale the function" in result(minimizer, start())["message"]


@pytest.mark.parametrize("method", [LBFGS(), NonlinearCG(line_search="hager-zhang"), TruncatedNewton()], ids=repr)
def test_float32_ends_where_its_digits_end(method: Any) -> None:
    of_the_list = [of_the_set(problem)[0] for problem in PROBLEMS if problem.minimum > 1e-2 and problem.start.size < 8]
    for good in (rosenbrock(10), exponentials(40, 1e4), *of_the_list):

        def gradient(x: Vector, good: Problem = good) -> tuple[float, Vector]:
            value, g = good.gradient(x.astype(float))
            return float(np.float32(value)), g.astype(np.float32)

        def product(x: Vector, v: Vector, good: Problem = good) -> Vector:
            return good.product(x.astype(float), v.astype(float)).astype(np.float32)

        minimizer, _ = ended(method, Problem(gradient, product, good.start.astype(np.float32)))
        assert minimizer.stop_reason in ("gradient", "decrease", "step")
