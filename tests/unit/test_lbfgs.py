"""L-BFGS: against SciPy's L-BFGS-B and the textbook recursion, from metadata at every evaluation, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpishard.minimizers.lbfgs import LBFGS
from mpishard.minimizers.method import Limits, Minimizer, Wanted
from mpishard.minimizers.space import LocalSpace

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
