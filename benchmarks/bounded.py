"""python benchmarks/bounded.py [--history M] [--gtol G] [--ftol F] [--starts N] [--only WORD] [--maxfun N] [--cutest]

L-BFGS-B of mpishard beside SciPy's where most unknowns end at a bound: source inversion by finite elements, bounded
deblurring, non-negative least squares, and quadratics of condition 1e4 to 1e8 in a box; several starts each.  Both
begin at the same points with the same history and tolerances.  The finite elements are those of scikit-fem, which must
be installed.  With --cutest: problems of CUTEst, from their standard starts; they need sif2jax.

A line a run: the final values and their ratio, evaluations, those of both to the value that both reach (the higher of
the final ones), the elements at a bound, in how many of the counts of evaluations 25, 50, 100, ... that both have
reached the best value so far is at most SciPy's, and why it has ended.  Then the sums: of evaluations, of runs that end
at most 2 % above SciPy, of the counts.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from mpishard.minimizers import LBFGSB
from mpishard.minimizers.method import Limits, Wanted
from mpishard.minimizers.space import LocalSpace

Array = np.ndarray
CUTEST = (
    *("BDEXP", "BIGGS5", "BRANIN", "CAMEL6", "EG1", "EXPLIN", "EXPLIN2", "EXPQUAD", "HART6", "HATFLDA", "HATFLDB"),
    *("HATFLDC", "HIMMELP1", "HS1", "HS110", "HS2", "HS25", "HS3", "HS38", "HS3MOD", "HS4", "HS45", "HS5", "LOGROS"),
    *("MAXLIKA", "NONSCOMP", "PALMER1", "PALMER2", "PALMER3", "PALMER4", "QUDLIN", "S368"),
)
COUNTS = (25, 50, 100, 200, 400, 800, 1600, 3200, 6400, 12800)
ABOVE = 1.02  # a final value is as good as SciPy's up to this ratio


class Problem(NamedTuple):
    """A function with bounds and a start."""

    name: str
    function: Callable[[Array], tuple[float, Array]]
    start: Array
    lower: Array
    upper: Array


class Trace(NamedTuple):
    """How a minimisation went: the least value after each evaluation, the point in the end, and why it ended."""

    values: Array
    point: Array
    reason: str


def source_inversion(side: int, weight: float, seed: int) -> tuple[Callable[[Array], tuple[float, Array]], int]:
    """Find the source f in [0, 2] of -laplace u = f from u at some nodes: bilinear elements on the unit square."""
    from scipy.sparse.linalg import splu
    from skfem import Basis, ElementQuad1, MeshQuad
    from skfem.models.poisson import laplace
    from skfem.models.poisson import mass as product

    rng = np.random.default_rng(seed)
    basis = Basis(MeshQuad.init_tensor(*(np.linspace(0, 1, side + 2),) * 2), ElementQuad1())
    inner = basis.complement_dofs(basis.get_dofs())
    stiffness, masses = (form.assemble(basis).tocsr()[inner][:, inner] for form in (laplace, product))
    solve = splu(stiffness.tocsc()).solve
    x, y = basis.doflocs[:, inner]
    true = 2.0 * (((x - 0.3) ** 2 + (y - 0.4) ** 2 < 0.02) | ((abs(x - 0.7) < 0.12) & (abs(y - 0.65) < 0.1)))
    seen = rng.permutation(inner.size)[: inner.size // 3]
    data = solve(masses @ true)[seen]
    data = data + 1e-3 * abs(data).max() * rng.normal(size=seen.size)
    scale = 1 / abs(data).max() ** 2

    def function(f: Array) -> tuple[float, Array]:
        rest = solve(masses @ f)[seen] - data
        back = np.zeros(inner.size)
        back[seen] = rest
        of_mass = masses @ f
        value = 0.5 * scale * (rest @ rest) + 0.5 * weight * (f @ of_mass)
        return float(value), scale * (masses @ solve(back)) + weight * of_mass

    return function, inner.size


def deblurring(side: int, weight: float, seed: int) -> tuple[Callable[[Array], tuple[float, Array]], int]:
    """An image of 0 and 1, blurred by a Gaussian, with noise."""
    rng = np.random.default_rng(seed)
    image = np.zeros((side, side))
    for _ in range(6):
        i, j = rng.integers(0, side - 8, 2)
        image[i : i + rng.integers(4, side // 3), j : j + rng.integers(4, side // 3)] = 1
    k = np.fft.fftfreq(side)
    transfer = np.exp(-2 * (np.pi * 2.0) ** 2 * (k[:, None] ** 2 + k[None, : side // 2 + 1] ** 2))

    def blur(of: Array) -> Array:
        return np.fft.irfft2(transfer[:, : side // 2 + 1] * np.fft.rfft2(of), s=of.shape)

    data = blur(image) + 0.01 * rng.normal(size=image.shape)

    def function(x: Array) -> tuple[float, Array]:
        x = x.reshape(image.shape)
        rest = blur(x) - data
        return float(0.5 * (rest**2).sum() + 0.5 * weight * (x**2).sum()), (blur(rest) + weight * x).ravel()

    return function, side * side


def least_squares(rows: int, columns: int, decay: float, seed: int) -> tuple[Callable[..., tuple[float, Array]], int]:
    """Non-negative least squares with columns of falling size."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rows, columns)) @ np.diag(np.logspace(0, -decay, columns)[rng.permutation(columns)])
    true = np.maximum(rng.normal(size=columns), 0) * (rng.random(columns) < 0.3)
    data = matrix @ true + 0.1 * rng.normal(size=rows)

    def function(x: Array) -> tuple[float, Array]:
        rest = matrix @ x - data
        return float(0.5 * rest @ rest), matrix.T @ rest

    return function, columns


def quadratic(size: int, condition: float, seed: int) -> tuple[Callable[[Array], tuple[float, Array]], int]:
    """A quadratic whose eigenvectors are turned by two reflections; its minimum lies outside of the box."""
    rng = np.random.default_rng(seed)
    spectrum = np.logspace(0, np.log10(condition), size)
    u, v = (vector / np.linalg.norm(vector) for vector in rng.normal(size=(2, size)))
    middle = 3 * rng.normal(size=size)

    def turn(x: Array) -> Array:
        x = x - 2 * u * (u @ x)
        return x - 2 * v * (v @ x)

    def back(x: Array) -> Array:
        x = x - 2 * v * (v @ x)
        return x - 2 * u * (u @ x)

    def function(x: Array) -> tuple[float, Array]:
        slope = turn(spectrum * back(x - middle))
        return float(0.5 * (x - middle) @ slope), slope

    return function, size


def problems(starts: int) -> Iterator[Problem]:
    for kind, build, cases, low, high in (
        ("elements", lambda case, seed: source_inversion(41, case, seed), (1e-6, 1e-5, 1e-4), 0.0, 2.0),
        ("deblurring", lambda case, seed: deblurring(48, case, seed), (0.0, 1e-5, 1e-3), 0.0, 1.0),
        ("least squares", lambda case, seed: least_squares(300, 500, case, seed), (0.5, 1.5), 0.0, np.inf),
        ("box of condition", lambda case, seed: quadratic(400, case, seed), (1e4, 1e6, 1e8), -1.0, 1.0),
    ):
        for case in cases:
            for start in range(starts):
                function, size = build(case, start // 3)
                lower, upper = np.full(size, low), np.full(size, high)
                where = ("low", "middle", "random")[start % 3]
                top = np.minimum(upper, 2.0)
                x = lower if where == "low" else 0.5 * (lower + top)
                if where == "random":
                    x = lower + (top - lower) * np.random.default_rng(start).random(size)
                yield Problem(f"{kind} {case:g}, {where} {start // 3}", function, x.copy(), lower, upper)


def of_cutest() -> Iterator[Problem]:
    """Problems of CUTEst as sif2jax has them, in their default sizes."""
    import jax

    jax.config.update("jax_enable_x64", True)
    found = importlib.util.find_spec("sif2jax")
    if found is None or not found.submodule_search_locations:
        sys.exit("--cutest needs sif2jax, which is not installed: pip install sif2jax")
    package, folder = "sif2jax", Path(found.submodule_search_locations[0])
    # The package makes all of its problems when it is imported, which takes minutes: its folders without its __init__.
    for part in ("", "cutest", "_bounded_minimisation"):
        package, folder = (f"{package}.{part}", folder / part) if part else (package, folder)
        sys.modules[package] = type(sys)(package)
        sys.modules[package].__path__ = [str(folder)]
    for name in CUTEST:
        module = importlib.import_module(f"{package}.{name.lower()}")
        problem = getattr(module, name)()
        slope = jax.jit(jax.value_and_grad(lambda y, of=problem: of.objective(y, of.args)))

        def function(x: Array, slope: Callable[..., Any] = slope) -> tuple[float, Array]:
            value, gradient = slope(x)
            return float(value), np.array(gradient, np.float64)

        lower, upper = (np.array(side, np.float64).ravel() for side in problem.bounds)
        start = np.clip(np.array(problem.y0, np.float64).ravel(), lower, upper)
        yield Problem(f"{name}, {start.size}", function, start, lower, upper)


def recorded(problem: Problem) -> tuple[Callable[[Array], tuple[float, Array]], list[float]]:
    """The function, and a list of its values."""
    values: list[float] = []

    def function(x: Array) -> tuple[float, Array]:
        value, gradient = problem.function(x)
        values.append(value)
        return value, gradient

    return function, values


def ours(problem: Problem, method: LBFGSB) -> Trace:
    function, values = recorded(problem)
    point = problem.start.copy()
    limits = Limits(lower=problem.lower, upper=problem.upper)
    vectors = np.zeros((len(method.slots), point.size))
    minimizer = method.make(LocalSpace(point.size, point), vectors, point, limits)
    minimizer.begin()
    while minimizer.wanted is not Wanted.NOTHING:
        minimizer.tell(*function(minimizer.point))
    return Trace(np.minimum.accumulate(values), minimizer.point, minimizer.stop_reason)


def of_scipy(problem: Problem, method: LBFGSB) -> Trace:
    from scipy.optimize import Bounds, minimize

    function, values = recorded(problem)
    options = dict(
        maxcor=method.history, gtol=method.gtol, ftol=method.ftol, maxfun=method.maxfun, maxiter=method.maxiter
    )
    bounds = Bounds(problem.lower, problem.upper)
    found = minimize(function, problem.start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return Trace(np.minimum.accumulate(values), found.x, found.message.split(":")[-1].strip().lower())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=int, default=10, help="pairs that are kept")
    parser.add_argument("--gtol", type=float, default=1e-8)
    parser.add_argument("--ftol", type=float, default=2.220446049250313e-09)
    parser.add_argument("--maxfun", type=int, default=15000)
    parser.add_argument("--starts", type=int, default=3, help="of each problem; every third is of other data")
    parser.add_argument("--only", default="", help="problems whose name has this word")
    parser.add_argument("--cutest", action="store_true", help="problems of CUTEst instead")
    given = parser.parse_args()
    try:
        import scipy
    except ImportError:
        sys.exit("this benchmark compares with SciPy, which is not installed: pip install scipy")
    method = LBFGSB(history=given.history, gtol=given.gtol, ftol=given.ftol, maxfun=given.maxfun, maxiter=given.maxfun)
    print(f"SciPy {scipy.__version__}, history {given.history}, gtol {given.gtol:g}, ftol {given.ftol:g}")
    print(
        f"{'problem':34}{'value':>15}{'SciPy':>15}{'ratio':>8}{'evals':>7}{'SciPy':>7}{'to both':>12}{'bound':>7}"
        f"{'equal':>7}  end"
    )
    runs: list[tuple[float, int, int, int, int, int, int]] = []
    with threadpool_limits(1):
        for problem in of_cutest() if given.cutest else problems(given.starts):
            if given.only in problem.name:
                runs.append(compare(problem, method))
    print(summary(runs))


def compare(problem: Problem, method: LBFGSB) -> tuple[float, int, int, int, int, int, int]:
    """Print a line; the ratio of values, the evaluations of both to the end and to the value that both reach, and in
    how many of how many counts it is ahead.
    """
    mine, peer = ours(problem, method), of_scipy(problem, method)
    shared = min(len(mine.values), len(peer.values))
    counts = [count - 1 for count in COUNTS if count <= shared] or [shared - 1]
    ahead = sum(mine.values[count] <= peer.values[count] + 1e-12 * abs(peer.values[count]) for count in counts)
    held = int(((mine.point <= problem.lower) | (mine.point >= problem.upper)).sum())
    shared_value = max(mine.values[-1], peer.values[-1])
    reached, peer_reached = (int(np.argmax(trace.values <= shared_value)) + 1 for trace in (mine, peer))
    # Of the values, and where these may be 0 or negative of their distance to the size of SciPy's.
    best = float(peer.values[-1])
    ratio = 1 + float(mine.values[-1] - best) / max(abs(best), 1e-10 * max(1.0, abs(float(peer.values[0]))))
    print(
        f"{problem.name:34}{mine.values[-1]:15.7e}{peer.values[-1]:15.7e}{ratio:8.3f}{len(mine.values):7d}"
        f"{len(peer.values):7d}{f'{reached}/{peer_reached}':>12}{held:7d}{f'{ahead}/{len(counts)}':>7}  "
        f"{mine.reason} | {peer.reason}",
        flush=True,
    )
    return ratio, len(mine.values), len(peer.values), reached, peer_reached, ahead, len(counts)


def summary(runs: Sequence[tuple[Any, ...]]) -> str:
    ratios, evaluations, of_peer, reached, peer_reached, ahead, counts = map(np.array, zip(*runs, strict=True))
    good = int((ratios <= ABOVE).sum())
    return (
        f"{len(runs)} runs: {evaluations.sum()} evaluations, SciPy {of_peer.sum()}, ratio "
        f"{evaluations.sum() / of_peer.sum():.3f}; to the value that both reach {reached.sum()}, SciPy "
        f"{peer_reached.sum()}, ratio {reached.sum() / peer_reached.sum():.3f}; final value at most 2 % above SciPy's "
        f"in {good}, the largest ratio {ratios.max():.3f}; at most SciPy's at {ahead.sum()} of {counts.sum()} equal "
        "counts of evaluations"
    )


if __name__ == "__main__":
    main()
