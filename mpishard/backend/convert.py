"""From float32 to half precision and back, for arrays of any strides."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.backend.cuda_source import CudaSource, launch
from mpishard.backend.kinds import backend_of

Array = Any
# Numbers in bfloat16 travel as their bits.
BITS = np.dtype(np.uint16)
_SOURCE = CudaSource(Path(__file__).with_name("cuda") / "convert.cu")
_THREADS, _WARP, _DIMENSIONS = 256, 32, 5
# Elements that a thread takes at once where all runs of as many are aligned; and the most packs of one launch.
_PACK, _MOST_PACKS = 4, 2**31


def convert(source: Array, target: Array) -> None:
    """``target[...] = source``, where uint16 stands for the bits of bfloat16; rounded to nearest even.

    What is too large for the target becomes infinite, without a warning. On a device it is one pass over memory, queued
    on the current stream. Raises ValueError if the shapes differ, or more than five dimensions do not lie one after the
    other in memory.
    """
    if source.shape != target.shape:
        raise ValueError(f"cannot convert an array of shape {source.shape} into one of shape {target.shape}")
    if not target.size:
        return
    if not backend_of(target).compiles_cuda:
        _convert_by_formula(source, target)
        return
    dtypes: dict[str, Any] = {"FROM": source.dtype, "TO": target.dtype}
    extents, from_strides, to_strides = _merged(source, target)
    if len(extents) == 1 and from_strides == to_strides == [1]:
        flat = _SOURCE.function("convert_flat", **dtypes)
        launch(flat, -(-extents[0] // (_PACK * _THREADS)), _THREADS, source, target, extents[0])
        return
    if len(extents) > _DIMENSIONS:
        raise ValueError(
            f"of arrays with gaps in memory {_DIMENSIONS} dimensions are converted, got {len(extents)}; copy"
        )
    missing = _DIMENSIONS - len(extents)
    extents, from_strides, to_strides = (
        [fill] * missing + each for each, fill in ((extents, 1), (from_strides, 0), (to_strides, 0))
    )
    rows = prod(extents[:-1])
    if _has_packs(source, extents, from_strides) and _has_packs(target, extents, to_strides):
        by_packs, packs = _SOURCE.function("convert_packs", **dtypes), extents[-1] // _PACK
        sizes = rows * packs, packs, *extents[1:-1]
        blocks = -(-rows * packs // _THREADS)
        launch(by_packs, blocks, _THREADS, source, target, *sizes, *from_strides[:-1], *to_strides[:-1])
        return
    by_rows = _SOURCE.function("convert_rows", **dtypes)
    blocks = -(-rows // (_THREADS // _WARP))
    launch(by_rows, blocks, _THREADS, source, target, rows, extents[-1], *extents[1:-1], *from_strides, *to_strides)


def _has_packs(array: Array, extents: list[int], strides: list[int]) -> bool:
    """Return True if rows are whole packs, and all of them aligned."""
    address = backend_of(array).address(array)
    aligned = not any(step % _PACK for step in (extents[-1], *strides[:-1])) and not address % (_PACK * array.itemsize)
    return aligned and strides[-1] == 1 and prod(extents) < _PACK * _MOST_PACKS


def _merged(source: Array, target: Array) -> tuple[list[int], list[int], list[int]]:
    """Extents, and strides in elements of both, with dimensions as one that lie one after the other in both."""
    extents: list[int] = []
    strides: list[list[int]] = []
    for extent, *both in zip(source.shape, source.strides, target.strides, strict=True):
        if extent == 1:
            continue
        steps = [step // array.itemsize for step, array in zip(both, (source, target), strict=True)]
        if extents and strides[-1] == [step * extent for step in steps]:
            extents[-1] *= extent
            strides[-1] = steps
        else:
            extents.append(extent)
            strides.append(steps)
    if not extents:
        extents, strides = [1], [[1, 1]]
    return extents, [step for step, _ in strides], [step for _, step in strides]


def _convert_by_formula(source: Array, target: Array) -> None:
    module = backend_of(target).module
    with np.errstate(over="ignore", invalid="ignore"):
        values = module.left_shift(source.astype(np.uint32), 16).view(np.float32) if source.dtype == BITS else source
        if target.dtype != BITS:
            target[...] = values.astype(target.dtype)
            return
        bits = values.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        target[...] = module.where(is_nan, (bits >> 16) | 0x40, rounded).astype(BITS)
