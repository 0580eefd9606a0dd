"""Stages of a PyTorch module, all of them on one rank, beside the module itself; and what cannot be cut."""

from __future__ import annotations

import copy
import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import variants

from mpishard import Mesh
from mpishard.comm.axis import Axis
from mpishard.layout.tensors import ModelParallelRank

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_models import assert_same_parameters  # noqa: E402
from torch_plans import RULE, WORDS, Transformer, adamw, fresh, loss_of, take_steps, words_of  # noqa: E402
from torch_stages import (  # noqa: E402
    MICRO,
    TwoStreams,
    made,
    passes_of_stages,
    sequential,
    take_micro_steps,
    virtual_stages,
)

import mpishard  # noqa: E402
from mpishard.torch.micro_batches import PipelineSettings, micro_batches_of  # noqa: E402
from mpishard.torch.module_tensors import ModuleTensors  # noqa: E402
from mpishard.torch.problem import LossAndGradient, problem  # noqa: E402
from mpishard.torch.stage_passes import (  # noqa: E402
    Message,
    MicroBatch,
    StageChunk,
    StageErrors,
    StagePass,
    Survey,
    with_tensors,
)
from mpishard.torch.staged_module import StagedModule  # noqa: E402
from mpishard.torch.stages import layers_of  # noqa: E402
from mpishard.torch.weight_products import WeightProducts  # noqa: E402


@pytest.fixture
def mesh():
    with Mesh() as mesh:
        yield mesh


def cuts(module, stages=None, count=2):
    """The first layers of the later stages, and all layers."""
    layers = layers_of(module, stages, count)
    numbers = [layer.stage for layer in layers]
    firsts = [layers[numbers.index(stage)].path for stage in range(1, count)]
    return firsts, [layer.path for layer in layers]


# Where a module is cut.


def test_a_list_of_layers_is_dealt_out_evenly():
    module = Transformer(layers=3)
    layers = ["tokens", "layers.0", "layers.1", "layers.2", "last", "head"]
    assert cuts(module) == (["layers.2"], layers)
    assert cuts(module, count=3) == (["layers.1", "layers.2"], layers)
    assert cuts(sequential(), count=4) == (["2", "4", "6"], ["0", "2", "4", "6"])


def test_stages_names_where_they_begin():
    module = torch.nn.Module()
    module.stem, module.blocks = torch.nn.Linear(2, 2), torch.nn.Sequential(Transformer(2), torch.nn.Linear(2, 2))
    module.pool, module.head = torch.nn.ReLU(), torch.nn.Linear(2, 2)
    assert cuts(module, ["blocks.1"]) == (["blocks.1"], ["stem", "blocks.0", "blocks.1", "head"])
    assert cuts(module, ["pool"]) == (["pool"], ["stem", "blocks", "pool", "head"])
    inside = ["blocks.0.layers.1", "head"]
    layers = ["stem", "blocks.0.tokens", "blocks.0.layers.0", "blocks.0.layers.1", "blocks.0.last", "blocks.0.head"]
    assert cuts(module, inside, 3) == (inside, [*layers, "blocks.1", "head"])


def test_a_plan_says_the_order_of_calls():
    module = torch.nn.Module()
    module.norm, module.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    module.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
    module.tokens = torch.nn.Embedding(2, 2)
    plan = dict.fromkeys(("tokens", "layers", "norm", "head"))
    order = ["tokens", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "head"]
    assert cuts(module, plan) == (["layers.2"], order)
    assert cuts(module, plan, count=7) == (order[1:], order)  # more stages than the list has layers


def test_models_of_transformers_bring_their_plan():
    pytest.importorskip("transformers")
    layers = [f"model.{name}" for name in ("embed_tokens", "layers.0", "layers.1", "layers.2", "norm")]
    assert cuts(made("llama")) == (["model.layers.2"], [*layers, "lm_head"])
    assert cuts(made("gpt2"))[0] == ["transformer.h.2"]


@pytest.mark.parametrize(
    ("kind", "stages", "count", "message"),
    [
        (sequential, None, 5, "4 layers.* 5 stages"),
        (TwoStreams, ["layers.1", "head"], 2, "names 2 layers.*have 2"),
        (TwoStreams, ["layer.1"], 2, r"'layer\.1'"),
        (lambda: torch.nn.ModuleDict({"a": TwoStreams()}), ["layers.1"], 2, r"has a\.layers\.1;"),
        (TwoStreams, ["layers.1", "layers.1"], 3, "twice"),
        (TwoStreams, ["layers.2", "layers.1"], 3, r"order layers\.1, layers\.2"),
        (TwoStreams, ["tokens"], 2, "'tokens', which is the first"),
        (TwoStreams, ["layers.1", "layers.1.linear"], 3, r"'layers\.1'"),
        (TwoStreams, {"layer": None}, 2, "'layer'"),
        (TwoStreams, {}, 2, "names nothing"),
        (lambda: torch.nn.Linear(2, 2), None, 2, "no list of layers"),
        (lambda: torch.nn.ModuleDict({"a": TwoStreams(), "b": TwoStreams()}), None, 2, "2 lists"),
        (TwoStreams, "layers.1", 2, "stages must be"),
    ],
    ids=[
        "few",
        "many",
        "no layer",
        "within another",
        "twice",
        "order",
        "first",
        "nested",
        "plan",
        "empty",
        "no list",
        "two lists",
        "text",
    ],
)
def test_cuts_that_do_not_fit_are_refused(kind, stages, count, message):
    with pytest.raises(TypeError if isinstance(stages, str) else ValueError, match=message):
        layers_of(kind(), stages, count)


@pytest.mark.parametrize("name", ["fast", "interleaved"])
def test_a_schedule_that_does_not_exist_or_fit_is_refused(name):
    with pytest.raises(ValueError, match=name):
        PipelineSettings.of(name, 1, None, 2)


# Batches.


def test_a_batch_is_cut_along_the_samples():
    x, y, scale = torch.arange(7), torch.arange(14).reshape(7, 2), torch.tensor(3.0)
    micro = micro_batches_of((x, {"y": [y, None]}, scale, "text"), 3, "mean")
    assert [len(arguments[0]) for arguments, _ in micro] == [3, 2, 2]
    assert torch.equal(torch.cat([arguments[1]["y"][0] for arguments, _ in micro]), y)
    assert all(arguments[1]["y"][1] is None and arguments[2:] == (scale, "text") for arguments, _ in micro)
    assert sum(factor for _, factor in micro) == pytest.approx(1)
    assert [factor for _, factor in micro_batches_of((x,), 9, "sum")] == [1.0] * 7


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(3), torch.zeros(4)), "3 and 4"),
        (("text", None), "no tensor with samples, but str, NoneType"),
        ((torch.tensor(1.0),), "no tensor with samples, but Tensor"),
        ((), "nothing was given"),
        ((torch.zeros(0),), "0 samples"),
    ],
    ids=["two_sizes", "text", "zero_dimensions", "none", "empty"],
)
def test_a_batch_without_equally_many_samples_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        micro_batches_of(batch, 2, "mean")
    with pytest.raises(ValueError, match="'median'"):
        micro_batches_of((torch.zeros(3),), 2, "median")


def test_a_message_has_tensors_of_any_dtype():
    tensors = [torch.arange(3, dtype=torch.bfloat16), torch.tensor([True]), torch.randn(2, 0), torch.tensor(1 + 2j)]
    message = Message(tensors)
    memory = np.empty(message.nbytes, np.uint8)
    message.pack(tensors, memory)
    for found, each in zip(message.unpack(memory), tensors, strict=True):
        assert found.dtype == each.dtype and torch.equal(found, each) and found._base is None
    assert not Message.has_failed(memory)
    message.pack_failure(memory)
    assert Message.has_failed(memory)
    with pytest.raises(RuntimeError, match="depend on values"):
        message.pack([tensors[0][:2], *tensors[1:]], memory)


def test_tensors_are_replaced_where_they_are():
    x, y, z = (torch.tensor(number) for number in range(3))
    found = with_tensors((x, [{"a": y}, None], x), {id(x): z})
    assert found[0] is z and found[2] is z and found[1][0]["a"] is y
    assert with_tensors([y], {id(x): z})[0] is y

    @dataclasses.dataclass(frozen=True)
    class Fixed:
        x: object
        unset: object = dataclasses.field(init=False)

    assert with_tensors(Fixed(x), {id(x): z}).x is z


# Passes.


@pytest.mark.parametrize("count", [*variants.full(2), 3])
@pytest.mark.parametrize("name", ["sequential", "streams", *variants.full("llama"), "gpt2"])
def test_stages_compute_what_the_module_does(mesh, name, count):
    if name in ("llama", "gpt2"):
        pytest.importorskip("transformers")
    whole, module = made(name), made(name)
    expected = take_steps(whole, adamw(whole), range(10))
    optimizer = virtual_stages(module, mesh, count)
    losses = take_micro_steps(module, optimizer, range(10))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-12)
    last = loss_of(whole, words_of(11)).item()
    assert optimizer.loss(loss_of, words_of(11)) == pytest.approx(last, abs=1e-12)
    if name in ("llama", "gpt2"):  # with a mask, and their own loss
        batch = {"input_ids": words_of(11), "attention_mask": torch.ones_like(words_of(11)), "labels": words_of(11)}
        assert optimizer.loss(lambda module, batch: module(**batch).loss, batch) == pytest.approx(last, abs=1e-6)
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-12)
    if name == "streams":
        assert all(int(layer.calls) == 33 for layer in module.layers)  # 3 of them in `loss`, as in training


class OneOfTwo(NamedTuple):
    """The mesh of a rank of two that nobody sends to."""

    place: ModelParallelRank
    pipeline: Axis
    world: Axis
    size: int = 2


def both_ranks(name):
    """The stages of a module on two ranks, in one process, and their chunks."""
    found = []
    for rank in range(2):
        module, alone = made(name), Axis.single("pipeline")
        mesh = OneOfTwo(ModelParallelRank(pipeline_rank=rank, pipeline_size=2), alone, alone)
        tensors = ModuleTensors.of(module)
        staged = StagedModule(module, mesh, layers_of(module, None, 2), tensors.trained, tensors.frozen)
        staged.cut(tensors.buffers, is_filled=False)
        found.append((staged, StageChunk(staged, rank, torch.device("cpu"), StageErrors(alone, alone))))
    return found


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("name", ["streams", *variants.full("sequential", "gpt2")])
def test_a_rank_has_no_values_of_the_layers_of_another(name, apart):
    """Gradients are those of the whole module; those of a parameter that both have are terms of a sum."""
    if name == "gpt2":
        pytest.importorskip("transformers")
    whole, ranks, words = made(name), both_ranks(name), words_of(0)
    loss_of(whole, words).backward()
    works, batches = [], []
    for staged, chunk in ranks:
        survey = Survey(staged)
        survey.run(loss_of, (words,), True)
        batches.append(MicroBatch(loss_of, (words,), 1.0, 1.0, survey, True, apart))
        works.append(chunk.workspace())
    (first, before), (last, after) = ranks
    assert before.output_shape(batches[0]) == (batches[1].survey.boundaries[1].gradients.nbytes,)
    sent = before.forward(None, works[0], batches[0])
    assert sent.shape == after.input_shape(batches[1])
    loss = after.forward(sent, works[1], batches[1])
    assert loss.item() == pytest.approx(loss_of(whole, words).item(), abs=1e-12)
    if apart:
        before.input_gradient(after.input_gradient(None, works[1], batches[1]), works[0], batches[0])
        if name == "streams":  # the product for a weight has not come
            own = last.module.layers[3].linear
            assert own.bias.grad is not None and own.weight.grad is None
        after.weight_gradient(works[1])
        before.weight_gradient(works[0])
    else:
        before.backward(after.backward(None, works[1], batches[1]), works[0], batches[0])
    for key, p in whole.named_parameters():
        terms = []
        for staged in (first, last):
            own = dict(staged.module.named_parameters())[key]
            if staged.holds(key):
                terms.append(torch.zeros_like(p) if own.grad is None else own.grad)
            else:
                assert own.shape == p.shape and staged.trained[key].untyped_storage().nbytes() == 0
                assert isinstance(own, FakeTensor)
        torch.testing.assert_close(sum(terms), p.grad, rtol=0, atol=1e-12)
    for staged, _ in ranks:
        with pytest.raises(RuntimeError, match="summon_full_parameters"):
            staged.module.state_dict()
        with pytest.raises(TypeError, match="copied or pickled"):
            copy.deepcopy(staged.module)


@pytest.mark.parametrize("rows", [(), (5,), (2, 3)], ids=len)
def test_products_for_weights_come_later(rows):
    """Of a weight that is used twice, and in an embedding; of inputs with and without a gradient."""

    def made():
        torch.manual_seed(0)
        embedding, act = torch.nn.Embedding(7, 7), torch.nn.ReLU(inplace=True)
        layers = torch.nn.Linear(7, 7), torch.nn.Linear(7, 5, bias=False), torch.nn.LayerNorm(5)
        layers[0].weight = embedding.weight
        return torch.nn.ModuleList((embedding, act, *layers)).double()

    def loss_of(module, x, words):
        embedding, act, first, second, norm = module
        y = act(first(x)) + checkpoint(first, embedding(words), use_reentrant=False)
        return norm(second(y)).pow(3).sum() + torch.nn.functional.linear(input=x, weight=first.weight).sum()

    whole, module, products = made(), made(), WeightProducts()
    x, words = torch.randn(*rows, 7, dtype=torch.float64), torch.randint(7, rows)
    loss_of(whole, x, words).backward()
    with products:
        loss = loss_of(module, x, words)
    loss.backward()
    _, _, first, second, norm = module
    assert second.weight.grad is None and norm.weight.grad is not None and first.bias.grad is not None
    products.add()
    products.add()  # nothing is left
    for own, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, rtol=0, atol=1e-12)


def test_products_for_complex_weights_are_those_of_pytorch():
    layers, products = [torch.nn.Linear(3, 3, dtype=torch.complex128) for _ in range(2)], WeightProducts()
    whole, module = (torch.nn.Sequential(*copy.deepcopy(layers)) for _ in range(2))
    x = torch.randn(4, 3, dtype=torch.complex128)
    whole(x).abs().square().sum().backward()
    with products:
        loss = module(x).abs().square().sum()
    loss.backward()
    products.add()
    for own, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, rtol=0, atol=1e-12)


def test_a_message_and_its_gradients_are_adjoint():
    """Between ranks, at an odd size: of what is sent and what comes back; a layer overwrites what it gets."""
    (_, _), (staged, chunk) = both_ranks("sequential")
    x, dy = (torch.randint(-4, 5, (2, 5, 8)).double() for _ in range(2))
    survey = Survey(staged)
    survey.run(loss_of, (words_of(0)[:2],), True)
    boundary = survey.boundaries[1]
    sent = np.empty(boundary.activations.nbytes, np.uint8)
    boundary.activations.pack([x], sent)
    passed = StagePass(staged, survey, 1, boundary.activations.unpack(sent), True)
    (y,) = passed._received
    y.mul_(3.0).backward(dy)
    boundary.gradients.pack(passed.gradients, sent)
    (dx,) = boundary.gradients.unpack(sent)
    assert (y.detach() * dy).sum() == (x * dx).sum()


def test_micro_batches_of_a_whole_module(mesh):
    whole, module = fresh(), fresh()
    expected = take_steps(whole, adamw(whole), range(4))
    optimizer = mpishard.torch.as_distributed(module, mesh, RULE, zero=2, microbatches=3)
    np.testing.assert_allclose(take_micro_steps(module, optimizer, range(4)), expected, rtol=0, atol=1e-12)
    sums = optimizer.loss(lambda module, words: 2 * loss_of(module, words), words_of(0), reduction="sum")
    assert sums > 5 * optimizer.loss(loss_of, words_of(0))
    with pytest.raises(ValueError, match=r"\(8,\)"):
        optimizer.loss(lambda module, words: module(words).sum((1, 2)), words_of(0)[:, :3].repeat(3, 1))
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-12)


class Named(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return {"y": y, "parts": [y.mean(), y.mean()]}


class TakenApart(torch.nn.Module):
    """Code around the layers takes out what they have returned."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(WORDS, WORDS)
        self.layers = torch.nn.ModuleList(Named(WORDS, WORDS) for _ in range(2))

    def forward(self, words):
        x = self.tokens(words)
        for layer in self.layers:
            found = layer(x)
            assert found["parts"].pop() is not None and len(found["parts"]) == 1
            x = found.pop("y")
        return x


def test_code_around_the_layers_may_change_what_they_return(mesh):
    whole, module = fresh(kind=TakenApart), fresh(kind=TakenApart)
    optimizer = virtual_stages(module, mesh, 2)
    loss = optimizer.loss_and_gradient(loss_of, words_of(0))
    assert loss == pytest.approx(loss_of(whole, words_of(0)).item(), abs=1e-12)


def test_a_pass_without_values_leaves_the_buffers_of_the_module(mesh):
    module = made("sequential")
    module.register_buffer("calls", torch.zeros(()))
    module.register_forward_pre_hook(lambda *_: module.calls.add_(1) and None)
    optimizer = virtual_stages(module, mesh, 2)
    optimizer.loss_and_gradient(loss_of, words_of(0))
    assert module.calls == 2 * MICRO


def test_a_run_of_stages_is_that_of_the_module(mesh):
    """Sequences are as long as the longest of a micro-batch, and the function reads them by itself."""
    words = torch.cat([words_of(step) for step in range(4)])

    def losses(module, samples):
        lengths = torch.where(torch.from_numpy(samples) < 16, 3, 5)
        found = words[samples, : lengths.max() + 1]
        each = cross_entropy(module(found[:, :-1]).mT, found[:, 1:], reduction="none")
        return (each * (torch.arange(each.shape[1]) < lengths[:, None])).sum(1) / lengths

    def loss_of_samples(parameters, samples):
        with torch.no_grad():
            return losses(module, samples).sum()

    found = []
    for has_stages in (False, True):
        module = made("streams")
        task = problem(module, losses, 32, 8, micro_batch_size=5, steps=4)
        if has_stages:
            task.start.carried.release()
            state, passes = passes_of_stages(module, mesh, 3, takes_numbers=True)
            function = LossAndGradient(state, module, losses, passes)
            task = dataclasses.replace(task, function=function, start=state.parameters)
        evaluation = mpishard.Evaluation(loss_of_samples, 7, every=2)
        found.append(mpishard.DDPOptimizer(RULE, mesh).optimize(task, progress=False, evaluate=evaluation))
        assert len(found[-1].loss_history) == 4
    for name in ("loss_history", "validation_losses"):
        one, other = (getattr(each, name) for each in found)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_checkpoint_their_activations_compute_again(mesh, reentrant):
    pytest.importorskip("transformers")
    whole, module = made("llama"), made("llama")
    expected = take_steps(whole, adamw(whole), range(2))
    module.train().activation_checkpointing_enable({"use_reentrant": reentrant})
    optimizer = virtual_stages(module, mesh, 3)
    np.testing.assert_allclose(take_micro_steps(module, optimizer, range(2)), expected, rtol=0, atol=1e-12)


def test_layers_are_called_again_by_a_checkpoint_around_them(mesh):
    whole, module = (fresh(kind=Odd, how="checkpoint") for _ in range(2))
    expected = take_steps(whole, adamw(whole), range(2))
    optimizer = virtual_stages(module, mesh, 3)
    np.testing.assert_allclose(take_micro_steps(module, optimizer, range(2)), expected, rtol=0, atol=1e-12)


def test_the_loss_is_scaled_before_the_backward_pass(mesh):
    """So that float16 does not round gradients to 0: they are divided again."""
    gradients = []
    module = made("sequential")
    optimizer = virtual_stages(module, mesh, 2)
    optimizer.parameters.loss_scale = 1024.0
    module[0].weight.register_hook(lambda gradient: gradients.append(gradient.abs().max().item()))
    optimizer.loss_and_gradient(loss_of, words_of(0))
    whole = made("sequential")
    loss_of(whole, words_of(0)).backward()
    assert max(gradients) > 100 * whole[0].weight.grad.abs().max().item()


# What cannot be cut.


class Odd(torch.nn.Module):
    """Passes that a pipeline cannot cut, by name."""

    def __init__(self, how):
        super().__init__()
        self.tokens = torch.nn.Embedding(WORDS, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.head = torch.nn.Linear(4, WORDS)
        self.how = how

    def forward(self, words):
        x = self.tokens(words)
        layers = list(self.layers)
        if self.how == "order":
            layers = layers[::-1]
        elif self.how == "twice":
            layers += layers
        elif self.how == "missing":
            layers = layers[:-1]
        for layer in layers:
            if self.how == "values" and x.sum() > 1e9:
                break
            if self.how in ("checkpoint", "reentrant"):
                x = checkpoint(layer, x, use_reentrant=self.how == "reentrant")
            else:
                x = x + layer(x) if self.how == "residual" else layer(x)
        return self.head(x)


@pytest.mark.parametrize("how", ["order", "twice", "missing", "values", "residual", "reentrant"])
def test_passes_that_do_not_fit_are_refused_by_name(mesh, how):
    optimizer = virtual_stages(fresh(kind=Odd, how=how), mesh, 3)
    expected = {
        "order": (ValueError, r"'layers\.2' is called before 'layers\.1'"),
        "twice": (ValueError, r"'layers\.0' is called"),
        "missing": (ValueError, r"'head' is called before 'layers\.2'"),
        "values": (ValueError, "decides by values"),
        "reentrant": (RuntimeError, "use_reentrant=False"),
        "residual": (RuntimeError, r"'head' gets a tensor|'layers\.2' gets a tensor"),
    }[how]
    with pytest.raises(expected[0], match=expected[1]):
        optimizer.loss_and_gradient(loss_of, words_of(0))


def test_functions_that_do_not_fit_are_refused(mesh):
    module = made("sequential")
    optimizer = virtual_stages(module, mesh, 2)
    for function, kind, message in (
        (None, TypeError, "function"),
        (lambda module, words: module(words), ValueError, "shape"),
        (lambda module, words: 1.0, ValueError, "not called"),
        (lambda module, words: float(loss_of(module, words)), TypeError, "float"),
        (lambda module, words: loss_of(module, words) + loss_of(module, words), ValueError, "twice|after"),
    ):
        with pytest.raises(kind, match=message):
            optimizer.loss_and_gradient(function, words_of(0))
    with pytest.raises(RuntimeError, match="loss_and_gradient"):
        module(words_of(0))
