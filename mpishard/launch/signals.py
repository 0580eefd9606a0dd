"""Signals that end a run in order: Ctrl-C, SIGTERM and SIGUSR1.

After the first Ctrl-C the loop stops at the end of its step; the second ends the process.  Before a run Ctrl-C ends the
process, but not in the middle of the start-up, where it could not be reported.  In an elastic run one process that gets
a signal leaves, and the others continue; if all get one, the run stops.  All ranks agree to stop, and save, in
`mpishard.training.run`, those of an elastic run in `mpishard.elastic.requests`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, ClassVar, Self

import numpy as np

from mpishard.arguments import shown


@contextlib.contextmanager
def ctrl_c_deferred() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block, and raise it there.

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


# Time until a Ctrl-C is sent again that Python ignored, since it came where no exception can be raised.
_AGAIN_S = 0.05


def ctrl_c_again(ignored: sys.UnraisableHookArgs) -> None:
    """An unraisablehook: send a Ctrl-C again that came in a callback from C, e.g. while kernels compile."""
    main = threading.main_thread().ident
    if issubclass(ignored.exc_type, KeyboardInterrupt) and main is not None:
        timer = threading.Timer(_AGAIN_S, signal.pthread_kill, (main, signal.SIGINT))  # this wakes the thread, too
        timer.daemon = True
        timer.start()
    else:
        sys.__unraisablehook__(ignored)


def restore_sigusr1() -> None:
    """Let SIGUSR1 end a script that has no handler for it; a batch script asks ranks to leave with that signal.

    MPICH installs a handler when it starts, which ignores the signal: the job would run into its time limit, and nobody
    would queue it again.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


# Signals with which batch systems and the supervisor ask a process to leave.
_LEAVE = (signal.SIGTERM, signal.SIGUSR1)


class Interrupts:
    """A context manager that notes the first Ctrl-C; the second one ends the process.

    A handler of the script's own stays.  The earlier handlers are restored at the end.  Outside the main thread Python
    allows no handler, so it does nothing there.  `speaks`: this rank reports the signal on stderr.  `came`: this
    process has received a signal.  `is_ending`, in a job of `mpishard run`, returns True if the supervisor was asked to
    end it; it then sends SIGTERM or SIGUSR1 to all ranks, which count as Ctrl-C.
    """

    is_ending: ClassVar[Callable[[], bool] | None] = None

    came: bool

    def __init__(self, speaks: bool) -> None:
        self.came = False
        self._speaks = speaks
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._handled():
                before = signal.signal(number, self._take)
                # None: a handler that Python has not installed and cannot restore.
                self._before[number] = signal.SIG_DFL if before is None else before
        return self

    def __exit__(self, *error: object) -> None:
        for number in list(self._before):
            self._restore(number)

    def _handled(self) -> Sequence[int]:
        """The signals to handle, of those for which the script has no handler."""
        numbers = (signal.SIGINT, *(() if Interrupts.is_ending is None else _LEAVE))
        return [each for each in numbers if signal.getsignal(each) in (signal.default_int_handler, signal.SIG_DFL)]

    def _restore(self, number: int) -> None:
        before = self._before.get(number)
        if before is not None:  # else a signal has come within `__exit__`
            signal.signal(number, before)
            self._before.pop(number, None)

    @staticmethod
    def _is_asked_to_end() -> bool:
        return Interrupts.is_ending is not None and Interrupts.is_ending()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._restore(number)
        if number != signal.SIGINT and not self._is_asked_to_end():
            signal.raise_signal(number)
            return
        self.came = True
        if self._speaks and Interrupts.is_ending is None:  # not by print: the signal may have interrupted a print
            with contextlib.suppress(OSError):
                os.write(2, b"\nmpishard: Ctrl-C: the run ends after this step; once more, and it ends at once\n")


# A launcher passes a signal on to all ranks, which get it at moments that are at most this far apart.
_SKEW_S = 1.0


class Signals(Interrupts):
    """A context manager that handles SIGTERM and SIGUSR1, and restores the earlier handlers at its end.

    It handles Ctrl-C too, unless the script has its own handler; a second Ctrl-C ends the process.

    Outside of the main thread Python allows no signal handlers, so there it handles none.  `came`: whether this process
    has got a signal, which others may not have got yet.

    In a loop of your own call `should_stop` once a step::

        if signals.should_stop(mesh):
            optimizer.save_checkpoint("run")
            sys.exit(os.EX_TEMPFAIL)  # 75

    As a callback of a run that is not elastic it stops the run with a last checkpoint after any rank has got a signal;
    then ``result.stop_reason == "callback"`` on all ranks::

        with mpishard.Signals() as signals:
            result = optimizer.optimize(problem, callback=signals, checkpoints=checkpoints, resume=True)
        if result.stop_reason == "callback":
            sys.exit(os.EX_TEMPFAIL)

    An elastic run handles the signals itself (see `ElasticOptimizer`), and this object gets none of them meanwhile.

    No method but `should_stop` is collective.
    """

    def __init__(self) -> None:
        super().__init__(speaks=False)
        self._interrupted = False
        self._reported: float | None = None

    def __call__(self, state: object = None) -> bool:
        """Whether this process has got a signal: a callback of a run, whose ranks agree to stop.

        `state` is what callbacks get.  Raises TypeError without it: in a loop of your own ranks would part.
        """
        if state is None:
            raise TypeError(
                "signals() asks this rank alone, and ranks that get a signal at different moments would part: ask "
                "signals.should_stop(mesh) on all ranks, once a step; optimize(callback=signals) needs neither"
            )
        return self.came

    def should_stop(self, mesh: Any) -> bool:
        """Whether any rank of the mesh has got a signal: for loops of your own, once a step.  Collective.

        It is one message of 8 bytes.

        Parameters
        ----------
        mesh : Mesh
            Its ranks stop together.

        Returns
        -------
        bool
            The same on all ranks.

        Raises
        ------
        TypeError
            On this rank, if `mesh` is no Mesh.
        """
        world = getattr(mesh, "world", None)
        if world is None:  # this file does without MPI, and cannot ask for the class
            raise TypeError(f"should_stop: mesh={shown(mesh)} must be mpishard.Mesh()")
        return bool(world.all_reduce(np.array([self.came], np.int64), op="max", label="control")[0])

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
        """True if this process got Ctrl-C, or a signal that `mpishard run` sent because the user ended it."""
        return self._interrupted or (self.came and self._is_asked_to_end())

    def _handled(self) -> Sequence[int]:
        ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return (*_LEAVE, signal.SIGINT) if ctrl_c else _LEAVE

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if number == signal.SIGINT:
            self._interrupted = True
            self._restore(number)
