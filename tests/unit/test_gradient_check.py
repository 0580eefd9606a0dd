"""The Taylor test passes right gradients and no wrong ones, and says what is wrong; so does the dot-product test."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard
from mpishard.backend.random import uniform_in_box

Array = np.ndarray
A = np.random.default_rng(1).standard_normal((40, 30))


def waves(x: Array) -> tuple[float, Array]:
    r = np.sin(A.astype(x.dtype) @ x)
    return 0.5 * r @ r, A.T.astype(x.dtype) @ (np.cos(A.astype(x.dtype) @ x) * r)


def waves_hessian(x: Array, p: Array) -> Array:
    return A.T @ (np.cos(2 * (A @ x)) * (A @ p))


def rosenbrock(x: Array) -> tuple[float, Array]:
    g = np.zeros_like(x)
    g[:-1] = -400 * x[:-1] * (x[1:] - x[:-1] ** 2) - 2 * (1 - x[:-1])
    g[1:] += 200 * (x[1:] - x[:-1] ** 2)
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum(), g


RIGHT: dict[str, Callable[[Array], Any]] = {
    "waves": waves,
    "rosenbrock": rosenbrock,
    "quartic": lambda x: ((x**4).sum(), 4 * x**3),
    "linear": lambda x: (x.sum(), np.ones_like(x)),
    "constant": lambda x: (3.0, 0 * x),
    "cosh": lambda x: (np.cosh(3 * x).sum(), 3 * np.sinh(3 * x)),
    "offset": lambda x: (1e2 + np.exp(x).sum(), np.exp(x)),
    "hinge": lambda x: ((np.maximum(x, 0) ** 2).sum(), 2 * np.maximum(x, 0)),
    "absolute": lambda x: (np.abs(x).sum(), np.sign(x)),
    "noisy": lambda x: (round(float(np.exp(x).sum()), 7), np.exp(x)),
}


def one_wrong(gradient: Array) -> Array:
    gradient = gradient.copy()
    gradient[7] += 0.3 * np.abs(gradient).mean()
    return gradient


WRONG: dict[str, Callable[[Array, Array], Array]] = {
    "twice": lambda x, g: 2 * g,
    "sign": lambda x, g: -g,
    "a term is missing": lambda x, g: g - 0.1 * x,
    "an element": lambda x, g: one_wrong(g),
    "in another order": lambda x, g: np.roll(g, 1),
    "zero": lambda x, g: 0 * g,
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", RIGHT)
def test_right_gradients_pass(name: str, dtype: type) -> None:
    for seed in range(8):
        x = np.random.default_rng(seed).standard_normal(30).astype(dtype)
        check = mpishard.check_gradient(RIGHT[name], x, seed=seed, disp=False)
        assert check, f"seed {seed}\n{check}"


@pytest.mark.parametrize("error", WRONG)
def test_wrong_gradients_fail(error: str) -> None:
    for name in ("waves", "rosenbrock", "quartic", "cosh"):
        for seed in range(4):
            x = np.random.default_rng(seed).standard_normal(30)

            def wrong(y: Array, name: str = name) -> tuple[float, Array]:
                value, gradient = RIGHT[name](y)
                return value, WRONG[error](y, gradient)

            check = mpishard.check_gradient(wrong, x, seed=seed, disp=False)
            assert not check, f"{name}, seed {seed}\n{check}"
            assert "the gradient is wrong" in check.verdict
            if error in ("twice", "sign", "zero", "in another order"):  # as precise as float32 can be
                assert not mpishard.check_gradient(wrong, x.astype(np.float32), seed=seed, disp=False), (
                    f"{name}, {seed}"
                )


def test_values_that_hide_the_remainder_are_no_pass() -> None:
    def shifted(x: Array) -> tuple[float, Array]:
        return 1e6 + (x**4).sum(), 4 * x**3

    x = np.linspace(0.5, 1.5, 30)
    check = mpishard.check_gradient(shifted, x.astype(np.float32), disp=False)
    assert not check and "cannot tell" in check.verdict
    assert mpishard.check_gradient(shifted, x, disp=False)


def test_the_verdict_says_how_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    x = np.linspace(0.5, 1.5, 30)
    check = mpishard.check_gradient(lambda y: ((y**4).sum(), -4 * y**3), x)
    assert "-1 times as much" in check.verdict and check.order == pytest.approx(1, abs=0.05)
    assert check.quotient == pytest.approx(-check.derivative, rel=1e-6) and check.error > 1
    assert "FAIL" in capsys.readouterr().out


def test_functions_that_are_not_smooth_say_so() -> None:
    zeros = np.zeros(30)
    kink = mpishard.check_gradient(lambda x: (np.abs(x).sum(), np.sign(x)), zeros, disp=False)
    assert not kink and "kink" in kink.verdict
    jump = mpishard.check_gradient(lambda x: (float(x[0] > 0) + x @ x, 2 * x), zeros, disp=False)
    assert not jump and "jump" in jump.verdict


def test_functions_that_round_to_float32_are_known() -> None:
    def half(x: Array, factor: float) -> tuple[float, Array]:
        return float((x.astype(np.float32) ** 4).sum(dtype=np.float32)), factor * x**3

    x = np.random.default_rng(0).standard_normal(50)
    assert mpishard.check_gradient(lambda y: half(y, 4), x, disp=False)
    assert not mpishard.check_gradient(lambda y: half(y, 5), x, disp=False)


def test_hessian_products() -> None:
    x = np.random.default_rng(0).standard_normal(30)
    check = mpishard.check_gradient(waves, x, hessp=waves_hessian, disp=False)
    assert check and [round(test.order) for test in check.tests] == [2, 3, 2]
    gauss_newton = mpishard.check_gradient(
        waves, x, hessp=lambda x, p: A.T @ (np.cos(A @ x) ** 2 * (A @ p)), disp=False
    )
    assert not gauss_newton and "the Hessian product does not" in gauss_newton.verdict
    assert "symmetric" not in gauss_newton.verdict
    twisted = np.zeros((30, 30))
    twisted[3, 4], twisted[4, 3] = 1, -1  # p'Hp does not see it
    check = mpishard.check_gradient(waves, x, hessp=lambda x, p: waves_hessian(x, p) + twisted @ p, disp=False)
    assert not check and re.search(r"not symmetric: w'\(H d\) = \S+, d'\(H w\) = ", check.verdict)


def test_gradients_apart_and_points_outside_of_the_domain() -> None:
    with np.errstate(invalid="ignore"):
        check = mpishard.check_gradient(
            lambda x: float(np.log(x).sum()), [0.01, 5.0], jac=lambda x: 1 / x, direction=[1.0, 1.0], disp=False
        )
        down = mpishard.check_gradient(
            lambda x: float(np.log(x).sum()), [0.01, 5.0], jac=lambda x: 1 / x, direction=[-1.0, 1.0], disp=False
        )
    assert check and down and np.isnan(down.tests[0].remainders[0])


def problem(factor: float = 1.0, **options: Any) -> mpishard.OptimizationProblem[Any]:
    targets = np.random.default_rng(5).standard_normal((24, 30))

    def function(x: Any, samples: Array, gradients: Any) -> float:
        residual = np.tanh(x) - targets[samples]
        gradients += factor * ((1 - np.tanh(x) ** 2) * residual).sum(axis=0)
        return 0.5 * float((residual**2).sum())

    return mpishard.OptimizationProblem(function, np.linspace(-1, 1, 30), samples=24, batch_size=12, steps=1, **options)


def test_problems_are_checked() -> None:
    start = problem().start.copy()
    check = mpishard.check_gradient(problem(micro_batch_size=5), disp=False)
    assert check and np.array_equal(problem().start, start)
    assert not mpishard.check_gradient(problem(1.01), disp=False)
    few = mpishard.check_gradient(problem(), samples=[3, 4], disp=False)
    assert few and few.value != check.value


def test_problems_with_names_are_checked() -> None:
    parameters = mpishard.FlatParameters(
        [mpishard.ParameterSpec("k", (3, 4)), mpishard.ParameterSpec("b", (4,))], np.float64
    )
    parameters.flat[...] = np.linspace(0.1, 1, 16)
    before = parameters.flat.copy()

    def function(p: Any, samples: Array, gradients: Any) -> float:
        gradients["k"] += 3 * p["k"] ** 2 * p["b"] * len(samples)
        gradients["b"] += (p["k"] ** 3).sum(axis=0) * len(samples)
        return float((p["k"] ** 3 @ p["b"]).sum() * len(samples))

    named = mpishard.OptimizationProblem(function, parameters, samples=6, batch_size=4, steps=1)
    assert mpishard.check_gradient(named, disp=False)
    assert np.array_equal(parameters.flat, before) and not parameters.gradients.has_content


def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "gradient.png"
    mpishard.check_gradient(waves, np.ones(30), hessp=waves_hessian, plot=path, disp=False)
    mpishard.check_gradient(lambda x: (x.sum(), np.ones(3)), np.ones(3), plot=path, disp=False)
    assert path.read_bytes()[:4] == b"\x89PNG"


def raises(*arguments: Any, **options: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        mpishard.check_gradient(*arguments, disp=False, **options)
    return str(caught.value)


def test_bad_input() -> None:
    x = np.ones(30)
    assert "(value, gradient)" in raises(lambda x: 3.0, x)
    assert "has 29 elements" in raises(lambda x: (0.0, x[1:]), x)
    assert "30 elements of the gradient are not finite" in raises(lambda x: (0.0, np.nan * x), x)
    assert "direction is 0" in raises(waves, x, direction=0 * x)
    assert "30 finite elements" in raises(waves, x, direction=x[1:])
    assert "needs x" in raises(waves)
    assert "leave x" in raises(problem(), x)
    assert "reduction" in raises(waves, x, reduction="mean")
    assert "descending" in raises(waves, x, steps=[0.1, 0.2, 0.3])
    assert "mesh=3" in raises(waves, x, mesh=3)


def test_random_numbers_do_not_depend_on_the_boxes() -> None:
    whole = uniform_in_box(3, "k", (5, 4, 6), [(0, 5), (0, 4), (0, 6)])
    assert np.array_equal(uniform_in_box(3, "k", (5, 4, 6), [(1, 3), (2, 4), (0, 5)]), whole[1:3, 2:4, :5])
    assert uniform_in_box(3, "k", (), []).shape == () and abs(whole).max() <= 1 and abs(whole.mean()) < 0.15
    assert not np.array_equal(whole, uniform_in_box(4, "k", (5, 4, 6), [(0, 5), (0, 4), (0, 6)]))


@pytest.mark.parametrize(("dtype", "close"), [(np.float64, 1e-12), (np.float32, 1e-4)])
def test_adjoints(dtype: type, close: float, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.zeros(30, dtype), np.zeros((8, 5), dtype)

    def forward(x: Array) -> Array:
        return (A.astype(dtype) @ x).reshape(8, 5)

    right = mpishard.check_adjoint(forward, lambda y: A.T.astype(dtype) @ y.reshape(-1), x, y)
    assert right and right.error < close and "PASS" in capsys.readouterr().out
    for wrong in (lambda y: -A.T @ y.reshape(-1), lambda y: A.T @ y.T.reshape(-1)):
        assert not mpishard.check_adjoint(forward, wrong, x, y, disp=False)
    with pytest.raises(ValueError, match="adjoint gives shape"):
        mpishard.check_adjoint(forward, lambda y: y, x, y, disp=False)


@pytest.mark.parametrize("scale", [1e300, 1e200, 1e-200, 1e-300])
def test_values_near_the_ends_of_float64(scale):
    def function(x, factor=1.0):
        return scale * float((x**4).sum()), factor * scale * 4 * x**3

    assert mpishard.check_gradient(function, np.ones(3), disp=False)
    assert not mpishard.check_gradient(lambda x: function(x, 1.001), np.ones(3), disp=False)
