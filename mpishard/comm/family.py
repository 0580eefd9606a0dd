"""The communicators of a mesh that was dropped without `free`, and how its ranks free them together.

A communicator is freed by all of its ranks, but Python collects a mesh at another time on each of them. So each rank
notes which meshes it has collected. When the next mesh is made, its ranks exchange that, and free those that all of
their ranks have collected, in one order.
"""

from __future__ import annotations

import contextlib
import gc
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

from mpi4py import MPI

from mpishard.comm.capabilities import heals_in_place

# After this many more communicators garbage is collected before a mesh is made.  MPICH has 2,048, and a mesh takes 11.
_MANY = 500
# What MPICH says when there are no more, and when those that each rank has left are others than those of the others.
_EXHAUSTED = ("Too many communicators", "Cannot allocate context ID because of fragmentation")


class CommunicatorsExhaustedError(RuntimeError):
    """MPI has no communicator left."""


class Family:
    """The communicators of one mesh and what it keeps running, until they are freed. Creation is not collective.

    It is an orphan once Python has collected the object of each communicator: whoever holds an axis, a collective that
    is under way, or a communicator itself keeps all of them. A collective that nobody has waited for keeps them for
    ever, since MPI may still use them. Communicators of a mesh that changes its ranks leave the family: nobody knows
    which ranks are left to free them. Where ranks survive the death of others (ULFM) a family takes nothing in: a rank
    that hears that all have dropped a mesh could wait for one that has heard of a death instead.

    `own_name` is unique, and that of rank 0 becomes the `name` of the family, the same on all ranks; while it is empty
    the family is never freed here.
    """

    _open: ClassVar[set[Family]] = set()
    _orphans: ClassVar[dict[str, Family]] = {}
    _next_collection: ClassVar[int] = _MANY

    def __init__(self, size: int) -> None:
        self.own_name, self.name = secrets.token_hex(8), ""
        self.ends: list[Callable[[], None]] = []  # what else to end collectively, before the communicators are freed
        self._size = size
        self._dependents = 0
        # By handle: another object for the communicator, and what is called when its first one is collected.
        self._members: dict[int, tuple[MPI.Comm, weakref.finalize]] = {}
        self._alive: set[int] = set()
        self._started: set[object] = set()
        if not heals_in_place():
            self._open.add(self)

    def add(self, comm: MPI.Intracomm) -> None:
        """Take in a communicator, once."""
        if self not in self._open or comm == MPI.COMM_NULL or comm.handle in self._members:
            return
        finalize = weakref.finalize(comm, self._note_collected, comm.handle)
        finalize.atexit = False
        self._members[comm.handle] = MPI.Intracomm(comm), finalize
        self._alive.add(comm.handle)

    def dependent(self, comm: MPI.Intracomm) -> Family:
        """The family of what is made on the mesh and may be dropped before it. Orphans are freed first.

        Collective over `comm`, the world of the mesh.
        """
        if not heals_in_place():
            self.free_orphans(comm.allgather(self.orphans()))
        family = Family(self._size)
        self._dependents += 1
        family.name = f"{self.name}/{self._dependents}"
        if self not in self._open:
            family.close()
        return family

    def hold(self) -> Callable[[], None]:
        """Keep the communicators of a started collective from being freed here until what is returned is called.

        Its end alone counts: the order in which Python collects the request and the communicator is unknown.
        """
        mark = object()
        self._started.add(mark)
        return partial(self._started.discard, mark)

    def remove(self, comm: MPI.Comm) -> None:
        """Let a communicator go, since its owner is about to free it."""
        if comm.handle in self._members:
            self._members.pop(comm.handle)[1].detach()
            self._alive.discard(comm.handle)

    def close(self) -> None:
        """Let all communicators go, and take in no other."""
        for _, finalize in self._members.values():
            finalize.detach()
        self._members, self.ends = {}, []
        self._open.discard(self)
        self._orphans.pop(self.name, None)

    def free(self) -> None:
        """End and free everything.  Collective over the mesh."""
        for end in self.ends:
            end()
        members = [comm for comm, _ in self._members.values()]
        self.close()
        for comm in reversed(members):
            comm.Free()

    def _note_collected(self, handle: int) -> None:
        """A communicator's object is no more.  Any thread may collect it, so this makes no call of MPI."""
        self._alive.discard(handle)
        if not self._alive and not self._started and self.name and self in self._open:
            self._open.discard(self)
            self._orphans[self.name] = self

    @classmethod
    def orphans(cls) -> list[tuple[str, int]]:
        """Name and size of each orphan of this rank, for `free_orphans`."""
        # Not of `items`: it makes tuples, and garbage that Python collects then may add to them.
        return [(name, cls._orphans[name]._size) for name in list(cls._orphans)]

    @classmethod
    def free_orphans(cls, by_rank: Sequence[Sequence[tuple[str, int]]]) -> bool:
        """Free those that are orphans on all of their ranks; return True if one was an orphan on any rank.

        Collective over the ranks whose `orphans` are given.
        """
        counts = Counter(each for orphans in by_rank for each in orphans)
        shared = sorted(name for (name, size), count in counts.items() if count == size)
        for name in shared:
            family = cls._orphans.pop(name, None)
            if family is not None:
                family.free()
        return bool(shared)

    @classmethod
    def collect_garbage(cls) -> None:
        """Let Python collect what nobody holds, if many more communicators are open."""
        if cls._count() >= cls._next_collection:
            gc.collect()
            cls._next_collection = cls._count() + _MANY

    @classmethod
    def _count(cls) -> int:
        """The number of communicators held on this rank."""
        return sum(len(family._alive) for family in list(cls._open))

    @classmethod
    @contextlib.contextmanager
    def creating(cls) -> Iterator[None]:
        """Make communicators in this context; if MPI has none left, the error says what to free.

        That is CommunicatorsExhaustedError, on all ranks that make them.
        """
        try:
            yield
        except MPI.Exception as error:
            if not any(text in str(error) for text in _EXHAUSTED):
                raise
            meshes = sum(bool(family.name) and "/" not in family.name for family in list(cls._open))
            raise CommunicatorsExhaustedError(
                f"MPI has no communicator left: {meshes} meshes are open on this rank, with {cls._count()} "
                "communicators; free those that are done, on all ranks: `with mpishard.Mesh() as mesh`, or mesh.free()"
            ) from error
