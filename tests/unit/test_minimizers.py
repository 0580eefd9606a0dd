"""What methods of minimisation share: ends, units, elements, and L-BFGS beside SciPy's on all problems."""

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
from minimizer_runs import ANY, Problem, Vector, check_ranks, excess, exponentials, minimized, of_the_set, rosenbrock
from problems import Problem as ProblemOfSet

from mpishard.backend import array as arrays
from mpishard.inverse.result import OptimizeResult, result_of
from mpishard.layout.tensors import ParameterSpec
from mpishard.minimizers import LBFGS, LBFGSB, NonlinearCG, TruncatedNewton
from mpishard.minimizers.elements import element_name, whole_bounds, whole_elements
from mpishard.minimizers.history import ReducedHistory
from mpishard.minimizers.line_search import Armijo, MoreThuente
from mpishard.minimizers.method import Limits, Method, Minimizer, Wanted
from mpishard.minimizers.space import LocalSpace

# How minimisations end, by every method: at the best point that was seen, and for a reason that says what is wrong.

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


# Unknowns of very different units: every method takes the steps that it takes in units that fit.

UNITS = 2.0 ** np.linspace(-43, 23, 8).round()  # from 1e-13 to 1e7, without rounding


def in_units(problem: Problem, units: Any) -> Problem:
    """The same function of unknowns that are measured in other units."""

    def gradient(x: Any) -> tuple[float, Any]:
        value, g = problem.gradient(x / units)
        return value, g / units

    return Problem(gradient, lambda x, v: problem.product(x / units, v / units) / units, problem.start * units)


@pytest.mark.parametrize("method", [LBFGS, LBFGSB, TruncatedNewton])
def test_values_do_not_depend_on_units(method: type[Method]) -> None:
    problem, bounded = rosenbrock(UNITS.size), method is LBFGSB
    values: list[list[float]] = []
    for units in (np.ones(UNITS.size), UNITS):
        moved = in_units(problem, units)
        limits = Limits(scaling=units**2)
        if bounded:
            limits = Limits(-1.5 * units, np.linspace(0.5, 1.5, units.size) * units, scaling=units**2)
        values.append([])

        def told(x: Any, moved: Problem = moved, seen: list[float] = values[-1]) -> tuple[float, Any]:
            seen.append(moved.gradient(x)[0])
            return moved.gradient(x)

        minimizer = minimized(method(gtol=0, maxiter=8), moved._replace(gradient=told), limits)
        assert minimizer.stop_reason == "iterations"
    # All powers of two are exact; but sums have other quanta.
    np.testing.assert_allclose(values[0], values[1], rtol=1e-9)


def test_conjugate_gradients_begin_with_another_step_but_get_there() -> None:
    problem = in_units(rosenbrock(UNITS.size), UNITS)
    minimizer = minimized(NonlinearCG(gtol=0, ftol=1e-14, maxiter=500), problem, Limits(scaling=UNITS**2))
    np.testing.assert_allclose(minimizer.point / UNITS, 1, rtol=1e-5)


def test_pairs_whose_largest_elements_do_not_meet() -> None:
    """Their products are right over any free elements, and the same after a restart."""
    random, size, m = np.random.default_rng(1), 60, 2
    units = np.geomspace(1e-12, 1e12, size)
    rows = np.zeros((2 * m, size))
    history = ReducedHistory(LocalSpace(size, units), rows)
    g = random.standard_normal(size) / units

    def found(history: ReducedHistory, free: np.ndarray) -> tuple[object, ...]:
        """Of the path on which the free elements move without end, and the others do not."""
        ends, top = np.where(free, np.inf, 0.0), float(abs(g).max())
        point = history.cauchy_point(g * free, ends, lambda index: 0.0 * index, top, 1.0)
        return point.length, history.reduced_times(free, g * free, point, 1.0)

    for turn in range(4):
        s, y = history.open()
        s[:] = random.standard_normal(size) * units
        y[:] = s / units**2 * random.uniform(1, 2, size)
        history.measure(abs(s).max(), abs(y).max())
        free = random.random(size) < 0.7
        of_first = found(history, free)
        again = ReducedHistory(LocalSpace(size, units), rows)
        again.restore(json.loads(json.dumps(history.to_metadata())))
        assert found(again, free) == of_first and len(history) == min(turn + 1, m)
        order = history.order
        products = rows[order][:, None] * rows[[m + pair for pair in order]]
        np.testing.assert_allclose(history._free.sy, np.triu((products * free).sum(axis=-1)), rtol=1e-9)
        np.testing.assert_allclose(history._held.sy, np.triu((products * ~free).sum(axis=-1).T), rtol=1e-9)
        sy, ss = (np.array(of)[np.ix_(order, order)] for of in (history.sy, history.ss))
        np.testing.assert_allclose(np.tril(sy), np.tril(products.sum(axis=-1)), rtol=1e-9)
        np.testing.assert_allclose(ss, (rows[order][:, None] * rows[order]).sum(axis=-1), rtol=1e-9)


# What a user says about elements: numbers, arrays, and mappings by tensor name, and what is wrong with them.

SPECS = (ParameterSpec("a", (2, 3)), ParameterSpec("b", (4,)))
REAL = np.dtype(np.float64)
INF = np.inf


def test_one_number_is_for_all_elements():
    lower, upper = whole_bounds((0, None), SPECS, REAL)
    np.testing.assert_array_equal(lower, np.zeros(10))
    assert upper is None


def test_a_flat_array_is_in_the_order_of_the_tensors():
    given = np.arange(10.0)
    lower, upper = whole_bounds((given, given + 1), SPECS, REAL)
    np.testing.assert_array_equal(lower, given)
    np.testing.assert_array_equal(upper, given + 1)


def test_tensors_that_are_not_named_have_no_bounds():
    lower, upper = whole_bounds({"b": (0, [1, 2, 3, 4])}, SPECS, REAL)
    np.testing.assert_array_equal(lower, [-INF] * 6 + [0] * 4)
    np.testing.assert_array_equal(upper, [INF] * 6 + [1, 2, 3, 4])


def test_an_array_of_a_tensors_shape():
    mask = np.array([[True, False, False], [False, False, True]])
    fixed = whole_elements("fixed", {"a": mask}, SPECS, np.dtype(bool), missing=False)
    np.testing.assert_array_equal(np.flatnonzero(fixed), [0, 5])


def test_an_element_is_named_by_its_tensor():
    assert element_name(5, SPECS) == "element (1, 2) of 'a'"
    assert element_name(6, SPECS) == "element (0) of 'b'"


WRONG = {
    "crossed": (lambda: whole_bounds((1.0, {"b": 0.5}), SPECS, REAL), r"the bounds of 4 elements cross: element \(0\)"),
    "infinite": (lambda: whole_bounds((INF, INF), SPECS, REAL), "10 elements cross: .* lower bound inf and the upper"),
    "no lower": (lambda: whole_bounds(({"b": INF}, None), SPECS, REAL), r"4 elements cross: element \(0\) of 'b'"),
    "below": (lambda: whole_bounds((None, -INF), SPECS, REAL), "10 elements cross"),
    "nan": (lambda: whole_bounds((np.full(10, np.nan), None), SPECS, REAL), "contain NaN"),
    "no pair": (lambda: whole_bounds((1.0,), SPECS, REAL), "must be a pair"),
    "no pair by name": (lambda: whole_bounds({"a": 1.0}, SPECS, REAL), "bounds of 'a' must be a pair"),
    "size": (lambda: whole_bounds((np.zeros(9), None), SPECS, REAL), r"have the shape \(9,\)"),
    "shape": (lambda: whole_bounds({"a": (np.zeros((3, 2)), 1)}, SPECS, REAL), r"have the shape \(3, 2\)"),
    "tensor": (lambda: whole_bounds({"c": (0, 1)}, SPECS, REAL), "there is no tensor 'c'; there are a, b"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named(case):
    attempt, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        attempt()


def test_what_is_no_number_is_refused():
    with pytest.raises(TypeError, match="lower bounds must be numbers"):
        whole_bounds(("low", None), SPECS, REAL)


# L-BFGS with and without bounds: as good as SciPy's L-BFGS-B on all test problems, and the same bits on any ranks.

OPTIONS: dict[str, Any] = {"gtol": 1e-9, "ftol": 0.0, "maxiter": 3000, "maxfun": 3000}


@pytest.mark.parametrize(("problems", "method"), [(PROBLEMS, LBFGS), (BOUNDED, LBFGSB)], ids=["free", "bounded"])
def test_as_good_as_scipy_in_as_many_evaluations(problems: Sequence[ProblemOfSet], method: type[LBFGS]) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra: test)")
    worse, ours, theirs = [], 0, 0
    for problem in problems:
        limits = Limits(lower=problem.lower, upper=problem.upper)
        with np.errstate(all="ignore"):
            expected = optimize.minimize(
                problem.function,
                problem.start,
                jac=True,
                bounds=problem.bounds,
                method="L-BFGS-B",
                options={**OPTIONS, "maxcor": 10},
            )
            minimizer = minimized(method(**OPTIONS), of_the_set(problem)[0], limits)
        value = minimizer.progress.value
        ours, theirs = ours + minimizer.progress.evaluations, theirs + expected.nfev
        if value > expected.fun + 1e-8 * max(abs(expected.fun), 1e-8) or excess(problem, value) > 1e-8:
            worse.append(f"{problem.name}: {value:.9g} after SciPy's {expected.fun:.9g}")
        if problem.lower is not None:
            assert ((minimizer.point >= problem.lower) & (minimizer.point <= problem.upper)).all()
    assert not worse
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize("cuts", [[0, 9, 17], [0, 1, 1, 5, 17]])
@pytest.mark.parametrize("search", ["more-thuente", "hager-zhang", "armijo"])
@pytest.mark.parametrize("bounded", [False, True])
def test_same_bits_on_any_ranks(cuts: list[int], search: str, bounded: bool) -> None:
    size = cuts[-1]
    limits = Limits(fixed=np.arange(size) == 3, scaling=np.linspace(0.5, 2, size), weights=np.linspace(1, 2, size))
    method = LBFGS(history=4, maxiter=25, line_search=search)
    if bounded:
        limits = Limits(lower=np.full(size, -1.5), upper=np.linspace(0.5, 1.5, size), scaling=limits.scaling)
        method = LBFGSB(history=4, maxiter=25, line_search=search)
    spaces = check_ranks(method, rosenbrock(size), limits, cuts)
    assert len({space.all_reduces for space in spaces}) == 1
    steps = minimized(method, rosenbrock(size), limits).progress
    # Two an evaluation, four an iteration and those of the start; for the generalised Cauchy point one, and two for
    # each division of breakpoints into bins, of which there are few.
    for_path = 5 * (steps.iterations + 1) if bounded else 0
    assert spaces[0].all_reduces <= 2 * steps.evaluations + 4 * (steps.iterations + 1) + for_path


@pytest.mark.parametrize("cuts", [[0, 7, 600], [0, 400, 400, 600], [0, 100, 251, 400, 400, 600]])
def test_same_bits_where_many_elements_meet_their_bounds(cuts: list[int]) -> None:
    """Breakpoints by hundreds, of which many coincide, on parts of different sizes, one of them empty."""
    size = 600
    form, goal = np.geomspace(1, 1e3, size), np.resize([3.0, -2.5, 0.5, 4.0, 0.0], size)

    def gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        rest, shared = x - goal, float(np.sum(x[::3]))
        g = form * rest
        g[::3] += 0.1 * shared
        return float(0.5 * np.sum(form * rest * rest) + 0.05 * shared**2), g

    problem = Problem(gradient, lambda x, v: form * v, np.zeros(size))
    limits = Limits(lower=np.resize([-1.0, -np.inf, 0.0], size), upper=np.resize([1.0, 2.0], size))
    method = LBFGSB(history=5, maxiter=30, ftol=0, gtol=0)
    check_ranks(method, problem, limits, cuts)
    point = minimized(method, problem, limits).point
    assert ((point == limits.lower) | (point == limits.upper)).sum() > size // 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bounded", [False, True])
def test_same_bits_on_a_device(device: Device, dtype: Any, bounded: bool) -> None:
    problem, size = rosenbrock(17), 17
    method: LBFGS = LBFGS(history=4, maxiter=12, damping="powell", xtol=1e-30)
    limits: dict[str, Any] = {"weights": np.linspace(1, 2, size), "scaling": np.linspace(0.5, 2, size)}
    if bounded:
        method = LBFGSB(history=4, maxiter=12)
        limits.update(lower=np.full(size, -1.5), upper=np.linspace(0.5, 1.5, size))
    limits = {name: value.astype(dtype) for name, value in limits.items()}
    limits["fixed"] = np.arange(size) == 3
    points: list[list[bytes]] = []
    for move in (np.array, device.put):
        point, vectors = move(problem.start.astype(dtype)), move(np.zeros((len(method.slots), size), dtype))
        parts: dict[str, Any] = {name: move(value) for name, value in limits.items()}
        minimizer = method.make(LocalSpace(size, point), vectors, point, Limits(**parts))
        minimizer.begin()
        points.append([])
        while minimizer.wanted is not Wanted.NOTHING:
            host = np.array(arrays.to_host(point))
            points[-1].append(host.tobytes())
            value, gradient = problem.gradient(host.astype(np.float64))
            minimizer.tell(value, move(gradient.astype(dtype)))
    assert points[0] == points[1]
    assert len(points[0]) > 10
