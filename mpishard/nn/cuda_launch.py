"""Launches the CUDA functions of the layers: their files, element types, blocks and threads.

See ``cuda/rows.cuh`` for how threads share rows, which the numbers here must fit.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from mpishard.backend import cuda_source
from mpishard.backend.cuda_source import CudaSource
from mpishard.backend.kinds import backend_of

Array = Any
WARP = 32
# Packs of a row that a thread of a team holds in registers.
HELD_PACKS = 8
# Bytes of shared memory that are kept for other arrays than ``extern`` ones.
OTHER_SHARED = 8192
# Of a block of tiles, or of rows that have a warp each.
MOST_THREADS = 128


@functools.cache
def source(name: str) -> CudaSource:
    """The file ``cuda/NAME.cu``."""
    return CudaSource(Path(__file__).with_name("cuda") / f"{name}.cu")


def launch(
    file: str,
    name: str,
    like: Array,
    stored: Array | None,
    blocks: int,
    threads: int,
    *arguments: Any,
    shared: int = 0,
) -> None:
    """Queue the function `name` of ``cuda/FILE.cu`` for computations in the dtype of `like`, float32 or float64.

    `stored` is the result that may have another dtype, if any; `shared` is the size in bytes of each block's ``extern
    __shared__`` array. Raises TypeError for arrays of other dtypes, ValueError for one that is not C-contiguous.
    """
    for each in arguments:
        if hasattr(each, "flags") and not each.flags.c_contiguous:
            raise ValueError(
                f"{name} takes C-contiguous arrays, got one of shape {each.shape} with strides {each.strides}; copy it "
                "to contiguous memory first"
            )
    function = source(file).function(name, REAL=like.dtype, STORED=(like if stored is None else stored).dtype)
    cuda_source.launch(function, blocks, threads, *arguments, shared=shared)


def processors(like: Array) -> int:
    """Multiprocessors of the device."""
    return backend_of(like).processors(like)


def most_shared(like: Array) -> int:
    """Bytes that the ``extern __shared__`` array of a block may have: all but what functions use besides."""
    return backend_of(like).shared_memory(like) - OTHER_SHARED


def ceiling(count: int, size: int) -> int:
    """Number of parts of a size that hold a count."""
    return -(-count // size)


def columns_of_pack(like: Array, columns: int = 0) -> int:
    """Elements of 16 bytes, which threads load and store at once; 1 where `columns` is no multiple of that."""
    pack = 16 // like.dtype.itemsize
    return 1 if columns % pack else pack


def row_team(like: Array, columns: int, most: int, packs: int = HELD_PACKS) -> int:
    """Threads of a row: few enough that each has several packs of it, enough to hold it if `most` do."""
    held, team = packs * columns_of_pack(like), WARP
    while team < most and team * held < columns:
        team *= 2
    return team


def row_blocks(rows: int, team: int) -> tuple[int, int]:
    """Blocks and threads, for teams of rows: several warps with a row each, or a block a row."""
    return (ceiling(rows, MOST_THREADS // WARP), MOST_THREADS) if team == WARP else (rows, team)


def tile_blocks(like: Array, rows: int, columns: int, each: int, pack: int | None = None) -> tuple[int, int]:
    """Blocks and threads for tiles of `each` rows, of which a thread has a pack of columns."""
    packs = ceiling(columns, columns_of_pack(like, columns) if pack is None else pack)
    threads = min(MOST_THREADS, max(1, ceiling(packs, WARP)) * WARP)
    return ceiling(packs, threads) * ceiling(rows, each), threads
