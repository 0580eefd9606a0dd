"""One line makes a model or an update rule distributed."""

from __future__ import annotations

from typing import Any

from mpishard.gradients import GradientBuckets
from mpishard.layout import split
from mpishard.mesh import Mesh
from mpishard.optim import DDPOptimizer, Rule, ShardedOptimizer, ShardingConfiguration
from mpishard.parameters import FlatParameters

Array = Any


class ShardedModel:
    """A model on a mesh: it starts with the same parameters on every rank, and its gradients are summed over ranks.

    Creation is collective over ``mesh.data`` and copies the parameters of data rank 0 to the others.

    Parameters
    ----------
    model : object
        Has ``parameters``, a FlatParameters, and ``loss_and_gradient(*batch)``, which writes into its gradients.
    config : ShardingConfiguration or Mesh
    """

    def __init__(self, model: Any, config: ShardingConfiguration | Mesh) -> None:
        if isinstance(model, type) and issubclass(model, Rule):
            raise TypeError(f"give a rule with its settings, {model.__name__}(lr=...), not the class {model.__name__}")
        if not isinstance(getattr(model, "parameters", None), FlatParameters):
            raise TypeError(
                f"a model must have its FlatParameters as `parameters`; {type(model).__name__} has not.  A function of "
                "a flat array needs no model: give it to OptimizationProblem"
            )
        self.model = model
        self.config = ShardingConfiguration.of(config)
        self._axis = self.config.mesh.data
        self._axis.broadcast(self.parameters.flat, label="parameters")

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
        """View of this rank's even share of the flat parameters (1-D)."""
        cuts = split(self.parameters.size, self.world_size)
        return self.parameters.flat[cuts[self.rank] : cuts[self.rank + 1]]

    def gather_full_parameters(self) -> Array:
        """A new flat array of all parameters, each rank's share taken from that rank.  Collective."""
        whole = self.parameters.flat.copy()
        return self._axis.all_gather(whole, label="parameters")

    def loss_and_gradient(self, *batch: Any) -> float:
        """Summed loss of this rank's batch; adds its gradient.

        Where an optimizer has taken a step with these parameters before, its reduction starts while this still runs;
        under ZeRO-2 this may then wait for other ranks, so let no other collective come between this and `step`.
        """
        return self.model.loss_and_gradient(*batch)

    def synchronize_gradients(self) -> None:
        """Sum the gradients over the data axis; `step` of an optimizer does this by itself.  Collective.

        Afterwards every rank's gradients are the sum (under ZeRO its own part of the sum), until the next step or
        ``parameters.reset_gradients()``.
        """
        gradients: GradientBuckets = self.parameters.gradients
        if gradients.reduced:
            return
        gradients.end_pass()
        if gradients.reduces:
            gradients.drain()
        else:
            self._axis.all_reduce(gradients.flat, label="gradients")


def as_distributed(model_or_rule: Any, mesh_or_config: Mesh | ShardingConfiguration) -> Any:
    """Make a model or an update rule distributed.

    Parameters
    ----------
    model_or_rule : Rule or model
        A rule such as ``AdamW(lr=1e-3)`` becomes a `DDPOptimizer`, a model becomes a `ShardedModel`.
    mesh_or_config : Mesh or ShardingConfiguration

    Returns
    -------
    DDPOptimizer or ShardedModel

    Raises
    ------
    TypeError
        If it is neither a rule nor a model.
    """
    config = ShardingConfiguration.of(mesh_or_config)
    if isinstance(model_or_rule, Rule):
        return DDPOptimizer(model_or_rule, config)
    if isinstance(model_or_rule, ShardedOptimizer | ShardedModel):
        raise TypeError(f"this {type(model_or_rule).__name__} is distributed already")
    return ShardedModel(model_or_rule, config)


def as_distributed_for_high_bandwidth(model_or_rule: Any, mesh: Mesh) -> Any:
    """`as_distributed` with `ShardingConfiguration.create_for_high_bandwidth`."""
    return as_distributed(model_or_rule, ShardingConfiguration.create_for_high_bandwidth(mesh))


def as_distributed_for_low_bandwidth(model_or_rule: Any, mesh: Mesh) -> Any:
    """`as_distributed` with `ShardingConfiguration.create_for_low_bandwidth`."""
    return as_distributed(model_or_rule, ShardingConfiguration.create_for_low_bandwidth(mesh))
