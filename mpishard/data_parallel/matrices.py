"""Whole matrices for Muon: each is gathered at one rank, which orthogonalizes it, and goes back to those that own it.

Gradients, state and parameters stay divided as the strategy has them, in pieces of matrices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpishard.backend import array as arrays
from mpishard.comm.axis import Axis
from mpishard.comm.reshard import Transfer, transfers, view_of
from mpishard.data_parallel.strategies import Strategy
from mpishard.layout.boxes import box_size
from mpishard.layout.tensors import Piece, cut_holding
from mpishard.optim import Muon, Rule

Array = Any


class Matrices:
    """The matrices of a model that a rule needs whole, by name. Creation is collective over the strategy's sync group.

    A rank's work on a matrix is taken as proportional to its products; the largest go to ranks first.
    """

    def __init__(self, strategy: Strategy, names: set[str]) -> None:
        parameters, ownership, group = strategy.parameters, strategy.ownership, strategy.sync_group
        self.names = names
        own = [each for each in cut_holding(parameters.pieces, ownership.own) if each.name in names]
        # A worker of Local SGD that is one data rank, or several that take the same step, has all matrices.
        self._axis = group if isinstance(group, Axis) and group.size > 1 else None
        members, rank = (1, 0) if self._axis is None else (self._axis.size, self._axis.rank)
        layouts = [tuple(own)]
        if self._axis is not None:
            described = tuple((each.name, each.box, each.start) for each in own)
            layouts = [tuple(Piece(*each) for each in theirs) for theirs in self._axis.allgather_object(described)]
        work, sizes = [0] * members, [0] * members
        held: list[list[Piece]] = [[] for _ in range(members)]
        matrices = [spec for spec in parameters.specs if spec.name in names]
        for spec in sorted(matrices, key=lambda spec: -spec.size * min(spec.shape)):
            owner = min(range(members), key=lambda each: (work[each], each))
            held[owner].append(Piece(spec.name, spec.box, sizes[owner]))
            sizes[owner] += spec.size
            work[owner] += spec.size * min(spec.shape) + 1
        self._held, self._size = held[rank], sizes[rank]
        self._there = _Exchange(transfers(layouts, [tuple(each) for each in held]), members, rank)
        self._back = _Exchange(transfers([tuple(each) for each in held], layouts), members, rank)

    def orthogonalize(self, directions: Array, rules: Mapping[str, Rule]) -> None:
        """Orthogonalize the matrices in place, of which each rank has pieces in `directions`, by the rules by name.

        `directions` has the ranges that this rank owns, end to end. Collective over the sync group.
        """
        whole = arrays.empty(self._size, directions.dtype, like=directions)
        self._there.move(self._axis, directions, whole)
        for piece in self._held:
            rule = rules[piece.name]
            assert isinstance(rule, Muon)
            matrix = view_of(whole, piece, piece.box)
            matrix[...] = rule.orthogonalized(matrix)
        self._back.move(self._axis, whole, directions)


class _Exchange:
    """One rank's part of transfers between all ranks."""

    def __init__(self, plan: Sequence[Transfer], members: int, rank: int) -> None:
        self._own = [each for each in plan if each.source_rank == each.target_rank == rank]
        ends = [each for each in plan if each.source_rank != each.target_rank]
        self._outgoing = sorted(
            (each for each in ends if each.source_rank == rank), key=lambda each: each.target_rank
        )  # stable: those to one rank are in the order of the plan, as there
        self._incoming = sorted((each for each in ends if each.target_rank == rank), key=lambda each: each.source_rank)
        self._out_counts, self._in_counts = [0] * members, [0] * members
        for each in self._outgoing:
            self._out_counts[each.target_rank] += box_size(each.box)
        for each in self._incoming:
            self._in_counts[each.source_rank] += box_size(each.box)
        self._moves = bool(ends)

    def move(self, axis: Axis | None, source: Array, target: Array) -> None:
        """Fill the pieces of `target` from those of `source`.  Collective over `axis`, None if nothing travels."""
        for each in self._own:
            view_of(target, each.target, each.box)[...] = view_of(source, each.source, each.box)
        if axis is None or not self._moves:
            return
        packed = arrays.empty(sum(self._out_counts), source.dtype, like=source)
        arrived = arrays.empty(sum(self._in_counts), source.dtype, like=source)
        offset = 0
        for each in self._outgoing:
            size = box_size(each.box)
            packed[offset : offset + size] = view_of(source, each.source, each.box).reshape(-1)
            offset += size
        axis.all_to_all(packed, arrived, self._out_counts, self._in_counts, label="matrices")
        offset = 0
        for each in self._incoming:
            view = view_of(target, each.target, each.box)
            view[...] = arrived[offset : offset + view.size].reshape(view.shape)
            offset += view.size
