"""Small problems with Hessian products, and minimisations of them: also from metadata at every call, and by threads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import problems
from devices import Device
from thread_ranks import Team, ThreadSpace

from mpishard.backend.array import to_host
from mpishard.minimizers.method import Limits, Method, Minimizer, Wanted
from mpishard.minimizers.space import LocalSpace

Vector = np.ndarray
ANY = Limits()
TIGHT: dict[str, float] = dict(gtol=1e-10, ftol=0)


class Problem(NamedTuple):
    """A function with its gradient, and the products of its Hessian (or its Gauss-Newton matrix) with vectors."""

    gradient: Callable[[Vector], tuple[float, Vector]]
    product: Callable[[Vector, Vector], Vector]
    start: Vector


def rosenbrock(size: int) -> Problem:
    """The chained function; its minimum is 0, at ones."""

    def gradient(x: Vector) -> tuple[float, Vector]:
        bend, short = x[1:] - x[:-1] ** 2, 1 - x[:-1]
        g = np.zeros_like(x)
        g[:-1] = -400 * x[:-1] * bend - 2 * short
        g[1:] += 200 * bend
        return float(np.sum(100 * bend**2 + short**2)), g

    def product(x: Vector, v: Vector) -> Vector:
        h = np.zeros_like(x)
        h[:-1] = (1200 * x[:-1] ** 2 - 400 * x[1:] + 2) * v[:-1] - 400 * x[:-1] * v[1:]
        h[1:] += 200 * v[1:] - 400 * x[:-1] * v[:-1]
        return h

    return Problem(gradient, product, np.resize([-1.2, 1.0], size))


def exponentials(size: int, condition: float) -> Problem:
    """``sum(exp(u) - u)`` and a quadratic form of u, the distance from the minimiser, which is 1, 2, 3, ..."""
    goal = 1.0 + np.arange(size)
    form = np.geomspace(1, condition, size)

    def gradient(x: Vector) -> tuple[float, Vector]:
        u = x - goal
        with np.errstate(over="ignore"):
            return float(np.sum(np.exp(u) - u + 0.5 * form * u * u)), np.exp(u) - 1 + form * u

    return Problem(gradient, lambda x, v: np.exp(x - goal) * v + form * v, goal + np.resize([1.0, -0.7, 0.5], size))


def of_the_set(problem: problems.Problem) -> tuple[Problem, Limits]:
    """A problem of a set, with its bounds; the unknowns of that of Meyer differ in size, and need a scaling."""

    def gradient(x: Vector) -> tuple[float, Vector]:
        value, gradient = problem.function(x)
        return float(value), gradient

    scaling = problem.start**2 if "Meyer" in problem.name else None
    limits = Limits(lower=problem.lower, upper=problem.upper, scaling=scaling)
    return Problem(gradient, problem.hessian_product, problem.start), limits


def excess(problem: problems.Problem, value: float) -> float:
    """By how much a value is off the nearest local minimum that is known, relative to it if it is not 0."""
    return min(abs(value - known) / (abs(known) or 1.0) for known in (problem.minimum, *problem.others))


def everywhere(size: int, dtype: type = np.float64, bounded: bool = False) -> Limits:
    """A fixed element and a diagonal, and bounds that hold some elements at the minimum of `rosenbrock`."""
    bounds = np.linspace(-1.3, 0.9, size), np.linspace(0.8, 2.0, size)
    lower, upper = (bound.astype(dtype) if bounded else None for bound in bounds)
    return Limits(lower, upper, fixed=np.arange(size) == 3, scaling=np.linspace(0.5, 2, size).astype(dtype))


def started(method: Method, start: Vector, limits: Limits) -> Minimizer:
    space = LocalSpace(start.size, start)
    return method.make(space, np.zeros((len(method.slots), start.size), start.dtype), start.copy(), limits)


def tell_next(minimizer: Minimizer, problem: Problem) -> None:
    """Tell what is wanted; whatever row that writes must have another version then."""
    rows, versions = [row.tobytes() for row in minimizer.vectors], list(minimizer.versions)
    _tell(minimizer, problem)
    for row, before, version, now in zip(minimizer.vectors, rows, versions, minimizer.versions, strict=True):
        assert now > version or row.tobytes() == before


def _tell(minimizer: Minimizer, problem: Problem) -> None:
    if minimizer.wanted is Wanted.GRADIENT:
        minimizer.tell(*problem.gradient(minimizer.point.copy()))
    else:
        minimizer.tell_product(problem.product(minimizer.point.copy(), minimizer.direction.copy()))


def minimized(
    method: Method, problem: Problem, limits: Limits = ANY, iterates: list[Vector] | None = None
) -> Minimizer:
    """The minimisation at its end; `iterates` are added to."""
    minimizer = started(method, problem.start, limits)
    minimizer.begin()
    while minimizer.wanted is not Wanted.NOTHING:
        tell_next(minimizer, problem)
        if iterates is not None and minimizer.progress.accepted:
            iterates.append(minimizer.point.copy())
    return minimizer


def check_restarts(method: Method, problem: Problem, limits: Limits) -> None:
    """Go on from copies of the vectors and from metadata as text at every call: the end has the same bits."""
    whole = minimized(method, problem, limits)
    minimizer = started(method, problem.start, limits)
    minimizer.begin()
    while minimizer.wanted is not Wanted.NOTHING:
        saved = json.loads(json.dumps(minimizer.to_metadata()))
        vectors, point = minimizer.vectors.copy(), minimizer.point.copy()
        minimizer = method.make(LocalSpace(point.size, point), vectors, point, limits)
        minimizer.restore(saved)
        assert json.dumps(minimizer.to_metadata()) == json.dumps(saved)
        tell_next(minimizer, problem)
    assert minimizer.progress == whole.progress
    assert minimizer.stop_reason == whole.stop_reason
    np.testing.assert_array_equal(minimizer.point, whole.point)
    np.testing.assert_array_equal(minimizer.vectors, whole.vectors)


def check_ranks(method: Method, problem: Problem, limits: Limits, cuts: Sequence[int]) -> list[ThreadSpace]:
    """Minimise on a thread for each part between two cuts: the end has the bits of one process; the spaces."""
    whole, team = minimized(method, problem, limits), Team(len(cuts) - 1)

    def rank_minimizes(rank: int) -> tuple[Minimizer, ThreadSpace]:
        space = ThreadSpace(team, rank, cuts, problem.start)
        own = Limits(**{name: space.own(value) for name, value in vars(limits).items() if value is not None})
        point = space.own(problem.start)
        minimizer = method.make(space, np.zeros((len(method.slots), space.size)), point, own)
        minimizer.begin()
        while minimizer.wanted is not Wanted.NOTHING:
            where = space.whole(minimizer.point)
            if minimizer.wanted is Wanted.GRADIENT:
                value, gradient = problem.gradient(where)
                minimizer.tell(value, space.own(gradient))
            else:
                minimizer.tell_product(space.own(problem.product(where, space.whole(minimizer.direction))))
        return minimizer, space

    results = team.run(rank_minimizes)
    np.testing.assert_array_equal(np.concatenate([minimizer.point for minimizer, _ in results]), whole.point)
    for minimizer, _ in results:
        assert minimizer.to_metadata() == whole.to_metadata()
    return [space for _, space in results]


def check_device(device: Device, method: Method, problem: Problem, limits: Limits) -> None:
    """Minimise in device memory: the end has the bits of the host."""
    host = minimized(method, problem, limits)
    own = Limits(**{name: device.put(value) for name, value in vars(limits).items() if value is not None})
    point = device.put(problem.start)
    vectors = device.put(np.zeros((len(method.slots), point.size)))
    minimizer = method.make(LocalSpace(point.size, point), vectors, point, own)
    minimizer.begin()
    while minimizer.wanted is not Wanted.NOTHING:
        where = to_host(minimizer.point)
        if minimizer.wanted is Wanted.GRADIENT:
            value, gradient = problem.gradient(where)
            minimizer.tell(value, device.put(gradient))
        else:
            minimizer.tell_product(device.put(problem.product(where, to_host(minimizer.direction))))
    assert minimizer.progress == host.progress
    np.testing.assert_array_equal(to_host(minimizer.point), host.point)
