"""The prior of fields on grids, against dense matrices and Matern's formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mpishard
from mpishard import BiLaplacianPrior
from mpishard.backend import array as arrays

GRIDS = [
    ((7,), {"correlation_length": 3.0}),
    ((150,), {"correlation_length": 2.0}),  # its middle is far from its ends
    ((5, 6), {"correlation_length": (2.0, 4.0), "spacing": (1.0, 0.5)}),
    ((3, 4, 5), {"correlation_length": 2.0}),
    ((5, 1, 4), {"correlation_length": 2.5}),
    ((1,), {"correlation_length": 2.0}),
    ((2, 60), {"correlation_length": 0.3}),
]


def dense(operation, size):
    return np.array([operation(unit) for unit in np.eye(size)]).T


def second_differences(cells, step):
    """Negative, with a slope of 0 at both ends."""
    differences = np.diff(np.eye(cells), axis=0) / step
    return differences.T @ differences


@pytest.mark.parametrize("shape, lengths", GRIDS, ids=str)
def test_dense_matrices(shape, lengths):
    size = math.prod(shape)
    deviation = 1 + np.random.default_rng(1).random(shape)
    prior = BiLaplacianPrior(shape, standard_deviation=deviation, **lengths)
    precision, covariance, factor = (dense(each, size) for each in (prior.precision, prior.covariance, prior.factor))
    # A of the definition, by products of Kronecker.
    steps, lengths = np.broadcast_to(prior.spacing, len(shape)), np.broadcast_to(prior.correlation_length, len(shape))
    nu = 2 - max(1, sum(extent > 1 for extent in shape)) / 2
    operator = np.eye(size)
    for dim, extent in enumerate(shape):
        before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        differences = lengths[dim] ** 2 / (8 * nu) * second_differences(extent, steps[dim])
        operator += np.kron(np.eye(before), np.kron(differences, np.eye(after)))
    square = np.linalg.inv(operator @ operator)
    scale = deviation.ravel() / np.sqrt(square.diagonal())
    assert np.allclose(covariance, scale[:, None] * square * scale, rtol=0, atol=1e-12)
    assert np.allclose(precision @ covariance, np.eye(size), rtol=0, atol=1e-12)
    assert np.allclose(factor @ factor.T, covariance, rtol=0, atol=1e-12)
    assert np.allclose(precision, precision.T, rtol=0, atol=1e-12)
    assert np.allclose(covariance.diagonal(), deviation.ravel() ** 2, rtol=1e-12)
    assert np.array_equal(prior.variance(), deviation**2)
    assert prior.log_determinant == pytest.approx(np.linalg.slogdet(precision)[1], rel=1e-12, abs=1e-12)


def matern(kappa_r, dimensions):
    """Matern's correlation for nu = 2 - dimensions / 2."""
    if dimensions == 1:
        return (1 + kappa_r) * np.exp(-kappa_r)
    if dimensions == 3:
        return np.exp(-kappa_r)
    return kappa_r * pytest.importorskip("scipy.special").k1(kappa_r)


def correlation(length, dimensions, distances):
    """Of a cell in the middle with others of its row: of the prior, and by the formula of a continuous field."""
    shape = (7 * length,) * dimensions
    middle = (shape[0] // 2,) * dimensions
    unit = np.zeros(shape)
    unit[middle] = 1
    prior = BiLaplacianPrior(shape, correlation_length=length)
    found = prior.covariance(unit)[(*middle[:-1], middle[-1] + distances)]
    return found, matern(distances * math.sqrt(8 * (2 - dimensions / 2)) / length, dimensions)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_the_correlation_is_materns(dimensions):
    """But for the variance of a cell, over which a rough field is averaged: more in more dimensions."""
    found, expected = correlation(8, dimensions, np.arange(2, 13, 2))
    assert np.allclose(found, expected, rtol=0, atol=0.03)
    assert found[3] == pytest.approx(0.14, abs=0.02)


def test_the_correlation_is_of_second_order_in_the_spacing():
    coarse, fine = (correlation(length, 1, np.arange(1, 9) * length // 6) for length in (6, 24))
    assert abs(fine[0] - fine[1]).max() < 1.2 / 4**2 * abs(coarse[0] - coarse[1]).max()


def test_samples_have_the_covariance():
    """The mean of n products of two normal numbers of correlation c is c, with the variance (1 + c**2) / n."""
    number, shape = 1000, (9, 8)
    prior = BiLaplacianPrior(shape, correlation_length=4.0, standard_deviation=2.0)
    random = np.random.default_rng(5)
    samples = np.array([prior.factor(random.standard_normal(72)) for _ in range(number)]) / 2
    expected = dense(prior.covariance, 72) / 4
    errors = (samples.T @ samples / number - expected) / np.sqrt((1 + expected**2) / number)
    # Beyond 5 there would be one of the 2628 in 660 seeds.
    assert abs(errors).max() < 5


def test_the_middle_does_not_know_how_far_the_ends_are():
    """The variance of the operator comes from an axis that is cut short; nothing has the length of the grid then."""
    near, far = (BiLaplacianPrior((cells,), correlation_length=3.0) for cells in (1000, 100_000))
    assert np.array_equal(near._scale[:500], far._scale[:500])
    assert np.array_equal(np.unique(near._scale), np.unique(far._scale))


def test_vectors_keep_their_shape_and_dtype(device):
    prior = BiLaplacianPrior((4, 5), correlation_length=2.0)
    vector = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    expected = prior.covariance(vector.astype(np.float64))
    for given in (device.put(vector), device.put(vector.ravel()), vector.T.copy().T):
        found = prior.covariance(given)
        assert type(found) is type(given) and found.shape == given.shape and found.dtype == np.float32
        assert np.array_equal(arrays.to_host(found).reshape(4, 5), expected.astype(np.float32))


def test_a_field_of_the_unknowns():
    prior = BiLaplacianPrior((4, 5), correlation_length=2.0, mean=3.0)
    for x in (np.zeros(20), np.zeros((4, 5)), mpishard.FlatParameters.of({"speed": np.zeros((4, 5))})):
        assert np.array_equal(prior.on(x).mean, np.full((4, 5), 3.0))
    assert BiLaplacianPrior((4, 5), correlation_length=2.0).on(np.zeros(20)).mean is None


@pytest.mark.parametrize(
    "change, words",
    [
        ({"shape": ()}, r"shape=\(\)"),
        ({"shape": (2, 2, 2, 2)}, "shape=.*three"),
        ({"shape": (2, 0)}, "shape=0"),
        ({"correlation_length": 0}, "correlation_length=0"),
        ({"correlation_length": (1, 2, 3)}, "correlation_length has 3"),
        ({"spacing": (1, -1)}, "spacing=-1"),
        ({"standard_deviation": -1}, "standard_deviation=-1"),
        ({"standard_deviation": np.zeros((4, 5))}, "standard_deviation=0"),
        ({"standard_deviation": np.ones((4, 4))}, "standard_deviation has 16"),
        ({"mean": np.full((4, 5), np.nan)}, "mean=nan"),
        ({"mean": np.zeros(3)}, "mean has 3"),
        ({"x": np.zeros(19)}, "19.*4, 5"),
        ({"x": {"a": np.zeros(20), "b": np.zeros(2)}}, "dict of 2.*one field"),
        ({"x": mpishard.FlatParameters.of({"speed": np.zeros((5, 4))})}, "5, 4.*4, 5"),
        ({"vector": np.zeros(19)}, "19.*4, 5"),
        ({"vector": np.zeros((5, 4))}, r"vector has the shape \(5, 4\).*\(4, 5\)"),
        ({"standard_deviation": np.ones((5, 4))}, r"standard_deviation has the shape \(5, 4\).*\(4, 5\)"),
        ({"mean": np.ones((5, 4))}, r"mean has the shape \(5, 4\).*\(4, 5\)"),
        ({"correlation_length": 1e8}, "1e.08 cells.*same units"),
    ],
)
def test_wrong_arguments(change, words):
    call = {"shape": (4, 5), "correlation_length": 2.0, "x": np.zeros(20), "vector": np.zeros(20)} | change
    x, vector = call.pop("x"), call.pop("vector")
    with pytest.raises(ValueError, match=words):
        BiLaplacianPrior(**call).on(x).factor(vector)


@pytest.mark.parametrize("given", [None, "a", np.ones((4, 5), complex), ["a"] * 20])
def test_a_standard_deviation_of_no_numbers(given):
    with pytest.raises(TypeError, match="standard_deviation=.*must be"):
        BiLaplacianPrior((4, 5), correlation_length=2.0, standard_deviation=given).on(np.zeros(20))


def test_what_is_no_mesh():
    with pytest.raises(TypeError, match="mesh=4.*Mesh"):
        BiLaplacianPrior((4, 5), correlation_length=2.0).on(np.zeros(20), 4)
