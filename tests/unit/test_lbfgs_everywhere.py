"""L-BFGS with and without bounds: as good as SciPy's L-BFGS-B on all test problems, and the same bits on any ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from bounded_problems import BOUNDED
from devices import Device
from mgh import PROBLEMS
from minimizer_runs import Problem, check_ranks, excess, minimized, of_the_set, rosenbrock
from problems import Problem as ProblemOfSet

from mpishard.backend import array as arrays
from mpishard.minimizers.lbfgs import LBFGS
from mpishard.minimizers.lbfgsb import LBFGSB
from mpishard.minimizers.method import Limits, Wanted
from mpishard.minimizers.space import LocalSpace

OPTIONS: dict[str, Any] = {"gtol": 1e-9, "ftol": 0.0, "maxiter": 3000, "maxfun": 3000}


@pytest.mark.parametrize(("problems", "method"), [(PROBLEMS, LBFGS), (BOUNDED, LBFGSB)], ids=["free", "bounded"])
def test_as_good_as_scipy_in_as_many_evaluations(problems: Sequence[ProblemOfSet], method: type[LBFGS]) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="SciPy is not installed (extra: test)")
    worse, ours, theirs = [], 0, 0
    for problem in problems:
        limits = Limits(lower=problem.lower, upper=problem.upper)
        with np.errstate(all="ignore"):
            expected = optimize.minimize(
                problem.function,
                problem.start,
                jac=True,
                bounds=problem.bounds,
                method="L-BFGS-B",
                options={**OPTIONS, "maxcor": 10},
            )
            minimizer = minimized(method(**OPTIONS), of_the_set(problem)[0], limits)
        value = minimizer.progress.value
        ours, theirs = ours + minimizer.progress.evaluations, theirs + expected.nfev
        if value > expected.fun + 1e-8 * max(abs(expected.fun), 1e-8) or excess(problem, value) > 1e-8:
            worse.append(f"{problem.name}: {value:.9g} after SciPy's {expected.fun:.9g}")
        if problem.lower is not None:
            assert ((minimizer.point >= problem.lower) & (minimizer.point <= problem.upper)).all()
    assert not worse
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize("cuts", [[0, 9, 17], [0, 1, 1, 5, 17]])
@pytest.mark.parametrize("search", ["more-thuente", "hager-zhang", "armijo"])
@pytest.mark.parametrize("bounded", [False, True])
def test_same_bits_on_any_ranks(cuts: list[int], search: str, bounded: bool) -> None:
    size = cuts[-1]
    limits = Limits(fixed=np.arange(size) == 3, scaling=np.linspace(0.5, 2, size), weights=np.linspace(1, 2, size))
    method = LBFGS(history=4, maxiter=25, line_search=search)
    if bounded:
        limits = Limits(lower=np.full(size, -1.5), upper=np.linspace(0.5, 1.5, size), scaling=limits.scaling)
        method = LBFGSB(history=4, maxiter=25, line_search=search)
    spaces = check_ranks(method, rosenbrock(size), limits, cuts)
    assert len({space.all_reduces for space in spaces}) == 1
    steps = minimized(method, rosenbrock(size), limits).progress
    # Two an evaluation, four an iteration and those of the start; for the generalised Cauchy point one, and two for
    # each division of breakpoints into bins, of which there are few.
    for_path = 5 * (steps.iterations + 1) if bounded else 0
    assert spaces[0].all_reduces <= 2 * steps.evaluations + 4 * (steps.iterations + 1) + for_path


@pytest.mark.parametrize("cuts", [[0, 7, 600], [0, 400, 400, 600], [0, 100, 251, 400, 400, 600]])
def test_same_bits_where_many_elements_meet_their_bounds(cuts: list[int]) -> None:
    """Breakpoints by hundreds, of which many coincide, on parts of different sizes, one of them empty."""
    size = 600
    form, goal = np.geomspace(1, 1e3, size), np.resize([3.0, -2.5, 0.5, 4.0, 0.0], size)

    def gradient(x: np.ndarray) -> tuple[float, np.ndarray]:
        rest, shared = x - goal, float(np.sum(x[::3]))
        g = form * rest
        g[::3] += 0.1 * shared
        return float(0.5 * np.sum(form * rest * rest) + 0.05 * shared**2), g

    problem = Problem(gradient, lambda x, v: form * v, np.zeros(size))
    limits = Limits(lower=np.resize([-1.0, -np.inf, 0.0], size), upper=np.resize([1.0, 2.0], size))
    method = LBFGSB(history=5, maxiter=30, ftol=0, gtol=0)
    check_ranks(method, problem, limits, cuts)
    point = minimized(method, problem, limits).point
    assert ((point == limits.lower) | (point == limits.upper)).sum() > size // 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bounded", [False, True])
def test_same_bits_on_a_device(device: Device, dtype: Any, bounded: bool) -> None:
    problem, size = rosenbrock(17), 17
    method: LBFGS = LBFGS(history=4, maxiter=12, damping="powell", xtol=1e-30)
    limits: dict[str, Any] = {"weights": np.linspace(1, 2, size), "scaling": np.linspace(0.5, 2, size)}
    if bounded:
        method = LBFGSB(history=4, maxiter=12)
        limits.update(lower=np.full(size, -1.5), upper=np.linspace(0.5, 1.5, size))
    limits = {name: value.astype(dtype) for name, value in limits.items()}
    limits["fixed"] = np.arange(size) == 3
    points: list[list[bytes]] = []
    for move in (np.array, device.put):
        point, vectors = move(problem.start.astype(dtype)), move(np.zeros((len(method.slots), size), dtype))
        parts: dict[str, Any] = {name: move(value) for name, value in limits.items()}
        minimizer = method.make(LocalSpace(size, point), vectors, point, Limits(**parts))
        minimizer.begin()
        points.append([])
        while minimizer.wanted is not Wanted.NOTHING:
            host = np.array(arrays.to_host(point))
            points[-1].append(host.tobytes())
            value, gradient = problem.gradient(host.astype(np.float64))
            minimizer.tell(value, move(gradient.astype(dtype)))
    assert points[0] == points[1]
    assert len(points[0]) > 10
