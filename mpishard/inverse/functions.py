"""The functions of the user, called as SciPy calls them on each rank, and the unknowns that they get."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mpishard.arguments import returned, shown
from mpishard.backend import array as arrays
from mpishard.backend.exact_gram import SparseRows
from mpishard.comm.errors import OneRank, known_to_all, raised_on_all
from mpishard.inverse.result import OptimizeResult, pair_of_bounds
from mpishard.inverse.trees import CONVENTION, Tree, is_tree, tree_of
from mpishard.layout.tensors import WHOLE, ModelParallelRank, ParameterSpec
from mpishard.minimizers.elements import OfThisRank, OperatorOfThisRank, element_name
from mpishard.minimizers.method import RieszMap

if TYPE_CHECKING:
    from mpishard.comm.axis import Axis
    from mpishard.minimizers.method import Minimizer

Array = Any
_DIGITS = 52  # of float64
_DIFFERENCES = "2-point", "3-point"  # the finite differences of `minimize`
TERMS = "mpishard_terms"  # the attribute of a function to which `regularized` adds terms: its reduction


@known_to_all
class EvaluationFailed(Exception):
    """Raised by a function that has no value at a point, as where its solver diverges: the step is shortened then.

    Any rank may raise it; for all ranks the point then has an infinite value.  At the start it is an error, and so it
    is in a Hessian product.  ``options={"retries": n}`` of `minimize` first tries the same point again, up to n times.
    """


def failure_in_words(minimizer: Minimizer, reason: str, rank: int | None = None) -> str:
    """What a result says of a trial whose evaluation has failed, the last one, on this rank of several."""
    where = "" if rank is None else f" on rank {rank}"
    return (
        f"an evaluation failed{where}: {reason or EvaluationFailed.__name__}; the longest step of its line search that "
        f"had a value was {minimizer.longest_finite_step:.3g}"
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
        if hess is not None and hessp is not None:
            raise ValueError("hess and hessp are both the Hessian; give one of them")
        self.differences = jac if may_differ and isinstance(jac, str) and jac in _DIFFERENCES else None
        if not callable(jac) and jac is not True and self.differences is None:
            more = f", or one of {', '.join(map(repr, _DIFFERENCES))} for finite differences" * may_differ
            raise ValueError(
                f"jac={shown(jac)}: a gradient is needed; jac=True if fun returns (value, gradient), or jac=function"
                f"{more}"
            )
        self._fun = fun
        self._jac = jac
        self._hessp = hessp
        self._args = args if isinstance(args, tuple) else (args,)
        self._hess = None if hess is None else _Hessian(hess, self._args)

    @property
    def has_terms(self) -> bool:
        """Return True if the function is one of `regularized`."""
        return hasattr(self._fun, TERMS)

    def check_terms(self, reduction: str | None) -> None:
        """Raise ValueError if terms of `regularized` would not count once with this reduction."""
        given = getattr(self._fun, TERMS, reduction)
        if given != reduction:
            raise ValueError(
                f"regularized has reduction={given!r}, and this call reduction={reduction!r}, so that the terms would "
                "not count once; give both the same mesh= and reduction="
            )

    def value(self, x: Any) -> float:
        """The value at a point, of a function that returns it alone."""
        return number_of(self._fun(x, *self._args))

    def value_and_gradient(self, x: Any, *samples: Any) -> tuple[float, Any]:
        """The value and the gradient at a point, the latter as the user gave it.

        `samples` are those whose sum is wanted, if there are any. Raises TypeError if `fun` returned something else.
        """
        # Either may change the point that it is given.
        found = self._fun(copy_of_point(x) if callable(self._jac) else x, *samples, *self._args)
        if callable(self._jac):
            gradient = self._jac(x, *samples, *self._args)
        elif isinstance(found, tuple | list) and len(found) == 2:
            found, gradient = found
        else:
            raise TypeError(
                f"fun must return (value, gradient), as jac=True says; it returned a {type(found).__name__}.  If it "
                "returns the value alone, give jac=function"
            )
        return number_of(found), gradient

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


def copy_of_point(x: Any) -> Any:
    """A copy of a point; parameters with names stay what they are."""
    if has_names(x):
        return x
    tree = tree_of(x)
    return x.copy() if tree is None else tree.of(tree.flat)


class _Hessian:
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
        device = arrays.is_device(flat)
        if not (device or hasattr(found, "tocsr") or hasattr(found, "matvec")):
            try:
                found = np.atleast_2d(np.asarray(found))
                numeric = found.dtype.kind in "biuf"
            except (TypeError, ValueError):
                numeric = False
            if not numeric:
                raise TypeError(f"hess must return a matrix, a sparse matrix or an operator, got {shown(found)}")
        shape = tuple(getattr(found, "shape", ()))
        if shape != (flat.size, flat.size):
            raise ValueError(
                f"hess returned the shape {shape}, but x0 has {flat.size} elements; return a square matrix"
            )
        if device:
            return lambda vector: found @ vector
        if isinstance(found, np.ndarray) or hasattr(found, "tocsr"):
            rows = SparseRows.of(found)  # whose products have the same bits on any number of threads
            return lambda vector: rows.times(np.ascontiguousarray(vector, np.float64))
        return lambda vector: np.asarray(found.matvec(vector)).reshape(-1)


def digits_of(vector: Any) -> int:
    """The binary digits of the floats of a vector as a user gave it, the fewest where it has many arrays."""
    if isinstance(vector, Mapping) or is_tree(vector):
        parts = vector.values() if isinstance(vector, Mapping) else vector
        return min(map(digits_of, parts), default=_DIGITS)
    try:
        dtype = vector.dtype if arrays.is_device(vector) else np.asarray(vector).dtype
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
    """The value of a function, a number or an array of one element, as a float; else TypeError."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(())[()]
    try:
        return returned(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"fun must return its value as one real number, got {shown(value)}") from None


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
    from mpishard.comm.mesh import Mesh  # with MPI: only for those who have a mesh

    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={shown(mesh)} must be mpishard.Mesh()")
    return mesh.world


def opening(mesh: Any, call: str) -> AbstractContextManager[dict[str, Any]]:
    """The beginning of a public call on a mesh, see `mpishard.comm.agreement.opening`; None: this process is alone."""
    world = world_of(mesh)
    if isinstance(world, OneRank):
        return nullcontext({})
    from mpishard.comm import agreement  # with MPI

    return agreement.opening(world, call)


def on_any(world: Axis | OneRank, flag: bool) -> bool:
    """Return True if the flag is set on any rank. Collective."""
    return bool(world.all_reduce(np.array([flag], np.int64), op="max", label="control")[0])


class Together(Protocol):
    """Ranks that call a user's function together: an axis, the ranks of one model, or this rank alone."""

    def all_reduce(self, buffer: Array, *, op: str = "sum", label: str = "") -> Array: ...


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

    def __init__(self, ranks: Together, retries: int, agrees: bool = False) -> None:
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


# The unknowns of a minimisation: one flat array, as the functions of the user see them and give gradients of them.


# This file does without MPI, and cannot ask for the classes.


def has_names(x0: Any) -> bool:
    """Return True for a FlatParameters."""
    return hasattr(x0, "pieces") and hasattr(x0, "layout")


def is_part(x0: Any) -> bool:
    """Return True for a Partition."""
    return hasattr(x0, "rearrangement") and hasattr(x0, "local")


class Unknowns:
    """The unknowns on this rank.

    An array is copied: float32 and float64 stay, other real numbers become float64. So are the arrays of a tree, see
    `Tree`, and what a Partition has on this rank. A FlatParameters is changed in place. Raises TypeError unless `x0`
    has arrays of numbers, ValueError if it is empty, unless it may be, or has NaN or infinite elements.
    """

    def __init__(self, x0: Any, may_be_empty: bool = False) -> None:
        self.parameters: Any = x0 if has_names(x0) else None
        self.tree: Tree | None = None
        self.specs: tuple[ParameterSpec, ...]  # of the whole tensors; an array is one tensor "x"
        self.place = WHOLE  # which part of them this rank has
        # The values of this rank, in the order of the specs.  The user sees them in that of the application, which is
        # another one where fields have ids.
        self.flat: Array
        self._fields: list[Any] = []
        if self.parameters is not None:
            self.specs, self.flat, self.place = x0.specs, x0.flat, x0.place
        elif is_part(x0):
            self.specs, self.place, self._fields = (x0.spec("x"),), x0.place, [x0]
            self.flat = arrays.aligned_copy(x0.local.reshape(-1))
        elif (tree := tree_of(x0)) is not None:
            self.tree = tree
            self.specs, self.flat = tree.specs, tree.flat
            if any(map(is_part, tree.values)):
                self.specs, self._fields = self._specs_of_fields(tree), tree.values
                self.place = self._fields[0].place
        else:
            values = _real_array(x0)
            self.specs = (ParameterSpec("x", values.shape),)
            self.flat = arrays.aligned_copy(values.reshape(-1))
        self._shape: tuple[int, ...] = x0.local.shape if is_part(x0) else (self.size,)
        self.shown: Array = self.flat  # as the user sees them
        self.given_size = self.size  # the number of elements that the user sees on this rank
        if any(field.rearrangement is not None for field in self._fields):
            self.flat = arrays.joined([field.owned for field in self._fields])
        if not (self.total or may_be_empty):
            raise ValueError("x0 is empty: there is nothing to minimize; give it at least one element")
        host = arrays.to_host(self.flat)
        if not np.isfinite(host).all():
            wrong = int(np.flatnonzero(~np.isfinite(host))[0])
            where = f"element {wrong}" if self.tree is None else element_name(wrong, self.tree.specs)
            raise ValueError(f"x0 must be finite, but {where} is {host[wrong]}")

    @staticmethod
    def _specs_of_fields(tree: Tree) -> tuple[ParameterSpec, ...]:
        """The whole tensors of a tree of fields that the application has cut."""
        specs = []
        for leaf, field in zip(tree.leaves, tree.values, strict=True):
            if not is_part(field) or field.place != tree.values[0].place:
                raise ValueError(
                    f"the first array of x0 is a Partition, and that of {leaf.name!r} "
                    f"{'is of other ranks' if is_part(field) else 'is not'}: give a Partition for each, of one comm"
                )
            specs.append(field.spec(leaf.name))
        return tuple(specs)

    @classmethod
    def of(cls, x0: Any) -> Unknowns:
        """The unknowns of a start, which may be unknowns already."""
        return x0 if isinstance(x0, Unknowns) else cls(x0)

    def arranged(self, given: Array) -> Array:
        """A flat vector of the user's in the order of the specs.  Collective over ranks that share fields with ids."""
        if not any(field.rearrangement is not None for field in self._fields):
            return given
        parts, start = [], 0
        for field in self._fields:
            part = given[start : start + field.local.size]
            parts.append(part if field.rearrangement is None else field.rearrangement.by_number(part))
            start += field.local.size
        return arrays.joined(parts)

    def as_given(self, vector: Array) -> Array:
        """The reverse of `arranged`, also collective."""
        if not any(field.rearrangement is not None for field in self._fields):
            return vector
        parts, start = [], 0
        for field in self._fields:
            size = field.local.size if field.rearrangement is None else field.rearrangement.size
            part = vector[start : start + size]
            parts.append(part if field.rearrangement is None else field.rearrangement.as_given(part))
            start += size
        return arrays.joined(parts)

    def show(self) -> None:
        """Let the user see the values of `flat` from now on.  Collective as `arranged`."""
        self.shown = self.as_given(self.flat)

    def take(self, given: Array) -> None:
        """Take these values, a flat vector in the order that the user sees.  Collective as `arranged`."""
        self.flat[...] = self.arranged(given)
        self.show()

    @property
    def size(self) -> int:
        """The number of elements on this rank."""
        return int(self.flat.size)

    @property
    def total(self) -> int:
        """The number of elements over all ranks."""
        return sum(spec.size for spec in self.specs)

    @property
    def is_split(self) -> bool:
        """Return True if these are one rank's part of parameters that are split over ranks."""
        return self.place.tensor_size * self.place.pipeline_size > 1

    @property
    def has_fields(self) -> bool:
        """Return True if these are of Partitions."""
        return bool(self._fields)

    def check_differences(self) -> None:
        """Raise ValueError if these are split over ranks so that finite differences cannot move each element once."""
        if self.is_split and not self._fields and any(spec.is_split or spec.partial for spec in self.specs):
            raise ValueError(
                f"finite differences take a whole x0, or a Partition, but tensors of this one are split over "
                f"tensor={self.place.tensor_size} ranks, or partial: give one of these, or jac=True"
            )

    def held_whole_by(self, place: ModelParallelRank) -> None:
        """Let these whole unknowns be those of a rank at this place, where all ranks of a group have them."""
        if self.parameters is None and not self._fields:
            self.place = place

    @property
    def is_cut_by_application(self) -> bool:
        """Return True if options about elements are for those of this rank, as the parts are the application's."""
        return self.has_fields or any(spec.parts for spec in self.specs)

    @property
    def option_specs(self) -> tuple[ParameterSpec, ...]:
        """The tensors for whose elements options are given: the whole ones, or this rank's parts."""
        if not self.is_cut_by_application:
            return self.specs
        return (ParameterSpec("x", self._shape),) if self.tree is None else self.tree.specs

    def options(self, bounds: Any, **elements: Any) -> dict[str, Any]:
        """The options of elements as methods take them, with bounds as the pair of `pair_of_bounds`.

        Raises TypeError or ValueError for other forms.
        """
        tree = self.tree
        found: dict[str, Any] = {}
        for name, option in elements.items():
            if isinstance(option, RieszMap):
                found[name] = RieszMap(self._operator(name, option.apply), self._operator(name, option.solve))
            elif callable(option):
                found[name] = self._operator(name, option)
            else:
                found[name] = self.for_method(option if tree is None else tree.by_name(name, option))
        if tree is not None and bounds is not None:
            bounds = tree.bounds(bounds)
        pair = pair_of_bounds(bounds, self.given_size if self.is_cut_by_application else self.total)
        return {**found, "bounds": self.for_method(pair)}

    def for_method(self, option: Any) -> Any:
        """An option about the elements of `option_specs` as methods take it."""
        if option is None or not self.is_cut_by_application:
            return option
        return OfThisRank(option, self.option_specs, self.arranged)

    def _operator(self, name: str, function: Callable[[Any], Any]) -> Callable[[Array], Array]:
        """A user's operator as one of flat vectors in the order of the specs: whole ones, or this rank's elements."""
        what, tree = f"the result of {name}", self.tree
        if not self.is_cut_by_application:
            return function if tree is None else lambda vector: tree.flattened(what, function(tree.of(vector)))

        def of_this_rank(vector: Array) -> Array:
            given, found = self.as_given(vector), vector
            with raised_on_all(self._fields[0].ranks if self._fields else None):
                found = self.vector(what, function(self.like_x0(given)))
            return self.arranged(found)

        return OperatorOfThisRank(of_this_rank)

    def gradient_hint(self, reason: str) -> str:
        """What may be wrong with the gradient of complex unknowns where a run ended for this reason; or nothing."""
        wrong = reason == "line search" and self.tree is not None and self.tree.complex_leaf is not None
        return f"x0 is complex, and {CONVENTION}" if wrong else ""

    def check_no_partition(self, what: str) -> None:
        """Raise ValueError if these are a Partition, for `what`, which takes none."""
        if self.has_fields:
            raise ValueError(
                f"{what} takes whole fields, and x0 is a Partition, whose ranks must stay: leave {what} out; "
                "checkpoints= and resume=True go on after a death"
            )

    def check_not_split(self) -> None:
        """Raise ValueError if these are one rank's part of parameters that are split over ranks."""
        if self.has_fields:
            raise ValueError("x0 is a Partition of a mesh: give this mesh, mesh=mesh")
        if self.is_split:
            place = self.place
            raise ValueError(
                f"x0 is split over tensor={place.tensor_size} and pipeline={place.pipeline_size} ranks, which would "
                "minimise their parts one by one: give the mesh of its place, mesh=mesh and reduction='sum', or an x0 "
                "that is whole"
            )

    def shown_to_user(self) -> Any:
        """The point as functions of the user get it: a copy of the array or the tree, or the parameters by name."""
        return self.like_x0(self.shown.copy()) if self.parameters is None else self.parameters

    def like_x0(self, vector: Array) -> Any:
        """A vector as functions of the user get a direction: a tree of its views, or the array itself."""
        return vector.reshape(self._shape) if self.tree is None else self.tree.of(vector)

    def copy_of(self, flat: Array) -> Any:
        """A copy of a point as functions of the user get it, apart from the unknowns."""
        named = self.parameters
        if named is None:
            return self.like_x0(flat.copy())
        copy = type(named)(named.specs, named.dtype, module=arrays.module_of(named.like), place=named.place)
        copy.flat[...] = flat
        return copy

    def vector(self, what: str, given: Any) -> Array:
        """A vector of the user's as a flat array of the dtype and on the device of the unknowns; maybe not a copy.

        It is in the order that the user sees. `given` has as many elements as the unknowns on this rank, of any shape;
        or by tensor name arrays of the shapes of this rank's slices, all of them; of a tree it has its structure.
        Raises TypeError or ValueError, with `what`, if it is something else.
        """
        if self.tree is not None:
            return self.tree.flattened(what, given)
        if isinstance(given, Mapping):
            return self._joined(what, given)
        return self._converted(what, given, self.given_size)

    def _joined(self, what: str, given: Any) -> Array:
        if self.parameters is None:
            raise TypeError(f"{what} must be an array like x0, which has no names; got {type(given).__name__}")
        flat = arrays.empty(self.size, self.flat.dtype, like=self.flat)
        for piece in self.parameters.pieces:
            if piece.name not in given:
                raise ValueError(f"{what} by name must have all tensors; {piece.name!r} is missing")
            values = self._converted(f"{what} of {piece.name!r}", given[piece.name], piece.size)
            flat[piece.start : piece.start + piece.size] = values
        return flat

    def _converted(self, what: str, given: Any, size: int) -> Array:
        flat = self.flat
        if arrays.is_device(flat):
            if not arrays.is_array(given) or arrays.module_of(given) is not arrays.module_of(flat):
                raise TypeError(f"{what} must be an array on the device, like x0; got {type(given).__name__}")
            found = given
        else:
            try:
                found = np.asarray(given)
            except (TypeError, ValueError):
                raise TypeError(f"{what} must be an array of numbers, got {shown(given)}") from None
            if found.dtype.kind not in "biuf":
                raise TypeError(f"{what} must be an array of real numbers, got {shown(given)}")
        if found.size != size:
            raise ValueError(f"{what} has {found.size} elements of shape {found.shape}, but x0 has {size}")
        return found.reshape(-1).astype(flat.dtype, copy=False)


def _real_array(x0: Any) -> Array:
    """The start as an array of float32 or float64, with at least one dimension."""
    if arrays.is_device(x0):
        values = x0
    else:
        try:
            values = np.atleast_1d(np.asarray(x0))
        except (TypeError, ValueError):
            raise TypeError(f"x0 must be an array of numbers, got {shown(x0)}") from None
    if values.dtype.kind not in "biuf":
        raise TypeError(f"x0 must be an array of real numbers, got {values.dtype} in {type(x0).__name__}")
    return values if values.dtype in arrays.FLOATS else values.astype(np.float64)
