"""The Taylor test: is a gradient that of its function? And the dot-product test: is an operator the adjoint of another?

A right gradient g leaves a remainder f(x + h d) - f(x) - h g'd that falls like h^2; a wrong one leaves a part of the
linear term, and falls like h. With the Hessian H, the remainder f(x + h d) - f(x) - h g'd - h^2/2 d'Hd falls like h^3.
Steps at which rounding hides the remainder are left out (Griewank and Walther, Evaluating Derivatives, 2008).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import numpy as np

from mpishard.arguments import entries, flag, integer, number, returned, shown
from mpishard.backend import array as arrays
from mpishard.backend.random import uniform_in_box
from mpishard.comm.axis import Axis, rank_in_job
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.data.sampling import share
from mpishard.inverse.functions import Unknowns, opening
from mpishard.layout.boxes import whole_box
from mpishard.parameters.flat import FlatParameters
from mpishard.training.problem import OptimizationProblem

Array = Any


# A function along a line through a point: its values, and products with its gradient, summed over ranks.


@dataclass(frozen=True)
class Part:
    """One rank's part of a function: terms of sums over ranks, at the values of `point`."""

    point: FlatParameters  # the elements of this rank; evaluations are made at its values
    call: Callable[[], tuple[Any, Any]]  # returns (value, gradient)
    product: Callable[[np.ndarray], Any] | None  # this rank's term of the Hessian times a direction
    world: Axis  # the ranks whose terms of products with vectors are summed
    values: Axis  # the ranks whose terms of the value are summed
    counts: bool = True  # the vectors of this rank count; False where other ranks have the same
    value_counts: bool = True  # likewise for the value

    @classmethod
    def of_function(
        cls, function: Callable[..., Any], jac: Any, hessp: Any, x: Any, mesh: Mesh | None, summed: bool
    ) -> Part:
        """The part of a function with SciPy's signature."""
        unknowns = Unknowns(x)
        specs = None if unknowns.tree is None else unknowns.specs
        point = FlatParameters.over(unknowns.flat, specs) if unknowns.parameters is None else unknowns.parameters
        given = unknowns.shown_to_user

        def call() -> tuple[Any, Any]:
            if jac is not True:
                return function(given()), unknowns.vector("the gradient", jac(given()))
            result = function(given())
            if not (isinstance(result, tuple | list) and len(result) == 2):
                kind = type(result).__name__
                raise TypeError(f"the function must return (value, gradient), got {kind}; or give jac=gradient")
            return result[0], unknowns.vector("the gradient", result[1])

        def product(direction: np.ndarray) -> Any:
            vector = arrays.empty(point.size, point.dtype, like=point.like)
            set_values(vector, direction.astype(point.dtype))
            return unknowns.vector("the Hessian product", hessp(given(), unknowns.like_x0(vector)))

        axis = Axis.single() if mesh is None else mesh.world
        first = mesh is None or mesh.data.rank == 0
        return cls(point, call, product if hessp else None, axis, axis, summed or first, summed or axis.rank == 0)

    @classmethod
    def of_problem(cls, problem: OptimizationProblem[Any], mesh: Mesh | None, samples: Any) -> Part:
        """The part of a problem's mean loss over samples, by default those of one batch."""
        batch = np.arange(problem.batch_size) if samples is None else np.atleast_1d(np.asarray(samples, np.int64))
        data = Axis.single() if mesh is None else mesh.data
        own = share(batch, data.rank, data.size, problem.micro_batch_size)
        named = isinstance(problem.start, FlatParameters)
        point = problem.start if named else FlatParameters.over(problem.start.copy())
        together = mesh is not None and data.size < mesh.size
        terms = problem.terms(len(batch))

        def call() -> tuple[Any, Any]:
            loss = 0.0
            point.reset_gradients()
            gradient = arrays.zeros(point.size, point.dtype, like=point.like)
            for micro in own:
                if not (len(micro) or together):
                    continue
                if named:
                    with point.gradients.no_sync():
                        loss += returned(problem.function(point, micro, point.gradients))
                    gradient = point.gradients.memory.flat
                else:
                    loss += returned(problem.function(point.flat, micro, gradient))
            gradient = arrays.to_host(gradient) / terms
            point.reset_gradients()
            return loss / terms, gradient

        return cls(point, call, None, Axis.single() if mesh is None else mesh.world, data)


class Line:
    """Values of a function at the points x + h d, and products with its gradient there. Methods are collective.

    `direction` is this rank's elements of d; None for uniform random numbers from `seed`, each tensor's as large as its
    largest element. `x`, `d` and another random direction `w` are this rank's elements, in float64; `dtype` is that of
    the point, and `size` the elements over all ranks. Raises ValueError if the direction has another size, or is 0 or
    not finite.
    """

    def __init__(self, part: Part, direction: Any = None, seed: int = 0) -> None:
        self._part = part
        point = part.point
        self.dtype: np.dtype = point.dtype
        self._start = arrays.to_host(point.flat).copy()
        self.x = np.array(self._start, np.float64)
        self.size: int = sum(spec.size for spec in point.specs)
        self._counted = np.zeros(point.size)
        scales = [np.abs(self.x[piece.start : piece.start + piece.size]).max(initial=0.0) for piece in point.pieces]
        scales = part.world.all_reduce(np.array([*scales, 0.0]), op="max", label="control").tolist()
        self.d, self.w = np.zeros(point.size), np.zeros(point.size)
        for spec, piece, scale in zip(point.local, point.pieces, scales, strict=False):
            own = slice(piece.start, piece.start + piece.size)
            self._counted[own] = part.counts and (spec.partial or point.place.is_primary(spec))
            for vector, name in ((self.d, "direction"), (self.w, "other direction")):
                numbers = uniform_in_box(seed, f"{name} {spec.name}", spec.shape, piece.box)
                vector[own] = numbers.reshape(-1) * (scale if np.isfinite(scale) and scale else 1.0)
        with raised_on_all(part.world):
            if direction is not None:
                given = direction.flat if isinstance(direction, FlatParameters) else direction
                try:
                    self.d = np.array(arrays.to_host(given), np.float64).reshape(-1)
                except (TypeError, ValueError):
                    raise TypeError(f"direction={shown(direction)} must be an array of numbers, like x") from None
            if self.d.size != point.size or not np.isfinite(self.d).all():
                raise ValueError(f"direction must have {point.size} finite elements, like x; it has {self.d.size}")
        if not self._sum(float(np.abs(self.d).sum()))[0]:
            raise ValueError("direction is 0: nothing changes along it; leave it out for a random one")

    def at(self, h: float) -> LineEvaluation:
        """The function at x + h d, rounded to the dtype of x; the same numbers on all ranks.

        Raises on all ranks if the function of any rank raises, or returns something else than value and gradient.
        """
        part = self._part
        moved = (self.x + h * self.d).astype(self.dtype)
        with raised_on_all(part.world):
            try:
                set_values(part.point.flat, moved)
                value, gradient = part.call()
                value, gradient = returned(value), np.array(arrays.to_host(gradient), np.float64)
            finally:
                set_values(part.point.flat, self._start)
        total = part.values.all_reduce(np.array([value if part.value_counts else 0.0]), label="control")
        return LineEvaluation(float(total[0]), value, moved - self.x, gradient * self._counted)

    def product(self, direction: np.ndarray) -> np.ndarray:
        """This rank's terms of the Hessian at x times a direction."""
        with raised_on_all(self._part.world):
            assert self._part.product is not None
            product = np.array(arrays.to_host(self._part.product(direction)), np.float64)
        return product * self._counted

    def dots(self, *pairs: tuple[np.ndarray, np.ndarray]) -> list[float]:
        """Dot products of this rank's terms with vectors, summed over ranks."""
        return self._sum(*(float(np.dot(one, other)) for one, other in pairs))

    def spread(self, own: float) -> float:
        """The difference of the largest and the smallest number of a rank."""
        return float(self._part.world.all_reduce(np.array([own, -own]), op="max", label="control").sum())

    def _sum(self, *numbers: float) -> list[float]:
        found: list[float] = self._part.world.all_reduce(np.array(numbers), label="control").tolist()
        return found


@dataclass(frozen=True)
class LineEvaluation:
    """A function at one point."""

    value: float  # over all ranks
    own: float  # this rank's term of the value
    step: np.ndarray  # the point less x, as it was rounded
    gradient: np.ndarray  # this rank's terms, zero where those of another rank count


def set_values(target: Array, values: np.ndarray) -> None:
    """Set the values of an array on the host or a device."""
    if arrays.is_device(target):
        arrays.copy_to_device(values, target)
    else:
        np.copyto(target, values)


# The order in which a Taylor remainder falls with the step, where rounding does not hide it.

_AHEAD = 10.0  # a remainder counts if it is at least this factor above the rounding errors
_FLAT = 0.6  # remainders that fall more slowly than this power of the step are errors of the function itself
_FITTED = 3  # remainders in the fit, those of the smallest steps
_SIGNIFICANT = 6.0  # standard deviations
_SLACK = 0.2  # by which an order may be too low


@dataclass(frozen=True)
class TaylorTest:
    """The remainders of a Taylor series for a row of steps, and the order in which they fall."""

    name: str  # of the remainder
    expected: int  # the order of the remainder if the terms are right
    steps: tuple[float, ...]  # h, descending
    remainders: tuple[float, ...]  # absolute, for each step; NaN or infinite outside of the function's domain
    used: tuple[bool, ...]  # the remainder is in the fit of the order: one of the smallest that rounding does not hide
    order: float  # the slope of the used remainders, in logarithms; NaN if rounding hides all of them
    error: float  # the smallest remainder relative to the last term of the series
    passed: bool  # the order is as expected, or the agreement as close as the precision of the values can show


def taylor_test(
    name: str,
    expected: int,
    steps: Sequence[float],
    remainders: Sequence[float],
    terms: Sequence[float],
    rounding: Sequence[float],
    precision: float,
) -> TaylorTest:
    """Fit the order of remainders.

    For each step, `terms` has the last term of the series that was subtracted, and `rounding` the size of the rounding
    errors in the remainder; `precision` is the relative precision of the values.
    """
    h, signed = np.asarray(steps, float), np.asarray(remainders, float)
    left = np.abs(signed)
    known = np.isfinite(left)
    floor = np.maximum(_AHEAD * np.asarray(rounding, float), _level_of_tail(h, left, known))
    fitted = np.flatnonzero(known & (left > floor))[-_FITTED:]
    order = float("nan")
    if len(fitted) > 1:  # the last two are the nearest to the limit
        order = max(_slope(h[fitted], left[fitted]), _slope(h[fitted[-2:]], left[fitted[-2:]]))
    if len(fitted) and fitted[-1] + 1 < len(h) and known[fitted[-1] + 1]:
        # A remainder that falls below the rounding errors at once, as of a piecewise linear function, falls steeply.
        last, lower = left[fitted[-1]], max(left[fitted[-1] + 1], floor[fitted[-1] + 1])
        order = np.fmax(order, np.log(last / lower) / np.log(h[fitted[-1]] / h[fitted[-1] + 1]) if lower else np.inf)
    relative = np.divide(left, np.abs(terms), out=np.where(left > 0, np.inf, 0.0), where=np.asarray(terms) != 0)
    relative = relative[known]  # two neighbours must be small: one may be so by accident, where terms cancel
    error = float(np.maximum(relative[1:], relative[:-1]).min(initial=np.inf))
    tail = np.flatnonzero(known)
    tail = tail[tail >= fitted[0]] if len(fitted) else tail[:0]
    power = h[tail] ** (expected - 1)
    steep = order > expected + 1.5  # as a piecewise linear function between two kinks
    wrong = not steep and _has_lower_order(h[tail], signed[tail] / power, np.asarray(rounding, float)[tail] / power)
    return TaylorTest(
        name,
        expected,
        tuple(h.tolist()),
        tuple(left.tolist()),
        tuple(bool(index in fitted) for index in range(len(h))),
        float(order),
        error,
        error <= precision**0.5 or (bool(order >= expected - _SLACK) and not wrong),
    )


def _slope(h: np.ndarray, left: np.ndarray) -> float:
    """The slope of the logarithms, by least squares."""
    return float(np.polyfit(np.log(h), np.log(left), 1)[0])


def _has_lower_order(h: np.ndarray, ratios: np.ndarray, rounding: np.ndarray) -> bool:
    """Return True if remainders over a power of the step tend to something else than 0 with the step.

    The order alone may not show it, where the wrong part of a term and the next term have different signs. Fits
    ``a + b h + c h^2`` by least squares, weighted by rounding errors, and tests that a is significant.
    """
    if len(h) < 5 or not (rounding.all() and np.isfinite(rounding).all()):
        return False
    relative, weights = (
        h / h[0],
        rounding.min() / rounding,
    )  # in units of the smallest error, so that squares are numbers
    columns = np.stack([np.ones_like(h), relative, relative**2], axis=1) * weights[:, None]
    wanted = ratios / rounding
    inverse = np.linalg.inv(columns.T @ columns)
    fit = inverse @ (columns.T @ wanted)
    misfit = columns @ fit - wanted
    deviation = (inverse[0, 0] * max(1.0, float(misfit @ misfit) / (len(h) - 3))) ** 0.5
    return bool(abs(fit[0]) > _SIGNIFICANT * deviation)


def _level_of_tail(h: np.ndarray, left: np.ndarray, known: np.ndarray) -> float:
    """Ten times the median of the remainders at the small steps that no longer fall; 0 without such steps."""
    for first in range(len(h) - 2):
        tail = np.arange(first, len(h))[known[first:] & (left[first:] > 0)]
        if len(tail) > 2 and _slope(h[tail], left[tail]) < _FLAT:
            return 10.0 * float(np.median(left[tail]))
    return 0.0


# The Taylor test: is a gradient that of its function?

_FIRST = 0.1  # step
_ROWS = {np.dtype(np.float32): (14, 2.0), np.dtype(np.float64): (13, 4.0)}  # the number of steps, and their ratio
_TINY = (8.0, 64.0, 512.0)  # steps in units of the precision, at which only rounding is left


@dataclass(frozen=True)
class GradientCheck:
    """The result of `check_gradient`; true if the check has passed.

    Parameters
    ----------
    passed : bool
        Whether all tests have passed.
    verdict : str
        One sentence: what is right or wrong.
    value : float
        f(x).
    derivative : float
        g'd, the derivative along the direction by the gradient.
    quotient : float
        The same by a central difference of the values; NaN where none was needed, since the test has passed.
    tests : tuple of TaylorTest
        The remainder of the value; with a Hessian product also those of the value and of the gradient.
    """

    passed: bool
    verdict: str
    value: float
    derivative: float
    quotient: float
    tests: tuple[TaylorTest, ...]

    @property
    def order(self) -> float:
        """The order in which the remainder of the value falls; 2 for a right gradient."""
        return self.tests[0].order

    @property
    def error(self) -> float:
        """The relative difference of g'd from the slope of the function, as well as the values can show it."""
        return self.tests[0].error

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        """The table of steps and remainders, and the verdict."""
        lines = []
        for test in self.tests:
            lines += [f"{'h':>9}  {test.name}"]
            rows = list(zip(test.steps, test.remainders, test.used, strict=True))
            for index, (h, remainder, used) in enumerate(rows):
                before = rows[max(0, index - 1)]
                falls = index and remainder > 0 and before[1] > 0
                order = np.log(before[1] / remainder) / np.log(before[0] / h) if falls else np.nan
                lines.append(
                    f"{h:9.2e}  {remainder:9.2e}  {'' if np.isnan(order) else f'{order:5.2f}':>5}{' *' * used}"
                )
            lines.append(
                f"order of the smallest that rounding does not hide (*): {test.order:.2f}, expected {test.expected}"
            )
        return "\n".join([*lines, f"{'PASS' if self.passed else 'FAIL'}: {self.verdict}"])


def check_gradient(
    function: Callable[..., Any] | OptimizationProblem[Any],
    x: Any = None,
    *,
    jac: Any = True,
    hessp: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
    reduction: str | None = None,
    samples: Any = None,
    direction: Any = None,
    steps: Sequence[float] | None = None,
    seed: int = 0,
    plot: str | PathLike[str] | None = None,
    disp: bool = True,
) -> GradientCheck:
    """Check a gradient by the Taylor test, along one random direction.

    Collective over the mesh, if there is one.  The function is evaluated about 25 times.

    Parameters
    ----------
    function : callable or OptimizationProblem
        ``function(x) -> (value, gradient)``, as `minimize` takes it; or a problem, whose mean loss is checked.
    x : array, FlatParameters, or dict, list or tuple of arrays, optional
        The point, not a minimum, as the `x0` of `minimize`: float32 or float64, else it becomes float64.  A
        FlatParameters has this rank's slice, and is the same afterwards.  Default: the start of the problem.
    jac : True or callable
        ``jac(x) -> gradient``, if the function returns the value alone.
    hessp : callable, optional
        ``hessp(x, p) -> vector``: the Hessian times p.  It must be the whole Hessian; Gauss-Newton products are others.
    mesh : Mesh, optional
        The ranks.  Without it each rank checks by itself, and the verdict says so on several ranks.
    reduction : {None, "sum"}
        On a mesh: None if the function gives the whole value and gradient on every rank, ``"sum"`` if it gives terms of
        both that are summed over ranks.
    samples : sequence of int, optional
        Of a problem: which samples.  Default: as many as in a batch, the first ones.
    direction : array, optional
        d, this rank's elements, of the size of a large change of x.  Default: random, by the names of tensors, not by
        ranks.
    steps : sequence of float, optional
        h, descending.  Default: from 0.1 on, each a quarter of the one before (float32: a half).
    seed : int
        Of the random direction.
    plot : path, optional
        The first rank draws the remainders over the steps into this file (.png, .pdf or .svg).
    disp : bool
        Whether the first rank prints the table.

    Returns
    -------
    GradientCheck
        The same on all ranks.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid, or the function has no finite value and gradient at x.

    Examples
    --------
    >>> import mpishard
    >>> bool(mpishard.check_gradient(lambda x: ((x**4).sum(), 4 * x**3), [1.0, 2.0], disp=False))
    True
    """
    with opening(mesh, "check_gradient") as same:
        flag("disp", disp)
        part = _part(function, x, jac, hessp, mesh, reduction, samples)
        row = _steps(steps, part.point.dtype)
        same |= {"x": f"{part.point.description} ({part.point.fingerprint:x})", "reduction": reduction}
        same |= {"hessp": hessp is not None, "samples": samples, "steps": row, "seed": integer("seed", seed)}
    line = Line(part, direction, seed)
    result = _check(line, row, hessp is not None, mesh is not None and reduction is None and x is not None)
    rank, ranks = rank_in_job()
    if mesh is None and ranks > 1:
        alone = f"; on rank {rank} of {ranks} alone: mesh= checks the function of all of them"
        result = replace(result, verdict=result.verdict + alone)
    if part.world.rank == 0:
        if disp:
            print(f"check of the gradient of {line.size} elements, {line.dtype}\n{result}")
        if plot is not None:
            draw(result.tests, plot)
    return result


def _part(function: Any, x: Any, jac: Any, hessp: Any, mesh: Mesh | None, reduction: str | None, samples: Any) -> Part:
    """This rank's part of the function."""
    if reduction not in (None, "sum"):
        raise ValueError(f'reduction={shown(reduction)} must be None or "sum"')
    if isinstance(function, OptimizationProblem):
        if x is not None or jac is not True or hessp is not None or reduction is not None:
            raise ValueError("a problem has its start and its sums; leave x, jac, hessp and reduction out")
        return Part.of_problem(function, mesh, samples)
    if not callable(function) or not (jac is True or callable(jac)):
        raise TypeError(f"function={shown(function)} and jac={shown(jac)} must be functions; jac=True: it gives both")
    if x is None or samples is not None:
        raise ValueError("a function needs x, the point of the check, and has no samples; a problem has both")
    return Part.of_function(function, jac, hessp, x, mesh, reduction == "sum")


def _steps(steps: Sequence[float] | None, dtype: np.dtype) -> list[float]:
    """The row of steps, descending."""
    if steps is None:
        count, ratio = _ROWS[dtype]
        return [_FIRST * ratio**-index for index in range(count)]
    row = [number("steps", step, above=0) for step in entries("steps", steps, "numbers")]
    if len(row) < 3 or sorted(set(row), reverse=True) != row:
        raise ValueError(f"steps={shown(steps)} must be at least 3, descending")
    return row


def _check(line: Line, row: list[float], with_product: bool, same_on_all: bool) -> GradientCheck:
    """Evaluate and judge.  Collective."""
    here = line.at(0.0)
    wrong = line.dots((~np.isfinite(here.gradient) * 1.0, np.ones(line.x.size)))[0]
    if wrong or not np.isfinite(here.value):
        raise ValueError(
            f"the value at x is {here.value:g}, and {wrong:.0f} elements of the gradient are not finite; "
            "the check needs a point where the function has both"
        )
    if same_on_all and (difference := line.spread(here.own)):
        raise ValueError(
            f"ranks give values that differ by {difference:.3g} at one point; where each has a term of a sum, give "
            'reduction="sum"'
        )
    points = [line.at(h) for h in row]
    pairs = [(here.gradient, each.step) for each in points]
    rises = line.dots(*pairs)
    sizes = line.dots(*((np.abs(gradient), np.abs(step)) for gradient, step in pairs))
    (derivative,) = line.dots((here.gradient, line.d))
    values = [each.value for each in points]
    precision = _precision([here.value, *values], line.dtype)
    noise = _noise(line, here, precision)
    if precision > np.finfo(line.dtype).eps:  # the function rounds x
        change = np.abs(here.gradient * line.x)
        noise += precision * line.dots((change, change))[0] ** 0.5
    rounding = [noise + precision * size for size in sizes]
    left = [value - here.value - rise for value, rise in zip(values, rises, strict=True)]
    name = "|f(x + h d) - f(x) - h g'd|"
    tests = [taylor_test(name, 2, row, left, rises, rounding, precision)]
    if with_product:
        product = line.product(line.d)
        tests += _product_tests(line, product, row, here, points, left, rounding, precision)
    quotient, verdict = float("nan"), ""
    if not tests[0].passed:
        quotient, verdict = _diagnosis(line, here, tests[0], derivative, values, noise, precision)
    elif not all(test.passed for test in tests):
        verdict = "the gradient passes, but the Hessian product does not: " + " and ".join(
            f"{test.name} falls like h^{test.order:.2f}" for test in tests[1:] if not test.passed
        )
        verdict += _asymmetry(line, product, precision)
    else:
        verdict = _praise(tests)
    passed = all(test.passed for test in tests)
    return GradientCheck(passed, verdict, here.value, derivative, quotient, tuple(tests))


def _product_tests(
    line: Line,
    product: np.ndarray,
    row: list[float],
    here: LineEvaluation,
    points: list[LineEvaluation],
    left: list[float],
    rounding: list[float],
    precision: float,
) -> list[TaylorTest]:
    """The remainder of the value with the second-order term, and that of the gradient along another direction."""
    bent, slope, size = line.dots((product, line.d), (product, line.w), (np.abs(here.gradient), np.abs(line.w)))
    halves = [0.5 * h * h * bent for h in row]
    third = [rest - half for rest, half in zip(left, halves, strict=True)]
    slopes = line.dots(*((each.gradient - here.gradient, line.w) for each in points))
    second = [found - h * slope for h, found in zip(row, slopes, strict=True)]
    return [
        taylor_test("|f(x + h d) - f(x) - h g'd - h^2/2 d'Hd|", 3, row, third, halves, rounding, precision),
        taylor_test(
            "|w'(g(x + h d) - g(x) - h Hd)|",
            2,
            row,
            second,
            [h * slope for h in row],
            [precision * size] * len(row),
            precision,
        ),
    ]


def _asymmetry(line: Line, product: np.ndarray, precision: float) -> str:
    """A text on a Hessian product that fails, if it is not symmetric; else empty. Collective."""
    other = line.product(line.w)
    one, two, size = line.dots((line.w, product), (line.d, other), (np.abs(line.w), np.abs(product)))
    if abs(one - two) <= precision ** (1 / 3) * size:
        return ""
    return f"; it is not symmetric: w'(H d) = {one:.6g}, d'(H w) = {two:.6g}"


def _precision(values: list[float], dtype: np.dtype) -> float:
    """The precision in which the values were computed: that of x, or float32 if they all are such numbers."""
    finite = np.array([value for value in values if np.isfinite(value)])
    with np.errstate(over="ignore"):
        rounded = bool((finite.astype(np.float32) == finite).all()) and len(set(finite.tolist())) > 2
    return float(np.finfo(np.float32 if rounded else dtype).eps)


def _noise(line: Line, here: LineEvaluation, precision: float) -> float:
    """Rounding errors of the values: second differences of tiny steps, and of the point itself."""
    found = [precision * abs(here.value), abs(line.at(0.0).value - here.value)]
    for tiny in _TINY:
        up, down = (line.at(sign * tiny * float(np.finfo(line.dtype).eps)) for sign in (1, -1))
        (drift,) = line.dots((here.gradient, up.step + down.step))
        found.append(abs(up.value + down.value - 2 * here.value - drift) / 2)  # four values, and not two
    return max(each for each in found if np.isfinite(each))


def _praise(tests: list[TaylorTest]) -> str:
    """The verdict of a passed check."""
    words = []
    for test in tests:
        if not any(test.used):
            words.append(f"{test.name} is rounding error alone")
        elif test.order < test.expected - 0.5:
            words.append(f"{test.name} is {test.error:.1e} of the last term, as close as the precision shows")
        else:
            words.append(f"{test.name} falls like h^{test.order:.2f}")
    return "the gradient is right: " + ", ".join(words)


def _diagnosis(
    line: Line,
    here: LineEvaluation,
    test: TaylorTest,
    derivative: float,
    values: list[float],
    noise: float,
    precision: float,
) -> tuple[float, str]:
    """A central quotient, and the probable error. Collective."""
    used = [index for index, in_fit in enumerate(test.used) if in_fit]
    if len(used) < 3 and noise < precision**0.5 * abs(here.value):
        return float("nan"), (
            f"the check cannot tell: rounding errors of the value, about {noise:.1e} of {here.value:.6g}, hide the "
            "remainder at almost all steps; give larger steps, or compute the value in float64"
        )
    if not used:
        return float("nan"), (
            f"the value is {here.value:.6g}, and its remainder does not fall below {min(test.remainders):.1e}, however "
            "small the step; is there a jump, a random number or a loose tolerance in the function?"
        )
    steps = np.array([test.steps[index] for index in used])
    ahead = np.array([values[index] for index in used])
    back = np.array([line.at(-h).value for h in steps])
    width = precision ** (1 / 3)  # where errors of a central difference are smallest
    quotient = (line.at(width).value - line.at(-width).value) / (2 * width)
    bends = np.abs(ahead + back - 2 * here.value)
    if (bends > 30 * noise).all() and bends[-1] * steps[0] > 0.5 * bends[0] * steps[-1]:  # not smooth: falls like h
        slopes = sorted([(ahead[-1] - here.value) / steps[-1], (here.value - back[-1]) / steps[-1]])
        return quotient, (
            f"the function has a kink at x: along the direction its slopes on both sides are {slopes[0]:.6g} and "
            f"{slopes[1]:.6g}, and the gradient says {derivative:.6g}; take another point"
        )
    times = f", {derivative / quotient:.6g} times as much" if quotient else ""
    return quotient, (
        f"the gradient is wrong: along the direction the slope of the function is {quotient:.6g}, and that of the "
        f"gradient {derivative:.6g}{times}; the remainder falls like h^{test.order:.2f}"
    )


# The remainders of a gradient check over the steps, as a picture.

_BLUE, _RED = "#0072b2", "#d55e00"


def draw(tests: Sequence[TaylorTest], path: str | PathLike[str]) -> None:
    """Draw one panel per test; full marks are those of the fit of the order, with a line of the expected order."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(tests), 4), layout="constrained")
    for panel, test in zip(figure.subplots(1, len(tests), squeeze=False)[0], tests, strict=True):
        steps, left = np.array(test.steps), np.array(test.remainders)
        used = np.array(test.used)
        colour = _BLUE if test.passed else _RED
        panel.plot(steps, left, color=colour, lw=1, marker="o", mfc="white", ms=5, label="remainder")
        panel.plot(steps[used], left[used], "o", color=colour, ms=5, label=f"order {test.order:.2f}")
        if used.any():
            first = np.flatnonzero(used)[0]
            right = left[first] * (steps / steps[first]) ** test.expected
            seen = right >= 0.1 * left[left > 0].min()
            panel.plot(steps[seen], right[seen], color="0.5", ls=":", label=f"order {test.expected}")
        panel.set(title=test.name, xlabel="h", xscale="log", yscale="log")
        panel.title.set_fontsize(9)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


# The dot-product test: do an operator and its adjoint fit each other?


@dataclass(frozen=True)
class AdjointCheck:
    """The result of `check_adjoint`; true if the check has passed.

    Parameters
    ----------
    passed : bool
        Whether `error` is at most the tolerance.
    error : float
        ``|<Ax, y> - <x, A'y>| / (|Ax| |y|)``.
    forward, adjoint : float
        ``<Ax, y>`` and ``<x, A'y>``.
    """

    passed: bool
    error: float
    forward: float
    adjoint: float

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        """One line."""
        verdict = "PASS" if self.passed else "FAIL"
        return f"{verdict}: <Ax, y> = {self.forward:.15g}, <x, A'y> = {self.adjoint:.15g}, relative {self.error:.1e}"


def check_adjoint(
    forward: Callable[[Any], Any],
    adjoint: Callable[[Any], Any],
    x: Any,
    y: Any,
    *,
    mesh: Mesh | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    disp: bool = True,
) -> AdjointCheck:
    """Check that ``<Ax, y> = <x, A'y>`` for random x and y.

    Collective over the mesh, if there is one: each rank gives its parts of the vectors, every element on one rank.

    Parameters
    ----------
    forward, adjoint : callable
        ``forward(x) -> A x`` and ``adjoint(y) -> A' y``, which must be linear.
    x, y : array
        What shapes and dtypes they take; the values do not matter.  float32 or float64.
    mesh : Mesh, optional
        The ranks that have parts of the vectors.
    tolerance : float, optional
        The largest relative error that passes.  Default: 1e-4 where a vector or a result is float32, else 1e-12.
    seed : int
        Of the random values.
    disp : bool
        Whether the first rank prints a line.

    Returns
    -------
    AdjointCheck
        The same on all ranks.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if a function of any rank raises these, or returns another shape than the other one takes.

    Examples
    --------
    >>> import numpy as np, mpishard
    >>> A = np.arange(6.0).reshape(2, 3)
    >>> bool(mpishard.check_adjoint(lambda x: A @ x, lambda y: A.T @ y, np.zeros(3), np.zeros(2), disp=False))
    True
    """
    axis = Axis.single() if mesh is None else mesh.world
    with opening(mesh, "check_adjoint") as same:
        flag("disp", disp)
        vectors = [
            _random(like, integer("seed", seed), f"{name} of rank {axis.rank}") for like, name in ((x, "x"), (y, "y"))
        ]
        half = any(vector.dtype == np.float32 for vector in vectors)
        limit = None if tolerance is None else number("tolerance", tolerance, least=0)
        same |= {"seed": seed, "tolerance": limit}
    results: list[np.ndarray] = []
    with raised_on_all(axis):
        for name, apply, vector, other in (("forward", forward, *vectors), ("adjoint", adjoint, *vectors[::-1])):
            found = apply(vector.copy())
            if np.shape(found) != other.shape:
                raise ValueError(f"{name} gives shape {np.shape(found)}, but the other one takes {other.shape}")
            half = half or getattr(found, "dtype", None) == np.float32
            results.append(_flat(found))
    one, other = (_flat(vector) for vector in vectors)
    sums = [results[0] @ other, one @ results[1], results[0] @ results[0], other @ other, half]
    there, back, square, other_square, halves = axis.all_reduce(np.array(sums), label="control").tolist()
    limit = (1e-4 if halves else 1e-12) if limit is None else limit
    size = (square * other_square) ** 0.5
    error = abs(there - back) / size if size else float(there != back)
    check = AdjointCheck(bool(error <= limit), float(error), there, back)
    if disp and axis.rank == 0:
        print(check)
    return check


def _random(like: Any, seed: int, name: str) -> Array:
    """Random numbers of the shape, dtype and device of an array; dtypes other than float32 become float64."""
    shape = np.shape(like)
    half = getattr(like, "dtype", None) == np.float32
    numbers = uniform_in_box(seed, name, shape, whole_box(shape))
    values = numbers.astype(np.float32 if half else np.float64)
    return arrays.module_of(like).asarray(values) if arrays.is_device(like) else values


def _flat(values: Array) -> np.ndarray:
    """An array as a float64 vector on the host."""
    return np.asarray(arrays.to_host(values) if arrays.is_device(values) else values, np.float64).reshape(-1)
