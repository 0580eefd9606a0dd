"""What a method's options say about each element, cut down to the elements that this rank updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.arguments import shown
from mpishard.backend import array as arrays
from mpishard.data_parallel.full_parameters import cut_whole
from mpishard.data_parallel.strategy import Strategy
from mpishard.layout.specs import ParameterSpec
from mpishard.minimizers.limits import Limits
from mpishard.minimizers.method import Method

Array = Any


def limits_of(method: Method, strategy: Strategy, precondition: Callable[[Array], Array] | None) -> Limits:
    """This rank's part of the options of a method.

    Not collective.

    Parameters
    ----------
    method : Method
    strategy : Strategy
        Knows the elements that this rank updates.
    precondition : callable or None
        A preconditioner that is a function, of this rank's elements.

    Raises
    ------
    ValueError, TypeError
        If an option does not fit the parameters; the message names the tensor or the element.
    """
    parameters = strategy.parameters
    specs, dtype, like = parameters.specs, parameters.dtype, parameters.like

    def own(whole: np.ndarray | None) -> Array | None:
        if whole is None:
            return None
        part = cut_whole(whole, parameters, strategy.ownership.own)
        if not arrays.is_device(like):
            return part
        target = arrays.empty(part.size, part.dtype, like=like)
        arrays.copy_to_device(part, target)
        return target

    bounds = getattr(method, "bounds", None)
    lower = upper = None
    if bounds is not None:
        lower, upper = whole_bounds(bounds, specs, dtype)
    fixed = whole_elements("fixed", method.fixed, specs, np.dtype(bool), missing=False)
    weights = _positive("inner_product", method.inner_product, specs, dtype)
    given = None if callable(method.preconditioner) else method.preconditioner
    scaling = _positive("preconditioner", given, specs, dtype)
    if scaling is None and weights is not None and precondition is None:
        scaling = 1 / weights
    return Limits(own(lower), own(upper), own(fixed), own(weights), own(scaling), precondition)


def whole_bounds(
    bounds: Any, specs: Sequence[ParameterSpec], dtype: np.dtype
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Lower and upper bounds of all elements, in the order of the specs; None where there is no bound.

    Parameters
    ----------
    bounds : pair or mapping
        ``(lower, upper)``: each a number, a flat array, a mapping by tensor name, or None; or by tensor name such
        pairs.
    specs : sequence of ParameterSpec
    dtype : dtype
        Of the parameters.

    Raises
    ------
    ValueError, TypeError
        If they are of another form or size, or cross.
    """
    if isinstance(bounds, Mapping):
        unpaired = [name for name, pair in bounds.items() if not _is_pair(pair)]
        if unpaired:
            raise ValueError(
                f"bounds of {unpaired[0]!r} must be a pair (lower, upper), got {shown(bounds[unpaired[0]])}"
            )
        bounds = tuple({name: pair[side] for name, pair in bounds.items()} for side in (0, 1))
    elif not _is_pair(bounds):
        raise ValueError(f"bounds must be a pair (lower, upper), or such pairs by tensor name, got {shown(bounds)}")
    lower = whole_elements("lower bounds", bounds[0], specs, dtype, missing=-np.inf)
    upper = whole_elements("upper bounds", bounds[1], specs, dtype, missing=np.inf)
    if lower is not None and upper is not None:
        crossed = np.flatnonzero(~(lower <= upper))
        if len(crossed):
            where, low, high = element_name(int(crossed[0]), specs), lower[crossed[0]], upper[crossed[0]]
            raise ValueError(
                f"the bounds of {len(crossed)} elements cross: {where} has the lower bound {low:g} and the upper bound "
                f"{high:g}; give bounds with lower <= upper"
            )
    return lower, upper


def whole_elements(
    what: str, given: Any, specs: Sequence[ParameterSpec], dtype: np.dtype, *, missing: Any
) -> np.ndarray | None:
    """A flat array over all tensors from a number, a flat array, or numbers and arrays by tensor name.

    None stays None; tensors and values that are not given become `missing`.
    """
    if given is None:
        return None
    size = sum(spec.size for spec in specs)
    if isinstance(given, Mapping):
        known = {spec.name for spec in specs}
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(f"{what}: there is no tensor {unknown[0]!r}; there are {', '.join(sorted(known))}")
        parts = []
        for spec in specs:
            value = given.get(spec.name)
            part = np.full(spec.shape, missing if value is None else 0, dtype)
            if value is not None:
                part[...] = _array(f"{what} of {spec.name!r}", value, dtype, spec.shape)
            parts.append(part.reshape(-1))
        return np.concatenate([np.empty(0, dtype), *parts])
    return np.array(np.broadcast_to(_array(what, given, dtype, (size,)), (size,)), dtype)


def element_name(index: int, specs: Sequence[ParameterSpec]) -> str:
    """The name of an element by its index in the flat order of the whole model.

    Parameters
    ----------
    index : int
        From 0.
    specs : sequence of ParameterSpec
        Of the model.

    Returns
    -------
    str
        Such as ``element (3, 4) of 'weight'``.
    """
    for spec in specs:
        if index < spec.size:
            place = ", ".join(str(int(i)) for i in np.unravel_index(index, spec.shape))
            return f"element ({place}) of {spec.name!r}"
        index -= spec.size
    raise IndexError(index)


def _positive(what: str, given: Any, specs: Sequence[ParameterSpec], dtype: np.dtype) -> np.ndarray | None:
    whole = whole_elements(what, given, specs, dtype, missing=1)
    if whole is not None:
        wrong = np.flatnonzero(~((whole > 0) & np.isfinite(whole)))
        if len(wrong):
            where = element_name(int(wrong[0]), specs)
            raise ValueError(f"{what} must be positive and finite, but {where} is {whole[wrong[0]]:g}")
    return whole


def _array(what: str, value: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    try:
        found = np.asarray(arrays.to_host(value) if arrays.is_array(value) else value)
        found = found.astype(dtype, casting="same_kind" if found.dtype.kind == dtype.kind else "unsafe", copy=False)
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be numbers, got {shown(value)}") from None
    if found.shape not in ((), shape) and not (found.size == int(np.prod(shape)) and found.shape == (found.size,)):
        raise ValueError(f"{what} have the shape {found.shape}, but the parameters {shape}; give that, or one number")
    if dtype.kind == "f" and np.isnan(found).any():
        raise ValueError(f"{what} contain NaN")
    return found if found.shape == () else found.reshape(shape)


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
