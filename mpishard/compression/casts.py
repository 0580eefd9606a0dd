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


@dataclass(frozen=True)
class Float16Compressor(PieceCompressor):
    """IEEE half precision: 11 bits, up to 65504; larger values are sent as that, and the rest later."""

    name: ClassVar[str] = "float16"

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return padded(2 * size)

    def compress(self, values: Array, wire: Array) -> None:
        half = wire[: 2 * values.size].view(np.float16)
        half[...] = arrays.module_of(values).clip(values, -_LARGEST_HALF, _LARGEST_HALF)
        infinite = arrays.module_of(values).isinf(values)
        half[infinite] = values[infinite]

    def decompress(self, wire: Array, values: Array) -> None:
        values[...] = wire[: 2 * values.size].view(np.float16)


@dataclass(frozen=True)
class BFloat16Compressor(PieceCompressor):
    """The upper half of a float32: 8 bits, and its range."""

    name: ClassVar[str] = "bfloat16"

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return padded(2 * size)

    def compress(self, values: Array, wire: Array) -> None:
        wire[: 2 * values.size].view(ml_dtypes.bfloat16)[...] = values

    def decompress(self, wire: Array, values: Array) -> None:
        values[...] = wire[: 2 * values.size].view(ml_dtypes.bfloat16)
