"""Gradients of micro-batches that are kept apart, so that their sum does not depend on the layout."""

from __future__ import annotations

import pytest
from gradient_recorder import LIKE, Recorder, specs

from mpishard.parameters.buckets import Bucket, TensorRun, make_buckets
from mpishard.parameters.reducer import GradientReducer


def test_gradients_that_are_set_aside_stay_apart_until_they_are_merged():
    recorder = Recorder([2, 3], 2, reproducible=True)
    gradients = recorder.gradients
    gradients.keep_apart([0, 0, 1, 0])
    for value in (1.0, 10.0, 100.0):
        with gradients.no_sync():
            recorder.backward(["t1", "t0"] if value > 1 else ["t1"], value)  # what a pass leaves out is zero in its own
    recorder.backward(["t1"], 1000.0)
    assert recorder.earlier == [[1, 1, 1], [110, 110, 110]]
    recorder.backward(["t0"], 1000.0)
    assert recorder.earlier == [[0, 0], [110, 110]]
    assert recorder.got == [(1, [1000] * 3), (0, [1000] * 2)]
    assert gradients.memory.nbytes == gradients.memory.peak_bytes == 3 * 5 * LIKE.itemsize
    gradients.finalize()
    gradients.reset()
    gradients.keep_apart([0, 1])
    with gradients.no_sync():
        recorder.backward(["t1", "t0"], 1.0)
    recorder.backward(["t1", "t0"], 2.0)
    assert recorder.got[2:] == ["uses", (1, [3] * 3), (0, [3] * 2)]
    assert recorder.earlier == []
    assert gradients.memory.peak_bytes == 3 * 5 * LIKE.itemsize  # memory is used again


def test_a_gradient_is_reduced_within_the_replica_before_it_is_merged():
    recorder = Recorder([2, 3], 2, factor=2, reproducible=True)
    recorder.gradients.keep_apart([0, 1])
    with recorder.gradients.no_sync():
        recorder.backward(["t1", "t0"], 1.0)
    recorder.backward(["t1", "t0"], 10.0)
    assert recorder.got == [(1, [22] * 3), (0, [22] * 2)]


def backward_of_stage(recorder, stage, names, value, last):
    recorder.gradients.begin_virtual_stage(stage, last)
    recorder.backward(names, value)
    recorder.gradients.end_virtual_stage(stage)


def test_virtual_stages_keep_micro_batches_of_one_pass_apart():
    recorder = Recorder([2, 3], 1, [TensorRun(0, 1, 0), TensorRun(1, 2, 1)], reproducible=True)
    recorder.gradients.keep_apart([0, 1, 0], in_pass=True)
    for stage, value in ((1, 1.0), (1, 10.0), (0, 1.0), (1, 100.0), (0, 10.0), (0, 100.0)):
        backward_of_stage(recorder, stage, [f"t{stage}"], value, value == 100)
        if recorder.got:
            assert recorder.earlier == [[11] * (2 + recorder.order[-1])]
    assert recorder.got == [(1, [100] * 3), (0, [100] * 2)]
    recorder.gradients.finalize()
    recorder.gradients.reset()
    assert recorder.gradients.memory.nbytes == 2 * 5 * LIKE.itemsize


def test_input_gradients_write_aside_while_an_earlier_micro_batch_is_open():
    """As in ZB-H1: I0 I1 W0 W1, where the bias t0 is written in I and the weight t1 in W."""
    recorder = Recorder([2, 3], 1, [TensorRun(0, 2)], reproducible=True)
    gradients = recorder.gradients
    for _ in range(2):
        gradients.keep_apart([0, 0], in_pass=True)
        for value in (1.0, 10.0):
            gradients.begin_input_gradient(0)
            view, add = gradients.gradient("t0")
            assert not add
            view[...] = value
            gradients.end_input_gradient()
        for value in (1.0, 10.0):
            gradients.begin_virtual_stage(0, value == 10)
            recorder.backward(["t1"], value)
            gradients.mark_ready("t0")
            gradients.end_virtual_stage(0)
        assert recorder.got == [(1, [10] * 3), (0, [10] * 2)]
        assert recorder.earlier == [[1, 1]]
        gradients.finalize()
        gradients.reset()
        recorder.got.clear()


def test_the_second_use_of_a_tensor_has_a_bucket_of_its_own():
    pieces = specs(2, 3)
    buckets = (*make_buckets(pieces, 5), Bucket(1, 0, 1, 0, 2, 0, second_use=True))
    recorder = Recorder([2, 3], 5)
    for reproducible in (False, True):  # what another reducer does not know is the tensor itself
        used = buckets if reproducible else buckets[:1]
        gradients = recorder.gradients = GradientReducer(pieces, used, LIKE, recorder, reproducible=reproducible)
        gradients.gradient("t0", second=True)[0][...] = 1.0
        view, add = gradients.gradient("t0")
        assert add is not reproducible
        view[...] = 5.0
        gradients.gradient("t1")[0][...] = 7.0
        recorder.got.clear()
        gradients.finalize()
        assert recorder.got == [(0, [5, 5, 7, 7, 7]), *([(1, [1, 1]), "uses"] if reproducible else [])]
        gradients.reset()


def test_another_number_of_micro_batches_than_announced_is_an_error():
    for made in (1, 3):
        recorder = Recorder([2], 1, reproducible=True)
        recorder.gradients.keep_apart([0, 1], in_pass=True)
        with pytest.raises(RuntimeError, match="2 micro-batches to keep apart"):
            for number in range(made):
                backward_of_stage(recorder, 0, ["t0"], 1.0, number == made - 1)
