"""The transfers between ranks that turn one layout into another.

`mpishard.comm.reshard` carries them out, in resizes and for copies.  Reading a checkpoint needs none: each rank there
intersects its own boxes with the stored ones (`mpishard.checkpoint.load`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpishard.layout.boxes import Box, intersect, subtract
from mpishard.layout.tensors import LocalLayout, Piece


class Transfer(NamedTuple):
    """Copy a box of a tensor from a piece on one rank to a piece on another, or the same, rank; it lies inside both."""

    name: str
    box: Box
    source_rank: int
    source: Piece
    target_rank: int
    target: Piece


class Holders:
    """An index of the boxes that ranks hold of each tensor in a layout, made once for all target ranks."""

    def __init__(self, source: Sequence[LocalLayout]) -> None:
        held: dict[str, dict[Box, list[tuple[int, Piece]]]] = defaultdict(lambda: defaultdict(list))
        for rank, holding in enumerate(source):
            for piece in holding:
                if piece.size:
                    held[piece.name][piece.box].append((rank, piece))
        self._tensors = {name: _Boxes(boxes) for name, boxes in held.items()}

    def transfers_to(
        self, rank: int, holding: LocalLayout, lost: list[tuple[Piece, Box]] | None = None
    ) -> list[Transfer]:
        """The transfers to one rank with a new local layout, in the order of its pieces.

        Pieces with boxes that no rank holds are added to `lost`; without it they raise ValueError, as does a tensor
        with another number of dimensions.
        """
        plan: list[Transfer] = []
        for piece in holding:
            if not piece.size:
                continue
            tensor = self._tensors.get(piece.name, _NOBODY)
            copies = tensor.overlapping(piece)
            # The rank's own pieces come first: they cost no message.
            own = [each for each in tensor.of_rank.get(rank, ()) if intersect(piece.box, each.box) is not None]
            offers = itertools.chain(
                ((each.box, rank, each) for each in own),
                ((box, *copies_of_box[(rank + len(plan)) % len(copies_of_box)]) for box, copies_of_box in copies),
            )
            missing = [piece.box]
            for box, holder, source in offers:
                uncovered: list[Box] = []
                for part in missing:
                    common = intersect(part, box)
                    if common is None:
                        uncovered.append(part)
                    else:
                        plan.append(Transfer(piece.name, common, holder, source, rank, piece))
                        uncovered += subtract(part, common)
                missing = uncovered
                if not missing:
                    break
            if missing and lost is not None:
                lost += [(piece, box) for box in missing]
            elif missing:
                raise ValueError(f"no rank of the source layout holds {missing[0]} of tensor {piece.name!r}")
        return plan


class _Boxes:
    """The different boxes of one tensor that ranks hold, sorted by their start in its first dimension."""

    def __init__(self, boxes: Mapping[Box, Sequence[tuple[int, Piece]]]) -> None:
        self.boxes = sorted(boxes.items(), key=lambda item: item[0])
        runs = [box[0] if box else (0, 1) for box, _ in self.boxes]
        self.starts = [start for start, _ in runs]
        # Running maxima of the stops, ascending for bisection: all boxes before the first maximum above a start end at
        # or before that start.
        self.stops = list(itertools.accumulate((stop for _, stop in runs), max))
        self.of_rank: dict[int, list[Piece]] = defaultdict(list)
        for copies in boxes.values():
            for rank, piece in copies:
                self.of_rank[rank].append(piece)

    def overlapping(self, piece: Piece) -> Sequence[tuple[Box, Sequence[tuple[int, Piece]]]]:
        """The boxes that may have elements in common with the piece, each with all its holders."""
        start, stop = piece.box[0] if piece.box else (0, 1)
        if self.boxes and len(self.boxes[0][0]) != len(piece.box):
            raise ValueError(
                f"tensor {piece.name!r} has {len(self.boxes[0][0])} dimensions in the source layout and "
                f"{len(piece.box)} in the target; layouts of one model have the same tensors"
            )
        return self.boxes[bisect_right(self.stops, start) : bisect_left(self.starts, stop)]


_NOBODY = _Boxes({})


def transfers(source: Sequence[LocalLayout], target: Sequence[LocalLayout]) -> list[Transfer]:
    """List the transfers that turn the layout `source` into the layout `target`, by target rank.

    Every element of every target piece is covered exactly once; ValueError if no source rank holds it.  A target takes
    its own copy where it has one, listed with ``source_rank == target_rank``, which costs no message.  Otherwise the
    holders of copies take turns.
    """
    holders = Holders(source)
    return [move for rank, holding in enumerate(target) for move in holders.transfers_to(rank, holding)]
