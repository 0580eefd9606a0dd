"""Sizes of the parts of a block and of the output head, read off their layers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.gated import GatedMLP
from mpishard.nn.norms import LayerNorm


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of the whole network, not of a rank.

    Parameters
    ----------
    heads, groups : int
        Heads of queries, and of keys and values.
    head_width : int
        Channels of a head.
    qkv, mixed : int
        Columns of queries, keys and values together, and of the attention's result.
    hidden : int
        Channels inside the MLP.
    gated : bool
        Whether the MLP has a gate.
    turned : bool
        Whether heads are changed after their product: by norms or rotary positions.
    normed_heads : int
        Heads of queries and keys that are normed.
    statistics : int
        Numbers that a norm keeps for each row.
    row_sums, head_row_sums : int
        Vectors of the width that a block and the head add row by row, as norms and biases do.
    """

    heads: int
    groups: int
    head_width: int
    qkv: int
    mixed: int
    hidden: int
    gated: bool
    turned: bool
    normed_heads: int
    statistics: int
    row_sums: int
    head_row_sums: int

    @property
    def kept_hidden(self) -> int:
        """Arrays of hidden channels that are kept."""
        return 3 if self.gated else 2


@functools.lru_cache(maxsize=64)
def sizes_of(architecture: DecoderArchitecture) -> BlockSizes:
    """The sizes of a model's blocks."""
    block, head = architecture.build_block("block", True), architecture.build_head(True)
    attention, mlp = block.attention, block.mlp
    groups, mixed = architecture.query_groups, attention.output.inputs
    heads = mixed // attention.head_width
    norms = attention.norms
    skipped = () if norms is None else norms.weight_names
    return BlockSizes(
        heads,
        groups,
        attention.head_width,
        attention.qkv.outputs,
        mixed,
        mlp.gate.outputs if isinstance(mlp, GatedMLP) else mlp.expand.outputs,
        isinstance(mlp, GatedMLP),
        norms is not None or attention.rotary is not None,
        0 if norms is None else heads + groups,
        2 if isinstance(block.mlp_norm, LayerNorm) else 1,
        sum(spec.partial for spec in block.specs() if spec.name not in skipped),
        sum(spec.partial for spec in head.specs()),
    )
