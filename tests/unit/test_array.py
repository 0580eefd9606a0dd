"""Device arrays, their streams and launches, and pinned memory: on the stand-in, and on CuPy where there is a GPU."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import standin
from cuda_functions import SOURCE
from devices import CUPY, Device, chosen, make_device

from mpishard.backend import array as arrays
from mpishard.backend import streams
from mpishard.backend.array import elementwise
from mpishard.backend.cuda_source import CudaSource, launch
from mpishard.backend.streams import PendingNumber, PinnedPool


@elementwise
def relax(p, g, /, rate):
    """Touches constants, a division and a conditional."""
    step = rate * g / 3 + 0.1
    p = p - (step if step > 0 else 2 * step)
    return p


def numpy_relax(p: np.ndarray, g: np.ndarray, rate: float) -> np.ndarray:
    real = p.dtype.type
    step = real(rate) * g / real(3) + real(0.1)
    return p - np.where(step > 0, step, real(2) * step)


@pytest.fixture(params=["numpy", "standin", "aware", CUPY])
def module(request: pytest.FixtureRequest) -> Any:
    """The module that makes arrays of one kind."""
    if request.param == "numpy":
        return np
    return make_device(request.param).module


def put(module: Any, host: np.ndarray) -> Any:
    """An array of `module` with the content of `host`."""
    device = module.empty(host.shape, host.dtype)
    arrays.copy_to_device(host, device)
    return device


def values(size: int, dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


# Kinds of arrays.


def test_kinds(module: Any) -> None:
    array = module.zeros(3, np.float32)
    assert arrays.is_array(array)
    assert arrays.is_device(array) == (module is not np)
    assert arrays.module_of(array) is module
    for nothing in (None, 1.0, [1.0], np.float32(1), "array"):
        assert not arrays.is_array(nothing) and not arrays.is_device(nothing)
    with pytest.raises(TypeError, match="got builtins.list"):
        arrays.module_of([1.0])
    host = np.ones(3)
    assert arrays.to_host(host) is host
    arrays.ready(host)
    assert arrays.device_count() >= 0


def test_subclasses_of_numpy_arrays_are_numpy(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "values", np.float64, "w+", shape=(4,))
    mapped[:] = 2
    assert arrays.module_of(mapped) is np
    relax(mapped, np.ones(4), 0.5)
    assert mapped[0] != 2


@pytest.mark.parametrize("size", [0, 1, 7, 5000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.float16])
def test_staging_keeps_every_bit(module: Any, size: int, dtype: Any) -> None:
    device = module.zeros(size, dtype)
    host = arrays.pinned_empty(size, dtype, like=device)
    assert isinstance(host, np.ndarray) and host.shape == (size,) and host.dtype == dtype
    host[:] = np.arange(size) % 1000
    arrays.copy_to_device(host, device)
    back = arrays.pinned_empty(size, dtype, like=device)
    arrays.copy_to_host(device, back)
    assert np.array_equal(back, np.arange(size) % 1000)
    assert np.array_equal(arrays.to_host(device), np.arange(size) % 1000)


def test_staging_slices_and_shapes(module: Any) -> None:
    device = put(module, np.arange(12.0))
    part = np.empty((2, 3))
    arrays.copy_to_host(device[3:9].reshape(2, 3), part)
    assert np.array_equal(part, np.arange(3.0, 9.0).reshape(2, 3))
    arrays.copy_to_device(-part, device[:6].reshape(2, 3))
    assert np.array_equal(arrays.to_host(device)[:7], [-3, -4, -5, -6, -7, -8, 6])


def test_staging_refuses_what_does_not_fit(module: Any) -> None:
    device = module.zeros(4, np.float64)
    with pytest.raises(ValueError, match=r"float64\(4,\) .*float64\(1,\)"):
        arrays.copy_to_device(np.ones(1), device)
    with pytest.raises(ValueError, match=r"float64\(4,\) .*float32\(4,\)"):
        arrays.copy_to_host(device, np.ones(4, np.float32))
    with pytest.raises(TypeError, match="array, got list"):
        arrays.copy_to_device([1.0] * 4, device)  # type: ignore[arg-type]


def test_new_arrays_are_like_others(module: Any) -> None:
    like = module.zeros(1, np.float32)
    fresh = arrays.empty(5, np.float64, like=like)
    assert arrays.module_of(fresh) is module and fresh.shape == (5,) and fresh.dtype == np.float64
    zeros = arrays.zeros((2, 3), np.float32, like=like)
    assert np.array_equal(arrays.to_host(zeros), np.zeros((2, 3)))


# The stand-in itself: what the tests of device paths rest on.


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in another process, with this one's path."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=variables, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize("touch", ["print(array._memory.bytes[0])", "array._memory.bytes[0] = 1"])
def test_touching_the_stand_in_kills_the_process(touch: str) -> None:
    done = run(f"import standin\narray = standin.zeros(4)\nprint('made', flush=True)\n{touch}")
    assert done.stdout == "made\n" and done.returncode == -signal.SIGSEGV


def test_the_stand_in_does_not_turn_into_a_numpy_array() -> None:
    with pytest.raises(TypeError, match="device memory was handed to NumPy"):
        np.asarray(standin.zeros(4))
    with pytest.raises(TypeError):
        memoryview(standin.zeros(4))


def test_the_stand_in_raises_where_copies_of_cupy_are_not_those_of_numpy() -> None:
    array = standin.on_device(np.arange(8, dtype=np.float32))
    array[...] = array
    array[:4] = array[4:]
    array.reshape(4, 2)[:, 0] = array[1:5]
    with pytest.raises(ValueError, match="float32 and int32 at one address"):
        array.view(np.int32)[...] = array
    with pytest.raises(ValueError, match="the two overlap"):
        array[1:] = array[:-1]
    with pytest.raises(RuntimeError, match="non-contiguous ndarray"):
        arrays.copy_to_host(array, np.zeros((8, 2), np.float32)[:, 0])
    with pytest.raises(RuntimeError, match="Cannot set to non-contiguous array"):
        arrays.copy_to_device(np.zeros(4, np.float32), array[::2])


def seen_by_mpi(array: Any) -> np.ndarray:
    """What a CUDA-aware MPI library would send of `array` now."""
    address, _ = array.__cuda_array_interface__["data"]
    return np.frombuffer(ctypes.string_at(address, array.nbytes), array.dtype)


def test_work_is_not_done_before_ready() -> None:
    p, g = np.zeros(4, np.float32), np.ones(4, np.float32)
    array = standin.zeros(4, np.float32, kind=standin.AwareArray)
    relax(array, put(arrays.module_of(array), g), 0.3)
    assert not np.array_equal(seen_by_mpi(array), numpy_relax(p, g, 0.3))
    arrays.ready(array)
    assert np.array_equal(seen_by_mpi(array), numpy_relax(p, g, 0.3))


def test_copies_are_in_stream_order(module: Any) -> None:
    p, g = values(100, np.float64), values(100, np.float64, 1)
    device, other = put(module, p), put(module, g)
    for _ in range(3):
        relax(device, other, 0.5)
        p = numpy_relax(p, g, 0.5)
    assert np.array_equal(arrays.to_host(device), p)


def test_cupy_is_not_imported_without_one_of_its_arrays() -> None:
    done = run(
        """
        import sys, numpy as np
        from mpishard.backend import array
        from mpishard.optim.rules import AdamW
        a = [np.ones(5) for _ in range(4)]
        AdamW().update(a[0], a[1], a[2:], 1)
        array.is_device(a[0]), array.is_array(object()), array.device_count()
        assert not [name for name in sys.modules if name.startswith("cupy")]
        """
    )
    assert done.returncode == 0, done.stderr


# Kernels.


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 3, 16, 1003])
def test_kernel_matches_numpy_to_the_bit(module: Any, dtype: Any, size: int) -> None:
    """Would fail in float32 if a constant or a scalar promoted anything to float64."""
    p, g = values(size, dtype), values(size, dtype, 1)
    device, other = put(module, p), put(module, g)
    relax(device, other, 0.3)
    assert np.array_equal(arrays.to_host(device), numpy_relax(p, g, 0.3))
    assert np.array_equal(arrays.to_host(other), g)


def test_kernel_works_in_place_on_slices_and_may_read_what_it_writes(module: Any) -> None:
    p, g = values(50, np.float32), values(50, np.float32, 1)
    device, other = put(module, p), put(module, g)
    relax(device[7:31], other[7:31], 0.3)
    p[7:31] = numpy_relax(p[7:31], g[7:31], 0.3)
    assert np.array_equal(arrays.to_host(device), p)
    relax(device, device, 0.3)
    assert np.array_equal(arrays.to_host(device), numpy_relax(p, p, 0.3))


def test_kernel_refuses_what_does_not_fit(module: Any) -> None:
    p, g = module.zeros(4, np.float32), module.zeros(4, np.float32)
    with pytest.raises(TypeError, match="relax .*p, g, rate, got 2"):
        relax(p, g)
    with pytest.raises(TypeError, match="p is float32 and g is float64"):
        relax(p, module.zeros(4, np.float64), 0.3)
    with pytest.raises(TypeError, match="p is int64 and p is int64"):
        relax(module.zeros(4, np.int64), g, 0.3)
    with pytest.raises(ValueError, match=r"p .*\(4,\).*g .*\(3,\)"):
        relax(p, module.zeros(3, np.float32), 0.3)
    with pytest.raises(ValueError, match=r"p has shape \(2, 2\)"):
        relax(p.reshape(2, 2), g.reshape(2, 2), 0.3)
    with pytest.raises(TypeError, match="got builtins.list"):
        relax([1.0], g, 0.3)
    assert np.array_equal(arrays.to_host(p), np.zeros(4))


def test_kernel_refuses_gaps_read_only_arrays_and_several_kinds() -> None:
    p, g = np.zeros(8), np.zeros(4)
    with pytest.raises(TypeError, match="p is a numpy.ndarray.*g is a standin.DeviceArray"):
        relax(g, standin.zeros(4), 0.3)
    with pytest.raises(ValueError, match="with gaps in memory"):
        relax(p[::2], g, 0.3)
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="relax changes p.*read-only"):
        relax(fixed, g, 0.3)
    relax(g, fixed, 0.3)
    assert np.array_equal(g, numpy_relax(np.zeros(4), np.zeros(4), 0.3))


# The cache of compiled kernels.

KERNEL = """
from mpishard.backend.array import elementwise

@elementwise
def shrink(p, /, rate):
    p = p - rate * p * 0.5
    return p
"""
USE = "import sys; sys.path[:0] = [{!r}]; import kernel, numpy; p = numpy.ones(5); kernel.shrink(p, 0.5); print(p[0])"


def use_kernel(folder: Path, **environment: str) -> tuple[float, str]:
    """(result, what Numba's cache said of this kernel) of a fresh process that uses ``kernel.py`` in `folder`."""
    done = run(USE.format(str(folder)), NUMBA_DEBUG_CACHE="1", **environment)
    assert done.returncode == 0, done.stderr
    *lines, result = done.stdout.splitlines()
    return float(result), "\n".join(line for line in lines if "kernel.shrink" in line)


@pytest.mark.full
def test_kernels_are_cached_and_go_stale_with_their_file(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text(KERNEL)
    result, log = use_kernel(tmp_path)
    assert result == 0.75 and "data saved" in log
    result, log = use_kernel(tmp_path)
    assert result == 0.75 and "data loaded" in log and "saved" not in log
    source.write_text(KERNEL.replace("0.5", "0.25"))
    result, log = use_kernel(tmp_path)
    assert result == 0.875 and "data saved" in log and "data loaded" not in log


@pytest.mark.full
def test_kernels_work_where_no_cache_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    (tmp_path / "__pycache__").write_text("a file where the cache's folder would be")
    elsewhere = tmp_path / "user"
    result, log = use_kernel(tmp_path, XDG_CACHE_HOME=str(elsewhere))
    assert result == 0.75 and str(elsewhere) in log and "data saved" in log
    nowhere = str(tmp_path / "kernel.py")
    result, log = use_kernel(tmp_path, XDG_CACHE_HOME=nowhere)
    assert result == 0.75 and not log


@pytest.mark.full
def test_processes_that_start_together_all_get_their_kernel(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", USE.format(str(tmp_path))]
    started = [subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=100)[0].strip() for process in started] == ["0.75"] * 3


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
        x = np.concatenate(
            [exact, np.nextafter(exact, np.float32(np.inf)), between, np.nextafter(between, np.float32(0))]
        )
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


def test_streams_of_the_stand_in_wait_for_events_only() -> None:
    like, target = standin.zeros(4, np.float32), np.zeros(4, np.float32)
    backend = arrays.backend_of(like)
    arrays.ready(like)
    like.fill(1)
    computed, other = backend.record(like, backend.current_stream(like)), backend.new_stream(like)
    backend.start_to_host(like, target, other)
    other.synchronize()
    assert not target.any() and not computed.done  # nobody waited for the computation


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


# Pinned memory is used again, never while a copy reads it, and no more is kept than the limit.


@pytest.fixture
def like():
    array = standin.zeros(1000, np.uint8)
    arrays.ready(array)
    return array


def test_a_slab_is_used_again_for_what_fits_it(like):
    pool = PinnedPool()
    for small, large in ((0, 4096), (4097, 8192), (2**22, 2**21 + 1), (2**22 + 1, 5 * 2**20), (9 * 2**20, 10 * 2**20)):
        slab = pool.take(small, like)
        assert slab.bytes.size >= max(small, 1)
        pool.give(slab)
        assert pool.kept_bytes >= slab.bytes.size
        assert pool.take(large, like) is slab and slab.free is None
    assert pool.kept_bytes == 0
    assert pool.take(100, like) is not pool.take(100, like)


def test_large_slabs_have_few_sizes_and_little_of_them_is_not_used(like):
    wanted = range(2**22 + 1, 2**26, 2**17)
    sizes = [PinnedPool().take(size, like).bytes.size for size in wanted]
    assert len(set(sizes)) == 4 * 4
    assert all(size <= found < 1.25 * size for size, found in zip(wanted, sizes, strict=True))


def test_memory_that_a_copy_reads_is_not_given_out_as_free(like, monkeypatch):
    pool, backend = PinnedPool(), arrays.backend_of(like)
    stream = backend.new_stream(like)
    slab = pool.take(1000, like)
    slab.bytes[:] = 7
    for _ in range(3):
        stream.launch(lambda: None)
    backend.start_to_device(slab.bytes[:1000], like, stream)
    copied = backend.record(like, stream)
    pool.give(slab, copied)
    other = pool.take(1000, like)
    assert other is not slab and other.free is None
    monkeypatch.setattr(streams, "KEPT_BYTES", 4096)  # no more than that: then the caller waits
    assert pool.take(1000, like) is slab and slab.free is copied
    pool.give(slab, copied)
    copied.synchronize()
    assert (arrays.to_host(like) == 7).all()
    assert pool.take(1000, like) is slab and slab.free is None


def test_no_more_is_kept_than_the_limit(like, monkeypatch):
    monkeypatch.setattr(streams, "KEPT_BYTES", 3 * 8192)
    pool, backend = PinnedPool(), arrays.backend_of(like)
    slabs = [pool.take(size, like) for size in (8000, 8000, 8000, 8000, 16000)]
    for slab in slabs[:3]:
        pool.give(slab)
    assert pool.kept_bytes == 3 * 8192
    pool.give(slabs[4])  # the largest goes first
    assert pool.kept_bytes == 3 * 8192 and pool.take(16000, like) is not slabs[4]
    stream = backend.new_stream(like)
    backend.start_to_device(slabs[3].bytes[:1000], like, stream)
    copied = backend.record(like, stream)
    pool.give(slabs[3], copied)
    assert pool.kept_bytes == 3 * 8192
    copied.synchronize()
    assert slabs[3] in [pool.take(8000, like) for _ in range(3)]  # the copy read it: another has gone


def test_garbage_in_a_cycle_destroys_no_event_that_the_pool_keeps(device, monkeypatch):
    """CuPy's events are destroyed by `__del__`, which Python calls of all objects of a cycle."""
    array = device.put(np.float64([3]))
    pool, backend = streams.copy_streams(array).pinned, arrays.backend_of(array)
    destroyed: list[int] = []
    kind = type(backend.record(array, backend.current_stream(array)))
    number = PendingNumber(array)
    assert float(number) == 3
    copied = id(number._copied)
    monkeypatch.setattr(kind, "__del__", lambda event: destroyed.append(id(event)), raising=False)
    number.itself = number
    del number
    gc.collect()
    kept = {id(slab.free) for slabs in pool._kept.values() for slab in slabs if slab.free is not None}
    assert copied in kept and not kept & set(destroyed)


def test_streams_are_those_of_the_device(like):
    assert streams.copy_streams(like) is streams.copy_streams(standin.zeros(3))
    assert streams.copy_streams(like) is not streams.copy_streams(standin.zeros(3, kind=standin.AwareArray))


def test_copies_are_queued_together_and_waited_for_once(monkeypatch):
    sources = [standin.zeros(5), standin.zeros(0), standin.zeros(3)]
    targets = [np.empty(each.size) for each in sources]
    for number, source in enumerate(sources):
        source.fill(number + 1)
    waits = []
    usual = standin.Event.synchronize
    out = streams.copy_streams(sources[0]).out
    before = out.queued

    def synchronize(event):
        waits.append(out.queued - before)
        usual(event)

    monkeypatch.setattr(standin.Event, "synchronize", synchronize)
    host = np.arange(4.0), np.empty(4)
    streams.copy_together([*zip(sources, targets, strict=True), host])
    assert waits[0] == 3  # a wait for the computation and two copies are queued before the host waits for anything
    assert (targets[0] == 1).all() and (targets[2] == 3).all() and np.array_equal(*host)
