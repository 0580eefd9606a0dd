"""What a configuration does with gradients, in words, and how many bytes a step sends for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpishard.comm.ledger import all_reduce_elements, ring_elements
from mpishard.compression import PieceCompressor, PowerSGDCompressor
from mpishard.data_parallel.bucket_plan import bucket_layout
from mpishard.layout.boxes import counts, split
from mpishard.layout.local_layout import WHOLE, LocalLayout
from mpishard.layout.specs import ParameterSpec
from mpishard.parameters.buckets import Bucket, make_buckets
from mpishard.parameters.flat import FlatParameters
from mpishard.reduction.hierarchical import nodes_of_data

if TYPE_CHECKING:
    from mpishard.data_parallel.configuration import ShardingConfiguration


class Traffic(NamedTuple):
    """Bytes that a rank sends over the data axis for one sum of all gradients, by the ring count of the ledger.

    Attributes
    ----------
    sent : int
    between_nodes : int
        Those of them that sums by nodes send to other nodes; 0 where sums do not go by nodes.
    """

    sent: int
    between_nodes: int


def gradient_traffic(config: ShardingConfiguration, parameters: FlatParameters | int) -> Traffic:
    """What one sum of the gradients of these parameters sends under DDP.  Not collective.

    Parameters
    ----------
    parameters : FlatParameters or int
        Or the number of elements of a flat float32 array.
    """
    if isinstance(parameters, FlatParameters):
        pieces, dtype = parameters.pieces, parameters.dtype
        buckets = _buckets(config, parameters)
    else:
        pieces, dtype = WHOLE.holding([ParameterSpec("parameters", (int(parameters),))]), np.dtype(np.float32)
        buckets = make_buckets(pieces, config.minimum_parameter_group_size)
    found = [_of_bucket(config, bucket, pieces[bucket.first : bucket.last], dtype) for bucket in buckets]
    return Traffic(sum(each.sent for each in found), sum(each.between_nodes for each in found))


def _buckets(config: ShardingConfiguration, parameters: FlatParameters) -> Sequence[Bucket]:
    runs, sizes = bucket_layout(config, parameters)
    return make_buckets(parameters.pieces, config.minimum_parameter_group_size, runs, sizes)


def _of_bucket(config: ShardingConfiguration, bucket: Bucket, pieces: LocalLayout, dtype: np.dtype) -> Traffic:
    axis, compressor = config.mesh.data, config.compressor
    if isinstance(compressor, PowerSGDCompressor):
        first = sum(compressor.first_elements(piece.shape) for piece in pieces)
        rest = sum(compressor.elements(piece.shape) for piece in pieces) - first
        elements = sum(all_reduce_elements(count, axis.size, axis.rank) for count in (first, rest))
        return Traffic(elements * dtype.itemsize, 0)
    nodes = nodes_of_data(config.mesh, config.hierarchical)
    if not any(nodes):
        return Traffic(_sum_bytes(bucket.size, axis.size, axis.rank, compressor, dtype), 0)
    ranks, number = nodes.count(0), max(nodes) + 1
    place = nodes[: axis.rank].count(nodes[axis.rank])
    parts = counts(split(bucket.size, ranks))
    within = sum(ring_elements(op, parts, place) for op in ("reduce_scatter", "all_gather")) * dtype.itemsize
    across = _sum_bytes(parts[place], number, nodes[axis.rank], compressor, dtype)
    return Traffic(within + across, across)


def _sum_bytes(size: int, ranks: int, rank: int, compressor: PieceCompressor | None, dtype: np.dtype) -> int:
    """Bytes that a rank sends for a sum of so many elements that all ranks get."""
    if compressor is None:
        return all_reduce_elements(size, ranks, rank) * dtype.itemsize
    sizes = [compressor.nbytes(count, dtype) for count in counts(split(size, ranks))]
    return sum(ring_elements(op, sizes, rank) for op in ("all_to_all", "all_gather"))


def describe(config: ShardingConfiguration, parameters: FlatParameters | int | None = None) -> str:
    """The text of `ShardingConfiguration.describe`."""
    axis, compressor = config.mesh.data, config.compressor
    if axis.size == 1:
        return "One data rank: gradients are not sent."
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
    if parameters is not None and not config.reproducible:  # that depends on the micro-batches
        told += _costs(config, parameters)
    return "\n".join(told)


def _why_not_by_nodes(config: ShardingConfiguration) -> str:
    if isinstance(config.compressor, PowerSGDCompressor):
        return ", since there is little of them"
    return ": they are not on several nodes with equally many, and more than one, on each"


def _costs(config: ShardingConfiguration, parameters: FlatParameters | int) -> list[str]:
    plain = replace(
        config, gradient_compressor=None, enable_gradient_compression=False, compress_after=0, hierarchical=False
    )
    without, traffic = gradient_traffic(plain, parameters), gradient_traffic(config, parameters)
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
