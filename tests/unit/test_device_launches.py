"""Streams, events, copies and CUDA functions of a device: on the stand-in, and on CuPy where there is a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_functions import SOURCE
from devices import Device, chosen

from mpishard.backend import array as arrays
from mpishard.backend.cuda_source import CudaSource, launch


@pytest.fixture
def source(device: Device, tmp_path: Path) -> CudaSource:
    if not arrays.backend_of(device.empty(1)).compiles_cuda:
        pytest.skip("no C++ compiler, which the stand-in needs")
    path = tmp_path / "some.cu"
    path.write_text(SOURCE)
    return CudaSource(path)


def test_barriers_and_shuffles(source: CudaSource, device: Device) -> None:
    x = np.random.default_rng(0).standard_normal(1000)
    there, sums, top = device.put(x), device.zeros(4), device.zeros(64)
    launch(source.function("block_sums", REAL=np.float64, STORED=np.float64), 4, 256, there, sums, x.size)
    expected = [x[start : start + 256].sum() for start in range(0, 1000, 256)]
    np.testing.assert_allclose(arrays.to_host(sums), expected, rtol=1e-13)
    launch(source.function("largest_of_warp", REAL=np.float64, STORED=np.float64), 1, 64, there[:64], top)
    assert np.array_equal(arrays.to_host(top), np.repeat([x[:32].max(), x[32:64].max()], 32))


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_halves_are_those_of_numpy(source: CudaSource, device: Device, half: Any) -> None:
    """Every number of 16 bits, and numbers between them: ties, and what is too large or too small."""
    exact = np.arange(2**16, dtype=np.uint16).view(half).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        between = exact + (np.roll(exact, -1) - exact) / np.float32(2)
        x = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), between])
        expected = x.astype(half)
    stored = np.uint16 if half is ml_dtypes.bfloat16 else np.float16
    y, back = device.zeros(x.size, stored), device.zeros(x.size, np.float32)
    function = source.function("convert", REAL=np.float32, STORED=stored)
    launch(function, x.size // 256 + 1, 256, device.put(x), y, back, x.size)
    numbers = ~np.isnan(x)
    assert np.array_equal(arrays.to_host(y).view(np.uint16)[numbers], expected.view(np.uint16)[numbers])
    assert np.array_equal(arrays.to_host(back)[numbers], expected.astype(np.float32)[numbers])
    assert np.isnan(arrays.to_host(back)[~numbers]).all()


def test_scalars_arrive_in_their_types(source: CudaSource, device: Device) -> None:
    x = device.zeros(6)
    function = source.function("scalars", REAL=np.float32, STORED=np.float32)
    launch(function, 1, 1, x, -7, 2**40 + 1, 0.1, 0.1, True, 2**32 - 1)
    assert np.array_equal(arrays.to_host(x), [-7, 2**40 + 1, np.float32(0.1), 0.1, 1, 2**32 - 1])


def test_launches_are_in_the_order_of_their_stream(source: CudaSource, device: Device) -> None:
    function = source.function("block_sums", REAL=np.float32, STORED=np.float32)
    x, sums = device.put(np.ones(100, np.float32)), device.zeros(1, np.float32)
    device.be_late()
    launch(function, 1, 128, x, sums, x.size)
    x.fill(2)
    assert np.array_equal(arrays.to_host(sums), [100])
    launch(function, 0, 128, x, sums, x.size)
    assert np.array_equal(arrays.to_host(sums), [100])


def test_copies_on_another_stream_wait_for_an_event(device: Device) -> None:
    like = device.zeros(1000, np.float32)
    backend = arrays.backend_of(like)
    other, pinned = backend.new_stream(like), arrays.pinned_empty(1000, np.float32, like=like)
    arrays.ready(like)
    device.be_late()
    like.fill(1)
    computed = backend.record(like, backend.current_stream(like))
    assert not computed.done
    other.wait_event(computed)
    backend.start_to_host(like, pinned, other)
    copied = backend.record(like, other)
    copied.synchronize()
    assert computed.done and copied.done and (pinned == 1).all()
    pinned[:] = 2
    backend.start_to_device(pinned, like, other)
    back = backend.record(like, other)
    backend.current_stream(like).wait_event(back)
    assert (arrays.to_host(like + like) == 4).all()


def test_the_current_stream_is_the_one_that_was_entered(device: Device) -> None:
    like = device.zeros(4)
    backend = arrays.backend_of(like)
    other = backend.new_stream(like)
    arrays.ready(like)
    with other:
        assert backend.current_stream(like) == other
        like.fill(3)
        done = backend.record(like, other)
    assert backend.current_stream(like) != other
    done.synchronize()
    assert (arrays.to_host(like) == 3).all()


def test_addresses(device: Device) -> None:
    array = device.zeros(8, np.float32)
    backend = arrays.backend_of(array)
    assert backend.address(array[2:]) == backend.address(array) + 8
    assert arrays.overlap(array[:3], array[2:]) and not arrays.overlap(array[:2], array[2:])
    host = np.zeros(8, np.float32)
    assert not arrays.overlap(array, host) and not arrays.overlap(host, array)
    assert not arrays.overlap(array, array[3:3]) and not arrays.overlap(host, host[3:3])


@pytest.mark.usefixtures("chosen_device")
def test_files_of_tests_of_cuda_functions_make_arrays_of_every_kind() -> None:
    array = chosen.on_device(np.arange(4.0))
    assert isinstance(array, chosen.DeviceArray) and arrays.is_device(array)
    array += chosen.zeros(4)
    assert np.array_equal(arrays.to_host(array), np.arange(4))
    assert chosen.empty((2, 3), np.float32).shape == (2, 3)
