"""What is wrong with a PyTorch module or an optimizer on one rank is raised on all."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard
from mpishard import ShardingConfiguration
from mpishard.compression import Int8Compressor

torch = pytest.importorskip("torch")
from torch_models import RULE, convolutional, images, loss_of, make, samples_of, smooth  # noqa: E402


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: module.double(), "memory of parameter '1.weight' was replaced after the module was made"),
        (lambda module: module[3].requires_grad_(False), "parameter '3.weight' was frozen after"),
        (lambda module: module.append(torch.nn.Linear(5, 2)), "'4.weight' is new, '4.bias' is new; change it before"),
        (lambda module: module.__setitem__(3, torch.nn.Linear(8, 5)), "'3.weight' is another Parameter"),
    ],
)
def test_a_module_that_was_changed_is_refused_on_all_ranks(mesh, change, message):
    module = smooth()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=1)
    x, y = images()
    loss_of(module, x, y, samples_of(mesh, 0)).backward()
    if mesh.rank == mesh.size - 1:
        change(module)
    before = optimizer.parameters.flat.copy()
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert np.array_equal(optimizer.parameters.flat, before)


@pytest.mark.parametrize(
    ("make_module", "arguments", "kind", "message"),
    [
        (lambda: smooth().half(), {}, ValueError, "must have the same module and arguments of as_distributed, but"),
        (smooth, {"zero": 4}, ValueError, "zero=4 must be 0, 1, 2 or 3"),
        (smooth, {"zero": 3, "shard_units": torch.nn.LSTM}, ValueError, "the module has no submodule LSTM"),
        (smooth, {"buffers": "mean"}, ValueError, "buffers='mean' must be one of broadcast, average, local"),
        (convolutional, {}, ValueError, "must have the same module and arguments of as_distributed, but parameters is"),
    ],
)
def test_bad_arguments_of_one_rank_are_refused_on_all(mesh, make_module, arguments, kind, message):
    if mesh.size == 1:
        pytest.skip("needs two ranks, which differ")
    last = mesh.rank == mesh.size - 1
    module = make_module() if last else smooth()
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    with pytest.raises(kind, match=message):
        mpishard.torch.as_distributed(module, mesh, RULE, **(arguments if last else {}))
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == before


def test_what_one_rank_alone_finds_is_raised_on_all(mesh):
    """An optimizer that is no rule, and a module that was changed before it comes again."""
    last = mesh.rank == mesh.size - 1
    module = smooth()
    with pytest.raises(TypeError, match="LBFGS cannot take a step of a flat array.*; use an element-wise optimizer"):
        mpishard.torch.as_distributed(module, mesh, torch.optim.LBFGS(module.parameters()) if last else RULE)
    kept = mpishard.torch.as_distributed(module, mesh, RULE)
    if last:
        module[3] = torch.nn.Linear(8, 5)
    with pytest.raises(ValueError, match="'3.weight' is another Parameter"):
        mpishard.torch.as_distributed(module, mesh, RULE)
    kept.close()


def test_a_learning_rate_of_one_rank_is_refused_at_its_first_step(mesh):
    """As that of a scheduler that looks at the rank's own loss."""
    if mesh.size == 1:
        pytest.skip("needs two ranks, which differ")
    module, x, y = make("convolutional")
    theirs = torch.optim.SGD(module.parameters(), lr=0.5)
    optimizer = mpishard.torch.as_distributed(module, mesh, theirs, zero=1)
    loss_of(module, x, y, samples_of(mesh, 0)).backward()
    optimizer.step()
    before = optimizer.parameters.flat.copy()
    if mesh.rank == 0:
        theirs.param_groups[0]["lr"] = 0.25
    loss_of(module, x, y, samples_of(mesh, 1)).backward()
    way_out = "if it is a value of param_groups, set it there"
    with pytest.raises(ValueError, match=rf"lr of param_groups\[0\] is 0.25 on rank 0, 0.5 on rank.*{way_out}"):
        optimizer.step()
    assert np.array_equal(optimizer.parameters.flat, before)


def replace_gradient(p):
    p.grad = p.grad / 2


def drop_gradient(p):
    p.grad = None


def reshape_gradient(p):
    other = torch.zeros(3)
    p.grad.data = other


@pytest.mark.parametrize(
    ("compresses", "change", "how"),
    [
        (True, lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1), "changed"),
        (True, lambda p: p.grad.mul_(0.5), "changed"),
        (True, lambda p: p.grad.zero_(), "changed"),
        (True, replace_gradient, "assigned"),
        (True, drop_gradient, "dropped"),
        (False, drop_gradient, "dropped"),
        (False, reshape_gradient, "assigned"),
    ],
)
def test_gradients_that_were_changed_are_refused_on_all_ranks(mesh, compresses, change, how):
    """A step would not see it; after the error and zero_grad, the next step is as ever."""
    if compresses and mesh.size == 1 and change is not drop_gradient:
        pytest.skip("one rank alone has all gradients")
    steps = {}
    for changes in (True, False):
        module, (x, y) = smooth(), images()
        config = ShardingConfiguration(mesh, gradient_compressor=Int8Compressor() if compresses else None)
        optimizer = mpishard.torch.as_distributed(module, config, RULE)
        before = optimizer.parameters.flat.copy()
        if changes:
            loss_of(module, x, y, samples_of(mesh, 1)).backward()
            if mesh.rank == mesh.size - 1:
                change(module[3].weight)
            way_out = (
                r"p.grad.zero_\(\) instead; .* set lr of its group"
                if (how, compresses) == ("dropped", False)
                else "max_gradient_norm"
            )
            with pytest.raises(ValueError, match=f"'3.weight' was {how} after the backward pass.* {way_out}"):
                optimizer.step()
            assert np.array_equal(optimizer.parameters.flat, before)
            optimizer.zero_grad()
        loss_of(module, x, y, samples_of(mesh, 0)).backward()
        optimizer.step()
        steps[changes] = optimizer.parameters.flat.copy()
    assert np.array_equal(steps[True], steps[False])


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_without_a_backward_pass_are_refused(mesh, zero):
    module, (x, y) = smooth(), images()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=zero)
    loss = loss_of(module, x, y, samples_of(mesh, 0))
    for p, gradient in zip(module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True):
        p.grad = gradient
    with pytest.raises(ValueError, match=r"'1.weight' was assigned after the backward pass.* call backward\(\)"):
        optimizer.step()
    assert all(p.grad is None for p in module.parameters())


def test_gradients_may_be_changed_between_two_passes(mesh):
    """Within no_sync, as in a loop without mpishard."""
    steps = []
    for factor in (1, 3):
        module, (x, y) = smooth(), images()
        optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1))
        with optimizer.no_sync():
            (loss_of(module, x, y, samples_of(mesh, 0)) / factor).backward()
            for p in module.parameters():
                p.grad.mul_(factor)
        loss_of(module, x, y, samples_of(mesh, 1)).backward()
        optimizer.step()
        steps.append(optimizer.parameters.flat.copy())
    np.testing.assert_allclose(steps[1], steps[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_sparse_gradients_are_dense_ones(mesh, zero):
    steps = []
    for sparse in (False, True):
        torch.manual_seed(2)
        module = torch.nn.EmbeddingBag(11, 5, sparse=sparse)
        optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=zero)
        for step in range(2):
            with optimizer.no_sync():
                module(torch.arange(4).reshape(2, 2) + step).square().mean().backward()
            module(torch.arange(4).reshape(2, 2) + mesh.rank % 7).square().mean().backward()
            optimizer.step()
        steps.append(optimizer.parameters.flat.copy())
    assert np.array_equal(*steps)


def test_a_buffer_of_two_names_of_which_one_is_another_tensor(mesh):
    module, (x, y) = smooth(), images()
    module.register_buffer("again", module.seen)
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE)
    loss_of(module, x, y, samples_of(mesh, 0)).backward()  # it has assigned `seen` anew
    with pytest.raises(ValueError, match="buffer 'seen' had a second name.*'again', and one of them is another tensor"):
        optimizer.step()


@pytest.mark.parametrize(
    "use",
    [
        lambda module: torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1),
        lambda module: module[1].weight.grad.mul_(0.5),
        lambda module: module[1].weight.grad.norm(),
    ],
)
def test_gradients_that_have_left_cannot_be_used(mesh, use):
    """Under ZeRO-2; the step is as ever."""
    steps = []
    for uses in (False, True):
        module, (x, y) = smooth(), images()
        optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=2)
        for step in range(2):
            with optimizer.no_sync():
                loss_of(module, x, y, samples_of(mesh, 2)).backward()
            loss_of(module, x, y, samples_of(mesh, step)).backward()
            if uses:
                with pytest.raises(RuntimeError, match="under zero=2 and 3, .*clip_grad_norm_.*max_gradient_norm"):
                    use(module)
            optimizer.step()
        assert all(p.grad is None for p in module.parameters())
        steps.append(optimizer.parameters.flat.copy())
    assert np.array_equal(*steps)
