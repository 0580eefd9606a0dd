"""How many bytes a rank sends for one sum of all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from mpishard.comm.axis import Axis
from mpishard.comm.ledger import all_reduce_elements, ring_elements
from mpishard.comm.mesh import Mesh
from mpishard.compression import Compressor
from mpishard.compression.compressor import Collective
from mpishard.data_parallel.bucket_plan import bucket_layout
from mpishard.layout.boxes import counts, split
from mpishard.layout.local_layout import WHOLE, LocalLayout
from mpishard.layout.specs import ParameterSpec
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.gradient_buckets import Bucket, make_buckets
from mpishard.reduction.hierarchical import nodes_of_data


class Traffic(NamedTuple):
    """Bytes that a rank sends over the data axis for one sum of all gradients, by the ring count of the ledger.

    Attributes
    ----------
    sent : int
    between_nodes : int
        The part of `sent` that goes to other nodes in sums by nodes; 0 without sums by nodes.
    """

    sent: int
    between_nodes: int


def gradient_traffic(
    parameters: FlatParameters | int,
    mesh: Mesh,
    minimum: int,
    *,
    compressor: Compressor | None = None,
    hierarchical: bool | int = False,
) -> Traffic:
    """Bytes that this rank sends for one sum of the gradients of these parameters under DDP.  Not collective.

    Parameters
    ----------
    parameters : FlatParameters or int
        The parameters of a model, or the number of elements of a flat float32 array.
    mesh : Mesh
    minimum : int
        Minimum number of elements in a bucket.
    compressor : Compressor, optional
        The compressor of the gradients.
    hierarchical : bool or int
        Whether to sum by nodes, as in a `ShardingConfiguration`.
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
    parts = counts(split(bucket.size, ranks))
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
