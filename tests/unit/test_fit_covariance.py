"""The covariance of a fit, against certified standard deviations, the formulas, and what draws of the data say."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard
from mpishard import covariance, least_squares
from mpishard.inverse.residuals import Loss

# Statistical Reference Datasets of the National Institute of Standards and Technology, nonlinear regression: the model,
# the data, a start, certified values and their standard deviations.
DATASETS = {
    "Misra1a": (
        lambda b, x: b[0] * (1 - np.exp(-b[1] * x)),
        [77.6, 114.9, 141.1, 190.8, 239.9, 289.0, 332.8, 378.4, 434.8, 477.3, 536.8, 593.1, 689.1, 760.0],
        [10.07, 14.73, 17.94, 23.93, 29.61, 35.18, 40.02, 44.82, 50.76, 55.05, 61.01, 66.40, 75.47, 81.78],
        [500, 1e-4],
        [2.3894212918e2, 5.5015643181e-4],
        [2.7070075241, 7.2668688436e-6],
    ),
    "Rat42": (
        lambda b, x: b[0] / (1 + np.exp(b[1] - b[2] * x)),
        [9, 14, 21, 28, 42, 57, 63, 70, 79],
        [8.93, 10.8, 18.59, 22.33, 39.35, 56.11, 61.73, 64.62, 67.08],
        [100, 1, 0.1],
        [7.2462237576e1, 2.6180768402, 6.7359200066e-2],
        [1.7340283401, 8.8295217536e-2, 3.4465663377e-3],
    ),
    "MGH09": (
        lambda b, x: b[0] * (x * x + x * b[1]) / (x * x + x * b[2] + b[3]),
        [4, 2, 1, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625],
        [0.1957, 0.1947, 0.1735, 0.16, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246],
        [0.25, 0.39, 0.415, 0.39],
        [1.9280693458e-1, 1.9128232873e-1, 1.2305650693e-1, 1.3606233068e-1],
        [1.1435312227e-2, 1.9633220911e-1, 8.0842031232e-2, 9.0025542308e-2],
    ),
}


@pytest.mark.parametrize("name", DATASETS)
def test_certified_standard_deviations(name):
    model, x, y, start, values, errors = DATASETS[name]
    x, y = np.array(x), np.array(y)
    ends = {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15}
    fit = least_squares(lambda b: model(b, x) - y, start, "cs", method="lm", **ends)
    assert np.allclose(fit.x, values, rtol=1e-8)
    found = covariance(fit)
    assert np.allclose(found.standard_errors, errors, rtol=1e-7)
    assert found.degrees_of_freedom == len(y) - len(start)


RANDOM = np.random.default_rng(3)
SLOPES, DATA = RANDOM.standard_normal((30, 3)), RANDOM.standard_normal(30)


def fit_of_lines(start=(0.0, 0.0, 0.0), **more):
    return least_squares(lambda x: SLOPES @ x - DATA, start, lambda x: SLOPES, **more)


def test_linear_models_have_the_textbook_formula():
    inverse = np.linalg.inv(SLOPES.T @ SLOPES)
    fit = fit_of_lines()
    found, known = covariance(fit), covariance(fit, absolute_sigma=True)
    assert np.allclose(found, fit.fun @ fit.fun / 27 * inverse, rtol=1e-13)
    assert np.allclose(known, inverse, rtol=1e-13) and known.sigma == 1
    by_cg = fit_of_lines(tr_solver="cg", gtol=1e-12, x_scale="jac")
    assert np.allclose(covariance(by_cg), found, rtol=1e-9)


def test_the_fit_of_scipy_is_taken_too():
    optimize = pytest.importorskip("scipy.optimize")
    model, x, y, start, _, _ = DATASETS["Rat42"]
    x, y = np.array(x), np.array(y)
    _, expected = optimize.curve_fit(lambda x, *b: model(b, x), x, y, start, ftol=1e-14, xtol=1e-14)
    found = covariance(optimize.least_squares(lambda b: model(b, x) - y, start, "cs", ftol=1e-14, xtol=1e-14))
    assert np.allclose(found, expected, rtol=1e-4)  # its Jacobian is by differences


@pytest.mark.parametrize("solver", ["exact", "cg"])
@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy", "arctan"])
def test_other_losses_have_the_sandwich(loss, solver):
    fit = fit_of_lines(loss=loss, f_scale=0.7, tr_solver=solver, x_scale="jac", gtol=1e-10)
    of_gradient, of_hessian = Loss(loss, 0.7).weights(fit.fun)
    inverse = np.linalg.inv(SLOPES.T @ (of_hessian[:, None] * SLOPES))
    scores = (of_gradient * fit.fun)[:, None] * SLOPES
    expected = 30 / 27 * inverse @ scores.T @ scores @ inverse
    assert np.allclose(covariance(fit), expected, rtol=1e-9)


def test_errors_are_those_of_repeated_draws():
    """Of 150 fits of data with outliers the unknowns scatter as one fit says, to a fifth."""
    draws = np.random.default_rng(0)
    slopes = draws.standard_normal((100, 2))
    values, errors = [], []
    for _ in range(150):
        data = draws.standard_normal(100) * np.where(draws.random(100) < 0.1, 10, 1)
        fit = least_squares(lambda x, data=data: slopes @ x - data, np.zeros(2), lambda x: slopes, loss="huber")
        values.append(fit.x)
        errors.append(covariance(fit).standard_errors)
    assert np.allclose(np.mean(errors, axis=0), np.std(values, axis=0), rtol=0.2)


def test_an_unknown_at_a_bound_counts_as_known():
    fit = fit_of_lines((0.0, 0.6, 0.0), bounds=([-1, 0.5, -1], 1))
    assert fit.active_mask.tolist() == [0, -1, 0]
    found = covariance(fit)
    free = SLOPES[:, [0, 2]]
    expected = fit.fun @ fit.fun / 28 * np.linalg.inv(free.T @ free)
    assert np.allclose(found.matrix[np.ix_([0, 2], [0, 2])], expected, rtol=1e-13)
    assert not found.matrix[1].any() and not found.matrix[:, 1].any() and found.degrees_of_freedom == 28


def test_trees_and_sparse_rows():
    sparse = pytest.importorskip("scipy.sparse")
    expected = covariance(fit_of_lines())

    def residuals(x):
        return SLOPES @ np.append(x["a"], x["b"]) - DATA

    start = {"a": np.zeros(2), "b": np.zeros(1)}
    fit = least_squares(residuals, start, lambda x: sparse.csr_matrix(SLOPES), gtol=1e-12)
    found = covariance(fit)
    assert np.allclose(found, expected, rtol=1e-9)
    assert found.standard_errors["a"].shape == (2,) and "element (1) of 'a'" in repr(found)


def test_many_unknowns_are_printed_in_short():
    fit = least_squares(lambda x: np.append(x - 1, x - 3), np.zeros(25))
    text = repr(covariance(fit))
    assert len(text.splitlines()) == 23 and "5 more" in text and "25 degrees" in text


NO_FITS = {
    "no fit": ({"x": 3}, {}, TypeError, "result of least_squares"),
    "dependent": ({"jac": np.ones((4, 2))}, {}, ValueError, "sum of unknowns"),
    "unseen": ({"jac": np.eye(4, 2) * [1, 0]}, {}, ValueError, "unknown 1"),
    "other rows": ({"cost": 9.0}, {}, ValueError, "cost of the fit is 9, .* 4 residuals 2: give mesh="),
    "few": ({"fun": np.ones(2), "cost": 1.0, "jac": np.eye(2)}, {}, ValueError, "2 residuals for 2 .*absolute_sigma"),
    "operator": ({"jac": fit_of_lines}, {}, ValueError, "array or sparse"),
    "another shape": ({"jac": np.ones((4, 3))}, {}, ValueError, r"\(4, 3\).*4 residuals and 2 unknowns"),
    "robust": ({"loss": "huber"}, {"absolute_sigma": True}, ValueError, "linear.*'huber'"),
    "flag": ({}, {"absolute_sigma": 3}, TypeError, "absolute_sigma=3"),
}


@pytest.mark.parametrize("wrong", NO_FITS)
def test_what_is_no_fit(wrong):
    change, more, error, message = NO_FITS[wrong]
    fit = {"x": np.ones(2), "cost": 2.0, "fun": np.ones(4), "jac": np.eye(4, 2) + 1, **change}
    with pytest.raises(error, match=message):
        covariance({"x": 3} if wrong == "no fit" else fit, **more)


def test_a_fit_of_samples_says_how_to_have_its_errors():
    fit = {"x": np.ones(2), "cost": 1.0}
    with pytest.raises(ValueError, match="samples="):
        covariance(fit)
    with pytest.raises(ValueError, match="FlatParameters"):
        covariance({**fit, "x": mpishard.FlatParameters.of({"a": np.ones(2)}), "jac": np.eye(2), "fun": np.ones(2)})
