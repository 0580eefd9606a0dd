"""Sums of squares of few unknowns, minimised in a trust region: with bounds by reflections, or Levenberg-Marquardt.

All ranks have all unknowns, and take the same steps from the same numbers: of the residuals and the Jacobian a method
sees the cost and the products of the columns of ``[J f]``, sums over all rows that are exact (`exact_gram`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mpishard.backend import exact_gram
from mpishard.backend.exact_gram import ExactGram
from mpishard.minimizers import small

# The reason for which a method has ended: SciPy's status numbers.
LIMIT, GRADIENT, COST, STEP, COST_AND_STEP = 0, 1, 2, 3, 4
_NEWTON_TRIALS = 10  # of the multiplier of a region
# Values of one function at one point differ by less, relatively, where ranks sum in another order.
SAME_FUNCTION = 1e-6
_SINGULAR = 2.0**-64  # of the largest diagonal element, added to a singular matrix


def dot(one: np.ndarray, other: np.ndarray) -> float:
    """The dot product, rounded once."""
    return small.dot(one.tolist(), other.tolist())


def norm(vector: np.ndarray) -> float:
    """The 2-norm; NaN if it is too large."""
    return math.sqrt(dot(vector, vector))


def largest(vector: np.ndarray) -> float:
    """The largest absolute element."""
    return float(abs(vector).max())


# Of a point half of the sum of the squares of the residuals, or of the losses of their squares, the same on all ranks;
# and of the last such point the products of the columns of ``[J f]``.  Both are collective.
Cost = Callable[[np.ndarray], float]
Gram = Callable[[np.ndarray], ExactGram]


@dataclass(frozen=True)
class Options:
    """The tolerances at which a method ends (0: never), its limit and its scale."""

    ftol: float
    xtol: float
    gtol: float
    max_nfev: int  # the most evaluations of the cost
    scale: np.ndarray | None  # the characteristic sizes of the unknowns; None: from the columns of the Jacobian


@dataclass
class State:
    """The last iterate of a method, with its cost and gradient, and the numbers from which it continues."""

    x: np.ndarray
    cost: float
    gradient: np.ndarray
    units: np.ndarray  # the inverse scale of the unknowns
    optimality: float = math.nan  # the largest element of the gradient, with bounds scaled by the distance to them
    radius: float = math.nan  # of the trust region, in scaled unknowns, and its multiplier
    multiplier: float = 0.0
    iterations: int = 0  # accepted steps; then costs and Jacobians
    nfev: int = 0
    njev: int = 0
    status: int | None = None  # the reason for which it has ended; None until then


class QuadraticModel:
    """The quadratic model ``g's + s'As / 2`` of the cost, in scaled variables; A is positive semidefinite.

    `products` are those of the columns of ``[J f]``; scaled variables are multiplied by `scale`; `diagonal` is added to
    the diagonal of A.
    """

    def __init__(self, products: ExactGram, scale: np.ndarray, diagonal: np.ndarray) -> None:
        parts = ExactGram(*(np.ascontiguousarray(part[:-1, :-1]) for part in products))
        self._matrix = parts.scaled(scale).with_diagonal(diagonal)
        self._right = exact_gram.vector_product((products.high[:-1, -1], products.low[:-1, -1]), scale)
        self.gradient: np.ndarray = self._right[0] + self._right[1]

    def value(self, step: np.ndarray) -> float:
        return dot(self.gradient, step) + 0.5 * self._matrix.form(step, step)

    def best_along(self, start: np.ndarray, direction: np.ndarray, least: float, most: float) -> tuple[float, float]:
        """The factor of the direction in these limits where the model is lowest, and its value there."""
        square = 0.5 * self._matrix.form(direction, direction)
        slope = dot(self.gradient, direction) + self._matrix.form(start, direction)
        factors = [least, most]
        if square > 0 and least < -0.5 * slope / square < most:
            factors.append(-0.5 * slope / square)
        constant = self.value(start)
        values = [constant + factor * (slope + factor * square) for factor in factors]
        lowest = min(range(len(values)), key=values.__getitem__)
        return factors[lowest], values[lowest]

    def step(self, radius: float, multiplier: float, tolerance: float, slack: float) -> tuple[np.ndarray, float]:
        """The step to the minimum in a ball, and its multiplier, from which another search may begin.

        The search begins at `multiplier`; the length of a step at the boundary may differ from the radius by the share
        `tolerance` of it, and the step to the minimum of the model may be longer by the share `slack`. Source: J. J.
        More: The Levenberg-Marquardt algorithm: implementation and theory, Numerical Analysis, Lecture Notes in
        Mathematics 630, 105-116 (1978), section 5.
        """
        step, length, square = self._solve(0.0)
        is_singular = not math.isfinite(length)
        if is_singular:  # a little more is the shortest of many minima
            step, length, square = self._solve(_SINGULAR * float(self._matrix.high.diagonal().max()))
        if length <= (1 + slack) * radius:
            return step, 0.0
        upper = norm(self.gradient) / radius
        if not (0 < upper < math.inf and math.isfinite(length)):
            return np.zeros(len(self.gradient)), 0.0
        lower = 0.0 if is_singular else (length - radius) * length / square
        for _ in range(_NEWTON_TRIALS):
            if not lower < multiplier < upper:
                multiplier = max(0.001 * upper, math.sqrt(lower * upper))
            found, length, square = self._solve(multiplier)
            if not math.isfinite(length):
                break
            step, excess = found, length - radius
            if abs(excess) <= tolerance * radius:
                break
            newton = excess * length / square
            if excess < 0:
                upper = multiplier
            lower = max(lower, multiplier + newton)
            multiplier += length / radius * newton
        return step, multiplier

    def _solve(self, multiplier: float) -> tuple[np.ndarray, float, float]:
        """The minimum with `multiplier` added to the diagonal, its length, and the square by which that changes."""
        matrix = self._matrix
        if multiplier:
            matrix = matrix.with_diagonal(np.full(len(self.gradient), multiplier))
        step, square = exact_gram.solve(matrix, self._right)
        length = norm(step)
        return -step, length if math.isfinite(length) else math.inf, square


# The beginning of both methods, and what they compute at each new iterate.


def _begun(cost: Cost, gram: Gram, start: np.ndarray | State, options: Options) -> tuple[State, ExactGram]:
    """The state at a start, or a saved one, at whose point cost and Jacobian are computed once more; its products."""
    if isinstance(start, State):
        found, state = cost(start.x), start
        if not abs(found - state.cost) <= SAME_FUNCTION * max(abs(found), abs(state.cost)):
            raise ValueError(
                f"the checkpoint is of other residuals: at its point the cost was {state.cost:.12g}, by these it is "
                f"{found:.12g}; give each problem its own folder, or resume=False"
            )
        state.cost = found
        state.njev -= 1
        if state.status == LIMIT:
            state.status = None
        return state, _linearize(gram, state, options)
    if not largest(start) < exact_gram.LARGEST:
        raise ValueError(
            f"x0 has an element of {largest(start):.3g}, and squares of those above {exact_gram.LARGEST:.1g} are too "
            "large: give the unknowns in other units"
        )
    state = State(start, cost(start), np.zeros(len(start)), np.zeros(len(start)), nfev=1)
    require_finite(state.cost)
    products = _linearize(gram, state, options)
    state.units[state.units == 0] = 1.0
    return state, products


def _linearize(gram: Gram, state: State, options: Options) -> ExactGram:
    """Compute the gradient at the point of the state, and the inverse scale; returns the products of the columns."""
    products = gram(state.x)
    state.njev += 1
    state.gradient = products.high[:-1, -1] + products.low[:-1, -1]
    if options.scale is not None:
        state.units = 1 / options.scale
    else:
        state.units = np.maximum(state.units, np.sqrt(products.high.diagonal()[:-1]))
    return products


def require_finite(cost: float) -> None:
    """Raise ValueError if the cost of the start is not finite."""
    if not math.isfinite(cost):
        raise ValueError("the residuals are not finite at x0; give a start where the function is defined")


# Trust region reflective.


def reflective(
    cost: Cost,
    gram: Gram,
    start: np.ndarray | State,
    lower: np.ndarray,
    upper: np.ndarray,
    options: Options,
) -> Iterator[State]:
    """Yield the state after the first evaluation and each iteration, in a trust region inside of bounds. Collective.

    It continues from a state that it has yielded before.

    Variables are scaled by the distance to the bound to which descent leads; a step to the outside is reflected, and
    the best of it, of the step cut short and of the gradient is taken. Source: M. A. Branch, T. F. Coleman, Y. Li: A
    subspace, interior, and conjugate gradient method for large-scale bound-constrained minimization problems, SIAM
    Journal on Scientific Computing 21, 1-23 (1999).
    """
    if not isinstance(start, State):
        start = strictly_inside(start, lower, upper, 1e-10)
    elif not ((lower < start.x) & (start.x < upper)).all():
        raise ValueError(
            "the checkpoint is of other bounds, and its point is outside of these; give those of then, or resume=False"
        )
    state, products = _begun(cost, gram, start, options)
    x = state.x
    if math.isnan(state.radius):
        distance, slope = _distances(x, state.gradient, lower, upper)
        scaled = np.where(slope != 0, distance * state.units, distance)
        state.radius = norm(x * state.units / np.sqrt(scaled)) or 1.0
    while True:
        units = state.units
        distance, slope = _distances(x, state.gradient, lower, upper)
        state.optimality = largest(state.gradient * distance)
        if state.optimality < options.gtol:
            state.status = GRADIENT
        elif state.status is None and state.nfev >= options.max_nfev:
            state.status = LIMIT
        yield state
        if state.status is not None:
            return
        scaled = np.where(slope != 0, distance * units, distance)
        scale = np.sqrt(scaled) / units
        model = QuadraticModel(products, scale, state.gradient * slope / units)
        inside = max(0.995, 1 - state.optimality)
        decrease = -1.0
        while decrease <= 0 and state.nfev < options.max_nfev and state.status is None:
            radius = state.radius
            free, state.multiplier = model.step(radius, state.multiplier, 0.01, 0.0)
            length = norm(free)
            if state.multiplier and length > 0.9 * radius:  # a shorter one is the minimum of a singular model
                free *= radius / length
            step, expected = _within_bounds(model, x, free, scale, radius, lower, upper, inside)
            trial = strictly_inside(x + scale * step, lower, upper, 0.0)
            value, length = cost(trial), norm(step)
            state.nfev += 1
            if not math.isfinite(value):
                state.radius = 0.25 * length
                if not state.radius > 0:
                    state.status = STEP
                continue
            decrease = state.cost - value
            ratio = decrease / expected if expected > 0 else float(decrease == expected == 0)
            if ratio < 0.25:
                state.radius = 0.25 * length
            elif ratio > 0.75 and length > 0.95 * radius:
                state.radius = 2 * radius
            state.multiplier *= radius / state.radius if state.radius else 1.0
            moved, far = norm(scale * step), norm(x)
            state.status = _converged(decrease, state.cost, moved, far, ratio, options)
        if decrease > 0:
            x = trial
            state.x, state.cost = x, value
            state.iterations += 1
            products = _linearize(gram, state, options)


def _distances(
    x: np.ndarray, gradient: np.ndarray, lower: np.ndarray, upper: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The distance to the bound to which descent leads, and its derivative; 1 and 0 without such a bound."""
    up = (gradient < 0) & np.isfinite(upper)
    down = (gradient > 0) & np.isfinite(lower)
    distance = np.where(up, upper - x, np.where(down, x - lower, 1.0))
    return distance, np.where(up, -1.0, np.where(down, 1.0, 0.0))


def _within_bounds(
    model: QuadraticModel,
    x: np.ndarray,
    free: np.ndarray,
    scale: np.ndarray,
    radius: float,
    lower: np.ndarray,
    upper: np.ndarray,
    inside: float,
) -> tuple[np.ndarray, float]:
    """The scaled step that is tried for one that may leave the bounds, and the decrease that the model predicts."""
    whole = x + scale * free
    if ((lower <= whole) & (whole <= upper)).all():
        return free, -model.value(free)
    share, hit = _to_bound(x, scale * free, lower, upper)
    candidates = []
    reflected = np.where(hit, -free, free)
    edge = share * free
    beyond, _ = _to_bound(x + scale * edge, scale * reflected, lower, upper)
    reach = min(beyond, _to_sphere(edge, reflected, radius))
    if reach > 0:
        least = (1 - inside) * share / reach
        most = inside * beyond if reach == beyond else reach
        if least <= most:
            factor, value = model.best_along(edge, reflected, least, most)
            candidates.append((value, edge + factor * reflected))
    cut = inside * edge
    candidates.append((model.value(cut), cut))
    downhill = -model.gradient
    beyond, _ = _to_bound(x, scale * downhill, lower, upper)
    sphere = radius / norm(downhill)
    most = inside * beyond if beyond < sphere else sphere
    factor, value = model.best_along(np.zeros(len(x)), downhill, 0.0, most)
    candidates.append((value, factor * downhill))
    value, step = min(candidates, key=lambda candidate: candidate[0])
    return step, -value


def _to_bound(x: np.ndarray, step: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> tuple[float, np.ndarray]:
    """The factor by which a step reaches the first bound, and the elements that do."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(step == 0, np.inf, np.maximum((lower - x) / step, (upper - x) / step))
    first = float(factors.min())
    return first, (factors == first) & (step != 0)


def _to_sphere(start: np.ndarray, direction: np.ndarray, radius: float) -> float:
    """The factor by which a direction reaches the boundary of the region from a point in it."""
    square, mixed = dot(direction, direction), dot(start, direction)
    rest = radius * radius - dot(start, start)
    root = math.sqrt(max(mixed * mixed + square * rest, 0.0))
    if not square:
        return 0.0
    return rest / (mixed + root) if mixed > 0 else (root - mixed) / square


def strictly_inside(x: np.ndarray, lower: np.ndarray, upper: np.ndarray, share: float) -> np.ndarray:
    """The point with elements at or beyond a bound moved inside: by a share of the bound, or to the next float64."""
    with np.errstate(invalid="ignore"):  # of infinities, which are not used
        near = np.where(np.isfinite(lower), share * np.maximum(1, abs(lower)), 0)
        far = np.where(np.isfinite(upper), share * np.maximum(1, abs(upper)), 0)
        low = lower + near if share else np.nextafter(lower, upper)
        high = upper - far if share else np.nextafter(upper, lower)
        moved = np.where(x <= lower + near, low, np.where(x >= upper - far, high, x))
        return np.where((moved < lower) | (moved > upper), 0.5 * (lower + upper), moved)


def _converged(decrease: float, cost: float, moved: float, far: float, ratio: float, options: Options) -> int | None:
    """The status of the test that the last trial ends; None for none."""
    by_cost = decrease < options.ftol * cost and ratio > 0.25
    by_step = moved < options.xtol * (options.xtol + far)
    if by_cost and by_step:
        return COST_AND_STEP
    return COST if by_cost else STEP if by_step else None


# Levenberg-Marquardt.


def levenberg_marquardt(cost: Cost, gram: Gram, start: np.ndarray | State, options: Options) -> Iterator[State]:
    """Yield the state after the first evaluation and each iteration, by the algorithm of Levenberg and Marquardt.

    Collective. Source: J. J. More: The Levenberg-Marquardt algorithm: implementation and theory, Numerical Analysis,
    Lecture Notes in Mathematics 630, 105-116 (1978); its implementation and constants: J. J. More, B. S. Garbow, K. E.
    Hillstrom: User guide for MINPACK-1, Argonne National Laboratory, ANL-80-74 (1980).
    """
    state, products = _begun(cost, gram, start, options)
    x = state.x
    if math.isnan(state.radius):
        state.radius = 100 * (norm(x * state.units) or 1.0)
    while True:
        units = state.units
        state.optimality = largest(state.gradient)
        columns = np.sqrt(products.high.diagonal()[:-1])
        length = math.sqrt(products.high[-1, -1])
        cosines = np.divide(abs(state.gradient), columns * length, out=np.zeros(len(x)), where=columns * length > 0)
        if state.status is None and cosines.max() <= options.gtol:
            state.status = GRADIENT
        elif state.status is None and state.nfev >= options.max_nfev:
            state.status = LIMIT
        yield state
        if state.status is not None:
            return
        model = QuadraticModel(products, 1 / units, np.zeros(len(x)))
        accepted = False
        while not accepted and state.nfev < options.max_nfev and state.status is None:
            step, multiplier = model.step(state.radius, state.multiplier, 0.1, 0.1)
            far = norm(step)
            radius = min(state.radius, far) if state.nfev == 1 else state.radius
            trial = x + step / units
            value = cost(trial)
            state.nfev += 1
            # Both relative to the cost, and the slope of the cost along the step.
            linear = 0.5 * max(2 * (model.value(step) - dot(model.gradient, step)), 0.0) / state.cost
            pull = 0.5 * multiplier * far * far / state.cost
            decrease = 1 - value / state.cost if 0.01 * value < state.cost else -1.0
            expected, slope = linear + 2 * pull, -(linear + pull)
            ratio = decrease / expected if expected else 0.0
            if ratio <= 0.25:
                shrink = 0.5 if decrease >= 0 else 0.5 * slope / (slope + 0.5 * decrease)
                if not 0.01 * value < state.cost or shrink < 0.1:
                    shrink = 0.1
                radius, multiplier = shrink * min(radius, far / 0.1), multiplier / shrink
            elif multiplier == 0 or ratio >= 0.75:
                radius, multiplier = 2 * far, 0.5 * multiplier
            state.radius, state.multiplier = radius, multiplier
            accepted = ratio >= 1e-4
            size = norm((trial if accepted else x) * units)
            by_cost = abs(decrease) <= options.ftol and expected <= options.ftol and 0.5 * ratio <= 1
            by_step = radius <= options.xtol * size
            if by_cost or by_step:
                state.status = COST_AND_STEP if by_cost and by_step else COST if by_cost else STEP
        if accepted:
            x = trial
            state.x, state.cost = x, value
            state.iterations += 1
            products = _linearize(gram, state, options)
