"""Simulates a schedule: how long it takes, how long its ranks are idle, and how many activations they keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

from mpishard.pipeline.schedule.actions import Schedule
from mpishard.pipeline.schedule.execution import ActionCosts, Event, check_deadlock_free, execute

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
