"""SIGTERM, SIGUSR1 and Ctrl-C as wishes to leave: `Signals` notes them, and the run saves and stops, elastic or not.

In an elastic run one process that gets one leaves, and the others go on; if all get one, the run stops.  All ranks
agree to stop, and save, in `mpishard.training.loop`, those of an elastic run in `mpishard.elastic.step_decisions`.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from mpishard.launch.ctrl_c import Interrupts

_HEARD = (signal.SIGTERM, signal.SIGUSR1)
# A launcher passes a signal on to all ranks, which get it at different moments, at most so far apart.
_SKEW_S = 1.0


class Signals:
    """A context manager that handles SIGTERM and SIGUSR1, and restores the earlier handlers at its end.

    It handles Ctrl-C too, unless the script has its own handler; a second Ctrl-C ends the process.

    Outside of the main thread Python allows no signal handlers, so there it handles none.  `came`: whether this process
    has got a signal.

    As a callback of a run that is not elastic it stops the run with a last checkpoint after any rank has got a signal;
    then ``result.stop_reason == "callback"`` on all ranks::

        with mpishard.Signals() as signals:
            result = optimizer.optimize(problem, callback=signals, checkpoints=checkpoints, resume=True)
        if result.stop_reason == "callback":
            sys.exit(os.EX_TEMPFAIL)  # 75

    An elastic run handles the signals itself (see `ElasticOptimizer`), and this object gets none of them meanwhile.

    No method is collective.
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
                # None: a handler that Python has not installed and cannot restore.
                self._before[number] = signal.SIG_DFL if before is None else before
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def __call__(self, state: object = None) -> bool:
        """Whether this process has got a signal; `state` is ignored.

        Parameters
        ----------
        state : TrainingState, optional
            Ignored; callbacks get one.

        Returns
        -------
        bool
            The same as `came`.
        """
        return self.came

    def report(self) -> int:
        """This process's value for an agreement of the workers; call it once for each agreement.

        0: this process has got no signal.  1: it has got one, and the others may still get it.  2: it has got one, and
        others that got it too would have reported it by now.

        Returns
        -------
        int
            0, 1 or 2.
        """
        if not self.came:
            return 0
        now = time.monotonic()
        if self._reported is None:
            self._reported = now
        return 2 if now - self._reported >= _SKEW_S else 1

    @property
    def by_user(self) -> bool:
        """Whether this process got Ctrl-C, or a signal that `mpishard run` sent because the user ended it."""
        ends = Interrupts.is_ending
        return self._interrupted or (self.came and ends is not None and ends())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        self._interrupted |= number == signal.SIGINT
        if number == signal.SIGINT:
            signal.signal(number, self._before.pop(signal.SIGINT))
