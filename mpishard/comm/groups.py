"""A mesh from communicators of the application: that of each group of ranks, and those across the groups."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpishard.arguments import shown
from mpishard.comm.agreement import held_by, in_words


class OtherOrderError(Exception):
    """The ranks make a grid, but are numbered in another order than those of a mesh: `numbers`, by rank."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(f"ranks must be in the order {numbers}")
        self.numbers = numbers


class Place(NamedTuple):
    """The place of this rank in one communicator of the application."""

    first: int  # the rank of its rank 0 in the mesh's communicator
    rank: int
    size: int
    members: int  # a hash of all its ranks

    @classmethod
    def of(cls, name: str, comm: Any, of_mesh: MPI.Intracomm) -> Place:
        """The place in `comm`, which the user gives as the argument `name`, of ranks of `of_mesh`.

        Raises ValueError or TypeError if it is no communicator of such ranks.
        """
        if comm == MPI.COMM_NULL:
            raise ValueError(f"{name} is a null communicator: it was freed, or this rank is not in it")
        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(f"{name}={shown(comm)} must be a communicator of mpi4py")
        ranks = MPI.Group.Translate_ranks(comm.group, None, of_mesh.group)
        outside = sum(rank == MPI.UNDEFINED for rank in ranks)
        if outside:
            raise ValueError(
                f"{name} has {outside} ranks that are not among the {of_mesh.size} of comm; give the communicator of "
                "all groups first, Mesh(comm, space=..., groups=...)"
            )
        return cls(ranks[0], comm.rank, comm.size, zlib.crc32(np.array(ranks, np.int64).tobytes()))


class Places(NamedTuple):
    """The places of this rank in its group, and in the communicator across groups, if that is given."""

    space: Place
    groups: Place | None

    @classmethod
    def of(cls, space: Any, groups: Any, of_mesh: MPI.Intracomm) -> Places | None:
        """The places that the arguments of a mesh say; None if there are none. Raises as `Place.of`."""
        if space is None and groups is None:
            return None
        if space is None:
            raise ValueError("groups= is the communicator across groups: give space=, that of this rank's group, too")
        found = Place.of("space", space, of_mesh)
        return cls(found, None if groups is None else Place.of("groups", groups, of_mesh))


def misfit(by_rank: Sequence[Places | None]) -> Exception | None:
    """The error if the places of all ranks make no grid, or `OtherOrderError`; None if the ranks are in order.

    In order is the rank in space fastest, then the group.  All ranks compute the same.
    """
    given = [
        "neither" if each is None else "space alone" if each.groups is None else "space and groups" for each in by_rank
    ]
    if len(set(given)) > 1:
        held = ", ".join(held_by(range(len(by_rank)), given))
        return ValueError(f"space and groups must be given alike on every rank, but they are not: {held}")
    places = [each for each in by_rank if each is not None]
    if not places:
        return None
    spaces = [each.space for each in places]
    across = [each.groups for each in places if each.groups is not None]
    problem = _unlike("space", spaces) or _unlike("groups", across)
    if problem is not None:
        return problem
    if not across:  # the groups are in the order of their first ranks
        order = sorted({each.first for each in spaces})
        numbers = [order.index(each.first) * each.size + each.rank for each in spaces]
        return None if numbers == [*range(len(numbers))] else OtherOrderError(numbers)
    size, count = spaces[0].size, across[0].size
    if size * count != len(places):
        return ValueError(
            f"ranks of space and groups must make a grid, but {size} x {count} is {size * count}, and comm has "
            f"{len(places)}; groups must have one rank of each group"
        )
    problem = _apart("space", spaces, "groups", across) or _apart("groups", across, "space", spaces)
    if problem is not None:
        return problem
    numbers = [group.rank * size + own.rank for own, group in zip(spaces, across, strict=True)]
    return None if numbers == [*range(len(numbers))] else OtherOrderError(numbers)


def _unlike(name: str, places: Sequence[Place]) -> ValueError | None:
    """The error if communicators of this name have several sizes, or ranks of one give another one."""
    sizes = [str(each.size) for each in places]
    if len(set(sizes)) > 1:
        held = ", ".join(held_by(range(len(places)), sizes))
        return ValueError(f"all communicators {name} must have the same number of ranks, but it is {held}")
    counts = Counter((each.first, each.members) for each in places)
    for rank, each in enumerate(places):
        count = counts[each.first, each.members]
        if count != each.size:
            return ValueError(
                f"{name} of rank {rank} has {each.size} ranks, but only {count} of these give it: give the same "
                "communicator on all of its ranks"
            )
    return None


def _apart(name: str, places: Sequence[Place], other: str, others: Sequence[Place]) -> ValueError | None:
    """The error if two ranks that share the communicator `name` have different ranks in the `other` one."""
    found: dict[int, int] = {}
    for rank, each in enumerate(places):
        first = found.setdefault(each.first, rank)
        if others[first].rank != others[rank].rank:
            return ValueError(
                f"{in_words('rank', [first, rank])} share {name}, but are {others[first].rank} and "
                f"{others[rank].rank} in {other}: the ranks of a group must have one rank in groups, and the ranks of "
                "groups one rank in space"
            )
    return None
