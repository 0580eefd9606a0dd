"""Whether a gradient is that of its function: the Taylor test.

A right gradient g leaves a remainder f(x + h d) - f(x) - h g'd that falls like h^2; a wrong one leaves a part of the
linear term, and falls like h.  With the Hessian H, the remainder f(x + h d) - f(x) - h g'd - h^2/2 d'Hd falls like
h^3.  Steps at which rounding hides the remainder are left out (Griewank and Walther, Evaluating Derivatives, 2008).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from mpishard.arguments import entries, flag, integer, number, shown
from mpishard.comm.mesh import Mesh
from mpishard.inverse.line import Evaluation, Line, Part
from mpishard.inverse.taylor import TaylorTest, taylor_test
from mpishard.training.problem import OptimizationProblem

Array = Any
_FIRST = 0.1  # step
_ROWS = {np.dtype(np.float32): (14, 2.0), np.dtype(np.float64): (13, 4.0)}  # how many steps, and their ratio
_TINY = (8.0, 64.0, 512.0)  # steps in units of the precision, at which only rounding is left


@dataclass(frozen=True)
class GradientCheck:
    """What `check_gradient` has found; true if the check has passed.

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
    x : array or FlatParameters, optional
        The point, not a minimum: float32 or float64, else it becomes float64.  A FlatParameters has this rank's slice,
        and is the same afterwards.  Default: the start of the problem.
    jac : True or callable
        ``jac(x) -> gradient``, if the function returns the value alone.
    hessp : callable, optional
        ``hessp(x, p) -> vector``: the Hessian times p.  It must be the whole Hessian; Gauss-Newton products are others.
    mesh : Mesh, optional
        The ranks.  Without it each rank checks by itself.
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
    flag("disp", disp)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={shown(mesh)} must be a Mesh, or None")
    part = _part(function, x, jac, hessp, mesh, reduction, samples)
    line = Line(part, direction, integer("seed", seed))
    row = _steps(steps, line.dtype)
    result = _check(line, row, hessp is not None, mesh is not None and reduction is None and x is not None)
    if part.world.rank == 0:
        if disp:
            print(f"check of the gradient of {line.size} elements, {line.dtype}\n{result}")
        if plot is not None:
            from mpishard.inverse.gradient_figure import draw

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


def _check(line: Line, row: list[float], with_product: bool, alike: bool) -> GradientCheck:
    """Evaluate and judge.  Collective."""
    here = line.at(0.0)
    wrong = line.dots((~np.isfinite(here.gradient) * 1.0, np.ones(line.x.size)))[0]
    if wrong or not np.isfinite(here.value):
        raise ValueError(
            f"the value at x is {here.value:g}, and {wrong:.0f} elements of the gradient are not finite; "
            "the check needs a point where the function has both"
        )
    if alike and (difference := line.spread(here.own)):
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
    here: Evaluation,
    points: list[Evaluation],
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
    """Of a Hessian product that fails: that it is not symmetric, if so.  Collective."""
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


def _noise(line: Line, here: Evaluation, precision: float) -> float:
    """Rounding errors of the values: second differences of tiny steps, and of the point itself."""
    found = [precision * abs(here.value), abs(line.at(0.0).value - here.value)]
    for tiny in _TINY:
        up, down = (line.at(sign * tiny * float(np.finfo(line.dtype).eps)) for sign in (1, -1))
        (drift,) = line.dots((here.gradient, up.step + down.step))
        found.append(abs(up.value + down.value - 2 * here.value - drift) / 2)  # four values, and not two
    return max(each for each in found if np.isfinite(each))


def _praise(tests: list[TaylorTest]) -> str:
    """What a passed check says."""
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
    here: Evaluation,
    test: TaylorTest,
    derivative: float,
    values: list[float],
    noise: float,
    precision: float,
) -> tuple[float, str]:
    """A central quotient, and what is probably wrong.  Collective."""
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
