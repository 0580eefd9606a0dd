"""Ctrl-C ends a run in order: after the first the loop stops at the end of its step, the second ends the process.

Before a run Ctrl-C ends the process, but not in the middle of the start-up, where it could not be reported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, ClassVar


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, and raise it there.

    Yields
    ------
    None
        Without effect outside the main thread, or where the script has its own handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


class Interrupts:
    """A context manager that handles the first SIGINT, unless another handler is set; it restores the old handler.

    Outside the main thread Python allows no handler, so it does nothing there.

    Parameters
    ----------
    speaks : bool
        Whether this rank reports the signal on stderr.

    Attributes
    ----------
    came : bool
        This process has received a signal.
    is_ending : callable or None
        In a job of `mpishard run`: whether the supervisor was asked to end it.  It then sends SIGTERM or SIGUSR1 to all
        ranks, which count as Ctrl-C.
    """

    is_ending: ClassVar[Callable[[], bool] | None] = None

    came: bool

    def __init__(self, speaks: bool) -> None:
        self.came = False
        self._speaks = speaks
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            supervised = Interrupts.is_ending is not None
            for number in (signal.SIGINT, *((signal.SIGTERM, signal.SIGUSR1) if supervised else ())):
                if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        ends = Interrupts.is_ending
        if number != signal.SIGINT and not (ends is not None and ends()):
            signal.signal(number, self._before.pop(signal.Signals(number)))
            signal.raise_signal(number)
            return
        self.came = True
        self.__exit__(None, None, None)
        if self._speaks and ends is None:  # not by print: the signal may have interrupted a print
            with contextlib.suppress(OSError):
                os.write(2, b"\nmpishard: Ctrl-C: the run ends after this step; once more, and it ends at once\n")
