"""Line searches: the steps they try, what they accept, where they give up, and their state."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from mpishard.minimizers.line_search import HagerZhang, LineSearch, MoreThuente
from mpishard.minimizers.line_search.search import Trial, Verdict

SEARCHES = [MoreThuente(), HagerZhang(maxls=20)]

Function = Callable[[float], tuple[float, float]]  # of a step: value and slope


def first(a: float) -> tuple[float, float]:
    """(5.1) of Moré and Thuente, beta = 2: nearly a line beyond its minimum."""
    return -a / (a * a + 2), (a * a - 2) / (a * a + 2) ** 2


def second(a: float) -> tuple[float, float]:
    """(5.2), beta = 0.004: very curved at its minimum 1.596."""
    b = a + 0.004
    return b**5 - 2 * b**4, 5 * b**4 - 8 * b**3


def third(a: float) -> tuple[float, float]:
    """(5.3), beta = 0.01, l = 39: a corner that is rounded, with many small waves."""
    beta, waves = 0.01, 39
    value, slope = abs(a - 1), math.copysign(1.0, a - 1)
    if value < beta:
        value, slope = (a - 1) ** 2 / (2 * beta) + beta / 2, (a - 1) / beta
    angle = waves * math.pi / 2
    scale = 2 * (1 - beta) / (waves * math.pi)
    return value + scale * math.sin(angle * a), slope + scale * angle * math.cos(angle * a)


def yanai(left: float, right: float) -> Function:
    """(5.4) of Yanai, Ozawa and Kaneko: a sum of two hyperbolas."""
    c1, c2 = (math.sqrt(1 + beta**2) - beta for beta in (left, right))

    def function(a: float) -> tuple[float, float]:
        one, two = math.sqrt((1 - a) ** 2 + right**2), math.sqrt(a**2 + left**2)
        return c1 * one + c2 * two, c1 * (a - 1) / one + c2 * a / two

    return function


def polynomial(seed: int) -> Function:
    """A polynomial of degree 6 that goes down at 0 and rises in the end."""
    random = np.random.default_rng(seed)
    roots = random.uniform(0.1, 20, 5) * 10.0 ** random.uniform(-3, 3)
    derivative = np.polynomial.Polynomial.fromroots(roots) * 10.0 ** random.uniform(-3, 3)
    primitive = derivative.integ()
    return lambda a: (float(primitive(a)), float(derivative(a)))


def waves(seed: int) -> Function:
    """A bowl with waves of random length: many local minima."""
    random = np.random.default_rng(seed)
    height, rate, centre = random.uniform(0.1, 3), random.uniform(0.5, 30), random.uniform(0.2, 5)
    return lambda a: (
        (a - centre) ** 2 - height * math.sin(rate * a),
        2 * (a - centre) - height * rate * math.cos(rate * a),
    )


def falling(seed: int) -> Function:
    """It goes down for ever, at different rates: the longest step must be found."""
    power = np.random.default_rng(seed).uniform(0.05, 1.0)
    return lambda a: (-((1 + a) ** power), -power * (1 + a) ** (power - 1))


FUNCTIONS = [first, second, third, *(yanai(*each) for each in ((0.001, 0.001), (0.01, 0.001), (0.001, 0.01)))]
FUNCTIONS += [make(seed) for make in (polynomial, waves, falling) for seed in range(12)]


def run(search: LineSearch, function: Function, first_step: float, most: float = math.inf) -> tuple:
    """All steps that were tried, the last state and the last verdict; the state goes through JSON at every step."""
    state = search.begin(*function(0.0), first_step, most)
    verdict = Verdict.FAIL if state.reason else Verdict.EVALUATE
    steps: list[float] = []
    while verdict is Verdict.EVALUATE:
        restored = search.restore(json.loads(json.dumps(state.to_metadata())))
        assert restored == state
        steps.append(state.step)
        state, verdict = search.advance(restored, *function(state.step))
        assert len(steps) == state.evaluations <= search.maxls
    return steps, state, verdict


def of_scipy(search: MoreThuente, function: Function, first_step: float, most: float) -> tuple[list[float], str]:
    """The steps that SciPy's dcsrch tries, and how it ends."""
    dcsrch = pytest.importorskip("scipy.optimize._dcsrch", reason="SciPy's own line search").DCSRCH
    other = dcsrch(None, None, search.ftol, search.gtol, search.xtol, search.stpmin, most)
    step, task, steps = first_step, b"START", []
    value, slope = map(np.float64, function(0.0))
    while True:
        with np.errstate(all="ignore"):
            step, value, slope, task = other._iterate(np.float64(step), value, slope, task)
        if not task.startswith(b"FG") or len(steps) == search.maxls:
            return steps, task.decode()
        steps.append(float(step))
        value, slope = map(np.float64, function(float(step)))


@pytest.mark.pairs(6)
@pytest.mark.parametrize("options", [(1e-3, 0.9, 0.1), (1e-4, 0.9, 1e-14), (1e-3, 1e-2, 1e-8), (0.1, 0.2, 0.1)])
@pytest.mark.parametrize("most", [math.inf, 1e10, 3.0])
def test_more_thuente_tries_the_steps_of_dcsrch(options: tuple[float, float, float], most: float) -> None:
    search = MoreThuente(ftol=options[0], gtol=options[1], xtol=options[2], maxls=40)
    for number, function in enumerate(FUNCTIONS):
        for first_step in (1e-3, 1e-1, 1.0, 10.0, 1e3):
            expected, task = of_scipy(search, function, min(first_step, most), most)
            steps, state, verdict = run(search, function, first_step, most)
            where = f"function {number}, first step {first_step}: {task}"
            if task.startswith("WARNING") and expected[-1] in (0.0, *expected[:-1][-1:]):
                expected.pop()  # it asks once more for what it has
            np.testing.assert_allclose(steps, expected, rtol=1e-8, err_msg=where)
            if task.startswith("CONV") or "STPMAX" in task:
                assert verdict is Verdict.ACCEPT and not state.reason, where
            elif task.startswith("FG"):
                assert verdict is Verdict.FAIL and "maxls" in state.reason, where


@pytest.mark.parametrize("delta", [1e-3, 0.1])
@pytest.mark.parametrize("sigma", [0.1, 0.9])
def test_hager_zhang_meets_its_conditions(delta: float, sigma: float) -> None:
    search = HagerZhang(delta=delta, sigma=sigma)
    counts = []
    for number, function in enumerate(FUNCTIONS):
        for first_step in (1e-3, 1e-1, 1.0, 10.0, 1e3):
            steps, state, verdict = run(search, function, first_step)
            where = f"function {number}, first step {first_step}: {state.reason}"
            assert verdict is Verdict.ACCEPT, where
            (value, slope), start = function(state.step), Trial(0.0, *function(0.0))
            assert slope >= sigma * start.slope, where
            wolfe = value <= start.value + delta * state.step * start.slope
            close = value <= start.value + 1e-6 * abs(start.value) and slope <= (2 * delta - 1) * start.slope
            assert wolfe or close, where
            counts.append(len(steps))
    assert np.mean(counts) < 7


def test_hager_zhang_needs_only_slopes_where_rounding_hides_the_decrease() -> None:
    """Section 4 of the paper: near a minimum, values tell it to the root of the precision only."""

    def function(a: float) -> tuple[float, float]:
        return 1.0 if a == 0 else 1.0 + 4e-16, 2e-20 * (a - 1)

    for first_step in (1e-3, 0.1, 30.0):
        steps, state, verdict = run(HagerZhang(sigma=0.1), function, first_step)
        assert verdict is Verdict.ACCEPT and len(steps) < 8
        assert 0.9 <= state.step <= 1.8
        assert run(MoreThuente(gtol=0.1), function, first_step)[2] is Verdict.FAIL


def test_hager_zhang_halves_an_interval_that_hides_a_maximum() -> None:
    """It goes down on both sides of a ridge, so that slopes alone bracket nothing: step U3."""
    ridge = lambda a: (-math.sin(a), -math.cos(a)) if a < 4 else (5 - 0.1 * a, -0.1)  # noqa: E731
    steps, state, verdict = run(HagerZhang(), ridge, 6.0)
    assert verdict is Verdict.ACCEPT and steps[:2] == [6.0, 3.0] and 0 < state.step < math.pi


def test_the_shortest_step_ends_the_search() -> None:
    _, state, verdict = run(MoreThuente(stpmin=0.05), lambda a: (a, -1.0), 1.0)
    assert verdict is Verdict.FAIL and "0.05 (stpmin)" in state.reason


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (MoreThuente, {"maxls": 0}, "maxls=0"),
        (MoreThuente, {"ftol": -1.0}, "ftol"),
        (MoreThuente, {"ftol": 0.5, "gtol": 0.1}, "ftol=0.5 .*gtol=0.1"),
        (HagerZhang, {"delta": 0.5}, "delta=0.5"),
        (HagerZhang, {"delta": 0.4, "sigma": 0.1}, "delta=0.4 .*sigma=0.1"),
    ],
)
def test_options_are_checked(kind: type, options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**options)


@pytest.mark.parametrize(
    ("value", "slope", "first_step", "most", "reason"),
    [
        (1.0, 0.0, 1.0, 2.0, "the slope along the direction is 0, not negative"),
        (1.0, 1e-9, 1.0, 2.0, "not negative"),
        (math.nan, -1.0, 1.0, 2.0, "not finite"),
        (1.0, -math.inf, 1.0, 2.0, "not finite"),
        (1.0, -1.0, 0.0, 2.0, "first step is 0"),
        (1.0, -1.0, math.nan, 2.0, "first step is nan"),
        (1.0, -1.0, 1.0, 0.0, "the longest is 0"),
        (1.0, -1.0, 1.0, math.nan, "the longest is nan"),
        (1.0, -1.0, math.inf, math.inf, "first step is inf"),
    ],
)
@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_that_cannot_begin_says_why(
    search: LineSearch, value: float, slope: float, first_step: float, most: float, reason: str
) -> None:
    state = search.begin(value, slope, first_step, most)
    assert reason in state.reason
    assert search.advance(state, 0.0, 0.0) == (state, Verdict.FAIL)


@pytest.mark.parametrize("search", SEARCHES)
def test_the_longest_step_is_accepted_where_the_function_still_goes_down(search: LineSearch) -> None:
    steps, state, verdict = run(search, lambda a: (-a, -1.0), 5.0, 3.0)
    assert (steps, state.step, verdict) == ([3.0], 3.0, Verdict.ACCEPT)
    steps, state, verdict = run(search, lambda a: (-a, -1.0), 1.0, 3.0)
    assert state.best.step == state.step == steps[-1] and verdict is Verdict.ACCEPT


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("search", SEARCHES)
def test_steps_are_shortened_where_the_function_is_not_finite(search: LineSearch, bad: float) -> None:
    for edge in (1e-4, 0.3, 0.9, 7.0):
        for function in (
            lambda a, edge=edge: ((a - edge / 3) ** 2, 2 * (a - edge / 3)) if a < edge else (bad, bad),
            lambda a, edge=edge: (-a, -1.0) if a < edge else (0.0, bad),
            lambda a, edge=edge: (
                (-math.log(edge - a) - 9 * a / edge, 1 / (edge - a) - 9 / edge) if a < edge else (bad, 0.0)
            ),
        ):
            steps, state, verdict = run(search, function, 1.0)
            assert verdict is Verdict.ACCEPT, state.reason
            assert 0 < state.step < edge and function(state.step)[0] < function(0.0)[0]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_function_that_is_finite_nowhere_and_a_wrong_slope_end_the_search(search: LineSearch) -> None:
    steps, state, verdict = run(search, lambda a: (1.0, -1.0) if a == 0 else (math.nan, -1.0), 1.0)
    assert verdict is Verdict.FAIL and "still not finite" in state.reason and "value nan" in state.reason
    assert state.best.step == 0 and len(steps) == 11
    steps, state, verdict = run(search, lambda a: (1.0 + a, -1.0), 1.0)
    assert verdict is Verdict.FAIL and state.reason and state.best.step == 0 and len(steps) <= search.maxls


@pytest.mark.parametrize("search", SEARCHES)
def test_numbers_near_the_largest_do_no_harm(search: LineSearch) -> None:
    for huge in (1e150, 1e300, 8e307):
        steps, state, verdict = run(search, lambda a, huge=huge: (huge * (a - 0.4) ** 2, 2 * huge * (a - 0.4)), 1.0)
        assert verdict is Verdict.ACCEPT and all(map(math.isfinite, steps))
        steps, state, verdict = run(
            search, lambda a, huge=huge: (a * a - a, 2 * a - 1) if a < 0.3 else (huge * (a - 0.1), huge), 1.0
        )
        assert verdict is Verdict.ACCEPT and all(map(math.isfinite, steps))


@pytest.mark.parametrize("search", SEARCHES)
def test_states_keep_every_bit_and_refuse_what_is_none(search: LineSearch) -> None:
    state = search.begin(0.1, -1 / 3, 5e-324, math.inf)
    metadata = json.loads(json.dumps(state.to_metadata()))
    assert search.restore(metadata) == state and type(search.restore(metadata)) is type(state)
    odd = json.loads(json.dumps({**metadata, "wall": math.nan, "start": [-0.0, math.inf, math.nan]}))
    again = search.restore(odd)
    assert math.isnan(again.wall) and math.copysign(1, again.start.step) == -1 and math.isnan(again.start.slope)
    with pytest.raises(ValueError, match="start is missing"):
        search.restore({name: value for name, value in metadata.items() if name != "start"})
    with pytest.raises(ValueError, match="best=.*Trial"):
        search.restore({**metadata, "best": [1.0]})
    with pytest.raises(ValueError, match="step='x'"):
        search.restore({**metadata, "step": "x"})
