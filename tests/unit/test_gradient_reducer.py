"""The reducer of gradients: order of reduction, accumulation over passes, memory."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
from gradient_recorder import LIKE, Recorder

from mpishard.layout.tensors import ParameterSpec
from mpishard.parameters.buckets import TensorRun
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.reducer import GradientPhase


def test_hand_over_is_last_first_whatever_the_order_of_announcements():
    recorder = Recorder([2, 2, 2], 2)
    recorder.backward(["t0"])
    assert recorder.got == []
    recorder.backward(["t2"])
    assert recorder.got == [(2, [1, 1])]
    recorder.backward(["t1"])
    assert [index for index, _ in recorder.got] == [2, 1, 0]


def test_tensors_without_a_gradient_are_zero():
    recorder = Recorder([2, 1, 3], 3)
    recorder.backward(["t1"])
    recorder.gradients.end_pass()
    assert recorder.got == [(1, [0, 0, 0]), (0, [0, 0, 1])]


def test_held_passes_add_up_and_travel_once():
    recorder = Recorder([2, 2], 2)
    with recorder.gradients.no_sync():
        recorder.backward(["t1", "t0"])
    recorder.backward(["t1", "t0"], 2.0)
    assert recorder.got == [(1, [3, 3]), (0, [3, 3])]
    recorder.gradients.finalize()
    assert recorder.complete_calls == [[1, 0]]
    recorder.gradients.reset()
    recorder.backward(["t1", "t0"], 5.0)
    assert recorder.got[2:] == [(1, [5, 5]), (0, [5, 5])]


def test_on_demand_every_pass_travels_and_memory_is_used_again():
    recorder = Recorder([4, 2, 3], 2, on_demand=True)
    for value in (1.0, 2.0):
        with recorder.gradients.no_sync():
            recorder.backward(["t2", "t1", "t0"], value)
    assert [index for index, _ in recorder.got] == [2, 1, 0, 2, 1, 0]
    assert recorder.got[-1] == (0, [2, 2, 2, 2])
    # One is under way while the next one is written; the first and the last use one block in turns.
    assert recorder.gradients.memory.peak_bytes == (4 + 2) * LIKE.itemsize
    assert recorder.complete_calls == [[2], [1], [0]] * 2
    with pytest.raises(ValueError, match="no flat buffer"):
        _ = recorder.gradients.flat


@pytest.mark.parametrize("on_demand", [False, True])
def test_lent_memory_is_not_counted_or_kept(on_demand):
    recorder = Recorder([4, 2], 2, on_demand=on_demand)
    flat = np.arange(6.0)
    recorder.gradients.memory.use_external(flat)
    recorder.gradients.finalize()
    assert recorder.got == [(1, [4, 5]), (0, [0, 1, 2, 3])]
    assert recorder.gradients.memory.peak_bytes == 0


@pytest.mark.parametrize("on_demand", [False, True])
def test_stages_are_handed_over_apart_and_a_tie_last(on_demand):
    """Tensors 1 and 2 are in stage 0, tensor 3 is in stage 1, and tensor 0 is tied between the stages."""
    runs = [TensorRun(0, 1, 0, tied=True), TensorRun(1, 3, 0), TensorRun(3, 4, 1)]
    recorder = Recorder([2, 2, 2, 2], 2, runs, on_demand=on_demand)
    recorder.backward(["t2", "t1", "t0"])  # stage 0 before stage 1, as a schedule may have it
    assert recorder.order == [2, 1]
    recorder.backward(["t3", "t0"])
    assert recorder.order == [2, 1, 3]
    recorder.gradients.end_pass()
    assert recorder.got[-1] == (0, [2, 2])
    assert recorder.order == [2, 1, 3, 0]


@pytest.mark.parametrize("on_demand", [False, True])
def test_only_the_last_micro_batch_of_a_stage_travels(on_demand):
    """On demand every one does, but for ties."""
    runs = [TensorRun(0, 1, 0, tied=True), TensorRun(1, 3, 0), TensorRun(3, 4, 1)]
    recorder = Recorder([2, 2, 2, 2], 2, runs, on_demand=on_demand)
    for stage, names in ((1, ["t3"]), (0, ["t2", "t0"])):
        for last in (False, True):
            recorder.gradients.begin_virtual_stage(stage, last)
            recorder.backward(names)
            recorder.gradients.end_virtual_stage(stage)
    recorder.gradients.end_pass()
    if on_demand:
        assert recorder.got == [
            (3, [1, 1]),
            (3, [1, 1]),
            (2, [1, 1]),
            (1, [0, 0]),
            (2, [1, 1]),
            (1, [0, 0]),
            (0, [2, 2]),
        ]
    else:
        assert recorder.got == [(3, [2, 2]), (2, [2, 2]), (1, [0, 0]), (0, [2, 2])]


@pytest.mark.parametrize("on_demand", [False, True])
def test_passes_of_several_micro_batches_each(on_demand):
    """A held pass in which a stage has two micro-batches, and then another: nothing travels twice."""
    recorder = Recorder([2, 2], 2, on_demand=on_demand)
    for context in (recorder.gradients.no_sync(), nullcontext()):
        with context:
            for last in (False, True):
                recorder.gradients.begin_virtual_stage(0, last)
                recorder.backward(["t1", "t0"])
                recorder.gradients.end_virtual_stage(0)
    recorder.gradients.end_pass()
    total = np.zeros((2, 2))
    for index, values in recorder.got:
        total[index] += values
    assert (total == 4).all()
    assert len(recorder.got) == (8 if on_demand else 2)


def test_names_take_what_is_added_to_them():
    """As in a function whose start has names; what would forget a gradient is refused."""
    recorder = Recorder([2, 3], 1)
    for value in (1.0, 2.0):
        for name in ("t0", "t1"):
            recorder.gradients[name] += value
    with pytest.raises(TypeError, match=r"gradients\['t0'\] = ... forgets .*; write gradients\['t0'\] \+= ..."):
        recorder.gradients["t0"] = np.ones(2)
    with pytest.raises(TypeError, match=r"added to by name, gradients\['t0'\] \+= ..."):
        recorder.gradients += np.ones(5)
    recorder.gradients.end_pass()
    assert recorder.got == [(1, [3.0] * 3), (0, [3.0] * 2)]


def test_a_rank_without_parameters():
    recorder = Recorder([], 1, runs=[])
    recorder.gradients.finalize()
    assert recorder.gradients.reduced
    recorder.gradients.reset()
    assert recorder.got == []


def test_a_pass_that_fails_sends_nothing_and_the_step_goes_on_without_it():
    recorder = Recorder([2, 2], 2, on_demand=True)
    with pytest.raises(ZeroDivisionError), recorder.gradients.no_sync():
        recorder.gradients.gradient("t1")
        raise ZeroDivisionError
    assert recorder.got == []
    recorder.gradients.reset()
    recorder.backward(["t1", "t0"])
    assert recorder.order == [1, 0]
    assert recorder.gradients.phase is GradientPhase.REDUCING


def test_memory_of_gradients_is_freed_with_its_parameters():
    parameters = FlatParameters([ParameterSpec("w", (3,))], np.float64)
    parameters.gradients["w"] += 1
    with parameters.gradients.no_sync():
        pass
    memory = weakref.ref(parameters.gradients.memory)
    gc.disable()
    try:
        del parameters
        assert memory() is None
    finally:
        gc.enable()


def test_a_pass_within_another_that_is_held_is_held_too():
    recorder = Recorder([2, 2], 2)
    with recorder.gradients.no_sync():
        with recorder.gradients.no_sync():
            recorder.backward(["t1", "t0"])
        recorder.backward(["t1", "t0"])
    assert recorder.got == []
    recorder.backward(["t1", "t0"])
    assert recorder.got == [(1, [3, 3]), (0, [3, 3])]


def test_passes_without_a_context_are_held_where_gradients_are_not_synchronized_automatically():
    """As between calls of `step` with auto_sync_gradients=False."""
    recorder = Recorder([2, 2], 2)
    recorder.gradients.is_last_pass = False
    for value in (1.0, 2.0):
        recorder.backward(["t1", "t0"], value)
        recorder.gradients.end_pass()
    assert recorder.got == []
    recorder.gradients.finalize()
    assert recorder.got == [(1, [3, 3]), (0, [3, 3])]


def test_a_caller_s_gradients_add_up_until_the_step_is_taken():
    gradients = Recorder([2, 2], 2).gradients
    for flat in (np.arange(4.0), None, np.ones(4)):
        gradients.accumulation.add(flat)
    assert gradients.accumulation.total.tolist() == [1, 2, 3, 4]
    gradients.reset()
    assert gradients.accumulation.total is None


def test_sums_under_way_can_be_abandoned():
    recorder = Recorder([2], 2)
    recorder.backward(["t0"])
    recorder.gradients.abandon()
    recorder.gradients.reset()
    assert recorder.complete_calls == []
