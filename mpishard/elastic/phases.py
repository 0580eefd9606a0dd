"""The phases of a process in an elastic run, and the transitions between them.

`TRANSITIONS` is all of it: the loop takes the turn of its phase, which ends in an event, and looks the next phase up.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType


class Phase(Enum):
    """The phase of a process of an elastic run."""

    STARTING = auto()  # it has come to the run: at its start, or spawned later
    # A worker takes steps, each of which ends in an agreement of the workers. If there are fewer processes than the
    # wanted number of workers needs, the first one spawns some meanwhile.
    TRAINING = auto()
    WAITING = auto()  # a spare sleeps until the first worker sends an order
    # All processes know the next number of workers: spawned processes that are ready join, the mesh is split again, and
    # the committed state moves to the ranks that need it.
    RESIZING = auto()
    # A process has died: survivors wake those that wait, shrink the membership, and agree on the last committed step.
    # In the resizing that follows spares replace the dead, and others are spawned for them in the steps after it.
    HEALING = auto()
    # The workers know why the run stops; they save its last checkpoint, and make workers of all spares.
    STOPPING = auto()
    ENDING = auto()  # all processes know that the run has stopped, and all that can be workers have its result
    ENDED = auto()  # all processes know that all have come to ENDING: none needs another any more, and each may leave


class PhaseEvent(Enum):
    """How the turn of a phase has ended."""

    WORKS = auto()  # this process is a worker, and the run continues
    SPARE = auto()  # this process is a spare
    ORDERED = auto()  # this process has the order for the next number of workers
    STOPPED = auto()  # this process is a worker and knows why the run stops
    FINISHED = auto()  # the state of the run is saved, and no other process needs it
    CLOSED = auto()  # all processes have agreed that it is finished
    DIED = auto()  # MPI reports that a process has died


TRANSITIONS: Mapping[Phase, Mapping[PhaseEvent, Phase]] = MappingProxyType(
    {
        Phase.STARTING: {
            PhaseEvent.WORKS: Phase.TRAINING,
            PhaseEvent.ORDERED: Phase.RESIZING,
            PhaseEvent.FINISHED: Phase.ENDING,  # it resumes a run that had reached its goal
        },
        Phase.TRAINING: {
            PhaseEvent.WORKS: Phase.TRAINING,
            PhaseEvent.ORDERED: Phase.RESIZING,
            PhaseEvent.STOPPED: Phase.STOPPING,
            PhaseEvent.DIED: Phase.HEALING,
        },
        Phase.WAITING: {
            PhaseEvent.ORDERED: Phase.RESIZING,
            PhaseEvent.DIED: Phase.HEALING,
        },
        Phase.RESIZING: {
            PhaseEvent.WORKS: Phase.TRAINING,
            PhaseEvent.SPARE: Phase.WAITING,
            PhaseEvent.STOPPED: Phase.STOPPING,  # a process had died before the last checkpoint was saved
            PhaseEvent.FINISHED: Phase.ENDING,
            PhaseEvent.DIED: Phase.HEALING,
        },
        Phase.HEALING: {
            PhaseEvent.ORDERED: Phase.RESIZING,
            PhaseEvent.DIED: Phase.HEALING,
        },
        Phase.STOPPING: {
            PhaseEvent.ORDERED: Phase.RESIZING,
            PhaseEvent.FINISHED: Phase.ENDING,
            PhaseEvent.DIED: Phase.HEALING,
        },
        Phase.ENDING: {
            PhaseEvent.CLOSED: Phase.ENDED,
            PhaseEvent.DIED: Phase.HEALING,
        },
        Phase.ENDED: {},
    }
)


def next_phase(phase: Phase, event: PhaseEvent) -> Phase:
    """The phase that an event leads to; AssertionError if the event cannot come in this phase."""
    following = TRANSITIONS[phase].get(event)
    assert following is not None, f"{event.name} cannot come while {phase.name}"
    return following
