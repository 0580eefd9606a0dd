"""What follows a job that has ended: nothing, or another start, and of how many ranks.  No MPI, no processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpishard.launch.endings import INTERRUPTED
from mpishard.launch.hosts import Host
from mpishard.launch.run_folder import Ended, Failure

# What ends ranks; MPICH's launcher reports them as they are.
_SIGNALS = (signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)


@dataclass(frozen=True)
class Policy:
    """When a job is started again, and of how many ranks at least.

    Parameters
    ----------
    elastic : bool
        Start it again at all.
    replace : bool
        With as many ranks as were asked for, where the hosts that answer have room: a dead process is no dead core.
        When starts in succession lose ranks and get no further, each but the first is of fewer, as long as
        `min_workers` allows.  Without it ranks that were lost stay so.
    min_workers : int
        Fewest ranks.
    multiple_of : int
        The number of ranks is a multiple of this: the product of the mesh's tensor and pipeline sizes.
    max_restarts : int
        Most starts in succession that bring the run no further than an earlier one did.
    """

    elastic: bool = False
    replace: bool = True
    min_workers: int = 1
    multiple_of: int = 1
    max_restarts: int = 3

    def __post_init__(self) -> None:
        for name in ("min_workers", "multiple_of"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts} must be at least 0")


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes
    ----------
    code : int
        Of the launcher; below 0 the signal that killed it.
    started : bool
        The script ran on rank 0 as far as its import of mpishard, and so on all: MPI starts them together.
    half_started : bool
        It was ended since some ranks did not come so far.
    step : int
        The last one noted, 0 if none was.
    ended : Ended or None
        The completion marker.
    given_up : Ended or None
        Another rank than the first left its script with an exit code other than 0; launchers may then end the others.
    failure : Failure or None
        An exception that nobody caught on some rank.
    aborted : bool
        A rank has tried to end the job.
    healed : int
        Ranks that were left when the job went on in place after a death, the last time; 0 if it never did.
    lost : bool
        It was ended since a host did not answer.
    stopped : int
        The signal by which the user ended it, or 0.
    """

    code: int
    started: bool = True
    half_started: bool = False
    step: int = 0
    ended: Ended | None = None
    given_up: Ended | None = None
    failure: Failure | None = None
    aborted: bool = False
    healed: int = 0
    lost: bool = False
    stopped: int = 0


@dataclass(frozen=True)
class History:
    """What is remembered from start to start: ranks asked for and left, the furthest step, starts without progress.

    `died_early`: see `_died_early`, of the last start.
    """

    asked: int
    ranks: int
    step: int = 0
    restarts: int = 0
    failure: Failure | None = None
    died_early: bool = False


@dataclass(frozen=True)
class Stop:
    """The run is over, with this exit code."""

    code: int
    why: str = ""


@dataclass(frozen=True)
class Start:
    """The job is started again, on so many ranks of these hosts (none: of this one)."""

    ranks: int
    hosts: tuple[Host, ...]
    history: History = field(repr=False)
    why: str = ""


def reported(outcome: Outcome) -> int | None:
    """The exit code that the run itself reports, whatever the launcher's is; None if it did not end in order."""
    ended = outcome.ended
    if not outcome.healed and (ended is None or ended.code == 0):
        # Ranks that the others are not known to do without: one that left on purpose, or one that failed.
        if outcome.given_up is not None:
            ended = outcome.given_up
        elif outcome.failure is not None:
            return None
    if ended is None or (outcome.aborted and not ended.code):
        return None
    if ended.code is not None:
        return ended.code
    code = exit_code(outcome.code)
    return 0 if outcome.healed and code > 128 else code  # a signal is what the dead were killed by


def exit_code(launcher: int) -> int:
    """The code of a shell for that of a process."""
    return launcher if launcher >= 0 else 128 - launcher


def name_of(number: int) -> str:
    """A signal of the user's in words."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _died_early(outcome: Outcome) -> bool:
    """Whether ranks were lost before all had imported mpishard; a script that ends there on all ranks is no loss."""
    by_signal = outcome.code < 0 or outcome.code > 128 or outcome.code in _SIGNALS
    return not outcome.started and (outcome.half_started or by_signal)


def decide(
    policy: Policy, history: History, outcome: Outcome, hosts: Sequence[Host], answering: Sequence[Host]
) -> Stop | Start:
    """What follows an outcome.

    Parameters
    ----------
    history : History
        Before this outcome.
    hosts, answering : sequence of Host
        Those of the run, and of them those that answer now; both empty if it runs on this one.
    """
    code = reported(outcome)
    if code is not None:
        # Ranks do not tell Ctrl-C from the other signals that end a run.
        return Stop(128 + outcome.stopped if outcome.stopped and code == INTERRUPTED else code)
    if outcome.stopped:
        return Stop(128 + outcome.stopped, f"was ended by {name_of(outcome.stopped)}")
    failure = outcome.failure
    # A launcher that says 0 of a job that did not end in order is wrong.
    code = 1 if failure is not None or outcome.half_started else exit_code(outcome.code) or 1
    what = _what(outcome, answering != hosts)
    if not policy.elastic:
        return Stop(code, what)
    early = _died_early(outcome)
    if not history.step and tuple(answering) == tuple(hosts):
        if early and history.died_early:
            return Stop(code, f"{what}: the same twice, so another start would end like this one")
        if not outcome.started and not early:
            return Stop(code, what)
    if failure is not None and failure.trained:
        return Stop(code, what)
    if failure is not None and failure.same_as(history.failure):
        return Stop(code, f"{what}: the same failure twice, so another start would end like this one")
    progress = outcome.step > history.step
    restarts = 1 if progress else history.restarts + 1
    if restarts > policy.max_restarts:
        return Stop(code, f"{what}; {restarts - 1} restarts have brought it no further than step {history.step}")
    hosts_lost = outcome.lost or tuple(answering) != tuple(hosts)
    ranks_lost = failure is None and outcome.code >= 0 and not hosts_lost
    least = -(-max(1, policy.min_workers) // policy.multiple_of) * policy.multiple_of
    ranks = history.asked if policy.replace and progress else history.ranks
    if ranks_lost and not (policy.replace and (progress or not history.restarts)):
        # Launchers do not say how many have died; those that went on without the dead do.
        fewer = min(ranks - 1, outcome.healed or ranks)
        ranks = ranks if policy.replace and fewer < least else fewer
    room = sum(host.slots for host in answering) if hosts else ranks
    now = min(ranks, room) // policy.multiple_of * policy.multiple_of
    if now < least:
        return Stop(code, f"{what}; {min(ranks, room)} ranks are left and {least} are needed")
    history = History(history.asked, ranks, max(history.step, outcome.step), restarts, failure, early)
    return Start(now, tuple(answering), history, what)


def _what(outcome: Outcome, hosts_lost: bool) -> str:
    """How a job failed, in words."""
    if outcome.lost or hosts_lost:
        return "has a host that does not answer"
    if outcome.failure is not None:
        return f"failed by {outcome.failure}"
    if outcome.code < 0:
        return f"lost its launcher to signal {-outcome.code}"
    if _died_early(outcome):
        reports = "" if outcome.half_started else f" (the launcher reports {outcome.code})"
        return f"lost ranks before all had imported mpishard{reports}"
    if not outcome.started:
        return f"did not start, or its script never imported mpishard (the launcher reports {outcome.code})"
    if outcome.code == 0:
        return "ended without its completion marker, though the launcher reports success"
    return f"lost ranks (the launcher reports {outcome.code})"
