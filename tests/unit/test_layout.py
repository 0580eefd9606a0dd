"""The layout algebra: every element in one place, and moves that cover each of them once."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from mpishard.layout import ParameterSpec, Piece, boxes_of_range, holding_of_ranges, intersect, moves, split, subtract

shapes = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


@given(st.integers(0, 1000), st.integers(1, 40))
def test_split_is_even_and_complete(size, parts):
    offsets = split(size, parts)
    lengths = [stop - start for start, stop in pairwise(offsets)]
    assert (offsets[0], offsets[-1], len(lengths)) == (0, size, parts)
    assert max(lengths) - min(lengths) <= 1
    assert sorted(lengths, reverse=True) == lengths


@pytest.mark.parametrize(("size", "parts"), [(-1, 2), (3, 0)])
def test_split_of_nonsense(size, parts):
    with pytest.raises(ValueError, match="cannot split"):
        split(size, parts)


@given(shapes, st.data())
def test_boxes_of_a_range_are_its_elements_in_order(shape, data):
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    tensor = np.arange(size).reshape(shape)
    boxes = boxes_of_range(shape, start, stop)
    found = [tensor[tuple(slice(*pair) for pair in box)].ravel() for box in boxes]
    assert np.array_equal(np.concatenate([*found, []]), np.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def specs_of(some_shapes):
    return [ParameterSpec(f"t{index}", shape) for index, shape in enumerate(some_shapes)]


def fill(holding, tensors):
    """The buffer of a rank with this holding."""
    buffer = np.full(sum(piece.size for piece in holding), np.nan)
    for piece in holding:
        box = tuple(slice(*pair) for pair in piece.box)
        buffer[piece.start : piece.start + piece.size] = tensors[piece.name][box].ravel()
    return buffer


def cut(data, size, ranks):
    """Ranges of a flat buffer for each rank: a random cut into runs, dealt out at random."""
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=6))})
    ranges = [[] for _ in range(ranks)]
    for start, stop in pairwise(cuts):
        ranges[data.draw(st.integers(0, ranks - 1))].append((start, stop))
    return ranges


@settings(max_examples=300)
@given(st.lists(shapes, min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 5), st.data())
def test_moves_put_every_element_in_its_place_once(some_shapes, before, after, data):
    specs = specs_of(some_shapes)
    size = sum(spec.size for spec in specs)
    values = iter(np.split(np.arange(size, dtype=float), np.cumsum([spec.size for spec in specs])[:-1]))
    tensors = {spec.name: next(values).reshape(spec.shape) for spec in specs}
    source = [holding_of_ranges(specs, ranges) for ranges in cut(data, size, before)]
    target = [holding_of_ranges(specs, ranges) for ranges in cut(data, size, after)]
    if data.draw(st.booleans()):  # a replica of everything on one more rank
        source.append(holding_of_ranges(specs, [(0, size)]))
    sent = [fill(holding, tensors) for holding in source]
    written = [np.zeros(sum(piece.size for piece in holding), int) for holding in target]
    result = [np.full(len(count), np.nan) for count in written]
    for move in moves(source, target):
        out = view(result[move.target_rank], move.target, move.box)
        out[...] = view(sent[move.source_rank], move.source, move.box)
        view(written[move.target_rank], move.target, move.box)[...] += 1
        if move.source_rank != move.target_rank and move.target_rank < len(source):
            assert not holds(source[move.target_rank], move)  # what lies in place does not travel
    for holding, buffer, count in zip(target, result, written, strict=True):
        assert np.array_equal(buffer, fill(holding, tensors))
        assert (count == 1).all()


def view(buffer, piece, box):
    inside = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(box, piece.box, strict=True))
    return buffer[piece.start : piece.start + piece.size].reshape(piece.shape)[(*inside, ...)]


def holds(holding, move):
    return any(piece.name == move.name and intersect(piece.box, move.box) for piece in holding)


def test_moves_name_what_nobody_holds():
    spec = ParameterSpec("w", (4, 2))
    with pytest.raises(ValueError, match=r"no rank of the source layout holds \(\(2, 4\), \(0, 2\)\) of tensor 'w'"):
        moves([(Piece("w", ((0, 2), (0, 2)), 0),)], [(Piece("w", spec.box, 0),)])


ordered = st.lists(st.integers(0, 9), min_size=4, max_size=4).map(sorted)


@given(st.lists(ordered, min_size=1, max_size=3))
def test_subtract_leaves_the_rest(extents):
    box = tuple((start, stop) for start, _, _, stop in extents)
    hole = tuple((start, stop) for _, start, stop, _ in extents)
    marks = np.zeros((10,) * len(extents), int)
    for part in [*subtract(box, hole), hole]:
        marks[tuple(slice(*pair) for pair in part)] += 1
    assert marks.max(initial=0) <= 1
    assert marks.sum() == prod(stop - start for start, stop in box)


@pytest.mark.parametrize(("name", "shape"), [("", (3,)), ("w", (3, -1))])
def test_bad_specs(name, shape):
    with pytest.raises(ValueError, match="name|negative"):
        ParameterSpec(name, shape)
