"""Unknowns of very different units: every method takes the steps that it takes in units that fit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from minimizer_runs import Problem, minimized, rosenbrock

from mpishard.minimizers.history import ReducedHistory
from mpishard.minimizers.lbfgs import LBFGS
from mpishard.minimizers.lbfgsb import LBFGSB
from mpishard.minimizers.method import Limits, Method
from mpishard.minimizers.newton import TruncatedNewton
from mpishard.minimizers.nonlinear_cg import NonlinearCG
from mpishard.minimizers.space import LocalSpace

UNITS = 2.0 ** np.linspace(-43, 23, 8).round()  # from 1e-13 to 1e7, without rounding


def in_units(problem: Problem, units: Any) -> Problem:
    """The same function of unknowns that are measured in other units."""

    def gradient(x: Any) -> tuple[float, Any]:
        value, g = problem.gradient(x / units)
        return value, g / units

    return Problem(gradient, lambda x, v: problem.product(x / units, v / units) / units, problem.start * units)


@pytest.mark.parametrize("method", [LBFGS, LBFGSB, TruncatedNewton])
def test_values_do_not_depend_on_units(method: type[Method]) -> None:
    problem, bounded = rosenbrock(UNITS.size), method is LBFGSB
    values: list[list[float]] = []
    for units in (np.ones(UNITS.size), UNITS):
        moved = in_units(problem, units)
        limits = Limits(scaling=units**2)
        if bounded:
            limits = Limits(-1.5 * units, np.linspace(0.5, 1.5, units.size) * units, scaling=units**2)
        values.append([])

        def told(x: Any, moved: Problem = moved, seen: list[float] = values[-1]) -> tuple[float, Any]:
            seen.append(moved.gradient(x)[0])
            return moved.gradient(x)

        minimizer = minimized(method(gtol=0, maxiter=8), moved._replace(gradient=told), limits)
        assert minimizer.stop_reason == "iterations"
    # All powers of two are exact; but sums have other quanta.
    np.testing.assert_allclose(values[0], values[1], rtol=1e-9)


def test_conjugate_gradients_begin_with_another_step_but_get_there() -> None:
    problem = in_units(rosenbrock(UNITS.size), UNITS)
    minimizer = minimized(NonlinearCG(gtol=0, ftol=1e-14, maxiter=500), problem, Limits(scaling=UNITS**2))
    np.testing.assert_allclose(minimizer.point / UNITS, 1, rtol=1e-5)


def test_pairs_whose_largest_elements_do_not_meet() -> None:
    """Their products are right over any free elements, and the same after a restart."""
    random, size, m = np.random.default_rng(1), 60, 2
    units = np.geomspace(1e-12, 1e12, size)
    rows = np.zeros((2 * m, size))
    history = ReducedHistory(LocalSpace(size, units), rows)
    g = random.standard_normal(size) / units

    def found(history: ReducedHistory, free: np.ndarray) -> tuple[object, ...]:
        """Of the path on which the free elements move without end, and the others do not."""
        ends, top = np.where(free, np.inf, 0.0), float(abs(g).max())
        point = history.cauchy_point(g * free, ends, lambda index: 0.0 * index, top, 1.0)
        return point.length, history.reduced_times(free, g * free, point, 1.0)

    for turn in range(4):
        s, y = history.open()
        s[:] = random.standard_normal(size) * units
        y[:] = s / units**2 * random.uniform(1, 2, size)
        history.measure(abs(s).max(), abs(y).max())
        free = random.random(size) < 0.7
        of_first = found(history, free)
        again = ReducedHistory(LocalSpace(size, units), rows)
        again.restore(json.loads(json.dumps(history.to_metadata())))
        assert found(again, free) == of_first and len(history) == min(turn + 1, m)
        order = history.order
        products = rows[order][:, None] * rows[[m + pair for pair in order]]
        np.testing.assert_allclose(history._free.sy, np.triu((products * free).sum(axis=-1)), rtol=1e-9)
        np.testing.assert_allclose(history._held.sy, np.triu((products * ~free).sum(axis=-1).T), rtol=1e-9)
        sy, ss = (np.array(of)[np.ix_(order, order)] for of in (history.sy, history.ss))
        np.testing.assert_allclose(np.tril(sy), np.tril(products.sum(axis=-1)), rtol=1e-9)
        np.testing.assert_allclose(ss, (rows[order][:, None] * rows[order]).sum(axis=-1), rtol=1e-9)
