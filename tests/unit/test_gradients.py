"""Gradient buckets: grouping, order of hand-over, accumulation, memory."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpishard.gradients import GradientBuckets, make_buckets
from mpishard.layout import ParameterSpec
from mpishard.parameters import FlatParameters

LIKE = np.zeros(1)


def specs(*sizes):
    return [ParameterSpec(f"t{index}", (size,)) for index, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 30))
def test_buckets_hold_the_minimum_and_cover_everything(sizes, minimum):
    buckets = make_buckets(specs(*sizes), minimum)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert (buckets[0].first, buckets[0].start) == (0, 0)
    assert (buckets[-1].last, buckets[-1].stop) == (len(sizes), sum(sizes))
    for one, two in zip(buckets[:-1], buckets[1:], strict=True):
        assert (one.last, one.stop) == (two.first, two.start)
    if len(buckets) > 1:
        assert min(bucket.size for bucket in buckets) >= minimum


class Recorder:
    """A reducer that notes what it gets, and holds on to it until `drain`."""

    def __init__(self, sizes, minimum, on_demand=False):
        self.got = []
        self.open = []
        self.gradients = GradientBuckets(
            specs(*sizes), LIKE, minimum, reduce=self.reduce, drain=self.drain, on_demand=on_demand
        )

    def reduce(self, bucket, array):
        self.got.append((bucket.index, array.tolist()))
        self.open.append(bucket)

    def drain(self):
        for bucket in self.open:
            self.gradients.release(bucket)
        self.open.clear()

    def backward(self, names, value=1.0):
        for name in names:
            view, add = self.gradients.gradient(name)
            view[...] = view + value if add else value
            self.gradients.finished(name)


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
    recorder.gradients.hold = True
    recorder.backward(["t1", "t0"])
    recorder.gradients.end_pass(last=False)
    recorder.gradients.hold = False
    recorder.backward(["t1", "t0"], 2.0)
    assert recorder.got == [(1, [3, 3]), (0, [3, 3])]
    recorder.gradients.end_pass()
    recorder.drain()
    recorder.gradients.reset()
    recorder.backward(["t1", "t0"], 5.0)
    assert recorder.got[2:] == [(1, [5, 5]), (0, [5, 5])]


def test_on_demand_every_pass_travels_and_memory_is_used_again():
    recorder = Recorder([4, 2, 3], 2, on_demand=True)
    for value in (1.0, 2.0):
        for name in ("t2", "t1", "t0"):
            recorder.backward([name], value)
            recorder.drain()
        recorder.gradients.end_pass(last=False)
    assert [index for index, _ in recorder.got] == [2, 1, 0, 2, 1, 0]
    assert recorder.got[-1] == (0, [2, 2, 2, 2])
    assert recorder.gradients.peak_bytes == 4 * LIKE.itemsize  # one bucket, the largest
    with pytest.raises(ValueError, match="no flat buffer"):
        _ = recorder.gradients.flat


@pytest.mark.parametrize("on_demand", [False, True])
def test_lent_memory_is_not_counted_or_kept(on_demand):
    recorder = Recorder([4, 2], 2, on_demand=on_demand)
    flat = np.arange(6.0)
    recorder.gradients.adopt(flat)
    recorder.gradients.end_pass()
    recorder.drain()
    assert recorder.got == [(1, [4, 5]), (0, [0, 1, 2, 3])]
    assert recorder.gradients.peak_bytes == 0


def test_views_are_the_flat_buffers():
    parameters = FlatParameters([ParameterSpec("w", (2, 3)), ParameterSpec("b", (0,)), ParameterSpec("c", ())])
    parameters["w"][...] = 1
    parameters["c"][...] = 2
    assert parameters.flat.tolist() == [1] * 6 + [2]
    assert (list(parameters), len(parameters), parameters.size) == (["w", "b", "c"], 3, 7)
    view, add = parameters.gradient("w")
    assert (view.shape, add) == ((2, 3), False)
    view[...] = 5
    assert parameters.gradients.flat.tolist() == [5] * 6 + [0]


def test_bad_parameters():
    with pytest.raises(ValueError, match="two parameters are named 'w'"):
        FlatParameters([ParameterSpec("w", (2,)), ParameterSpec("w", (3,))])
    with pytest.raises(ValueError, match="the specs name 2 elements, but the flat array has 3"):
        FlatParameters.over(np.zeros(3), [ParameterSpec("w", (2,))])
    with pytest.raises(ValueError, match="minimum_parameter_group_size is 0"):
        make_buckets(specs(3), 0)
