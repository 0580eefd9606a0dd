"""Which variants of a test run where: see the marks in ``docs/contributing/tests.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from grid_cases import every_pair


def full(*values: Any) -> list[Any]:
    """These values of a parameter, marked ``full``: ``parametrize("steps", [10, *full(200)])``."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


def quick(values: Sequence[Any], most: int) -> list[Any]:
    """Values of a parameter, the first few of them marked ``quick``."""
    return [pytest.param(value, marks=pytest.mark.quick if place < most else []) for place, value in enumerate(values)]


def mark_beyond_pairs(items: Iterable[Any]) -> None:
    """Mark ``full`` what no pair of parameter values needs, of the variants of each test that is marked ``pairs``.

    ``pairs(6)`` leaves the six of these that are the least alike, those marked ``quick`` before others.  On a file,
    as ``pytestmark``, the mark holds for all its tests that have no other.
    """
    variants: dict[tuple[Any, str], list[Any]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("pairs") and not _is_marked(item, "hardware", "full"):
            variants.setdefault((item.parent, item.originalname), []).append(item)
    for each in variants.values():
        needed = every_pair(each, _values) if len(_values(each[0])) > 1 else each
        (most,) = each[0].get_closest_marker("pairs").args or (len(needed),)
        chosen = _least_alike(needed, most)
        for item in each:
            if item not in chosen:
                item.add_marker(pytest.mark.full)


def _is_marked(item: Any, *names: str) -> bool:
    return any(item.get_closest_marker(name) for name in names)


def _values(item: Any) -> dict[str, int]:
    """Parameters by name; values are the same objects in all variants, and need not be hashable."""
    return {name: id(value) for name, value in item.callspec.params.items()}


def _least_alike(items: Sequence[Any], most: int) -> list[Any]:
    chosen: list[Any] = []
    seen: Counter[tuple[str, int]] = Counter()
    left = list(items)
    while left and len(chosen) < most:
        item = min(left, key=lambda each: (not _is_marked(each, "quick"), sum(seen[v] for v in _values(each).items())))
        left.remove(item)
        chosen.append(item)
        seen.update(_values(item).items())
    return chosen
