"""Models of transformers whose sequences tensor ranks divide, beside whole sequences in one process."""

from __future__ import annotations

import copy
import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import variants

import mpishard
from mpishard import Mesh
from mpishard.layout.boxes import split

torch = pytest.importorskip("torch")
from torch.nn.functional import cross_entropy  # noqa: E402
from torch_architectures import ARCHITECTURES  # noqa: E402
from torch_models import assert_same_parameters  # noqa: E402
from torch_plans import LENGTH, RULE, WORDS, adamw, words_of  # noqa: E402

from mpishard.torch.sequences import DividedTokens, to_heads, to_tokens  # noqa: E402

needs_ranks = pytest.mark.mpi(min_size=2)
# Three ranks share two heads of keys; a window cuts attention off.
CHANGES = {"Qwen2": dict(num_key_value_heads=2), "Mistral": dict(num_key_value_heads=2, sliding_window=3)}


@pytest.fixture
def tensor_mesh(comm):
    """Two tensor ranks where they divide the ranks, else all; copies on ranks are compared after every step."""
    with Mesh(comm, tensor=2 if comm.size % 2 == 0 else comm.size, debug=True) as mesh:
        yield mesh


def made(name="Mistral", **options):
    transformers, architecture = pytest.importorskip("transformers"), ARCHITECTURES[name]
    options = architecture.options | CHANGES.get(name, {}) | options
    return dataclasses.replace(architecture, options=options).made(transformers, name)


def distributed(module, mesh, **options):
    return mpishard.torch.as_distributed(module, mesh, RULE, plan="sequence", **options)


# The exchange of tokens and heads.


@pytest.mark.parametrize("shares_heads", [False, True], ids=["own", "shared"])
def test_exchanges_of_heads_and_tokens_are_adjoint(shared_mesh, comm, shares_heads):
    axis, size, rank = shared_mesh.data, comm.size, comm.rank
    tokens = DividedTokens(axis, tuple(split(2 * size + 1, size)))
    heads = [range(*ends) for ends in pairwise(split(size + 2, size))]
    if shares_heads:  # as those of keys
        heads = [range(each.start // 2, (each.stop - 1) // 2 + 1) for each in heads]
    whole = torch.from_numpy(np.random.default_rng(0).integers(-4, 5, (2, heads[-1].stop, 2 * size + 1, 3)))
    own = whole.double()[:, :, tokens.offsets[rank] : tokens.offsets[rank + 1]].requires_grad_()
    found = to_heads(own, tokens, heads)
    assert torch.equal(found, whole.double()[:, heads[rank].start : heads[rank].stop])
    half = to_heads(own.detach().bfloat16(), tokens, heads)
    assert half.dtype == torch.bfloat16 and torch.equal(half.double(), found)
    if not shares_heads:
        assert torch.equal(to_tokens(found, tokens, heads), own)
    for exchange, x in ((to_heads, own), (to_tokens, found.detach().requires_grad_())):
        y = exchange(x, tokens, heads)
        dy = torch.from_numpy(np.random.default_rng([1, rank]).integers(-4, 5, y.shape).astype(float))
        (dx,) = torch.autograd.grad(y, x, dy)
        forward, backward = (comm.allreduce(float((a * b).sum())) for a, b in ((y.detach(), dy), (x.detach(), dx)))
        assert forward == backward
        (gradient,) = torch.autograd.grad(exchange(x, tokens, heads).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


# Steps.


def loss_of(module, words, axis=None):
    """A loss of one's own in float64; with an axis this rank's term of it."""
    targets = words[:, 1:] if axis is None else words[:, 1:].tensor_split(axis.size, 1)[axis.rank]
    logits = module(words[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / words[:, 1:].numel()


SLOW = [pytest.param(*each, marks=pytest.mark.full) for each in (("Llama", 2), ("Qwen2", 1), ("Mistral", 3))]


@pytest.mark.parametrize(("name", "zero"), [("Mistral", 0), ("GPT2", 1), *SLOW])
def test_steps_are_those_of_whole_sequences(tensor_mesh, name, zero):
    """Five tokens and, of queries and keys, as many heads as ranks do not divide."""
    mesh, whole, module = tensor_mesh, made(name), made(name)
    optimizer = distributed(module, mesh, zero=zero)
    theirs = adamw(whole)
    for step in range(10):
        words = words_of(step)
        expected = loss_of(whole, words)
        loss = loss_of(module, words[mesh.data.rank :: mesh.data.size], mesh.tensor)
        assert mesh.world.all_reduce(np.array([loss.item()]))[0] / mesh.data.size == pytest.approx(
            expected.item(), rel=0, abs=1e-12
        )
        for each, which in ((expected, theirs), (loss, optimizer)):
            which.zero_grad()
            each.backward()
            which.step()
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-12)


@pytest.mark.parametrize("recomputes", [False, *variants.full(True)])
def test_the_loss_of_labels_is_that_of_whole_sequences(tensor_mesh, recomputes):
    """Labels are shifted over the cuts; some are ignored, and padding is no token."""
    mesh, whole, module = tensor_mesh, made().train(), made().train()
    if recomputes:
        module.gradient_checkpointing_enable()
    optimizer = distributed(module, mesh, zero=0)
    words = words_of(0)[mesh.data.rank :: mesh.data.size]
    labels, mask = words.clone(), torch.ones_like(words)
    labels[0, 2:4] = -100
    mask[1, 4:] = labels[1, 4:] = 0
    labels[1, 4:] = -100
    given = [
        dict(input_ids=words, labels=labels, attention_mask=mask),
        dict(input_ids=words[:, :4], labels=words[:, :4]),
    ]
    losses = [module(**each).loss for each in given]  # of two lengths, before the backward passes
    expected = [whole(**each).loss for each in given]
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)  # transformers takes it in float32
    sum(losses).backward()
    sum(expected).backward()
    mean = mesh.data.all_reduce(torch.cat([p.grad.ravel() for p in whole.parameters()]).numpy()) / mesh.data.size
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(np.linalg.norm(mean), rel=1e-6)
    optimizer.step()
    with mpishard.torch.summon_full_parameters(module), torch.no_grad():
        found = module.generate(words[:1, :2], max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    assert found.shape == (1, 5)
    optimizer.close()
    assert module.config._attn_implementation == whole.config._attn_implementation


# What is refused.


@needs_ranks
def test_passes_that_cannot_be_divided_are_refused(tensor_mesh):
    ranks, words = tensor_mesh.tensor.size, words_of(0)
    module = made()
    before = copy.deepcopy(module)
    other = type(module)(module.config).double()  # gets the attentions that plan= writes to the configuration
    optimizer = distributed(module, tensor_mesh)
    with pytest.raises(ValueError, match=f"{ranks - 1} tokens for tensor={ranks}"):
        module(words[:, : ranks - 1])
    module(words)
    for name in ("input_ids", "labels"):  # the last token, which one rank alone has
        wrong = words.clone()
        wrong[0, -1] = WORDS
        with pytest.raises(IndexError, match=f"{name} .* {WORDS}"):
            module(**{"input_ids": words, name: wrong})
    for part in (module.model, other):
        with pytest.raises(RuntimeError, match=r"called outside of a pass.*copy\.deepcopy"):
            part(words)
    optimizer.close()
    assert_same_parameters(module, before)


@needs_ranks
def test_a_model_whose_tokens_are_not_for_themselves_is_refused(tensor_mesh):
    module = made()
    forward = module.model.layers[1].mlp.forward
    module.model.layers[1].mlp.forward = lambda x: forward(x) + x.mean(1, keepdim=True)
    optimizer = distributed(module, tensor_mesh)
    with pytest.raises(ValueError, match="part of its tokens"):
        module(words_of(0))
    optimizer.close()


@needs_ranks
def test_modules_without_sequences_to_divide_are_refused(tensor_mesh, monkeypatch):
    modules = {"needs one for each": made("GPT2", n_head=1), "is none": torch.nn.Linear(LENGTH, WORDS)}
    modules["output_router_logits=False"] = made("Mixtral", output_router_logits=True)
    for message, module in modules.items():
        with pytest.raises(ValueError, match=message):
            distributed(module, tensor_mesh)
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", lambda batch_size, cache_position, kv_length: None)
    with pytest.raises(ValueError, match=r"is of transformers 5.*from 5\.4 on"):
        distributed(made(), tensor_mesh)


@needs_ranks
def test_a_model_of_peft_is_divided_by_the_model_in_it(tensor_mesh):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    module = peft.get_peft_model(made(), config).double()
    with pytest.raises(ValueError, match=r"PeftModel is wrapped around one: give its get_base_model\(\)"):
        distributed(module, tensor_mesh)
    whole = copy.deepcopy(module.get_base_model())
    words = words_of(0)
    whole(words).logits.square().mean(0).sum().backward()
    adamw(whole).step()
    optimizer = distributed(module.get_base_model(), tensor_mesh)
    module.get_base_model()(words).logits.square().mean(0).sum().backward()
    optimizer.step()
    optimizer.close()
    assert_same_parameters(module.get_base_model(), whole)
