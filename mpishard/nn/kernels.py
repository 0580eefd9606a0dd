"""The functions of ``formulas`` that every model needs, compiled for NumPy arrays: one pass over memory each, no
temporary arrays.  See `mpishard.nn.compiling` for how they are written.
"""

from __future__ import annotations

import math

import numpy as np

from mpishard.nn.compiling import Array, Indices, KernelGroup, element, exp, kernel_apart, wide_vectors
from mpishard.nn.formulas import GELU_CUBIC, GELU_SLOPE
from mpishard.nn.llama_kernels import (  # noqa: F401 - all functions of ``formulas`` are found here
    drop,
    merge_heads,
    rms_norm,
    rms_norm_backward,
    rotate,
    swiglu,
    swiglu_backward,
)

GROUP = KernelGroup()

# A loop over part of a row begins at a multiple of this: then few rows leave elements that fill no whole vector, each
# of which takes as long as a vector.
LANES = 16


@GROUP.kernel
def lookup(weight_vc: Array, indices_n: Indices, y_nc: Array, first: int) -> None:
    rows, columns = y_nc.shape
    for n in range(rows):
        v = indices_n[n] - first
        if 0 <= v < weight_vc.shape[0]:
            for c in range(columns):
                y_nc[n, c] = weight_vc[v, c]
        else:
            for c in range(columns):
                y_nc[n, c] = 0


@GROUP.kernel
def scatter_add(dy_nc: Array, indices_n: Indices, dweight_vc: Array, first: int) -> None:
    rows, columns = dy_nc.shape
    for n in range(rows):
        v = indices_n[n] - first
        if 0 <= v < dweight_vc.shape[0]:
            for c in range(columns):
                dweight_vc[v, c] += dy_nc[n, c]


@GROUP.kernel
def add_bias(y_nc: Array, bias_c: Array, residual_nc: Array) -> None:
    rows, columns = y_nc.shape
    for n in range(rows):
        for c in range(columns):
            y_nc[n, c] += bias_c[c] + residual_nc[n, c]


@GROUP.kernel
def layer_norm(
    x_nc: Array, weight_c: Array, bias_c: Array, y_nc: Array, mean_n: Array, scale_n: Array, epsilon: float
) -> None:
    rows, columns = x_nc.shape
    zero = x_nc.dtype.type(0)
    one = x_nc.dtype.type(1)
    share = one / x_nc.dtype.type(columns)
    small = x_nc.dtype.type(epsilon)
    for n in range(rows):
        total = zero
        for c in range(columns):
            total += x_nc[n, c]
        mean = total * share
        total = zero
        for c in range(columns):
            centered = x_nc[n, c] - mean
            total += centered * centered
        scale = one / np.sqrt(total * share + small)
        for c in range(columns):
            y_nc[n, c] = element((x_nc[n, c] - mean) * scale * weight_c[c] + bias_c[c], y_nc)
        mean_n[n] = mean
        scale_n[n] = scale


@GROUP.kernel
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
    rows, columns = x_nc.shape
    zero = x_nc.dtype.type(0)
    share = x_nc.dtype.type(1) / x_nc.dtype.type(columns)
    for n in range(rows):
        mean = mean_n[n]
        scale = scale_n[n]
        plain = zero
        along = zero
        for c in range(columns):
            normed = (x_nc[n, c] - mean) * scale
            dy = dy_nc[n, c]
            dweight_c[c] += dy * normed
            dbias_c[c] += dy
            plain += dy * weight_c[c]
            along += dy * weight_c[c] * normed
        plain *= share
        along *= share
        for c in range(columns):
            normed = (x_nc[n, c] - mean) * scale
            dx_nc[n, c] += scale * (dy_nc[n, c] * weight_c[c] - plain - normed * along)


@GROUP.kernel
def gelu(x_nc: Array, bias_c: Array, y_nc: Array) -> None:
    wide_vectors()
    rows, columns = x_nc.shape
    one = x_nc.dtype.type(1)
    outer = x_nc.dtype.type(GELU_SLOPE)
    cubic = x_nc.dtype.type(GELU_CUBIC)
    cubic3 = x_nc.dtype.type(3 * GELU_CUBIC)
    for n in range(rows):
        for c in range(columns):
            h = x_nc[n, c] + bias_c[c]
            square = h * h
            e = exp(-outer * h * (one + cubic * square))
            s = one / (one + e)
            y = h * s
            y_nc[n, c] = element(y, y_nc)
            # 1 - s, where s is close to 1 without its cancellation.
            rest = e * s if h > 0 else one - s
            x_nc[n, c] = s + y * rest * outer * (one + cubic3 * square)


@GROUP.kernel
def gelu_backward(dx_nc: Array, slope_nc: Array, dbias_c: Array) -> None:
    rows, columns = dx_nc.shape
    for n in range(rows):
        for c in range(columns):
            dx = dx_nc[n, c] * slope_nc[n, c]
            dx_nc[n, c] = dx
            dbias_c[c] += dx


@GROUP.kernel
def split_heads(x_nd: Array, bias_d: Array, heads_sbhtd: Array) -> None:
    kinds, batch, heads, length, width = heads_sbhtd.shape
    for b in range(batch):
        for t in range(length):  # before the heads: rows are then read from end to end
            for h in range(heads):
                for s in range(kinds):
                    column = (h * kinds + s) * width
                    row = x_nd[b * length + t, column : column + width]
                    bias = bias_d[column : column + width]
                    out = heads_sbhtd[s, b, h, t]
                    for d in range(width):
                        out[d] = row[d] + bias[d]


@GROUP.kernel
def split_with_products(dy_nc: Array, y_nc: Array, dy_sbhtd: Array, inner_sbht: Array) -> None:
    kinds, batch, heads, length, width = dy_sbhtd.shape
    for b in range(batch):
        for t in range(length):
            for h in range(heads):
                for s in range(kinds):
                    column = (h * kinds + s) * width
                    dy = dy_nc[b * length + t, column : column + width]
                    y = y_nc[b * length + t, column : column + width]
                    out = dy_sbhtd[s, b, h, t]
                    # Apart: LLVM vectorises a sum next to a store only where the arrays lie far enough from each other.
                    total = dy_nc.dtype.type(0)
                    for d in range(width):
                        total += dy[d] * y[d]
                    for d in range(width):
                        out[d] = dy[d]
                    inner_sbht[s, b, h, t] = total


@GROUP.kernel
def causal_softmax(scores_gkq: Array, logsum_gt: Array, total_t: Array, offset: int, scale: float) -> None:
    wide_vectors()
    group, keys, queries = scores_gkq.shape
    zero = scores_gkq.dtype.type(0)
    factor = scores_gkq.dtype.type(scale)
    for g in range(group):
        logsum = logsum_gt[g, offset : offset + queries]
        # Until the last loop but one, logsum holds the largest score.
        for i in range(queries):
            logsum[i] = scores_gkq[g, 0, i]
            total_t[i] = 0
        for j in range(1, keys):
            first = j - offset if j > offset else 0
            row = scores_gkq[g, j, first:]
            tops = logsum[first:]
            for i in range(row.size):
                tops[i] = row[i] if row[i] > tops[i] else tops[i]
        for j in range(keys):
            first = j - offset if j > offset else 0
            start = first // LANES * LANES
            future = np.int32(first - start)
            scores_gkq[g, j, :start] = 0
            row = scores_gkq[g, j, start:]
            tops = logsum[start:]
            totals = total_t[start:]
            for i in range(row.size):
                weight = exp((row[i] - tops[i]) * factor)
                weight = weight if np.int32(i) >= future else zero
                row[i] = weight
                totals[i] += weight
        for i in range(queries):
            total = total_t[i]
            logsum[i] = logsum[i] * factor + math.log(total)
            total_t[i] = scores_gkq.dtype.type(1) / total
        for j in range(keys):
            for i in range(queries):
                scores_gkq[g, j, i] *= total_t[i]


@GROUP.kernel
def causal_softmax_backward(
    scores_gkq: Array, dscores_gtt: Array, logsum_gt: Array, inner_gt: Array, scale: float
) -> None:
    wide_vectors()
    group, keys, queries = scores_gkq.shape
    start = dscores_gtt.shape[2] - queries
    factor = scores_gkq.dtype.type(scale)
    for g in range(group):
        for j in range(keys):
            begin = j // LANES * LANES
            row = scores_gkq[g, j, begin:]
            drow = dscores_gtt[g, start + j, start + begin :]
            logsum = logsum_gt[g, start + begin :]
            inner = inner_gt[g, start + begin :]
            for i in range(row.size):
                weight = exp(row[i] * factor - logsum[i])
                row[i] = weight
                drow[i] = weight * (drow[i] - inner[i]) * factor
            scores_gkq[g, j, :j] = 0
            dscores_gtt[g, start + j, start : start + j] = 0


@GROUP.kernel
def cross_entropy(logits_nv: Array, targets_n: Indices) -> float:
    rows, columns = logits_nv.shape
    loss = 0.0
    for n in range(rows):
        top = logits_nv[n, 0]
        for v in range(1, columns):
            logit = logits_nv[n, v]
            top = logit if logit > top else top
        picked = logits_nv[n, targets_n[n]] - top
        total = logits_nv.dtype.type(0)
        for v in range(columns):
            weight = exp(logits_nv[n, v] - top)
            logits_nv[n, v] = weight
            total += weight
        loss += math.log(np.float64(total)) - picked
        share = logits_nv.dtype.type(1) / total
        for v in range(columns):
            logits_nv[n, v] *= share
        logits_nv[n, targets_n[n]] -= logits_nv.dtype.type(1)
    return loss


@kernel_apart
def row_maximum(logits_nv: Array, top_n: Array) -> None:
    rows, columns = logits_nv.shape
    for n in range(rows):
        top = logits_nv.dtype.type(-np.inf)
        for v in range(columns):
            logit = logits_nv[n, v]
            top = logit if logit > top else top
        top_n[n] = top


@kernel_apart
def exponentials(
    logits_nv: Array, targets_n: Indices, top_n: Array, total_n: Array, picked_n: Array, first: int
) -> None:
    rows, columns = logits_nv.shape
    for n in range(rows):
        top = top_n[n]
        column = targets_n[n] - first
        picked_n[n] = logits_nv[n, column] - top if 0 <= column < columns else 0
        total = logits_nv.dtype.type(0)
        for v in range(columns):
            weight = exp(logits_nv[n, v] - top)
            logits_nv[n, v] = weight
            total += weight
        total_n[n] = total


@kernel_apart
def cross_entropy_of_sums(weights_nv: Array, targets_n: Indices, total_n: Array, picked_n: Array, first: int) -> float:
    rows, columns = weights_nv.shape
    # A separate loop: the order in which the compiler adds may depend on all that is in the loop, as on the number of
    # columns, which differs between ranks; the loss must not.
    loss = 0.0
    for n in range(rows):
        loss += math.log(np.float64(total_n[n])) - picked_n[n]
    for n in range(rows):
        share = weights_nv.dtype.type(1) / total_n[n]
        for v in range(columns):
            weights_nv[n, v] *= share
        column = targets_n[n] - first
        if 0 <= column < columns:
            weights_nv[n, column] -= weights_nv.dtype.type(1)
    return loss
