"""Bounds in the forms that SciPy knows, and by tensor name, as the pair that a method takes.  No MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.arguments import shown

_FORMS = (
    "a pair (lower, upper) for each element of x0, one pair of numbers or arrays for all of them, "
    "scipy.optimize.Bounds(lower, upper), or such pairs by tensor name"
)


def pair_of_bounds(bounds: Any, size: int) -> Any:
    """Lower and upper bounds of all elements.

    Parameters
    ----------
    bounds : object
        What a user gave.  A sequence of as many pairs as there are elements is read as SciPy does: a pair for each
        element, also for two elements.
    size : int
        Number of elements.

    Returns
    -------
    (lower, upper), mapping or None
        Numbers or flat arrays, infinite where there is no bound; by tensor name where `bounds` is a mapping.

    Raises
    ------
    TypeError, ValueError
        If it is none of these forms.
    """
    if bounds is None:
        return None
    if isinstance(bounds, Mapping):
        return {name: _ends(_pair(pair, f"bounds of {name!r}")) for name, pair in bounds.items()}
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):
        return _ends((bounds.lb, bounds.ub))
    if isinstance(bounds, str) or not isinstance(bounds, Sequence | np.ndarray):
        raise TypeError(f"bounds={shown(bounds)} must be {_FORMS}")
    if len(bounds) == size and all(_is_pair(each) for each in bounds):
        return tuple(
            np.array([_number(each[side], index, none) for index, each in enumerate(bounds)], np.float64)
            for side, none in enumerate((-np.inf, np.inf))
        )
    if len(bounds) != 2:
        raise ValueError(f"bounds have {len(bounds)} entries, but x0 has {size} elements; give {_FORMS}")
    return _ends((bounds[0], bounds[1]))


def _pair(value: Any, what: str) -> tuple[Any, Any]:
    if hasattr(value, "lb") and hasattr(value, "ub"):
        return value.lb, value.ub
    if not _is_pair(value):
        raise ValueError(f"{what} must be a pair (lower, upper), got {shown(value)}")
    return value[0], value[1]


def _ends(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """The pair with infinities for None."""
    lower, upper = pair
    return (-np.inf if lower is None else lower, np.inf if upper is None else upper)


def _is_pair(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == (2,)
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2


def _number(value: Any, index: int, none: float) -> float:
    if value is None:
        return none
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"bounds of element {index} must be numbers or None, got {shown(value)}") from None
