"""The first and the last unit of a GPT: from tokens to the residual stream, and from there to the loss.

With them tables of rows, of which that of tokens may be split over the tensor axis, and the cross-entropy of logits
whose vocabulary may be split over it (Shoeybi et al., 2019, section 3).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import numpy as np

from mpishard.arguments import integer
from mpishard.layout.tensors import ParameterSpec
from mpishard.nn import device_kernels
from mpishard.nn.block import TransformerBlock
from mpishard.nn.checks import check_length, refuse_outside, same_extents
from mpishard.nn.layers import Draws, Dropout, Layer, operations
from mpishard.nn.linear import Linear, TiedLinear
from mpishard.nn.norms import LayerNorm, Norm
from mpishard.nn.products import rounded_dtype
from mpishard.nn.tensor_parallel import ALONE, FORWARD, GatherColumns, TensorParallel
from mpishard.nn.workspace import KeyValueCache, Workspace

Array = Any
Indices = Any


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
            From 0 to ``count - 1``; they must stay as they are until `backward`.
        work : Workspace
            Memory of the micro-batch.
        out_nc : array, shape (n, width), optional
            Memory for the result; default: saved in `work`.

        Returns
        -------
        array, shape (n, width)
            Zeros for indices of which another rank has the row.

        Raises
        ------
        TypeError, ValueError
            If an index is out of range, or an array has another shape or dtype.  On a device the host does not wait for
            the indices: the rows of those out of range are NaN instead.
        """
        work.kept[self.role] = indices_n
        if out_nc is None:
            out_nc = work.save(f"{self.role}.y", len(indices_n), self.width)
        # None on a device.
        if self.ops.lookup(self.parameters[self.weight_name], indices_n, out_nc, self.first, self.count):
            refuse_outside("indices_n", indices_n, self.count)
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

        Raises
        ------
        TypeError, ValueError
            If the array has another shape, or a position is out of range.
        """
        length = self._length(x_btc)
        if starts is None and self.module is not np:
            x_btc += self.parameters[self.weight_name][:length]
            return
        if starts is not None:
            if len(starts) != len(x_btc):
                raise ValueError(f"there are {len(starts)} starts, but {len(x_btc)} sequences: give one position each")
            for start in starts:
                if integer("each of starts", start, least=0) + length > self.count:
                    raise ValueError(
                        f"a sequence of {length} tokens from position start={start} on ends beyond the {self.count} "
                        f"positions of {self.weight_name}"
                    )
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
        rows_tc = self._gradient_to_add_to(self.weight_name)[: self._length(dx_btc)]
        if self.module is not np:
            rows_tc += dx_btc.sum(axis=0)
        else:
            for dx_tc in dx_btc:
                rows_tc += dx_tc
        self._finished(self.weight_name, work)

    def _length(self, x_btc: Array) -> int:
        """Tokens of the sequences; ValueError if they have more positions or other channels than there are."""
        if x_btc.ndim != 3 or x_btc.shape[1] > self.count or x_btc.shape[2] != self.width:
            raise ValueError(
                f"an array of shape {x_btc.shape} are no sequences of at most {self.count} positions, the count of "
                f"{self.weight_name}, and {self.width} channels"
            )
        return x_btc.shape[1]


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
        Numbers of the right columns, of the whole vocabulary.  No number says that a row is to be ignored: leave such
        rows out of both arrays.
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

    Raises
    ------
    TypeError, ValueError
        If a target is out of range, or an array has another shape or dtype.  With several ranks of `tensor` on all of
        them for a target that all of them have.  The logits then hold nothing defined.
    """
    _check_rows(logits_nv, targets_n)
    if logits_nv.dtype.char not in "fd":
        raise TypeError(f"logits_nv must be float32 or float64, got {logits_nv.dtype}")
    first, columns = integer("first", first, least=0), logits_nv.shape[1]
    whole = None if vocabulary_size is None else integer("vocabulary_size", vocabulary_size, least=1)
    if tensor.slices.total == 1:
        here = 0, columns if whole is None else whole
    elif work is None:
        raise ValueError("several ranks or slices need memory for sums of each row: give work=Workspace(...)")
    elif whole is None:
        if len(tensor.slices.own) > 1:
            raise ValueError("several slices a rank need vocabulary_size, the columns of all ranks; give it")
        here = first, columns
    else:
        cuts = tensor.slices.rank_cuts(whole)
        here = cuts[tensor.rank], cuts[tensor.rank + 1] - cuts[tensor.rank]
    if (first, columns) != here:
        raise ValueError(
            f"first={first} and logits_nv of {columns} columns are not what tensor rank {tensor.rank} of {tensor.size} "
            f"has of vocabulary_size={whole}: {here[1]} columns from first={here[0]} on"
        )
    loss = float(queue_cross_entropy(logits_nv, targets_n, tensor, first, work, whole))
    if math.isnan(loss):  # of a device
        _refuse_targets(logits_nv, targets_n, tensor, first, whole)
    return loss


def queue_cross_entropy(
    logits_nv: Array,
    targets_n: Array,
    tensor: TensorParallel,
    first: int,
    work: Workspace | None,
    vocabulary_size: int | None,
) -> SupportsFloat:
    """`cross_entropy`, whose host does not wait for a device: there it is a `PendingNumber`, NaN for bad targets."""
    if tensor.slices.total == 1:
        loss = operations(logits_nv).cross_entropy(logits_nv, targets_n)
    else:
        assert work is not None
        loss = _cross_entropy_of_slices(logits_nv, targets_n, tensor, first, work, vocabulary_size)
    if isinstance(loss, float) and math.isnan(loss):
        _refuse_targets(logits_nv, targets_n, tensor, first, vocabulary_size)
    return loss


def _refuse_targets(
    logits_nv: Array, targets_n: Array, tensor: TensorParallel, first: int, vocabulary_size: int | None
) -> None:
    """Raise ValueError if a target is no column, or else do nothing: the logits are NaN.

    Collective over the tensor axis without `vocabulary_size`.
    """
    if vocabulary_size is None:
        end = np.array([first + logits_nv.shape[1]])
        if tensor.size > 1:
            tensor.axis.all_reduce(end, op="max", label=FORWARD)
        vocabulary_size = int(end[0])
    refuse_outside(
        "targets_n", targets_n, vocabulary_size, "; leave out the rows whose target is to be ignored, as torch's -100"
    )


@same_extents("logits_nv", "targets_n")
def _check_rows(logits_nv: Array, targets_n: Indices) -> None: ...


def _cross_entropy_of_slices(
    logits_nv: Array,
    targets_n: Array,
    tensor: TensorParallel,
    first: int,
    work: Workspace,
    vocabulary_size: int | None,
) -> SupportsFloat:
    _check_rows(logits_nv, targets_n)
    if not logits_nv.flags.c_contiguous:
        raise ValueError(f"logits_nv of strides {logits_nv.strides} must be C-contiguous: its slices are views")
    ops, slices = operations(logits_nv), tensor.slices
    rows = len(targets_n)
    columns = logits_nv.shape[1] if vocabulary_size is None else vocabulary_size
    if vocabulary_size is None:  # only the last rank knows how many there are
        vocabulary_size = columns + first if tensor.rank == tensor.size - 1 else np.iinfo(np.int64).max
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
            lambda index, out_2n: ops.exponentials(
                logits_snv[index], targets_n, top_n, *out_2n, starts[index], vocabulary_size
            ),
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

    def __post_init__(self) -> None:
        self.length = check_length(self.rows, self.length)
        if self.targets_n is not None and self.targets_n.shape != self.tokens_n.shape:
            raise ValueError(f"tokens_n have shape {self.tokens_n.shape}, but targets_n {self.targets_n.shape}")
        if self.draws is not None and len(self.draws.samples) * self.length != self.rows:
            raise ValueError(
                f"{len(self.draws.samples)} samples of length={self.length} are not the {self.rows} tokens_n"
            )

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

        Raises
        ------
        ValueError
            If the batch has no targets, or one that is no token.
        """
        if batch.targets_n is None:
            raise ValueError("the loss needs targets, but targets_n of the batch is None; predict() needs none")
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
