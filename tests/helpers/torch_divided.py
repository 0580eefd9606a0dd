"""What is so of each module that tensor ranks or stages divide, or both: its steps, its norms, and its states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch_models import assert_same_parameters
from torch_plans import adamw, loss_of, take_steps, words_of

import mpishard
from mpishard import ShardingConfiguration


@dataclass(frozen=True)
class Division:
    """Ranks that divide a module: ``distributed(module, mesh, **options)`` makes an optimizer of `torch_plans.RULE`.

    `take` is `torch_plans.take_steps`, or takes the same steps in another way.
    """

    made: Callable[[], Any]
    distributed: Callable[..., Any]
    take: Callable[..., list[float]]

    def emptied(self):
        """The module without the values that a checkpoint has; frozen parameters are in none."""
        module = self.made()
        for tensor in (*(p for p in module.parameters() if p.requires_grad), *module.buffers()):
            tensor.detach().zero_()
        return module


def check_steps(take, module, optimizer, axis, whole, theirs, steps):
    """The mean losses of steps over a data axis are those of the whole module; `take` is as of `Division`."""
    expected = take_steps(whole, theirs, steps)
    losses = axis.all_reduce(np.array(take(module, optimizer, steps, axis))) / axis.size
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-12)


def check_continuation(division, mesh, other_mesh, folder, zero, other_zero, last_zero):
    """A run goes on on another mesh and comes back, by a checkpoint, by state_dict, and by a state of PyTorch."""
    whole = division.made()
    take_steps(whole, adamw(whole), range(6))
    module = division.made()
    first = division.distributed(module, mesh, zero=zero)
    division.take(module, first, range(2), mesh.data)
    first.save_checkpoint(folder / "first")
    states = first.state_dict(), first.state_dict("torch")
    with mpishard.torch.summon_full_parameters(module):
        values = copy.deepcopy({name: value.clone() for name, value in module.state_dict().items()})
    assert {name: value.shape for name, value in values.items()} == {
        name: value.shape for name, value in whole.state_dict().items()
    }
    second = division.emptied()
    optimizer = division.distributed(second, other_mesh, zero=other_zero)
    optimizer.load_checkpoint(folder / "first")
    division.take(second, optimizer, (2, 3))  # all samples on each data rank: the mean of their means
    optimizer.save_checkpoint(folder / "second")
    optimizer.close()
    division.take(module, first, range(2, 4), mesh.data)
    first.load_checkpoint(folder / "second")
    division.take(module, first, range(4, 6), mesh.data)
    first.close()
    assert_same_parameters(module, whole)
    for state in states:
        again = division.emptied()
        optimizer = division.distributed(again, mesh, zero=last_zero)
        with mpishard.torch.summon_full_parameters(again):
            again.load_state_dict(values)
        optimizer.load_state_dict(state)
        division.take(again, optimizer, range(2, 6), mesh.data)
        optimizer.close()
        assert_same_parameters(again, whole)
    return values


def check_masters(division, mesh, folder):
    """Parameters of half precision keep their masters, in a state and in a checkpoint."""
    module = division.made().bfloat16()
    optimizer = division.distributed(module, mesh)
    division.take(module, optimizer, range(2), mesh.data)
    state = optimizer.state_dict()
    trained = {name: p.shape for name, p in division.made().named_parameters() if p.requires_grad}
    assert {name: master.shape for name, master in state["masters"].items()} == trained
    optimizer.save_checkpoint(folder)
    optimizer.close()
    for load in (lambda each: each.load_state_dict(state), lambda each: each.load_checkpoint(folder)):
        other = division.emptied().bfloat16()
        again = division.distributed(other, mesh)
        load(again)
        again.close()
        assert_same_parameters(other, module, atol=0)


def check_norm(division, mesh, zero):
    """The norm is that of the whole gradient, by the method and by the setting, of two batches without sums between."""
    whole, module = division.made(), division.made()
    optimizer = division.distributed(module, ShardingConfiguration(mesh, max_gradient_norm=0.3), zero=zero)
    theirs, ends = adamw(whole), (mesh.data.rank, mesh.data.size)
    for step in range(2):
        theirs.zero_grad()
        (loss_of(whole, words_of(step)) + loss_of(whole, words_of(step + 7))).backward()
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.3)
        theirs.step()
        with optimizer.no_sync():
            optimizer.loss_and_gradient(loss_of, words_of(step, *ends))
        optimizer.loss_and_gradient(loss_of, words_of(step + 7, *ends))
        assert optimizer.clip_grad_norm_(0.5).item() == pytest.approx(expected, rel=1e-12)
        optimizer.step()
    optimizer.close()
    assert_same_parameters(module, whole, rtol=1e-6, atol=1e-9)
