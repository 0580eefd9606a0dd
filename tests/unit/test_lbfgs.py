"""L-BFGS without and with bounds: directions by the formulas of the papers, beside SciPy's, and at awkward bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from minimizer_runs import ANY, Problem, Vector, check_restarts, finished, minimized, rebuilt, rosenbrock, started, tell

from mpishard.inverse.minimization import minimize
from mpishard.minimizers import small
from mpishard.minimizers.lbfgs import LBFGS
from mpishard.minimizers.lbfgsb import LBFGSB
from mpishard.minimizers.line_search import LineSearch, LineSearchState
from mpishard.minimizers.line_search.search import Trial, Verdict
from mpishard.minimizers.method import Limits, Minimizer, Wanted

# L-BFGS: the textbook recursion, damping, and another stage.


def begun(method: LBFGS, x0: Vector, limits: Limits = ANY) -> Minimizer:
    minimizer = started(method, x0, limits)
    minimizer.begin()
    return minimizer


def two_loops(pairs: list[tuple[Vector, Vector]], gradient: Vector, gamma: float) -> Vector:
    """The direction of Nocedal (1980), as in the textbooks."""
    q, alphas = gradient.copy(), []
    for s, y in reversed(pairs):
        alphas.append(s @ q / (s @ y))
        q -= alphas[-1] * y
    q *= gamma
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        q += s * (alpha - y @ q / (s @ y))
    return -q


@pytest.mark.parametrize("history", [1, 3, 10])
def test_direction_is_that_of_the_two_loops(history: int) -> None:
    problem = rosenbrock(40)
    minimizer, pairs = begun(LBFGS(history=history), problem.start), []
    base = gradient_before = None
    while minimizer.wanted is not Wanted.NOTHING and minimizer.progress.evaluations < 60:
        x = minimizer.point.copy()
        gradient = problem.gradient(x)[1]
        tell(minimizer, problem)
        if minimizer.wanted is Wanted.NOTHING or base is not None and not minimizer.progress.accepted:
            continue
        if base is not None:
            pairs = [*pairs, (x - base, gradient - gradient_before)][-history:]
            (s, y) = pairs[-1]
            expected = two_loops(pairs, gradient, s @ y / (y @ y))
            assert np.linalg.norm(minimizer.row("direction") - expected) <= 1e-12 * np.linalg.norm(expected)
        base, gradient_before = x, gradient
    assert len(pairs) == history


@dataclass(frozen=True, kw_only=True)
class Lower(LineSearch[LineSearchState]):
    """Accepts any lower value, whatever the slope there, so that a pair may have no curvature."""

    state_type = LineSearchState

    def _decide(self, state: LineSearchState, trial: Trial) -> tuple[LineSearchState, Verdict]:
        if trial.value < state.start.value:
            return state, Verdict.ACCEPT
        return replace(state, step=trial.step / 2), Verdict.EVALUATE


def test_powell_damping_keeps_pairs_where_skipping_has_none() -> None:
    waves = Problem(lambda x: (float(np.cos(x).sum()), -np.sin(x)), None, np.array([0.1, 0.2]))  # near a maximum
    for damping, kept in (("skip", 0), ("powell", 1)):
        minimizer = begun(LBFGS(damping=damping, line_search=Lower()), waves.start)
        while not minimizer.progress.accepted:
            tell(minimizer, waves)
        assert len(minimizer.history) == kept
        np.testing.assert_allclose(finished(minimizer, waves).point, np.pi, atol=1e-4)


def test_another_stage_with_and_without_history() -> None:
    method, problem = LBFGS(maxiter=12), rosenbrock(10)
    for keep in (True, False):
        minimizer = minimized(method, problem)
        assert keep or minimizer.forget()
        minimizer.begin()
        minimizer = finished(rebuilt(minimizer, method), problem)
        assert (minimizer.stop_reason, minimizer.progress.iterations) == ("iterations", 12)


def test_a_state_with_another_history_is_refused() -> None:
    minimizer, other = (begun(LBFGS(history=pairs), np.ones(10)) for pairs in (10, 3))
    with pytest.raises(ValueError, match="3 pairs, .*history=10"):
        minimizer.restore({**minimizer.to_metadata(), "history": other.to_metadata()["history"]})


# L-BFGS with bounds: the generalised Cauchy point, beside SciPy's, and at awkward bounds.


def case(name: str) -> tuple[Problem, Limits]:
    """A function with a start, and its bounds."""
    if name == "obstacle":  # a membrane over an obstacle: a quadratic function of a grid
        x = np.arange(1, 13) / 13
        lower = np.multiply.outer(np.sin(9.2 * x), np.sin(9.3 * x)).ravel() ** 3

        def membrane(flat: Vector) -> tuple[float, Vector]:
            v = np.pad(flat.reshape(12, 12), 1)
            gradient = 4 * v[1:-1, 1:-1] - v[:-2, 1:-1] - v[2:, 1:-1] - v[1:-1, :-2] - v[1:-1, 2:]
            return 0.5 * float((np.diff(v, axis=0) ** 2).sum() + (np.diff(v, axis=1) ** 2).sum()), gradient.ravel()

        limits = Limits(lower=lower, upper=np.full(lower.size, 2000.0))
        return Problem(membrane, None, np.maximum(lower, 0) + 0.5), limits
    if name == "coupled":
        rng = np.random.default_rng(0)
        turned, middle = np.linalg.qr(rng.normal(size=(40, 40)))[0], 3 * rng.normal(size=40)
        form = turned @ np.diag(np.geomspace(1, 1e4, 40)) @ turned.T

        def quadratic(x: Vector) -> tuple[float, Vector]:
            slope = form @ (x - middle)
            return float(0.5 * (x - middle) @ slope), slope

        return Problem(quadratic, None, np.zeros(40)), Limits(lower=np.full(40, -1.0), upper=np.ones(40))
    upper, scaling, weights = np.full(20, 0.8), np.linspace(0.5, 2, 20), np.linspace(1, 2, 20)
    return rosenbrock(20), {
        "box": Limits(lower=np.full(20, -1.5), upper=upper),
        "scaled": Limits(lower=np.full(20, -1.5), upper=upper, scaling=scaling),
        "fixed": Limits(upper=upper, fixed=np.arange(20) % 5 == 2, weights=weights),
        "alternate": Limits(lower=np.resize([-np.inf, 0.5], 20), upper=np.resize([0.9, np.inf], 20)),
    }[name]


@pytest.mark.pairs(2)
@pytest.mark.parametrize("name", ["obstacle", "coupled", "box", "scaled", "fixed", "alternate"])
def test_it_goes_on_from_its_metadata_at_every_evaluation(name: str) -> None:
    assert check_restarts(LBFGSB(history=5, maxiter=25), *case(name)).progress.iterations > 10


@pytest.mark.pairs(2)
@pytest.mark.parametrize("name", ["obstacle", "coupled", "box", "alternate"])
def test_as_good_as_scipy(name: str) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra: test)")
    problem, limits = case(name)
    bounds, options = optimize.Bounds(limits.lower, limits.upper), {"maxcor": 10, "gtol": 1e-8, "ftol": 1e-14}
    expected = optimize.minimize(
        problem.gradient, problem.start, jac=True, method="L-BFGS-B", bounds=bounds, options=options
    )
    minimizer = minimized(LBFGSB(gtol=1e-8, ftol=1e-14), problem, limits)
    assert minimizer.progress.value <= expected.fun + 1e-8 * max(abs(expected.fun), 1e-8)
    best = minimizer.point
    projected = best - np.clip(best - problem.gradient(best)[1], limits.lower, limits.upper)
    assert abs(projected).max() == pytest.approx(minimizer.progress.projected_norm, abs=1e-12)


def cauchy_point(x: Vector, g: Vector, limits: Limits, hessian: np.ndarray) -> tuple[float, Vector]:
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
    problem, limits = case(name)
    minimizer, pairs = begun(LBFGSB(history=4), problem.start, limits), []
    base = before = None
    met = 0
    while minimizer.wanted is not Wanted.NOTHING and minimizer.progress.iterations < 15:
        x = minimizer.point.copy()
        gradient = problem.gradient(x)[1]
        tell(minimizer, problem)
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

    def gradient(x: Vector) -> tuple[float, Vector]:
        shared = x.sum()
        return float(0.5 * weights @ (x - 2) ** 2 + 0.5 * shared**2), weights * (x - 2) + shared

    for start in (np.zeros(size), np.ones(size), np.where(np.arange(size) % 2, 0.0, 1.0), np.full(size, 0.5)):
        limits = Limits(lower=np.zeros(size), upper=np.ones(size))
        minimizer = minimized(LBFGSB(ftol=0), Problem(gradient, None, start), limits)
        x = minimizer.point
        assert minimizer.stop_reason == "gradient"
        assert abs(x - np.clip(x - gradient(x)[1], 0, 1)).max() <= 1e-5
        assert ((x == 0) | (x == 1)).sum() > size // 2


@pytest.mark.pairs(1)
@pytest.mark.parametrize("size", [600, 1200])
def test_a_short_step_far_from_the_minimum_is_no_convergence(size: int) -> None:
    """EXPLIN of CUTEst, where bounds cut the steps short: the steps are SciPy's, and more follow.

    The second short step in a row is far from the minimum, too, to which only other pairs lead.
    """
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra: test)")
    few, weights = size // 12, 10.0 * np.arange(1, size + 1)
    values: list[float] = []

    def explin(x: Vector) -> tuple[float, Vector]:
        power = np.exp(0.1 * x[:few] * x[1 : few + 1])
        gradient = -weights
        gradient[:few] += 0.1 * power * x[1 : few + 1]
        gradient[1 : few + 1] += 0.1 * power * x[:few]
        values.append(float(power.sum() - weights @ x))
        return values[-1], gradient

    lower, upper, ends = np.zeros(size), np.full(size, 10.0), {"gtol": 1e-8, "ftol": 2.2e-9}
    bounds = optimize.Bounds(lower, upper)
    optimize.minimize(explin, lower, jac=True, bounds=bounds, method="L-BFGS-B", options={"maxcor": 10, **ends})
    expected = values.copy()
    values.clear()
    limits, problem = Limits(lower, upper), Problem(explin, None, lower)
    minimized(LBFGSB(**ends), problem, limits)
    np.testing.assert_allclose(values[: len(expected)], expected, rtol=1e-7)
    assert len(expected) < len(values) < 5 * len(expected)
    assert values[-1] < expected[-1] - 1e-4 * abs(expected[-1])
    assert check_restarts(LBFGSB(**ends), problem, limits).stop_reason == "decrease"


def test_messages_give_the_projected_gradient_and_points_without_values() -> None:
    problem, limits = case("obstacle")
    bounds, ends = (limits.lower, limits.upper), {"ftol": 1e-3, "gtol": 0.0}
    found = minimize(problem.gradient, problem.start, bounds=bounds, options=ends)
    top = abs(found.x - np.clip(found.x - problem.gradient(found.x)[1], *bounds)).max()
    assert found.success and f"the projected gradient's largest element is {top:.3g}" in found.message

    def with_edge(x: Vector) -> tuple[float, Vector]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return float((x - np.log(x)).sum()), 1 - 1 / x

    found = minimize(with_edge, np.array([0.01, 30.0]), bounds=[(-40.0, 0.5), (-40.0, 50.0)])
    assert found.success and "NaN or infinite at" in found.message
    np.testing.assert_allclose(found.x, [0.5, 1], atol=1e-4)
    assert "NaN" not in minimize(with_edge, np.array([0.5, 2.0]), bounds=(0.1, 3.0)).message


def test_a_state_without_products_of_steps_is_refused() -> None:
    problem, limits = case("box")
    minimizer = begun(LBFGSB(history=3), problem.start, limits)
    for _ in range(6):
        tell(minimizer, problem)
    metadata = minimizer.to_metadata()
    del metadata["history"]["ss"]
    with pytest.raises(ValueError, match="generalised Cauchy point"):
        begun(LBFGSB(history=3), problem.start, limits).restore(metadata)


def test_without_bounds_it_is_lbfgs() -> None:
    problem = rosenbrock(10)
    plain, same = minimized(LBFGS(), problem), minimized(LBFGSB(), problem)
    np.testing.assert_array_equal(same.point, plain.point)
    assert same.progress == plain.progress
    far = minimized(LBFGSB(), problem, Limits(lower=np.full(10, -1e6)))
    np.testing.assert_allclose(far.point, plain.point, atol=1e-3)


@pytest.mark.parametrize(
    ("start", "lower", "upper", "end"),
    [([1, 1], [1, 1], [1, 2], [1, 2]), ([1, 1], [0, 0], [1, 1], [1, 1]), ([9], [3.5], None, [3.5]), ([], [], None, [])],
    ids=["equal", "at the end", "one side", "nothing"],
)
def test_awkward_bounds(start: list, lower: list, upper: list | None, end: list) -> None:
    problem = Problem(lambda x: (float(((x - 3) ** 2).sum()), 2 * (x - 3)), None, np.array(start, float))
    limits = Limits(*(None if side is None else np.array(side, float) for side in (lower, upper)))
    minimizer = minimized(LBFGSB(), problem, limits)
    np.testing.assert_array_equal(minimizer.point, end)
    assert minimizer.stop_reason == "gradient" and minimizer.progress.projected_norm == 0
    assert minimizer.progress.evaluations == 1 or start != end


def test_small_systems() -> None:
    rng = np.random.default_rng(0)
    square, sides = rng.normal(size=(6, 6)), rng.normal(size=(6, 3))
    lower = small.cholesky(square @ square.T)
    np.testing.assert_allclose(lower, np.linalg.cholesky(square @ square.T), atol=1e-12)
    np.testing.assert_allclose(small.solve_lower(lower, sides), np.linalg.solve(lower, sides), rtol=1e-8)
    np.testing.assert_allclose(small.times(square, sides), square @ sides, atol=1e-13)
    for bad in (-np.eye(2), np.full((2, 2), np.nan), np.ones((2, 2))):
        assert small.cholesky(bad) is None
    assert small.cholesky(np.zeros((0, 0))).shape == (0, 0)
    matrix, right = rng.normal(size=(7, 7)), rng.normal(size=7)
    np.testing.assert_allclose(small.solve(matrix, right.tolist()), np.linalg.solve(matrix, right), rtol=1e-12)
    assert np.isnan(small.solve(np.zeros((2, 2)), [1.0, 1.0])).all()
    assert small.solve(np.zeros((0, 0)), []) == []
    assert np.isnan(small.dot([np.inf, 1.0], [1.0, -np.inf]))
