"""The first and the last unit of a GPT: from tokens to the residual stream, and from there to the loss.

With them tables of rows, of which that of tokens may be split over the tensor axis, and the cross-entropy of logits
whose vocabulary may be split over it (Shoeybi et al., 2019, section 3).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import numpy as np

from mpishard.layout.tensors import ParameterSpec
from mpishard.nn import device_kernels
from mpishard.nn.block import TransformerBlock
from mpishard.nn.layers import Draws, Dropout, Layer, operations
from mpishard.nn.linear import Linear, TiedLinear
from mpishard.nn.norms import LayerNorm, Norm
from mpishard.nn.products import rounded_dtype
from mpishard.nn.tensor_parallel import ALONE, FORWARD, GatherColumns, TensorParallel
from mpishard.nn.workspace import KeyValueCache, Workspace

Array = Any


class Embedding(Layer):
    """One row of a (count, width) table for each index.

    If the table is split by rows (`split` 0, Shoeybi et al., 2019), a rank returns zeros for indices in the slices of
    other ranks.  The caller takes the sum over the ranks.

    Parameters
    ----------
    name : str
        Its tensor is ``name.weight``.
    count, width : int
        Shape of the table.
    scale : float
        Standard deviation of the initial values.
    split : 0 or None
        Dimension that tensor parallelism splits.
    """

    def __init__(self, name: str, count: int, width: int, *, scale: float = 0.02, split: int | None = None) -> None:
        super().__init__(name)
        self.count: int = count
        self.width: int = width
        self.scale: float = scale
        self.split: int | None = split
        self.weight_name: str = f"{name}.weight"

    def specs(self) -> list[ParameterSpec]:
        return [ParameterSpec(self.weight_name, (self.count, self.width), tensor_dim=self.split)]

    def initialize(self, seed: int) -> None:
        self._draw(seed, self.weight_name, (self.count, self.width), self.scale)

    @property
    def first(self) -> int:
        """Number of the first row that this rank holds."""
        return self.parameters.box(self.weight_name)[0][0]

    def forward(self, indices_n: Array, work: Workspace, out_nc: Array | None = None) -> Array:
        """Rows of the table.

        Parameters
        ----------
        indices_n : array of int64, shape (n,)
            Checked by the caller; they must stay as they are until `backward`.
        work : Workspace
            Memory of the micro-batch.
        out_nc : array, shape (n, width), optional
            Memory for the result; default: saved in `work`.

        Returns
        -------
        array, shape (n, width)
            Zeros for indices of which another rank has the row.
        """
        work.kept[self.role] = indices_n
        if out_nc is None:
            out_nc = work.save(f"{self.role}.y", len(indices_n), self.width)
        self.ops.lookup(self.parameters[self.weight_name], indices_n, out_nc, self.first)
        return out_nc

    def backward(self, dy_nc: Array, work: Workspace) -> None:
        """Add each row of `dy` to the gradient of the row that it came from; indices have no gradient.

        Parameters
        ----------
        dy_nc : array, shape (n, width)
            Gradient of the loss with respect to the output.
        work : Workspace
            That of the forward pass.
        """
        dweight_vc = self._gradient_to_add_to(self.weight_name)
        self.ops.scatter_add(dy_nc, work.kept[self.role], dweight_vc, self.first)
        self._finished(self.weight_name, work)


class PositionEmbedding(Embedding):
    """A learned row for each position of a sequence, added to an array.

    Parameters
    ----------
    name : str
        Its tensor is ``name.weight``.
    count, width : int
        Longest sequence, and channels.
    scale : float
        Standard deviation of the initial values.
    split : 0 or None
        None: every tensor rank holds all of it.
    """

    def add_to(self, x_btc: Array, starts: Sequence[int] | None = None) -> None:
        """Add the row of each position, in place.

        Parameters
        ----------
        x_btc : array, shape (b, t, width)
            Sequences of t tokens.
        starts : sequence of int, optional
            The position of the first token of each sequence; default: 0.
        """
        length = x_btc.shape[1]
        if starts is None and self.module is not np:
            x_btc += self.parameters[self.weight_name][:length]
            return
        # Sequence by sequence: NumPy takes memory for an operation on three axes of which one is broadcast or reduced.
        for x_tc, first in zip(x_btc, starts or [0] * len(x_btc), strict=True):
            x_tc += self.parameters[self.weight_name][first : first + length]

    def backward_positions(self, dx_btc: Array, work: Workspace) -> None:
        """The adjoint of `add_to`: sums over the sequences; positions beyond them get nothing.

        Parameters
        ----------
        dx_btc : array, shape (b, t, width)
            Gradient of the loss with respect to the sum.
        work : Workspace
            That of the forward pass.
        """
        rows_tc = self._gradient_to_add_to(self.weight_name)[: dx_btc.shape[1]]
        if self.module is not np:
            rows_tc += dx_btc.sum(axis=0)
        else:
            for dx_tc in dx_btc:
                rows_tc += dx_tc
        self._finished(self.weight_name, work)


def cross_entropy(
    logits_nv: Array,
    targets_n: Array,
    tensor: TensorParallel = ALONE,
    first: int = 0,
    work: Workspace | None = None,
    vocabulary_size: int | None = None,
) -> float:
    """Summed cross-entropy in nats of float logits and int64 targets; `logits` becomes the gradient of the sum.

    The sum is taken in float64.  Forward and backward are one call, since the loss is where the backward starts.

    Parameters
    ----------
    logits_nv : float array, shape (n, v)
        This rank's columns of the logits, slice by slice (`mpishard.nn.tensor_parallel`); overwritten by the gradient.
    targets_n : int64 array, shape (n,)
        Numbers of the right columns, of the whole vocabulary.
    tensor : TensorParallel
        With several ranks the call is collective: a maximum and two sums per row are reduced, never logits.  All ranks
        return the same loss.
    first : int
        Number of this rank's first column.
    work : Workspace, optional
        Memory for one maximum and two sums per row; needed with several ranks or slices.
    vocabulary_size : int, optional
        Columns of all ranks; needed with several slices a rank.

    Returns
    -------
    float
        In nats, summed over the rows.
    """
    return float(queue_cross_entropy(logits_nv, targets_n, tensor, first, work, vocabulary_size))


def queue_cross_entropy(
    logits_nv: Array,
    targets_n: Array,
    tensor: TensorParallel,
    first: int,
    work: Workspace | None,
    vocabulary_size: int | None,
) -> SupportsFloat:
    """`cross_entropy`, whose host does not wait for a device: there it is a `PendingNumber`."""
    ops = operations(logits_nv)
    slices = tensor.slices
    if slices.total == 1:
        return ops.cross_entropy(logits_nv, targets_n)
    assert work is not None
    rows = len(targets_n)
    columns = logits_nv.shape[1] if vocabulary_size is None else vocabulary_size
    logits_snv = slices.column_slices(logits_nv, columns)
    starts = [first + offset for offset in slices.offsets(columns)] if len(logits_snv) > 1 else [first]
    top_n = work.borrow("largest logits", rows)
    ops.row_maximum(logits_snv[0], top_n)
    for part_nv in logits_snv[1:]:
        other_n = work.borrow("largest logits of a slice", rows)
        ops.row_maximum(part_nv, other_n)
        work.module.maximum(top_n, other_n, out=top_n)
    if tensor.size > 1:
        tensor.axis.all_reduce(top_n, op="max", label=FORWARD)
    sums_2n = slices.all_reduce(
        slices.add(
            lambda index, out_2n: ops.exponentials(logits_snv[index], targets_n, top_n, *out_2n, starts[index]),
            lambda depth: work.borrow(f"sums of exponentials, and targets {depth}", 2, rows),
        ),
        FORWARD,
    )
    # Each of these calls returns the whole loss.
    losses = [
        ops.cross_entropy_of_sums(part_nv, targets_n, *sums_2n, start)
        for part_nv, start in zip(logits_snv, starts, strict=False)
    ]
    return losses[0]


TABLE = "token_embedding"
# Names of the first and the last unit; blocks are between them.
EMBEDDINGS, OUTPUT_HEAD = "embeddings", "output_head"


@dataclass
class Batch:
    """One micro-batch, the same on all ranks of a data coordinate."""

    tokens_n: Array  # int64, sequences of `length` tokens end to end; maybe none
    targets_n: Array | None  # int64, the token that follows each of them; None: only predictions are wanted
    length: int
    last_only: bool = False  # predict after the last token of each sequence only
    draws: Draws | None = None  # None: nothing is dropped
    # Keys and values of earlier tokens of the sequences, which continue there; for predictions.
    cache: KeyValueCache | None = None

    @property
    def rows(self) -> int:
        return len(self.tokens_n)


class EmbeddingUnit(Layer):
    """Token embeddings, and learned position embeddings.

    Its passes are collective over the tensor axis.

    Parameters
    ----------
    vocabulary_size : int
        Number of tokens.
    context_length : int or None
        Longest sequence; None: no embeddings of positions.
    width : int
        Channels.
    dropout : float
        Rate of dropout of the sum.
    """

    def __init__(self, vocabulary_size: int, context_length: int | None, width: int, *, dropout: float = 0.0) -> None:
        self.tokens: Embedding = Embedding(TABLE, vocabulary_size, width, split=0)
        self.positions: PositionEmbedding | None = None
        if context_length is not None:
            self.positions = PositionEmbedding("position_embedding", context_length, width)
        self.dropout: Dropout = Dropout("embedding_dropout", dropout)
        parts = [self.tokens, self.positions, self.dropout]
        super().__init__(EMBEDDINGS, [part for part in parts if part is not None])
        self.width: int = width

    def forward(self, x: None, work: Workspace, batch: Batch) -> Array:
        """The rows of the residual stream that this rank holds; nothing comes before it.

        Parameters
        ----------
        x : None
            As for other units.
        work : Workspace
            Memory of the micro-batch.
        batch : Batch
            Its tokens.

        Returns
        -------
        array, shape (n, width)
            In the memory of `work`.
        """
        shape = (batch.rows, self.width)
        terms_nc = work.borrow("terms", *shape) if self.tensor.splits_rows else work.save("embeddings.y", *shape)
        self.tokens.forward(batch.tokens_n, work, terms_nc)
        # Added on one rank only, the positions are in the sum once.  All ranks compute their whole gradient.
        if self.tensor.rank == 0:
            if self.tensor.slices.ordered:
                terms_nc += 0  # -0.0 becomes 0.0, on one rank too, since where other ranks add zeros it does
            if self.positions is not None:
                starts = None if batch.cache is None else batch.cache.starts
                self.positions.add_to(terms_nc.reshape(-1, batch.length, self.width), starts)
        # Of each element one rank has the token's, and the first the position's: any order of a sum gives its bits.
        save = functools.partial(work.save, "embeddings.y")
        return self.dropout.apply(self.tensor.leave_exactly.forward([terms_nc], batch.rows, save), work)

    predict = forward

    def backward(self, dx_nc: Array, work: Workspace, batch: Batch) -> None:
        """Gradients of the tables.

        Parameters
        ----------
        dx_nc : array, shape (n, width)
            Gradient of the loss with respect to the output.
        work : Workspace
            That of the forward pass.
        batch : Batch
            That of the forward pass.
        """
        dx_nc = self.dropout.apply(dx_nc, work)
        dx_nc = self.tensor.leave_exactly.backward(dx_nc, batch.rows, functools.partial(work.borrow, "all rows"))
        if self.positions is not None:
            self.positions.backward_positions(dx_nc.reshape(-1, batch.length, self.width), work)
        self.tokens.backward(dx_nc, work)


class OutputHead(Layer):
    """Final norm, output head, and loss.

    Its passes are collective over the tensor axis.

    Parameters
    ----------
    width, vocabulary_size : int
        Channels, and number of tokens.
    norm : LayerNorm or RMSNorm, optional
        The final norm; default: a `LayerNorm` named ``"final_norm"``.
    tied : bool
        Whether the head uses the table of the token embedding.
    sequence_parallel : bool
        For the default norm.
    """

    def __init__(
        self,
        width: int,
        vocabulary_size: int,
        *,
        norm: Norm | None = None,
        tied: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        self.final_norm: Norm = LayerNorm("final_norm", width, sequence_parallel=sequence_parallel)
        if norm is not None:
            self.final_norm = norm
        self.head: TiedLinear | Linear = (
            TiedLinear("head", f"{TABLE}.weight", width, vocabulary_size)
            if tied
            else Linear("head", width, vocabulary_size, bias=False, split=1)
        )
        self.final_norm.gives_bits = self.head.only_multiplies
        super().__init__(OUTPUT_HEAD, [self.final_norm, self.head])
        self.width: int = width
        self.vocabulary_size: int = vocabulary_size

    @property
    def first(self) -> int:
        """Number of the first token whose logits this rank computes."""
        return self.head.first_output

    def shares_table(self, embeddings_here: bool) -> None:
        """Note whether the embeddings are on this rank: their backward comes later, and marks a tied table ready.

        Parameters
        ----------
        embeddings_here : bool
            True if they are.
        """
        if isinstance(self.head, TiedLinear):
            self.head.marks_ready = not embeddings_here

    def forward(self, x_nc: Array, work: Workspace, batch: Batch) -> SupportsFloat:
        """Summed loss of the batch; keeps the gradient with respect to the logits for `backward`.

        Parameters
        ----------
        x_nc : array, shape (n, width)
            The rows of the residual stream that this rank holds.
        work : Workspace
            Memory of the micro-batch.
        batch : Batch
            Its targets.

        Returns
        -------
        float, or on a device `PendingNumber`
            In nats.
        """
        x_nc = self.final_norm.forward(x_nc, work)
        half = rounded_dtype(self.head.matmul)
        if self.tensor.slices.total == 1 and half is not None and self.ops is device_kernels:
            # The gradient is stored as products take it, in the same pass.
            columns = self.head.padded_outputs
            logits_np = self.head.forward(x_nc, work, memory=lambda rows, _: work.save(f"{self.role}.y", rows, columns))
            gradient_np = work.save(f"{self.role}.dy", *logits_np.shape, dtype=half)
            given = batch.targets_n, gradient_np, self.head.local_outputs, self.parameters.loss_scale
            work.kept[self.role] = gradient_np
            return device_kernels.cross_entropy_rounded(logits_np, *given)
        logits_nv = self.head.forward(x_nc, work)
        loss = queue_cross_entropy(logits_nv, batch.targets_n, self.tensor, self.first, work, self.vocabulary_size)
        work.kept[self.role] = logits_nv
        return loss

    def backward(self, dy: None, work: Workspace, batch: Batch) -> Array:
        """Gradient with respect to the rows of the residual stream; nothing comes after it.

        Parameters
        ----------
        dy : None
            As for other units.
        work : Workspace
            That of the forward pass.
        batch : Batch
            That of the forward pass.

        Returns
        -------
        array, shape (n, width)
            The rows that this rank holds, in the memory of `work`.
        """
        dlogits_nv = work.kept[self.role]
        if self.parameters.loss_scale != 1 and dlogits_nv.dtype == work.dtype:  # else it is scaled
            dlogits_nv *= dlogits_nv.dtype.type(self.parameters.loss_scale)
        return self.final_norm.backward(self.head.backward(dlogits_nv, work), work)

    def predict(self, x_nc: Array, work: Workspace, batch: Batch) -> Array:
        """Logits of the whole vocabulary, on every tensor rank.

        Parameters
        ----------
        x_nc : array, shape (n, width)
            The rows of the residual stream that this rank holds.
        work : Workspace
            Memory of the micro-batch.
        batch : Batch
            Says whether logits are wanted after every token, or after the last of each sequence.

        Returns
        -------
        array, shape (rows, vocabulary_size)
            New; one row per token, or per sequence.
        """
        rows_nc = self.tensor.enter.forward(
            self.final_norm.forward(x_nc, work), batch.rows, functools.partial(work.borrow, "all rows")
        )
        if batch.last_only:
            rows_nc = rows_nc.reshape(-1, batch.length, self.width)[:, -1]
        rows = len(rows_nc)

        def new(*shape: int) -> Array:
            return work.module.empty(shape, work.dtype)

        logits_nv = self.head.apply(rows_nc, new(rows, self.head.local_outputs))
        columns = GatherColumns(self.tensor.axis, self.vocabulary_size, self.tensor.slices)
        return columns.forward(logits_nv, rows, new)


# What `Architecture.build` makes.
Unit = EmbeddingUnit | TransformerBlock | OutputHead
