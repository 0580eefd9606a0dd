"""Values, gradients and Hessian products of terms on grids, with masks, weights and references; they count once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpishard
from mpishard import SmoothedTotalVariation, Tikhonov
from mpishard.inverse.regularization import RegularizationTerm

Array = np.ndarray
SHAPES = [(7,), (5, 6), (4, 3, 5), (1, 4), (2, 2)]


def terms(shape: tuple[int, ...], **options: Any) -> list[RegularizationTerm]:
    spacing = [0.5, 2.0, 0.25][: len(shape)]
    return [
        *(Tikhonov(order=order, weight=1.7, spacing=spacing, shape=shape, **options) for order in (0, 1, 2)),
        SmoothedTotalVariation(epsilon=0.3, weight=0.6, spacing=spacing, shape=shape, **options),
    ]


def extras(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(2)
    everything = {
        "mask": rng.random(shape) > 0.2,
        "reference": rng.standard_normal(shape),
        "weight": rng.random(shape) + 0.5,
    }
    return [{}, {"mask": everything["mask"]}, {"reference": everything["reference"]}]


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_and_hessian_products(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).standard_normal(int(np.prod(shape)))
    for options in extras(shape):
        for term in terms(shape, **options):
            check = mpishard.check_gradient(term.value_and_gradient, x, hessp=term.product, disp=False)
            assert check, f"{term}\n{check}"


def test_weights_by_cell() -> None:
    weight = np.random.default_rng(2).random((5, 6))
    x = np.random.default_rng(1).standard_normal((5, 6))
    for order in (0, 1, 2):
        term = Tikhonov(order=order, weight=weight, shape=(5, 6))
        assert mpishard.check_gradient(term.value_and_gradient, x, hessp=term.product, disp=False)
        twice = Tikhonov(order=order, weight=2 * weight, shape=(5, 6))
        assert twice.value_and_gradient(x)[0] == pytest.approx(2 * term.value_and_gradient(x)[0], rel=1e-14)


def test_values() -> None:
    x = np.array([[0.0, 1.0, 4.0], [2.0, 2.0, 2.0]])
    assert Tikhonov(order=0, weight=2.0).value_and_gradient(x)[0] == 29
    assert Tikhonov(order=0, weight=2.0, reference=x - 3).value_and_gradient(x)[0] == 54
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


def test_slabs_have_the_bits_of_the_whole_field() -> None:
    whole = np.random.default_rng(1).standard_normal((11, 4))
    direction = np.random.default_rng(3).standard_normal((11, 4))
    cuts = [0, 2, 5, 7, 11]
    options: dict[str, Any] = {"mask": np.random.default_rng(2).random((11, 4)) > 0.2, "reference": 0.1 * whole}
    for order, full in enumerate(terms((11, 4), **options)):
        value, gradient = full.value_and_gradient(whole)
        product = full.product(whole, direction)
        total = 0.0
        for start, stop in zip(cuts, cuts[1:], strict=False):
            slab = slice(start, stop)

            def neighbours(own: Array, start: int = start, stop: int = stop, rows: int = full.halo) -> Any:
                """Of the field that is asked for: the one whose rows are these."""
                candidates = [whole - 0.1 * whole, options["mask"] * 1.0, direction]
                field = next(field for field in candidates if np.array_equal(field[start:stop], own))
                return (field[start - rows : start] if start else None), (
                    field[stop : stop + rows] if stop < 11 else None
                )

            own = {name: array[slab] for name, array in options.items()}
            part = terms((stop - start, 4), **own, exchange=neighbours)[order]
            added, slope = part.value_and_gradient(whole[slab])
            total += added
            assert np.array_equal(slope, gradient[slab])
            assert np.array_equal(part.product(whole[slab], direction[slab]), product[slab])
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


def test_a_term_counts_once_however_many_samples_there_are() -> None:
    data = np.random.default_rng(0).standard_normal((12, 30))

    def function(x: Array, samples: Array, gradients: Array) -> float:
        gradients += (x - data[samples]).sum(axis=0)
        return 0.5 * float(((x - data[samples]) ** 2).sum())

    term = SmoothedTotalVariation(epsilon=0.3, weight=0.6, shape=(5, 6))
    x = np.random.default_rng(1).standard_normal(30)
    wanted = function(x, np.arange(12), np.zeros(30)) / 12 + term.value_and_gradient(x)[0]
    for micro in (None, 5, 1):
        problem = mpishard.OptimizationProblem(
            mpishard.regularized(function, term), x, samples=12, batch_size=12, micro_batch_size=micro, steps=1
        )
        check = mpishard.check_gradient(problem, disp=False)
        assert check and check.value == pytest.approx(wanted, rel=1e-14)


def test_terms_of_named_tensors() -> None:
    specs = [mpishard.ParameterSpec("b", (3,)), mpishard.ParameterSpec("k", (4, 5))]
    parameters = mpishard.FlatParameters(specs, np.float64)
    parameters.flat[...] = np.random.default_rng(1).standard_normal(23)
    term = Tikhonov(name="k", weight=3.0)

    def function(p: Any, samples: Array, gradients: Any) -> float:
        gradients["b"] += len(samples) * p["b"]
        return 0.5 * float(p["b"] @ p["b"]) * len(samples)

    with_term = mpishard.regularized(function, [term])
    problem = mpishard.OptimizationProblem(with_term, parameters, samples=6, batch_size=6, steps=1)
    assert mpishard.check_gradient(problem, disp=False)
    plain = mpishard.regularized(lambda p: (0.0, np.zeros(23)), term)
    assert mpishard.check_gradient(plain, parameters, disp=False)
    with pytest.raises(ValueError, match="name of one of them"):
        mpishard.regularized(lambda p: (0.0, np.zeros(23)), Tikhonov())(parameters)


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


def test_bad_input() -> None:
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
    with pytest.raises(ValueError, match="x0 has no array 'b'; there are a.0, a.1"):
        mpishard.regularized(fun, Tikhonov(weight=2.0, name="b"))(x)
