"""Which processes of an elastic run are workers, and which are spares: a function of facts that all of them have.

After a death it says who takes the place of the dead: a spare of the same model-parallel rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Peer(NamedTuple):
    """A process of the run; `host` and `started` distinguish it from others with the same `pid`."""

    host: str
    pid: int
    started: str


class Member(NamedTuple):
    """Facts of a process that all others get."""

    identity: int | None  # stays the same for the whole run; None: not assigned yet
    free: int  # identities below it may be taken
    post: int  # its model-parallel rank, as one number below the size of a cell
    workers: int  # the number of workers that it wants; 0 if it does not know
    leaves: bool  # it has been asked to leave
    ends: bool  # it knows that the run ends
    lost: bool  # it knows that a process was lost
    peer: Peer


@dataclass(frozen=True)
class Roles:
    """The processes of a run in an order in which those of the workers come first, as `Mesh.rebind` expects them.

    `workers` is the number of workers, `cell` the number of processes in each.  The other fields have one entry for
    each process, as `Member` has them.
    """

    workers: int
    cell: int
    ranks: tuple[int, ...]  # axis ranks
    posts: tuple[int, ...]
    # A process keeps its identity for the whole run, while its place in this order changes.
    identities: tuple[int, ...]
    left: tuple[bool, ...]  # it has been asked to leave, and waits for the end of the run
    peers: tuple[Peer, ...]

    @classmethod
    def assign(cls, members: Sequence[Member], tensor_size: int, pipeline_size: int) -> Roles:
        """Choose the processes of as many workers as the members (by axis rank) want, or of fewer if there are too few.

        A process without an identity gets a new one, and takes the number of workers from the others.  A process that
        leaves becomes part of a worker only if the run ends.
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
        """Number of processes."""
        return len(self.ranks)

    @property
    def working(self) -> int:
        """Number of processes that are part of a worker."""
        return self.workers * self.cell

    @property
    def able(self) -> int:
        """Number of workers that the processes that stay can make."""
        return _whole((post for post, leaves in zip(self.posts, self.left, strict=True) if not leaves), self.cell)

    @property
    def most(self) -> int:
        """Number of workers that all processes can make."""
        return _whole(self.posts, self.cell)

    @property
    def is_settled(self) -> bool:
        """True if no worker is about to leave."""
        return not any(self.left[: self.working])


def _whole(posts: Iterable[int], cell: int) -> int:
    """Number of complete cells that processes of these posts make."""
    numbers = Counter(posts)
    return min(numbers[post] for post in range(cell))
