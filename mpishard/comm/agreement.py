"""How ranks agree before they continue: on settings, and on errors that only some of them have.

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
from mpishard.comm.mesh import ModelParallelGroup
from mpishard.comm.mesh_facts import in_words
from mpishard.launch.job_notes import raised_by_all

# The check that ranks have the same settings; if not, all raise one error.
#
# Each rank sends a fingerprint; only if these differ do ranks exchange the values, for the message.

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
    ranks: Axis | ModelParallelGroup, settings: Mapping[str, str], what: str = "settings", way_out: str = WAY_OUT
) -> ValueError:
    """The error for settings that differ between some ranks.

    Collective over the ranks.

    Parameters
    ----------
    ranks : Axis or ModelParallelGroup
        Those that compare.
    settings : mapping of str to str
        By name the values of this rank.
    what : str
        Names the settings, for the message.
    way_out : str
        The remedy, for the message.

    Returns
    -------
    ValueError
        With the settings that differ, and the ranks that have each value.
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
    """A number of 62 bits that depends on all settings, and not on their order.

    Not collective.

    Parameters
    ----------
    settings : mapping of str to str
        By name.

    Returns
    -------
    int
        The same in every process.
    """
    text = repr(sorted(settings.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


def text_of(value: Any) -> str:
    """A value as text that is the same in every process; functions and objects appear by name only.

    Not collective.

    Parameters
    ----------
    value : any
        Of a setting.

    Returns
    -------
    str
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
#
# If the rank raised it at once, the others would wait for that rank in the collectives of the step.


class HeldError:
    """Holds the first error of the user's code on this rank.  Creation is not collective.

    Parameters
    ----------
    world : Axis
        All ranks.
    transactional : bool
        Whether an error counts as a death where MPI informs the others of it (ULFM): then it is raised at once.

    Attributes
    ----------
    error : Exception, SystemExit or None
        None: the user's code has not failed here.
    meet : callable
        Called where all workers know that one has failed; returns the ranks that raise the error.
    """

    def __init__(self, world: Axis, transactional: bool) -> None:
        self.error: Exception | SystemExit | None = None
        self.meet: Callable[[], Axis] = lambda: world
        self._world, self._transactional = world, transactional  # a worker may be alone with spares
        self._as_death = transactional and heals_in_place()

    @contextlib.contextmanager
    def holding(self, alone: bool = True) -> Iterator[None]:
        """Hold an error of the block.

        Parameters
        ----------
        alone : bool
            Whether no other rank waits for this one inside the block.  False: the error is raised at once.

        Yields
        ------
        None
            Errors of MPI are never held.
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
        """Raise the error of any rank on all ranks; without one do nothing.  Collective over the workers.

        Raises
        ------
        Exception
            On a rank that has failed its own error, elsewhere one that names the first such rank and its error.
        SystemExit
            If the first such rank has called ``sys.exit``: all ranks end with its code.
        """
        failed = np.array([self.error is not None], np.int64)
        if self._world.all_reduce(failed, op="max", label="control")[0]:
            self.raise_over(self.meet())

    def raise_over(self, axis: Axis) -> None:
        """The part of `raise_on_all` after all ranks have met; `axis`: those that raise.  Collective over them.

        Parameters
        ----------
        axis : Axis
            As above.
        """
        error, self.error = self.error, None
        axis.raise_together(error)
