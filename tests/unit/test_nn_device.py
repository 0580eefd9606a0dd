"""The network on arrays that the host cannot touch: the stand-in for device memory, and CuPy where there is a GPU."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import standin
from layer_kernels import use_formulas

from mpishard import nn
from mpishard.backend import array as arrays

VOCABULARY, CONTEXT = 11, 110  # longer than a block of attention on the host
SIZES = VOCABULARY, CONTEXT, 12, 2, 3


@pytest.fixture(params=["standin", "cupy"])
def module(request):
    """The module that makes device arrays of one kind."""
    if request.param == "standin":
        return arrays.module_of(standin.empty(1))
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    import cupy

    if not cupy.is_available():
        pytest.skip("CuPy finds no GPU")
    return cupy


def pair(module, dtype, kind=nn.GPT, **options):
    """Two equal networks: on the host with the formulas that run on devices, and on the device."""
    models = kind(*SIZES, dtype=dtype, **options), kind(*SIZES, dtype=dtype, module=module, **options)
    use_formulas(models[0].chunks[0].units)
    noise = np.random.default_rng(5).standard_normal(models[0].parameters.size).astype(dtype)
    for model in models:
        values = arrays.to_host(model.parameters.flat) + dtype(0.3) * noise
        if model is models[0]:
            np.copyto(model.parameters.flat, values)
        else:
            arrays.copy_to_device(values, model.parameters.flat)
    return models


def batch(size, length, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(0, VOCABULARY, (size, length)), random.integers(0, VOCABULARY, (size, length))


def run(model, *given):
    model.parameters.reset_gradients()
    loss = model.loss_and_gradient(*given)
    return loss, arrays.to_host(model.parameters.gradients.flat)


def test_initial_values_are_those_of_the_host(module):
    host, device = nn.GPT(*SIZES), nn.GPT(*SIZES, module=module)
    assert arrays.is_device(device.parameters.flat)
    np.testing.assert_array_equal(arrays.to_host(device.parameters.flat), host.parameters.flat)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True, "microbatches": 2},
        {"recompute": True},
        {"chunks": 2, "schedule": "interleaved", "microbatches": 2},
    ],
    ids=["plain", "tied", "recompute", "chunks"],
)
def test_loss_and_gradients_equal_those_of_the_host(module, options):
    host, device = pair(module, np.float64, **options)
    for given in (batch(3, CONTEXT), batch(2, 7), batch(0, 4)):
        loss, gradient = run(host, *given)
        other_loss, other_gradient = run(device, *given)
        assert other_loss == pytest.approx(loss, rel=1e-13)
        np.testing.assert_allclose(other_gradient, gradient, rtol=1e-11, atol=1e-11)
        assert device.loss(*given) == pytest.approx(loss, rel=1e-13)


def test_llama_equals_that_of_the_host(module):
    options = {"key_value_heads": 1, "bias": True, "head_norms": True, "dropout": 0.2, "microbatches": 2}
    host, device = pair(module, np.float64, nn.Llama, **options)
    for size, length in ((3, CONTEXT), (2, 7), (0, 4)):
        given = *batch(size, length), range(size)
        loss, gradient = run(host, *given)
        other_loss, other_gradient = run(device, *given)
        assert other_loss == pytest.approx(loss, rel=1e-13)
        np.testing.assert_allclose(other_gradient, gradient, rtol=1e-11, atol=1e-11)


def test_storage_in_half_precision(module):
    host, device = pair(module, np.float32, storage_dtype=np.float16)
    given = batch(3, 20)
    loss, gradient = run(host, *given)
    other_loss, other_gradient = run(device, *given)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    # Numbers that differ in the last bit of float32 may be rounded to neighbours in float16.
    assert np.abs(other_gradient - gradient).max() < 1e-3 * np.abs(gradient).max()


def test_products_in_half_precision(module):
    with pytest.warns(UserWarning, match="slower than float32"):
        host, device = pair(module, np.float32, compute_dtype=np.float16)
    given = batch(3, 20)
    loss, gradient = run(host, *given)
    other_loss, other_gradient = run(device, *given)
    # On devices the results of products are rounded too.
    assert other_loss == pytest.approx(loss, rel=1e-3)
    assert np.abs(other_gradient - gradient).max() < 5e-3 * np.abs(gradient).max()
    exact, _ = pair(module, np.float32)
    assert np.abs(other_gradient - run(exact, *given)[1]).max() > 1e-5 * np.abs(gradient).max()


def test_predictions(module):
    host, device = pair(module, np.float64)
    tokens, _ = batch(2, 9)
    logits = device.logits(tokens)
    assert arrays.is_device(logits)
    np.testing.assert_allclose(arrays.to_host(logits), host.logits(tokens), rtol=1e-12, atol=1e-12)
    prompts = [[1, 2, 3], [4, 5]]
    for options in (dict(temperature=0), dict(), dict(cache=False)):
        for text, other in zip(
            device.generate(prompts, 5, **options), host.generate(prompts, 5, **options), strict=True
        ):
            np.testing.assert_array_equal(text, other)


def test_tokens_may_be_on_the_device(module):
    _, device = pair(module, np.float64)
    given = batch(2, 9)
    on_device = [module.asarray(each) for each in given]
    loss, gradient = run(device, *given)
    other_loss, other_gradient = run(device, *on_device)
    # Sums over tokens may be taken in another order on a GPU.
    assert other_loss == pytest.approx(loss, rel=1e-14)
    np.testing.assert_allclose(other_gradient, gradient, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="valid tokens are 0 to 10"):
        device.loss(module.asarray(given[0] + VOCABULARY), on_device[1])


def test_measured_stage_costs(module):
    device = nn.GPT(*SIZES, module=module, stage_costs="measured")
    assert device.loss(*batch(1, 4)) > 0
