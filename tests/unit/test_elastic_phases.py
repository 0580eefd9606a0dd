"""The phases of an elastic run, as a table: every event in every phase leads somewhere, or is refused."""

from __future__ import annotations

import itertools

import pytest

from mpishard.elastic.phases import TRANSITIONS, Phase, PhaseEvent, next_phase

# A row for each phase, a column for each event: the phase that it leads to, "-" where it cannot come.
TABLE = """
           WORKS     SPARE    ORDERED   STOPPED   FINISHED  CLOSED  DIED
STARTING   TRAINING  -        RESIZING  -         ENDING    -       -
TRAINING   TRAINING  -        RESIZING  STOPPING  -         -       HEALING
WAITING    -         -        RESIZING  -         -         -       HEALING
RESIZING   TRAINING  WAITING  -         STOPPING  ENDING    -       HEALING
HEALING    -         -        RESIZING  -         -         -       HEALING
STOPPING   -         -        RESIZING  -         ENDING    -       HEALING
ENDING     -         -        -         -         -         ENDED   HEALING
ENDED      -         -        -         -         -         -       -
"""


def rows():
    events, *lines = (line.split() for line in TABLE.strip().splitlines())
    return {
        (Phase[phase], PhaseEvent[event]): None if cell == "-" else Phase[cell]
        for phase, *cells in lines
        for event, cell in zip(events, cells, strict=True)
    }


def test_the_table_has_every_phase_and_event():
    assert rows().keys() == set(itertools.product(Phase, PhaseEvent))


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, PhaseEvent)), ids=lambda each: each.name)
def test_every_event_in_every_phase(phase, event):
    following = rows()[phase, event]
    if following is None:
        with pytest.raises(AssertionError, match=f"{event.name} cannot come while {phase.name}"):
            next_phase(phase, event)
    else:
        assert next_phase(phase, event) is following


def test_no_phase_is_a_trap():
    """Whatever has happened, a run can still end, and all phases can be reached."""

    def reached(start):
        seen, left = set(), [start]
        while left:
            phase = left.pop()
            seen.add(phase)
            left += set(TRANSITIONS[phase].values()) - seen
        return seen

    assert reached(Phase.STARTING) == set(Phase)
    assert all(Phase.ENDED in reached(phase) for phase in Phase)
