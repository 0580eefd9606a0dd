"""The functions of ``formulas`` on heads of attention, as CUDA functions; see `mpishard.nn.device_kernels`."""

from __future__ import annotations

import math
from typing import Any

from mpishard.nn.cuda_launch import WARP, ceiling, columns_of_pack, launch, most_shared, tile_blocks

Array = Any

# Rows of a tile.
ROWS = 8
# Of a block of the softmax: queries, threads, and packs of scores that a thread holds in registers.
QUERIES, SOFTMAX_THREADS, HELD_SCORES = 32, 512, 8
# Heads of rows that a block takes.
HEADS = 4


def split_heads(x_nd: Array, bias_d: Array, heads_sbhtd: Array) -> None:
    kinds, batch, heads, length, width = heads_sbhtd.shape
    blocks, threads = tile_blocks(x_nd, batch * length, heads * kinds * width, ROWS, columns_of_pack(x_nd, width))
    given = x_nd, bias_d, heads_sbhtd, kinds, batch, heads, length, width, ROWS
    launch("heads", "split_heads", x_nd, heads_sbhtd, blocks, threads, *given)


def merge_heads(x_nd: Array, heads_sbhtd: Array) -> None:
    kinds, batch, heads, length, width = heads_sbhtd.shape
    columns = heads * kinds * width
    blocks, threads = tile_blocks(heads_sbhtd, batch * length, columns, ROWS, columns_of_pack(heads_sbhtd, width))
    given = x_nd, heads_sbhtd, kinds, batch, heads, length, width, ROWS
    launch("heads", "merge_heads", heads_sbhtd, x_nd, blocks, threads, *given)


def split_with_products(dy_nc: Array, y_nc: Array, dy_sbhtd: Array, inner_sbht: Array) -> None:
    kinds, batch, heads, length, width = dy_sbhtd.shape
    blocks = ceiling(batch * length * heads * kinds, HEADS)
    given = dy_nc, y_nc, dy_sbhtd, inner_sbht, kinds, batch, heads, length, width
    launch("heads", "split_with_products", dy_nc, dy_sbhtd, blocks, HEADS * WARP, *given)


def rotate(x_ntd: Array, cos_tp: Array, sin_tp: Array, apart: int, backward: int) -> None:
    count, length, width = x_ntd.shape
    rows, pairs = count * length, width // 2
    blocks, threads = tile_blocks(x_ntd, rows, pairs, ROWS, columns_of_pack(x_ntd, pairs) if apart else 1)
    given = x_ntd, cos_tp, sin_tp, -1 if backward else 1, rows, length, pairs, apart, ROWS
    launch("heads", "rotate", x_ntd, None, blocks, threads, *given)


def causal_softmax(
    scores_gkq: Array,
    logsum_gt: Array,
    total_t: Array,
    offset: int,
    scale: float,
    rounded_gkq: Array | None = None,
) -> None:
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
    inner_gt: Array,
    scale: float,
    rounded_gkq: Array | None = None,
    drounded_gtt: Array | None = None,
) -> None:
    group, keys, queries = scores_gkq.shape
    _, all_keys, length = dscores_gtt.shape
    pack = columns_of_pack(scores_gkq, math.gcd(queries, length))
    blocks, threads = tile_blocks(scores_gkq, group * keys, queries, ROWS, pack)
    given = scores_gkq, dscores_gtt, logsum_gt, inner_gt
    sizes = group * keys, keys, queries, all_keys, length, scale, ROWS
    if rounded_gkq is None:
        launch("softmax", "causal_softmax_backward", scores_gkq, None, blocks, threads, *given, *sizes)
    else:
        results = rounded_gkq, drounded_gtt
        name = "causal_softmax_backward_rounded"
        launch("softmax", name, scores_gkq, rounded_gkq, blocks, threads, *given, *results, *sizes)
