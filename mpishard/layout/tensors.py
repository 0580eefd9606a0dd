"""Global tensors and the pieces of them that one rank holds: specs, and pieces in a flat buffer.

A *piece* is a box and its start in a rank's flat buffer; in the buffer a box is stored in row-major order.  The *local
layout* of a rank is the tuple of its pieces; a *layout* is a sequence of local layouts, one per rank.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from mpishard.arguments import entries, flag, integer, shown
from mpishard.layout.boxes import Box, box_shape, box_size, boxes_of_range, check_cover, nested_split, whole_box


@dataclass(frozen=True)
class ParameterSpec:
    """The facts of one global tensor, which every rank knows.

    Parameters
    ----------
    name : str
        Unique in its model, e.g. ``"blocks.0.attention.qkv.weight"``.
    shape : tuple of int
        Global shape; may contain zeros.
    stage : int
        Pipeline stage that owns the tensor.  With several chunks per rank it is the virtual stage; pipeline rank r of p
        runs the virtual stages r, r + p, r + 2 p, and so on.
    tensor_dim : int or None
        Dimension split over the tensor axis; None: every tensor rank holds all of it, and they hold copies.
    partial : bool
        Whether the tensor ranks compute terms of the gradient of a replicated tensor, to be summed, and not all of it.
    copies : tuple of int
        Further stages that hold and use the tensor (a tie).  The gradients of its stages are summed.
    slices : int
        Into how many slices the split dimension is cut, whatever the tensor size is: each tensor rank holds a run of
        them, see `mpishard.layout.boxes.nested_split`.  1: one a rank, cut for this tensor size.
    parts : tuple of Box
        The box of each tensor rank, a ``(start, stop)`` pair for each dimension, where the application has cut the
        tensor; every element is in one of them, and a box may be empty.  Default: not cut, or evenly by `tensor_dim`.
    packed : int
        Of a tensor into which several are packed along one dimension, as the weights of gates and of features: how many
        boxes in `parts` each tensor rank has.  Rank r has ``parts[r * packed : (r + 1) * packed]``, and stores them as
        one tensor, side by side along that dimension.

    Raises
    ------
    TypeError
        If an argument is not of the type above.
    ValueError
        If the name is empty or cannot stand in a file; an extent or stage is negative; `slices` or `packed` is below 1;
        there is no dimension `tensor_dim`; a split tensor is `partial`; `parts` leave an element out or have one twice;
        or those of a `packed` tensor are cut along several dimensions.
    """

    name: str
    shape: tuple[int, ...]
    stage: int = 0
    tensor_dim: int | None = None
    partial: bool = False
    copies: tuple[int, ...] = ()
    slices: int = 1
    parts: tuple[Box, ...] = ()
    packed: int = 1

    def __post_init__(self) -> None:
        _check_name(self.name)
        what = f"parameter {self.name!r}: {{}}".format
        shape, copies = entries(what("shape"), self.shape, "extents"), entries(what("copies"), self.copies, "stages")
        object.__setattr__(self, "shape", tuple(integer(what("extent"), extent) for extent in shape))
        object.__setattr__(self, "stage", integer(what("stage"), self.stage, least=0))
        object.__setattr__(self, "copies", tuple(integer(what("copy"), stage, least=0) for stage in copies))
        bound, boxes = what("bound of a part"), entries(what("parts"), self.parts, "boxes")
        parts = (tuple((integer(bound, start), integer(bound, stop)) for start, stop in box) for box in boxes)
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "slices", integer(what("slices"), self.slices, least=1))
        object.__setattr__(self, "packed", integer(what("packed"), self.packed, least=1))
        object.__setattr__(self, "partial", flag(what("partial"), self.partial))
        if self.tensor_dim is not None:
            object.__setattr__(self, "tensor_dim", integer(what("tensor_dim"), self.tensor_dim))
        if min(self.shape, default=0) < 0:
            raise ValueError(f"parameter {self.name!r} has the negative extent {min(self.shape)} in {self.shape}")
        if self.tensor_dim is not None and not 0 <= self.tensor_dim < len(self.shape):
            raise ValueError(
                f"parameter {self.name!r} of shape {self.shape} has no dimension {self.tensor_dim} to split"
            )
        if self.partial and self.tensor_dim is not None:
            raise ValueError(
                f"parameter {self.name!r} is split along {self.tensor_dim}, so every tensor rank has gradients of its "
                "own; only those of replicas (tensor_dim=None) can be partial"
            )
        if self.parts or self.packed > 1:
            self._check_parts()

    def _check_parts(self) -> None:
        if self.tensor_dim is not None or self.partial or self.slices > 1:
            raise ValueError(
                f"parameter {self.name!r} has parts, the box of each rank, and so neither tensor_dim, partial nor "
                "slices: leave these out"
            )
        try:
            check_cover(self.shape, [box for box in self.parts if box_size(box)])
        except ValueError as error:
            raise ValueError(f"parameter {self.name!r}: {error}") from None
        if self.packed > 1 and (len(self.parts) % self.packed or len(self.cut_dims) != 1):
            raise ValueError(
                f"parameter {self.name!r} has packed={self.packed} and {len(self.parts)} parts, cut along the "
                f"dimensions {self.cut_dims}: give each rank as many parts as are packed, cut along one dimension"
            )

    @property
    def cut_dims(self) -> list[int]:
        """The dimensions in which any of the `parts` is not the whole tensor."""
        return [dim for dim, whole in enumerate(self.box) if any(part[dim] != whole for part in self.parts)]

    @property
    def is_split(self) -> bool:
        """True if each tensor rank has its own part of the tensor; False if all of them hold it whole."""
        return self.tensor_dim is not None or bool(self.parts)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def box(self) -> Box:
        """The box that covers the whole tensor."""
        return whole_box(self.shape)


def _cut(spec: ParameterSpec) -> tuple[object, ...]:
    """The properties that must be equal in all uses of a tied tensor."""
    return spec.shape, spec.tensor_dim, spec.partial, spec.slices, spec.parts, spec.packed


def _check_name(name: object) -> None:
    """Raise unless `name` can be the name of a tensor, also in a file."""
    if not isinstance(name, str):
        raise TypeError(f"a parameter's name must be a string, got {shown(name)}")
    if not name:
        raise ValueError("a parameter needs a name")
    if "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"the parameter name {name!r} has a NUL or a surrogate in it, which files cannot hold")


def merge_ties(specs: Iterable[ParameterSpec]) -> list[ParameterSpec]:
    """Merge the specs with the same name: a tensor that several stages list is tied between them.

    A tied tensor comes once, at its first place, with its other stages as `copies`.  Raises ValueError if tied tensors
    differ in shape or split, or a stage lists a name twice.
    """
    merged: dict[str, ParameterSpec] = {}
    for spec in specs:
        first = merged.setdefault(spec.name, spec)
        if first is spec:
            continue
        if spec.stage in (first.stage, *first.copies):
            raise ValueError(f"two parameters of stage {spec.stage} are named {spec.name!r}; names must be unique")
        if _cut(first) != _cut(spec):
            raise ValueError(
                f"{spec.name!r} ties a tensor of shape {first.shape}, split along {first.tensor_dim}, on stage "
                f"{first.stage} to one of shape {spec.shape}, split along {spec.tensor_dim}, on stage {spec.stage}; "
                "tied tensors must be the same, in `partial` and `slices` too"
            )
        merged[spec.name] = replace(first, copies=(*first.copies, spec.stage))
    return list(merged.values())


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor, stored row-major in a flat buffer from the element `start` on."""

    name: str
    box: Box
    start: int

    @property
    def shape(self) -> tuple[int, ...]:
        return box_shape(self.box)

    @property
    def size(self) -> int:
        return box_size(self.box)


@dataclass(frozen=True)
class ModelParallelRank:
    """The tensor and pipeline ranks of a rank, which decide which parameters it holds."""

    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1

    def runner(self, stage: int) -> int:
        """The pipeline rank that runs a virtual stage: the stage modulo the number of pipeline ranks."""
        return stage % self.pipeline_size

    def runs(self, stage: int) -> bool:
        """Return True if this rank runs a virtual stage; the same on all tensor ranks."""
        return self.runner(stage) == self.pipeline_rank

    def holders(self, spec: ParameterSpec) -> list[int]:
        """The pipeline ranks that hold a tensor, ascending; several if the tensor is tied."""
        return sorted({self.runner(stage) for stage in (spec.stage, *spec.copies)})

    def holds(self, spec: ParameterSpec) -> bool:
        """Return True if this rank holds a tensor or a part of it; the same on all tensor ranks."""
        return self.pipeline_rank in self.holders(spec)

    def box(self, spec: ParameterSpec) -> Box:
        """This tensor rank's part of a tensor: one of its `parts`, or a run of its `slices`; else all of it.

        That of a packed tensor counts from 0, as of a tensor that consists of the part.

        Raises ValueError if there is another number of `parts` than of tensor ranks, or `slices` is above 1 and no
        multiple of that.
        """
        if spec.parts:
            if len(spec.parts) != self.tensor_size * spec.packed:
                raise ValueError(
                    f"parameter {spec.name!r} is cut for {len(spec.parts) // spec.packed} ranks, and the mesh has "
                    f"tensor={self.tensor_size}; build the domain for the ranks of this mesh"
                )
            if spec.packed == 1:
                return spec.parts[self.tensor_rank]
            (dim,), own = spec.cut_dims, self._packed(spec)
            return (*own[0][:dim], (0, sum(box[dim][1] - box[dim][0] for box in own)), *own[0][dim + 1 :])
        if spec.tensor_dim is None:
            return spec.box
        try:
            cuts = nested_split(spec.shape[spec.tensor_dim], self.tensor_size, spec.slices)
        except ValueError as error:
            raise ValueError(f"parameter {spec.name!r}: {error}") from None
        box = list(spec.box)
        box[spec.tensor_dim] = (cuts[self.tensor_rank], cuts[self.tensor_rank + 1])
        return tuple(box)

    def is_primary(self, spec: ParameterSpec) -> bool:
        """Return True if this rank's copy of the tensor is the primary one: the first of its copies and ties."""
        return self.runs(spec.stage) and (spec.is_split or self.tensor_rank == 0)

    def _packed(self, spec: ParameterSpec) -> tuple[Box, ...]:
        return spec.parts[self.tensor_rank * spec.packed : (self.tensor_rank + 1) * spec.packed]

    def unpacked(self, pieces: LocalLayout, specs: Iterable[ParameterSpec]) -> LocalLayout:
        """The pieces of `holding` with those of packed tensors as boxes of the whole tensors: several for each."""
        packed = {spec.name: spec for spec in specs if spec.packed > 1}
        return tuple(each for piece in pieces for each in self._unpacked(piece, packed.get(piece.name)))

    def _unpacked(self, piece: Piece, spec: ParameterSpec | None) -> Iterator[Piece]:
        if spec is None:
            yield piece
            return
        (dim,), start = spec.cut_dims, piece.start
        for index in itertools.product(*(range(extent) for extent in spec.shape[:dim])):
            for box in self._packed(spec):
                each = Piece(spec.name, (*((at, at + 1) for at in index), *box[dim:]), start)
                start += each.size
                yield each

    def holding(self, specs: Iterable[ParameterSpec]) -> LocalLayout:
        """The local layout of this rank: its parts of the model's tensors, end to end in their order.

        One piece for each tensor, see `box`. Tensors of other stages are left out.
        """
        pieces: list[Piece] = []
        start = 0
        for spec in specs:
            if self.holds(spec):
                pieces.append(Piece(spec.name, self.box(spec), start))
                start += pieces[-1].size
        return tuple(pieces)


LocalLayout = tuple[Piece, ...]


WHOLE = ModelParallelRank()


def cut_holding(holding: LocalLayout, ranges: Iterable[tuple[int, int]]) -> LocalLayout:
    """The local layout of a new buffer that consists of ascending ranges of another buffer, end to end.

    Several pieces for a tensor of which a range has a ragged part.
    """
    pieces: list[Piece] = []
    offset = 0
    for start, stop in ranges:
        first = max(0, bisect_right(holding, start, key=lambda piece: piece.start) - 1)
        for whole in itertools.islice(holding, first, None):
            if whole.start >= stop:
                break
            begin, end = max(start, whole.start), min(stop, whole.start + whole.size)
            for box in boxes_of_range(whole.shape, begin - whole.start, end - whole.start):
                within = zip(box, whole.box, strict=True)
                pieces.append(Piece(whole.name, tuple((a + c, b + c) for (a, b), (c, _) in within), offset))
                offset += pieces[-1].size
    return tuple(pieces)


def tensors_of(flat: Any, specs: Sequence[ParameterSpec]) -> dict[str, Any]:
    """Views of whole tensors by name; they lie end to end in a flat array, in the order of their specs."""
    starts = itertools.accumulate((spec.size for spec in specs), initial=0)
    pairs = zip(specs, starts, strict=False)
    return {spec.name: flat[start : start + spec.size].reshape(spec.shape) for spec, start in pairs}
