"""The chunks of a model that this rank runs, one a virtual stage, and the memory of their activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.layout.local_layout import ModelParallelRank
from mpishard.nn.activations import ActivationCheckpointing, KeepAll
from mpishard.nn.block import TransformerBlock
from mpishard.nn.chunk import Chunk
from mpishard.nn.decoder_architecture import DecoderArchitecture
from mpishard.nn.options import MemoryOptions, PipelineOptions, Precision
from mpishard.nn.tensor_parallel import TensorParallel
from mpishard.nn.unit_costs import measure_costs
from mpishard.nn.units import OutputHead
from mpishard.nn.workspace import Workspace
from mpishard.parameters.flat import FlatParameters

_draws: ContextVar[bool] = ContextVar("_draws", default=True)


@contextmanager
def values_from_elsewhere() -> Iterator[None]:
    """A context as `Mesh.without_initial_values`, also for models without a mesh.  Not collective."""
    before = _draws.set(False)
    try:
        yield
    finally:
        _draws.reset(before)


class LocalChunks:
    """Cuts a model into virtual stages and builds the chunks of this rank; owns their parameters and scratch memory.

    Collective over the mesh if the costs of the stages are measured, over its data axis if parameters are sharded.

    Parameters
    ----------
    architecture : DecoderArchitecture
    mesh : Mesh or None
        None: one rank alone.
    pipeline : PipelineOptions
    precision : Precision
    memory : MemoryOptions
    seed : int
        Seed of the initial values.
    module : module
        ``numpy`` or ``cupy``.

    Attributes
    ----------
    parameters : FlatParameters
        The tensors of this rank.
    chunks : list of Chunk
        One for each virtual stage of this rank.
    blocks : list of TransformerBlock
        The blocks in these chunks.
    scratch : Workspace
        Its scratch memory is that of all chunks.
    """

    def __init__(
        self,
        architecture: DecoderArchitecture,
        mesh: Mesh | None,
        pipeline: PipelineOptions,
        precision: Precision,
        memory: MemoryOptions,
        seed: int,
        module: Any,
    ) -> None:
        place = ModelParallelRank() if mesh is None else mesh.place
        stages = place.pipeline_size * pipeline.chunks
        costs = pipeline.stage_costs
        if isinstance(costs, str):  # "measured"
            world = Axis.single("world") if mesh is None else mesh.world
            costs = measure_costs(architecture, precision.dtype, world, precision.compute_dtype, module)
        cut = architecture.cut(stages, costs)
        self.parameters: FlatParameters = FlatParameters(
            architecture.specs(stages, memory.sequence_parallel, costs),
            precision.dtype,
            module=module,
            place=place,
            units=architecture.tensors_by_unit(sequence_parallel=memory.sequence_parallel),
            sharded_over=mesh.data if mesh is not None and memory.sharded_parameters else None,
        )
        self.scratch: Workspace = Workspace(precision.dtype, module)
        axis = None if mesh is None else mesh.tensor
        tensor = TensorParallel(axis, memory.sequence_parallel, architecture.shards, self.scratch.scratch)
        self._keeping: KeepAll | ActivationCheckpointing = KeepAll()
        if memory.recompute or precision.storage_dtype is not None:
            self._keeping = ActivationCheckpointing(self.scratch, memory.recompute, precision.storage_dtype)
        self.chunks: list[Chunk] = []
        for stage in (stage for stage in range(stages) if place.runs(stage)):
            units = [architecture.build(name, sequence_parallel=memory.sequence_parallel) for name in cut[stage]]
            for unit in units:
                unit.bind(self.parameters, tensor, precision.compute_dtype)
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
