"""Sixteen bits an element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from mpishard import array as arrays
from mpishard.compression.compressor import PieceCompressor, padded

Array = Any
_LARGEST_HALF = float(np.finfo(np.float16).max)


class _Cast(PieceCompressor):
    dtype: ClassVar[Any]

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return padded(2 * size)

    def compress(self, values: Array, wire: Array) -> None:
        self._view(values, wire)[...] = values

    def decompress(self, wire: Array, values: Array) -> None:
        values[...] = self._view(values, wire)

    def _view(self, values: Array, wire: Array) -> Array:
        return wire[: 2 * values.size].view(self.dtype)


@dataclass(frozen=True)
class Float16Compressor(_Cast):
    """IEEE half precision: 11 bits, up to 65504; larger values are sent as that, and the rest later."""

    dtype: ClassVar[Any] = np.float16

    def compress(self, values: Array, wire: Array) -> None:
        half, module = self._view(values, wire), arrays.module_of(values)
        half[...] = module.clip(values, -_LARGEST_HALF, _LARGEST_HALF)
        infinite = module.isinf(values)
        half[infinite] = values[infinite]


@dataclass(frozen=True)
class BFloat16Compressor(_Cast):
    """The upper half of a float32: 8 bits, and its range."""

    dtype: ClassVar[Any] = ml_dtypes.bfloat16
