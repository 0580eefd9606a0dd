"""python benchmarks/total_variation.py [--above SHARE] [--only WORD] [--most N]

Total variation and norms of groups by the L-BFGS-B of mpishard: evaluations of the function with its gradient, and
seconds of processor time, until the value is at most --above (1e-6) above the least that any method has found, as a
share of it.  Beside it

- FISTA with restarts (O'Donoghue and Candes, 2015), which is given the largest eigenvalue of the Hessian: an iteration
  is an evaluation and a proximal step, of total variation 50 sweeps over its dual field, from the last one, in NumPy;
- of total variation the primal-dual method of Chambolle and Pock (2011), which is given this eigenvalue, too: an
  iteration is a product with the matrix and its transposed, which is what an evaluation costs here;
- where pyproximal is installed, its FISTA with its total variation, without bounds, as the first one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from fista import Measured, fista
from threadpoolctl import threadpool_limits

Array = np.ndarray
SWEEPS = 50  # of a proximal step of FISTA


class Problem(NamedTuple):
    """Half of the squares of ``product(x) - data``, and the term: of total variation `shape` is that of the image."""

    name: str
    product: Callable[[Array], Array]
    transposed: Callable[[Array], Array]
    data: Array
    curvature: float  # the largest eigenvalue of the Hessian
    shape: tuple[int, ...]
    weight: float
    groups: bool = False
    lower: float = -math.inf

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def function(self, x: Array) -> tuple[float, Array]:
        residual = self.product(x) - self.data
        return 0.5 * float(residual @ residual), self.transposed(residual)

    def value(self, x: Array, value: float) -> float:
        if self.groups:
            return value + self.weight * float(np.sqrt((x.reshape(self.shape) ** 2).sum(1)).sum())
        return value + self.weight * float(lengths(differences(x.reshape(self.shape))).sum())


def differences(x: Array) -> Array:
    found = np.zeros((x.ndim, *x.shape))
    found[0, :-1] = x[1:] - x[:-1]
    if x.ndim > 1:
        found[1, :, :-1] = x[:, 1:] - x[:, :-1]
    return found


def adjoint(p: Array) -> Array:
    found = np.zeros(p.shape[1:])
    found[:-1] -= p[0, :-1]
    found[1:] += p[0, :-1]
    if len(p) > 1:
        found[:, :-1] -= p[1, :, :-1]
        found[:, 1:] += p[1, :, :-1]
    return found


def lengths(p: Array) -> Array:
    return np.sqrt((p * p).sum(0))


def image(size: int) -> Array:
    """Ellipses of constant values."""
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    found = 1.0 * (x**2 / 0.7 + y**2 < 0.8)
    found += 0.5 * ((x - 0.3) ** 2 + (y + 0.2) ** 2 < 0.08) - 0.6 * ((x + 0.3) ** 2 / 2 + (y - 0.1) ** 2 < 0.05)
    return found


def blur(size: int, width: float) -> Array:
    place = np.arange(size)
    found = np.exp(-0.5 * ((place[:, None] - place) / width) ** 2)
    return found / found.sum(1, keepdims=True)


def rays(size: int, angles: int) -> Array:
    """The sums of the pixels along parallel lines of each angle, (lines, pixels)."""
    y, x = (np.indices((size, size)) - (size - 1) / 2).reshape(2, -1)
    rows = []
    for angle in np.arange(angles) * (math.pi / angles):
        line = np.rint(x * math.cos(angle) + y * math.sin(angle)).astype(int)
        rows += [(line == number).astype(float) for number in np.unique(line)]
    return np.array(rows) / size


def problems() -> Iterator[Problem]:
    rng = np.random.default_rng(0)
    truth = image(96)
    data = (truth + 0.1 * rng.standard_normal(truth.shape)).reshape(-1)
    for weight in (0.1, 0.3):
        yield Problem("denoising, 96 x 96", np.copy, np.copy, data, 1.0, truth.shape, weight)
    truth, matrix = image(48), blur(48, 1.5)
    data = (matrix @ truth @ matrix.T + 0.01 * rng.standard_normal(truth.shape)).reshape(-1)

    def blurred(x: Array) -> Array:
        return (matrix @ x.reshape(48, 48) @ matrix.T).reshape(-1)

    def back(r: Array) -> Array:
        return (matrix.T @ r.reshape(48, 48) @ matrix).reshape(-1)

    curvature = float(np.linalg.norm(matrix, 2)) ** 4
    for weight in (0.01, 0.001):
        yield Problem("deblurring, 48 x 48", blurred, back, data, curvature, truth.shape, weight)
    yield Problem("deblurring, 48 x 48, x >= 0", blurred, back, data, curvature, truth.shape, 0.001, lower=0.0)
    truth, lines = image(32), rays(32, 12)
    data = lines @ truth.reshape(-1) + 0.005 * rng.standard_normal(len(lines))
    curvature = float(np.linalg.norm(lines, 2)) ** 2
    for weight in (0.003, 0.0003):
        yield Problem("tomography, 32 x 32", lines.__matmul__, lines.T.__matmul__, data, curvature, truth.shape, weight)
    rows = rng.standard_normal((300, 900)) * np.logspace(0, -1, 900)
    known = np.where(rng.random((300, 1)) < 0.1, rng.standard_normal((300, 3)), 0)
    data = rows @ known.reshape(-1) + 0.1 * rng.standard_normal(300)
    top = float(np.sqrt(((rows.T @ data).reshape(300, 3) ** 2).sum(1)).max())
    curvature = float(np.linalg.norm(rows, 2)) ** 2
    for share in (0.1, 0.01):
        yield Problem(
            "groups, 300 x 900", rows.__matmul__, rows.T.__matmul__, data, curvature, (300, 3), share * top, True
        )


def by_mpishard(problem: Problem, most: int) -> tuple[Measured, Any]:
    import mpishard

    trace = Measured(problem)
    term: Any = mpishard.TotalVariation(problem.weight)
    if problem.groups:
        term = mpishard.GroupL1(problem.weight, axis=1)
    found = mpishard.minimize(
        mpishard.regularized(trace, term),
        np.zeros(problem.shape),
        bounds=None if math.isinf(problem.lower) else (problem.lower, None),
        options={"gtol": 1e-7 * problem.weight, "ftol": 1e-10, "maxfun": most, "maxiter": most},
    )
    return trace, found


def by_fista(problem: Problem, most: int, target: float) -> Measured:
    least, dual = problem.weight / problem.curvature, np.zeros((len(problem.shape), *problem.shape))

    def of_field(center: Array) -> Array:
        nonlocal dual
        found, dual = proximal_point(problem, center.reshape(problem.shape), problem.curvature, dual)
        return found

    def of_groups(center: Array) -> Array:
        blocks = center.reshape(problem.shape)
        norms = np.sqrt((blocks**2).sum(1, keepdims=True))
        return (blocks * np.maximum(1 - least / np.maximum(norms, 1e-300), 0)).reshape(-1)

    return fista(problem, of_groups if problem.groups else of_field, most, target)[0]


def proximal_point(problem: Problem, center: Array, alpha: float, dual: Array) -> tuple[Array, Array]:
    """By the projected gradient with momentum on the dual field (Beck and Teboulle, 2009)."""
    ahead, t = dual, 1.0
    for _ in range(SWEEPS):
        x = np.maximum(center - adjoint(ahead) / alpha, problem.lower)
        new = ahead + alpha / (4 * center.ndim) * differences(x)
        new /= np.maximum(lengths(new) / problem.weight, 1.0)
        following = 0.5 * (1 + math.sqrt(1 + 4 * t * t))
        ahead = new + (t - 1) / following * (new - dual)
        dual, t = new, following
    return np.maximum(center - adjoint(dual) / alpha, problem.lower).reshape(-1), dual


def by_chambolle_pock(problem: Problem, most: int, target: float) -> Measured:
    """With the matrix and the differences in one operator; the data are in the dual variable of the first."""
    trace, dimensions = Measured(problem), len(problem.shape)
    of_data = 1 / math.sqrt(problem.curvature)  # both operators have the norm 1
    of_field = 1 / math.sqrt(4 * dimensions)
    step = 1 / math.sqrt(2)
    x = ahead = np.zeros(problem.size)
    p, q = np.zeros((dimensions, *problem.shape)), np.zeros(problem.data.size)
    for _ in range(most):
        q = q + step * of_data * problem.product(ahead)
        q = (q - step * of_data * problem.data) / (1 + step * of_data**2)
        p = p + step * of_field * differences(ahead.reshape(problem.shape))
        p /= np.maximum(lengths(p) * of_field / problem.weight, 1.0)
        flow = of_data * problem.transposed(q) + of_field * adjoint(p).reshape(-1)
        new = np.maximum(x - step * flow, problem.lower)
        x, ahead = new, 2 * new - x
        trace.note(x)
        if trace.values[-1] <= target:
            break
    return trace


def by_pyproximal(problem: Problem, most: int, target: float) -> Measured:
    import pylops
    import pyproximal

    trace, size = Measured(problem), problem.size
    operator = pylops.FunctionOperator(problem.product, problem.transposed, problem.data.size, size)

    class Reached(Exception):
        pass

    def note(x: Array) -> None:
        trace.note(x)
        if trace.values[-1] <= target:
            raise Reached

    with contextlib.suppress(Reached):
        pyproximal.optimization.primal.ProximalGradient(
            pyproximal.L2(Op=operator, b=problem.data),
            pyproximal.TV(problem.shape, sigma=problem.weight, niter=SWEEPS, rtol=0.0),
            np.zeros(size),
            tau=1 / problem.curvature,
            niter=most,
            acceleration="fista",
            callback=note,
        )
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--above", type=float, default=1e-6)
    parser.add_argument("--only", default="", help="problems whose name has this word")
    parser.add_argument("--most", type=int, default=3000, help="evaluations")
    options = parser.parse_args()
    print(f"{f'to {options.above:g} above the least value':50}{'evaluations':>12}{'seconds':>9}")
    with threadpool_limits(1):
        for problem in problems():
            if options.only not in problem.name:
                continue
            trace, found = by_mpishard(problem, options.most)
            print(f"{problem.name}, weight {problem.weight:.3g}: {found.message}")
            traces = {"mpishard": trace}
            # Others end where they are below this by much, which would show that ours is no minimum.
            least = trace.values[-1]
            target = least - 1e-9 * abs(least)
            traces["FISTA"] = by_fista(problem, options.most, target)
            if not problem.groups:
                traces["Chambolle and Pock"] = by_chambolle_pock(problem, options.most, target)
            if not problem.groups and math.isinf(problem.lower) and importlib.util.find_spec("pyproximal"):
                traces["pyproximal"] = by_pyproximal(problem, options.most, target)
            least = min(min(trace.values) for trace in traces.values())
            for name, each in traces.items():
                lowest = np.minimum.accumulate(each.values)
                there = np.flatnonzero(lowest <= least + options.above * abs(least))
                if len(there):
                    print(f"    {name:46}{there[0] + 1:12}{each.seconds[there[0]]:9.2f}", flush=True)
                else:
                    share = (lowest[-1] - least) / abs(least)
                    print(f"    {name:46}{len(lowest):12}{each.seconds[-1]:9.2f}, and is {share:.1e} above", flush=True)


if __name__ == "__main__":
    main()
