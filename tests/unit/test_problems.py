"""The problems that minimisers are tested with: their gradients; minima are seen where they are minimised."""

from __future__ import annotations

import numpy as np
import pytest
from bounded_problems import BOUNDED, LARGE
from mgh import PROBLEMS

ALL = {problem.name: problem for problem in [*PROBLEMS, *BOUNDED, *LARGE]}


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_is_that_of_the_value(name):
    problem, random = ALL[name], np.random.default_rng(0)
    x = problem.start + 0.01 * random.standard_normal(problem.n)
    direction = random.standard_normal(problem.n)
    gradient = problem.function(x)[1]
    size = abs(gradient) @ abs(direction)
    # A finite difference along an imaginary step has no cancellation; one along a real step has, but differs from it
    # where a function is none of complex numbers.
    length = 1e-100
    assert abs(problem.function(x + 1j * length * direction)[0].imag / length - gradient @ direction) <= 1e-13 * size
    differences = []
    for length in (1e-4, 1e-5, 1e-6):
        ahead, behind = (problem.function(x + sign * length * direction)[0] for sign in (1, -1))
        error = abs((ahead - behind) / (2 * length) - gradient @ direction)
        differences.append(error - 1e-14 * abs(ahead) / length)
    assert min(differences) <= 1e-6 * size
