"""Layers with hand-written forward and backward passes, and `GPT` made of them.

They write gradients straight into a ``FlatParameters`` and allocate nothing after their first step.
"""

from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.gpt import GPT, MLP, Block
from mpishard.nn.layers import GELU, Embedding, Layer, LayerNorm, Linear, PositionEmbedding, cross_entropy
from mpishard.nn.workspace import Workspace

__all__ = [
    "GELU",
    "GPT",
    "MLP",
    "Block",
    "CausalSelfAttention",
    "Embedding",
    "Layer",
    "LayerNorm",
    "Linear",
    "PositionEmbedding",
    "Workspace",
    "cross_entropy",
]
