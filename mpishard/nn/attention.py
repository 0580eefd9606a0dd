"""Causal self-attention, one block of queries of one head at a time, so that the scores stay in cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from mpishard.nn.layers import Layer
from mpishard.nn.linear import Linear
from mpishard.nn.workspace import Workspace

Array = Any

# Queries (forward) or keys (backward) at a time.  Half of the scores of a sequence are masked, and blocks skip most of
# them; 96 rows times 256 keys of 32 channels is small enough for OpenBLAS's kernels that need no packing.
BLOCK = 96
# Scores at a time: heads of a sequence are computed together up to this number, which still stays in cache.
GROUP_SCORES = 4 * 256 * 256
# On a device small pieces cost more to launch than the masked half costs to compute: whole sequences, and this many
# scores at a time, so that memory stays bounded.
DEVICE_SCORES = 2**27


class CausalSelfAttention(Layer):
    """Multi-head attention in which a position sees itself and what came before (Vaswani et al., 2017).

    Scores are never stored: the backward pass computes them again from queries, keys and the logarithm of each query's
    normaliser (Dao et al., 2022).  Blocks that are masked entirely are not computed.  The largest temporary is the
    gradient of all scores of one head of one sequence, or of a few heads of a short sequence.

    The bias of the keys shifts all scores of a query alike, which does not change the softmax: its exact gradient is
    zero, and the computed one is rounding noise.

    Its passes are collective over the tensor axis.

    Parameters
    ----------
    name : str
        Its tensors are ``name.qkv.{weight,bias}`` and ``name.output.{weight,bias}``.  The columns of ``qkv`` are
        ordered by head, then query, key, value, then channel, so that a slice by heads is one run of columns.
    width : int
        Channels; a multiple of `heads`.
    heads : int
        Number of heads, a multiple of the tensor size; each tensor rank computes some of them.
    output_scale : float
        Standard deviation of the initial weights of the output projection.
    sequence_parallel : bool
        Whether tensor ranks hold some rows each outside of the attention.

    Raises
    ------
    ValueError
        If `width` is no multiple of `heads`.
    """

    def __init__(
        self, name: str, width: int, heads: int, *, output_scale: float = 0.02, sequence_parallel: bool = False
    ) -> None:
        if heads < 1 or width % heads:
            raise ValueError(f"width {width} is not a multiple of {heads} heads; every head needs as many channels")
        self.qkv: Linear = Linear(f"{name}.qkv", width, 3 * width, split=1)
        self.output: Linear = Linear(
            f"{name}.output", width, width, scale=output_scale, split=0, sequence_parallel=sequence_parallel
        )
        super().__init__(name, [self.qkv, self.output])
        self.width: int = width
        self.head_width: int = width // heads
        self.scale: float = 1 / math.sqrt(self.head_width)

    def forward(self, x_nc: Array, work: Workspace, length: int, residual_nc: Array | None = None) -> Array:
        """Attention within each sequence, plus `residual` where given.

        Parameters
        ----------
        x_nc : array, shape (n, width)
            Sequences end to end; the rows that this rank holds.  Kept; it must stay as it is until `backward`.
        work : Workspace
            Memory of the micro-batch.
        length : int
            Tokens of a sequence.
        residual_nc : array, shape (n, width), optional
            Added to the result.

        Returns
        -------
        array, shape (n, width)
            The rows that this rank holds, in the memory of `work`.
        """
        qkv_nd = self.qkv.product(x_nc, work, functools.partial(work.borrow, "qkv"))
        rows, width = len(qkv_nd), qkv_nd.shape[1] // 3
        shape = self._shape_of_heads(rows // length, width, length)
        heads_lsbhtd = work.save(f"{self.role}.heads", *shape)
        mixed_nc = work.save(f"{self.role}.mixed", rows, width)
        logsum_lbht = work.save_statistics(f"{self.role}.logsum", shape[0], *shape[2:5])
        work.kept[self.role] = x_nc, heads_lsbhtd, mixed_nc, logsum_lbht
        apart, biases = self.tensor.slices.apart, self.tensor.slices.cut(self.qkv.bias, 3 * self.width, 0)
        qkv_lnd, mixed_lnc = apart(qkv_nd, 3 * self.width), apart(mixed_nc, self.width)
        for qkv, bias, heads, mixed, logsum in zip(qkv_lnd, biases, heads_lsbhtd, mixed_lnc, logsum_lbht, strict=True):
            self.ops.split_heads(qkv, bias, heads)
            self._mix(heads, mixed, logsum, work)
        return self.output.forward(mixed_nc, work, residual_nc)

    def _mix(self, heads_sbhtd: Array, mixed_nc: Array, logsum_bht: Array, work: Workspace) -> None:
        """The attention of the heads of one slice, and the logarithm of each query's normaliser."""
        q_bhtd, k_bhtd, v_bhtd = heads_sbhtd
        batch, count, length, _ = q_bhtd.shape
        mixed_bhtd = mixed_nc.reshape(batch, length, count, self.head_width).swapaxes(1, 2)
        matmul, block = self.matmul, self._queries_at_a_time(length)
        total = work.borrow("attention total", block)
        for sequence, heads in self._groups(batch, count, length):
            q, k, v = q_bhtd[sequence, heads], k_bhtd[sequence, heads], v_bhtd[sequence, heads]
            mixed = mixed_bhtd[sequence, heads]
            logsum = logsum_bht[sequence, heads]
            for first in range(0, length, block):
                last = min(first + block, length)
                scores = self._block(work, "scores", len(q), last, last - first)
                matmul(k[:, :last], q[:, first:last].swapaxes(1, 2), out=scores)
                self.ops.causal_softmax(scores, logsum, total, first, self.scale)
                matmul(scores.swapaxes(1, 2), v[:, :last], out=mixed[:, first:last])

    def backward(self, dy_nc: Array, work: Workspace, length: int) -> Array:
        """Gradient by `x`.

        Parameters
        ----------
        dy_nc : array, shape (n, width)
            Gradient of the loss by the output.
        work : Workspace
            That of the forward pass.
        length : int
            Tokens of a sequence.

        Returns
        -------
        array, shape (n, width)
            In the memory of `work`.
        """
        x_nc, heads_lsbhtd, mixed_nc, logsum_lbht = work.kept[self.role]
        dmixed_nc = self.output.backward(dy_nc, work)
        dqkv_nd = work.borrow("qkv", len(mixed_nc), 3 * mixed_nc.shape[1])
        apart = self.tensor.slices.apart
        mixed_lnc, dmixed_lnc = apart(mixed_nc, self.width), apart(dmixed_nc, self.width)
        dqkv_lnd = apart(dqkv_nd, 3 * self.width)
        for arrays in zip(heads_lsbhtd, logsum_lbht, mixed_lnc, dmixed_lnc, dqkv_lnd, strict=True):
            self._mix_backward(*arrays, work)
        dx_nc = self.qkv.input_gradient(dqkv_nd, work)
        self.qkv.bias_gradient(dqkv_nd, work)
        self.qkv.weight_gradient(x_nc, dqkv_nd, work)
        return dx_nc

    def _mix_backward(
        self,
        heads_sbhtd: Array,
        logsum_bht: Array,
        mixed_nc: Array,
        dmixed_nc: Array,
        dqkv_nd: Array,
        work: Workspace,
    ) -> None:
        """Gradients by query, key and value of the heads of one slice, into `dqkv`."""
        q_bhtd, k_bhtd, v_bhtd = heads_sbhtd
        batch, count, length, _ = q_bhtd.shape
        matmul, block = self.matmul, self._queries_at_a_time(length)
        dmixed_bhtd = work.borrow("dmixed by heads", batch, count, length, self.head_width)
        inner_bht = work.borrow("attention inner", batch, count, length)
        self.ops.split_with_products(dmixed_nc, mixed_nc, dmixed_bhtd, inner_bht)
        dqkv_bthsd = dqkv_nd.reshape(batch, length, count, 3, self.head_width)
        dq_bhtd, dk_bhtd, dv_bhtd = dqkv_bthsd.transpose(3, 0, 2, 1, 4)
        for sequence, heads in self._groups(batch, count, length):
            q, k, v = q_bhtd[sequence, heads], k_bhtd[sequence, heads], v_bhtd[sequence, heads]
            dq, dk, dv = dq_bhtd[sequence, heads], dk_bhtd[sequence, heads], dv_bhtd[sequence, heads]
            dmixed = dmixed_bhtd[sequence, heads]
            logsum, inner = logsum_bht[sequence, heads], inner_bht[sequence, heads]
            dscores = self._block(work, "dscores", len(q), length, length)
            for first in range(0, length, block):
                last = min(first + block, length)
                weights = self._block(work, "scores", len(q), last - first, length - first)
                dpart = dscores[:, first:last, first:]
                matmul(k[:, first:last], q[:, first:].swapaxes(1, 2), out=weights)
                matmul(v[:, first:last], dmixed[:, first:].swapaxes(1, 2), out=dpart)
                self.ops.causal_softmax_backward(weights, dscores, logsum, inner, self.scale)
                matmul(weights, dmixed[:, first:], out=dv[:, first:last])
                matmul(dpart, q[:, first:], out=dk[:, first:last])
            for first in range(0, length, block):
                last = min(first + block, length)
                matmul(dscores[:, :last, first:last].swapaxes(1, 2), k[:, :last], out=dq[:, first:last])

    def _shape_of_heads(self, batch: int, width: int, length: int) -> tuple[int, ...]:
        """By slice: queries, keys and values, sequences, heads, positions, channels; `width`: of this rank."""
        slices = len(self.tensor.slices.own)
        return slices, 3, batch, width // self.head_width // slices, length, self.head_width

    def _queries_at_a_time(self, length: int) -> int:
        return BLOCK if self.module is np else length

    def _groups(self, batch: int, heads: int, length: int) -> Iterator[tuple[int, slice]]:
        """Sequences and the heads of each that are computed at a time."""
        scores = GROUP_SCORES if self.module is np else DEVICE_SCORES
        size = min(heads, max(1, scores // length**2))
        for sequence in range(batch):
            for first in range(0, heads, size):
                yield sequence, slice(first, first + size)

    def _block(self, work: Workspace, name: str, *shape: int) -> Array:
        return work.scratch(name, (prod(shape),), work.dtype).reshape(shape)
