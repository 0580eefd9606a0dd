"""The agreement of ranks on the libraries that multiply matrices."""

from __future__ import annotations

import os
import zlib

import numpy as np
from mpi4py import MPI

from mpishard.backend.products import choice
from mpishard.backend.products.choice import VARIABLE, Choice, Common, Status
from mpishard.backend.products.libraries import TAKES, loadable, multiplies_bfloat16
from mpishard.comm.axis import Axis
from mpishard.launch.job_notes import raised_by_all

# The mark of a rank without the variable that joins others; larger than all marks.
_ANY = 2**40


def agree_on_products(world: Axis, *, spawned: bool = False) -> Common:
    """Multiply by the same libraries on all ranks from now on. Collective over `world`.

    Only libraries of which all ranks have the same version are taken. The environment variable MPISHARD_PRODUCTS
    decides which; without it the choice that was made on some rank stays, so that ranks that join (`spawned`) do as the
    others do, and else rank 0 takes the fastest. Ranks that join need not have the variable: launchers do not pass all
    variables on to processes that are spawned.

    Returns what all ranks can multiply by. Raises ValueError on all ranks if the variable differs between ranks, cannot
    be read, or names a library that some rank lacks.
    """
    forced, versions = choice.chosen_by_variable(), loadable()
    marks = [_mark(f"{name} {versions[name]}") if name in versions else 0 for name in TAKES]
    facts = np.array([*marks, multiplies_bfloat16(), _mark(forced)], np.int64)
    made = world.rank if choice.is_made() else world.size
    shared = np.array([made, *facts, *-facts])
    follows = choice.is_for_now() and not forced
    if follows:
        shared[[facts.size, -1]] = _ANY
    world.comm.Allreduce(MPI.IN_PLACE, shared, MPI.MIN)
    first_made, least, most = int(shared[0]), shared[1 : 1 + facts.size], -shared[1 + facts.size :]
    source = first_made if first_made < world.size else 0
    if 0 <= most[-1] != least[-1]:
        texts = world.allgather_object(forced)
        other = next(rank for rank, text in enumerate(texts) if text != texts[0])
        error = ValueError(
            f"{VARIABLE} is {texts[0] or 'unset'} on rank 0 and {texts[other] or 'unset'} on rank {other}; "
            "set it alike on all ranks, with the launcher's option for environment variables"
        )
        raise raised_by_all(error, world.size)
    common = [name for name, low, high in zip(TAKES, least, most, strict=False) if low == high != 0]
    if least[-1] not in (0, _ANY):
        forced = world.comm.bcast(forced, source)
        if follows:
            os.environ[VARIABLE] = forced  # for the meshes to come
        found = Choice.parse(forced)
        if lacking := {*found.libraries.values()}.difference(common):
            name = min(lacking)
            error = ValueError(
                f"{VARIABLE}={forced} wants {name}, but not every rank has the same version of it; "
                f"pip install 'mpishard[{name}]' in the environment of all ranks, or unset {VARIABLE}"
            )
            raise raised_by_all(error, world.size)
    elif common:
        found = Choice.parse(world.comm.bcast(_own_text(common) if world.rank == source else "", source))
    else:
        found = Choice()
    shared_by_all = Common(frozenset(common), bool(least[-2]))
    status = Status.FOR_NOW if spawned and first_made == world.size else Status.MADE
    choice.activate(found, common, bfloat16=shared_by_all.bfloat16, status=status)
    return shared_by_all


def _own_text(common: list[str]) -> str:
    """The choice that was made on this rank, or else the fastest."""
    if choice.is_made():
        return str(choice.active())
    from mpishard.backend.products.timing import fastest

    return str(fastest(common))


def _mark(text: str) -> int:
    return zlib.crc32(text.encode()) + 1 if text else 0
