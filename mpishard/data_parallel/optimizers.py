"""The optimizers by name: an update rule, and a strategy that spreads its work over a mesh."""

from dataclasses import replace

from mpishard.arguments import integer
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration
from mpishard.data_parallel.local_sgd import LocalSGDOptimizer
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.strategies import DataParallel, ShardedGradients, ShardedParameters, ShardedState, Strategy
from mpishard.optim.rules import Rule


class DDPOptimizer(ShardedOptimizer):
    """Distributed data parallel: every rank holds parameters, gradients and state; gradients are all-reduced."""

    strategy: type[Strategy] = DataParallel


class ZeRO1Optimizer(ShardedOptimizer):
    """ZeRO stage 1: each rank holds 1/N of the optimizer state and updates that part of the parameters.

    Sends what `DDPOptimizer` sends: a reduce-scatter of gradients and an all-gather of parameters.
    """

    strategy: type[Strategy] = ShardedState


class ZeRO2Optimizer(ShardedOptimizer):
    """ZeRO stage 2: gradients are sharded as well; besides its part a rank holds the bucket in the making.

    With several micro-batches a step, each of them is reduced: gradients travel once a micro-batch, not once a step.
    Where a model makes micro-batches itself, every rank must call it equally often, with an empty batch if need be.
    """

    strategy: type[Strategy] = ShardedGradients


class ZeRO3Optimizer(ShardedOptimizer):
    """ZeRO stage 3: parameters are sharded as well, and a model gathers each unit of them while it uses it.

    Sends 3 (N - 1) / N of the parameters' bytes where the others send 2: a gather in the forward pass, one in the
    backward pass, and the reduce-scatter of the gradients.  Since passes communicate, every rank must call the model
    equally often, with an empty batch where it has no samples.  A plain flat array must stay whole for its owner, so it
    is trained as by `ZeRO2Optimizer`.
    """

    strategy: type[Strategy] = ShardedParameters


def optimizer_of(rule: Rule, config: ShardingConfiguration) -> ShardedOptimizer:
    """What a rule becomes with a configuration, where nobody has said more."""
    return (LocalSGDOptimizer if config.sync_every > 1 else DDPOptimizer)(rule, config)


# By ZeRO stage.
STRATEGIES = (DataParallel, ShardedState, ShardedGradients, ShardedParameters)


class HybridShardedOptimizer(ShardedOptimizer):
    """Three-dimensional parallelism: tensor and pipeline ranks split the model, data ranks the batch and the state.

    Parameters
    ----------
    rule : Rule
    config : ShardingConfiguration or Mesh
        With all sizes at their defaults its mesh is used as it is.  Otherwise it must have these sizes, or be purely
        data-parallel: then its ranks are arranged anew, in a mesh that is freed with it.
    pipeline_parallel_size, tensor_parallel_size, data_parallel_size : int
        Ranks on each axis; -1 is inferred.
    zero_stage : int
        What data ranks shard: 0 nothing, 1 the state, 2 gradients too, 3 parameters too.

    Raises
    ------
    ValueError
        On every rank, if the sizes do not multiply out to the number of ranks, the mesh is split in another way, or
        there is no such `zero_stage`.

    Notes
    -----
    Build models on `mesh` of the optimizer, and wrap them with its `config`.
    """

    def __init__(
        self,
        rule: Rule,
        config: ShardingConfiguration | Mesh,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = -1,
        *,
        zero_stage: int = 1,
    ) -> None:
        if integer("zero_stage", zero_stage) not in range(len(STRATEGIES)):
            raise ValueError(f"zero_stage={zero_stage} must be 0, 1, 2 or 3")
        self.strategy = STRATEGIES[zero_stage]
        config = ShardingConfiguration.of(config)
        if (pipeline_parallel_size, tensor_parallel_size, data_parallel_size) != (1, 1, -1):
            mesh = config.mesh.reshaped(
                data=data_parallel_size, tensor=tensor_parallel_size, pipeline=pipeline_parallel_size
            )
            config = replace(config, mesh=mesh)
        super().__init__(rule, config)
