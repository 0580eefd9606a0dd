"""Whether the ranks of a schedule can wait for each other for ever."""

from __future__ import annotations

from dataclasses import dataclass

from mpishard.pipeline.schedule.actions import KINDS, Schedule
from mpishard.pipeline.schedule.execution import Costs, Wait, execute


@dataclass(frozen=True)
class Deadlock:
    """A cycle of ranks, each of which waits for the next; `str` names the actions in which they wait.

    Parameters
    ----------
    schedule : Schedule
        The schedule that deadlocks.
    blocking_sends : bool
        Whether the sends of this execution were blocking.
    cycle : tuple of Wait
        Each waits for the next one, and the last for the first.
    """

    schedule: Schedule
    blocking_sends: bool
    cycle: tuple[Wait, ...]

    def __str__(self) -> str:
        sends = "blocking sends" if self.blocking_sends else "non-blocking synchronous sends"
        waits = "; ".join(map(self._sentence, self.cycle))
        return f"schedule {self.schedule.name!r} deadlocks with {sends}: {waits}"

    def _sentence(self, wait: Wait) -> str:
        label = self.schedule.label
        other = f"rank {wait.other}" if wait.other != wait.rank else "itself"
        here = f"rank {wait.rank} in {label(wait.action)}"
        what = "activation" if wait.until.kind == "F" else "gradient"
        if wait.reason == "message":
            return f"{here} waits for the {what} that {other} makes in {label(wait.until)}"
        if wait.reason == "send":
            return f"{here} has sent its {what} and waits until {other} takes it in {label(wait.until)}"
        return f"{here} needs the buffer of an earlier {what}, which {other} takes in {label(wait.until)}"


def find_deadlock(schedule: Schedule, *, blocking_sends: bool = False) -> Deadlock | None:
    """Prove a schedule free of deadlock, or find a counter-example.

    Parameters
    ----------
    schedule : Schedule
        It is executed in a simulation; nothing is sent.
    blocking_sends : bool
        False: sends as in the pipeline, synchronous (complete only once the receive is posted, so that nothing relies
        on buffered messages) but not blocking.  True: each send blocks until its receive is posted, as
        ``MPI.Comm.Ssend`` does.

    Returns
    -------
    Deadlock or None
        None is the proof: the execution has finished, and the waits of a rank do not depend on timing.
    """
    nothing = [0.0] * schedule.virtual_stages
    outcome = execute(schedule, Costs(dict.fromkeys(KINDS, nothing), nothing), blocking_sends=blocking_sends)
    if not outcome.waits:
        return None
    # Each waiting rank waits for a rank that waits too, so following the waits must close a cycle.
    waits = {wait.rank: wait for wait in outcome.waits}
    seen: list[int] = []
    rank = outcome.waits[0].rank
    while rank not in seen:
        seen.append(rank)
        rank = waits[rank].other
    return Deadlock(schedule, blocking_sends, tuple(waits[rank] for rank in seen[seen.index(rank) :]))


def check_deadlock_free(schedule: Schedule) -> None:
    """Raise unless `find_deadlock` proves the schedule.

    Parameters
    ----------
    schedule : Schedule
        It is executed in a simulation; nothing is sent.

    Raises
    ------
    ValueError
        If ranks wait for each other; the message names the actions.
    """
    deadlock = find_deadlock(schedule)
    if deadlock is not None:
        raise ValueError(str(deadlock))
