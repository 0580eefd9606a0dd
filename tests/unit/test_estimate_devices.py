"""Estimates of memory on devices against models on the stand-in: blocks of attention, operands in half precision."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import standin

from mpishard import nn
from mpishard.backend import array as arrays
from mpishard.estimate import estimate
from mpishard.nn import device_attention, products

MODULE = arrays.module_of(standin.empty(1))
LENGTH = 32


class Rounded:
    """Bytes of operands that are rounded and not freed, apart from weights that stay to the end of the step."""

    def __init__(self) -> None:
        self.weights = self.most_operands = 0
        self._alive: list[weakref.ref[Any]] = []

    def note(self, halves: Any) -> None:
        arrays.ready(halves)  # the stand-in keeps operands until its work is done
        held = products._thread.weights.kept
        self.weights = sum(each.nbytes for each in held)
        known = {id(each) for each in held}
        self._alive = [each for each in self._alive if each() is not None]
        self._alive.append(weakref.ref(halves))
        others = {id(each()): each().nbytes for each in self._alive if id(each()) not in known}  # type: ignore[union-attr]
        self.most_operands = max(self.most_operands, sum(others.values()))


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rounded]:
    noted = Rounded()
    plain = products.DeviceProduct.rounded

    def round_and_note(self: Any, array: Any) -> Any:
        halves = plain(self, array)
        if halves is not array:
            noted.note(halves)
        return halves

    results = device_attention.DeviceMixing._results_for_products

    def note_results(self: Any, scores: Any) -> Any:
        found = results(self, scores)
        if found[0] is not scores:
            noted.note(found[0])
        return found

    monkeypatch.setattr(products.DeviceProduct, "rounded", round_and_note)
    monkeypatch.setattr(device_attention.DeviceMixing, "_results_for_products", note_results)
    yield noted


def step(half: Any, kind: Any = nn.GPT, **options: Any) -> Any:
    sizes = {"key_value_heads": 2} if kind is nn.Llama else {}
    model = kind(72, LENGTH, 32, 3, 4, module=MODULE, compute_dtype=half, dtype=np.float32, **sizes, **options)
    tokens = np.zeros((5, LENGTH), np.int64)
    model.loss_and_gradient(tokens, tokens)
    return model


@pytest.mark.parametrize("half", [None, np.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(
    "kind, options",
    [
        (nn.GPT, {}),
        (nn.GPT, {"microbatches": 2, "tied": True}),
        (nn.GPT, {"recompute": True}),
        (nn.GPT, {"shards": 2}),
        (nn.Llama, {}),
        (nn.Llama, {"microbatches": 2}),
    ],
    ids=["gpt", "tied", "recomputed", "slices", "llama", "llama with micro-batches"],
)
def test_a_step_holds_what_is_estimated(rounded: Rounded, half: Any, kind: Any, options: dict[str, Any]) -> None:
    model = step(half, kind, **options)
    of_work = {name: value for name, value in options.items() if name in ("microbatches", "recompute")}
    found = estimate(model.architecture, batch=5, device=True, half=half is not None, **of_work).memory
    assert found.parameters == model.parameters.nbytes
    assert found.rounded == rounded.weights
    measured = model.activation_bytes + rounded.most_operands
    assert found.activations + found.scratch == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("most", [LENGTH**2 // 2, 3 * LENGTH**2, 9 * LENGTH**2])
def test_blocks_of_attention(rounded: Rounded, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(device_attention, "DEVICE_SCORES", most)
    monkeypatch.setattr(device_attention, "BLOCK", LENGTH // 2)
    monkeypatch.setattr("mpishard.estimate.memory.DEVICE_BLOCK", LENGTH // 2)
    model = step(np.float16)
    found = estimate(model.architecture, batch=5, device=True, half=True).memory
    measured = model.activation_bytes + rounded.most_operands
    assert found.activations + found.scratch == pytest.approx(measured, rel=0.02)
