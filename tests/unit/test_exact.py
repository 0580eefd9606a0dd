"""Sums that do not depend on how the terms are cut: dot products, norms, rows, trees."""

from __future__ import annotations

import math
from fractions import Fraction

import cuda_on_host
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from standin import StandIn, on_device
from standin import empty as empty_on_device
from waits import counted_waits

from mpishard.backend import array as arrays
from mpishard.backend.exact import approximate_values, combine, dot_words, normalized, row_dot_words, values
from mpishard.backend.exact_norms import (
    LargestValues,
    largest,
    largest_of,
    norm,
    norm_of,
    sum_of_squares,
    sums_of_squares,
)
from mpishard.backend.exact_rows import Factor, changed_words, sorted_words, words_with
from mpishard.backend.ranges import Range, Ranges
from mpishard.backend.row_sums import add_by_tree
from mpishard.reduction.tree_sum import TermAssignment, TreeNode, tree_merges, tree_nodes, tree_sum

# Dot products that do not depend on how the terms are cut, and combinations of rows.

DTYPES = [np.float32, np.float64]


def wild(seed, shape, dtype, decades=9):
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * 10.0 ** random.integers(-decades, decades + 1, shape)).astype(dtype)


def bound(one, other):
    return float(abs(one).max(initial=0)) * float(abs(other).max(initial=0))


def dot(one, other, top=None):
    top = bound(one, other) if top is None else top
    return values(dot_words(one, other, top, [(0, one.size)])[None], [top])[0]


def exact(one, other):
    """The sum of the products, each rounded to float64 and then to the quantum, without any other error."""
    top = bound(one, other)
    quantum = Fraction(2) ** (max(math.frexp(top)[1], -1010) - 64)
    products = one.astype(np.float64) * other.astype(np.float64)
    return float(sum(round(Fraction(float(product)) / quantum) for product in products) * quantum)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(1, 300), st.lists(st.integers(0, 300), max_size=5), st.randoms(use_true_random=False))
def test_any_cut_and_any_order_give_the_same_bits(dtype, size, cuts, random):
    one, other = wild(size, (2, size), dtype)
    top, expected = bound(one, other), dot(one, other)
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    spans = list(zip(edges, edges[1:], strict=False))
    random.shuffle(spans)
    assert values(dot_words(one, other, top, spans)[None], [top]) == [expected]
    apart = sum(dot_words(one[a:b].copy(), other[a:b].copy(), top, [(0, b - a)]) for a, b in spans)
    assert values(apart[None], [top]) == values(normalized(apart[None]), [top]) == [expected]
    order = np.array(random.sample(range(size), size))
    assert dot(one[order], other[order]) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 1000, 40_003])
def test_it_is_the_exact_sum_of_the_rounded_products(dtype, size):
    one, other = wild(size, (2, size), dtype, 3)
    assert dot(one, other) == exact(one, other)
    products = one.astype(np.float64) * other.astype(np.float64)
    assert dot(one, other) == pytest.approx(math.fsum(products), abs=size * bound(one, other) * 2.0**-64)


def test_half_a_quantum_is_rounded_to_even_in_both_words():
    halves = np.array([1.0, -1.0, 3.0, 5.0, 1.0 + 2.0**-40])
    for place in (-31, -65):
        one = np.append(np.concatenate([halves, -halves]) * 2.0**place, 0.75)
        ones = np.ones_like(one)
        assert dot(one, ones) == dot(one[::-1].copy(), ones) == exact(one, ones)


@pytest.mark.parametrize(
    "one, other", [(1e-300, 1.0), (5e-324, 1.0), (1e-160, 1e-160), (1e160, 1e140), (1e300, 1e-300)]
)
def test_huge_and_tiny_products(one, other):
    left, right = np.array([1.0, -0.5, 0.25, 0.0]) * one, np.array([1.0, 0.5, 3.0, 2.0]) * other
    assert dot(left, right) == exact(left, right)


def test_nothing_zeros_and_what_is_not_finite():
    assert math.copysign(1, dot(np.zeros(5), np.ones(5))) == 1.0 and dot(np.zeros(5), np.ones(5)) == 0.0
    assert dot(np.empty(0, np.float32), np.empty(0, np.float32)) == 0.0
    assert dot(np.full(5, 1e-200), np.full(5, -1e-200)) == 0.0
    for top in (math.inf, math.nan, 2.0**1000):
        assert math.isnan(dot(np.array([1.0, np.nan]), np.ones(2), top))
    assert values(np.array([[2**61, 0], [-(2**61), 0]]), [2.0**999] * 2) == [math.inf, -math.inf]


def test_as_many_terms_as_there_may_be_do_not_overflow():
    top = 1 - 2.0**-53  # each is rounded up to 2**64 quanta
    words = dot_words(np.full(2**15, top), np.ones(2**15), top, [(0, 2**15)])
    total = normalized(words[None] * np.int64(2**18 - 1))  # as many ranks of as many elements, less than 2**33
    assert values(total, [top]) == [2.0**15 * (2**18 - 1) * top]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_one_vector_are_single_dot_products(device, dtype):
    rows, vector = wild(1, (5, 20_000), dtype), wild(2, 20_000, dtype)
    spans, indices = [(3, 17_000), (17_100, 19_999)], [4, 0, 2]
    tops = [bound(rows[k], vector) for k in indices]
    words = row_dot_words(rows, indices, vector, tops, spans)
    alone = [dot_words(rows[k], vector, top, spans) for k, top in zip(indices, tops, strict=True)]
    assert np.array_equal(words, alone)
    assert ((0 <= words[:, 1]) & (words[:, 1] < 2**34)).all()
    assert np.array_equal(row_dot_words(device.put(rows), indices, device.put(vector), tops, spans), words)
    assert not row_dot_words(rows, indices, vector, tops, []).any()
    assert row_dot_words(rows, [], vector, [], spans).shape == (0, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 4097])
def test_a_combination_is_rounded_once_an_element_in_the_order_of_the_rows(device, dtype, size):
    rows, vector = wild(3, (4, size), dtype, 1), wild(4, size, dtype, 1)
    indices, coefficients = [3, 1, 0], [0.3, -1.7, 1e-3]
    expected = 0.7 * vector.astype(np.float64)
    for k, coefficient in zip(indices, coefficients, strict=True):
        expected = expected + coefficient * rows[k].astype(np.float64)
    there, out = device.put(vector), np.empty_like(vector)
    combine(rows, indices, coefficients, vector, 0.7, out)
    assert np.array_equal(out, expected.astype(dtype))
    combine(device.put(rows), indices, coefficients, there, 0.7, there)
    assert np.array_equal(arrays.to_host(there), out)
    combine(rows, indices, coefficients, vector, 0.7, vector)
    assert np.array_equal(vector, out)
    combine(rows, [], [], vector, -1.0, out)
    assert np.array_equal(out, -vector)


# Sums of squares that do not depend on how the terms are cut.


def parts(array, cuts, top):
    return [sum_of_squares(part, top, array.size) for part in np.split(array, cuts)]


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(1, 500), st.lists(st.integers(0, 500), max_size=5))
def test_any_cut_and_any_order_give_the_same_bits_of_norm(dtype, size, cuts):
    array = wild(size, size, dtype)
    top = largest(array)
    expected = sum_of_squares(array, top, size)
    pieces = parts(array, sorted(min(cut, size) for cut in cuts), top)
    assert np.array_equal(sum(pieces), expected)
    assert np.array_equal(sum(pieces[::-1]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 1000, 100_003])
def test_close_to_the_exact_sum(dtype, size):
    array = wild(size, size, dtype)
    exact = math.fsum(float(x) * float(x) for x in array)
    assert norm(sum_of_squares(array, largest(array), size), largest(array)) == pytest.approx(exact**0.5, rel=1e-14)
    assert norm_of(array) == pytest.approx(exact**0.5, rel=1e-14)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_huge_and_tiny_numbers_have_a_norm(scale):
    array = np.array([3.0, -4.0, 0.0]) * scale
    assert norm_of(array) == pytest.approx(5 * scale, rel=1e-14)


def test_nothing_and_zeros():
    assert norm_of(np.empty(0)) == norm_of(np.zeros(5, np.float32)) == 0.0
    assert largest(np.empty(0, np.float32)) == 0.0
    assert not sum_of_squares(np.empty(0, np.float32), 1.0, 5).any()
    assert not sum_of_squares(np.zeros(9), 0.0, 9).any()


@pytest.mark.parametrize("by_cuda", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_device_memory_gives_the_same_bits(device, dtype, by_cuda, monkeypatch):
    monkeypatch.setattr(StandIn, "compiles_cuda", by_cuda and StandIn.compiles_cuda)
    array = wild(999, 999, dtype)
    assert largest(array) == abs(array).max()
    there = device.put(array)
    assert largest(there) == largest(array)
    assert np.array_equal(sum_of_squares(there, largest(array), 999), sum_of_squares(array, largest(array), 999))
    gaps = device.empty(2 * 999, dtype)[::2]
    gaps[...] = there
    assert largest(gaps) == largest(array)
    ranges = Ranges([Range(0, 3, 500), Range(0, 500, 999)])
    assert largest_of([there], ranges) == largest_of([array], ranges)


by_cuda = pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no C++ compiler")
NUMBERS = {
    "wild": lambda size, dtype: wild(size, size, dtype),
    "equal": lambda size, dtype: np.full(size, 0.1, dtype),
    "zeros": lambda size, dtype: np.zeros(size, dtype),
    "tiny": lambda size, dtype: wild(size, size, dtype) * np.finfo(dtype).smallest_subnormal,
    "huge": lambda size, dtype: np.linspace(-1, 1, size, dtype=dtype) * np.finfo(dtype).max,
}
SIZES = [1, 31, 16_384, 16_385, 50_001]


def as_bits(numbers):
    return np.array(numbers, np.float64).tobytes()


@by_cuda
@pytest.mark.parametrize("backwards", ["", "1"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NUMBERS)
def test_many_ranges_of_a_device_give_the_bits_of_the_host(kind, dtype, backwards, environ):
    environ(MPISHARD_CUDA_BACKWARDS=backwards or None)
    host = [NUMBERS[kind](size, dtype) for size in SIZES]
    device = [on_device(array) for array in host]
    parts = [(row, *cut) for row, size in enumerate(SIZES) for cut in ((0, size), (size // 3, size), (5, 5))]
    ranges = Ranges([Range(row, min(a, SIZES[row]), min(b, SIZES[row]), row) for row, a, b in parts])
    tops = largest_of(host, ranges)
    assert as_bits(largest_of(device, ranges)) == as_bits(tops)
    bounds, terms = [largest(array) for array in host], [4 * size for size in SIZES]
    assert as_bits(sums_of_squares(device, ranges, bounds, terms)) == as_bits(
        sums_of_squares(host, ranges, bounds, terms)
    )
    for one, other in zip(device, host, strict=True):
        assert as_bits(largest(one)) == as_bits(largest(other))
        assert as_bits(norm_of(one)) == as_bits(norm_of(other))
        assert norm_of(other) > 0 or not other.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_largest_shows_what_is_not_finite_also_on_a_device(dtype, value):
    host = [wild(size, size, dtype) for size in SIZES]
    ranges = Ranges.whole(host)
    for place in (0, -1):
        for row, array in enumerate(host):
            bad = array.copy()
            bad[place] = value
            found = largest_of([on_device(each) for each in (*host[:row], bad, *host[row + 1 :])], ranges)
            assert [math.isfinite(top) for top in found] == [number != row for number in range(len(host))]
            assert math.isnan(found[row]) == math.isnan(value)
            assert not math.isfinite(largest(on_device(bad))) and not math.isfinite(largest(bad))


@by_cuda
def test_largest_values_wait_on_the_device(monkeypatch):
    host = [wild(size, size, np.float32) for size in (7, 40_000)]
    device, values = [on_device(array) for array in host], LargestValues(3, np.float32, empty_on_device(1))
    waits = counted_waits(monkeypatch)
    values.take(device, Ranges.whole(device), first=1)
    values.take(device[:1], Ranges.whole(device[:1]), first=1)
    assert not waits
    assert values.values().tolist() == [0.0, largest(host[0]), largest(host[1])]
    assert len(waits) == 1
    values.clear()
    assert not values.values().any()


def test_no_ranges_and_nothing_in_them():
    device = [empty_on_device(0, np.float32), empty_on_device(3, np.float32)]
    assert largest_of(device, Ranges([])) == [] and largest_of([], Ranges([])) == []
    ranges = Ranges([Range(0, 0, 0), Range(1, 2, 2)])
    assert largest_of(device, ranges) == [0.0, 0.0]
    assert not sums_of_squares(device, ranges, [1.0], [5]).any()
    assert sums_of_squares([], Ranges([]), [], []).shape == (0, 2)


# Products of rows with several vectors in one pass are those of each by itself.

SIZE = 10_007


def with_and_without_cuda(monkeypatch):
    """Twice, the second time where no CUDA function is compiled for the stand-in."""
    yield
    monkeypatch.setattr(StandIn, "compiles_cuda", False)
    yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [False, True])
def test_pairs_of_rows_over_elements_that_changed(device, dtype, before, monkeypatch):
    random = np.random.default_rng(3)
    rows = random.standard_normal((5, 40_000)).astype(dtype)
    masks = [random.random(40_000) < 0.6, random.random(40_000) < 0.6]
    pairs, tops, spans = [(4, 0), (0, 0), (2, 3)], [32.0, 64.0, 32.0], [(3, 35_000), (35_100, 39_999)]
    first = masks[0] if before else None
    words = changed_words(rows, pairs, tops, first, masks[1], spans)
    for found, (one, other), top in zip(words, pairs, tops, strict=True):
        was, now = (dot_words(rows[one], np.where(mask, rows[other], 0).astype(dtype), top, spans) for mask in masks)
        assert np.array_equal(found, normalized((now - was if before else now)[None])[0])
    far = device.put(rows), pairs, tops, None if first is None else device.put(first), device.put(masks[1]), spans
    for _ in with_and_without_cuda(monkeypatch):
        assert np.array_equal(changed_words(*far), words)


@pytest.mark.pairs(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "parts", [(0.9, 0.9, 0.01, 0.0), (0.01, 0.9, 0.9, 0.9), (0.5,), (0.01,), (0.9, 0.8, 0.9, "of 1")]
)
@pytest.mark.parametrize("of_free", [(None, True, False, None), (None, None, True, False)])
def test_each_vector_with_each_row(device, dtype, parts, of_free, monkeypatch):
    random = np.random.default_rng(len(parts))
    rows = random.standard_normal((5, SIZE)).astype(dtype)
    free = random.random(SIZE) < 0.7
    spans, indices = [(3, 5000), (5100, 9999)], [4, 0, 2]
    factors = []
    for number, part in enumerate(parts):
        if part == "of 1":
            vector = factors[1].vector
        else:
            vector = np.where(random.random(SIZE) < part, random.standard_normal(SIZE), 0).astype(dtype)
        factors.append(Factor(vector, [32.0 * 2**k for k in range(3)], of_free[number]))
    words = words_with(rows, indices, factors, spans, free)
    for found, (vector, tops, of_free) in zip(words, factors, strict=True):
        counts = vector if of_free is None else np.where(free == of_free, vector, 0).astype(dtype)
        assert np.array_equal(found, row_dot_words(rows, indices, counts, tops, spans))
    far = [Factor(device.put(vector), tops, of_free) for vector, tops, of_free in factors]
    for _ in with_and_without_cuda(monkeypatch):
        assert np.array_equal(words_with(device.put(rows), indices, far, spans, device.put(free)), words)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("starts", [[0, 4, 4, 5003, 9000], [7, 7, 8], [3, 3], [0, 0, 0]])
def test_each_group_of_elements(device, dtype, starts, monkeypatch):
    random = np.random.default_rng(len(starts))
    rows, vectors = random.standard_normal((4, SIZE)).astype(dtype), random.standard_normal((2, SIZE))
    index = random.permutation(SIZE)[: starts[-1]].astype(np.int64)
    indices, tops = [3, 1], [[32.0, 64.0], [40.0, 0.0]]
    factors = [vector.astype(dtype).astype(np.float64)[index] for vector in vectors]
    words = sorted_words(rows, indices, index, np.array(starts), factors, tops)
    assert words.shape == (len(starts) - 1, 2, 2, 2)
    for group, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        there = np.isin(np.arange(SIZE), index[start:stop])
        for found, vector, each in zip(words[group], vectors, tops, strict=True):
            counts = np.where(there, vector, 0).astype(dtype)
            expected = row_dot_words(rows, indices, counts, each, [(0, SIZE)])
            assert np.array_equal(found, expected)
            np.testing.assert_allclose(approximate_values(found, each), values(found, each), rtol=1e-15)
    far = device.put(rows), indices, device.put(index), np.array(starts), [device.put(factor) for factor in factors]
    for _ in with_and_without_cuda(monkeypatch):
        assert np.array_equal(sorted_words(*far, tops), words)


def test_without_rows_or_elements():
    rows = np.ones((2, 5))
    factor = Factor(rows[0].copy(), [], None)
    assert words_with(rows, [], [factor], [(0, 5)]).shape == (1, 0, 2)
    assert not words_with(rows, [0], [factor._replace(tops=[1.0])], []).any()


# Sums along a tree over an index: one value, whichever rank adds which terms.

TERMS = st.integers(1, 70)


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
            stack.append((TreeNode(start, stop), lower + upper))
    return stack


@given(TERMS, st.data())
def test_a_run_is_made_of_the_fewest_nodes(total, data):
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found, known, place = tree_nodes(start, stop, total), every_node(total), start
    for node in found:
        assert node.stop == max(end for first, end in known if first == place and end <= stop)
        place = node.stop
    assert place == stop
    assert len(found) <= 2 * max(1, total.bit_length())


@given(TERMS, st.integers(1, 12), st.booleans())
def test_any_deal_gives_the_bits_of_the_tree(total, ranks, in_turns):
    terms = wild(total, (total, 5), np.float32, 3)
    assignment = TermAssignment(total, ranks, in_turns)
    assert sorted(term for rank in range(ranks) for term in assignment.terms(rank)) == list(range(total))
    # Each rank adds within its run ...
    kept = []
    for rank in range(ranks):
        leaves = [(TreeNode(term, term + 1), terms[term]) for term in assignment.terms(rank)]
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
    terms = wild(60, (60, 50), np.float32, 3)
    assert not np.array_equal(value(terms), np.add.reduce(list(terms)))
    assert not np.array_equal(value(terms), value(terms[::-1]))


@given(TERMS)
def test_numbers_add_up_alike(total):
    terms = wild(total, total, np.float64, 3).tolist()
    assert tree_sum(terms) == value(terms)


def test_the_sum_of_none_is_zero():
    assert tree_sum([]) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
def test_rows_of_two_buffers_add_up_in_one_pass(rows, size, dtype):
    terms = wild(rows, (rows, size), dtype, 3)
    times = tree_merges([TreeNode(row, row + 1) for row in range(rows)], rows)
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
    terms = wild(5, (5, 300), np.float32, 3)
    times = tree_merges([TreeNode(row, row + 1) for row in range(5)], 5)
    own, received = device.put(terms[2]), device.put(np.concatenate([terms[0], terms[1], terms[3], terms[4]]))
    out = device.put(np.zeros(300, np.float32))
    add_by_tree(own, received, [0, 300, -1, 600, 900], times, out)
    assert np.array_equal(arrays.to_host(out), value(terms))
