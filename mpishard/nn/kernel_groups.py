"""How the functions of layers are compiled, in groups of those that one model needs, and what they may call.

``reassoc`` lets LLVM vectorise sums of rows, ``contract`` lets it use fused multiply-add; NaN and infinity keep their
meaning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.backend.jit_function import HostFunction, before_compiling
from mpishard.compression.kernels import upper_half


class KernelGroup:
    """Kernels that a model needs together: the first call of one announces the others, which are then compiled, too."""

    def __init__(self) -> None:
        # The compiled functions, and the annotations of their parameters.
        self.kernels: list[tuple[HostFunction, dict[str, str]]] = []
        self._begun: set[np.dtype] = set()

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function whose parameters are arrays, the first of them of floats, and then scalars."""
        compiled, call = _compiled(function)
        self.kernels.append((compiled, function.__annotations__))

        @functools.wraps(function)
        def call_with_others(*arguments: Any) -> Any:
            dtype = arguments[0].dtype
            if dtype not in self._begun:
                self._begun.add(dtype)
                for each, annotations in self.kernels:
                    each.expect(*arguments_of(annotations, dtype))
            return call(*arguments)

        return call_with_others


def kernel_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `KernelGroup.kernel`, for a function that few models need."""
    return functools.wraps(function)(_compiled(function)[1])


def _compiled(function: Callable[..., Any]) -> tuple[HostFunction, Callable[..., Any]]:
    arrays = sum(annotation in ("Array", "Indices") for annotation in function.__annotations__.values())
    compiled = HostFunction(function, fastmath={"reassoc", "contract", "nsz"})
    return compiled, lambda *arguments: compiled(arguments[:arrays], arguments[arrays:])


def arguments_of(annotations: dict[str, str], dtype: np.dtype) -> tuple[list[np.ndarray], list[float]]:
    """Arguments of the types that a kernel gets: empty arrays, and zeros."""
    arrays: list[np.ndarray] = []
    scalars: list[float] = []
    for name, annotation in annotations.items():
        if annotation in ("Array", "Indices"):
            dimensions = len(name.rpartition("_")[2])
            arrays.append(np.empty((0,) * dimensions, np.int64 if annotation == "Indices" else dtype))
        elif name != "return":
            scalars.append({"int": 0, "float": 0.0}[annotation])
    return arrays, scalars


def exp(x: Any) -> Any:
    """Exponential; in float32 without a call, so that loops over it vectorise (within 2 units in the last place)."""
    return math.exp(x)


@before_compiling
def _overload_exp() -> None:
    import numba
    from numba.extending import overload

    @overload(exp, jit_options={"error_model": "numpy", "fastmath": {"contract"}})
    def exp_overload(x: Any) -> Any:
        # Cephes expf: x = n log 2 + r with |r| <= log(2) / 2, exp(x) = 2^n exp(r). The two parts of log 2 make n times
        # the first exact. A number as large as `whole` has no places behind the point: its lowest bits are n, from
        # which those of 2^n are made. The comparisons let NaN through and keep 2^n a normal number: nothing is smaller
        # than about 1e-38.
        log2e, high, low = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
        c0, c1, c2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
        c3, c4, half = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
        whole, one, least, most = np.float32(1.5 * 2**23), np.float32(1.0), np.float32(-87.33654), np.float32(88.72283)

        def exp32(x: Any) -> Any:
            x = least if x < least else x
            x = most if x > most else x
            shifted = x * log2e + whole
            n = shifted - whole
            r = x - n * high - n * low
            p = (((((c0 * r + c1) * r + c2) * r + c3) * r + c4) * r + half) * r + one
            power = np.int32((np.float32(shifted).view(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
            return (p * r + one) * power

        def exp64(x: Any) -> Any:
            return math.exp(x)

        return exp32 if x == numba.float32 else exp64


def element(x: Any, array: Any) -> Any:
    """In a kernel: a number as an element of `array`; if that has bits of bfloat16 (uint16), those of `x`."""
    return upper_half(x) if array.dtype == np.uint16 else x


@before_compiling
def _overload_element() -> None:
    import numba
    from numba.extending import overload

    @overload(element)
    def element_overload(x: Any, array: Any) -> Any:
        def bits(x: Any, array: Any) -> Any:
            return np.uint16(upper_half(x))

        def same(x: Any, array: Any) -> Any:
            return x

        return bits if array.dtype == numba.uint16 else same


def wide_vectors() -> None:
    """In a kernel: use vectors of 512 bits where the processor has them, for loops that compute more than they load.

    LLVM prefers 256 bits for early processors that run slower while they use wider vectors; they do so for the products
    of a step anyway.
    """


@before_compiling
def _define_wide_vectors() -> None:
    from numba.core import types
    from numba.extending import intrinsic, overload

    @intrinsic
    def widen(context):  # type: ignore[no-untyped-def]
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            # An attribute of LLVM that llvmlite does not know, and would refuse.
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
            return context.get_dummy_value()

        return types.void(), generate

    @overload(wide_vectors, inline="always")  # the attribute is one of the function that it is called in
    def wide_vectors_overload():  # type: ignore[no-untyped-def]
        return lambda: widen()  # type: ignore[call-arg]
