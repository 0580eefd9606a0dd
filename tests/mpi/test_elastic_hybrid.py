"""Elastic runs of meshes with tensor and pipeline ranks, whose sizes change while they run."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import weakref

import numpy as np
import pytest
from mpi4py import MPI
from steps import STRATEGIES

import mpishard
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
from mpishard.elastic.membership import Membership
from mpishard.elastic.mesh_choice import MeshSizes
from mpishard.launch.detection import CELL_OPTION
from mpishard.launch.job_notes import RunLost
from mpishard.layout.tensors import ModelParallelRank

pytestmark = pytest.mark.pairs(1)

# Whole replicas leave and come back, and change no bit.

TOKENS = np.random.default_rng(1).integers(0, 11, (45, 9))
STEPS = 8
SHAPES = [{"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}]


def of_workers(test):
    """Marks a test of workers of several processes."""
    return pytest.mark.mpi(min_size=3)(test)


def cell_of(shape):
    """Processes of a worker."""
    return shape.get("tensor", 1) * shape.get("pipeline", 1)


@pytest.fixture(
    scope="module", params=SHAPES, ids=lambda shape: "x".join(f"{name}{size}" for name, size in shape.items())
)
def shape(request, comm):
    """Of the meshes that have at least two workers on these ranks."""
    if comm.size % cell_of(request.param) or comm.size < 2 * cell_of(request.param):
        pytest.skip("no two whole workers on so many ranks")
    return request.param


def make_model(mesh, dtype=np.float32, **options):
    options = {"tied": mesh.pipeline.size > 1, "microbatches": 3 if mesh.pipeline.size > 1 else 1} | options
    return nn.GPT(
        vocabulary_size=11, context_length=8, width=16, layers=2, heads=2, dtype=dtype, seed=3, mesh=mesh, **options
    )


def problem_of(model, **options):
    options = {"samples": 45, "batch_size": 16, "micro_batch_size": 4, "steps": STEPS} | options
    return OptimizationProblem.for_model(
        model, lambda samples: (TOKENS[samples, :-1], TOKENS[samples, 1:]), tokens_per_sample=8, **options
    )


def resizing(optimizer, sizes, noted=None, ask="workers"):
    """A callback that asks for these numbers of workers, or meshes, after these steps; it notes the workers of each."""

    def callback(state):
        if noted is not None:
            noted[state.step] = optimizer.current_workers
        if state.step in sizes:
            optimizer.resize(**{ask: sizes[state.step]})

    return callback


def inner(strategy, mesh, **options):
    options = {"max_gradient_norm": 0.5, "minimum_parameter_group_size": 500, "reproducible": True} | options
    return strategy(AdamW(lr=0.01), ShardingConfiguration(mesh, **options))


def bits(model, mesh, result):
    parameters = mpishard.as_distributed(model, mesh).gather_full_parameters()
    return parameters.tobytes(), result.loss_history.tobytes(), result.samples, result.stop_reason


@pytest.fixture(scope="module")
def expected(shape, comm):
    """The run of one worker that is not elastic."""
    part = comm.Split(comm.rank // cell_of(shape), comm.rank)
    with Mesh(part, **shape) as mesh:
        model = make_model(mesh)
        found = bits(model, mesh, inner(DDPOptimizer, mesh).optimize(problem_of(model), progress=False))
    part.Free()
    return found


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return request.param


@of_workers
def test_resizes_change_no_bit(comm, shape, strategy, expected, same_on_all):
    noted = {}
    with Mesh(comm, **shape) as mesh:
        most, place, data_rank = mesh.data.size, mesh.place, mesh.data.rank
        sizes = {1: 1, 2: most, 4: max(1, most - 1), 5: most, 6: 1}
        model = make_model(mesh)
        optimizer = ElasticOptimizer(inner(strategy, mesh))

        callback = resizing(optimizer, sizes, noted)
        found = bits(model, mesh, optimizer.optimize(problem_of(model), callback=callback, progress=False))
        assert (mesh.data.size, mesh.place, mesh.data.rank) == (most, place, data_rank)
    assert found == expected
    assert same_on_all(found[1:])
    now, wanted = most, {}
    for step in range(1, STEPS + 1):
        if data_rank < now:
            wanted[step] = now
        now = sizes.get(step, now)
    assert noted == wanted


@of_workers
@pytest.mark.parametrize("strategy", STRATEGIES[2:], ids=lambda strategy: strategy.__name__)
def test_sums_in_another_order(comm, strategy):
    """Without `reproducible` on a pipeline: not the same bits, but the same numbers."""
    found = []
    if comm.size % 2:
        pytest.skip("no two whole workers on so many ranks")
    for sizes in ({}, {1: 1, 3: 2, 5: 1}):
        with Mesh(comm, pipeline=2) as mesh:
            model = make_model(mesh, np.float64)
            optimizer = ElasticOptimizer(inner(strategy, mesh, reproducible=False), max_workers=2)
            optimizer.optimize(problem_of(model), callback=resizing(optimizer, sizes), progress=False)
            found.append(mpishard.as_distributed(model, mesh).gather_full_parameters())
    np.testing.assert_allclose(*found, rtol=1e-12, atol=1e-12)


@of_workers
def test_processes_beyond_the_limit_are_spares_until_the_end(comm, shape, expected):
    noted = {}
    with Mesh(comm, **shape) as mesh:
        data_rank = mesh.data.rank
        model = make_model(mesh)
        optimizer = ElasticOptimizer(inner(ZeRO1Optimizer, mesh), max_workers=1)
        assert (optimizer.can_scale_up, optimizer.can_scale_down) == (False, True)
        result = optimizer.optimize(problem_of(model), callback=resizing(optimizer, {}, noted), progress=False)
        assert bits(model, mesh, result) == expected
    assert noted == (dict.fromkeys(range(1, STEPS + 1), 1) if data_rank == 0 else {})


@of_workers
@pytest.mark.parametrize("with_spares", [False, True], ids=["its worker goes", "a spare takes its place"])
def test_a_process_that_is_asked_to_leaves(comm, shape, expected, at_once, with_spares):
    """The last process of the first worker: another of its place moves up, and those without partners wait."""
    noted = {}
    with Mesh(comm, **shape) as mesh:
        most, data_rank = mesh.data.size, mesh.data.rank
        workers = most - with_spares
        is_asked = data_rank == 0 and mesh.place.tensor_rank == mesh.tensor.size - 1
        is_asked = is_asked and mesh.place.pipeline_rank == mesh.pipeline.size - 1
        in_its_place = mesh.place == comm.bcast(mesh.place, root=comm.allgather(is_asked).index(True))
        model = make_model(mesh)
        optimizer = ElasticOptimizer(inner(ZeRO1Optimizer, mesh), max_workers=workers)

        def callback(state):
            noted[state.step] = optimizer.current_workers, mesh.data.rank
            if is_asked and state.step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)

        result = optimizer.optimize(problem_of(model), callback=callback, progress=False)
        assert bits(model, mesh, result) == expected
    after = workers if with_spares else most - 1
    wanted = {step: (workers, data_rank) for step in range(1, 4) if data_rank < workers}
    # Who is behind it in its place moves up by one.
    now = data_rank - in_its_place
    if not is_asked and now < after:
        wanted |= dict.fromkeys(range(4, STEPS + 1), (after, now))
    assert noted == wanted


@of_workers
def test_checkpoints_across_resizes(comm, shape, expected, folder):
    for last, saves, sizes in ((5, True, {1: 1, 3: 2}), (STEPS, False, {6: 1})):
        with Mesh(comm, **shape) as mesh, Checkpoints(folder, mesh, every=2, asynchronous=saves) as checkpoints:
            model = make_model(mesh)
            optimizer = ElasticOptimizer(inner(DDPOptimizer if saves else ZeRO1Optimizer, mesh))
            options = {"progress": False, "checkpoints": checkpoints, "resume": True}
            result = optimizer.optimize(problem_of(model, steps=last), callback=resizing(optimizer, sizes), **options)
            found = bits(model, mesh, result)
    assert result.resumed_steps == 5
    assert found == expected


@of_workers
def test_meshes_that_are_refused(comm, shape):
    with Mesh(comm) as base:
        for mesh in (base.reshaped(**shape), base):
            with pytest.raises(ValueError, match="one of another shape"):
                ElasticOptimizer(AdamW(lr=0.01), mesh)
    with Mesh(comm, **shape) as mesh, pytest.raises(ValueError, match=f"{comm.size} processes"):
        ElasticOptimizer(AdamW(lr=0.01), mesh, min_workers=mesh.data.size + 1)


@of_workers
def test_spawned_processes_have_the_sizes_of_the_run(comm, shape, monkeypatch):
    monkeypatch.setitem(sys._xoptions, CELL_OPTION, f"{shape.get('tensor', 1)}x{shape.get('pipeline', 1)}")
    with Mesh(data=comm.size) as mesh:
        assert mesh.shape == {"pipeline": 1, "tensor": 1} | shape | {"data": comm.size // cell_of(shape)}
    with Mesh(MPI.COMM_SELF) as mesh:
        assert mesh.size == 1


@of_workers
def test_a_spare_takes_over_from_one_of_its_place(comm):
    def split_to(workers, leaves=False, ends=False):
        part = membership.split(workers, leaves, ends)
        return next(each for each in comm.allgather(None if part is None else part.allgather(comm.rank)) if each)

    def counts():
        roles = membership.roles
        return roles.able, roles.most, membership.identity

    tensor, whole = comm.rank % 2, comm.size // 2
    membership = Membership(comm, ModelParallelRank(tensor_rank=tensor, tensor_size=2), whole)
    assert membership.roles.workers == whole and counts() == (whole, whole, comm.rank)
    assert split_to(whole) == list(range(2 * whole))
    assert split_to(whole, leaves=comm.rank == 0) == {3: [2, 1], 4: [2, 1], 8: [2, 1, 4, 3, 6, 5]}[comm.size]
    assert counts() == ((comm.size - 1) // 2, whole, comm.rank)
    # Whoever is left over then is the one that was to leave.
    assert split_to(whole, ends=comm.rank == 1) == {3: [2, 1], 4: [2, 1, 0, 3], 8: [2, 1, 4, 3, 6, 5, 0, 7]}[comm.size]
    assert membership.works == (comm.rank > 0 or comm.size > 3)
    membership.axis.free()


@of_workers
def test_the_order_of_a_mesh_has_stages_apart(comm):
    half = (comm.size + 1) // 2
    stage = comm.rank // half
    membership = Membership(comm, ModelParallelRank(pipeline_rank=stage, pipeline_size=2), comm.size // 2)
    part = membership.split(comm.size // 2, comm.rank == 0, False)
    found = None if part is None else part.allgather(comm.rank)
    expected = {3: [1, 2], 4: [1, 2], 8: [1, 2, 3, 4, 5, 6]}[comm.size]
    assert found == (expected if comm.rank in expected else None)
    assert list(membership.roles.identities) == expected + sorted(set(range(comm.size)) - {0, *expected}) + [0]
    membership.axis.free()


@of_workers
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_pass_that_broke_off_leaves_nothing_on_a_mesh_that_has_moved(comm, schedule):
    """Messages of the broken pass are still under way when the next one begins."""
    if comm.size % 2:
        pytest.skip("no whole workers on so many ranks")
    batch = TOKENS[:8, :-1], TOKENS[:8, 1:]
    with Mesh(comm, pipeline=2) as mesh:
        mesh.unwatch()
        model = make_model(mesh, microbatches=4, schedule=schedule, tied=False)
        whole = model.loss_and_gradient(*batch), model.parameters.gradients.flat.copy()
        for microbatch in range(3):
            model.parameters.reset_gradients()
            (chunk,), works = model.chunks, [type(model.chunks[0]).forward] * (microbatch + (mesh.pipeline.rank == 0))

            def forward(*arguments, chunk=chunk, works=works):
                if not works:
                    raise ArithmeticError("instead of the forward pass of a micro-batch")
                return works.pop()(chunk, *arguments)

            chunk.forward = forward
            with pytest.raises(ArithmeticError):
                model.loss_and_gradient(*batch)
            del chunk.forward
            memory = model.activation_bytes
            with pytest.raises(RuntimeError, match="earlier pipeline pass"):
                model.loss_and_gradient(*batch)
            mesh.rebind(comm.Dup())
            model.parameters.renew()
            assert model.loss_and_gradient(*batch) == whole[0]
            assert np.array_equal(model.parameters.gradients.flat, whole[1])
            if microbatch:
                assert model.activation_bytes == memory


# Elastic runs that change the tensor and pipeline sizes of their mesh while they go.

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
    model = nn.GPT(
        vocabulary_size=11,
        context_length=8,
        width=16,
        layers=2,
        heads=2,
        dtype=dtype,
        seed=3,
        mesh=mesh,
        tied=tied,
        microbatches=2 if many else 1,
        **options,
    )
    return problem_of(model, steps=steps)


def in_float32(mesh):
    """With shards, whose sums have one order in all meshes."""
    return problem(mesh, dtype=np.float32, shards=2)


def moving(strategy, mesh, layouts, reproducible=False, **options):
    """An elastic optimizer that takes one of these meshes."""
    return ElasticOptimizer(inner(strategy, mesh, reproducible=reproducible), layouts=layouts, **options)


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
def expected_of_layouts():
    """The run of one rank that is not elastic."""
    with Mesh(MPI.COMM_SELF) as mesh:
        result = inner(DDPOptimizer, mesh, reproducible=False).optimize(problem(mesh), progress=False)
        return whole(result, mesh.world), result.loss_history


def same(result, mesh, expected_of_layouts):
    found, (parameters, losses) = whole(result, mesh.world), expected_of_layouts
    assert sorted(found) == sorted(parameters)
    for name, values in parameters.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.loss_history, losses[-len(result.loss_history) :], rtol=1e-12)


@pytest.mark.mpi(min_size=3)
def test_a_mesh_is_asked_for_from_another_shell(comm, expected_of_layouts, folder, monkeypatch):
    """And a number of workers, which takes the first mesh of the list that has so many ranks."""
    monkeypatch.setattr(control, "_POLL_S", 0.0)
    folder, noted, answers = ControlFolder(folder), {}, []
    wanted = {2: {"workers": 2, "mesh": "tensor=2"}, 4: {"workers": 1}, 6: {"workers": 3, "mesh": "data=3"}}
    with Mesh(comm) as mesh:
        layouts = [{"tensor": 2, "pipeline": 2}, {"tensor": 2}, {}]
        optimizer = moving(DDPOptimizer, mesh, layouts, folder=folder.path.parent)

        def callback(state):
            noted[state.step] = str(MeshSizes(**mesh.shape))
            if mesh.rank == 0 and state.step in wanted:
                folder.write("request", {"id": str(state.step), **wanted[state.step]})
            if mesh.rank == 0 and folder.standing is not None:
                answers.append(folder.standing.answer)

        result = optimizer.optimize(problem, callback=callback, progress=False)
        same(result, mesh, expected_of_layouts)
    if comm.rank == 0:
        # It begins with the mesh of the list for its ranks.
        first = {3: "data=3", 4: "tensor=2,pipeline=2"}.get(comm.size, f"data={comm.size // 4},tensor=2,pipeline=2")
        assert [noted[step] for step in (1, 2, 3, 4, 7)] == [first, first, "tensor=2", "tensor=2", "data=3"]
        assert noted[6] == "data=1"
        given = {answer.id: (answer.before, answer.after, answer.mesh) for answer in answers if answer is not None}
        assert given["2"] == (comm.size, 2, "tensor=2")
        assert given["4"] == (2, 1, "data=1")


def test_processes_beyond_the_best_mesh_are_spares(comm, expected_of_layouts):
    """Until another number of ranks has a mesh for them."""
    noted = {}
    with Mesh(comm) as mesh:

        def choice(ranks):
            return {} if ranks == comm.size else {"data": max(1, ranks - 1)}

        optimizer = moving(ZeRO1Optimizer, mesh, choice)

        def callback(state):
            noted[state.step] = mesh.size, optimizer.current_workers
            if state.step == 3:
                optimizer.resize(max(1, comm.size - 1))

        result = optimizer.optimize(problem, callback=callback, progress=False)
        same(result, mesh, expected_of_layouts)
    few = max(1, comm.size - 2) if comm.size > 1 else 1
    if comm.rank == 0:
        assert [noted[step] for step in (3, 4, STEPS)] == [(comm.size,) * 2, (few,) * 2, (few,) * 2]
    assert (4 in noted) == (comm.rank < few)


def test_the_best_by_an_estimate(comm, expected_of_layouts):
    """The fastest of those that fit into memory; where none of all ranks does, none of fewer may."""
    noted = {}
    with Mesh(comm) as mesh:
        auto = AutoLayouts(memory_limit=1e9)
        optimizer = moving(DDPOptimizer, mesh, auto if comm.size % 2 else "auto")

        def callback(state):
            noted[state.step] = MeshSizes(**mesh.shape)

        same(optimizer.optimize(problem, callback=callback, progress=False), mesh, expected_of_layouts)
    assert len(set(noted.values())) == 1
    assert noted[1].ranks <= comm.size


def test_a_model_that_does_not_fit(comm):
    with Mesh(comm) as mesh:
        optimizer = moving(DDPOptimizer, mesh, AutoLayouts(memory_limit=1000))
        with pytest.raises(RunLost, match=f"no layout fits {comm.size} ranks"):
            optimizer.optimize(problem, progress=False)


@pytest.mark.mpi(min_size=2)
def test_too_few_would_be_left_for_a_mesh(comm, at_once):
    """All stop at a signal to one, and a request for so few is refused."""
    with Mesh(comm) as mesh:
        optimizer = moving(DDPOptimizer, mesh, [{"data": comm.size}])

        def callback(state):
            with pytest.raises(ValueError, match=f"no mesh of layouts .*at least {comm.size}"):
                optimizer.resize(comm.size - 1)
            if state.step == 3 and comm.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        result = optimizer.optimize(problem, callback=callback, progress=False)
    assert (result.stop_reason, result.steps) == ("signal", 3)


@pytest.mark.mpi(min_size=3)
def test_who_is_in_no_mesh_at_the_end_holds_up_nobody(comm):
    """It ends its script, and comes to no `free`."""
    if comm.size % 2 == 0:
        pytest.skip("all are in the mesh")
    mesh = Mesh(comm, timeout=1e6)
    with pytest.raises(SystemExit) if comm.rank == comm.size - 1 else contextlib.nullcontext():
        moving(DDPOptimizer, mesh, [{"tensor": 2}]).optimize(problem, progress=False)
        mesh.free()


@pytest.mark.mpi(min_size=2)
def test_the_model_of_an_earlier_mesh_leaves_memory(comm):
    made, alive = [], {}

    def build(mesh):
        found = problem(mesh, 4)
        made.append(weakref.ref(found.start))
        return found

    with Mesh(comm) as mesh:
        optimizer = moving(ZeRO1Optimizer, mesh, ANY)
        resize = resizing(optimizer, {2: {"tensor": 2}}, ask="mesh")

        def callback(state):
            gc.collect()
            alive[state.step] = [each() is not None for each in made]
            resize(state)

        optimizer.optimize(build, callback=callback, progress=False)
    if comm.rank < 2:
        assert alive == {1: [True], 2: [True], 3: [False, True], 4: [False, True]}


def test_checkpoints_go_on_in_another_mesh(comm, expected_of_layouts, folder):
    wanted = {2: {"tensor": 2}, 4: {"data": comm.size}, 6: {"pipeline": 2}}
    wanted = {step: sizes for step, sizes in wanted.items() if ranks_of(sizes) <= comm.size}
    for last in (5, STEPS):
        with Mesh(comm) as mesh, Checkpoints(folder, mesh, every=2) as checkpoints:
            optimizer = moving(ZeRO1Optimizer, mesh, ANY)
            result = optimizer.optimize(
                functools.partial(problem, steps=last),
                callback=resizing(optimizer, wanted, ask="mesh"),
                progress=False,
                checkpoints=checkpoints,
                resume=True,
            )
            if last == STEPS:
                same(result, mesh, expected_of_layouts)
    assert result.resumed_steps == 5


def test_another_call_goes_on(comm, expected_of_layouts):
    with Mesh(comm) as mesh:
        optimizer = moving(DDPOptimizer, mesh, [{"tensor": 2}, {}])
        for steps in (3, 5):
            result = optimizer.optimize(functools.partial(problem, steps=steps), progress=False)
        same(result, mesh, expected_of_layouts)


def test_what_is_refused(comm):
    with Mesh(comm) as mesh:
        made = inner(DDPOptimizer, mesh)
        with pytest.raises(ValueError, match="scaling='linear'"):
            ElasticOptimizer(made, layouts=[{}], scaling="linear")
        fixed = ElasticOptimizer(made)
        with pytest.raises(ValueError, match=r"resize\(mesh=...\)"):
            fixed.resize(mesh={"data": 1})
        with pytest.raises(TypeError, match="but the mesh stays as it is"):
            fixed.optimize(problem, progress=False)
        elastic = ElasticOptimizer(made, layouts=[{"tensor": 2}, {}])
        with pytest.raises(TypeError, match="a function that makes the model"):
            elastic.optimize(problem(mesh), progress=False)
        with pytest.raises(ValueError, match="tensor=2, .*reproducible=True"):
            elastic.optimize(problem, progress=False)
        three = ElasticOptimizer(made, layouts=[{"tensor": 3}, {}])
        with pytest.raises(ValueError, match="tensor=3, .*split over 3"):
            three.optimize(lambda mesh: problem(mesh, shards=2), progress=False)
        with pytest.raises(TypeError, match="a number of workers, or mesh=sizes"):
            elastic.resize()
        with pytest.raises(ValueError, match="data=2,pipeline=2"):
            elastic.resize(mesh={"data": 2, "pipeline": 2})


@pytest.fixture(scope="module")
def expected_bits():
    """The run of one rank in float32."""
    with Mesh(MPI.COMM_SELF) as mesh:
        result = inner(DDPOptimizer, mesh).optimize(in_float32(mesh), progress=False)
        return digest(whole(result, mesh.world)), result.loss_history.tobytes()


def digest(found):
    return {name: values.astype(np.float32).tobytes() for name, values in found.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.quick
def test_the_meshes_are_no_part_of_the_result(comm, strategy, expected_bits):
    """A run takes one mesh after the other; models that are made after the start get the values of the run."""
    wanted = {step: sizes for step, sizes in SEQUENCE.items() if ranks_of(sizes) <= comm.size}
    noted, drawn = {}, []
    with Mesh(comm) as mesh:
        optimizer = moving(strategy, mesh, ANY, reproducible=True)
        resize = resizing(optimizer, wanted, ask="mesh")

        def callback(state):
            noted[state.step] = {name: size for name, size in mesh.shape.items() if size > 1}
            resize(state)

        def build(mesh):
            made = in_float32(mesh)
            drawn.append(bool(made.start.held.any()))
            return made

        result = optimizer.optimize(build, callback=callback, progress=False)
        assert drawn[0] and not any(drawn[1:])
        assert mesh.size == comm.size
        assert (digest(whole(result, mesh.world)), result.loss_history.tobytes()) == expected_bits
    now = {"data": comm.size}
    for step in range(1, STEPS + 1):
        if comm.rank == 0:
            assert noted[step] == {name: size for name, size in now.items() if size > 1}
        assert (step in noted) == (comm.rank < ranks_of(now))
        now = wanted.get(step, now)
