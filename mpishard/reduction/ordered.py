"""Sums of gradients over the data axis in the order of a fixed tree, for ``reproducible=True``.

The order of an MPI all-reduce depends on the number of ranks, the size of the buffer and the network.  Here each part
of a bucket has an owner.  Every rank sends that part of its partial sums to the owner, which adds them along the tree
over the step's micro-batches (`mpishard.reduction.tree_sum`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpishard.backend import array as arrays
from mpishard.backend.array import accumulate
from mpishard.backend.row_sums import add_by_tree
from mpishard.comm.axis import Axis
from mpishard.comm.channel import ChainedRequest
from mpishard.layout.boxes import run_lengths, run_of, split
from mpishard.parameters.buckets import Bucket
from mpishard.reduction.tree_sum import TermAssignment, TreeNode, sort_by_owner, tree_merges, tree_nodes

Array = Any


class _Sum(NamedTuple):
    """The rows that an exchange adds up to one node, as (is on this rank, row number), and their `tree_merges`."""

    node: TreeNode
    rows: list[tuple[bool, int]]
    merges: list[int]


@functools.lru_cache(maxsize=256)
def _plan(assignment: TermAssignment, exchange: int, rank: int) -> tuple[list[int], list[_Sum]]:
    """The number of partial sums that each rank sends in an exchange, and the sums that every owner makes of them."""
    parts = [assignment.parts(each, exchange) for each in range(assignment.ranks)]
    arriving = 0
    placed = []
    for each, theirs in enumerate(parts):
        for row, node in enumerate(theirs):
            placed.append((node, (each == rank, row if each == rank else arriving + row)))
        arriving += len(theirs) if each != rank else 0
    sums = []
    for total in assignment.sums(exchange):
        within = [(node, where) for node, where in placed if total.start <= node.start and node.stop <= total.stop]
        merges = tree_merges([node for node, _ in within], assignment.total)
        sums.append(_Sum(total, [where for _, where in within], merges))
    return [len(theirs) for theirs in parts], sums


class OrderedSums:
    """Adds up the gradients of one model over an axis in the order of a fixed tree."""

    def __init__(self, axis: Axis, like: Array) -> None:
        self.nbytes: int = 0  # of all blocks: for parts that arrive or are packed, and for sums so far
        # Called with what `start` sends, before it does; what it returns is called with this rank's part of the sum.
        self.observer: Callable[[Bucket, Sequence[Array], Sequence[int]], Callable[[Array], None]] | None = None
        self._axis = axis
        self._like = like
        self._free: list[Array] = []
        self._exchanges: dict[int, int] = {}  # by bucket, how many it has had in this step
        # By bucket: the sums of the earlier exchanges, one for each node before the next exchange.
        self._stacks: dict[int, list[Array]] = {}
        # The micro-batches of each rank in this step; default: one per rank.
        self.assignment: TermAssignment = TermAssignment(axis.size, axis.size)

    def reset(self) -> None:
        """Begin a new step; each rank has one micro-batch in it unless `assignment` is set."""
        self.assignment = TermAssignment(self._axis.size, self._axis.size)
        self._exchanges.clear()
        for stack in self._stacks.values():
            self._free += stack
        self._stacks.clear()

    def start(self, bucket: Bucket, partial: Sequence[Array], pieces: Sequence[int], target: Array) -> ChainedRequest:
        """Start to send each owner its part of a bucket; the result's `wait` returns `target`. Collective.

        `partial` has this rank's partial sums, oldest first, one for each of its nodes, and is ignored on a rank
        without a node; `pieces` has the elements of the bucket that each rank owns; `target` receives the sum, and may
        be this rank's part of the newest of `partial`, or the front of that array. Raises ValueError on all ranks if
        this bucket has had all its exchanges of the step.
        """
        axis, number = self._axis, self._exchanges.get(bucket.index, 0)
        if number >= self.assignment.exchanges:
            raise ValueError(
                "with reproducible=True, ZeRO-2 and ZeRO-3 take a model's gradient once for each micro-batch of the "
                "problem, but this model makes several of one; give it the method losses_and_gradient (see "
                "mpishard.parameters.flat.Model), or use DDP or ZeRO-1"
            )
        self._exchanges[bucket.index] = number + 1
        tell = None if self.observer is None else self.observer(bucket, partial, pieces)
        rows, sums = _plan(self.assignment, number, axis.rank)
        mine, count = rows[axis.rank], pieces[axis.rank]
        packed = None
        if mine > 1:
            packed = self._take(len(partial) * sum(pieces))
            sort_by_owner(partial, pieces, packed)
        source = partial[-1] if mine == 1 else self._like if packed is None else packed[: mine * sum(pieces)]
        arriving = [each * count if rank != axis.rank else 0 for rank, each in enumerate(rows)]
        received = self._take(sum(arriving))
        pending = axis.start_all_to_all(
            source,
            received[: sum(arriving)],
            [mine * each for each in pieces],
            arriving,
            keep_own=True,
            label="gradients",
        )
        own = source[mine * sum(pieces[: axis.rank]) :]
        blocks = [received] if packed is None else [received, packed]

        def finish() -> Array:
            pending.wait()
            for each in sums:
                self._add(bucket.index, each, own, received, target)
            self._free.extend(blocks)
            if tell is not None:
                tell(target)
            return target

        return ChainedRequest(pending, finish)

    def all_reduce(self, flat: Array) -> None:
        """Sum an array over the axis, in place; the array of each rank, of the same size, is one term. Collective."""
        pieces = run_lengths(split(flat.size, self._axis.size))
        own = flat[run_of(pieces, self._axis.rank)]
        self.reset()
        self.start(Bucket(0, 0, 1, 0, flat.size), [flat], pieces, own).wait()
        self._axis.all_gather(flat, counts=pieces, label="gradients")
        self.reset()

    def _add(self, bucket: int, total: _Sum, own: Array, received: Array, target: Array) -> None:
        """Add up the rows of one node, then the nodes that this completes."""
        last = total.node.stop == self.assignment.total
        block = target if last else self._take(target.size)
        out = block[: target.size]
        # A negative start is that of a row of `own`, see `add_by_tree`.
        starts = [-1 - row * out.size if here else row * out.size for here, row in total.rows]
        add_by_tree(own, received, starts, total.merges, out)
        stack = self._stacks.setdefault(bucket, [])
        while len(stack) >= len(tree_nodes(0, total.node.stop, self.assignment.total)):
            lower = stack.pop()
            accumulate(out, lower[: out.size])  # both orders of these two give the same bits
            self._free.append(lower)
        if not last:
            stack.append(block)

    def _take(self, size: int) -> Array:
        """A block of at least `size` elements: the smallest free one that is large enough, or a new one.

        Before a new block is made, one of the free blocks, all too small, is given up.
        """
        fitting = [index for index, block in enumerate(self._free) if block.size >= size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda index: self._free[index].size))
        if self._free:
            self.nbytes -= self._free.pop().nbytes
        block = arrays.empty(size, self._like.dtype, like=self._like)
        self.nbytes += block.nbytes
        return block
