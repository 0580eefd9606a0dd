"""A decoder-only transformer like GPT-2, on one rank or on a mesh."""

from __future__ import annotations

from typing import Any, Unpack, overload

import numpy as np

from mpishard.comm.mesh import Mesh
from mpishard.nn.architecture import Architecture
from mpishard.nn.decoder import Decoder
from mpishard.nn.options import (
    GPTOptions,
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
