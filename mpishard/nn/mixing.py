"""Causal attention of given queries, keys and values, on the host one block of queries of one head at a time.

So the scores stay in cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from mpishard.nn.fused_mixing import choose_mixing
from mpishard.nn.layers import Layer
from mpishard.nn.workspace import Workspace

Array = Any

# Queries (forward) or keys (backward) at a time.  Half of the scores of a sequence are masked, and blocks skip most of
# them; 96 rows times 256 keys of 32 channels is small enough for OpenBLAS's kernels that need no packing.
BLOCK = 96
# Scores at a time: heads of a sequence are computed together up to this number, which still stays in cache.
GROUP_SCORES = 4 * 256 * 256


class CausalMixing(Layer):
    """Mixes values by the softmax of the products of queries and keys, in which a position sees what came before.

    Scores are never stored: the backward pass computes them again from queries, keys and the logarithm of each query's
    normaliser (Dao et al., 2022).  Blocks that are masked entirely are not computed.  The largest temporary on the host
    is the gradient of all scores of one head of one sequence, or of a few heads of a short sequence; device arrays are
    computed in larger pieces (`mpishard.nn.device_mixing`), or by a library (`mpishard.nn.fused_mixing`).

    Each key and value head serves the queries of all kinds s (grouped queries; one kind: as many queries as keys).
    Axes: s kinds of queries, b sequences, h key and value heads, t positions, d channels.

    Not collective.

    Parameters
    ----------
    name : str
        Prefix of its memory in a workspace; it has no tensors.
    head_width : int
        Channels of a head.
    """

    def __init__(self, name: str, head_width: int) -> None:
        super().__init__(name)
        self.scale: float = 1 / math.sqrt(head_width)

    def forward(
        self, q_sbhtd: Array, k_bhtd: Array, v_bhtd: Array, mixed_sbhtd: Array, logsum_sbht: Array, work: Workspace
    ) -> None:
        """The mixed values, and the logarithm of each query's normaliser.

        Parameters
        ----------
        q_sbhtd, k_bhtd, v_bhtd : array
            Of axes as above.  If there are more keys than queries, the queries are those of the last positions.
        mixed_sbhtd, logsum_sbht : array
            Overwritten; `logsum`, C-contiguous, has as many positions as there are keys.
        work : Workspace
            Memory of the micro-batch.
        """
        if self.module is not np:
            mixing = choose_mixing(self.matmul, self.ops, self.scale, q_sbhtd, k_bhtd.shape[2], work)
            mixing.forward(q_sbhtd, k_bhtd, v_bhtd, mixed_sbhtd, logsum_sbht, work)
            return
        kinds, batch, count, length, _ = q_sbhtd.shape
        matmul, block = self.matmul, BLOCK
        keys = k_bhtd.shape[2]
        before = keys - length
        total = work.borrow("attention total", block)
        for sequence, heads in self._groups(batch, count, length * keys):
            k, v = k_bhtd[sequence, heads], v_bhtd[sequence, heads]
            for kind in range(kinds):
                q, mixed = q_sbhtd[kind, sequence, heads], mixed_sbhtd[kind, sequence, heads]
                logsum = logsum_sbht[kind, sequence, heads]
                for first in range(0, length, block):
                    last = min(first + block, length)
                    seen = before + last
                    scores = self._block(work, "scores", len(q), seen, last - first)
                    matmul(k[:, :seen], q[:, first:last].swapaxes(1, 2), out=scores)
                    self.ops.causal_softmax(scores, logsum, total, before + first, self.scale)
                    matmul(scores.swapaxes(1, 2), v[:, :seen], out=mixed[:, first:last])

    def backward(
        self,
        heads_sbhtd: Array,
        logsum_sbht: Array,
        mixed_sbhtd: Array,
        dmixed_sbhtd: Array,
        inner_sbht: Array,
        dheads_sbhtd: Array,
        work: Workspace,
    ) -> None:
        """Gradients by queries, keys and values.

        Parameters
        ----------
        heads_sbhtd : array
            The queries of all kinds, then the keys, then the values.
        logsum_sbht : array
            As `forward` left it.
        mixed_sbhtd : array
            As `forward` left them.
        dmixed_sbhtd : array
            Gradient of the loss by the mixed values.
        inner_sbht : array
            Its inner product with the mixed values, for each query.
        dheads_sbhtd : array
            Overwritten by the gradients by `heads`.
        work : Workspace
            That of the forward pass.
        """
        if self.module is not np:
            length = dmixed_sbhtd.shape[3]
            mixing = choose_mixing(self.matmul, self.ops, self.scale, dmixed_sbhtd, length, work)
            mixing.backward(heads_sbhtd, logsum_sbht, mixed_sbhtd, dmixed_sbhtd, inner_sbht, dheads_sbhtd, work)
            return
        kinds, batch, count, length, _ = dmixed_sbhtd.shape
        for sequence, heads in self._groups(batch, count, length**2):
            k, v = heads_sbhtd[kinds, sequence, heads], heads_sbhtd[kinds + 1, sequence, heads]
            dk, dv = dheads_sbhtd[kinds, sequence, heads], dheads_sbhtd[kinds + 1, sequence, heads]
            for kind in range(kinds):
                q, dq = heads_sbhtd[kind, sequence, heads], dheads_sbhtd[kind, sequence, heads]
                dmixed = dmixed_sbhtd[kind, sequence, heads]
                statistics = logsum_sbht[kind, sequence, heads], inner_sbht[kind, sequence, heads]
                self._backward_of_group(q, k, v, dmixed, statistics, dq, dk, dv, kind > 0, work)

    def _backward_of_group(
        self,
        q: Array,
        k: Array,
        v: Array,
        dmixed: Array,
        statistics: tuple[Array, Array],
        dq: Array,
        dk: Array,
        dv: Array,
        accumulate: bool,
        work: Workspace,
    ) -> None:
        """The gradients of one kind of queries of a few heads; keys and values may have some of other kinds."""
        matmul, (count, length, _) = self.matmul, q.shape
        block = BLOCK
        dscores = self._block(work, "dscores", count, length, length)
        for first in range(0, length, block):
            last = min(first + block, length)
            weights = self._block(work, "scores", count, last - first, length - first)
            dpart = dscores[:, first:last, first:]
            matmul(k[:, first:last], q[:, first:].swapaxes(1, 2), out=weights)
            matmul(v[:, first:last], dmixed[:, first:].swapaxes(1, 2), out=dpart)
            self.ops.causal_softmax_backward(weights, dscores, *statistics, self.scale)
            for part, other, out in ((weights, dmixed, dv), (dpart, q, dk)):
                if accumulate:
                    product = self._block(work, "attention product", count, last - first, q.shape[2])
                    matmul(part, other[:, first:], out=product)
                    out[:, first:last] += product
                else:
                    matmul(part, other[:, first:], out=out[:, first:last])
        for first in range(0, length, block):
            last = min(first + block, length)
            matmul(dscores[:, :last, first:last].swapaxes(1, 2), k[:, :last], out=dq[:, first:last])

    def _groups(self, batch: int, heads: int, scores_of_head: int) -> Iterator[tuple[int, slice]]:
        """Sequences and the heads of each that are computed at a time."""
        size = min(heads, max(1, GROUP_SCORES // scores_of_head))
        for sequence in range(batch):
            for first in range(0, heads, size):
                yield sequence, slice(first, first + size)

    def _block(self, work: Workspace, name: str, *shape: int) -> Array:
        return work.scratch(name, (prod(shape),), work.dtype).reshape(shape)
