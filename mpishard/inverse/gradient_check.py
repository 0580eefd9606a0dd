"""Is a gradient that of its function, and a Hessian product that of the gradient? Up to three Taylor tests say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from mpishard.arguments import entries, flag, integer, number, path, returned, shown
from mpishard.backend import array as arrays
from mpishard.backend.random import uniform_in_box
from mpishard.comm.axis import Axis, rank_in_job
from mpishard.comm.errors import OneRank, raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.data.sampling import share
from mpishard.inverse.functions import TERMS, Functions, opening, world_of
from mpishard.inverse.pictures import draw_remainders
from mpishard.inverse.taylor import FITTED, TaylorTest, taylor_test
from mpishard.inverse.unknowns import Unknowns
from mpishard.io import terminal
from mpishard.parameters.flat import FlatParameters, gradients_of_one_rank
from mpishard.training.problem import OptimizationProblem

Array = Any


# A function along a line through a point: its values, and products with its gradient, summed over ranks.


@dataclass(frozen=True)
class Part:
    """One rank's part of a function: terms of sums over ranks, at the values of `point`."""

    point: FlatParameters  # the elements of this rank; evaluations are made at its values
    call: Callable[[], tuple[Any, Any]]  # returns (value, gradient)
    world: Axis | OneRank  # the ranks whose terms of products with vectors are summed
    values: Axis | OneRank  # the ranks whose terms of the value are summed
    product: Callable[[Array], Any] | None = None  # this rank's term of the Hessian times a direction
    counts: bool = True  # the vectors of this rank count; False where other ranks have the same
    value_counts: bool = True  # likewise for the value
    arrange: Callable[[Array], Array] | None = None  # brings their vectors to the order of `point`; collective
    given_size: int | None = None  # elements of such a vector on this rank; None: as many as of `point`

    def arranged(self, vector: Array) -> np.ndarray:
        """A vector of `call` or `product` in the order of `point`, on the host in float64.  Collective."""
        return np.array(arrays.to_host(vector if self.arrange is None else self.arrange(vector)), np.float64)


def _part(function: Any, x: Any, jac: Any, hessp: Any, mesh: Mesh | None, reduction: str | None, samples: Any) -> Part:
    """This rank's part of the function."""
    if reduction not in (None, "sum"):
        raise ValueError(f'reduction={shown(reduction)} must be None or "sum"')
    if isinstance(function, OptimizationProblem):
        if x is not None or jac is not True or hessp is not None or reduction is not None:
            raise ValueError("a problem has its start and its sums; leave x, jac, hessp and reduction out")
        return _part_of_problem(function, mesh, samples)
    functions = Functions(function, jac, hessp, ())
    if x is None or samples is not None:
        raise ValueError("a function needs x, the point of the check, and has no samples; a problem has both")
    return _part_of_function(functions, x, mesh, reduction == "sum")


def _part_of_function(functions: Functions, x: Any, mesh: Mesh | None, summed: bool) -> Part:
    unknowns = Unknowns(x)
    functions.take_shape(unknowns)
    specs = None if unknowns.tree is None and not unknowns.is_split else unknowns.specs
    point = unknowns.parameters
    if point is None:
        point = FlatParameters.over(unknowns.flat, specs, unknowns.place)

    def call() -> tuple[Any, Any]:
        unknowns.show()
        value, gradient = functions.value_and_gradient(unknowns.point())
        return value, unknowns.vector("the gradient", gradient)

    def product(direction: Array) -> Any:
        unknowns.show()
        found = functions.product(unknowns.point(), unknowns.like_x0(unknowns.as_given(direction)))
        return unknowns.vector("the Hessian product", found)

    axis = world_of(mesh)
    functions.meeting = axis if unknowns.is_split else None
    first = mesh is None or mesh.data.rank == 0
    counts = summed or first, summed or axis.rank == 0
    return Part(point, call, axis, axis, product, *counts, unknowns.arranged, unknowns.given_size)


def _part_of_problem(problem: OptimizationProblem[Any], mesh: Mesh | None, samples: Any) -> Part:
    """The part of the mean loss over samples, by default those of one batch."""
    batch = np.arange(problem.batch_size) if samples is None else np.atleast_1d(np.asarray(samples, np.int64))
    data = OneRank() if mesh is None else mesh.data
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
                gradient = point.gradients.flat
            else:
                loss += returned(problem.function(point.flat, micro, gradient))
        gradient = arrays.to_host(gradient) / (terms * point.loss_scale)
        point.reset_gradients()
        return loss / terms, gradient

    def call_on_one_rank() -> tuple[Any, Any]:
        """`call`, where an optimizer has left gradients that are summed over ranks bucket by bucket."""
        bound, point.gradients = point.gradients, gradients_of_one_rank(point)
        try:
            return call()
        finally:
            point.gradients = bound

    return Part(point, call_on_one_rank if point.gradients.on_demand else call, world_of(mesh), data)


class LineEvaluation(NamedTuple):
    """A function at one point."""

    value: float  # over all ranks
    own: float  # this rank's term of the value
    step: np.ndarray  # the point less x, as it was rounded
    gradient: np.ndarray  # this rank's terms, zero where those of another rank count


class Line:
    """Values of a function at the points x + h d, and products with its gradient there. Methods are collective.

    `direction` is this rank's elements of d; None for uniform random numbers from `seed`, each tensor's as large as its
    largest element. `x`, `d` and another random direction `w` are this rank's elements, in float64. Raises ValueError
    if the direction has another size, or is 0 or not finite.
    """

    def __init__(self, part: Part, direction: Any = None, seed: int = 0) -> None:
        self._part, point = part, part.point
        self.dtype: np.dtype = point.dtype
        self._start = arrays.to_host(point.flat).copy()
        self.x = np.array(self._start, np.float64)
        self.d, self.w, self._counted = np.zeros((3, point.size))
        own = [slice(piece.start, piece.start + piece.size) for piece in point.pieces]
        scales = np.array([*(np.abs(self.x[each]).max(initial=0.0) for each in own), 0.0])
        scales = part.world.all_reduce(scales, op="max", label="control")
        scales[~np.isfinite(scales) | (scales == 0)] = 1.0
        for spec, piece, each, scale in zip(point.local, point.pieces, own, scales[:-1], strict=True):
            self._counted[each] = part.counts and (spec.partial or point.place.is_primary(spec))
            for vector, name in ((self.d, "direction"), (self.w, "other direction")):
                vector[each] = scale * uniform_in_box(seed, f"{name} {spec.name}", spec.shape, piece.box).reshape(-1)
        with raised_on_all(part.world):
            if direction is not None:
                given = direction.flat if isinstance(direction, FlatParameters) else direction
                try:
                    self.d = np.array(arrays.to_host(given), np.float64).reshape(-1)
                except (TypeError, ValueError):
                    raise TypeError(f"direction={shown(direction)} must be an array of numbers, like x") from None
                size = point.size if part.given_size is None else part.given_size
                if self.d.size != size or not np.isfinite(self.d).all():
                    raise ValueError(f"direction must have {size} finite elements, like x; it has {self.d.size}")
        if direction is not None:
            self.d = part.arranged(self.d)
        if not self.dots((np.abs(self.d), np.ones(point.size)))[0]:
            raise ValueError("direction is 0: nothing changes along it; leave it out for a random one")

    @property
    def ranks_of_values(self) -> tuple[int, ...]:
        """The numbers of ranks, of one group and in all, over which values are summed; none if they are not."""
        part = self._part
        return () if isinstance(part.values, OneRank) else (part.point.place.tensor_size, part.values.size)

    def at(self, h: float) -> LineEvaluation:
        """The function at x + h d, rounded to the dtype of x; the same numbers on all ranks.

        Raises on all ranks if the function of any rank raises, or returns something else than value and gradient.
        """
        part, point = self._part, self._part.point
        moved = (self.x + h * self.d).astype(self.dtype)
        with raised_on_all(part.world):
            try:
                arrays.copy_to_device(moved, point.flat)
                value, gradient = part.call()
                value = returned(value)
            finally:
                arrays.copy_to_device(self._start, point.flat)
        gradient = part.arranged(gradient)
        total = part.values.all_reduce(np.array([value if part.value_counts else 0.0]), label="control")
        return LineEvaluation(float(total[0]), value, moved - self.x, gradient * self._counted)

    def product(self, direction: np.ndarray) -> np.ndarray:
        """This rank's terms of the Hessian at x times a direction."""
        part = self._part
        with raised_on_all(part.world):
            assert part.product is not None
            product = part.product(np.array(direction, self.dtype, like=part.point.like))
        return part.arranged(product) * self._counted

    def dots(self, *pairs: tuple[np.ndarray, np.ndarray]) -> list[float]:
        """Dot products of this rank's terms with vectors, summed over ranks."""
        own = np.array([np.dot(one, other) for one, other in pairs])
        found: list[float] = self._part.world.all_reduce(own, label="control").tolist()
        return found

    def spread(self, own: float) -> float:
        """The difference of the largest and the smallest number of a rank."""
        return float(self._part.world.all_reduce(np.array([own, -own]), op="max", label="control").sum())


# The check of a gradient, by up to three Taylor tests.

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
            lines.append(f"{'h':>9}  {test.name}")
            h, left = np.array(test.steps), np.array(test.remainders)
            with np.errstate(divide="ignore", invalid="ignore"):
                orders = np.append(np.nan, np.diff(np.log(left)) / np.diff(np.log(h)))
            for step, remainder, order, used in zip(h, left, orders, test.used, strict=True):
                falls = f"{order:5.2f}" if np.isfinite(order) else " " * 5
                lines.append(f"{step:9.2e}  {remainder:9.2e}  {falls}{' *' * used}")
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
        ``function(x) -> (value, gradient)``, as `minimize` takes it; or a problem, whose mean loss is checked.  Of a
        function with `L1` terms the rest is checked, and the verdict says so.
    x : array, FlatParameters, Partition, or dict, list or tuple of arrays or of Partitions, optional
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
    OSError
        On all ranks, if the file of `plot` cannot be written.  ModuleNotFoundError if matplotlib is not installed
        (``mpishard[cli]``), which is a RuntimeError on the other ranks.

    Examples
    --------
    >>> import mpishard
    >>> bool(mpishard.check_gradient(lambda x: ((x**4).sum(), 4 * x**3), [1.0, 2.0], disp=False))
    True
    """
    with opening(mesh, "check_gradient") as same:
        flag("disp", disp)
        if plot is not None:
            path("plot", plot)
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
    if terms := getattr(getattr(function, TERMS, None), "nonsmooth", ()):
        kind = type(terms[0]).__name__
        result = replace(result, verdict=f"{result.verdict}; without the {kind} terms, which minimize alone takes")
    if disp and part.world.rank == 0:
        size = sum(spec.size for spec in part.point.specs)
        terminal.show(f"check of the gradient of {size} elements, {line.dtype}\n{result}")
    with raised_on_all(part.world):
        if plot is not None and part.world.rank == 0:
            draw_remainders(result.tests, plot)
    return result


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
    h = np.array(row)
    points = [line.at(step) for step in row]
    values = np.array([each.value for each in points])
    rises = np.array(line.dots(*((here.gradient, each.step) for each in points)))
    sizes = np.array(line.dots(*((np.abs(here.gradient), np.abs(each.step)) for each in points)))
    (derivative,) = line.dots((here.gradient, line.d))
    precision = _precision(line, np.append(values, here.value))
    noise = _noise(line, here, precision)
    left, rounding = values - here.value - rises, noise + precision * sizes
    tests = [taylor_test("|f(x + h d) - f(x) - h g'd|", 2, h, left, rises, rounding, precision)]
    if with_product:
        product = line.product(line.d)
        bent, slope, size = line.dots((product, line.d), (product, line.w), (np.abs(here.gradient), np.abs(line.w)))
        slopes = np.array(line.dots(*((each.gradient - here.gradient, line.w) for each in points)))
        name, second, size = "|f(x + h d) - f(x) - h g'd - h^2/2 d'Hd|", 0.5 * h * h * bent, precision * size
        curved = taylor_test(name, 3, h, left - second, second, rounding, precision)
        name, linear = "|w'(g(x + h d) - g(x) - h Hd)|", h * slope
        turned = taylor_test(name, 2, h, slopes - linear, linear, 0 * h + size, precision)
        if turned.passed and sum(curved.used) < FITTED:  # rounding of the values hides what those of the gradient show
            curved = replace(curved, passed=True)
        tests += [curved, turned]
    quotient = float("nan")
    if not tests[0].passed:
        quotient, verdict = _diagnosis(line, here, tests[0], derivative, values, noise, precision)
    elif wrong_tests := [test for test in tests if not test.passed]:
        words = " and ".join(f"{test.name} falls like h^{test.order:.2f}" for test in wrong_tests)
        verdict = f"the gradient passes, but the Hessian product does not: {words}"
        other = line.product(line.w)
        one, two, size = line.dots((line.w, product), (line.d, other), (np.abs(line.w), np.abs(product)))
        if abs(one - two) > precision ** (1 / 3) * size:
            verdict += f"; it is not symmetric: w'(H d) = {one:.6g}, d'(H w) = {two:.6g}"
    else:
        verdict = f"the gradient is right: {', '.join(map(_praise, tests))}"
    passed = all(test.passed for test in tests)
    return GradientCheck(passed, verdict, here.value, derivative, quotient, tuple(tests))


def _precision(line: Line, values: np.ndarray) -> float:
    """The precision in which the values were computed: that of x, or float32 if they all are such numbers."""
    finite = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        rounded = bool((finite.astype(np.float32) == finite).all()) and len(np.unique(finite)) > 2
    return float(np.finfo(np.float32 if rounded else line.dtype).eps)


def _noise(line: Line, here: LineEvaluation, precision: float) -> float:
    """Rounding errors of the values: second differences of tiny steps, and of the point itself."""
    with np.errstate(over="ignore"):
        is_single = float(np.float32(here.value)) == here.value
    # A sum in float64 of numbers in float32 has smaller errors than float32: those that are seen.
    least = precision if is_single else float(np.finfo(np.float64).eps)
    found = [least * abs(here.value), abs(line.at(0.0).value - here.value)]
    for tiny in _TINY:
        up, down = (line.at(sign * tiny * float(np.finfo(line.dtype).eps)) for sign in (1, -1))
        (drift,) = line.dots((here.gradient, up.step + down.step))
        found.append(abs(up.value + down.value - 2 * here.value - drift) / 2)  # four values, and not two
    noise = max(each for each in found if np.isfinite(each))
    if precision > np.finfo(line.dtype).eps:  # the function rounds x
        change = np.abs(here.gradient * line.x)
        noise += precision * line.dots((change, change))[0] ** 0.5
    return noise


def _praise(test: TaylorTest) -> str:
    """What a test that has passed shows."""
    if test.order >= test.expected - 0.5:
        return f"{test.name} falls like h^{test.order:.2f}"
    return f"{test.name} is as small as the precision shows"


def _diagnosis(
    line: Line,
    here: LineEvaluation,
    test: TaylorTest,
    derivative: float,
    values: np.ndarray,
    noise: float,
    precision: float,
) -> tuple[float, str]:
    """A central quotient, and the probable error. Collective."""
    used = np.flatnonzero(test.used)
    if len(used) < 3 and noise < precision**0.5 * abs(here.value):
        return float("nan"), (
            f"the check cannot tell: rounding errors of the value, about {noise:.1e} of {here.value:.6g}, hide the "
            "remainder at almost all steps; give larger steps, or compute the value in float64"
        )
    if not len(used):
        return float("nan"), (
            f"the value is {here.value:.6g}, and its remainder does not fall below {min(test.remainders):.1e}, however "
            "small the step; is there a jump, a random number or a loose tolerance in the function?"
        )
    width = precision ** (1 / 3)  # where errors of a central difference are smallest
    quotient = (line.at(width).value - line.at(-width).value) / (2 * width)
    steps = np.array(test.steps)[used]
    ahead = values[used] - here.value
    back = np.array([line.at(-h).value for h in steps]) - here.value
    bends = np.abs(ahead + back)
    if (bends > 30 * noise).all() and bends[-1] * steps[0] > 0.5 * bends[0] * steps[-1]:  # not smooth: falls like h
        left, right = sorted([ahead[-1] / steps[-1], -back[-1] / steps[-1]])
        return quotient, (
            f"the function has a kink at x: along the direction its slopes on both sides are {left:.6g} and "
            f"{right:.6g}, and the gradient says {derivative:.6g}; take another point"
        )
    times = f", {derivative / quotient:.6g} times as much" if quotient else ""
    for ranks in line.ranks_of_values:
        if ranks > 1 and quotient and abs(ranks * derivative / quotient - 1) < 1e-3:
            times += (
                f", as if {ranks} ranks had the value of all, and not their parts of it: return these, or leave "
                "reduction='sum' out"
            )
            break
    return quotient, (
        f"the gradient is wrong: along the direction the slope of the function is {quotient:.6g}, and that of the "
        f"gradient {derivative:.6g}{times}; the remainder falls like h^{test.order:.2f}"
    )
