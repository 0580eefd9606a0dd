"""Gradients: their buckets, their reducer, its phases, and micro-batches that are kept apart."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mpishard.layout.tensors import ModelParallelRank, ParameterSpec
from mpishard.parameters.buckets import Bucket, TensorRun, make_buckets
from mpishard.parameters.flat import FlatParameters
from mpishard.parameters.progress import GradientPhase, GradientProgress
from mpishard.parameters.reducer import GradientReducer

LIKE = np.zeros(1)


def specs(*sizes):
    return [ParameterSpec(f"t{index}", (size,)) for index, size in enumerate(sizes)]


class Transfer:
    """A sum under way."""

    def wait(self):
        pass

    test = abandon = wait


class Recorder:
    """A reducer of gradients whose sums note what they get."""

    def __init__(self, sizes, minimum, runs=None, factor=1, **options):
        pieces = specs(*sizes)
        self.got, self.complete_calls, self.resets, self.factor = [], [], 0, factor
        self.gradients = GradientReducer(pieces, make_buckets(pieces, minimum, runs), LIKE, self, **options)

    @property
    def order(self):
        return [index for index, _ in self.got]

    def sum_copies(self, bucket, gradient):
        gradient *= self.factor

    def start(self, bucket, gradient, earlier=()):
        self.got.append((bucket.index, gradient.tolist()))
        self.earlier = [partial.tolist() for partial in earlier]
        return Transfer()

    def finish(self, started):
        self.complete_calls.append([bucket.index for bucket, _, _ in started])

    def add_uses(self, memory):
        self.got.append("uses")

    def reset(self):
        self.resets += 1

    def backward(self, names, value=1.0):
        for name in names:
            view, add = self.gradients.gradient(name)
            view[...] = view + value if add else value
            self.gradients.mark_ready(name)


# Gradient buckets: how tensors are grouped, and the flat buffers that they are cut from.


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
    found = [(bucket.first, bucket.last, bucket.tied) for bucket in buckets]
    assert found == [(0, 1, True), (1, 3, False), (3, 4, False), (4, 5, False)]


def test_runs_of_parameters():
    """Neighbours of one stage are a run, or of one unit; ties are alone."""
    pieces = [ParameterSpec("table", (2,), copies=(3,)), ParameterSpec("a", (2,)), ParameterSpec("b", (2,))]
    pieces += [ParameterSpec("c", (2,), 1), ParameterSpec("d", (2,), 2)]
    place, units = ModelParallelRank(pipeline_rank=0, pipeline_size=2), [["table", "a"], ["b"], ["d"], ["c"]]
    parameters = FlatParameters(pieces, place=place, units=units)
    assert list(parameters) == ["table", "a", "b", "d"]
    runs = [(run.first, run.last, run.virtual_stage, run.tied) for run in parameters.layout.gradient_runs()]
    assert runs == [(0, 1, 0, True), (1, 3, 0, False), (3, 4, 2, False)]
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
    with pytest.raises(ValueError, match="stage 0 .*'w'"):
        FlatParameters([ParameterSpec("w", (2,)), ParameterSpec("w", (3,))])
    with pytest.raises(ValueError, match="specs name 2 .*has 3"):
        FlatParameters.over(np.zeros(3), [ParameterSpec("w", (2,))])
    with pytest.raises(ValueError, match="minimum_parameter_group_size is 0"):
        make_buckets(specs(3), 0)


def backward_of_stage(recorder, stage, names, value, last):
    recorder.gradients.begin_virtual_stage(stage, last)
    recorder.backward(names, value)
    recorder.gradients.end_virtual_stage(stage)


# The reducer of gradients: order of reduction, accumulation over passes, memory.

each_way = pytest.mark.parametrize("on_demand", [False, True])


def test_hand_over_is_last_first_whatever_the_order_of_announcements():
    """A tensor without a gradient is zero."""
    recorder = Recorder([1, 1, 1, 1, 2], 2)
    recorder.backward(["t0", "t2", "t3"])
    assert recorder.got == []
    recorder.backward(["t4"])
    assert recorder.got == [(2, [1, 1]), (1, [1, 1])]
    recorder.gradients.end_pass()
    assert recorder.got[2:] == [(0, [1, 0])]


def test_held_passes_add_up_and_travel_once():
    recorder = Recorder([2, 2], 2)
    with recorder.gradients.no_sync():
        with recorder.gradients.no_sync():  # a pass within another that is held is held too
            recorder.backward(["t1", "t0"])
        recorder.backward(["t1", "t0"])
    assert recorder.got == []
    recorder.backward(["t1", "t0"], 2.0)
    assert recorder.got == [(1, [4, 4]), (0, [4, 4])]
    recorder.gradients.finalize()
    assert recorder.complete_calls == [[1, 0]]


def test_calls_that_only_add_travel_once_and_each_step_of_a_loop_does():
    recorder = Recorder([2, 2], 2, accumulates=True)
    for value in (1.0, 2.0):
        recorder.backward(["t1", "t0"], value)
        recorder.gradients.end_pass()
    assert recorder.got == []
    recorder.gradients.finalize()
    assert recorder.got == [(1, [3, 3]), (0, [3, 3])]
    recorder.gradients.reset()
    recorder.gradients.progress.in_loop = True
    recorder.backward(["t1", "t0"], 4.0)
    assert recorder.got[2:] == [(1, [4, 4]), (0, [4, 4])]
    recorder.gradients.reset()
    recorder.gradients.progress.in_loop = False
    recorder.backward(["t1", "t0"])
    assert len(recorder.got) == 4


def test_on_demand_every_pass_travels_and_memory_is_used_again():
    recorder = Recorder([4, 2, 3], 2, on_demand=True)
    for value in (1.0, 2.0):
        with recorder.gradients.no_sync():
            recorder.backward(["t2", "t1", "t0"], value)
    assert recorder.order == [2, 1, 0, 2, 1, 0]
    assert recorder.got[-1] == (0, [2, 2, 2, 2])
    # One is under way while the next one is written; the first and the last use one block in turns.
    assert recorder.gradients.memory.peak_bytes == (4 + 2) * LIKE.itemsize
    assert recorder.complete_calls == [[2], [1], [0]] * 2
    with pytest.raises(ValueError, match="no flat buffer"):
        _ = recorder.gradients.flat


@each_way
def test_lent_memory_is_not_counted_or_kept(on_demand):
    recorder = Recorder([4, 2], 2, on_demand=on_demand)
    flat = np.arange(6.0)
    recorder.gradients.use_external(flat)
    recorder.gradients.finalize()
    assert recorder.got == [(1, [4, 5]), (0, [0, 1, 2, 3])]
    assert recorder.gradients.memory.peak_bytes == 0


@each_way
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


@each_way
def test_only_the_last_micro_batch_of_a_stage_travels(on_demand):
    """On demand every one does, but for ties."""
    runs = [TensorRun(0, 1, 0, tied=True), TensorRun(1, 3, 0), TensorRun(3, 4, 1)]
    recorder = Recorder([2, 2, 2, 2], 2, runs, on_demand=on_demand)
    for stage, names in ((1, ["t3"]), (0, ["t2", "t0"])):
        for last in (False, True):
            backward_of_stage(recorder, stage, names, 1.0, last)
    recorder.gradients.end_pass()
    first, tied = (2, [1, 1]), (1, [0, 0])
    if on_demand:
        assert recorder.got == [(3, [1, 1]), (3, [1, 1]), first, tied, first, tied, (0, [2, 2])]
    else:
        assert recorder.got == [(3, [2, 2]), (2, [2, 2]), tied, (0, [2, 2])]


@each_way
def test_passes_of_several_micro_batches_each(on_demand):
    """A held pass in which a stage has two micro-batches, and then another: nothing travels twice."""
    recorder = Recorder([2, 2], 2, on_demand=on_demand)
    for context in (recorder.gradients.no_sync(), nullcontext()):
        with context:
            for last in (False, True):
                backward_of_stage(recorder, 0, ["t1", "t0"], 1.0, last)
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
    with pytest.raises(TypeError, match=r"forgets .*gradients\['t0'\] \+="):
        recorder.gradients["t0"] = np.ones(2)
    with pytest.raises(TypeError, match=r"by name, gradients\['t0'\] \+="):
        recorder.gradients += np.ones(5)
    recorder.gradients.end_pass()
    assert recorder.got == [(1, [3.0] * 3), (0, [3.0] * 2)]


def test_a_rank_without_parameters_and_sums_that_are_abandoned():
    recorder = Recorder([], 1, runs=[])
    recorder.gradients.finalize()
    assert recorder.gradients.reduced
    recorder.gradients.reset()
    assert recorder.got == []
    recorder = Recorder([2], 2)
    recorder.backward(["t0"])
    recorder.gradients.abandon()
    recorder.gradients.reset()
    assert recorder.complete_calls == []


def test_a_pass_that_fails_sends_nothing_and_the_step_goes_on_without_it():
    recorder = Recorder([2, 2], 2, on_demand=True)
    with pytest.raises(ZeroDivisionError), recorder.gradients.no_sync():
        recorder.gradients.gradient("t1")
        raise ZeroDivisionError
    assert recorder.got == []
    recorder.gradients.reset()
    recorder.backward(["t1", "t0"])
    assert recorder.order == [1, 0]
    assert recorder.gradients.progress.phase is GradientPhase.REDUCING


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


def test_a_caller_s_gradients_add_up_until_the_step_is_taken():
    gradients = Recorder([2, 2], 2).gradients
    for flat in (np.arange(4.0), None, np.ones(4)):
        gradients.accumulation.add(flat)
    assert gradients.accumulation.total.tolist() == [1, 2, 3, 4]
    gradients.reset()
    assert gradients.accumulation.total is None


# Which pass is the last one of a step, the phases of a step, and what the reducer of gradients takes in each.


@pytest.mark.parametrize(
    ("is_bound", "accumulates", "in_loop", "is_last"),
    [(True, False, False, True), (True, True, False, False), (True, True, True, True), (False, False, True, False)],
)
def test_which_pass_is_the_last_one(is_bound, accumulates, in_loop, is_last):
    progress = GradientProgress([], [], False, accumulates, is_bound)
    progress.in_loop = in_loop
    assert progress.is_last_pass is is_last
    progress.hold()
    progress.hold()
    progress.let_go(complete=True)
    assert not progress.is_last_pass  # within another context
    progress.let_go(complete=False)
    assert progress.is_last_pass is is_last
    assert progress.passes_before_last == 1


STEPS = [GradientPhase.ACCUMULATING, GradientPhase.REDUCING, GradientPhase.REDUCED]
ACCUMULATING, REDUCING, REDUCED = STEPS
LATE, ADDED = "no_sync.. comes too late", "'t0' is reduced already, so another backward pass cannot add to it"
# By call: the phase that follows in each phase, or the error.
PHASES = {
    "gradient": [ACCUMULATING, REDUCING, ADDED],  # in the phase REDUCING of a bucket that is not reduced yet
    "no_sync": [ACCUMULATING, LATE, LATE],
    "mark_ready": [REDUCING, REDUCING, REDUCED],
    "end_pass": [REDUCING, REDUCING, REDUCED],
    "finalize": [REDUCED] * 3,
    "reset": [ACCUMULATING] * 3,
}


@each_way
@pytest.mark.parametrize("phase", STEPS)
@pytest.mark.parametrize("call", PHASES)
def test_phases_of_a_step(phase, call, on_demand):
    """Each call in each phase; two buckets, of which the last is reduced in the phase REDUCING."""
    recorder = Recorder([2, 2], 2, on_demand=on_demand)
    gradients = recorder.gradients
    gradients.gradient("t1")
    if phase is not ACCUMULATING:
        gradients.mark_ready("t1")
    if phase is REDUCED:
        gradients.finalize()
    assert gradients.progress.phase is phase

    def act():
        if call == "no_sync":
            with gradients.no_sync():
                pass
        else:
            getattr(gradients, call)(*{"gradient": ["t0"], "mark_ready": ["t1"]}.get(call, []))

    expected = PHASES[call][STEPS.index(phase)]
    if isinstance(expected, str):
        with pytest.raises(RuntimeError, match=expected):
            act()
        assert gradients.progress.phase is phase
    else:
        act()
        assert gradients.progress.phase is expected
        assert gradients.reduced == (expected is REDUCED)
        assert recorder.resets == (call == "reset")


# Gradients of micro-batches that are kept apart, so that their sum does not depend on the layout.


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


@pytest.mark.parametrize("reproducible", [True, False])
def test_what_a_rank_has_computed_is_looked_at_before_anything_is_added_to_it(reproducible):
    recorder, seen = Recorder([2, 3], 2, factor=2, reproducible=reproducible), []
    recorder.gradients.observers.append(lambda bucket, gradient: seen.append((bucket.index, *gradient[:1].tolist())))
    if reproducible:
        recorder.gradients.keep_apart([0, 1])
    with recorder.gradients.no_sync():
        recorder.backward(["t1", "t0"], 1.0)
    recorder.backward(["t1"], 10.0)
    assert [recorder.gradients.progress.is_ready(name) for name in ("t0", "t1")] == [False, True]
    recorder.backward(["t0"], 10.0)
    assert seen == ([(1, 1), (0, 1), (1, 10), (0, 10)] if reproducible else [(1, 11), (0, 11)])


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
