"""What is checked before a kernel reads or writes memory by it: extents of arrays, lengths, and numbers of rows.

The host never waits for a device: there rows of numbers that are out of range are NaN, and so is what follows of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.arguments import integer, shown
from mpishard.backend.array import to_host

Array = Any
INDEX = np.dtype(np.int64)


def same_extents(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of kernels that get a user's arrays: refuse several extents of one axis, and indices of another dtype.

    `names` are the arrays that a user can give, and one that has the right extents: each takes time in every call.  The
    letters after the underscore in a name are its axes; parameters that are annotated as Indices are int64.  Raises
    TypeError or ValueError.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        order = list(function.__annotations__)
        indices = [order.index(name) for name in names if function.__annotations__[name] == "Indices"]
        of_names = operator.itemgetter(*map(order.index, names))

        @functools.lru_cache(maxsize=1024)
        def check(*shapes: tuple[int, ...]) -> None:
            """Raise unless the shapes fit together: they are few, and most calls find them here."""
            extents: dict[str, tuple[int, str]] = {}
            for name, shape in zip(names, shapes, strict=True):
                axes = name.rpartition("_")[2]
                if len(shape) != len(axes):
                    raise ValueError(f"{name} of shape {shape} must have {len(axes)} axes")
                for axis, extent in zip(axes, shape, strict=True):
                    wanted, other = extents.setdefault(axis, (extent, name))
                    if extent != wanted:
                        raise ValueError(
                            f"{name} of shape {shape} and {other} of shape {shapes[names.index(other)]} differ in axis "
                            f"{axis}: {extent} and {wanted}"
                        )

        @functools.wraps(function)
        def checked(*arguments: Any) -> Any:
            try:
                check(*[array.shape for array in of_names(arguments)])
                for place in indices:
                    if arguments[place].dtype != INDEX:
                        raise TypeError(f"{order[place]} must be int64, got {arguments[place].dtype}: use astype()")
            except AttributeError:
                pairs = zip(names, of_names(arguments), strict=True)
                name, given = next(pair for pair in pairs if not hasattr(pair[1], "dtype"))
                raise TypeError(f"{name}={shown(given)} must be an array") from None
            return function(*arguments)

        return checked

    return decorated


def refuse_outside(what: str, indices_n: Array, count: int, otherwise: str = "") -> None:
    """Raise ValueError if one of the indices, called `what`, is not among `count` numbers; waits for a device.

    `otherwise` says in the message what else there is to do.
    """
    on_host_n = to_host(indices_n)
    outside = np.flatnonzero((on_host_n < 0) | (on_host_n >= count))
    if outside.size:
        place = int(outside[0])
        raise ValueError(f"{what}[{place}]={on_host_n[place]} is out of range: valid are 0 to {count - 1}{otherwise}")


def check_length(rows: int, length: Any) -> int:
    """The tokens of a sequence, of which there are whole ones in so many rows; raises TypeError or ValueError."""
    if type(length) is not int or length < 1:  # else without a call: it is asked in every pass of a block
        length = integer("length", length, least=1)
    if rows % length:
        raise ValueError(f"{rows} rows are no whole sequences of length={length}")
    return length
