"""Eight bits or one bit per element, with one scale per block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arguments import integer
from mpishard.backend import array as arrays
from mpishard.compression import device_kernels, kernels
from mpishard.compression.compressor import FusedCompressor, padded

Array = Any


@dataclass(frozen=True)
class _Blockwise(FusedCompressor):
    block: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", integer("block", self.block, least=1))

    def _parts(self, wire: Array, size: int) -> tuple[Array, Array]:
        """The scales, and the bytes after them."""
        scales = 4 * -(-size // self.block)
        return wire[:scales].view(np.float32), wire[scales:]

    def _rows(self, values: Array) -> Array:
        """The values as one row per block; the last row is padded with zeros."""
        rows = -(-values.size // self.block)
        if values.size == rows * self.block:
            return values.reshape(rows, self.block)
        filled = arrays.zeros(rows * self.block, values.dtype, like=values)
        filled[: values.size] = values
        return filled.reshape(rows, self.block)

    def _write(self, scales: Array, found: Array) -> None:
        """Write the scales as they are sent: NaN in the bits that it has on every processor."""
        module = arrays.module_of(found)
        scales[...] = module.where(module.isnan(found), kernels.NAN, found)

    def _for_each(self, scales: Array, values: Array) -> Array:
        """The scale of each element."""
        return arrays.module_of(values).repeat(scales.astype(values.dtype), self.block)[: values.size]


@dataclass(frozen=True)
class Int8Compressor(_Blockwise):
    """Integers from -127 to 127 times the scale of their block, its largest magnitude / 127 (Dettmers, 2016).

    A block with NaN or an infinity has a scale that is not finite, and all of it is decompressed to that scale.

    Parameters
    ----------
    block : int
        Elements that share a scale.

    Raises
    ------
    TypeError, ValueError
        If `block` is no whole number of at least 1.
    """

    block: int = 256

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return 4 * -(-size // self.block) + padded(size)

    def _compress_on_host(self, values: np.ndarray, wire: np.ndarray, rest: np.ndarray) -> None:
        scales, codes = self._parts(wire, values.size)
        bits, mask = kernels.bits(values)
        kernels.to_int8((values, bits, scales, codes.view(np.int8), rest), (int(self.block), mask))

    def _decompress_on_host(self, wire: np.ndarray, values: np.ndarray, add: bool) -> None:
        scales, codes = self._parts(wire, values.size)
        kernels.from_int8((values, scales, codes.view(np.int8)), (int(self.block), add))

    def _compress_by_cuda(self, values: Array, wire: Array, rest: Array) -> None:
        device_kernels.to_int8(values, *self._parts(wire, values.size), rest, self.block)

    def _decompress_by_cuda(self, wire: Array, values: Array, add: bool) -> None:
        device_kernels.from_int8(*self._parts(wire, values.size), values, self.block, add)

    def _compress_on_device(self, values: Array, wire: Array) -> None:
        module = arrays.module_of(values)
        scales, codes = self._parts(wire, values.size)
        rows = self._rows(values)
        self._write(scales, module.abs(rows).max(axis=1) / 127)
        finite = module.isfinite(scales)
        # Divide by the scale as it is sent, in float32.
        divisors = module.where(finite & (scales > 0), scales, 1).astype(values.dtype)
        levels = module.clip(module.rint(rows / divisors[:, None]), -127, 127)
        levels = module.where(finite[:, None], levels, 1)
        codes[: values.size].view(np.int8)[...] = levels.reshape(-1)[: values.size]

    def _decompress_on_device(self, wire: Array, values: Array) -> None:
        scales, codes = self._parts(wire, values.size)
        values[...] = codes[: values.size].view(np.int8)
        values *= self._for_each(scales, values)


@dataclass(frozen=True)
class SignCompressor(_Blockwise):
    """One bit per element, the sign, times the mean magnitude of its block (Karimireddy et al., "EF-SignSGD", 2019).

    Parameters
    ----------
    block : int
        Elements that share a scale.

    Raises
    ------
    TypeError, ValueError
        If `block` is no whole number of at least 1.
    """

    block: int = 1024

    def nbytes(self, size: int, dtype: np.dtype) -> int:
        return 4 * -(-size // self.block) + padded(-(-size // 8))

    def _compress_on_host(self, values: np.ndarray, wire: np.ndarray, rest: np.ndarray) -> None:
        kernels.to_signs((values, *self._parts(wire, values.size), rest), (int(self.block),))

    def _decompress_on_host(self, wire: np.ndarray, values: np.ndarray, add: bool) -> None:
        kernels.from_signs((values, *self._parts(wire, values.size)), (int(self.block), add))

    def _compress_by_cuda(self, values: Array, wire: Array, rest: Array) -> None:
        device_kernels.to_signs(values, *self._parts(wire, values.size), rest, self.block)

    def _decompress_by_cuda(self, wire: Array, values: Array, add: bool) -> None:
        device_kernels.from_signs(*self._parts(wire, values.size), values, self.block, add)

    def _compress_on_device(self, values: Array, wire: Array) -> None:
        module = arrays.module_of(values)
        scales, signs = self._parts(wire, values.size)
        sums = module.abs(self._rows(values)).sum(axis=1, dtype=np.float64)
        self._write(scales[:-1], sums[:-1] / self.block)
        self._write(scales[-1:], sums[-1:] / (values.size - (len(scales) - 1) * self.block))
        signs[: -(-values.size // 8)] = module.packbits(values >= 0)

    def _decompress_on_device(self, wire: Array, values: Array) -> None:
        module = arrays.module_of(values)
        scales, signs = self._parts(wire, values.size)
        positive = module.unpackbits(signs[: -(-values.size // 8)])[: values.size]
        scale = self._for_each(scales, values)
        values[...] = module.where(positive, scale, -scale)
