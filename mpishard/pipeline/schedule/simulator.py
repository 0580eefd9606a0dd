"""Executes a schedule action by action, and simulates it: how long it takes, how long its ranks are idle, and how many
activations they keep.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import NamedTuple

from mpishard.pipeline.schedule.actions import KINDS, Action, Schedule

# The execution of a schedule: the only file that knows which action waits for which.
#
# The rules, which the simulator follows exactly:
#
# - A rank runs its program in order.  On reaching an action it posts the receive of the message that the action needs.
# - Before it computes, an action waits for that message.
# - The result of an action is sent by a non-blocking synchronous send, complete once its receive is posted.
# - A buffer is used again only after its send is complete.  The activation of a micro-batch lives until its B or W, and
#   by then the next stage has used it.  Gradients have one buffer a model chunk: before a B or I computes, the chunk's
#   previous gradient must have been taken.  Without a backward the same holds for activations.
# - Between model chunks of one rank there is no message.
#
# A program that is free of deadlock under these rules is also free of it with later waits or more buffers.

Key = tuple[bool, int, int]  # (is a forward, micro-batch, virtual stage): the action that sends or receives a message


class Event(NamedTuple):
    """An action in time.

    Parameters
    ----------
    rank : int
        Pipeline rank.
    action : Action
        Of the program of that rank.
    start, stop : float
        In the unit of the times given to `simulate`; the first action starts at 0.
    """

    rank: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Wait:
    """A rank that waits for another rank.

    Parameters
    ----------
    rank : int
        The rank that waits.
    action : Action
        The action of its program in which it waits.
    reason : {"message", "buffer", "send"}
        It waits until a message is sent; until an earlier message is received, so that its buffer is free; or until
        its new message is received (blocking sends only).
    other : int
        The rank for which it waits.
    until : Action
        The action of `other` that has to be done ("message") or reached.
    """

    rank: int
    action: Action
    reason: str
    other: int
    until: Action


@dataclass(frozen=True)
class ScheduleOutcome:
    """The result of an execution: its events, by rank in program order, and the ranks that still wait."""

    events: tuple[Event, ...]
    waits: tuple[Wait, ...]


class ActionCosts(NamedTuple):
    """Times by kind of action and then by virtual stage; `transfer` is the time of a message from that stage."""

    compute: dict[str, Sequence[float]]
    transfer: Sequence[float]


def execute(schedule: Schedule, costs: ActionCosts, *, blocking_sends: bool = False) -> ScheduleOutcome:
    """Run all programs as far as possible.

    Whether a rank can continue depends only on the actions that others have done, not on the order of execution.  So
    one greedy execution decides for all: if it finishes, every execution does.
    """
    return _Execution(schedule, costs, blocking_sends).run()


class _Execution:
    def __init__(self, schedule: Schedule, costs: ActionCosts, blocking_sends: bool) -> None:
        self.schedule = schedule
        self.costs = costs
        self.blocking_sends = blocking_sends
        self.events: list[list[Event]] = [[] for _ in range(schedule.stages)]
        self.reached: dict[Key, float] = {}
        self.done: dict[Key, float] = {}
        self.location: dict[Key, tuple[int, Action]] = {
            key: (rank, action)
            for rank, program in enumerate(schedule.programs)
            for action in program
            if (key := self.key(rank, action)) is not None
        }

    def run(self) -> ScheduleOutcome:
        running = {rank: self.rank_runs(rank) for rank in range(self.schedule.stages)}
        waits: dict[int, Wait] = {}
        moved = True
        while moved:
            moved = False
            for rank, steps in list(running.items()):
                wait = next(steps, None)
                moved = moved or wait is None or wait != waits.get(rank)
                if wait is None:
                    del running[rank]
                    waits.pop(rank, None)
                else:
                    waits[rank] = wait
        return ScheduleOutcome(tuple(event for events in self.events for event in events), tuple(waits.values()))

    def rank_runs(self, rank: int) -> Generator[Wait, None, None]:
        """Run the program of `rank`; yields each wait repeatedly until it is over."""
        now: float = 0
        untaken: dict[int, Key] = {}  # by chunk: the action that must receive the message in its only buffer
        buffered_kinds = "BI" if self.schedule.trains else "F"
        for action in self.schedule.programs[rank]:
            stage = self.schedule.virtual_stage(rank, action)
            key = self.key(rank, action)
            needed, taker = self.neighbours(key)
            if key is not None:
                self.reached[key] = now
            start = now
            if needed is not None:
                while needed not in self.done:
                    yield self.wait(rank, action, "message", needed)
                start = max(start, self.done[needed] + self.transfer(rank, needed))
            if action.kind in buffered_kinds and action.chunk in untaken:
                while untaken[action.chunk] not in self.reached:
                    yield self.wait(rank, action, "buffer", untaken[action.chunk])
                start = max(start, self.reached[untaken[action.chunk]])
            now = start + self.costs.compute[action.kind][stage]
            self.events[rank].append(Event(rank, action, start, now))
            if key is not None:
                self.done[key] = now
            if taker is None or self.location[taker][0] == rank:
                continue
            if self.blocking_sends:
                while taker not in self.reached:
                    yield self.wait(rank, action, "send", taker)
            elif action.kind in buffered_kinds:
                untaken[action.chunk] = taker

    def key(self, rank: int, action: Action) -> Key | None:
        if action.kind == "W":
            return None
        return action.kind == "F", action.microbatch, self.schedule.virtual_stage(rank, action)

    def neighbours(self, key: Key | None) -> tuple[Key | None, Key | None]:
        """The action whose message this action needs, and the action that receives its message."""
        if key is None:
            return None, None
        forward, microbatch, stage = key
        around = [
            (forward, microbatch, other) if 0 <= other < self.schedule.virtual_stages else None
            for other in (stage - 1, stage + 1)
        ]
        return (around[0], around[1]) if forward else (around[1], around[0])

    def transfer(self, rank: int, source: Key) -> float:
        return 0 if self.location[source][0] == rank else self.costs.transfer[source[2]]

    def wait(self, rank: int, action: Action, reason: str, key: Key) -> Wait:
        return Wait(rank, action, reason, *self.location[key])


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
    outcome = execute(schedule, ActionCosts(dict.fromkeys(KINDS, nothing), nothing), blocking_sends=blocking_sends)
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


# Simulates a schedule: how long it takes, how long its ranks are idle, and how many activations they keep.

Times = float | Sequence[float]


@dataclass(frozen=True)
class Timeline:
    """A schedule in time.

    Parameters
    ----------
    schedule : Schedule
        What was simulated.
    events : tuple of Event
        Rank by rank, in program order.  Time starts at 0 and is in the unit of the times given to `simulate`.
    """

    schedule: Schedule
    events: tuple[Event, ...]

    @cached_property
    def makespan(self) -> float:
        """The time at which the last rank is done."""
        return max(event.stop for event in self.events)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        busy: list[float] = [0] * self.schedule.stages
        for event in self.events:
            busy[event.rank] += event.stop - event.start
        return tuple(busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over all time of all ranks, 0 to 1."""
        whole = self.schedule.stages * self.makespan
        return (whole - sum(self.busy)) / whole if whole else 0.0

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over computing time (Narayanan et al. 2021, section 2.2: t_pb / t_id)."""
        busy = sum(self.busy)
        return (self.schedule.stages * self.makespan - busy) / busy if busy else 0.0

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Most activations that each rank keeps at once, in micro-batches of one chunk.

        An activation lives from its F to its B, or to its W where the backward is in two parts.  Without a backward
        it lives only during its F.
        """
        peaks = []
        for program in self.schedule.programs:
            live = peak = 0
            for action in program:
                live += action.kind == "F"
                peak = max(peak, live)
                live -= action.kind in ("BW" if self.schedule.trains else "F")
            peaks.append(peak)
        return tuple(peaks)


def simulate(
    schedule: Schedule,
    *,
    forward: Times = 1.0,
    backward: Times = 2.0,
    input_gradient: Times = 1.0,
    weight_gradient: Times = 1.0,
    transfer: Times = 0.0,
) -> Timeline:
    """Simulate a schedule.

    A time is that of one micro-batch in one model chunk, in any unit: one number, or one number per virtual stage where
    stages are unequal.

    Parameters
    ----------
    schedule : Schedule
        Of any number of ranks; none of them is needed.
    forward, backward, input_gradient, weight_gradient : float or sequence of float
        Times of the actions F, B, I and W; unused if the schedule does not have the action.
    transfer : float or sequence of float
        Time of a message; in a sequence, of the messages from that virtual stage.  Messages travel while ranks compute.

    Returns
    -------
    Timeline
        When each action starts and stops.

    Raises
    ------
    ValueError
        If the schedule deadlocks, a time is negative or not finite, or a sequence has not one time per virtual stage.
    TypeError
        If a time is neither a number nor a sequence of numbers.
    """
    check_deadlock_free(schedule)
    kinds = {"forward": "F", "backward": "B", "input_gradient": "I", "weight_gradient": "W"}
    given = [forward, backward, input_gradient, weight_gradient]
    compute = {kind: _by_stage(schedule, name, times) for (name, kind), times in zip(kinds.items(), given, strict=True)}
    return Timeline(schedule, execute(schedule, ActionCosts(compute, _by_stage(schedule, "transfer", transfer))).events)


def _by_stage(schedule: Schedule, name: str, times: Times) -> Sequence[float]:
    stages = schedule.virtual_stages
    by_stage = [times] * stages if isinstance(times, Real) else list(times)  # type: ignore[arg-type]
    if len(by_stage) != stages:
        raise ValueError(
            f"{name} has {len(by_stage)} times for {stages} virtual stages ({schedule.stages} stages x "
            f"{schedule.chunks} chunks): give one for each, or one number for all"
        )
    for time in by_stage:
        if not isinstance(time, Real):
            raise TypeError(f"{name} must be a number or a sequence of numbers, got {time!r}")
        if not 0 <= float(time) < math.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {time!r}")
    return by_stage  # type: ignore[return-value]
