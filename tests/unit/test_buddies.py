"""Copies of state are on other nodes where they can be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.elastic.transactions import buddies, needs_copy


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("", []),
        ("a", [0]),
        ("aaaa", [1, 2, 3, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("abb", [2, 0, 1]),
    ],
)
def test_nodes(nodes, expected):
    assert buddies(nodes) == expected


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=24))
def test_as_few_as_can_be_are_on_the_same_node(nodes):
    found = buddies(nodes)
    assert sorted(found) == list(range(len(nodes)))
    assert all(to != rank for rank, to in enumerate(found))
    largest = max(Counter(nodes).values())
    assert sum(nodes[to] == nodes[rank] for rank, to in enumerate(found)) == max(0, 2 * largest - len(nodes))


@pytest.mark.parametrize(
    ("holdings", "nodes", "expected"),
    [
        ("aaaa", "xxxx", []),
        ("abab", "xxxx", []),
        ("abac", "xxxx", [1, 3]),
        ("aabb", "xxyy", [0, 1, 2, 3]),  # the loss of a node would lose both
        ("abab", "xxyy", []),
        (["a", "", "b", ""], "xxyy", [0, 2]),  # nothing needs no copy
        ("a", "x", [0]),
    ],
)
def test_what_needs_a_copy(holdings, nodes, expected):
    assert [rank for rank in range(len(nodes)) if needs_copy(holdings, nodes, rank)] == expected
