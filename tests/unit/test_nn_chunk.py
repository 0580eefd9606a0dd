"""A GPT in chunks on one rank: schedules, recomputation and storage change where things are, not what comes out."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mpishard import nn

SIZES = dict(vocabulary_size=11, context_length=8, width=12, layers=4, heads=3, dtype=np.float64)


def model(**options):
    gpt = nn.GPT(**SIZES, **options)
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


@pytest.mark.parametrize("microbatches", [1, 3, 5])
@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_schedules_on_one_rank(schedule, chunks, microbatches):
    """Micro-batches are added up in one order by all of them, so that not one bit differs; some batches are empty."""
    pair = batch(3)
    expected = run(model(microbatches=microbatches), pair)
    gpt = model(schedule=schedule, chunks=chunks, microbatches=microbatches)
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


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_recomputation_changes_no_bit(schedule, chunks):
    pair = batch(5)
    options = dict(schedule=schedule, chunks=chunks, microbatches=2)
    assert_same_bits(run(model(recompute=True, **options), pair), run(model(**options), pair))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype, bits", [(ml_dtypes.bfloat16, 8), (np.float16, 11)])
def test_storage_in_half_precision(dtype, bits, recompute):
    pair = batch(4)
    loss, expected = run(model(microbatches=2), pair)
    gpt = model(microbatches=2, storage_dtype=dtype, recompute=recompute, schedule="gpipe")
    found_loss, found = run(gpt, pair)
    assert found_loss == loss
    squares = np.array([[((found[name] - g) ** 2).sum(), (g**2).sum()] for name, g in expected.items()])
    error = np.sqrt(squares[:, 0].sum() / squares[:, 1].sum())
    assert 2.0**-bits / 4 < error < 2 * 2.0**-bits


def test_memory_of_activations():
    """All of it, half of the bytes (a quarter of float64), or the inputs of blocks only."""
    sizes = dict(vocabulary_size=4, context_length=64, width=32, layers=8, heads=4)
    tokens = np.zeros((8, 64), int)

    def used(**options):
        gpt = nn.GPT(**sizes, microbatches=8, schedule="gpipe", **options)
        gpt.loss_and_gradient(tokens, tokens)
        return gpt.activation_bytes - nn.GPT(**sizes, **options).activation_bytes

    full, half, inputs, half_inputs = (
        used(),
        used(storage_dtype=np.float16),
        used(recompute=True),
        used(recompute=True, storage_dtype=np.float16),
    )
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
        (dict(storage_dtype=np.float32), TypeError, "storage_dtype is float32; it must be float16 or bfloat16"),
        (dict(wire_dtype="half a float"), TypeError, "wire_dtype is half a float; it must be float16 or bfloat16"),
        (dict(wire_dtype=np.int16), TypeError, "wire_dtype is int16"),
        (dict(sharded_parameters=True), ValueError, "sharded_parameters needs a mesh"),
        (dict(stage_costs="guessed"), ValueError, "stage_costs is 'guessed'; it must be \"measured\", numbers or None"),
        (dict(stage_costs=[1, 2]), ValueError, "a model of 4 layers needs 6 numbers"),
        (dict(schedule="interleaved", chunks=5), ValueError, "5 pipeline stages, but the model has 4 layers"),
        (dict(schedule="interleaved"), ValueError, "chunks"),
        (dict(schedule="2f2b"), ValueError, "2f2b"),
        (dict(microbatches=0), ValueError, "0"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        model(**options)
