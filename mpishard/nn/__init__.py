"""Layers with hand-written forward and backward passes, and `GPT` made of them.

They write gradients straight into a ``FlatParameters`` and allocate nothing after their first step.  One set of layers
serves one rank and many: split over the tensor axis, cut into pipeline stages, sharded over the data axis.
"""

from mpishard.nn.architecture import Architecture
from mpishard.nn.attention import CausalSelfAttention
from mpishard.nn.block import MLP, Block
from mpishard.nn.chunk import Chunk
from mpishard.nn.embeddings import Embedding, PositionEmbedding
from mpishard.nn.gpt import GPT
from mpishard.nn.layers import GELU, Layer, LayerNorm
from mpishard.nn.linear import Linear, TiedLinear
from mpishard.nn.loss import cross_entropy
from mpishard.nn.options import MemoryOptions, PipelineOptions, Precision
from mpishard.nn.tensor_parallel import TensorParallel
from mpishard.nn.workspace import Workspace

__all__ = [
    "GELU",
    "GPT",
    "MLP",
    "Architecture",
    "Block",
    "CausalSelfAttention",
    "Chunk",
    "Embedding",
    "Layer",
    "LayerNorm",
    "Linear",
    "MemoryOptions",
    "PipelineOptions",
    "PositionEmbedding",
    "Precision",
    "TensorParallel",
    "TiedLinear",
    "Workspace",
    "cross_entropy",
]
