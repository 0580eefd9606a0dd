"""Sixteen bits per element, rounded to nearest even; on host and device, float64 is rounded to float32 first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpishard.backend import array as arrays
from mpishard.backend.compiled import HostFunction
from mpishard.compression import device_kernels, kernels
from mpishard.compression.compressor import FusedCompressor, padded

Array = Any


class _Cast(FusedCompressor):
    _to: ClassVar[HostFunction]
    _from: ClassVar[HostFunction]
    _device_dtype: ClassVar[Any]
    _largest: ClassVar[float]

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return padded(2 * size)

    def _compress_on_host(self, values: np.ndarray, wire: np.ndarray, rest: np.ndarray) -> None:
        self._to((values, _bits(wire, values.size), rest))

    def _decompress_on_host(self, wire: np.ndarray, values: np.ndarray, add: bool) -> None:
        self._from((values, _bits(wire, values.size)), (add,))

    def _compress_by_cuda(self, values: Array, wire: Array, rest: Array) -> None:
        halves = _bits(wire, values.size).view(self._device_dtype)
        device_kernels.to_halves(values, halves, rest, self._largest)

    def _decompress_by_cuda(self, wire: Array, values: Array, add: bool) -> None:
        device_kernels.from_halves(_bits(wire, values.size).view(self._device_dtype), values, add)


@dataclass(frozen=True)
class Float16Compressor(_Cast):
    """IEEE half precision: 11 bits, up to 65504; a larger value is sent as 65504, and its remainder in later steps."""

    _to, _from = kernels.to_float16, kernels.from_float16
    _device_dtype, _largest = np.float16, kernels.LARGEST_HALF

    def _compress_on_device(self, values: Array, wire: Array) -> None:
        module, largest = arrays.module_of(values), kernels.LARGEST_HALF
        kept = module.where(module.isfinite(values), module.clip(values, -largest, largest), values)
        _bits(wire, values.size).view(np.float16)[...] = kept.astype(np.float32)

    def _decompress_on_device(self, wire: Array, values: Array) -> None:
        values[...] = _bits(wire, values.size).view(np.float16)


@dataclass(frozen=True)
class BFloat16Compressor(_Cast):
    """The upper half of a float32: 8 bits of precision, and the range of a float32."""

    _to, _from = kernels.to_bfloat16, kernels.from_bfloat16
    _device_dtype, _largest = np.uint16, np.inf

    # In integers, since CuPy has no bfloat16.
    def _compress_on_device(self, values: Array, wire: Array) -> None:
        module, singles = arrays.module_of(values), values.astype(np.float32)
        bits = singles.view(np.uint32)
        odd = module.right_shift(bits, 16) & 1
        rounded = module.where(module.isnan(singles), bits | 0x400000, bits + odd + 0x7FFF)
        _bits(wire, values.size)[...] = module.right_shift(rounded, 16)

    def _decompress_on_device(self, wire: Array, values: Array) -> None:
        upper = _bits(wire, values.size).astype(np.uint32)
        values[...] = arrays.module_of(values).left_shift(upper, 16).view(np.float32)


def _bits(wire: Array, size: int) -> Array:
    return wire[: 2 * size].view(np.uint16)
