"""python benchmarks/l1.py [lasso] [speed] [--above SHARE] [--only WORD] [--petsc COMMAND] [--pylops-mpi]

L1 terms by the L-BFGS-B of mpishard.

lasso: 20 random problems, some with more rows than columns, with columns of falling size, or nearly equal ones, beside
the Lasso of scikit-learn, which must be installed: by how much the value is above its, relatively, and how many
elements are zero for one of both alone.

speed: evaluations of the function with its gradient, and seconds of processor time, until the value is at most --above
(1e-8) above the least that any method has found, as a share of it.  Beside mpishard FISTA, with restarts (O'Donoghue
and Candes, 2015), and given the largest eigenvalue of the Hessian, which it would have to search for: an iteration is
an evaluation.
--petsc: and OWL-QN of PETSc's TAO, by COMMAND, a Python with petsc4py, such as "env/bin/python3"; with its defaults,
of the function divided by this eigenvalue, without which its first step goes too far.
--pylops-mpi: and the FISTA of pylops-mpi, on one rank, of the linear problems without bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from fista import Measured, fista
from threadpoolctl import threadpool_limits

Array = np.ndarray
MOST = 10000  # evaluations


class Problem(NamedTuple):
    """A function with its gradient, the weight of the term, and the largest eigenvalue of a Hessian."""

    name: str
    function: Callable[[Array], tuple[float, Array]]
    size: int
    weight: float
    curvature: float
    lower: float = -math.inf
    system: tuple[Array, Array] | None = None  # the matrix and the data of a linear problem

    def value(self, x: Array, value: float) -> float:
        return value + self.weight * float(abs(x).sum())


class Trace(NamedTuple):
    """The value with the term, and the seconds of the method, after each evaluation; and the last iterate."""

    values: Array
    seconds: Array
    point: Array


def squares(matrix: Array, data: Array) -> Callable[[Array], tuple[float, Array]]:
    def function(x: Array) -> tuple[float, Array]:
        residual = matrix @ x - data
        return 0.5 * float(residual @ residual), matrix.T @ residual

    return function


def logistic(matrix: Array, signs: Array) -> Callable[[Array], tuple[float, Array]]:
    def function(x: Array) -> tuple[float, Array]:
        margins = signs * (matrix @ x)
        return float(np.logaddexp(0, -margins).sum()), -matrix.T @ (signs * np.exp(-np.logaddexp(0, margins)))

    return function


def sparse(rng: np.random.Generator, size: int, share: float) -> Array:
    return np.where(rng.random(size) < share, rng.standard_normal(size), 0.0)


def problems() -> Iterator[Problem]:
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((300, 1000))
    data = matrix @ sparse(rng, 1000, 0.03) + 0.1 * rng.standard_normal(300)
    yield from weighted("random, 300 x 1000", squares(matrix, data), matrix, 1.0, data=data)
    decay = rng.standard_normal((400, 500)) * np.logspace(0, -2, 500)[rng.permutation(500)]
    data = decay @ sparse(rng, 500, 0.2) * 3 + 0.1 * rng.standard_normal(400)
    yield from weighted("columns of falling size, 400 x 500", squares(decay, data), decay, 1.0, data=data)
    place = np.arange(500.0)
    blur = np.exp(-0.5 * ((place[:, None] - place) / 3.0) ** 2)
    spikes = abs(sparse(rng, 500, 0.04))
    data = blur @ spikes + 0.02 * rng.standard_normal(500)
    yield from weighted("deconvolution of 500", squares(blur, data), blur, 1.0, data=data)
    yield from weighted("deconvolution of 500, x >= 0", squares(blur, data), blur, 1.0, lower=0.0)
    matrix = rng.standard_normal((800, 400)) * np.logspace(0, -1, 400)
    signs = np.sign(matrix @ sparse(rng, 400, 0.1) + 0.3 * rng.standard_normal(800))
    yield from weighted("logistic regression, 800 x 400", logistic(matrix, signs), matrix, 0.25)


def weighted(
    name: str,
    function: Callable[..., Any],
    matrix: Array,
    bend: float,
    lower: float = -math.inf,
    data: Array | None = None,
) -> Iterator[Problem]:
    size = matrix.shape[1]
    top = float(abs(function(np.zeros(size))[1]).max())
    curvature = bend * float(np.linalg.norm(matrix, 2)) ** 2
    for share in (0.1, 0.01, 0.001):
        system = None if data is None else (matrix, data)
        yield Problem(f"{name}, weight {share:g}", function, size, share * top, curvature, lower, system)


def trace(measured: Measured, point: Array) -> Trace:
    return Trace(np.minimum.accumulate(measured.values), np.array(measured.seconds), point)


def by_mpishard(problem: Problem, history: int = 10) -> Trace:
    import mpishard

    measured = Measured(problem)
    options = {"maxcor": history, "gtol": 1e-10 * problem.weight, "ftol": 0.0, "maxfun": MOST, "maxiter": MOST}
    found = mpishard.minimize(
        mpishard.regularized(measured, mpishard.L1(problem.weight)),
        np.zeros(problem.size),
        bounds=None if math.isinf(problem.lower) else (problem.lower, None),
        options=options,
    )
    return trace(measured, found.x)


def by_fista(problem: Problem, target: float) -> Trace:
    least = problem.weight / problem.curvature

    def proximal_point(center: Array) -> Array:
        return np.maximum(np.sign(center) * np.maximum(abs(center) - least, 0), problem.lower)

    return trace(*fista(problem, proximal_point, MOST, target))


def by_pylops_mpi(problem: Problem, target: float) -> Trace:
    import pylops
    import pylops_mpi

    assert problem.system is not None
    matrix, data = problem.system
    measured = Measured(problem)
    last = np.zeros(problem.size)

    class Reached(Exception):
        pass

    def note(x: Any) -> None:
        last[:] = x.local_array
        measured.note(last)
        if measured.values[-1] <= target:
            raise Reached

    with contextlib.suppress(Reached):
        pylops_mpi.optimization.sparsity.fista(
            pylops_mpi.MPIBlockDiag(ops=[pylops.MatrixMult(matrix)]),
            pylops_mpi.DistributedArray.to_dist(data),
            pylops_mpi.DistributedArray.to_dist(last.copy()),
            niter=MOST,
            eps=2 * problem.weight,  # it is that of a sum of squares, which is not halved
            alpha=1 / problem.curvature,
            tol=0.0,
            callback=note,
        )
    return trace(measured, last)


def by_tao(problem: Problem) -> None:
    """OWL-QN of PETSc, in a process of its own; prints its trace."""
    import petsc4py

    petsc4py.init([sys.argv[0], "-tao_owlqn_lambda", repr(problem.weight / problem.curvature)])
    from petsc4py import PETSc

    measured = Measured(problem)
    x = PETSc.Vec().createSeq(problem.size)

    def evaluate(tao: Any, point: Any, gradient: Any) -> float:
        value, slope = measured(point.getArray(readonly=True).copy())
        gradient.array[:] = slope / problem.curvature
        return value / problem.curvature

    tao = PETSc.TAO().create()
    tao.setType("owlqn")
    tao.setObjectiveGradient(evaluate, x.duplicate())
    tao.setTolerances(gatol=1e-10 * problem.weight / problem.curvature, grtol=0, gttol=0)
    tao.setMaximumIterations(MOST)
    tao.setFromOptions()
    tao.solve(x)
    print(json.dumps([each.tolist() for each in trace(measured, x.array)]))


def of_tao(problem: Problem, command: str) -> Trace:
    ran = subprocess.run(
        [*shlex.split(command), __file__, "speed", "--tao", problem.name], capture_output=True, text=True, timeout=900
    )
    if ran.returncode:
        sys.exit(f"{command} ended with {ran.returncode}:\n{ran.stderr}")
    return Trace(*map(np.array, json.loads(ran.stdout.splitlines()[-1])))


def speed(options: argparse.Namespace) -> None:
    print(
        f"{'to ' + format(options.above, 'g') + ' above the least value':52}{'evaluations':>12} {'seconds':>8}  zeros"
    )
    for problem in problems():
        if options.only not in problem.name or (options.petsc and not math.isinf(problem.lower)):
            continue
        traces = {"mpishard": by_mpishard(problem)}
        if options.petsc:
            traces["TAO, OWL-QN"] = of_tao(problem, options.petsc)
        least = min(by_mpishard(problem, 40).values[-1], *(each.values[-1] for each in traces.values()))
        target = least + options.above * abs(least)
        traces["FISTA"] = by_fista(problem, target)
        if options.pylops_mpi and problem.system is not None:
            traces["pylops-mpi, FISTA"] = by_pylops_mpi(problem, target)
        print(problem.name)
        for name, found in traces.items():
            there = np.flatnonzero(found.values <= target)
            zeros = f"{(found.point == 0).sum():6}"
            if len(there):
                print(f"    {name:48}{there[0] + 1:12}{found.seconds[there[0]]:9.3f}{zeros}")
            else:
                share = (found.values[-1] - least) / abs(least)
                print(f"    {name:48}{len(found.values):12}{found.seconds[-1]:9.3f}{zeros}, and is {share:.1e} above")


def lasso() -> None:
    try:
        from sklearn.linear_model import Lasso
    except ImportError:
        sys.exit("lasso compares with scikit-learn, which is not installed: pip install scikit-learn")
    print(f"{'problem':28}{'evaluations':>12}{'zeros':>7}{'value above':>13}{'support differs':>17}")
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows, columns = ((60, 40), (40, 100), (100, 200), (300, 50))[seed % 4]
        matrix = rng.standard_normal((rows, columns)) * np.logspace(0, -(seed % 3), columns)
        if seed % 5 == 4:  # columns are much alike
            matrix += 3 * rng.standard_normal((rows, 1))
        data = matrix @ (3 * sparse(rng, columns, 0.15)) + 0.1 * rng.standard_normal(rows)
        function = squares(matrix, data)
        weight = (0.3, 0.1, 0.03, 0.01)[seed // 5] * float(abs(matrix.T @ data).max())
        found = by_mpishard(Problem("", function, columns, weight, 0.0))
        # Its objective is divided by the number of rows.
        theirs = Lasso(alpha=weight / rows, fit_intercept=False, tol=1e-14, max_iter=10**6).fit(matrix, data).coef_
        values = [function(x)[0] + weight * float(abs(x).sum()) for x in (found.point, theirs)]
        differs = int(((found.point == 0) != (theirs == 0)).sum())
        print(
            f"{f'{seed}: {rows} x {columns}':28}{len(found.values):12}{(found.point == 0).sum():7}"
            f"{(values[0] - values[1]) / values[1]:13.1e}{differs:17}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["lasso", "speed"], default=[])
    parser.add_argument("--above", type=float, default=1e-8)
    parser.add_argument("--only", default="", help="problems whose name has this word")
    parser.add_argument("--petsc", default="", metavar="COMMAND")
    parser.add_argument("--pylops-mpi", action="store_true")
    parser.add_argument("--tao", help=argparse.SUPPRESS)  # a problem for `by_tao`
    options = parser.parse_args()
    with threadpool_limits(1):
        if options.tao:
            by_tao(next(problem for problem in problems() if problem.name == options.tao))
            return
        if "lasso" in (options.what or ["lasso"]):
            lasso()
        if "speed" in (options.what or ["speed"]):
            speed(options)


if __name__ == "__main__":
    main()
