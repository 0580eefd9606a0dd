"""The mesh for a number of ranks by an estimate: of those that fit into memory the fastest."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mpishard.backend import array as arrays
from mpishard.data.sampling import MICRO_BATCHES
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.elastic.mesh_choice import MeshSizes
from mpishard.estimate.estimates import estimate
from mpishard.estimate.layouts import Layout, layouts
from mpishard.estimate.profile import TYPICAL, MachineProfile
from mpishard.estimate.sizes import Workload
from mpishard.nn.model_facts import MODEL, architecture_of
from mpishard.parameters.flat import FlatParameters
from mpishard.training.objective import Objective

# This many fewer ranks than there are may be faster, such as 8 of 11: one of 8 numbers in a row has small factors.
_FEWER = 7


@dataclass(frozen=True)
class AutoLayouts:
    """The `layouts` of an `ElasticOptimizer` by `mpishard.estimate`; ``layouts="auto"`` has all defaults.

    For models whose architecture is known, such as `mpishard.nn.GPT` in a problem of `OptimizationProblem.for_model`.
    No method is collective.

    Parameters
    ----------
    memory_limit : float, optional
        Bytes of a rank.  A mesh that needs more is never taken.  Default: an even share of this node's memory; if no
        mesh fits, the run then takes the one that needs least.  Memory of GPUs has no default.
    profile : MachineProfile
        Speeds of the machine; of ``mpishard bench``.
    schedule : str
        That of the model, where it has pipeline ranks.
    sequence_parallel, recompute : bool
        As the model has it.
    """

    memory_limit: float | None = None
    profile: MachineProfile = TYPICAL
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    recompute: bool = False

    def for_problem(
        self, optimizer: ShardedOptimizer, problem: Objective[Any], why_not: Callable[[MeshSizes], str]
    ) -> Callable[[int], dict[str, int] | None]:
        """The function of a number of ranks that returns the sizes of a mesh.

        Parameters
        ----------
        optimizer : ShardedOptimizer
            Its rule and its strategy decide about memory.
        problem : OptimizationProblem
            For the mesh of the optimizer.
        why_not : callable
            Why a mesh cannot be had; empty if it can.

        Returns
        -------
        callable
            As the argument `layouts` of `ElasticOptimizer`.

        Raises
        ------
        ValueError
            If the problem does not know the model's architecture.
        """
        found, start = problem.facts.get(MODEL), problem.start
        architecture = None if found is None else architecture_of(found)
        if architecture is None or not isinstance(start, FlatParameters):
            raise ValueError(
                "layouts='auto' estimates meshes of an nn.GPT or nn.Llama in a problem of "
                "OptimizationProblem.for_model; for other models give a list of meshes, or a function of the number of "
                "ranks"
            )
        config, stage = optimizer.config, optimizer.sharding.stage
        workload = Workload(
            itemsize=start.dtype.itemsize,
            slots=len(optimizer.state.slot_names),
            minimum_parameter_group_size=config.minimum_parameter_group_size,
        )
        strict, mesh = self.memory_limit is not None, config.mesh
        of_node = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        on_device = arrays.is_device(start.like)
        micro = problem.micro_batch_size
        if micro is None and config.reproducible:
            micro = -(-problem.batch_size // MICRO_BATCHES)

        def limit_of(ranks: int) -> float:
            """Bytes of each of so many ranks, of which a node has the share that it has now."""
            if self.memory_limit is not None:
                return self.memory_limit
            return math.inf if on_device else of_node / math.ceil(ranks * mesh.node.size / mesh.size)

        def cost(layout: Layout, limit: float) -> tuple[bool, float, float, int]:
            share = -(-problem.batch_size // layout.data)
            cut = config.reproducible or layout.pipeline == 1  # else a pipeline cuts each micro-batch again
            number = -(-share // min(micro or share, share)) if cut else None
            seen = estimate(architecture, layout, replace(workload, batch=share, microbatches=number), self.profile)
            needs = seen.memory.total
            return needs > limit, needs if needs > limit else seen.step_time, seen.step_time, -layout.ranks

        def choose(ranks: int) -> dict[str, int] | None:
            candidates = [
                layout
                for number in range(ranks, max(0, ranks - 1 - _FEWER), -1)
                for layout in layouts(
                    number,
                    architecture,
                    zero_stages=(stage,),
                    schedules=(self.schedule,),
                    sequence_parallel=self.sequence_parallel,
                    recompute=self.recompute,
                )
                if not why_not(MeshSizes(layout.data, layout.tensor, layout.pipeline))
            ]
            limit = limit_of(ranks)
            best = min(candidates, key=lambda layout: cost(layout, limit), default=None)
            if best is None or (strict and cost(best, limit)[0]):
                return None
            return {"data": best.data, "tensor": best.tensor, "pipeline": best.pipeline}

        return choose
