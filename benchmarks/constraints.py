"""Problems of Hock and Schittkowski beside SciPy: which are solved, and in how many evaluations.

    python benchmarks/constraints.py

Each evaluation is of the function, its gradient and the constraints, at one point.  SciPy's counts are of values.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

from mpishard import augmented_lagrangian

sys.path.append(str(Path(__file__).parent.parent / "tests/helpers"))
from hock_schittkowski import PROBLEMS, Problem, derivatives

Array = np.ndarray

STEP = 1e-6  # of Hessian products


class Outcome(NamedTuple):
    """How a solver has ended."""

    x: Array
    value: float
    evaluations: int


def is_solved(problem: Problem, found: Outcome) -> bool:
    """Return True if the value is that of the known minimum to 1e-4, and the constraints are met to 1e-5."""
    constr = problem.constraints(found.x)
    beyond = max(0.0, -constr.min(), (constr - problem.upper).max())
    return abs(found.value - problem.minimum) <= 1e-4 * max(1.0, abs(problem.minimum)) and beyond <= 1e-5


def ours(problem: Problem, newton: bool = False) -> Outcome:
    """By `augmented_lagrangian`, with L-BFGS-B or truncated Newton."""

    def lagrangian(x: Array, y: Array) -> Array:
        return derivatives(problem.fun, x) - problem.adjoint(x, y)

    def hessp(x: Array, direction: Array, y: Array) -> Array:
        return (lagrangian(x + STEP * direction, y) - lagrangian(x - STEP * direction, y)) / (2 * STEP)

    products: dict[str, Any] = {
        "method": "trust-ncg",
        "hessp": hessp,
        "forward": lambda x, direction: problem.jacobian(x) @ direction,
    }
    found = augmented_lagrangian(
        problem.value_and_gradient,
        problem.x0,
        problem.constraints,
        problem.adjoint,
        upper=problem.upper,
        bounds=problem.pairs,
        **products if newton else {},
    )
    return Outcome(found.x, found.fun, found.nfev)


def scipys(problem: Problem, method: str, **options: float) -> Outcome:
    """By a method of SciPy."""
    constraints = optimize.NonlinearConstraint(
        problem.constraints, np.zeros(problem.upper.size), problem.upper, jac=problem.jacobian
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = optimize.minimize(
            problem.value_and_gradient,
            problem.x0,
            jac=True,
            method=method,
            bounds=problem.pairs,
            constraints=constraints,
            options={"maxiter": 1000, **options},
        )
    return Outcome(found.x, found.fun, found.nfev)


SOLVERS: dict[str, Callable[[Problem], Outcome]] = {
    "L-BFGS-B": ours,
    "trust-ncg": lambda problem: ours(problem, newton=True),
    "SLSQP": lambda problem: scipys(problem, "SLSQP", ftol=1e-9),
    "trust-constr": lambda problem: scipys(problem, "trust-constr", gtol=1e-6),
}


def main() -> None:
    logging.getLogger("mpishard").setLevel(logging.WARNING)
    counts: dict[str, dict[int, int]] = {name: {} for name in SOLVERS}
    print("problem " + "".join(f"{name:>14}" for name in SOLVERS))
    for number, problem in sorted(PROBLEMS.items()):
        row = f"{number:>7} "
        for name, solver in SOLVERS.items():
            found = solver(problem)
            solved = is_solved(problem, found)
            if solved:
                counts[name][number] = found.evaluations
            row += f"{f'{found.evaluations}' if solved else f'({found.evaluations})':>14}"
        print(row, flush=True)
    print("solved  " + "".join(f"{len(counts[name]):>14}" for name in SOLVERS))
    by_all = set.intersection(*(set(each) for each in counts.values()))
    means = {name: np.exp(np.mean([np.log(each[number]) for number in by_all])) for name, each in counts.items()}
    print("mean    " + "".join(f"{means[name]:>14.1f}" for name in SOLVERS))
    print(f"The mean is the geometric one, over the {len(by_all)} problems that all solve.")


if __name__ == "__main__":
    main()
