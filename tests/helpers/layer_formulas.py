"""What layers do besides products as formulas of NumPy: the definitions that tests compare both kinds of kernels with.

Names, parameters and axes are those of `mpishard.nn.kernels` and `mpishard.nn.device_kernels`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.backend.convert import BITS, convert
from mpishard.nn.kernels import GELU_CUBIC, GELU_SLOPE, GOLDEN, MIX_1, MIX_2

Array = Any
Indices = Any  # arrays of int64


def _store(y: Array, values: Array) -> None:
    """``y = values``, where `y` may have the bits of bfloat16."""
    if y.dtype == BITS:
        convert(values, y)
    else:
        y[...] = values


def lookup(weight_vc: Array, indices_n: Indices, y_nc: Array, first: int, count: int) -> None:
    rows_n = indices_n - first
    inside_n = (rows_n >= 0) & (rows_n < len(weight_vc))
    y_nc[...] = 0
    y_nc[(indices_n < 0) | (indices_n >= count)] = np.nan
    y_nc[inside_n] = weight_vc[rows_n[inside_n]]


def scatter_add(dy_nc: Array, indices_n: Indices, dweight_vc: Array, first: int) -> None:
    rows_n = indices_n - first
    inside_n = (rows_n >= 0) & (rows_n < len(dweight_vc))
    np.add.at(dweight_vc, rows_n[inside_n], dy_nc[inside_n])


def add_bias(y_nc: Array, bias_c: Array, residual_nc: Array) -> None:
    y_nc += bias_c + residual_nc


def layer_norm(
    x_nc: Array, weight_c: Array, bias_c: Array, y_nc: Array, mean_n: Array, scale_n: Array, epsilon: float
) -> None:
    mean_n[...] = x_nc.mean(axis=1)
    centered_nc = x_nc - mean_n[:, None]
    scale_n[...] = 1 / np.sqrt((centered_nc**2).mean(axis=1) + epsilon)
    _store(y_nc, centered_nc * scale_n[:, None] * weight_c + bias_c)


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
    normed_nc = (x_nc - mean_n[:, None]) * scale_n[:, None]
    dweight_c += (dy_nc * normed_nc).sum(axis=0)
    dbias_c += dy_nc.sum(axis=0)
    g_nc = dy_nc * weight_c
    inner_nc = g_nc - g_nc.mean(axis=1)[:, None] - normed_nc * (g_nc * normed_nc).mean(axis=1)[:, None]
    dx_nc += scale_n[:, None] * inner_nc


def gelu(x_nc: Array, bias_c: Array, y_nc: Array) -> None:
    h = x_nc + bias_c
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-GELU_SLOPE * h * (1 + GELU_CUBIC * h * h)))
    _store(y_nc, h * s)
    x_nc[...] = s + h * s * (1 - s) * GELU_SLOPE * (1 + 3 * GELU_CUBIC * h * h)


def gelu_backward(dx_nc: Array, slope_nc: Array, dbias_c: Array) -> None:
    dx_nc *= slope_nc
    dbias_c += dx_nc.sum(axis=0)


def rms_norm(x_nc: Array, weight_c: Array, y_nc: Array, scale_n: Array, epsilon: float) -> None:
    scale_n[...] = 1 / np.sqrt((x_nc**2).mean(axis=1) + epsilon)
    _store(y_nc, x_nc * scale_n[:, None] * weight_c)


def rms_norm_backward(
    dy_nc: Array, x_nc: Array, scale_n: Array, weight_c: Array, dx_nc: Array, dweight_c: Array
) -> None:
    normed_nc = x_nc * scale_n[:, None]
    dweight_c += (dy_nc * normed_nc).sum(axis=0)
    g_nc = dy_nc * weight_c
    dx_nc += scale_n[:, None] * (g_nc - normed_nc * (g_nc * normed_nc).mean(axis=1)[:, None])


def swiglu(gate_nc: Array, up_nc: Array, y_nc: Array) -> None:
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-gate_nc))
    silu = gate_nc * s
    _store(y_nc, silu * up_nc)
    gate_nc[...] = up_nc * (s + silu * (1 - s))
    up_nc[...] = silu


def swiglu_backward(dgate_nc: Array, dup_nc: Array, dy_nc: Array) -> None:
    dgate_nc *= dy_nc
    dup_nc *= dy_nc


def drop(x_nc: Array, keys_n: Indices, positions_n: Indices, rate: float) -> None:
    columns = x_nc.shape[1]
    counts_nc = positions_n[:, None] * columns + np.arange(1, columns + 1)[None, :]
    z = keys_n.astype(np.uint64)[:, None] + counts_nc.astype(np.uint64) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
    x_nc *= np.where(z.astype(np.float64) * 2.0**-53 < rate, 0.0, 1 / (1 - rate)).astype(x_nc.dtype)


def split_heads(x_nd: Array, bias_d: Array, heads_sbhtd: Array) -> None:
    kinds, batch, heads, length, width = heads_sbhtd.shape
    _store(heads_sbhtd, (x_nd + bias_d).reshape(batch, length, heads, kinds, width).transpose(3, 0, 2, 1, 4))


def merge_heads(x_nd: Array, heads_sbhtd: Array) -> None:
    kinds, batch, heads, length, width = heads_sbhtd.shape
    x_nd.reshape(batch, length, heads, kinds, width)[...] = heads_sbhtd.transpose(1, 3, 2, 0, 4)


def rotate(x_ntd: Array, cos_tp: Array, sin_tp: Array, apart: int, backward: int) -> None:
    half = cos_tp.shape[1]
    first = x_ntd[:, :, :half] if apart else x_ntd[:, :, 0::2]
    second = x_ntd[:, :, half:] if apart else x_ntd[:, :, 1::2]
    sin_tp = -sin_tp if backward else sin_tp
    turned = first * cos_tp - second * sin_tp
    second[...] = second * cos_tp + first * sin_tp
    first[...] = turned


def split_with_products(dy_nc: Array, y_nc: Array, dy_sbhtd: Array, delta_sbht: Array) -> None:
    kinds, batch, heads, length, width = dy_sbhtd.shape
    _store(dy_sbhtd, dy_nc.reshape(batch, length, heads, kinds, width).transpose(3, 0, 2, 1, 4))
    delta_bths = (dy_nc * y_nc).reshape(batch, length, heads, kinds, width).sum(axis=4)
    delta_sbht[...] = delta_bths.transpose(3, 0, 2, 1)


def _future(keys: int, queries: int, offset: int) -> Array:
    """True where a key lies after the query: query i stands `offset` positions after key number i."""
    return np.arange(keys)[:, None] > np.arange(queries)[None, :] + offset


def causal_softmax(
    scores_gkq: Array,
    logsum_gt: Array,
    total_t: Array,
    offset: int,
    scale: float,
    rounded_gkq: Array | None = None,
) -> None:
    _, keys, queries = scores_gkq.shape
    z_gkq = np.where(_future(keys, queries, offset), -np.inf, scores_gkq * scale)
    top_gq = z_gkq.max(axis=1)
    total_gq = np.exp(z_gkq - top_gq[:, None]).sum(axis=1)
    logsum_gt[:, offset : offset + queries] = top_gq + np.log(total_gq)
    _store(scores_gkq if rounded_gkq is None else rounded_gkq, np.exp(z_gkq - top_gq[:, None]) / total_gq[:, None])


def causal_softmax_backward(
    scores_gkq: Array,
    dscores_gtt: Array,
    logsum_gt: Array,
    delta_gt: Array,
    scale: float,
    rounded_gkq: Array | None = None,
    drounded_gtt: Array | None = None,
) -> None:
    _, keys, queries = scores_gkq.shape
    start = dscores_gtt.shape[2] - queries
    z_gkq = np.where(_future(keys, queries, 0), -np.inf, scores_gkq * scale - logsum_gt[:, None, start:])
    scores_gkq[...] = np.exp(z_gkq)
    dscores_gkq = dscores_gtt[:, start : start + keys, start:]
    dscaled_gkq = scores_gkq * (dscores_gkq - delta_gt[:, None, start:]) * scale
    dscores_gkq[...] = np.where(_future(keys, queries, 0), 0, dscaled_gkq)
    if rounded_gkq is not None and drounded_gtt is not None:
        _store(rounded_gkq, scores_gkq)
        _store(drounded_gtt[:, start : start + keys, start:], dscores_gkq)


def cross_entropy(logits_nv: Array, targets_n: Indices) -> float:
    total_n, picked_n = np.empty((2, len(targets_n)), logits_nv.dtype)
    exponentials(logits_nv, targets_n, logits_nv.max(axis=1), total_n, picked_n, 0, logits_nv.shape[1])
    return cross_entropy_of_sums(logits_nv, targets_n, total_n, picked_n, 0)


def cross_entropy_rounded(
    logits_np: Array, targets_n: Indices, gradient_np: Array, columns: int, scale: float
) -> float:
    gradient_nv = logits_np[:, :columns].copy()
    loss = cross_entropy(gradient_nv, targets_n)
    logits_np[...] = 0
    logits_np[:, :columns] = gradient_nv * scale
    _store(gradient_np, logits_np)
    return loss


def row_maximum(logits_nv: Array, top_n: Array) -> None:
    top_n[...] = logits_nv.max(axis=1) if logits_nv.shape[1] else -np.inf


def exponentials(
    logits_nv: Array, targets_n: Indices, top_n: Array, total_n: Array, picked_n: Array, first: int, count: int
) -> None:
    columns_n = targets_n - first
    rows = np.flatnonzero((columns_n >= 0) & (columns_n < logits_nv.shape[1]))
    logits_nv -= top_n[:, None]
    picked_n[...] = 0
    picked_n[rows] = logits_nv[rows, columns_n[rows]]
    np.exp(logits_nv, out=logits_nv)
    total_n[...] = logits_nv.sum(axis=1)
    total_n[(targets_n < 0) | (targets_n >= count)] = np.nan


def cross_entropy_of_sums(weights_nv: Array, targets_n: Indices, total_n: Array, picked_n: Array, first: int) -> float:
    columns_n = targets_n - first
    rows = np.flatnonzero((columns_n >= 0) & (columns_n < weights_nv.shape[1]))
    weights_nv /= total_n[:, None]
    weights_nv[rows, columns_n[rows]] -= 1
    return float((np.log(total_n.astype(np.float64)) - picked_n).sum())
