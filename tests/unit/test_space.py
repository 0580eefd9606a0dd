"""The space of one process, and what all spaces share."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpishard.backend.exact import MOST_TERMS
from mpishard.minimizers.space import LocalSpace, Space


class TwoRanks(LocalSpace):
    """The first of two ranks; the other has the same elements."""

    def __init__(self, size, total, like, spans):
        Space.__init__(self, size, total, like, spans)

    def add(self, numbers):
        numbers *= 2

    def maximize(self, numbers):
        self.tops = numbers.copy()


def test_sums_of_one_process():
    one, other = np.array([3.0, -4.0, 0.5]), np.array([1.0, 2.0, -2.0])
    space = LocalSpace(3, one)
    assert (space.size, space.total, space.like.size, space.spans) == (3, 3, 0, ((0, 3),))
    tops = space.largest(one, other)
    assert tops == [4.0, 2.0]
    assert space.dots([(one, other), (one, one)], [8.0, 16.0]) == [-6.0, 25.25]
    assert space.count(3, 0, -1) == [3, 0, -1]
    assert space.whole(one) is one and space.own(one) is one
    assert space.largest() == space.dots([], []) == space.count() == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinite_for_a_maximum(value):
    vector = np.array([1.0, value, 2.0], np.float32)
    assert LocalSpace(3, vector).largest(vector, np.abs(vector[[0, 2, 2]])) == [math.inf, 2.0]


def test_only_what_counts_here_is_summed():
    vector = np.array([1.0, 10.0, 2.0, math.nan])
    space = TwoRanks(4, 4, vector[:0], [(0, 1), (1, 1), (2, 3)])
    assert space.spans == ((0, 1), (2, 3))
    assert space.largest(vector) == [2.0] and np.array_equal(space.tops, [2.0])
    assert space.dots([(vector, vector)], [4.0]) == [10.0]
    assert space.count(2) == [4]
    assert TwoRanks(4, 2, vector, []).largest(vector) == [0.0]
    assert TwoRanks(4, 2, vector, []).dots([(vector, vector)], [0.0]) == [0.0]


def test_device_memory_and_vectors_that_are_too_long(device):
    vector = device.empty(5, np.float32)
    vector.fill(-2.0)
    space = LocalSpace(5, vector)
    assert space.largest(vector) == [2.0] and space.dots([(vector, vector)], [4.0]) == [20.0]
    with pytest.raises(ValueError, match=f"at most {MOST_TERMS} elements, but these have {MOST_TERMS + 1}"):
        TwoRanks(5, MOST_TERMS + 1, vector, [(0, 5)])


class Counting(LocalSpace):
    """Counts the all-reduces, and the words in them."""

    sent = ()

    def add(self, numbers):
        self.sent += (numbers.size,)

    def maximize(self, numbers):
        self.sent += (numbers.size,)


@pytest.mark.parametrize("decades", [14, 160])
def test_sums_whose_largest_elements_do_not_meet_are_made_again(decades):
    one = np.geomspace(10.0**-decades, 10.0**decades, 1000)
    other, plain = 3 / one, np.linspace(-1, 2, 1000)
    space = Counting(1000, one)
    tops = space.largest(one, other, plain)
    pairs = [(plain, plain), (one, other), (one, -other)]
    found = space.dots(pairs, [tops[2] ** 2, tops[0] * tops[1], tops[0] * tops[1]])
    assert found == pytest.approx([math.fsum(plain * plain), 3000, -3000], rel=1e-14)
    assert space.sent == (3, 6, 2, 4)


def test_sums_that_cancel_are_made_once():
    one = np.array([1.0, -1.0, 2.0, 0.0])
    space = Counting(4, one)
    assert space.dots([(one, np.ones(4) - (np.arange(4) > 1))], [2.0]) == [0.0]
    assert space.sent == (2, 1)
    assert math.isnan(space.dots([(np.full(4, math.inf), one)], [math.inf])[0])
