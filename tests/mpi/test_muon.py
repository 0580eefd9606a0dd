"""Muon, whose matrices are whole where a step needs them: Local SGD, modules of PyTorch, files (see test_hybrid)."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI
from steps import STRATEGIES

import mpishard
from mpishard import (
    AdamW,
    DDPOptimizer,
    FlatParameters,
    LocalSGDOptimizer,
    Muon,
    OptimizationProblem,
    ParameterSpec,
    ShardingConfiguration,
    ZeRO1Optimizer,
    nn,
)

SPECS = [ParameterSpec("a", (5, 5)), ParameterSpec("b", (4,)), ParameterSpec("c", (6, 2)), ParameterSpec("d", (2, 2))]
RULE = Muon(lr=0.1, matrices=["a", "c"], rest=AdamW(lr=0.1))


def parameters():
    return FlatParameters.over(np.linspace(-1, 1, sum(spec.size for spec in SPECS)), SPECS)


def gradients(step):
    return np.random.default_rng(step).integers(-8, 9, sum(spec.size for spec in SPECS)).astype(float)


def alone(steps):
    """Each tensor by itself."""
    values, first = parameters().flat, 0
    for spec, rule in zip(SPECS, RULE.by_shape({spec.name: spec.shape for spec in SPECS}), strict=True):
        own = slice(first, first := first + spec.size)
        slots = [np.zeros(spec.size) for _ in rule.slots]
        shape = spec.shape if isinstance(rule, Muon) else (spec.size,)
        for step in range(steps):
            rule.update(values[own].reshape(shape), gradients(step)[own].reshape(shape), slots, step + 1)
    return values


def trained(mesh, strategy):
    """A transformer's parameters after some steps; any numbers, in sums of a fixed order."""
    tokens = np.random.default_rng(1).integers(0, 23, (20, 9))
    model = nn.GPT(23, 8, 16, 2, 2, dtype=np.float32, seed=3, mesh=mesh, tied=True)
    problem = OptimizationProblem.for_model(
        model,
        lambda samples: (tokens[samples, :-1], tokens[samples, 1:]),
        samples=20, batch_size=12, tokens_per_sample=8, micro_batch_size=3, steps=4,
    )  # fmt: skip
    rule = Muon(lr=0.01, matrices="blocks.*", rest=AdamW(lr=0.01), adjust_lr_fn="match_rms_adamw", ema_decay=0.5)
    config = ShardingConfiguration(mesh, reproducible=True, max_gradient_norm=0.5, minimum_parameter_group_size=2000)
    return strategy(rule, config).optimize(problem, progress=False).parameters.gather().copy()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bits_of_one_rank(mesh, strategy):
    with mpishard.Mesh(MPI.COMM_SELF) as single:
        expected = trained(single, DDPOptimizer)
    assert np.array_equal(trained(mesh, strategy), expected)


def test_workers_of_local_sgd_have_whole_matrices(mesh, same_on_all):
    """All have one gradient, so that their average is the step of each."""
    optimizer, own = LocalSGDOptimizer(RULE, mesh, sync_every=2), parameters()
    for step in range(4):
        optimizer.step(own, gradients(step), count=mesh.size)
    assert same_on_all(own.flat)
    np.testing.assert_allclose(own.flat, alone(4), rtol=1e-12)
    with pytest.raises(ValueError, match="the outer rule Muon needs whole tensors or their norms"):
        LocalSGDOptimizer(AdamW(), mesh, outer=RULE)


def test_workers_that_have_parts_of_matrices_are_refused_on_all_ranks(mesh):
    if mesh.size == 1:
        pytest.skip("needs two ranks, which share a model")
    with mpishard.Mesh(mesh.world.comm, tensor=mesh.size) as divided:
        specs = [ParameterSpec("a", (6, 5), tensor_dim=0)]
        own = FlatParameters(specs, np.float64, place=divided.place)
        with pytest.raises(ValueError, match=r"Muon needs whole matrices.*make it with tensor=1 and pipeline=1"):
            LocalSGDOptimizer(Muon(matrices="a"), divided).bind(own)


def test_the_ledger_counts_what_travels(mesh):
    """Under ZeRO-1 the parts of matrices that others have, to their owners and back; under DDP owners have all."""
    size = sum(spec.size for spec in SPECS if spec.name in RULE.matrices)
    sent = {}
    for kind in (DDPOptimizer, ZeRO1Optimizer):
        optimizer, own, before = kind(RULE, mesh), parameters(), mesh.ledger.sent("world", "all_to_all", "matrices")
        optimizer.step(own, gradients(0) * (mesh.rank == 0), count=1)
        np.testing.assert_array_equal(own.flat, alone(1))
        found = mesh.ledger.sent("world", "all_to_all", "matrices") - before
        sent[kind] = mesh.world.all_reduce(np.array([found]))[0]
    assert sent[DDPOptimizer] == 8 * size * (mesh.size - 1)
    assert sent[ZeRO1Optimizer] <= 2 * 8 * size
    assert (sent[ZeRO1Optimizer] > 0) == (mesh.size > 1)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_modules_take_the_steps_of_pytorch(mesh, folder, monkeypatch, zero):
    """With schedulers, and continued from a file on one rank: as torch.optim.Muon beside AdamW, in float64."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    from torch_models import images, loss_of, samples_of, smooth

    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())  # its products, as ours
    x, y = images()[0].double(), images()[1]

    def take_steps(optimizers, module, own, steps):
        for step in steps:
            for each in optimizers:
                each.zero_grad()
            loss_of(module, x, y, own(step)).backward()
            for each in optimizers:
                each.step()
                for group in each.param_groups:
                    group["lr"] *= 0.75

    def order(step):
        return np.concatenate(mesh.world.allgather_object(samples_of(mesh, step)))

    theirs = smooth().double()
    matrix, *others = [theirs[1].weight, theirs[1].bias, theirs[3].weight, theirs[3].bias]
    pair = [torch.optim.Muon([matrix], lr=0.1), torch.optim.AdamW(others, lr=0.02, weight_decay=0.1)]
    take_steps(pair, theirs, order, range(6))

    rule = Muon(lr=0.1, matrices="1.*", rest=AdamW(lr=0.02, weight_decay=0.1))
    ours = smooth().double()
    optimizer = mpishard.torch.as_distributed(ours, mesh, rule, zero=zero)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02]
    take_steps([optimizer], ours, lambda step: samples_of(mesh, step), range(3))
    optimizer.save_checkpoint(folder)
    again, orders = smooth().double(), {step: order(step) for step in range(3, 6)}
    take_steps([optimizer], ours, lambda step: samples_of(mesh, step), range(3, 6))
    with mpishard.Mesh(MPI.COMM_SELF) as single:
        resumed = mpishard.torch.as_distributed(again, single, rule)
        resumed.load_checkpoint(folder)
        assert [group["lr"] for group in resumed.param_groups] == [0.1 * 0.75**3, 0.02 * 0.75**3]
        take_steps([resumed], again, orders.get, range(3, 6))
    for p, q, r in zip(theirs.parameters(), ours.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-8, atol=1e-11)
        torch.testing.assert_close(r, p, rtol=1e-8, atol=1e-11)
    with pytest.raises(ValueError, match=r"param_groups\[0\]: Muon: momentum=2.0 must be"):
        optimizer.param_groups[0]["momentum"] = 2.0
        loss_of(ours, x, y, samples_of(mesh, 0)).backward()
        optimizer.step()
    mesh.world.barrier()
