"""The facts that ranks of a new mesh exchange at once, and the error that all of them raise if they differ."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpishard.comm.axis import allgather_values
from mpishard.comm.family import Family
from mpishard.comm.nccl import COLLECTIVES
from mpishard.launch.job_notes import ECHO, raised_by_all
from mpishard.version import VERSION

_MOST_SHOWN = 4


def exchange_facts(
    world: MPI.Intracomm, node: int, collectives: Any, sizes: str, family: Family, problem: Exception | None
) -> tuple[list[int], Exception | None]:
    """Exchange the facts of this rank with the other ranks of a mesh, and compare. Collective over `world`.

    The family gets its name, and meshes that all of their ranks have dropped are freed. `node` is the first rank that
    shares memory with this one; `problem` is why this rank cannot have such a mesh. Returns `node` by rank, and what to
    raise, on every rank, if the ranks cannot share a mesh.
    """
    # The version comes first: another version may send something else after it.
    text = None if problem is None else str(problem)
    facts = allgather_values(world, (VERSION, node, collectives, sizes, text, family.own_name, Family.orphans()))
    error = _unlike_versions(world, [version for version, *_ in facts])
    if error is not None:
        return [], raised_by_all(error, world.size)
    _, nodes, all_collectives, all_sizes, problems, names, orphans = zip(*facts, strict=True)
    family.name = family.name or names[0]
    Family.free_orphans(orphans)
    first = next((rank for rank, text in enumerate(problems) if text is not None), None)
    if first is None:
        error = _unlike_collectives(all_collectives) or _unlike_sizes(all_sizes)
        return list(nodes), None if error is None else raised_by_all(error, world.size)
    if problem is None:
        problem = ValueError(f"rank {first}: {problems[first]}")
        setattr(problem, ECHO, True)
    elif len(set(problems)) == 1:
        raised_by_all(problem, world.size)
    return list(nodes), problem


def _unlike_versions(world: MPI.Intracomm, by_rank: Sequence[str]) -> ValueError | None:
    """The error if ranks run several versions of mpishard. Collective; ranks send their hosts only in that case."""
    if len(set(by_rank)) == 1:
        return None
    hosts = allgather_values(world, platform.node())
    shown = []
    for version in dict.fromkeys(by_rank):
        ranks = [rank for rank, each in enumerate(by_rank) if each == version]
        on = list(dict.fromkeys(hosts[rank] for rank in ranks))
        shown.append(f"{version} on {in_words('rank', ranks)} ({in_words('host', on)})")
    return ValueError(
        f"all ranks must have the same version of mpishard, but it is {', and '.join(shown)}; "
        "install one version on every host, in the environment that the ranks start in"
    )


def _unlike_collectives(by_rank: Sequence[Any]) -> ValueError | None:
    """The error if `collectives` of some rank is unknown or another than that of rank 0."""
    for rank, each in enumerate(by_rank):
        if each not in COLLECTIVES:
            return ValueError(f'collectives={each!r} on rank {rank} must be "mpi" or "nccl"')
        if each != by_rank[0]:
            return ValueError(
                f"collectives is {by_rank[0]!r} on rank 0 and {each!r} on rank {rank}; give the same on every rank"
            )
    return None


def _unlike_sizes(by_rank: Sequence[str]) -> ValueError | None:
    """The error if the mesh of some rank has other sizes than that of rank 0."""
    for rank, each in enumerate(by_rank):
        if each != by_rank[0]:
            return ValueError(
                f"the mesh is {by_rank[0]} on rank 0 and {each} on rank {rank}; give the same sizes on every rank"
            )
    return None


def in_words(what: str, which: Sequence[Any]) -> str:
    """Ranks or hosts as a text such as ``"ranks 0, 2"``, the first few by name; `what` is in the singular."""
    shown = ", ".join(map(str, which[:_MOST_SHOWN]))
    more = f" and {len(which) - _MOST_SHOWN} others" if len(which) > _MOST_SHOWN else ""
    return f"{what}{'s' if len(which) > 1 else ''} {shown}{more}"
