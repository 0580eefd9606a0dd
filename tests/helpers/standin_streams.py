"""Streams and events of the stand-in for a device: work is done when somebody waits for it, and no sooner."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any


class Event:
    """A place in the work of a stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._number = stream.queued

    @property
    def done(self) -> bool:
        """Whether the work was done before this look.  To look again and again is to wait: each lets one item pass.

        A look never waits for other ranks.
        """
        done = self._stream.finished >= self._number
        if not done:
            self._stream.pass_one()
        return done

    def synchronize(self) -> None:
        self._stream.run_to(self._number)


class Stream:
    """Work in the order in which it was queued, none of it done before somebody waits for it.

    Several streams wait for each other by events only.  ``with stream:`` makes it the current one.
    """

    by_ptr: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self.by_ptr[self.ptr] = self
        # Work, its arrays, and an event that it waits for; True: it waits for other ranks.
        self.queue: list[tuple[Callable[..., object], Sequence[Any], Event | bool]] = []
        self.finished = 0
        self._runs = False
        self._thread = threading.get_ident()
        self._outer: list[Stream] = []

    @property
    def ptr(self) -> int:
        """Its number, for doubles of libraries that take raw streams."""
        return id(self)

    @property
    def queued(self) -> int:
        return self.finished + len(self.queue)

    def launch(self, work: Callable[..., object], *arrays: Any, waits_for_ranks: bool = False) -> None:
        """Queue ``work(*host_views_of_arrays)``."""
        self.queue.append((work, arrays, waits_for_ranks))

    def record(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.queue.append((event.synchronize, (), event))

    def pass_one(self) -> None:
        """Do the next work, unless it waits for other ranks; that of another stream where it waits for that.

        Only in the thread that works with the stream, and not within its work.
        """
        if self._runs or threading.get_ident() != self._thread:
            return
        waits = self.queue[0][2]
        if isinstance(waits, Event) and not waits.done:
            return
        if waits is not True:
            self.run_to(self.finished + 1)

    def run_to(self, number: int) -> None:
        while self.finished < number:
            work, arrays, _ = self.queue.pop(0)
            self._runs = True
            try:
                with contextlib.ExitStack() as stack:
                    work(*(stack.enter_context(array.opened()) for array in arrays))
            finally:
                self._runs = False
            self.finished += 1

    def synchronize(self) -> None:
        self.run_to(self.queued)

    def __enter__(self) -> Stream:
        self._outer.append(_current.stream)
        _current.stream = self
        return self

    def __exit__(self, *exception: object) -> None:
        _current.stream = self._outer.pop()


_current = SimpleNamespace(stream=Stream())


def current_stream() -> Stream:
    """The stream on which operations are queued."""
    return _current.stream
