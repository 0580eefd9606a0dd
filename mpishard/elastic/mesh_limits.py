"""Which meshes the model and the optimizer of an elastic run can have."""

from __future__ import annotations

import weakref
from typing import Any

from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.elastic.mesh_choice import MeshSizes
from mpishard.nn.model_facts import MODEL, architecture_of
from mpishard.parameters.flat import FlatParameters
from mpishard.training.objective import Objective


class MeshLimits:
    """Says why a mesh is impossible; called as `MeshChoice.why_not`.  `problem` is for the optimizer's present mesh."""

    def __init__(self, optimizer: ShardedOptimizer, problem: Objective[Any]) -> None:
        start, config = problem.start, optimizer.config
        self._batch_size = problem.batch_size
        self._is_model = isinstance(start, FlatParameters)
        self._reproducible = config.reproducible
        same_bits = config.reproducible and not config.allow_different_bits
        self._keeps_tensor = same_bits and isinstance(start, FlatParameters) and start.sums_by_mpi
        architecture = problem.facts.get(MODEL)
        self._architecture = None if architecture is None else architecture_of(architecture)
        self._optimizer = optimizer
        self._first = weakref.ref(start) if isinstance(start, FlatParameters) else None  # a later mesh has others

    def __call__(self, sizes: MeshSizes) -> str:
        """The reason, in words; empty if the mesh is possible."""
        if sizes.data > self._batch_size:
            return f"batch_size={self._batch_size} gives some of {sizes.data} data ranks no sample"
        if not self._is_model and sizes.ranks > sizes.data:
            return "a function of a flat array cannot be split over tensor or pipeline ranks"
        parameters = self._optimizer.parameters or (None if self._first is None else self._first())
        try:
            if self._architecture is not None:
                self._architecture.check(sizes.tensor, sizes.pipeline)
            if parameters is not None:
                parameters.carried.check_split(sizes.tensor, sizes.pipeline)
                if self._reproducible:
                    parameters.carried.check_reproducible(sizes.pipeline)
        except ValueError as error:
            return str(error)
        tensor = self._optimizer.mesh.tensor.size  # now: that of the run, also in a process that has joined it
        if self._keeps_tensor and sizes.tensor != tensor:
            return (
                f"with reproducible=True a model without shards keeps its tensor size of {tensor}, since "
                f"{sizes.tensor} changes the bits: make it with shards=, a multiple of all tensor sizes, or give "
                "ShardingConfiguration(..., allow_different_bits=True)"
            )
        return ""
