"""`as_distributed`, the models that it returns, and the optimizer of a model that each rank has whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Unpack, overload

import numpy as np

from mpishard.arguments import kind_of
from mpishard.backend import array as arrays
from mpishard.comm.agreement import opening
from mpishard.comm.mesh import Mesh
from mpishard.data_parallel.configuration import ConfigurationOptions, ShardingConfiguration, mesh_of
from mpishard.data_parallel.optimizers import ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer, default_optimizer
from mpishard.data_parallel.ownership import TensorCopies
from mpishard.data_parallel.rank_state import gather_full
from mpishard.data_parallel.sharded_optimizer import ShardedOptimizer
from mpishard.data_parallel.strategies import sum_unbound
from mpishard.data_parallel.validation import check_place
from mpishard.layout.boxes import split
from mpishard.minimizers import Method
from mpishard.optim import Rule
from mpishard.parameters.flat import FlatParameters, Model
from mpishard.parameters.reducer import GradientReducer

Array = Any


class ShardedModel:
    """A model on data-parallel ranks: all ranks start with the same parameters, and gradients are summed over ranks.

    The constructor is collective over the mesh and copies the parameters of data rank 0 to the other data ranks.

    Parameters
    ----------
    model : object
        Has ``parameters``, a FlatParameters, and ``loss_and_gradient(*batch)``, which writes into their gradients.
    config : ShardingConfiguration or Mesh
        The mesh of the run, or settings with it.

    Raises
    ------
    TypeError
        If `model` has no such ``parameters``.
    ValueError
        If the parameters are not laid out for this rank's tensor and pipeline rank in the mesh.
    """

    splits: ClassVar[bool] = False

    def __init__(self, model: Model, config: ShardingConfiguration | Mesh) -> None:
        mesh = mesh_of(config)
        with opening(mesh.world, type(self).__name__) as same:
            self.config: ShardingConfiguration = ShardingConfiguration.of(config)
            if isinstance(model, ShardedOptimizer | ShardedModel):
                raise TypeError(f"this {type(model).__name__} is distributed already")
            if isinstance(model, type) and issubclass(model, Rule):
                name = model.__name__
                raise TypeError(f"give a rule with its settings, {name}(lr=...), not the class {name}")
            if any(each.__module__ == "torch.nn.modules.module" for each in type(model).__mro__):
                name = type(model).__name__
                raise TypeError(
                    f"{name} is a module of PyTorch: call mpishard.torch.as_distributed(module, mesh, rule)"
                )
            if not isinstance(getattr(model, "parameters", None), FlatParameters):
                raise TypeError(
                    f"a model must have its FlatParameters as `parameters`; {type(model).__name__} has not.  A "
                    "function of a flat array needs no model: give it to OptimizationProblem"
                )
            self.model = model
            if not self.splits and mesh.data.size < mesh.size:
                raise ValueError(
                    f"a ShardedModel is data-parallel only, but the mesh is {mesh.sizes}; use HybridShardedModel"
                )
            check_place(self.parameters, mesh)
            same |= {"parameters": f"{self.parameters.description} ({self.parameters.fingerprint:x})"}
            same |= self.parameters.model_settings
        self._axis = mesh.data
        self._copies = TensorCopies(mesh, self.parameters)
        self._copies.broadcast(self.parameters)

    @property
    def parameters(self) -> FlatParameters:
        """The model's parameters; pass them to `step` of an optimizer."""
        return self.model.parameters

    @property
    def rank(self) -> int:
        """Rank on the data axis."""
        return self._axis.rank

    @property
    def world_size(self) -> int:
        """Number of ranks on the data axis."""
        return self._axis.size

    @property
    def local_parameter_shard(self) -> Array:
        """View of this data rank's even share of the flat parameters (1-D); under ZeRO-3, its share of each unit."""
        return self._shards()[1]

    def gather_full_parameters(self) -> Array:
        """A new flat array of all parameters of the model; each share comes from its own rank.

        Collective over the mesh.

        Returns
        -------
        1-D array
            Of the dtype and device of the parameters, the same on every rank.
        """
        mesh, parameters = self.config.mesh, self.parameters
        if parameters.sharded is None and mesh.data.size == mesh.size:
            whole = parameters.flat.copy()
            return self._axis.all_gather(whole, label="parameters")
        ranges, shard = self._shards()
        host = gather_full(mesh.world, parameters, ranges, arrays.to_host(shard))
        return np.asarray(host, like=shard)

    def _shards(self) -> tuple[list[tuple[int, int]], Array]:
        """This data rank's share: its ranges of the flat parameters, and their values end to end."""
        sharded = self.parameters.sharded
        if sharded is not None:
            return sharded.own, sharded.shard
        cuts = split(self.parameters.size, self.world_size)
        start, stop = cuts[self.rank], cuts[self.rank + 1]
        return [(start, stop)], self.parameters.flat[start:stop]

    def loss_and_gradient(self, *batch: Any) -> float:
        """The summed loss of this data rank's batch; adds the gradient to the parameters' gradients.

        Collective over the tensor and pipeline axes if the model is split over them.  After an optimizer's first step
        with these parameters, the reduction starts while this method still runs.  Under ZeRO-2 and 3 this method may
        then wait for other ranks: call no other collective between it and `step`.

        Parameters
        ----------
        *batch : object
            The arguments of the model's own ``loss_and_gradient``.

        Returns
        -------
        float
            The sum over this data rank's samples, not over the data axis.
        """
        return self.model.loss_and_gradient(*batch)

    @property
    def losses_and_gradient(self) -> Callable[[Sequence[tuple[Any, ...]]], Sequence[float]]:
        """That of the model (`mpishard.parameters.flat.Model`); AttributeError if it has none."""
        model: Any = self.model
        found: Callable[[Sequence[tuple[Any, ...]]], Sequence[float]] = model.losses_and_gradient
        return found

    def synchronize_gradients(self) -> None:
        """Sum the gradients over the data axis; `step` of an optimizer does this.  Collective.

        Gradients of copies within a data coordinate are summed first.  Afterwards every rank's gradients hold the sum
        (under ZeRO this rank's part of it), until the next step or ``parameters.reset_gradients()``.
        """
        gradients: GradientReducer = self.parameters.gradients
        if gradients.reduced:
            return
        gradients.finalize()
        if not gradients.progress.is_bound:
            sum_unbound(self.config, self._copies, gradients)


class HybridShardedModel(ShardedModel):
    """A `ShardedModel` for any mesh: tensor and pipeline ranks split the model, data ranks split the batch.

    The constructor is collective over the mesh.

    Parameters
    ----------
    model : object
        As for `ShardedModel`, laid out for this rank's tensor and pipeline rank.
    config : ShardingConfiguration or Mesh
        Of any mesh.

    Raises
    ------
    TypeError, ValueError
        As `ShardedModel`.
    """

    splits = True


@overload
def as_distributed(model_or_rule: Rule | Method, mesh_or_config: Mesh | ShardingConfiguration) -> ShardedOptimizer: ...


@overload
def as_distributed(model_or_rule: Model, mesh_or_config: Mesh | ShardingConfiguration) -> ShardedModel: ...


def as_distributed(
    model_or_rule: Rule | Method | Model, mesh_or_config: Mesh | ShardingConfiguration, *others: Any, **options: Any
) -> ShardedOptimizer | ShardedModel:
    """Make a model or an update rule distributed.

    Collective over the mesh; the parameters of a model are made equal.

    Parameters
    ----------
    model_or_rule : Rule, Method or model
        A rule such as ``AdamW(lr=1e-3)`` becomes a `DDPOptimizer`, or a `LocalSGDOptimizer` if the configuration's
        `sync_every` is above 1.  A model becomes a `ShardedModel`, or a `HybridShardedModel` on a mesh with tensor or
        pipeline ranks.
    mesh_or_config : Mesh or ShardingConfiguration
        The mesh of the run, or a configuration of it.
    *others, **options : any
        None: `mpishard.torch.as_distributed` and `mpishard.jax.as_distributed` take a rule and more.

    Returns
    -------
    DDPOptimizer, LocalSGDOptimizer, ZeRO1Optimizer, ShardedModel or HybridShardedModel
        The object in the place of the rule or model from here on.

    Raises
    ------
    TypeError
        If `model_or_rule` is neither a rule nor a model, `mesh_or_config` is neither a mesh nor a configuration, or
        further arguments are given.
    ValueError
        If the parameters of a model are not laid out for this rank of the mesh; on every rank, if the configuration
        does not go with the rule, or settings or parameters differ between ranks.
    """
    if options and not others and options.keys() <= ConfigurationOptions.__annotations__.keys():
        settings = ", ".join(f"{name}=..." for name in options)
        raise TypeError(f"mpishard.as_distributed takes a configuration: ShardingConfiguration(mesh, {settings})")
    if others or options:
        raise TypeError(
            "mpishard.as_distributed takes a model or a rule, and a mesh; a module of PyTorch takes a rule too: call "
            "mpishard.torch.as_distributed(module, mesh, rule), or for parameters of JAX mpishard.jax.as_distributed"
        )
    config = ShardingConfiguration.of(mesh_or_config)
    if isinstance(model_or_rule, Rule | Method):
        return default_optimizer(model_or_rule, config)
    hybrid = config.mesh.data.size < config.mesh.size
    return (HybridShardedModel if hybrid else ShardedModel)(model_or_rule, config)


@overload
def as_distributed_for_high_bandwidth(
    model_or_rule: Rule | Method, mesh: Mesh, **options: Unpack[ConfigurationOptions]
) -> ShardedOptimizer: ...


@overload
def as_distributed_for_high_bandwidth(
    model_or_rule: Model, mesh: Mesh, **options: Unpack[ConfigurationOptions]
) -> ShardedModel: ...


def as_distributed_for_high_bandwidth(
    model_or_rule: Rule | Method | Model, mesh: Mesh, **options: Unpack[ConfigurationOptions]
) -> ShardedOptimizer | ShardedModel:
    """`as_distributed` with ``ShardingConfiguration.create_for_high_bandwidth(mesh, **options)``.

    Collective as `as_distributed`.

    Parameters
    ----------
    model_or_rule : Rule, Method or model
        As for `as_distributed`.
    mesh : Mesh
        The mesh of the run.
    **options : object
        Settings that differ from the preset.

    Returns
    -------
    DDPOptimizer, LocalSGDOptimizer, ZeRO1Optimizer, ShardedModel or HybridShardedModel
        As of `as_distributed`.

    Raises
    ------
    TypeError, ValueError
        As `as_distributed` and `ShardingConfiguration`.
    """
    return as_distributed(model_or_rule, ShardingConfiguration.create_for_high_bandwidth(mesh, **options))


@overload
def as_distributed_for_low_bandwidth(
    model_or_rule: Rule | Method, mesh: Mesh, **options: Unpack[ConfigurationOptions]
) -> ShardedOptimizer: ...


@overload
def as_distributed_for_low_bandwidth(
    model_or_rule: Model, mesh: Mesh, **options: Unpack[ConfigurationOptions]
) -> ShardedModel: ...


def as_distributed_for_low_bandwidth(
    model_or_rule: Rule | Method | Model, mesh: Mesh, **options: Unpack[ConfigurationOptions]
) -> ShardedOptimizer | ShardedModel:
    """`as_distributed` with ``ShardingConfiguration.create_for_low_bandwidth(mesh, **options)``.

    Collective as `as_distributed`.

    Parameters
    ----------
    model_or_rule : Rule, Method or model
        As for `as_distributed`.
    mesh : Mesh
        The mesh of the run.
    **options : object
        Settings that differ from the preset.

    Returns
    -------
    DDPOptimizer, LocalSGDOptimizer, ZeRO1Optimizer, ShardedModel or HybridShardedModel
        As of `as_distributed`.

    Raises
    ------
    TypeError, ValueError
        As `as_distributed` and `ShardingConfiguration`.
    """
    return as_distributed(model_or_rule, ShardingConfiguration.create_for_low_bandwidth(mesh, **options))


# The optimizer of a model that each rank has whole, as those of PyTorch and JAX.


def configuration_of(mesh: Any, **options: Unpack[ConfigurationOptions]) -> ShardingConfiguration:
    """The configuration that a mesh stands for; a configuration is returned as it is. TypeError if it is neither.

    The `options` are those of a mesh alone.
    """
    if isinstance(mesh, Mesh):
        return ShardingConfiguration.create_for_high_bandwidth(mesh, **options)
    return ShardingConfiguration.of(mesh)


def optimizer_of_whole_model(
    what: str,
    rule: Any,
    config: ShardingConfiguration,
    zero: int,
    shards_parameters: bool = False,
    splits_model: bool = False,
) -> ShardedOptimizer:
    """The optimizer for these arguments of an `as_distributed`; an optimizer is returned as it is.

    All ranks of the mesh are data-parallel, unless others split the model (`splits_model`); `zero` is 0, 1 or 2, or 3
    if `shards_parameters`; `what` names the model in messages. Raises TypeError or ValueError if an argument is unfit,
    or they do not fit together.
    """
    mesh = config.mesh
    if mesh.data.size < mesh.size and not splits_model:
        raise ValueError(
            f"{what} is data-parallel, but the mesh is {mesh.sizes}; make it with tensor=1 and pipeline=1, or train a "
            "model that such ranks split: mpishard.nn.GPT or Llama, which import_pretrained makes of a published one"
        )
    if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero!r} must be {'0, 1, 2 or 3' if shards_parameters else '0, 1 or 2'}")
    if zero == 3 and not shards_parameters:
        raise ValueError(
            f"zero={zero!r} must be 0, 1 or 2; ZeRO-3, whose parameters come and go, needs a model that asks for them, "
            "such as mpishard.nn.GPT"
        )
    if isinstance(rule, ShardedOptimizer):
        if rule.mesh is not mesh or zero:
            raise ValueError(f"the {type(rule).__name__} brings its own mesh and strategy: give that mesh, and no zero")
        return rule
    if not isinstance(rule, Rule):
        raise TypeError(f"rule must be an update rule such as mpishard.AdamW(lr=1e-3), got {kind_of(rule)}")
    if zero and config.sync_every > 1:
        raise ValueError(
            f"sync_every={config.sync_every} lets ranks take steps by themselves, and zero={zero} divides a state that "
            "all share; use one of the two"
        )
    if not zero:
        return default_optimizer(rule, config)
    return {1: ZeRO1Optimizer, 2: ZeRO2Optimizer, 3: ZeRO3Optimizer}[zero](rule, config)
