"""Decides what follows the end of a job: nothing, or a restart with how many ranks.  No MPI, no processes.

How far a job came, and whether it is stuck, is read from its notes.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mpishard.launch.exit_codes import INTERRUPTED, exit_code
from mpishard.launch.job_notes import Failure, Heal, JobNotes, Notes
from mpishard.launch.launchers import Host

# Signals that end ranks; MPICH's launcher returns their plain numbers.
_SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)


@dataclass(frozen=True)
class Policy:
    """When a job is restarted, and with how many ranks at least; ValueError if a number is too small."""

    elastic: bool = False  # the job is restarted at all
    # A restart replaces the ranks that were lost.  True: it has as many ranks as were asked for, as far as the hosts
    # that answer have slots, since a dead process does not mean a dead core.  If ranks are lost again before there is
    # progress, each further restart has fewer ranks, down to `min_workers`.  False: a restart has only the ranks that
    # are left.
    replace: bool = True
    min_workers: int = 1  # least number of ranks
    # The number of ranks is a multiple of this: the product of the mesh's tensor and pipeline sizes.  As long as enough
    # ranks are left it is a multiple of what the meshes of an earlier start have noted, too.
    multiple_of: int = 1
    max_restarts: int = 3  # largest number of starts in succession without progress beyond an earlier start

    def __post_init__(self) -> None:
        for name in ("min_workers", "multiple_of"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts} must be at least 0")


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended."""

    code: int  # exit code of the launcher; if negative, the signal that killed it
    notes: Notes  # notes of its processes before it was ended
    half_started: bool = False  # the job was ended since some ranks had not imported mpishard
    host_lost: bool = False  # the job was ended since a host did not answer
    stopped: int = 0  # the signal with which the user ended the job, or 0
    asked_to_leave: bool = False  # its ranks were sent SIGUSR1


@dataclass(frozen=True)
class JobHistory:
    """The history over all starts: ranks asked for and left, the furthest step, starts without progress.

    `died_early` is `_died_early` of the last start; `multiple_of` is what the meshes of a start have noted last.
    """

    asked: int
    ranks: int
    step: int = 0
    restarts: int = 0
    failure: Failure | None = None
    died_early: bool = False
    multiple_of: int = 1


@dataclass(frozen=True)
class Stop:
    """The decision that the run is over, with this exit code."""

    code: int
    why: str = ""


@dataclass(frozen=True)
class Start:
    """The decision to restart the job with this number of ranks on these hosts (empty: this host)."""

    ranks: int
    hosts: tuple[Host, ...]
    history: JobHistory = field(repr=False)
    why: str = ""


def reported(outcome: JobOutcome) -> int | None:
    """The exit code that the run itself has noted, whatever the launcher returns; None if it did not end in order."""
    ended = outcome.notes.ended
    if not outcome.notes.healed and (ended is None or ended.code == 0):
        # A rank that left on purpose or failed; the others did not note that they continue without it.
        if outcome.notes.given_up is not None:
            ended = outcome.notes.given_up
        elif outcome.notes.failure is not None:
            return None
    if ended is None or (outcome.notes.aborted and not ended.code):
        return None
    if ended.code is not None:
        return ended.code
    code = exit_code(outcome.code)
    return 0 if outcome.notes.healed and code > 128 else code  # a signal: that which killed the dead ranks


def signal_name(number: int) -> str:
    """The name of a signal from the user, for a message."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _died_early(outcome: JobOutcome) -> bool:
    """Return True if ranks were lost before all had imported mpishard; not if the script ended there on all ranks."""
    by_signal = outcome.code < 0 or outcome.code > 128 or outcome.code in _SIGNALS
    return not outcome.notes.started and (outcome.half_started or by_signal)


def decide(
    policy: Policy, history: JobHistory, outcome: JobOutcome, hosts: Sequence[Host], answering: Sequence[Host]
) -> Stop | Start:
    """Decide what follows an outcome; `history` is from before it.

    `hosts` are those of the run, `answering` those of them that answer now; both empty if it runs on this host.
    """
    code = reported(outcome)
    if code is not None:
        # Ranks cannot distinguish Ctrl-C from the other signals that end a run.
        return Stop(128 + outcome.stopped if outcome.stopped and code == INTERRUPTED else code)
    if outcome.stopped:
        return Stop(128 + outcome.stopped, f"was ended by {signal_name(outcome.stopped)}")
    failure = outcome.notes.failure
    # The launcher of MPICH returns the plain number, or mixes it with those of ranks that it has killed.
    by_signal = outcome.code in (signal.SIGUSR1, -signal.SIGUSR1, 128 + signal.SIGUSR1)
    if failure is None and (outcome.asked_to_leave or by_signal):
        return Stop(128 + signal.SIGUSR1, "was ended by SIGUSR1, which its script did not handle (mpishard.Signals)")
    # A launcher that returns 0 for a job that did not end in order is wrong.
    code = 1 if failure is not None or outcome.half_started else exit_code(outcome.code) or 1
    what = _what(outcome, answering != hosts)
    if not policy.elastic:
        return Stop(code, what)
    early = _died_early(outcome)
    if not history.step and tuple(answering) == tuple(hosts):
        if early and history.died_early:
            return Stop(code, f"{what}: the same twice, so another start would end like this one")
        if not outcome.notes.started and not early:
            return Stop(code, what)
        step = 0 if failure is None else failure.step or outcome.notes.step
        if failure is not None and failure.on_all_ranks and not step and not history.restarts:
            # No rank has been lost, so that another start would have the same ranks and give the same.
            return Stop(code, f"{what} on all ranks, before any step: another start would end the same way")
    if failure is not None and failure.trained:
        return Stop(code, what)
    if failure is not None and failure.same_as(history.failure):
        return Stop(code, f"{what}: the same failure twice, so another start would end like this one")
    progress = outcome.notes.step > history.step
    restarts = 1 if progress else history.restarts + 1
    if restarts > policy.max_restarts:
        return Stop(code, f"{what}; {restarts - 1} restarts have brought it no further than step {history.step}")
    hosts_lost = outcome.host_lost or tuple(answering) != tuple(hosts)
    ranks_lost = failure is None and outcome.code >= 0 and not hosts_lost
    least = -(-max(1, policy.min_workers) // policy.multiple_of) * policy.multiple_of
    noted = outcome.notes.multiple_of or history.multiple_of
    multiple = math.lcm(policy.multiple_of, noted)
    ranks = history.asked if policy.replace and progress else history.ranks
    if ranks_lost and not (policy.replace and (progress or not history.restarts)):
        # Launchers do not report the number of dead ranks; the ranks that continued without them do.
        fewer = min(ranks - 1, outcome.notes.healed or ranks)
        ranks = ranks if policy.replace and fewer // multiple * multiple < least else fewer
    slots = sum(host.slots for host in answering) if hosts else ranks
    left = min(ranks, slots)
    # A script may choose its mesh by the number of ranks, so that what an earlier mesh needed does not end the run.
    now = left // multiple * multiple
    if now < least:
        now = left // policy.multiple_of * policy.multiple_of
    if now < least:
        return Stop(code, f"{what}; {left} ranks remain and {least} are needed")
    history = JobHistory(history.asked, ranks, max(history.step, outcome.notes.step), restarts, failure, early, noted)
    return Start(now, tuple(answering), history, what)


def _what(outcome: JobOutcome, hosts_lost: bool) -> str:
    """How a job failed, for a message."""
    if outcome.host_lost or hosts_lost:
        return "has a host that does not answer"
    if outcome.notes.failure is not None:
        return f"failed by {outcome.notes.failure}"
    if outcome.code < 0:
        return f"lost its launcher to signal {-outcome.code}"
    if _died_early(outcome):
        reports = "" if outcome.half_started else f" (the launcher reports {outcome.code})"
        return f"lost ranks before all had imported mpishard{reports}"
    if not outcome.notes.started:
        return f"did not start, or its script never imported mpishard (the launcher reports {outcome.code})"
    if outcome.code == 0:
        return "ended without its completion marker, though the launcher reports success"
    return f"lost ranks (the launcher reports {outcome.code})"


# Watches the progress of a job in its notes: how far it is, and whether it is stuck.

_LONGEST_STEPS = 3  # without a new step, of the longest one so far, until a job is stuck
# Seconds that a job has to end by itself, since other ranks may still print errors.
_ABORT_S = 3.0


@dataclass(frozen=True)
class ProgressLimits:
    """Seconds after which a job is stuck."""

    start: float = 300.0  # from the start of the job until all ranks have imported mpishard
    step: float = 1800.0  # without a new step during an elastic run; at least thrice the longest step so far
    # Without a new step after a death; at least thrice the longest step so far.  An MPI that has lost processes may
    # lose a message too, and then all ranks wait forever.
    heal: float = 60.0
    end: float = 30.0  # from the end of the script to the end of its launcher


class ProgressMonitor:
    """Watches the notes of one start.

    `step` is the last noted step and `furthest` the largest: a script may train more than once.  `started`: all ranks
    have imported mpishard.  `half_started`: the job must be ended since some of its ranks have not.  `has_ended`: the
    script has ended.
    """

    def __init__(self, folder: JobNotes, limits: ProgressLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
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
        self._since = clock()

    def look(self, gone: int = 0) -> str:
        """The reason why the job must be ended, or empty.  `gone`: the number of its ranks that do not run."""
        now = self._clock()
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
        waits, patience = now - self._since, _LONGEST_STEPS * self._longest
        if self._step_to_pass is not None and waits > max(self._limits.heal, patience):
            return f"no step for {max(self._limits.heal, patience):g} s after a death (--heal-limit); the job is ended"
        if training and waits > max(self._limits.step, patience):
            return f"no step for {max(self._limits.step, patience):g} s (--step-limit); the job is ended"
        return ""
