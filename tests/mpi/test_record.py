"""The record of a run on several ranks: what it tells is what happened, and it changes nothing."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import training_problems

import mpishard
from mpishard import AdamW, Checkpoints, DDPOptimizer, OptimizationProblem, RunRecord, ShardingConfiguration
from mpishard.elastic.optimizer import ElasticOptimizer
from mpishard.launch.lease import Holder
from mpishard.launch.processes import process_facts
from mpishard.record import Run
from mpishard.record.reading import read_lines
from mpishard.record.summary import COMPUTATION, read_trace, spent


def problem(steps, **changes):
    return training_problems.problem(**{"batch_size": 8, "seed": 4, "steps": steps, **changes})


def ddp(mesh):
    return DDPOptimizer(AdamW(lr=0.1), ShardingConfiguration(mesh, max_gradient_norm=0.5))


@pytest.mark.parametrize("every", [0.0, 60.0])
@pytest.mark.quick
def test_tells_what_happened(mesh, folder, every):
    plain = ddp(mesh).optimize(problem(20), progress=False)
    mesh.ledger.clear()
    record = RunRecord(folder, mesh, every=every)

    def callback(state):
        if state.step % 5 == 0:
            record.log(state.step, first=state.parameters[0])
            record.log(state.step, held_out_loss=state.loss / 2)

    result = ddp(mesh).optimize(problem(20), progress=False, record=record, callback=callback)
    assert np.array_equal(result.loss_history, plain.loss_history)
    assert np.array_equal(result.parameters, plain.parameters)
    mesh.world.barrier()
    found = Run.read(folder)
    assert np.array_equal(found.metrics["step"], np.arange(1, 21))
    assert np.array_equal(found.metrics["loss"], result.loss_history)
    assert (found.metrics["workers"] == mesh.size).all() and (found.metrics["learning_rate"] == 0.1).all()
    assert found.metrics["samples"][-1] == result.samples and np.isfinite(found.metrics["gradient_norm"]).all()
    assert found.metrics["seconds"].sum() <= result.seconds
    assert len(read_lines(folder / "metrics.jsonl")[0]) == 20  # what is logged makes no second line of a step
    steps, values = found.logged["held_out_loss"]
    assert steps.tolist() == [5, 10, 15, 20] and np.array_equal(values, result.loss_history[4::5] / 2)
    assert found.logged["first"][1][-1] == result.parameters[0]
    (start,) = found.starts
    assert start["ranks"] == mesh.size and start["problem"]["batch_size"] == 8 and start["rule"]["rule"] == "AdamW"
    assert start["configuration"]["max_gradient_norm"] == 0.5
    assert [process.lines[0]["rank"] for process in found.processes] == list(range(mesh.size))
    for process in found.processes:
        steps, seconds = process.by_step("seconds")
        assert np.array_equal(steps, np.arange(1, 21))
        assert (process.by_step("busy")[1] <= seconds).all()
        assert all(value >= 0 for line in process.lines for value in line["phases"].values())


def test_phases_and_collectives_are_the_whole_step(mesh, folder):
    result = ddp(mesh).optimize(problem(10), progress=False, record=RunRecord(folder, mesh, every=60))
    mesh.world.barrier()
    run = Run.read(folder)
    found = spent(run)
    whole = np.mean([process.by_step("seconds")[1].sum() for process in run.processes])
    assert COMPUTATION in found.phases and "update" in found.phases
    # Rounded to microseconds when written; the last flush comes after the last step.
    assert sum(phase.sum() for phase in found.phases.values()) == pytest.approx(whole, abs=1e-2)
    own = run.processes[mesh.rank].by_step("seconds")[1].sum()  # of its own clock; others may have begun before
    assert own <= result.seconds + 1e-4
    sums = mesh.world.allgather_object(mesh.ledger.sent("data", label="gradients"))
    assert found.sent.get("data", np.zeros(1)).sum() >= sum(sums)


def test_a_run_that_goes_on_has_one_record(mesh, folder):
    whole = ddp(mesh).optimize(problem(9), progress=False)
    for steps in (5, 9):
        with Checkpoints(folder, mesh) as checkpoints, RunRecord(folder, mesh) as record:
            ddp(mesh).optimize(problem(steps), progress=False, checkpoints=checkpoints, resume=True, record=record)
    mesh.world.barrier()
    run = Run.read(folder)
    assert [start["resumed_steps"] for start in run.starts] == [0, 5]
    ends = read_lines(folder / "ends.jsonl")[0]
    assert [(end["start"], end["step"], end["reason"]) for end in ends] == [(1, 5, "steps"), (2, 9, "steps")]
    assert np.array_equal(run.metrics["loss"], whole.loss_history)


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(mesh, folder):
    folder = folder / "run"
    if mesh.rank == 0:
        folder.write_text("a file")
    mesh.world.barrier()
    with pytest.raises((FileExistsError, NotADirectoryError, OSError), match=str(folder)):
        ddp(mesh).optimize(problem(3), progress=False, record=RunRecord(folder, mesh))


class Nameless:
    def __repr__(self):
        raise LookupError("no name")


def test_what_is_no_record(mesh):
    with pytest.raises(TypeError, match="record .*got str"):
        ddp(mesh).optimize(problem(3), progress=False, record="runs")
    with pytest.raises(ValueError, match="every"):
        RunRecord("runs", mesh, every=-1)
    for trace in ((0, 3), (5, 4), (1, 2, 3)):
        with pytest.raises(ValueError, match="first and the last step to trace"):
            RunRecord("runs", mesh, trace=trace)
    with pytest.raises(TypeError, match="facts='abc'"):  # on all, though the last alone is wrong
        RunRecord("runs", mesh).begin("abc" if mesh.rank == mesh.size - 1 else None)
    with pytest.raises(ValueError, match="the fact 'time'"):
        RunRecord("runs", mesh).begin({"time": 3600} if mesh.rank == 0 else None)
    with pytest.raises((LookupError, RuntimeError), match="no name"):
        RunRecord("runs", mesh).begin({"what": Nameless()} if mesh.rank == 0 else None)
    assert not Path("runs").exists()


def test_a_loop_of_ones_own(mesh, folder):
    with RunRecord(folder, mesh) as record:
        record.begin({"note": "by hand"})
        for step in (1, 2, 3):
            with record.phase("reading"):
                mesh.world.barrier()
            mesh.data.all_reduce(np.ones(1000))
            record.step(step, loss=1 / step, accuracy=0.5)
    mesh.world.barrier()
    run = Run.read(folder)
    assert run.starts[0]["note"] == "by hand"
    assert np.array_equal(run.metrics["loss"], [1, 1 / 2, 1 / 3]) and np.array_equal(run.metrics["accuracy"], [0.5] * 3)
    found = spent(run)
    assert "reading" in found.phases
    if mesh.size > 1:
        # An all-reduce of 1000 float64 by the ring: 2 (n - 1) / n of them from each of n ranks.
        np.testing.assert_allclose(found.sent["data"], 8 * 2 * (mesh.size - 1) * 1000, rtol=1e-12)


@pytest.mark.mpi(min_size=2)
def test_workers_that_leave_and_come_back(comm, folder):
    with mpishard.Mesh(comm) as mesh:
        optimizer = ElasticOptimizer(ddp(mesh))

        def resize(state):
            if state.step in (3, 6):
                optimizer.resize(1 if state.step == 3 else comm.size)

        record = RunRecord(folder, mesh)
        result = optimizer.optimize(problem(9), progress=False, callback=resize, record=record)
        comm.Barrier()
        run = Run.read(folder)
        assert np.array_equal(run.metrics["loss"], result.loss_history)
        assert run.metrics["workers"][0] == comm.size and 1 in run.metrics["workers"]
        assert run.metrics["workers"][-1] == comm.size
        (first,) = [lines for process in run.processes if (lines := process.lines)[0]["rank"] == 0]
        assert sum(len(line["seconds"]) for line in first) == 9
        others = [process for process in run.processes if process.lines[0]["rank"] > 0]
        assert len(others) == comm.size - 1
        assert all(len(process.by_step("busy")[0]) < 9 for process in others)
        # Their first step after their return began before they left.
        assert all(any("waiting" in line["phases"] for line in process.lines) for process in others)


def test_a_trace_tells_what_was_done_when(comm, folder):
    pipeline = 2 if comm.size % 2 == 0 else 1
    with mpishard.Mesh(comm, pipeline=pipeline) as mesh:
        tokens = np.random.default_rng(1).integers(0, 11, (40, 6))
        model = mpishard.nn.GPT(
            vocabulary_size=11, context_length=5, width=8, layers=2, heads=2, mesh=mesh, microbatches=3
        )
        options = {"samples": 40, "batch_size": 16, "tokens_per_sample": 5, "steps": 6}
        task = OptimizationProblem.for_model(model, lambda rows: (tokens[rows, :-1], tokens[rows, 1:]), **options)
        record = RunRecord(folder, mesh, trace=(3, 4), every=60)
        ddp(mesh).optimize(task, progress=False, record=record)
        assert mesh.ledger.spans is None
        comm.Barrier()
        spans = read_trace(folder)
        assert {span.rank for span in spans} == set(range(comm.size)) and {span.step for span in spans} == {3, 4}
        for rank in range(comm.size):
            for step in (3, 4):
                own = [span for span in spans if (span.rank, span.step) == (rank, step)]
                (whole,) = [span for span in own if span.kind == "step"]
                # Written in microseconds.
                assert all(span.start >= whole.start - 2e-6 for span in own)
                assert sum(span.kind == "F" for span in own) == sum(span.kind == "B" for span in own) == 3
                assert sum(span.name == "update" for span in own) == 1
        mine = [span for span in spans if span.rank == comm.rank and span.kind == "data"]
        assert (mesh.data.size == 1) or any("[gradients]" in span.name for span in mine)


@pytest.mark.parametrize(("record", "saves"), [(0, None), (60, 4)], ids=["each step", "steps that are in a checkpoint"])
def test_reads_while_it_is_written(mesh, folder, record, saves):
    """What is flushed can be read at once, from where one was."""
    place, seen = 0, []

    def look(state):
        nonlocal place
        if mesh.rank == 0:
            lines, place = read_lines(folder / "metrics.jsonl", place)
            seen.append([line["step"] for line in lines])

    with Checkpoints(folder, mesh, every=saves) as checkpoints, RunRecord(folder, mesh, every=record) as written:
        ddp(mesh).optimize(problem(6), progress=False, callback=look, checkpoints=checkpoints, record=written)
    if mesh.rank == 0:
        assert sum(seen, []) == [1, 2, 3, 4] if saves else seen == [[step] for step in range(1, 7)]


@pytest.mark.parametrize("what", ["record", "checkpoints", "elastic"])
def test_the_folder_of_a_run_that_lives_is_refused(mesh, folder, what):
    """That of the launcher of these tests, as it were; after it the folder has no holder."""
    if mesh.rank == 0:
        launcher = os.getppid()
        other = replace(Holder.this(), process=launcher, began=process_facts(launcher)[19], job="17 of big")
        (folder / "holder").write_text(json.dumps(asdict(other)))
    mesh.world.barrier()
    optimizer, options = ddp(mesh), {}
    if what == "record":
        options = {"record": RunRecord(folder, mesh)}
    elif what == "checkpoints":
        options = {"checkpoints": Checkpoints(folder, mesh)}
    else:
        optimizer = ElasticOptimizer(optimizer, folder=folder)
    with pytest.raises(ValueError, match="another run .Slurm job 17 of big"):
        optimizer.optimize(problem(2), progress=False, **options)
    mesh.world.barrier()
    if mesh.rank == 0:
        (folder / "holder").unlink()
    mesh.world.barrier()
    assert optimizer.optimize(problem(2), progress=False, **options).steps == 2
    for each in options.values():
        each.close()
    mesh.world.barrier()
    assert not (folder / "holder").exists()
