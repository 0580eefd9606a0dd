"""The pipeline interpreter: every schedule gives the gradients of one rank, and does what its program says."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpishard import Mesh
from mpishard.layout.tensors import ModelParallelRank, ParameterSpec
from mpishard.nn.workspace import Workspace
from mpishard.parameters.flat import FlatParameters
from mpishard.pipeline.runtime import Pipeline
from mpishard.pipeline.schedule import make_schedule, simulate

WIDTH = 3
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1)]


class Scale:
    """One stage: ``y = x * w`` for each column; the loss is the sum of what comes out last."""

    def __init__(self, stage, stages, parameters):
        self.virtual_stage, self.last, self.parameters = stage, stages - 1, parameters
        self.scratch = Workspace(np.float64)

    def input_shape(self, batch):
        return batch.shape

    output_shape = input_shape

    def workspace(self):
        return Workspace(np.float64, sharing=self.scratch)

    def infer(self, x, work, batch):
        x = batch if x is None else x
        work.kept["x"] = x
        y = work.save("y", *x.shape)
        np.multiply(x, self.parameters[f"w{self.virtual_stage}"], out=y)
        return y

    def forward(self, x, work, batch):
        y = self.infer(x, work, batch)
        return float(y.sum()) if self.virtual_stage == self.last else y

    def input_gradient(self, dy, work, batch):
        dy = np.ones_like(batch) if dy is None else dy
        work.kept["dy"] = dy.copy()
        dx = work.borrow("dx", *dy.shape)
        np.multiply(dy, self.parameters[f"w{self.virtual_stage}"], out=dx)
        return None if self.virtual_stage == 0 else dx

    def weight_gradient(self, work):
        name = f"w{self.virtual_stage}"
        view, add = self.parameters.gradient(name)
        value = (work.kept["x"] * work.kept["dy"]).sum(axis=0)
        view[...] = view + value if add else value
        self.parameters.mark_ready(name)

    def backward(self, dy, work, batch):
        dx = self.input_gradient(dy, work, batch)
        self.weight_gradient(work)
        return dx


def pipeline(mesh, schedule, chunks, **options):
    """A pipeline over all ranks, with a parameter on each stage."""
    stages = mesh.size * chunks
    specs = [ParameterSpec(f"w{stage}", (WIDTH,), stage=stage) for stage in range(stages)]
    parameters = FlatParameters(
        specs, np.float64, place=ModelParallelRank(pipeline_rank=mesh.pipeline.rank, pipeline_size=mesh.size)
    )
    for name in parameters:
        parameters[name][...] = weights(stages)[int(name[1:])]
    own = [Scale(chunk * mesh.size + mesh.pipeline.rank, stages, parameters) for chunk in range(chunks)]
    return Pipeline(mesh.pipeline, own, schedule, parameters, **options)


def weights(stages):
    return np.random.default_rng(stages).uniform(0.5, 1.5, (stages, WIDTH))


def micro_batches(count):
    """Uneven ones, some empty."""
    random = np.random.default_rng(count)
    return [random.standard_normal((index % 4, WIDTH)) for index in range(count)]


@pytest.fixture(scope="module")
def pipe():
    with Mesh(MPI.COMM_WORLD, data=1, pipeline=MPI.COMM_WORLD.size) as mesh:
        yield mesh


def counts(size):
    """Fewer micro-batches than stages, as many, and no multiple."""
    return sorted({1, max(1, size - 1), size, size + 1, 2 * size + 1})


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_gradients_and_loss_of_one_rank(pipe, schedule, chunks):
    for count in counts(pipe.size):
        line = pipeline(pipe, schedule, chunks)
        batches = micro_batches(count)
        product = weights(line.virtual_stages).prod(axis=0)
        columns = sum(batch.sum(axis=0) for batch in batches)
        for total in (1, 2):  # a second call adds its gradients
            assert np.isclose(line.train(batches), (columns * product).sum(), rtol=1e-12)
            for name in line.parameters:
                expected = total * columns * product / weights(line.virtual_stages)[int(name[1:])]
                assert np.allclose(line.parameters.gradient(name)[0], expected, rtol=1e-12, atol=1e-12)
        assert np.isclose(line.evaluate(batches), (columns * product).sum(), rtol=1e-12)
        prediction = line.infer(batches[-1])
        assert (prediction is None) == (pipe.rank < pipe.size - 1)
        if prediction is not None:
            assert np.allclose(prediction, batches[-1] * product, rtol=1e-12)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_runs_what_the_simulator_ran(pipe, comm, schedule, chunks):
    """Actions by rank, what waited for what, and how many micro-batches are in flight."""
    count = 2 * pipe.size + 1
    line = pipeline(pipe, schedule, chunks)
    line.train(micro_batches(count))
    plan = make_schedule(schedule, pipe.size, count, chunks)
    timeline = simulate(plan)
    assert [item.action for item in line.executed] == list(plan.programs[pipe.rank])
    mine = sorted((event for event in timeline.events if event.rank == pipe.rank), key=lambda event: event.start)
    assert [item.action for item in line.executed] == [event.action for event in mine]
    assert line.peak_in_flight == timeline.peak_live[pipe.rank]
    times = {
        (item.action.kind, chunk_stage(item.action, rank, pipe.size), item.action.microbatch): item
        for rank, actions in enumerate(comm.allgather(line.executed))
        for item in actions
    }
    back = "I" if schedule == "zb-h1" else "B"
    for (kind, stage, microbatch), item in times.items():
        if kind == "F" and stage:
            assert times["F", stage - 1, microbatch].start < item.stop
        if kind == back and stage < line.virtual_stages - 1:
            assert times[back, stage + 1, microbatch].start < item.stop


def chunk_stage(action, rank, size):
    return action.chunk * size + rank


class Synchronous:
    """A communicator whose sends complete only when their receiver is there."""

    def __init__(self, comm):
        self.comm = comm

    def Isend(self, *arguments):
        return self.comm.Issend(*arguments)

    def __getattr__(self, name):
        return getattr(self.comm, name)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_synchronous_sends(pipe, monkeypatch, schedule, chunks):
    monkeypatch.setattr(pipe.pipeline, "comm", Synchronous(pipe.pipeline.comm))
    for count in counts(pipe.size):
        line = pipeline(pipe, schedule, chunks)
        batches = micro_batches(count)
        expected = (sum(batch.sum(axis=0) for batch in batches) * weights(line.virtual_stages).prod(axis=0)).sum()
        assert np.isclose(line.train(batches), expected, rtol=1e-12)
        assert np.isclose(line.evaluate(batches), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
def test_half_precision_on_the_wire(pipe, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    line = pipeline(pipe, "1f1b", 1, wire_dtype=dtype)
    batches = [np.ones((2, WIDTH))] * 3
    pipe.ledger.clear()
    loss = line.train(batches)
    expected = 6 * weights(line.virtual_stages).prod(axis=0).sum()
    assert np.isclose(loss, expected, rtol=0.01 * pipe.size)
    assert np.isclose(loss, expected, rtol=1e-12) == (pipe.size == 1)
    last, first = pipe.rank == pipe.size - 1, pipe.rank == 0
    assert pipe.ledger.sent("pipeline", "send", "activations") == (0 if last else 3 * 2 * WIDTH * 2)
    assert pipe.ledger.sent("pipeline", "send", "activation gradients") == (0 if first else 3 * 2 * WIDTH * 2)


def test_no_pass_after_one_that_was_left(pipe):
    """Messages of the pass that was left would be taken for those of the next."""
    line = pipeline(pipe, "gpipe", 1)
    batches = [np.full((2, WIDTH), value) for value in (1.0, 2.0, 3.0)]
    # Each rank leaves before it waits for what others no longer send, and what was sent is received.
    left, forward, calls = (2 if pipe.rank == 0 else 1), line.chunks[0].forward, []

    def leaving(x, work, batch):
        calls.append(batch)
        if len(calls) == left:
            raise ZeroDivisionError
        return forward(x, work, batch)

    line.chunks[0].forward = leaving
    if pipe.rank > 1:
        line._unfinished = True
    else:
        with pytest.raises(ZeroDivisionError):
            line.train(batches)
    line.chunks[0].forward = forward
    line.parameters.reset_gradients()
    if pipe.size == 1:
        assert np.isclose(line.train(batches), 12 * weights(1).sum(), rtol=1e-12)
    else:
        with pytest.raises(RuntimeError, match="earlier pass over this pipeline was left"):
            line.train(batches)
