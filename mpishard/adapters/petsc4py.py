"""Vectors of PETSc: the values that a rank owns, without ghosts."""

from __future__ import annotations

from typing import Any

from mpishard.adapters.adapter import Adapter
from mpishard.arguments import kind_of

Array = Any


class _Vectors(Adapter):
    package, what = "petsc4py", "Vec"
    remedy = "comm=mesh.tensor.comm"

    def communicator(self, field: Any) -> Any:
        if not hasattr(field, "getArray"):
            raise TypeError(f"{kind_of(field)} is no Vec")
        return field.comm.tompi4py()

    def numbering(self, field: Any) -> dict[str, Any]:
        grid = field.getDM()
        if not grid or grid.getType() != "da":
            return {"shape": (field.getSize(),), "box": [field.getOwnershipRange()]}
        dof = grid.getDof()  # of a DMDA, whose last dimension comes first in memory
        more = [dof] * (dof > 1)
        return {
            "shape": [*grid.getSizes()[::-1], *more],
            "box": [*grid.getRanges()[::-1], *((0, each) for each in more)],
        }

    def values(self, field: Any) -> Array:
        return field.getArray(readonly=True)

    def put(self, values: Array, field: Any) -> None:
        field.setArray(values)
        with field.localForm() as ghosted:
            if ghosted:
                field.ghostUpdate()


ADAPTER = _Vectors()
