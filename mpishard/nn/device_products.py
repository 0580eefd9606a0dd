"""Matrix products of device arrays, with operands in half precision if wanted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend import cublas
from mpishard.backend.convert import BITS, convert
from mpishard.backend.kinds import backend_of

Array = Any
# cuBLAS's fast kernels load 16 bytes of half precision at once, so that rows must begin at multiples of that.
ALIGNED = 8
_thread = threading.local()  # has `weights` in a step


class _RoundedWeights:
    """The weights of a step in half precision: those that lie in `flat` are rounded at once, others one by one."""

    def __init__(self, flat: Array) -> None:
        self._flat = flat
        self._halves: dict[np.dtype, Array] = {}
        self._others: dict[Any, Array] = {}

    @property
    def kept(self) -> list[Array]:
        """The rounded arrays."""
        return [*self._halves.values(), *self._others.values()]

    def get(self, weight: Array, dtype: np.dtype, padded: int | None, make: Callable[[], Array]) -> Array:
        """A rounded weight, padded or not; `make` gives it where it lies in another way."""
        address = backend_of(weight).address
        if padded is None and weight.flags.c_contiguous and weight.dtype == self._flat.dtype:
            place, rest = divmod(address(weight) - address(self._flat), weight.itemsize)
            if not rest and 0 <= place <= self._flat.size - weight.size and not place % ALIGNED:
                halves = self._halves.get(dtype)
                if halves is None:
                    halves = self._halves[dtype] = arrays.empty(self._flat.shape, dtype, like=weight)
                    convert(self._flat, halves)
                return halves[place : place + weight.size].reshape(weight.shape)
        key = address(weight), weight.shape, weight.strides, dtype, padded
        if key not in self._others:
            self._others[key] = make()
        return self._others[key]


@contextlib.contextmanager
def weights_stay(flat: Array | None) -> Iterator[None]:
    """Weights change in no product inside, and lie where they are: they are rounded once, at the first product.

    The rounded weights are kept to the end, as those of PyTorch's autocast are. `flat` is the array that weights are
    views of; None: they are rounded at every product.
    """
    outer = _thread.__dict__.get("weights")
    _thread.weights = None if flat is None else _RoundedWeights(flat)
    try:
        yield
    finally:
        _thread.weights = outer


class DeviceProduct:
    """Called like ``numpy.matmul(a, b, out=out)``; sums and results are in the dtype of `out`.

    Operands are rounded to `half`, float16 or bfloat16, if given.
    """

    def __init__(self, half: np.dtype | None) -> None:
        # Of operands that are rounded already: float16, or uint16 for the bits of bfloat16.
        self.rounded_dtype: np.dtype | None = half if half is None or half == np.float16 else BITS

    def __call__(self, a: Array, b: Array, out: Array, accumulate: bool = False) -> Array:
        """``out = a b``, or with `accumulate` ``out += a b``."""
        a, b = self.rounded(a), self.rounded(b)
        if backend_of(out).has_cublas:
            return cublas.multiply(a, b, out, accumulate)
        product = arrays.module_of(out).matmul(*(_widened(each, out.dtype) for each in (a, b)))
        if accumulate:
            out += product
        else:
            out[...] = product
        return out

    def rounded(self, array: Array) -> Array:
        """An operand of any strides as it is multiplied: rounded in new memory, unless that is done or not wanted.

        Rows of a matrix whose length is no multiple of `ALIGNED`, such as logits, have a gap behind them.
        """
        if self.rounded_dtype is None or array.dtype == self.rounded_dtype:
            return array
        transposed = array.ndim > 1 and array.strides[-2] < array.strides[-1]
        rows = array.swapaxes(-1, -2) if transposed else array
        gap = -rows.shape[-1] % ALIGNED if rows.ndim == 2 and rows.shape[0] > 1 else 0
        halves = arrays.empty((*rows.shape[:-1], rows.shape[-1] + gap), self.rounded_dtype, like=array)
        if gap:
            halves = halves[:, :-gap]
        convert(rows, halves)
        return halves.swapaxes(-1, -2) if transposed else halves

    def rounded_weight(self, weight: Array, padded: int | None = None) -> Array:
        """A view of parameters, rounded if weights stay (`weights_stay`), else as it is unless it is to be padded.

        Zeros are added to the dimension `padded`, up to a multiple of `ALIGNED`: where rounded operands have an odd
        extent, such as that of a vocabulary, cuBLAS takes kernels that load single numbers.
        """
        if padded is not None and not weight.shape[padded] % ALIGNED:
            padded = None
        weights = _thread.__dict__.get("weights")
        if self.rounded_dtype is None or (weights is None and padded is None):
            return weight
        if weights is None:
            return self._padded(weight, padded)
        return weights.get(weight, self.rounded_dtype, padded, lambda: self._padded(weight, padded))

    def _padded(self, weight: Array, dim: int | None) -> Array:
        if dim is None:
            return self.rounded(weight)
        extent = weight.shape[dim]
        shape = (*weight.shape[:dim], padded_extent(extent), *weight.shape[dim + 1 :])
        whole = arrays.empty(shape, self.rounded_dtype, like=weight)
        before = [slice(None)] * dim
        convert(weight, whole[(*before, slice(extent))])
        whole[(*before, slice(extent, None))] = 0
        return whole


def padded_extent(extent: int) -> int:
    """The next multiple of `ALIGNED`."""
    return extent + -extent % ALIGNED


def _widened(array: Array, dtype: np.dtype) -> Array:
    if array.dtype == dtype:
        return array
    values = arrays.empty(array.shape, dtype, like=array)
    convert(array, values)
    return values
