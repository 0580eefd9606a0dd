"""Watches the progress of a job in its notes: how far it is, and whether it is stuck.  No MPI, no processes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from mpishard.launch.job_notes import Heal, JobNotes, Notes

_STEPS = 3
# Seconds that a job has to end by itself, since other ranks may still print errors.
_ABORT_S = 3.0


@dataclass(frozen=True)
class Limits:
    """Seconds after which a job is stuck.

    Parameters
    ----------
    start : float
        From the start of the job until all ranks have imported mpishard.
    step : float
        Without a new step during an elastic run; at least thrice the longest step so far.
    heal : float
        Without a new step after a death; at least thrice the longest step so far.  An MPI that has lost processes may
        lose a message too, and then all ranks wait for ever.
    end : float
        From the end of the script to the end of its launcher.
    """

    start: float = 300.0
    step: float = 1800.0
    heal: float = 60.0
    end: float = 30.0


class ProgressMonitor:
    """Watches the notes of one start.

    Parameters
    ----------
    folder : JobNotes
    limits : Limits

    Attributes
    ----------
    step, furthest : int
        The last noted step, and the largest: a script may train more than once.
    started, has_ended : bool
        Whether all ranks have imported mpishard; whether the script has ended.
    half_started : bool
        The job must be ended since some of its ranks have not imported mpishard.
    """

    def __init__(self, folder: JobNotes, limits: Limits) -> None:
        self.step = self.furthest = 0
        self.started = self.has_ended = False
        self.half_started = False
        self._folder = folder
        self._limits = limits
        self._aborted: float | None = None
        self._gone: tuple[float, int] = 0.0, 0
        self._training: bool | None = None
        self._heal: Heal | None = None
        # After a death: a step that is later than this one proves progress, and makes it None.  The step after the last
        # committed one proves nothing, since it may have been noted before the death.
        self._step_to_pass: int | None = None
        self._longest = 0.0
        self._since = time.monotonic()

    def look(self, gone: int = 0) -> str:
        """The reason why the job must be ended, or empty.  `gone`: the number of its ranks that do not run."""
        now = time.monotonic()
        notes = self._folder.notes
        has_ended = notes.ended is not None
        if has_ended and not self.has_ended:
            self._since = now
        self.has_ended = has_ended
        died = gone > self._gone[1]
        if gone != self._gone[1]:
            self._gone = now, gone
        if self._aborted is None and notes.aborted:
            self._aborted = now
        self.started = self.started or notes.started
        if self._aborted is not None and now - self._aborted > _ABORT_S:
            return f"a rank has failed, and the job has not ended within {_ABORT_S:g} s; it is ended"
        if not has_ended:
            return self._look_at_steps(now, died, notes) if self.started else self._look_at_start(now)
        if now - self._since > self._limits.end:
            return f"the script has ended; its launcher has not for {self._limits.end:g} s and is killed"
        return ""

    def _look_at_start(self, now: float) -> str:
        since, gone = self._gone
        if gone and now - since > _ABORT_S:
            self.half_started = True
            return "a rank has ended before all had imported mpishard, and the others wait for it; the job is ended"
        if now - self._since > self._limits.start:
            self.half_started = True
            within = f"within {self._limits.start:g} s (--start-limit)"
            return f"not all ranks have imported mpishard {within}; the job is ended"
        return ""

    def _look_at_steps(self, now: float, died: bool, notes: Notes) -> str:
        step, heal, training = notes.step, notes.heal, notes.training
        if step != self.step:
            if self.step and self._step_to_pass is None:
                self._longest = max(self._longest, now - self._since)
            self._since = now
            if self._step_to_pass is not None and step > self._step_to_pass:
                self._step_to_pass = None
        if training != self._training:
            self._since = now
        if heal is not None and heal != self._heal:
            self._since, self._step_to_pass = now, heal.step + 1
        elif died and training and self._step_to_pass is None:
            self._since, self._step_to_pass = now, step + 1
        self.step, self._heal, self._training = step, heal, training
        self.furthest = max(self.furthest, step)
        if training is False:
            self._step_to_pass = None
        waits, patience = now - self._since, _STEPS * self._longest
        if self._step_to_pass is not None and waits > max(self._limits.heal, patience):
            return f"no step for {max(self._limits.heal, patience):g} s after a death (--heal-limit); the job is ended"
        if training and waits > max(self._limits.step, patience):
            return f"no step for {max(self._limits.step, patience):g} s (--step-limit); the job is ended"
        return ""
