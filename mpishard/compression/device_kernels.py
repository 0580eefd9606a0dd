"""The compressors' loops over device arrays: CUDA functions of one pass over memory, as those of ``kernels.py``.

`rest` is empty, or gets the values minus the decompressed values; with `add` the decompressed values are added.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend.cuda_source import PRELUDE, CudaSource, launch

Array = Any
# Contracting a * b + c would give other bytes than the host.
SOURCE = CudaSource(PRELUDE.with_name("compressors.cu"), ("--fmad=false",))
_THREADS = 256


def to_halves(values: Array, halves: Array, rest: Array, largest: float) -> None:
    """Round to `halves`, of float16, or of uint16 for the bits of bfloat16; larger values become `largest`."""
    function = SOURCE.function("to_halves", REAL=values.dtype, STORED=halves.dtype)
    launch(function, _blocks(values.size), _THREADS, values, halves, rest, values.size, largest, rest.size > 0)


def from_halves(halves: Array, values: Array, add: bool) -> None:
    """The values of `to_halves`."""
    function = SOURCE.function("from_halves", REAL=values.dtype, STORED=halves.dtype)
    launch(function, _blocks(values.size), _THREADS, halves, values, values.size, add)


def to_int8(values: Array, scales: Array, codes: Array, rest: Array, run: int) -> None:
    """Whole numbers, as uint8, times a scale of each `run` elements, float32."""
    function = SOURCE.function("to_int8", REAL=values.dtype, STORED=np.float16)
    launch(function, scales.size, _THREADS, values, scales, codes, rest, values.size, run, rest.size > 0)


def from_int8(scales: Array, codes: Array, values: Array, run: int, add: bool) -> None:
    """The values of `to_int8`."""
    function = SOURCE.function("from_int8", REAL=values.dtype, STORED=np.float16)
    launch(function, _blocks(values.size), _THREADS, scales, codes, values, values.size, run, add)


def to_signs(values: Array, scales: Array, signs: Array, rest: Array, run: int) -> None:
    """A bit for each element, times a scale of each `run` elements, float32."""
    of_scales = SOURCE.function("to_sign_scales", REAL=values.dtype, STORED=np.float16)
    launch(of_scales, scales.size, _THREADS, values, scales, rest, values.size, run, rest.size > 0)
    of_bits = SOURCE.function("to_signs", REAL=values.dtype, STORED=np.float16)
    launch(of_bits, _blocks(-(-values.size // 8)), _THREADS, values, signs, values.size)


def from_signs(scales: Array, signs: Array, values: Array, run: int, add: bool) -> None:
    """The values of `to_signs`."""
    function = SOURCE.function("from_signs", REAL=values.dtype, STORED=np.float16)
    launch(function, _blocks(values.size), _THREADS, scales, signs, values, values.size, run, add)


def _blocks(threads: int) -> int:
    return -(-threads // _THREADS)
