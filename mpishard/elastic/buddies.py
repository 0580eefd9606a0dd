"""Chooses the rank that keeps a copy of each rank's state, on another node if possible, and the arrays that need one.

Then the loss of a node loses no state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


def buddies(nodes: Sequence[str]) -> list[int]:
    """For each rank, the rank that keeps the copy of its state: a permutation.  `nodes` has the node of each rank.

    The ranks are sorted by node, the node with the most ranks first.  A rank's buddy is as many positions further in
    this row as that first node has ranks, counted round the end.  So no buddy is on the rank's own node, unless more
    than half of all ranks are there.
    """
    numbers = Counter(nodes)
    row = sorted(range(len(nodes)), key=lambda rank: (-numbers[nodes[rank]], nodes.index(nodes[rank])))
    shift = max(numbers.values(), default=0) if len(numbers) > 1 else 1
    found = [0] * len(nodes)
    for position, rank in enumerate(row):
        found[rank] = row[(position + shift) % len(row)]
    return found


def needs_copy(holdings: Sequence[Hashable], nodes: Sequence[str], rank: int) -> bool:
    """Return True if an array of this rank would be lost with the rank, or with its node if there are other nodes.

    `holdings` says, by rank, which elements of the array a rank holds (empty: none); `nodes` has the node of each rank.
    """
    if not holdings[rank]:
        return False
    holders = [other for other, holding in enumerate(holdings) if holding == holdings[rank]]
    several_nodes = len(set(nodes)) > 1
    return len({nodes[other] for other in holders}) == 1 if several_nodes else len(holders) == 1
