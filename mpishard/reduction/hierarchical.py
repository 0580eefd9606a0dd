"""Hierarchical sums: within each node, then between the nodes, where the network is slow.

Reduce-scatter within each node, sum of each piece between the nodes, all-gather within each node.  Every byte of a
gradient crosses the network once per node, and not once per rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.channel import ChainedRequest, Request
from mpishard.comm.mesh import Mesh
from mpishard.compression import Compressor
from mpishard.layout.boxes import run_lengths, run_of, split
from mpishard.parameters.buckets import Bucket
from mpishard.reduction.compressed import CompressedSums, CompressedSumsMaker

Array = Any


class NodeAxes(NamedTuple):
    """The data axis by nodes: the ranks of this node, and the ranks with the same number on each node."""

    within: Axis
    across: Axis


def nodes_of_data(mesh: Mesh, hierarchical: bool | int) -> list[int]:
    """The number of the node of each rank of the data axis; all 0 where sums are not hierarchical.

    `hierarchical` is the setting of `ShardingConfiguration`. True: a node is the ranks that share memory; a number: so
    many neighbours on the data axis; False: all ranks. Sums are hierarchical if all data axes of the mesh are cut
    equally into several nodes, each with the same number of ranks, and more than one. All ranks compute the same.
    """
    size, tensor = mesh.data.size, mesh.tensor.size
    if hierarchical is True:
        first = [stage * size * tensor + part for stage in range(mesh.pipeline.size) for part in range(tensor)]
        found = {_numbered(mesh.nodes[rank : rank + size * tensor : tensor]) for rank in first}
    else:
        found = {_numbered([rank // hierarchical if hierarchical else 0 for rank in range(size)])}
    nodes = min(found)
    sizes = Counter(nodes)
    even = len(found) == 1 and len(set(sizes.values())) == 1 and 1 < len(sizes) < size
    return list(nodes) if even else [0] * size


def _numbered(names: Sequence[int]) -> tuple[int, ...]:
    """Replace names by numbers, in the order in which the names first appear."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def node_axes(mesh: Mesh, hierarchical: bool | int) -> NodeAxes | None:
    """Split the data axis by `nodes_of_data`; None if there is only one node. Collective over the axis."""
    axis, nodes = mesh.data, nodes_of_data(mesh, hierarchical)
    if not any(nodes):
        return None
    number = nodes[: axis.rank].count(nodes[axis.rank])
    within = axis.split(f"data within node ({hierarchical})", nodes[axis.rank])
    return NodeAxes(within, axis.split(f"data across nodes ({hierarchical})", number))


class HierarchicalSums:
    """Adds up the gradients of one model over the data axis, by nodes. Creation is not collective.

    A `compressor`, one of those that can (`Compressor.by_nodes`), is for the messages between nodes.
    """

    def __init__(
        self, axes: NodeAxes, buckets: Sequence[Bucket], like: Array, compressor: Compressor | None, scale: float
    ) -> None:
        self.within: Axis = axes.within  # the ranks of this node
        self._across = axes.across  # the ranks with the same number on each node
        # By bucket and rank of this node, the elements of the rank's piece of the bucket.
        self._within_counts = {bucket.index: run_lengths(split(bucket.size, axes.within.size)) for bucket in buckets}
        # This rank's pieces as buckets of an array that holds them end to end.
        self._inner: dict[int, Bucket] = {}
        # The ranges of the flat gradient to which ``compressed.owned`` belongs, end to end.
        self.owned: list[tuple[int, int]] = []
        across_counts, offset = [], 0
        for bucket in buckets:
            pieces = self._within_counts[bucket.index]
            first, size = bucket.start + sum(pieces[: axes.within.rank]), pieces[axes.within.rank]
            self._inner[bucket.index] = replace(bucket, start=offset, stop=offset + size)
            counts = run_lengths(split(size, axes.across.size))
            start = first + sum(counts[: axes.across.rank])
            self.owned.append((start, start + counts[axes.across.rank]))
            across_counts.append(counts)
            offset += size
        # By bucket and node, the elements of this rank's piece that the rank of the node owns.
        self._across_counts = dict(zip(self._within_counts, across_counts, strict=True))
        self.compressed: CompressedSums | None = None  # the sums between nodes, if they are compressed
        if compressor is not None:
            inner = list(self._inner.values())
            maker = CompressedSumsMaker(axes.across, inner, across_counts, like, scale)
            self.compressed = compressor.make_sums(maker)

    def start(self, bucket: Bucket, gradient: Array) -> Request:
        """Start to sum a bucket over the ranks of this node; `finish` does the rest. Collective over these ranks.

        The content of `gradient` is undefined afterwards; the result's `wait` returns this rank's piece of the sum.
        """
        pieces = self._within_counts[bucket.index]
        own = arrays.empty(pieces[self.within.rank], gradient.dtype, like=gradient)
        return self.within.start_reduce_scatter(gradient, own, counts=pieces, label="gradients")

    def start_shared(self, bucket: Bucket, values: Array) -> Request | ChainedRequest:
        """Start to sum a bucket between the nodes; then `finish` it. Collective over the axis.

        All ranks of a node have the same `values`, which are not changed; the result's `wait` returns this rank's
        piece.
        """
        piece = values[run_of(self._within_counts[bucket.index], self.within.rank)].copy()
        if self.compressed is None:
            return self._sum_across(bucket, values, piece)
        pending = self._compressed_across(bucket, values, piece)

        def finish() -> Array:
            pending.wait()
            return piece

        return ChainedRequest(pending, finish)

    def finish(self, arrived: Sequence[tuple[Bucket, Array, Array]], *, shared: bool = False) -> None:
        """Fill gradients with their sums over all ranks. Collective.

        Each of `arrived` is a bucket, its gradient, and the result of `start`, or with `shared` of `start_shared`.
        """
        compresses = self.compressed is not None and self.compressed.in_use
        steps: list[Callable[[Bucket, Array, Array], Request | ChainedRequest]] = []
        if not shared:
            steps.append(self._compressed_across if compresses else self._sum_across)
        if compresses:
            steps.append(self._gather_across)
        for start in (*steps, self._gather_within):
            for pending in [start(*each) for each in arrived]:
                pending.wait()

    def reset(self) -> None:
        """Begin a new step."""
        if self.compressed is not None:
            self.compressed.reset()

    def keep_bucket(self, bucket: Bucket) -> None:
        if self.compressed is not None:
            self.compressed.keep_bucket(self._inner[bucket.index])

    def _sum_across(self, bucket: Bucket, gradient: Array, piece: Array) -> Request:
        return self._across.start_all_reduce(piece, label="gradients")

    def _compressed_across(self, bucket: Bucket, gradient: Array, piece: Array) -> ChainedRequest:
        assert self.compressed is not None
        own = run_of(self._across_counts[bucket.index], self._across.rank)
        return self.compressed.start(self._inner[bucket.index], piece, piece[own])

    def _gather_across(self, bucket: Bucket, gradient: Array, piece: Array) -> ChainedRequest:
        assert self.compressed is not None
        return self.compressed.start_gather(self._inner[bucket.index], piece)

    def _gather_within(self, bucket: Bucket, gradient: Array, piece: Array) -> Request:
        counts = self._within_counts[bucket.index]
        return self.within.start_all_gather(gradient, piece, counts=counts, label="gradients")
