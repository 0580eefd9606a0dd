"""What SIGTERM, SIGUSR1 and Ctrl-C ask of a process of an elastic run: to leave it, or to stop it if all are asked."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from mpishard.launch.interrupts import Interrupts

_HEARD = (signal.SIGTERM, signal.SIGUSR1)
# A launcher passes a signal on to all ranks, which do not see it at the same moment.
_SKEW_S = 1.0


class Signals:
    """As a context manager it takes SIGTERM and SIGUSR1, and puts back at its end what handled them before.

    It takes Ctrl-C too, unless somebody else does; the second one ends the process.

    Outside of the main thread, where Python does not let anybody do so, it takes none.  `came` says whether one has
    come to this process.

    As a callback of a run that is not elastic it stops the run with a last checkpoint once a signal has come to any
    rank, and then ``result.stop_reason == "callback"`` on all of them::

        with mpishard.Signals() as signals:
            result = optimizer.optimize(problem, callback=signals, checkpoints=checkpoints, resume=True)
        if result.stop_reason == "callback":
            sys.exit(os.EX_TEMPFAIL)  # 75

    An elastic run takes the signals itself (see `ElasticOptimizer`), and this sees none of them meanwhile.
    """

    def __init__(self) -> None:
        self.came: bool = False
        self._interrupted = False
        self._reported: float | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            for number in (*_HEARD, signal.SIGINT) if ctrl_c else _HEARD:
                before = signal.signal(number, self._note)
                # None: a handler that is not Python's and that Python cannot put back.
                self._before[number] = signal.SIG_DFL if before is None else before
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def __call__(self, state: object = None) -> bool:
        """Whether one has come, whatever the state of the run is."""
        return self.came

    def report(self) -> int:
        """0: none has come.  1: one has, and the others may have had it too.  2: they would have said so by now.

        For the workers to agree on: call it once for every agreement.
        """
        if not self.came:
            return 0
        now = time.monotonic()
        if self._reported is None:
            self._reported = now
        return 2 if now - self._reported >= _SKEW_S else 1

    @property
    def by_user(self) -> bool:
        """Whether Ctrl-C has come to this process, or whatever `mpishard run`, which was to end, has sent it."""
        ends = Interrupts.is_ending
        return self._interrupted or (self.came and ends is not None and ends())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        self._interrupted |= number == signal.SIGINT
        if number == signal.SIGINT:
            signal.signal(number, self._before.pop(signal.SIGINT))
