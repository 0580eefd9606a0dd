"""Elastic runs of PyTorch modules on tensor ranks, by a plan, and on pipeline ranks; their meshes change."""

from __future__ import annotations

import functools
import gc
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard import (
    DDPOptimizer,
    ElasticOptimizer,
    Evaluation,
    Mesh,
    ShardingConfiguration,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from mpishard.checkpoint import Checkpoints

torch = pytest.importorskip("torch")
import torch_plans  # noqa: E402
from torch_plans import PLAN, RULE, Layer, Transformer, tensor_size, words_of  # noqa: E402
from torch_stages import made as made_of_stages  # noqa: E402

STEPS = 6
WORDS = torch.cat([words_of(step) for step in range(6)])
ANY = [{"tensor": 3}, {"tensor": 2}, {}]
STAGES = [{"pipeline": 3}, {"pipeline": 2}, {}]
fresh = functools.partial(torch_plans.fresh, layers=3)
needs_ranks = pytest.mark.mpi(min_size=2)


def losses(module, samples):
    logits, targets = module(WORDS[samples, :-1]), WORDS[samples, 1:]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)


def problem(mesh, strategy=DDPOptimizer, module=None, plan=PLAN, steps=STEPS, **options):
    units = {"mesh": mesh, "shard_units": Layer} if strategy is ZeRO3Optimizer else {"mesh": mesh}
    module = fresh(seed=mesh.rank) if module is None else module
    return mpishard.torch.problem(
        module, losses, len(WORDS), 8, micro_batch_size=3, steps=steps, **units, plan=plan, **options
    )


def other():
    """A module with the same frozen values, and other trained ones."""
    module = fresh()
    for p in filter(lambda p: p.requires_grad, module.parameters()):
        torch.nn.init.constant_(p, 3.0)
    return module


def inner(strategy, mesh, **options):
    return strategy(RULE, ShardingConfiguration(mesh, max_gradient_norm=0.5, **options))


@functools.cache
def alone():
    """The losses and parameters of one process."""
    module = fresh()
    with Mesh(MPI.COMM_SELF) as mesh:
        task = mpishard.torch.problem(module, losses, len(WORDS), 8, micro_batch_size=3, steps=STEPS)
        result = inner(DDPOptimizer, mesh).optimize(task, progress=False)
    return result.loss_history, [p.detach() for p in module.parameters()]


def assert_same(result, module):
    wanted, values = alone()
    np.testing.assert_allclose(result.loss_history, wanted, rtol=0, atol=1e-12)
    with mpishard.torch.summon_full_parameters(module):
        for p, other in zip(module.parameters(), values, strict=True):
            torch.testing.assert_close(p.detach(), other, rtol=0, atol=1e-12)


@needs_ranks
@pytest.mark.parametrize(
    ("axis", "strategy"),
    [
        ("tensor", ZeRO1Optimizer),
        pytest.param("tensor", DDPOptimizer, marks=pytest.mark.full),
        ("tensor", ZeRO3Optimizer),
        ("pipeline", ZeRO2Optimizer),
        pytest.param("pipeline", ZeRO1Optimizer, marks=pytest.mark.full),
    ],
)
def test_meshes_change_while_a_run_goes(comm, axis, strategy):
    """Each mesh has another module, and those of the meshes before leave memory.

    On two pipelines one has no samples in a micro-batch.
    """
    made, shapes = [], []
    wanted = {1: {"data": comm.size}, 3: {axis: 2}, 4: {axis: 2, "data": comm.size // 2}}

    def build(mesh):
        module = other() if made else fresh()
        made.append(weakref.ref(module))
        return problem(mesh, strategy, module)

    with Mesh(comm) as mesh:
        optimizer = ElasticOptimizer(inner(strategy, mesh), layouts=ANY if axis == "tensor" else STAGES)

        def callback(state):
            shapes.append((mesh.data.size, mesh.shape[axis]))
            if state.step in wanted:
                optimizer.resize(mesh=wanted[state.step])

        result = optimizer.optimize(build, callback=callback, progress=False)
        assert_same(result, made[-1]())
        if comm.rank == 0:
            assert shapes[1:] == [(comm.size, 1)] * 2 + [(1, 2), (comm.size // 2, 2), (comm.size // 2, 2)]
            assert (shapes[0][1] > 1) == (comm.size % 3 == 0 or comm.size % 2 == 0)
        gc.collect()
        assert not any(module() for module in made[:-2])  # the next step frees the last but one


@needs_ranks
def test_batch_norms_over_ranks_go_with_the_ranks(comm):
    x = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def trained(mesh, sizes):
        torch.manual_seed(1)
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)).double()
        module = mpishard.torch.convert_sync_batchnorm(module, mesh)
        task = mpishard.torch.problem(
            module, lambda module, samples: (module(x[samples]) - x[samples]).square().mean(1), 24, 24, steps=STEPS
        )
        optimizer = ElasticOptimizer(DDPOptimizer(RULE, mesh))

        def callback(state):
            if state.step in sizes:
                optimizer.resize(sizes[state.step])

        return optimizer.optimize(task, callback=callback, progress=False).loss_history

    with Mesh(MPI.COMM_SELF) as one:
        wanted = trained(one, {})
    with Mesh(comm) as mesh:
        found = trained(mesh, {1: comm.size - 1, 3: comm.size, 4: 1})
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_workers_of_two_ranks_leave_and_come_back(comm, axis):
    if comm.size % 2:
        pytest.skip("no whole workers on so many ranks")
    module = fresh()
    with Mesh(comm, **{axis: 2}) as mesh:
        most = mesh.data.size
        optimizer = ElasticOptimizer(inner(ZeRO1Optimizer, mesh), max_workers=most)
        sizes = {1: most - 1, 3: most}
        result = optimizer.optimize(
            problem(mesh, module=module),
            callback=lambda state: optimizer.resize(sizes[state.step]) if state.step in sizes else None,
            progress=False,
        )
        assert_same(result, module)


@needs_ranks
def test_a_checkpoint_goes_on_with_other_tensor_and_pipeline_ranks(comm, folder):
    """And, between them, on data ranks alone without the plan."""
    size = tensor_size(comm)
    for sizes, steps in (({"tensor": size}, 1), ({}, 3), ({"pipeline": size}, 4), ({"tensor": size}, STEPS)):
        module = other() if steps > 1 else fresh()
        with Mesh(comm, **sizes) as mesh, Checkpoints(folder, mesh, every=2) as checkpoints:
            result = inner(DDPOptimizer, mesh).optimize(
                problem(mesh, module=module, steps=steps, plan=PLAN if "tensor" in sizes else None),
                checkpoints=checkpoints,
                resume=True,
                progress=False,
            )
            if steps == STEPS:
                assert_same(result, module)


@needs_ranks
def test_a_plan_that_does_not_fit_is_found_in_the_first_step(comm):
    plan = {name: style for name, style in PLAN.items() if "norm" not in name}
    with Mesh(comm, tensor=tensor_size(comm)) as mesh:
        with pytest.raises(ValueError, match="layers.0.norm.* differ"):
            inner(DDPOptimizer, mesh).optimize(problem(mesh, plan=plan), progress=False)


def of_streams(mesh, fails=False, **options):
    """A problem, and an evaluation, of a module whose layers count their calls."""
    module = made_of_stages("streams")

    def losses_of(module, samples):
        if fails and mesh.rank == mesh.size - 1 and module.training:
            raise ValueError(f"sample {samples[0]}")
        return losses(module, samples)

    def evaluate(parameters, samples):
        module.eval()
        with torch.no_grad():
            found = losses_of(module, samples).sum()
        module.train()
        return found

    given = mpishard.torch.problem(module, losses_of, len(WORDS), 8, steps=2, mesh=mesh, **options)
    return module, given, Evaluation(evaluate, 5, every=1)


@needs_ranks
def test_a_run_on_stages_is_evaluated_and_has_their_buffers_on_all_ranks(comm):
    found = []
    with Mesh(MPI.COMM_SELF) as alone, Mesh(comm, pipeline=tensor_size(comm)) as mesh:
        for each in (alone, mesh):
            module, given, evaluation = of_streams(each, microbatches=2)
            found.append(inner(ZeRO1Optimizer, each).optimize(given, evaluate=evaluation, progress=False))
        calls = torch.stack([layer.calls for layer in module.layers]).tolist()
        assert comm.allgather(calls) == [[4] * len(calls)] * comm.size
        _, given, _ = of_streams(mesh, fails=True)
        with pytest.raises(ValueError, match="sample"):
            inner(ZeRO1Optimizer, mesh).optimize(given, progress=False)
    for one, other in zip(*((each.loss_history, each.validation_losses) for each in found), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@needs_ranks
def test_meshes_that_are_refused(comm):
    def refuses(message, build=problem, layouts=ANY, strategy=DDPOptimizer, **options):
        with Mesh(comm) as mesh:
            optimizer = ElasticOptimizer(inner(strategy, mesh, **options), layouts=layouts)
            with pytest.raises(ValueError, match=message):
                optimizer.optimize(build, progress=False)

    def of_units(mesh):
        return problem(mesh, ZeRO3Optimizer)

    refuses("pipeline=4.*3 layers.* to 4 stages", layouts=[{"pipeline": 4}, {}])
    refuses("shard_units with pipeline=2", of_units, STAGES[1:], ZeRO3Optimizer)
    refuses("reproducible=True with pipeline=2", layouts=STAGES[1:], reproducible=True)
    refuses("tensor=4.*3 heads", layouts=[{"tensor": 4}, {"tensor": 2}, {}])
    refuses("tensor=3.*keeps its tensor size", reproducible=True)
    refuses("not given the mesh", lambda mesh: mpishard.torch.problem(fresh(), losses, 48, 8))
    module = fresh()
    refuses("make a module for each mesh", lambda mesh: problem(mesh, module=module))


@needs_ranks
def test_what_cuts_a_problem_is_checked(comm):
    module = fresh()
    with Mesh(comm, tensor=tensor_size(comm)) as mesh:
        problem(mesh, module=module)
        problem(mesh, module=module)
        with pytest.raises(ValueError, match="by plan=.*another problem|another problem.*by plan="):
            problem(mesh, module=module, plan={"head": "colwise_rep"})
        with pytest.raises(ValueError, match="trains this module"):
            mpishard.torch.problem(module, losses, 48, 8)
        with pytest.raises(ValueError, match=r"'sequence'.*mpishard\.torch\.as_distributed"):
            problem(mesh, module=fresh(), plan="sequence")
        plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
        with pytest.raises(ValueError, match="plan is"):
            problem(mesh, module=fresh(kind=Transformer), plan=plan if mesh.rank else PLAN)
    with Mesh(comm, pipeline=comm.size) as mesh:
        with pytest.raises(ValueError, match=f"shard_units with pipeline={comm.size}"):
            problem(mesh, ZeRO3Optimizer)
        with pytest.raises(ValueError, match="stages"):
            problem(mesh, stages=None if mesh.rank else ["layers.1"] * (comm.size - 1))
        with pytest.raises(ValueError, match=f"reproducible=True with pipeline={comm.size}"):
            inner(DDPOptimizer, mesh, reproducible=True).optimize(problem(mesh, module=fresh(layers=max(4, comm.size))))
