"""Meshes by an estimate: those that fit into memory, and of these the fastest."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from mpishard import (
    AdamW,
    AutoLayouts,
    DDPOptimizer,
    Mesh,
    OptimizationProblem,
    ShardingConfiguration,
    ZeRO3Optimizer,
    nn,
)
from mpishard.elastic.optimizer import MeshLimits
from mpishard.estimate import TYPICAL, Workload, layouts, table


@pytest.fixture(scope="module")
def mesh():
    with Mesh(MPI.COMM_SELF) as made:
        yield made


def problem(mesh, **options):
    options = {"samples": 64, "batch_size": 32, "steps": 1} | options
    model = nn.GPT(64, 16, 32, 4, 4, mesh=mesh)
    return OptimizationProblem.for_model(model, lambda samples: (), **options)


def choice(mesh, auto, strategy=DDPOptimizer, **options):
    reproducible = options.pop("reproducible", False)
    optimizer = strategy(AdamW(), ShardingConfiguration(mesh, reproducible=reproducible))
    made = problem(mesh, **options)
    return auto.for_problem(optimizer, made, MeshLimits(optimizer, made)), made


def seen(mesh, made, ranks, stage=0):
    architecture = nn.Architecture(**made.facts["model.json"])
    candidates = layouts(ranks, architecture, zero_stages=(stage,), schedules=("1f1b",))
    return table(candidates, architecture, 32, Workload(), TYPICAL)


@pytest.mark.parametrize(("strategy", "stage"), [(DDPOptimizer, 0), (ZeRO3Optimizer, 3)])
def test_the_fastest_of_those_that_fit(mesh, strategy, stage):
    for ranks in (4, 8):
        chosen, made = choice(mesh, AutoLayouts(), strategy)
        every = seen(mesh, made, ranks, stage)
        wide = chosen(ranks)
        assert wide["data"] * wide["tensor"] * wide["pipeline"] <= ranks
        least = min(each.memory.total for each in every)
        narrow, _ = choice(mesh, AutoLayouts(memory_limit=least * 1.001), strategy)
        found = narrow(ranks)
        smallest = min(every, key=lambda each: each.memory.total).layout
        assert found == {name: getattr(smallest, name) for name in found}
        assert choice(mesh, AutoLayouts(memory_limit=1.0), strategy)[0](ranks) is None


def test_without_a_limit_that_least_of_all_exceeds_memory(mesh, monkeypatch):
    monkeypatch.setattr("mpishard.elastic.auto_layouts._memory", lambda: 1.0)
    chosen, made = choice(mesh, AutoLayouts())
    smallest = min(seen(mesh, made, 8), key=lambda each: each.memory.total)
    found = chosen(8)
    assert found == {name: getattr(smallest.layout, name) for name in found}


def test_no_mesh_that_the_run_cannot_have(mesh):
    """A batch of two samples, and a tensor size that changes the bits."""
    chosen, _ = choice(mesh, AutoLayouts(), batch_size=2, reproducible=True)
    found = chosen(8)
    assert found["tensor"] == 1
    assert found["data"] <= 2
    assert chosen(1) == {"data": 1, "tensor": 1, "pipeline": 1}


def test_a_model_of_unknown_architecture(mesh):
    optimizer = DDPOptimizer(AdamW(), mesh)
    made = OptimizationProblem(lambda *_: 0.0, nn.GPT(8, 4, 8, 1, 2, mesh=mesh).parameters, 8, 8, steps=1)
    with pytest.raises(ValueError, match="layouts='auto' estimates meshes of an nn.GPT"):
        AutoLayouts().for_problem(optimizer, made, lambda sizes: "")
