"""What is checked before a mesh is made: its sizes and settings on this rank, and whether those of all ranks agree."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.comm.agreement import in_words
from mpishard.comm.axis import allgather_values
from mpishard.comm.channel import Family
from mpishard.comm.groups import Places, misfit
from mpishard.launch.detection import explain_alone, explain_foreign, foreign_launch, launch_of, launches
from mpishard.launch.job_notes import ECHO, raised_by_all
from mpishard.version import VERSION


def sizes_for(ranks: int, **sizes: Any) -> tuple[int, int, int]:
    """Check the sizes against the number of ranks and fill in the one that is -1."""
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(f"mesh size {name}={size!r} must be a whole number of at least 1, or -1 to infer it")
        sizes[name] = int(size)
    unknown = [name for name, size in sizes.items() if size == -1]
    if len(unknown) > 1:
        hint = "; data is -1 where it is left out, so give it too, such as data=1" if "data" in unknown else ""
        raise ValueError(f"mesh sizes {' and '.join(unknown)} are -1, and only one can be inferred{hint}")
    known = 1
    for size in sizes.values():
        known *= size if size != -1 else 1
    if unknown and ranks % known == 0:
        sizes[unknown[0]] = ranks // known
        known = ranks
    if known != ranks:
        # The least size that could be inferred stands for -1.
        asked = " x ".join(f"{name}={max(sizes[name], 1)}" for name in ("pipeline", "data", "tensor"))
        need = f"a multiple of {known}" if unknown else str(known)
        hint = "change the sizes or the number of ranks" if unknown else "leave data=-1 to infer it"
        raise ValueError(f"mesh {asked} needs {need} ranks, got {ranks}; {hint}")
    return sizes["data"], sizes["tensor"], sizes["pipeline"]


def check_launcher() -> None:
    """Refuse a world of one rank where a launcher has started several."""
    # A spawned process inherits the environment of its parents.
    if MPI.COMM_WORLD.size > 1 or MPI.Comm.Get_parent() != MPI.COMM_NULL:
        return
    library, found = MPI.get_vendor()[0], launches(os.environ)
    launch = foreign_launch(found, library)
    if launch is not None and launch.ranks > 1:
        raise ValueError(f"this rank is alone in its MPI_COMM_WORLD: {explain_foreign(launch, library)}")
    launch = launch_of(found, ranks=1)
    if launch is not None and launch.ranks > 1:
        raise ValueError(explain_alone(launch, library))


def time_limit(timeout: float | None) -> float | None:
    """The chosen time limit; None if none was chosen."""
    value: Any
    name, value = "timeout", timeout
    if value is None:
        name, value = "MPISHARD_TIMEOUT", os.environ.get("MPISHARD_TIMEOUT") or None
    elif isinstance(value, bool):
        raise TypeError(f"timeout={value} must be a number of seconds")
    if value is None:
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r} is not a number of seconds") from None
    if not seconds > 0:
        raise ValueError(f"the time limit of a collective must be above 0 seconds, got {seconds:g}")
    return seconds


# What ranks of a new mesh exchange before any of them splits its communicator, and the error that all raise.


def exchange_facts(
    world: MPI.Intracomm,
    sizes: str,
    debug: bool,
    family: Family,
    problem: Exception | None,
    places: Places | None,
) -> Exception | None:
    """Exchange what this rank gives a mesh with the other ranks, and compare. Collective over `world`.

    The family gets its name, and meshes that all of their ranks have dropped are freed. `problem` is why this rank
    cannot have such a mesh, `places` are in communicators of the application. Returns what to raise, on every rank, if
    the ranks cannot share a mesh; OtherOrderError if they can, in another order.
    """
    # The version comes first: another version may send something else after it.
    text = None if problem is None else str(problem)
    facts = allgather_values(world, (VERSION, sizes, debug, text, family.own_name, Family.orphans(), places))
    error = _unlike_versions(world, [version for version, *_ in facts])
    if error is not None:
        return raised_by_all(error, world.size)
    _, all_sizes, all_debug, problems, names, orphans, all_places = zip(*facts, strict=True)
    family.name = family.name or names[0]
    Family.free_orphans(orphans)
    first = next((rank for rank, text in enumerate(problems) if text is not None), None)
    if first is None:
        found = misfit(all_places)
        error = found if isinstance(found, ValueError) else _unlike_sizes(all_sizes) or _unlike_debug(all_debug)
        return found if error is None else raised_by_all(error, world.size)
    if problem is None:
        problem = ValueError(f"rank {first}: {problems[first]}")
        setattr(problem, ECHO, True)
    elif len(set(problems)) == 1:
        raised_by_all(problem, world.size)
    return problem


def _unlike_versions(world: MPI.Intracomm, by_rank: Sequence[str]) -> ValueError | None:
    """The error if ranks run several versions of mpishard. Collective; ranks send their hosts only in that case."""
    if len(set(by_rank)) == 1:
        return None
    hosts = allgather_values(world, platform.node())
    versions = []
    for version in dict.fromkeys(by_rank):
        ranks = [rank for rank, each in enumerate(by_rank) if each == version]
        on = list(dict.fromkeys(hosts[rank] for rank in ranks))
        versions.append(f"{version} on {in_words('rank', ranks)} ({in_words('host', on)})")
    return ValueError(
        f"all ranks must have the same version of mpishard, but it is {', and '.join(versions)}; "
        "install one version on every host, in the environment that the ranks start in"
    )


def _unlike_sizes(by_rank: Sequence[str]) -> ValueError | None:
    """The error if the mesh of some rank has other sizes than that of rank 0."""
    for rank, each in enumerate(by_rank):
        if each != by_rank[0]:
            return ValueError(
                f"the mesh is {by_rank[0]} on rank 0 and {each} on rank {rank}; give the same sizes on every rank"
            )
    return None


def _unlike_debug(by_rank: Sequence[bool]) -> ValueError | None:
    """The error if only some ranks compare their calls: the others would not answer them."""
    if len(set(by_rank)) == 1:
        return None
    on = [rank for rank, each in enumerate(by_rank) if each]
    return ValueError(
        f"debug=True, or MPISHARD_DEBUG, is set on {in_words('rank', on)} of {len(by_rank)} alone; give the same on "
        "every rank"
    )
