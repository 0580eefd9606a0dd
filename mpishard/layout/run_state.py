"""The state of a run, rank by rank: arrays over the tensors of a model, each with its layout, and a few numbers.

Checkpoints, resharding and resizing work on it alone; they know neither optimizers nor models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpishard.arguments import printable, shown
from mpishard.layout.tensors import LocalLayout, ModelParallelRank, ParameterSpec, cut_holding

Array = Any
Range = tuple[int, int]

# The names of the parameters and of a slot of optimizer state among the arrays of a run.
PARAMETERS = "parameters"
SLOT = "optimizer/{}"
# The names of the compression errors: of gradients, and of averages of parameters.
GRADIENT_ERRORS = "gradient_errors"
AVERAGE_ERRORS = "average_errors"

_LONGEST = 500  # characters of a value in a message
_MOST = 2**53  # all whole numbers up to here are floats


@dataclass(frozen=True)
class Shard:
    """This rank's part of one array over all tensors of a model.

    Parameters
    ----------
    kind : str
        ``"parameters"``, or ``"optimizer/exp_avg"`` for the slot ``exp_avg``; the same on all ranks.
    array : 1-D array
        NumPy or device memory: the live array, not a copy.
    holding : tuple of Piece
        The local layout of `array`.
    counted : tuple of Piece
        The primary pieces, or parts of pieces: over all ranks each element of each tensor is in `counted` exactly
        once, also where it is replicated.
    required : bool
        If False, a source may lack this kind, or elements of it; these become zero.
    """

    kind: str
    array: Array
    holding: LocalLayout
    counted: LocalLayout
    required: bool = True


@dataclass(frozen=True)
class RunState:
    """All that a run needs to continue.

    Parameters
    ----------
    specs : tuple of ParameterSpec
        All tensors of the model, the same on all ranks.
    shards : tuple of Shard
        Of the same kinds in the same order on all ranks.
    facts : mapping
        The metadata, the same on all ranks; attributes of a checkpoint.  Values are numbers, strings, booleans and 1-D
        arrays of numbers; under a name that ends in ``.json``, anything that JSON can hold.
    """

    specs: tuple[ParameterSpec, ...]
    shards: tuple[Shard, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each shard, in their order."""
        return tuple(shard.kind for shard in self.shards)

    def with_facts(self, facts: Mapping[str, Any]) -> RunState:
        """A copy with further facts.

        Parameters
        ----------
        facts : mapping
            Of values as in `facts` of the class.

        Returns
        -------
        RunState
            With the same specs and shards.

        Raises
        ------
        ValueError
            If a name is taken.
        """
        taken = sorted(self.facts.keys() & facts.keys())
        if taken:
            raise ValueError(f"the fact {taken[0]!r} is one of the run's own; give yours another name")
        return replace(self, facts={**self.facts, **facts})


def check_state(name: str, state: Any) -> None:
    """Raise TypeError, with the name of the argument, unless this is a RunState."""
    if not isinstance(state, RunState):
        raise TypeError(f"{name}={shown(state)} must be a RunState, as optimizer.state.capture() returns")


def pieces_of_ranges(pieces: LocalLayout, ranges: Sequence[Range], starts: Sequence[int]) -> LocalLayout:
    """The pieces of an array that holds ascending ranges of another array, whose local layout is `pieces`.

    `starts` has for each range the element of the new array at which it begins.
    """
    found = []
    for bounds, offset in zip(ranges, starts, strict=True):
        found += [replace(piece, start=piece.start + offset) for piece in cut_holding(pieces, [bounds])]
    return tuple(found)


def counted_pieces(holding: LocalLayout, specs: Sequence[ParameterSpec], place: ModelParallelRank) -> LocalLayout:
    """The pieces of which this model-parallel rank has the primary copy, the first of its copies and ties."""
    counts = {spec.name: place.is_primary(spec) for spec in specs}
    return tuple(piece for piece in holding if counts[piece.name])


def check_same_tensors(
    what: str,
    saved: Sequence[tuple[str, tuple[int, ...]]],
    wanted: Sequence[tuple[str, tuple[int, ...]]],
    remedy: str,
) -> None:
    """Raise ValueError unless both name the same tensors with the same shapes, in whatever order.

    The message says `what` was saved, some of the differences and the number of others, and the `remedy`.
    """
    ours, theirs = dict(wanted), dict(saved)
    if ours == theirs:
        return
    missing = [name for name in ours if name not in theirs]
    surplus = [name for name in theirs if name not in ours]
    changed = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    differences = [
        *(f"{name} {ours[name]} is not in it" for name in missing[:2]),
        *(f"it has {name} {theirs[name]} besides" for name in surplus[:2]),
        *(f"{name} is {theirs[name]} there and {ours[name]} here" for name in changed[:2]),
    ]
    more = len(missing) + len(surplus) + len(changed) - len(differences)
    if len(theirs) != len(ours):
        tensors = f"{len(theirs)} tensor{'s' if len(theirs) != 1 else ''}"
        differences.insert(0, f"it has {tensors} and this model {len(ours)}")
    raise ValueError(
        f"{what} is of another model: {'; '.join(map(brief, differences))}"
        f"{f'; and {more} more differ' if more else ''}.  {remedy}"
    )


def whole_fact(facts: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 0) -> int:
    """A fact that must be a whole number from `least` to 2**53; the default if it is missing.  ValueError otherwise."""
    value = facts.get(name, default)
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"{_found(facts, name)}, which must be a whole number of at least {least}")
    return value


def finite_fact(facts: Mapping[str, Any], name: str, default: float | None = None, *, above: float = 0.0) -> float:
    """A fact that must be a finite number above a bound, or the default if it is missing; ValueError otherwise."""
    value = facts.get(name, default)
    if type(value) not in (int, float) or not above < value < math.inf:
        raise ValueError(f"{_found(facts, name)}, which must be a finite number above {above:g}")
    return float(value)


def names_fact(facts: Mapping[str, Any], name: str) -> list[str]:
    """A fact that must be a list of names, empty if it is missing; ValueError if it is anything else."""
    value = facts.get(name, [])
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{_found(facts, name)}, which must be a list of names")
    return list(value)


def _found(facts: Mapping[str, Any], name: str) -> str:
    return f"the saved state has {name}={brief(facts[name])}" if name in facts else f"the saved state has no {name}"


def brief(value: Any) -> str:
    """A value as a text for a message, cut to 500 characters: a value read from a file may be a huge table."""
    text = printable(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def link_name(name: str) -> str:
    """A tensor's name as one HDF5 link, another one for each name.

    A slash would make a group, whose name may be that of a data set too; a zero byte would end the name.
    """
    name = name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return "%2E" if name == "." else name
