"""The check that all ranks pass the same arguments and have the same settings; if not, all raise one error.

`agree_on_step` compares before each step: the parameters, the divisor and the settings.  `agree_on_beginning` is for
what all do between two steps.  `agree_on_settings` compares any settings by name, such as those of an elastic run.
Each rank sends a fingerprint; only if these differ do ranks exchange the values, for the message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from mpishard.comm.axis import Axis
from mpishard.data_parallel.model_parallel_group import ModelParallelGroup
from mpishard.parameters.flat import FlatParameters

_MOST_SHOWN = 4
_WAY_OUT = "give the same on every rank"


class Compared(Protocol):
    """Settings that ranks compare."""

    @property
    def fingerprint(self) -> int: ...
    def by_name(self) -> dict[str, str]: ...


def agree_on_settings(
    ranks: Axis | ModelParallelGroup,
    settings: Mapping[str, str],
    problem: Exception | None = None,
    *,
    what: str = "settings",
    way_out: str = _WAY_OUT,
) -> None:
    """Raise on all of some ranks if any has a problem, or if their settings differ.

    Collective over the ranks.

    Parameters
    ----------
    ranks : Axis or ModelParallelGroup
        Those that compare.
    settings : mapping of str to str
        By name the values of this rank.
    problem : Exception, optional
        What is wrong on this rank.
    what : str
        Names the settings, for the message.
    way_out : str
        The remedy, for the message.

    Raises
    ------
    ValueError
        With the settings that differ, and the ranks that have each value.
    """
    number = fingerprint(settings)
    shared = np.array([problem is not None, number, -number], np.int64)
    ranks.all_reduce(shared, op="max", label="control")
    if shared[0]:
        ranks.raise_together(problem)
    if shared[1] != -shared[2]:
        raise differing(ranks, settings, what, way_out)


def differing(
    ranks: Axis | ModelParallelGroup, settings: Mapping[str, str], what: str = "settings", way_out: str = _WAY_OUT
) -> ValueError:
    """The error for settings that differ between `ranks`.  Collective over them."""
    by_rank = dict(zip(ranks.members, ranks.allgather_object(dict(settings)), strict=True))
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for each in by_rank.values() for name in each):
        holders: dict[str, list[int]] = {}
        for rank, each in by_rank.items():
            holders.setdefault(each.get(name, "not there"), []).append(rank)
        if len(holders) > 1:
            shown = [f"{value} on {_ranks(members)}" for value, members in holders.items()]
            more = f" and {len(shown) - _MOST_SHOWN} more values" if len(shown) > _MOST_SHOWN else ""
            # For a schedule, the first step that differs is enough.
            found.setdefault(name.partition("(")[0], f"{name} is {', '.join(shown[:_MOST_SHOWN])}{more}")
    shown = [text for name, text in found.items() if not name.endswith("scalars")]  # they follow from other settings
    shown = shown or list(found.values())
    more = f"; and {len(shown) - _MOST_SHOWN} others" if len(shown) > _MOST_SHOWN else ""
    return ValueError(f"all ranks must have the same {what}, but {'; '.join(shown[:_MOST_SHOWN])}{more}: {way_out}")


def agree_on_step(
    ranks: Axis | ModelParallelGroup,
    parameters: FlatParameters | None,
    count: float | None,
    problem: Exception | None,
    settings: Compared | None = None,
) -> None:
    """Raise on all of some ranks if any has a problem, or if their arguments of `step` differ.

    Collective over the ranks.

    Parameters
    ----------
    ranks : Axis or ModelParallelGroup
        Those that compare.
    parameters : FlatParameters or None
        Those of this rank; None where there is a problem.
    count : float or None
        The divisor that this rank was given.
    problem : Exception or None
        What is wrong on this rank.
    settings : Compared, optional
        Those of the optimizer, which are compared too.

    Raises
    ------
    ValueError
        On every rank, if something differs; a problem of any rank is raised as it is.
    """
    model = -1 if parameters is None else parameters.fingerprint
    if settings is not None:
        model ^= settings.fingerprint
    number = -1 if count is None else int(np.float64(count).view(np.int64))
    shared = np.array([problem is not None, model, -model, number, -number], np.int64)
    ranks.all_reduce(shared, op="max", label="control")
    if shared[0]:
        ranks.raise_together(problem)
    assert parameters is not None
    if shared[1] != -shared[2]:
        models = ranks.allgather_object((parameters.fingerprint, parameters.description))
        if settings is not None and len({model for model, _ in models}) == 1:
            raise differing(ranks, settings.by_name())
        found = ", ".join(f"rank {rank} {what}" for rank, (_, what) in zip(ranks.members, models, strict=True))
        raise ValueError(f"all ranks must have the same parameters in the same order; here: {found}")
    if shared[3] != -shared[4]:
        raise ValueError(f"count must be the global number, the same on all ranks; got {ranks.allgather_object(count)}")


def fingerprint(settings: Mapping[str, str]) -> int:
    """A number of 62 bits that depends on all settings, and not on their order."""
    text = repr(sorted(settings.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def _ranks(ranks: list[int]) -> str:
    """Ranks in words."""
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    more = f" and {len(ranks) - _MOST_SHOWN} others" if len(ranks) > _MOST_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def agree_on_beginning(world: Axis, has_begun: bool, settings: Compared) -> bool:
    """Raise on all ranks if only some have taken a first step, or if settings differ.

    Collective over the ranks.

    Parameters
    ----------
    world : Axis
        All ranks.
    has_begun : bool
        Whether this rank has.
    settings : Compared
        Those of the optimizer.

    Returns
    -------
    bool
        Whether all have.

    Raises
    ------
    ValueError
        On every rank, with the ranks that have not, or the settings that differ.
    """
    states = world.allgather_object((has_begun, settings.fingerprint))
    waiting = [rank for rank, (begun, _) in enumerate(states) if not begun]
    if waiting:
        if len(waiting) < len(states):
            raise ValueError(f"ranks {waiting} have not called step() yet")
        return False
    if len(set(states)) > 1:
        raise differing(world, settings.by_name())
    return True
