"""Distributed arrays of pylops-mpi, which are cut along one axis."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from mpishard.adapters.adapter import Adapter
from mpishard.arguments import kind_of

Array = Any


class _DistributedArrays(Adapter):
    package, what = "pylops_mpi", "DistributedArray"
    remedy = "base_comm=mesh.tensor.comm"

    def communicator(self, field: Any) -> Any:
        if not hasattr(field, "local_array"):
            raise TypeError(
                f"{kind_of(field)} is no DistributedArray; of a StackedDistributedArray give a list, with a partition "
                "of each of its distarrays"
            )
        if field.partition.name != "SCATTER":
            raise ValueError(
                f"the DistributedArray has partition={field.partition.name}, and each rank all of it: give minimize "
                "its local_array, and mesh=Mesh()"
            )
        return field.base_comm

    def numbering(self, field: Any) -> dict[str, Any]:
        axis, rank = field.axis, field.rank
        stops = list(accumulate(shape[axis] for shape in field.local_shapes))
        box = [(0, extent) for extent in field.global_shape]
        box[axis] = (stops[rank] - field.local_shape[axis], stops[rank])
        return {"shape": field.global_shape, "box": box}

    def values(self, field: Any) -> Array:
        return field.local_array

    def put(self, values: Array, field: Any) -> None:
        field.local_array[...] = values


ADAPTER = _DistributedArrays()
