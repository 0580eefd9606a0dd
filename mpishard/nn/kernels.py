"""The functions of ``formulas`` compiled for NumPy arrays: one pass over memory each, no temporary arrays.

Loops are written out plainly, since that compiles fastest and LLVM vectorises it.  ``reassoc`` lets it vectorise sums
of rows, ``contract`` lets it use fused multiply-add; NaN and infinity keep their meaning.  Two habits decide whether
a loop vectorises: an array that is read and written is one argument (two arguments that overlap fail the check that
guards the vectorised loop), and a loop over part of a row runs from 0 over a slice (an index that might be negative
carries Python's wrap-around).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.backend.compiled import HostFunction, before_compiling
from mpishard.nn.formulas import GELU_CUBIC, GELU_SLOPE

# The letters after the underscore in an array's name are its dimensions.
Array = Any
Indices = Any

# Kernels that every model needs, and the dtypes with which they were announced.
_together: list[tuple[HostFunction, dict[str, str]]] = []
_begun: set[np.dtype] = set()


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function whose parameters are arrays, the first of them of floats, and then scalars."""
    compiled, call = _compiled(function)
    _together.append((compiled, function.__annotations__))

    @functools.wraps(function)
    def call_with_others(*arguments: Any) -> Any:
        dtype = arguments[0].dtype
        if dtype not in _begun:
            _begun.add(dtype)
            for each, annotations in _together:
                each.expect(*_arguments(annotations, dtype))
        return call(*arguments)

    return call_with_others


def _kernel_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Like `_kernel`, for a function that few models need."""
    return functools.wraps(function)(_compiled(function)[1])


def _compiled(function: Callable[..., Any]) -> tuple[HostFunction, Callable[..., Any]]:
    arrays = sum(annotation in ("Array", "Indices") for annotation in function.__annotations__.values())
    # They allocate nothing, and compile a tenth faster without the code that counts references.
    compiled = HostFunction(function, fastmath={"reassoc", "contract", "nsz"}, _nrt=False)
    return compiled, lambda *arguments: compiled(arguments[:arrays], arguments[arrays:])


def _arguments(annotations: dict[str, str], dtype: np.dtype) -> tuple[list[np.ndarray], list[float]]:
    """Arguments of the types that a kernel gets: empty arrays, and zeros."""
    arrays: list[np.ndarray] = []
    scalars: list[float] = []
    for name, annotation in annotations.items():
        if annotation in ("Array", "Indices"):
            dimensions = len(name.rpartition("_")[2])
            arrays.append(np.empty((0,) * dimensions, np.int64 if annotation == "Indices" else dtype))
        elif name != "return":
            scalars.append({"int": 0, "float": 0.0}[annotation])
    return arrays, scalars


def _exp(x: Any) -> Any:
    """Exponential; in float32 without a call, so that loops over it vectorise (within 2 units in the last place)."""
    return math.exp(x)


@before_compiling
def _overload_exp() -> None:
    import numba
    from numba.extending import overload

    @overload(_exp, jit_options={"error_model": "numpy", "fastmath": {"contract"}})
    def exp_overload(x: Any) -> Any:
        # Cephes expf: x = n log 2 + r with |r| <= log(2) / 2, exp(x) = 2^n exp(r). The two parts of log 2 make n times
        # the first exact. The comparisons let NaN through and keep 2^n a normal number: nothing is smaller than about
        # 1e-38.
        log2e, high, low = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
        c0, c1, c2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
        c3, c4, c5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
        half, one, least, most = np.float32(0.5), np.float32(1.0), np.float32(-87.33654), np.float32(88.72283)

        def exp32(x: Any) -> Any:
            x = least if x < least else x
            x = most if x > most else x
            n = np.floor(x * log2e + half)
            r = x - n * high - n * low
            p = ((((c0 * r + c1) * r + c2) * r + c3) * r + c4) * r + c5
            power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
            return (p * r * r + r + one) * power

        def exp64(x: Any) -> Any:
            return math.exp(x)

        return exp32 if x == numba.float32 else exp64


@_kernel
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


@_kernel
def scatter_add(dy_nc: Array, indices_n: Indices, dweight_vc: Array, first: int) -> None:
    rows, columns = dy_nc.shape
    for n in range(rows):
        v = indices_n[n] - first
        if 0 <= v < dweight_vc.shape[0]:
            for c in range(columns):
                dweight_vc[v, c] += dy_nc[n, c]


@_kernel
def add_bias(y_nc: Array, bias_c: Array, residual_nc: Array) -> None:
    rows, columns = y_nc.shape
    for n in range(rows):
        for c in range(columns):
            y_nc[n, c] += bias_c[c] + residual_nc[n, c]


@_kernel
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
            y_nc[n, c] = (x_nc[n, c] - mean) * scale * weight_c[c] + bias_c[c]
        mean_n[n] = mean
        scale_n[n] = scale


@_kernel
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


@_kernel
def gelu(x_nc: Array, bias_c: Array, y_nc: Array) -> None:
    rows, columns = x_nc.shape
    one = x_nc.dtype.type(1)
    outer = x_nc.dtype.type(GELU_SLOPE)
    cubic = x_nc.dtype.type(GELU_CUBIC)
    cubic3 = x_nc.dtype.type(3 * GELU_CUBIC)
    for n in range(rows):
        for c in range(columns):
            h = x_nc[n, c] + bias_c[c]
            square = h * h
            e = _exp(-outer * h * (one + cubic * square))
            s = one / (one + e)
            y = h * s
            y_nc[n, c] = y
            # 1 - s, where s is close to 1 without its cancellation.
            rest = e * s if h > 0 else one - s
            x_nc[n, c] = s + y * rest * outer * (one + cubic3 * square)


@_kernel
def gelu_backward(dx_nc: Array, slope_nc: Array, dbias_c: Array) -> None:
    rows, columns = dx_nc.shape
    for n in range(rows):
        for c in range(columns):
            dx = dx_nc[n, c] * slope_nc[n, c]
            dx_nc[n, c] = dx
            dbias_c[c] += dx


@_kernel
def split_heads(x_nd: Array, bias_d: Array, heads_sbhtd: Array) -> None:
    kinds, batch, heads, length, width = heads_sbhtd.shape
    for b in range(batch):
        for h in range(heads):
            for t in range(length):
                for s in range(kinds):
                    column = (h * kinds + s) * width
                    row = x_nd[b * length + t, column : column + width]
                    bias = bias_d[column : column + width]
                    out = heads_sbhtd[s, b, h, t]
                    for d in range(width):
                        out[d] = row[d] + bias[d]


@_kernel
def split_with_products(dy_nc: Array, y_nc: Array, dy_bhtd: Array, inner_bht: Array) -> None:
    batch, heads, length, width = dy_bhtd.shape
    for b in range(batch):
        for h in range(heads):
            for t in range(length):
                dy = dy_nc[b * length + t, h * width : h * width + width]
                y = y_nc[b * length + t, h * width : h * width + width]
                out = dy_bhtd[b, h, t]
                total = dy_nc.dtype.type(0)
                for d in range(width):
                    out[d] = dy[d]
                    total += dy[d] * y[d]
                inner_bht[b, h, t] = total


@_kernel
def causal_softmax(scores_gkq: Array, logsum_gt: Array, total_t: Array, offset: int, scale: float) -> None:
    group, keys, queries = scores_gkq.shape
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
            scores_gkq[g, j, :first] = 0
            row = scores_gkq[g, j, first:]
            tops = logsum[first:]
            totals = total_t[first:]
            for i in range(row.size):
                weight = _exp((row[i] - tops[i]) * factor)
                row[i] = weight
                totals[i] += weight
        for i in range(queries):
            total = total_t[i]
            logsum[i] = logsum[i] * factor + math.log(total)
            total_t[i] = scores_gkq.dtype.type(1) / total
        for j in range(keys):
            for i in range(queries):
                scores_gkq[g, j, i] *= total_t[i]


@_kernel
def causal_softmax_backward(
    scores_gkq: Array, dscores_gtt: Array, logsum_gt: Array, inner_gt: Array, scale: float
) -> None:
    group, keys, queries = scores_gkq.shape
    start = dscores_gtt.shape[2] - queries
    factor = scores_gkq.dtype.type(scale)
    for g in range(group):
        for j in range(keys):
            scores_gkq[g, j, :j] = 0
            dscores_gtt[g, start + j, start : start + j] = 0
            row = scores_gkq[g, j, j:]
            drow = dscores_gtt[g, start + j, start + j :]
            logsum = logsum_gt[g, start + j :]
            inner = inner_gt[g, start + j :]
            for i in range(row.size):
                weight = _exp(row[i] * factor - logsum[i])
                row[i] = weight
                drow[i] = weight * (drow[i] - inner[i]) * factor


@_kernel
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
            weight = _exp(logits_nv[n, v] - top)
            logits_nv[n, v] = weight
            total += weight
        loss += math.log(np.float64(total)) - picked
        share = logits_nv.dtype.type(1) / total
        for v in range(columns):
            logits_nv[n, v] *= share
        logits_nv[n, targets_n[n]] -= logits_nv.dtype.type(1)
    return loss


@_kernel_apart
def row_maximum(logits_nv: Array, top_n: Array) -> None:
    rows, columns = logits_nv.shape
    for n in range(rows):
        top = logits_nv.dtype.type(-np.inf)
        for v in range(columns):
            logit = logits_nv[n, v]
            top = logit if logit > top else top
        top_n[n] = top


@_kernel_apart
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
            weight = _exp(logits_nv[n, v] - top)
            logits_nv[n, v] = weight
            total += weight
        total_n[n] = total


@_kernel_apart
def cross_entropy_of_sums(weights_nv: Array, targets_n: Indices, total_n: Array, picked_n: Array, first: int) -> float:
    rows, columns = weights_nv.shape
    # A loop of its own: the order in which the compiler adds may depend on all that is in the loop, as on the number of
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
