"""PyTorch modules on ranks, beside DistributedDataParallel of the same module."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import mpishard
from mpishard import (
    AdamW,
    Checkpoints,
    DDPOptimizer,
    LocalSGDOptimizer,
    OptimizationProblem,
    ShardingConfiguration,
    ZeRO2Optimizer,
)
from mpishard.compression import Int8Compressor

torch = pytest.importorskip("torch")
SAMPLES, BATCH = 48, 16
RULE = AdamW(lr=1e-2)


@pytest.fixture
def gloo(mesh, folder):
    """PyTorch's own ranks, in the same processes."""
    where = f"file://{folder}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=where, rank=mesh.rank, world_size=mesh.size)
    yield torch.nn.parallel.DistributedDataParallel
    torch.distributed.destroy_process_group()


def images():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 3, 8, 8, generator=random)
    return x, torch.randint(0, 5, (SAMPLES,), generator=random)


def words():
    x = torch.randint(0, 11, (SAMPLES, 6), generator=torch.Generator().manual_seed(1))
    return x, (x.sum(1) % 5).long()


def convolutional():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3),
        torch.nn.BatchNorm2d(6),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(24, 5),
    )


class Transformer(torch.nn.Module):
    """With an embedding that the output shares, a frozen scale, and a head that nothing uses."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(11, 16)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.unused = torch.nn.Linear(3, 2)
        self.scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.head = torch.nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.layers(self.tokens(x)).mean(1) * self.scale)[:, :5]


KINDS = {"convolutional": (convolutional, images), "transformer": (Transformer, words)}


def make(kind, rank=0):
    """The same module on all ranks, unless they have different seeds."""
    torch.manual_seed(3 + rank)
    make_module, make_data = KINDS[kind]
    return make_module(), *make_data()


def loss_of(module, x, y, own):
    return torch.nn.functional.cross_entropy(module(x[own]), y[own])


def samples_of(mesh, step):
    """This rank's samples of a step: equally many on each rank, as DistributedSampler does."""
    order = np.random.default_rng(step).permutation(SAMPLES)
    return order[: SAMPLES // 2 // mesh.size * mesh.size].reshape(mesh.size, -1)[mesh.rank]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_losses_are_those_of_ddp(mesh, gloo, kind, zero):
    module, x, y = make(kind)
    theirs = gloo(copy.deepcopy(module), find_unused_parameters=kind == "transformer")
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.01)
    ours, _, _ = make(kind, mesh.rank)  # those of rank 0 count
    optimizer = mpishard.torch.as_distributed(ours, mesh, RULE, zero=zero)
    history = []
    for step in range(12):
        own = samples_of(mesh, step)
        pair = []
        for each, which in ((theirs, adamw), (ours, optimizer)):
            which.zero_grad()
            loss = loss_of(each, x, y, own)
            loss.backward()
            which.step()
            pair.append(loss.item())
        history.append(pair)
    history = np.array(history)
    assert np.max(np.abs(history[:, 0] - history[:, 1])) < 1e-5
    losses = np.mean(mesh.world.allgather_object(history[:, 1]), 0)  # a rank alone may have three samples a step
    assert losses[-4:].mean() < losses[:4].mean()
    assert list(optimizer.parameters) == [name for name, p in module.named_parameters() if p.requires_grad]
    unused = ["unused.weight", "unused.bias"] if kind == "transformer" else []
    assert optimizer.unused_parameters == unused
    for name, p in ours.named_parameters():
        assert p.grad is None
        if p.requires_grad:
            assert p.data_ptr() == optimizer.parameters[name].ctypes.data


@pytest.mark.parametrize("zero", [0, 2])
def test_micro_batches_add_up(mesh, zero):
    """Two halves of a rank's samples, the first within no_sync, are one step with all of them."""
    steps = {}
    for parts in (1, 2):
        module, x, y = make("transformer")
        config = ShardingConfiguration(mesh, max_gradient_norm=0.1, minimum_parameter_group_size=64)
        optimizer = mpishard.torch.as_distributed(module, config, mpishard.SGD(lr=0.1, momentum=0.9), zero=zero)
        for step in range(3):
            halves = np.array_split(samples_of(mesh, step), parts)
            for own in halves[:-1]:
                with optimizer.no_sync():
                    (loss_of(module, x, y, own) * len(own)).backward()
            (loss_of(module, x, y, halves[-1]) * len(halves[-1])).backward()
            optimizer.step(count=SAMPLES // 2 // mesh.size * mesh.size)
        assert optimizer.optimizer.gradient_norm > 0.1
        steps[parts] = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    assert torch.allclose(steps[1], steps[2], atol=2e-5)


def test_gradients_are_dropped_as_in_pytorch(mesh):
    """By zero_grad of the optimizer and of the module, after passes that no step uses."""
    module, x, y = make("convolutional")
    module.eval()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1))
    own = samples_of(mesh, 0)
    before = optimizer.parameters.flat.copy()
    loss_of(module, x, y, own).backward()
    wanted = optimizer.parameters.gradients.flat  # after the sum, in the memory that p.grad shows
    assert module[0].weight.grad.data_ptr() == wanted.ctypes.data
    optimizer.step()
    once = optimizer.parameters.flat.copy()
    for drop in (optimizer.zero_grad, module.zero_grad):
        optimizer.parameters.flat[...] = before
        with optimizer.no_sync():
            loss_of(module, x, y, own[:1]).backward()
        drop()
        loss_of(module, x, y, own).backward()
        optimizer.step()
        assert np.array_equal(optimizer.parameters.flat, once)


@pytest.mark.parametrize("buffers", ["broadcast", "average", "local"])
def test_buffers(mesh, comm, same_on_all, buffers):
    module, x, y = make("convolutional")
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, buffers=buffers)
    alone = copy.deepcopy(module[1])
    inputs = []
    module[1].register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach().clone()))
    loss_of(module, x, y, samples_of(mesh, 0)).backward()
    alone(inputs[0])
    optimizer.step()
    means = np.array(comm.allgather(alone.running_mean.numpy().copy()))
    found = module[1].running_mean.numpy()
    wanted = {"broadcast": means[0], "average": means.mean(0), "local": means[mesh.rank]}[buffers]
    assert np.allclose(found, wanted, atol=1e-6)
    assert int(module[1].num_batches_tracked) == 1
    if buffers != "local":
        assert same_on_all(found)
    alike = module[1].running_var.fill_(1.5 + 2**-22).numpy().copy()  # the mean of three of them is another number
    optimizer.optimizer.state.consolidate()  # as each save does
    assert np.array_equal(module[1].running_var.numpy(), alike)
    module[1].running_var += mesh.rank
    optimizer.optimizer.state.consolidate()
    mean = {"broadcast": 0, "average": (mesh.size - 1) / 2, "local": mesh.rank}[buffers]
    assert np.allclose(module[1].running_var.numpy(), alike + mean, atol=1e-6)


def losses(module, samples):
    x, y = images()
    return torch.nn.functional.cross_entropy(module(x[samples]), y[samples], reduction="none")


def smooth():
    """A module without batch norm, whose losses do not depend on how a batch is cut."""
    torch.manual_seed(5)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
    module.register_buffer("seen", torch.zeros(2))
    module.register_forward_pre_hook(lambda module, given: setattr(module, "seen", module.seen + 1))
    return module


def problem(module, **changes):
    options = {"samples": SAMPLES, "batch_size": BATCH, "steps": 6, "seed": 2, **changes}
    return mpishard.torch.problem(module, losses, **options)


def alone():
    """The losses of PyTorch on one rank."""
    from mpishard.data.sampling import Sampler

    module, history = smooth(), []
    adamw = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.01)
    for step in range(1, 7):
        loss = losses(module, Sampler(SAMPLES, BATCH, 2).batch(step)).mean()
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        history.append(loss.item())
    return np.array(history)


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer])
def test_a_problem_has_the_losses_of_pytorch_alone(mesh, strategy, micro_batch_size):
    result = strategy(RULE, mesh).optimize(problem(smooth(), micro_batch_size=micro_batch_size), progress=False)
    assert np.allclose(result.loss_history, alone(), atol=1e-5)


@pytest.mark.parametrize("strategy", [DDPOptimizer, ZeRO2Optimizer])
def test_reproducible_runs_have_the_bits_of_one_rank(mesh, same_on_all, strategy):
    from mpi4py import MPI

    bits = []
    with mpishard.Mesh(MPI.COMM_SELF) as one:
        for each in (mesh, one):
            module = smooth()
            config = ShardingConfiguration(each, reproducible=True)
            strategy(RULE, config).optimize(problem(module, micro_batch_size=2), progress=False)
            bits.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy())
    assert np.array_equal(*bits)


def test_a_run_goes_on_with_its_buffers(mesh, folder):
    for steps in (3, 6):
        module = smooth()
        with Checkpoints(folder, mesh) as checkpoints:
            result = ZeRO2Optimizer(RULE, mesh).optimize(
                problem(module, steps=steps), progress=False, checkpoints=checkpoints, resume=True
            )
    assert result.resumed_steps == 3
    assert np.allclose(result.loss_history, alone(), atol=1e-5)
    assert module.seen.tolist() == [6.0, 6.0]
    other = smooth()
    other.register_buffer("more", torch.zeros(3))
    optimizer = mpishard.torch.as_distributed(other, mesh, RULE)
    with pytest.raises(ValueError, match="buffer 'more' has 3 float32 here, and it has none"):
        optimizer.load_checkpoint(folder)


def everything(mesh, strategy, steps, folder=None, kind=torch.optim.RAdam):
    """Parameters, their average, and losses of a run that is evaluated and stops early, and the result."""
    module = smooth()
    groups = [mpishard.ParameterGroup("*.bias", weight_decay=0, lr_factor=0.5)]
    rule = mpishard.torch.rule_of(kind, 1e-2, weight_decay=0.1, groups=groups, ema_decay=0.5)
    optimizer = strategy(rule, ShardingConfiguration(mesh, reproducible=True, max_gradient_value=0.01))

    def validation(parameters, samples):
        with torch.no_grad():
            return losses(module, samples + 30).sum()

    options = {
        "evaluate": mpishard.Evaluation(validation, SAMPLES - 30, every=2, averaged=True),
        "stop_early": mpishard.EarlyStopping(patience=2, min_delta=10.0),  # after the third evaluation
        "progress": False,
    }
    task = problem(module, samples=30, micro_batch_size=2, steps=steps)
    if folder is None:
        result = optimizer.optimize(task, **options)
    else:
        with Checkpoints(folder, mesh, best="validation loss") as checkpoints:
            result = optimizer.optimize(task, checkpoints=checkpoints, resume=True, **options)
    found = [result.loss_history, result.validation_losses]
    found.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy())
    with optimizer.averaged_parameters():
        found.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy())
    return [each.tobytes() for each in found], result


def test_what_happens_while_training_has_the_same_bits_under_another_strategy(mesh, folder):
    from mpi4py import MPI

    with mpishard.Mesh(MPI.COMM_SELF) as one:
        expected, alone = everything(one, DDPOptimizer, 9)
    for steps, strategy in ((3, DDPOptimizer), (9, ZeRO2Optimizer)):
        found, result = everything(mesh, strategy, steps, folder)
    assert found == expected
    assert (result.steps, result.stop_reason) == (alone.steps, alone.stop_reason) == (6, "patience")
    mesh.world.barrier()
    best = alone.validation_steps[np.argmin(alone.validation_losses)]
    assert (folder / "best").resolve().name == f"step-{best:08d}"


@pytest.mark.parametrize("kind", ["local", "compressed"])
def test_slow_networks(mesh, same_on_all, kind):
    module = smooth()
    if kind == "local":
        config = ShardingConfiguration(mesh)
        rule = LocalSGDOptimizer(RULE, config, sync_every=3)
    else:
        config, rule = ShardingConfiguration(mesh, gradient_compressor=Int8Compressor()), RULE
    optimizer = mpishard.torch.as_distributed(module, config, rule)
    x, y = images()
    first = None
    for step in range(9):
        loss = loss_of(module, x, y, samples_of(mesh, step % 2))
        loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
    optimizer.optimizer.synchronize_optimizer_state()
    assert loss.item() < first
    assert same_on_all(optimizer.parameters.flat)


def test_the_state_goes_to_a_file_of_pytorch(mesh, folder):
    module, x, y = make("convolutional")
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=1)
    values = []
    for step in range(4):
        if step == 2:
            saved = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            if mesh.rank == 0:
                torch.save(saved, folder / "state.pt")
            mesh.world.barrier()
        loss_of(module, x, y, samples_of(mesh, step)).backward()
        optimizer.step()
        values.append(optimizer.parameters.flat.copy())
    saved = torch.load(folder / "state.pt", weights_only=True)
    again = make("convolutional", 1)[0]
    again.load_state_dict(saved["model"])
    optimizer = mpishard.torch.as_distributed(again, mesh, RULE, zero=2)
    optimizer.load_state_dict(saved["optimizer"])
    for step in (2, 3):
        loss_of(again, x, y, samples_of(mesh, step)).backward()
        optimizer.step()
    assert np.allclose(optimizer.parameters.flat, values[3], atol=1e-6)
    mesh.world.barrier()


def test_formats_and_compiled_modules(mesh):
    """channels_last, bfloat16 under autocast, and torch.compile: with the names of the plain module."""
    module, x, y = make("convolutional")
    plain = mpishard.torch.as_distributed(module, mesh, RULE)
    other = make("convolutional")[0].to(memory_format=torch.channels_last)
    compiled = torch.compile(other, backend="eager")
    optimizer = mpishard.torch.as_distributed(compiled, mesh, RULE)
    assert list(optimizer.parameters) == list(plain.parameters)
    own = samples_of(mesh, 0)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = loss_of(compiled, x.to(memory_format=torch.channels_last), y, own)
    rounded.backward()
    loss_of(module, x, y, own).backward()
    plain.step()
    optimizer.step()
    assert optimizer.parameters.dtype == np.float32
    assert np.allclose(optimizer.parameters.flat, plain.parameters.flat, atol=0.03)


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


def test_the_problem_is_one_of_mpishard(mesh):
    assert isinstance(problem(smooth()), OptimizationProblem)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_an_optimizer_of_pytorch_with_its_scheduler(mesh, gloo, zero):
    """Its steps, with a weight decay of a group and the rates of a scheduler, are those under DDP."""
    runs = []
    for wrap in (gloo, None):
        module, x, y = make("convolutional")
        groups = [{"params": module[0].parameters()}, {"params": module[1].parameters(), "weight_decay": 0.0}]
        groups.append({"params": module[5].parameters()})
        optimizer = torch.optim.RAdam(groups, lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9)
        if wrap is not None:
            forward = wrap(module)
        else:
            forward, optimizer = module, mpishard.torch.as_distributed(module, mesh, optimizer, zero=zero)
        history = []
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(forward, x, y, samples_of(mesh, step))
            loss.backward()
            optimizer.step()
            scheduler.step()
            groups[2]["lr"] = 1e-2 / (1 + step)
            history.append(loss.item())
        runs.append(history)
    assert np.allclose(*runs, atol=1e-5)


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


def test_workers_that_leave_and_come_change_no_bit(mesh):
    """The buffer, which counts this rank's forward passes, is that of rank 0 for those who come."""
    from mpi4py import MPI

    from mpishard import ElasticOptimizer

    bits = []
    with mpishard.Mesh(MPI.COMM_SELF) as one:
        config = ShardingConfiguration(one, reproducible=True)
        module = smooth()
        DDPOptimizer(RULE, config).optimize(problem(module, micro_batch_size=2), progress=False)
        bits.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy())
    module = smooth()
    config = ShardingConfiguration(mesh, reproducible=True)
    optimizer = ElasticOptimizer(ZeRO2Optimizer(RULE, config))

    def resize(state):
        if state.step in (2, 4):
            optimizer.resize(1 if state.step == 2 else mesh.size)

    optimizer.optimize(problem(module, micro_batch_size=2), callback=resize, progress=False)
    bits.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy())
    assert np.array_equal(*bits)
    seen = mesh.world.allgather_object(module.seen.tolist())
    assert len(set(map(tuple, seen))) == 1 and seen[0][0] > 6
