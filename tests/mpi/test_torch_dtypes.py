"""PyTorch modules in bfloat16, float16, several dtypes or complex numbers, whose masters are what steps."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from mpi4py import MPI

import mpishard
from mpishard import Mesh, ShardingConfiguration

torch = pytest.importorskip("torch")
from torch_models import assert_same_parameters  # noqa: E402

SAMPLES = 48
RULE = mpishard.AdamW(lr=1e-2)
if not hasattr(torch.Tensor, "grad_dtype"):
    pytest.skip("this PyTorch has no Tensor.grad_dtype", allow_module_level=True)


class Layers(torch.nn.Module):
    """Two layers and a complex map, each of which computes in its own dtype."""

    def __init__(self, first, second, between=None):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.first = torch.nn.Linear(8, 16, dtype=first)
        if between is not None:
            self.between = torch.nn.Parameter(torch.randn(16, 16, dtype=between) / 4)
        self.second = torch.nn.Linear(16, 3, dtype=second)

    def forward(self, x):
        h = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        if hasattr(self, "between"):
            h = (h.to(self.between.dtype) @ self.between).abs()
        return self.second(h.to(self.second.weight.dtype)).float() * self.scale


KINDS = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "mixed": (torch.bfloat16, torch.float16),
    "double": (torch.float32, torch.float64, torch.complex64),
    "complex": (torch.float32, torch.float32, torch.complex64),
}


def make(kind, seed=3):
    """The same on all ranks."""
    torch.manual_seed(seed)
    return Layers(*KINDS[kind])


def batch(step, start, stop):
    """Samples of a step: all ranks have the same."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(step))
    return x[start:stop], (x[:, 0] > x[:, 1]).long()[start:stop]


def loss_of(module, step, rank, ranks):
    part = SAMPLES // ranks
    x, y = batch(step, rank * part, (rank + 1) * part)
    return torch.nn.functional.cross_entropy(module(x), y)


def losses(module, samples):
    x, y = batch(0, 0, SAMPLES)
    return torch.nn.functional.cross_entropy(module(x[samples]), y[samples], reduction="none")


def masters_of(optimizer):
    """The flat array by name, also under zero=3."""
    flat = torch.from_numpy(optimizer.parameters.gather())
    pieces = optimizer.parameters.pieces
    return {each.name: flat[each.start : each.start + each.size].view(each.shape) for each in pieces}


def reals(p):
    return torch.view_as_real(p.detach()) if p.is_complex() else p.detach()


def units_under(zero):
    return {"shard_units": torch.nn.Linear} if zero == 3 else {}


def take_steps(mesh, module, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(module, step, mesh.rank, mesh.size).backward()
        optimizer.step()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.pairs(5)
@pytest.mark.quick
def test_steps_are_those_of_masters_by_hand(mesh, kind, zero):
    """Each step from our rounded parameters, so that a rounding that falls the other way does not add up."""
    module, theirs = make(kind), make(kind)
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=zero, **units_under(zero))
    real = torch.float64 if kind == "double" else torch.float32
    masters = {}
    for name, p in theirs.named_parameters():
        masters[name] = p.detach().to(real.to_complex() if p.is_complex() else real).clone().requires_grad_()
    adamw = torch.optim.AdamW(masters.values(), lr=1e-2, weight_decay=RULE.weight_decay)
    for step in range(4):
        take_steps(mesh, module, optimizer, [step])
        adamw.zero_grad()
        for rank in range(mesh.size):
            theirs.zero_grad()
            loss_of(theirs, step, rank, mesh.size).backward()
            for name, p in theirs.named_parameters():
                mean = p.grad.to(masters[name].dtype) / mesh.size
                masters[name].grad = mean if masters[name].grad is None else masters[name].grad + mean
        adamw.step()
        ours = masters_of(optimizer)
        with mpishard.torch.summon_full_parameters(module):
            theirs.load_state_dict(module.state_dict())
        for name, p in theirs.named_parameters():
            rtol, atol = (1e-12, 1e-14) if kind == "double" else (1e-5, 1e-6)
            torch.testing.assert_close(ours[name], reals(masters[name]), rtol=rtol, atol=atol)
            assert torch.equal(reals(p), ours[name].to(reals(p).dtype)), name
    dtypes = {name: p.dtype for name, p in make(kind).named_parameters()}
    assert {name: p.dtype for name, p in module.named_parameters()} == dtypes
    optimizer.close()
    loss_of(module, 0, 0, 1).backward()
    assert all(p.grad.dtype == p.dtype for p in module.parameters())


def test_reproducible_runs_have_the_losses_of_one_rank(mesh):
    found = []
    with Mesh(MPI.COMM_SELF) as one:
        for each in (mesh, one):
            module = make("bfloat16")
            config = ShardingConfiguration(each, reproducible=True)
            problem = mpishard.torch.problem(module, losses, SAMPLES, 16, micro_batch_size=2, steps=6, seed=2)
            result = mpishard.ZeRO2Optimizer(RULE, config).optimize(problem, progress=False)
            found.append([*result.loss_history, *torch.cat([p.detach().reshape(-1) for p in module.parameters()])])
    assert found[0] == found[1]


@pytest.mark.parametrize("zero", [0, 1])
def test_a_gradient_scaler_skips_a_step_on_all_ranks(mesh, same_on_all, zero):
    """With gradients that float16 has only when they are scaled, and infinite ones on the last rank."""
    module = make("float16")
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=zero)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=100)
    scales = []
    for step in range(4):
        before = optimizer.parameters.flat.copy()
        optimizer.zero_grad()
        factor = 1e6 if step == 2 and mesh.rank == mesh.size - 1 else 1e-6
        scaler.scale(loss_of(module, step, mesh.rank, mesh.size) * factor).backward()
        scaler.unscale_(optimizer)
        gradient = module.second.bias.grad.clone()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert np.array_equal(optimizer.parameters.flat, before) == (step == 2)
        assert same_on_all(optimizer.parameters.flat)
        assert step == 2 or (gradient.dtype == torch.float32 and 0 < gradient.abs().max() < 1e-6)
    assert scales == [2.0**24, 2.0**24, 2.0**23, 2.0**23]
    assert optimizer.optimizer.steps == 3


@pytest.mark.parametrize("scale", [1.0, 2.0**24])
def test_a_loss_scale_keeps_gradients_of_float16(mesh, scale):
    module = make("float16")
    config = ShardingConfiguration(mesh, loss_scale=scale)
    problem = mpishard.torch.problem(module, lambda *given: losses(*given) * 1e-9, SAMPLES, SAMPLES, steps=1)
    before = problem.start["second.weight"].copy()
    mpishard.ZeRO2Optimizer(mpishard.SGD(lr=1e6), config).optimize(problem, progress=False)
    moved = np.abs(problem.start["second.weight"] - before).max()
    assert (moved == 0) == (scale == 1.0)
    assert moved < 0.01


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("scaled", ["", "scaled", "scaled before zero_grad"])
def test_a_scaled_loss_keeps_gradients_of_float16(mesh, scaled, zero):
    module = make("float16")
    config = ShardingConfiguration(mesh, loss_scale=2.0**24)
    optimizer = mpishard.torch.as_distributed(module, config, mpishard.SGD(lr=1e6), zero=zero)
    before = masters_of(optimizer)["second.weight"]
    loss = loss_of(module, 0, mesh.rank, mesh.size) * 1e-9
    loss = optimizer.scale(loss) if scaled else loss
    if scaled.endswith("zero_grad"):
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    moved = (masters_of(optimizer)["second.weight"] - before).abs().max()
    assert (moved > 0) == bool(scaled) and moved < 0.01
    assert optimizer.optimizer.steps == 1


@pytest.mark.parametrize("zero", [0, 2])
def test_a_state_that_is_loaded_between_two_passes_leaves_their_loss_scale(mesh, zero):
    """Which an overflow has halved since it was saved."""
    ends = []
    for loads in (False, True):
        module = make("double")
        config = ShardingConfiguration(mesh, loss_scale="dynamic")
        optimizer = mpishard.torch.as_distributed(module, config, mpishard.SGD(lr=0.1), zero=zero)
        state = optimizer.state_dict()
        for factor in (torch.inf, 1.0):
            with optimizer.no_sync():
                optimizer.scale(loss_of(module, 0, mesh.rank, mesh.size) * factor).backward()
            if loads and factor == 1:
                optimizer.load_state_dict(state)
            optimizer.scale(loss_of(module, 1, mesh.rank, mesh.size)).backward()
            optimizer.step()
        ends.append(module)
        optimizer.close()
    assert_same_parameters(*ends)


@pytest.mark.parametrize("kind", ["bfloat16", "mixed", "double", "complex"])
def test_masters_go_to_other_ranks_and_stages(mesh, comm, folder, kind):
    module = make(kind)
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=1)
    take_steps(mesh, module, optimizer, range(2))
    optimizer.save_checkpoint(folder)
    state, values, masters = optimizer.state_dict(), copy.deepcopy(module.state_dict()), masters_of(optimizer)
    some = comm.Split(comm.rank < max(1, comm.size - 1))
    with Mesh(some) as fewer:
        for zero, how in ((2, "checkpoint"), (3, "checkpoint"), (0, "state_dict"), (3, "state_dict")):
            other = make(kind, seed=4)
            again = mpishard.torch.as_distributed(other, fewer, RULE, zero=zero, **units_under(zero))
            if how == "checkpoint":
                again.load_checkpoint(folder)
            else:
                again.load_state_dict(state)
                with mpishard.torch.summon_full_parameters(other):
                    other.load_state_dict(values)  # values that are the masters' already leave them as they are
            torch.testing.assert_close(masters_of(again), masters, rtol=0, atol=0)
            with mpishard.torch.summon_full_parameters(other):
                torch.testing.assert_close(dict(other.state_dict()), dict(values), rtol=0, atol=0)
            take_steps(fewer, other, again, [2])
            again.close()
        if kind == "bfloat16":
            again = mpishard.torch.as_distributed(make(kind).float(), fewer, RULE)
            with pytest.raises(ValueError, match="master of .*shape .*none here"):
                again.load_state_dict(state)
            again.load_checkpoint(folder)
            torch.testing.assert_close(masters_of(again), masters, rtol=0, atol=0)
    some.Free()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_load_states_of_two_formats_are_refused_before_masters_are_gathered(mesh):
    module = make("bfloat16")
    of_torch = torch.optim.AdamW(module.parameters()).state_dict()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, **units_under(3))
    own = optimizer.state_dict()
    with pytest.raises(ValueError, match="load_state_dict, but format is"):
        optimizer.load_state_dict(own if mesh.rank else of_torch)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_what_is_written_to_parameters_is_what_steps(mesh, zero):
    module = make("bfloat16")
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.125), zero=zero, **units_under(zero))
    take_steps(mesh, module, optimizer, range(2))
    before = masters_of(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    with mpishard.torch.summon_full_parameters(module), torch.no_grad():
        module.first.weight[0].mul_(2)
        expected = module.first.weight[0].float()
    take_steps(mesh, module, optimizer, [2])
    after = masters_of(optimizer)
    assert torch.equal(after["first.weight"][0], expected)
    assert torch.equal(after["first.weight"][1:], before["first.weight"][1:])
    assert torch.equal(after["second.weight"], before["second.weight"])
    assert not torch.equal(before["second.weight"], before["second.weight"].bfloat16().float())


def test_a_method_leaves_its_result_in_parameters_of_another_dtype(mesh):
    module = make("bfloat16")
    problem = mpishard.torch.problem(module, losses, SAMPLES, SAMPLES, steps=3)
    result = mpishard.ZeRO1Optimizer(mpishard.LBFGSB(), mesh).optimize(problem, progress=False)
    assert result.stop_reason == "steps"  # between two points of a line search
    for name, p in module.named_parameters():
        assert torch.equal(p, torch.from_numpy(result.parameters[name]).to(p.dtype)), name


@pytest.mark.parametrize("zero", [0, 2])
def test_averages_take_the_place_of_parameters_of_another_dtype(mesh, zero):
    """Also where a save rounds them, and then the run goes on with what they were."""
    module, rule = make("mixed"), mpishard.AdamW(lr=1e-2, ema_decay=0.5)
    optimizer = mpishard.torch.as_distributed(module, mesh, rule, zero=zero)
    take_steps(mesh, module, optimizer, range(3))
    before, masters = {name: p.detach().clone() for name, p in module.named_parameters()}, masters_of(optimizer)
    with optimizer.optimizer.averaged_parameters():
        averages = masters_of(optimizer)
        for name, p in module.named_parameters():
            assert torch.equal(p, averages[name].to(p.dtype))
        assert not torch.equal(module.first.weight, before["first.weight"])
        optimizer.optimizer.state.consolidate()
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name]) and torch.equal(masters_of(optimizer)[name], masters[name])


@pytest.mark.mpi(min_size=2)
def test_an_average_after_which_all_raise_is_in_the_parameters(mesh, same_on_all):
    module, local = make("bfloat16"), mpishard.LocalSGDOptimizer(RULE, mesh, sync_every=2)
    optimizer = mpishard.torch.as_distributed(module, mesh, local)
    take_steps(mesh, module, optimizer, [0])
    (loss_of(module, 1, mesh.rank, mesh.size) * (np.nan if mesh.rank == 0 else 1.0)).backward()
    with pytest.raises(FloatingPointError, match="on rank 0"):
        optimizer.step()
    assert same_on_all(optimizer.parameters.flat)
    masters = masters_of(optimizer)
    assert all(torch.equal(p, masters[name].to(p.dtype)) for name, p in module.named_parameters())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_add_up_and_are_clipped_in_the_dtype_of_masters(mesh, zero):
    module, theirs = make("bfloat16"), make("bfloat16").float()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=zero, **units_under(zero))
    with optimizer.no_sync():
        loss_of(module, 0, mesh.rank, mesh.size).backward()
    loss_of(module, 0, mesh.rank, mesh.size).backward()
    norm = optimizer.clip_grad_norm_(1e-3)
    (2 * loss_of(theirs, 0, 0, 1)).backward()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e-3)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected, rtol=0.02, atol=0)
    optimizer.step()


def test_what_has_no_masters_is_refused_on_all_ranks(mesh):
    module = make("bfloat16")
    if mesh.rank == mesh.size - 1:
        module.second.to(torch.float8_e4m3fn)
    before = [p.data_ptr() for p in module.parameters()]
    with pytest.raises(TypeError, match="'second.weight' is float8_e4m3fn"):
        mpishard.torch.as_distributed(module, mesh, RULE)
    assert [p.data_ptr() for p in module.parameters()] == before
    assert module.first.weight.grad_dtype == torch.bfloat16
    if mesh.size > 1:
        module = make("bfloat16" if mesh.rank else "float16")
        with pytest.raises(ValueError, match="arguments of as_distributed"):
            mpishard.torch.as_distributed(module, mesh, RULE)
    with pytest.raises(ValueError, match="Muon: .*1 tensors that matrices"):
        mpishard.torch.as_distributed(make("complex"), mesh, mpishard.Muon(lr=0.1, matrices="between", rest=RULE))
