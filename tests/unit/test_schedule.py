"""Schedules as the papers have them, for any number of stages and micro-batches, and what is refused."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

from mpishard.pipeline.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    find_deadlock,
    forward_only,
    make_schedule,
    simulate,
    warn_if_bubbly,
)

STAGES = (1, 2, 3, 4, 5, 8)
MICROBATCHES = (*range(1, 10), 12, 16, 17)


def actions(text):
    """``"F0 B0 F1.1"`` as a program."""
    parts = (word[1:].partition(".") for word in text.split())
    return tuple(
        Action(word[0], int(index), int(chunk or 0))
        for word, (index, _, chunk) in zip(text.split(), parts, strict=True)
    )


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
    for stages, microbatches, chunks in itertools.product(STAGES, MICROBATCHES, range(1, 5)):
        schedule = forward_only(stages, microbatches, chunks)
        assert find_deadlock(schedule) is None
        assert simulate(schedule).peak_live == (1,) * stages


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
        timeline = simulate(
            make_schedule("zb-h1", stages, microbatches),
            forward=forward,
            input_gradient=inputs,
            weight_gradient=weights,
        )
        bubble = timeline.makespan - microbatches * (forward + inputs + weights)
        assert bubble == (stages - 1) * (inputs + max(0, forward - weights))


def test_zero_bubble_h1_is_idle_a_third_of_1f1b():
    one = simulate(make_schedule("1f1b", 4, 8)).bubble_over_ideal
    zero = simulate(make_schedule("zb-h1", 4, 8)).bubble_over_ideal
    assert one == 3 * zero == 3 / 8


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
        (("2f2b", 2, 2), r"unknown schedule '2f2b'; choose one of gpipe, 1f1b, interleaved, zb-h1"),
        (("1f1b", 0, 2), r"stages must be at least 1, got 0"),
        (("1f1b", 2, 0), r"microbatches must be at least 1, got 0"),
        (("1f1b", 2, 2, -1), r"chunks must be at least 1, got -1"),
        (("interleaved", 2, 2), r"needs at least 2 chunks a rank, got 1; with 1 it is '1f1b'"),
        (("zb-h1", 2, 2, 3), r"'zb-h1' has 1 chunk a rank, got 3; 'interleaved' takes more"),
    ],
)
def test_what_cannot_be_made(call, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*call)


@pytest.mark.parametrize("stages", [2.0, True, "2", None])
def test_sizes_are_integers(stages):
    with pytest.raises(TypeError, match="stages must be an integer"):
        make_schedule("1f1b", stages, 2)
    with pytest.raises(TypeError, match="stages must be an integer"):
        forward_only(stages, 2)
    assert make_schedule("1f1b", np.int64(2), np.int32(3)) == make_schedule("1f1b", 2, 3)


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        (("F0 F1 B0", "F0 F1 B0 B1"), r"rank 0: B1 \(or I and W\) is missing"),
        (("F0 F1 B0 B1", "F0 B0"), r"rank 1: F1 is missing"),
        (("F0 F1 F0 B0 B1",), r"rank 0: F0 is run twice, as actions 0 and 2"),
        (("F0 B1 F1 B0",), r"rank 0: B1 comes before F1, which it needs"),
        (("F0 W0 I0 F1 B1",), r"rank 0: W0 comes before I0, which it needs"),
        (("F0 F1 I0 W0 I1",), r"rank 0: W1 is missing"),
        (("F0 F1 I0 W0 B0 B1",), r"rank 0: B0 and I0 do the same work"),
        (("F0 F1 F2 B0 B1",), r"microbatch=2, chunk=0\) is out of range: there are 2 micro-batches"),
        (("F0 F1.1 B0 B1",), r"chunk=1\) is out of range: there are 1 chunks"),
        (("F0 F1 X0",), r"'X' is no kind of action; kinds are F, B, I, W"),
    ],
)
def test_programs_that_are_no_schedule(programs, message):
    with pytest.raises(ValueError, match=message):
        by_hand(*programs)


def test_a_program_for_every_rank():
    with pytest.raises(ValueError, match="schedule 'mine' has 1 programs for 2 stages"):
        Schedule("mine", 2, 1, 1, (actions("F0 B0"),))


def test_whole_and_split_backwards_can_be_mixed():
    schedule = by_hand("F0 F1 I0 W0 I1 W1", "F0 B0 F1 B1")
    assert find_deadlock(schedule) is None
    assert schedule.trains
    assert not forward_only(2, 2).trains


def test_few_microbatches_are_warned_of():
    with pytest.warns(UserWarning, match=r"2 micro-batches for 4 pipeline stages: .*'1f1b' the bubble is 60% "):
        warn_if_bubbly(make_schedule("1f1b", 4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_bubbly(make_schedule("1f1b", 4, 4))
        make_schedule("1f1b", 4, 2)
