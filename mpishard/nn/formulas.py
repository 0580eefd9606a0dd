"""The element-wise, row-wise and gather operations of the layers as formulas of any array module.

These are the definitions: readable, and what runs on device arrays where nothing compiles CUDA.  ``kernels`` holds the
same functions compiled for NumPy arrays, ``device_kernels`` those for CUDA, and the tests compare them.  Arrays are
C-contiguous and come before the scalars; every function writes its results into arrays of the caller.  Results that
only products take may be in half precision (uint16: the bits of bfloat16).

Axes: n tokens (n = b * t), c channels, v vocabulary, b batch, h heads, g heads of a group, t positions, d channels of a
head or of all that is computed of a token, p pairs of these, s kinds (queries, key, value), k keys, q queries.
"""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

import numpy as np

from mpishard.backend.array import module_of
from mpishard.backend.convert import BITS, convert

Array = Any
Indices = Any  # arrays of int64

# GELU in its tanh form is h * sigmoid(2 u) with u = sqrt(2 / pi) (h + 0.044715 h^3).
# Python numbers, since a scalar of NumPy would widen float32 arrays.
GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
# Of splitmix64.
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _store(y: Array, values: Array) -> None:
    """``y = values``, where `y` may have the bits of bfloat16."""
    if y.dtype == BITS:
        convert(values, y)
    else:
        y[...] = values


def lookup(weight_vc: Array, indices_n: Indices, y_nc: Array, first: int, count: int) -> None:
    """``y[n] = weight[indices[n] - first]``, 0 where that is outside of the table, and NaN where no rank has it."""
    rows_n = indices_n - first
    inside_n = (rows_n >= 0) & (rows_n < len(weight_vc))
    y_nc[...] = 0
    y_nc[(indices_n < 0) | (indices_n >= count)] = np.nan
    y_nc[inside_n] = weight_vc[rows_n[inside_n]]


def scatter_add(dy_nc: Array, indices_n: Indices, dweight_vc: Array, first: int) -> None:
    """``dweight[indices[n] - first] += dy[n]`` where that is inside; the adjoint of a lookup."""
    xp = module_of(dy_nc)
    rows_n = indices_n - first
    inside_n = (rows_n >= 0) & (rows_n < len(dweight_vc))
    xp.add.at(dweight_vc, rows_n[inside_n], dy_nc[inside_n])


def add_bias(y_nc: Array, bias_c: Array, residual_nc: Array) -> None:
    """``y += bias + residual``."""
    y_nc += bias_c + residual_nc


def layer_norm(
    x_nc: Array, weight_c: Array, bias_c: Array, y_nc: Array, mean_n: Array, scale_n: Array, epsilon: float
) -> None:
    """``y = (x - mean) * scale * weight + bias`` with ``scale = 1 / sqrt(variance + epsilon)`` of each row.

    Ba, Kiros and Hinton (2016), equation 4; the variance is the biased one.
    """
    xp = module_of(x_nc)
    mean_n[...] = x_nc.mean(axis=1)
    centered_nc = x_nc - mean_n[:, None]
    scale_n[...] = 1 / xp.sqrt((centered_nc**2).mean(axis=1) + epsilon)
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
    """Adds the gradients of `layer_norm` into `dx`, `dweight` and `dbias`."""
    normed_nc = (x_nc - mean_n[:, None]) * scale_n[:, None]
    dweight_c += (dy_nc * normed_nc).sum(axis=0)
    dbias_c += dy_nc.sum(axis=0)
    g_nc = dy_nc * weight_c
    inner_nc = g_nc - g_nc.mean(axis=1)[:, None] - normed_nc * (g_nc * normed_nc).mean(axis=1)[:, None]
    dx_nc += scale_n[:, None] * inner_nc


def gelu(x_nc: Array, bias_c: Array, y_nc: Array) -> None:
    """``y = GELU(x + bias)``; `x` becomes the derivative.

    Hendrycks and Gimpel (2016), the tanh form, ``h / 2 (1 + tanh(u))``, written as ``h sigmoid(2 u)``, which has no
    cancellation for negative h.
    """
    xp = module_of(x_nc)
    h = x_nc + bias_c
    with np.errstate(over="ignore"):
        s = 1 / (1 + xp.exp(-GELU_SLOPE * h * (1 + GELU_CUBIC * h * h)))
    _store(y_nc, h * s)
    x_nc[...] = s + h * s * (1 - s) * GELU_SLOPE * (1 + 3 * GELU_CUBIC * h * h)


def gelu_backward(dx_nc: Array, slope_nc: Array, dbias_c: Array) -> None:
    """``dx *= slope``; adds the column sums of the result into `dbias`."""
    dx_nc *= slope_nc
    dbias_c += dx_nc.sum(axis=0)


def rms_norm(x_nc: Array, weight_c: Array, y_nc: Array, scale_n: Array, epsilon: float) -> None:
    """``y = x * scale * weight`` with ``scale = 1 / sqrt(mean(x^2) + epsilon)`` of each row.

    Zhang and Sennrich (2019), equation 4.
    """
    xp = module_of(x_nc)
    scale_n[...] = 1 / xp.sqrt((x_nc**2).mean(axis=1) + epsilon)
    _store(y_nc, x_nc * scale_n[:, None] * weight_c)


def rms_norm_backward(
    dy_nc: Array, x_nc: Array, scale_n: Array, weight_c: Array, dx_nc: Array, dweight_c: Array
) -> None:
    """Adds the gradients of `rms_norm` into `dx` and `dweight`."""
    normed_nc = x_nc * scale_n[:, None]
    dweight_c += (dy_nc * normed_nc).sum(axis=0)
    g_nc = dy_nc * weight_c
    dx_nc += scale_n[:, None] * (g_nc - normed_nc * (g_nc * normed_nc).mean(axis=1)[:, None])


def swiglu(gate_nc: Array, up_nc: Array, y_nc: Array) -> None:
    """``y = SiLU(gate) * up``; `gate` and `up` become the derivatives of `y` by them.

    Shazeer (2020), equation 6, with ``SiLU(h) = h sigmoid(h)``.
    """
    xp = module_of(gate_nc)
    with np.errstate(over="ignore"):
        s = 1 / (1 + xp.exp(-gate_nc))
    silu = gate_nc * s
    _store(y_nc, silu * up_nc)
    gate_nc[...] = up_nc * (s + silu * (1 - s))
    up_nc[...] = silu


def swiglu_backward(dgate_nc: Array, dup_nc: Array, dy_nc: Array) -> None:
    """``dgate *= dy`` and ``dup *= dy``."""
    dgate_nc *= dy_nc
    dup_nc *= dy_nc


def drop(x_nc: Array, keys_n: Indices, positions_n: Indices, rate: float) -> None:
    """``x = 0`` where a number in [0, 1), drawn for each key, position and channel, is below `rate`, else
    ``x / (1 - rate)``.

    The numbers are those of splitmix64 (Steele, Lea and Flood, 2014), from the key on.
    """
    xp = module_of(x_nc)
    columns = x_nc.shape[1]
    counts_nc = positions_n[:, None] * columns + xp.arange(1, columns + 1)[None, :]
    z = keys_n.astype(np.uint64)[:, None] + counts_nc.astype(np.uint64) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
    x_nc *= xp.where(z.astype(np.float64) * 2.0**-53 < rate, 0.0, 1 / (1 - rate)).astype(x_nc.dtype)


def split_heads(x_nd: Array, bias_d: Array, heads_sbhtd: Array) -> None:
    """Adds the bias and sorts the columns, ordered (head, kind, channel), by kind (query, key, value) and head."""
    kinds, batch, heads, length, width = heads_sbhtd.shape
    _store(heads_sbhtd, (x_nd + bias_d).reshape(batch, length, heads, kinds, width).transpose(3, 0, 2, 1, 4))


def merge_heads(x_nd: Array, heads_sbhtd: Array) -> None:
    """Sorts heads of each kind back to columns, ordered (head, kind, channel); the adjoint of `split_heads` in `x`."""
    kinds, batch, heads, length, width = heads_sbhtd.shape
    x_nd.reshape(batch, length, heads, kinds, width)[...] = heads_sbhtd.transpose(1, 3, 2, 0, 4)


def rotate(x_ntd: Array, cos_tp: Array, sin_tp: Array, apart: int, backward: int) -> None:
    """Turns pairs of channels by an angle that grows with the position, in place; with `backward` the adjoint.

    Su et al. (2021, RoFormer), equation 34. Channel p is paired with p + d / 2 if `apart`, else channel 2 p with 2 p +
    1; `cos` and `sin` may have a common factor. `apart` and `backward` are 0 or 1.
    """
    half = cos_tp.shape[1]
    first = x_ntd[:, :, :half] if apart else x_ntd[:, :, 0::2]
    second = x_ntd[:, :, half:] if apart else x_ntd[:, :, 1::2]
    sin_tp = -sin_tp if backward else sin_tp
    turned = first * cos_tp - second * sin_tp
    second[...] = second * cos_tp + first * sin_tp
    first[...] = turned


def split_with_products(dy_nc: Array, y_nc: Array, dy_sbhtd: Array, delta_sbht: Array) -> None:
    """Sorts `dy` as `split_heads` does, and takes for each row of a head the inner product of `dy` and `y`."""
    kinds, batch, heads, length, width = dy_sbhtd.shape
    _store(dy_sbhtd, dy_nc.reshape(batch, length, heads, kinds, width).transpose(3, 0, 2, 1, 4))
    delta_bths = (dy_nc * y_nc).reshape(batch, length, heads, kinds, width).sum(axis=4)
    delta_sbht[...] = delta_bths.transpose(3, 0, 2, 1)


def _future(xp: Any, keys: int, queries: int, offset: int) -> Array:
    """True where a key lies after the query: query i stands `offset` positions after key number i."""
    return xp.arange(keys)[:, None] > xp.arange(queries)[None, :] + offset


def causal_softmax(
    scores_gkq: Array,
    logsum_gt: Array,
    total_t: Array,
    offset: int,
    scale: float,
    rounded_gkq: Array | None = None,
) -> None:
    """Turn scores, not yet scaled, into attention probabilities in place: a softmax over the keys of each query.

    Scores lie transposed, (heads of a group, keys, queries), so that sums over keys run over whole rows; `total` is
    scratch. Keys start at position 0, queries at `offset`, and later keys get probability 0. `logsum` gets, at the
    positions of the queries, the logarithm of the sum of the exponentials of the scaled scores.

    With `rounded`, in half precision, the probabilities go there, and `scores` holds nothing defined; not in
    ``kernels``, as products on the host take float32.
    """
    xp = module_of(scores_gkq)
    _, keys, queries = scores_gkq.shape
    z_gkq = xp.where(_future(xp, keys, queries, offset), -np.inf, scores_gkq * scale)
    top_gq = z_gkq.max(axis=1)
    total_gq = xp.exp(z_gkq - top_gq[:, None]).sum(axis=1)
    logsum_gt[:, offset : offset + queries] = top_gq + xp.log(total_gq)
    _store(scores_gkq if rounded_gkq is None else rounded_gkq, xp.exp(z_gkq - top_gq[:, None]) / total_gq[:, None])


def causal_softmax_backward(
    scores_gkq: Array,
    dscores_gtt: Array,
    logsum_gt: Array,
    delta_gt: Array,
    scale: float,
    rounded_gkq: Array | None = None,
    drounded_gtt: Array | None = None,
) -> None:
    """Recompute a block of probabilities, and turn their gradient into that of the scores, in place or rounded.

    Dao et al. (2022, FlashAttention), appendix B.4. `scores` has some keys and all queries from the position of the
    first of these keys to the end; `dscores` has all keys and queries, of which those of `scores` are replaced. `delta`
    is, for each query, the inner product of the attention output and its gradient.

    The results go to `rounded` and `drounded`, in half precision, if both are given; `scores` and `dscores` then hold
    nothing defined.
    """
    xp = module_of(scores_gkq)
    _, keys, queries = scores_gkq.shape
    start = dscores_gtt.shape[2] - queries
    z_gkq = xp.where(_future(xp, keys, queries, 0), -np.inf, scores_gkq * scale - logsum_gt[:, None, start:])
    scores_gkq[...] = xp.exp(z_gkq)
    dscores_gkq = dscores_gtt[:, start : start + keys, start:]
    dscaled_gkq = scores_gkq * (dscores_gkq - delta_gt[:, None, start:]) * scale
    dscores_gkq[...] = xp.where(_future(xp, keys, queries, 0), 0, dscaled_gkq)
    if rounded_gkq is not None and drounded_gtt is not None:
        _store(rounded_gkq, scores_gkq)
        _store(drounded_gtt[:, start : start + keys, start:], dscores_gkq)


def cross_entropy(logits_nv: Array, targets_n: Indices) -> SupportsFloat:
    """Sum over rows of ``-log softmax(logits)[target]`` in nats; `logits` becomes the gradient of that sum.

    Both are NaN in a row whose target is no column.
    """
    xp = module_of(logits_nv)
    total_n, picked_n = xp.empty((2, len(targets_n)), logits_nv.dtype)
    exponentials(logits_nv, targets_n, logits_nv.max(axis=1), total_n, picked_n, 0, logits_nv.shape[1])
    return cross_entropy_of_sums(logits_nv, targets_n, total_n, picked_n, 0)


def cross_entropy_rounded(
    logits_np: Array, targets_n: Indices, gradient_np: Array, columns: int, scale: float
) -> SupportsFloat:
    """`cross_entropy` of the first columns; `gradient` gets its gradient times a scale, and zeros in the other columns.

    The logits may be overwritten.
    """
    gradient_nv = logits_np[:, :columns].copy()
    loss = cross_entropy(gradient_nv, targets_n)
    logits_np[...] = 0
    logits_np[:, :columns] = gradient_nv * scale
    _store(gradient_np, logits_np)
    return loss


def row_maximum(logits_nv: Array, top_n: Array) -> None:
    """The largest logit of each row, -infinity of an empty row."""
    top_n[...] = logits_nv.max(axis=1) if logits_nv.shape[1] else -np.inf


def exponentials(
    logits_nv: Array, targets_n: Indices, top_n: Array, total_n: Array, picked_n: Array, first: int, count: int
) -> None:
    """Logits become ``exp(logits - top)``; `total` their sums, `picked` the logit of the target, less the top.

    Columns are a slice of the `count` of the vocabulary from `first` on; `picked` is 0 where the target is outside of
    the slice, `total` NaN where it is outside of the vocabulary.
    """
    xp = module_of(logits_nv)
    columns_n = targets_n - first
    rows = xp.flatnonzero((columns_n >= 0) & (columns_n < logits_nv.shape[1]))
    logits_nv -= top_n[:, None]
    picked_n[...] = 0
    picked_n[rows] = logits_nv[rows, columns_n[rows]]
    xp.exp(logits_nv, out=logits_nv)
    total_n[...] = logits_nv.sum(axis=1)
    total_n[(targets_n < 0) | (targets_n >= count)] = np.nan


def cross_entropy_of_sums(
    weights_nv: Array, targets_n: Indices, total_n: Array, picked_n: Array, first: int
) -> SupportsFloat:
    """The rest of `cross_entropy`, from what `exponentials` left, with `total` and `picked` of the whole vocabulary."""
    xp = module_of(weights_nv)
    columns_n = targets_n - first
    rows = xp.flatnonzero((columns_n >= 0) & (columns_n < weights_nv.shape[1]))
    weights_nv /= total_n[:, None]
    weights_nv[rows, columns_n[rows]] -= 1
    return float((xp.log(total_n.astype(np.float64)) - picked_n).sum())
