"""What happens when all ranks run their programs: the one place that knows what waits for what.

The rules, which the interpreter of schedules follows to the letter:

- A rank runs its program in order.  On reaching an action it posts the receive of the message that the action needs.
- Before it computes, an action waits for that message.
- What an action makes is sent without blocking, by a synchronous send: it is complete once its receive is posted.
- A buffer is used again only after its send is complete.  The activation of a micro-batch lives until its B or W, and
  by then the next stage has used it.  Gradients have one buffer a model chunk: before a B or I computes, the chunk's
  previous gradient must have been taken.  Without a backward the same holds for activations.
- Between model chunks of one rank there is a hand-over and no message.

What is free of deadlock under these rules is so, too, for an interpreter that waits later or has more buffers.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpishard.pipeline.schedule.actions import Action, Schedule

Key = tuple[bool, int, int]  # (is a forward, micro-batch, virtual stage): what a message is made by or made for


class Event(NamedTuple):
    """An action in time; `start` and `stop` are in the unit of the times given."""

    rank: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Wait:
    """A rank that does not go on before another has done something.

    Parameters
    ----------
    rank : int
        Who waits.
    action : Action
        In which action of its program.
    reason : {"message", "buffer", "send"}
        For a message to be sent; for an earlier message to be taken, so that its buffer is free; or for the message
        just made to be taken (blocking sends only).
    other : int
        Whom it waits for.
    until : Action
        The action of `other` that has to be done ("message") or reached.
    """

    rank: int
    action: Action
    reason: str
    other: int
    until: Action


@dataclass(frozen=True)
class Outcome:
    """What came of an execution: its events, rank by rank in program order, and who is still waiting for whom."""

    events: tuple[Event, ...]
    waits: tuple[Wait, ...]


class Costs(NamedTuple):
    """Times by kind of action and then by virtual stage; `transfer` is that of the message which a stage sends."""

    compute: dict[str, Sequence[float]]
    transfer: Sequence[float]


def execute(schedule: Schedule, costs: Costs, *, blocking_sends: bool = False) -> Outcome:
    """Run all programs as far as they go.

    Whether a rank can go on depends on what others have done and never on the order in which they are asked, so one
    greedy execution decides for all: if it finishes, every execution does.
    """
    return _Execution(schedule, costs, blocking_sends).run()


class _Execution:
    def __init__(self, schedule: Schedule, costs: Costs, blocking_sends: bool) -> None:
        self.schedule = schedule
        self.costs = costs
        self.blocking_sends = blocking_sends
        self.events: list[list[Event]] = [[] for _ in range(schedule.stages)]
        self.reached: dict[Key, float] = {}
        self.done: dict[Key, float] = {}
        self.place: dict[Key, tuple[int, Action]] = {
            key: (rank, action)
            for rank, program in enumerate(schedule.programs)
            for action in program
            if (key := self.key(rank, action)) is not None
        }

    def run(self) -> Outcome:
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
        return Outcome(tuple(event for events in self.events for event in events), tuple(waits.values()))

    def rank_runs(self, rank: int) -> Generator[Wait, None, None]:
        """Run the program of `rank`; yields what it waits for, again and again until it has come."""
        now: float = 0
        untaken: dict[int, Key] = {}  # by chunk: who has to take the message in its one buffer
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
            if taker is None or self.place[taker][0] == rank:
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
        """Whose message an action needs, and who takes the message that it makes."""
        if key is None:
            return None, None
        forward, microbatch, stage = key
        around = [
            (forward, microbatch, other) if 0 <= other < self.schedule.virtual_stages else None
            for other in (stage - 1, stage + 1)
        ]
        return (around[0], around[1]) if forward else (around[1], around[0])

    def transfer(self, rank: int, source: Key) -> float:
        return 0 if self.place[source][0] == rank else self.costs.transfer[source[2]]

    def wait(self, rank: int, action: Action, reason: str, key: Key) -> Wait:
        return Wait(rank, action, reason, *self.place[key])
