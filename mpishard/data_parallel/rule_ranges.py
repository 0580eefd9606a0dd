"""The elements that each rule updates: the ranges that a rank owns, cut where the parameter group changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from mpishard.backend.array import Kernel
from mpishard.backend.ranges import Range, Ranges
from mpishard.data_parallel.owned_parts import OwnedPart
from mpishard.data_parallel.owned_ranges import OwnedRanges
from mpishard.layout.tensors import ParameterSpec
from mpishard.optim import Rule

Array = Any


class RuleRange(NamedTuple):
    """Elements ``[start, stop)`` of the owned range number `owned`, which `rule` updates."""

    rule: Rule
    owned: int
    start: int
    stop: int


class RuleRanges:
    """The owned ranges of a rank, with the rule of each.

    `counted` has this rank's parts in sums over the model, cut at tensors, each with the number of its tensor, for the
    norms of two sets of arrays; `owned` has all elements of this rank, likewise.
    """

    def __init__(self, ownership: OwnedRanges, specs: Sequence[ParameterSpec]) -> None:
        self._ownership = ownership
        self._names = [spec.name for spec in specs]
        self._rule: Rule | None = None
        self._by_tensor: list[Rule] = []
        self._ranges: list[RuleRange] = []
        self._rules: list[Rule] = []
        self._at_once = Ranges([])
        self._of_kernels: dict[Kernel, Ranges] = {}

    def by_tensor(self, rule: Rule) -> list[Rule]:
        """The rule of each tensor, by its number."""
        if rule is not self._rule:
            self._by_tensor = rule.by_tensor(self._names)
            self._ranges = self._cut(rule)
            self._rules = list({id(each.rule): each.rule for each in self._ranges}.values())
            number = {id(each): choice for choice, each in enumerate(self._rules)}
            self._at_once = Ranges([Range(*each[1:], number[id(each.rule)]) for each in self._ranges])
            self._rule = rule
        return self._by_tensor

    def of(self, rule: Rule, factor: float) -> list[RuleRange]:
        """The ranges in their order, each with its rule; `factor` multiplies all learning rates."""
        self.by_tensor(rule)
        if factor == 1:
            return self._ranges
        scaled = {id(each.rule): each.rule.scaled(factor) for each in self._ranges}
        return [each._replace(rule=scaled[id(each.rule)]) for each in self._ranges]

    def at_once(self, rule: Rule, factor: float) -> tuple[list[Rule], Ranges]:
        """The ranges for one launch, and the rules that they choose from; otherwise as `of`."""
        self.by_tensor(rule)
        return [each.scaled(factor) for each in self._rules], self._at_once

    def of_all(self, kernel: Kernel) -> Ranges:
        """All of each owned range, for a kernel that does the same with all of them."""
        if kernel not in self._of_kernels:
            own = enumerate(self._ownership.own)
            self._of_kernels[kernel] = Ranges([Range(row, 0, stop - start) for row, (start, stop) in own])
        return self._of_kernels[kernel]

    @cached_property
    def counted(self) -> tuple[Ranges, Ranges]:
        return _by_tensor(self._ownership.counted_parts), _by_tensor(self._ownership.counted_parts)

    @cached_property
    def owned(self) -> Ranges:
        return _by_tensor(self._ownership.owned_parts)

    def _cut(self, rule: Rule) -> list[RuleRange]:
        if all(each is rule for each in self._by_tensor):
            own = enumerate(self._ownership.own)
            return [RuleRange(rule, number, 0, stop - start) for number, (start, stop) in own if stop > start]
        ranges: list[RuleRange] = []
        for tensor, owned, start, stop in self._ownership.owned_parts:
            of_tensor = self._by_tensor[tensor]
            last = ranges[-1] if ranges else None
            if last is not None and (last.rule is of_tensor, last.owned, last.stop) == (True, owned, start):
                ranges[-1] = last._replace(stop=stop)
            else:
                ranges.append(RuleRange(of_tensor, owned, start, stop))
        return ranges


def _by_tensor(parts: Sequence[OwnedPart]) -> Ranges:
    return Ranges([Range(part.owned, part.start, part.stop, part.tensor) for part in parts])
