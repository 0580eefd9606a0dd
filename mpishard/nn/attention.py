"""Causal self-attention, one block of queries of one head at a time, so that the scores stay in cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from mpishard.nn.layers import Layer, Linear
from mpishard.nn.workspace import Workspace

Array = Any

# Queries (forward) or keys (backward) at a time.  Half of the scores of a sequence are masked, and blocks skip most of
# them; 96 rows times 256 keys of 32 channels is small enough for OpenBLAS's kernels that need no packing.
BLOCK = 96
# Scores at a time: heads of a sequence are computed together up to this number, which still stays in cache.
GROUP_SCORES = 4 * 256 * 256


class CausalSelfAttention(Layer):
    """Multi-head attention in which a position sees itself and what came before (Vaswani et al., 2017).

    Scores are never stored: the backward pass computes them anew from queries and keys and the logarithm of each
    query's normaliser (Dao et al., 2022).  Blocks that the mask hides entirely are not computed.  The most that exists
    at a time is the gradient by all scores of one head of one sequence, or of a few heads where sequences are short.

    The bias of the keys shifts all scores of a query alike, which the softmax does not see: in exact arithmetic its
    gradient is zero, and what is computed for it is rounding noise.

    Parameters
    ----------
    name : str
        Its tensors are ``name.qkv.{weight,bias}`` and ``name.output.{weight,bias}``.  The columns of ``qkv`` are
        ordered by head, then query, key, value, then channel, so that a slice by heads is one run of columns.
    width : int
        Channels; a multiple of `heads`.
    heads : int
        Number of heads.
    output_scale : float
        Standard deviation of the initial weights of the output projection.
    """

    def __init__(self, name: str, width: int, heads: int, *, output_scale: float = 0.02) -> None:
        if heads < 1 or width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads; every head needs as many channels")
        self.qkv = Linear(f"{name}.qkv", width, 3 * width, split=1)
        self.output = Linear(f"{name}.output", width, width, scale=output_scale, split=0)
        super().__init__(name, [self.qkv, self.output])
        self.width, self.heads, self.head_width = width, heads, width // heads
        self.scale = 1 / math.sqrt(self.head_width)

    def forward(self, x_nc: Array, work: Workspace, length: int, residual_nc: Array | None = None) -> Array:
        """Attention within each run of `length` rows, plus `residual` where given.

        Keeps `x`, which must stay as it is until `backward`.
        """
        rows = len(x_nc)
        work.kept[self.name] = x_nc
        qkv_nd = self.qkv.product(x_nc, work.borrow("qkv", rows, 3 * self.width))
        heads_sbhtd, mixed_nc, logsum_bht = self._saved(work, rows, length)
        self.ops.split_heads(qkv_nd, self.qkv.bias, heads_sbhtd)
        q_bhtd, k_bhtd, v_bhtd = heads_sbhtd
        mixed_bhtd = mixed_nc.reshape(-1, length, self.heads, self.head_width).swapaxes(1, 2)
        total = work.borrow("attention total", BLOCK)
        for sequence, heads in self._groups(rows // length, length):
            q, k, v = q_bhtd[sequence, heads], k_bhtd[sequence, heads], v_bhtd[sequence, heads]
            mixed = mixed_bhtd[sequence, heads]
            logsum = logsum_bht[sequence, heads]
            for first in range(0, length, BLOCK):
                last = min(first + BLOCK, length)
                scores = self._block(work, "scores", len(q), last, last - first)
                np.matmul(k[:, :last], q[:, first:last].swapaxes(1, 2), out=scores)
                self.ops.causal_softmax(scores, logsum, total, first, self.scale)
                np.matmul(scores.swapaxes(1, 2), v[:, :last], out=mixed[:, first:last])
        return self.output.forward(mixed_nc, work, residual_nc)

    def backward(self, dy_nc: Array, work: Workspace, length: int) -> Array:
        """Gradient by `x`."""
        rows = len(dy_nc)
        batch = rows // length
        heads_sbhtd, mixed_nc, logsum_bht = self._saved(work, rows, length)
        q_bhtd, k_bhtd, v_bhtd = heads_sbhtd
        dmixed_nc = self.output.backward(dy_nc, work)
        dmixed_bhtd = work.borrow("dmixed by heads", batch, self.heads, length, self.head_width)
        inner_bht = work.borrow("attention inner", batch, self.heads, length)
        self.ops.split_with_products(dmixed_nc, mixed_nc, dmixed_bhtd, inner_bht)
        dqkv_nd = work.borrow("qkv", rows, 3 * self.width)
        dqkv_bthsd = dqkv_nd.reshape(batch, length, self.heads, 3, self.head_width)
        dq_bhtd, dk_bhtd, dv_bhtd = dqkv_bthsd.transpose(3, 0, 2, 1, 4)
        for sequence, heads in self._groups(batch, length):
            q, k, v = q_bhtd[sequence, heads], k_bhtd[sequence, heads], v_bhtd[sequence, heads]
            dq, dk, dv = dq_bhtd[sequence, heads], dk_bhtd[sequence, heads], dv_bhtd[sequence, heads]
            dmixed = dmixed_bhtd[sequence, heads]
            logsum, inner = logsum_bht[sequence, heads], inner_bht[sequence, heads]
            dscores = self._block(work, "dscores", len(q), length, length)
            for first in range(0, length, BLOCK):
                last = min(first + BLOCK, length)
                weights = self._block(work, "scores", len(q), last - first, length - first)
                dpart = dscores[:, first:last, first:]
                np.matmul(k[:, first:last], q[:, first:].swapaxes(1, 2), out=weights)
                np.matmul(v[:, first:last], dmixed[:, first:].swapaxes(1, 2), out=dpart)
                self.ops.causal_softmax_backward(weights, dscores, logsum, inner, self.scale)
                np.matmul(weights, dmixed[:, first:], out=dv[:, first:last])
                np.matmul(dpart, q[:, first:], out=dk[:, first:last])
            for first in range(0, length, BLOCK):
                last = min(first + BLOCK, length)
                np.matmul(dscores[:, :last, first:last].swapaxes(1, 2), k[:, :last], out=dq[:, first:last])
        dx_nc = self.qkv.input_gradient(dqkv_nd, work.borrow(f"{self.role}.dx", rows, self.width))
        self.qkv.weight_gradient(work.kept[self.name], dqkv_nd, work)
        return dx_nc

    def _saved(self, work: Workspace, rows: int, length: int) -> tuple[Array, Array, Array]:
        batch = rows // length
        return (
            work.save(f"{self.name}.heads", 3, batch, self.heads, length, self.head_width),
            work.save(f"{self.name}.mixed", rows, self.width),
            work.save(f"{self.name}.logsum", batch, self.heads, length),
        )

    def _groups(self, batch: int, length: int) -> Iterator[tuple[int, slice]]:
        """Sequences and the heads of each that are computed at a time."""
        size = min(self.heads, max(1, GROUP_SCORES // length**2))
        for sequence in range(batch):
            for first in range(0, self.heads, size):
                yield sequence, slice(first, first + size)

    def _block(self, work: Workspace, name: str, *shape: int) -> Array:
        return work.scratch(name, (prod(shape),), work.dtype).reshape(shape)
