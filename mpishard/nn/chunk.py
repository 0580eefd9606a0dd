"""The units of one virtual pipeline stage, run forward and backward one micro-batch at a time.

With it: the activations that are kept, the chunks of this rank, and the times of units, which cut stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpishard.backend.array import ready
from mpishard.comm.axis import Axis
from mpishard.comm.errors import raised_on_all
from mpishard.comm.mesh import Mesh
from mpishard.layout.tensors import ModelParallelRank
from mpishard.nn.architecture import DecoderArchitecture
from mpishard.nn.block import TransformerBlock
from mpishard.nn.options import ModelOptions
from mpishard.nn.tensor_parallel import TensorParallel
from mpishard.nn.units import Batch, EmbeddingUnit, OutputHead, Unit
from mpishard.nn.workspace import Workspace
from mpishard.parameters.flat import FlatParameters

Array = Any


# The activations of a block that are kept for its backward pass: all, all in half precision, or only its input.


class Spot(NamedTuple):
    """The position of a block: its number in its chunk, and whether the units before and after it are blocks."""

    number: int
    after_block: bool
    before_block: bool


class BlockUnit:
    """A block as a unit, called like the other units of a `mpishard.nn.Chunk`; `keeping` keeps its activations."""

    def __init__(self, block: TransformerBlock, keeping: KeepAll | ActivationCheckpointing, spot: Spot) -> None:
        self.name: str = block.name
        self._block = block
        self._keeping = keeping
        self._spot = spot

    def forward(self, x_nc: Array, work: Workspace, batch: Batch) -> Array:
        return self._keeping.forward(self._block, x_nc, work, batch.length, self._spot)

    predict = forward

    def backward(self, dy_nc: Array, work: Workspace, batch: Batch) -> Array:
        return self._keeping.backward(self._block, dy_nc, work, batch.length)


class KeepAll:
    """Keep all activations: each micro-batch has a workspace for each block."""

    saved_bytes = 0
    keeps = True

    def forward(self, block: TransformerBlock, x_nc: Array, work: Workspace, length: int, spot: Spot) -> Array:
        return block.forward(x_nc, work.part(block.name), length)

    def backward(self, block: TransformerBlock, dy_nc: Array, work: Workspace, length: int) -> Array:
        return block.backward(dy_nc, work.part(block.name), length)


class _Recording(Workspace):
    """A workspace that remembers what was saved since `begin`."""

    def begin(self, work: Workspace) -> Workspace:
        self.recorded: dict[str, tuple[Array, bool]] = {}
        return self.follow(work)

    def save(self, name: str, *shape: int, dtype: np.dtype | None = None, exact: bool = False) -> Array:
        array = super().save(name, *shape, dtype=dtype)
        self.recorded[name] = array, exact or dtype is not None
        return array


class ActivationCheckpointing:
    """Blocks run in a shared workspace, and few of their activations are kept for each micro-batch.

    With `recompute` only the input of a block is kept, and its forward pass runs again before its backward pass (Chen
    et al., 2016). `storage_dtype`, float16 or bfloat16, is that of kept activations, except for statistics (one or two
    numbers per row and head) and for inputs from and outputs to other units.

    Set `keeps` to False for forward passes without a backward pass, which then keep nothing.
    """

    keeps = True

    def __init__(self, sharing: Workspace, recompute: bool, storage_dtype: Any) -> None:
        self._inner = _Recording(sharing.dtype, sharing.module, sharing)
        # The operands of the products are overwritten by the next block.
        self._inner.defers_products = False
        self._recompute = recompute
        self._storage_dtype = None if storage_dtype is None else np.dtype(storage_dtype)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the shared workspace, without scratch."""
        return self._inner.saved_bytes

    def forward(self, block: TransformerBlock, x_nc: Array, work: Workspace, length: int, spot: Spot) -> Array:
        """Return the output, which outlives the block's other activations."""
        part, inner = work.part(block.name), self._inner
        packed = []
        if self.keeps and self._storage_dtype is not None and spot.after_block:
            packed.append((x_nc, self._pack("input", x_nc, part)))
        inner.begin(work)
        y_nc = block.forward(x_nc, inner, length)
        if self.keeps and not self._recompute:
            for name, (array, exact) in inner.recorded.items():
                if array is not y_nc:
                    packed.append((array, self._pack(name, array, part, exact)))
            part.kept["inside"] = dict(inner.kept)
        part.kept["input"], part.kept["packed"] = x_nc, packed
        if not spot.before_block or (self.keeps and self._storage_dtype is None):
            kept_nc = part.save("output", *y_nc.shape)
        else:
            # Two buffers in turn: the output of the next block must not overwrite its input.
            kept_nc = work.borrow(f"block output {spot.number % 2}", *y_nc.shape)
        kept_nc[...] = y_nc
        return kept_nc

    def backward(self, block: TransformerBlock, dy_nc: Array, work: Workspace, length: int) -> Array:
        part, inner = work.part(block.name), self._inner
        inner.begin(work)
        for array, packed in part.kept["packed"]:
            array[...] = packed
        if self._recompute:
            block.forward(part.kept["input"], inner, length)
        else:
            inner.kept = part.kept["inside"]
        return block.backward(dy_nc, inner, length)

    def _pack(self, name: str, array: Array, part: Workspace, exact: bool = False) -> Array:
        packed = part.saved(name, array.shape, array.dtype if exact else self._storage_dtype)
        packed[...] = array
        return packed


# The units of one virtual pipeline stage, run forward and backward one micro-batch at a time.


class Chunk:
    """One virtual stage, for `mpishard.pipeline.runtime`.

    All methods that compute are collective over the tensor axis, and under ZeRO-3 over the data axis.  Each unit is
    then gathered once in each direction, while the previous one computes.

    Parameters
    ----------
    virtual_stage : int
        Its number.
    units : sequence of EmbeddingUnit, TransformerBlock or OutputHead
        In order, bound to `parameters`.
    parameters : FlatParameters
        The tensors of this rank.
    tensor : TensorParallel
        The axis over which rows and columns are split.
    memory : Workspace
        The workspace whose scratch memory is used.
    keeping : KeepAll or ActivationCheckpointing
        Which activations of blocks are kept.

    Attributes
    ----------
    workspaces : list of Workspace
        One for each micro-batch that was in flight at the same time.
    """

    def __init__(
        self,
        virtual_stage: int,
        units: Sequence[Unit],
        parameters: FlatParameters,
        tensor: TensorParallel,
        memory: Workspace,
        keeping: KeepAll | ActivationCheckpointing,
    ) -> None:
        self.virtual_stage = virtual_stage
        self.units: tuple[Unit, ...] = tuple(units)
        self.workspaces: list[Workspace] = []
        self._parameters = parameters
        self._tensor = tensor
        self._memory = memory
        self._names = {unit.name: [spec.name for spec in unit.specs()] for unit in units}
        kinds = [False, *(isinstance(unit, TransformerBlock) for unit in units), False]
        spots = [Spot(number, kinds[number], kinds[number + 2]) for number in range(len(units))]
        self._called: list[Any] = [
            BlockUnit(unit, keeping, spot) if isinstance(unit, TransformerBlock) else unit
            for unit, spot in zip(units, spots, strict=True)
        ]
        self._width = units[0].width

    def input_shape(self, batch: Batch) -> tuple[int, int]:
        """Shape of the input from the previous stage.

        Parameters
        ----------
        batch : Batch
            A micro-batch.

        Returns
        -------
        (int, int)
            The rows of this tensor rank, and the width.
        """
        return self._tensor.rows(batch.rows), self._width

    def output_shape(self, batch: Batch) -> tuple[int, int]:
        """Shape of the output to the next stage.

        Parameters
        ----------
        batch : Batch
            A micro-batch.

        Returns
        -------
        (int, int)
            The rows of this tensor rank, and the width.
        """
        return self._tensor.rows(batch.rows), self._width

    def workspace(self) -> Workspace:
        """Make memory for one more micro-batch in flight.

        Returns
        -------
        Workspace
            Added to `workspaces`.
        """
        work = Workspace(self._memory.dtype, self._memory.module, self._memory)
        self.workspaces.append(work)
        return work

    @property
    def saved_bytes(self) -> int:
        """Bytes held for micro-batches, without scratch."""
        return sum(work.saved_bytes for work in self.workspaces)

    def forward(self, x: Array | None, work: Workspace, batch: Batch) -> Any:
        """Output of the stage, or the summed loss of the batch.

        Parameters
        ----------
        x : array, shape (n, width), or None
            Output of the previous stage; None for the first.  Kept until the backward pass.
        work : Workspace
            Memory of the micro-batch.
        batch : Batch
            Tokens for the first stage, targets for the last.

        Returns
        -------
        array of shape (n, width), or float
            The last stage returns the loss in nats, summed over its tokens; on a device a `PendingNumber`.
        """
        work.rows, work.draws, work.deferred, work.cache = batch.rows, batch.draws, None, None
        for unit in self._gathered(self._called):
            x = unit.forward(x, work, batch)
        return x

    def infer(self, x: Array | None, work: Workspace, batch: Batch) -> Array:
        """Like `forward`, but the last stage returns the logits of the whole vocabulary.

        Parameters
        ----------
        x : array, shape (n, width), or None
            Output of the previous stage; None for the first.
        work : Workspace
            Memory of the micro-batch.
        batch : Batch
            Tokens for the first stage.

        Returns
        -------
        array
            Of shape (n, width); of the last stage (rows, vocabulary_size), a new array.
        """
        work.rows, work.draws, work.deferred, work.cache = batch.rows, batch.draws, None, batch.cache
        for unit in self._gathered(self._called):
            x = unit.predict(x, work, batch)
        return x

    def backward(self, dy: Array | None, work: Workspace, batch: Batch) -> Array | None:
        """Gradient of the stage's input; writes all gradients and marks them ready.

        Parameters
        ----------
        dy : array, shape (n, width), or None
            Gradient of the loss with respect to the output, which is overwritten; None for the last stage.
        work : Workspace
            That of the forward pass.
        batch : Batch
            That of the forward pass.

        Returns
        -------
        array of shape (n, width), or None
            None of the first stage.
        """
        for unit in self._gathered(self._called[::-1]):
            dy = unit.backward(dy, work, batch)
        return dy

    def input_gradient(self, dy: Array | None, work: Workspace, batch: Batch) -> Array | None:
        """Like `backward`, but defer the products for weight gradients, and mark no gradient ready.

        Parameters
        ----------
        dy : array, shape (n, width), or None
            Gradient of the loss with respect to the output, which is overwritten; None for the last stage.
        work : Workspace
            That of the forward pass; it keeps the deferred work.
        batch : Batch
            That of the forward pass.

        Returns
        -------
        array of shape (n, width), or None
            None of the first stage.
        """
        work.deferred = []
        return self.backward(dy, work, batch)

    def weight_gradient(self, work: Workspace) -> None:
        """Do the deferred work of `input_gradient`.

        Parameters
        ----------
        work : Workspace
            That of the micro-batch.
        """
        deferred, work.deferred = work.deferred, None
        assert deferred is not None
        for each in deferred:
            each()

    def _gathered(self, units: Sequence[Any]) -> Iterator[Any]:
        """Yield the units, each while its parameters are gathered."""
        for index, unit in enumerate(units):
            names = self._names[unit.name]
            self._parameters.use(names)
            if index + 1 < len(units):
                self._parameters.prefetch(self._names[units[index + 1].name])
            yield unit
            self._parameters.release(names)


# Measures the times of a model's units, so that a pipeline can be cut into stages of equal time.

_REPEATS = 3


def measure_costs(
    architecture: DecoderArchitecture, dtype: Any, world: Axis, compute_dtype: Any = None, module: Any = np
) -> list[float]:
    """Seconds that one sequence of `context_length` tokens spends in each unit, forward and backward.

    Rank 0 of `world` measures the embeddings, one block and an output head, and broadcasts the times, so that all ranks
    cut the model identically. Collective over `world`.
    """
    seconds = np.zeros(3)
    with raised_on_all(world):
        if world.rank == 0:
            seconds[:] = _measure(architecture, dtype, compute_dtype, module)
    if world.size > 1:
        world.broadcast(seconds, label="control")
    embedding, block, head = (float(each) for each in seconds)
    return [embedding, *([block] * architecture.layers), head]


def _measure(architecture: DecoderArchitecture, dtype: Any, compute_dtype: Any, module: Any) -> list[float]:
    small: DecoderArchitecture = replace(architecture, layers=1)  # type: ignore[type-var]
    parameters = FlatParameters(small.specs(), dtype, module=module)
    embedding, block, head = (small.build(unit) for unit in small.units())
    assert isinstance(embedding, EmbeddingUnit) and isinstance(block, TransformerBlock) and isinstance(head, OutputHead)
    alone = TensorParallel(shards=architecture.shards)
    for unit in (embedding, block, head):
        unit.bind(parameters, alone, compute_dtype)
        unit.initialize(0)
    work = Workspace(dtype, module)
    length = architecture.context_length
    tokens_n = module.asarray(np.arange(length) % architecture.vocabulary_size)

    def now() -> float:
        ready(parameters.like)
        return time.perf_counter()

    batch = Batch(tokens_n, tokens_n, length)
    work.rows = batch.rows
    best = [float("inf")] * 3
    for _ in range(1 + _REPEATS):
        marks = [now()]
        x_nc = embedding.forward(None, work, batch)
        marks.append(now())
        x_nc = block.forward(x_nc, work, length)
        marks.append(now())
        head.forward(x_nc, work, batch)
        dx_nc = head.backward(None, work, batch)
        marks.append(now())
        dx_nc = block.backward(dx_nc, work, length)
        marks.append(now())
        embedding.backward(dx_nc, work, batch)
        marks.append(now())
        parameters.reset_gradients()
        spans = np.diff(marks)
        once = [spans[0] + spans[4], spans[1] + spans[3], spans[2]]
        # The first round compiles and takes memory, and is never the fastest.
        best = [min(pair) for pair in zip(best, once, strict=True)]
    return best


# The chunks of a model that this rank runs, one a virtual stage, and the memory of their activations.

_draws: ContextVar[bool] = ContextVar("_draws", default=True)


@contextmanager
def values_from_elsewhere() -> Iterator[None]:
    """A context as `Mesh.without_initial_values`, also for models without a mesh."""
    before = _draws.set(False)
    try:
        yield
    finally:
        _draws.reset(before)


class LocalChunks:
    """Cuts a model into virtual stages and builds the chunks of this rank; owns their parameters and scratch memory.

    Collective over the mesh if the costs of the stages are measured, over its data axis if parameters are sharded.
    """

    def __init__(
        self,
        architecture: DecoderArchitecture,
        mesh: Mesh | None,
        options: ModelOptions,
        seed: int,
        module: Any,
    ) -> None:
        place = ModelParallelRank() if mesh is None else mesh.place
        stages = place.pipeline_size * options.chunks
        costs = options.stage_costs
        if isinstance(costs, str):  # "measured"
            world = Axis.single("world") if mesh is None else mesh.world
            costs = measure_costs(architecture, options.dtype, world, options.compute_dtype, module)
        cut = architecture.cut(stages, costs)
        self.parameters: FlatParameters = FlatParameters(
            architecture.specs(stages, options.sequence_parallel, costs),
            options.dtype,
            module=module,
            place=place,
            units=architecture.tensors_by_unit(sequence_parallel=options.sequence_parallel),
            sharded_over=mesh.data if mesh is not None and options.sharded_parameters else None,
        )
        self.scratch: Workspace = Workspace(options.dtype, module)
        axis = None if mesh is None else mesh.tensor
        tensor = TensorParallel(axis, options.sequence_parallel, architecture.shards, self.scratch.scratch)
        self._keeping: KeepAll | ActivationCheckpointing = KeepAll()
        if options.recompute or options.storage_dtype is not None:
            self._keeping = ActivationCheckpointing(self.scratch, options.recompute, options.storage_dtype)
        self.chunks: list[Chunk] = []
        for stage in (stage for stage in range(stages) if place.runs(stage)):
            units = [architecture.build(name, sequence_parallel=options.sequence_parallel) for name in cut[stage]]
            for unit in units:
                unit.bind(self.parameters, tensor, options.compute_dtype)
                if _draws.get() and (mesh is None or mesh.initial_values):
                    unit.initialize(seed)
                if isinstance(unit, OutputHead):
                    unit.shares_table(place.runs(0))
                    if architecture.tied and place.runs(0):
                        self.parameters.second_uses[unit.head.weight_name] = stage
            self.chunks.append(Chunk(stage, units, self.parameters, tensor, self.scratch, self._keeping))
        self.blocks: list[TransformerBlock] = [
            unit for chunk in self.chunks for unit in chunk.units if isinstance(unit, TransformerBlock)
        ]

    @property
    def activation_bytes(self) -> int:
        """Bytes held for activations of all micro-batches in flight and for scratch."""
        kept = self._keeping.saved_bytes + sum(chunk.saved_bytes for chunk in self.chunks)
        return kept + self.scratch.scratch.nbytes

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """A context for forward passes without a backward pass, which keep nothing."""
        self._keeping.keeps = False
        try:
            yield
        finally:
            self._keeping.keeps = True
