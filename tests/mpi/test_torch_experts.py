"""Experts that tensor ranks have dealt out, whose tokens travel, beside all of them in one process."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import variants
from mpi4py import MPI

import mpishard
from mpishard import Mesh, ShardingConfiguration
from mpishard.layout.boxes import split

torch = pytest.importorskip("torch")
from torch_architectures import ARCHITECTURES  # noqa: E402
from torch_models import assert_same_parameters  # noqa: E402
from torch_plans import RULE, adamw, fresh, words_of  # noqa: E402

from mpishard.torch.experts import dealt  # noqa: E402
from mpishard.torch.tensor_ops import sent  # noqa: E402

needs_ranks = pytest.mark.mpi(min_size=2)


@pytest.fixture
def tensor_mesh(comm):
    """Two tensor ranks where they divide the ranks, else all; copies on ranks are compared after every step."""
    with Mesh(comm, tensor=2 if comm.size % 2 == 0 else comm.size, debug=True) as mesh:
        yield mesh


def made(name="Mixtral", **options):
    transformers, architecture = pytest.importorskip("transformers"), ARCHITECTURES[name]
    return dataclasses.replace(architecture, options=architecture.options | options).made(transformers, name)


def distributed(module, mesh, **options):
    return mpishard.torch.as_distributed(module, mesh, RULE, **{"plan": "experts"} | options)


def whole_numbers(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).integers(-4, 5, shape).astype(float))


# The way of the tokens.


def test_rows_that_are_sent_and_their_gradients_are_adjoint(shared_mesh, comm):
    """As many to each rank as ranks differ, some none."""
    axis, size, rank = shared_mesh.data, comm.size, comm.rank
    counts = [[(3 * source + 2 * to) % 4 for to in range(size)] for source in range(size)]
    leave, come = counts[rank], [each[rank] for each in counts]
    rows = [whole_numbers([1, source], sum(counts[source]), 3) for source in range(size)]
    x = rows[rank].requires_grad_()
    y = sent(x, axis, leave, come)
    assert torch.equal(y, torch.cat([each.split(counts[source])[rank] for source, each in enumerate(rows)]))
    assert torch.equal(sent(y, axis, come, leave), x)
    half = sent(x.detach().bfloat16(), axis, leave, come)
    assert half.dtype == torch.bfloat16 and torch.equal(half.double(), y)
    dy = whole_numbers([2, rank], *y.shape)
    (dx,) = torch.autograd.grad(y, x, dy)
    forward, backward = (comm.allreduce(float((a * b).sum())) for a, b in ((y.detach(), dy), (x.detach(), dx)))
    assert forward == backward
    (gradient,) = torch.autograd.grad(sent(x, axis, leave, come).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("which", ["uneven", "to_one_rank", "of_one_rank"])
def test_dealt_experts_and_their_gradients_are_those_of_whole_ones(shared_mesh, comm, which):
    """Ranks have unlike numbers of experts; an expert may have no token, a rank bring none or get none."""
    axis, size, rank = shared_mesh.data, comm.size, comm.rank
    offsets = tuple(split(2 * size + 1, size))
    counts = [5 * (source == size - 1) if which == "of_one_rank" else 2 + source for source in range(size)]
    matrices = whole_numbers(1, offsets[-1], 3, 3).requires_grad_()
    x, weights, dy = (whole_numbers([2 + n, rank], counts[rank], each) for n, each in enumerate((3, 2, 3)))
    drawn = np.random.default_rng([5, rank]).permuted(np.tile(np.arange(offsets[-1] - 1), (counts[rank], 1)), axis=1)
    index = torch.from_numpy(drawn[:, :2] % (2 if which == "to_one_rank" else offsets[-1]))

    def all_experts(x, index, weights, matrices):
        found = torch.einsum("nc,nkcd->nkd", x, matrices[index]).square()
        return (found * weights[..., None]).sum(1)

    def run(function):
        given = [each.clone().requires_grad_() for each in (x, weights)]
        y = function(*given)
        y.backward(dy)
        return [y.detach(), *(each.grad for each in given)]

    expected = run(lambda x, weights: all_experts(x, index, weights, matrices))
    total = matrices.grad.numpy()
    comm.Allreduce(total.copy(), total)
    own = matrices.detach()[offsets[rank] : offsets[rank + 1]].clone().requires_grad_()
    tokens = []

    def travel(x, weights):
        y, came = dealt(lambda *given: all_experts(*given, own), x, index, weights, axis, offsets)
        tokens.append(came)
        return y

    found = run(travel)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(own.grad, torch.from_numpy(total)[offsets[rank] : offsets[rank + 1]])
    assert len(tokens[0]) == size and tokens[0].sum() == 2 * sum(counts)


# Steps.


def loss_of(module, words, count=None):
    """The mean loss, or the sum over `count` words, of a module of transformers in float64."""
    logits, targets = module(words[:, :-1]).logits, words[:, 1:]
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return found / (targets.numel() if count is None else count)


SLOW = [("Mixtral", 2), ("Mixtral", 3), ("Qwen2Moe", 0), ("Qwen3Moe", 1)]


@needs_ranks
@pytest.mark.parametrize(("name", "zero"), [("Mixtral", 0), *(pytest.param(*e, marks=pytest.mark.full) for e in SLOW)])
def test_steps_with_samples_on_all_ranks_are_those_of_one_process(tensor_mesh, name, zero):
    """Of four experts, and of eight samples, which three ranks do not divide."""
    mesh, whole, module = tensor_mesh, made(name), made(name)
    optimizer, theirs = distributed(module, mesh, zero=zero), adamw(whole)
    for step in range(10):
        words = words_of(step)
        expected = loss_of(whole, words)
        loss = loss_of(module, words[mesh.rank :: mesh.size], words[:, 1:].numel())
        assert mesh.world.all_reduce(np.array([loss.item()]))[0] == pytest.approx(expected.item(), rel=0, abs=1e-12)
        theirs.zero_grad()
        for each in (expected, loss):
            each.backward()
        theirs.step()
        optimizer.step(count=1)
        assert 1 / mesh.tensor.size <= optimizer.expert_load < 1
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-12)


@needs_ranks
@pytest.mark.parametrize("recomputes", [False, *variants.full(True)])
def test_the_loss_of_the_balance_is_of_the_tokens_of_all_ranks(tensor_mesh, recomputes):
    """A mean over ranks of equally many samples, with padding, in float32 of transformers; and the gradients' norm."""
    mesh = tensor_mesh
    whole, module = (made("Qwen2Moe", output_router_logits=True, router_aux_loss_coef=0.5).train() for _ in range(2))
    if recomputes:
        module.gradient_checkpointing_enable()
    optimizer = distributed(module, mesh)
    words = words_of(0)[:6] if mesh.size == 3 else words_of(0)
    mask = torch.ones_like(words)
    mask[: mesh.size, 4:] = 0  # a sample of each rank
    given = dict(input_ids=words, attention_mask=mask, labels=words.masked_fill(mask == 0, -100))
    expected = whole(**given)
    found = module(**{name: each[mesh.rank :: mesh.size] for name, each in given.items()})
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, rtol=1e-6, atol=0)
    mean = mesh.world.all_reduce(np.array([found.loss.item()]))[0] / mesh.size
    assert mean == pytest.approx(expected.loss.item(), rel=1e-6)
    expected.loss.backward()
    found.loss.backward()
    norm = torch.cat([p.grad.ravel() for p in whole.parameters()]).norm()
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(norm.item(), rel=1e-6)
    optimizer.step()
    adamw(whole).step()
    optimizer.close()
    assert module(words).logits.shape == whole(words).logits.shape


@needs_ranks
def test_a_checkpoint_of_dealt_experts_goes_to_any_other_layout(tensor_mesh, comm, folder):
    """To experts that are cut, to a plan of layers that deals them out, and to data ranks."""
    module = made()
    optimizer = distributed(module, tensor_mesh, zero=1)
    loss_of(module, words_of(tensor_mesh.rank)).backward()
    optimizer.step()
    optimizer.save_checkpoint(folder)
    optimizer.close()
    plan_of_layers = module.tp_plan | module.ep_plan
    with Mesh(comm) as data_ranks:
        for mesh, plan in ((tensor_mesh, None), (tensor_mesh, plan_of_layers), (data_ranks, None)):
            other = made()
            for p in other.parameters():
                p.detach().zero_()
            again = distributed(other, mesh, zero=1, plan=plan)
            again.load_checkpoint(folder)
            again.close()
            assert_same_parameters(other, module, atol=0)


@needs_ranks
@pytest.mark.parametrize("name", ["Qwen3Moe", *variants.full("Mixtral")])
def test_steps_with_a_plan_of_layers_that_deals_experts_out_are_those_of_one_process(tensor_mesh, name):
    """Tensor ranks have the same samples, in one pass a single token."""
    mesh, whole, module = tensor_mesh, made(name), made(name)
    optimizer, theirs = distributed(module, mesh, plan=module.tp_plan | module.ep_plan, zero=1), adamw(whole)
    for step in range(4):
        words = words_of(step) if step else words_of(step)[: mesh.data.size, :2]
        expected, loss = loss_of(whole, words), loss_of(module, words[mesh.data.rank :: mesh.data.size])
        assert mesh.data.all_reduce(np.array([loss.item()]))[0] / mesh.data.size == pytest.approx(
            expected.item(), rel=0, abs=1e-6
        )
        for each, which in ((expected, theirs), (loss, optimizer)):
            which.zero_grad()
            each.backward()
            which.step()
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-5)


@pytest.mark.full
@needs_ranks
def test_a_problem_deals_out_experts_by_a_plan_of_layers(tensor_mesh):
    """A rank may have no samples in a micro-batch."""
    words, found, modules = torch.cat([words_of(step) for step in range(3)]), [], [made().double(), made().double()]

    def losses(module, samples):
        logits = module(words[samples, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.mT, words[samples, 1:], reduction="none").mean(1)

    with Mesh(MPI.COMM_SELF) as alone:
        for module, mesh in zip(modules, (alone, tensor_mesh), strict=True):
            plan = module.tp_plan | module.ep_plan if mesh is tensor_mesh else None
            given = mpishard.torch.problem(
                module, losses, len(words), 8, micro_batch_size=3, steps=4, mesh=mesh, plan=plan
            )
            found.append(mpishard.ZeRO1Optimizer(RULE, mesh).optimize(given, progress=False).loss_history)
    np.testing.assert_allclose(*found, rtol=0, atol=1e-6)  # transformers routes in float32
    with mpishard.torch.summon_full_parameters(modules[1]):
        assert_same_parameters(modules[1], modules[0], atol=1e-5)


# What is refused.


@needs_ranks
def test_what_does_not_go_with_dealt_experts_is_refused(tensor_mesh, comm):
    mesh = tensor_mesh
    with pytest.raises(ValueError, match="Transformer has none"):
        distributed(fresh(), mesh)
    with pytest.raises(ValueError, match=f"has 1 experts for tensor={mesh.tensor.size} ranks"):
        distributed(made(num_local_experts=1, num_experts_per_tok=1), mesh)
    with pytest.raises(ValueError, match="auto_sync_gradients=False with plan='experts'"):
        distributed(made(), ShardingConfiguration(mesh, auto_sync_gradients=False))
    with pytest.raises(ValueError, match="plan='experts' is for a loop"):
        mpishard.torch.problem(made(), loss_of, 4, 4, mesh=mesh, plan="experts")
    with Mesh(comm, pipeline=comm.size) as pipeline, pytest.raises(ValueError, match="plan='experts' on the mesh"):
        distributed(made(), pipeline)
