"""The user's options about elements, given as numbers, flat arrays or by tensor name, as arrays over all elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpishard.arguments import shown
from mpishard.backend import array as arrays
from mpishard.layout.tensors import ParameterSpec
from mpishard.minimizers.method import Method, RieszMap

Array = Any


@dataclass(frozen=True)
class OfThisRank:
    """An option about elements that is given for those of this rank, which has a part of the parameters.

    `specs` are what it is given for, and `arranged` brings a flat array of these to the order of the parameters,
    collectively.  Ranks differ in all of these.
    """

    value: Any = field(compare=False)
    specs: Sequence[ParameterSpec] = field(compare=False)
    arranged: Callable[[Array], Array] = field(compare=False)

    def __repr__(self) -> str:
        return "of each rank"


class OperatorOfThisRank:
    """An operator of this rank's elements of a vector, in the order of the parameters.  Collective."""

    def __init__(self, function: Callable[[Array], Array]) -> None:
        self._function = function

    def __call__(self, vector: Array) -> Array:
        return self._function(vector)


class WholeLimits(NamedTuple):
    """The element-wise options of a method over all elements, in the order of the specs; None for those not given."""

    lower: np.ndarray | None
    upper: np.ndarray | None
    fixed: np.ndarray | None
    weights: np.ndarray | None
    scaling: np.ndarray | None
    l1_weights: np.ndarray | None
    l1_reference: np.ndarray | None


def whole_limits(method: Method, specs: Sequence[ParameterSpec], dtype: np.dtype) -> WholeLimits:
    """The options of a method over all elements, or over those of this rank, without a preconditioner of a function.

    Raises ValueError or TypeError that names the tensor or element if an option does not fit the parameters.
    """
    local, l1 = of_this_rank(method), whole_l1(method, specs, dtype)
    specs = specs if local is None else local.specs
    bounds, fixed, weights, preconditioner = (
        option.value if isinstance(option, OfThisRank) else option for option in _options(method)
    )
    lower, upper = (None, None) if bounds is None else whole_bounds(bounds, specs, dtype)
    fixed = whole_elements("fixed", fixed, specs, np.dtype(bool), missing=False)
    weights = None if isinstance(weights, RieszMap) else positive_elements("inner_product", weights, specs, dtype)
    if callable(preconditioner):
        return WholeLimits(lower, upper, fixed, weights, None, *l1)
    scaling = positive_elements("preconditioner", preconditioner, specs, dtype)
    if scaling is None and weights is not None:
        scaling = 1 / weights
    return WholeLimits(lower, upper, fixed, weights, scaling, *l1)


def whole_l1(
    method: Method, specs: Sequence[ParameterSpec], dtype: np.dtype
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Weights and references of the L1 terms of a method, as `whole_limits` has them; None without terms."""
    local = l1_of_this_rank(method)
    l1, specs = (getattr(method, "l1", None), specs) if local is None else (local.value, local.specs)
    if l1 is None:
        return None, None
    if not _is_pair(l1) or l1[0] is None:
        raise ValueError(f"l1={shown(l1)} must be a pair (weight, reference), of which the second may be None")
    return elements_of_l1("l1", l1[0], l1[1], specs, dtype)


def elements_of_l1(
    what: str, weight: Any, reference: Any, specs: Sequence[ParameterSpec], dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray | None]:
    """Weights and references as flat arrays over all tensors; the latter None if none are given.

    Raises TypeError or ValueError, with `what`, if they do not fit, or if one is not finite or a weight negative.
    """
    weights = whole_elements(f"{what}: the weights", weight, specs, dtype, missing=0)
    references = whole_elements(f"{what}: the references", reference, specs, dtype, missing=0)
    assert weights is not None
    for name, values, least in (("weight", weights, 0.0), ("reference", references, -np.inf)):
        if values is None:
            continue
        wrong = np.flatnonzero(~((values >= least) & np.isfinite(values)))
        if len(wrong):
            where, more = element_name(int(wrong[0]), specs), " and not negative" * (name == "weight")
            raise ValueError(f"{what}: the {name} of {where} is {values[wrong[0]]:g}, and must be finite{more}")
    return weights, references


def of_this_rank(method: Method) -> OfThisRank | None:
    """An option, not `l1`, that is given for the elements of this rank, if there is one; then all are."""
    return next((option for option in _options(method) if isinstance(option, OfThisRank)), None)


def l1_of_this_rank(method: Method) -> OfThisRank | None:
    """The option `l1` of a method, if it is given for the elements of this rank."""
    l1 = getattr(method, "l1", None)
    return l1 if isinstance(l1, OfThisRank) else None


def _options(method: Method) -> tuple[Any, Any, Any, Any]:
    return getattr(method, "bounds", None), method.fixed, method.inner_product, method.preconditioner


def whole_bounds(
    bounds: Any, specs: Sequence[ParameterSpec], dtype: np.dtype
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Lower and upper bounds of all elements, in the order of the specs, infinite without a bound; None for no bounds.

    `bounds` is ``(lower, upper)``, each a number, a flat array, a mapping by tensor name, or None; or such pairs by
    tensor name. Raises ValueError or TypeError if they have another form or size, or leave no number between them.
    """
    if isinstance(bounds, Mapping):
        for name, pair in bounds.items():
            if not _is_pair(pair):
                raise ValueError(f"bounds of {name!r} must be a pair (lower, upper), got {shown(pair)}")
        bounds = tuple({name: pair[side] for name, pair in bounds.items()} for side in (0, 1))
    elif not _is_pair(bounds):
        raise ValueError(f"bounds must be a pair (lower, upper), or such pairs by tensor name, got {shown(bounds)}")
    lower = whole_elements("lower bounds", bounds[0], specs, dtype, missing=-np.inf)
    upper = whole_elements("upper bounds", bounds[1], specs, dtype, missing=np.inf)
    low, high = np.broadcast_arrays(-np.inf if lower is None else lower, np.inf if upper is None else upper)
    crossed = np.flatnonzero((low > high) | (low == np.inf) | (high == -np.inf))
    if len(crossed):
        first = int(crossed[0])
        raise ValueError(
            f"the bounds of {len(crossed)} elements cross: {element_name(first, specs)} has the lower bound "
            f"{low[first]:g} and the upper bound {high[first]:g}; give bounds with lower <= upper"
        )
    return lower, upper


def whole_elements(
    what: str, given: Any, specs: Sequence[ParameterSpec], dtype: np.dtype, *, missing: Any
) -> np.ndarray | None:
    """A flat array over all tensors; None if `given` is None.

    `given` is one number, a flat array, or numbers and arrays by tensor name; `missing` is the value of tensors that
    are not named or have None; `what` names the option in messages. One number is not written out: the array is
    read-only then. Raises ValueError or TypeError if it does not fit.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        size = sum(spec.size for spec in specs)
        shape = specs[0].shape if len(specs) == 1 else (size,)
        found = _array(what, given, dtype, shape)
        return np.array(found).reshape(-1) if found.shape else np.broadcast_to(found, size)
    known = {spec.name for spec in specs}
    for name in given:
        if name not in known:
            raise ValueError(f"{what}: there is no tensor {shown(name)}; there are {', '.join(sorted(known))}")
    parts = [np.empty(0, dtype)]
    for spec in specs:
        value = given.get(spec.name)
        part = np.full(spec.shape, missing if value is None else 0, dtype)
        if value is not None:
            part[...] = _array(f"{what} of {spec.name!r}", value, dtype, spec.shape)
        parts.append(part.reshape(-1))
    return np.concatenate(parts)


def element_name(index: int, specs: Sequence[ParameterSpec]) -> str:
    """The name of an element by its index in the flat order of all tensors, such as ``element (3, 4) of 'weight'``."""
    left = index
    for spec in specs:
        if left < spec.size:
            place = ", ".join(str(int(each)) for each in np.unravel_index(left, spec.shape))
            return f"element ({place}) of {spec.name!r}"
        left -= spec.size
    raise IndexError(index)


def positive_elements(what: str, given: Any, specs: Sequence[ParameterSpec], dtype: np.dtype) -> np.ndarray | None:
    """As `whole_elements`, of numbers that must be positive and finite, else ValueError."""
    whole = whole_elements(what, given, specs, dtype, missing=1)
    wrong = np.empty(0, np.int64) if whole is None else np.flatnonzero(~((whole > 0) & np.isfinite(whole)))
    if whole is not None and len(wrong):
        where = element_name(int(wrong[0]), specs)
        raise ValueError(f"{what} must be positive and finite, but {where} is {whole[wrong[0]]:g}")
    return whole


def _array(what: str, value: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """An array of this shape, or of no dimension."""
    try:
        found = np.asarray(arrays.to_host(value))
        if found.dtype.kind not in "biuf":
            raise TypeError
        is_nan = np.isnan(found)
        is_flag = (found == 0) | (found == 1) | is_nan
        found = found.astype(dtype, copy=False)
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be numbers, got {shown(value)}") from None
    if found.size == 1:  # SciPy makes arrays of one element of numbers
        found = found.reshape(())
    size = int(np.prod(shape))
    if found.shape not in ((), shape, (size,)):
        raise ValueError(f"{what} have the shape {found.shape}, but the parameters {shape}; give that, or one number")
    if is_nan.any():  # which as a bool would be True
        raise ValueError(f"{what} contain NaN, at {int(np.flatnonzero(is_nan)[0])} first")
    if dtype == np.bool and not is_flag.all():  # such as the numbers of elements
        raise ValueError(f"{what} must be True or False for each element, or for all of them, got {shown(value)}")
    return found if found.shape == () else found.reshape(shape)


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2


def operators(
    method: Method, wrap: Callable[[str, Callable[[Array], Array]], Callable[[Array], Array]]
) -> dict[str, Callable[[Array], Array]]:
    """The functions of a method as fields of `Limits`: its preconditioner, and those of an inner product.

    Each is given to `wrap` with its name for messages, and what that returns is a function of this rank's elements.
    """
    product, function = method.inner_product, method.preconditioner
    found: dict[str, Callable[[Array], Array]] = {}
    if isinstance(product, RieszMap):
        found = {"solve": wrap("solve of RieszMap", product.solve), "apply": wrap("apply of RieszMap", product.apply)}
    if callable(function):
        found["precondition"] = wrap("preconditioner", function)
    elif "solve" in found and function is None:
        found["precondition"] = found["solve"]
    if (factor := getattr(method, "factor", None)) is not None:
        found["factor"] = wrap("factor", factor)
    return found


def applied(what: str, function: Callable[[Array], Array], vector: Array) -> Array:
    """The result of a user's operator for a vector of all elements, which it gets as a copy; as formulas take it.

    `what` names it in messages. Raises ValueError if the result has another shape, or is not of real numbers.
    """
    found = function(vector.copy())
    if getattr(found, "shape", None) != vector.shape:
        returned = getattr(found, "shape", type(found).__name__)
        raise ValueError(f"{what} returned {returned} for a vector of shape {vector.shape}; return one as long")
    if (found := arrays.as_array(found)).dtype.kind not in "biuf":
        raise ValueError(f"{what} returned {found.dtype} for a vector of {vector.dtype}; return real numbers")
    return found.astype(vector.dtype)  # a copy: the user may write the next one into the same array


def check_inverse(riesz_of_ones: Array) -> None:
    """Raise ValueError unless ``solve(apply(1))`` of a RieszMap is 1 to a tenth, on this rank."""
    off = float(abs(riesz_of_ones - 1).max()) if riesz_of_ones.size else 0.0
    if not off < 0.1:
        raise ValueError(
            "solve(apply(x)) must be x, of a RieszMap and of the prior of laplace, whose precision is apply; for x = 1 "
            f"it is off by {off:.3g}: give functions of the same operator, the same on all ranks"
        )
