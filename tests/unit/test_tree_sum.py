"""Sums along a tree over an index: one value, whichever rank adds which terms."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpishard.backend import array as arrays
from mpishard.reduction.tree_sum import Node, TermAssignment, add_by_tree, nodes, tree_merges, tree_sum

TERMS = st.integers(1, 70)


def wild(*shape, dtype=np.float32):
    """Terms whose sum depends on the order."""
    random = np.random.default_rng(shape[0])
    return (random.standard_normal(shape) * 10.0 ** random.integers(-3, 4, shape)).astype(dtype)


def value(terms, level=None, index=0):
    """The tree by its definition: left plus right, or left alone."""
    if level is None:
        level = (len(terms) - 1).bit_length()
    if level == 0:
        return terms[index]
    left = value(terms, level - 1, 2 * index)
    return left + value(terms, level - 1, 2 * index + 1) if (2 * index + 1) << (level - 1) < len(terms) else left


def every_node(total):
    levels = range((total - 1).bit_length() + 1)
    return {(i << level, min((i + 1) << level, total)) for level in levels for i in range(-(-total // (1 << level)))}


def on_a_stack(parts, times, total):
    """Nodes with their sums, from the sums of `parts`."""
    stack = []
    for (node, part), pops in zip(parts, times, strict=True):
        stack.append((node, part))
        for _ in range(pops):
            (_, stop), upper = stack.pop()
            (start, middle), lower = stack.pop()
            assert (start, stop) in every_node(total)
            stack.append((Node(start, stop), lower + upper))
    return stack


@given(TERMS, st.data())
def test_a_run_is_made_of_the_fewest_nodes(total, data):
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found, known, place = nodes(start, stop, total), every_node(total), start
    for node in found:
        assert node.stop == max(end for first, end in known if first == place and end <= stop)
        place = node.stop
    assert place == stop
    assert len(found) <= 2 * max(1, total.bit_length())


def test_an_aligned_power_of_two_is_one_node():
    for size in (1, 2, 4, 8):
        for start in range(0, 64, size):
            assert nodes(start, start + size, 64) == ((start, start + size),)
    assert nodes(12, 13, 13) == ((12, 13),)
    assert nodes(8, 13, 13) == ((8, 13),)  # what would lie behind the last term counts as there
    assert nodes(3, 3, 13) == ()


@given(TERMS, st.integers(1, 12), st.booleans())
def test_any_deal_gives_the_bits_of_the_tree(total, ranks, in_turns):
    terms = wild(total, 5)
    assignment = TermAssignment(total, ranks, in_turns)
    assert sorted(term for rank in range(ranks) for term in assignment.terms(rank)) == list(range(total))
    # Each rank adds within its run ...
    kept = []
    for rank in range(ranks):
        leaves = [(Node(term, term + 1), terms[term]) for term in assignment.terms(rank)]
        kept.append(leaves if in_turns else on_a_stack(leaves, assignment.tree_merges(rank), total))
    # ... and the owner what the ranks send, exchange after exchange.
    sums = []
    for exchange in range(assignment.exchanges):
        parts = []
        for rank in range(ranks):
            mine = kept[rank][exchange : exchange + 1] if in_turns else kept[rank]
            assert [node for node, _ in mine] == list(assignment.parts(rank, exchange))
            parts += mine
        sums += on_a_stack(parts, tree_merges([node for node, _ in parts], total), total)
        assert [node for node, _ in sums[-len(assignment.sums(exchange)) :]] == list(assignment.sums(exchange))
    ((node, result),) = on_a_stack(sums, tree_merges([node for node, _ in sums], total), total)
    assert node == (0, total)
    assert np.array_equal(result, value(terms))


def test_order_matters_for_these_terms():
    """The tests above could fail."""
    terms = wild(60, 50)
    assert not np.array_equal(value(terms), np.add.reduce(list(terms)))
    assert not np.array_equal(value(terms), value(terms[::-1]))


@given(TERMS)
def test_numbers_add_up_alike(total):
    terms = wild(total, 1, dtype=np.float64)[:, 0].tolist()
    assert tree_sum(terms) == value(terms)


def test_the_sum_of_none_is_zero():
    assert tree_sum([]) == 0.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
def test_rows_of_two_buffers_add_up_in_one_pass(rows, size, dtype):
    terms = wild(rows, size, dtype=dtype)
    times = tree_merges([Node(row, row + 1) for row in range(rows)], rows)
    place = rows // 2
    gap = np.zeros(3, dtype)
    own = np.concatenate([gap, terms[place]])
    received = np.concatenate([gap, *terms[:place], *terms[place + 1 :]])
    starts = [3 + row * size - (row > place) * size if row != place else -1 - 3 for row in range(rows)]
    out = own[3:]  # in place
    add_by_tree(own, received, starts, times, out)
    assert np.array_equal(out, value(terms))
    if rows > 1 and size == 5000:
        assert not np.array_equal(out, terms[place])


def test_device_arrays_get_the_same_bits(device):
    terms = wild(5, 300)
    times = tree_merges([Node(row, row + 1) for row in range(5)], 5)
    own, received = device.put(terms[2]), device.put(np.concatenate([terms[0], terms[1], terms[3], terms[4]]))
    out = device.put(np.zeros(300, np.float32))
    add_by_tree(own, received, [0, 300, -1, 600, 900], times, out)
    assert np.array_equal(arrays.to_host(out), value(terms))
