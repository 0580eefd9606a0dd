"""The settings by which an optimizer spreads its work over a mesh: one frozen value.

What follows from them for a model: how many bytes the sum of its gradients sends, and where its buckets are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np

from mpishard.arguments import flag, integer, kind_of, number, shown
from mpishard.comm.agreement import opening
from mpishard.comm.axis import Axis
from mpishard.comm.ledger import all_reduce_elements, ring_elements
from mpishard.comm.mesh import Mesh, checked_mesh
from mpishard.compression import Compressor, Int8Compressor
from mpishard.compression.compressor import Collective
from mpishard.layout.boxes import run_lengths, split
from mpishard.layout.tensors import WHOLE, LocalLayout, ParameterSpec
from mpishard.parameters.buckets import Bucket, TensorRun, make_buckets
from mpishard.parameters.flat import FlatParameters
from mpishard.reduction.hierarchical import nodes_of_data

NONFINITE = ("raise", "skip", "ignore")
SHARDING = "sharding.json"  # the fact of a state that has `ShardingConfiguration.settings`
_FLAGS = (
    "auto_sync_gradients",
    "overlap_communication",
    "reproducible",
    "allow_different_bits",
    "enable_gradient_compression",
)


class ConfigurationOptions(TypedDict, total=False):
    """Settings of a `ShardingConfiguration` by name, for functions that pass them on."""

    auto_sync_gradients: bool
    minimum_parameter_group_size: int
    overlap_communication: bool
    max_gradient_norm: float | None
    max_gradient_value: float | None
    nonfinite_gradients: Literal["raise", "skip", "ignore"]
    loss_scale: float | Literal["dynamic"] | None
    reproducible: bool
    allow_different_bits: bool
    enable_gradient_compression: bool
    gradient_compressor: Compressor | None
    compress_after: int
    hierarchical: bool | int
    sync_every: int


@dataclass(frozen=True)
class ShardingConfiguration:
    """Settings of a distributed optimizer or model.

    A frozen value.  Creation is collective over the mesh, also by ``dataclasses.replace``.

    Parameters
    ----------
    mesh : Mesh
        The mesh of the run.  Gradients are reduced over copies of a parameter on other axes, then over ``mesh.data``.
    auto_sync_gradients : bool
        True: every `step` reduces gradients and updates.  False: gradient accumulation; `step` only adds this rank's
        gradient to the earlier ones, with no communication, until `synchronize_optimizer_state` (or a model's
        `synchronize_gradients`).
    minimum_parameter_group_size : int
        Minimum number of elements in a gradient bucket (the ``bucket_cap_mb`` of PyTorch's DDP, in elements);
        consecutive tensors form a bucket once they have as many.  Large buckets need fewer messages, small buckets can
        be sent earlier.
    overlap_communication : bool
        Reduce a bucket while the backward pass still computes the next ones.  Both settings give the same bits.
    max_gradient_norm : float, optional
        Scale the averaged gradient down to this global 2-norm where it is larger.  Infinity measures the norm, and
        scales nothing.
    max_gradient_value : float, optional
        Cut every element of the averaged gradient to at most this, and at least minus this.  Not together with
        `max_gradient_norm`.
    nonfinite_gradients : {"raise", "skip", "ignore"}
        What all ranks do if a gradient is NaN or infinite on any rank, or in `optimize` a loss.  "raise": raise
        FloatingPointError with the tensor or samples, and the rank.  "skip": leave parameters and state unchanged and
        count the step as skipped.  "ignore": take the step.
    loss_scale : float or "dynamic", optional
        Factor on the gradients, so that small ones survive half precision.  Models multiply the gradient of their loss
        by ``parameters.loss_scale``, and the optimizer divides by it.  "dynamic": starts at 2**16; if a gradient
        overflows on any rank, all ranks skip the step and the factor halves; after 2000 steps without an overflow it
        doubles.  `nonfinite_gradients` decides about overflows at a factor of 1.
    reproducible : bool
        A run of `optimize` gives the same bits, in parameters and losses, on any layout whose tensor size divides the
        model's `shards`, with any MPI: gradients are summed along a fixed binary tree over the step's micro-batches,
        which do not depend on the ranks.  The function must give the same bits for one micro-batch.  For that, BLAS
        gets one thread per rank unless the environment says otherwise, and a problem without ``micro_batch_size`` has
        16 micro-batches.  A pipeline runs the micro-batches of its data rank; a model of your own takes them together
        if it has `losses_and_gradient` (`mpishard.parameters.flat.Model`), else one by one.  What a model makes of one
        micro-batch by itself is added as it comes.  In a training loop of your own, `step` counts each rank's gradient
        as one micro-batch, which gives the same bits on the same number of ranks.  With ``shards=1`` MPI does the sums
        over tensor ranks: they give the same bits for the same tensor size if that MPI always adds in one order, as it
        must with two ranks.
    allow_different_bits : bool
        Let a reproducible run continue where its bits depend on more than it: with ranks whose BLAS kernels differ,
        from a checkpoint made with other kernels, BLAS threads, libraries, shards or micro-batches, or with a model
        that rounds where stages meet.  A message says what differs, and later checkpoints keep it as the fact
        ``"different_bits.json"``.  Without it such a run raises ValueError on all ranks.
    enable_gradient_compression : bool
        Send gradients over the data axis compressed, with error feedback: DDP, ZeRO-1 and ZeRO-2.  The remaining
        errors are state.  A save or a resize sends them uncompressed to the ranks that own them, which takes about half
        the time of a step without compression.
    gradient_compressor : Compressor, optional
        A compressor of `mpishard.compression`; setting one enables compression.  Default: `Int8Compressor`.
    compress_after : int
        Number of updates that send uncompressed gradients before compression begins.  Rules that divide by the size of
        gradients need them: at first a compressor sends rare and large values, or one value for a whole block.  No
        effect on `LocalSGDOptimizer`, which compresses after the rule.
    hierarchical : bool or int
        Sum within nodes first, so that gradients cross the network once per node, and compress only between nodes.  For
        DDP and Local SGD, if all nodes have equally many data ranks, and more than one.  A number: groups of that many
        neighbours on the data axis, such as the ranks of one socket, count as nodes.  `PowerSGDCompressor` sums its
        small factors over all ranks at once.
    sync_every : int
        Steps between two averages of `LocalSGDOptimizer`, unless its own argument is given.  If above 1,
        `as_distributed` turns a rule into a `LocalSGDOptimizer`.

    Raises
    ------
    TypeError
        If `mesh` is no Mesh; on every rank, if on any a flag or number is of another type, or `gradient_compressor` is
        no compressor.
    ValueError
        On every rank, if on any a number is out of its range, `hierarchical` is neither a flag nor a whole number, two
        settings contradict each other, or settings differ between ranks.
    """

    mesh: Mesh
    auto_sync_gradients: bool = field(default=True, kw_only=True)
    minimum_parameter_group_size: int = field(default=1024, kw_only=True)
    overlap_communication: bool = field(default=True, kw_only=True)
    max_gradient_norm: float | None = field(default=None, kw_only=True)
    max_gradient_value: float | None = field(default=None, kw_only=True)
    nonfinite_gradients: Literal["raise", "skip", "ignore"] = field(default="raise", kw_only=True)
    loss_scale: float | Literal["dynamic"] | None = field(default=None, kw_only=True)
    reproducible: bool = field(default=False, kw_only=True)
    allow_different_bits: bool = field(default=False, kw_only=True)
    enable_gradient_compression: bool = field(default=False, kw_only=True)
    gradient_compressor: Compressor | None = field(default=None, kw_only=True)
    compress_after: int = field(default=0, kw_only=True)
    hierarchical: bool | int = field(default=False, kw_only=True)
    sync_every: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        with opening(checked_mesh(self.mesh).world, "ShardingConfiguration") as same:
            self._check()
            same |= self.settings()

    def _check(self) -> None:
        for name in _FLAGS:
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        for name, least in (("minimum_parameter_group_size", 1), ("sync_every", 1), ("compress_after", 0)):
            object.__setattr__(self, name, integer(name, getattr(self, name), least=least))
        norm = self.max_gradient_norm
        if norm is not None:  # an infinite one measures the norm and leaves gradients as they are
            norm = number("max_gradient_norm", norm, above=0, finite=False, otherwise="None for no clipping")
            object.__setattr__(self, "max_gradient_norm", norm)
        value = self.max_gradient_value
        if value is not None:
            if norm is not None:
                raise ValueError(
                    f"max_gradient_norm={norm:g} clips by the norm of the gradient, max_gradient_value={value} by its "
                    "elements; use one of the two"
                )
            value = number("max_gradient_value", value, above=0, otherwise="None for no clipping")
            object.__setattr__(self, "max_gradient_value", value)
        if self.nonfinite_gradients not in NONFINITE:
            raise ValueError(f"nonfinite_gradients={self.nonfinite_gradients!r} must be one of {', '.join(NONFINITE)}")
        if self.allow_different_bits and not self.reproducible:
            raise ValueError(
                "allow_different_bits=True without reproducible=True, which alone promises the same bits; leave it out"
            )
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
        if not (self.compressor is None or isinstance(self.compressor, Compressor)):
            raise TypeError(
                f"gradient_compressor={self.gradient_compressor!r} must be one of mpishard.compression, such as "
                "Int8Compressor()"
            )
        if self.compress_after and self.compressor is None:
            raise ValueError(
                f"compress_after={self.compress_after} without anything that compresses; give gradient_compressor, or "
                "enable_gradient_compression=True"
            )
        nodes: Any = self.hierarchical
        if not isinstance(nodes, bool | np.bool) and not (isinstance(nodes, Integral) and int(nodes) > 1):
            raise ValueError(f"hierarchical={shown(nodes)} must be True, False, or a number of ranks above 1")
        nodes = bool(nodes) if isinstance(nodes, bool | np.bool) else int(nodes)
        object.__setattr__(self, "hierarchical", nodes)
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
    def compressor(self) -> Compressor | None:
        """The compressor of the gradients, or None without compression."""
        if self.gradient_compressor is not None:
            return self.gradient_compressor
        return Int8Compressor() if self.enable_gradient_compression else None

    def describe(self, parameters: FlatParameters | int | None = None) -> str:
        """The way gradients will be summed and sent, in words.

        Parameters
        ----------
        parameters : FlatParameters or int, optional
            The parameters of a model, or a number of float32 values.  With it, the text includes the bytes that a step
            sends from this rank.

        Returns
        -------
        str
            Some lines; the mesh decides about nodes and the number of ranks.
        """
        return "\n".join([*_in_words(self), *_costs(self, parameters)])

    def gradient_traffic(self, parameters: FlatParameters | int) -> Traffic:
        """Bytes that this rank sends for one sum of the gradients of these parameters under DDP.

        Parameters
        ----------
        parameters : FlatParameters or int
            The parameters of a model, or a number of float32 values.

        Returns
        -------
        Traffic
            Bytes sent by this rank, `sent`, and of these the bytes `between_nodes`.
        """
        return gradient_traffic(
            parameters,
            self.mesh,
            self.minimum_parameter_group_size,
            compressor=self.compressor,
            hierarchical=self.hierarchical,
        )

    def settings(self) -> dict[str, Any]:
        """All settings except the mesh, as plain values.

        Returns
        -------
        dict
            By name; a compressor by its repr.
        """
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "mesh"}
        compressor = self.gradient_compressor
        return plain | {"gradient_compressor": None if compressor is None else repr(compressor)}

    @classmethod
    def create_for_high_bandwidth(cls, mesh: Mesh, **options: Unpack[ConfigurationOptions]) -> ShardingConfiguration:
        """The preset for shared memory and fast interconnects.

        Gradients are summed every step, uncompressed, in buckets of 2**18 elements, while the backward pass still runs.

        Collective over the mesh.

        Parameters
        ----------
        mesh : Mesh
            The mesh of the run.
        **options : object
            Settings that differ from the preset.

        Returns
        -------
        ShardingConfiguration
            A new one.
        """
        preset: ConfigurationOptions = {"minimum_parameter_group_size": 2**18}
        return cls(mesh, **(preset | options))

    @classmethod
    def create_for_low_bandwidth(cls, mesh: Mesh, **options: Unpack[ConfigurationOptions]) -> ShardingConfiguration:
        """The preset for networks that are slower than the model, such as Ethernet, where each message is expensive.

        Gradients are sent in few messages, as buckets of 2**23 elements for which the backward pass waits, compressed
        to 8 bits.  If all nodes have equally many data ranks, only the sums between nodes are compressed.  With this
        preset `as_distributed` turns a rule into a `LocalSGDOptimizer` that averages every 8 steps.

        Collective over the mesh.

        Parameters
        ----------
        mesh : Mesh
            The mesh of the run.
        **options : object
            Settings that differ from the preset.

        Returns
        -------
        ShardingConfiguration
            A new one.
        """
        preset: ConfigurationOptions = {
            "minimum_parameter_group_size": 2**23,
            "overlap_communication": False,
            "enable_gradient_compression": True,
            "hierarchical": True,
            "sync_every": 8,
        }
        return cls(mesh, **(preset | options))

    @classmethod
    def of(cls, mesh_or_config: Mesh | ShardingConfiguration) -> ShardingConfiguration:
        """Return a configuration unchanged, or the default configuration of a mesh.

        Collective over the mesh.

        Parameters
        ----------
        mesh_or_config : Mesh or ShardingConfiguration
            What a user may give in place of a configuration.

        Returns
        -------
        ShardingConfiguration
            The argument, or a new one with all settings at their defaults.

        Raises
        ------
        TypeError
            If it is neither.
        ValueError
            On every rank, if settings differ between ranks.
        """
        with opening(mesh_of(mesh_or_config).world, "ShardingConfiguration") as same:
            config = cls(mesh_or_config) if isinstance(mesh_or_config, Mesh) else mesh_or_config
            same |= config.settings()
        return config


def mesh_of(mesh_or_config: Mesh | ShardingConfiguration) -> Mesh:
    """The mesh of a configuration, or the mesh itself. Raises TypeError if it is neither."""
    if isinstance(mesh_or_config, ShardingConfiguration):
        return mesh_or_config.mesh
    if isinstance(mesh_or_config, Mesh):
        return mesh_or_config
    raise TypeError(f"expected a Mesh or a ShardingConfiguration, got {kind_of(mesh_or_config)}")


# In words, for `ShardingConfiguration.describe`.


def _in_words(config: ShardingConfiguration) -> list[str]:
    """Sentences on how gradients are summed and sent."""
    axis, compressor = config.mesh.data, config.compressor
    if axis.size == 1:
        return ["One data rank: gradients are not sent."]
    when = "for each of which the backward pass waits"
    if config.overlap_communication:
        when = "while the backward pass still runs"
    sentences = [
        f"{axis.size} data ranks sum gradients in buckets of {config.minimum_parameter_group_size:,} elements or more, "
        f"{when}."
    ]
    if not config.auto_sync_gradients:
        sentences.append("Steps only add up gradients until synchronize_optimizer_state().")
    if config.reproducible:
        sentences.append("The sum is taken in an order that does not depend on the number of ranks.")
    nodes = nodes_of_data(config.mesh, config.hierarchical)
    if any(nodes) and (compressor is None or compressor.by_nodes):
        sentences.append(f"DDP and Local SGD sum by nodes: within each of the {max(nodes) + 1}, then between them.")
    elif config.hierarchical is not False:
        why = ": they are not on several nodes with equally many, and more than one, on each"
        if compressor is not None and not compressor.by_nodes:
            why = ", since there is little of them"
        sentences.append(f"They are summed over all ranks at once{why}.")
    if compressor is not None:
        where = " between nodes" if any(nodes) and compressor.by_nodes else ""
        sentences.append(
            f"What travels{where} is compressed by {compressor}; what that leaves out goes into later steps."
        )
    if config.sync_every > 1:
        sentences.append(
            f"LocalSGDOptimizer, which as_distributed() makes of a rule, takes {config.sync_every} steps on each rank, "
            "or node, and then averages the parameters in this way."
        )
    return sentences


def _costs(config: ShardingConfiguration, parameters: FlatParameters | int | None) -> list[str]:
    """Sentences on the bytes of a step; none for a reproducible one, whose bytes depend on its micro-batches."""
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
    sentences = [f"{text}."]
    if config.sync_every > 1:
        sent, where = (traffic.between_nodes, " to other nodes") if traffic.between_nodes else (traffic.sent, "")
        sentences.append(f"LocalSGDOptimizer sends {sent / config.sync_every:,.0f} bytes a step{where}.")
    return sentences


# How many bytes a rank sends for one sum of all gradients.


class Traffic(NamedTuple):
    """Bytes that a rank sends over the data axis for one sum of all gradients, by the ring count of the ledger."""

    sent: int
    between_nodes: int  # the part of `sent` that goes to other nodes in sums by nodes; else 0


def gradient_traffic(
    parameters: FlatParameters | int,
    mesh: Mesh,
    minimum: int,
    *,
    compressor: Compressor | None = None,
    hierarchical: bool | int = False,
) -> Traffic:
    """Bytes that this rank sends for one sum of the gradients of these parameters under DDP.

    `parameters` may be the number of elements of a flat float32 array; a bucket has at least `minimum` elements.
    """
    if isinstance(parameters, FlatParameters):
        pieces, dtype = parameters.pieces, parameters.dtype
        runs, sizes = bucket_layout(parameters, compressed=compressor is not None)
        buckets = make_buckets(pieces, minimum, runs, sizes)
    else:
        pieces, dtype = WHOLE.holding([ParameterSpec("parameters", (int(parameters),))]), np.dtype(np.float32)
        buckets = make_buckets(pieces, minimum)
    nodes = nodes_of_data(mesh, hierarchical)
    found = [
        _of_bucket(bucket, pieces[bucket.first : bucket.last], dtype, mesh.data, compressor, nodes)
        for bucket in buckets
    ]
    return Traffic(sum(each.sent for each in found), sum(each.between_nodes for each in found))


def _of_bucket(
    bucket: Bucket,
    pieces: LocalLayout,
    dtype: np.dtype,
    axis: Axis,
    compressor: Compressor | None,
    nodes: Sequence[int],
) -> Traffic:
    if not any(nodes) or (compressor is not None and not compressor.by_nodes):
        shapes = [piece.shape for piece in pieces]
        return Traffic(_sum_bytes(shapes, axis.size, axis.rank, compressor, dtype), 0)
    ranks, number = nodes.count(0), max(nodes) + 1
    local_rank = nodes[: axis.rank].count(nodes[axis.rank])
    parts = run_lengths(split(bucket.size, ranks))
    within = sum(ring_elements(op, parts, local_rank) for op in ("reduce_scatter", "all_gather")) * dtype.itemsize
    across = _sum_bytes([(parts[local_rank],)], number, nodes[axis.rank], compressor, dtype)
    return Traffic(within + across, across)


def _sum_bytes(
    shapes: Sequence[Sequence[int]], ranks: int, rank: int, compressor: Compressor | None, dtype: np.dtype
) -> int:
    """Bytes that a rank sends for a sum of tensors over `ranks` ranks, if all ranks get the result."""
    if compressor is None:
        collectives = [Collective("all_reduce", [sum(map(prod, shapes))], dtype.itemsize)]
    else:
        collectives = compressor.collectives(shapes, dtype, ranks)
    return sum(
        each.itemsize
        * (
            all_reduce_elements(each.counts[0], ranks, rank)
            if each.operation == "all_reduce"
            else ring_elements(each.operation, each.counts, rank)
        )
        for each in collectives
    )


# Where the buckets of a model are cut; used to sum gradients, and to count the bytes of such sums.


def bucket_layout(
    parameters: FlatParameters, *, compressed: bool, by_unit: bool = False, ties_apart: bool = False
) -> tuple[list[TensorRun], list[int]]:
    """Runs of tensors that no bucket may span, and the sizes of tensors that decide where buckets are cut.

    If gradients are `compressed`, on a mesh with tensor ranks either all tensors of a bucket are whole on every tensor
    rank, or none is. `by_unit` cuts buckets at the units of ``parameters.units``; `ties_apart` is as for
    `TensorLayout.gradient_runs`.
    """
    apart = compressed and parameters.place.tensor_size > 1
    # With an uneven cut, slices differ in size between tensor ranks.  Tensor ranks sum partial gradients bucket by
    # bucket and need the same cuts, so that all of them use the sizes of tensor rank 0.
    first = replace(parameters.place, tensor_rank=0).holding(parameters.specs)
    runs = parameters.layout.gradient_runs(by_unit=by_unit, copies_apart=apart, ties_apart=ties_apart)
    return runs, [piece.size for piece in first]
