"""Who keeps the copy of whose state: on another node where there is one, so that the loss of a node loses no state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def buddies(nodes: Sequence[str]) -> list[int]:
    """By rank, the rank that keeps its copy; a permutation.

    With the ranks in a row, node by node and the node of most ranks first, it is the one so many places on as that node
    has ranks, round the end: no rank's is on its own node, unless more than half of all ranks are there.

    Parameters
    ----------
    nodes : sequence of str
        Where each rank is.
    """
    numbers = Counter(nodes)
    row = sorted(range(len(nodes)), key=lambda rank: (-numbers[nodes[rank]], nodes.index(nodes[rank])))
    shift = max(numbers.values(), default=0) if len(numbers) > 1 else 1
    found = [0] * len(nodes)
    for place, rank in enumerate(row):
        found[rank] = row[(place + shift) % len(row)]
    return found
