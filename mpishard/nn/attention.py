"""Causal self-attention: from rows to heads, and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from mpishard.backend.convert import convert
from mpishard.backend.kinds import backend_of
from mpishard.nn.checks import check_length
from mpishard.nn.device_attention import AttentionShape, FusedMixing, choose_mixing, fused_mixing
from mpishard.nn.layers import Layer
from mpishard.nn.linear import Linear
from mpishard.nn.norms import HeadNorms
from mpishard.nn.products import rounded_dtype
from mpishard.nn.rotary import Rotary
from mpishard.nn.workspace import KeyValueCache, Workspace

Array = Any


# Causal attention of given queries, keys and values, on the host one block of queries of one head at a time.

# Queries (forward) or keys (backward) at a time.  Half of the scores of a sequence are masked, and blocks skip most of
# them; 96 rows times 256 keys of 32 channels is small enough for OpenBLAS's kernels that need no packing.
BLOCK = 96
# Scores at a time: heads of a sequence are computed together up to this number, which still stays in cache.
GROUP_SCORES = 4 * 256 * 256


class CausalMixing(Layer):
    """Mixes values by the softmax of the products of queries and keys, in which a position sees what came before.

    Scores are never stored: the backward pass computes them again from queries, keys and the logarithm of each query's
    normaliser (Dao et al., 2022), and skips blocks that are masked entirely. The largest temporary on the host is the
    gradient of all scores of one head of one sequence, or of a few heads of a short sequence.

    Each key and value head serves the queries of all kinds s (grouped queries; one kind: as many queries as keys).
    Axes: s kinds of queries, b sequences, h key and value heads, t positions, d channels.
    """

    def __init__(self, name: str, head_width: int) -> None:
        super().__init__(name)
        self.scale: float = 1 / math.sqrt(head_width)

    def forward(
        self, q_sbhtd: Array, k_bhtd: Array, v_bhtd: Array, o_sbhtd: Array, logsum_sbht: Array, work: Workspace
    ) -> None:
        """Overwrite `o` with the output, and `logsum` with the logarithm of each query's normaliser.

        If there are more keys than queries, the queries are those of the last positions. `logsum` is C-contiguous and
        has as many positions as there are keys.
        """
        if self.module is not np:
            mixing = choose_mixing(self.matmul, self.ops, self.scale, q_sbhtd, k_bhtd.shape[2], work)
            mixing.forward(q_sbhtd, k_bhtd, v_bhtd, o_sbhtd, logsum_sbht, work)
            return
        kinds, batch, count, length, _ = q_sbhtd.shape
        matmul, block = self.matmul, BLOCK
        keys = k_bhtd.shape[2]
        before = keys - length
        total = work.borrow("attention total", block)
        for sequence, heads in self._groups(batch, count, length * keys):
            k, v = k_bhtd[sequence, heads], v_bhtd[sequence, heads]
            for kind in range(kinds):
                q, o = q_sbhtd[kind, sequence, heads], o_sbhtd[kind, sequence, heads]
                logsum = logsum_sbht[kind, sequence, heads]
                for first in range(0, length, block):
                    last = min(first + block, length)
                    seen = before + last
                    scores = self._block(work, "scores", len(q), seen, last - first)
                    matmul(k[:, :seen], q[:, first:last].swapaxes(1, 2), out=scores)
                    self.ops.causal_softmax(scores, logsum, total, before + first, self.scale)
                    matmul(scores.swapaxes(1, 2), v[:, :seen], out=o[:, first:last])

    def backward(
        self,
        heads_sbhtd: Array,
        logsum_sbht: Array,
        o_sbhtd: Array,
        do_sbhtd: Array,
        delta_sbht: Array,
        dheads_sbhtd: Array,
        work: Workspace,
    ) -> None:
        """Overwrite `dheads` with the gradients with respect to `heads`: queries of all kinds, then keys, then values.

        `logsum` and `o` are as `forward` left them; `delta` is the inner product of `o` and `do` of each query.
        """
        if self.module is not np:
            length = do_sbhtd.shape[3]
            mixing = choose_mixing(self.matmul, self.ops, self.scale, do_sbhtd, length, work)
            mixing.backward(heads_sbhtd, logsum_sbht, o_sbhtd, do_sbhtd, delta_sbht, dheads_sbhtd, work)
            return
        kinds, batch, count, length, _ = do_sbhtd.shape
        for sequence, heads in self._groups(batch, count, length**2):
            k, v = heads_sbhtd[kinds, sequence, heads], heads_sbhtd[kinds + 1, sequence, heads]
            dk, dv = dheads_sbhtd[kinds, sequence, heads], dheads_sbhtd[kinds + 1, sequence, heads]
            for kind in range(kinds):
                q, dq = heads_sbhtd[kind, sequence, heads], dheads_sbhtd[kind, sequence, heads]
                do = do_sbhtd[kind, sequence, heads]
                statistics = logsum_sbht[kind, sequence, heads], delta_sbht[kind, sequence, heads]
                self._backward_of_group(q, k, v, do, statistics, dq, dk, dv, kind > 0, work)

    def _backward_of_group(
        self,
        q: Array,
        k: Array,
        v: Array,
        do: Array,
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
            matmul(v[:, first:last], do[:, first:].swapaxes(1, 2), out=dpart)
            self.ops.causal_softmax_backward(weights, dscores, *statistics, self.scale)
            for part, other, out in ((weights, do, dv), (dpart, q, dk)):
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


# Causal self-attention: from rows to heads, and back.

# Memory for heads before they are rounded, and for gradients by heads.
_BY_HEADS = "gradients by heads"


@dataclass(frozen=True)
class AttentionOptions:
    """The kind of attention; the default is that of GPT-2.

    Parameters
    ----------
    key_value_heads : int, optional
        Heads of keys and values, each of which serves equally many heads of queries; default: one for each.
    head_width : int, optional
        Channels of a head; default: the width over the number of heads.
    bias, output_bias : bool
        Whether queries, keys and values, and the output, have a bias.
    rotary : Rotary, optional
        Rotary positions of queries and keys; default: none.
    norm_epsilon : float, optional
        Norm queries and keys of each head by their root mean square, with this added to the mean square; default: no
        norm.
    """

    key_value_heads: int | None = None
    head_width: int | None = None
    bias: bool = True
    output_bias: bool = True
    rotary: Rotary | None = None
    norm_epsilon: float | None = None


class CausalSelfAttention(Layer):
    """Multi-head attention in which a position sees itself and what came before (Vaswani et al., 2017).

    With fewer heads of keys and values than of queries it is grouped-query attention (Ainslie et al., 2023).  Scores
    are never stored, see `CausalMixing`.

    The bias of the keys shifts all scores of a query equally, which does not change the softmax: its exact gradient is
    zero, and the computed one is rounding noise.  With rotary positions it is not.

    Its passes are collective over the tensor axis.

    Parameters
    ----------
    name : str
        Its tensors are ``name.qkv.{weight,bias}`` and ``name.output.{weight,bias}``, and with norms
        ``name.query_norm.weight`` and ``name.key_norm.weight``.  The columns of ``qkv`` are ordered by key and value
        head, for each of these first its query heads, then key, then value, and then by channel.  So a slice by heads
        is one run of columns.
    width : int
        Channels; a multiple of `heads`, unless the options give the width of a head.
    heads : int
        Number of heads of queries.  Each tensor rank computes some heads of keys and values, with their queries: the
        tensor size must divide their number.
    options : AttentionOptions
        The kind of attention.
    output_scale : float
        Standard deviation of the initial weights of the output projection.
    sequence_parallel : bool
        Whether tensor ranks hold some rows each outside of the attention.

    Raises
    ------
    ValueError
        If `width` is no multiple of `heads`, or `heads` none of the heads of keys and values, or the rotary positions
        do not suit the width of a head.
    """

    only_multiplies = True

    def __init__(
        self,
        name: str,
        width: int,
        heads: int,
        options: AttentionOptions = AttentionOptions(),
        *,
        output_scale: float = 0.02,
        sequence_parallel: bool = False,
    ) -> None:
        if options.head_width is None and (heads < 1 or width % heads):
            raise ValueError(f"width {width} is not a multiple of {heads} heads; all heads need equally many channels")
        groups = heads if options.key_value_heads is None else options.key_value_heads
        if groups < 1 or heads % groups:
            raise ValueError(f"{heads} heads of queries cannot share {groups} heads of keys and values evenly")
        self.head_width: int = options.head_width or width // heads
        # Of a head of keys and values: the heads of queries, the key and the value.
        self.kinds: int = heads // groups + 2
        self.rotary: Rotary | None = options.rotary
        if self.rotary is not None:
            self.rotary.check(self.head_width)
        self.qkv: Linear = Linear(
            f"{name}.qkv", width, groups * self.kinds * self.head_width, bias=options.bias, split=1
        )
        self.norms: HeadNorms | None = None
        if options.norm_epsilon is not None:
            self.norms = HeadNorms(name, self.head_width, options.norm_epsilon)
        self.mixing: CausalMixing = CausalMixing(f"{name}.mixing", self.head_width)
        self.output: Linear = Linear(
            f"{name}.output",
            heads * self.head_width,
            width,
            scale=output_scale,
            bias=options.output_bias,
            split=0,
            sequence_parallel=sequence_parallel,
        )
        parts = [self.qkv, self.norms, self.mixing, self.output]
        super().__init__(name, [part for part in parts if part is not None])
        self.width: int = width

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

        Raises
        ------
        TypeError, ValueError
            If the rows are no whole sequences of `length`.
        """
        qkv_nd = self.qkv.product(x_nc, work, functools.partial(work.borrow, "qkv"))
        fused = self._fused_in_rows(qkv_nd, work, length)
        if fused is None:
            o_nc = self._attend(x_nc, qkv_nd, work, length)
        else:
            o_nc = self._attend_in_rows(fused, x_nc, qkv_nd, work, length)
        return self.output.forward(o_nc, work, residual_nc)

    def _attend(self, x_nc: Array, qkv_nd: Array, work: Workspace, length: int) -> Array:
        """The output of heads, each in separate memory."""
        shape = self._shape_of_heads(qkv_nd, length)
        slices, kinds, *rest = shape
        half = self._half_of_heads() if work.cache is None else None
        name = f"{self.role}.heads"
        kept_lsbhtd = work.save(name, *shape) if half is None else work.save(name, *shape, dtype=half)
        # Norms and rotary positions change them before they are rounded.
        apart_from_kept = half is not None and self._changes_heads
        heads_lsbhtd = work.borrow(_BY_HEADS, *shape) if apart_from_kept else kept_lsbhtd
        o_nc = work.save(f"{self.role}.o", len(qkv_nd), self.output.local_inputs)
        logsum_lsbht = work.save(f"{self.role}.logsum", slices, kinds - 2, *rest[:3], exact=True)
        work.kept[self.role] = None, x_nc, kept_lsbhtd, o_nc, logsum_lsbht
        by_slice, cut = self.tensor.slices.column_slices, self.tensor.slices.cut
        qkv_lnd, biases = by_slice(qkv_nd, self.qkv.outputs), cut(self._bias(work), self.qkv.outputs, 0)
        for qkv, bias, heads in zip(qkv_lnd, biases, heads_lsbhtd, strict=True):
            self.ops.split_heads(qkv, bias, heads)
        if self.norms is not None:
            self.norms.forward(heads_lsbhtd, work)
        if self.rotary is not None:
            if work.cache is None or work.cache.fresh:
                self._rotate(heads_lsbhtd, backward=0)
            else:
                self._rotate_from(heads_lsbhtd, work.cache.starts)
        if work.cache is not None:
            work.cache.store(self.name, heads_lsbhtd[:, -2], heads_lsbhtd[:, -1])
        if apart_from_kept:
            convert(heads_lsbhtd, kept_lsbhtd)
        o_lnc = by_slice(o_nc, self.output.inputs)
        for index, (heads, o, logsum) in enumerate(zip(kept_lsbhtd, o_lnc, logsum_lsbht, strict=True)):
            o_sbhtd = self._by_heads(o, kinds - 2, length)
            if work.cache is None or work.cache.fresh:
                self.mixing.forward(heads[:-2], heads[-2], heads[-1], o_sbhtd, logsum, work)
            else:
                self._mix_with_known(index, heads[:-2], o_sbhtd, work.cache, work)
        return o_nc

    def _fused_in_rows(self, qkv_nd: Array, work: Workspace, length: int) -> FusedMixing | None:
        """Attention by a library that takes heads as they lie in the rows of the product, where it can be."""
        if self.module is np or self._changes_heads or self.kinds != 3 or not backend_of(qkv_nd).has_cublas:
            return None
        _, _, batch, heads, _, width = self._shape_of_heads(qkv_nd, length)
        shape = AttentionShape(batch, heads, heads, length, width, in_rows=True)
        return fused_mixing(self.matmul, self.mixing.scale, shape, qkv_nd, work)

    def _attend_in_rows(self, fused: FusedMixing, x_nc: Array, qkv_nd: Array, work: Workspace, length: int) -> Array:
        """As `_attend`, in half precision, and without a copy of the heads in another order."""
        half = self._half_of_heads()
        assert half is not None
        slices, kinds, *rest = self._shape_of_heads(qkv_nd, length)
        rows_nd = work.save(f"{self.role}.heads", *qkv_nd.shape, dtype=half)
        o_nc = work.save(f"{self.role}.o", len(qkv_nd), self.output.local_inputs, dtype=half)
        logsum_lsbht = work.save(f"{self.role}.logsum", slices, 1, *rest[:3], exact=True)
        work.kept[self.role] = fused, x_nc, rows_nd, o_nc, logsum_lsbht
        by_slice, columns = self.tensor.slices.column_slices, self.qkv.outputs
        biases, o_lnc = self.tensor.slices.cut(self._bias(work), columns, 0), by_slice(o_nc, self.output.inputs)
        for qkv, bias, rows, o, logsum in zip(
            by_slice(qkv_nd, columns), biases, by_slice(rows_nd, columns), o_lnc, logsum_lsbht, strict=True
        ):
            self.ops.split_heads(qkv, bias, rows.reshape(1, 1, 1, *rows.shape))  # adds the bias, and rounds
            heads = self._by_heads(rows, kinds, length)
            fused.forward(heads[:1], heads[1], heads[2], self._by_heads(o, 1, length), logsum, work)
        return o_nc

    def backward(self, dy_nc: Array, work: Workspace, length: int) -> Array:
        """Gradient with respect to `x`.

        Parameters
        ----------
        dy_nc : array, shape (n, width)
            Gradient of the loss with respect to the output.
        work : Workspace
            That of the forward pass.
        length : int
            Tokens of a sequence.

        Returns
        -------
        array, shape (n, width)
            In the memory of `work`.

        Raises
        ------
        ValueError
            If `length` is not that of the forward pass.
        """
        fused, x_nc, heads, o_nc, logsum = work.kept[self.role]
        if length != logsum.shape[-1]:
            raise ValueError(f"length={length} is not that of the forward pass, {logsum.shape[-1]}")
        if fused is None:
            dqkv_nd = self._dqkv(dy_nc, heads, o_nc, logsum, work, length)
        else:
            dqkv_nd = self._dqkv_in_rows(fused, dy_nc, heads, o_nc, logsum, work, length)
        shared_nd = self.qkv.shared(dqkv_nd, work)
        dx_nc = self.qkv.input_gradient(shared_nd, work)
        self.qkv.bias_gradient(dqkv_nd, work)
        self.qkv.weight_gradient(x_nc, shared_nd, work)
        return dx_nc

    def _dqkv(
        self, dy_nc: Array, heads_lsbhtd: Array, o_nc: Array, logsum_lsbht: Array, work: Workspace, length: int
    ) -> Array:
        """Gradient with respect to queries, keys and values, and the gradients of the output projection."""
        do_nc = self.output.backward(dy_nc, work)
        dqkv_nd = work.borrow("qkv", len(o_nc), self.qkv.local_outputs)
        _, kinds, *rest = heads_lsbhtd.shape
        do_sbhtd = work.scratch("do by heads", (kinds - 2, *rest), self._half_of_heads() or work.dtype)
        delta_sbht = work.borrow("attention delta", kinds - 2, *rest[:3])
        by_slice = self.tensor.slices.column_slices
        o_lnc, do_lnc = by_slice(o_nc, self.output.inputs), by_slice(do_nc, self.output.inputs)
        dqkv_lnd = by_slice(dqkv_nd, self.qkv.outputs)
        if not self._changes_heads:
            dheads_lsbhtd = [self._by_heads(dqkv, kinds, length) for dqkv in dqkv_lnd]
        else:
            dheads_lsbhtd = work.borrow(_BY_HEADS, *heads_lsbhtd.shape)
        for index, (heads, logsum, dheads) in enumerate(zip(heads_lsbhtd, logsum_lsbht, dheads_lsbhtd, strict=True)):
            self.ops.split_with_products(do_lnc[index], o_lnc[index], do_sbhtd, delta_sbht)
            o_sbhtd = self._by_heads(o_lnc[index], kinds - 2, length)
            self.mixing.backward(heads, logsum, o_sbhtd, do_sbhtd, delta_sbht, dheads, work)
        if self._changes_heads:
            # Gradients before norm and rotation, in place of those after them.
            if self.rotary is not None:
                self._rotate(dheads_lsbhtd, backward=1)
            if self.norms is not None:
                self.norms.backward(dheads_lsbhtd, work)
            for dqkv, dheads in zip(dqkv_lnd, dheads_lsbhtd, strict=True):
                self.ops.merge_heads(dqkv, dheads)
        return dqkv_nd

    def _dqkv_in_rows(
        self,
        fused: FusedMixing,
        dy_nc: Array,
        rows_nd: Array,
        o_nc: Array,
        logsum_lsbht: Array,
        work: Workspace,
        length: int,
    ) -> Array:
        """As `_dqkv`, in half precision."""
        do_nc = work.scratch("do in rows", o_nc.shape, o_nc.dtype)
        dqkv_nd = work.scratch("dqkv in rows", rows_nd.shape, rows_nd.dtype)
        self.output.backward(dy_nc, work, functools.partial(self.output.input_gradient, dx_ni=do_nc))
        by_heads = functools.partial(self._by_heads, length=length)
        by_slice = self.tensor.slices.column_slices
        rows_lnd, dqkv_lnd = (by_slice(each, self.qkv.outputs) for each in (rows_nd, dqkv_nd))
        o_lnc, do_lnc = (by_slice(each, self.output.inputs) for each in (o_nc, do_nc))
        for rows, dqkv, o, do, logsum in zip(rows_lnd, dqkv_lnd, o_lnc, do_lnc, logsum_lsbht, strict=True):
            heads, dheads = by_heads(rows, self.kinds), by_heads(dqkv, self.kinds)
            fused.backward(heads, logsum, by_heads(o, 1), by_heads(do, 1), logsum, dheads, work)
        return dqkv_nd

    @property
    def _changes_heads(self) -> bool:
        """Return True if attention reads other queries and keys than the product gives: rotated or normed ones."""
        return self.norms is not None or self.rotary is not None

    def _half_of_heads(self) -> np.dtype | None:
        """The half precision in which heads are kept, where only products that round them read them; else None.

        Products of heads on the host take float32.
        """
        return None if self.module is np else rounded_dtype(self.matmul)

    def _mix_with_known(
        self, index: int, q_sbhtd: Array, o_sbhtd: Array, cache: KeyValueCache, work: Workspace
    ) -> None:
        """The output of the tokens of this pass, with the keys and values of earlier ones; of one slice."""
        kinds, batch, heads, length, _ = q_sbhtd.shape
        for place in range(batch):
            k_lbhtd, v_lbhtd = cache.known(self.name, place, length)
            logsum_sbht = work.scratch("logsum of known", (kinds, 1, heads, k_lbhtd.shape[3]), work.dtype)
            one = slice(place, place + 1)
            self.mixing.forward(q_sbhtd[:, one], k_lbhtd[index], v_lbhtd[index], o_sbhtd[:, one], logsum_sbht, work)

    def _rotate_from(self, heads_lsbhtd: Array, starts: Sequence[int]) -> None:
        """Rotate queries and keys, in place, of texts that each begin at their entry of `starts`."""
        assert self.rotary is not None
        length = heads_lsbhtd.shape[4]
        for place, start in enumerate(starts):
            x_lshtd = self.module.ascontiguousarray(heads_lsbhtd[:, :-1, place])
            rows = self.rotary.rows(self.head_width, start, start + length, x_lshtd.dtype, self.module)
            self.ops.rotate(x_lshtd.reshape(-1, length, self.head_width), *rows, self.rotary.apart, 0)
            heads_lsbhtd[:, :-1, place] = x_lshtd

    def _rotate(self, heads_lsbhtd: Array, backward: int) -> None:
        assert self.rotary is not None
        length = heads_lsbhtd.shape[4]
        cos_tp, sin_tp = self.rotary.tables(self.head_width, length, heads_lsbhtd.dtype, self.module)
        for heads in heads_lsbhtd:
            x_ntd = heads[:-1].reshape(-1, length, self.head_width)
            self.ops.rotate(x_ntd, cos_tp, sin_tp, self.rotary.apart, backward)

    def _bias(self, work: Workspace) -> Array:
        """The bias of queries, keys and values, or zeros."""
        if self.qkv.bias_name:
            return self.qkv.bias
        zeros = work.scratch("no bias", (self.qkv.local_outputs,), work.dtype)
        zeros.fill(0)
        return zeros

    def _by_heads(self, x_nc: Array, kinds: int, length: int) -> Array:
        """A view of the columns of a slice, which are ordered by head, kind and channel: by kind and head."""
        heads = x_nc.shape[1] // (kinds * self.head_width)
        return x_nc.reshape(-1, length, heads, kinds, self.head_width).transpose(3, 0, 2, 1, 4)

    def _shape_of_heads(self, qkv_nd: Array, length: int) -> tuple[int, ...]:
        """By slice: kinds, sequences, heads of keys and values, positions, channels."""
        (rows, columns), slices = qkv_nd.shape, len(self.tensor.slices.own)
        length = check_length(rows, length)
        groups = columns // (self.kinds * self.head_width) // slices
        return slices, self.kinds, rows // length, groups, length, self.head_width
