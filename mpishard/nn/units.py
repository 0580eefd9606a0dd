"""The first and the last unit of a GPT: from tokens to the residual stream, and from there to the loss."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, SupportsFloat

from mpishard.nn import device_kernels
from mpishard.nn.block import TransformerBlock
from mpishard.nn.cache import KeyValueCache
from mpishard.nn.embeddings import Embedding, PositionEmbedding
from mpishard.nn.layers import Draws, Dropout, Layer
from mpishard.nn.linear import Linear, TiedLinear
from mpishard.nn.loss import queue_cross_entropy
from mpishard.nn.norms import LayerNorm, Norm
from mpishard.nn.products import rounded_dtype
from mpishard.nn.tensor_parallel import GatherColumns
from mpishard.nn.workspace import Workspace

Array = Any
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
            Gradient of the loss by the output.
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
            self.head.announces = not embeddings_here

    def forward(self, x_nc: Array, work: Workspace, batch: Batch) -> SupportsFloat:
        """Summed loss of the batch; keeps the gradient by the logits for `backward`.

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
            gradient_np = work.save_bits(f"{self.role}.dy", *logits_np.shape, dtype=half)
            given = batch.targets_n, gradient_np, self.head.local_outputs, self.parameters.loss_scale
            work.kept[self.role] = gradient_np
            return device_kernels.cross_entropy_rounded(logits_np, *given)
        logits_nv = self.head.forward(x_nc, work)
        loss = queue_cross_entropy(logits_nv, batch.targets_n, self.tensor, self.first, work, self.vocabulary_size)
        work.kept[self.role] = logits_nv
        return loss

    def backward(self, dy: None, work: Workspace, batch: Batch) -> Array:
        """Gradient by the rows of the residual stream; nothing comes after it.

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
