"""The context of a backward pass that is not the last one of its step."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class NoSync:
    """The context of `GradientReducer.no_sync`; it may be entered again, also inside itself.

    Collective where that says so.

    Parameters
    ----------
    begin : callable
        Begins such a pass, and returns whether the pass under way was the last one.
    end : callable
        ``end(complete, was_last)`` ends it; not `complete` after an exception.
    """

    def __init__(self, begin: Callable[[], bool], end: Callable[[bool, bool], None]) -> None:
        self._begin = begin
        self._end = end
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._before.append(self._begin())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end(kind is None, self._before.pop())
