"""Gradient buckets: how tensors are grouped, and the flat buffers that they are cut from."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from gradient_recorder import specs
from hypothesis import given

from mpishard.layout.tensors import ModelParallelRank, ParameterSpec
from mpishard.parameters.buckets import TensorRun, make_buckets
from mpishard.parameters.flat import FlatParameters


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


def test_buckets_are_cut_by_the_sizes_that_are_given():
    """Ranks whose pieces differ in size by one cut alike."""
    ours = make_buckets(specs(4, 3, 4), 4, sizes=[4, 4, 4])
    theirs = make_buckets(specs(4, 4, 4), 4)
    assert [(bucket.first, bucket.last) for bucket in ours] == [(bucket.first, bucket.last) for bucket in theirs]
    assert [bucket.size for bucket in ours] == [4, 3, 4]


def test_no_bucket_spans_two_runs():
    runs = [TensorRun(0, 1, 0, tied=True), TensorRun(1, 3, 0), TensorRun(3, 4, 1), TensorRun(4, 5, 1, "another")]
    buckets = make_buckets(specs(2, 2, 2, 2, 2), 100, runs)
    assert [(bucket.first, bucket.last, bucket.tied) for bucket in buckets] == [
        (0, 1, True),
        (1, 3, False),
        (3, 4, False),
        (4, 5, False),
    ]


def test_runs_of_parameters():
    """Neighbours of one stage are a run, or of one unit; ties are alone."""
    specs = [
        ParameterSpec("table", (2,), copies=(3,)),
        ParameterSpec("a", (2,)),
        ParameterSpec("b", (2,)),
        ParameterSpec("c", (2,), 1),
        ParameterSpec("d", (2,), 2),
    ]
    parameters = FlatParameters(
        specs, place=ModelParallelRank(pipeline_rank=0, pipeline_size=2), units=[["table", "a"], ["b"], ["d"], ["c"]]
    )
    assert list(parameters) == ["table", "a", "b", "d"]
    assert [(run.first, run.last, run.virtual_stage, run.tied) for run in parameters.layout.gradient_runs()] == [
        (0, 1, 0, True),
        (1, 3, 0, False),
        (3, 4, 2, False),
    ]
    assert [(run.first, run.last) for run in parameters.layout.gradient_runs(by_unit=True)] == parameters.units
    assert parameters.units == [(0, 1), (1, 2), (2, 3), (3, 4)]


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
    with pytest.raises(ValueError, match="two parameters of stage 0 are named 'w'"):
        FlatParameters([ParameterSpec("w", (2,)), ParameterSpec("w", (3,))])
    with pytest.raises(ValueError, match="the specs name 2 elements, but the flat array has 3"):
        FlatParameters.over(np.zeros(3), [ParameterSpec("w", (2,))])
    with pytest.raises(ValueError, match="minimum_parameter_group_size is 0"):
        make_buckets(specs(3), 0)
