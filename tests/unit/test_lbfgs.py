"""L-BFGS without and with bounds: against SciPy's L-BFGS-B, in parts, and from metadata at every evaluation."""

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

# L-BFGS: against SciPy's L-BFGS-B and the textbook recursion, from metadata at every evaluation, and bad input.

Function = Callable[[np.ndarray], tuple[float, np.ndarray]]


def rosenbrock(x: np.ndarray) -> tuple[float, np.ndarray]:
    inner = x[1:] - x[:-1] ** 2
    gradient = np.zeros_like(x)
    gradient[1:] += 200 * inner
    gradient[:-1] += -400 * x[:-1] * inner - 2 * (1 - x[:-1])
    return float((100 * inner**2 + (1 - x[:-1]) ** 2).sum()), gradient


def start(n: int = 10) -> np.ndarray:
    return np.resize([-1.2, 1.0], n)


def begun(method: LBFGS, x0: Any, limits: Limits | None = None) -> Minimizer:
    point = np.array(x0, np.float64)
    vectors = np.zeros((len(method.slots), point.size))
    minimizer = method.make(LocalSpace(point.size, point), vectors, point, limits or Limits())
    minimizer.begin()
    return minimizer


def rebuilt(minimizer: Minimizer) -> Minimizer:
    """Another one, from copies of vectors and point and from the metadata as text."""
    vectors, point = minimizer.vectors.copy(), minimizer.point.copy()
    other = minimizer.method.make(LocalSpace(point.size, point), vectors, point, minimizer.limits)  # type: ignore[attr-defined]
    other.restore(json.loads(json.dumps(minimizer.to_metadata())))
    return other


def finish(minimizer: Minimizer, function: Function, *, kill: bool = False) -> tuple[Minimizer, list[bytes]]:
    trace = []
    while minimizer.wanted is not Wanted.NOTHING:
        value, gradient = function(minimizer.point)
        trace.append(minimizer.point.tobytes() + np.float64(value).tobytes())
        minimizer.tell(value, gradient)
        if kill:
            minimizer = rebuilt(minimizer)
    return minimizer, trace


def minimized(method: LBFGS, function: Function, x0: Any, limits: Limits | None = None) -> Minimizer:
    return finish(begun(method, x0, limits), function)[0]


def two_loops(pairs: list[tuple[np.ndarray, np.ndarray]], gradient: np.ndarray, gamma: float) -> np.ndarray:
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
    minimizer = begun(LBFGS(history=history), start(40))
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    base = gradient_before = None
    for _ in range(60):
        x = minimizer.point.copy()
        value, gradient = rosenbrock(x)
        minimizer.tell(value, gradient)
        if minimizer.wanted is Wanted.NOTHING:
            break
        if base is not None and not minimizer.progress.accepted:
            continue
        if base is not None:
            pairs = [*pairs, (x - base, gradient - gradient_before)][-history:]
            (s, y) = pairs[-1]
            expected = two_loops(pairs, gradient, s @ y / (y @ y))
            direction = minimizer.row("direction")
            assert np.linalg.norm(direction - expected) <= 1e-12 * np.linalg.norm(expected)
        base, gradient_before = x, gradient
    assert len(pairs) == history


@pytest.mark.parametrize("options", [{}, {"history": 2}, {"damping": "powell"}, {"initial_scaling": 1e-3}])
@pytest.mark.parametrize("limited", ["free", "scaled", "preconditioned", "fixed"])
def test_goes_on_from_metadata_at_every_evaluation(options: dict[str, Any], limited: str) -> None:
    weights = np.linspace(0.5, 2, 10)
    limits = {
        "free": Limits(),
        "scaled": Limits(scaling=weights),
        "preconditioned": Limits(precondition=lambda vector: weights * vector),
        "fixed": Limits(fixed=np.arange(10) % 4 == 1),
    }[limited]
    method = LBFGS(maxiter=30, **options)
    undisturbed, trace = finish(begun(method, start(), limits), rosenbrock)
    killed, other = finish(begun(method, start(), limits), rosenbrock, kill=True)
    assert trace == other
    assert killed.progress == undisturbed.progress
    assert killed.point.tobytes() == undisturbed.point.tobytes()


def test_scaling_is_a_change_of_variables() -> None:
    root = np.linspace(0.1, 3, 10)

    def in_other_variables(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = rosenbrock(root * z)
        return value, root * gradient

    method = LBFGS(maxiter=15, gtol=0, ftol=0)
    direct = minimized(method, rosenbrock, start(), Limits(scaling=root**2))
    other = minimized(method, in_other_variables, start() / root)
    precondition = Limits(precondition=lambda vector: root**2 * vector)
    called = minimized(method, rosenbrock, start(), precondition)
    np.testing.assert_allclose(direct.point, root * other.point, rtol=1e-6)
    np.testing.assert_allclose(called.point, direct.point, rtol=1e-6)
    assert direct.progress.evaluations == other.progress.evaluations == called.progress.evaluations


def test_fixed_elements_keep_their_value_and_count_for_nothing() -> None:
    fixed = np.array([False, True, True, False])
    x0 = np.array([-1.2, 1.0, 7.0, 3.0])

    def function(x: np.ndarray) -> tuple[float, np.ndarray]:
        gradient = np.array([2 * x[0], np.nan, 1e300, 2 * x[3]])
        return float(x[0] ** 2 + x[3] ** 2), gradient

    minimizer = minimized(LBFGS(), function, x0, Limits(fixed=fixed))
    assert minimizer.stop_reason == "gradient"
    np.testing.assert_allclose(minimizer.point, [0, 1, 7, 0], atol=1e-5)


def test_powell_damping_keeps_pairs_where_skipping_has_none() -> None:
    def waves(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float(np.cos(x).sum()), -np.sin(x)

    for damping, kept in (("skip", 0), ("powell", 1)):
        minimizer = begun(LBFGS(damping=damping, line_search="armijo"), [0.1, 0.2])  # near a maximum
        while not minimizer.progress.accepted:
            minimizer.tell(*waves(minimizer.point))
        assert len(minimizer.history) == kept  # type: ignore[attr-defined]
        minimizer, _ = finish(minimizer, waves)
        np.testing.assert_allclose(minimizer.point, np.pi, atol=1e-4)


def test_not_finite() -> None:
    def function(x: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return float((x - np.log(x)).sum()), 1 - 1 / x  # NaN below 0

    minimizer = minimized(LBFGS(), function, [0.01, 5.0])
    assert minimizer.stop_reason in ("gradient", "decrease")
    np.testing.assert_allclose(minimizer.point, 1, atol=1e-4)
    at_once = minimized(LBFGS(), function, [-1.0, 5.0])
    assert at_once.stop_reason == "not finite"
    np.testing.assert_array_equal(at_once.point, [-1, 5])

    values = iter([0.0])
    lost = minimized(LBFGS(), lambda x: (next(values, np.nan), x), [1.0, 1.0])
    assert lost.stop_reason == "not finite"
    np.testing.assert_array_equal(lost.point, 1)


def test_stops() -> None:
    assert minimized(LBFGS(maxiter=3), rosenbrock, start()).stop_reason == "iterations"
    few = minimized(LBFGS(maxfun=7), rosenbrock, start())
    assert (few.stop_reason, few.progress.evaluations) == ("evaluations", 7)
    assert rosenbrock(few.point)[0] == few.progress.value
    assert minimized(LBFGS(ftol=0.5), rosenbrock, start()).stop_reason == "decrease"
    assert minimized(LBFGS(xtol=0.5), rosenbrock, start()).stop_reason == "step"
    assert minimized(LBFGS(), rosenbrock, np.ones(4)).stop_reason == "gradient"
    assert minimized(LBFGS(), lambda x: (0.0, x), []).stop_reason == "gradient"
    with pytest.raises(ValueError, match="has ended"):
        few.tell(0.0, few.point)


def test_another_stage_with_and_without_history() -> None:
    for keep in (True, False):
        minimizer = minimized(LBFGS(maxiter=12), rosenbrock, start())
        if not keep:
            assert minimizer.forget()
        minimizer.begin()
        minimizer, _ = finish(rebuilt(minimizer), rosenbrock)
        assert minimizer.stop_reason == "iterations"
        assert minimizer.progress.iterations == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"history": 0}, "LBFGS: history=0 must be a whole number of at least 1"),
        ({"maxls": 0}, "maxls=0"),
        ({"line_search": "wolfe"}, "line_search='wolfe' must be 'more-thuente'"),
        ({"damping": "none"}, "damping='none' must be one of 'skip', 'powell'"),
        ({"initial_scaling": 0.0}, "initial_scaling=0.0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LBFGS(**options)


def test_bad_limits_and_state() -> None:
    with pytest.raises(ValueError, match="LBFGS takes no bounds; use LBFGSB"):
        begun(LBFGS(), [1.0], Limits(lower=np.zeros(1)))
    with pytest.raises(ValueError, match="leave one of them out"):
        begun(LBFGS(), [1.0], Limits(scaling=np.ones(1), precondition=lambda vector: vector))
    with pytest.raises(ValueError, match="preconditioner must be positive definite"):
        minimized(LBFGS(), rosenbrock, start(), Limits(precondition=lambda vector: -vector))
    minimizer = begun(LBFGS(), start())
    with pytest.raises(ValueError, match="cannot be restored"):
        minimizer.restore({})
    other = begun(LBFGS(history=3), start()).to_metadata()["history"]
    with pytest.raises(ValueError, match="history is of 3 pairs, but history=10"):
        minimizer.restore({**minimizer.to_metadata(), "history": other})


# L-BFGS with bounds: against SciPy's L-BFGS-B, in parts, from metadata at every evaluation, and at awkward bounds.


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


def begun_of_lbfgsb(method: Method, x0: Any, limits: Limits) -> Minimizer:
    point = np.array(x0, np.float64)
    vectors = np.zeros((len(method.slots), point.size))
    minimizer = method.make(LocalSpace(point.size, point), vectors, point, limits)
    minimizer.begin()
    return minimizer


def finish_of_lbfgsb(minimizer: Minimizer, function: Function, *, kill: bool = False) -> tuple[Minimizer, list[bytes]]:
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
def test_goes_on_from_metadata_at_every_evaluation_of_lbfgsb(name: str) -> None:
    function, x0, limits = case(name)
    method = LBFGSB(history=5, maxiter=25)
    undisturbed, trace = finish_of_lbfgsb(begun_of_lbfgsb(method, x0, limits), function)
    killed, other = finish_of_lbfgsb(begun_of_lbfgsb(method, x0, limits), function, kill=True)
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
    minimizer, _ = finish_of_lbfgsb(begun_of_lbfgsb(LBFGSB(gtol=1e-8, ftol=1e-14), x0, limits), function)
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
    minimizer = begun_of_lbfgsb(LBFGSB(history=4), x0, limits)
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
        minimizer, _ = finish_of_lbfgsb(begun_of_lbfgsb(LBFGSB(ftol=0), start, limits), function)
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
    minimizer, _ = finish_of_lbfgsb(begun_of_lbfgsb(LBFGSB(gtol=1e-8, ftol=2.2e-9), lower, limits), explin)
    np.testing.assert_allclose(values[: len(expected)], expected, rtol=1e-7)
    assert len(expected) < len(values) < 2 * len(expected) and values[-1] < expected[-1]
    values = []
    assert (
        finish_of_lbfgsb(begun_of_lbfgsb(LBFGSB(gtol=1e-8, ftol=2.2e-9), lower, limits), explin, kill=True)[
            0
        ].stop_reason
        == "decrease"
    )
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
    minimizer = begun_of_lbfgsb(LBFGSB(history=3), x0, limits)
    for _ in range(6):
        minimizer.tell(*function(minimizer.point))
    metadata = minimizer.to_metadata()
    del metadata["history"]["ss"]
    with pytest.raises(ValueError, match="of a release without the generalised Cauchy point"):
        begun_of_lbfgsb(LBFGSB(history=3), x0, limits).restore(metadata)


def test_without_bounds_it_is_lbfgs() -> None:
    x0 = np.resize([-1.2, 1.0], 10)
    none, some = Limits(), Limits(lower=np.full(10, -1e6))
    plain, trace = finish_of_lbfgsb(begun_of_lbfgsb(LBFGS(), x0, none), rosenbrock)
    assert finish_of_lbfgsb(begun_of_lbfgsb(LBFGSB(), x0, none), rosenbrock)[1] == trace
    far, _ = finish_of_lbfgsb(begun_of_lbfgsb(LBFGSB(), x0, some), rosenbrock)
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
    minimizer = begun_of_lbfgsb(method, start, Limits(np.zeros(4), np.ones(4), fixed=fixed))
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
    minimizer, _ = finish_of_lbfgsb(begun_of_lbfgsb(LBFGSB(), [1.0, 1.0], equal), function)
    np.testing.assert_array_equal(minimizer.point, [1, 2])
    everything = Limits(lower=np.zeros(2), upper=np.ones(2))
    at_bounds, trace = finish_of_lbfgsb(begun_of_lbfgsb(LBFGSB(), [1.0, 1.0], everything), function)
    assert (at_bounds.stop_reason, len(trace)) == ("gradient", 1)
    assert at_bounds.progress.projected_norm == 0 < at_bounds.progress.gradient_norm
    one = Limits(lower=np.array([3.5]))
    np.testing.assert_array_equal(finish_of_lbfgsb(begun_of_lbfgsb(LBFGSB(), [9.0], one), function)[0].point, [3.5])
    nothing = Limits(lower=np.zeros(0))
    assert finish_of_lbfgsb(begun_of_lbfgsb(LBFGSB(), [], nothing), function)[0].stop_reason == "gradient"


def test_nan_outside_of_the_domain_shortens_the_step() -> None:
    def function(x: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            return float((x - np.log(x)).sum()), 1 - 1 / x

    limits = Limits(lower=np.full(2, -4.0), upper=np.array([0.5, np.inf]))
    minimizer, _ = finish_of_lbfgsb(begun_of_lbfgsb(LBFGSB(), [0.01, 5.0], limits), function)
    np.testing.assert_allclose(minimizer.point, [0.5, 1], atol=1e-4)


def test_refuses_a_function_as_preconditioner() -> None:
    limits = Limits(lower=np.zeros(1), precondition=lambda vector: vector)
    with pytest.raises(ValueError, match="takes no function as preconditioner"):
        begun_of_lbfgsb(LBFGSB(), [1.0], limits)


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
