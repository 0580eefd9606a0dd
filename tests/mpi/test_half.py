"""Training with products in float16: it follows float32, and an overflow on one rank is one on all."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard import AdamW, DDPOptimizer, Mesh, ShardingConfiguration, ZeRO3Optimizer, nn

VOCABULARY, LENGTH = 11, 8
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (9, LENGTH + 1))
pytestmark = pytest.mark.filterwarnings("ignore:compute_dtype=.* on NumPy arrays:UserWarning")


class Run:
    """A model and its optimizer, a step at a time."""

    def __init__(self, mesh, compute_dtype, strategy=DDPOptimizer, **sizes):
        sizes = {"width": 24, "layers": 1, "heads": 2, "mesh": mesh, **sizes}
        self.mesh = mesh
        self.model = nn.GPT(VOCABULARY, LENGTH, compute_dtype=compute_dtype, **sizes)
        scale = None if compute_dtype is None else "dynamic"
        self.optimizer = strategy(AdamW(lr=3e-3), ShardingConfiguration(mesh, loss_scale=scale))
        self.optimizer.bind(self.model.parameters)

    def step(self):
        """Summed loss of all data ranks before the step."""
        mine = np.array_split(TOKENS, self.mesh.data.size)[self.mesh.data.rank]
        loss = self.model.loss_and_gradient(mine[:, :-1], mine[:, 1:])
        self.optimizer.step(self.model.parameters, count=TOKENS[:, 1:].size)
        return self.mesh.data.comm.allreduce(loss)

    def losses(self, steps):
        """The loss before each step that is taken, not skipped, until there are `steps` of them."""
        losses = {}
        while (taken := self.optimizer.steps) < steps:
            assert self.optimizer.skipped_steps < 16
            losses[taken] = self.step()
        return np.array(list(losses.values()))


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO3Optimizer])
def test_thirty_steps_follow_those_in_float32(mesh, same_on_all, strategy):
    exact, half = Run(mesh, None, strategy), Run(mesh, np.float16, strategy)
    losses, half_losses = exact.losses(30), half.losses(30)
    assert losses[-1] < 0.8 * losses[0]
    assert np.all(np.abs(half_losses - losses) < 0.02 * losses)
    assert not np.array_equal(half_losses, losses)
    assert same_on_all(half.model.parameters.gather())


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_an_overflow_on_one_rank_skips_on_all(comm, same_on_all, axis):
    shape = {"data": 1, "tensor": 1, "pipeline": 1, axis: comm.size}
    with Mesh(comm, **shape) as mesh:
        run = Run(mesh, np.float16, heads=24, layers=max(1, mesh.pipeline.size))
        run.losses(1)  # the scale is one that fits now
        scale, skipped = run.optimizer.loss_scale, run.optimizer.skipped_steps
        parameters, before = run.model.parameters, run.model.parameters.gather()
        if comm.rank == comm.size - 1:
            parameters.loss_scale = 2.0**40
        first = run.step()
        assert np.array_equal(parameters.gather(), before)
        assert (run.optimizer.steps, run.optimizer.skipped_steps) == (1, skipped + 1)
        assert run.optimizer.loss_scale == parameters.loss_scale == scale / 2
        losses = run.losses(8)
        assert losses[0] == first
        assert losses[-1] < losses[0]
        assert same_on_all((run.optimizer.steps, run.optimizer.skipped_steps, losses.tolist()))
        assert axis != "data" or same_on_all(parameters.gather())
        assert np.isfinite(parameters.gather()).all()
