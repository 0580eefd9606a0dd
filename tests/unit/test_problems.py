"""The problems that minimisers are tested with: their gradients, second derivatives and known minima."""

from __future__ import annotations

import numpy as np
import pytest
from bounded_problems import BOUNDED, LARGE
from mgh import PROBLEMS
from problems import Problem
from threadpoolctl import threadpool_limits

ALL = [*PROBLEMS, *BOUNDED, *LARGE]
NAMES = [problem.name for problem in ALL]
# Where SciPy's L-BFGS-B ends before, or in another valley: a point of the lowest value, to the digits that are known.
MINIMIZERS = {
    "3 Powell badly scaled": [1.0981593296999e-5, 9.1061467398665],
    "6 Jennrich and Sampson": [0.2578252136, 0.2578252136],
    "10 Meyer": [5.6096364710e-3, 6181.3463463, 345.22363462],
    "Gay 3 Powell badly scaled": [1.11111e-5, 9.0],
}


def test_there_are_as_many_problems_as_wanted() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert len({name.split()[0] for name in NAMES if name[0].isdigit()}) == 35
    assert len(BOUNDED) >= 20


@pytest.mark.parametrize("problem", ALL, ids=NAMES)
def test_the_gradient_is_that_of_the_value(problem: Problem) -> None:
    random = np.random.default_rng(0)
    x = problem.start + 0.01 * random.standard_normal(problem.n)
    direction = random.standard_normal(problem.n)
    value, gradient = problem.function(x)
    assert np.isscalar(value) and gradient.shape == x.shape and gradient.dtype == x.dtype == np.float64
    size = abs(gradient) @ abs(direction)
    # A finite difference along an imaginary step has no cancellation; one along a real step has.
    length = 1e-100
    assert abs(problem.function(x + 1j * length * direction)[0].imag / length - gradient @ direction) <= 1e-13 * size
    differences = []
    for length in (1e-4, 1e-5, 1e-6):
        ahead, behind = (problem.function(x + sign * length * direction)[0] for sign in (1, -1))
        error = abs((ahead - behind) / (2 * length) - gradient @ direction)
        differences.append(error - 1e-14 * abs(value) / length)
    assert min(differences) <= 1e-6 * size


@pytest.mark.parametrize("problem", ALL, ids=NAMES)
def test_the_hessian_product_is_that_of_the_gradient(problem: Problem) -> None:
    random = np.random.default_rng(1)
    x, direction, other = problem.start + 0.01, *random.standard_normal((2, problem.n))
    product = problem.hessian_product(x, direction)
    opposite = problem.hessian_product(x, other)
    assert abs(product @ other - opposite @ direction) <= 1e-11 * (abs(product) @ abs(other))
    ahead, behind = (problem.function(x + sign * 1e-5 * direction)[1] for sign in (1, -1))
    np.testing.assert_allclose(product, (ahead - behind) / 2e-5, rtol=0, atol=1e-3 * abs(product).max())


@pytest.mark.parametrize("problem", [problem for problem in ALL if problem.name in MINIMIZERS], ids=list(MINIMIZERS))
def test_the_minimum_is_at_a_known_point(problem: Problem) -> None:
    value = problem.function(np.array(MINIMIZERS[problem.name]))[0]
    np.testing.assert_allclose(value, problem.minimum, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize(
    "problem", [problem for problem in ALL if problem.name not in MINIMIZERS], ids=lambda it: it.name
)
def test_the_minimum_is_what_another_minimizer_finds(problem: Problem) -> None:
    minimize = pytest.importorskip("scipy.optimize", reason="a minimizer that is not ours").minimize
    options = dict(maxcor=30, ftol=1e-16, gtol=1e-11, maxiter=5000, maxfun=5000)
    with threadpool_limits(1), np.errstate(all="ignore"):
        result = minimize(
            problem.function, problem.start, jac=True, method="L-BFGS-B", bounds=problem.bounds, options=options
        )
    near = min((problem.minimum, *problem.others), key=lambda value: abs(value - result.fun))
    np.testing.assert_allclose(result.fun, near, rtol=3e-7, atol=1e-13)
    assert result.fun >= problem.minimum - 1e-8 * abs(problem.minimum) - 1e-16
