"""Sums in the order of a fixed binary tree over an index, so that their bits do not depend on which rank adds what.

Node (l, i) of the tree over `total` terms covers the terms ``[i 2**l, (i + 1) 2**l)``, cut at `total`.  Its value is
left plus right child, or the left child where there is no right one.  A run of terms consists of few nodes, at most two
per level.  So a rank with a run of terms adds up each of these nodes, and the owner of the sum adds the nodes of all
ranks.  No MPI here; the nodes are never those of a cluster.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpishard.layout.boxes import split

Array = Any


class TreeNode(NamedTuple):
    """The node that covers terms ``[start, stop)``."""

    start: int
    stop: int


@functools.lru_cache(maxsize=4096)
def tree_nodes(start: int, stop: int, total: int) -> tuple[TreeNode, ...]:
    """The fewest nodes of the tree over `total` terms that make up the terms ``[start, stop)``, ascending."""
    assert 0 <= start <= stop <= total
    found = []
    while start < stop:
        # The largest power of two that divides the start; any divides 0.  Terms beyond `total` are counted as present.
        aligned = start & -start or total
        fits = aligned if stop == total else 1 << ((stop - start).bit_length() - 1)
        end = min(start + min(aligned, fits), stop)
        found.append(TreeNode(start, end))
        start = end
    return tuple(found)


def tree_merges(parts: Sequence[TreeNode], total: int) -> list[int]:
    """The number of merges after each push, when a run of neighbouring nodes is added up on a stack in ascending order.

    A merge replaces the two newest values by their sum, lower plus upper. In the end the stack holds the `tree_nodes`
    of the whole run, which has no gaps, of the tree over `total` terms.
    """
    depth, found = 0, []
    for part in parts:
        left = len(tree_nodes(parts[0].start, part.stop, total))
        found.append(depth + 1 - left)
        depth = left
    return found


def tree_sum(terms: Sequence[float]) -> float:
    """The sum of numbers along their tree, in the order of their index; 0.0 without any."""
    stack: list[float] = []
    leaves = [TreeNode(index, index + 1) for index in range(len(terms))]
    for term, merges in zip(terms, tree_merges(leaves, len(terms)), strict=True):
        stack.append(term)
        for _ in range(merges):
            upper = stack.pop()
            stack[-1] += upper
    return stack[0] if stack else 0.0


@dataclass(frozen=True)
class TermAssignment:
    """The rank that computes each of a step's terms, and when partial sums are sent to their owners.

    Nothing is communicated: all ranks compute the same.
    """

    total: int
    ranks: int
    # False: each rank has a run of terms and adds up its nodes; there is one exchange. True: the terms are assigned
    # round-robin, with an exchange after each round, for ranks that cannot keep partial sums.
    in_turns: bool = False
    cuts: tuple[int, ...] | None = None  # ``ranks + 1`` offsets of the runs, which may be empty; default: even runs

    @functools.cached_property
    def _cuts(self) -> Sequence[int]:
        return split(self.total, self.ranks) if self.cuts is None else self.cuts

    @property
    def exchanges(self) -> int:
        """Number of times that partial sums are sent in a step."""
        return max(1, -(-self.total // self.ranks)) if self.in_turns else 1

    def terms(self, rank: int) -> range:
        """The terms of a rank, in the order in which it computes them."""
        if self.in_turns:
            return range(rank, self.total, self.ranks)
        return range(self._cuts[rank], self._cuts[rank + 1])

    def tree_merges(self, rank: int) -> list[int]:
        """The merges, as of the function `tree_merges`, with which a rank adds up its terms before an exchange."""
        if self.in_turns:
            return [0 for _ in self.terms(rank)]
        return tree_merges([TreeNode(term, term + 1) for term in self.terms(rank)], self.total)

    def parts(self, rank: int, exchange: int = 0) -> tuple[TreeNode, ...]:
        """The nodes that a rank sends in an exchange, ascending; exchanges count from 0.

        Those of all ranks, in order of rank, are one run, which begins where that of the last exchange ended.
        """
        if not self.in_turns:
            return tree_nodes(self._cuts[rank], self._cuts[rank + 1], self.total)
        term = exchange * self.ranks + rank
        return (TreeNode(term, term + 1),) if term < self.total else ()

    def sums(self, exchange: int = 0) -> tuple[TreeNode, ...]:
        """The nodes that are the sums of an exchange, ascending."""
        if not self.in_turns:
            return tree_nodes(0, self.total, self.total)
        start = exchange * self.ranks
        return tree_nodes(start, min(start + self.ranks, self.total), self.total)


def sort_by_owner(partial: Sequence[Array], pieces: Sequence[int], out: Array) -> None:
    """Copy partial sums to the front of `out`, in which each owner's parts of all of them are one run.

    Each has ``sum(pieces)`` elements; `pieces` has those that each rank owns.
    """
    start = offset = 0
    for count in pieces:
        for each in partial:
            out[offset : offset + count] = each[start : start + count]
            offset += count
        start += count
