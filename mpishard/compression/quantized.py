"""Eight bits an element and one, with a scale a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard import array as arrays
from mpishard.compression.compressor import PieceCompressor, padded

Array = Any
_LEVELS = 127.0


@dataclass(frozen=True)
class _Blockwise(PieceCompressor):
    block: int

    def __post_init__(self) -> None:
        if not isinstance(self.block, int | np.integer) or self.block < 1:
            raise ValueError(f"block={self.block!r} must be a whole number of at least 1")


@dataclass(frozen=True)
class Int8Compressor(_Blockwise):
    """Whole numbers from -127 to 127 times a scale a block, its largest magnitude / 127 (Dettmers, 2016).

    Parameters
    ----------
    block : int
        Elements that share a scale.
    """

    block: int = 256

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return 4 * -(-size // self.block) + padded(size)

    def compress(self, values: Array, wire: Array) -> None:
        module = arrays.module_of(values)
        scales, rest = _parts(wire, values.size, self.block)
        rows = _blocks(values, self.block)
        scales[...] = module.abs(rows).max(axis=1) / _LEVELS
        # By the scale that is sent; a block of zeros has zeros, and one whose scale is not finite anything but zeros,
        # so that it is not finite at the other end.
        usable = module.isfinite(scales) & (scales > 0)
        factors = 1 / module.where(usable, scales, 1).astype(values.dtype)
        levels = module.where(usable[:, None], rows, ~module.isfinite(scales)[:, None])
        levels = module.rint(levels * factors[:, None]).clip(-_LEVELS, _LEVELS)
        rest[: values.size].view(np.int8)[...] = levels.reshape(-1)[: values.size]

    def decompress(self, wire: Array, values: Array) -> None:
        scales, rest = _parts(wire, values.size, self.block)
        codes = rest[: values.size].view(np.int8)
        values[...] = codes
        values *= scales.astype(values.dtype).repeat(self.block)[: values.size]


@dataclass(frozen=True)
class SignCompressor(_Blockwise):
    """One bit an element, times the mean magnitude of its block (Karimireddy et al., "EF-SignSGD", 2019).

    Parameters
    ----------
    block : int
        Elements that share a scale.
    """

    block: int = 1024

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return 4 * -(-size // self.block) + padded(-(-size // 8))

    def compress(self, values: Array, wire: Array) -> None:
        module = arrays.module_of(values)
        scales, rest = _parts(wire, values.size, self.block)
        rows = _blocks(values, self.block)
        sizes = np.full(len(rows), self.block)
        if values.size:
            sizes[-1] = values.size - (len(rows) - 1) * self.block
        scales[...] = module.abs(rows).sum(axis=1) / module.asarray(sizes)
        rest[: -(-values.size // 8)] = module.packbits(values >= 0)

    def decompress(self, wire: Array, values: Array) -> None:
        module = arrays.module_of(values)
        scales, rest = _parts(wire, values.size, self.block)
        positive = module.unpackbits(rest[: -(-values.size // 8)])[: values.size]
        values[...] = 2.0 * positive - 1.0
        values *= scales.astype(values.dtype).repeat(self.block)[: values.size]


def _parts(wire: Array, size: int, block: int) -> tuple[Array, Array]:
    """The scales, and what follows."""
    scales = 4 * -(-size // block)
    return wire[:scales].view(np.float32), wire[scales:]


def _blocks(values: Array, block: int) -> Array:
    """Rows of one block each, the last filled up with zeros."""
    rows = -(-values.size // block)
    if values.size == rows * block:
        return values.reshape(rows, block)
    filled = arrays.zeros(rows * block, values.dtype, like=values)
    filled[: values.size] = values
    return filled.reshape(rows, block)
