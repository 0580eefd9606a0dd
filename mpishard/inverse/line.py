"""A function along a line through a point: its values, and products with its gradient, summed over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arguments import returned, shown
from mpishard.backend import array as arrays
from mpishard.backend.random import uniform_in_box
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.data.sampling import share
from mpishard.inverse.unknowns import Unknowns
from mpishard.parameters.flat import FlatParameters
from mpishard.training.problem import OptimizationProblem

Array = Any


@dataclass(frozen=True)
class Part:
    """What one rank has of a function.

    Parameters
    ----------
    point : FlatParameters
        The elements of this rank; evaluations are made at its values.
    call : callable
        ``call() -> (value, gradient)`` at the values of `point`: terms of sums over ranks.
    product : callable or None
        ``product(direction)`` is this rank's term of the Hessian times a direction.
    world : Axis
        The ranks whose terms of products with vectors are summed.
    values : Axis
        The ranks whose terms of the value are summed.
    counts, value_counts : bool
        Whether the vectors of this rank count, and its value; False where other ranks have the same.
    """

    point: FlatParameters
    call: Callable[[], tuple[Any, Any]]
    product: Callable[[np.ndarray], Any] | None
    world: Axis
    values: Axis
    counts: bool = True
    value_counts: bool = True

    @classmethod
    def of_function(
        cls, function: Callable[..., Any], jac: Any, hessp: Any, x: Any, mesh: Mesh | None, summed: bool
    ) -> Part:
        """The part of a function with SciPy's signature.  Not collective."""
        unknowns = Unknowns(x)
        point = FlatParameters.over(unknowns.flat) if unknowns.parameters is None else unknowns.parameters
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
            return unknowns.vector("the Hessian product", hessp(given(), vector))

        axis = Axis.single() if mesh is None else mesh.world
        first = mesh is None or mesh.data.rank == 0
        return cls(point, call, product if hessp else None, axis, axis, summed or first, summed or axis.rank == 0)

    @classmethod
    def of_problem(cls, problem: OptimizationProblem[Any], mesh: Mesh | None, samples: Any) -> Part:
        """The part of a problem's mean loss over samples, by default those of one batch.  Not collective."""
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
    """Values of a function at the points x + h d, and products with its gradient there.  Methods are collective.

    Parameters
    ----------
    part : Part
    direction : array or FlatParameters, optional
        d, this rank's elements; default: uniform random numbers, each tensor's as large as its largest element.
    seed : int
        Of the random numbers.

    Attributes
    ----------
    x, d, w : 1-D array of float64
        The point, the direction, and another random direction; this rank's elements.
    dtype : dtype
        Of the point.
    size : int
        Elements over all ranks.

    Raises
    ------
    ValueError
        If the direction has another size, or is 0 or not finite.
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
            self._counted[own] = part.counts and (spec.partial or point.place.counts(spec))
            for vector, name in ((self.d, "direction"), (self.w, "other direction")):
                numbers = uniform_in_box(seed, f"{name} {spec.name}", spec.shape, piece.box)
                vector[own] = numbers.reshape(-1) * (scale if np.isfinite(scale) and scale else 1.0)
        problem: Exception | None = None
        if direction is not None:
            given = direction.flat if isinstance(direction, FlatParameters) else direction
            try:
                self.d = np.array(arrays.to_host(given), np.float64).reshape(-1)
            except (TypeError, ValueError):
                problem = TypeError(f"direction={shown(direction)} must be an array of numbers, like x")
        if problem is None and (self.d.size != point.size or not np.isfinite(self.d).all()):
            problem = ValueError(f"direction must have {point.size} finite elements, like x; it has {self.d.size}")
        part.world.raise_if_any(problem)
        if not self._sum(float(np.abs(self.d).sum()))[0]:
            raise ValueError("direction is 0: nothing changes along it; leave it out for a random one")

    def at(self, h: float) -> Evaluation:
        """The function at x + h d, rounded to the dtype of x.

        Parameters
        ----------
        h : float
            0 for the point itself.

        Returns
        -------
        Evaluation
            The same numbers on all ranks.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if the function of any rank raises these or returns something else than value and gradient.
        """
        part, problem = self._part, None
        moved = (self.x + h * self.d).astype(self.dtype)
        value, gradient = float("nan"), np.zeros(self.x.size)
        try:
            set_values(part.point.flat, moved)
            value, gradient = part.call()
            value, gradient = returned(value), np.array(arrays.to_host(gradient), np.float64)
        except Exception as error:  # of the user's function: all ranks must learn of it
            problem = error
        finally:
            set_values(part.point.flat, self._start)
        part.world.raise_if_any(problem)
        total = part.values.all_reduce(np.array([value if part.value_counts else 0.0]), label="control")
        return Evaluation(float(total[0]), value, moved - self.x, gradient * self._counted)

    def product(self, direction: np.ndarray) -> np.ndarray:
        """This rank's terms of the Hessian at x times a direction."""
        problem, product = None, np.zeros(self.x.size)
        try:
            assert self._part.product is not None
            product = np.array(arrays.to_host(self._part.product(direction)), np.float64)
        except Exception as error:
            problem = error
        self._part.world.raise_if_any(problem)
        return product * self._counted

    def dots(self, *pairs: tuple[np.ndarray, np.ndarray]) -> list[float]:
        """Dot products of this rank's terms with vectors, summed over ranks."""
        return self._sum(*(float(np.dot(one, other)) for one, other in pairs))

    def spread(self, own: float) -> float:
        """How much more the number of one rank is than that of another."""
        return float(self._part.world.all_reduce(np.array([own, -own]), op="max", label="control").sum())

    def _sum(self, *numbers: float) -> list[float]:
        found: list[float] = self._part.world.all_reduce(np.array(numbers), label="control").tolist()
        return found


@dataclass(frozen=True)
class Evaluation:
    """A function at one point.

    Parameters
    ----------
    value : float
        Over all ranks.
    own : float
        This rank's term of it.
    step : 1-D array
        The point less x, as it was rounded.
    gradient : 1-D array
        This rank's terms, zero where those of another rank count.
    """

    value: float
    own: float
    step: np.ndarray
    gradient: np.ndarray


def set_values(target: Array, values: np.ndarray) -> None:
    """Set the values of an array on the host or a device."""
    if arrays.is_device(target):
        arrays.copy_to_device(values, target)
    else:
        np.copyto(target, values)
