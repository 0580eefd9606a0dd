"""Parameters that several ranks hold: copies on the data axis, replicas on the tensor axis, ties between stages."""

from __future__ import annotations

import hashlib
from typing import Any

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.layout.local_layout import Piece
from mpishard.layout.specs import ParameterSpec
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.gradient_buckets import Bucket

Array = Any


class Replicas:
    """What keeps the copies of one model's parameters the same.

    All methods, and creation, are collective over the mesh.

    Parameters
    ----------
    mesh : Mesh
    parameters : FlatParameters
        Laid out for this rank's place in the mesh.
    """

    def __init__(self, mesh: Mesh, parameters: FlatParameters) -> None:
        self._mesh = mesh
        self._parameters = parameters
        self._tensors: list[tuple[ParameterSpec, Piece]] = list(zip(parameters.local, parameters.pieces, strict=True))
        # By name of a tied tensor: the stages' ranks that hold it, and which of them is the owner.
        self._ties: dict[str, tuple[Axis, int]] = {}
        place = mesh.place
        for spec in parameters.specs:
            holders = place.holders(spec)
            if len(holders) > 1:
                axis = mesh.pipeline.subgroup(f"ties {'+'.join(map(str, holders))}", holders)
                if axis is not None:
                    self._ties[spec.name] = axis, holders.index(place.runner(spec.stage))

    @property
    def inside(self) -> bool:
        """Whether there are copies within one data coordinate: replicas on the tensor axis, or ties."""
        return bool(self._ties) or self._mesh.tensor.size > 1

    # -- gradients --------------------------------------------------------------------------------------------------

    def sum(self, bucket: Bucket, gradient: Array) -> None:
        """Sum the gradient of a bucket, in place: partial ones over the tensor axis, then ties over their stages."""
        if self._mesh.tensor.size > 1:
            self._sum_partial(bucket, gradient)
        if bucket.tied:
            name = self._tensors[bucket.first][1].name
            if name in self._ties:
                self._ties[name][0].all_reduce(gradient, label="gradients")

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
            place = 0
            for start, stop in runs:
                packed[place : place + stop - start] = gradient[start:stop]
                place += stop - start
            self._mesh.tensor.all_reduce(packed, label="gradients")
            place = 0
            for start, stop in runs:
                gradient[start:stop] = packed[place : place + stop - start]
                place += stop - start

    def zero_duplicates(self, flat: Array) -> None:
        """Make terms of a sum that all ranks hold: zero it wherever another rank has the same.  Not collective."""
        if self._mesh.data.rank:
            flat[...] = 0
        for spec, piece in self._tensors:
            tied = bool(spec.copies) and not self._mesh.place.runs(spec.stage)
            if tied or (spec.partial and self._mesh.tensor.rank):
                flat[piece.start : piece.start + piece.size] = 0

    # -- values -----------------------------------------------------------------------------------------------------

    def spread(self) -> None:
        """Make all copies of the parameters those of data rank 0, of tensor rank 0 and of the owners of ties."""
        parameters = self._parameters
        if parameters.sharded is None:
            self._mesh.data.broadcast(parameters.flat, label="parameters")
            self.spread_inside(parameters.flat)
        elif self.inside:
            parameters.sharded.rewrite(self.spread_inside)

    def spread_inside(self, flat: Array, first: int = 0, last: int | None = None) -> None:
        """The same within each data coordinate, for a flat array like this place's parameters, or like some of them.

        `first` and `last` (exclusive) number the tensors that `flat` holds.
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
        """World ranks whose copy of something differs from the first copy, and the rank that holds that one."""
        mesh, parameters = self._mesh, self._parameters
        flat = arrays.to_host(parameters.flat if parameters.sharded is None else parameters.gather())
        stage, data, tensor = (mesh.coordinates[name] for name in ("pipeline", "data", "tensor"))
        replicas, told = hashlib.sha256(), []
        for spec, piece in self._tensors:
            values = flat[piece.start : piece.start + piece.size].data
            if spec.tensor_dim is None:
                replicas.update(values)
            if spec.name in self._ties:
                told.append(((spec.name, data, tensor), hashlib.sha256(values).digest()))
        told.append((("replicas", stage, data), replicas.digest()))
        if parameters.sharded is None:
            told.append((("copies", stage, tensor), hashlib.sha256(flat.data).digest()))
        first: dict[Any, tuple[int, bytes]] = {}
        strayed: dict[int, int] = {}
        for rank, facts in enumerate(mesh.world.allgather_object(tuple(told))):
            for what, digest in facts:
                holder, theirs = first.setdefault(what, (rank, digest))
                if theirs != digest:
                    strayed.setdefault(rank, holder)
        return strayed
