"""Whole tensors from the parts on the ranks of a mesh, and back: flat arrays in the order of the specs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpishard.comm.axis import Axis
from mpishard.layout.boxes import Box, box_size
from mpishard.layout.local_layout import cut_holding
from mpishard.layout.specs import ParameterSpec
from mpishard.parameters.flat import FlatParameters

Array = Any
Range = tuple[int, int]


def gather_whole(world: Axis, parameters: FlatParameters, ranges: Sequence[Range], values: np.ndarray) -> np.ndarray:
    """All elements of the model, on every rank.  Collective over `world`.

    Parameters
    ----------
    parameters : FlatParameters
        Their `pieces` are this rank's local layout.
    ranges : sequence of (start, stop)
        Ascending ranges of this rank's flat order that it contributes; the ranges of all ranks of a data axis contain
        every element once.
    values : 1-D array
        The values of these ranges, end to end.

    Returns
    -------
    1-D array
        All tensors of the model, whole, end to end in the order of `specs`; the same bits on every rank.
    """
    specs = parameters.specs
    number = {spec.name: index for index, spec in enumerate(specs)}
    pieces = [
        piece for piece in cut_holding(parameters.pieces, ranges) if parameters.place.counts(specs[number[piece.name]])
    ]
    own = np.concatenate([values[:0], *(values[piece.start : piece.start + piece.size] for piece in pieces)])
    layouts = world.allgather_object(tuple((number[piece.name], piece.box) for piece in pieces))
    counts = [sum(box_size(box) for _, box in boxes) for boxes in layouts]
    joined = world.all_gather(np.empty(sum(counts), values.dtype), own, counts, label="state")
    whole = np.empty(sum(spec.size for spec in specs), values.dtype)
    tensors = _tensors(whole, specs)
    offset = 0
    for boxes in layouts:
        for tensor, box in boxes:
            target = tensors[tensor][_slices(box)]
            target[...] = joined[offset : offset + box_size(box)].reshape(target.shape)
            offset += box_size(box)
    return whole


def cut_whole(whole: np.ndarray, parameters: FlatParameters, ranges: Sequence[Range]) -> np.ndarray:
    """The values of `ranges` of this rank's flat order, end to end, from a flat array of the whole model."""
    tensors = dict(zip((spec.name for spec in parameters.specs), _tensors(whole, parameters.specs), strict=True))
    pieces = cut_holding(parameters.pieces, ranges)
    return np.concatenate([whole[:0], *(tensors[piece.name][_slices(piece.box)].reshape(-1) for piece in pieces)])


def _tensors(whole: np.ndarray, specs: Sequence[ParameterSpec]) -> list[np.ndarray]:
    starts = accumulate((spec.size for spec in specs), initial=0)
    return [whole[start : start + spec.size].reshape(spec.shape) for spec, start in zip(specs, starts, strict=False)]


def _slices(box: Box) -> tuple[Any, ...]:
    return (*(slice(start, stop) for start, stop in box), ...)
