"""One line makes a model or an update rule distributed."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, overload

from mpishard.backend import array as arrays
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ConfigurationOptions, ShardingConfiguration
from mpishard.data_parallel.full_parameters import gather_whole
from mpishard.data_parallel.optimizers import optimizer_of
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.shared_parameters import Replicas
from mpishard.data_parallel.validation import check_place
from mpishard.layout.boxes import split
from mpishard.optim import Rule
from mpishard.parameters.flat import FlatParameters, Model
from mpishard.parameters.gradient_buckets import GradientBuckets
from mpishard.reduction.ordered import OrderedSums

Array = Any


class ShardedModel:
    """A model on data-parallel ranks: it starts with the same parameters on all, and its gradients are summed.

    Creation is collective over the mesh and copies the parameters of data rank 0 to the others.

    Parameters
    ----------
    model : object
        Has ``parameters``, a FlatParameters, and ``loss_and_gradient(*batch)``, which writes into its gradients.
    config : ShardingConfiguration or Mesh

    Raises
    ------
    TypeError
        If it is no such model.
    ValueError
        If its parameters are not laid out for this rank's place in the mesh.
    """

    splits: ClassVar[bool] = False

    def __init__(self, model: Model, config: ShardingConfiguration | Mesh) -> None:
        if isinstance(model, type) and issubclass(model, Rule):
            raise TypeError(f"give a rule with its settings, {model.__name__}(lr=...), not the class {model.__name__}")
        if not isinstance(getattr(model, "parameters", None), FlatParameters):
            raise TypeError(
                f"a model must have its FlatParameters as `parameters`; {type(model).__name__} has not.  A function of "
                "a flat array needs no model: give it to OptimizationProblem"
            )
        self.model = model
        self.config: ShardingConfiguration = ShardingConfiguration.of(config)
        mesh = self.config.mesh
        if not self.splits and mesh.data.size < mesh.size:
            raise ValueError(
                f"a ShardedModel is data-parallel only, but the mesh is {mesh.sizes}; use HybridShardedModel"
            )
        problem = None
        try:
            check_place(self.parameters, mesh)
        except ValueError as error:
            problem = error
        mesh.world.raise_if_any(problem)
        self._axis = mesh.data
        self._replicas = Replicas(mesh, self.parameters)
        self._replicas.spread()

    @property
    def parameters(self) -> FlatParameters:
        """The model's parameters; give them to `step` of an optimizer."""
        return self.model.parameters

    @property
    def rank(self) -> int:
        """Rank on the data axis."""
        return self._axis.rank

    @property
    def world_size(self) -> int:
        """Ranks on the data axis."""
        return self._axis.size

    @property
    def local_parameter_shard(self) -> Array:
        """View of this data rank's even share of the flat parameters (1-D); under ZeRO-3 of those of each unit."""
        return self._shards()[1]

    def gather_full_parameters(self) -> Array:
        """A new flat array of all parameters of the whole model, each share taken from its rank.  Collective."""
        mesh, parameters = self.config.mesh, self.parameters
        if parameters.sharded is None and mesh.data.size == mesh.size:
            whole = parameters.flat.copy()
            return self._axis.all_gather(whole, label="parameters")
        ranges, shard = self._shards()
        host = gather_whole(mesh.world, parameters, ranges, arrays.to_host(shard))
        if not arrays.is_device(shard):
            return host
        whole = arrays.empty(host.size, host.dtype, like=shard)
        arrays.copy_to_device(host, whole)
        return whole

    def _shards(self) -> tuple[list[tuple[int, int]], Array]:
        """Ranges of this place's flat order that are this data rank's share, and their values end to end."""
        sharded = self.parameters.sharded
        if sharded is not None:
            return sharded.own, sharded.shard
        cuts = split(self.parameters.size, self.world_size)
        start, stop = cuts[self.rank], cuts[self.rank + 1]
        return [(start, stop)], self.parameters.flat[start:stop]

    def loss_and_gradient(self, *batch: Any) -> float:
        """Summed loss of this data rank's batch; adds its gradient.

        Where an optimizer has taken a step with these parameters before, its reduction starts while this still runs;
        under ZeRO-2 and 3 this may then wait for other ranks, so let no other collective come between this and `step`.
        """
        return self.model.loss_and_gradient(*batch)

    def synchronize_gradients(self) -> None:
        """Sum the gradients over the data axis; `step` of an optimizer does this by itself.  Collective.

        Before that, those of copies within a data coordinate are summed.  Afterwards every rank's gradients are the sum
        (under ZeRO its own part of the sum), until the next step or ``parameters.reset_gradients()``.
        """
        gradients: GradientBuckets = self.parameters.gradients
        if gradients.reduced:
            return
        gradients.end_pass()
        if gradients.reduces:
            gradients.wait_all()
        else:
            for bucket in reversed(gradients.buckets):
                self._replicas.sum(bucket, gradients.of_bucket(bucket))
            if self.config.reproducible:
                OrderedSums(self._axis, gradients.flat).all_reduce(gradients.flat)
            else:
                self._axis.all_reduce(gradients.flat, label="gradients")


class HybridShardedModel(ShardedModel):
    """A model that tensor and pipeline ranks hold together, on data-parallel ranks: a `ShardedModel` for any mesh."""

    splits = True


@overload
def as_distributed(model_or_rule: Rule, mesh_or_config: Mesh | ShardingConfiguration) -> ShardedOptimizer: ...


@overload
def as_distributed(model_or_rule: Model, mesh_or_config: Mesh | ShardingConfiguration) -> ShardedModel: ...


def as_distributed(
    model_or_rule: Rule | Model, mesh_or_config: Mesh | ShardingConfiguration
) -> ShardedOptimizer | ShardedModel:
    """Make a model or an update rule distributed.

    Parameters
    ----------
    model_or_rule : Rule or model
        A rule such as ``AdamW(lr=1e-3)`` becomes a `DDPOptimizer`, or with a configuration whose `sync_every` is above
        1 a `LocalSGDOptimizer`; a model becomes a `ShardedModel`, or on a mesh with tensor or pipeline ranks a
        `HybridShardedModel`.
    mesh_or_config : Mesh or ShardingConfiguration

    Returns
    -------
    DDPOptimizer, LocalSGDOptimizer, ShardedModel or HybridShardedModel

    Raises
    ------
    TypeError
        If it is neither a rule nor a model.
    """
    config = ShardingConfiguration.of(mesh_or_config)
    if isinstance(model_or_rule, Rule):
        return optimizer_of(model_or_rule, config)
    if isinstance(model_or_rule, ShardedOptimizer | ShardedModel):
        raise TypeError(f"this {type(model_or_rule).__name__} is distributed already")
    hybrid = config.mesh.data.size < config.mesh.size
    return (HybridShardedModel if hybrid else ShardedModel)(model_or_rule, config)


@overload
def as_distributed_for_high_bandwidth(
    model_or_rule: Rule, mesh: Mesh, **options: Unpack[ConfigurationOptions]
) -> ShardedOptimizer: ...


@overload
def as_distributed_for_high_bandwidth(
    model_or_rule: Model, mesh: Mesh, **options: Unpack[ConfigurationOptions]
) -> ShardedModel: ...


def as_distributed_for_high_bandwidth(
    model_or_rule: Rule | Model, mesh: Mesh, **options: Unpack[ConfigurationOptions]
) -> ShardedOptimizer | ShardedModel:
    """`as_distributed` with `ShardingConfiguration.create_for_high_bandwidth`, which gets the options."""
    return as_distributed(model_or_rule, ShardingConfiguration.create_for_high_bandwidth(mesh, **options))


@overload
def as_distributed_for_low_bandwidth(
    model_or_rule: Rule, mesh: Mesh, **options: Unpack[ConfigurationOptions]
) -> ShardedOptimizer: ...


@overload
def as_distributed_for_low_bandwidth(
    model_or_rule: Model, mesh: Mesh, **options: Unpack[ConfigurationOptions]
) -> ShardedModel: ...


def as_distributed_for_low_bandwidth(
    model_or_rule: Rule | Model, mesh: Mesh, **options: Unpack[ConfigurationOptions]
) -> ShardedOptimizer | ShardedModel:
    """`as_distributed` with `ShardingConfiguration.create_for_low_bandwidth`, which gets the options."""
    return as_distributed(model_or_rule, ShardingConfiguration.create_for_low_bandwidth(mesh, **options))
