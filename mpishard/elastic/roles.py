"""Who of the processes of a run is in which worker, and who is a spare: a pure function of facts that all have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mpishard.elastic.stopped_processes import Peer


class Member(NamedTuple):
    """Facts of a process that all others get.

    Parameters
    ----------
    identity : int or None
        Number of the process that stays the same for the whole run; None if it has none yet.
    free : int
        Identities below it may be taken.
    post : int
        Number of its model-parallel rank.
    workers : int
        The number of workers that it wants; 0 if it does not know.
    leaves : bool
        Whether it has been asked to leave.
    ends : bool
        Whether it knows that the run ends.
    lost : bool
        Whether it knows that a process has died.
    peer : Peer
        The operating system's facts of it.
    """

    identity: int | None
    free: int
    post: int
    workers: int
    leaves: bool
    ends: bool
    lost: bool
    peer: Peer


@dataclass(frozen=True)
class Roles:
    """The processes of a run in an order in which those of the workers come first, as `Mesh.rebind` expects them.

    Parameters
    ----------
    workers : int
        How many workers there are.
    cell : int
        Processes of a worker.
    ranks : tuple of int
        The axis rank of each process.
    posts : tuple of int
        Its model-parallel rank.
    identities : tuple of int
        Its identity: a process keeps that for the whole run, while its place in this order changes.
    left : tuple of bool
        Whether it has been asked to leave, and waits for the end of the run.
    peers : tuple of Peer
        The operating system's facts of it.
    """

    workers: int
    cell: int
    ranks: tuple[int, ...]
    posts: tuple[int, ...]
    identities: tuple[int, ...]
    left: tuple[bool, ...]
    peers: tuple[Peer, ...]

    @classmethod
    def assign(cls, members: Sequence[Member], tensor_size: int, pipeline_size: int) -> Roles:
        """Choose the processes of as many workers as the members want, or of fewer if there are not enough processes.

        A process without an identity gets a new one, and takes the number of workers from the others.  A process that
        leaves becomes part of a worker only if the run ends.

        Parameters
        ----------
        members : sequence of Member
            By axis rank.
        tensor_size, pipeline_size : int
            Of each worker.
        """
        cell = tensor_size * pipeline_size
        free = max(member.free for member in members)
        identities = []
        for member in members:
            identities.append(free if member.identity is None else member.identity)
            free += member.identity is None
        ordered = sorted(range(len(members)), key=lambda rank: members[rank].leaves)
        ends = any(member.ends for member in members)
        limit = _whole((member.post for member in members if ends or not member.leaves), cell)
        workers = min(max(member.workers for member in members), limit)
        posts = [[rank for rank in ordered if members[rank].post == post] for post in range(cell)]
        chosen = [
            posts[stage * tensor_size + tensor][worker]
            for stage in range(pipeline_size)
            for worker in range(workers)
            for tensor in range(tensor_size)
        ]
        ranks = chosen + [rank for rank in ordered if rank not in chosen]
        return cls(
            workers,
            cell,
            tuple(ranks),
            posts=tuple(members[rank].post for rank in ranks),
            identities=tuple(identities[rank] for rank in ranks),
            left=tuple(members[rank].leaves for rank in ranks),
            peers=tuple(members[rank].peer for rank in ranks),
        )

    def with_leaving(self, leaving: Iterable[bool]) -> Roles:
        """The same roles in which further processes, the first ones in order, are about to leave."""
        asked = list(leaving)
        asked += [False] * (self.size - len(asked))
        return replace(self, left=tuple(a or b for a, b in zip(self.left, asked, strict=True)))

    @property
    def size(self) -> int:
        """How many processes there are."""
        return len(self.ranks)

    @property
    def working(self) -> int:
        """How many processes are part of a worker."""
        return self.workers * self.cell

    @property
    def able(self) -> int:
        """How many workers the processes that stay can make."""
        return _whole((post for post, leaves in zip(self.posts, self.left, strict=True) if not leaves), self.cell)

    @property
    def most(self) -> int:
        """How many workers all processes can make."""
        return _whole(self.posts, self.cell)

    @property
    def is_settled(self) -> bool:
        """Whether no worker is about to leave."""
        return not any(self.left[: self.working])


def _whole(posts: Iterable[int], cell: int) -> int:
    """How many complete cells processes of these posts make."""
    numbers = Counter(posts)
    return min(numbers[post] for post in range(cell))
