"""Decides when to save: every given number of steps, or such that saves take no more than a share of a run's time.

If a save has kept the slowest rank for s seconds, the next one is due s / share seconds after that save began.  All
saves but the last together then take at most the share of the run.  The first save follows the first step.

All ranks must decide equally, but without communication after every step.  So they exchange their measurements at
some steps only: after half of the estimated steps until the next save, then after half of the remaining ones, and so
on; at the latest after a hundred steps, since steps may become slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from mpishard.comm.axis import Axis

_MOST_STEPS = 100


@dataclass(frozen=True)
class Measured:
    """One rank's seconds: in the last save, since that save began, and per step since it ended."""

    stall: float
    elapsed: float
    step: float


class Pace:
    """Saves so often that they take no more than a share of the run's time, between 0 and 1."""

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.share = share
        self.clock = clock
        self._began = self._ended = 0.0
        self._saved: int | None = None
        self._next = 1
        self._asked = 0

    def note(self, step: int, began: float) -> None:
        """Note that a save after `step`, which began at the time `began`, is over."""
        self._began, self._ended = began, self.clock()
        self._saved, self._next = step, step + 1

    def ranks_changed(self) -> None:
        """Exchange measurements after the next step: other ranks take part from now on."""
        self._next = 1

    def due(self, step: int, world: Axis) -> bool:
        """Return True if a save is due after the step. Collective."""
        return self.asks(step) and self.decide(step, world.allgather_object(self.measured(step)))

    def asks(self, step: int) -> bool:
        """Return True if the ranks exchange measurements after this step; the same on all ranks."""
        if step < self._asked:  # another run begins
            self._next = 1
        self._asked = step
        return step >= self._next

    def measured(self, step: int) -> Measured | None:
        """The measurements of this rank; None if it has taken part in no save."""
        if self._saved is None:
            return None
        now = self.clock()
        return Measured(self._ended - self._began, now - self._began, (now - self._ended) / max(1, step - self._saved))

    def decide(self, step: int, measurements: Sequence[Measured | None]) -> bool:
        """Return True to save after this step, from the measurements of all ranks."""
        known = [each for each in measurements if each is not None]
        if not known:
            return True
        left = max(each.stall for each in known) / self.share - min(each.elapsed for each in known)
        if left <= 0:
            return True
        a_step = max(each.step for each in known)
        self._next = step + (max(1, int(min(left / a_step / 2, _MOST_STEPS))) if a_step > 0 else 1)
        return False


class InSteps:
    """Saves after every `every` steps, or never; the interface of `Pace`."""

    def __init__(self, every: int | None) -> None:
        self.every = every

    def due(self, step: int, world: Axis) -> bool:
        return self.every is not None and step > 0 and step % self.every == 0

    def clock(self) -> float:
        """Seconds since any fixed moment."""
        return 0.0

    def note(self, step: int, began: float) -> None:
        """Note that a save after `step`, which began at the time `began`, is over."""

    def ranks_changed(self) -> None:
        """Note that other ranks take part from now on."""


def save_interval(every: float | None) -> InSteps | Pace:
    """The object that decides when to save, by `Checkpoints`' option `every`."""
    check_every(every)
    return InSteps(every) if every is None or _in_steps(every) else Pace(float(every))


def check_every(every: float | None) -> None:
    """Raise ValueError unless `every` is a number of steps, a share of the time, or None."""
    sound = every is None or (
        every >= 1 if _in_steps(every) else isinstance(every, float | np.floating) and 0 < every < 1
    )
    if not sound:
        raise ValueError(
            f"every={every!r} must be a whole number of steps of at least 1, a share of the run's time above 0 and "
            "below 1, or None"
        )


def _in_steps(every: object) -> TypeGuard[int]:
    return not isinstance(every, bool) and isinstance(every, int | np.integer)
