"""PyTorch modules whose parameters are divided over the ranks, and what is wrong with a module on one rank."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import pickle

import numpy as np
import pytest

import mpishard
from mpishard import Mesh, ShardingConfiguration
from mpishard.compression import Int8Compressor

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_models import RULE, assert_same_parameters, convolutional, images, loss_of, samples_of, smooth  # noqa: E402

from mpishard.torch.units import UnitCall  # noqa: E402

# PyTorch modules whose parameters are divided over the ranks, unit by unit, beside the same module kept whole.

WIDTH = 8
BATCH = 6


class Block(torch.nn.Module):
    """With a frozen layer, a parameter that nothing uses, and a value besides its tensor."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(3 * WIDTH, WIDTH)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x) + self.frozen(x)))), {"rows": len(x)}


class Blocks(torch.nn.Module):
    """With weights that two blocks share, an embedding that is the head, a block that is used twice, and the dtype of
    parameters that are freed."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.tokens = torch.nn.Embedding(11, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        # A pass within a pass reaches a parameter once, here and under DistributedDataParallel.
        if not reentrant:
            self.blocks[2].up.weight = self.blocks[0].up.weight
        self.head = torch.nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, samples):
        x = self.tokens(samples)
        for block in [*self.blocks, *([] if self.reentrant else [self.blocks[1]])]:
            x, _ = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(1).to(self.blocks[3].unused.dtype)) * self.scale


def layers(child):
    return isinstance(child, (Block, torch.nn.Linear))


def fresh(reentrant=None, seed=0):
    torch.manual_seed(seed)
    return Blocks(reentrant).double()


def take_steps(mesh, module, optimizer, steps):
    """Steps of two samples of tokens on each rank; every second one in two passes, every third with a pair of calls."""
    for step in steps:
        optimizer.zero_grad()
        for last in (False, True)[1 - step % 2 :]:
            tokens = torch.from_numpy(np.random.default_rng((step, mesh.data.rank, last)).integers(0, 11, (BATCH, 5)))
            with contextlib.nullcontext() if last else optimizer.no_sync():
                outputs = module(tokens)
                if step % 3 == 2:
                    outputs = outputs + module(tokens.flip(0))
                torch.nn.functional.cross_entropy(outputs, tokens[:, 0]).backward()
        optimizer.step()


def held_bytes(module):
    """Bytes of the parameters that this rank has, without those on the device meta."""
    storages = [p.untyped_storage() for p in module.parameters() if not p.is_meta]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(("reentrant", "units"), [(None, Block), (None, layers), (False, Block), (True, layers)])
@pytest.mark.quick
def test_steps_are_those_of_a_whole_module(mesh, reentrant, units):
    """The parameters that exist at once are those outside of all blocks, and two blocks."""
    whole, module = fresh(reentrant), fresh(reentrant, seed=mesh.rank)  # those of rank 0 count
    expected = mpishard.torch.as_distributed(whole, mesh, RULE)
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=units)
    held = []
    for block in module.blocks:
        block.norm.register_forward_hook(lambda *_: held.append(held_bytes(module)))
    module.blocks[0].up.bias.register_hook(lambda _: held.append(held_bytes(module)))
    steps = [0, 3, 4] if reentrant else range(5)  # a second call is a second pass within a pass
    take_steps(mesh, whole, expected, steps)
    take_steps(mesh, module, optimizer, steps)
    assert held_bytes(module) == 0
    tied = module.tokens.weight.numel() + (0 if reentrant else module.blocks[0].up.weight.numel())
    block = sum(p.numel() for p in module.blocks[1].parameters())
    assert 0 < max(held) <= 8 * (tied + 2 * block)
    optimizer.close()
    assert_same_parameters(module, whole)


@pytest.mark.quick
def test_memory_is_that_of_the_estimate(mesh):
    """Measured where a layer has been gathered, and where autograd has a gradient that is not in its bucket yet."""
    layers = [torch.nn.Linear(64, 64) for _ in range(8)]
    module = torch.nn.Sequential(*layers, torch.nn.Linear(64, 2))
    units = lambda child: child in layers  # noqa: E731
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=units)
    parameters, state, measured = optimizer.parameters, optimizer.optimizer.state, []

    def measure(*gradients):
        held = held_bytes(module) + parameters.sharded.shard.nbytes
        measured.append(held + state.nbytes + state.gradient_bytes + sum(each.nbytes for each in gradients))

    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: measure())
    for p in module.parameters():
        p.register_hook(measure)
    for _ in range(3):
        module(torch.ones(3, 64)).sum().backward()
        optimizer.step()
    layer, root = 4 * 64 * 65, 4 * 2 * 65
    size = sum(p.numel() for p in module.parameters())
    kept = mpishard.estimate.model_state_bytes(size, mesh.size, 3, parameter_bytes=4, gradient_bytes=4, state_bytes=8)
    expected = kept + (root + layer) + layer + 4 * 64 * 64  # gathered units, a bucket, the gradient of a weight
    assert abs(max(measured) - expected) <= 0.1 * expected


def test_layers_are_units_by_their_size(mesh):
    large = [torch.nn.Linear(256, 256) for _ in range(4)]
    module = torch.nn.Sequential(torch.nn.Linear(2, 256), torch.nn.Sequential(*large), torch.nn.Linear(256, 2))
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3)
    shared = optimizer.parameters.sharded
    module[1][1].register_forward_pre_hook(lambda *_: names.update(shared.views))
    for _ in range(2):
        names = set()
        module(torch.ones(3, 2)).sum().backward()
        assert names == {f"{path}.{kind}" for path in ("0", "1.1", "2") for kind in ("weight", "bias")}
        optimizer.step()


def test_no_rank_ever_has_the_whole_module(mesh):
    expected = fresh()
    wanted = dict(expected.named_parameters(remove_duplicate=False))
    with torch.device("meta"):
        module = fresh()
    names = {id(p): name for name, p in module.named_parameters()}
    held = []

    def fill(layer):
        held.append(held_bytes(module))
        for p in layer.parameters(recurse=False):
            p.copy_(wanted[names[id(p)]] + mesh.rank)
        for key, buffer in layer.named_buffers(recurse=False):
            buffer.copy_(expected.get_buffer(key))

    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=Block, materialize=fill)
    assert 0 < max(held) < held_bytes(expected) / 2
    with mpishard.torch.summon_full_parameters(module):
        found = module.state_dict()
    assert found.keys() == expected.state_dict().keys()
    plain = mpishard.torch.as_distributed(expected, mesh, RULE)
    take_steps(mesh, expected, plain, range(2))
    take_steps(mesh, module, optimizer, range(2))
    optimizer.close()
    torch.testing.assert_close(dict(module.state_dict()), dict(expected.state_dict()), rtol=0, atol=1e-12)

    def fails(layer):
        raise ArithmeticError("no values")

    with torch.device("meta"):
        module = fresh()
    with pytest.raises(ArithmeticError if mesh.rank == mesh.size - 1 else Exception, match="no values"):
        chosen = fails if mesh.rank == mesh.size - 1 else fill
        names = {id(p): name for name, p in module.named_parameters()}
        mpishard.torch.as_distributed(module, mesh, RULE, zero=3, materialize=chosen)
    with torch.device("meta"):
        module = fresh()
    with pytest.raises(Exception, match="materialize has left .* without values"):
        mpishard.torch.as_distributed(module, mesh, RULE, zero=3, materialize=lambda layer: None)


class Quantized(torch.nn.Module):
    """Frozen weights of two dtypes, with an adapter that is trained, or without parameters that are."""

    def __init__(self, rank):
        super().__init__()
        self.base = torch.nn.Parameter(torch.arange(35, dtype=torch.int8).reshape(5, 7), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.linspace(-0.02, 0.02, 5).double(), requires_grad=False)
        self.shift = torch.nn.Parameter(torch.full((7,), 0.05, dtype=torch.bfloat16), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.full((rank, 7), 0.1).double()) if rank else None

    def forward(self, x):
        weight = self.base * self.scale[:, None] + self.shift
        adapted = 0 if self.adapter is None else x @ self.adapter.T @ self.adapter
        return (x + x @ weight.T @ weight + adapted).tanh()


def test_frozen_parameters_are_divided_and_come_back(mesh, folder):
    def fresh():
        return torch.nn.Sequential(*(Quantized(rank) for rank in (0, 2, 0, 1)))

    whole, module = fresh(), fresh()
    for p in module.parameters() if mesh.rank else ():
        p.detach().zero_()  # those of rank 0 count
    before = {name: values.clone() for name, values in whole.state_dict().items()}
    expected = mpishard.torch.as_distributed(whole, mesh, RULE)
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=Quantized)
    frozen = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
    shares = optimizer._state.units.frozen_bytes
    assert abs(shares - frozen / mesh.size) <= 4 and sum(mesh.world.allgather_object(shares)) == frozen
    assert held_bytes(module) == 0
    held = []
    for each in module:
        each.register_forward_pre_hook(lambda *_: held.append(held_bytes(module)))
    x = torch.full((2, 7), 0.3).double()
    for each, own in ((whole, expected), (module, optimizer)):
        for _ in range(3):
            each(x * (1 + mesh.rank)).sum().backward()
            own.step()
    assert 0 < max(held) <= frozen / 4 + 2 * 7 * 8
    optimizer.save_checkpoint(folder)
    optimizer.close()
    assert module.state_dict().keys() == before.keys()
    for name, values in module.state_dict().items():
        assert values.dtype == before[name].dtype
        if "adapter" in name:
            assert torch.allclose(values, whole.state_dict()[name], rtol=0, atol=1e-12)
        else:
            assert torch.equal(values, before[name])
    expected.load_checkpoint(folder)  # no frozen parameter is in it
    assert torch.equal(whole[1].adapter, module[1].adapter)


def test_units_without_trained_parameters_are_filled_too(mesh):
    with torch.device("meta"):
        norm = torch.nn.BatchNorm1d
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), norm(2), norm(2, affine=False))
        module[1].requires_grad_(False)

    def fill(layer):
        for each in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
            each.fill_(2)

    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=norm, materialize=fill)
    with mpishard.torch.summon_full_parameters(module):
        assert module[2].running_var.tolist() == module[1].running_var.tolist() == module[1].weight.tolist() == [2, 2]
    module(torch.ones(3, 2)).sum().backward()
    optimizer.step()


@pytest.mark.quick
def test_a_run_continues_on_other_ranks_with_another_stage(mesh, comm, folder):
    module = fresh()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=Block)
    take_steps(mesh, module, optimizer, range(2))
    optimizer.save_checkpoint(folder)
    state = optimizer.state_dict()
    with mpishard.torch.summon_full_parameters(module):
        values = {name: value.clone() for name, value in module.state_dict().items()}
    results = []
    some = comm.Split(comm.rank < max(1, comm.size - 1))
    with Mesh(some) as fewer:
        for zero, how in ((1, "checkpoint"), (3, "checkpoint"), (3, "state_dict")):
            other = fresh()
            for p in other.parameters():
                p.detach().mul_(0 if p.requires_grad else 1)
            units = {"shard_units": layers} if zero == 3 else {}
            again = mpishard.torch.as_distributed(other, fewer, RULE, zero=zero, **units)
            if how == "checkpoint":
                again.load_checkpoint(folder)
            else:
                with mpishard.torch.summon_full_parameters(other):
                    other.load_state_dict(values)
                again.load_state_dict(state)
            assert again.optimizer.steps == 2
            with mpishard.torch.summon_full_parameters(other):
                for name, value in other.state_dict().items():
                    assert torch.equal(value, values[name]), name
            take_steps(fewer, other, again, range(2, 4))
            again.close()
            results.append(torch.cat([p.detach().reshape(-1) for p in other.parameters()]))
            assert torch.allclose(results[-1], results[0], rtol=0, atol=1e-12)
    some.Free()


def test_parameters_are_looked_at_and_changed(mesh):
    module = fresh()
    start = module.tokens.weight.detach().clone()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=Block)
    for writeback in (False, True):
        with mpishard.torch.summon_full_parameters(module, writeback=writeback), torch.no_grad():
            assert torch.equal(module.tokens.weight, start)
            module.tokens.weight += 1 + mesh.rank
            module(torch.zeros(1, 2, dtype=torch.long))  # frees nothing
            assert len(module.blocks[3].up.weight.sum(0)) == WIDTH
            with pytest.raises(ValueError, match="a step within summon_full_parameters"):
                optimizer.step()
    with mpishard.torch.summon_full_parameters(module):
        assert torch.equal(module.tokens.weight, start + 1)
    for each in (module, module.blocks[0].up, module.blocks[0].frozen):
        with pytest.raises(RuntimeError, match=r"state_dict\(\).*summon_full_parameters"):
            each.state_dict()
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\).*summon_full_parameters"):
        module.load_state_dict({})
    for each, loss in (
        (optimizer.close, "be undone at its end"),
        (lambda: optimizer.load_checkpoint("nowhere"), "be undone at its end"),
        (lambda: optimizer.save_checkpoint("nowhere"), "save the values from before it"),
    ):
        message = rf"\(\) within summon_full_parameters would {loss}"
        with pytest.raises(ValueError, match=message), mpishard.torch.summon_full_parameters(module):
            each()
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).half())
    halves = mpishard.torch.as_distributed(mixed, mesh, RULE, zero=3, shard_units=torch.nn.Linear)
    for each in (module, mixed):  # arrays of NumPy keep the memory that they share
        with mpishard.torch.summon_full_parameters(each), torch.no_grad():
            arrays = {name: p.detach().numpy() for name, p in each.named_parameters()}
            before = copy.deepcopy(arrays)
        assert held_bytes(each) == 0
        with mpishard.torch.summon_full_parameters(each), torch.no_grad():
            for name, p in each.named_parameters():
                assert np.array_equal(p.detach(), before[name])
                p += 1
        with mpishard.torch.summon_full_parameters(each), torch.no_grad():
            for name, p in each.named_parameters():
                assert np.array_equal(p.detach(), before[name] + 1) and np.array_equal(arrays[name], before[name])
    take_steps(mesh, module, optimizer, [0])
    halves.close()
    assert np.array_equal(mixed[1].bias.detach(), before["1.bias"] + 1)
    whole = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="module that as_distributed has made"):
        mpishard.torch.summon_full_parameters(whole)
    mpishard.torch.as_distributed(whole, mesh, RULE)


def values_asked_for(module, p):
    """Uses of a parameter and of a module with it, by name."""
    x = torch.ones(1, 2)
    return {
        "print": lambda: print(p),
        "sum": lambda: p.sum(),
        "data": lambda: p.data,
        "detach": lambda: p.detach(),
        "array": lambda: np.asarray(p),
        "view": lambda: p.view_as(p).sum(),
        "init": lambda: torch.nn.init.normal_(p),
        "assign": lambda: setattr(p, "data", torch.ones(2, 2)),
        "to": lambda: module.to(torch.float64),
        "list": lambda: torch.cat([x, *module.parameters()]),
        "function": lambda: torch.nn.functional.linear(x, p),
        "copy": lambda: copy.deepcopy(module[0]),
    }


@pytest.mark.parametrize("on_meta", [False, True])
def test_freed_parameters_refuse_what_needs_values(mesh, on_meta):
    class Tagged(torch.nn.Parameter):
        """As libraries mark parameters, with a class and attributes."""

    with torch.device("meta" if on_meta else "cpu"):
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        p = module[0].weight = Tagged(torch.ones(2, 2))
    p.tag = 5
    fill = {"materialize": lambda layer: [torch.nn.init.ones_(each) for each in layer.parameters(recurse=False)]}
    options = {"shard_units": torch.nn.Linear, **(fill if on_meta else {})}
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, **options)
    x = torch.ones(1, 2)
    message = "^parameter '0.weight' .*zero=3 .*unit '0' .*summon_full_parameters"
    for what, use in values_asked_for(module, p).items():
        with pytest.raises(RuntimeError, match=message):
            use()
            pytest.fail(what)
    assert isinstance(p, Tagged) and p.tag == 5 and type(p).__name__ == "Tagged"
    assert (p.shape, p.dtype, p.device.type, p.dim(), len(p)) == ((2, 2), torch.float32, "cpu", 2, 2)
    assert sum(each.numel() for each in module.parameters()) == 12 and p.is_leaf and p.grad is None
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, module.parameters()))
    assert torch.equal(torch.zeros_like(p), p.new_zeros(2, 2))
    with pytest.raises(RuntimeError, match="save_checkpoint"):
        pickle.dumps(p)
    with mpishard.torch.summon_full_parameters(module):
        assert type(p) is Tagged and torch.equal(p, torch.ones(2, 2))
        for saves in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled: .*save_checkpoint"):
                saves(module)
    fails = module[1].register_forward_hook(lambda *_: p.sum())
    with pytest.raises(RuntimeError, match=message):
        module(x)
    fails.remove()
    module(x).sum().backward()
    optimizer.close()
    assert type(p) is Tagged and p.tag == 5 and type(module[1].weight) is torch.nn.Parameter
    copy.deepcopy(module)(x)


def test_hooks_and_passes_find_freed_parameters(mesh):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=torch.nn.Linear)
    x, p, found = torch.ones(1, 2), module[0].weight, []
    p.register_hook(lambda g: found.append(g.shape))
    p.register_post_accumulate_grad_hook(lambda each: found.append(each is p))
    of_all = torch.autograd.graph.register_multi_grad_hook(list(module.parameters()), lambda g: found.append(len(g)))
    module(x).sum().backward()
    optimizer.step()
    assert found == [(2, 2), 4, True]
    of_all.remove()  # PyTorch has none in autograd.grad
    assert torch.autograd.grad(module(x).sum(), p)[0].shape == (2, 2)
    optimizer.zero_grad()
    module(x).sum().backward(inputs=[p])
    optimizer.step()
    assert optimizer.unused_parameters == ["0.bias", "1.weight", "1.bias"]


def test_uses_without_a_call_of_their_unit_say_so(mesh):
    module = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=torch.nn.Linear)
    for training in (True, False):
        module.train(training)
        with pytest.raises(RuntimeError, match=r"its unit 'self_attn\.out_proj'"):
            module(torch.ones(1, 3, 4))
    with pytest.raises(RuntimeError, match="without calling the module itself"):
        module.norm1(torch.ones(1, 3, 4))
    del optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match="collected as garbage; .*close"):
        module(torch.ones(1, 3, 4))


def test_a_graph_leaves_memory_with_its_loss(mesh):
    """Not only when Python next looks for cycles, which found one unit at a time."""
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=torch.nn.Linear)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            module(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        calls = [each for each in gc.get_objects() if type(each) is UnitCall]
        assert not [each for each in calls if each.unit.module in module]  # other tests have left some
    finally:
        gc.enable()


def test_what_the_backward_pass_begins_with_is_gathered_once(mesh):
    """The unit of the module itself, and the last one within it.

    Between the passes their parameters are refused as all others are, and after a pass that failed on one rank all
    ranks gather the same units.
    """
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    units = lambda child: child in (module[0], module[1], module[2])  # noqa: E731
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=units)
    x, kept = torch.ones(2, 4), 4 * (20 + 40 % 16 + 20 + 60 % 16)  # aligned to 16 elements as in a flat array
    gathers = lambda: mesh.ledger.totals["data", "all_gather", "parameters"].calls  # noqa: E731

    def backward(loss, expected):
        before = gathers()
        loss.backward()
        assert gathers() - before == expected and held_bytes(module) == 0

    for _ in range(2):
        before = gathers()
        loss = module(x).sum()
        assert gathers() - before == 4 and held_bytes(module) == kept
        for layer in module:
            with pytest.raises(RuntimeError, match="has no values here"):
                layer.weight.sum()
        backward(loss, 2)
        optimizer.step()
    loss = module(x).sum()
    with mpishard.torch.summon_full_parameters(module):
        assert all(layer.weight.sum() for layer in module)
    backward(loss, 4)
    optimizer.step()
    loss = module(x).sum()
    with torch.no_grad():
        module(x)
    backward(loss, 4)
    optimizer.step()
    for loss in (module(x).sum(), None):  # a pass that fails on one rank, with and without an earlier one
        fails = module[3].register_forward_hook(lambda *_: 1 // mesh.rank and None)
        with pytest.raises(ZeroDivisionError) if mesh.rank == 0 else contextlib.nullcontext():
            module(x)
        fails.remove()
        if loss is None:
            backward(module(x).sum(), 2)
        else:
            backward(loss, 4)
        optimizer.step()
    loss = module(x).sum()
    if mesh.rank == 0:
        optimizer.zero_grad()
    backward(loss, 2)
    optimizer.step()
    arrays = []
    looks = module[2].register_forward_pre_hook(lambda layer, *_: arrays.append(layer.weight.detach().numpy()))
    backward(module(x).sum(), 2)
    looks.remove()
    optimizer.parameters.use(["2.weight"])
    assert np.array_equal(module[2].weight.detach(), arrays[0])
    optimizer.step()
    module(x)
    optimizer.close()
    assert held_bytes(module) == 4 * 80
    module(x).sum().backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_ranks_that_use_other_layers_take_no_step(comm, frozen):
    """As many of one size, which MPI takes for each other."""
    if comm.size == 1:
        pytest.skip("needs two ranks")
    module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH).requires_grad_(not frozen) for _ in range(4)))
    module.append(torch.nn.Linear(WIDTH, 1))

    def loss(left_out):
        x = torch.ones(1, WIDTH)
        for number, layer in enumerate(module):
            x = x if number == left_out else layer(x)
        return x.sum()

    differ = r"unit \d+ in order is that of '2.weight' on rank 0, that of '1.weight' on ranks? 1"
    for debug in (False, True):
        with Mesh(comm, debug=debug) as mesh:
            config = ShardingConfiguration(mesh, nonfinite_gradients="ignore")
            optimizer = mpishard.torch.as_distributed(module, config, RULE, zero=3, shard_units=torch.nn.Linear)
            for left_out in range(4):
                loss(left_out).backward()
                optimizer.step()
            before = optimizer.parameters.gather()
            other = 1 if mesh.rank == 0 else 2
            with pytest.raises(mpishard.CollectiveMismatchError, match=differ):
                found = loss(other)
                assert not debug
                found.backward()
            optimizer.zero_grad()
            with pytest.raises(mpishard.CollectiveMismatchError, match=differ):
                loss(3).backward()
                with torch.no_grad():
                    loss(other)
                optimizer.step()
            np.testing.assert_array_equal(optimizer.parameters.gather(), before)
            optimizer.zero_grad()
            loss(3).backward()
            optimizer.step()
            optimizer.close()


class Kept:
    """What is no tensor, and has one."""

    def __init__(self, x):
        self.x = x


class Returns(torch.nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.linear, self.wrap = torch.nn.Linear(WIDTH, 1), wrap

    def forward(self, x):
        return self.wrap(self.linear(x))


def test_units_may_return_objects_and_are_refused_where_no_tensor_is_found(mesh):
    x, modules = torch.ones(2, WIDTH).double(), []
    for zero in (0, 3):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), Returns(Kept)).double()
        units = {"shard_units": Returns} if zero else {}
        optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=zero, **units)
        for _ in range(2):
            module(x).x.sum().backward()
            optimizer.step()
        if zero:
            module[1].wrap = lambda _: None
            with pytest.raises(TypeError, match="unit '1' returned None"):
                module(x)
            assert held_bytes(module) == 0
            with torch.no_grad():
                module(x)
        optimizer.close()
        modules.append(module)
    assert_same_parameters(*modules)
    with contextlib.closing(mpishard.torch.as_distributed(module[0], mesh, RULE, zero=3)):
        for transform in (torch.func.vmap(module[0]), lambda x: torch.func.jvp(module[0], (x,), (x,))):
            with pytest.raises(RuntimeError, match="within a transform .*zero=2"):
                transform(x)


def test_conversions_that_change_nothing_leave_divided_parameters_as_they_are(mesh, folder):
    """Among them one of one element, which is saved."""
    module = torch.nn.Linear(WIDTH, 1).double()
    rule = torch.optim.AdamW(module.parameters(), lr=1e-2)
    optimizer = mpishard.torch.as_distributed(module, mesh, rule, zero=3)
    module.to("cpu").double().to(torch.float64).cpu()
    module(torch.ones(2, WIDTH).double()).sum().backward()
    optimizer.step()
    before = optimizer.parameters.gather()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.save_checkpoint(folder)
    optimizer.load_checkpoint(folder)
    np.testing.assert_array_equal(optimizer.parameters.gather(), before)
    with pytest.raises(RuntimeError, match="'weight' has no values here"):
        module.float()
    optimizer.close()


def test_passes_within_one_no_sync_may_leave_units_unused(mesh):
    whole, module = fresh(), fresh()
    expected = mpishard.torch.as_distributed(whole, mesh, RULE)
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=Block)
    tokens = torch.arange(10).reshape(2, 5)
    for each, own in ((whole, expected), (module, optimizer)):
        for _ in range(2):
            with own.no_sync():
                for block in (3, 0, 2):
                    left_out, each.blocks[block].forward = each.blocks[block].forward, lambda x: (x, {})
                    each(tokens).pow(2).sum().backward()
                    each.blocks[block].forward = left_out
            each(tokens).sum().backward()
            own.step()
    optimizer.close()
    assert_same_parameters(module, whole)


def test_passes_take_and_return_dataclasses(mesh):
    """With a field that has no value, and the class itself."""

    @dataclasses.dataclass
    class Given:
        x: object
        cache: object = dataclasses.field(init=False)

    class Layer(torch.nn.Linear):
        def forward(self, given, kind):
            return kind(super().forward(given.x))

    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Layer(2, 2), Layer(2, 2)

        def forward(self, x):
            return self.second(self.first(Given(x), Given), Given).x

    module = Pair()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=Layer)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not optimizer.unused_parameters


@pytest.mark.parametrize("zero", [2, 3])
def test_parameters_may_be_scalars(mesh, zero):
    class Scaled(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.scale = torch.nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            return super().forward(x) * self.scale

    module = Scaled()
    optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=1.0, momentum=0.5), zero=zero)
    for _ in range(2):
        module(torch.zeros(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match=r"p\.grad is not available"):
            module.scale.grad.sum()
        optimizer.step()
    optimizer.close()
    assert module.scale.shape == ()


def test_a_pass_that_fails_leaves_nothing_gathered(mesh):
    module, expected = fresh(), fresh()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3, shard_units=Block)
    block, tokens = module.blocks[1], torch.zeros(1, 2, dtype=torch.long)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(IndexError):
        module(torch.full((1, 2), 12))
    for hook, fails, error in (
        (block.norm.register_forward_hook, lambda *_: 1 / 0, ZeroDivisionError),
        (block.up.bias.register_hook, lambda _: 1 / 0, ZeroDivisionError),
        (block.norm.register_forward_hook, interrupt, KeyboardInterrupt),
    ):
        registered = hook(fails)
        with pytest.raises(error):
            module(tokens).sum().backward()
        registered.remove()
        if hook == block.up.bias.register_hook or fails is interrupt:
            optimizer.zero_grad()
        assert held_bytes(module) == 0
    plain = mpishard.torch.as_distributed(expected, mesh, RULE)
    take_steps(mesh, expected, plain, range(2))
    take_steps(mesh, module, optimizer, range(2))
    optimizer.close()
    assert_same_parameters(module, expected)


def test_what_divided_parameters_cannot_do_is_refused(mesh):
    module = fresh()
    for arguments, kind, message in (
        ({"shard_units": "size"}, ValueError, 'must be "auto", a class'),
        ({"shard_units": torch.nn.Conv2d}, ValueError, "no submodule Conv2d"),
        ({"shard_units": torch.nn.ModuleList}, ValueError, "'blocks' is a ModuleList"),
        ({"zero": 2, "shard_units": Block}, ValueError, "shard_units .*zero=3"),
        ({"shard_units": 3}, TypeError, "shard_units must be"),
        ({"shard_units": module.blocks}, TypeError, "shard_units must be"),
        ({"materialize": 5}, TypeError, "materialize .*got 5"),
    ):
        with pytest.raises(kind, match=message):
            mpishard.torch.as_distributed(module, mesh, RULE, **{"zero": 3, **arguments})
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=3)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(RuntimeError, match="create_graph=True under zero=3"):
        torch.autograd.grad(module(tokens).sum(), module.blocks[0].up.bias, create_graph=True)
    optimizer.zero_grad()
    assert held_bytes(module) == 0
    with pytest.raises(ValueError, match="trains this module.*close"):
        mpishard.torch.as_distributed(module, mesh, RULE, zero=1)
    with pytest.raises(ValueError, match="all ranks make every forward pass"):
        mpishard.torch.join(optimizer).__enter__()
    del optimizer
    with pytest.raises(ValueError, match="'tokens.weight' has no values: .*close"):
        mpishard.torch.as_distributed(module, mesh, RULE)


@pytest.mark.mpi(min_size=2)
def test_a_module_that_is_refused_keeps_its_values(mesh):
    """Rules that differ are found when the parameters are divided already."""
    module = fresh()
    with pytest.raises(ValueError, match="settings, but lr"):
        mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=1.0 + mesh.rank), zero=3)
    assert_same_parameters(module, fresh(), atol=0.0)
    mpishard.torch.as_distributed(module, mesh, RULE)


@pytest.mark.parametrize("called", [False, True])
def test_compiled_modules(mesh, recwarn, called):
    """torch.compile leaves the hooks to Python, without a warning, also if the module was called before and after."""
    torch.compiler.reset()
    whole, module = fresh(), fresh()
    compiled = torch.compile(module, backend="eager", dynamic=False)
    if called:
        compiled(torch.zeros(BATCH, 5, dtype=torch.long))
    for options in ({"zero": 3, "shard_units": Block}, *([{"zero": 1}, {"zero": 3}] * called)):
        expected = mpishard.torch.as_distributed(whole, mesh, RULE)
        optimizer = mpishard.torch.as_distributed(compiled, mesh, RULE, **options)
        for own, each in ((whole, expected), (compiled, optimizer)):
            take_steps(mesh, own, each, range(2))
            with each.no_sync():
                own(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
            own(torch.zeros(2, 4, dtype=torch.long)).sum().backward()  # is compiled again while gradients travel
            each.step()
            each.close()
        # AdamW divides gradients by their own size, and so enlarges the rounding of small ones.
        assert_same_parameters(module, whole, atol=1e-10)
    assert not [str(each.message) for each in recwarn if "trace" in str(each.message)]


# What is wrong with a PyTorch module or an optimizer on one rank is raised on all.


def backward(mesh, module, step=0):
    loss_of(module, *images(), samples_of(mesh, step)).backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda module: module.double(), "parameter '1.weight' was replaced"),
        (lambda module: module[3].requires_grad_(False), "parameter '3.weight' was frozen after"),
        (lambda module: module.append(torch.nn.Linear(5, 2)), "'4.weight' is new, '4.bias' is new"),
        (lambda module: module.__setitem__(3, torch.nn.Linear(8, 5)), "'3.weight' is another Parameter"),
    ],
)
def test_a_module_that_was_changed_is_refused_on_all_ranks(mesh, change, message):
    """At the step, and before it comes again."""
    module = smooth()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=1)
    backward(mesh, module)
    if mesh.rank == mesh.size - 1:
        change(module)
    before = optimizer.parameters.flat.copy()
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert np.array_equal(optimizer.parameters.flat, before)
    with pytest.raises(ValueError, match=message):
        mpishard.torch.as_distributed(module, mesh, RULE)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"module": smooth().half()}, ValueError, "arguments of as_distributed, but"),
        ({"module": convolutional()}, ValueError, "as_distributed, but parameters is"),
        ({"zero": 4}, ValueError, "zero=4"),
        ({"zero": 3, "shard_units": torch.nn.LSTM}, ValueError, "the module has no submodule LSTM"),
        ({"buffers": "mean"}, ValueError, "buffers='mean'"),
        ({"rule": torch.optim.LBFGS}, TypeError, "LBFGS needs 'closure'"),
    ],
    ids=["dtype", "module", "zero", "units", "buffers", "rule"],
)
@pytest.mark.mpi(min_size=2)
def test_bad_arguments_of_one_rank_are_refused_on_all(mesh, wrong, kind, message):
    given = {"module": smooth(), "rule": RULE} | (wrong if mesh.rank == mesh.size - 1 else {})
    module, rule = given.pop("module"), given.pop("rule")
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    with pytest.raises(kind, match=message):
        rule = rule if rule is RULE else rule(module.parameters())
        mpishard.torch.as_distributed(module, mesh, rule, **given)
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == before


def replace_gradient(p):
    p.grad = p.grad / 2


def drop_gradient(p):
    p.grad = None


def reshape_gradient(p):
    p.grad.data = torch.zeros(3)


@pytest.mark.parametrize(
    ("compresses", "change", "how"),
    [
        (True, lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1), "changed"),
        (True, lambda p: p.grad.zero_(), "changed"),
        (True, replace_gradient, "assigned"),
        (True, drop_gradient, "dropped"),
        (False, drop_gradient, "dropped"),
        (False, reshape_gradient, "assigned"),
    ],
)
def test_gradients_that_were_changed_are_refused_on_all_ranks(mesh, same_on_all, compresses, change, how):
    """A step would not see it; after the error and zero_grad, the next step is as ever."""
    if compresses and mesh.size == 1 and change is not drop_gradient:
        pytest.skip("one rank alone has all gradients")
    can_zero = (how, compresses) == ("dropped", False)
    way_out = r"p.grad.zero_\(\) instead; .* set lr of its group" if can_zero else "max_gradient_norm"
    steps = []
    for changes in (True, False):
        module = smooth()
        config = ShardingConfiguration(mesh, gradient_compressor=Int8Compressor() if compresses else None)
        optimizer = mpishard.torch.as_distributed(module, config, RULE)
        before = optimizer.parameters.flat.copy()
        if changes:
            backward(mesh, module, 1)
            if mesh.rank == mesh.size - 1:
                change(module[3].weight)
            with pytest.raises(ValueError, match=f"'3.weight' was {how} .*{way_out}"):
                optimizer.step()
            assert np.array_equal(optimizer.parameters.flat, before)
            optimizer.zero_grad()
        backward(mesh, module)
        optimizer.step()
        assert same_on_all(optimizer.parameters.flat)
        steps.append(optimizer.parameters.flat.copy())
    assert np.array_equal(*steps)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_without_a_backward_pass_are_refused(mesh, zero):
    module = smooth()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=zero)
    loss = loss_of(module, *images(), samples_of(mesh, 0))
    for p, gradient in zip(module.parameters(), torch.autograd.grad(loss, list(module.parameters())), strict=True):
        p.grad = gradient
    with pytest.raises(ValueError, match="'1.weight' was assigned .*call backward"):
        optimizer.step()
    assert all(p.grad is None for p in module.parameters())


def test_gradients_may_be_changed_between_two_passes(mesh):
    """Within no_sync, as in a loop without mpishard."""
    steps = []
    for factor in (1, 3):
        module = smooth()
        optimizer = mpishard.torch.as_distributed(module, mesh, mpishard.SGD(lr=0.1))
        with optimizer.no_sync():
            (loss_of(module, *images(), samples_of(mesh, 0)) / factor).backward()
            for p in module.parameters():
                p.grad.mul_(factor)
        backward(mesh, module, 1)
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
    module = smooth()
    module.register_buffer("again", module.seen)
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE)
    backward(mesh, module)  # it has assigned `seen` anew
    with pytest.raises(ValueError, match="'seen' .*'again'"):
        optimizer.step()


def test_a_buffer_that_one_rank_has_replaced_by_another_kind_is_refused_on_all(mesh, folder):
    module = smooth()
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE)
    backward(mesh, module)
    optimizer.step()
    optimizer.save_checkpoint(folder)
    if mesh.rank == mesh.size - 1:
        module.seen = torch.zeros(3)
    for call in (optimizer.save_checkpoint, optimizer.load_checkpoint):
        with pytest.raises(ValueError, match="buffer 'seen' was"):
            call(folder)


def test_gradients_that_have_left_cannot_be_used(mesh):
    """Under ZeRO-2; the step is as ever."""
    steps = []
    for uses in (False, True):
        module = smooth()
        optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=2)
        for step in range(2):
            with optimizer.no_sync():
                backward(mesh, module, 2)
            backward(mesh, module, step)
            for use in (
                lambda module: torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1),
                lambda module: module[1].weight.grad.mul_(0.5),
                lambda module: module[1].weight.grad.norm(),
            ) * uses:
                with pytest.raises(RuntimeError, match="zero=2 and 3, .*max_gradient_norm"):
                    use(module)
            optimizer.step()
        assert all(p.grad is None for p in module.parameters())
        steps.append(optimizer.parameters.flat.copy())
    assert np.array_equal(*steps)
