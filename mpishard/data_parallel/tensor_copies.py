"""Parameters with copies on several ranks: on the data axis, on the tensor axis, and as ties between stages."""

from __future__ import annotations

import hashlib
from typing import Any

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.layout.tensors import ParameterSpec, Piece
from mpishard.parameters.buckets import Bucket
from mpishard.parameters.flat import FlatParameters
from mpishard.reduction.ordered import OrderedSums

Array = Any


class TensorCopies:
    """Keeps the copies of tensors on several ranks equal: sums their gradients, and broadcasts their values.

    All methods and the constructor are collective over the mesh, unless a docstring says otherwise. `parameters` are
    laid out for this rank's tensor and pipeline rank.
    """

    def __init__(self, mesh: Mesh, parameters: FlatParameters) -> None:
        self._mesh = mesh
        self._parameters = parameters
        self._tensors: list[tuple[ParameterSpec, Piece]] = list(zip(parameters.local, parameters.pieces, strict=True))
        # By name of a tied tensor: the axis of the pipeline ranks that hold it, and the owner's rank on that axis.
        self._ties: dict[str, tuple[Axis, int]] = {}
        model_rank = mesh.place
        for spec in parameters.specs:
            holders = model_rank.holders(spec)
            if len(holders) > 1:
                axis = mesh.pipeline.subgroup(f"ties {'+'.join(map(str, holders))}", holders)
                if axis is not None:
                    self._ties[spec.name] = axis, holders.index(model_rank.runner(spec.stage))

    @property
    def inside(self) -> bool:
        """Return True if there are copies within one data coordinate: on the tensor axis, or as ties."""
        return bool(self._ties) or self._mesh.tensor.size > 1

    @property
    def sums(self) -> bool:
        """Return True if `sum` changes any gradient; not collective, and the same on all ranks of the tensor axis."""
        partial = self._mesh.tensor.size > 1 and any(spec.partial for spec, _ in self._tensors)
        return bool(self._ties) or partial

    # -- gradients --------------------------------------------------------------------------------------------------

    def sum(self, bucket: Bucket, gradient: Array) -> None:
        """Sum a bucket's gradient in place: partial gradients over the tensor axis, then ties over their stages."""
        if self._mesh.tensor.size > 1:
            self._sum_partial(bucket, gradient)
        if bucket.tied:
            name = self._tensors[bucket.first][1].name
            if name in self._ties:
                self._ties[name][0].all_reduce(gradient, label="gradients")

    def sum_tie(self, name: str, gradient: Array) -> None:
        """Sum the gradient of a tied tensor, or a part of it, over its stages in place, in the order of the stages."""
        if name not in self._ties:
            return
        axis = self._ties[name][0]
        if axis.size == 2:  # one order only
            axis.all_reduce(gradient, label="gradients")
        else:
            OrderedSums(axis, gradient).all_reduce(gradient)

    def _sum_partial(self, bucket: Bucket, gradient: Array) -> None:
        runs: list[tuple[int, int]] = []
        for spec, piece in self._tensors[bucket.first : bucket.last]:
            start = piece.start - bucket.start
            if not spec.partial:
                continue
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, piece.start - bucket.start + piece.size))
        if len(runs) == 1:
            ((start, stop),) = runs
            self._mesh.tensor.all_reduce(gradient[start:stop], label="gradients")
        elif runs:
            packed = arrays.empty(sum(stop - start for start, stop in runs), gradient.dtype, like=gradient)
            offset = 0
            for start, stop in runs:
                packed[offset : offset + stop - start] = gradient[start:stop]
                offset += stop - start
            self._mesh.tensor.all_reduce(packed, label="gradients")
            offset = 0
            for start, stop in runs:
                gradient[start:stop] = packed[offset : offset + stop - start]
                offset += stop - start

    def zero_duplicates(self, flat: Array) -> None:
        """Turn a gradient that is already summed into terms of a sum: zero all copies but one; not collective."""
        if self._mesh.data.rank:
            flat[...] = 0
        for spec, piece in self._tensors:
            tied = bool(spec.copies) and not self._mesh.place.runs(spec.stage)
            if tied or (spec.partial and self._mesh.tensor.rank):
                flat[piece.start : piece.start + piece.size] = 0

    # -- values -----------------------------------------------------------------------------------------------------

    def spread(self) -> None:
        """Set all copies of the parameters to those of data rank 0, tensor rank 0 and the owners of ties."""
        parameters = self._parameters
        if parameters.sharded is None:
            self._mesh.data.broadcast(parameters.flat, label="parameters")
            self.spread_inside(parameters.flat)
        elif self.inside:
            parameters.sharded.rewrite(self.spread_inside)

    def spread_inside(self, flat: Array, first: int = 0, last: int | None = None) -> None:
        """Set all copies within each data coordinate to those of tensor rank 0 and the owners of ties.

        `flat` is laid out like this rank's flat parameters, or like its tensors number `first` to `last` (exclusive).
        """
        tensors = self._tensors[first:last]
        for spec, piece in tensors:
            start = piece.start - tensors[0][1].start
            values = flat[start : start + piece.size]
            if spec.tensor_dim is None and self._mesh.tensor.size > 1:
                self._mesh.tensor.broadcast(values, label="parameters")
            if spec.name in self._ties:
                axis, owner = self._ties[spec.name]
                axis.broadcast(values, owner, label="parameters")

    def find_divergent(self) -> dict[int, int]:
        """World ranks that have a copy that differs from the first copy, with the rank of that first copy."""
        mesh, parameters = self._mesh, self._parameters
        flat = arrays.to_host(parameters.flat if parameters.sharded is None else parameters.gather())
        stage, data, tensor = (mesh.coordinates[name] for name in ("pipeline", "data", "tensor"))
        unsplit, digests = hashlib.sha256(), []
        for spec, piece in self._tensors:
            values = flat[piece.start : piece.start + piece.size].data
            if spec.tensor_dim is None:
                unsplit.update(values)
            if spec.name in self._ties:
                digests.append(((spec.name, data, tensor), hashlib.sha256(values).digest()))
        digests.append((("unsplit", stage, data), unsplit.digest()))
        if parameters.sharded is None:
            digests.append((("copies", stage, tensor), hashlib.sha256(flat.data).digest()))
        first: dict[Any, tuple[int, bytes]] = {}
        divergent: dict[int, int] = {}
        for rank, shown in enumerate(mesh.world.allgather_object(tuple(digests))):
            for what, digest in shown:
                holder, theirs = first.setdefault(what, (rank, digest))
                if theirs != digest:
                    divergent.setdefault(rank, holder)
        return divergent
