"""The course of a job as its notes show it: how far it is, and whether it is stuck.  No MPI, no processes."""

from __future__ import annotations

import time

from mpishard.elastic.run_folder import RunFolder

_STEPS = 3


class Course:
    """Looks at the notes of one start.

    Parameters
    ----------
    folder : RunFolder
    end_limit : float
        Seconds that the launcher gets to end once the script has.
    heal_limit : float
        Seconds in which a step follows after a death, if one is to come, or thrice the longest step so far: an MPI that
        has lost processes may lose a message too, and then all wait for ever.

    Attributes
    ----------
    step : int
        The last one noted.
    has_ended : bool
        The script has.
    """

    def __init__(self, folder: RunFolder, end_limit: float, heal_limit: float) -> None:
        self.step = 0
        self.has_ended = False
        self._folder = folder
        self._limits = end_limit, heal_limit
        self._heal: tuple[float, int | None] = 0.0, None
        # What a step must be beyond to tell of progress after a death, if it is waited for: the one after the last that
        # was committed may have been noted before the death.
        self._beyond: int | None = None
        self._longest = 0.0
        self._since = time.monotonic()

    def look(self) -> str:
        """Why the job must be ended; empty if it need not."""
        now, step, heal = time.monotonic(), self._folder.step, self._folder.heal
        has_ended = self._folder.ended is not None
        if step != self.step:
            if self.step and self._beyond is None:
                self._longest = max(self._longest, now - self._since)
            self._since = now
            if self._beyond is not None and step > self._beyond:
                self._beyond = None
        if heal != self._heal:
            self._since, self._beyond = now, None if heal[1] is None else heal[1] + 1
        if has_ended and not self.has_ended:
            self._since = now
        self.step, self._heal, self.has_ended = step, heal, has_ended
        end_limit, heal_limit = self._limits
        heal_limit = max(heal_limit, _STEPS * self._longest)
        if has_ended and now - self._since > end_limit:
            return f"the script has ended; its launcher has not for {end_limit:g} s and is killed"
        if self._beyond is not None and not has_ended and now - self._since > heal_limit:
            return f"no step for {heal_limit:g} s after a death; the job is ended"
        return ""
