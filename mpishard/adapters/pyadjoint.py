"""Controls of pyadjoint that it gives as vectors of PETSc, such as functions of Firedrake."""

from __future__ import annotations

from typing import Any

from mpishard.adapters.adapter import Adapter
from mpishard.adapters.petsc4py import ADAPTER as VECTORS
from mpishard.arguments import kind_of

Array = Any


class _OverloadedTypes(Adapter):
    package, what = "pyadjoint", "control"
    remedy = "mesh.tensor.comm"

    def communicator(self, field: Any) -> Any:
        return VECTORS.communicator(_vector(field))

    def numbering(self, field: Any) -> dict[str, Any]:
        return VECTORS.numbering(_vector(field))

    def values(self, field: Any) -> Array:
        return VECTORS.values(_vector(field))

    def put(self, values: Array, field: Any) -> None:
        vector = _vector(field)
        VECTORS.put(values, vector)
        field._ad_from_petsc(vector)


ADAPTER = _OverloadedTypes()


def _vector(field: Any) -> Any:
    """A copy of a control as a vector."""
    try:
        return field._ad_to_petsc()
    except (AttributeError, NotImplementedError):
        raise TypeError(f"{kind_of(field)} does not become a Vec of PETSc: give Partition(local, mesh)") from None
