"""PyTorch modules whose layers tensor ranks divide and a pipeline passes, beside the whole module in one process."""

from __future__ import annotations

import copy

import pytest

import mpishard
from mpishard import Mesh

torch = pytest.importorskip("torch")
from torch_divided import Division, check_continuation, check_masters, check_norm, check_steps  # noqa: E402
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


BOTH = Division(fresh, distributed, take_micro_steps)
INTERLEAVED = dict(schedule="interleaved", chunks=2, microbatches=4)


@pytest.mark.parametrize(("zero", "options"), [(0, {}), (1, INTERLEAVED), (2, {})], ids=["ddp", "interleaved", "zero2"])
def test_steps_are_those_of_one_process(grid, zero, options):
    """Heads, features and words do not divide, and the table of words is tied; the values of rank 0 count."""
    whole, module = fresh(layers=4), fresh(seed=grid.rank, layers=4)
    optimizer = distributed(module, grid, zero=zero, **options)
    assert len(optimizer.parameters) < len(optimizer.parameters.specs)
    table = next(spec for spec in optimizer.parameters.specs if spec.name == "tokens.weight")
    assert table.parts and table.copies
    check_steps(take_micro_steps, module, optimizer, grid.data, whole, adamw(whole), range(10))
    with mpishard.torch.summon_full_parameters(module, writeback=False):
        torch.testing.assert_close(module(words_of(11)), whole(words_of(11)), rtol=0, atol=1e-12)
    assert optimizer.loss(loss_of, words_of(11)) == pytest.approx(loss_of(whole, words_of(11)).item(), abs=1e-12)
    optimizer.close()
    assert_same_parameters(module, whole)
    torch.testing.assert_close(module(words_of(11)), whole(words_of(11)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("zero", [0, 2])
def test_the_norm_is_that_of_the_whole_gradient(grid, zero):
    """Of tied and of replicated tensors once."""
    check_norm(BOTH, grid, zero)


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


OTHERS = {"data": {}, "tensor": dict(tensor=2), "pipeline": dict(pipeline=2)}


@pytest.mark.parametrize(("other", "zero", "other_zero"), [("data", 0, 3), ("tensor", 1, 0), ("pipeline", 2, 1)])
def test_a_run_continues_in_other_layouts(comm, grid, folder, other, zero, other_zero):
    with Mesh(comm, **OTHERS[other]) as mesh:
        check_continuation(BOTH, grid, mesh, folder, zero, other_zero, last_zero=2)


def test_parameters_of_half_precision_keep_their_masters(grid, folder):
    check_masters(BOTH, grid, folder)


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
