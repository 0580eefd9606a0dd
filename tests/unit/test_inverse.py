"""Gradient checks, terms on grids, the adjoint of time steps, and the results of many runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mpishard
from mpishard import SmoothedTotalVariation, Tikhonov
from mpishard.backend.random import uniform_in_box
from mpishard.inverse.ensemble import _SavedResults
from mpishard.inverse.regularization import RegularizationTerm
from mpishard.inverse.time_steps import backward_in_time
from mpishard.io.files import LARGEST_NOTE

# The Taylor test passes right gradients and no wrong ones, and says what is wrong; so does the dot-product test.

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
    "float64 of float32": lambda x: (1e3 / 3 + 1e-3 * (x**4).sum(dtype=np.float64), 4e-3 * x**3),
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


def hidden(x: Array) -> tuple[float, Array]:
    """Values so large that they hide the remainder in float32."""
    return 1e6 + (x**4).sum(), 4 * x**3


LINE = np.linspace(0.5, 1.5, 30)


@pytest.mark.parametrize(
    ("function", "x", "words"),
    [
        (hidden, LINE.astype(np.float32), "cannot tell"),
        (lambda x: (np.abs(x).sum(), np.sign(x)), np.zeros(30), "kink"),
        (lambda x: (float(x[0] > 0) + x @ x, 2 * x), np.zeros(30), "jump"),
        (lambda x: ((x**4).sum(), -4 * x**3), LINE, "-1 times as much"),
    ],
    ids=["hidden", "kink", "jump", "sign"],
)
def test_the_verdict_says_what_is_wrong(function: Any, x: Array, words: str, capsys: Any) -> None:
    check = mpishard.check_gradient(function, x)
    assert not check and words in check.verdict and "FAIL" in capsys.readouterr().out
    if "times" in words:
        assert check.order == pytest.approx(1, abs=0.05) and check.error > 1
        assert check.quotient == pytest.approx(-check.derivative, rel=1e-6)


def test_functions_that_round_to_float32_are_known() -> None:
    def half(x: Array, factor: float) -> tuple[float, Array]:
        return float((x.astype(np.float32) ** 4).sum(dtype=np.float32)), factor * x**3

    x = np.random.default_rng(0).standard_normal(50)
    assert mpishard.check_gradient(lambda y: half(y, 4), x, disp=False)
    assert not mpishard.check_gradient(lambda y: half(y, 5), x, disp=False)
    assert mpishard.check_gradient(hidden, LINE, disp=False)


def test_hessian_products() -> None:
    def check(product: Callable[[Array, Array], Array]) -> Any:
        return mpishard.check_gradient(waves, x, hessp=product, disp=False)

    x = np.random.default_rng(0).standard_normal(30)
    right = check(waves_hessian)
    assert right and [round(test.order) for test in right.tests] == [2, 3, 2]
    gauss_newton = check(lambda x, p: A.T @ (np.cos(A @ x) ** 2 * (A @ p)))
    assert not gauss_newton and "the Hessian product does not" in gauss_newton.verdict
    assert "symmetric" not in gauss_newton.verdict
    twisted = np.zeros((30, 30))
    twisted[3, 4], twisted[4, 3] = 1, -1  # p'Hp does not see it
    wrong = check(lambda x, p: waves_hessian(x, p) + twisted @ p)
    assert not wrong and re.search(r"not symmetric: w'\(H d\) = \S+, d'\(H w\) = ", wrong.verdict)
    # Rounding hides the third order of these values, and not that of their gradients.
    for factor in (1, 1.1):
        given = {"hessp": lambda x, p, factor=factor: factor * p, "disp": False}
        assert bool(mpishard.check_gradient(lambda x: (1e3 + x @ x / 2, x), np.ones(30, "f"), **given)) == (factor == 1)


def test_gradients_apart_and_points_outside_of_the_domain() -> None:
    for along in ([1.0, 1.0], [-1.0, 1.0]):
        given = {"jac": lambda x: 1 / x, "direction": along, "disp": False}
        with np.errstate(invalid="ignore"):
            check = mpishard.check_gradient(lambda x: float(np.log(x).sum()), [0.01, 5.0], **given)
        assert check and (along[0] > 0 or np.isnan(check.tests[0].remainders[0]))


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


def test_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "gradient.png"
    mpishard.check_gradient(waves, np.ones(30), hessp=waves_hessian, plot=path, disp=False)
    mpishard.check_gradient(lambda x: (x.sum(), np.ones(3)), np.ones(3), plot=path, disp=False)
    with pytest.raises(TypeError, match="plot=3"):
        mpishard.check_gradient(waves, np.ones(30), plot=3, disp=False)
    assert path.read_bytes()[:4] == b"\x89PNG"


ONES = np.ones(30)


@pytest.mark.parametrize(
    ("function", "given", "words"),
    [
        (lambda x: 3.0, {}, r"\(value, gradient\)"),
        (lambda x: (0.0, x[1:]), {}, "has 29 elements"),
        (lambda x: (0.0, np.nan * x), {}, "30 elements .*not finite"),
        (waves, {"direction": 0 * ONES}, "direction is 0"),
        (waves, {"direction": ONES[1:]}, "30 finite elements"),
        (waves, {"x": None}, "needs x"),
        (problem(), {}, "leave x"),
        (waves, {"reduction": "mean"}, "reduction"),
        (waves, {"steps": [0.1, 0.2, 0.3]}, "descending"),
        (waves, {"mesh": 3}, "mesh=3"),
    ],
)
def test_bad_input(function: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        mpishard.check_gradient(function, **{"x": ONES, "disp": False, **given})


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
    with pytest.raises(TypeError, match=r"adjoint=array.* must be a function"):
        mpishard.check_adjoint(forward, A.T, x, y, disp=False)
    for given in ((forward, wrong, x + 0j, y), (forward, wrong, x, y + 0j), (forward, lambda y: x + 0j, x, y)):
        with pytest.raises(TypeError, match="is complex"):
            mpishard.check_adjoint(*given, disp=False)


@pytest.mark.parametrize(("x", "what"), [(np.zeros(3, "D"), "x of rank 0"), (np.zeros(3), "what forward gives")])
def test_adjoints_of_complex_operators_are_refused(x: Array, what: str) -> None:
    """Of which one, without the conjugate, has the same real part for real vectors."""
    with pytest.raises(TypeError, match=f"{what} is complex: .*pairs of real numbers"):
        mpishard.check_adjoint(np.fft.fft, np.fft.fft, x, np.zeros(3), disp=False)


def test_an_operator_that_rounds_to_float32() -> None:
    half = A.astype(np.float32)
    given = lambda x: half @ x.astype(np.float32), lambda y: half.T @ y.astype(np.float32)
    check = mpishard.check_adjoint(*given, np.zeros(30), np.zeros(40), disp=False)
    assert check and check.error > 1e-12


@pytest.mark.parametrize("scale", [1e300, 1e200, 1e-200, 1e-300])
def test_values_near_the_ends_of_float64(scale):
    def function(x, factor=1.0):
        return scale * float((x**4).sum()), factor * scale * 4 * x**3

    assert mpishard.check_gradient(function, np.ones(3), disp=False)
    assert not mpishard.check_gradient(lambda x: function(x, 1.001), np.ones(3), disp=False)

    def forward(x):
        return scale * (A @ x)

    for factor in (1.0, 1.001):
        backward = lambda y, factor=factor: factor * scale * (A.T @ y)  # noqa: E731
        check = mpishard.check_adjoint(forward, backward, np.zeros(30), np.zeros(40), disp=False)
        assert check.passed == (factor == 1) and scale < abs(check.forward) < 1e3 * scale


def test_an_operator_and_its_adjoint_may_share_an_array():
    square, shared = A[:30], np.empty(30)
    given = lambda x: np.matmul(square, x, out=shared), lambda y: np.matmul(square.T, y, out=shared)
    assert mpishard.check_adjoint(*given, np.zeros(30), np.zeros(30), disp=False)


# Values, gradients and Hessian products of terms on grids, with masks, weights and references; they count once.

SHAPES = [(7,), (5, 6), (4, 3, 5), (1, 4), (2, 2)]


def terms(shape: tuple[int, ...], **options: Any) -> list[RegularizationTerm]:
    options = {"weight": 1.7, "spacing": [0.5, 2.0, 0.25][: len(shape)], "shape": shape, **options}
    return [*(Tikhonov(order=order, **options) for order in (0, 1, 2)), SmoothedTotalVariation(epsilon=0.3, **options)]


def extras(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(2)
    weights = {"weight": rng.random(shape) + 0.5}
    return [{}, {"mask": rng.random(shape) > 0.2}, {"reference": rng.standard_normal(shape)}, weights]


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_and_hessian_products(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).standard_normal(int(np.prod(shape)))
    for options in extras(shape):
        for term in terms(shape, **options):
            check = mpishard.check_gradient(term.value_and_gradient, x, hessp=term.product, disp=False)
            assert check, f"{term}\n{check}"


def test_values() -> None:
    x = np.array([[0.0, 1.0, 4.0], [2.0, 2.0, 2.0]])
    assert Tikhonov(order=0, weight=2.0).value_and_gradient(x)[0] == 29
    assert Tikhonov(order=0, weight=2.0, reference=x - 3).value_and_gradient(x)[0] == 54
    weights = np.array([[2.0, 0, 0], [0, 0, 2.0]])
    assert Tikhonov(order=0, weight=weights).value_and_gradient(x)[0] == 4
    # Along the first dimension 2, 1, -2; along the second 1, 3, 0, 0.
    assert Tikhonov(weight=2.0).value_and_gradient(x)[0] == 19
    # Spacings 2 and 0.5: (4 + 1 + 4) / 4 + (1 + 9) / 0.25, times a volume of 1.
    assert Tikhonov(weight=2.0, spacing=(2, 0.5)).value_and_gradient(x)[0] == 42.25
    assert Tikhonov(order=2, weight=2.0).value_and_gradient(x)[0] == 4
    lengths = np.sqrt(np.array([4 + 1, 1 + 9, 4, 0, 0, 0]) + 0.01) - 0.1
    value = SmoothedTotalVariation(epsilon=0.1, weight=3.0).value_and_gradient(x)[0]
    assert value == pytest.approx(3 * lengths.sum(), rel=1e-14)
    mask = np.array([[True, True, True], [True, False, True]])
    assert Tikhonov(weight=2.0, mask=mask).value_and_gradient(x)[0] == 4 + 4 + 1 + 9


def test_float32_and_flat_arrays_keep_their_kind() -> None:
    x = np.random.default_rng(1).standard_normal((5, 6)).astype(np.float32)
    for term in terms((5, 6)):
        value, gradient = term.value_and_gradient(x.reshape(-1))
        assert gradient.dtype == np.float32 and gradient.shape == (30,) and isinstance(value, float)
        assert term.product(x, x).shape == (5, 6)
        wide = term.value_and_gradient(x.astype(np.float64))
        assert value == wide[0] and np.array_equal(gradient, wide[1].astype(np.float32).reshape(-1))


@pytest.mark.parametrize("library", ["jax.numpy", "torch"])
def test_arrays_of_a_term_may_be_of_jax_or_pytorch(library: str) -> None:
    asarray, x = pytest.importorskip(library).asarray, np.arange(4.0)
    given = {"weight": [1.0, 2, 3, 4], "reference": [0.5, 0, 1, 2], "mask": [True, True, False, True]}
    others = {name: asarray(values) for name, values in given.items()}
    found = [Tikhonov(order=0, **arrays).value_and_gradient(x) for arrays in (given, others)]
    assert found[0][0] == found[1][0] and np.array_equal(found[0][1], found[1][1])
    assert Tikhonov(weight=asarray(2.0)).weight == 2


def test_slabs_by_an_exchange_of_ones_own_have_the_bits_of_the_whole_field() -> None:
    whole, direction = np.random.default_rng(1).standard_normal((2, 11, 4))
    options: dict[str, Any] = {"mask": np.random.default_rng(2).random((11, 4)) > 0.2, "reference": 0.1 * whole}
    fields = [whole - 0.1 * whole, options["mask"] * 1.0, direction]  # that are asked for
    for order, full in enumerate(terms((11, 4), **options)):
        (value, gradient), product, total = full.value_and_gradient(whole), full.product(whole, direction), 0.0
        for start, stop in itertools.pairwise([0, 2, 5, 7, 11]):

            def neighbours(own: Array, start: int = start, stop: int = stop, rows: int = full.halo) -> Any:
                field = next(field for field in fields if np.array_equal(field[start:stop], own))
                before, after = field[start - rows : start], field[stop : stop + rows]
                return (before if start else None), (after if stop < 11 else None)

            own = {name: array[start:stop] for name, array in options.items()}
            part = terms((stop - start, 4), **own, exchange=neighbours)[order]
            added, slope = part.value_and_gradient(whole[start:stop])
            total += added
            assert np.array_equal(slope, gradient[start:stop])
            assert np.array_equal(part.product(whole[start:stop], direction[start:stop]), product[start:stop])
        assert total == pytest.approx(value, rel=1e-14)


def misfit(x: Array) -> tuple[float, Array]:
    return 0.5 * x @ x, x


def test_a_function_with_terms() -> None:
    x = np.random.default_rng(1).standard_normal(30)
    both = mpishard.regularized(misfit, terms((5, 6)))
    assert mpishard.check_gradient(both, x, disp=False)
    expected = misfit(x)[0] + sum(term.value_and_gradient(x)[0] for term in terms((5, 6)))
    assert both(x)[0] == pytest.approx(expected, rel=1e-15)
    smooth = mpishard.minimize(mpishard.regularized(lambda y: misfit(y - x), Tikhonov(weight=1e6)), 0 * x)
    assert smooth.success and np.ptp(smooth.x) < 1e-3


@pytest.mark.parametrize("nested", [False, True])
def test_terms_take_the_shape_of_x0(nested: bool) -> None:
    """Functions get flat points of an array of several dimensions."""
    goal, size = np.random.default_rng(1).standard_normal((5, 6)), 30
    term, other = Tikhonov(weight=0.5, spacing=(0.5, 2.0)), SmoothedTotalVariation(epsilon=0.3)

    def near(x: Array) -> tuple[float, Array]:
        assert x.shape == (size,)
        return misfit(x - goal.reshape(-1))

    def function(*terms: Any) -> Any:
        if not nested:
            return mpishard.regularized(near, terms)
        return mpishard.regularized(mpishard.regularized(near, [mpishard.L1(0.1), *terms[:1]]), terms[1:])

    start, options = np.zeros((5, 6)), {"maxiter": 5}
    known = function(*(dataclasses.replace(each, shape=(5, 6)) for each in (term, other)))
    expected = mpishard.minimize(known, start.reshape(-1), options=options)
    found = mpishard.minimize(function(term, other), start, options=options)
    assert np.array_equal(found.x.reshape(-1), expected.x) and found.fun == expected.fun
    values = [
        mpishard.check_gradient(*each, disp=False).value for each in ((known, goal), (function(term, other), goal))
    ]
    assert values[0] == values[1] > 0
    if not nested:
        none = {"constraints": lambda x: x[:1], "adjoint": lambda x, v: v * np.eye(size)[0]}
        ends = [mpishard.augmented_lagrangian(fun, start, **none).x for fun in (known, function(term, other))]
        assert np.array_equal(*ends)


def test_args_are_not_taken_for_samples() -> None:
    """The samples of a function with terms are its second argument, and `args` would be there."""
    given = {"fun": mpishard.regularized(lambda x, a: misfit(x - a), Tikhonov()), "x0": np.zeros(4)}
    for args in ((np.ones(4),), np.ones(4)):
        with pytest.raises(ValueError, match="args= .*regularized"):
            mpishard.minimize(**given, args=args)


def test_a_term_counts_once_however_many_samples_there_are() -> None:
    data = np.random.default_rng(0).standard_normal((12, 30))

    def function(x: Array, samples: Array, gradients: Array) -> float:
        gradients += (x - data[samples]).sum(axis=0)
        return 0.5 * float(((x - data[samples]) ** 2).sum())

    term = SmoothedTotalVariation(epsilon=0.3, weight=0.6, shape=(5, 6))
    x = np.random.default_rng(1).standard_normal(30)
    wanted = function(x, np.arange(12), np.zeros(30)) / 12 + term.value_and_gradient(x)[0]
    function = mpishard.regularized(function, term)
    for micro in (None, 5, 1):
        options = {"samples": 12, "batch_size": 12, "micro_batch_size": micro, "steps": 1}
        problem = mpishard.OptimizationProblem(function, x, **options)
        check = mpishard.check_gradient(problem, disp=False)
        assert check and check.value == pytest.approx(wanted, rel=1e-14)


def test_problems_and_terms_of_named_tensors() -> None:
    specs = [mpishard.ParameterSpec("b", (5,)), mpishard.ParameterSpec("k", (4, 5))]
    parameters = mpishard.FlatParameters(specs, np.float64)
    parameters.flat[...] = np.random.default_rng(1).standard_normal(25)
    before, term = parameters.flat.copy(), Tikhonov(name="k", weight=3.0)

    def function(p: Any, samples: Array, gradients: Any) -> float:
        gradients["k"] += 3 * p["k"] ** 2 * p["b"] * len(samples)
        gradients["b"] += (p["k"] ** 3).sum(axis=0) * len(samples)
        return float((p["k"] ** 3 @ p["b"]).sum() * len(samples))

    for inner in (function, mpishard.regularized(function, [term])):
        problem = mpishard.OptimizationProblem(inner, parameters, samples=6, batch_size=4, steps=1)
        assert mpishard.check_gradient(problem, disp=False)
        assert np.array_equal(parameters.flat, before) and not parameters.gradients.has_content
    plain = mpishard.regularized(lambda p: (0.0, np.zeros(25)), term)
    assert mpishard.check_gradient(plain, parameters, disp=False)
    with pytest.raises(ValueError, match="name of one of them"):
        mpishard.regularized(lambda p: (0.0, np.zeros(25)), Tikhonov())(parameters)


def test_small_differences_keep_their_digits_in_total_variation() -> None:
    x, epsilon = np.array([0.0, 1e-9, 0.0]), 1.0
    value, _ = SmoothedTotalVariation(epsilon=epsilon).value_and_gradient(x)
    assert value == pytest.approx(1e-18, rel=1e-12)
    assert SmoothedTotalVariation(epsilon=1e-3).value_and_gradient(x * 1e9)[0] == pytest.approx(1.998001, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_nan(bad: float) -> None:
    x = np.ones((5, 6))
    x[2, 3] = bad
    for term in terms((5, 6)):
        with np.errstate(invalid="ignore"):
            assert np.isnan(term.value_and_gradient(x)[0])


def test_bad_input_of_regularization() -> None:
    x = np.zeros((4, 5))
    for call, message in (
        (lambda: Tikhonov(order=3), "order=3"),
        (lambda: Tikhonov(weight=-1), "weight=-1"),
        (lambda: Tikhonov(weight=np.array([1.0, -2.0])), "weight is from -2 to 1"),
        (lambda: Tikhonov(weight=np.array([1.0, np.nan])), "weight is from nan to nan"),
        (lambda: Tikhonov(weight=[1.0, np.inf]), "weight is from 1 to inf"),
        (lambda: Tikhonov(spacing=(1, 0)), "spacing=0"),
        (lambda: SmoothedTotalVariation(epsilon=0), "epsilon=0"),
        (lambda: Tikhonov(spacing=(1, 1, 1)).value_and_gradient(x), "3 numbers"),
        (lambda: Tikhonov(shape="ab"), "Tikhonov: shape='a.*whole number"),
        (lambda: Tikhonov(shape=(2.0, 3)), "Tikhonov: shape=2.0 .*whole number"),
        (lambda: Tikhonov(weight=["1", "2"]), "Tikhonov: weight=.*real"),
        (lambda: Tikhonov().value_and_gradient(x + 1j), "Tikhonov is for real numbers"),
        (
            lambda: mpishard.BiLaplacianPrior((4,), correlation_length=1.0).precision(np.ones(4) + 1j),
            "is for real numbers",
        ),
        (lambda: Tikhonov(reference="a").value_and_gradient(x), "Tikhonov: reference=.*real"),
        (lambda: Tikhonov(reference=x + 1j).value_and_gradient(x), "Tikhonov: reference=.*real"),
        (lambda: Tikhonov(mask=x.astype(object)).value_and_gradient(x), "Tikhonov: mask=.*real"),
        (lambda: Tikhonov(shape=x.shape[::-1]).value_and_gradient(x), "Tikhonov: shape=.*leave shape= out"),
        (
            lambda: mpishard.minimize(mpishard.regularized(misfit, Tikhonov(shape=x.shape[::-1])), x),
            "Tikhonov: shape=.*leave shape= out",
        ),
        (
            lambda: mpishard.minimize(mpishard.regularized(np.sum, Tikhonov()), x),
            "regularized adds .* returned a float",
        ),
        (
            lambda: mpishard.minimize(mpishard.regularized(np.sum, Tikhonov()), x, jac=np.ones_like),
            "jac=function.*both",
        ),
        (
            lambda: mpishard.minimize(mpishard.regularized(misfit, Tikhonov(name="speed")), x),
            "without names, and name='speed'",
        ),
        (lambda: mpishard.regularized(misfit, 3), "terms"),
        (lambda: mpishard.regularized(misfit, Tikhonov(), reduction="sum"), "with a mesh"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_a_term_of_an_array_in_a_tree():
    def fun(x):
        return 0.0, {"a": [np.zeros(3), np.zeros(2)]}

    x = {"a": [np.array([0.0, 1.0, 3.0]), np.ones(2)]}
    value, gradient = mpishard.regularized(fun, Tikhonov(weight=2.0, name="a.0"))(x)
    assert value == 5.0 and gradient["a"][0].tolist() == [-2, -2, 4] and not gradient["a"][1].any()
    with pytest.raises(ValueError, match="'b'; .*a.0, a.1"):
        mpishard.regularized(fun, Tikhonov(weight=2.0, name="b"))(x)


# The adjoint of time steps from few stored states: the bits of storing all of them, and as few steps as can be.


@functools.cache
def fewest(steps: int, states: int) -> int:
    """Forward steps that must be taken if the adjoint of a step needs the state before it, the first one stored."""
    if steps <= 1:
        return 0
    if states == 1:
        return steps * (steps - 1) // 2
    return min(first + fewest(first, states) + fewest(steps - first, states - 1) for first in range(1, steps))


class Waves:
    """A nonlinear recurrence with parameters, its adjoint, and a count of what is computed and stored."""

    def __init__(self) -> None:
        self.parameters = np.linspace(0.1, 0.9, 5)
        self.gradient = np.zeros(5)
        self.steps = 0
        self.order: list[int] = []

    def forward(self, state: Array, step: int) -> Array:
        self.steps += 1
        state += 0.1 * np.sin(self.parameters * state + step)
        return state

    def backward(self, state: Array, adjoint: Array, step: int) -> Array:
        self.order.append(step)
        slope = 0.1 * np.cos(self.parameters * state + step) * adjoint
        self.gradient += slope * state
        return adjoint + self.parameters * slope


def all_stored(start: Array, steps: int) -> tuple[Array, Array]:
    waves, states = Waves(), [start.copy()]
    for step in range(steps):
        states.append(waves.forward(states[-1].copy(), step))
    adjoint = 2 * states[-1]
    for step in reversed(range(steps)):
        adjoint = waves.backward(states[step], adjoint, step)
    return adjoint, waves.gradient


@pytest.mark.pairs(2)
@pytest.mark.parametrize(("steps", "states"), [(1, 1), (2, 1), (9, 1), (10, 3), (31, 4), (40, 39), (40, 100), (100, 5)])
def test_bits_and_number_of_steps(steps: int, states: int) -> None:
    pytest.importorskip("checkpoint_schedules")
    start, waves = np.linspace(-1, 1, 5), Waves()
    adjoint = backward_in_time(waves.forward, waves.backward, start, steps, lambda u: 2 * u, states=states)
    expected, gradient = all_stored(start, steps)
    assert np.array_equal(adjoint, expected) and np.array_equal(waves.gradient, gradient)
    assert np.array_equal(start, np.linspace(-1, 1, 5))
    assert waves.order == list(reversed(range(steps)))
    assert waves.steps == fewest(steps, states) + 1  # and the last step, for the final state


def test_no_more_states_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("checkpoint_schedules")
    alive: set[int] = set()
    most = 0

    class State:
        def __init__(self) -> None:
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

        def __deepcopy__(self, memo: object) -> State:
            return State()

    def forward(state: State, step: int) -> State:
        nonlocal most
        most = max(most, len(alive))
        return state

    start = State()
    backward_in_time(forward, lambda u, a, k: a, start, 50, lambda u: 0, states=4)
    assert most <= 4 + 3  # the start, the state that moves, and the one of the last step


def test_no_steps_and_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backward_in_time(lambda u, k: u, lambda u, a, k: a, 3.0, 0, lambda u: 2 * u, states=1) == 6.0
    with pytest.raises(ValueError, match="states=0"):
        backward_in_time(lambda u, k: u, lambda u, a, k: a, 3.0, 5, lambda u: 2 * u, states=0)
    with pytest.raises(TypeError, match="must be functions"):
        backward_in_time(lambda u, k: u, 3, 3.0, 5, lambda u: 2 * u, states=1)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "checkpoint_schedules", None)
    with pytest.raises(ModuleNotFoundError, match=r"mpishard\[revolve\]"):
        backward_in_time(lambda u, k: u, lambda u, a, k: a, 3.0, 5, lambda u: 2 * u, states=1)


# The corner of an L-curve is found where it is known to be, and bad points are refused.

WEIGHTS = np.logspace(-3, 3, 13)


def hyperbola(weights: Array) -> tuple[Array, Array]:
    """Misfits and terms whose curve (m - 1) (t - 1) = 1 is symmetric about its corner, at weight 1."""
    return 1 + weights, 1 + 1 / weights


def tikhonov(weights: Array) -> tuple[Array, Array]:
    """Norms of residual and solution of a diagonal system with noise, of which Tikhonov's solution has a formula."""
    singular = 10.0 ** -(np.arange(60) / 6)
    data = singular**1.3 + 1e-3 * np.random.default_rng(0).standard_normal(60)
    filtered = singular**2 / (singular**2 + weights[:, None])
    return np.linalg.norm((1 - filtered) * data, axis=1), np.linalg.norm(filtered * data / singular, axis=1)


@pytest.mark.parametrize("count", [3, 5, 13, 25])
def test_the_corner_of_a_symmetric_curve_is_in_its_middle(count: int) -> None:
    weights = np.logspace(-3, 3, count)
    curve = mpishard.l_curve(weights, *hyperbola(weights))
    assert curve.corner == count // 2 and curve.weight == weights[count // 2] and str(curve).count("weight 1:") == 1
    assert curve.angle < np.pi * 7 / 8


def test_the_corner_is_where_the_curvature_is_large() -> None:
    """The weight is within a factor of 10 of that at the largest curvature of the curve of all weights."""
    every = np.logspace(-10, 0, 2001)
    x, y = np.log(tikhonov(every))
    slopes = np.gradient(x), np.gradient(y)
    bends = slopes[0] * np.gradient(slopes[1]) - slopes[1] * np.gradient(slopes[0])
    sharpest = every[5 + np.argmax((bends / np.hypot(*slopes) ** 3)[5:-5])]
    few = np.logspace(-10, 0, 11)
    found = mpishard.l_curve(few, *tikhonov(few)).weight
    assert found is not None and sharpest / 10 < found < sharpest * 10


def test_neither_order_nor_squares_move_the_corner() -> None:
    weights = np.logspace(-10, 0, 11)
    misfits, terms = tikhonov(weights)
    right = mpishard.l_curve(weights, misfits, terms)
    assert right.corner is not None
    mixed = np.random.default_rng(3).permutation(len(weights))
    other = mpishard.l_curve(weights[mixed].tolist(), 0.5 * misfits[mixed] ** 2, 7 * terms[mixed] ** 2)
    assert other.weight == right.weight and other.corner is not None and mixed[other.corner] == right.corner
    assert other.angle == pytest.approx(right.angle) and other.weights == tuple(weights[mixed])


@pytest.mark.parametrize(
    ("misfits", "terms"),
    [
        ([1, 1, 1, 1], [2, 2, 2, 2]),  # equal points
        ([1, 10, 100, 1000], [1000, 100, 10, 1]),  # a straight line
        ([1, 5, 9, 10], [10, 9, 5, 1]),  # bent away from the origin
        ([1, 1, 1, 1.005], [8, 4, 2, 1]),  # a half of the L alone
    ],
)
def test_a_curve_without_a_corner_says_so(misfits: list[float], terms: list[float]) -> None:
    curve = mpishard.l_curve([4, 5, 6, 7], misfits, terms)
    assert curve.corner is None and curve.weight is None and np.isnan(curve.angle)
    assert re.search("157.5 degrees.* 4 and 7", str(curve))


def test_errors_of_runs_make_no_corner() -> None:
    """Below weight 0.001 the runs have one result, up to their tolerance."""
    weights = np.logspace(-8, 2, 21)
    for seed in range(20):
        errors = 1 + 1e-3 * np.random.default_rng(seed).uniform(-1, 1, (2, 21))
        curve = mpishard.l_curve(weights, errors[0] * (1 + weights), errors[1] * (1 + 1 / (weights + 1e-3)))
        assert curve.weight is not None and 0.1 < curve.weight < 10, seed


def test_points_that_are_equal_do_not_hide_the_corner() -> None:
    assert mpishard.l_curve([1, 2, 3, 4, 5], [1, 1, 1, 1, 9], [9, 9, 1, 1, 1]).weight in (3, 4)


@pytest.mark.parametrize(
    ("weights", "misfits", "terms", "words"),
    [
        ([1, 2], [1, 2], [2, 1], "weights has 2 entries.*at least 3"),
        ([1, 2, 3], [1, 2], [3, 2, 1], "misfits has 2 entries and weights has 3"),
        ([1, 2, 3], [1, 2, 3], [3, 2, 1, 0.5], "terms has 4 entries and weights has 3"),
        ([1, 2, 1], [1, 2, 3], [3, 2, 1], r"weights has 1 at \[0\] and at \[2\]"),
        ([1, -2, 3], [1, 2, 3], [3, 2, 1], r"weights\[1\]=-2"),
        ([1, 2, 3], [1, 0, 3], [3, 2, 1], r"misfits\[1\]=0.* above 0"),
        ([1, 2, 3], [1, 2, 3], [3, np.nan, 1], r"terms\[1\]=.*nan"),
        ([1, 2, 3], [1, 2, np.inf], [3, 2, 1], r"misfits\[2\]=.*inf"),
        ([3, 2, 1], [1, 2, 3], [1, 2, 3], "misfits fall from 3 at weight 1 to 2 at weight 2.*gtol"),
        ([1, 2, 3, 4], [1, 2, 3, 4], [4, 2, 2.01, 2.05], "terms rise from 2 at weight 2 to 2.05 at weight 4.*gtol"),
    ],
)
def test_bad_points_are_refused(weights: Any, misfits: Any, terms: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mpishard.l_curve(weights, misfits, terms)


@pytest.mark.parametrize("wrong", ["123", {1: 2}, [1, None, 3], 5])
def test_what_is_no_list_of_numbers_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="terms"):
        mpishard.l_curve([1, 2, 3], [1, 2, 3], wrong)


def test_a_picture_without_a_path_is_refused() -> None:
    with pytest.raises(TypeError, match="plot=3"):
        mpishard.l_curve([1, 2, 3], [1, 2, 3], [3, 2, 1], plot=3)


def test_the_picture_of_a_curve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **_: figures.append(figure))
    for weights in (WEIGHTS[::-2], np.logspace(3, -3, 61)):
        mpishard.l_curve(weights, *hyperbola(weights), plot=tmp_path / "curve.pdf")
    mpishard.l_curve([0.1, 1, 10000], [1, 10, 100], [100, 10, 1], plot=tmp_path / "line.pdf")
    (few,), (many,), (line,) = (figure.axes for figure in figures)
    title = line.title.get_window_extent()  # a long one
    assert title.x0 >= 0 and title.x1 <= figures[-1].bbox.width
    for panel in (few, many):
        curve, star = panel.lines
        assert star.get_marker() == "*" and star.get_xydata().tolist() == [[2, 2]]
        assert np.all(np.diff(curve.get_xdata()) > 0) and np.all(np.diff(curve.get_ydata()) < 0)
        assert panel.get_xscale() == panel.get_yscale() == "log" and "weight 1:" in panel.get_title()
    for panel in (few, many):
        labels = [text.get_window_extent() for text in panel.texts]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(labels, 2))
        assert {"0.001", "1", "1000"} <= {text.get_text() for text in panel.texts}
    assert len(few.texts) == 7 < len(many.texts) < 61
    assert len(line.lines) == 1 and "no corner" in line.get_title() and len(line.texts) == 3


def test_a_picture_of_a_curve_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    find = mpishard.l_curve  # which is imported in this way, too
    monkeypatch.setattr("mpishard.lazy.import_module", absent)
    with pytest.raises(ModuleNotFoundError, match=r"L-curve needs the package matplotlib.*mpishard\[cli\]"):
        find(WEIGHTS, *hyperbola(WEIGHTS), plot=tmp_path / "curve.png")


# The results of `map_runs` in a folder.


class Foreign:
    """An array of another library."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array([self.value])

    def __repr__(self) -> str:
        return f"Foreign({self.value})"


@pytest.mark.full
def test_a_result_that_is_larger_than_a_note_is_read_again(tmp_path: Path) -> None:
    saved, value = _SavedResults(tmp_path, ["large"]), np.ones(LARGEST_NOTE * 3 // 4 + 3, bool)  # 4 characters for 3
    saved.save(0, value)
    assert (tmp_path / "case-0.json").stat().st_size > LARGEST_NOTE
    assert np.array_equal(saved.open(resume=True)[0], value)


@pytest.mark.parametrize(
    "value",
    [np.ma.masked_less(np.arange(3.0), 1), np.zeros(2, [("x", "f8"), ("n", "i4")]), np.zeros(2, ml_dtypes.bfloat16)],
    ids=["mask", "fields", "bfloat16"],
)
def test_an_array_whose_bytes_do_not_tell_all_is_not_saved(value: Array, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"it has a {type(value).__name__} of .*, but a saved result"):
        _SavedResults(tmp_path, [1.0]).save(0, value)


@pytest.mark.parametrize(
    "cases",
    [
        [1 + 2j, 2 + 2j],
        [Path("a.h5"), Path("b.h5")],
        [(b"a",), (b"b",)],
        [Foreign(1.0), Foreign(2.0)],
        [{"days": [date(2026, 1, 1)]}, {"days": [date(2026, 1, 2)]}],
        [{1, 2}, {1, 3}],
        [range(2), range(3)],
        [SimpleNamespace(x=np.zeros(1)), SimpleNamespace(x=np.ones(1))],
        [np.array([None, "a"]), np.array([None, "b"])],
    ],
    ids=str,
)
def test_the_result_of_one_case_is_not_taken_for_that_of_another(cases: list[Any], tmp_path: Path) -> None:
    _SavedResults(tmp_path, cases).save(0, "of the first")
    with pytest.raises(ValueError, match=r"another case for cases\[0\]"):
        _SavedResults(tmp_path, cases[::-1]).open(resume=True)


def test_what_a_killed_save_left_goes(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / f".case-0.json-{os.uname().nodename}-{ended.pid}-01234567"
    left.touch()
    _SavedResults(tmp_path, [1.0]).open(resume=False)
    assert not left.exists()
