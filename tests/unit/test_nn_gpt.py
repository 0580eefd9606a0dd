"""The whole network: between dtypes and batches, without allocation, and on bad input."""

from __future__ import annotations

import tracemalloc

import layer_formulas
import numpy as np
import pytest
from layer_kernels import use_formulas

from mpishard import nn
from mpishard.nn import kernels
from mpishard.nn.units import Batch

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 11, 140, 12, 2, 3
SIZES = dict(vocabulary_size=VOCABULARY, context_length=CONTEXT, width=WIDTH, layers=LAYERS, heads=HEADS)


def model(dtype=np.float64, seed=0):
    """A small network, away from its initial values so that every tensor matters."""
    gpt = nn.GPT(**SIZES, dtype=dtype, seed=seed)
    random = np.random.default_rng(5)
    gpt.parameters.flat[:] += 0.3 * random.standard_normal(gpt.parameters.size)
    return gpt


def batch(size, length, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(0, VOCABULARY, (size, length)), random.integers(0, VOCABULARY, (size, length))


def run(gpt, *pair):
    """Loss and a copy of all gradients of one micro-batch."""
    gpt.parameters.gradients.reset()
    loss = gpt.loss_and_gradient(*pair)
    return loss, gpt.parameters.gradients.flat.copy()


def test_compiled_kernels_equal_their_formulas():
    gpt, pair = model(), batch(2, CONTEXT)
    loss, gradient = run(gpt, *pair)
    units = gpt.chunks[0].units
    assert all(unit.ops is kernels for unit in units)
    use_formulas(units)
    plain_loss, plain_gradient = run(gpt, *pair)
    assert gpt.blocks[0].mlp.activation.ops is layer_formulas
    assert loss == pytest.approx(plain_loss, rel=1e-13)
    np.testing.assert_allclose(gradient, plain_gradient, rtol=1e-11, atol=1e-11)


def test_float32_is_close_to_float64():
    pair = batch(3, 50)
    loss, gradient = run(model(np.float64), *pair)
    loss32, gradient32 = run(model(np.float32), *pair)
    assert gradient32.dtype == np.float32
    assert loss32 == pytest.approx(loss, rel=1e-6)
    assert np.abs(gradient32 - gradient).max() < 1e-5 * np.abs(gradient).max()


def test_same_initial_values_in_both_dtypes():
    sizes = dict(vocabulary_size=9, context_length=8, width=4, layers=1, heads=2)
    double, single = nn.GPT(**sizes, dtype=np.float64), nn.GPT(**sizes, dtype=np.float32)
    np.testing.assert_array_equal(double.parameters.flat.astype(np.float32), single.parameters.flat)
    other = nn.GPT(**sizes, dtype=np.float64, seed=1)
    assert (other.parameters["head.weight"] != double.parameters["head.weight"]).all()


def test_initial_loss_is_that_of_a_uniform_guess():
    gpt = nn.GPT(vocabulary_size=256, context_length=32, width=32, layers=2, heads=4)
    tokens = np.random.default_rng(0).integers(0, 256, (4, 32))
    assert gpt.loss(tokens, tokens[:, ::-1]) / tokens.size == pytest.approx(np.log(256), rel=0.02)
    assert gpt.parameters["blocks.0.mlp.contract.weight"].std() == pytest.approx(0.02 / 2, rel=0.05)


def test_two_micro_batches_in_flight():
    """As pipeline schedules hold them: forward, forward, backward, backward, with scratch memory in common."""
    gpt, (tokens, targets) = model(), batch(4, 100)
    loss, gradient = run(gpt, tokens, targets)
    gradients = gpt.parameters.gradients
    gradients.reset()
    (chunk,) = gpt.chunks
    works = [chunk.workspace(), chunk.workspace()]
    halves = [Batch(tokens[i : i + 2].ravel(), targets[i : i + 2].ravel(), 100) for i in (0, 2)]
    parts = [chunk.forward(None, work, half) for work, half in zip(works, halves, strict=True)]
    for work, half in zip(works, halves, strict=True):
        chunk.backward(None, work, half)
    assert sum(parts) == pytest.approx(loss, rel=1e-13)
    np.testing.assert_allclose(gradients.flat, gradient, rtol=1e-12, atol=1e-12)


def test_ragged_batches_give_the_same_as_a_fresh_model():
    gpt = model()
    for size, length in [(2, 8), (4, 8), (1, 140), (4, 3), (2, 8), (3, 130)]:
        pair = batch(size, length, seed=size)
        loss, gradient = run(gpt, *pair)
        fresh_loss, fresh_gradient = run(model(), *pair)
        assert loss == fresh_loss
        np.testing.assert_array_equal(gradient, fresh_gradient)


def test_gradients_are_announced_once_each_from_the_last_tensor_to_the_first():
    gpt = model()
    order = []
    announce = gpt.parameters.gradients.mark_ready
    gpt.parameters.gradients.mark_ready = lambda name: (order.append(name), announce(name))
    run(gpt, *batch(1, 4))
    assert sorted(order) == sorted(gpt.parameters)
    stems = [name.rpartition(".")[0] for name in order]
    forward = [spec.name.rpartition(".")[0] for spec in gpt.parameters.specs]
    # Tensors of one layer may come in any order, layers only backwards.
    assert list(dict.fromkeys(stems))[::-1][2:] == list(dict.fromkeys(forward))[2:]


def test_nothing_is_allocated_after_the_first_step():
    gpt, pair, ragged = model(np.float32), batch(4, 130), batch(3, 130)

    def step(pair):
        gpt.parameters.gradients.reset()
        gpt.loss_and_gradient(*pair)

    for _ in range(2):
        step(pair)
        step(ragged)
    (work,) = gpt.chunks[0].workspaces
    pools = [work.scratch, work.saved, *(work.part(block.name).saved for block in gpt.blocks)]

    def addresses():
        return [memory.ctypes.data for pool in pools for memory in pool._memory.values()]

    held, buffers = gpt.activation_bytes, addresses()
    tracemalloc.start()
    try:
        step(pair)
        step(ragged)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        step(pair)
        step(ragged)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # NumPy reports its arrays to tracemalloc; views and Python's own small objects stay far below one activation.
    smallest = 3 * 130 * WIDTH * 4
    assert peak - before < smallest // 2
    assert after - before < 1000
    assert gpt.activation_bytes == held
    assert addresses() == buffers


def test_scores_of_the_whole_batch_are_never_held():
    gpt = nn.GPT(vocabulary_size=8, context_length=512, width=8, layers=1, heads=4)
    tokens = np.zeros((8, 512), int)
    run(gpt, tokens, tokens)
    assert gpt.activation_bytes < 8 * 4 * 512 * 512 * 4 / 4


def test_logits_agree_with_the_loss():
    gpt, (tokens, targets) = model(), batch(2, 7)
    logits = gpt.logits(tokens)
    assert logits.shape == (2, 7, VOCABULARY)
    picked = np.take_along_axis(logits, targets[..., None], axis=2)[..., 0]
    exact = (np.log(np.exp(logits).sum(axis=2)) - picked).sum()
    assert gpt.loss(tokens, targets) == pytest.approx(exact, rel=1e-13)
    kept = logits.copy()
    gpt.loss_and_gradient(targets, tokens)
    np.testing.assert_array_equal(logits, kept)


def test_generate_is_a_function_of_prompt_and_seed():
    gpt = model()
    text = gpt.generate([1, 2, 3], 20, temperature=0.8, seed=7)
    assert text.dtype == np.int64 and text.shape == (23,) and list(text[:3]) == [1, 2, 3]
    np.testing.assert_array_equal(text, gpt.generate([1, 2, 3], 20, temperature=0.8, seed=7))
    assert (text != gpt.generate([1, 2, 3], 20, temperature=0.8, seed=8)).any()
    assert ((text >= 0) & (text < VOCABULARY)).all()


def test_generate_at_temperature_0_takes_the_most_likely_token():
    gpt = model()
    text = gpt.generate([4], 12, temperature=0)
    for end in range(1, 13):
        assert text[end] == gpt.logits(text[None, :end])[0, -1].argmax()
    assert gpt.generate([0], 0).tolist() == [0]


GOOD = np.zeros((2, 4), int)


@pytest.mark.parametrize(
    "tokens, targets, error, message",
    [
        (GOOD + VOCABULARY, GOOD, ValueError, "tokens range from 11 to 11.*0 to 10"),
        (GOOD - 1, GOOD, ValueError, "tokens range from -1 to -1"),
        (GOOD, GOOD - 1, ValueError, "targets range from -1.*vocabulary_size is 11"),
        (np.zeros((1, CONTEXT + 1), int), np.zeros((1, CONTEXT + 1), int), ValueError, "of 141.*context_length is 140"),
        (GOOD, GOOD[:, 1:], ValueError, r"tokens .*\(2, 4\), .*targets \(2, 3\)"),
        (GOOD * 1.0, GOOD, TypeError, "tokens .*got float64"),
        (GOOD, GOOD > 0, TypeError, "targets .*got bool"),
        (GOOD[0], GOOD[0], ValueError, r"tokens .*got \(4,\)"),
        (GOOD[:, :0], GOOD[:, :0], ValueError, r"tokens of shape \(2, 0\)"),
    ],
)
def test_bad_tokens(tokens, targets, error, message):
    gpt = model()
    kept = gpt.parameters.flat.copy()
    with pytest.raises(error, match=message):
        gpt.loss_and_gradient(tokens, targets)
    np.testing.assert_array_equal(gpt.parameters.flat, kept)
    gpt.loss_and_gradient(GOOD, GOOD)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint64])
def test_tokens_of_any_integer_type(dtype):
    tokens, targets = batch(2, 5)
    gpt = model()
    assert run(gpt, tokens.astype(dtype), targets.astype(dtype))[0] == run(gpt, tokens, targets)[0]


def test_several_batches_are_one_micro_batch_each():
    """Of other sizes and lengths, also an empty one; the number of micro-batches of the model is left out."""
    gpt = nn.GPT(**SIZES | dict(layers=4), dtype=np.float64, schedule="interleaved", chunks=2, microbatches=3)
    batches = [batch(3, 5), batch(0, 2), batch(1, 7, seed=1)]
    found = [run(gpt, *pair) for pair in batches]
    gpt.parameters.gradients.reset()
    assert gpt.losses_and_gradient(batches) == pytest.approx([loss for loss, _ in found], rel=1e-14)
    total = sum(gradient for _, gradient in found)
    np.testing.assert_allclose(gpt.parameters.gradients.flat, total, rtol=1e-12, atol=1e-12)
    gpt.loss_and_gradient(*batches[0])  # adds to what there is
    total += found[0][1]
    np.testing.assert_allclose(gpt.parameters.gradients.flat, total, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="but targets"):
        gpt.losses_and_gradient([batch(1, 2), (batch(1, 2)[0], batch(1, 3)[1])])
