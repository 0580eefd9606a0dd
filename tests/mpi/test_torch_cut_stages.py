"""PyTorch modules whose layers tensor ranks divide and a pipeline passes, beside the whole module in one process."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import mpishard
from mpishard import Mesh, ShardingConfiguration

torch = pytest.importorskip("torch")
from torch_models import assert_same_parameters  # noqa: E402
from torch_plans import PLAN, RULE, WIDTH, adamw, fresh, loss_of, take_steps, words_of  # noqa: E402
from torch_stages import made, take_micro_steps  # noqa: E402

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.fixture
def grid(comm):
    """Two tensor ranks in each of two stages; copies on ranks are compared after every step."""
    with Mesh(comm, tensor=2, pipeline=2, debug=True) as mesh:
        yield mesh


def distributed(module, mesh, rule=RULE, **options):
    return mpishard.torch.as_distributed(module, mesh, rule, **{"plan": PLAN, "microbatches": 3, **options})


def mean_over(mesh, losses):
    return mesh.data.all_reduce(np.array(losses)) / mesh.data.size


INTERLEAVED = dict(schedule="interleaved", chunks=2, microbatches=4)


@pytest.mark.parametrize(("zero", "options"), [(0, {}), (1, INTERLEAVED), (2, {})], ids=["ddp", "interleaved", "zero2"])
def test_steps_are_those_of_one_process(grid, zero, options):
    """Heads, features and words do not divide, and the table of words is tied; the values of rank 0 count."""
    whole, module = fresh(layers=4), fresh(seed=grid.rank, layers=4)
    optimizer = distributed(module, grid, zero=zero, **options)
    assert len(optimizer.parameters) < len(optimizer.parameters.specs)
    table = next(spec for spec in optimizer.parameters.specs if spec.name == "tokens.weight")
    assert table.parts and table.copies
    expected = take_steps(whole, adamw(whole), range(10))
    losses = take_micro_steps(module, optimizer, range(10), grid.data)
    np.testing.assert_allclose(mean_over(grid, losses), expected, rtol=0, atol=1e-12)
    with mpishard.torch.summon_full_parameters(module, writeback=False):
        torch.testing.assert_close(module(words_of(11)), whole(words_of(11)), rtol=0, atol=1e-12)
    assert optimizer.loss(loss_of, words_of(11)) == pytest.approx(loss_of(whole, words_of(11)).item(), abs=1e-12)
    optimizer.close()
    assert_same_parameters(module, whole)
    torch.testing.assert_close(module(words_of(11)), whole(words_of(11)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("zero", [0, 2])
def test_the_norm_is_that_of_the_whole_gradient(grid, zero):
    """Of tied and of replicated tensors once; by the method and by the setting."""
    whole, module = fresh(), fresh()
    optimizer = distributed(module, ShardingConfiguration(grid, max_gradient_norm=0.3), zero=zero)
    theirs, axis = adamw(whole), grid.data
    for step in range(2):
        theirs.zero_grad()
        (loss_of(whole, words_of(step)) + loss_of(whole, words_of(step + 7))).backward()
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.3)
        theirs.step()
        with optimizer.no_sync():
            optimizer.loss_and_gradient(loss_of, words_of(step, axis.rank, axis.size))
        optimizer.loss_and_gradient(loss_of, words_of(step + 7, axis.rank, axis.size))
        assert optimizer.clip_grad_norm_(0.5).item() == pytest.approx(expected, rel=1e-12)
        optimizer.step()
    optimizer.close()
    torch.testing.assert_close(dict(module.named_parameters()), dict(whole.named_parameters()), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rule", ["AdamW", "Adafactor"])
def test_steps_of_an_optimizer_of_pytorch(grid, rule):
    """Of each element by itself, and of whole tensors."""
    whole, module = fresh(), fresh()
    theirs, given = (
        getattr(torch.optim, rule)([p for p in each.parameters() if p.requires_grad], lr=0.05)
        for each in (whole, module)
    )
    optimizer = distributed(module, grid, given)
    take_steps(whole, theirs, range(3))
    take_micro_steps(module, optimizer, range(3), grid.data)
    optimizer.close()
    assert_same_parameters(module, whole, atol=1e-9)


# States on other ranks.


def emptied():
    """The module without the values that a checkpoint has; frozen parameters are in none."""
    module = fresh()
    for p in module.parameters():
        p.detach().mul_(0 if p.requires_grad else 1)
    return module


OTHERS = {"data": {}, "tensor": dict(tensor=2), "pipeline": dict(pipeline=2)}


@pytest.mark.parametrize(("other", "zero", "other_zero"), [("data", 0, 3), ("tensor", 1, 0), ("pipeline", 2, 1)])
def test_a_run_continues_in_other_layouts(comm, grid, folder, other, zero, other_zero):
    """There and back, by a checkpoint, by state_dict, and by a state of PyTorch."""
    whole = fresh()
    take_steps(whole, adamw(whole), range(6))
    module = fresh()
    first = distributed(module, grid, zero=zero)
    take_micro_steps(module, first, range(2), grid.data)
    first.save_checkpoint(folder / "first")
    states = first.state_dict(), first.state_dict("torch")
    with mpishard.torch.summon_full_parameters(module):
        values = copy.deepcopy({name: value.clone() for name, value in module.state_dict().items()})
    with Mesh(comm, **OTHERS[other]) as mesh:
        second = emptied()
        optimizer = distributed(second, mesh, zero=other_zero)
        optimizer.load_checkpoint(folder / "first")
        for step in (2, 3):  # all samples on each data rank: the mean of their means
            optimizer.loss_and_gradient(loss_of, words_of(step))
            optimizer.step()
        optimizer.save_checkpoint(folder / "second")
        optimizer.close()
    take_micro_steps(module, first, range(2, 4), grid.data)
    first.load_checkpoint(folder / "second")
    take_micro_steps(module, first, range(4, 6), grid.data)
    first.close()
    assert_same_parameters(module, whole)
    for state in states:
        again = emptied()
        optimizer = distributed(again, grid, zero=2)
        with mpishard.torch.summon_full_parameters(again):
            again.load_state_dict(values)
        optimizer.load_state_dict(state)
        take_micro_steps(again, optimizer, range(2, 6), grid.data)
        optimizer.close()
        assert_same_parameters(again, whole)


def test_parameters_of_half_precision_keep_their_masters(grid, folder):
    module = fresh().bfloat16()
    optimizer = distributed(module, grid)
    take_micro_steps(module, optimizer, range(2), grid.data)
    state = optimizer.state_dict()
    assert state["masters"]["layers.1.o.weight"].shape == (WIDTH, 12)
    optimizer.save_checkpoint(folder)
    optimizer.close()
    for load in (lambda each: each.load_state_dict(state), lambda each: each.load_checkpoint(folder)):
        other = emptied().bfloat16()
        again = distributed(other, grid)
        load(again)
        again.close()
        assert_same_parameters(other, module, atol=0)


# What is refused.


@pytest.mark.parametrize(
    ("between", "features", "kept", "kind", "message"),
    [
        (torch.nn.Softmax(-1), 12, 12, ValueError, "the input of '2' differs"),
        (torch.nn.GLU(-1), 14, 7, RuntimeError, "even"),
    ],
    ids=["numbers", "shapes"],
)
def test_a_plan_that_does_not_fit_is_found_before_the_first_pass(grid, between, features, kept, kind, message):
    def made():
        torch.manual_seed(0)
        first, second = torch.nn.Linear(WIDTH, features), torch.nn.Linear(kept, WIDTH)
        return torch.nn.Sequential(first, between, second, torch.nn.Linear(WIDTH, WIDTH)).double()

    def loss_of_squares(module, x):
        return module(x).square().mean()

    module, plan = made(), {"0": "colwise", "2": "rowwise"}
    optimizer = distributed(module, grid, plan=plan, stages=["3"])
    x = torch.linspace(-1, 1, 4 * WIDTH).double().reshape(4, WIDTH)
    for _ in range(2):
        with pytest.raises(kind, match=message):
            optimizer.loss_and_gradient(loss_of_squares, x)
    optimizer.close()
    assert_same_parameters(module, made(), atol=0)
    if kind is ValueError:
        optimizer = distributed(module, grid, plan=plan, stages=["3"], check_plan=False)
        optimizer.loss_and_gradient(loss_of_squares, x)
        optimizer.close()


def test_gradients_that_a_plan_leaves_unlike_are_found_in_the_first_step(grid):
    module = fresh()
    norms = {name: style for name, style in PLAN.items() if name != "layers.*.norm"}
    optimizer = distributed(module, grid, plan=norms)
    optimizer.loss_and_gradient(loss_of, words_of(0))
    with pytest.raises(ValueError, match=r"norm\.weight.*differ"):
        optimizer.step()
    optimizer.close()
    assert_same_parameters(module, fresh(), atol=0)


def test_a_module_that_is_cut_both_ways_says_what_it_cannot_do(grid):
    module = fresh()
    with pytest.raises(ValueError, match="zero=3"):
        distributed(module, grid, zero=3)
    optimizer = distributed(module, grid)
    with pytest.raises(RuntimeError, match="loss_and_gradient"):
        module(words_of(0))
    with pytest.raises(RuntimeError, match="summon_full_parameters"):
        module.state_dict()
    with pytest.raises(TypeError, match="copied or pickled"):
        copy.deepcopy(module)
    with pytest.raises(ValueError, match=r"tensor and pipeline ranks.*mesh\.data\.rank"):
        optimizer.loss_and_gradient(loss_of, words_of(grid.tensor.rank))
    with pytest.raises(IndexError, match="11 rows"):
        optimizer.loss_and_gradient(loss_of, words_of(0) + 11)
    optimizer.close()


@pytest.mark.parametrize(("zero", "failing"), [(0, [0, 1]), (2, [0, 1]), (0, [1]), (2, [0])])
def test_an_error_of_tensor_ranks_of_a_stage_is_raised_on_all(grid, zero, failing):
    whole, module = fresh(), fresh()
    optimizer = distributed(module, grid, zero=zero, check_plan=False)
    left = []

    def function(module, words):
        loss = loss_of(module, words)
        if left and not left.pop():
            raise ValueError("no loss")
        return loss

    ends = grid.data.rank, grid.data.size
    for step in range(3):
        if step == 1:
            left[:] = [False, True] if grid.data.rank == 0 and grid.tensor.rank in failing else []
            with pytest.raises(ValueError, match="no loss"):
                optimizer.loss_and_gradient(function, words_of(step, *ends))
        optimizer.loss_and_gradient(function, words_of(step, *ends))
        optimizer.step()
    take_steps(whole, adamw(whole), range(3))
    optimizer.close()
    assert_same_parameters(module, whole)


def test_a_model_of_transformers_continues_texts_as_in_one_process(grid):
    """By keys and values of a rank's heads, in its stages; the first pass is compared with the whole module."""
    pytest.importorskip("transformers")
    whole, module = made("llama").eval(), made("llama").eval()
    optimizer = mpishard.torch.as_distributed(module, grid, RULE)
    words = words_of(grid.data.rank)[:2, : 2 + grid.data.rank]
    with torch.no_grad():
        found, expected = (each(words).logits for each in (module, whole))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    found, expected = (each.generate(words, max_new_tokens=5, do_sample=False) for each in (module, whole))
    assert torch.equal(found, expected)
    optimizer.close()
