"""What is checked before a kernel reads or writes memory by it: extents of arrays, lengths, and numbers of rows.

The host never waits for a device: there rows of numbers that are out of range are NaN, and so is what follows of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.arguments import integer, shown
from mpishard.backend.array import to_host

Array = Any
INDEX = np.dtype(np.int64)


def same_extents(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: refuse arrays in which axes of one letter have several extents, and indices of another dtype.

    The letters after the underscore in the name of a parameter are its axes; parameters that are annotated as Indices
    are int64.  Raises TypeError or ValueError.
    """
    kinds = [(name, kind) for name, kind in function.__annotations__.items() if kind in ("Array", "Indices")]
    names = [name for name, _ in kinds]
    indices = [place for place, (_, kind) in enumerate(kinds) if kind == "Indices"]

    @functools.lru_cache(maxsize=1024)
    def check(shapes: tuple[tuple[int, ...], ...]) -> None:
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
            check(tuple([array.shape for array in arguments[: len(names)]]))
            for place in indices:
                if arguments[place].dtype != INDEX:
                    raise TypeError(f"{names[place]} must be int64, got {arguments[place].dtype}: use astype()")
        except AttributeError:
            name, given = next(pair for pair in zip(names, arguments, strict=False) if not hasattr(pair[1], "dtype"))
            raise TypeError(f"{name}={shown(given)} must be an array") from None
        return function(*arguments)

    return checked


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
    length = integer("length", length, least=1)
    if rows % length:
        raise ValueError(f"{rows} rows are no whole sequences of length={length}")
    return length
