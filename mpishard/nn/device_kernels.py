"""The functions of ``formulas`` for device arrays, as CUDA functions: one pass over memory each, no temporary arrays.

Arrays are C-contiguous.  Sums are taken in an order that the shape alone decides: bits depend neither on timing nor on
the device, nor on where in memory an array begins.  Results that only products take may be stored in half precision:
the ``y`` of norms and activations, heads that are split or columns that are merged, and the ``rounded`` results of the
softmax may have dtype float16, or uint16 for the bits of bfloat16, where the other arrays are float32.

The functions of `mpishard.nn.device_heads` are found here, too, and one that ``formulas`` has not:
`gelu_backward_of_rounded`.
"""

from __future__ import annotations

from typing import Any, SupportsFloat

import numpy as np

from mpishard.backend.array import empty, module_of
from mpishard.backend.streams import PendingNumber
from mpishard.nn.cuda_launch import (
    HELD_PACKS,
    WARP,
    ceiling,
    columns_of_pack,
    launch,
    most_shared,
    processors,
    row_blocks,
    row_team,
    tile_blocks,
)
from mpishard.nn.device_heads import (  # noqa: F401 - all functions of ``formulas`` are found here
    causal_softmax,
    causal_softmax_backward,
    merge_heads,
    rotate,
    split_heads,
    split_with_products,
)

Array = Any

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


def lookup(weight_vc: Array, indices_n: Array, y_nc: Array, first: int) -> None:
    rows, columns = y_nc.shape
    blocks, threads = tile_blocks(y_nc, rows, columns, ROWS)
    scalars = first, len(weight_vc), rows, columns, ROWS
    launch("embedding", "lookup", y_nc, None, blocks, threads, weight_vc, indices_n, y_nc, *scalars)


def scatter_add(dy_nc: Array, indices_n: Array, dweight_vc: Array, first: int) -> None:
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


def add_bias(y_nc: Array, bias_c: Array, residual_nc: Array) -> None:
    rows, columns = y_nc.shape
    blocks, threads = tile_blocks(y_nc, rows, columns, ROWS)
    scalars = rows, columns, ROWS
    launch("activations", "add_bias", y_nc, None, blocks, threads, y_nc, bias_c, residual_nc, *scalars)


def layer_norm(
    x_nc: Array, weight_c: Array, bias_c: Array, y_nc: Array, mean_n: Array, scale_n: Array, epsilon: float
) -> None:
    rows, columns = x_nc.shape
    team = row_team(x_nc, columns, ROW_TEAM, HELD_PACKS_FORWARD)
    given = x_nc, weight_c, bias_c, y_nc, mean_n, scale_n, epsilon, rows, columns, team
    launch("norms", "layer_norm", x_nc, y_nc, *row_blocks(rows, team), *given)


def rms_norm(x_nc: Array, weight_c: Array, y_nc: Array, scale_n: Array, epsilon: float) -> None:
    rows, columns = x_nc.shape
    team = row_team(x_nc, columns, ROW_TEAM, HELD_PACKS_FORWARD)
    given = x_nc, weight_c, y_nc, scale_n, epsilon, rows, columns, team
    launch("norms", "rms_norm", x_nc, y_nc, *row_blocks(rows, team), *given)


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


def gelu(x_nc: Array, bias_c: Array, y_nc: Array) -> None:
    rows, columns = x_nc.shape
    blocks, threads = tile_blocks(x_nc, rows, columns, ROWS)
    launch("activations", "gelu", x_nc, y_nc, blocks, threads, x_nc, bias_c, y_nc, rows, columns, ROWS)


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


def drop(x_nc: Array, keys_n: Array, positions_n: Array, rate: float) -> None:
    rows, columns = x_nc.shape
    blocks, threads = tile_blocks(x_nc, rows, columns, ROWS)
    scalars = rate, 1 / (1 - rate), rows, columns, ROWS
    launch("activations", "drop", x_nc, None, blocks, threads, x_nc, keys_n, positions_n, *scalars)


def cross_entropy(logits_nv: Array, targets_n: Array) -> SupportsFloat:
    return cross_entropy_rounded(logits_nv, targets_n, logits_nv, logits_nv.shape[1], 1)


def cross_entropy_rounded(
    logits_np: Array, targets_n: Array, gradient_np: Array, columns: int, scale: float
) -> SupportsFloat:
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


def exponentials(logits_nv: Array, targets_n: Array, top_n: Array, total_n: Array, picked_n: Array, first: int) -> None:
    rows, columns = logits_nv.shape
    team = row_team(logits_nv, columns, LOGITS_TEAM)
    given = logits_nv, targets_n, top_n, total_n, picked_n, first, rows, columns, team
    launch("loss", "exponentials", logits_nv, None, *row_blocks(rows, team), *given)


def cross_entropy_of_sums(
    weights_nv: Array, targets_n: Array, total_n: Array, picked_n: Array, first: int
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
