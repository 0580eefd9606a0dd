"""PyTorch modules whose layers tensor ranks divide by a plan, beside the whole module in one process."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest
import variants

import mpishard
from mpishard import Mesh, ShardingConfiguration
from mpishard.layout.boxes import split
from mpishard.nn.tensor_parallel import Copy, GatherColumns, Reduce, ScatterColumns

torch = pytest.importorskip("torch")
from torch_architectures import ARCHITECTURES  # noqa: E402
from torch_divided import Division, check_continuation, check_masters, check_steps  # noqa: E402
from torch_models import assert_same_parameters  # noqa: E402
from torch_plans import (  # noqa: E402
    HEADS,
    PLAN,
    RULE,
    WIDTH,
    WORDS,
    adamw,
    fresh,
    loss_of,
    take_steps,
    tensor_size,
    words_of,
)

from mpishard.torch.tensor_ops import moved  # noqa: E402


@pytest.fixture
def tensor_mesh(comm):
    """Two tensor ranks where they divide the ranks, else all; copies on ranks are compared after every step."""
    with Mesh(comm, tensor=tensor_size(comm), debug=True) as mesh:
        yield mesh


needs_ranks = pytest.mark.mpi(min_size=2)


def distributed(module, mesh, **options):
    return mpishard.torch.as_distributed(module, mesh, RULE, **{"plan": PLAN, **options})


TENSOR = Division(fresh, distributed, take_steps)


# Operations and their adjoints.


@pytest.mark.parametrize("columns", [5, 8])
@pytest.mark.parametrize("kind", [Copy, Reduce, GatherColumns, ScatterColumns])
def test_an_operation_and_its_gradient_are_adjoint(shared_mesh, comm, kind, columns):
    """Inner products count what is replicated once, and add up what is divided."""
    axis, whole = shared_mesh.data, columns + comm.size
    cuts = split(whole, comm.size)
    own = cuts[comm.rank + 1] - cuts[comm.rank]
    pair = kind(axis, whole) if kind in (GatherColumns, ScatterColumns) else kind(axis)
    x_is_divided, y_is_divided = kind in (Reduce, GatherColumns), kind in (Copy, ScatterColumns)
    width = {GatherColumns: (own, whole), ScatterColumns: (whole, own)}.get(kind, (whole, whole))

    def drawn(seed, columns, is_divided):
        random = np.random.default_rng([seed, comm.rank if is_divided else 99])
        return torch.from_numpy(random.integers(-4, 5, (3, 2, columns)).astype(float))

    x, dy = drawn(1, width[0], x_is_divided).requires_grad_(), drawn(2, width[1], y_is_divided)
    y = moved(x, pair)
    y.backward(dy)
    products = [float((y.detach() * dy).sum()), float((x.detach() * x.grad).sum())]
    sums = [
        comm.allreduce(product) if is_divided else product
        for product, is_divided in zip(products, (y_is_divided, x_is_divided), strict=True)
    ]
    assert sums[0] == sums[1]
    if kind is not Copy:
        moved(x, pair).add_(1.0)  # as Llama4 does with what a layer returns
    (gradient,) = torch.autograd.grad(moved(x, pair).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("kind", [Reduce, GatherColumns, ScatterColumns])
def test_numbers_of_half_precision_move_as_they_are_and_are_summed_in_float32(shared_mesh, comm, kind):
    whole = 3 * comm.size
    pair = kind(shared_mesh.data) if kind is Reduce else kind(shared_mesh.data, whole)
    columns = 3 if kind is GatherColumns else whole
    x = torch.full((2, columns), 1.0 + comm.rank, dtype=torch.bfloat16)
    if kind is ScatterColumns:
        x = torch.arange(whole).expand(2, whole).bfloat16()
    y = moved(x.requires_grad_(), pair).mul_(1.0)
    expected = {
        Reduce: torch.full((2, whole), comm.size * (comm.size + 1) / 2),
        GatherColumns: torch.arange(1, comm.size + 1).repeat_interleave(3).expand(2, whole),
        ScatterColumns: torch.arange(3 * comm.rank, 3 * comm.rank + 3).expand(2, 3),
    }[kind]
    assert y.dtype == torch.bfloat16 and torch.equal(y.float(), expected.float())


# Steps.


@pytest.mark.parametrize("zero", [0, *variants.full(1), 2, 3])
def test_steps_are_those_of_one_process(tensor_mesh, zero):
    """Heads, features and words do not divide by the ranks, and a word is padding; those of rank 0 count."""
    mesh, whole = tensor_mesh, fresh()
    module = fresh(seed=mesh.rank)
    units = {"shard_units": type(module.layers[0])} if zero == 3 else {}
    optimizer = distributed(module, mesh, zero=zero, **units)
    if mesh.tensor.size > 1:
        spec = next(spec for spec in optimizer.parameters.specs if spec.name == "layers.0.k.weight")
        rows = [stop - start for (start, stop), _ in spec.parts]
        heads = split(HEADS, mesh.tensor.size)
        assert rows == [4 * (b - a) for a, b in zip(heads, heads[1:], strict=False)]
        assert optimizer.parameters["layers.0.k.weight"].shape[0] == rows[mesh.tensor.rank] if zero < 3 else True
    check_steps(take_steps, module, optimizer, mesh.data, whole, adamw(whole), range(10))
    optimizer.close()
    assert_same_parameters(module, whole)
    torch.testing.assert_close(module(words_of(3)[:, :-1]), whole(words_of(3)[:, :-1]), rtol=0, atol=1e-12)


@needs_ranks
def test_layers_with_one_input_share_the_sum_of_its_gradient(tensor_mesh):
    """A layer has five groups of them: queries, keys and values; up; gates; mix, which is gathered; and the head."""
    module = fresh()
    optimizer = distributed(module, tensor_mesh, check_plan=False)
    tensor_mesh.ledger.clear()
    loss_of(module, words_of(0)).backward()
    calls = {name: found["calls"] for name, found in tensor_mesh.ledger.summary().items() if "activation" in name}
    assert calls == {
        "tensor.all_reduce activations": 1 + 2 * 4,
        "tensor.all_gather activations": 2 + 1,
        "tensor.all_reduce activation gradients": 2 * 4 + 1,
        "tensor.all_gather activation gradients": 2,
    }
    optimizer.zero_grad()
    optimizer.close()


@pytest.mark.parametrize("zero", [0, *variants.full(2, 3)])
def test_norms_and_passes_are_those_of_the_whole_module(tensor_mesh, zero):
    """Two passes a step, clipped by a method and by a setting, along an optimizer of PyTorch."""
    mesh, whole, module = tensor_mesh, fresh(), fresh()
    config = ShardingConfiguration(mesh, max_gradient_norm=0.3)
    theirs = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    given = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    optimizer = mpishard.torch.as_distributed(module, config, given, zero=zero, plan=PLAN)
    for step in range(3):
        norms = []
        for each, which, axis in ((whole, theirs, None), (module, optimizer, mesh.data)):
            which.zero_grad()
            ends = (0, 1) if axis is None else (axis.rank, axis.size)
            if axis is None:
                loss_of(each, words_of(step, *ends)).backward()
            else:
                with optimizer.no_sync():
                    loss_of(each, words_of(step, *ends)).backward()
            loss_of(each, words_of(step + 7, *ends)).backward()
            if axis is None:
                norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5).item())
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.3)
            else:
                norms.append(optimizer.clip_grad_norm_(0.5).item())
            which.step()
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
        assert optimizer.optimizer.gradient_norm == pytest.approx(min(norms[0], 0.5), rel=1e-5)
    optimizer.close()
    torch.testing.assert_close(dict(module.named_parameters()), dict(whole.named_parameters()), rtol=1e-6, atol=1e-9)


@pytest.mark.full
@needs_ranks
@pytest.mark.parametrize("zero", [0, 2])
def test_optimizers_of_whole_tensors_see_whole_tensors(tensor_mesh, zero):
    whole, module = fresh(), fresh()
    trained = [[p for p in each.parameters() if p.requires_grad] for each in (whole, module)]
    theirs, given = (torch.optim.Adafactor(each, lr=0.05) for each in trained)
    optimizer = mpishard.torch.as_distributed(module, tensor_mesh, given, zero=zero, plan=PLAN)
    take_steps(whole, theirs, range(3))
    take_steps(module, optimizer, range(3), tensor_mesh.data)
    optimizer.close()
    torch.testing.assert_close(dict(module.named_parameters()), dict(whole.named_parameters()), rtol=1e-9, atol=1e-9)


@needs_ranks
@pytest.mark.parametrize("later", [False, True])
def test_what_all_ranks_have_whole_drops_out_the_same_elements(comm, later):
    """Ranks begin with other random numbers; after each step their copies are compared.

    `later`: at a rate that is set then, in a layer that alone is in training mode.
    """
    with Mesh(comm, tensor=comm.size, debug=True) as mesh:
        module = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.5 * (not later)), torch.nn.Linear(WIDTH, 4 * comm.size)
        )
        module.append(torch.nn.ReLU()).append(torch.nn.Linear(4 * comm.size, WIDTH))
        optimizer = mpishard.torch.as_distributed(module, mesh, RULE, plan={"2": "colwise", "4": "rowwise"})
        x = torch.arange(5.0 * WIDTH).reshape(5, WIDTH)
        if later:
            module.eval()[1].train().p = 0.5
        for step in range(3):
            torch.manual_seed(step + mesh.rank)
            module(x).square().sum().backward()
            optimizer.step()
        optimizer.close()


# States on other ranks.


@pytest.mark.parametrize(
    ("zero", "other_zero"),
    [(0, 1), *(pytest.param(*each, marks=pytest.mark.full) for each in ((3, 2), (1, 0), (2, 3)))],
)
def test_a_run_continues_on_other_ranks(comm, folder, zero, other_zero):
    with Mesh(comm, tensor=tensor_size(comm)) as mesh, Mesh(comm) as data_mesh:
        check_continuation(TENSOR, mesh, data_mesh, folder, zero, other_zero, other_zero)


@needs_ranks
def test_parameters_of_half_precision_keep_their_masters(tensor_mesh, folder):
    check_masters(TENSOR, tensor_mesh, folder)


@needs_ranks
def test_a_first_pass_under_autocast_keeps_no_weights_in_half_precision(tensor_mesh):
    """Which PyTorch knows by their parameter, of whatever values and gradients."""
    module, whole = fresh().float(), fresh().float()
    optimizer = distributed(module, tensor_mesh)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(module, words_of(0))
        with mpishard.torch.summon_full_parameters(module):
            expected, summoned = loss_of(whole, words_of(0)), loss_of(module, words_of(0))
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    assert summoned.item() == expected.item()
    norm = torch.nn.utils.clip_grad_norm_([p for p in whole.parameters() if p.requires_grad], 1e9)
    assert float(optimizer.clip_grad_norm_(1e9)) == pytest.approx(float(norm), rel=5e-2)
    optimizer.step()
    optimizer.close()


# Modules as they are there.


def test_layers_of_an_encoder_of_pytorch(tensor_mesh):
    """By styles of PyTorch; without gradients it has a path of its own past its layers."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan = {"layers.*.linear1": ColwiseParallel(), "layers.*.linear2": RowwiseParallel()}
    module, whole = (fresh(kind=lambda: torch.nn.TransformerEncoder(_encoder_layer(), 2)) for _ in range(2))
    # The gradient of the bias of keys is rounding alone, which AdamW would enlarge.
    optimizer = mpishard.torch.as_distributed(module, tensor_mesh, mpishard.SGD(lr=0.1), plan=plan)
    x = torch.linspace(-1, 1, 3 * 4 * 6).double().reshape(3, 4, 6)
    for each, which in ((module, optimizer), (whole, torch.optim.SGD(whole.parameters(), lr=0.1))):
        (each(x) ** 3).sum().backward()
        which.step()
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), whole.eval()(x), rtol=0, atol=1e-12)
    optimizer.close()
    assert_same_parameters(module, whole)


def _encoder_layer():
    return torch.nn.TransformerEncoderLayer(6, 2, 7, dropout=0.0, batch_first=True)


@pytest.mark.full
@needs_ranks
def test_activation_checkpoints_and_gradients_of_their_recomputation(tensor_mesh):
    transformers = pytest.importorskip("transformers")
    whole, module = (ARCHITECTURES["Llama"].made(transformers, "Llama").train() for _ in range(2))
    module.gradient_checkpointing_enable()
    optimizer = mpishard.torch.as_distributed(module, tensor_mesh, RULE)
    take_steps(whole, adamw(whole), range(3))
    take_steps(module, optimizer, range(3), tensor_mesh.data)
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-11)


# What is refused.


@needs_ranks
def test_a_cut_module_says_what_it_cannot_do(tensor_mesh):
    module = fresh()
    optimizer = distributed(module, tensor_mesh)
    for use in (module.state_dict, lambda: module.load_state_dict({}), module.layers[0].state_dict):
        with pytest.raises(RuntimeError, match=f"tensor={tensor_mesh.tensor.size}"):
            use()
    for use in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="summon_full_parameters"):
            use(module)
    with pytest.raises(ValueError, match="another optimizer"):
        distributed(module, tensor_mesh)
    with pytest.raises(ValueError, match="tensor=1 within join"), mpishard.torch.join(optimizer):
        pass
    with pytest.raises(IndexError, match=f"{WORDS} rows"):
        module(torch.full((1, 2), WORDS))
    with mpishard.torch.summon_full_parameters(module), pytest.raises(ValueError, match="a step"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(module, words_of(0)).backward()
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match="close"):
        module(words_of(0))
    with pytest.raises(ValueError, match="close"):
        distributed(module, tensor_mesh)


@needs_ranks
def test_samples_that_differ_between_tensor_ranks_are_refused(tensor_mesh):
    module = fresh()
    optimizer = distributed(module, tensor_mesh)
    with pytest.raises(ValueError, match=r"mesh\.data\.rank"):
        module(words_of(tensor_mesh.rank))
    optimizer.close()


@needs_ranks
def test_a_plan_without_the_norm_of_heads_is_found_in_the_first_step(tensor_mesh):
    module = fresh()
    before = copy.deepcopy(module)
    plan = {key: style for key, style in PLAN.items() if key != "layers.*.norm"}
    optimizer = distributed(module, tensor_mesh, plan=plan)
    loss_of(module, words_of(0)).backward()
    with pytest.raises(ValueError, match=r"layers\.0\.norm\.weight.*replicated_with_grad_allreduce"):
        optimizer.step()
    optimizer.close()
    assert_same_parameters(module, before, atol=0)


@needs_ranks
def test_a_sum_of_gradients_that_are_the_same_is_found_in_the_first_step(tensor_mesh):
    """Of a norm whose input is whole, beside that of heads, of which ranks have terms."""
    module = fresh()
    before = copy.deepcopy(module)
    plan = PLAN | {"last": "replicated_with_grad_allreduce"}
    optimizer = distributed(module, tensor_mesh, plan=plan)
    loss_of(module, words_of(0)).backward()
    with pytest.raises(ValueError, match=r"gradients of last\.weight, last\.bias are the same.*give 'replicate'"):
        optimizer.step()
    optimizer.close()
    assert_same_parameters(module, before, atol=0)


class Between(torch.nn.Module):
    """Two layers with a function of features between them, behind one whose output is gathered."""

    def __init__(self, function, features, kept):
        super().__init__()
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, features), torch.nn.Linear(kept, WIDTH)
        torch.nn.init.zeros_(self.down.weight)  # as the last layer of a residual branch may be
        self.function = function

    def forward(self, x, cache=None):
        x = self.first(x)
        return self.last(x + self.down(self.function(x, self.up(x))))


BETWEEN = {"first": "colwise_gather_output", "up": "colwise", "down": "rowwise", "last": "colwise_gather_output"}


def _odd_is_refused(x, y):
    if y.shape[-1] % 2:
        raise ValueError(f"odd number of features: {y.shape[-1]}")
    return y


@needs_ranks
@pytest.mark.parametrize("zero", [0, *variants.full(3)])
@pytest.mark.parametrize(
    ("function", "features", "kept", "message"),
    [
        (lambda x, y: torch.mul(*y.chunk(2, -1)), 12, 6, "the input of 'down' differs.*packed_colwise"),
        (lambda x, y: y.softmax(-1), 12, 12, "the input of 'down' differs"),
        (_odd_is_refused, 7, 7, "odd number"),
    ],
    ids=["halves", "softmax", "one_rank"],
)
def test_code_that_mixes_cut_features_is_found_in_the_first_pass(tensor_mesh, zero, function, features, kept, message):
    module = fresh(kind=Between, function=function, features=features, kept=kept)
    before = copy.deepcopy(module)
    optimizer = distributed(module, tensor_mesh, zero=zero, plan=BETWEEN)
    x = torch.linspace(-1, 1, 4 * WIDTH).double().reshape(4, WIDTH)
    for _ in range(2):
        with pytest.raises(ValueError, match=message) as caught:
            module(x)
        if message == "odd number":
            assert "give it 'rowwise'" in caught.value.__notes__[-1]
    assert module.training and module.up.training
    optimizer.close()
    assert_same_parameters(module, before, atol=0)
    if features % 2 == 0:
        optimizer = distributed(module, tensor_mesh, zero=zero, plan=BETWEEN, check_plan=False)
        module(x)
        optimizer.close()


@needs_ranks
def test_a_tensor_that_is_whole_beside_cut_features_is_found_in_the_first_step(tensor_mesh):
    """Numbers of the pass are right, and gradients are not: of this tensor each rank has a term."""
    module = fresh(kind=Between, function=lambda x, y: y * x.mean(-1, keepdim=True), features=12, kept=12)
    torch.nn.init.ones_(module.down.weight)
    optimizer = distributed(module, tensor_mesh, plan=BETWEEN)
    module(torch.linspace(-1, 1, 4 * WIDTH).double().reshape(4, WIDTH)).square().sum().backward()
    with pytest.raises(ValueError, match="gradients of the input of 'up'.*differ"):
        optimizer.step()
    optimizer.close()


@needs_ranks
def test_the_check_of_a_pass_leaves_no_trace_and_says_where_it_was_not_made(tensor_mesh, capsys):
    module = fresh(kind=Between, function=lambda x, y: torch.tanh(y), features=12, kept=12)
    module.register_buffer("passes", torch.zeros(()))
    optimizer = distributed(module, tensor_mesh, plan=BETWEEN)
    module.first.register_forward_hook(lambda *_: module.passes.add_(1) and None)
    x = torch.ones(4, WIDTH).double()
    state = torch.get_rng_state()
    module(x, cache=object()).sum().backward()
    optimizer.step()
    said = tensor_mesh.world.allgather_object(capsys.readouterr().err)
    assert ["not compared with the whole module" in text for text in said] == [True] + [False] * (len(said) - 1)
    tensor_mesh.ledger.clear()
    module(x)
    calls = tensor_mesh.ledger.summary()["tensor.all_gather activations"]["calls"]
    module(x)
    assert tensor_mesh.ledger.summary()["tensor.all_gather activations"]["calls"] == calls + calls // 2
    assert torch.equal(torch.get_rng_state(), state)
    assert module.passes == 3
    optimizer.close()


@needs_ranks
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(plan=None), "cuts no layer"),
        (dict(plan={"nothing": "colwise"}), "'nothing'"),
        (dict(plan={"tokens": "embedding_rowwise"}), "'head'"),
        (dict(plan=PLAN, zero=3, materialize=print), "materialize"),
        (dict(plan=["up"]), "plan must map"),
    ],
    ids=["none", "nothing", "shared", "materialize", "list"],
)
def test_plans_that_do_not_fit_are_refused_on_all_ranks(tensor_mesh, options, message):
    module = fresh()
    kind = TypeError if isinstance(options["plan"], list) else ValueError
    if options["plan"] is not None and tensor_mesh.rank:
        options = {**options, "plan": PLAN} if "materialize" not in options else options
    with pytest.raises(kind, match=message):
        distributed(module, tensor_mesh, **options)
    module.load_state_dict(fresh().state_dict())


def test_workers_are_refused(comm, tensor_mesh):
    if comm.size > 1:
        optimizer = mpishard.LocalSGDOptimizer(RULE, ShardingConfiguration(tensor_mesh, sync_every=2))
        with pytest.raises(ValueError, match="sync_every"):
            mpishard.torch.as_distributed(fresh(), tensor_mesh, optimizer, plan=PLAN)
    with Mesh(comm) as mesh:  # a plan for any number of ranks
        distributed(fresh(), mesh).close()
        with pytest.raises(ValueError, match="nothing"):
            mpishard.torch.as_distributed(fresh(), mesh, RULE, plan={"nothing": "colwise"})


@needs_ranks
def test_inputs_that_are_packed_in_one_layer(tensor_mesh):
    """Its input are the parts of two layers, one behind the other."""

    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = torch.nn.Embedding(WORDS, WIDTH)
            self.one, self.other = torch.nn.Linear(WIDTH, 5), torch.nn.Linear(WIDTH, 5)
            self.both = torch.nn.Linear(10, WORDS)

        def forward(self, words):
            x = self.tokens(words)
            return self.both(torch.cat([torch.tanh(self.one(x)), torch.relu(self.other(x))], -1))

    mesh, whole, module = tensor_mesh, fresh(kind=Pair), fresh(kind=Pair)
    plan = {"one": "colwise", "other": "colwise", "both": "packed_rowwise"}
    optimizer = distributed(module, mesh, plan=plan)
    check_steps(take_steps, module, optimizer, mesh.data, whole, adamw(whole), range(3))
    optimizer.close()
    assert_same_parameters(module, whole)
