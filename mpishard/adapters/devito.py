"""Functions of Devito on a grid, which Devito has cut into boxes: the domain of this rank, without the halo."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.adapters.adapter import Adapter
from mpishard.arguments import kind_of

Array = Any


class _GridFunctions(Adapter):
    package, what = "devito", "Function"
    remedy = "Grid(..., comm=mesh.tensor.comm) and DEVITO_MPI=1"

    def communicator(self, field: Any) -> Any:
        if getattr(field, "is_TimeFunction", False):
            raise TypeError(
                f"{kind_of(field)} has a value for each time step: invert for a Function, such as a coefficient or the "
                "initial state, or give Partition(local, mesh, shape=, box=) the values of one step"
            )
        points = any(getattr(field, name, False) for name in ("is_SparseFunction", "is_SparseTimeFunction"))
        if points or not hasattr(field, "local_indices"):
            raise TypeError(
                f"{kind_of(field)} is no Function on a grid: give the Function itself, or Partition(local, mesh) its "
                "values"
            )
        distributor = getattr(field.grid, "distributor", None)
        # Without DEVITO_MPI the communicator is null.
        return distributor.comm if distributor is not None and distributor.comm else None

    def numbering(self, field: Any) -> dict[str, Any]:
        starts = [where.start if count else 0 for where, count in zip(field.local_indices, field.shape, strict=True)]
        box = [(start, start + count) for start, count in zip(starts, field.shape, strict=True)]
        return {"shape": field.shape_global, "box": box}

    def values(self, field: Any) -> Array:
        return np.asarray(field.data_ro_domain)  # whose indices are those of this rank

    def put(self, values: Array, field: Any) -> None:
        np.asarray(field.data)[...] = values  # and `data` notes that the halo is to be exchanged before it is read


ADAPTER = _GridFunctions()
