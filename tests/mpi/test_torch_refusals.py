"""What is wrong with a PyTorch module or an optimizer on one rank is raised on all."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard

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
        (lambda: smooth().half(), {}, TypeError, "must be float32 or float64, but '1.weight' is float16"),
        (smooth, {"zero": 3}, ValueError, "zero=3 must be 0, 1 or 2"),
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
    mpishard.torch.as_distributed(module, mesh, RULE)
    if last:
        module[3] = torch.nn.Linear(8, 5)
    with pytest.raises(ValueError, match="'3.weight' is another Parameter"):
        mpishard.torch.as_distributed(module, mesh, RULE)


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
