"""The layout algebra: every element in one place, and transfers that cover each of them once."""

from __future__ import annotations

import json
from itertools import pairwise
from math import prod

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from layouts import filled, lower_bound, random_layout, random_model, tensors_of, view
from variants import full

from mpishard.comm.reshard import Holders, transfers
from mpishard.layout.boxes import (
    box_shape,
    box_size,
    boxes_of_range,
    inside,
    intersect,
    nested_split,
    run_lengths,
    run_of,
    split,
    subtract,
    whole_box,
)
from mpishard.layout.tensors import WHOLE, ModelParallelRank, ParameterSpec, Piece, cut_holding, merge_ties

shapes = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


@given(st.integers(0, 1000), st.integers(1, 40))
def test_split_is_even_and_complete(size, parts):
    offsets = split(size, parts)
    lengths = [stop - start for start, stop in pairwise(offsets)]
    assert (offsets[0], offsets[-1], len(lengths)) == (0, size, parts)
    assert max(lengths) - min(lengths) <= 1
    assert sorted(lengths, reverse=True) == lengths
    assert run_lengths(offsets) == lengths
    assert [run_of(lengths, number) for number in range(parts)] == [slice(*run) for run in pairwise(offsets)]


@given(st.integers(0, 100), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_nested_cuts_fit_into_each_other(size, few, times, more):
    slices = few * times * more
    fine, coarse = nested_split(size, few * times, slices), nested_split(size, few, slices)
    assert set(coarse) <= set(fine) <= set(split(size, slices))
    assert fine[::times] == coarse
    assert nested_split(size, few) == split(size, few)


SLICED = ParameterSpec("w", (10, 3), tensor_dim=0, slices=4)


def test_slices_that_ranks_share():
    assert [ModelParallelRank(rank, 2).box(SLICED)[0] for rank in range(2)] == [(0, 6), (6, 10)]


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
    specs = [ParameterSpec(f"t{index}", shape) for index, shape in enumerate(some_shapes)]
    size = sum(spec.size for spec in specs)
    values = iter(np.split(np.arange(size, dtype=float), np.cumsum([spec.size for spec in specs])[:-1]))
    tensors = {spec.name: next(values).reshape(spec.shape) for spec in specs}
    source = [cut_holding(WHOLE.holding(specs), ranges) for ranges in cut(data, size, before)]
    target = [cut_holding(WHOLE.holding(specs), ranges) for ranges in cut(data, size, after)]
    if data.draw(st.booleans()):  # a replica of everything on one more rank
        source.append(WHOLE.holding(specs))
    sent = [fill(holding, tensors) for holding in source]
    written = [np.zeros(sum(piece.size for piece in holding), int) for holding in target]
    result = [np.full(len(count), np.nan) for count in written]
    for move in transfers(source, target):
        out = view(result[move.target_rank], move.target, move.box)
        out[...] = view(sent[move.source_rank], move.source, move.box)
        view(written[move.target_rank], move.target, move.box)[...] += 1
        if move.source_rank != move.target_rank and move.target_rank < len(source):
            assert not holds(source[move.target_rank], move)  # what lies in place does not travel
    for holding, buffer, count in zip(target, result, written, strict=True):
        assert np.array_equal(buffer, fill(holding, tensors))
        assert (count == 1).all()


def holds(holding, move):
    return any(piece.name == move.name and intersect(piece.box, move.box) for piece in holding)


@pytest.mark.parametrize("block", [*range(20), *full(*range(20, 80))])
def test_moves_between_random_layouts(block):
    """Every element once and in its place, and no more of them between ranks than have to be."""
    for number in range(60):
        random = np.random.default_rng([block, number])
        model, ranks = random_model(random), int(random.integers(1, 13))
        tensors = tensors_of(model)
        source, target = (random_layout(random, ranks).holdings(model, random) for _ in range(2))
        held, expected = ([filled(holding, tensors) for holding in side] for side in (source, target))
        found, written = ([np.zeros_like(array) for array in expected] for _ in range(2))
        received = [0] * ranks
        for move in transfers(source, target):
            to = move.target_rank
            part = view(held[move.source_rank], move.source, move.box)
            view(found[to], move.target, move.box)[...] = part
            view(written[to], move.target, move.box)[...] += 1
            received[to] += part.size * (move.source_rank != to)
        for rank in range(ranks):
            assert np.array_equal(found[rank], expected[rank]), (block, number)
            assert (written[rank] == 1).all(), (block, number)
        assert received == lower_bound(source, target, tensors), (block, number)


@pytest.mark.parametrize("rank", [0, 5])
def test_moves_to_one_rank_are_those_of_the_plan(rank):
    random = np.random.default_rng(rank)
    model = random_model(random)
    source, target = (random_layout(random, 8).holdings(model, random) for _ in range(2))
    plan = [move for move in transfers(source, target) if move.target_rank == rank]
    assert Holders(source).transfers_to(rank, target[rank]) == plan


def test_holders_of_copies_share_the_sending():
    """Four ranks with everything, four that join and want everything."""
    specs = [ParameterSpec(f"t{index}", (5, 2)) for index in range(8)]
    whole = WHOLE.holding(specs)
    for joining in (range(4, 8), range(4, 12, 2)):
        target = [whole if rank in joining else () for rank in range(12)]
        plan = transfers([whole] * 4 + [()] * 8, target)
        sent = [sum(move.source_rank == rank for move in plan) for rank in range(4)]
        assert sent == [8, 8, 8, 8]


ordered = st.lists(st.integers(0, 9), min_size=4, max_size=4).map(sorted)


@given(st.lists(ordered, min_size=1, max_size=3))
def test_subtract_leaves_the_rest(extents):
    box = tuple((start, stop) for start, _, _, stop in extents)
    hole = tuple((start, stop) for _, start, stop, _ in extents)
    marks = np.zeros((10,) * len(extents), int)
    for part in [*subtract(box, hole), hole]:
        marks[tuple(slice(*pair) for pair in part)] += 1
    assert marks.max(initial=0) <= 1
    assert marks.sum() == box_size(box)


@given(st.lists(ordered, max_size=3))
def test_a_box_in_an_array_of_the_box_around_it(extents):
    outer = tuple((start, stop) for start, _, _, stop in extents)
    box = tuple((start, stop) for _, start, stop, _ in extents)
    tensor = np.arange(10 ** len(extents)).reshape((10,) * len(extents))
    around = tensor[(*(slice(*pair) for pair in outer), ...)]
    view = around[inside(box, outer)]
    assert view.shape == box_shape(box) and view.size == box_size(box)
    assert np.shares_memory(view, tensor) or not view.size
    assert np.array_equal(view, tensor[inside(box, whole_box(tensor.shape))])


places = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(
    lambda sizes: [ModelParallelRank(t, sizes[0], p, sizes[1]) for p in range(sizes[1]) for t in range(sizes[0])]
)


@given(places, st.lists(st.tuples(shapes, st.integers(0, 9), st.booleans(), st.booleans()), max_size=5))
def test_places_hold_every_element_and_count_it_once(all_places, wanted):
    specs = [
        ParameterSpec(f"t{i}", shape, stage, len(shape) - 1 if split_it and shape else None, copies=(0,) * tie)
        for i, (shape, stage, split_it, tie) in enumerate(wanted)
    ]
    for spec in specs:
        held, counted = np.zeros(spec.shape, int), np.zeros(spec.shape, int)
        for place in all_places:
            inside = (*(slice(*run) for run in place.box(spec)), ...)
            held[inside] += place.holds(spec)
            counted[inside] += place.holds(spec) and place.is_primary(spec)
        first = all_places[0]
        copies = len(first.holders(spec)) * (1 if spec.tensor_dim is not None else first.tensor_size)
        assert (held == copies).all()
        assert (counted == 1).all()
    for place in all_places:
        holding = place.holding(specs)
        assert [piece.name for piece in holding] == [spec.name for spec in specs if place.holds(spec)]
        starts = np.cumsum([0, *(piece.size for piece in holding)])
        assert [piece.start for piece in holding] == list(starts[:-1])


@settings(max_examples=200)
@given(st.lists(shapes, min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 4), st.data())
def test_ranges_of_a_slice_are_pieces_of_the_whole(some_shapes, tensor, ranks, data):
    """Cut over the tensor axis first, then over data ranks."""
    specs = [
        ParameterSpec(f"t{index}", shape, tensor_dim=data.draw(st.integers(0, len(shape) - 1)) if shape else None)
        for index, shape in enumerate(some_shapes)
    ]
    tensors = {spec.name: 100.0 * i + np.arange(spec.size).reshape(spec.shape) for i, spec in enumerate(specs)}
    holding = ModelParallelRank(data.draw(st.integers(0, tensor - 1)), tensor).holding(specs)
    buffer = fill(holding, tensors)
    for ranges in cut(data, buffer.size, ranks):
        expected = np.concatenate([np.empty(0), *(buffer[start:stop] for start, stop in ranges)])
        assert np.array_equal(fill(cut_holding(holding, ranges), tensors), expected)


def test_virtual_stages_go_round():
    place = ModelParallelRank(pipeline_rank=1, pipeline_size=3)
    assert [stage for stage in range(9) if place.runs(stage)] == [1, 4, 7]
    spec = ParameterSpec("w", (2,), stage=7, copies=(0, 4))
    assert place.holders(spec) == [0, 1]
    assert place.is_primary(spec)
    assert not ModelParallelRank(pipeline_rank=0, pipeline_size=3).is_primary(spec)


def test_ties_are_merged():
    table, norm = ParameterSpec("table", (4, 2), tensor_dim=0), ParameterSpec("norm", (2,), 1)
    merged = merge_ties([table, norm, ParameterSpec("table", (4, 2), 3, 0)])
    assert merged == [ParameterSpec("table", (4, 2), 0, 0, copies=(3,)), norm]


def tied(*other, **options):
    return merge_ties([ParameterSpec("table", (4, 2)), ParameterSpec("table", *other, **options)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: split(-1, 2), "cannot split"),
        (lambda: split(3, 0), "cannot split"),
        (lambda: nested_split(10, 3, 4), "4 slices .*3 ranks"),
        (lambda: ModelParallelRank(0, 3).box(SLICED), "'w': 4 slices .*3 ranks"),
        (
            lambda: transfers([(Piece("w", ((0, 2), (0, 2)), 0),)], [(Piece("w", ((0, 4), (0, 2)), 0),)]),
            r"\(\(2, 4\), \(0, 2\)\) of tensor 'w'",
        ),
        (
            lambda: transfers([(Piece("w", ((0, 4),), 0),)], [(Piece("w", ((0, 2), (0, 2)), 0),)]),
            "'w' has 1 .*2 in the target",
        ),
        (lambda: tied((4, 3), 1), r"\(4, 2\), .*stage 0 .*\(4, 3\)"),
        (lambda: tied((4, 2), 1, tensor_dim=0), "split along None, .*split along 0"),
        (lambda: tied((4, 2), 1, slices=2), "`partial` and `slices`"),
        (lambda: tied((4, 2)), "stage 0 .*'table'"),
        (lambda: ParameterSpec("w", (4,), parts=(((0, 4),), ((0, 4),))), r"'w': each of its 2 pieces .*\(4,\)"),
        (lambda: ParameterSpec("w", (4,), packed=2), "'w': no piece covers"),
        (lambda: ParameterSpec("w", (3,), parts=(((0, 1),), ((1, 2),), ((2, 3),)), packed=2), "packed=2 and 3 parts"),
        (lambda: ParameterSpec("", (3,)), "name"),
        (lambda: ParameterSpec("w", (3, -1)), "negative"),
        (lambda: ParameterSpec("w", (3, 2), tensor_dim=2), "has no dimension 2 to split"),
        (lambda: ParameterSpec("w", (3, 2), tensor_dim=-1), "has no dimension -1"),
        (lambda: ParameterSpec("w", (3, 2), tensor_dim=0, partial=True), "replicas .*partial"),
    ],
)
def test_what_contradicts_itself_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_parts_of_numpys_numbers_can_be_saved():
    """As sums of the ranks' sizes are; a checkpoint writes JSON, which takes none of NumPy's numbers."""
    stops = np.cumsum([0, 2, 3])
    spec = ParameterSpec("w", (5,), parts=[[pair] for pair in pairwise(stops)])
    assert spec == ParameterSpec("w", (5,), parts=(((0, 2),), ((2, 5),)))
    assert json.dumps(ModelParallelRank(1, 2).box(spec)) == "[[2, 5]]"


def test_a_rank_has_several_boxes_of_a_packed_tensor_and_stores_them_as_one():
    """Of two packed layers of three features: rank 0 has two of each. Values are those of the whole tensor."""
    shape, whole = (2, 6, 3), np.arange(36).reshape(2, 6, 3)
    cuts = [(0, 2), (3, 5), (2, 3), (5, 6)]
    spec = ParameterSpec("w", shape, parts=tuple(((0, 2), cut, (0, 3)) for cut in cuts), packed=2, copies=(2,))
    assert [ModelParallelRank(1, 2, stage, 3).holds(spec) for stage in range(3)] == [True, False, True]
    found = np.full(shape, -1)
    for rank in range(2):
        place = ModelParallelRank(rank, 2)
        own = np.concatenate([whole[:, slice(*cut)] for cut in cuts[2 * rank : 2 * rank + 2]], 1)
        pieces = place.holding([ParameterSpec("v", (5,)), spec])
        assert pieces[1].shape == own.shape and pieces[1].start == 5
        _, *boxes = place.unpacked(pieces, [spec])
        assert len(boxes) == 4
        for box in boxes:
            values = own.reshape(-1)[box.start - 5 :][: box.size]
            found[tuple(slice(*each) for each in box.box)] = values.reshape(box.shape)
    assert np.array_equal(found, whole)
    with pytest.raises(ValueError, match="cut for 2 ranks"):
        ModelParallelRank(0, 4).box(spec)
