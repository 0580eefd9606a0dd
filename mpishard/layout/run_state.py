"""The state of a run, rank by rank: arrays over the tensors of a model, each with its layout, and a few numbers.

Checkpoints, resharding and resizing take it from whoever has it, and know neither optimizers nor models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mpishard.layout.local_layout import LocalLayout, ModelParallelRank, cut_holding
from mpishard.layout.specs import ParameterSpec

Array = Any
Range = tuple[int, int]

# What parameters and a slot of optimizer state are called among the arrays of a run.
PARAMETERS = "parameters"
SLOT = "optimizer/{}"
# What compression has left over, of gradients and of averages of parameters.
GRADIENT_ERRORS = "gradient_errors"
AVERAGE_ERRORS = "average_errors"

_LONGEST = 500  # characters of a value in a message
_MOST = 2**53  # all whole numbers up to here are floats


@dataclass(frozen=True)
class Shard:
    """What this rank holds of one array over all tensors of a model.

    Parameters
    ----------
    kind : str
        ``"parameters"``, or ``"optimizer/exp_avg"`` for the slot ``exp_avg``; the same on all ranks.
    array : 1-D array
        NumPy or device memory: the live array, not a copy.
    holding : tuple of Piece
        The slices of tensors that lie in it.
    counted : tuple of Piece
        Those of them, or parts of those, that this rank stands for: between all ranks each element of each tensor is
        counted once, whatever is replicated.
    required : bool
        If False, what it is filled from may lack this kind, or elements of it: they become zero.
    """

    kind: str
    array: Array
    holding: LocalLayout
    counted: LocalLayout
    required: bool = True


@dataclass(frozen=True)
class RunState:
    """What a run needs to go on.

    Parameters
    ----------
    specs : tuple of ParameterSpec
        All tensors of the model, the same on all ranks.
    shards : tuple of Shard
        Of the same kinds in the same order on all ranks.
    facts : mapping
        The same on all ranks, as attributes of a checkpoint: numbers, strings and booleans by name; under names that
        end in ``.json`` what JSON can hold; under others 1-D arrays of numbers.
    """

    specs: tuple[ParameterSpec, ...]
    shards: tuple[Shard, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(shard.kind for shard in self.shards)

    def with_facts(self, facts: Mapping[str, Any]) -> RunState:
        """The same with further facts; ValueError if one has the name of one that is there."""
        taken = sorted(self.facts.keys() & facts.keys())
        if taken:
            raise ValueError(f"the fact {taken[0]!r} is one of the run's own; give yours another name")
        return replace(self, facts={**self.facts, **facts})


def pieces_of_ranges(pieces: LocalLayout, ranges: Sequence[Range], starts: Sequence[int]) -> LocalLayout:
    """Pieces of an array in which range ``i`` of another one, whose pieces are given, begins at element ``starts[i]``.

    Parameters
    ----------
    pieces : tuple of Piece
        What the other array holds, end to end.
    ranges : sequence of (start, stop)
        Ascending ranges of the other array.
    """
    found = []
    for bounds, place in zip(ranges, starts, strict=True):
        found += [replace(piece, start=piece.start + place) for piece in cut_holding(pieces, [bounds])]
    return tuple(found)


def counted_pieces(holding: LocalLayout, specs: Sequence[ParameterSpec], place: ModelParallelRank) -> LocalLayout:
    """Those pieces that a rank at this place stands for, of replicas and ties the first."""
    counts = {spec.name: place.counts(spec) for spec in specs}
    return tuple(piece for piece in holding if counts[piece.name])


def check_same_tensors(
    what: str, saved: Sequence[tuple[str, tuple[int, ...]]], wanted: Sequence[tuple[str, tuple[int, ...]]]
) -> None:
    """Raise ValueError unless both name the same tensors with the same shapes, in whatever order."""
    ours, theirs = dict(wanted), dict(saved)
    if ours == theirs:
        return
    missing = [name for name in ours if name not in theirs]
    surplus = [name for name in theirs if name not in ours]
    changed = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    told = [
        *(f"{name} {ours[name]} is not in it" for name in missing[:2]),
        *(f"it has {name} {theirs[name]} besides" for name in surplus[:2]),
        *(f"{name} is {theirs[name]} there and {ours[name]} here" for name in changed[:2]),
    ]
    raise ValueError(
        f"{what} is of another model: it has {len(theirs)} tensors and this model {len(ours)}; "
        f"{'; '.join(map(brief, told))}"
    )


def whole_fact(facts: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 0) -> int:
    """The whole number that a fact is; ValueError if facts that were read have anything else there."""
    value = facts.get(name, default)
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"{_told(facts, name)}, which must be a whole number of at least {least}")
    return value


def finite_fact(facts: Mapping[str, Any], name: str, default: float | None = None, *, above: float = 0.0) -> float:
    """The finite number above a bound that a fact is; ValueError if facts that were read have anything else there."""
    value = facts.get(name, default)
    if type(value) not in (int, float) or not above < value < math.inf:
        raise ValueError(f"{_told(facts, name)}, which must be a finite number above {above:g}")
    return float(value)


def names_fact(facts: Mapping[str, Any], name: str) -> list[str]:
    """The list of names that a fact is, empty where it is missing; ValueError if there is anything else."""
    value = facts.get(name, [])
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{_told(facts, name)}, which must be a list of names")
    return list(value)


def _told(facts: Mapping[str, Any], name: str) -> str:
    return f"the saved state has {name}={brief(facts[name])}" if name in facts else f"the saved state has no {name}"


def brief(value: Any) -> str:
    """A value in words for a message; what was read may be a table of a hundred thousand numbers."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def link_name(name: str) -> str:
    """A tensor's name as one HDF5 link.

    A slash would make a group, which cannot have the name of a data set too, and a link ends at a zero byte.
    """
    name = name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return "%2E" if name == "." else name
