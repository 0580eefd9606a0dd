"""Agreement of ranks before they continue: on settings, and on errors that only some of them have.

All ranks raise one error where settings differ, or where the user's code failed on any rank.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.mesh import ModelParallelGroup, in_words
from mpishard.launch.job_notes import raised_by_all

_MOST_SHOWN = 4
WAY_OUT = "give the same on every rank"


def agree_on_settings(
    ranks: Axis | ModelParallelGroup,
    settings: Mapping[str, str],
    problem: Exception | None = None,
    *,
    what: str = "settings",
    way_out: str = WAY_OUT,
) -> None:
    """Raise on all of some ranks if any has a problem, or if their settings differ. Collective over the ranks.

    A fingerprint travels; only where these differ do the values, for a ValueError that names the settings that differ
    and the ranks that have each value. `what` and `way_out` are for its message.
    """
    number = fingerprint(settings)
    shared = np.array([problem is not None, number, -number], np.int64)
    ranks.all_reduce(shared, op="max", label="control")
    if shared[0]:
        ranks.raise_together(problem)
    if shared[1] != -shared[2]:
        raise differing(ranks, settings, what, way_out)


def differing(
    ranks: Axis | ModelParallelGroup, settings: Mapping[str, str], what: str = "settings", way_out: str = WAY_OUT
) -> ValueError:
    """The error for settings that differ between some ranks, with the ranks that have each value.

    Collective over them.
    """
    by_rank = dict(zip(ranks.members, ranks.allgather_object(dict(settings)), strict=True))
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for each in by_rank.values() for name in each):
        holders: dict[str, list[int]] = {}
        for rank, each in by_rank.items():
            holders.setdefault(each.get(name, "not there"), []).append(rank)
        if len(holders) > 1:
            shown = [f"{value} on {in_words('rank', members)}" for value, members in holders.items()]
            more = f" and {len(shown) - _MOST_SHOWN} more values" if len(shown) > _MOST_SHOWN else ""
            # For a schedule, the first step that differs is enough.
            found.setdefault(name.partition("(")[0], f"{name} is {', '.join(shown[:_MOST_SHOWN])}{more}")
    shown = [text for name, text in found.items() if not name.endswith("scalars")]  # they follow from other settings
    shown = shown or list(found.values())
    more = f"; and {len(shown) - _MOST_SHOWN} others" if len(shown) > _MOST_SHOWN else ""
    error = ValueError(f"all ranks must have the same {what}, but {'; '.join(shown[:_MOST_SHOWN])}{more}: {way_out}")
    return raised_by_all(error, len(by_rank))


def fingerprint(settings: Mapping[str, str]) -> int:
    """A number of 62 bits that depends on all settings, not on their order, and is the same in every process."""
    text = repr(sorted(settings.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def text_of(value: Any) -> str:
    """A value as text that is the same in every process; functions and objects appear by name only.

    For dataclasses and arrays, too, it differs where values do.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if value is None or isinstance(value, bool | Real | str):
        return str(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(text_of, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {text_of(each)}' for key, each in value.items())}}}"
    if arrays.is_array(value):
        content = hashlib.blake2b(np.ascontiguousarray(arrays.to_host(value)).tobytes(), digest_size=8).hexdigest()
        return f"{value.dtype} {value.shape} {content}"
    if is_dataclass(value) and not isinstance(value, type):
        inside = (f"{field.name}={text_of(getattr(value, field.name))}" for field in fields(value) if field.compare)
        return f"{type(value).__name__}({', '.join(inside)})"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


# An error of the user's code on one rank, which all ranks raise where they next meet.


class DeferredError:
    """Keeps the first error of the user's code on this rank until all ranks raise it at their next meeting.

    If the rank raised it at once, the others would wait for that rank in the collectives of the step. Only if
    `transactional`, where an error counts as a death of which MPI informs the others (ULFM), it is raised at once.
    """

    def __init__(self, world: Axis, transactional: bool) -> None:
        self.error: Exception | SystemExit | None = None  # None: the user's code has not failed here
        # Called where all workers know that one has failed; returns the ranks that raise the error.
        self.meet: Callable[[], Axis] = lambda: world
        self._world, self._transactional = world, transactional  # a worker may be alone with spares
        self._as_death = transactional and heals_in_place()

    @contextlib.contextmanager
    def capture(self, alone: bool = True) -> Iterator[None]:
        """Keep an error of the block for later, unless MPI raises it.

        `alone`: no other rank waits for this one inside the block; else the error is raised at once.
        """
        try:
            yield
        except MPI.Exception:
            raise
        except (Exception, SystemExit) as error:
            if not alone or self._as_death or (self._world.size == 1 and not self._transactional):
                raise
            self.error = error

    def raise_on_all(self) -> None:
        """Raise the error of any rank on all ranks; without one do nothing. Collective over the workers.

        A rank that has failed raises its own error, the others one that names the first such rank and its error, or
        SystemExit if that rank has called ``sys.exit``: all ranks end with its code.
        """
        failed = np.array([self.error is not None], np.int64)
        if self._world.all_reduce(failed, op="max", label="control")[0]:
            self.raise_over(self.meet())

    def raise_over(self, axis: Axis) -> None:
        """The part of `raise_on_all` after all ranks have met; `axis`: those that raise. Collective over them."""
        error, self.error = self.error, None
        axis.raise_together(error)
