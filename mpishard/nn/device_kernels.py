"""The functions of ``kernels`` for device arrays, as CUDA functions: one pass over memory each, no temporary arrays.

What they compute is said there.  Arrays are C-contiguous.  A row whose index or target is out of range becomes NaN.
Sums are taken in an order that the shape alone decides: bits depend neither on timing nor on the device, nor on where
in memory an array begins.  Results that only products take may be stored in half precision: the ``y`` of norms and
activations, heads that are split or columns that are merged, and the ``rounded`` results of the softmax may have dtype
float16, or uint16 for the bits of bfloat16, where the other arrays are float32.  See ``cuda/rows.cuh`` for how threads
share rows, which the numbers here must fit.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np

from mpishard.backend import cuda_source
from mpishard.backend.array import empty, module_of
from mpishard.backend.cuda_source import CudaSource
from mpishard.backend.kinds import backend_of
from mpishard.backend.streams import PendingNumber
from mpishard.nn.checks import same_extents

Array = Any
Indices = Any


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
        if hasattr(each, "flags") and type(each) is not type(like):
            raise TypeError(
                f"{name} takes arrays of one kind, got a {type(each).__module__}.{type(each).__name__} of shape "
                f"{each.shape} beside a {type(like).__module__}.{type(like).__name__}; copy it to the device first"
            )
    function = source(file).function(name, REAL=like.dtype, STORED=(like if stored is None else stored).dtype)
    cuda_source.launch(function, blocks, threads, *arguments, shared=shared)


def processors(like: Array) -> int:
    """Multiprocessors of the device."""
    return backend_of(like).processors(like)


def most_shared(like: Array) -> int:
    """Bytes that the ``extern __shared__`` array of a block may have: all but what functions use otherwise."""
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


# Heads of attention.

# Rows of a tile.
ROWS_OF_HEADS = 8
# Of a block of the softmax: queries, threads, and packs of scores that a thread holds in registers.
QUERIES, SOFTMAX_THREADS, HELD_SCORES = 32, 512, 8
# Heads of rows that a block takes.
HEADS = 4


def split_heads(x_nd: Array, bias_d: Array, heads_sbhtd: Array) -> None:
    kinds, batch, heads, length, width = heads_sbhtd.shape
    blocks, threads = tile_blocks(
        x_nd, batch * length, heads * kinds * width, ROWS_OF_HEADS, columns_of_pack(x_nd, width)
    )
    given = x_nd, bias_d, heads_sbhtd, kinds, batch, heads, length, width, ROWS_OF_HEADS
    launch("heads", "split_heads", x_nd, heads_sbhtd, blocks, threads, *given)


def merge_heads(x_nd: Array, heads_sbhtd: Array) -> None:
    kinds, batch, heads, length, width = heads_sbhtd.shape
    columns = heads * kinds * width
    blocks, threads = tile_blocks(
        heads_sbhtd, batch * length, columns, ROWS_OF_HEADS, columns_of_pack(heads_sbhtd, width)
    )
    given = x_nd, heads_sbhtd, kinds, batch, heads, length, width, ROWS_OF_HEADS
    launch("heads", "merge_heads", heads_sbhtd, x_nd, blocks, threads, *given)


def split_with_products(dy_nc: Array, y_nc: Array, dy_sbhtd: Array, delta_sbht: Array) -> None:
    kinds, batch, heads, length, width = dy_sbhtd.shape
    blocks = ceiling(batch * length * heads * kinds, HEADS)
    given = dy_nc, y_nc, dy_sbhtd, delta_sbht, kinds, batch, heads, length, width
    launch("heads", "split_with_products", dy_nc, dy_sbhtd, blocks, HEADS * WARP, *given)


def rotate(x_ntd: Array, cos_tp: Array, sin_tp: Array, apart: int, backward: int) -> None:
    count, length, width = x_ntd.shape
    rows, pairs = count * length, width // 2
    blocks, threads = tile_blocks(x_ntd, rows, pairs, ROWS_OF_HEADS, columns_of_pack(x_ntd, pairs) if apart else 1)
    given = x_ntd, cos_tp, sin_tp, -1 if backward else 1, rows, length, pairs, apart, ROWS_OF_HEADS
    launch("heads", "rotate", x_ntd, None, blocks, threads, *given)


def causal_softmax(
    scores_gkq: Array,
    logsum_gt: Array,
    total_t: Array,
    offset: int,
    scale: float,
    rounded_gkq: Array | None = None,
) -> None:
    """With `rounded`, in half precision, the probabilities go there, and `scores` holds nothing defined."""
    group, keys, queries = scores_gkq.shape
    blocks = group * ceiling(queries, QUERIES)
    packs = ceiling(keys * QUERIES, SOFTMAX_THREADS * columns_of_pack(scores_gkq))  # of a thread
    shared = max(0, packs - HELD_SCORES) * SOFTMAX_THREADS * 16
    fits = columns_of_pack(scores_gkq, queries) > 1 and shared <= most_shared(scores_gkq)
    shared = shared if fits else 0
    given = logsum_gt, keys, queries, logsum_gt.shape[1], offset, scale, fits
    if rounded_gkq is None:
        name = "causal_softmax"
        launch("softmax", name, scores_gkq, None, blocks, SOFTMAX_THREADS, scores_gkq, *given, shared=shared)
    else:
        name, both = "causal_softmax_rounded", (scores_gkq, rounded_gkq)
        launch("softmax", name, *both, blocks, SOFTMAX_THREADS, *both, *given, shared=shared)


def causal_softmax_backward(
    scores_gkq: Array,
    dscores_gtt: Array,
    logsum_gt: Array,
    delta_gt: Array,
    scale: float,
    rounded_gkq: Array | None = None,
    drounded_gtt: Array | None = None,
) -> None:
    """With `rounded` and `drounded`, in half precision, results go there; `scores`, `dscores` hold nothing defined."""
    group, keys, queries = scores_gkq.shape
    _, all_keys, length = dscores_gtt.shape
    pack = columns_of_pack(scores_gkq, math.gcd(queries, length))
    blocks, threads = tile_blocks(scores_gkq, group * keys, queries, ROWS_OF_HEADS, pack)
    given = scores_gkq, dscores_gtt, logsum_gt, delta_gt
    sizes = group * keys, keys, queries, all_keys, length, scale, ROWS_OF_HEADS
    if rounded_gkq is None:
        launch("softmax", "causal_softmax_backward", scores_gkq, None, blocks, threads, *given, *sizes)
    else:
        results = rounded_gkq, drounded_gtt
        name = "causal_softmax_backward_rounded"
        launch("softmax", name, scores_gkq, rounded_gkq, blocks, threads, *given, *results, *sizes)


# Rows of a tile, and threads of a block, of functions that take no sums.
ROWS, THREADS = 8, 128
# The most threads of a team: where they hold a row in registers, and where they do not.
ROW_TEAM, LOGITS_TEAM = 512, 1024
# Packs of a row that a thread holds in norms, and in their backward pass: there half of it where rows are no multiple
# of a pack.
HELD_PACKS_FORWARD, HELD_PACKS_BACKWARD = 6, 4
# Blocks that take part of the column sums each: four for each multiprocessor of a large device, whatever it is.
SUMMING_BLOCKS = 528
# The same in the backward pass of norms, for rows of 1025 to 2048 columns; narrower ones take more.
NORM_BLOCKS = 512
# The most tokens that are sorted by comparing each with each: more have a sort for which CuPy waits.
COUNTED_ROWS = 2**15
# Rows that one thread adds up, of column sums.
SUMMED_ROWS = 32


@same_extents("weight_vc", "indices_n", "y_nc")
def lookup(weight_vc: Array, indices_n: Indices, y_nc: Array, first: int, count: int) -> None:
    rows, columns = y_nc.shape
    blocks, threads = tile_blocks(y_nc, rows, columns, ROWS)
    scalars = first, len(weight_vc), count, rows, columns, ROWS
    launch("embedding", "lookup", y_nc, None, blocks, threads, weight_vc, indices_n, y_nc, *scalars)


@same_extents("dy_nc", "indices_n", "dweight_vc")
def scatter_add(dy_nc: Array, indices_n: Indices, dweight_vc: Array, first: int) -> None:
    rows, columns = dy_nc.shape
    if rows == 0:
        return
    keys_n = empty(rows, np.int64, like=dy_nc)
    scalars = first, len(dweight_vc), rows
    launch("embedding", "make_keys", dy_nc, None, ceiling(rows, THREADS), THREADS, indices_n, keys_n, *scalars)
    if rows <= COUNTED_ROWS:
        unsorted_n, keys_n = keys_n, empty(rows, np.int64, like=dy_nc)
        launch("embedding", "sort_keys", dy_nc, None, ceiling(rows, 2 * WARP), 2 * WARP, unsorted_n, keys_n, rows)
    else:
        keys_n = module_of(keys_n).sort(keys_n)
    blocks = rows * ceiling(columns, WARP * columns_of_pack(dy_nc, columns))
    launch("embedding", "add_runs", dy_nc, None, blocks, 8 * WARP, dy_nc, keys_n, dweight_vc, rows, columns)


@same_extents("y_nc", "bias_c", "residual_nc")
def add_bias(y_nc: Array, bias_c: Array, residual_nc: Array) -> None:
    rows, columns = y_nc.shape
    blocks, threads = tile_blocks(y_nc, rows, columns, ROWS)
    scalars = rows, columns, ROWS
    launch("activations", "add_bias", y_nc, None, blocks, threads, y_nc, bias_c, residual_nc, *scalars)


@same_extents("x_nc", "weight_c")
def layer_norm(
    x_nc: Array, weight_c: Array, bias_c: Array, y_nc: Array, mean_n: Array, scale_n: Array, epsilon: float
) -> None:
    rows, columns = x_nc.shape
    team = row_team(x_nc, columns, ROW_TEAM, HELD_PACKS_FORWARD)
    given = x_nc, weight_c, bias_c, y_nc, mean_n, scale_n, epsilon, rows, columns, team
    launch("norms", "layer_norm", x_nc, y_nc, *row_blocks(rows, team), *given)


@same_extents("x_nc", "weight_c")
def rms_norm(x_nc: Array, weight_c: Array, y_nc: Array, scale_n: Array, epsilon: float) -> None:
    rows, columns = x_nc.shape
    team = row_team(x_nc, columns, ROW_TEAM, HELD_PACKS_FORWARD)
    given = x_nc, weight_c, y_nc, scale_n, epsilon, rows, columns, team
    launch("norms", "rms_norm", x_nc, y_nc, *row_blocks(rows, team), *given)


@same_extents("dy_nc", "x_nc", "dx_nc")
def layer_norm_backward(
    dy_nc: Array,
    x_nc: Array,
    mean_n: Array,
    scale_n: Array,
    weight_c: Array,
    dx_nc: Array,
    dweight_c: Array,
    dbias_c: Array,
) -> None:
    _norm_backward(dy_nc, x_nc, mean_n, scale_n, weight_c, dx_nc, (dweight_c, dbias_c))


@same_extents("dy_nc", "x_nc", "dx_nc")
def rms_norm_backward(
    dy_nc: Array, x_nc: Array, scale_n: Array, weight_c: Array, dx_nc: Array, dweight_c: Array
) -> None:
    _norm_backward(dy_nc, x_nc, None, scale_n, weight_c, dx_nc, (dweight_c,))


def _norm_backward(
    dy_nc: Array,
    x_nc: Array,
    mean_n: Array | None,
    scale_n: Array,
    weight_c: Array,
    dx_nc: Array,
    sums: tuple[Array, ...],
) -> None:
    """Both backward passes; `sums`: the gradients of the weight and, with means, of the bias."""
    rows, columns = x_nc.shape
    if not x_nc.size:
        return
    width = columns * len(sums)
    packs = HELD_PACKS_BACKWARD if columns_of_pack(x_nc, columns) > 1 else HELD_PACKS_BACKWARD // 2
    team = row_team(x_nc, columns, ROW_TEAM, packs)
    if columns <= team * packs * columns_of_pack(x_nc):
        # Narrow rows need more blocks to keep the memory busy: as many as there are registers for.
        parts = min(ceiling(rows, 8), NORM_BLOCKS * min(4, max(1, 2048 // columns)))
        partial = empty(parts * width, x_nc.dtype, like=x_nc)
        given = scale_n, weight_c, dx_nc, partial, rows, columns
        if mean_n is None:
            launch("norms", "rms_norm_backward", x_nc, None, parts, team, dy_nc, x_nc, *given)
        else:
            launch("norms", "layer_norm_backward", x_nc, None, parts, team, dy_nc, x_nc, mean_n, *given)
    else:
        plain_n, along_n = empty((2, rows), x_nc.dtype, like=x_nc)
        centered = int(mean_n is not None)
        rows_nc = dy_nc, x_nc, scale_n if mean_n is None else mean_n, scale_n, weight_c
        launch("norms", "norm_means", x_nc, None, rows, ROW_TEAM, *rows_nc, plain_n, along_n, rows, columns, centered)
        each = _rows_of_parts(x_nc, rows, columns, pack=1)
        parts = ceiling(rows, each)
        partial = empty(parts * width, x_nc.dtype, like=x_nc)
        blocks, threads = tile_blocks(x_nc, rows, columns, each, pack=1)
        results = plain_n, along_n, dx_nc, partial, rows, columns, centered, each
        launch("norms", "norm_backward_of_tiles", x_nc, None, blocks, threads, *rows_nc, *results)
    _add_sums(partial, parts, *sums)


@same_extents("x_nc", "bias_c")
def gelu(x_nc: Array, bias_c: Array, y_nc: Array) -> None:
    rows, columns = x_nc.shape
    blocks, threads = tile_blocks(x_nc, rows, columns, ROWS)
    launch("activations", "gelu", x_nc, y_nc, blocks, threads, x_nc, bias_c, y_nc, rows, columns, ROWS)


@same_extents("dx_nc", "slope_nc", "dbias_c")
def gelu_backward(dx_nc: Array, slope_nc: Array, dbias_c: Array) -> None:
    rows, columns = dx_nc.shape
    if not dx_nc.size:
        return
    each = _rows_of_parts(dx_nc, rows, columns)
    parts = ceiling(rows, each)
    partial = empty(parts * columns, dx_nc.dtype, like=dx_nc)
    blocks, threads = tile_blocks(dx_nc, rows, columns, each)
    given = dx_nc, slope_nc, partial, rows, columns, each
    launch("activations", "gelu_backward", dx_nc, None, blocks, threads, *given)
    _add_sums(partial, parts, dbias_c)


def gelu_backward_of_rounded(dx_nc: Array, before_nc: Array, dbias_c: Array) -> None:
    """As `gelu_backward` in half precision but for the bias, given what GELU was applied to in the derivative's place.

    `dx`, float16 or uint16 for the bits of bfloat16, becomes the product, rounded. The column sums of the product, not
    rounded, are added to `dbias`, which is float32.
    """
    rows, columns = dx_nc.shape
    if not dx_nc.size:
        return
    pack = columns_of_pack(dx_nc, columns)
    each = _rows_of_parts(dx_nc, rows, columns, pack)
    parts = ceiling(rows, each)
    partial = empty(parts * columns, dbias_c.dtype, like=dx_nc)
    blocks, threads = tile_blocks(dx_nc, rows, columns, each, pack)
    given = dx_nc, before_nc, partial, rows, columns, each
    launch("activations", "gelu_backward_of_rounded", dbias_c, dx_nc, blocks, threads, *given)
    _add_sums(partial, parts, dbias_c)


def swiglu(gate_nc: Array, up_nc: Array, y_nc: Array) -> None:
    blocks = ceiling(gate_nc.size, THREADS * columns_of_pack(gate_nc))
    launch("activations", "swiglu", gate_nc, y_nc, blocks, THREADS, gate_nc, up_nc, y_nc, gate_nc.size)


def swiglu_backward(dgate_nc: Array, dup_nc: Array, dy_nc: Array) -> None:
    blocks = ceiling(dy_nc.size, THREADS * columns_of_pack(dy_nc))
    launch("activations", "swiglu_backward", dy_nc, None, blocks, THREADS, dgate_nc, dup_nc, dy_nc, dy_nc.size)


def drop(x_nc: Array, keys_n: Indices, positions_n: Indices, rate: float) -> None:
    rows, columns = x_nc.shape
    blocks, threads = tile_blocks(x_nc, rows, columns, ROWS)
    scalars = rate, 1 / (1 - rate), rows, columns, ROWS
    launch("activations", "drop", x_nc, None, blocks, threads, x_nc, keys_n, positions_n, *scalars)


@same_extents("logits_nv", "targets_n")
def cross_entropy(logits_nv: Array, targets_n: Indices) -> SupportsFloat:
    return cross_entropy_rounded(logits_nv, targets_n, logits_nv, logits_nv.shape[1], 1)


def cross_entropy_rounded(
    logits_np: Array, targets_n: Indices, gradient_np: Array, columns: int, scale: float
) -> SupportsFloat:
    """`cross_entropy` of the first columns; `gradient` gets its gradient times a scale, and zeros in the other columns.

    The logits may be overwritten.
    """
    rows, stride = logits_np.shape
    losses_n = empty(rows, np.float64, like=logits_np)
    given = logits_np, targets_n, gradient_np, losses_n, rows, columns, stride, scale
    if stride > ROW_TEAM * HELD_PACKS * columns_of_pack(logits_np):
        name, blocks = "cross_entropy_of_long_rows", min(rows, processors(logits_np))
        shared = columns // columns_of_pack(logits_np) * 16  # bytes of the packs of a row
        fits = shared <= most_shared(logits_np)
        launch("loss", name, logits_np, gradient_np, blocks, LOGITS_TEAM, *given, fits, shared=shared if fits else 0)
    else:
        team = row_team(logits_np, stride, ROW_TEAM)
        launch("loss", "cross_entropy", logits_np, gradient_np, *row_blocks(rows, team), *given, team)
    return _sum(losses_n)


def row_maximum(logits_nv: Array, top_n: Array) -> None:
    rows, columns = logits_nv.shape
    team = row_team(logits_nv, columns, LOGITS_TEAM)
    launch("loss", "row_maximum", logits_nv, None, *row_blocks(rows, team), logits_nv, top_n, rows, columns, team)


def exponentials(
    logits_nv: Array, targets_n: Indices, top_n: Array, total_n: Array, picked_n: Array, first: int, count: int
) -> None:
    rows, columns = logits_nv.shape
    team = row_team(logits_nv, columns, LOGITS_TEAM)
    given = logits_nv, targets_n, top_n, total_n, picked_n, first, count, rows, columns, team
    launch("loss", "exponentials", logits_nv, None, *row_blocks(rows, team), *given)


def cross_entropy_of_sums(
    weights_nv: Array, targets_n: Indices, total_n: Array, picked_n: Array, first: int
) -> SupportsFloat:
    rows, columns = weights_nv.shape
    losses_n = empty(rows, np.float64, like=weights_nv)
    blocks = ceiling(rows, THREADS)
    launch("loss", "losses_of_sums", weights_nv, None, blocks, THREADS, total_n, picked_n, losses_n, rows)
    blocks, threads = tile_blocks(weights_nv, rows, columns, ROWS)
    given = weights_nv, targets_n, total_n, first, rows, columns, ROWS
    launch("loss", "gradient_of_sums", weights_nv, None, blocks, threads, *given)
    return _sum(losses_n)


def _sum(losses_n: Array) -> PendingNumber:
    total = empty(1, losses_n.dtype, like=losses_n)
    launch("sums", "sum_all", losses_n, None, 1, 1024, losses_n, total, len(losses_n))
    return PendingNumber(total)


def _rows_of_parts(like: Array, rows: int, columns: int, pack: int | None = None) -> int:
    """Rows of a tile that takes column sums: enough blocks for a large device, and few partial sums."""
    across, _ = tile_blocks(like, 1, columns, 1, pack)
    return max(8, ceiling(rows, max(1, 4 * SUMMING_BLOCKS // across)))


def _add_sums(partial: Array, parts: int, *sums: Array) -> None:
    """Add the column sums of `partial`, of `parts` rows, to one or two arrays, which have its columns together."""
    columns = sum(len(each) for each in sums)
    while parts > SUMMED_ROWS:
        fewer = ceiling(parts, SUMMED_ROWS)
        target = empty(fewer * columns, partial.dtype, like=partial)
        blocks, threads = tile_blocks(partial, parts, columns, SUMMED_ROWS, pack=1)
        given = partial, target, target, parts, columns, SUMMED_ROWS, columns, 0
        launch("sums", "sum_rows", partial, None, blocks, threads, *given)
        partial, parts = target, fewer
    blocks, threads = tile_blocks(partial, parts, columns, parts, pack=1)
    given = partial, sums[0], sums[-1], parts, columns, parts, len(sums[0]), 1
    launch("sums", "sum_rows", partial, None, blocks, threads, *given)
