"""The functions of ``formulas`` that models like Llama need in addition, and dropout, compiled for NumPy arrays.

See `mpishard.nn.compiling` for how they are written.
"""

from __future__ import annotations

import numpy as np

from mpishard.nn.compiling import Array, Indices, KernelGroup, element, exp, kernel_apart, wide_vectors
from mpishard.nn.formulas import GOLDEN, MIX_1, MIX_2

GROUP = KernelGroup()


@GROUP.kernel
def rms_norm(x_nc: Array, weight_c: Array, y_nc: Array, scale_n: Array, epsilon: float) -> None:
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


@GROUP.kernel
def rms_norm_backward(
    dy_nc: Array, x_nc: Array, scale_n: Array, weight_c: Array, dx_nc: Array, dweight_c: Array
) -> None:
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


@GROUP.kernel
def swiglu(gate_nc: Array, up_nc: Array, y_nc: Array) -> None:
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


@GROUP.kernel
def swiglu_backward(dgate_nc: Array, dup_nc: Array, dy_nc: Array) -> None:
    rows, columns = dy_nc.shape
    for n in range(rows):
        for c in range(columns):
            dy = dy_nc[n, c]
            dgate_nc[n, c] *= dy
            dup_nc[n, c] *= dy


@GROUP.kernel
def merge_heads(x_nd: Array, heads_sbhtd: Array) -> None:
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


@GROUP.kernel
def rotate(x_ntd: Array, cos_tp: Array, sin_tp: Array, apart: int, backward: int) -> None:
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
