"""Elastic runs that change the tensor and pipeline sizes of their mesh while they go."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI
from steps import STRATEGIES

from mpishard import (
    AdamW,
    AutoLayouts,
    DDPOptimizer,
    ElasticOptimizer,
    Mesh,
    OptimizationProblem,
    ShardingConfiguration,
    ZeRO1Optimizer,
    nn,
)
from mpishard.checkpoint import Checkpoints
from mpishard.elastic import control
from mpishard.elastic.control import ControlFolder
from mpishard.elastic.mesh_choice import MeshSizes
from mpishard.launch.job_notes import RunLost

TOKENS = np.random.default_rng(1).integers(0, 11, (45, 9))
STEPS = 8
# By step the mesh that is asked for after it, as far as there are ranks for it.
SEQUENCE = {
    1: {"tensor": 2},
    2: {"data": 2, "tensor": 2},
    3: {"data": 3},
    4: {"tensor": 2, "pipeline": 2},
    5: {"pipeline": 2},
    6: {"data": 1},
}
ANY = [{}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}]


def ranks_of(sizes):
    return int(np.prod(list(sizes.values())))


def problem(mesh, steps=STEPS, dtype=np.float64, tied=True, **options):
    many = mesh.pipeline.size > 1
    model = nn.GPT(11, 8, 16, 2, 2, dtype, seed=3, mesh=mesh, tied=tied, microbatches=2 if many else 1, **options)
    return OptimizationProblem.for_model(
        model,
        lambda samples: (TOKENS[samples, :-1], TOKENS[samples, 1:]),
        samples=45,
        batch_size=16,
        micro_batch_size=4,
        tokens_per_sample=8,
        steps=steps,
    )


def inner(strategy, mesh, **options):
    options = {"max_gradient_norm": 0.5, "minimum_parameter_group_size": 500} | options
    return strategy(AdamW(lr=0.01), ShardingConfiguration(mesh, **options))


def whole(result, axis):
    """All parameters by name, whatever this rank has of them."""
    parameters = result.parameters
    full = {spec.name: np.full(spec.shape, np.nan) for spec in parameters.specs}
    flat = parameters.gather()
    parts = [(p.name, p.box, flat[p.start : p.start + p.size].reshape(p.shape)) for p in parameters.pieces]
    for each in axis.comm.allgather(parts):
        for name, box, part in each:
            full[name][tuple(slice(*side) for side in box)] = part
    return full


@pytest.fixture(scope="module")
def expected():
    """The run of one rank that is not elastic."""
    with Mesh(MPI.COMM_SELF) as mesh:
        result = inner(DDPOptimizer, mesh).optimize(problem(mesh), progress=False)
        return whole(result, mesh.world), result.loss_history


def same(result, mesh, expected):
    found = whole(result, mesh.world)
    assert sorted(found) == sorted(expected[0])
    for name, values in expected[0].items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.loss_history, expected[1], rtol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES[1:2])
def test_a_run_takes_one_mesh_after_the_other(comm, strategy, expected):
    wanted = {step: sizes for step, sizes in SEQUENCE.items() if ranks_of(sizes) <= comm.size}
    noted, drawn = {}, []
    with Mesh(comm) as mesh:
        optimizer = ElasticOptimizer(inner(strategy, mesh), layouts=ANY)

        def callback(state):
            noted[state.step] = {name: size for name, size in mesh.shape.items() if size > 1}
            if state.step in wanted:
                optimizer.resize(mesh=wanted[state.step])

        def build(mesh):
            made = problem(mesh)
            drawn.append(bool(made.start.held.any()))
            return made

        result = optimizer.optimize(build, callback=callback, progress=False)
        assert drawn[0]
        assert not any(drawn[1:])  # those get the values of the run
        assert mesh.size == comm.size
        same(result, mesh, expected)
    now = {"data": comm.size}
    for step in range(1, STEPS + 1):
        if comm.rank == 0:
            assert noted[step] == {name: size for name, size in now.items() if size > 1}
        assert (step in noted) == (comm.rank < ranks_of(now))
        now = wanted.get(step, now)


def test_a_mesh_is_asked_for_from_another_shell(comm, expected, tmp_path, monkeypatch):
    """And a number of workers, which takes the first mesh of the list that has so many ranks."""
    if comm.size < 3:
        pytest.skip("too few ranks for two meshes")
    monkeypatch.setattr(control, "_POLL_S", 0.0)
    folder, noted, answers = ControlFolder(Path(comm.bcast(str(tmp_path)))), {}, []
    wanted = {2: {"workers": 2, "mesh": "tensor=2"}, 4: {"workers": 1}, 6: {"workers": 3, "mesh": "data=3"}}
    with Mesh(comm) as mesh:
        layouts = [{"tensor": 2, "pipeline": 2}, {"tensor": 2}, {}]
        optimizer = ElasticOptimizer(inner(DDPOptimizer, mesh), layouts=layouts, folder=folder.path.parent)

        def callback(state):
            noted[state.step] = str(MeshSizes(**mesh.shape))
            if mesh.rank == 0 and state.step in wanted:
                folder.write("request", {"id": str(state.step), **wanted[state.step]})
            if mesh.rank == 0 and folder.standing is not None:
                answers.append(folder.standing.answer)

        result = optimizer.optimize(problem, callback=callback, progress=False)
        same(result, mesh, expected)
    if comm.rank == 0:
        # It begins with the mesh of the list for its ranks.
        first = {3: "data=3", 4: "tensor=2,pipeline=2"}.get(comm.size, f"data={comm.size // 4},tensor=2,pipeline=2")
        assert [noted[step] for step in (1, 2, 3, 4, 7)] == [first, first, "tensor=2", "tensor=2", "data=3"]
        assert noted[6] == "data=1"
        given = {answer.id: (answer.before, answer.after, answer.mesh) for answer in answers if answer is not None}
        assert given["2"] == (comm.size, 2, "tensor=2")
        assert given["4"] == (2, 1, "data=1")


def test_processes_beyond_the_best_mesh_are_spares(comm, expected):
    """Until another number of ranks has a mesh for them."""
    noted = {}
    with Mesh(comm) as mesh:

        def choice(ranks):
            return {} if ranks == comm.size else {"data": max(1, ranks - 1)}

        optimizer = ElasticOptimizer(inner(ZeRO1Optimizer, mesh), layouts=choice)

        def callback(state):
            noted[state.step] = mesh.size, optimizer.current_workers
            if state.step == 3:
                optimizer.resize(max(1, comm.size - 1))

        result = optimizer.optimize(problem, callback=callback, progress=False)
        same(result, mesh, expected)
    few = max(1, comm.size - 2) if comm.size > 1 else 1
    if comm.rank == 0:
        assert [noted[step] for step in (3, 4, STEPS)] == [(comm.size,) * 2, (few,) * 2, (few,) * 2]
    assert (4 in noted) == (comm.rank < few)


def test_the_best_by_an_estimate(comm, expected):
    """The fastest of those that fit into memory; where none of all ranks does, none of fewer may."""
    noted = {}
    with Mesh(comm) as mesh:
        auto = AutoLayouts(memory_limit=1e9)
        optimizer = ElasticOptimizer(inner(DDPOptimizer, mesh), layouts=auto if comm.size % 2 else "auto")

        def callback(state):
            noted[state.step] = MeshSizes(**mesh.shape)

        result = optimizer.optimize(problem, callback=callback, progress=False)
        found = whole(result, mesh.world)
        for name, values in expected[0].items():
            np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-12)
    assert len(set(noted.values())) == 1
    assert noted[1].ranks <= comm.size


def test_a_model_that_does_not_fit(comm):
    with Mesh(comm) as mesh:
        optimizer = ElasticOptimizer(inner(DDPOptimizer, mesh), layouts=AutoLayouts(memory_limit=1000))
        with pytest.raises(RunLost, match=f"no layout fits {comm.size} ranks"):
            optimizer.optimize(problem, progress=False)


def test_the_model_of_an_earlier_mesh_leaves_memory(comm):
    if comm.size == 1:
        pytest.skip("one rank has one mesh")
    made = []

    def build(mesh):
        found = problem(mesh, 4)
        made.append(weakref.ref(found.start))
        return found

    with Mesh(comm) as mesh:
        optimizer = ElasticOptimizer(inner(ZeRO1Optimizer, mesh), layouts=ANY)
        alive = {}

        def callback(state):
            gc.collect()
            alive[state.step] = [each() is not None for each in made]
            if state.step == 2:
                optimizer.resize(mesh={"tensor": 2})

        optimizer.optimize(build, callback=callback, progress=False)
    if comm.rank < 2:
        assert alive == {1: [True], 2: [True], 3: [False, True], 4: [False, True]}


def test_checkpoints_go_on_in_another_mesh(comm, expected, tmp_path):
    folder = comm.bcast(str(tmp_path))
    for last, sizes in ((5, {2: {"tensor": 2}, 4: {"data": comm.size}}), (STEPS, {6: {"pipeline": 2}})):
        with Mesh(comm) as mesh:
            optimizer = ElasticOptimizer(inner(ZeRO1Optimizer, mesh), layouts=ANY)

            def callback(state, optimizer=optimizer, sizes=sizes):
                if state.step in sizes and ranks_of(sizes[state.step]) <= comm.size:
                    optimizer.resize(mesh=sizes[state.step])

            with Checkpoints(folder, mesh, every=2) as checkpoints:
                result = optimizer.optimize(
                    lambda mesh, last=last: problem(mesh, last),
                    callback=callback,
                    progress=False,
                    checkpoints=checkpoints,
                    resume=True,
                )
            found = result.resumed_steps
            if last == STEPS:
                same(result, mesh, expected)
    assert found == 5


def test_another_call_goes_on(comm, expected):
    with Mesh(comm) as mesh:
        optimizer = ElasticOptimizer(inner(DDPOptimizer, mesh), layouts=[{"tensor": 2}, {}])
        optimizer.optimize(lambda mesh: problem(mesh, 3), progress=False)
        result = optimizer.optimize(lambda mesh: problem(mesh, 5), progress=False)
        found = whole(result, mesh.world)
    for name, values in expected[0].items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-12)


def test_what_is_refused(comm):
    with Mesh(comm) as mesh:
        made = inner(DDPOptimizer, mesh, reproducible=True)
        with pytest.raises(ValueError, match="scaling='linear' follows the data ranks"):
            ElasticOptimizer(made, layouts=[{}], scaling="linear")
        fixed = ElasticOptimizer(made)
        with pytest.raises(ValueError, match=r"resize\(mesh=...\) is for runs that may change their mesh"):
            fixed.resize(mesh={"data": 1})
        with pytest.raises(TypeError, match="but the mesh stays as it is"):
            fixed.optimize(problem, progress=False)
        elastic = ElasticOptimizer(made, layouts=[{"tensor": 2}, {}])
        with pytest.raises(TypeError, match="give optimize a function that makes the model for a mesh"):
            elastic.optimize(problem(mesh), progress=False)
        with pytest.raises(ValueError, match="layouts has tensor=2, but with reproducible=True a model without shards"):
            elastic.optimize(problem, progress=False)
        three = ElasticOptimizer(made, layouts=[{"tensor": 3}, {}])
        with pytest.raises(ValueError, match="layouts has tensor=3, but .* cannot be split over 3"):
            three.optimize(lambda mesh: problem(mesh, shards=2), progress=False)
        with pytest.raises(TypeError, match="a number of workers, or mesh=sizes"):
            elastic.resize()
        with pytest.raises(ValueError, match="data=2,pipeline=2 is none of the layouts of the run"):
            elastic.resize(mesh={"data": 2, "pipeline": 2})


@pytest.fixture(scope="module")
def expected_bits():
    """The run of one rank in float32, whose sums have one order."""
    with Mesh(MPI.COMM_SELF) as mesh:
        made = inner(DDPOptimizer, mesh, reproducible=True)
        result = made.optimize(problem(mesh, dtype=np.float32, shards=2), progress=False)
        return digest(whole(result, mesh.world)), result.loss_history.tobytes()


def digest(found):
    return {name: values.astype(np.float32).tobytes() for name, values in found.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_meshes_are_no_part_of_the_result(comm, strategy, expected_bits):
    wanted = {step: sizes for step, sizes in SEQUENCE.items() if ranks_of(sizes) <= comm.size}
    with Mesh(comm) as mesh:
        optimizer = ElasticOptimizer(inner(strategy, mesh, reproducible=True), layouts=ANY)

        def callback(state):
            if state.step in wanted:
                optimizer.resize(mesh=wanted[state.step])

        result = optimizer.optimize(
            lambda mesh: problem(mesh, dtype=np.float32, shards=2), callback=callback, progress=False
        )
        assert (digest(whole(result, mesh.world)), result.loss_history.tobytes()) == expected_bits
