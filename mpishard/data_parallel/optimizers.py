"""The named optimizers: an update rule with a strategy that distributes its work over a mesh."""

from dataclasses import replace

from mpishard.arguments import integer
from mpishard.comm.agreement import opening
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ShardingConfiguration, mesh_of
from mpishard.data_parallel.local_sgd import LocalSGDOptimizer
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.strategies import DDP, STAGES, ZERO1, ZERO1_ALL_REDUCED, ZERO2, ZERO3, Sharding
from mpishard.minimizers import Method
from mpishard.optim import Rule


class DDPOptimizer(ShardedOptimizer):
    """Distributed data parallel: every rank holds all parameters, gradients and state; gradients are all-reduced.

    Creation, `step` and `optimize` are collective over the mesh.  Li et al., "PyTorch Distributed" (2020).

    Parameters
    ----------
    rule : Rule
        The update rule.
    config : ShardingConfiguration or Mesh
        Settings with a mesh, or a mesh with the default settings.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizer`; for a method, whose vectors are divided, take `as_distributed` or `ZeRO1Optimizer`.
    """

    sharding: Sharding = DDP


class ZeRO1Optimizer(ShardedOptimizer):
    """ZeRO stage 1: each rank holds 1/N of the optimizer state and updates that part of the parameters.

    A step sends as many bytes as with `DDPOptimizer`: a reduce-scatter of gradients and an all-gather of parameters.

    Creation, `step` and `optimize` are collective over the mesh.  Rajbhandari et al., "ZeRO" (2020), section 5.1.

    Parameters
    ----------
    rule : Rule or Method
        The update rule; or a method such as ``LBFGSB()``, see `ShardedOptimizer`.
    config : ShardingConfiguration or Mesh
        Settings with a mesh, or a mesh with the default settings.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizer`.
    """

    sharding: Sharding = ZERO1


class ZeRO1WithGradients(ZeRO1Optimizer):
    """ZeRO stage 1 in which each rank gets all sums of gradients, for code that reads or changes them before a step.

    A step sends 1.5 times the bytes of `ZeRO1Optimizer`: an all-reduce of gradients and an all-gather of parameters.
    """

    sharding: Sharding = ZERO1_ALL_REDUCED


class ZeRO2Optimizer(ShardedOptimizer):
    """ZeRO stage 2: gradients are sharded as well; besides its part a rank holds only the bucket being filled.

    With several micro-batches in a step, gradients are reduced once per micro-batch, not once per step.  If a model
    makes micro-batches itself, every rank must call it equally often, with an empty batch if it has no samples.

    Creation, `step` and `optimize` are collective over the mesh.  Rajbhandari et al., "ZeRO" (2020), section 5.2.

    Parameters
    ----------
    rule : Rule or Method
        The update rule; or a method such as ``LBFGSB()``, see `ShardedOptimizer`.
    config : ShardingConfiguration or Mesh
        Settings with a mesh, or a mesh with the default settings.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizer`.
    """

    sharding: Sharding = ZERO2


class ZeRO3Optimizer(ShardedOptimizer):
    """ZeRO stage 3: parameters are sharded as well, and a model gathers each unit of them while it uses it.

    A step sends 3 (N - 1) / N of the parameters' bytes; the other stages send 2 (N - 1) / N.  It has an all-gather in
    the forward pass, one in the backward pass, and the reduce-scatter of the gradients.  Since passes communicate,
    every rank must call the model equally often, with an empty batch if it has no samples.  A plain flat array must
    stay whole for the caller, and is trained as by `ZeRO2Optimizer`.

    Creation, `step` and `optimize` are collective over the mesh.  Rajbhandari et al., "ZeRO" (2020), section 5.3.

    Parameters
    ----------
    rule : Rule or Method
        The update rule; or a method such as ``LBFGSB()``, see `ShardedOptimizer`.
    config : ShardingConfiguration or Mesh
        Settings with a mesh, or a mesh with the default settings.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizer`, and if the configuration has a compressor.
    """

    sharding: Sharding = ZERO3


class HybridShardedOptimizer(ShardedOptimizer):
    """Three-dimensional parallelism: tensor and pipeline ranks split the model, data ranks the batch and the state.

    Creation is collective over the mesh, and so are `step` and `optimize`.

    Parameters
    ----------
    rule : Rule or Method
        The update rule; or a method such as ``LBFGSB()``, see `ShardedOptimizer`.
    config : ShardingConfiguration or Mesh
        With all sizes at their defaults, its mesh is used unchanged.  Otherwise the mesh must have these sizes, or be
        purely data-parallel: its ranks then form a new mesh, which is freed together with the given one.
    pipeline_parallel_size, tensor_parallel_size, data_parallel_size : int
        Ranks on each axis; -1 is inferred.
    zero_stage : int
        Sharding over data ranks: 0 nothing, 1 the state, 2 also gradients, 3 also parameters.

    Raises
    ------
    ValueError
        On every rank, if the product of the sizes is not the number of ranks, the mesh has other sizes, or `zero_stage`
        is invalid.
    TypeError
        If `rule` is no rule, or `zero_stage` no whole number.

    Notes
    -----
    Build models on the optimizer's `mesh`, and wrap them with its `config`.
    """

    def __init__(
        self,
        rule: Rule | Method,
        config: ShardingConfiguration | Mesh,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = -1,
        *,
        zero_stage: int = 1,
    ) -> None:
        mesh = mesh_of(config)
        sizes = pipeline_parallel_size, tensor_parallel_size, data_parallel_size
        with opening(mesh.world, "HybridShardedOptimizer") as same:
            config = ShardingConfiguration.of(config)
            if integer("zero_stage", zero_stage) not in range(len(STAGES)):
                raise ValueError(f"zero_stage={zero_stage} must be 0, 1, 2 or 3")
            names = "pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"
            same |= {"zero_stage": zero_stage} | dict(zip(names, sizes, strict=True))
        self.sharding = STAGES[zero_stage]
        if sizes != (1, 1, -1):
            mesh = mesh.reshaped(data=data_parallel_size, tensor=tensor_parallel_size, pipeline=pipeline_parallel_size)
            config = replace(config, mesh=mesh)
        super().__init__(rule, config)


def default_optimizer(rule: Rule | Method, config: ShardingConfiguration) -> ShardedOptimizer:
    """The default optimizer for a rule or method and a configuration, without state.

    A method divides its vectors, as ZeRO-1 does; for a rule the configuration's `sync_every` decides.
    """
    if isinstance(rule, Method):
        return ZeRO1Optimizer(rule, config)
    return (LocalSGDOptimizer if config.sync_every > 1 else DDPOptimizer)(rule, config)
