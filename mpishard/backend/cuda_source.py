"""Sources in CUDA C++, files or generated: which functions they have, and what these take.

A source is compiled for element types that are chosen at run time. It names them in capitals, such as ``REAL``; before
its first line come `mpishard/backend/cuda/prelude.cuh` and the ``.cuh`` files next to it. A signature in it is the one
place that says what a function takes: arguments are checked against it and converted by it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.backend.kinds import backend_of

Array = Any
PRELUDE = Path(__file__).with_name("cuda") / "prelude.cuh"

# By type in C++: the dtype of such a scalar, or of the elements of such an array.  Numbers in bfloat16 travel as their
# bits, since not every NumPy and CuPy has the type.
DTYPES: dict[str, np.dtype] = {
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    "int": np.dtype(np.int32),
    "unsigned int": np.dtype(np.uint32),
    "long long": np.dtype(np.int64),
    "unsigned long long": np.dtype(np.uint64),
    "bool": np.dtype(np.bool_),
    "unsigned char": np.dtype(np.uint8),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
_TYPES = {dtype: name for name, dtype in DTYPES.items()}
FUNCTION = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([\w, ]+\) )?(\w+)\(([^)]*)\)')


@dataclass(frozen=True)
class Parameter:
    """A parameter of a CUDA function."""

    name: str
    type: str  # as in the source without ``const``, such as ``"REAL"``: of a scalar, or of elements
    is_array: bool  # it is a pointer


def parse_parameters(text: str) -> tuple[Parameter, ...]:
    """The parameters of a signature, given what is between its parentheses."""
    found = []
    for part in text.split(","):
        words = part.replace("*", " * ").replace("__restrict__", " ").split()
        kind = " ".join(word for word in words[:-1] if word not in ("const", "*"))
        found.append(Parameter(words[-1], kind, "*" in words))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class CudaFunction:
    """A function of a `CudaSource` for certain element types; the source makes each once."""

    source: CudaSource
    name: str
    types: tuple[tuple[str, str], ...]  # pairs such as ``("REAL", "float")``

    @property
    def code(self) -> str:
        """The whole text to compile."""
        return self.source.code

    @property
    def options(self) -> tuple[str, ...]:
        return ("-std=c++17", *(f"-D{name}={kind}" for name, kind in self.types), *self.source.options)

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Its parameters, with element types filled in."""
        filled = dict(self.types)
        return tuple(
            Parameter(each.name, filled.get(each.type, each.type), each.is_array)
            for each in self.source.functions[self.name]
        )

    def converted(self, arguments: tuple[Any, ...]) -> list[Any]:
        """Arrays as they are, scalars in the types of the signature.

        Raises TypeError if there are too few or too many, or an array has another dtype than the signature.
        """
        if len(arguments) != len(self.parameters):
            names = ", ".join(each.name for each in self.parameters)
            raise TypeError(f"{self.name} takes the arguments {names}, got {len(arguments)} of them")
        converted = []
        for (dtype, of_scalar), argument in zip(self._kinds, arguments, strict=True):
            if of_scalar is not None:
                converted.append(of_scalar(argument))
            elif argument.dtype == dtype:
                converted.append(argument)
            else:
                name = self.parameters[len(converted)].name
                raise TypeError(f"{self.name} takes {name} as {dtype}, got {argument.dtype}")
        return converted

    @functools.cached_property
    def _kinds(self) -> tuple[tuple[np.dtype, Any], ...]:
        """Of each parameter the dtype, and of a scalar the type."""
        dtypes = [(DTYPES[each.type], each.is_array) for each in self.parameters]
        return tuple((dtype, None if is_array else dtype.type) for dtype, is_array in dtypes)

    @functools.cached_property
    def first_array(self) -> int:
        """The number of the first array among the parameters."""
        return next(number for number, each in enumerate(self.parameters) if each.is_array)


class CudaSource:
    """A file of CUDA C++, then generated text, if any; `functions` has their parameters by name.

    Functions are those declared ``extern "C" __global__ void NAME(...)``; `options` of the compiler are additional to
    those for element types.
    """

    def __init__(self, path: Path | None, options: tuple[str, ...] = (), text: str = "") -> None:
        self.path = path
        self.options = options
        self.text = text
        self._made: dict[tuple[Any, ...], CudaFunction] = {}

    @functools.cached_property
    def code(self) -> str:
        """The text of the file and of `text`, after the prelude and the headers next to the file."""
        files = [PRELUDE]
        if self.path is not None:
            files += [
                *(path for path in sorted(self.path.parent.glob("*.cuh")) if path.name != PRELUDE.name),
                self.path,
            ]
        return "\n".join([*(path.read_text("utf-8") for path in files), self.text])

    @functools.cached_property
    def functions(self) -> dict[str, tuple[Parameter, ...]]:
        return {name: parse_parameters(parameters) for name, parameters in FUNCTION.findall(self.code)}

    def function(self, name: str, **dtypes: Any) -> CudaFunction:
        """A function for element types, such as ``REAL=numpy.float32``; uint16 stands for bfloat16."""
        key = (name, *dtypes.items())
        made = self._made.get(key)
        if made is None:
            types = tuple((each, _TYPES[np.dtype(dtype)]) for each, dtype in dtypes.items())
            made = self._made[key] = CudaFunction(self, name, types)
        return made


def launch(
    function: CudaFunction,
    blocks: int,
    threads: int,
    *arguments: Any,
    reached: Sequence[Array] = (),
    shared: int = 0,
) -> None:
    """Queue a CUDA function on the current stream of the device of its first array; no blocks: nothing is done.

    Arrays must be contiguous where the function takes them to be. `reached` are arrays that it reads or writes by
    addresses in an array; `shared` is the size in bytes of each block's ``extern __shared__`` array. Raises TypeError
    as `CudaFunction.converted`.
    """
    converted = function.converted(arguments)
    if blocks:
        backend_of(converted[function.first_array]).launch_cuda(function, blocks, threads, converted, reached, shared)
