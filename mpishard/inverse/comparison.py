"""The results that must be identical on the user's ranks, their comparison, and the error where they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.mesh import Mesh
from mpishard.layout.run_state import brief
from mpishard.layout.tensors import Piece
from mpishard.parameters.flat import FlatParameters

Array = Any
_PARTS = "say reduction='sum'"


class Comparison:
    """Compares vectors by their hashes: the first one that ranks give, in debug mode all.

    Ranks that hold the same slices of the parameters give the same vector, unless they give terms of a sum. Ranks of
    one tensor axis give the same for each tensor that all of them hold, unless its terms are summed over that axis.
    `sums`: vectors are summed over the data axis, and those of `partial` tensors over the tensor axis.
    """

    def __init__(self, mesh: Mesh, parameters: FlatParameters, sums: bool) -> None:
        self._mesh = mesh
        self._sums = sums
        pieces = zip(parameters.local, parameters.pieces, strict=True)
        self._replicas: list[Piece] = [
            piece
            for spec, piece in pieces
            if mesh.tensor.size > 1 and spec.tensor_dim is None and not (sums and spec.partial)
        ]
        self._is_due = True

    def hashes(self, flat: Array | None) -> tuple[int, int]:
        """Hashes of a vector, and of its tensors that all tensor ranks hold, which ranks exchange before `check`.

        0 where nothing is to be compared; None for a missing vector, which other ranks learn elsewhere.
        """
        if not self._is_due or flat is None:
            return 0, 0
        return 0 if self._sums else digest(flat), digest(*self._parts(flat))

    def check(self, what: str, flat: Array, hashes: np.ndarray) -> None:
        """Raise ValueError on all ranks if two differ that must not; `hashes` has a row for each rank.

        Collective over the mesh if a comparison is due.
        """
        if not self._is_due:
            return
        world, place = self._mesh.world, self._mesh.coordinates
        own = (place["pipeline"], "slice", place["tensor"]), (place["pipeline"], "copies", place["data"])
        groups = world.allgather_object(own)
        if _first_pair([group for group, _ in groups], hashes[:, 0].tolist()) is not None:
            raise _differing(f"values of {what}", hashes[:, 0])
        copies = [group for _, group in groups]
        if _first_pair(copies, hashes[:, 1].tolist()) is not None:
            raise self._of_copies(what, flat, copies)
        self._is_due = self._mesh.debug

    def _parts(self, flat: Array) -> list[Array]:
        return [flat[piece.start : piece.start + piece.size] for piece in self._replicas]

    def _of_copies(self, what: str, flat: Array, groups: Sequence[Any]) -> ValueError:
        """The error for a tensor that differs between tensor ranks.  Collective over the mesh."""
        own = {piece.name: digest(part) for piece, part in zip(self._replicas, self._parts(flat), strict=True)}
        by_rank = self._mesh.world.allgather_object(own)
        names = dict.fromkeys(name for each in by_rank for name in each)
        pairs = ((name, _first_pair(groups, [each.get(name) for each in by_rank])) for name in names)
        name, (rank, other) = next((name, pair) for name, pair in pairs if pair is not None)
        parts = f"say ParameterSpec({name!r}, ..., partial=True) if each gives its part of a sum, or " * self._sums
        return ValueError(
            f"the function gives different values of {what} of {name!r} on rank {rank} and on rank {other}, which both "
            f"hold this tensor whole, and their copies would drift apart: {parts}give the same on both"
        )


def exchange(
    world: Axis, problem: BaseException | None, value: float, numbers: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Exchange the results of an evaluation on each rank. Collective over the axis, in one call.

    `numbers` are as many on each rank. Returns the values by rank, with one NaN and one zero, and a row of the numbers
    for each rank. Raises on all ranks if any has a problem.
    """
    bits = np.float64(math.nan if math.isnan(value) else value + 0.0).view(np.int64)
    own = np.array([problem is not None, bits, *numbers], np.int64)
    facts = np.empty(own.size * world.size, np.int64)
    facts = world.all_gather(facts, own, [own.size] * world.size, label="control").reshape(-1, own.size)
    if facts[:, 0].any():
        world.raise_together(problem)
    return np.ascontiguousarray(facts[:, 1]).view(np.float64), facts[:, 2:]


def check_alike(what: str, by_rank: np.ndarray, parts: str = _PARTS) -> None:
    """Raise ValueError, the same on all ranks, if ranks have different results for one point.

    `what` names in the plural the values from `exchange`, or hashes of vectors, the same array on all ranks; `parts` is
    the way out if each rank gives its part of a sum.
    """
    if len(set(by_rank.view(np.int64).tolist())) > 1:
        raise _differing(what, by_rank, parts)


def _differing(what: str, by_rank: np.ndarray, parts: str = _PARTS) -> ValueError:
    """The error of ranks that give different results for one point."""
    hashed = by_rank.dtype == np.int64
    values = [f"{each:x}" if hashed else repr(each) for each in by_rank.tolist()]
    first = values[0]
    other = next(rank for rank, value in enumerate(values) if value != first)
    same = [rank for rank, value in enumerate(values) if value == first]
    return ValueError(
        f"the function gives different {what}{' (here by their hashes)' * hashed} for one point: {first} on ranks "
        f"{brief(same)} and {values[other]} on rank {other}.  If each rank gives its part of the sum, {parts}; else "
        "make it deterministic, the same on all ranks"
    )


def _first_pair(groups: Sequence[Any], values: Sequence[Any]) -> tuple[int, int] | None:
    """The first two ranks of one group that have different values."""
    first: dict[Any, int] = {}
    for rank, group in enumerate(groups):
        if values[first.setdefault(group, rank)] != values[rank]:
            return first[group], rank
    return None


def digest(*vectors: Array) -> int:
    """A hash of vectors on the host or a device that fits int64; at least 0."""
    hasher = xxhash.xxh3_64()
    for vector in vectors:
        hasher.update(np.ascontiguousarray(arrays.to_host(vector)).data)
    return hasher.intdigest() >> 2
