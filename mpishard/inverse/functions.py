"""The functions of the user, called as SciPy calls them on each rank."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishard.arguments import returned, shown
from mpishard.backend import array as arrays
from mpishard.backend.sparse_rows import product_with
from mpishard.comm.errors import OneRank, known_to_all, on_any, raised_on_all
from mpishard.inverse.result import OptimizeResult
from mpishard.inverse.trees import is_tree, tree_of
from mpishard.inverse.unknowns import Unknowns, copy_of_point, has_names

if TYPE_CHECKING:
    from mpishard.comm.axis import Axis, ModelParallelGroup
    from mpishard.minimizers.method import Minimizer

Array = Any
_DIGITS = 52  # of float64
_DIFFERENCES = "2-point", "3-point"  # the finite differences of `minimize`
TERMS = "mpishard_terms"  # the attribute of a function to which `regularized` has added terms


class AddedTerms(NamedTuple):
    """What `regularized` knows of such a function."""

    reduction: str | None
    smooth: Callable[..., Any]  # the function with those terms that have a gradient
    added: tuple[Any, ...]  # these terms
    nonsmooth: tuple[Any, ...]  # the terms without a gradient, which are the method's
    smooth_of_shape: Callable[[tuple[int, ...]], Callable[..., Any]]  # `smooth` for flat points of such an array


@known_to_all
class EvaluationFailed(Exception):
    """Raised by a function that has no value at a point, as where its solver diverges: the step is shortened then.

    Any rank may raise it; for all ranks the point then has an infinite value.  At the start it is an error, and so it
    is in a Hessian product.  ``options={"retries": n}`` of `minimize` first tries the same point again, up to n times.
    """


def failure_in_words(minimizer: Minimizer, reason: str, rank: int | None = None) -> str:
    """What a result says of the last trial whose evaluation has failed; `rank` is where, if there are several."""
    where = "" if rank is None else f" on rank {rank}"
    return (
        f"an evaluation failed{where}: {reason or EvaluationFailed.__name__}; the longest step of its line search that "
        f"had a value until then was {minimizer.longest_finite_step:.3g}"
    )


class Functions:
    """A user's function, its gradient and its Hessian products.

    ``fun(x, *args)`` returns value and gradient if `jac` is True, else ``jac(x, *args)`` is the gradient;
    ``hessp(x, direction, *args)`` is the Hessian at x times a direction, ``hess(x, *args)`` the Hessian itself. `args`
    that are no tuple are one argument. With `may_differ` `jac` may be the name of a finite difference, `differences`.
    Raises TypeError if one is not callable, ValueError without a gradient.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        jac: bool | str | Callable[..., Any],
        hessp: Callable[..., Any] | None,
        args: Any,
        hess: Callable[..., Any] | None = None,
        *,
        may_differ: bool = False,
    ) -> None:
        for name, function in (("fun", fun), ("hessp", hessp), ("hess", hess)):
            if not (callable(function) or (name != "fun" and function is None)):
                more = "; there are no finite differences and no updates of a Hessian" * (name == "hess")
                raise TypeError(f"{name}={shown(function)} must be a function{more}")
        self.differences = jac if may_differ and isinstance(jac, str) and jac in _DIFFERENCES else None
        if not callable(jac) and jac is not True and self.differences is None:
            more = f", or one of {', '.join(map(repr, _DIFFERENCES))} for finite differences" * may_differ
            raise ValueError(
                f"jac={shown(jac)}: a gradient is needed; jac=True if fun returns (value, gradient), or jac=function"
                f"{more}"
            )
        self._terms: AddedTerms | None = getattr(fun, TERMS, None)
        self._fun = fun if self._terms is None else self._terms.smooth
        self._jac = jac
        self._hessp = hessp
        self._args = args if isinstance(args, tuple) else (args,)
        if self._terms is not None and self._terms.added and self._args:
            raise ValueError(
                "args= are for a function without terms, and fun is one of regularized: bind them to its function, "
                "regularized(lambda x: fun(x, *args), terms)"
            )
        if self._terms is not None and self._terms.added and callable(jac):
            raise ValueError(
                "jac=function needs a fun that returns the value, and regularized returns (value, gradient): let its "
                "function return both, and give jac=True"
            )
        self._hess = None if hess is None else Hessian(hess, self._args)
        # Of ranks that share the unknowns, whose functions may wait for each other: after `fun` all must agree.
        self.meeting: Any = None

    @property
    def has_terms(self) -> bool:
        """Return True if the function is one of `regularized`."""
        return self._terms is not None

    @property
    def has_weights(self) -> bool:
        """Return True if terms have been added that have a weight, which a prior has not."""
        terms = () if self._terms is None else (*self._terms.added, *self._terms.nonsmooth)
        return any(hasattr(term, "weight") for term in terms)

    @property
    def nonsmooth(self) -> tuple[Any, ...]:
        """The terms of the function without a gradient, which the calls do without."""
        return () if self._terms is None else self._terms.nonsmooth

    def check_terms(self, reduction: str | None) -> None:
        """Raise ValueError if terms of `regularized` would not count once with this reduction."""
        given = reduction if self._terms is None else self._terms.reduction
        if given != reduction:
            raise ValueError(
                f"regularized has reduction={given!r}, and this call reduction={reduction!r}, so that the terms would "
                "not count once; give both the same mesh= and reduction="
            )

    def take_shape(self, unknowns: Unknowns) -> None:
        """Let the terms of `regularized` know the shape of the unknowns.  Collective over the meshes of terms."""
        if self._terms is not None and unknowns.hidden_shape:
            self._fun = self._terms.smooth_of_shape(unknowns.hidden_shape)

    def value(self, x: Any) -> float:
        """The value at a point, of a function that returns it alone."""
        return number_of(self._fun(x, *self._args))

    def value_and_gradient(self, x: Any, *samples: Any) -> tuple[float, Any]:
        """The value and the gradient at a point, the latter as the user gave it.

        `samples` are those whose sum is wanted, if there are any. Raises TypeError if `fun` returned something else.
        """
        if callable(self._jac):
            with raised_on_all(self.meeting):  # either may change the point that it is given
                value = number_of(self._fun(copy_of_point(x), *samples, *self._args))
            return value, self._jac(x, *samples, *self._args)
        value, gradient = pair_of(
            self._fun(x, *samples, *self._args),
            "as jac=True says",
            ".  If it returns the value alone, give jac=function, or to minimize jac='2-point' for finite differences",
        )
        return number_of(value), gradient

    def product(self, x: Any, direction: Any, *samples: Any) -> Any:
        """The Hessian at a point times a direction, as the user gave it; ValueError without `hessp` and `hess`."""
        if self._hess is not None:
            return self._hess.product(x, direction, *samples)
        if self._hessp is None:
            raise ValueError(
                "this method needs products with the Hessian: give hessp=function(x, direction, *args), or "
                "hess=function(x, *args), which returns the matrix"
            )
        return self._hessp(x, direction, *samples, *self._args)


class Hessian:
    """A function that returns the Hessian: an array, a sparse matrix or an operator, which is kept for one point.

    Rows and columns are in the order of the flat array of the unknowns.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self._point = b""
        self._kept: dict[bytes, Any] = {}  # by samples

    def product(self, x: Any, direction: Any, *samples: Any) -> Any:
        tree = tree_of(x)
        if tree is not None and tree.complex_leaf is not None:
            raise ValueError("hess= is for real numbers, and x0 is complex; give hessp=function(x, direction, *args)")
        flat = x.flat if has_names(x) else x if tree is None else tree.flat
        point = arrays.to_host(flat).tobytes()
        if point != self._point:
            self._point, self._kept = point, {}
        which = b"".join(each.tobytes() for each in samples)
        if which not in self._kept:
            self._kept[which] = self._matrix(self._function(x, *samples, *self._args), flat)
        vector = direction if tree is None else tree.flattened("the direction", direction)
        found = self._kept[which](vector)
        return found if tree is None else tree.of(found.astype(tree.dtype, copy=False))

    @staticmethod
    def _matrix(found: Any, flat: Array) -> Callable[[Array], Array]:
        """The operator that multiplies a vector by a result of the user's function."""
        if not (hasattr(found, "tocsr") or hasattr(found, "matvec")):
            try:
                found = np.asarray(found, like=flat)
                numeric = found.dtype.kind in "biuf"
            except (TypeError, ValueError):
                numeric = False
            if not numeric:
                raise TypeError(f"hess must return a matrix, a sparse matrix or an operator, got {shown(found)}")
            found = found if found.ndim > 1 else found.reshape(1, -1)
        shape = tuple(getattr(found, "shape", ()))
        if shape != (flat.size, flat.size):
            raise ValueError(
                f"hess returned the shape {shape}, but x0 has {flat.size} elements; return a square matrix"
            )
        if hasattr(found, "matvec") and not hasattr(found, "tocsr"):
            return lambda vector: arrays.as_array(found.matvec(vector)).reshape(-1)
        return product_with(found.copy(), flat)  # the user may write the next one into the same array


def digits_of(vector: Any) -> int:
    """The binary digits of the floats of a vector as a user gave it, the fewest where it has many arrays."""
    if isinstance(vector, Mapping) or is_tree(vector):
        parts = vector.values() if isinstance(vector, Mapping) else vector
        return min(map(digits_of, parts), default=_DIGITS)
    try:
        dtype = arrays.as_array(vector).dtype
    except (TypeError, ValueError, RuntimeError):  # the error of `Unknowns.vector` says more
        return _DIGITS
    return min(_DIGITS, int(np.finfo(dtype).nmant)) if dtype.kind in "fc" else _DIGITS


def sum_of_values(values: Any) -> float:
    """The sum of numbers, rounded once, so that their order does not matter; not finite if one is not."""
    numbers = np.asarray(values, np.float64)
    if not np.isfinite(numbers).all():
        return math.nan
    try:
        return math.fsum(numbers.tolist())
    except OverflowError:
        return math.inf


def number_of(value: Any) -> float:
    """The value of a function, a number or an array of one element, as a float.

    Raises ValueError, as SciPy, if it is an array of another size, and TypeError if it is anything else.
    """
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(())[()]
    elif isinstance(value, np.ndarray):
        raise ValueError(f"fun must return its value as one number, got an array of the shape {value.shape}")
    try:
        return returned(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"fun must return its value as one real number, got {shown(value)}") from None


def pair_of(found: Any, why: str, way_out: str = "") -> tuple[Any, Any]:
    """Value and gradient as `fun` returned them; TypeError with `why` it must, if it returned something else."""
    if not (isinstance(found, tuple | list) and len(found) == 2):
        raise TypeError(f"fun must return (value, gradient), {why}; it returned a {type(found).__name__}{way_out}")
    return found[0], found[1]


class Callback:
    """Calls a callback as SciPy does: ``callback(xk)``, or ``callback(intermediate_result=...)``.

    The name of its only parameter decides. Raises TypeError if it is neither callable nor None.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        if not (function is None or callable(function)):
            raise TypeError(f"callback={shown(function)} must be a function")
        self._function = function
        self._by_keyword = False
        if function is not None:
            try:
                self._by_keyword = set(inspect.signature(function).parameters) == {"intermediate_result"}
            except (TypeError, ValueError):  # of some functions written in C
                self._by_keyword = False

    @property
    def is_given(self) -> bool:
        return self._function is not None

    def __call__(self, make: Callable[[], OptimizeResult]) -> bool:
        """Call it after an iteration; return True to stop, after True or StopIteration.

        `make` returns the intermediate result, with a copy of the iterate.
        """
        if self._function is None:
            return False
        intermediate = make()
        try:
            if self._by_keyword:
                answer = self._function(intermediate_result=intermediate)
            else:
                answer = self._function(intermediate.x)
        except StopIteration:
            return True
        return isinstance(answer, bool | np.bool) and bool(answer)


# The ranks that call them.


def world_of(mesh: Any) -> Axis | OneRank:
    """The ranks that call together, all of the mesh or this one alone. Raises TypeError if `mesh` is not a Mesh."""
    if mesh is None:
        return OneRank()
    from mpishard.comm.mesh import checked_mesh  # with MPI: only for those who have a mesh

    return checked_mesh(mesh).world


def opening(mesh: Any, call: str) -> AbstractContextManager[dict[str, Any]]:
    """The beginning of a public call on a mesh, see `mpishard.comm.agreement.opening`; None: this process is alone."""
    world = world_of(mesh)
    if isinstance(world, OneRank):
        return nullcontext({})
    from mpishard.comm import agreement  # with MPI

    return agreement.opening(world, call)


class Attempt(NamedTuple):
    """What the last call of a user's function has come to."""

    found: Any  # None after an error
    problem: BaseException | None  # of this rank
    has_failed: bool  # on any of the ranks that call together, as far as they have asked each other


class Attempts:
    """Calls a user's function, and again up to `retries` times where it raises EvaluationFailed.

    The function may be collective over `ranks`, so that all of them call it again where it fails on one. With `agrees`,
    or with retries, each call is collective over them; `retries` are the same on all.
    """

    def __init__(self, ranks: Axis | ModelParallelGroup | OneRank, retries: int, agrees: bool = False) -> None:
        self._ranks, self._agrees = ranks, agrees or retries > 0
        self.retries = retries

    def __call__(self, call: Callable[[], Any]) -> Attempt:
        """The result of the call, which is made anew each time, or its error."""
        for left in range(self.retries, -1, -1):
            found: Any = None
            problem: BaseException | None = None
            try:
                found = call()
            except (Exception, SystemExit) as error:
                problem = error
            worst = 0 if problem is None else 1 if isinstance(problem, EvaluationFailed) else 2
            if self._agrees:
                worst = int(self._ranks.all_reduce(np.array([worst], np.int64), op="max", label="control")[0])
            if worst != 1 or not left:
                break
        return Attempt(found, problem, worst > 0)


_REASONS = "", "seconds", "callback"  # of ranks with several the last one counts


class Watch:
    """The callbacks of all ranks, and the limit on the time: what may stop a minimisation after an iteration.

    Collective, its creation too. `seconds` count from there.
    """

    def __init__(self, world: Axis | OneRank, callback: Callback, seconds: float | None = None) -> None:
        self._world, self._callback, self._seconds = world, callback, seconds
        self._is_needed = on_any(world, callback.is_given or seconds is not None)
        self._began = time.perf_counter()

    def reason_to_stop(self, make: Callable[[], OptimizeResult]) -> str:
        """Call the callback of each rank. Returns "callback" or "seconds" if any rank is to stop for it, else "".

        `make` returns the intermediate result of the iteration.
        """
        if not self._is_needed:
            return ""
        with raised_on_all(self._world):
            stops = self._callback(make)
        is_over = self._seconds is not None and time.perf_counter() - self._began >= self._seconds
        own = np.array([_REASONS.index("callback" if stops else "seconds" if is_over else "")], np.int64)
        return _REASONS[int(self._world.all_reduce(own, op="max", label="control")[0])]
