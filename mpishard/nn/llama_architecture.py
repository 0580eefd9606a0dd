"""The sizes of a model like Llama."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpishard.arguments import flag, integer, number
from mpishard.nn.attention import AttentionOptions, CausalSelfAttention
from mpishard.nn.block import GatedMLP, TransformerBlock
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.norms import RMSNorm
from mpishard.nn.rotary import Rotary
from mpishard.nn.units import EmbeddingUnit, OutputHead

# The default number of hidden channels is a multiple of it.
_HIDDEN_MULTIPLE = 32


@dataclass(frozen=True)
class LlamaArchitecture(DecoderArchitecture):
    """A decoder-only transformer of the kind that `Llama` builds.

    No method is collective.

    Parameters
    ----------
    vocabulary_size : int
        Number of tokens.
    context_length : int
        Longest sequence.
    width : int
        Channels; a multiple of `heads`, unless `head_width` is given.
    layers : int
        Number of blocks.
    heads : int
        Heads of queries in each block.
    key_value_heads : int, optional
        Heads of keys and values, a divisor of `heads`; default: as many.
    hidden : int, optional
        Channels inside the gated network; default: 8/3 of the width, and then the next multiple of 32.
    head_width : int, optional
        Channels of a head, an even number; default: ``width / heads``.
    rotary : Rotary or mapping
        The rotary positions; a mapping has its fields.
    bias : bool
        Whether queries, keys and values have biases, as in Qwen2.
    head_norms : bool
        Whether the queries and keys of each head are normed, as in Qwen3.
    epsilon : float
        Of all norms.
    tied : bool
        Whether the output head uses the table of the token embedding.
    shards : int
        Number of slices by which the model is defined, a divisor of `key_value_heads`; see `Architecture`.
    dropout : float
        Rate of dropout of embeddings and of the results of attention and MLP, in training; see `nn.Dropout`.

    Raises
    ------
    TypeError
        If a size is no integer, or another value is of the wrong type.
    ValueError
        If a size is below 1, or sizes do not divide each other as above.
    """

    vocabulary_size: int
    context_length: int
    width: int
    layers: int
    heads: int
    key_value_heads: int | None = None
    hidden: int | None = None
    head_width: int | None = None
    rotary: Rotary = Rotary()
    bias: bool = False
    head_norms: bool = False
    epsilon: float = 1e-5
    tied: bool = False
    shards: int = 1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self.check_sizes()
        rotary: Any = self.rotary
        if isinstance(rotary, Mapping):
            self._set(rotary=Rotary(**rotary))
        elif not isinstance(rotary, Rotary):
            raise TypeError(f"rotary={rotary!r} must be a Rotary")
        if self.heads < 1 or (self.head_width is None and self.width % self.heads):
            raise ValueError(
                f"width {self.width} is not a multiple of {self.heads} heads; give head_width, or every head needs as "
                "many channels"
            )
        multiples = -(-8 * self.width // (3 * _HIDDEN_MULTIPLE))
        self._set(
            key_value_heads=self._size("key_value_heads", self.heads),
            hidden=self._size("hidden", multiples * _HIDDEN_MULTIPLE),
            head_width=self._size("head_width", self.width // self.heads),
            bias=flag("bias", self.bias),
            head_norms=flag("head_norms", self.head_norms),
            epsilon=number("epsilon", self.epsilon, least=0),
        )
        if self.heads % self.query_groups:
            raise ValueError(
                f"{self.heads} heads of queries cannot share {self.key_value_heads} heads of keys and values evenly; "
                "choose a divisor of the heads of queries"
            )
        self.rotary.check(self._given(self.head_width))
        self.check_shards()

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _size(self, name: str, default: int) -> int:
        value = getattr(self, name)
        return default if value is None else integer(name, value, least=1)

    @staticmethod
    def _given(size: int | None) -> int:
        """A size whose default is set."""
        assert size is not None
        return size

    @property
    def query_groups(self) -> int:
        return self._given(self.key_value_heads)

    def build_block(self, name: str, sequence_parallel: bool) -> TransformerBlock:
        rows = {"sequence_parallel": sequence_parallel}
        scale = 0.02 / math.sqrt(2 * self.layers)
        options = AttentionOptions(
            self.key_value_heads,
            self.head_width,
            bias=self.bias,
            output_bias=False,
            rotary=self.rotary,
            norm_epsilon=self.epsilon if self.head_norms else None,
        )
        return TransformerBlock(
            name,
            self._norm(f"{name}.attention_norm", sequence_parallel),
            CausalSelfAttention(f"{name}.attention", self.width, self.heads, options, output_scale=scale, **rows),
            self._norm(f"{name}.mlp_norm", sequence_parallel),
            GatedMLP(f"{name}.mlp", self.width, self._given(self.hidden), output_scale=scale, **rows),
            self.dropout,
        )

    def build_embeddings(self) -> EmbeddingUnit:
        return EmbeddingUnit(self.vocabulary_size, None, self.width, dropout=self.dropout)

    def build_head(self, sequence_parallel: bool) -> OutputHead:
        norm = self._norm("final_norm", sequence_parallel)
        return OutputHead(self.width, self.vocabulary_size, norm=norm, tied=self.tied)

    def _norm(self, name: str, sequence_parallel: bool) -> RMSNorm:
        return RMSNorm(name, self.width, epsilon=self.epsilon, sequence_parallel=sequence_parallel)
