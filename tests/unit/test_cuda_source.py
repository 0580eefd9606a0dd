"""CUDA sources: what their signatures say, the prelude, and the compiler for the host that the other tests rest on."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path
from typing import Any

import cuda_on_host
import ml_dtypes
import numpy as np
import pytest
import standin
from cuda_functions import SOURCE

from mpishard.backend import array as arrays
from mpishard.backend.cuda_source import CudaSource, launch

pytestmark = pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def source(tmp_path: Path) -> CudaSource:
    path = tmp_path / "some.cu"
    path.write_text(SOURCE)
    return CudaSource(path)


def on_host(function: Any, blocks: int, threads: int, *arguments: Any) -> None:
    cuda_on_host.run(function, blocks, threads, function.converted(arguments))


def test_signatures(source: CudaSource) -> None:
    assert list(source.functions) == [
        "block_sums",
        "largest_of_warp",
        "convert",
        "without_barrier",
        "two_barriers",
        "scalars",
    ]
    function = source.function("block_sums", REAL=np.float64, STORED=np.uint16)
    found = [(each.name, each.type, each.is_array) for each in function.parameters]
    assert found == [("x", "bfloat16", True), ("sums", "double", True), ("count", "long long", False)]
    assert function is source.function("block_sums", REAL=np.float64, STORED=np.uint16)
    assert function.options == ("-std=c++17", "-DREAL=double", "-DSTORED=bfloat16")


def test_arguments_are_checked_and_converted(source: CudaSource) -> None:
    function = source.function("block_sums", REAL=np.float32, STORED=np.float32)
    x = np.zeros(3, np.float32)
    *_, count = function.converted((x, x, 3))
    assert type(count) is np.int64
    with pytest.raises(TypeError, match="takes the arguments x, sums, count, got 2 of them"):
        function.converted((x, x))
    with pytest.raises(TypeError, match="block_sums takes sums as float32, got float64"):
        function.converted((x, np.zeros(3), 3))


@pytest.mark.parametrize("backwards", ["", "1"])
def test_barriers_and_shuffles(source: CudaSource, backwards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backwards:
        monkeypatch.setenv("MPISHARD_CUDA_BACKWARDS", backwards)
    x = np.random.default_rng(0).standard_normal(1000)
    sums = np.zeros(4)
    on_host(source.function("block_sums", REAL=np.float64, STORED=np.float64), 4, 256, x, sums, x.size)
    np.testing.assert_allclose(sums, [x[start : start + 256].sum() for start in range(0, 1000, 256)], rtol=1e-13)
    top = np.zeros(64)
    on_host(source.function("largest_of_warp", REAL=np.float64, STORED=np.float64), 1, 64, x[:64], top)
    assert np.array_equal(top, np.repeat([x[:32].max(), x[32:64].max()], 32))


def test_a_missing_barrier_shows(source: CudaSource, monkeypatch: pytest.MonkeyPatch) -> None:
    function = source.function("without_barrier", REAL=np.float32, STORED=np.float32)
    found = []
    for backwards in (False, True):
        if backwards:
            monkeypatch.setenv("MPISHARD_CUDA_BACKWARDS", "1")
        x = np.zeros(64, np.int32)
        on_host(function, 1, 64, x)
        found.append(x)
    assert not np.array_equal(*found)


def test_threads_at_different_barriers_end_the_process(source: CudaSource) -> None:
    function = source.function("two_barriers", REAL=np.float32, STORED=np.float32)
    child = multiprocessing.get_context("fork").Process(
        target=on_host, args=(function, 1, 64, np.zeros(64, np.int32)), daemon=True
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGABRT


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_halves_are_those_of_numpy(source: CudaSource, half: Any) -> None:
    """Every number of 16 bits, and numbers between them: ties, and what is too large or too small."""
    exact = np.arange(2**16, dtype=np.uint16).view(half).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        neighbours = np.nextafter(exact, np.float32(np.inf))
        between = exact + (np.roll(exact, -1) - exact) / np.float32(2)
        x = np.concatenate([exact, neighbours, between, np.nextafter(between, np.float32(0))])
        expected = x.astype(half)
    stored = np.uint16 if half is ml_dtypes.bfloat16 else np.float16
    y, back = np.zeros(x.size, stored), np.zeros_like(x)
    on_host(source.function("convert", REAL=np.float32, STORED=stored), x.size // 256 + 1, 256, x, y, back, x.size)
    numbers = ~np.isnan(x)
    assert np.array_equal(y.view(np.uint16)[numbers], expected.view(np.uint16)[numbers])
    assert np.array_equal(np.isnan(back), np.isnan(x)) and np.array_equal(back[numbers], y.view(half)[numbers])


def test_launches_on_the_stand_in_wait_for_its_stream(source: CudaSource) -> None:
    x, sums = standin.on_device(np.ones(100, np.float32)), standin.zeros(1, np.float32)
    launch(source.function("block_sums", REAL=np.float32, STORED=np.float32), 1, 128, x, sums, x.size)
    x.fill(2)
    assert np.array_equal(arrays.to_host(sums), [100])
    launch(source.function("block_sums", REAL=np.float32, STORED=np.float32), 0, 128, x, sums, x.size)
    assert np.array_equal(arrays.to_host(sums), [100])


def test_streams_of_the_stand_in_wait_for_events_only() -> None:
    like = standin.zeros(4, np.float32)
    backend = arrays.backend_of(like)
    arrays.ready(like)
    like.fill(1)
    computed = backend.record(like, backend.current_stream(like))
    other, target = backend.new_stream(like), np.zeros(4, np.float32)
    backend.start_to_host(like, target, other)
    other.synchronize()
    assert not target.any() and not computed.done  # nobody waited for the computation
    other.wait_event(computed)
    backend.start_to_host(like, target, other)
    copied = backend.record(like, other)
    assert not copied.done
    copied.synchronize()
    assert computed.done and target.all()
    with other:
        assert backend.current_stream(like) is other
    assert backend.current_stream(like) is not other
