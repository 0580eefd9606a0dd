"""Functions that are compiled when they are first called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

_before: list[Callable[[], None]] = []


def before_compiling(register: Callable[[], None]) -> Callable[[], None]:
    """Call `register` before anything is compiled: with it Numba learns of functions that others call."""
    _before.append(register)
    return register


def prepare() -> None:
    """Do now what the first call of a compiled function does once a process, in some tenths of a second."""
    from mpishard.compiling import jit

    jit.prepare()


class HostFunction:
    """A function of NumPy arrays of one dtype, and scalars, compiled once for all the ranks of a node.

    The first call imports Numba, and loads the function from its cache or compiles it.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._function, self._options = function, options
        self._dispatcher: Any = None
        self._compiled: set[tuple[Any, ...]] = set()

    def __call__(self, arrays: Sequence[np.ndarray], scalars: Sequence[float] = ()) -> Any:
        arguments = (*arrays, *scalars)
        key = (arrays[0].dtype, *(a.flags.writeable for a in arrays))
        if key not in self._compiled:
            from mpishard.compiling import jit

            jit.in_turn(self.dispatcher(), jit.types_of(arguments))
            self._compiled.add(key)
        return self._dispatcher(*arguments)

    def dispatcher(self) -> Any:
        """Numba's object for this function, made when first asked for."""
        from mpishard.compiling import jit

        while _before:
            _before.pop(0)()
        if self._dispatcher is None:
            self._dispatcher = jit.jit(self._function, **self._options)
        return self._dispatcher


def compile_together(functions: Iterable[tuple[HostFunction, Sequence[Any]]]) -> None:
    """Compile functions of which the first is needed now and the others soon, each in one of the ranks of a node.

    Each comes with its arguments, or with arrays and scalars of the same types.  What is in the cache is left alone.
    """
    from mpishard.compiling import jit

    jit.share([(function.dispatcher(), jit.types_of(arguments)) for function, arguments in functions])
