"""Which variants of a test run where: see the marks in ``docs/contributing/tests.md``."""

from __future__ import annotations

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
    """Mark ``full`` what no pair of parameter values needs, of the variants of each test that is marked ``pairs``."""
    variants: dict[tuple[Any, str], list[Any]] = {}
    for item in items:
        if item.get_closest_marker("pairs") and not item.get_closest_marker("hardware"):
            variants.setdefault((item.parent, item.originalname), []).append(item)
    for each in variants.values():
        # Values are the same objects in all variants, and need not be hashable.
        needed = set(every_pair(each, lambda item: {name: id(value) for name, value in item.callspec.params.items()}))
        for item in each:
            if item not in needed:
                item.add_marker(pytest.mark.full)
