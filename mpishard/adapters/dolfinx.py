"""Functions of DOLFINx: the degrees of freedom that a rank owns, numbered by the mesh as it was before it was cut."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.adapters.adapter import Adapter
from mpishard.arguments import kind_of

Array = Any


class _FiniteElementFunctions(Adapter):
    package, what = "dolfinx", "Function"
    remedy = "a mesh of mesh.tensor.comm"

    def communicator(self, field: Any) -> Any:
        space = getattr(field, "function_space", None)
        if space is None:
            raise TypeError(f"{kind_of(field)} is no Function; get() and put() take a Vector, too")
        if len(space.component()):
            raise ValueError("the Function is a part of a mixed one, with its values: give collapse() of it")
        return space.mesh.comm

    def numbering(self, field: Any) -> dict[str, Any]:
        space, dofmap = field.function_space, field.function_space.dofmap
        labels = np.full(dofmap.index_map.size_local + dofmap.index_map.num_ghosts, np.iinfo(np.int64).max)
        np.minimum.at(labels, dofmap.list, _labels_in_cells(space))
        numbers = _numbers(space.mesh.comm, _least(space.mesh.comm, dofmap.index_map, labels))
        return {"ids": (numbers[:, None] * dofmap.index_map_bs + np.arange(dofmap.index_map_bs)).reshape(-1)}

    def values(self, field: Any) -> Array:
        vector = getattr(field, "x", field)
        return vector.array[: vector.index_map.size_local * vector.block_size]

    def put(self, values: Array, field: Any) -> None:
        self.values(field)[...] = values
        getattr(field, "x", field).scatter_forward()


ADAPTER = _FiniteElementFunctions()


def _labels_in_cells(space: Any) -> np.ndarray:
    """A number for each degree of freedom of each cell here that does not depend on how the mesh is cut.

    Those of corners are as the mesh was given; others are in the order of its cells, and within a cell.
    """
    mesh, element, width = space.mesh, space.ufl_element(), space.dofmap.list.shape[1]
    dofmaps = mesh.geometry.dofmaps
    nodes = mesh.geometry.dofmap if callable(dofmaps) else dofmaps[0]  # before DOLFINx 0.11 the latter is a method
    if (element.family_name, element.degree, element.discontinuous, nodes.shape[1]) == ("P", 1, False, width):
        found: np.ndarray = np.asarray(mesh.geometry.input_global_indices)[nodes]
        return found
    if _turns(element):
        raise ValueError(
            f"degrees of freedom of {element} are placed by the order of the corners of a cell, which depends on the "
            "partition: give their numbers, Partition.of(field, mesh, ids=numbers)"
        )
    return np.asarray(mesh.topology.original_cell_index)[:, None] * width + np.arange(width)


def _turns(element: Any) -> bool:
    """Whether neighbouring cells must agree on an orientation for the degrees of freedom on what they share."""
    if element.sub_elements:
        return any(map(_turns, element.sub_elements))
    try:
        return not element.basix_element.dof_transformations_are_identity
    except NotImplementedError:  # of points of quadrature, which cells do not share
        return False


def _least(comm: Any, index_map: Any, labels: np.ndarray) -> np.ndarray:
    """The labels of the entries that this rank owns: the least that any rank has for them."""
    own, first = labels[: index_map.size_local].copy(), index_map.local_range[0]
    exchange = _Exchange(comm, index_map.owners)
    entries, theirs = exchange.there(index_map.ghosts), exchange.there(labels[index_map.size_local :])
    np.minimum.at(own, entries - first, theirs)
    return own


def _numbers(comm: Any, labels: np.ndarray) -> np.ndarray:
    """The place of each label, from 0, among those of all ranks, which are all different."""
    most = max(comm.allgather(int(labels.max(initial=0))))
    exchange = _Exchange(comm, labels * comm.size // (most + 1))
    theirs = exchange.there(labels)
    first = sum(comm.allgather(len(theirs))[: comm.rank])
    places = np.empty_like(theirs)
    places[np.argsort(theirs)] = np.arange(first, first + len(theirs))
    return exchange.back(places)


class _Exchange:
    """Sends each of some values to a rank, and an answer for each back.  Collective."""

    def __init__(self, comm: Any, ranks: np.ndarray) -> None:
        self._comm, self._order = comm, np.argsort(ranks, kind="stable")
        self._sent = np.bincount(ranks, minlength=comm.size)
        self._received = np.empty_like(self._sent)
        comm.Alltoall(self._sent, self._received)

    def there(self, values: np.ndarray) -> np.ndarray:
        arrived = np.empty(self._received.sum(), np.int64)
        self._comm.Alltoallv([values[self._order].astype(np.int64), self._sent], [arrived, self._received])
        return arrived

    def back(self, values: np.ndarray) -> np.ndarray:
        arrived, found = np.empty((2, len(self._order)), np.int64)
        self._comm.Alltoallv([values, self._received], [arrived, self._sent])
        found[self._order] = arrived
        return found
