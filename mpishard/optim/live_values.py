"""Hyper-parameters that other code changes between two steps, as schedulers of PyTorch do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol


class LiveValues(Protocol):
    """Such values of one rule; each step uses those of that moment, which must be the same on all ranks."""

    @property
    def names(self) -> Collection[str]:
        """The fields of the rule that follow the values.  Not collective."""
        ...

    @property
    def by_name(self) -> Mapping[str, str]:
        """The values now, as text."""
        ...

    @property
    def fingerprint(self) -> int:
        """A number of 62 bits that depends on all of `by_name`."""
        ...

    @property
    def way_out(self) -> str:
        """The remedy where the values differ between ranks, for a message."""
        ...

    def check(self) -> None:
        """Raise ValueError unless a step can use the values; `step` compares the ranks."""
        ...

    def restore(self, configuration: Mapping[str, Any]) -> str:
        """Take the values from a `Rule.configuration` that was saved; returns the reason if it takes none, else ""."""
        ...
