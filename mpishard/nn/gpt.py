"""A decoder-only transformer like GPT-2, on one rank or on a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpishard.arguments import flag, integer
from mpishard.backend.array import copy_to_device, is_array, to_host
from mpishard.backend.random import generator
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.layout.boxes import split
from mpishard.layout.local_layout import ModelParallelRank
from mpishard.nn.activations import ActivationCheckpointing, KeepAll
from mpishard.nn.architecture import Architecture
from mpishard.nn.block import Block
from mpishard.nn.chunk import Chunk
from mpishard.nn.layers import Layer
from mpishard.nn.linear import TiedLinear
from mpishard.nn.products import check_compute_dtype, check_half, warn_if_slow
from mpishard.nn.stage_costs import measure_costs
from mpishard.nn.tensor_parallel import TensorParallel
from mpishard.nn.units import Batch, OutputHead
from mpishard.nn.workspace import Pool, Workspace
from mpishard.parameters.flat import FlatParameters
from mpishard.pipeline.runtime import Pipeline
from mpishard.pipeline.schedule import make_schedule, warn_if_bubbly

Array = Any


class GPT:
    """Pre-norm decoder-only transformer with learned positions, a final norm and an output head.

    Initial values as in GPT-2 (Radford et al., 2019): normal with standard deviation 0.02, biases 0, and the
    projections back to the residual stream smaller by ``sqrt(2 * layers)``; keyed by `seed` and tensor names, so that
    they are the same on every mesh.

    On a mesh the methods are collective over the tensor and pipeline axes: all ranks of one data coordinate call them
    with the same arguments, and all of them get the same results.  With sharded parameters (ZeRO-3) they are collective
    over the data axis too: a rank without samples passes a batch of none, of shape (0, length).

    Parameters
    ----------
    vocabulary_size : int
        Tokens are integers in ``[0, vocabulary_size)``.
    context_length : int
        Longest sequence.
    width, layers, heads : int
        Channels (a multiple of `heads`), number of blocks, and heads in each (a multiple of the tensor size).
    dtype : dtype
        float32 or float64.
    seed : int
        Seed of the initial values.
    tied : bool
        Whether the output head uses the table of the token embedding.
    mesh : Mesh, optional
        Default: one rank alone.
    sequence_parallel : bool
        Split rows over the tensor axis between the layers that are split by columns, which needs less memory for
        activations.
    schedule : str
        One of `mpishard.pipeline.schedule.SCHEDULES`.
    chunks : int
        Model chunks of a pipeline rank, for the interleaved schedule.
    microbatches : int, optional
        Number of micro-batches into which a batch is cut along its first dimension; some may be empty.  Default: 1; on
        a pipeline 4 times the number of its ranks.
    stage_costs : "measured" or sequence of float, optional
        The times of the `Architecture.units` by which the model is cut into stages, given or measured on the mesh's
        first rank.  Default: blocks evenly.
    recompute : bool
        Keep only the inputs of blocks, and compute their activations again in the backward pass.
    storage_dtype : dtype, optional
        Keep activations between forward and backward in float16 or ml_dtypes.bfloat16.
    wire_dtype : dtype, optional
        Send activations and their gradients between stages in one of these.
    sharded_parameters : bool
        Hold only a share of the parameters from the start (ZeRO-3), for models that fit no rank as a whole.
    compute_dtype : dtype, optional
        Multiply matrices in float16 or ml_dtypes.bfloat16, with weights and activations in float32, see
        `mpishard.nn.products.make_matmul`.  Train in float16 with ``ShardingConfiguration(loss_scale="dynamic")``.
        For arrays of CuPy; on NumPy it is slow, and warns.
    module : module
        ``numpy`` or ``cupy``: where parameters, activations and computed logits live.  Tokens may be of either.

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
        On all ranks, before memory is taken, for sizes that do not fit each other.
    """

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
        tied: bool = False,
        mesh: Mesh | None = None,
        sequence_parallel: bool = False,
        schedule: str = "1f1b",
        chunks: int = 1,
        microbatches: int | None = None,
        stage_costs: str | Sequence[float] | None = None,
        recompute: bool = False,
        storage_dtype: Any = None,
        wire_dtype: Any = None,
        sharded_parameters: bool = False,
        compute_dtype: Any = None,
        module: Any = np,
    ) -> None:
        for name, value in (("tied", tied), ("sequence_parallel", sequence_parallel), ("recompute", recompute)):
            flag(name, value)
        flag("sharded_parameters", sharded_parameters)
        seed = integer("seed", seed)
        self.architecture: Architecture = Architecture(vocabulary_size, context_length, width, layers, heads, tied)
        self.mesh = mesh
        dtype = np.dtype(dtype)
        if dtype not in (np.float32, np.float64):
            raise TypeError(f"dtype is {dtype}; GPT computes in float32 or float64")
        for what, half in (("storage_dtype", storage_dtype), ("wire_dtype", wire_dtype)):
            if half is not None:
                check_half(what, half)
        if compute_dtype is not None:
            check_compute_dtype(compute_dtype, dtype, module)
        if sharded_parameters and mesh is None:
            raise ValueError("sharded_parameters needs a mesh, over whose data axis to share them; pass mesh=")
        place = ModelParallelRank()
        if mesh is not None:
            place = ModelParallelRank(mesh.tensor.rank, mesh.tensor.size, mesh.pipeline.rank, mesh.pipeline.size)
        depth = place.pipeline_size
        if microbatches is None:
            microbatches = 1 if depth == 1 else 4 * depth
        self.microbatches = microbatches
        plan = make_schedule(schedule, depth, microbatches, chunks)
        stages = depth * chunks
        self.architecture.check(place.tensor_size, stages)
        if isinstance(stage_costs, str):
            if stage_costs != "measured":
                raise ValueError(f'stage_costs is {stage_costs!r}; it must be "measured", numbers or None')
            world = Axis.single("world") if mesh is None else mesh.world
            stage_costs = measure_costs(self.architecture, dtype, world, compute_dtype, module)
        cut = self.architecture.cut(stages, stage_costs)
        specs = self.architecture.specs(stages, sequence_parallel, stage_costs)
        if mesh is None or mesh.world.rank == 0:
            warn_if_bubbly(plan)
            if compute_dtype is not None:
                warn_if_slow(compute_dtype, module)

        tensor = TensorParallel(None if mesh is None else mesh.tensor, sequence_parallel)
        own = [stage for stage in range(stages) if place.runs(stage)]
        units = {
            stage: [self.architecture.build(unit, sequence_parallel=sequence_parallel) for unit in cut[stage]]
            for stage in own
        }
        local = [unit for stage in own for unit in units[stage]]
        self.parameters: FlatParameters = FlatParameters(
            specs,
            dtype,
            module=module,
            place=place,
            units=_names_by_unit(self.architecture, sequence_parallel),
            sharded_over=mesh.data if mesh is not None and sharded_parameters else None,
        )
        self._scratch = Workspace(dtype, module)
        self._keeping: KeepAll | ActivationCheckpointing = KeepAll()
        if recompute or storage_dtype is not None:
            self._keeping = ActivationCheckpointing(self._scratch, recompute, storage_dtype)
        for unit in local:
            unit.bind(self.parameters, tensor, compute_dtype)
            unit.initialize(seed)
            if isinstance(unit, OutputHead) and isinstance(unit.head, TiedLinear):
                unit.head.announces = not place.runs(0)
        self.chunks: list[Chunk] = [
            Chunk(stage, units[stage], self.parameters, tensor, self._scratch, self._keeping) for stage in own
        ]
        self.blocks: list[Block] = [unit for unit in local if isinstance(unit, Block)]
        axis = Axis.single("pipeline") if mesh is None else mesh.pipeline
        self.pipeline: Pipeline = Pipeline(axis, self.chunks, schedule, self.parameters, wire_dtype=wire_dtype)
        self._inputs = Pool()
        # A scaled loss may overflow in half precision; optimizers check for that.
        self._expected: dict[str, Any] = {} if compute_dtype is None else {"over": "ignore", "invalid": "ignore"}
        # Where they are computed with.
        self._moved_inputs = None if module is np else Pool(module)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens."""
        return self.architecture.vocabulary_size

    @property
    def context_length(self) -> int:
        """Longest sequence."""
        return self.architecture.context_length

    @property
    def activation_bytes(self) -> int:
        """Bytes held for activations of all micro-batches in flight and for scratch.

        Memory grows to what the largest batch so far needed and is used again, so that this is the peak.
        """
        kept = self._keeping.saved_bytes + sum(chunk.saved_bytes for chunk in self.chunks)
        inputs = self._inputs if self._moved_inputs is None else self._moved_inputs
        return kept + self._scratch.scratch.nbytes + inputs.nbytes

    def loss_and_gradient(self, tokens: Array, targets: Array) -> float:
        """Summed loss of a batch; the gradient of that sum goes to ``parameters.gradient``.

        Parameters
        ----------
        tokens, targets : int array, (batch, length)
            Any batch size, also 0, ``1 <= length <= context_length``; `targets` holds the token that follows each of
            `tokens`.

        Returns
        -------
        float
            Cross-entropy in nats, summed over all tokens.

        Raises
        ------
        TypeError, ValueError
            If tokens or targets are no integers, out of range, or of another shape.
        """
        with np.errstate(**self._expected):
            return self.pipeline.train(self._cut(tokens, targets))

    def loss(self, tokens: Array, targets: Array) -> float:
        """Summed loss of a batch, without gradients.

        Parameters
        ----------
        tokens, targets : int array, (batch, length)
            As for `loss_and_gradient`.

        Returns
        -------
        float
            Cross-entropy in nats, summed over all tokens.

        Raises
        ------
        TypeError, ValueError
            If tokens or targets are no integers, out of range, or of another shape.
        """
        with self._forward_only():
            return self.pipeline.evaluate(self._cut(tokens, targets))

    def logits(self, tokens: Array) -> Array:
        """Unnormalised log-probabilities of the next token.

        Parameters
        ----------
        tokens : int array, (batch, length)
            Any batch size, ``1 <= length <= context_length``.

        Returns
        -------
        array, (batch, length, vocabulary_size)
            New memory, of the dtype of the parameters.

        Raises
        ------
        TypeError, ValueError
            If tokens are no integers, out of range, or of another shape.
        """
        tokens_n = self._checked("tokens", tokens)
        with self._forward_only():
            logits_nv = self.pipeline.infer(Batch(tokens_n, None, np.shape(tokens)[1]))
        if logits_nv is None:
            logits_nv = self._scratch.module.empty((len(tokens_n), self.vocabulary_size), self.parameters.dtype)
        return self._from_last_stage(logits_nv, "logits").reshape(*np.shape(tokens), self.vocabulary_size)

    def generate(self, prompt_tokens: Sequence[int], count: int, temperature: float = 1.0, seed: int = 0) -> np.ndarray:
        """Continue a prompt by `count` sampled tokens.

        Parameters
        ----------
        prompt_tokens : sequence of int
            At least one token; if longer than ``context_length``, only the last tokens count.
        count : int
            Tokens to add.
        temperature : float
            Divides the logits; 0 takes the most likely token.
        seed : int
            Same seed, same text.

        Returns
        -------
        int64 array, (len(prompt_tokens) + count,)
            The prompt and its continuation.

        Raises
        ------
        TypeError, ValueError
            If there is no token, tokens are no integers or out of range, or `count` or `temperature` is negative.
        """
        tokens = np.array(prompt_tokens, ndmin=1)
        if tokens.ndim != 1 or tokens.size == 0:
            raise ValueError(f"the prompt must be a sequence of at least one token, got shape {tokens.shape}")
        if count < 0 or not temperature >= 0:
            raise ValueError(f"count and temperature must not be negative, got {count} and {temperature}")
        self._checked("prompt tokens", tokens[None, -self.context_length :])
        random = generator(seed, "generate")
        tokens = np.concatenate([tokens.astype(np.int64), np.zeros(count, np.int64)])
        for end in range(len(tokens) - count, len(tokens)):
            window_n = self._checked("tokens", tokens[None, max(0, end - self.context_length) : end])
            with self._forward_only():
                logits_nv = self.pipeline.infer(Batch(window_n, None, len(window_n), last_only=True))
            if logits_nv is not None:
                tokens[end] = _sampled(to_host(logits_nv[0]).astype(np.float64), temperature, random)
            self._from_last_stage(tokens[end : end + 1], "token")
        return tokens

    def _cut(self, tokens: Array, targets: Array) -> list[Batch]:
        """The micro-batches of a batch, or an error."""
        if np.shape(tokens) != np.shape(targets):
            raise ValueError(f"tokens have shape {np.shape(tokens)}, but targets {np.shape(targets)}")
        tokens_n, targets_n = self._checked("tokens", tokens), self._checked("targets", targets)
        size, length = np.shape(tokens)
        cuts = [length * cut for cut in split(size, self.microbatches)]
        return [
            Batch(tokens_n[first:last], targets_n[first:last], length)
            for first, last in zip(cuts[:-1], cuts[1:], strict=True)
        ]

    def _checked(self, what: str, tokens: Array) -> Array:
        """`tokens` as a flat int64 array where the model computes, or an error."""
        tokens = np.asarray(to_host(tokens) if is_array(tokens) else tokens)
        if tokens.dtype.kind not in "iu":
            raise TypeError(f"{what} must be integers, got {tokens.dtype}")
        if tokens.ndim != 2:
            raise ValueError(f"{what} must have shape (batch, length), got {tokens.shape}")
        if tokens.shape[1] > self.context_length:
            raise ValueError(
                f"{what} are sequences of {tokens.shape[1]}, but the model's context_length is {self.context_length}"
            )
        if tokens.shape[1] == 0:
            raise ValueError(f"{what} of shape {tokens.shape} are sequences of no token")
        low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
        if low < 0 or high >= self.vocabulary_size:
            raise ValueError(
                f"{what} range from {low} to {high}, but the model's vocabulary_size is {self.vocabulary_size}: "
                f"valid tokens are 0 to {self.vocabulary_size - 1}"
            )
        flat = self._inputs(what, (tokens.size,), np.int64)
        flat.reshape(tokens.shape)[...] = tokens
        if self._moved_inputs is None:
            return flat
        moved = self._moved_inputs(what, flat.shape, flat.dtype)
        copy_to_device(flat, moved)
        return moved

    @contextmanager
    def _forward_only(self) -> Iterator[None]:
        """A context for forward passes without a backward pass, which keep nothing."""
        self._keeping.keeps = False
        try:
            yield
        finally:
            self._keeping.keeps = True

    def _from_last_stage(self, array: Array, label: str) -> Array:
        """Broadcast an array of the last pipeline stage to all stages, in place."""
        if self.mesh is not None and self.mesh.pipeline.size > 1:
            self.mesh.pipeline.broadcast(array, root=self.mesh.pipeline.size - 1, label=label)
        return array


def _sampled(logits_v: np.ndarray, temperature: float, random: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits_v.argmax())
    weights_v = np.exp((logits_v - logits_v.max()) / temperature)
    edges_v = np.cumsum(weights_v)
    return min(int(np.searchsorted(edges_v, random.random() * edges_v[-1], "right")), len(edges_v) - 1)


def _names_by_unit(architecture: Architecture, sequence_parallel: bool) -> list[list[str]]:
    """Names of the tensors of each unit; a tied tensor belongs to the first unit that uses it."""
    known: set[str] = set()
    names = []
    for name in architecture.units():
        layer: Layer = architecture.build(name, sequence_parallel=sequence_parallel)
        names.append([spec.name for spec in layer.specs() if spec.name not in known])
        known.update(names[-1])
    return names
