"""The simulator against a dependency graph that is written down apart from it, and its times and counter-examples."""

from __future__ import annotations

import graphlib
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mpishard.pipeline.schedule import Action, Schedule, find_deadlock, make_schedule, simulate
from mpishard.pipeline.schedule.simulator import Wait

DURATIONS = {"F": 3, "B": 7, "I": 4, "W": 2}


def schedule_of(*programs, chunks=1, microbatches=2):
    """Programs such as ``"F0 B0"``, one chunk each."""
    made = tuple(tuple(Action(word[0], int(word[1:])) for word in text.split()) for text in programs)
    return Schedule("mine", len(programs), chunks, microbatches, made)


def graph_of(schedule, *, blocking_sends):
    """What must be before what: nodes are (rank, index, "reached" | "done" | "sent").

    Edges by definition, with no regard to how the simulator works.
    """
    where = {}
    for rank, program in enumerate(schedule.programs):
        for index, action in enumerate(program):
            if action.kind != "W":
                stage = action.chunk * schedule.stages + rank
                where[action.kind == "F", action.microbatch, stage] = (rank, index)
    before = {}
    for rank, program in enumerate(schedule.programs):
        last_message = {}
        for index, action in enumerate(program):
            reached, done, sent = ((rank, index, what) for what in ("reached", "done", "sent"))
            before[reached] = [(rank, index - 1, "sent")] if index else []
            before[done] = [reached]
            before[sent] = [done]
            if action.kind == "W":
                continue
            forward, stage = action.kind == "F", action.chunk * schedule.stages + rank
            towards = 1 if forward else -1
            maker = where.get((forward, action.microbatch, stage - towards))
            taker = where.get((forward, action.microbatch, stage + towards))
            if maker:
                before[done].append((*maker, "done"))
            buffered = forward != any(other.kind != "F" for other in program)
            if buffered and action.chunk in last_message:
                before[done].append((*last_message[action.chunk], "reached"))
            if taker and taker[0] != rank:
                if blocking_sends:
                    before[sent].append((*taker, "reached"))
                elif buffered:
                    last_message[action.chunk] = taker
    return before


@st.composite
def schedules(draw):
    """Valid programs in any order, most of them hopeless."""
    stages, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    microbatches = draw(st.integers(1, 3))
    kinds = draw(st.sampled_from(["F", "FB", "FIW"]))
    programs = []
    for _ in range(stages):
        turns = [(index, chunk) for index in range(microbatches) for chunk in range(chunks) for _ in kinds]
        order = turns if draw(st.booleans()) else draw(st.permutations(turns))
        left = {turn: iter(kinds) for turn in turns}
        programs.append(tuple(Action(next(left[turn]), *turn) for turn in order))
    return Schedule("drawn", stages, chunks, microbatches, tuple(programs))


@settings(max_examples=400)
@given(schedules(), st.booleans())
def test_deadlocks_are_the_cycles_of_the_graph(schedule, blocking_sends):
    deadlock = find_deadlock(schedule, blocking_sends=blocking_sends)
    try:
        graphlib.TopologicalSorter(graph_of(schedule, blocking_sends=blocking_sends)).prepare()
        assert deadlock is None
    except graphlib.CycleError:
        assert deadlock is not None
        following = [*deadlock.cycle[1:], deadlock.cycle[0]]
        for wait, after in zip(deadlock.cycle, following, strict=True):
            program = schedule.programs[wait.other]
            assert wait.other == after.rank
            assert program.index(wait.until) >= program.index(after.action)


@settings(max_examples=100)
@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved"]),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([Fraction(0), Fraction(1, 2), Fraction(5)]),
)
def test_times_are_longest_paths_of_the_graph(name, stages, microbatches, transfer):
    schedule = make_schedule(name, stages, microbatches, 2 if name == "interleaved" else 1)
    graph = graph_of(schedule, blocking_sends=False)
    ends = {}
    for node in graphlib.TopologicalSorter(graph).static_order():
        rank, index, what = node
        start = max(
            (
                ends[other] + (transfer if other[0] != rank and other[2] == "done" else 0)
                for other in graph.get(node, [])
            ),
            default=0,
        )
        ends[node] = start + (DURATIONS[schedule.programs[rank][index].kind] if what == "done" else 0)
    timeline = simulate(
        schedule,
        forward=DURATIONS["F"],
        backward=DURATIONS["B"],
        input_gradient=DURATIONS["I"],
        weight_gradient=DURATIONS["W"],
        transfer=transfer,
    )
    found = iter(timeline.events)
    for rank, program in enumerate(schedule.programs):
        for index, action in enumerate(program):
            event = next(found)
            assert (event.rank, event.action) == (rank, action)
            assert event.stop == ends[rank, index, "done"]
            assert event.stop - event.start == DURATIONS[action.kind]
    assert timeline.makespan == max(ends.values())


def test_a_circle_of_messages():
    deadlock = find_deadlock(schedule_of("F0 B0 F1 B1", "F1 B1 F0 B0"))
    assert deadlock is not None
    assert deadlock.cycle == (
        Wait(0, Action("B", 0), "message", 1, Action("B", 0)),
        Wait(1, Action("F", 1), "message", 0, Action("F", 1)),
    )
    assert str(deadlock) == (
        "schedule 'mine' deadlocks with non-blocking synchronous sends: "
        "rank 0 in B0 waits for the gradient that rank 1 makes in B0; "
        "rank 1 in F1 waits for the activation that rank 0 makes in F1"
    )


def test_a_circle_that_only_a_rendezvous_closes():
    """With buffered sends rank 1 would go on to B1; here its first gradient is still in the one buffer."""
    deadlock = find_deadlock(schedule_of("F0 F1 B1 B0", "F0 F1 B0 B1"))
    assert str(deadlock) == (
        "schedule 'mine' deadlocks with non-blocking synchronous sends: "
        "rank 0 in B1 waits for the gradient that rank 1 makes in B1; "
        "rank 1 in B1 needs the buffer of an earlier gradient, which rank 0 takes in B0"
    )


def test_blocking_sends_stop_1f1b():
    schedule = make_schedule("1f1b", 2, 4)
    assert find_deadlock(schedule) is None
    assert str(find_deadlock(schedule, blocking_sends=True)) == (
        "schedule '1f1b' deadlocks with blocking sends: "
        "rank 0 in F1 has sent its activation and waits until rank 1 takes it in F1; "
        "rank 1 in B0 has sent its gradient and waits until rank 0 takes it in B0"
    )
    assert find_deadlock(make_schedule("gpipe", 4, 8), blocking_sends=True) is None


def test_a_rank_can_wait_for_itself():
    program = tuple(Action(kind, 0, chunk) for kind, chunk in (("F", 1), ("F", 0), ("B", 1), ("B", 0)))
    deadlock = find_deadlock(Schedule("mine", 1, 2, 1, (program,)))
    assert "rank 0 in F0.1 waits for the activation that itself makes in F0.0" in str(deadlock)


def test_what_deadlocks_has_no_timeline():
    with pytest.raises(ValueError, match="deadlocks with non-blocking synchronous sends: rank 0 in B0 waits"):
        simulate(schedule_of("F0 B0 F1 B1", "F1 B1 F0 B0"))


def test_unequal_stages():
    """One micro-batch goes through all virtual stages in turn and back."""
    schedule = make_schedule("interleaved", 2, 1, 2)
    timeline = simulate(schedule, forward=[1, 2, 3, 4], backward=[10, 20, 30, 40], transfer=[0.5, 0.25, 0.125, 8])
    forward = 1 + 0.5 + 2 + 0.25 + 3 + 0.125 + 4
    assert timeline.makespan == forward + 40 + 8 + 30 + 0.125 + 20 + 0.25 + 10
    assert timeline.busy == (1 + 3 + 30 + 10, 2 + 4 + 40 + 20)
    idle = 2 * timeline.makespan - sum(timeline.busy)
    assert timeline.bubble_fraction == idle / (2 * timeline.makespan)
    assert timeline.bubble_over_ideal == idle / sum(timeline.busy)


def test_no_transfer_within_a_rank():
    timeline = simulate(make_schedule("interleaved", 1, 2, 2), transfer=100)
    assert timeline.makespan == 2 * 2 * 3
    assert timeline.bubble_fraction == 0


def test_no_time_at_all():
    timeline = simulate(make_schedule("1f1b", 2, 2), forward=0, backward=0)
    assert (timeline.makespan, timeline.bubble_fraction, timeline.bubble_over_ideal) == (0, 0, 0)


@pytest.mark.parametrize(
    ("times", "error", "message"),
    [
        ({"forward": -1}, ValueError, "forward must be finite and at least 0, got -1"),
        ({"transfer": float("nan")}, ValueError, "transfer must be finite and at least 0, got nan"),
        ({"backward": [1, 2, 3]}, ValueError, r"backward has 3 times for 4 virtual stages \(2 stages x 2 chunks\)"),
        ({"backward": [1, 2, 3, "4"]}, TypeError, "backward must be a number or a sequence of numbers, got '4'"),
    ],
)
def test_bad_times(times, error, message):
    with pytest.raises(error, match=message):
        simulate(make_schedule("interleaved", 2, 2, 2), **times)
