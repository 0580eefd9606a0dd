"""Nonlinear conjugate gradients: the minima of hard functions, directions by the formula, restarts, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import Device
from mgh import PROBLEMS
from minimizer_runs import (
    ANY,
    Problem,
    Vector,
    check_device,
    check_ranks,
    check_restarts,
    everywhere,
    excess,
    exponentials,
    of_the_set,
    rosenbrock,
    started,
    tell_next,
)
from minimizer_runs import minimized as minimized_by

from mpishard.minimizers.line_search import HagerZhang, MoreThuente
from mpishard.minimizers.method import Limits, Minimizer, Wanted
from mpishard.minimizers.nonlinear_cg import NonlinearCG

# How far it comes, in valleys as narrow as these.  Along that of Watson's function (condition 1e10) the last bit of a
# product decides how far: with several kernels and starts it ended 0.005 to 0.6 above the minimum, from 2e7 above.
HARD = {"3 Powell badly scaled": 1e-5, "17 Osborne 1": 1e-5, "20 Watson, 9": 2.0}
SEARCHES = ["more-thuente", "hager-zhang", HagerZhang(sigma=0.1)]


def minimized(problem: Problem, limits: Limits = ANY, **options: Any) -> Minimizer:
    return minimized_by(NonlinearCG(**options), problem, limits)


def quadratic(size: int, condition: float) -> Problem:
    """Half the sum of ``w (x - 1)^2``."""
    w = np.geomspace(1, condition, size)
    return Problem(lambda x: (float(0.5 * np.sum(w * (x - 1) ** 2)), w * (x - 1)), lambda x, v: w * v, np.zeros(size))


@pytest.mark.parametrize("search", SEARCHES, ids=str)
@pytest.mark.parametrize("size", [2, 10, 40])
def test_minimum_of_rosenbrock(size: int, search: Any) -> None:
    problem = rosenbrock(size)
    minimizer = minimized(problem, line_search=search, gtol=1e-8, ftol=0)
    assert minimizer.stop_reason == "gradient"
    np.testing.assert_allclose(minimizer.point, 1, rtol=0, atol=1e-6)
    assert minimizer.progress.value == problem.gradient(minimizer.point)[0]


def test_a_start_that_is_zero_but_for_rounding() -> None:
    problem = rosenbrock(10)
    minimizer = minimized(problem._replace(start=np.full(10, 1e-14)), gtol=1e-8, ftol=0)
    assert minimizer.stop_reason == "gradient"


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_minima_of_the_set(problem: Any) -> None:
    inner, limits = of_the_set(problem)
    minimizer = minimized(inner, limits, gtol=1e-9, ftol=0)
    if "Broyden banded" in problem.name:  # has another local minimum, which it finds from this start
        assert abs(minimizer.progress.value - 3.0572784326) <= 1e-9
    else:
        assert excess(problem, minimizer.progress.value) <= HARD.get(problem.name, 1e-8)


def test_exact_steps_on_a_quadratic_end_after_as_many_iterations_as_eigenvalues() -> None:
    minimizer = minimized(quadratic(5, 100.0), line_search=MoreThuente(ftol=1e-7, gtol=1e-6), gtol=1e-6)
    assert minimizer.progress.iterations == 5
    np.testing.assert_allclose(minimizer.point, 1, atol=1e-6)


def test_directions_are_those_of_the_formula() -> None:
    problem, diagonal = rosenbrock(8), np.linspace(0.5, 2, 8)
    method = NonlinearCG(gtol=1e-6)
    minimizer = started(method, problem.start, Limits(scaling=diagonal))
    minimizer.begin()
    tell_next(minimizer, problem)
    d, g = minimizer.row("direction").copy(), minimizer.row("base_gradient").copy()
    np.testing.assert_allclose(d, -diagonal * g, rtol=1e-15)
    count = bounded = 0
    while minimizer.wanted is not Wanted.NOTHING and count < 40:
        tell_next(minimizer, problem)
        if minimizer.progress.accepted:
            new = minimizer.row("base_gradient").copy()
            y = new - g
            beta = (y @ (diagonal * new) - 2 * (y @ (diagonal * y)) * (d @ new) / (d @ y)) / (d @ y)
            least = 0.4 * (d @ g) / (d @ (d / diagonal))
            d, g = -diagonal * new + max(beta, least) * d, new
            np.testing.assert_allclose(minimizer.row("direction"), d, rtol=1e-9, atol=1e-9 * np.abs(d).max())
            assert d @ g <= -0.875 * (g @ (diagonal * g))  # theorem 1.1 of the paper, without the truncation
            d = minimizer.row("direction").copy()
            count, bounded = count + 1, bounded + (beta < least)
    assert count > 20


def test_restarts_with_steepest_descent() -> None:
    problem = rosenbrock(6)
    minimizer = started(NonlinearCG(restart=3), problem.start, ANY)
    minimizer.begin()
    steepest = []
    while minimizer.progress.iterations < 8:
        tell_next(minimizer, problem)
        if minimizer.progress.accepted:
            steepest.append(bool(np.array_equal(minimizer.row("direction"), -minimizer.row("base_gradient"))))
    assert steepest == [False, False, True, False, False, True, False, False]


def test_scaling_makes_a_diagonal_harmless() -> None:
    size = 30
    problem, diagonal = exponentials(size, 1e4), 1 / (1 + np.geomspace(1, 1e4, size))
    plain = minimized(problem, gtol=1e-6, ftol=0)
    scaled = minimized(problem, Limits(scaling=diagonal), gtol=1e-6, ftol=0)
    called = minimized(problem, Limits(precondition=lambda vector: diagonal * vector), gtol=1e-6, ftol=0)
    for minimizer in (scaled, called):
        np.testing.assert_allclose(minimizer.point, 1.0 + np.arange(size), atol=1e-6)
        assert minimizer.progress.evaluations * 3 < plain.progress.evaluations
    np.testing.assert_array_equal(scaled.point, called.point)


def test_fixed_elements_keep_their_value() -> None:
    inner = rosenbrock(6)
    fixed = np.array([False, True, False, False, False, True])

    def poisoned(x: Vector) -> tuple[float, Vector]:
        value, g = inner.gradient(x)
        return value, np.where(fixed, np.nan, g)

    scaling = np.array([1.0, 2.0, 0.5, 1.0, 3.0, 1.0])
    blurred = np.eye(6) + 0.2 * np.ones((6, 6))
    for limits in (
        Limits(fixed=fixed),
        Limits(fixed=fixed, scaling=scaling),
        Limits(fixed=fixed, precondition=lambda vector: blurred @ vector),
    ):
        minimizer = minimized(inner._replace(gradient=poisoned), limits, gtol=1e-5, ftol=0)
        assert minimizer.stop_reason == "gradient"
        np.testing.assert_array_equal(minimizer.point[fixed], inner.start[fixed])
        assert np.max(np.abs(inner.gradient(minimizer.point)[1][~fixed])) <= 1e-5


def test_another_function_begins_with_steepest_descent() -> None:
    minimizer = minimized(rosenbrock(6), maxiter=5)
    minimizer.begin()
    tell_next(minimizer, exponentials(6, 10.0))
    np.testing.assert_array_equal(minimizer.row("direction"), -minimizer.row("base_gradient"))
    while minimizer.wanted is not Wanted.NOTHING:
        tell_next(minimizer, exponentials(6, 10.0))
    assert minimizer.stop_reason == "iterations" and minimizer.progress.iterations == 5


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_restart_between_any_two_calls_keeps_the_bits(dtype: Any) -> None:
    problem = rosenbrock(5)._replace(start=rosenbrock(5).start.astype(dtype))
    for search in SEARCHES:
        check_restarts(NonlinearCG(gtol=1e-3, restart=7, line_search=search), problem, everywhere(5, dtype))
    with pytest.raises(ValueError, match="cannot be restored: KeyError"):
        started(NonlinearCG(), problem.start, ANY).restore({"wanted": "gradient"})


@pytest.mark.parametrize("cuts", [[0, 5, 12], [0, 0, 7, 12], [0, 1, 2, 6, 12, 12]], ids=len)
def test_bits_do_not_depend_on_who_holds_what(cuts: list[int]) -> None:
    method = NonlinearCG(gtol=1e-4)
    progress = minimized_by(method, rosenbrock(12), everywhere(12)).progress
    for space in check_ranks(method, rosenbrock(12), everywhere(12), cuts):
        assert space.all_reduces <= 2 * progress.evaluations + 4 * progress.iterations + 2


def test_device_memory_gives_the_bits_of_the_host(device: Device) -> None:
    for limits in (ANY, everywhere(6)):
        check_device(device, NonlinearCG(maxiter=12), rosenbrock(6), limits)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="takes no bounds; use LBFGSB"):
        started(NonlinearCG(), np.ones(3), Limits(upper=np.zeros(3)))
    with pytest.raises(ValueError, match="leave one of them out"):
        started(NonlinearCG(), np.ones(3), Limits(scaling=np.ones(3), precondition=lambda vector: vector))
    with pytest.raises(ValueError, match="preconditioner must be positive definite"):
        minimized(rosenbrock(3), Limits(precondition=lambda vector: -vector))
    for options in ({"eta": 0.0}, {"restart": 0}, {"maxls": 0}, {"line_search": "golden"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            NonlinearCG(**options)


def test_fewer_evaluations_than_scipy() -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed")
    ours = theirs = 0
    for problem in (rosenbrock(2), rosenbrock(10), rosenbrock(30), exponentials(12, 1e3), quadratic(50, 1e4)):
        minimizer = minimized(problem, gtol=1e-5, ftol=0)
        found = optimize.minimize(problem.gradient, problem.start, jac=True, method="CG", options={"gtol": 1e-5})
        assert minimizer.stop_reason == "gradient" and found.success
        ours, theirs = ours + minimizer.progress.evaluations, theirs + found.nfev
    assert ours <= theirs
