"""The sizes of a GPT."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mpishard.nn.block import Block
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.units import EmbeddingUnit


@dataclass(frozen=True)
class Architecture(DecoderArchitecture):
    """A decoder-only transformer of the kind that `GPT` builds.

    No method is collective.

    Parameters
    ----------
    vocabulary_size : int
        Number of tokens.
    context_length : int
        Longest sequence.
    width : int
        Channels, a multiple of `heads`.
    layers : int
        Number of blocks.
    heads : int
        Attention heads in each block.
    tied : bool
        Whether the output head uses the table of the token embedding.
    shards : int
        Number of slices by which the model is defined, a divisor of `heads`: each has some heads, hidden channels and
        vocabulary.  With more than 1, a tensor rank computes its slices one by one, and sums over slices and over rows
        have one order.  So the bits of losses and gradients are the same for any tensor size that divides `shards`,
        also with sequence parallelism.  1: every tensor rank has one slice, which is fastest, and the bits depend on
        the tensor size.
    dropout : float
        Rate of dropout of embeddings and of the results of attention and MLP, in training; see `nn.Dropout`.

    Raises
    ------
    TypeError
        If a size is no integer.
    ValueError
        If a size is below 1, `width` is no multiple of `heads`, or `heads` no multiple of `shards`.
    """

    vocabulary_size: int
    context_length: int
    width: int
    layers: int
    heads: int
    tied: bool = False
    shards: int = 1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self.check_sizes()
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(
                f"width {self.width} is not a multiple of {self.heads} heads; every head needs as many channels"
            )
        self.check_shards()

    def build_embeddings(self) -> EmbeddingUnit:
        return EmbeddingUnit(self.vocabulary_size, self.context_length, self.width, dropout=self.dropout)

    def build_block(self, name: str, sequence_parallel: bool) -> Block:
        scale = 0.02 / math.sqrt(2 * self.layers)
        rows = {"sequence_parallel": sequence_parallel}
        return Block(name, self.width, self.heads, output_scale=scale, dropout=self.dropout, **rows)
