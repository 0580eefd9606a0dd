"""A decoder-only transformer like GPT-2, on one rank or on a mesh."""

from __future__ import annotations

from typing import Any, Unpack, overload

import numpy as np

from mpishard.comm.mesh import Mesh
from mpishard.nn.architecture import Architecture, LlamaArchitecture
from mpishard.nn.decoder import Decoder
from mpishard.nn.options import (
    GPTOptions,
    LlamaOptions,
    MemoryOptions,
    PipelineOptions,
    Precision,
    named_architecture,
    shows_fields,
)


class GPT(Decoder):
    """Pre-norm decoder-only transformer with learned positions, a final norm and an output head.

    Initial values as in GPT-2 (Radford et al., 2019): normal with standard deviation 0.02, biases 0, and the
    projections back to the residual stream smaller by ``sqrt(2 * layers)``; keyed by `seed` and tensor names, so that
    they are the same on every mesh.

    On a mesh the methods are collective over the tensor and pipeline axes: all ranks of one data coordinate call them
    with the same arguments, and all of them get the same results.  With sharded parameters (ZeRO-3) they are collective
    over the data axis too: a rank without samples passes a batch of none, of shape (0, length).

    With ``shards=S`` the model is defined by S slices of heads, hidden channels and vocabulary, and losses, gradients
    and logits have the same bits on any tensor size that divides S, also with sequence parallelism, if BLAS has equally
    many threads.  S divides `heads`.  With the default of 1 a tensor rank has one slice, and the bits depend on the
    tensor size.

    Parameters
    ----------
    *architecture : Architecture or int
        The sizes of the model; or one by one `vocabulary_size`, `context_length`, `width`, `layers` and `heads`, which
        `dtype` and `seed` may follow.
    mesh : Mesh, optional
        Default: one rank alone.
    pipeline : PipelineOptions, optional
        How the model is cut into stages, and their schedule.
    precision : Precision, optional
        Dtypes: float32, unless others are given.
    memory : MemoryOptions, optional
        What saves memory: recomputation, sequence parallelism, sharded parameters.
    seed : int
        Seed of the initial values, and of the masks of dropout.
    module : module
        ``numpy`` or ``cupy``: where parameters, activations and computed logits live.  Tokens may be of either.
    **options : any
        Fields of `Architecture`, `PipelineOptions`, `Precision` and `MemoryOptions` by their names, in place of these
        values: ``GPT(256, 64, width=64, layers=4, heads=4, mesh=mesh, schedule="gpipe", recompute=True)``.

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

    @overload
    def __init__(
        self,
        architecture: Architecture,
        *,
        mesh: Mesh | None = None,
        pipeline: PipelineOptions | None = None,
        precision: Precision | None = None,
        memory: MemoryOptions | None = None,
        seed: int = 0,
        **options: Unpack[GPTOptions],
    ) -> None: ...

    @overload
    def __init__(
        self,
        vocabulary_size: int,
        context_length: int,
        width: int,
        layers: int,
        heads: int,
        dtype: Any = np.float32,
        seed: int = 0,
        *,
        mesh: Mesh | None = None,
        **options: Unpack[GPTOptions],
    ) -> None: ...

    @shows_fields(Architecture, PipelineOptions, Precision, MemoryOptions)
    def __init__(
        self,
        *architecture: Any,
        mesh: Mesh | None = None,
        pipeline: PipelineOptions | None = None,
        precision: Precision | None = None,
        memory: MemoryOptions | None = None,
        seed: int = 0,
        module: Any = np,
        **options: Any,
    ) -> None:
        found = named_architecture("GPT()", Architecture, architecture, options)
        super().__init__(
            found,
            mesh=mesh,
            pipeline=pipeline,
            precision=precision,
            memory=memory,
            seed=options.pop("seed", seed),
            module=module,
            **options,
        )


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
    *architecture : LlamaArchitecture or int
        The sizes of the model; or one by one `vocabulary_size`, `context_length`, `width`, `layers` and `heads`, which
        `dtype` and `seed` may follow.
    mesh : Mesh, optional
        Default: one rank alone.
    pipeline : PipelineOptions, optional
        How the model is cut into stages, and their schedule.
    precision : Precision, optional
        Dtypes: float32, unless others are given.
    memory : MemoryOptions, optional
        What saves memory: recomputation, sequence parallelism, sharded parameters.
    seed : int
        Seed of the initial values, and of the masks of dropout.
    module : module
        ``numpy`` or ``cupy``: where parameters, activations and computed logits live.  Tokens may be of either.
    **options : any
        Fields of `LlamaArchitecture`, `PipelineOptions`, `Precision` and `MemoryOptions` by their names, in place of
        these values: ``Llama(256, 64, width=64, layers=4, heads=4, key_value_heads=2, rotary=nn.Rotary(5e5))``.

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

    @overload
    def __init__(
        self,
        architecture: LlamaArchitecture,
        *,
        mesh: Mesh | None = None,
        pipeline: PipelineOptions | None = None,
        precision: Precision | None = None,
        memory: MemoryOptions | None = None,
        seed: int = 0,
        **options: Unpack[LlamaOptions],
    ) -> None: ...

    @overload
    def __init__(
        self,
        vocabulary_size: int,
        context_length: int,
        width: int,
        layers: int,
        heads: int,
        dtype: Any = np.float32,
        seed: int = 0,
        *,
        mesh: Mesh | None = None,
        **options: Unpack[LlamaOptions],
    ) -> None: ...

    @shows_fields(LlamaArchitecture, PipelineOptions, Precision, MemoryOptions)
    def __init__(
        self,
        *architecture: Any,
        mesh: Mesh | None = None,
        pipeline: PipelineOptions | None = None,
        precision: Precision | None = None,
        memory: MemoryOptions | None = None,
        seed: int = 0,
        module: Any = np,
        **options: Any,
    ) -> None:
        found = named_architecture("Llama()", LlamaArchitecture, architecture, options)
        super().__init__(
            found,
            mesh=mesh,
            pipeline=pipeline,
            precision=precision,
            memory=memory,
            seed=options.pop("seed", seed),
            module=module,
            **options,
        )
