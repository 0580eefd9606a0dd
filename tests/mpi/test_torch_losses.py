"""The loss of logits that tensor ranks have divided, beside that of whole logits."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import variants

import mpishard
from mpishard import Mesh
from mpishard.layout.boxes import split

torch = pytest.importorskip("torch")
from torch_architectures import ARCHITECTURES  # noqa: E402
from torch_models import assert_same_parameters  # noqa: E402
from torch_plans import BATCH, LENGTH, PLAN, RULE, WORDS, Transformer, adamw, fresh, tensor_size, words_of  # noqa: E402

from mpishard.torch.divided_logits import cross_entropy_of_parts  # noqa: E402

needs_ranks = pytest.mark.mpi(min_size=2)


@pytest.fixture
def tensor_mesh(comm):
    """Two tensor ranks where they divide the ranks, else all; copies on ranks are compared after every step."""
    with Mesh(comm, tensor=tensor_size(comm), debug=True) as mesh:
        yield mesh


TARGETS = {"some_ignored": [0, -100, 6, 3, 5, -100], "of_one_rank": [0, 1, 0, -100, 1, 1], "none": [-100] * 6}


@pytest.mark.parametrize("which", TARGETS)
def test_the_loss_and_its_gradient_are_those_of_whole_logits(shared_mesh, comm, which):
    """At odd sizes, and of logits whose exponentials are no numbers."""
    columns = 2 * comm.size + 5
    own = slice(*split(columns, comm.size)[comm.rank : comm.rank + 2])
    logits = torch.from_numpy(np.random.default_rng(5).standard_normal((2, 3, columns)) * 500)
    whole, part = logits.requires_grad_(), logits.detach()[..., own].clone().requires_grad_()
    targets = torch.tensor(TARGETS[which]).reshape(2, 3)
    for reduction in ("sum", "mean"):
        expected = torch.nn.functional.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction=reduction)
        loss = cross_entropy_of_parts(part, targets, shared_mesh.data, columns, -100, reduction)
        torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0, equal_nan=True)
        (theirs,), (ours,) = torch.autograd.grad(0.3 * expected, whole), torch.autograd.grad(0.3 * loss, part)
        torch.testing.assert_close(ours, theirs[..., own], rtol=0, atol=1e-15)
    with pytest.raises(ValueError, match=f"{columns} is out of range"):
        cross_entropy_of_parts(part, torch.full((6,), columns), shared_mesh.data, columns, -100, "sum")


class WithLoss(Transformer):
    """Its loss without one of the words."""

    def forward(self, words):
        logits = super().forward(words[:, :-1])
        return mpishard.torch.cross_entropy(logits, words[:, 1:], self.head, ignore_index=3, reduction="sum")


def test_steps_of_a_module_with_its_loss_are_those_of_one_process(tensor_mesh):
    """The head is the embedding; no rank has whole logits, or keeps more of them than its part."""
    mesh, saved = tensor_mesh, set()
    whole, module = fresh(kind=WithLoss), fresh(kind=WithLoss)
    plan = PLAN | {"head": "colwise"}
    optimizer, theirs = mpishard.torch.as_distributed(module, mesh, RULE, zero=1, plan=plan), adamw(whole)
    for step in range(5):
        mesh.ledger.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.add(tuple(x.shape)) or x, lambda x: x):
            loss = module(words_of(step, mesh.data.rank, mesh.data.size))
        calls = {name: found["calls"] for name, found in mesh.ledger.summary().items() if "activations" in name}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = whole(words_of(step)) / mesh.data.size
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        mean = mesh.data.all_reduce(np.array([loss.item()]))[0] / mesh.data.size
        assert mean == pytest.approx(expected.item(), rel=1e-12)
    optimizer.close()
    assert_same_parameters(module, whole)
    if mesh.tensor.size > 1:
        # Those of `mix`, a layer of each block; the maximum and the sums of the loss.
        assert calls == {"tensor.all_gather activations": 2, "tensor.all_reduce activations": 1 + 2 * 4 + 2}
        assert not any(shape[-1:] == (WORDS,) for shape in saved)


class Classifier(torch.nn.Module):
    """More classes than features, or fewer, each with a target."""

    def __init__(self, classes):
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(8, classes, dtype=torch.float64)

    def forward(self, x):
        return mpishard.torch.cross_entropy(self.head(x), torch.arange(self.head.out_features), self.head)


@pytest.mark.parametrize("classes", [5, 11])
def test_the_loss_of_a_layer_whose_inputs_are_cut(tensor_mesh, classes):
    whole, module = Classifier(classes), Classifier(classes)
    plan = {"head": "rowwise_split_input"}
    optimizer = mpishard.torch.as_distributed(module, tensor_mesh, mpishard.SGD(lr=1.0), plan=plan)
    x = torch.randn(classes, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for each in (module(x), whole(x)):
        assert each.item() == pytest.approx(whole(x).item(), rel=1e-14)
        each.backward()
    optimizer.step()
    torch.optim.SGD(whole.parameters(), lr=1.0).step()
    optimizer.close()
    assert_same_parameters(module, whole)


@needs_ranks
@pytest.mark.parametrize("name", ["Qwen3", *variants.full("Gemma2", "Cohere", "GPT2")])
def test_labels_of_a_model_of_transformers_leave_the_logits_in_parts(tensor_mesh, name):
    """Losses and gradients to the rounding of float32, which transformers computes them in."""
    transformers = pytest.importorskip("transformers")
    whole, module = (ARCHITECTURES[name].made(transformers, name).train() for _ in range(2))
    plan, rule = ARCHITECTURES[name].plan, mpishard.SGD(lr=0.1)
    optimizer = mpishard.torch.as_distributed(module, tensor_mesh, rule, plan=plan)
    words = words_of(0)
    labels = words.masked_fill(words % 3 == 0, -100)
    wrong = labels.clone()
    wrong[-1, -1] = WORDS
    ways = {}, {"num_items_in_batch": torch.tensor(17)}, {"shift_labels": labels.flip(1)}
    for given in (wrong, labels, wrong):  # the first pass is compared
        with pytest.raises(IndexError, match=str(WORDS)) if given is wrong else nullcontext():
            module(words, labels=given)
    tensor_mesh.ledger.clear()
    pairs = [[each(words, labels=labels, **given) for each in (module, whole)] for given in ways]
    gathered = {name: found for name, found in tensor_mesh.ledger.summary().items() if "all_gather activations" in name}
    assert len(gathered) == (name == "GPT2") and all(each["calls"] == 2 * len(ways) for each in gathered.values())
    for own, theirs in pairs:
        assert own.loss.dtype == theirs.loss.dtype == torch.float32
        torch.testing.assert_close(own.loss, theirs.loss, rtol=2e-6, atol=0)
        for use in (lambda x: x.shape, lambda x: x[:, :-1], torch.argmax, lambda x: 2 * x):
            with pytest.raises(RuntimeError, match=r"model\.eval\(\)"):
                use(own["logits"])
    for number, which in enumerate((optimizer, torch.optim.SGD(whole.parameters(), lr=0.1))):
        sum(pair[number].loss for pair in pairs).backward()
        which.step()
        which.zero_grad()
    module.eval()
    torch.testing.assert_close(module(words, labels=labels).logits, whole(words).logits, rtol=1e-5, atol=1e-6)
    module.train().loss_function = lambda logits, *_, **__: logits.mean()
    assert module(words, labels=labels).logits.shape == (BATCH, LENGTH + 1, WORDS)
    del module._loss_function
    optimizer.close()
    assert "_loss_function" not in vars(module)
    assert_same_parameters(module, whole, atol=1e-6)
