"""Small problems with Hessian products, and minimisations of them: also from metadata at every call, and by threads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import descent
import numpy as np
import problems
from devices import Device
from thread_ranks import Team, ThreadSpace

from mpishard.backend.array import to_host
from mpishard.minimizers.method import Limits, Method, Minimizer, Wanted
from mpishard.minimizers.space import LocalSpace, Space

Vector = np.ndarray
ANY = Limits()
TIGHT: dict[str, float] = dict(gtol=1e-10, ftol=0)


class Problem(NamedTuple):
    """A function with its gradient, and the products of its Hessian (or its Gauss-Newton matrix) with vectors."""

    gradient: Callable[[Vector], tuple[float, Vector]]
    product: Callable[[Vector, Vector], Vector]
    start: Vector


def rosenbrock(size: int, dtype: Any = np.float64) -> Problem:
    """The chained function; its minimum is 0, at ones."""
    return Problem(descent.rosenbrock, descent.curvature, np.resize([-1.2, 1.0], size).astype(dtype))


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


def everywhere(size: int, dtype: Any = np.float64, bounded: bool = False) -> Limits:
    """A fixed element, weights and a diagonal, and bounds that hold some elements at the minimum of `rosenbrock`."""
    sides = [np.linspace(*ends, size).astype(dtype) for ends in ((-1.3, 0.9), (0.8, 2.0), (1, 2), (0.5, 2))]
    lower, upper = sides[:2] if bounded else (None, None)
    return Limits(lower, upper, fixed=np.arange(size) == 3, weights=sides[2], scaling=sides[3])


def started(
    method: Method, start: Vector, limits: Limits, space: Space | None = None, put: Callable = np.array
) -> Minimizer:
    """Of this start; `put` makes the arrays that the minimizer has."""
    point = put(start)
    limits = Limits(
        **{name: value if callable(value) else put(value) for name, value in vars(limits).items() if value is not None}
    )
    vectors = np.zeros((len(method.slots), point.size), start.dtype)
    vectors = vectors if isinstance(point, np.ndarray) else put(vectors)
    return method.make(space or LocalSpace(point.size, point), vectors, point, limits)


def tell(minimizer: Minimizer, problem: Problem, whole: Callable = np.copy, put: Callable = np.asarray) -> None:
    """Tell what is wanted at the `whole` point; of the answer the minimizer has what `put` makes."""
    point = whole(minimizer.point)
    if minimizer.wanted is Wanted.GRADIENT:
        value, gradient = problem.gradient(point)
        minimizer.tell(value, put(gradient))
    else:
        minimizer.tell_product(put(problem.product(point, whole(minimizer.direction))))


def tell_next(minimizer: Minimizer, problem: Problem) -> None:
    """Tell what is wanted, at a point within the bounds; whatever row that writes must have another version then."""
    limits = minimizer.limits
    moves = slice(None) if limits.fixed is None else ~limits.fixed
    assert limits.lower is None or (minimizer.point >= limits.lower)[moves].all()
    assert limits.upper is None or (minimizer.point <= limits.upper)[moves].all()
    rows, versions = [row.tobytes() for row in minimizer.vectors], list(minimizer.versions)
    tell(minimizer, problem)
    for row, before, version, now in zip(minimizer.vectors, rows, versions, minimizer.versions, strict=True):
        assert now > version or row.tobytes() == before


def finished(minimizer: Minimizer, problem: Problem, iterates: list[Vector] | None = None) -> Minimizer:
    """At its end; `iterates` are added to."""
    while minimizer.wanted is not Wanted.NOTHING:
        tell_next(minimizer, problem)
        if iterates is not None and minimizer.progress.accepted:
            iterates.append(minimizer.point.copy())
    return minimizer


def minimized(
    method: Method, problem: Problem, limits: Limits = ANY, iterates: list[Vector] | None = None
) -> Minimizer:
    minimizer = started(method, problem.start, limits)
    minimizer.begin()
    return finished(minimizer, problem, iterates)


def rebuilt(minimizer: Minimizer, method: Method) -> Minimizer:
    """Another one, from copies of vectors and point and from the metadata as text."""
    saved = json.loads(json.dumps(minimizer.to_metadata()))
    vectors, point = minimizer.vectors.copy(), minimizer.point.copy()
    minimizer = method.make(LocalSpace(point.size, point), vectors, point, minimizer.limits)
    minimizer.restore(saved)
    assert json.dumps(minimizer.to_metadata()) == json.dumps(saved)
    return minimizer


def check_restarts(method: Method, problem: Problem, limits: Limits) -> Minimizer:
    """Go on from the metadata at every call: the end has the same bits."""
    whole = minimized(method, problem, limits)
    minimizer = started(method, problem.start, limits)
    minimizer.begin()
    while minimizer.wanted is not Wanted.NOTHING:
        minimizer = rebuilt(minimizer, method)
        tell_next(minimizer, problem)
    assert repr(minimizer.progress) == repr(whole.progress)  # where a value may be NaN
    assert minimizer.stop_reason == whole.stop_reason
    np.testing.assert_array_equal(minimizer.point, whole.point)
    np.testing.assert_array_equal(minimizer.vectors, whole.vectors)
    return whole


def check_ranks(method: Method, problem: Problem, limits: Limits, cuts: Sequence[int]) -> tuple[Minimizer, int]:
    """Minimise on a thread for each part between two cuts: the bits of one process, and its number of all-reduces."""
    whole, team = minimized(method, problem, limits), Team(len(cuts) - 1)

    def rank_minimizes(rank: int) -> tuple[Minimizer, int]:
        space = ThreadSpace(team, rank, cuts, problem.start)
        minimizer = started(method, problem.start, limits, space, space.own)
        minimizer.begin()
        while minimizer.wanted is not Wanted.NOTHING:
            tell(minimizer, problem, space.whole, space.own)
        return minimizer, space.all_reduces

    results = team.run(rank_minimizes)
    np.testing.assert_array_equal(np.concatenate([minimizer.point for minimizer, _ in results]), whole.point)
    np.testing.assert_array_equal(np.concatenate([minimizer.vectors for minimizer, _ in results], 1), whole.vectors)
    for minimizer, _ in results:
        assert minimizer.to_metadata() == whole.to_metadata()
    (count,) = {all_reduces for _, all_reduces in results}
    return whole, count


def check_device(device: Device, method: Method, problem: Problem, limits: Limits) -> None:
    """Minimise in device memory: the end has the bits of the host."""
    host = minimized(method, problem, limits)
    minimizer = started(method, problem.start, limits, put=device.put)
    minimizer.begin()
    while minimizer.wanted is not Wanted.NOTHING:
        tell(minimizer, problem, lambda there: to_host(there).copy(), device.put)
    assert repr(minimizer.progress) == repr(host.progress)
    assert host.progress.evaluations + host.progress.products > 10
    np.testing.assert_array_equal(to_host(minimizer.point), host.point)
    np.testing.assert_array_equal(to_host(minimizer.vectors), host.vectors)
