"""Problems of Hock and Schittkowski beside SciPy: which are solved, and in how many evaluations.

    python benchmarks/constraints.py
    python benchmarks/constraints.py topology

With `topology` three designs on a grid: half of a beam of least compliance, a sink of heat, and a mechanism that
inverts a displacement; in how many evaluations each method comes within a hundredth of the least value, and within a
thousandth.  The method of moving asymptotes is that of the packages mmapy and nlopt, where these are installed.
Source: E. Andreassen, A. Clausen, M. Schevenels, B. S. Lazarov, O. Sigmund: Efficient topology optimization in MATLAB
using 88 lines of code, Structural and Multidisciplinary Optimization 43, 1-16 (2011).

Each evaluation is of the function, its gradient and the constraints, at one point.  SciPy's counts are of values.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, sparse
from scipy.sparse.linalg import spsolve

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


def problems() -> None:
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


# Topology optimization: densities of the cells of a grid, filtered, with a limit on the volume.

PENALTY, POISSON = 3.0, 0.3  # the exponent of densities, and Poisson's ratio
WITHIN = 1e-2, 1e-3  # of the least value, relatively
EVALUATIONS = 400  # the most, of a method or of each of its minimisations
TOO_MUCH = 1e-4  # the largest volume beyond the limit, relatively


def stiffness_of_a_cell() -> Array:
    """The stiffness matrix of a square cell of four nodes in plane stress."""
    k, nu = np.array([12, 3, -6, -3, -6, -3, 0, 3]) / 24, POISSON
    m = np.array([-4, 3, -2, 9, 4, -3, 2, -9]) / 24
    places = np.array(
        [
            [0, 1, 2, 3, 4, 5, 6, 7],
            [1, 0, 7, 6, 5, 4, 3, 2],
            [2, 7, 0, 5, 6, 3, 4, 1],
            [3, 6, 5, 0, 7, 2, 1, 4],
            [4, 5, 6, 7, 0, 1, 2, 3],
            [5, 4, 3, 2, 1, 0, 7, 6],
            [6, 3, 4, 1, 2, 7, 0, 5],
            [7, 2, 1, 4, 3, 6, 5, 0],
        ]
    )
    return (k[places] + nu * m[places]) / (1 - nu * nu)


OF_HEAT = np.array([[4, -1, -2, -1], [-1, 4, -1, -2], [-2, -1, 4, -1], [-1, -2, -1, 4]]) / 6


class Design:
    """A linear function of a field on a grid of cells, and its derivatives by their densities.

    The field is that of temperatures, or of displacements: element 2 n is that of node n to the right, element 2 n + 1
    that downwards; nodes are numbered column by column.  `loads` and `springs` give numbers by element, `wanted` the
    factors of the function, which is divided by its size at the start.  `cell` is the matrix of a cell, `least` the
    factor of it where the density is 0.  `history` has the value at each point, and how far the volume is beyond its
    limit.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        volume: float,
        fixed: list[int],
        loads: dict[int, float],
        wanted: dict[int, float],
        springs: dict[int, float],
        cell: Array,
        least: float = 1e-9,
        radius: float = 1.5,
    ) -> None:
        self.name, self.volume = name, volume
        columns, rows = shape
        nodes = np.arange((columns + 1) * (rows + 1)).reshape(columns + 1, rows + 1)
        left_bottom = nodes[:-1, 1:].reshape(-1, 1)
        corners = np.concatenate([left_bottom, left_bottom + rows + 1, left_bottom + rows, left_bottom - 1], axis=1)
        of_a_node = len(cell) // 4
        self._of_cells = (of_a_node * corners[:, :, None] + np.arange(of_a_node)).reshape(-1, len(cell))
        self._pairs = (
            np.repeat(self._of_cells, len(cell), 1).reshape(-1),
            np.tile(self._of_cells, len(cell)).reshape(-1),
        )
        self._cell, self._least = cell, least
        size = of_a_node * nodes.size
        self._free = np.setdiff1d(np.arange(size), fixed)
        self._loads, self._wanted, self._springs = (np.zeros(size) for _ in range(3))
        for vector, given in ((self._loads, loads), (self._wanted, wanted), (self._springs, springs)):
            vector[list(given)] = list(given.values())
        at = np.stack(np.meshgrid(np.arange(columns), np.arange(rows), indexing="ij"), axis=-1).reshape(-1, 2)
        weights = np.maximum(0, radius - np.linalg.norm(at[:, None] - at[None], axis=2))
        self._filter = sparse.csr_matrix(weights / weights.sum(axis=1, keepdims=True))
        self.x0 = np.full(columns * rows, volume)
        self.history: list[tuple[float, float]] = []
        self._scale = 1.0
        self._scale = abs(self._evaluated(self.x0)[0])
        self.slope = self._filter.T @ np.full(self.x0.size, 1 / (self.x0.size * volume))
        self._kept: tuple[bytes, float, Array] = b"", math.nan, self.x0

    def _evaluated(self, x: Array) -> tuple[float, Array]:
        density = self._filter @ x
        stiffness = self._least + (1 - self._least) * density**PENALTY
        values = (self._cell.reshape(1, -1) * stiffness[:, None]).reshape(-1)
        matrix = sparse.csc_matrix((values, self._pairs), shape=2 * (self._loads.size,)) + sparse.diags(self._springs)
        free = self._free
        sides = np.stack([self._loads[free], self._wanted[free]], axis=1)
        both = np.zeros((self._loads.size, 2))
        both[free] = spsolve(matrix[free][:, free].tocsc(), sides)
        u, adjoint = both[self._of_cells, 0], both[self._of_cells, 1]
        energies = np.einsum("ci,ij,cj->c", adjoint, self._cell, u)
        gradient = -(1 - self._least) * PENALTY * density ** (PENALTY - 1) * energies
        return float(self._wanted @ both[:, 0]) / self._scale, (self._filter.T @ gradient) / self._scale

    def beyond(self, x: Array) -> float:
        """The volume over its limit, less 1."""
        return float(self.slope @ x) - 1

    def __call__(self, x: Array) -> tuple[float, Array]:
        if self._kept[0] != x.tobytes():
            self._kept = x.tobytes(), *self._evaluated(x)
            self.history.append((self._kept[1], self.beyond(x)))
        return self._kept[1], self._kept[2].copy()


def beam(columns: int = 30, rows: int = 10) -> Design:
    """Half of a beam on two supports, with a load in its middle."""
    fixed = [*range(0, 2 * (rows + 1), 2), 2 * (columns + 1) * (rows + 1) - 1]
    return Design("beam", (columns, rows), 0.5, fixed, {1: -1.0}, {1: -1.0}, {}, stiffness_of_a_cell())


def heat_sink(columns: int = 20, rows: int = 20) -> Design:
    """A plate that is heated evenly, and cooled in the middle of its left side."""
    heat = dict.fromkeys(range((columns + 1) * (rows + 1)), 1 / (columns * rows))
    cooled = [rows // 2 - 1, rows // 2, rows // 2 + 1]
    return Design("heat sink", (columns, rows), 0.4, cooled, heat, heat, {}, OF_HEAT, least=1e-3)


def inverter(columns: int = 24, rows: int = 12) -> Design:
    """The upper half of a mechanism that moves its right end to the left where its left end is pushed to the right."""
    start, end = 0, 2 * columns * (rows + 1)
    on_axis = [2 * column * (rows + 1) + 1 for column in range(columns + 1)]
    held = [2 * rows, 2 * rows + 1, 2 * rows - 2, 2 * rows - 1]
    springs = {start: 0.1, end: 0.1}
    fixed = [*on_axis, *held]
    return Design("inverter", (columns, rows), 0.3, fixed, {start: 1.0}, {end: 1.0}, springs, stiffness_of_a_cell())


class Enough(Exception):
    """As many evaluations as are allowed."""


def by_ours(design: Design) -> None:
    augmented_lagrangian(
        design,
        design.x0,
        lambda x: design.beyond(x),
        lambda x, v: design.slope * v[0],
        lower=-math.inf,
        bounds=(0, 1),
        gtol=1e-6,
        options={"maxfun": EVALUATIONS},
    )


def by_slsqp(design: Design) -> None:
    limit = {"type": "ineq", "fun": lambda x: -design.beyond(x), "jac": lambda x: -design.slope}
    bounds = [(0, 1)] * design.x0.size
    optimize.minimize(
        design, design.x0, jac=True, method="SLSQP", bounds=bounds, constraints=limit, options={"maxiter": EVALUATIONS}
    )


def by_mmapy(design: Design, move: float = 0.2) -> None:
    """Svanberg's MMA, with its usual limit on the moves."""
    from mmapy import mmasub

    size = design.x0.size
    x = before = two_before = design.x0[:, None]
    low, upper = np.zeros((size, 1)), np.ones((size, 1))
    asymptotes = low, upper
    a, c, d = np.zeros((1, 1)), np.full((1, 1), 1e4), np.ones((1, 1))
    for step in range(1, EVALUATIONS + 1):
        value, gradient = design(x[:, 0])
        volume, slope = np.array([[design.beyond(x[:, 0])]]), design.slope[None]
        given = value, gradient[:, None], volume, slope, *asymptotes, 1.0, a, c, d
        found, *_, lower_asymptote, upper_asymptote = mmasub(
            1, size, step, x, low, upper, before, two_before, *given, move=move
        )
        x, before, two_before, asymptotes = found, x, before, (lower_asymptote, upper_asymptote)


def by_nlopt(name: str, design: Design) -> None:
    """GCMMA of 2002 (`LD_MMA`), or its quadratic sibling (`LD_CCSAQ`)."""
    import nlopt

    def fun(x: Array, gradient: Array) -> float:
        value, gradient[:] = design(x)
        return value

    def limit(x: Array, gradient: Array) -> float:
        gradient[:] = design.slope
        return design.beyond(x)

    optimizer = nlopt.opt(getattr(nlopt, name), design.x0.size)
    optimizer.set_lower_bounds(0.0)
    optimizer.set_upper_bounds(1.0)
    optimizer.set_min_objective(fun)
    optimizer.add_inequality_constraint(limit, 1e-8)
    optimizer.set_maxeval(EVALUATIONS)
    optimizer.optimize(design.x0)


DESIGNERS: dict[str, tuple[str, Callable[[Design], None]]] = {
    "augmented_lagrangian": ("mpishard", by_ours),
    "SLSQP": ("scipy", by_slsqp),
    "MMA": ("mmapy", by_mmapy),
    "LD_MMA": ("nlopt", lambda design: by_nlopt("LD_MMA", design)),
    "LD_CCSAQ": ("nlopt", lambda design: by_nlopt("LD_CCSAQ", design)),
}


def topology() -> None:
    for design in (beam(), heat_sink(), inverter()):
        histories: dict[str, list[float]] = {}
        for name, (package, method) in DESIGNERS.items():
            if find_spec(package) is not None:
                design.history.clear()
                method(design)
                histories[name] = [value if beyond <= TOO_MUCH else math.inf for value, beyond in design.history]
        least = min(min(values) for values in histories.values())
        print(f"{design.name}, {design.x0.size} cells{'least':>14}{'within 1e-2':>14}{'within 1e-3':>14}{'in all':>8}")
        for name, values in histories.items():
            ends = [np.flatnonzero(np.array(values) <= least + each * abs(least)) for each in WITHIN]
            counts = "".join(f"{f'{end[0] + 1}' if len(end) else '-':>14}" for end in ends)
            print(f"{name:>24}{min(values):>14.6f}{counts}{len(values):>8}", flush=True)


def main() -> None:
    logging.getLogger("mpishard").setLevel(logging.WARNING)
    topology() if sys.argv[1:] == ["topology"] else problems()


if __name__ == "__main__":
    main()
