"""The dot-product test: is an operator the adjoint of another?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arguments import flag, integer, number, shown
from mpishard.backend import array as arrays
from mpishard.backend.random import uniform_in_box
from mpishard.comm.errors import raised_on_all
from mpishard.inverse.functions import opening, world_of
from mpishard.inverse.unknowns import is_part
from mpishard.io import terminal
from mpishard.layout.boxes import whole_box

if TYPE_CHECKING:
    from mpishard.comm.mesh import Mesh

Array = Any


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
    x, y : array or Partition
        What shapes and dtypes they take; the values do not matter.  float32 or float64.  With a `Partition` they take
        arrays of this rank's part of a field, and each group of the mesh has a field of its own here.
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
        On all ranks, if an argument of any rank is invalid, or arguments differ between ranks; or if a function of any
        rank raises these, or returns another shape than the other one takes, or complex numbers.

    Examples
    --------
    >>> import numpy as np, mpishard
    >>> A = np.arange(6.0).reshape(2, 3)
    >>> bool(mpishard.check_adjoint(lambda x: A @ x, lambda y: A.T @ y, np.zeros(3), np.zeros(2), disp=False))
    True
    """
    axis = world_of(mesh)
    with opening(mesh, "check_adjoint") as same:
        flag("disp", disp)
        for name, apply in (("forward", forward), ("adjoint", adjoint)):
            if not callable(apply):
                raise TypeError(f"{name}={shown(apply)} must be a function, such as lambda x: A @ x")
        vectors = [
            _random(like, integer("seed", seed), f"{name} of rank {axis.rank}") for like, name in ((x, "x"), (y, "y"))
        ]
        is_single = any(vector.dtype == np.float32 for vector in vectors)
        limit = None if tolerance is None else number("tolerance", tolerance, least=0)
        same |= {"seed": seed, "tolerance": limit}
    results: list[np.ndarray] = []
    with raised_on_all(axis):
        for name, apply, vector, other in (("forward", forward, *vectors), ("adjoint", adjoint, *vectors[::-1])):
            found = apply(vector.copy())
            _check_real(f"what {name} gives", found)
            if np.shape(found) != other.shape:
                raise ValueError(f"{name} gives shape {np.shape(found)}, but the other one takes {other.shape}")
            is_single = is_single or getattr(found, "dtype", None) == np.float32
            results.append(_flat(found))
    one, other = (_flat(vector) for vector in vectors)
    top = float(abs(results[0]).max(initial=0.0))
    (top,) = axis.all_reduce(np.array([top if math.isfinite(top) else math.inf]), op="max", label="control").tolist()
    exponent = math.frexp(top)[1] if math.isfinite(top) else 0  # of 0 is 0
    results = [np.ldexp(each, -exponent) for each in results]  # squares of large and small numbers are none
    sums = [results[0] @ other, one @ results[1], results[0] @ results[0], other @ other, is_single]
    there, back, square, other_square, singles = axis.all_reduce(np.array(sums), label="control").tolist()
    limit = (1e-4 if singles else 1e-12) if limit is None else limit
    size = (square * other_square) ** 0.5
    error = abs(there - back) / size if size else float(there != back)
    there, back = (float(np.ldexp(each, exponent)) for each in (there, back))
    check = AdjointCheck(bool(error <= limit), float(error), there, back)
    if disp and axis.rank == 0:
        terminal.show(str(check))
    return check


def _random(like: Any, seed: int, name: str) -> Array:
    """Random numbers of the shape, dtype and device of an array; dtypes other than float32 become float64."""
    like = like.local if is_part(like) else like
    _check_real(name, like)
    shape = np.shape(like)
    dtype = np.float32 if getattr(like, "dtype", None) == np.float32 else np.float64
    values = uniform_in_box(seed, name, shape, whole_box(shape)).astype(dtype)
    return np.asarray(values, like=like) if arrays.is_array(like) else values


def _check_real(name: str, values: Any) -> None:
    """Raise TypeError for complex numbers, of which only the real parts would be compared."""
    if np.iscomplexobj(values):
        raise TypeError(
            f"{name} is complex: let both functions take and give pairs of real numbers, as x.view(float) makes them"
        )


def _flat(values: Array) -> np.ndarray:
    """An array as a float64 vector on the host."""
    return np.array(arrays.to_host(values), np.float64).reshape(-1)  # the next function may write into the same array
