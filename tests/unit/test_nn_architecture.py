"""Units of a GPT, how they are cut into stages and chunks, and the two ways of writing a call."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard import nn
from mpishard.nn.options import ModelKeywords, ModelOptions

ARCHITECTURE = nn.Architecture(11, 6, 8, 5, 4)
SHARDED = nn.Architecture(11, 6, 8, 5, 4, shards=2)


def test_specs_are_those_of_the_model():
    gpt = nn.GPT(vocabulary_size=11, context_length=6, width=8, layers=5, heads=4)
    assert gpt.parameters.specs == tuple(ARCHITECTURE.specs())
    assert ARCHITECTURE.specs()[0].name == "token_embedding.weight"
    assert ARCHITECTURE.specs()[-1].name == "head.weight"
    assert all(spec.stage == 0 and not spec.partial and not spec.copies for spec in ARCHITECTURE.specs())


def test_blocks_are_dealt_out_evenly():
    cut = ARCHITECTURE.cut(3)
    assert cut == [["embeddings", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3"], ["blocks.4", "output_head"]]
    stages = {spec.name: spec.stage for spec in ARCHITECTURE.specs(3)}
    assert stages["position_embedding.weight"] == 0 and stages["blocks.3.mlp.expand.weight"] == 1
    assert stages["final_norm.bias"] == stages["head.weight"] == 2
    assert [len(units) for units in ARCHITECTURE.cut(5)] == [2, 1, 1, 1, 2]
    # So are those without the slowest unit.
    assert list(map(len, ARCHITECTURE.cut(3, [1, 1, 1, 1, 1, 1, 9]))) == [3, 3, 1]


@given(st.lists(st.integers(0, 9), min_size=5, max_size=9), st.data())
def test_cut_by_costs_is_the_best_there_is(costs, data):
    architecture = nn.Architecture(11, 6, 8, len(costs) - 2, 4)
    stages = data.draw(st.integers(1, architecture.layers))
    cut = architecture.cut(stages, costs)
    assert [unit for units in cut for unit in units] == architecture.units()
    assert len(cut) == stages and all(cut)
    cost = dict(zip(architecture.units(), costs, strict=True))
    best = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)]))
        for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    assert max(sum(cost[unit] for unit in units) for units in cut) == best


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_a_tied_table_is_one_tensor(stages):
    tied = nn.Architecture(11, 6, 8, 5, 4, tied=True)
    specs = {spec.name: spec for spec in tied.specs(stages)}
    assert len(specs) == len(tied.specs(stages)) == len(ARCHITECTURE.specs()) - 1
    table = specs.pop("token_embedding.weight")
    assert (table.shape, table.tensor_dim, table.stage) == ((11, 8), 0, 0)
    assert table.copies == (() if stages == 1 else (stages - 1,))
    assert not any(spec.copies for spec in specs.values())


def test_gradients_of_what_is_used_row_by_row_are_partial():
    partial = {spec.name for spec in ARCHITECTURE.specs(sequence_parallel=True) if spec.partial}
    assert "blocks.0.attention.output.bias" in partial and "final_norm.weight" in partial
    assert len(partial) == 6 * ARCHITECTURE.layers + 2
    assert all(spec.tensor_dim is None for spec in ARCHITECTURE.specs() if spec.name in partial)


class OneName(nn.Architecture):
    def build_block(self, name, sequence_parallel):
        return super().build_block("same", sequence_parallel)


class NoBlock(nn.Architecture):
    def build_block(self, name, sequence_parallel):
        return None


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_of_ones_own_have_names_of_their_own(stages):
    message = "'same.attention_norm.weight' .*blocks.0, .*blocks.1"
    with pytest.raises(ValueError, match=message):
        OneName(11, 6, 8, 2, 4).specs(stages)
    with pytest.raises(TypeError, match="NoBlock.build_block returned None"):
        NoBlock(11, 6, 8, 2, 4).specs(stages)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 6, 8, 5, 4), "vocabulary_size=0"),
        ((11, 6, 8, 0, 4), "layers=0"),
        ((11, 6, 8, 5, 3), "width 8 .*3 heads"),
        ((11, 6, 8, 5, 0), "heads=0"),
        ((11, 6, 8, 5, 4, False, 3), "4 attention heads .*3 shards"),
        ((11, 6, 8, 5, 4, False, 0), "shards=0"),
    ],
)
def test_bad_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        nn.Architecture(*arguments)


@pytest.mark.parametrize(
    "place, what", list(enumerate(("vocabulary_size", "context_length", "width", "layers", "heads")))
)
def test_sizes_are_integers(place, what):
    sizes = [11, 6, 8, 5, 4]
    for wrong in (float(sizes[place]), str(sizes[place]), None, True):
        with pytest.raises(TypeError, match=f"{what}=.*whole number"):
            nn.Architecture(*sizes[:place], wrong, *sizes[place + 1 :])
    assert nn.Architecture(*map(np.int64, sizes)) == ARCHITECTURE


@pytest.mark.parametrize("kind", [nn.Architecture, nn.LlamaArchitecture])
def test_sizes_of_numpy_can_be_saved_and_exported(kind):
    """Both write JSON, which takes none of NumPy's numbers."""
    fields = dataclasses.asdict(kind(*map(np.int64, (11, 6, 8, 5, 4)), tied=np.True_, dropout=np.float32(0.5)))
    assert json.loads(json.dumps(fields)) == fields


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ARCHITECTURE.check(tensor=3), "4 attention heads .*3 tensor-parallel ranks"),
        (lambda: SHARDED.check(tensor=4), "2 shards .*4 tensor-parallel ranks"),
        (lambda: ARCHITECTURE.check(stages=6), "6 pipeline stages, .*5 layers.*fewer pipeline ranks"),
        (lambda: ARCHITECTURE.cut(6, [1] * 7), "6 pipeline stages, .*5 layers"),
        (lambda: ARCHITECTURE.cut(2, [1] * 6), "5 layers needs 7 numbers"),
        (lambda: ARCHITECTURE.cut(2, [1] * 6 + [-1]), "7 numbers of at least 0"),
        (lambda: ARCHITECTURE.cut(2, [1] * 6 + [np.nan]), "7 numbers of at least 0"),
        (lambda: ARCHITECTURE.cut(2, [1] * 6 + ["fast"]), "'fast'.*7 numbers"),
        (lambda: ARCHITECTURE.cut(2, 3.0), "stage_costs are 3.0; .*7 numbers"),
    ],
)
def test_what_cannot_be_cut(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# A GPT in chunks on one rank: schedules, recomputation and storage change where things are, not what comes out.

SIZES = dict(vocabulary_size=11, context_length=8, width=12, layers=4, heads=3, dtype=np.float64)


def model(**options):
    gpt = nn.GPT(**(SIZES | options))
    for number, spec in enumerate(gpt.parameters.specs):
        gpt.parameters[spec.name][...] += 0.3 * np.random.default_rng(number).standard_normal(spec.shape)
    return gpt


def batch(size, length=7):
    random = np.random.default_rng(0)
    return random.integers(0, 11, (size, length)), random.integers(0, 11, (size, length))


def run(gpt, pair):
    """Loss, and a copy of all gradients by name."""
    gpt.parameters.reset_gradients()
    loss = gpt.loss_and_gradient(*pair)
    return loss, {name: gpt.parameters.gradient(name)[0].copy() for name in gpt.parameters}


def assert_same_bits(found, expected):
    assert found[0] == expected[0]
    assert list(found[1]) == list(expected[1])
    for name, gradient in found[1].items():
        np.testing.assert_array_equal(gradient, expected[1][name], err_msg=name)


@pytest.mark.parametrize("microbatches, recompute", [(1, False), (3, True), (5, False)])
@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_schedules_and_recomputation_on_one_rank(schedule, chunks, microbatches, recompute):
    """All of them add micro-batches up in one order, so that not one bit differs; some batches are empty."""
    pair = batch(3)
    expected = run(model(microbatches=microbatches), pair)
    gpt = model(schedule=schedule, chunks=chunks, microbatches=microbatches, recompute=recompute)
    assert_same_bits(run(gpt, pair), expected)
    assert_same_bits(run(gpt, pair), expected)
    assert gpt.loss(*pair) == expected[0]
    np.testing.assert_array_equal(gpt.logits(pair[0]), model().logits(pair[0]))


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_tied_embeddings(schedule, chunks):
    """The gradient of the table is that of both uses, as if they were two tables of equal values."""
    pair = batch(3)
    untied, tied = model(), model(tied=True, schedule=schedule, chunks=chunks, microbatches=2)
    for name in tied.parameters:
        untied.parameters[name][...] = tied.parameters[name]
    untied.parameters["head.weight"][...] = tied.parameters["token_embedding.weight"].T
    loss, expected = run(untied, pair)
    found_loss, found = run(tied, pair)
    assert found_loss == pytest.approx(loss, rel=1e-14)
    expected["token_embedding.weight"] += expected.pop("head.weight").T
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-12, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(tied.logits(pair[0]), untied.logits(pair[0]), rtol=1e-12, atol=1e-12)


def test_a_tied_table_is_announced_once():
    gpt = model(tied=True)
    order = []
    gpt.parameters.gradients.mark_ready = order.append
    gpt.loss_and_gradient(*batch(2))
    assert sorted(order) == sorted(gpt.parameters)
    assert order[-1] == "token_embedding.weight"


def test_memory_of_activations():
    """All of it, half of the bytes (a quarter of float64), or the inputs of blocks only."""
    sizes = dict(vocabulary_size=4, context_length=64, width=32, layers=8, heads=4)
    tokens = np.zeros((8, 64), int)

    def used(**options):
        gpt = nn.GPT(**sizes, microbatches=8, schedule="gpipe", **options)
        gpt.loss_and_gradient(tokens, tokens)
        return gpt.activation_bytes - nn.GPT(**sizes, **options).activation_bytes

    full, inputs = used(), used(recompute=True)
    half, half_inputs = (used(storage_dtype=np.float16, recompute=again) for again in (False, True))
    # A block keeps 17 widths of each token (two norms; query, key, value, attention; two sums; twice 4 in the MLP), of
    # which its output is one; 4 widths of a float32 model are what all of this costs with inputs only.
    rows, blocks = 8 * 64, 8
    assert full > rows * blocks * 17 * 32 * 4
    assert half < 0.56 * full
    assert inputs < 0.2 * full
    assert half_inputs < inputs - 0.7 * rows * (blocks - 1) * 32 * 2


@pytest.mark.parametrize("options", [dict(storage_dtype=np.float16), dict(recompute=True)])
def test_less_is_kept_without_allocation_after_the_first_step(options):
    gpt, pair, ragged = model(microbatches=3, **options), batch(7), batch(5, length=6)
    first = run(gpt, pair)
    held = gpt.activation_bytes
    run(gpt, ragged)
    assert_same_bits(run(gpt, pair), first)
    assert gpt.activation_bytes == held


def test_loss_scale_multiplies_gradients_and_not_the_loss():
    gpt = model()
    loss, expected = run(gpt, batch(2))
    gpt.parameters.loss_scale = 1024.0
    found_loss, found = run(gpt, batch(2))
    assert found_loss == loss
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, 1024 * expected[name], rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("options", [dict(stage_costs="measured"), dict(stage_costs=[4, 1, 1, 1, 1, 2])])
def test_stages_cut_by_costs(options):
    gpt = model(schedule="interleaved", chunks=2, microbatches=2, **options)
    names = [unit.name for chunk in gpt.chunks for unit in chunk.units]
    assert names == gpt.architecture.units()
    if options["stage_costs"] != "measured":
        assert [len(chunk.units) for chunk in gpt.chunks] == [2, 4]
    assert_same_bits(run(gpt, batch(3)), run(model(microbatches=2), batch(3)))


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(storage_dtype=np.float32), TypeError, "storage_dtype is float32"),
        (dict(wire_dtype="half a float"), TypeError, "wire_dtype is half a float"),
        (dict(wire_dtype=np.int16), TypeError, "wire_dtype is int16"),
        (dict(sharded_parameters=True), ValueError, "sharded_parameters needs a mesh"),
        (dict(stage_costs="guessed"), ValueError, "stage_costs is 'guessed'"),
        (dict(stage_costs=[1, 2]), ValueError, "4 layers needs 6 numbers"),
        (dict(schedule="interleaved", chunks=5), ValueError, "5 pipeline stages, .*4 layers"),
        (dict(schedule="interleaved"), ValueError, "chunks"),
        (dict(schedule="2f2b"), ValueError, "2f2b"),
        (dict(microbatches=0), ValueError, "0"),
        (dict(dtype=np.float16), TypeError, "dtype is float16"),
        (dict(dtype=int), TypeError, "dtype is int64"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        model(**options)


# The call of a model: sizes and options by keyword.

TINY = dict(vocabulary_size=8, context_length=8, width=8, layers=1, heads=2)


@pytest.mark.parametrize("model, architecture", [(nn.GPT, nn.Architecture), (nn.Llama, nn.LlamaArchitecture)])
def test_a_model_takes_the_fields_of_its_architecture_with_their_defaults(model, architecture):
    fields = {each.name: each.default for each in dataclasses.fields(architecture)}
    shown = dict(inspect.signature(model).parameters)
    assert shown.pop("options").kind is inspect.Parameter.VAR_KEYWORD
    nothing = inspect.Parameter.empty, dataclasses.MISSING
    assert {name: None if each.default in nothing else each.default for name, each in shown.items()} == {
        name: None if default in nothing else default for name, default in fields.items()
    }
    made = model(**TINY)
    assert made.architecture == architecture(**TINY)
    assert model(**vars(made.architecture)).architecture == made.architecture


def test_every_model_takes_the_keywords_of_a_decoder():
    shown = inspect.signature(nn.Decoder).parameters
    assert set(ModelKeywords.__annotations__) == {*shown} - {"architecture"}
    checked = {each.name: each.default for each in dataclasses.fields(ModelOptions)}
    assert checked == {name: shown[name].default for name in checked}


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((8, 8, 8, 1, 2), TINY, "1 positional argument but 6"),
        ((nn.Architecture(**TINY),), TINY, "1 positional argument but 2"),
        ((), {"vocabulary_size": 8}, "missing 4 .*'context_length'"),
        ((), TINY | {"head": 2}, "argument 'head'"),
        ((), TINY | {"tied": 1}, "tied=1"),
        ((), TINY | {"recompute": 1}, "recompute=1"),
        ((), TINY | {"dtype": "float16"}, "dtype is float16"),
    ],
)
def test_calls_that_say_too_much_or_too_little(arguments, options, message):
    with pytest.raises(TypeError, match=message):
        nn.GPT(*arguments, **options)
