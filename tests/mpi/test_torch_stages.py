"""PyTorch modules that a pipeline has cut, beside the whole module in one process."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
from functools import partial

import numpy as np
import pytest
import variants

import mpishard
from mpishard import Mesh, ShardingConfiguration

torch = pytest.importorskip("torch")
from torch_divided import Division, check_continuation, check_masters, check_norm, check_steps  # noqa: E402
from torch_models import assert_same_parameters  # noqa: E402
from torch_plans import PLAN, RULE, WORDS, adamw, fresh, loss_of, take_steps, words_of  # noqa: E402
from torch_stages import KINDS, made, sequential, take_micro_steps, virtual_stages  # noqa: E402


def pipeline_of(comm):
    """Two pipeline ranks where they divide the ranks, else all."""
    return 2 if comm.size % 2 == 0 else comm.size


@pytest.fixture
def pipeline_mesh(comm):
    """Copies on ranks are compared after every step."""
    with Mesh(comm, pipeline=pipeline_of(comm), debug=True) as mesh:
        yield mesh


needs_ranks = pytest.mark.mpi(min_size=2)


def distributed(module, mesh, rule=RULE, **options):
    return mpishard.torch.as_distributed(module, mesh, rule, **{"microbatches": 3, **options})


STREAMS = Division(lambda: made("streams"), distributed, take_micro_steps)


# Steps.


QUICK = [("streams", 2), ("gpt2", 0)]
OTHERS = [(name, zero) for name in KINDS for zero in range(3) if (name, zero) not in QUICK]


@pytest.mark.parametrize(("name", "zero"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.full) for each in OTHERS)])
def test_steps_are_those_of_one_process(pipeline_mesh, name, zero):
    """Tied weights, several tensors between stages, and one parameter that all stages have."""
    if name in ("llama", "gpt2"):
        pytest.importorskip("transformers")
    whole, module = made(name), made(name)
    for p in module.parameters():
        p.detach().mul_(1 if pipeline_mesh.rank == 0 else 0)  # those of rank 0 count
    optimizer = distributed(module, pipeline_mesh, zero=zero)
    ranks = pipeline_mesh.pipeline.size
    held = sum(p.untyped_storage().nbytes() for p in optimizer._state.all_trained.values() if p.numel())
    assert ranks == 1 or len(optimizer.parameters) < len(optimizer.parameters.specs) and held
    check_steps(take_micro_steps, module, optimizer, pipeline_mesh.data, whole, adamw(whole), range(10))
    with mpishard.torch.summon_full_parameters(module, writeback=False):
        assert loss_of(module, words_of(11)).item() == pytest.approx(loss_of(whole, words_of(11)).item(), abs=1e-12)
    assert optimizer.loss(loss_of, words_of(11)) == pytest.approx(loss_of(whole, words_of(11)).item(), abs=1e-12)
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-12)


OTHER_SCHEDULES = [("zb-h1", 0), ("gpipe", 0), ("interleaved", 0)]


@needs_ranks
@pytest.mark.parametrize(
    ("schedule", "zero"), [("zb-h1", 2), *(pytest.param(*each, marks=pytest.mark.full) for each in OTHER_SCHEDULES)]
)
def test_other_schedules(pipeline_mesh, schedule, zero):
    chunks = 2 if schedule == "interleaved" else 1
    layers = chunks * pipeline_mesh.pipeline.size
    whole, module = fresh(layers=layers), fresh(layers=layers)
    optimizer = distributed(module, pipeline_mesh, zero=zero, schedule=schedule, chunks=chunks, microbatches=4)
    check_steps(take_micro_steps, module, optimizer, pipeline_mesh.data, whole, adamw(whole), range(3))
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-12)


@needs_ranks
def test_a_call_under_autocast_keeps_no_weights_without_values(pipeline_mesh):
    layers = pipeline_mesh.pipeline.size
    whole, module = fresh(layers=layers).float(), fresh(layers=layers).float()
    optimizer = distributed(module, pipeline_mesh)
    with torch.autocast("cpu", torch.bfloat16):
        loss = optimizer.loss_and_gradient(loss_of, words_of(0))
        expected = loss_of(whole, words_of(0))
    assert loss == pytest.approx(expected.item(), rel=1e-2)
    optimizer.step()
    optimizer.close()


@needs_ranks
@pytest.mark.parametrize("name", ["streams", *variants.full("gpt2")])
def test_other_shapes_come_between_a_backward_pass_and_its_step(pipeline_mesh, name):
    """What has no values then is made without the gradients, which are on their way."""
    if name == "gpt2":
        pytest.importorskip("transformers")
    whole, module = made(name), made(name)
    optimizer = distributed(module, pipeline_mesh)
    replica = pipeline_mesh.data.rank, pipeline_mesh.data.size
    optimizer.loss_and_gradient(loss_of, words_of(3, *replica))
    optimizer.zero_grad()  # the scale of the streams has a gradient on one stage, and others take part in its sum
    with optimizer.no_sync():
        optimizer.loss_and_gradient(loss_of, words_of(0, *replica))
    optimizer.loss_and_gradient(loss_of, words_of(1, *replica)[:, :4])
    for length in (3, 5):
        shorter = words_of(2)[:, :length]
        with torch.no_grad():
            found, expected = module(shorter), whole(shorter)
        torch.testing.assert_close(getattr(found, "logits", found), getattr(expected, "logits", expected))
        loss = optimizer.loss(partial(lambda module, words, n: loss_of(module, words[:, :n]), n=length), words_of(2))
        assert loss == pytest.approx(loss_of(whole, shorter).item(), abs=1e-12)
    optimizer.step()
    (loss_of(whole, words_of(0)) + loss_of(whole, words_of(1)[:, :4])).backward()
    adamw(whole).step()
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-10)


class WithFixedInputs(torch.nn.Sequential):
    """Whose embedding gets no gradient, though it has parameters to train."""

    def forward(self, words):
        with torch.no_grad():
            x = self[0](words)
        for layer in self[1:]:
            x = layer(x)
        return x


@needs_ranks
def test_a_stage_may_have_no_gradient(pipeline_mesh):
    ranks = pipeline_mesh.pipeline.size
    inside = [torch.nn.Linear(6, 6) for _ in range(ranks - 2)]
    module = WithFixedInputs(torch.nn.Embedding(WORDS, 6), *inside, torch.nn.Linear(6, WORDS))
    optimizer = distributed(module, pipeline_mesh, stages=[str(number) for number in range(1, ranks)])
    before = optimizer.loss_and_gradient(loss_of, words_of(0))
    optimizer.step()
    assert len(optimizer.unused_parameters) == (pipeline_mesh.pipeline.rank == 0)
    assert optimizer.loss(loss_of, words_of(0)) < before
    optimizer.close()


def test_buffers_of_a_layer_are_those_of_its_stage(pipeline_mesh):
    """Several of them, of one size and of another, of which others have taken the places of some."""
    module = torch.nn.Sequential(*(each for _ in range(4) for each in (torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))))
    for number, buffer in enumerate(module.buffers()):
        buffer.fill_(number)
    before = [buffer.clone() for buffer in module.buffers()]
    optimizer = mpishard.torch.as_distributed(module, pipeline_mesh, RULE)
    for layer in optimizer._state.stages.layers[1::2] if pipeline_mesh.size > 1 else ():
        if pipeline_mesh.place.runs(layer.stage):
            layer.module.running_mean = layer.module.running_mean + 0.5
    optimizer.close()
    changed = range(0, len(before), 3) if pipeline_mesh.size > 1 else ()
    wanted = [each + 0.5 if number in changed else each for number, each in enumerate(before)]
    torch.testing.assert_close([*module.buffers()], wanted, rtol=0, atol=0)


@pytest.mark.parametrize("zero", [0, *variants.full(2)])
def test_the_norm_is_that_of_the_whole_gradient(pipeline_mesh, zero):
    check_norm(STREAMS, pipeline_mesh, zero)


@pytest.mark.full
@needs_ranks
def test_steps_of_an_optimizer_of_pytorch(pipeline_mesh):
    whole, module = made("streams"), made("streams")
    optimizer = distributed(module, pipeline_mesh, adamw(module))
    check_steps(take_micro_steps, module, optimizer, pipeline_mesh.data, whole, adamw(whole), range(3))
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-12)


def test_what_stages_send_and_what_comes_back_is_adjoint(comm):
    """The loss is linear in each layer: the product of its values and of its gradient is the loss, of whole numbers."""
    if comm.size > 4:
        pytest.skip("the numbers grow with the layers")
    random, widths = np.random.default_rng(0), [5, 7, 3, 9, 1, 7][: comm.size + 2]

    def drawn(*shape):
        return torch.from_numpy(random.integers(-4, 5, shape).astype(float))

    module = torch.nn.Sequential(*(torch.nn.Linear(*ends, bias=False) for ends in itertools.pairwise(widths))).double()
    for p in module.parameters():
        p.data = drawn(*p.shape)
    before, x, dy = copy.deepcopy(module), drawn(5, widths[0]), drawn(5, widths[-1])
    with Mesh(comm, data=1, pipeline=comm.size) as mesh:
        optimizer = distributed(module, mesh, mpishard.SGD(lr=1.0))
        loss = optimizer.loss_and_gradient(lambda module, x, dy: (module(x) * dy).sum(), x, dy, reduction="sum")
        optimizer.step(count=1)
        optimizer.close()
    for p, after in zip(before.parameters(), module.parameters(), strict=True):
        assert (p * (p - after)).sum().item() == loss


def test_stages_of_layers_that_tensor_ranks_divide(comm):
    """All of them on each rank; heads, features and words do not divide, tied ones are in the first and last stage."""
    if comm.size > 3:
        pytest.skip("three heads; test_torch_cut_stages.py has stages on several ranks")
    with Mesh(comm, tensor=comm.size, debug=True) as mesh:
        whole, module = fresh(), fresh(seed=mesh.rank)  # those of rank 0 count
        expected = take_steps(whole, adamw(whole), range(3))
        optimizer = virtual_stages(module, mesh, 2, plan=PLAN)
        np.testing.assert_allclose(take_micro_steps(module, optimizer, range(3)), expected, rtol=0, atol=1e-12)
        with mpishard.torch.summon_full_parameters(module):
            assert module.state_dict()["layers.1.up.weight"].shape == (7, 6)
        optimizer.close()
        assert_same_parameters(module, whole, atol=1e-12)
        torch.testing.assert_close(module(words_of(3)[:, :-1]), whole(words_of(3)[:, :-1]), rtol=0, atol=1e-12)


# Calls without gradients.


@pytest.mark.parametrize("name", ["streams", *variants.full("sequential", "llama", "gpt2")])
@pytest.mark.parametrize("without_gradients", [torch.no_grad, *variants.full(torch.inference_mode)])
def test_a_call_without_gradients_returns_on_all_ranks_what_the_module_does(pipeline_mesh, name, without_gradients):
    """Other samples, and other numbers of them, on each data rank."""
    if name in ("llama", "gpt2"):
        pytest.importorskip("transformers")
    whole, module = made(name), made(name)
    optimizer, rank = distributed(module, pipeline_mesh), pipeline_mesh.data.rank
    with without_gradients():
        for _ in range(1 + rank):
            found, expected = (each(words_of(rank)[: 3 + rank, : 2 + rank]) for each in (module, whole))
            found, expected = (getattr(each, "logits", each) for each in (found, expected))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    optimizer.close()
    assert list(inspect.signature(module.forward).parameters) == list(inspect.signature(whole.forward).parameters)


GREEDY, OTHER_WAYS = {}, [dict(num_beams=2), dict(use_cache=False), dict(output_hidden_states=True)]


@pytest.mark.parametrize("options", [GREEDY, *variants.full(*OTHER_WAYS)], ids=lambda options: next(iter(options), ""))
@pytest.mark.parametrize("name", ["gpt2", *variants.full("llama")])
def test_models_of_transformers_continue_texts_as_in_one_process(pipeline_mesh, name, options):
    """By keys and values that each stage keeps of its layers; texts of other lengths on each data rank."""
    pytest.importorskip("transformers")
    whole, module = made(name).eval(), made(name).eval()
    optimizer, rank = distributed(module, pipeline_mesh), pipeline_mesh.data.rank
    words = words_of(rank)[:2, : 2 + rank]
    mask = torch.ones_like(words)
    mask[0, 0] = 0
    options = dict(
        attention_mask=mask, max_new_tokens=4 + rank, do_sample=False, return_dict_in_generate=True, **options
    )
    found, expected = (each.generate(words, **options) for each in (module, whole))
    assert torch.equal(found.sequences, expected.sequences)
    if "output_hidden_states" in options:
        for own, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(own, theirs, rtol=0, atol=1e-12)
    optimizer.close()


@needs_ranks
def test_an_error_in_a_call_without_gradients_is_raised_on_all_ranks(pipeline_mesh):
    """In the last stage of one data rank, of different samples, and of what has no values there."""
    mesh, module, whole = pipeline_mesh, made("streams"), made("streams")
    optimizer = distributed(module, mesh)
    left = []

    def fail(layer, args):
        if left:
            raise ValueError(left.pop())

    is_last = mesh.pipeline.rank == mesh.pipeline.size - 1
    handle = module.layers[3].linear.register_forward_pre_hook(fail)
    with torch.no_grad():
        if mesh.data.rank == 0:
            left += ["no such layer"] if is_last else []
            with pytest.raises(ValueError, match="no such layer"):
                module(words_of(0))
        with pytest.raises(ValueError, match=r"tensor 0 of the inputs"):
            module(words_of(mesh.pipeline.rank))
        torch.testing.assert_close(module(words_of(0)), whole(words_of(0)), rtol=0, atol=1e-12)
        module.head.register_forward_hook(lambda layer, args, found: found if found.sum() > 0 else found)
        with pytest.raises(ValueError, match="decides by values"):
            module(words_of(0))
    handle.remove()
    optimizer.close()


# Errors on one stage.


def fails_in(where, left):
    """A function whose loss, or a hook, fails where it pops a False of `left`, of which a micro-batch takes one."""

    def count(*_):
        if left and not left.pop():
            raise ValueError(f"nothing comes of the {where}")

    def function(module, words):
        loss = loss_of(module, words)
        if where == "loss":
            count()
        return loss

    return function, count


@needs_ranks
@pytest.mark.parametrize(
    ("where", "zero"),
    [("loss", 0), ("gradient", 0), *(pytest.param(each, 2, marks=pytest.mark.full) for each in ("loss", "gradient"))],
)
def test_an_error_on_one_stage_is_raised_on_all_and_training_goes_on(pipeline_mesh, where, zero):
    """In the second of three micro-batches, on one data rank; the gradients of the step are dropped."""
    mesh, whole, module = pipeline_mesh, made("streams"), made("streams")
    left, second = [], [False, True] * (mesh.data.rank == 0)
    function, count = fails_in(where, left)
    if where == "gradient" and mesh.pipeline.rank == 0:
        module.encoder.weight.register_hook(count)
    optimizer = distributed(module, mesh, zero=zero)
    ends = mesh.data.rank, mesh.data.size
    optimizer.loss(function, words_of(0, *ends))
    for step in range(3):
        if step == 1:
            left[:] = second
            with pytest.raises(ValueError, match=f"nothing comes of the {where}"):
                optimizer.loss_and_gradient(function, words_of(step, *ends))
            if where == "loss":
                left[:] = second
                with pytest.raises(ValueError, match="nothing comes of the loss"):
                    optimizer.loss(function, words_of(step, *ends))
        optimizer.loss_and_gradient(function, words_of(step, *ends))
        optimizer.step()
    take_steps(whole, adamw(whole), range(3))
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-12)


@needs_ranks
@pytest.mark.parametrize("where", ["layer", "gradient", "call", *variants.full("loss")])
def test_an_error_of_one_tensor_rank_of_a_stage_is_raised_on_all(comm, where):
    """In its first micro-batch, while the others are in a sum over the tensor axis, or at the end of the pass."""
    if comm.size > 3:
        pytest.skip("three heads; test_torch_cut_stages.py has stages on several ranks")
    left = []
    function, count = fails_in(where, left)
    with Mesh(comm, tensor=comm.size, debug=True) as mesh:
        whole, module = fresh(), fresh()
        optimizer = virtual_stages(module, mesh, 2, plan=PLAN)
        if where in ("layer", "call"):
            module.layers[1].down.register_forward_pre_hook(count)
        elif where == "gradient":
            module.layers[0].q.weight.register_hook(count)
        for step in range(3):
            if step == 1:
                left[:] = [False] * (mesh.rank == mesh.size - 1)
                with pytest.raises(ValueError, match=f"nothing comes of the {where}"):
                    if where == "call":
                        with torch.no_grad():
                            module(words_of(step))
                    else:
                        optimizer.loss_and_gradient(function, words_of(step))
            optimizer.loss_and_gradient(function, words_of(step))
            optimizer.step()
        take_steps(whole, adamw(whole), range(3))
        optimizer.close()
        assert_same_parameters(module, whole, atol=1e-12)


# States on other ranks.


@pytest.mark.parametrize(("zero", "other_zero"), [(0, 1), pytest.param(2, 0, marks=pytest.mark.full)])
def test_a_run_continues_on_other_ranks(comm, folder, zero, other_zero):
    with Mesh(comm, pipeline=pipeline_of(comm)) as mesh, Mesh(comm) as data_mesh:
        values = check_continuation(STREAMS, mesh, data_mesh, folder, zero, other_zero, other_zero)
    assert all(int(values[f"layers.{number}.calls"]) for number in range(4))


@pytest.mark.full
@needs_ranks
def test_parameters_of_half_precision_keep_their_masters(pipeline_mesh, folder):
    check_masters(STREAMS, pipeline_mesh, folder)


# What is refused.


@needs_ranks
def test_a_module_in_stages_says_what_it_cannot_do(pipeline_mesh):
    module = made("streams")
    optimizer = distributed(module, pipeline_mesh)
    with pytest.raises(RuntimeError, match="loss_and_gradient"):
        module(words_of(0))
    with pytest.raises(RuntimeError, match="summon_full_parameters"):
        module.state_dict()
    with pytest.raises(TypeError, match="copied or pickled"):
        copy.deepcopy(module)
    with pytest.raises(ValueError, match="another optimizer"):
        distributed(module, pipeline_mesh)
    with pytest.raises(ValueError, match="pipeline=1"), mpishard.torch.join(optimizer):
        pass
    with mpishard.torch.summon_full_parameters(module), pytest.raises(ValueError, match="a pass of the stages"):
        optimizer.loss(loss_of, words_of(0))
    with pytest.raises(ValueError, match=r"mesh\.data\.rank"):
        optimizer.loss_and_gradient(loss_of, words_of(pipeline_mesh.rank))
    with pytest.raises(ValueError, match="mean"):
        optimizer.loss_and_gradient(loss_of, words_of(0), reduction="mean" if pipeline_mesh.rank else "none")
    del optimizer
    gc.collect()
    with pytest.raises(RuntimeError, match="close"):
        module(words_of(0))
    with pytest.raises(ValueError, match="close"):
        distributed(module, pipeline_mesh)


@needs_ranks
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(zero=3), "zero=3"),
        (dict(schedule="fast"), "'fast'"),
        (dict(chunks=2), "chunk"),
        (dict(stages=["nothing"]), "'nothing'"),
        (dict(microbatches=0), "microbatches"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_go_together_is_refused_on_all_ranks(pipeline_mesh, options, message):
    module = made("streams")
    given = options if pipeline_mesh.rank else {}
    with pytest.raises(ValueError, match=message):
        distributed(module, pipeline_mesh, **given)
    module.load_state_dict(made("streams").state_dict())


@needs_ranks
def test_meshes_and_settings_that_do_not_go_with_stages(comm, pipeline_mesh):
    for config, message in (
        (ShardingConfiguration(pipeline_mesh, reproducible=True), "reproducible"),
        (ShardingConfiguration(pipeline_mesh, sync_every=2), "sync_every"),
    ):
        with pytest.raises(ValueError, match=message):
            distributed(sequential(), config)
    frozen = sequential()
    frozen[0].requires_grad_(False)
    with pytest.raises(ValueError, match="pipeline rank 0 would have no parameter"):
        distributed(frozen, pipeline_mesh, stages=["2", "4"][: pipeline_mesh.pipeline.size - 1])
    with Mesh(comm) as mesh, pytest.raises(ValueError, match="'fast'"):
        distributed(sequential(), mesh, schedule="fast")
