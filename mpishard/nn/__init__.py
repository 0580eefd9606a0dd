"""Layers with hand-written forward and backward passes, and `GPT` and `Llama` made of them.

Input: token ids, a mesh, and parameters in a ``FlatParameters``.
Output: the loss, and gradients in the buckets of these parameters, marked ready as each layer finishes.

Read ``layers`` first, the base class; then a model from below, ``linear``, ``norms``, ``attention``, ``block``,
``units``, ``chunk``, ``decoder``, ``models``; ``architecture`` and ``options``: their sizes, in a checkpoint
``model_facts``; ``kernels``, compiled by ``kernel_groups``, and ``device_kernels``: their loops, and ``checks`` before
these; ``pretrained`` and ``generation`` last.

They write gradients straight into a ``FlatParameters`` and allocate nothing after their first step.  One set of layers
serves one rank and many: split over the tensor axis, cut into pipeline stages, sharded over the data axis.
"""

from typing import TYPE_CHECKING

from mpishard.lazy import names_when_used

if TYPE_CHECKING:
    from mpishard.nn.architecture import Architecture, DecoderArchitecture, LlamaArchitecture
    from mpishard.nn.attention import AttentionOptions, CausalSelfAttention
    from mpishard.nn.block import MLP, Block, GatedMLP, TransformerBlock
    from mpishard.nn.chunk import Chunk
    from mpishard.nn.decoder import Decoder
    from mpishard.nn.layers import GELU, Dropout, Layer
    from mpishard.nn.linear import Linear, TiedLinear
    from mpishard.nn.models import GPT, Llama
    from mpishard.nn.norms import LayerNorm, RMSNorm
    from mpishard.nn.pretrained import export_pretrained, import_pretrained
    from mpishard.nn.rotary import RopeScaling, Rotary
    from mpishard.nn.tensor_parallel import TensorParallel
    from mpishard.nn.units import Embedding, EmbeddingUnit, OutputHead, PositionEmbedding, cross_entropy
    from mpishard.nn.workspace import Workspace

__all__ = [
    "GELU",
    "GPT",
    "MLP",
    "Architecture",
    "AttentionOptions",
    "Block",
    "CausalSelfAttention",
    "Chunk",
    "Decoder",
    "DecoderArchitecture",
    "Dropout",
    "Embedding",
    "EmbeddingUnit",
    "GatedMLP",
    "Layer",
    "LayerNorm",
    "Linear",
    "Llama",
    "LlamaArchitecture",
    "OutputHead",
    "PositionEmbedding",
    "RMSNorm",
    "RopeScaling",
    "Rotary",
    "TensorParallel",
    "TiedLinear",
    "TransformerBlock",
    "Workspace",
    "cross_entropy",
    "export_pretrained",
    "import_pretrained",
]

if not TYPE_CHECKING:  # a type checker has the names from above
    __getattr__ = names_when_used(
        __name__,
        {
            "architecture": "Architecture DecoderArchitecture LlamaArchitecture",
            "attention": "AttentionOptions CausalSelfAttention",
            "block": "MLP Block TransformerBlock GatedMLP",
            "chunk": "Chunk",
            "decoder": "Decoder",
            "layers": "Dropout GELU Layer",
            "units": "Embedding PositionEmbedding cross_entropy EmbeddingUnit OutputHead",
            "linear": "Linear TiedLinear",
            "models": "GPT Llama",
            "norms": "LayerNorm RMSNorm",
            "pretrained": "export_pretrained import_pretrained",
            "rotary": "RopeScaling Rotary",
            "tensor_parallel": "TensorParallel",
            "workspace": "Workspace",
        },
    )


def __dir__() -> list[str]:
    return list(__all__)
