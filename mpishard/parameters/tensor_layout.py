"""Which tensors of a model a rank holds, where they are in its flat buffers, and which of them are used together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpishard.arguments import entries, shown
from mpishard.layout.tensors import WHOLE, LocalLayout, ModelParallelRank, ParameterSpec, Piece, merge_ties
from mpishard.parameters.buckets import TensorRun, make_runs


class TensorLayout:
    """The tensors that one rank holds of a model, in flat order.

    A tensor of `specs` that several stages list is tied; `place` decides which tensors, and which slices of them, this
    rank holds; `units` are names of consecutive tensors that are used together, by default all.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        place: ModelParallelRank = WHOLE,
        units: Sequence[Sequence[str]] | None = None,
    ) -> None:
        specs = entries("specs", specs, "ParameterSpec(name, shape)")
        if wrong := [spec for spec in specs if not isinstance(spec, ParameterSpec)]:
            raise TypeError(f"specs must be ParameterSpec(name, shape), got {shown(wrong[0])}")
        self.specs: tuple[ParameterSpec, ...] = tuple(merge_ties(specs))  # of the whole model
        self.place = place
        # Of the tensors held here.
        self.local: tuple[ParameterSpec, ...] = tuple(spec for spec in self.specs if place.holds(spec))
        # The slice of each tensor in `local` that is held here, and its start in the flat buffer.
        self.pieces: LocalLayout = place.holding(self.specs)
        # The same memory as boxes of whole tensors: several for one that is packed.
        self.holding: LocalLayout = place.unpacked(self.pieces, self.specs)
        # The units as runs of `pieces`; they end between stages and at ties too.
        self.units: list[tuple[int, int]] = _runs_of_units(self.local, units)
        # By the name of a tensor held here.
        self.piece_of: dict[str, Piece] = {piece.name: piece for piece in self.pieces}
        # The index of a tensor's unit, by name.
        self.unit_of: dict[str, int] = {
            piece.name: index for index, (first, last) in enumerate(self.units) for piece in self.pieces[first:last]
        }
        self.size: int = sum(piece.size for piece in self.pieces)  # elements held here

    def units_of(self, names: Sequence[str]) -> list[int]:
        """The units that have any of these tensors, ascending."""
        return sorted({self.unit_of[name] for name in names})

    def describe(self, dtype: np.dtype) -> str:
        """The number and size of the whole model's tensors, as a text."""
        size = sum(spec.size for spec in self.specs)
        first = next((spec.name for spec in self.specs), "none")
        return f"{len(self.specs)} tensors of {size} {dtype} values, first {first!r}"

    def gradient_runs(
        self, *, by_unit: bool = False, copies_apart: bool = False, ties_apart: bool = False
    ) -> list[TensorRun]:
        """Runs of pieces whose gradients are complete at different times; no bucket may span two runs.

        The tensors of one stage are a run, or with `by_unit` those of one unit. A tied tensor is a separate run, which
        waits for the end of the step; with `ties_apart` its gradient is that of its use on this rank, which waits for
        no other. With `copies_apart` no run has both tensors that every tensor rank holds whole and tensors that are
        split.
        """

        def key(spec: ParameterSpec) -> object:
            return self.unit_of[spec.name] if by_unit else spec.stage, copies_apart and not spec.is_split

        if not ties_apart:
            return make_runs((spec.stage, key(spec), bool(spec.copies)) for spec in self.local)
        tensors: list[tuple[int, object, bool]] = []
        for spec in self.local:
            here = min(stage for stage in (spec.stage, *spec.copies) if self.place.runs(stage))
            tensors.append((here, spec.name if spec.copies else key(spec), False))
        return make_runs(tensors)


def _runs_of_units(specs: Sequence[ParameterSpec], units: Sequence[Sequence[str]] | None) -> list[tuple[int, int]]:
    """The units as runs ``(first, last)`` of the tensors held, in order; also cut between stages and at ties."""
    named = [] if units is None else entries("units", units, "lists of names")
    number = {name: index for index, unit in enumerate(named) for name in entries(f"units[{index}]", unit, "names")}
    if units is not None and (missing := [spec.name for spec in specs if spec.name not in number]):
        raise ValueError(f"parameter {missing[0]!r} is in no unit; units must name every tensor")
    runs: list[tuple[int, int]] = []
    previous: object = None
    for index, spec in enumerate(specs):
        key = (number.get(spec.name), spec.stage, spec.name if spec.copies else None)
        if runs and key == previous:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
        previous = key
    return runs
