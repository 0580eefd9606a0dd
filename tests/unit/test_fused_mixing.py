"""Attention by cuDNN on the stand-in for device memory, with a double of cuDNN that works at raw addresses."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import fake_cudnn
import ml_dtypes
import numpy as np
import pytest
import standin

from mpishard import nn
from mpishard.backend import array as arrays
from mpishard.nn import device_attention

HALVES = [np.float16, ml_dtypes.bfloat16]
SIZES = 11, 70, 48, 2, 3  # heads of 16 channels
MODULE = arrays.module_of(standin.empty(1))


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The double in the place of cuDNN, with no graphs yet."""
    found = {"library": fake_cudnn}
    unused = replace(device_attention.LIBRARY)
    monkeypatch.setattr(unused, "module_for", lambda name: found["library"])
    monkeypatch.setattr(device_attention, "LIBRARY", unused)
    monkeypatch.setattr(fake_cudnn, "factor", 1.0)
    fake_cudnn.executed.clear()
    return found


def model(half: Any, kind: Any = nn.GPT, sizes: Any = SIZES, **options: Any) -> Any:
    made = kind(*sizes, dtype=np.float32, module=MODULE, compute_dtype=half, **options)
    noise = np.random.default_rng(5).standard_normal(made.parameters.size).astype(np.float32)
    arrays.copy_to_device(arrays.to_host(made.parameters.flat) + np.float32(0.3) * noise, made.parameters.flat)
    return made


def run(model: Any, *given: Any) -> Any:
    model.parameters.reset_gradients()
    loss = model.loss_and_gradient(*given)
    return loss, arrays.to_host(model.parameters.gradients.flat)


def batch(size: int, length: int) -> Any:
    return np.random.default_rng(1).integers(0, 11, (2, size, length))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "kind, options",
    [
        (nn.GPT, {}),
        (nn.GPT, {"microbatches": 2, "recompute": True}),
        (nn.GPT, {"microbatches": 2, "storage_dtype": np.float16}),
        (nn.GPT, {"shards": 3}),
        (nn.Llama, {"key_value_heads": 1, "head_norms": True}),
    ],
    ids=["gpt", "recomputed", "stored", "slices", "llama"],
)
def test_loss_and_gradient_are_those_in_blocks(cudnn: Any, half: Any, kind: Any, options: Any) -> None:
    given = batch(2, SIZES[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, gradient = run(model(half, kind, **options), *given)
    layers, micro = SIZES[3], options.get("microbatches", 1)
    passes = layers * micro * options.get("shards", 1)
    # One of each is the proof.
    assert fake_cudnn.executed.count("attention") == passes * (2 if options.get("recompute") else 1) + 1
    assert fake_cudnn.executed.count("gradient") == passes + 1
    cudnn["library"] = None
    other_loss, other_gradient = run(model(half, kind, **options), *given)
    precision = float(ml_dtypes.finfo(half).eps) / 2
    assert loss == pytest.approx(other_loss, rel=2 * precision)
    error = np.linalg.norm(gradient - other_gradient) / np.linalg.norm(other_gradient)
    assert 0 < error < 8 * precision


def test_without_half_precision_it_is_not_used() -> None:
    run(model(None), *batch(2, 40))
    assert not fake_cudnn.executed


def test_text_generation_does_not_build_a_graph_for_every_length() -> None:
    made = model(np.float16)
    assert len(made.generate([1, 2], 4)) == 6
    assert not fake_cudnn.executed


def test_wrong_results_are_found_and_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cudnn, "factor", 1.1)
    made = model(np.float16)
    with pytest.warns(RuntimeWarning, match="differs by .* from that by products; attention is computed by matrix"):
        loss, _ = run(made, *batch(2, 40))
    assert fake_cudnn.executed == ["attention", "gradient"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model(ml_dtypes.bfloat16), *batch(2, 40))
        assert run(made, *batch(2, 40))[0] == loss


def test_a_failure_is_warned_of_and_blocks_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr(fake_cudnn.pygraph, "execute", fail)
    with pytest.warns(RuntimeWarning, match="attention fails .CUDNN_STATUS_EXECUTION_FAILED"):
        run(model(np.float16), *batch(2, 40))


@pytest.mark.parametrize("width, warns", [(4, False), (136, False), (40, True)])
def test_heads_that_cudnn_does_not_take(width: int, warns: bool) -> None:
    made = model(np.float16, sizes=(11, 30, width, 1, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(made, *batch(1, 20))
    assert [each.category for each in caught] == [RuntimeWarning] * warns
    assert not fake_cudnn.executed


def test_no_more_graphs_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_attention, "MOST_SHAPES", 3)
    made = model(np.float16)
    for length in (10, 20, 30, 40):
        made.loss(*batch(1, length))
    assert fake_cudnn.executed.count("attention") == 1 + 2 * SIZES[3]  # one graph is that of the proof
