"""The split of traced steps in matrix products, communication and the rest, with a clock of the test's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard
from mpishard.cli import main
from mpishard.comm.ledger import Ledger
from mpishard.nn.decoder import TracedProducts
from mpishard.nn.layers import Layer
from mpishard.nn.products import make_matmul, shared_operand
from mpishard.record.summary import TimeSplit, Traced, read_trace, split_times


def spans_of(rank: int, step: int, *parts: tuple[str, float, float]) -> list[Traced]:
    return [Traced(rank, step, kind, kind, start, seconds) for kind, start, seconds in parts]


def test_parts_add_up_and_no_moment_counts_twice() -> None:
    spans = spans_of(
        1,
        4,
        ("step", 8.0, 16.0),
        ("function", 9.0, 10.0),
        ("F", 9.0, 4.0),
        ("product", 9.0, 2.0),
        ("product", 11.0, 1.0),
        ("data", 12.0, 2.0),
        ("node", 13.0, 2.0),  # begins within the last
        ("product", 14.5, 1.0),  # half of it within the last
        ("world", 23.0, 4.0),  # ends after the step
    )
    (split,) = split_times(spans)
    assert split == TimeSplit(1, 16.0, 3.5, 4.0)
    assert split.rest == 8.5


def test_the_split_is_the_mean_of_a_ranks_steps() -> None:
    spans = [
        *spans_of(0, 1, ("step", 0.0, 2.0), ("product", 0.5, 1.0)),
        *spans_of(0, 2, ("step", 2.0, 4.0), ("data", 3.0, 1.0)),
        *spans_of(1, 1, ("step", 0.0, 3.0)),
    ]
    assert split_times(spans) == [TimeSplit(0, 3.0, 0.5, 0.5), TimeSplit(1, 3.0, 0.0, 0.0)]


class Clock:
    """Time passes in products and where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.products: list[int] = []  # by step
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def slow(self, matmul: Any) -> Any:
        def product(a: Any, b: Any, out: Any) -> Any:
            self.now += 1.0
            self.products[-1] += 1
            return matmul(a, b, out=out)

        return product


def layers_of(model: mpishard.nn.GPT) -> Iterator[Layer]:
    found: list[Any] = [unit for chunk in model.chunks for unit in chunk.units]
    while found:
        layer = found.pop()
        yield layer
        found += layer.children


def test_products_count_in_traced_steps_and_nothing_is_called_in_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = np.arange(16).reshape(2, 8) % 5
    with mpishard.Mesh() as mesh:
        model = mpishard.nn.GPT(5, 8, 4, 2, 2, mesh=mesh)
        clock = Clock(monkeypatch)
        for layer in layers_of(model):
            layer.matmul = clock.slow(layer.matmul)
        plain = [layer.matmul for layer in layers_of(model)]
        with mpishard.RunRecord(tmp_path, mesh, trace=(2, 3)) as record:
            record.begin()
            for step in (1, 2, 3, 4):
                clock.products.append(0)
                model.loss_and_gradient(tokens, tokens)
                # The first step is noted too, since a trace is asked for, and then left out.
                assert ([layer.matmul for layer in layers_of(model)] == plain) == (step == 4)
                clock.now += 0.5
                record.step(step, loss=1.0)
    assert min(clock.products) > 0
    (split,) = split_times(read_trace(tmp_path))
    count = sum(clock.products[1:3]) / 2
    assert (split.products, split.communication) == (pytest.approx(count, abs=1e-3), 0.0)
    assert split.step == pytest.approx(count + 0.5, abs=1e-3)
    assert main(["trace", str(tmp_path)]) == 0
    head, row = capsys.readouterr().out.splitlines()[1:]
    assert head.split() == ["rank", "ms/step", "products", "communication", "rest"]
    assert row.split()[:2] == ["0", f"{(count + 0.5) * 1e3:.2f}"]
    assert row.split()[-2:] == ["500.00", f"({0.5 / (count + 0.5):.0%})"]


def test_an_operand_is_rounded_once_in_a_traced_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    monkeypatch.setattr("mpishard.backend.products.has_fast_bfloat16", lambda: True)
    layer, ledger = Layer("layer"), Ledger()
    layer.module, layer.matmul = np, make_matmul(np, ml_dtypes.bfloat16)
    operand = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
    bits = shared_operand(layer.matmul, operand).copy()
    assert bits.dtype == np.uint16
    ledger.spans = []
    TracedProducts([layer], ledger).follow_trace()
    assert not hasattr(layer.matmul, "shared")
    np.testing.assert_array_equal(shared_operand(layer.matmul, operand), bits)
