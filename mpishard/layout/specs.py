"""The spec of a global tensor, known to every rank: its name and shape, its split, and the stages that have it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from mpishard.arguments import entries, flag, integer, shown
from mpishard.layout.boxes import Box, whole_box


@dataclass(frozen=True)
class ParameterSpec:
    """What every rank knows of one global tensor.

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

    Raises
    ------
    TypeError
        If an argument is not of the type above.
    ValueError
        If the name is empty or cannot stand in a file, an extent or stage is negative, `slices` is below 1, there is no
        dimension `tensor_dim`, or a split tensor is `partial`.
    """

    name: str
    shape: tuple[int, ...]
    stage: int = 0
    tensor_dim: int | None = None
    partial: bool = False
    copies: tuple[int, ...] = ()
    slices: int = 1

    def __post_init__(self) -> None:
        _check_name(self.name)
        what = f"parameter {self.name!r}: {{}}".format
        shape, copies = entries(what("shape"), self.shape, "extents"), entries(what("copies"), self.copies, "stages")
        object.__setattr__(self, "shape", tuple(integer(what("extent"), extent) for extent in shape))
        object.__setattr__(self, "stage", integer(what("stage"), self.stage, least=0))
        object.__setattr__(self, "copies", tuple(integer(what("copy"), stage, least=0) for stage in copies))
        object.__setattr__(self, "slices", integer(what("slices"), self.slices, least=1))
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

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def box(self) -> Box:
        """The box that covers the whole tensor."""
        return whole_box(self.shape)


def _cut(spec: ParameterSpec) -> tuple[object, ...]:
    """What all uses of a tied tensor must have alike."""
    return spec.shape, spec.tensor_dim, spec.partial, spec.slices


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

    Parameters
    ----------
    specs : iterable of ParameterSpec
        Of all stages, in order.

    Returns
    -------
    list of ParameterSpec
        A tied tensor once, at its first place, with its other stages as `copies`.

    Raises
    ------
    ValueError
        If tied tensors differ in shape or split, or a stage lists a name twice.
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
                "tied tensors must be alike, in `partial` and `slices` too"
            )
        merged[spec.name] = replace(first, copies=(*first.copies, spec.stage))
    return list(merged.values())
