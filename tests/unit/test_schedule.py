"""Pipeline schedules and their simulation."""

from __future__ import annotations

import graphlib
import itertools
import warnings
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from mpishard.pipeline.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    find_deadlock,
    forward_only,
    make_schedule,
    simulate,
)
from mpishard.pipeline.schedule.generators import warn_if_bubbly
from mpishard.pipeline.schedule.simulator import Wait

# Schedules as the papers have them, for any number of stages and micro-batches, and what is refused.

STAGES = (1, 2, 3, 4, 5, 8)
MICROBATCHES = (*range(1, 10), 12, 16, 17)


def actions(text):
    """``"F0 B0 F1.1"`` as a program."""
    parts = ((word[0], *word[1:].partition(".")) for word in text.split())
    return tuple(Action(kind, int(index), int(chunk or 0)) for kind, index, _, chunk in parts)


def by_hand(*programs, chunks=1, microbatches=2):
    return Schedule("mine", len(programs), chunks, microbatches, tuple(map(actions, programs)))


def as_text(schedule):
    return [" ".join(map(schedule.label, program)) for program in schedule.programs]


def test_programs_of_small_pipelines():
    assert as_text(make_schedule("gpipe", 2, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert as_text(make_schedule("1f1b", 3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert as_text(make_schedule("zb-h1", 3, 4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    assert as_text(make_schedule("interleaved", 2, 2, 2)) == [
        "F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0",
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0",
    ]
    assert as_text(forward_only(2, 3, 2)) == ["F0.0 F0.1 F1.0 F2.0 F1.1 F2.1"] * 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_free_of_deadlock(name):
    for stages, microbatches in itertools.product(STAGES, MICROBATCHES):
        for chunks in range(2, 5) if name == "interleaved" else [1]:
            assert find_deadlock(make_schedule(name, stages, microbatches, chunks)) is None


def test_forward_only_is_free_of_deadlock():
    for sizes in itertools.product(STAGES, MICROBATCHES, range(1, 5)):
        schedule = forward_only(*sizes)
        assert find_deadlock(schedule) is None
        assert simulate(schedule).peak_live == (1,) * sizes[0]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name):
    """Narayanan et al. 2021, section 2.2.1."""
    for stages, microbatches in itertools.product(STAGES, MICROBATCHES):
        timeline = simulate(make_schedule(name, stages, microbatches))
        assert timeline.bubble_fraction == (stages - 1) / (microbatches + stages - 1)
        assert timeline.bubble_over_ideal == (stages - 1) / microbatches


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_bubble_of_interleaved(chunks):
    """Narayanan et al. 2021, section 2.2.2; with groups that are not whole, at worst that of 1F1B."""
    for stages, microbatches in itertools.product(STAGES, MICROBATCHES):
        timeline = simulate(make_schedule("interleaved", stages, microbatches, chunks))
        if microbatches % stages == 0:
            assert timeline.bubble_over_ideal == (stages - 1) / (chunks * microbatches)
        else:
            assert timeline.bubble_over_ideal <= (stages - 1) / microbatches


@pytest.mark.parametrize(
    ("forward", "inputs", "weights"), [(1, 1, 1), (2, 2, 1), (1, 2, 1), (3, 2, 1), (1, 1, 2), (2, 2, 3)]
)
def test_bubble_of_zero_bubble_h1(forward, inputs, weights):
    """(p - 1)(F + I - W) as in Qi et al. 2023, table 1, as long as a W is no longer than an F that it stands in for."""
    for stages, microbatches in itertools.product(STAGES, MICROBATCHES):
        if microbatches < stages:
            continue
        times = dict(forward=forward, input_gradient=inputs, weight_gradient=weights)
        timeline = simulate(make_schedule("zb-h1", stages, microbatches), **times)
        bubble = timeline.makespan - microbatches * (forward + inputs + weights)
        assert bubble == (stages - 1) * (inputs + max(0, forward - weights))


def test_peak_live():
    assert simulate(make_schedule("gpipe", 4, 8)).peak_live == (8, 8, 8, 8)
    assert simulate(make_schedule("1f1b", 4, 8)).peak_live == (4, 3, 2, 1)
    assert simulate(make_schedule("zb-h1", 4, 8)).peak_live == (4, 4, 4, 4)
    assert simulate(make_schedule("interleaved", 4, 8, 2)).peak_live == (11, 9, 7, 5)
    for stages, microbatches in itertools.product(STAGES, MICROBATCHES):
        one = simulate(make_schedule("1f1b", stages, microbatches)).peak_live
        assert one == tuple(min(microbatches, stages - rank) for rank in range(stages))
        zero = simulate(make_schedule("zb-h1", stages, microbatches)).peak_live
        assert zero == (max(one),) * stages
        whole = make_schedule("interleaved", stages, -(-microbatches // stages) * stages, 2)
        part = make_schedule("interleaved", stages, microbatches, 2)
        for kept, most in zip(simulate(part).peak_live, simulate(whole).peak_live, strict=True):
            assert kept <= most


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("2f2b", 2, 2), "schedule '2f2b'; .*zb-h1"),
        (("1f1b", 0, 2), "stages .*got 0"),
        (("1f1b", 2, 0), "microbatches .*got 0"),
        (("1f1b", 2, 2, -1), "chunks .*got -1"),
        (("interleaved", 2, 2), "at least 2 chunks .*got 1; .*'1f1b'"),
        (("zb-h1", 2, 2, 3), "'zb-h1' .*got 3"),
    ],
)
def test_what_cannot_be_made(call, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*call)


@pytest.mark.parametrize("stages", [2.0, True, "2", None])
def test_sizes_are_integers(stages):
    with pytest.raises(TypeError, match="stages .*integer"):
        make_schedule("1f1b", stages, 2)
    with pytest.raises(TypeError, match="stages .*integer"):
        forward_only(stages, 2)
    assert make_schedule("1f1b", np.int64(2), np.int32(3)) == make_schedule("1f1b", 2, 3)


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (("F0 F1 B0", "F0 F1 B0 B1"), r"rank 0: B1 \(or I and W\) is missing"),
        (("F0 F1 B0 B1", "F0 B0"), r"rank 1: F1 is missing"),
        (("F0 F1 F0 B0 B1",), "rank 0: F0 .*actions 0 and 2"),
        (("F0 B1 F1 B0",), "rank 0: B1 .*before F1"),
        (("F0 W0 I0 F1 B1",), "rank 0: W0 .*before I0"),
        (("F0 F1 I0 W0 I1",), r"rank 0: W1 is missing"),
        (("F0 F1 I0 W0 B0 B1",), r"rank 0: B0 and I0 do the same work"),
        (("F0 F1 F2 B0 B1",), r"microbatch=2, chunk=0\) .*2 micro-batches"),
        (("F0 F1.1 B0 B1",), r"chunk=1\) .*1 chunks"),
        (("F0 F1 X0",), "'X' .*F, B, I, W"),
    ],
)
def test_programs_that_are_no_schedule(programs, message):
    with pytest.raises(ValueError, match=message):
        by_hand(*programs)


def test_a_program_for_every_rank():
    with pytest.raises(ValueError, match="'mine' has 1 programs for 2"):
        Schedule("mine", 2, 1, 1, (actions("F0 B0"),))


def test_whole_and_split_backwards_can_be_mixed():
    schedule = by_hand("F0 F1 I0 W0 I1 W1", "F0 B0 F1 B1")
    assert find_deadlock(schedule) is None
    assert schedule.trains
    assert not forward_only(2, 2).trains


def test_few_microbatches_are_warned_of():
    with pytest.warns(UserWarning, match="2 micro-batches for 4 .*'1f1b' .*60%"):
        warn_if_bubbly(make_schedule("1f1b", 4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_bubbly(make_schedule("1f1b", 4, 4))
        make_schedule("1f1b", 4, 2)


# The simulator against a dependency graph that is written down apart from it, and its times and counter-examples.

TIMES = dict(forward=3, backward=7, input_gradient=4, weight_gradient=2)
DURATIONS = dict(zip("FBIW", TIMES.values(), strict=True))


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
        starts = [ends[each] + transfer * (each[0] != rank and each[2] == "done") for each in graph.get(node, [])]
        start = max(starts, default=0)
        ends[node] = start + (DURATIONS[schedule.programs[rank][index].kind] if what == "done" else 0)
    timeline = simulate(schedule, **TIMES, transfer=transfer)
    places = [(rank, index) for rank, program in enumerate(schedule.programs) for index in range(len(program))]
    for event, (rank, index) in zip(timeline.events, places, strict=True):
        assert (event.rank, event.action) == (rank, schedule.programs[rank][index])
        assert event.stop == ends[rank, index, "done"]
        assert event.stop - event.start == DURATIONS[event.action.kind]
    assert timeline.makespan == max(ends.values())


def test_a_circle_of_messages():
    schedule = by_hand("F0 B0 F1 B1", "F1 B1 F0 B0")
    deadlock = find_deadlock(schedule)
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
    with pytest.raises(ValueError, match="deadlocks .*rank 0 in B0"):
        simulate(schedule)


def test_a_circle_that_only_a_rendezvous_closes():
    """With buffered sends rank 1 would go on to B1; here its first gradient is still in the one buffer."""
    deadlock = find_deadlock(by_hand("F0 F1 B1 B0", "F0 F1 B0 B1"))
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
    deadlock = find_deadlock(by_hand("F0.1 F0.0 B0.1 B0.0", chunks=2, microbatches=1))
    assert "rank 0 in F0.1 waits for the activation that itself makes in F0.0" in str(deadlock)


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


def test_no_transfer_within_a_rank_and_no_time_at_all():
    timeline = simulate(make_schedule("interleaved", 1, 2, 2), transfer=100)
    assert (timeline.makespan, timeline.bubble_fraction) == (2 * 2 * 3, 0)
    timeline = simulate(make_schedule("1f1b", 2, 2), forward=0, backward=0)
    assert (timeline.makespan, timeline.bubble_fraction, timeline.bubble_over_ideal) == (0, 0, 0)


@pytest.mark.parametrize(
    ("times", "error", "message"),
    [
        ({"forward": -1}, ValueError, "forward .*got -1"),
        ({"transfer": float("nan")}, ValueError, "transfer .*got nan"),
        ({"backward": [1, 2, 3]}, ValueError, "backward has 3 times for 4"),
        ({"backward": [1, 2, 3, "4"]}, TypeError, "backward .*got '4'"),
    ],
)
def test_bad_times(times, error, message):
    with pytest.raises(error, match=message):
        simulate(make_schedule("interleaved", 2, 2, 2), **times)
