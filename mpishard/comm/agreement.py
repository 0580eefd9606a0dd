"""Agreement of ranks before they continue: on arguments, libraries for matrix products, and errors of some of them.

All ranks raise one error where arguments or settings differ, or where the user's code failed on any rank. `opening` is
the beginning of each public collective call and constructor.
"""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Number
from pathlib import PurePath
from typing import Any

import numpy as np
from mpi4py import MPI

from mpishard.arguments import listed
from mpishard.backend import array as arrays
from mpishard.backend.gemm import choice
from mpishard.backend.gemm.choice import VARIABLE, Choice
from mpishard.backend.gemm.libraries import TAKES, Offer
from mpishard.comm.axis import Axis, ModelParallelGroup
from mpishard.comm.capabilities import heals_in_place
from mpishard.comm.errors import on_any
from mpishard.launch.job_notes import raised_by_all

_MOST_NAMED = 4
REMEDY = "give the same on every rank"
_CALL = "call"  # the setting that is the name of a public call


def in_words(what: str, which: Sequence[Any]) -> str:
    """Ranks or hosts as a text such as ``"ranks 0, 2"``, the first few by name; `what` is in the singular."""
    return f"{what}{'s' if len(which) > 1 else ''} {listed(which)}"


def held_by(ranks: Sequence[int], values: Sequence[str]) -> list[str]:
    """Each of the values of ranks, with those that have it: ``["3 on rank 0", "4 on ranks 1, 2"]``."""
    holders: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    return [f"{value} on {in_words('rank', members)}" for value, members in holders.items()]


@contextlib.contextmanager
def opening(ranks: Axis | ModelParallelGroup | None, call: str) -> Iterator[dict[str, Any]]:
    """The beginning of a public collective call: one small all-reduce, before all other messages. Collective.

    In the block a rank checks its arguments, and enters into the dict those that must be the same on all ranks. At its
    end all ranks raise what the block of any rank has raised, or ValueError if they entered different values or have
    come to different calls. `call` names it for the user. None: this process is alone, as on an axis of one rank.
    A call within the block of another one on these ranks sends nothing: what it finds is compared by that one.
    """
    if ranks is not None and ranks.opened is not None:
        yield ranks.opened
        return
    same: dict[str, Any] = {}
    problem: BaseException | None = None
    alone = ranks is None or len(ranks.members) == 1  # and perhaps nobody has started MPI
    if ranks is not None:
        ranks.opened = same
    try:
        yield same
    except (Exception, SystemExit) as error:
        if alone:
            raise
        problem = error
    finally:
        if ranks is not None:
            ranks.opened = None
    if ranks is not None and not alone:
        settings = {_CALL: call} | {name: text_of(value) for name, value in same.items()}
        agree_on_settings(ranks, settings, problem, what=f"arguments of {call}")


def agree_on_settings(
    ranks: Axis | ModelParallelGroup,
    settings: Mapping[str, str],
    problem: BaseException | None = None,
    *,
    what: str = "settings",
    remedy: str = REMEDY,
) -> None:
    """Raise on all of some ranks if any has a problem, or if their settings differ. Collective over the ranks.

    A fingerprint travels; only where these differ do the values, for a ValueError that names the settings that differ
    and the ranks that have each value. `what` and `remedy` are for its message.
    """
    number = fingerprint(settings)
    # As long as what ranks compare before a step: a rank that has come here alone, and those in a step, find out.
    shared = np.array([problem is not None, number, -number, 0, 0, 0], np.int64)
    ranks.all_reduce(shared, op="max", label="control")
    if shared[0]:
        ranks.raise_together(problem)
    if shared[1] != -shared[2]:
        raise gather_difference(ranks, settings, what, remedy)


def gather_difference(
    ranks: Axis | ModelParallelGroup, settings: Mapping[str, str], what: str = "settings", remedy: str = REMEDY
) -> ValueError:
    """The error for settings that differ between some ranks, with the ranks that have each value.

    Collective over them.
    """
    return _difference_error(ranks.members, ranks.allgather_object(dict(settings)), what, remedy)


def gather_in_call(ranks: Axis | ModelParallelGroup, call: str, value: Any) -> list[Any]:
    """The value of each rank, where a comparison has found that ranks differ. Collective over them.

    Raises ValueError on all ranks if some have come to another call, and are in `gather_difference`.
    """
    by_rank = ranks.allgather_object({_CALL: call, "value": value})
    if any(each.get(_CALL) != call for each in by_rank):
        raise _difference_error(ranks.members, by_rank)
    return [each["value"] for each in by_rank]


def _difference_error(
    members: Sequence[int], by_rank: Sequence[Mapping[str, Any]], what: str = "settings", remedy: str = REMEDY
) -> ValueError:
    """The error that names the settings that differ, and the ranks that have each value."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for each in by_rank for name in each):
        missing = "another" if name == _CALL else "not there"
        held = held_by(members, [each.get(name, missing) for each in by_rank])
        if len(held) > 1:
            more = f" and {len(held) - _MOST_NAMED} more values" if len(held) > _MOST_NAMED else ""
            # For a schedule, the first step that differs is enough.
            found.setdefault(name.partition("(")[0], f"{name} is {', '.join(held[:_MOST_NAMED])}{more}")
    if _CALL in found:  # their arguments differ for that reason
        found, what, remedy = {_CALL: found[_CALL]}, "collective calls in one order", "make each call on every rank"
    texts = [text for name, text in found.items() if not name.endswith("scalars")]  # they follow from other settings
    texts = texts or list(found.values())
    more = f"; and {len(texts) - _MOST_NAMED} others" if len(texts) > _MOST_NAMED else ""
    error = ValueError(f"all ranks must have the same {what}, but {'; '.join(texts[:_MOST_NAMED])}{more}: {remedy}")
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
    if value is None or isinstance(value, Number | str | bytes | PurePath):
        return str(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(text_of, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {text_of(each)}' for key, each in value.items())}}}"
    if arrays.is_array(value):
        content = np.ascontiguousarray(arrays.to_host(value)).reshape(-1).view(np.uint8).data
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        return f"{value.dtype} {value.shape} {digest}"
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
        self.is_raised = False  # by all
        # Called where all workers know that one has failed; returns the ranks that raise the error.
        self.on_failure: Callable[[], Axis] = lambda: world
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
        if on_any(self._world, self.error is not None):
            self.raise_over(self.on_failure())

    def raise_over(self, axis: Axis) -> None:
        """The part of `raise_on_all` after all ranks have met; `axis`: those that raise. Collective over them."""
        error, self.error, self.is_raised = self.error, None, True
        axis.raise_together(error)


class OtherHasLeft(Exception):
    """Another rank of an axis has left a block of `left_together` by an error."""


@contextlib.contextmanager
def left_together(axis: Axis) -> Iterator[None]:
    """A context whose block all ranks of an axis leave where one leaves it by an error. Collective.

    The others raise OtherHasLeft, before the next operation of the block, which calls ``axis.meet()``, or at its end.
    """
    if axis.size == 1:
        yield
        return
    before, other_has_left = axis.meet, False

    def meet(leaves: bool = False) -> None:
        nonlocal other_has_left
        if not other_has_left:
            other_has_left = on_any(axis, leaves) and not leaves
        if other_has_left:
            raise OtherHasLeft(f"another rank of axis {axis.name!r} has failed")

    axis.meet = meet
    try:
        yield
        meet()
    except MPI.Exception:
        raise
    except (Exception, SystemExit) as error:
        if other_has_left:  # which the user's code may have made another error of
            raise OtherHasLeft(str(error)) from error
        meet(leaves=True)
        raise
    finally:
        axis.meet = before


# The agreement of ranks on the libraries that multiply matrices.

# The mark of a rank without the variable; larger than all marks.
_ANY = 2**40


def agree_on_gemm_libraries(world: Axis, offer: Offer | None = None, forced: str | None = None) -> None:
    """Multiply by the same libraries on all ranks from now on. Collective over `world`.

    The environment variable MPISHARD_PRODUCTS decides which; without it those that are known to be faster on the
    processors of all ranks. Only libraries of which all ranks have the same version are taken. Ranks without the
    variable do as those that have it: launchers do not pass all variables on to processes that are spawned. `offer` and
    `forced` stand for the libraries and the variable of this process.

    Raises ValueError on all ranks if the variable differs between ranks, cannot be read, or names a library that some
    rank lacks.
    """
    offer = Offer.here() if offer is None else offer
    forced = choice.chosen_by_variable() if forced is None else forced
    marks = [_mark(f"{name} {offer.versions[name]}") if name in offer.versions else 0 for name in TAKES]
    facts = np.array([*marks, offer.intel, offer.bfloat16, _mark(forced)], np.int64)
    shared = np.array([*facts, *-facts])
    if not forced:
        shared[[facts.size - 1, -1]] = _ANY
    world.comm.Allreduce(MPI.IN_PLACE, shared, MPI.MIN)
    least, most = shared[: facts.size], -shared[facts.size :]
    common = [name for name, low, high in zip(TAKES, least, most, strict=False) if low == high != 0]
    of_all = Offer({name: offer.versions[name] for name in common}, bool(least[-3]), bool(least[-2]))
    if least[-1] == _ANY:
        choice.activate(choice.fastest_of(of_all))
        return
    given = [(rank, text) for rank, text in enumerate(world.allgather_object(forced)) if text]
    (first, forced), *others = given
    if least[-1] != most[-1]:
        other, text = next(each for each in others if each[1] != forced)
        error = ValueError(
            f"{VARIABLE} is {forced} on rank {first} and {text} on rank {other}; "
            "set the same on all ranks, with the launcher's option for environment variables"
        )
        raise raised_by_all(error, world.size)
    found = Choice.parse(forced)
    if lacking := {*found.libraries.values()}.difference(of_all.versions):
        name = min(lacking)
        error = ValueError(
            f"{VARIABLE}={forced} wants {name}, but not every rank has the same version of it; "
            f"pip install 'mpishard[{name}]' in the environment of all ranks, or unset {VARIABLE}"
        )
        raise raised_by_all(error, world.size)
    choice.activate(found.limited_to(of_all.versions, bfloat16=of_all.bfloat16))


def _mark(text: str) -> int:
    return zlib.crc32(text.encode()) + 1 if text else 0
