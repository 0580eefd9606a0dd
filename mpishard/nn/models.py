"""Decoder-only transformers like GPT-2 and Llama, on one rank or on a mesh."""

from __future__ import annotations

from typing import Any, Unpack

from mpishard.nn.architecture import Architecture, LlamaArchitecture
from mpishard.nn.decoder import Decoder
from mpishard.nn.options import ModelKeywords


class GPT(Decoder):
    """Pre-norm decoder-only transformer with learned positions, a final norm and an output head.

    Initial values as in GPT-2 (Radford et al., 2019): normal with standard deviation 0.02, biases 0, and the
    projections back to the residual stream smaller by ``sqrt(2 * layers)``; keyed by `seed` and tensor names, so that
    they are the same on every mesh.

    On a mesh the methods are collective over the tensor and pipeline axes: all ranks of one data coordinate call them
    with the same arguments, and all of them get the same results.  With sharded parameters (ZeRO-3) they are collective
    over the data axis too: a rank without samples passes a batch of none, of shape (0, length).

    With ``shards=S`` the model is defined by S slices of heads, hidden channels and vocabulary.  Then losses, gradients
    and logits have the same bits on any tensor size that divides S, also with sequence parallelism, if BLAS has equally
    many threads.  S divides `heads`.  With the default of 1 a tensor rank has one slice, and the bits depend on the
    tensor size.

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
        Number of slices by which the model is defined, a divisor of `heads`; see above.
    dropout : float
        Rate of dropout of embeddings and of the results of attention and MLP, in training; see `nn.Dropout`.
    **options : any
        Keywords of `Decoder`, with its defaults: the mesh, how the model is cut into pipeline stages, dtypes, and what
        saves memory, such as ``mesh=mesh, schedule="gpipe", recompute=True``.

    Attributes
    ----------
    parameters : FlatParameters
        The tensors of this rank.  The bias of the attention keys (in ``blocks.*.attention.qkv.bias``) has a gradient
        that is zero in exact arithmetic, see `CausalSelfAttention`.
    architecture : Architecture
    chunks : list of Chunk
        The chunks of this rank.
    blocks : list of Block
        The blocks in these chunks.
    pipeline : Pipeline

    Raises
    ------
    ValueError, TypeError
        On all ranks, before memory is taken, for sizes that do not fit each other, or a `module` that is none.
    RuntimeError
        On this rank, for CuPy without a GPU.
    """

    architecture: Architecture

    def __init__(
        self,
        *,
        vocabulary_size: int,
        context_length: int,
        width: int,
        layers: int,
        heads: int,
        tied: bool = False,
        shards: int = 1,
        dropout: float = 0.0,
        **options: Unpack[ModelKeywords],
    ) -> None:
        architecture = Architecture(
            vocabulary_size=vocabulary_size,
            context_length=context_length,
            width=width,
            layers=layers,
            heads=heads,
            tied=tied,
            shards=shards,
            dropout=dropout,
        )
        super().__init__(architecture, **options)


class Llama(Decoder):
    """Pre-norm decoder-only transformer with root mean square norms, rotary positions, grouped queries and SwiGLU.

    With the right options it computes what Llama 2 and 3, Qwen2 and Qwen3 do (Touvron et al., 2023).  Initial values
    are normal with standard deviation 0.02, and the projections back to the residual stream smaller by
    ``sqrt(2 * layers)``; keyed by `seed` and tensor names, so that they are the same on every mesh.

    Collectiveness, and what `shards` means, are as for `GPT`.  The tensor size, and `shards`, divide `key_value_heads`:
    slices cut the heads of keys and values with the queries that they serve.

    Its tensors, with weights stored (inputs, outputs), of which the number of heads of queries for each head of keys is
    q = heads / key_value_heads:

    - ``token_embedding.weight``, (vocabulary_size, width);
    - ``blocks.N.attention_norm.weight`` and ``blocks.N.mlp_norm.weight``, (width,);
    - ``blocks.N.attention.qkv.weight``, (width, key_value_heads * (q + 2) * head_width): for each head of keys its q
      heads of queries, the key and the value; with ``bias`` also ``blocks.N.attention.qkv.bias``;
    - with ``head_norms`` ``blocks.N.attention.query_norm.weight`` and ``key_norm.weight``, (head_width,);
    - ``blocks.N.attention.output.weight``, (heads * head_width, width);
    - ``blocks.N.mlp.gate.weight`` and ``blocks.N.mlp.up.weight``, (width, hidden);
    - ``blocks.N.mlp.down.weight``, (hidden, width);
    - ``final_norm.weight``, (width,), and unless tied ``head.weight``, (width, vocabulary_size).

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
        Heads of keys and values, a divisor of `heads`; default: `heads`.
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
    **options : any
        Keywords of `Decoder`, as for `GPT`.

    Attributes
    ----------
    parameters : FlatParameters
        The tensors of this rank.
    architecture : LlamaArchitecture
    chunks : list of Chunk
        The chunks of this rank.
    blocks : list of TransformerBlock
        The blocks in these chunks.
    pipeline : Pipeline

    Raises
    ------
    ValueError, TypeError
        On all ranks, before memory is taken, for sizes that do not fit each other, or a `module` that is none.
    RuntimeError
        On this rank, for CuPy without a GPU.
    """

    architecture: LlamaArchitecture

    def __init__(
        self,
        *,
        vocabulary_size: int,
        context_length: int,
        width: int,
        layers: int,
        heads: int,
        key_value_heads: int | None = None,
        hidden: int | None = None,
        head_width: int | None = None,
        rotary: Any = LlamaArchitecture.rotary,
        bias: bool = False,
        head_norms: bool = False,
        epsilon: float = 1e-5,
        tied: bool = False,
        shards: int = 1,
        dropout: float = 0.0,
        **options: Unpack[ModelKeywords],
    ) -> None:
        architecture = LlamaArchitecture(
            vocabulary_size=vocabulary_size,
            context_length=context_length,
            width=width,
            layers=layers,
            heads=heads,
            key_value_heads=key_value_heads,
            hidden=hidden,
            head_width=head_width,
            rotary=rotary,
            bias=bias,
            head_norms=head_norms,
            epsilon=epsilon,
            tied=tied,
            shards=shards,
            dropout=dropout,
        )
        super().__init__(architecture, **options)
