"""L-BFGS with bounds: against SciPy's L-BFGS-B, in parts, from metadata at every evaluation, and at awkward bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpishard.inverse.minimization import minimize
from mpishard.minimizers import small
from mpishard.minimizers.lbfgs import LBFGS
from mpishard.minimizers.lbfgsb import LBFGSB
from mpishard.minimizers.method import Limits, Method, Minimizer, Wanted
from mpishard.minimizers.newton import TruncatedNewton
from mpishard.minimizers.space import LocalSpace

Function = Callable[[np.ndarray], tuple[float, np.ndarray]]


def rosenbrock(x: np.ndarray) -> tuple[float, np.ndarray]:
    inner = x[1:] - x[:-1] ** 2
    gradient = np.zeros_like(x)
    gradient[1:] += 200 * inner
    gradient[:-1] += -400 * x[:-1] * inner - 2 * (1 - x[:-1])
    return float((100 * inner**2 + (1 - x[:-1]) ** 2).sum()), gradient


def obstacle(side: int = 12) -> tuple[Function, np.ndarray]:
    """A membrane over an obstacle: a quadratic function of a grid, and its lower bounds."""
    x = np.arange(1, side + 1) / (side + 1)
    lower = np.multiply.outer(np.sin(9.2 * x), np.sin(9.3 * x)).ravel() ** 3

    def function(flat: np.ndarray) -> tuple[float, np.ndarray]:
        v = np.pad(flat.reshape(side, side), 1)
        gradient = 4 * v[1:-1, 1:-1] - v[:-2, 1:-1] - v[2:, 1:-1] - v[1:-1, :-2] - v[1:-1, 2:]
        value = 0.5 * ((np.diff(v, axis=0) ** 2).sum() + (np.diff(v, axis=1) ** 2).sum())
        return float(value), gradient.ravel()

    return function, lower


def case(name: str) -> tuple[Function, np.ndarray, Limits]:
    """A function, a start and bounds."""
    if name == "obstacle":
        function, lower = obstacle()
        return function, np.maximum(lower, 0) + 0.5, Limits(lower=lower, upper=np.full(lower.size, 2000.0))
    if name == "coupled":
        rng = np.random.default_rng(0)
        turned, middle = np.linalg.qr(rng.normal(size=(40, 40)))[0], 3 * rng.normal(size=40)
        form = turned @ np.diag(np.geomspace(1, 1e4, 40)) @ turned.T

        def quadratic(x: np.ndarray) -> tuple[float, np.ndarray]:
            slope = form @ (x - middle)
            return float(0.5 * (x - middle) @ slope), slope

        return quadratic, np.zeros(40), Limits(lower=np.full(40, -1.0), upper=np.ones(40))
    x0 = np.resize([-1.2, 1.0], 20)
    if name == "box":
        return rosenbrock, x0, Limits(lower=np.full(20, -1.5), upper=np.full(20, 0.8))
    if name == "scaled":
        some = Limits(lower=np.full(20, -1.5), upper=np.full(20, 0.8), scaling=np.linspace(0.5, 2, 20))
        return rosenbrock, x0, some
    if name == "fixed":
        some = Limits(upper=np.full(20, 0.8), fixed=np.arange(20) % 5 == 2, weights=np.linspace(1, 2, 20))
        return rosenbrock, x0, some
    assert name == "alternate"
    return rosenbrock, x0, Limits(lower=np.resize([-np.inf, 0.5], 20), upper=np.resize([0.9, np.inf], 20))


CASES = ["obstacle", "coupled", "box", "scaled", "fixed", "alternate"]


def begun(method: Method, x0: Any, limits: Limits) -> Minimizer:
    point = np.array(x0, np.float64)
    vectors = np.zeros((len(method.slots), point.size))
    minimizer = method.make(LocalSpace(point.size, point), vectors, point, limits)
    minimizer.begin()
    return minimizer


def finish(minimizer: Minimizer, function: Function, *, kill: bool = False) -> tuple[Minimizer, list[bytes]]:
    """Minimise; `kill` makes it anew after each evaluation, from copies and from the metadata as text."""
    trace, limits = [], minimizer.limits
    moves = slice(None) if limits.fixed is None else ~limits.fixed
    while minimizer.wanted is not Wanted.NOTHING:
        value, gradient = function(minimizer.point)
        trace.append(minimizer.point.tobytes())
        assert limits.lower is None or (minimizer.point >= limits.lower)[moves].all()
        assert limits.upper is None or (minimizer.point <= limits.upper)[moves].all()
        minimizer.tell(value, gradient)
        if kill:
            vectors, point, metadata = minimizer.vectors.copy(), minimizer.point.copy(), minimizer.to_metadata()
            minimizer = minimizer.method.make(minimizer.space, vectors, point, limits)  # type: ignore[attr-defined]
            minimizer.restore(json.loads(json.dumps(metadata)))
    return minimizer, trace


@pytest.mark.parametrize("name", CASES)
def test_goes_on_from_metadata_at_every_evaluation(name: str) -> None:
    function, x0, limits = case(name)
    method = LBFGSB(history=5, maxiter=25)
    undisturbed, trace = finish(begun(method, x0, limits), function)
    killed, other = finish(begun(method, x0, limits), function, kill=True)
    assert trace == other
    assert killed.progress == undisturbed.progress
    assert undisturbed.progress.iterations > 10


@pytest.mark.parametrize("name", ["obstacle", "coupled", "box", "alternate"])
def test_as_good_as_scipy(name: str) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra: test)")
    function, x0, limits = case(name)
    bounds = optimize.Bounds(limits.lower, limits.upper)
    options = {"maxcor": 10, "gtol": 1e-8, "ftol": 1e-14}
    expected = optimize.minimize(function, x0, jac=True, bounds=bounds, method="L-BFGS-B", options=options)
    minimizer, _ = finish(begun(LBFGSB(gtol=1e-8, ftol=1e-14), x0, limits), function)
    assert minimizer.progress.value <= expected.fun + 1e-8 * max(abs(expected.fun), 1e-8)
    best = minimizer.point
    projected = best - np.clip(best - function(best)[1], limits.lower, limits.upper)
    assert abs(projected).max() == pytest.approx(minimizer.progress.projected_norm, abs=1e-12)


def cauchy_point(x: np.ndarray, g: np.ndarray, limits: Limits, hessian: np.ndarray) -> tuple[float, np.ndarray]:
    """Algorithm CP of Byrd, Lu, Nocedal and Zhu, with a sorted list of all breakpoints: length and step."""
    bound = np.where(g > 0, limits.lower, limits.upper)
    with np.errstate(divide="ignore", invalid="ignore"):
        breakpoints = np.where(g != 0, (x - bound) / g, np.inf)
    step, d, length = np.zeros_like(x), np.where(breakpoints > 0, -g, 0), 0.0
    for end in [*sorted(set(breakpoints[(breakpoints > 0) & (breakpoints < np.inf)])), np.inf]:
        slope, bend = g @ d + d @ hessian @ step, d @ hessian @ d
        if slope >= 0:
            break
        if length - slope / bend < end:
            return length - slope / bend, step - slope / bend * d
        step = step + (end - length) * d
        met = breakpoints == end
        step[met], d[met], length = (bound - x)[met], 0, end
    return length, step


@pytest.mark.parametrize("name", ["obstacle", "coupled", "box", "alternate"])
def test_direction_is_that_of_the_paper(name: str) -> None:
    """The generalised Cauchy point, the subspace minimum and its projection, with a dense Hessian."""
    function, x0, limits = case(name)
    limits = Limits(*(np.broadcast_to(side, x0.shape).copy() for side in (limits.lower, limits.upper)))
    minimizer = begun(LBFGSB(history=4), x0, limits)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    base = before = None
    met = 0
    while minimizer.wanted is not Wanted.NOTHING and minimizer.progress.iterations < 15:
        x = minimizer.point.copy()
        value, gradient = function(x)
        minimizer.tell(value, gradient)
        if base is not None and not minimizer.progress.accepted:
            continue
        if base is not None and minimizer.wanted is not Wanted.NOTHING:
            s, y = x - base, gradient - before
            pairs = [*pairs, (s, y)][-4:]
            hessian = y @ y / (s @ y) * np.eye(x.size)
            for step, change in pairs:
                moved = hessian @ step
                hessian += np.outer(change, change) / (step @ change) - np.outer(moved, moved) / (step @ moved)
            length, expected = cauchy_point(x, gradient, limits, hessian)
            free = ((x + expected > limits.lower) | (gradient <= 0)) & ((x + expected < limits.upper) | (gradient >= 0))
            met += int((expected[~free] != 0).sum())
            way = -np.linalg.solve(hessian[np.ix_(free, free)], (gradient + hessian @ expected)[free])
            projected = expected.copy()
            projected[free] = np.clip(x[free] + expected[free] + way, limits.lower[free], limits.upper[free]) - x[free]
            if projected @ gradient >= 0:
                with np.errstate(divide="ignore", invalid="ignore"):
                    room = np.where(way > 0, limits.upper[free], limits.lower[free]) - x[free] - expected[free]
                    part = np.where(way != 0, room / way, np.inf)
                projected = expected.copy()
                projected[free] += min(1.0, part.min()) * way
            direction = minimizer.row("direction")
            assert np.linalg.norm(direction - projected) <= 1e-7 * np.linalg.norm(projected)
        base, before = x, gradient
    assert met > 5 or name not in ("coupled", "alternate")


def test_breakpoints_that_coincide_and_elements_that_start_at_their_bounds() -> None:
    """All of many elements meet their bounds at once; a quadratic function of them ends at the bounds."""
    size = 60
    weights = np.geomspace(1, 10, size)

    def function(x: np.ndarray) -> tuple[float, np.ndarray]:
        shared = x.sum()
        return float(0.5 * weights @ (x - 2) ** 2 + 0.5 * shared**2), weights * (x - 2) + shared

    for start in (np.zeros(size), np.ones(size), np.where(np.arange(size) % 2, 0.0, 1.0), np.full(size, 0.5)):
        limits = Limits(lower=np.zeros(size), upper=np.ones(size))
        minimizer, _ = finish(begun(LBFGSB(ftol=0), start, limits), function)
        x = minimizer.point
        assert minimizer.stop_reason == "gradient"
        assert abs(x - np.clip(x - function(x)[1], 0, 1)).max() <= 1e-5
        assert ((x == 0) | (x == 1)).sum() > size // 2


@pytest.mark.parametrize("size", [600, 1200])
def test_a_short_step_far_from_the_minimum_is_no_convergence(size: int) -> None:
    """EXPLIN of CUTEst, where bounds cut the steps short: the steps are SciPy's, and more follow."""
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra: test)")
    few, weights = size // 12, 10.0 * np.arange(1, size + 1)

    def explin(x: np.ndarray) -> tuple[float, np.ndarray]:
        power = np.exp(0.1 * x[:few] * x[1 : few + 1])
        gradient = -weights
        gradient[:few] += 0.1 * power * x[1 : few + 1]
        gradient[1 : few + 1] += 0.1 * power * x[:few]
        values.append(float(power.sum() - weights @ x))
        return values[-1], gradient

    values: list[float] = []
    lower, upper = np.zeros(size), np.full(size, 10.0)
    options = {"maxcor": 10, "gtol": 1e-8, "ftol": 2.2e-9}
    bounds = optimize.Bounds(lower, upper)
    optimize.minimize(explin, lower, jac=True, bounds=bounds, method="L-BFGS-B", options=options)
    expected, values = values, []
    limits = Limits(lower, upper)
    minimizer, _ = finish(begun(LBFGSB(gtol=1e-8, ftol=2.2e-9), lower, limits), explin)
    np.testing.assert_allclose(values[: len(expected)], expected, rtol=1e-7)
    assert len(expected) < len(values) < 2 * len(expected) and values[-1] < expected[-1]
    values = []
    assert finish(begun(LBFGSB(gtol=1e-8, ftol=2.2e-9), lower, limits), explin, kill=True)[0].stop_reason == "decrease"
    assert values[-1] == minimizer.progress.value


def test_messages_give_the_projected_gradient_and_points_without_values() -> None:
    function, x0, limits = case("obstacle")
    found = minimize(function, x0, bounds=(limits.lower, limits.upper), options={"ftol": 1e-3, "gtol": 0.0})
    g = function(found.x)[1]
    top = abs(found.x - np.clip(found.x - g, limits.lower, limits.upper)).max()
    assert found.success and f"the projected gradient's largest element is {top:.3g}" in found.message

    def with_edge(x: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return float((x - np.log(x)).sum()), 1 - 1 / x

    found = minimize(with_edge, np.array([0.01, 30.0]), bounds=(-40.0, 50.0))
    assert found.success and "NaN or infinite at" in found.message
    assert "NaN" not in minimize(with_edge, np.array([0.5, 2.0]), bounds=(0.1, 3.0)).message


def test_a_state_without_products_of_steps_is_refused() -> None:
    function, x0, limits = case("box")
    minimizer = begun(LBFGSB(history=3), x0, limits)
    for _ in range(6):
        minimizer.tell(*function(minimizer.point))
    metadata = minimizer.to_metadata()
    del metadata["history"]["ss"]
    with pytest.raises(ValueError, match="of a release without the generalised Cauchy point"):
        begun(LBFGSB(history=3), x0, limits).restore(metadata)


def test_without_bounds_it_is_lbfgs() -> None:
    x0 = np.resize([-1.2, 1.0], 10)
    none, some = Limits(), Limits(lower=np.full(10, -1e6))
    plain, trace = finish(begun(LBFGS(), x0, none), rosenbrock)
    assert finish(begun(LBFGSB(), x0, none), rosenbrock)[1] == trace
    far, _ = finish(begun(LBFGSB(), x0, some), rosenbrock)
    np.testing.assert_allclose(far.point, plain.point, atol=1e-3)


def test_start_outside_of_the_bounds_is_projected_and_counted() -> None:
    point = np.array([5.0, 0.0, -3.0])
    method = LBFGSB()
    limits = Limits(lower=np.full(3, -1.0), upper=np.full(3, 1.0))
    minimizer = method.make(LocalSpace(3, point), np.zeros((len(method.slots), 3)), point, limits)
    assert minimizer.begin() == 2
    np.testing.assert_array_equal(point, [1, 0, -1])
    np.testing.assert_array_equal(minimizer.best, point)


@pytest.mark.parametrize("method", [LBFGSB(), TruncatedNewton()], ids=repr)
def test_fixed_elements_keep_their_value_out_of_bounds(method: Any) -> None:
    start, fixed = np.array([5.0, 5.0, -5.0, 0.5]), np.array([True, False, True, False])
    minimizer = begun(method, start, Limits(np.zeros(4), np.ones(4), fixed=fixed))
    np.testing.assert_array_equal(minimizer.point, [5, 1, -5, 0.5])
    while minimizer.wanted is not Wanted.NOTHING:
        if minimizer.wanted is Wanted.PRODUCT:
            minimizer.tell_product(2 * minimizer.direction)
        else:
            minimizer.tell(float(((minimizer.point - 0.25) ** 2).sum()), 2 * (minimizer.point - 0.25))
    np.testing.assert_allclose(minimizer.point, [5, 0.25, -5, 0.25], atol=1e-5)


def test_awkward_bounds() -> None:
    def function(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float(((x - 3) ** 2).sum()), 2 * (x - 3)

    equal = Limits(lower=np.array([1.0, 1.0]), upper=np.array([1.0, 2.0]))
    minimizer, _ = finish(begun(LBFGSB(), [1.0, 1.0], equal), function)
    np.testing.assert_array_equal(minimizer.point, [1, 2])
    everything = Limits(lower=np.zeros(2), upper=np.ones(2))
    at_bounds, trace = finish(begun(LBFGSB(), [1.0, 1.0], everything), function)
    assert (at_bounds.stop_reason, len(trace)) == ("gradient", 1)
    assert at_bounds.progress.projected_norm == 0 < at_bounds.progress.gradient_norm
    one = Limits(lower=np.array([3.5]))
    np.testing.assert_array_equal(finish(begun(LBFGSB(), [9.0], one), function)[0].point, [3.5])
    nothing = Limits(lower=np.zeros(0))
    assert finish(begun(LBFGSB(), [], nothing), function)[0].stop_reason == "gradient"


def test_nan_outside_of_the_domain_shortens_the_step() -> None:
    def function(x: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return float((x - np.log(x)).sum()), 1 - 1 / x

    limits = Limits(lower=np.full(2, -4.0), upper=np.array([0.5, np.inf]))
    minimizer, _ = finish(begun(LBFGSB(), [0.01, 5.0], limits), function)
    np.testing.assert_allclose(minimizer.point, [0.5, 1], atol=1e-4)


def test_refuses_a_function_as_preconditioner() -> None:
    limits = Limits(lower=np.zeros(1), precondition=lambda vector: vector)
    with pytest.raises(ValueError, match="takes no function as preconditioner"):
        begun(LBFGSB(), [1.0], limits)


def test_small_systems() -> None:
    rng = np.random.default_rng(0)
    square, sides = rng.normal(size=(6, 6)), rng.normal(size=(6, 3))
    lower = small.cholesky(square @ square.T)
    assert lower is not None
    np.testing.assert_allclose(lower, np.linalg.cholesky(square @ square.T), atol=1e-12)
    np.testing.assert_allclose(small.solve_lower(lower, sides), np.linalg.solve(lower, sides), rtol=1e-8)
    np.testing.assert_allclose(small.times(square, sides), square @ sides, atol=1e-13)
    assert small.cholesky(-np.eye(2)) is None and small.cholesky(np.full((2, 2), np.nan)) is None
    assert small.cholesky(np.ones((2, 2))) is None
    empty = small.cholesky(np.zeros((0, 0)))
    assert empty is not None and empty.shape == (0, 0)
    matrix, right = rng.normal(size=(7, 7)), rng.normal(size=7)
    np.testing.assert_allclose(
        np.array(small.solve(matrix, right.tolist())), np.linalg.solve(matrix, right), rtol=1e-12
    )
    assert np.isnan(small.solve(np.zeros((2, 2)), [1.0, 1.0])).all()
    assert small.solve(np.zeros((0, 0)), []) == []
    assert np.isnan(small.dot([np.inf, 1.0], [1.0, -np.inf]))
