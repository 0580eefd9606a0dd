"""How an optimizer spreads its work over a mesh: one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, Unpack

from mpishard.arguments import flag, integer, number
from mpishard.comm.mesh import Mesh
from mpishard.compression import Int8Compressor, PieceCompressor, PowerSGDCompressor
from mpishard.data_parallel.gradient_traffic import Traffic, gradient_traffic
from mpishard.parameters.flat import FlatParameters
from mpishard.reduction.hierarchical import nodes_of_data

NONFINITE = ("raise", "skip", "ignore")


class ConfigurationOptions(TypedDict, total=False):
    """Settings of a `ShardingConfiguration` by name, for those who hand them on."""

    auto_sync_gradients: bool
    minimum_parameter_group_size: int
    overlap_communication: bool
    max_gradient_norm: float | None
    nonfinite_gradients: Literal["raise", "skip", "ignore"]
    loss_scale: float | Literal["dynamic"] | None
    reproducible: bool
    enable_gradient_compression: bool
    gradient_compressor: PieceCompressor | PowerSGDCompressor | None
    compress_after: int
    hierarchical: bool | int
    sync_every: int


@dataclass(frozen=True)
class ShardingConfiguration:
    """Settings of a distributed optimizer or model.

    Parameters
    ----------
    mesh : Mesh
        Where it runs; gradients are reduced over ``mesh.data``, after the copies of a parameter on other axes.
    auto_sync_gradients : bool
        True: every `step` reduces gradients and updates.  False: `step` only adds this rank's gradient to what is
        there, with no communication, until `synchronize_optimizer_state` (or a model's `synchronize_gradients`).
    minimum_parameter_group_size : int
        Least number of elements in a communication bucket: consecutive tensors travel together until there are that
        many.  Large buckets cost fewer messages, small ones can travel earlier.
    overlap_communication : bool
        Reduce a bucket while the backward pass still computes the next ones.  Both settings give the same bits.
    max_gradient_norm : float, optional
        Scale the averaged gradient down to this global 2-norm where it is larger.
    nonfinite_gradients : {"raise", "skip", "ignore"}
        What all ranks do if a gradient is NaN or infinite on any of them, or in `optimize` a loss: raise
        FloatingPointError that names tensor or samples and rank, leave parameters and state as they are and count the
        step as skipped, or go on.
    loss_scale : float or "dynamic", optional
        Gradients arrive multiplied by this, so that small ones survive half precision: models multiply the gradient of
        their loss by ``parameters.loss_scale``, whose effect the optimizer divides out.  "dynamic": 2**16 at first;
        where a gradient overflows on any rank all skip the step and it halves, after 2000 steps without it doubles.
        What overflows at 1 still is treated as `nonfinite_gradients` says.
    reproducible : bool
        Sum gradients over the data axis along a fixed binary tree over the step's micro-batches, which are the same on
        any number of ranks.  A run of `optimize` then gives the same bits, parameters and losses, on any number of data
        ranks, under DDP and ZeRO-1 to 3 and with any MPI, if its function does so for one micro-batch.  For that, BLAS
        gets one thread a rank unless the environment says otherwise, and a problem without ``micro_batch_size`` has 16
        micro-batches.  In a loop of one's own, `step` takes each rank's gradient as one micro-batch: the same bits on
        the same number of ranks, with any MPI.  Sums inside a data coordinate, over tensor ranks and over the stages of
        a tie, stay the MPI's own: the same bits on the same tensor and pipeline sizes where it adds alike, as it must
        with two ranks.  What a model makes of one micro-batch, as a pipeline does, adds up as it comes.
    enable_gradient_compression : bool
        Send gradients over the data axis compressed, with error feedback: DDP, ZeRO-1 and ZeRO-2.  What is left over is
        state: a save or a resize hands it to the ranks that own it, uncompressed, and so takes the time of about half a
        step without compression.  A death in an elastic run may lose it.
    gradient_compressor : PieceCompressor or PowerSGDCompressor, optional
        What compresses them, of `mpishard.compression`; given, it is used.  Default: `Int8Compressor`.
    compress_after : int
        Updates that send gradients as they are before compression begins.  Rules that divide by the size of gradients
        need them: what a compressor sends is rare and large, or the same for all of a block, until it has sent enough.
        Not for `LocalSGDOptimizer`, where compression comes after the rule.
    hierarchical : bool or int
        Sum by nodes, so that gradients cross the network once a node, compressed only there: DDP and Local SGD, where
        all nodes have equally many data ranks, and more than one.  A number: so many neighbours on the data axis count
        as a node, such as those on one socket.  `PowerSGDCompressor` sums what little there is over all ranks at once.
    sync_every : int
        Steps between two averages of `LocalSGDOptimizer`, unless it is given another number; above 1, `as_distributed`
        makes that of a rule.
    """

    mesh: Mesh
    auto_sync_gradients: bool = field(default=True, kw_only=True)
    minimum_parameter_group_size: int = field(default=1024, kw_only=True)
    overlap_communication: bool = field(default=True, kw_only=True)
    max_gradient_norm: float | None = field(default=None, kw_only=True)
    nonfinite_gradients: Literal["raise", "skip", "ignore"] = field(default="raise", kw_only=True)
    loss_scale: float | Literal["dynamic"] | None = field(default=None, kw_only=True)
    reproducible: bool = field(default=False, kw_only=True)
    enable_gradient_compression: bool = field(default=False, kw_only=True)
    gradient_compressor: PieceCompressor | PowerSGDCompressor | None = field(default=None, kw_only=True)
    compress_after: int = field(default=0, kw_only=True)
    hierarchical: bool | int = field(default=False, kw_only=True)
    sync_every: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise TypeError(f"a ShardingConfiguration needs a Mesh, got {type(self.mesh).__name__}")
        for name in ("auto_sync_gradients", "overlap_communication", "reproducible", "enable_gradient_compression"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        for name, least in (("minimum_parameter_group_size", 1), ("sync_every", 1), ("compress_after", 0)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=least))
        norm = self.max_gradient_norm
        if norm is not None:  # an infinite one measures the norm and leaves gradients as they are
            norm = number("max_gradient_norm", norm, above=0, finite=False, otherwise="None for no clipping")
            object.__setattr__(self, "max_gradient_norm", norm)
        if self.nonfinite_gradients not in NONFINITE:
            raise ValueError(f"nonfinite_gradients={self.nonfinite_gradients!r} must be one of {', '.join(NONFINITE)}")
        if self.reproducible and not self.auto_sync_gradients:
            raise ValueError(
                "reproducible=True orders the sum over the micro-batches of each step, auto_sync_gradients=False adds "
                "them up as they come; use one of the two"
            )
        if self.reproducible and self.compressor is not None:
            raise ValueError(
                "reproducible=True gives the same bits on any number of ranks, and what compression leaves out depends "
                "on that number; use one of the two"
            )
        if not (self.compressor is None or isinstance(self.compressor, PieceCompressor | PowerSGDCompressor)):
            raise TypeError(
                f"gradient_compressor={self.gradient_compressor!r} must be one of mpishard.compression, such as "
                "Int8Compressor()"
            )
        if self.compress_after and self.compressor is None:
            raise ValueError(
                f"compress_after={self.compress_after} without anything that compresses; give gradient_compressor, or "
                "enable_gradient_compression=True"
            )
        nodes = self.hierarchical
        if not isinstance(nodes, bool) and not (isinstance(nodes, int) and nodes > 1):
            raise ValueError(f"hierarchical={nodes!r} must be True, False, or a number of ranks above 1")
        if self.reproducible and nodes:
            raise ValueError(
                "reproducible=True sums in one order, whatever the nodes are, hierarchical=True by nodes; use one of "
                "the two"
            )
        scale = self.loss_scale
        if scale is not None and scale != "dynamic":
            scale = number("loss_scale", scale, above=0, otherwise='"dynamic", or None for no scaling')
            object.__setattr__(self, "loss_scale", scale)
        if scale == "dynamic" and self.nonfinite_gradients == "ignore":
            raise ValueError(
                'loss_scale="dynamic" looks for gradients that overflow, nonfinite_gradients="ignore" lets them pass; '
                'use "raise" or "skip"'
            )

    @property
    def compressor(self) -> PieceCompressor | PowerSGDCompressor | None:
        """What makes gradients smaller on their way, if anything does."""
        if self.gradient_compressor is not None:
            return self.gradient_compressor
        return Int8Compressor() if self.enable_gradient_compression else None

    def describe(self, parameters: FlatParameters | int | None = None) -> str:
        """What will happen with gradients, in words.  Not collective.

        Parameters
        ----------
        parameters : FlatParameters or int, optional
            Of a model, or how many float32 values there are: then also how many bytes a step will cost this rank.
        """
        return "\n".join([*_in_words(self), *_costs(self, parameters)])

    def gradient_traffic(self, parameters: FlatParameters | int) -> Traffic:
        """What one sum of the gradients of these parameters sends under DDP.  Not collective.

        Parameters
        ----------
        parameters : FlatParameters or int
            Of a model, or how many float32 values there are.
        """
        return gradient_traffic(
            parameters,
            self.mesh,
            self.minimum_parameter_group_size,
            compressor=self.compressor,
            hierarchical=self.hierarchical,
        )

    def settings(self) -> dict[str, Any]:
        """All but the mesh, as plain values."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "mesh"}
        compressor = self.gradient_compressor
        return plain | {"gradient_compressor": None if compressor is None else repr(compressor)}

    @classmethod
    def create_for_high_bandwidth(cls, mesh: Mesh, **options: Unpack[ConfigurationOptions]) -> ShardingConfiguration:
        """For shared memory and fast interconnects.

        Gradients are summed every step as they are, in buckets of 2**18 elements, while the backward pass still runs.
        """
        return replace(cls(mesh, minimum_parameter_group_size=2**18), **options)

    @classmethod
    def create_for_low_bandwidth(cls, mesh: Mesh, **options: Unpack[ConfigurationOptions]) -> ShardingConfiguration:
        """For networks that are slower than the model, such as Ethernet, where each message costs.

        Few messages, in buckets of 2**23 elements after the backward pass; compressed to 8 bits, between nodes only
        where these have equally many data ranks; and for `LocalSGDOptimizer`, which `as_distributed` makes of a rule
        with this, every 8 steps.
        """
        preset = cls(
            mesh,
            minimum_parameter_group_size=2**23,
            overlap_communication=False,
            enable_gradient_compression=True,
            hierarchical=True,
            sync_every=8,
        )
        return replace(preset, **options)

    @classmethod
    def of(cls, mesh_or_config: Mesh | ShardingConfiguration) -> ShardingConfiguration:
        """A configuration as it is, or the default one of a mesh."""
        if isinstance(mesh_or_config, ShardingConfiguration):
            return mesh_or_config
        if isinstance(mesh_or_config, Mesh):
            return cls(mesh_or_config)
        raise TypeError(f"expected a Mesh or a ShardingConfiguration, got {type(mesh_or_config).__name__}")


def _in_words(config: ShardingConfiguration) -> list[str]:
    """What happens with gradients."""
    axis, compressor = config.mesh.data, config.compressor
    if axis.size == 1:
        return ["One data rank: gradients are not sent."]
    when = "while the backward pass still runs" if config.overlap_communication else "after the backward pass"
    told = [
        f"{axis.size} data ranks sum gradients in buckets of {config.minimum_parameter_group_size:,} elements or more, "
        f"{when}."
    ]
    if not config.auto_sync_gradients:
        told.append("Steps only add up gradients until synchronize_optimizer_state().")
    if config.reproducible:
        told.append("The sum is taken in an order that does not depend on the number of ranks.")
    nodes = nodes_of_data(config.mesh, config.hierarchical)
    if any(nodes) and not isinstance(compressor, PowerSGDCompressor):
        told.append(f"DDP and Local SGD sum by nodes: within each of the {max(nodes) + 1}, then between them.")
    elif config.hierarchical is not False:
        told.append("They are summed over all ranks at once" + _why_not_by_nodes(config) + ".")
    if compressor is not None:
        where = " between nodes" if any(nodes) and isinstance(compressor, PieceCompressor) else ""
        told.append(f"What travels{where} is compressed by {compressor}; what that leaves out goes into later steps.")
    if config.sync_every > 1:
        told.append(
            f"LocalSGDOptimizer, which as_distributed() makes of a rule, takes {config.sync_every} steps on each rank, "
            "or node, and then averages the parameters in this way."
        )
    return told


def _why_not_by_nodes(config: ShardingConfiguration) -> str:
    if isinstance(config.compressor, PowerSGDCompressor):
        return ", since there is little of them"
    return ": they are not on several nodes with equally many, and more than one, on each"


def _costs(config: ShardingConfiguration, parameters: FlatParameters | int | None) -> list[str]:
    """What a step sends, where that is known: the sums of a reproducible one depend on its micro-batches."""
    if parameters is None or config.reproducible or config.mesh.data.size == 1:
        return []
    without = gradient_traffic(parameters, config.mesh, config.minimum_parameter_group_size)
    traffic = config.gradient_traffic(parameters)
    size = parameters.size if isinstance(parameters, FlatParameters) else int(parameters)
    text = f"For {size:,} parameters this rank sends {traffic.sent:,} bytes a sum"
    if traffic.between_nodes:
        text += f", {traffic.between_nodes:,} of them to other nodes"
    if traffic != without:
        text += f"; without compression and nodes it would send {without.sent:,}"
    told = [f"{text}."]
    if config.sync_every > 1:
        sent, where = (traffic.between_nodes, " to other nodes") if traffic.between_nodes else (traffic.sent, "")
        told.append(f"LocalSGDOptimizer sends {sent / config.sync_every:,.0f} bytes a step{where}.")
    return told
