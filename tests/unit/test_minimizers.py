"""What methods of minimisation share: ends, elements, units, states, ranks, devices, and what they refuse."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from bounded_problems import BOUNDED
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
    finished,
    minimized,
    of_the_set,
    rosenbrock,
    started,
)
from problems import Problem as ProblemOfSet

from mpishard.inverse.result import OptimizeResult, result_of
from mpishard.layout.tensors import ParameterSpec
from mpishard.minimizers import LBFGS, LBFGSB, NonlinearCG, TruncatedNewton
from mpishard.minimizers.cauchy import Breakpoints
from mpishard.minimizers.elements import element_name, whole_bounds, whole_elements
from mpishard.minimizers.history import ReducedHistory
from mpishard.minimizers.line_search import HagerZhang, MoreThuente
from mpishard.minimizers.method import Limits, Method, Minimizer
from mpishard.minimizers.space import LocalSpace

# How minimisations end, by every method: at the best point that was seen, and for a reason that says what is wrong.

Start = Callable[..., Any]
METHODS: dict[str, Start] = {
    "lbfgs": LBFGS,
    "hager-zhang": lambda **options: LBFGS(line_search="hager-zhang", **options),
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
@pytest.mark.parametrize(
    ("point", "side", "wall"),
    [([0.5, -0.2], -1, 0.5), ([2.7368, -0.6183], -1, 0.5), ([-0.83, -0.75], 1, 0.41)],
)
def test_the_edge_of_a_region_without_values_is_no_minimum(
    start: Start, point: list[float], side: int, wall: float
) -> None:
    good = rosenbrock(len(point))

    def gradient(x: Vector) -> tuple[float, Vector]:
        return (math.nan, np.full_like(x, math.nan)) if side * (x[0] - wall) > 0 else good.gradient(x)

    minimizer, _ = ended(start(ftol=0, maxiter=50), good._replace(gradient=gradient, start=np.array(point)))
    assert result(minimizer, start()).status > 0 or minimizer.progress.projected_norm <= 1e-5


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


BAD = {f"{name}-{bad}": (METHODS[name], bad) for bad in ("value", "gradient") for name in METHODS}


@pytest.mark.parametrize(("start", "bad"), [*BAD.values(), (TruncatedNewton, "product")], ids=[*BAD, "newton-product"])
@pytest.mark.parametrize("late", [0, 11])
def test_what_is_never_finite_ends_at_the_best_point(start: Start, bad: str, late: int) -> None:
    good, told = rosenbrock(4), []

    def gradient(x: Vector) -> tuple[float, Vector]:
        value, g = good.gradient(x)
        told.append(value)
        g[2] = math.nan if bad == "gradient" and len(told) > late else g[2]
        return math.inf if bad == "value" and len(told) > late else value, g

    def product(x: Vector, v: Vector) -> Vector:
        return good.product(x, v) * (math.nan if bad == "product" and len(told) > late else 1)

    minimizer, best = ended(start(), Problem(gradient, product, good.start))
    assert minimizer.stop_reason == "not finite"
    if late:
        assert minimizer.progress.value == good.gradient(minimizer.point)[0] == best < told[0]
    else:
        assert minimizer.progress.evaluations == 1
        np.testing.assert_array_equal(minimizer.point, good.start)


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
    assert minimizer.stop_reason == "unbounded"
    assert "lower limit" in result(minimizer, start())["message"]


def test_bounds_limit_what_falls() -> None:
    for problem in FALLING.values():
        minimizer, best = ended(LBFGSB(), problem, wide=3.0)
        assert minimizer.stop_reason == "gradient" and minimizer.progress.value == best
        np.testing.assert_array_equal(np.abs(minimizer.point), 3)


@every
def test_limits_and_tolerances_end_it_at_the_best_point(start: Start) -> None:
    problem = rosenbrock(10)
    first = problem.gradient(problem.start)[0]
    for reason, options in {
        "iterations": {"maxiter": 5},
        "evaluations": {"maxfun": 7},
        "decrease": {"ftol": 0.5},
        "step": {"xtol": 0.5, "ftol": 0},
    }.items():
        minimizer, best = ended(start(**options), problem)
        assert minimizer.stop_reason == reason
        assert reason in ("decrease", "step") or getattr(minimizer.progress, reason) in options.values()
        assert minimizer.progress.value == problem.gradient(minimizer.point)[0] == best < first
    with pytest.raises(ValueError, match="has ended"):
        minimizer.tell(0.0, minimizer.point)
    assert ended(start(maxiter=0), problem)[0].progress.evaluations == 1
    for known in (np.ones(4), np.empty(0)):
        assert ended(start(), problem._replace(start=known))[0].stop_reason == "gradient"


@pytest.mark.pairs(2)
@every
def test_the_last_evaluation_loses_nothing(start: Start) -> None:
    for problem in (rosenbrock(4), exponentials(5, 100.0), FALLING["line"]):
        for most in range(1, 14):
            minimizer, best = ended(start(maxfun=most, gtol=0, ftol=0), problem)
            assert minimizer.progress.value == problem.gradient(minimizer.point)[0] == best
            assert minimizer.stop_reason in ("evaluations", "decrease", "gradient")
            assert minimizer.progress.evaluations <= most


def test_a_search_that_ends_too_early_goes_on_from_its_best_point() -> None:
    minimizer, best = ended(LBFGS(line_search=MoreThuente(maxls=2, gtol=0.01), ftol=0), exponentials(5, 3.0))
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


# Fixed elements, starts outside of bounds, and unknowns of very different units.


@every
def test_fixed_elements_keep_their_value_and_count_for_nothing(start: Start) -> None:
    inner, fixed = rosenbrock(6), np.array([False, True, False, False, False, True])
    poison, blurred = [1, math.nan, 1, 1, 1, 1e300], np.eye(6) + 0.2
    problem = Problem(
        lambda x: (inner.gradient(x)[0], np.where(fixed, poison, inner.gradient(x)[1])),
        lambda x, v: np.where(fixed, math.nan, inner.product(x, v)),
        inner.start,
    )
    scaled = {"scaling": np.array([1.0, 2.0, 0.5, 1.0, 3.0, 1.0])}
    for own in ({}, scaled, {"precondition": lambda vector: blurred @ vector}):
        if start is LBFGSB and "precondition" in own:
            continue
        minimizer = minimized(start(gtol=1e-5, ftol=0), problem, Limits(fixed=fixed, **own))
        assert minimizer.stop_reason == "gradient"
        np.testing.assert_array_equal(minimizer.point[fixed], inner.start[fixed])
        assert np.max(np.abs(inner.gradient(minimizer.point)[1][~fixed])) <= 1e-5


@pytest.mark.parametrize("method", [LBFGSB(), TruncatedNewton()], ids=repr)
def test_a_start_outside_of_its_bounds_is_projected_but_for_fixed_elements(method: Any) -> None:
    fixed, goal = np.array([True, False, True, False, False]), np.array([9, 3, 9, 0.25, -2])
    problem = Problem(
        lambda x: (float(((x - goal) ** 2).sum()), 2 * (x - goal)),
        lambda x, v: 2 * v,
        np.array([5.0, 5.0, -5.0, -5.0, 0.5]),
    )
    minimizer = started(method, problem.start, Limits(np.zeros(5), np.ones(5), fixed=fixed))
    assert minimizer.begin() == 2
    for point in (minimizer.point, minimizer.best):
        np.testing.assert_array_equal(point, [5, 1, -5, 0, 0.5])
    finished(minimizer, problem)
    np.testing.assert_allclose(minimizer.point, [5, 1, -5, 0.25, 0], atol=1e-5)
    assert minimizer.progress.projected_norm <= 1e-5 < minimizer.progress.gradient_norm


UNITS = 2.0 ** np.linspace(-43, 23, 8).round()  # from 1e-13 to 1e7, without rounding


def in_units(problem: Problem, units: Any) -> Problem:
    """The same function of unknowns that are measured in other units."""

    def gradient(x: Any) -> tuple[float, Any]:
        value, g = problem.gradient(x / units)
        return value, g / units

    return Problem(gradient, lambda x, v: problem.product(x / units, v / units) / units, problem.start * units)


@pytest.mark.parametrize("method", [LBFGS, LBFGSB, TruncatedNewton])
def test_values_do_not_depend_on_units(method: type[Method]) -> None:
    """Every method takes the steps that it takes in units that fit."""
    values: list[list[float]] = []
    for units, called in ((np.ones(UNITS.size), False), (UNITS, False), (UNITS, method is not LBFGSB)):
        moved = in_units(rosenbrock(UNITS.size), units)
        limits = Limits(scaling=units**2)
        if called:
            limits = Limits(precondition=lambda vector, units=units: units**2 * vector)
        elif method is LBFGSB:
            limits = Limits(-1.5 * units, np.linspace(0.5, 1.5, units.size) * units, scaling=units**2)
        values.append([])

        def told(x: Any, moved: Problem = moved, seen: list[float] = values[-1]) -> tuple[float, Any]:
            seen.append(moved.gradient(x)[0])
            return moved.gradient(x)

        minimizer = minimized(method(gtol=0, maxiter=8), moved._replace(gradient=told), limits)
        assert minimizer.stop_reason == "iterations"
    # All powers of two are exact; but sums have other quanta.
    np.testing.assert_allclose(values[1:], [values[0]] * 2, rtol=1e-9)


def test_conjugate_gradients_begin_with_another_step_but_get_there() -> None:
    problem, method = in_units(rosenbrock(UNITS.size), UNITS), NonlinearCG(gtol=0, ftol=1e-14, maxiter=500)
    scaled = minimized(method, problem, Limits(scaling=UNITS**2))
    called = minimized(method, problem, Limits(precondition=lambda vector: UNITS**2 * vector))
    np.testing.assert_allclose(scaled.point / UNITS, 1, rtol=1e-5)
    np.testing.assert_array_equal(called.point, scaled.point)


def test_pairs_whose_largest_elements_do_not_meet() -> None:
    """Their products are right over any free elements, and the same after a restart."""
    random, size, m = np.random.default_rng(1), 60, 2
    units = np.geomspace(1e-12, 1e12, size)
    rows = np.zeros((2 * m, size))
    history = ReducedHistory(LocalSpace(size, units), rows)
    g = random.standard_normal(size) / units

    def found(history: ReducedHistory, free: np.ndarray) -> tuple[object, ...]:
        """Of the path on which the free elements move without end, and the others do not."""
        ends, top = Breakpoints(np.where(free, np.inf, 0.0), 0.0, lambda index: 0.0 * index), float(abs(g).max())
        point = history.cauchy_point(g * free, ends, top, 1.0)
        return point.length, history.subspace_step(free, g * free, point, 1.0)

    for turn in range(4):
        s, y = history.open()
        s[:] = random.standard_normal(size) * units
        y[:] = s / units**2 * random.uniform(1, 2, size)
        history.set_tops(abs(s).max(), abs(y).max())
        free = random.random(size) < 0.7
        of_first = found(history, free)
        again = ReducedHistory(LocalSpace(size, units), rows)
        again.restore(json.loads(json.dumps(history.to_metadata())))
        assert found(again, free) == of_first and len(history) == min(turn + 1, m)
        order = history.order
        products = rows[order][:, None] * rows[[m + pair for pair in order]]
        np.testing.assert_allclose(history._free_gram.sy, np.triu((products * free).sum(axis=-1)), rtol=1e-9)
        np.testing.assert_allclose(history._held_gram.sy, np.triu((products * ~free).sum(axis=-1).T), rtol=1e-9)
        sy, ss = (np.array(of)[np.ix_(order, order)] for of in (history.sy, history.ss))
        np.testing.assert_allclose(np.tril(sy), np.tril(products.sum(axis=-1)), rtol=1e-9)
        np.testing.assert_allclose(ss, (rows[order][:, None] * rows[order]).sum(axis=-1), rtol=1e-9)


# What a user says about elements: numbers, arrays, and mappings by tensor name, and what is wrong with them.

SPECS = (ParameterSpec("a", (2, 3)), ParameterSpec("b", (4,)))
REAL = np.dtype(np.float64)
INF = np.inf


def test_bounds_and_masks_of_tensors() -> None:
    for given, lower, upper in (
        ((0, None), [0] * 10, None),
        ((np.arange(10.0), np.arange(10.0) + 1), range(10), range(1, 11)),
        ({"b": (0, [1, 2, 3, 4])}, [-INF] * 6 + [0] * 4, [INF] * 6 + [1, 2, 3, 4]),  # none for those without a name
    ):
        found = whole_bounds(given, SPECS, REAL)
        assert found[0].tolist() == list(lower) and (found[1] is upper or found[1].tolist() == list(upper))
    mask = {"a": np.array([[True, False, False], [False, False, True]])}
    assert np.flatnonzero(whole_elements("fixed", mask, SPECS, np.dtype(bool), missing=False)).tolist() == [0, 5]
    assert [element_name(5, SPECS), element_name(6, SPECS)] == ["element (1, 2) of 'a'", "element (0) of 'b'"]


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ((1.0, {"b": 0.5}), r"4 elements cross: element \(0\)"),
        ((INF, INF), "10 elements cross: .*lower bound inf"),
        (({"b": INF}, None), r"4 elements cross: element \(0\) of 'b'"),
        ((None, -INF), "10 elements cross"),
        ((np.full(10, np.nan), None), "contain NaN"),
        ((1.0,), "must be a pair"),
        ({"a": 1.0}, "bounds of 'a' .*pair"),
        ((np.zeros(9), None), r"have the shape \(9,\)"),
        ({"a": (np.zeros((3, 2)), 1)}, r"have the shape \(3, 2\)"),
        ({"c": (0, 1)}, "no tensor 'c'"),
        (("low", None), "lower bounds .*numbers"),
    ],
)
def test_bounds_that_do_not_fit_are_named(bounds: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        whole_bounds(bounds, SPECS, REAL)


# L-BFGS with and without bounds beside SciPy's.

OPTIONS: dict[str, Any] = {"gtol": 1e-9, "ftol": 0.0, "maxiter": 3000, "maxfun": 3000}


@pytest.mark.parametrize(("problems", "method"), [(PROBLEMS, LBFGS), (BOUNDED, LBFGSB)], ids=["free", "bounded"])
@pytest.mark.full
def test_as_good_as_scipy_in_as_many_evaluations(problems: Sequence[ProblemOfSet], method: type[LBFGS]) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra: test)")
    worse, ours, theirs = [], 0, 0
    scipys = {"jac": True, "method": "L-BFGS-B", "options": {**OPTIONS, "maxcor": 10}}
    for problem in problems:
        with np.errstate(all="ignore"):
            expected = optimize.minimize(problem.function, problem.start, bounds=problem.bounds, **scipys)
            inner = of_the_set(problem)[0]
            minimizer = minimized(method(**OPTIONS), inner, Limits(lower=problem.lower, upper=problem.upper))
        value = minimizer.progress.value
        ours, theirs = ours + minimizer.progress.evaluations, theirs + expected.nfev
        if value > expected.fun + 1e-8 * max(abs(expected.fun), 1e-8) or excess(problem, value) > 1e-8:
            worse.append(f"{problem.name}: {value:.9g} after SciPy's {expected.fun:.9g}")
    assert not worse
    assert ours <= 1.25 * theirs


# The same bits from metadata at every call, on any ranks, and in device memory.

SEARCHES = ["more-thuente", "hager-zhang", HagerZhang(sigma=0.1)]
WEIGHTS = np.linspace(0.5, 2, 10)
RESTARTED = {
    "lbfgs": (LBFGS(maxiter=30), lambda dtype: ANY),
    "lbfgs scaled": (LBFGS(maxiter=30, history=2), lambda dtype: Limits(scaling=WEIGHTS.astype(dtype))),
    "lbfgs preconditioned": (
        LBFGS(maxiter=30, damping="powell"),
        lambda dtype: Limits(precondition=lambda vector: WEIGHTS.astype(dtype) * vector),
    ),
    "lbfgs fixed": (LBFGS(maxiter=30, initial_scaling=1e-3), lambda dtype: everywhere(10, dtype)),
    "newton": (TruncatedNewton(gtol=1e-3, maxiter=9), lambda dtype: ANY),
    "newton fixed": (TruncatedNewton(gtol=1e-3, maxiter=12), lambda dtype: everywhere(10, dtype)),
    "newton bounded": (TruncatedNewton(gtol=1e-3, maxiter=12), lambda dtype: everywhere(10, dtype, bounded=True)),
    **{
        f"cg {search}": (NonlinearCG(gtol=1e-3, restart=7, line_search=search), lambda dtype: everywhere(10, dtype))
        for search in SEARCHES
    },
}


@pytest.mark.pairs(8)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("case", RESTARTED)
def test_it_goes_on_from_its_metadata_at_every_call(case: str, dtype: Any) -> None:
    method, limits = RESTARTED[case]
    assert check_restarts(method, rosenbrock(10, dtype), limits(dtype)).progress.iterations > 5


BOX = Limits(np.full(17, -1.5), np.linspace(0.5, 1.5, 17), scaling=np.linspace(0.5, 2, 17))
ON_RANKS = {
    **{
        f"{kind.__name__} {search}": (
            kind(history=4, maxiter=25, line_search=search),
            BOX if kind is LBFGSB else everywhere(17),
        )
        for kind in (LBFGS, LBFGSB)
        for search in ("more-thuente", "hager-zhang")
    },
    "newton": (TruncatedNewton(forcing=0.1, gtol=1e-3), everywhere(17)),
    "newton bounded": (TruncatedNewton(forcing=0.1, gtol=1e-3), everywhere(17, bounded=True)),
    "cg": (NonlinearCG(gtol=1e-4), everywhere(17)),
}


@pytest.mark.pairs(4)
@pytest.mark.parametrize("cuts", [[0, 9, 17], [0, 0, 1, 2, 7, 17, 17]], ids=len)
@pytest.mark.parametrize("case", ON_RANKS)
def test_same_bits_on_any_ranks(cuts: list[int], case: str) -> None:
    method, limits = ON_RANKS[case]
    bounded = limits.lower is not None
    minimizer, all_reduces = check_ranks(method, rosenbrock(17), limits, cuts)
    done = minimizer.progress
    if "newton" in case:
        # Two for a product, three for an evaluation, and a few for bounds and for sums that have lost digits.
        most = 2.1 * done.products + (3 + bounded) * done.evaluations + bounded
    else:
        # Two an evaluation, four an iteration and those of the start (conjugate gradients with weights five); for the
        # generalised Cauchy point one, and two for each division of breakpoints into bins, of which there are few.
        most = 2 * done.evaluations + (9 if bounded else 5 if case == "cg" else 4) * (done.iterations + 1)
    assert all_reduces <= most


@pytest.mark.parametrize("cuts", [[0, 7, 600], [0, 100, 251, 400, 400, 600]], ids=len)
def test_same_bits_where_many_elements_meet_their_bounds(cuts: list[int]) -> None:
    """Breakpoints by hundreds, of which many coincide, on parts of different sizes, one of them empty."""
    size = 600
    form, goal = np.geomspace(1, 1e3, size), np.resize([3.0, -2.5, 0.5, 4.0, 0.0], size)

    def gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        rest, shared = x - goal, float(np.sum(x[::3]))
        g = form * rest
        g[::3] += 0.1 * shared
        return float(0.5 * np.sum(form * rest * rest) + 0.05 * shared**2), g

    limits = Limits(lower=np.resize([-1.0, -np.inf, 0.0], size), upper=np.resize([1.0, 2.0], size))
    method = LBFGSB(history=5, maxiter=30, ftol=0, gtol=0)
    point = check_ranks(method, Problem(gradient, None, np.zeros(size)), limits, cuts)[0].point
    assert ((point == limits.lower) | (point == limits.upper)).sum() > size // 3


ON_DEVICE = {
    "lbfgs": (LBFGS(history=4, maxiter=12, damping="powell", xtol=1e-30), False),
    "lbfgsb": (LBFGSB(history=4, maxiter=12), True),
    "newton": (TruncatedNewton(maxiter=12), True),
    "cg": (NonlinearCG(maxiter=12), False),
}


@pytest.mark.pairs(4)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("case", ON_DEVICE)
def test_same_bits_on_a_device(device: Device, dtype: Any, case: str, limited: bool) -> None:
    method, bounded = ON_DEVICE[case]
    check_device(device, method, rosenbrock(17, dtype), everywhere(17, dtype, bounded) if limited else ANY)


# What they refuse.


@every
def test_a_state_of_something_else_is_refused(start: Start) -> None:
    minimizer = started(start(), np.ones(3), ANY)
    with pytest.raises(ValueError, match="cannot be restored: KeyError"):
        minimizer.restore({"wanted": "gradient"})


@pytest.mark.parametrize(
    ("method", "limits", "words"),
    [
        (LBFGS, {"lower": np.zeros(3)}, "LBFGS takes no bounds; use LBFGSB"),
        (NonlinearCG, {"upper": np.zeros(3)}, "takes no bounds; use LBFGSB"),
        (LBFGS, {"precondition": lambda vector: -vector}, "preconditioner .*positive definite"),
        (NonlinearCG, {"precondition": lambda vector: -vector}, "preconditioner .*positive definite"),
        (LBFGSB, {"lower": np.zeros(3), "precondition": np.copy}, "takes no function as preconditioner"),
        (TruncatedNewton, {"scaling": np.ones(3), "precondition": np.copy}, "leave one of them out"),
    ],
)
def test_limits_that_do_not_fit_are_refused(method: Start, limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        minimized(method(), rosenbrock(3), Limits(**limits))


@pytest.mark.parametrize(
    ("method", "option", "value", "words"),
    [
        (LBFGS, "history", 0, "LBFGS: history=0"),
        (LBFGS, "maxls", 0, "maxls=0"),
        (LBFGS, "line_search", "wolfe", "line_search='wolfe'"),
        (LBFGS, "damping", "none", "damping='none'"),
        (LBFGS, "initial_scaling", 0.0, "initial_scaling=0.0"),
        (TruncatedNewton, "forcing", 1.0, "forcing"),
        (TruncatedNewton, "forcing", 0, "forcing"),
        (TruncatedNewton, "forcing_power", -1, "forcing_power"),
        (TruncatedNewton, "maxcg", 0, "maxcg"),
        (TruncatedNewton, "initial_radius", 0, "initial_radius"),
        (NonlinearCG, "eta", 0.0, "eta"),
        (NonlinearCG, "restart", 0, "restart"),
        (NonlinearCG, "maxls", 0, "maxls"),
        (NonlinearCG, "line_search", "golden", "line_search"),
    ],
)
def test_options_that_make_no_sense_are_refused(method: Start, option: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        method(**{option: value})
