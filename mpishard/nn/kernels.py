"""What layers do besides products, compiled for NumPy arrays: one pass over memory each, no temporary arrays.

Arrays are C-contiguous and come before the scalars; every function writes its results into arrays of the caller.
Results that only products take may be the bits of bfloat16 (uint16). The letters after the underscore in an array's
name are its dimensions: n tokens (n = b * t), c channels, v vocabulary, b batch, h heads, g heads of a group, t
positions, d channels of a head or of all that is computed of a token, p pairs of these, s kinds (queries, key, value),
k keys, q queries.

Loops are written out plainly, since that compiles fastest and LLVM vectorises it. An array that is read and written is
one argument (two that overlap fail the check that guards the vectorised loop), and a loop over part of a row runs from
0 over a slice (an index that might be negative carries Python's wrap-around). Kernels with an exponential ask for wide
vectors; most others wait for memory.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpishard.nn.checks import same_extents
from mpishard.nn.kernel_groups import KernelGroup, element, exp, kernel_apart, wide_vectors

Array = Any
Indices = Any  # arrays of int64

# GELU in its tanh form is h * sigmoid(2 u) with u = sqrt(2 / pi) (h + 0.044715 h^3).
# Python numbers, since a scalar of NumPy would widen float32 arrays.
GELU_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715
# Of splitmix64.
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


# What models like Llama need in addition, and dropout.

LLAMA_GROUP = KernelGroup()


@same_extents("x_nc", "weight_c")
@LLAMA_GROUP.kernel
def rms_norm(x_nc: Array, weight_c: Array, y_nc: Array, scale_n: Array, epsilon: float) -> None:
    """``y = x * scale * weight`` with ``scale = 1 / sqrt(mean(x^2) + epsilon)`` of each row.

    Zhang and Sennrich (2019), equation 4.
    """
    rows, columns = x_nc.shape
    one = x_nc.dtype.type(1)
    share = one / x_nc.dtype.type(columns)
    small = x_nc.dtype.type(epsilon)
    for n in range(rows):
        total = x_nc.dtype.type(0)
        for c in range(columns):
            total += x_nc[n, c] * x_nc[n, c]
        scale = one / np.sqrt(total * share + small)
        for c in range(columns):
            y_nc[n, c] = element(x_nc[n, c] * scale * weight_c[c], y_nc)
        scale_n[n] = scale


@same_extents("dy_nc", "x_nc", "dx_nc")
@LLAMA_GROUP.kernel
def rms_norm_backward(
    dy_nc: Array, x_nc: Array, scale_n: Array, weight_c: Array, dx_nc: Array, dweight_c: Array
) -> None:
    """Adds the gradients of `rms_norm` into `dx` and `dweight`."""
    rows, columns = x_nc.shape
    share = x_nc.dtype.type(1) / x_nc.dtype.type(columns)
    for n in range(rows):
        scale = scale_n[n]
        along = x_nc.dtype.type(0)
        for c in range(columns):
            product = dy_nc[n, c] * x_nc[n, c] * scale
            dweight_c[c] += product
            along += product * weight_c[c]
        along *= share * scale
        for c in range(columns):
            dx_nc[n, c] += scale * (dy_nc[n, c] * weight_c[c] - x_nc[n, c] * along)


@LLAMA_GROUP.kernel
def swiglu(gate_nc: Array, up_nc: Array, y_nc: Array) -> None:
    """``y = SiLU(gate) * up``; `gate` and `up` become the derivatives of `y` by them.

    Shazeer (2020), equation 6, with ``SiLU(h) = h sigmoid(h)``.
    """
    wide_vectors()
    rows, columns = gate_nc.shape
    one = gate_nc.dtype.type(1)
    for n in range(rows):
        for c in range(columns):
            h = gate_nc[n, c]
            up = up_nc[n, c]
            e = exp(-h)
            s = one / (one + e)
            silu = h * s
            # 1 - s, where s is close to 1 without its cancellation.
            rest = e * s if h > 0 else one - s
            y_nc[n, c] = element(silu * up, y_nc)
            gate_nc[n, c] = up * (s + silu * rest)
            up_nc[n, c] = silu


@LLAMA_GROUP.kernel
def swiglu_backward(dgate_nc: Array, dup_nc: Array, dy_nc: Array) -> None:
    """``dgate *= dy`` and ``dup *= dy``."""
    rows, columns = dy_nc.shape
    for n in range(rows):
        for c in range(columns):
            dy = dy_nc[n, c]
            dgate_nc[n, c] *= dy
            dup_nc[n, c] *= dy


@LLAMA_GROUP.kernel
def merge_heads(x_nd: Array, heads_sbhtd: Array) -> None:
    """Sorts heads of each kind back to columns, ordered (head, kind, channel); the adjoint of `split_heads` in `x`."""
    kinds, batch, heads, length, width = heads_sbhtd.shape
    for b in range(batch):
        for h in range(heads):
            for t in range(length):
                for s in range(kinds):
                    column = (h * kinds + s) * width
                    row = x_nd[b * length + t, column : column + width]
                    head = heads_sbhtd[s, b, h, t]
                    for d in range(width):
                        row[d] = head[d]


@LLAMA_GROUP.kernel
def rotate(x_ntd: Array, cos_tp: Array, sin_tp: Array, apart: int, backward: int) -> None:
    """Turns pairs of channels by an angle that grows with the position, in place; with `backward` the adjoint.

    Su et al. (2021, RoFormer), equation 34. Channel p is paired with p + d / 2 if `apart`, else channel 2 p with 2 p +
    1; `cos` and `sin` may have a common factor. `apart` and `backward` are 0 or 1.
    """
    count, length, width = x_ntd.shape
    half = width // 2
    sign = x_ntd.dtype.type(-1 if backward else 1)
    for n in range(count):
        for t in range(length):
            x = x_ntd[n, t]
            cos = cos_tp[t]
            sin = sin_tp[t]
            if apart:
                low = x[:half]
                high = x[half:]
                for p in range(half):
                    first = low[p]
                    second = high[p]
                    low[p] = first * cos[p] - second * (sign * sin[p])
                    high[p] = second * cos[p] + first * (sign * sin[p])
            else:
                for p in range(half):
                    first = x[2 * p]
                    second = x[2 * p + 1]
                    x[2 * p] = first * cos[p] - second * (sign * sin[p])
                    x[2 * p + 1] = second * cos[p] + first * (sign * sin[p])


@kernel_apart
def drop(x_nc: Array, keys_n: Indices, positions_n: Indices, rate: float) -> None:
    """``x = 0`` where a number in [0, 1), drawn for each key, position and channel, is below `rate`, else
    ``x / (1 - rate)``.

    The numbers are those of splitmix64 (Steele, Lea and Flood, 2014), from the key on.
    """
    rows, columns = x_nc.shape
    zero = x_nc.dtype.type(0)
    scale = x_nc.dtype.type(1 / (1 - rate))
    for n in range(rows):
        count = np.uint64(keys_n[n]) + np.uint64(positions_n[n] * columns) * np.uint64(GOLDEN)
        for c in range(columns):
            count += np.uint64(GOLDEN)
            z = (count ^ (count >> np.uint64(30))) * np.uint64(MIX_1)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
            z = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
            x_nc[n, c] = zero if np.float64(z) * 2.0**-53 < rate else x_nc[n, c] * scale


# What every model needs.

GROUP = KernelGroup()

# A loop over part of a row begins at a multiple of this: then few rows leave elements that fill no whole vector, each
# of which takes as long as a vector.
LANES = 16


@same_extents("weight_vc", "indices_n", "y_nc")
@GROUP.kernel
def lookup(weight_vc: Array, indices_n: Indices, y_nc: Array, first: int, count: int) -> int:
    """``y[n] = weight[indices[n] - first]``, 0 where that is outside of the table, and NaN where no rank has it.

    Returns the number of indices that no rank has.
    """
    rows, columns = y_nc.shape
    outside = 0
    for n in range(rows):
        v = indices_n[n] - first
        if 0 <= v < weight_vc.shape[0]:
            for c in range(columns):
                y_nc[n, c] = weight_vc[v, c]
        else:
            inside = 0 <= indices_n[n] < count
            outside += not inside
            nothing = y_nc.dtype.type(0 if inside else np.nan)
            for c in range(columns):
                y_nc[n, c] = nothing
    return outside


@same_extents("dy_nc", "indices_n", "dweight_vc")
@GROUP.kernel
def scatter_add(dy_nc: Array, indices_n: Indices, dweight_vc: Array, first: int) -> None:
    """``dweight[indices[n] - first] += dy[n]`` where that is inside; the adjoint of a lookup."""
    rows, columns = dy_nc.shape
    for n in range(rows):
        v = indices_n[n] - first
        if 0 <= v < dweight_vc.shape[0]:
            for c in range(columns):
                dweight_vc[v, c] += dy_nc[n, c]


@same_extents("y_nc", "bias_c", "residual_nc")
@GROUP.kernel
def add_bias(y_nc: Array, bias_c: Array, residual_nc: Array) -> None:
    """``y += bias + residual``."""
    rows, columns = y_nc.shape
    for n in range(rows):
        for c in range(columns):
            y_nc[n, c] += bias_c[c] + residual_nc[n, c]


@same_extents("x_nc", "weight_c")
@GROUP.kernel
def layer_norm(
    x_nc: Array, weight_c: Array, bias_c: Array, y_nc: Array, mean_n: Array, scale_n: Array, epsilon: float
) -> None:
    """``y = (x - mean) * scale * weight + bias`` with ``scale = 1 / sqrt(variance + epsilon)`` of each row.

    Ba, Kiros and Hinton (2016), equation 4; the variance is the biased one.
    """
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


@same_extents("dy_nc", "x_nc", "dx_nc")
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
    """Adds the gradients of `layer_norm` into `dx`, `dweight` and `dbias`."""
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


@same_extents("x_nc", "bias_c")
@GROUP.kernel
def gelu(x_nc: Array, bias_c: Array, y_nc: Array) -> None:
    """``y = GELU(x + bias)``; `x` becomes the derivative.

    Hendrycks and Gimpel (2016), the tanh form, ``h / 2 (1 + tanh(u))``, written as ``h sigmoid(2 u)``, which has no
    cancellation for negative h.
    """
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


@same_extents("dx_nc", "slope_nc", "dbias_c")
@GROUP.kernel
def gelu_backward(dx_nc: Array, slope_nc: Array, dbias_c: Array) -> None:
    """``dx *= slope``; adds the column sums of the result into `dbias`."""
    rows, columns = dx_nc.shape
    for n in range(rows):
        for c in range(columns):
            dx = dx_nc[n, c] * slope_nc[n, c]
            dx_nc[n, c] = dx
            dbias_c[c] += dx


@GROUP.kernel
def split_heads(x_nd: Array, bias_d: Array, heads_sbhtd: Array) -> None:
    """Adds the bias and sorts the columns, ordered (head, kind, channel), by kind (query, key, value) and head."""
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
def split_with_products(dy_nc: Array, y_nc: Array, dy_sbhtd: Array, delta_sbht: Array) -> None:
    """Sorts `dy` as `split_heads` does, and takes for each row of a head the inner product of `dy` and `y`."""
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
                    delta_sbht[s, b, h, t] = total


@GROUP.kernel
def causal_softmax(scores_gkq: Array, logsum_gt: Array, total_t: Array, offset: int, scale: float) -> None:
    """Turn scores, not yet scaled, into attention probabilities in place: a softmax over the keys of each query.

    Scores lie transposed, (heads of a group, keys, queries), so that sums over keys run over whole rows; `total` is
    scratch. Keys start at position 0, queries at `offset`, and later keys get probability 0. `logsum` gets, at the
    positions of the queries, the logarithm of the sum of the exponentials of the scaled scores.
    """
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
    scores_gkq: Array, dscores_gtt: Array, logsum_gt: Array, delta_gt: Array, scale: float
) -> None:
    """Recompute a block of probabilities, and turn their gradient into that of the scores, in place.

    Dao et al. (2022, FlashAttention), appendix B.4. `scores` has some keys and all queries from the position of the
    first of these keys to the end; `dscores` has all keys and queries, of which those of `scores` are replaced. `delta`
    is, for each query, the inner product of the attention output and its gradient.
    """
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
            delta = delta_gt[g, start + begin :]
            for i in range(row.size):
                weight = exp(row[i] * factor - logsum[i])
                row[i] = weight
                drow[i] = weight * (drow[i] - delta[i]) * factor
            scores_gkq[g, j, :j] = 0
            dscores_gtt[g, start + j, start : start + j] = 0


@same_extents("logits_nv", "targets_n")
@GROUP.kernel
def cross_entropy(logits_nv: Array, targets_n: Indices) -> float:
    """Sum over rows of ``-log softmax(logits)[target]`` in nats; `logits` becomes the gradient of that sum.

    If a target is no column the sum is NaN, and the logits stay as they are.
    """
    rows, columns = logits_nv.shape
    for n in range(rows):
        if not 0 <= targets_n[n] < columns:
            return np.nan
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
    """The largest logit of each row, -infinity of an empty row."""
    rows, columns = logits_nv.shape
    for n in range(rows):
        top = logits_nv.dtype.type(-np.inf)
        for v in range(columns):
            logit = logits_nv[n, v]
            top = logit if logit > top else top
        top_n[n] = top


@kernel_apart
def exponentials(
    logits_nv: Array, targets_n: Indices, top_n: Array, total_n: Array, picked_n: Array, first: int, count: int
) -> None:
    """Logits become ``exp(logits - top)``; `total` their sums, `picked` the logit of the target, less the top.

    Columns are a slice of the `count` of the vocabulary from `first` on; `picked` is 0 where the target is outside of
    the slice, `total` NaN where it is outside of the vocabulary.
    """
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
        total_n[n] = total if 0 <= targets_n[n] < count else np.nan


@kernel_apart
def cross_entropy_of_sums(weights_nv: Array, targets_n: Indices, total_n: Array, picked_n: Array, first: int) -> float:
    """The rest of `cross_entropy`, from what `exponentials` left, with `total` and `picked` of the whole vocabulary."""
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
