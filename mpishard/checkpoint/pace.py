"""When to save, so that saves take no more than a share of a run's time.

After a save that kept the slowest rank for s seconds the next one is due s / share seconds after it began: all saves
but the last one together then take at most the share of the run.  The first one, of which nothing is known, comes
after the first step.

All ranks must answer alike, and not ask each other after every step.  They tell each other what they have measured now
and then: after half of the steps that are left, by their time so far, until the next save is due, then after half of
those, and so on; but each time after a hundred steps, since steps may take longer than they did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_MOST_STEPS = 100


@dataclass(frozen=True)
class Measured:
    """What one rank knows of the last save.

    Parameters
    ----------
    stall : float
        Seconds that it kept the rank.
    elapsed : float
        Seconds since it began.
    step : float
        Seconds a step took since.
    """

    stall: float
    elapsed: float
    step: float


class Pace:
    """Not collective; the ranks exchange what `measured` returns.

    Parameters
    ----------
    share : float
        Of the run's time, between 0 and 1.
    clock : callable
        Seconds from any moment on.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.share = share
        self.clock = clock
        self._began = self._ended = 0.0
        self._saved: int | None = None
        self._next = 1
        self._asked = 0

    def note(self, step: int, began: float) -> None:
        """A save of this step, which began then, is over."""
        self._began, self._ended = began, self.clock()
        self._saved, self._next = step, step + 1

    def ask_soon(self) -> None:
        """Ask after the next step: there are other ranks now."""
        self._next = 1

    def asks(self, step: int) -> bool:
        """Whether the ranks are to tell each other what they have measured after this step; the same on all."""
        if step < self._asked:  # of another run, which begins
            self.ask_soon()
        self._asked = step
        return step >= self._next

    def measured(self, step: int) -> Measured | None:
        """What this rank has to tell; None if it has taken part in no save."""
        if self._saved is None:
            return None
        now = self.clock()
        return Measured(self._ended - self._began, now - self._began, (now - self._ended) / max(1, step - self._saved))

    def decide(self, step: int, told: Sequence[Measured | None]) -> bool:
        """Whether to save after this step, from what all ranks have told."""
        known = [each for each in told if each is not None]
        if not known:
            return True
        left = max(each.stall for each in known) / self.share - min(each.elapsed for each in known)
        if left <= 0:
            return True
        a_step = max(each.step for each in known)
        self._next = step + (max(1, int(min(left / a_step / 2, _MOST_STEPS))) if a_step > 0 else 1)
        return False
