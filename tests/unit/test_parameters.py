"""Flat parameters made of the tensors of others."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import standin

import mpishard
from mpishard import ParameterSpec
from mpishard.backend.array import aligned_copy, joined
from mpishard.parameters.flat import FlatParameters


def test_named_tensors_become_views_of_one_array():
    tensors = {"weight": np.arange(6.0).reshape(2, 3).T, "scale": np.array(7.0), "bias": np.zeros(0)}
    parameters = FlatParameters.of(tensors)
    assert [(spec.name, spec.shape) for spec in parameters.specs] == [("weight", (3, 2)), ("scale", ()), ("bias", (0,))]
    assert np.array_equal(parameters.flat, [0, 3, 1, 4, 2, 5, 7])
    parameters.flat[...] += 1
    for name, tensor in tensors.items():
        assert np.array_equal(parameters[name], tensor + 1)


def test_a_module_of_pytorch_goes_on_with_the_views():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed (extra: peers)")
    module = torch.nn.Linear(3, 2)
    parameters = FlatParameters.of({name: p.detach() for name, p in module.named_parameters()})
    assert parameters.dtype == np.float32 and list(parameters) == ["weight", "bias"]
    for name, p in module.named_parameters():
        assert np.array_equal(parameters[name], p.detach())
        p.data = torch.from_numpy(parameters[name])
    parameters.flat[...] = 1
    assert module(torch.ones(3)).tolist() == [4, 4]


def test_a_dictionary_of_jax_is_taken():
    jnp = pytest.importorskip("jax.numpy", reason="JAX is not installed")
    parameters = FlatParameters.of({"weight": jnp.ones((2, 2)), "bias": jnp.zeros(2)})
    assert parameters.dtype == np.float32 and parameters.flat.tolist() == [1, 1, 1, 1, 0, 0]
    shared = jnp.from_dlpack(parameters.flat)
    assert shared.unsafe_buffer_pointer() == parameters.flat.ctypes.data


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [(("float32", "float64"), "got float32 and float64"), (("float16",), "got float16"), (("int64",), "got int64")],
)
def test_other_dtypes_are_refused(dtypes, message):
    with pytest.raises(TypeError, match=message):
        FlatParameters.of({dtype: np.zeros(2, dtype) for dtype in dtypes})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_copies_begin_at_64_bytes(size, dtype):
    array = np.arange(2 * size, dtype=dtype)[::2]
    copy = aligned_copy(array)
    assert (copy.ctypes.data % 64 == 0 or not size) and copy.flags.c_contiguous and copy.flags.writeable
    assert copy.dtype == dtype and np.array_equal(copy, array) and not np.shares_memory(copy, array)


def test_tensors_are_copied_once():
    """The memory that it takes is that of the flat array, which JAX can share."""
    tensors = {"a": np.arange(2.0e5).reshape(2, -1), "b": np.array(3.0), "c": np.zeros((0, 2))}
    tracemalloc.start()
    try:
        flat = FlatParameters.of(tensors).flat
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(flat, [*tensors["a"].reshape(-1), 3.0]) and flat.ctypes.data % 64 == 0
    assert peak < 1.5 * flat.nbytes


@pytest.mark.parametrize("module", ["cupy", None, 3])
def test_what_makes_no_arrays_is_refused(module: Any) -> None:
    with pytest.raises(TypeError, match=f"module is {module!r}; it must be the module numpy or cupy itself"):
        FlatParameters([ParameterSpec("a", (3,))], module=module)
    with pytest.raises(TypeError, match=f"module is {module!r}; "):
        mpishard.nn.GPT(16, 4, 4, 1, 2, module=module, compute_dtype=np.float16)


@pytest.mark.parametrize("take", [FlatParameters.over, aligned_copy, lambda array: joined([array, array])])
def test_arrays_on_another_gpu_are_refused(take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy would compute on the current one."""
    array = standin.zeros(3)
    take(array)
    monkeypatch.setattr(standin.StandIn, "device_number", lambda self, array: 1)
    with pytest.raises(ValueError, match=r"on GPU 1, but this thread computes on GPU 0: begin with cupy"):
        take(array)


def test_cupy_without_a_gpu_is_named_with_the_way_out() -> None:
    def get_device() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: too old")

    runtime = SimpleNamespace(getDevice=get_device)
    module = SimpleNamespace(__name__="cupy", zeros=np.zeros, cuda=SimpleNamespace(runtime=runtime))
    match = r"needs a GPU, and CuPy finds none \(cudaErrorInsufficientDriver: too old\); `mpishard info` shows"
    for half in (None, np.float16):
        with pytest.raises(RuntimeError, match=match):
            mpishard.nn.GPT(16, 4, 4, 1, 2, module=module, compute_dtype=half)
    with pytest.raises(RuntimeError, match=match):
        FlatParameters([ParameterSpec("a", (3,))], module=module)
