"""`laplace` in one process, beside the formulas with dense matrices, and the double pass at any cut and restart."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from minimizer_runs import Problem, check_device, check_ranks, check_restarts, started

import mpishard
from mpishard import DiagonalPrior, OperatorPrior, laplace
from mpishard.backend import random
from mpishard.minimizers import small
from mpishard.minimizers.double_pass import DoublePass
from mpishard.minimizers.method import Limits

SIZE = 40
RANDOM = np.random.default_rng(8)
ROWS = RANDOM.standard_normal((12, SIZE))
ROOT = np.tril(RANDOM.standard_normal((SIZE, SIZE))) / 8 + np.eye(SIZE)
COVARIANCE = ROOT @ ROOT.T
PRECISION = np.linalg.inv(COVARIANCE)
MEAN = np.linspace(-1, 1, SIZE)
FLIPPED = np.where(np.arange(SIZE) == 3, -1.0, 1.0)
POINT = RANDOM.standard_normal(SIZE)
LOPSIDED = np.triu(PRECISION) + 0.9 * np.tril(PRECISION, -1)


def dense_prior(**more):
    given = {"variance": COVARIANCE.diagonal(), "mean": MEAN, "log_determinant": np.linalg.slogdet(PRECISION)[1]}
    return OperatorPrior(PRECISION.__matmul__, COVARIANCE.__matmul__, ROOT.__matmul__, **{**given, **more})


def linear(x, v):
    return ROWS.T @ (ROWS @ v)


def check_dense(found, x, hessian, precision, mean=0.0):
    """A posterior beside the formulas with dense matrices."""
    covariance, prior = np.linalg.inv(hessian + precision), np.linalg.inv(precision)
    size = len(found.eigenvalues)
    eigenvalues = np.sort(np.linalg.eigvals(prior @ hessian).real)[::-1][:size]
    assert np.allclose(found.eigenvalues, eigenvalues, rtol=1e-8, atol=1e-10)
    assert np.allclose(found.variance(), covariance.diagonal(), rtol=1e-8)
    assert np.allclose(found.standard_deviation() ** 2, covariance.diagonal(), rtol=1e-8)
    v = np.cos(np.arange(len(x)))
    assert np.allclose(found.covariance @ v, covariance @ v, rtol=1e-8, atol=1e-10)
    assert found.log_determinant == pytest.approx(np.linalg.slogdet(covariance)[1], rel=1e-10)
    away = x - mean
    divergence = np.trace(precision @ covariance) - len(x) + away @ precision @ away
    divergence += np.linalg.slogdet(hessian + precision)[1] - np.linalg.slogdet(precision)[1]
    assert found.information_gain == pytest.approx(divergence / 2, rel=1e-10)


def test_a_linear_problem():
    found = laplace(POINT, linear, dense_prior(), rank=15)
    check_dense(found, POINT, ROWS.T @ ROWS, PRECISION, MEAN)
    assert len(found.eigenvalues) == 12 and found.products == 12 + 1 + 12  # the thirteenth direction brought nothing
    assert np.array_equal(found.x, POINT) and not len(found.left_out) and found.asymmetry < 1e-12


def data_misfit(x):
    residuals = ROWS @ x - 1
    return 0.5 * residuals @ residuals, ROWS.T @ residuals


def test_a_prior_is_a_term():
    """The minimum of misfit and prior is the posterior's mean by the formula with dense matrices."""
    function = mpishard.regularized(data_misfit, dense_prior())
    value, gradient = function(POINT)
    away = POINT - MEAN
    assert value == pytest.approx(data_misfit(POINT)[0] + 0.5 * away @ PRECISION @ away, rel=1e-13)
    assert np.allclose(gradient, data_misfit(POINT)[1] + PRECISION @ away, rtol=1e-12)
    result = mpishard.minimize(function, np.zeros(SIZE), options={"gtol": 1e-7, "ftol": 0})
    expected = np.linalg.solve(ROWS.T @ ROWS + PRECISION, ROWS.T @ np.ones(len(ROWS)) + PRECISION @ MEAN)
    # No eigenvalue of the Hessian is below the smallest of the precision.
    assert np.linalg.norm(result.x - expected) < np.sqrt(SIZE) * 1e-7 * np.linalg.norm(COVARIANCE, 2)


def test_a_prior_beside_other_terms_and_of_other_unknowns():
    ridge, prior = mpishard.Tikhonov(weight=2.0, order=0), DiagonalPrior(0.5, mean=1.0)
    value, gradient = mpishard.regularized(lambda x: (0.0, 0 * x), [ridge, prior])(np.array([0.0, 3.0]))
    assert value == 9 + 1 + 4 and gradient.tolist() == [-2.0, 6.0 + 4.0]
    tree = {"a": np.zeros(2), "b": [np.array([1 + 2j])]}
    prior = DiagonalPrior({"a": 0.5, "b": [2.0]}, mean={"a": np.ones(2), "b": [np.array([1j])]})
    value, gradient = mpishard.regularized(lambda x: (1.0, {"a": 0 * x["a"], "b": [0 * x["b"][0]]}), prior)(tree)
    assert value == 1 + 2 + 0.5 and gradient["a"].tolist() == [-2.0, -2.0] and gradient["b"][0].tolist() == [0.5 + 0.5j]
    named = mpishard.FlatParameters.of({"a": np.zeros(2), "b": np.ones((1, 2))})
    value, gradient = mpishard.regularized(lambda p: (0.0, np.zeros(4)), DiagonalPrior(0.5, mean=1.0))(named)
    assert value == 2 and gradient.tolist() == [-2.0, -2.0, 0.0, 0.0]
    single = np.zeros(3, np.float32)
    field = mpishard.BiLaplacianPrior((3,), correlation_length=2.0, mean=1.0)
    assert mpishard.regularized(lambda x: (0.0, 0 * x), field)(single)[1].dtype == np.float32


def test_what_a_prior_as_a_term_does_not_fit():
    def flat_misfit(x):
        return 0.0, 0 * x

    def mean_loss(x, samples, gradients):
        return 0.0

    problem = mpishard.regularized(mean_loss, DiagonalPrior(1.0))
    with pytest.raises(ValueError, match=r"prior.*minimize.*OptimizationProblem"):
        problem(np.zeros(3), np.arange(2), np.zeros(3))
    with pytest.raises(ValueError, match=r"the vector has 3 .*grid of the prior is \(4,\)"):
        mpishard.regularized(flat_misfit, mpishard.BiLaplacianPrior((4,), correlation_length=1.0))(np.zeros(3))
    with pytest.raises(ValueError, match=r"prior.mean has 40 .*x0 has 3"):
        mpishard.regularized(flat_misfit, dense_prior())(np.zeros(3))
    with pytest.raises(TypeError, match="a function and terms"):
        mpishard.regularized(data_misfit, [dense_prior(), 3])


@pytest.mark.parametrize("gauss_newton", [False, True])
def test_a_nonlinear_problem(gauss_newton):
    times, size = np.linspace(0, 3, 30)[:, None], 6
    powers = times ** np.arange(size) / np.arange(1, size + 1)
    data = np.exp(-times[:, 0]) + 0.1 * np.cos(9 * times[:, 0])

    def hessian(x):
        decay = np.exp(-powers @ x) / 0.1
        curvature = decay**2 + (0 if gauss_newton else decay * (decay - data / 0.1))
        return powers.T @ (curvature[:, None] * powers)

    def function(x):
        decay = np.exp(-powers @ x) / 0.1
        residuals = decay - data / 0.1
        return 0.5 * (residuals @ residuals + x @ x / 4), -powers.T @ (decay * residuals) + x / 4

    result = mpishard.minimize(function, np.zeros(size), options={"gtol": 1e-9, "ftol": 0})
    found = laplace(result, lambda x, v: hessian(x) @ v, DiagonalPrior(4.0), rank=100)
    check_dense(found, result.x, hessian(result.x), np.eye(size) / 4)
    assert len(found.eigenvalues) == size


def test_a_spectrum_that_is_cut():
    """What is left out is about the next eigenvalues, whatever the units of the unknowns."""
    units = np.geomspace(1e-6, 1e6, SIZE)
    vectors = np.linalg.qr(RANDOM.standard_normal((SIZE, SIZE)))[0] / units
    values = 1e4 * 3.0 ** -np.arange(SIZE)
    hessp, prior = lambda x, v: vectors.T @ (values * (vectors @ v)), DiagonalPrior(units**2)
    found = laplace(POINT, hessp, prior, rank=15)
    assert np.allclose(found.eigenvalues, values[:15], rtol=1e-8) and found.products == 50
    assert np.allclose(found.left_out[:5], values[15:20], rtol=1e-2)
    expected = units**2 * (1 - (values / (1 + values)) @ (vectors * units) ** 2)
    assert np.allclose(found.variance(), expected, rtol=2 * values[15])
    fewer = laplace(POINT, hessp, prior, rank=5, oversampling=0)
    assert fewer.products == 10 and not len(fewer.left_out) and "not known" in repr(fewer)


def test_a_rank_at_which_errors_are_all_that_is_left():
    """The basis stays orthonormal where products lie in it but for their errors, and the prior is rough."""
    points = np.linspace(0, 1, 80)
    covariance = np.exp(-abs(np.subtract.outer(points, points)) / 0.2)
    precision, root = np.linalg.inv(covariance), np.linalg.cholesky(covariance)
    rows = 10 * np.exp(-((np.subtract.outer(points[::2], points) / 0.1) ** 2))
    prior = OperatorPrior(precision.__matmul__, covariance.__matmul__, root.__matmul__, variance=covariance.diagonal())
    expected = np.linalg.inv(rows.T @ rows + precision).diagonal()
    # Errors of the products are no errors of the solves, and a power iteration drops what is made of them.
    counts = []
    for error, power, accuracy in ((0.0, 0, 1e-9), (1e-11, 0, 1e-5), (1e-11, 1, 1e-9)):
        hessp = lambda x, v, error=error: rows.T @ (rows @ v) * (1 + error * np.sin(1e6 * v))  # noqa: E731
        found = laplace(points, hessp, prior, rank=60, oversampling=20, power_iterations=power)
        basis = found._minimizer.vectors[: found._minimizer.kept]
        assert np.allclose(basis @ precision @ basis.T, np.eye(len(basis)), atol=1e-12)
        assert np.allclose(found.variance(), expected, rtol=accuracy) and "nothing is left out" in repr(found)
        counts.append(len(found.eigenvalues))
    assert max(counts[0], counts[2]) < 30 < counts[1], counts


@pytest.mark.parametrize("error", [1e-13, 1e-10, 1e-7])
def test_errors_of_the_solves_are_noticed(error):
    """A rank of all data takes about two products for each of them, however exact the prior's solves are."""
    noise = error * np.sin(1e3 * np.arange(SIZE))
    prior = OperatorPrior(PRECISION.__matmul__, lambda v: COVARIANCE @ v * (1 + noise * np.cos(v)), ROOT.__matmul__)
    found = laplace(POINT, linear, prior, rank=30)
    assert found.products == 12 + 1 + 12 and "nothing is left out" in repr(found)
    assert np.allclose(found.eigenvalues, laplace(POINT, linear, dense_prior(), rank=12).eigenvalues, rtol=100 * error)
    assert laplace(POINT, linear, prior, rank=5, oversampling=0).products == 10


def test_power_iterations_where_the_rank_cuts_a_flat_spectrum():
    vectors = np.linalg.qr(np.random.default_rng(1).standard_normal((SIZE, SIZE)))[0]
    values = 100 * 0.9 ** np.arange(SIZE)
    hessp = lambda x, v: vectors.T @ (values * (vectors @ v))  # noqa: E731
    lacks = []
    for power in (0, 1, 4):
        found = laplace(POINT, hessp, DiagonalPrior(1.0), rank=8, oversampling=4, power_iterations=power)
        assert found.products == (2 + power) * 12 and len(found.left_out) == 4
        lacks.append((1 - found.eigenvalues / values[:8]).max())
    assert lacks[0] > 0.05 and lacks[1] < lacks[0] / 2 and 0 < lacks[2] < 0.01


def test_samples():
    found = laplace(POINT, linear, dense_prior(), rank=15)
    draws = np.array(found.samples(1000, seed=3))
    covariance = np.linalg.inv(ROWS.T @ ROWS + PRECISION)
    deviations = np.sqrt(covariance.diagonal())
    assert abs((draws.mean(0) - POINT) / deviations).max() < 5 / np.sqrt(1000)
    # The error of an empirical correlation is at most the root of 2 / n.
    assert abs((np.cov(draws.T) - covariance) / np.outer(deviations, deviations)).max() < 5 * np.sqrt(2 / 1000)
    assert np.array_equal(found.samples(2, seed=3), draws[:2])
    assert not np.array_equal(found.samples(1), draws[:1]) and found.samples(0) == []
    with pytest.raises(ValueError, match="seed=-1"):
        found.samples(1, seed=-1)


TREE = {"a": POINT[:10].reshape(2, 5), "b": [POINT[10:20], POINT[20:].view(complex)]}


def flat(tree):
    return np.concatenate([tree["a"].ravel(), tree["b"][0], tree["b"][1].view(float)])


def tree_of(flat):
    return {"a": flat[:10].reshape(2, 5), "b": [flat[10:20], flat[20:].view(complex)]}


def test_operators_may_share_an_array():
    shared = np.empty(SIZE)

    def of(matrix):
        return lambda v: np.matmul(matrix, v, out=shared)

    prior = OperatorPrior(of(PRECISION), of(COVARIANCE), of(ROOT), mean=MEAN)
    found, expected = (laplace(POINT, linear, each, rank=15) for each in (prior, dense_prior()))
    assert np.allclose(found.samples(2), expected.samples(2))


def test_a_prior_keeps_its_numbers():
    variance = np.ones(3)
    about = {"mean": variance}
    grid = mpishard.BiLaplacianPrior((3,), correlation_length=1.0, standard_deviation=variance, **about)
    priors = DiagonalPrior(variance, **about), OperatorPrior(abs, abs, variance=variance, **about), grid
    variance[:] = 4
    for prior in priors:
        assert prior.mean.tolist() == prior.variance().tolist() == [1, 1, 1]


def test_trees_and_named_fields():
    variance = np.concatenate([np.full(10, 2.0), np.linspace(1, 2, 10), np.repeat(np.linspace(1, 3, 10), 2)])
    expected = laplace(POINT, linear, DiagonalPrior(variance, mean=1.0), rank=5)
    arrays = [expected.samples(1)[0], expected.covariance @ POINT, expected.variance(), expected.x]
    prior = DiagonalPrior({"a": 2.0, "b": [variance[10:20], variance[20::2]]}, mean=1.0)
    found = laplace(TREE, lambda x, v: tree_of(linear(None, flat(v))), prior, rank=5)
    trees = [found.samples(1)[0], found.covariance @ TREE, found.variance(), found.x]
    assert np.array_equal([flat(tree) for tree in trees], arrays)
    for name in ("information_gain", "log_determinant"):
        assert getattr(found, name) == getattr(expected, name)
    named = mpishard.FlatParameters.of({"a": POINT[:10].copy(), "b": POINT[10:].copy()})
    found = laplace(named, linear, DiagonalPrior(variance, mean=1.0), rank=5)
    assert np.array_equal([found.samples(1)[0], found.covariance @ POINT, found.variance()], arrays[:3])
    assert found.x is named


def test_float32():
    hessp = lambda x, v: linear(x, v).astype(np.float32)  # noqa: E731
    single = laplace(POINT.astype(np.float32), hessp, DiagonalPrior(2.0), rank=15)
    double = laplace(POINT, linear, DiagonalPrior(2.0), rank=15)
    assert np.allclose(single.eigenvalues[:12], double.eigenvalues, rtol=1e-5)
    assert single.variance().dtype == single.samples(1)[0].dtype == np.float32
    assert np.allclose(single.variance(), double.variance(), rtol=1e-4)


def test_without_a_factor():
    found = laplace(POINT, linear, OperatorPrior(PRECISION.__matmul__, COVARIANCE.__matmul__), rank=15)
    assert np.allclose(found.eigenvalues, laplace(POINT, linear, dense_prior(), rank=15).eigenvalues, rtol=1e-10)
    calls = {"with a factor": lambda: found.samples(1), "variance=": found.variance}
    for name, call in {**calls, "log_determinant=": lambda: found.log_determinant}.items():
        with pytest.raises(ValueError, match=name):
            call()


def test_data_that_say_nothing():
    found = laplace(POINT, lambda x, v: 0 * v, dense_prior(mean=POINT))
    assert found.products == 1 and found.information_gain == 0 and not len(found.eigenvalues)
    assert np.array_equal(found.variance(), COVARIANCE.diagonal())
    assert np.array_equal(found.covariance.matvec(POINT), COVARIANCE @ POINT)
    assert "nothing is left out" in repr(found)


@pytest.mark.parametrize(
    ("hessp", "more", "words"),
    [
        (linear, {"power_iterations": -1}, "power_iterations=-1"),
        (lambda x, v: -2 * v, {}, r"eigenvalue -2 .*not more than -1"),
        (lambda x, v: v * np.nan, {}, "Hessian product is NaN"),
        (lambda x, v: v[1:], {}, "Hessian product has 39 elements"),
        (linear, {"rank": 0}, "rank=0"),
        (linear, {"samples": 3}, "samples="),
        (linear, {"resume": True}, "mesh"),
        (linear, {"reduction": "sum"}, "reduction='sum'"),
        (linear, {"prior": DiagonalPrior(-np.ones(SIZE))}, "variance .*element .0.*-1"),
        (linear, {"prior": DiagonalPrior(np.ones(7))}, r"variance .*\(7,\)"),
        (linear, {"prior": OperatorPrior(np.negative, np.negative)}, "positive definite.*v'R v = -"),
        (linear, {"prior": OperatorPrior(lambda v: 2 * v, lambda v: 2 * v)}, "solve.apply.x.. must be x"),
        (
            lambda x, v: 2 * v,
            {"prior": OperatorPrior(FLIPPED.__mul__, FLIPPED.__mul__)},
            "precision R must be positive definite",
        ),
        (linear, {"prior": dense_prior(mean=np.ones(3))}, "prior.mean has 3 elements"),
        (linear, {"prior": DiagonalPrior(1.0, mean=np.nan)}, "prior.mean .*NaN"),
        (
            linear,
            {"prior": OperatorPrior(LOPSIDED.__matmul__, np.linalg.inv(LOPSIDED).__matmul__)},
            r"R must be symmetric, but u'R v = (\S+) and v'R u = (?!\1)",
        ),
        (
            linear,  # for ones it is right
            {"prior": OperatorPrior(np.positive, lambda v: 1.5 * v - 0.5 * v.mean())},
            r"solve must be the inverse.*w'solve\(w\) = (\S+) and v'R v = (?!\1)",
        ),
        (
            linear,
            {"prior": OperatorPrior(PRECISION.__matmul__, COVARIANCE.__matmul__, ROOT.T.__matmul__)},
            r"factor L must have.*u'R u = (\S+) and v'v = (?!\1)",
        ),
        (linear, {"prior": OperatorPrior(np.positive, np.positive, lambda v: v * np.nan)}, "factor L .*u'R u = nan"),
        (linear, {"prior": OperatorPrior(lambda v: v[1:], COVARIANCE.__matmul__)}, "prior.precision has 39"),
    ],
)
def test_bad_arguments(hessp, more, words):
    with pytest.raises(ValueError, match=words):
        laplace(POINT, hessp, **{"prior": DiagonalPrior(1.0), **more})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: laplace(POINT, None, DiagonalPrior(1.0)), "hessp=None"),
        (lambda: laplace(POINT, linear, 3.0), "prior=3.0.*DiagonalPrior"),
        (lambda: laplace("x", linear, DiagonalPrior(1.0)), "x0 must be"),
        (lambda: laplace(None, linear, DiagonalPrior(1.0)), "result=None"),
        (lambda: DiagonalPrior(None), "variance=None"),
        (lambda: OperatorPrior(3, COVARIANCE.__matmul__), "precision=3"),
        (lambda: laplace(POINT, linear, DiagonalPrior(1.0), seed=0.5), "seed=0.5"),
        (lambda: laplace(POINT, linear, DiagonalPrior(1.0), rank=1).plot(None), "path=None"),
    ],
)
def test_arguments_of_a_wrong_kind(call, words):
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.parametrize("variance", [-1.0, 0, np.nan, np.where(np.arange(SIZE) == 5, np.inf, 1.0)])
def test_a_variance_that_is_none(variance):
    found = laplace(POINT, linear, OperatorPrior(np.positive, np.positive, variance=variance), rank=3)
    with pytest.raises(ValueError, match=r"prior.variance must be positive and finite.*(-1|0|nan|inf)$"):
        found.standard_deviation()


def test_the_table(tmp_path):
    hessp = lambda x, v: linear(x, v) + 0.3 * np.roll(v, 1)  # noqa: E731
    found = laplace(POINT, hessp, DiagonalPrior(2.0), rank=11, oversampling=3)
    lines = repr(found).splitlines()
    assert lines[0] == "Laplace posterior of 40 unknowns: 11 eigenpairs from 28 products"
    assert [line.split()[0] for line in lines[2:8]] == ["1", "2", "3", "5", "10", "11"]
    assert lines[2].split()[1:] == [f"{found.eigenvalues[0]:.3g}", f"{1 / (1 + found.eigenvalues[0]):.3g}"]
    assert lines[8].split()[:3] == ["left", "out", f"{found.left_out[0]:.3g}"]
    assert found.asymmetry > 1e-3 and "not symmetric" in lines[-1]
    assert repr(found.covariance) == "<PosteriorCovariance of 40 unknowns, float64>"
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "spectrum.svg")
    assert "left out" in (tmp_path / "spectrum.svg").read_text("utf-8")


# The double pass.

METHOD = DoublePass(rank=9, oversampling=3, power_iterations=1, seed=5)
PROBLEM = Problem(lambda x: (0.0, x), lambda x, v: np.rint(linear(x, v) * 2.0**20) * 2.0**-20, POINT)


def times(number):
    return lambda v: number * v


LIMITS = Limits(solve=times(0.25), apply=times(4.0), factor=times(0.5))


def test_it_goes_on_from_any_product():
    check_restarts(METHOD, PROBLEM, LIMITS)
    ended = check_restarts(METHOD, Problem(PROBLEM.gradient, lambda x, v: 0 * v, POINT), LIMITS)
    assert ended.progress.products == 1
    # Two vectors of the first basis are errors, which the power iteration drops: a row is written that had another one.
    wrong = Problem(PROBLEM.gradient, lambda x, v: linear(x, v) * (1 + 1e-11 * np.sin(1e6 * v)), POINT)
    assert check_restarts(replace(METHOD, oversampling=5), wrong, LIMITS).progress.products == 14 + 14 + 12


@pytest.mark.parametrize("cuts", [(0, 13, SIZE), (0, 0, 7, 8, 30, SIZE)])
def test_any_cut_has_the_same_bits(cuts):
    check_ranks(METHOD, PROBLEM, LIMITS, cuts)


def test_vectors_in_device_memory(device):
    check_device(device, METHOD, PROBLEM, LIMITS)


def test_a_state_of_another_point_or_prior_is_refused():
    minimizer = started(METHOD, POINT, LIMITS)
    minimizer.begin()
    saved = minimizer.to_metadata()
    for point, precision, what in ((POINT + 1, 4.0, "x"), (POINT, 4.1, "prior")):
        other = started(METHOD, point, Limits(solve=times(1 / precision), apply=times(precision)))
        other.begin()
        with pytest.raises(ValueError, match=f"of another {what}:"):
            other.restore(saved)
    for other, what in (({"rank": 8, "oversampling": 4}, "rank=9"), ({"power_iterations": 0}, "iterations=1")):
        with pytest.raises(ValueError, match=f"{what}, and this is"):
            started(replace(METHOD, **other), POINT, LIMITS).restore(saved)
    with pytest.raises(ValueError, match="columns"):
        minimizer.restore({name: value for name, value in saved.items() if name != "columns"})
    with pytest.raises(ValueError, match="products only"):
        minimizer.tell(0.0, POINT)


@pytest.mark.parametrize("size", [0, 1, 2, 7, 30])
def test_eigenpairs_of_small_matrices(size):
    matrix = RANDOM.standard_normal((size, size))
    matrix = (matrix + matrix.T) @ np.diag(10.0 ** -np.arange(size))
    matrix = 0.5 * (matrix + matrix.T)
    values, vectors = small.eigenpairs(matrix)
    assert np.allclose(vectors @ vectors.T, np.eye(size), atol=1e-13)
    assert np.allclose(vectors.T @ (values[:, None] * vectors), matrix, atol=1e-13)
    assert np.allclose(np.sort(values), np.linalg.eigvalsh(matrix) if size else [], atol=1e-13)


def test_normal_numbers():
    numbers = np.arange(100_000)
    found = random.normal_at(1, "a", numbers)
    assert np.array_equal(random.normal_at(1, "a", numbers[90_001:3:-7]), found[90_001:3:-7])
    assert abs(np.corrcoef(found, random.normal_at(1, "b", numbers))[0, 1]) < 0.02
    moments = [np.mean(found**power) for power in (1, 2, 3, 4)]
    assert np.allclose(moments, [0, 1, 0, 3], atol=5 * np.sqrt(np.array([1, 2, 15, 96]) / len(found)))
    below = np.array([2.0**-53, 1e-13, 0.01, 0.0749, 0.4, 0.5, 0.9, 0.99, 1 - 2.0**-40])
    expected = [NormalDist().inv_cdf(each) for each in below]
    assert np.allclose(random._normal_quantile(below), expected, rtol=1e-14)
