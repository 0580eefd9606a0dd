"""Chooses the rank that keeps a copy of each rank's state, on another node if possible.

Then the loss of a node loses no state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def buddies(nodes: Sequence[str]) -> list[int]:
    """For each rank, the rank that keeps the copy of its state: a permutation.

    The ranks are sorted by node, the node with the most ranks first.  A rank's buddy is as many positions further in
    this row as that first node has ranks, counted round the end.  So no buddy is on the rank's own node, unless more
    than half of all ranks are there.

    Parameters
    ----------
    nodes : sequence of str
        The node of each rank.
    """
    numbers = Counter(nodes)
    row = sorted(range(len(nodes)), key=lambda rank: (-numbers[nodes[rank]], nodes.index(nodes[rank])))
    shift = max(numbers.values(), default=0) if len(numbers) > 1 else 1
    found = [0] * len(nodes)
    for position, rank in enumerate(row):
        found[rank] = row[(position + shift) % len(row)]
    return found
